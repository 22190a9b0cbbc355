//! What a run executes: an artifact and the flags; and how ranks get both.

use super::Flags;
use crate::error::{Error, Result};
use crate::exec::{Parameter, World};
use bytes::Bytes;
use dcc_program::artifact::{Artifact, Data};
use dcc_program::manifest::Manifest;
use dcc_program::program::Program;
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The artifact to run.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A `.dcc` file.
    File(&'a Path),
    /// One that was just compiled; the paths of its tensors are relative to `folder`.
    Built { artifact: &'a Artifact, folder: &'a Path },
}

/// An artifact and how to run it.
pub struct Job {
    pub artifact: Artifact,
    /// What the paths of the artifact's tensors are relative to.
    pub folder: PathBuf,
    pub flags: Flags,
    pub manifest: Manifest,
    /// Of the artifact.
    pub hash: u64,
}

/// What stands before a handed-over artifact's bytes.
#[derive(Serialize, Deserialize)]
struct Header {
    flags: Flags,
    folder: PathBuf,
    /// The artifact's file; its bytes follow where there is none.
    file: Option<PathBuf>,
}

/// The first argument of a rank; the second is where its job is.
const ARGUMENT: &str = "rank";

impl Job {
    /// Errors: a damaged or unsound artifact.
    pub fn new(source: &Source<'_>, flags: &Flags) -> Result<Job> {
        let (artifact, folder) = match *source {
            Source::File(path) => {
                let artifact = Artifact::load(path).map_err(|error| Error::of_artifact(error).at(path.display()))?;
                (artifact, path.parent().unwrap_or(Path::new("")).to_owned())
            }
            Source::Built { artifact, folder } => (artifact.clone(), folder.to_owned()),
        };
        Job::of(artifact, folder, flags.clone())
    }

    fn of(artifact: Artifact, folder: PathBuf, flags: Flags) -> Result<Job> {
        let malformed = |what| Error::artifact(format!("the artifact's options are malformed: {what}"));
        let manifest = Manifest::from_options(&artifact.options).map_err(malformed)?;
        let hash = u64::from_le_bytes(*artifact.hash().as_bytes().first_chunk().expect("a hash has 32 bytes"));
        Ok(Job { artifact, folder, flags, manifest, hash })
    }

    /// Errors: a file that the run would write is one that it reads.
    pub(super) fn keep_apart(&self, source: &Source<'_>) -> Result<()> {
        let mut files = BTreeSet::new();
        for tensor in &self.artifact.tensors {
            if let Data::File { path, .. } = &tensor.data {
                files.insert(self.folder.join(path));
            }
        }
        let tensors = files.iter().map(|path| ("a file of the artifact's tensors", path.as_path()));
        let own = match *source {
            Source::File(path) => Some(("the artifact", path)),
            Source::Built { .. } => None,
        };
        self.flags.keep_apart(&tensors.chain(own).collect::<Vec<_>>())
    }

    /// Of the programs that run: those of evaluation where there are data for it, or nothing trains.
    pub fn world(&self) -> Result<World> {
        let Artifact { train, eval, .. } = &self.artifact;
        let evaluates = !self.flags.eval_data.is_empty() || train.is_empty();
        let sets = [&train[..], if evaluates { &eval[..] } else { &[] }];
        World::new(&sets.into_iter().filter(|set: &&[Program]| !set.is_empty()).collect::<Vec<_>>())
    }

    /// Shape of the tensor that a parameter is, or is a piece of.
    pub(super) fn whole_shape(&self, parameter: &Parameter) -> Vec<u64> {
        parameter.whole_shape(self.artifact.tensor(&parameter.name).map_or(&[], |tensor| &tensor.shape))
    }

    /// Axes with their sizes.
    pub(super) fn mesh(&self) -> Vec<(String, u32)> {
        self.artifact.train[0].mesh.axes.iter().map(|axis| (axis.name.clone(), axis.size)).collect()
    }

    /// What made a checkpoint.
    pub(super) fn description(&self) -> String {
        let axes: Vec<String> = self.mesh().iter().map(|(name, size)| format!("{name} {size}")).collect();
        format!("{} on {}", self.artifact.train[0].name, axes.join(", "))
    }

    /// The ranks' arguments, and the memory that these name, to be kept until the ranks have started.
    pub(super) fn hand_over(&self, source: &Source<'_>) -> Result<(Vec<OsString>, File)> {
        let failed = |error: std::io::Error| Error::system("hand the artifact to the ranks", error);
        // Ranks inherit it under the same number.
        let memory = rustix::fs::memfd_create("dcc-job", MemfdFlags::empty()).map_err(|error| failed(error.into()))?;
        let mut file = File::from(memory);
        let path = match source {
            Source::File(path) => Some(std::path::absolute(path).map_err(failed)?),
            Source::Built { .. } => None,
        };
        let folder = std::path::absolute(if self.folder.as_os_str().is_empty() { Path::new(".") } else { &self.folder });
        let header = Header { flags: self.flags.clone(), folder: folder.map_err(failed)?, file: path };
        let mut json = serde_json::to_vec(&header).expect("flags are plain data");
        // The artifact starts where its own alignment wants it.
        json.resize((json.len() + 8).next_multiple_of(64) - 8, b' ');
        file.write_all(&(json.len() as u64).to_le_bytes()).and_then(|()| file.write_all(&json)).map_err(failed)?;
        if header.file.is_none() {
            self.artifact.write(&mut file).map_err(failed)?;
        }
        Ok((vec![ARGUMENT.into(), format!("/proc/self/fd/{}", file.as_raw_fd()).into()], file))
    }

    /// The rank's side of `hand_over`.
    pub(super) fn receive() -> Result<Job> {
        let lost = |what: &dyn std::fmt::Display| Error::handshake(format!("the launcher's job cannot be read: {what}"));
        let path = std::env::args_os().nth(2).ok_or_else(|| lost(&"no argument names it"))?;
        let file = File::open(&path).map_err(|error| lost(&error))?;
        let bytes = dcc_program::map::map(&file).map_err(|error| lost(&error))?;
        let length = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length)) as usize;
        let json: Bytes = if bytes.len() >= 8 + length { bytes.slice(8..8 + length) } else { Bytes::new() };
        let header: Header = serde_json::from_slice(&json).map_err(|error| lost(&error))?;
        let artifact = match &header.file {
            Some(path) => Artifact::load(path).map_err(|error| Error::of_artifact(error).at(path.display()))?,
            None => Artifact::decode(bytes.slice(8 + length..)).map_err(Error::of_artifact)?,
        };
        Job::of(artifact, header.folder, header.flags)
    }
}
