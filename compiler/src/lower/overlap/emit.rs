//! The section with starts and waits where the buckets have them.

use super::buckets::{Bucket, Start, Wait};
use super::windows::Flight;
use dcc_program::program::{Action, Instr};
use std::collections::BTreeSet;

struct Emission {
    body: Vec<Instr>,
    out: Vec<Instr>,
    buckets: Vec<Bucket>,
    started: Vec<bool>,
    ended: Vec<bool>,
    /// The last that is waited for when the next of its kind starts.
    behind: Option<usize>,
}

/// Every other instruction keeps its order. What a bucket waits for, or what waits for it, comes by demand: never too late.
pub(super) fn emit(body: Vec<Instr>, buckets: Vec<Bucket>) -> Vec<Instr> {
    let moving: BTreeSet<usize> = buckets.iter().flat_map(|b| &b.flights).flat_map(Flight::instrs).collect();
    let (count, len) = (buckets.len(), body.len());
    let mut ready: Vec<usize> = (0..count).filter(|&n| buckets[n].start == Start::Ready).collect();
    // At one place, first what is needed first.
    ready.sort_by_key(|&n| (buckets[n].ready, buckets[n].due, n));
    let mut ahead: Vec<usize> = (0..count).filter(|&n| buckets[n].start == Start::Ahead).collect();
    ahead.sort_by_key(|&n| (buckets[n].due, n));
    let mut waits: Vec<usize> = (0..count).collect();
    waits.sort_by_key(|&n| (buckets[n].wait_at(len), n));
    let (mut ready, mut ahead, mut waits) =
        (ready.into_iter().peekable(), ahead.into_iter().peekable(), waits.into_iter().peekable());
    let mut under_way = None;
    let out = Vec::with_capacity(len);
    let mut emission = Emission { body, out, buckets, started: vec![false; count], ended: vec![false; count], behind: None };
    for place in (0..=len).filter(|place| !moving.contains(place)) {
        while let Some(n) = ready.next_if(|&n| emission.buckets[n].ready <= place) {
            emission.start(n);
        }
        while let Some(n) = waits.next_if(|&n| emission.buckets[n].wait_at(len) <= place) {
            emission.end(n);
        }
        if under_way.is_none_or(|n: usize| emission.ended[n])
            && let Some(n) = ahead.next_if(|&n| emission.buckets[n].ready <= place)
        {
            emission.start(n);
            under_way = Some(n);
        }
        emission.out.extend(emission.body.get(place).cloned());
    }
    emission.out
}

impl Flight {
    /// All that does not stay where it is.
    fn instrs(&self) -> impl Iterator<Item = usize> {
        self.lead.iter().chain(&self.trail).copied().chain([self.start, self.wait])
    }
}

impl Bucket {
    /// Where it is waited for at the latest.
    fn wait_at(&self, len: usize) -> usize {
        match self.wait {
            Wait::At(place) => place,
            Wait::Behind => self.due.min(len),
        }
    }
}

impl Emission {
    fn start(&mut self, n: usize) {
        if std::mem::replace(&mut self.started[n], true) {
            return;
        }
        self.buckets[n].after.clone().into_iter().for_each(|before| self.end(before));
        if self.buckets[n].wait == Wait::Behind
            && let Some(before) = self.behind.replace(n)
        {
            self.end(before);
        }
        let flights = &self.buckets[n].flights;
        self.out.extend(flights.iter().flat_map(|flight| &flight.lead).map(|&at| self.body[at].clone()));
        let mut start = self.body[flights[0].start].clone();
        start.operands = flights.iter().map(|flight| self.body[flight.start].operands[0]).collect();
        self.out.push(start);
    }

    fn end(&mut self, n: usize) {
        self.start(n);
        if std::mem::replace(&mut self.ended[n], true) {
            return;
        }
        let flights = &self.buckets[n].flights;
        let Action::Start { token, .. } = self.body[flights[0].start].action else {
            unreachable!("a flight begins with a start")
        };
        let mut wait = self.body[flights[0].wait].clone();
        wait.action = Action::Wait(token);
        wait.results = flights.iter().map(|flight| self.body[flight.wait].results[0]).collect();
        self.out.push(wait);
        self.out.extend(flights.iter().flat_map(|flight| &flight.trail).map(|&at| self.body[at].clone()));
    }
}
