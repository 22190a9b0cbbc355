//! Attaches the loss to a forward graph: which one (`auto` included), of which output, against which input.
//!
//! Before: a graph of the model alone. After: it also has the `labels` or `target` input, the loss, and what evaluation counts.
//! Means are sums scaled by one over the global number, so that sharding cannot change them.

mod batch;
mod build;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Input, Op};
use dcc_program::{DType, Mesh, Shape};
use std::fmt;

pub use batch::batch_dims;

/// Name of the input of classes: integers, or each one's share.
pub const LABELS: &str = "labels";
/// Name of the input that a float output is compared with.
pub const TARGET: &str = "target";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossKind {
    #[default]
    Auto,
    CrossEntropy,
    NextToken,
    Mse,
    L1,
    Bce,
    /// The output is the loss.
    Output,
}

/// What the data have under the key `labels`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Labels {
    /// No data were named yet.
    #[default]
    Unknown,
    Absent,
    /// Their global shape, batch included.
    Given(Shape),
}

#[derive(Clone, Debug, PartialEq)]
pub struct LossOptions {
    pub kind: LossKind,
    /// The model output to take; the first if `None`.
    pub output: Option<String>,
    /// The dim of the output that counts classes; by the labels' shape if `None`.
    pub class_dim: Option<usize>,
    /// Labels of this value count nowhere.
    pub ignore_index: i64,
    pub label_smoothing: f64,
    /// Labels are each class's share, floats of the output's shape. So they are without this where their shape is known to be that.
    pub soft_labels: bool,
    pub labels: Labels,
    /// Outputs that one of ONNX's loss operators computes.
    pub loss_outputs: Vec<String>,
}

impl Default for LossOptions {
    fn default() -> LossOptions {
        LossOptions {
            kind: LossKind::Auto,
            output: None,
            class_dim: None,
            ignore_index: -100,
            label_smoothing: 0.0,
            soft_labels: false,
            labels: Labels::Unknown,
            loss_outputs: Vec::new(),
        }
    }
}

/// A loss attached to a graph.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Never `Auto`.
    pub kind: LossKind,
    /// The mean loss: rank 0, f32 or f64.
    pub value: NodeId,
    /// How many elements the mean is of: rank 0, the loss's dtype.
    pub count: NodeId,
    /// Fraction of those whose largest logit is the label's, for cross-entropy.
    pub accuracy: Option<NodeId>,
    /// The input that holds labels, and the number of classes that they are below.
    pub classes: Option<(String, u64)>,
    /// What was chosen, for the report.
    pub report: String,
}

impl LossKind {
    pub const ALL: [LossKind; 7] = [
        LossKind::Auto,
        LossKind::CrossEntropy,
        LossKind::NextToken,
        LossKind::Mse,
        LossKind::L1,
        LossKind::Bce,
        LossKind::Output,
    ];

    pub fn name(self) -> &'static str {
        match self {
            LossKind::Auto => "auto",
            LossKind::CrossEntropy => "cross-entropy",
            LossKind::NextToken => "next-token",
            LossKind::Mse => "mse",
            LossKind::L1 => "l1",
            LossKind::Bce => "bce",
            LossKind::Output => "output",
        }
    }

    pub fn parse(name: &str) -> Option<LossKind> {
        LossKind::ALL.into_iter().find(|k| k.name() == name)
    }
}

impl fmt::Display for LossKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Adds the loss that `options` ask for to `graph`, whose outputs are the model's. The outputs stay as they are.
/// Errors: no such output, one of the wrong dtype or rank, `auto` where the loss is not clear, or an option that is not of that loss.
pub fn attach(graph: &mut Graph, options: &LossOptions) -> Result<Loss> {
    let (kind, name, output) = choose(graph, options)?;
    check_options(kind, options).map_err(|error| error.at(format!("output {name}")))?;
    let before = graph.cursor();
    graph.set_origin(&format!("loss ({kind} of {name})"));
    let output = at_least_f32(graph, output)?;
    let loss = match kind {
        LossKind::CrossEntropy => build::cross_entropy(graph, output, options),
        LossKind::NextToken => build::next_token(graph, output, options),
        LossKind::Mse | LossKind::L1 | LossKind::Bce => build::against_target(graph, kind, output),
        LossKind::Output | LossKind::Auto => build::mean_output(graph, output),
    };
    let mut loss = loss.map_err(|e| e.at(format!("output {name}")))?;
    graph.set_cursor(before);
    let ty = graph.ty(output).text(&Mesh { axes: Vec::new() });
    loss.report = format!("{kind} of output {name} {ty}{}", loss.report);
    Ok(loss)
}

/// An input for the data; the model's own where that is the same. Errors: the model has another of that name.
fn data_input(graph: &mut Graph, input: Input) -> Result<NodeId> {
    let same = |n: &&crate::graph::Node| matches!(&n.op, Op::Input(i) if i.name == input.name && *i != input);
    if let Some(node) = graph.nodes.iter().find(same) {
        let shape = node.ty.shape.as_slice();
        let what = format!("the model has an input `{}` of {} {shape:?} already", input.name, node.ty.dtype.name());
        return Err(Error::usage(what).help("choose --loss output, or rename the model's input"));
    }
    graph.add(input, &[])
}

fn at_least_f32(graph: &mut Graph, x: NodeId) -> Result<NodeId> {
    match graph.ty(x).dtype {
        DType::F16 | DType::BF16 => graph.cast(x, DType::F32),
        _ => Ok(x),
    }
}

/// Errors: an option that the loss makes nothing of.
fn check_options(kind: LossKind, options: &LossOptions) -> Result<()> {
    let plain = LossOptions::default();
    let given: [(&str, bool, &[LossKind]); 4] = [
        ("--label-smoothing", options.label_smoothing != plain.label_smoothing, &[LossKind::CrossEntropy, LossKind::NextToken]),
        ("--ignore-index", options.ignore_index != plain.ignore_index, &[LossKind::CrossEntropy, LossKind::NextToken]),
        ("--class-dim", options.class_dim.is_some(), &[LossKind::CrossEntropy]),
        ("--soft-labels", options.soft_labels, &[LossKind::CrossEntropy]),
    ];
    let Some((flag, _, of)) = given.into_iter().find(|(_, given, of)| *given && !of.contains(&kind)) else { return Ok(()) };
    let names: Vec<&str> = of.iter().map(|kind| kind.name()).collect();
    let error = Error::usage(format!("{flag} does not belong to --loss {kind}"));
    let error = match options.kind {
        LossKind::Auto => error.note(format!("--loss auto has chosen {kind}")),
        _ => error,
    };
    Err(error.help(format!("drop it, or use --loss {}", names.join(" or "))))
}

/// The name of the output that the loss will be of. Errors as [`attach`].
pub fn output_of(graph: &Graph, options: &LossOptions) -> Result<String> {
    choose(graph, options).map(|(_, name, _)| name)
}

/// The loss to build and the output it is of.
fn choose(graph: &Graph, options: &LossOptions) -> Result<(LossKind, String, NodeId)> {
    let marked = |name: &String| options.loss_outputs.contains(name);
    let scalar = |id: NodeId| graph.ty(id).rank() == 0 && graph.ty(id).dtype.is_float();
    let is_loss = |(name, id): &&(String, NodeId)| scalar(*id) || marked(name);
    let auto = options.kind == LossKind::Auto;
    let found = match &options.output {
        Some(name) => graph.outputs.iter().find(|(n, _)| n == name),
        None if auto => graph.outputs.iter().find(is_loss).or(graph.outputs.first()),
        None => graph.outputs.first(),
    };
    let Some((name, id)) = found.cloned() else {
        let names: Vec<&str> = graph.outputs.iter().map(|(n, _)| n.as_str()).collect();
        let wanted = options.output.as_deref().unwrap_or("");
        return Err(Error::usage(format!("the model has no output `{wanted}`")).help(format!("its outputs are {names:?}")));
    };
    let ty = graph.ty(id);
    if !ty.dtype.is_float() {
        let what = format!("the loss cannot be of output `{name}`: it is {}", ty.dtype.name());
        return Err(Error::dtype(what).help("name a float output with --output NAME"));
    }
    if !auto {
        return Ok((options.kind, name, id));
    }
    let integer = |n: &crate::graph::Node| matches!(&n.op, Op::Input(i) if !i.dtype.is_float() && i.dtype != DType::Bool);
    let tokens = graph.nodes.iter().any(integer);
    let kind = match (ty.rank(), &options.labels) {
        _ if ty.rank() == 0 || marked(&name) => LossKind::Output,
        _ if options.soft_labels => LossKind::CrossEntropy,
        (_, Labels::Given(given)) if *given == ty.shape => {
            let what = format!("the loss of output `{name}` is not clear: labels have its shape {:?}", ty.shape.as_slice());
            let note = "shares of classes are for --loss cross-entropy; for mse, l1 or bce the array is `target` (--map labels=target)";
            return Err(Error::unclear_loss(what).note(note).help("say --loss cross-entropy, mse, l1 or bce"));
        }
        (3, Labels::Given(_)) if tokens => LossKind::CrossEntropy,
        (3, _) if tokens => LossKind::NextToken,
        (2, Labels::Given(_) | Labels::Unknown) => LossKind::CrossEntropy,
        _ => {
            let what = format!("the loss of output `{name}` of shape {:?} is not clear", ty.shape.as_slice());
            let error = match options.labels {
                Labels::Absent => Error::unclear_loss(what)
                    .note("the data have no key `labels`, nor an array that `--map KEY=labels` renames"),
                _ => Error::unclear_loss(what),
            };
            return Err(error.help("say --loss cross-entropy, next-token, mse, l1, bce or output"));
        }
    };
    Ok((kind, name, id))
}
