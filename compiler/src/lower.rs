//! From the placed graph to one program per stage: kernels, buffers, instructions, order.
//!
//! Before: a placed graph; what each stage runs, in order. After: complete programs, in which sends are waited for before their
//! section runs as many times more as messages may be under way, and all other transfers start and are waited for where `overlap` says.

mod early;
mod emit;
mod layout;
mod memory;
mod overlap;
mod select;
mod units;

use crate::error::Result;
use crate::fuse::{Fusion, fuse};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Op;
use crate::place::can_accumulate;
use crate::plan::Plan;
use crate::schedule::{Layout, Turns};
use crate::train::Output;
use dcc_program::program::{Mode, Program, SectionId, SectionKind};
use std::collections::{BTreeMap, BTreeSet};

pub use layout::share;

/// One execution of a section, and its microbatch.
pub type Turn = (SectionId, u32);

/// A program, and which node of the placed graph each of its buffers is when it is written; of a sum, as long as it is added to, none.
#[derive(Clone, Debug)]
pub struct Traced {
    pub program: Program,
    pub nodes: Vec<Option<NodeId>>,
}

/// The programs of all stages, each of which runs its `turns`.
pub fn programs(placed: &Graph, plan: &Plan, name: &str, mode: Mode, turns: &[Turns]) -> Result<Vec<Program>> {
    Ok(traced(placed, plan, name, mode, turns)?.into_iter().map(|traced| traced.program).collect())
}

/// The same, with what their buffers are.
pub fn traced(placed: &Graph, plan: &Plan, name: &str, mode: Mode, turns: &[Turns]) -> Result<Vec<Traced>> {
    let live = placed.live();
    let layout = plan.layout();
    (0..plan.stages())
        .map(|stage| {
            let here = |id: &NodeId| live[id.0 as usize] && placed[*id].stage.map(|part| layout.place(part).0) == Some(stage);
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
    layout: Layout,
    nodes: Vec<NodeId>,
    /// Values of this stage that others read, with the part of the model that does.
    sends: Vec<(NodeId, u32)>,
    /// Results by output name.
    outputs: Vec<(String, NodeId)>,
    /// New value of a parameter or state → the leaf that it replaces.
    updates: BTreeMap<NodeId, NodeId>,
    /// Values summed in place over microbatches: operands of `resolve_mb`, and what is added into those → the accumulator.
    accumulators: BTreeMap<NodeId, NodeId>,
    /// Terms of sums that each section adds up in place → the sum, in the memory of the term that is made first.
    chains: BTreeMap<NodeId, NodeId>,
    fusion: Fusion,
}

impl<'a> Stage<'a> {
    fn new(graph: &'a Graph, plan: &'a Plan, stage: u32, nodes: Vec<NodeId>, live: &[bool]) -> Stage<'a> {
        let layout = plan.layout();
        let is_here = |id: NodeId| layout.place(part_of(graph, id)).0 == stage;
        let transfers = graph.ids().filter(|id| live[id.0 as usize] && matches!(graph[*id].op, Op::Transfer(_)));
        let sends: Vec<(NodeId, u32)> = transfers
            .filter(|&id| is_here(graph[id].operands[0]))
            .map(|id| (graph[id].operands[0], part_of(graph, id)))
            .collect();
        let outputs: Vec<(String, NodeId)> = graph.outputs.iter().filter(|(_, id)| is_here(*id)).cloned().collect();
        let accumulators = find_accumulators(graph, plan, &nodes);
        let mut sums: BTreeSet<NodeId> =
            accumulators.iter().filter(|(node, into)| node != into).map(|(_, &into)| into).collect();
        let chains = find_chains(graph, plan, &nodes, &accumulators);
        sums.extend(chains.values());
        let wanted: Vec<NodeId> = sends.iter().map(|&(id, _)| id).chain(outputs.iter().map(|&(_, id)| id)).collect();
        let fusion = fuse(graph, &nodes, &wanted, &sums);
        let updates = find_updates(graph, &nodes, &outputs);
        Stage { graph, plan, stage, layout, nodes, sends, outputs, updates, accumulators, chains, fusion }
    }

    /// The section that has a node.
    fn section(&self, id: NodeId) -> SectionId {
        let kind = self.graph[id].phase;
        let chunk = if kind.is_pass() { self.layout.place(part_of(self.graph, id)).1 } else { 0 };
        SectionId { kind, chunk }
    }

    /// The lane of messages from one chunk of a rank to one of another: chunks run their microbatches in orders of their own.
    fn lane(&self, from: u32, to: u32) -> u32 {
        from * self.layout.chunks + to
    }

    /// All sections that a step may have, in the order in which a microbatch meets them.
    fn sections(&self) -> Vec<SectionId> {
        let chunks = |kind: SectionKind| 0..if kind.is_pass() { self.layout.chunks } else { 1 };
        let all = SectionKind::ALL.into_iter().flat_map(|kind| chunks(kind).map(move |chunk| SectionId { kind, chunk }));
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn program(self, name: &str, mode: Mode, turns: &Turns) -> Result<Traced> {
        let sections = units::order(&self)?;
        let mut selection = select::Selection::new(&self, name, mode, turns);
        for (id, units) in sections {
            selection.section(id, &units)?;
        }
        let nodes = selection.nodes();
        let mut selected = selection.finish();
        memory::update_in_place(&mut selected);
        overlap::overlap(&mut selected, self.plan);
        early::update_early(&mut selected, turns);
        Ok(Traced { program: memory::place(selected, turns)?, nodes })
    }
}

/// Operands of `resolve_mb`; where that is a sum of contributions that only it reads, these are added into it directly.
fn find_accumulators(graph: &Graph, plan: &Plan, nodes: &[NodeId]) -> BTreeMap<NodeId, NodeId> {
    let mut found = BTreeMap::new();
    if plan.microbatches() == 1 {
        return found;
    }
    let uses = graph.uses();
    let is_copy = |node: &Node| matches!(node.op, Op::GradSum(_)) && node.operands.len() == 1;
    let adds = |node: &Node| can_accumulate(&node.op) || is_copy(node);
    for &id in nodes {
        if !matches!(graph[id].op, Op::ResolveMicrobatches(_)) {
            continue;
        }
        let sum = graph[id].operands[0];
        found.insert(sum, sum);
        let single = |o: &NodeId| uses[o.0 as usize] == 1 && graph[*o].ty == graph[sum].ty && adds(&graph[*o]);
        let unique: BTreeSet<NodeId> = graph[sum].operands.iter().copied().collect();
        let distinct = unique.len() == graph[sum].operands.len();
        if matches!(graph[sum].op, Op::GradSum(_)) && distinct && graph[sum].operands.iter().all(single) {
            found.extend(graph[sum].operands.iter().map(|&o| (o, sum)));
        }
    }
    found
}

/// Terms of sums, made by one section and read by nothing else, that products and their kin can add up as they make them.
fn find_chains(
    graph: &Graph,
    plan: &Plan,
    nodes: &[NodeId],
    accumulators: &BTreeMap<NodeId, NodeId>,
) -> BTreeMap<NodeId, NodeId> {
    let (uses, mb) = (graph.uses(), plan.mesh.microbatch_axis());
    let mut found = BTreeMap::new();
    // The update adds up what it makes of each gradient when that is there.
    let is_sum = |id: &NodeId| matches!(graph[*id].op, Op::GradSum(_)) && graph[*id].phase.is_pass();
    for &id in nodes.iter().filter(|id| is_sum(id) && !accumulators.contains_key(*id)) {
        let node = &graph[id];
        // What is added up over microbatches is counted by microbatch.
        let counted = plan.microbatches() > 1 && mb.is_some_and(|mb| node.ty.sharding.is_pending(mb));
        let distinct = node.operands.iter().collect::<BTreeSet<_>>().len() == node.operands.len();
        // Half floats would be rounded after each term.
        let wide = node.ty.dtype.bytes() >= 4;
        let adds = |o: &NodeId| {
            let term = &graph[*o];
            can_accumulate(&term.op)
                && !sums_rows(graph, *o)
                && uses[o.0 as usize] == 1
                && term.ty == node.ty
                && term.section() == node.section()
        };
        if !counted && wide && distinct && node.operands.len() > 1 && node.operands.iter().all(adds) {
            found.extend(node.operands.iter().map(|&o| (o, id)));
        }
    }
    found
}

/// Whether it is a reduction over the last dims, which is part of the kernel that makes its operand.
fn sums_rows(graph: &Graph, id: NodeId) -> bool {
    let Op::Reduce(reduce) = &graph[id].op else { return false };
    let rank = graph.ty(graph[id].operands[0]).rank();
    reduce.dims.iter().rev().enumerate().all(|(i, &d)| usize::from(d) == rank - 1 - i) && reduce.dims.len() < rank
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

/// The part of the model that a node belongs to; of what the chunks of a rank share, the first.
fn part_of(graph: &Graph, id: NodeId) -> u32 {
    graph[id].stage.expect("placed nodes have a stage")
}
