//! Transfers that start and are waited for as one, and where.
//!
//! A bucket is closed once its latency is a tenth of its time. A ring over n ranks takes (n−1)/n · bytes/link + (n−1) · latency
//! (`Machine::collective`), so at 10 · n · latency · link bytes: larger ones save little time and start later. Buckets of gradients, and
//! that they overlap with the backward pass, are of Li et al. 2020 (PyTorch DDP, arXiv 2006.15704), section 3.2.

use super::profile::Profile;
use super::windows::Flight;
use crate::plan::{Overlap, Plan};
use dcc_program::program::{MOST_TENSORS, Transfer};

/// Flights of one transfer.
pub(super) struct Bucket {
    pub flights: Vec<Flight>,
    pub start: Start,
    pub wait: Wait,
    /// The first place where all may start, and the last where all may be waited for.
    pub ready: usize,
    pub due: usize,
    /// Buckets that must have ended before this one starts.
    pub after: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Start {
    /// As soon as all operands are there.
    Ready,
    /// When the one before is being used.
    Ahead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wait {
    /// Here at the latest.
    At(usize),
    /// When the next one starts.
    Behind,
}

/// Buckets in the order in which they are closed.
pub(super) fn fill(flights: Vec<Flight>, plan: &Plan, profile: &mut Profile) -> Vec<Bucket> {
    let mut bucket_of = vec![0; flights.len()];
    let mut planned: Vec<(usize, Bucket)> = flights.into_iter().map(|flight| alone(flight, profile)).enumerate().collect();
    planned.sort_by_key(|(n, bucket)| match bucket.start {
        Start::Ready => (bucket.ready, *n),
        Start::Ahead => (bucket.due, *n),
    });
    let mut buckets: Vec<Bucket> = Vec::new();
    for (n, bucket) in planned {
        let joined = buckets.iter().rposition(|other| other.is_like(&bucket)).filter(|&at| buckets[at].takes(&bucket, plan));
        bucket_of[n] = joined.unwrap_or(buckets.len());
        match joined {
            Some(at) => buckets[at].join(bucket),
            None => buckets.push(bucket),
        }
    }
    for bucket in &mut buckets {
        bucket.after = bucket.flights.iter().flat_map(|flight| &flight.after).map(|&flight| bucket_of[flight]).collect();
    }
    buckets
}

/// One flight and when it is to start and to be waited for.
fn alone(mut flight: Flight, profile: &mut Profile) -> Bucket {
    let start = if flight.early_costs && flight.is_upfront { Start::Ahead } else { Start::Ready };
    if flight.early_costs && start == Start::Ready {
        // No earlier than its result had its memory.
        flight.ready = flight.start;
    }
    let wait = match (flight.late_costs, flight.is_read) {
        (false, _) => Wait::At(flight.due),
        (true, false) => Wait::Behind,
        (true, true) => Wait::At(profile.extend(&flight)),
    };
    Bucket { start, wait, ready: flight.ready, due: flight.due, flights: vec![flight], after: Vec::new() }
}

impl Bucket {
    /// Whether one transfer could be both.
    fn is_like(&self, other: &Bucket) -> bool {
        let (a, b) = (&self.flights[0], &other.flights[0]);
        let kinds = |bucket: &Bucket| (bucket.start, bucket.wait == Wait::Behind, bucket.flights[0].is_read);
        a.transfer == b.transfer && a.dtype == b.dtype && a.level == b.level && kinds(self) == kinds(other)
    }

    /// Whether there is room for another of its kind, which neither delays the start of what is read nor is needed before all are there.
    fn takes(&self, other: &Bucket, plan: &Plan) -> bool {
        let Overlap::Buckets { bytes_per_rank } = plan.overlap else { return false };
        let full = bytes_per_rank.saturating_mul(u64::from(ranks(&self.flights[0], plan)));
        let bytes: u64 = self.flights.iter().map(|flight| flight.bytes).sum();
        let prompt = !other.flights[0].is_read || self.start == Start::Ahead || other.ready <= self.ready;
        bytes < full && self.flights.len() < MOST_TENSORS && self.ready.max(other.ready) <= self.due.min(other.due) && prompt
    }

    fn join(&mut self, other: Bucket) {
        self.ready = self.ready.max(other.ready);
        self.due = self.due.min(other.due);
        if let (Wait::At(a), Wait::At(b)) = (self.wait, other.wait) {
            self.wait = Wait::At(a.min(b));
        }
        self.flights.extend(other.flights);
    }
}

/// Members of a transfer's group.
fn ranks(flight: &Flight, plan: &Plan) -> u32 {
    match &flight.transfer {
        Transfer::AllReduce { axes, .. } => axes.iter().map(|&axis| plan.mesh.size(axis)).product(),
        Transfer::ReduceScatter { axis, .. } | Transfer::AllGather { axis, .. } | Transfer::AllToAll { axis, .. } => {
            plan.mesh.size(*axis)
        }
        Transfer::Send { .. } | Transfer::Recv { .. } | Transfer::StageSum { .. } => 1,
    }
}
