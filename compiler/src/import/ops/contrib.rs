//! Operators that ONNX Runtime's graph optimizations put in place of ONNX's, of the domain `com.microsoft`: what they compute is in its
//! `docs/ContribOperators.md`. Those of a decoder's cache are not among them.

use dcc_program::DType;
use dcc_program::FactorSpec;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::attention::{Heads, computed_in, of_heads, rotary_embedding, without_heads};
use super::conv::conv;
use super::elementwise::{cut, swish_of};
use super::gates::Activation;
use super::matmul::{gemm, matmul};
use super::norm::{by_root_mean_square, layer_normal, rms_normalization};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const DOMAIN: &str = "com.microsoft";

pub const ONNX: &[(&str, Import)] = &[
    ("Attention", attention),
    ("BiasGelu", bias_gelu),
    ("EmbedLayerNormalization", embed_layer_normalization),
    ("FastGelu", fast_gelu),
    ("FusedConv", fused_conv),
    ("FusedGemm", fused_gemm),
    ("FusedMatMul", fused_matmul),
    ("Gelu", gelu),
    ("MultiHeadAttention", multi_head_attention),
    ("QuickGelu", quick_gelu),
    ("RotaryEmbedding", rotary),
    (SIMPLIFIED, rms_normalization),
    ("SkipLayerNormalization", skip_layer_normalization),
    ("SkipSimplifiedLayerNormalization", skip_simplified_layer_normalization),
];

/// This one ONNX Runtime has in ONNX's own domain, of which it is no part.
pub const SIMPLIFIED: &str = "SimplifiedLayerNormalization";

/// The input that is the gain of a norm.
pub fn gain(op: &str) -> Option<usize> {
    match op {
        SIMPLIFIED => Some(1),
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => Some(2),
        "EmbedLayerNormalization" => Some(5),
        _ => None,
    }
}

fn refuse(call: &Call, inputs: &[usize], attributes: &[(&str, i64)]) -> Result<()> {
    for &(name, default) in attributes {
        let given = call.node.int_or(name, default)?;
        if given != default {
            return Err(attribute_value(name, given));
        }
    }
    match inputs.iter().find(|&&position| call.optional(position).is_some()) {
        Some(position) => Err(Error::unsupported_op(format!("{} with its input {position}", call.node.op))
            .help("export the model without caches of keys and values")),
        None => Ok(()),
    }
}

fn gelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![build.unary(UnaryOp::Gelu, call.input(0)?)?])
}

fn bias_gelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = build.binary(BinaryOp::Add, call.input(0)?, call.input(1)?)?;
    Ok(vec![build.unary(UnaryOp::Gelu, &x)?])
}

fn fast_gelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = sum(build, call.input(0)?, call.optional(1))?;
    Ok(vec![build.unary(UnaryOp::GeluTanh, &x)?])
}

fn quick_gelu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![swish_of(build, call.input(0)?, call.node.float_or("alpha", 1.702)?)?])
}

fn sum(build: &mut Build, x: &Value, other: Option<&Value>) -> Result<Value> {
    other.map_or(Ok(x.clone()), |other| build.binary(BinaryOp::Add, x, other))
}

/// `alpha A' B'`: by flags the first dim moves behind those of the batch, then the last two change places.
fn fused_matmul(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut inputs = Vec::with_capacity(2);
    for (position, batch, rows) in [(0, "transBatchA", "transA"), (1, "transBatchB", "transB")] {
        let x = call.input(position)?;
        let rank = x.rank(build)?;
        let mut perm: Vec<usize> = (0..rank).collect();
        if call.node.flag(batch, false)? && rank > 2 {
            perm[..rank - 1].rotate_left(1);
        }
        if call.node.flag(rows, false)? && rank > 1 {
            perm.swap(rank - 2, rank - 1);
        }
        inputs.push(Some(build.transpose(x, &perm)?));
    }
    let product = matmul(build, &Call { inputs: &inputs, ..*call })?.remove(0);
    Ok(vec![build.binary_scalar(BinaryOp::Mul, &product, call.node.float_or("alpha", 1.0)?)?])
}

/// What follows a product in the same node; `numbers` are those that the activation takes, in ONNX's order.
fn activated(build: &mut Build, call: &Call, x: Value, numbers: &[f64]) -> Result<Value> {
    match (call.node.string_or("activation", "")?, numbers) {
        ("", _) => Ok(x),
        ("Clip", &[low, high]) => {
            let (low, high) = (Known::scalar(x.dtype(build)?, low).into(), Known::scalar(x.dtype(build)?, high).into());
            let x = cut(build, &x, &low, CompareOp::Le)?;
            cut(build, &x, &high, CompareOp::Ge)
        }
        (name, _) => Activation::of(name, numbers)?.apply(build, &x),
    }
}

/// A convolution, a term, an activation.
fn fused_conv(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let inputs = &call.inputs[..call.inputs.len().min(3)];
    let y = conv(build, &Call { inputs, ..*call })?.remove(0);
    let y = sum(build, &y, call.optional(3))?;
    let numbers: Vec<f64> = call.node.floats("activation_params")?.unwrap_or_default().iter().copied().map(f64::from).collect();
    Ok(vec![activated(build, call, y, &numbers)?])
}

fn fused_gemm(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let y = gemm(build, call)?.remove(0);
    let mut numbers = Vec::new();
    for name in ["activation_alpha", "activation_beta"] {
        numbers.extend(call.node.float(name)?);
    }
    // No activation that is done here has a third number.
    if let Some(gamma) = call.node.float("activation_gamma")?.filter(|&gamma| gamma != 0.0) {
        return Err(attribute_value("activation_gamma", gamma));
    }
    Ok(vec![activated(build, call, y, &numbers)?])
}

/// Results: the norm of `x + skip + bias`, the mean, the reciprocal deviation, the sum.
fn skip_layer_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = build.binary(BinaryOp::Add, call.input(0)?, call.input(1)?)?;
    let x = sum(build, &x, call.optional(4))?;
    let mut results = normal(build, call, &x, (call.input(2)?, call.optional(3)))?;
    results.push(x);
    Ok(results)
}

/// Layer norm over the last dim; results: that, the mean, the reciprocal deviation.
fn normal(build: &mut Build, call: &Call, x: &Value, (gain, bias): (&Value, Option<&Value>)) -> Result<Vec<Value>> {
    let dtype = x.dtype(build)?;
    let wide = build.cast(x, computed_in(dtype))?;
    let dims = [x.rank(build)?.saturating_sub(1)];
    let (y, mean, scale) = layer_normal(build, &wide, &dims, call.node.float_or("epsilon", 1e-12)?)?;
    let y = build.cast(&y, dtype)?;
    let y = build.binary(BinaryOp::Mul, &y, gain)?;
    Ok(vec![sum(build, &y, bias)?, mean, scale])
}

/// Results as of `skip_layer_normalization`. There is no mean.
fn skip_simplified_layer_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = build.binary(BinaryOp::Add, call.input(0)?, call.input(1)?)?;
    let x = sum(build, &x, call.optional(3))?;
    if call.wants(1) {
        return Err(Error::unsupported_op(format!("the mean of {}", call.node.op)));
    }
    let dtype = x.dtype(build)?;
    let wide = build.cast(&x, computed_in(dtype))?;
    let dims = [x.rank(build)?.saturating_sub(1)];
    let (y, scale) = by_root_mean_square(build, &wide, &dims, call.node.float_or("epsilon", 1e-12)?)?;
    let y = build.cast(&y, dtype)?;
    let y = build.binary(BinaryOp::Mul, &y, call.input(2)?)?;
    Ok(vec![y, scale.clone(), scale, x])
}

/// Rows of tables of words, positions and segments, summed, and their norm. Results: that, how many tokens the mask has, the sum.
fn embed_layer_normalization(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let _ = call.node.int_or("mask_index_type", 0)?;
    let tokens = call.input(0)?.shape(build)?;
    let &[batch, length] = tokens.as_slice() else {
        return Err(Error::shape(format!("tokens {:?}, not [batch, tokens]", tokens.as_slice())));
    };
    let positions = match call.optional(8) {
        Some(positions) => build.broadcast(positions, &[batch, length])?,
        None => build.positions(&[1, length], 1)?,
    };
    let mut x = rows(build, call.input(2)?, call.input(0)?)?;
    let place = rows(build, call.input(3)?, &positions)?;
    x = build.binary(BinaryOp::Add, &x, &place)?;
    if let (Some(segments), Some(table)) = (call.optional(1), call.optional(4)) {
        let segment = rows(build, table, segments)?;
        x = build.binary(BinaryOp::Add, &x, &segment)?;
    }
    let y = normal(build, call, &x, (call.input(5)?, call.optional(6)))?.remove(0);
    let counts = match call.optional(7) {
        Some(mask) => {
            let ones = build.cast(mask, DType::I32)?;
            build.reduce(dcc_program::Reduce::Sum, &ones, &[1], false)?
        }
        None => build.broadcast(&Known::int(DType::I32, 0).into(), &[batch])?,
    };
    Ok(vec![y, counts, x])
}

fn rows(build: &mut Build, table: &Value, ids: &Value) -> Result<Value> {
    let (table, ids) = (build.node(table)?, build.node(ids)?);
    build.gather(&FactorSpec::parse("v e, b t -> b t e").expect("a spec of ours"), table, ids)
}

/// Self-attention with its projection, `[q | k | v]` in one matrix.
fn attention(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    refuse(call, &[4, 6], &[("do_rotary", 0)])?;
    let _ = (call.node.int_or("past_present_share_buffer", 0)?, call.node.int_or("rotary_embedding_dim", 0)?);
    let x = call.input(0)?;
    let packed = build.dot((x, &["b", "t", "k"]), (call.input(1)?, &["k", "n"]), &["b", "t", "n"])?;
    let packed = sum(build, &packed, call.optional(2))?;
    let width = packed.shape(build)?[2];
    let sizes: Vec<u64> = match call.node.ints("qkv_hidden_sizes")? {
        Some(sizes) => sizes.iter().map(|&size| size.max(0) as u64).collect(),
        None => vec![width / 3; 3],
    };
    let &[q, k, v] = sizes.as_slice() else { return Err(attribute_value("qkv_hidden_sizes", format!("{sizes:?}"))) };
    if q + k + v != width {
        return Err(Error::shape(format!("Attention with {width} columns for queries, keys and values of {sizes:?}")));
    }
    let mut parts = Vec::with_capacity(3);
    for (from, size) in [(0, q), (q, k), (q + k, v)] {
        parts.push(build.narrow(&packed, 2, from, size)?);
    }
    attend(build, call, parts, (call.optional(3), call.optional(5)))
}

/// Attention of what is projected already; keys and values may stand in one tensor with each other or with the queries.
fn multi_head_attention(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    refuse(call, &[6, 7, 8, 9], &[])?;
    let mut parts = Vec::with_capacity(3);
    for position in 0..3 {
        let Some(x) = call.optional(position) else { break };
        match x.shape(build)?.as_slice() {
            &[batch, tokens, heads, several @ (2 | 3), size] => {
                for part in 0..several {
                    let one = build.narrow(x, 3, part, 1)?;
                    parts.push(build.reshape(&one, &[batch, tokens, heads * size])?);
                }
            }
            _ => parts.push(x.clone()),
        }
    }
    if parts.len() != 3 {
        return Err(Error::shape(format!("{} of queries, keys and values given to MultiHeadAttention", parts.len())));
    }
    if let Some(bias) = call.optional(3) {
        let mut from = 0;
        for part in &mut parts {
            let shape = part.shape(build)?;
            let &[_, _, width] = shape.as_slice() else { continue };
            let own = build.narrow(bias, 0, from, width)?;
            *part = build.binary(BinaryOp::Add, part, &own)?;
            from += width;
        }
    }
    attend(build, call, parts, (call.optional(4), call.optional(5)))
}

/// Attention of `[q, k, v]`, `padding` says which keys are none, `bias` is added to the scores.
fn attend(build: &mut Build, call: &Call, parts: Vec<Value>, masks: (Option<&Value>, Option<&Value>)) -> Result<Vec<Value>> {
    let count = call.node.int_or("num_heads", 0)?;
    let dtype = parts[0].dtype(build)?;
    let heads = Heads::of(build, &parts, [count; 3], dtype)?;
    let (q, k) = (heads.q.shape(build)?, heads.k.shape(build)?);
    let scale = call.node.float("scale")?.filter(|&scale| scale != 0.0);
    let causal = call.node.flag("unidirectional", false)?;
    let filter = call.node.float_or("mask_filter_value", -10_000.0)?;
    let mut mask = match masks.0 {
        Some(padding) => {
            let allowed = allowed(build, padding, [q[0], q[2], k[2]])?;
            let wide = heads.q.dtype(build)?;
            Some(build.select(&allowed, &Known::scalar(wide, 0.0).into(), &Known::scalar(wide, filter).into())?)
        }
        None => None,
    };
    if let Some(bias) = masks.1 {
        mask = Some(mask.map_or(Ok(bias.clone()), |mask| build.binary(BinaryOp::Add, &mask, bias))?);
    }
    let y = of_heads(build, heads, mask.as_ref(), causal, scale)?;
    let y = without_heads(build, &y)?;
    Ok(vec![build.cast(&y, dtype)?])
}

/// Which keys are no padding, as `[batch, 1, queries or 1, keys]`: by counts of keys, by first keys and those behind the last, or by a
/// mask that is positive there.
fn allowed(build: &mut Build, padding: &Value, [batch, queries, keys]: [u64; 3]) -> Result<Value> {
    let shape = padding.shape(build)?;
    let place = build.positions(&[1, 1, 1, keys], 3)?;
    let bound = |build: &mut Build, from: u64| {
        let part = build.narrow(padding, 0, from, batch)?;
        let part = build.cast(&part, DType::I64)?;
        build.reshape(&part, &[batch, 1, 1, 1])
    };
    match shape.as_slice() {
        &[count] if count == batch => {
            let end = bound(build, 0)?;
            build.compare(CompareOp::Lt, &place, &end)
        }
        &[count] if count == 2 * batch => {
            let (end, first) = (bound(build, 0)?, bound(build, batch)?);
            let before = build.compare(CompareOp::Lt, &place, &end)?;
            let behind = build.compare(CompareOp::Ge, &place, &first)?;
            build.binary(BinaryOp::And, &before, &behind)
        }
        &[b, s] if (b, s) == (batch, keys) => positive(build, padding, &[batch, 1, 1, keys]),
        &[b, t, s] if (b, t, s) == (batch, queries, keys) => positive(build, padding, &[batch, 1, queries, keys]),
        other => {
            Err(Error::shape(format!("a mask {other:?} of keys for {batch} samples of {queries} queries and {keys} keys")))
        }
    }
}

fn positive(build: &mut Build, mask: &Value, shape: &[u64]) -> Result<Value> {
    let mask = build.reshape(mask, shape)?;
    match mask.dtype(build)? {
        DType::Bool => Ok(mask),
        dtype => build.compare(CompareOp::Gt, &mask, &Known::scalar(dtype, 0.0).into()),
    }
}

/// ONNX's with its inputs in another order; one position is that of the first token.
fn rotary(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    refuse(call, &[], &[("is_packed_batching", 0)])?;
    let scale = call.node.float_or("scale", 1.0)?;
    if scale != 1.0 {
        return Err(attribute_value("scale", scale));
    }
    let (x, shape) = (call.input(0)?, call.input(0)?.shape(build)?);
    let pairs = call.input(2)?.shape(build)?.last().copied().unwrap_or(0);
    let (batch, tokens, split) = match shape.as_slice() {
        &[batch, _, tokens, _] => (batch, tokens, x.clone()),
        &[batch, tokens, width] => {
            let whole = if pairs == 0 { 0 } else { width / (2 * pairs) };
            let heads = match call.node.int_or("num_heads", 0)? {
                0 => whole,
                heads => heads.max(0) as u64,
            };
            if heads == 0 || !width.is_multiple_of(heads) {
                return Err(Error::shape(format!("{heads} heads of {width} elements")));
            }
            let split = build.reshape(x, &[batch, tokens, heads, width / heads])?;
            (batch, tokens, build.transpose(&split, &[0, 2, 1, 3])?)
        }
        other => return Err(Error::shape(format!("RotaryEmbedding of {other:?}"))),
    };
    let mut ids = build.cast(call.input(1)?, DType::I64)?;
    if ids.shape(build)?.as_slice() == [1] {
        let place = build.positions(&[1, tokens], 1)?;
        ids = build.binary(BinaryOp::Add, &place, &ids)?;
    }
    let ids = build.broadcast(&ids, &[batch, tokens])?;
    let inputs = [Some(split), Some(call.input(2)?.clone()), Some(call.input(3)?.clone()), Some(ids)];
    let y = rotary_embedding(build, &Call { inputs: &inputs, ..*call })?.remove(0);
    Ok(vec![if shape.len() == 3 { without_heads(build, &y)? } else { y }])
}
