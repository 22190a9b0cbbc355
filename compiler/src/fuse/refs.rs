//! What a node reads once inline nodes have vanished into its loads.

use super::{Cluster, Fusion, Role};
use crate::graph::{Graph, NodeId};
use crate::ops::{Op, Reduce};
use dcc_program::kernel::{DimId, Index, UnaryOp};
use rustc_hash::FxHashSet;

/// The loop dim of a plain index.
pub fn dim_of(index: &Index) -> DimId {
    match index {
        Index::Dim(dim) => *dim,
        Index::Affine { .. } | Index::Expr(_) => unreachable!("members lie at plain loop dims"),
    }
}

/// Calls `found(operand, index)` for each non-inline node that `node` reads, where `node` itself is read at `index`; the index
/// is `None` where it is not a list of loop dims (shifted, gathered) or where `index` is empty for a node with dims. What several
/// inline nodes read at one index is found through one of them.
pub fn visit(graph: &Graph, fusion: &Fusion, node: NodeId, index: &[Index], found: &mut impl FnMut(NodeId, Option<&[Index]>)) {
    let known = index.len() == graph.ty(node).rank();
    let mut open = vec![(node, known.then(|| index.to_vec()))];
    let mut seen = FxHashSet::default();
    while let Some((id, index)) = open.pop() {
        for (i, &operand) in graph[id].operands.iter().enumerate() {
            let at = index.as_deref().and_then(|index| operand_index(graph, id, i, index));
            let loaded = is_loaded(graph, id, i) || fusion.loads.contains(&id);
            if fusion.roles[operand.0 as usize] != Role::Inline || loaded {
                found(operand, at.as_deref());
            } else if seen.insert((operand, at.clone())) {
                open.push((operand, at));
            }
        }
    }
}

/// The loop dims at which a reduction at `index` that folds `inner` reads its operand.
pub fn reduced_index(op: &Reduce, index: &[Index], inner: &[DimId]) -> Vec<Index> {
    let (mut kept, mut inner) = (index.iter(), inner.iter());
    (0..(index.len() + op.dims.len()) as u8)
        .map(|d| match op.dims.contains(&d) {
            true => Index::Dim(*inner.next().expect("a reduction folds the inner dims")),
            false => kept.next().expect("the other dims are the result's").clone(),
        })
        .collect()
}

/// Whether operand `i` of `id` is read from a buffer even where it could be computed in place: reads outside of it give zero. Parts of
/// another value are computed outside as well, and not used there.
pub fn is_loaded(graph: &Graph, id: NodeId, i: usize) -> bool {
    let node = &graph[id];
    match &node.op {
        Op::Concatenate(_) => node.operands.len() > 2 || !is_part(graph, node.operands[i]),
        Op::Pad(op) => op.interior.iter().any(|&n| n != 0) || !is_part(graph, node.operands[0]),
        Op::Gather(_) => i == 0,
        _ => false,
    }
}

/// A part of a value of the same section, perhaps with its dims in another order, with the other sign or of another type. Not of
/// integers: these are labels, few, which several kernels read.
fn is_part(graph: &Graph, part: NodeId) -> bool {
    let (mut id, mut changes) = (part, false);
    if !graph.ty(part).dtype.is_float() {
        return false;
    }
    loop {
        match &graph[id].op {
            Op::Slice(op) if op.stride.iter().all(|&stride| stride == 1) => changes = true,
            Op::Unary(op) if op.op == UnaryOp::Neg => changes = true,
            Op::Cast(_) => changes = true,
            Op::Transpose(_) => {}
            Op::BroadcastInDim(_) | Op::Slice(_) | Op::Pad(_) | Op::Concatenate(_) | Op::Reverse(_) | Op::Gather(_) => {
                return false;
            }
            Op::Uniform(_) => return false,
            _ => return changes && graph[id].section() == graph[part].section(),
        }
        id = graph[id].operands[0];
    }
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

/// Whether computing `id` in `cluster` loads something at loop dim `dim`, where `at` has the plain loop dims among its indices.
pub fn binds(graph: &Graph, fusion: &Fusion, cluster: &Cluster, id: NodeId, at: &[Option<DimId>], dim: DimId) -> bool {
    let mut open = vec![(id, at.to_vec())];
    let mut seen = FxHashSet::default();
    while let Some((id, at)) = open.pop() {
        for (i, &operand) in graph[id].operands.iter().enumerate() {
            let at = plain_index(graph, id, i, &at);
            if fusion.roles[operand.0 as usize] != Role::Inline || is_loaded(graph, id, i) {
                if !cluster.index.contains_key(&operand) && at.contains(&Some(dim)) {
                    return true;
                }
            } else if seen.insert((operand, at.clone())) {
                open.push((operand, at));
            }
        }
    }
    false
}

/// The plain loop dims among the indices of operand `i` of `id`.
fn plain_index(graph: &Graph, id: NodeId, i: usize, at: &[Option<DimId>]) -> Vec<Option<DimId>> {
    let node = &graph[id];
    let from = graph.ty(node.operands[i]);
    match &node.op {
        Op::BroadcastInDim(op) => op.dims.iter().map(|&d| at[usize::from(d)]).collect(),
        Op::Transpose(op) => {
            let mut out = at.to_vec();
            op.perm.iter().enumerate().for_each(|(result, &operand)| out[usize::from(operand)] = at[result]);
            out
        }
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::GradSum(_) => at.to_vec(),
        Op::Slice(_) | Op::Pad(_) | Op::Concatenate(_) => {
            (0..from.rank()).map(|d| at[d].filter(|_| from.shape[d] == node.ty.shape[d])).collect()
        }
        Op::Reverse(op) => (0..from.rank()).map(|d| at[d].filter(|_| !op.dims.contains(&(d as u8)))).collect(),
        Op::Gather(op) => {
            let position = |f| op.spec.result.iter().position(|d| d.first() == Some(&f));
            op.spec.operands[i].iter().map(|d| at[position(*d.first()?)?]).collect()
        }
        Op::Reshape(_) => {
            let mut kept = at.iter().zip(&node.ty.shape).filter(|(_, size)| **size != 1).map(|(dim, _)| *dim);
            from.shape.iter().map(|&d| if d == 1 { None } else { kept.next().flatten() }).collect()
        }
        _ => vec![None; from.rank()],
    }
}
