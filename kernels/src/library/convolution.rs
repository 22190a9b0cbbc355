//! Convolution, the gradient of its image and the gradient of its kernel: contractions of strided views.
//!
//! With the image bordered by zeros, `x[stride·y + dilation·k]` is a view of it in which output and tap both move along one dim, so a
//! matrix product packs its panels straight from the image: there is no column buffer. Only what lies outside of the image is
//! copied, into a bordered copy of a few samples at a time.
//! - Result output: Σ over taps, kernel · bordered image. Result tap: Σ over outputs, output · bordered image.
//! - Result image: elements x ≡ φ (mod stride) meet every `stride / gcd(stride, dilation)`-th tap only. For each phase φ, x = φ + stride·j, this is
//!   Σ over these taps m, kernel · bordered output at y₀ + j − (dilation / gcd)·m: a convolution of stride 1 with the kernel reversed.
//!
//! A kernel that is read is copied first, so that what is summed lies together in the order in which it is.

use super::SharedPtr;
use super::matmul::{DotGeneral, Factor};
use super::simd::Element;
use crate::cpu::pool::Pool;

/// Elements of bordered copies at a time.
const CHUNK: usize = 1 << 20;

/// The three tensors of a convolution, as indices of `Plain::strides`.
pub const IMAGE: usize = 0;
pub const OUTPUT: usize = 1;
pub const KERNEL: usize = 2;

/// A factor that no window moves along, with its element stride in image, output and kernel; in two of them, or all.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    pub size: usize,
    pub strides: [Option<usize>; 3],
}

/// One spatial dim: `image = stride · output + dilation · tap − pad`. Sizes and element strides in the order image, output, kernel.
#[derive(Clone, Copy, Debug)]
pub struct Spatial {
    pub sizes: [usize; 3],
    pub strides: [usize; 3],
    pub stride: usize,
    pub dilation: usize,
    pub pad: isize,
}

/// Which tensor is the result, and which operand comes first: the other two in the order of the call.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub result: usize,
    pub operands: [usize; 2],
}

/// A planned convolution.
pub struct Convolution<E> {
    form: Form,
    /// The kernel in the order of the products that read it: where each element comes from.
    repack: Vec<u32>,
    border: Option<Border>,
    chunks: Chunks,
    /// Products of a full chunk of samples, and of the last one.
    products: [Vec<Product<E>>; 2],
    /// Elements of the result without a tap: it is zeroed first.
    gaps: bool,
    flops: usize,
}

/// One contraction, and where its operands begin.
struct Product<E> {
    dot: DotGeneral<E>,
    /// Of the kernel or output; of the (bordered) image or output; of the result.
    starts: [usize; 3],
}

/// Samples in chunks: how far one chunk lies from the next in the unbordered operand, in the bordered one's source and in the result.
struct Chunks {
    count: usize,
    steps: [usize; 3],
}

/// Copies with zeros around.
struct Border {
    /// Source and target offsets of each plane, of a full chunk and of the last one.
    planes: [Vec<[usize; 2]>; 2],
    dims: Vec<BorderDim>,
    /// Elements of a bordered plane, and of all planes.
    plane: usize,
    elements: usize,
}

/// Elements `origin…` of a dim, of which `from, … from + count` are there; the others are zero.
#[derive(Clone, Copy)]
struct BorderDim {
    size: usize,
    origin: isize,
    from: usize,
    count: usize,
    stride: usize,
}

impl<E: Element> Convolution<E> {
    /// Plans for this machine.
    ///
    /// # Panics
    /// If a plain factor is in one tensor only, or a size is zero.
    pub fn new(form: Form, plain: &[Plain], spatial: &[Spatial]) -> Convolution<E> {
        let views: Vec<View> = match form.result {
            IMAGE => gradient_views(spatial),
            _ => vec![forward_view(form.result, spatial)],
        };
        // The tensor that windows move through, and the one that is read as it is.
        let moved = if form.result == IMAGE { OUTPUT } else { IMAGE };
        let still = if form.result == KERNEL { OUTPUT } else { KERNEL };
        let roles = [still, moved, form.result];
        let border = bordered(&views, spatial, moved);
        let chunked = border.as_ref().and_then(|dims| chunk_factor(plain, moved, dims));
        let size = chunked.map_or(1, |(f, samples)| plain[f].size.div_ceil(samples));
        let shortened = |last: bool| -> Vec<Plain> {
            let mut plain = plain.to_vec();
            if let Some((f, samples)) = chunked {
                plain[f].size = if last { plain[f].size - samples * (size - 1) } else { samples };
            }
            plain
        };
        let (full, last) = (shortened(false), shortened(true));
        let border = border.map(|dims| Border::new(dims, moved, &full, &last));
        let gaps = views.iter().any(View::is_empty);
        let mut repack = Vec::new();
        let views: Vec<&View> = views.iter().filter(|view| !view.is_empty()).collect();
        let kernels: Vec<Kernel> = match form.result {
            KERNEL => Vec::new(),
            _ => views.iter().map(|view| Kernel::new(view, plain, spatial, form.result, &mut repack)).collect(),
        };
        let products = [&full, &last].map(|plain| {
            let product = |(i, view): (usize, &&View)| view.product(roles, plain, spatial, (border.as_ref(), kernels.get(i)));
            views.iter().enumerate().map(product).collect::<Vec<_>>()
        });
        let steps = roles.map(|role| chunked.map_or(0, |(f, samples)| samples * plain[f].strides[role].unwrap_or(0)));
        let flops = |products: &[Product<E>]| products.iter().map(|product| product.dot.flops()).sum::<usize>();
        Convolution {
            form,
            repack,
            gaps,
            flops: flops(&products[0]) * (size - 1) + flops(&products[1]),
            chunks: Chunks { count: size, steps },
            border,
            products,
        }
    }

    /// Multiplications and additions of one run.
    pub fn flops(&self) -> usize {
        self.flops
    }

    /// Elements of scratch that a run needs.
    pub fn workspace(&self) -> usize {
        self.repack.len() + self.border.as_ref().map_or(0, |border| border.elements)
    }

    /// `result = convolution(a, b)`, or `+=`. Operands in the order of `Form::operands`.
    ///
    /// # Panics
    /// If an operand or the workspace is too short.
    pub fn run(&self, pool: &Pool, accumulate: bool, a: &[E], b: &[E], result: &mut [E], workspace: &mut [E]) {
        let moved = if self.form.result == IMAGE { OUTPUT } else { IMAGE };
        let (still, moved) = if self.form.operands[1] == moved { (a, b) } else { (b, a) };
        let (copied, bordered) = workspace.split_at_mut(self.repack.len());
        let still = match self.form.result {
            KERNEL => still,
            _ => {
                repack(pool, &self.repack, still, copied);
                &*copied
            }
        };
        if self.gaps && !accumulate {
            result.fill(E::ZERO);
        }
        for chunk in 0..self.chunks.count {
            let last = usize::from(chunk + 1 == self.chunks.count);
            let [s, m, r] = self.chunks.steps.map(|step| step * chunk);
            if let Some(border) = &self.border {
                border.run(pool, &border.planes[last], &moved[m..], bordered);
            }
            let moved = if self.border.is_some() { &*bordered } else { moved };
            let beta = if accumulate || (self.form.result == KERNEL && chunk > 0) { E::ONE } else { E::ZERO };
            for product in &self.products[last] {
                let [x, y, z] = product.starts;
                product.dot.run(pool, E::ONE, beta, &still[s + x..], &moved[y..], &mut result[r + z..]);
            }
        }
    }
}

/// A contraction in terms of spatial dims: which elements of the moved tensor meet which of the others.
struct View {
    dims: Vec<ViewDim>,
}

/// Along one dim, the moved tensor is at `origin + row_step · row + tap_step · tap`.
struct ViewDim {
    origin: isize,
    row: Loop,
    tap: Loop,
}

/// A loop of the contraction: how many steps, where it begins and how far it goes in the tensor that has it as a dim of its own, and
/// how far in the moved one.
struct Loop {
    size: usize,
    /// Which tensor, by role: its own dim's index.
    tensor: usize,
    start: usize,
    step: isize,
    moved_step: usize,
}

impl ViewDim {
    fn reach(&self) -> (isize, isize) {
        let length = |l: &Loop| ((l.size.max(1) - 1) * l.moved_step) as isize;
        (self.origin, self.origin + length(&self.row) + length(&self.tap))
    }
}

/// The image's view in which outputs and taps move.
fn forward_view(result: usize, spatial: &[Spatial]) -> View {
    let dim = |s: &Spatial| {
        let output = Loop { size: s.sizes[OUTPUT], tensor: OUTPUT, start: 0, step: 1, moved_step: s.stride };
        let tap = Loop { size: s.sizes[KERNEL], tensor: KERNEL, start: 0, step: 1, moved_step: s.dilation };
        let (row, tap) = if result == OUTPUT { (output, tap) } else { (tap, output) };
        ViewDim { origin: -s.pad, row, tap }
    };
    View { dims: spatial.iter().map(dim).collect() }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The output's views of all phases of the image's gradient; taps go backwards.
fn gradient_views(spatial: &[Spatial]) -> Vec<View> {
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
        tensor: IMAGE,
        start: phase,
        step: s.stride as isize,
        moved_step: 1,
    };
    let moved_step = s.dilation * every / s.stride;
    let tap = Loop { size: count, tensor: KERNEL, start: last, step: -(every as isize), moved_step };
    ViewDim { origin: ahead(last).div_euclid(s.stride as isize), row, tap }
}

impl View {
    /// Elements that no tap reaches.
    fn is_empty(&self) -> bool {
        self.dims.iter().any(|dim| dim.tap.size == 0)
    }

    fn product<E: Element>(
        &self,
        roles: [usize; 3],
        plain: &[Plain],
        spatial: &[Spatial],
        (border, kernel): (Option<&Border>, Option<&Kernel>),
    ) -> Product<E> {
        let [still, moved, result] = roles;
        let inner = |dim: usize| match border {
            Some(border) => border.stride(dim),
            None => spatial[dim].strides[moved],
        };
        let mut starts = [kernel.map_or(0, |kernel| kernel.start), 0, 0];
        let mut factors: Vec<Factor> = Vec::new();
        let copied = border.map(|border| border.plain_strides(plain, moved));
        for (f, factor) in plain.iter().enumerate() {
            let lhs = kernel.map_or(factor.strides[still], |kernel| kernel.plain[f]);
            let rhs = copied.as_ref().map_or(factor.strides[moved], |strides| strides[f]);
            factors.push(Factor { size: factor.size, lhs, rhs, out: factor.strides[result] });
        }
        for (d, dim) in self.dims.iter().enumerate() {
            let low = border.map_or(0, |border| border.dims[d].origin);
            starts[1] += (dim.origin - low) as usize * inner(d);
            for l in [&dim.row, &dim.tap] {
                let mut factor = Factor { size: l.size, lhs: None, rhs: Some(l.moved_step * inner(d)), out: None };
                if let Some(kernel) = kernel.filter(|_| l.tensor == KERNEL) {
                    factor.lhs = Some(kernel.taps[d]);
                } else {
                    let own = spatial[d].strides[l.tensor];
                    let (at, slot) =
                        if l.tensor == result { (&mut starts[2], &mut factor.out) } else { (&mut starts[0], &mut factor.lhs) };
                    *at += l.start * own;
                    *slot = Some(l.step as usize * own);
                }
                factors.push(factor);
            }
        }
        Product { dot: DotGeneral::new(&factors), starts }
    }
}

/// A view's copy of the kernel: factors of the result, then taps, then what is summed besides.
struct Kernel {
    start: usize,
    plain: Vec<Option<usize>>,
    taps: Vec<usize>,
}

impl Kernel {
    fn new(view: &View, plain: &[Plain], spatial: &[Spatial], result: usize, repack: &mut Vec<u32>) -> Kernel {
        let has = |kept: bool| {
            let of = |f: &usize| plain[*f].strides[KERNEL].is_some() && plain[*f].strides[result].is_some() == kept;
            let mut found: Vec<usize> = (0..plain.len()).filter(of).collect();
            found.sort_by_key(|&f| std::cmp::Reverse(plain[f].strides[KERNEL]));
            found
        };
        let stride = |f: usize| plain[f].strides[KERNEL].unwrap_or(0) as isize;
        let first: usize = view.dims.iter().zip(spatial).map(|(dim, s)| dim.tap.start * s.strides[KERNEL]).sum();
        let mut sources = vec![first as isize];
        let mut spread = |size: usize, step: isize| {
            sources = sources.iter().flat_map(|&at| (0..size as isize).map(move |i| at + i * step)).collect();
        };
        has(true).iter().for_each(|&f| spread(plain[f].size, stride(f)));
        for (dim, s) in view.dims.iter().zip(spatial) {
            spread(dim.tap.size, dim.tap.step * s.strides[KERNEL] as isize);
        }
        has(false).iter().for_each(|&f| spread(plain[f].size, stride(f)));
        let start = repack.len();
        repack.extend(sources.iter().map(|&at| u32::try_from(at).expect("a kernel of less than 2^32 elements")));
        let (mut strides, mut taps, mut dense) = (vec![None; plain.len()], vec![0; spatial.len()], 1);
        let mut take = |size: usize| {
            let stride = dense;
            dense *= size;
            stride
        };
        has(false).iter().rev().for_each(|&f| strides[f] = Some(take(plain[f].size)));
        (0..spatial.len()).rev().for_each(|d| taps[d] = take(view.dims[d].tap.size));
        has(true).iter().rev().for_each(|&f| strides[f] = Some(take(plain[f].size)));
        Kernel { start, plain: strides, taps }
    }
}

/// `to[i] = from[sources[i]]`.
fn repack<E: Element>(pool: &Pool, sources: &[u32], from: &[E], to: &mut [E]) {
    const CHUNK: usize = 1 << 14;
    let target = SharedPtr::new(to.as_mut_ptr());
    let count = sources.len().min(to.len());
    pool.run(count.div_ceil(CHUNK), count, &|_, chunk| {
        let part = chunk * CHUNK..count.min((chunk + 1) * CHUNK);
        // SAFETY: chunks are disjoint parts of `to`.
        let to = unsafe { std::slice::from_raw_parts_mut(target.get().add(part.start), part.len()) };
        to.iter_mut().zip(&sources[part]).for_each(|(to, &at)| *to = from[at as usize]);
    });
}

/// The dims of a bordered copy that all views lie in; none where they lie in the tensor itself.
fn bordered(views: &[View], spatial: &[Spatial], moved: usize) -> Option<Vec<BorderDim>> {
    let mut needed = false;
    let dim = |d: usize| {
        let s = &spatial[d];
        let reaches = views.iter().filter(|view| !view.is_empty()).map(|view| view.dims[d].reach());
        let (low, high) = reaches.fold((isize::MAX, isize::MIN), |(low, high), (l, h)| (low.min(l), high.max(h)));
        let (low, high) = if low > high { (0, 0) } else { (low, high) };
        let (from, end) = (low.max(0), (high + 1).min(s.sizes[moved] as isize));
        needed |= low < 0 || high >= s.sizes[moved] as isize;
        BorderDim {
            size: (high - low + 1) as usize,
            origin: low,
            from: from as usize,
            count: (end - from).max(0) as usize,
            stride: s.strides[moved],
        }
    };
    let dims: Vec<BorderDim> = (0..spatial.len()).map(dim).collect();
    needed.then_some(dims)
}

/// The factor along which images are copied in chunks, and how many at a time.
fn chunk_factor(plain: &[Plain], moved: usize, dims: &[BorderDim]) -> Option<(usize, usize)> {
    // Samples: the kernel's factors are not cut.
    let samples = (0..plain.len()).filter(|&f| plain[f].size > 1 && plain[f].strides[KERNEL].is_none());
    let f = samples.max_by_key(|&f| plain[f].strides[moved])?;
    plain[f].strides[moved]?;
    let plane: usize = dims.iter().map(|dim| dim.size).product();
    let others = (0..plain.len()).filter(|&g| g != f && plain[g].strides[moved].is_some());
    let sample = others.map(|g| plain[g].size).product::<usize>() * plane;
    Some((f, (CHUNK / sample.max(1)).clamp(1, plain[f].size)))
}

impl Border {
    fn new(dims: Vec<BorderDim>, moved: usize, full: &[Plain], last: &[Plain]) -> Border {
        let plane = dims.iter().map(|dim| dim.size).product();
        let mut border = Border { planes: Default::default(), dims, plane, elements: 0 };
        border.planes = [full, last].map(|plain| border.offsets(plain, moved));
        border.elements = border.planes.iter().map(|planes| planes.len() * plane).max().unwrap_or(0);
        border
    }

    /// Element strides of the plain factors in the copy: as in the tensor, outermost first.
    fn plain_strides(&self, plain: &[Plain], moved: usize) -> Vec<Option<usize>> {
        let mut order: Vec<usize> = (0..plain.len()).filter(|&f| plain[f].strides[moved].is_some()).collect();
        order.sort_by_key(|&f| plain[f].strides[moved]);
        let (mut strides, mut stride) = (vec![None; plain.len()], self.plane);
        for f in order {
            strides[f] = Some(stride);
            stride *= plain[f].size;
        }
        strides
    }

    fn stride(&self, dim: usize) -> usize {
        self.dims[dim + 1..].iter().map(|dim| dim.size).product()
    }

    fn offsets(&self, plain: &[Plain], moved: usize) -> Vec<[usize; 2]> {
        let mut all = vec![[0; 2]];
        for (factor, stride) in plain.iter().zip(self.plain_strides(plain, moved)) {
            let (Some(from), Some(to)) = (factor.strides[moved], stride) else { continue };
            all = all.iter().flat_map(|at| (0..factor.size).map(move |i| [at[0] + i * from, at[1] + i * to])).collect();
        }
        all
    }

    fn run<E: Element>(&self, pool: &Pool, planes: &[[usize; 2]], from: &[E], to: &mut [E]) {
        assert!(to.len() >= planes.len() * self.plane, "{} elements of scratch for {}", to.len(), planes.len() * self.plane);
        let target = SharedPtr::new(to.as_mut_ptr());
        // Small planes go together, a function of shapes only.
        let together = (1 << 13) / self.plane.max(1) + 1;
        pool.run(planes.len().div_ceil(together), planes.len() * self.plane, &|_, chunk| {
            for plane in &planes[chunk * together..planes.len().min((chunk + 1) * together)] {
                // SAFETY: planes are disjoint parts of `to`, whose length was compared.
                let to = unsafe { std::slice::from_raw_parts_mut(target.get().add(plane[1]), self.plane) };
                to.fill(E::ZERO);
                copy(&self.dims, &from[plane[0]..], to);
            }
        });
    }
}

/// Copies what is there of a plane; the rest of `to` stays.
fn copy<E: Element>(dims: &[BorderDim], from: &[E], to: &mut [E]) {
    let Some((dim, rest)) = dims.split_first() else {
        to[0] = from[0];
        return;
    };
    let inner: usize = rest.iter().map(|dim| dim.size).product();
    let first = (dim.from as isize - dim.origin) as usize;
    if rest.is_empty() && dim.stride == 1 && dim.count > 0 {
        to[first..first + dim.count].copy_from_slice(&from[dim.from..dim.from + dim.count]);
        return;
    }
    for i in 0..dim.count {
        copy(rest, &from[(dim.from + i) * dim.stride..], &mut to[(first + i) * inner..]);
    }
}
