//! What the manifest says of the inputs: their batch dims, and which values integer ones may have.

use crate::graph::{Graph, NodeId};
use crate::loss;
use crate::ops::{Compare, Op};
use dcc_program::kernel::CompareOp;
use dcc_program::manifest;
use std::collections::BTreeMap;

/// Of graphs of one loss. An input that indexes a table, or holds labels, must stay below the table's size, or the number of
/// classes.
pub fn of_loss(graphs: &[&Graph], classes: &Option<(String, u64)>, ignore_index: i64) -> BTreeMap<String, manifest::Input> {
    let mut found = of_graphs(graphs);
    if let Some((name, classes)) = classes
        && let Some(entry) = found.get_mut(name)
    {
        entry.vocabulary = Some(entry.vocabulary.unwrap_or(*classes).min(*classes));
    }
    let is_class = |op: &Op| matches!(op, Op::Input(input) if input.name == loss::LABELS && !input.dtype.is_float());
    if let Some(labels) = found.get_mut(loss::LABELS)
        && graphs.iter().any(|graph| graph.nodes.iter().any(|node| is_class(&node.op)))
    {
        labels.ignore_index = labels.ignore_index.or(Some(ignore_index));
    }
    found
}

/// By integer input: what it must stay below. Labels are compared with classes where they index nothing.
pub fn vocabularies(graph: &Graph, classes: &Option<(String, u64)>) -> BTreeMap<String, u64> {
    let mut found: BTreeMap<String, u64> = classes.iter().cloned().collect();
    let indexing = of_graphs(&[graph]).into_iter().filter_map(|(name, input)| Some((name, input.vocabulary?)));
    found.extend(indexing);
    found
}

/// The same of graphs that know no loss.
pub fn of_graphs(graphs: &[&Graph]) -> BTreeMap<String, manifest::Input> {
    let mut found: BTreeMap<String, manifest::Input> = BTreeMap::new();
    for graph in graphs {
        for id in graph.ids() {
            if let Op::Input(input) = &graph[id].op {
                found.entry(input.name.clone()).or_default().batch_dim = input.batch_dim;
            }
            if let Op::Gather(gather) = &graph[id].op
                && let Some((name, ignored)) = index(graph, graph[id].operands[1])
            {
                let dim = gather.spec.operands[0].iter().position(|d| d.contains(&gather.indexed()));
                let size = dim.map(|d| graph.ty(graph[id].operands[0]).shape[d]);
                let entry = found.entry(name.to_owned()).or_default();
                entry.vocabulary = entry.vocabulary.into_iter().chain(size).min();
                entry.ignore_index = entry.ignore_index.or(ignored);
            }
        }
    }
    found
}

/// The input that indices are, and the value of it that ONNX's losses replace before they look it up.
fn index(graph: &Graph, id: NodeId) -> Option<(&str, Option<i64>)> {
    match &graph[id].op {
        Op::Input(input) => Some((&input.name, None)),
        Op::Select(_) => {
            let [valid, labels, _] = graph[id].operands[..] else { return None };
            let (Op::Input(input), Some(ignored)) = (&graph[labels].op, ignored(graph, valid, labels)) else { return None };
            Some((&input.name, Some(ignored)))
        }
        _ => None,
    }
}

/// The number that `valid` says `labels` are not.
fn ignored(graph: &Graph, valid: NodeId, labels: NodeId) -> Option<i64> {
    let Op::Compare(Compare { op: CompareOp::Ne }) = &graph[valid].op else { return None };
    let mut number = *graph[valid].operands.iter().find(|&&operand| operand != labels)?;
    while let [inner] = graph[number].operands[..] {
        number = inner;
    }
    match &graph[number].op {
        Op::Const(number) if !number.dtype.is_float() => Some(number.bits as i64),
        _ => None,
    }
}
