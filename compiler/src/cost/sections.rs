//! Seconds and bytes of the sections of programs, estimated from their instructions: what orders are searched for and drawn with.

use super::Machine;
use super::kept::Kept;
use crate::schedule::{Costs, Layout, PartCost};
use dcc_program::program::{Action, Attention, Instr, Library, Program, Section, SectionId, SectionKind, TokenId, Transfer};
use dcc_program::{AxisId, FactorId, FactorSpec, Mesh, TensorType};
use std::collections::BTreeMap;

/// Of one microbatch on each part of the model. Transfers are those of the forward pass; a gradient is as large as its value.
pub fn costs(programs: &[Program], layout: Layout, machine: &Machine) -> Costs {
    let place = |index: u32| {
        let (stage, chunk) = layout.place(index);
        (stage, SectionId { kind: SectionKind::Forward, chunk })
    };
    let parts = (0..layout.parts()).map(place).map(|(stage, section)| part(&programs[stage as usize], section.chunk, machine));
    let send = |index: u32| {
        let ((stage, section), (next, _)) = (place(index), place(index + 1));
        if stage == next { 0.0 } else { machine.send(sent(&programs[stage as usize], section)) }
    };
    Costs { parts: parts.collect(), transfers: (0..layout.parts().saturating_sub(1)).map(send).collect() }
}

fn part(program: &Program, chunk: u32, machine: &Machine) -> PartCost {
    // The last variant of a section, which has all that the first has.
    let of = |kind: SectionKind| program.sections.iter().rfind(|section| section.id() == SectionId { kind, chunk });
    let time = |kind| of(kind).map_or(0.0, |section| seconds(program, section, machine));
    let all = Kept::of(program);
    let kept = |from, to| all.between(SectionId { kind: from, chunk }, SectionId { kind: to, chunk });
    use SectionKind::{Backward, BackwardInput, BackwardWeight, Forward};
    let weight_bytes = kept(Forward, BackwardWeight) + kept(BackwardInput, BackwardWeight);
    PartCost {
        forward: time(Forward),
        backward_input: time(Backward) + time(BackwardInput),
        backward_weight: time(BackwardWeight),
        activation_bytes: kept(Forward, Backward) + kept(Forward, BackwardInput) + weight_bytes,
        weight_bytes,
    }
}

/// Of what runs once a step, on one rank: the sections before and after the passes.
pub fn once(program: &Program, machine: &Machine) -> f64 {
    let sections = program.sections.iter().filter(|section| !section.kind.is_per_microbatch());
    sections.map(|section| seconds(program, section, machine)).sum()
}

/// Bytes that a forward section sends.
fn sent(program: &Program, forward: SectionId) -> u64 {
    let forward = program.sections.iter().find(|section| section.id() == forward);
    let is_send = |instr: &&Instr| matches!(instr.action, Action::Start { transfer: Transfer::Send { .. }, .. });
    forward.into_iter().flat_map(|section| &section.body).filter(is_send).map(|instr| touched(program, instr)).sum()
}

/// Seconds of one execution on one rank, without waiting for other stages. Transfers run one after the other, beside what is computed.
fn seconds(program: &Program, section: &Section, machine: &Machine) -> f64 {
    let (mut now, mut link) = (0.0_f64, 0.0_f64);
    let mut arrives: BTreeMap<TokenId, f64> = BTreeMap::new();
    for instr in &section.body {
        match instr.action {
            Action::Start { token, .. } => {
                link = link.max(now) + launch(program, instr, machine);
                arrives.insert(token, link);
            }
            Action::Wait(token) => now = now.max(arrives.get(&token).copied().unwrap_or(0.0)),
            _ => now += launch(program, instr, machine),
        }
    }
    now
}

fn launch(program: &Program, instr: &Instr, machine: &Machine) -> f64 {
    let bytes = touched(program, instr) as f64;
    match &instr.action {
        Action::Library(library) if is_view(library) => 0.0,
        Action::Kernel(_) | Action::Library(_) => (flops(program, instr) as f64 / machine.flops).max(bytes / machine.memory),
        Action::Start { transfer, .. } => collective(program, instr, transfer, machine),
        Action::Wait(_) => 0.0,
    }
}

fn is_view(library: &Library) -> bool {
    matches!(library, Library::Reshape { .. } | Library::ResolveMicrobatches | Library::DropMicrobatch { .. })
}

/// A ring over the axes: as `Machine::collective` has it, of the operand's bytes, or of what a gather makes of them.
fn collective(program: &Program, instr: &Instr, transfer: &Transfer, machine: &Machine) -> f64 {
    let (axes, rounds): (Vec<AxisId>, f64) = match transfer {
        Transfer::AllReduce { axes, .. } => (axes.to_vec(), 2.0),
        Transfer::ReduceScatter { axis, .. } | Transfer::AllGather { axis, .. } | Transfer::AllToAll { axis, .. } => {
            (vec![*axis], 1.0)
        }
        Transfer::Send { .. } | Transfer::Recv { .. } | Transfer::StageSum { .. } => return 0.0,
    };
    let ranks: f64 = axes.iter().map(|&axis| f64::from(program.mesh.size(axis))).product();
    let gathers = if matches!(transfer, Transfer::AllGather { .. }) { ranks } else { 1.0 };
    let bytes = touched(program, instr) as f64 * gathers;
    rounds * ((ranks - 1.0) / ranks * bytes / machine.link + (ranks - 1.0) * machine.latency)
}

/// Bytes on one rank of operands and results.
fn touched(program: &Program, instr: &Instr) -> u64 {
    instr.operands.iter().chain(&instr.results).map(|&b| program.ty(b).local_bytes(&program.mesh)).sum()
}

/// Multiplications and additions of one launch on the rank that has most; 0 for all but products.
pub fn flops(program: &Program, instr: &Instr) -> u64 {
    let ty = |index: usize| program.ty(instr.operands[index]);
    let mesh = &program.mesh;
    match &instr.action {
        Action::Library(Library::Dot { spec, .. }) => {
            2 * volume(spec, &[ty(0), ty(1)], program.ty(instr.results[0]), mesh, &[])
        }
        Action::Library(Library::Convolution { spec, windows, .. }) => {
            let images: Vec<&str> = windows.iter().map(|w| &w.image[..]).collect();
            2 * volume(spec, &[ty(0), ty(1)], program.ty(instr.results[0]), mesh, &images)
        }
        Action::Library(Library::Attention(attention)) => {
            let operands: Vec<&TensorType> = (0..attention.spec.operands.len()).map(ty).collect();
            let result = program.ty(instr.results[0]);
            let scores = volume(&attention.spec, &operands, result, mesh, &["f"]);
            let values = volume(&attention.spec, &operands, result, mesh, &["e"]);
            2 * seen(attention, ty(0), mesh, scores + values)
        }
        Action::Library(Library::AttentionGrad(attention)) => {
            let mut operands: Vec<&TensorType> = (1..4).map(ty).collect();
            operands.extend((6..instr.operands.len()).map(ty));
            // Scores again, dQ and dK; dP and dV.
            let scores = volume(&attention.spec, &operands, ty(0), mesh, &["f"]);
            let values = volume(&attention.spec, &operands, ty(0), mesh, &["e"]);
            2 * seen(attention, ty(1), mesh, 3 * scores + 2 * values)
        }
        _ => 0,
    }
}

/// Of the pairs of queries and keys, those that a causal mask leaves to the last of the ranks that share the queries: of n ranks it
/// computes 1 - 1/2n of what it has.
fn seen(attention: &Attention, query: &TensorType, mesh: &Mesh, pairs: u64) -> u64 {
    if !attention.causal {
        return pairs;
    }
    let spec = &attention.spec;
    let of_queries = |f: &FactorId| spec.names[usize::from(f.0)] == "t";
    let dim = spec.operands[0].iter().position(|dim| dim.iter().any(of_queries));
    let ranks: u64 = dim.iter().flat_map(|&dim| &query.sharding.dims[dim]).map(|&axis| u64::from(mesh.size(axis))).product();
    pairs * (2 * ranks - 1) / (2 * ranks)
}

/// More multiplications than any machine does.
const MOST: u64 = 1 << 56;

/// The product of the sizes on one rank of all factors but `without`.
pub(crate) fn volume(spec: &FactorSpec, operands: &[&TensorType], result: &TensorType, mesh: &Mesh, without: &[&str]) -> u64 {
    let local = |ty: &TensorType| TensorType::new(ty.dtype, ty.local_shape(mesh));
    let operands: Vec<TensorType> = operands.iter().map(|ty| local(ty)).collect();
    let Ok(sizes) = spec.sizes(&operands.iter().collect::<Vec<_>>(), &local(result)) else { return 0 };
    let counted = spec.names.iter().zip(sizes).filter(|(name, _)| !without.contains(&&name[..]));
    // So that a few of them add up.
    counted.fold(1_u64, |product, (_, size)| product.saturating_mul(size)).min(MOST)
}
