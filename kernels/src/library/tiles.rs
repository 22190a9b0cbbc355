//! Products of bf16 by tiles (AMX): a block of C is up to two by two tiles of f32 sums, and a step of it multiplies two tiles of A's rows, 16
//! words each, with two of B's words.
//!
//! A tile of A is rows as they lie, one of B is words of 16 columns as panels have them. A sum takes the words in ascending order, 16 at a
//! time: of those the first halves' products and the second halves', each a chain of fused multiply-adds from zero; then both and what
//! there was, which is zero, or C where whole tiles are added to it. Subnormal numbers are zero. (Intel, "Architecture Instruction Set
//! Extensions", TDPBF16PS.)

use super::microkernel::{self, Beside, Block, Kernel, Kernels, MAX_ROWS, Stretch, VECTOR_ROWS};
use super::simd::{Element, prefetch, x86::F32x16};
use crate::cpu::isa::Isa;
use std::arch::asm;
use std::mem::MaybeUninit;

/// Rows of a tile, words (or sums) of each of them, and their bytes.
const TILE: usize = 16;
const ROW_BYTES: usize = TILE * size_of::<f32>();
/// Columns of a block, and of a panel.
const COLUMNS: usize = 2 * TILE;
const _: () = assert!(MAX_ROWS == 2 * TILE);
/// Bytes from one word of a panel of B to the next, and those of a tile's words.
const PANEL_ROW: usize = COLUMNS * size_of::<f32>();
const PANEL_TILE: usize = TILE * PANEL_ROW;

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles are whole.
static CONFIG: Config = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (row_bytes[tile], rows[tile]) = (ROW_BYTES as u16, TILE as u8);
        tile += 1;
    }
    Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// The blocks of tiles. Their steps are words, pairs of bf16.
pub(super) fn kernels() -> Kernels<f32> {
    let by_rows = |one: Kernel<f32>, two: Kernel<f32>| {
        let mut kernels = [two; VECTOR_ROWS];
        kernels[0] = one;
        kernels
    };
    let [one, two] = [by_rows(block::<1, 1>, block::<2, 1>), by_rows(block::<1, 2>, block::<2, 2>)];
    Kernels {
        rows: MAX_ROWS,
        columns: COLUMNS,
        words: TILE,
        pace: 40.0,
        enter: Some(enter),
        leave: Some(leave),
        blocks: [one, two, two],
        shared_bits: TILE.ilog2(),
        ..f32::kernels(Isa::Avx512)
    }
}

/// Makes the thread's tiles.
///
/// # Safety
/// The machine has AMX, and the process may use it.
unsafe fn enter() {
    // SAFETY: the caller's; nobody else has tiles in use.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags, readonly),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// Gives them up: from here on they are not saved when threads change.
///
/// # Safety
/// As `enter`.
unsafe fn leave() {
    // SAFETY: the caller's.
    unsafe {
        asm!("tilerelease", options(nostack, preserves_flags, nomem),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

#[repr(align(64))]
struct Sums {
    _rows: [[f32; COLUMNS]; MAX_ROWS],
}

/// # Safety
/// As `Kernels::run` between `enter` and `leave`, for more than (DOWN - 1) tiles of rows and (ACROSS - 1) of columns; rows of A's whole tiles
/// may be read, and whole tiles of B, which is a panel; both have zeros behind `depth` words, up to a multiple of `words`.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
unsafe fn block<const DOWN: usize, const ACROSS: usize>(t: &Block<f32>, rows: usize, beside: &mut Beside<f32>) {
    beside.ask();
    let is_whole = rows == DOWN * TILE && t.columns == ACROSS * TILE && t.c_column == 1;
    if t.c_column == 1 && t.c_row != COLUMNS as isize {
        // By the time that the sums are there it is near; a C as narrow as a block is anyway.
        for row in 0..rows {
            let row = t.c.wrapping_offset(row as isize * t.c_row);
            (0..t.columns).step_by(TILE).for_each(|j| prefetch(row.wrapping_add(j)));
        }
    }
    // SAFETY: the caller's; the sums have two tiles by two.
    unsafe {
        match (is_whole && t.alpha == 1.0, t.beta) {
            (true, 0.0) => return multiply::<DOWN, ACROSS, false>(t, t.c, t.c_row),
            (true, 1.0) => return multiply::<DOWN, ACROSS, true>(t, t.c, t.c_row),
            _ => {}
        }
        let mut sums = MaybeUninit::<Sums>::uninit();
        let to = sums.as_mut_ptr().cast::<f32>();
        multiply::<DOWN, ACROSS, false>(t, to, COLUMNS as isize);
        microkernel::write_stretches::<F32x16>(to, COLUMNS, rows, t, &[Stretch { c: 0, position: 0, size: rows }]);
    }
}

/// The sums of one shape of block: zeros, steps of 16 words, stores.
macro_rules! multiply {
    ($t:expr, $to:expr, $row:expr, [$($zero:literal)*], [$($step:literal)*], [$($store:literal)*]) => {
        asm!(
            $($zero,)*
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            $($step,)*
            "add {a}, 64",
            "add {low_a}, 64",
            "add {b}, {panel_tile}",
            "dec {steps}",
            "jnz 2b",
            "3:",
            $($store,)*
            steps = inout(reg) $t.depth.div_ceil(TILE) => _,
            a = inout(reg) $t.a => _,
            low_a = inout(reg) $t.a.wrapping_offset(TILE as isize * $t.a_row) => _,
            a_row = in(reg) $t.a_row * size_of::<f32>() as isize,
            b = inout(reg) $t.b => _,
            b_row = in(reg) PANEL_ROW,
            c = in(reg) $to,
            low_c = in(reg) $to.wrapping_offset(TILE as isize * $row),
            c_row = in(reg) $row * size_of::<f32>() as isize,
            panel_tile = const PANEL_TILE,
            options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        )
    };
}

/// Writes the sums of DOWN x ACROSS tiles to `to`, whose rows are `row` elements apart; they begin with what is there, if they ADD.
///
/// # Safety
/// As `block`; `to` is writable.
#[inline(always)]
unsafe fn multiply<const DOWN: usize, const ACROSS: usize, const ADD: bool>(t: &Block<f32>, to: *mut f32, row: isize) {
    macro_rules! of {
        ([$($zero:literal)*], [$($load:literal)*], $steps:tt, $stores:tt) => {
            match ADD {
                false => multiply!(t, to, row, [$($zero)*], $steps, $stores),
                true => multiply!(t, to, row, [$($load)*], $steps, $stores),
            }
        };
    }
    // SAFETY: the caller's; what is not multiplied is not read, what is not stored not written.
    unsafe {
        match (DOWN, ACROSS) {
            (1, 1) => of!(
                ["tilezero tmm0"],
                ["tileloadd tmm0, [{c} + {c_row}]"],
                ["tileloadd tmm4, [{a} + {a_row}]" "tileloadd tmm6, [{b} + {b_row}]" "tdpbf16ps tmm0, tmm4, tmm6"],
                ["tilestored [{c} + {c_row}], tmm0" "/* {low_c} */"]
            ),
            (1, 2) => of!(
                ["tilezero tmm0" "tilezero tmm1"],
                ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm1, [{c} + {c_row} + 64]"],
                ["tileloadd tmm4, [{a} + {a_row}]" "tileloadd tmm6, [{b} + {b_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                 "tileloadd tmm7, [{b} + {b_row} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"],
                ["tilestored [{c} + {c_row}], tmm0" "tilestored [{c} + {c_row} + 64], tmm1" "/* {low_c} */"]
            ),
            (2, 1) => of!(
                ["tilezero tmm0" "tilezero tmm2"],
                ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm2, [{low_c} + {c_row}]"],
                ["tileloadd tmm4, [{a} + {a_row}]" "tileloadd tmm6, [{b} + {b_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                 "tileloadd tmm5, [{low_a} + {a_row}]" "tdpbf16ps tmm2, tmm5, tmm6"],
                ["tilestored [{c} + {c_row}], tmm0" "tilestored [{low_c} + {c_row}], tmm2"]
            ),
            _ => of!(
                ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
                ["tileloadd tmm0, [{c} + {c_row}]" "tileloadd tmm1, [{c} + {c_row} + 64]"
                 "tileloadd tmm2, [{low_c} + {c_row}]" "tileloadd tmm3, [{low_c} + {c_row} + 64]"],
                ["tileloadd tmm4, [{a} + {a_row}]" "tileloadd tmm6, [{b} + {b_row}]" "tdpbf16ps tmm0, tmm4, tmm6"
                 "tileloadd tmm7, [{b} + {b_row} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"
                 "tileloadd tmm5, [{low_a} + {a_row}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
                ["tilestored [{c} + {c_row}], tmm0" "tilestored [{c} + {c_row} + 64], tmm1"
                 "tilestored [{low_c} + {c_row}], tmm2" "tilestored [{low_c} + {c_row} + 64], tmm3"]
            ),
        }
    }
}
