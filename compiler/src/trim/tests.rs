//! What is left of graphs that read little of their values.

use super::*;
use crate::graph::verify;
use crate::interp::{Bindings, Precision, Tensor, outputs};
use crate::ops::{Attention, Input, Param};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::program::{Attention as Attributes, MaskKind, ParamKind};
use dcc_program::{DType, FactorSpec};

const B: u64 = 2;
const T: u64 = 6;
const C: u64 = 4;

fn input(g: &mut Graph) -> NodeId {
    let op = Input { name: "x".into(), dtype: DType::F64, shape: Shape::from_slice(&[B, T, C]), batch_dim: Some(0) };
    g.add(op, &[]).unwrap()
}

fn weight(g: &mut Graph, name: &str, shape: &[u64]) -> NodeId {
    let shape = Shape::from_slice(shape);
    g.add(Param { name: name.into(), kind: ParamKind::Weight, piece: None, dtype: DType::F64, shape }, &[]).unwrap()
}

fn linear(g: &mut Graph, x: NodeId, name: &str, from: u64, to: u64) -> NodeId {
    let w = weight(g, name, &[from, to]);
    g.dot("b t m, m n -> b t n", x, w).unwrap()
}

/// Positions `start..end`.
fn positions(g: &mut Graph, x: NodeId, start: u64, end: u64) -> NodeId {
    let shape = g.ty(x).shape.clone();
    let slice = Slice {
        start: Shape::from_slice(&[0, start, 0]),
        limit: Shape::from_slice(&[shape[0], end, shape[2]]),
        stride: Shape::from_elem(1, 3),
    };
    g.add(slice, &[x]).unwrap()
}

fn attention(g: &mut Graph, x: NodeId, layer: usize, causal: bool) -> NodeId {
    let [q, k, v] = ["q", "k", "v"].map(|name| linear(g, x, &format!("{layer}{name}"), C, C));
    let spec = FactorSpec::parse("b t e, b s e, b s f -> b t f").unwrap();
    let attributes = Attributes { spec, causal, mask: MaskKind::None, scale: 0.5f64.to_bits() };
    g.add(Attention { attributes, out: 0 }, &[q, k, v]).unwrap()
}

/// Attention and a feed-forward network, each added to what it reads.
fn layer(g: &mut Graph, x: NodeId, number: usize, causal: bool) -> NodeId {
    let attended = attention(g, x, number, causal);
    let x = g.binary(BinaryOp::Add, x, attended).unwrap();
    let wide = linear(g, x, &format!("{number}up"), C, 2 * C);
    let active = g.unary(UnaryOp::Gelu, wide).unwrap();
    let back = linear(g, active, &format!("{number}down"), 2 * C, C);
    g.binary(BinaryOp::Add, x, back).unwrap()
}

fn values(graph: &Graph) -> Vec<(String, Tensor)> {
    let wave = |shape: &[u64], name: &str| {
        let (n, k) = (shape.iter().product::<u64>(), name.bytes().map(f64::from).sum::<f64>());
        Tensor::floats(DType::F64, shape, (0..n).map(|i| (0.7 * i as f64 + k).sin()).collect())
    };
    let mut bindings = Bindings::default();
    for node in &graph.nodes {
        bindings = match &node.op {
            Op::Input(input) => bindings.input(&input.name, wave(&input.shape, &input.name)),
            Op::Param(param) => bindings.weight(&param.name, wave(&param.shape, &param.name)),
            _ => bindings,
        };
    }
    outputs(graph, &bindings, Precision::Exact).unwrap()
}

/// Trims the graph of these outputs, whose values stay.
fn trimmed(mut g: Graph, outputs: &[NodeId]) -> Graph {
    g.outputs = outputs.iter().enumerate().map(|(i, &id)| (i.to_string(), id)).collect();
    let trimmed = trim(&g).unwrap();
    verify(&trimmed).unwrap();
    assert_eq!(values(&trimmed), values(&g));
    trimmed
}

/// Sizes along `dim` of what the ops of that name give.
fn sizes(graph: &Graph, name: &str, dim: usize) -> Vec<u64> {
    graph.nodes.iter().filter(|node| node.op.name() == name).map(|node| node.ty.shape[dim]).collect()
}

/// Of attentions, in order.
fn causal(graph: &Graph) -> Vec<bool> {
    let of = |node: &Node| if let Op::Attention(op) = &node.op { Some(op.attributes.causal) } else { None };
    graph.nodes.iter().filter_map(of).collect()
}

#[test]
fn the_last_layer_is_computed_for_the_position_that_is_read() {
    let mut g = Graph::new();
    let x = input(&mut g);
    let first = layer(&mut g, x, 0, false);
    let last = layer(&mut g, first, 1, false);
    let class = positions(&mut g, last, 0, 1);
    let small = trimmed(g, &[class]);
    // Queries, keys and values, and the feed-forward network, of two layers.
    assert_eq!(sizes(&small, "dot_general", 1), [T, T, T, T, T, 1, T, T, 1, 1]);
    assert_eq!(sizes(&small, "attention", 1), [T, 1]);
    assert_eq!(sizes(&small, "unary", 1), [T, 1]);
    // What the first layer gives is read whole by keys and values: queries and the sum with the attention read a slice of it.
    assert_eq!(sizes(&small, "slice", 1), [1]);
}

#[test]
fn a_last_query_sees_all_keys_and_first_ones_their_own() {
    let of = |start: u64, end: u64| {
        let mut g = Graph::new();
        let x = input(&mut g);
        let attended = attention(&mut g, x, 0, true);
        let part = positions(&mut g, attended, start, end);
        let small = trimmed(g, &[part]);
        (sizes(&small, "attention", 1)[0], causal(&small)[0])
    };
    assert_eq!(of(T - 1, T), (1, false));
    assert_eq!(of(0, 1), (1, true));
    assert_eq!(of(0, 3), (3, true));
    // Queries in the middle see as many keys as their positions say, which counts from the first.
    assert_eq!(of(2, 4), (T, true));
    assert_eq!(of(T - 2, T), (T, true));
}

#[test]
fn what_is_read_nearly_whole_stays() {
    let mut g = Graph::new();
    let x = input(&mut g);
    let y = layer(&mut g, x, 0, false);
    let most = positions(&mut g, y, 0, T - 1);
    let small = trimmed(g, &[most]);
    assert_eq!(sizes(&small, "dot_general", 1), [T; 5]);
    assert_eq!(sizes(&small, "slice", 1), [T - 1]);
}

#[test]
fn two_readers_get_what_lies_between_them_too() {
    let between = |a: u64, b: u64| {
        let mut g = Graph::new();
        let x = input(&mut g);
        let y = linear(&mut g, x, "w", C, C);
        let [a, b] = [a, b].map(|at| positions(&mut g, y, at, at + 1));
        sizes(&trimmed(g, &[a, b]), "dot_general", 1)
    };
    assert_eq!(between(1, 3), [3]);
    assert_eq!(between(0, T - 1), [T]);
}

#[test]
fn strides_and_slices_of_slices() {
    let mut g = Graph::new();
    let x = input(&mut g);
    let y = linear(&mut g, x, "w", C, C);
    let even = Slice {
        start: Shape::from_slice(&[0, 1, 0]),
        limit: Shape::from_slice(&[B, T, C]),
        stride: Shape::from_slice(&[1, 2, 1]),
    };
    let even = g.add(even, &[y]).unwrap();
    let root = g.unary(UnaryOp::Exp, even).unwrap();
    let one = positions(&mut g, root, 1, 2);
    let small = trimmed(g, &[one]);
    assert_eq!((sizes(&small, "dot_general", 1), sizes(&small, "unary", 1)), (vec![1], vec![1]));
}

#[test]
fn samples_stay_together() {
    let mut g = Graph::new();
    let x = input(&mut g);
    let y = linear(&mut g, x, "w", C, C);
    let slice = Slice { start: Shape::from_elem(0, 3), limit: Shape::from_slice(&[1, T, C]), stride: Shape::from_elem(1, 3) };
    let first = g.add(slice, &[y]).unwrap();
    assert_eq!(sizes(&trimmed(g, &[first]), "dot_general", 0), [B]);
}

#[test]
fn an_output_is_read_whole() {
    let mut g = Graph::new();
    let x = input(&mut g);
    let y = linear(&mut g, x, "w", C, C);
    let first = positions(&mut g, y, 0, 1);
    assert_eq!(sizes(&trimmed(g, &[first, y]), "dot_general", 1), [T]);
}
