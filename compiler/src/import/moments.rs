//! Batch norms that an exporter wrote out, as Keras' and JAX's do: which of their tensors are running means and variances.
//!
//! A variance is what a root is taken of, plus one number: `s = gain / sqrt(variance + epsilon)`. A mean is what is subtracted before a
//! product with `s`, or the product with `s` that is: `(x - mean) s`, `x s - mean s`, `x s + (bias - mean s)`. Shapes and casts may
//! stand between.

use std::collections::{BTreeMap, BTreeSet};

use super::flatten::Flat;
use super::node::{Node, ValueId};

const PASSING: &[&str] = &["Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Expand"];

/// Names of initializers that are such means and variances, and read as nothing else.
pub(super) fn moments(flat: &Flat) -> BTreeSet<String> {
    let graph = Reads::of(flat);
    let large = |id: &ValueId| graph.sizes.get(id).is_some_and(|&size| size > 1);
    let tensors: Vec<ValueId> = graph.sizes.keys().copied().filter(large).collect();
    let (variances, others): (Vec<ValueId>, Vec<ValueId>) = tensors.into_iter().partition(|&id| graph.is_variance(id));
    let scales = graph.scales(&variances);
    let sizes: BTreeSet<u64> = variances.iter().map(|id| graph.sizes[id]).collect();
    let means = others.into_iter().filter(|id| sizes.contains(&graph.sizes[id]) && graph.is_mean(*id, &scales));
    means.chain(variances.iter().copied()).map(|id| flat.values[id.0 as usize].clone()).collect()
}

struct Reads<'f, 'm> {
    /// By value, the nodes that read it and at which position; outputs and inner graphs are no such node.
    by: BTreeMap<ValueId, Vec<(&'f Node<'m>, usize)>>,
    elsewhere: BTreeSet<ValueId>,
    /// Elements of the initializers.
    sizes: BTreeMap<ValueId, u64>,
    /// Made of constants and initializers alone.
    constant: BTreeSet<ValueId>,
}

impl<'f, 'm> Reads<'f, 'm> {
    fn of(flat: &'f Flat<'m>) -> Reads<'f, 'm> {
        let sizes: BTreeMap<ValueId, u64> = flat.initializers.iter().map(|(id, tensor)| (*id, tensor.elements())).collect();
        let mut by: BTreeMap<ValueId, Vec<(&Node, usize)>> = BTreeMap::new();
        let mut elsewhere: BTreeSet<ValueId> = flat.outputs.iter().map(|&(_, id)| id).collect();
        let mut constant: BTreeSet<ValueId> = sizes.keys().copied().collect();
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
        Reads { by, elsewhere, sizes, constant }
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

    fn is_variance(&self, id: ValueId) -> bool {
        self.all(&[Some(id)], |node, position| {
            let other = node.inputs.get(1 - position.min(1)).copied().flatten();
            let is_number = |id: ValueId| self.constant.contains(&id) && self.sizes.get(&id).is_none_or(|&size| size == 1);
            node.op == "Add" && other.is_some_and(is_number) && self.all(&node.outputs, |node, _| node.op == "Sqrt")
        })
    }

    /// What is made of constants and of a root of one of `variances`.
    fn scales(&self, variances: &[ValueId]) -> BTreeSet<ValueId> {
        let mut scales = BTreeSet::new();
        let mut open = variances.to_vec();
        while let Some(id) = open.pop() {
            let nodes = self.by.get(&id).into_iter().flatten();
            for &made in nodes.flat_map(|(node, _)| node.outputs.iter().flatten()) {
                if self.constant.contains(&made) && scales.insert(made) {
                    open.push(made);
                }
            }
        }
        scales
    }

    fn is_mean(&self, id: ValueId, scales: &BTreeSet<ValueId>) -> bool {
        let scaled = |node: &Node, position: usize| {
            let other = node.inputs.get(1 - position.min(1)).copied().flatten();
            node.op == "Mul" && other.is_some_and(|id| scales.contains(&id))
                || node.op == "Div" && position == 0 && other.is_some_and(|id| scales.contains(&id))
        };
        let subtracted = |node: &Node, position: usize| node.op == "Neg" || node.op == "Sub" && position == 1;
        self.all(&[Some(id)], |node, position| match subtracted(node, position) {
            true => self.all(&node.outputs, scaled),
            false => scaled(node, position) && self.all(&node.outputs, subtracted),
        })
    }
}
