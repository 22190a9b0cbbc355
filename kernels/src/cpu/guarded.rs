//! Kernels whose operands end, or begin, where memory that may not be read does.

use super::isa::Isa;
use super::jit::Jit;
use super::pool::Pool;
use crate::tile::Nest;
use dcc_program::kernel::*;
use dcc_program::mesh::Extent;
use dcc_program::types::DType;
use std::os::unix::process::ExitStatusExt;

const PAGE: usize = 4096;

unsafe extern "C" {
    fn mmap(address: *mut u8, length: usize, protection: i32, flags: i32, file: i32, offset: i64) -> *mut u8;
    fn mprotect(address: *mut u8, length: usize, protection: i32) -> i32;
}

/// Fresh memory of `bytes`, with pages without access right before or right behind it; never unmapped.
fn guarded(bytes: usize, at_end: bool) -> *mut u8 {
    let inside = bytes.next_multiple_of(PAGE);
    // SAFETY: private anonymous memory of its own; its middle is made readable and writable.
    unsafe {
        let all = mmap(std::ptr::null_mut(), inside + 2 * PAGE, 0, 0x22, -1, 0);
        assert!(all as isize != -1 && mprotect(all.add(PAGE), inside, 3) == 0);
        all.add(PAGE + if at_end { inside - bytes } else { 0 })
    }
}

fn whole(sizes: &[usize]) -> Vec<Extent> {
    sizes.iter().map(|&size| Extent { offset: 0, valid: size as u64, block: size as u64 }).collect()
}

/// A copy of rows of `width`, of an operand of rows of `given` that lie `offset` further; samples and rows change places if `turned`.
struct Case {
    dtype: DType,
    width: usize,
    given: usize,
    offset: i64,
    outside: Outside,
    turned: bool,
}

/// Runs it on `[2, rows, given]` elements with nothing around them, less `missing` bytes at the end.
fn run(case: &Case, rows: usize, isa: Isa, at_end: bool, missing: usize) {
    let (size, mut kernel) = (case.dtype.bytes() as usize, Kernel::default());
    let dims = ["n", "r", "c"].map(|name| kernel.dim(name));
    kernel.outer = dims.to_vec();
    let argument = || Argument { dtype: case.dtype, rank: 3 };
    (kernel.inputs, kernel.outputs) = (vec![argument()], vec![argument()]);
    let [n, r, c] = dims;
    let (first, second) = if case.turned { (r, n) } else { (n, r) };
    let last = Index::Affine { terms: vec![(c, 1)], offset: case.offset };
    let index = vec![Index::Dim(first), Index::Dim(second), last];
    let value = kernel.expr(Expr::Load { input: 0, index, outside: case.outside });
    let index = dims.map(Index::Dim).to_vec();
    kernel.body.push(Stmt::Store { output: 0, over: vec![], index, value, mode: StoreMode::Assign });
    let [inputs, outputs] = [case.given, case.width].map(|columns| [whole(&[2, rows, columns])]);
    let inputs = if case.turned { [whole(&[rows, 2, case.given])] } else { inputs };
    let nest = Nest::bind(&kernel, &inputs, &outputs).unwrap();
    let parameters = Nest::parameters(&kernel, &inputs, &outputs).unwrap();
    let bytes = 2 * rows * size;
    let (from, to) = (guarded(bytes * case.given - missing, at_end), guarded(bytes * case.width, at_end));
    let number = |at: usize| (at * 37 + at / 251) as u8;
    // SAFETY: both have that many bytes.
    unsafe { (0..bytes * case.given - missing).for_each(|at| *from.add(at) = number(at)) };
    let compiled = Jit::with_isa(isa).unwrap().compile(nest).unwrap();
    let words: Vec<u64> = [from as u64, to as u64].into_iter().chain(parameters.iter().map(|p| *p as u64)).collect();
    // SAFETY: of the operands' sizes, unless a process of its own is to find out that one is not.
    unsafe { compiled.run(&Pool::new(1), &words) };
    for at in 0..bytes * case.width {
        let (element, byte) = (at / size, at % size);
        let (sample, row, column) = (element / case.width / rows, element / case.width % rows, element % case.width);
        let row = if case.turned { row * 2 + sample } else { sample * rows + row };
        let column = column as i64 + case.offset;
        let inside = (0..case.given as i64).contains(&column);
        let expected = if inside { number((row * case.given + column as usize) * size + byte) } else { 0 };
        // SAFETY: inside of the result.
        assert_eq!(unsafe { *to.add(at) }, expected, "byte {at}, rows of {}, {isa:?}", case.width);
    }
}

/// Nothing before or behind an operand is read, though rows are shifted and copied in blocks.
#[test]
fn shifted_rows_stay_inside_of_operands() {
    for isa in Isa::available() {
        for dtype in [DType::F32, DType::F64, DType::I16, DType::Bool] {
            for width in [2, 3, 5, 8, 13, 16, 24, 31, 32, 64, 80, 300] {
                let half = width as i64 / 2;
                for (given, offset, outside) in [
                    (width, 0, Outside::Zero),
                    (width, -half, Outside::Zero),
                    (width, half, Outside::Zero),
                    (width / 2, -half, Outside::Zero),
                    (width / 2, 1, Outside::Zero),
                    (width / 2, -half - 1, Outside::Zero),
                    (width, width as i64, Outside::Zero),
                    (width + 3, 3, Outside::Never),
                    (width * 2, 0, Outside::Never),
                    (width, 0, Outside::Never),
                ] {
                    let case = |turned| Case { dtype, width, given, offset, outside, turned };
                    for (rows, turned, at_end) in [(1, false, true), (7, false, false), (7, true, true), (40, false, true)] {
                        run(&case(turned), rows, isa, at_end, 0);
                    }
                }
            }
        }
    }
}

/// The control: an operand that is one element short ends a process.
#[test]
fn control_of_guards() {
    let name = "cpu::guarded::control_of_guards";
    if std::env::var_os("DCC_TEST_SHORT_OPERAND").is_some() {
        let case = Case { dtype: DType::F32, width: 16, given: 32, offset: 16, outside: Outside::Never, turned: false };
        run(&case, 7, Isa::detect(), true, 4);
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name]).env("DCC_TEST_SHORT_OPERAND", "1").output().unwrap();
    assert_eq!(output.status.signal(), Some(11), "{output:?}");
}
