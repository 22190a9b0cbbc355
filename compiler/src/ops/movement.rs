//! Ops that only move elements.

use super::{OpDef, Rule, exactly};
use crate::error::{Error, Result};
use dcc_program::factors::DimFactors;
use dcc_program::{FactorId, Shape, TensorType};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub type Dims = SmallVec<[u8; 4]>;

/// Operand dim i becomes result dim `dims[i]` (ascending); the other result dims repeat the operand.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BroadcastInDim {
    pub shape: Shape,
    pub dims: Dims,
}

/// The same elements in row-major order under another shape.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reshape {
    pub shape: Shape,
}

/// Result dim i is operand dim `perm[i]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Transpose {
    pub perm: Dims,
}

/// Elements `start, start + stride, … < limit` of each dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slice {
    pub start: Shape,
    pub limit: Shape,
    pub stride: Shape,
}

/// `low` elements of zero before, `high` after, `interior` between the elements of each dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Pad {
    pub low: Shape,
    pub high: Shape,
    pub interior: Shape,
}

/// The operands one after the other along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Concatenate {
    pub dim: u8,
}

/// The elements of `dims` in opposite order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reverse {
    pub dims: Dims,
}

impl OpDef for BroadcastInDim {
    const NAME: &'static str = "broadcast_in_dim";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let ascending = self.dims.windows(2).all(|w| w[0] < w[1]);
        let fits = self.dims.len() == x.rank()
            && ascending
            && self.dims.iter().zip(&x.shape).all(|(&d, size)| self.shape.get(usize::from(d)) == Some(size));
        if !fits {
            let what = format!("broadcast of {:?} to {:?} along {:?}", x.shape.as_slice(), self.shape.as_slice(), self.dims);
            return Err(Error::shape(what));
        }
        Ok(TensorType::new(x.dtype, self.shape.iter().copied()))
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, result.rank());
        rule.spec.operands[0] = self.dims.iter().map(|&d| DimFactors::from_slice(&[FactorId(d)])).collect();
        rule
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for Reshape {
    const NAME: &'static str = "reshape";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let to = TensorType::new(x.dtype, self.shape.iter().copied());
        if to.elements() != x.elements() {
            let what = format!("reshape cannot turn {} elements into {}", x.elements(), to.elements());
            return Err(Error::shape(what).note(format!("{:?} -> {:?}", x.shape.as_slice(), self.shape.as_slice())));
        }
        Ok(to)
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
        Rule::reshape(&operands[0].shape, &result.shape)
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for Transpose {
    const NAME: &'static str = "transpose";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if sorted.len() != x.rank() || sorted.iter().enumerate().any(|(i, &d)| usize::from(d) != i) {
            return Err(Error::shape(format!("{:?} is no permutation of {} dims", self.perm, x.rank())));
        }
        Ok(TensorType::new(x.dtype, self.perm.iter().map(|&d| x.shape[usize::from(d)])))
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, result.rank());
        for (i, &d) in self.perm.iter().enumerate() {
            rule.spec.operands[0][usize::from(d)] = DimFactors::from_slice(&[FactorId(i as u8)]);
        }
        rule
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for Slice {
    const NAME: &'static str = "slice";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let rank = x.rank();
        let ranks = [self.start.len(), self.limit.len(), self.stride.len()];
        let fits = ranks == [rank; 3]
            && (0..rank).all(|d| self.start[d] <= self.limit[d] && self.limit[d] <= x.shape[d] && self.stride[d] > 0);
        if !fits {
            return Err(Error::shape(format!("slice {self:?} of {:?}", x.shape.as_slice())));
        }
        Ok(TensorType::new(x.dtype, (0..rank).map(|d| (self.limit[d] - self.start[d]).div_ceil(self.stride[d]))))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
        Rule::shifted(result.rank(), 1, |d| operands[0].shape[d] != result.shape[d])
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for Pad {
    const NAME: &'static str = "pad";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        if [self.low.len(), self.high.len(), self.interior.len()] != [x.rank(); 3] {
            return Err(Error::shape(format!("pad {self:?} of {:?}", x.shape.as_slice())));
        }
        let size = |d: usize| {
            let inner = x.shape[d] + x.shape[d].saturating_sub(1).checked_mul(self.interior[d])?;
            inner.checked_add(self.low[d])?.checked_add(self.high[d])
        };
        let shape: Option<Shape> = (0..x.rank()).map(size).collect();
        let shape = shape.ok_or_else(|| Error::shape(format!("pad {self:?} of {:?} overflows", x.shape.as_slice())))?;
        Ok(TensorType::new(x.dtype, shape))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
        Rule::shifted(result.rank(), 1, |d| operands[0].shape[d] != result.shape[d])
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}

impl OpDef for Concatenate {
    const NAME: &'static str = "concatenate";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let dim = usize::from(self.dim);
        let Some(first) = operands.first().filter(|f| dim < f.rank()) else {
            return Err(Error::shape(format!("concatenate of {} operands along dim {dim}", operands.len())));
        };
        let mut out = (*first).clone();
        out.shape[dim] = 0;
        for x in operands {
            let fits = x.dtype == first.dtype
                && x.rank() == first.rank()
                && (0..first.rank()).all(|d| d == dim || x.shape[d] == first.shape[d]);
            if !fits {
                let shapes: Vec<_> = operands.iter().map(|t| t.shape.to_vec()).collect();
                return Err(Error::shape(format!("concatenate of {shapes:?} along dim {dim}")));
            }
            out.shape[dim] += x.shape[dim];
        }
        Ok(TensorType::new(out.dtype, out.shape))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> Rule {
        Rule::shifted(result.rank(), operands.len(), |d| d == usize::from(self.dim))
    }

    fn linear(&self, operands: usize) -> Vec<Vec<usize>> {
        vec![(0..operands).collect()]
    }
}

impl OpDef for Reverse {
    const NAME: &'static str = "reverse";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        if self.dims.iter().any(|&d| usize::from(d) >= x.rank()) {
            return Err(Error::shape(format!("reverse of dims {:?} of {:?}", self.dims, x.shape.as_slice())));
        }
        Ok(x.clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, result.rank());
        rule.whole = self.dims.iter().map(|&d| FactorId(d)).collect();
        rule
    }

    fn linear(&self, _: usize) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }
}
