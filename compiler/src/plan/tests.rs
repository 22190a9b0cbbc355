//! Plans of whole graphs.

use super::testing::*;
use super::*;
use crate::graph::Graph;
use expect_test::{Expect, expect};

fn options(dp: u32, tp: u32, pp: u32, microbatches: u32) -> Parallel {
    Parallel { dp, tp, pp, microbatches, ..Parallel::default() }
}

fn check(graph: &Graph, options: &Parallel, expected: Expect) {
    let text = match choose(graph, options) {
        Ok(plan) => plan.text(graph),
        Err(error) => format!("{error}\n"),
    };
    expected.assert_eq(&text);
}

/// Stage boundaries as the names of the first parameter each stage reads.
fn check_stages(graph: &Graph, pp: u32, expected: Expect) {
    let plan = match choose(graph, &options(1, 1, pp, 1)) {
        Ok(plan) => plan,
        Err(error) => return expected.assert_eq(&error.to_string()),
    };
    let mut first: BTreeMap<u32, String> = BTreeMap::new();
    for id in Forward::of(graph).order {
        let Some(&stage) = plan.stages.get(&id) else { continue };
        for operand in &graph[id].operands {
            assert!(plan.stages.get(operand).is_none_or(|&s| s <= stage), "a forward edge decreases the stage");
            if let crate::ops::Op::Param(param) = &graph[*operand].op {
                first.entry(stage).or_insert_with(|| param.name.clone());
            }
        }
    }
    let text: Vec<String> = first.iter().map(|(stage, name)| format!("{stage}: {name}")).collect();
    expected.assert_eq(&text.join(", "));
}

#[test]
fn the_batch_is_followed_through_the_graph() {
    check(
        &mlp(8, &[4, 6, 3]),
        &options(2, 1, 1, 2),
        expect![[r#"
        plan mesh(mb=2, pp=1, dp=2, tp=1) batch mb dp 1f1b
        %0 input x(-> d0 d1) {d0: mb dp}
        %1 param fc0.weight(-> d0 d1)
        %2 dot_general(m k, k n -> m n) {m: mb dp} stage 0
        %3 param fc0.bias(-> d0)
        %5 add(d0 d1, d0 d1 -> d0 d1) {d0: mb dp} stage 0
        %6 tanh(d0 d1 -> d0 d1) {d0: mb dp} stage 0
        %7 param fc1.weight(-> d0 d1)
        %8 dot_general(m k, k n -> m n) {m: mb dp} stage 0
        %9 param fc1.bias(-> d0)
        %11 add(d0 d1, d0 d1 -> d0 d1) {d0: mb dp} stage 0
        %12 mul(d0 d1, d0 d1 -> d0 d1) {d0: mb dp} stage 0
        %13 reduce(d0 d1 ->) {d0: mb dp} stage 0
    "#]],
    );
}

#[test]
fn a_batch_that_does_not_divide_is_refused() {
    check(
        &mlp(6, &[4, 3]),
        &options(2, 1, 1, 2),
        expect![[r#"
            error[DCC0302]: batch 6 of input x does not divide by 2 microbatches × --dp 2 = 4
              help use --global-batch-size 8
        "#]],
    );
}

#[test]
fn samples_of_several_microbatches_do_not_mix() {
    let graph = || {
        let mut g = mlp(8, &[4, 3]);
        let x = input(&mut g, "x", dcc_program::DType::F32, &[8, 4], Some(0));
        let sum = g.add(crate::ops::Cumsum { dim: 0, exclusive: false, reverse: false }, &[x]).unwrap();
        g.outputs.push(("sum".into(), sum));
        g
    };
    check(
        &graph(),
        &options(1, 1, 1, 2),
        expect![[r#"
            error[DCC0301]: cumsum needs the samples of all 2 microbatches at once: dim 0 of [8, 4]
              help use --grad-accum 1, where every device sees its whole batch
        "#]],
    );
    assert!(choose(&graph(), &options(2, 1, 1, 1)).is_ok());
}

#[test]
fn stages_are_balanced_and_cut_where_little_crosses() {
    check_stages(&gpt(&Sizes { layers: 4, ..SMALL }), 2, expect!["0: wte, 1: h.2.attn.q.weight"]);
    check_stages(
        &gpt(&Sizes { layers: 4, vocabulary: 50257, ..SMALL }),
        4,
        expect!["0: wte, 1: h.1.mlp.fc.weight, 2: h.2.mlp.fc.weight, 3: wte"],
    );
    check_stages(
        &gpt(&Sizes { layers: 2, ..SMALL }),
        4,
        expect!["0: wte, 1: h.0.mlp.fc.weight, 2: h.1.attn.q.weight, 3: h.1.mlp.fc.weight"],
    );
    check_stages(&mlp(8, &[4, 8, 8, 8, 3]), 4, expect!["0: fc0.weight, 1: fc1.weight, 2: fc2.weight, 3: fc3.weight"]);
    check_stages(
        &mlp(8, &[4, 8, 8, 8, 3]),
        5,
        expect![[r#"
            error[DCC0303]: --pp 5 needs 5 stages; the model has work for 4
              note 4 products and lookups depend on the batch, each stage computes at least one
              help use --pp 4 or less"#]],
    );
}
