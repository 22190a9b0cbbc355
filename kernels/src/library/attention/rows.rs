//! One query's scores against a block of keys, in vector code.

use super::{KEYS, Mask};
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
    /// How many of them are visible: the first.
    visible: usize,
    /// Largest score of this block and of those before.
    peak: E,
}

impl<E: Real> Row<E> {
    pub fn start() -> Self {
        Row::with(E::from_f64(f64::NEG_INFINITY), E::ZERO)
    }

    /// A row of the backward pass.
    pub fn with(max: E, sum: E) -> Self {
        let (additive, boolean) = (std::ptr::null(), std::ptr::null());
        Row { scale: E::ONE, max, sum, additive, boolean, mask_step: 0, keys: 0, visible: 0, peak: max }
    }

    pub fn describe(&mut self, scale: f64, mask: Mask<E>, mask_step: usize, keys: usize, visible: usize) {
        self.visible = visible;
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
    dot: Primitive,
    scale: Primitive,
}

impl RowKernels {
    pub fn new<E: Real>(isa: Isa) -> Self {
        RowKernels {
            softmax: compiled::<Softmax<E>>(isa),
            probability: compiled::<Probability<E>>(isa),
            gradient: compiled::<Gradient<E>>(isa),
            dot: compiled::<Dot<E>>(isa),
            scale: compiled::<Scale<E>>(isa),
        }
    }

    /// Scores, those of a row KEYS behind those of the one before, become exp(score - max); each row's maximum and sum and its `sums`
    /// (`width` elements) follow.
    ///
    /// # Safety
    /// `scores` holds the rows' keys, `sums` `width` elements for each row, a row's mask as many steps as keys are visible.
    pub unsafe fn softmax<E>(&self, scores: *mut E, rows: &mut [Row<E>], sums: *mut E, width: usize) {
        // SAFETY: the caller's.
        unsafe { (self.softmax)(scores.cast(), rows.as_mut_ptr().cast(), sums.cast(), width as *const u8, rows.len()) };
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

impl RowKernels {
    /// Σ a · b.
    ///
    /// # Safety
    /// Both hold `count` elements.
    pub unsafe fn dot<E: Real>(&self, a: *const E, b: *const E, count: usize) -> E {
        let mut sum = E::ZERO;
        // SAFETY: the caller's.
        unsafe { (self.dot)(std::ptr::from_mut(&mut sum).cast(), a.cast(), b.cast(), std::ptr::null(), count) };
        sum
    }

    /// to = a · factor.
    ///
    /// # Safety
    /// Both hold `count` elements.
    pub unsafe fn scale<E: Real>(&self, to: *mut E, a: *const E, factor: E, count: usize) {
        // SAFETY: the caller's.
        unsafe { (self.scale)(to.cast(), a.cast(), std::ptr::from_ref(&factor).cast(), std::ptr::null(), count) };
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
        // SAFETY: `RowKernels::softmax` passes exclusive rows and the rest as it says.
        unsafe {
            let rows = std::slice::from_raw_parts_mut(a.cast_mut().cast::<Row<E>>(), n);
            // In two passes: what one row waits for, others do meanwhile.
            for (r, row) in rows.iter_mut().enumerate() {
                row.peak = peak(scores.add(r * KEYS), row);
            }
            for (r, row) in rows.iter_mut().enumerate() {
                exponentiate(scores.add(r * KEYS), row, sums.add(r * width), width);
            }
        }
    }
}

/// Scales and masks a row's scores; the largest of them and of the blocks before.
///
/// # Safety
/// As `RowKernels::softmax`.
#[inline(always)]
unsafe fn peak<E: Real>(scores: *mut E, row: &Row<E>) -> E {
    let plain = row.additive.is_null() && row.boolean.is_null() && row.scale > E::ZERO;
    let mut lanes = [row.max; LANES];
    // SAFETY: the caller's.
    unsafe {
        let scale = match plain {
            // Hidden scores stay -∞ when they are scaled.
            true => {
                (row.visible..row.keys).for_each(|i| *scores.add(i) = E::from_f64(f64::NEG_INFINITY));
                row.scale
            }
            false => {
                scale_and_mask(scores, row, row.visible);
                E::ONE
            }
        };
        for i in (0..row.keys).step_by(LANES) {
            keep_loop();
            let x = &mut *scores.add(i).cast::<[E; LANES]>();
            for l in 0..LANES {
                x[l] = x[l].times(scale);
                lanes[l] = larger(x[l], lanes[l]);
            }
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = larger(lanes[l + half], lanes[l]);
        }
        half /= 2;
    }
    lanes[0]
}

/// # Safety
/// As `RowKernels::softmax`, after `peak`.
#[inline(always)]
unsafe fn exponentiate<E: Real>(scores: *mut E, row: &mut Row<E>, sums: *mut E, width: usize) {
    let hidden = E::from_f64(f64::NEG_INFINITY);
    // SAFETY: the caller's.
    unsafe {
        if row.peak == hidden {
            (0..row.keys).for_each(|i| *scores.add(i) = E::ZERO);
            return;
        }
        let sum = exponentials(scores, row.peak, row.keys);
        if row.max == hidden {
            // The first block: nothing was summed.
            row.sum = sum;
        } else {
            let rescale = Real::exp(row.max.plus(row.peak.times(E::from_f64(-1.0))));
            if row.max != row.peak {
                (0..width).for_each(|i| *sums.add(i) = (*sums.add(i)).times(rescale));
            }
            row.sum = row.sum.fma(rescale, sum);
        }
        row.max = row.peak;
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

struct Dot<E>(PhantomData<E>);

impl<E: Real> Body for Dot<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        let (a, b, whole) = (a.cast::<E>(), b.cast::<E>(), n / LANES * LANES);
        // SAFETY: `RowKernels::dot`'s contract.
        unsafe {
            let mut lanes = [E::ZERO; LANES];
            for i in (0..whole).step_by(LANES) {
                keep_loop();
                let (x, y) = (&*a.add(i).cast::<[E; LANES]>(), &*b.add(i).cast::<[E; LANES]>());
                for l in 0..LANES {
                    lanes[l] = x[l].fma(y[l], lanes[l]);
                }
            }
            for i in whole..n {
                lanes[i - whole] = (*a.add(i)).fma(*b.add(i), lanes[i - whole]);
            }
            let mut half = LANES / 2;
            while half > 0 {
                for l in 0..half {
                    lanes[l] = lanes[l].plus(lanes[l + half]);
                }
                half /= 2;
            }
            *dst.cast::<E>() = lanes[0];
        }
    }
}

struct Scale<E>(PhantomData<E>);

impl<E: Real> Body for Scale<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        let (dst, a) = (dst.cast::<E>(), a.cast::<E>());
        // SAFETY: `RowKernels::scale`'s contract.
        unsafe {
            let factor = *b.cast::<E>();
            for i in 0..n {
                *dst.add(i) = (*a.add(i)).times(factor);
            }
        }
    }
}
