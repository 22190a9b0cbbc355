//! Normalisations over groups, samples, neighbours and lines, and the maximum as a one-hot vector.

use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Reduce};

use super::norm::by_root_mean_square;
use super::{Call, Import, attribute_value, axes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("GroupNormalization", group_normalization),
    ("Hardmax", hardmax),
    ("InstanceNormalization", instance_normalization),
    ("LRN", local_response_normalization),
    ("LpNormalization", lp_normalization),
    ("MeanVarianceNormalization", mean_variance_normalization),
];

/// `(x - mean) / √(variance + epsilon)` over `dims`.
fn standardised(build: &mut Build, x: &Value, dims: &[usize], epsilon: f64) -> Result<Value> {
    let mean = build.mean(x, dims, true)?;
    let centred = build.binary(BinaryOp::Sub, x, &mean)?;
    Ok(by_root_mean_square(build, &centred, dims, epsilon)?.0)
}

/// `x * scale + bias` with one of each per channel, which are dim 1.
pub(super) fn per_channel(build: &mut Build, x: &Value, scale: &Value, bias: &Value) -> Result<Value> {
    let rank = x.rank(build)?;
    let (scale, bias) = (channels(build, scale, rank)?, channels(build, bias, rank)?);
    let scaled = build.binary(BinaryOp::Mul, x, &scale)?;
    build.binary(BinaryOp::Add, &scaled, &bias)
}

/// A vector along dim 1 of a tensor of `rank`.
pub(super) fn channels(build: &mut Build, vector: &Value, rank: usize) -> Result<Value> {
    let size: u64 = vector.shape(build)?.iter().product();
    let shape: Vec<u64> = (0..rank).map(|dim| if dim == 1 { size } else { 1 }).collect();
    build.reshape(vector, &shape)
}

fn image(build: &Build, call: &Call) -> Result<Vec<u64>> {
    let shape = call.input(0)?.shape(build)?;
    match shape.len() {
        0 | 1 => Err(Error::shape(format!("{} of {:?}, which has no channels", call.node.op, shape.as_slice()))),
        _ => Ok(shape.to_vec()),
    }
}

/// Ulyanov et al. 2016, arXiv 1607.08022.
fn instance_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let rank = image(build, call)?.len();
    let (x, dtype) = wide(build, call.input(0)?)?;
    let dims: Vec<usize> = (2..rank).collect();
    let y = standardised(build, &x, &dims, call.node.float_or("epsilon", 1e-5)?)?;
    let y = build.cast(&y, dtype)?;
    Ok(vec![per_channel(build, &y, call.input(1)?, call.input(2)?)?])
}

/// Statistics over the channels of a group and all positions of a sample; up to opset 20 scale and bias are one per group.
/// Wu and He 2018, arXiv 1803.08494.
fn group_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = image(build, call)?;
    let given = call.node.int_or("num_groups", 0)?;
    let groups = u64::try_from(given).ok().filter(|&groups| groups > 0 && shape[1].is_multiple_of(groups));
    let groups = groups.ok_or_else(|| attribute_value("num_groups", given))?;
    if call.opset() >= 21 {
        let stash = call.node.int_or("stash_type", 1)?;
        if stash != 1 {
            return Err(attribute_value("stash_type", stash));
        }
    }
    let (x, dtype) = wide(build, call.input(0)?)?;
    let mut split = shape.clone();
    split[1] /= groups;
    split.insert(1, groups);
    let x = build.reshape(&x, &split)?;
    let dims: Vec<usize> = (2..split.len()).collect();
    let y = standardised(build, &x, &dims, call.node.float_or("epsilon", 1e-5)?)?;
    let y = build.cast(&y, dtype)?;
    if call.opset() < 21 {
        let y = per_channel(build, &y, call.input(1)?, call.input(2)?)?;
        return Ok(vec![build.reshape(&y, &shape)?]);
    }
    let y = build.reshape(&y, &shape)?;
    Ok(vec![per_channel(build, &y, call.input(1)?, call.input(2)?)?])
}

/// Statistics are at least f32; gives what was there before.
fn wide(build: &mut Build, x: &Value) -> Result<(Value, DType)> {
    let dtype = x.dtype(build)?;
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    Ok((build.cast(x, wide)?, dtype))
}

/// ONNX's function divides by the deviation plus 1e-9.
fn mean_variance_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let given = call.node.ints("axes")?.unwrap_or(&[0, 2, 3]);
    let dims = axes(given, x.rank(build)?)?;
    let mean = build.mean(x, &dims, true)?;
    let centred = build.binary(BinaryOp::Sub, x, &mean)?;
    let square = build.binary(BinaryOp::Mul, &centred, &centred)?;
    let variance = build.mean(&square, &dims, true)?;
    let deviation = build.unary(UnaryOp::Sqrt, &variance)?;
    let deviation = build.binary_scalar(BinaryOp::Add, &deviation, 1e-9)?;
    Ok(vec![build.binary(BinaryOp::Div, &centred, &deviation)?])
}

/// `x / ‖x‖ₚ` along one axis, 0 where the norm is.
fn lp_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dtype = x.dtype(build)?;
    let dim = call.axis(-1, x.rank(build)?)?;
    let (zero, one): (Value, Value) = (Known::scalar(dtype, 0.0).into(), Known::scalar(dtype, 1.0).into());
    let size = match call.node.int_or("p", 2)? {
        1 => build.unary(UnaryOp::Abs, x)?,
        2 => build.binary(BinaryOp::Mul, x, x)?,
        other => return Err(attribute_value("p", other)),
    };
    let sum = build.reduce(Reduce::Sum, &size, &[dim], true)?;
    // The root of 0 has no slope: where the sum is 0, x is, and any divisor does.
    let empty = build.compare(dcc_program::kernel::CompareOp::Eq, &sum, &zero)?;
    let sum = build.select(&empty, &one, &sum)?;
    let norm = if call.node.int_or("p", 2)? == 2 { build.unary(UnaryOp::Sqrt, &sum)? } else { sum };
    Ok(vec![build.binary(BinaryOp::Div, x, &norm)?])
}

/// `x / (bias + alpha/size Σ x²)^beta`, the sum over `size` neighbouring channels. Krizhevsky et al. 2012.
fn local_response_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = image(build, call)?;
    let x = call.input(0)?;
    let given = call.node.int_or("size", 0)?;
    let size = u64::try_from(given).ok().filter(|size| (1..=1 << 12).contains(size));
    let size = size.ok_or_else(|| attribute_value("size", given))?;
    let (alpha, beta) = (call.node.float_or("alpha", 1e-4)?, call.node.float_or("beta", 0.75)?);
    let square = build.binary(BinaryOp::Mul, x, x)?;
    let padded = build.pad(&square, 1, (size - 1) / 2, size / 2, 0.0)?;
    let mut sum = build.narrow(&padded, 1, 0, shape[1])?;
    for shift in 1..size {
        let part = build.narrow(&padded, 1, shift, shape[1])?;
        sum = build.binary(BinaryOp::Add, &sum, &part)?;
    }
    let base = build.binary_scalar(BinaryOp::Mul, &sum, alpha / size as f64)?;
    let base = build.binary_scalar(BinaryOp::Add, &base, call.node.float_or("bias", 1.0)?)?;
    let scale = build.binary_scalar(BinaryOp::Pow, &base, beta)?;
    Ok(vec![build.binary(BinaryOp::Div, x, &scale)?])
}

/// 1 at the first maximum along one axis, or up to opset 12 of all dims from `axis` on together; 0 elsewhere.
fn hardmax(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let (x, dim) = match call.opset() {
        13.. => (x.clone(), call.axis(-1, shape.len())?),
        _ => {
            let at = call.axis(1, shape.len())?;
            let rows = [shape[..at].iter().product(), shape[at..].iter().product()];
            (build.reshape(x, &rows)?, 1)
        }
    };
    let flat = x.shape(build)?;
    let first = build.index_of_extreme(Reduce::Max, &x, dim, false)?;
    let hit = build.compare(dcc_program::kernel::CompareOp::Eq, &build.positions(&flat, dim)?, &first)?;
    let y = build.cast(&hit, x.dtype(build)?)?;
    Ok(vec![build.reshape(&y, &shape)?])
}
