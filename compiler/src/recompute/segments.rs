//! Where a stage that is computed again as a whole is divided: the places that together need the least memory.
//!
//! Between two places lies a segment; what crosses a place is kept for every microbatch in flight, what the backward reads of a segment
//! is there while that segment's backward runs. So a deep stage of one microbatch has about √n segments, one with many microbatches in
//! flight few.

use super::{PARTS, Stage};
use crate::graph::NodeId;
use crate::ops::Op;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Most places that are considered, those that least crosses.
const MOST_PLACES: usize = 512;
/// Above so many sizes of the largest segment, only some are tried.
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
        let divided = self.sizes(&places).into_iter().filter_map(|most| self.divide(&places, most));
        divided.min_by_key(|chosen| self.bytes(chosen, end, in_flight)).unwrap_or_default()
    }

    /// Sizes of the largest segment that are worth a trial: all, or of many some.
    fn sizes(&self, places: &[usize]) -> Vec<u64> {
        let segments =
            places.iter().flat_map(|&to| places.iter().take_while(move |&&from| from < to).map(move |&from| (from, to)));
        let mut sizes: Vec<u64> = segments.map(|(from, to)| self.needed[to] - self.needed[from]).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        if sizes.len() > TRIALS {
            let mut least = u64::MAX;
            // Each at most three quarters of the one before.
            sizes.retain(|&size| {
                let tried = size <= least;
                least = if tried { (size / 4).saturating_mul(3) } else { least };
                tried
            });
        }
        sizes
    }

    /// What segments between these places need: what crosses them, of every microbatch in flight, and the largest segment.
    pub(super) fn bytes(&self, places: &[usize], end: usize, in_flight: u64) -> u64 {
        let crossing: u64 = places.iter().map(|&place| self.crossing[place]).sum();
        let ends = [0].iter().chain(places).zip(places.iter().chain([&end]));
        let largest = ends.map(|(&from, &to)| self.needed[to] - self.needed[from]).max().unwrap_or(0);
        crossing.saturating_mul(in_flight).saturating_add(largest)
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

    /// The inner places that the fewest bytes cross, of those between which at most `most` bytes are needed.
    fn divide(&self, places: &[usize], most: u64) -> Option<Vec<usize>> {
        let mut best: Vec<Option<(u64, usize)>> = vec![None; places.len()];
        best[0] = Some((0, 0));
        for to in 1..places.len() {
            let inner = to + 1 < places.len();
            let crossing = if inner { self.crossing[places[to]] } else { 0 };
            let near = (0..to).rev().take_while(|&from| self.needed[places[to]] - self.needed[places[from]] <= most);
            let ways = near.filter_map(|from| Some((best[from]?.0 + crossing, from)));
            best[to] = ways.min();
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
}

/// Whether a value has to be kept to be there again: not what is made quickly of constants and of inputs.
fn lasting(stage: &Stage, at: &BTreeMap<NodeId, usize>) -> Vec<bool> {
    let mut lasting: Vec<bool> = Vec::with_capacity(stage.nodes.len());
    for &id in &stage.nodes {
        let node = &stage.graph[id];
        let leaf = matches!(node.op, Op::Input(_) | Op::Param(_) | Op::Scalar(_));
        let of_lasting = node.operands.iter().filter_map(|o| at.get(o)).any(|&o| lasting[o]);
        let of_weights = node.operands.iter().any(|o| !at.contains_key(o) && !stage.is_of_samples(*o));
        lasting.push(!leaf && (of_lasting || of_weights || !stage.is_quick(id) || !stage.is_repeatable(id)));
    }
    lasting
}
