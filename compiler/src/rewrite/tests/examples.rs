//! A small graph for each rule that is written as code.

use crate::graph::{Graph, NodeId};
use crate::ops::{Attention, Concatenate, Input, Iota, Slice};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::{Attention as Attributes, MaskKind};
use dcc_program::{DType, FactorSpec, Reduce, Shape};

pub fn input(g: &mut Graph, name: &str, shape: &[u64]) -> NodeId {
    let op = Input { name: name.into(), dtype: DType::F64, shape: Shape::from_slice(shape), batch_dim: None };
    g.add(op, &[]).unwrap()
}

fn slice(g: &mut Graph, x: NodeId, dim: usize, start: u64, limit: u64, stride: u64) -> NodeId {
    let mut to = g.ty(x).shape.clone();
    let (mut from, mut by) = (Shape::from_elem(0, to.len()), Shape::from_elem(1, to.len()));
    (from[dim], to[dim], by[dim]) = (start, limit, stride);
    g.add(Slice { start: from, limit: to, stride: by }, &[x]).unwrap()
}

fn concatenate(g: &mut Graph, parts: &[NodeId], dim: u8) -> NodeId {
    g.add(Concatenate { dim }, parts).unwrap()
}

/// `softmax(s)` along the last dim.
pub fn softmax(g: &mut Graph, s: NodeId) -> NodeId {
    let shape = g.ty(s).shape.clone();
    let kept: Vec<usize> = (0..shape.len() - 1).collect();
    let max = g.reduce(Reduce::Max, s, &[shape.len() - 1]).unwrap();
    let max = g.broadcast(max, &shape, &kept).unwrap();
    let x = g.binary(BinaryOp::Sub, s, max).unwrap();
    let e = g.unary(UnaryOp::Exp, x).unwrap();
    let sum = g.sum(e, &[shape.len() - 1]).unwrap();
    let sum = g.broadcast(sum, &shape, &kept).unwrap();
    g.binary(BinaryOp::Div, e, sum).unwrap()
}

/// How the scores of an example are masked.
#[derive(Clone, Copy, PartialEq)]
enum Masked {
    No,
    /// `select(s <= t, scores, -∞)`
    Selected,
    /// `scores + select(t < s, -∞, 0)`
    Added,
    /// `scores + input`
    Input,
}

/// Attention over 2 batches, 3 heads, 4 queries, 5 keys, as it is written out.
fn decomposed(g: &mut Graph, masked: Masked, guarded: bool) {
    let (q, k, v) = (input(g, "q", &[2, 3, 4, 6]), input(g, "k", &[2, 3, 5, 6]), input(g, "v", &[2, 3, 5, 7]));
    let scores = g.dot("b h t e, b h s e -> b h t s", q, k).unwrap();
    let scores = g.scale(scores, 0.3).unwrap();
    let scores = mask(g, scores, masked);
    let mut p = softmax(g, scores);
    if guarded {
        let nan = g.unary(UnaryOp::IsNan, p).unwrap();
        let zero = g.splat_like(0.0, p).unwrap();
        p = g.select(nan, zero, p).unwrap();
    }
    g.dot("b h t s, b h s f -> b h t f", p, v).unwrap();
}

fn mask(g: &mut Graph, scores: NodeId, masked: Masked) -> NodeId {
    let shape = g.ty(scores).shape.clone();
    let position = |g: &mut Graph, n: u64, dim: usize| {
        let iota = g.add(Iota { dtype: DType::I64, shape: Shape::from_slice(&[n]), dim: 0 }, &[]).unwrap();
        g.broadcast(iota, &[4, 5], &[dim]).unwrap()
    };
    let (t, s) = (position(g, 4, 0), position(g, 5, 1));
    let off = g.splat_like(f64::NEG_INFINITY, scores).unwrap();
    match masked {
        Masked::No => scores,
        Masked::Selected => {
            let keep = g.compare(CompareOp::Le, s, t).unwrap();
            let keep = g.broadcast(keep, &shape, &[2, 3]).unwrap();
            g.select(keep, scores, off).unwrap()
        }
        Masked::Added => {
            let drop = g.compare(CompareOp::Lt, t, s).unwrap();
            let drop = g.broadcast(drop, &shape, &[2, 3]).unwrap();
            let zero = g.splat_like(0.0, scores).unwrap();
            let mask = g.select(drop, off, zero).unwrap();
            g.binary(BinaryOp::Add, scores, mask).unwrap()
        }
        Masked::Input => {
            let mask = input(g, "mask", &[2, 5]);
            let mask = g.broadcast(mask, &shape, &[0, 3]).unwrap();
            g.binary(BinaryOp::Add, mask, scores).unwrap()
        }
    }
}

/// Two queries' heads to each head of keys, repeated before the product.
fn grouped(g: &mut Graph) {
    let (q, k, v) = (input(g, "q", &[2, 6, 4, 5]), input(g, "k", &[2, 3, 4, 5]), input(g, "v", &[2, 3, 4, 5]));
    let mut repeat = |x: NodeId| {
        let wide = g.broadcast(x, &[2, 3, 2, 4, 5], &[0, 1, 3, 4]).unwrap();
        g.reshape(wide, &[2, 6, 4, 5]).unwrap()
    };
    let (k, v) = (repeat(k), repeat(v));
    let k = g.transpose(k, &[0, 1, 3, 2]).unwrap();
    let scores = g.dot("b h t e, b h e s -> b h t s", q, k).unwrap();
    let p = softmax(g, scores);
    g.dot("b h t s, b h s f -> b t h f", p, v).unwrap();
}

/// The op itself on keys and values that repeat: `heads` of them for six of queries.
fn repeated(g: &mut Graph, heads: u64) {
    let q = input(g, "q", &[2, 6, 4, 5]);
    let (k, v) = (input(g, "k", &[2, heads, 4, 5]), input(g, "v", &[2, heads, 4, 7]));
    let mask = input(g, "mask", &[2, 4]);
    let mut repeat = |x: NodeId, e: u64| match heads {
        1 => {
            let x = g.reshape(x, &[2, 4, e]).unwrap();
            g.broadcast(x, &[2, 6, 4, e], &[0, 2, 3]).unwrap()
        }
        _ => {
            let wide = g.broadcast(x, &[2, heads, 6 / heads, 4, e], &[0, 1, 3, 4]).unwrap();
            g.reshape(wide, &[2, 6, 4, e]).unwrap()
        }
    };
    let (k, v) = (repeat(k, 5), repeat(v, 7));
    let spec = FactorSpec::parse("b h t e, b h s e, b h s f, b s -> b h t f").unwrap();
    let attributes = Attributes { spec, causal: false, mask: MaskKind::Additive, scale: 0.3f64.to_bits() };
    g.add(Attention { attributes, out: 0 }, &[q, k, v, mask]).unwrap();
}

fn attention(g: &mut Graph) {
    let (q, k, v) = (input(g, "q", &[2, 4, 3, 6]), input(g, "k", &[2, 5, 3, 6]), input(g, "v", &[2, 5, 3, 7]));
    let (q, k) = (g.transpose(q, &[0, 2, 1, 3]).unwrap(), g.transpose(k, &[0, 2, 1, 3]).unwrap());
    let v = g.transpose(v, &[0, 2, 1, 3]).unwrap();
    let spec = FactorSpec::parse("b h t e, b h s e, b h s f -> b h t f").unwrap();
    let attributes = Attributes { spec, causal: true, mask: MaskKind::None, scale: 0.3f64.to_bits() };
    let o = g.add(Attention { attributes, out: 0 }, &[q, k, v]).unwrap();
    g.transpose(o, &[0, 2, 1, 3]).unwrap();
}

type Build = fn(&mut Graph);

const EXAMPLES: &[(&str, Build)] = &[
    ("cast-cast", |g| {
        let x = input(g, "x", &[2, 3]);
        let narrow = g.cast(x, DType::F32).unwrap();
        let wide = g.cast(narrow, DType::F64).unwrap();
        g.cast(wide, DType::F32).unwrap();
    }),
    ("compare-select", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2, 3]));
        let c = g.compare(CompareOp::Lt, x, y).unwrap();
        let (one, zero) = (g.splat_like(1.0, x).unwrap(), g.splat_like(0.0, x).unwrap());
        let number = g.select(c, one, zero).unwrap();
        g.compare(CompareOp::Eq, number, zero).unwrap();
        g.compare(CompareOp::Gt, one, number).unwrap();
        g.compare(CompareOp::Ge, number, zero).unwrap();
    }),
    ("not-compare", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2, 3]));
        let c = g.compare(CompareOp::Eq, x, y).unwrap();
        g.unary(UnaryOp::Not, c).unwrap();
        let (x, y) = (g.cast(x, DType::I64).unwrap(), g.cast(y, DType::I64).unwrap());
        for op in [CompareOp::Lt, CompareOp::Le, CompareOp::Gt, CompareOp::Ge] {
            let c = g.compare(op, x, y).unwrap();
            g.unary(UnaryOp::Not, c).unwrap();
        }
    }),
    ("reshape-reshape", |g| {
        let x = input(g, "x", &[2, 6]);
        let x = g.reshape(x, &[3, 4]).unwrap();
        g.reshape(x, &[12]).unwrap();
    }),
    ("transpose-transpose", |g| {
        let x = input(g, "x", &[2, 3, 4]);
        let x = g.transpose(x, &[2, 0, 1]).unwrap();
        g.transpose(x, &[1, 0, 2]).unwrap();
        g.transpose(x, &[1, 2, 0]).unwrap();
    }),
    ("transpose-reshape", |g| {
        let x = input(g, "x", &[1, 3, 1, 4]);
        g.transpose(x, &[1, 0, 3, 2]).unwrap();
    }),
    ("transpose-merged", |g| {
        let x = input(g, "x", &[2, 3, 4, 5]);
        let x = g.reshape(x, &[6, 4, 5]).unwrap();
        g.transpose(x, &[1, 2, 0]).unwrap();
    }),
    ("split-transpose", |g| {
        let x = input(g, "x", &[4, 6, 5]);
        let x = g.transpose(x, &[1, 2, 0]).unwrap();
        g.reshape(x, &[2, 3, 5, 2, 2]).unwrap();
    }),
    ("broadcast-broadcast", |g| {
        let x = input(g, "x", &[3]);
        let wide = g.broadcast(x, &[2, 3], &[1]).unwrap();
        g.broadcast(wide, &[4, 2, 5, 3], &[1, 3]).unwrap();
        let column = g.reshape(x, &[3, 1]).unwrap();
        let one = g.broadcast(column, &[2, 3, 1], &[1, 2]).unwrap();
        g.reshape(one, &[2, 3]).unwrap();
    }),
    ("pointwise-of-broadcasts", |g| {
        let (x, y) = (input(g, "x", &[3]), input(g, "y", &[3]));
        let (x, y) = (g.broadcast(x, &[2, 3], &[1]).unwrap(), g.broadcast(y, &[2, 3], &[1]).unwrap());
        let sum = g.binary(BinaryOp::Add, x, y).unwrap();
        g.scale(sum, 3.0).unwrap();
        g.scale(x, 2.0).unwrap();
        g.unary(UnaryOp::Sqrt, y).unwrap();
    }),
    ("pointwise-of-transposes", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2, 3]));
        let (x, y) = (g.transpose(x, &[1, 0]).unwrap(), g.transpose(y, &[1, 0]).unwrap());
        g.binary(BinaryOp::Sub, x, y).unwrap();
        g.scale(x, 2.0).unwrap();
        let table = input(g, "table", &[2]);
        let table = g.broadcast(table, &[3, 2], &[1]).unwrap();
        g.binary(BinaryOp::Div, table, x).unwrap();
    }),
    ("pointwise-of-reshapes", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2, 3]));
        let (x, y) = (g.reshape(x, &[6]).unwrap(), g.reshape(y, &[6]).unwrap());
        let c = g.compare(CompareOp::Lt, x, y).unwrap();
        g.select(c, x, y).unwrap();
    }),
    ("div-broadcast", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2]));
        let y = g.broadcast(y, &[2, 3], &[0]).unwrap();
        g.binary(BinaryOp::Div, x, y).unwrap();
    }),
    ("reduce-broadcast", |g| {
        let x = input(g, "x", &[3]);
        let x = g.broadcast(x, &[2, 3, 4], &[1]).unwrap();
        g.sum(x, &[0, 2]).unwrap();
        g.sum(x, &[2]).unwrap();
        g.reduce(Reduce::Max, x, &[0]).unwrap();
    }),
    ("reduce-scale", |g| {
        let x = input(g, "x", &[2, 3]);
        let x = g.scale(x, 0.7).unwrap();
        g.sum(x, &[1]).unwrap();
    }),
    ("reduce-reduce", |g| {
        let x = input(g, "x", &[2, 3, 4]);
        let x = g.sum(x, &[1]).unwrap();
        g.sum(x, &[1]).unwrap();
    }),
    ("slice-transpose", |g| {
        let x = input(g, "x", &[2, 5, 7]);
        let x = g.transpose(x, &[1, 2, 0]).unwrap();
        slice(g, x, 1, 1, 6, 2);
        slice(g, x, 2, 1, 2, 1);
    }),
    ("concatenate-transposes", |g| {
        let (x, y) = (input(g, "x", &[2, 3, 4]), input(g, "y", &[2, 3, 5]));
        let (x, y) = (g.transpose(x, &[2, 0, 1]).unwrap(), g.transpose(y, &[2, 0, 1]).unwrap());
        concatenate(g, &[x, y], 0);
    }),
    ("slice-slice", |g| {
        let x = input(g, "x", &[2, 12]);
        let x = slice(g, x, 1, 1, 12, 2);
        slice(g, x, 1, 1, 5, 3);
        slice(g, x, 0, 0, 2, 1);
    }),
    ("slice-concatenate", |g| {
        let (x, y) = (input(g, "x", &[2, 3]), input(g, "y", &[2, 4]));
        let both = concatenate(g, &[x, y], 1);
        slice(g, both, 1, 4, 6, 1);
        slice(g, both, 1, 0, 3, 2);
    }),
    ("concatenate-slices", |g| {
        let x = input(g, "x", &[2, 9]);
        let parts = [slice(g, x, 1, 1, 4, 1), slice(g, x, 1, 4, 5, 1), slice(g, x, 1, 5, 9, 1)];
        concatenate(g, &parts, 1);
    }),
    ("dot-transpose", |g| {
        let (x, y) = (input(g, "x", &[2, 4, 3]), input(g, "y", &[5, 4]));
        let (x, y) = (g.transpose(x, &[2, 0, 1]).unwrap(), g.transpose(y, &[1, 0]).unwrap());
        g.dot("a b k, k n -> a b n", x, y).unwrap();
    }),
    ("transpose-dot", |g| {
        let (x, y) = (input(g, "x", &[2, 3, 4]), input(g, "y", &[4, 5]));
        let dot = g.dot("a b k, k n -> a b n", x, y).unwrap();
        g.transpose(dot, &[2, 0, 1]).unwrap();
    }),
    ("dot-scale", |g| {
        let (x, y) = (input(g, "x", &[3, 4]), input(g, "y", &[4, 5]));
        let (x, y) = (g.scale(x, 0.5).unwrap(), g.scale(y, 3.0).unwrap());
        g.dot("m k, k n -> m n", x, y).unwrap();
    }),
    ("dot-broadcast", |g| {
        let (x, y) = (input(g, "x", &[2, 3, 4]), input(g, "y", &[4, 5]));
        let y = g.broadcast(y, &[2, 4, 5], &[1, 2]).unwrap();
        g.dot("b m k, b k n -> b m n", x, y).unwrap();
    }),
    ("dot-reshape", |g| {
        let (x, y, w) = (input(g, "x", &[2, 3, 2, 2]), input(g, "y", &[5, 4]), input(g, "w", &[4, 3, 2]));
        let x = g.reshape(x, &[6, 4]).unwrap();
        let w = g.reshape(w, &[4, 6]).unwrap();
        g.dot("m k, n k -> m n", x, y).unwrap();
        g.dot("m k, k n -> n m", x, w).unwrap();
    }),
    ("attention", |g| decomposed(g, Masked::No, false)),
    ("attention", |g| decomposed(g, Masked::Selected, true)),
    ("attention", |g| decomposed(g, Masked::Added, false)),
    ("attention", |g| decomposed(g, Masked::Input, true)),
    ("attention", grouped),
    ("attention-groups", |g| repeated(g, 3)),
    ("attention-groups", |g| repeated(g, 1)),
    ("attention-transpose", attention),
    ("transpose-attention", attention),
];

/// Rule and graph.
pub fn all() -> Vec<(&'static str, Graph)> {
    let build = |&(name, build): &(&'static str, Build)| {
        let mut graph = Graph::new();
        build(&mut graph);
        (name, graph)
    };
    EXAMPLES.iter().map(build).collect()
}
