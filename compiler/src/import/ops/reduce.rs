//! Reductions, running sums and products, index of the maximum.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce};

use super::{Call, Import, axes};
use crate::error::Result;
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::{Value, axis};

pub const ONNX: &[(&str, Import)] = &[
    ("ArgMax", |b, c| arg_extreme(b, c, Reduce::Max)),
    ("ArgMin", |b, c| arg_extreme(b, c, Reduce::Min)),
    ("CumProd", cumprod),
    ("CumSum", cumsum),
    ("ReduceL1", reduce_l1),
    ("ReduceL2", reduce_l2),
    ("ReduceLogSum", reduce_log_sum),
    ("ReduceLogSumExp", reduce_log_sum_exp),
    ("ReduceMax", |b, c| plain(b, c, Reduce::Max)),
    ("ReduceMean", reduce_mean),
    ("ReduceMin", |b, c| plain(b, c, Reduce::Min)),
    ("ReduceProd", |b, c| plain(b, c, Reduce::Prod)),
    ("ReduceSum", |b, c| plain(b, c, Reduce::Sum)),
    ("ReduceSumSquare", reduce_sum_square),
];

/// The dims to reduce, and whether they stay with size 1. Axes are an attribute at first and an input later; without any,
/// all dims are reduced unless `noop_with_empty_axes`.
fn dims(build: &Build, call: &Call) -> Result<(Vec<usize>, bool)> {
    let rank = call.input(0)?.rank(build)?;
    let keep = call.node.flag("keepdims", true)?;
    let noop = call.node.flag("noop_with_empty_axes", false)?;
    let given = call.ints_either(build, "axes", 1)?.filter(|axes| !axes.is_empty());
    Ok(match given {
        Some(given) => (axes(&given, rank)?, keep),
        None if noop => (Vec::new(), keep),
        None => ((0..rank).collect(), keep),
    })
}

fn plain(build: &mut Build, call: &Call, op: Reduce) -> Result<Vec<Value>> {
    let (dims, keep) = dims(build, call)?;
    Ok(vec![build.reduce(op, call.input(0)?, &dims, keep)?])
}

fn reduce_mean(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (dims, keep) = dims(build, call)?;
    Ok(vec![build.mean(call.input(0)?, &dims, keep)?])
}

fn reduce_l1(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (dims, keep) = dims(build, call)?;
    let size = build.unary(UnaryOp::Abs, call.input(0)?)?;
    Ok(vec![build.reduce(Reduce::Sum, &size, &dims, keep)?])
}

fn reduce_sum_square(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (dims, keep) = dims(build, call)?;
    let square = build.binary(BinaryOp::Mul, call.input(0)?, call.input(0)?)?;
    Ok(vec![build.reduce(Reduce::Sum, &square, &dims, keep)?])
}

fn reduce_l2(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let sum = reduce_sum_square(build, call)?;
    let dtype = sum[0].dtype(build)?;
    let (zero, one): (Value, Value) = (Known::scalar(dtype, 0.0).into(), Known::scalar(dtype, 1.0).into());
    // The root of 0 has no slope; PyTorch's norm has the slope 0 there.
    let empty = build.compare(CompareOp::Eq, &sum[0], &zero)?;
    let safe = build.select(&empty, &one, &sum[0])?;
    let root = build.unary(UnaryOp::Sqrt, &safe)?;
    Ok(vec![build.select(&empty, &zero, &root)?])
}

fn reduce_log_sum(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let sum = plain(build, call, Reduce::Sum)?;
    Ok(vec![build.unary(UnaryOp::Log, &sum[0])?])
}

/// `max + log Σ exp(x - max)`, without gradient through the maximum: its two contributions cancel.
fn reduce_log_sum_exp(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (dims, keep) = dims(build, call)?;
    let x = call.input(0)?;
    let top = build.reduce(Reduce::Max, x, &dims, true)?;
    let top = build.stop_gradient(&top)?;
    let shifted = build.binary(BinaryOp::Sub, x, &top)?;
    let exp = build.unary(UnaryOp::Exp, &shifted)?;
    let sum = build.reduce(Reduce::Sum, &exp, &dims, keep)?;
    let log = build.unary(UnaryOp::Log, &sum)?;
    let shape = log.shape(build)?;
    let top = build.reshape(&top, &shape)?;
    Ok(vec![build.binary(BinaryOp::Add, &top, &log)?])
}

fn cumsum(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dim = axis(call.known_number(build, 1)? as i64, x.rank(build)?)?;
    let (exclusive, reverse) = (call.node.flag("exclusive", false)?, call.node.flag("reverse", false)?);
    Ok(vec![build.cumsum(x, dim, exclusive, reverse)?])
}

/// Running product by doubling: after step k each element is the product of the 2ᵏ up to it. Exact where elements are 0, in its
/// gradient too.
fn cumprod(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dim = axis(call.known_number(build, 1)? as i64, shape.len())?;
    let reverse = call.node.flag("reverse", false)?;
    let size = shape[dim];
    let mut y = x.clone();
    if call.node.flag("exclusive", false)? && size > 0 {
        y = shifted(build, &y, dim, 1, reverse)?;
    }
    let mut reach = 1;
    while reach < size {
        let before = shifted(build, &y, dim, reach, reverse)?;
        y = build.binary(BinaryOp::Mul, &y, &before)?;
        reach *= 2;
    }
    Ok(vec![y])
}

/// The elements `by` places before (or after) along `dim`, 1 beyond the end.
fn shifted(build: &mut Build, x: &Value, dim: usize, by: u64, reverse: bool) -> Result<Value> {
    let size = x.shape(build)?[dim];
    match reverse {
        false => {
            let part = build.narrow(x, dim, 0, size - by)?;
            build.pad(&part, dim, by, 0, 1.0)
        }
        true => {
            let part = build.narrow(x, dim, by, size - by)?;
            build.pad(&part, dim, 0, by, 1.0)
        }
    }
}

fn arg_extreme(build: &mut Build, call: &Call, op: Reduce) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dim = call.axis(0, shape.len())?;
    let index = build.index_of_extreme(op, x, dim, call.node.flag("select_last_index", false)?)?;
    if call.node.flag("keepdims", true)? {
        return Ok(vec![index]);
    }
    let kept: Vec<u64> = (0..shape.len()).filter(|&d| d != dim).map(|d| shape[d]).collect();
    Ok(vec![build.reshape(&index, &kept)?])
}

impl Build {
    /// The index along `dim`, of size 1 in the other dims: i64.
    pub fn positions(&self, shape: &[u64], dim: usize) -> Result<Value> {
        let line: Vec<u64> = (0..shape.len()).map(|d| if d == dim { shape[d] } else { 1 }).collect();
        let index = Known::range(DType::I64, 0.0, 1.0, shape[dim]).and_then(|index| index.reshape(&line));
        Ok(index.ok_or_else(|| crate::error::Error::limit(format!("{} positions", shape[dim])))?.into())
    }

    /// Along `dim`, which stays with size 1: the first index whose element equals the extreme, the least of the indices where
    /// it does; or the last.
    pub fn index_of_extreme(&mut self, op: Reduce, x: &Value, dim: usize, last: bool) -> Result<Value> {
        let shape = x.shape(self)?;
        let extreme = self.reduce(op, x, &[dim], true)?;
        let hit = self.compare(CompareOp::Eq, x, &extreme)?;
        let index = self.positions(&shape, dim)?;
        let (none, choice) = if last { (-1, Reduce::Max) } else { (shape[dim] as i64, Reduce::Min) };
        let index = self.select(&hit, &index, &Known::int(DType::I64, none).into())?;
        self.reduce(choice, &index, &[dim], true)
    }
}
