//! Reductions and running sums.

use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use crate::ops::movement::Dims;
use dcc_program::{DType, FactorId, TensorType};
use serde::{Deserialize, Serialize};

/// The dims in `dims` (ascending) reduced and removed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reduce {
    pub op: dcc_program::Reduce,
    pub dims: Dims,
}

/// Running sum along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cumsum {
    pub dim: u8,
    /// Element i excludes operand i itself.
    pub exclusive: bool,
    /// From the end.
    pub reverse: bool,
}

impl OpDef for Reduce {
    const NAME: &'static str = "reduce";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let ascending = self.dims.windows(2).all(|w| w[0] < w[1]);
        if !ascending || self.dims.iter().any(|&d| usize::from(d) >= x.rank()) {
            return Err(Error::shape(format!("reduce of dims {:?} of {:?}", self.dims, x.shape.as_slice())));
        }
        if x.dtype == DType::Bool {
            return Err(Error::dtype(format!("reduce {} of bool", self.op.name())));
        }
        let kept = (0..x.rank()).filter(|&d| !self.dims.contains(&(d as u8)));
        Ok(TensorType::new(x.dtype, kept.map(|d| x.shape[d])))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, operands[0].rank());
        for &d in self.dims.iter().rev() {
            rule.spec.result.remove(usize::from(d));
        }
        rule.reduce = self.op;
        if self.op == dcc_program::Reduce::Prod {
            rule.whole = self.dims.iter().map(|&d| FactorId(d)).collect();
        }
        rule
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        if self.op == dcc_program::Reduce::Sum { vec![vec![0]] } else { Vec::new() }
    }
}

impl OpDef for Cumsum {
    const NAME: &'static str = "cumsum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        if usize::from(self.dim) >= x.rank() || x.dtype == DType::Bool {
            return Err(Error::shape(format!("cumsum along dim {} of {:?}", self.dim, x.shape.as_slice())));
        }
        Ok(x.clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, result.rank());
        rule.whole = vec![FactorId(self.dim)];
        rule
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}
