//! The innermost block of a matrix product: `rows` x `columns` sums held in registers over `depth` steps.
//!
//! A row's factor is broadcast from A (any strides), a column's comes as vectors from B (unit column stride). Every element of C
//! is a chain of fused multiply-adds in ascending depth, so that all shapes of block and all instruction sets give the same bits.
//! The exceptions are products of bf16 on machines that sum pairs of them (`bf16_pairs`), where a step is a pair, or whole tiles (`tiles`),
//! and products of few rows (`few`), which are sums of several chains.

use super::few;
use super::lines::Lines;
use super::pack::{self, Pack, PackSide, Spread};
use super::simd::{Element, Square, Vector, prefetch};
use super::sweep::{self, Planes};
use super::transform::{self, Transforms};
use crate::cpu::isa;
use std::mem::MaybeUninit;

/// One block: C[rows, columns] = alpha * A[rows, depth] B[depth, columns] + beta * C. Strides in elements; beta 0 never reads C.
#[derive(Clone, Copy)]
pub struct Block<E> {
    pub depth: usize,
    pub a: *const E,
    pub a_row: isize,
    pub a_step: isize,
    pub b: *const E,
    pub b_step: isize,
    /// Whether whole vectors of B may be read.
    pub b_padded: bool,
    pub c: *mut E,
    pub c_row: isize,
    pub c_column: isize,
    pub columns: usize,
    pub alpha: E,
    pub beta: E,
}

impl<E> Block<E> {
    /// The memory of C, if the block has so many rows.
    #[inline(always)]
    pub fn lines_of_c(&self, rows: usize) -> Lines {
        match (self.c_row, self.c_column) {
            (_, 1) => Lines::new(self.c, rows, self.c_row, self.columns),
            (1, _) => Lines::new(self.c, self.columns, self.c_column, rows),
            _ => Lines::none(),
        }
    }
}

/// A block of so many rows.
pub(super) type Kernel<E> = unsafe fn(&Block<E>, usize, &mut Beside<E>);

/// What a block does while it computes.
pub struct Beside<E> {
    /// Where it writes what it reads of A, [step][row], and of B, [step][column]; null where it does not.
    pub copy_a: *mut E,
    pub copy_b: *mut E,
    /// What it asks for of C, which is read or written when the sums are there: by then it is near. So many lines asked for into the
    /// first-level cache itself would hold up what the products read from the second. (Blocks of tiles ask for C by themselves.)
    pub c: Lines,
    /// What others will need, and how many pairs of it the block asks for.
    pub ahead: Lines,
    pub due: usize,
}

/// Pairs of lines at a time, and those that are left for others.
struct Share {
    pairs: u32,
    rest: usize,
}

impl<E> Beside<E> {
    pub const fn nothing() -> Self {
        let (copy_a, copy_b) = (std::ptr::null_mut(), std::ptr::null_mut());
        Beside { copy_a, copy_b, c: Lines::none(), ahead: Lines::none(), due: 0 }
    }

    /// Asks for what is due at once.
    #[inline(always)]
    pub fn ask(&mut self) {
        (0..self.due).for_each(|_| self.ahead.ask());
    }

    /// What is asked for at a time, if it is so many times that a block asks.
    #[inline(always)]
    fn share(&self, times: usize) -> Share {
        let pairs = (self.c.count() + self.due) as u32;
        Share { pairs: pairs.div_ceil(times.max(1) as u32), rest: self.ahead.count() - self.due }
    }

    /// Asks for a share, or what is left of all.
    #[inline(always)]
    fn ask_for(&mut self, share: &Share) {
        for _ in 0..share.pairs {
            if self.c.count() > 0 {
                self.c.ask();
            } else if self.ahead.count() > share.rest {
                self.ahead.ask();
            } else {
                break;
            }
        }
    }
}

/// Steps ahead of a block that copies that the memory is asked for: some hundred nanoseconds.
const AHEAD: isize = 24;

/// Most rows of a block of vectors, and of any block.
pub const VECTOR_ROWS: usize = 12;
pub const MAX_ROWS: usize = 32;
pub const MAX_COLUMNS: usize = 48;
/// Most vectors of a block's row.
pub(super) const MAX_VECTORS: usize = 3;
/// The `pace` of vectors.
pub const VECTOR_PACE: f64 = 125.0;

/// The blocks of one element type and instruction set.
#[derive(Clone, Copy)]
pub struct Kernels<E> {
    /// Lanes of a vector.
    pub lanes: usize,
    /// Most rows of a block.
    pub rows: usize,
    /// Most columns of a block: two vectors or three.
    pub columns: usize,
    /// Steps that a block takes at a time. What it reads has whole ones of them: copies end with zeros, in B and in A.
    pub words: usize,
    /// Picoseconds of a vector of products in one step, about.
    pub pace: f64,
    /// Lines that a set of the first-level cache holds.
    pub ways: usize,
    /// One thread's, before blocks and after them.
    pub enter: Option<unsafe fn()>,
    pub leave: Option<unsafe fn()>,
    /// By the number of vectors of columns less one, then of rows less one, without so many of its last bits: kernels of several numbers of
    /// rows.
    pub(super) blocks: [[Kernel<E>; VECTOR_ROWS]; MAX_VECTORS],
    pub(super) shared_bits: u32,
    /// The largest block, copying A, B or both.
    pub(super) copying: [Kernel<E>; 3],
    pub pack: Pack<E>,
    pub pack_side: PackSide<E>,
    pub spread: Spread<E>,
    pub place: Place<E>,
    pub few: few::Sums<E>,
    pub planes: Planes<E>,
    pub transforms: Transforms<E>,
}

/// Rows of a block that follow one another in C: how far behind the block's first, which and how many.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    pub c: isize,
    pub position: usize,
    pub size: usize,
}

/// Writes sums (row by row, so many elements apart, so many rows) to the stretches of a block's C as the block says.
///
/// # Safety
/// The sums are readable, C is as in `Kernels::run`; the machine has the instruction set.
pub type Place<E> = unsafe fn(*const E, usize, usize, &Block<E>, &[Stretch]);

impl<E: Element> Kernels<E> {
    /// Computes `block` with `rows` rows.
    ///
    /// # Safety
    /// 1 <= rows <= self.rows, 1 <= columns <= self.columns; the block's pointers and strides stay in memory that A and B may read and C
    /// may write, C apart from A and B; the machine has the instruction set; this is between `enter` and `leave`, where the kernels have them.
    #[inline(always)]
    pub unsafe fn run(&self, rows: usize, block: &Block<E>) {
        // SAFETY: the caller's.
        unsafe { self.run_beside(rows, block, &mut Beside { c: block.lines_of_c(rows), ..Beside::nothing() }) }
    }

    /// The same, with something beside it.
    ///
    /// # Safety
    /// As `run`. With copies, the block is the largest; where A is copied, its rows lie side by side (a stride of 1); the copies hold the
    /// block's depth of them, apart from everything else. As many pairs of lines as are due are left.
    #[inline(always)]
    pub unsafe fn run_beside(&self, rows: usize, block: &Block<E>, beside: &mut Beside<E>) {
        let copying = match (beside.copy_a.is_null(), beside.copy_b.is_null()) {
            (true, true) => None,
            (false, true) => Some(self.copying[0]),
            (true, false) => Some(self.copying[1]),
            (false, false) => Some(self.copying[2]),
        };
        // SAFETY: the caller's.
        if let Some(copying) = copying {
            return unsafe { copying(block, rows, beside) };
        }
        // SAFETY: the caller's.
        unsafe { self.blocks[(block.columns - 1) / self.lanes][(rows - 1) >> self.shared_bits](block, rows, beside) }
    }
}

const NO_COPY: usize = 0;
const COPY_A: usize = 1;
const COPY_B: usize = 2;

/// # Safety
/// As `Kernels::run`, for ROWS rows and more than (VECTORS - 1) vectors of columns; where it copies, as `Kernels::run_beside`.
#[inline(always)]
unsafe fn block<V: Vector, const ROWS: usize, const VECTORS: usize, const COPY: usize>(
    t: &Block<V::E>,
    beside: &mut Beside<V::E>,
) {
    // SAFETY: the caller's; the largest block has whole vectors.
    unsafe {
        let last = t.columns - (VECTORS - 1) * V::LANES;
        // A constant number of lanes needs no mask, which some processors are slow with, in stores above all.
        let sums = match COPY != NO_COPY || last == V::LANES || t.b_padded {
            true if COPY & COPY_A != 0 || t.a_row == 1 => sums::<V, ROWS, VECTORS, true, COPY>(t, V::LANES, beside),
            true => sums::<V, ROWS, VECTORS, false, COPY>(t, V::LANES, beside),
            false => sums::<V, ROWS, VECTORS, false, NO_COPY>(t, last, beside),
        };
        write::<V, ROWS, VECTORS>(t, &sums, last);
    }
}

/// # Safety
/// As `block`.
#[inline(always)]
unsafe fn write<V: Vector, const ROWS: usize, const VECTORS: usize>(t: &Block<V::E>, sums: &[[V; VECTORS]; ROWS], last: usize) {
    // SAFETY: the caller's.
    unsafe {
        if t.c_column != 1 {
            write_scattered::<V, ROWS, VECTORS>(t, sums);
        } else if last == V::LANES {
            write_rows::<V, ROWS, VECTORS>(t, sums, V::LANES);
        } else {
            write_rows::<V, ROWS, VECTORS>(t, sums, last);
        }
    }
}

/// Rows that one pointer into A serves: what an address can hold beside it are one, two and three strides.
const GROUP: usize = 4;

/// Steps between additions to pointers, where that can be, and between lines that are asked for: on processors with short vectors, and where
/// another thread has half of a core, all that is no multiply-add takes from them.
const TOGETHER: usize = 4;

/// The products; `ADJACENT` where the rows of A lie side by side, `COPY` for what is copied. Memory is asked for evenly all the while.
///
/// # Safety
/// As `block`, and `Kernels::run_beside`.
#[inline(always)]
unsafe fn sums<V: Vector, const ROWS: usize, const VECTORS: usize, const ADJACENT: bool, const COPY: usize>(
    t: &Block<V::E>,
    last: usize,
    beside: &mut Beside<V::E>,
) -> [[V; VECTORS]; ROWS] {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        let mut b = t.b;
        // Pointers of their own: one that walks from row to row would take as long as the products do.
        let row = if ADJACENT { 1 } else { t.a_row };
        let mut groups = [t.a; VECTOR_ROWS / GROUP];
        for (g, pointer) in groups.iter_mut().enumerate().filter(|_| !ADJACENT) {
            *pointer = opaque(t.a.wrapping_offset((g * GROUP) as isize * t.a_row));
        }
        let [mut copy_a, mut copy_b] = [beside.copy_a, beside.copy_b];
        let mut depth = t.depth;
        // Of packed panels, and rows that are read as they lie, the steps are constants.
        let (a_step, b_step) = (if ADJACENT { ROWS } else { 1 }, VECTORS * V::LANES);
        let is_constant = COPY == NO_COPY && (t.a_step, t.b_step) == (a_step as isize, b_step as isize) && last == V::LANES;
        let share = beside.share(depth / TOGETHER);
        if is_constant {
            while depth >= TOGETHER {
                beside.ask_for(&share);
                for step in 0..TOGETHER {
                    let right: [V; VECTORS] = std::array::from_fn(|j| V::load(b.add(step * b_step + j * V::LANES)));
                    multiply::<V, ROWS, VECTORS, ADJACENT>(&mut sums, right, &groups, [row, (step * a_step) as isize]);
                }
                groups.iter_mut().for_each(|pointer| *pointer = pointer.wrapping_add(TOGETHER * a_step));
                b = b.add(TOGETHER * b_step);
                depth -= TOGETHER;
            }
        }
        while depth > 0 {
            beside.ask_for(&share);
            for _ in 0..TOGETHER {
                let mut right = [V::zero(); VECTORS];
                for (j, vector) in right.iter_mut().enumerate() {
                    let p = b.add(j * V::LANES);
                    *vector = if j + 1 == VECTORS { V::load_first(p, last) } else { V::load(p) };
                }
                if COPY & COPY_A != 0 {
                    let next = groups[0].wrapping_offset(AHEAD * t.a_step);
                    prefetch(next);
                    prefetch(next.wrapping_add(ROWS - 1));
                    *copy_a.cast::<[V::E; ROWS]>() = *groups[0].cast::<[V::E; ROWS]>();
                    copy_a = copy_a.add(ROWS);
                }
                if COPY & COPY_B != 0 {
                    let next = b.wrapping_offset(AHEAD * t.b_step);
                    for (j, vector) in right.iter().enumerate() {
                        prefetch(next.wrapping_add(j * V::LANES));
                        vector.store(copy_b.add(j * V::LANES));
                    }
                    copy_b = copy_b.add(VECTORS * V::LANES);
                }
                multiply::<V, ROWS, VECTORS, ADJACENT>(&mut sums, right, &groups, [row, 0]);
                groups.iter_mut().for_each(|pointer| *pointer = pointer.wrapping_offset(t.a_step));
                b = b.offset(t.b_step);
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
        }
        sums
    }
}

/// One step: the rows' factors lie `row` apart, `ahead` of the pointers of their groups.
///
/// # Safety
/// As `block`.
#[inline(always)]
unsafe fn multiply<V: Vector, const ROWS: usize, const VECTORS: usize, const ADJACENT: bool>(
    sums: &mut [[V; VECTORS]; ROWS],
    right: [V; VECTORS],
    groups: &[*const V::E; VECTOR_ROWS / GROUP],
    [row, ahead]: [isize; 2],
) {
    for (i, sums) in sums.iter_mut().enumerate() {
        let group = if ADJACENT { 0 } else { i / GROUP };
        // SAFETY: the caller's. Pairs that are read where they lie need not be aligned as one.
        let left = unsafe { V::splat(groups[group].offset((i - group * GROUP) as isize * row + ahead).read_unaligned()) };
        for (sum, vector) in sums.iter_mut().zip(right) {
            // SAFETY: the caller's.
            *sum = unsafe { left.step(vector, *sum) };
        }
    }
}

/// The same address, which the compiler does not derive from others.
#[inline(always)]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "the address alone matters")]
fn opaque<E>(mut pointer: *const E) -> *const E {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags)) };
    pointer
}

/// # Safety
/// As `block`.
#[inline(always)]
unsafe fn write_rows<V: Vector, const ROWS: usize, const VECTORS: usize>(
    t: &Block<V::E>,
    sums: &[[V; VECTORS]; ROWS],
    last: usize,
) {
    // SAFETY of all blocks: the caller's.
    let (alpha, beta) = unsafe { (V::splat(t.alpha), V::splat(t.beta)) };
    // One decision for all rows.
    match (t.alpha == V::E::ONE, t.beta == V::E::ZERO) {
        (true, true) => unsafe { write_each(t, sums, last, |sum, _, _| sum) },
        (true, false) => unsafe { write_each(t, sums, last, |sum, c, lanes| beta.fma(V::load_first(c, lanes), sum)) },
        (false, true) => unsafe { write_each(t, sums, last, |sum, _, _| sum.mul(alpha)) },
        (false, false) => unsafe {
            write_each(t, sums, last, |sum, c, lanes| beta.fma(V::load_first(c, lanes), sum.mul(alpha)));
        },
    }
}

/// Writes what becomes of each vector of sums, C and the lanes that there are.
///
/// # Safety
/// As `block`.
#[inline(always)]
unsafe fn write_each<V: Vector, const ROWS: usize, const VECTORS: usize>(
    t: &Block<V::E>,
    sums: &[[V; VECTORS]; ROWS],
    last: usize,
    value: impl Fn(V, *mut V::E, usize) -> V,
) {
    // SAFETY: the caller's.
    unsafe {
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                let p = t.c.offset(i as isize * t.c_row).add(j * V::LANES);
                let lanes = if j + 1 == VECTORS { last } else { V::LANES };
                value(*sum, p, lanes).store_first(p, lanes);
            }
        }
    }
}

/// # Safety
/// As `block`.
#[inline(always)]
unsafe fn write_scattered<V: Vector, const ROWS: usize, const VECTORS: usize>(t: &Block<V::E>, sums: &[[V; VECTORS]; ROWS]) {
    let mut buffer = MaybeUninit::<[V::E; VECTOR_ROWS * MAX_COLUMNS]>::uninit();
    let (buffer, width) = (buffer.as_mut_ptr().cast::<V::E>(), V::LANES * VECTORS);
    // SAFETY: the buffer holds ROWS x width, all of which is written; the rest is the caller's.
    unsafe {
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                sum.store(buffer.add(i * width + j * V::LANES));
            }
        }
        write_stretches::<V>(buffer, width, ROWS, t, &[Stretch { c: 0, position: 0, size: ROWS }]);
    }
}

/// # Safety
/// As `Place`; the width is whole vectors.
#[inline(always)]
pub(super) unsafe fn write_stretches<V: Vector>(
    sums: *const V::E,
    width: usize,
    rows: usize,
    t: &Block<V::E>,
    stretches: &[Stretch],
) {
    // SAFETY: the caller's; a square's rows are a vector apart.
    unsafe {
        if t.c_column == 1 {
            for stretch in stretches {
                for i in 0..stretch.size {
                    let (from, to) = (sums.add((stretch.position + i) * width), t.c.offset(stretch.c + i as isize * t.c_row));
                    write_vectors::<V>(t, from, to, t.columns);
                }
            }
        } else if t.c_row == 1 && V::SQUARES {
            // As long again as the columns are: a stretch is read as whole vectors.
            let mut columns = MaybeUninit::<[V::E; (MAX_COLUMNS + 1) * MAX_ROWS]>::uninit();
            let (turned, height) = (columns.as_mut_ptr().cast::<V::E>(), rows.next_multiple_of(V::LANES));
            for (top, first) in
                (0..rows).step_by(V::LANES).flat_map(|top| (0..t.columns).step_by(V::LANES).map(move |j| (top, j)))
            {
                let (from, rows) = (sums.add(top * width + first), (rows - top).min(V::LANES));
                let square = Square { from, stride: width as isize, rows, columns: V::LANES, lanes: V::LANES };
                V::transpose(&square, |j| turned.wrapping_add((first + j) * height + top));
            }
            for j in 0..t.columns {
                for stretch in stretches {
                    let (from, to) =
                        (turned.add(j * height + stretch.position), t.c.offset(stretch.c + j as isize * t.c_column));
                    write_vectors::<V>(t, from, to, stretch.size);
                }
            }
        } else {
            for (j, stretch) in (0..t.columns).flat_map(|j| stretches.iter().map(move |stretch| (j, stretch))) {
                for i in 0..stretch.size {
                    let to = t.c.offset(stretch.c + i as isize * t.c_row + j as isize * t.c_column);
                    let sum = *sums.add((stretch.position + i) * width + j);
                    let product = if t.alpha == V::E::ONE { sum } else { sum.times(t.alpha) };
                    *to = if t.beta == V::E::ZERO { product } else { t.beta.fma(*to, product) };
                }
            }
        }
    }
}

/// Writes so many sums that lie side by side to elements of C that do.
///
/// # Safety
/// As `block`; whole vectors of sums are readable.
#[inline(always)]
unsafe fn write_vectors<V: Vector>(t: &Block<V::E>, sums: *const V::E, to: *mut V::E, count: usize) {
    // SAFETY: the caller's.
    unsafe {
        for at in (0..count).step_by(V::LANES) {
            let (p, lanes) = (to.add(at), (count - at).min(V::LANES));
            let sum = V::load(sums.add(at));
            let product = if t.alpha == V::E::ONE { sum } else { sum.mul(V::splat(t.alpha)) };
            let value = if t.beta == V::E::ZERO { product } else { V::splat(t.beta).fma(V::load_first(p, lanes), product) };
            value.store_first(p, lanes);
        }
    }
}

macro_rules! kernels {
    ($name:ident, $rows:literal x $vectors:literal, [$($n:literal)*], $(#[$feature:meta])?) => {
        pub(super) fn $name<V: Vector>() -> Kernels<V::E> {
            /// # Safety
            /// As `Kernels::run`.
            $(#[$feature])?
            unsafe fn enabled<V: Vector, const ROWS: usize, const VECTORS: usize, const COPY: usize>(
                t: &Block<V::E>,
                _rows: usize,
                beside: &mut Beside<V::E>,
            ) {
                // SAFETY: the caller's.
                unsafe { block::<V, ROWS, VECTORS, COPY>(t, beside) }
            }
            /// # Safety
            /// As `Pack`.
            $(#[$feature])?
            unsafe fn pack<V: Vector>(source: pack::Source<V::E>, to: *mut V::E, size: pack::Size) {
                // SAFETY: the caller's.
                unsafe { pack::pack::<V>(source, to, size) }
            }
            /// # Safety
            /// As `PackSide`.
            $(#[$feature])?
            unsafe fn pack_side<V: Vector>(source: pack::Source<V::E>, to: *mut V::E, size: pack::Size, count: usize, apart: usize) {
                // SAFETY: the caller's.
                unsafe { pack::pack_side::<V>(source, to, size, count, apart) }
            }
            /// # Safety
            /// As `Spread`.
            $(#[$feature])?
            unsafe fn spread<V: Vector>(source: pack::Source<V::E>, to: *mut V::E, offsets: &[usize], rows: usize) {
                // SAFETY: the caller's.
                unsafe { pack::spread::<V>(source, to, offsets, rows) }
            }
            /// # Safety
            /// As `Place`.
            $(#[$feature])?
            unsafe fn place<V: Vector>(sums: *const V::E, width: usize, rows: usize, t: &Block<V::E>, all: &[Stretch]) {
                // SAFETY: the caller's.
                unsafe { write_stretches::<V>(sums, width, rows, t, all) }
            }
            /// # Safety
            /// As `Sums`.
            $(#[$feature])?
            unsafe fn few<V: Vector>(sums: *mut V::E, tile: &few::Tile<V::E>) {
                // SAFETY: the caller's.
                unsafe { few::sums::<V>(sums, tile) }
            }
            Kernels {
                lanes: V::LANES,
                rows: $rows,
                columns: $vectors * V::LANES,
                words: 1,
                pace: VECTOR_PACE, ways: isa::first_level_ways(),
                enter: None, leave: None,
                shared_bits: 0,
                blocks: [
                    [$(enabled::<V, $n, 1, NO_COPY>),*],
                    [$(enabled::<V, $n, 2, NO_COPY>),*],
                    [$(enabled::<V, $n, $vectors, NO_COPY>),*],
                ],
                copying: [
                    enabled::<V, $rows, $vectors, COPY_A>, enabled::<V, $rows, $vectors, COPY_B>,
                    enabled::<V, $rows, $vectors, { COPY_A | COPY_B }>,
                ],
                pack: pack::<V>, pack_side: pack_side::<V>, spread: spread::<V>, place: place::<V>,
                few: few::<V>,
                planes: sweep::planes!(V, $(#[$feature])?),
                transforms: transform::transforms!(V, $(#[$feature])?),
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
kernels!(avx512, 12 x 2, [1 2 3 4 5 6 7 8 9 10 11 12], #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512_broad, 8 x 3, [1 2 3 4 5 6 7 8 8 8 8 8], #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]);
#[cfg(target_arch = "x86_64")]
kernels!(bf16_pairs, 12 x 2, [1 2 3 4 5 6 7 8 9 10 11 12], #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,fma")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, 6 x 2, [1 2 3 4 5 6 6 6 6 6 6 6], #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "aarch64")]
kernels!(neon, 12 x 2, [1 2 3 4 5 6 7 8 9 10 11 12],);
kernels!(baseline, 4 x 2, [1 2 3 4 4 4 4 4 4 4 4 4],);
