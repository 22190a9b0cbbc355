//! Shorthands for building graphs: constants, broadcasts, elementwise chains.

use super::{Graph, NodeId};
use crate::error::Result;
use crate::ops::movement::Dims;
use crate::ops::{Binary, BroadcastInDim, Cast, Compare, Const, DotGeneral, Reduce, Reshape, Select, Transpose, Unary};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Shape};

impl Graph {
    pub fn unary(&mut self, op: UnaryOp, x: NodeId) -> Result<NodeId> {
        self.add(Unary { op }, &[x])
    }

    pub fn binary(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.add(Binary { op }, &[a, b])
    }

    pub fn compare(&mut self, op: CompareOp, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.add(Compare { op }, &[a, b])
    }

    pub fn select(&mut self, condition: NodeId, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.add(Select {}, &[condition, a, b])
    }

    /// The operand itself where it has the dtype already.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        if self.ty(x).dtype == dtype { Ok(x) } else { self.add(Cast { dtype }, &[x]) }
    }

    /// `value` in `dtype` (truncated to an integer where that is one), broadcast to `shape`.
    pub fn splat(&mut self, dtype: DType, value: f64, shape: &[u64]) -> Result<NodeId> {
        let scalar = self.add(Const::of(dtype, value), &[])?;
        self.broadcast(scalar, shape, &[])
    }

    /// `value` with the dtype and shape of `x`.
    pub fn splat_like(&mut self, value: f64, x: NodeId) -> Result<NodeId> {
        let ty = self.ty(x).clone();
        self.splat(ty.dtype, value, &ty.shape)
    }

    /// `x op value`, with `value` broadcast.
    pub fn binary_scalar(&mut self, op: BinaryOp, x: NodeId, value: f64) -> Result<NodeId> {
        let value = self.splat_like(value, x)?;
        self.binary(op, x, value)
    }

    pub fn scale(&mut self, x: NodeId, factor: f64) -> Result<NodeId> {
        self.binary_scalar(BinaryOp::Mul, x, factor)
    }

    /// Operand dim i becomes result dim `dims[i]`.
    pub fn broadcast(&mut self, x: NodeId, shape: &[u64], dims: &[usize]) -> Result<NodeId> {
        if self.ty(x).shape.as_slice() == shape {
            return Ok(x);
        }
        let dims: Dims = dims.iter().map(|&d| d as u8).collect();
        self.add(BroadcastInDim { shape: Shape::from_slice(shape), dims }, &[x])
    }

    /// NumPy broadcasting of `x` to `shape`: dims aligned at the end, size 1 repeats.
    pub fn broadcast_trailing(&mut self, x: NodeId, shape: &[u64]) -> Result<NodeId> {
        let from = self.ty(x).shape.clone();
        let skip = shape.len().saturating_sub(from.len());
        let kept: Vec<usize> = (0..from.len()).filter(|&d| from[d] == *shape.get(skip + d).unwrap_or(&0)).collect();
        if kept.iter().any(|&d| skip + d >= shape.len()) || (0..from.len()).any(|d| from[d] != 1 && !kept.contains(&d)) {
            let what = format!("cannot broadcast {:?} to {shape:?}", from.as_slice());
            return Err(crate::error::Error::shape(what));
        }
        let dense: Vec<u64> = kept.iter().map(|&d| from[d]).collect();
        let x = self.reshape(x, &dense)?;
        let dims: Vec<usize> = kept.iter().map(|&d| skip + d).collect();
        self.broadcast(x, shape, &dims)
    }

    pub fn reshape(&mut self, x: NodeId, shape: &[u64]) -> Result<NodeId> {
        if self.ty(x).shape.as_slice() == shape {
            return Ok(x);
        }
        self.add(Reshape { shape: Shape::from_slice(shape) }, &[x])
    }

    pub fn transpose(&mut self, x: NodeId, perm: &[usize]) -> Result<NodeId> {
        if perm.iter().enumerate().all(|(i, &p)| i == p) && perm.len() == self.ty(x).rank() {
            return Ok(x);
        }
        self.add(Transpose { perm: perm.iter().map(|&p| p as u8).collect() }, &[x])
    }

    /// Reduces and removes `dims`.
    pub fn reduce(&mut self, op: dcc_program::Reduce, x: NodeId, dims: &[usize]) -> Result<NodeId> {
        if dims.is_empty() {
            return Ok(x);
        }
        let mut dims: Dims = dims.iter().map(|&d| d as u8).collect();
        dims.sort_unstable();
        self.add(Reduce { op, dims }, &[x])
    }

    pub fn sum(&mut self, x: NodeId, dims: &[usize]) -> Result<NodeId> {
        self.reduce(dcc_program::Reduce::Sum, x, dims)
    }

    /// `dot_general` by a spec known to parse, such as `m k, k n -> m n`.
    pub fn dot(&mut self, spec: &str, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.add(DotGeneral::of(spec), &[a, b])
    }
}
