//! Puts the weight halves of an order anew, so that it costs at most a given time.
//!
//! The forwards and input halves keep their order. Without any weight half their latest starts follow from the wanted cost, back from
//! the end; then a weight half goes wherever there is a gap and what follows still starts in time, and where the memory wants it.

use super::order::{Order, Pass, Section};
use super::problem::Problem;
use super::simulate::{Costs, Event, Run};
use std::collections::VecDeque;

/// Stage, and place in its list.
type Place = (usize, usize);

/// `order` with its weight halves where they fit for `cost`; `None` if it cannot cost as little, or has whole backwards. It may come
/// out dearer than wanted.
pub(super) fn fill(problem: &Problem, order: &Order, cost: f64) -> Option<Order> {
    let (costs, limit_bytes) = (problem.costs, problem.limit_bytes);
    let mut frame = order.clone();
    frame.passes.iter_mut().for_each(|passes| passes.retain(|p| p.section != Section::BackwardWeight));
    let whole = |p: &Pass| p.section == Section::Backward;
    if frame.passes.iter().flatten().any(whole) {
        return None;
    }
    let mut trace = Vec::new();
    let mut run = Run::new(&frame, costs);
    run.all(|stage, place| trace.push((stage, place)));
    let latest = latest(&run.events, &trace, &frame, costs, cost);
    let mut starts = run.events.iter().flatten().zip(latest.iter().flatten());
    let late = |(event, latest): (&Event, &f64)| event.start > latest + 1e-9 * cost;
    if starts.any(late) {
        return None;
    }
    let filling = Filling {
        run: Run::new(&frame, costs),
        costs,
        limit_bytes,
        latest: &latest,
        stages: vec![Stage::default(); frame.passes.len()],
    };
    let passes = filling.all(&frame, &trace);
    Some(Order { passes, ..frame })
}

/// When each pass has to start at the latest.
fn latest(events: &[Vec<Event>], trace: &[Place], frame: &Order, costs: &Costs, cost: f64) -> Vec<Vec<f64>> {
    let layout = frame.layout;
    let part = |stage: usize, pass: Pass| layout.part(stage as u32, pass.chunk) as usize;
    let mut latest: Vec<Vec<f64>> = events.iter().map(|events| vec![f64::INFINITY; events.len()]).collect();
    for (stage, events) in events.iter().enumerate() {
        // After a pass come those that follow, and the weight halves of its own and theirs.
        let mut end = events[0].start + cost;
        for (place, event) in events.iter().enumerate().rev() {
            let cost = costs.parts[part(stage, event.pass)];
            if event.pass.section == Section::BackwardInput {
                end -= cost.backward_weight;
            }
            end -= cost.of(event.pass.section);
            latest[stage][place] = end;
        }
    }
    let mut readers = vec![[f64::INFINITY; 2]; (layout.parts() * frame.microbatches) as usize];
    for &(stage, place) in trace.iter().rev() {
        let pass = events[stage][place].pass;
        let at = part(stage, pass);
        let kind = usize::from(pass.section != Section::Forward);
        let index = |part: usize| part * frame.microbatches as usize + pass.microbatch as usize;
        let next = latest[stage].get(place + 1).copied().unwrap_or(f64::INFINITY);
        let end = next.min(readers[index(at)][kind]);
        let start = latest[stage][place].min(end - costs.parts[at].of(pass.section));
        latest[stage][place] = start;
        let (to, edge) = match kind {
            0 if at > 0 => (Some((at - 1, 0)), at - 1),
            0 => (None, 0),
            _ if at + 1 < layout.parts() as usize => (Some((at + 1, 1)), at),
            _ => (Some((at, 0)), usize::MAX),
        };
        if let Some((to, kind)) = to {
            let reader = &mut readers[index(to)][kind];
            *reader = reader.min(start - costs.transfers.get(edge).unwrap_or(&0.0));
        }
    }
    latest
}

struct Filling<'a> {
    run: Run<'a>,
    costs: &'a Costs,
    limit_bytes: &'a [u64],
    latest: &'a [Vec<f64>],
    stages: Vec<Stage>,
}

#[derive(Clone, Default)]
struct Stage {
    bytes: i64,
    weights: VecDeque<Pass>,
}

impl Filling<'_> {
    fn all(mut self, frame: &Order, trace: &[Place]) -> Vec<Vec<Pass>> {
        for &(stage, place) in trace {
            let pass = frame.passes[stage][place];
            let ready = self.run.ready(stage as u32, pass).expect("it ran in this order without weight halves");
            while let Some(&weight) = self.stages[stage].weights.front() {
                if !self.weight_first(stage, pass, weight, ready, self.latest[stage][place]) {
                    break;
                }
                self.stages[stage].weights.pop_front();
                self.push(frame, stage, weight, 0.0);
            }
            self.push(frame, stage, pass, ready);
        }
        let rest = |(stage, events): (Stage, Vec<Event>)| events.into_iter().map(|e| e.pass).chain(stage.weights).collect();
        self.stages.into_iter().zip(self.run.events).map(rest).collect()
    }

    fn push(&mut self, frame: &Order, stage: usize, pass: Pass, ready: f64) {
        self.run.push(stage as u32, pass, ready);
        let state = &mut self.stages[stage];
        state.bytes += self.costs.parts[frame.layout.part(stage as u32, pass.chunk) as usize].bytes_of(pass.section);
        if pass.section == Section::BackwardInput {
            state.weights.push_back(Pass { section: Section::BackwardWeight, ..pass });
        }
    }

    /// Whether `weight` goes before `pass`: it fits the gap, or makes `pass` wait no longer than it may, or makes room for it.
    fn weight_first(&self, stage: usize, pass: Pass, weight: Pass, ready: f64, latest: f64) -> bool {
        let cost = |pass: Pass| self.costs.parts[self.run.part(stage as u32, pass)];
        let free = self.run.events[stage].last().map_or(0.0, |e| e.end);
        let end = free + cost(weight).backward_weight;
        let full = self.stages[stage].bytes + cost(pass).bytes_of(pass.section) > self.limit_bytes[stage] as i64;
        full || end <= ready || free < ready && end <= latest
    }
}
