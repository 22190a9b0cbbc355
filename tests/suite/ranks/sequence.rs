//! Sequence parallelism: the same training where tensor-parallel ranks share the sequence between the products that they split.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::compile::planned_bytes;
use dcc::import::Dropout;
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::recompute::{Recompute, Repeats};
use dcc_program::program::Program;

/// A mesh whose tensor-parallel ranks share the sequence too.
pub fn along(dp: u32, tp: u32, pp: u32) -> Parallel {
    Parallel { sequence_parallel: true, ..mesh(dp, tp, pp) }
}

fn repeating(repeats: Repeats, parallel: Parallel) -> Parallel {
    Parallel { recompute: Recompute::Fixed(repeats), ..parallel }
}

/// Beside every other axis, and all that is done about memory.
fn splits() -> Vec<Split> {
    let mut splits = vec![
        (along(1, 2, 1), 1),
        (along(1, 4, 1), 2),
        (along(2, 2, 1), 2),
        (along(1, 2, 2), 4),
        (repeating(Repeats::SELECTIVE, along(1, 2, 1)), 2),
        (repeating(Repeats::FULL, along(1, 4, 1)), 1),
    ];
    for zero in [Zero::State, Zero::Gradients, Zero::Parameters] {
        splits.push((Parallel { zero, ..along(2, 2, 1) }, 2));
    }
    if is_long() {
        for (dp, tp, pp) in [(2, 2, 2), (1, 4, 2), (2, 4, 1), (1, 2, 4), (4, 2, 1), (1, 8, 1)] {
            splits.push((along(dp, tp, pp), 4 / dp));
            splits.push((Parallel { zero: Zero::Parameters, ..repeating(Repeats::FULL, along(dp, tp, pp)) }, 2));
        }
    }
    splits
}

#[test]
fn gpt_trains_alike() {
    let mut all = splits();
    all.push((Parallel { schedule: Schedule::ZbH1, ..along(1, 2, 2) }, 4));
    all.push((Parallel { virtual_stages: 2, ..along(1, 2, 2) }, 4));
    Case { model: "gpt2_tiny.onnx", labels: Some(16), clip: Some(0.5), ..CASE }.check(&all);
}

#[test]
fn llama_trains_alike() {
    Case { model: "llama_tiny.onnx", clip: Some(0.5), ..CASE }.check(&splits());
}

#[test]
fn bert_trains_alike() {
    Case { model: "bert_tiny.onnx", labels: Some(16), clip: Some(0.5), ..CASE }.check(&splits());
}

/// Seventeen tokens, of which four ranks have 5, 5, 5 and 2; an encoder and a decoder; experts; masks that depend on the
/// element.
#[test]
fn other_sequences_and_dropout_train_alike() {
    let few = [(along(1, 2, 1), 1), (along(1, 4, 1), 2), (along(2, 2, 2), 2)];
    Case { model: "families/vit.onnx", steps: 2, ..CASE }.check(&few);
    for model in ["families/t5.onnx", "families/t5_legacy.onnx", "families/moe.onnx"] {
        Case { model, steps: 2, ..CASE }.check(&few[..2]);
    }
    let dropout = Dropout::Rate(0.1);
    Case { model: "gpt2_tiny_dropout.onnx", steps: 2, dropout, ..CASE }.check(&few);
}

/// A limit is first met by computing again what takes little time. Where more is demanded, sharing the sequence costs less than computing
/// products again; where nothing may be computed again, it is the only way.
#[test]
fn a_limit_shards_the_sequence_where_that_is_cheaper() {
    let case = Case { model: "gpt2_tiny.onnx", batch: 32, ..CASE };
    let peak = |repeats, parallel| {
        let programs = case.compiled(&repeating(repeats, parallel), 1).artifact.train;
        (planned_bytes(&programs[0]), programs)
    };
    let limited = |parallel: &Parallel, bytes| {
        let compiled = case.limited(parallel, 1, bytes).unwrap_or_else(|e| panic!("{bytes}: {e}"));
        (compiled.plan.sequence_parallel, compiled.artifact.train)
    };
    let [(none, _), (quick, selective)] = [Repeats::NONE, Repeats::SELECTIVE].map(|repeats| peak(repeats, mesh(1, 2, 1)));
    let [(shared, _), (least, _)] = [Repeats::NONE, Repeats::SELECTIVE].map(|repeats| peak(repeats, along(1, 2, 1)));
    assert!(least < quick && quick < shared && shared < none, "{least} {quick} {shared} {none}");
    assert!(!limited(&mesh(1, 2, 1), none).0);
    assert!(limited(&mesh(1, 2, 1), quick) == (false, selective.clone()));
    let bytes = |programs: &[Program]| planned_bytes(&programs[0]);
    let (shares, programs) = limited(&mesh(1, 2, 1), least);
    assert!(shares && bytes(&programs) <= least && programs != selective);
    // In between, layer by layer: as much of the sequence as the limit demands.
    for eighths in 0..8 {
        let [limit, next] = [eighths, eighths + 1].map(|n| shared + (none - shared) * n / 8);
        let (shares, programs) = limited(&repeating(Repeats::NONE, mesh(1, 2, 1)), next);
        assert!(shares == (next < none) && bytes(&programs) > limit, "{limit} {} {next}", bytes(&programs));
    }
}
