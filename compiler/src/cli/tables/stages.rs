//! Stages in rows: work, memory and communication of each, for reports and `inspect`.

use crate::cli::output;
use crate::report::{StageReport, Traffic, count, size};

/// What columns other than the layers take.
const OTHERS: usize = 48;

/// Parameters and work; `balance` of each stage where it is known.
pub fn work(stages: &[StageReport], balance: &[f64]) -> Vec<String> {
    let longest = stages.iter().map(|stage| stage.layers.chars().count()).max().unwrap_or(0).max(6);
    let room = output::columns().map_or(usize::MAX, |columns| columns.saturating_sub(OTHERS).max(12));
    let width = longest.min(room);
    let mut head = format!("  stage  {:<width$}  {:>11}  {:>15}", "layers", "params/rank", "flops/rank/step");
    if !balance.is_empty() {
        head += "  balance";
    }
    let row = |(index, stage): (usize, &StageReport)| {
        let (parameters, flops) = (count(stage.parameters), count(stage.flops));
        let layers = shortened(&stage.layers, width);
        let balance = balance.get(index).map_or(String::new(), |part| format!("  {:>5.0} %", part * 100.0));
        format!("  {:>5}  {layers:<width$}  {parameters:>11}  {flops:>15}{balance}", stage.stage)
    };
    std::iter::once(head).chain(stages.iter().enumerate().map(row)).collect()
}

/// Planned bytes of each rank.
pub fn memory(stages: &[StageReport]) -> Vec<String> {
    let cells = |first: &str, rest: [&str; 6]| {
        let [weights, optimizer, gradients, activations, scratch, all] = rest;
        format!("  {first:>5}  {weights:>10}  {optimizer:>10}  {gradients:>10}  {activations:>11}  {scratch:>10}  {all:>10}")
    };
    let head = cells("stage", ["weights", "optimizer", "gradients", "activations", "scratch", "bytes/rank"]);
    let row = |stage: &StageReport| {
        let m = &stage.memory;
        let sizes = [m.weights, m.optimizer, m.accumulators, m.activations, m.scratch, m.peak].map(size);
        cells(&stage.stage.to_string(), sizes.each_ref().map(String::as_str))
    };
    std::iter::once(head).chain(stages.iter().map(row)).collect()
}

/// Transfers of one rank in one step, of the stage that does most of each kind.
pub fn communication(stages: &[StageReport]) -> Vec<String> {
    let mut most: Vec<&Traffic> = Vec::new();
    for traffic in stages.iter().flat_map(|stage| &stage.traffic) {
        match most.iter_mut().find(|known| known.axes == traffic.axes && known.kind == traffic.kind) {
            Some(known) if known.bytes >= traffic.bytes => {}
            Some(known) => *known = traffic,
            None => most.push(traffic),
        }
    }
    if most.is_empty() {
        return vec!["  communication  none".to_owned()];
    }
    let head = "  communication of a rank in a step";
    let row = |traffic: &&Traffic| {
        let kind = format!("{} {}", traffic.axes, traffic.kind);
        format!("    {kind:<20}  {:>5} ×  {:>10} on average", traffic.count, size(traffic.bytes / traffic.count.max(1)))
    };
    std::iter::once(head.to_owned()).chain(most.iter().map(row)).collect()
}

fn shortened(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_units() {
        assert_eq!(shortened("a long one", 5), "a lo…");
        let traffic = |kind, count, bytes| Traffic { axes: "tp".to_owned(), kind, count, bytes };
        let stage = |all| StageReport { traffic: all, ..StageReport::default() };
        let stages = [stage(vec![traffic("all_reduce", 2, 4096)]), stage(vec![traffic("all_reduce", 3, 9216)])];
        assert_eq!(communication(&stages)[1], "    tp all_reduce             3 ×     3.0 KiB on average");
        assert_eq!(communication(&[]), ["  communication  none"]);
    }
}
