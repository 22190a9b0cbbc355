//! Copies of matrix panels in the order in which the microkernel reads them: [step][row or column].
//!
//! Where the panel's own direction is contiguous, vectors of it are moved; where the steps are, squares are turned over in registers.

use super::simd::{Square, Vector, prefetch};

/// Steps ahead of the copy that the memory is asked for.
const AHEAD: isize = 4;

/// Where a panel lies: element strides from one row (column) to the next and from one step to the next.
#[derive(Clone, Copy)]
pub struct Source<E> {
    pub from: *const E,
    pub stride: isize,
    pub step: isize,
}

/// Rows that there are, rows that are written (the others are zero), elements from one step to the next in the copy, and steps.
#[derive(Clone, Copy)]
pub struct Size {
    pub rows: usize,
    pub width: usize,
    pub apart: usize,
    pub steps: usize,
}

/// to[q * apart + i] = from[i * stride + q * step] for i < rows, q < steps; zero for rows <= i < width.
///
/// # Safety
/// The addresses above are readable and writable; the machine has the instruction set.
pub type Pack<E, W = E> = unsafe fn(Source<E>, *mut W, Size);

/// `count` panels, `size.width` wide and side by side in the source; `apart` elements apart in the copy.
///
/// # Safety
/// As `Pack`, for each of them; the source's stride is 1, and `size.rows` is `size.width` is `size.apart`.
pub type PackSide<E, W = E> = unsafe fn(Source<E>, *mut W, Size, usize, usize);

/// to[offsets[j] + i] = from[i * stride + j * step] for i < rows and all offsets.
///
/// # Safety
/// The addresses above are readable and writable; the machine has the instruction set.
pub type Spread<E> = unsafe fn(Source<E>, *mut E, &[usize], usize);

/// # Safety
/// As `Pack`.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector>(source: Source<V::E>, to: *mut V::E, size: Size) {
    // SAFETY: the caller's.
    unsafe {
        if source.stride == 1 && size.width == size.rows && matches!(size.width, 2 | 4 | 6 | 8 | 12 | 16) {
            match size.width {
                2 => copies::<V::E, 2>(source, to, size),
                4 => copies::<V::E, 4>(source, to, size),
                6 => copies::<V::E, 6>(source, to, size),
                8 => copies::<V::E, 8>(source, to, size),
                12 => copies::<V::E, 12>(source, to, size),
                _ => copies::<V::E, 16>(source, to, size),
            }
        } else if source.stride == 1 && size.width <= 2 * V::LANES {
            along::<V>(source, to, size);
        } else if source.stride == 2 && V::SQUARES && size.width <= V::LANES {
            every_other::<V>(source, to, size);
        } else if source.step == 1 && V::SQUARES {
            across::<V>(source, to, size);
        } else {
            one_by_one::<V>(source, to, size);
        }
    }
}

/// # Safety
/// As `Pack`; the stride is 1, and the width at most two vectors.
#[inline(always)]
unsafe fn along<V: Vector>(source: Source<V::E>, to: *mut V::E, Size { rows, width, apart, steps }: Size) {
    let (mut from, mut to) = (source.from, to);
    // SAFETY: the caller's.
    unsafe {
        if width <= V::LANES {
            for _ in 0..steps {
                prefetch(from.wrapping_offset(AHEAD * source.step));
                V::load_first(from, rows).store_first(to, width);
                (from, to) = (from.wrapping_offset(source.step), to.wrapping_add(apart));
            }
            return;
        }
        let (first, second) = (rows.min(V::LANES), rows.saturating_sub(V::LANES));
        for _ in 0..steps {
            let ahead = from.wrapping_offset(AHEAD * source.step);
            prefetch(ahead);
            prefetch(ahead.wrapping_add(V::LANES));
            V::load_first(from, first).store(to);
            V::load_first(from.wrapping_add(V::LANES), second).store_first(to.wrapping_add(V::LANES), width - V::LANES);
            (from, to) = (from.wrapping_offset(source.step), to.wrapping_add(apart));
        }
    }
}

/// # Safety
/// As `Pack`; the stride is 1, rows and width are `ROWS`.
#[inline(always)]
unsafe fn copies<E: Copy, const ROWS: usize>(source: Source<E>, to: *mut E, Size { apart, steps, .. }: Size) {
    for q in 0..steps {
        // SAFETY: the caller's; an array has the alignment of its elements.
        unsafe {
            let from = source.from.offset(q as isize * source.step).cast::<[E; ROWS]>();
            *to.add(q * apart).cast::<[E; ROWS]>() = *from;
        }
    }
}

/// # Safety
/// As `Pack`; the stride is 2, and the width at most a vector.
#[inline(always)]
unsafe fn every_other<V: Vector>(source: Source<V::E>, to: *mut V::E, Size { rows, width, apart, steps }: Size) {
    for q in 0..steps {
        // SAFETY: the caller's.
        unsafe {
            let from = source.from.offset(q as isize * source.step);
            V::load_even(from, rows).store_first(to.add(q * apart), width);
        }
    }
}

/// # Safety
/// As `Pack`; the step is 1.
#[inline(always)]
unsafe fn across<V: Vector>(source: Source<V::E>, to: *mut V::E, Size { rows, width, apart, steps }: Size) {
    // Lanes beyond the last row are overwritten by the next step. Whole vectors are stored faster than parts of them.
    let overlaps = apart == width && width < V::LANES;
    for step in (0..steps).step_by(V::LANES) {
        let beyond = overlaps && step + V::LANES < steps;
        for row in (0..width).step_by(V::LANES) {
            let square = Square {
                from: source.from.wrapping_offset(row as isize * source.stride).wrapping_add(step),
                stride: source.stride,
                rows: rows.saturating_sub(row).min(V::LANES),
                columns: (steps - step).min(V::LANES),
                lanes: if beyond { V::LANES } else { (width - row).min(V::LANES) },
            };
            let to = to.wrapping_add(step * apart + row);
            // SAFETY: the caller's.
            unsafe { V::transpose(&square, |column| to.wrapping_add(column * apart)) };
        }
    }
}

/// # Safety
/// As `Pack`.
#[inline(always)]
unsafe fn one_by_one<V: Vector>(source: Source<V::E>, to: *mut V::E, Size { rows, width, apart, steps }: Size) {
    for first in (0..steps).step_by(16) {
        let end = steps.min(first + 16);
        for i in 0..width {
            for q in first..end {
                let at = i as isize * source.stride + q as isize * source.step;
                // SAFETY: the caller's.
                unsafe { *to.add(q * apart + i) = if i < rows { *source.from.offset(at) } else { Default::default() } };
            }
        }
    }
}

/// Step by step through all panels: longer stretches of the source at a time, fewer pages.
///
/// # Safety
/// As `PackSide`.
#[inline(always)]
pub(super) unsafe fn pack_side<V: Vector>(source: Source<V::E>, to: *mut V::E, size: Size, count: usize, apart: usize) {
    // SAFETY: the caller's.
    unsafe {
        // Widths that are no whole vectors: some processors are slow with masked stores.
        match size.width {
            6 => side_by_side::<V, 6>(source, to, size.steps, count, apart),
            12 => side_by_side::<V, 12>(source, to, size.steps, count, apart),
            width => side_by_side_of::<V>(source, to, Size { width, ..size }, count, apart),
        }
    }
}

/// # Safety
/// As `PackSide`, for panels of `WIDTH`.
#[inline(always)]
unsafe fn side_by_side<V: Vector, const WIDTH: usize>(
    source: Source<V::E>,
    to: *mut V::E,
    steps: usize,
    count: usize,
    apart: usize,
) {
    for q in 0..steps {
        let from = source.from.wrapping_offset(q as isize * source.step);
        let ahead = from.wrapping_offset(AHEAD * source.step);
        for panel in 0..count {
            let to = to.wrapping_add(panel * apart + q * WIDTH).cast::<[V::E; WIDTH]>();
            // SAFETY: the caller's; an array has the alignment of its elements.
            unsafe {
                prefetch(ahead.wrapping_add(panel * WIDTH));
                *to = *from.add(panel * WIDTH).cast::<[V::E; WIDTH]>();
            }
        }
    }
}

/// # Safety
/// As `PackSide`.
#[inline(always)]
unsafe fn side_by_side_of<V: Vector>(source: Source<V::E>, to: *mut V::E, size: Size, count: usize, apart: usize) {
    for q in 0..size.steps {
        let from = source.from.wrapping_offset(q as isize * source.step);
        let ahead = from.wrapping_offset(AHEAD * source.step);
        for panel in 0..count {
            for i in (0..size.width).step_by(V::LANES) {
                let (at, to) = (panel * size.width + i, to.wrapping_add(panel * apart + q * size.width + i));
                // SAFETY: the caller's.
                unsafe {
                    prefetch(ahead.wrapping_add(at));
                    match size.width - i {
                        lanes if lanes < V::LANES => V::load_first(from.add(at), lanes).store_first(to, lanes),
                        _ => V::load(from.add(at)).store(to),
                    }
                }
            }
        }
    }
}

/// # Safety
/// As `Spread`.
#[inline(always)]
pub(super) unsafe fn spread<V: Vector>(source: Source<V::E>, to: *mut V::E, offsets: &[usize], rows: usize) {
    let Source { from, stride, step } = source;
    if step != 1 || !V::SQUARES {
        for (j, offset) in offsets.iter().enumerate() {
            for i in 0..rows {
                // SAFETY: the caller's.
                unsafe { *to.add(offset + i) = *from.offset(i as isize * stride + j as isize * step) };
            }
        }
        return;
    }
    for first in (0..rows).step_by(V::LANES) {
        for (n, offsets) in offsets.chunks(V::LANES).enumerate() {
            let rows = (rows - first).min(V::LANES);
            let from = from.wrapping_offset(first as isize * stride).wrapping_add(n * V::LANES);
            let square = Square { from, stride, rows, columns: offsets.len(), lanes: rows };
            // SAFETY: the caller's.
            unsafe { V::transpose(&square, |column| to.wrapping_add(offsets[column] + first)) };
        }
    }
}
