//! Mixed precision on ranks: as one device trains, at the bytes that the papers give.

use super::zero::{MODELS, bytes, clipped, program, same, sharded, wide_in};
use super::{Case, Split, decode, is_long, mesh};
use crate::tolerance;
use dcc::compile::planned_bytes;
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::precision::{LossScale, Mixed};
use dcc_program::DType;
use dcc_program::artifact::Artifact;
use dcc_program::kernel::Expr;
use dcc_program::program::{ParamKind, Place, Program, SectionKind};
use dcc_runtime::exec::whole::Outcome;
use std::collections::BTreeSet;

const BF16: Mixed = Mixed { half: DType::BF16, gradients: DType::F32, parameters: DType::F32, scale: None };

/// Without f32 masters.
const ALL_BF16: Mixed = Mixed { parameters: DType::BF16, ..BF16 };

const F16: Mixed = Mixed {
    half: DType::F16,
    gradients: DType::F32,
    parameters: DType::F32,
    scale: Some(LossScale { initial: 1024.0, growth: 2.0, backoff: 0.5, interval: 2 }),
};

fn in_half(model: &'static str, mixed: Mixed) -> Case {
    Case { mixed: Some(mixed), steps: 5, ..clipped(model) }
}

/// The largest relative difference of the losses of all steps.
fn off(found: &Outcome, expected: &Outcome) -> f64 {
    let losses = |outcome: &Outcome| outcome.outputs.iter().map(|step| decode(&step["loss"])[0]).collect::<Vec<f64>>();
    losses(found).iter().zip(losses(expected)).fold(0.0, |worst, (x, y)| f64::max(worst, (x - y).abs() / y.abs()))
}

/// Every mesh against one device, and that against itself at a learning rate half as high again.
fn check(case: &Case, rate: f64, splits: &[Split]) {
    let mixed = case.mixed.expect("of mixed precision");
    let one = case.compiled(&mesh(1, 1, 1), 1).artifact;
    let (alone, bound) = (case.trained(&one, 1, rate), tolerance::of_half(mixed.half));
    let mut worst = 0.0;
    for (parallel, microbatches) in splits {
        let found = case.trained(&case.compiled(parallel, *microbatches).artifact, 1, rate);
        let difference = off(&found, &alone);
        let Parallel { dp, tp, pp, zero, .. } = parallel;
        let at = format!("{} {mixed:?} dp {dp} tp {tp} pp {pp} {zero:?} mb {microbatches}", case.model);
        assert!(difference <= bound, "{at}: {difference:e}");
        assert!(found.tallies.iter().all(|tally| tally.interp == 0 && tally.jit > 0), "{at}");
        worst = f64::max(worst, difference);
    }
    let control = off(&case.trained(&one, 1, 1.5 * rate), &alone);
    println!("{} {mixed:?}: {} meshes, largest difference {worst:.1e}, control {control:.1e}", case.model, splits.len());
    assert!(control > bound, "{}: a learning rate half as high again makes a difference of only {control:e}", case.model);
}

fn splits() -> Vec<Split> {
    let mut splits = vec![(mesh(2, 1, 1), 2), (mesh(1, 2, 1), 1), (mesh(1, 1, 2), 2), (mesh(2, 2, 2), 2)];
    splits.push((Parallel { schedule: Schedule::ZbH1, ..mesh(1, 1, 2) }, 4));
    for zero in [Zero::State, Zero::Gradients, Zero::Parameters] {
        splits.extend([(sharded(zero, &mesh(2, 2, 1)), 2), (sharded(zero, &mesh(2, 1, 2)), 2)]);
    }
    splits.push((Parallel { shard_group: Some(2), ..sharded(Zero::Parameters, &mesh(4, 1, 1)) }, 1));
    splits
}

#[test]
fn every_mesh_trains_as_one_device() {
    let splits = splits();
    check(&in_half("gpt2_tiny.onnx", BF16), 1e-2, &splits);
    let few: Vec<Split> =
        splits.iter().filter(|(parallel, _)| is_long() || parallel.zero == Zero::Parameters).cloned().collect();
    check(&in_half("llama_tiny.onnx", BF16), 1e-2, &few);
    check(&in_half("gpt2_tiny.onnx", Mixed { gradients: DType::BF16, ..BF16 }), 1e-2, &few);
    check(&in_half("gpt2_tiny.onnx", ALL_BF16), 1e-2, &few);
    let one: Vec<Split> = few.iter().map(|split| (split.0.clone(), 1)).collect();
    check(&in_half("cnn.onnx", BF16), 5e-2, &one);
    check(&in_half("gpt2_tiny.onnx", F16), 1e-2, &few);
    check(&in_half("cnn.onnx", F16), 5e-2, &one);
}

/// Of one microbatch.
#[test]
fn zero_stages_agree_to_the_bit() {
    for model in MODELS {
        for mixed in [BF16, Mixed { gradients: DType::BF16, ..BF16 }, ALL_BF16, F16] {
            let case = Case { steps: 3, ..in_half(model, mixed) };
            let trained = |zero| case.trained(&case.compiled(&sharded(zero, &mesh(4, 1, 1)), 1).artifact, 1, 1e-2);
            let [nothing, state, gradients, parameters] = Zero::ALL.map(trained);
            for (found, name) in [(state, "ZeRO-1"), (gradients, "ZeRO-2"), (parameters, "ZeRO-3")] {
                same(&found, &nothing, &format!("{model} {name}"));
            }
        }
    }
}

/// Bytes of half floats that section begin leaves to the others: what stands for weights in a step.
fn copies(program: &Program) -> u64 {
    let begin = program.sections.iter().filter(|section| section.kind == SectionKind::Begin);
    let written = begin.flat_map(|section| &section.body).flat_map(|instr| &instr.results);
    let mut places = BTreeSet::new();
    let kept = written.map(|id| &program.buffers[id.0 as usize]).filter(|buffer| {
        let copy = buffer.ty.dtype.bytes() == 2 && buffer.ty.sharding.pending.is_empty();
        copy && buffer.place == Place::Persistent && places.insert(buffer.offset)
    });
    kept.map(|buffer| buffer.ty.local_bytes(&program.mesh)).sum()
}

/// Adam in mixed precision: 2 bytes of weight, 4 or 2 of gradient, 12 of state, the f32 weight in it, for each of Ψ parameters. Section
/// 3.1 of arXiv 1910.02054, table 1; its gradients are in half precision.
#[test]
fn a_rank_holds_what_the_paper_says() {
    for (gradients, bytes_of_gradient) in [(DType::F32, 4.0), (DType::BF16, 2.0)] {
        let of = |zero, dp| {
            let artifact = wide_in(Some(Mixed { gradients, ..BF16 }), &sharded(zero, &mesh(dp, 1, 1)), 2);
            let held = bytes(program(&artifact));
            (copies(program(&artifact)), held.gradients, held.weights + held.state)
        };
        let (copy, gradient, state) = of(Zero::Nothing, 1);
        let psi = copy as f64 / 2.0;
        assert_eq!((gradient as f64, state as f64), (bytes_of_gradient * psi, 12.0 * psi));
        for dp in [2, 4] {
            let n = f64::from(dp);
            let rows = [
                (Zero::Nothing, 2.0, bytes_of_gradient, 12.0),
                (Zero::State, 2.0, bytes_of_gradient, 12.0 / n),
                (Zero::Gradients, 2.0, bytes_of_gradient / n, 12.0 / n),
                (Zero::Parameters, 2.0 / n, bytes_of_gradient / n, 12.0 / n),
            ];
            for (zero, copy, gradient, state) in rows {
                let (found, due) = (of(zero, dp), [copy, gradient, state].map(|bytes| (bytes * psi) as u64));
                println!("{zero:?} dp {dp}, gradients {}: {found:?} bytes", gradients.name());
                assert_eq!([found.0, found.1, found.2], due, "{zero:?} dp {dp}, gradients {}", gradients.name());
            }
        }
    }
}

/// Of parameters in bf16: 2 bytes of weight and 8 of state; nothing is copied.
#[test]
fn without_masters_a_rank_holds_four_bytes_less() {
    for (gradients, bytes_of_gradient) in [(DType::F32, 4.0), (DType::BF16, 2.0)] {
        let of = |mixed, zero, dp| {
            let artifact = wide_in(Some(mixed), &sharded(zero, &mesh(dp, 1, 1)), 2);
            let program = program(&artifact);
            (bytes(program), copies(program), program.persistent_bytes, planned_bytes(program))
        };
        let (masters, stored) = (Mixed { gradients, ..BF16 }, Mixed { gradients, ..ALL_BF16 });
        let psi = of(masters, Zero::Nothing, 1).0.weights as f64 / 4.0;
        for dp in [1, 2, 4] {
            let n = f64::from(dp);
            let rows = [
                (Zero::Nothing, 2.0, bytes_of_gradient, 8.0),
                (Zero::State, 2.0, bytes_of_gradient, 8.0 / n),
                (Zero::Gradients, 2.0, bytes_of_gradient / n, 8.0 / n),
                (Zero::Parameters, 2.0 / n, bytes_of_gradient / n, 8.0 / n),
            ];
            for (zero, weight, gradient, state) in rows {
                let (found, copied, persistent, planned) = of(stored, zero, dp);
                let due = [weight, gradient, state].map(|bytes| (bytes * psi) as u64);
                let what = format!("{zero:?} dp {dp}, gradients {}: {found:?}", gradients.name());
                assert_eq!(([found.weights, found.gradients, found.state], copied), (due, 0), "{what}");
                let beside = of(masters, zero, dp);
                let master = 4.0 * psi / if zero == Zero::Nothing { 1.0 } else { n };
                println!("{what}, {} bytes less are planned", beside.3 - planned);
                // The seed is a number more; behind each of three masters were 17 cache lines, if it was large.
                let less = (beside.2 - persistent) as f64;
                let range = master - 256.0..=master + 3.0 * 17.0 * 64.0;
                assert!(range.contains(&less), "{what}: {less} bytes less of {master} between steps");
            }
        }
    }
}

/// What a rank reads of others in a step of m microbatches, × (n-1)/n of the parameters' bytes in f32: `ranks::zero` has the rows of
/// f32. Parameters are gathered as half floats; gradients are reduced in their own dtype.
#[test]
fn a_step_moves_half_floats() {
    let psi = bytes(program(&wide_in(Some(BF16), &mesh(1, 1, 1), 1))).weights as f64;
    for (gradients, parameters, share) in
        [(DType::F32, DType::F32, 1.0), (DType::BF16, DType::F32, 0.5), (DType::F32, DType::BF16, 1.0)]
    {
        let mixed = Mixed { gradients, parameters, ..BF16 };
        let case = Case { steps: 2, ..in_half("", mixed) };
        for (dp, microbatches) in [(4, 1), (4, 2), (2, 2)] {
            let m = f64::from(microbatches);
            // The first product's weight is gathered for forward alone.
            let gathered = m * (2.0 - 256.0 * 512.0 * 4.0 / psi) / 2.0;
            let rows = [
                (Zero::Nothing, 2.0 * share),
                (Zero::State, share + 0.5),
                (Zero::Gradients, m * share + 0.5),
                (Zero::Parameters, m * share + gathered),
            ];
            for (zero, due) in rows {
                let artifact = wide_in(Some(mixed), &sharded(zero, &mesh(dp, 1, 1)), microbatches);
                let tallies = case.trained(&artifact, 1, 1e-3).tallies;
                let found = tallies.iter().map(|tally| tally.received_bytes as f64).sum::<f64>() / tallies.len() as f64;
                let due = due * f64::from(dp - 1) / f64::from(dp) * psi;
                let what = format!("{zero:?} dp {dp}, {microbatches} microbatches, {}", mixed.text());
                assert!((found / due - 1.0).abs() < 1e-3, "{what}: {found} bytes where {due} are due");
            }
        }
    }
}

/// With updates rounded to nearest, by a half where random numbers stand.
fn to_nearest(artifact: &Artifact) -> Artifact {
    let mut nearest = artifact.clone();
    let exprs = nearest.train.iter_mut().flat_map(|program| &mut program.kernels).flat_map(|kernel| &mut kernel.exprs);
    let mut found = 0;
    for expr in exprs.filter(|expr| matches!(expr, Expr::Uniform { .. })) {
        *expr = Expr::Const { dtype: DType::F32, bits: 0.5_f64.to_bits() };
        found += 1;
    }
    assert!(found > 0, "nothing is rounded");
    nearest
}

/// AdamW at a rate at which a step is less than half of the last digit of all but the smallest weights, on one batch: the losses fall
/// as they do with f32 masters, and hardly with rounding to nearest.
#[test]
fn small_steps_count() {
    const STEPS: usize = 40;
    let trained = |artifact: &Artifact| {
        let case = Case { steps: STEPS, ..in_half("", BF16) };
        let batch = super::inputs(artifact, 1);
        let outcome = case.trained_on(artifact, &batch, 1, 4e-5);
        let losses: Vec<f64> = outcome.outputs.iter().map(|step| decode(&step["loss"])[0]).collect();
        losses[0] - losses[STEPS - 1]
    };
    let [masters, stored] = [BF16, ALL_BF16].map(|mixed| wide_in(Some(mixed), &mesh(1, 1, 1), 1));
    let [exact, stochastic, nearest] = [masters, stored.clone(), to_nearest(&stored)].map(|artifact| trained(&artifact));
    println!("losses fall by {exact:e} with masters, {stochastic:e} without, {nearest:e} rounded to nearest");
    assert!(exact > 0.0 && (stochastic / exact - 1.0).abs() < 0.02, "{stochastic:e}, with masters {exact:e}");
    assert!(nearest < 0.5 * exact, "a control: {nearest:e} to nearest, {exact:e} with masters");
}

/// Of a scale that f16 cannot hold times any gradient: nothing changes but the scale, on all ranks, whatever they share.
#[test]
fn a_step_that_overflows_is_skipped_by_all_ranks() {
    let planted = LossScale { initial: 2.0_f64.powi(60), growth: 2.0, backoff: 0.5, interval: 2000 };
    let case = Case { steps: 2, ..in_half("gpt2_tiny.onnx", Mixed { scale: Some(planted), ..F16 }) };
    let sound = Case { steps: 2, ..in_half("gpt2_tiny.onnx", F16) };
    let splits = [
        (mesh(1, 1, 1), 1),
        (mesh(2, 2, 1), 2),
        (mesh(1, 1, 2), 2),
        (sharded(Zero::State, &mesh(2, 1, 2)), 2),
        (sharded(Zero::Parameters, &mesh(2, 1, 1)), 1),
    ];
    for (parallel, microbatches) in splits {
        let artifact = case.compiled(&parallel, microbatches).artifact;
        let before = super::parameters(&artifact);
        let found = case.trained(&artifact, 1, 1e-2);
        let trained = sound.trained(&sound.compiled(&parallel, microbatches).artifact, 1, 1e-2);
        let at = format!("{parallel:?}");
        for (key, value) in &found.parameters {
            let (name, kind) = key;
            match kind {
                ParamKind::Weight => {
                    assert!(before[key] == *value, "{at}: {name} has changed");
                }
                ParamKind::State(kind) if name == "loss_scale" => {
                    let due = if kind == "backoffs" { 2.0 } else { 0.0 };
                    assert_eq!(decode(value), [due], "{at}: {kind}");
                }
                ParamKind::State(kind) => assert!(decode(value).iter().all(|x| *x == 0.0), "{at}: {kind} of {name}"),
            }
        }
        let scale = |step: usize| decode(&found.outputs[step]["loss_scale"])[0];
        assert_eq!([scale(0), scale(1)], [planted.initial, planted.initial / 2.0], "{at}");
        let moved = trained.parameters.iter().filter(|(key, value)| before.get(*key).is_some_and(|old| old != *value)).count();
        assert!(moved > 10, "{at}: at a scale that f16 holds, {moved} parameters move");
        let state = |kind: &str| decode(&trained.parameters[&("loss_scale".to_owned(), ParamKind::State(kind.to_owned()))])[0];
        assert_eq!(["growths", "backoffs", "clean"].map(state), [1.0, 0.0, 0.0], "{at}");
    }
}
