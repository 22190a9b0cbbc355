//! Scaled dot-product attention without the matrix of scores: forward (O, Lse) and backward (dQ, dK, dV).
//!
//! O = softmax(scale · Q Kᵀ + mask) V by blocks of queries and keys with running maximum and sum (Dao, FlashAttention-2, 2023); the
//! backward pass computes the probabilities again from Lse. Blocks wholly above the causal diagonal are not computed. A query whose
//! keys are all masked gives O = 0, Lse = -∞ and no gradient. One thread owns whole blocks of O, and in the backward pass whole
//! key heads, so that results do not depend on the number of threads.

mod ahead;
mod backward;
mod rows;

pub use backward::{Gradient, Gradients};

use super::SharedPtr;
use super::lines::Lines;
use super::math::Real;
use super::microkernel::{Beside, Block, Kernels, MAX_COLUMNS};
use super::pack::{Size, Source};
use super::simd::LINE;
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};
use ahead::{Ahead, Operand};
use rows::{Apart, Row, RowKernels};
use std::ops::Range;

/// Most queries of one block.
const MAX_BLOCK: usize = 96;
/// Keys of one block: whole vectors, so that the last one may be padded.
const KEYS: usize = 128;
/// Elements of a column panel of as many steps as a block has queries or keys.
const PANEL: usize = KEYS * MAX_COLUMNS;
const _: () = assert!(MAX_BLOCK <= KEYS);
/// More tiles of rows than so many are worth a copy of the columns that they all read.
const FEW: usize = 2;
/// A last key by itself, one more than so many, is a dot product where the channels are as many: a vector of its own would take longer.
const LONE: usize = 32;
/// Chunks of a thread, at least, where a chunk is a whole key head.
const HEADS: usize = 4;

/// Element strides of an operand along batch, key head, group (query head of a key head), position and channel. Operands without
/// one of them have 0 there, as do masks where they repeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strides {
    pub batch: usize,
    pub head: usize,
    pub group: usize,
    pub position: usize,
    pub channel: usize,
}

/// Sizes and layouts of one attention. Query head = head · groups + group.
#[derive(Clone, Debug)]
pub struct Shape {
    pub batch: usize,
    pub heads: usize,
    pub groups: usize,
    pub queries: usize,
    pub keys: usize,
    /// Channels of Q and K.
    pub channels: usize,
    /// Channels of V and O.
    pub values: usize,
    pub scale: f64,
    /// Query t sees keys up to t + this, if causal.
    pub causal: Option<i64>,
    pub q: Strides,
    pub k: Strides,
    pub v: Strides,
    pub o: Strides,
    /// Of Lse; no channel.
    pub lse: Strides,
    /// Of the mask; position is the query, channel the key.
    pub mask: Strides,
}

/// What is added to the scores.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a, E> {
    None,
    Additive(&'a [E]),
    /// Zero forbids.
    Boolean(&'a [u8]),
}

/// A planned attention.
pub struct Attention<E> {
    shape: Shape,
    kernels: Kernels<E>,
    rows: RowKernels,
    /// Queries of one block.
    block: usize,
}

/// What an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    pub q: &'a [E],
    pub k: &'a [E],
    pub v: &'a [E],
    pub mask: Mask<'a, E>,
}

/// A block of queries against a block of keys.
#[derive(Clone, Copy)]
struct Cell {
    head: [usize; 3],
    first: usize,
    rows: usize,
    from: usize,
    keys: usize,
}

/// Rows of an operand, from the first on.
#[derive(Clone, Copy)]
struct Side<E> {
    from: *const E,
    /// Elements from row to row.
    position: usize,
    channels: usize,
}

impl<E: Real> Attention<E> {
    /// Plans for this machine.
    ///
    /// # Panics
    /// If the channels of Q, K, V are not contiguous (`stride 1`): transpose first. If there are very many of V.
    pub fn new(shape: &Shape) -> Self {
        Self::with_isa(shape, Isa::detect())
    }

    /// Plans for one instruction set, which the machine must have.
    pub fn with_isa(shape: &Shape, isa: Isa) -> Self {
        assert!(isa <= Isa::detect(), "{isa:?} is not on this machine");
        let contiguous = |strides: &Strides, size| strides.channel == 1 || size == 1;
        assert!(
            contiguous(&shape.q, shape.channels) && contiguous(&shape.k, shape.channels) && contiguous(&shape.v, shape.values),
            "channels of q, k and v are contiguous"
        );
        let kernels = E::kernels(isa);
        let mut attention = Attention { shape: shape.clone(), kernels, rows: RowKernels::new::<E>(isa), block: 0 };
        // Larger blocks read and write the sums of keys less often. Sums go by blocks, so that their size is that of all machines.
        for most in [MAX_BLOCK, 48, 24, 12, 1] {
            attention.block = shape.queries.div_ceil(shape.queries.div_ceil(most).max(1)).max(1);
            if attention.fits(0) {
                return attention;
            }
        }
        panic!("{} value channels are too many", shape.values)
    }

    /// Elements of workspace that `forward` may need: packed keys, which several chunks share where heads are few.
    pub fn forward_workspace(&self) -> usize {
        self.shape.batch * self.shape.heads * self.packed(self.shape.channels)
    }

    /// Elements of workspace that `backward` needs: packed keys and values, where a thread's own space does not hold a head's.
    pub fn backward_workspace(&self) -> usize {
        let head = self.packed(self.shape.channels) + self.packed(self.shape.values);
        if self.fits(head) { 0 } else { self.shape.batch * self.shape.heads * head }
    }

    /// Whether a thread's own space holds that many elements beside a block's.
    fn fits(&self, elements: usize) -> bool {
        (self.scratch_elements() + elements) * size_of::<E>() <= WORKER_BYTES
    }

    /// Multiplications and additions of the forward pass; the backward pass has 2.5 times as many.
    pub fn flops(&self) -> usize {
        let s = &self.shape;
        let seen: usize = (0..s.queries).map(|t| self.limit(t)).sum();
        2 * s.batch * s.heads * s.groups * seen * (s.channels + s.values)
    }

    /// A panel, a block's scores, and their gradients or sums of O. (More than these: sums go by blocks, whose size depends on it.)
    fn scratch_elements(&self) -> usize {
        (PANEL + self.block * (2 * KEYS + 2 * self.shape.values + 4)).next_multiple_of(LINE / size_of::<E>())
    }

    /// Elements of one head's packed keys (values).
    fn packed(&self, channels: usize) -> usize {
        self.shape.keys.next_multiple_of(self.kernels.columns) * channels
    }

    /// The first query that may see a key.
    fn first_to_see(&self, key: usize) -> usize {
        self.shape.causal.map_or(0, |offset| (key as i64 - offset).max(0) as usize)
    }

    /// Keys that query `t` may see.
    fn limit(&self, t: usize) -> usize {
        match self.shape.causal {
            Some(offset) => (t as i64 + offset + 1).clamp(0, self.shape.keys as i64) as usize,
            None => self.shape.keys,
        }
    }

    /// O and Lse from Q, K, V.
    ///
    /// # Panics
    /// If an operand or the workspace is too short.
    pub fn forward(&self, pool: &Pool, inputs: Inputs<'_, E>, o: &mut [E], lse: &mut [E], workspace: &mut [E]) {
        let s = &self.shape;
        self.check_inputs(&inputs);
        assert!(
            o.len() >= self.reach(&s.o, s.queries, s.values) && lse.len() >= self.reach(&s.lse, s.queries, 1),
            "outputs are too short"
        );
        assert!(workspace.len() >= self.forward_workspace(), "a workspace of {} elements", workspace.len());
        let nanoseconds = self.flops() / 16 / self.kernels.lanes;
        let (o, lse, workspace) =
            (SharedPtr::new(o.as_mut_ptr()), SharedPtr::new(lse.as_mut_ptr()), SharedPtr::new(workspace.as_mut_ptr()));
        let (heads, blocks, size) = (s.batch * s.heads, s.queries.div_ceil(self.block), self.packed(s.channels));
        // SAFETY: the lengths were checked; each chunk writes its own head's keys, or its own queries of O and Lse.
        unsafe {
            if heads >= HEADS * pool.threads() && self.fits(size) {
                let [q, k, v] = self.operands(&inputs);
                let following = [q, k, v, Operand::new(o.get(), &s.o, s.queries, s.values)];
                let multiply_adds = self.flops() / 2 / heads;
                pool.run(heads, nanoseconds, &|worker: &mut Worker, chunk| {
                    let mut ahead = Ahead::of(s, chunk + 1, &following, multiply_adds);
                    let scratch = worker.scratch().cast::<E>();
                    let packed = scratch.add(self.scratch_elements());
                    self.pack(inputs.k, &s.k, s.channels, chunk, packed);
                    let all = (0..s.groups).flat_map(|g| (0..s.queries).step_by(self.block).map(move |first| (g, first)));
                    all.for_each(|(g, first)| {
                        let (head, outputs) = (self.head(chunk * s.groups + g), [o.get(), lse.get()]);
                        self.forward_block(&inputs, head, first, [scratch, packed], outputs, &mut ahead);
                    });
                });
                return;
            }
            pool.run(heads, heads * size / 4, &|_: &mut Worker, chunk| {
                self.pack(inputs.k, &s.k, s.channels, chunk, workspace.get().add(chunk * size));
            });
            pool.run(heads * s.groups * blocks, nanoseconds, &|worker: &mut Worker, chunk| {
                // Late blocks see more keys: the longest first.
                let (number, first) = (chunk / blocks, (blocks - 1 - chunk % blocks) * self.block);
                let packed = workspace.get().add(number / s.groups * size);
                let (scratch, outputs) = (worker.scratch().cast(), [o.get(), lse.get()]);
                self.forward_block(&inputs, self.head(number), first, [scratch, packed], outputs, &mut Ahead::none());
            });
        }
    }

    fn operands(&self, inputs: &Inputs<'_, E>) -> [Operand<E>; 3] {
        let s = &self.shape;
        [
            Operand::new(inputs.q.as_ptr(), &s.q, s.queries, s.channels),
            Operand::new(inputs.k.as_ptr(), &s.k, s.keys, s.channels),
            Operand::new(inputs.v.as_ptr(), &s.v, s.keys, s.values),
        ]
    }

    /// Batch, key head and group of a query head's number.
    fn head(&self, number: usize) -> [usize; 3] {
        let s = &self.shape;
        [number / (s.groups * s.heads), number / s.groups % s.heads, number % s.groups]
    }

    fn check_inputs(&self, inputs: &Inputs<'_, E>) {
        let Inputs { q, k, v, mask } = *inputs;
        let s = &self.shape;
        let masked = self.reach(&s.mask, s.queries, s.keys);
        let long = match mask {
            Mask::None => true,
            Mask::Additive(mask) => mask.len() >= masked,
            Mask::Boolean(mask) => mask.len() >= masked,
        };
        let inputs = [
            (q.len(), self.reach(&s.q, s.queries, s.channels)),
            (k.len(), self.reach(&s.k, s.keys, s.channels)),
            (v.len(), self.reach(&s.v, s.keys, s.values)),
        ];
        assert!(long && inputs.iter().all(|(have, need)| have >= need), "operands of (have, need) {inputs:?}, mask {masked}");
    }

    /// One more than the largest offset of an operand; 0 if it has no elements.
    fn reach(&self, strides: &Strides, positions: usize, channels: usize) -> usize {
        let s = &self.shape;
        let dims = [
            (s.batch, strides.batch),
            (s.heads, strides.head),
            (s.groups, strides.group),
            (positions, strides.position),
            (channels, strides.channel),
        ];
        if dims.iter().any(|dim| dim.0 == 0) {
            0
        } else {
            1 + dims.iter().map(|(size, stride)| (size - 1) * stride).sum::<usize>()
        }
    }

    /// Packs a head's K (or V) as column panels, [panel][channel][column]: columns are keys.
    ///
    /// # Safety
    /// The operand was checked; `to` holds `packed` elements, which nobody else reads or writes.
    unsafe fn pack(&self, from: &[E], strides: &Strides, channels: usize, number: usize, to: *mut E) {
        let s = &self.shape;
        let width = self.kernels.columns;
        let base = number / s.heads * strides.batch + number % s.heads * strides.head;
        for key in (0..s.keys).step_by(width) {
            let here = &from[base + key * strides.position..];
            // SAFETY: `check_inputs` compared the operand with its strides; the rest is the caller's.
            unsafe {
                let panel = to.add(key * channels);
                let (stride, step) = (strides.position as isize, strides.channel as isize);
                let size = Size { rows: width.min(s.keys - key), width, apart: width, steps: channels };
                (self.kernels.pack)(Source { from: here.as_ptr(), stride, step }, panel, size);
            }
        }
    }

    /// Rows of A, those of a cell's queries, times its keys (or values), KEYS apart; what is not seen is not written.
    ///
    /// # Safety
    /// All rows are inside the operands; `to` holds rows x KEYS.
    unsafe fn product(&self, cell: &Cell, [a, b]: [Side<E>; 2], packed: *const E, to: *mut E, ahead: &mut Ahead<'_, E>) {
        let Cell { first, rows, from, keys, .. } = *cell;
        let (width, depth) = (self.kernels.columns, a.channels);
        for column in (0..keys).step_by(width) {
            let c = to.wrapping_add(column);
            if column + 1 == keys && keys % LONE == 1 && depth >= LONE {
                let apart = Apart { strides: [KEYS, a.position], count: depth };
                // SAFETY: the caller's.
                unsafe { self.rows.column(c, a.from, b.from.wrapping_add((from + column) * b.position), &apart, rows) };
                continue;
            }
            let b = packed.wrapping_add((from + column) * depth);
            // SAFETY: the caller's; panels are padded to the microkernel's width.
            unsafe {
                self.tiles(
                    rows,
                    Block {
                        depth,
                        a: a.from,
                        a_row: a.position as isize,
                        a_step: 1,
                        b,
                        b_step: width as isize,
                        b_padded: true,
                        c,
                        c_row: KEYS as isize,
                        c_column: 1,
                        columns: width.min(keys - column),
                        alpha: E::ONE,
                        beta: E::ZERO,
                    },
                    false,
                    |tile, block| {
                        let seen = self.limit(first + tile.end - 1).saturating_sub(from + column);
                        Block { columns: block.columns.min(seen), ..block }
                    },
                    ahead,
                );
            }
        }
    }

    /// Runs the microkernel over `rows` rows of a block of one column panel, of each tile what `seen` leaves of it.
    ///
    /// # Safety
    /// As `Kernels::run` for all rows.
    unsafe fn tiles(
        &self,
        rows: usize,
        block: Block<E>,
        is_far: bool,
        seen: impl Fn(&Range<usize>, Block<E>) -> Block<E>,
        ahead: &mut Ahead<'_, E>,
    ) {
        let height = rows.div_ceil(rows.div_ceil(self.kernels.rows).max(1)).max(1);
        for first in (0..rows).step_by(height) {
            let (at, tile) = (first as isize, first..rows.min(first + height));
            let (a, c) = (block.a.wrapping_offset(at * block.a_row), block.c.wrapping_offset(at * block.c_row));
            let part = seen(&tile, Block { a, c, ..block });
            if part.columns > 0 {
                let c = if is_far { part.lines_of_c(tile.len()) } else { Lines::none() };
                let (lines, due) = ahead.due(tile.len() * part.columns * part.depth);
                let mut beside = Beside { c, ahead: *lines, due, ..Beside::nothing() };
                // SAFETY: the caller's.
                unsafe { self.kernels.run_beside(tile.len(), &part, &mut beside) };
                *lines = beside.ahead;
            }
        }
    }

    /// C[rows, columns] = A B + beta C with B's columns contiguous; of each tile of rows as deep as `seen` says. Steps of B lie a position
    /// apart, in few sets of a cache: several tiles read a copy of them.
    ///
    /// # Safety
    /// As `Kernels::run` for all rows and columns; `panel` holds `PANEL` elements, B has at most `KEYS` steps.
    unsafe fn accumulate(
        &self,
        [rows, columns]: [usize; 2],
        block: Block<E>,
        panel: *mut E,
        is_far: bool,
        seen: impl Fn(&Range<usize>) -> Range<usize>,
        ahead: &mut Ahead<'_, E>,
    ) {
        let width = self.kernels.columns;
        for column in (0..columns).step_by(width) {
            let (b, c) = (block.b.wrapping_add(column), block.c.wrapping_offset(column as isize * block.c_column));
            let mut part = Block { b, c, columns: width.min(columns - column), ..block };
            // SAFETY: the caller's.
            unsafe {
                if rows > FEW * self.kernels.rows {
                    let size = Size { rows: part.columns, width, apart: width, steps: block.depth };
                    (self.kernels.pack)(Source { from: b, stride: 1, step: block.b_step }, panel, size);
                    part = Block { b: panel, b_step: width as isize, b_padded: true, ..part };
                }
                let part_of = |tile: &Range<usize>, block: Block<E>| {
                    let steps = seen(tile);
                    let (depth, first) = (steps.len(), steps.start as isize);
                    let (a, b) = (block.a.wrapping_offset(first * block.a_step), block.b.wrapping_offset(first * block.b_step));
                    Block { depth, a, b, ..block }
                };
                self.tiles(rows, part, is_far, part_of, ahead);
            }
        }
    }

    /// Keys of a cell that some of a tile of its queries see. Probabilities of the others are zero.
    fn keys_of(&self, cell: &Cell, tile: &Range<usize>) -> Range<usize> {
        0..self.limit(cell.first + tile.end - 1).saturating_sub(cell.from).min(cell.keys)
    }

    /// Queries of a cell that see some of a tile of its keys.
    fn queries_of(&self, cell: &Cell, tile: &Range<usize>) -> Range<usize> {
        self.first_to_see(cell.from + tile.start).saturating_sub(cell.first).min(cell.rows)..cell.rows
    }

    /// The mask's part of a row's description.
    fn masked<'a>(&self, mask: Mask<'a, E>, [b, h, g]: [usize; 3], query: usize, key: usize) -> Mask<'a, E> {
        let m = &self.shape.mask;
        let at = b * m.batch + h * m.head + g * m.group + query * m.position + key * m.channel;
        match mask {
            Mask::None => Mask::None,
            Mask::Additive(all) => Mask::Additive(&all[at..]),
            Mask::Boolean(all) => Mask::Boolean(&all[at..]),
        }
    }

    /// O and Lse of a block of queries.
    ///
    /// # Safety
    /// The operands were checked; `scratch` holds `scratch_elements`, `packed` the head's keys; nobody else writes this block of O, Lse.
    unsafe fn forward_block(
        &self,
        inputs: &Inputs<'_, E>,
        [b, h, g]: [usize; 3],
        first: usize,
        [scratch, packed]: [*mut E; 2],
        [o, lse]: [*mut E; 2],
        ahead: &mut Ahead<'_, E>,
    ) {
        let s = &self.shape;
        let rows = self.block.min(s.queries - first);
        let (panel, scores) = (scratch, scratch.wrapping_add(PANEL));
        let sums = scores.wrapping_add(self.block * KEYS);
        let q = inputs.q.as_ptr().wrapping_add(b * s.q.batch + h * s.q.head + g * s.q.group + first * s.q.position);
        let k = inputs.k.as_ptr().wrapping_add(b * s.k.batch + h * s.k.head);
        let sides = [
            Side { from: q, position: s.q.position, channels: s.channels },
            Side { from: k, position: s.k.position, channels: s.channels },
        ];
        let v = inputs.v.as_ptr().wrapping_add(b * s.v.batch + h * s.v.head);
        let mut state = [Row::<E>::start(); MAX_BLOCK];
        let seen = self.limit(first + rows - 1);
        // SAFETY: blocks stay inside the operands by the loops' limits.
        unsafe {
            for i in 0..rows * s.values {
                *sums.add(i) = E::ZERO;
            }
            for from in (0..seen).step_by(KEYS) {
                let keys = KEYS.min(seen - from);
                let cell = Cell { head: [b, h, g], first, rows, from, keys };
                self.product(&cell, sides, packed, scores, ahead);
                for (r, row) in state[..rows].iter_mut().enumerate() {
                    let count = self.limit(first + r).saturating_sub(from).min(keys);
                    let mask = self.masked(inputs.mask, [b, h, g], first + r, from);
                    row.describe(s.scale, mask, s.mask.channel, keys, count);
                }
                self.rows.softmax(scores, &mut state[..rows], sums, s.values);
                let product = Block {
                    depth: keys,
                    a: scores,
                    a_row: KEYS as isize,
                    a_step: 1,
                    b: v.add(from * s.v.position),
                    b_step: s.v.position as isize,
                    b_padded: false,
                    c: sums,
                    c_row: s.values as isize,
                    c_column: 1,
                    columns: 0,
                    alpha: E::ONE,
                    beta: E::ONE,
                };
                self.accumulate([rows, s.values], product, panel, false, |tile| self.keys_of(&cell, tile), ahead);
            }
            let o = o.add(b * s.o.batch + h * s.o.head + g * s.o.group + first * s.o.position);
            let (state, in_place) = (&mut state[..rows], s.o.channel == 1);
            let (to, apart) = if in_place { (o, s.o.position) } else { (sums, s.values) };
            self.rows.finish(to, state, sums, &Apart { strides: [apart, s.values], count: s.values });
            if !in_place {
                let all = (0..rows).flat_map(|r| (0..s.values).map(move |f| (r, f)));
                all.for_each(|(r, f)| *o.add(r * s.o.position + f * s.o.channel) = *sums.add(r * s.values + f));
            }
            for (r, row) in state.iter().enumerate() {
                let at = b * s.lse.batch + h * s.lse.head + g * s.lse.group + (first + r) * s.lse.position;
                *lse.add(at) = row.lse();
            }
        }
    }
}

#[cfg(test)]
mod tests;
