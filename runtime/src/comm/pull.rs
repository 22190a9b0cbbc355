//! The mover of ranks on CPUs: a member reads what its peers posted and writes its own target, never another's memory, at once.

use super::mover::{Copy, Mover, Origin, Pieces, SMALL_BYTES, Stage, Strides, Sum, Target};
use super::reduce::accumulate;
use super::segment::Segment;
use super::{Exchange, Region, Rows, Side};
use crate::error::Result;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a reduction holds in cache while it goes through the members.
const BLOCK: usize = 16 << 10;

const AT_ONCE: &str = "nothing that moves at once has to be put in order";

pub struct Pull {
    segment: Arc<Segment>,
    rank: u32,
    scratch: Box<[u8]>,
    /// By channel: grown once.
    held: Vec<Vec<u8>>,
}

/// Position of a member in its group.
#[derive(Clone, Copy)]
pub struct Member {
    pub index: usize,
    pub members: usize,
}

impl Member {
    /// The member so many places after this one, fewer than there are members.
    pub fn after(self, places: usize) -> usize {
        let index = self.index + places;
        if index < self.members { index } else { index - self.members }
    }
}

impl Pull {
    pub fn new(segment: Arc<Segment>, rank: u32) -> Pull {
        Pull { held: vec![Vec::new(); segment.layout.channels()], segment, rank, scratch: vec![0; BLOCK].into() }
    }
}

impl Mover for Pull {
    fn mark(&mut self, _: u32, _: Stage) -> Result<()> {
        unreachable!("{AT_ONCE}")
    }

    fn follow(&mut self, _: u32, _: usize, _: Stage) -> Result<()> {
        unreachable!("{AT_ONCE}")
    }

    fn land(&mut self, _: u32, _: Range<usize>) -> Result<()> {
        unreachable!("{AT_ONCE}")
    }

    fn copy(&mut self, channel: u32, from: Origin, copy: &Copy) -> Result<()> {
        let target = self.segment.arena(self.rank);
        let piece = |offset: usize, to: usize| {
            let source = Region { offset, bytes: copy.bytes };
            match from {
                Origin::Arena(rank) => target.write_part(to, self.segment.arena(rank).slice(source), copy.whole),
                Origin::Entry => target.write(to, self.segment.eager(source)),
                Origin::Held => target.write(to, &self.held[channel as usize][source.range()]),
            }
        };
        if (copy.outer, copy.rows) == (1, 1) {
            piece(copy.from.at, copy.to.at);
            return Ok(());
        }
        for outer in 0..copy.outer {
            for row in 0..copy.rows {
                let place = |strides: &Strides| strides.at + outer * strides.outer + row * strides.row;
                piece(place(&copy.from), place(&copy.to));
            }
        }
        Ok(())
    }

    /// Block by block through `scratch`, so that the target may be this member's own source.
    fn reduce(&mut self, channel: u32, sum: &Sum<'_>, to: Target) -> Result<()> {
        let Pull { segment, rank, scratch, held } = self;
        let Pieces { outer, bytes: all, at, stride, to_stride } = sum.pieces;
        for outer in 0..outer {
            let first = at + outer * stride;
            for block in (0..all).step_by(BLOCK) {
                let bytes = BLOCK.min(all - block);
                let part = &mut scratch[..bytes];
                let source = |member: usize| sum.sources.bytes(member, Region { offset: first + block, bytes });
                part.copy_from_slice(source(0));
                (1..sum.sources.members.len()).for_each(|member| accumulate(sum.reduce, sum.dtype, part, source(member)));
                let at = outer * to_stride + block;
                match to {
                    Target::Arena(to) => segment.arena(*rank).write(to + at, part),
                    Target::Held(to) => {
                        let held = &mut held[channel as usize];
                        held.resize(SMALL_BYTES, 0);
                        held[to + at..to + at + bytes].copy_from_slice(part);
                    }
                }
            }
        }
        Ok(())
    }

    fn is_at_once(&self) -> bool {
        true
    }

    fn is_on_device(&self) -> bool {
        false
    }
}

/// The block of `from`, `[outer, block, inner]` at `source`, to its rows of the target, `[outer, dim, inner]` at `target`.
pub fn gather(source: usize, from: Member, rows: Rows, target: usize) -> Copy {
    let (range, block) = (rows.range(from.index, from.members), rows.block(from.members));
    let bytes = range.len() * rows.inner;
    let from = Strides { at: source, outer: block * rows.inner, row: 0 };
    let to = Strides { at: target + range.start * rows.inner, outer: rows.dim * rows.inner, row: 0 };
    Copy { outer: rows.outer, rows: 1, bytes, from, to, whole: rows.outer * rows.dim * rows.inner }
}

/// What `from` holds of own block: its part of the joined dim, own part of the split dim.
pub fn exchange(source: usize, from: Member, own: usize, shape: Exchange, target: usize) -> Copy {
    let Exchange { outer, first, middle, second, inner, split } = shape;
    let whole = outer * first * middle * second * inner / from.members;
    let part = |dim, index| {
        let rows = Rows { outer: 1, dim, inner: 1 };
        (rows.range(index, from.members), rows.block(from.members))
    };
    let (of_first, of_second) = match split {
        Side::First => (own, from.index),
        Side::Second => (from.index, own),
    };
    let ((rows, first_block), (columns, second_block)) = (part(first, of_first), part(second, of_second));
    // Where the first dim is whole, and where the second one is; what lies between is apart like rows of the first.
    let whole_first = |base: usize| {
        let row = second_block * inner;
        Strides { at: base + rows.start * middle * row, outer: first * middle * row, row }
    };
    let whole_second = |base: usize| {
        let row = second * inner;
        Strides { at: base + columns.start * inner, outer: first_block * middle * row, row }
    };
    let (from, to) = match split {
        Side::First => (whole_first(source), whole_second(target)),
        Side::Second => (whole_second(source), whole_first(target)),
    };
    Copy { outer, rows: rows.len() * middle, bytes: columns.len() * inner, from, to, whole }
}

/// The bytes of a whole all_reduce that `member` reduces: whole cache lines, the rest to the last.
pub fn chunk(bytes: usize, member: Member) -> Range<usize> {
    let size = bytes.div_ceil(member.members).next_multiple_of(64);
    (member.index * size).min(bytes)..((member.index + 1) * size).min(bytes)
}
