//! Models that are long chains. No pass may call itself for each node on the way from an output to an input: these tests have the stack
//! of a thread, 2 MiB.

use crate::onnx_model::{int_tensor, model, node, size, tensor, value, with_int, with_tensor};
use dcc::compile::{Options, Subject, compile};
use dcc::import::Model;
use dcc::import::proto::{ModelProto, NodeProto};
use dcc::interp::{Bindings, Precision, Tensor, outputs};
use dcc::loss::{LossKind, LossOptions};
use dcc::plan::batch;
use dcc::train::TrainingOptions;
use dcc_program::{DType, TensorType};
use prost::Message;

/// `y` from `x`, f32[2, 4], through what `step` makes of the name of its operand and of its result, so many times, behind `first`; with a
/// weight `w`, f32[4, 4], and a row of ones `ones`.
fn chain(steps: usize, first: &[NodeProto], step: impl Fn(&str, &str) -> Vec<NodeProto>) -> ModelProto {
    let name = |at: usize| if at == steps { "y".to_owned() } else { format!("v{at}") };
    let nodes = (0..steps).flat_map(|at| step(&name(at), &name(at + 1)));
    let mut proto = model(&first.iter().cloned().chain(nodes).collect::<Vec<_>>());
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(2), size(4)])];
    let floats = |count: usize, of: f32| of.to_le_bytes().repeat(count);
    let tensors = [tensor("w", &[4, 4], &floats(16, 0.5)), tensor("ones", &[4], &floats(4, 1.0))];
    tensors.into_iter().fold(proto, with_tensor)
}

fn product() -> NodeProto {
    node("MatMul", &["x", "w"], &["v0"])
}

/// Compiles for training; the nodes of its placed graph.
#[track_caller]
fn trains(proto: &ModelProto) -> usize {
    let model = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let training = TrainingOptions { loss: LossOptions { kind: LossKind::Mse, ..Default::default() }, ..Default::default() };
    let batch = batch::Given { global: Some(2), ..Default::default() };
    let options = Options { name: "chain.onnx".to_owned(), batch, training, ..Default::default() };
    compile(&model, &options).unwrap_or_else(|error| panic!("{error}")).placed.nodes.len()
}

/// Compiles for evaluation; the first element of `y` of ones, by the meaning of the simplified graph.
#[track_caller]
fn evaluates(proto: &ModelProto) -> f64 {
    let model = Model::decode(proto.encode_to_vec().into()).expect("a model");
    let subject = Subject::of_model(&model, &Options { name: "chain.onnx".to_owned(), ..Default::default() });
    let evaluation = subject.and_then(|subject| subject.outputs()).unwrap_or_else(|error| panic!("{error}"));
    let filled = |shape: &[u64], of| Tensor::filled(&TensorType::new(DType::F32, shape.iter().copied()), of);
    let bound = Bindings::default().input("x", filled(&[2, 4], 1.0));
    let bound = bound.weight("w", filled(&[4, 4], 0.5)).weight("ones", filled(&[4], 1.0));
    let values = outputs(&evaluation.graph, &bound, Precision::Exact).unwrap_or_else(|error| panic!("{error}"));
    values[0].1.f64s()[0]
}

#[test]
fn chains_of_activations() {
    let tanh = |from: &str, to: &str| vec![node("Tanh", &[from], &[to])];
    let proto = chain(20_000, &[product()], tanh);
    let found = evaluates(&proto);
    // x ↦ tanh x goes to 0 as √(3 / 2n).
    assert!((found / (1.5_f64 / 20_000.0).sqrt() - 1.0).abs() < 0.01, "{found}");
    assert!(trains(&chain(2_000, &[product()], tanh)) > 4_000);
}

#[test]
fn chains_of_sums() {
    let add = |from: &str, to: &str| vec![node("Add", &[from, "ones"], &[to])];
    assert_eq!(evaluates(&chain(20_000, &[product()], add)), 20_002.0);
    assert!(trains(&chain(2_000, &[product()], add)) > 2_000);
}

#[test]
fn chains_of_products() {
    assert!(trains(&chain(2_000, &[product()], |from, to| vec![node("MatMul", &[from, "w"], &[to])])) > 4_000);
}

/// Without samples: what is made of weights alone, and of random numbers alone.
#[test]
fn chains_of_what_is_made_where_it_is_read() {
    let tanh = |from: &str, to: &str| vec![node("Tanh", &[from], &[to])];
    let behind = |first: NodeProto, steps: usize| {
        let mut proto = chain(steps, &[first, node("MatMul", &["x", "w"], &["xw"])], tanh);
        let graph = proto.graph.as_mut().expect("a graph");
        graph.node.last_mut().expect("a step").output[0] = "last".to_owned();
        graph.node.push(node("Add", &["xw", "last"], &["y"]));
        proto
    };
    assert!(trains(&behind(node("Identity", &["ones"], &["v0"]), 2_000)) > 2_000);
    assert!(trains(&behind(node("RandomUniformLike", &["xw"], &["v0"]), 2_000)) > 2_000);
}

/// Each reads the one before as what repeats along a dim.
#[test]
fn chains_through_broadcasts() {
    let step = |from: &str, to: &str| {
        let sum = format!("{to}s");
        let keep = |node| with_int(node, "keepdims", 1);
        vec![keep(node("ReduceSum", &[from, "one"], &[&sum])), node("Mul", &[&sum, "quarters"], &[to])]
    };
    let proto = with_tensor(chain(2_000, &[product()], step), int_tensor("one", &[1], &[1]));
    let quarters = tensor("quarters", &[4], &0.25_f32.to_le_bytes().repeat(4));
    assert!(trains(&with_tensor(proto, quarters)) > 4_000);
}

/// Halves change places, one of them as another value: nothing joins what is moved.
#[test]
fn chains_of_what_is_moved() {
    let step = |from: &str, to: &str| {
        let [a, b, c] = ["a", "b", "c"].map(|part| format!("{to}{part}"));
        let split = with_int(with_int(node("Split", &[from], &[&a, &b]), "axis", 1), "num_outputs", 2);
        vec![split, node("Tanh", &[&a], &[&c]), with_int(node("Concat", &[&b, &c], &[to]), "axis", 1)]
    };
    assert!(trains(&chain(1_000, &[product()], step)) > 2_000);
}
