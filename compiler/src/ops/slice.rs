//! Ops that take or place a window of elements: slice, pad, concatenate, reverse.

use super::example::{Example, floats, ints};
use super::movement::Dims;
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::Tensor;
use dcc_program::{FactorId, Shape, TensorType};
use serde::{Deserialize, Serialize};

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

impl Pad {
    /// The dim along which it pads, if that is one, and none has zeros inside.
    pub fn along(&self) -> Option<usize> {
        let mut padded = (0..self.low.len()).filter(|&d| self.low[d] + self.high[d] != 0);
        let dim = padded.next()?;
        (padded.next().is_none() && self.interior.iter().all(|&n| n == 0)).then_some(dim)
    }
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let from = operands[0].strides();
        let base = (0..from.len()).map(|d| self.start[d] as usize * from[d]).sum();
        let strides: Vec<isize> = (0..from.len()).map(|d| (self.stride[d] as usize * from[d]) as isize).collect();
        operands[0].read(result, base, &strides)
    }

    /// The elements back where they came from, among zeros.
    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let (to, from) = (g.ty(g.operand(0)).shape.clone(), g.ty(y).shape.clone());
        if from.contains(&0) {
            return Ok(());
        }
        let high = |d: usize| to[d] - self.start[d] - (from[d] - 1) * self.stride[d] - 1;
        let pad = Pad {
            low: self.start.clone(),
            high: (0..to.len()).map(high).collect(),
            interior: self.stride.iter().map(|s| s - 1).collect(),
        };
        g.give(0, |g| g.add(pad, &[dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |shape: &[u64], start: &[u64], limit: &[u64], stride: &[u64]| {
            let [start, limit, stride] = [start, limit, stride].map(Shape::from_slice);
            Example::new(Slice { start, limit, stride }, [floats(1, shape)])
        };
        vec![
            of(&[3, 7], &[0, 2], &[3, 5], &[1, 1]),
            of(&[5, 9], &[0, 1], &[5, 9], &[1, 3]),
            of(&[4, 5, 6], &[1, 0, 0], &[2, 5, 5], &[1, 1, 2]),
        ]
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let to = crate::interp::strides(&result.shape);
        let base = (0..to.len()).map(|d| self.low[d] as usize * to[d]).sum();
        let strides: Vec<isize> = (0..to.len()).map(|d| ((self.interior[d] as usize + 1) * to[d]) as isize).collect();
        let mut out = Tensor::zeros(result);
        operands[0].write(&mut out, base, &strides);
        out
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let to = g.ty(g.operand(0)).shape.clone();
        if to.contains(&0) {
            return Ok(());
        }
        let limit = |d: usize| self.low[d] + (to[d] - 1) * (self.interior[d] + 1) + 1;
        let slice = Slice {
            start: self.low.clone(),
            limit: (0..to.len()).map(limit).collect(),
            stride: self.interior.iter().map(|i| i + 1).collect(),
        };
        g.give(0, |g| g.add(slice, &[dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |x: Tensor, low: &[u64], high: &[u64], interior: &[u64]| {
            let [low, high, interior] = [low, high, interior].map(Shape::from_slice);
            Example::new(Pad { low, high, interior }, [x])
        };
        vec![
            of(floats(1, &[3, 5]), &[0, 1], &[0, 2], &[0, 0]),
            of(floats(1, &[5, 3]), &[0, 2], &[0, 0], &[0, 2]),
            of(ints(1, 9, 1, &[2, 3]), &[1, 0], &[1, 0], &[0, 0]),
        ]
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

    fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![(0..operands.len()).collect()]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut out = Tensor::zeros(result);
        let to = out.strides();
        let strides: Vec<isize> = to.iter().map(|&s| s as isize).collect();
        let dim = usize::from(self.dim);
        let mut start = 0;
        for x in operands {
            x.write(&mut out, start * to[dim], &strides);
            start += x.shape[dim] as usize;
        }
        out
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let dim = usize::from(self.dim);
        let mut start: Shape = g.ty(y).shape.iter().map(|_| 0).collect();
        for i in 0..g[y].operands.len() {
            let mut limit = g.ty(g.operand(i)).shape.clone();
            limit[dim] += start[dim];
            let slice = Slice { start: start.clone(), limit: limit.clone(), stride: start.iter().map(|_| 1).collect() };
            g.give(i, |g| g.add(slice, &[dy]))?;
            start[dim] = limit[dim];
        }
        Ok(())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new(Concatenate { dim: 1 }, [floats(1, &[3, 2]), floats(2, &[3, 4]), floats(3, &[3, 1])]),
            Example::new(Concatenate { dim: 0 }, [floats(1, &[2, 5]), floats(2, &[1, 5])]),
            Example::new(Concatenate { dim: 0 }, [ints(0, 9, 1, &[2]), ints(0, 9, 2, &[3])]),
            Example::new(Concatenate { dim: 1 }, [floats(1, &[4, 3])]),
        ]
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

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        if result.elements() == 0 {
            return operands[0].clone();
        }
        let mut base = 0;
        let mut strides: Vec<isize> = operands[0].strides().into_iter().map(|s| s as isize).collect();
        for &d in &self.dims {
            let d = usize::from(d);
            base += (result.shape[d] as usize - 1) * strides[d] as usize;
            strides[d] = -strides[d];
        }
        operands[0].read(result, base, &strides)
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        g.give(0, |g| g.add(self.clone(), &[dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |shape: &[u64], dims: &[u8]| Example::new(Reverse { dims: Dims::from_slice(dims) }, [floats(1, shape)]);
        vec![of(&[3, 5], &[1]), of(&[2, 3, 5], &[0, 2]), of(&[4], &[])]
    }
}
