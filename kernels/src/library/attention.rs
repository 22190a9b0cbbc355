//! Scaled dot-product attention without the matrix of scores: forward (O, Lse) and backward (dQ, dK, dV).
//!
//! O = softmax(scale · Q Kᵀ + mask) V by blocks of queries and keys with running maximum and sum (Dao, FlashAttention-2, 2023); the
//! backward pass computes the probabilities again from Lse. Blocks wholly above the causal diagonal are not computed. A query whose
//! keys are all masked gives O = 0, Lse = -∞ and no gradient. One thread owns whole blocks of O, and in the backward pass whole
//! key heads, so that results do not depend on the number of threads.

mod backward;
mod rows;

pub use backward::{Gradient, Gradients};

use super::SharedPtr;
use super::math::Real;
use super::microkernel::{Block, Kernels};
use super::pack::{Size, Source};
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, WORKER_BYTES, Worker};
use rows::{Row, RowKernels};

/// Most queries of one block.
const MAX_BLOCK: usize = 96;
/// Keys of one block: whole vectors, so that the last one may be padded.
const KEYS: usize = 128;

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

/// Operands of a run.
struct Task<'a, E> {
    inputs: Inputs<'a, E>,
    /// Keys as column panels, [head of a batch][panel][channel][column].
    packed_k: *const E,
}

// SAFETY: chunks only read through it.
unsafe impl<E: Send> Send for Task<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Task<'_, E> {}

impl<E: Real> Attention<E> {
    /// Plans for this machine.
    ///
    /// # Panics
    /// If the channels of Q, K, V are not contiguous (`stride 1`): transpose first.
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
        // Larger blocks read and write the sums of keys less often, and compute more above the diagonal.
        let most = if shape.causal.is_some() { 4 } else { 8 } * kernels.rows;
        let block = shape.queries.div_ceil(shape.queries.div_ceil(most).max(1)).max(1);
        let attention = Attention { shape: shape.clone(), kernels, rows: RowKernels::new::<E>(isa), block };
        assert!(attention.scratch_elements() * size_of::<E>() <= WORKER_BYTES, "{} value channels are too many", shape.values);
        attention
    }

    /// Elements of workspace that `forward` needs.
    pub fn forward_workspace(&self) -> usize {
        self.shape.batch * self.shape.heads * self.packed(self.shape.channels)
    }

    /// Elements of workspace that `backward` needs.
    pub fn backward_workspace(&self) -> usize {
        self.forward_workspace() + self.shape.batch * self.shape.heads * self.packed(self.shape.values)
    }

    /// Multiplications and additions of the forward pass; the backward pass has 2.5 times as many.
    pub fn flops(&self) -> usize {
        let s = &self.shape;
        let seen: usize = (0..s.queries).map(|t| self.limit(t)).sum();
        2 * s.batch * s.heads * s.groups * seen * (s.channels + s.values)
    }

    fn scratch_elements(&self) -> usize {
        self.block * (2 * KEYS + 2 * self.shape.values + 4)
    }

    /// Elements of one head's packed keys (values).
    fn packed(&self, channels: usize) -> usize {
        self.shape.keys.next_multiple_of(self.kernels.columns) * channels
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
        self.pack(pool, inputs.k, &s.k, s.channels, workspace);
        let task = Task { inputs, packed_k: workspace.as_ptr() };
        let (o, lse) = (SharedPtr::new(o.as_mut_ptr()), SharedPtr::new(lse.as_mut_ptr()));
        let blocks = s.queries.div_ceil(self.block);
        pool.run(s.batch * s.heads * s.groups * blocks, nanoseconds, &|worker: &mut Worker, chunk| {
            // Late blocks see more keys: the longest first.
            let head = self.head(chunk / blocks);
            let first = (blocks - 1 - chunk % blocks) * self.block;
            // SAFETY: the lengths were checked; each chunk writes its own queries of O and Lse.
            unsafe { self.forward_block(&task, head, first, worker.scratch().cast(), o.get(), lse.get()) };
        });
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

    /// Packs K (or V) of every head as column panels: columns are keys, steps are channels.
    fn pack(&self, pool: &Pool, from: &[E], strides: &Strides, channels: usize, to: &mut [E]) {
        let s = &self.shape;
        let width = self.kernels.columns;
        let size = self.packed(channels);
        let to = SharedPtr::new(to.as_mut_ptr());
        pool.run(s.batch * s.heads, s.batch * s.heads * size / 4, &|_: &mut Worker, chunk| {
            let base = chunk / s.heads * strides.batch + chunk % s.heads * strides.head;
            for key in (0..s.keys).step_by(width) {
                let here = &from[base + key * strides.position..];
                // SAFETY: `check_inputs` compared the operand with its strides; `to` holds `size` elements per head, and the chunk's
                // panels are its own.
                unsafe {
                    let panel = to.get().add(chunk * size + key * channels);
                    let (stride, step) = (strides.position as isize, strides.channel as isize);
                    let size = Size { rows: width.min(s.keys - key), width, apart: width, steps: channels };
                    (self.kernels.pack)(Source { from: here.as_ptr(), stride, step }, panel, size);
                }
            }
        });
    }

    /// Scores of `rows` queries from `first` on against `keys` keys from `from` on, unscaled, KEYS apart.
    ///
    /// # Safety
    /// The task's operands and the block are inside the operands; `to` holds rows x KEYS.
    unsafe fn product(&self, a: *const E, a_row: usize, depth: usize, packed: *const E, block: [usize; 4], to: *mut E) {
        let [rows, _, from, keys] = block;
        let width = self.kernels.columns;
        for column in (0..keys).step_by(width) {
            let b = packed.wrapping_add((from + column) * depth);
            let c = to.wrapping_add(column);
            // SAFETY: the caller's; panels are padded to the microkernel's width.
            unsafe {
                self.tiles(
                    rows,
                    Block {
                        depth,
                        a,
                        a_row: a_row as isize,
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
                );
            }
        }
    }

    /// Runs the microkernel over `rows` rows of a block of one column panel.
    ///
    /// # Safety
    /// As `Kernels::run` for all rows.
    unsafe fn tiles(&self, rows: usize, block: Block<E>) {
        let height = rows.div_ceil(rows.div_ceil(self.kernels.rows).max(1)).max(1);
        for first in (0..rows).step_by(height) {
            let at = first as isize;
            let part =
                Block { a: block.a.wrapping_offset(at * block.a_row), c: block.c.wrapping_offset(at * block.c_row), ..block };
            // SAFETY: the caller's.
            unsafe { self.kernels.run(height.min(rows - first), &part) };
        }
    }

    /// C[rows, columns] = A B + beta C with B's columns contiguous, C's too.
    ///
    /// # Safety
    /// As `Kernels::run` for all rows and columns.
    unsafe fn accumulate(&self, rows: usize, columns: usize, block: Block<E>) {
        let width = self.kernels.columns;
        for column in (0..columns).step_by(width) {
            let c = block.c.wrapping_offset(column as isize * block.c_column);
            let part = Block { b: block.b.wrapping_add(column), c, columns: width.min(columns - column), ..block };
            // SAFETY: the caller's.
            unsafe { self.tiles(rows, part) };
        }
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

    /// # Safety
    /// The operands were checked; `scratch` holds `scratch_elements`; nobody else writes this block of O and Lse.
    unsafe fn forward_block(
        &self,
        task: &Task<'_, E>,
        [b, h, g]: [usize; 3],
        first: usize,
        scratch: *mut E,
        o: *mut E,
        lse: *mut E,
    ) {
        let s = &self.shape;
        let rows = self.block.min(s.queries - first);
        let (scores, sums) = (scratch, scratch.wrapping_add(self.block * KEYS));
        let q = task.inputs.q.as_ptr().wrapping_add(b * s.q.batch + h * s.q.head + g * s.q.group + first * s.q.position);
        let v = task.inputs.v.as_ptr().wrapping_add(b * s.v.batch + h * s.v.head);
        let packed = task.packed_k.wrapping_add((b * s.heads + h) * self.packed(s.channels));
        let mut state = [Row::<E>::start(); MAX_BLOCK];
        let seen = self.limit(first + rows - 1);
        // SAFETY: blocks stay inside the operands by the loops' limits.
        unsafe {
            for i in 0..rows * s.values {
                *sums.add(i) = E::ZERO;
            }
            for from in (0..seen).step_by(KEYS) {
                let keys = KEYS.min(seen - from);
                self.product(q, s.q.position, s.channels, packed, [rows, first, from, keys], scores);
                for (r, row) in state[..rows].iter_mut().enumerate() {
                    let count = self.limit(first + r).saturating_sub(from).min(keys);
                    let mask = self.masked(task.inputs.mask, [b, h, g], first + r, from);
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
                self.accumulate(rows, s.values, product);
            }
            for (r, row) in state[..rows].iter().enumerate() {
                let (factor, log) = row.finish();
                let t = first + r;
                let at = b * s.o.batch + h * s.o.head + g * s.o.group + t * s.o.position;
                let sums = sums.add(r * s.values);
                match s.o.channel {
                    1 => self.rows.scale(o.add(at), sums, factor, s.values),
                    apart => (0..s.values).for_each(|f| *o.add(at + f * apart) = (*sums.add(f)).times(factor)),
                }
                *lse.add(b * s.lse.batch + h * s.lse.head + g * s.lse.group + t * s.lse.position) = log;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 37 + seed * 101) as f64 * 0.731).sin()).collect()
    }

    /// Strides of dense (batch, head, group, position, channel), or (batch, position, head, group, channel).
    fn strides(shape: &Shape, positions: usize, channels: usize, groups: usize, position_major: bool) -> Strides {
        let (h, g) = (shape.heads, groups);
        if position_major {
            let position = h * g * channels;
            Strides { batch: positions * position, head: g * channels, group: channels, position, channel: 1 }
        } else {
            let group = positions * channels;
            Strides { batch: h * g * group, head: g * group, group, position: channels, channel: 1 }
        }
    }

    fn base(batch: usize, heads: usize, groups: usize, [queries, keys, channels, width]: [usize; 4], major: bool) -> Shape {
        let mut shape = Shape {
            batch,
            heads,
            groups,
            queries,
            keys,
            channels,
            values: width,
            scale: 0.37,
            causal: None,
            q: Strides::default(),
            k: Strides::default(),
            v: Strides::default(),
            o: Strides::default(),
            lse: Strides::default(),
            mask: Strides::default(),
        };
        shape.q = strides(&shape, queries, channels, groups, major);
        shape.k = Strides { group: 0, ..strides(&shape, keys, channels, 1, major) };
        shape.v = Strides { group: 0, ..strides(&shape, keys, width, 1, major) };
        shape.o = strides(&shape, queries, width, groups, major);
        shape.lse = Strides { channel: 0, ..strides(&shape, queries, 1, groups, false) };
        shape
    }

    /// O, Lse, dQ, dK, dV by definition; `mask` gives what is added to a score.
    fn naive(
        s: &Shape,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        dy: &[f64],
        mask: &dyn Fn([usize; 3], usize, usize) -> f64,
    ) -> [Vec<f64>; 5] {
        let (mut o, mut lse) = (vec![0.0; dy.len()], vec![0.0; s.batch * s.heads * s.groups * s.queries]);
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        let at = |l: &Strides, [b, h, g]: [usize; 3], p: usize| b * l.batch + h * l.head + g * l.group + p * l.position;
        for number in 0..s.batch * s.heads * s.groups {
            let head = [number / (s.groups * s.heads), number / s.groups % s.heads, number % s.groups];
            let key = [head[0], head[1], 0];
            for t in 0..s.queries {
                let (qt, ot) = (at(&s.q, head, t), at(&s.o, head, t));
                let score = |j: usize| {
                    let hidden = s.causal.is_some_and(|offset| j as i64 > t as i64 + offset);
                    let dot: f64 = (0..s.channels).map(|e| q[qt + e] * k[at(&s.k, key, j) + e]).sum();
                    if hidden { f64::NEG_INFINITY } else { dot * s.scale + mask(head, t, j) }
                };
                let scores: Vec<f64> = (0..s.keys).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = if max.is_finite() { scores.iter().map(|x| (x - max).exp()).sum() } else { 0.0 };
                lse[at(&s.lse, head, t)] = if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY };
                if sum == 0.0 {
                    continue;
                }
                let p: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
                for (j, p) in p.iter().enumerate() {
                    (0..s.values).for_each(|f| o[ot + f] += p * v[at(&s.v, key, j) + f]);
                }
                let delta: f64 = (0..s.values).map(|f| dy[ot + f] * o[ot + f]).sum();
                for (j, p) in p.iter().enumerate() {
                    let (kj, vj) = (at(&s.k, key, j), at(&s.v, key, j));
                    let dp: f64 = (0..s.values).map(|f| dy[ot + f] * v[vj + f]).sum();
                    let ds = p * (dp - delta) * s.scale;
                    (0..s.values).for_each(|f| dv[vj + f] += p * dy[ot + f]);
                    (0..s.channels).for_each(|e| dq[qt + e] += ds * k[kj + e]);
                    (0..s.channels).for_each(|e| dk[kj + e] += ds * q[qt + e]);
                }
            }
        }
        [o, lse, dq, dk, dv]
    }

    /// Runs both passes on NaN-preset memory.
    fn run<E: Real>(s: &Shape, isa: Isa, threads: usize, inputs: [&[f64]; 4], mask: Mask<E>) -> [Vec<E>; 5] {
        let [q, k, v, dy] = inputs.map(|x| x.iter().map(|x| E::from_f64(*x)).collect::<Vec<E>>());
        let empty = |count: usize| vec![E::from_f64(f64::NAN); count];
        let (attention, pool) = (Attention::<E>::with_isa(s, isa), Pool::new(threads));
        let (mut o, mut lse) = (empty(dy.len()), empty(s.batch * s.heads * s.groups * s.queries));
        let inputs = Inputs { q: &q, k: &k, v: &v, mask };
        attention.forward(&pool, inputs, &mut o, &mut lse, &mut empty(attention.forward_workspace()));
        let (mut dq, mut dk, mut dv) = (empty(q.len()), empty(k.len()), empty(v.len()));
        let given = Gradient { output_gradient: &dy, output_gradient_strides: s.o, inputs, o: &o, lse: &lse };
        let results = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv, dq_strides: s.q, dk_strides: s.k, dv_strides: s.v };
        attention.backward(&pool, &given, results, &mut empty(attention.backward_workspace()));
        [o, lse, dq, dk, dv]
    }

    fn close<E: Real>(got: &[Vec<E>; 5], expected: &[Vec<f64>; 5], tolerance: f64, what: &str) {
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            for (j, (x, y)) in got.iter().zip(expected).enumerate() {
                let x = x.to_f64();
                assert!(
                    (x - y).abs() <= tolerance * (1.0 + y.abs()) || x == *y,
                    "{what}: result {i}[{j}] is {x}, expected {y}"
                );
            }
        }
    }

    /// `kind` 0: no mask, 1: additive (with -∞), 2: boolean.
    fn check(s: &Shape, kind: usize) {
        let mut s = s.clone();
        let count = |l: &Strides, p, c| {
            1 + (s.batch - 1) * l.batch + (s.heads - 1) * l.head + (s.groups - 1) * l.group + (p - 1) * l.position + c - 1
        };
        let q = values(count(&s.q, s.queries, s.channels), 1);
        let (k, v) = (values(count(&s.k, s.keys, s.channels), 2), values(count(&s.v, s.keys, s.values), 3));
        let dy = values(count(&s.o, s.queries, s.values), 4);
        // The mask repeats over heads; query 1 sees nothing.
        s.mask = Strides { batch: s.queries * s.keys, position: s.keys, channel: 1, ..Strides::default() };
        let keep = |b: usize, t: usize, j: usize| t != 1 && !(b * 5 + t * 3 + j * 7).is_multiple_of(4);
        let all: Vec<(usize, usize, usize)> =
            (0..s.batch * s.queries * s.keys).map(|i| (i / (s.queries * s.keys), i / s.keys % s.queries, i % s.keys)).collect();
        let boolean: Vec<u8> = all.iter().map(|(b, t, j)| u8::from(keep(*b, *t, *j))).collect();
        let additive: Vec<f64> =
            all.iter().map(|(b, t, j)| if keep(*b, *t, *j) { (*j as f64 * 0.3).cos() } else { f64::NEG_INFINITY }).collect();
        let single: Vec<f32> = additive.iter().map(|x| *x as f32).collect();
        let adds = |[b, _, _]: [usize; 3], t: usize, j: usize| match kind {
            0 => 0.0,
            1 => additive[(b * s.queries + t) * s.keys + j],
            _ if keep(b, t, j) => 0.0,
            _ => f64::NEG_INFINITY,
        };
        let expected = naive(&s, &q, &k, &v, &dy, &adds);
        let inputs = [&q[..], &k[..], &v[..], &dy[..]];
        let mut bits: Option<[Vec<f32>; 5]> = None;
        for isa in Isa::available() {
            for threads in [1, 3] {
                let mask = [Mask::None, Mask::Additive(&single[..]), Mask::Boolean(&boolean[..])][kind];
                let got = run::<f32>(&s, isa, threads, inputs, mask);
                close(&got, &expected, 1e-4, &format!("{isa:?} {s:?} mask {kind}"));
                if isa == Isa::detect() {
                    let first = bits.get_or_insert_with(|| got.clone());
                    assert!(
                        first.iter().zip(&got).all(|(x, y)| x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits())),
                        "{threads} threads differ"
                    );
                }
                let mask = [Mask::None, Mask::Additive(&additive[..]), Mask::Boolean(&boolean[..])][kind];
                close(&run::<f64>(&s, isa, threads, inputs, mask), &expected, 1e-12, &format!("f64 {isa:?} {s:?} mask {kind}"));
            }
        }
    }

    #[test]
    fn against_the_definition() {
        for major in [false, true] {
            check(&base(2, 2, 1, [5, 7, 4, 4], major), 0);
            check(&base(2, 3, 2, [60, 150, 16, 24], major), 0);
            let causal = |offset, sizes| Shape { causal: Some(offset), ..base(1, 2, 2, sizes, major) };
            check(&causal(0, [140, 140, 16, 16]), 0);
            check(&causal(10, [20, 30, 8, 5]), 1);
            check(&causal(-3, [20, 30, 8, 5]), 2);
        }
    }

    #[test]
    fn masks_of_both_kinds() {
        for kind in [1, 2] {
            check(&base(2, 2, 2, [13, 141, 8, 8], true), kind);
        }
    }

    #[test]
    fn nan_is_not_hidden() {
        let s = base(1, 1, 1, [2, 3, 4, 4], false);
        let (x, bad) = (values(16, 1), [f64::NAN; 12]);
        let [o, ..] = run::<f32>(&s, Isa::detect(), 1, [&x[..8], &bad, &x[..12], &x[..8]], Mask::None);
        assert!(o.iter().all(|x| x.is_nan()));
    }
}
