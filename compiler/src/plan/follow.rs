//! The plan of a graph that shares parameters with one already planned: evaluation lies where training does.

use super::Plan;
use crate::graph::{Graph, Node, NodeId, Phase};
use crate::ops::Op;
use std::collections::{BTreeMap, HashMap};

/// The plan of `graph` by that of `of`, which is `plan`. A node that `of` has too (same op, same operands) takes its strategy and
/// stage; any other follows its operands, on the last of their stages. Parameters keep their shardings and stages.
pub fn follow(graph: &Graph, plan: &Plan, of: &Graph) -> Plan {
    let known: HashMap<&Node, NodeId> = of.ids().filter(|&id| of[id].phase == Phase::Forward).map(|id| (&of[id], id)).collect();
    let homes = param_homes(plan, of);
    // The stage with the loss of training tells the run what evaluation gives.
    let reports = of.outputs.iter().filter_map(|(_, id)| plan.stages.get(id).copied()).max();
    let mut same: Vec<Option<NodeId>> = Vec::with_capacity(graph.nodes.len());
    let (mut strategies, mut shards) = (BTreeMap::new(), BTreeMap::new());
    let mut stages: BTreeMap<NodeId, u32> = BTreeMap::new();
    // Of what is computed from parameters alone: the last of their stages.
    let mut held: Vec<Option<u32>> = Vec::with_capacity(graph.nodes.len());
    // What training makes of the data alone, evaluation may make of parameters too (a norm of an input).
    let mut batched: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        held.push(match &node.op {
            Op::Param(param) => homes.get(param.name.as_str()).copied(),
            _ => node.operands.iter().filter_map(|o| held[o.0 as usize]).max(),
        });
        let operands: Option<_> = node.operands.iter().map(|o| same[o.0 as usize]).collect();
        let found = operands.and_then(|operands| known.get(&Node { operands, ..node.clone() }).copied());
        same.push(found);
        if let Some(strategy) = found.and_then(|f| plan.strategies.get(&f)) {
            strategies.insert(id, strategy.clone());
        }
        if let Some(shard) = found.and_then(|f| plan.shards.get(&f)) {
            shards.insert(id, shard.clone());
        }
        let of_operand = |o: &NodeId| stages.get(o).copied().or(held[o.0 as usize]);
        let counts_samples = matches!(&node.op, Op::Input(input) if input.batch_dim.is_some());
        batched.push(counts_samples || node.operands.iter().any(|o| batched[o.0 as usize]));
        let own = found.and_then(|f| plan.stages.get(&f).copied());
        if batched[id.0 as usize] && !counts_samples {
            let reports = reports.filter(|_| graph.outputs.iter().any(|&(_, output)| output == id));
            let stage = node.operands.iter().filter_map(of_operand).chain(own).chain(reports).max();
            stages.insert(id, stage.unwrap_or(0));
        }
    }
    Plan { strategies, stages, shards, ..plan.clone() }
}

/// The first stage that reads each parameter.
fn param_homes<'g>(plan: &Plan, graph: &'g Graph) -> HashMap<&'g str, u32> {
    let mut readers: Vec<Option<u32>> = vec![None; graph.nodes.len()];
    let mut homes = HashMap::new();
    for id in graph.ids().rev().filter(|&id| graph[id].phase == Phase::Forward) {
        let stage = plan.stages.get(&id).copied().or(readers[id.0 as usize]);
        for operand in &graph[id].operands {
            let slot = &mut readers[operand.0 as usize];
            *slot = [*slot, stage].into_iter().flatten().min();
        }
        if let (Op::Param(param), Some(stage)) = (&graph[id].op, readers[id.0 as usize]) {
            homes.insert(param.name.as_str(), stage);
        }
    }
    homes
}
