//! Pointwise ops: every operand has the result's shape.

use super::{OpDef, exactly};
use crate::error::{Error, Result};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, TensorType};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Unary {
    pub op: UnaryOp,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Binary {
    pub op: BinaryOp,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Compare {
    pub op: CompareOp,
}

/// `if operand 0 then operand 1 else operand 2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Select {}

/// Value conversion; float to integer truncates toward zero and saturates, anything to bool is `!= 0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cast {
    pub dtype: DType,
}

/// The operand, without gradient.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StopGradient {}

fn same_shape(name: &str, a: &TensorType, b: &TensorType) -> Result<()> {
    if a.shape == b.shape {
        return Ok(());
    }
    Err(Error::shape(format!("{name} of shapes {:?} and {:?}", a.shape.as_slice(), b.shape.as_slice())))
}

fn same_dtype(name: &str, a: &TensorType, b: &TensorType) -> Result<()> {
    if a.dtype == b.dtype {
        return Ok(());
    }
    Err(Error::dtype(format!("{name} of {} and {}", a.dtype.name(), b.dtype.name())))
}

impl OpDef for Unary {
    const NAME: &'static str = "unary";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(self.op.name(), operands)?;
        let fits = match self.op {
            UnaryOp::Not => !x.dtype.is_float(),
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => x.dtype != DType::Bool,
            UnaryOp::IsNan | UnaryOp::IsInf => return Ok(x.with_dtype(DType::Bool)),
            _ => x.dtype.is_float(),
        };
        if fits { Ok(x.clone()) } else { Err(Error::dtype(format!("{} of {}", self.op.name(), x.dtype.name()))) }
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        if self.op == UnaryOp::Neg { vec![vec![0]] } else { Vec::new() }
    }
}

impl OpDef for Binary {
    const NAME: &'static str = "binary";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(self.op.name(), operands)?;
        same_shape(self.op.name(), a, b)?;
        same_dtype(self.op.name(), a, b)?;
        let logic = matches!(self.op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor);
        let fits = if logic { !a.dtype.is_float() } else { a.dtype != DType::Bool };
        if fits { Ok(a.clone()) } else { Err(Error::dtype(format!("{} of {}", self.op.name(), a.dtype.name()))) }
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        match self.op {
            BinaryOp::Add | BinaryOp::Sub => vec![vec![0, 1]],
            BinaryOp::Mul => vec![vec![0], vec![1]],
            BinaryOp::Div => vec![vec![0]],
            _ => Vec::new(),
        }
    }
}

impl OpDef for Compare {
    const NAME: &'static str = "compare";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(self.op.name(), operands)?;
        same_shape(self.op.name(), a, b)?;
        same_dtype(self.op.name(), a, b)?;
        Ok(a.with_dtype(DType::Bool))
    }
}

impl OpDef for Select {
    const NAME: &'static str = "select";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [condition, a, b] = exactly::<3>(Self::NAME, operands)?;
        if condition.dtype != DType::Bool {
            return Err(Error::dtype(format!("select on {}", condition.dtype.name())));
        }
        same_shape(Self::NAME, condition, a)?;
        same_shape(Self::NAME, a, b)?;
        same_dtype(Self::NAME, a, b)?;
        Ok(a.clone())
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![1, 2]]
    }
}

impl OpDef for Cast {
    const NAME: &'static str = "cast";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        Ok(x.with_dtype(self.dtype))
    }
}

impl OpDef for StopGradient {
    const NAME: &'static str = "stop_gradient";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        Ok(x.clone())
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}
