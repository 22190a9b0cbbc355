//! A transfer as its rank starts it again and again: checked once, with what each start would find anew.

use super::segment::{Layout, Segment};
use super::{DType, Label, Op, Reduce, Transfer, TransferId};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Index;

/// What is known of a transfer before it starts.
pub(super) struct Prepared {
    pub ops: Box<[Op]>,
    pub channel: u32,
    /// Of all sources, those of the sender where this rank receives.
    pub bytes: usize,
    /// Whether its sources go with what is posted.
    pub eager: bool,
    /// Equal on all members iff they do the same.
    pub signature: u64,
    /// Where the rank was that prepared it, and is whenever it starts it.
    pub label: Label,
}

/// Those of a communicator.
#[derive(Default)]
pub(super) struct Transfers(Vec<Prepared>);

impl Transfers {
    pub fn push(&mut self, prepared: Prepared) -> TransferId {
        self.0.push(prepared);
        TransferId(self.0.len() as u32 - 1)
    }
}

impl Index<TransferId> for Transfers {
    type Output = Prepared;

    fn index(&self, id: TransferId) -> &Prepared {
        &self.0[id.0 as usize]
    }
}

impl Prepared {
    /// What `rank` does of a transfer of these tensors. `may_carry`: small sources may go with what is posted. Errors: no such group or
    /// peer, tensors that do not fit each other, regions outside of the arena, sizes that do not fit the transfer.
    pub fn new(ops: &[Op], rank: u32, label: Label, segment: &Segment, may_carry: bool) -> Result<Prepared, String> {
        let layout = &segment.layout;
        let transfer = ops.first().ok_or("a transfer of nothing")?.transfer;
        let channel = channel_of(&transfer, rank, layout)
            .ok_or_else(|| format!("rank {rank} of {} has no such group or peer: {transfer:?}", layout.world()))?;
        if ops.len() > layout.tensors(channel) || ops[1..].iter().any(|op| !op.transfer.is_like(&transfer)) {
            return Err(format!("{} tensors that are no one {}", ops.len(), transfer.name()));
        }
        let members = layout.groups.get(channel as usize).map_or(2, |group| group.0.len());
        let arena_bytes = segment.arena(rank).bytes();
        ops.iter().try_for_each(|op| check_sizes(op, members, arena_bytes))?;
        let bytes = match transfer {
            Transfer::Recv { .. } => ops.iter().map(|op| op.target.bytes).sum(),
            _ => ops.iter().map(|op| op.source.bytes).sum::<usize>(),
        };
        let eager = may_carry && bytes <= segment.eager_bytes();
        Ok(Prepared { channel, bytes, eager, signature: signature(ops), label, ops: ops.into() })
    }
}

fn channel_of(transfer: &Transfer, rank: u32, layout: &Layout) -> Option<u32> {
    match *transfer {
        Transfer::AllReduce { group, .. }
        | Transfer::AllGather { group, .. }
        | Transfer::ReduceScatter { group, .. }
        | Transfer::AllToAll { group, .. } => {
            layout.groups.get(group.0 as usize).filter(|group| group.0.contains(&rank)).map(|_| group.0)
        }
        Transfer::Send { to: other, .. } | Transfer::Recv { from: other, .. } if other == rank || other >= layout.world() => {
            None
        }
        Transfer::Send { to, lane } => layout.pair(rank, to, lane),
        Transfer::Recv { from, lane } => layout.pair(from, rank, lane),
    }
}

/// Regions lie in the arena and have the sizes that the transfer says; the error is for the compiler's author.
fn check_sizes(op: &Op, members: usize, arena_bytes: usize) -> Result<(), String> {
    let (source, target) = match op.transfer {
        Transfer::AllReduce { dtype, .. } => {
            let bytes = op.source.bytes;
            (Some(bytes), Some(if bytes.is_multiple_of(dtype.bytes() as usize) { bytes } else { usize::MAX }))
        }
        Transfer::AllGather { rows, .. } => (Some(rows.local_bytes(members)), Some(rows.global_bytes())),
        Transfer::ReduceScatter { rows, .. } => (Some(rows.global_bytes()), Some(rows.local_bytes(members))),
        Transfer::AllToAll { exchange, .. } => {
            let (before, after) = exchange.local_bytes(members);
            (Some(before), Some(after))
        }
        Transfer::Send { .. } => (Some(op.source.bytes), None),
        Transfer::Recv { .. } => (None, Some(op.target.bytes)),
    };
    for (name, region, bytes) in [("source", op.source, source), ("target", op.target, target)] {
        let Some(bytes) = bytes else { continue };
        let end = region.offset.checked_add(region.bytes);
        if region.bytes != bytes || end.is_none_or(|end| end > arena_bytes) {
            return Err(format!(
                "{} of a {name} of {} bytes at {} where {bytes} are due in an arena of {arena_bytes}",
                op.transfer.name(),
                region.bytes,
                region.offset
            ));
        }
    }
    Ok(())
}

/// Equal on both sides of a transfer iff they mean the same; not stable between builds.
pub(super) fn signature(ops: &[Op]) -> u64 {
    let mut hasher = DefaultHasher::new();
    ops.iter().for_each(|op| words(op).hash(&mut hasher));
    hasher.finish()
}

/// What members of a transfer must agree on.
fn words(op: &Op) -> [u64; 8] {
    let bytes = op.source.bytes;
    let sum = |kind: u64, reduce: Reduce, dtype: DType| kind | (reduce as u64) << 8 | (dtype as u64) << 16;
    let words = match op.transfer {
        Transfer::Send { .. } => [bytes, 0, 0, 0, 0, 0, 0],
        Transfer::Recv { .. } => [op.target.bytes, 0, 0, 0, 0, 0, 0],
        Transfer::AllReduce { .. } => [bytes, 0, 0, 0, 0, 0, 0],
        Transfer::AllGather { rows, .. } | Transfer::ReduceScatter { rows, .. } => {
            [bytes, rows.outer, rows.dim, rows.inner, 0, 0, 0]
        }
        Transfer::AllToAll { exchange: e, .. } => [bytes, e.outer, e.first, e.middle, e.second, e.inner, e.split as usize],
    };
    let kind = match op.transfer {
        Transfer::Send { .. } | Transfer::Recv { .. } => 0,
        Transfer::AllReduce { reduce, dtype, .. } => sum(1, reduce, dtype),
        Transfer::AllGather { .. } => 2,
        Transfer::ReduceScatter { reduce, dtype, .. } => sum(3, reduce, dtype),
        Transfer::AllToAll { .. } => 4,
    };
    let [a, b, c, d, e, f, g] = words.map(|word| word as u64);
    [kind, a, b, c, d, e, f, g]
}
