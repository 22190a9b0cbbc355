//! What programs cost one rank in one step, counted from the programs alone: memory, products, communication, launches.

mod layers;
mod units;

pub use units::{count, size};

use crate::cost::kept::Kept;
use crate::cost::sections;
use crate::import::is_computed;
use dcc_program::program::{Action, BufferId, Param, ParamKind, Place, Program, SectionId, SectionKind, Transfer};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// One stage; all its ranks do the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StageReport {
    pub stage: u32,
    /// The layers whose parameters it has, such as `wte, h.0–5`.
    pub layers: String,
    /// Elements of weights on a rank.
    pub parameters: u64,
    pub memory: Memory,
    /// Multiplications and additions of matrix products and attention, per rank and step.
    pub flops: u64,
    /// The same of one microbatch.
    pub forward_flops: u64,
    pub backward_flops: u64,
    /// In the program.
    pub instructions: u64,
    /// Launches per step of kernels that are compiled for this program.
    pub jit: u64,
    /// Launches per step of library kernels.
    pub library: u64,
    pub traffic: Vec<Traffic>,
}

/// Bytes of one rank; all but `peak` add up to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    pub weights: u64,
    pub optimizer: u64,
    /// What else lives for the whole step: gradient accumulators, casts, constants.
    pub accumulators: u64,
    /// Values that cross sections, all slots.
    pub activations: u64,
    pub scratch: u64,
    pub peak: u64,
}

/// Transfers of one kind over the same axes, per rank and step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Traffic {
    pub axes: String,
    pub kind: &'static str,
    pub count: u64,
    /// Of all of them: the larger of operand and result.
    pub bytes: u64,
}

/// The stages of one mode.
pub fn stages(programs: &[Program]) -> Vec<StageReport> {
    let layers = layers::texts(&programs.iter().map(weights).collect::<Vec<_>>());
    programs.iter().zip(layers).map(|(program, layers)| stage(program, layers)).collect()
}

/// Names of weights, neither of tables of integers nor of computed constants, in the order in which the stage first reads them.
fn weights(program: &Program) -> Vec<&str> {
    let order = program.order.iter().flat_map(|step| &program.sections[step.section as usize].body);
    let mut first: BTreeMap<BufferId, usize> = BTreeMap::new();
    for (at, operand) in order.flat_map(|instr| &instr.operands).enumerate() {
        first.entry(*operand).or_insert(at);
    }
    let is_layers = |param: &Param| param.trained || !is_computed(&param.name);
    let is_float = |param: &Param| program.ty(param.buffer).dtype.is_float();
    let is_weight = |param: &&Param| param.kind == ParamKind::Weight && is_float(param) && is_layers(param);
    let mut weights: Vec<_> = program.params.iter().filter(is_weight).collect();
    weights.sort_by_key(|param| first.get(&param.buffer).copied().unwrap_or(usize::MAX));
    weights.into_iter().map(|param| &param.name[..]).collect()
}

fn stage(program: &Program, layers: String) -> StageReport {
    let mut report = StageReport { stage: program.stage, layers, memory: memory(program), ..StageReport::default() };
    let weights = program.params.iter().filter(|p| p.kind == ParamKind::Weight);
    report.parameters = weights.map(|p| program.ty(p.buffer).local_shape(&program.mesh).iter().product::<u64>()).sum();
    let mut traffic: BTreeMap<(String, &'static str), (u64, u64)> = BTreeMap::new();
    // Variants of a section compute the same; halves of the backward pass and chunks add up.
    let mut passes: BTreeMap<SectionId, u64> = BTreeMap::new();
    for (index, section) in program.sections.iter().enumerate() {
        let runs = program.order.iter().filter(|step| step.section as usize == index).count() as u64;
        report.instructions += section.body.len() as u64;
        let flops: u64 = section.body.iter().map(|instr| sections::flops(program, instr)).sum();
        report.flops += runs * flops;
        passes.insert(section.id(), flops);
        for instr in &section.body {
            match &instr.action {
                Action::Kernel(_) => report.jit += runs,
                Action::Library(_) => report.library += runs,
                Action::Wait(_) => {}
                Action::Start { token, transfer } => {
                    let (count, bytes) = traffic.entry(kind(program, transfer)).or_default();
                    // What a receive writes stands at its wait.
                    let wait = section.body.iter().find(|other| other.action == Action::Wait(*token));
                    let received = wait.map_or(&[][..], |wait| &wait.results);
                    let bytes_of = |id: Option<&BufferId>| id.map_or(0, |&b| program.ty(b).local_bytes(&program.mesh));
                    let tensors = 0..instr.operands.len().max(received.len());
                    *count += runs;
                    *bytes +=
                        tensors.map(|n| runs * bytes_of(instr.operands.get(n)).max(bytes_of(received.get(n)))).sum::<u64>();
                }
            }
        }
    }
    let of = |is: fn(SectionKind) -> bool| passes.iter().filter(|(id, _)| is(id.kind)).map(|(_, flops)| flops).sum();
    report.forward_flops = of(|kind| kind == SectionKind::Forward);
    report.backward_flops = of(SectionKind::is_backward);
    report.traffic = traffic.into_iter().map(|((axes, kind), (count, bytes))| Traffic { axes, kind, count, bytes }).collect();
    report
}

fn kind(program: &Program, transfer: &Transfer) -> (String, &'static str) {
    let name = |axis: &dcc_program::AxisId| program.mesh.name(*axis).to_owned();
    match transfer {
        Transfer::AllReduce { axes, .. } => (axes.iter().map(name).collect::<Vec<_>>().join("+"), "all_reduce"),
        Transfer::ReduceScatter { axis, .. } => (name(axis), "reduce_scatter"),
        Transfer::AllGather { axis, .. } => (name(axis), "all_gather"),
        Transfer::AllToAll { axis, .. } => (name(axis), "all_to_all"),
        Transfer::Send { .. } => ("pp".to_owned(), "send"),
        Transfer::Recv { .. } => ("pp".to_owned(), "recv"),
        Transfer::StageSum { .. } => ("pp".to_owned(), "stage_sum"),
    }
}

/// Of a rank.
pub fn memory(program: &Program) -> Memory {
    let bytes = |is: &dyn Fn(&ParamKind) -> bool| {
        let params = program.params.iter().filter(|p| is(&p.kind) && program.buffer(p.buffer).place == Place::Persistent);
        params.map(|p| program.ty(p.buffer).local_bytes(&program.mesh)).sum::<u64>()
    };
    let weights = bytes(&|kind| *kind == ParamKind::Weight) + copies(program);
    let optimizer = bytes(&|kind| *kind != ParamKind::Weight);
    let accumulators = program.persistent_bytes.saturating_sub(weights + optimizer);
    let areas: u64 = program.areas.iter().map(|area| area.bytes * u64::from(area.slots)).sum();
    let kept = Kept::of(program).scratch;
    let (activations, scratch) = (areas + kept, program.scratch_bytes - kept);
    let peak = weights + optimizer + accumulators + activations + scratch;
    Memory { weights, optimizer, accumulators, activations, scratch, peak }
}

/// Bytes of the half floats that products read instead of weights, made once a step.
fn copies(program: &Program) -> u64 {
    let begin = program.sections.iter().filter(|section| section.kind == SectionKind::Begin);
    let made: BTreeSet<BufferId> = begin.flat_map(|section| &section.body).flat_map(|instr| instr.results.to_vec()).collect();
    let kept = made.into_iter().map(|id| program.buffer(id)).filter(|buffer| {
        let half = buffer.ty.dtype.is_float() && buffer.ty.dtype.bytes() == 2;
        half && buffer.place == Place::Persistent && buffer.ty.sharding.pending.is_empty()
    });
    kept.map(|buffer| (buffer.offset, buffer.ty.local_bytes(&program.mesh))).collect::<BTreeMap<_, _>>().into_values().sum()
}
