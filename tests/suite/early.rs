//! Updates within the backward pass: gradients that no step holds all at once, and the same training to the bit.

use crate::command::{Folder, dcc};
use crate::compile::lowered;
use dcc::optimizer::{AdamDecay, MuonScale, Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule};
use dcc_program::program::{Action, BufferId, ParamKind, Program, SectionKind};
use std::collections::{BTreeMap, BTreeSet};

const MODELS: [&str; 4] = ["mlp.onnx", "cnn.onnx", "gpt2_tiny.onnx", "llama_tiny.onnx"];

/// Most bytes at once of what updates of weights read and the backward pass has made, bytes of the largest weight, and of all.
fn held(program: &Program) -> (u64, u64, u64) {
    let bytes = |id: BufferId| program.ty(id).local_bytes(&program.mesh);
    let weights: Vec<BufferId> = program
        .params
        .iter()
        .filter(|param| param.trained && param.kind == ParamKind::Weight)
        .map(|param| param.buffer)
        .collect();
    let passes = program.sections.iter().filter(|section| section.kind.is_backward() || section.kind == SectionKind::Update);
    let instrs: Vec<_> = passes.flat_map(|section| &section.body).collect();
    let made = |id: BufferId| instrs.iter().position(|instr| instr.results.contains(&id));
    let mut lives: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
    for (at, update) in instrs.iter().enumerate().filter(|(_, instr)| instr.results.iter().any(|id| weights.contains(id))) {
        for &id in update.operands.iter().filter(|&&id| bytes(id) > 64 && !update.results.contains(&id)) {
            lives.extend(made(id).map(|from| (id, (from, at))));
        }
    }
    let at_once = |at: usize| lives.iter().filter(|(_, life)| life.0 <= at && at < life.1).map(|(&id, _)| bytes(id)).sum();
    let sizes = || weights.iter().map(|&id| bytes(id));
    ((0..instrs.len()).map(at_once).max().unwrap_or(0), sizes().max().unwrap_or(0), sizes().sum())
}

#[test]
fn gradients_do_not_outlive_the_backward_pass() {
    let clipped = OptimizerOptions { grad_clip: Some(1.0), ..Default::default() };
    let zb = Parallel { pp: 2, schedule: Schedule::ZbH1, ..Default::default() };
    for parallel in
        [Parallel::default(), Parallel { tp: 2, ..Default::default() }, Parallel { pp: 2, ..Default::default() }, zb]
    {
        for model in MODELS {
            let planned = |optimizer: &OptimizerOptions| lowered(model, parallel.clone(), (8, 1), optimizer.clone());
            for (early, late) in planned(&Default::default()).iter().zip(planned(&clipped)) {
                let ((few, largest, bytes), (all, ..)) = (held(early), held(&late));
                assert!(
                    few <= largest + bytes / 8,
                    "{model}: {few} bytes of gradients at once, {largest} of one, {bytes} of all"
                );
                assert!(all >= bytes * 3 / 4, "{model}, the control: {all} bytes of {bytes} wait for clipping");
                let peak = |program: &Program| dcc::report::memory(program).peak;
                // A term of the norm for each weight, a number in a line of its own, waits for the others beside what the backward pass
                // still has.
                let terms = 64 * early.params.iter().filter(|param| param.kind == ParamKind::Weight).count() as u64;
                let fewer = peak(early) < peak(&late) || model != "mlp.onnx" && peak(early) <= peak(&late) + terms;
                assert!(fewer, "{model}: {} bytes, {} where all wait", peak(early), peak(&late));
            }
        }
    }
}

/// Several microbatches add up into gradients first.
#[test]
fn sums_over_microbatches_wait_for_the_last() {
    for program in lowered("mlp.onnx", Parallel::default(), (8, 2), OptimizerOptions::default()) {
        let kernels = |kind: SectionKind| {
            let sections = program.sections.iter().filter(|section| section.kind == kind);
            sections
                .flat_map(|section| &section.body)
                .filter(|i| matches!(i.action, Action::Kernel(_)))
                .flat_map(|i| &i.results)
                .copied()
                .collect::<Vec<_>>()
        };
        let weights: Vec<_> = program.params.iter().filter(|param| param.trained).map(|param| param.buffer).collect();
        assert!(weights.iter().all(|weight| kernels(SectionKind::Update).contains(weight)));
        assert!(!weights.iter().any(|weight| kernels(SectionKind::Backward).contains(weight)));
    }
}

/// A bound that no norm reaches multiplies by one.
#[test]
fn early_updates_train_the_same_to_the_bit() {
    let folder = Folder::new();
    let losses = |model: &str, data: &str, more: &str| {
        let metrics = folder.at("metrics.jsonl");
        let words = "--init 1 --lr 1e-2 --steps 5 --order sequential --global-batch-size 8 --metrics-file";
        let words = format!("run tests/models/{model}.onnx --data tests/models/data/{data}.npz {words} {metrics} {more}");
        dcc(words.split_whitespace()).ok();
        let lines = folder.lines("metrics.jsonl");
        lines.iter().map(|line| (line["loss"].to_string(), line["grad_norm"].to_string())).collect::<Vec<_>>()
    };
    for (model, data) in [("mlp", "mlp"), ("cnn", "mlp")] {
        for mesh in ["", "--dp 2", "--tp 2", "--pp 2", "--dp 2 --zero 3"] {
            let early = losses(model, data, mesh);
            assert_eq!(early, losses(model, data, &format!("{mesh} --grad-clip 1e30")), "{model} {mesh}");
            assert_ne!(early, losses(model, data, &format!("{mesh} --grad-clip 1e-3")), "{model} {mesh}, the control");
        }
    }
}

/// Every optimizer computes new values where the old ones lie: its state, its parameters, and those whose norms it needs.
#[test]
fn new_values_are_computed_in_place() {
    let (betas, eps) = ((0.9, 0.999), 1e-8);
    let optimizers = [
        Optimizer::Sgd { momentum: 0.9, nesterov: true },
        Optimizer::Adam { betas, eps, decay: AdamDecay::L2 },
        Optimizer::Adam { betas, eps, decay: AdamDecay::Decoupled },
        Optimizer::Adagrad { eps },
        Optimizer::RmsProp { alpha: 0.99, eps, momentum: 0.9, centered: true },
        Optimizer::Lion { betas },
        Optimizer::Lamb { betas, eps },
        Optimizer::Adafactor { eps },
        Optimizer::Muon { momentum: 0.95, scale: MuonScale::Original, betas, eps },
    ];
    for optimizer in optimizers {
        for (model, microbatches) in MODELS.into_iter().flat_map(|model| [(model, 1), (model, 2)]) {
            let options = OptimizerOptions { optimizer, weight_decay: 0.1, ..Default::default() };
            for program in lowered(model, Parallel::default(), (8, microbatches), options) {
                let computed = |in_forward: bool| -> BTreeSet<BufferId> {
                    let sections = program.sections.iter().filter(|s| (s.kind == SectionKind::Forward) == in_forward);
                    let kernels = sections.flat_map(|s| &s.body).filter(|i| matches!(i.action, Action::Kernel(_)));
                    kernels.flat_map(|i| i.results.iter().copied()).collect()
                };
                let (forward, computed) = (computed(true), computed(false));
                let trained: Vec<_> = program.params.iter().filter(|param| param.trained).collect();
                assert!(trained.len() > 2, "{model}");
                for param in trained {
                    assert!(computed.contains(&param.buffer), "{model}, {optimizer:?}: {} is copied", param.name);
                    assert!(!forward.contains(&param.buffer), "the control: {} before its gradient is there", param.name);
                }
            }
        }
    }
}
