//! What a limit of memory that no plan fits is told with: how much the changes of one flag would need.

use super::Options;
use super::memory::least;
use crate::error::Error;
use crate::graph::Graph;
use crate::plan::batch::{self, Given, Ranks};
use crate::plan::{Parallel, Schedule, Zero};
use crate::recompute::Recompute;
use crate::report::size;
use std::collections::BTreeSet;

/// Changes that are told of, at most.
const TOLD: usize = 3;

/// `need`: the least that was found.
pub(super) fn refused(graph: &Graph, parallel: &Parallel, options: &Options, given: Given, need: u64) -> Error {
    let limit = options.memory_limit.unwrap_or(u64::MAX);
    let needs = changes(parallel, given).into_iter().filter_map(|(flags, parallel)| {
        // Errors: what the model or the batch does not allow.
        let bytes = least(graph, &parallel, options).ok()?;
        Some((flags, bytes))
    });
    let mut less: Vec<(String, u64)> = needs.filter(|(_, bytes)| *bytes < need).collect();
    less.sort_by_key(|(_, bytes)| *bytes);
    let told = |needs: &[(String, u64)]| {
        let all: Vec<String> = needs.iter().take(TOLD).map(|(flags, bytes)| format!("{flags} ({})", size(*bytes))).collect();
        all.join(", ")
    };
    let fits = less.iter().take_while(|(_, bytes)| *bytes <= limit).count();
    Error::memory(need, limit).help(match (fits, less.is_empty()) {
        (1.., _) => format!("these fit: {}", told(&less[..fits])),
        (_, false) => format!("these need less, and together may fit: {}", told(&less)),
        (_, true) => {
            "no other number of stages, ranks or microbatches that was tried needs less; use a smaller batch".to_owned()
        }
    })
}

/// Flags beside or in place of those given, and what they ask for.
fn changes(given: &Parallel, batch: Given) -> Vec<(String, Parallel)> {
    let mut all = Vec::new();
    let mut add = |flags: String, parallel: Parallel| all.push((flags, parallel));
    let mut given = given.clone();
    if given.schedule == Schedule::Auto {
        given.schedule = Schedule::OneFOneB;
    } else if given.schedule != Schedule::OneFOneB || given.virtual_stages > 1 {
        let flags = if given.schedule == Schedule::OneFOneB { "no --virtual-stages" } else { "--schedule 1f1b" };
        add(flags.to_owned(), Parallel { schedule: Schedule::OneFOneB, virtual_stages: 1, ..given.clone() });
    }
    if given.recompute != Recompute::Budget {
        add("no --recompute".to_owned(), Parallel { recompute: Recompute::Budget, ..given.clone() });
    }
    for (flags, microbatches) in finer(batch, &given) {
        add(flags, Parallel { microbatches, ..given.clone() });
    }
    if given.dp * given.ep > 1 && given.zero != Zero::Parameters {
        add("--zero 3".to_owned(), Parallel { zero: Zero::Parameters, ..given.clone() });
    }
    add(format!("--tp {}", 2 * given.tp), Parallel { tp: 2 * given.tp, ..given.clone() });
    for pp in [given.pp / 2, 2 * given.pp] {
        if let Ok(batch) = batch::resolve(batch, ranks(&given), pp) {
            add(format!("--pp {pp}"), Parallel { pp, microbatches: batch.accumulate, ..given.clone() });
        }
    }
    all
}

fn ranks(parallel: &Parallel) -> Ranks {
    Ranks { dp: parallel.dp, ep: parallel.ep }
}

/// Smaller microbatches, by the flag that was given: the largest, and samples one by one.
fn finer(given: Given, parallel: &Parallel) -> Vec<(String, u32)> {
    let Ok(batch) = batch::resolve(given, ranks(parallel), parallel.pp) else { return Vec::new() };
    let fewest = (2..=batch.micro.min(4096)).find(|parts| batch.micro.is_multiple_of(*parts));
    let parts: BTreeSet<u64> = fewest.into_iter().chain([batch.micro]).filter(|&parts| parts > 1).collect();
    let count = |parts: u64| {
        let accumulate = u32::try_from(u64::from(batch.accumulate).checked_mul(parts)?).ok()?;
        let (flag, finer) = match given.micro {
            Some(_) => ("--micro-batch-size", Given { micro: Some(batch.micro / parts), accumulate: None, ..given }),
            None => ("--grad-accum", Given { accumulate: Some(accumulate), ..given }),
        };
        batch::resolve(finer, ranks(parallel), parallel.pp).ok()?;
        let number = finer.micro.unwrap_or(u64::from(accumulate));
        let other = given.micro.and(given.accumulate).map_or(String::new(), |_| format!(" --grad-accum {accumulate}"));
        Some((format!("{flag} {number}{other}"), accumulate))
    };
    parts.into_iter().filter_map(count).collect()
}
