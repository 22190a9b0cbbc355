//! The text of a program, which is its file format: `parse(&print(p)) == p` for every program with canonical kernels.
//!
//! ```text
//! program mlp train stage 0/1 mesh(mb=1, tp=2)
//! memory persistent=1114112 scratch=1048580
//! area m0 forward->backward bytes=65536 slots=1
//! param b0 f32[256, 1024/tp] @p0 weight fc1.weight trained
//! input b2 f32[64/mb, 256] @m0+0 x
//! scalar b3 f32[] @p1114108 lr
//! output b9 loss
//! section forward
//! b4 f32[64/mb, 1024/tp] @m0+0 = dot(m k, k n -> m n) b2, b0  # /fc1/MatMul
//! b5 f32[64/mb, 1024/tp] @s0 = fused.0 b4
//! t0 = start all_reduce.sum(tp) b6
//! b7 f32[64/mb, 256] @s0 = wait t0
//! section update
//! b0 = fused.1 b0, b8, b3
//! order forward 0 [0]; update
//! kernel fused.0(x0: f32[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
//!   y0[i, j] = max(x0[i, j], 0.0:f32)
//! ```
//!
//! A buffer is declared where it is first defined; later definitions write over it in place. Sections of one kind are told
//! apart by a number (`forward`, `forward.1`). What follows `#` is a comment; after an instruction it is its origin.

mod cursor;
mod instr;
mod kernel;
mod kernel_parse;
mod parse;
mod print;

use crate::kernel::Kernel;
use crate::program::Program;

/// What is wrong with a text, and in which line (from 1).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct ParseError {
    pub line: u32,
    pub what: String,
}

/// The text of `program`; of kernels, the canonical form.
pub fn print(program: &Program) -> String {
    print::program(program)
}

/// Reads what `print` writes. Any bytes give a program or an error; whether the program makes sense is for `check`.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    parse::program(text)
}

/// The text of one kernel, as kernel `number` of a program.
pub fn print_kernel(kernel: &Kernel, number: usize) -> String {
    let mut out = String::new();
    kernel::print(kernel, number, &mut out);
    out
}

/// One instruction as in the text, without its origin; for messages.
pub fn print_instr(program: &Program, instr: &crate::program::Instr) -> String {
    print::instruction(program, instr)
}

#[cfg(test)]
mod tests;
