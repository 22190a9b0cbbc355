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
mod simulate;
#[cfg(test)]
mod tests;
mod tune;

use crate::plan::{Plan, Schedule};
use dcc_program::program::SectionKind;

pub use named::Rule;
pub use order::{Layout, Order, OrderError, Pass, Path, Section, Wait};
pub use problem::Problem;
pub use search::{rules, search};
pub use simulate::{Costs, Event, PartCost, Timeline, peak_bytes, simulate};

/// Everything that `stage` does in a step, as (section, microbatch).
pub fn order(plan: &Plan, stage: u32) -> Vec<(SectionKind, u32)> {
    let count = plan.microbatches();
    let passes = rule(plan.schedule).order(plan.stages(), count).expect("stages and microbatches are counted from one");
    let mut out = vec![(SectionKind::Begin, 0)];
    out.extend((0..count).map(|m| (SectionKind::Count, m)));
    out.push((SectionKind::Ready, 0));
    out.extend(passes.passes[stage as usize].iter().map(|pass| (section(pass.section), pass.microbatch)));
    out.push((SectionKind::Update, 0));
    out
}

/// The rule of a plan's schedule.
pub fn rule(schedule: Schedule) -> Rule {
    match schedule {
        Schedule::GPipe => Rule::GPipe,
        Schedule::OneFOneB => Rule::OneFOneB,
    }
}

fn section(section: Section) -> SectionKind {
    match section {
        Section::Forward => SectionKind::Forward,
        Section::Backward => SectionKind::Backward,
        Section::BackwardInput | Section::BackwardWeight => unreachable!("no plan splits the backward"),
    }
}
