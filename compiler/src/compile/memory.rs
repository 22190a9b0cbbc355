//! The training programs within a limit of memory: as little computed again as that allows.

use super::{Options, order, programs};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::plan::Plan;
use crate::recompute::{self, Recompute, Repeats};
use crate::schedule::Order;
use dcc_program::program::{Mode, Program};

/// A placed graph with what is computed again, its order and its programs.
pub(super) struct Fitting {
    /// How far up the ladder.
    rung: usize,
    pub placed: Graph,
    pub order: Order,
    pub programs: Vec<Program>,
    /// Bytes of the rank that needs most.
    peak: u64,
}

/// The programs of `placed` under the limit of memory. Sets `plan.repeats`.
/// Errors: DCC0401 where no way to compute more again fits.
pub(super) fn fit(placed: Graph, plan: &mut Plan, options: &Options) -> Result<Fitting> {
    let ladder = match (options.parallel.recompute, options.memory_limit) {
        (Recompute::Budget, Some(_)) => Repeats::ladder(),
        _ => vec![plan.repeats],
    };
    let limit = options.memory_limit.unwrap_or(u64::MAX);
    let mut attempt = |rung: usize| -> Result<Fitting> {
        plan.repeats = ladder[rung];
        let placed = recompute::apply(placed.clone(), plan)?;
        let order = order(&placed, plan, options)?;
        let programs = programs(&placed, plan, &order, options, Mode::Train, &[])?;
        let peak = programs.iter().map(planned_bytes).max().unwrap_or(0);
        Ok(Fitting { rung, placed, order, programs, peak })
    };
    let (first, last) = (attempt(0)?, ladder.len() - 1);
    let mut best = if first.peak <= limit || last == 0 { first } else { attempt(last)? };
    if best.peak <= limit {
        // Further up takes less memory.
        let mut below = 0;
        while below + 1 < best.rung {
            let next = attempt(below.midpoint(best.rung))?;
            if next.peak <= limit { best = next } else { below = next.rung }
        }
    } else {
        // Unless what is computed again takes more room while it is than it saves.
        for rung in 1..last {
            let next = attempt(rung)?;
            best = if next.peak < best.peak { next } else { best };
            if best.peak <= limit {
                break;
            }
        }
    }
    if best.peak > limit {
        return Err(Error::memory(best.peak, limit));
    }
    plan.repeats = ladder[best.rung];
    Ok(best)
}

/// Bytes that a rank of `program` needs: planned memory, all slots.
pub fn planned_bytes(program: &Program) -> u64 {
    let areas: u64 = program.areas.iter().map(|a| a.bytes * u64::from(a.slots)).sum();
    program.persistent_bytes + program.scratch_bytes + areas
}
