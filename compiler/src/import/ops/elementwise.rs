//! Pointwise arithmetic and activations.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::{Call, Import, attribute_value};
use crate::error::Result;
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("Abs", |b, c| unary(b, c, UnaryOp::Abs)),
    ("Acos", |b, c| unary(b, c, UnaryOp::Acos)),
    ("Acosh", |b, c| unary(b, c, UnaryOp::Acosh)),
    ("Add", |b, c| binary(b, c, BinaryOp::Add)),
    ("Asin", |b, c| unary(b, c, UnaryOp::Asin)),
    ("Asinh", |b, c| unary(b, c, UnaryOp::Asinh)),
    ("Atan", |b, c| unary(b, c, UnaryOp::Atan)),
    ("Atanh", |b, c| unary(b, c, UnaryOp::Atanh)),
    ("Ceil", |b, c| unary(b, c, UnaryOp::Ceil)),
    ("Clip", clip),
    ("Cos", |b, c| unary(b, c, UnaryOp::Cos)),
    ("Cosh", |b, c| unary(b, c, UnaryOp::Cosh)),
    ("Div", |b, c| binary(b, c, BinaryOp::Div)),
    ("Elu", elu),
    ("Erf", |b, c| unary(b, c, UnaryOp::Erf)),
    ("Exp", |b, c| unary(b, c, UnaryOp::Exp)),
    ("Floor", |b, c| unary(b, c, UnaryOp::Floor)),
    ("Gelu", gelu),
    ("HardSigmoid", hard_sigmoid),
    ("HardSwish", hard_swish),
    ("LeakyRelu", leaky_relu),
    ("Log", |b, c| unary(b, c, UnaryOp::Log)),
    ("Max", |b, c| extremum(b, c, BinaryOp::Max, CompareOp::Le)),
    ("Mean", mean),
    ("Min", |b, c| extremum(b, c, BinaryOp::Min, CompareOp::Ge)),
    ("Mod", modulo),
    ("Mul", |b, c| binary(b, c, BinaryOp::Mul)),
    ("Neg", |b, c| unary(b, c, UnaryOp::Neg)),
    ("Pow", pow),
    ("Reciprocal", reciprocal),
    ("Relu", relu),
    ("Round", |b, c| unary(b, c, UnaryOp::RoundEven)),
    ("Sigmoid", |b, c| unary(b, c, UnaryOp::Logistic)),
    ("Sign", |b, c| unary(b, c, UnaryOp::Sign)),
    ("Sin", |b, c| unary(b, c, UnaryOp::Sin)),
    ("Sinh", |b, c| unary(b, c, UnaryOp::Sinh)),
    ("Softplus", softplus),
    ("Sqrt", |b, c| unary(b, c, UnaryOp::Sqrt)),
    ("Sub", |b, c| binary(b, c, BinaryOp::Sub)),
    ("Sum", |b, c| variadic(b, c, BinaryOp::Add)),
    ("Swish", swish),
    ("Tan", |b, c| unary(b, c, UnaryOp::Tan)),
    ("Tanh", |b, c| unary(b, c, UnaryOp::Tanh)),
];

fn unary(build: &mut Build, call: &Call, op: UnaryOp) -> Result<Vec<Value>> {
    Ok(vec![build.unary(op, call.input(0)?)?])
}

fn binary(build: &mut Build, call: &Call, op: BinaryOp) -> Result<Vec<Value>> {
    Ok(vec![build.binary(op, call.input(0)?, call.input(1)?)?])
}

fn variadic(build: &mut Build, call: &Call, op: BinaryOp) -> Result<Vec<Value>> {
    Ok(vec![fold(build, call, op)?])
}

fn fold(build: &mut Build, call: &Call, op: BinaryOp) -> Result<Value> {
    let mut result = call.input(0)?.clone();
    for position in 1..call.inputs.len() {
        result = build.binary(op, &result, call.input(position)?)?;
    }
    Ok(result)
}

fn mean(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let sum = fold(build, call, BinaryOp::Add)?;
    Ok(vec![build.binary_scalar(BinaryOp::Mul, &sum, 1.0 / call.inputs.len() as f64)?])
}

/// The exponent may have a dtype of its own. Small integer powers are products: exact, and cheap to differentiate.
fn pow(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dtype = x.dtype(build)?;
    let exponent = build.cast(call.input(1)?, dtype)?;
    let square = |build: &mut Build| build.binary(BinaryOp::Mul, x, x);
    let shape = crate::import::value::broadcast_shape(&x.shape(build)?, &exponent.shape(build)?)?;
    let power = match exponent.uniform() {
        Some(1.0) => x.clone(),
        Some(2.0) => square(build)?,
        Some(3.0) => {
            let square = square(build)?;
            build.binary(BinaryOp::Mul, &square, x)?
        }
        Some(0.5) if dtype.is_float() => build.unary(UnaryOp::Sqrt, x)?,
        Some(-0.5) if dtype.is_float() => build.unary(UnaryOp::Rsqrt, x)?,
        _ => build.binary(BinaryOp::Pow, x, &exponent)?,
    };
    Ok(vec![build.broadcast(&power, &shape)?])
}

fn reciprocal(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let one = Known::scalar(x.dtype(build)?, 1.0).into();
    Ok(vec![build.binary(BinaryOp::Div, &one, x)?])
}

/// With `fmod` the result has the dividend's sign, else the divisor's.
fn modulo(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (x, divisor) = (call.input(0)?, call.input(1)?);
    let rest = build.binary(BinaryOp::Rem, x, divisor)?;
    if call.node.flag("fmod", false)? {
        return Ok(vec![rest]);
    }
    let zero: Value = Known::scalar(rest.dtype(build)?, 0.0).into();
    let nonzero = build.compare(CompareOp::Ne, &rest, &zero)?;
    let (rest_negative, divisor_negative) =
        (build.compare(CompareOp::Lt, &rest, &zero)?, build.compare(CompareOp::Lt, divisor, &zero)?);
    let differ = build.binary(BinaryOp::Xor, &rest_negative, &divisor_negative)?;
    let wrong = build.binary(BinaryOp::And, &nonzero, &differ)?;
    let fixed = build.binary(BinaryOp::Add, &rest, divisor)?;
    Ok(vec![build.select(&wrong, &fixed, &rest)?])
}

/// Equal values share the gradient; but what PyTorch calls `clamp` is a Clip at what the file knows.
fn extremum(build: &mut Build, call: &Call, op: BinaryOp, beyond: CompareOp) -> Result<Vec<Value>> {
    let is_clamp = matches!(call.node.call.target(), "aten.clamp" | "aten.clamp_min" | "aten.clamp_max");
    match (call.input(0)?, call.optional(1)) {
        (x, Some(bound)) if is_clamp && call.inputs.len() == 2 && bound.known().is_some() => {
            Ok(vec![cut(build, x, bound, beyond)?])
        }
        _ => variadic(build, call, op),
    }
}

/// The bound where x is `beyond` it, or on it: x has no gradient there.
pub(super) fn cut(build: &mut Build, x: &Value, bound: &Value, beyond: CompareOp) -> Result<Value> {
    let is_beyond = build.compare(beyond, x, bound)?;
    build.select(&is_beyond, bound, x)
}

/// Bounds are attributes up to opset 6 and optional inputs from 11 on. A value on a bound passes no gradient, as in `relu6`,
/// `hardtanh` and, since PyTorch 2.15, `clamp`.
fn clip(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut x = call.input(0)?.clone();
    for (position, name, outside) in [(1, "min", CompareOp::Le), (2, "max", CompareOp::Ge)] {
        let bound = match call.node.float(name)? {
            Some(bound) => Known::scalar(x.dtype(build)?, bound).into(),
            None => match call.optional(position) {
                Some(bound) => bound.clone(),
                None => continue,
            },
        };
        x = cut(build, &x, &bound, outside)?;
    }
    Ok(vec![x])
}

/// 0 where x ≤ 0, else x: unlike that of a maximum, its gradient at 0 is 0.
fn relu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let zero = Known::scalar(x.dtype(build)?, 0.0).into();
    let negative = build.compare(CompareOp::Le, x, &zero)?;
    Ok(vec![build.select(&negative, &zero, x)?])
}

/// `x` where it is above 0, else `low`, whose slope counts at 0, as in PyTorch.
pub(super) fn above_zero(build: &mut Build, x: &Value, low: &Value) -> Result<Value> {
    let zero = Known::scalar(x.dtype(build)?, 0.0).into();
    let positive = build.compare(CompareOp::Gt, x, &zero)?;
    build.select(&positive, x, low)
}

fn leaky_relu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let negative = build.binary_scalar(BinaryOp::Mul, x, call.node.float_or("alpha", 0.01)?)?;
    Ok(vec![above_zero(build, x, &negative)?])
}

/// `x`, and above 0 `scale * expm1(x / width)` of 0 instead: so that branch stays finite where it is not taken, its gradient
/// too, and has its slope at 0.
pub(super) fn exponential_below_zero(build: &mut Build, x: &Value, width: f64, scale: f64) -> Result<Value> {
    let zero: Value = Known::scalar(x.dtype(build)?, 0.0).into();
    let positive = build.compare(CompareOp::Gt, x, &zero)?;
    let mut low = build.select(&positive, &zero, x)?;
    if width != 1.0 {
        low = build.binary_scalar(BinaryOp::Div, &low, width)?;
    }
    low = build.unary(UnaryOp::Expm1, &low)?;
    low = build.binary_scalar(BinaryOp::Mul, &low, scale)?;
    build.select(&positive, x, &low)
}

fn elu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![exponential_below_zero(build, call.input(0)?, 1.0, call.node.float_or("alpha", 1.0)?)?])
}

/// `max(0, min(1, alpha x + beta))`, flat at both ends.
pub(super) fn hard_sigmoid_of(build: &mut Build, x: &Value, alpha: f64, beta: f64) -> Result<Value> {
    let line = build.binary_scalar(BinaryOp::Mul, x, alpha)?;
    let line = build.binary_scalar(BinaryOp::Add, &line, beta)?;
    let dtype = x.dtype(build)?;
    let mut line = line;
    for (outside, bound) in [(CompareOp::Ge, 1.0), (CompareOp::Le, 0.0)] {
        let bound = Known::scalar(dtype, bound).into();
        let beyond = build.compare(outside, &line, &bound)?;
        line = build.select(&beyond, &bound, &line)?;
    }
    Ok(line)
}

fn hard_sigmoid(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (alpha, beta) = (call.node.float_or("alpha", 0.2)?, call.node.float_or("beta", 0.5)?);
    Ok(vec![hard_sigmoid_of(build, call.input(0)?, alpha, beta)?])
}

fn hard_swish(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let gate = hard_sigmoid_of(build, x, 1.0 / 6.0, 0.5)?;
    Ok(vec![build.binary(BinaryOp::Mul, x, &gate)?])
}

/// `max(x, 0) + log1p(exp(-|x|))`.
pub(super) fn softplus_of(build: &mut Build, x: &Value) -> Result<Value> {
    let size = build.unary(UnaryOp::Abs, x)?;
    let tail = build.unary(UnaryOp::Neg, &size)?;
    let tail = build.unary(UnaryOp::Exp, &tail)?;
    let tail = build.unary(UnaryOp::Log1p, &tail)?;
    let high = build.binary_scalar(BinaryOp::Max, x, 0.0)?;
    build.binary(BinaryOp::Add, &high, &tail)
}

fn softplus(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![softplus_of(build, call.input(0)?)?])
}

fn swish(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![swish_of(build, call.input(0)?, call.node.float_or("alpha", 1.0)?)?])
}

/// `x sigmoid(alpha x)`.
pub(super) fn swish_of(build: &mut Build, x: &Value, alpha: f64) -> Result<Value> {
    let gate = match alpha {
        1.0 => x.clone(),
        alpha => build.binary_scalar(BinaryOp::Mul, x, alpha)?,
    };
    let gate = build.unary(UnaryOp::Logistic, &gate)?;
    build.binary(BinaryOp::Mul, x, &gate)
}

/// `x/2 (1 + erf(x/√2))`, or with tanh `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`. Hendrycks and Gimpel 2016, arXiv 1606.08415.
fn gelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    match call.node.string_or("approximate", "none")? {
        "none" => unary(build, call, UnaryOp::Gelu),
        "tanh" => unary(build, call, UnaryOp::GeluTanh),
        other => Err(attribute_value("approximate", format!("`{other}`"))),
    }
}
