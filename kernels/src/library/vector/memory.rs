//! Primitives that move elements: strided and indexed loads and stores, fills, positions, random numbers.
//!
//! Elements are moved by their size. Strides are in bytes; integer arguments stand in place of pointers.

use super::{Body, Primitive, compiled, keep_loop};
use crate::cpu::isa::Isa;
use crate::library::random::{Stream, fill_uniform, uniform as to_uniform, word};
use crate::library::simd::{LINE, prefetch};
use std::marker::PhantomData;

/// An offset that `gather` takes as "outside": it and all sums with valid offsets are negative.
const OUTSIDE: i64 = i64::MIN / 2;

struct Fetch;

impl Body for Fetch {
    #[inline(always)]
    unsafe fn run(_dst: *mut u8, a: *const u8, _b: *const u8, _c: *const u8, n: usize) {
        (0..n).step_by(LINE).for_each(|at| prefetch(a.wrapping_add(at)));
    }
}

/// Writes `n` bytes of `from`, or zeros: no call for a few of them, no loop over single ones.
///
/// # Safety
/// Both are good for `n` bytes.
#[inline(always)]
unsafe fn set_row(to: *mut u8, from: Option<*const u8>, n: usize) {
    // SAFETY: the caller's; blocks at both ends may overlap, which writes the same twice.
    unsafe {
        match n {
            32.. => {
                for at in (0..n - 31).step_by(32) {
                    set_block::<32>(to, from, at);
                    keep_loop();
                }
                set_block::<32>(to, from, n - 32);
            }
            16.. => [0, n - 16].into_iter().for_each(|at| set_block::<16>(to, from, at)),
            8.. => [0, n - 8].into_iter().for_each(|at| set_block::<8>(to, from, at)),
            4.. => [0, n - 4].into_iter().for_each(|at| set_block::<4>(to, from, at)),
            _ => {
                for at in 0..n {
                    set_block::<1>(to, from, at);
                    keep_loop();
                }
            }
        }
    }
}

/// # Safety
/// Both are good for `at + N` bytes.
#[inline(always)]
unsafe fn set_block<const N: usize>(to: *mut u8, from: Option<*const u8>, at: usize) {
    // SAFETY: the caller's; bytes lie anywhere.
    unsafe { *to.add(at).cast::<[u8; N]>() = from.map_or([0; N], |from| *from.add(at).cast::<[u8; N]>()) }
}

macro_rules! bodies {
    ($($name:ident<$t:ident>($dst:ident, $a:ident, $b:ident, $c:ident, $n:ident) $body:block)*) => {$(
        struct $name<$t>(PhantomData<$t>);
        impl<$t: Copy + Default> Body for $name<$t> {
            #[inline(always)]
            unsafe fn run($dst: *mut u8, $a: *const u8, $b: *const u8, $c: *const u8, $n: usize) {
                // SAFETY: the primitive's contract.
                unsafe { $body }
            }
        }
    )*};
}

bodies! {
    Load<T>(dst, a, b, _c, n) {
        let (dst, stride) = (dst.cast::<T>(), b as isize);
        for i in 0..n {
            *dst.add(i) = *a.offset(i as isize * stride).cast::<T>();
        }
    }
    Store<T>(dst, a, b, _c, n) {
        let (a, stride) = (a.cast::<T>(), b as isize);
        for i in 0..n {
            *dst.offset(i as isize * stride).cast::<T>() = *a.add(i);
        }
    }
    Fill<T>(dst, a, _b, _c, n) {
        let (dst, value) = (dst.cast::<T>(), *a.cast::<T>());
        for i in 0..n {
            *dst.add(i) = value;
        }
    }
    Repeat<T>(dst, a, b, _c, n) {
        let (dst, a, width) = (dst.cast::<T>(), a.cast::<T>(), b as usize);
        for i in 0..n {
            let value = *a.add(i);
            for j in 0..width {
                *dst.add(i * width + j) = value;
            }
        }
    }
    Cycle<T>(dst, a, b, _c, n) {
        let (dst, a, width) = (dst.cast::<T>(), a.cast::<T>(), b as usize);
        for i in 0..n {
            std::ptr::copy_nonoverlapping(a, dst.add(i * width), width);
        }
    }
    Move<T>(dst, a, _b, _c, n) {
        std::ptr::copy(a.cast::<T>(), dst.cast::<T>(), n);
    }
    Window<T>(dst, a, b, _c, n) {
        let [width, before, count, stride] = *b.cast::<[usize; 4]>();
        let (size, after) = (size_of::<T>(), width - before - count);
        for i in 0..n {
            let row = dst.add(i * width * size);
            set_row(row, None, before * size);
            set_row(row.add(before * size), Some(a.wrapping_add(i.wrapping_mul(stride * size))), count * size);
            set_row(row.add((before + count) * size), None, after * size);
        }
    }
    Gather<T>(dst, a, b, _c, n) {
        let (dst, a, offsets) = (dst.cast::<T>(), a.cast::<T>(), b.cast::<i64>());
        for i in 0..n {
            let offset = *offsets.add(i);
            *dst.add(i) = if offset < 0 { T::default() } else { *a.offset(offset as isize) };
        }
    }
    Iota<T>(dst, a, b, _c, n) {
        let (_, dst, first, step) = (PhantomData::<T>, dst.cast::<i64>(), a as i64, b as i64);
        for i in 0..n {
            *dst.add(i) = first.wrapping_add(step.wrapping_mul(i as i64));
        }
    }
    OneHot<T>(dst, a, b, _c, n) {
        let (_, at) = (PhantomData::<T>, (*a.cast::<i64>()).wrapping_sub(b as i64));
        std::ptr::write_bytes(dst, 0, n);
        if at >= 0 && at < n as i64 {
            *dst.add(at as usize) = 1;
        }
    }
    Offset<T>(dst, a, b, _c, n) {
        let (_, dst, index) = (PhantomData::<T>, dst.cast::<i64>(), a.cast::<i64>());
        let [stride, first, valid] = *b.cast::<[i64; 3]>();
        for i in 0..n {
            let local = (*index.add(i)).wrapping_sub(first);
            let inside = local >= 0 && local < valid;
            *dst.add(i) = if inside { (*dst.add(i)).wrapping_add(local * stride) } else { OUTSIDE };
        }
    }
    Uniform<T>(dst, a, b, c, n) {
        let [seed, step] = *b.cast::<[i64; 2]>();
        let stream = Stream { seed: seed as u64, op: c as usize as u32, step: step as u32 };
        let (_, dst, elements) = (PhantomData::<T>, dst.cast::<f32>(), a.cast::<i64>());
        for i in 0..n {
            *dst.add(i) = to_uniform(word(&stream, *elements.add(i) as u64));
        }
    }
    UniformRun<T>(dst, a, b, c, n) {
        let [seed, step] = *b.cast::<[i64; 2]>();
        let stream = Stream { seed: seed as u64, op: c as usize as u32, step: step as u32 };
        let (_, first) = (PhantomData::<T>, *a.cast::<i64>());
        fill_uniform(&stream, first as u64, std::slice::from_raw_parts_mut(dst.cast(), n));
    }
}

macro_rules! by_size {
    ($isa:expr, $bytes:expr, $body:ident) => {
        match $bytes {
            1 => compiled::<$body<u8>>($isa),
            2 => compiled::<$body<u16>>($isa),
            4 => compiled::<$body<u32>>($isa),
            8 => compiled::<$body<u64>>($isa),
            other => panic!("no element has {other} bytes"),
        }
    };
}

/// dst[i] = a[i b].
pub fn load(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Load)
}

/// dst[i b] = a[i].
pub fn store(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Store)
}

/// dst[i] = a[0].
pub fn fill(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Fill)
}

/// dst[i b + j] = a[i] for j < b.
pub fn repeat(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Repeat)
}

/// dst[i b + j] = a[j] for j < b.
pub fn cycle(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Cycle)
}

/// dst[i] = a[i].
pub fn copy(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Move)
}

/// With b = [width, before, count, stride], a row of `width` elements for each i: dst[i width + before + j] = a[i stride + j] for
/// j < count, zero left and right of these. Reads nothing else.
pub fn window(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Window)
}

/// Asks for the memory of n bytes at a, which need not be there.
pub fn fetch(isa: Isa) -> Primitive {
    compiled::<Fetch>(isa)
}

/// dst[i] = a[b[i]] with element offsets b, zero where b is negative.
pub fn gather(isa: Isa, bytes: usize) -> Primitive {
    by_size!(isa, bytes, Gather)
}

/// dst[i] = a + i b, all i64.
pub fn iota(isa: Isa) -> Primitive {
    compiled::<Iota<u8>>(isa)
}

/// dst[i] = (a[0] == b + i), bools of an i64 and the number b.
pub fn one_hot(isa: Isa) -> Primitive {
    compiled::<OneHot<u8>>(isa)
}

/// With b = [stride, first, valid]: dst[i] += (a[i] - first) stride, or outside for good if a[i] - first is not in [0, valid). All i64.
pub fn offset(isa: Isa) -> Primitive {
    compiled::<Offset<u8>>(isa)
}

/// Uniform f32 of the elements a[i] (i64) of the stream b = [seed, step], op c.
pub fn uniform(isa: Isa) -> Primitive {
    compiled::<Uniform<u8>>(isa)
}

/// Uniform f32 of the elements a[0], a[0] + 1, … of the stream b = [seed, step], op c.
pub fn uniform_run(isa: Isa) -> Primitive {
    compiled::<UniformRun<u8>>(isa)
}
