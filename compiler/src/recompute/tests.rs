//! Both decisions against every set of values, on small graphs made at random.

use super::*;
use crate::ops::{Binary, Op, Transfer, Unary};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Mesh, Shape, Sharding, TensorType};
use proptest::prelude::*;

fn mesh() -> Mesh {
    Mesh::new(&[("mb", 1)])
}

/// Of `bytes` in all, per microbatch.
fn ty(bytes: u64) -> TensorType {
    let mesh = mesh();
    let mut sharding = Sharding::replicated(1);
    sharding.dims[0].push(mesh.axis("mb").expect("it has one"));
    TensorType::new(DType::Bool, Shape::from_slice(&[bytes])).with_sharding(sharding)
}

/// A graph of one stage: what another stage sent, then nodes of these bytes that read one or two before them.
fn graph(nodes: &[(u64, usize, usize)]) -> Graph {
    let mut graph = Graph::new();
    graph.mesh = Some(mesh());
    let mut ids = vec![graph.add_typed(Transfer {}, &[], ty(40_000))];
    for (n, &(bytes, a, b)) in nodes.iter().enumerate() {
        let [a, b] = [a, b].map(|back| ids[ids.len().saturating_sub(1 + back)]);
        let op: Op = if a == b { Unary { op: UnaryOp::Not }.into() } else { Binary { op: BinaryOp::And }.into() };
        let operands = if a == b { vec![a] } else { vec![a, b] };
        ids.push(graph.add_typed(op, &operands, ty(bytes * 10_000 + n as u64)));
    }
    graph
}

fn stage<'a>(graph: &'a Graph, mesh: &'a Mesh, needed: &[bool], in_flight: u64) -> Stage<'a> {
    let nodes: Vec<NodeId> = graph.ids().collect();
    let needed = nodes.iter().zip(needed).filter(|(_, needed)| **needed).map(|(&id, _)| id).collect();
    Stage { graph, mesh, nodes, needed, shared: BTreeSet::new(), in_flight }
}

/// Whether everything needed can be made of what is kept.
fn suffices(stage: &Stage, kept: &BTreeSet<NodeId>, may: &dyn Fn(NodeId) -> bool) -> bool {
    let mut at_hand: BTreeSet<NodeId> = kept.clone();
    for &id in &stage.nodes {
        if may(id) && stage.graph[id].operands.iter().all(|o| at_hand.contains(o)) {
            at_hand.insert(id);
        }
    }
    stage.needed.is_subset(&at_hand)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_cut_keeps_the_fewest_bytes(
        nodes in prop::collection::vec((1..9_u64, 0..4_usize, 0..4_usize), 1..9),
        needed in prop::collection::vec(any::<bool>(), 10),
        quick in prop::collection::vec(prop::bool::weighted(0.7), 10),
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &needed, 1);
        let may = |id: NodeId| id.0 > 0 && quick[id.0 as usize];
        let bytes = |kept: &BTreeSet<NodeId>| kept.iter().map(|&id| stage.bytes(id)).sum::<u64>();
        let kept = cut::kept(&stage, &stage.nodes, may);
        prop_assert!(suffices(&stage, &kept, &may));
        let count = stage.nodes.len();
        let sets = (0..1_u32 << count).map(|bits| (0..count).filter(|i| bits >> i & 1 == 1).map(|i| stage.nodes[i]).collect());
        let least = sets.filter(|set| suffices(&stage, set, &may)).map(|set: BTreeSet<NodeId>| bytes(&set)).min();
        prop_assert_eq!(Some(bytes(&kept)), least);
    }

    #[test]
    fn segments_need_the_least_memory(
        nodes in prop::collection::vec((1..9_u64, 0..2_usize, 0..2_usize), 1..12),
        in_flight in 1..5_u64,
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &[true; 13], in_flight);
        let line = Line::of(&stage);
        let end = stage.nodes.len();
        let cost = |places: &[usize]| line.bytes(places, end, in_flight);
        let inner: Vec<usize> = line.places(end).into_iter().filter(|&place| place > 0 && place < end).collect();
        let sets = (0..1_u32 << inner.len())
            .map(|bits| (0..inner.len()).filter(|i| bits >> i & 1 == 1).map(|i| inner[i]).collect::<Vec<usize>>());
        let least = sets.map(|places| cost(&places)).min();
        prop_assert_eq!(Some(cost(&line.choose(end, in_flight))), least);
    }
}

/// A chain whose values are all alike is divided in about as many segments as each is long; with more microbatches in flight, in fewer.
#[test]
fn a_long_chain_has_about_the_square_root_of_its_length_of_segments() {
    let (graph, mesh) = (graph(&[(1, 0, 0), (2, 0, 0)].repeat(200)), mesh());
    let needed = vec![true; 401];
    let segments = |in_flight| {
        let stage = stage(&graph, &mesh, &needed, in_flight);
        Line::of(&stage).choose(400, in_flight).len() + 1
    };
    // 200 pairs, 1 kept and 3 needed of each: k + 600 / k is least at 24.
    assert!((20..=30).contains(&segments(1)), "{}", segments(1));
    assert!((8..=14).contains(&segments(6)), "{}", segments(6));
}
