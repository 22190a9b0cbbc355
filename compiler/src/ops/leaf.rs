//! Ops without batched operands: inputs, parameters, scalars, constants, and generated tensors.

use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use dcc_program::program::{ParamKind, Piece, ScalarKind};
use dcc_program::{DType, Shape, TensorType};
use serde::{Deserialize, Serialize};

/// A tensor that each microbatch brings: model inputs, labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Input {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    /// The dim that counts samples; `None` for inputs that are the same for the whole batch.
    pub batch_dim: Option<u8>,
}

/// A persistent tensor: weight, constant tensor or optimizer state; possibly a piece of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Param {
    /// Initializer name in the model.
    pub name: String,
    pub kind: ParamKind,
    pub piece: Option<Piece>,
    pub dtype: DType,
    /// Global shape, of the piece where there is one.
    pub shape: Shape,
}

/// A number that the runtime writes before each step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Scalar {
    pub kind: ScalarKind,
    pub dtype: DType,
}

/// One number of rank 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Const {
    pub dtype: DType,
    /// The f64 bits for floats, the i64 bits for integers and bool.
    pub bits: u64,
}

/// The index along `dim`, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Iota {
    pub dtype: DType,
    pub shape: Shape,
    pub dim: u8,
}

/// Uniform f32 in [0, 1) by Philox on the global element index; operands: seed, step (i64 scalars).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Uniform {
    /// Stable from import: distinguishes random ops of a model.
    pub id: u32,
    pub shape: Shape,
}

impl Const {
    pub fn float(dtype: DType, value: f64) -> Const {
        Const { dtype, bits: value.to_bits() }
    }

    pub fn int(dtype: DType, value: i64) -> Const {
        Const { dtype, bits: value as u64 }
    }

    /// `value` as the dtype wants it: its bits as f64, or truncated to an integer.
    pub fn of(dtype: DType, value: f64) -> Const {
        if dtype.is_float() { Const::float(dtype, value) } else { Const::int(dtype, value as i64) }
    }

    pub fn value(&self) -> f64 {
        if self.dtype.is_float() { f64::from_bits(self.bits) } else { self.bits as i64 as f64 }
    }
}

fn leaf(name: &str, operands: &[&TensorType], dtype: DType, shape: &Shape) -> Result<TensorType> {
    exactly::<0>(name, operands)?;
    Ok(TensorType::new(dtype, shape.iter().copied()))
}

impl OpDef for Input {
    const NAME: &'static str = "input";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }
}

impl OpDef for Param {
    const NAME: &'static str = "param";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }
}

impl OpDef for Scalar {
    const NAME: &'static str = "scalar";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &Shape::new())
    }
}

impl OpDef for Const {
    const NAME: &'static str = "const";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        leaf(Self::NAME, operands, self.dtype, &Shape::new())
    }
}

impl OpDef for Iota {
    const NAME: &'static str = "iota";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        if usize::from(self.dim) >= self.shape.len() {
            return Err(Error::shape(format!("iota along dim {} of a tensor of rank {}", self.dim, self.shape.len())));
        }
        leaf(Self::NAME, operands, self.dtype, &self.shape)
    }
}

impl OpDef for Uniform {
    const NAME: &'static str = "uniform";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [seed, step] = exactly::<2>(Self::NAME, operands)?;
        if [seed, step].iter().any(|t| t.dtype != DType::I64 || t.rank() != 0) {
            return Err(Error::dtype("uniform takes an i64 scalar seed and step"));
        }
        Ok(TensorType::new(DType::F32, self.shape.iter().copied()))
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(0, result.rank());
        rule.spec.operands = vec![vec![], vec![]];
        rule
    }
}
