//! Dropout, by a counter-based generator on global element indices.

use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::program::ScalarKind;

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::Dropout;
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;
use crate::ops::{Scalar, Uniform};

pub const ONNX: &[(&str, Import)] = &[("Dropout", dropout)];

/// Results: `x / (1 - ratio)` where kept and 0 elsewhere, and the mask of the kept.
fn dropout(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    // The run's seed decides, on every mesh alike; a seed in the file would only name another stream of the same numbers.
    call.node.ignore("seed");
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let id = build.random_ops;
    build.random_ops += 1;
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
    let seed = build.graph.add(Scalar { kind: ScalarKind::Seed, dtype: DType::I64 }, &[])?;
    let step = build.graph.add(Scalar { kind: ScalarKind::Step, dtype: DType::I64 }, &[])?;
    let uniform: Value = build.graph.add(Uniform { id, shape: shape.clone() }, &[seed, step])?.into();
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
