//! Computes of a value only what is read of it.
//!
//! A classifier of the first token reads one position of the last layer: that layer's queries, its feed-forward network and all gradients of
//! them are needed for this one alone. From the outputs back every node learns which window of its value is read; a dim of which at most half
//! is read is computed in the window, where the op's rule says that its elements are computed apart from each other. Before: a logical
//! forward graph. After: one of the same outputs, with slices where a value that others read whole is read in part.

#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::graph::{Graph, Node, NodeId};
use crate::loss::batch_dims;
use crate::ops::{BroadcastInDim, Op, Reshape, Rule, Slice};
use dcc_program::{Shape, TensorType};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::ops::Range;

/// The elements of each dim, of those of the whole value.
type Window = SmallVec<[Range<u64>; 4]>;

/// The graph without what nothing reads.
pub fn trim(graph: &Graph) -> Result<Graph> {
    let made = windows(graph);
    let of = |id: NodeId| &made[id.0 as usize];
    graph.map(|out, id, node, operands| {
        let read = reads(graph, node, of(id));
        let given = |i: usize| of(node.operands[i]);
        if let Op::Slice(slice) = &node.op {
            return cut(out, operands[0], given(0), &read[0], &slice.stride);
        }
        let is_same = *of(id) == whole(&node.ty) && (0..operands.len()).all(|i| read[i] == *given(i));
        if is_same {
            return Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()));
        }
        let parts: Result<SmallVec<[NodeId; 3]>> =
            (0..operands.len()).map(|i| cut(out, operands[i], given(i), &read[i], &steps(read[i].len()))).collect();
        let op = resized(graph, node, of(id));
        out.add(op, &parts?)
    })
}

/// What is computed of each live node's value.
fn windows(graph: &Graph) -> Vec<Window> {
    let batch = batch_dims(graph);
    let mut read: Vec<Option<Window>> = vec![None; graph.nodes.len()];
    for &(_, id) in &graph.outputs {
        read[id.0 as usize] = Some(whole(graph.ty(id)));
    }
    let mut made: Vec<Window> = vec![Window::new(); graph.nodes.len()];
    for id in graph.ids().rev() {
        let Some(wanted) = read[id.0 as usize].take() else { continue };
        let node = &graph[id];
        let window = made_of(graph, node, &wanted, &batch[id.0 as usize]);
        for (operand, part) in node.operands.iter().zip(reads(graph, node, &window)) {
            let all = &mut read[operand.0 as usize];
            *all = Some(match all.take() {
                None => part,
                Some(known) => known.iter().zip(&part).map(|(a, b)| a.start.min(b.start)..a.end.max(b.end)).collect(),
            });
        }
        made[id.0 as usize] = window;
    }
    made
}

fn whole(ty: &TensorType) -> Window {
    ty.shape.iter().map(|&size| 0..size).collect()
}

fn steps(rank: usize) -> Shape {
    Shape::from_elem(1, rank)
}

/// The window that a node computes where `wanted` is read. Samples stay together: meshes and microbatches share them out.
fn made_of(graph: &Graph, node: &Node, wanted: &Window, batch: &BTreeSet<u8>) -> Window {
    let mut window = whole(&node.ty);
    // To leave out fewer would save little, and cost sizes that divide well.
    let is_little = |dim: usize| !wanted[dim].is_empty() && 2 * (wanted[dim].end - wanted[dim].start) <= node.ty.shape[dim];
    let dims: Vec<usize> = (0..wanted.len()).filter(|&dim| is_little(dim) && !batch.contains(&(dim as u8))).collect();
    if dims.is_empty() {
        return window;
    }
    let rule = graph.rule(node);
    dims.into_iter().filter(|&dim| may_cut(node, &rule, dim, &wanted[dim])).for_each(|dim| window[dim] = wanted[dim].clone());
    window
}

/// Whether the elements of `range` of a dim of the result are what the op makes of the same elements of its operands.
fn may_cut(node: &Node, rule: &Rule, dim: usize, range: &Range<u64>) -> bool {
    let &[factor] = &rule.spec.result[dim][..] else { return false };
    let dims = || rule.spec.operands.iter().flatten().filter(|dim| dim.contains(&factor));
    // What no operand has is repeated, or counted.
    let has_source = dims().next().is_some() || matches!(node.op, Op::BroadcastInDim(_));
    let is_apart = !rule.is_whole(factor) && !rule.masked.contains(&factor) && has_source && dims().all(|dim| dim.len() == 1);
    match &node.op {
        Op::Slice(_) => true,
        Op::Attention(op) if op.attributes.causal && is_query(rule, dim) => {
            is_apart && (range.start == 0 || sees_all(rule, range))
        }
        Op::AttentionGrad(op) if op.attributes.causal && is_query(rule, dim) => false,
        _ => is_apart,
    }
}

/// Whether the first query of the range sees all keys, as then the others do.
fn sees_all(rule: &Rule, range: &Range<u64>) -> bool {
    range.start + 1 >= rule.size_of("s")
}

/// The window that a node reads of each operand to compute `made`.
fn reads(graph: &Graph, node: &Node, made: &Window) -> Vec<Window> {
    if let Op::Slice(slice) = &node.op {
        let bounds = |(dim, range): (usize, &Range<u64>)| {
            let at = |element: u64| slice.start[dim] + element * slice.stride[dim];
            if range.is_empty() { slice.start[dim]..slice.start[dim] } else { at(range.start)..at(range.end - 1) + 1 }
        };
        return vec![made.iter().enumerate().map(bounds).collect()];
    }
    let mut all: Vec<Window> = node.operands.iter().map(|&operand| whole(graph.ty(operand))).collect();
    let parts: Vec<usize> = (0..made.len()).filter(|&dim| made[dim] != (0..node.ty.shape[dim])).collect();
    if parts.is_empty() {
        return all;
    }
    let rule = graph.rule(node);
    for dim in parts {
        for (window, dims) in all.iter_mut().zip(&rule.spec.operands) {
            let alike = (0..window.len()).filter(|&d| dims[d] == rule.spec.result[dim]);
            alike.for_each(|d| window[d] = made[dim].clone());
        }
    }
    all
}

/// The elements of `wanted`, each `stride`-th of them, of a value that is there in the window `given`.
fn cut(out: &mut Graph, value: NodeId, given: &Window, wanted: &Window, stride: &Shape) -> Result<NodeId> {
    let offset = |bound: fn(&Range<u64>) -> u64| -> Shape {
        wanted.iter().zip(given).map(|(wanted, given)| bound(wanted) - given.start).collect()
    };
    part(out, value, Slice { start: offset(|range| range.start), limit: offset(|range| range.end), stride: stride.clone() })
}

/// A slice; of what is repeated, a repetition of less, so that numbers stay known.
fn part(out: &mut Graph, value: NodeId, slice: Slice) -> Result<NodeId> {
    let is_dense = slice.stride.iter().all(|&step| step == 1);
    let shape: Shape = slice.limit.iter().zip(&slice.start).map(|(limit, start)| limit - start).collect();
    if is_dense && shape == out.ty(value).shape {
        return Ok(value);
    }
    match out[value].op.clone() {
        Op::BroadcastInDim(op) if is_dense => {
            let of = |bounds: &Shape| -> Shape { op.dims.iter().map(|&dim| bounds[usize::from(dim)]).collect() };
            let inner = Slice { start: of(&slice.start), limit: of(&slice.limit), stride: of(&slice.stride) };
            let repeated = part(out, out[value].operands[0], inner)?;
            out.add(BroadcastInDim { shape, dims: op.dims }, &[repeated])
        }
        _ => out.add(slice, &[value]),
    }
}

/// The op of a node of whose result the window `made` is computed.
fn resized(graph: &Graph, node: &Node, made: &Window) -> Op {
    let shape = || made.iter().map(|range| range.end - range.start).collect();
    match &node.op {
        Op::BroadcastInDim(op) => BroadcastInDim { shape: shape(), dims: op.dims.clone() }.into(),
        Op::Reshape(_) => Reshape { shape: shape() }.into(),
        Op::Attention(op) if op.attributes.causal => {
            let rule = graph.rule(node);
            let mut op = op.clone();
            // Queries that begin behind the first see all keys.
            op.attributes.causal = (0..made.len()).all(|dim| !is_query(&rule, dim) || made[dim].start == 0);
            op.into()
        }
        op => op.clone(),
    }
}

/// Whether a dim of an attention's result counts queries.
fn is_query(rule: &Rule, dim: usize) -> bool {
    matches!(rule.spec.result[dim][..], [factor] if rule.spec.names[usize::from(factor.0)] == "t")
}
