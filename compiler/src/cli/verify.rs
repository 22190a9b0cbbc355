//! `dcc verify ART.dcc`: hashes, the gate over all programs, and the files that its tensors name; with `--model`, that its
//! ranks compute what one device computes. `dcc verify MODEL.onnx`: that dcc and tract compute the same.

#[cfg(target_os = "linux")]
mod compare;
#[cfg(target_os = "linux")]
mod kernels;
#[cfg(target_os = "linux")]
mod made_up;
#[cfg(target_os = "linux")]
pub mod model;
#[cfg(target_os = "linux")]
mod numeric;
#[cfg(target_os = "linux")]
mod opinion;
#[cfg(target_os = "linux")]
mod partition;
#[cfg(target_os = "linux")]
mod second;
#[cfg(target_os = "linux")]
mod tails;
mod tract;
#[cfg(target_os = "linux")]
mod undefined;

use super::failure::{self, Outcome};
use super::model::{Kind, kind};
use super::output;
use crate::error::Error;
use dcc_program::artifact::{Artifact, Data};
use dcc_program::program::Program;
use dcc_runtime::run::Instructions;
use serde_json::json;
use std::path::{Path, PathBuf};

#[cfg(target_os = "linux")]
pub use opinion::ModelFlags;
pub use tract::TRACT;

#[derive(clap::Args)]
pub struct Args {
    /// An artifact, or a model, whose values tract computes too
    #[arg(value_name = "ART.dcc|MODEL.onnx")]
    subject: PathBuf,
    /// Also train a few steps on made-up data: all ranks, as threads, must agree with this model on one device
    #[cfg(target_os = "linux")]
    #[arg(long, value_name = "MODEL.onnx", help_heading = "Of an artifact")]
    model: Option<PathBuf>,
    #[cfg(target_os = "linux")]
    /// Instead compare every tensor of all ranks with the model on one device, on a smaller instance
    #[arg(long, requires = "model", help_heading = "Of an artifact")]
    numeric: bool,
    #[cfg(target_os = "linux")]
    /// Also run every generated kernel by itself on `cpu` or `cuda`, which must agree with float64; for `sm_80`, `sm_90a`, … only compile it
    #[arg(long, value_name = "DEVICE", help_heading = "Of an artifact")]
    kernels: Option<kernels::Device>,
    #[cfg(target_os = "linux")]
    #[command(flatten)]
    opinion: opinion::ModelFlags,
    #[command(flatten)]
    instructions: Instructions,
    /// Print what was checked as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<i32> {
    args.instructions.limit()?;
    let path = &args.subject;
    match kind(path)? {
        Kind::Artifact => {}
        #[cfg(target_os = "linux")]
        Kind::Model => return opinion::run(args),
        _ => {
            return Err(Error::usage("verify takes artifacts and models: this is none")
                .at(path.display())
                .help("export a checkpoint with `dcc export --onnx`, and verify that")
                .into());
        }
    }
    #[cfg(target_os = "linux")]
    args.opinion.refuse_for_artifact()?;
    let artifact = load(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut absent = 0;
    for tensor in &artifact.tensors {
        match tensor.bytes(folder).map_err(|error| failure::artifact(error, path))? {
            Some(_) => {}
            None => absent += 1,
        }
    }
    let instructions = |programs: &[Program]| programs.iter().flat_map(|p| &p.sections).map(|s| s.body.len()).sum::<usize>();
    let (train, eval) = (instructions(&artifact.train), instructions(&artifact.eval));
    let embedded = artifact.tensors.iter().filter(|tensor| matches!(tensor.data, Data::Embedded(_))).count();
    let (hash, stages, tensors) = (artifact.hash().to_hex().to_string(), artifact.train.len(), artifact.tensors.len());
    let agreement = agreement(args, &artifact)?;
    let numeric = if args.numeric { Some(numeric::check(args, &artifact)?) } else { None };
    #[cfg(target_os = "linux")]
    let kernels = args.kernels.map(|device| kernels::check(&artifact, device)).transpose()?;
    if args.json {
        output::json(&json!({
            "schema": 1, "hash": hash, "stages": stages, "train_instructions": train, "eval_instructions": eval,
            "tensors": tensors, "embedded": embedded, "absent": absent,
            "difference": agreement.as_ref().map(|(difference, _)| difference),
            "numeric": numeric.as_ref().map(numeric::json), "kernels": kernels.as_ref().map(kernels::json),
        }))?;
    } else {
        let agreement = agreement.map_or(String::new(), |(_, text)| text);
        let numeric = numeric.as_ref().map_or(String::new(), numeric::text);
        let kernels = kernels.as_ref().map_or(String::new(), kernels::text);
        output::data(&format!(
            "{}: types, collectives, deadlock, memory of {stages} stages hold ({train} + {eval} instructions)\n{tensors} tensors: \
             {embedded} embedded, {} in files that are as they were, {absent} without data\n{agreement}{numeric}{kernels}hash {hash}\n",
            path.display(),
            tensors - embedded - absent
        ))?;
    }
    Ok(0)
}

/// How far the ranks are from one device, relatively, and a line about it.
#[cfg(target_os = "linux")]
fn agreement(args: &Args, artifact: &Artifact) -> Outcome<Option<(f64, String)>> {
    let Some(model) = args.model.as_ref().filter(|_| !args.numeric) else { return Ok(None) };
    let partition::Agreement { ranks, difference, bound, in_double } = partition::check(artifact, &args.subject, model)?;
    let what = "losses and gradient norms of 3 steps differ from one device's by at most";
    let allowed = match in_double {
        None => format!("allowed: {bound:e}"),
        Some(exact) => format!("allowed: {bound:e}; by {exact:.1e} in f64: rounding alone, which this model magnifies"),
    };
    Ok(Some((difference, format!("{ranks} ranks: {what} {difference:.1e} ({allowed})\n"))))
}

#[cfg(not(target_os = "linux"))]
fn agreement(_: &Args, _: &Artifact) -> Outcome<Option<(f64, String)>> {
    Ok(None)
}

/// Maps an artifact; its hashes and programs are checked.
pub fn load(path: &Path) -> Outcome<Artifact> {
    Artifact::load(path).map_err(|error| failure::artifact(error, path))
}
