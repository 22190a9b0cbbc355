//! Shards the forward graph over the tensor axes, and sequences and experts over theirs: the cheapest strategies by exact dynamic
//! programming over the frontier.
//!
//! Nothing is recognised: Megatron's column and row split, the vocabulary-parallel embedding and loss are what costs least. So is
//! sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) where dims that no weight has may be sharded, and what
//! is kept for the backward pass costs.
//! Errors: nothing to shard; no experts.

#[cfg(test)]
pub(super) mod account;
mod classes;
mod context;
mod experts;
mod frontier;
mod heads;
mod layout;
mod model;
#[cfg(test)]
mod tests;

use super::advice;
use super::annotated::Wish;
use super::forward::{Forward, Kind};
use super::pins::{self, Pins};
use super::samples::{self, Samples};
use super::{CONTEXT, EXPERT, Overlap, Parallel, Plan, Schedule, Zero};
use crate::cost::Machine;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::Op;
use classes::Classes;
use context::Context;
use dcc_program::{AxisId, AxisList, FactorId};
use experts::Experts;
use frontier::Solved;
use heads::heads;
use layout::TensorAxes;
use model::{Along, Builder, Cost, Held, Problem};
use std::collections::{BTreeMap, BTreeSet};

pub(super) use heads::note;

/// The plan without stages.
pub(super) fn shard(forward: &Forward, options: &Parallel) -> Result<Plan> {
    let pins = Pins::of(forward.graph, options)?;
    if options.tp > 1 || options.cp > 1 || options.ep > 1 {
        let along = if options.sequence_parallel { Along::Sequence } else { Along::Features };
        let Solution { plan, problem, found, .. } = solve(forward, options, pins, along, 1)?;
        return Ok(planned(&plan, &problem, &found[0]));
    }
    let (plan, samples) = whole(forward, options, &[("tp", 1)])?;
    check_whole(&pins, |_| true, forward, &plan, &samples)?;
    Ok(plan)
}

/// Levels of memory that plans are found for.
const LEVELS: u64 = 32;

/// The cheapest plans, without stages, for several amounts of memory: from what needs fewest bytes to what takes least time.
pub(super) struct Front(Solution);

impl Front {
    /// Errors: as `shard`; no tensor axis.
    pub fn of(forward: &Forward, options: &Parallel) -> Result<Front> {
        Ok(Front(solve(forward, options, Pins::of(forward.graph, options)?, Along::Memory, LEVELS)?))
    }

    /// At least one.
    pub fn len(&self) -> usize {
        self.0.found.len()
    }

    pub fn plan(&self, forward: &Forward, number: usize) -> Plan {
        let Solution { plan, problem, found } = &self.0;
        let sequence_parallel = shards_a_sequence(forward, &Classes::of(forward), problem, &found[number]);
        Plan { sequence_parallel, ..planned(plan, problem, &found[number]) }
    }
}

/// A way to name the tensor axes, and the cheapest choices under it.
struct Solution {
    plan: Plan,
    problem: Problem,
    /// By memory; the last takes least time.
    found: Vec<Solved>,
}

/// Whether a tensor axis shards something computed per microbatch along a dim that no weight has.
fn shards_a_sequence(forward: &Forward, classes: &Classes, problem: &Problem, solved: &Solved) -> bool {
    let tensor = problem.tensor_axes();
    problem.items.iter().zip(&solved.choices).any(|(item, &choice)| {
        let factors = &problem.classes[item.class].choices[choice].factors;
        let shards = |f: FactorId| factors[usize::from(f.0)].iter().any(|axis| tensor.contains(axis));
        let along = |f: FactorId| shards(f) && !classes.is_feature(forward, item.id, f);
        forward.kind(item.id) == Kind::Batched && forward.rule(item.id).spec.ids().any(along)
    })
}

/// `plan` with the strategies of a solution.
fn planned(plan: &Plan, problem: &Problem, solved: &Solved) -> Plan {
    let mut plan = plan.clone();
    for (item, &choice) in problem.items.iter().zip(&solved.choices) {
        let choice = &problem.classes[item.class].choices[choice];
        let strategy = plan.strategies.get_mut(&item.id).expect("every item has its batch axes");
        *strategy = problem.merge(strategy, &choice.factors, &choice.keep);
    }
    plan
}

/// What no tensor axis can shard lies as the batch axes have it.
fn check_whole(pins: &Pins, which: impl Fn(NodeId) -> bool, forward: &Forward, plan: &Plan, samples: &Samples) -> Result<()> {
    let values = pins.values.iter().map(|(&id, wish)| (id, samples.lies(forward, id), wish));
    let reads = pins.reads.iter().map(|(&(reader, value), wish)| (value, samples.has(forward, reader, value), wish));
    for (_, sharding, wish) in values.chain(reads).filter(|(id, ..)| which(*id)) {
        if !wish.is_met(&sharding, &plan.mesh) {
            return Err(unmet(wish, [pins::shards(&sharding, &plan.mesh)].into()));
        }
    }
    Ok(())
}

/// `possible`: shards of each dim.
fn unmet(wish: &Wish, possible: BTreeSet<Vec<u64>>) -> Error {
    let mut what = format!("no plan gives it {:?} shards", wish.shards);
    if possible.contains(&wish.shards) {
        what += &format!(" held by {:?}", wish.holders);
    }
    let some: Vec<String> = possible.iter().take(4).map(|shards| format!("{shards:?}")).collect();
    Error::pin(what).at(&wish.at).help(format!("shards that it can have on this mesh: {}", some.join(", ")))
}

/// Takes an axis that choices place out of what follows samples, but for inputs. Returns it and the factors that it stood on.
fn take(name: &str, forward: &Forward, plan: &mut Plan, samples: &mut Samples) -> Option<(AxisId, BTreeMap<NodeId, FactorId>)> {
    let axis = plan.mesh.axis(name)?;
    let (others, found) = samples.without(axis);
    for (id, strategy) in &mut plan.strategies {
        if !matches!(forward.graph[*id].op, Op::Input(_)) {
            *strategy = others.strategies[id].clone();
        }
    }
    *samples = others;
    Some((axis, found))
}

/// The cheapest of all ways to name the tensor axes.
fn solve(forward: &Forward, options: &Parallel, pins: Pins, along: Along, levels: u64) -> Result<Solution> {
    let classes = Classes::of(forward);
    let mut best: Option<(Cost, Solution)> = None;
    for axes in splits(forward, &classes, options.tp) {
        let named: Vec<(&str, u32)> = axes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let (mut plan, inputs) = whole(forward, options, &named)?;
        let mut samples = inputs.clone();
        let context = take(CONTEXT, forward, &mut plan, &mut samples).map(|(axis, positions)| Context { axis, positions });
        let experts = match take(EXPERT, forward, &mut plan, &mut samples) {
            Some((axis, found)) => Some(Experts::of(forward, &classes, axis, options, found)?),
            None => None,
        };
        let pins = experts.iter().fold(pins.clone(), |pins, experts| pins.beside_experts(&experts.stacks, options.ep));
        check_whole(&pins, |id| matches!(forward.graph[id].op, Op::Input(_)), forward, &plan, &inputs)?;
        let tensor = named.iter().filter(|(_, size)| *size > 1).filter_map(|(name, _)| plan.mesh.axis(name));
        let others = context.iter().map(|context| context.axis).chain(experts.iter().map(|experts| experts.axis));
        let axes: TensorAxes = others.chain(tensor).collect();
        let held = held(options);
        let (context, experts) = (context.as_ref(), experts.as_ref());
        let builder = Builder { forward, samples: &samples, classes: &classes, pins: &pins, context, experts, along, held };
        let problem = builder.build(&plan.mesh, axes, rates(options, along))?;
        refuse_unshardable(forward, &classes, &problem, options)?;
        let found = frontier::front(&problem, levels);
        let cost = found.last().expect("every node can be computed whole").cost;
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, Solution { plan, problem, found }));
        }
    }
    let (_, best) = best.expect("there is a way to name the axes");
    let shards = |solved: &Solved| shards_a_sequence(forward, &classes, &best.problem, solved);
    if along == Along::Sequence && !best.found.iter().any(shards) {
        let what = format!(
            "--sequence-parallel has nothing to split: no value has a dim, of at least {} elements, that is neither of \
             samples nor of weights, where no product or attention needs it whole",
            options.tp
        );
        return Err(Error::tensor_parallel(what).help("leave out --sequence-parallel"));
    }
    Ok(best)
}

/// The rates that plans are compared by. Under sequence parallelism bytes that are kept are weighed against bytes that are moved, in small
/// models as in large ones: latency does not count.
fn rates(options: &Parallel, along: Along) -> Machine {
    let latency = if along == Along::Sequence { 0.0 } else { options.machine.latency };
    Machine { latency, ..options.machine }
}

/// What stays in memory, with an optimizer of two moments.
fn held(options: &Parallel) -> Held {
    let shared = 1.0 / f64::from(options.shard_group.unwrap_or(options.dp));
    let copies = match options.zero {
        Zero::Nothing => 4.0,
        Zero::State => 2.0 + 2.0 * shared,
        Zero::Gradients => 1.0 + 3.0 * shared,
        Zero::Parameters => 4.0 * shared,
    };
    let most = if options.schedule == Schedule::GPipe { options.microbatches } else { options.pp };
    Held { copies, in_flight: u64::from(most.min(options.microbatches)) }
}

/// Whether the model and its batch allow as many microbatches.
pub(super) fn allows(forward: &Forward, options: &Parallel) -> bool {
    whole(forward, options, &[("tp", options.tp)]).is_ok()
}

/// Everything whole over the tensor axes.
fn whole(forward: &Forward, options: &Parallel, tensor: &[(&str, u32)]) -> Result<(Plan, Samples)> {
    let mesh = super::mesh(options, tensor);
    let batch = ["mb", "rep", "dp", EXPERT].iter().filter_map(|a| mesh.axis(a)).collect();
    let sequences = context::sequences(forward, options)?;
    let samples = samples::spread(forward, &mesh, &batch, &sequences).map_err(|error| advice::beside_chunks(error, options))?;
    let strategies = samples.strategies.clone();
    let Parallel { schedule, virtual_stages, sequence_parallel, zero, .. } = *options;
    let (stages, shards, masters, repeats) = Default::default();
    let overlap = Overlap::Buckets { bytes_per_rank: options.machine.bucket_bytes() };
    let plan = Plan {
        mesh,
        batch,
        strategies,
        stages,
        schedule,
        virtual_stages,
        sequence_parallel,
        zero,
        repeats,
        shards,
        masters,
        overlap,
    };
    Ok((plan, samples))
}

fn refuse_unshardable(forward: &Forward, classes: &Classes, problem: &Problem, options: &Parallel) -> Result<()> {
    let tp = options.tp;
    if tp == 1 {
        return Ok(());
    }
    let tensor = problem.tensor_axes();
    let sharded = |item: &model::Item| {
        let features: Vec<FactorId> =
            forward.rule(item.id).spec.ids().filter(|&f| classes.is_feature(forward, item.id, f)).collect();
        let choices = &problem.classes[item.class].choices;
        let splits = |axes: &AxisList| axes.iter().any(|axis| tensor.contains(axis));
        choices.iter().any(|c| features.iter().any(|f| splits(&c.factors[usize::from(f.0)])))
    };
    let heavy = |item: &model::Item| {
        matches!(forward.graph[item.id].op, Op::DotGeneral(_) | Op::Convolution(_) | Op::Gather(_) | Op::Attention(_))
            && sharded(item)
    };
    if problem.items.iter().any(heavy) {
        return Ok(());
    }
    let what = format!("--tp {tp} has nothing to split: no product or lookup has a weight dim of at least {tp} elements");
    Err(Error::tensor_parallel(what).help(advice::instead(forward, options, "--tp", tp)))
}

/// The ways to name the tensor axes: one axis, or two where one of `tp` ranks does not fill a group of heads, or not all ranks can share
/// the heads.
fn splits(forward: &Forward, classes: &Classes, tp: u32) -> Vec<Vec<(String, u32)>> {
    let mut majors: BTreeSet<u64> = BTreeSet::new();
    for &id in &forward.order {
        let rule = forward.rule(id);
        if let Some((keys, _)) = heads(forward, id) {
            majors.insert(gcd(keys, u64::from(tp)));
        }
        let sides = rule.spec.operands.iter().flatten().chain(&rule.spec.result);
        for dim in sides.filter(|dim| dim.len() > 1 && classes.is_feature(forward, id, dim[0])) {
            majors.insert(rule.size(dim[0]));
        }
    }
    let mut splits = vec![vec![("tp".to_owned(), tp)]];
    for major in majors.into_iter().filter_map(|major| u32::try_from(major).ok()) {
        if major > 1 && major < tp && tp.is_multiple_of(major) {
            splits.push(vec![("tp0".to_owned(), major), ("tp1".to_owned(), tp / major)]);
        }
    }
    splits
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
