//! What the backward pass computes again instead of reading it from memory.
//!
//! Before: a placed training graph, in which backward nodes read whatever forward nodes made. After: the same graph, in which
//! they read clones, in their own phase, of the forward values that are not kept. A clone stands where its first reader is, so that what
//! it makes lives briefly. Random numbers are counters', so that what is computed again is what it was.

mod cut;
mod segments;
#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use crate::plan::Plan;
use crate::schedule::{self, Turns};
use dcc_program::Mesh;
use dcc_program::program::SectionKind;
use segments::Line;
use std::collections::BTreeSet;

/// `--recompute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    Fixed(Repeats),
    /// As little as `--memory-limit` allows.
    #[default]
    Budget,
}

/// How much of each stage is computed again: a leading part as a whole, and behind it a part of which only what takes little time is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Repeats {
    /// Where the first ends, in parts of [`PARTS`] by the bytes that the backward reads.
    whole: u8,
    /// Where the second ends; at least `whole`.
    quick: u8,
}

/// Into how many parts a stage is divided to compute no more again than memory demands.
const PARTS: u8 = 8;

impl Repeats {
    /// Nothing but what kernels compute in passing.
    pub const NONE: Repeats = Repeats { whole: 0, quick: 0 };
    /// What takes little time: everything but products with weights, attention, sorting and communication (Korthikanti et al. 2022,
    /// arXiv 2205.05198, section 5). Of all sets of values that the rest can be made of, that of the fewest bytes is kept.
    pub const SELECTIVE: Repeats = Repeats { whole: 0, quick: PARTS };
    /// Everything, a segment of each stage after the other, from the values between them (Chen et al. 2016, arXiv 1604.06174).
    pub const FULL: Repeats = Repeats { whole: PARTS, quick: PARTS };

    /// From nothing to everything: first more and more of what is quick, then of the rest.
    pub fn ladder() -> Vec<Repeats> {
        let quick = (0..=PARTS).map(|quick| Repeats { whole: 0, quick });
        quick.chain((1..=PARTS).map(|whole| Repeats { whole, quick: PARTS })).collect()
    }

    /// For reports: `none`, `selective`, `full`, `selective 3/8`, `full 1/8, else selective`.
    pub fn text(self) -> String {
        match self {
            Repeats::NONE => "none".to_owned(),
            Repeats::SELECTIVE => "selective".to_owned(),
            Repeats::FULL => "full".to_owned(),
            Repeats { whole: 0, quick } => format!("selective {quick}/{PARTS}"),
            Repeats { whole, .. } => format!("full {whole}/{PARTS}, else selective"),
        }
    }
}

/// `placed` with the forward values that the plan does not keep computed again where the backward reads them.
pub fn apply(placed: Graph, plan: &Plan) -> Result<Graph> {
    if plan.repeats == Repeats::NONE {
        return Ok(placed);
    }
    let live = placed.live();
    let turns = schedule::turns(plan, &schedule::order(plan));
    let mut again = vec![false; placed.nodes.len()];
    for part in 0..plan.parts() {
        for id in Stage::of(&placed, plan, &turns, part, &live).again(plan.repeats) {
            again[id.0 as usize] = true;
        }
    }
    clone_readers(&placed, &again)
}

/// The forward pass of a stage, or of one chunk of it, as the backward pass sees it.
struct Stage<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    /// What is computed once per microbatch, ascending.
    nodes: Vec<NodeId>,
    /// What the backward reads of it.
    needed: BTreeSet<NodeId>,
    /// What another chunk of the rank reads of it.
    shared: BTreeSet<NodeId>,
    /// Microbatches whose values are alive at once.
    in_flight: u64,
}

impl<'a> Stage<'a> {
    fn of(graph: &'a Graph, plan: &'a Plan, turns: &[Turns], part: u32, live: &[bool]) -> Stage<'a> {
        let all = || graph.ids().filter(|id| live[id.0 as usize]);
        let is_here = |id: NodeId| graph[id].stage == Some(part);
        let nodes = all().filter(|&id| is_here(id) && graph[id].phase == Phase::Forward).collect();
        let mut stage = Stage {
            graph,
            mesh: &plan.mesh,
            nodes,
            needed: BTreeSet::new(),
            shared: BTreeSet::new(),
            in_flight: in_flight(plan, turns, part),
        };
        for id in all() {
            let read = graph[id].operands.iter().copied().filter(|&o| is_here(o) && graph[o].phase == Phase::Forward);
            if is_here(id) && graph[id].phase.is_backward() {
                stage.needed.extend(read);
            } else if !is_here(id) && !matches!(graph[id].op, Op::Transfer(_)) {
                stage.shared.extend(read);
            }
        }
        stage
    }

    /// The values that no reader in the backward pass finds kept.
    fn again(&self, repeats: Repeats) -> Vec<NodeId> {
        let line = Line::of(self);
        let (whole, quick) = (line.place(repeats.whole), line.place(repeats.quick));
        let quick = &self.nodes[whole..quick.max(whole)];
        let may = |id: NodeId| self.is_repeatable(id) && self.is_quick(id);
        let (crossing, least) = (line.kept(self, whole), cut::kept(self, quick, may));
        let of_whole = self.nodes[..whole].iter().filter(|&&id| self.is_repeatable(id) && !crossing.contains(&id));
        of_whole.chain(quick.iter().filter(|&&id| may(id) && !least.contains(&id))).copied().collect()
    }

    /// Whether computing it a second time gives the same, changes nothing and moves nothing that backward would not: not what is
    /// received or read by another chunk, what is added up over microbatches, nor what reads such a sum before it is whole.
    fn is_repeatable(&self, id: NodeId) -> bool {
        let node = &self.graph[id];
        let sums = |id: NodeId| {
            let mb = self.mesh.microbatch_axis();
            self.graph.ty(id).sharding.pending.iter().any(|pending| Some(pending.0) == mb)
        };
        let fixed = matches!(
            node.op,
            Op::Input(_) | Op::Param(_) | Op::Scalar(_) | Op::Transfer(_) | Op::StageSum(_) | Op::ResolveMicrobatches(_)
        );
        // A table would be gathered once more for a few of its rows.
        let gathered = |o: &NodeId| matches!(self.graph[*o].op, Op::AllGather(_)) && !self.is_of_samples(*o);
        let looks_up = matches!(node.op, Op::Gather(_)) && node.operands.first().is_some_and(gathered);
        !fixed && !looks_up && !self.shared.contains(&id) && !sums(id) && !node.operands.iter().any(|&o| sums(o))
    }

    /// Whether it takes about as long as reading its operands.
    fn is_quick(&self, id: NodeId) -> bool {
        let node = &self.graph[id];
        match &node.op {
            // Scores and what they weigh; not a product with a weight.
            Op::DotGeneral(_) => node.operands.iter().all(|&o| self.is_of_samples(o)),
            Op::Convolution(_) | Op::Attention(_) | Op::MaxPool(_) | Op::Cumsum(_) | Op::TopK(_) | Op::ScatterAdd(_) => false,
            op => !op.is_communication(),
        }
    }

    fn is_of_samples(&self, id: NodeId) -> bool {
        self.graph.ty(id).is_per_microbatch(self.mesh)
    }

    fn bytes(&self, id: NodeId) -> u64 {
        self.graph.ty(id).local_bytes(self.mesh)
    }
}

/// Most microbatches that are between forward and backward of a part of the model at once.
fn in_flight(plan: &Plan, turns: &[Turns], part: u32) -> u64 {
    let (rank, chunk) = plan.layout().place(part);
    let (mut now, mut most) = (0_u64, 1);
    for (section, _) in &turns[rank as usize].list {
        match section.kind {
            SectionKind::Forward if section.chunk == chunk => now += 1,
            // A half still reads what the other has.
            SectionKind::Backward | SectionKind::BackwardWeight if section.chunk == chunk => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// `graph` in which backward nodes read clones of what is to be computed again.
fn clone_readers(graph: &Graph, again: &[bool]) -> Result<Graph> {
    let none = || vec![None; graph.nodes.len()];
    let mut clones = Clones { graph, again, phases: first_readers(graph, again), kept: none(), made: none() };
    graph.map(|out, id, node, operands| {
        let mut operands = operands.to_vec();
        if node.phase.is_backward() {
            for (operand, &old) in operands.iter_mut().zip(&node.operands).filter(|(_, old)| again[old.0 as usize]) {
                *operand = clones.of(out, old);
            }
            out.set_origin_of(graph, id);
        }
        let made = out.add_typed(node.op.clone(), &operands, node.ty.clone());
        clones.kept[id.0 as usize] = Some(made);
        Ok(made)
    })
}

/// The section in which each value is first wanted again, by the backward pass itself or for another value.
fn first_readers(graph: &Graph, again: &[bool]) -> Vec<Option<Phase>> {
    let live = graph.live();
    let mut first: Vec<Option<Phase>> = vec![None; graph.nodes.len()];
    for id in graph.ids().rev().filter(|id| live[id.0 as usize]) {
        let node = &graph[id];
        let reader = if node.phase.is_backward() { Some(node.phase) } else { first[id.0 as usize] };
        let Some(reader) = reader else { continue };
        for operand in node.operands.iter().filter(|o| again[o.0 as usize]) {
            let before = first[operand.0 as usize];
            first[operand.0 as usize] = Some(before.map_or(reader, |before| before.min(reader)));
        }
    }
    first
}

struct Clones<'a> {
    graph: &'a Graph,
    again: &'a [bool],
    phases: Vec<Option<Phase>>,
    /// New nodes by old ones, and clones.
    kept: Vec<Option<NodeId>>,
    made: Vec<Option<NodeId>>,
}

impl Clones<'_> {
    /// The clone of `id`, after those of what it reads.
    fn of(&mut self, out: &mut Graph, id: NodeId) -> NodeId {
        let again = |o: &NodeId| self.again[o.0 as usize];
        let (mut open, mut wanted) = (vec![id], BTreeSet::new());
        while let Some(id) = open.pop() {
            if self.made[id.0 as usize].is_none() && wanted.insert(id) {
                open.extend(self.graph[id].operands.iter().copied().filter(again));
            }
        }
        let cursor = out.cursor();
        out.set_grad_of(None);
        for id in wanted {
            let node = &self.graph[id];
            let operand = |o: &NodeId| if again(o) { self.made[o.0 as usize] } else { self.kept[o.0 as usize] };
            let operands: Vec<NodeId> = node.operands.iter().map(|o| operand(o).expect("operands come first")).collect();
            out.set_origin_of(self.graph, id);
            out.set_phase(self.phases[id.0 as usize].expect("a reader wants it"));
            self.made[id.0 as usize] = Some(out.add_typed(node.op.clone(), &operands, node.ty.clone()));
        }
        out.set_cursor(cursor);
        self.made[id.0 as usize].expect("just made")
    }
}
