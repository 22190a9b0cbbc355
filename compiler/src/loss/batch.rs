//! Which dim of each value counts samples: traced from the inputs through the factors of the ops' rules.

use crate::graph::{Graph, Operands};
use crate::ops::{Op, Rule};
use dcc_program::TensorType;

/// By node, the dim that carries the batch; `None` where no batched input reaches or where the dim is reduced.
pub fn batch_dims(graph: &Graph) -> Vec<Option<u8>> {
    let mut dims: Vec<Option<u8>> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let dim = match &node.op {
            Op::Input(input) => input.batch_dim,
            op if !node.operands.is_empty() => {
                let types: Vec<&TensorType> = node.operands.iter().map(|&o| graph.ty(o)).collect();
                through(&op.rule(&types, &node.ty), &node.operands, &dims)
            }
            _ => None,
        };
        dims.push(dim);
    }
    dims
}

/// The result dim with the major factor of some operand's batch dim.
fn through(rule: &Rule, operands: &Operands, dims: &[Option<u8>]) -> Option<u8> {
    operands.iter().enumerate().find_map(|(i, operand)| {
        let dim = usize::from(dims[operand.0 as usize]?);
        let factor = rule.spec.operands.get(i)?.get(dim)?.first()?;
        let result = rule.spec.result.iter().position(|d| d.first() == Some(factor))?;
        Some(result as u8)
    })
}
