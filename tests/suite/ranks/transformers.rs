//! Every mesh and schedule trains as one device does, to rounding: few steps of each model.

use super::{CASE, Case, Split, mesh};
use dcc::import::Dropout;
use dcc::plan::{Parallel, Schedule};

/// dp, tp, pp, microbatches.
fn splits(all: &[(u32, u32, u32, u32)]) -> Vec<Split> {
    all.iter().map(|&(dp, tp, pp, microbatches)| (mesh(dp, tp, pp), microbatches)).collect()
}

fn gpipe(dp: u32, tp: u32, pp: u32) -> Parallel {
    Parallel { schedule: Schedule::GPipe, ..mesh(dp, tp, pp) }
}

/// All meshes of {1, 2}³ and those of one axis of 4, with 1 to 8 microbatches among them.
const MESHES: [(u32, u32, u32, u32); 11] = [
    (1, 1, 1, 8),
    (2, 1, 1, 1),
    (1, 2, 1, 4),
    (1, 1, 2, 4),
    (2, 2, 1, 2),
    (2, 1, 2, 4),
    (1, 2, 2, 8),
    (2, 2, 2, 2),
    (1, 4, 1, 1),
    (4, 1, 1, 2),
    (1, 1, 4, 8),
];

#[test]
fn mlp_trains_alike_on_every_mesh() {
    let mlp = Case { model: "mlp.onnx", ..CASE };
    mlp.check(&splits(&MESHES[..9]));
    Case { dtype: None, ..mlp }.check(&splits(&MESHES[..9]));
}

/// Convolutions, grouped, depthwise, dilated and transposed, and pools.
#[test]
fn a_cnn_trains_alike_on_every_mesh() {
    let all = [(1, 1, 1, 4), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 4), (1, 4, 1, 1)];
    Case { model: "cnn.onnx", ..CASE }.check(&splits(&all));
    Case { model: "cnn.onnx", dtype: None, ..CASE }.check(&splits(&[(2, 2, 2, 2)]));
}

/// A vocabulary of 211, tied; clipped gradients; labels of which some microbatches ignore all.
#[test]
fn gpt_trains_alike_on_every_mesh() {
    let gpt = Case { model: "gpt2_tiny.onnx", labels: Some(16), clip: Some(0.5), ..CASE };
    let mut all = splits(&MESHES);
    all.extend([(gpipe(1, 2, 2), 4), (gpipe(2, 1, 2), 2), (gpipe(1, 1, 4), 4)]);
    gpt.check(&all);
    // Twelve samples have other microbatches.
    Case { batch: 12, steps: 2, ..gpt.clone() }.check(&splits(&[(1, 1, 2, 3), (1, 2, 2, 6)]));
    let single = Case { dtype: None, labels: None, ..gpt };
    single.check(&[(mesh(2, 2, 2), 2), (gpipe(1, 1, 4), 4)]);
}

#[test]
fn llama_and_bert_train_alike() {
    Case { model: "llama_tiny.onnx", clip: Some(0.5), ..CASE }.check(&splits(&[(1, 2, 2, 4), (1, 4, 1, 2), (2, 1, 2, 2)]));
    Case { model: "bert_tiny.onnx", labels: Some(16), ..CASE }.check(&splits(&[(1, 2, 2, 2), (1, 4, 1, 1), (2, 2, 1, 2)]));
}

/// An exporter's initial state has a row for each sample, of which a microbatch takes its own.
#[test]
fn recurrent_states_are_those_of_the_microbatch() {
    Case { model: "families/static_lstm.onnx", ..CASE }.check(&splits(&[(1, 1, 1, 2), (2, 1, 2, 4)]));
}

/// Two heads for four ranks, of whom two share each; one block for two stages.
#[test]
fn fewer_heads_than_ranks_train_alike() {
    let block = Case { model: "attention/gpt2_sdpa_dynamo23.onnx", steps: 2, ..CASE };
    block.check(&splits(&[(1, 4, 2, 2)]));
    Case { model: "attention/llama_eager_dynamo23.onnx", ..block.clone() }.check(&splits(&[(1, 4, 1, 1)]));
    Case { model: "attention/bert_sdpa_dynamo20.onnx", ..block }.check(&splits(&[(1, 4, 1, 2)]));
}

/// The masks depend on the seed, and on nothing else.
#[test]
fn dropout_is_the_same_on_every_mesh() {
    let case = Case { model: "gpt2_tiny_dropout.onnx", steps: 2, dropout: Dropout::Rate(0.1), ..CASE };
    case.check(&splits(&[(2, 1, 1, 2), (1, 2, 2, 4), (1, 1, 4, 8)]));
    let one = case.compiled(&mesh(1, 1, 1), 1).artifact;
    let other = Case { seed: 8, ..case.clone() };
    let (difference, _) = case.difference(&other.trained(&one, 1, 1e-3), &case.trained(&one, 1, 1e-3));
    assert!(difference > 1e-4, "another seed drops alike: {difference:e}");
}

#[test]
fn the_same_mesh_twice_and_two_threads_give_the_same_bits() {
    for (dp, tp, pp, microbatches) in [(1, 2, 2, 2), (2, 2, 1, 4)] {
        let case = Case { model: "gpt2_tiny.onnx", dtype: None, ..CASE };
        let artifact = case.compiled(&mesh(dp, tp, pp), microbatches).artifact;
        let first = case.trained(&artifact, 1, 1e-3);
        assert_eq!(case.trained(&artifact, 1, 1e-3), first);
        assert_eq!(case.trained(&artifact, 2, 1e-3), first);
        assert_ne!(case.trained(&artifact, 1, 1.01e-3), first);
    }
}

#[test]
fn tensor_parallel_ranks_do_half_of_the_work() {
    let case = Case { model: "gpt2_tiny.onnx", dtype: None, steps: 1, ..CASE };
    let work = |tp| {
        let artifact = case.compiled(&mesh(1, tp, 1), 1).artifact;
        case.trained(&artifact, 1, 1e-3).tallies.iter().map(|tally| tally.flops).max().unwrap() as f64
    };
    let ratio = work(2) / work(1);
    assert!(ratio <= 0.55, "{ratio}");
}
