//! ZeRO and FSDP: the same training whatever data-parallel ranks share, at the bytes and the traffic that the papers give.

use super::{CASE, Case, Split, decode, is_long, mesh};
use crate::onnx_model::{external, model, node, size, value, with_tensor};
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::loss::{LossKind, LossOptions};
use dcc::optimizer::OptimizerOptions;
use dcc::plan::{Parallel, Zero, batch};
use dcc::precision::Mixed;
use dcc::train::TrainingOptions;
use dcc_program::artifact::Artifact;
use dcc_program::program::{ParamKind, Place, Program};
use dcc_runtime::exec::whole::Outcome;
use prost::Message;
use std::collections::BTreeSet;

pub(super) const MODELS: [&str; 3] = ["mlp.onnx", "gpt2_tiny.onnx", "families/resnet.onnx"];

pub(super) fn sharded(zero: Zero, parallel: &Parallel) -> Parallel {
    Parallel { zero, ..parallel.clone() }
}

pub(super) fn clipped(model: &'static str) -> Case {
    // A bound that clips from the first step on.
    Case { model, batch: 16, clip: Some(0.05), dtype: None, ..CASE }
}

/// Losses, norms, weights and states, bit by bit.
#[track_caller]
pub(super) fn same(found: &Outcome, expected: &Outcome, what: &str) {
    for (step, (found, expected)) in found.outputs.iter().zip(&expected.outputs).enumerate() {
        for (name, value) in expected {
            assert!(
                found[name] == *value,
                "{what}: {name} of step {step}: {:?}, not {:?}",
                decode(&found[name]),
                decode(value)
            );
        }
    }
    assert_eq!(found.parameters.len(), expected.parameters.len(), "{what}");
    for (key, value) in &expected.parameters {
        assert!(found.parameters[key] == *value, "{what}: {key:?}");
    }
}

/// Of one microbatch all stages agree; of several, those that sum microbatches first, and those that sum ranks first.
#[test]
fn stages_agree_to_the_bit() {
    let ranks: &[u32] = if is_long() { &[4, 8] } else { &[4] };
    for model in MODELS {
        for &dp in ranks {
            // Statistics of the whole batch; of several microbatches, each rank's.
            let groups = |microbatches| if microbatches == 1 { 1 } else { u64::from(dp * microbatches) };
            let case = |microbatches| Case { batch: 4 * u64::from(dp), bn_groups: groups(microbatches), ..clipped(model) };
            let compiled =
                |zero, microbatches| case(microbatches).compiled(&sharded(zero, &mesh(dp, 1, 1)), microbatches).artifact;
            let trained = |zero, microbatches| case(microbatches).trained(&compiled(zero, microbatches), 1, 1e-2);
            let [nothing, state, gradients, parameters] = Zero::ALL.map(|zero| trained(zero, 1));
            for (found, name) in [(state, "ZeRO-1"), (gradients, "ZeRO-2"), (parameters, "ZeRO-3")] {
                same(&found, &nothing, &format!("{model} dp {dp} {name}"));
            }
            let [nothing, state, gradients, parameters] = Zero::ALL.map(|zero| trained(zero, 2));
            same(&state, &nothing, &format!("{model} dp {dp} ZeRO-1, two microbatches"));
            same(&parameters, &gradients, &format!("{model} dp {dp} ZeRO-3, two microbatches"));
            let differ = nothing.parameters.iter().any(|(key, value)| gradients.parameters[key] != *value);
            assert!(differ, "{model} dp {dp}, a control: the order of sums shows in the last bits");
            let [all, shard] = [Zero::Nothing, Zero::Parameters].map(|zero| bytes(program(&compiled(zero, 2))));
            assert!(shard.weights < all.weights && shard.state < all.state, "{model} dp {dp}: nothing is shared");
        }
    }
}

/// Every stage beside every other axis, whole groups and smaller ones, one and several microbatches.
#[test]
fn every_mesh_trains_as_one_device() {
    let group = |zero, group, parallel: Parallel| Parallel { zero, shard_group: Some(group), ..parallel };
    let mut splits: Vec<Split> = Vec::new();
    for zero in [Zero::State, Zero::Gradients, Zero::Parameters] {
        splits.extend([
            (sharded(zero, &mesh(2, 2, 1)), 2),
            (sharded(zero, &mesh(2, 1, 2)), 4),
            (sharded(zero, &mesh(2, 2, 2)), 2),
        ]);
        splits.push((group(zero, 2, mesh(4, 1, 1)), 2));
    }
    splits.push((group(Zero::Parameters, 2, mesh(4, 2, 1)), 1));
    splits.push((sharded(Zero::Parameters, &mesh(4, 1, 1)), 4));
    let case = |model| Case { model, batch: 16, clip: Some(0.5), ..CASE };
    case("gpt2_tiny.onnx").check(&splits);
    let few: Vec<Split> = splits.iter().filter(|split| split.0.zero == Zero::Parameters).cloned().collect();
    case("llama_tiny.onnx").check(&few);
    case("mlp.onnx").check(&few);
    let one: Vec<Split> = few.iter().map(|split| (split.0.clone(), 1)).collect();
    case("families/resnet.onnx").check(&one);
}

/// Bytes of one rank by what they are for, from its program.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Bytes {
    pub weights: u64,
    pub gradients: u64,
    pub state: u64,
}

pub(super) fn bytes(program: &Program) -> Bytes {
    let mut bytes = Bytes::default();
    let mut places = BTreeSet::new();
    for param in program.params.iter().filter(|param| param.trained) {
        let buffer = &program.buffers[param.buffer.0 as usize];
        places.insert(buffer.offset);
        let of = if param.kind == ParamKind::Weight { &mut bytes.weights } else { &mut bytes.state };
        *of += buffer.ty.local_bytes(&program.mesh);
    }
    let mb = program.mesh.microbatch_axis().expect("every mesh has it");
    for buffer in &program.buffers {
        let tensor = buffer.place == Place::Persistent && buffer.ty.rank() > 0;
        let sums = tensor && buffer.ty.sharding.pending.iter().any(|p| p.0 == mb);
        if sums && places.insert(buffer.offset) {
            bytes.gradients += buffer.ty.local_bytes(&program.mesh);
        }
    }
    bytes
}

pub(super) fn program(artifact: &Artifact) -> &Program {
    &artifact.train[0]
}

/// f32 Adam: 4 bytes of weight, 4 of gradient and 8 of state for each of Ψ parameters; rows of table 1 of arXiv 1910.02054.
#[test]
fn a_rank_holds_what_the_paper_says() {
    let close = |found: u64, due: f64, what: &str| {
        let off = (found as f64 - due).abs() / due;
        assert!(off < 0.01, "{what}: {found} bytes where {due} are due, {off:.4} off");
    };
    for model in ["gpt2_tiny.onnx", "llama_tiny.onnx"] {
        let of = |zero, dp| bytes(program(&clipped(model).compiled(&sharded(zero, &mesh(dp, 1, 1)), 2).artifact));
        let whole = of(Zero::Nothing, 1);
        let psi = whole.weights as f64 / 4.0;
        assert_eq!((whole.gradients, whole.state), (whole.weights, 2 * whole.weights), "{model}");
        for dp in [2, 4, 8] {
            let n = f64::from(dp);
            for (zero, weights, gradients, state) in [
                (Zero::Nothing, 4.0, 4.0, 8.0),
                (Zero::State, 4.0, 4.0, 8.0 / n),
                (Zero::Gradients, 4.0, 4.0 / n, 8.0 / n),
                (Zero::Parameters, 4.0 / n, 4.0 / n, 8.0 / n),
            ] {
                let (found, what) = (of(zero, dp), format!("{model} {zero:?} dp {dp}"));
                close(found.weights, weights * psi, &format!("{what} weights"));
                close(found.gradients, gradients * psi, &format!("{what} gradients"));
                close(found.state, state * psi, &format!("{what} state"));
            }
        }
    }
}

/// Three products without biases: nothing but large tensors, whose collectives are the papers'.
fn wide(parallel: &Parallel, microbatches: u32) -> Artifact {
    wide_in(None, parallel, microbatches)
}

pub(super) fn wide_in(mixed: Option<Mixed>, parallel: &Parallel, microbatches: u32) -> Artifact {
    let widths = [256_i64, 512, 512, 256];
    let nodes = ["x", "h", "i"].iter().zip(["h", "i", "y"]).enumerate();
    let nodes: Vec<_> = nodes.map(|(n, (x, y))| node("MatMul", &[x, &format!("w{n}")], &[y])).collect();
    let mut wide = model(&nodes);
    wide.graph.as_mut().expect("a graph").input = vec![value("x", &[size(16), size(256)])];
    for (n, dims) in widths.windows(2).enumerate() {
        wide = with_tensor(wide, external(&format!("w{n}"), dims, "weights"));
    }
    let options = Options {
        batch: batch::Given { accumulate: Some(microbatches), ..Default::default() },
        parallel: parallel.clone(),
        training: TrainingOptions {
            loss: LossOptions { kind: LossKind::Mse, ..LossOptions::default() },
            optimizer: OptimizerOptions { grad_clip: Some(0.05), ..OptimizerOptions::default() },
            mixed,
            ..TrainingOptions::default()
        },
        ..Options::default()
    };
    compile(&Model::decode(wide.encode_to_vec().into()).expect("a model"), &options).expect("it compiles").artifact
}

/// What a rank reads of others in a step of m microbatches, in units of the parameters' bytes × (n-1)/n: section 7 of arXiv 1910.02054,
/// and 3 a microbatch where parameters are gathered for forward and for backward (but the first product's, of whose input no gradient
/// is wanted). Of groups of g among n ranks (arXiv 2304.11277, section 3.2), what moves within a group by those and, once, the sum of
/// a shard over the groups.
#[test]
fn a_step_moves_what_the_papers_say() {
    let case = Case { steps: 2, dtype: None, ..CASE };
    let psi = bytes(program(&wide(&mesh(1, 1, 1), 1))).weights as f64;
    let moved = |parallel: &Parallel, microbatches| {
        let outcome = case.trained(&wide(parallel, microbatches), 1, 1e-3);
        outcome.tallies.iter().map(|tally| tally.received_bytes as f64).sum::<f64>() / outcome.tallies.len() as f64
    };
    let ring = |members: f64| (members - 1.0) / members * psi;
    let gathered = |microbatches: u32| f64::from(microbatches) * (3.0 - 256.0 * 512.0 * 4.0 / psi);
    let check = |parallel: &Parallel, microbatches: u32, due: f64| {
        let found = moved(parallel, microbatches);
        let Parallel { dp, zero, shard_group, .. } = parallel;
        println!("{zero:?} dp {dp} group {shard_group:?}, {microbatches} microbatches: {found} bytes, {due} due");
        assert!(
            (found / due - 1.0).abs() < 1e-3,
            "{zero:?} dp {dp} {microbatches} microbatches: {found} bytes where {due} are due"
        );
    };
    for (dp, microbatches) in [(4, 1), (4, 2), (2, 4), (8, 1)] {
        let m = f64::from(microbatches);
        for (zero, due) in
            [(Zero::Nothing, 2.0), (Zero::State, 2.0), (Zero::Gradients, m + 1.0), (Zero::Parameters, gathered(microbatches))]
        {
            check(&sharded(zero, &mesh(dp, 1, 1)), microbatches, due * ring(f64::from(dp)));
        }
    }
    for microbatches in [1, 2] {
        let hybrid = Parallel { shard_group: Some(2), ..sharded(Zero::Parameters, &mesh(4, 1, 1)) };
        check(&hybrid, microbatches, gathered(microbatches) * ring(2.0) + 2.0 * ring(2.0) / 2.0);
    }
}
