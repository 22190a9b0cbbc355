//! How much more memory a section holds after a unit has run: the bytes of what it makes less those of what it reads last.
//!
//! Only values that live and die within the section count; all others have their place anyway. What makes little of much that it reads
//! (sums over samples, such as gradients of biases and of norms' weights) counts as no growth: waiting would keep what it reads.

use super::{Members, Stage, unit_of, visit};
use crate::fuse::Unit;
use crate::graph::NodeId;
use crate::ops::Op;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Pressure {
    /// Bytes of each value of the section.
    bytes: FxHashMap<NodeId, i64>,
    /// Units that have yet to read it.
    readers: FxHashMap<NodeId, Vec<Unit>>,
    growth: FxHashMap<Unit, i64>,
    /// Growth that is none, by what the unit reads.
    slack: FxHashMap<Unit, i64>,
}

/// How many times larger than its results what a unit reads is for these to count as nothing.
const MUCH: i64 = 64;

/// Values that other sections, other stages or the runtime read, and accumulators.
pub(super) fn crossing(stage: &Stage) -> BTreeSet<NodeId> {
    let sent = stage.sends.iter().map(|&(id, _)| id);
    let named = stage.outputs.iter().map(|&(_, id)| id);
    let mut found: BTreeSet<NodeId> = sent.chain(named).chain(stage.accumulators.keys().copied()).collect();
    for &id in stage.nodes.iter().filter(|id| unit_of(stage, **id).is_some()) {
        visit(stage, id, &mut |read| {
            if stage.section(read) != stage.section(id) {
                found.insert(read);
            }
        });
    }
    found
}

/// Values whose buffers these nodes of a unit read.
fn operands(stage: &Stage, nodes: &[NodeId]) -> BTreeSet<NodeId> {
    let mut found = BTreeSet::new();
    nodes.iter().for_each(|&node| visit(stage, node, &mut |read| _ = found.insert(read)));
    found
}

/// Whether a value stays, whoever has read it.
fn is_state(stage: &Stage, id: NodeId) -> bool {
    matches!(stage.graph[id].op, Op::Param(_) | Op::Input(_) | Op::Scalar(_))
}

impl Pressure {
    pub fn new(
        stage: &Stage,
        members: &Members,
        reads: &BTreeMap<Unit, BTreeSet<NodeId>>,
        crossing: &BTreeSet<NodeId>,
    ) -> Pressure {
        let (growth, slack) = (FxHashMap::default(), FxHashMap::default());
        let mut pressure = Pressure { bytes: FxHashMap::default(), readers: FxHashMap::default(), growth, slack };
        let bytes = |n: NodeId| stage.graph.ty(n).local_bytes(&stage.plan.mesh) as i64;
        for (&unit, nodes) in members {
            let read: BTreeSet<NodeId> = operands(stage, nodes).into_iter().filter(|n| !is_state(stage, *n)).collect();
            pressure.slack.insert(unit, read.into_iter().map(bytes).sum::<i64>() / MUCH);
            let own = nodes.iter().filter(|n| stage.fusion.materialised[n.0 as usize] && !crossing.contains(n));
            let own = own.map(|&n| (n, bytes(n)));
            pressure.growth.insert(unit, own.clone().map(|(_, bytes)| bytes).sum());
            pressure.bytes.extend(own);
        }
        for (&unit, nodes) in reads {
            nodes.iter().for_each(|&n| pressure.readers.entry(n).or_default().push(unit));
        }
        let last: Vec<(Unit, i64)> = pressure.readers.iter().filter_map(|(n, units)| pressure.sole(*n, units)).collect();
        last.into_iter().for_each(|(unit, bytes)| pressure.shrink(unit, bytes));
        pressure
    }

    pub fn grows(&self, unit: Unit) -> bool {
        self.growth[&unit] > self.slack[&unit]
    }

    /// A unit that read `reads` has run. Those that are now the last to read something.
    pub fn run(&mut self, reads: &BTreeSet<NodeId>, done: &BTreeSet<Unit>) -> Vec<Unit> {
        let mut changed = Vec::new();
        for &node in reads {
            let left = self.readers.get_mut(&node).expect("whoever reads is among the readers");
            left.retain(|unit| !done.contains(unit));
            let left = left.clone();
            if let Some((unit, bytes)) = self.sole(node, &left) {
                self.shrink(unit, bytes);
                changed.push(unit);
            }
        }
        changed
    }

    fn sole(&self, node: NodeId, readers: &[Unit]) -> Option<(Unit, i64)> {
        match readers {
            [unit] => Some((*unit, *self.bytes.get(&node)?)),
            _ => None,
        }
    }

    fn shrink(&mut self, unit: Unit, bytes: i64) {
        *self.growth.get_mut(&unit).expect("every unit has a growth") -= bytes;
    }
}
