//! Half floats to f32 and back: the library computes in f32, memory holds either half type.

use super::SharedPtr;
use super::vector::{Primitive, convert};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use dcc_program::DType;

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 13;

/// Conversions of one half type.
#[derive(Clone, Copy)]
pub struct Half {
    widen: Primitive,
    narrow: Primitive,
}

impl Half {
    /// `None` where `dtype` is neither f16 nor bf16.
    pub fn of(dtype: DType) -> Option<Half> {
        Self::with_isa(dtype, Isa::detect())
    }

    /// By one instruction set, which the machine must have.
    pub fn with_isa(dtype: DType, isa: Isa) -> Option<Half> {
        assert!(isa <= Isa::detect(), "{isa:?} is not on this machine");
        if !matches!(dtype, DType::F16 | DType::BF16) {
            return None;
        }
        Some(Half { widen: convert::widen(isa, dtype)?, narrow: convert::narrow(isa, dtype)? })
    }

    /// `to` = `from`, exactly. Panics if their lengths differ.
    pub fn widen(&self, pool: &Pool, from: &[u16], to: &mut [f32]) {
        assert_eq!(from.len(), to.len(), "as many elements as are read");
        // SAFETY: equally long, and two bytes are widened to four.
        unsafe { convert(pool, self.widen, (from.as_ptr().cast(), 2), (to.as_mut_ptr().cast(), 4), from.len()) }
    }

    /// `to` = `from`, rounded to nearest even. Panics if their lengths differ.
    pub fn narrow(&self, pool: &Pool, from: &[f32], to: &mut [u16]) {
        assert_eq!(from.len(), to.len(), "as many elements as are read");
        // SAFETY: equally long, and four bytes are narrowed to two.
        unsafe { convert(pool, self.narrow, (from.as_ptr().cast(), 4), (to.as_mut_ptr().cast(), 2), from.len()) }
    }
}

/// # Safety
/// Both pointers, given with the bytes of an element, are good for `count` elements; `primitive` is a conversion between these.
unsafe fn convert(
    pool: &Pool,
    primitive: Primitive,
    (from, read): (*const u8, usize),
    (to, written): (*mut u8, usize),
    count: usize,
) {
    let (from, to) = (SharedPtr::new(from.cast_mut()), SharedPtr::new(to));
    pool.run(count.div_ceil(CHUNK), count / 8, &|_, chunk| {
        let first = chunk * CHUNK;
        let n = CHUNK.min(count - first);
        // SAFETY: the caller's; chunks write parts of their own, and the machine's own instruction set was asked for.
        unsafe {
            let from = from.get().add(first * read);
            primitive(to.get().add(first * written), from, from, from, n);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_both_conversions() {
        let pool = Pool::new(2);
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let types = [(DType::F16, 0x7c00), (DType::BF16, 0x7f80)];
        for (isa, (dtype, exponent)) in Isa::available().flat_map(|isa| types.map(|ty| (isa, ty))) {
            let half = Half::with_isa(dtype, isa).expect("a half type");
            let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
            half.widen(&pool, &all, &mut wide);
            half.narrow(&pool, &wide, &mut back);
            let nan = |x: u16| x & exponent == exponent && x & !exponent & 0x7fff != 0;
            assert!(all.iter().zip(&back).all(|(&x, &y)| x == y || (nan(x) && nan(y))), "{dtype:?} by {isa:?}");
        }
        assert!(Half::of(DType::F32).is_none());
    }

    #[test]
    fn narrowing_rounds_to_nearest_even() {
        let pool = Pool::new(1);
        let check = |dtype, from: f32, expected: u16| {
            for isa in Isa::available() {
                let mut to = [0];
                Half::with_isa(dtype, isa).expect("a half type").narrow(&pool, &[from], &mut to);
                assert_eq!(to[0], expected, "{from} as {dtype:?} by {isa:?}");
            }
        };
        check(DType::BF16, 1.0 + 1.0 / 256.0, 0x3f80);
        check(DType::BF16, 1.0 + 3.0 / 256.0, 0x3f82);
        check(DType::F16, 1.0 + 1.0 / 2048.0, 0x3c00);
        check(DType::F16, 65520.0, 0x7c00);
    }
}
