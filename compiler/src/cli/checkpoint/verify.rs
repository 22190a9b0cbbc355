//! `dcc checkpoint verify CHECKPOINT`.

use super::{none, size};
use crate::cli::failure::Outcome;
use crate::cli::output;
use dcc_program::DType;
use dcc_runtime::checkpoint::{Checkpoint, Condition, Tensor, survey};
use dcc_runtime::data::not_finite;
use dcc_runtime::error::Error as RuntimeError;
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// A checkpoint, or a folder of several: then all of them
    checkpoint: PathBuf,
    /// Also look for values that are not finite, in what training changes
    #[arg(long)]
    finite: bool,
    /// Print what was checked as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let mut found = survey(&args.checkpoint)?;
    // What a save that was cut off left behind hurts nobody: the next save removes it. A folder with a checkpoint's name does.
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    found.retain(|found| !is_hidden(&found.path));
    if found.is_empty() {
        return match args.checkpoint.join("index.json").exists() {
            // Its manifest is what is missing.
            true => Err(Checkpoint::open(&args.checkpoint).err().map_or_else(|| none(&args.checkpoint).into(), Into::into)),
            false => Err(none(&args.checkpoint).into()),
        };
    }
    let (mut lines, mut values) = (String::new(), Vec::new());
    for found in found {
        let mut checkpoint = match found.condition {
            Condition::Complete(checkpoint) => checkpoint,
            Condition::Incomplete => Box::new(Checkpoint::open(&found.path)?),
            Condition::Damaged(error) => return Err(error.into()),
        };
        checkpoint.verify()?;
        if args.finite {
            finite(&mut checkpoint, &found.path)?;
        }
        let (tensors, files) = (checkpoint.index().len(), checkpoint.files().count());
        let blocks: usize = checkpoint.index().iter().map(|tensor| tensor.slices.len()).sum();
        let (bytes, step, path) = (checkpoint.bytes(), checkpoint.run().step, found.path.display());
        let values_are = if args.finite { ", all that training changes is finite" } else { "" };
        lines += &format!(
            "{path}: step {step}, {files} files of {}, {tensors} tensors of {blocks} blocks hold{values_are}\n",
            size(bytes)
        );
        values.push(json!({ "path": path.to_string(), "step": step, "bytes": bytes, "files": files, "tensors": tensors, "blocks": blocks }));
    }
    match args.json {
        true => output::json(&json!({ "schema": 1, "kind": "verified", "finite": args.finite, "checkpoints": values }))?,
        false => output::data(&lines)?,
    }
    Ok(0)
}

/// Errors: the first tensor with a value that is not finite. A mask may be infinite from the start.
fn finite(checkpoint: &mut Checkpoint, path: &Path) -> Outcome<()> {
    let constants = &checkpoint.run().constants;
    let tensors: Vec<Tensor> =
        checkpoint.index().iter().filter(|tensor| !constants.contains(&tensor.key.name)).cloned().collect();
    for tensor in &tensors {
        let Some(dtype) = DType::parse(&tensor.dtype).filter(|dtype| dtype.is_float()) else { continue };
        for piece in &tensor.slices {
            let bytes = checkpoint.block(piece, dtype)?;
            let count = not_finite(dtype, &bytes);
            if count > 0 {
                let what = format!("{count} of the values of {} in {} are not finite", tensor.key, piece.file);
                return Err(RuntimeError::numerical(what)
                    .at(path.display())
                    .help("resume from an earlier checkpoint; a smaller --lr, --warmup or --grad-clip may keep it finite")
                    .into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_finite_count() {
        let bytes: Vec<u8> = [1.0f32, f32::NAN, -2.0, f32::INFINITY].iter().flat_map(|x| x.to_ne_bytes()).collect();
        assert_eq!(not_finite(DType::F32, &bytes), 2);
        assert_eq!(not_finite(DType::F16, &[0x00, 0x7c, 0x00, 0x3c]), 1);
        assert_eq!(not_finite(DType::BF16, &[0x80, 0x7f, 0x80, 0x3f]), 1);
    }
}
