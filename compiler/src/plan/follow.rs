//! The plan of a graph that shares parameters with one already planned: evaluation lies where training does.

use super::Plan;
use crate::graph::{Graph, Node, NodeId, Phase};
use crate::ops::{Op, Param};
use dcc_program::program::Piece;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// The plan of `graph` by that of `of`, which is `plan`. A node that `of` has too (same op, same operands) takes its strategy and
/// stage; any other follows its operands, on the last of their stages or the next that holds the parameters it reads. Parameters keep
/// their shardings and stages.
pub fn follow(graph: &Graph, plan: &Plan, of: &Graph) -> Plan {
    let known: FxHashMap<&Node, NodeId> =
        of.ids().filter(|&id| of[id].phase == Phase::Forward).map(|id| (&of[id], id)).collect();
    let holders = param_holders(plan, of);
    // The stage with the loss of training tells the run what evaluation gives.
    let reports = of.outputs.iter().filter_map(|(_, id)| plan.stages.get(id).copied()).max();
    let mut same: Vec<Option<NodeId>> = Vec::with_capacity(graph.nodes.len());
    let (mut strategies, mut shards, mut masters) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    let mut stages: BTreeMap<NodeId, u32> = BTreeMap::new();
    // Of what is computed from parameters alone: the stages that hold all of these.
    let mut held: Vec<Option<BTreeSet<u32>>> = Vec::with_capacity(graph.nodes.len());
    // What training makes of the data alone, evaluation may make of parameters too (a norm of an input).
    let mut batched: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    let mut of_weights: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        of_weights.push(matches!(node.op, Op::Param(_)) || node.operands.iter().any(|o| of_weights[o.0 as usize]));
        held.push(match &node.op {
            Op::Param(param) => holders.get(&name(param)).cloned(),
            _ => common(node.operands.iter().filter_map(|o| held[o.0 as usize].as_ref())),
        });
        let operands: Option<_> = node.operands.iter().map(|o| same[o.0 as usize]).collect();
        let found = operands.and_then(|operands| known.get(&Node { operands, ..node.clone() }).copied());
        same.push(found);
        if let Some(strategy) = found.and_then(|f| plan.strategies.get(&f)) {
            strategies.insert(id, strategy.clone());
        }
        if let Some(shard) = found.and_then(|f| plan.shards.get(&f)) {
            shards.insert(id, shard.clone());
            masters.extend(found.filter(|f| plan.masters.contains(f)).map(|_| id));
        }
        let counts_samples = matches!(&node.op, Op::Input(input) if input.batch_dim.is_some());
        batched.push(counts_samples || node.operands.iter().any(|o| batched[o.0 as usize]));
        let own = found.and_then(|f| plan.stages.get(&f).copied());
        if batched[id.0 as usize] && !counts_samples {
            let reports = reports.filter(|_| graph.outputs.iter().any(|&(_, output)| output == id));
            // What is made of data alone is made wherever it is read.
            let before = node.operands.iter().filter(|o| of_weights[o.0 as usize]).filter_map(|o| stages.get(o).copied());
            let earliest = before.chain(own).chain(reports).max().unwrap_or(0);
            let weights = node.operands.iter().filter(|o| !batched[o.0 as usize]).filter_map(|o| held[o.0 as usize].as_ref());
            let next = common(weights).and_then(|stages| stages.range(earliest..).next().copied());
            stages.insert(id, next.unwrap_or(earliest));
        }
    }
    Plan { strategies, stages, shards, masters, ..plan.clone() }
}

/// The stages that are in all of these sets; none where there is no set.
fn common<'s>(mut sets: impl Iterator<Item = &'s BTreeSet<u32>>) -> Option<BTreeSet<u32>> {
    let first = sets.next()?.clone();
    Some(sets.fold(first, |all, set| all.intersection(set).copied().collect()))
}

/// A parameter, or a piece of one, which may be on a stage of its own.
type Name<'g> = (&'g str, Option<&'g Piece>);

fn name(param: &Param) -> Name<'_> {
    (&param.name, param.piece.as_ref())
}

/// The stages of the ranks that read each parameter.
fn param_holders<'g>(plan: &Plan, graph: &'g Graph) -> FxHashMap<Name<'g>, BTreeSet<u32>> {
    let layout = plan.layout();
    let mut readers: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); graph.nodes.len()];
    let mut holders: FxHashMap<Name<'_>, BTreeSet<u32>> = FxHashMap::default();
    for id in graph.ids().rev().filter(|&id| graph[id].phase == Phase::Forward) {
        let mine = match plan.stages.get(&id) {
            Some(&stage) => BTreeSet::from([stage]),
            None => std::mem::take(&mut readers[id.0 as usize]),
        };
        for operand in &graph[id].operands {
            readers[operand.0 as usize].extend(&mine);
        }
        if let Op::Param(param) = &graph[id].op {
            let ranks: BTreeSet<u32> = mine.iter().map(|&stage| layout.place(stage).0).collect();
            let held = (0..plan.parts()).filter(|&stage| ranks.contains(&layout.place(stage).0));
            holders.entry(name(param)).or_default().extend(held);
        }
    }
    holders
}
