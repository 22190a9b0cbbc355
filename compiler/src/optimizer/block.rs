//! A tensor being updated: what all optimizers' formulas are built of.

use super::Update;
use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId};
use crate::ops::{Cast, Const, GradSum, Param, Scalar};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::program::{ParamKind, Piece, ScalarKind};
use dcc_program::{DType, Shape};

/// `of` of the `GradSum` that adds scalars of all pieces of one tensor. `place` gives each term to the stages that hold its piece.
pub const TENSOR_SUM: u32 = u32::MAX - 2;

/// Elements that one thread sums in the time that others take to begin.
const LARGE: u64 = 1 << 16;

/// A parameter, or a piece of one, with its gradient.
pub(super) struct Block {
    pub leaf: Param,
    pub param: NodeId,
    pub gradient: NodeId,
    pub decay: f64,
    /// Of the step, from 1, f64, where it is not that of the run.
    pub number: Option<NodeId>,
    new: Option<NodeId>,
    states: Vec<Update>,
}

impl Block {
    pub fn new(leaf: Param, param: NodeId, gradient: NodeId, decay: f64) -> Block {
        Block { leaf, param, gradient, decay, number: None, new: None, states: Vec::new() }
    }

    /// What is built from here on is of this block.
    pub fn enter(&self, graph: &mut Graph) {
        graph.set_origin(&format!("optimizer: {}", self.leaf.name));
        graph.set_grad_of(Some(GradOf::Value(self.param)));
    }

    /// The weight followed by its states.
    pub fn updates(self) -> impl Iterator<Item = Update> {
        let weight = self.new.map(|new| Update { param: self.param, new });
        weight.into_iter().chain(self.states)
    }

    /// The weight after the step.
    pub fn replace(&mut self, new: NodeId) {
        self.new = Some(new);
    }

    /// `weight - rate · direction`, by a host scalar.
    pub fn step(&mut self, graph: &mut Graph, weight: NodeId, direction: NodeId, rate: NodeId) -> Result<()> {
        let step = self.times(graph, direction, rate)?;
        let new = graph.binary(BinaryOp::Sub, weight, step)?;
        self.replace(new);
        Ok(())
    }

    /// A state with the block's dims.
    pub fn state(&self, graph: &mut Graph, kind: &str) -> Result<NodeId> {
        graph.add(Param { kind: ParamKind::State(kind.to_owned()), ..self.leaf.clone() }, &[])
    }

    /// A state with dims of its own, of the piece that it is said to be of.
    pub fn state_of(&self, graph: &mut Graph, kind: &str, shape: Shape, piece: Option<Piece>) -> Result<NodeId> {
        graph.add(Param { kind: ParamKind::State(kind.to_owned()), shape, piece, ..self.leaf.clone() }, &[])
    }

    /// The value of a state after the step.
    pub fn set(&mut self, state: NodeId, new: NodeId) {
        self.states.push(Update { param: state, new });
    }

    /// The new value of the state `kind`, a running average of `x`: `β state + (1 - β) x`.
    pub fn average(&mut self, graph: &mut Graph, kind: &str, beta: f64, x: NodeId) -> Result<NodeId> {
        let state = self.state(graph, kind)?;
        let new = mixed(graph, state, beta, x)?;
        self.set(state, new);
        Ok(new)
    }

    /// The gradient and the pull of L2 regularisation.
    pub fn with_l2(&self, graph: &mut Graph, gradient: NodeId) -> Result<NodeId> {
        if self.decay == 0.0 {
            return Ok(gradient);
        }
        let pull = graph.scale(self.param, self.decay)?;
        graph.binary(BinaryOp::Add, gradient, pull)
    }

    /// The weight after decoupled decay: `(1 - lr λ) w`. Loshchilov and Hutter 2019, arXiv 1711.05101.
    pub fn decayed(&self, graph: &mut Graph) -> Result<NodeId> {
        if self.decay == 0.0 {
            return Ok(self.param);
        }
        let kept = host(graph, |graph| {
            let rate = learning_rate(graph)?;
            let lost = graph.scale(rate, -self.decay)?;
            graph.binary_scalar(BinaryOp::Add, lost, 1.0)
        })?;
        self.times(graph, self.param, kept)
    }

    /// The number of the step, from 1, f64.
    pub fn step_number(&self, graph: &mut Graph) -> Result<NodeId> {
        if let Some(number) = self.number {
            return Ok(number);
        }
        let step = graph.add(Scalar { kind: ScalarKind::Step, dtype: DType::I64 }, &[])?;
        graph.cast(step, DType::F64)
    }

    /// `1 - βᵗ`, t from 1.
    pub fn bias_correction(&self, graph: &mut Graph, beta: f64) -> Result<NodeId> {
        let step = self.step_number(graph)?;
        let beta = graph.add(Const::float(DType::F64, beta), &[])?;
        let power = graph.binary(BinaryOp::Pow, beta, step)?;
        let one = graph.add(Const::float(DType::F64, 1.0), &[])?;
        graph.binary(BinaryOp::Sub, one, power)
    }

    /// `x`, of the weight's dtype, times a host scalar.
    pub fn times(&self, graph: &mut Graph, x: NodeId, scalar: NodeId) -> Result<NodeId> {
        let scalar = spread(graph, scalar, x)?;
        graph.binary(BinaryOp::Mul, x, scalar)
    }
}

/// `β a + (1 - β) b`.
pub(super) fn mixed(graph: &mut Graph, a: NodeId, beta: f64, b: NodeId) -> Result<NodeId> {
    let old = graph.scale(a, beta)?;
    let part = graph.scale(b, 1.0 - beta)?;
    graph.binary(BinaryOp::Add, old, part)
}

/// A host scalar in the dtype and shape of `like`.
pub(super) fn spread(graph: &mut Graph, scalar: NodeId, like: NodeId) -> Result<NodeId> {
    let ty = graph.ty(like).clone();
    let scalar = match graph.ty(scalar).dtype == ty.dtype {
        true => scalar,
        false => host(graph, |graph| graph.add(Cast { dtype: ty.dtype }, &[scalar]))?,
    };
    graph.broadcast(scalar, &ty.shape, &[])
}

/// Builds scalars, which are no parameter's.
pub(super) fn host(graph: &mut Graph, build: impl FnOnce(&mut Graph) -> Result<NodeId>) -> Result<NodeId> {
    let of = graph.cursor().grad_of;
    graph.set_grad_of(None);
    let scalar = build(graph);
    graph.set_grad_of(of);
    scalar
}

pub(super) fn learning_rate(graph: &mut Graph) -> Result<NodeId> {
    graph.add(Scalar { kind: ScalarKind::LearningRate, dtype: DType::F64 }, &[])
}

/// `Σ x²` of a value with the dims of `param`, f64: squares of f32 neither lose digits in long sums nor overflow. Summed by the shards of
/// data-parallel ranks, sharded or not, so that it has the same bits however these share the optimizer's state. Rows of a large one
/// are summed first, their sums after them: rows are a kernel's outer loop, which threads share, as they can't one sum.
pub(super) fn sum_of_squares(graph: &mut Graph, param: NodeId, x: NodeId) -> Result<NodeId> {
    let of = graph.cursor().grad_of;
    graph.set_grad_of(Some(GradOf::Value(param)));
    let term = graph.add(GradSum { of: super::NORM_TERM }, &[x])?;
    graph.set_grad_of(None);
    let wide = graph.cast(term, DType::F64)?;
    let mut sum = graph.binary(BinaryOp::Mul, wide, wide)?;
    let rank = graph.ty(x).rank();
    if rank > 1 && graph.ty(x).elements() > LARGE {
        sum = graph.sum(sum, &(1..rank).collect::<Vec<_>>())?;
    }
    let left: Vec<usize> = (0..graph.ty(sum).rank()).collect();
    sum = graph.sum(sum, &left)?;
    graph.set_grad_of(of);
    Ok(sum)
}

/// `√Σ x²` over all pieces of one tensor, f64.
pub(super) fn tensor_norm(graph: &mut Graph, blocks: &[Block], values: &[NodeId]) -> Result<NodeId> {
    host(graph, |graph| {
        let sums = blocks.iter().zip(values).map(|(block, &value)| sum_of_squares(graph, block.param, value));
        let sums: Vec<NodeId> = sums.collect::<Result<_>>()?;
        let total = graph.add(GradSum { of: TENSOR_SUM }, &sums)?;
        graph.unary(UnaryOp::Sqrt, total)
    })
}

/// Elements of a whole tensor.
pub(super) fn elements(blocks: &[Block]) -> u64 {
    blocks.iter().map(|block| block.leaf.shape.iter().product::<u64>()).sum()
}
