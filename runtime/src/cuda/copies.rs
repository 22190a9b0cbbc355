//! Copies and reductions of any sizes between addresses on GPUs, started on a stream.

use super::driver::Gpu;
use super::kernels::Kernels;
use super::queue::Stream;
use crate::comm::mover::{Copy, Pieces, Strides};
use crate::error::{Error, Result};
use dcc_kernels::cuda::Source;
use dcc_kernels::cuda::transfer::{self, Choice, Reduction, THREADS};
use std::collections::BTreeMap;
use std::ops::Range;

pub struct Copies {
    kernels: Kernels,
    reductions: BTreeMap<Reduction, usize>,
}

/// Memory on a GPU, as far as it may be used.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub address: u64,
    pub bytes: usize,
}

impl Room {
    /// Where a range of it lies. Errors: it ends before.
    pub fn at(&self, range: Range<usize>) -> Result<u64> {
        match range.start <= range.end && range.end <= self.bytes {
            true => Ok(self.address + range.start as u64),
            false => Err(Error::artifact(format!("a transfer of bytes {range:?} of {}", self.bytes))),
        }
    }
}

/// From where the first of `count` pieces of `bytes` begins to where the last ends.
fn reach(at: usize, strides: [(usize, usize); 2], bytes: usize) -> Range<usize> {
    at..at + strides.iter().map(|&(count, stride)| (count - 1) * stride).sum::<usize>() + bytes
}

impl Copies {
    /// Errors: the kernels do not compile.
    pub fn new(gpu: &Gpu, wanted: &[Reduction]) -> Result<Copies> {
        Ok(Copies {
            kernels: Kernels::compile(gpu, &Copies::sources(wanted))?,
            reductions: wanted.iter().copied().zip(1..).collect(),
        })
    }

    /// Of copies, then of each reduction.
    pub fn sources(wanted: &[Reduction]) -> Vec<Source> {
        std::iter::once(transfer::copy_source()).chain(wanted.iter().map(|each| each.source())).collect()
    }

    /// # Safety
    /// All of both rooms is alive until the work is done, and nobody else uses what is copied meanwhile.
    pub unsafe fn copy(&self, stream: &Stream, copy: &Copy, from: Room, to: Room) -> Result<()> {
        if copy.total() == 0 {
            return Ok(());
        }
        let place = |room: Room, strides: &Strides| {
            room.at(reach(strides.at, [(copy.outer, strides.outer), (copy.rows, strides.row)], copy.bytes))
        };
        let (source, target) = (place(from, &copy.from)?, place(to, &copy.to)?);
        let used = |count: usize, stride: usize| if count > 1 { stride } else { 0 };
        let [from, to] = [copy.from, copy.to].map(|strides| [used(copy.outer, strides.outer), used(copy.rows, strides.row)]);
        let choice = transfer::choose_copy(&[source as usize, target as usize, copy.bytes, from[0], from[1], to[0], to[1]]);
        let units = |bytes: usize| (bytes / choice.unit) as u64;
        let (pieces, rows) = ((copy.outer * copy.rows) as u64, copy.rows as u64);
        let strides = [units(from[0]), units(from[1]), units(to[0]), units(to[1])];
        let mut words = [target, source, pieces, rows, units(copy.bytes), strides[0], strides[1], strides[2], strides[3]];
        // SAFETY: both ends lie inside of their rooms and are multiples of the entry's units; the rest is the caller's.
        unsafe { self.launch(stream, 0, &choice, transfer::blocks(copy.total() / choice.unit, 1), &mut words) }
    }

    /// Reduces element by element, the first source first.
    ///
    /// # Safety
    /// As `copy`; each address has room for the pieces.
    pub unsafe fn reduce(
        &self,
        stream: &Stream,
        reduction: Reduction,
        pieces: Pieces,
        target: u64,
        sources: impl Iterator<Item = Result<u64>>,
    ) -> Result<()> {
        let Pieces { outer, bytes, stride, to_stride, .. } = pieces;
        let kernel = *self.reductions.get(&reduction).ok_or_else(|| Error::artifact("a reduction that no program has"))?;
        let mut words = vec![target, outer as u64, 0, 0, 0];
        for source in sources {
            words.push(source?);
        }
        let strides = if outer > 1 { [stride, to_stride] } else { [0; 2] };
        let ends = words[5..].iter().map(|&address| address as usize);
        let choice = reduction.choose(&ends.chain([target as usize, bytes, strides[0], strides[1]]).collect::<Vec<_>>());
        let units = |bytes: usize| (bytes / choice.unit) as u64;
        (words[2], words[3], words[4]) = (units(bytes), units(strides[0]), units(strides[1]));
        // SAFETY: the caller's; all are multiples of the entry's units.
        unsafe { self.launch(stream, kernel, &choice, transfer::blocks(bytes / choice.unit, outer), &mut words) }
    }

    /// Where pieces of a reduction lie in a room, the first `at`.
    pub fn pieces_at(room: Room, at: usize, outer: usize, stride: usize, bytes: usize) -> Result<u64> {
        room.at(reach(at, [(outer, stride), (1, 0)], bytes))
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: usize,
        choice: &Choice,
        blocks: [u32; 2],
        words: &mut [u64],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.kernels.entries(kernel)[choice.entry].launch(stream, (blocks, THREADS as u32, 0), words) }
    }
}
