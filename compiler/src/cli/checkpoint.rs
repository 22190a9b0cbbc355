//! `dcc checkpoint {list,inspect,verify,convert}`: the files that a run saves, without a model or a plan.

mod convert;
mod inspect;
mod list;
mod verify;

use super::failure::Outcome;
use crate::error::Error;
use dcc_runtime::checkpoint::{self, Checkpoint, Condition, Found};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the checkpoints of a folder: step, size, plan, whether each is complete
    List(list::Args),
    /// Show the run that a checkpoint is of, and its tensors: type, blocks, files
    Inspect(inspect::Args),
    /// Check every byte, and that the blocks of each tensor are the tensor
    Verify(verify::Args),
    /// Write a checkpoint as one rank or another plan would, or as .safetensors with the optimizer's state
    Convert(convert::Args),
}

pub fn run(args: &Args) -> Outcome<i32> {
    match &args.action {
        Action::List(args) => list::run(args),
        Action::Inspect(args) => inspect::run(args),
        Action::Verify(args) => verify::run(args),
        Action::Convert(args) => convert::run(args),
    }
}

/// A checkpoint, or the newest of a folder.
fn open(path: &Path) -> Outcome<(PathBuf, Checkpoint)> {
    let newest = checkpoint::survey(path)?.pop().filter(|found| found.path != path);
    let path = match newest {
        // A save that was cut off is not the newest checkpoint.
        Some(Found { condition: Condition::Incomplete, .. }) => {
            let complete = |found: &Found| !matches!(found.condition, Condition::Incomplete);
            let found = checkpoint::survey(path)?.into_iter().rfind(complete);
            found.ok_or_else(|| none(path))?.path
        }
        Some(found) => found.path,
        None => path.to_owned(),
    };
    Ok((path.clone(), Checkpoint::open(&path)?))
}

fn none(path: &Path) -> Error {
    Error::usage("no checkpoint there").at(path.display()).help("name the folder that --save-dir named, or one of its `step-…`")
}

/// `1.5 MiB`.
fn size(bytes: u64) -> String {
    crate::report::size(bytes)
}

/// The block as ranges, `whole` where it is all.
fn ranges(shape: &[u64], start: &[u64], extent: &[u64]) -> String {
    if shape == extent {
        return "whole".to_owned();
    }
    let ranges = start.iter().zip(extent).map(|(start, extent)| format!("{start}:{}", start + extent));
    format!("[{}]", ranges.collect::<Vec<_>>().join(", "))
}
