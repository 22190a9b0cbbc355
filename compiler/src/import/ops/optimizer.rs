//! Steps of optimizers as nodes, of the domain `ai.onnx.preview.training`: what they compute, without gradient.
//!
//! Inputs: rate, steps so far, then all weights, all gradients, all states of a kind, and so on; results in the same order.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const DOMAIN: &str = "ai.onnx.preview.training";

pub const ONNX: &[(&str, Import)] = &[("Adagrad", adagrad), ("Adam", adam), ("Momentum", momentum)];

use BinaryOp::{Add, Div, Mul, Sub};

/// Weight, gradient and states of each of `n` weights, `kinds` values of it.
fn groups(call: &Call, kinds: usize) -> Result<Vec<Vec<Value>>> {
    let count = call.inputs.len().saturating_sub(2);
    if count == 0 || !count.is_multiple_of(kinds) {
        return Err(Error::graph(format!("{} takes {kinds} inputs for each weight, and has {count}", call.node.op)));
    }
    let count = count / kinds;
    let group = |weight: usize| (0..kinds).map(|kind| call.input(2 + kind * count + weight).cloned()).collect();
    (0..count).map(group).collect()
}

/// Results of each weight, as ONNX orders them.
fn ordered(results: Vec<Vec<Value>>) -> Vec<Value> {
    let kinds = results.first().map_or(0, Vec::len);
    (0..kinds).flat_map(|kind| results.iter().map(move |of_weight| of_weight[kind].clone())).collect()
}

fn number(build: &Build, like: &Value, value: f64) -> Result<Value> {
    Ok(Known::scalar(like.dtype(build)?, value).into())
}

/// An attribute, as the f32 that it is.
fn float(call: &Call, name: &str) -> Result<f64> {
    call.node.float(name)?.ok_or_else(|| Error::attribute(format!("{} without the attribute `{name}`", call.node.op)))
}

/// `g + coefficient w`, the gradient of the loss with L2 regularisation.
fn regularised(build: &mut Build, weight: &Value, gradient: &Value, coefficient: f64) -> Result<Value> {
    let pull = build.binary_scalar(Mul, weight, coefficient)?;
    build.binary(Add, gradient, &pull)
}

/// `a x + b y`.
fn mix(build: &mut Build, a: f64, x: &Value, b: &Value, y: &Value) -> Result<Value> {
    let (x, y) = (build.binary_scalar(Mul, x, a)?, build.binary(Mul, b, y)?);
    build.binary(Add, &x, &y)
}

/// `numerator / (√of + epsilon)`.
fn over_root(build: &mut Build, numerator: &Value, of: &Value, epsilon: f64) -> Result<Value> {
    let root = build.unary(UnaryOp::Sqrt, of)?;
    let root = build.binary_scalar(Add, &root, epsilon)?;
    build.binary(Div, numerator, &root)
}

fn moved(build: &mut Build, weight: &Value, rate: &Value, direction: &Value) -> Result<Value> {
    let step = build.binary(Mul, rate, direction)?;
    build.binary(Sub, weight, &step)
}

/// The rate in the weight's dtype.
fn rate_like(build: &mut Build, call: &Call, weight: &Value) -> Result<Value> {
    let dtype = weight.dtype(build)?;
    build.cast(call.input(0)?, dtype)
}

/// `yes` from the second step on.
fn after_first(build: &mut Build, call: &Call, yes: &Value, no: &Value) -> Result<Value> {
    let steps = call.input(1)?;
    let zero = number(build, steps, 0.0)?;
    let started = build.compare(CompareOp::Gt, steps, &zero)?;
    build.select(&started, yes, no)
}

/// Duchi, Hazan, Singer 2011.
fn adagrad(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let decay = call.node.float_or("decay_factor", 0.0)?;
    let (epsilon, norm) = (call.node.float_or("epsilon", f64::from(1e-6_f32))?, call.node.float_or("norm_coefficient", 0.0)?);
    let mut results = Vec::new();
    for group in groups(call, 3)? {
        let [weight, gradient, squares] = &group[..] else { unreachable!("groups of three") };
        let dtype = weight.dtype(build)?;
        let steps = build.cast(call.input(1)?, dtype)?;
        let slower = build.binary_scalar(Mul, &steps, decay)?;
        let slower = build.binary_scalar(Add, &slower, 1.0)?;
        let rate = rate_like(build, call, weight)?;
        let rate = build.binary(Div, &rate, &slower)?;
        let gradient = regularised(build, weight, gradient, norm)?;
        let square = build.binary(Mul, &gradient, &gradient)?;
        let squares = build.binary(Add, squares, &square)?;
        let direction = over_root(build, &gradient, &squares, epsilon)?;
        results.push(vec![moved(build, weight, &rate, &direction)?, squares]);
    }
    Ok(ordered(results))
}

/// Kingma and Ba 2015, section 2; the bias correction is left out of the first step.
fn adam(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (alpha, beta) = (call.node.float_or("alpha", f64::from(0.9_f32))?, call.node.float_or("beta", f64::from(0.999_f32))?);
    let epsilon = call.node.float_or("epsilon", f64::from(1e-6_f32))?;
    let (norm, after) = (call.node.float_or("norm_coefficient", 0.0)?, call.node.float_or("norm_coefficient_post", 0.0)?);
    let mut results = Vec::new();
    for group in groups(call, 4)? {
        let [weight, gradient, mean, squares] = &group[..] else { unreachable!("groups of four") };
        let gradient = regularised(build, weight, gradient, norm)?;
        let square = build.binary(Mul, &gradient, &gradient)?;
        let (rest, rest_square) = (number(build, weight, 1.0 - alpha)?, number(build, weight, 1.0 - beta)?);
        let mean = mix(build, alpha, mean, &rest, &gradient)?;
        let squares = mix(build, beta, squares, &rest_square, &square)?;
        let rate = rate_like(build, call, weight)?;
        let corrected = corrected_rate(build, call, &rate, alpha, beta)?;
        let rate = after_first(build, call, &corrected, &rate)?;
        let direction = over_root(build, &mean, &squares, epsilon)?;
        let new = moved(build, weight, &rate, &direction)?;
        let new = build.binary_scalar(Mul, &new, 1.0 - after)?;
        results.push(vec![new, mean, squares]);
    }
    Ok(ordered(results))
}

/// `rate √(1 - betaᵀ) / (1 - alphaᵀ)`.
fn corrected_rate(build: &mut Build, call: &Call, rate: &Value, alpha: f64, beta: f64) -> Result<Value> {
    let dtype = rate.dtype(build)?;
    let steps = build.cast(call.input(1)?, dtype)?;
    let one: Value = Known::scalar(dtype, 1.0).into();
    let rest = |build: &mut Build, base: f64| {
        let power = build.binary(BinaryOp::Pow, &Known::scalar(dtype, base).into(), &steps)?;
        build.binary(Sub, &one, &power)
    };
    let (above, below) = (rest(build, beta)?, rest(build, alpha)?);
    let above = build.unary(UnaryOp::Sqrt, &above)?;
    let rate = build.binary(Mul, rate, &above)?;
    build.binary(Div, &rate, &below)
}

/// Polyak's momentum, or Nesterov's; `beta` weighs the gradient from the second step on.
fn momentum(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (alpha, beta, norm) = (float(call, "alpha")?, float(call, "beta")?, float(call, "norm_coefficient")?);
    let nesterov = match call.node.string_or("mode", "standard")? {
        "standard" => false,
        "nesterov" => true,
        other => return Err(attribute_value("mode", format!("`{other}`"))),
    };
    let mut results = Vec::new();
    for group in groups(call, 3)? {
        let [weight, gradient, velocity] = &group[..] else { unreachable!("groups of three") };
        let gradient = regularised(build, weight, gradient, norm)?;
        let (first, later) = (number(build, weight, 1.0)?, number(build, weight, beta)?);
        let share = after_first(build, call, &later, &first)?;
        let velocity = mix(build, alpha, velocity, &share, &gradient)?;
        let mut direction = velocity.clone();
        if nesterov {
            let ahead = build.binary_scalar(Mul, &velocity, alpha)?;
            direction = build.binary(Add, &gradient, &ahead)?;
        }
        let rate = rate_like(build, call, weight)?;
        results.push(vec![moved(build, weight, &rate, &direction)?, velocity]);
    }
    Ok(ordered(results))
}
