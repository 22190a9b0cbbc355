//! `dcc inspect FILE`: what an artifact, a model or a checkpoint holds.

use super::failure::Outcome;
use super::model::{self, Kind};
use super::timeline::Step;
use super::why::Why;
use super::{output, tables, verify};
use crate::error::Error;
use crate::import::proto::tensor_shape_proto::dimension::Value as Dim;
use crate::import::proto::type_proto::Value as Type;
use crate::import::proto::{TensorProto, ValueInfoProto};
use crate::import::{self, Model};
use crate::report;
use dcc_program::artifact::{Artifact, Data};
use dcc_program::manifest::Manifest;
use dcc_runtime::checkpoint::{self, Checkpoint, RunState};
use dcc_runtime::cuda::{Shipped, Target};
use dcc_runtime::error::Error as RuntimeError;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A model, an artifact, or the folder of a checkpoint
    file: PathBuf,
    /// Print the program of this stage of an artifact
    #[arg(long, value_name = "N", conflicts_with = "json")]
    stage: Option<usize>,
    /// Its evaluation program, in place of the training program
    #[arg(long, requires = "stage")]
    eval: bool,
    /// Show when each stage of an artifact runs which pass, as estimated
    #[arg(long, conflicts_with = "stage")]
    timeline: bool,
    /// Draw that too
    #[arg(long, requires = "timeline", value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Tell how this parameter of an artifact lies, what reads it, and what its other shardings would cost; needs --model
    #[arg(long, value_name = "NAME", requires = "model", conflicts_with_all = ["stage", "timeline"])]
    why: Option<String>,
    /// The model that the artifact was compiled from
    #[arg(long, value_name = "MODEL.onnx", requires = "why")]
    model: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let kind = model::kind(&args.file)?;
    if args.stage.is_some() && kind != Kind::Artifact {
        return Err(Error::usage("--stage: only artifacts have programs").at(args.file.display()).into());
    }
    if args.timeline && kind != Kind::Artifact {
        return Err(Error::usage("--timeline: only artifacts have programs").at(args.file.display()).into());
    }
    if args.why.is_some() && kind != Kind::Artifact {
        return Err(Error::usage("--why: only artifacts have a plan").at(args.file.display()).into());
    }
    output::apart(&[("--svg", args.svg.as_deref())], &[("the artifact", &*args.file)])?;
    let value = match kind {
        Kind::Artifact => {
            let artifact = verify::load(&args.file)?;
            if let (Some(name), Some(model)) = (&args.why, &args.model) {
                let why = Why::of(&artifact, model, name)?;
                match args.json {
                    true => output::json(&why.json())?,
                    false => output::data(&why.text())?,
                }
                return Ok(0);
            }
            if args.timeline {
                timeline(&Step::of(&artifact)?, args)?;
                return Ok(0);
            }
            if let Some(stage) = args.stage {
                output::data(&program(&artifact, stage, args.eval)?)?;
                return Ok(0);
            }
            if !args.json {
                output::data(&artifact_text(&artifact)?)?;
                return Ok(0);
            }
            of_artifact(&artifact)
        }
        Kind::Model => of_model(&model::open(&args.file)?.model)?,
        Kind::Checkpoint => of_checkpoint(&args.file)?,
    };
    match args.json {
        true => output::json(&value)?,
        false => output::data(&text(&without_states(value)))?,
    }
    Ok(0)
}

fn timeline(step: &Step, args: &Args) -> Outcome<()> {
    if let Some(path) = &args.svg {
        step.draw(path)?;
    }
    if args.json { output::json(&step.json()) } else { output::data(&step.text()) }
}

fn program(artifact: &Artifact, stage: usize, eval: bool) -> Outcome<String> {
    let programs = if eval { &artifact.eval } else { &artifact.train };
    match programs.get(stage) {
        Some(program) => Ok(dcc_program::text::print(program)),
        None => Err(Error::usage(format!("--stage {stage}: the artifact has {} stages, from 0", programs.len())).into()),
    }
}

fn of_artifact(artifact: &Artifact) -> Value {
    let tensor = |tensor: &dcc_program::artifact::Tensor| {
        let place = match &tensor.data {
            Data::Absent => json!(null),
            Data::Embedded(_) => json!("embedded"),
            Data::File { path, offset, .. } => json!(format!("{path}@{offset}")),
        };
        json!({ "name": tensor.name, "type": ty(tensor.dtype.name(), &tensor.shape), "data": place })
    };
    let mesh = artifact.train.first().or(artifact.eval.first()).map(|program| &program.mesh);
    let axes = mesh.into_iter().flat_map(|mesh| &mesh.axes).map(|axis| (axis.name.clone(), json!(axis.size)));
    json!({
        "schema": 1,
        "kind": "artifact",
        "hash": artifact.hash().to_hex().to_string(),
        "options": artifact.options,
        "mesh": axes.collect::<serde_json::Map<_, _>>(),
        "inputs": inputs(artifact),
        "train": report::stages(&artifact.train),
        "eval": report::stages(&artifact.eval),
        "code": code(artifact),
        "tensors": artifact.tensors.iter().map(tensor).collect::<Vec<_>>(),
    })
}

/// What there is machine code for, and how much.
fn code(artifact: &Artifact) -> Vec<Value> {
    let sizes = Shipped::of(artifact).sizes();
    sizes.into_iter().map(|(target, bytes)| json!({ "target": target.name(), "bytes": bytes })).collect()
}

/// Of all stages.
fn inputs(artifact: &Artifact) -> Vec<Value> {
    let programs = artifact.train.iter().chain(&artifact.eval);
    let all = programs.flat_map(|p| p.inputs.iter().map(move |input| (&input.name, p.ty(input.buffer))));
    let all: BTreeMap<&String, String> = all.map(|(name, t)| (name, ty(t.dtype.name(), &t.shape))).collect();
    all.into_iter().map(|(name, ty)| json!({ "name": name, "type": ty })).collect()
}

/// An artifact for people: what it was made of, what a rank holds and does.
fn artifact_text(artifact: &Artifact) -> Outcome<String> {
    let malformed = |what| RuntimeError::artifact(format!("the artifact's options are malformed: {what}"));
    let manifest = Manifest::from_options(&artifact.options).map_err(malformed)?;
    let hash = artifact.hash().to_hex();
    let mut lines = vec![
        format!("artifact {}", &hash[..16]),
        format!("  model     {} {}", manifest.model, manifest.flags.join(" ")),
        format!("  batch     {} samples", manifest.batch),
        format!("  loss      {}", manifest.loss),
    ];
    if let Some(program) = artifact.train.first().or(artifact.eval.first()) {
        let axes: Vec<String> = program.mesh.axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
        lines.push(format!("  mesh      {}: {} ranks", axes.join(", "), program.mesh.world()));
    }
    let code = Shipped::of(artifact).targets();
    if !code.is_empty() {
        let names: Vec<String> = code.into_iter().map(Target::name).collect();
        lines.push(format!("  code      {}", names.join(", ")));
    }
    for (mode, programs) in [("training", &artifact.train), ("evaluation", &artifact.eval)] {
        let stages = report::stages(programs);
        let counts: Vec<String> = stages.iter().map(|stage| stage.instructions.to_string()).collect();
        lines.push(format!(
            "{mode}: {} instructions; --stage N{} prints a program",
            counts.join(" + "),
            match mode {
                "training" => "",
                _ => " --eval",
            }
        ));
        let tables = [tables::work(&stages, &[]), tables::memory(&stages), tables::communication(&stages)];
        lines.extend(tables.into_iter().flatten());
    }
    let value = of_artifact(artifact);
    for list in ["inputs", "tensors"] {
        let entries = value[list].as_array();
        lines.push(list.to_owned());
        lines.extend(entries.into_iter().flatten().map(|entry| format!("  {}", line(entry))));
    }
    Ok(lines.join("\n") + "\n")
}

fn of_model(model: &Model) -> Outcome<Value> {
    let graph = model.graph();
    let values = |list: &[ValueInfoProto]| list.iter().map(declared).collect::<Vec<_>>();
    let mut ops: BTreeMap<&str, u64> = BTreeMap::new();
    let mut unsupported: BTreeSet<&str> = BTreeSet::new();
    for node in &graph.node {
        *ops.entry(node.op_type()).or_default() += 1;
        let is_function = || model.proto.functions.iter().any(|function| function.name() == node.op_type());
        if !import::is_supported(node.domain(), node.op_type()) && !is_function() {
            unsupported.insert(node.op_type());
        }
    }
    let tensor = |tensor: &TensorProto| {
        let dims: Vec<u64> = tensor.dims.iter().map(|&dim| dim.max(0) as u64).collect();
        let dtype = import::dtype(tensor.data_type()).map_or("?", dcc_program::DType::name);
        json!({ "name": tensor.name(), "type": ty(dtype, &dims) })
    };
    let inputs: Vec<&ValueInfoProto> =
        graph.input.iter().filter(|info| graph.initializer.iter().all(|tensor| tensor.name() != info.name())).collect();
    Ok(json!({
        "schema": 1,
        "kind": "model",
        "producer": model.proto.producer_name(),
        "opset": model.opset(),
        "inputs": inputs.into_iter().map(declared).collect::<Vec<_>>(),
        "outputs": values(&graph.output),
        "nodes": graph.node.len(),
        "ops": ops,
        "unsupported": unsupported,
        "external": model.external_locations(),
        "tensors": graph.initializer.iter().map(tensor).collect::<Vec<_>>(),
    }))
}

fn declared(info: &ValueInfoProto) -> Value {
    let Some(Type::TensorType(tensor)) = info.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else {
        return json!({ "name": info.name(), "type": null });
    };
    let dims = tensor.shape.iter().flat_map(|shape| &shape.dim).map(|dim| match &dim.value {
        Some(Dim::DimValue(size)) => size.to_string(),
        Some(Dim::DimParam(symbol)) => symbol.clone(),
        None => "?".to_owned(),
    });
    let dtype = import::dtype(tensor.elem_type()).map_or("?", dcc_program::DType::name);
    json!({ "name": info.name(), "type": format!("{dtype}[{}]", dims.collect::<Vec<_>>().join(", ")) })
}

fn of_checkpoint(folder: &Path) -> Outcome<Value> {
    let newest = checkpoint::steps(folder).ok().and_then(|mut steps| steps.pop()).map(|(_, path)| path);
    let mut checkpoint = Checkpoint::open(newest.as_deref().unwrap_or(folder))?;
    checkpoint.verify()?;
    let tensors = checkpoint
        .tensors()
        .map(|(key, dtype, shape)| json!({ "name": key.name, "state": key.state, "type": ty(dtype.name(), shape) }));
    let tensors: Vec<Value> = tensors.collect();
    let run = RunState { forward: String::new(), ..checkpoint.run().clone() };
    Ok(json!({ "schema": 1, "kind": "checkpoint", "run": run, "tensors": tensors }))
}

/// For people, a tensor of a checkpoint once, and what the optimizer keeps of each.
fn without_states(mut value: Value) -> Value {
    let Some(tensors) = value.get_mut("tensors").and_then(Value::as_array_mut) else { return value };
    let states: BTreeSet<String> = tensors.iter().filter_map(|t| Some(t.get("state")?.as_str()?.to_owned())).collect();
    tensors.retain(|tensor| tensor.get("state").is_none_or(Value::is_null));
    if !states.is_empty() {
        value["optimizer state"] = states.into_iter().collect::<Vec<_>>().join(", ").into();
    }
    value
}

fn ty(dtype: &str, dims: &[u64]) -> String {
    format!("{dtype}{dims:?}")
}

/// The same for people: a line per entry.
fn text(value: &Value) -> String {
    let mut out = String::new();
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let mut fields: Vec<(&String, &Value)> = value.as_object().into_iter().flatten().collect();
    fields.retain(|(key, value)| *key != "schema" && !is_empty(value));
    // What it is, single values, lists.
    fields.sort_by_key(|(key, value)| (*key != "kind", value.is_array() || value.is_object()));
    for (key, value) in fields {
        match value {
            Value::Array(entries) if entries.iter().any(Value::is_object) => {
                out += &format!("{key}\n");
                entries.iter().for_each(|entry| out += &format!("  {}\n", line(entry)));
            }
            other => out += &format!("{key} {}\n", line(other)),
        }
    }
    out
}

fn line(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let text = |(name, value): (&String, &Value)| match (name.as_str(), value) {
                ("name", Value::String(text)) => text.clone(),
                ("type", Value::String(text)) => text.clone(),
                (name, value) => format!("{name} {}", line(value)),
            };
            fields.iter().filter(|(_, value)| !value.is_null()).map(text).collect::<Vec<_>>().join("  ")
        }
        Value::Array(entries) => entries.iter().map(line).collect::<Vec<_>>().join(", "),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
