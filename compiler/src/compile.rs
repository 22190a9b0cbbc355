//! The passes in order: from an ONNX model to an artifact, with everything between for `--emit` and reports.

mod forward;
mod inputs;
mod memory;
mod refusal;
mod search;

use crate::annotations;
use crate::autodiff::Sums;
use crate::error::{Code, Error, Result};
use crate::graph::Graph;
use crate::import::proto::NodeProto;
use crate::import::{self, Imported, Model, TensorData, listed};
use crate::loss::LossKind;
use crate::ops::Op;
use crate::plan::annotated;
use crate::plan::batch::{self, Batch, Given, Ranks};
use crate::plan::{self, Parallel, Pin, Plan, Schedule};
use crate::schedule::Order;
use crate::train::{Trainable, Training, TrainingOptions, train_step};
use crate::{lower, place, precision, rewrite, schedule, sources, train, trim};
use dcc_program::DType;
use dcc_program::artifact::{Artifact, Data, Tensor};
use dcc_program::check;
use dcc_program::manifest::Manifest;
use dcc_program::program::{Action, Library, Mode, Program, Section};
use memory::Fitting;
use std::collections::{BTreeMap, BTreeSet};

pub use forward::{Evaluation, Subject};
pub use inputs::vocabularies;
pub use memory::planned_bytes;

/// Everything that a compilation depends on, beside the model.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Name of the model file.
    pub name: String,
    pub import: import::Options,
    /// `global`, `micro` and `accumulate` as the user gave them.
    pub batch: Given,
    pub batch_norm: BatchNorm,
    /// What every float of the model becomes, before mixed precision; none: they stay as exported.
    pub dtype: Option<DType>,
    pub training: TrainingOptions,
    pub parallel: Parallel,
    /// Largest planned bytes of a rank.
    pub memory_limit: Option<u64>,
    /// Whether rewriting runs; off only to measure what it is worth.
    pub rewriting: Rewriting,
    /// The flags that made these options, for the artifact.
    pub flags: Vec<String>,
    /// Size of each external data file, where it is there.
    pub external_bytes: BTreeMap<String, u64>,
}

/// `--batch-norm` and `--bn-groups`: the samples that BatchNorm takes statistics of while training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchNorm {
    /// Each of `groups` equal parts of the global batch.
    Batch { groups: u64 },
    /// What a rank holds of a microbatch: depends on the mesh, as in frameworks that do not synchronise it.
    Local,
    /// None: the running statistics stay and normalise.
    Frozen,
}

impl Default for BatchNorm {
    fn default() -> BatchNorm {
        BatchNorm::Batch { groups: 1 }
    }
}

impl BatchNorm {
    /// What asks for it, unless it is the default.
    fn flag(self) -> Option<String> {
        match self {
            BatchNorm::Batch { groups: 1 } => None,
            BatchNorm::Batch { groups } => Some(format!("--bn-groups {groups}")),
            BatchNorm::Local => Some("--batch-norm local".to_owned()),
            BatchNorm::Frozen => Some("--batch-norm frozen".to_owned()),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rewriting {
    #[default]
    On,
    Off,
}

/// An artifact and what led to it.
pub struct Compiled {
    pub imported: Imported,
    /// What training reads of the forward graph.
    pub forward: Graph,
    pub training: Training,
    pub batch: Batch,
    pub plan: Plan,
    pub placed: Graph,
    /// Of the passes of training.
    pub order: Order,
    pub artifact: Artifact,
}

/// What one of those that train may be besides, and what several may.
const MAYBE_BUFFERS: [&str; 2] = [
    "by its name may be a buffer of the module, which PyTorch does not train",
    "by their names may be buffers of the module, which PyTorch does not train",
];
const MAYBE_NUMBERS: [&str; 2] = [
    "is one number, alone or repeated, as exporters also write constants of the graph",
    "are one number each, alone or repeated, as exporters also write constants of the graph",
];

/// Tells of what trains although it may be something else: what one of them is, and several are.
fn undecided(names: &[String], [is, are]: [&str; 2], trained: &[String]) -> Option<String> {
    let names: Vec<&String> = names.iter().filter(|name| trained.contains(name)).collect();
    let (what, then) = match names.len() {
        0 => return None,
        1 => (format!("trains, and {is}"), "Add `--freeze NAME` if it is one"),
        _ => (format!("train, and {are}"), "Add `--freeze NAME` for each that is one"),
    };
    Some(format!("{} {what}; the file does not tell. {then}", listed(&names)))
}

/// Tells of an output that is a softmax or a sigmoid already, of which the loss takes one more.
fn normalised_twice(imported: &Imported, training: &Training) -> Option<String> {
    let (kind, output) = &training.loss_of;
    let (by, together) = imported.outputs.iter().find(|o| o.name == *output)?.normalised_by?;
    // Of another dim than that of classes it is none of the loss's.
    if by == "Softmax" && training.classes.as_ref().is_some_and(|&(_, classes)| classes != together) {
        return None;
    }
    let again = match kind {
        LossKind::CrossEntropy | LossKind::NextToken => "Softmax",
        LossKind::Bce => "Sigmoid",
        _ => return None,
    };
    (by == again).then(|| {
        format!(
            "output `{output}` is a {by}, and --loss {kind}, which is of logits, takes another one of it: give dcc the model without its \
             last {by} (in Keras, `activation=None`)"
        )
    })
}

/// Tells of random numbers that an evaluation draws.
fn random_evaluation(eval: &Graph) -> Option<String> {
    let live = eval.live();
    let random = eval.ids().filter(|&id| live[id.0 as usize] && matches!(eval[id].op, Op::Uniform(_)));
    let places: BTreeSet<String> = random.map(|id| eval.origin(id).to_owned()).collect();
    let all = listed(&places.iter().collect::<Vec<_>>());
    (!places.is_empty()).then(|| format!("evaluation draws random numbers too, as the model says, at {all}"))
}

/// Tells of f16 parameters that train: updates below a thousandth of a value are lost, and squares of small gradients are 0.
fn half_parameters(graph: &Graph, trained: &[String]) -> Option<String> {
    let is_half =
        |node: &crate::graph::Node| matches!(&node.op, Op::Param(p) if p.dtype == DType::F16 && trained.contains(&p.name));
    graph.nodes.iter().any(is_half).then(|| {
        "the model computes in f16 and keeps its parameters so, which rarely trains: `--dtype f32` computes in f32, `--dtype f16` scales \
         the loss and keeps f32 parameters"
            .to_owned()
    })
}

/// ONNX to everything the ranks need. Pure: no files, no clock, no environment. A pipeline whose microbatches nobody has counted has one
/// where the model needs all samples at once, and says so.
pub fn compile(model: &Model, options: &Options) -> Result<Compiled> {
    let given = options.batch;
    let counted = options.parallel.pp == 1 || given.micro.is_some() || given.accumulate.is_some();
    let error = match once(model, options) {
        Err(error) if !counted && error.code == Code::PLAN => error,
        compiled => return compiled,
    };
    let whole = Options { batch: Given { accumulate: Some(1), ..given }, ..options.clone() };
    let Ok(mut compiled) = once(model, &whole) else { return Err(error) };
    let place = error.at.map_or(String::new(), |at| format!(" at {at}"));
    let why = format!("a step is one microbatch, for which the stages wait for each other: {}{place}", error.what);
    compiled.imported.warnings.push(why);
    Ok(compiled)
}

/// The same with microbatches as they are counted.
fn once(model: &Model, options: &Options) -> Result<Compiled> {
    let Parallel { dp, cp, ep, tp, pp, .. } = options.parallel;
    let devices = [dp, cp, ep, tp, pp].iter().fold(1_u32, |product, &ranks| product.saturating_mul(ranks));
    let (annotations, notes) = annotations::read(model, devices)?;
    let (mut imported, batch) = import(model, options)?;
    imported.warnings.extend(notes);
    imported.warnings.extend(Pin::replaced(&options.parallel.pins));
    imported.warnings.extend(options.parallel.without_ranks());
    log("imported", &imported.graph);
    let mut training_options = options.training.clone();
    training_options.loss.loss_outputs = imported.outputs.iter().filter(|o| o.is_loss).map(|o| o.name.clone()).collect();
    let trainable: Vec<Trainable> = imported.parameters.iter().map(trainable).collect();
    if options.parallel.parts() == 1 {
        training_options.sums = Sums::Shared;
    }
    let forward = simplify(&imported.graph, options)?;
    let training = train::needed(&forward, &training_options.loss).and_then(|forward| {
        let forward = sources::split(&forward)?;
        let forward = simplify(&forward, options)?;
        log("forward graph simplified", &forward);
        let forward = trimmed(forward, options)?;
        log("what training reads", &forward);
        Ok((train_step(&forward, &trainable, &training_options)?, forward))
    });
    let (mut training, forward) = training.map_err(|error| {
        // Why nothing trains may be what the exporter did.
        let told = imported.warnings.iter().filter(|_| !trainable.iter().any(|t| t.by_default));
        told.fold(error, |error, warning| error.note(warning))
    })?;
    imported.warnings.extend(random_evaluation(&training.eval));
    imported.warnings.extend(normalised_twice(&imported, &training));
    for (names, are) in [(&imported.buffers, MAYBE_BUFFERS), (&imported.numbers, MAYBE_NUMBERS)] {
        imported.warnings.extend(undecided(names, are, &training.trained));
    }
    imported.warnings.extend(half_parameters(&imported.graph, &training.trained));
    training.graph = simplify(&training.graph, options)?;
    training.eval = simplify(&training.eval, options)?;
    log("training step built", &training.graph);
    has_elements(&training.graph).map_err(|error| error.help("give each dim of the inputs a size: --dim NAME=SIZE"))?;
    let (wishes, notes) = annotated::resolve(&training.graph, &annotations, &imported.shapes)?;
    imported.warnings.extend(notes);
    let known = |pin: &Pin| trainable.iter().fold(pin.clone(), |pin, t| pin.knowing(&t.name, &t.aliases));
    let pins = options.parallel.pins.iter().map(known).collect();
    let parallel = Parallel { microbatches: batch.accumulate, wishes, pins, ..options.parallel.clone() };
    let given = Given { global: Some(batch.global), groups: groups(model, options), ..options.batch };
    let Fitting { plan, placed, order, programs: train, .. } = memory::fit(&training.graph, &parallel, options, given)?;
    imported.warnings.extend(plan::note(&training.graph, &plan, &parallel));
    let train = checked(train)?;
    let eval_plan = plan::follow(&training.eval, &plan, &training.graph);
    let eval_placed = place::place(&training.eval, &eval_plan)?;
    let eval =
        programs(&eval_placed, &eval_plan, &schedule::order(&eval_plan), options, Mode::Eval, &train).and_then(checked)?;
    log("placed", &placed);
    let instructions: usize = train.iter().flat_map(|p| &p.sections).map(|s| s.body.len()).sum();
    tracing::info!(stages = train.len(), instructions, "lowered and checked");
    let artifact = Artifact {
        train,
        eval,
        forward: forward_text(&imported, &training_options)?,
        tensors: tensors(model, &imported, options)?,
        code: Default::default(),
        options: manifest(model, &imported, &training, batch, options).to_options(),
    };
    Ok(Compiled { imported, forward, training, batch, plan, placed, order, artifact })
}

/// The forward graph as evaluation reads it back, in the precision that is trained in.
fn forward_text(imported: &Imported, training: &TrainingOptions) -> Result<String> {
    let Some(mixed) = training.mixed else { return Ok(imported.graph.to_string()) };
    // Attention is found in one precision.
    let graph = rewrite::simplify(&imported.graph)?;
    Ok(precision::narrow(&graph, mixed.half)?.to_string())
}

/// For `-v`.
fn log(pass: &str, graph: &Graph) {
    tracing::info!(nodes = graph.nodes.len(), "{pass}");
}

/// The forward graph at the global batch. The batch may come from the model itself.
fn import(model: &Model, options: &Options) -> Result<(Imported, Batch)> {
    let Parallel { dp, ep, pp, .. } = options.parallel;
    let ranks = Ranks { dp, ep };
    let mut import_options = options.import.clone();
    import_options.output = options.training.loss.output.clone();
    let has_norm = has_batch_norm(model);
    let given = Given { groups: groups(model, options), ..options.batch };
    let known = given.global.is_some() || given.model.is_some() || both(&given);
    let batch = if known { Some(batch::resolve(given, ranks, pp)?) } else { None };
    import_options.global_batch = batch.map(|b| b.global);
    import_options.batch_norm = batch_norm(options.batch_norm, batch, ranks);
    let mut imported = import::onnx(model, &import_options)?;
    let batch = match batch {
        Some(batch) => batch,
        None => {
            let batch = batch::resolve(Given { model: imported.batch, ..given }, ranks, pp)?;
            if has_norm && options.batch_norm == BatchNorm::Local {
                import_options.batch_norm = batch_norm(options.batch_norm, Some(batch), ranks);
                imported = import::onnx(model, &import_options)?;
            }
            batch
        }
    };
    if let (false, Some(flag)) = (has_norm, options.batch_norm.flag()) {
        imported.warnings.push(format!("`{flag}` changes nothing: the model has no BatchNormalization of samples"));
    }
    imported.graph = train::marked(&imported.graph)?;
    if let Some(dtype) = options.dtype {
        imported.graph = precision::retype(&imported.graph, dtype)?;
    }
    Ok((imported, batch))
}

/// The groups of samples that BatchNorm takes statistics of, where it is known and there is one.
fn groups(model: &Model, options: &Options) -> Option<u64> {
    match options.batch_norm {
        BatchNorm::Batch { groups } if has_batch_norm(model) => Some(groups),
        _ => None,
    }
}

/// Whether the model has a BatchNorm of samples, not of a weight.
fn has_batch_norm(model: &Model) -> bool {
    let is_norm = |node: &NodeProto| node.op_type() == "BatchNormalization";
    if model.proto.functions.iter().flat_map(|function| &function.node).any(is_norm) {
        return true;
    }
    let stored: BTreeSet<&str> = model.graph().initializer.iter().map(|tensor| tensor.name()).collect();
    let inputs = model.graph().input.iter().map(|input| input.name());
    let mut of_samples: BTreeSet<&str> = inputs.filter(|name| !stored.contains(name)).collect();
    for node in &model.graph().node {
        // What the graphs of a node capture is not among its inputs.
        let has_graphs = node.attribute.iter().any(|attribute| attribute.g.is_some() || !attribute.graphs.is_empty());
        if has_graphs || node.input.iter().any(|name| of_samples.contains(name.as_str())) {
            of_samples.extend(node.output.iter().map(String::as_str));
        }
    }
    model.graph().node.iter().any(|node| is_norm(node) && node.input.first().is_some_and(|x| of_samples.contains(x.as_str())))
}

fn batch_norm(chosen: BatchNorm, batch: Option<Batch>, ranks: Ranks) -> import::BatchNorm {
    match chosen {
        BatchNorm::Batch { groups } => import::BatchNorm::Groups(groups),
        BatchNorm::Local => {
            let microbatches = batch.map_or(1, |batch| batch.accumulate);
            import::BatchNorm::Groups(u64::from(microbatches) * ranks.count())
        }
        BatchNorm::Frozen => import::BatchNorm::Frozen,
    }
}

fn both(given: &Given) -> bool {
    given.micro.is_some() && given.accumulate.is_some()
}

fn trainable(parameter: &import::Parameter) -> Trainable {
    Trainable { name: parameter.tensor.name.clone(), aliases: parameter.other_names(), by_default: parameter.trained }
}

fn simplify(graph: &Graph, options: &Options) -> Result<Graph> {
    match options.rewriting {
        Rewriting::On => rewrite::simplify(graph),
        Rewriting::Off => Ok(graph.clone()),
    }
}

/// Errors: a value that has none.
fn has_elements(graph: &Graph) -> Result<()> {
    let Some(id) = graph.ids().find(|&id| graph.ty(id).elements() == 0) else { return Ok(()) };
    let what = format!("a tensor of shape {:?} has no elements", graph.ty(id).shape.as_slice());
    Err(Error::shape(what).at(graph.origin(id)))
}

/// The graph computing of each value what is read of it.
fn trimmed(graph: Graph, options: &Options) -> Result<Graph> {
    match options.rewriting {
        Rewriting::On => trim::trim(&graph),
        Rewriting::Off => Ok(graph),
    }
}

/// The order of the passes of training: by the rule of the plan's schedule, or searched for.
fn order(placed: &Graph, plan: &Plan, options: &Options) -> Result<Order> {
    let order = schedule::order(plan);
    if plan.schedule != Schedule::Auto {
        return Ok(order);
    }
    let lowered = |order: &Order| lower::programs(placed, plan, "", Mode::Train, &schedule::turns(plan, order));
    search::order(order, &options.parallel.machine, options.memory_limit, lowered)
}

/// Lowering; parameters stand where the programs `beside` have them. What is kept of this must be `checked`.
fn programs(
    placed: &Graph,
    plan: &Plan,
    order: &Order,
    options: &Options,
    mode: Mode,
    beside: &[Program],
) -> Result<Vec<Program>> {
    let name = options.name.trim_end_matches(".onnx");
    let mut programs = lower::programs(placed, plan, name, mode, &schedule::turns(plan, order))?;
    if !beside.is_empty() {
        programs.iter_mut().enumerate().try_for_each(|(stage, program)| lower::share(beside, stage, program))?;
    }
    Ok(programs)
}

/// The gate.
fn checked(programs: Vec<Program>) -> Result<Vec<Program>> {
    check::programs(&programs).map_err(|fault| {
        programs.iter().for_each(|program| tracing::debug!("refused:\n{}", dcc_program::text::print(program)));
        Error::gate(fault)
    })?;
    Ok(programs)
}

/// Where the initial values of all parameters are; paths relative to the model's folder.
fn tensors(model: &Model, imported: &Imported, options: &Options) -> Result<Vec<Tensor>> {
    imported.parameters.iter().map(|p| tensor(model, &p.tensor, options)).collect()
}

fn tensor(model: &Model, tensor: &import::Tensor, options: &Options) -> Result<Tensor> {
    let data = match &tensor.data {
        TensorData::Owned(bytes) => Data::Embedded(bytes.clone()),
        // Small tensors travel with the artifact; large ones stay where they are.
        TensorData::Inline { length, .. } if *length <= 4096 => Data::Embedded(tensor.bytes(model)?),
        TensorData::Inline { offset, length } => {
            Data::File { path: options.name.clone(), offset: *offset, bytes: *length, file_bytes: model.bytes().len() as u64 }
        }
        TensorData::External { location, offset, length } => match options.external_bytes.get(location) {
            Some(&file_bytes) if offset + length <= file_bytes => {
                Data::File { path: location.clone(), offset: *offset, bytes: *length, file_bytes }
            }
            Some(&file_bytes) => {
                let what = format!("bytes {offset}..{} of `{location}`, which has {file_bytes}", offset + length);
                return Err(Error::external(what).at(format!("tensor `{}`", tensor.name)));
            }
            None => Data::Absent,
        },
    };
    Ok(Tensor { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone(), data })
}

fn manifest(model: &Model, imported: &Imported, training: &Training, batch: Batch, options: &Options) -> Manifest {
    let trained = |name: &String| training.trained.contains(name);
    let parameters = imported.parameters.iter().map(|p| (p.tensor.name.clone(), p.entry(trained(&p.tensor.name))));
    let inputs = inputs::of_loss(&[&training.graph, &training.eval], &training.classes, options.training.loss.ignore_index);
    let unused = imported.inputs.iter().map(|input| &input.name).filter(|name| !inputs.contains_key(*name));
    Manifest {
        model: options.name.clone(),
        model_hash: blake3::hash(model.bytes()).to_hex().to_string(),
        batch: batch.global,
        loss: training.loss.clone(),
        parameters: parameters.collect(),
        unused: unused.cloned().collect(),
        inputs,
        flags: options.flags.clone(),
    }
}

/// Kernels that all stages launch in one step, and bytes that they keep for it: what rewriting is measured by.
pub fn cost_of(programs: &[Program]) -> (usize, u64) {
    let launches = |program: &Program| {
        let of = |section: &Section| section.body.iter().filter(|instr| is_launch(&instr.action)).count();
        program.order.iter().map(|step| of(&program.sections[step.section as usize])).sum::<usize>()
    };
    (programs.iter().map(launches).sum(), programs.iter().map(planned_bytes).sum())
}

/// Whether an instruction computes: transfers, and views of what is there, do not.
fn is_launch(action: &Action) -> bool {
    match action {
        Action::Kernel(_) => true,
        Action::Library(library) => !matches!(library, Library::Reshape { .. } | Library::ResolveMicrobatches),
        Action::Start { .. } | Action::Wait(_) => false,
    }
}
