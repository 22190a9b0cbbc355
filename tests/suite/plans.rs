//! What the planner finds on exported models: the collectives that `place` makes of its plans.

use crate::meshes::training_graph;
use dcc::graph::Phase;
use dcc::ops::Op;
use dcc::plan::{self, Parallel};
use dcc::place;
use dcc_program::Shape;
use expect_test::{Expect, expect};
use std::collections::BTreeMap;

/// The collectives over tensor axes of one microbatch, by section, kind and global shape.
fn check(model: &str, tp: u32, expected: Expect) {
    let graph = training_graph(model, 8);
    let plan = plan::choose(&graph, &Parallel { tp, ..Parallel::default() }).unwrap();
    let placed = place::place(&graph, &plan).unwrap();
    let mut counts: BTreeMap<(Phase, &str, Shape), usize> = BTreeMap::new();
    for node in &placed.nodes {
        if matches!(node.op, Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) | Op::AllToAll(_)) {
            *counts.entry((node.phase, node.op.name(), node.ty.shape.clone())).or_default() += 1;
        }
    }
    let line = |((phase, name, shape), count): (&(Phase, &str, Shape), &usize)| {
        format!("{count} × {} {name} {:?}\n", phase.name(), shape.as_slice())
    };
    expected.assert_eq(&counts.iter().map(line).collect::<String>());
}

#[test]
fn gpt_2() {
    check("gpt2_tiny.onnx", 2, expect![[r#"
        4 × forward all_gather [8, 16, 192]
        3 × forward all_reduce [8, 16]
        9 × forward all_reduce [8, 16, 64]
        12 × backward all_gather [8, 16, 64]
        9 × backward all_reduce [8, 16, 64]
        1 × update all_reduce []
    "#]]);
    check("gpt2_50257.onnx", 2, expect![[r#"
        4 × forward all_gather [8, 16, 768]
        3 × forward all_reduce [8, 16]
        9 × forward all_reduce [8, 16, 256]
        12 × backward all_gather [8, 16, 256]
        9 × backward all_reduce [8, 16, 256]
        1 × update all_reduce []
    "#]]);
}

#[test]
fn gpt_2_shuffled_and_renamed() {
    check("gpt2_tiny_shuffled.onnx", 2, expect![[r#"
        4 × forward all_gather [8, 16, 192]
        3 × forward all_reduce [8, 16]
        9 × forward all_reduce [8, 16, 64]
        12 × backward all_gather [8, 16, 64]
        9 × backward all_reduce [8, 16, 64]
        1 × update all_reduce []
    "#]]);
}

#[test]
fn llama() {
    check("llama_tiny.onnx", 2, expect![[r#"
        3 × forward all_reduce [8, 16]
        4 × forward all_reduce [8, 16, 64]
        5 × backward all_reduce [8, 16, 64]
        1 × update all_reduce []
    "#]]);
}

#[test]
fn bert() {
    check("bert_tiny.onnx", 2, expect![[r#"
        5 × forward all_reduce [8, 16]
        5 × forward all_reduce [8, 16, 64]
        1 × forward reduce_scatter [8, 16, 64]
        1 × backward all_gather [8, 16, 64]
        2 × backward all_reduce [8, 16]
        5 × backward all_reduce [8, 16, 64]
        1 × update all_reduce []
    "#]]);
}

#[test]
fn mlp() {
    check("mlp.onnx", 2, expect![[r#"
        1 × forward all_reduce [8, 10]
        1 × forward reduce_scatter [8, 128]
        1 × backward all_gather [8, 128]
        1 × update all_reduce []
    "#]]);
}
