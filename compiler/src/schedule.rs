//! The order of the sections of each stage: which microbatch goes forward and backward when.
//!
//! GPipe (arXiv 1811.06965) runs all forwards first. 1F1B (arXiv 2006.09503, "PipeDream-Flush") starts stage s of p with p−s−1
//! forwards, then alternates, so that a stage holds the activations of at most p−s microbatches.

pub mod simulate;

use crate::plan::{Plan, Schedule};
use dcc_program::program::SectionKind;

/// Everything that `stage` does in a step, as (section, microbatch).
pub fn order(plan: &Plan, stage: u32) -> Vec<(SectionKind, u32)> {
    let count = plan.microbatches();
    let mut out = vec![(SectionKind::Begin, 0)];
    out.extend((0..count).map(|m| (SectionKind::Count, m)));
    out.push((SectionKind::Ready, 0));
    out.extend(passes(plan.schedule, plan.stages(), stage, count));
    out.push((SectionKind::Update, 0));
    out
}

/// The forward and backward passes of `stage`, of `stages` in all.
pub fn passes(schedule: Schedule, stages: u32, stage: u32, microbatches: u32) -> Vec<(SectionKind, u32)> {
    let warm_up = match schedule {
        Schedule::GPipe => microbatches,
        Schedule::OneFOneB => (stages - stage - 1).min(microbatches),
    };
    let mut out: Vec<(SectionKind, u32)> = (0..warm_up).map(|m| (SectionKind::Forward, m)).collect();
    for m in 0..microbatches {
        if warm_up + m < microbatches {
            out.push((SectionKind::Forward, warm_up + m));
        }
        out.push((SectionKind::Backward, m));
    }
    out
}

/// The largest number of microbatches whose forward has run and whose backward has not finished.
pub fn peak_in_flight(passes: &[(SectionKind, u32)]) -> u32 {
    let (mut now, mut peak) = (0u32, 0);
    for (section, _) in passes {
        match section {
            SectionKind::Forward => now += 1,
            SectionKind::Backward => now -= 1,
            _ => {}
        }
        peak = peak.max(now);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: Schedule, stages: u32, stage: u32, microbatches: u32) -> String {
        let passes = passes(schedule, stages, stage, microbatches);
        let texts: Vec<String> = passes
            .iter()
            .map(|(section, m)| format!("{}{m}", if *section == SectionKind::Forward { 'F' } else { 'B' }))
            .collect();
        format!("{} | {}", texts.join(" "), peak_in_flight(&passes))
    }

    #[test]
    fn one_f_one_b_holds_few_microbatches() {
        assert_eq!(check(Schedule::OneFOneB, 3, 0, 4), "F0 F1 F2 B0 F3 B1 B2 B3 | 3");
        assert_eq!(check(Schedule::OneFOneB, 3, 2, 4), "F0 B0 F1 B1 F2 B2 F3 B3 | 1");
        assert_eq!(check(Schedule::OneFOneB, 4, 0, 2), "F0 F1 B0 B1 | 2");
        for (stages, microbatches) in [(1, 1), (2, 8), (4, 3), (4, 8)] {
            for stage in 0..stages {
                let peak = peak_in_flight(&passes(Schedule::OneFOneB, stages, stage, microbatches));
                assert!(peak <= stages - stage);
            }
        }
    }

    #[test]
    fn gpipe_goes_forward_first() {
        assert_eq!(check(Schedule::GPipe, 2, 0, 3), "F0 F1 F2 B0 B1 B2 | 3");
    }
}
