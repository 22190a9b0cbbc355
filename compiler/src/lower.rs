//! From the placed graph to one program per stage: kernels, buffers, instructions, order.
//!
//! Before: a placed graph; what each stage runs, in order. After: complete programs, in which sends are waited for before their
//! section runs as many times more as messages may be under way, and the rest of a transfer's time is left to `overlap`.

mod emit;
mod layout;
mod memory;
mod select;
mod units;

use crate::error::Result;
use crate::fuse::{Fusion, fuse};
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use crate::plan::Plan;
use crate::schedule::Turns;
use crate::train::Output;
use dcc_program::program::{Mode, Program, SectionKind};
use std::collections::{BTreeMap, BTreeSet};

pub use layout::share;

/// One execution of a section: its kind and microbatch.
pub type Turn = (SectionKind, u32);

/// The programs of all stages, each of which runs its `turns`.
pub fn programs(placed: &Graph, plan: &Plan, name: &str, mode: Mode, turns: &[Turns]) -> Result<Vec<Program>> {
    let live = placed.live();
    (0..plan.stages())
        .map(|stage| {
            let here = |id: &NodeId| live[id.0 as usize] && placed[*id].stage == Some(stage);
            let nodes: Vec<NodeId> = placed.ids().filter(here).collect();
            let lowering = Stage::new(placed, plan, stage, nodes, &live);
            lowering.program(name, mode, &turns[stage as usize])
        })
        .collect()
}

/// One stage on its way to a program.
struct Stage<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    stage: u32,
    nodes: Vec<NodeId>,
    /// Values of this stage that others read, with the stage that does.
    sends: Vec<(NodeId, u32)>,
    /// Results by output name.
    outputs: Vec<(String, NodeId)>,
    /// New value of a parameter or state → the leaf that it replaces.
    updates: BTreeMap<NodeId, NodeId>,
    /// Values summed in place over microbatches: operands of `resolve_mb`, and what is added into those → the accumulator.
    accumulators: BTreeMap<NodeId, NodeId>,
    fusion: Fusion,
}

impl<'a> Stage<'a> {
    fn new(graph: &'a Graph, plan: &'a Plan, stage: u32, nodes: Vec<NodeId>, live: &[bool]) -> Stage<'a> {
        let transfers = graph.ids().filter(|id| live[id.0 as usize] && matches!(graph[*id].op, Op::Transfer(_)));
        let sends: Vec<(NodeId, u32)> = transfers
            .filter(|&id| graph[graph[id].operands[0]].stage == Some(stage))
            .map(|id| (graph[id].operands[0], graph[id].stage.expect("placed nodes have a stage")))
            .collect();
        let outputs: Vec<(String, NodeId)> =
            graph.outputs.iter().filter(|(_, id)| graph[*id].stage == Some(stage)).cloned().collect();
        let accumulators = find_accumulators(graph, plan, &nodes);
        let sums: BTreeSet<NodeId> = accumulators.iter().filter(|(node, into)| node != into).map(|(_, &into)| into).collect();
        let wanted: Vec<NodeId> = sends.iter().map(|&(id, _)| id).chain(outputs.iter().map(|&(_, id)| id)).collect();
        let fusion = fuse(graph, &nodes, &wanted, &sums);
        let updates = find_updates(graph, &nodes, &outputs);
        Stage { graph, plan, stage, nodes, sends, outputs, updates, accumulators, fusion }
    }

    fn program(self, name: &str, mode: Mode, turns: &Turns) -> Result<Program> {
        let sections = units::order(&self)?;
        let mut selection = select::Selection::new(&self, name, mode, turns);
        for (kind, units) in sections {
            selection.section(kind, &units)?;
        }
        memory::place(selection.finish(), turns)
    }
}

/// Operands of `resolve_mb`; where that is a sum of contributions that only it reads, these are added into it directly.
fn find_accumulators(graph: &Graph, plan: &Plan, nodes: &[NodeId]) -> BTreeMap<NodeId, NodeId> {
    let mut found = BTreeMap::new();
    if plan.microbatches() == 1 {
        return found;
    }
    let uses = graph.uses();
    for &id in nodes {
        if !matches!(graph[id].op, Op::ResolveMicrobatches(_)) {
            continue;
        }
        let sum = graph[id].operands[0];
        found.insert(sum, sum);
        let single =
            |o: &NodeId| uses[o.0 as usize] == 1 && graph[*o].ty == graph[sum].ty && select::can_accumulate(&graph[*o].op);
        let unique: BTreeSet<NodeId> = graph[sum].operands.iter().copied().collect();
        let distinct = unique.len() == graph[sum].operands.len();
        if matches!(graph[sum].op, Op::GradSum(_)) && distinct && graph[sum].operands.iter().all(single) {
            found.extend(graph[sum].operands.iter().map(|&o| (o, sum)));
        }
    }
    found
}

/// Which outputs replace a parameter or state, and which leaf of this stage that is.
fn find_updates(graph: &Graph, nodes: &[NodeId], outputs: &[(String, NodeId)]) -> BTreeMap<NodeId, NodeId> {
    let leaf = |name: &str| {
        let Some(Output::New { name, kind, piece }) = Output::parse(name) else { return None };
        nodes
            .iter()
            .copied()
            .find(|&id| matches!(&graph[id].op, Op::Param(p) if p.name == name && p.kind == kind && p.piece == piece))
    };
    outputs.iter().filter_map(|(name, id)| Some((*id, leaf(name)?))).collect()
}

/// Sections in the order in which one step meets them.
fn section_kinds() -> [Phase; 8] {
    SectionKind::ALL
}
