//! Programs of whole models on real ranks: every mesh and schedule trains as one device does, to rounding.

use dcc::compile::{Compiled, Options, Precision, compile};
use dcc::import::{self, Model};
use dcc::plan::{Parallel, Schedule, batch};
use dcc_program::artifact::{Artifact, Data};
use dcc_program::manifest::Manifest;
use dcc_program::program::{ParamKind, Program};
use dcc_program::{DType, TensorType};
use dcc_runtime::exec::whole::{Outcome, Parameters, Run, Tensor};
use dcc_runtime::exec::{Fresh, Scalars};
use std::collections::BTreeMap;

const STEPS: usize = 3;
const BATCH: u64 = 8;

pub fn compiled(model: &str, parallel: &Parallel, microbatches: u32, precision: Precision) -> Compiled {
    let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let batch = batch::Given { global: Some(BATCH), accumulate: Some(microbatches), ..Default::default() };
    let import = import::Options::default();
    let options =
        Options { name: model.to_owned(), batch, parallel: parallel.clone(), precision, import, ..Options::default() };
    compile(&Model::decode(bytes.into()).unwrap(), &options).unwrap_or_else(|e| panic!("{model} {parallel:?}: {e}"))
}

/// Numbers in (-1, 1) that look random.
fn noise(seed: u64) -> impl Iterator<Item = f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    })
}

fn encode(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    let element = |x: f64| match dtype {
        // The same values in both precisions.
        DType::F32 => (x as f32).to_ne_bytes().to_vec(),
        DType::F64 => f64::from(x as f32).to_ne_bytes().to_vec(),
        DType::Bool => vec![u8::from(x != 0.0)],
        _ => (x as i64).to_ne_bytes()[..dtype.bytes() as usize].to_vec(),
    };
    values.flat_map(element).collect()
}

fn decode(tensor: &Tensor) -> Vec<f64> {
    let value = |bytes: &[u8]| match tensor.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        _ => {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            i64::from_ne_bytes(wide) as f64
        }
    };
    tensor.bytes.chunks_exact(tensor.dtype.bytes() as usize).map(value).collect()
}

/// Initial values by name: the model's own where it has them, else noise; gains about 1.
fn parameters(artifact: &Artifact) -> Parameters {
    let manifest = Manifest::from_options(&artifact.options).unwrap();
    let dtype = |name: &str| {
        let of = |p: &Program| p.params.iter().find(|x| x.name == name).map(|x| p.ty(x.buffer).dtype);
        artifact.train.iter().find_map(of)
    };
    let used = artifact.tensors.iter().filter_map(|tensor| Some((tensor, dtype(&tensor.name)?)));
    let value = |(tensor, dtype): (&dcc_program::artifact::Tensor, DType)| {
        let shape = tensor.shape.to_vec();
        let count = shape.iter().product::<u64>() as usize;
        let bytes = match &tensor.data {
            Data::Embedded(bytes) => {
                let own = Tensor { dtype: tensor.dtype, shape: shape.clone(), bytes: bytes.to_vec() };
                encode(dtype, decode(&own).into_iter())
            }
            _ => {
                let gain = manifest.parameters.get(&tensor.name).is_some_and(|p| p.gain);
                let seed = tensor.name.bytes().map(u64::from).sum();
                encode(dtype, noise(seed).take(count).map(|x| 0.1 * x + if gain { 1.0 } else { 0.0 }))
            }
        };
        ((tensor.name.clone(), ParamKind::Weight), Tensor { dtype, shape, bytes })
    };
    used.map(value).collect()
}

/// Data of all steps; tokens and labels within their tables, some labels ignored.
fn inputs(artifact: &Artifact) -> Vec<BTreeMap<String, Tensor>> {
    let manifest = Manifest::from_options(&artifact.options).unwrap();
    let all = || artifact.train.iter().flat_map(|p| p.inputs.iter().map(|input| (&input.name, p.ty(input.buffer))));
    let value = |step: usize, name: &String, ty: &TensorType| {
        let about = manifest.inputs.get(name).cloned().unwrap_or_default();
        let classes = about.vocabulary.unwrap_or(3) as f64;
        let ignored = about.ignore_index.filter(|_| ty.rank() > 1);
        let integer = |(i, x): (usize, f64)| match ignored {
            Some(ignored) if i % 11 == 3 => ignored as f64,
            _ => ((x + 1.0) / 2.0 * classes).floor(),
        };
        let seed = (step * 100 + name.len()) as u64 + 1;
        let values = noise(seed).take(ty.elements() as usize);
        let bytes = match ty.dtype.is_float() {
            true => encode(ty.dtype, values),
            false => encode(ty.dtype, values.enumerate().map(integer)),
        };
        Tensor { dtype: ty.dtype, shape: ty.shape.to_vec(), bytes }
    };
    (0..STEPS).map(|step| all().map(|(name, ty)| (name.clone(), value(step, name, ty))).collect()).collect()
}

fn trained(artifact: &Artifact, threads: usize) -> Outcome {
    let steps: Vec<Scalars> = (1..=STEPS as i64).map(|step| Scalars { learning_rate: 1e-3, step, seed: 7 }).collect();
    let (parameters, inputs) = (parameters(artifact), inputs(artifact));
    let programs = &artifact.train[..];
    Run { programs, threads, fresh: Fresh::Poisoned, parameters: &parameters, inputs: &inputs, steps: &steps }.run().unwrap()
}

/// Largest relative difference of losses, norms and, in f64, weights; where, for the message. In f32 AdamW takes rounding errors
/// of gradients that are exactly zero (keys' biases) for gradients.
fn difference(found: &Outcome, expected: &Outcome, precision: Precision) -> (f64, String) {
    let mut worst = (0.0, String::new());
    let mut compare = |name: &str, found: &Tensor, expected: &Tensor| {
        let (found, expected) = (decode(found), decode(expected));
        assert_eq!(found.len(), expected.len(), "{name}");
        let scale = expected.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
        for (x, y) in found.iter().zip(&expected) {
            let difference = if x.is_finite() { (x - y).abs() / scale } else { f64::INFINITY };
            if difference > worst.0 {
                worst = (difference, name.to_owned());
            }
        }
    };
    for (found, expected) in found.outputs.iter().zip(&expected.outputs) {
        expected.iter().for_each(|(name, value)| compare(name, &found[name], value));
    }
    for ((name, kind), value) in expected.parameters.iter().filter(|_| precision == Precision::F64) {
        compare(&format!("{name} {kind:?}"), &found.parameters[&(name.clone(), kind.clone())], value);
    }
    worst
}

pub fn mesh(dp: u32, tp: u32, pp: u32) -> Parallel {
    Parallel { dp, tp, pp, ..Parallel::default() }
}

/// Every mesh against one device with one microbatch.
#[track_caller]
fn check(model: &str, precision: Precision, bound: f64, meshes: &[(Parallel, u32)]) {
    let alone = trained(&compiled(model, &mesh(1, 1, 1), 1, precision).artifact, 1);
    let first = &alone.outputs[0]["loss"];
    assert!(decode(first)[0].is_finite() && *first != alone.outputs[STEPS - 1]["loss"], "{model} learns");
    for (parallel, microbatches) in meshes {
        let artifact = compiled(model, parallel, *microbatches, precision).artifact;
        let found = trained(&artifact, 1);
        let (difference, name) = difference(&found, &alone, precision);
        let Parallel { dp, tp, pp, .. } = parallel;
        assert!(difference <= bound, "{model} dp {dp} tp {tp} pp {pp} mb {microbatches}: {difference:e} in {name}");
        assert!(found.tallies.iter().all(|tally| tally.interp == 0 && tally.jit > 0));
    }
}

const MESHES: [(u32, u32, u32, u32); 9] = [
    (1, 1, 1, 2),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 2),
    (2, 2, 1, 2),
    (2, 1, 2, 4),
    (1, 2, 2, 8),
    (2, 2, 2, 2),
    (1, 4, 1, 1),
];

fn meshes() -> Vec<(Parallel, u32)> {
    MESHES.iter().map(|&(dp, tp, pp, microbatches)| (mesh(dp, tp, pp), microbatches)).collect()
}

#[test]
fn mlp_trains_alike_on_every_mesh() {
    check("mlp.onnx", Precision::F64, 1e-9, &meshes());
    check("mlp.onnx", Precision::AsExported, 1e-5, &meshes());
}

#[test]
fn gpt_trains_alike_on_every_mesh() {
    check("gpt2_tiny.onnx", Precision::F64, 1e-9, &meshes());
    let gpipe = Parallel { schedule: Schedule::GPipe, ..mesh(1, 1, 4) };
    check("gpt2_tiny.onnx", Precision::AsExported, 1e-5, &[(mesh(2, 2, 2), 2), (gpipe, 4)]);
}

#[test]
fn dropout_is_the_same_on_every_mesh() {
    check("gpt2_tiny_dropout.onnx", Precision::F64, 1e-9, &[(mesh(2, 1, 1), 2), (mesh(1, 2, 2), 4)]);
}

#[test]
fn the_same_mesh_twice_and_two_threads_give_the_same_bits() {
    let artifact = compiled("gpt2_tiny.onnx", &mesh(1, 2, 2), 2, Precision::AsExported).artifact;
    let first = trained(&artifact, 1);
    assert_eq!(trained(&artifact, 1), first);
    assert_eq!(trained(&artifact, 2), first);
}

#[test]
fn tensor_parallel_ranks_do_half_of_the_work() {
    let work = |tp| {
        let artifact = compiled("gpt2_tiny.onnx", &mesh(1, tp, 1), 1, Precision::AsExported).artifact;
        trained(&artifact, 1).tallies.iter().map(|tally| tally.flops).max().unwrap() as f64
    };
    let ratio = work(2) / work(1);
    assert!(ratio <= 0.55, "{ratio}");
}
