//! What a plan means in numbers: work and parameters of each stage, communication of a step, the bubble.

use super::forward::Forward;
use super::{Plan, text};
use crate::cost::{self, Machine};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use crate::schedule::{self, Costs, Order, PartCost};
use dcc_program::AxisId;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Of one step. `--json` prints it as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Names and sizes of the mesh axes.
    pub mesh: Vec<(String, u32)>,
    pub world: u32,
    pub schedule: &'static str,
    /// What backward computes again: `none`, `selective 3/8`.
    pub recompute: String,
    pub stages: Vec<StageReport>,
    pub communication: Vec<Traffic>,
    /// The part of a step in which the slowest stage waits, by estimated times.
    pub bubble: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageReport {
    /// What its parameters are named after: `wte, h.0–h.5`.
    pub layers: String,
    /// Parameters that one rank holds.
    pub parameters: u64,
    /// Multiplications and additions in products that one rank computes in a step, gradients included.
    pub flops: f64,
    /// Estimated time as a part of the slowest stage's.
    pub balance: f64,
}

/// Messages of one kind and size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Traffic {
    pub axes: String,
    pub kind: &'static str,
    /// In a step, over all stages.
    pub count: u64,
    /// Of each, on one rank.
    pub bytes: u64,
}

impl Report {
    /// `placed` is what `place` made of `graph` under `plan`, `order` that of its passes.
    pub fn of(graph: &Graph, plan: &Plan, placed: &Graph, order: &Order, machine: &Machine) -> Report {
        let forward = Forward::of(graph);
        let layout = plan.layout();
        let mut works = vec![Work::default(); plan.stages() as usize];
        let mut parts = vec![Work::default(); layout.parts() as usize];
        for (&id, &part) in &plan.stages {
            works[layout.place(part).0 as usize].add(&forward, plan, machine, id);
            parts[part as usize].add(&forward, plan, machine, id);
        }
        let transfers = vec![0.0; parts.len() - 1];
        let costs = Costs { parts: parts.iter().map(Work::cost).collect(), transfers };
        let slowest = works.iter().map(|w| w.seconds.total()).fold(f64::MIN_POSITIVE, f64::max);
        let steps = f64::from(plan.microbatches());
        let report = |work: &Work| StageReport {
            layers: layers(&work.names),
            parameters: work.parameters.iter().map(|&id| local_elements(&forward, plan, id)).sum(),
            flops: work.flops * steps,
            balance: work.seconds.total() / slowest,
        };
        Report {
            mesh: plan.mesh.axes.iter().map(|a| (a.name.clone(), a.size)).collect(),
            world: plan.mesh.world(),
            schedule: plan.schedule.name(),
            recompute: plan.repeats.text(),
            stages: works.iter().map(report).collect(),
            communication: communication(plan, placed),
            bubble: schedule::simulate(order, &costs).expect("our schedules run").bubble,
        }
    }

    /// The table of `dcc compile`.
    pub fn text(&self) -> String {
        let width = self.stages.iter().map(|s| s.layers.chars().count()).max().unwrap_or(0).max("layers".len());
        let mut out = format!("stage  {:width$}  params/rank  flops/rank/step  balance\n", "layers");
        for (number, stage) in self.stages.iter().enumerate() {
            let (parameters, flops) = (scaled(stage.parameters as f64), scaled(stage.flops));
            let balance = 100.0 * stage.balance;
            out += &format!("{number:<5}  {:width$}  {parameters:>11}  {flops:>15}  {balance:>5.1} %\n", stage.layers);
        }
        out + &format!("communication per step{}   bubble {:.1} %\n", self.communication_text(), 100.0 * self.bubble)
    }

    /// Each kind once: `tp all_reduce 96 × 3.0 MiB`, or, of messages of different sizes, their number and the bytes of all.
    fn communication_text(&self) -> String {
        let mut kinds: Vec<(&str, &str)> = Vec::new();
        for traffic in &self.communication {
            if !kinds.contains(&(&traffic.axes, traffic.kind)) {
                kinds.push((&traffic.axes, traffic.kind));
            }
        }
        let text = |&(axes, kind): &(&str, &str)| {
            let all: Vec<&Traffic> = self.communication.iter().filter(|t| (t.axes.as_str(), t.kind) == (axes, kind)).collect();
            let count: u64 = all.iter().map(|t| t.count).sum();
            match all[..] {
                [one] => format!("   {axes} {kind} {count} × {}", bytes(one.bytes)),
                _ => format!("   {axes} {kind} {count} of {}", bytes(all.iter().map(|t| t.count * t.bytes).sum())),
            }
        };
        kinds.iter().map(text).collect()
    }
}

#[derive(Clone, Debug, Default)]
struct Work {
    seconds: cost::Seconds,
    /// Of the backward seconds, those of gradients of parameters.
    weight_seconds: f64,
    flops: f64,
    /// What its nodes read, but for nodes of stages: all that these are made of.
    seen: BTreeSet<NodeId>,
    parameters: BTreeSet<NodeId>,
    /// Of the parameters, in the order they are read.
    names: Vec<String>,
}

impl Work {
    fn cost(&self) -> PartCost {
        let Work { seconds, weight_seconds, .. } = *self;
        PartCost { backward_weight: weight_seconds, ..PartCost::whole(seconds.forward, seconds.backward - weight_seconds) }
    }

    fn add(&mut self, forward: &Forward, plan: &Plan, machine: &Machine, id: NodeId) {
        let node = &forward.graph[id];
        if let Some(strategy) = plan.strategies.get(&id) {
            let seconds = cost::op(forward, id, strategy, &plan.mesh, machine);
            self.seconds += seconds;
            self.weight_seconds += seconds.backward * cost::of_weights(forward, id);
            let once = cost::flops(&node.op, forward.rule(id), strategy, &plan.mesh);
            self.flops += once * (1.0 + cost::repeats(forward, id));
        }
        let mut open: Vec<NodeId> = node.operands.to_vec();
        while let Some(next) = open.pop() {
            if !self.seen.insert(next) {
                continue;
            }
            match &forward.graph[next].op {
                Op::Param(param) if self.parameters.insert(next) => self.names.push(param.name.clone()),
                _ if !plan.stages.contains_key(&next) => open.extend(&forward.graph[next].operands),
                _ => {}
            }
        }
    }
}

fn local_elements(forward: &Forward, plan: &Plan, param: NodeId) -> u64 {
    let ty = forward.graph.ty(param);
    match plan.strategies.get(&param) {
        Some(strategy) => ty.shape.iter().zip(&strategy.factors).map(|(&size, axes)| plan.mesh.block(size, axes)).product(),
        None => ty.elements(),
    }
}

/// Collectives and transfers of the placed graph, those of sections that run per microbatch as often as these.
fn communication(plan: &Plan, placed: &Graph) -> Vec<Traffic> {
    let mut counts: BTreeMap<(String, &'static str, u64), u64> = BTreeMap::new();
    let live = placed.live();
    for id in placed.ids().filter(|id| live[id.0 as usize]) {
        let node = &placed[id];
        let over = |axes: &[AxisId]| text::names(&plan.mesh, axes);
        let (axes, of) = match &node.op {
            Op::AllReduce(op) => (over(&op.axes), node.operands[0]),
            Op::ReduceScatter(op) => (over(&[op.axis]), node.operands[0]),
            Op::AllToAll(op) => (over(&[op.axis]), node.operands[0]),
            Op::AllGather(op) => (over(&[op.axis]), id),
            Op::Transfer(_) | Op::StageSum(_) => ("pp".to_owned(), id),
            _ => continue,
        };
        let times = if node.phase.is_per_microbatch() { u64::from(plan.microbatches()) } else { 1 };
        *counts.entry((axes, node.op.name(), placed.ty(of).local_bytes(&plan.mesh))).or_default() += times;
    }
    let mut traffic: Vec<Traffic> =
        counts.into_iter().map(|((axes, kind, bytes), count)| Traffic { axes, kind, count, bytes }).collect();
    traffic.sort_by_key(|t| std::cmp::Reverse(t.count * t.bytes));
    traffic
}

/// `wte, h.0–h.5` of parameter names: the part up to a layer's number, or the module that holds the tensor.
fn layers(names: &[String]) -> String {
    let mut runs: Vec<(String, Option<u64>, Option<u64>)> = Vec::new();
    for name in names {
        let parts: Vec<&str> = name.split(['.', '/']).collect();
        let number = parts.iter().skip(1).position(|part| part.parse::<u64>().is_ok()).map(|i| i + 1);
        let (label, index) = match number {
            Some(i) => (parts[i - 1].to_owned(), parts[i].parse().ok()),
            None => (parts[parts.len().saturating_sub(2)].to_owned(), None),
        };
        match runs.iter_mut().find(|run| run.0 == label && run.1.is_some() == index.is_some()) {
            Some(run) => (run.1, run.2) = (run.1.min(index), run.2.max(index)),
            None => runs.push((label, index, index)),
        }
    }
    let text = |(label, first, last): &(String, Option<u64>, Option<u64>)| match (first, last) {
        (Some(first), Some(last)) if first == last => format!("{label}.{first}"),
        (Some(first), Some(last)) => format!("{label}.{first}–{label}.{last}"),
        _ => label.clone(),
    };
    let all: Vec<String> = runs.iter().map(text).collect();
    match all.len() {
        0..=4 => all.join(", "),
        more => format!("{}, … {} in all", all[..3].join(", "), more),
    }
}

/// Three digits and a decimal prefix.
fn scaled(number: f64) -> String {
    let (mut value, mut prefix) = (number, "");
    for next in ["k", "M", "G", "T", "P", "E"] {
        if value < 999.5 {
            break;
        }
        (value, prefix) = (value / 1000.0, next);
    }
    let digits = if prefix.is_empty() || value >= 99.5 {
        0
    } else if value >= 9.95 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {prefix}").trim_end().to_owned()
}

/// With a binary prefix.
fn bytes(count: u64) -> String {
    let (mut value, mut unit) = (count as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_after_their_parameters() {
        let names = ["t.wte.weight", "t.h.0.attn.w", "t.h.1.mlp.w", "t.h.3.mlp.w", "lm_head.weight", "bias"];
        assert_eq!(layers(&names.map(str::to_owned)), "wte, h.0–h.3, lm_head, bias");
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([5.0, 999.0, 1234.0, 10_750_000.0, 7e14].map(scaled), ["5", "999", "1.23 k", "10.8 M", "700 T"]);
        assert_eq!([12, 2048, 3 << 20].map(bytes), ["12 B", "2.0 KiB", "3.0 MiB"]);
    }
}
