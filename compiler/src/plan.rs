//! What the planner decides and `place` applies: the mesh, and a stage and strategy for each forward node.
//!
//! Priorities: batch axes first (`samples`), then what the user pinned (`pins`, `annotated`), then the tensor axes by cost (`tensor`), then
//! stages (`stages`). Gradient nodes get nothing here: they inherit through `Graph::grad_of`.

mod advice;
pub mod annotated;
pub mod batch;
mod follow;
pub(crate) mod forward;
mod pins;
mod report;
mod samples;
mod stages;
mod tensor;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod text;
mod zero;

use crate::cost::Machine;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::recompute::{Recompute, Repeats};
use crate::schedule::{self, Layout};
use dcc_program::{AxisId, AxisList, Mesh};
use forward::Forward;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

pub use follow::follow;
pub use pins::Pin;
pub use report::{Report, StageReport, Traffic};
pub use zero::{Zero, is_narrowing};

/// Everything that `place`, `pipeline` and `lower` follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Axes `mb, pp, dp, tp` (each present even at size 1; split axes in the place of their parent; `rep` before `dp` where
    /// parameters are sharded within groups of the data-parallel ranks; `cp` behind it where ranks share sequences, then `ep` where
    /// they share experts).
    pub mesh: Mesh,
    /// Axes of every batch dim: `mb` first, then `rep`, `dp` and `ep`.
    pub batch: AxisList,
    /// By forward node of the training graph; those without one are made at each reader's wanted type (constants, random
    /// numbers, broadcasts, pointwise ops of only these) or stand for their operand (`stop_gradient`). The strategy of a `Param`
    /// gives its used type. Gradient nodes inherit through `Graph::grad_of`.
    pub strategies: BTreeMap<NodeId, Strategy>,
    /// Stage of each forward node that depends on a batched input; inputs and the others are cloned where they are read. These are
    /// the parts of `layout`: where a rank has several chunks of the model, each is a stage of its own.
    pub stages: BTreeMap<NodeId, u32>,
    pub schedule: Schedule,
    /// Chunks of the model on each rank, if the schedule does not say.
    pub virtual_stages: u32,
    /// Whether the tensor axes shard dims that weights do not have.
    pub sequence_parallel: bool,
    pub zero: Zero,
    pub repeats: Repeats,
    /// Dims of the shard of each weight that `dp` can divide.
    pub shards: BTreeMap<NodeId, Vec<AxisList>>,
    /// Those of them that only their casts to half floats are read of: like optimizer state, they lie where the update is.
    pub masters: BTreeSet<NodeId>,
    pub overlap: Overlap,
}

/// When transfers start, and are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// Each where its result is due, alone: what needs the least memory.
    Off,
    /// As soon as possible, in buckets that are full at so many bytes for each rank that takes part.
    Buckets { bytes_per_rank: u64 },
}

/// How one op is computed on the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Strategy {
    /// Axes of each factor of the op's rule, by `FactorId`, major first. An axis stands on at most one factor.
    pub factors: Vec<AxisList>,
    /// Axes over which a pending operand passes through where the op is linear; other pendings are resolved before.
    pub keep: SmallVec<[AxisId; 2]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    GPipe,
    #[default]
    OneFOneB,
    ZbH1,
    ZbH2,
    /// Two chunks on each rank, there and back.
    ZbV,
    /// The best order that a search finds for estimated times.
    Auto,
}

/// What the user asks of the planner.
#[derive(Clone, Debug)]
pub struct Parallel {
    pub dp: u32,
    /// Ranks that share each sample's sequence.
    pub cp: u32,
    /// Ranks that share samples, as those of `dp` do, and hold different experts.
    pub ep: u32,
    pub tp: u32,
    pub pp: u32,
    /// Microbatches of a step, from `batch::resolve`.
    pub microbatches: u32,
    pub schedule: Schedule,
    /// Chunks of the model on each rank, by 1F1B.
    pub virtual_stages: u32,
    /// What lies between the products that `tp` splits is sharded along dims that weights do not have: the sequence.
    pub sequence_parallel: bool,
    pub zero: Zero,
    /// Data-parallel ranks that share one copy of what `zero` shards: a divisor of `dp`; all of them where `None`.
    pub shard_group: Option<u32>,
    pub recompute: Recompute,
    /// Used types that the user fixed; the last that matches a parameter counts.
    pub pins: Vec<Pin>,
    /// What the model's own annotations ask for; flags count before them.
    pub wishes: annotated::Wishes,
    /// The rates that costs are computed with.
    pub machine: Machine,
}

impl Parallel {
    /// Tells of what is said of ranks along an axis that has one.
    pub fn without_ranks(&self) -> impl Iterator<Item = String> {
        let schedule = self.schedule != Schedule::default();
        let pin = self.pins.iter().find(|pin| pin.dim.is_some());
        let told = [
            (self.dp * self.ep == 1 && self.zero != Zero::Nothing, format!("--zero {}", self.zero as u8), "dp"),
            (self.pp == 1 && schedule, format!("--schedule {}", self.schedule.name()), "pp"),
            (self.tp == 1 && pin.is_some(), pin.map(|pin| format!("--param {pin}")).unwrap_or_default(), "tp"),
        ];
        told.into_iter().filter(|told| told.0).map(|(_, flag, axis)| format!("`{flag}` changes nothing without `--{axis}`"))
    }
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            dp: 1,
            cp: 1,
            ep: 1,
            tp: 1,
            pp: 1,
            microbatches: 1,
            schedule: Schedule::default(),
            virtual_stages: 1,
            sequence_parallel: false,
            zero: Zero::default(),
            shard_group: None,
            recompute: Recompute::default(),
            pins: Vec::new(),
            wishes: Default::default(),
            machine: Machine::default(),
        }
    }
}

impl Parallel {
    /// Parts that the model is cut into: chunks of ranks.
    pub fn parts(&self) -> u32 {
        schedule::rule(self.schedule, self.virtual_stages).layout(self.pp).parts()
    }
}

impl Plan {
    pub fn microbatches(&self) -> u32 {
        self.mesh.size_of("mb")
    }

    /// Ranks along the pipeline.
    pub fn stages(&self) -> u32 {
        self.mesh.size_of("pp")
    }

    /// Which ranks have which parts of the model.
    pub fn layout(&self) -> Layout {
        schedule::rule(self.schedule, self.virtual_stages).layout(self.stages())
    }

    /// Whether the axis splits what is computed per sample: the batch, or sequences.
    pub(crate) fn splits_samples(&self, axis: AxisId) -> bool {
        self.batch.contains(&axis) || self.mesh.name(axis) == CONTEXT
    }

    pub fn parts(&self) -> u32 {
        self.layout().parts()
    }
}

impl Schedule {
    pub const ALL: [Schedule; 6] =
        [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbH2, Schedule::ZbV, Schedule::Auto];

    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbH2 => "zb-h2",
            Schedule::ZbV => "zb-v",
            Schedule::Auto => "auto",
        }
    }

    /// Whether it runs the backward pass in halves.
    pub fn has_halves(self) -> bool {
        !matches!(self, Schedule::GPipe | Schedule::OneFOneB)
    }
}

impl Strategy {
    pub fn whole(factors: usize) -> Strategy {
        Strategy { factors: vec![AxisList::new(); factors], keep: SmallVec::new() }
    }
}

/// The axis that context parallelism splits sequences over.
const CONTEXT: &str = "cp";

/// The axis that expert parallelism splits samples and experts over.
const EXPERT: &str = "ep";

/// The mesh `mb, pp, dp` (or `rep, dp`), `cp`, `ep` and the tensor axes, major first.
fn mesh(options: &Parallel, tensor: &[(&str, u32)]) -> Mesh {
    let mut axes = vec![("mb", options.microbatches), ("pp", options.pp)];
    match options.shard_group.filter(|&group| group < options.dp) {
        Some(group) => axes.extend([("rep", options.dp / group), ("dp", group)]),
        None => axes.push(("dp", options.dp)),
    }
    axes.extend((options.cp > 1).then_some((CONTEXT, options.cp)));
    axes.extend((options.ep > 1).then_some((EXPERT, options.ep)));
    axes.extend_from_slice(tensor);
    Mesh::new(&axes)
}

/// The plan of a training graph (or of a forward graph alone).
/// Errors: a batch that the microbatches and `dp` do not divide, an op that mixes samples across microbatches, pins that match
/// nothing, more stages than the model has places to cut.
pub fn choose(graph: &Graph, options: &Parallel) -> Result<Plan> {
    let forward = Forward::of(graph);
    finished(graph, &forward, tensor::shard(&forward, options)?, options)
}

/// Tells of attention that ranks of `--tp` cannot share.
pub fn note(graph: &Graph, plan: &Plan, options: &Parallel) -> Option<String> {
    tensor::note(&Forward::of(graph), plan, options)
}

/// The plans that take least time for several amounts of memory, what `--tp` ranks share chosen with that in view: from what needs the
/// fewest bytes to what takes least time.
pub(crate) struct Front<'a> {
    graph: &'a Graph,
    options: &'a Parallel,
    forward: Forward<'a>,
    shards: tensor::Front,
}

impl<'a> Front<'a> {
    /// Errors: as `choose`; no `--tp`.
    pub fn of(graph: &'a Graph, options: &'a Parallel) -> Result<Front<'a>> {
        let forward = Forward::of(graph);
        let shards = tensor::Front::of(&forward, options)?;
        Ok(Front { graph, options, forward, shards })
    }

    /// At least one.
    pub fn len(&self) -> usize {
        self.shards.len()
    }

    /// Errors: as `choose`.
    pub fn plan(&self, number: usize) -> Result<Plan> {
        finished(self.graph, &self.forward, self.shards.plan(&self.forward, number), self.options)
    }
}

/// A plan with its stages, and what data-parallel ranks share.
fn finished(graph: &Graph, forward: &Forward, mut plan: Plan, options: &Parallel) -> Result<Plan> {
    runs(forward, &plan, options)?;
    plan.stages = stages::cut(forward, &plan, &options.machine, &options.wishes.stages)?;
    plan.shards = zero::shards(graph, &plan);
    plan.masters = zero::masters(graph, &plan);
    plan.repeats = match options.recompute {
        Recompute::Fixed(repeats) => repeats,
        Recompute::Budget => Repeats::NONE,
    };
    Ok(plan)
}

/// Errors: microbatches that the schedule cannot group.
fn runs(forward: &Forward, plan: &Plan, options: &Parallel) -> Result<()> {
    let (pp, microbatches) = (plan.stages(), plan.microbatches());
    let order = schedule::rule(plan.schedule, plan.virtual_stages).order(pp, microbatches);
    let told = |error: schedule::OrderError| {
        let what = format!("--virtual-stages {} with {microbatches} microbatches: {error}", plan.virtual_stages);
        Error::stages(what).help(advice::grouped(forward, plan, options))
    };
    order.map(|_| ()).map_err(told)
}
