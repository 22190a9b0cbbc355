//! `dcc eval {MODEL.onnx|ART.dcc|CHECKPOINT} --inputs I --outputs O`: the model's outputs, or a loss and its gradients, computed by
//! the lowering and kernels of training on this process's threads. Files are written only once all values are there.

pub(super) mod subject;
pub(super) mod tensors;

use super::failure::Outcome;
use super::flags::CompileFlags;
use super::output;
use crate::compile::Evaluation;
use crate::interp::{self, Bindings, Data};
use crate::ops::Op;
use crate::train::Output;
use dcc_program::DType;
use dcc_program::program::ParamKind;
use dcc_runtime::data::Convert;
use dcc_runtime::exec::whole::{Parameters, Run, Tensor};
use dcc_runtime::exec::{Fresh, Scalars, Tally};
use dcc_runtime::run::{Flags, Instructions, Job, Source, whole_weights};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use subject::{Call, Given};
use tensors::Named;

#[derive(clap::Args)]
pub struct Args {
    /// The model, an artifact that `dcc compile` made of it, or the folder of a checkpoint
    #[arg(value_name = "MODEL.onnx|ART.dcc|CHECKPOINT")]
    subject: PathBuf,
    /// Values of the inputs: .npz, .safetensors, or a folder of NAME.npy or input_<i>.pb
    #[arg(long, value_name = "I")]
    inputs: PathBuf,
    /// Write the model's outputs here: .npz, .safetensors, else a folder of output_<i>.pb
    #[arg(long, value_name = "O", required_unless_present = "gradients")]
    outputs: Option<PathBuf>,
    /// Write the loss, and its gradient by each trained parameter, here
    #[arg(long, value_name = "G")]
    gradients: Option<PathBuf>,
    /// The model or artifact that a checkpoint is of (default: the graph that it keeps)
    #[arg(long, value_name = "MODEL.onnx|ART.dcc")]
    model: Option<PathBuf>,
    /// What computes: compiled kernels, or the slow reference
    #[arg(long, default_value = "compiled", value_parser = ["compiled", "interp"])]
    backend: String,
    /// Compute threads, at most 64 a core (default: all cores)
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    instructions: Instructions,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,

    /// Size of a symbolic dim that no input shows
    #[arg(long, value_name = "NAME=N", help_heading = "Model")]
    dim: Vec<String>,
    /// Which dim of an input counts samples, where a static export is given another number of them
    #[arg(long, value_name = "INPUT=D|none", help_heading = "Model")]
    batch_dim: Vec<String>,
    /// Floats to compute in (default: as exported)
    #[arg(long, value_parser = ["f32", "f64", "bf16", "f16"], help_heading = "Model")]
    dtype: Option<String>,

    /// The loss that --gradients are of; `labels` or `target` stand among the inputs
    #[arg(long, default_value = "auto", help_heading = "Loss", requires = "gradients",
          value_parser = ["auto", "cross-entropy", "next-token", "mse", "l1", "bce", "output"])]
    loss: String,
    /// The model output that the loss is of (default: the first)
    #[arg(long, value_name = "NAME", help_heading = "Loss", requires = "gradients")]
    output: Option<String>,
    /// The dim of that output that counts classes (default: by the labels' shape; without data 1 of images, else the last)
    #[arg(long, value_name = "D", help_heading = "Loss", requires = "gradients")]
    class_dim: Option<usize>,
    /// Labels of this value do not count
    #[arg(long, value_name = "LABEL", default_value_t = -100, allow_negative_numbers = true, help_heading = "Loss",
          requires = "gradients")]
    ignore_index: i64,
    #[arg(long, value_name = "S", default_value_t = 0.0, help_heading = "Loss", requires = "gradients")]
    label_smoothing: f64,
    /// Gradients by these parameters only; @FILE has exact names, one a line
    #[arg(long, value_name = "GLOB|@FILE", help_heading = "Loss", requires = "gradients")]
    train: Vec<String>,
    /// None by these
    #[arg(long, value_name = "GLOB|@FILE", help_heading = "Loss", requires = "gradients")]
    freeze: Vec<String>,

    /// Fill parameters that have no data from this seed
    #[arg(long, value_name = "SEED", help_heading = "Weights")]
    init: Option<u64>,
    /// Fill all parameters from --init's seed
    #[arg(long, requires = "init", help_heading = "Weights")]
    init_all: bool,
    /// How matching parameters begin: GLOB=zeros, GLOB=ones or GLOB=std:S
    #[arg(long, value_name = "GLOB=RULE", value_parser = super::data::pair, requires = "init", help_heading = "Weights")]
    init_rule: Vec<(String, String)>,
    /// Use these weights, by name or alias
    #[arg(long, value_name = "F.safetensors", help_heading = "Weights")]
    weights: Option<PathBuf>,
}

impl Args {
    fn compile_flags(&self) -> CompileFlags {
        CompileFlags {
            dropout: "off".to_owned(),
            dim: self.dim.clone(),
            batch_dim: self.batch_dim.clone(),
            dtype: self.dtype.clone(),
            loss: self.loss.clone(),
            output: self.output.clone(),
            class_dim: self.class_dim,
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            train: self.train.clone(),
            freeze: self.freeze.clone(),
            ..CompileFlags::default()
        }
    }

    fn run_flags(&self) -> Flags {
        let (init, init_all, init_rule) = (self.init, self.init_all, self.init_rule.clone());
        Flags { init, init_all, init_rule, weights: self.weights.clone(), ..Flags::default() }
    }

    /// Errors: one file for two of what is read and what is written.
    fn check_places(&self) -> Outcome<()> {
        let written = [("--outputs", self.outputs.as_deref()), ("--gradients", self.gradients.as_deref())];
        let subject = [("MODEL.onnx|ART.dcc|CHECKPOINT", &*self.subject), ("--inputs", &*self.inputs)];
        let others = [("--model", &self.model), ("--weights", &self.weights)];
        let others = others.iter().filter_map(|(flag, path)| Some((*flag, path.as_deref()?)));
        output::apart(&written, &subject.into_iter().chain(others).collect::<Vec<_>>())
    }
}

/// Values by name, and what computing them took.
pub(super) struct Results {
    pub values: Vec<Named>,
    pub tally: Tally,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let threads = super::bench::threads(args.threads)?;
    args.instructions.limit()?;
    args.check_places()?;
    let given = Given::read(&args.inputs).map_err(|failure| subject::fault_of_model(args).unwrap_or(failure))?;
    let mut call = Call::open(args, given)?;
    let mut tally = Tally::default();
    let mut files = Vec::new();
    let mut report = json!({ "schema": 1, "backend": args.backend });
    if let Some(path) = &args.outputs {
        let mut results = match call.subject.graph.outputs.is_empty() {
            true => Results { values: Vec::new(), tally: Tally::default() },
            false => {
                let evaluation = call.subject.outputs()?;
                evaluate(&mut call, &evaluation, args, threads)?
            }
        };
        for (at, output) in &call.subject.empty_outputs {
            let tensor = Tensor { dtype: output.dtype, shape: output.shape.to_vec(), bytes: Vec::new() };
            results.values.insert(*at, Named { name: output.name.clone(), tensor });
        }
        report["outputs"] = listed(&results.values);
        add(&mut tally, &results.tally);
        files.push(tensors::encode(path, &results.values)?);
    }
    if let Some(path) = &args.gradients {
        let evaluation = call.gradients()?;
        let mut results = evaluate(&mut call, &evaluation, args, threads)?;
        for value in &mut results.values {
            if let Some(Output::Gradient { name, .. }) = Output::parse(&value.name) {
                value.name = name;
            }
        }
        report["loss"] = results.values.first().map_or(Value::Null, |loss| scalar(&loss.tensor));
        report["gradients"] = listed(&results.values[1..]);
        add(&mut tally, &results.tally);
        files.push(tensors::encode(path, &results.values)?);
    }
    tensors::write_all(&files)?;
    let Tally { jit, library, interp, flops, .. } = tally;
    for (key, count) in [("jit", jit), ("library", library), ("interp", interp), ("flops", flops)] {
        report[key] = json!(count);
    }
    for file in &files {
        output::status("Wrote", &format!("{} tensors to {}", file.count(), file.path().display()));
    }
    if args.json {
        output::json(&report)?;
    }
    Ok(0)
}

fn listed(values: &[Named]) -> Value {
    let entry = |value: &Named| {
        let Tensor { dtype, shape, .. } = &value.tensor;
        json!({ "name": value.name, "type": format!("{}{shape:?}", dtype.name()) })
    };
    values.iter().map(entry).collect()
}

fn scalar(tensor: &Tensor) -> Value {
    match reference(tensor).data {
        Data::Float(values) => json!(values[0]),
        Data::Int(values) => json!(values[0]),
    }
}

fn add(total: &mut Tally, tally: &Tally) {
    total.jit += tally.jit;
    total.library += tally.library;
    total.interp += tally.interp;
    total.flops += tally.flops;
}

fn evaluate(call: &mut Call, evaluation: &Evaluation, args: &Args, threads: usize) -> Outcome<Results> {
    let inputs = subject::bind(&call.arrays, evaluation)?;
    let artifact = call.subject.artifact(evaluation);
    let job = Job::new(&Source::Built { artifact: &artifact, folder: &call.folder }, &args.run_flags())?;
    let interp = args.backend == "interp";
    let wanted = if interp { weights_of_graph(evaluation) } else { weights_of_programs(evaluation) };
    let parameters = whole_weights(&job, call.checkpoint.as_mut(), &wanted)?;
    match interp {
        true => interpret(evaluation, &inputs, &parameters),
        false => compute(evaluation, inputs, &parameters, threads),
    }
}

pub(super) fn weights_of_programs(evaluation: &Evaluation) -> Vec<(String, DType)> {
    let params = evaluation.programs.iter().flat_map(|p| p.params.iter().map(move |param| (param, p.ty(param.buffer).dtype)));
    params.map(|(param, dtype)| (param.name.clone(), dtype)).collect()
}

pub(super) fn weights_of_graph(evaluation: &Evaluation) -> Vec<(String, DType)> {
    let params = evaluation.source.nodes.iter().filter_map(|node| match &node.op {
        Op::Param(param) => Some((param.name.clone(), param.dtype)),
        _ => None,
    });
    params.collect()
}

pub(super) fn compute(
    evaluation: &Evaluation,
    inputs: BTreeMap<String, Tensor>,
    parameters: &Parameters,
    threads: usize,
) -> Outcome<Results> {
    let fresh = if cfg!(debug_assertions) { Fresh::Poisoned } else { Fresh::AsIs };
    let steps = [Scalars { learning_rate: 0.0, step: 1, seed: 0 }];
    let run = Run { programs: &evaluation.programs, threads, fresh, parameters, inputs: &[inputs], steps: &steps };
    let mut outcome = run.run()?;
    let mut found = outcome.outputs.swap_remove(0);
    let names = evaluation.graph.outputs.iter().map(|(name, _)| name);
    let named = names.map(|name| Named {
        name: name.clone(),
        tensor: found.remove(name).expect("a program gives every output of its graph"),
    });
    Ok(Results { values: named.collect(), tally: outcome.tallies[0] })
}

/// The graph as it was imported, in f64, each result rounded to its dtype.
pub(super) fn interpret(
    evaluation: &Evaluation,
    inputs: &BTreeMap<String, Tensor>,
    parameters: &Parameters,
) -> Outcome<Results> {
    let graph = &evaluation.source;
    let mut bindings = Bindings { step: 1, ..Bindings::default() };
    bindings.inputs.extend(inputs.iter().map(|(name, tensor)| (name.clone(), reference(tensor))));
    let weights = parameters.iter().map(|((name, _), tensor)| ((name.clone(), ParamKind::Weight), reference(tensor)));
    bindings.params.extend(weights);
    let results = interp::outputs(graph, &bindings, interp::Precision::Declared)?;
    let live = graph.live();
    let computed = graph.ids().filter(|id| live[id.0 as usize] && !graph[*id].operands.is_empty()).count();
    let values = results.iter().map(|(name, value)| Named { name: name.clone(), tensor: stored(value) });
    Ok(Results { values: values.collect(), tally: Tally { interp: computed as u64, ..Tally::default() } })
}

/// A tensor as the reference has it.
fn reference(tensor: &Tensor) -> interp::Tensor {
    let wide = if tensor.dtype.is_float() { DType::F64 } else { DType::I64 };
    let mut bytes = vec![0; tensor.bytes.len() / tensor.dtype.bytes() as usize * 8];
    Convert::new(tensor.dtype, wide).run(&tensor.bytes, &mut bytes);
    let words = bytes.chunks_exact(8).map(|word| word.try_into().expect("eight bytes"));
    match tensor.dtype.is_float() {
        true => interp::Tensor::floats(tensor.dtype, &tensor.shape, words.map(f64::from_ne_bytes).collect()),
        false => interp::Tensor::ints(tensor.dtype, &tensor.shape, words.map(i64::from_ne_bytes).collect()),
    }
}

/// The reverse of [`reference`].
fn stored(tensor: &interp::Tensor) -> Tensor {
    let (wide, words): (DType, Vec<u8>) = match &tensor.data {
        Data::Float(values) => (DType::F64, values.iter().flat_map(|x| x.to_ne_bytes()).collect()),
        Data::Int(values) => (DType::I64, values.iter().flat_map(|x| x.to_ne_bytes()).collect()),
    };
    let mut bytes = vec![0; words.len() / 8 * tensor.dtype.bytes() as usize];
    Convert::new(wide, tensor.dtype).run(&words, &mut bytes);
    Tensor { dtype: tensor.dtype, shape: tensor.shape.to_vec(), bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_survive_the_reference() {
        let check = |dtype: DType, bytes: &[u8]| {
            let tensor = Tensor { dtype, shape: vec![2], bytes: bytes.to_vec() };
            assert_eq!(stored(&reference(&tensor)), tensor);
        };
        check(DType::F32, &[1.5_f32.to_ne_bytes(), (-2.25_f32).to_ne_bytes()].concat());
        check(DType::Bool, &[0, 1]);
        check(DType::U64, &[[0xff; 8], [7, 0, 0, 0, 0, 0, 0, 0]].concat());
        check(DType::I8, &[0x80, 0x7f]);
    }
}
