//! Writing: each rank its shard file, then rank 0 index and manifest.

use super::manifest::{self, Entry};
use super::{Key, RunState, Shard, steps};
use crate::error::{Error, Result};
use crate::slice::Slice;
use dcc_program::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Bytes that go from the device to the file at a time.
const CHUNK: usize = 1 << 20;
pub const INDEX: &str = "index.json";
pub const FORMAT: u32 = 1;

/// `index.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Index {
    pub format: u32,
    pub run: RunState,
    pub tensors: Vec<Tensor>,
}

/// A tensor and the slices that make it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    #[serde(flatten)]
    pub key: Key,
    pub dtype: String,
    /// Global.
    pub shape: Vec<u64>,
    pub slices: Vec<Piece>,
}

/// A slice of a tensor, and where its bytes are: row-major, without the tails of uneven shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    pub file: String,
    /// Byte offset in the file.
    pub offset: u64,
    pub start: Vec<u64>,
    pub extent: Vec<u64>,
    pub blake3: String,
}

/// What a rank leaves for rank 0.
#[derive(Serialize, Deserialize)]
struct Part {
    tensors: Vec<Tensor>,
    bytes: u64,
    blake3: String,
}

fn file_name(rank: u32) -> String {
    format!("rank-{rank:05}.safetensors")
}

fn part_name(rank: u32) -> String {
    format!("rank-{rank:05}.json")
}

pub fn failed(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::io("save a checkpoint", path, error).help("what was saved before is intact")
}

/// An empty folder for the parts. What earlier saves left behind when they were cut off goes first.
pub fn prepare(partial: &Path) -> Result<()> {
    let dir = partial.parent().unwrap_or(partial);
    std::fs::create_dir_all(dir).map_err(failed(dir))?;
    for entry in std::fs::read_dir(dir).map_err(failed(dir))? {
        let entry = entry.map_err(failed(dir))?;
        if entry.file_name().to_string_lossy().starts_with(".step-") {
            std::fs::remove_dir_all(entry.path()).map_err(failed(dir))?;
        }
    }
    std::fs::create_dir(partial).map_err(failed(partial))
}

/// A file that is hashed while it is written.
struct Hashed {
    file: File,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl Hashed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }
}

/// Writes a rank's shards and what rank 0 must know of them. `mark` hears of each tensor before it is written.
pub fn shards(mark: &mut dyn FnMut(&str), dir: &Path, rank: u32, shards: &[Shard<'_>]) -> Result<()> {
    let name = file_name(rank);
    let path = dir.join(&name);
    let io = failed(&path);
    let header = header(shards.iter().map(|shard| (shard_name(shard), shard.dtype, &shard.slice.extent[..])), None);
    let file = File::create_new(&path).map_err(&io)?;
    let mut out = Hashed { file, hasher: blake3::Hasher::new(), bytes: 0 };
    out.write(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write(&header)).map_err(&io)?;
    let mut tensors = Vec::new();
    let mut buffer = Vec::new();
    for shard in shards {
        mark(&shard.key.name);
        let offset = out.bytes;
        let blake3 = copy(shard, &mut out, &mut buffer, &path)?;
        let Slice { global, start, extent, .. } = shard.slice.clone();
        let piece = Piece { file: name.clone(), offset, start, extent, blake3 };
        tensors.push(Tensor { key: shard.key.clone(), dtype: shard.dtype.name().into(), shape: global, slices: vec![piece] });
    }
    out.file.sync_all().map_err(&io)?;
    let part = Part { tensors, bytes: out.bytes, blake3: out.hasher.finalize().to_hex().to_string() };
    let json = serde_json::to_vec(&part).expect("an index is plain data");
    std::fs::write(dir.join(part_name(rank)), json).map_err(io)
}

/// Copies a shard's elements to the file; their BLAKE3.
fn copy(shard: &Shard<'_>, out: &mut Hashed, buffer: &mut Vec<u8>, path: &Path) -> Result<String> {
    let element = shard.dtype.bytes();
    let mut hasher = blake3::Hasher::new();
    let mut result = Ok(());
    buffer.clear();
    let mut flush = |buffer: &mut Vec<u8>| {
        hasher.update(buffer);
        let written = out.write(buffer);
        buffer.clear();
        written.map_err(failed(path))
    };
    shard.slice.for_each_run(|run| {
        let (mut at, end) = (run.local * element, (run.local + run.len) * element);
        while at < end && result.is_ok() {
            let (held, bytes) = (buffer.len(), (end - at).min((CHUNK - buffer.len()) as u64));
            buffer.resize(held + bytes as usize, 0);
            result = (shard.read)(at, &mut buffer[held..]);
            at += bytes;
            if buffer.len() == CHUNK && result.is_ok() {
                result = flush(buffer);
            }
        }
    });
    result?;
    flush(buffer)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// The safetensors header of tensors that stand one behind the other: what any reader of that format finds.
pub fn header<'a>(
    tensors: impl Iterator<Item = (String, DType, &'a [u64])>,
    metadata: Option<BTreeMap<String, String>>,
) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    entries.extend(metadata.map(|metadata| ("__metadata__".to_owned(), serde_json::json!(metadata))));
    let mut offset = 0;
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * dtype.bytes();
        let entry = serde_json::json!({
            "dtype": dtype.name().to_uppercase(),
            "shape": shape,
            "data_offsets": [offset, offset + bytes],
        });
        entries.insert(name, entry);
        offset += bytes;
    }
    let mut json = serde_json::to_vec(&entries).expect("a header is plain data");
    json.resize(json.len().next_multiple_of(8), b' ');
    json
}

/// The name, and `:m` for state.
pub fn tensor_name(key: &Key) -> String {
    format!("{}{}", key.name, key.state.as_ref().map_or(String::new(), |state| format!(":{state}")))
}

/// The same, and `[0:64, 0:128]` where it is not the whole tensor.
fn shard_name(shard: &Shard<'_>) -> String {
    let slice = &shard.slice;
    let ranges = slice.start.iter().zip(&slice.extent).map(|(start, extent)| format!("{start}:{}", start + extent));
    let ranges =
        if slice.extent == slice.global { String::new() } else { format!("[{}]", ranges.collect::<Vec<_>>().join(", ")) };
    format!("{}{ranges}", tensor_name(&shard.key))
}

/// Rank 0, when all parts are written: index, manifest, the final name; then the oldest checkpoints go.
pub fn finish(partial: &Path, path: &Path, world: u32, run: &RunState, keep_last: Option<usize>) -> Result<()> {
    let io = failed(path);
    let mut tensors: BTreeMap<Key, Tensor> = BTreeMap::new();
    let mut entries = Vec::new();
    for rank in 0..world {
        let part_path = partial.join(part_name(rank));
        let json = std::fs::read(&part_path).map_err(&io)?;
        let part: Part = serde_json::from_slice(&json).map_err(|error| io(error.into()))?;
        std::fs::remove_file(part_path).map_err(&io)?;
        entries.push(Entry { name: file_name(rank), bytes: part.bytes, hash: part.blake3 });
        for mut tensor in part.tensors {
            match tensors.get_mut(&tensor.key) {
                Some(known) => known.slices.append(&mut tensor.slices),
                None => drop(tensors.insert(tensor.key.clone(), tensor)),
            }
        }
    }
    for tensor in tensors.values() {
        let saved: u64 = tensor.slices.iter().map(|piece| piece.extent.iter().product::<u64>()).sum();
        let whole: u64 = tensor.shape.iter().product();
        assert_eq!(saved, whole, "the ranks' shards of `{}` make the whole tensor", tensor.key.name);
    }
    let index = Index { format: FORMAT, run: run.clone(), tensors: tensors.into_values().collect() };
    let json = serde_json::to_vec_pretty(&index).expect("an index is plain data");
    entries.push(Entry { name: INDEX.into(), bytes: json.len() as u64, hash: blake3::hash(&json).to_hex().to_string() });
    write_synced(&partial.join(INDEX), &json)?;
    write_synced(&partial.join(manifest::NAME), manifest::text(&entries).as_bytes())?;
    publish(partial, path).map_err(&io)?;
    prune(path, keep_last).map_err(io)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create_new(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(failed(path))
}

/// Gives a complete folder its name. One of the same name, from a run that was resumed before it, is swapped out.
fn publish(partial: &Path, path: &Path) -> std::io::Result<()> {
    File::open(partial)?.sync_all()?;
    if !path.exists() {
        std::fs::rename(partial, path)?;
        return sync_parent(path);
    }
    swap(partial, path)?;
    sync_parent(path)?;
    std::fs::remove_dir_all(partial)
}

/// There is a complete folder under `path` at every moment.
#[cfg(target_os = "linux")]
fn swap(partial: &Path, path: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, partial, CWD, path, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn swap(partial: &Path, path: &Path) -> std::io::Result<()> {
    let old = partial.with_extension("old");
    std::fs::rename(path, &old)?;
    std::fs::rename(partial, path)?;
    std::fs::rename(old, partial)
}

fn sync_parent(path: &Path) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), |parent| {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        File::open(parent)?.sync_all()
    })
}

/// Removes the oldest, under another name first so that no folder of a checkpoint's name is ever incomplete. Later ones of a
/// run that was resumed before them do not count and stay.
fn prune(path: &Path, keep_last: Option<usize>) -> std::io::Result<()> {
    let (Some(keep), Some(dir)) = (keep_last, path.parent()) else { return Ok(()) };
    let mut found = steps(dir).map_err(std::io::Error::other)?;
    found.retain(|(_, other)| other.as_path() <= path);
    let excess = found.len().saturating_sub(keep.max(1));
    for (_, oldest) in &found[..excess] {
        let name = oldest.file_name().unwrap_or_default().to_string_lossy();
        let doomed = dir.join(format!(".{name}.removed"));
        std::fs::rename(oldest, &doomed)?;
        std::fs::remove_dir_all(doomed)?;
    }
    Ok(())
}
