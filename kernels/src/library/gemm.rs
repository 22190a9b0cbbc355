//! The loops around the microkernel: which panels are packed where, and which thread computes which block of C.
//!
//! Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). Rows, columns and the contracted dim are *lists*
//! of panels with offsets, so that a dim made of several strided dims needs no copy. The contracted dim is cut into pieces by its
//! length alone; a thread owns whole elements of C. Hence the same bits for every number of threads.

use super::SharedPtr;
use super::microkernel::{Block, Kernels};
use super::simd::Element;
use crate::cpu::pool::{Pool, SHARED_BYTES, Team, WORKER_BYTES, Worker};

/// Most steps of the contracted dim that one pass over C takes.
pub(super) const PIECE: usize = 256;
/// Row panels packed at once: with `PIECE` steps they fill a third of a typical second-level cache.
const ROW_PANELS: usize = 16;
/// Bytes of a worker's scratch that hold packed A; the rest holds packed B when the worker computes a product alone.
const A_BYTES: usize = WORKER_BYTES / 3;
/// Column panels packed per chunk.
const PACK_PANELS: usize = 8;

/// Consecutive rows (columns) of A (B) and of C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel {
    pub source: isize,
    pub c: isize,
    pub size: usize,
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

/// A batched product with everything that follows from its shape decided.
pub(super) struct Gemm<E> {
    pub kernels: Kernels<E>,
    /// Offsets of A, B and C of each product.
    pub batch: Vec<[isize; 3]>,
    pub rows: Vec<Panel>,
    pub columns: Vec<Panel>,
    /// Runs of each piece.
    pub pieces: Vec<Vec<Run>>,
    pub strides: Strides,
    pub pack_a: bool,
    pub pack_b: bool,
    /// Each product belongs to one thread; otherwise all threads share each.
    pub by_batch: bool,
    /// Multiply-adds of one product.
    pub work: usize,
}

/// One call's operands.
#[derive(Clone, Copy)]
pub(super) struct Operands<E> {
    pub a: *const E,
    pub b: *const E,
    pub c: *mut E,
    pub alpha: E,
    pub beta: E,
}

impl<E: Copy> Operands<E> {
    /// B, as a capture of the whole struct.
    fn b(&self) -> *const E {
        self.b
    }
}

// SAFETY: chunks read A and B and write disjoint elements of C.
unsafe impl<E: Send> Send for Operands<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Operands<E> {}

impl<E: Element> Gemm<E> {
    /// # Safety
    /// Every offset that the panels, runs and strides reach is inside A, B (readable) and C (writable, apart from A and B, each element
    /// reached once).
    pub unsafe fn run(&self, pool: &Pool, operands: Operands<E>) {
        let mut team = pool.team();
        // SAFETY: the caller's.
        unsafe {
            if self.by_batch {
                self.run_by_batch(&mut team, operands);
            } else {
                let buffer = SharedPtr::new(team.buffer().cast::<E>());
                for item in &self.batch {
                    self.run_together(&mut team, shift(operands, item), buffer);
                }
            }
        }
    }

    /// Nanoseconds of `multiply_adds`, for the pool's break-even.
    fn nanoseconds(&self, multiply_adds: usize) -> usize {
        multiply_adds / (8 * self.kernels.lanes)
    }

    fn panel_elements(&self) -> usize {
        self.kernels.columns * PIECE
    }

    /// # Safety
    /// As `run`.
    unsafe fn run_by_batch(&self, team: &mut Team, operands: Operands<E>) {
        let group = (1 << 19).min(self.work * self.batch.len() / 4).div_ceil(self.work.max(1)).max(1);
        let width = (WORKER_BYTES - A_BYTES) / size_of::<E>() / self.panel_elements();
        let total = self.nanoseconds(self.work * self.batch.len());
        team.run(self.batch.len().div_ceil(group), total, &|worker: &mut Worker, chunk| {
            let scratch = worker.scratch();
            let end = self.batch.len().min((chunk + 1) * group);
            for item in &self.batch[chunk * group..end] {
                let operands = shift(operands, item);
                // SAFETY: the caller's; the scratch holds A_BYTES for A and `width` panels for B.
                unsafe { self.alone(operands, scratch.cast(), scratch.add(A_BYTES).cast(), width) };
            }
        });
    }

    /// One product on one thread.
    ///
    /// # Safety
    /// As `run`; `packed_a` holds A_BYTES, `packed_b` holds `width` panels.
    unsafe fn alone(&self, operands: Operands<E>, packed_a: *mut E, packed_b: *mut E, width: usize) {
        for (index, columns) in self.columns.chunks(width).enumerate() {
            for piece in 0..self.pieces.len() {
                // SAFETY: the caller's.
                unsafe {
                    if self.pack_b {
                        self.pack_columns(operands.b, columns, piece, packed_b);
                    }
                    for first in (0..self.rows.len()).step_by(ROW_PANELS) {
                        let rows = first..self.rows.len().min(first + ROW_PANELS);
                        let block = Task { rows, columns: index * width..index * width + columns.len(), piece };
                        self.compute(&operands, &block, packed_a, packed_b);
                    }
                }
            }
        }
    }

    /// One product on all threads: they pack a stretch of B together, then each computes blocks of C.
    ///
    /// # Safety
    /// As `run`; `buffer` holds SHARED_BYTES.
    unsafe fn run_together(&self, team: &mut Team, operands: Operands<E>, buffer: SharedPtr<E>) {
        let most = SHARED_BYTES / size_of::<E>() / self.panel_elements();
        let stretch = self.columns.len().div_ceil(self.columns.len().div_ceil(most).max(1));
        let row_tasks = self.rows.len().div_ceil(ROW_PANELS);
        for (index, columns) in self.columns.chunks(stretch.max(1)).enumerate() {
            let column_tasks = 8usize.div_ceil(row_tasks).min(columns.len().div_ceil(4)).max(1);
            let width = columns.len().div_ceil(column_tasks);
            let column_tasks = columns.len().div_ceil(width);
            let total = self.nanoseconds(self.work / self.pieces.len() * columns.len() / self.columns.len());
            for piece in 0..self.pieces.len() {
                if self.pack_b {
                    let chunks = columns.len().div_ceil(PACK_PANELS);
                    let elements = columns.len() * self.panel_elements();
                    team.run(chunks, elements / 8, &|_: &mut Worker, chunk| {
                        let panels = &columns[chunk * PACK_PANELS..columns.len().min((chunk + 1) * PACK_PANELS)];
                        // SAFETY: the caller's; each chunk fills panels of its own.
                        unsafe {
                            self.pack_columns(
                                operands.b(),
                                panels,
                                piece,
                                buffer.get().add(chunk * PACK_PANELS * self.panel_elements()),
                            )
                        };
                    });
                }
                team.run(row_tasks * column_tasks, total, &|worker: &mut Worker, chunk| {
                    let (row, column) = (chunk % row_tasks * ROW_PANELS, chunk / row_tasks * width);
                    let first = index * stretch;
                    let rows = row..self.rows.len().min(row + ROW_PANELS);
                    let block = Task { rows, columns: first + column..first + columns.len().min(column + width), piece };
                    // SAFETY: the caller's; the block's first column was packed `column` panels into the buffer.
                    unsafe {
                        let packed_b = buffer.get().add(column * self.panel_elements());
                        self.compute(&operands, &block, worker.scratch().cast(), packed_b);
                    }
                });
            }
        }
    }

    /// # Safety
    /// As `run`; `packed_b` holds the task's columns if B is packed, `packed_a` has A_BYTES.
    unsafe fn compute(&self, operands: &Operands<E>, task: &Task, packed_a: *mut E, packed_b: *const E) {
        let rows = &self.rows[task.rows.clone()];
        let columns = &self.columns[task.columns.clone()];
        // SAFETY: the caller's.
        unsafe {
            if self.pack_a {
                self.pack_rows(operands.a, rows, task.piece, packed_a);
            }
            let cell = |i: usize, j: usize| self.cell(operands, task.piece, (i, rows[i]), (j, columns[j]), packed_a, packed_b);
            if columns.len() <= 4 && rows.len() > columns.len() {
                (0..rows.len()).for_each(|i| (0..columns.len()).for_each(|j| cell(i, j)));
            } else {
                (0..columns.len()).for_each(|j| (0..rows.len()).for_each(|i| cell(i, j)));
            }
        }
    }

    /// # Safety
    /// As `compute`, for one row panel and one column panel.
    #[inline(always)]
    unsafe fn cell(
        &self,
        operands: &Operands<E>,
        piece: usize,
        row: (usize, Panel),
        column: (usize, Panel),
        packed_a: *const E,
        packed_b: *const E,
    ) {
        let runs = &self.pieces[piece];
        let last = runs[runs.len() - 1];
        let (i, rows) = row;
        let (j, columns) = column;
        let s = &self.strides;
        // SAFETY: the caller's; packed panels lie PIECE steps apart.
        unsafe {
            let (a, a_row, a_step) = if self.pack_a {
                (packed_a.add(i * self.kernels.rows * PIECE), 1, rows.size as isize)
            } else {
                (operands.a.offset(rows.source + runs[0].a), s.a_row, s.a_step)
            };
            let (b, b_step) = if self.pack_b {
                (packed_b.add(j * self.panel_elements()), self.kernels.columns as isize)
            } else {
                (operands.b.offset(columns.source + runs[0].b), s.b_step)
            };
            let block = Block {
                depth: last.position + last.size,
                a,
                a_row,
                a_step,
                b,
                b_step,
                c: operands.c.offset(rows.c + columns.c),
                c_row: s.c_row,
                c_column: s.c_column,
                columns: columns.size,
                alpha: operands.alpha,
                beta: if piece == 0 { operands.beta } else { E::ONE },
            };
            self.kernels.run(rows.size, &block);
        }
    }

    /// Packs row panels as [step][row].
    ///
    /// # Safety
    /// As `compute`.
    unsafe fn pack_rows(&self, a: *const E, rows: &[Panel], piece: usize, packed: *mut E) {
        for (i, panel) in rows.iter().enumerate() {
            for run in &self.pieces[piece] {
                // SAFETY: the caller's.
                unsafe {
                    let to = packed.add(i * self.kernels.rows * PIECE + run.position * panel.size);
                    let from = a.offset(panel.source + run.a);
                    pack(
                        &self.kernels,
                        from,
                        (self.strides.a_row, self.strides.a_step),
                        to,
                        (panel.size, panel.size, run.size),
                    );
                }
            }
        }
    }

    /// Packs column panels as [step][column], as wide as the microkernel, zeros at the end.
    ///
    /// # Safety
    /// As `run`; `packed` holds `columns.len()` panels.
    unsafe fn pack_columns(&self, b: *const E, columns: &[Panel], piece: usize, packed: *mut E) {
        let width = self.kernels.columns;
        if self.strides.b_column == 1 && columns.iter().all(|panel| panel.size == width) {
            // Step by step through all panels: longer stretches of a row of B at a time, fewer pages.
            for run in &self.pieces[piece] {
                for q in 0..run.size {
                    for (j, panel) in columns.iter().enumerate() {
                        // SAFETY: the caller's.
                        unsafe {
                            let to = packed.add(j * self.panel_elements() + (run.position + q) * width);
                            let from = b.offset(panel.source + run.b + q as isize * self.strides.b_step);
                            std::ptr::copy_nonoverlapping(from, to, width);
                        }
                    }
                }
            }
            return;
        }
        for (j, panel) in columns.iter().enumerate() {
            for run in &self.pieces[piece] {
                // SAFETY: the caller's.
                unsafe {
                    let to = packed.add(j * self.panel_elements() + run.position * width);
                    let from = b.offset(panel.source + run.b);
                    pack(&self.kernels, from, (self.strides.b_column, self.strides.b_step), to, (panel.size, width, run.size));
                }
            }
        }
    }
}

/// Blocks of C that one chunk computes in one piece of the contracted dim.
struct Task {
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    piece: usize,
}

fn shift<E: Element>(operands: Operands<E>, item: &[isize; 3]) -> Operands<E> {
    Operands {
        a: operands.a.wrapping_offset(item[0]),
        b: operands.b.wrapping_offset(item[1]),
        c: operands.c.wrapping_offset(item[2]),
        ..operands
    }
}

/// With (stride, step) of `from` and (size, width, steps): to[q * width + i] = from[i * stride + q * step] for i < size, q < steps; zero
/// for size <= i < width.
///
/// # Safety
/// The addresses above are readable and writable.
pub(super) unsafe fn pack<E: Element>(
    kernels: &Kernels<E>,
    from: *const E,
    (stride, step): (isize, isize),
    to: *mut E,
    (size, width, steps): (usize, usize, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        if stride == 1 {
            match size {
                12 => pack_contiguous::<E, 12>(from, step, to, width, steps),
                16 => pack_contiguous::<E, 16>(from, step, to, width, steps),
                32 => pack_contiguous::<E, 32>(from, step, to, width, steps),
                _ => (0..steps)
                    .for_each(|q| std::ptr::copy_nonoverlapping(from.offset(q as isize * step), to.add(q * width), size)),
            }
        } else {
            pack_across(kernels, from, (stride, step), to, (size, width, steps));
        }
        for q in 0..if size < width { steps } else { 0 } {
            (size..width).for_each(|i| *to.add(q * width + i) = E::ZERO);
        }
    }
}

/// The part of `pack` against the memory order: squares by the microkernel's transposition where the steps are contiguous.
///
/// # Safety
/// As `pack`.
unsafe fn pack_across<E: Element>(
    kernels: &Kernels<E>,
    from: *const E,
    (stride, step): (isize, isize),
    to: *mut E,
    (size, width, steps): (usize, usize, usize),
) {
    let square = kernels.lanes;
    let transpose = kernels.transpose.filter(|_| step == 1);
    for first in (0..steps).step_by(square) {
        let count = square.min(steps - first);
        let mut i = 0;
        // SAFETY: the caller's.
        unsafe {
            if let Some(transpose) = transpose.filter(|_| count == square) {
                while i + square <= size {
                    transpose(from.offset(i as isize * stride).add(first), stride, to.add(first * width + i), width);
                    i += square;
                }
            }
            for i in i..size {
                for q in first..first + count {
                    *to.add(q * width + i) = *from.offset(i as isize * stride + q as isize * step);
                }
            }
        }
    }
}

/// # Safety
/// As `pack`.
unsafe fn pack_contiguous<E: Element, const SIZE: usize>(from: *const E, step: isize, to: *mut E, width: usize, steps: usize) {
    for q in 0..steps {
        // SAFETY: the caller's; `[E; SIZE]` has the alignment of E.
        unsafe { *to.add(q * width).cast::<[E; SIZE]>() = *from.offset(q as isize * step).cast::<[E; SIZE]>() };
    }
}
