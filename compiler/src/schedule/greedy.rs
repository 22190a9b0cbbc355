//! An order by list scheduling: time goes on, and each stage that is free takes the best of what it can run.
//!
//! After Qi et al. 2023 (arXiv 2401.10241, section 3.1): forwards until the first backward comes, then forwards and backwards in turn;
//! weight halves fill the gaps, make room where the memory is full, and come last.

use super::order::{Order, Pass, Section};
use super::problem::{Problem, Score};
use super::simulate::PartCost;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What a stage prefers.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The most microbatches that a stage has forward and not yet backward in its first chunk; all that fit if it is missing here.
    pub ahead: Vec<u32>,
    pub turns: Turns,
    /// How long a stage may idle in all, rather than make a forward or backward wait for a weight half, or a backward for a forward.
    pub weight_slack: f64,
    pub forward_slack: f64,
}

/// How a stage that has run a backward goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turns {
    /// With a backward, if one has come.
    BackwardFirst,
    /// With a forward, if one has come.
    Alternate,
    /// With weight halves until a forward comes, as long as there are both.
    Strict,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { ahead: Vec::new(), turns: Turns::Strict, weight_slack: f64::INFINITY, forward_slack: 0.0 }
    }
}

/// An order in which no stage holds more than it may; `None` if one cannot hold a microbatch. It runs as it was made, or faster.
pub fn order(problem: &Problem, policy: &Policy) -> Option<Order> {
    let passes = run(problem, policy)?.into_iter().map(|s| s.passes).collect();
    Some(Order { layout: problem.layout, microbatches: problem.microbatches, passes })
}

/// What `order` costs.
pub(super) fn score(problem: &Problem, policy: &Policy) -> Option<Score> {
    Some(Score::of(run(problem, policy)?.iter().map(|s| s.free - s.first)))
}

fn run(problem: &Problem, policy: &Policy) -> Option<Vec<Stage>> {
    let layout = problem.layout;
    let mut state = State::new(problem, policy)?;
    state.wake.extend((0..layout.stages).map(|stage| Reverse(Wake { time: 0.0, stage })));
    while let Some(Reverse(Wake { time, stage })) = state.wake.pop() {
        if state.stages[stage as usize].free <= time {
            state.decide(stage, time);
        }
    }
    let complete = |s: &Stage| s.passes.len() == (3 * layout.chunks * problem.microbatches) as usize;
    state.stages.iter().all(complete).then_some(state.stages)
}

/// When to look at a stage again.
#[derive(Clone, Copy, PartialEq)]
struct Wake {
    time: f64,
    stage: u32,
}

impl Eq for Wake {}

impl Ord for Wake {
    fn cmp(&self, other: &Wake) -> std::cmp::Ordering {
        self.time.total_cmp(&other.time).then(self.stage.cmp(&other.stage))
    }
}

impl PartialOrd for Wake {
    fn partial_cmp(&self, other: &Wake) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A stage so far.
struct Stage {
    /// The start of the first pass, and the end of the last.
    first: f64,
    free: f64,
    /// The waits between.
    idle: f64,
    bytes: i64,
    /// Bytes that the pending weight halves will free.
    pending: i64,
    /// The last pass that was no weight half.
    turn: Option<Section>,
    /// Forwards and backwards run, by chunk.
    forward: Vec<u32>,
    backward: Vec<u32>,
    weights: VecDeque<Pass>,
    passes: Vec<Pass>,
}

struct State<'a> {
    problem: &'a Problem<'a>,
    policy: &'a Policy,
    stages: Vec<Stage>,
    wake: BinaryHeap<Reverse<Wake>>,
    /// When the operand of each forward and backward arrives, by part and microbatch; infinite while that is open.
    arrivals: [Vec<f64>; 2],
}

/// A pass and when its operand arrives.
type Next = (f64, Pass);

impl State<'_> {
    fn new<'a>(problem: &'a Problem, policy: &'a Policy) -> Option<State<'a>> {
        let Problem { layout, microbatches, .. } = *problem;
        let chunks = layout.chunks as usize;
        let stage = |_| Stage {
            first: 0.0,
            free: 0.0,
            idle: 0.0,
            bytes: 0,
            pending: 0,
            turn: None,
            forward: vec![0; chunks],
            backward: vec![0; chunks],
            weights: VecDeque::new(),
            passes: Vec::with_capacity(3 * chunks * microbatches as usize),
        };
        let open = vec![f64::INFINITY; (layout.parts() * microbatches) as usize];
        let mut arrivals = [open.clone(), open];
        arrivals[0][..microbatches as usize].fill(0.0);
        let stages = (0..layout.stages).map(stage).collect();
        let state = State { problem, policy, stages, wake: BinaryHeap::new(), arrivals };
        (0..layout.stages).all(|stage| state.reserve(stage, 0) <= state.limit(stage)).then_some(state)
    }

    fn cost(&self, stage: u32, chunk: u32) -> &PartCost {
        &self.problem.costs.parts[self.problem.layout.part(stage, chunk) as usize]
    }

    fn limit(&self, stage: u32) -> i64 {
        self.problem.limit_bytes[stage as usize] as i64
    }

    /// What must be free for a forward of `chunk`: room for itself, and so that its microbatch can go on, for the chunks after it,
    /// less what the microbatches that are through will free. So the oldest microbatch always goes on (of two chunks; of more, an
    /// order may come out incomplete).
    fn reserve(&self, stage: u32, chunk: u32) -> i64 {
        let (state, chunks) = (&self.stages[stage as usize], self.problem.layout.chunks);
        let bytes = |c: u32| self.cost(stage, c).activation_bytes as i64;
        let through = i64::from(state.forward[chunks as usize - 1] - state.backward[0]);
        let after: i64 = (chunk + 1..chunks).map(bytes).sum();
        bytes(chunk) + (after - through * bytes(0)).max(0)
    }

    /// The backward of each chunk that comes next, and of these the first to arrive.
    fn next_backward(&self, stage: u32, time: f64) -> Option<Next> {
        let state = &self.stages[stage as usize];
        let next = |chunk: u32| {
            let microbatch = state.backward[chunk as usize];
            let open = microbatch < state.forward[chunk as usize];
            open.then(|| self.next(1, stage, Pass::new(Section::BackwardInput, chunk, microbatch)))
        };
        first((0..self.problem.layout.chunks).rev().filter_map(next), time)
    }

    /// The same for forwards, but for those that the policy forbids, and the memory, if weight halves cannot mend it.
    fn next_forward(&self, stage: u32, time: f64) -> Option<Next> {
        let state = &self.stages[stage as usize];
        let ahead = self.policy.ahead.get(stage as usize).copied().unwrap_or(u32::MAX).max(1);
        let next = |chunk: u32| {
            let microbatch = state.forward[chunk as usize];
            let allowed = chunk > 0 || microbatch - state.backward[0] < ahead;
            let fits = state.bytes - state.pending + self.reserve(stage, chunk) <= self.limit(stage);
            let open = microbatch < self.problem.microbatches && allowed && fits;
            open.then(|| self.next(0, stage, Pass::new(Section::Forward, chunk, microbatch)))
        };
        first((0..self.problem.layout.chunks).rev().filter_map(next), time)
    }

    fn next(&self, kind: usize, stage: u32, pass: Pass) -> Next {
        let part = self.problem.layout.part(stage, pass.chunk);
        (self.arrivals[kind][(part * self.problem.microbatches + pass.microbatch) as usize], pass)
    }

    /// Starts on `stage`, free at `time`, what is best; nothing if waiting is.
    fn decide(&mut self, stage: u32, time: f64) {
        let (forward, backward) = (self.next_forward(stage, time), self.next_backward(stage, time));
        let state = &self.stages[stage as usize];
        let ready = |next: Option<Next>| next.filter(|n| n.0 <= time).map(|n| n.1);
        let weight = state.weights.front().copied();
        let forward_turn = self.policy.turns != Turns::BackwardFirst && state.turn == Some(Section::BackwardInput);
        if forward_turn && self.policy.turns == Turns::Strict && ready(forward).is_none() {
            let more = state.forward.iter().any(|&f| f < self.problem.microbatches);
            if let Some(weight) = weight.filter(|_| more) {
                return self.start(stage, time, weight);
            }
        }
        let (first, second) = if forward_turn { (forward, backward) } else { (backward, forward) };
        let soon = backward.map_or(f64::INFINITY, |b| b.0 - time);
        let patient = |pass: Pass| {
            let worth =
                0.0 < soon && soon < self.cost(stage, pass.chunk).forward && state.idle + soon <= self.policy.forward_slack;
            pass.section == Section::Forward && worth
        };
        if let Some(pass) = ready(first).or(ready(second)).filter(|&pass| !patient(pass)) {
            let full = pass.section == Section::Forward && state.bytes + self.reserve(stage, pass.chunk) > self.limit(stage);
            let pass = if full { weight.expect("weight halves make room") } else { pass };
            return self.start(stage, time, pass);
        }
        let Some(weight) = weight else { return };
        let arrivals = [forward, backward].into_iter().flatten().map(|n| n.0).filter(|&at| at > time);
        let wait = arrivals.fold(f64::INFINITY, f64::min) - time;
        if self.cost(stage, weight.chunk).backward_weight <= wait || state.idle + wait > self.policy.weight_slack {
            self.start(stage, time, weight);
        }
    }

    fn start(&mut self, stage: u32, time: f64, pass: Pass) {
        let cost = *self.cost(stage, pass.chunk);
        let end = time + cost.of(pass.section);
        let state = &mut self.stages[stage as usize];
        if state.passes.is_empty() {
            state.first = time;
        } else {
            state.idle += time - state.free;
        }
        state.free = end;
        state.bytes += cost.bytes_of(pass.section);
        state.passes.push(pass);
        self.wake.push(Reverse(Wake { time: end, stage }));
        match pass.section {
            Section::Forward => state.forward[pass.chunk as usize] += 1,
            Section::BackwardWeight => {
                state.weights.pop_front();
                state.pending += cost.bytes_of(pass.section);
                return;
            }
            _ => {
                let weight = Pass { section: Section::BackwardWeight, ..pass };
                state.backward[pass.chunk as usize] += 1;
                state.pending -= cost.bytes_of(weight.section);
                state.weights.push_back(weight);
            }
        }
        state.turn = Some(pass.section);
        self.send(self.problem.layout.part(stage, pass.chunk), pass, end);
    }

    /// Tells whoever waits for `pass` of `part`, which ends at `end`.
    fn send(&mut self, part: u32, pass: Pass, end: f64) {
        let Problem { layout, microbatches, costs, .. } = *self.problem;
        let last = part + 1 == layout.parts();
        let (kind, to, transfer) = match (pass.section, part) {
            (Section::Forward, _) if last => (1, part, 0.0),
            (Section::Forward, _) => (0, part + 1, costs.transfers[part as usize]),
            (_, 0) => return,
            _ => (1, part - 1, costs.transfers[part as usize - 1]),
        };
        let arrival = end + transfer;
        self.arrivals[kind][(to * microbatches + pass.microbatch) as usize] = arrival;
        self.wake.push(Reverse(Wake { time: arrival, stage: layout.place(to).0 }));
    }
}

/// The first to be ready; of those that are ready by `time` the oldest microbatch, as given.
fn first(passes: impl Iterator<Item = Next>, time: f64) -> Option<Next> {
    passes.min_by(|a, b| a.0.max(time).total_cmp(&b.0.max(time)).then(a.1.microbatch.cmp(&b.1.microbatch)))
}
