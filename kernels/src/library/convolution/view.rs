//! Which rows meet which taps: a convolution as contractions of strided views, whole or cut where they would reach out of the image.

use super::kernel::{Along, Taps};
use super::{IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use crate::cpu::isa::Isa;
use crate::library::matmul::{DotGeneral, Factor};
use crate::library::simd::Element;

/// One contraction, and where its operands begin.
pub(super) struct Product<E> {
    pub dot: DotGeneral<E>,
    /// Of the kernel or output; of the (bordered) image or output; of the result.
    pub starts: [usize; 3],
}

/// Where the tensors, or their copies, have their elements.
pub(super) struct Layout {
    pub plain: Vec<Plain>,
    /// Strides of each dim in image, output and kernel.
    pub spatial: Vec<[usize; 3]>,
    /// What the moved tensor's elements along each dim begin with.
    pub low: Vec<isize>,
}

impl Layout {
    pub fn new(plain: &[Plain], spatial: &[Spatial]) -> Layout {
        Layout { plain: plain.to_vec(), spatial: spatial.iter().map(|s| s.strides).collect(), low: vec![0; spatial.len()] }
    }
}

/// The products of a convolution, and the view that each is a part of.
pub(super) struct Regions {
    pub all: Vec<(usize, View)>,
    /// Views were cut.
    pub parted: bool,
}

/// Most regions, and the fewest multiply-adds of one on average.
const REGIONS: usize = 64;
const WORTH: usize = 1 << 15;

impl Regions {
    /// Cuts `views` of a tensor of `sizes` if of what they multiply no more than `most` lies inside of it.
    pub fn new(views: &[View], plain: &[Plain], sizes: &[usize], most: f64) -> Regions {
        let work = |view: &View| view.dims.iter().map(|dim| dim.row.size * dim.tap.size).product::<usize>();
        let parts: Vec<(usize, View)> =
            views.iter().enumerate().flat_map(|(i, view)| view.regions(sizes).into_iter().map(move |part| (i, part))).collect();
        let inside = parts.iter().map(|(_, view)| work(view)).sum::<usize>();
        let each = plain.iter().map(|f| f.size).product::<usize>() * inside / parts.len().max(1);
        let all = views.iter().map(work).sum::<usize>();
        let parted = inside as f64 <= most * all as f64 && parts.len() <= REGIONS && each >= WORTH;
        let all = if parted { parts } else { views.iter().cloned().enumerate().collect() };
        Regions { all, parted }
    }

    /// Elements of a plane of the result that they have.
    pub fn rows(&self) -> usize {
        self.all.iter().map(|(_, view)| view.rows()).sum()
    }
}

/// A contraction in terms of spatial dims: which elements of the moved tensor meet which of the others.
#[derive(Clone)]
pub(super) struct View {
    pub dims: Vec<ViewDim>,
}

/// Along one dim, the moved tensor is at `origin + row_step · row + tap_step · tap`.
#[derive(Clone, Copy)]
pub(super) struct ViewDim {
    origin: isize,
    row: Loop,
    tap: Loop,
}

/// A loop of the contraction: how many steps, where it begins and how far it goes in the tensor that has it as a dim of its own, and
/// how far in the moved one.
#[derive(Clone, Copy)]
pub(super) struct Loop {
    size: usize,
    /// Steps of the view's loop before the first of a region's.
    first: usize,
    /// Which tensor, by role: its own dim's index.
    tensor: usize,
    start: usize,
    step: isize,
    moved_step: usize,
}

impl Loop {
    /// `size` of its steps.
    fn part(&self, first: usize, size: usize) -> Loop {
        let start = (self.start as isize + self.step * first as isize) as usize;
        Loop { size, start, first: self.first + first, ..*self }
    }
}

impl ViewDim {
    /// Rows that meet the same elements of a tensor of `size` go together, each with the taps that do; rows that meet none are left out.
    fn regions(&self, size: usize) -> Vec<ViewDim> {
        let taps = |row: usize| {
            let (at, step) = (self.origin + (row * self.row.moved_step) as isize, self.tap.moved_step);
            let first = (-at).max(0).unsigned_abs().div_ceil(step).min(self.tap.size);
            let end = (size as isize - at).max(0).unsigned_abs().div_ceil(step).min(self.tap.size);
            (first, end.max(first))
        };
        let mut all = Vec::new();
        let mut from = 0;
        while from < self.row.size {
            let (first, end) = taps(from);
            let count = (from..self.row.size).take_while(|&row| taps(row) == (first, end)).count();
            let origin = self.origin + (from * self.row.moved_step + first * self.tap.moved_step) as isize;
            if first < end {
                all.push(ViewDim { origin, row: self.row.part(from, count), tap: self.tap.part(first, end - first) });
            }
            from += count;
        }
        all
    }

    pub fn reach(&self) -> (isize, isize) {
        let length = |l: &Loop| ((l.size.max(1) - 1) * l.moved_step) as isize;
        (self.origin, self.origin + length(&self.row) + length(&self.tap))
    }
}

/// The image's view in which outputs and taps move.
pub(super) fn forward_view(result: usize, spatial: &[Spatial]) -> View {
    let dim = |s: &Spatial| {
        let output = Loop { size: s.sizes[OUTPUT], first: 0, tensor: OUTPUT, start: 0, step: 1, moved_step: s.stride };
        let tap = Loop { size: s.sizes[KERNEL], first: 0, tensor: KERNEL, start: 0, step: 1, moved_step: s.dilation };
        let (row, tap) = if result == OUTPUT { (output, tap) } else { (tap, output) };
        ViewDim { origin: -s.pad, row, tap }
    };
    View { dims: spatial.iter().map(dim).collect() }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The output's views of all phases of the image's gradient; taps go backwards.
pub(super) fn gradient_views(spatial: &[Spatial]) -> Vec<View> {
    let phases =
        |s: &Spatial| -> Vec<ViewDim> { (0..s.stride.min(s.sizes[IMAGE])).map(|phase| gradient_dim(s, phase)).collect() };
    let all: Vec<Vec<ViewDim>> = spatial.iter().map(phases).collect();
    let count = all.iter().map(Vec::len).product();
    let view = |mut index: usize| {
        let mut dims = Vec::new();
        for (s, phases) in spatial.iter().zip(&all) {
            dims.push(gradient_dim(s, index % phases.len()));
            index /= phases.len();
        }
        View { dims }
    };
    (0..count).map(view).collect()
}

fn gradient_dim(s: &Spatial, phase: usize) -> ViewDim {
    let (every, taps) = (s.stride / gcd(s.stride, s.dilation), s.sizes[KERNEL]);
    let ahead = |tap: usize| phase as isize + s.pad - (s.dilation * tap) as isize;
    let first = (0..every.min(taps)).find(|&tap| ahead(tap).rem_euclid(s.stride as isize) == 0);
    let count = first.map_or(0, |first| (taps - first).div_ceil(every));
    let last = first.unwrap_or(0) + every * (count.max(1) - 1);
    let row = Loop {
        size: (s.sizes[IMAGE] - phase).div_ceil(s.stride),
        first: 0,
        tensor: IMAGE,
        start: phase,
        step: s.stride as isize,
        moved_step: 1,
    };
    let moved_step = s.dilation * every / s.stride;
    let tap = Loop { size: count, first: 0, tensor: KERNEL, start: last, step: -(every as isize), moved_step };
    ViewDim { origin: ahead(last).div_euclid(s.stride as isize), row, tap }
}

impl View {
    /// Its taps along each dim, in the order of the contraction.
    pub fn taps(&self) -> Vec<Along> {
        let along = |dim: &ViewDim| {
            let taps = if dim.tap.tensor == KERNEL { &dim.tap } else { &dim.row };
            (taps.start, taps.size, taps.step)
        };
        self.dims.iter().map(along).collect()
    }

    /// Parts that lie within a tensor of `sizes`.
    fn regions(&self, sizes: &[usize]) -> Vec<View> {
        let mut all = vec![View { dims: Vec::new() }];
        for (dim, size) in self.dims.iter().zip(sizes) {
            let parts = dim.regions(*size);
            let with = |view: &View, part: &ViewDim| View { dims: view.dims.iter().copied().chain([*part]).collect() };
            all = all.iter().flat_map(|view| parts.iter().map(move |part| with(view, part))).collect();
        }
        all
    }

    pub fn rows(&self) -> usize {
        self.dims.iter().map(|dim| dim.row.size).product()
    }

    /// Elements that no tap reaches.
    pub fn is_empty(&self) -> bool {
        self.dims.iter().any(|dim| dim.tap.size == 0)
    }

    /// The contraction of tensors that lie as `layout` says, with the kernel's copy where there is one: strides of its plain factors, and taps.
    /// `lines`: a step of each dim is as many places in the tensor that is read as it is as in the moved one, so all places are one dim.
    pub fn product<E: Element>(
        &self,
        roles: [usize; 3],
        layout: &Layout,
        kernel: Option<(&[Option<usize>], &Taps)>,
        (lines, isa): (bool, Isa),
    ) -> Product<E> {
        let [still, moved, _] = roles;
        let place = |role: usize| roles.iter().position(|&r| r == role).expect("a tensor has a role");
        let mut starts = [0; 3];
        let mut factors: Vec<Factor> = Vec::new();
        let factor = |size: usize, [lhs, rhs, out]: [Option<usize>; 3]| Factor { size, lhs, rhs, out };
        for (f, plain) in layout.plain.iter().enumerate() {
            let stride = |role: usize| match (role, kernel) {
                (KERNEL, Some((strides, _))) => strides[f],
                _ => plain.strides[role],
            };
            factors.push(factor(plain.size, roles.map(stride)));
        }
        if let Some((_, taps)) = kernel {
            starts[place(KERNEL)] = taps.start;
        }
        for (d, dim) in self.dims.iter().enumerate() {
            let inner = layout.spatial[d][moved];
            starts[1] += (dim.origin - layout.low[d]) as usize * inner;
            for l in [&dim.row, &dim.tap].into_iter().filter(|l| !(lines && l.tensor == still)) {
                let mut strides = [None, Some(l.moved_step * inner), None];
                let at = place(l.tensor);
                match kernel.filter(|_| l.tensor == KERNEL) {
                    Some((_, taps)) => {
                        starts[at] += l.first * taps.strides[d];
                        strides[at] = Some(taps.strides[d]);
                    }
                    None => {
                        let own = layout.spatial[d][l.tensor];
                        starts[at] += l.start * own;
                        strides[at] = Some(l.step as usize * own);
                    }
                }
                factors.push(factor(l.size, strides));
            }
        }
        if lines {
            let [own, inner] = [still, moved].map(|role| layout.spatial.last().map_or(1, |strides| strides[role]));
            let ahead = |(d, dim): (usize, &ViewDim)| (dim.tap.size - 1) * layout.spatial[d][still] / own;
            let size = 1 + self.dims.iter().enumerate().map(ahead).sum::<usize>();
            factors.push(factor(size, [Some(own), Some(inner), None]));
        }
        Product { dot: DotGeneral::with_isa(&factors, isa), starts }
    }
}
