//! From an order of passes to what the stages run: sections of their programs, and how many messages are under way at once.
//!
//! A message is waited for before its section runs again as many times as messages may be under way: with one, a stage that is ahead
//! stands until its reader has come as far, and loses what the schedule gained. As many as the simulator finds are enough.

use super::order::{Layout, Order, OrderError, Pass, Section};
use super::simulate::{self, Costs, Event, PartCost};
use dcc_program::program::{Program, SectionKind};
use std::collections::BTreeMap;

/// What a stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Sections and microbatches, in order.
    pub list: Vec<(SectionKind, u32)>,
    /// By sending section, where it is more than one.
    in_flight: BTreeMap<SectionKind, u32>,
}

impl Turns {
    /// Messages of `kind` that may be under way at once.
    pub fn in_flight(&self, kind: SectionKind) -> u32 {
        self.in_flight.get(&kind).copied().unwrap_or(1)
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
        (0u32..).zip(&self.passes).map(|(stage, passes)| self.stage(stage, passes, &events, backward)).collect()
    }

    /// The order in which the programs of all stages run their sections. A pass that a stage has no section for, such as the weight
    /// half of one that trains nothing, stands beside the other half, or at the end, where it keeps nobody waiting.
    /// Errors: programs that are not those of a pipeline.
    pub fn of_programs(programs: &[Program]) -> Result<Order, OrderError> {
        let microbatches = programs.first().map_or(0, |p| p.mesh.size_of("mb"));
        let layout = Layout::plain(programs.len() as u32);
        let order = Order { layout, microbatches, passes: programs.iter().map(passes).collect() };
        order.check().map(|()| order)
    }

    fn stage(&self, stage: u32, passes: &[Pass], events: &[Vec<Event>], backward: Backward) -> Turns {
        let once = |kind| (kind, 0);
        let mut list = vec![once(SectionKind::Begin)];
        list.extend((0..self.microbatches).map(|m| (SectionKind::Count, m)));
        list.push(once(SectionKind::Ready));
        for pass in passes {
            list.extend(kinds(pass.section, backward).iter().map(|&kind| (kind, pass.microbatch)));
        }
        list.push(once(SectionKind::Update));
        let part = self.layout.part(stage, 0);
        let mut in_flight = BTreeMap::new();
        let neighbours = [(Some(part + 1).filter(|&p| p < self.layout.parts()), false), (part.checked_sub(1), true)];
        for (to, back) in neighbours {
            let Some(to) = to else { continue };
            let count = under_way(&events[stage as usize], &events[self.layout.place(to).0 as usize], back);
            let senders = [SectionKind::Backward, SectionKind::BackwardInput];
            let senders = if back { &senders[..] } else { &[SectionKind::Forward][..] };
            in_flight.extend(senders.iter().filter(|_| count > 1).map(|&kind| (kind, count)));
        }
        Turns { list, in_flight }
    }
}

/// The passes of one stage's program.
fn passes(program: &Program) -> Vec<Pass> {
    let has = |kind: SectionKind| program.sections.iter().any(|section| section.kind == kind);
    let mut out = Vec::new();
    for step in &program.order {
        let pass = |section| Pass::new(section, 0, step.microbatch);
        match program.sections[step.section as usize].kind {
            SectionKind::Forward => out.push(pass(Section::Forward)),
            SectionKind::Backward => out.push(pass(Section::Backward)),
            SectionKind::BackwardInput if !has(SectionKind::BackwardWeight) => out.push(pass(Section::Backward)),
            SectionKind::BackwardWeight if !has(SectionKind::BackwardInput) => out.push(pass(Section::Backward)),
            SectionKind::BackwardInput => out.push(pass(Section::BackwardInput)),
            SectionKind::BackwardWeight => out.push(pass(Section::BackwardWeight)),
            SectionKind::Begin | SectionKind::Count | SectionKind::Ready | SectionKind::Update => {}
        }
    }
    if !SectionKind::ALL.into_iter().any(|kind| kind.is_backward() && has(kind)) {
        out.extend((0..program.mesh.size_of("mb")).map(|m| Pass::new(Section::Backward, 0, m)));
    }
    out
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

/// The most of a stage's messages, those of its forwards or backwards, that it has sent when it starts the next such pass and the
/// other stage has not yet come to, that one included.
fn under_way(from: &[Event], to: &[Event], back: bool) -> u32 {
    let sends = |event: &&Event| match event.pass.section {
        Section::Forward => !back,
        Section::Backward | Section::BackwardInput => back,
        Section::BackwardWeight => false,
    };
    let starts: Vec<f64> = to.iter().filter(sends).map(|e| e.start).collect();
    let read = |time: f64| starts.iter().take_while(|&&start| start <= time + 1e-9).count();
    let now = from.iter().filter(sends).enumerate().map(|(sent, event)| (sent + 1).saturating_sub(read(event.start)));
    now.max().unwrap_or(0).max(1) as u32
}
