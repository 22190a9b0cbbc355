//! What a chunk touches, asked for while the one before is computed: rows that lie a whole position apart are not what processors foresee.

use super::{Shape, Strides};
use crate::library::SharedPtr;
use crate::library::simd::{LINE, prefetch};

/// The operands of a key head are fetched where they are at most so large: half of a small second-level cache.
const MOST_BYTES: usize = 256 << 10;

/// An operand of one pass.
pub(super) struct Operand<E> {
    at: SharedPtr<E>,
    strides: Strides,
    positions: usize,
    channels: usize,
}

impl<E> Operand<E> {
    pub fn new(at: *const E, strides: &Strides, positions: usize, channels: usize) -> Self {
        Operand { at: SharedPtr::new(at.cast_mut()), strides: *strides, positions, channels }
    }

    fn bytes(&self) -> usize {
        self.positions * self.channels * size_of::<E>()
    }

    /// Asks for one key head's part. Channels that are not contiguous are left to the processor.
    fn fetch(&self, [b, h]: [usize; 2], groups: usize) {
        let Strides { batch, head, group, position, .. } = self.strides;
        for g in 0..if group == 0 { 1 } else { groups } {
            for p in 0..self.positions {
                let row = self.at.get().wrapping_add(b * batch + h * head + g * group + p * position);
                (0..self.channels).step_by(LINE / size_of::<E>()).for_each(|at| prefetch(row.wrapping_add(at)));
            }
        }
    }
}

/// Asks for what key head `number` of all needs, if there is one.
pub(super) fn fetch<E>(shape: &Shape, number: usize, operands: &[Operand<E>]) {
    let bytes: usize = operands.iter().map(Operand::bytes).sum();
    if number < shape.batch * shape.heads && bytes * shape.groups <= MOST_BYTES {
        let head = [number / shape.heads, number % shape.heads];
        operands.iter().filter(|o| o.strides.channel == 1).for_each(|operand| operand.fetch(head, shape.groups));
    }
}
