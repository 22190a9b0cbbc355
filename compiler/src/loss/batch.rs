//! Which dims of each value count samples: traced from the inputs through the factors of the ops' rules.

use crate::graph::{Graph, Operands};
use crate::ops::{Op, Rule};
use dcc_program::TensorType;
use std::collections::BTreeSet;

/// By node, the dims that carry the batch: none where no batched input reaches or where the dim is reduced, two where each sample
/// meets each other one.
pub fn batch_dims(graph: &Graph) -> Vec<BTreeSet<u8>> {
    let mut dims: Vec<BTreeSet<u8>> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let of_node = match &node.op {
            Op::Input(input) => input.batch_dim.into_iter().collect(),
            op if !node.operands.is_empty() => {
                let types: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
                through(&op.rule(&types, &node.ty), &node.operands, &dims)
            }
            _ => BTreeSet::new(),
        };
        dims.push(of_node);
    }
    dims
}

/// The result dims with the major factor of some operand's batch dim.
fn through(rule: &Rule, operands: &Operands, dims: &[BTreeSet<u8>]) -> BTreeSet<u8> {
    let of_operands = operands.iter().zip(&rule.spec.operands);
    let factors =
        of_operands.flat_map(|(operand, own)| dims[operand.0 as usize].iter().map(|&dim| own.get(usize::from(dim))?.first()));
    let result = |factor| rule.spec.result.iter().position(|d| d.first() == Some(factor)).map(|dim| dim as u8);
    factors.flatten().filter_map(result).collect()
}
