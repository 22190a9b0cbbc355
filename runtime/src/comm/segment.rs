//! What the ranks of one machine share: a control block of counters, and one arena per rank.
//!
//! Control block: a header, a block per rank (doorbell, barrier, handshake, where it is), and per channel and member a slot:
//! two counters of transfers and a ring of entries, each of which is stamped with its transfer's number when it may be read. Counters only
//! grow; each word has one writer, except for doorbells. An arena is written by its own rank alone; peers read the regions that it posted.
//! Small sources lie in the entry itself: of up to 48 bytes, one cache line, once moved, has the news and what they are; those that two
//! lines have no room for begin behind them, where nobody looks before the news.

use super::mover::Stage;
use super::shm::Mapping;
use super::{Group, Label, Place, Region};
use crate::error::{Error, Result};
use dcc_program::program::MOST_TENSORS;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::time::Duration;

pub const PAGE: usize = 4096;
/// Arenas start at multiples of a huge page.
const ARENA_ALIGN: usize = 2 << 20;
const MAGIC: u64 = u64::from_le_bytes(*b"dcc run2");

/// Transfers of one channel that may be posted before the oldest is complete; later starts are posted as room comes.
pub const RING: u64 = 16;
/// Sources of up to so many bytes together travel in the entry of their transfer: then nobody waits for their readers, which takes
/// longer than so many bytes to copy where ranks take turns on a core.
pub const EAGER_BYTES: usize = 4 << 10;
/// The same where each rank has a core of its own.
pub const EAGER_BYTES_ALONE: usize = 512;
pub const LINE: usize = 64;
/// Of two lines side by side a processor that misses one may fetch both.
const PAIR: usize = 2 * LINE;
/// Words of an entry: stamp, signature, then source and target of each tensor, or the sources themselves, which begin at `CARRIED` bytes
/// where a pair of lines has no room for them. The label ends it.
const STAMP: usize = 0;
const SIGNATURE: usize = 1;
const BODY: usize = 2;
const CARRIED: usize = PAIR;
const RANK_BYTES: usize = 512;

/// A sleeping wait looks up this often, which shows that its process runs.
pub const WAKE: Duration = Duration::from_millis(100);

/// Where everything lies; equal on all ranks. Untouched pages of a segment cost nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub groups: Vec<Group>,
    /// One per rank.
    pub arena_bytes: Vec<usize>,
    /// Channels from one rank to another.
    lanes: u32,
    /// Where the slots of each channel begin: the groups, then the lanes of each ordered pair of ranks.
    channels: Vec<usize>,
    /// Where they end.
    slots_end: usize,
}

impl Layout {
    /// `groups`: all groups of the run in one global order, those included that a rank is no member of.
    pub fn new(groups: Vec<Group>, arena_bytes: Vec<usize>) -> Layout {
        Layout::with_lanes(groups, arena_bytes, 1)
    }

    /// `lanes`: of messages between two ranks, each of which keeps its own order.
    pub fn with_lanes(groups: Vec<Group>, arena_bytes: Vec<usize>, lanes: u32) -> Layout {
        let world = arena_bytes.len();
        let mut slots_end = PAGE + world * RANK_BYTES;
        let sizes = groups.iter().map(|group| group.0.len() * SLOT_BYTES);
        let sizes = sizes.chain((0..world * world * lanes as usize).map(|_| 2 * SLOT_BYTES));
        let first = |bytes| {
            slots_end += bytes;
            slots_end - bytes
        };
        let channels = sizes.map(first).collect();
        Layout { groups, arena_bytes, lanes, channels, slots_end }
    }

    pub fn world(&self) -> u32 {
        self.arena_bytes.len() as u32
    }

    /// Groups, and lanes of pairs.
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// The channel on which `from` sends to `to`, if there is that lane.
    pub fn pair(&self, from: u32, to: u32, lane: u32) -> Option<u32> {
        let lanes = (from * self.world() + to) * self.lanes;
        (lane < self.lanes).then(|| self.groups.len() as u32 + lanes + lane)
    }

    /// Sender and receiver of the channels after the groups, in order.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        let (world, lanes) = (self.world(), self.lanes);
        (0..world).flat_map(move |from| (0..world).flat_map(move |to| (0..lanes).map(move |_| (from, to))))
    }

    /// Tensors that one transfer of a channel may have.
    pub fn tensors(&self, channel: u32) -> usize {
        if (channel as usize) < self.groups.len() { MOST_TENSORS } else { 1 }
    }

    pub fn control_bytes(&self) -> usize {
        self.slots_end.next_multiple_of(PAGE)
    }

    /// Bytes of `rank`'s arena in the segment's file.
    pub fn arena_range(&self, rank: u32) -> Range<usize> {
        let aligned = |bytes: usize| bytes.max(PAGE).next_multiple_of(ARENA_ALIGN);
        let before: usize = self.arena_bytes[..rank as usize].iter().map(|&bytes| aligned(bytes)).sum();
        let start = self.control_bytes().next_multiple_of(ARENA_ALIGN) + before;
        start..start + self.arena_bytes[rank as usize].max(PAGE).next_multiple_of(PAGE)
    }

    pub fn total_bytes(&self) -> usize {
        self.arena_range(self.world() - 1).end
    }

    /// Ranks with another layout would read each other's memory wrongly.
    pub fn hash(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        for group in &self.groups {
            hasher.update(&(group.0.len() as u64).to_le_bytes());
            group.0.iter().for_each(|rank| {
                hasher.update(&rank.to_le_bytes());
            });
        }
        hasher.update(&self.lanes.to_le_bytes());
        for bytes in &self.arena_bytes {
            hasher.update(&(*bytes as u64).to_le_bytes());
        }
        u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("a hash has 32 bytes"))
    }
}

/// The shared memory, as one rank (or, with `local`, all of them) maps it.
#[derive(Debug)]
pub struct Segment {
    pub layout: Layout,
    control: Mapping,
    arenas: Vec<Mapping>,
}

/// Words of a rank's block.
#[derive(Clone, Copy)]
enum RankWord {
    Bell = 0,
    Sleeping = 4,
    /// Peer + 1 that a sleeping wait needs.
    WaitingOn = 8,
    Finished = 12,
    /// Milliseconds of the monotonic clock when a sleeping wait last looked up.
    Alive = 16,
    Agreed = 64,
    AgreedValues = 72,
    Hello = 128,
    Step = 192,
    Microbatch = 200,
    Beats = 208,
    Label = 216,
}

const DEAD: usize = 16;
const STOP: usize = 20;
const CROWDED: usize = 24;

/// A counter of another rank, and what it is to reach: what a wait is for.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    at: usize,
    value: u64,
    /// What is read then that lies behind the counter's line.
    news: Region,
}

/// One member's side of one channel.
#[derive(Clone, Copy)]
pub struct Slot<'a> {
    control: &'a Mapping,
    base: usize,
}

/// Bytes from a slot's beginning to its counters.
const REDUCED: usize = 8;
const DONE: usize = 16;
/// Of an entry: the longest body, where the label begins, and all.
const BODY_BYTES: usize = if EAGER_BYTES > 16 * MOST_TENSORS { EAGER_BYTES } else { 16 * MOST_TENSORS };
const LABEL: usize = CARRIED + BODY_BYTES;
const ENTRY_BYTES: usize = (LABEL + size_of::<Label>()).next_multiple_of(PAIR);
const SLOT_BYTES: usize = PAIR + RING as usize * ENTRY_BYTES;

impl Segment {
    pub fn new(layout: Layout, control: Mapping, arenas: Vec<Mapping>) -> Segment {
        Segment { layout, control, arenas }
    }

    /// The launcher's part, before any rank attaches.
    pub fn initialize(&self) {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        self.control.word32(CROWDED).store(u32::from(self.layout.world() as usize > cores), Relaxed);
        self.control.word64(8).store(self.layout.hash(), Relaxed);
        self.control.word64(0).store(MAGIC, Release);
    }

    /// Errors: memory of another build or another plan.
    pub fn verify(&self) -> Result<()> {
        let (magic, hash) = (self.control.word64(0).load(Acquire), self.control.word64(8).load(Relaxed));
        if magic != MAGIC {
            return Err(Error::handshake("the launcher's shared memory is of another build"));
        }
        if hash != self.layout.hash() {
            return Err(Error::handshake(format!(
                "launcher and rank have different plans: layout {hash:016x} there, {:016x} here",
                self.layout.hash()
            )));
        }
        Ok(())
    }

    /// Whether ranks share cores: equal on all, as it was when the segment was made.
    pub fn is_crowded(&self) -> bool {
        self.control.word32(CROWDED).load(Relaxed) != 0
    }

    /// As if ranks shared cores.
    #[cfg(test)]
    pub fn crowd(&self) {
        self.control.word32(CROWDED).store(1, Relaxed);
    }

    /// The most bytes of sources that travel in an entry.
    pub fn eager_bytes(&self) -> usize {
        if self.is_crowded() { EAGER_BYTES } else { EAGER_BYTES_ALONE }
    }

    pub fn arena(&self, rank: u32) -> &Mapping {
        &self.arenas[rank as usize]
    }

    pub fn slot(&self, channel: u32, member: usize) -> Slot<'_> {
        Slot { control: &self.control, base: self.layout.channels[channel as usize] + member * SLOT_BYTES }
    }

    /// Whether the counter has reached its value.
    pub fn has_come(&self, awaited: Awaited) -> bool {
        self.control.word64(awaited.at).load(Acquire) >= awaited.value
    }

    /// Has what is read next on its way, while what there is to do with it is being found out.
    pub fn fetch(&self, awaited: Awaited) {
        self.control.fetch(awaited.news);
    }

    /// Of an entry's sources.
    pub fn eager(&self, region: Region) -> &[u8] {
        self.control.slice(region)
    }

    fn rank32(&self, rank: u32, word: RankWord) -> &AtomicU32 {
        self.control.word32(Self::rank_word(rank, word))
    }

    fn rank64(&self, rank: u32, word: RankWord, index: usize) -> &AtomicU64 {
        self.control.word64(Self::rank_word(rank, word) + 8 * index)
    }

    fn rank_word(rank: u32, word: RankWord) -> usize {
        PAGE + rank as usize * RANK_BYTES + word as usize
    }

    pub fn bell(&self, rank: u32) -> &AtomicU32 {
        self.rank32(rank, RankWord::Bell)
    }

    /// Nonzero while `rank` sleeps, or is about to, on its bell.
    pub fn sleeping(&self, rank: u32) -> &AtomicU32 {
        self.rank32(rank, RankWord::Sleeping)
    }

    /// Tells those of `ranks` that sleep of what was stored before. Who is about to sleep says so, then looks for a while longer than a
    /// store takes to be seen: one of the two sees the other. (A fence would be sure of that, and make the rank wait for its stores each
    /// time; who should miss a ring looks up after `WAKE`.)
    pub fn ring(&self, ranks: impl Iterator<Item = u32>) {
        for rank in ranks.filter(|&rank| self.sleeping(rank).load(SeqCst) != 0) {
            self.bell(rank).fetch_add(1, SeqCst);
            super::shm::wake(self.bell(rank));
        }
    }

    pub fn ring_all(&self) {
        fence(SeqCst);
        self.ring(0..self.layout.world());
    }

    /// The rank that failed first, if any did.
    pub fn dead(&self) -> Option<u32> {
        self.control.word32(DEAD).load(Acquire).checked_sub(1)
    }

    pub fn declare_dead(&self, rank: u32) {
        let _ = self.control.word32(DEAD).compare_exchange(0, rank + 1, SeqCst, SeqCst);
        self.ring_all();
    }

    pub fn stop_requested(&self) -> super::Stop {
        if self.control.word32(STOP).load(Acquire) == 0 { super::Stop::Continue } else { super::Stop::Requested }
    }

    pub fn request_stop(&self) {
        self.control.word32(STOP).store(1, Release);
    }

    pub fn set_finished(&self, rank: u32) {
        self.rank32(rank, RankWord::Finished).store(1, Release);
    }

    pub fn is_finished(&self, rank: u32) -> bool {
        self.rank32(rank, RankWord::Finished).load(Acquire) != 0
    }

    /// Said again by a waiting rank each time it wakes, at least every `WAKE`.
    pub fn set_waiting_on(&self, rank: u32, peer: Option<u32>) {
        self.rank64(rank, RankWord::Alive, 0).store(milliseconds(), Relaxed);
        self.rank32(rank, RankWord::WaitingOn).store(peer.map_or(0, |peer| peer + 1), Release);
    }

    /// Whom `rank` waits for. A rank that was stopped while it waited counts as silent, not as waiting.
    pub fn waiting_on(&self, rank: u32) -> Option<u32> {
        let peer = self.rank32(rank, RankWord::WaitingOn).load(Acquire).checked_sub(1)?;
        let alive = self.rank64(rank, RankWord::Alive, 0).load(Relaxed);
        (milliseconds().saturating_sub(alive) < 4 * WAKE.as_millis() as u64).then_some(peer)
    }

    /// The rank that `me`'s wait for `peer` is really for: `peer` itself may be waiting for another.
    pub fn culprit(&self, me: u32, peer: u32) -> u32 {
        let mut at = peer;
        for _ in 0..self.layout.world() {
            match self.waiting_on(at) {
                None => return at,
                Some(next) if next == me => return peer,
                Some(next) => at = next,
            }
        }
        peer
    }

    /// Barriers that `rank` has entered.
    pub fn agreed(&self, rank: u32) -> &AtomicU64 {
        self.rank64(rank, RankWord::Agreed, 0)
    }

    /// That `rank` enters its barrier number `count`.
    pub fn agreement(&self, rank: u32, count: u64) -> Awaited {
        Awaited { at: Self::rank_word(rank, RankWord::Agreed), value: count + 1, news: Region::default() }
    }

    /// The value that `rank` brings to its barrier number `count`. Two suffice: nobody enters a barrier before all have read
    /// the last but one.
    pub fn agreed_value(&self, rank: u32, count: u64) -> &AtomicU64 {
        self.rank64(rank, RankWord::AgreedValues, (count % 2) as usize)
    }

    pub fn set_hello(&self, rank: u32, words: [u64; 4]) {
        words.iter().enumerate().for_each(|(i, &word)| self.rank64(rank, RankWord::Hello, i).store(word, Relaxed));
    }

    pub fn hello(&self, rank: u32) -> [u64; 4] {
        std::array::from_fn(|i| self.rank64(rank, RankWord::Hello, i).load(Relaxed))
    }

    pub fn mark(&self, rank: u32, place: &Place) {
        self.rank64(rank, RankWord::Step, 0).store(place.step, Relaxed);
        self.rank64(rank, RankWord::Microbatch, 0).store(u64::from(place.microbatch), Relaxed);
        for (i, &word) in place.label.0.iter().enumerate() {
            self.rank64(rank, RankWord::Label, i).store(word, Relaxed);
        }
        let beats = self.rank64(rank, RankWord::Beats, 0);
        beats.store(beats.load(Relaxed) + 1, Relaxed);
    }

    /// Where `rank` last said that it is.
    pub fn place(&self, rank: u32) -> Place {
        Place {
            step: self.rank64(rank, RankWord::Step, 0).load(Relaxed),
            microbatch: self.rank64(rank, RankWord::Microbatch, 0).load(Relaxed) as u32,
            label: Label(std::array::from_fn(|i| self.rank64(rank, RankWord::Label, i).load(Relaxed))),
        }
    }

    /// Grows with every `mark`: a rank whose number stands still, and that waits for nobody, is silent.
    pub fn beats(&self, rank: u32) -> u64 {
        self.rank64(rank, RankWord::Beats, 0).load(Relaxed)
    }
}

/// Of a clock that all processes of a machine share.
fn milliseconds() -> u64 {
    crate::metrics::now_ns() / 1_000_000
}

impl<'a> Slot<'a> {
    /// all_reduces whose own chunk is reduced in the target.
    pub fn reduced(self) -> &'a AtomicU64 {
        self.control.word64(self.base + REDUCED)
    }

    /// Transfers for which this member reads no peer any more.
    pub fn done(self) -> &'a AtomicU64 {
        self.control.word64(self.base + DONE)
    }

    /// That the member comes to `stage` of transfer `sequence`.
    pub fn stage(self, stage: Stage, sequence: u64) -> Awaited {
        let at = match stage {
            Stage::Posted => self.entry(sequence) + 8 * STAMP,
            Stage::Reduced => self.base + REDUCED,
            Stage::Done => self.base + DONE,
        };
        Awaited { at, value: sequence + 1, news: Region::default() }
    }

    /// That the member posts transfer `sequence`, whose entry carries so many bytes of sources. The stamp's own line comes with it.
    pub fn carried(self, sequence: u64, bytes: usize) -> Awaited {
        let (first, begin) = (self.entry(sequence), self.eager(sequence, bytes));
        let (offset, end) = (begin.max(first + LINE), begin + bytes);
        Awaited { news: Region { offset, bytes: end.saturating_sub(offset) }, ..self.stage(Stage::Posted, sequence) }
    }

    fn entry(self, sequence: u64) -> usize {
        self.base + PAIR + (sequence % RING) as usize * ENTRY_BYTES
    }

    fn word(self, sequence: u64, index: usize) -> &'a AtomicU64 {
        self.control.word64(self.entry(sequence) + 8 * index)
    }

    fn label_words(self, sequence: u64) -> &'a [AtomicU64] {
        self.control.words64(self.entry(sequence) + LABEL, Label::WORDS)
    }

    /// What a member says of a transfer: its signature, equal on all members iff they do the same, and where it is.
    pub fn describe(self, sequence: u64, signature: u64, label: &Label) {
        self.word(sequence, SIGNATURE).store(signature, Relaxed);
        std::iter::zip(self.label_words(sequence), label.0).for_each(|(to, word)| to.store(word, Relaxed));
    }

    /// Where its tensors are. Bytes of the entry up to the end of that.
    pub fn place(self, sequence: u64, tensors: impl Iterator<Item = (usize, usize)>) -> usize {
        let mut index = BODY;
        for (source, target) in tensors {
            self.word(sequence, index).store(source as u64, Relaxed);
            self.word(sequence, index + 1).store(target as u64, Relaxed);
            index += 2;
        }
        8 * index
    }

    /// Its sources themselves, of so many bytes together, at most `EAGER_BYTES`. Bytes of the entry up to their end.
    pub fn carry<'b>(self, sequence: u64, bytes: usize, sources: impl Iterator<Item = &'b [u8]>) -> usize {
        let mut at = self.eager(sequence, bytes);
        for source in sources {
            self.control.write(at, source);
            at += source.len();
        }
        at - self.entry(sequence)
    }

    /// That the entry of `sequence` comes next, probably of so many bytes: who read its lines last gives them back meanwhile. But for the
    /// first, which who `waits` for it looks at again and again.
    pub fn expect(self, sequence: u64, bytes: usize, waits: bool) {
        let first = if waits { LINE } else { 0 };
        if first < bytes {
            self.control.take(Region { offset: self.entry(sequence) + first, bytes: bytes - first });
        }
    }

    /// From here on the entry of `sequence` may be read, and its sources.
    pub fn stamp(self, sequence: u64) {
        self.word(sequence, STAMP).store(sequence + 1, Release);
    }

    /// Whether the entry of `sequence` may be read. It stays until all members are done with it, and so does what the following read.
    pub fn is_posted(self, sequence: u64) -> bool {
        self.word(sequence, STAMP).load(Acquire) == sequence + 1
    }

    pub fn signature(self, sequence: u64) -> u64 {
        self.word(sequence, SIGNATURE).load(Relaxed)
    }

    pub fn label(self, sequence: u64) -> Label {
        let words = self.label_words(sequence);
        Label(std::array::from_fn(|i| words[i].load(Relaxed)))
    }

    /// Offset of a tensor in the member's arena.
    pub fn source(self, sequence: u64, tensor: usize) -> usize {
        self.word(sequence, BODY + 2 * tensor).load(Relaxed) as usize
    }

    pub fn target(self, sequence: u64, tensor: usize) -> usize {
        self.word(sequence, BODY + 2 * tensor + 1).load(Relaxed) as usize
    }

    /// Where the sources lie that the entry carries, one behind the other, of so many bytes together.
    pub fn eager(self, sequence: u64, bytes: usize) -> usize {
        self.entry(sequence) + if bytes <= PAIR - 8 * BODY { 8 * BODY } else { CARRIED }
    }
}
