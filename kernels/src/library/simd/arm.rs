//! NEON's vectors: what every 64-bit Arm processor has.

use super::{Square, Vector};
use std::arch::aarch64::*;
use std::arch::asm;

/// Asks for the cache line of `p`, which need not be memory, in the second-level cache.
#[inline(always)]
pub(super) fn prefetch<T>(p: *const T) {
    // SAFETY: a hint, which no address makes fault.
    unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
}

macro_rules! vector {
    ($name:ident, $raw:ty, $e:ty, $lanes:expr, $splat:ident, $load:ident, $store:ident, $fma:ident, $mul:ident $(, $transpose:ident, $load_even:ident)?) => {
        #[derive(Clone, Copy)]
        pub(in crate::library) struct $name(pub $raw);
        // SAFETY of all blocks: the trait's contract gives good pointers, and every processor of this architecture has the instructions.
        impl Vector for $name {
            type E = $e;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: see above.
                $name(unsafe { $splat(0.0) })
            }
            #[inline(always)]
            unsafe fn splat(x: $e) -> Self {
                // SAFETY: see above.
                $name(unsafe { $splat(x) })
            }
            #[inline(always)]
            unsafe fn load(p: *const $e) -> Self {
                // SAFETY: see above.
                $name(unsafe { $load(p) })
            }
            #[inline(always)]
            unsafe fn load_first(p: *const $e, lanes: usize) -> Self {
                if lanes >= $lanes {
                    // SAFETY: see above.
                    return unsafe { Self::load(p) };
                }
                let mut all = [0.0; $lanes];
                // SAFETY: see above.
                (0..lanes).for_each(|lane| all[lane] = unsafe { *p.add(lane) });
                // SAFETY: see above.
                unsafe { Self::load(all.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $e) {
                // SAFETY: see above.
                unsafe { $store(p, self.0) }
            }
            #[inline(always)]
            unsafe fn store_first(self, p: *mut $e, lanes: usize) {
                if lanes >= $lanes {
                    // SAFETY: see above.
                    return unsafe { self.store(p) };
                }
                let mut all = [0.0; $lanes];
                // SAFETY: see above.
                unsafe { self.store(all.as_mut_ptr()) };
                // SAFETY: see above.
                (0..lanes).for_each(|lane| unsafe { *p.add(lane) = all[lane] });
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                // SAFETY: see above.
                $name(unsafe { $fma(c.0, self.0, b.0) })
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: see above.
                $name(unsafe { $mul(self.0, b.0) })
            }
            $(
                const SQUARES: bool = true;
                #[inline(always)]
                unsafe fn transpose(square: &Square<$e>, to: impl Fn(usize) -> *mut $e) {
                    // SAFETY: see above.
                    unsafe { $transpose(square, to) }
                }
                #[inline(always)]
                unsafe fn load_even(p: *const $e, lanes: usize) -> Self {
                    // SAFETY: see above.
                    unsafe { $load_even(p, lanes) }
                }
            )?
        }
    };
}

/// # Safety
/// As `Vector::transpose`.
#[inline(always)]
unsafe fn transpose4(t: &Square<f32>, to: impl Fn(usize) -> *mut f32) {
    // SAFETY: the caller's; no row or column is touched that takes no part.
    unsafe {
        let row = |i: usize| match i < t.rows {
            true => F32x4::load_first(t.from.wrapping_offset(i as isize * t.stride), t.columns).0,
            false => F32x4::zero().0,
        };
        let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
        // Pairs of elements of two rows, then pairs of these pairs.
        let (even, odd) = ([vtrn1q_f32(a, b), vtrn1q_f32(c, d)], [vtrn2q_f32(a, b), vtrn2q_f32(c, d)]);
        let wide = |x: float32x4_t| vreinterpretq_f64_f32(x);
        let low = |[x, y]: [float32x4_t; 2]| F32x4(vreinterpretq_f32_f64(vzip1q_f64(wide(x), wide(y))));
        let high = |[x, y]: [float32x4_t; 2]| F32x4(vreinterpretq_f32_f64(vzip2q_f64(wide(x), wide(y))));
        for (j, column) in [low(even), low(odd), high(even), high(odd)].into_iter().enumerate().take(t.columns) {
            column.store_first(to(j), t.lanes);
        }
    }
}

/// # Safety
/// As `Vector::load_even`.
#[inline(always)]
unsafe fn load_even4(p: *const f32, lanes: usize) -> F32x4 {
    let reach = (2 * lanes).saturating_sub(1);
    // SAFETY: the caller's; what lies behind the reach is not read.
    unsafe {
        let low = F32x4::load_first(p, reach.min(4));
        let high = F32x4::load_first(p.wrapping_add(4), reach.saturating_sub(4));
        F32x4(vuzp1q_f32(low.0, high.0))
    }
}

vector!(F32x4, float32x4_t, f32, 4, vdupq_n_f32, vld1q_f32, vst1q_f32, vfmaq_f32, vmulq_f32, transpose4, load_even4);
vector!(F64x2, float64x2_t, f64, 2, vdupq_n_f64, vld1q_f64, vst1q_f64, vfmaq_f64, vmulq_f64);
