//! Graphs that look like attention: what they compute stays, whether they become attention or not.

use super::examples::{input, softmax};
use super::*;
use crate::interp::outputs;
use dcc_program::kernel::{BinaryOp, UnaryOp};

/// `finish(softmax(start(Q·K)))·V`.
fn around(start: fn(&mut Graph, NodeId) -> NodeId, finish: fn(&mut Graph, NodeId) -> NodeId) -> Graph {
    let mut g = Graph::new();
    let [q, k, v] = ["q", "k", "v"].map(|name| input(&mut g, name, &[2, 3, 32, 6]));
    let scores = g.dot("b h t e, b h s e -> b h t s", q, k).unwrap();
    let scores = start(&mut g, scores);
    let p = softmax(&mut g, scores);
    let p = finish(&mut g, p);
    let o = g.dot("b h t s, b h s f -> b h t f", p, v).unwrap();
    g.outputs.push(("o".to_owned(), o));
    g
}

fn check(graph: &Graph, attentions: usize) {
    let after = simplify(graph).unwrap();
    let found = after.nodes.iter().filter(|n| matches!(n.op, Op::Attention(_))).count();
    assert_eq!(found, attentions, "{after}");
    let bindings = bind(graph);
    let values = |graph: &Graph| outputs(graph, &bindings, Precision::Exact).unwrap();
    for ((name, a), (_, b)) in values(graph).iter().zip(&values(&after)) {
        assert!(!differ(a, b), "{name}\n{after}");
    }
}

fn keep(_: &mut Graph, x: NodeId) -> NodeId {
    x
}

#[test]
fn a_scale_before_the_softmax_is_attention() {
    check(&around(|g, s| g.scale(s, 0.25).unwrap(), keep), 1);
}

#[test]
fn a_scale_after_the_softmax_scales_the_result() {
    let graph = around(keep, |g, p| g.scale(p, 0.25).unwrap());
    check(&graph, 1);
}

#[test]
fn weights_between_softmax_and_values_stay() {
    let dropped = |g: &mut Graph, p: NodeId| {
        let mask = input(g, "kept", &[2, 3, 32, 32]);
        g.binary(BinaryOp::Mul, p, mask).unwrap()
    };
    check(&around(keep, dropped), 0);
}

#[test]
fn scores_that_are_not_linear_stay() {
    check(&around(|g, s| g.unary(UnaryOp::Tanh, s).unwrap(), keep), 0);
}

#[test]
fn a_softmax_over_queries_stays() {
    let turned = |g: &mut Graph, x: NodeId| g.transpose(x, &[0, 1, 3, 2]).unwrap();
    check(&around(turned, turned), 0);
}

#[test]
fn a_mask_after_the_softmax_stays() {
    let masked = |g: &mut Graph, p: NodeId| {
        let mask = input(g, "mask", &[2, 3, 32, 32]);
        g.binary(BinaryOp::Add, p, mask).unwrap()
    };
    check(&around(keep, masked), 0);
}

#[test]
fn sums_of_something_else_stay() {
    let mut g = Graph::new();
    let [q, k, v, w] = ["q", "k", "v", "w"].map(|name| input(&mut g, name, &[2, 3, 32, 6]));
    let scores = g.dot("b h t e, b h s e -> b h t s", q, k).unwrap();
    let others = g.dot("b h t e, b h s e -> b h t s", w, k).unwrap();
    let (e, f) = (g.unary(UnaryOp::Exp, scores).unwrap(), g.unary(UnaryOp::Exp, others).unwrap());
    let sum = g.sum(f, &[3]).unwrap();
    let sum = g.broadcast(sum, &[2, 3, 32, 32], &[0, 1, 2]).unwrap();
    let p = g.binary(BinaryOp::Div, e, sum).unwrap();
    let o = g.dot("b h t s, b h s f -> b h t f", p, v).unwrap();
    g.outputs.push(("o".to_owned(), o));
    check(&g, 0);
}
