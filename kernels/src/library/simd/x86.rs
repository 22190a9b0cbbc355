//! Vectors of AVX2 and AVX-512.

use super::{Square, Vector, prefetch};
use std::arch::x86_64::*;

/// Lane numbers, to make AVX2 masks.
static COUNT32: [i32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
static COUNT64: [i64; 4] = [0, 1, 2, 3];

/// The first lanes, in halves: some processors take tens of instructions for a masked store.
///
/// # Safety
/// As `Vector::store_first`.
#[inline(always)]
unsafe fn store8(mut p: *mut f32, lanes: usize, x: __m256) {
    // SAFETY: the caller's.
    unsafe {
        if lanes == 8 {
            return _mm256_storeu_ps(p, x);
        }
        let mut rest = _mm256_castps256_ps128(x);
        if lanes & 4 != 0 {
            _mm_storeu_ps(p, rest);
            rest = _mm256_extractf128_ps::<1>(x);
            p = p.wrapping_add(4);
        }
        if lanes & 2 != 0 {
            _mm_storel_pd(p.cast(), _mm_castps_pd(rest));
            rest = _mm_movehl_ps(rest, rest);
            p = p.wrapping_add(2);
        }
        if lanes & 1 != 0 {
            _mm_store_ss(p, rest);
        }
    }
}

/// As `store8`.
///
/// # Safety
/// As `Vector::store_first`.
#[inline(always)]
unsafe fn store4(mut p: *mut f64, lanes: usize, x: __m256d) {
    // SAFETY: the caller's.
    unsafe {
        if lanes == 4 {
            return _mm256_storeu_pd(p, x);
        }
        let mut rest = _mm256_castpd256_pd128(x);
        if lanes & 2 != 0 {
            _mm_storeu_pd(p, rest);
            rest = _mm256_extractf128_pd::<1>(x);
            p = p.wrapping_add(2);
        }
        if lanes & 1 != 0 {
            _mm_store_sd(p, rest);
        }
    }
}

/// # Safety
/// As `Vector::transpose`.
#[inline(always)]
unsafe fn transpose16(t: &Square<f32>, to: impl Fn(usize) -> *mut f32) {
    // SAFETY of all blocks: the caller's.
    if t.rows == 16 && t.columns == 16 && t.lanes == 16 {
        unsafe { transpose16_masked(t, [16, 16, 16], to) }
    } else if t.columns == 16 && t.lanes == 16 {
        unsafe { transpose16_masked(t, [t.rows, 16, 16], to) }
    } else {
        unsafe { transpose16_masked(t, [t.rows, t.columns, t.lanes], to) }
    }
}

/// # Safety
/// As `Vector::transpose`.
#[inline(always)]
unsafe fn transpose16_masked(t: &Square<f32>, [rows, columns, lanes]: [usize; 3], to: impl Fn(usize) -> *mut f32) {
    let mask = |n: usize| ((1u32 << n) - 1) as __mmask16;
    // SAFETY of all blocks: the caller's; a masked lane is not read or written.
    let mut r = unsafe { [_mm512_setzero_ps(); 16] };
    for (i, row) in r.iter_mut().enumerate() {
        if i < rows {
            let from = t.from.wrapping_offset(i as isize * t.stride);
            prefetch(from.wrapping_add(64));
            *row = unsafe { _mm512_maskz_loadu_ps(mask(columns), from) };
        }
    }
    unsafe { turn(&mut r) };
    for (j, column) in r.into_iter().enumerate() {
        if j < columns {
            unsafe { _mm512_mask_storeu_ps(to(j), mask(lanes), column) };
        }
    }
}

/// # Safety
/// As `Vector::load_even`.
#[inline(always)]
unsafe fn load_even16(p: *const f32, lanes: usize) -> __m512 {
    let reach = (2 * lanes).saturating_sub(1);
    let mask = |n: usize| ((1u32 << n.min(16)) - 1) as __mmask16;
    // SAFETY: the caller's; masked lanes are not read.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask(reach), p);
        let high = _mm512_maskz_loadu_ps(mask(reach.saturating_sub(16)), p.wrapping_add(16));
        let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        _mm512_maskz_permutex2var_ps(mask(lanes), low, even, high)
    }
}

/// # Safety
/// As `Vector::transpose`.
#[inline(always)]
unsafe fn transpose8(t: &Square<f32>, to: impl Fn(usize) -> *mut f32) {
    // SAFETY of all blocks: the caller's.
    if t.rows == 8 && t.columns == 8 && t.lanes == 8 {
        unsafe { transpose8_masked(t, [8, 8, 8], to) }
    } else if t.columns == 8 && t.lanes == 8 {
        unsafe { transpose8_masked(t, [t.rows, 8, 8], to) }
    } else {
        unsafe { transpose8_masked(t, [t.rows, t.columns, t.lanes], to) }
    }
}

/// # Safety
/// As `Vector::transpose`.
#[inline(always)]
unsafe fn transpose8_masked(t: &Square<f32>, [rows, columns, lanes]: [usize; 3], to: impl Fn(usize) -> *mut f32) {
    // SAFETY of all blocks: the caller's; a masked lane is not read or written.
    let mut r = unsafe { [_mm256_setzero_ps(); 8] };
    for (i, row) in r.iter_mut().enumerate() {
        if i < rows {
            let from = t.from.wrapping_offset(i as isize * t.stride);
            unsafe {
                prefetch(from.wrapping_add(32));
                *row = F32x8::load_first(from, columns).0;
            }
        }
    }
    unsafe { turn8(&mut r) };
    for (j, column) in r.into_iter().enumerate() {
        if j < columns {
            unsafe { F32x8(column).store_first(to(j), lanes) };
        }
    }
}

/// # Safety
/// As `Vector::load_even`.
#[inline(always)]
unsafe fn load_even8(p: *const f32, lanes: usize) -> __m256 {
    let reach = (2 * lanes).saturating_sub(1);
    // SAFETY: the caller's; masked lanes are not read.
    unsafe {
        let low = F32x8::load_first(p, reach.min(8)).0;
        let high = F32x8::load_first(p.wrapping_add(8), reach.saturating_sub(8).min(8)).0;
        // Elements 0, 2 of both, then 4, 6 of both.
        let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(low, high));
        _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even))
    }
}

/// Element i of vector j becomes element j of vector i.
#[inline(always)]
unsafe fn turn8(r: &mut [__m256; 8]) {
    // SAFETY: the caller has the instruction set.
    unsafe {
        // Pairs, then fours, of rows within the 128-bit halves; then the halves.
        let mut t = *r;
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..2 {
            for half in 0..2 {
                let (a, b) = (_mm256_castps_pd(t[4 * i + half]), _mm256_castps_pd(t[4 * i + half + 2]));
                r[4 * i + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                r[4 * i + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
            }
        }
        for j in 0..4 {
            let (a, b) = (r[j], r[4 + j]);
            r[j] = _mm256_permute2f128_ps::<0x20>(a, b);
            r[4 + j] = _mm256_permute2f128_ps::<0x31>(a, b);
        }
    }
}

/// Element i of vector j becomes element j of vector i.
#[inline(always)]
pub(in crate::library) unsafe fn turn(r: &mut [__m512; 16]) {
    // SAFETY: the caller has the instruction set.
    unsafe {
        // Pairs, then fours, of rows within the 128-bit quarters; then the quarters.
        let mut t = *r;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..4 {
            for half in 0..2 {
                let (a, b) = (_mm512_castps_pd(t[4 * i + half]), _mm512_castps_pd(t[4 * i + half + 2]));
                r[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                r[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        let mut out = *r;
        for j in 0..4 {
            let even = [_mm512_shuffle_f32x4::<0x88>(r[j], r[4 + j]), _mm512_shuffle_f32x4::<0x88>(r[8 + j], r[12 + j])];
            let odd = [_mm512_shuffle_f32x4::<0xdd>(r[j], r[4 + j]), _mm512_shuffle_f32x4::<0xdd>(r[8 + j], r[12 + j])];
            out[j] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
            out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
            out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
            out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
        }
        *r = out;
    }
}

macro_rules! vector {
    ($name:ident, $raw:ty, $e:ty, $lanes:expr, $zero:ident, $splat:ident, $load:ident, $store:ident, $fma:ident, $mul:ident,
     |$n:ident| $mask:expr, |$p:ident, $m:ident| $load_first:expr, |$q:ident, $k:ident, $v:ident| $store_first:expr
     $(, $transpose:ident, $load_even:ident)?) => {
        #[derive(Clone, Copy)]
        pub(in crate::library) struct $name(pub $raw);
        // SAFETY of all blocks: the trait's contract gives the instruction set and good pointers.
        impl Vector for $name {
            type E = $e;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: see above.
                $name(unsafe { $zero() })
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
            unsafe fn load_first($p: *const $e, $n: usize) -> Self {
                // SAFETY: see above.
                unsafe {
                    let $m = $mask;
                    $name($load_first)
                }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $e) {
                // SAFETY: see above.
                unsafe { $store(p, self.0) }
            }
            #[inline(always)]
            unsafe fn store_first(self, $q: *mut $e, $n: usize) {
                let $v = self.0;
                // SAFETY: see above.
                unsafe {
                    let $k = $mask;
                    $store_first
                }
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                // SAFETY: see above.
                $name(unsafe { $fma(self.0, b.0, c.0) })
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
                    $name(unsafe { $load_even(p, lanes) })
                }
            )?
        }
    };
}

vector!(
    F32x16,
    __m512,
    f32,
    16,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_mul_ps,
    |n| ((1u32 << n) - 1) as __mmask16,
    |p, m| _mm512_maskz_loadu_ps(m, p),
    |q, k, v| _mm512_mask_storeu_ps(q, k, v),
    transpose16,
    load_even16
);
vector!(
    F64x8,
    __m512d,
    f64,
    8,
    _mm512_setzero_pd,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_fmadd_pd,
    _mm512_mul_pd,
    |n| ((1u32 << n) - 1) as __mmask8,
    |p, m| _mm512_maskz_loadu_pd(m, p),
    |q, k, v| _mm512_mask_storeu_pd(q, k, v)
);
vector!(
    F32x8,
    __m256,
    f32,
    8,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    _mm256_mul_ps,
    |n| _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_loadu_si256(COUNT32.as_ptr().cast())),
    |p, m| _mm256_maskload_ps(p, m),
    |q, _mask, v| store8(q, n, v),
    transpose8,
    load_even8
);
vector!(
    F64x4,
    __m256d,
    f64,
    4,
    _mm256_setzero_pd,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_fmadd_pd,
    _mm256_mul_pd,
    |n| _mm256_cmpgt_epi64(_mm256_set1_epi64x(n as i64), _mm256_loadu_si256(COUNT64.as_ptr().cast())),
    |p, m| _mm256_maskload_pd(p, m),
    |q, _mask, v| store4(q, n, v)
);

/// Lanes of f32, but for the factors of `step`, which are pairs of bf16: its sums take both products of each.
#[derive(Clone, Copy)]
pub(in crate::library) struct Bf16Pairs(F32x16);

// SAFETY of all blocks: the trait's contract, of an instruction set with AVX512_BF16.
impl Vector for Bf16Pairs {
    type E = f32;
    const LANES: usize = 16;
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { F32x16::zero() })
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { F32x16::splat(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { F32x16::load(p) })
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, lanes: usize) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { F32x16::load_first(p, lanes) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: see above.
        unsafe { self.0.store(p) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, lanes: usize) {
        // SAFETY: see above.
        unsafe { self.0.store_first(p, lanes) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { self.0.fma(b.0, c.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { self.0.mul(b.0) })
    }
    #[inline(always)]
    unsafe fn step(self, b: Self, c: Self) -> Self {
        // SAFETY: see above; vectors of the same size are only bits here.
        unsafe {
            let pairs = |x: Self| std::mem::transmute::<__m512, __m512bh>(x.0.0);
            Bf16Pairs(F32x16(_mm512_dpbf16_ps(c.0.0, pairs(self), pairs(b))))
        }
    }
    const SQUARES: bool = true;
    #[inline(always)]
    unsafe fn transpose(square: &Square<f32>, to: impl Fn(usize) -> *mut f32) {
        // SAFETY: see above.
        unsafe { F32x16::transpose(square, to) }
    }
    #[inline(always)]
    unsafe fn load_even(p: *const f32, lanes: usize) -> Self {
        // SAFETY: see above.
        Bf16Pairs(unsafe { F32x16::load_even(p, lanes) })
    }
}
