//! Batch norms that an exporter wrote out, as Keras' and JAX's do: which of their tensors are running means and variances.
//!
//! A variance is what one is divided by a root of, plus epsilon: `s = gain / sqrt(variance + epsilon)`. A mean is what is subtracted
//! before a product with `s`, or the product with `s` that is: `(x - mean) s`, `x s - mean s`, `x s + (bias - mean s)`. Both are rows of
//! one length. Shapes and casts may stand between.
//!
//! And what inputs are standardised by, as Keras' Normalization does it: `(x - mean) / deviation`, or a product with what is computed of
//! the deviation.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use super::flatten::Flat;
use super::gains::{PASSING, Producers};
use super::model::Model;
use super::node::{Node, ValueId};
use super::parameters::LARGEST_EPSILON;

/// Names of initializers that are means and variances, and read as nothing else.
pub(super) struct Moments {
    /// Of batch norms.
    pub norms: BTreeSet<String>,
    /// Of inputs.
    pub inputs: BTreeSet<String>,
}

pub(super) fn moments(model: &Model, flat: &Flat) -> Moments {
    let reads = Reads::of(model, flat);
    let (variances, others): (Vec<ValueId>, Vec<ValueId>) = reads.rows.keys().partition(|&&id| reads.is_variance(id));
    let scales = reads.scales(&variances);
    let pairs = others.iter().filter_map(|&mean| Some((mean, reads.variance_of(mean, &scales)?)));
    let pairs = pairs.filter(|(mean, variance)| reads.rows[mean] == reads.rows[variance]);
    let names = |ids: Vec<ValueId>| ids.into_iter().map(|id| flat.values[id.0 as usize].clone()).collect();
    let norms = names(pairs.flat_map(|(mean, variance)| [mean, variance]).collect());
    Moments { norms, inputs: names(reads.standardising()) }
}

struct Reads<'f, 'm> {
    inputs: BTreeSet<ValueId>,
    producers: Producers<'f, 'm>,
    /// By value, the nodes that read it and at which position; outputs and inner graphs are no such node.
    by: BTreeMap<ValueId, Vec<(&'f Node<'m>, usize)>>,
    elsewhere: BTreeSet<ValueId>,
    /// Lengths of the initializers that have one dim of more than one element.
    rows: BTreeMap<ValueId, u64>,
    /// Made of constants and initializers alone.
    constant: BTreeSet<ValueId>,
}

impl<'f, 'm> Reads<'f, 'm> {
    fn of(model: &'m Model, flat: &'f Flat<'m>) -> Reads<'f, 'm> {
        let tensors = flat.initializers.iter().map(|(id, tensor)| (*id, tensor));
        let is_row = |shape: &[u64]| shape.iter().filter(|&&size| size != 1).count() == 1;
        let rows = tensors.filter(|(_, t)| t.dtype.is_float() && is_row(&t.shape)).map(|(id, t)| (id, t.elements())).collect();
        let mut by: BTreeMap<ValueId, Vec<(&Node, usize)>> = BTreeMap::new();
        let mut elsewhere: BTreeSet<ValueId> = flat.outputs.iter().map(|&(_, id)| id).collect();
        let mut constant: BTreeSet<ValueId> = flat.initializers.iter().map(|(id, _)| *id).collect();
        for node in &flat.nodes {
            for (position, id) in node.inputs.iter().enumerate().filter_map(|(position, id)| Some((position, (*id)?))) {
                by.entry(id).or_default().push((node, position));
            }
            elsewhere.extend(&node.captures);
            if node.bodies.is_empty()
                && node.captures.is_empty()
                && node.inputs.iter().flatten().all(|id| constant.contains(id))
            {
                constant.extend(node.outputs.iter().flatten());
            }
        }
        let inputs = flat.inputs.iter().map(|(id, _)| *id).collect();
        Reads { inputs, producers: Producers::of(model, flat), by, elsewhere, rows, constant }
    }

    /// Who reads a value at which position, whatever its shape; none where that is not all.
    fn readers(&self, id: ValueId) -> Vec<(&'f Node<'m>, usize)> {
        let mut found = Vec::new();
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if self.elsewhere.contains(&id) {
                return Vec::new();
            }
            for &(node, position) in self.by.get(&id).into_iter().flatten() {
                match PASSING.contains(&node.op) && position == 0 {
                    true => open.extend(node.outputs.iter().flatten()),
                    false => found.push((node, position)),
                }
            }
        }
        found
    }

    /// Whether values are read, each by nodes that `is_so` alone.
    fn all(&self, ids: &[Option<ValueId>], is_so: impl Fn(&Node<'m>, usize) -> bool) -> bool {
        ids.iter().flatten().all(|&id| {
            let readers = self.readers(id);
            !readers.is_empty() && readers.iter().all(|&(node, position)| is_so(node, position))
        })
    }

    /// Means and deviations of inputs.
    fn standardising(&self) -> Vec<ValueId> {
        let mut found = Vec::new();
        for (&mean, length) in &self.rows {
            let centred = self.centred(mean);
            if centred.is_empty() {
                continue;
            }
            let others = self.rows.iter().filter(|(id, other)| **id != mean && *other == length).map(|(&id, _)| id);
            let deviations: Vec<ValueId> = others.filter(|&id| self.divides(id, &centred)).collect();
            if !deviations.is_empty() {
                found.push(mean);
                found.extend(deviations);
            }
        }
        found
    }

    /// Inputs less `mean`, where it is read for nothing else.
    fn centred(&self, mean: ValueId) -> BTreeSet<ValueId> {
        let is_input = |id: ValueId| self.inputs.contains(&self.producers.source(id, PASSING));
        let readers = self.readers(mean);
        let is_mean = |&(node, position): &(&Node, usize)| {
            node.op == "Sub" && position == 1 && other(node, position).is_some_and(is_input)
        };
        if !readers.iter().all(is_mean) {
            return BTreeSet::new();
        }
        readers.into_iter().flat_map(|(node, _)| node.outputs.iter().flatten().copied()).collect()
    }

    /// Whether `id`, or what is computed of it alone, scales those values and nothing else.
    fn divides(&self, id: ValueId, centred: &BTreeSet<ValueId>) -> bool {
        let mut made: BTreeSet<ValueId> = self.scales(&[id]).into_keys().collect();
        made.insert(id);
        let reads = made.iter().flat_map(|id| self.by.get(id).into_iter().flatten());
        let outside = reads.filter(|(node, _)| !node.outputs.iter().flatten().all(|id| made.contains(id)));
        let outside: Vec<&(&Node, usize)> = outside.collect();
        let scales = |(node, position): &&(&Node, usize)| {
            let scaled = other(node, *position).map(|id| self.producers.source(id, PASSING));
            (node.op == "Mul" || node.op == "Div" && *position == 1) && scaled.is_some_and(|id| centred.contains(&id))
        };
        let apart = made.iter().all(|id| !self.elsewhere.contains(id));
        apart && !outside.is_empty() && outside.iter().all(scales)
    }

    fn is_variance(&self, id: ValueId) -> bool {
        let divides = |node: &Node, position: usize| match node.op {
            "Div" => position == 1,
            op => op == "Reciprocal",
        };
        let is_root = |node: &Node<'m>, position: usize| match node.op {
            "Sqrt" => self.all(&node.outputs, divides),
            "Pow" => position == 0 && other(node, 0).and_then(|power| self.producers.number(power)) == Some(-0.5),
            _ => false,
        };
        self.all(&[Some(id)], |node, position| {
            let added = other(node, position).and_then(|id| self.producers.number(id));
            node.op == "Add" && added.is_some_and(|x| x > 0.0 && x <= LARGEST_EPSILON) && self.all(&node.outputs, is_root)
        })
    }

    /// What is made of constants and of a variance, which.
    fn scales(&self, variances: &[ValueId]) -> BTreeMap<ValueId, ValueId> {
        let mut scales = BTreeMap::new();
        let mut open: Vec<(ValueId, ValueId)> = variances.iter().map(|&id| (id, id)).collect();
        while let Some((id, variance)) = open.pop() {
            let nodes = self.by.get(&id).into_iter().flatten();
            for &made in nodes.flat_map(|(node, _)| node.outputs.iter().flatten()) {
                if self.constant.contains(&made) && scales.insert(made, variance).is_none() {
                    open.push((made, variance));
                }
            }
        }
        scales
    }

    /// The variance that goes with a mean; none of what is no mean.
    fn variance_of(&self, id: ValueId, scales: &BTreeMap<ValueId, ValueId>) -> Option<ValueId> {
        let found = Cell::new(None);
        let scaled = |node: &Node, position: usize| {
            let by = other(node, position).and_then(|id| scales.get(&id).copied());
            found.set(by.or(found.get()));
            by.is_some() && (node.op == "Mul" || node.op == "Div" && position == 0)
        };
        let subtracted = |node: &Node, position: usize| node.op == "Neg" || node.op == "Sub" && position == 1;
        let is_mean = self.all(&[Some(id)], |node, position| match subtracted(node, position) {
            true => self.all(&node.outputs, scaled),
            false => scaled(node, position) && self.all(&node.outputs, subtracted),
        });
        found.get().filter(|_| is_mean)
    }
}

/// The other operand of a node of two.
fn other(node: &Node, position: usize) -> Option<ValueId> {
    let [a, b] = node.inputs[..] else { return None };
    [b, a][position]
}
