//! What a node reads once inline nodes have vanished into its loads.

use super::{Fusion, Role};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use dcc_program::kernel::{DimId, Index};

/// The loop dim of a plain index.
pub fn dim_of(index: &Index) -> DimId {
    match index {
        Index::Dim(dim) => *dim,
        Index::Affine { .. } | Index::Expr(_) => unreachable!("members lie at plain loop dims"),
    }
}

/// Calls `found(operand, index)` for each non-inline node that `node` reads, where `node` itself is read at `index`; the index
/// is `None` where it is not a list of loop dims (shifted, gathered) or where `index` is empty for a node with dims.
pub fn visit(graph: &Graph, fusion: &Fusion, node: NodeId, index: &[Index], found: &mut impl FnMut(NodeId, Option<&[Index]>)) {
    let known = index.len() == graph.ty(node).rank();
    visit_operands(graph, fusion, node, known.then_some(index), found);
}

fn visit_operands(
    graph: &Graph,
    fusion: &Fusion,
    id: NodeId,
    index: Option<&[Index]>,
    found: &mut impl FnMut(NodeId, Option<&[Index]>),
) {
    let node = &graph[id];
    for (i, &operand) in node.operands.iter().enumerate() {
        let at = index.and_then(|index| operand_index(graph, id, i, index));
        match fusion.roles[operand.0 as usize] == Role::Inline && !is_loaded(&node.op, i) {
            true => visit_operands(graph, fusion, operand, at.as_deref(), found),
            false => found(operand, at.as_deref()),
        }
    }
}

/// Whether operand `i` of `op` is read from a buffer even where it could be computed in place: reads outside of it give zero.
pub fn is_loaded(op: &Op, i: usize) -> bool {
    matches!(op, Op::Pad(_) | Op::Concatenate(_)) || (matches!(op, Op::Gather(_)) && i == 0)
}

/// The loop dims at which operand `i` of `id` is read when `id` is read at `index`; `None` where that is no list of loop dims.
fn operand_index(graph: &Graph, id: NodeId, i: usize, index: &[Index]) -> Option<Vec<Index>> {
    let node = &graph[id];
    match &node.op {
        Op::BroadcastInDim(op) => Some(op.dims.iter().map(|&d| index[usize::from(d)].clone()).collect()),
        Op::Transpose(op) => {
            let mut at = index.to_vec();
            for (result, &operand) in op.perm.iter().enumerate() {
                at[usize::from(operand)] = index[result].clone();
            }
            Some(at)
        }
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::GradSum(_) => Some(index.to_vec()),
        Op::Gather(op) if i == 1 => {
            let position = |f| op.spec.result.iter().position(|d| d.first() == Some(&f));
            op.spec.operands[1].iter().map(|d| Some(index[position(d[0])?].clone())).collect()
        }
        _ => None,
    }
}
