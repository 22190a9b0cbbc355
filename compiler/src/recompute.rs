//! What the backward pass computes again instead of reading it from memory.
//!
//! Before: a placed training graph, in which backward nodes read whatever forward nodes made. After: the same graph, in which
//! they read clones, in their own phase, of the forward values that are not kept. A clone stands where its first reader is, so that what
//! it makes lives briefly. Random numbers are counters', so that what is computed again is what it was.

mod clones;
mod cut;
mod segments;
#[cfg(test)]
mod tests;

use crate::cost::sections;
use crate::error::Result;
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use crate::plan::Plan;
use crate::schedule::{self, Turns};
use clones::Choice;
use dcc_program::factors::FactorSpec;
use dcc_program::program::SectionKind;
use dcc_program::{Mesh, TensorType};
use segments::Line;
use std::collections::{BTreeMap, BTreeSet};

/// `--recompute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    Fixed(Repeats),
    /// As little as `--memory-limit` allows.
    #[default]
    Budget,
}

/// How much of each stage is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Repeats {
    /// What takes little time, in a leading part of [`PARTS`] by the bytes that the backward reads.
    Quick(u8),
    /// That and products that multiply and add at most so often for each byte that need not be kept then.
    Products { flops: u16, lasting: Lasting },
    /// Everything, in a leading part of [`PARTS`]; behind it what takes little time.
    Whole(u8),
}

/// How long a value that is computed again lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lasting {
    /// From its first reader to its last.
    Throughout,
    /// Within a segment: what is read in several is computed again in each. What is kept, and what a segment computes again, may together
    /// take so many eighths of what is kept.
    Segment(u8),
    /// Within a segment, where what several read is kept.
    Between,
}

/// Into how many parts a stage is divided to compute no more again than memory demands.
const PARTS: u8 = 8;
/// What products may multiply and add for each byte that they save.
const FLOPS: [u16; 10] = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
/// What there is room for in segments, in eighths of what is kept.
const ROOM: [u8; 3] = [16, 12, 9];

impl Default for Repeats {
    fn default() -> Repeats {
        Repeats::NONE
    }
}

impl Repeats {
    /// Nothing but what kernels compute in passing.
    pub const NONE: Repeats = Repeats::Quick(0);
    /// What takes little time: everything but products with weights, attention, sorting and communication (Korthikanti et al. 2022,
    /// arXiv 2205.05198, section 5). Of all sets of values that the rest can be made of, that of the fewest bytes is kept.
    pub const SELECTIVE: Repeats = Repeats::Quick(PARTS);
    /// Everything, a segment of each stage after the other, from the values between them (Chen et al. 2016, arXiv 1604.06174).
    pub const FULL: Repeats = Repeats::Whole(PARTS);

    /// From nothing to all that is quick: each keeps less than the one before.
    pub fn quick() -> Vec<Repeats> {
        (0..=PARTS).map(Repeats::Quick).collect()
    }

    /// What may save more memory than all that is quick.
    pub fn slower() -> Vec<Repeats> {
        let products = |lasting| FLOPS.map(|flops| Repeats::Products { flops, lasting });
        let lasting = [Lasting::Throughout].into_iter().chain(ROOM.map(Lasting::Segment)).chain([Lasting::Between]);
        let products = lasting.flat_map(products);
        products.chain((1..=PARTS).map(Repeats::Whole)).collect()
    }

    /// For reports: `none`, `selective`, `full`, `selective 3/8`, `full 1/8, else selective`, `selective, and products up to 64 FLOP a byte`.
    pub fn text(self) -> String {
        match self {
            Repeats::NONE => "none".to_owned(),
            Repeats::SELECTIVE => "selective".to_owned(),
            Repeats::FULL => "full".to_owned(),
            Repeats::Quick(part) => format!("selective {part}/{PARTS}"),
            Repeats::Whole(part) => format!("full {part}/{PARTS}, else selective"),
            Repeats::Products { flops, lasting } => {
                let products = format!("selective, and products up to {flops} FLOP a byte");
                match lasting {
                    Lasting::Throughout => products,
                    Lasting::Between => format!("{products}, from values between segments"),
                    Lasting::Segment(room) => format!("{products}, once a segment of {room}/8"),
                }
            }
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
    let mut choice = Choice::none(placed.nodes.len());
    for part in 0..plan.parts() {
        Stage::of(&placed, plan, &turns, part, &live).choose(plan.repeats, &mut choice);
    }
    clones::clone_readers(&placed, &choice)
}

/// The forward pass of a stage, or of one chunk of it, as the backward pass sees it.
struct Stage<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    /// What is computed once per microbatch, in order.
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
        let nodes: Vec<NodeId> = all().filter(|&id| is_here(id) && graph[id].phase == Phase::Forward).collect();
        let (mut needed, mut shared) = (BTreeSet::new(), BTreeSet::new());
        for id in all() {
            let read = graph[id].operands.iter().copied().filter(|&o| is_here(o) && graph[o].phase == Phase::Forward);
            if is_here(id) && graph[id].phase.is_backward() {
                needed.extend(read);
            } else if !is_here(id) && !matches!(graph[id].op, Op::Transfer(_)) {
                shared.extend(read);
            }
        }
        let nodes = in_order(graph, nodes, &needed);
        Stage { graph, mesh: &plan.mesh, nodes, needed, shared, in_flight: in_flight(plan, turns, part) }
    }

    /// Notes of this stage which values no reader in the backward pass finds kept, and the segments.
    fn choose(&self, repeats: Repeats, choice: &mut Choice) {
        let line = Line::of(self);
        let all = self.nodes.len();
        let (whole, quick, flops) = match repeats {
            Repeats::Quick(part) => (0, line.place(part), 0),
            Repeats::Products { flops, .. } => (0, all, flops),
            Repeats::Whole(part) => (line.place(part), all, 0),
        };
        let price = |id: NodeId| self.price(id, flops);
        let crossing = line.kept(self, whole);
        let (least, between) = match repeats {
            Repeats::Products { lasting: Lasting::Between, .. } => line.between(self, price),
            _ => (cut::kept(self, &self.nodes[whole..quick.max(whole)], &self.needed, price), Vec::new()),
        };
        let is_again = |place: usize, id: NodeId| match place < whole {
            true => self.is_repeatable(id) && !crossing.contains(&id),
            false => place < quick && price(id).is_some() && !least.contains(&id),
        };
        let again: Vec<bool> = self.nodes.iter().enumerate().map(|(place, &id)| is_again(place, id)).collect();
        let ends = match repeats {
            Repeats::Products { lasting: Lasting::Segment(room), .. } => {
                let bytes: u64 = least.iter().map(|&id| self.bytes(id)).sum();
                let more = bytes.saturating_mul(self.in_flight) / 8 * u64::from(room.saturating_sub(8));
                line.apart(self, &again, &least, bytes + more)
            }
            _ => between,
        };
        for (place, &id) in self.nodes.iter().enumerate() {
            choice.set(id, again[place], ends.partition_point(|&end| end <= place) as u32);
        }
    }

    /// What computing it again costs, in bytes of memory, where a byte is worth so much computing; none if it may not be.
    fn price(&self, id: NodeId, flops: u16) -> Option<u64> {
        match self.is_repeatable(id) {
            true if self.is_quick(id) => Some(0),
            true => self.flops(id)?.checked_div(u64::from(flops)),
            false => None,
        }
    }

    /// Multiplications and additions on one rank of a product.
    fn flops(&self, id: NodeId) -> Option<u64> {
        let node = &self.graph[id];
        let operands: Vec<&TensorType> = node.operands.iter().map(|&o| self.graph.ty(o)).collect();
        let (spec, images): (&FactorSpec, Vec<&str>) = match &node.op {
            Op::DotGeneral(op) => (&op.spec, Vec::new()),
            Op::Convolution(op) => (&op.spec, op.windows.iter().map(|w| &w.image[..]).collect()),
            _ => return None,
        };
        Some(sections::volume(spec, &operands, &node.ty, self.mesh, &images).saturating_mul(2))
    }

    /// Bytes of the gradients that a product's backward computes: those of its operands.
    fn gradient_bytes(&self, id: NodeId) -> u64 {
        let node = &self.graph[id];
        match node.op {
            Op::DotGeneral(_) | Op::Convolution(_) => node.operands.iter().map(|&o| self.bytes(o)).sum(),
            _ => 0,
        }
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

/// `nodes` with those that only the backward needs, which autodiff adds last, right behind what they read.
fn in_order(graph: &Graph, mut nodes: Vec<NodeId>, needed: &BTreeSet<NodeId>) -> Vec<NodeId> {
    // What the backward reads, or another of these, and no forward node else.
    let (mut read, mut aside) = (BTreeSet::new(), needed.clone());
    for &id in nodes.iter().rev() {
        if read.contains(&id) {
            aside.remove(&id);
        }
        if aside.contains(&id) { &mut aside } else { &mut read }.extend(graph[id].operands.iter().copied());
    }
    let mut places: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    for &id in &nodes {
        let behind = graph[id].operands.iter().filter_map(|o| places.get(o)).max();
        places.insert(id, if aside.contains(&id) { behind.copied().unwrap_or(NodeId(0)) } else { id });
    }
    nodes.sort_by_key(|id| (places[id], *id));
    nodes
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
