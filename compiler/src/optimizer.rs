//! Optimizer updates as graph, in phase update: PyTorch's formulas where it has them (`torch.optim`, `clip_grad_norm_`), else the papers'.
//!
//! Numbers that PyTorch computes on the host (bias corrections, step size) are f64 scalars here, cast where they meet a tensor.
//! Every node with a parameter's dims has `grad_of = Value(parameter)`. Pieces of one tensor are one tensor to those optimizers that see
//! more than the element.

mod adafactor;
mod block;
mod elementwise;
mod lamb;
mod muon;

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::{GradSum, Op, Param};
use crate::precision::Scaler;
use block::{Block, sum_of_squares};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Glob};

pub use block::TENSOR_SUM;

/// `of` of the `GradSum` that adds the squares of all gradients: no value's gradient. `place` gives each term to the stage that
/// owns its parameter and sums over ranks and stages once.
pub const NORM_SUM: u32 = u32::MAX;

/// `of` of the `GradSum` that stands for a gradient in that sum. `place` makes it the shard of a data-parallel rank, whether or not the
/// gradient is sharded: then the norm has the same bits however ranks share the optimizer's state.
pub const NORM_TERM: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    Sgd {
        momentum: f64,
        nesterov: bool,
    },
    Adam {
        betas: (f64, f64),
        eps: f64,
        decay: AdamDecay,
    },
    Adagrad {
        eps: f64,
    },
    RmsProp {
        /// Of the average of squares.
        alpha: f64,
        eps: f64,
        momentum: f64,
        centered: bool,
    },
    Lion {
        betas: (f64, f64),
    },
    Lamb {
        betas: (f64, f64),
        eps: f64,
    },
    Adafactor {
        /// The least root mean square of a tensor that its rate is in proportion to.
        eps: f64,
    },
    /// Of matrices; AdamW of everything else: vectors, kernels, tables that rows are looked up in.
    Muon {
        momentum: f64,
        scale: MuonScale,
        /// Of AdamW.
        betas: (f64, f64),
        eps: f64,
    },
}

/// How weight decay enters Adam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdamDecay {
    /// Added to the gradient: `adam`.
    L2,
    /// Taken off the weight: `adamw`. Loshchilov and Hutter 2019, arXiv 1711.05101.
    Decoupled,
}

/// What Muon multiplies the learning rate of a matrix by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuonScale {
    /// `√max(1, rows / columns)`.
    #[default]
    Original,
    /// `0.2 √max(rows, columns)`, at which AdamW's rates do. Liu et al. 2025, arXiv 2502.16982.
    MatchRmsAdamw,
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
        let momentum_is = |x: f64| if unit(x) { Ok(()) } else { wrong(format!("--momentum {x} is not in [0, 1)")) };
        let betas_are = |(a, b)| if unit(a) && unit(b) { Ok(()) } else { wrong(format!("--betas {a},{b} are not in [0, 1)")) };
        let eps_is =
            |x: f64| if x >= 0.0 && x.is_finite() { Ok(()) } else { wrong(format!("--eps {x} is negative or not finite")) };
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return wrong(format!("--weight-decay {} is negative or not finite", self.weight_decay));
        }
        if let Some(clip) = self.grad_clip.filter(|&c| !(c > 0.0 && c.is_finite())) {
            return wrong(format!("--grad-clip {clip} is not a positive number"));
        }
        match self.optimizer {
            Optimizer::Sgd { momentum: 0.0, nesterov: true } => wrong("--nesterov needs a --momentum above 0".to_owned()),
            Optimizer::Sgd { momentum, .. } => momentum_is(momentum),
            Optimizer::Adam { betas, eps, .. } | Optimizer::Lamb { betas, eps } => betas_are(betas).and(eps_is(eps)),
            Optimizer::Adagrad { eps } | Optimizer::Adafactor { eps } => eps_is(eps),
            Optimizer::RmsProp { alpha, .. } if !unit(alpha) => wrong(format!("--alpha {alpha} is not in [0, 1)")),
            Optimizer::RmsProp { eps, momentum, .. } => eps_is(eps).and(momentum_is(momentum)),
            Optimizer::Lion { betas } => betas_are(betas),
            Optimizer::Muon { momentum, betas, eps, .. } => momentum_is(momentum).and(betas_are(betas)).and(eps_is(eps)),
        }
    }

    /// Whether a tensor's step depends on more than the element that it moves.
    fn sees_tensors(&self) -> bool {
        matches!(self.optimizer, Optimizer::Lamb { .. } | Optimizer::Adafactor { .. } | Optimizer::Muon { .. })
    }

    /// The decay of a parameter of that name and rank (of the whole tensor).
    fn decay_of(&self, param: &Param) -> f64 {
        let excluded = self.decay == Decay::Matrices && param.shape.len() < 2 || Glob::any(&self.no_decay, &param.name);
        if excluded { 0.0 } else { self.weight_decay }
    }
}

/// Adds the updates of `params` by their `gradients` to `graph`: gradients times the scale of `scaler`, if there is one, which then also
/// skips steps. The cursor ends where it was.
pub fn update(
    graph: &mut Graph,
    options: &OptimizerOptions,
    params: &[NodeId],
    gradients: &[NodeId],
    scaler: Option<Scaler>,
) -> Result<Step> {
    options.check()?;
    let before = graph.cursor();
    graph.set_phase(Phase::Update);
    graph.set_grad_of(None);
    graph.set_origin("optimizer: gradient norm");
    let mut norm = global_norm(graph, params, gradients)?;
    let mut factor = None;
    let overflow = scaler.map(|scaler| scaler.overflows(graph, norm)).transpose()?;
    if let Some(scaler) = scaler {
        let inverse = scaler.inverse(graph)?;
        norm = graph.binary(BinaryOp::Mul, norm, inverse)?;
        factor = Some(inverse);
    }
    if let Some(bound) = options.grad_clip {
        let clip = clip_factor(graph, norm, bound)?;
        factor = Some(factor.map_or(Ok(clip), |factor| graph.binary(BinaryOp::Mul, factor, clip))?);
    }
    let number = scaler.map(|scaler| scaler.step(graph)).transpose()?;
    let norm_dtype = params.iter().map(|&p| graph.ty(p).dtype).max().map_or(DType::F32, |d| d.max(DType::F32));
    let grad_norm = graph.cast(norm, norm_dtype)?;
    let mut tensors: Vec<Vec<Block>> = Vec::new();
    for (&param, &gradient) in params.iter().zip(gradients) {
        let Op::Param(leaf) = graph[param].op.clone() else {
            return Err(graph.broken(param, "only parameters are updated"));
        };
        let decay = options.decay_of(&leaf);
        let mut block = Block::new(leaf, param, gradient, decay);
        block.number = number;
        if let Some(factor) = factor {
            block.enter(graph);
            block.gradient = block.times(graph, gradient, factor)?;
        }
        let same = |tensor: &&mut Vec<Block>| options.sees_tensors() && tensor[0].leaf.name == block.leaf.name;
        match tensors.iter_mut().find(same) {
            Some(tensor) => tensor.push(block),
            None => tensors.push(vec![block]),
        }
    }
    let mut updates = Vec::new();
    for mut tensor in tensors {
        tensor.sort_by_key(|block| block.leaf.piece.map(|piece| piece.start));
        options.optimizer.step(graph, &mut tensor)?;
        for block in tensor {
            block.enter(graph);
            for update in block.updates() {
                updates.push(overflow.map_or(Ok(update), |overflow| unless(graph, overflow, update))?);
            }
        }
    }
    if let (Some(scaler), Some(overflow)) = (scaler, overflow) {
        updates.extend(scaler.updates(graph, overflow)?);
    }
    graph.set_cursor(before);
    Ok(Step { grad_norm, updates })
}

impl Optimizer {
    /// Moves one tensor, which lies in `blocks`.
    fn step(self, graph: &mut Graph, blocks: &mut [Block]) -> Result<()> {
        match self {
            Optimizer::Lamb { betas, eps } => return lamb::lamb(graph, blocks, betas, eps),
            Optimizer::Adafactor { eps } => return adafactor::adafactor(graph, blocks, eps),
            Optimizer::Muon { momentum, scale, .. } if muon::suits(graph, blocks) => {
                return muon::muon(graph, blocks, momentum, scale);
            }
            _ => {}
        }
        blocks.iter_mut().try_for_each(|block| {
            block.enter(graph);
            match self {
                Optimizer::Sgd { momentum, nesterov } => block.sgd(graph, momentum, nesterov),
                Optimizer::Adam { betas, eps, decay } => block.adam(graph, betas, eps, decay),
                Optimizer::Muon { betas, eps, .. } => block.adam(graph, betas, eps, AdamDecay::Decoupled),
                Optimizer::Adagrad { eps } => block.adagrad(graph, eps),
                Optimizer::RmsProp { alpha, eps, momentum, centered } => block.rms_prop(graph, alpha, eps, momentum, centered),
                Optimizer::Lion { betas } => block.lion(graph, betas),
                Optimizer::Lamb { .. } | Optimizer::Adafactor { .. } => unreachable!("they move whole tensors"),
            }
        })
    }
}

/// `√Σ g²` over all gradients, f64.
fn global_norm(graph: &mut Graph, params: &[NodeId], gradients: &[NodeId]) -> Result<NodeId> {
    let sums = params.iter().zip(gradients).map(|(&param, &gradient)| sum_of_squares(graph, param, gradient));
    let sums: Vec<NodeId> = sums.collect::<Result<_>>()?;
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

/// The old value of what a step moves whose gradients overflow.
fn unless(graph: &mut Graph, overflow: NodeId, Update { param, new }: Update) -> Result<Update> {
    let shape = graph.ty(param).shape.clone();
    let overflow = graph.broadcast(overflow, &shape, &[])?;
    Ok(Update { param, new: graph.select(overflow, param, new)? })
}
