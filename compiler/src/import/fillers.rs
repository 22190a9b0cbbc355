//! What converters write where an ONNX operator has an operand that its framework has not: zeros to add, ones to multiply by. As they are
//! in the file, they would train.
//!
//! A recurrent cell of Keras has one bias, ONNX' two: tf2onnx makes the second one zeros, and writes the zeros that sequences begin with.
//! A group norm of Paddle is an instance norm by ones and zeros, and then a product with its own gain. A batch norm without gain has ones,
//! as a fresh one has; where its running mean has moved, a gain would have, too.

use std::collections::{BTreeMap, BTreeSet};

use super::flatten::Flat;
use super::gains::{PASSING, Producers};
use super::known::Known;
use super::model::Model;
use super::node::{Node, ValueId};
use super::tensor::Tensor;

/// Converters from frameworks whose recurrent cells have one bias, where ONNX' second one adds to the same sums.
const ONE_BIAS: &[&str] = &["tf2onnx", "keras2onnx"];
/// What gives a tensor on, each element once.
const MOVING: &[&str] = &["Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze"];

#[derive(Clone, Debug, Default)]
pub struct Fillers {
    /// Tensors that are nothing else, and the number that they repeat.
    pub whole: BTreeMap<String, f64>,
    /// Those that may be one.
    pub perhaps: BTreeSet<String>,
    /// Biases of recurrent layers of which the second half is one, and the values that are these.
    pub halves: BTreeSet<String>,
    biases: BTreeSet<ValueId>,
}

impl Fillers {
    /// Those of a file that no exporter of PyTorch's wrote.
    pub(super) fn of(model: &Model, flat: &Flat) -> Fillers {
        let mut readers: BTreeMap<ValueId, Vec<&Node>> = BTreeMap::new();
        for (node, id) in flat.nodes.iter().flat_map(|node| node.reads().map(move |id| (node, id))) {
            readers.entry(id).or_default().push(node);
        }
        let seen = Seen { model, flat, producers: Producers::of(model, flat), readers };
        let perhaps = flat.nodes.iter().flat_map(|node| seen.idle(node)).collect();
        let mut fillers = Fillers { whole: seen.whole(), perhaps, ..Fillers::default() };
        if ONE_BIAS.contains(&model.proto.producer_name()) {
            for bias in flat.nodes.iter().filter(|node| adds_twice(node)).filter_map(|node| *node.inputs.get(3)?) {
                if seen.has_zero_half(bias) {
                    fillers.halves.insert(seen.name(bias));
                    fillers.biases.insert(bias);
                }
            }
        }
        fillers
    }

    /// Whether the second half of a recurrent layer's biases is held constant.
    pub fn has_half(&self, biases: Option<ValueId>) -> bool {
        biases.is_some_and(|biases| self.biases.contains(&biases))
    }
}

/// Whether a node adds its two biases to each other: all but a GRU whose reset gate scales one.
fn adds_twice(node: &Node) -> bool {
    match node.op {
        "LSTM" | "RNN" => true,
        "GRU" => node.int_or("linear_before_reset", 0) == Ok(0),
        _ => false,
    }
}

struct Seen<'f, 'm> {
    model: &'m Model,
    flat: &'f Flat<'m>,
    producers: Producers<'f, 'm>,
    readers: BTreeMap<ValueId, Vec<&'f Node<'m>>>,
}

impl<'m> Seen<'_, 'm> {
    fn name(&self, id: ValueId) -> String {
        self.flat.values[self.producers.source(id, MOVING).0 as usize].clone()
    }

    /// The number that an input of a node has all over where it is a filler.
    fn neutral(&self, node: &Node<'m>, position: usize) -> Option<f64> {
        match (node.op, position) {
            ("GRU" | "LSTM" | "RNN", 5) | ("LSTM", 6) => Some(0.0),
            ("InstanceNormalization", 1) if self.is_of_groups(node) => Some(1.0),
            ("InstanceNormalization", 2) if self.is_of_groups(node) => Some(0.0),
            _ => None,
        }
    }

    /// The number that the tensor at an input repeats.
    fn number(&self, node: &Node<'m>, position: usize) -> Option<f64> {
        let tensor = self.producers.tensor(self.producers.source((*node.inputs.get(position)?)?, MOVING))?;
        uniform(&tensor, self.model)
    }

    /// Whether an instance norm, without gain and bias, is of groups of channels, with a gain of their own behind it.
    fn is_of_groups(&self, node: &Node<'m>) -> bool {
        let is_bare = (self.number(node, 1), self.number(node, 2)) == (Some(1.0), Some(0.0));
        let is_split = node.inputs[0].and_then(|x| self.producers.node(x)).is_some_and(|node| node.op == "Reshape");
        let is_gain = |id: ValueId| self.producers.tensor(self.producers.source(id, PASSING)).is_some();
        is_bare
            && is_split
            && self.all_read(node, |node| {
                node.op == "Reshape"
                    && self.all_read(node, |node| node.op == "Mul" && node.inputs.iter().flatten().any(|&id| is_gain(id)))
            })
    }

    /// Whether all that read the first result of a node are so.
    fn all_read(&self, node: &Node<'m>, is_so: impl Fn(&Node<'m>) -> bool) -> bool {
        let result = node.outputs.first().copied().flatten();
        let is_output = self.flat.outputs.iter().any(|(_, id)| Some(*id) == result);
        let readers = result.and_then(|result| self.readers.get(&result));
        !is_output && readers.is_some_and(|readers| readers.iter().all(|node| is_so(node)))
    }

    /// Gain and bias of a batch norm that are as fresh ones, though its running mean is not.
    fn idle(&self, node: &Node<'m>) -> Vec<String> {
        let has_moved = || {
            let mean = self.producers.tensor(self.producers.source((*node.inputs.get(3)?)?, MOVING))?;
            Some(!Known::read(&mean, &mean.bytes(self.model).ok()?).ok()?.numbers().all(|number| number == 0.0))
        };
        if node.op != "BatchNormalization" || has_moved() != Some(true) {
            return Vec::new();
        }
        let fresh = [(1, 1.0), (2, 0.0)].into_iter().filter(|&(position, fresh)| self.number(node, position) == Some(fresh));
        fresh.filter_map(|(position, _)| Some(self.name(node.inputs[position]?))).collect()
    }

    /// Tensors that every node which reads them reads as the same filler.
    fn whole(&self) -> BTreeMap<String, f64> {
        let mut read: BTreeMap<ValueId, Vec<Option<f64>>> = BTreeMap::new();
        let mut note = |id: ValueId, as_number| read.entry(self.producers.source(id, MOVING)).or_default().push(as_number);
        self.flat.outputs.iter().for_each(|&(_, id)| note(id, None));
        for node in &self.flat.nodes {
            node.captures.iter().for_each(|&id| note(id, None));
            let inputs = node.inputs.iter().enumerate().filter(|(position, _)| !(MOVING.contains(&node.op) && *position == 0));
            inputs.filter_map(|(position, id)| Some((position, (*id)?))).for_each(|(position, id)| {
                note(id, self.neutral(node, position));
            });
        }
        let filled = |(id, reads): (ValueId, Vec<Option<f64>>)| {
            let number = reads[0].filter(|_| reads.iter().all(|read| *read == reads[0]))?;
            let tensor = self.producers.tensor(id)?;
            let is_filled = uniform(&tensor, self.model) == Some(number);
            is_filled.then(|| (self.flat.values[id.0 as usize].clone(), number))
        };
        read.into_iter().filter_map(filled).collect()
    }

    /// Whether the second half of each row is zeros, or not there to be seen.
    fn has_zero_half(&self, id: ValueId) -> bool {
        let Some(tensor) = self.producers.tensor(self.producers.source(id, MOVING)) else { return false };
        let Some(bytes) = tensor.bytes(self.model).ok() else { return true };
        let row = tensor.shape.last().map_or(0, |&size| (size * tensor.dtype.bytes()) as usize);
        let half = |row: &[u8]| row[row.len() / 2..].iter().all(|&byte| byte == 0);
        row > 0 && tensor.dtype.is_float() && bytes.chunks(row).all(half)
    }
}

/// The number that all elements of a tensor are; none where its data are not there.
pub(super) fn uniform(tensor: &Tensor, model: &Model) -> Option<f64> {
    Known::read(tensor, &tensor.bytes(model).ok()?).ok()?.uniform()
}
