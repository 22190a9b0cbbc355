//! The loops around the microkernel: which panels are packed where, and which thread computes which block of C.
//!
//! Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). Rows, columns and the contracted dim are *lists*
//! of panels with offsets, so that a dim made of several strided dims needs no copy. The contracted dim is cut into pieces by its
//! length alone; a thread owns whole elements of C. Hence the same bits for every number of threads. Threads pack for themselves what
//! their blocks need, some of it more than once: a copy in a core's own cache costs less than waiting for each other's.

mod ahead;
mod panels;

use super::factors::{Packing, Place};
use super::microkernel::{Beside, Block, Kernels, MAX_COLUMNS, MAX_ROWS, Stretch, VECTOR_PACE, VECTOR_ROWS};
use super::simd::{Element, LINE, prefetch};
use crate::cpu::pool::{BREAK_EVEN_NS, Pool, WORKER_BYTES, Worker};
use ahead::{Ahead, Due};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Most words (steps, or pairs of them) of the contracted dim that one pass over C takes, where the rows of A are read as they lie. Panels
/// of so many stream from the second-level cache as fast as they are multiplied, and C, which lies farther away, is read and written seldom.
pub(super) const PIECE: usize = 768;
/// The same where A is packed: more columns of B fit beside it, for each group of which A would be packed again.
pub(super) const PACKED_PIECE: usize = 256;
/// Where the rows of A are read as they lie, a contracted dim of so many words is still one piece: C is written once.
pub(super) const WHOLE: usize = 1024;
/// Bytes of packed rows of A that are worked on at once: they stay in a second-level cache of a MiB.
const A_BYTES: usize = 288 << 10;
/// The same of rows that vectors read where they lie, or from copies that lie so: those that come next and their part of C stay beside them.
const ROW_BYTES: usize = 144 << 10;
/// Bytes of B that are worked on at once beside rows that vectors read where they lie; beside others, all that is left of the scratch memory.
const B_BYTES: usize = 576 << 10;
const _: () = assert!(ROW_BYTES <= A_BYTES && A_BYTES + B_BYTES <= WORKER_BYTES);
// A panel of the widest element at least, each row as long as a piece and a line or two.
const _: () = assert!(VECTOR_ROWS * (WHOLE * size_of::<f64>() + 2 * LINE) <= ROW_BYTES);
const _: () = assert!(MAX_ROWS * (WHOLE * size_of::<f32>() + 2 * LINE) <= A_BYTES);
/// Bytes: lines that a multiple of them apart fall into few sets of a cache, one of the first level, 32 at most of the second.
const CROWDED: usize = 4096;
/// Steps of a block for each pair of lines that it asks for of the columns that follow, at most, as long as these can wait.
const COLUMNS_PACE: usize = 16;
/// Multiply-adds that are worth a chunk of their own, of vectors.
const CHUNK: usize = 1 << 19;

/// Rows (columns) that are computed together, and the parts of A (B) that they come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel {
    /// Where it begins in C.
    pub c: isize,
    pub size: usize,
    /// The first of its parts, and how many.
    pub first: usize,
    pub count: usize,
    /// The first of the stretches of C that its rows are, and how many; none where they are one.
    pub stretches: [usize; 2],
}

/// Consecutive rows (columns) of A (B), `position` into their panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub source: isize,
    pub position: usize,
    pub size: usize,
}

/// All rows (columns).
#[derive(Default)]
pub(super) struct Side {
    pub panels: Vec<Panel>,
    pub parts: Vec<Part>,
    /// Offsets from where their panels begin in C.
    pub stretches: Vec<Stretch>,
}

impl Side {
    fn parts(&self, panel: &Panel) -> &[Part] {
        &self.parts[panel.first..panel.first + panel.count]
    }

    fn source(&self, panel: &Panel) -> isize {
        self.parts[panel.first].source
    }

    /// Whether each panel lies in one part.
    pub fn is_whole(&self) -> bool {
        self.parts.len() == self.panels.len()
    }
}

/// Consecutive steps of the contracted dim, `position` steps into their piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub a: isize,
    pub b: isize,
    pub position: usize,
    pub size: usize,
}

/// Element strides of one row, one column and one contracted step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strides {
    pub a_row: isize,
    pub a_step: isize,
    pub b_column: isize,
    pub b_step: isize,
    pub c_row: isize,
    pub c_column: isize,
}

/// How the microkernel reads the rows of A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// Where they lie.
    InPlace,
    /// From copies of them that lie in different sets of the first-level cache; in A they fall into the same.
    Copied,
    /// From panels, [word][row].
    Packed,
}

/// A batched product with everything that follows from its shape decided: sums of `E`, operands of `S`.
pub(super) struct Gemm<E, S = E> {
    pub kernels: Kernels<E>,
    pub packing: Packing<E, S>,
    /// Offsets of A, B and C of each product.
    pub batch: Vec<[isize; 3]>,
    pub rows: Side,
    pub columns: Side,
    /// Runs of each piece.
    pub pieces: Vec<Vec<Run>>,
    /// Words of the longest piece, at least one.
    pub longest: usize,
    pub strides: Strides,
    pub read_a: Rows,
    pub pack_b: bool,
    /// Multiply-adds of one product.
    pub work: usize,
}

/// One call's operands.
#[derive(Clone, Copy)]
pub(super) struct Operands<E, S = E> {
    pub a: *const S,
    pub b: *const S,
    /// The result; where that is rounded, the sums of all pieces but the last, if there are several.
    pub c: *mut E,
    pub rounded: Option<*mut S>,
    pub alpha: E,
    pub beta: E,
}

// SAFETY: chunks read A and B and write disjoint elements of C.
unsafe impl<E: Send, S: Send> Send for Operands<E, S> {}
// SAFETY: as above.
unsafe impl<E: Sync, S: Sync> Sync for Operands<E, S> {}

impl<E: Element, S: Copy + Send + Sync> Gemm<E, S> {
    /// # Safety
    /// Every offset that the panels, runs and strides reach is inside A, B (readable), C and the rounded result (writable, apart from all
    /// others, each element reached once); C may be short where the result is rounded and there is one piece.
    pub unsafe fn run(&self, pool: &Pool, operands: Operands<E, S>) {
        let grid = self.grid(pool.threads());
        pool.run(self.chunks(&grid), self.nanoseconds(self.work * self.batch.len()), &|worker: &mut Worker, chunk| {
            let (items, [rows, columns]) = self.chunk(&grid, chunk);
            // SAFETY: the machine has what the kernels need.
            self.kernels.enter.into_iter().for_each(|enter| unsafe { enter() });
            for item in &self.batch[items] {
                // SAFETY: the caller's; blocks are apart.
                unsafe { self.block(shift(operands, item), rows.clone(), columns.clone(), worker) };
            }
            // SAFETY: as above; no block follows.
            self.kernels.leave.into_iter().for_each(|leave| unsafe { leave() });
        });
    }

    /// How many chunks there are.
    pub(super) fn chunks(&self, grid: &Grid) -> usize {
        self.batch.len().div_ceil(grid.items) * grid.blocks[0] * grid.blocks[1] * grid.parts()
    }

    /// The products of a chunk, and its row and column panels of each.
    pub(super) fn chunk(&self, grid: &Grid, chunk: usize) -> (Range<usize>, [Range<usize>; 2]) {
        let [down, across] = grid.blocks;
        let (block, part) = (chunk / grid.parts(), chunk % grid.parts());
        let (first, block) = (block / (down * across) * grid.items, block % (down * across));
        // Blocks that follow one another lie so in C.
        let by_row = self.strides.c_row >= self.strides.c_column;
        let (i, j) = if by_row { (block / across, block % across) } else { (block % down, block / down) };
        let mut ranges = [share(i, down, self.rows.panels.len(), 0), share(j, across, self.columns.panels.len(), 0)];
        if let Some(side) = grid.left {
            let range = &mut ranges[side];
            let end = range.end - left(range.len());
            *range = if part == 0 { range.start..end } else { end..range.end };
        }
        (first..self.batch.len().min(first + grid.items), ranges)
    }

    /// Nanoseconds of `multiply_adds`, for the pool's break-even.
    fn nanoseconds(&self, multiply_adds: usize) -> usize {
        (multiply_adds as f64 * self.kernels.pace / self.kernels.lanes as f64 / 1000.0) as usize
    }

    /// Row panels, and column panels, that are worked on at once.
    fn together(&self) -> [usize; 2] {
        let [row, column] = self.panel_elements();
        // Tiles read panels faster than a core's own caches give them: they need many of either side to meet each other.
        let is_tiled = self.kernels.words > 1;
        // Processors that have no longer vectors than these have half of the cache.
        let packed = if 2 * self.kernels.lanes * size_of::<E>() == LINE { A_BYTES / 2 } else { A_BYTES };
        let a_bytes = if is_tiled || self.read_a == Rows::Packed { packed } else { ROW_BYTES };
        let b_bytes = if !is_tiled && self.read_a == Rows::InPlace { B_BYTES } else { WORKER_BYTES - A_BYTES };
        [a_bytes / size_of::<E>() / row, b_bytes / size_of::<E>() / column]
    }

    /// What takes the least time, waiting for half of a last chunk included: smaller chunks wait less, and pack more.
    pub(super) fn grid(&self, threads: usize) -> Grid {
        let chunk = (CHUNK as f64 * VECTOR_PACE / self.kernels.pace) as usize;
        let items = chunk.min(self.work * self.batch.len() / 4).div_ceil(self.work.max(1)).max(1);
        if items > 1 || threads == 1 || self.nanoseconds(self.work * self.batch.len()) < BREAK_EVEN_NS {
            return Grid { items, blocks: [1, 1], left: None };
        }
        let (rows, columns) = (self.rows.panels.len(), self.columns.panels.len());
        let depth = self.work as f64 / (rows * columns).max(1) as f64;
        // Picoseconds, as in `swap_costs_less`, but of operands that come from far: a thread's share does.
        let time = |height: usize, width: usize| {
            let groups = width.div_ceil(self.together()[1]);
            let of_row = match self.read_a {
                Rows::InPlace => 40.0,
                Rows::Copied => 90.0,
                Rows::Packed => 130.0,
            };
            let of_column = if self.pack_b { 120.0 } else { 0.0 };
            let product = self.kernels.pace / self.kernels.lanes as f64 * (height * width) as f64;
            let packing = of_row / self.kernels.columns as f64 * (height * groups) as f64
                + of_column / self.kernels.rows as f64 * width as f64;
            depth * (product + packing)
        };
        let cost = |&([down, across], side): &([usize; 2], Option<usize>)| {
            let (height, width) = (rows.div_ceil(down), columns.div_ceil(across));
            let (whole, last) = match side {
                None => (time(height, width), time(height, width)),
                Some(0) => (time(height - left(height), width), time(left(height), width)),
                Some(_) => (time(height, width - left(width)), time(height, left(width))),
            };
            let rounds = (self.batch.len() * down * across).div_ceil(threads) as f64;
            rounds * (whole + if side.is_some() { last } else { 0.0 }) + 0.5 * last
        };
        let cuts = [1, threads].into_iter().flat_map(|blocks| {
            let downs = (1..=blocks).filter(move |down| blocks.is_multiple_of(*down));
            downs.map(move |down| [down.min(rows), (blocks / down).min(columns)])
        });
        let has_parts = |[down, across]: [usize; 2], side: usize| left([rows / down, columns / across][side]) > 0;
        let all = cuts.flat_map(|blocks| {
            let sides = [0, 1].into_iter().filter(move |side| has_parts(blocks, *side)).map(Some);
            sides.chain([None]).map(move |side| (blocks, side))
        });
        let (blocks, left) = all.min_by(|x, y| cost(x).total_cmp(&cost(y))).expect("the whole is one");
        Grid { items: 1, blocks, left }
    }

    /// Some rows and columns of one product.
    ///
    /// # Safety
    /// As `run`.
    unsafe fn block(&self, operands: Operands<E, S>, rows: Range<usize>, columns: Range<usize>, worker: &mut Worker) {
        let scratch = worker.scratch();
        // A_BYTES for A, and as many panels of B as are worked on, which the first rows pack.
        let packed = [scratch.cast(), scratch.wrapping_add(A_BYTES).cast()];
        let [height, width] = self.together();
        let [down, across] = [rows.len().div_ceil(height), columns.len().div_ceil(width)];
        let group = |n: usize| share(n, down, rows.len(), rows.start);
        let pass = |n: usize| {
            let (part, piece) = (n / self.pieces.len(), n % self.pieces.len());
            (part < across).then(|| Pass { columns: share(part, across, columns.len(), columns.start), piece, is_asked: false })
        };
        let (mut n, mut next) = (0, pass(0));
        while let Some(this) = next {
            n += 1;
            next = pass(n);
            let mut ahead = Ahead::none();
            if let Some(next) = &mut next {
                let panels = &self.columns.panels[next.columns.clone()];
                let lines = self.source_of_columns(operands.b, panels, next.piece);
                next.is_asked = lines.fit();
                if next.is_asked {
                    ahead.columns = Due::within(rows.len() * this.columns.len(), lines);
                }
            }
            for i in 0..down {
                let following = match i + 1 < down {
                    true => Some((i + 1, &this)),
                    // All rows in one group are still there for other columns.
                    false => next.as_ref().filter(|next| down > 1 || next.piece != this.piece).map(|next| (0, next)),
                };
                ahead.rows = following.map_or(Due::none(), |(next, pass)| {
                    let lines = self.source_of_rows(operands.a, &self.rows.panels[group(next)], pass.piece);
                    Due::within(group(i).len() * this.columns.len(), lines)
                });
                // SAFETY: the caller's; the scratch is as said.
                unsafe { self.compute(&operands, group(i), &this, packed, i == 0, &mut ahead) };
            }
        }
    }

    /// Columns are packed where these rows are the first that read them: by the first block that reads them, if it can; a panel at a time,
    /// while the memory of the next comes, unless it was asked for before, if the steps of a column lie side by side; else all together.
    /// Rows, where they are packed, by the first block that reads them, if it can, else before all.
    ///
    /// # Safety
    /// As `run`; the second packed memory has room for the pass's columns, and holds them unless these are the first rows; the first has A_BYTES.
    unsafe fn compute(
        &self,
        operands: &Operands<E, S>,
        rows: Range<usize>,
        pass: &Pass,
        [packed_a, packed_b]: [*mut E; 2],
        first: bool,
        ahead: &mut Ahead,
    ) {
        let (rows, columns) = (&self.rows.panels[rows], &self.columns.panels[pass.columns.clone()]);
        let packs = self.pack_b && first;
        let elements = self.panel_elements();
        let [copied_rows, copied_columns] = self.copied(rows, columns, pass.piece, first);
        // SAFETY: the caller's.
        unsafe {
            match self.read_a {
                Rows::InPlace => {}
                Rows::Copied => self.copy_rows(operands.a, rows, pass.piece, packed_a),
                Rows::Packed => {
                    self.pack_rows(operands.a, &rows[copied_rows..], pass.piece, packed_a.add(copied_rows * elements[0]));
                }
            }
            let frame = self.frame(operands, pass.piece);
            let cell = |i: usize, j: usize, ahead: &mut Ahead| {
                let (a, b) = (packed_a.add(i * elements[0]), packed_b.add(j * elements[1]));
                let row = Strip { panel: &rows[i], packed: a, is_copied: j == 0 && i < copied_rows };
                let column = Strip { panel: &columns[j], packed: b, is_copied: i == 0 && j < copied_columns };
                self.cell(operands, &frame, pass.piece, [row, column], ahead);
            };
            let row_by_row = columns.len() <= 4 && rows.len() > columns.len();
            let one_by_one = packs && !row_by_row && self.strides.b_column != 1 && self.strides.b_step == 1;
            if packs && !one_by_one {
                let to = packed_b.add(copied_columns * elements[1]);
                self.pack_columns(operands.b, &columns[copied_columns..], pass.piece, to);
            }
            if row_by_row {
                (0..rows.len()).for_each(|i| (0..columns.len()).for_each(|j| cell(i, j, ahead)));
                return;
            }
            for j in 0..columns.len() {
                if one_by_one {
                    self.pack_columns(operands.b, &columns[j..=j], pass.piece, packed_b.add(j * elements[1]));
                }
                if let Some(next) = columns.get(j + 1..j + 2).filter(|_| one_by_one && !pass.is_asked) {
                    ahead.column = Due::within(rows.len(), self.source_of_columns(operands.b, next, pass.piece));
                }
                (0..rows.len()).for_each(|i| cell(i, j, ahead));
            }
        }
    }

    /// What the blocks of a piece have in common: where a block begins is left open, and how a step lies where it is not that of a packed panel.
    fn frame(&self, operands: &Operands<E, S>, piece: usize) -> Block<E> {
        let (s, steps) = (&self.strides, self.packing.steps);
        let last = self.pieces[piece].last().expect("a piece has runs");
        Block {
            depth: (last.position + last.size).div_ceil(steps),
            a: std::ptr::null(),
            // Words as they lie: of pairs, all strides but that of a step are even.
            a_row: match self.read_a {
                Rows::InPlace => s.a_row / steps as isize,
                Rows::Copied => self.copied_row() as isize,
                Rows::Packed => 1,
            },
            a_step: 1,
            b: std::ptr::null(),
            b_step: self.kernels.columns as isize,
            b_padded: self.pack_b,
            c: std::ptr::null_mut(),
            c_row: s.c_row,
            c_column: s.c_column,
            columns: 0,
            alpha: operands.alpha,
            beta: if piece == 0 { operands.beta } else { E::ONE },
        }
    }

    /// Row panels, and column panels, that the first block that reads them copies: the first so many. A step of them is contiguous where it
    /// lies. Blocks that copy are the largest: the panels are, and so is the panel that they are the first to meet, the first of the other side.
    /// Steps that fall into few sets of the caches push each other out before the next panel reads the rest of their lines, and what would be
    /// asked for ahead of it: all panels are packed at once, each step in one go.
    pub(super) fn copied(&self, rows: &[Panel], columns: &[Panel], piece: usize, first: bool) -> [usize; 2] {
        let (s, kernels) = (&self.strides, &self.kernels);
        if size_of::<S>() != size_of::<E>() || self.pieces[piece].len() > 1 || self.pieces[piece][0].size == 0 {
            return [0; 2];
        }
        let largest =
            |panels: &[Panel], size: usize| panels.iter().take_while(|panel| panel.size == size && panel.count == 1).count();
        let [height, width] = [largest(rows, kernels.rows), largest(columns, kernels.columns)];
        let copies_rows = self.read_a == Rows::Packed && s.a_row == 1 && width > 0 && !are_crowded::<S>(s.a_step);
        let copies_columns = self.pack_b && first && s.b_column == 1 && height > 0 && !are_crowded::<S>(s.b_step);
        [if copies_rows { height } else { 0 }, if copies_columns { width } else { 0 }]
    }

    /// # Safety
    /// As `compute`, for one row panel and one column panel; `frame` is of the operands and the piece.
    #[inline(always)]
    unsafe fn cell(
        &self,
        operands: &Operands<E, S>,
        frame: &Block<E>,
        piece: usize,
        [row, column]: [Strip<E>; 2],
        ahead: &mut Ahead,
    ) {
        // SAFETY: the caller's; packed panels are as long as the longest piece.
        unsafe {
            let (mut block, mut beside) = (*frame, Beside::nothing());
            let (rows, columns) = (row.panel, column.panel);
            if self.read_a == Rows::InPlace || row.is_copied {
                block.a = operands.a.offset(self.rows.source(rows) + self.pieces[piece][0].a).cast::<E>();
                block.a_step = self.strides.a_step;
            } else {
                block.a = row.packed;
                block.a_step = if self.read_a == Rows::Packed { rows.size as isize } else { 1 };
            }
            if !self.pack_b || column.is_copied {
                block.b = operands.b.offset(self.columns.source(columns) + self.pieces[piece][0].b).cast::<E>();
                block.b_step = self.strides.b_step;
            } else {
                block.b = column.packed;
            }
            if row.is_copied {
                beside.copy_a = row.packed;
            }
            if column.is_copied {
                beside.copy_b = column.packed;
            }
            block.c = operands.c.wrapping_offset(rows.c + columns.c);
            block.columns = columns.size;
            let [first, count] = rows.stretches;
            let stretches = &self.rows.stretches[first..first + count];
            let (lines, due) = ahead.due(block.depth / COLUMNS_PACE);
            (beside.ahead, beside.due) = (*lines, due);
            // What is rounded is of operands of fewer bytes than a word, which blocks do not copy.
            match operands.rounded.filter(|_| piece + 1 == self.pieces.len()) {
                Some(rounded) => self.round(rows.size, &block, &mut beside, stretches, rounded.offset(rows.c + columns.c)),
                None => self.add(rows.size, &block, &mut beside, stretches),
            }
            *lines = beside.ahead;
        }
    }

    /// Computes a block with so many rows, which are these stretches of C, or one if there are none.
    ///
    /// # Safety
    /// As `Kernels::run_beside`.
    #[inline(always)]
    unsafe fn add(&self, rows: usize, block: &Block<E>, beside: &mut Beside<E>, stretches: &[Stretch]) {
        // SAFETY: the caller's.
        unsafe {
            if stretches.is_empty() {
                beside.c = block.lines_of_c(rows);
                return self.kernels.run_beside(rows, block, beside);
            }
            let mut sums = MaybeUninit::<[E; MAX_ROWS * MAX_COLUMNS]>::uninit();
            let (tile, width) = (sums.as_mut_ptr().cast::<E>(), self.kernels.columns);
            let sums = Block { c: tile, c_row: width as isize, c_column: 1, alpha: E::ONE, beta: E::ZERO, ..*block };
            self.kernels.run_beside(rows, &sums, beside);
            (self.kernels.place)(tile, width, rows, block, stretches);
        }
    }

    /// Computes a block of the last piece and rounds it. Of a single piece C has nothing, and need not be memory.
    ///
    /// # Safety
    /// As `add`; `to` is writable where C is.
    unsafe fn round(&self, rows: usize, block: &Block<E>, beside: &mut Beside<E>, stretches: &[Stretch], to: *mut S) {
        let whole = [Stretch { c: 0, position: 0, size: rows }];
        let parts = if stretches.is_empty() { &whole } else { stretches };
        let target = |part: &Stretch| Place { at: to.wrapping_offset(part.c), row: block.c_row, column: block.c_column };
        // SAFETY: the caller's; the tile has MAX_ROWS rows.
        unsafe {
            if block.beta != E::ZERO {
                self.add(rows, block, beside, stretches);
                for part in parts {
                    let from = Place { at: block.c.offset(part.c).cast_const(), row: block.c_row, column: block.c_column };
                    (self.packing.round)(from, target(part), part.size, block.columns);
                }
                return;
            }
            if block.c_column == 1 {
                (0..rows as isize).for_each(|i| prefetch(to.wrapping_offset(i * block.c_row)));
            }
            let mut sums = MaybeUninit::<[E; MAX_ROWS * MAX_COLUMNS]>::uninit();
            let (tile, width) = (sums.as_mut_ptr().cast::<E>(), self.kernels.columns as isize);
            self.kernels.run_beside(rows, &Block { c: tile, c_row: width, c_column: 1, ..*block }, beside);
            for part in parts {
                let from = Place { at: tile.offset(part.position as isize * width).cast_const(), row: width, column: 1 };
                (self.packing.round)(from, target(part), part.size, block.columns);
            }
        }
    }
}

/// How products are cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Products of a chunk.
    pub items: usize,
    /// Blocks of a product, down and across.
    pub blocks: [usize; 2],
    /// The side, rows (0) or columns (1), of which each leaves a part to a second chunk, if any: a thread that is early may take that from
    /// a late one.
    pub left: Option<usize>,
}

impl Grid {
    /// Chunks of a block.
    fn parts(&self) -> usize {
        if self.left.is_some() { 2 } else { 1 }
    }
}

/// How many of so many panels a block leaves to its second chunk.
fn left(panels: usize) -> usize {
    panels.div_ceil(4).min(panels.saturating_sub(1))
}

/// A panel of rows (columns), where its copy lies or will, and whether the block at hand makes that.
struct Strip<'a, E> {
    panel: &'a Panel,
    packed: *mut E,
    is_copied: bool,
}

/// Columns that one chunk works on, in one piece of the contracted dim.
struct Pass {
    columns: Range<usize>,
    piece: usize,
    /// Whether the pass before has asked for the columns.
    is_asked: bool,
}

/// Whether steps so many elements apart crowd into few sets of a cache.
pub(super) fn are_crowded<S>(step: isize) -> bool {
    (step.unsigned_abs() * size_of::<S>()).is_multiple_of(CROWDED)
}

/// One of so many equal parts of a range that begins somewhere.
fn share(part: usize, parts: usize, length: usize, begin: usize) -> Range<usize> {
    begin + part * length / parts..begin + (part + 1) * length / parts
}

fn shift<E: Element, S: Copy>(operands: Operands<E, S>, item: &[isize; 3]) -> Operands<E, S> {
    Operands {
        a: operands.a.wrapping_offset(item[0]),
        b: operands.b.wrapping_offset(item[1]),
        c: operands.c.wrapping_offset(item[2]),
        rounded: operands.rounded.map(|rounded| rounded.wrapping_offset(item[2])),
        ..operands
    }
}
