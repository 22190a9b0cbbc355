//! What lies in a folder of checkpoints, complete or not.

use super::manifest;
use super::read::Checkpoint;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// A checkpoint, or what was to become one.
#[derive(Debug)]
pub struct Found {
    /// As its name says.
    pub step: u64,
    pub path: PathBuf,
    pub condition: Condition,
}

#[derive(Debug)]
pub enum Condition {
    /// Its index is sound and its files are there in full; their bytes are for `Checkpoint::verify`.
    Complete(Box<Checkpoint>),
    /// A save that was cut off, or a folder without manifest.
    Incomplete,
    Damaged(Error),
}

/// All in `dir` by step, or `dir` itself where it is a checkpoint. Errors: a folder that cannot be read.
pub fn survey(dir: &Path) -> Result<Vec<Found>> {
    let failed = |error| Error::io("list checkpoints", dir, error);
    if dir.join(manifest::NAME).exists() {
        let mut found = Found { step: 0, path: dir.to_owned(), condition: condition(dir) };
        if let Condition::Complete(checkpoint) = &found.condition {
            found.step = checkpoint.run().step;
        }
        return Ok(vec![found]);
    }
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str().filter(|_| path.is_dir()) else { continue };
        let complete = name.strip_prefix("step-").and_then(|step| step.parse().ok());
        let partial = name.strip_prefix(".step-").and_then(|rest| rest.strip_suffix(".partial")?.parse().ok());
        if let Some(step) = complete {
            all.push(Found { step, condition: condition(&path), path });
        } else if let Some(step) = partial {
            all.push(Found { step, path, condition: Condition::Incomplete });
        }
    }
    all.sort_by(|a, b| (a.step, &a.path).cmp(&(b.step, &b.path)));
    Ok(all)
}

fn condition(path: &Path) -> Condition {
    if !path.join(manifest::NAME).exists() {
        return Condition::Incomplete;
    }
    match Checkpoint::open(path) {
        Ok(checkpoint) => Condition::Complete(Box::new(checkpoint)),
        Err(error) => Condition::Damaged(error),
    }
}
