//! Rows of calls, in steps: launches of loop nests that may run in any order are one.
//!
//! A call of two launches is two units, whose parts of the workspace are apart from those of others as far as there is room. Units stay in
//! order where one writes what the other reads or writes, workspace included; otherwise a unit joins the first step behind all that it
//! must follow which takes it. That is done from the row's begin, and from its end, and what has fewer steps is taken.

use super::device::{Call, Texts};
use super::tails::{Item, Tail};
use crate::error::{Error, Result};
use crate::exec::Span;
use dcc_kernels::cuda::group::{Argument, Kind, TABLE};
use dcc_kernels::cuda::{Launch, Source};
use std::ops::Range;

/// Fewer calls are no row.
const ROW: usize = 3;
/// Blocks of a launch that gains nothing from company: it takes some tens of microseconds.
const LARGE: u32 = 1 << 13;
/// Different texts in one.
const KINDS: usize = 32;
/// Bytes of the workspace that parts are apart in.
const APART: usize = 16 << 20;
/// What parts of the workspace begin at multiples of.
const ALIGN: usize = 256;
/// The block of spans that are in the workspace.
const WORKSPACE: u32 = u32::MAX;

/// Neighbouring calls of a section, in an order that means the same.
pub struct Row {
    calls: Range<usize>,
    pub(super) steps: Vec<Step>,
}

/// What runs as one.
pub(super) struct Step {
    pub as_one: AsOne,
    pub members: Vec<Member>,
}

/// How members run.
#[derive(Clone, Copy)]
pub(super) enum AsOne {
    /// The one member by itself.
    Alone,
    /// By the kernel of a group.
    Group(usize),
    /// A product and its tail, by a kernel of so many launches, where it is not faster to run one after the other.
    Tail { tail: Tail, launches: usize },
}

/// Launches of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Its number in the row.
    pub call: usize,
    pub launches: Range<usize>,
    /// Bytes into the workspace at which its own begins.
    pub workspace: usize,
}

/// A member as far as its order is concerned.
#[derive(Clone, Debug, Default)]
pub(super) struct Unit {
    pub reads: Vec<Span>,
    pub writes: Vec<Span>,
    /// `None`: it stays by itself.
    pub joins: Option<Joins>,
}

/// What decides about company.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joins {
    threads: u32,
    words: usize,
    /// Kernel and launch.
    kind: (usize, usize),
}

/// Launches of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Launched {
    /// Call by call, and in rows.
    pub alone: usize,
    pub in_rows: usize,
    /// Products that have the kernel behind them as their tail.
    pub tails: usize,
}

impl Row {
    /// Numbers of its calls.
    pub fn calls(&self) -> Range<usize> {
        self.calls.clone()
    }

    /// Launches of one run.
    pub fn launches(&self) -> usize {
        let of = |step: &Step| match step.as_one {
            AsOne::Alone => step.members[0].launches.len(),
            AsOne::Group(_) => 1,
            AsOne::Tail { launches, .. } => launches,
        };
        self.steps.iter().map(of).sum()
    }
}

impl Texts {
    /// The rows of a section's calls, between which stands what is none. All that runs them, and the calls of no row, is wanted.
    pub fn in_rows(&mut self, section: &[Option<&Call>]) -> Result<Vec<Row>> {
        let (mut rows, mut first) = (Vec::new(), 0);
        for part in section.split(Option::is_none) {
            let calls: Vec<&Call> = part.iter().flatten().copied().collect();
            match calls.len() < ROW {
                true => calls.iter().for_each(|call| self.want(call)),
                false => rows.push(Row { calls: first..first + calls.len(), steps: self.steps(&calls)? }),
            }
            first += calls.len() + 1;
        }
        Ok(rows)
    }

    /// Adds up what a section's runs launch, call by call and in rows.
    pub fn count(&mut self, section: &[Option<Call>], rows: &[Row], runs: usize) {
        let in_rows: usize = rows.iter().map(Row::launches).sum();
        let of = |range: Range<usize>| section[range].iter().flatten().map(|call| self.launches(call)).sum::<usize>();
        let all = of(0..section.len());
        let of_rows: usize = rows.iter().map(|row| of(row.calls())).sum();
        self.launched.alone += runs * all;
        self.launched.in_rows += runs * (all - of_rows + in_rows);
        let is_tail = |step: &&Step| matches!(step.as_one, AsOne::Tail { .. });
        self.launched.tails += runs * rows.iter().flat_map(|row| &row.steps).filter(is_tail).count();
    }

    /// Of a step, of all that was counted.
    pub fn launched(&self) -> Launched {
        self.launched
    }

    /// Launches of a call by itself.
    pub fn launches(&self, call: &Call) -> usize {
        self.sources[call.kernel].launches.len()
    }

    fn steps(&mut self, calls: &[&Call]) -> Result<Vec<Step>> {
        let units = self.units(calls);
        let items = self.with_tails(calls, units)?;
        let (units, items): (Vec<Unit>, Vec<_>) =
            items.into_iter().map(|Item { unit, members, tail }| (unit, (members, tail))).unzip();
        let mut steps = Vec::new();
        for set in ordered(&units) {
            let mut members: Vec<Member> = set.iter().flat_map(|&n| items[n].0.clone()).collect();
            let as_one = match (items[set[0]].1, members.len()) {
                (Some(tail), _) => AsOne::Tail { tail, launches: self.sources[tail.kernel].launches.len() },
                (None, 1) => AsOne::Alone,
                _ => AsOne::Group(self.group(calls, &mut members)?),
            };
            match as_one {
                AsOne::Group(_) => {}
                AsOne::Alone => self.want(calls[members[0].call]),
                // One after the other may be faster.
                AsOne::Tail { .. } => members.iter().for_each(|member| self.want(calls[member.call])),
            }
            steps.push(Step { as_one, members });
        }
        Ok(steps)
    }

    /// The kernel of a group, whose members come to stand in its order.
    fn group(&mut self, calls: &[&Call], members: &mut Vec<Member>) -> Result<usize> {
        let of = |member: &Member| (calls[member.call].kernel, member.launches.start);
        let mut kinds: Vec<((usize, usize), Vec<Member>)> = Vec::new();
        for member in members.drain(..) {
            match kinds.iter_mut().find(|(kind, _)| *kind == of(&member)) {
                Some((_, all)) => all.push(member),
                None => kinds.push((of(&member), vec![member])),
            }
        }
        let key: Vec<_> = kinds.iter().map(|(kind, members)| (*kind, members.len())).collect();
        members.extend(kinds.into_iter().flat_map(|(_, members)| members));
        if let Some(&known) = self.groups.get(&key) {
            return Ok(known);
        }
        let kind = |&((kernel, launch), members): &((usize, usize), usize)| {
            let source = &self.sources[kernel];
            Kind { source, launch, members }
        };
        let number = self.sources.len();
        let source = Source::group(&format!("group{number}"), &key.iter().map(kind).collect::<Vec<_>>());
        self.add(source.map_err(Error::device)?, calls[members[0].call].kernel, members.len());
        self.groups.insert(key, number);
        Ok(number)
    }

    /// The launches of calls, with what they read and write.
    fn units(&mut self, calls: &[&Call]) -> Vec<(Unit, Member)> {
        let is_split = |source: &Source| source.bodies.len() > 1;
        let sources = calls.iter().map(|call| &self.sources[call.kernel]);
        let shared = sources.filter(|source| !is_split(source)).map(|source| source.workspace).max().unwrap_or(0);
        let mut parts = Parts { first: shared.next_multiple_of(ALIGN), used: 0, most: shared };
        let mut units = Vec::new();
        for (call, &each) in calls.iter().enumerate() {
            let source = &self.sources[each.kernel];
            let workspace = if is_split(source) { parts.take(source.workspace) } else { 0 };
            let own = Span { block: WORKSPACE, offset: workspace, bytes: source.workspace };
            let (reads, writes) = each.operands.split_at(each.reads);
            if !is_split(source) {
                let (reads, mut writes) = (reads.to_vec(), writes.to_vec());
                writes.extend((source.workspace > 0).then_some(own));
                let joins = source.bodies.first().and_then(|_| joins(source, (each.kernel, 0)));
                let launches = 0..source.launches.len();
                units.push((Unit { reads, writes, joins }, Member { call, launches, workspace }));
                continue;
            }
            for launch in 0..source.launches.len() {
                let mut unit = Unit { joins: joins(source, (each.kernel, launch)), ..Unit::default() };
                for argument in &source.bodies[launch].arguments {
                    match *argument {
                        Argument::Operand(n) if n < each.reads => unit.reads.push(each.operands[n]),
                        Argument::Operand(n) => unit.writes.push(each.operands[n]),
                        Argument::Workspace if launch == 0 => unit.writes.push(own),
                        Argument::Workspace => unit.reads.push(own),
                        Argument::Parameter(_) => {}
                    }
                }
                units.push((unit, Member { call, launches: launch..launch + 1, workspace }));
            }
        }
        self.workspace = self.workspace.max(parts.most);
        units
    }
}

/// Parts of the workspace, one behind the other, from the front again where there is no more room.
struct Parts {
    first: usize,
    used: usize,
    most: usize,
}

impl Parts {
    fn take(&mut self, bytes: usize) -> usize {
        if self.used + bytes > APART {
            self.used = 0;
        }
        let at = self.first + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        self.most = self.most.max(at + bytes);
        at
    }
}

fn joins(source: &Source, kind: (usize, usize)) -> Option<Joins> {
    let (body, Launch { blocks: [x, y], threads, .. }) = (&source.bodies[kind.1], &source.launches[kind.1]);
    let small = x.checked_mul(*y).is_some_and(|blocks| blocks <= LARGE);
    (body.joins && small).then_some(Joins { threads: *threads, words: body.arguments.len(), kind })
}

impl Unit {
    /// Whether the two must stay in order.
    pub fn conflicts(&self, other: &Unit) -> bool {
        let meet = |a: &[Span], b: &[Span]| a.iter().any(|x| b.iter().any(|y| x.overlaps(y)));
        meet(&self.writes, &other.reads) || meet(&self.writes, &other.writes) || meet(&self.reads, &other.writes)
    }
}

/// Units that run together.
struct Set {
    units: Vec<usize>,
    threads: u32,
    words: usize,
    kinds: Vec<(usize, usize)>,
}

impl Set {
    fn takes(&self, joins: &Joins) -> bool {
        let room = self.kinds.contains(&joins.kind) || self.kinds.len() < KINDS;
        self.threads == joins.threads && self.words + joins.words <= TABLE && room
    }

    fn add(&mut self, n: usize, joins: &Joins) {
        self.units.push(n);
        self.words += joins.words;
        if !self.kinds.contains(&joins.kind) {
            self.kinds.push(joins.kind);
        }
    }
}

/// Numbers of the units in an order that means the same, those together that run as one.
fn ordered(units: &[Unit]) -> Vec<Vec<usize>> {
    let forward = joined(units, 0..units.len());
    let mut backward = joined(units, (0..units.len()).rev());
    if forward.len() <= backward.len() {
        return forward;
    }
    backward.reverse();
    backward.iter_mut().for_each(|set| set.reverse());
    backward
}

fn joined(units: &[Unit], order: impl Iterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut sets: Vec<Set> = Vec::new();
    for n in order {
        let place = units[n].joins.and_then(|joins| {
            let follows = |set: &Set| set.units.iter().any(|&other| units[n].conflicts(&units[other]));
            let first = sets.iter().rposition(follows).map_or(0, |last| last + 1);
            (first..sets.len()).find(|&at| sets[at].takes(&joins)).map(|at| (at, joins))
        });
        match (place, units[n].joins) {
            (Some((at, joins)), _) => sets[at].add(n, &joins),
            (None, Some(Joins { threads, words, kind })) => {
                sets.push(Set { units: vec![n], threads, words, kinds: vec![kind] });
            }
            // Blocks of no threads: nothing joins it.
            (None, None) => sets.push(Set { units: vec![n], threads: 0, words: 0, kinds: Vec::new() }),
        }
    }
    sets.into_iter().map(|set| set.units).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(block: u32, range: Range<usize>) -> Span {
        Span { block, offset: range.start, bytes: range.len() }
    }

    /// A unit of 256 threads and ten words that reads and writes bytes of one block.
    fn unit(reads: impl Into<Option<Range<usize>>>, writes: impl Into<Option<Range<usize>>>) -> Unit {
        let spans = |range: Option<Range<usize>>| range.map(|range| span(1, range)).into_iter().collect();
        let joins = Some(Joins { threads: 256, words: 10, kind: (0, 0) });
        Unit { reads: spans(reads.into()), writes: spans(writes.into()), joins }
    }

    fn alone(mut unit: Unit) -> Unit {
        unit.joins = None;
        unit
    }

    /// Whether two units run as one.
    fn are_one(first: &Unit, second: &Unit) -> bool {
        ordered(&[first.clone(), second.clone()]).len() == 1
    }

    #[test]
    fn what_conflicts_stays_apart() {
        let writes = unit(None, 0..16);
        assert!(!are_one(&writes, &unit(8..24, 64..80)), "reads what was written");
        assert!(!are_one(&unit(8..24, 64..80), &writes), "writes what was read");
        assert!(!are_one(&writes, &unit(None, 15..31)), "writes what was written");
        // The controls: they touch; both read; the same bytes of another block.
        assert!(are_one(&writes, &unit(16..32, 64..80)) && are_one(&unit(16..32, 64..80), &writes));
        assert!(are_one(&writes, &unit(None, 16..32)) && are_one(&unit(0..8, 16..32), &unit(0..8, 32..48)));
        let other = Unit { writes: vec![span(2, 0..16)], ..unit(None, None) };
        assert!(are_one(&writes, &other));
    }

    #[test]
    fn chains_side_by_side_run_in_steps() {
        // Each parameter's: y = x, z = y.
        let chain = |n: usize| [unit(n..n + 1, 100 + n..101 + n), unit(100 + n..101 + n, 200 + n..201 + n)];
        let units: Vec<Unit> = (0..4).flat_map(chain).collect();
        assert_eq!(ordered(&units), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    }

    #[test]
    fn units_move_only_past_what_they_do_not_need() {
        let product = alone(unit(300..400, 400..500));
        let needs = unit(400..401, 0..1);
        let free = unit(500..501, 1..2);
        assert_eq!(ordered(&[free.clone(), product.clone(), free.clone()]).len(), 3, "both write one place");
        let other = unit(500..501, 2..3);
        assert_eq!(ordered(&[free.clone(), product.clone(), other.clone()]), [vec![0, 2], vec![1]]);
        // Only the first can move.
        assert_eq!(ordered(&[free, product.clone(), needs.clone()]), [vec![1], vec![0, 2]]);
        let given = unit(600..601, 300..301);
        assert_eq!(ordered(&[given, product, needs]), [[0], [1], [2]]);
    }

    #[test]
    fn random_rows_keep_their_order() {
        let mut state = 1;
        let mut below = |n: usize| {
            state = u64::wrapping_mul(state, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let mut joined = 0;
        for _ in 0..200 {
            let mut units = Vec::new();
            for _ in 0..30 {
                let mut range = || below(60);
                let [from, to] = [range(), range()];
                let made = unit(from..from + 1 + range() % 3, to..to + 1 + range() % 3);
                units.push(if below(3) == 0 { alone(made) } else { made });
            }
            let sets = ordered(&units);
            let mut all: Vec<usize> = sets.concat();
            let place = |n: usize| sets.iter().position(|set| set.contains(&n)).expect("a place");
            for n in 0..units.len() {
                assert!((0..n).all(|m| !units[m].conflicts(&units[n]) || place(m) < place(n)), "{n} of {units:?}: {sets:?}");
            }
            all.sort_unstable();
            assert!(all.into_iter().eq(0..units.len()));
            joined += units.len() - sets.len();
        }
        assert!(joined > 1000, "{joined}");
    }

    #[test]
    fn a_step_has_bounds() {
        let many: Vec<Unit> = (0..120).map(|n| unit(None, n..n + 1)).collect();
        assert_eq!(ordered(&many).iter().map(Vec::len).collect::<Vec<_>>(), [51, 51, 18], "512 words");
        let kind = |n: usize, threads: u32| Unit { joins: Some(Joins { threads, words: 1, kind: (n, 0) }), ..many[n].clone() };
        let kinds: Vec<Unit> = (0..40).map(|n| kind(n, 256)).collect();
        assert_eq!(ordered(&kinds).iter().map(Vec::len).collect::<Vec<_>>(), [32, 8]);
        assert!(!are_one(&kind(0, 256), &kind(1, 512)));
    }

    #[test]
    fn parts_of_the_workspace_are_apart_while_there_is_room() {
        let mut parts = Parts { first: 512, used: 0, most: 500 };
        assert_eq!([parts.take(100), parts.take(300), parts.take(APART - 1024)], [512, 768, 1280]);
        assert_eq!([parts.take(300), parts.take(2 * APART)], [512, 512], "from the front again");
        assert_eq!(parts.most, 512 + 2 * APART);
    }
}
