//! What moves the bytes of transfers. The protocol (`advance`) decides what is read when; a mover does it, at once or on a queue of work
//! of its own: then the protocol runs ahead, and marks and follows keep the queues in order.

use super::pull::Member;
use super::segment::Segment;
use super::{DType, Op, Reduce, Region};
use crate::error::Result;
use std::ops::Range;

/// Up to here an all_reduce is one exchange: every member reduces all of it.
pub const SMALL_BYTES: usize = 32 << 10;

/// What a member of a channel has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Its source may be read.
    Posted,
    /// Its chunk of an all_reduce may be read.
    Reduced,
    /// It reads no peer any more.
    Done,
}

/// One rank's end. All moves are of a channel; those of one channel come one after the other.
pub trait Mover: Send {
    /// The rank comes to `stage`: behind what it computed so far (`Posted`), or what it moved on the channel.
    fn mark(&mut self, channel: u32, stage: Stage) -> Result<()>;

    /// What is moved on the channel from here on is behind `member`'s last mark of `stage`.
    fn follow(&mut self, channel: u32, member: usize, stage: Stage) -> Result<()>;

    /// What the rank computes from here on is behind what it moved on the channel, and behind the `readers`' last marks of `Done`.
    fn land(&mut self, channel: u32, readers: Range<usize>) -> Result<()>;

    fn copy(&mut self, channel: u32, from: Origin, rows: &Copy) -> Result<()>;

    /// Reduces element by element, member 0 first.
    fn reduce(&mut self, channel: u32, sum: &Sum<'_>, to: Target) -> Result<()>;

    /// Whether it moves bytes of the host's memory, at once: then small sources may travel in the entries of their transfers, and it is
    /// never asked to mark, to follow or to land, nor for whole transfers.
    fn is_at_once(&self) -> bool {
        false
    }

    /// Whether it does whole transfers by `transfer`, and is never asked for their parts.
    fn is_whole(&self) -> bool {
        false
    }

    /// Starts this rank's part of a whole transfer of these tensors. All members come to the transfers of a channel in one order.
    fn transfer(&mut self, _channel: u32, _tensors: &[Op], _me: Member) -> Result<()> {
        unreachable!("it moves parts of transfers")
    }

    /// Whether the regions of operations are of a device's memory, not of the host's arenas.
    fn is_on_device(&self) -> bool;
}

/// Where a copy comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The arena of a rank.
    Arena(u32),
    /// The entries of transfers.
    Entry,
    /// What the mover holds for the channel.
    Held,
}

/// Where a reduction goes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// To the own arena.
    Arena(usize),
    /// To what the mover holds for the channel, at most `SMALL_BYTES`.
    Held(usize),
}

/// `outer` times `rows` pieces of `bytes`, to the own arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    pub outer: usize,
    pub rows: usize,
    pub bytes: usize,
    pub from: Strides,
    pub to: Strides,
    /// Bytes that the transfer writes to the own arena in all, of which these may be a part.
    pub whole: usize,
}

/// Where pieces lie, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    pub at: usize,
    pub outer: usize,
    pub row: usize,
}

/// A reduction of the members' sources.
#[derive(Clone, Copy)]
pub struct Sum<'a> {
    pub sources: Sources<'a>,
    pub reduce: Reduce,
    pub dtype: DType,
    pub pieces: Pieces,
}

/// `outer` pieces of `bytes`, which begin `at` in each source; `stride` apart there and `to_stride` in the target.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    pub outer: usize,
    pub bytes: usize,
    pub at: usize,
    pub stride: usize,
    pub to_stride: usize,
}

/// What all members posted of one tensor of a transfer.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    pub segment: &'a Segment,
    pub channel: u32,
    pub sequence: u64,
    pub tensor: usize,
    pub members: &'a [u32],
    /// The member that reduces, and where its source lies in its arena.
    pub own: (usize, usize),
    /// Where entries carry the sources.
    pub eager: Option<Carried>,
}

/// A tensor in the entries that carry a transfer's sources.
#[derive(Clone, Copy)]
pub struct Carried {
    /// Of all sources of a member.
    pub bytes: usize,
    /// Of those before the tensor.
    pub before: usize,
}

impl Sources<'_> {
    /// A part of a member's source.
    pub fn bytes(&self, member: usize, part: Region) -> &[u8] {
        if let Some(carried) = self.eager.filter(|_| member != self.own.0) {
            let at = self.segment.slot(self.channel, member).eager(self.sequence, carried.bytes) + carried.before;
            return self.segment.eager(Region { offset: at + part.offset, ..part });
        }
        let (rank, at) = self.get(member);
        self.segment.arena(rank).slice(Region { offset: at + part.offset, ..part })
    }

    /// A member's rank, and where its source lies in its arena: others' that entries carry are not to be found there.
    pub fn get(&self, member: usize) -> (u32, usize) {
        let (own, at) = self.own;
        let posted = || self.segment.slot(self.channel, member).source(self.sequence, self.tensor);
        (self.members[member], if member == own { at } else { posted() })
    }
}

impl Pieces {
    pub fn one(at: usize, bytes: usize) -> Pieces {
        Pieces { outer: 1, bytes, at, stride: 0, to_stride: 0 }
    }
}

impl Copy {
    /// One piece.
    pub fn piece(from: usize, to: usize, bytes: usize) -> Copy {
        let strides = |at| Strides { at, outer: bytes, row: bytes };
        Copy { outer: 1, rows: 1, bytes, from: strides(from), to: strides(to), whole: bytes }
    }

    /// All that is copied.
    pub fn total(&self) -> usize {
        self.outer * self.rows * self.bytes
    }
}
