//! Products of few rows with operands whose contracted dim lies side by side: `out[i, j] = Σ_t a[i, t] b[j, t]`.
//!
//! A weight of a linear layer lies so in PyTorch. Of few samples (a step of a recurrence, a batch of one) packing it takes longer than
//! multiplying: its rows are read where they are, once, as vectors along the sum. A sum is `PARTS` chains of multiply-adds, of elements
//! so many apart, added up in one order for all instruction sets and threads.

use super::SharedPtr;
use super::microkernel::Kernels;
use super::simd::{Element, Square, Vector};
use super::sweep::PARTS;
use crate::cpu::pool::{Pool, Worker};
use std::mem::MaybeUninit;

/// Most rows: of more, what is packed once is read often enough.
const MOST: usize = 8;
/// Shorter sums are added up no faster than they are packed.
const SHORTEST: usize = 64;
/// Fewer columns are no work.
const FEWEST: usize = 16;

/// Rows of a tile: more, and as many columns, may come to lie in few sets of a first-level cache.
const ROWS: usize = 4;
/// Sums of a tile: of some rows, and of so many columns as make so many.
const TOGETHER: usize = PARTS;
/// Columns of a chunk.
const CHUNK: usize = 64;

/// One dim of rows (columns): how many, and the strides in their operand and in C.
#[derive(Clone, Copy, Debug)]
struct Side {
    count: usize,
    operand: isize,
    c: isize,
}

/// Rows of A and columns of B, whose sums are `sums[j · rows + i]`.
#[derive(Clone, Copy)]
pub struct Tile<E> {
    pub a: *const E,
    pub a_row: isize,
    pub rows: usize,
    pub b: *const E,
    pub b_column: isize,
    pub columns: usize,
    pub length: usize,
}

/// # Safety
/// There are 1 to `ROWS` rows, and 1 to `TOGETHER` sums; so many rows and columns of `length` elements can be read, `TOGETHER` sums written;
/// the machine has the instruction set.
pub type Sums<E> = unsafe fn(*mut E, &Tile<E>);

/// A planned product.
pub(super) struct Few<E> {
    sums: Sums<E>,
    /// Offsets of the operands and C of each product.
    batch: Vec<[isize; 3]>,
    rows: Side,
    columns: Side,
    length: usize,
    /// Which operand has the rows.
    a: usize,
}

impl<E: Element> Few<E> {
    /// Plans for dims (their length, and strides in both operands and C) of the left operand, the right one, and of both. `None` if these
    /// make no product of few rows, or do not lie as one needs.
    pub fn new([m, n, k]: [&[(usize, [isize; 3])]; 3], batch: Vec<[isize; 3]>, sums: Sums<E>) -> Option<Few<E>> {
        let &[(length, [1, 1, _])] = k else { return None };
        let side = |dims: &[(usize, [isize; 3])], operand: usize| match *dims {
            [] => Some(Side { count: 1, operand: 0, c: 0 }),
            [(count, strides)] => Some(Side { count, operand: strides[operand], c: strides[2] }),
            _ => None,
        };
        let (lhs, rhs) = (side(m, 0)?, side(n, 1)?);
        let a = usize::from(rhs.count < lhs.count);
        let [rows, columns] = if a == 1 { [rhs, lhs] } else { [lhs, rhs] };
        let fits = (1..=MOST).contains(&rows.count) && columns.count >= FEWEST && length >= SHORTEST;
        fits.then_some(Few { sums, batch, rows, columns, length, a })
    }

    /// C = alpha · lhs rhs + beta · C; with beta 0, C is not read.
    ///
    /// # Safety
    /// The offsets that batch, sizes and strides reach are inside A, B (readable) and C (writable, apart from both, each element once).
    pub unsafe fn run(&self, pool: &Pool, kernels: &Kernels<E>, [alpha, beta]: [E; 2], [lhs, rhs]: [*const E; 2], c: *mut E) {
        let [lhs, rhs, c] = [SharedPtr::new(lhs.cast_mut()), SharedPtr::new(rhs.cast_mut()), SharedPtr::new(c)];
        let across = self.columns.count.div_ceil(CHUNK);
        let work = self.batch.len() * self.rows.count * self.columns.count * self.length;
        pool.run(self.batch.len() * across, work / (8 * kernels.lanes), &|_: &mut Worker, chunk| {
            let offsets = self.batch[chunk / across];
            let first = chunk % across * CHUNK;
            let columns = first..self.columns.count.min(first + CHUNK);
            // SAFETY: the caller's; chunks have columns of their own.
            unsafe {
                let operands = [lhs.get().offset(offsets[0]).cast_const(), rhs.get().offset(offsets[1]).cast_const()];
                let [a, b] = [operands[self.a], operands[1 - self.a]];
                self.columns(columns, [alpha, beta], [a, b], c.get().offset(offsets[2]));
            }
        });
    }

    /// # Safety
    /// As `run`, of one product and these columns.
    unsafe fn columns(&self, columns: std::ops::Range<usize>, [alpha, beta]: [E; 2], [a, b]: [*const E; 2], c: *mut E) {
        let Few { rows, columns: along, .. } = self;
        let mut sums = [E::ZERO; TOGETHER];
        let height = rows.count.div_ceil(rows.count.div_ceil(ROWS));
        let width = TOGETHER / height;
        for j in columns.clone().step_by(width) {
            for i in (0..rows.count).step_by(height) {
                // SAFETY: the caller's.
                unsafe {
                    let tile = Tile {
                        a: a.offset(i as isize * rows.operand),
                        a_row: rows.operand,
                        rows: height.min(rows.count - i),
                        b: b.offset(j as isize * along.operand),
                        b_column: along.operand,
                        columns: width.min(columns.end - j),
                        length: self.length,
                    };
                    (self.sums)(sums.as_mut_ptr(), &tile);
                    for column in 0..tile.columns {
                        for row in 0..tile.rows {
                            let at = (i + row) as isize * rows.c + (j + column) as isize * along.c;
                            let (to, sum) = (c.offset(at), alpha.times(sums[column * tile.rows + row]));
                            *to = if beta == E::ZERO { sum } else { beta.fma(*to, sum) };
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// As `Sums`.
#[inline(always)]
pub(super) unsafe fn sums<V: Vector>(to: *mut V::E, t: &Tile<V::E>) {
    let mut chains = MaybeUninit::<[[V::E; PARTS]; TOGETHER]>::uninit();
    let first = chains.as_mut_ptr().cast::<[V::E; PARTS]>();
    // SAFETY: the caller's; all chains are written.
    unsafe {
        // Whole tiles keep all their chains in registers; of shorter vectors, of which several are a chain, a column and some rows.
        match (t.rows, t.columns) {
            (1, 16) if V::LANES == PARTS => summed::<V, 1, 16, 1>(first, t, 0, 0),
            (2, 8) if V::LANES == PARTS => summed::<V, 2, 8, 1>(first, t, 0, 0),
            (3, 5) if V::LANES == PARTS => summed::<V, 3, 5, 1>(first, t, 0, 0),
            (4, 4) if V::LANES == PARTS => summed::<V, 4, 4, 1>(first, t, 0, 0),
            (3, 4) if V::LANES == PARTS => summed::<V, 3, 4, 1>(first, t, 0, 0),
            (2, 5) if V::LANES == PARTS => summed::<V, 2, 5, 1>(first, t, 0, 0),
            _ => (0..t.columns).for_each(|j| column::<V>(first, t, j)),
        }
        for rest in t.rows * t.columns..TOGETHER {
            first.add(rest).write([V::E::ZERO; PARTS]);
        }
        add_up::<V>(to, first);
    }
}

/// The chains of column `j`.
///
/// # Safety
/// As `Sums`.
#[inline(always)]
unsafe fn column<V: Vector>(chains: *mut [V::E; PARTS], t: &Tile<V::E>, j: usize) {
    let all = 0..t.rows;
    // SAFETY: the caller's.
    unsafe {
        match (PARTS / V::LANES, t.rows) {
            (1, ROWS) => summed::<V, ROWS, 1, 1>(chains, t, 0, j),
            (1, 3) => summed::<V, 3, 1, 1>(chains, t, 0, j),
            (1, 2) => summed::<V, 2, 1, 1>(chains, t, 0, j),
            (1, _) => summed::<V, 1, 1, 1>(chains, t, 0, j),
            (2, ROWS) => summed::<V, ROWS, 1, 2>(chains, t, 0, j),
            (2, 3) => summed::<V, 3, 1, 2>(chains, t, 0, j),
            (2, 2) => summed::<V, 2, 1, 2>(chains, t, 0, j),
            (2, _) => summed::<V, 1, 1, 2>(chains, t, 0, j),
            (4, _) => all.for_each(|i| summed::<V, 1, 1, 4>(chains, t, i, j)),
            (8, _) => all.for_each(|i| summed::<V, 1, 1, 8>(chains, t, i, j)),
            _ => all.for_each(|i| summed::<V, 1, 1, PARTS>(chains, t, i, j)),
        }
    }
}

/// The chains, of so many vectors each, of `R` rows from row `i` on and `C` columns from column `j` on.
///
/// # Safety
/// As `Sums`.
#[inline(always)]
unsafe fn summed<V: Vector, const R: usize, const C: usize, const VECTORS: usize>(
    chains: *mut [V::E; PARTS],
    t: &Tile<V::E>,
    i: usize,
    j: usize,
) {
    let row = |row: usize| t.a.wrapping_offset((i + row) as isize * t.a_row);
    let column = |column: usize| t.b.wrapping_offset((j + column) as isize * t.b_column);
    // SAFETY: the caller's; a vector's lanes past the end are neither read nor added to.
    unsafe {
        let mut sums = [[[V::zero(); VECTORS]; R]; C];
        let whole = t.length - t.length % PARTS;
        for at in (0..whole).step_by(PARTS) {
            for part in 0..VECTORS {
                let at = at + part * V::LANES;
                let mut a = [V::zero(); R];
                a.iter_mut().enumerate().for_each(|(i, a)| *a = V::load(row(i).add(at)));
                for (j, sums) in sums.iter_mut().enumerate() {
                    let b = V::load(column(j).add(at));
                    for (sums, a) in sums.iter_mut().zip(a) {
                        sums[part] = a.fma(b, sums[part]);
                    }
                }
            }
        }
        for part in 0..VECTORS {
            let at = whole + part * V::LANES;
            let lanes = t.length.saturating_sub(at).min(V::LANES);
            if lanes > 0 {
                for (j, sums) in sums.iter_mut().enumerate() {
                    let b = V::load_first(column(j).add(at), lanes);
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let a = V::load_first(row(i).add(at), lanes);
                        sums[part] = a.fma(b, sums[part]);
                    }
                }
            }
        }
        for (c, sums) in sums.into_iter().enumerate() {
            for (r, sums) in sums.into_iter().enumerate() {
                let to = chains.add((j + c) * t.rows + i + r).cast::<V::E>();
                sums.into_iter().enumerate().for_each(|(part, sum)| sum.store(to.add(part * V::LANES)));
            }
        }
    }
}

/// Each sum of its chains, halves added to halves.
///
/// # Safety
/// As `Sums`; the chains are there.
#[inline(always)]
unsafe fn add_up<V: Vector>(to: *mut V::E, chains: *const [V::E; PARTS]) {
    const { assert!(PARTS == 16 && PARTS == TOGETHER) };
    let mut turned = MaybeUninit::<[[V::E; TOGETHER]; PARTS]>::uninit();
    let rows = turned.as_mut_ptr().cast::<[V::E; TOGETHER]>();
    // SAFETY: the caller's; both are squares, and vectors lie within rows.
    unsafe {
        if V::SQUARES && V::LANES == PARTS {
            let square = Square { from: chains.cast(), stride: PARTS as isize, rows: PARTS, columns: PARTS, lanes: PARTS };
            V::transpose(&square, |part| rows.add(part).cast());
        } else {
            for sum in 0..TOGETHER {
                (0..PARTS).for_each(|part| *rows.add(part).cast::<V::E>().add(sum) = (*chains.add(sum))[part]);
            }
        }
        let one = V::splat(V::E::ONE);
        for first in (0..TOGETHER).step_by(V::LANES) {
            let mut parts = [V::zero(); PARTS];
            parts.iter_mut().enumerate().for_each(|(part, to)| *to = V::load(rows.add(part).cast::<V::E>().add(first)));
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|part| parts[part] = parts[part].fma(one, parts[part + half]));
            }
            parts[0].store(to.add(first));
        }
    }
}
