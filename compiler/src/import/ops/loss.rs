//! Losses inside the model.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, FactorSpec, Reduce};

use super::norm::log_softmax_of;
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] =
    &[("NegativeLogLikelihoodLoss", negative_log_likelihood), ("SoftmaxCrossEntropyLoss", softmax_cross_entropy)];

/// Results: the loss and the log-probabilities.
fn softmax_cross_entropy(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let log_probabilities = log_softmax_of(build, call.input(0)?, &[1])?;
    let loss = likelihood(build, call, &log_probabilities)?;
    Ok(vec![loss, log_probabilities])
}

fn negative_log_likelihood(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![likelihood(build, call, &call.input(0)?.clone())?])
}

/// `-w[label] x[label]` of each sample, classes in dim 1, 0 where the label is ignored; the mean divides by the sum of w.
fn likelihood(build: &mut Build, call: &Call, x: &Value) -> Result<Value> {
    let labels = call.input(1)?;
    let (shape, label_shape) = (x.shape(build)?, labels.shape(build)?);
    let expected = shape.iter().enumerate().filter(|&(dim, _)| dim != 1).map(|(_, &size)| size);
    if shape.len() < 2 || !expected.eq(label_shape.iter().copied()) {
        let what = format!("labels {:?} for scores {:?} with classes in dim 1", label_shape.as_slice(), shape.as_slice());
        return Err(Error::shape(what));
    }
    let label_dtype = labels.dtype(build)?;
    let valid = match call.node.int("ignore_index")? {
        Some(ignored) => Some(build.compare(CompareOp::Ne, labels, &Known::int(label_dtype, ignored).into())?),
        None => None,
    };
    let zero: Value = Known::int(label_dtype, 0).into();
    let labels = match &valid {
        Some(valid) => build.select(valid, labels, &zero)?,
        None => labels.clone(),
    };
    let labels_id = build.node(&labels)?;
    let dims: Vec<String> = (0..shape.len()).map(|dim| if dim == 1 { "v".to_owned() } else { format!("d{dim}") }).collect();
    let outer: Vec<&str> = dims.iter().map(String::as_str).filter(|&name| name != "v").collect();
    let outer = outer.join(" ");
    let pick = |build: &mut Build, data: &Value, dims: &str| -> Result<Value> {
        let data = build.node(data)?;
        build.gather(
            &FactorSpec::parse(&format!("{dims}, {outer} -> {outer}")).expect("names are identifiers"),
            data,
            labels_id,
        )
    };
    let picked = pick(build, x, &dims.join(" "))?;
    let mut losses = build.unary(UnaryOp::Neg, &picked)?;
    let weights = match call.optional(2) {
        Some(weights) => Some(pick(build, weights, "v")?),
        None => None,
    };
    if let Some(weights) = &weights {
        losses = build.binary(BinaryOp::Mul, &losses, weights)?;
    }
    let nothing: Value = Known::scalar(x.dtype(build)?, 0.0).into();
    if let Some(valid) = &valid {
        losses = build.select(valid, &losses, &nothing)?;
    }
    let all: Vec<usize> = (0..label_shape.len()).collect();
    match call.node.string_or("reduction", "mean")? {
        "none" => Ok(losses),
        "sum" => build.reduce(Reduce::Sum, &losses, &all, false),
        "mean" => {
            let divisor = divisor(build, x.dtype(build)?, weights, valid)?;
            match divisor {
                None => build.mean(&losses, &all, false),
                Some(each) => {
                    let (sum, count) =
                        (build.reduce(Reduce::Sum, &losses, &all, false)?, build.reduce(Reduce::Sum, &each, &all, false)?);
                    build.binary(BinaryOp::Div, &sum, &count)
                }
            }
        }
        other => Err(attribute_value("reduction", format!("`{other}`"))),
    }
}

/// What each sample adds to the divisor of the mean; `None` where that is 1 for all.
fn divisor(build: &mut Build, dtype: DType, weights: Option<Value>, valid: Option<Value>) -> Result<Option<Value>> {
    Ok(match (weights, valid) {
        (None, None) => None,
        (Some(weights), None) => Some(weights),
        (None, Some(valid)) => Some(build.cast(&valid, dtype)?),
        (Some(weights), Some(valid)) => {
            let zero = Known::scalar(dtype, 0.0).into();
            Some(build.select(&valid, &weights, &zero)?)
        }
    })
}
