//! Adafactor: second moments of a matrix as the product of a column and a row. Shazeer and Stern 2018, arXiv 1804.04235; as
//! `torch.optim.Adafactor`, of dims -2 and -1.

use super::block::{Block, elements, host, learning_rate, spread, tensor_norm};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, UnaryOp};

/// The share of the newest gradient in the second moments is `t` to this power.
const DECAY: f64 = -0.8;

/// `α = max(ε, rms(w)) · min(lr, 1/√t)`, `u = g / √v̂`, `w = (1 - lr λ)w - α u / max(1, rms(u))`, of the whole tensor.
pub(super) fn adafactor(graph: &mut Graph, blocks: &mut [Block], eps: f64) -> Result<()> {
    let tiny = match graph.ty(blocks[0].param).dtype {
        DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    };
    let share = host(graph, |graph| {
        let step = blocks[0].step_number(graph)?;
        let power = graph.splat_like(DECAY, step)?;
        graph.binary(BinaryOp::Pow, step, power)
    })?;
    let seconds = match blocks[0].leaf.shape.len() {
        0 | 1 => blocks.iter_mut().map(|block| whole(graph, block, share)).collect::<Result<Vec<_>>>()?,
        _ => factored(graph, blocks, share, tiny)?,
    };
    let mut directions = Vec::with_capacity(blocks.len());
    for (block, second) in blocks.iter().zip(seconds) {
        block.enter(graph);
        let bounded = graph.binary_scalar(BinaryOp::Max, second, tiny * tiny)?;
        let inverse = graph.unary(UnaryOp::Rsqrt, bounded)?;
        directions.push(graph.binary(BinaryOp::Mul, inverse, block.gradient)?);
    }
    let weights: Vec<NodeId> = blocks.iter().map(|block| block.param).collect();
    let count = (elements(blocks) as f64).sqrt();
    let (weight, direction) = (tensor_norm(graph, blocks, &weights)?, tensor_norm(graph, blocks, &directions)?);
    let rate = host(graph, |graph| {
        let weight = graph.scale(weight, 1.0 / count)?;
        let weight = graph.binary_scalar(BinaryOp::Max, weight, eps)?;
        let step = blocks[0].step_number(graph)?;
        let root = graph.unary(UnaryOp::Rsqrt, step)?;
        let rate = learning_rate(graph)?;
        let rate = graph.binary(BinaryOp::Min, rate, root)?;
        let rate = graph.binary(BinaryOp::Mul, weight, rate)?;
        let direction = graph.scale(direction, 1.0 / count)?;
        let clipped = graph.binary_scalar(BinaryOp::Max, direction, 1.0)?;
        graph.binary(BinaryOp::Div, rate, clipped)
    })?;
    for (block, direction) in blocks.iter_mut().zip(directions) {
        block.enter(graph);
        let weight = block.decayed(graph)?;
        block.step(graph, weight, direction, rate)?;
    }
    Ok(())
}

/// Of a vector, the second moments themselves.
fn whole(graph: &mut Graph, block: &mut Block, share: NodeId) -> Result<NodeId> {
    block.enter(graph);
    let square = graph.binary(BinaryOp::Mul, block.gradient, block.gradient)?;
    let state = block.state(graph, "v")?;
    let new = moved(graph, state, square, share)?;
    block.set(state, new);
    Ok(new)
}

/// `state + share (x - state)`.
fn moved(graph: &mut Graph, state: NodeId, x: NodeId, share: NodeId) -> Result<NodeId> {
    let change = graph.binary(BinaryOp::Sub, x, state)?;
    let share = spread(graph, share, x)?;
    let change = graph.binary(BinaryOp::Mul, change, share)?;
    graph.binary(BinaryOp::Add, state, change)
}

/// A value of a tensor that lies in pieces.
enum Parts {
    /// Each block's own.
    Each(Vec<NodeId>),
    /// One for all, as a mean over the dim that the pieces divide is.
    One(NodeId),
}

impl Parts {
    fn of(&self, block: usize) -> NodeId {
        match self {
            Parts::Each(values) => values[block],
            Parts::One(value) => *value,
        }
    }
}

/// Of each block `row · column / mean(row)`: the states are means of squares over dim -1 and over dim -2.
fn factored(graph: &mut Graph, blocks: &mut [Block], share: NodeId, tiny: f64) -> Result<Vec<NodeId>> {
    let rank = blocks[0].leaf.shape.len();
    let squares = blocks.iter().map(|block| {
        block.enter(graph);
        graph.binary(BinaryOp::Mul, block.gradient, block.gradient)
    });
    let squares = Parts::Each(squares.collect::<Result<_>>()?);
    let rows = mean(graph, blocks, &squares, rank - 1)?;
    let rows = average(graph, blocks, "row", &rows, share)?;
    let columns = mean(graph, blocks, &squares, rank - 2)?;
    let columns = average(graph, blocks, "column", &columns, share)?;
    let heights = mean(graph, blocks, &rows, rank - 2)?;
    let mut seconds = Vec::with_capacity(blocks.len());
    for (at, block) in blocks.iter().enumerate() {
        block.enter(graph);
        let height = graph.binary_scalar(BinaryOp::Max, heights.of(at), tiny)?;
        let mut whole = |x| graph.broadcast_trailing(x, &block.leaf.shape);
        let (row, column, height) = (whole(rows.of(at))?, whole(columns.of(at))?, whole(height)?);
        let product = graph.binary(BinaryOp::Mul, row, column)?;
        seconds.push(graph.binary(BinaryOp::Div, product, height)?);
    }
    Ok(seconds)
}

/// The mean over `dim`, kept with size 1.
fn mean(graph: &mut Graph, blocks: &[Block], values: &Parts, dim: usize) -> Result<Parts> {
    let sum = |graph: &mut Graph, value: NodeId| {
        let mut shape = graph.ty(value).shape.clone();
        let sum = graph.sum(value, &[dim])?;
        shape[dim] = 1;
        graph.reshape(sum, &shape)
    };
    let values = match values {
        Parts::One(value) => {
            let (count, sum) = (graph.ty(*value).shape[dim], sum(graph, *value)?);
            return Ok(Parts::One(graph.scale(sum, 1.0 / count as f64)?));
        }
        Parts::Each(values) => values,
    };
    let mut sums = Vec::with_capacity(blocks.len());
    for (block, &value) in blocks.iter().zip(values) {
        block.enter(graph);
        sums.push((sum(graph, value)?, graph.ty(value).shape[dim]));
    }
    if blocks[0].leaf.piece.is_none_or(|piece| usize::from(piece.dim) != dim) {
        let means = sums.into_iter().map(|(sum, count)| graph.scale(sum, 1.0 / count as f64));
        return Ok(Parts::Each(means.collect::<Result<_>>()?));
    }
    blocks[0].enter(graph);
    let (mut total, mut count) = sums[0];
    for &(sum, more) in &sums[1..] {
        total = graph.binary(BinaryOp::Add, total, sum)?;
        count += more;
    }
    Ok(Parts::One(graph.scale(total, 1.0 / count as f64)?))
}

/// The states `kind`, moved towards `values` by their share.
fn average(graph: &mut Graph, blocks: &mut [Block], kind: &str, values: &Parts, share: NodeId) -> Result<Parts> {
    let each = match values {
        Parts::One(_) => &mut blocks[..1],
        Parts::Each(_) => blocks,
    };
    let mut news = Vec::with_capacity(each.len());
    for (at, block) in each.iter_mut().enumerate() {
        block.enter(graph);
        let (value, piece) = match values {
            Parts::One(value) => (*value, None),
            Parts::Each(values) => (values[at], block.leaf.piece),
        };
        let shape = graph.ty(value).shape.clone();
        let state = block.state_of(graph, kind, shape, piece)?;
        let new = moved(graph, state, value, share)?;
        block.set(state, new);
        news.push(new);
    }
    Ok(match values {
        Parts::One(_) => Parts::One(news[0]),
        Parts::Each(_) => Parts::Each(news),
    })
}
