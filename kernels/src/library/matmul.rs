//! `dot_general`: contraction of two strided operands over named factors, planned once and run without allocating.
//!
//! A factor that both operands and the result have is a batch dim, one that the result lacks is contracted, the others are rows (of the
//! left operand) and columns (of the right one). Neighbouring dims that are one dim in memory are merged; what remains becomes panels.

use super::factors::{self, Packing};
use super::few::Few;
use super::gemm::{Gemm, Operands, PACKED_PIECE, PIECE, Panel, Part, Rows, Run, Side, Strides, WHOLE, are_crowded};
use super::microkernel::{Kernels, Stretch};
use super::simd::{Element, LINE};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use dcc_program::DType;

pub use super::factors::Product;

/// One loop of the contraction: its length and its element stride in each operand that has it. For an uneven shard the length is
/// the valid one, the strides are those of the stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor {
    pub size: usize,
    pub lhs: Option<usize>,
    pub rhs: Option<usize>,
    pub out: Option<usize>,
}

/// A planned contraction: out = alpha * lhs . rhs + beta * out, with sums of `E` and operands of `S`.
pub struct DotGeneral<E, S = E> {
    gemm: Gemm<E, S>,
    /// How it is done instead, where that is faster.
    few: Option<Few<E>>,
    swapped: bool,
    empty: bool,
    /// Elements that lhs, rhs and out must have.
    extents: [usize; 3],
    flops: usize,
}

/// Where steps of the columns lie farther apart than so many elements, more panels of rows than `FEW` are worth a copy, whose steps are
/// constants and lie in all sets of a cache.
const NEAR: usize = 64;
const FEW: usize = 2;
/// Where they lie no farther apart than that, but farther than a panel is wide, more panels than these.
const MANY: usize = 4;

/// Words of a run that is worth a piece of its own.
pub(in crate::library) const LONG: usize = 128;

/// A dim of one group: its length and its strides in A, B and C.
type Dim = (usize, [isize; 3]);

impl<E: Element> DotGeneral<E> {
    /// Plans for this machine.
    ///
    /// # Panics
    /// If a factor belongs to one operand only.
    pub fn new(factors: &[Factor]) -> Self {
        Self::with_isa(factors, Isa::detect())
    }

    /// Plans for one instruction set, which the machine must have.
    pub fn with_isa(factors: &[Factor], isa: Isa) -> Self {
        assert!(isa <= Isa::detect(), "{isa:?} is not on this machine");
        let kernels = E::kernels(isa);
        Self::plan(factors, (kernels, E::broad_kernels(isa)), Packing::plain(&kernels))
    }
}

impl DotGeneral<f32, u16> {
    /// Plans for half floats of `dtype`, by tiles or pairs where this machine and the dtype have them and they are faster. `None`: they must
    /// be widened first.
    ///
    /// # Panics
    /// If a factor belongs to one operand only.
    pub fn of_halves(factors: &[Factor], dtype: DType) -> Option<Self> {
        [Product::Tiles, Product::Pairs, Product::Widened]
            .into_iter()
            .filter(|product| *product != Product::Pairs || Isa::prefers_bf16_products())
            .find_map(|product| Self::with_product(factors, dtype, product))
    }

    /// Plans for products of one kind. `None` where this machine or the dtype has none.
    pub fn with_product(factors: &[Factor], dtype: DType, product: Product) -> Option<Self> {
        let (kernels, packing) = factors::halves(dtype, product)?;
        Some(Self::plan(factors, (kernels, None), packing))
    }

    /// Elements of workspace that `run_rounded` needs.
    pub fn workspace(&self) -> usize {
        if self.gemm.pieces.len() > 1 { self.extents[2] } else { 0 }
    }

    /// Computes out = alpha * lhs . rhs, rounded once.
    ///
    /// # Panics
    /// If an operand is shorter than its strides reach, or the workspace than `workspace`.
    pub fn run_rounded(&self, pool: &Pool, alpha: f32, lhs: &[u16], rhs: &[u16], out: &mut [u16], workspace: &mut [f32]) {
        assert!(workspace.len() >= self.workspace(), "a workspace of {} elements", workspace.len());
        self.check([lhs.len(), rhs.len(), out.len()]);
        let c = workspace.as_mut_ptr();
        // SAFETY: as in `run`; of one piece the workspace has nothing.
        unsafe { self.compute(pool, [alpha, 0.0], [lhs, rhs], c, Some(out.as_mut_ptr())) };
    }
}

impl<E: Element, S: Copy + Send + Sync> DotGeneral<E, S> {
    /// With broad kernels instead of the others where there are such and they are better.
    fn plan(factors: &[Factor], (kernels, broad): (Kernels<E>, Option<Kernels<E>>), packing: Packing<E, S>) -> Self {
        let group = |lhs: bool, rhs: bool, out: bool| -> Vec<Dim> {
            let has = |f: &&Factor| f.lhs.is_some() == lhs && f.rhs.is_some() == rhs && f.out.is_some() == out;
            factors.iter().filter(has).map(|f| (f.size, [f.lhs, f.rhs, f.out].map(|s| s.unwrap_or(0) as isize))).collect()
        };
        let (mut batch, mut m, mut n, mut k) =
            (group(true, true, true), group(true, false, true), group(false, true, true), group(true, true, false));
        assert!(
            batch.len() + m.len() + n.len() + k.len() == factors.len(),
            "every factor of a dot_general is in two operands or all"
        );
        merge(&mut batch, 2);
        merge(&mut m, 2);
        merge(&mut n, 2);
        merge(&mut k, 0);
        let count = |dims: &[Dim]| dims.iter().map(|dim| dim.0).product::<usize>();
        let plain = size_of::<E>() == size_of::<S>();
        let few = if plain { Few::new([&m, &n, &k], offsets(&batch), kernels.few) } else { None };
        let swapped = swap_costs_less(&kernels, packing.steps, &m, &n, &k);
        let most = most_words(&k, packing.steps) * packing.steps;
        if swapped {
            std::mem::swap(&mut m, &mut n);
            [&mut batch, &mut m, &mut n, &mut k].into_iter().for_each(|dims| dims.iter_mut().for_each(|dim| dim.1.swap(0, 1)));
        }
        let (inner_m, inner_n, inner_k) = (inner(&m), inner(&n), inner(&k));
        // Blocks of fewer rows copy more of the columns at a time, and wait where these lie far apart in few sets of a cache.
        let waits = inner_n.1[1] == 1 && are_crowded::<S>(inner_k.1[1]) && count(&m) < 384;
        let kernels = broad.filter(|broad| inner_k.1[0] == 1 && !waits && broad_loads_less(broad, &n)).unwrap_or(kernels);
        let words = kernels.words;
        let strides = Strides {
            a_row: inner_m.1[0],
            a_step: inner_k.1[0],
            b_column: inner_n.1[1],
            b_step: inner_k.1[1],
            c_row: inner_m.1[2],
            c_column: inner_n.1[2],
        };
        let rows = panels(&m, 0, kernels.rows, if words == 1 { Cut::Even } else { Cut::Rows });
        let columns = panels(&n, 1, kernels.columns, Cut::Columns { lanes: kernels.lanes });
        let pieces = pieces(&k, [packing.steps, packing.steps * words], most);
        let work = count(&m) * count(&n) * count(&k);
        let readers = rows.panels.len();
        let is_apart = |elements: usize| strides.b_step > elements as isize;
        let is_worth_a_copy = readers > FEW && is_apart(NEAR) || readers > MANY && is_apart(kernels.columns);
        let gemm = Gemm {
            kernels,
            packing,
            batch: offsets(&batch),
            read_a: match words {
                1 => read_a::<E, S>(&strides, [&rows, &columns], &pieces, (packing.steps, &kernels)),
                _ => read_tiles(&strides, &rows, &pieces, [kernels.lanes, packing.steps, packing.steps * words]),
            },
            pack_b: size_of::<E>() != size_of::<S>()
                || !columns.is_whole()
                || is_broken(&pieces, |run| run.b, strides.b_step)
                || strides.b_column != 1
                || (is_worth_a_copy && !overlap(&columns, &pieces, strides.b_step)),
            rows,
            columns,
            longest: pieces.iter().map(|runs| words_of(runs, packing.steps)).max().unwrap_or(1).max(1).next_multiple_of(words),
            pieces,
            strides,
            work,
        };
        let empty = count(&batch) * count(&m) * count(&n) == 0;
        DotGeneral { gemm, few, swapped, empty, extents: extents(factors), flops: 2 * count(&batch) * work }
    }

    /// Multiplications and additions of one run.
    pub fn flops(&self) -> usize {
        self.flops
    }

    /// Computes out = alpha * lhs . rhs + beta * out; with beta 0, out is not read.
    ///
    /// # Panics
    /// If an operand is shorter than its strides reach.
    pub fn run(&self, pool: &Pool, alpha: E, beta: E, lhs: &[S], rhs: &[S], out: &mut [E]) {
        self.check([lhs.len(), rhs.len(), out.len()]);
        // SAFETY: the lengths were compared with the largest offsets; `out` is exclusive; factors give each of its elements once.
        unsafe { self.compute(pool, [alpha, beta], [lhs, rhs], out.as_mut_ptr(), None) };
    }

    fn check(&self, lengths: [usize; 3]) {
        assert!(
            self.empty || lengths.iter().zip(self.extents).all(|(have, need)| *have >= need),
            "operands of {lengths:?} elements, need {:?}",
            self.extents
        );
    }

    /// # Safety
    /// As `Gemm::run`.
    unsafe fn compute(&self, pool: &Pool, [alpha, beta]: [E; 2], [lhs, rhs]: [&[S]; 2], c: *mut E, rounded: Option<*mut S>) {
        if self.empty {
            return;
        }
        if let Some(few) = &self.few {
            // SAFETY: the caller's; operands of sums' own size are of their type.
            return unsafe { few.run(pool, &self.gemm.kernels, [alpha, beta], [lhs, rhs].map(|x| x.as_ptr().cast()), c) };
        }
        let (a, b) = if self.swapped { (rhs, lhs) } else { (lhs, rhs) };
        let operands = Operands { a: a.as_ptr(), b: b.as_ptr(), c, rounded, alpha, beta };
        // SAFETY: the caller's.
        unsafe { self.gemm.run(pool, operands) };
    }
}

/// Orders dims by their stride in operand `by`, outermost first, and merges neighbours that are one dim in every operand.
fn merge(dims: &mut Vec<Dim>, by: usize) {
    if dims.iter().any(|dim| dim.0 == 0) {
        dims.truncate(1);
        dims[0].0 = 0;
        return;
    }
    dims.retain(|dim| dim.0 != 1);
    dims.sort_by_key(|dim| std::cmp::Reverse(dim.1[by]));
    let mut merged: Vec<Dim> = Vec::new();
    for dim in dims.drain(..) {
        match merged.last_mut() {
            Some(outer) if (0..3).all(|i| outer.1[i] == dim.1[i] * dim.0 as isize) => *outer = (outer.0 * dim.0, dim.1),
            _ => merged.push(dim),
        }
    }
    *dims = merged;
}

/// The dim that panels run along; a group without dims has one step.
fn inner(dims: &[Dim]) -> Dim {
    dims.last().copied().unwrap_or((1, [1; 3]))
}

/// Whether C^T = B^T A^T is cheaper: picoseconds of the products, of packing both operands (one that is read where it is comes in
/// slowly) and of writing C. A word of each operand has so many steps.
fn swap_costs_less<E>(kernels: &Kernels<E>, steps: usize, m: &[Dim], n: &[Dim], k: &[Dim]) -> bool {
    let count = |dims: &[Dim]| dims.iter().map(|dim| dim.0).product::<usize>() as f64;
    let (depth, inner_k) = (count(k), inner(k));
    let pieces = (depth / (most_words(k, steps) * steps) as f64).ceil();
    let cost = |rows: &[Dim], columns: &[Dim], a: usize, b: usize| {
        let (row, column) = (inner(rows), inner(columns));
        let extent = |dims: &[Dim], first: usize| dims[first..].iter().map(|dim| dim.0).product::<usize>();
        let first = first_of_rows(rows, a, kernels.rows);
        let (height, width) = (extent(rows, first), extent(columns, joint(columns, 2)));
        let pack = |side: Dim, operand: usize| match (side.1[operand], inner_k.1[operand]) {
            (1, _) => 80.0,
            (_, 1) => 120.0,
            _ => 600.0,
        };
        let pack_rows = if inner_k.1[a] == 1 { 40.0 } else { pack(row, a) };
        let write = match (row.1[2], column.1[2]) {
            (_, 1) => 30.0,
            (1, _) => 200.0,
            _ => 500.0,
        };
        // Of a product, which takes a lane for half a cycle: lanes beyond the last column idle. Each step loads a vector or two of B
        // and an element of A per row, in the time of as many products at best.
        let (panel, lanes) = (width.clamp(1, kernels.columns), kernels.lanes as f64);
        let vectors = (panel as f64 / lanes).ceil();
        let held = height as f64 / (height as f64 / kernels.rows as f64).ceil();
        let crosses = first < joint(rows, 2) || is_short(rows, kernels.rows);
        let write = if crosses { write + 50.0 } else { write };
        let slow = ((held + vectors) / (held * vectors)).max(8.0 / (held * vectors)).max(1.0);
        let product = kernels.pace / steps as f64 / lanes * slow * vectors * lanes / panel as f64;
        count(rows) * depth * pack_rows
            + count(columns) * depth * pack(column, b)
            + count(rows) * count(columns) * (write * pieces + product * depth)
    };
    cost(n, m, 1, 0) < cost(m, n, 0, 1)
}

/// All offsets of the outer dims, in order.
fn offsets(dims: &[Dim]) -> Vec<[isize; 3]> {
    let mut all = vec![[0; 3]];
    for (size, strides) in dims {
        all = all
            .iter()
            .flat_map(|base| (0..*size as isize).map(move |i| [0, 1, 2].map(|o: usize| base[o] + i * strides[o])))
            .collect();
    }
    all
}

/// The first of the dims that lie in an operand as one, the inner one among them.
fn joint(dims: &[Dim], operand: usize) -> usize {
    let follows = |d: &usize| dims[*d - 1].1[operand] == dims[*d].1[operand] * dims[*d].0 as isize;
    (1..dims.len()).rev().take_while(follows).last().map_or(dims.len().saturating_sub(1), |d| d - 1)
}

/// The first of the dims that panels of rows do not end between: of those that lie in C as one, or where its stretches are short, or are of
/// lengths that leave panels with few rows, also of others. A block of several stretches takes longer to write.
fn first_of_rows(dims: &[Dim], operand: usize, most: usize) -> usize {
    let (here, whole) = (joint(dims, 2), joint(dims, operand));
    if is_short(dims, most) {
        return 0;
    }
    if whole >= here {
        return here;
    }
    let count = |dims: &[Dim]| dims.iter().map(|dim| dim.0).product::<usize>();
    let (stretches, length) = (count(&dims[whole..here]), count(&dims[here..]));
    let fewer = stretches * length.div_ceil(most) - (stretches * length).div_ceil(most);
    if 4 * fewer > stretches { whole } else { here }
}

/// How a side is cut into panels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Whole ones and a rest, which of three vectors is no single one if there are others; one ends where a stretch of C does.
    Columns { lanes: usize },
    /// Whole ones and a rest; they may cross stretches of C: see `first_of_rows`.
    Rows,
    /// The same, but equally large.
    Even,
}

/// Panels of at most `most` rows or columns.
fn panels(dims: &[Dim], operand: usize, most: usize, cut: Cut) -> Side {
    let (run, strides) = inner(dims);
    let lanes = if let Cut::Columns { lanes } = cut { lanes } else { 0 };
    let first = if lanes == 0 { first_of_rows(dims, operand, most) } else { joint(dims, 2) };
    let (outer, within) = dims.split_at(first);
    let runs = offsets(&within[..within.len().saturating_sub(1)]);
    let size = run * runs.len();
    let is_broken = joint(dims, operand) > first;
    let width = match cut == Cut::Even && size > 0 {
        // Whole runs, or equal parts of them, are packed fastest.
        true if is_broken && run <= most => run * (most / run),
        true if is_broken && let Some(part) = (2 * most / 3..=most).rev().find(|part| run.is_multiple_of(*part)) => part,
        true => size.div_ceil(size.div_ceil(most)),
        false => most,
    };
    // A single vector behind a last whole panel gets another from that.
    let next = |begin: usize| match size - begin {
        left if left > width && left <= width + lanes && width > 2 * lanes => begin + width - lanes,
        left => begin + left.min(width),
    };
    let mut side = Side::default();
    for base in offsets(outer) {
        let mut end = 0;
        while end < size {
            let begin = end;
            end = next(begin);
            let (first, stretch) = (side.parts.len(), side.stretches.len());
            let mut at = begin;
            while at < end {
                let count = (end - at).min(run - at % run);
                let place = |o: usize| base[o] + runs[at / run][o] + (at % run) as isize * strides[o];
                let position = at - begin;
                match side.parts[first..]
                    .last_mut()
                    .filter(|last| last.source + last.size as isize * strides[operand] == place(operand))
                {
                    Some(last) => last.size += count,
                    None => side.parts.push(Part { source: place(operand), position, size: count }),
                }
                match side.stretches[stretch..].last_mut().filter(|last| last.c + last.size as isize * strides[2] == place(2)) {
                    Some(last) => last.size += count,
                    None => side.stretches.push(Stretch { c: place(2), position, size: count }),
                }
                at += count;
            }
            let c = side.stretches[stretch].c;
            side.stretches[stretch..].iter_mut().for_each(|other| other.c -= c);
            if side.stretches.len() == stretch + 1 {
                side.stretches.pop();
            }
            let stretches = [stretch, side.stretches.len() - stretch];
            side.panels.push(Panel { c, size: end - begin, first, count: side.parts.len() - first, stretches });
        }
    }
    side.panels.shrink_to_fit();
    side.parts.shrink_to_fit();
    side.stretches.shrink_to_fit();
    side
}

/// How A is read: where it lies as words of one step, or of so many if its rows have whole words.
fn read_a<E, S>(
    strides: &Strides,
    [rows, columns]: [&Side; 2],
    pieces: &[Vec<Run>],
    (steps, kernels): (usize, &Kernels<E>),
) -> Rows {
    let whole = |run: &Run| run.size.is_multiple_of(steps);
    let paired = strides.a_step == 1 && strides.a_row % steps as isize == 0 && pieces.iter().flatten().all(whole);
    let words = size_of::<E>() == size_of::<S>() * steps;
    let several = columns.panels.len() > 1;
    if !words
        || (steps > 1 && !paired)
        || !rows.is_whole()
        || is_broken(pieces, |run| run.a, strides.a_step)
        || (strides.a_step != 1 && several)
    {
        return Rows::Packed;
    }
    let one_run = pieces.iter().all(|runs| runs.len() == 1);
    let copied = several && strides.a_step == 1 && one_run && collide::<S>(strides.a_row, kernels);
    if copied { Rows::Copied } else { Rows::InPlace }
}

/// How tiles, of so many rows, words of so many steps, and so many steps, read A: where it lies if its rows are whole tiles of steps side by
/// side, and whole words apart. A block reads each line once, so that it matters little in which set of a cache that falls.
fn read_tiles(strides: &Strides, rows: &Side, pieces: &[Vec<Run>], [height, word, steps]: [usize; 3]) -> Rows {
    let whole = |runs: &Vec<Run>| runs.last().is_some_and(|run| (run.position + run.size).is_multiple_of(steps));
    let lies = strides.a_step == 1
        && strides.a_row % word as isize == 0
        && rows.is_whole()
        && rows.panels.iter().all(|panel| panel.size.is_multiple_of(height))
        && pieces.iter().all(whole)
        && !is_broken(pieces, |run| run.a, strides.a_step);
    if lies { Rows::InPlace } else { Rows::Copied }
}

/// Whether runs of a side do not follow one another, so that it can't be read as it is.
fn is_broken(pieces: &[Vec<Run>], at: fn(&Run) -> isize, step: isize) -> bool {
    let follows = |first: &Run, run: &Run| at(run) == at(first) + run.position as isize * step;
    !pieces.iter().all(|runs| runs.iter().all(|run| follows(&runs[0], run)))
}

/// Whether columns are views of the same memory, which would become several times as much in a copy.
fn overlap(columns: &Side, pieces: &[Vec<Run>], step: isize) -> bool {
    let begin = columns.parts.iter().map(|part| part.source).min().unwrap_or(0);
    let end = columns.parts.iter().map(|part| part.source + part.size as isize).max().unwrap_or(0);
    let depth = pieces.first().map_or(0, |runs| words_of(runs, 1)) as isize;
    let count = columns.parts.iter().map(|part| part.size as isize).sum::<isize>() * depth;
    2 * (end - begin + depth * step) <= count
}

/// Whether a block's rows, this many elements apart, come to lie in few sets of a first-level cache (64 of them), and leave too few of their
/// ways to the columns, which pass by them.
fn collide<S>(stride: isize, kernels: &Kernels<impl Sized>) -> bool {
    let bytes = stride.unsigned_abs() * size_of::<S>();
    let sets = 64 >> (bytes / LINE).trailing_zeros().min(6);
    bytes.is_multiple_of(LINE) && kernels.rows.div_ceil(sets) + WAYS_OF_COLUMNS > kernels.ways
}

/// Ways that columns need: while a line of each row is read, they fill one at most of each set, and what is asked for ahead as many again.
const WAYS_OF_COLUMNS: usize = 4;

/// Whether blocks of three vectors load less for the same products than those of two and more rows: not if a row is so short that many have
/// but two.
fn broad_loads_less<E>(kernels: &Kernels<E>, columns: &[Dim]) -> bool {
    let vectors = columns[joint(columns, 2)..].iter().map(|dim| dim.0).product::<usize>().div_ceil(kernels.lanes);
    vectors >= 3 && vectors != 4
}

/// Whether the stretches of C fill less than half of a panel.
fn is_short(dims: &[Dim], most: usize) -> bool {
    2 * dims[joint(dims, 2)..].iter().map(|dim| dim.0).product::<usize>() < most
}

/// Words of a piece, at most: a function of layouts alone, as instruction sets must agree.
fn most_words(k: &[Dim], steps: usize) -> usize {
    let (strides, total) = (inner(k).1, k.iter().map(|dim| dim.0).product::<usize>());
    match strides[0] == 1 || strides[1] == 1 {
        true if total <= WHOLE * steps => WHOLE,
        true => PIECE,
        false => PACKED_PIECE,
    }
}

/// Words of a piece.
fn words_of(runs: &[Run], steps: usize) -> usize {
    runs.last().map_or(0, |last| (last.position + last.size).div_ceil(steps))
}

/// Cuts the contracted dims into pieces of equal length, at most so many steps, a function of these dims only, and these into runs along the
/// inner dim. Words have so many steps, and blocks take so many at a time; pieces end with whole ones where they can.
fn pieces(dims: &[Dim], [word, steps]: [usize; 2], most: usize) -> Vec<Vec<Run>> {
    let (size, strides) = inner(dims);
    let outer = offsets(&dims[..dims.len().saturating_sub(1)]);
    let total = outer.len() * size;
    if total == 0 {
        return vec![vec![Run { a: 0, b: 0, position: 0, size: 0 }]];
    }
    // Long runs are cut by themselves: a piece of one run needs no copy.
    let whole = if size >= LONG * word { size } else { total };
    let length = whole.div_ceil(whole.div_ceil(most)).next_multiple_of(steps);
    let mut pieces = vec![];
    let firsts = (0..total).step_by(whole).flat_map(|begin| (begin..begin + whole).step_by(length));
    for first in firsts {
        let end = ((first / whole + 1) * whole).min(first + length);
        let (mut runs, mut step) = (Vec::with_capacity((end - 1) / size - first / size + 1), first);
        while step < end {
            let (base, at) = (outer[step / size], (step % size) as isize);
            let count = (end - step).min(size - step % size);
            runs.push(Run { a: base[0] + at * strides[0], b: base[1] + at * strides[1], position: step - first, size: count });
            step += count;
        }
        pieces.push(runs);
    }
    pieces.shrink_to_fit();
    pieces
}

/// One more than the largest offset in lhs, rhs and out; 0 where an operand is empty.
fn extents(factors: &[Factor]) -> [usize; 3] {
    let reach = |stride: fn(&Factor) -> Option<usize>| {
        let dims = || factors.iter().filter_map(|f| stride(f).map(|s| (f.size, s)));
        if dims().any(|dim| dim.0 == 0) { 0 } else { 1 + dims().map(|dim| dim.1 * (dim.0 - 1)).sum::<usize>() }
    };
    [reach(|f| f.lhs), reach(|f| f.rhs), reach(|f| f.out)]
}

#[cfg(test)]
mod tests;
