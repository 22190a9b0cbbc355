//! Moves the bytes of transfers: a member reads what its peers posted and writes its own target, never another's memory.

use super::reduce::accumulate;
use super::segment::Segment;
use super::shm::Mapping;
use super::{DType, Exchange, Reduce, Region, Rows, Side};
use std::ops::Range;

/// Bytes that a reduction holds in cache while it goes through the members.
pub const BLOCK: usize = 16 << 10;

/// What one member posted: its arena and the offset of its source there.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub arena: &'a Mapping,
    pub offset: usize,
}

/// Position of a member in its group.
#[derive(Clone, Copy)]
pub struct Member {
    pub index: usize,
    pub members: usize,
}

impl<'a> Source<'a> {
    fn slice(self, range: Range<usize>) -> &'a [u8] {
        self.arena.slice(Region { offset: self.offset + range.start, bytes: range.len() })
    }
}

/// What all members posted of one tensor of a transfer.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    pub segment: &'a Segment,
    pub channel: u32,
    pub sequence: u64,
    pub tensor: usize,
    pub members: &'a [u32],
}

impl<'a> Sources<'a> {
    fn get(&self, member: usize) -> Source<'a> {
        let offset = self.segment.slot(self.channel, member).source(self.sequence, self.tensor);
        Source { arena: self.segment.arena(self.members[member]), offset }
    }

    /// Reduces bytes `range` of all sources into `held`, member 0 first.
    pub fn reduce(&self, reduce: Reduce, dtype: DType, range: Range<usize>, held: &mut [u8]) {
        held.copy_from_slice(self.get(0).slice(range.clone()));
        for member in 1..self.members.len() {
            accumulate(reduce, dtype, held, self.get(member).slice(range.clone()));
        }
    }
}

/// What to reduce and where the result goes.
#[derive(Clone, Copy)]
pub struct Reduction<'a> {
    pub sources: Sources<'a>,
    pub reduce: Reduce,
    pub dtype: DType,
    pub target: &'a Mapping,
}

impl Reduction<'_> {
    /// Reduces bytes `range` of all sources into the target at `at`, block by block through `scratch` (`BLOCK` bytes), so that
    /// the target may be this member's own source.
    pub fn run(&self, range: Range<usize>, at: usize, scratch: &mut [u8]) {
        for start in range.clone().step_by(BLOCK) {
            let block = start..(start + BLOCK).min(range.end);
            let held = &mut scratch[..block.len()];
            self.sources.reduce(self.reduce, self.dtype, block, held);
            self.target.write(at + start - range.start, held);
        }
    }

    /// `run` on own rows of `[outer, dim, inner]` sources, into `[outer, block, inner]` at `at`.
    pub fn scatter(&self, rows: Rows, me: Member, at: usize, scratch: &mut [u8]) {
        let own = rows.range(me.index, me.members);
        for outer in 0..rows.outer {
            let row = |row: usize| (outer * rows.dim + row) * rows.inner;
            self.run(row(own.start)..row(own.end), at + outer * rows.block(me.members) * rows.inner, scratch);
        }
    }
}

/// Copies the block of `from`, `[outer, block, inner]`, to its rows of the target, `[outer, dim, inner]`. Returns the bytes.
pub fn gather(source: Source<'_>, from: Member, rows: Rows, target: &Mapping, at: usize) -> usize {
    let range = rows.range(from.index, from.members);
    let bytes = range.len() * rows.inner;
    for outer in 0..rows.outer {
        let start = outer * rows.block(from.members) * rows.inner;
        target.write(at + (outer * rows.dim + range.start) * rows.inner, source.slice(start..start + bytes));
    }
    rows.outer * bytes
}

/// Copies what `from` holds of own block: its part of the joined dim, own part of the split dim. Returns the bytes.
pub fn exchange(source: Source<'_>, from: Member, own: usize, shape: Exchange, target: &Mapping, at: usize) -> usize {
    let Exchange { outer, first, middle, second, inner, split } = shape;
    let dims = |dim| Rows { outer: 1, dim, inner: 1 };
    let (first_member, second_member) = match split {
        Side::First => (own, from.index),
        Side::Second => (from.index, own),
    };
    let rows = dims(first).range(first_member, from.members);
    let columns = dims(second).range(second_member, from.members);
    let (first_block, second_block) = (dims(first).block(from.members), dims(second).block(from.members));
    // Local extents and origins of both dims in the source and in the target.
    let (source_dims, source_at, target_dims, target_at) = match split {
        Side::First => ((first, second_block), (rows.start, 0), (first_block, second), (0, columns.start)),
        Side::Second => ((first_block, second), (0, columns.start), (first, second_block), (rows.start, 0)),
    };
    let index = |dims: (usize, usize), origin: (usize, usize), o: usize, row: usize, m: usize| {
        (((o * dims.0 + origin.0 + row) * middle + m) * dims.1 + origin.1) * inner
    };
    for o in 0..outer {
        for row in 0..rows.len() {
            for m in 0..middle {
                let start = index(source_dims, source_at, o, row, m);
                let bytes = columns.len() * inner;
                target.write(at + index(target_dims, target_at, o, row, m), source.slice(start..start + bytes));
            }
        }
    }
    outer * rows.len() * middle * columns.len() * inner
}

/// The bytes of a whole all_reduce that `member` reduces: whole cache lines, the rest to the last.
pub fn chunk(bytes: usize, member: Member) -> Range<usize> {
    let size = bytes.div_ceil(member.members).next_multiple_of(64);
    (member.index * size).min(bytes)..((member.index + 1) * size).min(bytes)
}
