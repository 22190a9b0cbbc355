//! Expert parallelism: the same training where ranks hold different experts of each mixture.

use super::{CASE, Case, Split, is_long, mesh};
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::recompute::{Recompute, Repeats};
use dcc_program::TensorType;
use dcc_program::program::{Action, ParamKind, Program, SectionKind, Transfer};
use std::collections::{BTreeMap, BTreeSet};

/// Every expert computes every token, and is weighted; experts compute the tokens that they are sent, up to their capacity.
const MODELS: [&str; 2] = ["families/moe.onnx", "families/gshard.onnx"];

fn sharing(ep: u32, parallel: Parallel) -> Parallel {
    Parallel { ep, ..parallel }
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
        (sharing(2, Parallel { cp: 2, ..mesh(1, 1, 1) }), 2),
        (sharing(2, Parallel { zero: Zero::State, ..mesh(2, 1, 1) }), 2),
        (sharing(2, Parallel { zero: Zero::Parameters, recompute: full, ..mesh(2, 1, 1) }), 2),
        (sharing(4, Parallel { zero: Zero::Parameters, ..mesh(1, 1, 1) }), 1),
    ];
    if is_long() {
        for (ep, dp, tp, pp) in [(2, 2, 2, 1), (2, 1, 2, 2), (4, 1, 2, 1), (4, 2, 1, 1), (2, 2, 1, 2)] {
            splits.push((sharing(ep, mesh(dp, tp, pp)), 8 / (dp * ep)));
            splits.push((sharing(ep, Parallel { zero: Zero::Gradients, recompute: full, ..mesh(dp, tp, pp) }), 1));
        }
    }
    splits
}

#[test]
fn all_experts_of_all_tokens_train_alike() {
    let mut all = splits();
    all.push((sharing(2, Parallel { schedule: Schedule::ZbH1, ..mesh(1, 1, 2) }), 4));
    Case { model: "families/moe.onnx", steps: 20, labels: Some(16), clip: Some(0.5), ..CASE }.check(&all);
}

#[test]
fn experts_of_dispatched_tokens_train_alike() {
    Case { model: "families/gshard.onnx", steps: 20, labels: Some(16), clip: Some(0.5), ..CASE }.check(&splits());
    Case { model: "families/gshard_legacy.onnx", ..CASE }.check(&splits()[..3]);
}

/// Four experts, of which three ranks have two, two and none.
#[test]
fn experts_that_ranks_do_not_divide_train_alike() {
    for model in MODELS {
        Case { model, batch: 12, ..CASE }.check(&[(sharing(3, mesh(1, 1, 1)), 2), (sharing(3, mesh(2, 1, 1)), 1)]);
    }
}

fn program(model: &'static str, parallel: &Parallel) -> Program {
    Case { model, ..CASE }.compiled(parallel, 1).artifact.train.remove(0)
}

/// Bytes on a rank of weights, or of the optimizer's state: of experts, and of all else.
fn bytes(program: &Program, weights: bool) -> (u64, u64) {
    let mut bytes = (0, 0);
    for param in program.params.iter().filter(|param| (param.kind == ParamKind::Weight) == weights && param.trained) {
        let expert = param.name.starts_with("experts.") && !param.name.contains("gate");
        *if expert { &mut bytes.0 } else { &mut bytes.1 } += program.ty(param.buffer).local_bytes(&program.mesh);
    }
    bytes
}

/// Of each expert one of the ranks of `ep` holds all, and its state, whatever `dp` is; with ZeRO `dp` divides experts, and `dp` and
/// `ep` all else. (Gains and biases have 32 elements or more: each of 2 to 8 ranks holds as many.)
#[test]
fn a_rank_holds_its_experts() {
    for model in MODELS {
        let of = |ep, dp, zero| {
            let program = program(model, &sharing(ep, Parallel { zero, ..mesh(dp, 1, 1) }));
            (bytes(&program, true), bytes(&program, false))
        };
        let ((experts, others), (expert_state, other_state)) = of(1, 1, Zero::Nothing);
        assert!(experts > 0 && others > 0, "{model}");
        for (ep, dp) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            let (e, all) = (u64::from(ep), u64::from(ep * dp));
            let state = (expert_state / e, other_state);
            assert_eq!(of(ep, dp, Zero::Nothing), ((experts / e, others), state), "{model} ep {ep} dp {dp}");
            let shard = (expert_state / all, other_state.div_ceil(all));
            let (weights, found) = of(ep, dp, Zero::State);
            assert_eq!((weights, found.0), ((experts / e, others), shard.0), "{model} ep {ep} dp {dp} ZeRO-1");
            let slack = other_state / 50 + 64;
            assert!(found.1.abs_diff(shard.1) <= slack, "{model} ep {ep} dp {dp}: {} bytes for {}", found.1, shard.1);
            let (weights, _) = of(ep, dp, Zero::Parameters);
            assert_eq!(weights.0, experts / all, "{model} ep {ep} dp {dp} ZeRO-3");
            assert!(weights.1.abs_diff(others.div_ceil(all)) <= others / 50 + 64, "{model} ep {ep} dp {dp} ZeRO-3");
        }
        let (replicated, _) = of(1, 4, Zero::Nothing);
        assert_eq!(replicated, (experts, others), "{model}: the control, without --ep");
    }
}

/// Collectives of a section by kind, over `axis`, of tensors of so many dims; not sums of gradients, which backward takes once a step.
fn moved(program: &Program, axis: &str, least: usize) -> BTreeMap<(SectionKind, &'static str), usize> {
    let axis = program.mesh.axis(axis).expect("an axis of the mesh");
    let mut counts = BTreeMap::new();
    for section in &program.sections {
        for instr in &section.body {
            let Action::Start { transfer, .. } = &instr.action else { continue };
            let name = match transfer {
                Transfer::AllToAll { axis: over, .. } if *over == axis => "all_to_all",
                Transfer::AllGather { axis: over, .. } if *over == axis => "all_gather",
                Transfer::ReduceScatter { axis: over, .. } if *over == axis => "reduce_scatter",
                Transfer::AllReduce { axes, .. } if axes.contains(&axis) => "all_reduce",
                _ => continue,
            };
            let is_sum = |ty: &TensorType| name == "all_reduce" && !ty.is_per_microbatch(&program.mesh);
            let types = instr.operands.iter().map(|&id| program.ty(id));
            let tensors = types.filter(|ty| ty.rank() >= least && !is_sum(ty)).count();
            if tensors > 0 {
                *counts.entry((section.kind, name)).or_default() += tensors;
            }
        }
    }
    counts
}

/// What is sent to experts goes there and back by one all_to_all each, and so do its gradients (arXiv 2006.16668, section 3.2): nothing else
/// is moved for a microbatch, but numbers.
#[test]
fn dispatched_tokens_are_exchanged_twice_in_each_direction() {
    for (ep, dp) in [(2, 1), (4, 1), (2, 2)] {
        let program = program("families/gshard.onnx", &sharing(ep, mesh(dp, 1, 1)));
        let mut found = moved(&program, "ep", 1);
        found.retain(|(section, _), _| matches!(section, SectionKind::Forward | SectionKind::Backward));
        let both = [SectionKind::Forward, SectionKind::Backward];
        assert_eq!(found, both.map(|section| ((section, "all_to_all"), 2)).into(), "ep {ep} dp {dp}");
        // Ten slots of four experts and a sample, of 32 floats: a rank's samples, or all samples of its experts.
        let exchanged = program.sections.iter().flat_map(|section| &section.body).filter_map(|instr| match &instr.action {
            Action::Start { transfer: Transfer::AllToAll { .. }, .. } => instr.operands.first(),
            _ => None,
        });
        let bytes: BTreeSet<u64> = exchanged.map(|&id| program.ty(id).local_bytes(&program.mesh)).collect();
        assert_eq!(bytes, [8 * 4 * 10 * 32 * u64::from(8 / (ep * dp))].into(), "ep {ep} dp {dp}");
    }
}

/// Where all experts compute all tokens, these are gathered for them, and what they make is scattered; their weights stay.
#[test]
fn tokens_of_all_experts_are_gathered_and_scattered() {
    let program = program("families/moe.onnx", &sharing(2, mesh(1, 1, 1)));
    let mut found = moved(&program, "ep", 3);
    found.retain(|(section, _), _| matches!(section, SectionKind::Forward | SectionKind::Backward));
    let expected = [
        ((SectionKind::Forward, "all_gather"), 1),
        ((SectionKind::Forward, "reduce_scatter"), 1),
        ((SectionKind::Forward, "all_to_all"), 1),
        // Tokens for the weights' gradients and gradients for the tokens'; then the gradients of the weights of experts go back.
        ((SectionKind::Backward, "all_gather"), 2),
        ((SectionKind::Backward, "reduce_scatter"), 1),
        ((SectionKind::Backward, "all_to_all"), 1),
    ];
    assert_eq!(found, expected.into());
}

/// Gradients of experts are summed over `dp`, of all else over `dp` and `ep`.
#[test]
fn gradients_of_experts_are_summed_over_dp_alone() {
    let program = program("families/gshard.onnx", &sharing(2, mesh(2, 1, 1)));
    let backward = program.sections.iter().filter(|section| section.kind == SectionKind::Backward);
    let mut summed: BTreeSet<(bool, Vec<&str>)> = BTreeSet::new();
    for instr in backward.flat_map(|section| &section.body) {
        let Action::Start { transfer: Transfer::AllReduce { axes, .. }, .. } = &instr.action else { continue };
        for ty in instr.operands.iter().map(|&id| program.ty(id)).filter(|ty| !ty.is_per_microbatch(&program.mesh)) {
            let names = axes.iter().map(|&axis| program.mesh.name(axis)).collect();
            if ty.rank() > 1 {
                summed.insert((ty.shape.len() == 3 || ty.sharding.dims.iter().any(|axes| !axes.is_empty()), names));
            }
        }
    }
    assert_eq!(summed, [(true, vec!["dp"]), (false, vec!["dp", "ep"])].into());
}

/// Heads, gates of recurrent layers, channels and positions are no experts: models without any are refused.
#[test]
fn other_stacks_are_no_experts() {
    let families = ["families/swin.onnx", "families/t5.onnx", "families/convnext.onnx", "families/gru.onnx"];
    for model in
        ["gpt2_tiny.onnx", "llama_tiny.onnx", "bert_tiny.onnx", "lstm.onnx", "static_mixer.onnx"].iter().chain(&families)
    {
        let refused = Case { model, ..CASE }.compile(&sharing(2, mesh(1, 1, 1)), 1, None).err();
        assert_eq!(refused.map(|error| error.code.0), Some(314), "{model}");
    }
}
