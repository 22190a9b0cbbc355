//! Rows by computed index, and its transpose. Covers embedding lookup, ONNX Gather and GatherElements.

use super::dot::infer_by_spec;
use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use dcc_program::{DType, FactorId, FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// Operands: data, indices (i64 or i32, in `[0, size)`; anything else gives zero). The factor of data that is not in the result
/// is the indexed one: `v e, b t -> b t e` is an embedding lookup, `i v, i j -> i j` takes along a dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gather {
    pub spec: FactorSpec,
}

/// Operands: indices, updates. `b t, b t e -> v e` adds each update to the row of a zero tensor that its index names; the factor
/// of the result that is in no operand is the indexed one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScatterAdd {
    pub spec: FactorSpec,
    /// Size of the indexed factor.
    pub size: u64,
}

impl Gather {
    /// The factor that indices select.
    pub fn indexed(&self) -> FactorId {
        self.spec.operands[0].iter().flatten().copied().find(|&f| !self.spec.in_result(f)).expect("infer saw it")
    }
}

impl ScatterAdd {
    /// The factor that indices select.
    pub fn indexed(&self) -> FactorId {
        let fresh = |&f: &FactorId| !self.spec.in_operand(0, f) && !self.spec.in_operand(1, f);
        self.spec.result.iter().flatten().copied().find(fresh).expect("infer saw it")
    }
}

fn index_dtype(ty: &TensorType) -> Result<()> {
    if matches!(ty.dtype, DType::I64 | DType::I32) {
        return Ok(());
    }
    Err(Error::dtype(format!("indices of {}", ty.dtype.name())))
}

impl OpDef for Gather {
    const NAME: &'static str = "gather";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [_, indices] = exactly::<2>(Self::NAME, operands)?;
        index_dtype(indices)?;
        let missing = |&&f: &&FactorId| !self.spec.in_result(f);
        if self.spec.operands[0].iter().flatten().filter(missing).count() != 1 {
            return Err(Error::shape(format!("gather({}) has not one indexed factor", self.spec.text())));
        }
        infer_by_spec(Self::NAME, &self.spec, operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { masked: vec![self.indexed()], ..Rule::new(self.spec.clone()) }
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for ScatterAdd {
    const NAME: &'static str = "scatter_add";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [indices, updates] = exactly::<2>(Self::NAME, operands)?;
        index_dtype(indices)?;
        let fresh = |f: &FactorId| !self.spec.in_operand(0, *f) && !self.spec.in_operand(1, *f);
        if self.spec.result.iter().flatten().filter(|f| fresh(f)).count() != 1 {
            return Err(Error::shape(format!("scatter_add({}) has not one indexed factor", self.spec.text())));
        }
        let mut operand_spec = self.spec.clone();
        let position = operand_spec.result.iter().position(|d| d.iter().any(fresh)).expect("counted above");
        operand_spec.result.remove(position);
        let mut ty = infer_by_spec(Self::NAME, &operand_spec, operands)?;
        ty.shape.insert(position, self.size);
        Ok(TensorType::new(updates.dtype, ty.shape))
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule { masked: vec![self.indexed()], ..Rule::new(self.spec.clone()) }
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![1]]
    }
}
