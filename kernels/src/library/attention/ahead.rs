//! What a chunk touches, asked for by the products of the one before: rows that lie a whole position apart are not what processors foresee.

use super::{Shape, Strides};
use crate::library::SharedPtr;
use crate::library::lines::Lines;

/// The operands of a key head are asked for where they are at most so large: half of a small second-level cache.
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

    /// A query head's part. Channels that are not contiguous are left to the processor.
    fn lines(&self, [b, h, g]: [usize; 3]) -> Lines {
        let Strides { batch, head, group, position, channel } = self.strides;
        if channel != 1 || (group == 0 && g > 0) {
            return Lines::none();
        }
        let from = self.at.get().wrapping_add(b * batch + h * head + g * group).cast_const();
        Lines::new(from, self.positions, position.cast_signed(), self.channels)
    }
}

/// What the products of one key head ask for: the operands of another.
pub(super) struct Ahead<'a, E> {
    operands: &'a [Operand<E>],
    head: [usize; 2],
    groups: usize,
    /// The part at hand, by operand and group, and those that follow.
    lines: Lines,
    next: usize,
    /// Pairs of lines for each multiply-add, and those that products should have asked for.
    pace: f32,
    owed: f32,
    /// Whether heads of this size are asked for.
    is_used: bool,
}

impl<'a, E> Ahead<'a, E> {
    pub fn none() -> Self {
        Ahead { operands: &[], head: [0; 2], groups: 1, lines: Lines::none(), next: 0, pace: 0.0, owed: 0.0, is_used: false }
    }

    /// Of key head `number` of all, if there is one, while another's multiply-adds are done.
    pub fn of(shape: &Shape, number: usize, operands: &'a [Operand<E>], multiply_adds: usize) -> Self {
        let bytes: usize = operands.iter().map(Operand::bytes).sum();
        if bytes * shape.groups > MOST_BYTES {
            return Ahead::none();
        }
        if number >= shape.batch * shape.heads {
            return Ahead { is_used: true, ..Ahead::none() };
        }
        let head = [number / shape.heads, number % shape.heads];
        let parts = (0..operands.len() * shape.groups).map(|part| (part / shape.groups, part % shape.groups));
        let lines: usize = parts.map(|(operand, g)| operands[operand].lines([head[0], head[1], g]).count()).sum();
        let pace = lines as f32 / multiply_adds.max(1) as f32;
        Ahead { operands, head, groups: shape.groups, pace, is_used: true, ..Ahead::none() }
    }

    /// Whether heads ask for others' operands: where this one's results go was asked for, then, unless it is a thread's first.
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// What a product of so many multiply-adds asks for, and how much of it.
    #[inline(always)]
    pub fn due(&mut self, multiply_adds: usize) -> (&mut Lines, usize) {
        self.owed += multiply_adds as f32 * self.pace;
        while self.lines.count() == 0 && self.next < self.operands.len() * self.groups {
            let (operand, g) = (self.next / self.groups, self.next % self.groups);
            self.lines = self.operands[operand].lines([self.head[0], self.head[1], g]);
            self.next += 1;
        }
        let count = (self.owed as usize).min(self.lines.count());
        self.owed -= count as f32;
        (&mut self.lines, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(queries: usize) -> Shape {
        let strides = Strides { batch: 0, head: 64, group: 0, position: 128, channel: 1 };
        Shape {
            batch: 1,
            heads: 2,
            groups: 1,
            queries,
            keys: queries,
            channels: 64,
            values: 64,
            scale: 1.0,
            causal: None,
            q: strides,
            k: strides,
            v: strides,
            o: strides,
            lse: Strides::default(),
            mask: Strides::default(),
        }
    }

    /// Pairs of lines that so many products ask for while they do the multiply-adds of a head.
    fn asked(shape: &Shape, number: usize, operands: &[Operand<f32>], products: usize) -> usize {
        let mut ahead = Ahead::of(shape, number, operands, 1000 * products);
        let counts = (0..products).map(|_| {
            let (lines, count) = ahead.due(1000);
            (0..count).for_each(|_| lines.ask());
            count
        });
        counts.sum()
    }

    #[test]
    fn the_next_head_is_asked_for() {
        let s = shape(20);
        let operands = |s: &Shape| [&s.q, &s.k].map(|strides| Operand::new(std::ptr::null::<f32>(), strides, s.queries, 64));
        // Two operands of so many positions, each four lines.
        let pairs: usize = 2 * 20 * 2;
        for products in [40, 100, 1000] {
            let count = asked(&s, 1, &operands(&s), products);
            assert!(
                (pairs - pairs.div_ceil(products) - 1..=pairs).contains(&count),
                "{count} of {pairs} by {products} products"
            );
        }
        assert_eq!(asked(&s, 2, &operands(&s), 40), 0, "there is no third head");
        let large = shape(1000);
        assert_eq!(asked(&large, 1, &operands(&large), 40), 0, "a head that no cache holds");
        assert!(Ahead::of(&s, 2, &operands(&s), 1).is_used() && !Ahead::of(&large, 1, &operands(&large), 1).is_used());
    }
}
