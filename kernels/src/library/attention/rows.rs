//! One query's scores against a block of keys, in vector code.

use super::{KEYS, Mask};
use crate::cpu::isa::Isa;
use crate::library::math::Real;
use crate::library::vector::{Body, LANES, Primitive, compiled, keep_loop};
use std::marker::PhantomData;

/// The last keys of a row are not computed as `LANES` where so many are enough.
const HALF: usize = LANES / 2;

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
    /// Keys of the block, a multiple of `HALF`; those the query may not see get probability 0.
    keys: usize,
    /// How many of them are visible: the first.
    visible: usize,
    /// The visible ones, rounded up to a multiple of `HALF`.
    reach: usize,
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
        Row { scale: E::ONE, max, sum, additive, boolean, mask_step: 0, keys: 0, visible: 0, reach: 0, peak: max }
    }

    pub fn describe(&mut self, scale: f64, mask: Mask<E>, mask_step: usize, keys: usize, visible: usize) {
        self.visible = visible;
        self.scale = E::from_f64(scale);
        self.mask_step = mask_step;
        // The rest of the last vectors' lanes is hidden like keys that the query may not see.
        (self.keys, self.reach) = (keys.next_multiple_of(HALF), visible.next_multiple_of(HALF));
        (self.additive, self.boolean) = match mask {
            Mask::None => (std::ptr::null(), std::ptr::null()),
            Mask::Additive(mask) => (mask.as_ptr(), std::ptr::null()),
            Mask::Boolean(mask) => (std::ptr::null(), mask.as_ptr()),
        };
    }

    /// Lse, when `RowKernels::finish` has been there.
    pub fn lse(&self) -> E {
        self.max
    }
}

/// The row functions of one element type and instruction set.
#[derive(Clone, Copy)]
pub(super) struct RowKernels {
    softmax: Primitive,
    finish: Primitive,
    dots: Primitive,
    column: Primitive,
    gradient: Primitive,
}

/// Elements of every row, in one operand or two.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Apart {
    /// From a row's elements to the next row's, in each operand.
    pub strides: [usize; 2],
    /// Elements of a row.
    pub count: usize,
}

impl RowKernels {
    pub fn new<E: Real>(isa: Isa) -> Self {
        RowKernels {
            softmax: compiled::<Softmax<E>>(isa),
            finish: compiled::<Finish<E>>(isa),
            dots: compiled::<Dots<E>>(isa),
            column: compiled::<Column<E>>(isa),
            gradient: compiled::<Gradient<E>>(isa),
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

    /// Each row's elements of `from`, its sums, become probabilities' in `to`; its maximum becomes Lse.
    ///
    /// # Safety
    /// The elements of `from`, the second operand, are readable, those of `to`, the first, may be written.
    pub unsafe fn finish<E>(&self, to: *mut E, rows: &mut [Row<E>], from: *const E, apart: &Apart) {
        // SAFETY: the caller's.
        unsafe {
            (self.finish)(to.cast(), rows.as_mut_ptr().cast(), from.cast(), std::ptr::from_ref(apart).cast(), rows.len())
        };
    }

    /// Each row's sum becomes Σ a · b of its elements.
    ///
    /// # Safety
    /// Both operands' elements are readable.
    pub unsafe fn dots<E>(&self, rows: &mut [Row<E>], a: *const E, b: *const E, apart: &Apart) {
        // SAFETY: the caller's.
        unsafe { (self.dots)(rows.as_mut_ptr().cast(), a.cast(), b.cast(), std::ptr::from_ref(apart).cast(), rows.len()) };
    }

    /// to[r * strides[0]] = Σ a[r * strides[1] + i] · b[i] for r < rows.
    ///
    /// # Safety
    /// `a` holds the rows, `b` one, `to` as many elements, so far apart.
    pub unsafe fn column<E>(&self, to: *mut E, a: *const E, b: *const E, apart: &Apart, rows: usize) {
        // SAFETY: the caller's.
        unsafe { (self.column)(to.cast(), a.cast(), b.cast(), std::ptr::from_ref(apart).cast(), rows) };
    }

    /// Scores become P = exp(score - Lse), dP becomes dS = scale · P (dP - Σ dO · O); both zero behind the visible keys. Rows lie KEYS
    /// apart.
    ///
    /// # Safety
    /// As `softmax`; `dp` holds what `scores` does.
    pub unsafe fn gradient<E>(&self, scores: *mut E, rows: &[Row<E>], dp: *mut E) {
        // SAFETY: the caller's.
        unsafe { (self.gradient)(scores.cast(), rows.as_ptr().cast(), dp.cast(), std::ptr::null(), rows.len()) };
    }
}

/// score · scale + mask, in place; unseen keys within reach get -∞.
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
        for i in count..row.reach {
            *scores.add(i) = hidden;
        }
    }
}

/// The larger one; the second if the first is NaN: one instruction. NaN comes back with the exponentials.
#[inline(always)]
fn larger<E: Real>(x: E, y: E) -> E {
    if x > y { x } else { y }
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
        let (scale, visible) = match plain {
            true => (row.scale, row.visible),
            false => {
                scale_and_mask(scores, row, row.visible);
                (E::ONE, row.reach)
            }
        };
        for i in (0..row.reach).step_by(LANES) {
            keep_loop();
            match (row.reach - i, visible - i) {
                (HALF, HALF) => enlarge::<E, HALF>(scores.add(i), scale, HALF, &mut lanes),
                (HALF, visible) => enlarge::<E, HALF>(scores.add(i), scale, visible, &mut lanes),
                (_, visible @ ..LANES) => enlarge::<E, LANES>(scores.add(i), scale, visible, &mut lanes),
                _ => enlarge::<E, LANES>(scores.add(i), scale, LANES, &mut lanes),
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

/// Scales so many scores, and hides the others; each lane becomes the largest of it and of them. (Hidden ones stored one by one would be
/// waited for.)
///
/// # Safety
/// There are `N` scores.
#[inline(always)]
unsafe fn enlarge<E: Real, const N: usize>(scores: *mut E, scale: E, visible: usize, lanes: &mut [E; LANES]) {
    let hidden = E::from_f64(f64::NEG_INFINITY);
    // SAFETY: the caller's.
    let x = unsafe { &mut *scores.cast::<[E; N]>() };
    for l in 0..N {
        let scaled = x[l].times(scale);
        x[l] = if l < visible { scaled } else { hidden };
        lanes[l] = larger(x[l], lanes[l]);
    }
}

/// # Safety
/// As `RowKernels::softmax`, after `peak`.
#[inline(always)]
unsafe fn exponentiate<E: Real>(scores: *mut E, row: &mut Row<E>, sums: *mut E, width: usize) {
    let hidden = E::from_f64(f64::NEG_INFINITY);
    // SAFETY: the caller's.
    unsafe {
        (row.reach..row.keys).for_each(|i| *scores.add(i) = E::ZERO);
        if row.peak == hidden {
            // Scores that are not hidden are NaN.
            for i in 0..row.reach {
                let x = *scores.add(i);
                *scores.add(i) = if x == hidden { E::ZERO } else { x };
                row.sum = row.sum.plus(*scores.add(i));
            }
            return;
        }
        let sum = exponentials(scores, row.peak, row.reach);
        if row.max == hidden {
            // Nothing was summed, or NaN.
            row.sum = row.sum.plus(sum);
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

/// scores = exp(scores - shift); returns their sum, in an order that depends on `count`, a multiple of `HALF`, only.
///
/// # Safety
/// `scores` holds `count` elements.
#[inline(always)]
unsafe fn exponentials<E: Real>(scores: *mut E, shift: E, count: usize) -> E {
    let mut lanes = [E::ZERO; LANES];
    for i in (0..count).step_by(LANES) {
        keep_loop();
        // SAFETY: the caller's.
        unsafe {
            match count - i {
                HALF => add_exponentials::<E, HALF>(scores.add(i), shift, &mut lanes),
                _ => add_exponentials::<E, LANES>(scores.add(i), shift, &mut lanes),
            }
        }
    }
    total(lanes)
}

/// The sum of all lanes, by halves.
#[inline(always)]
fn total<E: Real>(mut lanes: [E; LANES]) -> E {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = lanes[l].plus(lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// # Safety
/// There are `N` scores.
#[inline(always)]
unsafe fn add_exponentials<E: Real, const N: usize>(scores: *mut E, shift: E, lanes: &mut [E; LANES]) {
    // SAFETY: the caller's.
    let x = unsafe { &mut *scores.cast::<[E; N]>() };
    for l in 0..N {
        x[l] = Real::exp(x[l].plus(shift.times(E::from_f64(-1.0))));
        lanes[l] = lanes[l].plus(x[l]);
    }
}

struct Finish<E>(PhantomData<E>);

impl<E: Real> Body for Finish<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        let (to, from) = (dst.cast::<E>(), b.cast::<E>());
        let hidden = E::from_f64(f64::NEG_INFINITY);
        // SAFETY: `RowKernels::finish`'s contract.
        unsafe {
            let rows = std::slice::from_raw_parts_mut(a.cast_mut().cast::<Row<E>>(), n);
            let apart = &*c.cast::<Apart>();
            for (r, row) in rows.iter_mut().enumerate() {
                // All together: a logarithm by itself is a long wait.
                let seen = row.sum != E::ZERO;
                let log = row.max.plus(Real::log(row.sum));
                row.max = if seen { log } else { hidden };
                let factor = if seen { E::from_f64(1.0 / row.sum.to_f64()) } else { E::ZERO };
                let (to, from) = (to.add(r * apart.strides[0]), from.add(r * apart.strides[1]));
                for i in 0..apart.count {
                    *to.add(i) = (*from.add(i)).times(factor);
                }
            }
        }
    }
}

struct Dots<E>(PhantomData<E>);

impl<E: Real> Body for Dots<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        let (a, b) = (a.cast::<E>(), b.cast::<E>());
        // SAFETY: `RowKernels::dots`'s contract.
        unsafe {
            let rows = std::slice::from_raw_parts_mut(dst.cast::<Row<E>>(), n);
            let apart = &*c.cast::<Apart>();
            for (r, row) in rows.iter_mut().enumerate() {
                row.sum = dot(a.add(r * apart.strides[0]), b.add(r * apart.strides[1]), apart.count);
            }
        }
    }
}

struct Column<E>(PhantomData<E>);

impl<E: Real> Body for Column<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        let (to, a, b) = (dst.cast::<E>(), a.cast::<E>(), b.cast::<E>());
        // SAFETY: `RowKernels::column`'s contract.
        unsafe {
            let apart = &*c.cast::<Apart>();
            for r in 0..n {
                *to.add(r * apart.strides[0]) = dot(a.add(r * apart.strides[1]), b, apart.count);
            }
        }
    }
}

/// Σ a · b.
///
/// # Safety
/// Both hold `count` elements.
#[inline(always)]
unsafe fn dot<E: Real>(a: *const E, b: *const E, count: usize) -> E {
    let whole = count / LANES * LANES;
    let mut lanes = [E::ZERO; LANES];
    // SAFETY: the caller's.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            keep_loop();
            let (x, y) = (&*a.add(i).cast::<[E; LANES]>(), &*b.add(i).cast::<[E; LANES]>());
            for l in 0..LANES {
                lanes[l] = x[l].fma(y[l], lanes[l]);
            }
        }
        for i in whole..count {
            lanes[i - whole] = (*a.add(i)).fma(*b.add(i), lanes[i - whole]);
        }
    }
    total(lanes)
}

struct Gradient<E>(PhantomData<E>);

impl<E: Real> Body for Gradient<E> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        let (scores, dp) = (dst.cast::<E>(), b.cast_mut().cast::<E>());
        // SAFETY: `RowKernels::gradient`'s contract.
        unsafe {
            let rows = std::slice::from_raw_parts(a.cast::<Row<E>>(), n);
            for (r, row) in rows.iter().enumerate() {
                let (scores, dp) = (scores.add(r * KEYS), dp.add(r * KEYS));
                let plain = row.additive.is_null() && row.boolean.is_null();
                if !plain {
                    scale_and_mask(scores, row, row.visible);
                }
                // A query that sees no key has no gradient.
                let visible = if row.max == E::from_f64(f64::NEG_INFINITY) { 0 } else { row.visible };
                differentiate(scores, dp, row, if plain { row.scale } else { E::ONE }, visible);
            }
        }
    }
}

/// # Safety
/// As `RowKernels::gradient`, for one row.
#[inline(always)]
unsafe fn differentiate<E: Real>(scores: *mut E, dp: *mut E, row: &Row<E>, scale: E, visible: usize) {
    // SAFETY: the caller's; whole vectors are there.
    unsafe {
        for i in (0..visible).step_by(LANES) {
            keep_loop();
            match visible - i {
                ..=HALF => differentiate_lanes::<E, HALF>(scores.add(i), dp.add(i), row, scale),
                _ => differentiate_lanes::<E, LANES>(scores.add(i), dp.add(i), row, scale),
            }
        }
        for i in visible..row.keys {
            *scores.add(i) = E::ZERO;
            *dp.add(i) = E::ZERO;
        }
    }
}

/// # Safety
/// There are `N` elements of both.
#[inline(always)]
unsafe fn differentiate_lanes<E: Real, const N: usize>(scores: *mut E, dp: *mut E, row: &Row<E>, scale: E) {
    let minus = E::from_f64(-1.0);
    let (shift, centre) = (row.max.times(minus), row.sum.times(minus));
    // SAFETY: the caller's.
    let (x, g) = unsafe { (&mut *scores.cast::<[E; N]>(), &mut *dp.cast::<[E; N]>()) };
    for l in 0..N {
        x[l] = Real::exp(x[l].times(scale).plus(shift));
        g[l] = x[l].times(row.scale).times(g[l].plus(centre));
    }
}
