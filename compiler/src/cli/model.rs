//! Opening what a command names: an ONNX model with the files beside it, an artifact, a checkpoint.

use super::failure::{self, Outcome};
use crate::error::Error;
use crate::import::Model;
use bytes::Bytes;
use dcc_program::external::{self, ExternalError};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Model,
    Artifact,
    /// A folder.
    Checkpoint,
}

/// A mapped model.
pub struct Source {
    pub model: Model,
    /// Name of its file.
    pub name: String,
    pub folder: PathBuf,
    /// Of the files beside it that are there.
    pub external_bytes: BTreeMap<String, u64>,
}

/// By the first bytes; whatever is no file of ours is taken for a model, whose decoder says what is wrong.
pub fn kind(path: &Path) -> Outcome<Kind> {
    if path.is_dir() {
        return Ok(Kind::Checkpoint);
    }
    Ok(match map(path)?.starts_with(b"dcc artifact") {
        true => Kind::Artifact,
        false => Kind::Model,
    })
}

/// The bytes of a regular file: opening a pipe could wait for ever.
pub fn map(path: &Path) -> Outcome<Bytes> {
    let failed = |error| failure::io("read", path, error);
    match std::fs::metadata(path).map_err(failed)?.is_file() {
        true => File::open(path).and_then(|file| dcc_program::map::map(&file)).map_err(failed),
        false => Err(failed(std::io::Error::other("not a regular file"))),
    }
}

/// Maps a model and the files that its tensors name. Weights may be absent: nobody reads them to compile.
pub fn open(path: &Path) -> Outcome<Source> {
    let place = path.display();
    let mut model = Model::decode(map(path)?).map_err(|error| error.at(&place))?;
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    let mut external_bytes = BTreeMap::new();
    for location in model.external_locations() {
        match external::open(&folder, &location) {
            Ok(file) => {
                let bytes =
                    dcc_program::map::map(&file).map_err(|error| failure::io("read", &folder.join(&location), error))?;
                external_bytes.insert(location.clone(), bytes.len() as u64);
                model = model.with_file(location, bytes);
            }
            Err(ExternalError::Missing(_)) => {}
            Err(error) => {
                let help = "external data must lie in the model's folder; move them there and export again";
                return Err(Error::external(error.to_string()).at(&place).help(help).into());
            }
        }
    }
    let model = model.tied();
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(Source { model, name, folder, external_bytes })
}
