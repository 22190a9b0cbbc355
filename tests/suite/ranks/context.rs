//! Context parallelism: the same training where ranks share each sample's sequence.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::import::Dropout;
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::recompute::{Recompute, Repeats};

fn sharing(cp: u32, parallel: Parallel) -> Parallel {
    Parallel { cp, ..parallel }
}

/// Beside every other axis.
fn splits() -> Vec<Split> {
    let full = Recompute::Fixed(Repeats::FULL);
    let mut splits = vec![
        (sharing(2, mesh(1, 1, 1)), 1),
        (sharing(4, mesh(1, 1, 1)), 2),
        (sharing(2, mesh(2, 1, 1)), 2),
        (sharing(2, mesh(1, 2, 1)), 1),
        (sharing(2, mesh(1, 1, 2)), 4),
        (sharing(2, Parallel { sequence_parallel: true, ..mesh(1, 2, 1) }), 2),
        (sharing(2, Parallel { zero: Zero::Parameters, recompute: full, ..mesh(2, 1, 1) }), 2),
    ];
    if is_long() {
        for (cp, dp, tp, pp) in [(2, 2, 2, 1), (2, 1, 2, 2), (4, 1, 2, 1), (4, 2, 1, 1), (8, 1, 1, 1), (2, 2, 1, 2)] {
            splits.push((sharing(cp, mesh(dp, tp, pp)), 4 / dp));
            splits.push((sharing(cp, Parallel { zero: Zero::Gradients, recompute: full, ..mesh(dp, tp, pp) }), 2));
        }
    }
    splits
}

#[test]
fn gpt_trains_alike() {
    let mut all = splits();
    all.push((sharing(2, Parallel { schedule: Schedule::ZbH1, ..mesh(1, 1, 2) }), 4));
    Case { model: "gpt2_tiny.onnx", labels: Some(16), clip: Some(0.5), ..CASE }.check(&all);
}

#[test]
fn llama_and_bert_train_alike() {
    Case { model: "llama_tiny.onnx", clip: Some(0.5), ..CASE }.check(&splits());
    Case { model: "bert_tiny.onnx", labels: Some(16), clip: Some(0.5), ..CASE }.check(&splits());
}

/// Sixteen tokens of which three ranks have 6, 6 and 4; an encoder and a decoder; experts; masks that depend on the element.
#[test]
fn other_sequences_and_dropout_train_alike() {
    let few = [(sharing(3, mesh(1, 1, 1)), 1), (sharing(2, mesh(1, 2, 1)), 2)];
    Case { model: "gpt2_tiny.onnx", steps: 2, ..CASE }.check(&few[..1]);
    for model in ["families/t5.onnx", "families/t5_legacy.onnx", "families/moe.onnx"] {
        Case { model, steps: 2, ..CASE }.check(&few);
    }
    let dropout = Dropout::Rate(0.1);
    Case { model: "gpt2_tiny_dropout.onnx", steps: 2, dropout, ..CASE }.check(&few);
}
