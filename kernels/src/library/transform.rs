//! The innermost loops of Winograd's convolutions: small matrices applied to both dims of tiles, whose elements are vectors of channels.
//!
//! F(2 × 2, 3 × 3) of Lavin and Gray (2016, arXiv 1509.09308): out = Aᵀ·[(G·taps·Gᵀ) ⊙ (Bᵀ·image·B)]·A, where ⊙ multiplies place by place. What is
//! linear in the taps gives their gradient by the transposed matrices: Gᵀ·[(A·out·Aᵀ) ⊙ (Bᵀ·image·B)]·G.

use super::simd::{Element, Vector};

/// Tiles side by side: where the first begins, and how far apart rows and columns of a tile, and tiles, are; where they come from and where
/// they go. An element is a number for each of `lanes` channels, whole vectors of them.
#[derive(Clone, Copy)]
pub struct Tiles<E> {
    pub from: *const E,
    pub from_strides: [isize; 2],
    pub from_step: isize,
    pub to: *mut E,
    pub to_strides: [isize; 2],
    pub to_step: isize,
    pub lanes: usize,
    pub count: usize,
}

/// # Safety
/// All of these elements can be read, and written; they do not overlap; the machine has the instruction set.
pub type Transform<E> = unsafe fn(&Tiles<E>);

/// The transforms of one instruction set.
#[derive(Clone, Copy)]
pub struct Transforms<E> {
    /// Bᵀ·x·B, of 4 × 4.
    pub image: Transform<E>,
    /// Aᵀ·x·A, of 4 × 4 to 2 × 2.
    pub output: Transform<E>,
    /// G·x·Gᵀ, of 3 × 3 to 4 × 4.
    pub taps: Transform<E>,
    /// A·x·Aᵀ, of 2 × 2 to 4 × 4.
    pub output_gradient: Transform<E>,
    /// Gᵀ·x·G, of 4 × 4 to 3 × 3.
    pub taps_gradient: Transform<E>,
}

/// A matrix.
pub(super) trait Matrix<const FROM: usize, const TO: usize> {
    /// The matrix times a column.
    ///
    /// # Safety
    /// The machine has the vector's instruction set.
    unsafe fn times<V: Vector>(x: [V; FROM]) -> [V; TO];
}

pub(super) struct Image;
pub(super) struct Output;
pub(super) struct Taps;
pub(super) struct OutputGradient;
pub(super) struct TapsGradient;

/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
unsafe fn plus<V: Vector>(a: V, b: V) -> V {
    // SAFETY: the caller's.
    unsafe { a.fma(V::splat(V::E::ONE), b) }
}

/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
unsafe fn minus<V: Vector>(a: V, b: V) -> V {
    // SAFETY: the caller's.
    unsafe { b.fma(V::splat(V::E::from_f64(-1.0)), a) }
}

/// # Safety
/// The machine has the vector's instruction set.
#[inline(always)]
unsafe fn half<V: Vector>(a: V) -> V {
    // SAFETY: the caller's.
    unsafe { a.mul(V::splat(V::E::from_f64(0.5))) }
}

impl Matrix<4, 4> for Image {
    #[inline(always)]
    unsafe fn times<V: Vector>(x: [V; 4]) -> [V; 4] {
        // SAFETY: the caller's.
        unsafe { [minus(x[0], x[2]), plus(x[1], x[2]), minus(x[2], x[1]), minus(x[1], x[3])] }
    }
}

impl Matrix<4, 2> for Output {
    #[inline(always)]
    unsafe fn times<V: Vector>(x: [V; 4]) -> [V; 2] {
        // SAFETY: the caller's.
        unsafe { [plus(plus(x[0], x[1]), x[2]), minus(minus(x[1], x[2]), x[3])] }
    }
}

impl Matrix<3, 4> for Taps {
    #[inline(always)]
    unsafe fn times<V: Vector>(x: [V; 3]) -> [V; 4] {
        // SAFETY: the caller's.
        unsafe {
            let ends = plus(x[0], x[2]);
            [x[0], half(plus(ends, x[1])), half(minus(ends, x[1])), x[2]]
        }
    }
}

impl Matrix<2, 4> for OutputGradient {
    #[inline(always)]
    unsafe fn times<V: Vector>(x: [V; 2]) -> [V; 4] {
        // SAFETY: the caller's.
        unsafe { [x[0], plus(x[0], x[1]), minus(x[0], x[1]), minus(V::zero(), x[1])] }
    }
}

impl Matrix<4, 3> for TapsGradient {
    #[inline(always)]
    unsafe fn times<V: Vector>(x: [V; 4]) -> [V; 3] {
        // SAFETY: the caller's.
        unsafe {
            let middle = half(plus(x[1], x[2]));
            [plus(x[0], middle), half(minus(x[1], x[2])), plus(middle, x[3])]
        }
    }
}

/// # Safety
/// As `Transform`.
#[inline(always)]
pub(super) unsafe fn transform<V: Vector, M: Matrix<FROM, TO>, const FROM: usize, const TO: usize>(t: &Tiles<V::E>) {
    let ([down, across], [row, column]) = (t.from_strides, t.to_strides);
    for tile in 0..t.count as isize {
        for first in (0..t.lanes).step_by(V::LANES) {
            // SAFETY: the caller's.
            unsafe {
                let (from, to) = (t.from.offset(tile * t.from_step).add(first), t.to.offset(tile * t.to_step).add(first));
                let mut wide = [[V::zero(); TO]; FROM];
                for (i, wide) in wide.iter_mut().enumerate() {
                    let from = from.offset(i as isize * down);
                    let mut x = [V::zero(); FROM];
                    x.iter_mut().enumerate().for_each(|(j, x)| *x = V::load(from.offset(j as isize * across)));
                    *wide = M::times(x);
                }
                for j in 0..TO {
                    let mut x = [V::zero(); FROM];
                    std::iter::zip(&mut x, &wide).for_each(|(x, wide)| *x = wide[j]);
                    for (i, y) in M::times(x).into_iter().enumerate() {
                        y.store(to.offset(i as isize * row + j as isize * column));
                    }
                }
            }
        }
    }
}

/// `Transforms` of a vector, with a feature enabled.
macro_rules! transforms {
    ($vector:ident, $(#[$feature:meta])?) => {{
        use $crate::library::transform::{self, Image, Matrix, Output, OutputGradient, Taps, TapsGradient, Tiles, Transforms};
        /// # Safety
        /// As `Transform`.
        $(#[$feature])?
        unsafe fn apply<V: Vector, M: Matrix<FROM, TO>, const FROM: usize, const TO: usize>(tiles: &Tiles<V::E>) {
            // SAFETY: the caller's.
            unsafe { transform::transform::<V, M, FROM, TO>(tiles) }
        }
        Transforms {
            image: apply::<$vector, Image, 4, 4>,
            output: apply::<$vector, Output, 4, 2>,
            taps: apply::<$vector, Taps, 3, 4>,
            output_gradient: apply::<$vector, OutputGradient, 2, 4>,
            taps_gradient: apply::<$vector, TapsGradient, 4, 3>,
        }
    }};
}
pub(super) use transforms;
