//! Vector primitives: one operation on a tile of elements, called by generated code through pointers.
//!
//! All have one signature, so that generated code needs one too. Operands are tiles or single elements (`Shape`). Each is compiled per
//! instruction set from the same straight-line Rust, which the compiler turns into vector code; all give the same bits. A destination may
//! be one of the operands exactly, never overlap one partly.

pub mod arithmetic;
pub mod convert;
pub mod memory;
pub mod reduce;

use crate::cpu::isa::Isa;

/// `dst`, three operands (pointers, or integers where a primitive says so) and the number of elements.
///
/// # Safety
/// The machine has the instruction set it was looked up for; each pointer is good for `n` elements of its type, or one where single.
pub type Primitive = unsafe extern "C" fn(*mut u8, *const u8, *const u8, *const u8, usize);

/// The types that tiles have. Narrower integers widen to `I64` when loaded, half floats to `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ty {
    F32,
    F64,
    I64,
    /// One byte, 0 or 1.
    Bool,
}

impl Ty {
    pub fn bytes(self) -> usize {
        match self {
            Ty::Bool => 1,
            Ty::F32 => 4,
            Ty::F64 | Ty::I64 => 8,
        }
    }
}

/// Whether an operand has one element per element of the destination, or one for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    Tile,
    Single,
}

/// Elements computed together; also the number of partial results of a reduction, whatever the vector width.
pub(crate) const LANES: usize = 32;

/// A body that is compiled once per instruction set.
pub(super) trait Body {
    /// # Safety
    /// As `Primitive`.
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize);
}

/// The primitive of `B` for `isa`.
pub(super) fn compiled<B: Body>(isa: Isa) -> Primitive {
    /// # Safety
    /// As `Primitive`.
    unsafe extern "C" fn baseline<B: Body>(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        // SAFETY: the caller's.
        unsafe { B::run(dst, a, b, c, n) }
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => avx512::<B>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::<B>,
        _ => baseline::<B>,
    }
}

/// # Safety
/// As `Primitive`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
unsafe extern "C" fn avx512<B: Body>(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
    // SAFETY: the caller's.
    unsafe { B::run(dst, a, b, c, n) }
}

/// # Safety
/// As `Primitive`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe extern "C" fn avx2<B: Body>(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
    // SAFETY: the caller's.
    unsafe { B::run(dst, a, b, c, n) }
}

/// Reads up to `LANES` elements of an operand from element `i` on; a single one is repeated, missing ones are its first.
///
/// # Safety
/// `p` is good for `i + count` elements of T, or for one.
#[inline(always)]
pub(super) unsafe fn fetch<T: Copy, const SINGLE: bool>(p: *const u8, i: usize, count: usize) -> [T; LANES] {
    let p = p.cast::<T>();
    // SAFETY: the caller's; tiles may lie at any multiple of the element's size.
    unsafe {
        if SINGLE {
            [*p; LANES]
        } else if count == LANES {
            *p.add(i).cast::<[T; LANES]>()
        } else {
            let mut all = [*p.add(i); LANES];
            for (l, element) in all.iter_mut().enumerate().take(count) {
                *element = *p.add(i + l);
            }
            all
        }
    }
}

/// Writes the first `count` of `values` to elements `i…`.
///
/// # Safety
/// `p` is good for `i + count` elements.
#[inline(always)]
pub(super) unsafe fn put<T: Copy>(p: *mut u8, i: usize, count: usize, values: &[T; LANES]) {
    // SAFETY: the caller's.
    unsafe {
        let p = p.cast::<T>().add(i);
        if count == LANES {
            *p.cast::<[T; LANES]>() = *values;
        } else {
            std::ptr::copy_nonoverlapping(values.as_ptr(), p, count);
        }
    }
}

/// Keeps the compiler from vectorising the loop it stands in: the loops over `LANES` inside are to be vectors, not their stretches.
#[inline(always)]
pub(super) fn keep_loop() {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("", options(nomem, nostack, preserves_flags)) };
}
