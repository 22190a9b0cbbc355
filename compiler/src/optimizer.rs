//! Optimizer updates as graph: PyTorch's formulas (`torch.optim.{SGD, Adam, AdamW}`, `clip_grad_norm_`), in phase update.
//!
//! Numbers that PyTorch computes on the host (bias corrections, step size) are f64 scalars here, cast where they meet a tensor.
//! Every node with a parameter's dims has `grad_of = Value(parameter)`.

use crate::error::{Error, Result};
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::{Cast, Const, GradSum, Op, Param, Scalar};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::program::{ParamKind, ScalarKind};
use dcc_program::{DType, Glob};

/// `of` of the `GradSum` that adds the squares of all gradients: no value's gradient. `place` gives each term to the stage that
/// owns its parameter and sums over ranks and stages once.
pub const NORM_SUM: u32 = u32::MAX;

/// `of` of the `GradSum` that stands for a gradient in that sum. `place` makes it the shard of a data-parallel rank, whether or not the
/// gradient is sharded: then the norm has the same bits however ranks share the optimizer's state.
pub const NORM_TERM: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    Sgd { momentum: f64, nesterov: bool },
    Adam { betas: (f64, f64), eps: f64, decay: AdamDecay },
}

/// How weight decay enters Adam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdamDecay {
    /// Added to the gradient: `adam`.
    L2,
    /// Taken off the weight: `adamw`. Loshchilov and Hutter 2019, arXiv 1711.05101.
    Decoupled,
}

/// Which trained parameters decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    #[default]
    All,
    /// Those with two dims or more.
    Matrices,
}

#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerOptions {
    pub optimizer: Optimizer,
    pub weight_decay: f64,
    pub decay: Decay,
    /// Parameters that do not decay.
    pub no_decay: Vec<Glob>,
    /// Largest global gradient norm.
    pub grad_clip: Option<f64>,
}

impl Default for OptimizerOptions {
    fn default() -> OptimizerOptions {
        OptimizerOptions {
            optimizer: Optimizer::Adam { betas: (0.9, 0.999), eps: 1e-8, decay: AdamDecay::Decoupled },
            weight_decay: 0.0,
            decay: Decay::All,
            no_decay: Vec::new(),
            grad_clip: None,
        }
    }
}

/// One persistent tensor and its value after the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The `Param` leaf: a weight, or a state.
    pub param: NodeId,
    pub new: NodeId,
}

#[derive(Clone, Debug)]
pub struct Step {
    /// Global norm of the gradients before clipping: rank 0, f32 or f64.
    pub grad_norm: NodeId,
    /// Each weight followed by its states.
    pub updates: Vec<Update>,
}

impl OptimizerOptions {
    /// Errors: a rate, momentum or bound out of range.
    pub fn check(&self) -> Result<()> {
        let unit = |x: f64| (0.0..1.0).contains(&x);
        let wrong = |what: String| Err(Error::usage(what));
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return wrong(format!("--weight-decay {} is negative or not finite", self.weight_decay));
        }
        if let Some(clip) = self.grad_clip.filter(|&c| !(c > 0.0 && c.is_finite())) {
            return wrong(format!("--grad-clip {clip} is not a positive number"));
        }
        match self.optimizer {
            Optimizer::Sgd { momentum, .. } if !unit(momentum) => wrong(format!("--momentum {momentum} is not in [0, 1)")),
            Optimizer::Sgd { momentum: 0.0, nesterov: true } => wrong("--nesterov needs a --momentum above 0".to_owned()),
            Optimizer::Adam { betas: (a, b), .. } if !unit(a) || !unit(b) => {
                wrong(format!("--betas {a},{b} are not in [0, 1)"))
            }
            Optimizer::Adam { eps, .. } if !(eps >= 0.0 && eps.is_finite()) => wrong(format!("--eps {eps} is negative")),
            _ => Ok(()),
        }
    }

    /// The decay of a parameter of that name and rank (of the whole tensor).
    fn decay_of(&self, param: &Param) -> f64 {
        let excluded = self.decay == Decay::Matrices && param.shape.len() < 2 || Glob::any(&self.no_decay, &param.name);
        if excluded { 0.0 } else { self.weight_decay }
    }
}

/// Adds the updates of `params` by their `gradients` to `graph`. The cursor ends where it was.
pub fn update(graph: &mut Graph, options: &OptimizerOptions, params: &[NodeId], gradients: &[NodeId]) -> Result<Step> {
    options.check()?;
    let before = graph.cursor();
    graph.set_phase(Phase::Update);
    graph.set_grad_of(None);
    graph.set_origin("optimizer: gradient norm");
    let norm = global_norm(graph, params, gradients)?;
    let clip = options.grad_clip.map(|bound| clip_factor(graph, norm, bound)).transpose()?;
    let norm_dtype = params.iter().map(|&p| graph.ty(p).dtype).max().map_or(DType::F32, |d| d.max(DType::F32));
    let grad_norm = graph.cast(norm, norm_dtype)?;
    let mut updates = Vec::new();
    for (&param, &gradient) in params.iter().zip(gradients) {
        let Op::Param(leaf) = graph[param].op.clone() else {
            return Err(graph.broken(param, "only parameters are updated"));
        };
        graph.set_origin(&format!("optimizer: {}", leaf.name));
        graph.set_grad_of(Some(GradOf::Value(param)));
        let decay = options.decay_of(&leaf);
        let mut tensor = Tensor { graph, leaf, param, decay, updates: &mut updates };
        let gradient = match clip {
            Some(factor) => tensor.times(gradient, factor)?,
            None => gradient,
        };
        match options.optimizer {
            Optimizer::Sgd { momentum, nesterov } => tensor.sgd(gradient, momentum, nesterov)?,
            Optimizer::Adam { betas, eps, decay } => tensor.adam(gradient, betas, eps, decay)?,
        }
    }
    graph.set_cursor(before);
    Ok(Step { grad_norm, updates })
}

/// `√Σ g²` over all gradients, in f64: squares of f32 neither lose digits in long sums nor overflow.
fn global_norm(graph: &mut Graph, params: &[NodeId], gradients: &[NodeId]) -> Result<NodeId> {
    let mut sums = Vec::with_capacity(gradients.len());
    for (&param, &gradient) in params.iter().zip(gradients) {
        graph.set_grad_of(Some(GradOf::Value(param)));
        let term = graph.add(GradSum { of: NORM_TERM }, &[gradient])?;
        graph.set_grad_of(None);
        let wide = graph.cast(term, DType::F64)?;
        let square = graph.binary(BinaryOp::Mul, wide, wide)?;
        let dims: Vec<usize> = (0..graph.ty(gradient).rank()).collect();
        sums.push(graph.sum(square, &dims)?);
    }
    let total = graph.add(GradSum { of: NORM_SUM }, &sums)?;
    graph.unary(UnaryOp::Sqrt, total)
}

/// `min(1, bound / (norm + 1e-6))`, f64.
fn clip_factor(graph: &mut Graph, norm: NodeId, bound: f64) -> Result<NodeId> {
    let safe = graph.binary_scalar(BinaryOp::Add, norm, 1e-6)?;
    let bound = graph.splat_like(bound, norm)?;
    let ratio = graph.binary(BinaryOp::Div, bound, safe)?;
    graph.binary_scalar(BinaryOp::Min, ratio, 1.0)
}

/// One parameter being updated.
struct Tensor<'a> {
    graph: &'a mut Graph,
    leaf: Param,
    param: NodeId,
    decay: f64,
    updates: &'a mut Vec<Update>,
}

impl Tensor<'_> {
    /// `buf = momentum buf + g` from zero; the step is `g + momentum buf` with Nesterov, else `buf`.
    fn sgd(&mut self, gradient: NodeId, momentum: f64, nesterov: bool) -> Result<()> {
        let at = self.updates.len();
        let gradient = self.with_l2(gradient)?;
        let mut step = gradient;
        if momentum != 0.0 {
            let buffer = self.state("momentum")?;
            let old = self.graph.scale(buffer, momentum)?;
            let new = self.graph.binary(BinaryOp::Add, old, gradient)?;
            self.updates.push(Update { param: buffer, new });
            step = new;
            if nesterov {
                let ahead = self.graph.scale(new, momentum)?;
                step = self.graph.binary(BinaryOp::Add, gradient, ahead)?;
            }
        }
        let rate = self.host(learning_rate)?;
        let step = self.times(step, rate)?;
        let new = self.graph.binary(BinaryOp::Sub, self.param, step)?;
        self.updates.insert(at, Update { param: self.param, new });
        Ok(())
    }

    /// `m = β₁m + (1-β₁)g`, `v = β₂v + (1-β₂)g²`, `w -= lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε)`.
    fn adam(&mut self, gradient: NodeId, betas: (f64, f64), eps: f64, decay: AdamDecay) -> Result<()> {
        let at = self.updates.len();
        let mut weight = self.param;
        let mut gradient = gradient;
        match decay {
            AdamDecay::L2 => gradient = self.with_l2(gradient)?,
            AdamDecay::Decoupled if self.decay != 0.0 => {
                let decay = self.decay;
                let kept = self.host(|graph| {
                    let rate = learning_rate(graph)?;
                    let lost = graph.scale(rate, -decay)?;
                    graph.binary_scalar(BinaryOp::Add, lost, 1.0)
                })?;
                weight = self.times(weight, kept)?;
            }
            AdamDecay::Decoupled => {}
        }
        let first = self.average("m", betas.0, gradient)?;
        let square = self.graph.binary(BinaryOp::Mul, gradient, gradient)?;
        let second = self.average("v", betas.1, square)?;
        let root = self.graph.unary(UnaryOp::Sqrt, second)?;
        let correction = self.host(|graph| {
            let bias = bias_correction(graph, betas.1)?;
            graph.unary(UnaryOp::Sqrt, bias)
        })?;
        let correction = self.spread(correction)?;
        let root = self.graph.binary(BinaryOp::Div, root, correction)?;
        let root = self.graph.binary_scalar(BinaryOp::Add, root, eps)?;
        let rate = self.host(|graph| {
            let rate = learning_rate(graph)?;
            let bias = bias_correction(graph, betas.0)?;
            graph.binary(BinaryOp::Div, rate, bias)
        })?;
        let ratio = self.graph.binary(BinaryOp::Div, first, root)?;
        let step = self.times(ratio, rate)?;
        let new = self.graph.binary(BinaryOp::Sub, weight, step)?;
        self.updates.insert(at, Update { param: self.param, new });
        Ok(())
    }

    /// The new value of the state `kind`, a running average of `x`.
    fn average(&mut self, kind: &str, beta: f64, x: NodeId) -> Result<NodeId> {
        let state = self.state(kind)?;
        let old = self.graph.scale(state, beta)?;
        let part = self.graph.scale(x, 1.0 - beta)?;
        let new = self.graph.binary(BinaryOp::Add, old, part)?;
        self.updates.push(Update { param: state, new });
        Ok(new)
    }

    fn state(&mut self, kind: &str) -> Result<NodeId> {
        self.graph.add(Param { kind: ParamKind::State(kind.to_owned()), ..self.leaf.clone() }, &[])
    }

    fn with_l2(&mut self, gradient: NodeId) -> Result<NodeId> {
        if self.decay == 0.0 {
            return Ok(gradient);
        }
        let pull = self.graph.scale(self.param, self.decay)?;
        self.graph.binary(BinaryOp::Add, gradient, pull)
    }

    /// `x` times a host scalar.
    fn times(&mut self, x: NodeId, scalar: NodeId) -> Result<NodeId> {
        let scalar = self.spread(scalar)?;
        self.graph.binary(BinaryOp::Mul, x, scalar)
    }

    /// A host scalar in the parameter's dtype and shape.
    fn spread(&mut self, scalar: NodeId) -> Result<NodeId> {
        let ty = self.graph.ty(self.param).clone();
        let scalar = match self.graph.ty(scalar).dtype == ty.dtype {
            true => scalar,
            false => self.host(|graph| graph.add(Cast { dtype: ty.dtype }, &[scalar]))?,
        };
        self.graph.broadcast(scalar, &ty.shape, &[])
    }

    /// Builds scalars, which are no parameter's.
    fn host(&mut self, build: impl FnOnce(&mut Graph) -> Result<NodeId>) -> Result<NodeId> {
        let of = self.graph.cursor().grad_of;
        self.graph.set_grad_of(None);
        let scalar = build(self.graph);
        self.graph.set_grad_of(of);
        scalar
    }
}

fn learning_rate(graph: &mut Graph) -> Result<NodeId> {
    graph.add(Scalar { kind: ScalarKind::LearningRate, dtype: DType::F64 }, &[])
}

/// `1 - βᵗ`, t from 1.
fn bias_correction(graph: &mut Graph, beta: f64) -> Result<NodeId> {
    let step = graph.add(Scalar { kind: ScalarKind::Step, dtype: DType::I64 }, &[])?;
    let step = graph.cast(step, DType::F64)?;
    let beta = graph.add(Const::float(DType::F64, beta), &[])?;
    let power = graph.binary(BinaryOp::Pow, beta, step)?;
    let one = graph.add(Const::float(DType::F64, 1.0), &[])?;
    graph.binary(BinaryOp::Sub, one, power)
}
