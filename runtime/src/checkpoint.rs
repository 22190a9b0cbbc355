//! Checkpoints: weights, optimizer state and the position of a run, in files that any plan can load.
//!
//! A folder `step-00001000/` holds safetensors shards, one per rank; `index.json`, which says where each slice of each global
//! tensor lies; and `MANIFEST`, with the BLAKE3 of every file and of itself. It is written under a temporary name, synced and
//! renamed: a folder of that name is whole. Every byte is verified before it is used.

mod convert;
mod lock;
mod manifest;
mod read;
mod sound;
mod survey;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod write;

use crate::comm::{Comm, Label, Place};
use crate::data::Position;
use crate::error::{Error, Result};
use crate::slice::Slice;
use dcc_program::{Coordinates, DType, Mesh, TensorType};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub use convert::{Layout, rewrite, write_safetensors};
pub use lock::Lock;
pub use read::Checkpoint;
pub use survey::{Condition, Found, survey};
pub use write::{Piece, Tensor};

/// Which tensor: a weight of the model, or optimizer or running state of that weight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Initializer name in the model.
    pub name: String,
    /// `m`, `v`, `momentum`, …; none for the weight itself.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub state: Option<String>,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.state {
            Some(state) => write!(f, "`{}` ({state})", self.name),
            None => write!(f, "`{}`", self.name),
        }
    }
}

/// Reads bytes of a rank's local buffer from an offset on: the device's copy to the host.
pub type ReadLocal<'a> = dyn Fn(u64, &mut [u8]) -> Result<()> + 'a;

/// What one rank writes of one tensor. Of the ranks that hold the same slice, one writes it: see `is_writer`.
pub struct Shard<'a> {
    pub key: Key,
    pub dtype: DType,
    /// Of the whole tensor, pieces included.
    pub slice: Slice,
    pub read: &'a ReadLocal<'a>,
}

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Optimizer steps done.
    pub step: u64,
    pub seed: u64,
    /// Data consumed.
    pub position: Position,
    /// Hash of the data: `Dataset::fingerprint`.
    pub data: u64,
    /// What made it, for people: model, mesh, options.
    pub description: String,
    /// File name of the model.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// Axes of the mesh with their sizes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mesh: Vec<(String, u32)>,
    /// The compile options as flags: `Manifest::flags`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// By the name of a weight, others that the module has for it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub aliases: BTreeMap<String, Vec<String>>,
    /// Weights that no step changes.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub constants: BTreeSet<String>,
    /// The model's forward graph as text: `Artifact::forward`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub forward: String,
}

/// When and where to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub dir: PathBuf,
    /// Complete checkpoints to keep, the new one included; none for all.
    pub keep_last: Option<usize>,
}

/// `--resume`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint of `--save-dir`, if there is one.
    Auto,
    None,
    Path(PathBuf),
}

impl Resume {
    pub fn parse(text: &str) -> Resume {
        match text {
            "auto" => Resume::Auto,
            "none" => Resume::None,
            path => Resume::Path(path.into()),
        }
    }

    /// The checkpoint to start from. Errors: a path that is none.
    pub fn find(&self, save_dir: Option<&Path>) -> Result<Option<PathBuf>> {
        match self {
            Resume::None => Ok(None),
            Resume::Path(path) if path.join(manifest::NAME).exists() => Ok(Some(path.clone())),
            // A folder of checkpoints means its newest.
            Resume::Path(path) => match steps(path)?.pop() {
                Some((_, newest)) => Ok(Some(newest)),
                None => Err(no_checkpoint(path)),
            },
            Resume::Auto if save_dir.is_none() => {
                Err(Error::data_option("--resume auto looks into --save-dir, which is not given").help("add --save-dir DIR"))
            }
            Resume::Auto => Ok(save_dir.map(steps).transpose()?.and_then(|mut steps| steps.pop()).map(|(_, path)| path)),
        }
    }
}

/// Names those beside `path`, the newest, if it might have been one of them.
fn no_checkpoint(path: &Path) -> Error {
    let error = Error::data_option("--resume: no checkpoint there").at(path.display());
    let Some(folder) = path.parent() else { return error };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let beside = steps(folder).unwrap_or_default();
    let newest = &beside[beside.len().saturating_sub(8)..];
    let names: Vec<String> = newest.iter().filter_map(|(_, path)| Some(path.file_name()?.to_str()?.to_owned())).collect();
    if names.is_empty() {
        return error.help("name the folder that --save-dir named, or one of its `step-…`");
    }
    let earlier = if newest.len() < beside.len() { "…, " } else { "" };
    error.help(format!("{} has {earlier}{}", folder.display(), names.join(", ")))
}

/// Whether the rank at `at` is the one that writes its slice: the first of those that hold the same. Along `pp` every stage
/// that has a parameter would hold it; of a tied one the first stage writes, which the caller knows.
pub fn is_writer(ty: &TensorType, mesh: &Mesh, at: &Coordinates) -> bool {
    mesh.space().filter(|&axis| mesh.name(axis) != "pp" && !ty.sharding.uses(axis)).all(|axis| at.get(axis) == 0)
}

impl Options {
    /// Makes the folder. Errors: nothing can be written there, which had better be known before hours of training.
    pub fn check_writable(&self) -> Result<()> {
        let probe = self.dir.join(format!(".probe-{}.partial", std::process::id()));
        let made = std::fs::create_dir_all(&self.dir).and_then(|()| std::fs::File::create(&probe));
        made.and_then(|_| std::fs::remove_file(&probe)).map_err(|error| Error::io("save checkpoints", &self.dir, error))
    }
}

/// Complete checkpoints in `dir`, oldest first.
pub fn steps(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let failed = |error| Error::io("list checkpoints", dir, error);
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let step = entry.file_name().to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        found.extend(step.map(|step: u64| (step, entry.path())));
    }
    found.sort();
    Ok(found)
}

/// Saves on all ranks together; where the checkpoint is. Errors, on every rank: no space, no permission; what was there before
/// is as it was.
pub fn save(comm: &mut dyn Comm, options: &Options, state: &RunState, shards: &[Shard<'_>]) -> Result<PathBuf> {
    let path = options.dir.join(format!("step-{:08}", state.step));
    let partial = options.dir.join(format!(".step-{:08}.partial", state.step));
    let first = comm.rank() == 0;
    let prepared = if first { write::prepare(&partial) } else { Ok(()) };
    together(comm, prepared)?;
    let (rank, world) = (comm.rank(), comm.world());
    let mut mark = |name: &str| {
        comm.mark(&Place { step: state.step, microbatch: 0, label: Label::new(&format!("save {name}")) });
    };
    let written = write::shards(&mut mark, &partial, rank, shards);
    let failed = comm.agree(u64::from(written.is_err()));
    // Best effort: the space of a checkpoint that did not come to be, to which no rank writes any more.
    let remove = || drop(std::fs::remove_dir_all(&partial));
    if first && matches!(failed, Ok(1..)) {
        remove();
    }
    settled(written, failed)?;
    let finished = if first { write::finish(&partial, &path, world, state, options.keep_last) } else { Ok(()) };
    if finished.is_err() {
        remove();
    }
    together(comm, finished)?;
    Ok(path)
}

/// All ranks succeed, or all fail: the one that failed with its own error.
fn together(comm: &mut dyn Comm, result: Result<()>) -> Result<()> {
    let failed = comm.agree(u64::from(result.is_err()));
    settled(result, failed)
}

/// What a rank's own result is where all have said how theirs is.
fn settled(result: Result<()>, failed: Result<u64>) -> Result<()> {
    // A peer that has heard of the failure may be gone before this rank's own barrier ends.
    result?;
    match failed? {
        0 => Ok(()),
        _ => Err(Error::peer("another rank could not save")),
    }
}
