//! Activations that networks use beside the common ones, and tests and shifts of bits.

use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::elementwise::{above_zero, exponential_below_zero, softplus_of, swish_of};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("BitShift", bit_shift),
    ("Celu", celu),
    ("IsInf", is_inf),
    ("Mish", mish),
    ("PRelu", prelu),
    ("Selu", selu),
    ("Shrink", shrink),
    ("Softsign", softsign),
    ("SwiGLU", swiglu),
    ("ThresholdedRelu", thresholded_relu),
];

/// Barron 2017, arXiv 1704.07483.
fn celu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (x, alpha) = (call.input(0)?, call.node.float_or("alpha", 1.0)?);
    if alpha == 0.0 {
        return Err(attribute_value("alpha", 0));
    }
    Ok(vec![exponential_below_zero(build, x, alpha, alpha)?])
}

/// Klambauer et al. 2017, arXiv 1706.02515; both constants as ONNX rounds them.
fn selu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let alpha = call.node.float_or("alpha", f64::from(1.673_263_2_f32))?;
    let gamma = call.node.float_or("gamma", f64::from(1.050_701_f32))?;
    let y = exponential_below_zero(build, x, 1.0, alpha)?;
    Ok(vec![build.binary_scalar(BinaryOp::Mul, &y, gamma)?])
}

/// `x tanh(softplus(x))`. Misra 2019, arXiv 1908.08681.
fn mish(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let gate = softplus_of(build, x)?;
    let gate = build.unary(UnaryOp::Tanh, &gate)?;
    Ok(vec![build.binary(BinaryOp::Mul, x, &gate)?])
}

/// Slopes broadcast to x, never the other way round.
fn prelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let slope = build.broadcast(call.input(1)?, &x.shape(build)?)?;
    let low = build.binary(BinaryOp::Mul, x, &slope)?;
    Ok(vec![above_zero(build, x, &low)?])
}

fn thresholded_relu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dtype = x.dtype(build)?;
    let above = build.compare(CompareOp::Gt, x, &Known::scalar(dtype, call.node.float_or("alpha", 1.0)?).into())?;
    Ok(vec![build.select(&above, x, &Known::scalar(dtype, 0.0).into())?])
}

/// `x + bias` below `-lambd`, `x - bias` above `lambd`, 0 between. Integers are compared as floats.
fn shrink(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dtype = call.input(0)?.dtype(build)?;
    let wide = if dtype.is_float() { dtype } else { DType::F64 };
    let x = build.cast(call.input(0)?, wide)?;
    let (lambd, bias) = (call.node.float_or("lambd", 0.5)?, call.node.float_or("bias", 0.0)?);
    let mut y: Value = Known::scalar(wide, 0.0).into();
    for (beyond, bound, moved) in [(CompareOp::Lt, -lambd, bias), (CompareOp::Gt, lambd, -bias)] {
        let outside = build.compare(beyond, &x, &Known::scalar(wide, bound).into())?;
        let shifted = build.binary_scalar(BinaryOp::Add, &x, moved)?;
        y = build.select(&outside, &shifted, &y)?;
    }
    Ok(vec![build.cast(&y, dtype)?])
}

fn softsign(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let size = build.unary(UnaryOp::Abs, x)?;
    let size = build.binary_scalar(BinaryOp::Add, &size, 1.0)?;
    Ok(vec![build.binary(BinaryOp::Div, x, &size)?])
}

/// `swish(a) b`. Shazeer 2020, arXiv 2002.05202.
fn swiglu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (a, b) = (call.input(0)?, call.input(1)?);
    let (gate, value) = (a.shape(build)?, b.shape(build)?);
    if gate != value {
        return Err(Error::shape(format!("SwiGLU of {:?} and {:?}, which must be equal", gate.as_slice(), value.as_slice())));
    }
    let gate = swish_of(build, a, call.node.float_or("alpha", 1.0)?)?;
    Ok(vec![build.binary(BinaryOp::Mul, &gate, b)?])
}

fn is_inf(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let infinite = build.unary(UnaryOp::IsInf, x)?;
    let (negative, positive) = (call.node.flag("detect_negative", true)?, call.node.flag("detect_positive", true)?);
    let zero: Value = Known::scalar(x.dtype(build)?, 0.0).into();
    let side = match (negative, positive) {
        (true, true) => return Ok(vec![infinite]),
        (true, false) => build.compare(CompareOp::Lt, x, &zero)?,
        (false, true) => build.compare(CompareOp::Gt, x, &zero)?,
        (false, false) => Known::int(DType::Bool, 0).into(),
    };
    Ok(vec![build.binary(BinaryOp::And, &infinite, &side)?])
}

/// By a product with, or a quotient by, a power of two. A shift by a negative number or by the width leaves what fills.
fn bit_shift(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dtype = x.dtype(build)?;
    if dtype.is_float() || dtype == DType::Bool {
        return Err(Error::dtype(format!("BitShift of {}", dtype.name())));
    }
    let left = match call.node.string_or("direction", "")? {
        "LEFT" => true,
        "RIGHT" => false,
        other => return Err(attribute_value("direction", format!("`{other}`"))),
    };
    if !matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64) {
        // A power beyond the width wraps to 0, and a quotient by 0 is 0.
        let power = build.binary(BinaryOp::Pow, &Known::int(dtype, 2).into(), call.input(1)?)?;
        let op = if left { BinaryOp::Mul } else { BinaryOp::Div };
        return Ok(vec![build.binary(op, x, &power)?]);
    }
    let number = |value: i64| -> Value { Known::int(DType::I64, value).into() };
    let (x, by) = (build.cast(x, DType::I64)?, build.cast(call.input(1)?, DType::I64)?);
    let negative = build.compare(CompareOp::Lt, &x, &number(0))?;
    let fill = if left { number(0) } else { build.select(&negative, &number(-1), &number(0))? };
    // The sign alone is left of a shift to the right by one less than the width.
    let width = 8 * dtype.bytes() as i64 - i64::from(!left);
    let (from, to) = (build.compare(CompareOp::Ge, &by, &number(0))?, build.compare(CompareOp::Lt, &by, &number(width))?);
    let within = build.binary(BinaryOp::And, &from, &to)?;
    let by = build.select(&within, &by, &number(0))?;
    let power = build.binary(BinaryOp::Pow, &number(2), &by)?;
    let shifted = match left {
        true => build.binary(BinaryOp::Mul, &x, &power)?,
        false => {
            let quotient = build.binary(BinaryOp::Div, &x, &power)?;
            let rest = build.binary(BinaryOp::Rem, &x, &power)?;
            let below = build.compare(CompareOp::Lt, &rest, &number(0))?;
            let lower = build.binary_scalar(BinaryOp::Sub, &quotient, 1.0)?;
            build.select(&below, &lower, &quotient)?
        }
    };
    let shifted = build.select(&within, &shifted, &fill)?;
    Ok(vec![build.cast(&shifted, dtype)?])
}
