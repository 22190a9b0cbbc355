//! Every tensor of all ranks against the unpartitioned graph, on a small instance of an artifact's model and plan.

use super::Args;
use crate::cli::again;
use crate::cli::failure::Outcome;
use crate::error::Error;
use crate::numeric::{Agreement, Instance};
use dcc_program::artifact::Artifact;
use dcc_program::text::print;
use serde_json::{Value, json};

/// Errors: another model, programs that this dcc does not make of it, and the first tensor that differs.
pub fn check(args: &Args, artifact: &Artifact) -> Outcome<Agreement> {
    let model = args.model.as_deref().ok_or_else(|| Error::usage("--numeric needs --model MODEL.onnx"))?;
    let compiled = again::compiled(artifact, model, |flags, _| flags)?;
    // As texts: what is read back may number the expressions of its kernels in another order.
    if !compiled.artifact.train.iter().map(print).eq(artifact.train.iter().map(print)) {
        let what = "this dcc makes other programs of the model than the artifact has";
        return Err(Error::usage(what).at(args.subject.display()).help("compile it again").into());
    }
    Ok(Instance::of(&compiled)?.check()?)
}

pub fn text(found: &Agreement) -> String {
    let Agreement { ranks, microbatches, tensors, difference, scaled } = found;
    let scaled = if scaled.is_empty() { String::new() } else { format!("; made smaller: {}", scaled.join(", ")) };
    format!(
        "{tensors} tensors of {ranks} ranks are those of the unpartitioned graph, in {microbatches} microbatches: they differ by at most \
         {difference:.1e}{scaled}\n"
    )
}

pub fn json(found: &Agreement) -> Value {
    json!({
        "ranks": found.ranks,
        "microbatches": found.microbatches,
        "tensors": found.tensors,
        "difference": found.difference,
        "scaled": found.scaled,
    })
}
