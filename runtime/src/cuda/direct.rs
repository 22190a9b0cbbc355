//! What ranks on GPUs move: each reads its peers' memory where it lies, on the same GPU or over its links, and writes its own. The ranks are
//! threads of one process. A channel's work has a stream of its own, which events order behind and before what ranks compute; the host
//! runs ahead. An event may have been recorded anew when a stream comes to follow it: then it follows more than it must, which is work that
//! was started earlier all the same.

use super::driver::{Buffer, Gpu, Kernel};
use super::kernels::Kernels;
use super::queue::{Event, Stream};
use crate::comm::mover::{Copy, Mover, Origin, SMALL_BYTES, Stage, Sum, Target};
use crate::comm::{Comm, Layout, Peer};
use crate::error::{Error, Result};
use dcc_kernels::cuda::transfer::{self, Choice, Reduction, THREADS};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What the ranks of a process know of each other.
#[derive(Default)]
pub struct Together(Mutex<BTreeMap<u32, Arc<End>>>);

/// A rank as its peers see it.
struct End {
    ordinal: u32,
    /// Where its arena lies.
    arena: u64,
    bytes: usize,
    /// By channel, of those that it is a member of.
    marks: Vec<Option<[Event; 3]>>,
}

/// One rank's mover.
pub struct Direct {
    gpu: Arc<Gpu>,
    rank: u32,
    layout: Arc<Layout>,
    /// By rank.
    ends: Vec<Arc<End>>,
    /// By channel, of those that the rank is a member of.
    queues: Vec<Option<Queue>>,
    /// `SMALL_BYTES` for each group.
    held: Buffer,
    reductions: BTreeMap<Reduction, usize>,
    kernels: Kernels,
}

/// A channel's work on this rank.
struct Queue {
    stream: Stream,
    /// Behind all of it.
    last: Event,
    members: Vec<u32>,
}

/// Makes `comm` move what the ranks transfer from GPU to GPU, if every GPU reaches all others; else it goes through the hosts. Every rank calls
/// it, before the first transfer. `arena`: the rank's memory on its GPU, which outlives the communicator's last transfer.
///
/// Errors: the reductions do not compile.
pub fn connect(together: &Together, comm: &mut Peer, gpu: &Arc<Gpu>, arena: &Buffer, reductions: &[Reduction]) -> Result<()> {
    let (layout, rank) = (Arc::new(comm.segment().layout.clone()), comm.rank());
    if layout.world() == 1 {
        return Ok(());
    }
    let mine = End::new(gpu, arena, &layout, rank)?;
    let lock = || together.0.lock().unwrap_or_else(PoisonError::into_inner);
    lock().insert(rank, Arc::new(mine));
    comm.agree(0)?;
    let ends: Vec<Arc<End>> = lock().values().cloned().collect();
    let mut reached = true;
    for end in &ends {
        reached &= gpu.reach(end.ordinal)?;
    }
    if comm.agree(u64::from(!reached))? != 0 {
        return Ok(());
    }
    comm.set_mover(Box::new(Direct::new(gpu.clone(), rank, layout, ends, reductions)?));
    Ok(())
}

/// The members of a channel, if `rank` is one.
fn members(layout: &Layout, channel: usize, rank: u32) -> Option<Vec<u32>> {
    let groups = layout.groups.len();
    let members = match layout.groups.get(channel) {
        Some(group) => group.0.clone(),
        None => layout.pairs().nth(channel - groups).map(|(from, to)| vec![from, to])?,
    };
    let differ = members.len() > 1 && members[0] != members[1];
    (members.contains(&rank) && (differ || channel < groups)).then_some(members)
}

impl End {
    fn new(gpu: &Gpu, arena: &Buffer, layout: &Layout, rank: u32) -> Result<End> {
        let marks = (0..layout.channels()).map(|channel| {
            let marks = || Ok([Event::new()?, Event::new()?, Event::new()?]);
            members(layout, channel, rank).map(|_| marks()).transpose()
        });
        Ok(End { ordinal: gpu.ordinal(), arena: arena.address(), bytes: arena.bytes(), marks: marks.collect::<Result<_>>()? })
    }

    fn mark(&self, channel: u32, stage: Stage) -> &Event {
        let marks = self.marks[channel as usize].as_ref().expect("a rank marks its own channels");
        match stage {
            Stage::Posted => &marks[0],
            Stage::Reduced => &marks[1],
            Stage::Done => &marks[2],
        }
    }
}

impl Direct {
    fn new(gpu: Arc<Gpu>, rank: u32, layout: Arc<Layout>, ends: Vec<Arc<End>>, wanted: &[Reduction]) -> Result<Direct> {
        let sources: Vec<_> = std::iter::once(transfer::copy_source()).chain(wanted.iter().map(|each| each.source())).collect();
        let kernels = Kernels::compile(&gpu, &sources)?;
        let reductions = wanted.iter().copied().zip(1..).collect();
        let queue = |channel: usize| {
            let queue = |members| Ok(Queue { stream: Stream::urgent()?, last: Event::new()?, members });
            members(&layout, channel, rank).map(queue).transpose()
        };
        let queues = (0..layout.channels()).map(queue).collect::<Result<_>>()?;
        let held = gpu.allocate(layout.groups.len() * SMALL_BYTES)?;
        Ok(Direct { gpu, rank, layout, ends, queues, held, reductions, kernels })
    }

    fn queue(&self, channel: u32) -> &Queue {
        self.queues[channel as usize].as_ref().expect("a rank moves on its own channels")
    }

    /// Bytes of a rank's arena. Errors: they lie outside of it.
    fn arena(&self, rank: u32, range: Range<usize>) -> Result<u64> {
        let end = &self.ends[rank as usize];
        inside(end.arena, end.bytes, range)
    }

    fn held(&self, channel: u32, range: Range<usize>) -> Result<u64> {
        assert!((channel as usize) < self.layout.groups.len() && range.end <= SMALL_BYTES, "{range:?} of what is held");
        let first = channel as usize * SMALL_BYTES;
        inside(self.held.address(), self.held.bytes(), first + range.start..first + range.end)
    }

    fn entry(&self, kernel: usize, choice: &Choice) -> &Kernel {
        &self.kernels.entries(kernel)[choice.entry]
    }
}

fn inside(base: u64, bytes: usize, range: Range<usize>) -> Result<u64> {
    match range.start <= range.end && range.end <= bytes {
        true => Ok(base + range.start as u64),
        false => Err(Error::artifact(format!("a transfer of bytes {range:?} of an arena of {bytes}"))),
    }
}

/// From where the first of `count` pieces of `bytes` begins to where the last ends.
fn reach(at: usize, strides: [(usize, usize); 2], bytes: usize) -> Range<usize> {
    at..at + strides.iter().map(|&(count, stride)| (count - 1) * stride).sum::<usize>() + bytes
}

impl Mover for Direct {
    fn mark(&mut self, channel: u32, stage: Stage) -> Result<()> {
        let event = self.ends[self.rank as usize].mark(channel, stage);
        match stage {
            Stage::Posted => self.gpu.stream().record(event),
            Stage::Reduced | Stage::Done => self.queue(channel).stream.record(event),
        }
    }

    fn follow(&mut self, channel: u32, member: usize, stage: Stage) -> Result<()> {
        let queue = self.queue(channel);
        queue.stream.follow(self.ends[queue.members[member] as usize].mark(channel, stage))
    }

    fn land(&mut self, channel: u32, readers: Range<usize>) -> Result<()> {
        let queue = self.queue(channel);
        queue.stream.record(&queue.last)?;
        self.gpu.stream().follow(&queue.last)?;
        let others = queue.members[readers].iter().filter(|member| **member != self.rank);
        for &member in others {
            self.gpu.stream().follow(self.ends[member as usize].mark(channel, Stage::Done))?;
        }
        Ok(())
    }

    fn copy(&mut self, channel: u32, from: Origin, copy: &Copy) -> Result<()> {
        if copy.total() == 0 {
            return Ok(());
        }
        let pieces = |strides: &crate::comm::mover::Strides| {
            reach(strides.at, [(copy.outer, strides.outer), (copy.rows, strides.row)], copy.bytes)
        };
        let source = match from {
            Origin::Arena(rank) => self.arena(rank, pieces(&copy.from))?,
            Origin::Held => self.held(channel, pieces(&copy.from))?,
        };
        let target = self.arena(self.rank, pieces(&copy.to))?;
        let used = |count: usize, stride: usize| if count > 1 { stride } else { 0 };
        let [from, to] = [copy.from, copy.to].map(|strides| [used(copy.outer, strides.outer), used(copy.rows, strides.row)]);
        let choice = transfer::choose_copy(&[source as usize, target as usize, copy.bytes, from[0], from[1], to[0], to[1]]);
        let units = |bytes: usize| (bytes / choice.unit) as u64;
        let (pieces, rows) = ((copy.outer * copy.rows) as u64, copy.rows as u64);
        let strides = [units(from[0]), units(from[1]), units(to[0]), units(to[1])];
        let mut words = [target, source, pieces, rows, units(copy.bytes), strides[0], strides[1], strides[2], strides[3]];
        let grid = (transfer::blocks(copy.total() / choice.unit, 1), THREADS as u32, 0);
        // SAFETY: both ends lie inside of arenas, which outlive all transfers, and are multiples of the entry's units; the protocol keeps
        // others away.
        unsafe { self.entry(0, &choice).launch(&self.queue(channel).stream, grid, &mut words) }
    }

    fn reduce(&mut self, channel: u32, sum: &Sum<'_>, to: Target) -> Result<()> {
        let members = sum.sources.members.len();
        if sum.outer * sum.bytes == 0 {
            return Ok(());
        }
        let reduction = Reduction { reduce: sum.reduce, dtype: sum.dtype, members };
        let kernel = *self.reductions.get(&reduction).ok_or_else(|| Error::artifact("a reduction that no program has"))?;
        let reached = |at: usize, stride: usize| reach(at, [(sum.outer, stride), (1, 0)], sum.bytes);
        let target = match to {
            Target::Arena(at) => self.arena(self.rank, reached(at, sum.to_stride))?,
            Target::Held(at) => self.held(channel, reached(at, sum.to_stride))?,
        };
        let mut words = vec![target, sum.outer as u64, 0, 0, 0];
        for member in 0..members {
            let (rank, offset) = sum.sources.get(member);
            words.push(self.arena(rank, reached(offset + sum.at, sum.stride))?);
        }
        let strides = if sum.outer > 1 { [sum.stride, sum.to_stride] } else { [0; 2] };
        let ends = words[5..].iter().map(|&address| address as usize);
        let choice = reduction.choose(&ends.chain([target as usize, sum.bytes, strides[0], strides[1]]).collect::<Vec<_>>());
        let units = |bytes: usize| (bytes / choice.unit) as u64;
        (words[2], words[3], words[4]) = (units(sum.bytes), units(strides[0]), units(strides[1]));
        let grid = (transfer::blocks(sum.bytes / choice.unit, sum.outer), THREADS as u32, 0);
        // SAFETY: as above.
        unsafe { self.entry(kernel, &choice).launch(&self.queue(channel).stream, grid, &mut words) }
    }

    fn is_on_device(&self) -> bool {
        true
    }
}
