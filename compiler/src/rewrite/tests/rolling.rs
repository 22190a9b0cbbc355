//! Unrolled loops, and what looks like one.

use super::examples::{input, softmax};
use super::*;
use crate::interp::outputs;
use crate::ops::{Concatenate, Gather, Slice};
use dcc_program::kernel::UnaryOp;
use dcc_program::{FactorSpec, Reduce};

/// `size` elements of `dim` of `x` from `start` on.
fn part(g: &mut Graph, x: NodeId, dim: usize, start: u64, size: u64) -> NodeId {
    let shape = g.ty(x).shape.clone();
    let mut op =
        Slice { start: shape.iter().map(|_| 0).collect(), limit: shape.clone(), stride: shape.iter().map(|_| 1).collect() };
    (op.start[dim], op.limit[dim]) = (start, start + size);
    g.add(op, &[x]).unwrap()
}

/// `turn` of each of `count` numbers, one after the other along `dim`.
fn unrolled(g: &mut Graph, count: u64, dim: u8, turn: impl Fn(&mut Graph, u64) -> NodeId) -> NodeId {
    let parts: Vec<NodeId> = (0..count).map(|i| turn(g, i)).collect();
    let y = g.add(Concatenate { dim }, &parts).unwrap();
    g.outputs.push(("y".to_owned(), y));
    y
}

/// That rolling keeps all values, and whether it rolls.
fn rolls(graph: &Graph) -> bool {
    let Some(after) = roll::roll(graph).unwrap() else { return false };
    let bindings = bind(graph);
    let values = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    for ((name, a), (_, b)) in values(graph).iter().zip(&values(&after)) {
        assert!(!differ(a, b), "{name}\n{after}");
    }
    true
}

/// As PyTorch's `EmbeddingBag` is exported.
fn bags(count: u64, chunk: usize) -> Graph {
    let mut g = Graph::new();
    let (table, indices) = (input(&mut g, "table", &[9, 3]), input(&mut g, "x", &[count * 5]));
    let indices = g.cast(indices, DType::I64).unwrap();
    let rows = g.add(Gather { spec: FactorSpec::parse("v e, i -> i e").unwrap() }, &[table, indices]).unwrap();
    let mut parts = Vec::new();
    for bag in 0..count {
        let mine = part(&mut g, rows, 0, bag * 5, 5);
        let sum = g.reduce(Reduce::Sum, mine, &[0]).unwrap();
        parts.push(g.reshape(sum, &[1, 3]).unwrap());
    }
    while parts.len() > 1 {
        parts = parts.chunks(chunk).map(|parts| g.add(Concatenate { dim: 0 }, parts).unwrap()).collect();
    }
    g.outputs.push(("y".to_owned(), parts[0]));
    g
}

#[test]
fn bags_of_embeddings_are_sums_of_rows() {
    assert!(rolls(&bags(6, 6)));
    // Concatenated in several steps.
    assert!(rolls(&bags(12, 5)));
    let rolled = roll::roll(&bags(12, 5)).unwrap().expect("a loop");
    assert!(rolled.nodes.iter().all(|n| !matches!(n.op, Op::Concatenate(_) | Op::Slice(_))), "{rolled}");
    assert!(!rolls(&bags(3, 3)), "three parts are few");
}

/// One mean of f32 is a sum divided by 6, whose sixth was rounded when it was folded: the sixth of the others was not.
#[test]
fn numbers_that_are_one_in_their_dtype_are_one() {
    let scaled = |second: f64| {
        let mut g = Graph::new();
        let op = Input { name: "x".into(), dtype: DType::F32, shape: Shape::from_slice(&[6, 4]), batch_dim: None };
        let x = g.add(op, &[]).unwrap();
        unrolled(&mut g, 6, 0, |g, i| {
            let mine = part(g, x, 0, i, 1);
            g.binary_scalar(dcc_program::kernel::BinaryOp::Mul, mine, if i == 4 { second } else { 1.0 / 6.0 }).unwrap()
        });
        g
    };
    let rounded = f64::from(1.0_f32 / 6.0);
    assert!(rounded != 1.0 / 6.0 && rolls(&scaled(1.0 / 6.0)));
    assert!(roll::roll(&scaled(rounded)).unwrap().is_some());
    assert!(roll::roll(&scaled(0.25)).unwrap().is_none(), "the control");
}

/// Heads one by one: what a turn reads twice, products of two tiles and of a tile and a weight, other dims than the first.
#[test]
fn heads_one_by_one_are_a_batch() {
    for dim in [0, 1] {
        let mut g = Graph::new();
        let (q, k, w) = (input(&mut g, "q", &[4, 12]), input(&mut g, "k", &[4, 12]), input(&mut g, "w", &[4, 3]));
        unrolled(&mut g, 4, dim, |g, head| {
            let (q, k) = (part(g, q, 1, head * 3, 3), part(g, k, 1, head * 3, 3));
            let scores = g.dot("t e, s e -> t s", q, k).unwrap();
            let shares = softmax(g, scores);
            let wide = g.broadcast(w, &[4, 3], &[0, 1]).unwrap();
            let mixed = g.dot("t s, s e -> t e", shares, wide).unwrap();
            let turned = g.transpose(mixed, &[1, 0]).unwrap();
            let flat = g.reshape(turned, &[2, 6]).unwrap();
            g.binary_scalar(dcc_program::kernel::BinaryOp::Add, flat, 0.5).unwrap()
        });
        assert!(rolls(&g));
    }
}

#[test]
fn tiles_that_begin_later_are_tiles() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", &[3, 11]);
    unrolled(&mut g, 4, 1, |g, i| {
        let mine = part(g, x, 1, 2 + i * 2, 2);
        g.unary(UnaryOp::Tanh, mine).unwrap()
    });
    assert!(rolls(&g));
}

/// One slice of two dims a turn: of the other dim too it takes a part.
#[test]
fn tiles_are_parts_of_other_dims() {
    let mut g = Graph::new();
    let x = input(&mut g, "x", &[4, 7]);
    unrolled(&mut g, 4, 0, |g, i| {
        let op = Slice {
            start: Shape::from_slice(&[i, 1]),
            limit: Shape::from_slice(&[i + 1, 4]),
            stride: Shape::from_slice(&[1, 1]),
        };
        let mine = g.add(op, &[x]).unwrap();
        let tanh = g.unary(UnaryOp::Tanh, mine).unwrap();
        g.reduce(Reduce::Sum, tanh, &[1]).unwrap()
    });
    assert!(rolls(&g));
}

#[test]
fn what_only_resembles_a_loop_stays() {
    let refused = |says: &str, turn: fn(&mut Graph, NodeId, u64) -> NodeId| {
        let mut g = Graph::new();
        let x = input(&mut g, "x", &[12, 3]);
        unrolled(&mut g, 4, 0, |g, i| turn(g, x, i));
        assert!(!rolls(&g), "{says}");
    };
    let tanh = |g: &mut Graph, x: NodeId| g.unary(UnaryOp::Tanh, x).unwrap();
    refused("slices overlap", |g, x, i| {
        let mine = part(g, x, 0, i * 2, 3);
        g.unary(UnaryOp::Tanh, mine).unwrap()
    });
    refused("slices are apart", |g, x, i| {
        let mine = part(g, x, 0, i * 3, 2);
        g.unary(UnaryOp::Tanh, mine).unwrap()
    });
    refused("slices are in another order", |g, x, i| {
        let mine = part(g, x, 0, (3 - i) * 3, 3);
        g.unary(UnaryOp::Tanh, mine).unwrap()
    });
    refused("turns differ", |g, x, i| {
        let mine = part(g, x, 0, i * 3, 3);
        g.unary(if i == 2 { UnaryOp::Exp } else { UnaryOp::Tanh }, mine).unwrap()
    });
    refused("turns have numbers of their own", |g, x, i| {
        let mine = part(g, x, 0, i * 3, 3);
        g.scale(mine, i as f64).unwrap()
    });
    // A turn's value is read by something else too.
    let mut g = Graph::new();
    let x = input(&mut g, "x", &[12, 3]);
    unrolled(&mut g, 4, 0, |g, i| {
        let mine = part(g, x, 0, i * 3, 3);
        tanh(g, mine)
    });
    let mine = part(&mut g, x, 0, 3, 3);
    let one = tanh(&mut g, mine);
    g.outputs.push(("one".to_owned(), one));
    assert!(!rolls(&g), "a turn is an output");
}
