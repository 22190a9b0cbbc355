//! Programs of whole models on real ranks, as threads of this process: what is trained, with what, and how two runs compare.

mod context;
mod experts;
mod fuzz;
mod mixed;
mod optimizers;
mod pipelines;
mod recompute;
mod sequence;
mod strategies;
mod transformers;
mod whole_sweep;
mod zero;

use crate::tolerance;
use dcc::compile::{BatchNorm, Compiled, Options, compile};
use dcc::import::{self, Dropout, Model};
use dcc::loss::{Labels, LossOptions};
use dcc::optimizer::{AdamDecay, Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, batch};
use dcc::precision::Mixed;
use dcc::train::{Names, Selection, TrainingOptions};
use dcc_program::artifact::{Artifact, Data};
use dcc_program::manifest::Manifest;
use dcc_program::program::{ParamKind, Program};
use dcc_program::{DType, Glob, Shape, TensorType};
use dcc_runtime::data::Convert;
use dcc_runtime::exec::whole::{Outcome, Parameters, Run, Tensor};
use dcc_runtime::exec::{Fresh, Scalars};
use std::collections::BTreeMap;

/// What is trained, apart from the mesh.
#[derive(Clone)]
struct Case {
    model: &'static str,
    dtype: Option<DType>,
    mixed: Option<Mixed>,
    steps: usize,
    batch: u64,
    /// Positions of the labels beside the tokens, many of them ignored; none: the model's own loss.
    labels: Option<u64>,
    clip: Option<f64>,
    optimizer: Optimizer,
    /// Parameters that do not train.
    freeze: &'static [&'static str],
    /// Parts of the batch that BatchNorm takes statistics of.
    bn_groups: u64,
    dropout: Dropout,
    /// Of dropout.
    seed: i64,
}

const CASE: Case = Case {
    model: "",
    dtype: Some(DType::F64),
    mixed: None,
    steps: 3,
    batch: 8,
    labels: None,
    clip: None,
    optimizer: Optimizer::Adam { betas: (0.9, 0.999), eps: 1e-8, decay: AdamDecay::Decoupled },
    freeze: &[],
    bn_groups: 1,
    dropout: Dropout::AsExported,
    seed: 7,
};

/// A mesh, and the microbatches of a step.
type Split = (Parallel, u32);

/// Relative difference that f32 losses and norms may have from one device's.
const F32: f64 = 1e-5;

pub fn mesh(dp: u32, tp: u32, pp: u32) -> Parallel {
    Parallel { dp, tp, pp, ..Parallel::default() }
}

pub fn compiled(model: &'static str, parallel: &Parallel, microbatches: u32, dtype: Option<DType>) -> Compiled {
    Case { model, dtype, ..CASE }.compiled(parallel, microbatches)
}

impl Case {
    fn compiled(&self, parallel: &Parallel, microbatches: u32) -> Compiled {
        self.compile(parallel, microbatches, None).unwrap_or_else(|e| panic!("{} {parallel:?}: {e}", self.model))
    }

    /// The same in so many bytes of each rank.
    fn limited(&self, parallel: &Parallel, microbatches: u32, bytes: u64) -> dcc::Result<Compiled> {
        self.compile(parallel, microbatches, Some(bytes))
    }

    fn compile(&self, parallel: &Parallel, microbatches: u32, memory_limit: Option<u64>) -> dcc::Result<Compiled> {
        let path = format!("{}/models/{}", env!("CARGO_MANIFEST_DIR"), self.model);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        compile(&Model::decode(bytes.into()).unwrap(), &self.options(parallel, microbatches, memory_limit))
    }

    fn options(&self, parallel: &Parallel, microbatches: u32, memory_limit: Option<u64>) -> Options {
        let labels = self.labels.map(|positions| Labels::Given(Shape::from_slice(&[self.batch, positions])));
        Options {
            name: self.model.to_owned(),
            batch: batch::Given { global: Some(self.batch), accumulate: Some(microbatches), ..Default::default() },
            parallel: parallel.clone(),
            memory_limit,
            batch_norm: BatchNorm::Batch { groups: self.bn_groups },
            dtype: self.dtype,
            import: import::Options { dropout: self.dropout, ..Default::default() },
            training: TrainingOptions {
                loss: LossOptions { labels: labels.unwrap_or_default(), ..LossOptions::default() },
                optimizer: OptimizerOptions {
                    optimizer: self.optimizer,
                    grad_clip: self.clip,
                    weight_decay: 0.1,
                    ..OptimizerOptions::default()
                },
                selection: Selection {
                    freeze: self.freeze.iter().map(|glob| Names::Glob(Glob::new(glob))).collect(),
                    ..Selection::default()
                },
                mixed: self.mixed,
                ..TrainingOptions::default()
            },
            ..Options::default()
        }
    }

    fn trained(&self, artifact: &Artifact, threads: usize, rate: f64) -> Outcome {
        self.trained_on(artifact, &inputs(artifact, self.steps), threads, rate)
    }

    fn trained_on(&self, artifact: &Artifact, inputs: &[BTreeMap<String, Tensor>], threads: usize, rate: f64) -> Outcome {
        let scalars = |step| Scalars { learning_rate: rate, step, seed: self.seed };
        let steps: Vec<Scalars> = (1..=self.steps as i64).map(scalars).collect();
        let parameters = parameters(artifact);
        let programs = &artifact.train[..];
        let run = Run { programs, threads, fresh: Fresh::Poisoned, parameters: &parameters, inputs, steps: &steps };
        run.run().unwrap()
    }

    fn bound(&self) -> f64 {
        if self.dtype == Some(DType::F64) { tolerance::F64 } else { F32 }
    }

    /// Every mesh against one device with one microbatch, and that against itself at another learning rate.
    #[track_caller]
    fn check(&self, splits: &[Split]) {
        let one = self.compiled(&mesh(1, 1, 1), 1).artifact;
        let alone = self.trained(&one, 1, 1e-3);
        let first = &alone.outputs[0]["loss"];
        assert!(decode(first)[0].is_finite() && *first != alone.outputs[self.steps - 1]["loss"], "{} learns", self.model);
        let mut worst = 0.0f64;
        for (parallel, microbatches) in splits {
            let artifact = self.compiled(parallel, *microbatches).artifact;
            let found = self.trained(&artifact, 1, 1e-3);
            let (difference, name) = self.difference(&found, &alone);
            let Parallel { dp, tp, pp, schedule, .. } = parallel;
            let at = format!("{} dp {dp} tp {tp} pp {pp} mb {microbatches} {}", self.model, schedule.name());
            assert!(difference <= self.bound(), "{at}: {difference:e} in {name}");
            assert!(found.tallies.iter().all(|tally| tally.interp == 0 && tally.jit > 0), "{at}");
            worst = worst.max(difference);
        }
        let (off, _) = self.difference(&self.trained(&one, 1, 1.01e-3), &alone);
        assert!(off > self.bound(), "{}: a learning rate 1 % off makes a difference of only {off:e}", self.model);
        let (count, steps) = (splits.len(), self.steps);
        println!("{} {:?}: {count} meshes × {steps} steps, largest difference {worst:.1e}", self.model, self.dtype);
    }

    /// Largest relative difference of losses and norms and, in f64, weights and states; where, for the message. In f32 AdamW takes
    /// rounding errors of gradients that are exactly zero (keys' biases) for gradients.
    fn difference(&self, found: &Outcome, expected: &Outcome) -> (f64, String) {
        let mut worst = (0.0, String::new());
        let mut compare = |name: &str, floor: f64, found: &Tensor, expected: &Tensor| {
            let (found, expected) = (decode(found), decode(expected));
            assert_eq!(found.len(), expected.len(), "{name}");
            let scale = expected.iter().fold(floor, |most, x| most.max(x.abs()));
            for (x, y) in found.iter().zip(&expected) {
                let difference = if x.is_finite() { (x - y).abs() / scale } else { f64::INFINITY };
                if difference > worst.0 {
                    worst = (difference, name.to_owned());
                }
            }
        };
        for (found, expected) in found.outputs.iter().zip(&expected.outputs) {
            expected.iter().for_each(|(name, value)| compare(name, 1e-3, &found[name], value));
        }
        for ((name, kind), value) in expected.parameters.iter().filter(|_| self.dtype == Some(DType::F64)) {
            // Moments of gradients that are exactly zero are rounding errors.
            let floor = if *kind == ParamKind::Weight { 1e-3 } else { 1e-6 };
            compare(&format!("{name} {kind:?}"), floor, &found.parameters[&(name.clone(), kind.clone())], value);
        }
        worst
    }
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
    let mut bytes = Vec::new();
    values.for_each(|x| match dtype {
        // The same values in both precisions.
        DType::F32 => bytes.extend((x as f32).to_ne_bytes()),
        DType::F64 => bytes.extend(f64::from(x as f32).to_ne_bytes()),
        DType::BF16 => {
            let mut half = [0; 2];
            Convert::new(DType::F32, dtype).run(&(x as f32).to_ne_bytes(), &mut half);
            bytes.extend(half);
        }
        DType::Bool => bytes.push(u8::from(x != 0.0)),
        _ => bytes.extend(&(x as i64).to_ne_bytes()[..dtype.bytes() as usize]),
    });
    bytes
}

fn decode(tensor: &Tensor) -> Vec<f64> {
    let value = |bytes: &[u8]| match tensor.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        DType::BF16 => {
            let mut wide = [0; 8];
            Convert::new(tensor.dtype, DType::F64).run(bytes, &mut wide);
            f64::from_ne_bytes(wide)
        }
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

/// Of 16 positions, how many a sample's labels ignore: spread so that microbatches count differently, the first none at all.
const IGNORED: [usize; 8] = [16, 0, 5, 11, 1, 15, 8, 3];

/// Data of all steps; tokens and labels within their tables.
fn inputs(artifact: &Artifact, steps: usize) -> Vec<BTreeMap<String, Tensor>> {
    let manifest = Manifest::from_options(&artifact.options).unwrap();
    let all = || artifact.train.iter().flat_map(|p| p.inputs.iter().map(|input| (&input.name, p.ty(input.buffer))));
    let words = manifest.inputs.values().filter_map(|about| about.vocabulary).max().unwrap_or(3);
    let value = |step: usize, name: &String, ty: &TensorType| {
        let about = manifest.inputs.get(name).cloned().unwrap_or_default();
        // Labels are words; what else is no index is a mask or the like.
        let classes = about.vocabulary.unwrap_or(if about.ignore_index.is_some() { words } else { 3 }) as f64;
        let row = ty.elements() as usize / ty.shape.first().map_or(1, |&n| n as usize);
        let integer = |(i, x): (usize, f64)| match about.ignore_index {
            Some(ignored) if (i % row + 1) * 16 / row <= IGNORED[i / row % 8] => ignored as f64,
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
    (0..steps).map(|step| all().map(|(name, ty)| (name.clone(), value(step, name, ty))).collect()).collect()
}

/// Whether the slow variants run too: `tests/long.sh` sets it.
fn is_long() -> bool {
    std::env::var_os("DCC_LONG").is_some()
}
