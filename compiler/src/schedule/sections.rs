//! From an order of passes to what the stages run: sections of their programs, and how many messages are under way at once.
//!
//! A message is waited for before its section runs again as many times as messages may be under way: with one, a stage that is ahead
//! stands until its reader has come as far, and loses what the schedule gained. As many as the simulator finds are enough.

use super::order::{Layout, Order, OrderError, Pass, Path, Section};
use super::simulate::{self, Costs, Event, PartCost};
use dcc_program::program::{Action, Program, SectionId, SectionKind, Transfer};
use std::collections::BTreeMap;

/// What a stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Sections and microbatches, in order.
    pub list: Vec<(SectionId, u32)>,
    /// By sending section and the part of the model that reads, where it is more than one.
    in_flight: BTreeMap<(SectionId, u32), u32>,
}

impl Turns {
    /// Messages that may be under way at once from `section` to part `to` of the model.
    pub fn in_flight(&self, section: SectionId, to: u32) -> u32 {
        self.in_flight.get(&(section, to)).copied().unwrap_or(1)
    }
}

/// Whether the programs have the backward pass in halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    Whole,
    Halves,
}

impl Order {
    /// By stage. Before: an order that runs.
    pub fn turns(&self, backward: Backward) -> Vec<Turns> {
        let part = PartCost { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, ..PartCost::default() };
        let events = simulate::events(self, &Costs::even(self.layout.parts(), part, 0.0)).expect("an order that runs");
        let stage = |(stage, passes): (u32, &Vec<Pass>)| Turns {
            list: self.list(passes, backward),
            in_flight: self.in_flight(stage, &events),
        };
        (0u32..).zip(&self.passes).map(stage).collect()
    }

    fn list(&self, passes: &[Pass], backward: Backward) -> Vec<(SectionId, u32)> {
        let mut list = vec![(SectionKind::Begin.into(), 0)];
        list.extend((0..self.microbatches).map(|m| (SectionKind::Count.into(), m)));
        list.push((SectionKind::Ready.into(), 0));
        for &Pass { section, chunk, microbatch } in passes {
            list.extend(kinds(section, backward).iter().map(|&kind| (SectionId { kind, chunk }, microbatch)));
        }
        list.push((SectionKind::Update.into(), 0));
        list
    }

    fn in_flight(&self, stage: u32, events: &[Vec<Event>]) -> BTreeMap<(SectionId, u32), u32> {
        let mut found = BTreeMap::new();
        for chunk in 0..self.layout.chunks {
            let part = self.layout.part(stage, chunk);
            for to in (0..self.layout.parts()).filter(|&to| to != part) {
                let (other, its_chunk) = self.layout.place(to);
                let back = to < part;
                let count =
                    under_way(&starts(&events[stage as usize], chunk, back), &starts(&events[other as usize], its_chunk, back));
                let kinds = if back { BACK } else { &[SectionKind::Forward][..] };
                let sections = kinds.iter().map(|&kind| ((SectionId { kind, chunk }, to), count));
                found.extend(sections.filter(|_| count > 1));
            }
        }
        found
    }

    /// The order in which the programs of all stages run their sections. A pass that a stage has no section for, such as the weight
    /// half of one that trains nothing, stands beside the other half, or at the end, where it keeps nobody waiting.
    /// Errors: programs that are not those of a pipeline.
    pub fn of_programs(programs: &[Program]) -> Result<Order, OrderError> {
        let microbatches = programs.first().map_or(0, |p| p.mesh.size_of("mb"));
        let sections = programs.iter().flat_map(|p| &p.sections);
        let chunks = sections.map(|section| section.chunk + 1).max().unwrap_or(1);
        let path = if chunks == 2 && programs.last().is_some_and(turns_back) { Path::V } else { Path::Loop };
        let layout = Layout { stages: programs.len() as u32, chunks, path };
        let passes = programs.iter().map(|program| (0..chunks).fold(passes(program), |all, c| complete(program, c, all)));
        let order = Order { layout, microbatches, passes: passes.collect() };
        order.check().map(|()| order)
    }
}

const BACK: &[SectionKind] = &[SectionKind::Backward, SectionKind::BackwardInput];

/// Whether the last stage sends nothing of its first chunk on: it has the second itself.
fn turns_back(last: &Program) -> bool {
    let first = last.sections.iter().filter(|section| section.id() == SectionKind::Forward.into());
    let sends = |action: &Action| matches!(action, Action::Start { transfer: Transfer::Send { .. }, .. });
    !first.flat_map(|section| &section.body).any(|instr| sends(&instr.action))
}

/// The passes of one stage's program.
fn passes(program: &Program) -> Vec<Pass> {
    let has = |kind, chunk| program.sections.iter().any(|section| section.id() == SectionId { kind, chunk });
    let mut out = Vec::new();
    for step in &program.order {
        let SectionId { kind, chunk } = program.sections[step.section as usize].id();
        let section = match kind {
            SectionKind::Forward => Section::Forward,
            SectionKind::Backward => Section::Backward,
            SectionKind::BackwardInput if !has(SectionKind::BackwardWeight, chunk) => Section::Backward,
            SectionKind::BackwardWeight if !has(SectionKind::BackwardInput, chunk) => Section::Backward,
            SectionKind::BackwardInput => Section::BackwardInput,
            SectionKind::BackwardWeight => Section::BackwardWeight,
            SectionKind::Begin | SectionKind::Count | SectionKind::Ready | SectionKind::Update => continue,
        };
        out.push(Pass::new(section, chunk, step.microbatch));
    }
    out
}

/// With what a chunk has no sections for.
fn complete(program: &Program, chunk: u32, mut passes: Vec<Pass>) -> Vec<Pass> {
    let backward = program.sections.iter().any(|section| section.kind.is_backward() && section.chunk == chunk);
    if !backward {
        passes.extend((0..program.mesh.size_of("mb")).map(|m| Pass::new(Section::Backward, chunk, m)));
    }
    passes
}

fn kinds(section: Section, backward: Backward) -> &'static [SectionKind] {
    match (section, backward) {
        (Section::Forward, _) => &[SectionKind::Forward],
        (Section::Backward, Backward::Whole) => &[SectionKind::Backward],
        (Section::Backward, Backward::Halves) => &[SectionKind::BackwardInput, SectionKind::BackwardWeight],
        (Section::BackwardInput, _) => &[SectionKind::BackwardInput],
        (Section::BackwardWeight, _) => &[SectionKind::BackwardWeight],
    }
}

/// When a chunk starts its forwards, or what of its backwards others wait for.
fn starts(events: &[Event], chunk: u32, back: bool) -> Vec<f64> {
    let sends = |event: &&Event| match event.pass.section {
        _ if event.pass.chunk != chunk => false,
        Section::Forward => !back,
        Section::Backward | Section::BackwardInput => back,
        Section::BackwardWeight => false,
    };
    events.iter().filter(sends).map(|event| event.start).collect()
}

/// The most messages that a chunk has under way when it starts the next pass, that pass's included: the reader has come to the others.
fn under_way(from: &[f64], to: &[f64]) -> u32 {
    let read = |time: f64| to.partition_point(|&start| start <= time + 1e-9);
    let now = from.iter().enumerate().map(|(sent, &start)| (sent + 1).saturating_sub(read(start)));
    now.max().unwrap_or(1).max(1) as u32
}
