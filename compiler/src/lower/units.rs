//! The order of units within each section: topological; of what can run, first what frees as much memory as it takes, then
//! what comes first in the graph. So the last reader of a value, such as the sum that is a bias' gradient, runs before the
//! next value is made.
//!
//! Sums over stages keep the order of the placed graph, which is the same on all stages; so do transfers from and to a stage.

mod pressure;

use super::Stage;
use crate::error::{Error, Result};
use crate::fuse::{ClusterId, Role, Unit, refs};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::program::SectionId;
use pressure::Pressure;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Units of each section in order of execution. Units without work (leaves, inline nodes without a buffer) are left out.
pub(super) fn order(stage: &Stage) -> Result<Vec<(SectionId, Vec<Unit>)>> {
    let crossing = pressure::crossing(stage);
    stage.sections().into_iter().map(|id| Ok((id, section(stage, id, &crossing)?))).collect()
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
            (Op::MaxPool(a), Op::MaxPool(b)) => a.pool == b.pool,
            _ => false,
        };
        same && this.operands == other.operands && this.section() == other.section()
    };
    if !matches!(this.op, Op::Attention(_) | Op::AttentionGrad(_) | Op::MaxPool(_)) {
        return vec![node];
    }
    let readers = |n: &NodeId| stage.graph[*n].operands == this.operands;
    stage.nodes.iter().copied().filter(readers).filter(same_launch).collect()
}

/// Units of one section, each with its nodes.
type Members = BTreeMap<Unit, Vec<NodeId>>;

fn section(stage: &Stage, section: SectionId, crossing: &BTreeSet<NodeId>) -> Result<Vec<Unit>> {
    let mut members = Members::new();
    for &id in stage.nodes.iter().filter(|id| stage.section(**id) == section) {
        if let Some(unit) = unit_of(stage, id) {
            members.entry(unit).or_default().push(id);
        }
    }
    let reads = reads(stage, &members);
    let mut pressure = Pressure::new(stage, &members, &reads, crossing);
    let (readers, mut waiting) = edges(stage, section, &members, &reads);
    let first = |unit: Unit| members[&unit][0];
    let ready = waiting.iter().filter(|(_, n)| **n == 0).map(|(&u, _)| Reverse((pressure.grows(u), first(u), u)));
    let mut ready: BinaryHeap<_> = ready.collect();
    let (mut order, mut done) = (Vec::with_capacity(members.len()), BTreeSet::new());
    while let Some(Reverse((_, _, unit))) = ready.pop() {
        if !done.insert(unit) {
            continue;
        }
        order.push(unit);
        let mut again = pressure.run(&reads[&unit], &done);
        for &reader in readers.get(&unit).into_iter().flatten() {
            *waiting.get_mut(&reader).expect("every reader is a unit of this section") -= 1;
            again.push(reader);
        }
        let runnable = again.into_iter().filter(|unit| waiting[unit] == 0);
        ready.extend(runnable.map(|unit| Reverse((pressure.grows(unit), first(unit), unit))));
    }
    if order.len() != members.len() {
        let stuck = members.keys().find(|u| !done.contains(u)).copied().unwrap_or(Unit::Cluster(ClusterId(0)));
        return Err(Error::internal(format!("units of section {} depend on each other: {stuck:?}", section.name())));
    }
    Ok(order)
}

/// Calls `found` for each value whose buffer `node` reads: a kernel computes inline operands itself, all else reads its operands.
fn visit(stage: &Stage, node: NodeId, found: &mut impl FnMut(NodeId)) {
    match stage.fusion.roles[node.0 as usize] {
        Role::Library | Role::View => stage.graph[node].operands.iter().copied().for_each(found),
        _ => refs::visit(stage.graph, &stage.fusion, node, &[], &mut |read, _| found(read)),
    }
}

/// What each unit reads of what other units of the section compute.
fn reads(stage: &Stage, members: &Members) -> BTreeMap<Unit, BTreeSet<NodeId>> {
    let of = |(&unit, nodes): (&Unit, &Vec<NodeId>)| {
        let mut found = BTreeSet::new();
        for &node in nodes {
            visit(stage, node, &mut |read| {
                if unit_of(stage, read).is_some_and(|from| from != unit && members.contains_key(&from)) {
                    found.insert(read);
                }
            });
        }
        (unit, found)
    };
    members.iter().map(of).collect()
}

/// Who must follow whom, and how many each unit follows. Values of other stages come in a fixed order.
fn edges(
    stage: &Stage,
    section: SectionId,
    members: &Members,
    reads: &BTreeMap<Unit, BTreeSet<NodeId>>,
) -> (BTreeMap<Unit, BTreeSet<Unit>>, BTreeMap<Unit, usize>) {
    let mut readers: BTreeMap<Unit, BTreeSet<Unit>> = BTreeMap::new();
    let mut waiting: BTreeMap<Unit, usize> = members.keys().map(|&u| (u, 0)).collect();
    let mut edge = |from: Unit, to: Unit| {
        if from != to && readers.entry(from).or_default().insert(to) {
            *waiting.entry(to).or_default() += 1;
        }
    };
    for (&unit, nodes) in reads {
        nodes.iter().filter_map(|&read| unit_of(stage, read)).for_each(|from| edge(from, unit));
    }
    let mut ordered: BTreeMap<&str, Unit> = BTreeMap::new();
    for &id in stage.nodes.iter().filter(|id| stage.section(**id) == section) {
        let key = match stage.graph[id].op {
            Op::StageSum(_) => "sum",
            Op::Transfer(_) => "recv",
            _ => continue,
        };
        if let Some(before) = ordered.insert(key, Unit::Node(id)) {
            edge(before, Unit::Node(id));
        }
    }
    // A resolved value takes the place of the pending one, which all others have read by then.
    let mut sharing: BTreeMap<NodeId, BTreeSet<Unit>> = BTreeMap::new();
    for (&unit, nodes) in reads {
        for &read in nodes {
            sharing.entry(viewed(stage, read)).or_default().insert(unit);
        }
    }
    for &unit in members.keys() {
        let Unit::Node(id) = unit else { continue };
        if let (Op::ResolveMicrobatches(_), Some(&pending)) = (&stage.graph[id].op, stage.graph[id].operands.first()) {
            sharing.get(&viewed(stage, pending)).into_iter().flatten().for_each(|&reader| edge(reader, unit));
        }
    }
    (readers, waiting)
}

/// The node in whose memory a pending value lies.
fn viewed(stage: &Stage, mut node: NodeId) -> NodeId {
    let is_view = |node: NodeId| stage.fusion.roles[node.0 as usize] == Role::View;
    while is_view(node) && !matches!(stage.graph[node].op, Op::ResolveMicrobatches(_) | Op::GradSum(_)) {
        node = stage.graph[node].operands[0];
    }
    node
}
