//! Dropout and random tensors, by a counter-based generator on global element indices.
//!
//! The run's seed decides, on every mesh alike; a seed in the file would only name another stream of the same numbers.

use std::f64::consts::TAU;

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::ScalarKind;
use dcc_program::{DType, Shape};

use super::{Call, Import, sizes};
use crate::error::{Error, Result};
use crate::import::Dropout;
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::rescale::Guess;
use crate::import::value::Value;
use crate::ops::{Scalar, Uniform};

pub const ONNX: &[(&str, Import)] = &[
    ("Bernoulli", bernoulli),
    ("Dropout", dropout),
    ("RandomNormal", random_normal),
    ("RandomNormalLike", random_normal),
    ("RandomUniform", random_uniform),
    ("RandomUniformLike", random_uniform),
];

/// Numbers of f32 in [0, 1), of a stream of their own.
fn uniform(build: &mut Build, shape: &Shape) -> Result<Value> {
    let id = build.random_ops;
    build.random_ops += 1;
    uniform_of(build, id, shape)
}

fn uniform_of(build: &mut Build, id: u32, shape: &Shape) -> Result<Value> {
    let seed = build.graph.add(Scalar { kind: ScalarKind::Seed, dtype: DType::I64 }, &[])?;
    let step = build.graph.add(Scalar { kind: ScalarKind::Step, dtype: DType::I64 }, &[])?;
    Ok(build.graph.add(Uniform { id, shape: shape.clone() }, &[seed, step])?.into())
}

/// Shape and dtype of a random tensor: those of the operand where there is one. Whether the shape is a guess.
fn ty(build: &Build, call: &Call) -> Result<(Shape, DType, bool)> {
    call.node.ignore("seed");
    let mut guessed = false;
    let (shape, default) = match call.optional(0) {
        Some(like) => (like.shape(build)?, Some(like.dtype(build)?)),
        None => {
            let mut shape = sizes(call.node.ints("shape")?.unwrap_or_default())?;
            // A static export's batch is part of its sizes.
            if let (Some(rescale), Some(first)) = (&build.rescale, shape.first_mut())
                && *first == rescale.from
            {
                (*first, guessed) = (rescale.to, rescale.from != 1);
            }
            (shape, None)
        }
    };
    let code = call.node.int_or("dtype", 0)?;
    let given = match i32::try_from(code) {
        Ok(0) => None,
        code => Some(crate::import::dtype(code.unwrap_or(i32::MAX))?),
    };
    Ok((shape, given.or(default).unwrap_or(DType::F32), guessed))
}

fn random_uniform(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (shape, dtype, guessed) = ty(build, call)?;
    let (low, high) = (call.node.float_or("low", 0.0)?, call.node.float_or("high", 1.0)?);
    let x = uniform(build, &shape)?;
    let x = build.binary_scalar(BinaryOp::Mul, &x, high - low)?;
    let x = build.binary_scalar(BinaryOp::Add, &x, low)?;
    let x = build.cast(&x, dtype)?;
    Ok(vec![build.guessed(x, guessed.then_some(Guess::Constant))?])
}

/// Of two uniform numbers: `sqrt(-2 ln(1 - u)) cos(2π v)`. Box and Muller 1958.
fn random_normal(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (shape, dtype, guessed) = ty(build, call)?;
    let (mean, scale) = (call.node.float_or("mean", 0.0)?, call.node.float_or("scale", 1.0)?);
    let (u, v) = (uniform(build, &shape)?, uniform(build, &shape)?);
    let above = build.complement(&u)?;
    let log = build.unary(UnaryOp::Log, &above)?;
    let square = build.binary_scalar(BinaryOp::Mul, &log, -2.0)?;
    let radius = build.unary(UnaryOp::Sqrt, &square)?;
    let angle = build.binary_scalar(BinaryOp::Mul, &v, TAU)?;
    let cosine = build.unary(UnaryOp::Cos, &angle)?;
    let normal = build.binary(BinaryOp::Mul, &radius, &cosine)?;
    let scaled = build.binary_scalar(BinaryOp::Mul, &normal, scale)?;
    let shifted = build.binary_scalar(BinaryOp::Add, &scaled, mean)?;
    let x = build.cast(&shifted, dtype)?;
    Ok(vec![build.guessed(x, guessed.then_some(Guess::Constant))?])
}

/// One with the probability that the operand has, else zero.
fn bernoulli(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (shape, dtype, _) = ty(build, call)?;
    let probability = build.cast(call.input(0)?, DType::F32)?;
    let x = uniform(build, &shape)?;
    let one = build.compare(CompareOp::Lt, &x, &probability)?;
    Ok(vec![build.cast(&one, dtype)?])
}

/// Results: `x / (1 - ratio)` where kept and 0 elsewhere, and the mask of the kept.
fn dropout(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    call.node.ignore("seed");
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let id = build.random_ops;
    build.random_ops += 1;
    build.has_dropout = true;
    let ratio = match build.dropout {
        Dropout::Off => 0.0,
        Dropout::Rate(rate) => {
            call.node.ignore("ratio");
            rate
        }
        Dropout::AsExported => exported_ratio(build, call)?,
    };
    if !(0.0..1.0).contains(&ratio) {
        return Err(Error::attribute(format!("a dropout ratio of {ratio} is not in [0, 1)")));
    }
    if ratio == 0.0 {
        call.node.ignore("ratio");
        return Ok(vec![x.clone(), Known::int(DType::Bool, 1).broadcast(&shape).into()]);
    }
    let uniform = uniform_of(build, id, &shape)?;
    let kept = build.compare(CompareOp::Ge, &uniform, &Known::scalar(DType::F32, ratio).into())?;
    let scaled = build.binary_scalar(BinaryOp::Mul, x, 1.0 / (1.0 - ratio))?;
    let zero = Known::scalar(x.dtype(build)?, 0.0).into();
    Ok(vec![build.select(&kept, &scaled, &zero)?, kept])
}

/// From opset 12 on, ratio and training mode are inputs, off by default; before, the operator means inference.
fn exported_ratio(build: &Build, call: &Call) -> Result<f64> {
    if call.opset() < 12 {
        call.node.ignore("ratio");
        return Ok(0.0);
    }
    let training = call.optional(2).map_or(Ok(0.0), |_| call.known_number(build, 2))?;
    match (training != 0.0, call.optional(1)) {
        (false, _) => Ok(0.0),
        (true, None) => Ok(0.5),
        (true, Some(_)) => call.known_number(build, 1),
    }
}
