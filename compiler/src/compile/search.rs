//! `--schedule auto`: the order of passes for these programs, in the memory that there is.
//!
//! Times are estimated from the programs' instructions. The search counts the bytes that live at once; areas have slots for the most
//! of each, which may be more: what is then too much is taken from the next search's memory.

use super::planned_bytes;
use crate::cost::{Machine, sections};
use crate::error::Result;
use crate::schedule::{self, Costs, Order, Problem};
use dcc_program::program::Program;

/// Searches that may come to too much memory.
const TRIES: usize = 4;

/// An order that is slower by less than this part, and needs less memory, is as good.
const AS_GOOD: f64 = 1.005;

/// The best order found, or ZB-H1, which needs no more than 1F1B, where that fits `limit`, bytes of a rank, and is faster. `first`: one to
/// start from, which is taken where neither fits; without a
/// limit the fastest order that twice the memory of 1F1B's first stage suffices for, as for the paper's ZB-2p. `lowered`: the programs that have an order.
pub(super) fn order(
    first: Order,
    machine: &Machine,
    limit: Option<u64>,
    lowered: impl Fn(&Order) -> Result<Vec<Program>>,
) -> Result<Order> {
    let programs = lowered(&first)?;
    let costs = sections::costs(&programs, first.layout, machine);
    let Some(limit) = limit else { return Ok(fastest(&first, &costs)) };
    let held = schedule::peak_bytes(&first, &costs);
    // What a rank has for activations, beside all else that it holds.
    let others = programs.iter().zip(&held).map(|(program, held)| planned_bytes(program).saturating_sub(*held));
    let mut free: Vec<u64> = others.map(|others| limit.saturating_sub(others)).collect();
    let mut best = first.clone();
    for _ in 0..TRIES {
        let Some(order) = searched(&first, &costs, &free) else { break };
        let over: Vec<u64> = lowered(&order)?.iter().map(|program| planned_bytes(program).saturating_sub(limit)).collect();
        if over.iter().all(|&bytes| bytes == 0) {
            best = order;
            break;
        }
        free.iter_mut().zip(over).for_each(|(free, over)| *free = free.saturating_sub(over));
    }
    let rule =
        schedule::Rule::ZbH1.order(first.layout.stages, first.microbatches).ok().filter(|order| order.layout == first.layout);
    let seconds = |order: &Order| schedule::simulate(order, &costs).map_or(f64::INFINITY, |timeline| timeline.cost);
    match rule {
        Some(rule) if seconds(&rule) < seconds(&best) && lowered(&rule)?.iter().all(|p| planned_bytes(p) <= limit) => Ok(rule),
        _ => Ok(best),
    }
}

fn searched(first: &Order, costs: &Costs, limit_bytes: &[u64]) -> Option<Order> {
    schedule::search(&Problem { layout: first.layout, microbatches: first.microbatches, costs, limit_bytes }).ok()
}

/// The fastest with as many microbatches on each stage as there are stages, half as many again, or twice as many: the first that is as
/// good as any.
fn fastest(first: &Order, costs: &Costs) -> Order {
    let stages = u64::from(first.layout.stages);
    let limits: [Vec<u64>; 3] =
        [2, 3, 4].map(|halves| costs.parts.iter().map(|part| part.activation_bytes * stages * halves / 2).collect());
    let found: Vec<Order> = limits.iter().filter_map(|limit| searched(first, costs, limit)).collect();
    let cost = |order: &Order| schedule::simulate(order, costs).map_or(f64::INFINITY, |timeline| timeline.cost);
    let best = found.iter().map(&cost).fold(f64::INFINITY, f64::min);
    found.into_iter().find(|order| cost(order) <= best * AS_GOOD).unwrap_or_else(|| first.clone())
}
