//! Copies of a kernel in the order of the products that read or write it: [outer factors][taps, view by view][inner factors].
//!
//! What is summed lies together where the kernel is read; where it is the result, what makes vectors does.

use super::{KERNEL, Plain, Spatial};
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};
use crate::library::SharedPtr;
use crate::library::microkernel::Kernels;
use crate::library::pack::Source;
use crate::library::simd::Element;

/// Inner elements that are turned over together when a result is added to.
const TOGETHER: usize = 256;

/// Where the copy of a kernel has what.
pub(super) struct Copy<E> {
    kernels: Kernels<E>,
    pub elements: usize,
    /// Element strides of the plain factors.
    pub plain: Vec<Option<usize>>,
    pub views: Vec<Taps>,
    /// Offsets in the kernel and in the copy of what one set of taps and one inner factor belong to.
    places: Vec<[usize; 2]>,
    /// The innermost factor: its size and its stride in the kernel.
    inner: [usize; 2],
    /// Offset in the kernel and in the copy of each tap.
    taps: Vec<[usize; 2]>,
    /// Taps are neighbours in the kernel, in that order.
    dense: bool,
    /// Where the taps lie in the copy, from the first; where inner elements lie in the kernel, and where in scratch.
    offsets: [Vec<usize>; 3],
}

/// The taps of a view: the first, and the strides along the dims.
pub(super) struct Taps {
    pub start: usize,
    pub strides: Vec<usize>,
}

/// Taps along one dim: the first, how many, and how many are skipped from one to the next (negative: backwards).
pub(super) type Along = (usize, usize, isize);

impl<E: Element> Copy<E> {
    /// `depth` tells which of the kernel's plain factors lie outside (0) and inside of its taps, ever deeper; `views` which taps each
    /// has along each dim.
    pub fn new(
        plain: &[Plain],
        spatial: &[Spatial],
        views: &[Vec<Along>],
        (depth, kernels): (impl Fn(&Plain) -> u8, Kernels<E>),
    ) -> Copy<E> {
        let mut order: Vec<usize> = (0..plain.len()).filter(|&f| plain[f].strides[KERNEL].is_some()).collect();
        order.sort_by_key(|&f| (depth(&plain[f]), std::cmp::Reverse(plain[f].strides[KERNEL])));
        let (outside, inside) = order.split_at(order.partition_point(|&f| depth(&plain[f]) == 0));
        let mut strides = vec![None; plain.len()];
        let mut dense = 1;
        let mut take = |f: usize, strides: &mut Vec<Option<usize>>| {
            strides[f] = Some(dense);
            dense *= plain[f].size;
            dense
        };
        let tap_stride = inside.iter().rev().map(|&f| take(f, &mut strides)).last().unwrap_or(1);
        let all = taps_of(spatial);
        let (views, mut taps) = number(spatial, views, tap_stride, &all);
        dense = tap_stride * all.len();
        let mut take = |f: usize| {
            strides[f] = Some(dense);
            dense *= plain[f].size;
        };
        outside.iter().rev().for_each(|&f| take(f));
        let innermost = inside.last().copied();
        let mut places = vec![[0; 2]];
        for &f in order.iter().filter(|&&f| Some(f) != innermost) {
            let (from, to) = (plain[f].strides[KERNEL].unwrap_or(0), strides[f].unwrap_or(0));
            places = places.iter().flat_map(|at| (0..plain[f].size).map(move |i| [at[0] + i * from, at[1] + i * to])).collect();
        }
        taps.sort_unstable();
        let inner = innermost.map_or([1, 0], |f| [plain[f].size, plain[f].strides[KERNEL].unwrap_or(0)]);
        let together = TOGETHER.min(WORKER_BYTES / (taps.len().max(1) * size_of::<E>()));
        let spaced = |apart: usize| (0..together).map(|i| i * apart).collect();
        Copy {
            offsets: [taps.iter().map(|tap| tap[1]).collect(), spaced(inner[1]), spaced(taps.len())],
            kernels,
            elements: dense,
            plain: strides,
            views,
            places,
            inner,
            dense: taps.iter().enumerate().all(|(i, tap)| tap[0] == i),
            taps,
        }
    }

    /// Copies the kernel.
    ///
    /// # Panics
    /// If either is too short.
    pub fn read(&self, pool: &Pool, kernel: &[E], copy: &mut [E]) {
        if self.elements == 0 {
            return;
        }
        self.check(kernel.len(), copy.len());
        let target = SharedPtr::new(copy.as_mut_ptr());
        self.for_each_place(pool, &|_, from, to| {
            let at = |from: usize, to: usize, offsets: &[usize]| {
                let source = Source { from: kernel[from..].as_ptr(), stride: self.inner[1] as isize, step: 1 };
                // SAFETY: `check` compared the lengths with the largest offsets; places are disjoint.
                unsafe { (self.kernels.spread)(source, target.get().add(to), offsets, self.inner[0]) };
            };
            match self.dense {
                true => at(from, to, &self.offsets[0]),
                false => self.taps.iter().for_each(|tap| at(from + tap[0], to + tap[1], &[0])),
            }
        });
    }

    /// kernel = copy, or kernel += copy.
    ///
    /// # Panics
    /// If either is too short.
    pub fn write(&self, pool: &Pool, accumulate: bool, copy: &[E], kernel: &mut [E]) {
        if self.elements == 0 {
            return;
        }
        self.check(kernel.len(), copy.len());
        let (taps, [inner, stride]) = (self.taps.len(), self.inner);
        // Natural order: one view has all taps, the inner factor apart.
        let apart = self.taps.get(1).map_or(inner, |tap| tap[1] - self.taps[0][1]);
        let even = self.dense && self.taps.iter().enumerate().all(|(i, tap)| tap[1] == i * apart);
        let target = SharedPtr::new(kernel.as_mut_ptr());
        let [_, in_place, offsets] = &self.offsets;
        let together = offsets.len();
        self.for_each_place(pool, &|worker, to, from| {
            // SAFETY: `check` compared the lengths with the largest offsets; places are disjoint.
            let put = |i: usize, tap: usize, sum: E| unsafe {
                let at = target.get().add(to + i * stride + tap);
                *at = if accumulate { (*at).plus(sum) } else { sum };
            };
            if !even || together == 0 {
                self.taps.iter().for_each(|tap| (0..inner).for_each(|i| put(i, tap[0], copy[from + tap[1] + i])));
                return;
            }
            for first in (0..inner).step_by(together) {
                let count = together.min(inner - first);
                let source = Source { from: copy[from + first..].as_ptr(), stride: apart as isize, step: 1 };
                if !accumulate {
                    // SAFETY: as above.
                    unsafe { (self.kernels.spread)(source, target.get().add(to + first * stride), &in_place[..count], taps) };
                    continue;
                }
                // SAFETY: as above; the scratch holds the taps of `together` elements.
                let turned = unsafe {
                    let scratch = worker.scratch().cast::<E>();
                    (self.kernels.spread)(source, scratch, &offsets[..count], taps);
                    std::slice::from_raw_parts(scratch, count * taps)
                };
                for (i, sums) in turned.chunks_exact(taps).enumerate() {
                    sums.iter().enumerate().for_each(|(tap, sum)| put(first + i, tap, *sum));
                }
            }
        });
    }

    /// Runs `body(worker, place in the kernel, place in the copy)` for all places.
    fn for_each_place(&self, pool: &Pool, body: &(dyn Fn(&mut Worker, usize, usize) + Sync)) {
        let elements = self.taps.len() * self.inner[0];
        let together = (1 << 13) / elements.max(1) + 1;
        pool.run(self.places.len().div_ceil(together), self.elements, &|worker: &mut Worker, chunk| {
            for [kernel, copy] in &self.places[chunk * together..self.places.len().min((chunk + 1) * together)] {
                body(worker, *kernel, *copy);
            }
        });
    }

    fn check(&self, kernel: usize, copy: usize) {
        let reach = |index: usize| {
            let most = |all: &[[usize; 2]]| all.iter().map(|at| at[index]).max().unwrap_or(0);
            let inner = (self.inner[0] - 1) * if index == 0 { self.inner[1] } else { 1 };
            most(&self.places) + most(&self.taps) + inner
        };
        assert!(reach(0) < kernel && reach(1) < copy, "a kernel of {kernel} elements and a copy of {copy}");
    }
}

/// Offsets of all taps in the kernel, the last dim first to move.
fn taps_of(spatial: &[Spatial]) -> Vec<usize> {
    let mut all = vec![0];
    for s in spatial {
        all = all.iter().flat_map(|at| (0..s.sizes[KERNEL]).map(move |i| at + i * s.strides[KERNEL])).collect();
    }
    all
}

/// Numbers the taps view by view, those of no view last; offsets in the kernel and in the copy.
fn number(spatial: &[Spatial], views: &[Vec<Along>], apart: usize, all: &[usize]) -> (Vec<Taps>, Vec<[usize; 2]>) {
    let mut order: Vec<usize> = Vec::with_capacity(all.len());
    let mut taps = Vec::new();
    for view in views {
        let mut strides = vec![apart; spatial.len()];
        for d in (0..spatial.len().saturating_sub(1)).rev() {
            strides[d] = strides[d + 1] * view[d + 1].1;
        }
        taps.push(Taps { start: order.len() * apart, strides });
        let mut found = vec![0isize];
        for (s, &(first, count, step)) in spatial.iter().zip(view) {
            let offset = move |i: usize| (first as isize + i as isize * step) * s.strides[KERNEL] as isize;
            found = found.iter().flat_map(|at| (0..count).map(move |i| at + offset(i))).collect();
        }
        order.extend(found.iter().map(|&at| usize::try_from(at).expect("a tap of the kernel")));
    }
    let rest: Vec<usize> = all.iter().copied().filter(|at| !order.contains(at)).collect();
    order.extend(rest);
    (taps, order.into_iter().enumerate().map(|(i, at)| [at, i * apart]).collect())
}
