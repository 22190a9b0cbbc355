//! The whole compiler on the graphs of `tests/models`: every mesh gives programs that pass the gate; every pass prints and parses.

use crate::onnx_model::{model, node, tensor, with_int, with_tensor};
use dcc::compile::{Options, compile};
use dcc::graph::Graph;
use dcc::import::Model;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::tensor_proto::DataType;
use dcc::import::proto::{AttributeProto, ModelProto, NodeProto, TensorProto};
use dcc::optimizer::OptimizerOptions;
use dcc::plan::{Parallel, batch};
use dcc::train::TrainingOptions;
use dcc_program::program::Program;
use dcc_program::text;
use prost::Message;

/// The compilation of a model at batch 8.
pub fn compiled(model: &str, parallel: Parallel, microbatches: u32) -> dcc::Result<dcc::Compiled> {
    let batch = batch::Given { global: Some(8), accumulate: Some(microbatches), ..Default::default() };
    of(model, Options { batch, parallel, ..Default::default() })
}

/// The training programs of a model, of a batch in so many microbatches.
#[track_caller]
pub fn lowered(
    model: &str,
    parallel: Parallel,
    (batch, microbatches): (u64, u32),
    optimizer: OptimizerOptions,
) -> Vec<Program> {
    let batch = batch::Given { global: Some(batch), accumulate: Some(microbatches), ..Default::default() };
    let training = TrainingOptions { optimizer, ..Default::default() };
    let options = Options { batch, parallel, training, ..Default::default() };
    of(model, options).unwrap_or_else(|e| panic!("{model}: {e}")).artifact.train
}

/// With these options.
pub fn of(model: &str, options: Options) -> dcc::Result<dcc::Compiled> {
    let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    compile(&Model::decode(bytes.into())?, &Options { name: "model.onnx".to_owned(), ..options })
}

fn check(model: &str) {
    for (dp, tp, pp, microbatches) in [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 4), (2, 2, 2, 2)] {
        let parallel = Parallel { dp, tp, pp, ..Parallel::default() };
        let compiled = compiled(model, parallel, microbatches).unwrap_or_else(|e| panic!("{model} {dp} {tp} {pp}: {e}"));
        for graph in [&compiled.forward, &compiled.training.graph, &compiled.training.eval, &compiled.placed] {
            let text = graph.to_string();
            let parsed = Graph::parse(&text).unwrap_or_else(|e| panic!("{model} {dp} {tp} {pp}: {e}"));
            assert!(parsed.to_string() == text, "{model} {dp} {tp} {pp}: the text of a pass is not what it was");
        }
        for program in compiled.artifact.train.iter().chain(&compiled.artifact.eval) {
            let text = text::print(program);
            let parsed = text::parse(&text).unwrap_or_else(|e| panic!("{model} {dp} {tp} {pp}: {e}"));
            assert!(text::print(&parsed) == text, "{model} {dp} {tp} {pp}: the text of a program is not what it was");
        }
        assert_eq!(compiled.artifact.train.len(), pp as usize);
        assert_eq!(compiled.artifact.eval.len(), pp as usize);
    }
}

/// Evaluation that would keep initial values, as a parameter of its stage trains on another, is refused.
#[test]
fn evaluation_reads_what_training_changes() {
    let parallel = Parallel { pp: 2, ..Parallel::default() };
    let artifact = compiled("gpt2_tiny.onnx", parallel, 2).unwrap_or_else(|e| panic!("{e}")).artifact;
    let mut elsewhere = artifact.train.clone();
    elsewhere.reverse();
    for stage in 0..2 {
        let mut eval = artifact.eval[stage].clone();
        dcc::lower::share(&artifact.train, stage, &mut eval).unwrap_or_else(|e| panic!("{e}"));
        let error = dcc::lower::share(&elsewhere, stage, &mut eval).expect_err("its parameters train on the other stage");
        assert_eq!(error.code.to_string(), "DCC1001", "{error}");
    }
}

/// A tensor of floats that are all different.
fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let values = (0..dims.iter().product()).map(|i: i64| (i as f32).mul_add(0.25, -0.5).to_le_bytes());
    tensor(name, dims, &values.collect::<Vec<_>>().concat())
}

const SMALL: [(u32, u32, u32); 5] = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)];

/// A model compiles on these meshes, as one microbatch.
fn compiles(proto: &ModelProto, meshes: &[(u32, u32, u32)]) {
    let model = Model::decode(proto.encode_to_vec().into()).expect("a model");
    for &(dp, tp, pp) in meshes {
        let batch = batch::Given { global: Some(2), accumulate: Some(1), ..Default::default() };
        let parallel = Parallel { dp, tp, pp, ..Parallel::default() };
        let compiled = compile(&model, &Options { batch, parallel, ..Default::default() });
        let compiled = compiled.unwrap_or_else(|e| panic!("{dp} {tp} {pp}: {e}"));
        assert_eq!(compiled.artifact.train.len(), pp as usize);
    }
}

fn ints(name: &str, values: &[i64]) -> TensorProto {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    TensorProto { data_type: Some(DataType::Int64.into()), ..tensor(name, &[values.len() as i64], &raw) }
}

/// A row looked up for each sample among those of the whole batch, `t`: a sum over the batch's parts.
fn of_whole_batch(nodes: &[NodeProto], tensors: &[TensorProto]) -> ModelProto {
    let look_up = [
        with_int(with_int(node("ArgMax", &["x"], &["at"]), "axis", 1), "keepdims", 0),
        node("Reshape", &["x", "shape"], &["flat"]),
        node("Gather", &["flat", "at"], &["rows"]),
        node("MatMul", &["rows", "w"], &["t"]),
    ];
    let own = [ints("shape", &[-1, 1]), floats("w", &[1, 4])];
    own.iter().chain(tensors).cloned().fold(model(&[&look_up, nodes].concat()), with_tensor)
}

/// A square reads the sum twice, once as a sum.
#[test]
fn sums_over_the_batch_are_read_twice() {
    compiles(&of_whole_batch(&[node("Mul", &["t", "t"], &["y"])], &[]), &SMALL);
}

/// Two views of one sum, each read whole.
#[test]
fn views_of_a_sum_are_resolved_once() {
    let nodes = [
        node("Reshape", &["t", "pair"], &["pairs"]),
        node("Tanh", &["t"], &["a"]),
        with_int(node("Softmax", &["pairs"], &["b"]), "axis", 1),
        node("MatMul", &["b", "v"], &["c"]),
        node("ReduceMax", &["c"], &["d"]),
        node("Mul", &["a", "d"], &["y"]),
    ];
    compiles(&of_whole_batch(&nodes, &[ints("pair", &[-1, 2]), floats("v", &[2, 1])]), &SMALL);
}

/// `u` is computed before `t` from what shares a kernel with `m`, which reads `t`: `n` cannot share one with `t`.
#[test]
fn kernels_do_not_wait_for_each_other() {
    let nodes = [
        node("Relu", &["x"], &["v"]),
        node("MatMul", &["a", "v"], &["square"]),
        node("MatMul", &["square", "b"], &["u"]),
        node("MatMul", &["x", "b"], &["q"]),
        node("MatMul", &["a", "q"], &["p"]),
        node("Tanh", &["p"], &["t"]),
        node("Transpose", &["t"], &["back"]),
        node("Add", &["v", "back"], &["m"]),
        node("Mul", &["u", "t"], &["n"]),
        node("MatMul", &["m", "n"], &["y"]),
    ];
    compiles(&with_tensor(with_tensor(model(&nodes), floats("a", &[3, 2])), floats("b", &[3, 2])), &SMALL);
}

/// What no input reaches trains all the same.
#[test]
fn outputs_of_parameters_alone_have_gradients() {
    let nodes = [node("Tanh", &["w"], &["t"]), node("MatMul", &["t", "v"], &["y"])];
    let model = with_tensor(with_tensor(model(&nodes), floats("w", &[2, 3])), floats("v", &[3, 4]));
    compiles(&model, &[(1, 1, 1), (2, 1, 1)]);
}

macro_rules! models {
    ($($test:ident = $model:literal),+ $(,)?) => { $(#[test] fn $test() { check($model) })+ };
}

models! {
    mlp = "mlp.onnx", mlp_legacy = "mlp_legacy.onnx", mlp_sce = "mlp_sce.onnx", mlp_nll = "mlp_nll.onnx",
    gpt2_tiny = "gpt2_tiny.onnx", gpt2_tiny_opset18 = "gpt2_tiny_opset18.onnx", gpt2_tiny_dropout = "gpt2_tiny_dropout.onnx",
    gpt2_tiny_shuffled = "gpt2_tiny_shuffled.onnx", lstm = "lstm.onnx", gru_optimized = "gru_optimized.onnx",
    llama_tiny = "llama_tiny.onnx", bert_tiny = "bert_tiny.onnx",
}

/// Its statistics are made of data alone; with momentum 0 they replace the running ones.
#[test]
fn norms_of_inputs_keep_their_statistics() {
    for momentum in [0.9, 0.0] {
        let mut norm = node("BatchNormalization", &["x", "s", "b", "m", "v"], &["n"]);
        norm.attribute.push(AttributeProto {
            name: Some("momentum".to_owned()),
            r#type: Some(AttributeType::Float.into()),
            f: Some(momentum),
            ..Default::default()
        });
        let nodes = [norm, node("MatMul", &["n", "w"], &["y"])];
        let vectors = ["s", "b", "m", "v"].map(|name| floats(name, &[3]));
        let model = vectors.into_iter().fold(with_tensor(model(&nodes), floats("w", &[3, 4])), with_tensor);
        compiles(&model, &[(1, 1, 1), (2, 1, 1), (1, 2, 1)]);
    }
}

/// The largest of all samples is read whole: it is no sum, which could stay open over microbatches.
#[test]
fn the_largest_of_the_batch_is_found() {
    let nodes =
        [node("MatMul", &["x", "w"], &["t"]), node("ReduceMax", &["t", "axes"], &["d"]), node("Mul", &["t", "d"], &["y"])];
    let model = with_tensor(with_tensor(model(&nodes), floats("w", &[3, 4])), ints("axes", &[0]));
    compiles(&model, &[(1, 1, 1), (2, 1, 1), (1, 2, 1)]);
}
