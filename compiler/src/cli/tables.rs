//! The compile report: for people on stderr, for programs as JSON.

mod stages;

pub use stages::{communication, memory, work};

use super::compile::Built;
use crate::compile::Compiled;
use crate::cost::Machine;
use crate::graph::Graph;
use crate::import::Parameter;
use crate::plan;
use crate::recompute::Repeats;
use crate::report::{self, StageReport, count, size};
use dcc_program::artifact::Data;
use serde_json::{Value, json};
use std::path::Path;

/// Version of the JSON's form.
const SCHEMA: u32 = 1;

pub struct Report<'a> {
    built: &'a Built,
    stages: Vec<StageReport>,
    /// The planner's estimates.
    plan: plan::Report,
}

impl<'a> Report<'a> {
    pub fn new(built: &'a Built) -> Report<'a> {
        let compiled = &built.compiled;
        let stages = report::stages(&compiled.artifact.train);
        let Compiled { training, plan, placed, order, .. } = compiled;
        let plan = plan::Report::of(&training.graph, plan, placed, order, &Machine::default());
        Report { built, stages, plan }
    }

    /// What was read and what was chosen.
    pub fn head(&self) -> Vec<String> {
        let Compiled { imported, training, batch, plan, .. } = &self.built.compiled;
        let parameters = || imported.parameters.iter();
        let elements = elements(parameters());
        let bytes: u64 = parameters().map(|p| p.tensor.elements() * p.tensor.dtype.bytes()).sum();
        let mesh = |axis: &str| plan.mesh.size_of(axis);
        let tensor = plan.mesh.space().filter(|&axis| plan.mesh.name(axis).starts_with("tp"));
        let tensor: u32 = tensor.map(|axis| plan.mesh.size(axis)).product();
        // A single stage has no order to choose.
        let chunks = match plan.layout().chunks {
            1 => String::new(),
            chunks => format!(" over {chunks} virtual stages"),
        };
        let schedule = if plan.parts() > 1 { format!("{}{chunks}, ", plan.schedule.name()) } else { String::new() };
        let mut lines: Vec<String> = imported.warnings.iter().map(|warning| format!("warning: {}", short(warning))).collect();
        lines.push(format!(
            "   Reading {} (opset {}, {}, {} parameters, {})",
            self.built.source.name,
            imported.opset,
            plural(nodes(&imported.graph) as u64, "node", "s"),
            count(elements),
            size(bytes)
        ));
        let others = ["cp", "ep"].into_iter().filter(|axis| plan.mesh.axis(axis).is_some());
        let others: String = others.map(|axis| format!(" × {axis} {}", mesh(axis))).collect();
        lines.push(format!(
            "  Planning world {} = dp {}{} × tp {tensor} × pp {}, {schedule}{} of {}",
            plan.mesh.world(),
            mesh("dp"),
            others,
            mesh("pp"),
            plural(u64::from(batch.accumulate), "microbatch", "es"),
            plural(batch.micro, "sample", "s"),
        ));
        if plan.repeats != Repeats::NONE {
            lines.push(format!("  recompute {}", plan.repeats.text()));
        }
        if plan.sequence_parallel {
            lines.push(format!("  shards    what lies between split products, along the sequence over tp {tensor}"));
        }
        lines.extend(training.mixed.map(|mixed| format!("  precision {}", mixed.text())));
        lines.push(format!("  loss      {}", training.loss));
        lines.push(format!("  trains    {}", selected(imported.parameters.iter(), &training.trained)));
        if !training.frozen.is_empty() {
            lines.push(format!("  frozen    {}", listed(&training.frozen)));
        }
        lines
    }

    /// What a run will have to fill.
    pub fn missing(&self) -> Option<String> {
        let Built { source, compiled } = self.built;
        let absent = compiled.artifact.tensors.iter().filter(|tensor| matches!(tensor.data, Data::Absent)).count();
        let files = source.model.external_locations();
        let files: Vec<&str> = files.iter().filter(|f| !source.external_bytes.contains_key(*f)).map(String::as_str).collect();
        let text = || format!("  no data   {} ({} is missing)", plural(absent as u64, "tensor", "s"), files.join(", "));
        (absent > 0).then(|| format!("{}: run with --init or --weights", text()))
    }

    /// What the fullest rank will hold, for a run.
    pub fn planned(&self) -> String {
        let peak = self.stages.iter().map(|stage| stage.memory.peak).max().unwrap_or(0);
        format!("  memory    {} planned for the fullest rank", size(peak))
    }

    /// The whole report.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.head();
        lines.extend(self.missing());
        let balance: Vec<f64> = self.plan.stages.iter().map(|stage| stage.balance).collect();
        lines.extend(work(&self.stages, &balance));
        lines.extend(memory(&self.stages));
        lines.extend(communication(&self.stages));
        if self.stages.len() > 1 {
            lines.push(format!("  bubble    {:.1} % of a step, as estimated", self.plan.bubble * 100.0));
        }
        let counts: Vec<String> = self.stages.iter().map(|s| s.instructions.to_string()).collect();
        let shown =
            if counts.len() > 8 { format!("{} … {}", counts[0], counts[counts.len() - 1]) } else { counts.join(" + ") };
        lines.push(format!("  checked   types, collectives, deadlock, memory: {shown} instructions"));
        lines
    }

    pub fn json(&self, out: &Path, bytes: Option<u64>) -> Value {
        let Compiled { imported, training, batch, plan, .. } = &self.built.compiled;
        let others = imported.parameters.iter().map(|p| (p.tensor.name.clone(), json!(p.other_names())));
        let aliases: serde_json::Map<_, _> = others.filter(|(_, names)| *names != json!([])).collect();
        let axes = plan.mesh.axes.iter().map(|axis| (axis.name.clone(), json!(axis.size)));
        json!({
            "schema": SCHEMA,
            "model": self.built.source.name,
            "opset": imported.opset,
            "nodes": nodes(&imported.graph),
            "parameters": elements(imported.parameters.iter()),
            "warnings": imported.warnings,
            "precision": training.mixed.map(|mixed| mixed.text()),
            "loss": training.loss,
            "trained": training.trained,
            "frozen": training.frozen,
            "aliases": aliases,
            "buffers": imported.buffers.iter().filter(|name| training.trained.contains(name)).collect::<Vec<_>>(),
            "batch": { "global": batch.global, "micro": batch.micro, "accumulate": batch.accumulate },
            "mesh": axes.collect::<serde_json::Map<_, _>>(),
            "schedule": plan.schedule.name(),
            "virtual_stages": plan.layout().chunks,
            "recompute": plan.repeats.text(),
            "sequence_parallel": plan.sequence_parallel,
            "bubble": self.plan.bubble,
            "stages": self.stages,
            "balance": self.plan.stages.iter().map(|stage| stage.balance).collect::<Vec<_>>(),
            "artifact": out.display().to_string(),
            "artifact_bytes": bytes,
        })
    }
}

fn elements<'a>(parameters: impl Iterator<Item = &'a Parameter>) -> u64 {
    parameters.map(|p| p.tensor.elements()).sum()
}

/// Nodes that compute something.
fn nodes(graph: &Graph) -> usize {
    let live = graph.live();
    graph.ids().filter(|id| live[id.0 as usize] && !graph[*id].operands.is_empty()).count()
}

fn selected<'a>(parameters: impl Iterator<Item = &'a Parameter>, names: &[String]) -> String {
    let chosen = parameters.filter(|p| names.binary_search(&p.tensor.name).is_ok());
    format!("{}, {} elements", plural(names.len() as u64, "tensor", "s"), count(elements(chosen)))
}

/// `3 tensors: a, b, c`, a few of them.
fn listed(names: &[String]) -> String {
    let some: Vec<&str> = names.iter().take(4).map(String::as_str).collect();
    let more = if names.len() > some.len() { ", …" } else { "" };
    format!("{}: {}{more}", plural(names.len() as u64, "tensor", "s"), some.join(", "))
}

/// A warning with three names of each list; `--json` has all of them.
fn short(warning: &str) -> String {
    let mut parts = warning.split("`, `");
    let (mut text, mut names) = (parts.next().unwrap_or_default().to_owned(), 1);
    for part in parts {
        names += 1;
        let rest = part.split_once('`').map(|(_, rest)| rest);
        match names {
            ..=3 => text += &format!("`, `{part}"),
            _ => {
                if names == 4 {
                    text += "`, …";
                }
                text += rest.unwrap_or_default();
            }
        }
        if rest.is_some() {
            names = 1;
        }
    }
    text
}

pub fn plural(n: u64, word: &str, ending: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}{ending}") }
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(
            short("`a`, `b`, `c`, `d`, `e` from `f`, `g`; `h`, `i`, `j`, `k`"),
            "`a`, `b`, `c`, … from `f`, `g`; `h`, `i`, `j`, …"
        );
        assert_eq!(short("no names, and `one`"), "no names, and `one`");
    }
}
