//! Concatenations of samples, and what does not bear that these change places.

use super::examples::input;
use super::*;
use crate::interp::outputs;
use crate::ops::{Concatenate, Cumsum, Iota, Scalar, Slice, Uniform};
use dcc_program::Reduce;
use dcc_program::kernel::{CompareOp, UnaryOp};
use dcc_program::program::ScalarKind;

/// Two inputs of 4 samples of this shape, one behind the other.
fn joined(g: &mut Graph, sample: &[u64]) -> NodeId {
    let shape: Shape = [&[4], sample].concat().into();
    let parts = ["a", "b"].map(|name| {
        let op = Input { name: name.into(), dtype: DType::F64, shape: shape.clone(), batch_dim: Some(0) };
        g.add(op, &[]).unwrap()
    });
    g.add(Concatenate { dim: 0 }, &parts).unwrap()
}

/// Elements `start` to `limit` of the first dim.
fn rows(g: &mut Graph, x: NodeId, start: u64, limit: u64) -> NodeId {
    let shape = g.ty(x).shape.clone();
    let mut op =
        Slice { start: Shape::from_elem(0, shape.len()), limit: shape.clone(), stride: Shape::from_elem(1, shape.len()) };
    (op.start[0], op.limit[0]) = (start, limit);
    g.add(op, &[x]).unwrap()
}

/// A layer, and the difference of its results for both parts.
fn towers(between: impl Fn(&mut Graph, NodeId) -> NodeId) -> Graph {
    let mut g = Graph::new();
    let (x, w) = (joined(&mut g, &[3]), input(&mut g, "w", &[3, 40]));
    let h = g.dot("m k, k n -> m n", x, w).unwrap();
    let h = g.unary(UnaryOp::Tanh, h).unwrap();
    let h = between(&mut g, h);
    let (a, b) = (rows(&mut g, h, 0, 4), rows(&mut g, h, 4, 8));
    let y = g.binary(BinaryOp::Sub, a, b).unwrap();
    g.outputs.push(("y".to_owned(), y));
    g
}

/// Whether samples are interleaved, with which all values stay the same.
fn interleaves(graph: &Graph) -> bool {
    let Some(after) = interleave::interleave(graph).unwrap() else { return false };
    let live = after.live();
    let along_samples = |id: NodeId| live[id.0 as usize] && matches!(&after[id].op, Op::Concatenate(op) if op.dim == 0);
    assert!(!after.ids().any(along_samples), "{after}");
    let bindings = bind(graph);
    let values = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    for ((name, a), (_, b)) in values(graph).iter().zip(&values(&after)) {
        assert!(!differ(a, b), "{name}\n{graph}\n{after}");
    }
    true
}

#[test]
fn towers_of_one_batch_are_interleaved() {
    assert!(interleaves(&towers(|_, h| h)));
    let graph = towers(|g, h| {
        // A bias, a norm over features and a product of what is flattened.
        let (bias, w) = (input(g, "bias", &[40]), input(g, "v", &[8, 7]));
        let bias = g.broadcast(bias, &[8, 40], &[1]).unwrap();
        let h = g.binary(BinaryOp::Add, h, bias).unwrap();
        let sums = g.sum(h, &[1]).unwrap();
        let sums = g.broadcast(sums, &[8, 40], &[0]).unwrap();
        let h = g.binary(BinaryOp::Div, h, sums).unwrap();
        let tokens = g.reshape(h, &[40, 8]).unwrap();
        let tokens = g.dot("m k, k n -> m n", tokens, w).unwrap();
        let turned = g.reshape(tokens, &[8, 5, 7]).unwrap();
        g.transpose(turned, &[0, 2, 1]).unwrap()
    });
    assert!(interleaves(&graph));
}

/// `view(2, B, …)`, three views of which two are taken, and means over all.
#[test]
fn parts_are_taken_in_other_ways() {
    let mut g = towers(|_, h| h);
    let h = g.ids().find(|&id| matches!(g[id].op, Op::Unary(_))).unwrap();
    let apart = g.reshape(h, &[2, 4, 40]).unwrap();
    let sum = g.sum(apart, &[0]).unwrap();
    let all = g.reduce(Reduce::Max, h, &[0]).unwrap();
    let squares = g.dot("m n, m n -> n", h, h).unwrap();
    g.outputs.extend([("sum", sum), ("all", all), ("squares", squares)].map(|(name, id)| (name.to_owned(), id)));
    assert!(interleaves(&g));

    let mut g = Graph::new();
    let op = Input { name: "a".into(), dtype: DType::F64, shape: Shape::from_slice(&[4, 3]), batch_dim: Some(0) };
    let a = g.add(op, &[]).unwrap();
    let parts = [a, g.unary(UnaryOp::Tanh, a).unwrap(), g.unary(UnaryOp::Sin, a).unwrap()];
    let x = g.add(Concatenate { dim: 0 }, &parts).unwrap();
    let x = g.unary(UnaryOp::Exp, x).unwrap();
    let two = rows(&mut g, x, 4, 12);
    let two = g.unary(UnaryOp::Cos, two).unwrap();
    let (one, other) = (rows(&mut g, two, 4, 8), rows(&mut g, x, 0, 4));
    let y = g.binary(BinaryOp::Mul, one, other).unwrap();
    g.outputs.push(("y".to_owned(), y));
    assert!(interleaves(&g));
}

/// `torch.stack([a, b], 0).flatten(0, 1)`. The control: stacked again behind the samples, they are neighbours already.
#[test]
fn stacked_parts_are_interleaved() {
    let stacked = |dim: u8, flat: [u64; 2]| {
        let mut g = Graph::new();
        let parts = ["a", "b"].map(|name| {
            let op = Input { name: name.into(), dtype: DType::F64, shape: Shape::from_slice(&[4, 3]), batch_dim: Some(0) };
            let part = g.add(op, &[]).unwrap();
            g.reshape(part, if dim == 0 { &[1, 4, 3] } else { &[4, 1, 3] }).unwrap()
        });
        let stack = g.add(Concatenate { dim }, &parts).unwrap();
        let (x, w) = (g.reshape(stack, &flat).unwrap(), input(&mut g, "w", &[flat[1], 40]));
        let h = g.dot("m k, k n -> m n", x, w).unwrap();
        let h = g.unary(UnaryOp::Tanh, h).unwrap();
        let apart = g.reshape(h, &[2, flat[0] / 2, 40]).unwrap();
        let (a, b) = (rows(&mut g, apart, 0, 1), rows(&mut g, apart, 1, 2));
        let y = g.binary(BinaryOp::Sub, a, b).unwrap();
        g.outputs.push(("y".to_owned(), y));
        g
    };
    assert!(interleaves(&stacked(0, [8, 3])));
    assert!(!interleaves(&stacked(1, [8, 3])));
    assert!(!interleaves(&stacked(0, [2, 12])), "another dim");
}

/// Scores of all against all without each one's own: small beside what computes them, they get their order back.
#[test]
fn what_knows_places_gets_them_back_where_that_is_little() {
    let contrastive = |wide: bool| {
        let mut g = Graph::new();
        let (x, w) = (joined(&mut g, &[3]), input(&mut g, "w", &[3, 400]));
        let h = if wide { g.dot("m k, k n -> m n", x, w).unwrap() } else { x };
        let z = g.sum(h, &[1]).unwrap();
        let z = g.reshape(z, &[8, 1]).unwrap();
        let scores = g.dot("m d, n d -> m n", z, z).unwrap();
        let number =
            |g: &mut Graph, dim: u8| g.add(Iota { dtype: DType::I64, shape: Shape::from_slice(&[8, 8]), dim }, &[]).unwrap();
        let (row, column) = (number(&mut g, 0), number(&mut g, 1));
        let own = g.compare(CompareOp::Eq, row, column).unwrap();
        let none = g.splat_like(-9.0, scores).unwrap();
        let scores = g.select(own, none, scores).unwrap();
        let best = g.reduce(Reduce::Max, scores, &[1]).unwrap();
        g.outputs.push(("y".to_owned(), best));
        g
    };
    assert!(interleaves(&contrastive(true)));
    assert!(!interleaves(&contrastive(false)), "of next to nothing else");
}

#[test]
fn samples_that_depend_on_their_place_stay() {
    let scanned = |g: &mut Graph, h: NodeId| g.add(Cumsum { dim: 0, exclusive: false, reverse: false }, &[h]).unwrap();
    assert!(!interleaves(&towers(scanned)));
    let numbered = |g: &mut Graph, h: NodeId| {
        let number = g.add(Iota { dtype: DType::F64, shape: Shape::from_slice(&[8, 40]), dim: 0 }, &[]).unwrap();
        g.binary(BinaryOp::Mul, h, number).unwrap()
    };
    assert!(!interleaves(&towers(numbered)));
    let features = |g: &mut Graph, h: NodeId| {
        let number = g.add(Iota { dtype: DType::F64, shape: Shape::from_slice(&[8, 40]), dim: 1 }, &[]).unwrap();
        g.binary(BinaryOp::Mul, h, number).unwrap()
    };
    assert!(interleaves(&towers(features)), "the control");
    let learned = |g: &mut Graph, h: NodeId| {
        let of_each = input(g, "of_each", &[8, 40]);
        g.binary(BinaryOp::Mul, h, of_each).unwrap()
    };
    assert!(!interleaves(&towers(learned)));
}

/// Masks of dropout are as random in another order; noise that is read again, in its own order, is not.
#[test]
fn random_masks_do_not_count() {
    let dropped = |again: bool| {
        let mut read = None;
        let mut g = towers(|g, h| {
            let [seed, step] =
                [ScalarKind::Seed, ScalarKind::Step].map(|kind| g.add(Scalar { kind, dtype: DType::I64 }, &[]).unwrap());
            let noise = g.add(Uniform { id: 0, shape: Shape::from_slice(&[8, 40]) }, &[seed, step]).unwrap();
            let noise = g.cast(noise, DType::F64).unwrap();
            let half = g.splat_like(0.5, noise).unwrap();
            let kept = g.compare(CompareOp::Lt, noise, half).unwrap();
            let zero = g.splat_like(0.0, h).unwrap();
            g.select(kept, h, zero).unwrap()
        });
        if again {
            let noise = g.ids().find(|&id| matches!(g[id].op, Op::Cast(_))).unwrap();
            read = Some(rows(&mut g, noise, 0, 4));
        }
        g.outputs.extend(read.map(|noise| ("noise".to_owned(), noise)));
        g
    };
    assert!(interleave::interleave(&dropped(false)).unwrap().is_some());
    assert!(!interleaves(&dropped(true)));
}
