//! Every strategy on every kind of model: transformers of two families, a mixture of experts, a convolutional network with BatchNorm.
//! `cargo test` trains a step or two of those that no other test has so; `tests/long.sh` 20 steps of all, on up to 8 ranks.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::recompute::{Recompute, Repeats};

/// Strategies that any model takes; four microbatches where there are stages.
fn strategies() -> Vec<Split> {
    let fixed = |repeats, parallel| Parallel { recompute: Recompute::Fixed(repeats), ..parallel };
    let pipeline = |schedule| Parallel { schedule, ..mesh(1, 1, 2) };
    let mut all = vec![(mesh(2, 1, 1), 2), (mesh(4, 1, 1), 1), (mesh(1, 2, 1), 2), (mesh(1, 4, 1), 1)];
    for zero in [Zero::State, Zero::Gradients, Zero::Parameters] {
        all.push((Parallel { zero, ..mesh(2, 1, 1) }, 2));
        all.push((Parallel { zero, ..mesh(4, 1, 1) }, 1));
    }
    // Hybrid, and with two other axes.
    all.push((Parallel { zero: Zero::Parameters, shard_group: Some(2), ..mesh(4, 1, 1) }, 2));
    all.push((Parallel { zero: Zero::Parameters, ..mesh(2, 2, 1) }, 2));
    all.extend(Schedule::ALL.map(|schedule| (pipeline(schedule), 4)));
    all.push((Parallel { virtual_stages: 2, ..mesh(1, 1, 2) }, 4));
    all.push((fixed(Repeats::SELECTIVE, mesh(2, 1, 1)), 2));
    all.push((fixed(Repeats::FULL, mesh(1, 2, 1)), 2));
    all.push((fixed(Repeats::FULL, pipeline(Schedule::ZbH1)), 4));
    all.push((mesh(2, 2, 2), 4));
    all.push((Parallel { zero: Zero::Parameters, ..mesh(2, 2, 2) }, 2));
    if is_long() {
        all.push((mesh(8, 1, 1), 1));
        all.push((Parallel { zero: Zero::Gradients, ..mesh(8, 1, 1) }, 1));
        all.push((Parallel { zero: Zero::Parameters, shard_group: Some(4), ..mesh(8, 1, 1) }, 1));
        all.push((mesh(1, 2, 4), 8));
        all.push((fixed(Repeats::FULL, Parallel { zero: Zero::State, schedule: Schedule::ZbV, ..mesh(2, 1, 2) }), 4));
    }
    all
}

/// Those that need sequences.
fn along_sequences() -> Vec<Split> {
    let along = |parallel: Parallel| Parallel { sequence_parallel: true, ..parallel };
    vec![
        (along(mesh(1, 2, 1)), 2),
        (along(Parallel { zero: Zero::Parameters, ..mesh(2, 2, 1) }), 1),
        (Parallel { cp: 2, ..mesh(1, 1, 1) }, 2),
        (Parallel { cp: 2, ..along(mesh(2, 2, 1)) }, 2),
    ]
}

fn experts() -> Vec<Split> {
    let of = |parallel: Parallel| Parallel { ep: 2, ..parallel };
    let zero = Zero::Parameters;
    vec![(of(mesh(1, 1, 1)), 2), (of(mesh(2, 2, 1)), 2), (of(mesh(1, 1, 2)), 4), (of(Parallel { zero, ..mesh(2, 1, 2) }), 2)]
}

/// `others`: strategies that this model takes beside all models' own.
fn check(case: Case, others: impl IntoIterator<Item = Split>) {
    let all: Vec<Split> = strategies().into_iter().chain(others).collect();
    Case { steps: if is_long() { 20 } else { 2 }, batch: 16, clip: Some(0.5), ..case }.check(&all);
}

#[test]
fn gpt() {
    check(Case { model: "gpt2_tiny.onnx", labels: Some(16), ..CASE }, along_sequences());
}

#[test]
fn llama() {
    check(Case { model: "llama_tiny.onnx", ..CASE }, along_sequences());
}

#[test]
fn mixture_of_experts() {
    check(Case { model: "families/moe.onnx", labels: Some(16), ..CASE }, along_sequences().into_iter().chain(experts()));
}

/// Statistics are those of eighths of the batch.
#[test]
fn resnet() {
    check(Case { model: "families/resnet.onnx", bn_groups: 8, ..CASE }, []);
}
