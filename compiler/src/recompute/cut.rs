//! The fewest bytes that the backward pass can do with: a minimum cut.
//!
//! Each value is an edge of its bytes. What may not be computed again hangs on the source, what the backward reads on the sink,
//! and a value that may be computed again on its operands, and on the source by what that costs; a cut is a set of values that are kept and
//! of values that are computed again, of which everything needed can be made. (AOTAutograd of PyTorch 2, Ansel et al. 2024,
//! section 2.3, decides so what a fused graph saves, where nothing that is computed again has a price.)

use super::Stage;
use crate::graph::NodeId;
use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use std::collections::{BTreeMap, BTreeSet};

/// More than all values of a stage.
const WHOLE: u64 = u64::MAX / 4;

/// Of these nodes of a stage, what to keep so that what is `wanted` is there, where others are computed again for a `price`, in bytes; none is that of
/// what may not be.
/// Of several sets that cost the least, one that leaves little to be computed.
pub(super) fn kept(
    stage: &Stage,
    nodes: &[NodeId],
    wanted: &BTreeSet<NodeId>,
    price: impl Fn(NodeId) -> Option<u64>,
) -> BTreeSet<NodeId> {
    let mut graph: DiGraph<(), u64> = DiGraph::new();
    let (source, sink) = (graph.add_node(()), graph.add_node(()));
    let ends: BTreeMap<NodeId, [NodeIndex; 2]> =
        nodes.iter().map(|&id| (id, [graph.add_node(()), graph.add_node(())])).collect();
    for (&id, &[start, end]) in &ends {
        graph.add_edge(start, end, stage.bytes(id));
        if let Some(price) = price(id) {
            graph.add_edge(source, start, price);
            let operands: BTreeSet<NodeId> = stage.graph[id].operands.iter().copied().collect();
            for [_, operand] in operands.iter().filter_map(|o| ends.get(o)) {
                graph.add_edge(*operand, start, WHOLE);
            }
        } else {
            graph.add_edge(source, start, WHOLE);
        }
        if wanted.contains(&id) {
            graph.add_edge(end, sink, WHOLE);
        }
    }
    let (_, flows) = dinics(&graph, source, sink);
    let reaches = before_sink(&graph, &flows, sink);
    ends.iter().filter(|(_, [start, end])| !reaches.contains(start) && reaches.contains(end)).map(|(&id, _)| id).collect()
}

/// From where more could flow to the sink.
fn before_sink(graph: &DiGraph<(), u64>, flows: &[u64], sink: NodeIndex) -> BTreeSet<NodeIndex> {
    let (mut open, mut found) = (vec![sink], BTreeSet::from([sink]));
    while let Some(at) = open.pop() {
        let more = graph.edges_directed(at, petgraph::Incoming).filter(|edge| flows[edge.id().index()] < *edge.weight());
        let back = graph.edges_directed(at, petgraph::Outgoing).filter(|edge| flows[edge.id().index()] > 0);
        let next: Vec<NodeIndex> = more.map(|edge| edge.source()).chain(back.map(|edge| edge.target())).collect();
        open.extend(next.into_iter().filter(|node| found.insert(*node)));
    }
    found
}
