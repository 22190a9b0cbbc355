//! The gradient of an additive mask that trains, as relative position biases do (T5, Swin).
//!
//! dMask = Σ P ∘ (dO Vᵀ − rowsum(dO ∘ O)) over the dims along which the mask repeats, P = exp(scores − Lse). Unlike the gradients of
//! Q, K and V it needs whole matrices of scores; only masks that train pay for that.

use super::super::dot::{DotGeneral, respec};
use super::{Attention, factor};
use crate::autodiff::Grad;
use crate::error::Result;
use crate::graph::NodeId;
use crate::ops::Iota;
use dcc_program::DType;
use dcc_program::factors::DimFactors;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

/// dMask of attention `y`, whose operands are Q, K, V and the mask.
pub(super) fn gradient(op: &Attention, g: &mut Grad, y: NodeId, lse: NodeId, dy: NodeId) -> Result<NodeId> {
    let spec = &op.attributes.spec;
    let rows = Attention { out: 1, ..op.clone() }.spec().result;
    let role = |name: &str| DimFactors::from_slice(&[factor(spec, name).expect("infer saw it")]);
    // Rows first, so that what is of rows repeats along the last dim.
    let dims = [&rows[..], &[role("s")]].concat();
    let product = |g: &mut Grad, a: NodeId, b: NodeId, of: [&[DimFactors]; 2]| {
        g.add(DotGeneral { spec: respec(spec, &of, &dims), wide: true }, &[a, b])
    };
    let [q, k, v, mask] = [0, 1, 2, 3].map(|i| g.operand(i));
    let scores = product(g, q, k, [&spec.operands[0], &spec.operands[1]])?;
    let d_p = product(g, dy, v, [&spec.result, &spec.operands[2]])?;
    let dtype = g.ty(lse).dtype;
    let delta = row_sums(op, g, [y, dy], dtype)?;
    let (t, s) = (dims.iter().position(|d| *d == role("t")), dims.len() - 1);
    let order = order_of(&spec.operands[3], &dims);
    // A row without keys has no probabilities: its scores are all -inf.
    let lse = g.of_value(lse, |g| {
        let (never, zero) = (g.splat_like(f64::NEG_INFINITY, lse)?, g.splat_like(0.0, lse)?);
        let some = g.compare(CompareOp::Gt, lse, never)?;
        g.select(some, lse, zero)
    })?;
    let mut sorted: Vec<usize> = (0..order.len()).collect();
    sorted.sort_by_key(|&d| order[d]);
    let mask_in_order = g.in_forward(|g| g.transpose(mask, &sorted))?;
    let at: Vec<usize> = sorted.iter().map(|&d| order[d]).collect();
    let d_s = g.of_value(scores, |g| {
        let shape = g.ty(scores).shape.clone();
        let scaled = g.scale(scores, f64::from_bits(op.attributes.scale))?;
        let mask = g.broadcast(mask_in_order, &shape, &at)?;
        let mut scores = g.binary(BinaryOp::Add, scaled, mask)?;
        if let Some(t) = t.filter(|_| op.attributes.causal) {
            let index = |dim: usize| Iota { dtype: DType::I64, shape: shape.clone(), dim: dim as u8 };
            let (query, key) = (g.add(index(t), &[])?, g.add(index(s), &[])?);
            let later = g.compare(CompareOp::Gt, key, query)?;
            let never = g.splat_like(f64::NEG_INFINITY, scores)?;
            scores = g.select(later, never, scores)?;
        }
        let rows: Vec<usize> = (0..s).collect();
        let (lse, delta) = (g.broadcast(lse, &shape, &rows)?, g.broadcast(delta, &shape, &rows)?);
        let centered = g.binary(BinaryOp::Sub, scores, lse)?;
        let p = g.unary(UnaryOp::Exp, centered)?;
        let rest = g.binary(BinaryOp::Sub, d_p, delta)?;
        g.binary(BinaryOp::Mul, p, rest)
    })?;
    let repeated: Vec<usize> = (0..dims.len()).filter(|d| !order.contains(d)).collect();
    let sum = g.like(d_s, |g| g.sum(d_s, &repeated))?;
    let back: Vec<usize> = order.iter().map(|d| order.iter().filter(|o| *o < d).count()).collect();
    g.of_value(mask, |g| g.transpose(sum, &back))
}

/// rowsum(dO ∘ O), with Lse's dims and dtype.
fn row_sums(op: &Attention, g: &mut Grad, [y, dy]: [NodeId; 2], dtype: DType) -> Result<NodeId> {
    let spec = &op.attributes.spec;
    let value_dim = spec.result.iter().position(|d| d.first().copied() == factor(spec, "f")).expect("infer saw it");
    let product = g.of_value(y, |g| {
        let (dy, y) = (g.cast(dy, dtype)?, g.cast(y, dtype)?);
        g.binary(BinaryOp::Mul, dy, y)
    })?;
    g.like(product, |g| g.sum(product, &[value_dim]))
}

/// Where each dim of the mask is among those of the scores.
fn order_of(mask: &[DimFactors], scores: &[DimFactors]) -> Vec<usize> {
    mask.iter().map(|d| scores.iter().position(|s| s == d).expect("a mask has dims of the scores")).collect()
}
