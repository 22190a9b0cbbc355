//! What the generic tests feed an op.

use super::Op;
use crate::interp::{Precision, Tensor};
use dcc_program::philox::philox4x32;
use dcc_program::{DType, TensorType};

/// One op with operands.
#[derive(Clone, Debug)]
pub struct Example {
    pub op: Op,
    pub operands: Vec<Tensor>,
    /// Operands whose gradient is compared with finite differences.
    pub wrt: Vec<usize>,
}

impl Example {
    /// Differentiated for all float operands where the result is a float.
    pub fn new(op: impl Into<Op>, operands: impl IntoIterator<Item = Tensor>) -> Example {
        let op = op.into();
        let operands: Vec<Tensor> = operands.into_iter().collect();
        let mut example = Example { op, operands, wrt: Vec::new() };
        if example.result().dtype.is_float() {
            example.wrt = (0..example.operands.len()).filter(|&i| example.operands[i].dtype.is_float()).collect();
        }
        example
    }

    /// Differentiated for these operands only.
    pub fn wrt(self, wrt: &[usize]) -> Example {
        Example { wrt: wrt.to_vec(), ..self }
    }

    pub fn result(&self) -> TensorType {
        let types: Vec<TensorType> = self.operands.iter().map(Tensor::ty).collect();
        let types: Vec<&TensorType> = types.iter().collect();
        self.op.infer(&types).expect("an example is a legal op")
    }

    /// The op on the operands.
    pub fn eval(&self) -> Tensor {
        self.op.eval(&self.operands.iter().collect::<Vec<_>>(), &self.result())
    }
}

/// `count` reproducible numbers in [0, 1).
fn uniforms(seed: u32, count: u64) -> impl Iterator<Item = f64> {
    (0..count).map(move |i| f64::from(philox4x32([i as u32, 0, 0, 0], [seed, 0])[0]) / 2f64.powi(32))
}

/// f64 values in [`low`, `high`), different for each `seed`.
pub fn within(low: f64, high: f64, seed: u32, shape: &[u64]) -> Tensor {
    let values = uniforms(seed, shape.iter().product()).map(|u| low + (high - low) * u).collect();
    Tensor::floats(DType::F64, shape, values)
}

/// f64 values in [-1.5, 1.5).
pub fn floats(seed: u32, shape: &[u64]) -> Tensor {
    within(-1.5, 1.5, seed, shape)
}

/// The floats of `x` rounded to `dtype`; anything else as it is.
pub fn rounded(dtype: DType, x: &Tensor) -> Tensor {
    if x.dtype.is_float() { Tensor { dtype, ..x.clone() }.rounded(Precision::Declared) } else { x.clone() }
}

/// i64 values in [`low`, `high`).
pub fn ints(low: i64, high: i64, seed: u32, shape: &[u64]) -> Tensor {
    let values = uniforms(seed, shape.iter().product()).map(|u| low + ((high - low) as f64 * u) as i64).collect();
    Tensor::ints(DType::I64, shape, values)
}

pub fn bools(seed: u32, shape: &[u64]) -> Tensor {
    let values = uniforms(seed, shape.iter().product()).map(|u| i64::from(u < 0.6)).collect();
    Tensor::ints(DType::Bool, shape, values)
}
