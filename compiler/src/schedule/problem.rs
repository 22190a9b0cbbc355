//! What is to be ordered, what no order of it can cost less than, and which of two orders is better.

use super::order::{Layout, Order, OrderError};
use super::simulate::{self, Costs};
use std::cmp::Ordering;

#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    pub layout: Layout,
    pub microbatches: u32,
    pub costs: &'a Costs,
    /// Bytes of activations that each stage may hold.
    pub limit_bytes: &'a [u64],
}

impl Problem<'_> {
    /// Errors: nothing to order; sizes that do not match; a stage that cannot hold one microbatch.
    pub fn check(&self) -> Result<(), OrderError> {
        let (stages, parts) = (self.layout.stages, self.layout.parts());
        if parts == 0 || self.microbatches == 0 {
            return Err(OrderError::Empty);
        }
        let (found_stages, found_parts) = (self.limit_bytes.len(), self.costs.parts.len());
        if found_stages != stages as usize || found_parts != parts as usize || self.costs.transfers.len() + 1 != found_parts {
            return Err(OrderError::Size { stages, parts, found_stages, found_parts });
        }
        for (stage, &limit_bytes) in (0u32..).zip(self.limit_bytes) {
            let bytes = |chunk| self.costs.parts[self.layout.part(stage, chunk) as usize].activation_bytes;
            let needed_bytes = (0..self.layout.chunks).map(bytes).sum();
            if needed_bytes > limit_bytes {
                return Err(OrderError::Memory { stage, limit_bytes, needed_bytes });
            }
        }
        Ok(())
    }

    pub fn fits(&self, order: &Order) -> bool {
        simulate::peak_bytes(order, self.costs).iter().zip(self.limit_bytes).all(|(peak, limit)| peak <= limit)
    }

    /// What no order costs less than, if memory were no matter: all the work of a stage; and, from the first forward of a part, the way
    /// to any later part, all forwards and input halves of that, the way back, and a weight half.
    pub fn lower_bound(&self) -> f64 {
        let (costs, count) = (self.costs, f64::from(self.microbatches));
        let mut bound = simulate::busiest(self.layout, self.microbatches, costs);
        for (first, part) in costs.parts.iter().enumerate() {
            let mut ways = part.backward_weight;
            for (last, far) in costs.parts.iter().enumerate().skip(first) {
                bound = bound.max(ways + count * (far.forward + far.backward_input));
                ways += far.forward + far.backward_input + 2.0 * costs.transfers.get(last).unwrap_or(&0.0);
            }
        }
        bound
    }
}

/// How long the stage takes that is at it the longest, then the sum over all stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Score {
    pub cost: f64,
    pub sum: f64,
}

impl Score {
    /// `spans`: how long each stage takes.
    pub fn of(spans: impl Iterator<Item = f64>) -> Score {
        let add = |score: Score, span| Score { cost: score.cost.max(span), sum: score.sum + span };
        spans.fold(Score { cost: 0.0, sum: 0.0 }, add)
    }

    /// Better by more than rounding.
    pub fn better(&self, other: &Score) -> bool {
        let less = |a: f64, b: f64| a < b * (1.0 - 1e-12);
        less(self.cost, other.cost) || self.cost <= other.cost && less(self.sum, other.sum)
    }

    pub fn total_cmp(&self, other: &Score) -> Ordering {
        self.cost.total_cmp(&other.cost).then(self.sum.total_cmp(&other.sum))
    }
}
