//! The compile report: for people on stderr, for programs as JSON.

use super::compile::Built;
use crate::compile::Compiled;
use crate::cost::Machine;
use crate::graph::Graph;
use crate::import::Parameter;
use crate::plan;
use crate::report::{self, StageReport, Traffic};
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
        let plan = plan::Report::of(&compiled.training.graph, &compiled.plan, &compiled.placed, &Machine::default());
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
        let mut lines: Vec<String> = imported.warnings.iter().map(|warning| format!("warning: {warning}")).collect();
        lines.push(format!(
            "   Reading {} (opset {}, {} nodes after folding, {} parameters, {})",
            self.built.source.name,
            imported.opset,
            nodes(&imported.graph),
            count(elements),
            size(bytes)
        ));
        lines.push(format!(
            "  Planning world {} = dp {} × tp {tensor} × pp {}, {}, {} of {}",
            plan.mesh.world(),
            mesh("dp"),
            mesh("pp"),
            plan.schedule.name(),
            plural(u64::from(batch.accumulate), "microbatch", "es"),
            plural(batch.micro, "sample", "s"),
        ));
        lines.push(format!("  loss      {}", training.loss));
        lines.push(format!("  trains    {}", selected(imported.parameters.iter(), &training.trained)));
        if !training.frozen.is_empty() {
            lines.push(format!("  frozen    {}", listed(&training.frozen)));
        }
        lines
    }

    /// The whole report.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = self.head();
        lines.extend(stage_table(&self.stages, &self.plan.stages));
        lines.extend(memory_table(&self.stages));
        let traffic = traffic(&self.stages);
        let bubble = format!("bubble {:.1} %", self.plan.bubble * 100.0);
        lines.push(match traffic.is_empty() {
            true => format!("  communication per step   none   {bubble}"),
            false => format!("  communication per step   {}   {bubble}", traffic.join("   ")),
        });
        let counts: Vec<String> = self.stages.iter().map(|s| s.instructions.to_string()).collect();
        let shown =
            if counts.len() > 8 { format!("{} … {}", counts[0], counts[counts.len() - 1]) } else { counts.join(" + ") };
        lines.push(format!("  checked   types, collectives, deadlock, memory: {shown} instructions"));
        lines
    }

    pub fn json(&self, out: &Path, bytes: Option<u64>) -> Value {
        let Compiled { imported, training, batch, plan, .. } = &self.built.compiled;
        let axes = plan.mesh.axes.iter().map(|axis| (axis.name.clone(), json!(axis.size)));
        json!({
            "schema": SCHEMA,
            "model": self.built.source.name,
            "opset": imported.opset,
            "nodes": nodes(&imported.graph),
            "parameters": elements(imported.parameters.iter()),
            "warnings": imported.warnings,
            "loss": training.loss,
            "trained": training.trained,
            "frozen": training.frozen,
            "batch": { "global": batch.global, "micro": batch.micro, "accumulate": batch.accumulate },
            "mesh": axes.collect::<serde_json::Map<_, _>>(),
            "schedule": plan.schedule.name(),
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

fn nodes(graph: &Graph) -> usize {
    graph.live().iter().filter(|live| **live).count()
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

fn stage_table(stages: &[StageReport], plans: &[plan::StageReport]) -> Vec<String> {
    let width = stages.iter().map(|stage| stage.layers.chars().count()).max().unwrap_or(0).clamp(6, 48);
    let head = format!("  stage  {:<width$}  {:>11}  {:>15}  {:>7}", "layers", "params/rank", "flops/rank/step", "balance");
    let row = |(stage, plan): (&StageReport, &plan::StageReport)| {
        let balance = plan.balance * 100.0;
        let (parameters, flops) = (count(stage.parameters), count(stage.flops));
        let layers = shortened(&stage.layers, width);
        format!("  {:>5}  {layers:<width$}  {parameters:>11}  {flops:>15}  {balance:>5.0} %", stage.stage)
    };
    std::iter::once(head).chain(stages.iter().zip(plans).map(row)).collect()
}

fn memory_table(stages: &[StageReport]) -> Vec<String> {
    let cells = |first: &str, rest: [&str; 6]| {
        let rest: String = rest.iter().map(|cell| format!("  {cell:>12}")).collect();
        format!("  {first:>5}{rest}")
    };
    let head = cells("rank", ["weights", "optimizer", "accumulators", "activations", "scratch", "peak"]);
    let row = |stage: &StageReport| {
        let m = &stage.memory;
        let sizes = [m.weights, m.optimizer, m.accumulators, m.activations, m.scratch, m.peak].map(size);
        cells(&format!("of {}", stage.stage), sizes.each_ref().map(String::as_str))
    };
    std::iter::once(head).chain(stages.iter().map(row)).collect()
}

/// Transfers of the stage that does most of each kind.
fn traffic(stages: &[StageReport]) -> Vec<String> {
    let mut most: Vec<&Traffic> = Vec::new();
    for traffic in stages.iter().flat_map(|stage| &stage.traffic) {
        match most.iter_mut().find(|known| known.axes == traffic.axes && known.kind == traffic.kind) {
            Some(known) if known.bytes >= traffic.bytes => {}
            Some(known) => *known = traffic,
            None => most.push(traffic),
        }
    }
    let text = |t: &&Traffic| format!("{} {} {} × {}", t.axes, t.kind, t.count, size(t.bytes / t.count.max(1)));
    most.iter().map(text).collect()
}

fn shortened(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

fn plural(n: u64, word: &str, ending: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}{ending}") }
}

/// `10.75 M`: three to four digits.
pub fn count(n: u64) -> String {
    let units = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let n = n as f64;
    match units.iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", n / unit),
        None => format!("{n}"),
    }
}

/// `41.0 MiB`.
pub fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, name)) => format!("{:.1} {name}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0, 999, 10_750_000].map(count), ["0", "999", "10.75 M"]);
        assert_eq!([0, 1023, 1024, 42_991_616].map(size), ["0 B", "1023 B", "1.0 KiB", "41.0 MiB"]);
        assert_eq!(shortened("a long one", 5), "a lo…");
    }
}
