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
const CALL: &str = "pkg.torch.onnx.fx_node";
const SCOPES: &str = "pkg.torch.onnx.name_scopes";
/// Elements up to which torch's exporter merges initializers of equal value.
const MERGED: i64 = 1024;
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
    /// What `graph_signature` says, by module name.
    signature: Option<BTreeMap<String, Entry>>,
    /// Parameters of the signature that no tensor of the file stands for.
    lost: Vec<String>,
    /// Module names of tied parameters, by the one initializer that stands for them.
    aliases: BTreeMap<String, Vec<String>>,
    gains: BTreeSet<String>,
    /// PyTorch wrote the file: module parameters are initializers, and tensors in Constant nodes are not weights.
    from_torch: bool,
    /// Small tensors with aliases: tied, or merged by the exporter because they started out equal.
    merged: Vec<String>,
}

/// A line of the signature.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// The parameter's name as an input of the exported program, such as `p_transformer_wte_weight`.
    argument: String,
    /// Not a buffer or a constant.
    trained: bool,
}

impl Classifier {
    pub fn new(model: &Model, gains: BTreeSet<String>) -> Classifier {
        let signature = model.metadata(SIGNATURE).map(parse_signature);
        let from_torch = model.proto.producer_name() == "pytorch";
        let mut classifier = Classifier { gains, from_torch, ..Classifier::default() };
        if let Some(signature) = &signature {
            let sizes: BTreeMap<&str, i64> = model
                .graph()
                .initializer
                .iter()
                .map(|tensor| (tensor.name(), tensor.dims.iter().fold(1, |product: i64, &dim| product.saturating_mul(dim))))
                .collect();
            let parameters = signature.iter().filter(|(_, entry)| entry.trained);
            let missing: Vec<(&String, &Entry)> = parameters.filter(|(name, _)| !sizes.contains_key(name.as_str())).collect();
            classifier.aliases = find_aliases(model, signature, &missing);
            let aliased: BTreeSet<&String> = classifier.aliases.values().flatten().collect();
            let lost = missing.iter().filter(|(name, entry)| !aliased.contains(name) && is_used(model, &entry.argument));
            classifier.lost = lost.map(|(name, _)| (*name).clone()).collect();
            let small = |name: &&String| sizes.get(name.as_str()).is_some_and(|&size| size <= MERGED);
            classifier.merged = classifier.aliases.keys().filter(small).cloned().collect();
        }
        classifier.signature = signature;
        classifier
    }

    /// What the exporter did to parameters, for the user to know.
    pub fn warnings(&self) -> Vec<String> {
        let few = |names: &[String]| {
            let shown = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            if names.len() > 3 { shown + ", …" } else { shown }
        };
        let mut warnings = Vec::new();
        if !self.lost.is_empty() {
            let total = self.signature.iter().flatten().filter(|(_, entry)| entry.trained).count();
            let (count, names) = (self.lost.len(), few(&self.lost));
            warnings.push(format!(
                "{count} of the module's {total} parameters are not in the file ({names}): the exporter folded or dropped \
                 them, so training differs from PyTorch's; export with `optimize=False`"
            ));
        }
        if !self.merged.is_empty() {
            let tied: Vec<String> = self.merged.iter().flat_map(|name| self.aliases[name].clone()).collect();
            let (count, names, targets) = (tied.len(), few(&tied), few(&self.merged));
            warnings.push(format!(
                "{count} parameters of the module ({names}) share a tensor of the file ({targets}) and train as one: right if \
                 the module ties them, else the exporter merged equal values; then export with `optimize=False`"
            ));
        }
        warnings
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
                let aliases = self.aliases.get(&tensor.name).cloned().unwrap_or_default();
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
        let listed = self.signature.as_ref().map(|signature| signature.get(&tensor.name).map(|entry| entry.trained));
        match listed {
            Some(Some(true)) => Class::Trained,
            Some(Some(false)) => folded(1),
            // Made by the exporter: out of a parameter where one is missing.
            Some(None) if self.lost.is_empty() => folded(FOLDED),
            Some(None) | None if tensor.shape.is_empty() => Class::Known,
            Some(None) | None if origin == Origin::Constant && tensor.elements() <= 1 => Class::Known,
            Some(None) if tensor.elements() <= 1 => Class::Known,
            None if origin == Origin::Constant && self.from_torch => Class::Frozen,
            Some(None) | None => Class::Trained,
        }
    }
}

/// Lines such as `p_fc_weight: PARAMETER target='fc.weight'` and `b_mask: BUFFER target='mask' persistent=True`.
fn parse_signature(text: &str) -> BTreeMap<String, Entry> {
    let mut entries = BTreeMap::new();
    for line in text.lines() {
        let Some((argument, rest)) = line.split_once(": ") else { continue };
        let kind = rest.split_whitespace().next().unwrap_or_default();
        let target = rest.split_once("target='").and_then(|(_, rest)| rest.split_once('\''));
        if let (Some((target, _)), "PARAMETER" | "BUFFER" | "CONSTANT_TENSOR") = (target, kind) {
            let entry = Entry { argument: argument.trim().to_owned(), trained: kind == "PARAMETER" };
            entries.insert(target.to_owned(), entry);
        }
    }
    entries
}

/// Initializers that stand for other parameters too, by what the exporter says of each node: it came from a call on `%p_wte`
/// or belongs to the module `wte`, but reads `lm_head.weight`.
fn find_aliases(
    model: &Model,
    signature: &BTreeMap<String, Entry>,
    missing: &[(&String, &Entry)],
) -> BTreeMap<String, Vec<String>> {
    let initializers: BTreeSet<&str> = model.graph().initializer.iter().map(|tensor| tensor.name()).collect();
    let mut aliases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for node in &model.graph().node {
        let property = |key| node.metadata_props.iter().find(|entry| entry.key() == key).map_or("", |entry| entry.value());
        let call = property(CALL);
        // `['', 'transformer', 'transformer.wte', 'embedding']`: modules from outside in, then the operator.
        let innermost = property(SCOPES).rsplit('\'').nth(3).unwrap_or_default();
        for (name, entry) in missing {
            let (module, leaf) = name.rsplit_once('.').unwrap_or(("", name));
            let called = mentions(call, &entry.argument);
            let inside = innermost == module && !module.is_empty();
            let own = |input: &str| signature.get(input).is_some_and(|entry| mentions(call, &entry.argument));
            let stands = |input: &&String| {
                let same_leaf = input.rsplit_once('.').is_some_and(|(_, other)| other == leaf);
                initializers.contains(input.as_str()) && same_leaf && (called && !own(input) || inside && own(input))
            };
            let mut others = node.input.iter().filter(stands);
            if let (Some(one), None) = (others.next(), others.next()) {
                let names = aliases.entry(one.clone()).or_default();
                if !names.contains(name) {
                    names.push((*name).clone());
                }
            }
        }
    }
    aliases
}

/// Whether the exported program reads the argument; without its calls in the metadata nobody knows.
fn is_used(model: &Model, argument: &str) -> bool {
    let entries = || model.graph().node.iter().flat_map(|node| &node.metadata_props).filter(|entry| entry.key() == CALL);
    entries().next().is_none() || entries().any(|entry| mentions(entry.value(), argument))
}

/// Whether the text of an FX call has `%argument`.
fn mentions(call: &str, argument: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    call.split('%').skip(1).any(|part| part.strip_prefix(argument).is_some_and(ends))
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
