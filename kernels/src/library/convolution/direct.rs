//! Convolutions of few channels each, depthwise ones above all: a product would have too few rows, so planes are swept.
//!
//! What windows move through is copied, a band of rows at a time, with zeros around and a plane for each phase of the stride. There the
//! elements that a tap meets lie side by side for all places of the result, and a plane of the result is one stretch, with places between
//! its rows that are nobody's. The gradient of an image is swept phase by phase: each meets taps of its own.
//!
//! The gradient of a kernel is summed band by band and sample by sample. (Places between rows count there as zeros: what is not finite in an
//! image may reach more taps than it meets.)

use super::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial, reached};
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, WORKER_BYTES};
use crate::library::SharedPtr;
use crate::library::simd::Element;
use crate::library::sweep::{self, PARTS, Planes, Rows};
use smallvec::SmallVec;

/// Most pairs of an image's and an output's channel that share a kernel's plane: with more, products win.
const PAIRS: usize = 4;
/// Bytes of a band's copies: they stay in a core's own cache.
const BAND_BYTES: usize = 256 << 10;
/// Of planes that go together, copies and what is swept: they stay in the first-level cache.
const TOGETHER_BYTES: usize = 16 << 10;
const MOST_TOGETHER: usize = 16;
/// Multiplications and additions of a chunk: at least, and where there are `CHUNKS` of them.
const SMALL: usize = 1 << 15;
const LARGE: usize = 1 << 19;
const CHUNKS: usize = 64;
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
    /// Elements of a channel's copy: a plane for each phase of the stride.
    each: usize,
    passes: Vec<Pass>,
    bands: Vec<Band>,
    /// Planes that are copied, then swept, then written, so that none of it waits for what was written just before; elements of such a plane's
    /// copies, and of what is swept.
    together: usize,
    copied: usize,
    stretched: usize,
    /// Elements of scratch that a chunk uses.
    scratch: usize,
    /// Elements that operands in their order, and the result, must have.
    reach: [usize; 3],
    flops: usize,
    loops: Planes<E>,
}

/// A dim of what windows move through. Place q of a phase that begins at `b` is element `step · q + b`.
struct Dim {
    size: usize,
    stride: usize,
    step: usize,
    /// Places in the copy.
    extent: usize,
}

/// A band: what is copied of a channel of the moved tensor, and, of each pass, how long the stretch of its places is, if it has any there, and
/// where these are.
struct Band {
    copies: Vec<Move>,
    stretches: Vec<(usize, Vec<Move>)>,
}

/// Rows, where they begin where they come from and where they go, and their last elements there.
struct Move {
    starts: [usize; 2],
    ends: [usize; 2],
    rows: Rows,
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
        let (copied, stretched) =
            (|rows: usize| (rows + reaches[0]) * wide * planes + BEYOND, |rows: usize| rows * wide + PARTS);
        let needs = |rows: usize, together: usize| together * (copied(rows) + stretched(rows)) + of_kernel;
        let fits = |rows: usize, bytes: usize| needs(rows, 1) * size_of::<E>() <= bytes;
        let rows = (1..=counts[0]).rev().find(|&rows| fits(rows, BAND_BYTES)).or((counts[0] > 0).then_some(1))?;
        if !fits(rows, WORKER_BYTES) {
            return None;
        }
        let together = (1..=MOST_TOGETHER).rev().find(|&n| needs(rows, n) * size_of::<E>() <= TOGETHER_BYTES).unwrap_or(1);
        for (d, dim) in dims.iter_mut().enumerate() {
            dim.extent = reaches[d] + if d == 0 { rows } else { counts[d] };
        }
        let pitches: Vec<usize> = (0..dims.len()).map(|d| dims[d + 1..].iter().map(|dim| dim.extent).product()).collect();
        let plane = dims.iter().map(|dim| dim.extent).product::<usize>();
        let each = bases.iter().map(Vec::len).product::<usize>() * plane;
        // What a kernel's gradient sums are dots of its own.
        let summed = if form.result == KERNEL { 1 } else { channels[usize::from(moved == OUTPUT)].len() };
        let passes = passes(&views, &bases, spatial, (&pitches, plane), (swept, summed));
        let met = |pass: &Pass| pass.counts.iter().product::<usize>() * pass.taps.len();
        Some(Direct {
            form,
            moved,
            flops: 2 * count(&tasks) * samples.len() * pairs * passes.iter().map(met).sum::<usize>(),
            bands: (0..counts[0]).step_by(rows).map(|first| band(first, rows, &dims, &bases, &pitches, &passes)).collect(),
            tasks,
            samples,
            channels,
            each,
            passes,
            together,
            copied: copied(rows),
            stretched: stretched(rows),
            scratch: needs(rows, together),
            reach: [form.operands[0], form.operands[1], form.result].map(|tensor| reached(tensor, plain, spatial)),
            loops: E::kernels(isa).planes,
        })
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
        // Planes go together, small ones above all: a function of shapes only.
        let tasks = count(&self.tasks);
        let worth = |flops: usize| (flops / (self.flops / tasks.max(1)).max(1)).max(1);
        let per_chunk = worth(SMALL).max(worth(LARGE).min(tasks / CHUNKS));
        pool.run(tasks.div_ceil(per_chunk), self.flops / 32, &|worker, chunk| {
            let scratch = worker.scratch().cast::<E>();
            // SAFETY: a worker's own, whose size was compared; zeros are elements.
            let scratch = unsafe {
                scratch.write_bytes(0, self.scratch);
                std::slice::from_raw_parts_mut(scratch, self.scratch)
            };
            let mine = chunk * per_chunk..tasks.min((chunk + 1) * per_chunk);
            let mut mine = Walk::new(&self.tasks, mine.start).take(mine.len());
            if self.form.result == KERNEL {
                mine.for_each(|task| self.kernel(task, tensors, result, accumulate, scratch));
                return;
            }
            loop {
                let tasks: SmallVec<[Offsets; MOST_TOGETHER]> = mine.by_ref().take(self.together).collect();
                if tasks.is_empty() {
                    break;
                }
                self.planes(&tasks, tensors, result, accumulate, scratch);
            }
        });
    }

    /// Channels that an element of the result is a sum over, and those that it may be of.
    fn summed_and_made(&self) -> [&[Offsets]; 2] {
        let [images, outputs] = &self.channels;
        if self.moved == IMAGE { [images, outputs] } else { [outputs, images] }
    }

    /// The planes of the result that tasks have, as many as go together.
    fn planes(&self, tasks: &[Offsets], tensors: [&[E]; 3], result: SharedPtr<E>, accumulate: bool, scratch: &mut [E]) {
        let [summed, made] = self.summed_and_made();
        let (copies, rest) = scratch.split_at_mut(self.together * self.copied);
        let (swept, weights) = rest.split_at_mut(self.together * self.stretched);
        for band in &self.bands {
            for (t, task) in tasks.iter().enumerate() {
                self.copies(band, summed, task[self.moved], tensors[self.moved], &mut copies[t * self.copied..]);
            }
            let passes = || std::iter::zip(&self.passes, &band.stretches).filter(|(_, (length, _))| *length > 0);
            for (channel, (pass, (length, places))) in made.iter().flat_map(|channel| passes().map(move |pass| (channel, pass)))
            {
                for (t, task) in tasks.iter().enumerate() {
                    for (n, summed) in summed.iter().enumerate() {
                        let kernel = &tensors[KERNEL][task[KERNEL] + channel[KERNEL] + summed[KERNEL]..];
                        let weights = &mut weights[n * pass.taps.len()..];
                        std::iter::zip(weights, &pass.taps).for_each(|(weight, tap)| *weight = kernel[*tap]);
                    }
                    let (swept, copies) = (&mut swept[t * self.stretched..][..*length], &copies[t * self.copied..]);
                    // SAFETY: what is swept is as long; the longest offset of the last place lies in the copies or in what is beyond.
                    unsafe {
                        (self.loops.sweep)(swept.as_mut_ptr(), copies.as_ptr(), &pass.offsets, weights.as_ptr(), *length)
                    };
                }
                for (t, task) in tasks.iter().enumerate() {
                    let (swept, at) = (&swept[t * self.stretched..], task[self.form.result] + channel[self.form.result]);
                    for Move { starts: [from, to], ends, rows } in places {
                        assert!(ends[0] < swept.len());
                        // SAFETY: inside of the result, whose reach was compared; planes of tasks are disjoint, passes of a plane too.
                        unsafe { (self.loops.carry)(result.get().add(at + to), swept.as_ptr().add(*from), rows, accumulate) };
                    }
                }
            }
        }
    }

    /// The kernel's planes that a task has.
    fn kernel(&self, task: Offsets, tensors: [&[E]; 3], result: SharedPtr<E>, accumulate: bool, scratch: &mut [E]) {
        let [images, outputs] = &self.channels;
        let [pass] = &self.passes[..] else { unreachable!("a kernel's gradient has one") };
        let (copies, with) = scratch.split_at_mut(self.together * self.copied);
        let taps = pass.taps.len();
        let mut chains: SmallVec<[[E; PARTS]; 16]> = SmallVec::from_elem([E::ZERO; PARTS], images.len() * outputs.len() * taps);
        let turns = self.samples.chunks(self.together).flat_map(|samples| self.bands.iter().map(move |band| (samples, band)));
        for (samples, band) in turns {
            let [(length, places)] = &band.stretches[..] else { unreachable!("one of each pass") };
            let at = |sample: &Offsets, tensor: usize| task[tensor] + sample[tensor];
            for (n, sample) in samples.iter().enumerate() {
                self.copies(band, images, at(sample, IMAGE), tensors[IMAGE], &mut copies[n * self.copied..]);
            }
            for (output, chains) in outputs.iter().zip(chains.chunks_exact_mut(images.len() * taps)) {
                for (n, sample) in samples.iter().enumerate() {
                    let from = &tensors[OUTPUT][at(sample, OUTPUT) + output[OUTPUT]..];
                    let with = &mut with[n * self.stretched..][..*length];
                    if self.bands.len() > 1 {
                        with.fill(E::ZERO);
                    }
                    for Move { starts: [to, at], ends, rows } in places {
                        assert!(ends[0] < with.len() && ends[1] < from.len());
                        let rows = Rows { from: rows.to, to: rows.from, ..*rows };
                        // SAFETY: the last elements of both were compared.
                        unsafe { (self.loops.carry)(with.as_mut_ptr().add(*to), from.as_ptr().add(*at), &rows, false) };
                    }
                }
                for (n, image) in (0..samples.len()).flat_map(|n| (0..images.len()).map(move |image| (n, image))) {
                    let (with, copy) = (&with[n * self.stretched..][..*length], &copies[n * self.copied + image * self.each..]);
                    let chains = &mut chains[image * taps..(image + 1) * taps];
                    // SAFETY: both are as long; the longest offset of the last place lies in the copies or in what is beyond.
                    unsafe { (self.loops.dots)(chains.as_mut_ptr(), with.as_ptr(), copy.as_ptr(), &pass.offsets, *length) };
                }
            }
        }
        let pairs = outputs.iter().flat_map(|output| images.iter().map(move |image| output[KERNEL] + image[KERNEL]));
        for (pair, chains) in pairs.zip(chains.chunks_exact(taps)) {
            for (tap, chains) in pass.taps.iter().zip(chains) {
                // SAFETY: inside of the result, whose reach was compared; no two tasks share a kernel's plane.
                unsafe { put(result.get().add(task[KERNEL] + pair + tap), sweep::total(*chains), accumulate) };
            }
        }
    }

    /// Copies what a band meets of the moved tensor's channels, one behind the other.
    fn copies(&self, band: &Band, channels: &[Offsets], at: usize, from: &[E], to: &mut [E]) {
        let to = &mut to[..channels.len() * self.each];
        // What is around stays zero, unless it is elsewhere in each band.
        if self.bands.len() > 1 {
            to.fill(E::ZERO);
        }
        for (c, channel) in channels.iter().enumerate() {
            let (from, to) = (&from[at + channel[self.moved]..], &mut to[c * self.each..]);
            for Move { starts, ends, rows } in &band.copies {
                assert!(ends[0] < from.len() && ends[1] < to.len());
                // SAFETY: the last elements of both were compared.
                unsafe { (self.loops.carry)(to.as_mut_ptr().add(starts[1]), from.as_ptr().add(starts[0]), rows, false) };
            }
        }
    }
}

/// All passes: one of each view of each dim. `copy`: how far apart places of a copy are along each dim, and elements of a phase's plane.
fn passes(
    views: &[Vec<View>],
    bases: &[Vec<isize>],
    spatial: &[Spatial],
    (pitches, plane): (&[usize], usize),
    (swept, summed): (usize, usize),
) -> Vec<Pass> {
    let each = bases.iter().map(Vec::len).product::<usize>() * plane;
    let numbers: Vec<Vec<usize>> = views.iter().map(|views| (0..views.len()).collect()).collect();
    let pass = |chosen: Vec<usize>| {
        let views: Vec<&View> = std::iter::zip(views, chosen).map(|(views, n)| &views[n]).collect();
        let along = |d: usize| (views[d], spatial[d].strides[swept]);
        let mut taps = vec![(0, 0, 0)];
        for (d, view) in views.iter().enumerate() {
            let (stride, phases, pitch) = (spatial[d].strides[KERNEL], bases[d].len(), pitches[d]);
            let next = |at: (usize, usize, usize), tap: (usize, usize, usize)| {
                (at.0 + tap.0 * stride, at.1 * phases + tap.1, at.2 + tap.2 * pitch)
            };
            taps = taps.into_iter().flat_map(|at| view.taps.iter().map(move |tap| next(at, *tap))).collect();
        }
        let offset = |channel: usize, (_, phase, at): &(usize, usize, usize)| channel * each + phase * plane + at;
        Pass {
            counts: views.iter().map(|view| view.count).collect(),
            strides: (0..views.len()).map(along).map(|(view, stride)| view.step * stride).collect(),
            first: (0..views.len()).map(along).map(|(view, stride)| view.first * stride).sum(),
            offsets: (0..summed).flat_map(|channel| taps.iter().map(move |tap| offset(channel, tap))).collect(),
            taps: taps.iter().map(|tap| tap.0).collect(),
        }
    };
    products(&numbers).into_iter().map(pass).collect()
}

/// The band of `rows` places of the first dim from `first` on.
fn band(first: usize, rows: usize, dims: &[Dim], bases: &[Vec<isize>], pitches: &[usize], passes: &[Pass]) -> Band {
    let plane = dims.iter().map(|dim| dim.extent).product::<usize>();
    let copies = products(bases).into_iter().enumerate().flat_map(|(phase, bases)| {
        let along = |d: usize| {
            let dim = &dims[d];
            let span = dim.span(bases[d] + if d == 0 { (first * dim.step) as isize } else { 0 });
            let starts = [span.element * dim.stride, span.begin * pitches[d] + if d == 0 { phase * plane } else { 0 }];
            (span.end - span.begin, starts, [dim.step * dim.stride, pitches[d]])
        };
        moves(&(0..dims.len()).map(along).collect::<Vec<_>>())
    });
    let stretch = |pass: &Pass| {
        let count = |d: usize| if d == 0 { pass.counts[0].saturating_sub(first).min(rows) } else { pass.counts[d] };
        let start = |d: usize| if d == 0 { pass.first + first * pass.strides[0] } else { 0 };
        let along = |d: usize| (count(d), [0, start(d)], [pitches[d], pass.strides[d]]);
        let places = moves(&(0..dims.len()).map(along).collect::<Vec<_>>());
        let length = places.iter().map(|place| place.ends[0] + 1).max().unwrap_or(0);
        (length.next_multiple_of(PARTS), places)
    };
    Band { copies: copies.collect(), stretches: passes.iter().map(stretch).collect() }
}

/// Of dims, outermost first: how many elements, where they begin, and how far apart they are where they come from and where they go.
fn moves(dims: &[(usize, [usize; 2], [usize; 2])]) -> Vec<Move> {
    let start = |side: usize| dims.iter().map(|dim| dim.1[side]).sum::<usize>();
    let [outer @ .., row, element] = &[&[(1, [0; 2], [0; 2])], dims].concat()[..] else { return Vec::new() };
    if row.0 == 0 || element.0 == 0 {
        return Vec::new();
    }
    let rows = Rows { count: row.0, length: element.0, from: [row.2[0], element.2[0]], to: [row.2[1], element.2[1]] };
    let last = |[row, element]: [usize; 2]| (rows.count - 1) * row + (rows.length - 1) * element;
    let outer: Vec<(usize, Offsets)> = outer.iter().map(|dim| (dim.0, [dim.2[0], dim.2[1], 0])).collect();
    let of = |[from, to, _]: Offsets| {
        let starts = [start(0) + from, start(1) + to];
        Move { starts, ends: [starts[0] + last(rows.from), starts[1] + last(rows.to)], rows }
    };
    (0..count(&outer)).map(|n| of(offsets(&outer, n))).collect()
}

/// # Safety
/// The place is readable and writable.
#[inline(always)]
unsafe fn put<E: Element>(place: *mut E, value: E, accumulate: bool) {
    // SAFETY: the caller's.
    unsafe { *place = if accumulate { (*place).plus(value) } else { value } }
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

/// Offsets of the numbers from some on, one after the other.
struct Walk<'a> {
    digits: &'a [(usize, Offsets)],
    now: SmallVec<[usize; 6]>,
    at: Offsets,
}

impl<'a> Walk<'a> {
    fn new(digits: &'a [(usize, Offsets)], first: usize) -> Walk<'a> {
        let (mut rest, mut now, mut at) = (first, SmallVec::from_elem(0, digits.len()), [0; 3]);
        for (now, (size, strides)) in std::iter::zip(&mut now, digits).rev() {
            (rest, *now) = (rest / size, rest % size);
            std::iter::zip(&mut at, strides).for_each(|(at, stride)| *at += *now * stride);
        }
        Walk { digits, now, at }
    }
}

/// Without end: behind the last number comes the first.
impl Iterator for Walk<'_> {
    type Item = Offsets;

    fn next(&mut self) -> Option<Offsets> {
        let here = self.at;
        for (now, (size, strides)) in std::iter::zip(&mut self.now, self.digits).rev() {
            *now += 1;
            if *now < *size {
                std::iter::zip(&mut self.at, strides).for_each(|(at, stride)| *at += stride);
                break;
            }
            std::iter::zip(&mut self.at, strides).for_each(|(at, stride)| *at -= (*size - 1) * stride);
            *now = 0;
        }
        Some(here)
    }
}

/// Of number `n`, the last digit changing fastest.
fn offsets(digits: &[(usize, Offsets)], n: usize) -> Offsets {
    Walk::new(digits, n).at
}

/// One of each, in all ways, the last changing fastest.
fn products<T: Copy>(choices: &[Vec<T>]) -> Vec<Vec<T>> {
    choices.iter().fold(vec![Vec::new()], |all, own| {
        let with = |chosen: &Vec<T>, next: T| chosen.iter().copied().chain([next]).collect();
        all.iter().flat_map(|chosen| own.iter().map(move |next| with(chosen, *next))).collect()
    })
}
