//! The first elements of each row, in order.
//!
//! An element becomes an unsigned key in the order of the values, with its index below: no two are equal, and any sort of them is stable.
//! Of a row that is longer than twice as many as are wanted only those are kept that may be among the first, and fewer whenever the
//! space is full.

use super::SharedPtr;
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};

/// Indices [outer, k, inner] of the `k` first elements along the middle dim of a dense row-major block [outer, size, inner], in order.
/// Of equal elements the first comes first; NaN is above all others, -0 equal to 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK {
    pub outer: usize,
    pub size: usize,
    pub inner: usize,
    /// At most `size`.
    pub k: usize,
    /// From the largest to the smallest.
    pub largest: bool,
}

/// What can be put in order.
pub trait Sortable: Copy + Sync {
    type Entry: Entry;

    /// Unsigned, in the order of the values; an entry takes its low bits.
    fn key(self) -> u64;
}

/// A key above an index.
pub trait Entry: Copy + Ord {
    fn new(key: u64, index: usize) -> Self;
    fn index(self) -> i64;
}

/// Of 32 bits each.
impl Entry for u64 {
    fn new(key: u64, index: usize) -> u64 {
        key << 32 | index as u64
    }

    fn index(self) -> i64 {
        (self & u64::from(u32::MAX)) as i64
    }
}

/// Of 64 bits each.
impl Entry for u128 {
    fn new(key: u64, index: usize) -> u128 {
        u128::from(key) << 64 | index as u128
    }

    fn index(self) -> i64 {
        self as u64 as i64
    }
}

macro_rules! integers {
    ($($ty:ty, $unsigned:ty, $entry:ty, $lowest:expr);+ $(;)?) => {
        $(impl Sortable for $ty {
            type Entry = $entry;

            fn key(self) -> u64 {
                u64::from(self as $unsigned ^ $lowest as $unsigned)
            }
        })+
    };
}

integers! {
    u8, u8, u64, 0; u16, u16, u64, 0; u32, u32, u64, 0; u64, u64, u128, 0;
    i8, u8, u64, i8::MIN; i16, u16, u64, i16::MIN; i32, u32, u64, i32::MIN; i64, u64, u128, i64::MIN;
}

impl Sortable for f32 {
    type Entry = u64;

    fn key(self) -> u64 {
        // The sum makes 0 of -0.
        let bits = (self + 0.0).to_bits();
        let key = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        u64::from(if self.is_nan() { u32::MAX } else { key })
    }
}

impl Sortable for f64 {
    type Entry = u128;

    fn key(self) -> u64 {
        let bits = (self + 0.0).to_bits();
        let key = if bits >> 63 == 0 { bits | 1 << 63 } else { !bits };
        if self.is_nan() { u64::MAX } else { key }
    }
}

/// A half float, with the bits of its infinity.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct HalfBits<const INFINITY: u16>(pub u16);

pub type F16 = HalfBits<0x7c00>;
pub type Bf16 = HalfBits<0x7f80>;

impl<const INFINITY: u16> Sortable for HalfBits<INFINITY> {
    type Entry = u64;

    fn key(self) -> u64 {
        let magnitude = self.0 & 0x7fff;
        u64::from(match self.0 >> 15 {
            _ if magnitude > INFINITY => u16::MAX,
            0 => self.0 | 0x8000,
            _ if magnitude == 0 => 0x8000,
            _ => !self.0,
        })
    }
}

/// Fewest entries that are kept of a row that has as many.
const KEPT: usize = 64;

/// Elements of the rows that are one task.
const CHUNK: usize = 512;
/// Candidates that are put in order whether they are wanted or not.
const FEW: usize = 16;

impl TopK {
    /// Entries that a row needs space for.
    fn entries(&self) -> usize {
        self.size.min(KEPT.max(2 * self.k))
    }

    /// Whether a thread's scratch space suffices, and indices are short enough, for rows of elements of so many bytes.
    pub fn fits(&self, bytes: usize) -> bool {
        let entry = if bytes > 4 { size_of::<u128>() } else { size_of::<u64>() };
        self.entries() * entry <= WORKER_BYTES && u32::try_from(self.size).is_ok()
    }

    /// # Panics
    /// If an operand is shorter than its block, or rows do not fit.
    pub fn run<T: Sortable>(&self, pool: &Pool, from: &[T], to: &mut [i64]) {
        let TopK { outer, size, inner, k, .. } = *self;
        assert!(from.len() >= outer * size * inner && to.len() >= outer * k * inner, "operands shorter than {self:?}");
        assert!(k <= size && self.entries() * size_of::<T::Entry>() <= WORKER_BYTES, "{self:?} has rows that do not fit");
        if k == 0 {
            return;
        }
        let to = SharedPtr::new(to.as_mut_ptr());
        let (rows, together) = (outer * inner, CHUNK.div_ceil(size));
        pool.run(rows.div_ceil(together), rows * (4 * size + 16 * k), &|worker: &mut Worker, chunk| {
            let mut space = Space { entries: worker.scratch().cast(), have: 0, most: self.entries() };
            for row in chunk * together..rows.min((chunk + 1) * together) {
                let (base, column) = (row / inner, row % inner);
                let elements = &from[base * size * inner..][..size * inner];
                match inner {
                    1 => self.choose(elements.iter().copied(), &mut space),
                    _ => self.choose(elements[column..].iter().step_by(inner).copied(), &mut space),
                }
                for (place, entry) in space.entries()[..k].iter().enumerate() {
                    // SAFETY: `to` has `outer * k * inner` elements; a row's places are its own.
                    unsafe { *to.get().add((base * k + place) * inner + column) = entry.index() };
                }
            }
        });
    }

    /// The `k` first of `row`, in order, and perhaps some more.
    fn choose<T: Sortable>(&self, row: impl Iterator<Item = T>, space: &mut Space<T::Entry>) {
        let k = self.k;
        let flip = if self.largest { u64::MAX } else { 0 };
        let entries = row.enumerate().map(|(i, x)| T::Entry::new(x.key() ^ flip, i));
        space.have = 0;
        let mut last = None;
        for entry in entries {
            if last.is_some_and(|last| entry > last) {
                continue;
            }
            if space.have == space.most {
                last = space.keep(k);
            }
            space.push(entry);
        }
        if space.have > FEW {
            space.keep(k);
        }
        space.entries().sort_unstable();
    }
}

/// A thread's scratch space with the entries of a row that are candidates.
struct Space<E> {
    entries: *mut E,
    have: usize,
    most: usize,
}

impl<E: Entry> Space<E> {
    fn push(&mut self, entry: E) {
        assert!(self.have < self.most, "entries beyond their space");
        // SAFETY: there is space for `most` entries, which `run` saw.
        unsafe { self.entries.add(self.have).write(entry) };
        self.have += 1;
    }

    fn entries(&mut self) -> &mut [E] {
        // SAFETY: so many were written.
        unsafe { std::slice::from_raw_parts_mut(self.entries, self.have) }
    }

    /// Drops all but the `k` least; the greatest of these if any was dropped.
    fn keep(&mut self, k: usize) -> Option<E> {
        if self.have <= k {
            return None;
        }
        let (_, &mut last, _) = self.entries().select_nth_unstable(k - 1);
        self.have = k;
        Some(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;
    use std::fmt::Debug;

    /// As an order of values, not of keys.
    fn compare<T: PartialOrd>(a: T, b: T) -> Ordering {
        let is_nan = |x: &T| x.partial_cmp(x).is_none();
        a.partial_cmp(&b).unwrap_or_else(|| is_nan(&a).cmp(&is_nan(&b)))
    }

    /// Every row against a stable sort of its elements, which `value` decodes.
    fn check<T: Sortable, V: PartialOrd + Copy + Debug>(plan: TopK, pool: &Pool, x: &[T], value: fn(T) -> V) {
        let TopK { outer, size, inner, k, largest } = plan;
        let mut found = vec![-1; outer * k * inner];
        plan.run(pool, x, &mut found);
        for (base, column) in (0..outer).flat_map(|base| (0..inner).map(move |column| (base, column))) {
            let row: Vec<V> = (0..size).map(|i| value(x[(base * size + i) * inner + column])).collect();
            let mut order: Vec<usize> = (0..size).collect();
            order.sort_by(|&a, &b| if largest { compare(row[b], row[a]) } else { compare(row[a], row[b]) });
            let got: Vec<usize> = (0..k).map(|place| found[(base * k + place) * inner + column] as usize).collect();
            assert_eq!(got, order[..k], "{plan:?} of {row:?}");
        }
    }

    /// Numbers below `below` in no order.
    fn shuffled(count: usize, below: u64) -> Vec<u64> {
        let mut state = 7u64;
        let next = |_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) % below
        };
        (0..count).map(next).collect()
    }

    fn plans() -> Vec<TopK> {
        let sizes =
            [(3, 1, 1, 1), (4, 33, 1, 33), (2, 40, 5, 7), (3, 700, 1, 5), (2, 700, 3, 60), (2, 500, 1, 0), (1, 900, 1, 500)];
        let both = |(outer, size, inner, k)| [true, false].map(|largest| TopK { outer, size, inner, k, largest });
        sizes.into_iter().flat_map(both).collect()
    }

    /// Few values, so that most are equal to others.
    #[test]
    fn floats_with_ties_zeros_infinities_and_nan() {
        let values = [1.0, -0.0, 0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.5, 3e-30, -3e-30, 2.0, -f64::NAN];
        for plan in plans() {
            let picks = shuffled(plan.outer * plan.size * plan.inner, values.len() as u64);
            let x: Vec<f64> = picks.iter().map(|&pick| values[pick as usize]).collect();
            let singles: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            let brains: Vec<Bf16> = singles.iter().map(|x| HalfBits((x.to_bits() >> 16) as u16)).collect();
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                check(plan, &pool, &x, |x| x);
                check(plan, &pool, &singles, |x| x);
                check(plan, &pool, &brains, |x| f32::from_bits(u32::from(x.0) << 16));
            }
        }
    }

    /// Half floats count up by their bits, negative ones down.
    #[test]
    fn half_floats() {
        let bits: [u16; 9] = [0x7e00, 0x7c00, 0x3c00, 0x0001, 0, 0x8001, 0xbc00, 0xfc00, 0xfe00];
        let x = bits.map(HalfBits::<0x7c00>);
        let order = |largest| {
            let mut found = [0; 9];
            TopK { outer: 1, size: 9, inner: 1, k: 9, largest }.run(&Pool::new(1), &x, &mut found);
            found
        };
        assert_eq!(order(true), [0, 8, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(order(false), [7, 6, 5, 4, 3, 2, 1, 0, 8]);
    }

    #[test]
    fn integers_of_every_width() {
        let pool = Pool::new(2);
        for plan in plans() {
            let count = plan.outer * plan.size * plan.inner;
            for x in [shuffled(count, 9), shuffled(count, u64::from(u32::MAX))] {
                // The high bits too, of both signs.
                let wide: Vec<u64> = x.iter().map(|x| x.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
                check(plan, &pool, &wide, |x| x);
                check(plan, &pool, &wide.iter().map(|&x| x as i64).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 32) as u32).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 32) as i32).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 48) as u16).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 48) as i16).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 56) as u8).collect::<Vec<_>>(), |x| x);
                check(plan, &pool, &wide.iter().map(|&x| (x >> 56) as i8).collect::<Vec<_>>(), |x| x);
            }
        }
    }

    /// Every element is a candidate when it is read.
    #[test]
    fn rows_in_the_opposite_order() {
        let plan = TopK { outer: 1, size: 5000, inner: 1, k: 40, largest: true };
        check(plan, &Pool::new(1), &(0..5000).collect::<Vec<i32>>(), |x| x);
    }

    #[test]
    fn rows_that_do_not_fit() {
        let row = |size, k| TopK { outer: 1, size, inner: 1, k, largest: true };
        assert!(row(1 << 16, 1 << 16).fits(8) && row(1 << 30, 1 << 15).fits(8) && row(1 << 17, 1 << 17).fits(4));
        assert!(!row(1 << 17, 1 << 17).fits(8) && !row(1 << 18, 1 << 18).fits(4) && !row(1 << 33, 1).fits(4));
    }
}
