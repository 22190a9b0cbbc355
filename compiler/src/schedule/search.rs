//! An order for given times under a limit of memory: the best of the schedules with names, of what the greedy scheduler makes under
//! many policies, and of small changes to the best of these.
//!
//! After Qi et al. 2023 (arXiv 2401.10241, section 3): with the memory of 1F1B this is their ZB-1p, with twice that their ZB-2p; in two
//! chunks there and back (section 6) their ZB-V. Deterministic; work is limited by a number of passes, not by a clock.

use super::fill::fill;
use super::greedy;
use super::improve::improve;
use super::named::Rule;
use super::order::{Layout, Order, OrderError, Pass, Path, Section};
use super::problem::{Problem, Score};
use super::simulate;
use super::tune::policies;

/// Passes of the step for which policies are tried, if its microbatches are not fewer than three rounds of the pipeline.
const TUNED_PASSES: u32 = 4000;

/// Passes that may be simulated to change what the policies made.
const BUDGET: u64 = 5_000_000;

/// Steps of bisection: a hundredth of a percent.
const BISECTIONS: u32 = 12;

/// The best order found, no worse than any schedule with a name that has this layout and fits.
/// Errors: see `Problem::check`.
pub fn search(problem: &Problem) -> Result<Order, OrderError> {
    problem.check()?;
    let order = one_by_one(problem);
    let score = score(problem, &order).expect("one microbatch after the other fits");
    let mut best = Best { problem, order, score, bound: problem.lower_bound(), budget: BUDGET };
    for rule in rules(problem.layout) {
        if let Ok(order) = rule.order(problem.layout.stages, problem.microbatches) {
            best.offer(order);
        }
    }
    // What is best at the ends of a step hardly depends on how long its middle is.
    let enough = (3 * problem.layout.stages).max(TUNED_PASSES / (3 * problem.layout.parts()));
    let short = Problem { microbatches: problem.microbatches.min(enough), ..*problem };
    for policy in policies(&short) {
        let Some(order) = greedy::order(problem, &policy) else { continue };
        if let Some(score) = best.offer(order.clone()) {
            refill(&mut best, &order, score);
        }
    }
    improve(&mut best);
    Ok(best.order)
}

/// The schedules with names that have this layout.
pub fn rules(layout: Layout) -> Vec<Rule> {
    match (layout.chunks, layout.path) {
        (1, _) => vec![Rule::GPipe, Rule::OneFOneB, Rule::ZbH1, Rule::ZbH2],
        (chunks, Path::Loop) => vec![Rule::Interleaved { chunks }],
        (2, Path::V) => vec![Rule::ZbV],
        _ => Vec::new(),
    }
}

/// Each microbatch forward and back before the next: what needs the least memory.
fn one_by_one(problem: &Problem) -> Order {
    let Problem { layout, microbatches, .. } = *problem;
    let microbatch = |m: u32| {
        let forward = (0..layout.chunks).map(move |c| Pass::new(Section::Forward, c, m));
        forward.chain((0..layout.chunks).rev().map(move |c| Pass::new(Section::Backward, c, m)))
    };
    let passes: Vec<Pass> = (0..microbatches).flat_map(microbatch).collect();
    Order { layout, microbatches, passes: vec![passes; layout.stages as usize] }
}

/// The best so far, and what may still be spent on a better one.
pub(super) struct Best<'a> {
    pub problem: &'a Problem<'a>,
    pub order: Order,
    pub score: Score,
    bound: f64,
    /// Passes that may still be simulated.
    budget: u64,
}

impl Best<'_> {
    /// Nothing is left to spend or to gain.
    pub fn done(&self) -> bool {
        self.budget == 0 || self.score.cost <= self.bound * (1.0 + 1e-12)
    }

    /// Takes `order` if it is better; its score if it fits and runs.
    pub fn offer(&mut self, order: Order) -> Option<Score> {
        self.budget = self.budget.saturating_sub(order.passes.iter().map(|p| p.len() as u64).sum());
        let score = score(self.problem, &order)?;
        if score.better(&self.score) {
            (self.order, self.score) = (order, score);
        }
        Some(score)
    }
}

fn score(problem: &Problem, order: &Order) -> Option<Score> {
    if !problem.fits(order) {
        return None;
    }
    let events = simulate::events(order, problem.costs).ok()?;
    Some(Score::of(events.iter().map(|events| simulate::span(events))))
}

/// Puts the weight halves of `order` anew, for the least cost that bisection finds.
fn refill(best: &mut Best, order: &Order, score: Score) {
    let (mut low, mut high) = (best.bound, score.cost);
    for _ in 0..BISECTIONS {
        if best.done() {
            return;
        }
        let cost = (low + high) / 2.0;
        match fill(best.problem, order, cost).and_then(|order| best.offer(order)) {
            Some(found) if found.cost < high => high = found.cost,
            _ => low = cost,
        }
    }
}
