//! Convolutions with windows of 3 × 3 by fewer multiplications: Winograd's F(2 × 2, 3 × 3) (Lavin and Gray 2016, arXiv 1509.09308).
//!
//! A tile of 2 × 2 outputs meets 4 × 4 elements of the image. Transformed (`transform`), tiles and taps have 16 places each, and at each place
//! channels are summed by a product of matrices of their own: 16 multiplications instead of 36. The gradient of an image is the
//! convolution of the output's with the taps reversed; that of a kernel sums over tiles at each place, and is transformed back once.
//!
//! Everything lies with channels side by side, so that tiles of any plane are vectors: what windows move through is turned over as
//! it is read, results as they are written. Tiles go a piece at a time, a few lines that stay in the caches with their products: each
//! thread has a piece of its own where its scratch holds it, else all work at one, phase by phase (`phases`). Channels go in parts, since
//! the transformed taps of many would be larger than the kernel itself. The gradient of a kernel is summed in as many sums as its size
//! says, whatever the number of threads.
//!
//! An output is made of what its window meets, and so is an image's gradient; but sums and differences are rounded before they meet the taps,
//! so that what is rounded is relative to the largest element and to all taps, one that is zero too. In a kernel's gradient what other taps
//! meet cancels: what is not finite in an image may reach more taps than it meets.

mod phases;

use super::{Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial, reached};
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, WORKER_BYTES};
use crate::library::SharedPtr;
use crate::library::microkernel::Kernels;
use crate::library::simd::Element;
use phases::{Job, Spaces, Team};
use std::ops::Range;

/// Outputs of a tile along a dim, elements of the image that they meet, taps, places.
const OUT: usize = 2;
const IN: usize = 4;
const TAPS: usize = 3;
const PLACES: usize = IN * IN;

/// What channels are padded to a multiple of: the lanes of the longest vector.
const LANES: usize = 16;
/// Channels that are turned over together.
const TOGETHER: usize = 32;
/// Fewest channels on either side: the vectors of fewer would be padding.
const CHANNELS: usize = 16;
/// Elements of transformed taps at a time, of at least so many outer channels: for each part of these the moved tensor's tiles are transformed
/// again. Elements of transformed tiles with their products.
const TAP_ELEMENTS: usize = 1 << 19;
const PART: usize = 128;
const TILE_ELEMENTS: usize = 2 << 16;
/// Fewest tiles at a time: for each the taps are read once more.
const TILES: usize = 36;

/// Most sums of a kernel's gradient, and tiles that are worth one.
const SUMS: usize = 4;
const SUM_TILES: usize = 256;
/// Fewest tiles of a thread's piece.
const PIECE: usize = 24;

/// What transforms take, in multiply-adds: of a tile's channel, and of a kernel's.
const TILE_WORK: usize = 160;
const TAP_WORK: usize = 160;

/// Channels that windows move through, or the others: how many, and how far apart in their tensor and in the kernel.
#[derive(Clone, Copy)]
struct Side {
    size: usize,
    stride: usize,
    kernel: usize,
}

impl Side {
    fn pitch(&self) -> usize {
        self.size.next_multiple_of(LANES)
    }
}

/// A plane of a tensor: sizes and strides of both dims.
#[derive(Clone, Copy)]
struct Plane {
    sizes: [usize; 2],
    strides: [usize; 2],
}

/// A convolution by transformed tiles.
pub(super) struct Winograd<E> {
    form: Form,
    kernels: Kernels<E>,
    /// Offsets of samples.
    samples: Vec<[usize; 3]>,
    /// What windows move through: its tensor, channels and plane, and how far before an output's place its window begins.
    moved: usize,
    inner: Side,
    plane: Plane,
    pads: [isize; 2],
    /// The other tensor that has tiles: the result, or what a kernel's gradient is summed over.
    outer: Side,
    tiled: Plane,
    /// Channels of the outer side at a time, lines of tiles, and sums of a kernel's gradient.
    part: usize,
    lines: usize,
    sums: usize,
    /// Elements that operands in their order, and the result, must have.
    reach: [usize; 3],
    flops: usize,
}

impl<E: Element> Winograd<E> {
    /// `None` where windows are others, channels few, or where products would take less time.
    pub fn new(form: Form, plain: &[Plain], spatial: &[Spatial], isa: Isa) -> Option<Winograd<E>> {
        let [down, across] = spatial else { return None };
        // What results are written along.
        let row = if form.result == IMAGE { IMAGE } else { OUTPUT };
        let is_window = |s: &Spatial| s.sizes[KERNEL] == TAPS && s.stride == 1 && s.dilation == 1;
        let taps_adjoin = down.strides[KERNEL] == TAPS && across.strides[KERNEL] == 1;
        if size_of::<E>() != 4 || across.strides[row] != 1 || ![down, across].into_iter().all(is_window) || !taps_adjoin {
            return None;
        }
        let (moved, tiled) = if form.result == IMAGE { (OUTPUT, IMAGE) } else { (IMAGE, OUTPUT) };
        let (samples, inner, outer) = sides(plain, moved, tiled)?;
        if inner.size.min(outer.size) < CHANNELS {
            return None;
        }
        let plane = |tensor: usize| {
            let [down, across] = [down, across].map(|s| (s.sizes[tensor], s.strides[tensor]));
            Plane { sizes: [down.0, across.0], strides: [down.1, across.1] }
        };
        let pads = [down, across].map(|s| if form.result == IMAGE { TAPS as isize - 1 - s.pad } else { s.pad });
        // What lies behind the last window is not read.
        let (mut from, onto) = (plane(moved), plane(tiled));
        for (d, size) in from.sizes.iter_mut().enumerate() {
            *size = (onto.sizes[d] as isize + TAPS as isize - 1 - pads[d]).clamp(0, *size as isize) as usize;
        }
        // Whole panels of all instruction sets, which then sum alike.
        let most = (TAP_ELEMENTS / PLACES / inner.pitch()).max(PART);
        let part = outer.size.div_ceil(outer.size.div_ceil(most)).next_multiple_of(TOGETHER);
        let mut planned = Winograd {
            form,
            kernels: E::kernels(isa),
            samples,
            moved,
            inner,
            plane: from,
            pads,
            outer,
            tiled: onto,
            part,
            lines: 1,
            sums: 1,
            reach: [form.operands[0], form.operands[1], form.result].map(|tensor| reached(tensor, plain, spatial)),
            flops: 0,
        };
        let [tall, wide] = planned.grid();
        if tall * wide * planned.samples.len() == 0 {
            return None;
        }
        let tiles = (TILE_ELEMENTS / PLACES / (inner.pitch() + planned.part)).max(TILES);
        let all = tall * planned.samples.len();
        planned.lines = (tiles / wide).clamp(1, all);
        if form.result == KERNEL {
            let most = SUMS.min(all.div_ceil(planned.lines)).min(all * wide / SUM_TILES).max(1);
            planned.sums = (TAP_ELEMENTS / planned.tap_elements()).clamp(1, most);
        }
        planned.flops = planned.worth(spatial)?;
        (planned.turned(1) <= WORKER_BYTES / size_of::<E>()).then_some(planned)
    }

    /// Multiplications and additions, of taps that meet their plane, if fewer tell.
    fn worth(&self, spatial: &[Spatial]) -> Option<usize> {
        let met = |s: &Spatial| -> usize {
            let inside = |y: usize, k: usize| (0..s.sizes[IMAGE] as isize).contains(&((y + k) as isize - s.pad));
            (0..s.sizes[OUTPUT]).map(|y| (0..TAPS).filter(|k| inside(y, *k)).count()).sum()
        };
        let (pairs, columns) = (self.inner.size * self.outer.size, self.outer.pitch());
        let plain = self.samples.len() * spatial.iter().map(met).product::<usize>() * pairs;
        let [tall, wide] = self.grid();
        let tiles = self.samples.len() * tall * wide;
        let again = self.outer.size.div_ceil(self.part);
        let transforms = tiles * TILE_WORK * (self.inner.size * again + self.outer.size) + TAP_WORK * pairs;
        // Products reach about three quarters of what a processor can, these some more.
        (PLACES * tiles * self.inner.size * columns + transforms < plain).then_some(2 * plain)
    }

    /// Tiles of a plane along both dims.
    fn grid(&self) -> [usize; 2] {
        self.tiled.sizes.map(|size| size.div_ceil(OUT))
    }

    /// Tiles at a time.
    fn tiles(&self) -> usize {
        self.lines * self.grid()[1]
    }

    /// Elements of transformed taps, or of a sum of their gradients; of a piece's tiles of both sides; and of what is turned over for so
    /// many lines, or written of one.
    fn tap_elements(&self) -> usize {
        PLACES * self.part * self.inner.pitch()
    }

    fn tile_elements(&self) -> [usize; 2] {
        [self.inner.pitch(), self.part].map(|channels| PLACES * self.tiles() * channels)
    }

    fn turned(&self, lines: usize) -> usize {
        (OUT * lines + IN) * (OUT * self.grid()[1] + IN) * TOGETHER
    }

    /// Whether so many threads work at pieces of their own, or each at a sum of its own.
    fn is_apart(&self, threads: usize) -> bool {
        let needs = self.tile_elements().into_iter().sum::<usize>() + self.turned(1);
        needs * size_of::<E>() <= WORKER_BYTES && (self.form.result != KERNEL || threads <= self.sums)
    }

    /// Multiplications and additions of one run by its definition.
    pub fn flops(&self) -> usize {
        self.flops
    }

    /// Elements of scratch that a run needs.
    pub fn workspace(&self) -> usize {
        let is_apart = self.is_apart(if self.form.result == KERNEL { usize::MAX } else { 1 });
        self.sums * self.tap_elements() + if is_apart { 0 } else { self.tile_elements().into_iter().sum() }
    }

    /// As `Convolution::run`.
    pub fn run(&self, pool: &Pool, accumulate: bool, a: &[E], b: &[E], result: &mut [E], workspace: &mut [E]) {
        let lengths = [a.len(), b.len(), result.len()];
        let is_long = std::iter::zip(lengths, self.reach).all(|(has, needs)| has >= needs);
        assert!(is_long, "{lengths:?} elements for {:?}", self.reach);
        assert!(workspace.len() >= self.workspace(), "{} elements of scratch for {}", workspace.len(), self.workspace());
        let mut tensors: [&[E]; 3] = [&[]; 3];
        (tensors[self.form.operands[0]], tensors[self.form.operands[1]]) = (a, b);
        let result = SharedPtr::new(result.as_mut_ptr());
        let (taps, tiles) = workspace.split_at_mut(self.sums * self.tap_elements());
        let (taps, tiles) = (SharedPtr::new(taps.as_mut_ptr()), SharedPtr::new(tiles.as_mut_ptr()));
        for first in (0..self.outer.size).step_by(self.part) {
            let part = first..self.outer.size.min(first + self.part);
            let job = Job { tensors, result, accumulate, part };
            if self.form.result == KERNEL {
                self.pieces(pool, self.sums, (taps, tiles), &|team, sum, spaces| {
                    let [first, end] = [sum, sum + 1].map(|sum| sum * self.count(self.lines) / self.sums);
                    for piece in first..end {
                        self.sum_piece(team, &job, self.piece(piece, self.lines), (sum, piece > first), spaces);
                    }
                });
                self.write_taps(pool, &job, taps);
                continue;
            }
            self.transform_taps(pool, &job, taps);
            let lines = self.lines_for(pool.threads());
            self.pieces(pool, self.count(lines), (taps, tiles), &|team, piece, spaces| {
                self.write_piece(team, &job, self.piece(piece, lines), spaces);
            });
        }
    }

    /// Lines of a piece of a result: as many pieces for each thread, where threads work apart.
    fn lines_for(&self, threads: usize) -> usize {
        if !self.is_apart(threads) {
            return self.lines;
        }
        let pieces = self.count(self.lines).next_multiple_of(threads);
        self.count(pieces).max(PIECE.div_ceil(self.grid()[1])).min(self.lines)
    }

    /// Pieces of so many lines.
    fn count(&self, lines: usize) -> usize {
        (self.grid()[0] * self.samples.len()).div_ceil(lines)
    }

    fn piece(&self, piece: usize, lines: usize) -> Range<usize> {
        piece * lines..((piece + 1) * lines).min(self.grid()[0] * self.samples.len())
    }

    /// Runs `body(team, number, spaces)` for so many numbers: each by a thread of its own, or one after the other by all of them.
    fn pieces(
        &self,
        pool: &Pool,
        count: usize,
        (taps, tiles): (SharedPtr<E>, SharedPtr<E>),
        body: &(dyn Fn(&mut Team<'_>, usize, Spaces<E>) + Sync),
    ) {
        let [inner, outer] = self.tile_elements();
        // SAFETY: the workspace, and a thread's scratch where threads work apart, hold the tiles of both sides.
        let spaces =
            |tiles: *mut E| Spaces { taps, inner: SharedPtr::new(tiles), outer: SharedPtr::new(unsafe { tiles.add(inner) }) };
        if !self.is_apart(pool.threads()) {
            return (0..count).for_each(|number| body(&mut Team::All(pool), number, spaces(tiles.get())));
        }
        pool.run(count, self.flops / (32 * self.kernels.lanes), &|worker, number| {
            let tiles = worker.scratch().cast::<E>();
            body(&mut Team::One(worker, inner + outer), number, spaces(tiles));
        });
    }
}

/// Offsets of samples, and the channels of either side; none where there are groups, or several factors of channels.
fn sides(plain: &[Plain], moved: usize, tiled: usize) -> Option<(Vec<[usize; 3]>, Side, Side)> {
    let (mut samples, mut inner, mut outer) = (vec![[0; 3]], None, None);
    for f in plain {
        let [image, output, kernel] = f.strides;
        let side = |stride: usize, kernel: usize| Some(Side { size: f.size, stride, kernel });
        match (f.strides[moved], f.strides[tiled], kernel) {
            (Some(_), Some(_), None) => {
                let step = [image.unwrap_or(0), output.unwrap_or(0), 0];
                let next = |at: &[usize; 3], i: usize| [at[0] + i * step[0], at[1] + i * step[1], 0];
                samples = samples.iter().flat_map(|at| (0..f.size).map(move |i| next(at, i))).collect();
            }
            (Some(stride), None, Some(kernel)) if inner.is_none() => inner = side(stride, kernel),
            (None, Some(stride), Some(kernel)) if outer.is_none() => outer = side(stride, kernel),
            _ if f.size == 1 => {}
            _ => return None,
        }
    }
    Some((samples, inner?, outer?))
}
