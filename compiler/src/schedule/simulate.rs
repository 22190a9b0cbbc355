//! What an order costs: the start and end of every pass, and the memory of each stage, given what each part takes.
//!
//! Sends are asynchronous. A forward waits for that of the part before it, a backward for that of the part after it, plus the
//! transfer; a stage runs its passes in their order, each as soon as it can. The step takes as long as the stage that is at it the
//! longest, from its first start to its last end (arXiv 2401.10241, section 5).

use super::order::{Layout, Order, OrderError, Pass, Section, Wait};

/// What one part of the model takes for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartCost {
    /// Seconds, or any unit. A whole backward takes as long as its halves.
    pub forward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
    /// Held from the start of the forward to the end of the input half: M_B of the paper.
    pub activation_bytes: u64,
    /// What of it stays until the end of the weight half: M_W.
    pub weight_bytes: u64,
}

/// What all parts take, in the order of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    pub parts: Vec<PartCost>,
    /// Between each part and the next, either way.
    pub transfers: Vec<f64>,
}

/// A pass and when it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    pub pass: Pass,
    pub start: f64,
    pub end: f64,
}

/// What `simulate` finds.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// In their order, by stage.
    pub events: Vec<Vec<Event>>,
    /// The longest time between the first start and the last end of a stage.
    pub cost: f64,
    /// The part of the cost in which the slowest stage would not have to be busy.
    pub bubble: f64,
    /// The most bytes of activations that each stage holds.
    pub peak_bytes: Vec<u64>,
}

impl PartCost {
    /// A part whose backward is not split; it holds nothing.
    pub fn whole(forward: f64, backward: f64) -> PartCost {
        PartCost { forward, backward_input: backward, ..PartCost::default() }
    }

    /// `section` alone.
    pub fn of(&self, section: Section) -> f64 {
        match section {
            Section::Forward => self.forward,
            Section::Backward => self.backward_input + self.backward_weight,
            Section::BackwardInput => self.backward_input,
            Section::BackwardWeight => self.backward_weight,
        }
    }

    /// The bytes more, or fewer, that are held after `section`.
    pub fn bytes_of(&self, section: Section) -> i64 {
        let (all, weight) = (self.activation_bytes as i64, self.weight_bytes.min(self.activation_bytes) as i64);
        match section {
            Section::Forward => all,
            Section::Backward => -all,
            Section::BackwardInput => weight - all,
            Section::BackwardWeight => -weight,
        }
    }

    pub fn total(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

impl Costs {
    /// `parts` alike, with the same transfer between any two.
    pub fn even(parts: u32, part: PartCost, transfer: f64) -> Costs {
        Costs { parts: vec![part; parts as usize], transfers: vec![transfer; parts.saturating_sub(1) as usize] }
    }
}

impl Timeline {
    /// From the first start to the last end of the step.
    pub fn length(&self) -> f64 {
        self.events.iter().flatten().map(|e| e.end).fold(0.0, f64::max)
    }
}

/// Runs `order`.
/// Errors: a pass that is missing, twice or of no part; an order that waits for itself.
pub fn simulate(order: &Order, costs: &Costs) -> Result<Timeline, OrderError> {
    order.check()?;
    let (stages, parts) = (order.layout.stages, order.layout.parts());
    if costs.parts.len() != parts as usize || costs.transfers.len() + 1 != parts as usize {
        return Err(OrderError::Size { stages, parts, found_stages: order.passes.len(), found_parts: costs.parts.len() });
    }
    let events = events(order, costs)?;
    let cost = events.iter().map(|events| span(events)).fold(0.0, f64::max);
    let needed = busiest(order.layout, order.microbatches, costs);
    let bubble = if cost > 0.0 { ((cost - needed) / cost).max(0.0) } else { 0.0 };
    Ok(Timeline { events, cost, bubble, peak_bytes: peak_bytes(order, costs) })
}

/// Runs an order that is complete.
/// Errors: it waits for itself.
pub(super) fn events(order: &Order, costs: &Costs) -> Result<Vec<Vec<Event>>, OrderError> {
    let mut run = Run::new(order, costs);
    run.all(|_, _| ());
    if run.events.iter().zip(&order.passes).any(|(done, passes)| done.len() < passes.len()) {
        return Err(OrderError::Deadlock(run.circle()));
    }
    Ok(run.events)
}

/// Between a stage's first start and its last end.
pub(super) fn span(events: &[Event]) -> f64 {
    events.last().map_or(0.0, |e| e.end) - events.first().map_or(0.0, |e| e.start)
}

/// How long the stage with the most work computes: no order costs less.
pub(super) fn busiest(layout: Layout, microbatches: u32, costs: &Costs) -> f64 {
    let work = |stage| (0..layout.chunks).map(|c| costs.parts[layout.part(stage, c) as usize].total()).sum::<f64>();
    (0..layout.stages).map(work).fold(0.0, f64::max) * f64::from(microbatches)
}

/// The most bytes that each stage holds; which those are depends on the order alone.
pub fn peak_bytes(order: &Order, costs: &Costs) -> Vec<u64> {
    let peak = |(stage, passes): (u32, &Vec<Pass>)| {
        let (mut now, mut peak) = (0, 0);
        for pass in passes {
            now += costs.parts[order.layout.part(stage, pass.chunk) as usize].bytes_of(pass.section);
            peak = peak.max(now);
        }
        peak as u64
    };
    (0u32..).zip(&order.passes).map(peak).collect()
}

/// What has run so far.
pub(super) struct Run<'a> {
    order: &'a Order,
    costs: &'a Costs,
    pub events: Vec<Vec<Event>>,
    /// When the forward and the backward of a microbatch (the input half, if there are halves) ended, by part; NaN before.
    ends: [Vec<f64>; 2],
}

impl Run<'_> {
    pub fn new<'a>(order: &'a Order, costs: &'a Costs) -> Run<'a> {
        let nothing = vec![f64::NAN; (order.layout.parts() * order.microbatches) as usize];
        let events = order.passes.iter().map(|passes| Vec::with_capacity(passes.len())).collect();
        Run { order, costs, events, ends: [nothing.clone(), nothing] }
    }

    /// Every stage as far as it goes; `ran` hears of each pass, by stage and place. What a stage ends lets only its neighbours go on.
    pub fn all(&mut self, mut ran: impl FnMut(usize, usize)) {
        let stages = self.order.layout.stages;
        let mut open: Vec<u32> = (0..stages).rev().collect();
        while let Some(stage) = open.pop() {
            while let Some(&pass) = self.order.passes[stage as usize].get(self.events[stage as usize].len()) {
                let Ok(ready) = self.ready(stage, pass) else { break };
                ran(stage as usize, self.events[stage as usize].len());
                self.push(stage, pass, ready);
                open.extend(self.reader(stage, pass).filter(|&reader| reader != stage));
            }
        }
    }

    pub fn part(&self, stage: u32, pass: Pass) -> usize {
        self.order.layout.part(stage, pass.chunk) as usize
    }

    pub fn push(&mut self, stage: u32, pass: Pass, ready: f64) {
        let part = self.order.layout.part(stage, pass.chunk);
        let events = &mut self.events[stage as usize];
        let start = events.last().map_or(0.0, |e| e.end).max(ready);
        let end = start + self.costs.parts[part as usize].of(pass.section);
        events.push(Event { pass, start, end });
        let index = (part * self.order.microbatches + pass.microbatch) as usize;
        match pass.section {
            Section::Forward => self.ends[0][index] = end,
            Section::Backward | Section::BackwardInput => self.ends[1][index] = end,
            Section::BackwardWeight => {}
        }
    }

    /// The stage that waits for `pass`, if another part does.
    fn reader(&self, stage: u32, pass: Pass) -> Option<u32> {
        let (layout, part) = (self.order.layout, self.order.layout.part(stage, pass.chunk));
        match pass.section {
            Section::Forward => (part + 1 < layout.parts()).then(|| layout.place(part + 1).0),
            Section::BackwardWeight => None,
            _ => part.checked_sub(1).map(|part| layout.place(part).0),
        }
    }

    /// When the operands of a pass have arrived, or the stage and pass that is still to run for it.
    pub fn ready(&self, stage: u32, pass: Pass) -> Result<f64, (u32, Pass)> {
        let (layout, microbatches) = (self.order.layout, self.order.microbatches);
        let part = layout.part(stage, pass.chunk);
        let end = |kind: usize, part: u32| {
            let end = self.ends[kind][(part * microbatches + pass.microbatch) as usize];
            let section = [Section::Forward, Section::BackwardInput][kind];
            let (stage, chunk) = layout.place(part);
            if end.is_nan() { Err((stage, Pass::new(section, chunk, pass.microbatch))) } else { Ok(end) }
        };
        match pass.section {
            Section::Forward if part == 0 => Ok(0.0),
            Section::Forward => Ok(end(0, part - 1)? + self.costs.transfers[part as usize - 1]),
            Section::BackwardWeight => end(1, part),
            _ if part + 1 == layout.parts() => end(0, part),
            _ => {
                end(0, part)?;
                Ok(end(1, part + 1)? + self.costs.transfers[part as usize])
            }
        }
    }

    /// A circle of stages each of which waits for the next, from some stage that does not go on.
    fn circle(&self) -> Vec<Wait> {
        let blocked = |stage: u32| {
            let pass = *self.order.passes[stage as usize].get(self.events[stage as usize].len())?;
            Some(Wait { stage, pass, on: self.ready(stage, pass).err()? })
        };
        let first = (0..self.order.layout.stages).find_map(blocked).expect("some stage is blocked");
        let mut waits = vec![first];
        loop {
            let next = waits[waits.len() - 1].on.0;
            if let Some(from) = waits.iter().position(|w| w.stage == next) {
                return waits.split_off(from);
            }
            waits.push(blocked(next).expect("a stage that is waited for has more to run"));
        }
    }
}
