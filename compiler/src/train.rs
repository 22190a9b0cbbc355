//! The training step: loss, gradients and optimizer around a forward graph, and the evaluation that goes with it.
//!
//! Before: the model's forward graph, its outputs the model's. After: `Training::graph`, whose outputs are named by
//! [`Output`]: the loss, the gradient norm, and the new value of every trained weight and its states.
//! [`updates`] finds the latter by their `Param` leaves.

mod masks;
mod statistics;
#[cfg(test)]
mod tests;

use crate::autodiff::{self, Sums};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::loss::{self, Loss, LossKind, LossOptions};
use crate::ops::{Op, Param};
use crate::optimizer::{self, OptimizerOptions, Update};
use crate::precision::{self, Mixed, Scaler, Stored};
use dcc_program::Glob;
use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::program::{ParamKind, Piece};
use statistics::Use;
use std::borrow::Cow;
use std::collections::BTreeSet;

pub use masks::marked;
pub use statistics::Statistic;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainingOptions {
    pub loss: LossOptions,
    pub optimizer: OptimizerOptions,
    pub selection: Selection,
    /// `--dtype bf16` and `f16`: contractions in a half type, the rest and, unless it says otherwise, all that persists in f32.
    pub mixed: Option<Mixed>,
    /// Whether gradients share their sums over samples: not where the model is cut into parts.
    pub sums: Sums,
}

/// `--train` and `--freeze`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Only these train; what the model says where empty.
    pub train: Vec<Names>,
    /// These do not.
    pub freeze: Vec<Names>,
}

/// Names of parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    Glob(Glob),
    /// The lines of a file, with its path.
    File {
        path: String,
        names: BTreeSet<String>,
    },
}

/// A parameter of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trainable {
    pub name: String,
    /// Other names that flags may use: PyTorch's.
    pub aliases: Vec<String>,
    /// Whether it trains where the flags say nothing.
    pub by_default: bool,
}

/// A training step as graph, and what goes with it.
#[derive(Clone, Debug)]
pub struct Training {
    pub graph: Graph,
    /// The loss without dropout, by [`Output::EvalLoss`] and its kin.
    pub eval: Graph,
    /// The loss that was chosen, for the report.
    pub loss: String,
    /// Its kind, never `Auto`, and the output it is of.
    pub loss_of: (LossKind, String),
    /// The input that holds labels, and the number of classes that they are below.
    pub classes: Option<(String, u64)>,
    /// Names of the parameters that train, sorted: selected, and the loss depends on them.
    pub trained: Vec<String>,
    /// The other parameters, sorted.
    pub frozen: Vec<String>,
    /// As in the options.
    pub mixed: Option<Mixed>,
}

/// What an output of a training or evaluation graph is. Its text is the output's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Output {
    /// `loss`: of the global batch, before the update.
    Loss,
    /// `grad_norm`: before clipping.
    GradNorm,
    /// `loss_scale`: what the gradients of this step were multiplied by while they were computed, in f16.
    LossScale,
    /// `weight:NAME`, `state.m:NAME`, of a piece `weight[DIM,START,END]:NAME`: the value after the step.
    New { name: String, kind: ParamKind, piece: Option<Piece> },
    /// `grad:NAME`, `grad[DIM,START,END]:NAME`.
    Gradient { name: String, piece: Option<Piece> },
    /// `eval_loss`: of the batch.
    EvalLoss,
    /// `eval_accuracy`: of the batch, for cross-entropy.
    EvalAccuracy,
    /// `eval_count`: the labels or elements that both are means over.
    EvalCount,
}

impl TrainingOptions {
    /// The forward graph in the precision that is trained in.
    fn forward<'a>(&self, graph: &'a Graph) -> Result<Cow<'a, Graph>> {
        match self.mixed {
            Some(mixed) => precision::narrow(graph, mixed.half).map(Cow::Owned),
            None => Ok(Cow::Borrowed(graph)),
        }
    }
}

impl Output {
    pub fn text(&self) -> String {
        let part = |piece: &Option<Piece>| match piece {
            Some(Piece { dim, start, end }) => format!("[{dim},{start},{end}]"),
            None => String::new(),
        };
        match self {
            Output::Loss => "loss".to_owned(),
            Output::GradNorm => "grad_norm".to_owned(),
            Output::LossScale => "loss_scale".to_owned(),
            Output::EvalLoss => "eval_loss".to_owned(),
            Output::EvalAccuracy => "eval_accuracy".to_owned(),
            Output::EvalCount => "eval_count".to_owned(),
            Output::New { name, kind: ParamKind::Weight, piece } => format!("weight{}:{name}", part(piece)),
            Output::New { name, kind: ParamKind::State(kind), piece } => format!("state.{kind}{}:{name}", part(piece)),
            Output::Gradient { name, piece } => format!("grad{}:{name}", part(piece)),
        }
    }

    /// Reads what `text` gives.
    pub fn parse(text: &str) -> Option<Output> {
        let Some((head, name)) = text.split_once(':') else {
            use Output::{EvalAccuracy, EvalCount, EvalLoss, GradNorm, Loss, LossScale};
            let plain = [Loss, GradNorm, LossScale, EvalLoss, EvalAccuracy, EvalCount];
            return plain.into_iter().find(|o| o.text() == text);
        };
        let (head, piece) = match head.strip_suffix(']') {
            Some(open) => {
                let (head, numbers) = open.split_once('[')?;
                let mut numbers = numbers.split(',').map(|n| n.parse::<u64>().ok());
                let mut next = || numbers.next().flatten();
                let piece = Piece { dim: u8::try_from(next()?).ok()?, start: next()?, end: next()? };
                (head, Some(piece))
            }
            None => (head, None),
        };
        let name = name.to_owned();
        match head.strip_prefix("state.") {
            Some(kind) => Some(Output::New { name, kind: ParamKind::State(kind.to_owned()), piece }),
            None if head == "weight" => Some(Output::New { name, kind: ParamKind::Weight, piece }),
            None if head == "grad" => Some(Output::Gradient { name, piece }),
            None => None,
        }
    }

    fn new_value(param: &Param) -> Output {
        Output::New { name: param.name.clone(), kind: param.kind.clone(), piece: param.piece }
    }
}

/// The weights and states that a training graph writes back, in the order of its outputs.
pub fn updates(graph: &Graph) -> Vec<Update> {
    let leaf = |name: &str| {
        let output = Output::parse(name)?;
        let same = |n: &crate::graph::Node| matches!(&n.op, Op::Param(p) if Output::new_value(p) == output);
        graph.nodes.iter().position(same).map(|i| NodeId(i as u32))
    };
    graph.outputs.iter().filter_map(|(name, new)| Some(Update { param: leaf(name)?, new: *new })).collect()
}

/// A forward graph with the outputs alone that its training step reads: that of the loss, and statistics. Errors: the loss is not clear.
pub fn needed(forward: &Graph, options: &LossOptions) -> Result<Graph> {
    let of_loss = loss::output_of(forward, options)?;
    let mut graph = forward.clone();
    graph.outputs.retain(|(name, _)| *name == of_loss || Statistic::parse(name).is_some());
    live(&graph)
}

/// Builds the training step of a forward graph and its evaluation.
/// Errors: the loss is not clear, nothing trains, an option is out of range, an op on the way has no gradient.
pub fn train_step(forward: &Graph, trainable: &[Trainable], options: &TrainingOptions) -> Result<Training> {
    let wanted = options.selection.apply(trainable)?;
    let optimizer = OptimizerOptions { no_decay: named(&options.optimizer.no_decay, trainable)?, ..options.optimizer.clone() };
    let forward = options.forward(forward)?;
    let forward: &Graph = &forward;
    let (mut graph, statistics) = statistics::settle(forward, Use::Training)?;
    let loss = loss::attach(&mut graph, &options.loss)?;
    let scaler = options.mixed.and_then(|mixed| mixed.scale).map(|scale| Scaler::new(&mut graph, scale)).transpose()?;
    let (params, gradients) = gradients(&mut graph, (loss.value, scaler), &wanted, options)?;
    let step = optimizer::update(&mut graph, &optimizer, &params, &gradients, scaler)?;
    graph.outputs = vec![(Output::Loss.text(), loss.value), (Output::GradNorm.text(), step.grad_norm)];
    graph.outputs.extend(scaler.map(|scaler| (Output::LossScale.text(), scaler.scale)));
    let moved = statistics::update(&mut graph, &statistics)?;
    for update in step.updates.iter().chain(&moved) {
        let name = Output::new_value(param(&graph, update.param)).text();
        graph.outputs.push((name, update.new));
    }
    let trained: BTreeSet<String> = params.iter().map(|&id| param(&graph, id).name.clone()).collect();
    let frozen: BTreeSet<String> = trainable.iter().map(|t| t.name.clone()).filter(|n| !trained.contains(n)).collect();
    let (mut graph, mut eval) = (live(&graph)?, eval_step(forward, &options.loss)?);
    if let Some(mixed) = options.mixed.filter(|mixed| mixed.parameters == mixed.half) {
        let stored = Stored::of(&graph, mixed.half);
        (graph, eval) = (stored.apply(&graph)?, stored.apply(&eval)?);
    }
    Ok(Training {
        eval,
        graph,
        loss: loss.report,
        loss_of: (loss.kind, loss::output_of(forward, &options.loss)?),
        classes: loss.classes,
        trained: trained.into_iter().collect(),
        frozen: frozen.into_iter().collect(),
        mixed: options.mixed,
    })
}

/// The loss, and its gradient by every trained parameter under its name, without an update; the classes as of [`Training`].
pub fn gradient_step(
    forward: &Graph,
    trainable: &[Trainable],
    options: &TrainingOptions,
) -> Result<(Graph, Option<(String, u64)>)> {
    let wanted = options.selection.apply(trainable)?;
    let forward = options.forward(forward)?;
    let mut graph = for_evaluation(&forward)?;
    let loss = loss::attach(&mut graph, &options.loss)?;
    let (params, gradients) = gradients(&mut graph, (loss.value, None), &wanted, options)?;
    graph.outputs = vec![(Output::Loss.text(), loss.value)];
    for (&leaf, &gradient) in params.iter().zip(&gradients) {
        let Param { name, piece, .. } = param(&graph, leaf).clone();
        graph.outputs.push((Output::Gradient { name, piece }.text(), gradient));
    }
    Ok((live(&graph)?, loss.classes))
}

/// The loss of a batch as evaluation has it: without dropout, without update.
pub fn eval_step(forward: &Graph, options: &LossOptions) -> Result<Graph> {
    let mut graph = for_evaluation(forward)?;
    let Loss { value, count, accuracy, .. } = loss::attach(&mut graph, options)?;
    graph.outputs = vec![(Output::EvalLoss.text(), value), (Output::EvalCount.text(), count)];
    graph.outputs.extend(accuracy.map(|id| (Output::EvalAccuracy.text(), id)));
    live(&graph)
}

/// The forward graph as evaluation has it: nothing dropped, running statistics instead of those of the batch.
pub fn for_evaluation(graph: &Graph) -> Result<Graph> {
    let (graph, _) = statistics::settle(graph, Use::Evaluation)?;
    let (graph, _) = statistics::settle(&masks::marked(&graph)?, Use::Evaluation)?;
    without_dropout(&graph)
}

/// Dropout as the identity. `select(uniform ≥ p, x, 0)` has the mean `(1 - p) x`, which takes its place.
fn without_dropout(graph: &Graph) -> Result<Graph> {
    let out = graph.map(|out, id, node, operands| {
        let Op::Select(_) = node.op else { return Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())) };
        let Some(p) = drop_rate(graph, node.operands[0]) else {
            return Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()));
        };
        if splat(graph, node.operands[2]) != Some(0.0) {
            return Err(graph.broken(id, "a random select that is no dropout"));
        }
        let kept = node.operands[1];
        if graph[kept].op == Op::from(crate::ops::Binary { op: BinaryOp::Mul })
            && let Some(scale) = splat(graph, graph[kept].operands[1])
            && (scale * (1.0 - p) - 1.0).abs() < 1e-6
        {
            return Ok(out[operands[1]].operands[0]);
        }
        out.scale(operands[1], 1.0 - p)
    })?;
    live(&out)
}

/// The p of `uniform ≥ p`.
fn drop_rate(graph: &Graph, condition: NodeId) -> Option<f64> {
    let node = &graph[sliced(graph, condition)];
    match node.op {
        Op::Compare(crate::ops::Compare { op: CompareOp::Ge }) if is_random(graph, node.operands[0]) => {
            splat(graph, node.operands[1])
        }
        _ => None,
    }
}

fn is_random(graph: &Graph, id: NodeId) -> bool {
    matches!(graph[sliced(graph, id)].op, Op::Uniform(_))
}

/// What slices are taken of, in whatever precision.
fn sliced(graph: &Graph, mut id: NodeId) -> NodeId {
    while let Op::Slice(_) | Op::Cast(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    id
}

/// The number that all elements are.
fn splat(graph: &Graph, mut id: NodeId) -> Option<f64> {
    while let Op::BroadcastInDim(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    if let Op::Const(c) = &graph[id].op { Some(c.value()) } else { None }
}

/// Without the nodes that no output needs.
fn live(graph: &Graph) -> Result<Graph> {
    graph.map(|out, _, node, operands| Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())))
}

/// The weights among `names` that `loss` depends on, in node order, and their gradients. Errors: there is none.
fn gradients(
    graph: &mut Graph,
    (loss, scaler): (NodeId, Option<Scaler>),
    names: &BTreeSet<String>,
    options: &TrainingOptions,
) -> Result<(Vec<NodeId>, Vec<NodeId>)> {
    let trains = |id: &NodeId| match &graph[*id].op {
        Op::Param(p) => p.kind == ParamKind::Weight && p.dtype.is_float() && names.contains(&p.name),
        _ => false,
    };
    let wanted: Vec<NodeId> = graph.ids().filter(trains).collect();
    let found = autodiff::gradients_times(graph, loss, scaler.map(|scaler| scaler.scale), &wanted, options.sums)?;
    if found.is_empty() {
        return Err(nothing_trains(names));
    }
    let (params, gradients): (Vec<NodeId>, Vec<NodeId>) = found.into_iter().unzip();
    let gradients = match options.mixed {
        Some(mixed) => precision::sums(graph, &params, &gradients, mixed)?,
        None => gradients,
    };
    Ok((params, gradients))
}

fn param(graph: &Graph, id: NodeId) -> &Param {
    match &graph[id].op {
        Op::Param(param) => param,
        _ => unreachable!("only parameters are updated"),
    }
}

fn nothing_trains(wanted: &BTreeSet<String>) -> Error {
    let what = match wanted.len() {
        0 => "no parameter trains: none is selected".to_owned(),
        n => format!("no parameter trains: the loss depends on none of the {n} selected"),
    };
    Error::usage(what).help("see --train, --freeze and --output")
}

impl Selection {
    /// Names of the parameters that train. Errors: a name or pattern that is no parameter's.
    pub fn apply(&self, trainable: &[Trainable]) -> Result<BTreeSet<String>> {
        for names in self.train.iter().chain(&self.freeze) {
            names.check(trainable)?;
        }
        let any = |list: &[Names], t: &Trainable| list.iter().any(|names| names.contain(t));
        let trains = |t: &&Trainable| match self.train.is_empty() {
            true => t.by_default && !any(&self.freeze, t),
            false => any(&self.train, t) && !any(&self.freeze, t),
        };
        Ok(trainable.iter().filter(trains).map(|t| t.name.clone()).collect())
    }
}

/// Patterns of the model's own names of the parameters that `globs` match, by whatever name. Errors: one that matches none.
fn named(globs: &[Glob], trainable: &[Trainable]) -> Result<Vec<Glob>> {
    let all: Vec<Names> = globs.iter().cloned().map(Names::Glob).collect();
    all.iter().try_for_each(|names| names.check(trainable))?;
    let matched = trainable.iter().filter(|t| all.iter().any(|names| names.contain(t)));
    Ok(matched.map(|t| Glob::literal(&t.name)).collect())
}

impl Names {
    fn contain(&self, t: &Trainable) -> bool {
        let mut all = std::iter::once(&t.name).chain(&t.aliases);
        all.any(|name| match self {
            Names::Glob(glob) => glob.matches(name),
            Names::File { names, .. } => names.contains(name),
        })
    }

    fn check(&self, trainable: &[Trainable]) -> Result<()> {
        let known = |name: &String| trainable.iter().any(|t| t.name == *name || t.aliases.contains(name));
        match self {
            Names::Glob(glob) if !trainable.iter().any(|t| self.contain(t)) => {
                Err(Error::usage(format!("no parameter matches `{}`", glob.0)).help("`dcc inspect MODEL` lists them"))
            }
            Names::File { path, names } => match names.iter().find(|n| !known(n)) {
                Some(name) => Err(Error::usage(format!("`{name}` is no parameter")).at(path)),
                None => Ok(()),
            },
            Names::Glob(_) => Ok(()),
        }
    }
}
