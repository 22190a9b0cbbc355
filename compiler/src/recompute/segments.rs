//! Where a stage that is computed again as a whole is divided: the places that together need the least memory.
//!
//! Between two places lies a segment; what crosses a place is kept for every microbatch in flight, until the backward has passed it; what
//! the backward reads of a segment is there while that segment's backward runs, and so is the gradient that it computes. So segments are the longer the
//! earlier they are, a deep stage of one microbatch has about √(2n), one with many microbatches in flight few.

use super::{PARTS, Stage, cut};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Most places that are considered, those that least crosses.
const MOST_PLACES: usize = 512;
/// What a byte that is written takes, in multiplications and additions.
const BYTE_FLOPS: u64 = 8;
/// Most forward passes that may be computed in addition.
const MOST_PASSES: u64 = 8;
/// Most peaks that are tried.
const TRIALS: usize = 200;

/// A stage's nodes in order.
pub(super) struct Line {
    /// From where a value is made to where it is last read, of values that have to be kept to be there.
    pub(super) spans: Vec<Option<(usize, usize)>>,
    /// Bytes that cross the place before each node.
    crossing: Vec<u64>,
    /// Bytes that the backward reads of the nodes before each place, if they are computed again.
    needed: Vec<u64>,
    /// Bytes of the nodes before each place that are kept whatever the segments are.
    kept: Vec<u64>,
    /// Bytes that a node's own backward takes for a while.
    pub(super) own: Vec<u64>,
}

impl Line {
    pub fn of(stage: &Stage) -> Line {
        let count = stage.nodes.len();
        let at: BTreeMap<NodeId, usize> = stage.nodes.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        let mut last: Vec<usize> = (0..count).collect();
        for (i, &id) in stage.nodes.iter().enumerate() {
            for operand in stage.graph[id].operands.iter().filter_map(|o| at.get(o)) {
                last[*operand] = i;
            }
        }
        let lasting = lasting(stage, &at);
        let spans = (0..count).map(|i| (lasting[i] && last[i] > i).then_some((i, last[i]))).collect();
        Line::weighed(stage, spans, &BTreeSet::new())
    }

    /// The line where these are kept.
    pub(super) fn weighed(stage: &Stage, spans: Vec<Option<(usize, usize)>>, kept: &BTreeSet<NodeId>) -> Line {
        let places = spans.len() + 1;
        let own = stage.nodes.iter().map(|&id| stage.gradient_bytes(id)).collect();
        let mut line = Line { spans, crossing: vec![0; places], needed: vec![0; places], kept: vec![0; places], own };
        for (i, &id) in stage.nodes.iter().enumerate() {
            let (is_kept, read) = (kept.contains(&id), stage.needed.contains(&id) && stage.is_repeatable(id));
            let bytes = |counts: bool| if counts { stage.bytes(id) } else { 0 };
            line.needed[i + 1] = line.needed[i] + bytes(read && !is_kept);
            line.kept[i + 1] = line.kept[i] + bytes(is_kept);
            if let Some((first, last)) = line.spans[i].filter(|_| !is_kept) {
                (first + 1..=last).for_each(|place| line.crossing[place] += stage.bytes(id));
            }
        }
        line
    }

    /// The place behind about `part` of what the backward reads.
    pub fn place(&self, part: u8) -> usize {
        let due = *self.needed.last().expect("it starts with 0") as f64 * f64::from(part) / f64::from(PARTS);
        let off = |&place: &usize| (self.needed[place] as f64 - due).abs();
        let places = self.places(self.crossing.len() - 1);
        match part {
            0 => 0,
            PARTS => self.crossing.len() - 1,
            _ => places.into_iter().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(0),
        }
    }

    /// What is kept for the nodes before `end` to be computed again: the values that cross the places between their segments.
    pub fn kept(&self, stage: &Stage, end: usize) -> BTreeSet<NodeId> {
        let mut places = self.choose(end, stage.in_flight);
        places.push(end);
        self.crossing(stage, &places)
    }

    /// The values that cross any of these places.
    fn crossing(&self, stage: &Stage, places: &[usize]) -> BTreeSet<NodeId> {
        let crosses = |&(first, last): &(usize, usize)| places.iter().any(|&place| first < place && place <= last);
        let values = stage.nodes.iter().copied().zip(&self.spans);
        values.filter(|(_, span)| span.as_ref().is_some_and(crosses)).map(|(id, _)| id).collect()
    }

    /// What is kept where each segment computes again, for a `price` in bytes, what its backward needs from what is kept and from the values
    /// that cross its start; and the places between the segments, which together need the least memory. In each stretch between two narrow
    /// places that much is kept that all that leaves it can be made again, so that a segment may be of several.
    pub fn between(&self, stage: &Stage, price: impl Fn(NodeId) -> Option<u64>) -> (BTreeSet<NodeId>, Vec<usize>) {
        let count = stage.nodes.len();
        let mut kept = BTreeSet::new();
        for ends in self.narrow(count).windows(2) {
            let nodes = &stage.nodes[ends[0]..ends[1]];
            let leaves = |span: &Option<(usize, usize)>| span.is_some_and(|(_, last)| ends[1] < count && ends[1] <= last);
            let mut wanted: BTreeSet<NodeId> = nodes.iter().copied().filter(|id| stage.needed.contains(id)).collect();
            wanted.extend(nodes.iter().zip(&self.spans[ends[0]..]).filter(|(_, span)| leaves(span)).map(|(id, _)| *id));
            kept.extend(cut::kept(stage, nodes, &wanted, &price));
        }
        let line = Line::weighed(stage, self.spans.clone(), &kept);
        let places = line.choose(count, stage.in_flight);
        kept.extend(line.crossing(stage, &places));
        (kept, places)
    }

    /// Of the places that less crosses than those beside them, those that are so among themselves: where one layer ends and the next begins.
    fn narrow(&self, end: usize) -> Vec<usize> {
        let places = self.places(end);
        let is_end = |n: usize| n == 0 || n + 1 == places.len();
        // Nothing crosses the ends, beside which no place would be narrow.
        let crossing = |n: usize| if is_end(n) { u64::MAX } else { self.crossing[places[n]] };
        let is_least = |n: usize| crossing(n) <= crossing(n - 1).min(crossing(n + 1));
        (0..places.len()).filter(|&n| is_end(n) || is_least(n)).map(|n| places[n]).collect()
    }

    /// The places between the segments before `end`, for `in_flight` microbatches.
    pub(super) fn choose(&self, end: usize, in_flight: u64) -> Vec<usize> {
        let places = self.places(end);
        let own = self.most_own(&places);
        let (mut best, mut most) = (None, u64::MAX);
        for trial in 0..TRIALS {
            let fits = |before: u64, from: usize, to: usize| {
                before + self.within(places[from], places[to]) + own[from][to - from - 1] <= most
            };
            let Some(chosen) = divide(&places, |place| self.crossing[place], fits) else { break };
            let peak = self.peak(&chosen, end);
            let bytes = self.bytes(&chosen, end, in_flight);
            if best.as_ref().is_none_or(|&(least, _)| bytes < least) {
                best = Some((bytes, chosen));
            }
            // Later ones in steps of an eighth, by which the least may be missed.
            let Some(less) = (if trial < TRIALS / 2 { peak } else { peak / 8 * 7 }).checked_sub(1) else { break };
            most = less;
        }
        best.map(|(_, chosen)| chosen).unwrap_or_default()
    }

    /// What segments between these places need: what crosses them, of every microbatch in flight but the one whose backward runs, and
    /// that one's peak.
    pub(super) fn bytes(&self, places: &[usize], end: usize, in_flight: u64) -> u64 {
        let crossing: u64 = places.iter().map(|&place| self.crossing[place]).sum();
        (crossing + self.kept[end]).saturating_mul(in_flight - 1).saturating_add(self.peak(places, end))
    }

    /// Bytes of a segment whose backward runs, and of what is kept up to its end, but for its gradients and what crosses places.
    fn within(&self, from: usize, to: usize) -> u64 {
        self.kept[to] + self.needed[to] - self.needed[from]
    }

    /// Most bytes of a node's own backward, from each place to each later one.
    fn most_own(&self, places: &[usize]) -> Vec<Vec<u64>> {
        let between: Vec<u64> =
            places.windows(2).map(|ends| self.own[ends[0]..ends[1]].iter().copied().fold(0, u64::max)).collect();
        let running = |most: &mut u64, own: &u64| {
            *most = *own.max(most);
            Some(*most)
        };
        (0..places.len()).map(|from| between.iter().skip(from).scan(0, |most, own| running(most, own)).collect()).collect()
    }

    /// Most bytes of a microbatch whose backward runs: those of a segment, and what crosses the places up to it.
    fn peak(&self, places: &[usize], end: usize) -> u64 {
        let (mut from, mut crossing, mut most) = (0, 0, 0);
        for &to in places.iter().chain([&end]) {
            let own = self.own[from..to].iter().copied().fold(0, u64::max);
            most = (crossing + self.within(from, to) + own).max(most);
            (from, crossing) = (to, crossing + self.crossing[to]);
        }
        most
    }

    /// The start, `end`, and places between them that less crosses than those beside them.
    pub(super) fn places(&self, end: usize) -> Vec<usize> {
        let inner = 1..end.max(1);
        let least = |&place: &usize| {
            let here = self.crossing[place];
            here < self.crossing[place - 1] && here <= self.crossing[place + 1]
        };
        let mut found: Vec<usize> = inner.filter(least).collect();
        found.sort_by_key(|&place| (self.crossing[place], Reverse(place)));
        found.truncate(MOST_PLACES);
        found.extend([0, end]);
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The places between segments each of which computes `again` for itself what its backward needs. What a segment needs, and what is
    /// `kept` before its end, takes at most `most` bytes, or what the shortest segments take. Of such places those at which least is computed
    /// once more; none if that is many times the whole pass.
    pub fn apart(&self, stage: &Stage, again: &[bool], kept: &BTreeSet<NodeId>, most: u64) -> Vec<usize> {
        let prefix = |counts: &dyn Fn(usize, NodeId) -> bool| -> Vec<u64> {
            let mut sums = vec![0];
            for (i, &id) in stage.nodes.iter().enumerate() {
                sums.push(sums[i] + if counts(i, id) { stage.bytes(id) } else { 0 });
            }
            sums
        };
        let before = prefix(&|_, id| kept.contains(&id));
        let made = prefix(&|i, id| again[i] && stage.needed.contains(&id));
        let places = self.places(again.len());
        let needed = |from: usize, to: usize| before[to] + made[to] - made[from];
        let most = places.windows(2).map(|ends| needed(ends[0], ends[1])).fold(most, u64::max);
        let works: Vec<u64> = stage.nodes.iter().map(|&id| work(stage, id)).collect();
        let cost = |place: usize| self.repeated(stage, again, &works, place);
        let chosen = divide(&places, cost, |_, from, to| needed(places[from], places[to]) <= most).unwrap_or_default();
        let more = chosen.iter().map(|&place| cost(place)).fold(0, u64::saturating_add);
        if more > works.iter().fold(0, |sum: u64, work| sum.saturating_add(*work)).saturating_mul(MOST_PASSES) {
            Vec::new()
        } else {
            chosen
        }
    }

    /// What it takes to compute again, behind a place, what crosses it, where nodes take so much.
    pub(super) fn repeated(&self, stage: &Stage, again: &[bool], works: &[u64], place: usize) -> u64 {
        let mut wanted: BTreeSet<NodeId> = BTreeSet::new();
        let mut sum = 0;
        for i in (0..place).rev().filter(|&i| again[i]) {
            let crosses = self.spans[i].is_some_and(|(_, last)| place <= last);
            if crosses || wanted.contains(&stage.nodes[i]) {
                sum = works[i].saturating_add(sum);
                wanted.extend(&stage.graph[stage.nodes[i]].operands);
            }
        }
        sum
    }
}

/// Multiplications and additions of a node, the bytes of what is no product counting as some.
pub(super) fn work(stage: &Stage, id: NodeId) -> u64 {
    stage.flops(id).unwrap_or(stage.bytes(id).saturating_mul(BYTE_FLOPS))
}

/// Inner places of the least cost, of those between which each segment fits, given what the places before it cost and the numbers of its ends.
fn divide(places: &[usize], cost: impl Fn(usize) -> u64, fits: impl Fn(u64, usize, usize) -> bool) -> Option<Vec<usize>> {
    let mut best: Vec<Option<(u64, usize)>> = vec![None; places.len()];
    best[0] = Some((0, 0));
    for to in 1..places.len() {
        let own = if to + 1 < places.len() { cost(places[to]) } else { 0 };
        let ways = (0..to).filter_map(|from| Some((best[from]?.0, from)));
        let ways = ways.filter(|&(before, from)| fits(before, from, to));
        best[to] = ways.map(|(before, from)| (before.saturating_add(own), from)).min();
    }
    let mut from = best[places.len() - 1]?.1;
    let mut chosen = Vec::new();
    while from > 0 {
        chosen.push(places[from]);
        from = best[from]?.1;
    }
    chosen.reverse();
    Some(chosen)
}

/// Whether a value has to be kept to be there again: not what is made quickly of constants and of inputs.
fn lasting(stage: &Stage, at: &BTreeMap<NodeId, usize>) -> Vec<bool> {
    let constants = constants(stage.graph);
    let mut lasting: Vec<bool> = Vec::with_capacity(stage.nodes.len());
    for &id in &stage.nodes {
        let node = &stage.graph[id];
        let leaf = matches!(node.op, Op::Input(_) | Op::Param(_) | Op::Scalar(_));
        let of_lasting = node.operands.iter().filter_map(|o| at.get(o)).any(|&o| lasting[o]);
        let is_weight = |o: &NodeId| !at.contains_key(o) && !stage.is_of_samples(*o) && !constants[o.0 as usize];
        let of_weights = node.operands.iter().any(is_weight);
        lasting.push(!leaf && (of_lasting || of_weights || !stage.is_quick(id) || !stage.is_repeatable(id)));
    }
    lasting
}

/// Which nodes are made of nothing but constants.
fn constants(graph: &Graph) -> Vec<bool> {
    let mut constants = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let made = !node.operands.is_empty() && node.operands.iter().all(|o| constants[o.0 as usize]);
        constants.push(made || matches!(node.op, Op::Const(_) | Op::Iota(_)));
    }
    constants
}
