//! The training programs within a limit of memory: as little computed again, and gathered again, as that allows.

use super::refusal::refused;
use super::{Options, order, programs};
use crate::chunk::{self, Limits};
use crate::cost::sections;
use crate::error::Result;
use crate::graph::Graph;
use crate::place;
use crate::plan::batch::Given;
use crate::plan::{self, Front, Overlap, Parallel, Plan, Schedule};
use crate::recompute::{self, Recompute, Repeats};
use crate::schedule::{self, Order};
use dcc_program::program::{Action, Mode, Program};
use dcc_runtime::parallel;
use rustc_hash::FxHashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A plan with what is computed again, the placed graph, its order and its programs.
pub(super) struct Fitting {
    pub plan: Plan,
    pub placed: Graph,
    pub order: Order,
    pub programs: Vec<Program>,
    /// Bytes of the rank that needs most.
    peak: u64,
    /// Estimated time of a step's passes.
    seconds: f64,
}

/// The programs of a training graph under the limit of memory. Where that demands something, the recomputation that it takes is compared
/// with sharding that keeps less, and what that then takes: the one whose step is estimated to take less time is taken.
/// Errors: those of the planner; DCC0401 where no way to keep less fits.
pub(super) fn fit(graph: &Graph, parallel: &Parallel, options: &Options, given: Given) -> Result<Fitting> {
    let limit = options.memory_limit.unwrap_or(u64::MAX);
    let search = Search { graph, parallel, options, limit };
    let mut best = search.best()?;
    if best.peak > limit && parallel.schedule == Schedule::Auto {
        // Backward passes in halves keep more.
        let whole = Parallel { schedule: Schedule::OneFOneB, ..parallel.clone() };
        best = better(best, Search { parallel: &whole, ..search }.best()?, limit);
    }
    if best.peak > limit { Err(refused(graph, parallel, options, given, best.peak)) } else { Ok(best) }
}

/// Bytes of the rank that needs most, by a few ways to compute again.
/// Errors: those of the planner.
pub(super) fn least(graph: &Graph, parallel: &Parallel, options: &Options) -> Result<u64> {
    let search = Search { graph, parallel, options, limit: 0 };
    let plan = plan::choose(graph, parallel)?;
    let placed = search.placed(&plan)?;
    let ways = match parallel.recompute {
        Recompute::Budget => vec![Repeats::NONE, Repeats::SELECTIVE, Repeats::FULL],
        Recompute::Fixed(repeats) => vec![repeats],
    };
    let peaks = parallel::side_by_side(&ways, AT_ONCE, |&repeats| Ok(search.attempt(&placed, &plan, repeats)?.peak))?;
    Ok(peaks.into_iter().min().unwrap_or(u64::MAX))
}

/// Of two, the one that fits, or takes less time if both do, or less memory if neither does; the first if they are equal.
fn better(first: Fitting, second: Fitting, limit: u64) -> Fitting {
    let takes_second = match [&first, &second].map(|fitting| fitting.peak <= limit) {
        [true, true] => second.seconds < first.seconds,
        [false, false] => second.peak < first.peak,
        [_, fits] => fits,
    };
    if takes_second { second } else { first }
}

/// Ways that are tried at once, at most: each has the programs of all stages in memory.
const AT_ONCE: usize = 8;

struct Search<'a> {
    graph: &'a Graph,
    parallel: &'a Parallel,
    options: &'a Options,
    limit: u64,
}

impl Search<'_> {
    /// What takes the least time of the two ways to save memory, if one fits.
    fn best(&self) -> Result<Fitting> {
        let Search { graph, parallel, limit, .. } = *self;
        let plain = self.climb(plan::choose(graph, parallel)?)?;
        let enough = plain.plan.repeats == self.repeats(&plain.plan)[0] && plain.peak <= limit;
        let other = match !enough && parallel.tp > 1 && !parallel.sequence_parallel {
            // Errors: a plan that has no order, no stages. Then there is no other way.
            true => self.leaner().ok(),
            false => None,
        };
        Ok(match other {
            Some(other) => better(plain, other, limit),
            None => plain,
        })
    }

    /// Of the planner's front of time and memory the fastest plan that fits as it is; if none does, that of fewest bytes, with what it is to
    /// compute again.
    fn leaner(&self) -> Result<Fitting> {
        let front = Front::of(self.graph, self.parallel)?;
        let alone = |number: usize| {
            let plan = front.plan(number)?;
            self.attempt(&self.placed(&plan)?, &plan, self.repeats(&plan)[0])
        };
        let mut best = alone(0)?;
        if best.peak > self.limit {
            return self.climb(front.plan(0)?);
        }
        // Plans further on need more memory.
        let (mut fits, mut above) = (0, front.len());
        while fits + 1 < above {
            let middle = fits.midpoint(above);
            let next = alone(middle)?;
            if next.peak <= self.limit {
                (best, fits) = (next, middle);
            } else {
                above = middle;
            }
        }
        Ok(best)
    }

    /// What may be computed again: the least first.
    fn repeats(&self, plan: &Plan) -> Vec<Repeats> {
        match (self.parallel.recompute, self.options.memory_limit) {
            (Recompute::Budget, Some(_)) => Repeats::quick(),
            _ => vec![plan.repeats],
        }
    }

    /// Of what takes little time to compute again the least that fits the limit. If all of it does not, of that and of more what is
    /// estimated to take the least time; if nothing fits, what needs least.
    fn climb(&self, plan: Plan) -> Result<Fitting> {
        let placed = self.placed(&plan)?;
        let quick = self.repeats(&plan);
        let last = quick.len() - 1;
        let attempt = |repeats: Repeats| self.attempt(&placed, &plan, repeats);
        let mut best = attempt(quick[0])?;
        if best.peak <= self.limit || last == 0 {
            return Ok(best);
        }
        let all = attempt(quick[last])?;
        if all.peak <= self.limit {
            // Each takes less memory than the one before, but for what there is at once while it is computed again.
            let (mut below, mut fits) = (0, last);
            best = all;
            while below + 1 < fits {
                let middle = below.midpoint(fits);
                let next = attempt(quick[middle])?;
                if next.peak <= self.limit { (best, fits) = (next, middle) } else { below = middle }
            }
            return Ok(best);
        }
        best = better(best, all, self.limit);
        let more: Vec<Repeats> = quick[1..last].iter().copied().chain(Repeats::slower()).collect();
        let more = self.different(&placed, &plan, &more)?;
        for some in more.chunks(parallel::threads(AT_ONCE)) {
            let tried = parallel::side_by_side(some, AT_ONCE, |&repeats| attempt(repeats))?;
            best = tried.into_iter().fold(best, |best, next| better(best, next, self.limit));
        }
        Ok(best)
    }

    /// Those that give this model another graph than all before them.
    fn different(&self, placed: &Graph, plan: &Plan, all: &[Repeats]) -> Result<Vec<Repeats>> {
        let hashes = parallel::side_by_side(all, AT_ONCE, |&repeats| -> Result<u64> {
            let mut hasher = DefaultHasher::new();
            recompute::apply(placed.clone(), &Plan { repeats, ..plan.clone() })?.nodes.hash(&mut hasher);
            Ok(hasher.finish())
        })?;
        let mut seen = FxHashSet::default();
        Ok(all.iter().zip(hashes).filter(|(_, hash)| seen.insert(*hash)).map(|(repeats, _)| *repeats).collect())
    }

    /// A plan, placed, with so much computed again.
    fn attempt(&self, placed: &Graph, plan: &Plan, repeats: Repeats) -> Result<Fitting> {
        let plan = Plan { repeats, ..plan.clone() };
        self.lowered(recompute::apply(placed.clone(), &plan)?, plan)
    }

    /// The placed graph before anything is computed again.
    fn placed(&self, plan: &Plan) -> Result<Graph> {
        Ok(chunk::apply(place::place(self.graph, plan)?, plan, Limits::USUAL))
    }

    /// The programs of a plan, placed, with what is computed again.
    fn lowered(&self, placed: Graph, mut plan: Plan) -> Result<Fitting> {
        let order = order(&placed, &plan, self.options)?;
        let lowered = |plan: &Plan| -> Result<(u64, Vec<Program>)> {
            let programs = programs(&placed, plan, &order, self.options, Mode::Train, &[])?;
            Ok((programs.iter().map(planned_bytes).max().unwrap_or(0), programs))
        };
        let (mut peak, mut programs) = lowered(&plan)?;
        if peak > self.limit && programs.iter().any(transfers) {
            // What is under way takes room too.
            let waiting = Plan { overlap: Overlap::Off, ..plan.clone() };
            let (less, alone) = lowered(&waiting)?;
            if less < peak {
                (peak, programs, plan) = (less, alone, waiting);
            }
        }
        let costs = sections::costs(&programs, order.layout, &self.parallel.machine);
        let seconds = schedule::simulate(&order, &costs).map_or(f64::INFINITY, |timeline| timeline.cost);
        Ok(Fitting { plan, placed, order, programs, peak, seconds })
    }
}

fn transfers(program: &Program) -> bool {
    let mut instrs = program.sections.iter().flat_map(|section| &section.body);
    instrs.any(|instr| matches!(instr.action, Action::Start { .. }))
}

/// Bytes that a rank of `program` needs: planned memory, all slots.
pub fn planned_bytes(program: &Program) -> u64 {
    let areas: u64 = program.areas.iter().map(|a| a.bytes * u64::from(a.slots)).sum();
    program.persistent_bytes + program.scratch_bytes + areas
}
