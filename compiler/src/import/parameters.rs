//! Which tensors of a model are trained, which are held constant, which are known while compiling.
//!
//! PyTorch's dynamo exporter says so itself (`graph_signature`). Without it, a float tensor of rank 1 and up that the
//! outputs depend on differentiably is a weight, in an initializer or in a Constant node.

use std::collections::{BTreeMap, BTreeSet};

use dcc_program::kernel::UnaryOp;

use super::build::Build;
use super::known::Known;
use super::model::Model;
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;

const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";
/// Elements up to which a constant that is not trained takes part in folding.
const FOLDED: u64 = 4096;
/// The same for integers and bools, which are shapes, positions and masks.
const FOLDED_INTS: u64 = 1 << 22;

/// A tensor that the program keeps: a weight, or a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub tensor: Tensor,
    /// By default; flags of the command line override it.
    pub trained: bool,
    /// It scales a normalised value: `--init` makes it ones.
    pub gain: bool,
    /// Other names of it in the PyTorch module.
    pub aliases: Vec<String>,
}

impl Parameter {
    pub fn frozen(tensor: Tensor) -> Parameter {
        Parameter { tensor, trained: false, gain: false, aliases: Vec::new() }
    }
}

/// What holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Initializer,
    /// A Constant node.
    Constant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Known,
    Frozen,
    Trained,
}

/// Decides for each tensor of one model.
#[derive(Clone, Debug, Default)]
pub struct Classifier {
    /// Module names to whether they are parameters (or buffers and constants).
    signature: Option<BTreeMap<String, bool>>,
    /// Parameters of the signature without an initializer of their name.
    missing: Vec<String>,
    /// The initializer that stands for the one missing parameter.
    tied: Option<String>,
    gains: BTreeSet<String>,
    /// PyTorch wrote the file: module parameters are initializers, and tensors in Constant nodes are not weights.
    from_torch: bool,
}

impl Classifier {
    pub fn new(model: &Model, gains: BTreeSet<String>) -> Classifier {
        let signature = model.metadata(SIGNATURE).map(parse_signature);
        let names: BTreeSet<&str> = model.graph().initializer.iter().map(|tensor| tensor.name()).collect();
        let parameters = signature.iter().flatten().filter(|(_, trained)| **trained);
        let missing: Vec<String> =
            parameters.map(|(name, _)| name.clone()).filter(|name| !names.contains(name.as_str())).collect();
        let foreign = |name: &&&str| name.contains('.') && signature.as_ref().is_some_and(|known| !known.contains_key(**name));
        let mut foreign = names.iter().filter(foreign);
        let tied = match (missing.len(), foreign.next(), foreign.next()) {
            (1, Some(one), None) => Some((*one).to_owned()),
            _ => None,
        };
        let from_torch = model.proto.producer_name() == "pytorch";
        Classifier { signature, missing, tied, gains, from_torch }
    }

    /// What the exporter did to parameters, for the user to know.
    pub fn warnings(&self) -> Vec<String> {
        let lost = if self.tied.is_some() { &[] } else { self.missing.as_slice() };
        if lost.is_empty() {
            return Vec::new();
        }
        let total = self.signature.iter().flatten().filter(|(_, trained)| **trained).count();
        let names = lost.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        vec![format!(
            "{} of the module's {total} parameters are not in the file under their names ({names}{}): the exporter merged or \
             folded them, so training differs from PyTorch's; export with `optimize=False`",
            lost.len(),
            if lost.len() > 3 { ", …" } else { "" }
        )]
    }

    /// The tensor as a value of the graph: known, or a parameter.
    pub fn value(&self, build: &mut Build, model: &Model, tensor: Tensor, origin: Origin) -> Result<Value> {
        let at_hand = match &tensor.data {
            TensorData::External { location, .. } => model.file(location).is_some(),
            TensorData::Inline { .. } | TensorData::Owned(_) => true,
        };
        match self.class(&tensor, origin) {
            Class::Known if at_hand => Ok(Known::read(&tensor, &tensor.bytes(model)?)?.into()),
            class => {
                let aliases = match self.tied.as_ref() == Some(&tensor.name) {
                    true => self.missing.clone(),
                    false => Vec::new(),
                };
                let gain = self.gains.contains(&tensor.name);
                Ok(build.parameter(Parameter { trained: class == Class::Trained, gain, aliases, tensor })?.into())
            }
        }
    }

    fn class(&self, tensor: &Tensor, origin: Origin) -> Class {
        let folded = |limit: u64| if tensor.elements() <= limit { Class::Known } else { Class::Frozen };
        if !tensor.dtype.is_float() {
            return folded(FOLDED_INTS);
        }
        let listed = self.signature.as_ref().map(|signature| signature.get(&tensor.name));
        match listed {
            Some(Some(true)) => Class::Trained,
            Some(Some(false)) => folded(1),
            // Made by the exporter: out of a parameter where one is missing.
            Some(None) if self.missing.is_empty() => folded(FOLDED),
            Some(None) | None if tensor.shape.is_empty() => Class::Known,
            Some(None) | None if origin == Origin::Constant && tensor.elements() <= 1 => Class::Known,
            Some(None) if tensor.elements() <= 1 => Class::Known,
            None if origin == Origin::Constant && self.from_torch => Class::Frozen,
            Some(None) | None => Class::Trained,
        }
    }
}

/// Lines such as `p_fc_weight: PARAMETER target='fc.weight'` and `b_mask: BUFFER target='mask' persistent=True`.
fn parse_signature(text: &str) -> BTreeMap<String, bool> {
    let mut kinds = BTreeMap::new();
    for line in text.lines() {
        let Some((_, rest)) = line.split_once(": ") else { continue };
        let kind = rest.split_whitespace().next().unwrap_or_default();
        let target = rest.split_once("target='").and_then(|(_, rest)| rest.split_once('\''));
        if let (Some((target, _)), "PARAMETER" | "BUFFER" | "CONSTANT_TENSOR") = (target, kind) {
            kinds.insert(target.to_owned(), kind == "PARAMETER");
        }
    }
    kinds
}

/// Marks as not trained what the outputs do not depend on differentiably, and drops what they do not depend on at all.
pub(super) fn settle(graph: &Graph, parameters: &mut Vec<Parameter>) {
    let live = graph.live();
    let mut moved = vec![false; graph.nodes.len()];
    for &(_, id) in &graph.outputs {
        moved[id.0 as usize] = graph.ty(id).dtype.is_float();
    }
    let mut found: BTreeMap<&str, bool> = BTreeMap::new();
    for id in graph.ids().rev().filter(|id| live[id.0 as usize]) {
        if let Op::Param(param) = &graph[id].op {
            found.insert(&param.name, moved[id.0 as usize]);
        }
        if moved[id.0 as usize] {
            for (position, &operand) in graph[id].operands.iter().enumerate() {
                moved[operand.0 as usize] |= passes_gradient(graph, id, position);
            }
        }
    }
    parameters.retain_mut(|parameter| {
        let reached = found.get(parameter.tensor.name.as_str());
        parameter.trained &= reached == Some(&true);
        reached.is_some()
    });
}

fn passes_gradient(graph: &Graph, id: NodeId, operand: usize) -> bool {
    let node = &graph[id];
    if !graph.ty(node.operands[operand]).dtype.is_float() {
        return false;
    }
    match &node.op {
        Op::Compare(_) | Op::StopGradient(_) => false,
        Op::Unary(op) => !matches!(op.op, UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::RoundEven | UnaryOp::IsNan),
        _ => node.ty.dtype.is_float(),
    }
}
