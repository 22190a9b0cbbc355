//! ONNX bytes to the logical forward graph: global static shapes, core ops only.
//!
//! `Model::decode` reads the protobuf, `flatten` inlines functions and checks the graph, `ops` builds core ops node by node,
//! computing what depends on shapes alone on the way. Limits and errors hold for hostile files: no panic, no work beyond
//! the file's own size and the fold budget.

mod build;
mod contract;
mod control;
mod fillers;
mod flatten;
mod fold;
mod fx;
mod gains;
mod inputs;
mod known;
mod literals;
mod model;
mod moments;
mod node;
mod normal;
mod ops;
mod parameters;
pub mod proto;
mod repair;
mod rescale;
mod schema;
mod shape;
mod sizes;
mod sort;
mod statistics;
mod tensor;
mod value;
mod values;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dcc_program::{DType, Shape};

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::ops::Input;
use build::Build;
use flatten::{Flat, flatten};
use node::{Node, ValueId};
use ops::{Call, batch_norm};
use parameters::{Classifier, Origin};
use rescale::{Guess, Rescale};
use value::Value;

pub use build::is_computed;
pub use inputs::{InputInfo, check_inputs, symbol};
pub use model::Model;
pub use node::index_of;
pub use normal::{Normal, Parts};
pub use ops::{full_name, is_supported, supported};
pub(crate) use parameters::warnings::listed;
pub use parameters::{Parameter, aliases};
pub use sizes::size_inputs;
pub use tensor::{Tensor, TensorData, code, dtype};
pub use values::{Computed, Exposed};

/// What to do about the model's Dropout nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Dropout {
    #[default]
    AsExported,
    /// All of them drop this share.
    Rate(f64),
    Off,
}

/// By what statistics the model's BatchNormalization nodes normalise while training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchNorm {
    /// Those of each of as many parts of the global batch; running ones follow.
    Groups(u64),
    /// The running ones, as they are.
    Frozen,
}

impl Default for BatchNorm {
    fn default() -> BatchNorm {
        BatchNorm::Groups(1)
    }
}

/// What the command line says about the model's shapes.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Sizes of symbolic dims.
    pub dims: BTreeMap<String, u64>,
    /// Samples of one optimizer step.
    pub global_batch: Option<u64>,
    /// The dim of an input that counts samples, where it is not dim 0; `None` for an input that does not.
    pub batch_dims: BTreeMap<String, Option<u8>>,
    /// Inputs whose value is part of the program.
    pub constants: BTreeMap<String, Tensor>,
    pub dropout: Dropout,
    pub batch_norm: BatchNorm,
    /// The output that is trained on, where that is said.
    pub output: Option<String>,
    /// Which values are outputs of the graph.
    pub exposed: Exposed,
}

/// An output of the model; one without elements is not in the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    /// Computed by one of ONNX's loss operators.
    pub is_loss: bool,
    /// `Softmax` or `Sigmoid`, where one of these computes it, and the elements that are normalised together.
    pub normalised_by: Option<(&'static str, u64)>,
}

/// A model as the compiler sees it.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The forward graph; its outputs are the model's, by name.
    pub graph: Graph,
    pub inputs: Vec<InputInfo>,
    pub outputs: Vec<OutputInfo>,
    /// Those that some output depends on.
    pub parameters: Vec<Parameter>,
    /// Those that train and that, by their names, may be buffers of the module: the file does not tell.
    pub buffers: Vec<String>,
    /// Those that train and are one number, alone or repeated, which may be a constant of the graph: the file does not tell.
    pub numbers: Vec<String>,
    /// Samples of one optimizer step; `None` if no input counts samples.
    pub batch: Option<u64>,
    pub opset: i64,
    pub warnings: Vec<String>,
    /// What its nodes compute, where values are exposed.
    pub values: Vec<Computed>,
    /// Of all values, parameters and inputs among them, by their names in the file.
    pub shapes: BTreeMap<String, Shape>,
}

/// Builds the forward graph of `model`. Errors: DCC00xx where the command line leaves a size open, DCC01xx for what is wrong
/// with the model or not supported, at the node.
pub fn onnx(model: &Model, options: &Options) -> Result<Imported> {
    let flat = flatten(model)?;
    check_outputs(&flat, options)?;
    let bound = inputs::bind(&flat, options)?;
    let old = match (bound.baked, bound.batch) {
        (Some(from), Some(to)) if from != to => {
            let as_exported = Options { global_batch: None, ..options.clone() };
            let shapes = import(model, &flat, inputs::bind(&flat, &as_exported)?, options, None)?.1;
            Some(Old { from, to, shapes, proves: None })
        }
        _ => None,
    };
    let imported = import(model, &flat, bound, options, old.clone())?.0;
    match old {
        Some(old) if old.from != 1 => {
            for guess in [Guess::Range, Guess::Constant] {
                prove_guesses(model, &flat, options, Old { proves: Some(guess), ..old.clone() })?;
            }
        }
        _ => {}
    }
    Ok(imported)
}

/// Errors: an output that cannot be imported, where none is chosen that can.
fn check_outputs(flat: &Flat, options: &Options) -> Result<()> {
    let Some((name, error)) = flat.refused.first() else { return Ok(()) };
    let can = |name: &str| flat.outputs.iter().any(|(other, _)| *other == name);
    if options.output.as_deref().is_some_and(can) {
        return Ok(());
    }
    let (other, _) = flat.outputs[0];
    Err(error.clone().note(format!("output `{name}` depends on it; `--output {other}` does without")))
}

/// Errors: DCC0112 where the batch of the file may be a number that only happens to be as large.
fn prove_guesses(model: &Model, flat: &Flat, options: &Options, old: Old) -> Result<()> {
    // One sample would go with everything.
    let to = if old.to > 1 { old.to } else { old.from + 1 };
    let exposed = match &options.exposed {
        Exposed::All => Exposed::Outputs,
        outputs => outputs.clone(),
    };
    let options = Options { global_batch: Some(to), exposed, ..options.clone() };
    import(model, flat, inputs::bind(flat, &options)?, &options, Some(Old { to, ..old })).map(drop)
}

/// Shapes of all values at the batch of the file.
#[derive(Clone)]
struct Old {
    from: u64,
    to: u64,
    shapes: Vec<Option<Shape>>,
    /// What is guessed and opaque.
    proves: Option<Guess>,
}

impl Old {
    fn help(&self) -> String {
        format!("use --global-batch-size {}, or export with a symbolic batch dim", self.from)
    }

    fn check_guesses(&self, build: &Build) -> Result<()> {
        let Some(guess) = rescale::unproven(&build.graph, &build.indexed) else { return Ok(()) };
        let from = self.from;
        let rest: String = build.graph.ty(guess).shape[1..].iter().map(|size| format!(", {size}")).collect();
        let what = format!("the {from} of a value [{from}{rest}] may be the batch of the file or only as large");
        Err(Error::baked_batch(what).at(build.graph.origin(guess)).help(self.help()))
    }
}

/// The model at the sizes of `bound`, and the shapes of its values.
fn import(
    model: &Model,
    flat: &Flat,
    bound: inputs::Bound,
    options: &Options,
    old: Option<Old>,
) -> Result<(Imported, Vec<Option<Shape>>)> {
    let classifier = Classifier::new(model, flat);
    let mut build = Build::new(options.dropout);
    build.batch_norm = options.batch_norm;
    build.batch_norms_train = flat.nodes.iter().any(batch_norm::trains);
    let outputs = options.exposed.outputs(flat);
    let mut importer = Importer {
        model,
        flat,
        outputs,
        classifier,
        build,
        values: Vec::new(),
        old,
        inner_nodes: 0,
        unrolled: 0,
        unrolled_from: None,
    };
    importer.values.resize(flat.values.len(), None);
    let live = flat.live(importer.outputs.iter().map(|(_, id)| *id));
    let read = flat.initializers.iter().filter(|(id, _)| live[id.0 as usize]).map(|(_, tensor)| tensor);
    importer.build.warnings = importer.classifier.warnings(read);
    importer
        .build
        .warnings
        .extend(flat.refused.iter().map(|(name, error)| format!("output `{name}` is left out: {}", error.what)));
    importer.sources(&bound, options, &live)?;
    let last = flat.last_readers(importer.outputs.iter().map(|(_, id)| *id));
    for (at, node) in flat.nodes.iter().enumerate() {
        if node.outputs.iter().flatten().any(|id| live[id.0 as usize]) {
            importer.node(node, &live)?;
            importer.forget(node.reads().filter(|id| last[id.0 as usize] == Some(at)));
        }
    }
    if let (Dropout::Rate(rate), false) = (options.dropout, importer.build.has_dropout) {
        let text = format!("`--dropout {rate}` changes nothing: the model has no Dropout node; export it in training mode");
        importer.build.warnings.push(text);
    }
    let shape = |value: &Option<Value>| value.as_ref().and_then(|value| value.shape(&importer.build).ok());
    let shapes: Vec<Option<Shape>> = importer.values.iter().map(shape).collect();
    let named = flat.values.iter().zip(&shapes).filter_map(|(name, shape)| Some((name.clone(), shape.clone()?))).collect();
    let computed = match options.exposed {
        Exposed::All => importer.expose(&live)?,
        _ => Vec::new(),
    };
    Ok((Imported { values: computed, shapes: named, ..importer.finish(bound)? }, shapes))
}

struct Importer<'f, 'm> {
    model: &'m Model,
    flat: &'f Flat<'m>,
    outputs: Vec<(String, ValueId)>,
    classifier: Classifier,
    build: Build,
    values: Vec<Option<Value>>,
    old: Option<Old>,
    /// Nodes of inner graphs imported so far, each time they run.
    inner_nodes: usize,
    /// Nodes of the graph that outermost control flow has given so far.
    unrolled: usize,
    /// While control flow is imported: the size of the graph without `unrolled`.
    unrolled_from: Option<usize>,
}

impl Importer<'_, '_> {
    /// Initializers and inputs.
    fn sources(&mut self, bound: &inputs::Bound, options: &Options, live: &[bool]) -> Result<()> {
        for (id, tensor) in self.flat.initializers.iter().filter(|(id, _)| live[id.0 as usize]) {
            self.build.graph.set_origin(&tensor.name);
            let value = self.classifier.value(&mut self.build, self.model, tensor.clone(), Origin::Initializer)?;
            self.values[id.0 as usize] = Some(value);
        }
        for (id, input) in &bound.inputs {
            let value = match options.constants.get(&input.name) {
                Some(tensor) => known::Known::read(tensor, &tensor.bytes(self.model)?)?.into(),
                None => {
                    self.build.graph.set_origin(&input.name);
                    let InputInfo { name, dtype, shape, batch_dim, .. } = input.clone();
                    let node = self.build.graph.add(Input { name, dtype, shape, batch_dim }, &[])?;
                    self.known_if_empty(node.into())
                }
            };
            self.values[id.0 as usize] = Some(value);
        }
        Ok(())
    }

    fn node(&mut self, node: &Node, live: &[bool]) -> Result<()> {
        let place = node.place();
        self.build.graph.set_origin(&place);
        let inputs: Vec<Option<Value>> =
            node.inputs.iter().map(|id| id.and_then(|id| self.values[id.0 as usize].clone())).collect();
        self.build.rescale = self.rescale(node);
        let results = self.import(node, &inputs, live).map_err(|mut error| {
            if let Some(old) = self.old.as_ref().filter(|old| old.proves.is_some()) {
                let what = format!("the batch of the file, {}, cannot be told from other numbers as large", old.from);
                return Error::baked_batch(what).at(place.clone()).help(old.help());
            }
            if let Some(old) = self.old.as_ref().filter(|_| error.code.0 == 104) {
                error = Error::baked_batch(format!(
                    "the batch of the file, {}, cannot become {} here: {}",
                    old.from, old.to, error.what
                ));
            }
            if let Some(old) = self.old.as_ref().filter(|_| error.code.0 == 112) {
                error = error.help(old.help());
            }
            let types: Vec<String> = inputs.iter().flatten().map(|value| describe(&self.build, value)).collect();
            error.at(format!("{place}: {}", types.join(", ")))
        })?;
        for (position, id) in node.outputs.iter().enumerate() {
            let Some(id) = id.filter(|id| live[id.0 as usize]) else { continue };
            let Some(result) = results.get(position) else {
                return Err(Error::attribute(format!("output {position} of {} is not supported", node.op)).at(place));
            };
            self.values[id.0 as usize] = Some(self.known_if_empty(result.clone()));
        }
        Ok(())
    }

    /// Elements that no node reads any more are not kept, only their types.
    fn forget(&mut self, spent: impl Iterator<Item = ValueId>) {
        for id in spent {
            if let Some(Value::Known(known)) = &mut self.values[id.0 as usize] {
                known.forget();
            }
        }
    }

    /// What has no elements is known.
    fn known_if_empty(&self, value: Value) -> Value {
        match value {
            Value::Node(id) if self.build.graph.ty(id).elements() == 0 => {
                let ty = self.build.graph.ty(id);
                known::Known::nothing(ty.dtype, &ty.shape).into()
            }
            other => other,
        }
    }

    fn rescale(&self, node: &Node) -> Option<Rescale> {
        let old = self.old.as_ref()?;
        let shape = |ids: &[Option<ValueId>]| {
            let id = ids.first().copied().flatten()?;
            old.shapes[id.0 as usize].clone()
        };
        let (input, output) = (shape(&node.inputs).unwrap_or_default(), shape(&node.outputs)?);
        Some(Rescale { from: old.from, to: old.to, input, output, proves: old.proves })
    }

    fn import(&mut self, node: &Node, inputs: &[Option<Value>], live: &[bool]) -> Result<Vec<Value>> {
        if !node.bodies.is_empty() {
            return self.control(node, inputs, live);
        }
        let Some(import) = ops::find(node.domain, node.op) else {
            return Err(Error::unsupported_op(format!("the operator {} of opset {} is not supported", node.op, node.opset))
                .help("README.md lists the operators that dcc imports"));
        };
        let output = node.outputs.iter().flatten().next().map_or("", |id| self.flat.values[id.0 as usize].as_str());
        let call = Call { node, inputs, model: self.model, classifier: &self.classifier, output, live };
        let results = ops::build(import, &mut self.build, &call)?;
        match node.unread().next() {
            Some(name) => Err(Error::attribute(format!("attribute `{name}` of {} is not supported", node.op))),
            None => Ok(results),
        }
    }

    /// What messages call an output of the model: its name, and the node that gives it.
    fn output_place(&self, name: &str, id: node::ValueId) -> String {
        match self.flat.nodes.iter().find(|node| node.outputs.contains(&Some(id))) {
            Some(node) => format!("output `{name}`, of {}", node.place()),
            None => format!("output `{name}`"),
        }
    }

    /// Which of Softmax and Sigmoid gives an output of this shape, of whatever precision, and the elements that it normalises together.
    fn normalised_by(
        &self,
        makers: &HashMap<node::ValueId, usize>,
        mut id: node::ValueId,
        shape: &[u64],
    ) -> Option<(&'static str, u64)> {
        loop {
            let node = &self.flat.nodes[*makers.get(&id)?];
            match node.op {
                "Identity" | "Cast" => id = node.inputs[0]?,
                "Sigmoid" => return Some(("Sigmoid", 1)),
                "Softmax" => {
                    let axis = node.int_or("axis", if node.opset < 13 { 1 } else { -1 }).ok()?;
                    let axis = if axis < 0 { axis + shape.len() as i64 } else { axis };
                    return Some(("Softmax", *shape.get(usize::try_from(axis).ok()?)?));
                }
                _ => return None,
            }
        }
    }

    fn finish(mut self, bound: inputs::Bound) -> Result<Imported> {
        let losses = ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"];
        let losses: BTreeSet<_> =
            self.flat.nodes.iter().filter(|node| losses.contains(&node.op)).map(|node| node.outputs[0]).collect();
        let made = self.flat.nodes.iter().enumerate();
        let makers: HashMap<_, _> =
            made.flat_map(|(at, node)| node.outputs.iter().flatten().map(move |&id| (id, at))).collect();
        let mut outputs = Vec::with_capacity(self.outputs.len());
        let exposed = std::mem::take(&mut self.build.graph.outputs);
        for (name, id) in &self.outputs {
            let value = self.values[id.0 as usize].clone().expect("flatten ordered definitions before uses");
            if let Some(nothing) = value.known().filter(|known| known.elements() == 0) {
                let (dtype, shape) = (nothing.dtype, nothing.shape.clone());
                outputs.push(OutputInfo { name: name.clone(), dtype, shape, is_loss: false, normalised_by: None });
                continue;
            }
            let node = self.build.node(&value).map_err(|error| error.at(self.output_place(name, *id)))?;
            self.build.graph.outputs.push((name.clone(), node));
            let ty = self.build.graph.ty(node);
            let (is_loss, normalised_by) = (losses.contains(&Some(*id)), self.normalised_by(&makers, *id, &ty.shape));
            outputs.push(OutputInfo { name: name.clone(), dtype: ty.dtype, shape: ty.shape.clone(), is_loss, normalised_by });
        }
        self.build.graph.outputs.extend(exposed);
        for (statistic, id) in std::mem::take(&mut self.build.statistics) {
            self.build.graph.outputs.push((statistic.text(), id));
        }
        if let Some(old) = self.old.as_ref().filter(|old| old.proves.is_some()) {
            old.check_guesses(&self.build)?;
        }
        let built = &self.build.graph;
        let graph = built.map(|graph, _, node, operands| Ok(graph.add_typed(node.op.clone(), operands, node.ty.clone())))?;
        let mut unreached = parameters::settle(&graph, &mut self.build.parameters);
        unreached.retain(|name| self.classifier.is_parameter(name));
        self.build.warnings.extend(parameters::warnings::unreached(&unreached));
        let used: BTreeSet<String> = graph
            .nodes
            .iter()
            .filter_map(|node| match &node.op {
                crate::ops::Op::Input(input) => Some(input.name.clone()),
                _ => None,
            })
            .collect();
        let inputs =
            bound.inputs.into_iter().map(|(_, input)| InputInfo { used: used.contains(&input.name), ..input }).collect();
        let Build { parameters, warnings, .. } = self.build;
        let trained = || parameters.iter().filter(|parameter| parameter.trained).map(|parameter| &parameter.tensor);
        let names = |tensor: &Tensor| tensor.name.clone();
        let buffers = trained().filter(|tensor| self.classifier.may_be_buffer(&tensor.name)).map(names).collect();
        let numbers = trained().filter(|tensor| self.classifier.may_be_number(self.model, tensor)).map(names).collect();
        Ok(Imported {
            graph,
            inputs,
            outputs,
            parameters,
            buffers,
            numbers,
            batch: bound.batch,
            opset: self.model.opset(),
            warnings,
            values: Vec::new(),
            shapes: BTreeMap::new(),
        })
    }
}

/// A type, or a short known value, for messages.
fn describe(build: &Build, value: &Value) -> String {
    let (Ok(dtype), Ok(shape)) = (value.dtype(build), value.shape(build)) else { return "a sequence".to_owned() };
    let ty = format!("{}{:?}", dtype.name(), shape.as_slice());
    match value.known().and_then(known::Known::to_ints).filter(|ints| ints.len() <= 8) {
        Some(ints) => format!("{ty} = {ints:?}"),
        None => ty,
    }
}
