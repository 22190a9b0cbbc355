//! Additions at computed places, and running sums.
//!
//! Every element of a result receives its contributions in the order of their sources, on one thread: threads share the work by batch
//! and by columns, never by source.

use super::SharedPtr;
use super::simd::Element;
use crate::cpu::pool::{Pool, Worker};

/// One loop of a scatter: its length and its element strides in the indices, the updates and the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    pub size: usize,
    pub index: Option<usize>,
    pub update: Option<usize>,
    pub out: Option<usize>,
}

/// The dim of the result that the indices select: shard `[offset, offset + valid)`; others are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexed {
    pub stride: usize,
    pub offset: i64,
    pub valid: usize,
}

/// Indices as they are stored.
#[derive(Clone, Copy, Debug)]
pub enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

/// A planned scatter: out[.., index, ..] += update.
#[derive(Clone, Debug)]
pub struct ScatterAdd {
    /// Offsets [index, update, out] of every batch element, source and column, and the columns' common strides.
    batch: Vec<[usize; 3]>,
    sources: Vec<[usize; 3]>,
    columns: Vec<[usize; 3]>,
    contiguous: bool,
    indexed: Indexed,
    /// Elements that indices, updates and result must have.
    extents: [usize; 3],
}

/// Columns of a chunk.
const COLUMNS: usize = 64;

impl ScatterAdd {
    /// Plans a scatter. Factors of all three operands are a batch, of indices and updates sources, of updates and result columns.
    ///
    /// # Panics
    /// If a factor is of another kind.
    pub fn new(factors: &[Factor], indexed: Indexed) -> ScatterAdd {
        let group = |index: bool, out: bool| -> Vec<Factor> {
            let kind = |f: &&Factor| f.index.is_some() == index && f.update.is_some() && f.out.is_some() == out;
            factors.iter().filter(kind).copied().collect()
        };
        let (batch, sources, columns) = (group(true, true), group(true, false), group(false, true));
        assert!(
            batch.len() + sources.len() + columns.len() == factors.len(),
            "every factor of a scatter is in the updates and in another operand"
        );
        let reach = |stride: fn(&Factor) -> Option<usize>, more: usize| {
            let dims = || factors.iter().filter_map(move |f| stride(f).map(|s| (f.size, s)));
            if dims().any(|dim| dim.0 == 0) { 0 } else { 1 + more + dims().map(|(size, s)| (size - 1) * s).sum::<usize>() }
        };
        let extents =
            [reach(|f| f.index, 0), reach(|f| f.update, 0), reach(|f| f.out, indexed.valid.saturating_sub(1) * indexed.stride)];
        let columns = offsets(&columns);
        let contiguous = columns.iter().enumerate().all(|(i, at)| at[1] == i && at[2] == i);
        ScatterAdd { batch: offsets(&batch), sources: offsets(&sources), columns, contiguous, indexed, extents }
    }

    /// Adds the updates into `out`.
    ///
    /// # Panics
    /// If an operand is shorter than its strides reach.
    pub fn run<E: Element>(&self, pool: &Pool, indices: Indices, updates: &[E], out: &mut [E]) {
        let have = match indices {
            Indices::I32(x) => x.len(),
            Indices::I64(x) => x.len(),
        };
        let lengths = [have, updates.len(), out.len()];
        assert!(
            lengths.iter().zip(self.extents).all(|(have, need)| *have >= need),
            "operands of {lengths:?} elements, need {:?}",
            self.extents
        );
        if self.columns.is_empty() || self.sources.is_empty() {
            return;
        }
        let stretches = self.columns.len().div_ceil(COLUMNS);
        let out = SharedPtr::new(out.as_mut_ptr());
        let work = self.batch.len() * self.sources.len() * self.columns.len();
        pool.run(self.batch.len() * stretches, work / 4, &|_: &mut Worker, chunk| {
            let batch = self.batch[chunk / stretches];
            let first = chunk % stretches * COLUMNS;
            let columns = &self.columns[first..self.columns.len().min(first + COLUMNS)];
            for source in &self.sources {
                let at = batch[0] + source[0];
                let index = match indices {
                    Indices::I32(x) => i64::from(x[at]),
                    Indices::I64(x) => x[at],
                };
                let local = index.wrapping_sub(self.indexed.offset);
                if (0..self.indexed.valid as i64).contains(&local) {
                    let row = batch[2] + local as usize * self.indexed.stride;
                    let update = batch[1] + source[1];
                    // SAFETY: `extents` bounds all offsets; a chunk's batch and columns are its own.
                    unsafe {
                        if self.contiguous {
                            let to = std::slice::from_raw_parts_mut(out.get().add(row + first), columns.len());
                            let from = &updates[update + first..][..columns.len()];
                            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.plus(*to));
                        } else {
                            columns.iter().for_each(|c| {
                                *out.get().add(row + c[2]) = updates[update + c[1]].plus(*out.get().add(row + c[2]))
                            });
                        }
                    }
                }
            }
        });
    }
}

/// All offsets of the dims of one group, in order.
fn offsets(factors: &[Factor]) -> Vec<[usize; 3]> {
    let mut all = vec![[0; 3]];
    for f in factors {
        let strides = [f.index, f.update, f.out].map(|s| s.unwrap_or(0));
        all =
            all.iter().flat_map(|base| (0..f.size).map(move |i| [0, 1, 2].map(|o: usize| base[o] + i * strides[o]))).collect();
    }
    all
}

/// Running sums along one dim of a dense row-major block [outer, size, inner].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cumsum {
    pub outer: usize,
    pub size: usize,
    pub inner: usize,
    /// The first sum is 0, the last element is in none.
    pub exclusive: bool,
    /// From the last element to the first.
    pub reverse: bool,
}

impl Cumsum {
    /// # Panics
    /// If an operand is shorter than the block.
    pub fn run<E: Element>(&self, pool: &Pool, from: &[E], to: &mut [E]) {
        let Cumsum { outer, size, inner, .. } = *self;
        let total = outer * size * inner;
        assert!(from.len() >= total && to.len() >= total, "{} and {} elements for {total}", from.len(), to.len());
        let stretches = inner.div_ceil(COLUMNS);
        let to = SharedPtr::new(to.as_mut_ptr());
        pool.run(outer * stretches, total, &|_: &mut Worker, chunk| {
            let base = chunk / stretches * size * inner;
            let first = chunk % stretches * COLUMNS;
            let count = COLUMNS.min(inner - first);
            let mut sums = [E::ZERO; COLUMNS];
            for step in 0..size {
                let row = base + if self.reverse { size - 1 - step } else { step } * inner + first;
                for (c, sum) in sums[..count].iter_mut().enumerate() {
                    let next = sum.plus(from[row + c]);
                    // SAFETY: the block has `total` elements; a chunk's columns are its own.
                    unsafe { *to.get().add(row + c) = if self.exclusive { *sum } else { next } };
                    *sum = next;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedding_gradient_of_a_shard() {
        // tokens [b, t], updates [b, t, c] -> rows 3..8 of a table, repeats and strangers included.
        let (b, t, c) = (3, 70, 130);
        let tokens: Vec<i64> = (0..b * t).map(|i| (i * i % 11) as i64 - 1).collect();
        let updates: Vec<f32> = (0..b * t * c).map(|i| (i % 23) as f32 - 11.0).collect();
        let mut expected = vec![1.0; 5 * c];
        for (i, token) in tokens.iter().enumerate() {
            if (3..8).contains(token) {
                (0..c).for_each(|j| expected[(*token as usize - 3) * c + j] += updates[i * c + j]);
            }
        }
        let factors = [
            Factor { size: b, index: Some(t), update: Some(t * c), out: None },
            Factor { size: t, index: Some(1), update: Some(c), out: None },
            Factor { size: c, index: None, update: Some(1), out: Some(1) },
        ];
        let scatter = ScatterAdd::new(&factors, Indexed { stride: c, offset: 3, valid: 5 });
        for threads in [1, 3] {
            let mut out = vec![1.0; 5 * c];
            scatter.run(&Pool::new(threads), Indices::I64(&tokens), &updates, &mut out);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn batched_scatter_across_the_order() {
        // indices [b, n], updates [n, b] -> out [v, b].
        let indices = [0, 2, 2, 1, 1, 1];
        let updates = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let factors = [
            Factor { size: 2, index: Some(3), update: Some(1), out: Some(1) },
            Factor { size: 3, index: Some(1), update: Some(2), out: None },
        ];
        let mut out = [0.0; 6];
        let scatter = ScatterAdd::new(&factors, Indexed { stride: 2, offset: 0, valid: 3 });
        scatter.run(&Pool::new(1), Indices::I32(&indices), &updates, &mut out);
        assert_eq!(out, [1.0, 0.0, 0.0, 60.0, 5.0, 0.0]);
    }

    #[test]
    fn running_sums() {
        let from = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let run = |outer, size, inner, exclusive, reverse| {
            let mut to = [f64::NAN; 6];
            Cumsum { outer, size, inner, exclusive, reverse }.run(&Pool::new(2), &from, &mut to);
            to
        };
        assert_eq!(run(2, 3, 1, false, false), [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]);
        assert_eq!(run(2, 3, 1, true, true), [5.0, 3.0, 0.0, 11.0, 6.0, 0.0]);
        assert_eq!(run(1, 3, 2, false, false), [1.0, 2.0, 4.0, 6.0, 9.0, 12.0]);
        assert_eq!(run(1, 3, 2, true, false), [0.0, 0.0, 1.0, 2.0, 4.0, 6.0]);
    }
}
