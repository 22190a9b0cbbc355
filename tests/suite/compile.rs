//! The whole compiler on the graphs of `tests/models`: every mesh gives programs that pass the gate; every pass prints and parses.

use dcc::compile::{Options, compile};
use dcc::graph::Graph;
use dcc::import::Model;
use dcc::optimizer::OptimizerOptions;
use dcc::plan::{Parallel, batch};
use dcc::train::TrainingOptions;
use dcc_program::program::Program;
use dcc_program::text;

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

fn of(model: &str, options: Options) -> dcc::Result<dcc::Compiled> {
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

macro_rules! models {
    ($($test:ident = $model:literal),+ $(,)?) => { $(#[test] fn $test() { check($model) })+ };
}

models! {
    mlp = "mlp.onnx", mlp_legacy = "mlp_legacy.onnx", mlp_sce = "mlp_sce.onnx", mlp_nll = "mlp_nll.onnx",
    gpt2_tiny = "gpt2_tiny.onnx", gpt2_tiny_opset18 = "gpt2_tiny_opset18.onnx", gpt2_tiny_dropout = "gpt2_tiny_dropout.onnx",
    gpt2_tiny_shuffled = "gpt2_tiny_shuffled.onnx", lstm = "lstm.onnx", gru_optimized = "gru_optimized.onnx",
    llama_tiny = "llama_tiny.onnx", bert_tiny = "bert_tiny.onnx",
}
