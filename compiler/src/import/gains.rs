//! Which tensors are gains of normalisations: `--init` sets them to one. The rule is that of `samples/init.py`.

use std::collections::{BTreeSet, HashMap};

use super::flatten::Flat;
use super::known::Known;
use super::model::Model;
use super::node::{Node, ValueId};
use super::ops::contrib;
use super::tensor::Tensor;

const NORMS: &[&str] =
    &["LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization"];
/// What passes a tensor on, in another shape or type.
pub(super) const PASSING: &[&str] = &["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Expand"];
const CASTS: &[&str] = &["Identity", "Cast", "CastLike"];

pub(super) struct Producers<'f, 'm> {
    model: &'m Model,
    flat: &'f Flat<'m>,
    node_of: HashMap<ValueId, usize>,
    tensors: HashMap<ValueId, &'f Tensor>,
}

/// Names of gains and running variances: input 1 of a normalisation (4 of BatchNormalization), or a factor of a Mul whose
/// other factor is a value divided by a square root, through casts and changes of shape.
pub(super) fn gains(model: &Model, flat: &Flat) -> BTreeSet<String> {
    let producers = Producers::of(model, flat);
    let mut found = BTreeSet::new();
    let mut add = |id: ValueId| found.insert(flat.values[producers.source(id, PASSING).0 as usize].clone());
    for node in &flat.nodes {
        let input = |position: usize| node.inputs.get(position).copied().flatten();
        let gain = if NORMS.contains(&node.op) { Some(1) } else { contrib::gain(node.op) };
        if let Some(gain) = gain {
            let variance = input(4).filter(|_| node.op == "BatchNormalization");
            input(gain).into_iter().chain(variance).for_each(|id| {
                add(id);
            });
        } else if let ("Mul", Some(a), Some(b)) = (node.op, input(0), input(1)) {
            for (factor, other) in [(a, b), (b, a)] {
                if producers.is_normalised(other) {
                    add(factor);
                }
            }
        }
    }
    found
}

/// Names of the running means and variances of batch normalisations.
pub(super) fn statistics(flat: &Flat) -> BTreeSet<String> {
    let norms = flat.nodes.iter().filter(|node| node.op == "BatchNormalization");
    let ids = norms.flat_map(|node| [3, 4].map(|position| node.inputs.get(position).copied().flatten())).flatten();
    let mut found: BTreeSet<ValueId> = ids.collect();
    for node in flat.nodes.iter().rev().filter(|node| node.op == "Identity") {
        if node.outputs.iter().flatten().any(|id| found.contains(id)) {
            found.extend(node.inputs.iter().flatten());
        }
    }
    found.into_iter().map(|id| flat.values[id.0 as usize].clone()).collect()
}

impl<'f, 'm> Producers<'f, 'm> {
    pub fn of(model: &'m Model, flat: &'f Flat<'m>) -> Producers<'f, 'm> {
        let mut node_of = HashMap::new();
        for (position, node) in flat.nodes.iter().enumerate() {
            node_of.extend(node.outputs.iter().flatten().map(|&id| (id, position)));
        }
        Producers { model, flat, node_of, tensors: flat.initializers.iter().map(|(id, tensor)| (*id, tensor)).collect() }
    }

    pub fn node(&self, id: ValueId) -> Option<&Node<'m>> {
        self.node_of.get(&id).map(|&position| &self.flat.nodes[position])
    }

    /// The value before operators in `through`.
    pub fn source(&self, mut id: ValueId, through: &[&str]) -> ValueId {
        while let Some(node) = self.node(id).filter(|node| through.contains(&node.op)) {
            match node.inputs.first().copied().flatten() {
                Some(input) => id = input,
                None => break,
            }
        }
        id
    }

    fn is_root(&self, id: Option<ValueId>) -> bool {
        id.and_then(|id| self.node(self.source(id, PASSING))).is_some_and(|node| node.op == "Sqrt")
    }

    fn is_reciprocal_root(&self, id: ValueId) -> bool {
        let Some(node) = self.node(self.source(id, PASSING)) else { return false };
        match node.op {
            "Reciprocal" | "Div" => self.is_root(node.inputs.last().copied().flatten()),
            "Pow" => node.inputs.get(1).copied().flatten().and_then(|id| self.number(id)) == Some(-0.5),
            _ => false,
        }
    }

    fn is_normalised(&self, id: ValueId) -> bool {
        // GroupNorm, as exporters decompose it.
        if self.node(self.source(id, PASSING)).is_some_and(|node| node.op == "InstanceNormalization") {
            return true;
        }
        let Some(node) = self.node(self.source(id, CASTS)) else { return false };
        match node.op {
            "Div" => self.is_root(node.inputs.get(1).copied().flatten()),
            "Mul" => node.inputs.iter().flatten().any(|&id| self.is_reciprocal_root(id)),
            _ => false,
        }
    }

    /// The tensor of an initializer or a Constant node.
    pub fn tensor(&self, id: ValueId) -> Option<Tensor> {
        match self.node(id) {
            Some(node) if node.op == "Constant" => Tensor::new(self.model, "value", node.tensor("value").ok()??).ok(),
            Some(_) => None,
            None => self.tensors.get(&id).map(|tensor| (*tensor).clone()),
        }
    }

    /// The value of a constant of one element.
    pub fn number(&self, id: ValueId) -> Option<f64> {
        if let Some(node) = self.node(id).filter(|node| node.op == "Constant")
            && let Ok(Some(float)) = node.float("value_float")
        {
            return Some(float);
        }
        let tensor = self.tensor(id)?;
        let bytes = tensor.bytes(self.model).ok()?;
        Known::read(&tensor, &bytes).ok()?.uniform()
    }
}
