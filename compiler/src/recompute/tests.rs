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

/// What it costs to make everything needed of what is kept; none if that cannot be.
fn cost(stage: &Stage, kept: &BTreeSet<NodeId>, price: &dyn Fn(NodeId) -> Option<u64>) -> Option<u64> {
    let mut cost = kept.iter().map(|&id| stage.bytes(id)).sum::<u64>();
    let mut wanted = stage.needed.clone();
    for &id in stage.nodes.iter().rev().filter(|id| !kept.contains(id)) {
        if wanted.contains(&id) {
            cost += price(id)?;
            wanted.extend(&stage.graph[id].operands);
        }
    }
    Some(cost)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_cut_costs_least(
        nodes in prop::collection::vec((1..9_u64, 0..4_usize, 0..4_usize), 1..9),
        needed in prop::collection::vec(any::<bool>(), 10),
        prices in prop::collection::vec(prop::option::weighted(0.7, prop_oneof![Just(0), 0..60_000_u64]), 10),
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &needed, 1);
        let price = |id: NodeId| prices[id.0 as usize].filter(|_| id.0 > 0);
        let kept = cut::kept(&stage, &stage.nodes, &stage.needed, price);
        let count = stage.nodes.len();
        let sets = (0..1_u32 << count).map(|bits| (0..count).filter(|i| bits >> i & 1 == 1).map(|i| stage.nodes[i]).collect());
        let least = sets.filter_map(|set: BTreeSet<NodeId>| cost(&stage, &set, &price)).min();
        prop_assert_eq!(cost(&stage, &kept, &price), least);
    }

    /// Of a segment that computes again what it needs, nothing needs more than it may, and no other places that do cost less.
    #[test]
    fn segments_apart_repeat_the_least(
        nodes in prop::collection::vec((1..9_u64, 0..2_usize, 0..2_usize), 1..12),
        again in prop::collection::vec(any::<bool>(), 13),
        most in 0..400_000_u64,
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &[true; 13], 1);
        let (line, end) = (Line::of(&stage), stage.nodes.len());
        let again: Vec<bool> = (0..end).map(|place| place > 0 && again[place]).collect();
        let kept: BTreeSet<NodeId> = (0..end).filter(|&place| !again[place]).map(|place| stage.nodes[place]).collect();
        let bytes = |places: std::ops::Range<usize>, of: bool| -> u64 {
            places.filter(|&place| again[place] == of).map(|place| stage.bytes(stage.nodes[place])).sum()
        };
        let peak = |places: &[usize]| {
            let ends = [0].iter().chain(places).zip(places.iter().chain([&end]));
            ends.map(|(&from, &to)| bytes(0..to, false) + bytes(from..to, true)).max().unwrap_or(0)
        };
        let works: Vec<u64> = stage.nodes.iter().map(|&id| segments::work(&stage, id)).collect();
        let work = |places: &[usize]| places.iter().map(|&place| line.repeated(&stage, &again, &works, place)).sum::<u64>();
        let inner: Vec<usize> = line.places(end).into_iter().filter(|&place| place > 0 && place < end).collect();
        let sets = (0..1_u32 << inner.len())
            .map(|bits| (0..inner.len()).filter(|i| bits >> i & 1 == 1).map(|i| inner[i]).collect::<Vec<usize>>());
        let most = most.max(peak(&inner));
        let least = sets.filter(|places| peak(places) <= most).map(|places| work(&places)).min();
        let chosen = line.apart(&stage, &again, &kept, most);
        prop_assert!(peak(&chosen) <= most);
        prop_assert_eq!(Some(work(&chosen)), least);
    }

    #[test]
    fn segments_need_the_least_memory(
        nodes in prop::collection::vec((1..9_u64, 0..2_usize, 0..2_usize), 1..12),
        kept in prop::collection::vec(any::<bool>(), 13),
        own in prop::collection::vec(0..60_000_u64, 13),
        in_flight in 1..5_u64,
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &[true; 13], in_flight);
        let kept = stage.nodes.iter().zip(kept).filter(|(_, kept)| *kept).map(|(&id, _)| id).collect();
        let mut line = Line::weighed(&stage, Line::of(&stage).spans, &kept);
        let end = stage.nodes.len();
        line.own = own[..end].to_vec();
        let cost = |places: &[usize]| line.bytes(places, end, in_flight);
        let inner: Vec<usize> = line.places(end).into_iter().filter(|&place| place > 0 && place < end).collect();
        let sets = (0..1_u32 << inner.len())
            .map(|bits| (0..inner.len()).filter(|i| bits >> i & 1 == 1).map(|i| inner[i]).collect::<Vec<usize>>());
        let least = sets.map(|places| cost(&places)).min();
        prop_assert_eq!(Some(cost(&line.choose(end, in_flight))), least);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Of values between segments, all that a segment computes again is made of what is kept and of its own, and nothing is missing.
    #[test]
    fn segments_between_values_that_are_kept_repeat_nothing(
        nodes in prop::collection::vec((1..9_u64, 0..3_usize, 0..3_usize), 1..16),
        needed in prop::collection::vec(any::<bool>(), 17),
        fixed in prop::collection::vec(prop::bool::weighted(0.2), 17),
        price in 0..60_000_u64,
    ) {
        let (graph, mesh) = (graph(&nodes), mesh());
        let stage = stage(&graph, &mesh, &needed, 1);
        let price = |id: NodeId| (id.0 > 0 && !fixed[id.0 as usize]).then_some(price);
        let (kept, places) = Line::of(&stage).between(&stage, price);
        let segment = |id: NodeId| places.partition_point(|&place| place <= id.0 as usize);
        let mut wanted = stage.needed.clone();
        for &id in stage.nodes.iter().rev().filter(|id| !kept.contains(id)) {
            if wanted.contains(&id) {
                prop_assert!(price(id).is_some(), "{id:?} may not be computed again");
                let operands = graph[id].operands.iter().filter(|o| !kept.contains(o));
                prop_assert!(operands.clone().all(|&o| segment(o) == segment(id)), "{id:?} of {places:?} with {kept:?}");
                wanted.extend(operands);
            }
        }
    }
}

/// What a segment's gradients take is left free while it runs: the segments before a large one are longer, those of a large one shorter.
#[test]
fn large_gradients_make_room_for_themselves() {
    let (graph, mesh) = (graph(&[(1, 0, 0), (2, 0, 0)].repeat(100)), mesh());
    let stage = stage(&graph, &mesh, &[true; 201], 1);
    let segments = |own: u64| {
        let mut line = Line::of(&stage);
        line.own[180..].fill(own);
        let places = line.choose(200, 1);
        let before: u64 = places.iter().filter(|&&place| place <= 180).count() as u64;
        (before, line.bytes(&places, 200, 1))
    };
    let ((many, bytes), (few, more)) = (segments(0), segments(200_000));
    assert!(few < many && more < bytes + 200_000, "{few} of {many} places, {more} of {bytes} bytes");
}

/// A chain whose values are all alike is divided in about √(6n) segments, the last the shortest; with more microbatches in flight, in fewer.
#[test]
fn a_long_chain_has_about_the_square_root_of_its_length_of_segments() {
    let (graph, mesh) = (graph(&[(1, 0, 0), (2, 0, 0)].repeat(200)), mesh());
    let needed = vec![true; 401];
    let segments = |in_flight| {
        let stage = stage(&graph, &mesh, &needed, in_flight);
        Line::of(&stage).choose(400, in_flight).len() + 1
    };
    // 200 pairs, 1 kept and 3 needed of each: k segments have a peak of 600 / k + k / 2, flat around 35; with 5 others in flight 5 k more, least
    // at 10.
    assert!((20..=36).contains(&segments(1)), "{}", segments(1));
    assert!((8..=13).contains(&segments(6)), "{}", segments(6));
}
