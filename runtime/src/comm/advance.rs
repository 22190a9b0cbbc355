//! What a rank does for the head of a channel's queue, one piece at a time.
//!
//! Posting lets peers read the source, or, where it is small, gives it to them: then nobody waits for its readers. A large all_reduce
//! reduces its own chunk, then copies the others' chunks; a small one reduces everything and, since the target may be the source,
//! writes once all have read; all others read peer by peer.

use super::mover::{Carried, Copy, Origin, Pieces, SMALL_BYTES, Sources, Stage, Sum, Target};
use super::peer::{Advance, Channel, Head, Need, Peer, Phase};
use super::prepared::Prepared;
use super::pull::{self, Member, chunk};
use super::segment::{Awaited, RING, Segment, Slot};
use super::{DType, Op, Reduce, Transfer, TransferId};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

pub const NOT_READ: &str = "has not finished it";

impl Peer {
    /// The head, all at once, by a mover that can.
    fn whole(&mut self, channel: u32, head: TransferId) -> Result<Advance> {
        let (me, sends) = (self.me(channel), matches!(self.tensor(head, 0).transfer, Transfer::Send { .. }));
        if sends {
            self.follow(channel, me.index..me.index + 1, Stage::Posted)?;
        } else if let Advance::Waits = self.all_posted(channel, head)? {
            return Ok(Advance::Waits);
        }
        let Peer { transfers, mover, received, .. } = self;
        let ops = &transfers[head].ops;
        mover.transfer(channel, ops, me)?;
        *received += ops.iter().map(|op| read(op, me)).sum::<u64>();
        if sends { Ok(self.finish_head(channel)) } else { self.done(channel) }
    }

    /// Posts what has room, then does the next piece of work of the queue's head.
    pub(super) fn advance(&mut self, channel: u32) -> Result<Advance> {
        if self.channels[channel as usize].posted < self.channels[channel as usize].started {
            self.post(channel)?;
        }
        let state = &self.channels[channel as usize];
        let Some(&Head { transfer: head, phase, .. }) = state.queue.front() else { return Ok(Advance::Idle) };
        if state.posted <= state.finished {
            let before = state.posted - RING;
            let member = self.undone(channel, before).unwrap_or(state.readers.start);
            return Ok(self.needs(channel, (member, Stage::Done, before), "has not finished the transfers before it"));
        }
        if !self.is_at_once && self.mover.is_whole() {
            return self.whole(channel, head);
        }
        match (self.tensor(head, 0).transfer, phase) {
            (Transfer::Send { .. }, _) => Ok(self.finish_head(channel)),
            (Transfer::Recv { .. }, _) => self.receive(channel, head),
            (Transfer::AllGather { .. } | Transfer::AllToAll { .. }, Phase::Read(served)) => {
                self.collect(channel, head, served)
            }
            (Transfer::ReduceScatter { reduce, dtype, .. }, _) => match self.all_posted(channel, head)? {
                Advance::Moved => self.reduce_rows(channel, head, (reduce, dtype)),
                waiting => Ok(waiting),
            },
            (Transfer::AllReduce { reduce, dtype, .. }, Phase::Read(_)) => match self.all_posted(channel, head)? {
                Advance::Moved if self.transfers[head].eager => self.reduce_carried(channel, head, (reduce, dtype)),
                Advance::Moved if self.transfers[head].bytes <= SMALL_BYTES => {
                    self.reduce_small(channel, head, (reduce, dtype))
                }
                Advance::Moved => self.reduce_chunk(channel, head, (reduce, dtype)),
                waiting => Ok(waiting),
            },
            (_, Phase::WriteHeld) => self.write_held(channel, head),
            (_, Phase::Gather(served)) => self.gather_chunk(channel, head, served),
        }
    }

    /// Posts started transfers in order, as far as the ring has room.
    pub(super) fn post(&mut self, channel: u32) -> Result<()> {
        let Peer { channels, transfers, segment, .. } = self;
        let state = &mut channels[channel as usize];
        let (before, mut end) = (state.posted, 0);
        while state.posted < state.started && state.has_room(segment, channel) {
            if state.is_read {
                let transfer = state.queue[(state.posted - state.finished) as usize].transfer;
                end = tell(segment, self.rank, (channel, state), (state.posted, &transfers[transfer]));
            }
            state.posted += 1;
        }
        let posted = before..state.posted;
        match (posted.is_empty(), state.is_read) {
            (true, _) => Ok(()),
            (false, true) => self.stamp(channel, posted, end),
            (false, false) => self.mark(channel, Stage::Posted),
        }
    }

    /// Sends a small message that nothing stands before: it is over at once, and in no queue. Whether that could be.
    pub(super) fn deliver(&mut self, transfer: TransferId) -> Result<bool> {
        let Peer { channels, transfers, segment, .. } = self;
        let prepared = &transfers[transfer];
        let (channel, state) = (prepared.channel, &mut channels[prepared.channel as usize]);
        let is_message = matches!(prepared.ops[0].transfer, Transfer::Send { .. });
        if !is_message || !state.queue.is_empty() || !state.has_room(segment, channel) {
            return Ok(false);
        }
        let sequence = state.posted;
        let end = tell(segment, self.rank, (channel, state), (sequence, prepared));
        (state.started, state.posted, state.finished) = (sequence + 1, sequence + 1, sequence + 1);
        self.stamp(channel, sequence..sequence + 1, end)?;
        Ok(true)
    }

    /// Lets the other members read what was posted, the last of which has so many bytes of its entry.
    fn stamp(&mut self, channel: u32, posted: Range<u64>, bytes: usize) -> Result<()> {
        self.publish(channel, Stage::Posted, |slot, waits| {
            posted.clone().for_each(|sequence| slot.stamp(sequence));
            // What comes next is most often like it.
            slot.expect(posted.end, bytes, waits);
        })
    }

    /// Lets the other members know of what `store` stores in the own slot.
    fn publish(&mut self, channel: u32, stage: Stage, store: impl Fn(Slot<'_>, bool)) -> Result<()> {
        self.mark(channel, stage)?;
        let state = &self.channels[channel as usize];
        store(self.segment.slot(channel, state.index), !state.readers.contains(&state.index));
        self.segment.ring(state.members.iter().copied().filter(|&member| member != self.rank));
        Ok(())
    }

    /// Advances one of the own counters to the head.
    fn count(&mut self, channel: u32, stage: Stage, counter: impl Fn(Slot<'_>) -> &AtomicU64) -> Result<()> {
        let value = self.channels[channel as usize].finished + 1;
        self.publish(channel, stage, |slot, _| counter(slot).store(value, Release))
    }

    /// What this rank did so far comes before its `stage`.
    fn mark(&mut self, channel: u32, stage: Stage) -> Result<()> {
        if self.is_at_once { Ok(()) } else { self.mover.mark(channel, stage) }
    }

    /// What is moved from here on comes behind `stage` of all `members`.
    fn follow(&mut self, channel: u32, members: Range<usize>, stage: Stage) -> Result<()> {
        if self.is_at_once {
            return Ok(());
        }
        members.into_iter().try_for_each(|member| self.mover.follow(channel, member, stage))
    }

    fn finish_head(&mut self, channel: u32) -> Advance {
        let state = &mut self.channels[channel as usize];
        state.queue.pop_front();
        state.finished += 1;
        Advance::Moved
    }

    /// `done`, and off the queue: the rest is the peers' work.
    fn done(&mut self, channel: u32) -> Result<Advance> {
        self.count(channel, Stage::Done, |slot| slot.done())?;
        Ok(self.finish_head(channel))
    }

    fn set_phase(&mut self, channel: u32, phase: Phase) -> Advance {
        self.channels[channel as usize].queue[0].phase = phase;
        Advance::Moved
    }

    /// Whether `member` posted the head. Errors: it posted another transfer in its place.
    fn has_posted(&self, channel: u32, head: TransferId, member: usize) -> Result<bool> {
        let state = &self.channels[channel as usize];
        if member == state.index {
            return Ok(state.posted > state.finished);
        }
        let slot = self.segment.slot(channel, member);
        if !slot.is_posted(state.finished) {
            return Ok(false);
        }
        if slot.signature(state.finished) == self.transfers[head].signature {
            return Ok(true);
        }
        let peer = state.members[member];
        let ops = &self.transfers[head].ops;
        let bytes: usize = ops.iter().map(|op| op.source.bytes.max(op.target.bytes)).sum();
        Err(Error::mismatch(format!(
            "ranks {} and {peer} meet in different transfers: {} of {bytes} bytes here, `{}` there",
            self.rank,
            ops[0].transfer.name(),
            slot.label(state.finished).text()
        ))
        .at(format!("rank {} at {}", self.rank, self.started_at(&state.queue[0]))))
    }

    /// That a member comes to a stage of a transfer.
    fn needs(&mut self, channel: u32, (member, stage, sequence): (usize, Stage, u64), what: &'static str) -> Advance {
        let awaited = self.segment.slot(channel, member).stage(stage, sequence);
        self.awaits(channel, member, awaited, what)
    }

    fn awaits(&mut self, channel: u32, member: usize, awaited: Awaited, what: &'static str) -> Advance {
        let state = &mut self.channels[channel as usize];
        state.need = Some(Need { peer: state.members[member], channel: Some(channel), what, awaited });
        Advance::Waits
    }

    /// That a member posts the head.
    fn needs_post(&mut self, channel: u32, head: TransferId, member: usize) -> Advance {
        let (sequence, slot) = (self.channels[channel as usize].finished, self.segment.slot(channel, member));
        let awaited = match self.transfers[head].eager {
            true => slot.carried(sequence, self.transfers[head].bytes),
            false => slot.stage(Stage::Posted, sequence),
        };
        self.awaits(channel, member, awaited, "has not started it")
    }

    /// `Moved` once all members have posted the head.
    fn all_posted(&mut self, channel: u32, head: TransferId) -> Result<Advance> {
        let members = self.channels[channel as usize].members.len();
        for member in 0..members {
            if !self.has_posted(channel, head, member)? {
                return Ok(self.needs_post(channel, head, member));
            }
        }
        self.follow(channel, 0..members, Stage::Posted)?;
        Ok(Advance::Moved)
    }

    fn receive(&mut self, channel: u32, head: TransferId) -> Result<Advance> {
        if !self.has_posted(channel, head, 0)? {
            return Ok(self.needs_post(channel, head, 0));
        }
        self.follow(channel, 0..2, Stage::Posted)?;
        let target = self.tensor(head, 0).target;
        let (origin, source) = self.origin(channel, head, 0, (0, 0));
        self.mover.copy(channel, origin, &Copy::piece(source, target.offset, target.bytes))?;
        self.received += target.bytes as u64;
        self.done(channel)
    }

    /// all_gather and all_to_all: one peer after the other, own block first.
    fn collect(&mut self, channel: u32, head: TransferId, served: usize) -> Result<Advance> {
        let me = self.me(channel);
        for served in served..me.members {
            let index = me.after(served);
            if !self.has_posted(channel, head, index)? {
                self.set_phase(channel, Phase::Read(served));
                return Ok(self.needs_post(channel, head, index));
            }
            self.collect_from(channel, head, index)?;
        }
        self.done(channel)
    }

    fn collect_from(&mut self, channel: u32, head: TransferId, index: usize) -> Result<()> {
        let Member { index: own, members } = self.me(channel);
        self.follow(channel, index..index + 1, Stage::Posted)?;
        let from = Member { index, members };
        let (mut bytes, mut before) = (0, 0);
        for tensor in 0..self.tensors(head) {
            let (origin, source) = self.origin(channel, head, index, (tensor, before));
            let op = self.tensor(head, tensor);
            before += op.source.bytes;
            let copy = match op.transfer {
                Transfer::AllGather { rows, .. } => pull::gather(source, from, rows, op.target.offset),
                Transfer::AllToAll { exchange, .. } => pull::exchange(source, from, own, exchange, op.target.offset),
                _ => unreachable!("only these two are collected"),
            };
            self.mover.copy(channel, origin, &copy)?;
            bytes += copy.total();
        }
        self.received += if index == own { 0 } else { bytes as u64 };
        Ok(())
    }

    /// Where the source of a member's tensor is, which lies so many bytes behind the first of its transfer.
    fn origin(&self, channel: u32, head: TransferId, member: usize, (tensor, before): (usize, usize)) -> (Origin, usize) {
        let (state, slot) = (&self.channels[channel as usize], self.segment.slot(channel, member));
        let arena = Origin::Arena(state.members[member]);
        match self.transfers[head].eager {
            // An entry just written is not read again before its lines are back from who reads them.
            _ if member == state.index => (arena, self.tensor(head, tensor).source.offset),
            true => (Origin::Entry, slot.eager(state.finished, self.transfers[head].bytes) + before),
            false => (arena, slot.source(state.finished, tensor)),
        }
    }

    fn tensor(&self, head: TransferId, tensor: usize) -> &Op {
        &self.transfers[head].ops[tensor]
    }

    fn tensors(&self, head: TransferId) -> usize {
        self.transfers[head].ops.len()
    }

    fn me(&self, channel: u32) -> Member {
        let state = &self.channels[channel as usize];
        Member { index: state.index, members: state.members.len() }
    }

    /// Reduces pieces of the head's tensor of that number; counts what is read of others.
    fn reduce(&mut self, channel: u32, tensor: usize, kind: (Reduce, DType), pieces: Pieces, to: Target) -> Result<()> {
        let Peer { channels, transfers, segment, mover, .. } = self;
        let state = &channels[channel as usize];
        let Prepared { ops, eager, bytes, .. } = &transfers[state.queue[0].transfer];
        let before = || ops[..tensor].iter().map(|op| op.source.bytes).sum();
        let eager = eager.then(|| Carried { bytes: *bytes, before: before() });
        let own = (state.index, ops[tensor].source.offset);
        let sources = Sources { segment, channel, sequence: state.finished, tensor, members: &state.members, own, eager };
        let (reduce, dtype) = kind;
        mover.reduce(channel, &Sum { sources, reduce, dtype, pieces }, to)?;
        self.received += (pieces.outer * pieces.bytes * (state.members.len() - 1)) as u64;
        Ok(())
    }

    fn reduce_rows(&mut self, channel: u32, head: TransferId, kind: (Reduce, DType)) -> Result<Advance> {
        let me = self.me(channel);
        for tensor in 0..self.tensors(head) {
            let op = self.tensor(head, tensor);
            let Transfer::ReduceScatter { rows, .. } = op.transfer else { unreachable!("only this one is scattered") };
            let own = rows.range(me.index, me.members);
            let pieces = Pieces {
                outer: rows.outer,
                bytes: own.len() * rows.inner,
                at: own.start * rows.inner,
                stride: rows.dim * rows.inner,
                to_stride: rows.block(me.members) * rows.inner,
            };
            self.reduce(channel, tensor, kind, pieces, Target::Arena(op.target.offset))?;
        }
        self.done(channel)
    }

    fn reduce_chunk(&mut self, channel: u32, head: TransferId, kind: (Reduce, DType)) -> Result<Advance> {
        let me = self.me(channel);
        for tensor in 0..self.tensors(head) {
            let op = self.tensor(head, tensor);
            let own = chunk(op.source.bytes, me);
            let to = Target::Arena(op.target.offset + own.start);
            self.reduce(channel, tensor, kind, Pieces::one(own.start, own.len()), to)?;
        }
        self.count(channel, Stage::Reduced, |slot| slot.reduced())?;
        Ok(self.set_phase(channel, Phase::Gather(1)))
    }

    /// A reduced chunk of a peer may be read, and the own copy of its source overwritten: the peer was its only reader.
    fn gather_chunk(&mut self, channel: u32, head: TransferId, served: usize) -> Result<Advance> {
        let me = self.me(channel);
        if served == me.members {
            return self.done(channel);
        }
        let index = me.after(served);
        let sequence = self.channels[channel as usize].finished;
        if self.segment.slot(channel, index).reduced().load(Acquire) <= sequence {
            return Ok(self.needs(channel, (index, Stage::Reduced, sequence), "has not reduced its part"));
        }
        self.follow(channel, index..index + 1, Stage::Reduced)?;
        let Peer { channels, transfers, segment, mover, received, .. } = self;
        let (state, slot) = (&channels[channel as usize], segment.slot(channel, index));
        for (tensor, op) in transfers[head].ops.iter().enumerate() {
            let range = chunk(op.target.bytes, Member { index, ..me });
            let copy = Copy::piece(slot.target(sequence, tensor) + range.start, op.target.offset + range.start, range.len());
            mover.copy(channel, Origin::Arena(state.members[index]), &copy)?;
            *received += range.len() as u64;
        }
        Ok(self.set_phase(channel, Phase::Gather(served + 1)))
    }

    /// Everything, at once to the target: of all sources only the own one may lie there, which is read before.
    fn reduce_carried(&mut self, channel: u32, head: TransferId, kind: (Reduce, DType)) -> Result<Advance> {
        for tensor in 0..self.tensors(head) {
            let op = self.tensor(head, tensor);
            self.reduce(channel, tensor, kind, Pieces::one(0, op.source.bytes), Target::Arena(op.target.offset))?;
        }
        self.done(channel)
    }

    fn reduce_small(&mut self, channel: u32, head: TransferId, kind: (Reduce, DType)) -> Result<Advance> {
        let mut at = 0;
        for tensor in 0..self.tensors(head) {
            let bytes = self.tensor(head, tensor).source.bytes;
            self.reduce(channel, tensor, kind, Pieces::one(0, bytes), Target::Held(at))?;
            at += bytes;
        }
        self.count(channel, Stage::Done, |slot| slot.done())?;
        Ok(self.set_phase(channel, Phase::WriteHeld))
    }

    /// The target may be the source: all members must have read it.
    fn write_held(&mut self, channel: u32, head: TransferId) -> Result<Advance> {
        let sequence = self.channels[channel as usize].finished;
        if let Some(member) = self.undone(channel, sequence) {
            return Ok(self.needs(channel, (member, Stage::Done, sequence), NOT_READ));
        }
        self.follow(channel, self.channels[channel as usize].readers.clone(), Stage::Done)?;
        let mut at = 0;
        for tensor in 0..self.tensors(head) {
            let target = self.tensor(head, tensor).target;
            self.mover.copy(channel, Origin::Held, &Copy::piece(at, target.offset, target.bytes))?;
            at += target.bytes;
        }
        Ok(self.finish_head(channel))
    }
}

/// Writes into the own slot what a transfer of that number is, and where its sources are, or the sources. Bytes of the entry up to the end of
/// that.
fn tell(segment: &Segment, rank: u32, (channel, state): (u32, &Channel), (sequence, prepared): (u64, &Prepared)) -> usize {
    let (slot, ops) = (segment.slot(channel, state.index), prepared.ops.iter());
    slot.describe(sequence, prepared.signature, &prepared.label);
    match prepared.eager {
        true => slot.carry(sequence, prepared.bytes, ops.map(|op| segment.arena(rank).slice(op.source))),
        false => slot.place(sequence, ops.map(|op| (op.source.offset, op.target.offset))),
    }
}

/// Bytes of others that a member reads for a tensor.
fn read(op: &Op, me: Member) -> u64 {
    let others = me.members - 1;
    let bytes = match op.transfer {
        Transfer::AllReduce { .. } => {
            let own = chunk(op.source.bytes, me).len();
            others * own + op.source.bytes - own
        }
        Transfer::AllGather { rows, .. } => {
            rows.global_bytes() - rows.outer * rows.range(me.index, me.members).len() * rows.inner
        }
        Transfer::ReduceScatter { rows, .. } => others * rows.outer * rows.range(me.index, me.members).len() * rows.inner,
        Transfer::AllToAll { exchange, .. } => {
            let from = (0..me.members).filter(|index| *index != me.index);
            from.map(|index| pull::exchange(0, Member { index, ..me }, me.index, exchange, 0).total()).sum()
        }
        Transfer::Send { .. } => 0,
        Transfer::Recv { .. } => op.target.bytes,
    };
    bytes as u64
}
