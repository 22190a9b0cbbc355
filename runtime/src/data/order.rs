//! Which sample stands at a global position: a function of the seed, nothing stored, so resuming costs nothing.
//!
//! Shuffled, each pass is a permutation of all samples: a Feistel network of philox words over the next larger power of four,
//! walked until it lands inside (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002). A pass ends after as many whole
//! batches as there are; the samples left over differ from pass to pass.

use dcc_program::philox::philox4x32;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Shuffled,
    Sequential,
}

impl Order {
    /// As `--order` has it.
    pub fn name(self) -> &'static str {
        match self {
            Order::Shuffled => "shuffled",
            Order::Sequential => "sequential",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    order: Order,
    seed: u64,
    samples: u64,
    /// Of one pass: a multiple of the batch.
    used: u64,
    /// Of each half of an index.
    half_bits: u32,
}

const ROUNDS: u32 = 6;

impl Permutation {
    /// `samples` ≥ `batch` ≥ 1.
    pub fn new(order: Order, seed: u64, samples: u64, batch: u64) -> Permutation {
        let bits = u64::BITS - (samples - 1).leading_zeros();
        Permutation { order, seed, samples, used: samples / batch * batch, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The sample at `position`, counted from the beginning of training.
    pub fn sample(&self, position: u64) -> u64 {
        let (pass, index) = (position / self.used, position % self.used);
        match self.order {
            Order::Sequential => index,
            Order::Shuffled => {
                let mut index = index;
                loop {
                    index = self.mix(pass, index);
                    if index < self.samples {
                        return index;
                    }
                }
            }
        }
    }

    /// A permutation of the indices below 4^`half_bits`.
    fn mix(&self, pass: u64, index: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..ROUNDS {
            let counter = [right as u32, round, pass as u32, (pass >> 32) as u32];
            let word = philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32])[0];
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_pass_is_another_permutation() {
        for samples in [1, 2, 3, 5, 64, 100, 1000, 1025] {
            let order = Permutation::new(Order::Shuffled, 7, samples, 1);
            let pass = |pass: u64| -> Vec<u64> { (0..samples).map(|i| order.sample(pass * samples + i)).collect() };
            assert_eq!(pass(0).into_iter().collect::<BTreeSet<_>>(), (0..samples).collect());
            assert_eq!(pass(3).into_iter().collect::<BTreeSet<_>>(), (0..samples).collect());
            if samples >= 64 {
                assert_ne!(pass(0), pass(1));
                assert_ne!(pass(0), (0..samples).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn neighbours_are_scattered() {
        let order = Permutation::new(Order::Shuffled, 1, 10_000, 1);
        let mean = (0..9999).map(|i| order.sample(i).abs_diff(order.sample(i + 1)) as f64).sum::<f64>() / 9999.0;
        assert!((mean - 10_000.0 / 3.0).abs() < 100.0, "a random permutation has n/3, this {mean}");
    }

    #[test]
    fn sequential_drops_the_incomplete_batch_and_wraps_around() {
        let order = Permutation::new(Order::Sequential, 0, 10, 4);
        assert_eq!((0..12).map(|i| order.sample(i)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]);
    }
}
