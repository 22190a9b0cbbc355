//! What rewriting is worth in whole programs, and that what there is to compile grows with layers alone: counts, never seconds.

use dcc::Compiled;
use dcc::compile::{Options, Rewriting, compile, cost_of};
use dcc::import::Model;
use dcc::import::proto::{ModelProto, ValueInfoProto};
use dcc::loss::LossKind;
use dcc::plan::{Parallel, batch};
use dcc_program::program::{Action, Library};
use prost::Message;

fn read(model: &str) -> Vec<u8> {
    let path = format!("{}/models/{model}.onnx", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn options(rewriting: Rewriting, [batch, microbatches]: [u32; 2], parallel: Parallel) -> Options {
    let batch = batch::Given { global: Some(batch.into()), accumulate: Some(microbatches), ..Default::default() };
    Options { name: "model.onnx".to_owned(), batch, parallel, rewriting, ..Default::default() }
}

fn compiled(model: Vec<u8>, options: &Options) -> Compiled {
    let model = Model::decode(model.into()).expect("a model");
    compile(&model, options).unwrap_or_else(|e| panic!("{e}"))
}

/// Kernels and planned bytes of a training step of 16 samples in two microbatches, on one device.
fn cost(model: &[u8], rewriting: Rewriting) -> (usize, u64) {
    let mut options = options(rewriting, [16, 2], Parallel::default());
    let proto = ModelProto::decode(model).expect("a model");
    let hidden = proto.graph.expect("a graph").output.iter().any(|output| output.name() == HIDDEN);
    options.training.loss.kind = if hidden { LossKind::Mse } else { LossKind::NextToken };
    let compiled = compiled(model.to_vec(), &options);
    // Fusion is no part of rewriting: far fewer instructions than nodes, with or without rules.
    let instructions: usize = compiled.artifact.train.iter().flat_map(|p| &p.sections).map(|s| s.body.len()).sum();
    assert!(instructions * 3 < compiled.training.graph.nodes.len() * 2, "{instructions} instructions");
    cost_of(&compiled.artifact.train)
}

/// What a step needs without rules, in percent of what it needs with them: kernels and bytes.
fn percent_without_rules(name: &str, model: &[u8]) -> (u64, u64) {
    let (with, without) = (cost(model, Rewriting::On), cost(model, Rewriting::Off));
    let (kernels, bytes) = (100 * without.0 as u64 / with.0 as u64, 100 * without.1 / with.1);
    println!("{name}: {} kernels with rules, {} without ({kernels} %)", with.0, without.0);
    println!("{name}: {} bytes with rules, {} without ({bytes} %)", with.1, without.1);
    (kernels, bytes)
}

/// What the third layer of the large GPT reads: embeddings and two layers of the exported graph remain.
const HIDDEN: &str = "Add_73";

fn two_layers() -> Vec<u8> {
    let mut model = ModelProto::decode(&*read("gpt3_175b")).expect("a model");
    let graph = model.graph.as_mut().expect("a graph");
    graph.output[0] = ValueInfoProto { name: Some(HIDDEN.to_owned()), ..ValueInfoProto::default() };
    model.encode_to_vec()
}

#[test]
fn without_rules_a_step_needs_a_third_more() {
    let (_, bytes) = percent_without_rules("two layers of GPT, 2048 tokens", &two_layers());
    assert!(bytes >= 130, "{bytes} %");
    // At 16 tokens scores are no larger than what else there is: the rules save kernels.
    for name in ["gpt2_tiny_legacy", "gpt2_tiny_opset20", "bert_tiny_opset20", "llama_tiny_opset20"] {
        let (kernels, bytes) = percent_without_rules(name, &read(name));
        assert!(kernels >= 110 && bytes >= 100, "{name}: {kernels} % of the kernels, {bytes} % of the bytes");
    }
}

/// Of families beside those of `compiler/src/rewrite/tests`, whose exporters write attention out: one instruction a layer.
#[test]
fn attention_of_every_family_is_one_instruction() {
    let families =
        [("vit", 2), ("vit_legacy", 2), ("moe", 1), ("moe_legacy", 1), ("bert_tiny_legacy", 2), ("llama_tiny_opset18", 2)];
    for (name, layers) in families {
        let model = read(&format!("families/{name}"));
        let count = |rewriting| {
            let compiled = compiled(model.clone(), &options(rewriting, [5, 1], Parallel::default()));
            let body = compiled.artifact.train.iter().flat_map(|p| &p.sections).flat_map(|s| &s.body);
            body.filter(|i| matches!(i.action, Action::Library(Library::Attention(_)))).count()
        };
        assert_eq!((count(Rewriting::On), count(Rewriting::Off)), (layers, 0), "{name}");
    }
}

/// Twelve layers on as many stages: the programs of inner stages differ in nothing but names, since each layer is solved, fused and
/// planned like the one before.
#[test]
fn layers_compile_alike() {
    let parallel = Parallel { pp: 12, ..Parallel::default() };
    let compiled = compiled(read("gpt2_124m"), &options(Rewriting::On, [12, 12], parallel));
    let inner = &compiled.artifact.train[1..11];
    let shape = |i: usize| {
        let sections = inner[i].sections.iter();
        let kernel = |action: &Action| matches!(action, Action::Kernel(_));
        sections.map(|s| (s.body.len(), s.body.iter().filter(|i| kernel(&i.action)).count())).collect::<Vec<_>>()
    };
    for i in 1..inner.len() {
        assert_eq!(shape(i), shape(0), "stage {}", i + 1);
        assert_eq!(inner[i].kernels.len(), inner[0].kernels.len(), "stage {}", i + 1);
    }
}
