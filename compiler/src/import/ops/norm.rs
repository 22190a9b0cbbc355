//! Normalisations and softmax.

use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Reduce};

use super::{Call, Import, attribute_value};
use crate::error::Result;
use crate::import::build::Build;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("LayerNormalization", layer_normalization),
    ("LogSoftmax", log_softmax),
    ("RMSNormalization", rms_normalization),
    ("Softmax", softmax),
];

/// The dims from `axis` on, and x in the dtype in which statistics are taken (`stash_type`: f32 unless it is wider already).
fn statistics(build: &mut Build, call: &Call) -> Result<(Vec<usize>, Value)> {
    let x = call.input(0)?;
    let rank = x.rank(build)?;
    let first = call.axis(-1, rank)?;
    let stash = call.node.int_or("stash_type", 1)?;
    if stash != 1 && stash != 11 {
        return Err(attribute_value("stash_type", stash));
    }
    let wide = if stash == 11 || x.dtype(build)? == DType::F64 { DType::F64 } else { DType::F32 };
    Ok(((first..rank).collect(), build.cast(x, wide)?))
}

/// `x / √(mean(x²) + epsilon)`; gives that and the reciprocal root.
pub(super) fn by_root_mean_square(build: &mut Build, x: &Value, dims: &[usize], epsilon: f64) -> Result<(Value, Value)> {
    let square = build.binary(BinaryOp::Mul, x, x)?;
    let mean = build.mean(&square, dims, true)?;
    let shifted = build.binary_scalar(BinaryOp::Add, &mean, epsilon)?;
    let scale = build.unary(UnaryOp::Rsqrt, &shifted)?;
    Ok((build.binary(BinaryOp::Mul, x, &scale)?, scale))
}

/// `(x - mean) / √(variance + epsilon)`; gives that, the mean, and the reciprocal root.
pub(super) fn layer_normal(build: &mut Build, x: &Value, dims: &[usize], epsilon: f64) -> Result<(Value, Value, Value)> {
    let mean = build.mean(x, dims, true)?;
    let centred = build.binary(BinaryOp::Sub, x, &mean)?;
    let (normal, scale) = by_root_mean_square(build, &centred, dims, epsilon)?;
    Ok((normal, mean, scale))
}

/// Results Y, Mean, InvStdDev.
fn layer_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dtype = call.input(0)?.dtype(build)?;
    let (dims, x) = statistics(build, call)?;
    let (normal, mean, scale) = layer_normal(build, &x, &dims, call.node.float_or("epsilon", 1e-5)?)?;
    let normal = build.cast(&normal, dtype)?;
    let mut y = build.binary(BinaryOp::Mul, &normal, call.input(1)?)?;
    if let Some(bias) = call.optional(2) {
        y = build.binary(BinaryOp::Add, &y, bias)?;
    }
    Ok(vec![y, mean, scale])
}

pub(super) fn rms_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dtype = call.input(0)?.dtype(build)?;
    let (dims, x) = statistics(build, call)?;
    let (normal, _) = by_root_mean_square(build, &x, &dims, call.node.float_or("epsilon", 1e-5)?)?;
    let normal = build.cast(&normal, dtype)?;
    Ok(vec![build.binary(BinaryOp::Mul, &normal, call.input(1)?)?])
}

/// Opset 13 and up: along one axis, the last by default. Before: over all dims from `axis` (1) on.
fn softmax_dims(build: &Build, call: &Call) -> Result<Vec<usize>> {
    let rank = call.input(0)?.rank(build)?;
    Ok(match call.opset() {
        13.. => vec![call.axis(-1, rank)?],
        _ => (call.axis(1, rank)?..rank).collect(),
    })
}

fn softmax(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dims = softmax_dims(build, call)?;
    let (_, exp, sum) = exp_shifted(build, call.input(0)?, &dims)?;
    Ok(vec![build.binary(BinaryOp::Div, &exp, &sum)?])
}

fn log_softmax(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dims = softmax_dims(build, call)?;
    Ok(vec![log_softmax_of(build, call.input(0)?, &dims)?])
}

/// `x - max - log Σ exp(x - max)`.
pub(super) fn log_softmax_of(build: &mut Build, x: &Value, dims: &[usize]) -> Result<Value> {
    let (shifted, _, sum) = exp_shifted(build, x, dims)?;
    let log = build.unary(UnaryOp::Log, &sum)?;
    build.binary(BinaryOp::Sub, &shifted, &log)
}

/// `x - max`, its exponential, and the sum of that. The gradient stops at the maximum: exact, since softmax does not change
/// with a shift.
fn exp_shifted(build: &mut Build, x: &Value, dims: &[usize]) -> Result<(Value, Value, Value)> {
    let top = build.reduce(Reduce::Max, x, dims, true)?;
    let top = build.stop_gradient(&top)?;
    let shifted = build.binary(BinaryOp::Sub, x, &top)?;
    let exp = build.unary(UnaryOp::Exp, &shifted)?;
    let sum = build.reduce(Reduce::Sum, &exp, dims, true)?;
    Ok((shifted, exp, sum))
}
