//! What the planner finds on exported models: the collectives that `place` makes of its plans, and the report.

use dcc::cost::sections;
use dcc::graph::{Graph, Phase};
use dcc::import::{self, Model};
use dcc::ops::Op;
use dcc::plan::{self, Parallel, Pin, Plan, Report};
use dcc::train::{Trainable, TrainingOptions, train_step};
use dcc::{place, schedule, sources};
use dcc_program::Shape;
use expect_test::{Expect, expect};
use std::collections::BTreeMap;

/// The training graph of a model of `tests/models`, its fused weights in pieces.
fn training_graph(model: &str, batch: u64) -> Graph {
    let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let model = Model::decode(std::fs::read(path).unwrap().into()).unwrap();
    let options = import::Options { global_batch: Some(batch), ..Default::default() };
    let imported = import::onnx(&model, &options).unwrap();
    let trainable =
        |p: &import::Parameter| Trainable { name: p.tensor.name.clone(), aliases: p.aliases.clone(), by_default: p.trained };
    let trainable: Vec<Trainable> = imported.parameters.iter().map(trainable).collect();
    train_step(&sources::split(&imported.graph).unwrap(), &trainable, &TrainingOptions::default()).unwrap().graph
}

fn placed(graph: &Graph, options: &Parallel) -> (Plan, Graph) {
    let plan = plan::choose(graph, options).unwrap();
    let placed = place::place(graph, &plan).unwrap();
    (plan, placed)
}

/// The collectives over tensor axes of one microbatch, by section, kind and global shape.
fn check(model: &str, tp: u32, expected: Expect) {
    check_collectives(model, &Parallel { tp, ..Parallel::default() }, expected);
}

/// The collectives of one microbatch, by section, kind and global shape.
fn check_collectives(model: &str, parallel: &Parallel, expected: Expect) {
    let (_, placed) = placed(&training_graph(model, 8), parallel);
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

fn check_report(model: &str, options: &Parallel, expected: Expect) {
    let graph = training_graph(model, 8);
    let (plan, placed) = placed(&graph, options);
    expected.assert_eq(&Report::of(&graph, &plan, &placed, &dcc::schedule::order(&plan), &options.machine).text());
}

#[test]
fn reports() {
    let options = |dp, tp, pp, microbatches| Parallel { dp, tp, pp, microbatches, ..Parallel::default() };
    check_report(
        "gpt2_tiny.onnx",
        &options(1, 2, 2, 4),
        expect![[r#"
            stage  layers                  params/rank  flops/rank/step  balance
            0      lm_head, wpe, h.0–h.1        58.2 k           52.4 M   91.3 %
            1      h.2–h.3, ln_f, lm_head       57.3 k           57.6 M  100.0 %
            communication per step   tp all_reduce 86 of 577.5 KiB   pp transfer 8 × 8.0 KiB   pp stage_sum 4 of 53.0 KiB   bubble 18.6 %
        "#]],
    );
    check_report(
        "llama_tiny.onnx",
        &options(2, 2, 1, 2),
        expect![[r#"
            stage  layers                                                   params/rank  flops/rank/step  balance
            0      embed_tokens, layers.0–layers.1, rotary_emb, … 5 in all       57.5 k           24.1 M  100.0 %
            communication per step   tp all_reduce 24 of 144.8 KiB   dp all_reduce 22 of 224.5 KiB   dp tp all_reduce 1 × 8 B   bubble 0.0 %
        "#]],
    );
}

#[test]
fn gpt_2() {
    check(
        "gpt2_tiny.onnx",
        2,
        expect![[r#"
            3 × forward all_reduce [8, 16]
            9 × forward all_reduce [8, 16, 64]
            9 × backward all_reduce [8, 16, 64]
            1 × update all_reduce []
        "#]],
    );
    check(
        "gpt2_50257.onnx",
        2,
        expect![[r#"
            3 × forward all_reduce [8, 16]
            9 × forward all_reduce [8, 16, 256]
            9 × backward all_reduce [8, 16, 256]
            1 × update all_reduce []
        "#]],
    );
}

#[test]
fn gpt_2_shuffled_and_renamed() {
    check(
        "gpt2_tiny_shuffled.onnx",
        2,
        expect![[r#"
            3 × forward all_reduce [8, 16]
            9 × forward all_reduce [8, 16, 64]
            9 × backward all_reduce [8, 16, 64]
            1 × update all_reduce []
        "#]],
    );
}

#[test]
fn llama() {
    check(
        "llama_tiny.onnx",
        2,
        expect![[r#"
        3 × forward all_reduce [8, 16]
        4 × forward all_reduce [8, 16, 64]
        5 × backward all_reduce [8, 16, 64]
        1 × update all_reduce []
    "#]],
    );
}

#[test]
fn bert() {
    check(
        "bert_tiny.onnx",
        2,
        expect![[r#"
            3 × forward all_reduce [8, 16]
            6 × forward all_reduce [8, 16, 64]
            1 × backward all_gather [8, 16, 64]
            5 × backward all_reduce [8, 16, 64]
            1 × update all_reduce []
        "#]],
    );
}

fn sharing(cp: u32, tp: u32) -> Parallel {
    Parallel { cp, tp, ..Parallel::default() }
}

/// Heads are shared where there are enough for all; otherwise keys and values are gathered, twice, and their gradients scattered.
#[test]
fn context_parallel_attention() {
    check_collectives(
        "gpt2_tiny.onnx",
        &sharing(2, 1),
        expect![[r#"
        16 × forward all_to_all [8, 4, 16, 16]
        1 × backward all_gather [16, 64]
        38 × backward all_reduce [64]
        16 × backward all_reduce [64, 64]
        4 × backward all_reduce [64, 256]
        1 × backward all_reduce [211, 64]
        4 × backward all_reduce [256]
        4 × backward all_reduce [256, 64]
        12 × backward all_to_all [8, 4, 16, 16]
        4 × backward all_to_all [8, 16, 4, 16]
        1 × update all_reduce []
    "#]],
    );
    check_collectives(
        "gpt2_tiny.onnx",
        &sharing(2, 2),
        expect![[r#"
        3 × forward all_reduce [8, 16]
        9 × forward all_reduce [8, 16, 64]
        16 × forward all_to_all [8, 4, 16, 16]
        1 × backward all_gather [16, 64]
        9 × backward all_reduce [8, 16, 64]
        38 × backward all_reduce [64]
        16 × backward all_reduce [64, 64]
        4 × backward all_reduce [64, 256]
        1 × backward all_reduce [211, 64]
        4 × backward all_reduce [256]
        4 × backward all_reduce [256, 64]
        12 × backward all_to_all [8, 4, 16, 16]
        4 × backward all_to_all [8, 16, 4, 16]
        2 × update all_reduce []
    "#]],
    );
    check_collectives(
        "gpt2_tiny.onnx",
        &sharing(8, 1),
        expect![[r#"
        8 × forward all_gather [8, 4, 16, 16]
        8 × backward all_gather [8, 4, 16, 16]
        1 × backward all_gather [16, 64]
        38 × backward all_reduce [64]
        16 × backward all_reduce [64, 64]
        4 × backward all_reduce [64, 256]
        1 × backward all_reduce [211, 64]
        4 × backward all_reduce [256]
        4 × backward all_reduce [256, 64]
        8 × backward reduce_scatter [8, 4, 16, 16]
        1 × update all_reduce []
    "#]],
    );
}

#[test]
fn context_parallel_attention_of_few_key_heads() {
    check_collectives(
        "llama_tiny.onnx",
        &sharing(2, 1),
        expect![[r#"
        8 × forward all_to_all [8, 4, 16, 16]
        4 × backward all_reduce [32, 64]
        5 × backward all_reduce [64]
        4 × backward all_reduce [64, 64]
        2 × backward all_reduce [64, 128]
        4 × backward all_reduce [128, 64]
        2 × backward all_reduce [211, 64]
        6 × backward all_to_all [8, 4, 16, 16]
        2 × backward all_to_all [8, 16, 4, 16]
        1 × update all_reduce []
    "#]],
    );
    check_collectives(
        "llama_tiny.onnx",
        &sharing(4, 1),
        expect![[r#"
        8 × forward all_to_all [8, 4, 16, 16]
        4 × backward all_reduce [32, 64]
        5 × backward all_reduce [64]
        4 × backward all_reduce [64, 64]
        2 × backward all_reduce [64, 128]
        4 × backward all_reduce [128, 64]
        2 × backward all_reduce [211, 64]
        6 × backward all_to_all [8, 4, 16, 16]
        2 × backward all_to_all [8, 16, 4, 16]
        1 × update all_reduce []
    "#]],
    );
}

#[test]
fn mlp() {
    check(
        "mlp.onnx",
        2,
        expect![[r#"
        1 × forward all_reduce [8, 10]
        1 × forward reduce_scatter [8, 128]
        1 × backward all_gather [8, 128]
        1 × update all_reduce []
    "#]],
    );
}

/// Estimated seconds of a step of a model's programs under `--tp 2` with what is pinned.
fn seconds(model: &str, pins: &[&str]) -> f64 {
    let pins = pins.iter().map(|pin| Pin::parse(pin).unwrap_or_else(|error| panic!("{pin}: {error}"))).collect();
    let parallel = Parallel { tp: 2, pins, ..Parallel::default() };
    let machine = parallel.machine;
    let compiled = crate::compile::compiled(model, parallel, 1).unwrap_or_else(|error| panic!("{model}: {error}"));
    let programs = &compiled.artifact.train;
    let costs = sections::costs(programs, compiled.order.layout, &machine);
    let passes = schedule::simulate(&compiled.order, &costs).expect("an order that ends").cost;
    passes + programs.iter().map(|program| sections::once(program, &machine)).fold(0.0, f64::max)
}

/// What the planner finds is estimated to take no longer than the plan that Megatron's authors made by hand (Shoeybi et al. 2019, arXiv
/// 1909.08053, section 3; of a ResNet's blocks, the same by channels), which takes less than with every weight whole.
#[test]
fn plans_are_no_dearer_than_those_made_by_hand() {
    let cases: [(&str, &[&str]); 4] = [
        (
            "gpt2_124m.onnx",
            &[
                "*.c_attn.weight=Shard(1)@tp",
                "*.attn.c_proj.weight=Shard(0)@tp",
                "*.c_fc.weight=Shard(1)@tp",
                "*.mlp.c_proj.weight=Shard(0)@tp",
                "lm_head.weight=Shard(0)@tp",
            ],
        ),
        (
            "llama_tiny.onnx",
            &[
                "*.q_proj.weight=Shard(0)@tp",
                "*.k_proj.weight=Shard(0)@tp",
                "*.v_proj.weight=Shard(0)@tp",
                "*.o_proj.weight=Shard(1)@tp",
                "*.gate_proj.weight=Shard(0)@tp",
                "*.up_proj.weight=Shard(0)@tp",
                "*.down_proj.weight=Shard(1)@tp",
                "*embed_tokens.weight=Shard(0)@tp",
                "lm_head.weight=Shard(0)@tp",
            ],
        ),
        (
            "families/vit.onnx",
            &[
                "*.q_proj.weight=Shard(0)@tp",
                "*.k_proj.weight=Shard(0)@tp",
                "*.v_proj.weight=Shard(0)@tp",
                "*.o_proj.weight=Shard(1)@tp",
                "*.fc1.weight=Shard(0)@tp",
                "*.fc2.weight=Shard(1)@tp",
            ],
        ),
        ("families/resnet.onnx", &["*.narrow.0.weight=Shard(0)@tp", "*.middle.0.weight=Shard(1)@tp"]),
    ];
    for (model, pins) in cases {
        let [found, by_hand, whole] = [seconds(model, &[]), seconds(model, pins), seconds(model, &["*.weight=Replicate"])];
        println!("{model}: {found:.3e} s, by hand {by_hand:.3e} s, whole {whole:.3e} s");
        assert!(found <= by_hand, "{model}: {found:e} s, by hand {by_hand:e} s");
        assert!(by_hand < whole, "{model}: by hand {by_hand:e} s, whole {whole:e} s");
    }
}
