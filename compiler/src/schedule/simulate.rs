//! What a schedule costs: the start and end of every pass, given how long each stage takes.
//!
//! Sends are asynchronous. A forward waits for that of the stage before it, a backward for that of the stage after it, plus the
//! transfer; a stage runs its passes in their order. The step takes as long as the busiest stage, from its first start to its last
//! end (arXiv 2401.10241, section 5).

use super::passes;
use crate::plan::Schedule;
use dcc_program::program::SectionKind;

/// Seconds (or any unit) of one pass of each stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Durations {
    pub forward: Vec<f64>,
    pub backward: Vec<f64>,
    /// Between neighbouring stages.
    pub transfer: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    pub section: SectionKind,
    pub microbatch: u32,
    pub start: f64,
    pub end: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// In their order, by stage.
    pub passes: Vec<Vec<Pass>>,
    /// The longest time between the first start and the last end of a stage.
    pub cost: f64,
    /// The part of the cost in which the slowest stage would not have to be busy.
    pub bubble: f64,
}

/// Runs `schedule` on `durations.forward.len()` stages.
pub fn run(schedule: Schedule, durations: &Durations, microbatches: u32) -> Timeline {
    let stages = durations.forward.len();
    let orders: Vec<_> = (0..stages).map(|s| passes(schedule, stages as u32, s as u32, microbatches)).collect();
    let mut done: Vec<Vec<Pass>> = vec![Vec::new(); stages];
    let mut ends = vec![[vec![f64::NAN; microbatches as usize], vec![f64::NAN; microbatches as usize]]; stages];
    loop {
        let mut progress = false;
        for stage in 0..stages {
            while let Some(&(section, microbatch)) = orders[stage].get(done[stage].len()) {
                let backward = usize::from(section == SectionKind::Backward);
                let Some(ready) = ready(&ends, stage, backward, microbatch as usize, durations.transfer) else { break };
                let start = done[stage].last().map_or(0.0, |p: &Pass| p.end).max(ready);
                let length = if backward == 1 { durations.backward[stage] } else { durations.forward[stage] };
                let end = start + length;
                ends[stage][backward][microbatch as usize] = end;
                done[stage].push(Pass { section, microbatch, start, end });
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    assert!(done.iter().zip(&orders).all(|(d, o)| d.len() == o.len()), "our schedules do not deadlock");
    summarize(done, durations, microbatches)
}

/// When the operands of a pass have arrived; `None` while that is open.
fn ready(ends: &[[Vec<f64>; 2]], stage: usize, backward: usize, microbatch: usize, transfer: f64) -> Option<f64> {
    let arrived = |stage: usize| ends[stage][backward][microbatch] + transfer;
    let last = stage + 1 == ends.len();
    let time = match (backward, stage) {
        (0, 0) => 0.0,
        (0, _) => arrived(stage - 1),
        _ if last => ends[stage][0][microbatch],
        _ => arrived(stage + 1),
    };
    (!time.is_nan()).then_some(time)
}

fn summarize(passes: Vec<Vec<Pass>>, durations: &Durations, microbatches: u32) -> Timeline {
    let span = |stage: &Vec<Pass>| stage.last().map_or(0.0, |p| p.end) - stage.first().map_or(0.0, |p| p.start);
    let cost = passes.iter().map(span).fold(0.0, f64::max);
    let busy =
        durations.forward.iter().zip(&durations.backward).map(|(f, b)| f + b).fold(0.0, f64::max) * f64::from(microbatches);
    let bubble = if cost > 0.0 { (cost - busy) / cost } else { 0.0 };
    Timeline { passes, cost, bubble }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 1F1B column of arXiv 2401.10241, table 6, from the times of its table 5.
    #[test]
    fn reproduces_published_bubble_rates() {
        let table = include_str!("../../../tests/anchors/zb_1f1b.csv");
        let rows = table.lines().filter(|l| !l.starts_with('#')).skip(1);
        let mut count = 0;
        for row in rows {
            let cells: Vec<f64> = row.split(',').map(|c| c.parse().unwrap()).collect();
            let [stages, microbatches, forward, input, weight, transfer, bubble] = cells[..] else { panic!("{row}") };
            let stages = stages as usize;
            let durations = Durations { forward: vec![forward; stages], backward: vec![input + weight; stages], transfer };
            let timeline = run(Schedule::OneFOneB, &durations, microbatches as u32);
            assert_eq!(format!("{:.4}", timeline.bubble), format!("{bubble:.4}"), "{row}");
            count += 1;
        }
        assert_eq!(count, 12);
    }

    #[test]
    fn a_pipeline_without_transfers_has_the_textbook_bubble() {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let durations = Durations { forward: vec![1.0; 4], backward: vec![2.0; 4], transfer: 0.0 };
            let timeline = run(schedule, &durations, 8);
            assert_eq!(timeline.bubble, 3.0 / 11.0);
            assert_eq!(timeline.passes[3][0].start, 3.0);
        }
    }
}
