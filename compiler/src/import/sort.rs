//! Topological order of the nodes of one body; ONNX demands it, but not every tool keeps it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::node::ValueId;
use super::proto::{GraphProto, NodeProto};
use crate::error::{Error, Result};

/// The nodes with their positions, each after those that it reads, otherwise in file order. `scope` holds what is defined
/// outside. Errors: DCC0107 for a value that nothing defines, and for a cycle, with its names.
pub(super) fn sort<'m>(
    nodes: &'m [NodeProto],
    scope: &HashMap<&'m str, Option<ValueId>>,
) -> Result<Vec<(usize, &'m NodeProto)>> {
    let mut producer: HashMap<&str, usize> = HashMap::new();
    for (position, node) in nodes.iter().enumerate() {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            if producer.insert(name, position).is_some() {
                return Err(Error::graph(format!("`{name}` is defined twice")).at(place(nodes, position)));
            }
        }
    }
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    // What each node waits for.
    let mut sources: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (position, node) in nodes.iter().enumerate() {
        for name in node.input.iter().filter(|name| !name.is_empty() && !scope.contains_key(name.as_str())) {
            let Some(&source) = producer.get(name.as_str()) else {
                let what = format!("input `{name}` is defined nowhere");
                return Err(Error::graph(what).at(place(nodes, position)));
            };
            sources[position].push(source);
        }
        // What inner graphs define themselves has no producer here.
        let mut captured = Vec::new();
        node.attribute.iter().filter_map(|attribute| attribute.g.as_ref()).for_each(|graph| reads(graph, &mut captured));
        let captured = captured.iter().filter_map(|name| producer.get(name).copied());
        sources[position].extend(captured.filter(|&source| source != position));
        sources[position].iter().for_each(|&source| readers[source].push(position));
    }
    let mut missing: Vec<usize> = sources.iter().map(Vec::len).collect();
    let mut ready: BinaryHeap<Reverse<usize>> =
        (0..nodes.len()).filter(|&position| missing[position] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(Reverse(position)) = ready.pop() {
        order.push((position, &nodes[position]));
        for &reader in &readers[position] {
            missing[reader] -= 1;
            if missing[reader] == 0 {
                ready.push(Reverse(reader));
            }
        }
    }
    match order.len() == nodes.len() {
        true => Ok(order),
        false => Err(cycle(nodes, &sources, &missing)),
    }
}

/// All names that a graph and those inside it read.
fn reads<'m>(graph: &'m GraphProto, names: &mut Vec<&'m str>) {
    names.extend(graph.output.iter().map(|output| output.name()));
    for node in &graph.node {
        names.extend(node.input.iter().map(String::as_str));
        node.attribute.iter().filter_map(|attribute| attribute.g.as_ref()).for_each(|graph| reads(graph, names));
    }
}

/// Walks back from a node that waits for others that wait until one repeats.
fn cycle(nodes: &[NodeProto], sources: &[Vec<usize>], missing: &[usize]) -> Error {
    let mut path: Vec<usize> = Vec::new();
    let mut at = missing.iter().position(|&count| count > 0).expect("some node is left");
    while !path.contains(&at) {
        path.push(at);
        let waits = sources[at].iter().copied().find(|&source| missing[source] > 0);
        at = waits.expect("a waiting node waits for a waiting node");
    }
    let start = path.iter().position(|&position| position == at).expect("the walk stopped at a repetition");
    let mut names: Vec<String> = path[start..].iter().rev().map(|&position| place(nodes, position)).collect();
    let length = names.len();
    names.truncate(8);
    Error::graph(format!("{length} nodes form a cycle")).at(place(nodes, at)).note(format!("the cycle: {}", names.join(" → ")))
}

fn place(nodes: &[NodeProto], position: usize) -> String {
    let node = &nodes[position];
    format!("node {position} `{}` ({})", node.name(), node.op_type())
}
