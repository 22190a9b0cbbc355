//! The gate on programs of real models: planted faults are refused by the message that fits; of hundreds of mutants those that
//! it accepts end and compute what they should.
//!
//! What the gate answers for is in `mutate::STRUCTURE`. Which function a program computes it cannot know (`mutate::FUNCTION`): of
//! such mutants it promises that one rank and many compute the same.

mod faults;
mod mutants;
mod mutate;
mod orders;
mod subject;

use crate::compile::lowered;
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule};
use mutants::{Counts, Promise};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use subject::Subject;

/// One block of GPT-2 with its embedding and tied head.
const GPT: &str = "attention/gpt2_sdpa_dynamo23.onnx";

static SUBJECTS: LazyLock<[Subject; 5]> = LazyLock::new(|| {
    let sgd = || OptimizerOptions { optimizer: Optimizer::Sgd { momentum: 0.0, nesterov: false }, ..Default::default() };
    let make = |name, model, (dp, tp, pp), (batch, microbatches), optimizer, classes| {
        let schedule = if name == "MLP, ZB-H2" { Schedule::ZbH2 } else { Schedule::OneFOneB };
        let parallel = Parallel { dp, tp, pp, schedule, ..Parallel::default() };
        Subject::new(name, lowered(model, parallel, (batch, microbatches), optimizer), classes)
    };
    [
        make("GPT-2 block, tp 2 x pp 2", GPT, (1, 2, 2), (4, 2), OptimizerOptions::default(), 31),
        make("GPT-2 block, dp 2", GPT, (2, 1, 1), (4, 2), OptimizerOptions::default(), 31),
        make("MLP, tp 2", "mlp.onnx", (1, 2, 1), (4, 2), sgd(), 10),
        make("MLP, 1F1B", "mlp.onnx", (1, 1, 2), (8, 4), sgd(), 10),
        make("MLP, ZB-H2", "mlp.onnx", (1, 1, 2), (8, 4), sgd(), 10),
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
    let planted = faults::check(&SUBJECTS[0].programs);
    println!("{planted} planted faults refused");
    assert!(planted >= 30);
}

#[test]
fn accepted_mutants_give_the_same_results() {
    let counts = mutants::check(&SUBJECTS[..], Promise::Same, 9, times(132));
    let sum = print("structure", &counts);
    assert!(sum.refused + sum.accepted >= 500 && sum.accepted > 50 && sum.refused > sum.accepted);
    assert!(counts.len() == mutate::STRUCTURE.len(), "every kind of mutation finds something to change");
}

#[test]
fn mutants_of_the_function_are_the_same_function_on_every_mesh() {
    let counts = mutants::check(&SUBJECTS[1..3], Promise::SameOnEveryMesh, 5, times(60));
    let sum = print("function", &counts);
    assert!(sum.accepted > 20);
}
