//! Communication between the ranks of one run: collectives over groups, send and receive over pairs.
//!
//! A transfer is prepared once; each time that it is made is a `start` and a `wait`. A start blocks nothing; a wait ends once the transfer is
//! complete: the target is written and nobody reads the source any more. Until then neither region may be touched. A small message is
//! complete before anybody receives it; all other transfers have been started by all members then.
//! Transfers of one group are matched in the order of their starts, those of one ordered pair of ranks likewise (FIFO).
//! Every wait serves all started transfers of its rank, so that the order of waits cannot deadlock; `progress` serves them between
//! computations, so that peers do not wait for a rank that computes.
//!
//! Operands are regions of the rank's own arena. Reductions add member 0, member 1, … of the group in that order, whatever
//! arrives first: the same bits from run to run, for any number of threads, and in every implementation.

// Threads and processes that share memory need futexes; on other systems a program can be compiled, not run.
#[cfg(target_os = "linux")]
mod advance;
#[cfg(target_os = "linux")]
pub mod local;
#[cfg(target_os = "linux")]
pub mod mover;
#[cfg(target_os = "linux")]
mod peer;
#[cfg(target_os = "linux")]
mod prepared;
#[cfg(target_os = "linux")]
pub(crate) mod pull;
mod reduce;
#[cfg(target_os = "linux")]
mod segment;
// Maps memory that other threads and processes write.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub mod shm;

#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::time::Duration;

use crate::error::Result;
pub use dcc_program::{DType, Reduce};
#[cfg(target_os = "linux")]
pub use peer::Peer;
#[cfg(target_os = "linux")]
pub use segment::{Layout, PAGE, Segment};

/// One rank's end of all its communicators.
pub trait Comm: Send {
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn world(&self) -> u32;

    /// Says where the rank is: what errors, here and at the peers, name. Cheap enough for every instruction.
    fn mark(&mut self, place: &Place);

    /// Checks a transfer of as many tensors as there are `ops`, all of one kind, group and reduction; messages are of one. It is kept as long as
    /// the communicator, and carries the label of the last `mark`. Errors: a region outside of the arena, sizes that do not fit the
    /// transfer, tensors that do not fit each other.
    fn prepare(&mut self, ops: &[Op]) -> Result<TransferId>;

    /// Starts a transfer that this communicator has prepared. Blocks nothing. Errors: those of `progress`.
    fn start(&mut self, transfer: TransferId) -> Result<Token>;

    /// Does what can be done for started transfers without waiting for anybody. Cheap where nobody did anything since. Errors: a peer
    /// started another transfer in one's place.
    fn progress(&mut self) -> Result<()>;

    /// Ends once the transfer of `token` is complete. Errors: a peer failed, stayed silent for the timeout, or started
    /// another transfer in this one's place.
    fn wait(&mut self, token: Token) -> Result<()>;

    /// Whether regions are of a device's memory; else they are of the host's arena, from and to which a device copies.
    fn is_on_device(&self) -> bool;

    /// The largest `value` of all ranks, once all have called: a barrier over the world.
    fn agree(&mut self, value: u64) -> Result<u64>;

    /// Compares what the ranks run, before step 1. Errors: the first field in which two ranks differ, naming both.
    fn handshake(&mut self, hello: &Hello) -> Result<()>;

    /// Bytes read from other ranks' memory so far.
    fn received(&self) -> u64;

    /// Whether somebody asked the run to stop; ranks `agree` on it at a step boundary.
    fn stop_requested(&self) -> Stop;

    /// This rank is done: its absence is no failure from now on.
    fn finish(&mut self);
}

/// Index of a group in the list that all ranks pass at start, in one global order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// Ranks of one communicator. Member i holds block i of a sharded dim, and is the i-th summand of a reduction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(pub Vec<u32>);

/// Bytes of the rank's own arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Region {
    pub offset: usize,
    pub bytes: usize,
}

impl Region {
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.bytes
    }
}

/// A prepared transfer of one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub(crate) u32);

/// A started transfer. Every token is waited for once. It is one word: what is stored in parts and loaded whole waits until the stores
/// before it, of what peers are told, have left the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(u64);

/// A tensor of a transfer, from `source` to `target`. The two are the same region (all_reduce only) or do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    pub transfer: Transfer,
    /// Unused by `Recv`.
    pub source: Region,
    /// Unused by `Send`.
    pub target: Region,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// Equal regions on all members → their reduction, whole, on each.
    AllReduce {
        group: GroupId,
        reduce: Reduce,
        dtype: DType,
    },
    /// Own block of `Rows` → all blocks.
    AllGather {
        group: GroupId,
        rows: Rows,
    },
    /// All blocks → the reduction of own block.
    ReduceScatter {
        group: GroupId,
        reduce: Reduce,
        dtype: DType,
        rows: Rows,
    },
    /// Whole along `Exchange::split`, own block along the other → the other way round.
    AllToAll {
        group: GroupId,
        exchange: Exchange,
    },
    Send {
        to: u32,
        lane: u32,
    },
    Recv {
        from: u32,
        lane: u32,
    },
}

/// A tensor seen as `[outer, dim, inner bytes]` where `dim` is split over the group: member i holds rows
/// `[i·block, min((i+1)·block, dim))` in a region of `[outer, block, inner]`, block = ceil(dim / members); what lies behind
/// its last row is unspecified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rows {
    pub outer: usize,
    /// Global size.
    pub dim: usize,
    pub inner: usize,
}

/// A tensor seen as `[outer, first, middle, second, inner bytes]`, global sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Exchange {
    pub outer: usize,
    pub first: usize,
    pub middle: usize,
    pub second: usize,
    pub inner: usize,
    /// The dim that is whole before and split after.
    pub split: Side,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Side {
    #[default]
    First,
    Second,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Continue,
    Requested,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// From 1; 0 before the first.
    pub step: u64,
    pub microbatch: u32,
    /// Section and instruction, such as `forward: start all_reduce.sum tp b6`.
    pub label: Label,
}

/// Up to 64 bytes of text, stored in place so that marking allocates nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label(pub(crate) [u64; Label::WORDS]);

/// What must be equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// Hash of the executable's version and build.
    pub build: u64,
    /// Hash of the whole artifact: all stages' programs, mesh and options.
    pub artifact: u64,
    /// Hash of steps, learning rates, seed, and the checkpoint resumed from.
    pub run: u64,
    /// Hash of the data: names, shapes, sizes, order.
    pub data: u64,
}

/// How a rank waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A wait longer than this is a hang.
    pub timeout: Duration,
}

impl Transfer {
    /// The name in errors.
    pub fn name(&self) -> &'static str {
        match self {
            Transfer::AllReduce { .. } => "all_reduce",
            Transfer::AllGather { .. } => "all_gather",
            Transfer::ReduceScatter { .. } => "reduce_scatter",
            Transfer::AllToAll { .. } => "all_to_all",
            Transfer::Send { .. } => "send",
            Transfer::Recv { .. } => "recv",
        }
    }
}

impl Transfer {
    /// Whether both may be tensors of one transfer: sizes may differ.
    pub(crate) fn is_like(&self, other: &Transfer) -> bool {
        let plain = |transfer: &Transfer| match *transfer {
            Transfer::AllGather { group, .. } => Transfer::AllGather { group, rows: Rows::default() },
            Transfer::ReduceScatter { group, reduce, dtype, .. } => {
                Transfer::ReduceScatter { group, reduce, dtype, rows: Rows::default() }
            }
            Transfer::AllToAll { group, .. } => Transfer::AllToAll { group, exchange: Exchange::default() },
            other => other,
        };
        plain(self) == plain(other)
    }
}

impl Token {
    /// From the lowest bit: whether it is eager, the channel, the sequence number modulo 2^31.
    pub(crate) fn new(channel: u32, sequence: u64, eager: bool) -> Token {
        Token(sequence << 33 | u64::from(channel) << 1 | u64::from(eager))
    }

    pub(crate) fn channel(self) -> u32 {
        (self.0 >> 1) as u32
    }

    /// Whether peers need nothing more of it than what this rank posted.
    pub(crate) fn is_eager(self) -> bool {
        self.0 & 1 == 1
    }

    /// Of the transfers that its channel has started, fewer than 2^31 ago.
    pub(crate) fn sequence(self, started: u64) -> u64 {
        started - (((started << 33).wrapping_sub(self.0 >> 33 << 33)) >> 33)
    }
}

impl Rows {
    pub fn block(&self, members: usize) -> usize {
        block(self.dim, members)
    }

    /// Rows of member `index`, in global indices; empty behind the end.
    pub fn range(&self, index: usize, members: usize) -> std::ops::Range<usize> {
        let block = self.block(members);
        (index * block).min(self.dim)..((index + 1) * block).min(self.dim)
    }
}

/// Elements of a dim that each member holds. Of groups of a power of two it takes no division: a few of them take as long as a small transfer.
fn block(dim: usize, members: usize) -> usize {
    match members.is_power_of_two() {
        true => (dim >> members.trailing_zeros()) + usize::from(dim & (members - 1) != 0),
        false => dim.div_ceil(members),
    }
}

impl Rows {
    pub fn global_bytes(&self) -> usize {
        self.outer * self.dim * self.inner
    }

    /// Bytes that each member holds, unspecified rows included.
    pub fn local_bytes(&self, members: usize) -> usize {
        self.outer * self.block(members) * self.inner
    }
}

impl Exchange {
    /// Bytes that each member holds before and after.
    pub fn local_bytes(&self, members: usize) -> (usize, usize) {
        let rest = self.outer * self.middle * self.inner;
        let first_split = rest * block(self.first, members) * self.second;
        let second_split = rest * self.first * block(self.second, members);
        match self.split {
            Side::First => (second_split, first_split),
            Side::Second => (first_split, second_split),
        }
    }
}

impl Label {
    const WORDS: usize = 8;

    /// The first 64 bytes of `text`, cut between characters.
    pub fn new(text: &str) -> Label {
        let mut end = text.len().min(Label::WORDS * 8);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut words = [0; Label::WORDS];
        for (word, bytes) in words.iter_mut().zip(text.as_bytes()[..end].chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(padded);
        }
        Label(words)
    }

    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.label.text() {
            label if label.is_empty() => write!(f, "step {}", self.step),
            // Loading and compiling come before any step.
            label if self.step == 0 => write!(f, "{label}, before step 1"),
            label => write!(f, "step {}, microbatch {}, {label}", self.step, self.microbatch),
        }
    }
}

impl Hello {
    pub(crate) const FIELDS: [&str; 4] = ["build", "artifact", "run options", "data"];

    pub(crate) fn words(&self) -> [u64; 4] {
        [self.build, self.artifact, self.run, self.data]
    }
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { timeout: Duration::from_secs(60) }
    }
}
