//! `dcc checkpoint inspect CHECKPOINT`.

use super::{ranges, size};
use crate::cli::failure::Outcome;
use crate::cli::flags::CompileFlags;
use crate::cli::output;
use dcc_runtime::checkpoint::{Checkpoint, RunState, Tensor};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A checkpoint, or a folder of several: then the newest
    checkpoint: PathBuf,
    /// Print as JSON, with where each block lies in its file
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let (path, checkpoint) = super::open(&args.checkpoint)?;
    match args.json {
        true => output::json(&value(&path, &checkpoint))?,
        false => output::data(&text(&path, &checkpoint))?,
    }
    Ok(0)
}

/// What trained it, as its compile flags and this dcc's defaults say.
fn optimizer(run: &RunState) -> Option<String> {
    let flags = CompileFlags::parse(run.flags.iter().map(String::as_str)).ok()?;
    (!run.model.is_empty()).then_some(flags.optimizer)
}

fn value(path: &Path, checkpoint: &Checkpoint) -> Value {
    let run = checkpoint.run();
    let tensor = |tensor: &Tensor| {
        json!({
            "name": tensor.key.name,
            "kind": if tensor.key.state.is_none() { "weight" } else { "state" },
            "state": tensor.key.state,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "blocks": tensor.slices,
        })
    };
    let mesh: serde_json::Map<String, Value> = run.mesh.iter().map(|(name, size)| (name.clone(), json!(size))).collect();
    let files: Vec<Value> = checkpoint.files().map(|(name, bytes)| json!({ "name": name, "bytes": bytes })).collect();
    json!({
        "schema": 1,
        "kind": "checkpoint",
        "path": path.display().to_string(),
        "step": run.step,
        "seed": run.seed,
        "position": run.position,
        "data": format!("{:016x}", run.data),
        "description": run.description,
        "model": run.model,
        "mesh": mesh,
        "flags": run.flags,
        "optimizer": optimizer(run),
        "bytes": checkpoint.bytes(),
        "files": files,
        "tensors": checkpoint.index().iter().map(tensor).collect::<Vec<_>>(),
    })
}

fn text(path: &Path, checkpoint: &Checkpoint) -> String {
    let run = checkpoint.run();
    let files: Vec<(&str, u64)> = checkpoint.files().collect();
    let mut lines = vec![
        format!("checkpoint {}", path.display()),
        format!("  step       {}", run.step),
        format!("  plan       {}", run.description),
        format!("  seed       {}", run.seed),
        format!("  data       {} samples consumed ({:016x})", run.position.samples, run.data),
        format!("  files      {} of ranks, {}", files.len(), size(checkpoint.bytes())),
    ];
    if let Some(optimizer) = optimizer(run) {
        lines.insert(3, format!("  optimizer  {optimizer}"));
    }
    if run.position.samples == 0 && run.position.steps > 0 {
        lines[4] = format!("  data       {} steps consumed ({:016x})", run.position.steps, run.data);
    }
    if !run.flags.is_empty() {
        lines.push(format!("  compiled   {}", run.flags.join(" ")));
    }
    let of = |is_state: bool| checkpoint.index().iter().filter(move |tensor| tensor.key.state.is_some() == is_state);
    for (title, is_state) in [("weights", false), ("states", true)] {
        let (count, elements) = (of(is_state).count(), of(is_state).map(|t| t.shape.iter().product::<u64>()).sum::<u64>());
        lines.push(format!("{title}: {count} tensors, {elements} elements"));
        lines.extend(of(is_state).map(|tensor| format!("  {}", line(tensor))));
    }
    lines.join("\n") + "\n"
}

/// `wte.weight  f32[65, 48]  [0:33, 0:48] rank-00000, [33:65, 0:48] rank-00001`.
fn line(tensor: &Tensor) -> String {
    let name = match &tensor.key.state {
        Some(state) => format!("{} {state}", tensor.key.name),
        None => tensor.key.name.clone(),
    };
    let held = tensor.slices.iter().filter(|piece| !piece.extent.contains(&0));
    let blocks = held.map(|piece| {
        let file = piece.file.trim_end_matches(".safetensors");
        format!("{} {file}", ranges(&tensor.shape, &piece.start, &piece.extent))
    });
    format!("{name}  {}{:?}  {}", tensor.dtype, tensor.shape, blocks.collect::<Vec<_>>().join(", "))
}
