//! Attention with what the core's attention op has not: soft caps, key caches, windows, padded keys, scores as a result.
//!
//! Scores, mask and softmax as ops of their own. Rows without a key give 0, as ONNX says, and have no gradient.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce};

use super::attention::{Heads, without_heads};
use super::{Call, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::tensor::dtype;
use crate::import::value::Value;

/// Whether the node asks for any of it.
pub(super) fn is_wanted(call: &Call) -> Result<bool> {
    let unbounded = |name| Ok::<bool, Error>(call.node.int_or(name, -1)? < 0);
    let plain = call.node.float_or("softcap", 0.0)? == 0.0
        && unbounded("left_window_size")?
        && unbounded("right_window_size")?
        && (4..7).all(|position| call.optional(position).is_none())
        && (1..4).all(|output| !call.wants(output))
        && matches!(call.node.int("softmax_precision")?, None | Some(1 | 11));
    Ok(!plain)
}

/// Results: Y, the keys and values with those of the cache before them, and the scores at the stage that the node names.
pub(super) fn attention(build: &mut Build, call: &Call, heads: Heads) -> Result<Vec<Value>> {
    let Heads { q, k, v, dtype: exported } = heads;
    let wide = q.dtype(build)?;
    let (k, v) = (cached(build, call, &k, 4)?, cached(build, call, &v, 5)?);
    let (q_shape, k_shape, v_shape) = (q.shape(build)?, k.shape(build)?, v.shape(build)?);
    let (heads, groups) = (q_shape[1], q_shape[1] / k_shape[1]);
    let scores_shape = [q_shape[0], heads, q_shape[2], k_shape[2]];
    let grouped = build.reshape(&q, &[q_shape[0], k_shape[1], groups, q_shape[2], q_shape[3]])?;
    let (left, right) = (["b", "h", "g", "t", "e"], ["b", "h", "s", "e"]);
    let raw = build.dot((&grouped, &left), (&k, &right), &["b", "h", "g", "t", "s"])?;
    let raw = build.reshape(&raw, &scores_shape)?;
    let scale = call.node.float("scale")?.unwrap_or(1.0 / (q_shape[3] as f64).sqrt());
    let raw = build.binary_scalar(BinaryOp::Mul, &raw, scale)?;
    let capped = match call.node.float_or("softcap", 0.0)? {
        0.0 => raw.clone(),
        cap => {
            let inner = build.binary_scalar(BinaryOp::Div, &raw, cap)?;
            let inner = build.unary(UnaryOp::Tanh, &inner)?;
            build.binary_scalar(BinaryOp::Mul, &inner, cap)?
        }
    };
    let mut masked = capped.clone();
    let mut allowed = positions_allowed(build, call, &scores_shape)?;
    if let Some(mask) = call.optional(3) {
        let mask = whole_mask(build, mask, k_shape[2])?;
        match mask.dtype(build)? {
            DType::Bool => allowed.push(mask),
            _ => {
                let mask = build.cast(&mask, wide)?;
                masked = build.binary(BinaryOp::Add, &masked, &mask)?;
            }
        }
    }
    let lowest: Value = Known::scalar(wide, f64::NEG_INFINITY).into();
    for allowed in &allowed {
        masked = build.select(allowed, &masked, &lowest)?;
    }
    let weights = softmax_or_nothing(build, call, &masked)?;
    let grouped = build.reshape(&weights, &[q_shape[0], k_shape[1], groups, q_shape[2], k_shape[2]])?;
    let (left, right) = (["b", "h", "g", "t", "s"], ["b", "h", "s", "f"]);
    let y = build.dot((&grouped, &left), (&v, &right), &["b", "h", "g", "t", "f"])?;
    let mut y = build.reshape(&y, &[q_shape[0], heads, q_shape[2], v_shape[3]])?;
    if call.input(0)?.rank(build)? == 3 {
        y = without_heads(build, &y)?;
    }
    let shown = match call.node.int_or("qk_matmul_output_mode", 0)? {
        0 => raw,
        1 => capped,
        2 => masked,
        3 => weights,
        other => return Err(attribute_value("qk_matmul_output_mode", other)),
    };
    [y, k, v, shown].iter().map(|value| build.cast(value, exported)).collect()
}

/// Keys or values after those of the cache.
fn cached(build: &mut Build, call: &Call, new: &Value, position: usize) -> Result<Value> {
    let Some(past) = call.optional(position) else { return Ok(new.clone()) };
    if past.rank(build)? != 4 {
        return Err(Error::shape(format!("a cache {:?}, not [batch, heads, tokens, size]", &past.shape(build)?[..])));
    }
    let past = build.cast(past, new.dtype(build)?)?;
    build.concatenate(&[past, new.clone()], 2)
}

/// A mask that has fewer keys than there are allows none of the others.
fn whole_mask(build: &mut Build, mask: &Value, keys: u64) -> Result<Value> {
    let shape = mask.shape(build)?;
    let Some((dim, &size)) = shape.iter().enumerate().next_back() else { return Ok(mask.clone()) };
    if size == 1 || size >= keys {
        return Ok(mask.clone());
    }
    let nothing = if mask.dtype(build)? == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    build.pad(mask, dim, 0, keys - size, nothing)
}

/// Conditions on the positions of query and key: causal order, windows, keys that are padding.
fn positions_allowed(build: &mut Build, call: &Call, scores: &[u64; 4]) -> Result<Vec<Value>> {
    let &[batch, _, queries, _] = scores;
    let (mine, theirs) = (build.positions(&[1, 1, queries, 1], 2)?, build.positions(&[1, 1, 1, scores[3]], 3)?);
    let valid = match call.optional(6) {
        Some(count) => {
            let count = build.cast(count, DType::I64)?;
            Some(build.reshape(&count, &[batch, 1, 1, 1])?)
        }
        None => None,
    };
    // How many keys come before the first query.
    let place = match (call.optional(4), &valid) {
        (Some(past), _) => build.binary_scalar(BinaryOp::Add, &mine, past.shape(build)?[2] as f64)?,
        (None, Some(valid)) => {
            let before = build.binary_scalar(BinaryOp::Sub, valid, queries as f64)?;
            build.binary(BinaryOp::Add, &mine, &before)?
        }
        (None, None) => mine,
    };
    let mut allowed = Vec::new();
    if call.node.flag("is_causal", false)? {
        allowed.push(build.compare(CompareOp::Le, &theirs, &place)?);
    }
    let left = call.node.int_or("left_window_size", -1)?;
    if left >= 0 {
        let first = build.binary_scalar(BinaryOp::Sub, &place, left as f64)?;
        allowed.push(build.compare(CompareOp::Ge, &theirs, &first)?);
    }
    let right = call.node.int_or("right_window_size", -1)?;
    if right >= 0 {
        let last = build.binary_scalar(BinaryOp::Add, &place, right as f64)?;
        allowed.push(build.compare(CompareOp::Le, &theirs, &last)?);
    }
    if let Some(valid) = &valid {
        allowed.push(build.compare(CompareOp::Lt, &theirs, valid)?);
    }
    Ok(allowed)
}

/// Softmax over the last dim, in the precision that the node names; 0 in rows that are -∞ throughout.
fn softmax_or_nothing(build: &mut Build, call: &Call, scores: &Value) -> Result<Value> {
    let wide = scores.dtype(build)?;
    let precision = match call.node.int("softmax_precision")? {
        Some(code) => dtype(i32::try_from(code).unwrap_or(0))?,
        None => wide,
    };
    let scores = build.cast(scores, precision)?;
    let last = scores.rank(build)? - 1;
    let number = |value: f64| -> Value { Known::scalar(precision, value).into() };
    let top = build.reduce(Reduce::Max, &scores, &[last], true)?;
    let top = build.stop_gradient(&top)?;
    let none = build.compare(CompareOp::Eq, &top, &number(f64::NEG_INFINITY))?;
    let top = build.select(&none, &number(0.0), &top)?;
    let shifted = build.binary(BinaryOp::Sub, &scores, &top)?;
    let exp = build.unary(UnaryOp::Exp, &shifted)?;
    let sum = build.reduce(Reduce::Sum, &exp, &[last], true)?;
    let sum = build.select(&none, &number(1.0), &sum)?;
    let weights = build.binary(BinaryOp::Div, &exp, &sum)?;
    build.cast(&weights, wide)
}
