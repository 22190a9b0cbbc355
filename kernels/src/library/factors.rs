//! How the operands of a matrix product lie in memory, and how they are copied to where the microkernel reads them.
//!
//! A *word* is what the microkernel takes a row's (column's) factors from in one step: an element of the type that it sums in, or two
//! bf16 of consecutive steps. Half floats become words while panels are packed: there is no copy of a whole operand.

use super::microkernel::Kernels;
use super::pack::{Pack, PackSide, Size, Source};
use super::simd::{LINE, prefetch};

/// Copies of panels of `S` as words of `E`'s size.
#[derive(Clone, Copy)]
pub(super) struct Packing<E, S> {
    /// Steps of the contracted dim in a word.
    pub steps: usize,
    pub pack: Pack<S, E>,
    pub pack_side: PackSide<S, E>,
    /// Packs one step as the second of the words that have the step before it.
    pub second: Pack<S, E>,
    pub lay: Lay<S>,
    pub round: Round<E, S>,
}

/// An element of a result: what offset it has of a row and a column.
#[derive(Clone, Copy)]
pub(super) struct Place<P> {
    pub at: P,
    pub row: isize,
    pub column: isize,
}

/// to[i * apart + q] = from[i * stride + q * step] for i < rows, q < steps: rows whose steps lie side by side.
///
/// # Safety
/// The addresses above are readable and writable; the machine has the instruction set.
pub(super) type Lay<S> = unsafe fn(Source<S>, *mut S, Size);

/// Rounds so many rows and columns of sums to the type that the result is stored in.
///
/// # Safety
/// The sums are readable, the result is writable; the machine has the instruction set.
pub(super) type Round<E, S> = unsafe fn(Place<*const E>, Place<*mut S>, usize, usize);

impl<E: Copy> Packing<E, E> {
    /// Of elements that are words as they are.
    pub fn plain(kernels: &Kernels<E>) -> Packing<E, E> {
        /// # Safety
        /// As `Round`.
        unsafe fn copy<E: Copy>(from: Place<*const E>, to: Place<*mut E>, rows: usize, columns: usize) {
            for i in 0..rows as isize {
                for j in 0..columns as isize {
                    // SAFETY: the caller's.
                    unsafe { *to.at.offset(i * to.row + j * to.column) = *from.at.offset(i * from.row + j * from.column) };
                }
            }
        }
        Packing { steps: 1, pack: kernels.pack, pack_side: kernels.pack_side, second: kernels.pack, lay, round: copy }
    }
}

/// # Safety
/// As `Lay`; the step is 1.
unsafe fn lay<S>(source: Source<S>, to: *mut S, Size { rows, apart, steps, .. }: Size) {
    debug_assert_eq!(source.step, 1, "rows are copied as they lie");
    for i in 0..rows {
        let from = source.from.wrapping_offset(i as isize * source.stride);
        let next = from.wrapping_offset(source.stride);
        (0..steps).step_by(LINE / size_of::<S>()).for_each(|step| prefetch(next.wrapping_add(step)));
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from, to.add(i * apart), steps) };
    }
}

/// What products of half floats are computed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// Each half float as f32.
    Widened,
    /// Two bf16 at a time, by instructions for that.
    Pairs,
    /// Tiles of pairs of bf16.
    Tiles,
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::halves;

/// `None`: this machine has none.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn halves(_dtype: dcc_program::DType, _product: Product) -> Option<(Kernels<f32>, Packing<f32, u16>)> {
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernels, Packing, Place, Product};
    use crate::cpu::isa::Isa;
    use crate::library::pack::{Size, Source};
    use crate::library::simd::{Element, prefetch, x86::Bf16Pairs, x86::turn};
    use crate::library::{microkernel, tiles};
    use dcc_program::DType;
    use std::arch::x86_64::*;

    /// Words in a vector.
    const LANES: usize = 16;
    /// Steps ahead of the copy that the memory is asked for.
    const AHEAD: isize = 8;

    /// Kernels and packing of products of `dtype`; `None` where it is no half float or the machine lacks the instructions.
    pub(in crate::library) fn halves(dtype: DType, product: Product) -> Option<(Kernels<f32>, Packing<f32, u16>)> {
        if !Isa::detect().has_avx512() {
            return None;
        }
        match (dtype, product) {
            (DType::BF16, Product::Tiles) if Isa::detect() == Isa::Amx => {
                Some((tiles::kernels(), Packing { lay: lay_turned, ..packing::<Pairs>() }))
            }
            (DType::BF16, Product::Pairs) if Isa::has_bf16_products() => {
                Some((microkernel::bf16_pairs::<Bf16Pairs>(), packing::<Pairs>()))
            }
            (DType::BF16, Product::Widened) => Some((f32::kernels(Isa::Avx512), packing::<Bf16>())),
            (DType::F16, Product::Widened) => Some((f32::kernels(Isa::Avx512), packing::<F16>())),
            _ => None,
        }
    }

    /// Half floats as words.
    ///
    /// # Safety
    /// Every method needs AVX-512 (F, BW, VL) and pointers good for what it reads.
    trait Half {
        const STEPS: usize;
        /// Words of `lanes` neighbours, of one step at `p` and, where a word has two, the one at `next`, if there is one.
        unsafe fn along(p: *const u16, next: Option<*const u16>, lanes: usize) -> __m512;
        /// Words of consecutive steps, so many; zeros where there are none.
        unsafe fn across(p: *const u16, steps: usize) -> __m512;
        /// Sixteen results, rounded to nearest even.
        unsafe fn round(sums: __m512) -> __m256i;
    }

    /// The first so many lanes.
    #[inline(always)]
    fn first16(lanes: usize) -> __mmask16 {
        ((1u32 << lanes.min(16)) - 1) as __mmask16
    }

    struct Pairs;
    struct Bf16;
    struct F16;

    // SAFETY of all blocks: the trait's contract; masked lanes are not read.
    impl Half for Pairs {
        const STEPS: usize = 2;
        #[inline(always)]
        unsafe fn along(p: *const u16, next: Option<*const u16>, lanes: usize) -> __m512 {
            // SAFETY: see above.
            unsafe {
                let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(lanes), p.cast()));
                let Some(next) = next else { return _mm512_castsi512_ps(low) };
                let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(lanes), next.cast()));
                _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
            }
        }
        #[inline(always)]
        unsafe fn across(p: *const u16, steps: usize) -> __m512 {
            let mask = ((1u64 << steps.min(32)) - 1) as __mmask32;
            // SAFETY: see above.
            unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p.cast())) }
        }
        #[inline(always)]
        unsafe fn round(sums: __m512) -> __m256i {
            // SAFETY: see above.
            unsafe { Bf16::round(sums) }
        }
    }

    impl Half for Bf16 {
        const STEPS: usize = 1;
        #[inline(always)]
        unsafe fn along(p: *const u16, _next: Option<*const u16>, lanes: usize) -> __m512 {
            // SAFETY: see above.
            unsafe {
                let half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(lanes), p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(half))
            }
        }
        #[inline(always)]
        unsafe fn across(p: *const u16, steps: usize) -> __m512 {
            // SAFETY: see above.
            unsafe { Self::along(p, None, steps) }
        }
        #[inline(always)]
        unsafe fn round(sums: __m512) -> __m256i {
            // SAFETY: see above. Not the instruction for it, which takes subnormal numbers for zero.
            unsafe {
                let bits = _mm512_castps_si512(sums);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22));
                _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(nearest, nan, quiet)))
            }
        }
    }

    impl Half for F16 {
        const STEPS: usize = 1;
        #[inline(always)]
        unsafe fn along(p: *const u16, _next: Option<*const u16>, lanes: usize) -> __m512 {
            // SAFETY: see above.
            unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first16(lanes), p.cast())) }
        }
        #[inline(always)]
        unsafe fn across(p: *const u16, steps: usize) -> __m512 {
            // SAFETY: see above.
            unsafe { Self::along(p, None, steps) }
        }
        #[inline(always)]
        unsafe fn round(sums: __m512) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(sums) }
        }
    }

    fn packing<H: Half>() -> Packing<f32, u16> {
        Packing { steps: H::STEPS, pack: pack::<H>, pack_side: pack_side::<H>, second, lay: super::lay, round: round::<H> }
    }

    /// Of all layouts.
    ///
    /// # Safety
    /// As `Lay`.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    unsafe fn lay_turned(source: Source<u16>, to: *mut u16, size: Size) {
        let Size { rows, apart, steps, .. } = size;
        let at = |i: usize, q: usize| source.from.wrapping_offset(i as isize * source.stride + q as isize * source.step);
        if source.step == 1 {
            // SAFETY: the caller's.
            return unsafe { super::lay(source, to, size) };
        }
        for (q, first) in (0..steps).step_by(2 * LANES).flat_map(|q| (0..rows).step_by(LANES).map(move |first| (q, first))) {
            let (lanes, count) = ((rows - first).min(LANES), (steps - q).min(2 * LANES));
            let stored = ((1u64 << count) - 1) as __mmask32;
            // SAFETY: the caller's; the hints read nothing, the arrays have all lanes.
            unsafe {
                let mut r = [_mm512_setzero_ps(); LANES];
                for (word, words) in r.iter_mut().enumerate().take(count.div_ceil(2)) {
                    let (p, is_pair) = (at(first, q + 2 * word), 2 * word + 1 < count);
                    let next = p.wrapping_offset(source.step);
                    *words = if source.stride == 1 {
                        prefetch(p.wrapping_offset(2 * LANES as isize * source.step));
                        prefetch(next.wrapping_offset(2 * LANES as isize * source.step));
                        Pairs::along(p, is_pair.then_some(next), lanes)
                    } else {
                        let mut halves = [[0; LANES]; 2];
                        for i in 0..lanes {
                            halves[0][i] = *p.offset(i as isize * source.stride);
                            halves[1][i] = if is_pair { *next.offset(i as isize * source.stride) } else { 0 };
                        }
                        Pairs::along(halves[0].as_ptr(), Some(halves[1].as_ptr()), LANES)
                    };
                }
                turn(&mut r);
                for (i, row) in r.into_iter().enumerate().take(lanes) {
                    _mm512_mask_storeu_epi16(to.add((first + i) * apart + q).cast(), stored, _mm512_castps_si512(row));
                }
            }
        }
    }

    /// # Safety
    /// As `Pack`.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    unsafe fn pack<H: Half>(source: Source<u16>, to: *mut f32, size: Size) {
        // SAFETY: the caller's.
        unsafe {
            if source.stride == 1 {
                along::<H>(source, to, size);
            } else if source.step == 1 {
                across::<H>(source, to, size);
            } else {
                one_by_one::<H>(source, to, size);
            }
        }
    }

    /// # Safety
    /// As `Pack`; the stride is 1.
    #[inline(always)]
    unsafe fn along<H: Half>(source: Source<u16>, to: *mut f32, Size { rows, width, apart, steps }: Size) {
        for i in (0..width).step_by(LANES) {
            let (lanes, stored) = (rows.saturating_sub(i).min(LANES), first16(width - i));
            let (mut from, mut to) = (source.from.wrapping_add(i), to.wrapping_add(i));
            for q in (0..steps).step_by(H::STEPS) {
                let next = from.wrapping_offset(source.step);
                // SAFETY: the caller's; the hints read nothing.
                unsafe {
                    prefetch(from.wrapping_offset(AHEAD * source.step));
                    prefetch(next.wrapping_offset(AHEAD * source.step));
                    let words = H::along(from, (q + 1 < steps).then_some(next), lanes);
                    _mm512_mask_storeu_ps(to, stored, words);
                }
                from = from.wrapping_offset(H::STEPS as isize * source.step);
                to = to.wrapping_add(apart);
            }
        }
    }

    /// # Safety
    /// As `Pack`; the step is 1.
    #[inline(always)]
    unsafe fn across<H: Half>(source: Source<u16>, to: *mut f32, Size { rows, width, apart, steps }: Size) {
        for step in (0..steps).step_by(LANES * H::STEPS) {
            for first in (0..width).step_by(LANES) {
                let count = (steps - step).min(LANES * H::STEPS);
                let (words, rows) = (count.div_ceil(H::STEPS), rows.saturating_sub(first).min(LANES));
                let from = |i: usize| source.from.wrapping_offset((first + i) as isize * source.stride).wrapping_add(step);
                let to = |j: usize| to.wrapping_add((step / H::STEPS + j) * apart + first);
                let lanes = first16(width - first);
                // SAFETY: the caller's; the hint reads nothing.
                unsafe {
                    let mut r = [_mm512_setzero_ps(); LANES];
                    for (i, row) in r.iter_mut().enumerate() {
                        if i < rows {
                            prefetch(from(i).wrapping_add(2 * LANES * H::STEPS));
                            *row = H::across(from(i), count);
                        }
                    }
                    turn(&mut r);
                    for (j, column) in r.into_iter().enumerate() {
                        if j < words {
                            _mm512_mask_storeu_ps(to(j), lanes, column);
                        }
                    }
                }
            }
        }
    }

    /// # Safety
    /// As `Pack`.
    #[inline(always)]
    unsafe fn one_by_one<H: Half>(source: Source<u16>, to: *mut f32, Size { rows, width, apart, steps }: Size) {
        for q in (0..steps).step_by(H::STEPS) {
            for first in (0..width).step_by(LANES) {
                let mut halves = [[0; LANES]; 2];
                for (s, halves) in halves.iter_mut().enumerate().take(H::STEPS.min(steps - q)) {
                    for i in first..rows.min(first + LANES) {
                        let at = i as isize * source.stride + (q + s) as isize * source.step;
                        // SAFETY: the caller's.
                        halves[i - first] = unsafe { *source.from.offset(at) };
                    }
                }
                // SAFETY: the caller's; the arrays have all lanes.
                unsafe {
                    let words = H::along(halves[0].as_ptr(), Some(halves[1].as_ptr()), LANES);
                    _mm512_mask_storeu_ps(to.wrapping_add(q / H::STEPS * apart + first), first16(width - first), words);
                }
            }
        }
    }

    /// # Safety
    /// As `Packing::second`, of pairs.
    unsafe fn second(source: Source<u16>, to: *mut f32, size: Size) {
        for i in 0..size.rows {
            // SAFETY: the caller's: the second half of a word that is there.
            unsafe { *to.add(i).cast::<u16>().add(1) = *source.from.offset(i as isize * source.stride) };
        }
    }

    /// # Safety
    /// As `PackSide`.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    unsafe fn pack_side<H: Half>(source: Source<u16>, to: *mut f32, size: Size, count: usize, apart: usize) {
        for q in (0..size.steps).step_by(H::STEPS) {
            let from = source.from.wrapping_offset(q as isize * source.step);
            for panel in 0..count {
                for i in (0..size.width).step_by(LANES) {
                    let at = from.wrapping_add(panel * size.width + i);
                    let next = at.wrapping_offset(source.step);
                    let lanes = (size.width - i).min(LANES);
                    // SAFETY: the caller's. The hints read nothing.
                    unsafe {
                        prefetch(at.wrapping_offset(AHEAD * source.step));
                        prefetch(next.wrapping_offset(AHEAD * source.step));
                        let words = H::along(at, (q + 1 < size.steps).then_some(next), lanes);
                        let to = to.wrapping_add(panel * apart + q / H::STEPS * size.width + i);
                        _mm512_mask_storeu_ps(to, first16(lanes), words);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As `Round`.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    unsafe fn round<H: Half>(from: Place<*const f32>, to: Place<*mut u16>, rows: usize, columns: usize) {
        // Vectors go along what is contiguous in the result.
        let turned = to.column != 1 && to.row == 1;
        let turn = |row: isize, column: isize| if turned { (column, row) } else { (row, column) };
        let ((from_row, from_column), (to_row, to_column)) = (turn(from.row, from.column), turn(to.row, to.column));
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        for i in 0..rows as isize {
            for first in (0..columns).step_by(LANES) {
                let lanes = (columns - first).min(LANES);
                let from = from.at.wrapping_offset(i * from_row + first as isize * from_column);
                let to = to.at.wrapping_offset(i * to_row + first as isize * to_column);
                // SAFETY: the caller's; the arrays have all lanes.
                unsafe {
                    let sums = if from_column == 1 {
                        _mm512_maskz_loadu_ps(first16(lanes), from)
                    } else {
                        let mut sums = [0.0; LANES];
                        sums.iter_mut()
                            .enumerate()
                            .take(lanes)
                            .for_each(|(j, sum)| *sum = *from.offset(j as isize * from_column));
                        _mm512_loadu_ps(sums.as_ptr())
                    };
                    let rounded = H::round(sums);
                    if to_column == 1 {
                        _mm256_mask_storeu_epi16(to.cast(), first16(lanes), rounded);
                        continue;
                    }
                    let mut halves = [0u16; LANES];
                    _mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded);
                    halves.iter().enumerate().take(lanes).for_each(|(j, half)| *to.offset(j as isize * to_column) = *half);
                }
            }
        }
    }
}
