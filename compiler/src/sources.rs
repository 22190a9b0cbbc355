//! Moves slices of a product onto the parameters that it is made of: a fused `c_attn` becomes the pieces q, k and v.
//!
//! A shard of a fused weight would hold part of q and none of v, so that every slice would communicate. Before: a logical
//! forward graph. After: where all readers of a parameter read slices of it along one dim that are disjoint and together the
//! whole, the parameter is replaced by pieces, one per slice. Everything else is left alone.

#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::graph::{Graph, Node, NodeId, Operands};
use crate::ops::{BroadcastInDim, Op, Param, Reshape};
use dcc_program::Shape;
use dcc_program::program::{ParamKind, Piece};
use std::collections::{BTreeMap, BTreeSet};

/// Elements `start..end` of one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cut {
    dim: usize,
    start: u64,
    end: u64,
}

/// The graph with fused parameters as pieces.
pub fn split(graph: &Graph) -> Result<Graph> {
    let accepted = choose(graph);
    let mut moved: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    let out = graph.map(|out, id, node, operands| {
        let new = match accepted.get(&id) {
            Some(cut) => build(out, graph, &moved, node.operands[0], *cut)?,
            None => out.add_typed(node.op.clone(), operands, node.ty.clone()),
        };
        moved[id.0 as usize] = Some(new);
        Ok(new)
    })?;
    out.map(|out, _, node, operands| Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())))
}

/// The slices to move, each with its cut: all whose parameters end up as pieces.
fn choose(graph: &Graph) -> BTreeMap<NodeId, Cut> {
    let live = graph.live();
    let mut accepted = BTreeMap::new();
    let mut leaves: BTreeMap<NodeId, Vec<(NodeId, Cut)>> = BTreeMap::new();
    for id in graph.ids().filter(|id| live[id.0 as usize]) {
        let Some(cut) = sliced(graph, &graph[id]) else { continue };
        let mut found = Vec::new();
        if reach(graph, graph[id].operands[0], cut, &mut found) && !found.is_empty() {
            accepted.insert(id, cut);
            leaves.insert(id, found);
        }
    }
    loop {
        let whole = read_whole(graph, &accepted, &leaves);
        let mut pieces: BTreeMap<NodeId, BTreeSet<Cut>> = BTreeMap::new();
        for (param, cut) in accepted.keys().flat_map(|slice| &leaves[slice]) {
            pieces.entry(*param).or_default().insert(*cut);
        }
        let fits = |param: &NodeId| !whole[param.0 as usize] && covers(&graph.ty(*param).shape, &pieces[param]);
        let refused: Vec<NodeId> =
            accepted.keys().filter(|slice| !leaves[slice].iter().all(|(param, _)| fits(param))).copied().collect();
        if refused.is_empty() {
            return accepted;
        }
        accepted.retain(|slice, _| !refused.contains(slice));
    }
}

/// The one dim that a slice shortens, if it takes neighbouring elements.
fn sliced(graph: &Graph, node: &Node) -> Option<Cut> {
    let Op::Slice(slice) = &node.op else { return None };
    let from = &graph.ty(node.operands[0]).shape;
    let mut dims = (0..from.len()).filter(|&d| node.ty.shape[d] != from[d]);
    let (dim, None) = (dims.next()?, dims.next()) else { return None };
    (slice.stride[dim] == 1 && node.ty.shape[dim] > 0).then_some(Cut { dim, start: slice.start[dim], end: slice.limit[dim] })
}

/// Whether the cut of `id` can be made of cuts of parameters alone, which are added to `leaves`.
fn reach(graph: &Graph, id: NodeId, cut: Cut, leaves: &mut Vec<(NodeId, Cut)>) -> bool {
    let (mut open, mut seen) = (vec![(id, cut)], BTreeSet::from([(id, cut)]));
    while let Some((id, cut)) = open.pop() {
        if let Op::Param(param) = &graph[id].op {
            leaves.push((id, cut));
            if param.kind != ParamKind::Weight || param.piece.is_some() {
                return false;
            }
            continue;
        }
        let Some(cuts) = operand_cuts(graph, &graph[id], cut) else { return false };
        let operands = graph[id].operands.iter().copied().zip(cuts);
        open.extend(operands.filter_map(|(operand, cut)| Some((operand, cut?))).filter(|next| seen.insert(*next)));
    }
    true
}

/// What the cut of a node's result needs of each operand: a cut, or all of it. `None` where the op stands in the way.
fn operand_cuts(graph: &Graph, node: &Node, cut: Cut) -> Option<Vec<Option<Cut>>> {
    match &node.op {
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) => {
            Some(vec![Some(cut); node.operands.len()])
        }
        Op::BroadcastInDim(op) => {
            let dim = op.dims.iter().position(|&d| usize::from(d) == cut.dim);
            Some(vec![dim.map(|dim| Cut { dim, ..cut })])
        }
        Op::Transpose(op) => Some(vec![Some(Cut { dim: usize::from(op.perm[cut.dim]), ..cut })]),
        Op::Reshape(_) => through_reshape(&graph.ty(node.operands[0]).shape, &node.ty.shape, cut).map(|cut| vec![Some(cut)]),
        Op::DotGeneral(op) => {
            let factor = &op.spec.result[cut.dim];
            let dims: Vec<Option<usize>> = op.spec.operands.iter().map(|dims| dims.iter().position(|d| d == factor)).collect();
            let cuts = dims.iter().map(|dim| dim.map(|dim| Cut { dim, ..cut })).collect();
            (dims.iter().flatten().count() == 1).then_some(cuts)
        }
        Op::Gather(op) => {
            let factor = &op.spec.result[cut.dim];
            let dim = |operand: usize| op.spec.operands[operand].iter().position(|d| d == factor);
            match (dim(0), dim(1)) {
                (Some(dim), None) => Some(vec![Some(Cut { dim, ..cut }), None]),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The cut of a reshape's operand: its dim begins where the cut dim does, and one of the two sizes divides the other.
fn through_reshape(from: &[u64], to: &[u64], cut: Cut) -> Option<Cut> {
    let before: u64 = to[..cut.dim].iter().product();
    let size = to[cut.dim];
    let begins = |dim: &usize| from[*dim] != 1 && from[..*dim].iter().product::<u64>() == before;
    let dim = (0..from.len()).find(begins)?;
    if from[dim].is_multiple_of(size) {
        let minor = from[dim] / size;
        return Some(Cut { dim, start: cut.start * minor, end: cut.end * minor });
    }
    let minor = size / from[dim];
    let even = size.is_multiple_of(from[dim]) && cut.start.is_multiple_of(minor) && cut.end.is_multiple_of(minor);
    even.then(|| Cut { dim, start: cut.start / minor, end: cut.end / minor })
}

/// Whether the cuts share a dim, are disjoint and together all of it.
fn covers(shape: &[u64], cuts: &BTreeSet<Cut>) -> bool {
    let mut at = 0;
    let dim = cuts.first().map(|cut| cut.dim);
    // Ordered by dim, then start.
    cuts.iter().all(|cut| {
        let next = Some(cut.dim) == dim && cut.start == at;
        at = cut.end;
        next
    }) && dim.is_some_and(|dim| shape[dim] == at)
}

/// Nodes that are still read as they are once the `accepted` slices read cuts instead.
fn read_whole(graph: &Graph, accepted: &BTreeMap<NodeId, Cut>, leaves: &BTreeMap<NodeId, Vec<(NodeId, Cut)>>) -> Vec<bool> {
    let mut read = vec![false; graph.nodes.len()];
    for &(_, id) in &graph.outputs {
        read[id.0 as usize] = true;
    }
    for id in graph.ids().rev() {
        if !read[id.0 as usize] {
            continue;
        }
        match accepted.get(&id).filter(|_| leaves.contains_key(&id)) {
            Some(cut) => read_uncut(graph, graph[id].operands[0], *cut, &mut read),
            None => graph[id].operands.iter().for_each(|o| read[o.0 as usize] = true),
        }
    }
    read
}

/// Marks the operands that the cut of `id` needs whole.
fn read_uncut(graph: &Graph, id: NodeId, cut: Cut, read: &mut [bool]) {
    let (mut open, mut seen) = (vec![(id, cut)], BTreeSet::from([(id, cut)]));
    while let Some((id, cut)) = open.pop() {
        for (&operand, cut) in graph[id].operands.iter().zip(operand_cuts(graph, &graph[id], cut).unwrap_or_default()) {
            match cut {
                Some(cut) if seen.insert((operand, cut)) => open.push((operand, cut)),
                Some(_) => {}
                None => read[operand.0 as usize] = true,
            }
        }
    }
}

/// Adds the cut of old node `id` to `out`, after those that it is made of.
fn build(out: &mut Graph, graph: &Graph, moved: &[Option<NodeId>], id: NodeId, cut: Cut) -> Result<NodeId> {
    let mut made: BTreeMap<(NodeId, Cut), NodeId> = BTreeMap::new();
    let mut open = vec![(id, cut, false)];
    while let Some((at, cut, is_open)) = open.pop() {
        if made.contains_key(&(at, cut)) {
            continue;
        }
        let cuts = operand_cuts(graph, &graph[at], cut).unwrap_or_default();
        let operands = graph[at].operands.iter().zip(cuts);
        if is_open {
            let whole = |operand: &NodeId| moved[operand.0 as usize].expect("operands precede the slice");
            let operands: Operands =
                operands.map(|(operand, cut)| cut.map_or_else(|| whole(operand), |cut| made[&(*operand, cut)])).collect();
            made.insert((at, cut), piece(out, graph, at, cut, &operands)?);
        } else {
            open.push((at, cut, true));
            open.extend(operands.rev().filter_map(|(&operand, cut)| Some((operand, cut?, false))));
        }
    }
    Ok(made[&(id, cut)])
}

/// Adds the cut of old node `id`, of these operands.
fn piece(out: &mut Graph, graph: &Graph, id: NodeId, cut: Cut, operands: &[NodeId]) -> Result<NodeId> {
    let node = &graph[id];
    let mut shape: Shape = node.ty.shape.clone();
    shape[cut.dim] = cut.end - cut.start;
    let before = out.cursor();
    out.set_origin_of(graph, id);
    let op: Op = match &node.op {
        Op::Param(param) => {
            let piece = Piece { dim: cut.dim as u8, start: cut.start, end: cut.end };
            Param { piece: Some(piece), shape, ..param.clone() }.into()
        }
        Op::BroadcastInDim(op) => BroadcastInDim { shape, dims: op.dims.clone() }.into(),
        Op::Reshape(_) => Reshape { shape }.into(),
        op => op.clone(),
    };
    let new = out.add(op, operands)?;
    out.set_cursor(before);
    Ok(new)
}
