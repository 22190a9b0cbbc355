//! Copies of images and outputs in which samples are innermost: columns of every product are then vectors, whatever the window does.
//!
//! Windows move through whole vectors of samples, so that strides, dilations and borders cost nothing, and a region is a product like
//! any other. A transposition at each end is what it takes.

use super::view::Layout;
use super::{IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};
use crate::library::SharedPtr;
use crate::library::microkernel::Kernels;
use crate::library::pack::{Size, Source};
use crate::library::simd::Element;

/// Fewest samples that are worth it, and what a chunk of them is a multiple of.
const FEWEST: usize = 16;
/// Elements of a row of a plane that are enough for vectors of their own.
const LONG: usize = 32;
/// Fewest multiply-adds for an element that is turned over.
const WORTH: usize = 100;
/// Elements of either copy at most.
const MOST: usize = 1 << 20;
/// Most samples at once.
const CHUNK: usize = 512;
/// Fewest rows of the products, and of what is summed.
const ROWS: usize = 8;
/// Elements of a sample that are turned over at once, and of all samples in a task.
const RUN: usize = 256;
const TASK: usize = 1 << 13;

/// The copies of the tensor that windows move through and of the result, for as many samples as a chunk has.
pub(super) struct Samples<E> {
    pub moved: Turned<E>,
    pub result: Turned<E>,
    tensors: [usize; 2],
}

/// The factor of samples, if they should lie side by side, and how many at a time.
pub(super) fn find(plain: &[Plain], spatial: &[Spatial], result: usize, moved: usize) -> Option<(usize, usize)> {
    if result == KERNEL || spatial.is_empty() {
        return None;
    }
    let (mut found, mut rows, mut summed) = (None, 1, spatial.iter().map(|s| s.sizes[KERNEL]).product::<usize>());
    for (f, plain) in plain.iter().enumerate() {
        match (plain.strides[moved], plain.strides[result], plain.strides[KERNEL]) {
            (Some(_), Some(_), None) if found.is_none() => found = Some(f),
            (Some(_), Some(_), None) => return None,
            (None, Some(_), _) => rows *= plain.size,
            (Some(_), None, _) => summed *= plain.size,
            _ => {}
        }
    }
    let f = found.filter(|_| rows >= ROWS && summed >= ROWS)?;
    let elements = |tensor: usize| {
        let others = plain.iter().enumerate().filter(|(g, plain)| *g != f && plain.strides[tensor].is_some());
        others.map(|(_, plain)| plain.size).chain(spatial.iter().map(|s| s.sizes[tensor])).product::<usize>()
    };
    // What is turned over must lie side by side, but for the samples.
    let dense = |tensor: usize| spatial.iter().any(|s| s.strides[tensor] == 1) && plain[f].strides[tensor] != Some(1);
    // Rows of a plane that are long vectors themselves are packed as fast as samples would be.
    let inner = spatial.iter().find(|s| s.strides[result] == 1)?;
    let (width, stride) =
        if result == OUTPUT { (inner.sizes[OUTPUT], inner.stride) } else { (inner.sizes[IMAGE] / inner.stride, 1) };
    let work = plain.iter().map(|f| f.size).product::<usize>()
        * spatial.iter().map(|s| s.sizes[OUTPUT] * s.sizes[KERNEL]).product::<usize>();
    if stride == 1 && width >= LONG || work < plain[f].size * (elements(moved) + elements(result)) * WORTH {
        return None;
    }
    let most = MOST / elements(moved).max(elements(result)).max(1) / FEWEST * FEWEST;
    (dense(moved) && dense(result) && plain[f].size >= FEWEST && most >= FEWEST)
        .then(|| (f, most.min(plain[f].size).min(CHUNK)))
}

impl<E: Element> Samples<E> {
    /// `tensors`: the moved one and the result.
    pub fn new(plain: &[Plain], spatial: &[Spatial], tensors: [usize; 2], samples: usize, kernels: Kernels<E>) -> Samples<E> {
        let turned = |tensor: usize, order: Order| Turned::new(plain, spatial, (tensor, order), samples, kernels);
        // What is summed lies together; the result's rows do as in the tensor.
        Samples { moved: turned(tensors[0], Order::PlainInside), result: turned(tensors[1], Order::SpatialInside), tensors }
    }

    pub fn elements(&self) -> usize {
        self.moved.elements + self.result.elements
    }

    pub fn lay_out(&self, layout: &mut Layout) {
        for (tensor, turned) in self.tensors.into_iter().zip([&self.moved, &self.result]) {
            for (plain, stride) in layout.plain.iter_mut().zip(&turned.plain) {
                plain.strides[tensor] = *stride;
            }
            for (strides, stride) in layout.spatial.iter_mut().zip(&turned.spatial) {
                strides[tensor] = *stride;
            }
        }
    }
}

/// What lies inside of what in a copy, beside the samples.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    PlainInside,
    SpatialInside,
}

/// A tensor and its copy.
pub(super) struct Turned<E> {
    kernels: Kernels<E>,
    pub elements: usize,
    /// Element strides in the copy.
    plain: Vec<Option<usize>>,
    spatial: Vec<usize>,
    /// Offsets of the samples in the tensor.
    samples: Vec<usize>,
    sample_stride: usize,
    /// Elements of a sample that follow one another: offsets in the tensor and in the copy, and how many.
    runs: Vec<[usize; 3]>,
    /// From one of them to the next in the copy.
    apart: usize,
    /// Elements that the tensor and the copy reach.
    extent: usize,
    /// Offsets of samples in scratch.
    scratch: Vec<usize>,
}

impl<E: Element> Turned<E> {
    fn new(
        plain: &[Plain],
        spatial: &[Spatial],
        (tensor, order): (usize, Order),
        samples: usize,
        kernels: Kernels<E>,
    ) -> Turned<E> {
        // Size, stride in the tensor, which; outermost first as in the tensor.
        let mut dims: Vec<(usize, usize, Result<usize, usize>)> = Vec::new();
        for (f, plain) in plain.iter().enumerate().filter(|(f, _)| *f != samples) {
            dims.extend(plain.strides[tensor].map(|stride| (plain.size, stride, Ok(f))));
        }
        dims.extend(spatial.iter().enumerate().map(|(d, s)| (s.sizes[tensor], s.strides[tensor], Err(d))));
        dims.sort_by_key(|(_, stride, which)| (std::cmp::Reverse(*stride), which.is_err()));
        let count = plain[samples].size;
        let mut strides = (vec![None; plain.len()], vec![0; spatial.len()]);
        strides.0[samples] = Some(1);
        let mut elements = count;
        let inside = |which: &Result<usize, usize>| which.is_ok() == (order == Order::PlainInside);
        for is_inside in [true, false] {
            for (size, _, which) in dims.iter().rev().filter(|dim| inside(&dim.2) == is_inside) {
                match which {
                    Ok(f) => strides.0[*f] = Some(elements),
                    Err(d) => strides.1[*d] = elements,
                }
                elements *= size;
            }
        }
        let there = |which: &Result<usize, usize>| match which {
            Ok(f) => strides.0[*f].unwrap_or(0),
            Err(d) => strides.1[*d],
        };
        let sample_stride = plain[samples].strides[tensor].unwrap_or(0);
        let extent = dims.iter().map(|(size, stride, _)| (size - 1) * stride).sum::<usize>() + (count - 1) * sample_stride + 1;
        // The run: dims that follow one another in both.
        let (mut run, mut apart) = (1, 0);
        while let Some((size, stride, which)) =
            dims.last().filter(|dim| run == 1 || (dim.1 == run && there(&dim.2) == run * apart))
        {
            if run == 1 && *size > 1 && *stride != 1 {
                break;
            }
            if run == 1 {
                apart = there(which);
            }
            run *= size;
            dims.pop();
        }
        let mut starts = vec![[0; 2]];
        for (size, stride, which) in &dims {
            let to = there(which);
            starts = starts.iter().flat_map(|at| (0..*size).map(move |i| [at[0] + i * stride, at[1] + i * to])).collect();
        }
        let cut = |[from, to]: [usize; 2]| {
            (0..run).step_by(RUN).map(move |first| [from + first, to + first * apart, RUN.min(run - first)])
        };
        let rows = (WORKER_BYTES / size_of::<E>() / count).min(RUN).min(run);
        Turned {
            kernels,
            elements,
            samples: (0..count).map(|i| i * sample_stride).collect(),
            sample_stride,
            runs: starts.into_iter().flat_map(cut).collect(),
            apart,
            extent,
            scratch: (0..count).map(|i| i * rows).collect(),
            plain: strides.0,
            spatial: strides.1,
        }
    }

    /// Runs `body(worker, [offset in the tensor, in the copy, elements])` for all runs.
    fn for_each(&self, pool: &Pool, body: &(dyn Fn(&mut Worker, [usize; 3]) + Sync)) {
        let longest = self.runs.first().map_or(1, |run| run[2]) * self.samples.len();
        let together = TASK / longest + 1;
        pool.run(self.runs.len().div_ceil(together), self.elements / 2, &|worker: &mut Worker, chunk| {
            for run in &self.runs[chunk * together..self.runs.len().min((chunk + 1) * together)] {
                body(worker, *run);
            }
        });
    }

    /// Copies the tensor.
    ///
    /// # Panics
    /// If either is too short.
    pub fn read(&self, pool: &Pool, tensor: &[E], copy: &mut [E]) {
        assert!(self.extent <= tensor.len() && self.elements <= copy.len(), "a tensor and its copy");
        let (target, width) = (SharedPtr::new(copy.as_mut_ptr()), self.samples.len());
        self.for_each(pool, &|_, [from, to, steps]| {
            let source = Source { from: tensor[from..].as_ptr(), stride: self.sample_stride as isize, step: 1 };
            // SAFETY: the lengths were compared with what all runs reach; runs are disjoint.
            unsafe { (self.kernels.pack)(source, target.get().add(to), Size { rows: width, width, apart: self.apart, steps }) };
        });
    }

    /// tensor = copy, or tensor += copy.
    ///
    /// # Panics
    /// If either is too short.
    pub fn write(&self, pool: &Pool, accumulate: bool, copy: &[E], tensor: &mut [E]) {
        assert!(self.extent <= tensor.len() && self.elements <= copy.len(), "a tensor and its copy");
        let target = SharedPtr::new(tensor.as_mut_ptr());
        self.for_each(pool, &|worker, [to, from, rows]| {
            let source =
                |i: usize| Source { from: copy[from + i * self.apart..].as_ptr(), stride: self.apart as isize, step: 1 };
            if !accumulate {
                // SAFETY: the lengths were compared with what all runs reach; runs are disjoint.
                return unsafe { (self.kernels.spread)(source(0), target.get().add(to), &self.samples, rows) };
            }
            let together = self.scratch.get(1).map_or(1, |rows| (*rows).max(1));
            for first in (0..rows).step_by(together) {
                let count = together.min(rows - first);
                // SAFETY: as above; the scratch holds `together` elements of each sample.
                unsafe {
                    let scratch = worker.scratch().cast::<E>();
                    (self.kernels.spread)(source(first), scratch, &self.scratch, count);
                    for (from, at) in self.scratch.iter().zip(&self.samples) {
                        let at = target.get().add(to + first + at);
                        (0..count).for_each(|i| *at.add(i) = (*at.add(i)).plus(*scratch.add(from + i)));
                    }
                }
            }
        });
    }
}
