//! Transfers: a start hands in the operand, a wait ends when all members of the communicator have started.

use super::library::{Block, window};
use super::memory::{POISON, Region, to_bits, to_value};
use super::{Fault, Rank, SimulateError, each_index, flat, scalar};
use crate::mesh::AxisId;
use crate::program::*;
use crate::types::{Reduce, TensorType};
use std::collections::BTreeMap;

/// Members in order; a channel is its sender and receiver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Communicator {
    /// Of a message.
    lane: Option<u32>,
    members: Vec<u32>,
}

/// A started transfer of one rank.
pub(super) struct Flight {
    communicator: Communicator,
    number: u64,
    transfer: Transfer,
    operands: Vec<(Region, Vec<u64>, TensorType)>,
    results: Vec<Region>,
}

#[derive(Default)]
pub(super) struct Exchange {
    /// By communicator and number: what the members are doing, and what each handed in.
    slots: BTreeMap<(Communicator, u64), Slot>,
}

struct Slot {
    signature: String,
    /// Of each tensor.
    posts: BTreeMap<u32, Vec<Vec<u64>>>,
}

fn communicator(p: &Program, transfer: &Transfer, rank: &Rank) -> Fault<Communicator> {
    let peer = |stage: u32| {
        let pp = p.mesh.axis("pp").filter(|&a| stage < p.mesh.size(a));
        let pp = pp.ok_or_else(|| SimulateError::fault(format!("there is no stage {stage}")))?;
        let mut at = rank.at.clone();
        at.0[pp.0 as usize] = stage;
        Ok(p.mesh.rank(&at))
    };
    let group = |axes: &[AxisId]| Ok(p.mesh.group(rank.number, axes));
    let members = match transfer {
        Transfer::AllReduce { axes, .. } => group(axes),
        Transfer::ReduceScatter { axis, .. } | Transfer::AllGather { axis, .. } | Transfer::AllToAll { axis, .. } => {
            group(&[*axis])
        }
        Transfer::Send { to, .. } => Ok(vec![rank.number, peer(*to)?]),
        Transfer::Recv { from, .. } => Ok(vec![peer(*from)?, rank.number]),
        Transfer::StageSum { group, .. } => {
            let group = p.groups.get(*group as usize).ok_or_else(|| SimulateError::fault("no such group"))?;
            group.stages.iter().map(|&s| peer(s)).collect()
        }
    }?;
    let lane = match transfer {
        Transfer::Send { lane, .. } | Transfer::Recv { lane, .. } => Some(*lane),
        _ => None,
    };
    if members.contains(&rank.number) {
        Ok(Communicator { lane, members })
    } else {
        Err(SimulateError::fault("this stage is no member of the group"))
    }
}

/// What the wait of a token gives, which is written to from the start on.
fn wait_results(p: &Program, token: TokenId) -> &[BufferId] {
    let wait = p.sections.iter().flat_map(|s| &s.body).find(|i| i.action == Action::Wait(token));
    wait.map_or(&[], |i| &i.results)
}

impl Exchange {
    pub fn start(
        &mut self,
        p: &Program,
        token: TokenId,
        transfer: &Transfer,
        instr: &Instr,
        step: &Step,
        rank: &mut Rank,
    ) -> Fault<()> {
        let communicator = communicator(p, transfer, rank)?;
        let number = rank.started.entry(communicator.clone()).or_default();
        *number += 1;
        let number = *number;
        let operands = instr.operands.iter().map(|&id| Block::read(p, id, step, rank)).collect::<Fault<Vec<Block>>>()?;
        let results = wait_results(p, token);
        let types: Vec<&TensorType> = match operands.is_empty() {
            true => results.iter().map(|&id| p.ty(id)).collect(),
            false => operands.iter().map(|b| &b.ty).collect(),
        };
        if types.is_empty() {
            return Err(SimulateError::fault("a transfer of nothing"));
        }
        let ty = types.iter().map(|ty| ty.text(&p.mesh)).collect::<Vec<_>>().join(" and ");
        let what = match transfer {
            Transfer::Send { .. } | Transfer::Recv { .. } => "a message".to_owned(),
            // Groups are numbered per program; the communicator already says which one it is.
            Transfer::StageSum { reduce, .. } => format!("stage_sum.{}", reduce.name()),
            other => format!("{other:?}"),
        };
        let signature = format!("{what} of {ty}, microbatch {}", step.microbatch);
        let fresh = || Slot { signature: signature.clone(), posts: BTreeMap::new() };
        let slot = self.slots.entry((communicator.clone(), number)).or_insert_with(fresh);
        if slot.signature != signature {
            return Err(SimulateError::fault(format!("starts {signature} where another rank has {}", slot.signature)));
        }
        // A receiver hands in nothing.
        let handed = if operands.is_empty() { vec![Vec::new()] } else { operands.iter().map(|b| b.bits.clone()).collect() };
        slot.posts.insert(rank.number, handed);
        let region = |&id: &BufferId| Region::of(p.buffer(id), &p.mesh, &step.slots);
        let results = results.iter().map(region).collect::<Fault<Vec<Region>>>()?;
        for region in &results {
            rank.memory.poison(region)?;
        }
        let operands = operands.into_iter().map(|b| (b.region, b.bits, b.ty)).collect();
        let flight = Flight { communicator, number, transfer: transfer.clone(), operands, results };
        rank.flights.entry(token).or_default().push(flight);
        Ok(())
    }

    /// `false`: some member has not started yet.
    pub fn wait(&mut self, p: &Program, token: TokenId, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<bool> {
        let flights = rank.flights.entry(token).or_default();
        let flight = flights.first().ok_or_else(|| SimulateError::fault("waits for what was not started"))?;
        let slot = &self.slots[&(flight.communicator.clone(), flight.number)];
        if slot.posts.len() < flight.communicator.members.len() {
            return Ok(false);
        }
        let flight = flights.remove(0);
        self.verify(&flight, rank)?;
        for (n, &result) in instr.results.iter().enumerate() {
            let region = Region::of(p.buffer(result), &p.mesh, &step.slots)?;
            if flight.results.get(n) != Some(&region) {
                return Err(SimulateError::fault("the result moved between start and wait"));
            }
            let posts = flight.communicator.members.iter().map(|m| slot.posts[m].get(n));
            let posts = posts.collect::<Option<Vec<&Vec<u64>>>>().ok_or_else(|| SimulateError::fault("a tensor too few"))?;
            let operand = flight.operands.get(n).map(|(_, _, ty)| ty);
            let bits = value(p, (&flight.transfer, operand), &posts, p.ty(result), rank)?;
            rank.memory.write(&region, &bits)?;
        }
        Ok(true)
    }

    /// Nobody may have touched operand or result since the start.
    fn verify(&self, flight: &Flight, rank: &mut Rank) -> Fault<()> {
        for result in &flight.results {
            if rank.memory.read(result)?.iter().any(|&b| b != POISON) {
                return Err(SimulateError::fault("a result was written to between start and wait"));
            }
        }
        for (region, bits, _) in &flight.operands {
            let in_place = flight.results.iter().any(|result| result.overlaps(region));
            if !in_place && rank.memory.read(region)? != *bits {
                return Err(SimulateError::fault("an operand changed between start and wait"));
            }
        }
        Ok(())
    }
}

/// What the rank gets.
fn value(
    p: &Program,
    (transfer, operand): (&Transfer, Option<&TensorType>),
    posts: &[&Vec<u64>],
    ty: &TensorType,
    rank: &Rank,
) -> Fault<Vec<u64>> {
    let to = ty.local_shape(&p.mesh);
    let Some(operand) = operand else { return Ok(posts[0].clone()) };
    let from = operand.local_shape(&p.mesh);
    let fits = |ok: bool| if ok { Ok(()) } else { Err(SimulateError::fault("operand and result do not fit")) };
    match transfer {
        Transfer::AllReduce { reduce, .. } | Transfer::StageSum { reduce, .. } => {
            fits(from == to)?;
            combined(posts, *reduce, operand)
        }
        Transfer::ReduceScatter { axis, dim } => {
            let (dim, sum) = (*dim as usize, combined(posts, Reduce::Sum, operand)?);
            fits(dim < to.len())?;
            window(&sum, &from, &to, dim, u64::from(rank.at.get(*axis)) * to[dim])
        }
        Transfer::AllGather { dim, .. } => {
            fits((*dim as usize) < to.len())?;
            gathered(posts, &from, &to, *dim as usize)
        }
        Transfer::AllToAll { axis, from: gather, to: scatter } => {
            let (gather, scatter) = (*gather as usize, *scatter as usize);
            fits(gather < to.len() && scatter < to.len())?;
            let mut whole = from.clone();
            whole[gather] = to[gather];
            let bits = gathered(posts, &from, &whole, gather)?;
            window(&bits, &whole, &to, scatter, u64::from(rank.at.get(*axis)) * to[scatter])
        }
        Transfer::Send { .. } | Transfer::Recv { .. } => Ok(posts[0].clone()),
    }
}

/// Elementwise, in the order of the group.
fn combined(posts: &[&Vec<u64>], reduce: Reduce, ty: &TensorType) -> Fault<Vec<u64>> {
    let combine = |i: usize| {
        let parts: Vec<u64> = posts.iter().map(|post| post[i]).collect();
        if parts.contains(&POISON) {
            return Ok(POISON);
        }
        let mut sum = to_value(ty.dtype, parts[0])?;
        for &part in &parts[1..] {
            sum = scalar::combine(reduce, ty.dtype, sum, to_value(ty.dtype, part)?);
        }
        Ok(to_bits(sum))
    };
    (0..posts[0].len()).map(combine).collect()
}

/// Blocks of shape `from` one after the other along `dim`, cut to shape `to`.
fn gathered(posts: &[&Vec<u64>], from: &[u64], to: &[u64], dim: usize) -> Fault<Vec<u64>> {
    let mut out = Vec::new();
    each_index(to, |index| {
        let post = posts.get((index[dim] / from[dim].max(1)) as usize);
        let local = index.iter().enumerate().map(|(d, &i)| if d == dim { i % from[dim].max(1) } else { i });
        out.push(post.map_or(POISON, |bits| bits[flat(local, from)]));
        Ok(())
    })?;
    Ok(out)
}
