//! Reductions of a tile into one element, or of each of its rows, in an order that depends on the tile's length only: `LANES` partial results, then a tree.

use super::{Body, LANES, Primitive, Ty, compiled, fetch, keep_loop};
use crate::cpu::isa::Isa;
use crate::library::simd::{LINE, prefetch};
use dcc_program::types::Reduce;
use std::marker::PhantomData;

/// An associative operation with its neutral element.
trait Fold {
    type T: Copy;
    const NEUTRAL: Self::T;
    fn fold(x: Self::T, y: Self::T) -> Self::T;
}

struct Into<F>(PhantomData<F>);

impl<F: Fold> Body for Into<F> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, _b: *const u8, _c: *const u8, n: usize) {
        // SAFETY: the primitive's contract.
        unsafe {
            let mut lanes = [F::NEUTRAL; LANES];
            let whole = n / LANES * LANES;
            for i in (0..whole).step_by(LANES) {
                keep_loop();
                let x = fetch::<F::T, false>(a, i, LANES);
                for l in 0..LANES {
                    lanes[l] = F::fold(lanes[l], x[l]);
                }
            }
            for i in whole..n {
                lanes[i - whole] = F::fold(lanes[i - whole], *a.cast::<F::T>().add(i));
            }
            let mut width = LANES / 2;
            while width > 0 {
                for l in 0..width {
                    lanes[l] = F::fold(lanes[l], lanes[l + width]);
                }
                width /= 2;
            }
            let dst = dst.cast::<F::T>();
            *dst = F::fold(*dst, lanes[0]);
        }
    }
}

/// How a sum takes its addends from operands of `A`.
trait Addend {
    /// Whether the second operand counts.
    const IS_PRODUCT: bool;
    type A: Copy;
    type T: Copy + Default + std::ops::Add<Output = Self::T>;
    fn addend(x: Self::A, y: Self::A) -> Self::T;
}

/// Sums of addends that are never stored, in the order of `Into`; `SAME` where both operands are the first.
struct Sum<P, const SAME: bool>(PhantomData<P>);

impl<P: Addend, const SAME: bool> Body for Sum<P, SAME> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        // SAFETY: the primitive's contract.
        unsafe {
            let b = if SAME { a } else { b };
            let mut lanes = [P::T::default(); LANES];
            let whole = n / LANES * LANES;
            for i in (0..whole).step_by(LANES) {
                keep_loop();
                let (x, y) = (fetch::<P::A, false>(a, i, LANES), fetch::<P::A, false>(b, i, LANES));
                for l in 0..LANES {
                    lanes[l] = lanes[l] + P::addend(x[l], y[l]);
                }
            }
            for i in whole..n {
                let (x, y) = (*a.cast::<P::A>().add(i), *b.cast::<P::A>().add(i));
                lanes[i - whole] = lanes[i - whole] + P::addend(x, y);
            }
            let mut width = LANES / 2;
            while width > 0 {
                for l in 0..width {
                    lanes[l] = lanes[l] + lanes[l + width];
                }
                width /= 2;
            }
            let dst = dst.cast::<P::T>();
            *dst = *dst + lanes[0];
        }
    }
}

macro_rules! addends {
    ($($name:ident, $is_product:literal, $a:ty => $t:ty, |$x:ident, $y:ident| $body:expr;)*) => {$(
        struct $name;
        impl Addend for $name {
            const IS_PRODUCT: bool = $is_product;
            type A = $a;
            type T = $t;
            #[inline(always)]
            fn addend($x: $a, $y: $a) -> $t {
                $body
            }
        }
    )*};
}

addends! {
    PlainF32, false, f32 => f32, |x, _y| x;
    PlainF64, false, f64 => f64, |x, _y| x;
    ProductF32, true, f32 => f32, |x, y| x * y;
    ProductF64, true, f64 => f64, |x, y| x * y;
    WideProduct, true, f32 => f64, |x, y| f64::from(x) * f64::from(y);
}

/// dst[0] += Σ a[i] b[i], products and sums of `ty` from operands of `operands`: the bits of `reduce` over what stores the products. Of
/// `squares`, b is a.
pub fn sum_of_products(isa: Isa, operands: Ty, ty: Ty, squares: bool) -> Option<Primitive> {
    fn of<P: Addend>(isa: Isa, squares: bool) -> Primitive {
        if squares { compiled::<Sum<P, true>>(isa) } else { compiled::<Sum<P, false>>(isa) }
    }
    match (operands, ty) {
        (Ty::F32, Ty::F32) => Some(of::<ProductF32>(isa, squares)),
        (Ty::F64, Ty::F64) => Some(of::<ProductF64>(isa, squares)),
        (Ty::F32, Ty::F64) => Some(of::<WideProduct>(isa, squares)),
        _ => None,
    }
}

/// Sums over rows, column by column: each column's addends in the order of the rows.
struct Columns<P>(PhantomData<P>);

/// Rows that are added to a part of the totals together.
const TOGETHER: usize = 4;
/// Bytes of rows that the memory is asked for ahead, at least those that come next: short rows, four at a time, are not what processors
/// foresee.
const AHEAD: usize = 6 << 10;

impl<P: Addend<A = <P as Addend>::T>> Body for Columns<P> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        // SAFETY: the primitive's contract.
        unsafe {
            let [rows, a_stride, b_stride] = *c.cast::<[usize; 3]>();
            let at = |row: usize| (a.wrapping_add(row * a_stride), b.wrapping_add(row * b_stride));
            let whole = rows / TOGETHER * TOGETHER;
            let further = (AHEAD / (n * size_of::<P::A>()).max(1)).max(TOGETHER);
            let ahead = (further * a_stride, further * b_stride);
            for row in (0..whole).step_by(TOGETHER) {
                add_rows::<P, TOGETHER>(dst.cast(), std::array::from_fn(|r| at(row + r)), ahead, n);
            }
            for row in whole..rows {
                add_rows::<P, 1>(dst.cast(), [at(row)], ahead, n);
            }
        }
    }
}

/// # Safety
/// `dst` and all rows are good for `n` elements.
#[inline(always)]
unsafe fn add_rows<P: Addend<A = <P as Addend>::T>, const ROWS: usize>(
    dst: *mut P::T,
    rows: [(*const u8, *const u8); ROWS],
    ahead: (usize, usize),
    n: usize,
) {
    let whole = n / LANES * LANES;
    // SAFETY: the caller's.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            keep_loop();
            let sums = &mut *dst.add(i).cast::<[P::T; LANES]>();
            for (x, y) in rows {
                for line in (i * size_of::<P::A>()..(i + LANES) * size_of::<P::A>()).step_by(LINE) {
                    prefetch(x.wrapping_add(line + ahead.0));
                    if P::IS_PRODUCT {
                        prefetch(y.wrapping_add(line + ahead.1));
                    }
                }
                let (x, y) = (fetch::<P::A, false>(x, i, LANES), fetch::<P::A, false>(y, i, LANES));
                for l in 0..LANES {
                    sums[l] = sums[l] + P::addend(x[l], y[l]);
                }
            }
        }
        for i in whole..n {
            for (x, y) in rows {
                *dst.add(i) = *dst.add(i) + P::addend(*x.cast::<P::A>().add(i), *y.cast::<P::A>().add(i));
            }
        }
    }
}

/// dst[i] += Σ over rows of a[row][i], or of a[row][i] b[row][i], in the order of the rows; c: the number of rows, the bytes from a row
/// of a to the next, and of b.
pub fn columns(isa: Isa, ty: Ty, is_product: bool) -> Option<Primitive> {
    match (ty, is_product) {
        (Ty::F32, false) => Some(compiled::<Columns<PlainF32>>(isa)),
        (Ty::F32, true) => Some(compiled::<Columns<ProductF32>>(isa)),
        (Ty::F64, false) => Some(compiled::<Columns<PlainF64>>(isa)),
        (Ty::F64, true) => Some(compiled::<Columns<ProductF64>>(isa)),
        _ => None,
    }
}

struct Rows<F>(PhantomData<F>);

impl<F: Fold> Body for Rows<F> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, _c: *const u8, n: usize) {
        let width = b as usize;
        // SAFETY: the primitive's contract.
        unsafe {
            match width {
                0..=4 => fold_rows::<F, 4>(dst.cast(), a.cast(), width, n),
                5..=16 => fold_rows::<F, 16>(dst.cast(), a.cast(), width, n),
                _ => fold_rows::<F, LANES>(dst.cast(), a.cast(), width, n),
            }
        }
    }
}

/// As `Into`, by so many of its lanes as the rows need.
///
/// # Safety
/// `dst` is good for `n` elements, `a` for `n` rows of `width`; L is a power of two, and `LANES` or no less than `width`.
#[inline(always)]
unsafe fn fold_rows<F: Fold, const L: usize>(dst: *mut F::T, a: *const F::T, width: usize, n: usize) {
    for row in 0..n {
        // SAFETY: the caller's.
        unsafe {
            let a = a.add(row * width);
            let mut lanes = [F::NEUTRAL; L];
            let whole = width / L * L;
            for i in (0..whole).step_by(L) {
                keep_loop();
                let x = *a.add(i).cast::<[F::T; L]>();
                for l in 0..L {
                    lanes[l] = F::fold(lanes[l], x[l]);
                }
            }
            for i in whole..width {
                lanes[i - whole] = F::fold(lanes[i - whole], *a.add(i));
            }
            let mut half = L / 2;
            while half > 0 {
                for l in 0..half {
                    lanes[l] = F::fold(lanes[l], lanes[l + half]);
                }
                half /= 2;
            }
            *dst.add(row) = lanes[0];
        }
    }
}

macro_rules! folds {
    ($($name:ident, $t:ty, $neutral:expr, |$x:ident, $y:ident| $body:expr;)*) => {$(
        struct $name;
        impl Fold for $name {
            type T = $t;
            const NEUTRAL: $t = $neutral;
            #[inline(always)]
            fn fold($x: $t, $y: $t) -> $t {
                $body
            }
        }
    )*};
}

folds! {
    SumF32, f32, 0.0, |x, y| x + y;
    SumF64, f64, 0.0, |x, y| x + y;
    SumI64, i64, 0, |x, y| x.wrapping_add(y);
    MaxF32, f32, f32::NEG_INFINITY, |x, y| if x > y || x.is_nan() { x } else { y };
    MaxF64, f64, f64::NEG_INFINITY, |x, y| if x > y || x.is_nan() { x } else { y };
    MaxI64, i64, i64::MIN, |x, y| if x > y { x } else { y };
    MinF32, f32, f32::INFINITY, |x, y| if x < y || x.is_nan() { x } else { y };
    MinF64, f64, f64::INFINITY, |x, y| if x < y || x.is_nan() { x } else { y };
    MinI64, i64, i64::MAX, |x, y| if x < y { x } else { y };
    ProdF32, f32, 1.0, |x, y| x * y;
    ProdF64, f64, 1.0, |x, y| x * y;
    ProdI64, i64, 1, |x, y| x.wrapping_mul(y);
    Any, u8, 0, |x, y| x | y;
    All, u8, 1, |x, y| x & y;
}

/// The primitive of `$body` for an operation on a type.
macro_rules! by_operation {
    ($isa:expr, $op:expr, $ty:expr, $body:ident) => {
        match ($op, $ty) {
            (Reduce::Sum, Ty::F32) => compiled::<$body<SumF32>>($isa),
            (Reduce::Sum, Ty::F64) => compiled::<$body<SumF64>>($isa),
            (Reduce::Sum, Ty::I64) => compiled::<$body<SumI64>>($isa),
            (Reduce::Max, Ty::F32) => compiled::<$body<MaxF32>>($isa),
            (Reduce::Max, Ty::F64) => compiled::<$body<MaxF64>>($isa),
            (Reduce::Max, Ty::I64) => compiled::<$body<MaxI64>>($isa),
            (Reduce::Min, Ty::F32) => compiled::<$body<MinF32>>($isa),
            (Reduce::Min, Ty::F64) => compiled::<$body<MinF64>>($isa),
            (Reduce::Min, Ty::I64) => compiled::<$body<MinI64>>($isa),
            (Reduce::Prod, Ty::F32) => compiled::<$body<ProdF32>>($isa),
            (Reduce::Prod, Ty::F64) => compiled::<$body<ProdF64>>($isa),
            (Reduce::Prod, Ty::I64) => compiled::<$body<ProdI64>>($isa),
            (Reduce::Sum | Reduce::Max, Ty::Bool) => compiled::<$body<Any>>($isa),
            (Reduce::Min | Reduce::Prod, Ty::Bool) => compiled::<$body<All>>($isa),
        }
    };
}

/// dst[0] = op(dst[0], op over a).
pub fn reduce(isa: Isa, op: Reduce, ty: Ty) -> Primitive {
    by_operation!(isa, op, ty, Into)
}

/// dst[i] = op over a[i b + j] for j < b, with the bits of `reduce` onto a neutral element.
pub fn rows(isa: Isa, op: Reduce, ty: Ty) -> Primitive {
    by_operation!(isa, op, ty, Rows)
}

/// The bits of the neutral element of `op`.
pub fn neutral(op: Reduce, ty: Ty) -> u64 {
    match ty {
        Ty::F32 => {
            let x: f32 = match op {
                Reduce::Sum => 0.0,
                Reduce::Max => f32::NEG_INFINITY,
                Reduce::Min => f32::INFINITY,
                Reduce::Prod => 1.0,
            };
            u64::from(x.to_bits())
        }
        Ty::F64 => match op {
            Reduce::Sum => 0f64,
            Reduce::Max => f64::NEG_INFINITY,
            Reduce::Min => f64::INFINITY,
            Reduce::Prod => 1.0,
        }
        .to_bits(),
        Ty::I64 => match op {
            Reduce::Sum => 0,
            Reduce::Max => i64::MIN as u64,
            Reduce::Min => i64::MAX as u64,
            Reduce::Prod => 1,
        },
        Ty::Bool => u64::from(matches!(op, Reduce::Min | Reduce::Prod)),
    }
}
