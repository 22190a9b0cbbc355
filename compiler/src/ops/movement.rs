//! Ops that only move elements.

use super::example::{Example, floats, ints};
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::Tensor;
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut strides = vec![0; result.rank()];
        for (&dim, stride) in self.dims.iter().zip(operands[0].strides()) {
            strides[usize::from(dim)] = stride as isize;
        }
        operands[0].read(result, 0, &strides)
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let repeated: Vec<usize> = (0..self.shape.len()).filter(|&d| !self.dims.contains(&(d as u8))).collect();
        g.give(0, |g| {
            let x = g.operand(0);
            g.sum_repeated(x, dy, &repeated)
        })
    }

    fn examples() -> Vec<Example> {
        let of = |x: Tensor, shape: &[u64], dims: &[u8]| {
            Example::new(BroadcastInDim { shape: Shape::from_slice(shape), dims: Dims::from_slice(dims) }, [x])
        };
        vec![
            of(floats(1, &[]), &[3, 5], &[]),
            of(floats(1, &[5]), &[3, 5], &[1]),
            of(floats(1, &[3]), &[3, 5], &[0]),
            of(floats(1, &[2, 5]), &[2, 3, 5, 4], &[0, 2]),
            of(ints(0, 9, 1, &[4]), &[4, 7], &[0]),
        ]
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::new(result.dtype, result.shape.clone(), operands[0].data.clone())
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let shape = g.ty(g.operand(0)).shape.clone();
        g.give(0, |g| g.reshape(dy, &shape))
    }

    fn examples() -> Vec<Example> {
        let of = |from: &[u64], to: &[u64]| Example::new(Reshape { shape: Shape::from_slice(to) }, [floats(1, from)]);
        vec![
            of(&[6, 5], &[6, 5, 1]),
            of(&[3, 12], &[3, 4, 3]),
            of(&[3, 4, 3], &[12, 3]),
            of(&[2, 3], &[3, 2]),
            of(&[4, 3, 5, 2], &[4, 15, 2]),
            of(&[5, 16, 4], &[20, 16]),
            of(&[1, 2, 3, 4], &[3, 2, 4]),
            of(&[1, 1], &[]),
        ]
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let from = operands[0].strides();
        let strides: Vec<isize> = self.perm.iter().map(|&d| from[usize::from(d)] as isize).collect();
        operands[0].read(result, 0, &strides)
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let mut inverse = vec![0; self.perm.len()];
        for (i, &d) in self.perm.iter().enumerate() {
            inverse[usize::from(d)] = i;
        }
        let x = g.operand(0);
        g.give(0, |g| g.of_value(x, |g| g.transpose(dy, &inverse)))
    }

    fn examples() -> Vec<Example> {
        let of = |shape: &[u64], perm: &[u8]| Example::new(Transpose { perm: Dims::from_slice(perm) }, [floats(1, shape)]);
        vec![of(&[3, 5], &[1, 0]), of(&[2, 3, 5], &[2, 0, 1]), of(&[2, 3, 4, 5], &[0, 2, 1, 3])]
    }
}
