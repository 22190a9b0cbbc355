//! `dot_general`: the contraction of two tensors, by a factor spec.

use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use dcc_program::{FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// `Σ` over the factors missing from the result of the product of both operands; every dim is one factor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DotGeneral {
    /// For instance `b m k, k n -> b m n`.
    pub spec: FactorSpec,
}

impl DotGeneral {
    /// From a spec known to parse.
    pub fn of(spec: &str) -> DotGeneral {
        DotGeneral { spec: FactorSpec::parse(spec).expect("a dot of ours parses") }
    }
}

/// The result of an op all of whose dims are plain factors; every result factor must come from an operand.
pub(super) fn infer_by_spec(name: &str, spec: &FactorSpec, operands: &[&TensorType]) -> Result<TensorType> {
    let wrong = |why: String| {
        let shapes: Vec<_> = operands.iter().map(|t| t.shape.to_vec()).collect();
        Error::shape(format!("{name}({}) of {shapes:?}: {why}", spec.text()))
    };
    if spec.operands.len() != operands.len() {
        return Err(wrong(format!("{} operands expected", spec.operands.len())));
    }
    let mut sizes: Vec<Option<u64>> = vec![None; spec.names.len()];
    for (dims, ty) in spec.operands.iter().zip(operands) {
        if dims.len() != ty.rank() || dims.iter().any(|d| d.len() != 1) {
            return Err(wrong(format!("operand {:?} has rank {}", spec.dims_text(dims), ty.rank())));
        }
        for (dim, &size) in dims.iter().zip(&ty.shape) {
            let factor = usize::from(dim[0].0);
            if *sizes[factor].get_or_insert(size) != size {
                return Err(wrong(format!("factor {} is {} and {size}", spec.names[factor], sizes[factor].unwrap_or(0))));
            }
        }
    }
    let size = |dim: &dcc_program::factors::DimFactors| sizes[usize::from(dim.first()?.0)];
    let shape: Option<Vec<u64>> = spec.result.iter().map(size).collect();
    let shape = shape.ok_or_else(|| wrong("a result factor has no operand".to_owned()))?;
    Ok(TensorType::new(operands[0].dtype, shape))
}

impl OpDef for DotGeneral {
    const NAME: &'static str = "dot_general";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(Self::NAME, operands)?;
        if a.dtype != b.dtype || !a.dtype.is_float() {
            return Err(Error::dtype(format!("dot_general of {} and {}", a.dtype.name(), b.dtype.name())));
        }
        infer_by_spec(Self::NAME, &self.spec, operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        Rule::new(self.spec.clone())
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0], vec![1]]
    }
}
