//! Policies for the greedy scheduler: a coarse grid over all that there are, then coordinate descent from the best of it.

use super::greedy::{self, Policy, Turns};
use super::problem::{Problem, Score};

/// How many of the grid's best are refined.
const STARTS: usize = 4;

/// Orders that may be made, and passes of them in all.
const ORDERS: u64 = 1500;
const PASSES: u64 = 6_000_000;

/// The best policies for `problem`.
pub(super) fn policies(problem: &Problem) -> Vec<Policy> {
    let passes = 3 * u64::from(problem.layout.parts()) * u64::from(problem.microbatches);
    let mut tuning = Tuning { problem, unit: unit(problem), budget: ORDERS.min(PASSES / passes) };
    let mut found: Vec<(Score, Policy)> = Vec::new();
    for policy in tuning.grid() {
        if let Some(score) = tuning.score(&policy) {
            found.push((score, policy));
        }
    }
    // Stable, so that of equals the first of the grid counts.
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.dedup_by(|a, b| a.0 == b.0);
    found.truncate(STARTS);
    for (score, policy) in &mut found {
        tuning.descend(score, policy);
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().map(|(_, policy)| policy).collect()
}

/// A quarter of the mean forward: the step in which idle times are tried.
fn unit(problem: &Problem) -> f64 {
    problem.costs.parts.iter().map(|p| p.forward).sum::<f64>() / f64::from(problem.layout.parts()) / 4.0
}

struct Tuning<'a> {
    problem: &'a Problem<'a>,
    unit: f64,
    budget: u64,
}

impl Tuning<'_> {
    fn score(&mut self, policy: &Policy) -> Option<Score> {
        self.budget = self.budget.checked_sub(1)?;
        greedy::score(self.problem, policy)
    }

    fn slack(&self, units: f64) -> f64 {
        if units.is_finite() { units * self.unit } else { units }
    }

    fn grid(&self) -> Vec<Policy> {
        let mut out = Vec::new();
        for turns in [Turns::BackwardFirst, Turns::Alternate, Turns::Strict] {
            for ahead in [Vec::new(), self.ahead(10)] {
                for forward in [0.0, 1.0, 2.0, 3.0, 4.0, 6.0] {
                    for weight in [0.0, 1.0, 3.0, 6.0, f64::INFINITY] {
                        let (forward_slack, weight_slack) = (self.slack(forward), self.slack(weight));
                        out.push(Policy { ahead: ahead.clone(), turns, forward_slack, weight_slack });
                    }
                }
            }
        }
        out
    }

    /// Each stage as far ahead as in 1F1B, and `tenths` of the number of stages after it further.
    fn ahead(&self, tenths: u32) -> Vec<u32> {
        let stages = self.problem.layout.stages;
        (0..stages).map(|s| (stages - s) + (stages - 1 - s) * tenths / 10).collect()
    }

    /// One coordinate after the other, as long as that helps.
    fn descend(&mut self, score: &mut Score, policy: &mut Policy) {
        let stages = self.problem.layout.stages as usize;
        let mut open = true;
        while open && self.budget > 0 {
            let before = *score;
            for tenths in [0, 2, 4, 6, 8, 9, 10, 11, 12, 14] {
                let ahead = self.ahead(tenths);
                self.attempt(score, policy, |p| p.ahead = ahead);
            }
            for units in (0..24).map(|u| f64::from(u) / 2.0).chain([16.0, 24.0, f64::INFINITY]) {
                let slack = self.slack(units);
                self.attempt(score, policy, |p| p.forward_slack = slack);
                self.attempt(score, policy, |p| p.weight_slack = slack);
            }
            if policy.ahead.is_empty() {
                let ahead = self.ahead(10).iter().map(|a| a + 1).collect();
                self.attempt(score, policy, |p| p.ahead = ahead);
            }
            let set = if policy.ahead.is_empty() { 0 } else { stages };
            for stage in 0..set {
                for from in [stage, 0] {
                    self.attempt(score, policy, |p| p.ahead[from..=stage].iter_mut().for_each(|a| *a += 1));
                    self.attempt(score, policy, |p| p.ahead[from..=stage].iter_mut().for_each(|a| *a = (*a - 1).max(1)));
                }
            }
            open = score.better(&before);
        }
    }

    /// Keeps `change` if it makes a better order.
    fn attempt(&mut self, score: &mut Score, policy: &mut Policy, change: impl FnOnce(&mut Policy)) {
        let mut other = policy.clone();
        change(&mut other);
        if other == *policy {
            return;
        }
        if let Some(found) = self.score(&other).filter(|found| found.better(score)) {
            (*policy, *score) = (other, found);
        }
    }
}
