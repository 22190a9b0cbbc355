//! The innermost loops of direct convolutions, along stretches of a plane.
//!
//! An element of a sweep is a chain of multiply-adds over the taps. A dot is summed in `PARTS` chains, stretch after stretch, which are added
//! in halves at last. So all instruction sets give the same bits.

use super::simd::{Element, Vector, prefetch};

/// What lengths are multiples of: the chains of a dot, and at least a vector.
pub const PARTS: usize = 16;

/// Elements ahead that rows are asked for: what is carried next most often lies behind.
const AHEAD: usize = 1 << 11;

/// out[j] = Σ_t weights[t] · from[offsets[t] + j], j < length.
///
/// # Safety
/// All of these can be read and written; the length is a multiple of `PARTS`; the machine has the instruction set.
pub type Sweep<E> = unsafe fn(*mut E, *const E, &[usize], *const E, usize);

/// chains[t][j mod PARTS] += with[j] · from[offsets[t] + j], j < length: `dots(chains, with, from, offsets, length)`.
///
/// # Safety
/// As `Sweep`.
pub type Dots<E> = unsafe fn(*mut [E; PARTS], *const E, *const E, &[usize], usize);

/// Rows of elements, and how far apart rows and elements are where they come from and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub count: usize,
    pub length: usize,
    pub from: [usize; 2],
    pub to: [usize; 2],
}

/// `to = from`, or `to += from` where asked to accumulate: `carry(to, from, rows, accumulate)`.
///
/// # Safety
/// All of these can be read, and written; the machine has the instruction set.
pub type Carry<E> = unsafe fn(*mut E, *const E, &Rows, bool);

/// The loops of one instruction set.
#[derive(Clone, Copy)]
pub struct Planes<E> {
    pub sweep: Sweep<E>,
    pub dots: Dots<E>,
    pub carry: Carry<E>,
}

/// `Planes` of a vector, with a feature enabled.
macro_rules! planes {
    ($vector:ident, $(#[$feature:meta])?) => {{
        use $crate::library::sweep::{self, PARTS, Planes, Rows};
        /// # Safety
        /// As `Sweep`.
        $(#[$feature])?
        unsafe fn sweep<V: Vector>(out: *mut V::E, from: *const V::E, offsets: &[usize], weights: *const V::E, length: usize) {
            // SAFETY: the caller's.
            unsafe { sweep::sweep::<V>(out, from, offsets, weights, length) }
        }
        /// # Safety
        /// As `Dots`.
        $(#[$feature])?
        unsafe fn dots<V: Vector>(sums: *mut [V::E; PARTS], with: *const V::E, from: *const V::E, offsets: &[usize], length: usize) {
            // SAFETY: the caller's.
            unsafe { sweep::dots::<V>(sums, with, from, offsets, length) }
        }
        /// # Safety
        /// As `Carry`.
        $(#[$feature])?
        unsafe fn carry<V: Vector>(to: *mut V::E, from: *const V::E, rows: &Rows, accumulate: bool) {
            // SAFETY: the caller's.
            unsafe { sweep::carry::<V>(to, from, rows, accumulate) }
        }
        Planes { sweep: sweep::<$vector>, dots: dots::<$vector>, carry: carry::<$vector> }
    }};
}
pub(super) use planes;

/// What the chains of a dot sum up to.
pub fn total<E: Element>(mut chains: [E; PARTS]) -> E {
    let mut half = PARTS / 2;
    while half > 0 {
        (0..half).for_each(|i| chains[i] = chains[i].plus(chains[i + half]));
        half /= 2;
    }
    chains[0]
}

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
    // As many vectors as hide what a multiply-add takes; then half as many, to the last one.
    let mut together = if V::LANES == PARTS { 4 } else { 8 };
    let mut at = 0;
    while together > 0 {
        while at + together * V::LANES <= length {
            // SAFETY: the caller's.
            unsafe {
                let (out, from) = (out.add(at), from.add(at));
                match together {
                    8 => swept::<V, 8>(out, from, offsets, weights),
                    4 => swept::<V, 4>(out, from, offsets, weights),
                    2 => swept::<V, 2>(out, from, offsets, weights),
                    _ => swept::<V, 1>(out, from, offsets, weights),
                }
            }
            at += together * V::LANES;
        }
        together /= 2;
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
pub(super) unsafe fn dots<V: Vector>(
    chains: *mut [V::E; PARTS],
    with: *const V::E,
    from: *const V::E,
    offsets: &[usize],
    length: usize,
) {
    const TOGETHER: usize = 4;
    let (groups, rest) = offsets.as_chunks::<TOGETHER>();
    // SAFETY: the caller's.
    unsafe {
        for (n, group) in groups.iter().enumerate() {
            dotted::<V, TOGETHER>(chains.add(n * TOGETHER), with, from, group, length);
        }
        for (n, offset) in rest.iter().enumerate() {
            dotted::<V, 1>(chains.add(groups.len() * TOGETHER + n), with, from, &[*offset], length);
        }
    }
}

/// # Safety
/// As `Dots`.
#[inline(always)]
unsafe fn dotted<V: Vector, const T: usize>(
    chains: *mut [V::E; PARTS],
    with: *const V::E,
    from: *const V::E,
    offsets: &[usize; T],
    length: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let place = |t: usize, part: usize| chains.add(t).cast::<V::E>().add(part * V::LANES);
        // The first PARTS / LANES vectors of each are in use.
        let mut sums = [[V::zero(); PARTS]; T];
        for (t, sums) in sums.iter_mut().enumerate() {
            (0..PARTS / V::LANES).for_each(|part| sums[part] = V::load(place(t, part)));
        }
        for at in (0..length).step_by(PARTS) {
            for part in 0..PARTS / V::LANES {
                let at = at + part * V::LANES;
                let factor = V::load(with.add(at));
                for (sums, offset) in sums.iter_mut().zip(offsets) {
                    sums[part] = factor.fma(V::load(from.add(offset + at)), sums[part]);
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            (0..PARTS / V::LANES).for_each(|part| sums[part].store(place(t, part)));
        }
    }
}

/// # Safety
/// As `Carry`.
#[inline(always)]
pub(super) unsafe fn carry<V: Vector>(to: *mut V::E, from: *const V::E, rows: &Rows, accumulate: bool) {
    let row = |i: usize| (to.wrapping_add(i * rows.to[0]), from.wrapping_add(i * rows.from[0]));
    let vectors = || (0..rows.length).step_by(V::LANES).map(|at| (at, V::LANES.min(rows.length - at)));
    // SAFETY of all: the caller's; vectors have the lanes that there are.
    match (rows.from[1], rows.to[1]) {
        (1, 1) => (0..rows.count).map(row).for_each(|(to, from)| {
            vectors().for_each(|(at, lanes)| unsafe {
                prefetch(from.wrapping_add(at + AHEAD));
                prefetch(to.wrapping_add(at + AHEAD));
                match lanes == V::LANES {
                    true => put_vector(V::load(from.add(at)), to.add(at), lanes, accumulate),
                    false => put_vector(V::load_first(from.add(at), lanes), to.add(at), lanes, accumulate),
                }
            })
        }),
        (2, 1) if V::SQUARES => (0..rows.count).map(row).for_each(|(to, from)| {
            vectors().for_each(|(at, lanes)| unsafe {
                put_vector(V::load_even(from.add(2 * at), lanes), to.add(at), lanes, accumulate);
            })
        }),
        (apart, to_apart) => (0..rows.count).map(row).for_each(|(to, from)| {
            (0..rows.length).for_each(|i| unsafe {
                let (place, value) = (to.add(i * to_apart), *from.add(i * apart));
                *place = if accumulate { (*place).plus(value) } else { value };
            })
        }),
    }
}

/// # Safety
/// `lanes` elements of the place can be read and written.
#[inline(always)]
unsafe fn put_vector<V: Vector>(value: V, place: *mut V::E, lanes: usize, accumulate: bool) {
    // SAFETY: the caller's.
    unsafe {
        match (accumulate, lanes == V::LANES) {
            (false, true) => value.store(place),
            (false, false) => value.store_first(place, lanes),
            // Times one: exact.
            (true, _) => value.fma(V::splat(V::E::ONE), V::load_first(place, lanes)).store_first(place, lanes),
        }
    }
}
