//! What a rank does for the head of a channel's queue, one piece at a time.
//!
//! Posting lets peers read the source. A large all_reduce reduces its own chunk, then copies the others' chunks; a small one
//! reduces everything and, since the target may be the source, writes once all have read; all others read peer by peer.

use super::peer::{Advance, Need, Peer, Pending, Phase};
use super::pull::{self, Member, Reduction, Sources, chunk};
use super::segment::{RING, Slot};
use super::{DType, Op, Reduce, Region, Transfer};
use crate::error::{Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Up to here an all_reduce is one exchange: every member reduces all of it.
const SMALL_BYTES: usize = 32 << 10;
const NOT_STARTED: &str = "has not started it";
pub const NOT_READ: &str = "has not finished it";

impl Peer {
    /// Posts what has room, then does the next piece of work of the queue's head.
    pub(super) fn advance(&mut self, channel: u32) -> Result<Advance> {
        self.post(channel);
        let state = &self.channels[channel as usize];
        let Some(&head) = state.queue.front() else { return Ok(Advance::Idle) };
        if state.posted <= state.finished {
            return Ok(Advance::Needs(Need { peer: state.members[0], place: head.place, what: "has too many transfers open" }));
        }
        match (head.transfer, head.phase) {
            (Transfer::Send { .. }, _) => Ok(self.finish_head(channel)),
            (Transfer::Recv { .. }, _) => self.receive(channel, &head),
            (Transfer::AllGather { .. } | Transfer::AllToAll { .. }, Phase::Read(served)) => {
                self.collect(channel, &head, served)
            }
            (Transfer::ReduceScatter { reduce, dtype, .. }, _) => match self.all_posted(channel, &head)? {
                Advance::Moved => Ok(self.reduce_rows(channel, &head, (reduce, dtype))),
                waiting => Ok(waiting),
            },
            (Transfer::AllReduce { reduce, dtype, .. }, Phase::Read(_)) => match self.all_posted(channel, &head)? {
                Advance::Moved if head.bytes <= SMALL_BYTES => Ok(self.reduce_small(channel, &head, (reduce, dtype))),
                Advance::Moved => Ok(self.reduce_chunk(channel, &head, (reduce, dtype))),
                waiting => Ok(waiting),
            },
            (_, Phase::WriteHeld) => Ok(self.write_held(channel, &head)),
            (_, Phase::Gather(served)) => Ok(self.gather_chunk(channel, &head, served)),
        }
    }

    /// Posts started transfers in order, as far as the ring has room.
    pub(super) fn post(&mut self, channel: u32) {
        let state = &mut self.channels[channel as usize];
        let before = state.posted;
        while state.posted < state.started {
            let oldest = (state.posted + 1).saturating_sub(RING);
            if state.readers.clone().any(|member| self.segment.slot(channel, member).done().load(Acquire) < oldest) {
                break;
            }
            let pending = &state.queue[(state.posted - state.finished) as usize];
            let tensors = state.tensors.range(state.posted_tensors..state.posted_tensors + pending.tensors);
            let ends = tensors.map(|op| (op.source.offset, op.target.offset));
            let slot = self.segment.slot(channel, state.index);
            slot.set_entry(state.posted, pending.signature, &pending.place.label, ends);
            state.posted_tensors += pending.tensors;
            state.posted += 1;
        }
        if state.posted > before {
            let posted = state.posted;
            self.publish(channel, posted, |slot| slot.posted());
        }
    }

    /// Advances one of the own counters and tells the other members.
    fn publish(&self, channel: u32, value: u64, counter: impl Fn(Slot<'_>) -> &AtomicU64) {
        let state = &self.channels[channel as usize];
        counter(self.segment.slot(channel, state.index)).store(value, Release);
        state.members.iter().filter(|&&member| member != self.rank).for_each(|&member| self.segment.ring(member));
    }

    fn finish_head(&mut self, channel: u32) -> Advance {
        let state = &mut self.channels[channel as usize];
        let tensors = state.queue.pop_front().map_or(0, |head| head.tensors);
        state.tensors.drain(..tensors);
        state.posted_tensors -= tensors;
        state.finished += 1;
        Advance::Moved
    }

    /// `done`, and off the queue: the rest is the peers' work.
    fn done(&mut self, channel: u32) -> Advance {
        self.publish(channel, self.channels[channel as usize].finished + 1, |slot| slot.done());
        self.finish_head(channel)
    }

    fn set_phase(&mut self, channel: u32, phase: Phase) -> Advance {
        self.channels[channel as usize].queue[0].phase = phase;
        Advance::Moved
    }

    /// Whether `member` posted the head. Errors: it posted another transfer in its place.
    fn has_posted(&self, channel: u32, head: &Pending, member: usize) -> Result<bool> {
        let state = &self.channels[channel as usize];
        let slot = self.segment.slot(channel, member);
        if slot.posted().load(Acquire) <= state.finished {
            return Ok(false);
        }
        if slot.signature(state.finished) == head.signature {
            return Ok(true);
        }
        let peer = state.members[member];
        let tensors = state.tensors.range(..head.tensors);
        let bytes: usize = tensors.map(|op| op.source.bytes.max(op.target.bytes)).sum();
        Err(Error::mismatch(format!(
            "ranks {} and {peer} meet in different transfers: {} of {bytes} bytes here, `{}` there",
            self.rank,
            head.transfer.name(),
            slot.label(state.finished).text()
        ))
        .at(format!("rank {} at {}", self.rank, head.place)))
    }

    fn needs(&self, channel: u32, head: &Pending, member: usize, what: &'static str) -> Advance {
        Advance::Needs(Need { peer: self.channels[channel as usize].members[member], place: head.place, what })
    }

    /// `Moved` once all members have posted the head.
    fn all_posted(&self, channel: u32, head: &Pending) -> Result<Advance> {
        for member in 0..self.channels[channel as usize].members.len() {
            if !self.has_posted(channel, head, member)? {
                return Ok(self.needs(channel, head, member, NOT_STARTED));
            }
        }
        Ok(Advance::Moved)
    }

    fn receive(&mut self, channel: u32, head: &Pending) -> Result<Advance> {
        if !self.has_posted(channel, head, 0)? {
            return Ok(self.needs(channel, head, 0, NOT_STARTED));
        }
        let state = &self.channels[channel as usize];
        let target = state.tensors[0].target;
        let offset = self.segment.slot(channel, 0).source(state.finished, 0);
        let bytes = self.segment.arena(state.members[0]).slice(Region { offset, bytes: target.bytes });
        self.segment.arena(self.rank).write(target.offset, bytes);
        self.received += bytes.len() as u64;
        Ok(self.done(channel))
    }

    /// all_gather and all_to_all: one peer after the other, own block first.
    fn collect(&mut self, channel: u32, head: &Pending, served: usize) -> Result<Advance> {
        let state = &self.channels[channel as usize];
        let members = state.members.len();
        if served == members {
            return Ok(self.done(channel));
        }
        let index = (state.index + served) % members;
        if !self.has_posted(channel, head, index)? {
            return Ok(self.needs(channel, head, index, NOT_STARTED));
        }
        let (slot, from) = (self.segment.slot(channel, index), Member { index, members });
        let mut bytes = 0;
        for (tensor, op) in state.tensors.range(..head.tensors).enumerate() {
            let offset = slot.source(state.finished, tensor);
            let source = pull::Source { arena: self.segment.arena(state.members[index]), offset };
            let (target, at) = (self.segment.arena(self.rank), op.target.offset);
            bytes += match op.transfer {
                Transfer::AllGather { rows, .. } => pull::gather(source, from, rows, target, at),
                Transfer::AllToAll { exchange, .. } => pull::exchange(source, from, state.index, exchange, target, at),
                _ => unreachable!("only these two are collected"),
            };
        }
        self.received += if served == 0 { 0 } else { bytes as u64 };
        Ok(self.set_phase(channel, Phase::Read(served + 1)))
    }

    /// The head's tensor of that number, on all members.
    fn sources(&self, channel: u32, tensor: usize) -> Sources<'_> {
        let state = &self.channels[channel as usize];
        Sources { segment: &self.segment, channel, sequence: state.finished, tensor, members: &state.members }
    }

    fn reduction(&self, channel: u32, tensor: usize, (reduce, dtype): (Reduce, DType)) -> Reduction<'_> {
        Reduction { sources: self.sources(channel, tensor), reduce, dtype, target: self.segment.arena(self.rank) }
    }

    fn tensor(&self, channel: u32, tensor: usize) -> Op {
        self.channels[channel as usize].tensors[tensor]
    }

    fn me(&self, channel: u32) -> Member {
        let state = &self.channels[channel as usize];
        Member { index: state.index, members: state.members.len() }
    }

    fn reduce_rows(&mut self, channel: u32, head: &Pending, kind: (Reduce, DType)) -> Advance {
        let mut scratch = std::mem::take(&mut self.scratch);
        let me = self.me(channel);
        for tensor in 0..head.tensors {
            let op = self.tensor(channel, tensor);
            let Transfer::ReduceScatter { rows, .. } = op.transfer else { unreachable!("only this one is scattered") };
            self.reduction(channel, tensor, kind).scatter(rows, me, op.target.offset, &mut scratch);
            self.count_reduced(rows.outer * rows.range(me.index, me.members).len() * rows.inner, me);
        }
        self.scratch = scratch;
        self.done(channel)
    }

    fn reduce_chunk(&mut self, channel: u32, head: &Pending, kind: (Reduce, DType)) -> Advance {
        let mut scratch = std::mem::take(&mut self.scratch);
        let me = self.me(channel);
        for tensor in 0..head.tensors {
            let op = self.tensor(channel, tensor);
            let own = chunk(op.source.bytes, me);
            self.reduction(channel, tensor, kind).run(own.clone(), op.target.offset + own.start, &mut scratch);
            self.count_reduced(own.len(), me);
        }
        self.scratch = scratch;
        self.publish(channel, self.channels[channel as usize].finished + 1, |slot| slot.reduced());
        self.set_phase(channel, Phase::Gather(1))
    }

    /// A reduced chunk of a peer may be read, and the own copy of its source overwritten: the peer was its only reader.
    fn gather_chunk(&mut self, channel: u32, head: &Pending, served: usize) -> Advance {
        let state = &self.channels[channel as usize];
        let members = state.members.len();
        if served == members {
            return self.done(channel);
        }
        let index = (state.index + served) % members;
        let slot = self.segment.slot(channel, index);
        if slot.reduced().load(Acquire) <= state.finished {
            return self.needs(channel, head, index, "has not reduced its part");
        }
        let peer = self.segment.arena(state.members[index]);
        for (tensor, op) in state.tensors.range(..head.tensors).enumerate() {
            let range = chunk(op.target.bytes, Member { index, members });
            let offset = slot.target(state.finished, tensor) + range.start;
            let bytes = peer.slice(Region { offset, bytes: range.len() });
            self.segment.arena(self.rank).write(op.target.offset + range.start, bytes);
            self.received += bytes.len() as u64;
        }
        self.set_phase(channel, Phase::Gather(served + 1))
    }

    /// A reduction of `bytes` read as many of each other member.
    fn count_reduced(&mut self, bytes: usize, me: Member) {
        self.received += (bytes * (me.members - 1)) as u64;
    }

    fn reduce_small(&mut self, channel: u32, head: &Pending, (reduce, dtype): (Reduce, DType)) -> Advance {
        let mut held = std::mem::take(&mut self.channels[channel as usize].held);
        held.resize(head.bytes, 0);
        let mut at = 0;
        for tensor in 0..head.tensors {
            let bytes = self.tensor(channel, tensor).source.bytes;
            self.sources(channel, tensor).reduce(reduce, dtype, 0..bytes, &mut held[at..at + bytes]);
            at += bytes;
        }
        self.channels[channel as usize].held = held;
        self.count_reduced(head.bytes, self.me(channel));
        self.publish(channel, self.channels[channel as usize].finished + 1, |slot| slot.done());
        self.set_phase(channel, Phase::WriteHeld)
    }

    /// The target may be the source: all members must have read it.
    fn write_held(&mut self, channel: u32, head: &Pending) -> Advance {
        let state = &self.channels[channel as usize];
        if let Some(member) = self.undone(channel, state.finished) {
            return self.needs(channel, head, member, NOT_READ);
        }
        let mut held = &state.held[..];
        for op in state.tensors.range(..head.tensors) {
            let (own, rest) = held.split_at(op.target.bytes);
            self.segment.arena(self.rank).write(op.target.offset, own);
            held = rest;
        }
        self.finish_head(channel)
    }
}

/// Equal on both sides of a transfer iff they mean the same; not stable between builds.
pub(super) fn signature(ops: &[Op]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for op in ops {
        match op.transfer {
            Transfer::Send { .. } => op.source.bytes.hash(&mut hasher),
            Transfer::Recv { .. } => op.target.bytes.hash(&mut hasher),
            collective => (collective, op.source.bytes).hash(&mut hasher),
        }
    }
    hasher.finish()
}
