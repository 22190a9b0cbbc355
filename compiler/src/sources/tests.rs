//! Fused weights in the forms that exporters write, and what has to stay whole.

use super::*;
use crate::graph::verify;
use crate::interp::{Bindings, Precision, Tensor, outputs};
use crate::ops::{Input, Slice};
use dcc_program::DType;
use dcc_program::kernel::BinaryOp;

const B: u64 = 2;
const T: u64 = 3;
const K: u64 = 4;
/// Heads times their size, of one of q, k, v.
const N: u64 = 6;

/// `x w + b` with a fused weight; its columns are `[q | k | v]`.
fn fused(g: &mut Graph) -> NodeId {
    let op = Input { name: "x".into(), dtype: DType::F32, shape: Shape::from_slice(&[B, T, K]), batch_dim: Some(0) };
    let x = g.add(op, &[]).unwrap();
    let (w, b) = (weight(g, "w", &[K, 3 * N]), weight(g, "b", &[3 * N]));
    let y = g.dot("b t k, k n -> b t n", x, w).unwrap();
    let b = g.broadcast(b, &[B, T, 3 * N], &[2]).unwrap();
    g.binary(BinaryOp::Add, y, b).unwrap()
}

fn weight(g: &mut Graph, name: &str, shape: &[u64]) -> NodeId {
    let shape = Shape::from_slice(shape);
    g.add(Param { name: name.into(), kind: ParamKind::Weight, piece: None, dtype: DType::F32, shape }, &[]).unwrap()
}

fn slice(g: &mut Graph, x: NodeId, dim: usize, start: u64, end: u64) -> NodeId {
    let mut limit = g.ty(x).shape.clone();
    let mut from = Shape::from_elem(0, limit.len());
    (from[dim], limit[dim]) = (start, end);
    let stride = Shape::from_elem(1, limit.len());
    g.add(Slice { start: from, limit, stride }, &[x]).unwrap()
}

fn values(graph: &Graph) -> Vec<(String, Tensor)> {
    let wave = |shape: &[u64], k: f64| {
        let n: u64 = shape.iter().product();
        Tensor::floats(DType::F32, shape, (0..n).map(|i| (0.7 * i as f64 + k).sin()).collect())
    };
    let bindings = Bindings::default()
        .input("x", wave(&[B, T, K], 0.0))
        .weight("w", wave(&[K, 3 * N], 1.0))
        .weight("b", wave(&[3 * N], 2.0));
    outputs(graph, &bindings, Precision::Exact).unwrap()
}

/// Builds a graph of slices of the fused product and compares the pieces after `split`; the values stay.
fn check(build: impl FnOnce(&mut Graph, NodeId) -> Vec<NodeId>, expected: &[&str]) {
    let mut g = Graph::new();
    let y = fused(&mut g);
    let ids = build(&mut g, y);
    g.outputs = ids.into_iter().enumerate().map(|(i, id)| (i.to_string(), id)).collect();
    let split = split(&g).unwrap();
    verify(&split).unwrap();
    let piece = |n: &Node| match &n.op {
        Op::Param(p) => Some(match p.piece {
            Some(piece) => format!("{}[{}: {}..{}]", p.name, piece.dim, piece.start, piece.end),
            None => p.name.clone(),
        }),
        _ => None,
    };
    let mut got: Vec<String> = split.nodes.iter().filter_map(piece).collect();
    got.sort();
    assert_eq!(got, expected);
    assert_eq!(values(&split), values(&g));
}

const PIECES: [&str; 6] = ["b[0: 0..6]", "b[0: 12..18]", "b[0: 6..12]", "w[1: 0..6]", "w[1: 12..18]", "w[1: 6..12]"];

#[test]
fn slices_of_the_product() {
    check(|g, y| (0..3).map(|i| slice(g, y, 2, i * N, (i + 1) * N)).collect(), &PIECES);
}

#[test]
fn slices_after_a_reshape() {
    let build = |g: &mut Graph, y| {
        let split = g.reshape(y, &[B, T, 3, 2, 3]).unwrap();
        (0..3).map(|i| slice(g, split, 2, i, i + 1)).collect()
    };
    check(build, &PIECES);
}

#[test]
fn slices_after_a_reshape_and_a_transpose() {
    let build = |g: &mut Graph, y| {
        let split = g.reshape(y, &[B, T, 3, 2, 3]).unwrap();
        let turned = g.transpose(split, &[2, 0, 3, 1, 4]).unwrap();
        (0..3)
            .map(|i| {
                let one = slice(g, turned, 0, i, i + 1);
                g.reshape(one, &[B, 2, T, 3]).unwrap()
            })
            .collect()
    };
    check(build, &PIECES);
}

#[test]
fn slices_after_a_transposed_product() {
    let build = |g: &mut Graph, y| {
        let turned = g.transpose(y, &[0, 2, 1]).unwrap();
        vec![slice(g, turned, 1, 0, 2 * N), slice(g, turned, 1, 2 * N, 3 * N)]
    };
    check(build, &["b[0: 0..12]", "b[0: 12..18]", "w[1: 0..12]", "w[1: 12..18]"]);
}

#[test]
fn uneven_pieces() {
    check(
        |g, y| vec![slice(g, y, 2, 0, 5), slice(g, y, 2, 5, 3 * N)],
        &["b[0: 0..5]", "b[0: 5..18]", "w[1: 0..5]", "w[1: 5..18]"],
    );
}

#[test]
fn what_is_read_whole_stays_whole() {
    check(|g, y| vec![slice(g, y, 2, 0, N), slice(g, y, 2, N, 3 * N), y], &["b", "w"]);
}

#[test]
fn overlaps_and_gaps_stay_whole() {
    check(|g, y| vec![slice(g, y, 2, 0, N), slice(g, y, 2, N - 1, 3 * N)], &["b", "w"]);
    check(|g, y| vec![slice(g, y, 2, 0, N), slice(g, y, 2, N + 1, 3 * N)], &["b", "w"]);
}

#[test]
fn minor_parts_of_a_reshape_stay_whole() {
    let build = |g: &mut Graph, y| {
        let split = g.reshape(y, &[B, T, N, 3]).unwrap();
        (0..3).map(|i| slice(g, split, 3, i, i + 1)).collect()
    };
    check(build, &["b", "w"]);
}

#[test]
fn slices_of_samples_stay() {
    check(|g, y| vec![slice(g, y, 0, 0, 1), slice(g, y, 0, 1, B)], &["b", "w"]);
}
