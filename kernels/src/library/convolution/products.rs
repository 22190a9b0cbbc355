//! Convolutions as contractions of strided views.
//!
//! With the image bordered by zeros, `x[stride·y + dilation·k]` is a view of it in which output and tap both move along one dim, so a
//! matrix product packs its panels straight from the image: there is no column buffer. Only what lies outside of the image is
//! copied, into a bordered copy of a few samples at a time.
//! - Result output: Σ over taps, kernel · bordered image. Result tap: Σ over outputs, output · bordered image.
//! - Result image: elements x ≡ φ (mod stride) meet every `stride / gcd(stride, dilation)`-th tap only. For each phase φ, x = φ + stride·j, this is
//!   Σ over these taps m, kernel · bordered output at y₀ + j − (dilation / gcd)·m: a convolution of stride 1 with the kernel reversed.
//!
//! A small image would be mostly border. There rows are parted by the taps that meet the image instead, and each region is a product of its
//! own, of what is there. With enough samples these become the columns, side by side in copies (`samples`): most layers of a network.
//!
//! A kernel that is read is copied first, so that what is summed lies together in the order in which it is; one that is the result is
//! summed in an order that products write fast, and copied then. A large kernel's channels take turns, a part of them at a time.

use super::kernel::Copy;
use super::samples::{self, Samples};
use super::view::{Layout, Product, Regions, View, forward_view, gradient_views};
use super::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use crate::library::SharedPtr;
use crate::library::matmul::LONG;
use crate::library::pack::{Pack, Size, Source};
use crate::library::simd::{Element, LINE};

/// Elements of bordered copies, and of a kernel's copy, at a time.
const CHUNK: usize = 1 << 20;

/// How much longer than its outputs a line of them may be.
const LINE_ZEROS: f64 = 1.3;

/// A convolution by products.
pub(super) struct Products<E> {
    form: Form,
    /// The kernel in the order of the products; none where it has one tap.
    kernel: Option<Copy<E>>,
    border: Option<Border<E>>,
    /// A copy of the output in which channels lie side by side, where each region of a kernel's gradient reads it.
    outputs: Option<Border<E>>,
    /// Copies in which samples lie side by side, of a full chunk and of the last one, in place of the border.
    samples: Option<[Samples<E>; 2]>,
    chunks: Chunks,
    turns: Turns,
    /// Products of a full chunk of samples, and of the last one.
    products: [Vec<Product<E>>; 2],
    /// Elements of the result without a tap: it is zeroed first.
    gaps: bool,
    flops: usize,
}

/// Samples in chunks: how far one chunk lies from the next in the unbordered operand, in the bordered one's source and in the result.
struct Chunks {
    count: usize,
    steps: [usize; 3],
}

/// Parts of the kernel's channels: how many, and how far one lies from the next in each tensor.
struct Turns {
    count: usize,
    steps: [usize; 3],
}

/// Copies with zeros around.
struct Border<E> {
    /// Source and target offsets of each plane, of a full chunk and of the last one.
    planes: [Vec<[usize; 2]>; 2],
    dims: Vec<BorderDim>,
    /// The factor that is innermost in the copy, if there is one.
    channels: Option<Channels>,
    pack: Pack<E>,
    /// Elements of a bordered plane, channels included, and of all planes.
    plane: usize,
    elements: usize,
}

/// A plain factor that lies inside of the planes of a copy: which, its size and its stride in the source.
#[derive(Clone, Copy)]
struct Channels {
    factor: usize,
    size: usize,
    stride: usize,
}

/// Fewest channels that are worth turning planes over.
const CHANNELS: usize = 3;

/// Elements `origin…` of a dim, of which `from, … from + count` are there; the others are zero.
#[derive(Clone, Copy)]
struct BorderDim {
    size: usize,
    origin: isize,
    from: usize,
    count: usize,
    stride: usize,
}

impl<E: Element> Products<E> {
    /// As `Convolution::with_isa`.
    pub fn new(form: Form, plain: &[Plain], spatial: &[Spatial], isa: Isa) -> Products<E> {
        let (plain, turns) = in_turns(form.result, plain, spatial);
        let mut planned = Self::of_one_turn(form, &plain, spatial, isa);
        planned.flops *= turns.count;
        planned.turns = turns;
        planned
    }

    fn of_one_turn(form: Form, plain: &[Plain], spatial: &[Spatial], isa: Isa) -> Products<E> {
        let kernels = E::kernels(isa);
        let views: Vec<View> = match form.result {
            IMAGE => gradient_views(spatial),
            _ => vec![forward_view(form.result, spatial)],
        };
        let views: Vec<View> = views.into_iter().filter(|view| !view.is_empty()).collect();
        // The tensor that windows move through, and the one that is read as it is.
        let moved = if form.result == IMAGE { OUTPUT } else { IMAGE };
        let still = if form.result == KERNEL { OUTPUT } else { KERNEL };
        let roles = [still, moved, form.result];
        let (regions, side) = cut(form.result, moved, &views, plain, spatial);
        // Channels that are summed over in a small image, or that make rows while places are summed over, lie side by side in a copy.
        let channels = (form.result == KERNEL || regions.parted).then(|| Channels::find(plain, moved)).flatten();
        let lines =
            form.result == KERNEL && !regions.parted && channels.is_some() && side.is_none() && is_in_line(plain, spatial);
        let needed = lines || regions.parted && channels.is_some();
        let border = bordered(&regions.all, spatial, moved, needed).filter(|_| side.is_none());
        let turns = lines || form.result == KERNEL && regions.parted;
        let copies = if turns { &[moved, OUTPUT][..] } else { &[moved] };
        let chunked = side.or_else(|| border.as_ref().and_then(|dims| chunk_factor(plain, copies, dims)));
        let size = chunked.map_or(1, |(f, samples)| plain[f].size.div_ceil(samples));
        let shortened = |last: bool| -> Vec<Plain> {
            let mut plain = plain.to_vec();
            if let Some((f, samples)) = chunked {
                plain[f].size = if last { plain[f].size - samples * (size - 1) } else { samples };
            }
            plain
        };
        let (full, last) = (shortened(false), shortened(true));
        let border = border.map(|dims| Border::new(dims, moved, channels, [&full, &last], kernels.pack));
        let pitch = border.as_ref().filter(|_| lines).map(|border| &border.dims[..]);
        let outputs = turns.then(|| Border::of_outputs(plain, spatial, pitch, [&full, &last], kernels.pack)).flatten();
        let side =
            side.map(|(f, _)| [&full, &last].map(|plain| Samples::new(plain, spatial, [moved, form.result], f, kernels)));
        // Elements of the result that no region has.
        let gaps = regions.rows() < spatial.iter().map(|s| s.sizes[form.result]).product::<usize>();
        let kernel = (spatial.iter().any(|s| s.sizes[KERNEL] > 1) && !views.is_empty()).then(|| {
            Copy::new(plain, spatial, &views.iter().map(View::taps).collect::<Vec<_>>(), (depth(form.result, turns), kernels))
        });
        let products = [0, 1].map(|part| {
            let mut layout = Layout::new([&full, &last][part], spatial);
            outputs.iter().for_each(|outputs| outputs.lay_out(&mut layout, OUTPUT));
            border.iter().for_each(|border| border.lay_out(&mut layout, moved));
            side.iter().for_each(|side| side[part].lay_out(&mut layout));
            let taps = |i: usize| kernel.as_ref().map(|copy| (&copy.plain[..], &copy.views[i]));
            let product = |(i, view): &(usize, View)| view.product(roles, &layout, taps(*i), (lines, isa));
            regions.all.iter().map(product).collect::<Vec<_>>()
        });
        let steps = roles.map(|role| chunked.map_or(0, |(f, samples)| samples * plain[f].strides[role].unwrap_or(0)));
        let flops = |products: &[Product<E>]| products.iter().map(|product| product.dot.flops()).sum::<usize>();
        Products {
            form,
            kernel,
            gaps,
            flops: flops(&products[0]) * (size - 1) + flops(&products[1]),
            chunks: Chunks { count: size, steps },
            turns: Turns { count: 1, steps: [0; 3] },
            border,
            outputs,
            samples: side,
            products,
        }
    }

    /// Multiplications and additions of one run.
    pub fn flops(&self) -> usize {
        self.flops
    }

    /// Elements of scratch that a run needs.
    pub fn workspace(&self) -> usize {
        let side = self.samples.as_ref().map_or(0, |[full, last]| full.elements().max(last.elements()));
        self.copied() + side + [&self.border, &self.outputs].into_iter().flatten().map(|border| border.elements).sum::<usize>()
    }

    fn copied(&self) -> usize {
        // What follows begins at a cache line, as the workspace does.
        self.kernel.as_ref().map_or(0, |copy| copy.elements.next_multiple_of(LINE / size_of::<E>()))
    }

    /// As `Convolution::run`.
    pub fn run(&self, pool: &Pool, accumulate: bool, a: &[E], b: &[E], result: &mut [E], workspace: &mut [E]) {
        let moves = if self.form.result == IMAGE { OUTPUT } else { IMAGE };
        let still = if self.form.result == KERNEL { OUTPUT } else { KERNEL };
        let [a, b] = if self.form.operands[1] == moves { [a, b] } else { [b, a] };
        let is_copied = self.form.result == KERNEL && self.kernel.is_some();
        if self.gaps && !is_copied && !accumulate && self.samples.is_none() {
            result.fill(E::ZERO);
        }
        for turn in 0..self.turns.count {
            let [s, m, r] = [still, moves, self.form.result].map(|tensor| turn * self.turns.steps[tensor]);
            self.take_turn(pool, accumulate, (&a[s..], &b[m..]), &mut result[r..], workspace);
        }
    }

    fn take_turn(&self, pool: &Pool, accumulate: bool, (still, moved): (&[E], &[E]), result: &mut [E], workspace: &mut [E]) {
        let (copied, bordered) = workspace.split_at_mut(self.copied());
        match &self.kernel {
            Some(kernel) if self.form.result == KERNEL => {
                if self.gaps {
                    copied.fill(E::ZERO);
                }
                self.products(pool, false, still, moved, copied, bordered);
                kernel.write(pool, accumulate, copied, result);
            }
            Some(kernel) => {
                kernel.read(pool, still, copied);
                self.products(pool, accumulate, copied, moved, result, bordered);
            }
            None => self.products(pool, accumulate, still, moved, result, bordered),
        }
    }

    /// The contractions, chunk by chunk, on the kernel's copy where there is one.
    fn products(&self, pool: &Pool, accumulate: bool, still: &[E], moved: &[E], result: &mut [E], bordered: &mut [E]) {
        if let Some(side) = &self.samples {
            return self.side_by_side(pool, side, accumulate, (still, moved), result, bordered);
        }
        for chunk in 0..self.chunks.count {
            let last = usize::from(chunk + 1 == self.chunks.count);
            let [s, m, r] = self.chunks.steps.map(|step| step * chunk);
            let (outputs, bordered) = bordered.split_at_mut(self.outputs.as_ref().map_or(0, |outputs| outputs.elements));
            if let Some(turned) = &self.outputs {
                turned.run(pool, &turned.planes[last], &still[s..], outputs);
            }
            if let Some(border) = &self.border {
                border.run(pool, &border.planes[last], &moved[m..], bordered);
            }
            let (still, s) = if self.outputs.is_some() { (&*outputs, 0) } else { (still, s) };
            let moved = if self.border.is_some() { &*bordered } else { moved };
            let beta = if accumulate || (self.form.result == KERNEL && chunk > 0) { E::ONE } else { E::ZERO };
            for product in &self.products[last] {
                let [x, y, z] = product.starts;
                product.dot.run(pool, E::ONE, beta, &still[s + x..], &moved[y..], &mut result[r + z..]);
            }
        }
    }

    /// As `products`, by copies of both with samples side by side.
    fn side_by_side(
        &self,
        pool: &Pool,
        side: &[Samples<E>; 2],
        accumulate: bool,
        (still, moved): (&[E], &[E]),
        result: &mut [E],
        workspace: &mut [E],
    ) {
        for chunk in 0..self.chunks.count {
            let last = usize::from(chunk + 1 == self.chunks.count);
            let [s, m, r] = self.chunks.steps.map(|step| step * chunk);
            let (from, to) = workspace.split_at_mut(side[last].moved.elements);
            side[last].moved.read(pool, &moved[m..], from);
            let to = &mut to[..side[last].result.elements];
            if self.gaps {
                to.fill(E::ZERO);
            }
            for product in &self.products[last] {
                let [x, y, z] = product.starts;
                product.dot.run(pool, E::ONE, E::ZERO, &still[s + x..], &from[y..], &mut to[z..]);
            }
            side[last].result.write(pool, accumulate, to, &mut result[r..]);
        }
    }
}

/// Plain factors of one turn: channels of the kernel in as many parts as keep its copy small. They are the result's; of a kernel's gradient
/// the image's, which is copied too.
fn in_turns(result: usize, plain: &[Plain], spatial: &[Spatial]) -> (Vec<Plain>, Turns) {
    let mut plain = plain.to_vec();
    let taps: usize = spatial.iter().map(|s| s.sizes[KERNEL]).product();
    let elements = taps * plain.iter().filter(|f| f.strides[KERNEL].is_some()).map(|f| f.size).product::<usize>();
    let shared = if result == OUTPUT { OUTPUT } else { IMAGE };
    let is_channels = |f: &&mut Plain| f.strides[KERNEL].is_some() && f.strides[shared].is_some() && f.strides.contains(&None);
    let channels = plain.iter_mut().filter(is_channels).max_by_key(|f| f.size).filter(|_| taps > 1);
    let Some(channels) = channels else { return (plain, Turns { count: 1, steps: [0; 3] }) };
    let count =
        (elements.div_ceil(CHUNK).max(1)..=channels.size).find(|count| channels.size.is_multiple_of(*count)).unwrap_or(1);
    channels.size /= count;
    let steps = channels.strides.map(|stride| stride.unwrap_or(0) * channels.size);
    (plain, Turns { count, steps })
}

/// The products; and the factor of samples and how many at a time, if these lie side by side.
fn cut(result: usize, moved: usize, views: &[View], plain: &[Plain], spatial: &[Spatial]) -> (Regions, Option<(usize, usize)>) {
    let sizes: Vec<usize> = spatial.iter().map(|s| s.sizes[moved]).collect();
    if let Some(side) = samples::find(plain, spatial, result, moved) {
        let regions = Regions::new(views, plain, &sizes, 1.0);
        if regions.parted {
            return (regions, Some(side));
        }
    }
    // How much of the work may be left. Small stretches of a result are written slowly, unless it is a kernel.
    let most = if result == KERNEL { 0.75 } else { 0.5 };
    (Regions::new(views, plain, &sizes, most), None)
}

/// Whether a kernel's gradient sums over all of a sample's outputs in one line, with zeros between their rows, rows of outputs and of the bordered image
/// being equally far apart: then taps are views of the image that need no copy. Not where windows skip elements, or zeros would be many.
fn is_in_line(plain: &[Plain], spatial: &[Spatial]) -> bool {
    let taps: usize = spatial.iter().map(|s| s.sizes[KERNEL]).product();
    let (mut line, mut pitch) = (1, 1);
    for s in spatial.iter().rev() {
        line += s.sizes[OUTPUT].saturating_sub(1) * pitch;
        pitch *= s.sizes[OUTPUT] + s.sizes[KERNEL].saturating_sub(1) * s.dilation;
    }
    let outputs: usize = spatial.iter().map(|s| s.sizes[OUTPUT]).product();
    let dense = spatial.iter().all(|s| s.stride == 1) && line as f64 <= LINE_ZEROS * outputs as f64;
    taps > 1 && dense && line >= LONG && Channels::find(plain, OUTPUT).is_some()
}

/// Which of a kernel's factors lie outside (0) and inside of its taps in the copy. `turns`: outputs' channels lie side by side.
fn depth(result: usize, turns: bool) -> impl Fn(&Plain) -> u8 {
    move |f| match (result, f.strides.map(|stride| stride.is_some())) {
        (_, [true, true, _]) => 0,
        (KERNEL, [_, output, _]) => 1 + u8::from(output != turns),
        _ => u8::from(f.strides[result].is_none()),
    }
}

/// The dims of a bordered copy that all views lie in; none where they lie in the tensor itself, unless a copy is `needed`.
fn bordered(views: &[(usize, View)], spatial: &[Spatial], moved: usize, mut needed: bool) -> Option<Vec<BorderDim>> {
    let dim = |d: usize| {
        let s = &spatial[d];
        let reaches = views.iter().map(|(_, view)| view.dims[d].reach());
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

/// The factor along which the first of these tensors, and the others with planes of about that size, are copied in chunks, and how many at a
/// time.
fn chunk_factor(plain: &[Plain], copied: &[usize], dims: &[BorderDim]) -> Option<(usize, usize)> {
    // Samples: the kernel's factors are not cut.
    let samples = (0..plain.len()).filter(|&f| plain[f].size > 1 && plain[f].strides[KERNEL].is_none());
    let f = samples.max_by_key(|&f| plain[f].strides[copied[0]])?;
    plain[f].strides[copied[0]]?;
    let plane: usize = dims.iter().map(|dim| dim.size).product();
    let sample = |tensor: &usize| {
        let others = (0..plain.len()).filter(|&g| g != f && plain[g].strides[*tensor].is_some());
        others.map(|g| plain[g].size).product::<usize>() * plane
    };
    let most = CHUNK / copied.iter().map(sample).max().unwrap_or(0).max(1);
    // As many as are needed, none much larger than the others.
    let chunks = plain[f].size.div_ceil(most.clamp(1, plain[f].size));
    Some((f, plain[f].size.div_ceil(chunks)))
}

impl Channels {
    /// Those of the image (output) that the kernel has too, and the output (image) does not.
    fn find(plain: &[Plain], moved: usize) -> Option<Channels> {
        let found = plain.iter().enumerate().filter_map(|(factor, f)| {
            match (f.strides[moved], f.strides[1 - moved], f.strides[KERNEL]) {
                (Some(stride), None, Some(_)) if f.size >= CHANNELS => Some(Channels { factor, size: f.size, stride }),
                _ => None,
            }
        });
        found.max_by_key(|channels| channels.size)
    }
}

impl<E: Element> Border<E> {
    fn new(dims: Vec<BorderDim>, moved: usize, channels: Option<Channels>, parts: [&[Plain]; 2], pack: Pack<E>) -> Border<E> {
        let places: usize = dims.iter().map(|dim| dim.size).product();
        let plane = places * channels.map_or(1, |channels| channels.size);
        let mut border = Border { planes: Default::default(), dims, channels, pack, plane, elements: 0 };
        border.planes = parts.map(|plain| border.offsets(plain, moved));
        border.elements = border.planes.iter().map(|planes| planes.len() * plane).max().unwrap_or(0);
        border
    }

    /// Outputs as they are, but with their channels side by side, and where dims of an image are given, as far apart as these say.
    fn of_outputs(
        plain: &[Plain],
        spatial: &[Spatial],
        pitch: Option<&[BorderDim]>,
        parts: [&[Plain]; 2],
        pack: Pack<E>,
    ) -> Option<Border<E>> {
        let dim = |(d, s): (usize, &Spatial)| {
            let count = s.sizes[OUTPUT];
            let size = pitch.filter(|_| d > 0).map_or(count, |dims| dims[d].size);
            BorderDim { size, origin: 0, from: 0, count, stride: s.strides[OUTPUT] }
        };
        let channels = Channels::find(plain, OUTPUT)?;
        Some(Border::new(spatial.iter().enumerate().map(dim).collect(), OUTPUT, Some(channels), parts, pack))
    }

    /// Element strides of the plain factors in the copy: as in the tensor, outermost first, but for the channels.
    fn plain_strides(&self, plain: &[Plain], moved: usize) -> Vec<Option<usize>> {
        let inner = self.channels.map(|channels| channels.factor);
        let mut order: Vec<usize> =
            (0..plain.len()).filter(|&f| plain[f].strides[moved].is_some() && Some(f) != inner).collect();
        order.sort_by_key(|&f| plain[f].strides[moved]);
        let (mut strides, mut stride) = (vec![None; plain.len()], self.plane);
        for f in order {
            strides[f] = Some(stride);
            stride *= plain[f].size;
        }
        if let Some(f) = inner {
            strides[f] = Some(1);
        }
        strides
    }

    fn lay_out(&self, layout: &mut Layout, moved: usize) {
        let strides = self.plain_strides(&layout.plain, moved);
        for (plain, stride) in layout.plain.iter_mut().zip(strides) {
            plain.strides[moved] = stride;
        }
        for (d, dim) in self.dims.iter().enumerate() {
            layout.spatial[d][moved] = self.stride(d);
            layout.low[d] = dim.origin;
        }
    }

    fn stride(&self, dim: usize) -> usize {
        let inner = self.channels.map_or(1, |channels| channels.size);
        self.dims[dim + 1..].iter().map(|dim| dim.size).product::<usize>() * inner
    }

    fn offsets(&self, plain: &[Plain], moved: usize) -> Vec<[usize; 2]> {
        let mut all = vec![[0; 2]];
        let strides = self.plain_strides(plain, moved);
        for (f, (factor, stride)) in plain.iter().zip(strides).enumerate() {
            let (Some(from), Some(to)) = (factor.strides[moved], stride) else { continue };
            if self.channels.is_none_or(|channels| channels.factor != f) {
                all = all.iter().flat_map(|at| (0..factor.size).map(move |i| [at[0] + i * from, at[1] + i * to])).collect();
            }
        }
        all
    }

    fn run(&self, pool: &Pool, planes: &[[usize; 2]], from: &[E], to: &mut [E]) {
        assert!(to.len() >= planes.len() * self.plane, "{} elements of scratch for {}", to.len(), planes.len() * self.plane);
        let target = SharedPtr::new(to.as_mut_ptr());
        // Small planes go together, a function of shapes only.
        let together = (1 << 13) / self.plane.max(1) + 1;
        pool.run(planes.len().div_ceil(together), planes.len() * self.plane, &|_, chunk| {
            for plane in &planes[chunk * together..planes.len().min((chunk + 1) * together)] {
                // SAFETY: planes are disjoint parts of `to`, whose length was compared.
                let to = unsafe { std::slice::from_raw_parts_mut(target.get().add(plane[1]), self.plane) };
                to.fill(E::ZERO);
                match self.channels {
                    Some(channels) => self.copy_turned(&self.dims, channels, &from[plane[0]..], to),
                    None => copy(&self.dims, &from[plane[0]..], to),
                }
            }
        });
    }

    /// As `copy`, of all channels, which lie inside of the last dim.
    fn copy_turned(&self, dims: &[BorderDim], channels: Channels, from: &[E], to: &mut [E]) {
        let Some((dim, rest)) = dims.split_first() else { return };
        let inner: usize = rest.iter().map(|dim| dim.size).product::<usize>() * channels.size;
        let first = (dim.from as isize - dim.origin) as usize;
        if !rest.is_empty() {
            for i in 0..dim.count {
                self.copy_turned(rest, channels, &from[(dim.from + i) * dim.stride..], &mut to[(first + i) * inner..]);
            }
        } else if dim.count > 0 {
            let (from, to) = (&from[dim.from * dim.stride..], &mut to[first * channels.size..]);
            let reach = (channels.size - 1) * channels.stride + (dim.count - 1) * dim.stride;
            assert!(reach < from.len() && dim.count * channels.size <= to.len(), "a plane within its tensor");
            let source = Source { from: from.as_ptr(), stride: channels.stride as isize, step: dim.stride as isize };
            let size = Size { rows: channels.size, width: channels.size, apart: channels.size, steps: dim.count };
            // SAFETY: the reach of both was compared with their lengths.
            unsafe { (self.pack)(source, to.as_mut_ptr(), size) };
        }
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
