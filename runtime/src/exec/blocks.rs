//! Where a program's blocks of planned memory lie in a rank's arena: persistent, then each slot of each area, then scratch.
//!
//! After: all blocks start at multiples of 64 bytes. Two programs of one rank (training, evaluation) share the persistent block;
//! their other blocks overlay each other, since nothing outside of the persistent block outlives a step.

use crate::error::{Error, Result};
use dcc_program::Mesh;
use dcc_program::program::{Buffer, Place, Program, Step};

const ALIGN: u64 = 64;
/// The number of the block of scratch.
pub(super) const SCRATCH: u32 = 0;

/// The blocks of one program.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// Scratch, persistent, then the areas.
    blocks: Vec<Block>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    start: usize,
    /// Bytes of one slot, and from one slot to the next.
    bytes: usize,
    stride: usize,
    slots: u32,
}

/// A buffer in its block: `start of the block + offset` once a slot is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub(crate) block: u32,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// Arena offset of every block in one execution of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bases(Box<[usize]>);

impl Blocks {
    /// `persistent_bytes`: the most that any program of the rank needs. Errors: sizes that do not fit memory.
    pub fn new(program: &Program, persistent_bytes: u64) -> Result<Blocks> {
        let mut at = 0u64;
        let mut take = |bytes: u64, slots: u32| {
            let stride = bytes.checked_next_multiple_of(ALIGN)?;
            let block = Block { start: at as usize, bytes: bytes as usize, stride: stride as usize, slots };
            at = stride.checked_mul(slots.into()).and_then(|all| at.checked_add(all)).filter(|&end| end < 1 << 47)?;
            Some(block)
        };
        let persistent = take(persistent_bytes.max(program.persistent_bytes), 1);
        let areas: Option<Vec<Block>> = program.areas.iter().map(|area| take(area.bytes, area.slots)).collect();
        let scratch = take(program.scratch_bytes, 1);
        let (Some(persistent), Some(areas), Some(scratch)) = (persistent, areas, scratch) else {
            return Err(Error::artifact(format!("program {} plans more memory than a machine has", program.name)));
        };
        Ok(Blocks { blocks: [scratch, persistent].into_iter().chain(areas).collect(), bytes: at as usize })
    }

    /// Arena bytes: the planned peak of the rank.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn persistent(&self) -> std::ops::Range<usize> {
        let block = self.blocks[1];
        block.start..block.start + block.bytes
    }

    pub fn scratch(&self) -> std::ops::Range<usize> {
        let block = self.blocks[SCRATCH as usize];
        block.start..block.start + block.bytes
    }

    /// Errors: a buffer outside of its block, or at an address that its elements cannot have.
    pub fn span(&self, buffer: &Buffer, mesh: &Mesh) -> Result<Span> {
        let block = match buffer.place {
            Place::Scratch => SCRATCH,
            Place::Persistent => 1,
            Place::Area(area) => 2 + area,
        };
        let bytes = buffer.ty.local_bytes(mesh);
        let room = self.blocks.get(block as usize).map_or(0, |b| b.bytes as u64);
        let fits = buffer.offset.checked_add(bytes).is_some_and(|end| end <= room);
        if !fits || !buffer.offset.is_multiple_of(buffer.ty.dtype.bytes()) {
            let ty = buffer.ty.text(mesh);
            return Err(Error::artifact(format!("a buffer {ty} at {} does not fit its block of {room} bytes", buffer.offset)));
        }
        Ok(Span { block, offset: buffer.offset as usize, bytes: bytes as usize })
    }

    /// Errors: a slot that an area does not have.
    pub fn bases(&self, step: &Step) -> Result<Bases> {
        let base = |(index, block): (usize, &Block)| {
            let slot = if index < 2 { 0 } else { step.slots.get(index - 2).copied().unwrap_or(0) };
            if slot >= block.slots {
                return Err(Error::artifact(format!("slot {slot} of an area m{} with {} slots", index - 2, block.slots)));
            }
            Ok(block.start + slot as usize * block.stride)
        };
        self.blocks.iter().enumerate().map(base).collect::<Result<Box<[usize]>>>().map(Bases)
    }
}

impl Bases {
    /// Arena offset of a span.
    pub(crate) fn offset(&self, span: Span) -> usize {
        self.0[span.block as usize] + span.offset
    }

    pub(crate) fn region(&self, span: Span) -> crate::comm::Region {
        crate::comm::Region { offset: self.offset(span), bytes: span.bytes }
    }
}

impl Span {
    pub(crate) fn overlaps(&self, other: &Span) -> bool {
        self.block == other.block && self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
    }
}
