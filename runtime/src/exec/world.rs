//! The ranks of a run and their communicators, from the programs of all stages.
//!
//! Every rank computes the same list of groups in the same order, those included that it is no member of.

use super::blocks::Blocks;
use crate::comm::{self, Exchange, Group, GroupId, Rows, Side};
use crate::error::{Error, Result};
use dcc_kernels::cuda::transfer::Reduction;
use dcc_program::program::{self, Action, Program, Transfer};
use dcc_program::{AxisId, Mesh, Reduce, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// What all ranks of a run agree on.
#[derive(Clone, Debug)]
pub struct World {
    groups: BTreeMap<Vec<u32>, GroupId>,
    reductions: Vec<Reduction>,
    channels: Vec<u32>,
    layout: comm::Layout,
    /// By stage.
    persistent_bytes: Vec<u64>,
    stages: Vec<u32>,
}

impl World {
    /// `sets`: the program sets that the run executes (training, evaluation), each with one program per stage.
    pub fn new(sets: &[&[Program]]) -> Result<World> {
        let first = sets.first().and_then(|set| set.first()).ok_or_else(|| Error::artifact("an artifact without programs"))?;
        let count = sets[0].len();
        let mut members = BTreeSet::new();
        for set in sets {
            if set.len() != count || set.iter().any(|p| space(&p.mesh) != space(&first.mesh)) {
                return Err(Error::artifact("programs of different meshes in one artifact"));
            }
            set.iter().try_for_each(|program| collect_groups(program, &mut members))?;
        }
        let persistent = |stage: usize| sets.iter().map(|set| set[stage].persistent_bytes).max().unwrap_or(0);
        let persistent_bytes: Vec<u64> = (0..count).map(persistent).collect();
        let planned = |stage: usize| -> Result<usize> {
            let mut sizes = sets.iter().map(|set| Ok(Blocks::new(&set[stage], persistent_bytes[stage])?.bytes()));
            sizes.try_fold(0, |most, bytes: Result<usize>| Ok(most.max(bytes?)))
        };
        let bytes: Vec<usize> = (0..count).map(planned).collect::<Result<_>>()?;
        let stages: Vec<u32> = (0..first.mesh.world()).map(|rank| stage_of(&first.mesh, rank)).collect();
        if stages.iter().any(|&stage| stage as usize >= count) {
            return Err(Error::artifact(format!("{count} programs for the stages of {} ranks", stages.len())));
        }
        let groups: BTreeMap<Vec<u32>, GroupId> = members.into_iter().zip((0..).map(GroupId)).collect();
        let ordered = groups.keys().cloned().map(Group).collect();
        let lanes = sets.iter().flat_map(|set| set.iter()).map(lanes).max().unwrap_or(1);
        let layout = comm::Layout::with_lanes(ordered, stages.iter().map(|&stage| bytes[stage as usize]).collect(), lanes);
        let mut messages = BTreeSet::new();
        for program in sets.iter().flat_map(|set| set.iter()) {
            collect_messages(program, &mut messages)?;
        }
        let pairs = messages.into_iter().filter_map(|(from, to, lane)| layout.pair(from, to, lane));
        let channels = BTreeSet::from_iter((0..groups.len() as u32).chain(pairs)).into_iter().collect();
        let reductions = sets.iter().flat_map(|set| set.iter()).map(reductions).collect::<Result<Vec<_>>>()?;
        let reductions = BTreeSet::from_iter(reductions.into_iter().flatten()).into_iter().collect();
        Ok(World { groups, reductions, channels, layout, persistent_bytes, stages })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.stages.len() as u32
    }

    /// Pipeline stage of a rank: the index of its programs.
    pub fn stage(&self, rank: u32) -> u32 {
        self.stages[rank as usize]
    }

    /// Groups and arena sizes for `comm::local` and `comm::shm`.
    pub fn layout(&self) -> &comm::Layout {
        &self.layout
    }

    /// The channels of its transfers, in ascending order.
    pub fn channels(&self) -> &[u32] {
        &self.channels
    }

    /// What its transfers reduce.
    pub fn reductions(&self) -> &[Reduction] {
        &self.reductions
    }

    /// Bytes of `rank`'s arena: its planned peak.
    pub fn planned_bytes(&self, rank: u32) -> usize {
        self.layout.arena_bytes[rank as usize]
    }

    pub(super) fn blocks(&self, program: &Program) -> Result<Blocks> {
        Blocks::new(program, self.persistent_bytes[program.stage as usize])
    }

    /// The transfer of a rank in the terms of `comm`; `from` and `to` are operand and result, where it has them.
    pub(super) fn transfer(
        &self,
        program: &Program,
        rank: u32,
        transfer: &Transfer,
        from: Option<&TensorType>,
        to: Option<&TensorType>,
    ) -> Result<comm::Transfer> {
        let mesh = &program.mesh;
        let missing = || Error::artifact("a transfer lacks its operand or result");
        let members = members(program, rank, transfer)?;
        let group = || self.groups.get(&members).copied().ok_or_else(|| Error::artifact("a group that the run has not"));
        let reducing = |reduce: Reduce| {
            let dtype = from.ok_or_else(missing)?.dtype;
            Ok(comm::Transfer::AllReduce { group: group()?, reduce, dtype })
        };
        let rows = |ty: Option<&TensorType>, dim: u8| {
            let ty = ty.ok_or_else(missing)?;
            let shape = ty.local_shape(mesh);
            let dim = usize::from(dim);
            let size = *shape.get(dim).ok_or_else(|| Error::artifact(format!("{} has no dim {dim}", ty.text(mesh))))?;
            let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
            let inner = product(&shape[dim + 1..]) * ty.dtype.bytes() as usize;
            Ok::<Rows, Error>(Rows { outer: product(&shape[..dim]), dim: size as usize, inner })
        };
        Ok(match *transfer {
            Transfer::AllReduce { reduce, .. } | Transfer::StageSum { reduce, .. } => reducing(reduce)?,
            Transfer::AllGather { dim, .. } => comm::Transfer::AllGather { group: group()?, rows: rows(to, dim)? },
            Transfer::ReduceScatter { dim, .. } => {
                let dtype = from.ok_or_else(missing)?.dtype;
                comm::Transfer::ReduceScatter { group: group()?, reduce: Reduce::Sum, dtype, rows: rows(from, dim)? }
            }
            Transfer::AllToAll { from: gather, to: scatter, .. } => {
                let (from, to) = (from.ok_or_else(missing)?, to.ok_or_else(missing)?);
                comm::Transfer::AllToAll { group: group()?, exchange: exchange(mesh, from, to, gather.into(), scatter.into())? }
            }
            Transfer::Send { lane, .. } => comm::Transfer::Send { to: members[1], lane },
            Transfer::Recv { lane, .. } => comm::Transfer::Recv { from: members[0], lane },
        })
    }
}

/// Axes in space, which two programs of one run share.
fn space(mesh: &Mesh) -> Vec<(&str, u32)> {
    mesh.space().map(|axis| (mesh.name(axis), mesh.size(axis))).collect()
}

fn stage_of(mesh: &Mesh, rank: u32) -> u32 {
    mesh.axis("pp").map_or(0, |axis| mesh.coordinates(rank).get(axis))
}

/// Ranks of a transfer in order; of a message its sender and receiver.
fn members(program: &Program, rank: u32, transfer: &Transfer) -> Result<Vec<u32>> {
    let mesh = &program.mesh;
    let known = |axis: &AxisId| usize::from(axis.0) < mesh.axes.len() && !mesh.is_microbatch(*axis);
    let group = |axes: &[AxisId]| match axes.iter().all(known) {
        true => Ok(mesh.group(rank, axes)),
        false => Err(Error::artifact("a transfer over an axis that the mesh has not")),
    };
    let peer = |stage: u32| {
        let pp = mesh.axis("pp").filter(|&axis| stage < mesh.size(axis));
        let pp = pp.ok_or_else(|| Error::artifact(format!("a transfer with stage {stage}, which does not exist")))?;
        let mut at = mesh.coordinates(rank);
        at.0[pp.0 as usize] = stage;
        Ok::<u32, Error>(mesh.rank(&at))
    };
    match transfer {
        Transfer::AllReduce { axes, .. } => group(axes),
        Transfer::ReduceScatter { axis, .. } | Transfer::AllGather { axis, .. } | Transfer::AllToAll { axis, .. } => {
            group(&[*axis])
        }
        Transfer::Send { to, .. } => Ok(vec![rank, peer(*to)?]),
        Transfer::Recv { from, .. } => Ok(vec![peer(*from)?, rank]),
        Transfer::StageSum { group, .. } => {
            let group = program.groups.get(*group as usize).ok_or_else(|| Error::artifact("a group that is not declared"))?;
            group.stages.iter().map(|&stage| peer(stage)).collect()
        }
    }
}

/// Lanes of its messages.
fn lanes(program: &Program) -> u32 {
    let lane = |instr: &program::Instr| match instr.action {
        Action::Start { transfer: Transfer::Send { lane, .. } | Transfer::Recv { lane, .. }, .. } => lane,
        _ => 0,
    };
    program.sections.iter().flat_map(|section| &section.body).map(lane).max().unwrap_or(0) + 1
}

/// Sender, receiver and lane of its messages.
fn collect_messages(program: &Program, into: &mut BTreeSet<(u32, u32, u32)>) -> Result<()> {
    for rank in (0..program.mesh.world()).filter(|&rank| stage_of(&program.mesh, rank) == program.stage) {
        for instr in program.sections.iter().flat_map(|section| &section.body) {
            if let Action::Start { transfer: transfer @ (Transfer::Send { lane, .. } | Transfer::Recv { lane, .. }), .. } =
                &instr.action
            {
                let members = members(program, rank, transfer)?;
                into.insert((members[0], members[1], *lane));
            }
        }
    }
    Ok(())
}

/// Of its transfers.
fn reductions(program: &Program) -> Result<Vec<Reduction>> {
    let rank = (0..program.mesh.world()).find(|&rank| stage_of(&program.mesh, rank) == program.stage).unwrap_or(0);
    let mut found = Vec::new();
    for instr in program.sections.iter().flat_map(|section| &section.body) {
        let Action::Start { transfer, .. } = &instr.action else { continue };
        let reduce = match transfer {
            Transfer::AllReduce { reduce, .. } | Transfer::StageSum { reduce, .. } => *reduce,
            Transfer::ReduceScatter { .. } => Reduce::Sum,
            _ => continue,
        };
        let members = members(program, rank, transfer)?.len();
        let dtypes = instr.operands.iter().map(|&id| program.ty(id).dtype);
        found.extend(dtypes.map(|dtype| Reduction { reduce, dtype, members }));
    }
    Ok(found)
}

fn collect_groups(program: &Program, into: &mut BTreeSet<Vec<u32>>) -> Result<()> {
    let mut transfers: Vec<&Transfer> = Vec::new();
    for instr in program.sections.iter().flat_map(|section| &section.body) {
        if let Action::Start { transfer, .. } = &instr.action
            && !matches!(transfer, Transfer::Send { .. } | Transfer::Recv { .. })
            && !transfers.contains(&transfer)
        {
            transfers.push(transfer);
        }
    }
    for rank in (0..program.mesh.world()).filter(|&rank| stage_of(&program.mesh, rank) == program.stage) {
        for transfer in &transfers {
            into.insert(members(program, rank, transfer)?);
        }
    }
    Ok(())
}

fn exchange(mesh: &Mesh, from: &TensorType, to: &TensorType, gather: usize, scatter: usize) -> Result<Exchange> {
    let (before, after) = (from.local_shape(mesh), to.local_shape(mesh));
    if gather >= before.len() || scatter >= before.len() || gather == scatter || before.len() != after.len() {
        return Err(Error::artifact(format!("all_to_all from {} to {}", from.text(mesh), to.text(mesh))));
    }
    let (first, second) = (gather.min(scatter), gather.max(scatter));
    // Whole along `gather` after, along `scatter` before.
    let size = |dim: usize| if dim == gather { after[dim] } else { before[dim] } as usize;
    let product = |dims: std::ops::Range<usize>| before[dims].iter().product::<u64>() as usize;
    Ok(Exchange {
        outer: product(0..first),
        first: size(first),
        middle: product(first + 1..second),
        second: size(second),
        inner: product(second + 1..before.len()) * from.dtype.bytes() as usize,
        split: if scatter == first { Side::First } else { Side::Second },
    })
}
