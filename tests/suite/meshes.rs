//! Partitioned = unpartitioned: a training step placed, lowered and simulated on a mesh gives what the graph means.

use dcc::graph::Graph;
use dcc::import::{self, Model};
use dcc::interp::{self, Bindings, Precision, Tensor};
use dcc::lower;
use dcc::ops::Op;
use dcc::plan::{Parallel, Schedule};
use dcc::train::{Output, Trainable, TrainingOptions, train_step};
use dcc::{place, plan, schedule};
use dcc_program::program::{Mode, ParamKind, Program};
use dcc_program::simulate::{self, Scalars, Simulator};
use std::collections::BTreeMap;

/// The training graph of a model of `tests/models`, in f32.
fn training_graph(model: &str, batch: u64) -> Graph {
    let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let model = Model::decode(bytes.into()).unwrap();
    let options = import::Options { global_batch: Some(batch), ..Default::default() };
    let imported = import::onnx(&model, &options).unwrap_or_else(|e| panic!("{path}: {e}"));
    let trainable: Vec<Trainable> = imported
        .parameters
        .iter()
        .map(|p| Trainable { name: p.tensor.name.clone(), aliases: p.aliases.clone(), by_default: p.trained })
        .collect();
    train_step(&imported.graph, &trainable, &TrainingOptions::default()).unwrap_or_else(|e| panic!("{path}: {e}")).graph
}

/// Deterministic values in (-scale, scale).
fn noise(seed: u64, count: u64, scale: f64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..count).map(|_| scale * (2.0 * next() - 1.0)).collect()
}

fn bindings(graph: &Graph) -> Bindings {
    let mut bindings = Bindings { learning_rate: 0.01, step: 1, seed: 7, ..Bindings::default() };
    for (i, node) in graph.nodes.iter().enumerate() {
        let shape = node.ty.shape.to_vec();
        match &node.op {
            Op::Input(input) => {
                let values = noise(i as u64 + 1, node.ty.elements(), 1.0);
                let tensor = match node.ty.dtype.is_float() {
                    true => Tensor::floats(node.ty.dtype, &shape, values),
                    false => Tensor::ints(node.ty.dtype, &shape, values.iter().map(|v| (v.abs() * 10.0) as i64).collect()),
                };
                bindings.inputs.insert(input.name.clone(), tensor);
            }
            Op::Param(param) if param.kind == ParamKind::Weight && param.piece.is_none() => {
                let mut values = noise(i as u64 + 1000, node.ty.elements(), 0.2);
                if node.ty.rank() == 1 {
                    values.iter_mut().for_each(|v| *v += 1.0);
                }
                let tensor = match node.ty.dtype.is_float() {
                    true => Tensor::floats(node.ty.dtype, &shape, values),
                    false => Tensor::ints(node.ty.dtype, &shape, vec![0; node.ty.elements() as usize]),
                };
                bindings.params.insert((param.name.clone(), param.kind.clone()), tensor);
            }
            _ => {}
        }
    }
    bindings
}

fn simulated(tensor: &Tensor) -> simulate::Tensor {
    let values = match tensor.dtype.is_float() {
        true => tensor.f64s().to_vec(),
        false => tensor.i64s().iter().map(|&v| v as f64).collect(),
    };
    simulate::Tensor { shape: tensor.shape.to_vec(), values }
}

fn programs(graph: &Graph, parallel: &Parallel) -> Vec<Program> {
    let plan = plan::choose(graph, parallel).unwrap();
    let placed = place::place(graph, &plan).unwrap();
    dcc::graph::verify(&placed).unwrap();
    lower::programs(&placed, &plan, "test", Mode::Train, &schedule::turns(&plan, &schedule::order(&plan))).unwrap()
}

/// Largest relative difference between the simulated programs and the graph's meaning, over all outputs.
fn difference(graph: &Graph, programs: &[Program]) -> f64 {
    let bindings = bindings(graph);
    let expected = interp::outputs(graph, &bindings, Precision::Exact).unwrap();
    let mut simulator = Simulator::new(programs).unwrap();
    for ((name, kind), value) in &bindings.params {
        simulator.set(name, kind, &simulated(value)).unwrap();
    }
    let inputs: BTreeMap<String, simulate::Tensor> =
        bindings.inputs.iter().map(|(name, value)| (name.clone(), simulated(value))).collect();
    let outputs = simulator.step(&inputs, Scalars { learning_rate: 0.01, step: 1, seed: 7 }).unwrap();
    let mut worst: f64 = 0.0;
    for (name, want) in expected {
        let got = match Output::parse(&name) {
            Some(Output::New { name, kind, piece: None }) => simulator.get(&name, &kind).unwrap(),
            Some(Output::New { .. }) => continue,
            _ => outputs[&name].clone(),
        };
        let want = want.f64s();
        let scale = want.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
        for (a, b) in want.iter().zip(&got.values) {
            worst = if b.is_finite() { worst.max((a - b).abs() / scale) } else { f64::INFINITY };
        }
    }
    worst
}

fn check(model: &str, batch: u64, parallel: Parallel) {
    let graph = training_graph(model, batch);
    let programs = programs(&graph, &parallel);
    let worst = difference(&graph, &programs);
    assert!(worst < 1e-9, "{model} {parallel:?}: {worst:e}");
}

fn parallel(dp: u32, tp: u32, pp: u32, microbatches: u32) -> Parallel {
    Parallel { dp, tp, pp, microbatches, ..Parallel::default() }
}

#[test]
fn mlp_on_one_device() {
    check("mlp.onnx", 8, parallel(1, 1, 1, 1));
}

#[test]
fn mlp_on_meshes() {
    for (dp, tp, pp, mb) in [(2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2), (2, 2, 2, 2)] {
        check("mlp.onnx", 8, parallel(dp, tp, pp, mb));
    }
}

#[test]
fn cnn_on_meshes() {
    for (dp, tp, pp, mb) in [(1, 1, 1, 1), (2, 2, 2, 2)] {
        check("cnn.onnx", 8, parallel(dp, tp, pp, mb));
    }
}

#[test]
fn gpt_on_meshes() {
    for (dp, tp, pp, mb) in [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 4), (2, 2, 2, 2)] {
        check("gpt2_tiny.onnx", 8, parallel(dp, tp, pp, mb));
    }
    let gpipe = Parallel { schedule: Schedule::GPipe, ..parallel(1, 1, 4, 4) };
    check("gpt2_tiny.onnx", 8, gpipe);
}
