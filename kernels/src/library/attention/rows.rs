//! One query's scores against a block of keys, in vector code.

use super::Mask;
use crate::cpu::isa::Isa;
use crate::library::math::Real;
use crate::library::vector::{Body, LANES, Primitive, compiled, keep_loop};
use std::marker::PhantomData;

/// What a query has seen so far, and how to read its scores.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Row<E> {
    scale: E,
    /// Largest score so far; Lse in the backward pass.
    max: E,
    /// Σ exp(score - max); Σ dO · O in the backward pass.
    sum: E,
    additive: *const E,
    boolean: *const u8,
    mask_step: usize,
    /// Keys of the block, whole vectors; those the query may not see get probability 0.
    keys: usize,
}

impl<E: Real> Row<E> {
    pub fn start() -> Self {
        Row::with(E::from_f64(f64::NEG_INFINITY), E::ZERO)
    }

    /// A row of the backward pass.
    pub fn with(max: E, sum: E) -> Self {
        let (additive, boolean) = (std::ptr::null(), std::ptr::null());
        Row { scale: E::ONE, max, sum, additive, boolean, mask_step: 0, keys: 0 }
    }

    pub fn describe(&mut self, scale: f64, mask: Mask<E>, mask_step: usize, keys: usize) {
        self.scale = E::from_f64(scale);
        self.mask_step = mask_step;
        // The rest of the last vectors' lanes is hidden like keys that the query may not see.
        self.keys = keys.next_multiple_of(LANES);
        (self.additive, self.boolean) = match mask {
            Mask::None => (std::ptr::null(), std::ptr::null()),
            Mask::Additive(mask) => (mask.as_ptr(), std::ptr::null()),
            Mask::Boolean(mask) => (std::ptr::null(), mask.as_ptr()),
        };
    }

    /// The factor that makes sums probabilities, and Lse.
    pub fn finish(&self) -> (E, E) {
        let sum = self.sum.to_f64();
        if sum == 0.0 {
            (E::ZERO, E::from_f64(f64::NEG_INFINITY))
        } else {
            (E::from_f64(1.0 / sum), E::from_f64(self.max.to_f64() + sum.ln()))
        }
    }
}

/// The row functions of one element type and instruction set.
#[derive(Clone, Copy)]
pub(super) struct RowKernels {
    softmax: Primitive,
    probability: Primitive,
    gradient: Primitive,
}

impl RowKernels {
    pub fn new<E: Real>(isa: Isa) -> Self {
        RowKernels {
            softmax: compiled::<Softmax<E>>(isa),
            probability: compiled::<Probability<E>>(isa),
            gradient: compiled::<Gradient<E>>(isa),
        }
    }

    /// Scores become exp(score - max); the row's maximum and sum and `sums` (`width` elements) follow. The first `count` keys are visible.
    ///
    /// # Safety
    /// `scores` holds the row's keys, `sums` `width` elements, the row's mask `count` steps.
    pub unsafe fn softmax<E>(&self, scores: *mut E, row: &mut Row<E>, sums: *mut E, width: usize, count: usize) {
        // SAFETY: the caller's.
        unsafe { (self.softmax)(scores.cast(), std::ptr::from_mut(row).cast(), sums.cast(), width as *const u8, count) };
    }

    /// Scores become exp(score - Lse).
    ///
    /// # Safety
    /// As `softmax`.
    pub unsafe fn probability<E>(&self, scores: *mut E, row: &Row<E>, count: usize) {
        // SAFETY: the caller's.
        unsafe { (self.probability)(scores.cast(), std::ptr::from_ref(row).cast(), std::ptr::null(), std::ptr::null(), count) };
    }

    /// dP becomes dS = scale · P (dP - Σ dO · O).
    ///
    /// # Safety
    /// Both rows hold `count` elements.
    pub unsafe fn gradient<E>(&self, dp: *mut E, row: &Row<E>, p: *const E, count: usize) {
        // SAFETY: the caller's.
        unsafe { (self.gradient)(dp.cast(), std::ptr::from_ref(row).cast(), p.cast(), std::ptr::null(), count) };
    }
}

/// score · scale + mask, in place; unseen keys get -∞.
///
/// # Safety
/// As `RowKernels::softmax`.
#[inline(always)]
unsafe fn scale_and_mask<E: Real>(scores: *mut E, row: &Row<E>, count: usize) {
    let hidden = E::from_f64(f64::NEG_INFINITY);
    // SAFETY: the caller's.
    unsafe {
        for i in 0..count {
            *scores.add(i) = (*scores.add(i)).times(row.scale);
        }
        if !row.additive.is_null() {
            for i in 0..count {
                *scores.add(i) = (*scores.add(i)).plus(*row.additive.add(i * row.mask_step));
            }
        }
        if !row.boolean.is_null() {
            for i in 0..count {
                let keep = *row.boolean.add(i * row.mask_step) != 0;
                *scores.add(i) = if keep { *scores.add(i) } else { hidden };
            }
        }
        for i in count..row.keys {
            *scores.add(i) = hidden;
        }
    }
}

/// The larger one; NaN if one is.
#[inline(always)]
fn larger<E: Real>(x: E, y: E) -> E {
    if x > y || x.partial_cmp(&x).is_none() { x } else { y }
}

struct Softmax<E>(PhantomData<E>);

impl<E: Real> Body for Softmax<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        let (scores, sums, width) = (dst.cast::<E>(), b.cast_mut().cast::<E>(), c as usize);
        // SAFETY: `RowKernels::softmax` passes an exclusive row and the rest as it says.
        unsafe {
            let row = &mut *a.cast_mut().cast::<Row<E>>();
            scale_and_mask(scores, row, n);
            let mut lanes = [row.max; LANES];
            for i in (0..row.keys).step_by(LANES) {
                keep_loop();
                let x = &*scores.add(i).cast::<[E; LANES]>();
                for l in 0..LANES {
                    lanes[l] = larger(x[l], lanes[l]);
                }
            }
            let mut half = LANES / 2;
            while half > 0 {
                for l in 0..half {
                    lanes[l] = larger(lanes[l + half], lanes[l]);
                }
                half /= 2;
            }
            let max = lanes[0];
            if max == E::from_f64(f64::NEG_INFINITY) {
                for i in 0..row.keys {
                    *scores.add(i) = E::ZERO;
                }
                return;
            }
            let sum = exponentials(scores, max, row.keys);
            let rescale = Real::exp(row.max.plus(max.times(E::from_f64(-1.0))));
            if row.max != max {
                for i in 0..width {
                    *sums.add(i) = (*sums.add(i)).times(rescale);
                }
            }
            row.max = max;
            row.sum = row.sum.fma(rescale, sum);
        }
    }
}

/// scores = exp(scores - shift); returns their sum, in an order that depends on `count`, a multiple of `LANES`, only.
///
/// # Safety
/// `scores` holds `count` elements.
#[inline(always)]
unsafe fn exponentials<E: Real>(scores: *mut E, shift: E, count: usize) -> E {
    let mut lanes = [E::ZERO; LANES];
    for i in (0..count).step_by(LANES) {
        keep_loop();
        // SAFETY: the caller's.
        let x = unsafe { &mut *scores.add(i).cast::<[E; LANES]>() };
        for l in 0..LANES {
            x[l] = Real::exp(x[l].plus(shift.times(E::from_f64(-1.0))));
            lanes[l] = lanes[l].plus(x[l]);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = lanes[l].plus(lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

struct Probability<E>(PhantomData<E>);

impl<E: Real> Body for Probability<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, _b: *const u8, _c: *const u8, n: usize) {
        let scores = dst.cast::<E>();
        // SAFETY: `RowKernels::probability`'s contract.
        unsafe {
            let row = &*a.cast::<Row<E>>();
            scale_and_mask(scores, row, n);
            if row.max == E::from_f64(f64::NEG_INFINITY) {
                for i in 0..row.keys {
                    *scores.add(i) = E::ZERO;
                }
            } else {
                exponentials(scores, row.max, row.keys);
            }
        }
    }
}

struct Gradient<E>(PhantomData<E>);

impl<E: Real> Body for Gradient<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        let (dp, p) = (dst.cast::<E>(), b.cast::<E>());
        // SAFETY: `RowKernels::gradient`'s contract.
        unsafe {
            let row = &*a.cast::<Row<E>>();
            let minus = E::from_f64(-1.0);
            for i in 0..n {
                let centred = (*dp.add(i)).plus(row.sum.times(minus));
                *dp.add(i) = (*p.add(i)).times(row.scale).times(centred);
            }
        }
    }
}
