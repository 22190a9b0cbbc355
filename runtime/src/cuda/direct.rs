//! What ranks on GPUs move: each reads its peers' memory where it lies, on the same GPU or over its links, and writes its own. The ranks are
//! threads of one process. A channel's work has a stream of its own, which events order behind and before what ranks compute; the host
//! runs ahead. An event may have been recorded anew when a stream comes to follow it: then it follows more than it must, which is work that
//! was started earlier all the same.

use super::copies::{Copies, Room};
use super::driver::{Buffer, Gpu};
use super::queue::{Event, Stream};
use crate::comm::mover::{Copy, Mover, Origin, Pieces, SMALL_BYTES, Stage, Sum, Target};
use crate::comm::{Comm, Layout, Peer};
use crate::error::Result;
use dcc_kernels::cuda::transfer::Reduction;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What the ranks of a process know of each other.
#[derive(Default)]
pub struct Together(Mutex<BTreeMap<u32, Arc<End>>>);

/// A rank as its peers see it.
struct End {
    ordinal: u32,
    /// Alive as long as anybody may read it: a rank may fail before the others have seen it.
    arena: Arc<Buffer>,
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
    copies: Copies,
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
pub fn connect(
    together: &Together,
    comm: &mut Peer,
    gpu: &Arc<Gpu>,
    arena: &Arc<Buffer>,
    reductions: &[Reduction],
) -> Result<()> {
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
pub(super) fn members(layout: &Layout, channel: usize, rank: u32) -> Option<Vec<u32>> {
    let groups = layout.groups.len();
    let members = match layout.groups.get(channel) {
        Some(group) => group.0.clone(),
        None => layout.pairs().nth(channel - groups).map(|(from, to)| vec![from, to])?,
    };
    let differ = members.len() > 1 && members[0] != members[1];
    (members.contains(&rank) && (differ || channel < groups)).then_some(members)
}

impl End {
    fn new(gpu: &Gpu, arena: &Arc<Buffer>, layout: &Layout, rank: u32) -> Result<End> {
        let marks = (0..layout.channels()).map(|channel| {
            let marks = || Ok([Event::new()?, Event::new()?, Event::new()?]);
            members(layout, channel, rank).map(|_| marks()).transpose()
        });
        Ok(End { ordinal: gpu.ordinal(), arena: arena.clone(), marks: marks.collect::<Result<_>>()? })
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
        let copies = Copies::new(&gpu, wanted)?;
        let queue = |channel: usize| {
            let queue = |members| Ok(Queue { stream: Stream::urgent()?, last: Event::new()?, members });
            members(&layout, channel, rank).map(queue).transpose()
        };
        let queues = (0..layout.channels()).map(queue).collect::<Result<_>>()?;
        let held = gpu.allocate(layout.groups.len() * SMALL_BYTES)?;
        Ok(Direct { gpu, rank, layout, ends, queues, held, copies })
    }

    fn queue(&self, channel: u32) -> &Queue {
        self.queues[channel as usize].as_ref().expect("a rank moves on its own channels")
    }

    fn arena(&self, rank: u32) -> Room {
        let arena = &self.ends[rank as usize].arena;
        Room { address: arena.address(), bytes: arena.bytes() }
    }

    /// What is held for a group.
    fn held(&self, channel: u32) -> Room {
        assert!((channel as usize) < self.layout.groups.len(), "messages hold nothing");
        Room { address: self.held.address() + (channel as usize * SMALL_BYTES) as u64, bytes: SMALL_BYTES }
    }
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
        let from = match from {
            Origin::Arena(rank) => self.arena(rank),
            Origin::Held => self.held(channel),
            Origin::Entry => unreachable!("only who moves at once takes what entries carry"),
        };
        // SAFETY: arenas outlive all transfers; the protocol keeps others away.
        unsafe { self.copies.copy(&self.queue(channel).stream, copy, from, self.arena(self.rank)) }
    }

    fn reduce(&mut self, channel: u32, sum: &Sum<'_>, to: Target) -> Result<()> {
        let Pieces { outer, bytes, at, stride, to_stride } = sum.pieces;
        if outer * bytes == 0 {
            return Ok(());
        }
        let (room, first) = match to {
            Target::Arena(first) => (self.arena(self.rank), first),
            Target::Held(first) => (self.held(channel), first),
        };
        let target = Copies::pieces_at(room, first, outer, to_stride, bytes)?;
        let members = sum.sources.members.len();
        let source = |member: usize| {
            let (rank, offset) = sum.sources.get(member);
            Copies::pieces_at(self.arena(rank), offset + at, outer, stride, bytes)
        };
        let reduction = Reduction { reduce: sum.reduce, dtype: sum.dtype, members };
        // SAFETY: as above; all addresses were looked at.
        unsafe { self.copies.reduce(&self.queue(channel).stream, reduction, sum.pieces, target, (0..members).map(source)) }
    }

    fn is_on_device(&self) -> bool {
        true
    }
}
