//! The same checkpoint in other files: of one rank, as another plan's ranks would write it, or as one file of safetensors.

use super::read::Checkpoint;
use super::write::{self, header, tensor_name};
use super::{Key, Lock, ReadLocal, RunState, Shard, is_writer};
use crate::error::{Error, Result};
use crate::slice::Slice;
use dcc_program::DType;
use dcc_program::artifact::Artifact;
use dcc_program::program::{Param, ParamKind, Program};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A block that a rank writes.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    key: Key,
    dtype: DType,
    slice: Slice,
}

/// Who writes what.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// By rank.
    ranks: Vec<Vec<Block>>,
}

impl Layout {
    /// Every tensor whole, by one rank.
    pub fn whole(checkpoint: &Checkpoint) -> Layout {
        let block = |(key, dtype, shape): (&Key, DType, &[u64])| Block { key: key.clone(), dtype, slice: Slice::whole(shape) };
        Layout { ranks: vec![checkpoint.tensors().map(block).collect()] }
    }

    /// What the ranks of an artifact save: of those that hold a block, the first.
    pub fn of(artifact: &Artifact) -> Result<Layout> {
        let programs = &artifact.train;
        let first = programs.first().ok_or_else(|| Error::artifact("an artifact without a training program has no layout"))?;
        let mesh = &first.mesh;
        let ranks = (0..mesh.world()).map(|rank| {
            let at = mesh.coordinates(rank);
            let stage = mesh.axis("pp").map_or(0, |axis| at.get(axis)) as usize;
            let program = &programs[stage];
            let is_mine = |param: &&Param| {
                let earlier = programs[..stage].iter().any(|other| holds(other, param));
                !earlier && is_writer(program.ty(param.buffer), &program.mesh, &program.mesh.coordinates(rank))
            };
            let mut mine: Vec<&Param> = program.params.iter().filter(is_mine).collect();
            // As in memory, which is how a run writes them.
            mine.sort_by_key(|param| program.buffers[param.buffer.0 as usize].offset);
            let block = |param: &Param| {
                let ty = program.ty(param.buffer);
                let mut slice = Slice::of(ty, &program.mesh, &program.mesh.coordinates(rank));
                if let (Some(piece), Some(tensor)) = (&param.piece, artifact.tensor(&param.name)) {
                    let dim = usize::from(piece.dim);
                    slice = slice.as_piece(piece, tensor.shape.get(dim).copied().unwrap_or(0));
                }
                slice.local.clone_from(&slice.extent);
                Block { key: key(param), dtype: ty.dtype, slice }
            };
            mine.into_iter().map(block).collect()
        });
        Ok(Layout { ranks: ranks.collect() })
    }

    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn keys(&self) -> BTreeSet<&Key> {
        self.ranks.iter().flatten().map(|block| &block.key).collect()
    }

    /// Tensors of a checkpoint that have no place in the layout.
    pub fn missing<'a>(&self, checkpoint: &'a Checkpoint) -> Vec<&'a Key> {
        let known = self.keys();
        checkpoint.tensors().map(|(key, ..)| key).filter(|key| !known.contains(key)).collect()
    }
}

fn key(param: &Param) -> Key {
    let state = match &param.kind {
        ParamKind::Weight => None,
        ParamKind::State(state) => Some(state.clone()),
    };
    Key { name: param.name.clone(), state }
}

fn holds(program: &Program, param: &Param) -> bool {
    let same = |p: &Param| p.name == param.name && p.kind == param.kind && p.piece == param.piece;
    program.params.iter().any(same)
}

/// Writes the checkpoint in `layout` as a folder in `dir`, which is there whole or not at all; where it is. Errors: damage, a tensor
/// that the layout needs and the checkpoint has not, or that has another shape or dtype, a folder of that name.
pub fn rewrite(checkpoint: &mut Checkpoint, layout: &Layout, state: &RunState, dir: &Path) -> Result<PathBuf> {
    let path = dir.join(format!("step-{:08}", state.step));
    if path.exists() {
        return Err(Error::data_option("a checkpoint of this step is there already")
            .at(path.display())
            .help("name another folder"));
    }
    let partial = dir.join(format!(".converted-{:08}-{}.partial", state.step, std::process::id()));
    std::fs::create_dir_all(dir).map_err(write::failed(dir))?;
    let _lock = Lock::take(dir)?;
    std::fs::create_dir(&partial).map_err(write::failed(dir))?;
    let written = ranks(checkpoint, layout, &partial)
        .and_then(|()| write::finish(&partial, &path, layout.ranks.len() as u32, state, None));
    if written.is_err() {
        // Best effort: the space of a checkpoint that did not come to be.
        let _ = std::fs::remove_dir_all(&partial);
    }
    written.map(|()| path)
}

/// Writes each rank's file, with one block in memory at a time.
fn ranks(checkpoint: &mut Checkpoint, layout: &Layout, partial: &Path) -> Result<()> {
    let source = RefCell::new((checkpoint, None::<(usize, usize, Vec<u8>)>));
    for (rank, blocks) in layout.ranks.iter().enumerate() {
        let read = |number: usize, block: &Block, at: u64, out: &mut [u8]| -> Result<()> {
            let (checkpoint, held) = &mut *source.borrow_mut();
            if held.as_ref().is_none_or(|(r, n, _)| (*r, *n) != (rank, number)) {
                *held = Some((rank, number, bytes(checkpoint, block)?));
            }
            let bytes = &held.as_ref().expect("it was just read").2;
            out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
            Ok(())
        };
        let read = &read;
        let reads: Vec<Box<ReadLocal<'_>>> = blocks
            .iter()
            .enumerate()
            .map(|(number, block)| -> Box<ReadLocal<'_>> { Box::new(move |at, out| read(number, block, at, out)) })
            .collect();
        let shards = blocks.iter().zip(&reads);
        let shards: Vec<Shard<'_>> = shards
            .map(|(block, read)| Shard { key: block.key.clone(), dtype: block.dtype, slice: block.slice.clone(), read })
            .collect();
        write::shards(&mut |_| (), partial, rank as u32, &shards)?;
    }
    Ok(())
}

/// A block out of whatever blocks were saved.
fn bytes(checkpoint: &mut Checkpoint, block: &Block) -> Result<Vec<u8>> {
    let mut bytes = vec![0; (block.slice.elements() * block.dtype.bytes()) as usize];
    checkpoint.read(&block.key, block.dtype, &block.slice, &mut |at, run| {
        bytes[at as usize..at as usize + run.len()].copy_from_slice(run);
        Ok(())
    })?;
    Ok(bytes)
}

/// Writes all tensors whole, states as `NAME:STATE`, with the position of the run as metadata. Errors: damage; of `out` itself.
pub fn write_safetensors(checkpoint: &mut Checkpoint, out: &mut dyn Write) -> Result<std::io::Result<()>> {
    let layout = Layout::whole(checkpoint);
    let blocks = &layout.ranks[0];
    let RunState { step, seed, position, data, description, .. } = checkpoint.run();
    let metadata = [
        ("step", step.to_string()),
        ("seed", seed.to_string()),
        ("samples", position.samples.to_string()),
        ("steps_of_data", position.steps.to_string()),
        ("data", format!("{data:016x}")),
        ("description", description.clone()),
    ];
    let metadata: BTreeMap<String, String> = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let tensors = blocks.iter().map(|block| (tensor_name(&block.key), block.dtype, &block.slice.extent[..]));
    let header = header(tensors, Some(metadata));
    let mut written = out.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| out.write_all(&header));
    for block in blocks {
        let bytes = bytes(checkpoint, block)?;
        written = written.and_then(|()| out.write_all(&bytes));
    }
    Ok(written)
}
