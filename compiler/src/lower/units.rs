//! The order of units within each section: topological, otherwise as the graph has them.
//!
//! Sums over stages keep the order of the placed graph, which is the same on all stages; so do transfers from and to a stage.

use super::{Stage, section_kinds};
use crate::error::{Error, Result};
use crate::fuse::{ClusterId, Role, Unit, refs};
use crate::graph::{NodeId, Phase};
use crate::ops::Op;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Units of each section in order of execution. Units without work (leaves, inline nodes without a buffer) are left out.
pub(super) fn order(stage: &Stage) -> Result<Vec<(Phase, Vec<Unit>)>> {
    section_kinds().into_iter().map(|phase| Ok((phase, section(stage, phase)?))).collect()
}

/// The unit that computes `node`, if any does.
pub(super) fn unit_of(stage: &Stage, node: NodeId) -> Option<Unit> {
    match stage.fusion.roles[node.0 as usize] {
        Role::Member(cluster) => Some(Unit::Cluster(cluster)),
        Role::Library | Role::View => Some(Unit::Node(first_result(stage, node))),
        Role::Inline if stage.fusion.materialised[node.0 as usize] => Some(Unit::Node(node)),
        Role::Leaf | Role::Inline | Role::Absent => None,
    }
}

/// Of the nodes that are results of one launch, the first.
fn first_result(stage: &Stage, node: NodeId) -> NodeId {
    siblings(stage, node)[0]
}

/// All results of the launch that computes `node`, ascending.
pub(super) fn siblings(stage: &Stage, node: NodeId) -> Vec<NodeId> {
    let this = &stage.graph[node];
    let same_launch = |other: &NodeId| {
        let other = &stage.graph[*other];
        let same = match (&this.op, &other.op) {
            (Op::Attention(a), Op::Attention(b)) => a.attributes == b.attributes,
            (Op::AttentionGrad(a), Op::AttentionGrad(b)) => a.attributes == b.attributes,
            _ => false,
        };
        same && this.operands == other.operands && this.phase == other.phase
    };
    if !matches!(this.op, Op::Attention(_) | Op::AttentionGrad(_)) {
        return vec![node];
    }
    let readers = |n: &NodeId| stage.graph[*n].operands == this.operands;
    stage.nodes.iter().copied().filter(readers).filter(same_launch).collect()
}

fn section(stage: &Stage, phase: Phase) -> Result<Vec<Unit>> {
    let mut members: BTreeMap<Unit, Vec<NodeId>> = BTreeMap::new();
    for &id in stage.nodes.iter().filter(|id| stage.graph[**id].phase == phase) {
        if let Some(unit) = unit_of(stage, id) {
            members.entry(unit).or_default().push(id);
        }
    }
    let mut readers: BTreeMap<Unit, BTreeSet<Unit>> = BTreeMap::new();
    let mut waiting: BTreeMap<Unit, usize> = members.keys().map(|&u| (u, 0)).collect();
    let mut edge = |from: Unit, to: Unit, waiting: &mut BTreeMap<Unit, usize>| {
        if from != to && readers.entry(from).or_default().insert(to) {
            *waiting.entry(to).or_default() += 1;
        }
    };
    let mut ordered: BTreeMap<&str, Unit> = BTreeMap::new();
    for (&unit, nodes) in &members {
        for &node in nodes {
            let mut reads = Vec::new();
            refs::visit(stage.graph, &stage.fusion, node, &[], &mut |o, _| reads.push(o));
            for read in reads {
                if let Some(from) = unit_of(stage, read).filter(|from| members.contains_key(from)) {
                    edge(from, unit, &mut waiting);
                }
            }
        }
    }
    // Values of other stages in a fixed order.
    for &id in stage.nodes.iter().filter(|id| stage.graph[**id].phase == phase) {
        let key = match stage.graph[id].op {
            Op::StageSum(_) => "sum",
            Op::Transfer(_) => "recv",
            _ => continue,
        };
        if let Some(before) = ordered.insert(key, Unit::Node(id)) {
            edge(before, Unit::Node(id), &mut waiting);
        }
    }
    let first = |unit: Unit| members[&unit][0];
    let mut ready: BinaryHeap<Reverse<(NodeId, Unit)>> =
        waiting.iter().filter(|(_, n)| **n == 0).map(|(&u, _)| Reverse((first(u), u))).collect();
    let mut order = Vec::with_capacity(members.len());
    while let Some(Reverse((_, unit))) = ready.pop() {
        order.push(unit);
        for &reader in readers.get(&unit).into_iter().flatten() {
            let left = waiting.get_mut(&reader).expect("every reader is a unit of this section");
            *left -= 1;
            if *left == 0 {
                ready.push(Reverse((first(reader), reader)));
            }
        }
    }
    if order.len() != members.len() {
        let stuck = members.keys().find(|u| !order.contains(u)).copied().unwrap_or(Unit::Cluster(ClusterId(0)));
        return Err(Error::internal(format!("units of section {} depend on each other: {stuck:?}", phase.name())));
    }
    Ok(order)
}
