//! Attention and rotary positions.

use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::program::{Attention as Attributes, MaskKind};
use dcc_program::{DType, FactorSpec};

use super::{Call, Import, attribute_value, masked_attention};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::import::build::Build;
use crate::import::value::Value;
use crate::import::view::View;
use crate::ops::{Attention, Op};

pub const ONNX: &[(&str, Import)] = &[("Attention", attention), ("RotaryEmbedding", rotary_embedding)];

/// The floats that products of `dtype` are computed in.
pub(in crate::import) fn computed_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

/// `[batch, heads, tokens, size]` from that or from `[batch, tokens, heads * size]`.
pub(super) fn with_heads(build: &mut Build, x: &Value, heads: Option<i64>) -> Result<Value> {
    let shape = x.shape(build)?;
    match (shape.as_slice(), heads) {
        ([_, _, _, _], _) => Ok(x.clone()),
        (&[batch, tokens, width], Some(heads @ 1..)) if width.is_multiple_of(heads as u64) => {
            let split = build.reshape(x, &[batch, tokens, heads as u64, width / heads as u64])?;
            build.transpose(&split, &[0, 2, 1, 3])
        }
        (other, heads) => Err(Error::shape(format!("{other:?} with {heads:?} heads"))),
    }
}

/// Queries, keys and values as `[batch, heads, tokens, size]`, halves widened: products of halves are summed in f32.
pub(super) struct Heads {
    pub q: Value,
    pub k: Value,
    pub v: Value,
    /// What the model has them in.
    pub dtype: DType,
}

impl Heads {
    fn read(build: &mut Build, call: &Call) -> Result<Heads> {
        let dtype = call.input(0)?.dtype(build)?;
        let (queries, keys) = (call.node.int_or("q_num_heads", 0)?, call.node.int_or("kv_num_heads", 0)?);
        let given = [0, 1, 2].map(|position| call.input(position).cloned());
        Heads::of(build, &given.into_iter().collect::<Result<Vec<Value>>>()?, [queries, keys, keys], dtype)
    }

    /// Of queries, keys and values, with the number of heads of each that has them in one dim with their elements.
    pub fn of(build: &mut Build, given: &[Value], counts: [i64; 3], dtype: DType) -> Result<Heads> {
        let mut each = Vec::with_capacity(3);
        for (x, heads) in given.iter().zip(counts) {
            let x = build.cast(x, computed_in(dtype))?;
            each.push(with_heads(build, &x, Some(heads).filter(|&heads| heads != 0))?);
        }
        let [q, k, v] = <[Value; 3]>::try_from(each).expect("three inputs");
        let [heads, keys, values] = [q.shape(build)?[1], k.shape(build)?[1], v.shape(build)?[1]];
        if keys == 0 || !heads.is_multiple_of(keys) || values != keys {
            return Err(Error::shape(format!("{heads} query heads, {keys} key heads, {values} value heads")));
        }
        Ok(Heads { q, k, v, dtype })
    }
}

/// softmax(Q Kᵀ scale + mask) V with fewer key heads than query heads where they divide.
fn attention(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let heads = Heads::read(build, call)?;
    if masked_attention::is_wanted(call)? {
        return masked_attention::attention(build, call, heads);
    }
    let _ = call.node.int_or("qk_matmul_output_mode", 0)?;
    let (dtype, flat) = (heads.dtype, call.input(0)?.rank(build)? == 3);
    let (scale, causal) = (call.node.float("scale")?, call.node.flag("is_causal", false)?);
    let mut y = of_heads(build, heads, call.optional(3), causal, scale)?;
    if flat {
        y = without_heads(build, &y)?;
    }
    Ok(vec![build.cast(&y, dtype)?])
}

/// `[batch, tokens, heads * size]` of `[batch, heads, tokens, size]`.
pub(super) fn without_heads(build: &mut Build, x: &Value) -> Result<Value> {
    let shape = x.shape(build)?;
    let y = build.transpose(x, &[0, 2, 1, 3])?;
    build.reshape(&y, &[shape[0], shape[2], shape[1] * shape[3]])
}

/// The attention op; its result has a dim for heads, and is as wide as these.
pub(super) fn of_heads(
    build: &mut Build,
    heads: Heads,
    mask: Option<&Value>,
    causal: bool,
    scale: Option<f64>,
) -> Result<Value> {
    let Heads { q, k, v, dtype } = heads;
    let (q_shape, k_shape, v_shape) = (q.shape(build)?, k.shape(build)?, v.shape(build)?);
    let (heads, key_heads) = (q_shape[1], k_shape[1]);
    let groups = heads / key_heads;
    let scale = scale.unwrap_or(1.0 / (q_shape[3] as f64).sqrt());
    let scores = [q_shape[0], heads, q_shape[2], k_shape[2]];
    let mask = match mask {
        Some(mask) if mask.dtype(build)?.is_float() => {
            let mask = build.cast(mask, computed_in(dtype))?;
            Mask::read(build, &mask, &scores)?
        }
        Some(mask) => Mask::read(build, mask, &scores)?,
        None => Mask::default(),
    };
    let (q, head_names) = match groups {
        1 => (q, "h"),
        _ => (build.reshape(&q, &[q_shape[0], key_heads, groups, q_shape[2], q_shape[3]])?, "h g"),
    };
    let (mask_value, mask_names) = mask.for_groups(build, groups)?;
    let mut operands = vec![build.node(&q)?, build.node(&k)?, build.node(&v)?];
    let mut spec = format!("b {head_names} t e, b h s e, b h s f");
    let mut kind = MaskKind::None;
    if let Some(value) = mask_value {
        spec = format!("{spec}, {mask_names}");
        kind = if value.dtype(build)? == DType::Bool { MaskKind::Boolean } else { MaskKind::Additive };
        operands.push(build.node(&value)?);
    }
    let spec = FactorSpec::parse(&format!("{spec} -> b {head_names} t f")).expect("names are identifiers");
    let attributes = Attributes { spec, causal: causal || mask.causal, mask: kind, scale: scale.to_bits() };
    let y = build.graph.add(Attention { attributes, out: 0 }, &operands)?;
    build.reshape(&y.into(), &[q_shape[0], heads, q_shape[2], v_shape[3]])
}

/// The mask of an attention without the dims along which it repeats.
#[derive(Default)]
struct Mask {
    value: Option<Value>,
    /// Which of `b h t s` it has.
    dims: Vec<usize>,
    /// It is the causal mask, and no tensor.
    causal: bool,
}

impl Mask {
    fn read(build: &mut Build, mask: &Value, scores: &[u64; 4]) -> Result<Mask> {
        let rank = mask.rank(build)?;
        if rank > 4 {
            return Err(Error::shape(format!("an attention mask of rank {rank}")));
        }
        let wide = build.broadcast(mask, scores)?;
        if mask.dtype(build)? == DType::Bool && wide.uniform() == Some(1.0) {
            return Ok(Mask::default());
        }
        let id = build.node(&wide)?;
        let View { id, dims } = View::of(&build.graph, id);
        if dims == [2, 3] && scores[2] == scores[3] && is_causal(&build.graph, id) {
            return Ok(Mask { causal: true, ..Mask::default() });
        }
        Ok(Mask { value: Some(id.into()), dims, causal: false })
    }

    /// The mask and its factors, heads split into groups where the queries' are.
    fn for_groups(&self, build: &mut Build, groups: u64) -> Result<(Option<Value>, String)> {
        let Some(value) = &self.value else { return Ok((None, String::new())) };
        let head_names = if groups == 1 { "h" } else { "h g" };
        let names: Vec<&str> = self.dims.iter().map(|&dim| ["b", head_names, "t", "s"][dim]).collect();
        let mut value = value.clone();
        if let Some(at) = self.dims.iter().position(|&dim| dim == 1).filter(|_| groups != 1) {
            let mut shape = value.shape(build)?;
            shape[at] /= groups;
            shape.insert(at + 1, groups);
            value = build.reshape(&value, &shape)?;
        }
        Ok((Some(value), names.join(" ")))
    }
}

/// Whether the matrix is `column index <= row index`.
fn is_causal(graph: &Graph, id: NodeId) -> bool {
    let (columns, rows) = match &graph[id].op {
        Op::Compare(op) if op.op == CompareOp::Le => (graph[id].operands[0], graph[id].operands[1]),
        Op::Compare(op) if op.op == CompareOp::Ge => (graph[id].operands[1], graph[id].operands[0]),
        _ => return false,
    };
    let counts = |id: NodeId, dim: usize| {
        let view = View::of(graph, id);
        view.dims == [dim] && matches!(&graph[view.id].op, Op::Iota(_))
    };
    counts(columns, 1) && counts(rows, 0)
}

/// Rotates pairs of the first `rotary_embedding_dim` elements of each head by the angle of their position. Su et al. 2021,
/// arXiv 2104.09864. Pairs are halves apart, or neighbours if `interleaved`.
pub(super) fn rotary_embedding(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let flat = shape.len() == 3;
    let heads = call.node.int_or("num_heads", 0)?;
    let x = with_heads(build, x, Some(heads))?;
    let split = x.shape(build)?;
    let (size, interleaved) = (split[3], call.node.flag("interleaved", false)?);
    let rotated = match call.node.int_or("rotary_embedding_dim", 0)? {
        0 => size,
        dim => {
            u64::try_from(dim).ok().filter(|&dim| dim <= size).ok_or_else(|| attribute_value("rotary_embedding_dim", dim))?
        }
    };
    let half = rotated / 2;
    let mut angles = Vec::with_capacity(2);
    for position in [1, 2] {
        let mut table = call.input(position)?.clone();
        if let Some(ids) = call.optional(3) {
            let (table_id, ids) = (build.node(&table)?, build.node(ids)?);
            table = build.gather(&FactorSpec::parse("v e, b t -> b t e").expect("a spec of ours"), table_id, ids)?;
        }
        let dims = table.shape(build)?;
        if dims.len() != 3 || dims[2] != half {
            return Err(Error::shape(format!("cosines {:?} for {half} pairs", dims.as_slice())));
        }
        angles.push(build.reshape(&table, &[dims[0], 1, dims[1], half])?);
    }
    let kept = build.narrow(&x, 3, rotated, size - rotated)?;
    let part = build.narrow(&x, 3, 0, rotated)?;
    let pairs = [split[0], split[1], split[2], half];
    let pick = |build: &mut Build, which: u64| -> Result<Value> {
        match interleaved {
            false => build.narrow(&part, 3, which * half, half),
            true => build.slice(&part, &[0, 0, 0, which as i64], &[1, 1, 1, 2], &pairs),
        }
    };
    let (first, second) = (pick(build, 0)?, pick(build, 1)?);
    let mut turned = Vec::with_capacity(2);
    for (op, a, b) in [(BinaryOp::Sub, &angles[0], &angles[1]), (BinaryOp::Add, &angles[1], &angles[0])] {
        let (left, right) = (build.binary(BinaryOp::Mul, &first, a)?, build.binary(BinaryOp::Mul, &second, b)?);
        turned.push(build.binary(op, &left, &right)?);
    }
    let mut y = match interleaved {
        false => build.concatenate(&turned, 3)?,
        true => {
            let column = [split[0], split[1], split[2], half, 1];
            let columns = turned.iter().map(|part| build.reshape(part, &column)).collect::<Result<Vec<Value>>>()?;
            let stacked = build.concatenate(&columns, 4)?;
            build.reshape(&stacked, &[split[0], split[1], split[2], rotated])?
        }
    };
    y = build.concatenate(&[y, kept], 3)?;
    if flat {
        y = without_heads(build, &y)?;
    }
    Ok(vec![y])
}
