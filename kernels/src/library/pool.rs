//! The greatest element of each window and where it is.
//!
//! Rows of outputs at a time: for each tap one pass over the outputs that it reaches, so that the compiler makes vectors of them.

use super::SharedPtr;
use super::vector::{Body, Primitive, compiled, keep_loop};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use std::marker::PhantomData;

/// One spatial dim: `image = stride · output + dilation · tap − pad`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    pub image: usize,
    pub outputs: usize,
    pub taps: usize,
    pub stride: usize,
    pub dilation: usize,
    pub pad: isize,
}

impl Axis {
    /// Outputs at which `tap` lies in the image, and where in the image the first of them is.
    fn reached(&self, tap: usize) -> (std::ops::Range<usize>, usize) {
        let ahead = (self.dilation * tap) as isize - self.pad;
        // A division takes longer than the rest of a short row.
        let outputs = |length: usize| match self.stride {
            1 => length,
            2 => length.div_ceil(2),
            stride => length.div_ceil(stride),
        };
        let at_least = |bound: isize| (bound - ahead).max(0) as usize;
        let first = outputs(at_least(0)).min(self.outputs);
        let end = outputs(at_least(self.image as isize)).clamp(first, self.outputs);
        (first..end, (ahead + (first * self.stride) as isize).max(0) as usize)
    }

    /// Image position of `tap` at `output`, if it is inside.
    fn at(&self, output: usize, tap: usize) -> Option<usize> {
        let at = (self.stride * output + self.dilation * tap) as isize - self.pad;
        usize::try_from(at).ok().filter(|&at| at < self.image)
    }
}

/// A pool over dense planes; those of the image lie wherever `sources` says, in elements.
#[derive(Clone, Debug)]
pub struct MaxPool {
    /// Offset of each plane in the image and in the output.
    pub planes: Vec<[usize; 2]>,
    /// At least one, major first.
    pub axes: Vec<Axis>,
}

impl MaxPool {
    /// Values, and indices into the image's plane: the first of equal ones, the last NaN, -1 for a window without elements.
    ///
    /// # Panics
    /// If an operand is too short.
    pub fn run<E: PartialOrd + Copy + Send + Sync>(
        &self,
        pool: &Pool,
        lowest: E,
        x: &[E],
        values: &mut [E],
        places: &mut [i32],
    ) {
        self.run_with(Isa::detect(), pool, lowest, x, values, places);
    }

    /// The same by one instruction set, which the machine must have. Panics as `run`.
    pub fn run_with<E: PartialOrd + Copy + Send + Sync>(
        &self,
        isa: Isa,
        pool: &Pool,
        lowest: E,
        x: &[E],
        values: &mut [E],
        places: &mut [i32],
    ) {
        assert!(isa <= Isa::detect(), "{isa:?} is not on this machine");
        let size: usize = self.axes.iter().map(|axis| axis.outputs).product();
        let reach = self.planes.iter().map(|plane| plane[1] + size).max().unwrap_or(0);
        assert!(values.len() >= reach && places.len() >= reach, "{} outputs for {reach}", values.len());
        let (values, places) = (SharedPtr::new(values.as_mut_ptr()), SharedPtr::new(places.as_mut_ptr()));
        let taps: usize = self.axes.iter().map(|axis| axis.taps).product();
        let together = ((1 << 14) / (size * taps).max(1)).max(1);
        // Strides known when this is compiled: vectors.
        let stretch = match self.axes.last().map(|axis| axis.stride) {
            Some(1) => compiled::<Stretch<E, 1>>(isa),
            Some(2) => compiled::<Stretch<E, 2>>(isa),
            _ => compiled::<Stretch<E, 0>>(isa),
        };
        pool.run(self.planes.len().div_ceil(together), self.planes.len() * size * taps / 2, &|_, chunk| {
            for plane in &self.planes[chunk * together..self.planes.len().min((chunk + 1) * together)] {
                // SAFETY: planes of the output are disjoint, and the longest reach was compared with the lengths.
                let (values, places) = unsafe {
                    let values = std::slice::from_raw_parts_mut(values.get().add(plane[1]), size);
                    (values, std::slice::from_raw_parts_mut(places.get().add(plane[1]), size))
                };
                values.fill(lowest);
                places.fill(-1);
                rows(&self.axes, stretch, &x[plane[0]..], 0, values, places);
            }
        });
    }
}

/// All outputs below some outer indices; the image begins at `base` of the plane.
fn rows<E: Copy>(axes: &[Axis], stretch: Primitive, x: &[E], base: usize, values: &mut [E], places: &mut [i32]) {
    let (axis, rest) = axes.split_first().expect("a pool has a dim");
    if rest.is_empty() {
        return (0..axis.taps).for_each(|tap| row(axis, tap, stretch, x, base, values, places));
    }
    let inner: usize = rest.iter().map(|axis| axis.outputs).product();
    let below: usize = rest.iter().map(|axis| axis.image).product();
    for output in 0..axis.outputs {
        let here = output * inner..(output + 1) * inner;
        for tap in 0..axis.taps {
            if let Some(at) = axis.at(output, tap) {
                rows(rest, stretch, x, base + at * below, &mut values[here.clone()], &mut places[here.clone()]);
            }
        }
    }
}

/// The outputs of a row that `tap` reaches.
fn row<E: Copy>(axis: &Axis, tap: usize, stretch: Primitive, x: &[E], base: usize, values: &mut [E], places: &mut [i32]) {
    let (reached, first) = axis.reached(tap);
    let (values, places) = (&mut values[reached.clone()], &mut places[reached]);
    let Some(last) = values.len().checked_sub(1) else { return };
    let x = &x[base + first..][..last * axis.stride + 1];
    let begin = [(base + first) as i64, axis.stride as i64];
    // SAFETY: `values` and `places` have as many elements, `x` reaches to the last of them.
    unsafe {
        let (to, places) = (values.as_mut_ptr().cast(), places.as_mut_ptr().cast_const().cast());
        stretch(to, x.as_ptr().cast(), places, begin.as_ptr().cast(), values.len());
    }
}

/// Takes x[i * stride] where it is better than value i, with its place, for places that begin at c[0] and are c[1] apart. `STRIDE` is
/// that stride, or 0.
struct Stretch<E, const STRIDE: usize>(PhantomData<E>);

impl<E: PartialOrd + Copy, const STRIDE: usize> Body for Stretch<E, STRIDE> {
    #[inline(always)]
    unsafe fn run(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) {
        // SAFETY: `row` passes these.
        unsafe {
            let [begin, stride] = *c.cast::<[i64; 2]>();
            let stride = if STRIDE > 0 { STRIDE } else { stride as usize };
            let (x, values, places) = (a.cast::<E>(), dst.cast::<E>(), b.cast_mut().cast::<i32>());
            let mut i = 0;
            while i < n {
                keep_loop();
                let (x, at) = (x.add(i * stride), begin as i32 + (i * stride) as i32);
                let (values, places) = (values.add(i), places.add(i));
                i += match n - i {
                    16.. => some::<E, 16>(x, at, stride, values.cast(), places.cast()),
                    8.. => some::<E, 8>(x, at, stride, values.cast(), places.cast()),
                    4.. => some::<E, 4>(x, at, stride, values.cast(), places.cast()),
                    _ => some::<E, 1>(x, at, stride, values.cast(), places.cast()),
                };
            }
        }
    }
}

/// The next `N` outputs; how many they are.
///
/// # Safety
/// `x` has `N` elements `stride` apart, `values` and `places` are exclusive.
#[inline(always)]
#[expect(clippy::eq_op, reason = "a NaN is not equal to itself")]
unsafe fn some<E: PartialOrd + Copy, const N: usize>(
    x: *const E,
    begin: i32,
    stride: usize,
    values: *mut [E; N],
    places: *mut [i32; N],
) -> usize {
    // SAFETY: the caller's.
    unsafe {
        let (mut best, mut where_) = (*values, *places);
        for i in 0..N {
            let (found, at) = (*x.add(i * stride), begin + (i * stride) as i32);
            let take = (found > best[i]) | (found != found) | (where_[i] < 0);
            best[i] = if take { found } else { best[i] };
            where_[i] = if take { at } else { where_[i] };
        }
        (*values, *places) = (best, where_);
    }
    N
}
