//! An artifact's model compiled again by the artifact's own flags, some of them changed.

use super::compile;
use super::data::Shapes;
use super::failure::Outcome;
use super::flags::CompileFlags;
use crate::compile::Compiled;
use crate::error::Error;
use dcc_program::artifact::Artifact;
use dcc_program::manifest::Manifest;
use dcc_runtime::error::Error as RuntimeError;
use std::path::Path;

/// Errors: another model, flags that are not read, and those of compiling.
pub fn compiled(
    artifact: &Artifact,
    model: &Path,
    change: impl FnOnce(CompileFlags, &Manifest) -> CompileFlags,
) -> Outcome<Compiled> {
    let manifest = manifest(artifact)?;
    let bytes = super::model::map(model)?;
    if blake3::hash(&bytes).to_hex().as_str() != manifest.model_hash {
        let what = format!("the artifact was compiled from another {}", manifest.model);
        return Err(Error::usage(what).at(model.display()).help("give --model the file that was compiled").into());
    }
    let parsed = CompileFlags::parse(manifest.flags.iter().map(String::as_str));
    let flags = parsed.map_err(|error| RuntimeError::artifact(format!("the artifact's flags are not read: {error}")))?;
    let shapes = Shapes::of_programs(&artifact.train);
    Ok(compile::build(model, &change(flags, &manifest), &shapes, Vec::new(), &[])?.compiled)
}

fn manifest(artifact: &Artifact) -> Outcome<Manifest> {
    let malformed = |what| RuntimeError::artifact(format!("the artifact's options are malformed: {what}"));
    Ok(Manifest::from_options(&artifact.options).map_err(malformed)?)
}
