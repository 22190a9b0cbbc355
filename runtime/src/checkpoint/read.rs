//! Reading: verify, then assemble any slice of any tensor from whatever slices were saved.

use super::manifest::{self, Entry};
use super::write::{FORMAT, INDEX, Index, Piece, Tensor};
use super::{Key, RunState, sound};
use crate::data::Convert;
use crate::error::{Error, Result};
use crate::slice::{Slice, for_each_common};
use bytes::Bytes;
use dcc_program::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// An opened checkpoint. Its index is verified; shard files are when they are first read from.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    index: Index,
    entries: Vec<Entry>,
    /// Verified shard files.
    files: BTreeMap<String, Bytes>,
}

impl Checkpoint {
    /// Errors: no checkpoint, a damaged index, a file that is missing or of another size.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let entries = manifest::read(dir)?;
        for entry in &entries {
            let path = dir.join(&entry.name);
            let found = std::fs::metadata(&path).map(|metadata| metadata.len()).unwrap_or(0);
            if found != entry.bytes {
                let what = format!("damaged: {} has {found} bytes, {} were written", entry.name, entry.bytes);
                return Err(Error::checkpoint(what).at(path.display()).help(OTHER));
            }
        }
        let path = dir.join(INDEX);
        let json = std::fs::read(&path).map_err(|error| Error::io("read a checkpoint", &path, error))?;
        let damaged = |what: &str| Error::checkpoint(format!("damaged: {INDEX} {what}")).at(path.display()).help(OTHER);
        let entry = entries.iter().find(|entry| entry.name == INDEX).ok_or_else(|| damaged("is not in the manifest"))?;
        if blake3::hash(&json).to_hex().as_str() != entry.hash {
            return Err(damaged("is not what was written"));
        }
        let index: Index = serde_json::from_slice(&json).map_err(|error| damaged(&format!("is not readable: {error}")))?;
        if index.format != FORMAT {
            let what = format!("format {} is not {FORMAT}, which this dcc reads", index.format);
            return Err(Error::foreign_checkpoint(what).at(dir.display()));
        }
        sound::index(&index, &entries).map_err(|what| Error::checkpoint(what).at(path.display()).help(OTHER))?;
        Ok(Checkpoint { dir: dir.to_owned(), index, entries, files: BTreeMap::new() })
    }

    pub fn run(&self) -> &RunState {
        &self.index.run
    }

    /// All tensors: key, dtype, global shape.
    pub fn tensors(&self) -> impl Iterator<Item = (&Key, DType, &[u64])> {
        self.index.tensors.iter().map(|tensor| {
            let dtype = DType::parse(&tensor.dtype).expect("a verified index names dtypes");
            (&tensor.key, dtype, &tensor.shape[..])
        })
    }

    /// What it holds beside weights: `m`, `v`, `momentum`, …
    pub fn states(&self) -> BTreeSet<&str> {
        self.index.tensors.iter().filter_map(|tensor| tensor.key.state.as_deref()).collect()
    }

    /// The same with where the blocks of each lie.
    pub fn index(&self) -> &[Tensor] {
        &self.index.tensors
    }

    /// Of all files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    /// Files with blocks, each written by one rank.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.entries.iter().filter(|entry| entry.name != INDEX).map(|entry| (entry.name.as_str(), entry.bytes))
    }

    /// Verifies every byte of every file, and that the blocks of each tensor are the tensor.
    pub fn verify(&mut self) -> Result<()> {
        for tensor in &self.index.tensors {
            sound::no_overlap(tensor).map_err(|what| Error::checkpoint(what).at(self.dir.join(INDEX).display()))?;
        }
        let names: Vec<String> = self.entries.iter().map(|entry| entry.name.clone()).filter(|name| name != INDEX).collect();
        names.iter().try_for_each(|name| self.file(name).map(drop))
    }

    /// Gives `write` the bytes of `slice` with their byte offsets in a buffer of its local shape. What lies outside of the slice
    /// is not written. State of no parameter (a loss scale) that the checkpoint knows nothing of begins now, with zeros. What was saved as
    /// f32 is read as f64 too, exactly, and the other way round, to nearest; so are weights that were, or are to be, bf16. Errors: damage, no such
    /// tensor, another shape or dtype.
    pub fn read(
        &mut self,
        key: &Key,
        dtype: DType,
        slice: &Slice,
        write: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let known = self.index.tensors.iter().any(|tensor| tensor.key.name == key.name);
        if !known && key.state.is_some() && slice.global.is_empty() {
            return write(0, &vec![0; dtype.bytes() as usize]);
        }
        let tensor = self.tensor(key, dtype, &slice.global)?.clone();
        let saved_dtype = DType::parse(&tensor.dtype).expect("a verified index names dtypes");
        let convert = (saved_dtype != dtype).then(|| Convert::new(saved_dtype, dtype));
        let (saved_element, element) = (saved_dtype.bytes(), dtype.bytes());
        let mut converted = Vec::new();
        let mut found = 0;
        for piece in &tensor.slices {
            let saved = Slice {
                global: tensor.shape.clone(),
                start: piece.start.clone(),
                extent: piece.extent.clone(),
                local: piece.extent.clone(),
            };
            if saved.intersect(slice).is_none() {
                continue;
            }
            let file = self.file(&piece.file)?;
            let mut result = Ok(());
            found += for_each_common(&saved, slice, |from, to, len| {
                let start = (piece.offset + from * saved_element) as usize;
                let mut bytes = &file[start..start + (len * saved_element) as usize];
                if let Some(convert) = &convert {
                    converted.resize((len * element) as usize, 0);
                    convert.run(bytes, &mut converted);
                    bytes = &converted;
                }
                if result.is_ok() {
                    result = write(to * element, bytes);
                }
            });
            result?;
        }
        if found != slice.elements() {
            let what = format!("`{}` has {found} of {} elements that this rank needs", key.name, slice.elements());
            return Err(Error::checkpoint(what).at(self.dir.display()));
        }
        Ok(())
    }

    /// The elements of a block, verified.
    pub fn block(&mut self, piece: &Piece, dtype: DType) -> Result<Bytes> {
        let length = piece.extent.iter().product::<u64>() * dtype.bytes();
        let file = self.file(&piece.file)?;
        Ok(file.slice(piece.offset as usize..(piece.offset + length) as usize))
    }

    fn tensor(&self, key: &Key, dtype: DType, shape: &[u64]) -> Result<&Tensor> {
        let foreign = |what: String| {
            let of = format!("the checkpoint is of: {}", self.index.run.description);
            Error::foreign_checkpoint(what).at(self.dir.display()).help(match &key.state {
                None => of,
                Some(_) => format!("{of}; {}", anew(&self.dir)),
            })
        };
        let tensor = self.index.tensors.iter().find(|tensor| tensor.key == *key);
        let missing = || {
            let states = self.states().into_iter().collect::<Vec<_>>().join(", ");
            let of_weights = format!("the checkpoint has no {key}");
            foreign(match (&key.state, states.is_empty()) {
                (None, _) => of_weights,
                (Some(_), true) => format!("{of_weights}: its optimizer keeps nothing of a weight"),
                (Some(_), false) => format!("{of_weights}: its optimizer keeps {states}"),
            })
        };
        let tensor = tensor.ok_or_else(missing)?;
        let converts = |dtype: DType| match dtype {
            DType::F32 | DType::F64 => true,
            DType::BF16 => key.state.is_none(),
            _ => false,
        };
        let fits = |saved: DType| saved == dtype || converts(saved) && converts(dtype);
        if tensor.shape != shape || !DType::parse(&tensor.dtype).is_some_and(fits) {
            let Tensor { dtype: saved, shape: of, .. } = tensor;
            let hint = if of == shape { format!(", unless by --dtype {saved}") } else { String::new() };
            let text = format!("{key} is {saved}{of:?} in the checkpoint, {}{shape:?} in the program{hint}", dtype.name());
            return Err(foreign(text));
        }
        Ok(tensor)
    }

    /// A shard file, verified.
    fn file(&mut self, name: &str) -> Result<Bytes> {
        if let Some(bytes) = self.files.get(name) {
            return Ok(bytes.clone());
        }
        let path = self.dir.join(name);
        let entry = self.entries.iter().find(|entry| entry.name == name);
        let entry = entry.ok_or_else(|| Error::checkpoint(format!("{name} is not in the manifest")).at(path.display()))?;
        let bytes = File::open(&path)
            .and_then(|file| dcc_program::map::map(&file))
            .map_err(|error| Error::io("read a checkpoint", &path, error))?;
        if bytes.len() as u64 != entry.bytes || blake3::hash(&bytes).to_hex().as_str() != entry.hash {
            let what = format!("damaged: {name} is not what was written{}", self.damaged_tensors(name, &bytes));
            return Err(Error::checkpoint(what).at(path.display()).help(OTHER));
        }
        self.files.insert(name.to_owned(), bytes.clone());
        Ok(bytes)
    }

    /// `, in `w1``: the tensors of a damaged file whose own bytes changed.
    fn damaged_tensors(&self, name: &str, bytes: &Bytes) -> String {
        let is_damaged = |tensor: &Tensor, piece: &Piece| {
            let length = DType::parse(&tensor.dtype).map_or(0, DType::bytes) * piece.extent.iter().product::<u64>();
            let range = piece.offset as usize..(piece.offset + length) as usize;
            bytes.get(range).is_none_or(|bytes| blake3::hash(bytes).to_hex().as_str() != piece.blake3)
        };
        let tensors = self.index.tensors.iter();
        let damaged: Vec<String> = tensors
            .filter(|tensor| tensor.slices.iter().any(|piece| piece.file == name && is_damaged(tensor, piece)))
            .map(|tensor| tensor.key.to_string())
            .collect();
        if damaged.is_empty() { ", in its header".into() } else { format!(", in {}", damaged.join(", ")) }
    }
}

/// How another optimizer begins with the weights of a checkpoint.
fn anew(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        "for its weights alone, `dcc export {dir} --safetensors W.safetensors`, then `--weights W.safetensors` without --resume"
    )
}

const OTHER: &str = "resume from another checkpoint with --resume PATH";
