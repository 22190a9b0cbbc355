//! Vectors of one element type and one instruction set, as the matrix microkernels see them.
//!
//! The methods are inlined into functions that enable the instruction set; calling one elsewhere is undefined.

use crate::cpu::isa::Isa;

/// An element type of the matrix kernels.
pub trait Element: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    const ZERO: Self;
    const ONE: Self;
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn fma(self, b: Self, c: Self) -> Self;
    fn plus(self, b: Self) -> Self;
    fn times(self, b: Self) -> Self;
    /// The microkernels of `isa`.
    fn kernels(isa: Isa) -> super::microkernel::Kernels<Self>;
    /// Those of fewer rows and more columns, if there are such: a step of them loads less.
    fn broad_kernels(isa: Isa) -> Option<super::microkernel::Kernels<Self>>;
}

/// A vector of `LANES` elements. `mask` arguments count the leading lanes that take part; the others load zero and store nothing.
///
/// # Safety
/// Every method needs the instruction set that the type is named after, and pointers good for the lanes that take part.
pub(super) trait Vector: Copy {
    type E: Element;
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(x: Self::E) -> Self;
    unsafe fn load(p: *const Self::E) -> Self;
    unsafe fn load_first(p: *const Self::E, lanes: usize) -> Self;
    unsafe fn store(self, p: *mut Self::E);
    unsafe fn store_first(self, p: *mut Self::E, lanes: usize);
    /// self * b + c, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// A step of a product's sums: `fma`, where a lane holds one factor.
    #[inline(always)]
    unsafe fn step(self, b: Self, c: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { self.fma(b, c) }
    }
    /// Whether there are `transpose` and `load_even`.
    const SQUARES: bool = false;
    /// Elements 0, 2, 4, … as the leading lanes; zero in the others.
    unsafe fn load_even(_p: *const Self::E, _lanes: usize) -> Self {
        unreachable!("this vector has no such load")
    }
    /// `to(j)[i] = square[i, j]`.
    unsafe fn transpose(_square: &Square<Self::E>, _to: impl Fn(usize) -> *mut Self::E) {
        unreachable!("squares of this vector are not turned over")
    }
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the cache line of `p`, which need not be memory, in the second-level cache: the first one's waits are few, and those who read
/// there need them.
#[inline(always)]
pub(super) fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint of the baseline.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast())
    }
    #[cfg(target_arch = "aarch64")]
    arm::prefetch(p);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// from[i * stride + j] for i < rows, j < columns, and zero for rows <= i < lanes; none is more than `LANES`.
pub(super) struct Square<E> {
    pub from: *const E,
    pub stride: isize,
    pub rows: usize,
    pub columns: usize,
    pub lanes: usize,
}

macro_rules! element {
    ($e:ty, $avx512:ident, $avx2:ident, $neon:ident) => {
        impl Element for $e {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn from_f64(x: f64) -> Self {
                x as $e
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn fma(self, b: Self, c: Self) -> Self {
                self.mul_add(b, c)
            }
            #[inline(always)]
            fn plus(self, b: Self) -> Self {
                self + b
            }
            #[inline(always)]
            fn times(self, b: Self) -> Self {
                self * b
            }
            fn kernels(isa: Isa) -> super::microkernel::Kernels<Self> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Amx => super::microkernel::avx512::<x86::$avx512>(),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => super::microkernel::avx2::<x86::$avx2>(),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => super::microkernel::neon::<arm::$neon>(),
                    _ => super::microkernel::baseline::<Single<$e>>(),
                }
            }
            fn broad_kernels(isa: Isa) -> Option<super::microkernel::Kernels<Self>> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Amx => Some(super::microkernel::avx512_broad::<x86::$avx512>()),
                    _ => None,
                }
            }
        }
    };
}
element!(f32, F32x16, F32x8, F32x4);
element!(f64, F64x8, F64x4, F64x2);

/// One lane: the fallback for machines without vectors that are known here.
#[derive(Clone, Copy)]
pub(super) struct Single<E>(E);

impl<E: Element> Vector for Single<E> {
    type E = E;
    const LANES: usize = 1;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Single(E::ZERO)
    }
    #[inline(always)]
    unsafe fn splat(x: E) -> Self {
        Single(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const E) -> Self {
        // SAFETY: the trait's contract.
        Single(unsafe { *p })
    }
    #[inline(always)]
    unsafe fn load_first(p: *const E, lanes: usize) -> Self {
        // SAFETY: the trait's contract.
        if lanes == 0 { Single(E::ZERO) } else { Single(unsafe { *p }) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut E) {
        // SAFETY: the trait's contract.
        unsafe { *p = self.0 }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut E, lanes: usize) {
        if lanes > 0 {
            // SAFETY: the trait's contract.
            unsafe { *p = self.0 }
        }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Single(self.0.fma(b.0, c.0))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Single(self.0.times(b.0))
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod arm;

#[cfg(target_arch = "x86_64")]
pub(super) mod x86;
