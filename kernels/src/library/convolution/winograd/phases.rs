//! What is done with a piece of tiles, or with the taps: turned over, transformed, multiplied, written.

use super::{IMAGE, IN, KERNEL, LANES, OUT, OUTPUT, PLACES, Plane, Side, TAP_WORK, TAPS, TILE_WORK, TOGETHER, Winograd};
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};
use crate::library::SharedPtr;
use crate::library::microkernel::Block;
use crate::library::pack::{Size, Source};
use crate::library::simd::Element;
use crate::library::transform::{Tiles, Transform};
use smallvec::SmallVec;
use std::ops::Range;

/// Who works at a piece: all threads, or one of them, of whose scratch so many elements are in use.
pub(super) enum Team<'a> {
    All(&'a Pool),
    One(&'a mut Worker, usize),
}

impl Team<'_> {
    /// Runs `body(scratch, chunk)` for so many chunks, which take so many nanoseconds.
    fn run<E: Element>(&mut self, chunks: usize, cost: usize, body: &(dyn Fn(*mut E, usize) + Sync)) {
        match self {
            Team::All(pool) => pool.run(chunks, cost, &|worker, chunk| body(worker.scratch().cast(), chunk)),
            Team::One(worker, used) => {
                // SAFETY: what is in use is a part of the scratch.
                let scratch = unsafe { worker.scratch().cast::<E>().add(*used) };
                (0..chunks).for_each(|chunk| body(scratch, chunk));
            }
        }
    }

    /// Lines to do at once, of so many by all: every thread has some, and there is room for what `elements` tells that they need.
    fn lines<E>(&self, all: usize, elements: impl Fn(usize) -> usize) -> usize {
        let (threads, used) = match self {
            Team::All(pool) => (2 * pool.threads(), 0),
            Team::One(_, used) => (1, *used),
        };
        let room = WORKER_BYTES / size_of::<E>() - used;
        (1..=all.div_ceil(threads)).rev().find(|&lines| elements(lines) <= room).unwrap_or(1)
    }
}

/// Where what is transformed lies: of taps, or sums of their gradients; of tiles, place by place, [tile][channel].
pub(super) struct Spaces<E> {
    pub taps: SharedPtr<E>,
    pub inner: SharedPtr<E>,
    pub outer: SharedPtr<E>,
}

impl<E> Clone for Spaces<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Spaces<E> {}

/// What is computed: by tensor, what is read; what is written, or added to; of which outer channels.
pub(super) struct Job<'a, E> {
    pub tensors: [&'a [E]; 3],
    pub result: SharedPtr<E>,
    pub accumulate: bool,
    pub part: Range<usize>,
}

/// Lines of a piece that lie in one plane.
#[derive(Clone, Copy)]
struct Run {
    sample: usize,
    /// The first line in its plane, and how many.
    first: usize,
    lines: usize,
    /// Tiles of the piece before them.
    at: usize,
}

impl<E: Element> Winograd<E> {
    /// A piece of a result.
    pub(super) fn write_piece(&self, team: &mut Team<'_>, job: &Job<'_, E>, lines: Range<usize>, spaces: Spaces<E>) {
        let tiles = lines.len() * self.grid()[1];
        let runs = self.runs(lines);
        self.transform_inner(team, job, &runs, spaces);
        self.multiply(team, &job.part, tiles, spaces);
        self.write(team, job, &runs, spaces);
    }

    /// What a piece adds to one of the sums of a kernel's gradient, or what that begins with.
    pub(super) fn sum_piece(
        &self,
        team: &mut Team<'_>,
        job: &Job<'_, E>,
        lines: Range<usize>,
        into: (usize, bool),
        spaces: Spaces<E>,
    ) {
        let tiles = lines.len() * self.grid()[1];
        let runs = self.runs(lines);
        self.transform_inner(team, job, &runs, spaces);
        self.for_each(team, &runs, &job.part, &|scratch, run, channels| {
            // SAFETY: runs and channels are apart.
            unsafe { self.outer_tiles(scratch, job, run, &channels, spaces.outer) };
        });
        self.sum_tiles(team, &job.part, tiles, into, spaces);
    }

    /// Lines by the planes that they lie in.
    fn runs(&self, lines: Range<usize>) -> SmallVec<[Run; 16]> {
        let ([tall, wide], mut runs, mut line) = (self.grid(), SmallVec::new(), lines.start);
        while line < lines.end {
            let (sample, first) = (line / tall, line % tall);
            let count = (tall - first).min(lines.end - line);
            runs.push(Run { sample, first, lines: count, at: (line - lines.start) * wide });
            line += count;
        }
        runs
    }

    fn transform_inner(&self, team: &mut Team<'_>, job: &Job<'_, E>, runs: &[Run], spaces: Spaces<E>) {
        self.for_each(team, runs, &(0..self.inner.size), &|scratch, run, channels| {
            // SAFETY: runs and channels are apart.
            unsafe { self.inner_tiles(scratch, job.tensors[self.moved], run, &channels, spaces.inner) };
        });
    }

    /// Runs `body(scratch, run, channels)` for all runs, cut so that all threads have some and their scratch holds it, and all channels.
    fn for_each(
        &self,
        team: &mut Team<'_>,
        runs: &[Run],
        channels: &Range<usize>,
        body: &(dyn Fn(*mut E, Run, Range<usize>) + Sync),
    ) {
        let wide = self.grid()[1];
        let blocks = channels.len().div_ceil(TOGETHER);
        let lines: usize = runs.iter().map(|run| run.lines).sum();
        let most = team.lines::<E>(lines * blocks, |lines| self.turned(lines));
        let cut = |run: &Run| {
            let run = *run;
            let part = move |from: usize| {
                let lines = most.min(run.lines - from);
                Run { first: run.first + from, lines, at: run.at + from * wide, ..run }
            };
            (0..run.lines).step_by(most).map(part)
        };
        let runs: SmallVec<[Run; 16]> = runs.iter().flat_map(cut).collect();
        // Nanoseconds.
        let cost = lines * wide * channels.len() * TILE_WORK / 128;
        team.run(runs.len() * blocks, cost, &|scratch, chunk| {
            let first = channels.start + chunk % blocks * TOGETHER;
            body(scratch, runs[chunk / blocks], first..channels.end.min(first + TOGETHER));
        });
    }

    /// Taps of some outer channels: place by place, panel by panel, [inner channel][column].
    pub(super) fn transform_taps(&self, pool: &Pool, job: &Job<'_, E>, taps: SharedPtr<E>) {
        let (kernel, part) = (job.tensors[KERNEL], &job.part);
        let (columns, depth) = (self.kernels.columns, self.inner.size);
        let panels = part.len().div_ceil(columns);
        let together = (WORKER_BYTES / size_of::<E>() / TAPS / TAPS / columns.max(LANES)).min(TOGETHER);
        let blocks = depth.div_ceil(together);
        let place = (panels * depth * columns) as isize;
        // A panel of few columns is padded to whole vectors in scratch only.
        let lanes = columns.next_multiple_of(LANES);
        pool.run(panels * blocks, part.len() * depth * TAP_WORK / 128, &|worker, chunk| {
            let (panel, first) = (chunk / blocks, chunk % blocks * together);
            let (column, count) = (part.start + panel * columns, together.min(depth - first));
            let rows = columns.min(part.end - column);
            let scratch = worker.scratch().cast::<E>();
            let turned = (TAPS * lanes) as isize;
            let reversed = self.form.result == IMAGE;
            let (start, sign) = if reversed { ((TAPS * TAPS - 1) * lanes, -1) } else { (0, 1) };
            for i in 0..count {
                let at = column * self.outer.kernel + (first + i) * self.inner.kernel;
                let source = Source { from: kernel[at..].as_ptr(), stride: self.outer.kernel as isize, step: 1 };
                let size = Size { rows, width: lanes, apart: lanes, steps: TAPS * TAPS };
                // SAFETY: the kernel's reach was compared; scratch holds the taps of `together` channels.
                unsafe { (self.kernels.pack)(source, scratch.add(i * TAPS * TAPS * lanes), size) };
            }
            // SAFETY: as above; the space holds all places of a part's panels, and chunks are disjoint.
            unsafe {
                (self.kernels.transforms.taps)(&Tiles {
                    from: scratch.add(start),
                    from_strides: [sign * turned, sign * lanes as isize],
                    from_step: (TAPS * TAPS * lanes) as isize,
                    to: taps.get().add((panel * depth + first) * columns),
                    to_strides: [IN as isize * place, place],
                    to_step: columns as isize,
                    lanes: columns,
                    count,
                });
            }
        });
    }

    /// The moved tensor's tiles of a run and so many channels.
    ///
    /// # Safety
    /// `to` holds them; nothing else touches these tiles.
    unsafe fn inner_tiles(&self, scratch: *mut E, tensor: &[E], run: Run, channels: &Range<usize>, to: SharedPtr<E>) {
        let (wide, pitch) = (self.grid()[1], self.inner.pitch());
        let row = OUT * wide + IN - OUT;
        let window = [(OUT * run.first) as isize - self.pads[0], -self.pads[1]];
        let extent = [OUT * run.lines + IN - OUT, row];
        let from = self.samples[run.sample][self.moved];
        let to = to.get().wrapping_add(channels.start);
        // SAFETY: the caller's.
        unsafe {
            self.turn(&tensor[from..], (&self.inner, &self.plane), channels, (window, extent), scratch);
            self.transform_lines(self.kernels.transforms.image, (scratch, row), (run, channels.len()), (to, pitch));
        }
    }

    /// Transforms what is turned over, rows of so many elements, into the tiles of a run and so many channels, which are so far apart.
    ///
    /// # Safety
    /// As `Transform`, for each line.
    unsafe fn transform_lines(
        &self,
        transform: Transform<E>,
        (from, row): (*const E, usize),
        (run, channels): (Run, usize),
        (to, pitch): (*mut E, usize),
    ) {
        let (wide, place) = (self.grid()[1], (self.tiles() * pitch) as isize);
        for line in 0..run.lines {
            // SAFETY: the caller's.
            unsafe {
                transform(&Tiles {
                    from: from.add(OUT * line * row * TOGETHER),
                    from_strides: [(row * TOGETHER) as isize, TOGETHER as isize],
                    from_step: (OUT * TOGETHER) as isize,
                    to: to.add((run.at + line * wide) * pitch),
                    to_strides: [IN as isize * place, place],
                    to_step: pitch as isize,
                    lanes: channels.next_multiple_of(LANES),
                    count: wide,
                });
            }
        }
    }

    /// Some channels of `extent` elements of a plane from `window` on, side by side, with zeros around.
    ///
    /// # Safety
    /// `to` holds so many elements of `TOGETHER` channels.
    unsafe fn turn(
        &self,
        from: &[E],
        (side, plane): (&Side, &Plane),
        channels: &Range<usize>,
        (window, extent): ([isize; 2], [usize; 2]),
        to: *mut E,
    ) {
        let there = |d: usize| {
            let begin = (-window[d]).clamp(0, extent[d] as isize) as usize;
            let end = (plane.sizes[d] as isize - window[d]).clamp(begin as isize, extent[d] as isize) as usize;
            begin..end
        };
        let [rows, columns] = [there(0), there(1)];
        let (row, width) = (extent[1] * TOGETHER, channels.len().next_multiple_of(LANES));
        for i in 0..extent[0] {
            // SAFETY: the caller's; what is there of a row lies in its plane, whose reach was compared.
            unsafe {
                let to = to.add(i * row);
                if !rows.contains(&i) || columns.is_empty() {
                    std::slice::from_raw_parts_mut(to, row).fill(E::ZERO);
                    continue;
                }
                std::slice::from_raw_parts_mut(to, columns.start * TOGETHER).fill(E::ZERO);
                std::slice::from_raw_parts_mut(to.add(columns.end * TOGETHER), row - columns.end * TOGETHER).fill(E::ZERO);
                let (y, x) = ((window[0] + i as isize) as usize, (window[1] + columns.start as isize) as usize);
                let at = channels.start * side.stride + y * plane.strides[0] + x * plane.strides[1];
                let source =
                    Source { from: from[at..].as_ptr(), stride: side.stride as isize, step: plane.strides[1] as isize };
                let size = Size { rows: channels.len(), width, apart: TOGETHER, steps: columns.len() };
                (self.kernels.pack)(source, to.add(columns.start * TOGETHER), size);
            }
        }
    }

    /// At each place, tiles times taps.
    fn multiply(&self, team: &mut Team<'_>, part: &Range<usize>, tiles: usize, spaces: Spaces<E>) {
        let (columns, depth, pitch) = (self.kernels.columns, self.inner.size, self.inner.pitch());
        let panels = part.len().div_ceil(columns);
        let cost = PLACES * tiles * depth * part.len() / (8 * self.kernels.lanes);
        team.run(PLACES * panels, cost, &|_: *mut E, chunk| {
            let (place, panel) = (chunk / panels, chunk % panels);
            // SAFETY: the workspace holds the places of so many tiles and panels.
            unsafe {
                let a = spaces.inner.get().add(place * self.tiles() * pitch).cast_const();
                let b = spaces.taps.get().add((place * panels + panel) * depth * columns);
                let c = spaces.outer.get().add(place * self.tiles() * self.part + panel * columns);
                let block = Block {
                    depth,
                    a,
                    a_row: pitch as isize,
                    a_step: 1,
                    b,
                    b_step: columns as isize,
                    b_padded: true,
                    c,
                    c_row: self.part as isize,
                    c_column: 1,
                    columns: columns.min((part.len() - panel * columns).next_multiple_of(self.kernels.lanes)),
                    alpha: E::ONE,
                    beta: E::ZERO,
                };
                self.rows(tiles, |first, rows| {
                    let block = Block { a: a.add(first * pitch), c: c.add(first * self.part), ..block };
                    self.kernels.run(rows, &block);
                });
            }
        });
    }

    /// Calls `body(first, count)` for blocks of rows, about equally many each.
    fn rows(&self, count: usize, mut body: impl FnMut(usize, usize)) {
        let blocks = count.div_ceil(self.kernels.rows);
        (0..blocks).for_each(|i| {
            let [first, end] = [i, i + 1].map(|i| i * count / blocks);
            body(first, end - first);
        });
    }

    /// Results of some outer channels.
    fn write(&self, team: &mut Team<'_>, job: &Job<'_, E>, runs: &[Run], spaces: Spaces<E>) {
        let Job { result, accumulate, part, .. } = job;
        let (wide, place) = (self.grid()[1], (self.tiles() * self.part) as isize);
        let offsets: [usize; TOGETHER] = std::array::from_fn(|i| i * self.outer.stride);
        self.for_each(team, runs, part, &|scratch, run, channels| {
            let row = OUT * wide * TOGETHER;
            let [height, width] = self.tiled.sizes;
            let at = self.samples[run.sample][self.form.result] + channels.start * self.outer.stride;
            for line in 0..run.lines {
                let from = (run.at + line * wide) * self.part + channels.start - part.start;
                // SAFETY: `for_each` keeps lines and channels apart; scratch holds two rows, and as much for what is added; the result's reach
                // was compared.
                unsafe {
                    (self.kernels.transforms.output)(&Tiles {
                        from: spaces.outer.get().add(from).cast_const(),
                        from_strides: [IN as isize * place, place],
                        from_step: self.part as isize,
                        to: scratch,
                        to_strides: [row as isize, TOGETHER as isize],
                        to_step: (OUT * TOGETHER) as isize,
                        lanes: channels.len().next_multiple_of(LANES),
                        count: wide,
                    });
                    let first = OUT * (run.first + line);
                    for y in first..height.min(first + OUT) {
                        let from = scratch.add((y - first) * row);
                        let to = result.get().add(at + y * self.tiled.strides[0]);
                        self.write_row(*accumulate, (from, to), width, &offsets[..channels.len()], scratch.add(OUT * row));
                    }
                }
            }
        });
    }

    /// Tiles of some outer channels of a run, of what a kernel's gradient is summed over.
    ///
    /// # Safety
    /// `to` holds them; nothing else touches these tiles.
    unsafe fn outer_tiles(&self, scratch: *mut E, job: &Job<'_, E>, run: Run, channels: &Range<usize>, to: SharedPtr<E>) {
        let row = OUT * self.grid()[1];
        let from = &job.tensors[OUTPUT][self.samples[run.sample][OUTPUT]..];
        let (window, extent) = ([(OUT * run.first) as isize, 0], [OUT * run.lines, row]);
        let to = to.get().wrapping_add(channels.start - job.part.start);
        let transform = self.kernels.transforms.output_gradient;
        // SAFETY: the caller's; `for_each` keeps runs to what scratch has room for.
        unsafe {
            self.turn(from, (&self.outer, &self.tiled), channels, (window, extent), scratch);
            self.transform_lines(transform, (scratch, row), (run, channels.len()), (to, self.part));
        }
    }

    /// At each place, products of both sides' tiles, summed over these; onto what there is where `adds`.
    fn sum_tiles(&self, team: &mut Team<'_>, part: &Range<usize>, tiles: usize, (sum, adds): (usize, bool), spaces: Spaces<E>) {
        let (columns, pitch) = (self.kernels.columns, self.inner.pitch());
        let panels = pitch.div_ceil(columns);
        let cost = PLACES * tiles * pitch * part.len() / (8 * self.kernels.lanes);
        team.run(PLACES * panels, cost, &|_: *mut E, chunk| {
            let (place, column) = (chunk / panels, chunk % panels * columns);
            // SAFETY: the workspace holds the places of so many tiles and taps; chunks have columns of their own.
            unsafe {
                let a = spaces.outer.get().add(place * self.tiles() * self.part).cast_const();
                let b = spaces.inner.get().add(place * self.tiles() * pitch + column).cast_const();
                let c = spaces.taps.get().add((sum * PLACES + place) * self.part * pitch + column);
                let block = Block {
                    depth: tiles,
                    a,
                    a_row: 1,
                    a_step: self.part as isize,
                    b,
                    b_step: pitch as isize,
                    b_padded: true,
                    c,
                    c_row: pitch as isize,
                    c_column: 1,
                    columns: columns.min(pitch - column),
                    alpha: E::ONE,
                    beta: if adds { E::ONE } else { E::ZERO },
                };
                self.rows(part.len(), |first, rows| {
                    self.kernels.run(rows, &Block { a: a.add(first), c: c.add(first * pitch), ..block });
                });
            }
        });
    }

    /// The kernel's gradient of some outer channels.
    pub(super) fn write_taps(&self, pool: &Pool, job: &Job<'_, E>, taps: SharedPtr<E>) {
        let Job { result: kernel, accumulate, part, .. } = job;
        let (pitch, blocks) = (self.inner.pitch(), self.inner.size.div_ceil(TOGETHER));
        let offsets: [usize; TOGETHER] = std::array::from_fn(|i| i * self.inner.kernel);
        pool.run(part.len() * blocks, part.len() * pitch * TAP_WORK / 128, &|worker, chunk| {
            let (row, first) = (chunk / blocks, chunk % blocks * TOGETHER);
            let (scratch, count) = (worker.scratch().cast::<E>(), TOGETHER.min(self.inner.size - first));
            // SAFETY: the workspace holds all places; scratch holds the taps of `TOGETHER` channels twice; the kernel's reach was compared.
            unsafe {
                let (lanes, sums) = (count.next_multiple_of(LANES), scratch.add(2 * TAPS * TAPS * TOGETHER));
                self.add_up(taps.get().add(row * pitch + first), lanes, sums);
                (self.kernels.transforms.taps_gradient)(&Tiles {
                    from: sums.cast_const(),
                    from_strides: [(IN * TOGETHER) as isize, TOGETHER as isize],
                    from_step: 0,
                    to: scratch,
                    to_strides: [(TAPS * TOGETHER) as isize, TOGETHER as isize],
                    to_step: 0,
                    lanes,
                    count: 1,
                });
                let to = kernel.get().add((part.start + row) * self.outer.kernel + first * self.inner.kernel);
                let rest = scratch.add(TAPS * TAPS * TOGETHER);
                self.write_row(*accumulate, (scratch, to), TAPS * TAPS, &offsets[..count], rest);
            }
        });
    }

    /// All sums of some channels at each place, side by side.
    ///
    /// # Safety
    /// They can be read, and `to` written.
    unsafe fn add_up(&self, from: *const E, lanes: usize, to: *mut E) {
        let place = self.part * self.inner.pitch();
        for (sum, i) in (0..self.sums).flat_map(|sum| (0..PLACES).map(move |i| (sum, i))) {
            // SAFETY: the caller's.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(from.add((sum * PLACES + i) * place), lanes);
                (from, std::slice::from_raw_parts_mut(to.add(i * TOGETHER), lanes))
            };
            match sum {
                0 => to.copy_from_slice(from),
                _ => std::iter::zip(to, from).for_each(|(to, from)| *to = to.plus(*from)),
            }
        }
    }

    /// So many elements of some channels, which lie side by side in `from`, to where each channel has its own.
    ///
    /// # Safety
    /// All of that can be read, and written; `rest` has room for it once more.
    unsafe fn write_row(
        &self,
        accumulate: bool,
        (from, to): (*const E, *mut E),
        length: usize,
        offsets: &[usize],
        rest: *mut E,
    ) {
        let source = Source { from, stride: TOGETHER as isize, step: 1 };
        // SAFETY: the caller's.
        unsafe {
            if !accumulate {
                return (self.kernels.spread)(source, to, offsets, length);
            }
            let mut apart = [0; TOGETHER];
            apart.iter_mut().enumerate().for_each(|(i, at)| *at = i * length);
            (self.kernels.spread)(source, rest, &apart[..offsets.len()], length);
            for (from, offset) in std::iter::zip(apart, offsets) {
                let (from, to) = (rest.add(from), to.add(*offset));
                (0..length).for_each(|i| *to.add(i) = (*to.add(i)).plus(*from.add(i)));
            }
        }
    }
}
