//! Muon: the momentum of a matrix, made orthogonal. Jordan et al. 2024, kellerjordan.github.io/posts/muon; as `torch.optim.Muon`, in the
//! matrix's own dtype.

use super::MuonScale;
use super::block::{Block, host, learning_rate, mixed, tensor_norm};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{Concatenate, Op, Slice};
use dcc_program::Shape;
use dcc_program::kernel::BinaryOp;

/// Newton and Schulz's iteration `X = aX + (b A + c A²) X`, `A = X Xᵀ`: a polynomial of the singular values, steep at zero.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.775, 2.0315);
const ITERATIONS: usize = 5;
/// The least norm that a matrix is divided by.
const LEAST_NORM: f64 = 1e-7;

/// Whether Muon is for this tensor: a matrix that nothing looks rows up in.
pub(super) fn suits(graph: &Graph, blocks: &[Block]) -> bool {
    let table = |block: &Block| {
        graph.nodes.iter().any(|node| matches!(node.op, Op::Gather(_)) && source(graph, node.operands[0]) == block.param)
    };
    blocks[0].leaf.shape.len() == 2 && !blocks.iter().any(table)
}

/// What a value is a cast of.
fn source(graph: &Graph, mut id: NodeId) -> NodeId {
    while let Op::Cast(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    id
}

/// `m = μm + (1-μ)g`, `U = orthogonal(μm + (1-μ)g)`, `W = (1 - lr λ)W - lr · scale · U` of the whole matrix.
pub(super) fn muon(graph: &mut Graph, blocks: &mut [Block], momentum: f64, scale: MuonScale) -> Result<()> {
    let mut ahead = Vec::with_capacity(blocks.len());
    for block in &mut *blocks {
        block.enter(graph);
        let buffer = block.average(graph, "momentum", momentum, block.gradient)?;
        ahead.push(mixed(graph, buffer, momentum, block.gradient)?);
    }
    let norm = tensor_norm(graph, blocks, &ahead)?;
    let inverse = host(graph, |graph| {
        let norm = graph.binary_scalar(BinaryOp::Max, norm, LEAST_NORM)?;
        let one = graph.splat_like(1.0, norm)?;
        graph.binary(BinaryOp::Div, one, norm)
    })?;
    for (block, value) in blocks.iter().zip(&mut ahead) {
        block.enter(graph);
        *value = block.times(graph, *value, inverse)?;
    }
    let dim = blocks[0].leaf.piece.map_or(0, |piece| piece.dim);
    blocks[0].enter(graph);
    let matrix = if let [one] = ahead[..] { one } else { graph.add(Concatenate { dim }, &ahead)? };
    let shape = graph.ty(matrix).shape.clone();
    let orthogonal = orthogonal(graph, matrix)?;
    let rate = host(graph, |graph| {
        let rate = learning_rate(graph)?;
        graph.scale(rate, scale.of(&shape))
    })?;
    let mut at = 0;
    for block in blocks {
        block.enter(graph);
        let mut start = Shape::from_slice(&[0, 0]);
        let mut limit = shape.clone();
        start[usize::from(dim)] = at;
        at += block.leaf.shape[usize::from(dim)];
        limit[usize::from(dim)] = at;
        let direction = match block.leaf.shape == shape {
            true => orthogonal,
            false => graph.add(Slice { start, limit, stride: Shape::from_slice(&[1, 1]) }, &[orthogonal])?,
        };
        let weight = block.decayed(graph)?;
        block.step(graph, weight, direction, rate)?;
    }
    Ok(())
}

/// `U Vᵀ` of `X = U S Vᵀ`, roughly: singular values in about 0.7 to 1.2.
fn orthogonal(graph: &mut Graph, matrix: NodeId) -> Result<NodeId> {
    let tall = graph.ty(matrix).shape[0] > graph.ty(matrix).shape[1];
    let (a, b, c) = COEFFICIENTS;
    let mut x = matrix;
    for _ in 0..ITERATIONS {
        let (gram, product) = match tall {
            false => ("r k, s k -> r s", "r s, s c -> r c"),
            true => ("k r, k s -> r s", "c s, s r -> c r"),
        };
        let gram = graph.dot(gram, x, x)?;
        let square = graph.dot("r k, k s -> r s", gram, gram)?;
        let (first, second) = (graph.scale(gram, b)?, graph.scale(square, c)?);
        let update = graph.binary(BinaryOp::Add, first, second)?;
        let moved = match tall {
            false => graph.dot(product, update, x)?,
            true => graph.dot(product, x, update)?,
        };
        let kept = graph.scale(x, a)?;
        x = graph.binary(BinaryOp::Add, kept, moved)?;
    }
    Ok(x)
}

impl MuonScale {
    /// What the learning rate is multiplied by, of a matrix.
    fn of(self, shape: &[u64]) -> f64 {
        let (rows, columns) = (shape[0] as f64, shape[1] as f64);
        match self {
            MuonScale::Original => (rows / columns).max(1.0).sqrt(),
            MuonScale::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        }
    }
}
