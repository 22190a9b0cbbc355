//! The `.dcc` file: the train and eval programs, where the tensors' bytes are, the compile options.
//!
//! ```text
//! dcc artifact 1 <BLAKE3 of the header> <bytes of the header>\n
//! {"options":…,"sections":[{"name":"train.0","offset":0,"bytes":5120,"blake3":"…"},…],"tensors":[…]}
//! … padding to 64 … section … padding to 64 … section …
//! ```
//!
//! Sections are program texts (`train.0`, `eval.0`, …: one per stage), the model's graph (`forward`) and embedded tensors (`tensor.0`, …),
//! machine code for GPUs (`code.NAME`). The header holds their hashes, so its own hash stands for the whole file; the same artifact gives
//! the same bytes. Loading checks hashes before it believes anything, then parses and runs the gate. Embedded tensors stay slices of the
//! mapped file.

mod decode;
mod encode;

use crate::check::CheckError;
use crate::program::{Param, ParamKind, Program};
use crate::types::{DType, Shape};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Component, Path};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Artifact {
    /// One program per stage.
    pub train: Vec<Program>,
    /// One program per stage, or none; parameters where `train` has them.
    pub eval: Vec<Program>,
    /// The model's forward graph as text, which the compiler reads to evaluate it; empty where evaluation is not wanted.
    pub forward: String,
    pub tensors: Vec<Tensor>,
    /// Machine code of kernels for GPUs, by names that the runtime gives it; opaque here.
    pub code: BTreeMap<String, Bytes>,
    /// All compile options, for people and for `dcc inspect`.
    pub options: serde_json::Map<String, serde_json::Value>,
}

/// Initial values of a parameter or constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// `Param::name`.
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    pub data: Data,
}

/// Where little-endian, row-major elements are.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Nowhere: the run must initialise it.
    Absent,
    File {
        /// Relative to the artifact's folder, `/` between parts.
        path: String,
        offset: u64,
        bytes: u64,
        /// Size that the file must still have.
        file_bytes: u64,
    },
    Embedded(Bytes),
}

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("cannot read {path}: {source}")]
    Io { path: String, source: io::Error },
    #[error("this is no dcc artifact")]
    NotArtifact,
    #[error("artifact format {found}, this build reads format {known}")]
    Version { found: String, known: u32 },
    #[error("the artifact is cut off in its {part}")]
    Truncated { part: String },
    #[error("the artifact is damaged in its {part}: its bytes do not have the hash they had when it was written")]
    Damaged { part: String },
    #[error("the artifact's {part} is malformed: {what}")]
    Malformed { part: String, what: String },
    #[error("the artifact's {part} is unsound: {error}")]
    Unsound { part: String, error: CheckError },
    #[error("tensor {name}: {what}")]
    Tensor { name: String, what: String },
}

type Result<T> = std::result::Result<T, ArtifactError>;

const FORMAT: u32 = 1;
const ALIGN: u64 = 64;

impl Artifact {
    /// Maps the file and decodes it.
    pub fn load(path: &Path) -> Result<Artifact> {
        let io = |source| ArtifactError::Io { path: path.display().to_string(), source };
        let file = open_regular(path).map_err(io)?;
        Artifact::decode(crate::map::map(&file).map_err(io)?)
    }

    /// Reads what `write` writes; embedded tensors keep `bytes` alive.
    pub fn decode(bytes: Bytes) -> Result<Artifact> {
        decode::artifact(bytes)
    }

    /// Writes the file's bytes; the same artifact gives the same bytes.
    pub fn write(&self, out: &mut impl io::Write) -> io::Result<()> {
        encode::write(self, out)
    }

    /// What stands for the whole artifact: ranks of one run compare it. Reads embedded tensors.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(encode::Layout::of(self).header.as_bytes())
    }

    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// Sound programs, one layout of parameters for both modes, initial values for every weight.
    pub fn verify(&self) -> Result<()> {
        for (part, programs) in [("train programs", &self.train), ("eval programs", &self.eval)] {
            let part = part.to_owned();
            if !programs.is_empty() {
                crate::check::programs(programs).map_err(|error| ArtifactError::Unsound { part, error })?;
            }
        }
        let malformed = |what: String| ArtifactError::Malformed { part: "programs".to_owned(), what };
        if self.train.is_empty() && self.eval.is_empty() {
            return Err(malformed("there are none".to_owned()));
        }
        for (train, eval) in self.train.iter().zip(&self.eval) {
            same_layout(train, eval).map_err(malformed)?;
        }
        for param in self.train.iter().chain(&self.eval).flat_map(|p| p.params.iter().map(move |x| (p, x))) {
            self.has_values(param.0, param.1)?;
        }
        Ok(())
    }

    fn has_values(&self, p: &Program, param: &Param) -> Result<()> {
        if param.kind != ParamKind::Weight {
            return Ok(());
        }
        let wrong = |what: String| ArtifactError::Tensor { name: param.name.clone(), what };
        let tensor = self.tensor(&param.name).ok_or_else(|| wrong("has no initial values".to_owned()))?;
        let mut expected = p.ty(param.buffer).shape.clone();
        if let Some(piece) = param.piece
            && let (Some(e), Some(&whole)) = (expected.get_mut(piece.dim as usize), tensor.shape.get(piece.dim as usize))
            && piece.end <= whole
        {
            *e = whole;
        }
        if expected == tensor.shape {
            Ok(())
        } else {
            Err(wrong(format!("has shape {:?}, the program needs {expected:?}", tensor.shape)))
        }
    }
}

/// Every parameter of `eval` stands where `train` has it.
fn same_layout(train: &Program, eval: &Program) -> std::result::Result<(), String> {
    for param in &eval.params {
        let same = |x: &&Param| x.name == param.name && x.kind == param.kind && x.piece == param.piece;
        let there = train.params.iter().find(same).map(|x| train.buffer(x.buffer));
        if there.is_some_and(|b| b != eval.buffer(param.buffer)) {
            return Err(format!("parameter {} stands elsewhere, or has another type, in train and eval", param.name));
        }
    }
    Ok(())
}

impl Tensor {
    /// Elements times width; `None` where that overflows.
    pub fn expected_bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes(), |n, &d| n.checked_mul(d))
    }

    /// The tensor's bytes, not copied: of the artifact, or mapped from the file beside it. `None` if absent.
    pub fn bytes(&self, folder: &Path) -> Result<Option<Bytes>> {
        let wrong = |what: String| ArtifactError::Tensor { name: self.name.clone(), what };
        let (path, offset, bytes, file_bytes) = match &self.data {
            Data::Absent => return Ok(None),
            Data::Embedded(bytes) => return Ok(Some(bytes.clone())),
            Data::File { path, offset, bytes, file_bytes } => (path, *offset, *bytes, *file_bytes),
        };
        let full = folder.join(path);
        let io = |source| ArtifactError::Io { path: full.display().to_string(), source };
        let mapped = crate::map::map(&open_regular(&full).map_err(io)?).map_err(io)?;
        if mapped.len() as u64 != file_bytes {
            return Err(wrong(format!("{path} has {} bytes, {file_bytes} when it was compiled", mapped.len())));
        }
        let end = offset.checked_add(bytes).filter(|&end| end <= file_bytes);
        let end = end.ok_or_else(|| wrong(format!("bytes {offset}+{bytes} of a file of {file_bytes}")))?;
        Ok(Some(mapped.slice(offset as usize..end as usize)))
    }
}

/// Opens a regular file; a pipe or device could block or never end.
fn open_regular(path: &Path) -> io::Result<std::fs::File> {
    let regular = |m: std::fs::Metadata| match m.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    };
    regular(std::fs::metadata(path)?)?;
    let file = std::fs::File::open(path)?;
    regular(file.metadata()?)?;
    // A first byte that cannot be read (a broken disk, a stale mount) is an error here and a signal once mapped.
    let _ = (&file).read(&mut [0])?;
    Ok(file)
}

/// Whether a path stays relative, so that the artifact's folder can move.
fn is_relative(path: &str) -> bool {
    let plain = |c| matches!(c, Component::Normal(_) | Component::CurDir | Component::ParentDir);
    !path.is_empty() && !path.contains('\0') && Path::new(path).components().all(plain)
}
