//! Exact dynamic programming over the frontier: the values that are alive between two nodes.
//!
//! A state is the layout of each live value and what its readers so far have paid for. Every node extends every state by every
//! choice; of equal states the cheapest stays, at each level of memory. The ways from states to states are found once for all layers
//! that repeat (nnScaler's cut-set recurrence, OSDI 2024, section 5). States that cannot win, because the cheapest one could turn into
//! them for less than they cost more, are dropped; beyond a beam the dearest are. Where many values are alive at once, as in unrolled
//! recurrences, the beam is narrower.

use super::layout::{At, Layout, MAX_AXES};
use super::model::{Choice, Class, Cost, Item, Moving, Problem, Read};
use dcc_program::Reduce;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::rc::Rc;

/// States kept after a node, for one level of memory and for each of many.
const BEAM: usize = 4096;
const BEAM_OF_MANY: usize = 1024;

/// States times the square of how many values are alive, unless the states are few.
const WORK: usize = 1 << 20;
const FEWEST: usize = 32;

/// Words of all steps that are kept for the next of their kind.
const REMEMBERED: usize = 1 << 26;

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

/// What decides the ways through a step but for its states.
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

impl Shape {
    /// How often the value at a place of the frontier is read after this step, up to `FAR` times.
    fn left(&self, place: usize) -> u32 {
        let now = self.places.iter().filter(|&&p| p as usize == place).count() as u32;
        self.frontier[place].1 - now
    }
}

/// A state, a choice, and the state that they lead to.
struct Way {
    from: u32,
    choice: u32,
    to: u32,
    added: Cost,
    /// More than the choice that needs least.
    bytes: u64,
}

/// What tells sets of states apart.
type Digest = [u8; blake3::OUT_LEN];

/// All ways from the states of a set.
struct Step {
    ways: Vec<Way>,
    states: Vec<State>,
}

/// The cheapest known way to a state at a level of memory.
#[derive(Clone, Copy, Debug)]
struct Entry {
    cost: Cost,
    bytes: u64,
    /// Index of the entry before, and the choice that led here.
    before: u32,
    choice: u32,
}

/// What is known after a node: the states, sorted, and of each its entries, from little memory to much, from dear to cheap.
struct Reached {
    states: Vec<State>,
    /// First entry of each state, and the end.
    first: Vec<u32>,
    entries: Vec<Entry>,
}

/// Tensor axes whose pending sums pass through, and the operands that keep them.
type Kept<'a> = SmallVec<[(u8, &'a [usize]); 2]>;

pub(super) struct Solver<'a> {
    problem: &'a Problem,
    /// Bytes of a level of memory, and that are kept at most: those of choices beyond those that need least.
    level: u64,
    most: u64,
    lives: Vec<Live>,
    live_index: FxHashMap<Live, u32>,
    movings: FxHashMap<(usize, Layout, Layout), Moving>,
    /// Of steps that were met once, that they were; of those that were met again, the ways.
    steps: FxHashMap<(Shape, Digest), Option<Rc<Step>>>,
    /// Words of these.
    remembered: usize,
}

/// A choice for each item, and what all of them take.
pub(super) struct Solved {
    pub choices: Vec<usize>,
    pub cost: Cost,
    /// Bytes kept by a rank beyond those of the choices that need least.
    pub more: u64,
}

/// For each amount of memory the cheapest choices that need no more, from the fewest bytes to the least cost; one of each of so many
/// levels, as far apart. Of one level: the cheapest of all. None where choices contradict each other.
pub(super) fn front(problem: &Problem, levels: u64) -> Vec<Solved> {
    let mut solver = Solver {
        problem,
        level: u64::MAX,
        most: u64::MAX,
        lives: Vec::new(),
        live_index: FxHashMap::default(),
        movings: FxHashMap::default(),
        steps: FxHashMap::default(),
        remembered: 0,
    };
    let cheapest = solver.run();
    let most = cheapest.iter().flatten().map(|solved| solved.more).max();
    match most.filter(|_| levels > 1) {
        Some(most) => {
            (solver.level, solver.most) = (most / levels + 1, most);
            solver.run().unwrap_or_default()
        }
        None => cheapest.unwrap_or_default(),
    }
}

impl Solver<'_> {
    fn run(&mut self) -> Option<Vec<Solved>> {
        let problem = self.problem;
        let mut left = vec![0u32; problem.items.len()];
        for &value in problem.items.iter().flat_map(|item| &item.values) {
            left[value] += 1;
        }
        let mut frontier: Vec<usize> = Vec::new();
        let begin = Entry { cost: 0, bytes: 0, before: 0, choice: 0 };
        let mut last = Reached { states: vec![State::new()], first: vec![0, 1], entries: vec![begin] };
        // Of each item, the choice that led to each entry and the entry before.
        let mut trace: Vec<Vec<(u32, u32)>> = Vec::with_capacity(problem.items.len());
        for (index, item) in problem.items.iter().enumerate() {
            let shape = self.shape(item, &frontier, &left, left[index] > 0);
            for &value in &item.values {
                left[value] -= 1;
            }
            let step = self.step(problem.class(index), &shape, &last.states);
            let allowances = self.allowances(&shape, problem.class(index));
            last = self.follow(&step, &last, &allowances)?;
            trace.push(last.entries.iter().map(|entry| (entry.choice, entry.before)).collect());
            frontier.retain(|&v| left[v] > 0);
            if left[index] > 0 {
                frontier.push(index);
            }
        }
        let solved = |end: usize| {
            let mut choices = vec![0; problem.items.len()];
            let mut at = end;
            for (entries, slot) in trace.iter().zip(&mut choices).rev() {
                let (choice, before) = entries[at];
                *slot = choice as usize;
                at = before as usize;
            }
            let Entry { cost, bytes: more, .. } = last.entries[end];
            Solved { choices, cost, more }
        };
        Some((0..last.entries.len()).map(solved).collect())
    }

    fn shape(&self, item: &Item, frontier: &[usize], left: &[u32], stays: bool) -> Shape {
        let place = |value: &usize| frontier.iter().position(|v| v == value).expect("values live until their last read");
        let places = item.values.iter().map(|value| place(value) as u32).collect();
        let now = |v: usize| item.values.iter().filter(|&&value| value == v).count() as u32;
        let kind = |v: usize| self.problem.class(v).kind as u32;
        let frontier = frontier.iter().map(|&v| (kind(v), left[v].min(now(v) + FAR))).collect();
        Shape { class: item.class, places, frontier, stays }
    }

    /// All ways out of a set of states; of a step that is met for the third time they are known.
    fn step(&mut self, class: &Class, shape: &Shape, states: &[State]) -> Rc<Step> {
        let key = (shape.clone(), digest(states));
        let met = self.steps.get(&key).cloned();
        if let Some(Some(step)) = met {
            return step;
        }
        let mut step = Step { ways: Vec::new(), states: Vec::new() };
        let mut index: FxHashMap<State, u32> = FxHashMap::default();
        let least = class.least();
        let alive: Vec<usize> = (0..shape.frontier.len()).filter(|&place| shape.left(place) > 0).collect();
        for (from, state) in states.iter().enumerate() {
            for (number, choice) in class.choices.iter().enumerate() {
                let Some((next, added)) = self.extend(class, (shape, &alive), choice, state) else { continue };
                let to = *index.entry(next).or_insert_with_key(|next| {
                    step.states.push(next.clone());
                    step.states.len() as u32 - 1
                });
                step.ways.push(Way { from: from as u32, choice: number as u32, to, added, bytes: choice.bytes - least });
            }
        }
        let step = Rc::new(step);
        let words = step.ways.len() * size_of::<Way>() / 4 + step.states.iter().map(|state| state.len()).sum::<usize>();
        let again = met.is_some() && self.remembered + words <= REMEMBERED;
        self.remembered += if again { words } else { 0 };
        self.steps.insert(key, again.then(|| step.clone()));
        step
    }

    /// What the ways lead to, without what cannot win. `None` where there is no way.
    fn follow(&mut self, step: &Step, last: &Reached, allowances: &[Cost]) -> Option<Reached> {
        let mut found = self.all(step, last);
        // By level, the least cost of a state that needs no more memory, and that state.
        let mut least: Vec<(Cost, usize)> = Vec::new();
        for (state, entries) in found.iter_mut().enumerate() {
            let mut cheapest = Cost::MAX;
            for (level, slot) in entries.iter_mut().enumerate() {
                if least.len() <= level {
                    least.push((Cost::MAX, 0));
                }
                match slot {
                    Some(entry) if entry.cost < cheapest => cheapest = entry.cost,
                    _ => *slot = None,
                }
                least[level] = least[level].min((cheapest, state));
            }
        }
        for level in 1..least.len() {
            least[level] = least[level].min(least[level - 1]);
        }
        let mut states: Vec<(usize, Vec<Entry>)> = Vec::new();
        for (state, entries) in found.into_iter().enumerate() {
            let wins = |(level, entry): (usize, Option<Entry>)| {
                let (cost, best) = least[level];
                let pairs = step.states[state].iter().zip(&step.states[best]).zip(allowances);
                let turning: Cost = pairs.filter(|((own, other), _)| own != other).map(|(_, allowance)| allowance).sum();
                entry.filter(|entry| entry.cost <= cost.saturating_add(turning))
            };
            let entries: Vec<Entry> = entries.into_iter().enumerate().filter_map(wins).collect();
            if !entries.is_empty() {
                states.push((state, entries));
            }
        }
        let width = allowances.len().max(1);
        let beam = if self.most == u64::MAX { BEAM } else { BEAM_OF_MANY };
        let beam = beam.min((WORK / (width * width)).max(FEWEST));
        if states.len() > beam {
            states.sort_by_key(|(state, entries)| (entries.last().map(|entry| entry.cost), &step.states[*state]));
            states.truncate(beam);
        }
        states.sort_unstable_by_key(|(state, _)| &step.states[*state]);
        if states.is_empty() {
            return None;
        }
        let mut reached = Reached { states: Vec::with_capacity(states.len()), first: vec![0], entries: Vec::new() };
        for (state, entries) in states {
            reached.states.push(step.states[state].clone());
            reached.entries.extend(entries);
            reached.first.push(reached.entries.len() as u32);
        }
        Some(reached)
    }

    /// By state and level, the cheapest of all ways; of as cheap ones that of fewer bytes, then the first.
    fn all(&self, step: &Step, last: &Reached) -> Vec<Vec<Option<Entry>>> {
        let mut found: Vec<Vec<Option<Entry>>> = vec![Vec::new(); step.states.len()];
        for way in &step.ways {
            let entries = &mut found[way.to as usize];
            for before in last.first[way.from as usize]..last.first[way.from as usize + 1] {
                let old = &last.entries[before as usize];
                let (cost, bytes) = (old.cost + way.added, old.bytes + way.bytes);
                if bytes > self.most {
                    continue;
                }
                let level = (bytes / self.level) as usize;
                if entries.len() <= level {
                    entries.resize(level + 1, None);
                }
                if entries[level].is_none_or(|entry| (cost, bytes) < (entry.cost, entry.bytes)) {
                    entries[level] = Some(Entry { cost, bytes, before, choice: way.choice });
                }
            }
        }
        found
    }

    /// How much dearer than the cheapest a state may be and still win, for each value in which they differ: what it costs at most to
    /// move the value to any layout for every reader to come and to move the contributions back.
    fn allowances(&mut self, shape: &Shape, class: &Class) -> Vec<Cost> {
        let values = (0..shape.frontier.len()).map(|place| (shape.frontier[place].0, shape.left(place)));
        let mut values: Vec<(u32, u32)> = values.filter(|&(_, left)| left > 0).collect();
        values.extend(shape.stays.then_some((class.kind as u32, FAR)));
        let mut pending = Layout::default();
        (0..self.problem.axes.len()).for_each(|axis| pending.set(axis, At::Pending(Reduce::Sum)));
        let allowance = |(kind, left): (u32, u32)| {
            let moving = self.moving(kind as usize, pending, Layout::default());
            3 * u64::from(left) * (moving.once + moving.gather + moving.copy)
        };
        values.into_iter().map(allowance).collect()
    }

    /// The state after a node is computed by `choice`, of the values that stay alive, and what that adds; `None` where the choice keeps what is not pending.
    fn extend(
        &mut self,
        class: &Class,
        (shape, alive): (&Shape, &[usize]),
        choice: &Choice,
        state: &State,
    ) -> Option<(State, Cost)> {
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
        let mut after: State = alive.iter().map(|&place| next[place]).collect();
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
}

fn digest(states: &[State]) -> Digest {
    let lengths = states.iter().map(|state| state.len() as u32);
    let bytes: Vec<u8> = lengths.chain(states.iter().flatten().copied()).flat_map(u32::to_le_bytes).collect();
    blake3::hash(&bytes).into()
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
