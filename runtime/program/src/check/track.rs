//! Which value stands where: the contents of one rank's memory, block by block, and who is using it.

use super::overlap::Span;
use super::{Checked, Fault, refuse};
use crate::program::*;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A value in memory.
#[derive(Clone, Debug)]
pub(super) struct Content {
    /// The buffer it was written to, and buffers that a reshape in place made names of it.
    pub names: SmallVec<[BufferId; 2]>,
    /// The microbatch it belongs to; `None`: to all of them.
    pub microbatch: Option<u32>,
    /// Additions by microbatch, of an accumulator.
    pub additions: Option<Vec<u32>>,
    /// How many each microbatch owes, where it was zeroed.
    pub terms: Option<u32>,
    /// Steps of the order in which it was written, and last read.
    pub step: usize,
    pub read: usize,
    /// Whether anything has read it.
    pub used: bool,
}

/// A block, or one slot of an area.
type Block = (Place, u32);

#[derive(Clone, Copy, Debug)]
struct Lock {
    token: TokenId,
    start: u64,
    end: u64,
    /// Being written to; otherwise read.
    writes: bool,
}

#[derive(Default)]
pub(super) struct Memory {
    /// By first byte: the end, and what is there.
    blocks: HashMap<Block, BTreeMap<u64, (u64, Content)>>,
    /// What was ever written, to tell a value that is not yet there from one that is no longer.
    written: BTreeSet<(Block, BufferId)>,
    locks: HashMap<Block, Vec<Lock>>,
}

impl Memory {
    /// What overlaps `span`, first byte first.
    fn overlapping(&self, block: Block, span: &Span) -> Vec<u64> {
        let Some(map) = self.blocks.get(&block) else { return Vec::new() };
        let before = map.range(..span.start).next_back().filter(|(_, (end, _))| *end > span.start);
        before.into_iter().chain(map.range(span.start..span.end)).map(|(&start, _)| start).collect()
    }

    /// The value of `buffer`, if it is there.
    pub fn find(&mut self, block: Block, span: &Span, buffer: BufferId) -> Checked<&mut Content> {
        self.free_to(block, span, buffer, false)?;
        let at = self.overlapping(block, span);
        let there = at.first().and_then(|start| self.blocks.get(&block)?.get(start));
        let fault = match there {
            Some((end, content))
                if at.len() == 1 && *end == span.end && content.names.contains(&buffer) && at[0] == span.start =>
            {
                None
            }
            Some((_, content)) if self.written.contains(&(block, buffer)) => {
                Some((Fault::Overwritten, format!("b{} is read, but b{} has overwritten it", buffer.0, content.names[0].0)))
            }
            _ => Some((Fault::Unwritten, format!("b{} is read before it is written", buffer.0))),
        };
        match fault {
            Some(fault) => Err(fault),
            None => Ok(&mut self.blocks.get_mut(&block).and_then(|m| m.get_mut(&span.start)).expect("just found").1),
        }
    }

    pub fn write(&mut self, block: Block, span: &Span, content: Content) -> Checked<()> {
        self.free_to(block, span, content.names[0], true)?;
        self.clear(block, span);
        self.written.insert((block, content.names[0]));
        self.blocks.entry(block).or_default().insert(span.start, (span.end, content));
        Ok(())
    }

    fn clear(&mut self, block: Block, span: &Span) {
        for start in self.overlapping(block, span) {
            if let Some(map) = self.blocks.get_mut(&block) {
                map.remove(&start);
            }
        }
    }

    /// Whether no transfer stands in the way.
    fn free_to(&self, block: Block, span: &Span, buffer: BufferId, write: bool) -> Checked<()> {
        let locks = self.locks.get(&block).map_or(&[][..], Vec::as_slice);
        match locks.iter().find(|l| l.start < span.end && span.start < l.end && (write || l.writes)) {
            None => Ok(()),
            Some(lock) => {
                let verb = if write { "written to" } else { "read" };
                refuse(Fault::InFlight, format!("b{} is {verb} while t{} is in flight", buffer.0, lock.token.0))
            }
        }
    }

    /// A transfer reads (`writes`: fills) the span from now on.
    pub fn lock(&mut self, block: Block, span: &Span, token: TokenId, writes: bool) {
        if writes {
            self.clear(block, span);
        }
        self.locks.entry(block).or_default().push(Lock { token, start: span.start, end: span.end, writes });
    }

    pub fn unlock(&mut self, block: Block, span: &Span, token: TokenId, writes: bool) {
        if let Some(locks) = self.locks.get_mut(&block) {
            let is = |l: &Lock| l.token == token && l.writes == writes && l.start == span.start && l.end == span.end;
            if let Some(i) = locks.iter().position(is) {
                locks.remove(i);
            }
        }
    }

    /// Nothing is under way between two sections but what areas hold.
    pub fn rest(&self) -> Checked<()> {
        let lock = self.locks.get(&(Place::Scratch, 0)).and_then(|locks| locks.first());
        if let Some(lock) = lock {
            return refuse(Fault::InFlight, format!("t{} uses scratch beyond the end of its section", lock.token.0));
        }
        Ok(())
    }
}
