//! Memory that will be needed, asked for two lines at a time while something else is computed.
//!
//! A core has some ten to twenty lines on their way at a time: who asks for more at once waits for the first of them.

use super::simd::{LINE, prefetch};

/// Lines that are asked for together: an instruction for each, a few for all.
const TOGETHER: usize = 2;
const BYTES: usize = TOGETHER * LINE;

/// What is still to be asked for: stripes that are as long as each other and lie as far apart, two lines at a time.
#[derive(Clone, Copy)]
pub struct Lines {
    next: *const u8,
    /// Pairs of lines of a stripe, and those that the next one has left.
    length: usize,
    left: usize,
    /// Bytes from behind the last pair of a stripe to the first of the following.
    skip: isize,
    count: usize,
}

impl Lines {
    pub const fn none() -> Self {
        Lines { next: std::ptr::null(), length: 0, left: 0, skip: 0, count: 0 }
    }

    /// So many stripes, `apart` elements from each other, of so many elements. None of them is read: they may be anywhere.
    #[inline(always)]
    pub fn new<E>(from: *const E, stripes: usize, apart: isize, elements: usize) -> Self {
        let apart = apart.wrapping_mul(size_of::<E>() as isize);
        // Where a stripe does not begin with a line, it may end in one more.
        let begins_lines = (from.addr() | apart.cast_unsigned()).is_multiple_of(LINE);
        let length = (elements * size_of::<E>() + if begins_lines { 0 } else { LINE - 1 }).div_ceil(BYTES);
        let skip = apart.wrapping_sub((length * BYTES).cast_signed());
        Lines { next: from.cast(), length, left: length, skip, count: stripes * length }
    }

    /// Whether a second-level cache can hold all of them: stripes some powers of two apart fall into few of its sets.
    pub fn fit(&self) -> bool {
        const SETS: usize = 2048;
        const LINES_OF_A_SET: usize = 8;
        let apart = self.skip.wrapping_add((self.length * BYTES).cast_signed()).unsigned_abs();
        let positions = match apart / LINE {
            0 => SETS,
            lines => SETS >> lines.trailing_zeros().min(SETS.ilog2()),
        };
        let sets = (positions * self.length * TOGETHER).min(SETS);
        self.count * TOGETHER <= sets * LINES_OF_A_SET
    }

    /// How many pairs are left.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Asks for the next pair, which there is.
    #[inline(always)]
    pub fn ask(&mut self) {
        (0..TOGETHER).for_each(|line| prefetch(self.next.wrapping_add(line * LINE)));
        self.next = self.next.wrapping_add(BYTES);
        self.count -= 1;
        self.left -= 1;
        if self.left == 0 {
            self.next = self.next.wrapping_offset(self.skip);
            self.left = self.length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where pairs begin, in bytes from the first.
    fn asked(mut lines: Lines) -> Vec<isize> {
        let first = lines.next.addr().cast_signed();
        let all = (0..lines.count()).map(|_| {
            let at = lines.next.addr().cast_signed() - first;
            lines.ask();
            at
        });
        all.collect()
    }

    #[test]
    fn stripes_a_power_of_two_apart_do_not_fit() {
        let lines = |stripes, apart, elements| Lines::new(std::ptr::null::<f32>(), stripes, apart, elements);
        assert!(lines(768, 768, 160).fit());
        assert!(!lines(768, 3072, 160).fit());
        assert!(!lines(1024, 1024, 128).fit());
        assert!(lines(160, 3072, 768).fit());
        assert!(lines(8, 1 << 20, 8).fit());
        assert!(!lines(9, 1 << 20, 8).fit() && Lines::none().fit());
        assert!(lines(768, 8, 8).fit());
    }

    #[test]
    fn stripes_follow_one_another() {
        #[repr(align(64))]
        struct Aligned([f32; 256]);
        let memory = Aligned([0.0; 256]);
        let p = memory.0.as_ptr();
        assert_eq!(asked(Lines::new(p, 3, 64, 48)), [0, 128, 256, 384, 512, 640]);
        assert_eq!(asked(Lines::new(p, 2, -32, 17)), [0, -128]);
        // A row that begins within a line ends in one more.
        assert_eq!(asked(Lines::new(p.wrapping_add(3), 1, 64, 32)), [0, 128]);
        assert_eq!(asked(Lines::new(p.wrapping_add(3), 1, 64, 16)), [0]);
        assert_eq!(asked(Lines::new(p, 2, 20, 32)), [0, 128, 80, 208]);
        assert!(asked(Lines::none()).is_empty());
        assert!(asked(Lines::new(p, 0, 64, 16)).is_empty());
    }
}
