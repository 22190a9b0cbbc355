//! Which tensors of a model are trained, which are held constant, which are known while compiling.
//!
//! PyTorch's dynamo exporter says so itself (`graph_signature`); where its optimizer renamed a parameter, what it says of each
//! node tells what became of it (`trace`). Without a signature, a float tensor of rank 1 and up that the outputs depend on
//! differentiably is a weight, in an initializer or in a Constant node; of PyTorch's older exporter, every named initializer.

mod buffers;
mod fused;
pub(super) mod signature;
pub(super) mod trace;
pub(super) mod warnings;

use std::collections::{BTreeMap, BTreeSet};

use dcc_program::kernel::UnaryOp;
use dcc_program::manifest;

use super::build::Build;
use super::fillers::{self, Fillers};
use super::flatten::Flat;
use super::gains;
use super::known::Known;
use super::literals::{epsilons, literals};
use super::model::Model;
use super::moments::{Moments, moments};
use super::node::ValueId;
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use fused::Fused;
use signature::Signature;
use trace::Trace;

/// Elements up to which a constant that is not trained takes part in folding.
const FOLDED: u64 = 4096;
/// The same for integers and bools, which are shapes, positions and masks.
const FOLDED_INTS: u64 = 1 << 22;

/// What is added under a root and is larger is a bias.
pub(super) const LARGEST_EPSILON: f64 = 1e-2;

/// A tensor that the program keeps: a weight, or a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub tensor: Tensor,
    /// By default; flags of the command line override it.
    pub trained: bool,
    /// A run that begins anew draws it: a weight or a running statistic, no constant or table of the model.
    pub drawn: bool,
    /// It scales a normalised value: `--init` makes it ones.
    pub gain: bool,
    /// Other names of it in the PyTorch module.
    pub aliases: Vec<String>,
    /// The module's parameter that it is the transposed copy of.
    pub transpose_of: Option<String>,
}

impl Parameter {
    pub fn frozen(tensor: Tensor) -> Parameter {
        Parameter { tensor, trained: false, drawn: false, gain: false, aliases: Vec::new(), transpose_of: None }
    }

    /// What a run must know of it, which of the model's parameters `trained` or not.
    pub fn entry(&self, trained: bool) -> manifest::Parameter {
        let (aliases, transpose_of) = (self.aliases.clone(), self.transpose_of.clone());
        manifest::Parameter { trained, drawn: self.drawn, gain: self.gain, aliases, transpose_of }
    }

    /// Names in the PyTorch module, of whatever layout.
    pub fn other_names(&self) -> Vec<String> {
        self.entry(self.trained).other_names()
    }
}

/// By initializer, other names that the module has for it: of tied parameters the file has one.
pub fn aliases(model: &Model) -> BTreeMap<String, Vec<String>> {
    Signature::of(model).map_or_else(BTreeMap::new, |signature| Trace::new(model, &signature).aliases)
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
    signature: Option<Signature>,
    /// What became of the parameters that the signature names and the file does not.
    trace: Trace,
    gains: BTreeSet<String>,
    /// What was said when the model was read.
    notes: Vec<String>,
    /// What it folded into other tensors.
    fused: Fused,
    /// Running statistics, which are never computed with while compiling.
    statistics: BTreeSet<String>,
    /// Those that a training step moves.
    moved: BTreeSet<String>,
    /// Numbers of operators, such as the scales of a Resize.
    literals: BTreeSet<String>,
    /// What is only added to what a root is taken of.
    epsilons: BTreeSet<String>,
    /// What stands for operands that a framework has not.
    fillers: Fillers,
    /// PyTorch wrote the file: module parameters are initializers, and tensors in Constant nodes are not weights.
    from_torch: bool,
    /// By its older exporter, which names nodes after modules; its scalar initializers are the module's.
    from_torchscript: bool,
}

impl Classifier {
    pub(super) fn new(model: &Model, flat: &Flat) -> Classifier {
        let signature = Signature::of(model);
        let trace = signature.as_ref().map_or_else(Trace::default, |signature| Trace::new(model, signature));
        let from_torch = model.proto.producer_name() == "pytorch";
        let from_torchscript = from_torch && model.graph().node.iter().any(|node| node.name().starts_with('/'));
        let (gains, moved, literals) = (gains::gains(model, flat), gains::statistics(flat), literals(flat));
        let epsilons = epsilons(flat);
        let fillers = if signature.is_some() || from_torch { Fillers::default() } else { Fillers::of(model, flat) };
        let fused = Fused::of(model, signature.as_ref());
        let mut notes: Vec<String> = model.notes().cloned().collect();
        // PyTorch's modules say what is a buffer.
        let said = |name: &String| signature.is_some() || from_torch && is_of_module(name) || moved.contains(name);
        let Moments { norms, inputs } = moments(model, flat);
        let open = |names: BTreeSet<String>| names.into_iter().filter(|name| !said(name)).collect::<Vec<_>>();
        let (norms, inputs) = (open(norms), open(inputs));
        notes.extend(warnings::written_out(&norms));
        notes.extend(warnings::standardising(&inputs));
        notes.extend(warnings::filled(&fillers));
        let statistics = moved.iter().cloned().chain(norms).chain(inputs).collect();
        Classifier {
            signature,
            trace,
            gains,
            notes,
            fused,
            statistics,
            moved,
            literals,
            epsilons,
            fillers,
            from_torch,
            from_torchscript,
        }
    }

    /// Whether PyTorch wrote the file.
    pub fn is_from_torch(&self) -> bool {
        self.from_torch
    }

    /// Whether the second half of a recurrent layer's biases is held constant.
    pub fn holds_half(&self, biases: Option<ValueId>) -> bool {
        self.fillers.has_half(biases)
    }

    /// What the exporter did to parameters, and what of the module the file leaves out, for the user to know; `initializers` are those
    /// that the outputs depend on.
    pub fn warnings<'t>(&self, initializers: impl Iterator<Item = &'t Tensor>) -> Vec<String> {
        let mut warnings = self.notes.clone();
        warnings.extend(self.fused.warnings());
        let total = self.signature.iter().flat_map(Signature::parameters).count();
        warnings.extend(warnings::warnings(&self.trace, total));
        let changed = initializers.map(|tensor| tensor.name.as_str()).filter(|name| self.is_changed(name)).collect::<Vec<_>>();
        warnings.extend(warnings::changed(&changed));
        warnings
    }

    /// Whether the module changes it in every call, and the file does not say how.
    fn is_changed(&self, name: &str) -> bool {
        !self.statistics.contains(name) && self.signature.as_ref().is_some_and(|signature| signature.is_changed(name))
    }

    /// Whether the file says that it is a parameter of the module.
    pub fn is_parameter(&self, name: &str) -> bool {
        self.signature.as_ref().and_then(|signature| signature.is_parameter(name)) == Some(true)
    }

    /// Whether nothing but its name tells a parameter from a buffer, and the name leaves it open.
    pub fn may_be_buffer(&self, name: &str) -> bool {
        self.signature.is_none() && self.from_torch && buffers::may_be_buffer(name)
    }

    /// Whether it may as well be a number of the graph, which an exporter gave dims and may have repeated along these. Zeros and ones
    /// are what biases and gains begin as.
    pub fn may_be_number(&self, model: &Model, tensor: &Tensor) -> bool {
        let repeats = || fillers::uniform(tensor, model).is_some_and(|number| number != 0.0 && number != 1.0);
        let is_number = || tensor.elements() == 1 || tensor.elements() <= FOLDED && repeats();
        self.signature.is_none() && !self.from_torch && (self.fillers.perhaps.contains(&tensor.name) || is_number())
    }

    /// The tensor as a value of the graph: known, or a parameter.
    pub fn value(&self, build: &mut Build, model: &Model, tensor: Tensor, origin: Origin) -> Result<Value> {
        if let Some(&number) = self.fillers.whole.get(&tensor.name) {
            return Ok(Known::scalar(tensor.dtype, number).broadcast(&tensor.shape).into());
        }
        let at_hand = match &tensor.data {
            TensorData::External { location, .. } => model.file(location).is_some(),
            TensorData::Inline { .. } | TensorData::Owned(_) => true,
        };
        let class = match at_hand && self.is_epsilon(model, &tensor)? {
            true => Class::Known,
            false => self.class(&tensor, origin),
        };
        match class {
            Class::Known if at_hand => Ok(Known::read(&tensor, &tensor.bytes(model)?)?.into()),
            class => {
                let aliases = self.trace.aliases.get(&tensor.name).cloned().unwrap_or_default();
                let transpose_of = self.trace.transposes.get(&tensor.name).cloned();
                let (trained, gain) = (class == Class::Trained, self.gains.contains(&tensor.name));
                let drawn = trained || self.moved.contains(&tensor.name);
                Ok(build.parameter(Parameter { trained, drawn, gain, aliases, transpose_of, tensor })?.into())
            }
        }
    }

    /// Whether a tensor is one small number that only keeps a root from zero, where nothing says that it is a parameter.
    fn is_epsilon(&self, model: &Model, tensor: &Tensor) -> Result<bool> {
        if self.signature.is_some()
            || !self.epsilons.contains(&tensor.name)
            || tensor.elements() != 1
            || !tensor.dtype.is_float()
        {
            return Ok(false);
        }
        let number = Known::read(tensor, &tensor.bytes(model)?)?.uniform();
        Ok(number.is_some_and(|x| x > 0.0 && x <= LARGEST_EPSILON))
    }

    fn class(&self, tensor: &Tensor, origin: Origin) -> Class {
        if self.statistics.contains(&tensor.name) {
            return Class::Frozen;
        }
        let folded = |limit: u64| if tensor.elements() <= limit { Class::Known } else { Class::Frozen };
        if !tensor.dtype.is_float() {
            return folded(FOLDED_INTS);
        }
        if self.literals.contains(&tensor.name) {
            return folded(FOLDED);
        }
        let Some(signature) = &self.signature else {
            // What other tools made an initializer of.
            let origin = if self.from_torchscript && is_constant_node(&tensor.name) { Origin::Constant } else { origin };
            return match origin {
                // CLIP's `logit_scale`; numbers that the exporter folded are called `onnx::Mul_12`.
                Origin::Initializer if self.from_torchscript && is_of_module(&tensor.name) => Class::Trained,
                _ if tensor.shape.is_empty() => Class::Known,
                Origin::Constant if tensor.elements() <= 1 => Class::Known,
                Origin::Constant if self.from_torch => Class::Frozen,
                _ => Class::Trained,
            };
        };
        match signature.is_parameter(&tensor.name) {
            Some(true) => Class::Trained,
            Some(false) => folded(1),
            None if origin == Origin::Initializer && self.trace.trains(&tensor.name) => Class::Trained,
            // A tensor that flags may name, read in many places.
            None if self.trace.constants.contains(&tensor.name) => folded(1),
            None => folded(FOLDED),
        }
    }
}

/// Whether a TorchScript file calls a parameter or buffer so, not a value of its nodes: `/layer/Add_output_0`, `onnx::Mul_12`.
pub(super) fn is_of_module(name: &str) -> bool {
    !name.contains("::") && !name.starts_with('/')
}

/// Whether a TorchScript file calls the value of a Constant node so: `/layer/Constant_3_output_0`.
fn is_constant_node(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    let number = last.strip_prefix("Constant").and_then(|rest| rest.strip_suffix("_output_0"));
    name.starts_with('/') && number.is_some_and(|n| n.chars().all(|c| c == '_' || c.is_ascii_digit()))
}

/// Marks as not trained what the outputs do not depend on differentiably, whose names it gives, and drops what they do not depend on
/// at all.
pub(super) fn settle(graph: &Graph, parameters: &mut Vec<Parameter>) -> Vec<String> {
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
    let mut unreached = Vec::new();
    parameters.retain_mut(|parameter| {
        let reached = found.get(parameter.tensor.name.as_str());
        if parameter.trained && reached == Some(&false) {
            parameter.trained = false;
            unreached.push(parameter.tensor.name.clone());
        }
        reached.is_some()
    });
    unreached
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
