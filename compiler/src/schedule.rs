//! The order of the passes of each stage: which microbatch goes forward and backward when.
//!
//! `Rule` has the schedules with names, `search` finds one for given times and memory; both give an `Order`, `simulate` says what it
//! costs, and `draw` draws that. What a pass computes is no matter here: `order` has the sections of a program.

pub mod draw;
mod fill;
mod greedy;
mod improve;
mod named;
mod order;
mod problem;
mod search;
mod sections;
mod simulate;
#[cfg(test)]
mod tests;
mod tune;

use crate::plan::{Plan, Schedule};

pub use named::Rule;
pub use order::{Layout, Order, OrderError, Pass, Path, Section, Wait};
pub use problem::Problem;
pub use search::{rules, search};
pub use sections::{Backward, Turns};
pub use simulate::{Costs, Event, PartCost, Timeline, peak_bytes, simulate};

/// The order of a plan by the rule of its schedule; where that is searched for, one to start from.
pub fn order(plan: &Plan) -> Order {
    let rule = rule(plan.schedule, plan.virtual_stages);
    rule.order(plan.stages(), plan.microbatches()).expect("the planner has seen that there is one")
}

/// The rule of a plan's schedule, over so many chunks of the model on each rank.
pub fn rule(schedule: Schedule, virtual_stages: u32) -> Rule {
    match schedule {
        Schedule::GPipe => Rule::GPipe,
        Schedule::OneFOneB if virtual_stages > 1 => Rule::Interleaved { chunks: virtual_stages },
        Schedule::OneFOneB => Rule::OneFOneB,
        Schedule::ZbH1 | Schedule::Auto => Rule::ZbH1,
        Schedule::ZbH2 => Rule::ZbH2,
        Schedule::ZbV => Rule::ZbV,
    }
}

/// What each stage of a plan runs in a step that has `order`.
pub fn turns(plan: &Plan, order: &Order) -> Vec<Turns> {
    order.turns(if plan.schedule.has_halves() { Backward::Halves } else { Backward::Whole })
}
