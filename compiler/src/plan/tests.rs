//! Plans of whole graphs.

mod stages;

use super::forward::Kind;
use super::testing::*;
use super::*;
use crate::graph::Graph;
use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, UnaryOp};
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

/// How parameters are used, what products, lookups and attention split, and the collectives of one microbatch.
fn summary(graph: &Graph, options: &Parallel) -> String {
    let (plan, collectives) = match tensor::account::solved(graph, options) {
        Ok(found) => found,
        Err(error) => return error.to_string(),
    };
    let mut out = String::new();
    for (&id, strategy) in &plan.strategies {
        let node = &graph[id];
        let spec = Forward::of(graph).rule(id).spec.clone();
        let text = strategy.text(&spec.names, &plan.mesh);
        match &node.op {
            crate::ops::Op::Param(param) => out += &format!("{} {{{text}}}\n", param.name),
            crate::ops::Op::DotGeneral(_) | crate::ops::Op::Gather(_) | crate::ops::Op::Attention(_) => {
                out += &format!("  {} {{{text}}}\n", spec.text());
            }
            _ => {}
        }
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for c in &collectives {
        let shape = &graph.ty(c.of).shape;
        *counts.entry(format!("{:?} {} {shape:?}", c.section, c.step.kind.name())).or_default() += 1;
    }
    out + &counts.iter().map(|(what, count)| format!("{count} × {what}\n")).collect::<String>()
}

#[test]
fn the_column_and_row_split_of_gpt_2_is_found() {
    let sizes = Sizes { layers: 1, vocabulary: 50257, ..SMALL };
    expect![[r#"
        wte {d0: tp}
        wpe {}
          v e, b t -> b t e {v: tp, b: mb dp}
        h.0.ln_1.weight {}
        h.0.ln_1.bias {}
        h.0.attn.q.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.attn.q.bias {d0: tp}
        h.0.attn.k.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.attn.k.bias {d0: tp}
        h.0.attn.v.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.attn.v.bias {d0: tp}
          b h t e, b h s e, b h s f -> b h t f {b: mb dp, h: tp}
        h.0.attn.proj.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        h.0.attn.proj.bias {}
        h.0.ln_2.weight {}
        h.0.ln_2.bias {}
        h.0.mlp.fc.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.mlp.fc.bias {d0: tp}
        h.0.mlp.proj.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        h.0.mlp.proj.bias {}
        ln_f.weight {}
        ln_f.bias {}
          b t d, v d -> b t v {b: mb dp, v: tp}
        3 × Backward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16]
    "#]]
    .assert_eq(&summary(&gpt(&sizes), &options(1, 2, 1, 1)));
    let two = summary(&gpt(&Sizes { layers: 2, ..sizes }), &options(1, 4, 1, 1));
    for (count, section) in [(5, "Forward"), (5, "Backward")] {
        assert!(two.contains(&format!("{count} × {section} all_reduce [8, 16, 64]")), "{two}");
    }
}

/// The collectives under sequence parallelism.
fn along_the_sequence(graph: &Graph, tp: u32) -> String {
    let summary = summary(graph, &Parallel { sequence_parallel: true, ..options(1, tp, 1, 1) });
    let lines = summary.lines().filter(|line| line.contains('×') || line.contains("error"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Between products a layer's values lie along the sequence, and what is gathered for a product is gathered again for its gradient.
#[test]
fn sequence_parallelism_is_found_between_products() {
    let sizes = Sizes { layers: 1, vocabulary: 50257, ..SMALL };
    expect![[r#"
        6 × Backward all_gather [8, 16, 64]
        2 × Backward all_gather [8, 16]
        3 × Backward reduce_scatter [8, 16, 64]
        3 × Forward all_gather [8, 16, 64]
        1 × Forward all_reduce [8, 16]
        1 × Forward all_reduce []
        3 × Forward reduce_scatter [8, 16, 64]
        2 × Forward reduce_scatter [8, 16]
        8 × Update all_reduce [64]
        1 × Update all_reduce []
    "#]]
    .assert_eq(&along_the_sequence(&gpt(&sizes), 2));
    expect![[r#"
        6 × Backward all_gather [8, 16, 64]
        2 × Backward all_gather [8, 16]
        1 × Backward all_to_all [16, 64]
        3 × Backward reduce_scatter [8, 16, 64]
        1 × Begin all_to_all [16, 64]
        3 × Forward all_gather [8, 16, 64]
        1 × Forward all_reduce [8, 16]
        1 × Forward all_reduce []
        3 × Forward reduce_scatter [8, 16, 64]
        2 × Forward reduce_scatter [8, 16]
        1 × Update all_reduce [2, 64]
        8 × Update all_reduce [64]
        1 × Update all_reduce []
    "#]]
    .assert_eq(&along_the_sequence(&bert(&sizes), 2));
    let plan = choose(&gpt(&sizes), &Parallel { sequence_parallel: true, ..options(1, 2, 1, 1) }).unwrap();
    let lies = |name: &str| plan.text(&gpt(&sizes)).lines().find(|line| line.contains(name)).map(str::to_owned);
    expect![[r#"
        %2 param wte(-> d0 d1) {d0: tp}
        %3 param wpe(-> d0 d1) {d0: tp}
        %22 param h.0.ln_1.weight(-> d0)
        %76 param h.0.mlp.fc.weight(-> d0 d1) {d1: tp}  # h.0.attn/Attention"#]]
    .assert_eq(&["wte", "wpe", "ln_1.weight", "fc.weight"].map(|name| lies(name).unwrap()).join("\n"));
}

/// Two key heads and four ranks make two axes.
#[test]
fn sequence_parallelism_is_found_with_shared_key_heads() {
    let shared = Sizes { layers: 1, kv_heads: 2, heads: 8, ..SMALL };
    expect![[r#"
        5 × Backward all_gather [8, 16, 64]
        2 × Backward all_gather [8, 16]
        1 × Backward all_to_all [8, 16, 64]
        3 × Backward reduce_scatter [8, 16, 64]
        3 × Forward all_gather [8, 16, 64]
        1 × Forward all_reduce [8, 16]
        1 × Forward all_reduce []
        1 × Forward all_to_all [8, 16, 64]
        2 × Forward reduce_scatter [8, 16, 64]
        2 × Forward reduce_scatter [8, 16]
        3 × Update all_reduce [64]
        1 × Update all_reduce []
    "#]]
    .assert_eq(&along_the_sequence(&llama(&shared), 2));
    expect![[r#"
        12 × Backward all_gather [8, 16, 64]
        4 × Backward all_gather [8, 16]
        2 × Backward all_gather [8, 2, 16, 8]
        1 × Backward all_to_all [8, 16, 64]
        6 × Backward reduce_scatter [8, 16, 64]
        2 × Backward reduce_scatter [8, 2, 16, 8]
        7 × Forward all_gather [8, 16, 64]
        2 × Forward all_gather [8, 2, 16, 8]
        1 × Forward all_reduce [8, 16]
        1 × Forward all_reduce []
        1 × Forward all_to_all [8, 16, 64]
        4 × Forward reduce_scatter [8, 16, 64]
        4 × Forward reduce_scatter [8, 16]
        3 × Update all_reduce [64]
        1 × Update all_reduce []
    "#]]
    .assert_eq(&along_the_sequence(&llama(&shared), 4));
    expect![[r#"
        error[DCC0312]: --sequence-parallel has nothing to split: no value has a dim, of at least 2 elements, that is neither of samples nor of weights, where no product or attention needs it whole
    "#]].assert_eq(&along_the_sequence(&mlp(64, &[256, 1024, 256]), 2));
}

#[test]
fn the_split_of_llama_is_found_with_shared_key_heads() {
    let sizes = Sizes { layers: 1, kv_heads: 2, heads: 8, ..SMALL };
    expect![[r#"
        embed {}
          v e, b t -> b t e {b: mb dp}
        h.0.input_norm.weight {}
        h.0.attn.q.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.attn.k.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.attn.v.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
          b h g t e, b h s e, b h s f -> b h g t f {b: mb dp, h: tp}
        h.0.attn.proj.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        h.0.post_norm.weight {}
        h.0.mlp.gate.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.mlp.up.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        h.0.mlp.down.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        norm.weight {}
        head.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        3 × Backward all_reduce [8, 16, 64]
        2 × Forward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16]
    "#]]
    .assert_eq(&summary(&llama(&sizes), &options(1, 2, 1, 1)));
    expect![[r#"
        embed {}
          v e, b t -> b t e {b: mb dp}
        h.0.input_norm.weight {}
        h.0.attn.q.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
        h.0.attn.k.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
        h.0.attn.v.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
          b h g t e, b h s e, b h s f -> b h g t f {b: mb dp, h: tp0, g: tp1}
        h.0.attn.proj.weight {d0: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, d: tp0 tp1}
        h.0.post_norm.weight {}
        h.0.mlp.gate.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
        h.0.mlp.up.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
        h.0.mlp.down.weight {d0: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, d: tp0 tp1}
        norm.weight {}
        head.weight {d1: tp0 tp1}
          b t d, d n -> b t n {b: mb dp, n: tp0 tp1}
        2 × Backward all_gather [8, 2, 16, 8]
        3 × Backward all_reduce [8, 16, 64]
        2 × Backward reduce_scatter [8, 2, 16, 8]
        2 × Forward all_gather [8, 2, 16, 8]
        2 × Forward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16]
    "#]]
    .assert_eq(&summary(&llama(&sizes), &options(1, 4, 1, 1)));
}

#[test]
fn the_split_of_bert_is_found() {
    let sizes = Sizes { layers: 1, vocabulary: 30522, ..SMALL };
    expect![[r#"
        embeddings.word {d0: tp}
        embeddings.type {d0: tp}
        embeddings.position {}
          v e, b t -> b t e {v: tp, b: mb dp}
          v e, b t -> b t e {v: tp, b: mb dp}
          v e, t -> t e {}
        embeddings.norm.weight {}
        embeddings.norm.bias {}
        layer.0.attention.q.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        layer.0.attention.q.bias {d0: tp}
        layer.0.attention.k.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        layer.0.attention.k.bias {d0: tp}
        layer.0.attention.v.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        layer.0.attention.v.bias {d0: tp}
          b h t e, b h s e, b h s f, b h t s -> b h t f {b: mb dp, h: tp}
        layer.0.attention.proj.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        layer.0.attention.proj.bias {}
        layer.0.attention.norm.weight {}
        layer.0.attention.norm.bias {}
        layer.0.intermediate.weight {d1: tp}
          b t d, d n -> b t n {b: mb dp, n: tp}
        layer.0.intermediate.bias {d0: tp}
        layer.0.output.weight {d0: tp}
          b t d, d n -> b t n {b: mb dp, d: tp}
        layer.0.output.bias {}
        layer.0.output.norm.weight {}
        layer.0.output.norm.bias {}
          b t d, v d -> b t v {b: mb dp, v: tp}
        decoder.bias {d0: tp}
        3 × Backward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16, 64]
        3 × Forward all_reduce [8, 16]
    "#]]
    .assert_eq(&summary(&bert(&sizes), &options(1, 2, 1, 1)));
}

#[test]
fn products_in_a_row_are_split_by_turns() {
    expect![[r#"
        fc0.weight {d1: tp}
          m k, k n -> m n {m: mb dp, n: tp}
        fc0.bias {d0: tp}
        fc1.weight {d0: tp}
          m k, k n -> m n {m: mb dp, k: tp}
        fc1.bias {d0: tp}
        fc2.weight {d0: tp}
          m k, k n -> m n {m: mb dp, k: tp}
        fc2.bias {}
        1 × Backward all_gather [64, 256]
        1 × Forward all_reduce [64, 10]
        1 × Forward reduce_scatter [64, 256]
    "#]]
    .assert_eq(&summary(&mlp(64, &[256, 1024, 256, 10]), &options(1, 2, 1, 1)));
}

#[test]
fn order_and_names_do_not_matter() {
    let graph = gpt(&Sizes { vocabulary: 50257, ..SMALL });
    let options = options(1, 2, 2, 2);
    let plan = choose(&graph, &options).unwrap();
    for seed in 1..4 {
        let (other, map) = shuffled(&graph, seed);
        let mapped = choose(&other, &options).unwrap();
        for (id, strategy) in &plan.strategies {
            assert_eq!(Some(strategy), mapped.strategies.get(&map[id.0 as usize]), "seed {seed} %{}", id.0);
            assert_eq!(plan.stages.get(id), mapped.stages.get(&map[id.0 as usize]), "seed {seed} %{}", id.0);
        }
    }
}

#[test]
fn a_pinned_parameter_is_used_as_pinned() {
    let pins = vec![Pin::parse("fc0.*=Replicate").unwrap(), Pin::parse("fc0.weight=Shard(0)@tp").unwrap()];
    let graph = mlp(64, &[256, 1024, 256]);
    expect![[r#"
        fc0.weight {d0: tp}
          m k, k n -> m n {m: mb dp, k: tp}
        fc0.bias {}
        fc1.weight {d0: tp}
          m k, k n -> m n {m: mb dp, k: tp}
        fc1.bias {d0: tp}
        1 × Backward all_gather [1024]
        1 × Backward all_gather [64, 1024]
        1 × Backward all_gather [64, 256]
        1 × Forward reduce_scatter [64, 1024]
        1 × Forward reduce_scatter [64, 256]
        1 × Update all_reduce []
    "#]]
    .assert_eq(&summary(&graph, &Parallel { pins, ..options(1, 2, 1, 1) }));
    let refused = |pin: &str| {
        let pins = vec![Pin::parse(pin).unwrap()];
        choose(&graph, &Parallel { pins, ..options(1, 2, 1, 1) }).unwrap_err().to_string()
    };
    expect![[r#"
        error[DCC0304]: --param fc9.* matches no parameter
          help parameters are named as in fc0.bias, fc0.weight, fc1.bias, fc1.weight"#]]
    .assert_eq(&refused("fc9.*=Replicate"));
    expect!["error[DCC0304]: --param fc0.bias=Shard(1)@tp: fc0.bias of shape [1024] has no dim 1"]
        .assert_eq(&refused("fc0.bias=Shard(1)@tp"));
}

/// As many ranks share them as can.
#[test]
fn heads_that_tp_does_not_divide_are_told() {
    let told = |graph: &Graph, tp: u32| {
        let options = options(1, tp, 1, 1);
        let plan = choose(graph, &options).unwrap();
        note(graph, &plan, &options).unwrap_or_default()
    };
    let wide = |heads, kv_heads| Sizes { heads, kv_heads, width: 96, ..SMALL };
    expect!["not all ranks of `--tp 8` can share attention with 12 heads: 2 compute each part alike; `--tp 2, 3, 4, 6 or 12` divides heads"]
        .assert_eq(&told(&gpt(&wide(12, 12)), 8));
    expect!["not all ranks of `--tp 8` can share attention with 12 heads over 4 key heads: 2 compute each part alike; `--tp 2, 4 or 12` divides heads"]
        .assert_eq(&told(&llama(&wide(12, 4)), 8));
    expect!["not all ranks of `--tp 2` can share attention with 3 heads: each computes it whole; `--tp 3` divides heads"]
        .assert_eq(&told(&gpt(&wide(3, 3)), 2));
    assert_eq!(told(&gpt(&wide(12, 12)), 4), "");
}

/// Data-parallel ranks are no way out for a batch that they do not divide.
#[test]
fn ranks_without_work_are_told_what_they_can_do() {
    let refused = |options: &Parallel| choose(&mlp(8, &[2, 3]), options).unwrap_err().to_string();
    expect![[r#"
        error[DCC0312]: --tp 4 has nothing to split: no product or lookup has a weight dim of at least 4 elements
          help use --dp 4 instead"#]]
    .assert_eq(&refused(&options(1, 4, 1, 1)));
    let help = |options: &Parallel| choose(&mlp(8, &[2, 3]), options).unwrap_err().help.expect("a way out");
    assert_eq!(help(&options(2, 4, 1, 1)), "use --dp 8 instead of --dp 2 --tp 4");
    assert_eq!(help(&options(2, 4, 1, 2)), "leave out --tp");
    let of = |options: Parallel, cp| Parallel { cp, ..options };
    assert_eq!(help(&of(options(2, 1, 1, 1), 2)), "use --dp 4 instead of --dp 2 --cp 2");
    assert_eq!(help(&of(options(2, 1, 1, 1), 8)), "leave out --cp");
    let long = choose(&gpt(&SMALL), &of(options(1, 1, 1, 1), 512)).unwrap_err().help.expect("a way out");
    assert_eq!(long, format!("use --cp {} or less", SMALL.tokens));
}

/// The sequence is no feature because the width has a constant in common with it.
#[test]
fn dims_that_share_a_constant_are_apart() {
    let graph = of_one_ramp(&Sizes { tokens: 64, ..SMALL });
    let of = |cp, tp| choose(&graph, &Parallel { cp, ..options(1, tp, 1, 1) }).map(|_| ());
    assert_eq!(of(2, 2), Ok(()));
}

#[test]
fn microbatches_that_no_interleaved_schedule_groups() {
    let help = |batch: u64, microbatches: u32, pp: u32| {
        let options = Parallel { virtual_stages: 2, ..options(1, 1, pp, microbatches) };
        choose(&mlp(batch, &[4, 8, 8, 8, 8, 3]), &options).unwrap_err().help.expect("a way out")
    };
    assert_eq!(help(6, 3, 2), "use --grad-accum 2, or leave out --virtual-stages");
    assert_eq!(help(12, 3, 2), "use --grad-accum 2, or leave out --virtual-stages");
    assert_eq!(help(15, 3, 2), "leave out --virtual-stages");
}

#[test]
fn ninety_six_layers_are_planned() {
    let (width, heads) = (12288, 96);
    let sizes =
        Sizes { batch: 64, tokens: 2048, width, heads, kv_heads: heads, hidden: 4 * width, vocabulary: 51200, layers: 96 };
    let graph = gpt(&sizes);
    for sequence_parallel in [false, true] {
        let plan = choose(&graph, &Parallel { sequence_parallel, ..options(2, 8, 16, 16) }).unwrap();
        assert_eq!(plan.stages.values().max(), Some(&15));
    }
}

/// From what keeps about as little as sequence parallelism to what `choose` finds, layer by layer.
#[test]
fn ninety_six_layers_have_a_front_of_time_and_memory() {
    let (width, heads) = (12288, 96);
    let sizes =
        Sizes { batch: 64, tokens: 2048, width, heads, kv_heads: heads, hidden: 4 * width, vocabulary: 51200, layers: 96 };
    let graph = gpt(&sizes);
    let options = options(2, 8, 16, 16);
    let front = Front::of(&graph, &options).unwrap();
    let plans: Vec<Plan> = (0..front.len()).step_by(4).map(|number| front.plan(number).unwrap()).collect();
    assert!(front.len() > 24, "{} plans", front.len());
    let whole = choose(&graph, &options).unwrap();
    let along = choose(&graph, &Parallel { sequence_parallel: true, ..options.clone() }).unwrap();
    let forward = Forward::of(&graph);
    let kept = |plan: &Plan| -> f64 {
        let of = |(&id, strategy): (&NodeId, &Strategy)| match forward.kind(id) {
            Kind::Batched => crate::cost::bytes(graph.ty(id), &forward.rule(id).spec.result, strategy, &plan.mesh),
            _ => 0.0,
        };
        plan.strategies.iter().map(of).sum()
    };
    assert!(plans.windows(2).all(|pair| kept(&pair[0]) < kept(&pair[1])));
    // All values count here, in the front those that gradients read.
    assert!(kept(&plans[0]) < 1.05 * kept(&along) && plans[0].sequence_parallel);
    let last = front.plan(front.len() - 1).unwrap();
    assert!(kept(&last) <= kept(&whole) && !last.sequence_parallel);
    assert!(kept(&plans[0]) < 0.6 * kept(&last));
}
