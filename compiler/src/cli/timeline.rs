//! `dcc inspect ART.dcc --timeline`: which pass each stage runs when in a step, how long it waits, and what memory that takes.
//!
//! The order is the one in the artifact; times are estimated from the instructions of its programs.

use super::failure::Outcome;
use super::{output, tables};
use crate::compile::planned_bytes;
use crate::cost::{Machine, sections};
use crate::error::Error;
use crate::report::{self, size};
use crate::schedule::{self, Order, Timeline, draw};
use dcc_program::artifact::Artifact;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// Characters of the chart.
const COLUMNS: usize = 100;

/// A step of training as the simulator runs it, and the bytes that are planned for a rank of each stage.
pub struct Step {
    timeline: Timeline,
    planned: Vec<u64>,
    microbatches: u32,
}

impl Step {
    /// Errors: an artifact without training programs.
    pub fn of(artifact: &Artifact) -> Outcome<Step> {
        let programs = &artifact.train[..];
        let wrong = |what: &dyn std::fmt::Display| Error::usage(format!("--timeline: {what}"));
        if programs.is_empty() {
            return Err(wrong(&"the artifact does not train").into());
        }
        let order = Order::of_programs(programs).map_err(|e| wrong(&e))?;
        let costs = sections::costs(programs, order.layout, &Machine::default());
        let mut timeline = schedule::simulate(&order, &costs).map_err(|e| wrong(&e))?;
        // What areas hold is known.
        timeline.peak_bytes = programs.iter().map(|program| report::memory(program).activations).collect();
        Ok(Step { timeline, planned: programs.iter().map(planned_bytes).collect(), microbatches: order.microbatches })
    }

    /// From the first start to the last end.
    pub fn seconds(&self) -> f64 {
        self.timeline.length()
    }

    /// What the passes of all stages take, added up.
    pub fn busy(&self) -> f64 {
        self.timeline.events.iter().map(|events| busy(events)).sum()
    }

    /// Bytes that are planned for the fullest rank.
    pub fn fullest(&self) -> u64 {
        self.planned.iter().copied().max().unwrap_or(0)
    }

    pub fn text(&self) -> String {
        let Timeline { events, .. } = &self.timeline;
        let mut lines = vec![format!(
            "{}, {}: a step of {}, as estimated",
            tables::plural(events.len() as u64, "stage", "s"),
            tables::plural(u64::from(self.microbatches), "microbatch", "es"),
            milliseconds(self.timeline.length())
        )];
        lines.extend(draw::text(&self.timeline, COLUMNS).lines().map(str::to_owned));
        lines.push(format!(
            "{:<6} {:>12} {:>12} {:>12} {:>8} {:>12} {:>12}",
            "stage", "first start", "last end", "busy", "bubble", "activations", "planned"
        ));
        for (stage, events) in events.iter().enumerate() {
            let [start, end] = span(events);
            lines.push(format!(
                "{stage:<6} {:>12} {:>12} {:>12} {:>6.1} % {:>12} {:>12}",
                milliseconds(start),
                milliseconds(end),
                milliseconds(busy(events)),
                100.0 * self.waiting(events),
                size(self.timeline.peak_bytes[stage]),
                size(self.planned[stage]),
            ));
        }
        lines.join("\n") + "\n"
    }

    /// Times in seconds.
    pub fn json(&self) -> Value {
        let stage = |(stage, events): (usize, &Vec<schedule::Event>)| {
            let passes = events.iter().map(|e| json!({ "pass": e.pass.to_string(), "start": e.start, "end": e.end }));
            json!({
                "stage": stage,
                "busy": busy(events),
                "bubble": self.waiting(events),
                "activation_bytes": self.timeline.peak_bytes[stage],
                "planned_bytes": self.planned[stage],
                "passes": passes.collect::<Vec<_>>(),
            })
        };
        json!({
            "schema": 1,
            "kind": "timeline",
            "microbatches": self.microbatches,
            "seconds": self.timeline.length(),
            "bubble": self.timeline.bubble,
            "stages": self.timeline.events.iter().enumerate().map(stage).collect::<Vec<_>>(),
        })
    }

    pub fn draw(&self, path: &Path) -> Outcome<()> {
        output::file(path, |out| out.write_all(draw::svg(&self.timeline, "ms", 1e-3).as_bytes()))
    }

    /// The part of the step in which a stage does nothing.
    fn waiting(&self, events: &[schedule::Event]) -> f64 {
        if self.timeline.cost > 0.0 { (1.0 - busy(events) / self.timeline.cost).max(0.0) } else { 0.0 }
    }
}

fn span(events: &[schedule::Event]) -> [f64; 2] {
    [events.first().map_or(0.0, |e| e.start), events.last().map_or(0.0, |e| e.end)]
}

fn busy(events: &[schedule::Event]) -> f64 {
    events.iter().map(|e| e.end - e.start).sum()
}

pub fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}
