//! Library operations on one rank, for every device: their loops, sizes and layouts, from an instruction and its buffers.

pub mod attention;
pub mod contraction;
pub mod convolution;
mod factors;
pub mod indexed;
pub mod pool;
pub mod rows;

use dcc_program::program::{Library, MaskKind};
use dcc_program::types::DType;

/// Operands and results.
pub fn arity(library: &Library) -> (usize, usize) {
    match library {
        Library::Zero { .. } => (0, 1),
        Library::Dot { .. } | Library::Convolution { .. } | Library::ScatterAdd { .. } => (2, 1),
        Library::MaxPool(_) => (1, 2),
        Library::Attention(a) => (3 + usize::from(a.mask != MaskKind::None), 2),
        Library::AttentionGrad(a) => (6 + usize::from(a.mask != MaskKind::None), 3),
        _ => (1, 1),
    }
}

/// The dtypes that a product of operands of `dtype` may have: that of the operands, of half floats the sums' own too.
fn results_of(dtype: DType) -> &'static [DType] {
    match dtype {
        DType::F16 => &[DType::F16, DType::F32],
        DType::BF16 => &[DType::BF16, DType::F32],
        DType::F64 => &[DType::F64],
        _ => &[DType::F32],
    }
}
