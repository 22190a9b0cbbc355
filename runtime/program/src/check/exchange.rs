//! What stages say to each other: messages and sums over stages, in the order of each; that they fit, and that no stage waits
//! for ever.
//!
//! A start blocks nothing; a wait ends when all ends have started. So running all stages as far as they come, again and
//! again, gets stuck exactly where happens-before (program order, the k-th start of a channel or group as one) has a cycle.
//! Ranks of one stage need not be told apart: they start the same transfers in the same order, a message goes between ranks
//! of equal coordinates, and so a cycle among ranks is one among stages.

use super::{CheckError, Fault, error};
use crate::program::*;
use crate::types::{Reduce, TensorType};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Channel {
    /// From stage to stage, on a lane.
    Message(u32, u32, u32),
    /// A sum over the stages of a group.
    Group(String),
}

#[derive(Clone, Debug)]
pub(super) enum Event {
    Start {
        channel: Channel,
        members: Vec<u32>,
        ty: Box<TensorType>,
        reduce: Option<Reduce>,
        microbatch: Option<u32>,
    },
    /// Of the start with that index in the trace.
    Wait {
        start: usize,
        step: usize,
    },
}

/// The starts and waits of one stage that concern others.
#[derive(Default)]
pub(super) struct Trace {
    events: Vec<Event>,
}

impl Trace {
    pub fn push(&mut self, event: Event) -> usize {
        self.events.push(event);
        self.events.len() - 1
    }
}

impl Event {
    /// `None` where only ranks of one stage take part.
    pub fn of(p: &Program, transfer: &Transfer, ty: TensorType, step: usize) -> Option<Event> {
        let (channel, members, reduce) = match transfer {
            Transfer::Send { to, lane } => (Channel::Message(p.stage, *to, *lane), vec![p.stage, *to], None),
            Transfer::Recv { from, lane } => (Channel::Message(*from, p.stage, *lane), vec![*from, p.stage], None),
            Transfer::StageSum { group, reduce } => {
                let group = &p.groups[*group as usize];
                (Channel::Group(group.name.clone()), group.stages.clone(), Some(*reduce))
            }
            _ => return None,
        };
        let microbatch = ty.is_per_microbatch(&p.mesh).then(|| p.order[step].microbatch);
        Some(Event::Start { channel, members, ty: Box::new(ty), reduce, microbatch })
    }

    pub fn wait(start: usize, step: usize) -> Event {
        Event::Wait { start, step }
    }

    fn text(&self, p: &Program) -> String {
        match self {
            Event::Start { ty, reduce, microbatch, .. } => {
                let what = reduce.map_or(String::new(), |r| format!("{} of ", r.name()));
                let of = microbatch.map_or(String::new(), |mb| format!(" of microbatch {mb}"));
                format!("{what}{}{of}", ty.text(&p.mesh))
            }
            Event::Wait { .. } => String::new(),
        }
    }
}

pub(super) fn traces(programs: &[Program], traces: &[Trace]) -> Result<(), CheckError> {
    let mut channels: BTreeMap<Channel, BTreeMap<u32, Vec<&Event>>> = BTreeMap::new();
    let mut members_of: BTreeMap<Channel, Vec<u32>> = BTreeMap::new();
    for (stage, trace) in (0u32..).zip(traces) {
        for event in &trace.events {
            if let Event::Start { channel, members, .. } = event {
                channels.entry(channel.clone()).or_default().entry(stage).or_default().push(event);
                members_of.entry(channel.clone()).or_insert_with(|| members.clone());
            }
        }
    }
    for (channel, by_stage) in &channels {
        matched(programs, channel, &members_of[channel], by_stage).map_err(|what| {
            let at = match channel {
                Channel::Message(from, to, _) => format!("messages from stage {from} to stage {to}"),
                Channel::Group(name) => format!("group {name}"),
            };
            error(at, (Fault::Unmatched, what))
        })?;
    }
    same_order(traces, &members_of)?;
    ends(programs, traces)
}

/// The k-th start of every member is of the same value.
fn matched(
    programs: &[Program],
    channel: &Channel,
    members: &[u32],
    by_stage: &BTreeMap<u32, Vec<&Event>>,
) -> Result<(), String> {
    let p = &programs[0];
    let of = |stage: u32| by_stage.get(&stage).map_or(&[][..], Vec::as_slice);
    let first = of(members[0]);
    for &stage in &members[1..] {
        for (k, (a, b)) in first.iter().zip(of(stage)).enumerate() {
            let (a, b) = (a.text(p), b.text(p));
            if a != b {
                return Err(format!("number {k} is {a} on stage {}, {b} on stage {stage}", members[0]));
            }
        }
        if first.len() != of(stage).len() {
            let (a, b) = (first.len(), of(stage).len());
            return Err(match channel {
                Channel::Message(from, to, _) => format!("stage {from} sends {a}, stage {to} receives {b}"),
                Channel::Group(_) => format!("stage {} takes part in {a}, stage {stage} in {b}", members[0]),
            });
        }
    }
    Ok(())
}

/// Two stages take part in their common groups in the same order: a communicator need not run two at once.
fn same_order(traces: &[Trace], members_of: &BTreeMap<Channel, Vec<u32>>) -> Result<(), CheckError> {
    let pairs: BTreeSet<(u32, u32)> = members_of
        .iter()
        .filter(|(channel, _)| matches!(channel, Channel::Group(_)))
        .flat_map(|(_, members)| members.iter().flat_map(|&a| members.iter().map(move |&b| (a, b))))
        .filter(|(a, b)| a < b)
        .collect();
    for (a, b) in pairs {
        let names = |stage: u32| -> Vec<&str> {
            let common = traces[stage as usize].events.iter().filter_map(|e| match e {
                Event::Start { channel: Channel::Group(name), members, .. } if members.contains(&a) && members.contains(&b) => {
                    Some(name.as_str())
                }
                _ => None,
            });
            common.collect()
        };
        let (x, y) = (names(a), names(b));
        if let Some(k) = (0..x.len().min(y.len())).find(|&k| x[k] != y[k]) {
            let what = format!("number {k} of their common sums is {} on stage {a}, {} on stage {b}", x[k], y[k]);
            return Err(error(format!("stages {a} and {b}"), (Fault::Unmatched, what)));
        }
    }
    Ok(())
}

/// Every stage comes to its end.
fn ends(programs: &[Program], traces: &[Trace]) -> Result<(), CheckError> {
    let mut at = vec![0; traces.len()];
    // Starts so far, by channel and stage; the number of each start in its channel.
    let mut started: BTreeMap<(&Channel, u32), usize> = BTreeMap::new();
    let mut numbers: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new(); traces.len()];
    loop {
        let mut progress = false;
        for (stage, trace) in traces.iter().enumerate() {
            while let Some(event) = trace.events.get(at[stage]) {
                match event {
                    Event::Start { channel, .. } => {
                        let count = started.entry((channel, stage as u32)).or_default();
                        *count += 1;
                        numbers[stage].insert(at[stage], *count);
                    }
                    Event::Wait { start, .. } => {
                        let Event::Start { channel, members, .. } = &trace.events[*start] else { break };
                        let number = numbers[stage][start];
                        let ready = |m: &u32| started.get(&(channel, *m)).is_some_and(|&n| n >= number);
                        if !members.iter().all(ready) {
                            break;
                        }
                    }
                }
                at[stage] += 1;
                progress = true;
            }
        }
        let stuck: Vec<usize> = (0..traces.len()).filter(|&s| at[s] < traces[s].events.len()).collect();
        if stuck.is_empty() {
            return Ok(());
        }
        if !progress {
            let place = |&s: &usize| {
                let p = &programs[s];
                let Event::Wait { start, step } = traces[s].events[at[s]] else { return format!("stage {s}") };
                let step = &p.order[step];
                let kind = p.sections[step.section as usize].id().name();
                let what = traces[s].events[start].text(p);
                format!("stage {s} in {kind} of microbatch {} for {what}", step.microbatch)
            };
            let waits: Vec<String> = stuck.iter().map(place).collect();
            return Err(error(
                "the program set".to_owned(),
                (Fault::Deadlock, format!("waits in a circle: {}", waits.join("; "))),
            ));
        }
    }
}
