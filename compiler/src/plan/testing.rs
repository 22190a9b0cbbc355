//! Forward graphs for the planner's tests, as import and the rewrites leave them: attention found, fused weights in pieces.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{Attention, Gather, Input, Iota, Param, StopGradient};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::{Attention as Attributes, MaskKind, ParamKind};
use dcc_program::{DType, FactorSpec, Reduce, Shape};

/// Sizes of a transformer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub batch: u64,
    pub tokens: u64,
    pub width: u64,
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    pub hidden: u64,
    pub vocabulary: u64,
    pub layers: u64,
}

pub(super) const SMALL: Sizes =
    Sizes { batch: 8, tokens: 16, width: 64, heads: 4, kv_heads: 4, hidden: 256, vocabulary: 101, layers: 2 };

pub(super) fn input(g: &mut Graph, name: &str, dtype: DType, shape: &[u64], batch_dim: Option<u8>) -> NodeId {
    g.add(Input { name: name.into(), dtype, shape: Shape::from_slice(shape), batch_dim }, &[]).unwrap()
}

pub(super) fn param(g: &mut Graph, name: &str, shape: &[u64]) -> NodeId {
    let shape = Shape::from_slice(shape);
    g.add(Param { name: name.into(), kind: ParamKind::Weight, piece: None, dtype: DType::F32, shape }, &[]).unwrap()
}

pub(super) fn gather(g: &mut Graph, spec: &str, data: NodeId, indices: NodeId) -> NodeId {
    g.add(Gather { spec: FactorSpec::parse(spec).unwrap() }, &[data, indices]).unwrap()
}

/// `x + bias`, the bias along the last dim.
pub(super) fn add_bias(g: &mut Graph, x: NodeId, name: &str) -> Result<NodeId> {
    let shape = g.ty(x).shape.clone();
    let bias = param(g, name, &shape[shape.len() - 1..]);
    let bias = g.broadcast(bias, &shape, &[shape.len() - 1])?;
    g.binary(BinaryOp::Add, x, bias)
}

/// `[b, t, d]` normalised over d with gain and, for LayerNorm, mean and bias.
fn norm(g: &mut Graph, x: NodeId, name: &str, layer_norm: bool) -> Result<NodeId> {
    let shape = g.ty(x).shape.clone();
    let width = shape[2] as f64;
    let mut centred = x;
    if layer_norm {
        let sum = g.sum(x, &[2])?;
        let mean = g.scale(sum, 1.0 / width)?;
        let mean = g.broadcast(mean, &shape, &[0, 1])?;
        centred = g.binary(BinaryOp::Sub, x, mean)?;
    }
    let square = g.binary(BinaryOp::Mul, centred, centred)?;
    let sum = g.sum(square, &[2])?;
    let variance = g.scale(sum, 1.0 / width)?;
    let variance = g.binary_scalar(BinaryOp::Add, variance, 1e-5)?;
    let inverse = g.unary(UnaryOp::Rsqrt, variance)?;
    let inverse = g.broadcast(inverse, &shape, &[0, 1])?;
    let unit = g.binary(BinaryOp::Mul, centred, inverse)?;
    let gain = param(g, &format!("{name}.weight"), &shape[2..]);
    let gain = g.broadcast(gain, &shape, &[2])?;
    let scaled = g.binary(BinaryOp::Mul, unit, gain)?;
    if layer_norm { add_bias(g, scaled, &format!("{name}.bias")) } else { Ok(scaled) }
}

/// `x w (+ bias)` over the last dim of `[b, t, d]`.
fn linear(g: &mut Graph, x: NodeId, name: &str, width: u64, bias: bool) -> Result<NodeId> {
    let from = g.ty(x).shape[2];
    let weight = param(g, &format!("{name}.weight"), &[from, width]);
    let y = g.dot("b t d, d n -> b t n", x, weight)?;
    if bias { add_bias(g, y, &format!("{name}.bias")) } else { Ok(y) }
}

/// `[b, t, heads·e]` to `[b, heads, t, e]`, or `[b, kv, g, t, e]` where query heads share keys.
fn split_heads(g: &mut Graph, x: NodeId, heads: u64, groups: Option<u64>) -> Result<NodeId> {
    let shape = g.ty(x).shape.clone();
    let size = shape[2] / heads;
    match groups {
        None => {
            let x = g.reshape(x, &[shape[0], shape[1], heads, size])?;
            g.transpose(x, &[0, 2, 1, 3])
        }
        Some(groups) => {
            let x = g.reshape(x, &[shape[0], shape[1], heads / groups, groups, size])?;
            g.transpose(x, &[0, 2, 3, 1, 4])
        }
    }
}

/// Causal, or with a mask of `[b, s]` that is added to the scores.
fn attention(g: &mut Graph, x: NodeId, name: &str, s: &Sizes, bias: bool, mask: Option<NodeId>) -> Result<NodeId> {
    let size = s.width / s.heads;
    let groups = s.heads / s.kv_heads;
    let shared = (groups > 1).then_some(groups);
    let q = linear(g, x, &format!("{name}.q"), s.width, bias)?;
    let k = linear(g, x, &format!("{name}.k"), s.kv_heads * size, bias)?;
    let v = linear(g, x, &format!("{name}.v"), s.kv_heads * size, bias)?;
    let q = split_heads(g, q, s.heads, shared)?;
    let k = split_heads(g, k, s.kv_heads, None)?;
    let v = split_heads(g, v, s.kv_heads, None)?;
    let spec = match (shared, mask) {
        (None, None) => "b h t e, b h s e, b h s f -> b h t f",
        (None, Some(_)) => "b h t e, b h s e, b h s f, b h t s -> b h t f",
        _ => "b h g t e, b h s e, b h s f -> b h g t f",
    };
    let scale = (size as f64).powf(-0.5).to_bits();
    let kind = if mask.is_some() { MaskKind::Additive } else { MaskKind::None };
    let attributes = Attributes { spec: FactorSpec::parse(spec).unwrap(), causal: mask.is_none(), mask: kind, scale };
    g.set_origin(&format!("{name}/Attention"));
    let mut operands = vec![q, k, v];
    if let Some(mask) = mask {
        operands.push(g.broadcast(mask, &[s.batch, s.heads, s.tokens, s.tokens], &[0, 3])?);
    }
    let o = g.add(Attention { attributes: attributes.clone(), out: 0 }, &operands)?;
    g.add(Attention { attributes, out: 1 }, &operands)?;
    let o = if shared.is_some() { g.transpose(o, &[0, 3, 1, 2, 4])? } else { g.transpose(o, &[0, 2, 1, 3])? };
    let o = g.reshape(o, &[s.batch, s.tokens, s.width])?;
    linear(g, o, &format!("{name}.proj"), s.width, bias)
}

/// Mean cross-entropy of `[b, t, v]` over the labels that are not -100.
fn cross_entropy(g: &mut Graph, logits: NodeId, labels: NodeId) -> Result<NodeId> {
    let shape = g.ty(logits).shape.clone();
    let max = g.reduce(Reduce::Max, logits, &[2])?;
    let max = g.add(StopGradient {}, &[max])?;
    let max = g.broadcast(max, &shape, &[0, 1])?;
    let z = g.binary(BinaryOp::Sub, logits, max)?;
    let e = g.unary(UnaryOp::Exp, z)?;
    let sum = g.sum(e, &[2])?;
    let log = g.unary(UnaryOp::Log, sum)?;
    let index = g.add(Iota { dtype: DType::I64, shape: shape.clone(), dim: 2 }, &[])?;
    let wanted = g.broadcast(labels, &shape, &[0, 1])?;
    let hit = g.compare(CompareOp::Eq, index, wanted)?;
    let zero = g.splat_like(0.0, z)?;
    let hit = g.select(hit, z, zero)?;
    let target = g.sum(hit, &[2])?;
    let loss = g.binary(BinaryOp::Sub, log, target)?;
    let ignored = g.splat(DType::I64, -100.0, &shape[..2])?;
    let valid = g.compare(CompareOp::Ne, labels, ignored)?;
    let zero = g.splat_like(0.0, loss)?;
    let loss = g.select(valid, loss, zero)?;
    let count = g.cast(valid, DType::F32)?;
    let count = g.sum(count, &[0, 1])?;
    let loss = g.sum(loss, &[0, 1])?;
    g.binary(BinaryOp::Div, loss, count)
}

/// GPT-2: LayerNorm, biases, tanh GELU, tied embedding.
pub(super) fn gpt(s: &Sizes) -> Graph {
    build(s, |g, s| {
        let ids = input(g, "ids", DType::I64, &[s.batch, s.tokens], Some(0));
        let labels = input(g, "labels", DType::I64, &[s.batch, s.tokens], Some(0));
        let wte = param(g, "wte", &[s.vocabulary, s.width]);
        let wpe = param(g, "wpe", &[s.tokens, s.width]);
        let tokens = gather(g, "v e, b t -> b t e", wte, ids);
        let positions = g.broadcast(wpe, &[s.batch, s.tokens, s.width], &[1, 2])?;
        let mut x = g.binary(BinaryOp::Add, tokens, positions)?;
        for layer in 0..s.layers {
            let y = norm(g, x, &format!("h.{layer}.ln_1"), true)?;
            let o = attention(g, y, &format!("h.{layer}.attn"), s, true, None)?;
            x = g.binary(BinaryOp::Add, x, o)?;
            let y = norm(g, x, &format!("h.{layer}.ln_2"), true)?;
            let h = linear(g, y, &format!("h.{layer}.mlp.fc"), s.hidden, true)?;
            let h = gelu(g, h)?;
            let o = linear(g, h, &format!("h.{layer}.mlp.proj"), s.width, true)?;
            x = g.binary(BinaryOp::Add, x, o)?;
        }
        let y = norm(g, x, "ln_f", true)?;
        let logits = g.dot("b t d, v d -> b t v", y, wte)?;
        cross_entropy(g, logits, labels)
    })
}

/// Llama: RMSNorm, no biases, shared key heads, gated SiLU, untied head.
pub(super) fn llama(s: &Sizes) -> Graph {
    build(s, |g, s| {
        let ids = input(g, "ids", DType::I64, &[s.batch, s.tokens], Some(0));
        let labels = input(g, "labels", DType::I64, &[s.batch, s.tokens], Some(0));
        let embedding = param(g, "embed", &[s.vocabulary, s.width]);
        let mut x = gather(g, "v e, b t -> b t e", embedding, ids);
        for layer in 0..s.layers {
            let y = norm(g, x, &format!("h.{layer}.input_norm"), false)?;
            let o = attention(g, y, &format!("h.{layer}.attn"), s, false, None)?;
            x = g.binary(BinaryOp::Add, x, o)?;
            let y = norm(g, x, &format!("h.{layer}.post_norm"), false)?;
            let gate = linear(g, y, &format!("h.{layer}.mlp.gate"), s.hidden, false)?;
            let up = linear(g, y, &format!("h.{layer}.mlp.up"), s.hidden, false)?;
            let negative = g.unary(UnaryOp::Neg, gate)?;
            let e = g.unary(UnaryOp::Exp, negative)?;
            let one = g.binary_scalar(BinaryOp::Add, e, 1.0)?;
            let gate = g.binary(BinaryOp::Div, gate, one)?;
            let h = g.binary(BinaryOp::Mul, gate, up)?;
            let o = linear(g, h, &format!("h.{layer}.mlp.down"), s.width, false)?;
            x = g.binary(BinaryOp::Add, x, o)?;
        }
        let y = norm(g, x, "norm", false)?;
        let logits = linear(g, y, "head", s.vocabulary, false)?;
        cross_entropy(g, logits, labels)
    })
}

/// BERT: post-norm, an attention mask from an input, three embeddings, tied decoder with a bias.
pub(super) fn bert(s: &Sizes) -> Graph {
    build(s, |g, s| {
        let ids = input(g, "input_ids", DType::I64, &[s.batch, s.tokens], Some(0));
        let kinds = input(g, "token_type_ids", DType::I64, &[s.batch, s.tokens], Some(0));
        let mask = input(g, "attention_mask", DType::F32, &[s.batch, s.tokens], Some(0));
        let labels = input(g, "labels", DType::I64, &[s.batch, s.tokens], Some(0));
        let mask = g.binary_scalar(BinaryOp::Sub, mask, 1.0)?;
        let mask = g.scale(mask, 1e9)?;
        let words = param(g, "embeddings.word", &[s.vocabulary, s.width]);
        let types = param(g, "embeddings.type", &[2, s.width]);
        let positions = param(g, "embeddings.position", &[s.tokens, s.width]);
        let word = gather(g, "v e, b t -> b t e", words, ids);
        let kind = gather(g, "v e, b t -> b t e", types, kinds);
        let index = g.add(Iota { dtype: DType::I64, shape: Shape::from_slice(&[s.tokens]), dim: 0 }, &[])?;
        let position = gather(g, "v e, t -> t e", positions, index);
        let position = g.broadcast(position, &[s.batch, s.tokens, s.width], &[1, 2])?;
        let x = g.binary(BinaryOp::Add, word, kind)?;
        let x = g.binary(BinaryOp::Add, x, position)?;
        let mut x = norm(g, x, "embeddings.norm", true)?;
        for layer in 0..s.layers {
            let o = attention(g, x, &format!("layer.{layer}.attention"), s, true, Some(mask))?;
            x = g.binary(BinaryOp::Add, x, o)?;
            x = norm(g, x, &format!("layer.{layer}.attention.norm"), true)?;
            let h = linear(g, x, &format!("layer.{layer}.intermediate"), s.hidden, true)?;
            let h = gelu(g, h)?;
            let o = linear(g, h, &format!("layer.{layer}.output"), s.width, true)?;
            x = g.binary(BinaryOp::Add, x, o)?;
            x = norm(g, x, &format!("layer.{layer}.output.norm"), true)?;
        }
        let logits = g.dot("b t d, v d -> b t v", x, words)?;
        let logits = add_bias(g, logits, "decoder.bias")?;
        cross_entropy(g, logits, labels)
    })
}

/// The same graph with its nodes in another order and other names; also where each node went.
pub(super) fn shuffled(graph: &Graph, mut seed: u64) -> (Graph, Vec<NodeId>) {
    let mut out = Graph::new();
    let mut map: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    while let Some(count) = Some(map.iter().filter(|n| n.is_none()).count()).filter(|&c| c > 0) {
        let waiting = graph.ids().filter(|id| map[id.0 as usize].is_none());
        let ready: Vec<NodeId> = waiting.filter(|&id| graph[id].operands.iter().all(|o| map[o.0 as usize].is_some())).collect();
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let id = ready[(seed >> 33) as usize % ready.len()];
        let operands: Vec<NodeId> = graph[id].operands.iter().filter_map(|o| map[o.0 as usize]).collect();
        let mut op = graph[id].op.clone();
        match &mut op {
            crate::ops::Op::Param(param) => param.name = format!("p{count}"),
            crate::ops::Op::Input(input) => input.name = format!("i{count}"),
            _ => {}
        }
        map[id.0 as usize] = Some(out.add(op, &operands).unwrap());
    }
    let map: Vec<NodeId> = map.into_iter().flatten().collect();
    out.outputs = graph.outputs.iter().map(|(name, id)| (name.clone(), map[id.0 as usize])).collect();
    (out, map)
}

/// Attention over `[b, t, d]`, `t` and `d` alike, after one row of numbers has been added along either.
pub(super) fn of_one_ramp(s: &Sizes) -> Graph {
    assert_eq!(s.tokens, s.width);
    build(s, |g, s| {
        let shape = [s.batch, s.tokens, s.width];
        let mut x = input(g, "x", DType::F32, &shape, Some(0));
        let ramp = g.add(Iota { dtype: DType::F32, shape: Shape::from_slice(&shape[1..2]), dim: 0 }, &[])?;
        for dim in [1, 2] {
            let ramp = g.broadcast(ramp, &shape, &[dim])?;
            x = g.binary(BinaryOp::Add, x, ramp)?;
        }
        let x = attention(g, x, "attn", s, false, None)?;
        let square = g.binary(BinaryOp::Mul, x, x)?;
        g.sum(square, &[0, 1, 2])
    })
}

/// Products with tanh between them, then the sum of squares.
pub(super) fn mlp(batch: u64, widths: &[u64]) -> Graph {
    let mut g = Graph::new();
    let mut x = input(&mut g, "x", DType::F32, &[batch, widths[0]], Some(0));
    let loss = (|| {
        for (layer, pair) in widths.windows(2).enumerate() {
            let weight = param(&mut g, &format!("fc{layer}.weight"), pair);
            x = g.dot("m k, k n -> m n", x, weight)?;
            x = add_bias(&mut g, x, &format!("fc{layer}.bias"))?;
            if layer + 2 < widths.len() {
                x = g.unary(UnaryOp::Tanh, x)?;
            }
        }
        let square = g.binary(BinaryOp::Mul, x, x)?;
        g.sum(square, &[0, 1])
    })();
    g.outputs = vec![("loss".into(), loss.unwrap())];
    g
}

fn gelu(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let square = g.binary(BinaryOp::Mul, x, x)?;
    let cube = g.binary(BinaryOp::Mul, square, x)?;
    let cube = g.scale(cube, 0.044715)?;
    let inner = g.binary(BinaryOp::Add, x, cube)?;
    let inner = g.scale(inner, 0.7978845608)?;
    let tanh = g.unary(UnaryOp::Tanh, inner)?;
    let one = g.binary_scalar(BinaryOp::Add, tanh, 1.0)?;
    let half = g.scale(x, 0.5)?;
    g.binary(BinaryOp::Mul, half, one)
}

fn build(sizes: &Sizes, body: impl FnOnce(&mut Graph, &Sizes) -> Result<NodeId>) -> Graph {
    let mut g = Graph::new();
    let loss = body(&mut g, sizes).unwrap();
    g.outputs = vec![("loss".into(), loss)];
    g
}
