//! Where a stage that is computed again as a whole is divided: the places that together need the least memory.
//!
//! Between two places lies a segment; what crosses a place is kept for every microbatch in flight, until the backward has passed it; what
//! the backward reads of a segment is there while that segment's backward runs. So segments are the longer the earlier they are, a deep
//! stage of one microbatch has about √(2n), one with many microbatches in flight few.

use super::{PARTS, Stage};
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
    spans: Vec<Option<(usize, usize)>>,
    /// Bytes that cross the place before each node.
    crossing: Vec<u64>,
    /// Bytes that the backward reads of the nodes before each place.
    needed: Vec<u64>,
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
        let mut line = Line { spans: Vec::with_capacity(count), crossing: vec![0; count + 1], needed: vec![0; count + 1] };
        for (i, &id) in stage.nodes.iter().enumerate() {
            line.spans.push((lasting[i] && last[i] > i).then_some((i, last[i])));
            if line.spans[i].is_some() {
                (i + 1..=last[i]).for_each(|place| line.crossing[place] += stage.bytes(id));
            }
            let read = stage.needed.contains(&id) && stage.is_repeatable(id);
            line.needed[i + 1] = line.needed[i] + if read { stage.bytes(id) } else { 0 };
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
        let crosses = |&(first, last): &(usize, usize)| places.iter().any(|&place| first < place && place <= last);
        let values = stage.nodes.iter().copied().zip(&self.spans);
        values.filter(|(_, span)| span.as_ref().is_some_and(crosses)).map(|(id, _)| id).collect()
    }

    /// The places between the segments before `end`, for `in_flight` microbatches.
    pub(super) fn choose(&self, end: usize, in_flight: u64) -> Vec<usize> {
        let places = self.places(end);
        let (mut best, mut most) = (None, u64::MAX);
        for trial in 0..TRIALS {
            let needed = |from: usize, to: usize| self.needed[to] - self.needed[from];
            let fits = |before: u64, from: usize, to: usize| before + needed(from, to) <= most;
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
        crossing.saturating_mul(in_flight - 1).saturating_add(self.peak(places, end))
    }

    /// Most bytes of a microbatch whose backward runs: those of a segment, and what crosses the places up to it.
    fn peak(&self, places: &[usize], end: usize) -> u64 {
        let (mut from, mut crossing, mut most) = (0, 0, 0);
        for &to in places.iter().chain([&end]) {
            most = (crossing + self.needed[to] - self.needed[from]).max(most);
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
        let chosen = divide(&places, cost, |_, from, to| needed(from, to) <= most).unwrap_or_default();
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

/// Inner places of the least cost, of those between which each segment fits, given its ends and what the places before it cost.
fn divide(places: &[usize], cost: impl Fn(usize) -> u64, fits: impl Fn(u64, usize, usize) -> bool) -> Option<Vec<usize>> {
    let mut best: Vec<Option<(u64, usize)>> = vec![None; places.len()];
    best[0] = Some((0, 0));
    for to in 1..places.len() {
        let own = if to + 1 < places.len() { cost(places[to]) } else { 0 };
        let ways = (0..to).filter_map(|from| Some((best[from]?.0, from)));
        let ways = ways.filter(|&(before, from)| fits(before, places[from], places[to]));
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
