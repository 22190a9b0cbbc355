//! The gate on programs of real models: planted faults are refused by the message that fits; of hundreds of mutants those that
//! it accepts end and compute what they should.
//!
//! What the gate answers for is in `mutate::STRUCTURE`. Which function a program computes it cannot know (`mutate::FUNCTION`): of
//! such mutants it promises that one rank and many compute the same. Those that compute another function than the model's
//! `dcc verify --numeric` tells.

mod faults;
mod mutants;
mod mutate;
mod orders;
mod subject;

use crate::compile::{compiled, lowered};
use dcc::numeric::Instance;
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule, Zero};
use mutants::{Counts, Promise, Told};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use subject::Subject;

/// One block of GPT-2 with its embedding and tied head.
const GPT: &str = "attention/gpt2_sdpa_dynamo23.onnx";

/// A block of attention by GPT-2 for the function's mutants, and where the gate is to be strong: every way to shard and to order.
static SUBJECTS: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    let sgd = || OptimizerOptions { optimizer: Optimizer::Sgd { momentum: 0.0, nesterov: false }, ..Default::default() };
    let (adam, one) = (OptimizerOptions::default, Parallel::default);
    let make = |name, model, parallel: Parallel, sizes, optimizer, classes| {
        Subject::new(name, lowered(model, parallel, sizes, optimizer), classes)
    };
    let zero = |zero, dp| Parallel { dp, zero, ..one() };
    let piped = |schedule| Parallel { pp: 2, schedule, ..one() };
    vec![
        make("GPT-2 block, tp 2 x pp 2", GPT, Parallel { tp: 2, pp: 2, ..one() }, (4, 2), adam(), 31),
        make("GPT-2 block, dp 2", GPT, Parallel { dp: 2, ..one() }, (4, 2), adam(), 31),
        make("MLP, tp 2", "mlp.onnx", Parallel { tp: 2, ..one() }, (4, 2), sgd(), 10),
        make("MLP, 1F1B", "mlp.onnx", piped(Schedule::OneFOneB), (8, 4), sgd(), 10),
        make("MLP, ZB-H2", "mlp.onnx", piped(Schedule::ZbH2), (8, 4), sgd(), 10),
        make("GPT-2 block, ZB-V", GPT, piped(Schedule::ZbV), (4, 4), sgd(), 31),
        make("MLP, updates in the backward pass", "mlp.onnx", one(), (4, 1), sgd(), 10),
        make("MLP, ZeRO-1", "mlp.onnx", zero(Zero::State, 2), (4, 1), adam(), 10),
        make("MLP, ZeRO-2", "mlp.onnx", zero(Zero::Gradients, 2), (4, 2), adam(), 10),
        make("MLP, FSDP", "mlp.onnx", zero(Zero::Parameters, 4), (8, 2), adam(), 10),
        make("MLP, hybrid", "mlp.onnx", Parallel { shard_group: Some(2), ..zero(Zero::Parameters, 4) }, (8, 1), adam(), 10),
        make("GPT-2 block, sequences", GPT, Parallel { tp: 2, sequence_parallel: true, ..one() }, (2, 1), adam(), 31),
        make("GPT-2 block, context", GPT, Parallel { cp: 2, ..one() }, (2, 1), adam(), 31),
        make("experts", "families/moe.onnx", Parallel { ep: 2, ..one() }, (4, 1), sgd(), 31),
    ]
});

/// Ten times as many in `tests/long.sh`.
fn times(count: usize) -> usize {
    if std::env::var_os("DCC_LONG").is_some() { 10 * count } else { count }
}

fn print(what: &str, counts: &BTreeMap<&str, Counts>) -> Counts {
    let mut sum = Counts::default();
    for (name, count) in counts {
        println!("{name:40} {:6} refused {:6} accepted and equal", count.refused, count.accepted);
        sum.refused += count.refused;
        sum.accepted += count.accepted;
    }
    println!("{what}: {} refused, {} accepted and equal", sum.refused, sum.accepted);
    sum
}

#[test]
fn planted_faults_are_refused() {
    let named = |name: &str| SUBJECTS.iter().find(|subject| subject.name == name).expect("a subject");
    let planted = faults::check(&SUBJECTS[0].programs) + faults::check_early(&named("MLP, ZeRO-1").programs);
    println!("{planted} planted faults refused");
    assert!(planted >= 30);
}

#[test]
fn accepted_mutants_give_the_same_results() {
    let counts = mutants::check(&SUBJECTS[..], Promise::Same, 9, times(66));
    let sum = print("structure", &counts);
    assert!(sum.refused + sum.accepted >= times(600) && sum.accepted > 50 && sum.refused > sum.accepted);
    assert!(counts.len() == mutate::STRUCTURE.len(), "every kind of mutation finds something to change");
}

/// Those of the function that compute something else than the model are found by its comparison with all tensors.
#[test]
fn mutants_of_the_function_are_told_from_the_model() {
    let of = |model, parallel: Parallel, microbatches, classes| {
        let compiled = compiled(model, parallel, microbatches).unwrap_or_else(|error| panic!("{model}: {error}"));
        let instance = Instance::of(&compiled).unwrap_or_else(|error| panic!("{model}: {error}"));
        mutants::told(instance, classes, 3, times(65))
    };
    let counts = [
        of("mlp.onnx", Parallel { tp: 2, ..Parallel::default() }, 2, 10),
        of(GPT, Parallel { dp: 2, ..Parallel::default() }, 2, 31),
        of("mlp.onnx", Parallel { dp: 2, zero: Zero::Parameters, ..Parallel::default() }, 1, 10),
    ];
    for count in &counts {
        println!("{count:?}");
    }
    let sum = |of: fn(&Told) -> usize| counts.iter().map(of).sum::<usize>();
    assert!(sum(|count| count.told) > times(20) && sum(|count| count.refused) > times(20));
}

#[test]
fn mutants_of_the_function_are_the_same_function_on_every_mesh() {
    let counts = mutants::check(&SUBJECTS[1..3], Promise::SameOnEveryMesh, 5, times(60));
    let sum = print("function", &counts);
    assert!(sum.accepted > 20);
}
