//! Convolutions of few channels each, depthwise ones above all: a product would have too few rows, so planes are swept.
//!
//! What windows move through is copied, a band of rows at a time, with zeros around and a plane for each phase of the stride. There the
//! elements that a tap meets lie side by side for all places of the result, and a plane of the result is one stretch, with places between
//! its rows that are nobody's. The gradient of an image is swept phase by phase: each meets taps of its own.
//!
//! The gradient of a kernel is summed band by band and sample by sample. (Places between rows count there as zeros: what is not finite in an
//! image may reach more taps than it meets.)

use super::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, WORKER_BYTES};
use crate::library::SharedPtr;
use crate::library::simd::Element;
use crate::library::sweep::{Dots, PARTS, Sweep};

/// Most pairs of an image's and an output's channel that share a kernel's plane: with more, products win.
const PAIRS: usize = 4;
/// Bytes of a band's copies: they stay in a core's own cache.
const BAND_BYTES: usize = 256 << 10;
/// What sweeps may read behind a copy's end.
const BEYOND: usize = PARTS;

/// Offsets in image, output and kernel.
type Offsets = [usize; 3];

pub(super) struct Direct<E> {
    form: Form,
    moved: usize,
    /// What is computed by itself, in digits of its number: planes of samples and groups; of a kernel's gradient, groups.
    tasks: Vec<(usize, Offsets)>,
    /// Samples that a kernel's gradient sums over.
    samples: Vec<Offsets>,
    /// Channels of image and output.
    channels: [Vec<Offsets>; 2],
    dims: Vec<Dim>,
    /// The planes of the copy.
    phases: Vec<Phase>,
    /// Elements of such a plane, and strides in it.
    plane: usize,
    pitches: Vec<usize>,
    passes: Vec<Pass>,
    /// Places of the first dim at a time, and how often.
    rows: usize,
    bands: usize,
    /// Elements of scratch that a task uses.
    scratch: usize,
    /// Elements that operands in their order, and the result, must have.
    reach: [usize; 3],
    flops: usize,
    sweep: Sweep<E>,
    dots: Dots<E>,
}

/// A dim of what windows move through. Place q of a phase that begins at `b` is element `step · q + b`.
struct Dim {
    size: usize,
    stride: usize,
    step: usize,
    /// Places in the copy.
    extent: usize,
}

/// A plane of the copy: where it begins along the first dim, and what there is of it along the others.
struct Phase {
    base: isize,
    spans: Vec<Span>,
}

/// Places whose elements there are, and the element of the first of them.
#[derive(Clone, Copy)]
struct Span {
    begin: usize,
    end: usize,
    element: usize,
}

impl Dim {
    fn span(&self, base: isize) -> Span {
        let below = |bound: isize| ((bound - base).max(0) as usize).div_ceil(self.step);
        let (begin, end) = (below(0), below(self.size as isize).min(self.extent));
        Span { begin, end: end.max(begin), element: (base + (begin * self.step) as isize).max(0) as usize }
    }
}

/// Places of the result that meet the same taps.
struct Pass {
    /// How many along each dim, and how far apart in the result (or the output, of a kernel's gradient), from where on.
    counts: Vec<usize>,
    strides: Vec<usize>,
    first: usize,
    /// From the first place of a row of the first dim to behind its last, in the copy.
    span: usize,
    /// Where each tap is in the kernel, and, for each channel that is summed, where the elements are that place 0 meets there.
    taps: Vec<usize>,
    offsets: Vec<usize>,
}

/// One dim of a pass.
struct View {
    count: usize,
    first: usize,
    step: usize,
    /// Tap, phase, place in it.
    taps: Vec<(usize, usize, usize)>,
}

impl<E: Element> Direct<E> {
    /// `None`: products do it better, or a row has no room.
    pub fn new(form: Form, plain: &[Plain], spatial: &[Spatial], isa: Isa) -> Option<Direct<E>> {
        let digits = |there: [bool; 3]| {
            let own = plain.iter().filter(|f| f.strides.map(|stride| stride.is_some()) == there);
            own.map(|f| (f.size, f.strides.map(|stride| stride.unwrap_or(0)))).collect::<Vec<_>>()
        };
        let (groups, batch) = (digits([true, true, true]), digits([true, true, false]));
        let channels = [digits([true, false, true]), digits([false, true, true])];
        let pairs = channels.iter().map(|digits| count(digits)).product::<usize>();
        let sizes = || spatial.iter().flat_map(|s| s.sizes);
        if spatial.is_empty() || !(1..=PAIRS).contains(&pairs) || sizes().any(|size| size == 0) {
            return None;
        }
        let all = |digits: &[(usize, Offsets)]| (0..count(digits)).map(|n| offsets(digits, n)).collect::<Vec<_>>();
        let channels = channels.map(|digits| all(&digits));
        let (tasks, samples) = match form.result {
            KERNEL => (groups, all(&batch)),
            _ => ([batch, groups].concat(), vec![[0; 3]]),
        };
        let moved = if form.result == IMAGE { OUTPUT } else { IMAGE };
        let swept = if form.result == KERNEL { OUTPUT } else { form.result };
        let (mut dims, bases, views) = along(moved, spatial);
        let reach = |v: &[View]| v.iter().flat_map(|v| v.taps.iter().map(|tap| tap.2)).max().unwrap_or(0);
        let reaches: Vec<usize> = views.iter().map(|views| reach(views)).collect();
        let most = |v: &[View]| v.iter().map(|v| v.count).max().unwrap_or(0);
        let counts: Vec<usize> = views.iter().map(|views| most(views)).collect();
        // As many rows as have room beside what a band needs anyway.
        let wide: usize = (1..dims.len()).map(|d| counts[d] + reaches[d]).product();
        let planes = bases.iter().map(Vec::len).product::<usize>() * channels[usize::from(moved == OUTPUT)].len();
        let of_kernel: usize = spatial.iter().map(|s| s.sizes[KERNEL]).product::<usize>() * pairs;
        let needs = |rows: usize| (rows + reaches[0]) * wide * planes + BEYOND + rows * wide + PARTS + 2 * of_kernel;
        let fits = |rows: usize, bytes: usize| needs(rows) * size_of::<E>() <= bytes;
        let rows = (1..=counts[0]).rev().find(|&rows| fits(rows, BAND_BYTES)).or((counts[0] > 0).then_some(1))?;
        if !fits(rows, WORKER_BYTES) {
            return None;
        }
        for (d, dim) in dims.iter_mut().enumerate() {
            dim.extent = reaches[d] + if d == 0 { rows } else { counts[d] };
        }
        let pitches: Vec<usize> = (0..dims.len()).map(|d| dims[d + 1..].iter().map(|dim| dim.extent).product()).collect();
        let plane = dims.iter().map(|dim| dim.extent).product();
        let kernels = E::kernels(isa);
        let mut direct = Direct {
            form,
            moved,
            tasks,
            samples,
            channels,
            phases: products(&bases).into_iter().map(|bases| phase(&bases, &dims)).collect(),
            plane,
            passes: Vec::new(),
            pitches,
            dims,
            rows,
            bands: counts[0].div_ceil(rows),
            scratch: needs(rows),
            reach: [0; 3],
            flops: 0,
            sweep: kernels.sweep,
            dots: kernels.dots,
        };
        // What a kernel's gradient sums are dots of its own.
        let summed = if form.result == KERNEL { 1 } else { direct.summed_and_made()[0].len() };
        direct.passes = direct.passes(&views, &bases, spatial, (swept, summed));
        direct.reach = [form.operands[0], form.operands[1], form.result].map(|tensor| reached(tensor, plain, spatial));
        let met = |pass: &Pass| pass.counts.iter().product::<usize>() * pass.taps.len();
        direct.flops = 2 * count(&direct.tasks) * direct.samples.len() * pairs * direct.passes.iter().map(met).sum::<usize>();
        Some(direct)
    }

    pub fn flops(&self) -> usize {
        self.flops
    }

    /// As `Convolution::run`.
    pub fn run(&self, pool: &Pool, accumulate: bool, a: &[E], b: &[E], result: &mut [E]) {
        let lengths = [a.len(), b.len(), result.len()];
        assert!(
            std::iter::zip(lengths, self.reach).all(|(has, needs)| has >= needs),
            "{lengths:?} elements for {:?}",
            self.reach
        );
        let mut tensors: [&[E]; 3] = [&[]; 3];
        (tensors[self.form.operands[0]], tensors[self.form.operands[1]]) = (a, b);
        let result = SharedPtr::new(result.as_mut_ptr());
        // Small planes go together, a function of shapes only.
        let tasks = count(&self.tasks);
        let together = ((1 << 15) / (self.flops / tasks.max(1)).max(1)).max(1);
        pool.run(tasks.div_ceil(together), self.flops / 32, &|worker, chunk| {
            let scratch = worker.scratch().cast::<E>();
            // SAFETY: a worker's own, whose size was compared; zeros are elements.
            let scratch = unsafe {
                scratch.write_bytes(0, self.scratch);
                std::slice::from_raw_parts_mut(scratch, self.scratch)
            };
            for task in (chunk * together..tasks.min((chunk + 1) * together)).map(|n| offsets(&self.tasks, n)) {
                match self.form.result {
                    KERNEL => self.kernel(task, tensors, result, accumulate, scratch),
                    _ => self.planes(task, tensors, result, accumulate, scratch),
                }
            }
        });
    }

    /// Channels that an element of the result is a sum over, and those that it may be of.
    fn summed_and_made(&self) -> [&[Offsets]; 2] {
        let [images, outputs] = &self.channels;
        if self.moved == IMAGE { [images, outputs] } else { [outputs, images] }
    }

    /// The planes of the result that a task has.
    fn planes(&self, task: Offsets, tensors: [&[E]; 3], result: SharedPtr<E>, accumulate: bool, scratch: &mut [E]) {
        let [summed, made] = self.summed_and_made();
        let (moved, each) = (self.moved, self.phases.len() * self.plane);
        let (copies, rest) = scratch.split_at_mut(summed.len() * each + BEYOND);
        let taps = self.passes.iter().map(|pass| pass.offsets.len()).max().unwrap_or(0);
        let (weights, swept) = rest.split_at_mut(taps);
        for first in (0..self.bands).map(|band| band * self.rows) {
            for (channel, copy) in summed.iter().zip(copies.chunks_exact_mut(each)) {
                self.copy(&tensors[moved][task[moved] + channel[moved]..], first, copy);
            }
            for (channel, pass) in made.iter().flat_map(|channel| self.passes.iter().map(move |pass| (channel, pass))) {
                let Some((count, length)) = self.stretch(pass, first) else { continue };
                for (summed, weights) in summed.iter().zip(weights.chunks_mut(pass.taps.len().max(1))) {
                    let kernel = &tensors[KERNEL][task[KERNEL] + channel[KERNEL] + summed[KERNEL]..];
                    std::iter::zip(weights, &pass.taps).for_each(|(weight, tap)| *weight = kernel[*tap]);
                }
                // SAFETY: what is swept is as long; the longest offset of the last place lies in the copies or in what is beyond.
                unsafe { (self.sweep)(swept.as_mut_ptr(), copies.as_ptr(), &pass.offsets, weights.as_ptr(), length) };
                let at = task[self.form.result] + channel[self.form.result] + pass.first + first * pass.strides[0];
                self.rows(pass, count, &mut |from, to, count, stride| {
                    // SAFETY: inside of the result, whose reach was compared; planes of tasks are disjoint, passes of a plane too.
                    unsafe {
                        let place = result.get().add(at + to);
                        match stride {
                            1 if !accumulate => std::ptr::copy_nonoverlapping(swept.as_ptr().add(from), place, count),
                            _ => (0..count).for_each(|i| put(place.add(i * stride), swept[from + i], accumulate)),
                        }
                    }
                });
            }
        }
    }

    /// The kernel's planes that a task has.
    fn kernel(&self, task: Offsets, tensors: [&[E]; 3], result: SharedPtr<E>, accumulate: bool, scratch: &mut [E]) {
        let [images, outputs] = &self.channels;
        let [pass] = &self.passes[..] else { unreachable!("a kernel's gradient has one") };
        let (each, taps) = (self.phases.len() * self.plane, pass.taps.len());
        let (copies, rest) = scratch.split_at_mut(images.len() * each + BEYOND);
        let (totals, rest) = rest.split_at_mut(images.len() * outputs.len() * taps);
        let (sums, with) = rest.split_at_mut(taps);
        totals.fill(E::ZERO);
        for (sample, band) in self.samples.iter().flat_map(|sample| (0..self.bands).map(move |band| (sample, band))) {
            let first = band * self.rows;
            let Some((count, length)) = self.stretch(pass, first) else { continue };
            for (channel, copy) in images.iter().zip(copies.chunks_exact_mut(each)) {
                self.copy(&tensors[IMAGE][task[IMAGE] + sample[IMAGE] + channel[IMAGE]..], first, copy);
            }
            if self.bands > 1 {
                with[..length].fill(E::ZERO);
            }
            for (output, totals) in outputs.iter().zip(totals.chunks_exact_mut(images.len() * taps)) {
                let from = &tensors[OUTPUT][task[OUTPUT] + sample[OUTPUT] + output[OUTPUT] + first * pass.strides[0]..];
                self.rows(pass, count, &mut |to, at, count, stride| match stride {
                    1 => with[to..to + count].copy_from_slice(&from[at..at + count]),
                    _ => (0..count).for_each(|i| with[to + i] = from[at + i * stride]),
                });
                for (n, totals) in totals.chunks_exact_mut(taps).enumerate() {
                    // SAFETY: both are as long; the longest offset of the last place lies in the copies or in what is beyond.
                    unsafe {
                        let copy = copies.as_ptr().add(n * each);
                        (self.dots)(sums.as_mut_ptr(), with.as_ptr(), copy, &pass.offsets, length);
                    }
                    std::iter::zip(totals, &*sums).for_each(|(total, sum)| *total = total.plus(*sum));
                }
            }
        }
        let pairs = outputs.iter().flat_map(|output| images.iter().map(move |image| output[KERNEL] + image[KERNEL]));
        for (pair, totals) in pairs.zip(totals.chunks_exact(taps)) {
            for (tap, total) in pass.taps.iter().zip(totals) {
                // SAFETY: inside of the result, whose reach was compared; no two tasks share a kernel's plane.
                unsafe { put(result.get().add(task[KERNEL] + pair + tap), *total, accumulate) };
            }
        }
    }

    /// What a pass has of the band that begins at `first`: rows of the first dim, and the stretch that all its places are in.
    fn stretch(&self, pass: &Pass, first: usize) -> Option<(usize, usize)> {
        let count = pass.counts[0].saturating_sub(first).min(self.rows);
        let last = count.checked_sub(1)? * self.pitches[0];
        Some((count, (last + pass.span).next_multiple_of(PARTS)))
    }

    /// Calls `row` with where each row of a pass's places begins in a stretch and in the tensor, how many they are and how far apart there.
    fn rows(&self, pass: &Pass, count: usize, row: &mut dyn FnMut(usize, usize, usize, usize)) {
        self.rows_from(pass, 0, count, (0, 0), row);
    }

    fn rows_from(
        &self,
        pass: &Pass,
        dim: usize,
        count: usize,
        (from, to): (usize, usize),
        row: &mut dyn FnMut(usize, usize, usize, usize),
    ) {
        let Some(&next) = pass.counts.get(dim + 1) else { return row(from, to, count, pass.strides[dim]) };
        for i in 0..count {
            self.rows_from(pass, dim + 1, next, (from + i * self.pitches[dim], to + i * pass.strides[dim]), row);
        }
    }

    /// Copies what the band that begins at `first` meets of a plane, which lies in `from`.
    fn copy(&self, from: &[E], first: usize, to: &mut [E]) {
        // What is around stays zero, unless it is elsewhere in each band.
        if self.bands > 1 {
            to.fill(E::ZERO);
        }
        for (phase, to) in self.phases.iter().zip(to.chunks_exact_mut(self.plane)) {
            let outer = self.dims[0].span(phase.base + (first * self.dims[0].step) as isize);
            self.copy_dim(0, outer, &phase.spans, from, to);
        }
    }

    fn copy_dim(&self, d: usize, Span { begin, end, element }: Span, inner: &[Span], from: &[E], to: &mut [E]) {
        let Dim { stride, step, .. } = self.dims[d];
        if begin == end {
            return;
        }
        if let Some((&next, rest)) = inner.split_first() {
            for i in 0..end - begin {
                let (from, to) = (&from[(element + i * step) * stride..], &mut to[(begin + i) * self.pitches[d]..]);
                self.copy_dim(d + 1, next, rest, from, to);
            }
            return;
        }
        let (from, to) = (&from[element * stride..], &mut to[begin..end]);
        match step * stride {
            1 => to.copy_from_slice(&from[..to.len()]),
            2 => {
                // The last one need not have a neighbour.
                let (pairs, last) = (from.as_chunks::<2>().0, to.len() - 1);
                std::iter::zip(&mut to[..last], &pairs[..last]).for_each(|(to, [x, _])| *to = *x);
                to[last] = from[2 * last];
            }
            apart => std::iter::zip(to, from.iter().step_by(apart)).for_each(|(to, from)| *to = *from),
        }
    }

    /// All passes: one of each view of each dim.
    fn passes(
        &self,
        views: &[Vec<View>],
        bases: &[Vec<isize>],
        spatial: &[Spatial],
        (swept, summed): (usize, usize),
    ) -> Vec<Pass> {
        let numbers: Vec<Vec<usize>> = views.iter().map(|views| (0..views.len()).collect()).collect();
        let pass = |chosen: Vec<usize>| {
            let views: Vec<&View> = std::iter::zip(views, chosen).map(|(views, n)| &views[n]).collect();
            let along = |d: usize| (views[d], spatial[d].strides[swept]);
            let mut taps = vec![(0, 0, 0)];
            for (d, view) in views.iter().enumerate() {
                let (stride, phases, pitch) = (spatial[d].strides[KERNEL], bases[d].len(), self.pitches[d]);
                let next = |at: (usize, usize, usize), tap: (usize, usize, usize)| {
                    (at.0 + tap.0 * stride, at.1 * phases + tap.1, at.2 + tap.2 * pitch)
                };
                taps = taps.into_iter().flat_map(|at| view.taps.iter().map(move |tap| next(at, *tap))).collect();
            }
            let each = self.phases.len() * self.plane;
            let offset = |channel: usize, (_, phase, at): &(usize, usize, usize)| channel * each + phase * self.plane + at;
            Pass {
                counts: views.iter().map(|view| view.count).collect(),
                strides: (0..views.len()).map(along).map(|(view, stride)| view.step * stride).collect(),
                first: (0..views.len()).map(along).map(|(view, stride)| view.first * stride).sum(),
                span: 1 + views.iter().zip(&self.pitches).skip(1).map(|(view, pitch)| (view.count - 1) * pitch).sum::<usize>(),
                offsets: (0..summed).flat_map(|channel| taps.iter().map(move |tap| offset(channel, tap))).collect(),
                taps: taps.iter().map(|tap| tap.0).collect(),
            }
        };
        products(&numbers).into_iter().map(pass).collect()
    }
}

/// # Safety
/// The place is readable and writable.
#[inline(always)]
unsafe fn put<E: Element>(place: *mut E, value: E, accumulate: bool) {
    // SAFETY: the caller's.
    unsafe { *place = if accumulate { (*place).plus(value) } else { value } }
}

fn phase(bases: &[isize], dims: &[Dim]) -> Phase {
    Phase { base: bases[0], spans: std::iter::zip(&dims[1..], &bases[1..]).map(|(dim, base)| dim.span(*base)).collect() }
}

/// What is copied along each dim, but for its extent; where each phase of it begins; and what the result has along it.
fn along(moved: usize, spatial: &[Spatial]) -> (Vec<Dim>, Vec<Vec<isize>>, Vec<Vec<View>>) {
    let of = |s: &Spatial| if moved == IMAGE { of_image(s) } else { of_output(s) };
    let (mut dims, mut bases, mut views) = (Vec::new(), Vec::new(), Vec::new());
    for s in spatial {
        let (phases, own) = of(s);
        dims.push(Dim {
            size: s.sizes[moved],
            stride: s.strides[moved],
            step: if moved == IMAGE { s.stride } else { 1 },
            extent: 0,
        });
        bases.push(phases);
        views.push(own);
    }
    (dims, bases, views)
}

/// Phases of an image, and its outputs: image = stride · (output + (dilation · tap) / stride) + phase − pad.
fn of_image(s: &Spatial) -> (Vec<isize>, Vec<View>) {
    let mut phases: Vec<usize> = (0..s.sizes[KERNEL]).map(|tap| s.dilation * tap % s.stride).collect();
    phases.sort_unstable();
    phases.dedup();
    let place = |tap: usize| {
        let phase = phases.binary_search(&(s.dilation * tap % s.stride)).expect("it is one of them");
        (tap, phase, s.dilation * tap / s.stride)
    };
    let view = View { count: s.sizes[OUTPUT], first: 0, step: 1, taps: (0..s.sizes[KERNEL]).map(place).collect() };
    (phases.iter().map(|&phase| phase as isize - s.pad).collect(), vec![view])
}

/// Outputs, and the phases of an image: output = (phase + pad − dilation · tap) / stride + j where image = phase + stride · j.
fn of_output(s: &Spatial) -> (Vec<isize>, Vec<View>) {
    let stride = s.stride as isize;
    let met = |phase: usize| {
        let ahead = move |tap: usize| phase as isize + s.pad - (s.dilation * tap) as isize;
        (0..s.sizes[KERNEL]).filter(move |&tap| ahead(tap) % stride == 0).map(move |tap| (tap, ahead(tap) / stride))
    };
    let phases = || 0..s.stride.min(s.sizes[IMAGE]);
    let least = phases().flat_map(met).map(|(_, output)| output).min().unwrap_or(0);
    let view = |phase: usize| View {
        count: (s.sizes[IMAGE] - phase).div_ceil(s.stride),
        first: phase,
        step: s.stride,
        taps: met(phase).map(|(tap, output)| (tap, 0, (output - least) as usize)).collect(),
    };
    (vec![least], phases().map(view).collect())
}

fn count(digits: &[(usize, Offsets)]) -> usize {
    digits.iter().map(|(size, _)| size).product()
}

/// Of number `n`, the last digit changing fastest.
fn offsets(digits: &[(usize, Offsets)], mut n: usize) -> Offsets {
    let mut at = [0; 3];
    for (size, strides) in digits.iter().rev() {
        std::iter::zip(&mut at, strides).for_each(|(at, stride)| *at += n % size * stride);
        n /= size;
    }
    at
}

/// One of each, in all ways, the last changing fastest.
fn products<T: Copy>(choices: &[Vec<T>]) -> Vec<Vec<T>> {
    choices.iter().fold(vec![Vec::new()], |all, own| {
        let with = |chosen: &Vec<T>, next: T| chosen.iter().copied().chain([next]).collect();
        all.iter().flat_map(|chosen| own.iter().map(move |next| with(chosen, *next))).collect()
    })
}

/// Elements that a tensor must have.
fn reached(tensor: usize, plain: &[Plain], spatial: &[Spatial]) -> usize {
    let own = plain.iter().filter_map(|f| Some((f.size, f.strides[tensor]?)));
    let dims = || own.clone().chain(spatial.iter().map(|s| (s.sizes[tensor], s.strides[tensor])));
    if dims().any(|(size, _)| size == 0) { 0 } else { 1 + dims().map(|(size, stride)| (size - 1) * stride).sum::<usize>() }
}
