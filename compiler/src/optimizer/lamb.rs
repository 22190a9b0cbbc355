//! LAMB: Adam's direction, as long as the tensor itself is. You et al. 2020, arXiv 1904.00962.

use super::block::{Block, host, learning_rate, spread, tensor_norm};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use dcc_program::kernel::{BinaryOp, CompareOp};

/// `r = m̂ / (√v̂ + ε) + λw`, `w -= lr · ‖w‖/‖r‖ · r` of the whole tensor; where a norm is zero, `w -= lr · r`.
pub(super) fn lamb(graph: &mut Graph, blocks: &mut [Block], betas: (f64, f64), eps: f64) -> Result<()> {
    let mut directions = Vec::with_capacity(blocks.len());
    for block in &mut *blocks {
        block.enter(graph);
        directions.push(direction(graph, block, betas, eps)?);
    }
    let weights: Vec<NodeId> = blocks.iter().map(|block| block.param).collect();
    let weight = tensor_norm(graph, blocks, &weights)?;
    let direction = tensor_norm(graph, blocks, &directions)?;
    let rate = host(graph, |graph| {
        let ratio = graph.binary(BinaryOp::Div, weight, direction)?;
        let (zero, one) = (graph.splat_like(0.0, ratio)?, graph.splat_like(1.0, ratio)?);
        let least = graph.binary(BinaryOp::Min, weight, direction)?;
        let moves = graph.compare(CompareOp::Gt, least, zero)?;
        let trust = graph.select(moves, ratio, one)?;
        let rate = learning_rate(graph)?;
        graph.binary(BinaryOp::Mul, rate, trust)
    })?;
    for (block, direction) in blocks.iter_mut().zip(directions) {
        block.enter(graph);
        block.step(graph, block.param, direction, rate)?;
    }
    Ok(())
}

fn direction(graph: &mut Graph, block: &mut Block, betas: (f64, f64), eps: f64) -> Result<NodeId> {
    let (first, root) = block.moments(graph, block.gradient, betas, eps)?;
    let bias = host(graph, |graph| block.bias_correction(graph, betas.0))?;
    let bias = spread(graph, bias, first)?;
    let first = graph.binary(BinaryOp::Div, first, bias)?;
    let ratio = graph.binary(BinaryOp::Div, first, root)?;
    block.with_l2(graph, ratio)
}
