//! Transfers by NCCL, whole: every channel has a communicator of its own, made in one order on all ranks, and a stream.
//!
//! The protocol of `comm` has all members post a transfer before any starts it, so that NCCL never meets two different ones; it sums in the
//! order of its rings or trees, which the machine and the sizes decide. Shards of a dim that is not the first, and uneven ones, are
//! packed into rows of their own before, and unpacked behind.

use super::copies::{Copies, Room};
use super::driver::{Buffer, Gpu, is_abandoned};
use super::queue::{Event, Stream};
use crate::comm::mover::{Copy, Mover, Origin, Stage, Strides, Sum, Target};
use crate::comm::pull::{self, Member};
use crate::comm::{Comm, Op, Peer, Transfer};
use crate::error::{Error, Result};
use cudarc::nccl::sys;
use dcc_program::types::{DType, Reduce};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// UniqueIds of communicators, by channel, on their way from the first member to the others.
#[derive(Default)]
pub struct UniqueIds(Mutex<BTreeMap<usize, sys::ncclUniqueId>>);

/// One rank's mover.
pub struct Nccl {
    gpu: Arc<Gpu>,
    arena: Room,
    /// By channel, of those that are used and that the rank is a member of.
    queues: Vec<Option<Queue>>,
    copies: Copies,
    limit: Duration,
}

/// A channel's work on this rank.
struct Queue {
    communicator: Communicator,
    stream: Stream,
    posted: Event,
    /// Behind all work.
    last: Event,
    /// What is packed; those before the last may still be used.
    staging: Vec<Buffer>,
}

struct Communicator(sys::ncclComm_t);

// SAFETY: a communicator is used by one thread at a time: the one that has the mover.
unsafe impl Send for Communicator {}

/// Looks at a communicator without a pause: a call is under way within microseconds where members are connected.
const LOOKS: u32 = 4000;
/// From one look to the next, after those.
const LOOK: Duration = Duration::from_micros(200);

/// Whether NCCL is installed.
pub fn is_installed() -> bool {
    // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's.
    unsafe { sys::is_culib_present() }
}

fn check(result: sys::ncclResult_t, what: &str) -> Result<()> {
    if matches!(result, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: the library has a text for every result, which it never frees.
    let text = unsafe { CStr::from_ptr(sys::ncclGetErrorString(result)) }.to_string_lossy();
    Err(Error::device(format!("NCCL, {what}: {text}")))
}

/// Makes `comm` move what the ranks transfer by NCCL. Every rank calls it, before the first transfer; `used`: channels of programs' transfers;
/// `arena`: the rank's memory on its GPU, which outlives the last. Errors: NCCL is missing, or makes no communicators.
pub fn connect(ids: &UniqueIds, comm: &mut Peer, gpu: &Arc<Gpu>, arena: &Buffer, used: &[u32], limit: Duration) -> Result<()> {
    if !is_installed() {
        let error = Error::device("NCCL is not installed: no libnccl.so in the library path");
        return Err(error.help(
            "a link of that name to libnccl.so.2 will do; without --gpu-comm nccl, GPUs that reach each other need none",
        ));
    }
    let layout = comm.segment().layout.clone();
    let rank = comm.rank();
    let mine = |channel: &u32| Some((*channel as usize, super::direct::members(&layout, *channel as usize, rank)?));
    let channels: Vec<(usize, Vec<u32>)> = used.iter().filter_map(mine).collect();
    let lock = || ids.0.lock().unwrap_or_else(PoisonError::into_inner);
    for (channel, _) in channels.iter().filter(|(_, members)| members[0] == rank) {
        let mut name = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: the place lives through the call.
        check(unsafe { sys::ncclGetUniqueId(&mut name) }, "a communicator's name")?;
        lock().insert(*channel, name);
    }
    comm.agree(0)?;
    let mut queues: Vec<Option<Queue>> = (0..layout.channels()).map(|_| None).collect();
    let scratch = gpu.allocate(1 + layout.arena_bytes.len())?;
    // In one order on all ranks.
    for (channel, members) in channels {
        let name = lock().get(&channel).copied().ok_or_else(|| Error::device("a communicator without a name"))?;
        let communicator = Communicator::new(name, &members, rank, limit)?;
        let (stream, posted, last) = (Stream::urgent()?, Event::new()?, Event::new()?);
        communicator.meet(members.len(), &scratch, &stream)?;
        communicator.settle(limit, "a first message")?;
        stream.wait()?;
        queues[channel] = Some(Queue { communicator, stream, posted, last, staging: Vec::new() });
    }
    let arena = Room { address: arena.address(), bytes: arena.bytes() };
    let copies = Copies::new(gpu, &[])?;
    comm.set_mover(Box::new(Nccl { gpu: gpu.clone(), arena, queues, copies, limit }));
    Ok(())
}

impl Communicator {
    fn new(name: sys::ncclUniqueId, members: &[u32], rank: u32, limit: Duration) -> Result<Communicator> {
        let place = members.iter().position(|member| *member == rank).unwrap_or(0) as i32;
        let undefined = i32::MIN;
        // As NCCL's own initialiser fills it; calls return at once.
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 22800,
            blocking: 0,
            cgaClusterSize: undefined,
            minCTAs: undefined,
            maxCTAs: undefined,
            netName: std::ptr::null(),
            splitShare: undefined,
            trafficClass: undefined,
            commName: std::ptr::null(),
            collnetEnable: undefined,
            CTAPolicy: undefined,
            shrinkShare: undefined,
            nvlsCTAs: undefined,
            nChannelsPerNetPeer: undefined,
            nvlinkCentricSched: undefined,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the places live through the call.
        let started = unsafe { sys::ncclCommInitRankConfig(&mut raw, members.len() as i32, name, place, &mut config) };
        check(started, "a communicator")?;
        let communicator = Communicator(raw);
        communicator.settle(limit, "a communicator")?;
        Ok(communicator)
    }

    /// Until what was called is under way. Errors: of any member.
    fn settle(&self, limit: Duration, what: &str) -> Result<()> {
        let began = Instant::now();
        for look in 0_u64.. {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the place lives through the call.
            check(unsafe { sys::ncclCommGetAsyncError(self.0, &mut state) }, what)?;
            check(state, what)?;
            if state != sys::ncclResult_t::ncclInProgress {
                return Ok(());
            }
            if began.elapsed() > limit {
                let seconds = limit.as_secs_f64();
                return Err(Error::hang(format!("NCCL, {what}: nothing for {seconds:.1} s")));
            }
            match look < u64::from(LOOKS) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(LOOK),
            }
        }
        Ok(())
    }

    /// A first message between all members, `scratch` from each to each: NCCL connects members when they first meet, and then a rank waits
    /// for the others in the middle of a call, when those may wait for it elsewhere.
    fn meet(&self, members: usize, scratch: &Buffer, stream: &Stream) -> Result<()> {
        let byte = sys::ncclDataType_t::ncclUint8;
        let at = scratch.address();
        // SAFETY: the scratch has a byte for each message; the stream is alive until they are there.
        unsafe {
            check(sys::ncclGroupStart(), "a group")?;
            let called = (0..members).try_for_each(|member| {
                let (from, to) = (at as *const c_void, (at + 1 + member as u64) as *mut c_void);
                check(sys::ncclSend(from, 1, byte, member as i32, self.0, stream.raw().cast()), "a first message")?;
                check(sys::ncclRecv(to, 1, byte, member as i32, self.0, stream.raw().cast()), "a first message")
            });
            let ended = check(sys::ncclGroupEnd(), "a group");
            called?;
            ended
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.0.is_null() || is_abandoned() {
            return;
        }
        // SAFETY: the communicator is this value's own.
        let _ = unsafe { sys::ncclCommAbort(self.0) };
    }
}

impl Drop for Nccl {
    /// All are told to end before any is freed: freeing waits for all work of the GPU, and so for that of the others.
    fn drop(&mut self) {
        if is_abandoned() {
            return;
        }
        // SAFETY: the communicators are this value's own, and null from here on.
        unsafe {
            let _ = sys::ncclGroupStart();
            for queue in self.queues.iter_mut().flatten() {
                let _ = sys::ncclCommAbort(std::mem::replace(&mut queue.communicator.0, std::ptr::null_mut()));
            }
            let _ = sys::ncclGroupEnd();
        }
    }
}

fn data_type(dtype: DType) -> Result<sys::ncclDataType_t> {
    Ok(match dtype {
        DType::Bool | DType::U8 => sys::ncclDataType_t::ncclUint8,
        DType::I8 => sys::ncclDataType_t::ncclInt8,
        DType::I32 => sys::ncclDataType_t::ncclInt32,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        DType::U64 => sys::ncclDataType_t::ncclUint64,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::I16 | DType::U16 => return Err(Error::device(format!("NCCL reduces no {}", dtype.name()))),
    })
}

fn operation(reduce: Reduce, dtype: DType) -> sys::ncclRedOp_t {
    match (reduce, dtype) {
        (Reduce::Sum, DType::Bool) | (Reduce::Max, _) => sys::ncclRedOp_t::ncclMax,
        (Reduce::Prod, DType::Bool) | (Reduce::Min, _) => sys::ncclRedOp_t::ncclMin,
        (Reduce::Sum, _) => sys::ncclRedOp_t::ncclSum,
        (Reduce::Prod, _) => sys::ncclRedOp_t::ncclProd,
    }
}

/// How a tensor goes: what is packed from the arena to the staging memory, what NCCL does, what is unpacked from there to the arena.
struct Plan {
    packs: Vec<Copy>,
    calls: Vec<Call>,
    unpacks: Vec<Copy>,
}

/// Offsets are in the arena or in the staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Arena(usize),
    Staging(usize),
}

/// Sizes are those of the call: elements of reductions, bytes else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    AllReduce { from: Place, to: Place, count: usize, reduce: Reduce, dtype: DType },
    AllGather { from: Place, to: Place, bytes: usize },
    ReduceScatter { from: Place, to: Place, count: usize, reduce: Reduce, dtype: DType },
    Send { from: Place, bytes: usize, member: usize },
    Recv { to: Place, bytes: usize, member: usize },
}

/// The same pieces, one behind the other.
fn dense(copy: &Copy, at: usize) -> Strides {
    Strides { at, outer: copy.rows * copy.bytes, row: copy.bytes }
}

impl Plan {
    /// `used`: bytes of the staging memory that are taken; more are taken.
    fn new(op: &Op, me: Member, used: &mut usize) -> Plan {
        let Member { index, members } = me;
        let mut take = |bytes: usize| {
            let at = *used;
            *used += bytes.next_multiple_of(64);
            at
        };
        let (source, target) = (op.source.offset, op.target.offset);
        let mut plan = Plan { packs: Vec::new(), calls: Vec::new(), unpacks: Vec::new() };
        let each = |index| Member { index, members };
        match op.transfer {
            Transfer::AllReduce { reduce, dtype, .. } => {
                let count = op.source.bytes / dtype.bytes() as usize;
                plan.calls.push(Call::AllReduce { from: Place::Arena(source), to: Place::Arena(target), count, reduce, dtype });
            }
            Transfer::AllGather { rows, .. } => {
                let (from, bytes) = (Place::Arena(source), rows.local_bytes(members));
                let is_whole = rows.outer == 1 && rows.dim.is_multiple_of(members);
                let all = if is_whole { Place::Arena(target) } else { Place::Staging(take(bytes * members)) };
                if let Place::Staging(all) = all {
                    plan.unpacks.extend((0..members).map(|n| pull::gather(all + n * bytes, each(n), rows, target)));
                }
                plan.calls.push(Call::AllGather { from, to: all, bytes });
            }
            Transfer::ReduceScatter { reduce, dtype, rows, .. } => {
                let (to, bytes) = (Place::Arena(target), rows.local_bytes(members));
                let is_whole = rows.outer == 1 && rows.dim.is_multiple_of(members);
                let all = if is_whole { Place::Arena(source) } else { Place::Staging(take(bytes * members)) };
                if let Place::Staging(all) = all {
                    // The other way round than a gather.
                    let back = |copy: Copy| Copy { from: copy.to, to: copy.from, ..copy };
                    plan.packs.extend((0..members).map(|n| back(pull::gather(all + n * bytes, each(n), rows, source))));
                }
                let count = bytes / dtype.bytes() as usize;
                plan.calls.push(Call::ReduceScatter { from: all, to, count, reduce, dtype });
            }
            Transfer::AllToAll { exchange, .. } => {
                for member in 0..members {
                    let given = pull::exchange(source, me, member, exchange, 0);
                    let at = take(given.total());
                    plan.packs.push(Copy { to: dense(&given, at), ..given });
                    plan.calls.push(Call::Send { from: Place::Staging(at), bytes: given.total(), member });
                    let got = pull::exchange(0, each(member), index, exchange, target);
                    let at = take(got.total());
                    plan.calls.push(Call::Recv { to: Place::Staging(at), bytes: got.total(), member });
                    plan.unpacks.push(Copy { from: dense(&got, at), ..got });
                }
            }
            Transfer::Send { .. } => {
                plan.calls.push(Call::Send { from: Place::Arena(source), bytes: op.source.bytes, member: 1 });
            }
            Transfer::Recv { .. } => {
                plan.calls.push(Call::Recv { to: Place::Arena(target), bytes: op.target.bytes, member: 0 });
            }
        }
        plan
    }
}

impl Nccl {
    fn queue(&self, channel: u32) -> &Queue {
        self.queues[channel as usize].as_ref().expect("a rank moves on its own channels")
    }

    /// # Safety
    /// Arena and staging memory are alive until the work is done.
    unsafe fn call(&self, queue: &Queue, staging: Room, call: &Call) -> Result<()> {
        let at = |place: Place, bytes: usize| match place {
            Place::Arena(at) => self.arena.at(at..at + bytes),
            Place::Staging(at) => staging.at(at..at + bytes),
        };
        let (communicator, stream) = (queue.communicator.0, queue.stream.raw().cast());
        let byte = sys::ncclDataType_t::ncclUint8;
        // SAFETY: all addresses lie inside of their rooms; the rest is the caller's.
        let (result, what) = unsafe {
            match *call {
                Call::AllReduce { from, to, count, reduce, dtype } => {
                    let bytes = count * dtype.bytes() as usize;
                    let (from, to) = (at(from, bytes)? as *const _, at(to, bytes)? as *mut _);
                    let (kind, op) = (data_type(dtype)?, operation(reduce, dtype));
                    (sys::ncclAllReduce(from, to, count, kind, op, communicator, stream), "all_reduce")
                }
                Call::AllGather { from, to, bytes } => {
                    let (from, to) = (at(from, bytes)? as *const _, at(to, bytes)? as *mut _);
                    (sys::ncclAllGather(from, to, bytes, byte, communicator, stream), "all_gather")
                }
                Call::ReduceScatter { from, to, count, reduce, dtype } => {
                    let bytes = count * dtype.bytes() as usize;
                    let (from, to) = (at(from, bytes)? as *const _, at(to, bytes)? as *mut _);
                    let (kind, op) = (data_type(dtype)?, operation(reduce, dtype));
                    (sys::ncclReduceScatter(from, to, count, kind, op, communicator, stream), "reduce_scatter")
                }
                Call::Send { from, bytes, member } => {
                    let from = at(from, bytes)? as *const _;
                    (sys::ncclSend(from, bytes, byte, member as i32, communicator, stream), "send")
                }
                Call::Recv { to, bytes, member } => {
                    let to = at(to, bytes)? as *mut _;
                    (sys::ncclRecv(to, bytes, byte, member as i32, communicator, stream), "recv")
                }
            }
        };
        check(result, what)
    }
}

impl Mover for Nccl {
    fn mark(&mut self, channel: u32, stage: Stage) -> Result<()> {
        match stage {
            Stage::Posted => self.gpu.stream().record(&self.queue(channel).posted),
            Stage::Reduced | Stage::Done => Ok(()),
        }
    }

    /// NCCL waits for the others.
    fn follow(&mut self, channel: u32, _: usize, _: Stage) -> Result<()> {
        let queue = self.queue(channel);
        queue.stream.follow(&queue.posted)
    }

    /// What NCCL did here is done when nobody reads this rank's operands any more.
    fn land(&mut self, channel: u32, _: Range<usize>) -> Result<()> {
        let queue = self.queue(channel);
        queue.stream.record(&queue.last)?;
        self.gpu.stream().follow(&queue.last)
    }

    fn transfer(&mut self, channel: u32, tensors: &[Op], me: Member) -> Result<()> {
        let mut used = 0;
        let plans: Vec<Plan> = tensors.iter().map(|op| Plan::new(op, me, &mut used)).collect();
        let have = self.queue(channel).staging.last().map_or(0, Buffer::bytes);
        if used > have {
            let buffer = self.gpu.allocate(used)?;
            self.queues[channel as usize].as_mut().expect("it is there").staging.push(buffer);
        }
        let queue = self.queue(channel);
        let staging =
            queue.staging.last().map_or(Room { address: 0, bytes: 0 }, |b| Room { address: b.address(), bytes: b.bytes() });
        // SAFETY: the arena outlives all transfers, staging memory this value; the stream has the order.
        unsafe {
            for copy in plans.iter().flat_map(|plan| &plan.packs) {
                self.copies.copy(&queue.stream, copy, self.arena, staging)?;
            }
            check(sys::ncclGroupStart(), "a group")?;
            let called = plans.iter().flat_map(|plan| &plan.calls).try_for_each(|call| self.call(queue, staging, call));
            let ended = check(sys::ncclGroupEnd(), "a group");
            called?;
            ended?;
            queue.communicator.settle(self.limit, "a transfer")?;
            for copy in plans.iter().flat_map(|plan| &plan.unpacks) {
                self.copies.copy(&queue.stream, copy, staging, self.arena)?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, _: u32, _: Origin, _: &Copy) -> Result<()> {
        unreachable!("NCCL does whole transfers")
    }

    fn reduce(&mut self, _: u32, _: &Sum<'_>, _: Target) -> Result<()> {
        unreachable!("NCCL does whole transfers")
    }

    fn is_on_device(&self) -> bool {
        true
    }

    fn is_whole(&self) -> bool {
        true
    }
}
