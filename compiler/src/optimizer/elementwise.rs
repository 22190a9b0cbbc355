//! Optimizers that know nothing but the element: a shard's update is a shard of the update.

use super::AdamDecay;
use super::block::{Block, host, learning_rate, mixed, spread};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use dcc_program::kernel::{BinaryOp, UnaryOp};

impl Block {
    /// `buf = momentum buf + g` from zero; the step is `g + momentum buf` with Nesterov, else `buf`.
    pub(super) fn sgd(&mut self, graph: &mut Graph, momentum: f64, nesterov: bool) -> Result<()> {
        let gradient = self.with_l2(graph, self.gradient)?;
        let direction = self.with_momentum(graph, gradient, momentum, nesterov)?;
        let rate = host(graph, learning_rate)?;
        self.step(graph, self.param, direction, rate)
    }

    fn with_momentum(&mut self, graph: &mut Graph, gradient: NodeId, momentum: f64, nesterov: bool) -> Result<NodeId> {
        if momentum == 0.0 {
            return Ok(gradient);
        }
        let buffer = self.state(graph, "momentum")?;
        let old = graph.scale(buffer, momentum)?;
        let new = graph.binary(BinaryOp::Add, old, gradient)?;
        self.set(buffer, new);
        if !nesterov {
            return Ok(new);
        }
        let ahead = graph.scale(new, momentum)?;
        graph.binary(BinaryOp::Add, gradient, ahead)
    }

    /// `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`, `w -= lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε)`. Kingma and Ba 2015, arXiv 1412.6980.
    pub(super) fn adam(&mut self, graph: &mut Graph, betas: (f64, f64), eps: f64, decay: AdamDecay) -> Result<()> {
        let (mut weight, mut gradient) = (self.param, self.gradient);
        match decay {
            AdamDecay::L2 => gradient = self.with_l2(graph, gradient)?,
            AdamDecay::Decoupled => weight = self.decayed(graph)?,
        }
        let (first, root) = self.moments(graph, gradient, betas, eps)?;
        let rate = host(graph, |graph| {
            let rate = learning_rate(graph)?;
            let bias = self.bias_correction(graph, betas.0)?;
            graph.binary(BinaryOp::Div, rate, bias)
        })?;
        let ratio = graph.binary(BinaryOp::Div, first, root)?;
        self.step(graph, weight, ratio, rate)
    }

    /// Adam's `m`, not corrected, and `√v/√(1-β₂ᵗ) + ε`.
    pub(super) fn moments(
        &mut self,
        graph: &mut Graph,
        gradient: NodeId,
        betas: (f64, f64),
        eps: f64,
    ) -> Result<(NodeId, NodeId)> {
        let first = self.average(graph, "m", betas.0, gradient)?;
        let square = graph.binary(BinaryOp::Mul, gradient, gradient)?;
        let second = self.average(graph, "v", betas.1, square)?;
        let root = graph.unary(UnaryOp::Sqrt, second)?;
        let correction = host(graph, |graph| {
            let bias = self.bias_correction(graph, betas.1)?;
            graph.unary(UnaryOp::Sqrt, bias)
        })?;
        let correction = spread(graph, correction, root)?;
        let root = graph.binary(BinaryOp::Div, root, correction)?;
        Ok((first, graph.binary_scalar(BinaryOp::Add, root, eps)?))
    }

    /// `sum += g²`, `w -= lr · g / (√sum + ε)`. Duchi, Hazan and Singer 2011.
    pub(super) fn adagrad(&mut self, graph: &mut Graph, eps: f64) -> Result<()> {
        let gradient = self.with_l2(graph, self.gradient)?;
        let square = graph.binary(BinaryOp::Mul, gradient, gradient)?;
        let state = self.state(graph, "sum")?;
        let sum = graph.binary(BinaryOp::Add, state, square)?;
        self.set(state, sum);
        let root = graph.unary(UnaryOp::Sqrt, sum)?;
        let root = graph.binary_scalar(BinaryOp::Add, root, eps)?;
        let direction = graph.binary(BinaryOp::Div, gradient, root)?;
        let rate = host(graph, learning_rate)?;
        self.step(graph, self.param, direction, rate)
    }

    /// `v = αv + (1-α)g²`; the step is `g / (√v + ε)`, with the mean's square taken off `v` where centered, through momentum where there
    /// is one. Tieleman and Hinton 2012; centered: Graves 2013, arXiv 1308.0850.
    pub(super) fn rms_prop(&mut self, graph: &mut Graph, alpha: f64, eps: f64, momentum: f64, centered: bool) -> Result<()> {
        let gradient = self.with_l2(graph, self.gradient)?;
        let square = graph.binary(BinaryOp::Mul, gradient, gradient)?;
        let mut second = self.average(graph, "v", alpha, square)?;
        if centered {
            let mean = self.average(graph, "mean", alpha, gradient)?;
            let square = graph.binary(BinaryOp::Mul, mean, mean)?;
            second = graph.binary(BinaryOp::Sub, second, square)?;
        }
        let root = graph.unary(UnaryOp::Sqrt, second)?;
        let root = graph.binary_scalar(BinaryOp::Add, root, eps)?;
        let ratio = graph.binary(BinaryOp::Div, gradient, root)?;
        let direction = self.with_momentum(graph, ratio, momentum, false)?;
        let rate = host(graph, learning_rate)?;
        self.step(graph, self.param, direction, rate)
    }

    /// `w = (1 - lr λ)w - lr · sign(β₁m + (1-β₁)g)`, `m = β₂m + (1-β₂)g`. Chen et al. 2023, arXiv 2302.06675.
    pub(super) fn lion(&mut self, graph: &mut Graph, betas: (f64, f64)) -> Result<()> {
        let weight = self.decayed(graph)?;
        let state = self.state(graph, "m")?;
        let ahead = mixed(graph, state, betas.0, self.gradient)?;
        let direction = graph.unary(UnaryOp::Sign, ahead)?;
        let new = mixed(graph, state, betas.1, self.gradient)?;
        self.set(state, new);
        let rate = host(graph, learning_rate)?;
        self.step(graph, weight, direction, rate)
    }
}
