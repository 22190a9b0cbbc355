//! Exact dynamic programming over the frontier: the values that are alive between two nodes.
//!
//! A state is the layout of each live value and what its readers so far have paid for. Every node extends every state by every
//! choice; of equal states the cheapest stays. Steps are memoised by their structure, so a repeated layer costs nothing once
//! its states repeat (nnScaler's cut-set recurrence, OSDI 2024, section 5). States that cannot win, because the cheapest
//! one could turn into them for less than they cost more, are dropped; beyond `BEAM` states the dearest are.

use super::layout::{At, Layout, MAX_AXES};
use super::model::{Choice, Class, Cost, Item, Moving, Problem, Read};
use dcc_program::Reduce;
use smallvec::SmallVec;
use std::collections::HashMap;

/// States kept after a node.
const BEAM: usize = 4096;

/// Readers to come that states distinguish: more are as many.
const FAR: u32 = 4;

/// What is known of a live value.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Live {
    layout: Layout,
    /// Layouts that were made for readers (true), also again in the backward, and contributions that were turned (false).
    paid: SmallVec<[(bool, bool, Layout); 2]>,
}

/// Live values by their place in the frontier, as indices into `Solver::lives`.
type State = SmallVec<[u32; 8]>;

/// States with their costs above the cheapest, sorted.
type States = Vec<(State, Cost)>;

/// What decides a step but for its states.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    class: usize,
    /// Place of each read value in the frontier.
    places: SmallVec<[u32; 3]>,
    /// Kind of each value of the frontier and how often it will still be read, in this step and (up to `FAR` times) after.
    frontier: SmallVec<[(u32, u32); 8]>,
    /// The result stays alive.
    stays: bool,
}

struct Step {
    states: usize,
    added: Cost,
    /// By new state: the old state and the choice.
    back: Vec<(u32, u32)>,
}

/// Tensor axes whose pending sums pass through, and the operands that keep them.
type Kept<'a> = SmallVec<[(u8, &'a [usize]); 2]>;

pub(super) struct Solver<'a> {
    problem: &'a Problem,
    lives: Vec<Live>,
    live_index: HashMap<Live, u32>,
    sets: Vec<States>,
    set_index: HashMap<States, usize>,
    movings: HashMap<(usize, Layout, Layout), Moving>,
    shapes: HashMap<(Shape, usize), usize>,
    steps: Vec<Step>,
}

/// The index of the choice of each item, and the cost of all. `None` where choices contradict each other.
pub(super) fn solve(problem: &Problem) -> Option<(Vec<usize>, Cost)> {
    Solver {
        problem,
        lives: Vec::new(),
        live_index: HashMap::new(),
        sets: Vec::new(),
        set_index: HashMap::new(),
        movings: HashMap::new(),
        shapes: HashMap::new(),
        steps: Vec::new(),
    }
    .run()
}

impl Solver<'_> {
    fn run(mut self) -> Option<(Vec<usize>, Cost)> {
        let problem = self.problem;
        let mut left = vec![0u32; problem.items.len()];
        for &value in problem.items.iter().flat_map(|item| &item.values) {
            left[value] += 1;
        }
        let mut frontier: Vec<usize> = Vec::new();
        let mut set = self.intern_states(vec![(State::new(), 0)]);
        let mut total = 0;
        let mut trace = Vec::with_capacity(problem.items.len());
        for (index, item) in problem.items.iter().enumerate() {
            let shape = self.shape(item, &frontier, &left, left[index] > 0);
            for &value in &item.values {
                left[value] -= 1;
            }
            let key = (shape, set);
            let step = match self.shapes.get(&key) {
                Some(&step) => step,
                None => {
                    let step = self.step(problem.class(index), &key.0, set)?;
                    self.steps.push(step);
                    self.shapes.insert(key, self.steps.len() - 1);
                    self.steps.len() - 1
                }
            };
            frontier.retain(|&v| left[v] > 0);
            if left[index] > 0 {
                frontier.push(index);
            }
            set = self.steps[step].states;
            total += self.steps[step].added;
            trace.push(step);
        }
        let mut choices = vec![0; trace.len()];
        let mut state = 0;
        for (index, &step) in trace.iter().enumerate().rev() {
            let (old, choice) = self.steps[step].back[state];
            choices[index] = choice as usize;
            state = old as usize;
        }
        Some((choices, total))
    }

    fn shape(&self, item: &Item, frontier: &[usize], left: &[u32], stays: bool) -> Shape {
        let place = |value: &usize| frontier.iter().position(|v| v == value).expect("values live until their last read");
        let places = item.values.iter().map(|value| place(value) as u32).collect();
        let now = |v: usize| item.values.iter().filter(|&&value| value == v).count() as u32;
        let kind = |v: usize| self.problem.class(v).kind as u32;
        let frontier = frontier.iter().map(|&v| (kind(v), left[v].min(now(v) + FAR))).collect();
        Shape { class: item.class, places, frontier, stays }
    }

    fn step(&mut self, class: &Class, shape: &Shape, set: usize) -> Option<Step> {
        let old = self.sets[set].clone();
        let mut best: HashMap<State, (Cost, u32, u32)> = HashMap::new();
        let mut least = Cost::MAX;
        let allowance = self.allowance(shape, class);
        for (from, (state, cost)) in old.iter().enumerate() {
            for (number, choice) in class.choices.iter().enumerate() {
                let Some((next, added)) = self.extend(class, shape, choice, state) else { continue };
                let cost = cost + added;
                if cost > least.saturating_add(allowance) {
                    continue;
                }
                least = least.min(cost);
                let entry = best.entry(next).or_insert((Cost::MAX, 0, 0));
                if cost < entry.0 {
                    *entry = (cost, from as u32, number as u32);
                }
            }
        }
        let mut states: Vec<(State, (Cost, u32, u32))> =
            best.into_iter().filter(|(_, (cost, ..))| *cost <= least.saturating_add(allowance)).collect();
        states.sort_unstable();
        if states.len() > BEAM {
            states.sort_by_key(|(_, (cost, ..))| *cost);
            states.truncate(BEAM);
            states.sort_unstable();
        }
        if states.is_empty() {
            return None;
        }
        let back = states.iter().map(|(_, (_, from, number))| (*from, *number)).collect();
        let states = states.into_iter().map(|(state, (cost, ..))| (state, cost - least)).collect();
        Some(Step { states: self.intern_states(states), added: least, back })
    }

    /// How much dearer than the cheapest a state may be and still win: what it costs at most to move every live value to any
    /// layout for every reader to come and to move the contributions back.
    fn allowance(&mut self, shape: &Shape, class: &Class) -> Cost {
        let mut total = 0;
        let mut values: Vec<(u32, u32)> = shape.frontier.to_vec();
        values.push((class.kind as u32, if shape.stays { FAR } else { 0 }));
        for (kind, left) in values {
            let mut pending = Layout::default();
            (0..self.problem.axes.len()).for_each(|axis| pending.set(axis, At::Pending(Reduce::Sum)));
            let moving = self.moving(kind as usize, pending, Layout::default());
            total += 3 * u64::from(left) * (moving.once + moving.gather);
        }
        total
    }

    /// The state after a node is computed by `choice`, and what that adds; `None` where the choice keeps what is not pending.
    fn extend(&mut self, class: &Class, shape: &Shape, choice: &Choice, state: &State) -> Option<(State, Cost)> {
        let kept = self.kept(class, shape, choice, state)?;
        let mut next = state.clone();
        let mut cost = choice.cost;
        for (i, read) in class.reads.iter().enumerate() {
            let place = shape.places[i] as usize;
            let kind = shape.frontier[place].0 as usize;
            let (want, give) = with_kept(choice, i, read.operand, &kept);
            let (live, added) = self.read(kind, next[place], want, give, read);
            next[place] = live;
            cost += added;
        }
        let mut makes = choice.makes;
        kept.iter().for_each(|(axis, _)| makes.set(usize::from(*axis), At::Pending(Reduce::Sum)));
        if class.output {
            let moving = self.moving(class.kind, makes, makes.resolved());
            cost += self.problem.want_cost(class.kind, moving, false);
        }
        let reads_now = |place: usize| shape.places.iter().filter(|&&p| p as usize == place).count() as u32;
        let mut after: State =
            (0..next.len()).filter(|&place| shape.frontier[place].1 > reads_now(place)).map(|place| next[place]).collect();
        if shape.stays {
            after.push(self.intern_live(Live { layout: makes, paid: SmallVec::new() }));
        }
        Some((after, cost))
    }

    /// The axes whose pending sums pass through, and the operands that keep them.
    fn kept<'i>(&self, class: &'i Class, shape: &Shape, choice: &Choice, state: &State) -> Option<Kept<'i>> {
        let mut kept = SmallVec::new();
        for &axis in &choice.keep {
            let pending = |operand: &usize| {
                let read = class.reads.iter().position(|read| read.operand == Some(*operand as u8));
                read.is_some_and(|r| {
                    self.lives[state[shape.places[r] as usize] as usize].layout.is_pending_sum(usize::from(axis))
                })
            };
            match class.linear.iter().find(|set| set.iter().all(pending)) {
                Some(set) => kept.push((axis, set.as_slice())),
                None if class.scalar => {}
                None => return None,
            }
        }
        Some(kept)
    }

    /// The value after a read, and what the read adds: layouts and contributions are paid for once.
    fn read(&mut self, kind: usize, live: u32, want: Layout, give: Layout, read: &Read) -> (u32, Cost) {
        let mut value = self.lives[live as usize].clone();
        let mut cost = 0;
        let moving = self.moving(kind, value.layout, want);
        if moving != Moving::default() {
            let once = (true, false, want);
            if !value.paid.contains(&once) {
                cost += self.problem.want_cost(kind, moving, false);
                value.paid.push(once);
            }
            let again = (true, true, want);
            if read.again && !value.paid.contains(&again) {
                cost += self.problem.want_cost(kind, moving, true) - self.problem.want_cost(kind, moving, false);
                value.paid.push(again);
            }
        }
        if read.gradient {
            let moving = self.moving(kind, give, value.layout.resolved());
            let turned = (false, false, give);
            if moving != Moving::default() && !value.paid.contains(&turned) {
                cost += self.problem.give_cost(kind, moving);
                value.paid.push(turned);
            }
        }
        value.paid.sort_unstable();
        (self.intern_live(value), cost)
    }

    fn moving(&mut self, kind: usize, from: Layout, to: Layout) -> Moving {
        if from == to {
            return Moving::default();
        }
        let problem = self.problem;
        *self.movings.entry((kind, from, to)).or_insert_with(|| problem.moving(kind, from, to))
    }

    fn intern_live(&mut self, live: Live) -> u32 {
        if let Some(&index) = self.live_index.get(&live) {
            return index;
        }
        let index = self.lives.len() as u32;
        self.lives.push(live.clone());
        self.live_index.insert(live, index);
        index
    }

    fn intern_states(&mut self, states: States) -> usize {
        if let Some(&index) = self.set_index.get(&states) {
            return index;
        }
        self.sets.push(states.clone());
        self.set_index.insert(states, self.sets.len() - 1);
        self.sets.len() - 1
    }
}

/// What read `i` wants and gives, with pendings that pass: the operands that keep a pending want it so; the gradients of the
/// others read it and are pending themselves.
pub(super) fn with_kept(choice: &Choice, i: usize, operand: Option<u8>, kept: &[(u8, &[usize])]) -> (Layout, Layout) {
    let (mut want, mut give) = (choice.wants[i], choice.gives[i]);
    for (axis, set) in kept {
        let keeps = operand.is_some_and(|o| set.contains(&usize::from(o)));
        let at = At::Pending(Reduce::Sum);
        if keeps { want.set(usize::from(*axis), at) } else { give.set(usize::from(*axis), at) }
    }
    (want, give)
}

const _: () = assert!(MAX_AXES <= 8, "axis indices fit a byte");
