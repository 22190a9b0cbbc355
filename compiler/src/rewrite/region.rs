//! Cuts a graph into regions: runs of neighbouring nodes of one phase and stage, between which few values pass.
//!
//! A residual stream is what a transformer's layers pass on, so that its blocks become regions of equal structure, each
//! solved once. What masks and positions are made of is cheap and common to all layers: it is part of every region that reads
//! it. Parameters, inputs and scalars are never part of one. What else no sample's numbers go into (rotations by angles that are
//! parameters, a bias of positions) and what lives longer than a region can be passes through all layers: to that cuts are blind.

use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;

/// Nodes of a region.
const MOST: usize = 200;
/// Regions with fewer are joined with the next.
const FEWEST: usize = 16;
/// Nodes that compute a mask or positions, at most.
const SHARED: usize = 48;

/// What a node is to the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Parameter, input, scalar: outside.
    Leaf,
    /// Computed from constants and integer inputs alone, pointwise, or a common value under another shape: part of each region
    /// that reads it.
    Shared,
    /// Part of one region.
    Own,
}

/// What each node is; dead nodes are `Leaf`.
pub fn kinds(graph: &Graph) -> Vec<Kind> {
    let (live, common) = (graph.live(), common(graph));
    let mut size = vec![0usize; graph.nodes.len()];
    let mut kinds = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        let index = id.0 as usize;
        let cheap = |kinds: &[Kind]| {
            node.operands.iter().all(|o| match kinds[o.0 as usize] {
                Kind::Shared => true,
                Kind::Leaf => matches!(&graph[*o].op, Op::Input(i) if !i.dtype.is_float()),
                Kind::Own => false,
            })
        };
        // An upper bound: what is shared among operands counts for each.
        size[index] = node.operands.iter().fold(1, |sum: usize, o| sum.saturating_add(size[o.0 as usize]));
        kinds.push(match &node.op {
            _ if !live[index] => Kind::Leaf,
            Op::Param(_) | Op::Input(_) | Op::Scalar(_) => Kind::Leaf,
            Op::Const(_) | Op::Iota(_) => Kind::Shared,
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) if common[index] => Kind::Shared,
            op if moves(op) && size[index] <= SHARED && cheap(&kinds) => Kind::Shared,
            _ => Kind::Own,
        });
    }
    kinds
}

fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select(_)
            | Op::Cast(_)
            | Op::BroadcastInDim(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
    )
}

/// The own nodes of one phase and stage, cut into regions.
pub fn cut(graph: &Graph, kinds: &[Kind], phase: Phase, stage: Option<u32>) -> Vec<Vec<NodeId>> {
    let own = |id: &NodeId| {
        let node = &graph[*id];
        kinds[id.0 as usize] == Kind::Own && node.phase == phase && node.stage == stage
    };
    let nodes: Vec<NodeId> = graph.ids().filter(own).collect();
    let passing = passing(graph, &common(graph), &nodes);
    let mut regions: Vec<Vec<NodeId>> = Vec::new();
    for (begin, end) in runs(&passing, 0, nodes.len(), 1) {
        // What only turns a result around belongs to what makes it.
        let turns = nodes[begin..end].iter().all(|id| matches!(graph[*id].op, Op::Transpose(_) | Op::Reshape(_)));
        match regions.last_mut() {
            Some(last) if (last.len() < FEWEST || turns) && last.len() + end - begin <= MOST => last.extend(&nodes[begin..end]),
            _ => regions.push(nodes[begin..end].to_vec()),
        }
    }
    regions
}

/// Which nodes are made of parameters, constants and integer inputs alone, of the latter pointwise: no layer's own.
fn common(graph: &Graph) -> Vec<bool> {
    // And whether an input is among that.
    let mut found: Vec<(bool, bool)> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let of = |o: &NodeId| found[o.0 as usize];
        let fed = node.operands.iter().any(|o| of(o).1);
        found.push(match &node.op {
            Op::Input(input) => (!input.dtype.is_float(), true),
            op => (node.operands.iter().all(|o| of(o).0) && (!fed || moves(op)), fed),
        });
    }
    found.into_iter().map(|(common, _)| common).collect()
}

/// After each node, how many values of the nodes up to it are still to be read; without common ones, and without those that
/// are read farther away than a region is long.
fn passing(graph: &Graph, common: &[bool], nodes: &[NodeId]) -> Vec<usize> {
    let mut place = vec![usize::MAX; graph.nodes.len()];
    nodes.iter().enumerate().for_each(|(i, id)| place[id.0 as usize] = i);
    let mut last: Vec<usize> = (0..nodes.len()).collect();
    for id in graph.ids() {
        for operand in &graph[id].operands {
            let at = place[operand.0 as usize];
            if at != usize::MAX && place[id.0 as usize] != usize::MAX {
                last[at] = last[at].max(place[id.0 as usize]);
            }
        }
    }
    let counts = |i: usize| last[i] > i && last[i] - i < MOST && !common[nodes[i].0 as usize];
    let mut ends = vec![0usize; nodes.len()];
    let mut open = 0;
    (0..nodes.len())
        .map(|i| {
            if counts(i) {
                ends[last[i]] += 1;
                open += 1;
            }
            open -= ends[i];
            open
        })
        .collect()
}

/// `begin..end` cut after every node that at most `few` values pass; runs that stay too long, with more.
fn runs(passing: &[usize], begin: usize, end: usize, few: usize) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    let mut from = begin;
    for i in begin..end {
        if passing[i] <= few || i + 1 == end {
            let long = i + 1 - from > MOST;
            match long && few < MOST {
                true => all.extend(runs(passing, from, i + 1, few + 1)),
                false => all.push((from, i + 1)),
            }
            from = i + 1;
        }
    }
    all
}
