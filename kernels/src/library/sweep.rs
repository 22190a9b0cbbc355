//! The innermost loops of direct convolutions, along stretches of a plane.
//!
//! An element of a sweep is a chain of multiply-adds over the taps. A dot is summed in `PARTS` chains, which are added in halves. So all
//! instruction sets give the same bits.

use super::simd::{Element, Vector};

/// What lengths are multiples of: the chains of a dot, and at least a vector.
pub const PARTS: usize = 16;

/// out[j] = Σ_t weights[t] · from[offsets[t] + j], j < length.
///
/// # Safety
/// All of these can be read and written; the length is a multiple of `PARTS`; the machine has the instruction set.
pub type Sweep<E> = unsafe fn(*mut E, *const E, &[usize], *const E, usize);

/// sums[t] = Σ_j with[j] · from[offsets[t] + j], j < length: `dots(sums, with, from, offsets, length)`.
///
/// # Safety
/// As `Sweep`.
pub type Dots<E> = unsafe fn(*mut E, *const E, *const E, &[usize], usize);

/// # Safety
/// As `Sweep`.
#[inline(always)]
pub(super) unsafe fn sweep<V: Vector>(
    out: *mut V::E,
    from: *const V::E,
    offsets: &[usize],
    weights: *const V::E,
    length: usize,
) {
    // As many vectors as hide what a multiply-add takes.
    let together = if V::LANES == PARTS { 4 } else { 8 };
    let mut at = 0;
    // SAFETY: the caller's; every step is a divisor of what is left, or a vector.
    unsafe {
        while at + together * V::LANES <= length {
            match together {
                4 => swept::<V, 4>(out.add(at), from.add(at), offsets, weights),
                _ => swept::<V, 8>(out.add(at), from.add(at), offsets, weights),
            }
            at += together * V::LANES;
        }
        while at < length {
            swept::<V, 1>(out.add(at), from.add(at), offsets, weights);
            at += V::LANES;
        }
    }
}

/// # Safety
/// As `Sweep`, of N vectors.
#[inline(always)]
unsafe fn swept<V: Vector, const N: usize>(out: *mut V::E, from: *const V::E, offsets: &[usize], weights: *const V::E) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [V::zero(); N];
        for (t, offset) in offsets.iter().enumerate() {
            let (weight, from) = (V::splat(*weights.add(t)), from.add(*offset));
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = weight.fma(V::load(from.add(i * V::LANES)), *sum);
            }
        }
        for (i, sum) in sums.into_iter().enumerate() {
            sum.store(out.add(i * V::LANES));
        }
    }
}

/// # Safety
/// As `Dots`.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector>(sums: *mut V::E, with: *const V::E, from: *const V::E, offsets: &[usize], length: usize) {
    const TOGETHER: usize = 4;
    let (groups, rest) = offsets.as_chunks::<TOGETHER>();
    // SAFETY: the caller's.
    unsafe {
        for (n, group) in groups.iter().enumerate() {
            dotted::<V, TOGETHER>(sums.add(n * TOGETHER), with, from, group, length);
        }
        for (n, offset) in rest.iter().enumerate() {
            dotted::<V, 1>(sums.add(groups.len() * TOGETHER + n), with, from, &[*offset], length);
        }
    }
}

/// # Safety
/// As `Dots`.
#[inline(always)]
unsafe fn dotted<V: Vector, const T: usize>(
    sums: *mut V::E,
    with: *const V::E,
    from: *const V::E,
    offsets: &[usize; T],
    length: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        // The first PARTS / LANES vectors of each are in use.
        let mut chains = [[V::zero(); PARTS]; T];
        for at in (0..length).step_by(PARTS) {
            for part in 0..PARTS / V::LANES {
                let at = at + part * V::LANES;
                let factor = V::load(with.add(at));
                for (chains, offset) in chains.iter_mut().zip(offsets) {
                    chains[part] = factor.fma(V::load(from.add(offset + at)), chains[part]);
                }
            }
        }
        for (t, chains) in chains.into_iter().enumerate() {
            let mut parts = [V::E::ZERO; PARTS];
            for (part, vector) in chains.into_iter().enumerate().take(PARTS / V::LANES) {
                vector.store(parts.as_mut_ptr().add(part * V::LANES));
            }
            let mut half = PARTS / 2;
            while half > 0 {
                (0..half).for_each(|i| parts[i] = parts[i].plus(parts[i + half]));
                half /= 2;
            }
            *sums.add(t) = parts[0];
        }
    }
}
