//! Programs of a pipeline whose passes run in a wrong order or do not wait: the gate refuses them.

use crate::compile::lowered;
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule};
use dcc_program::check::{self, Fault};
use dcc_program::program::{Action, Program, SectionId, SectionKind, Step, Transfer};

/// Where in its stage's order a section runs for a microbatch.
fn step(program: &Program, kind: SectionKind, microbatch: u32) -> usize {
    let is = |step: &Step| step.microbatch == microbatch && program.sections[step.section as usize].kind == kind;
    program.order.iter().position(is).expect("it runs")
}

fn swap(program: &mut Program, a: (SectionKind, u32), b: (SectionKind, u32)) {
    let (a, b) = (step(program, a.0, a.1), step(program, b.0, b.1));
    program.order.swap(a, b);
}

#[track_caller]
fn refused(programs: &[Program], spoil: impl FnOnce(&mut Vec<Program>), faults: &[Fault], words: &str) {
    let mut spoilt = programs.to_vec();
    spoil(&mut spoilt);
    let error = check::programs(&spoilt).expect_err(words);
    assert!(faults.contains(&error.code) && error.message.contains(words), "{:?}: {error}", error.code);
}

#[test]
fn wrong_orders_of_halves_are_refused() {
    use SectionKind::{BackwardInput, BackwardWeight, Forward};
    let parallel = Parallel { pp: 2, schedule: Schedule::ZbH2, ..Parallel::default() };
    let sgd = OptimizerOptions { optimizer: Optimizer::Sgd { momentum: 0.0, nesterov: false }, ..Default::default() };
    let programs = lowered("mlp.onnx", parallel, (8, 4), sgd);
    check::programs(&programs).expect("the gate accepts what it is to refuse once spoilt");
    let order = &[Fault::Order];
    refused(&programs, |p| swap(&mut p[1], (Forward, 2), (BackwardInput, 2)), order, "runs after its backward_input");
    refused(&programs, |p| swap(&mut p[0], (BackwardInput, 1), (BackwardWeight, 1)), order, "runs after its backward_weight");
    // Its operands are not there yet, or another microbatch's are.
    let early = [Fault::Order, Fault::Unwritten, Fault::Microbatch];
    refused(
        &programs,
        |p| p[1].order.iter_mut().for_each(|s| s.slots.iter_mut().for_each(|slot| *slot = 0)),
        &[Fault::Microbatch, Fault::InFlight, Fault::Overwritten],
        "",
    );
    refused(&programs, |p| swap(&mut p[1], (BackwardInput, 0), (BackwardWeight, 2)), &early, "");
    // Half of a backward for one microbatch less.
    refused(
        &programs,
        |p| {
            let at = step(&p[0], BackwardWeight, 3);
            p[0].order.remove(at);
        },
        order,
        "never runs for microbatch 3",
    );
    let whole = |p: &mut Vec<Program>| {
        p[0].sections.iter_mut().filter(|s| s.kind == BackwardInput).for_each(|s| s.kind = SectionKind::Backward)
    };
    refused(&programs, whole, order, "has no backward_weight");
}

/// Every wait of a transfer, of a message that is received or was sent, one after the other.
#[test]
fn dropped_waits_are_refused() {
    for schedule in [Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbH2] {
        let parallel = Parallel { pp: 2, schedule, ..Parallel::default() };
        let programs = lowered("mlp.onnx", parallel, (8, 4), OptimizerOptions::default());
        let mut dropped = 0;
        for stage in 0..2 {
            for section in 0..programs[stage].sections.len() {
                for at in 0..programs[stage].sections[section].body.len() {
                    if !matches!(programs[stage].sections[section].body[at].action, Action::Wait(_)) {
                        continue;
                    }
                    let mut spoilt = programs.clone();
                    spoilt[stage].sections[section].body.remove(at);
                    check::programs(&spoilt).expect_err("a wait is missing");
                    dropped += 1;
                }
            }
        }
        assert!(dropped >= 6, "{schedule:?}: only {dropped}");
    }
}

/// A stage that must not be ahead by more than one message is ahead by none: the first wait stands before its start.
#[test]
fn messages_are_waited_for_before_their_slot_is_used_again() {
    let parallel = Parallel { pp: 4, schedule: Schedule::ZbH2, ..Parallel::default() };
    let programs = lowered("gpt2_tiny.onnx", parallel, (8, 8), OptimizerOptions::default());
    let forwards: Vec<usize> =
        (0..programs[0].sections.len()).filter(|&s| programs[0].sections[s].kind == SectionKind::Forward).collect();
    let [first, later] = forwards[..] else { panic!("two variants of forward, not {forwards:?}") };
    let runs = programs[0].order.iter().filter(|step| step.section as usize == first).count();
    assert!(runs > 1, "ZB-H2 is ahead by more than one message");
    let sends = |i: &dcc_program::program::Instr| matches!(i.action, Action::Start { transfer: Transfer::Send { .. }, .. });
    assert!(programs[0].sections[first].body.iter().any(sends));
    // One more execution without its wait.
    let next = programs[0].order.iter().position(|step| step.section as usize == later).expect("the other variant runs");
    refused(&programs, |p| p[0].order[next].section = first as u32, &[Fault::InFlight], "in flight");
}

/// There and back: on the last rank the first chunk hands the second its values, and takes its gradients.
#[test]
fn wrong_orders_of_chunks_are_refused() {
    let parallel = Parallel { pp: 2, schedule: Schedule::ZbV, ..Parallel::default() };
    let programs = lowered("gpt2_tiny.onnx", parallel, (8, 4), OptimizerOptions::default());
    check::programs(&programs).expect("the gate accepts what it is to refuse once spoilt");
    let at = |program: &Program, kind, chunk, microbatch| {
        let id = SectionId { kind, chunk };
        let is = |step: &Step| step.microbatch == microbatch && program.sections[step.section as usize].id() == id;
        program.order.iter().position(is).expect("it runs")
    };
    // Of one microbatch, the chunk that needs before that which gives.
    for kind in [SectionKind::Forward, SectionKind::BackwardInput] {
        let swapped = |p: &mut Vec<Program>| {
            let (a, b) = (at(&p[1], kind, 0, 2), at(&p[1], kind, 1, 2));
            p[1].order.swap(a, b);
        };
        let faults =
            [Fault::Unwritten, Fault::Overwritten, Fault::Microbatch, Fault::Deadlock, Fault::Unmatched, Fault::InFlight];
        refused(&programs, swapped, &faults, "");
    }
    // Messages of one chunk on the lane of the other.
    let lanes = |p: &mut Vec<Program>| {
        for instr in p[0].sections.iter_mut().flat_map(|section| &mut section.body) {
            if let Action::Start { transfer: Transfer::Send { lane, .. }, .. } = &mut instr.action {
                *lane = 3 - *lane;
            }
        }
    };
    refused(&programs, lanes, &[Fault::Unmatched, Fault::Deadlock], "");
    let one = |p: &mut Vec<Program>| p[1].sections.iter_mut().for_each(|section| section.chunk = 0);
    refused(&programs, one, &[Fault::Order], "");
    let update = |p: &mut Vec<Program>| p[1].sections.last_mut().expect("the update").chunk = 1;
    refused(&programs, update, &[Fault::Order], "update:1 is of no chunk");
    let far = |p: &mut Vec<Program>| {
        let starts = p[0].sections.iter_mut().flat_map(|section| &mut section.body);
        for instr in starts {
            if let Action::Start { transfer: Transfer::Send { lane, .. }, .. } = &mut instr.action {
                *lane = 1 << 20;
            }
        }
    };
    refused(&programs, far, &[Fault::Malformed], "lane 1048576");
}
