//! The greatest element of each window and where it is.
//!
//! Rows of outputs at a time: for each tap one pass over the outputs that it reaches, so that the compiler makes vectors of them.

use super::SharedPtr;
use crate::cpu::pool::Pool;

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
        let at_least = |bound: isize| (bound - ahead).max(0) as usize;
        let first = at_least(0).div_ceil(self.stride).min(self.outputs);
        let end = at_least(self.image as isize).div_ceil(self.stride).clamp(first, self.outputs);
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
        let size: usize = self.axes.iter().map(|axis| axis.outputs).product();
        let reach = self.planes.iter().map(|plane| plane[1] + size).max().unwrap_or(0);
        assert!(values.len() >= reach && places.len() >= reach, "{} outputs for {reach}", values.len());
        let (values, places) = (SharedPtr::new(values.as_mut_ptr()), SharedPtr::new(places.as_mut_ptr()));
        let taps: usize = self.axes.iter().map(|axis| axis.taps).product();
        let together = ((1 << 14) / (size * taps).max(1)).max(1);
        pool.run(self.planes.len().div_ceil(together), self.planes.len() * size * taps / 2, &|_, chunk| {
            for plane in &self.planes[chunk * together..self.planes.len().min((chunk + 1) * together)] {
                // SAFETY: planes of the output are disjoint, and the longest reach was compared with the lengths.
                let (values, places) = unsafe {
                    let values = std::slice::from_raw_parts_mut(values.get().add(plane[1]), size);
                    (values, std::slice::from_raw_parts_mut(places.get().add(plane[1]), size))
                };
                values.fill(lowest);
                places.fill(-1);
                rows(&self.axes, &x[plane[0]..], 0, values, places);
            }
        });
    }
}

/// All outputs below some outer indices; the image begins at `base` of the plane.
fn rows<E: PartialOrd + Copy>(axes: &[Axis], x: &[E], base: usize, values: &mut [E], places: &mut [i32]) {
    let (axis, rest) = axes.split_first().expect("a pool has a dim");
    if rest.is_empty() {
        return (0..axis.taps).for_each(|tap| row(axis, tap, x, base, values, places));
    }
    let inner: usize = rest.iter().map(|axis| axis.outputs).product();
    let below: usize = rest.iter().map(|axis| axis.image).product();
    for output in 0..axis.outputs {
        let here = output * inner..(output + 1) * inner;
        for tap in 0..axis.taps {
            if let Some(at) = axis.at(output, tap) {
                rows(rest, x, base + at * below, &mut values[here.clone()], &mut places[here.clone()]);
            }
        }
    }
}

fn row<E: PartialOrd + Copy>(axis: &Axis, tap: usize, x: &[E], base: usize, values: &mut [E], places: &mut [i32]) {
    let (reached, first) = axis.reached(tap);
    let (values, places, begin) = (&mut values[reached.clone()], &mut places[reached], base + first);
    // Strides known when this is compiled: vectors.
    match axis.stride {
        1 => stretch::<E, 1>(&x[begin.min(x.len())..], begin, 1, values, places),
        2 => stretch::<E, 2>(&x[begin.min(x.len())..], begin, 2, values, places),
        stride => stretch::<E, 0>(&x[begin.min(x.len())..], begin, stride, values, places),
    }
}

/// Takes x[i * stride] where it is better than value i; x begins at place `begin`. `STRIDE` is the stride, or 0.
#[inline(always)]
#[expect(clippy::eq_op, reason = "a NaN is not equal to itself")]
fn stretch<E: PartialOrd + Copy, const STRIDE: usize>(
    x: &[E],
    begin: usize,
    stride: usize,
    values: &mut [E],
    places: &mut [i32],
) {
    let stride = if STRIDE > 0 { STRIDE } else { stride };
    let count = values.len().min(places.len());
    if count == 0 {
        return;
    }
    let x = &x[..(count - 1) * stride + 1];
    for i in 0..count {
        let (found, at) = (x[i * stride], (begin + i * stride) as i32);
        let take = (found > values[i]) | (found != found) | (places[i] < 0);
        values[i] = if take { found } else { values[i] };
        places[i] = if take { at } else { places[i] };
    }
}
