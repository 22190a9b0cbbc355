//! A checkpoint that one plan saved continues on any other: the losses, norms, weights and states of the run that nobody interrupted.
//!
//! A pass over the data has two steps. Runs continue after the second, where a pass ends, and after the third, in the middle of one,
//! into a later pass; samples are shuffled and dropout is on, so that data position, seed and step count.

use crate::cli::{integers, npy, put};
use crate::command::Folder;
use crate::ranks::mesh;
use crate::tolerance;
use dcc::compile::{Options, compile};
use dcc::import::Model;
use dcc::loss::{Labels, LossOptions};
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, Schedule, Zero, batch};
use dcc::train::{Names, Selection, TrainingOptions};
use dcc_program::artifact::Artifact;
use dcc_program::{DType, Glob, Shape};
use dcc_runtime::checkpoint::{self, Checkpoint, Key, RunState, Shard};
use dcc_runtime::comm::{Comm, Group, Layout, Patience, local};
use dcc_runtime::launch::Message;
use dcc_runtime::metrics::StepRecord;
use dcc_runtime::run::{self, Flags, Job, Source};
use dcc_runtime::slice::Slice;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const BATCH: u64 = 16;
/// Two batches and a half.
const SAMPLES: u64 = 40;
const STEPS: u64 = 5;
/// After these steps runs continue: the end of a pass, and the middle of the next.
const SAVED: [u64; 2] = [2, 3];

type Plan = (Parallel, u32);

/// Every axis alone and with others, every stage of ZeRO, whole groups and smaller ones, one microbatch and several; 1, 2, 4 and 8
/// ranks.
fn plans() -> Vec<Plan> {
    let zero = |zero, parallel: Parallel| Parallel { zero, ..parallel };
    let group = |size, parallel: Parallel| Parallel { shard_group: Some(size), ..parallel };
    vec![
        (mesh(1, 1, 1), 1),
        (mesh(2, 1, 1), 2),
        (mesh(1, 4, 1), 1),
        (Parallel { schedule: Schedule::ZbH1, ..mesh(1, 1, 2) }, 4),
        (zero(Zero::State, mesh(4, 1, 1)), 2),
        (zero(Zero::Gradients, mesh(2, 1, 1)), 4),
        (zero(Zero::Parameters, mesh(4, 1, 1)), 1),
        (group(2, zero(Zero::Parameters, mesh(4, 1, 1))), 2),
        (zero(Zero::Parameters, mesh(2, 2, 1)), 2),
        (Parallel { schedule: Schedule::GPipe, ..mesh(1, 2, 2) }, 2),
        (zero(Zero::State, mesh(2, 1, 2)), 4),
        (zero(Zero::Gradients, mesh(2, 2, 2)), 2),
    ]
}

/// A model on several plans, and the checkpoints of its run on each.
struct Subject {
    folder: Folder,
    artifacts: Vec<Artifact>,
    /// Of each plan, the run that nobody interrupted.
    whole: Vec<Ran>,
}

/// What a run left behind.
struct Ran {
    records: Vec<StepRecord>,
    state: RunState,
    tensors: BTreeMap<Key, (DType, Vec<u8>)>,
}

impl Subject {
    fn new(model: &str, optimizer: Optimizer, labels: &[u64], frozen: &[&str], plans: &[Plan]) -> Subject {
        let path = format!("{}/models/{model}", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let model = Model::decode(bytes.into()).expect("a model");
        let compiled = |(parallel, microbatches): &Plan| {
            let labels = Labels::Given(Shape::from_slice(&[&[BATCH], labels].concat()));
            let freeze = frozen.iter().map(|glob| Names::Glob(Glob::new(glob))).collect();
            let options = Options {
                batch: batch::Given { global: Some(BATCH), accumulate: Some(*microbatches), ..Default::default() },
                parallel: parallel.clone(),
                dtype: Some(DType::F64),
                training: TrainingOptions {
                    mixed: None,
                    loss: LossOptions { labels, ..LossOptions::default() },
                    optimizer: OptimizerOptions {
                        optimizer,
                        weight_decay: 0.1,
                        grad_clip: Some(0.5),
                        ..OptimizerOptions::default()
                    },
                    selection: Selection { freeze, ..Selection::default() },
                    ..TrainingOptions::default()
                },
                ..Options::default()
            };
            compile(&model, &options).unwrap_or_else(|e| panic!("{path} {parallel:?}: {e}")).artifact
        };
        let artifacts = plans.iter().map(compiled).collect();
        let mut subject = Subject { folder: Folder::new(), artifacts, whole: Vec::new() };
        subject.write_data();
        for plan in 0..plans.len() {
            let ran = subject.run(plan, &format!("plan{plan}"), None);
            subject.whole.push(ran);
            for step in (1..STEPS).filter(|step| !SAVED.contains(step)) {
                std::fs::remove_dir_all(subject.saved(plan, step)).unwrap();
            }
        }
        subject
    }

    /// Integers below 10, or floats, of every input's shape.
    fn write_data(&self) {
        let artifact = &self.artifacts[0];
        let inputs: BTreeMap<_, _> =
            artifact.train.iter().flat_map(|p| p.inputs.iter().map(|input| (&input.name, p.ty(input.buffer)))).collect();
        for (name, ty) in inputs {
            let row: u64 = ty.shape[1..].iter().product();
            let mixed = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ name.len() as u64) >> 40;
            let shape = [&[SAMPLES], &ty.shape[1..]].concat();
            let shape: String = shape.iter().map(|dim| format!("{dim}, ")).collect();
            let bytes = match ty.dtype.is_float() {
                true => npy("<f8", &shape, &self.floats(row, mixed)),
                false => npy("<i8", &shape, &integers((0..SAMPLES * row).map(|i| (mixed(i) % 10) as i64))),
            };
            put(&self.folder, &format!("data/{name}.npy"), bytes);
        }
    }

    fn floats(&self, row: u64, mixed: impl Fn(u64) -> u64) -> Vec<u8> {
        (0..SAMPLES * row).flat_map(|i| (mixed(i) as f64 / (1u64 << 23) as f64 - 1.0).to_le_bytes()).collect()
    }

    /// Trains on a plan to the last step, saving after each.
    fn run(&self, plan: usize, save_dir: &str, resume: Option<&Path>) -> Ran {
        let text = |text: &str| text.to_owned();
        let dir = self.folder.path().join(save_dir);
        let flags = Flags {
            data: vec![self.folder.path().join("data")],
            layout: text("samples"),
            order: text("shuffled"),
            resume: resume.map_or(text("none"), |path| path.to_str().expect("UTF-8").to_owned()),
            lr_schedule: text("cosine"),
            warmup: 2,
            steps: Some(STEPS),
            lr: 1e-2,
            seed: resume.is_none().then_some(11),
            init: Some(3),
            init_all: true,
            save_dir: Some(dir.clone()),
            // A run that continues saves its end.
            save_every: resume.is_none().then_some(1),
            timeout: 60.0,
            threads: Some(1),
            ..Flags::default()
        };
        let job = Job::new(&Source::Built { artifact: &self.artifacts[plan], folder: self.folder.path() }, &flags).unwrap();
        let messages = run::local(&job).unwrap_or_else(|e| panic!("plan {plan} from {resume:?}: {e}"));
        let step = |message: Message| match message {
            Message::Step(record) => Some(record),
            _ => None,
        };
        let records = messages.into_iter().flatten().filter_map(step).collect();
        let (state, tensors) = read(&dir.join(format!("step-{STEPS:08}")));
        std::fs::remove_dir_all(dir.join(format!("step-{STEPS:08}"))).unwrap();
        Ran { records, state, tensors }
    }

    fn saved(&self, plan: usize, step: u64) -> PathBuf {
        self.folder.path().join(format!("plan{plan}/step-{step:08}"))
    }

    /// What came of a checkpoint of `source` on `target`.
    fn resumed(&self, source: usize, target: usize, step: u64) -> Ran {
        self.run(target, "resumed", Some(&self.saved(source, step)))
    }

    /// Largest relative difference of losses and norms from one device's that nobody interrupted.
    fn losses_off(&self, found: &[StepRecord]) -> f64 {
        let expected = &self.whole[0].records[STEPS as usize - found.len()..];
        assert!(!found.is_empty() && found.iter().map(|r| r.step).eq(expected.iter().map(|r| r.step)), "{found:?}");
        let pairs = found.iter().zip(expected).flat_map(|(a, b)| [(a.loss, b.loss), (norm(a), norm(b))]);
        pairs.map(|(a, b)| if a.is_finite() { (a - b).abs() / b.abs() } else { f64::INFINITY }).fold(0.0, f64::max)
    }
}

fn norm(record: &StepRecord) -> f64 {
    record.grad_norm.expect("it is clipped")
}

/// All of a checkpoint, whole tensors, every byte verified.
fn read(path: &Path) -> (RunState, BTreeMap<Key, (DType, Vec<u8>)>) {
    let mut checkpoint = Checkpoint::open(path).unwrap();
    checkpoint.verify().unwrap();
    let keys: Vec<(Key, DType, Vec<u64>)> = checkpoint.tensors().map(|(k, d, s)| (k.clone(), d, s.to_vec())).collect();
    let mut tensors = BTreeMap::new();
    for (key, dtype, shape) in keys {
        let slice = Slice::whole(&shape);
        let mut bytes = vec![0; (slice.elements() * dtype.bytes()) as usize];
        let write = &mut |at: u64, run: &[u8]| {
            bytes[at as usize..at as usize + run.len()].copy_from_slice(run);
            Ok(())
        };
        checkpoint.read(&key, dtype, &slice, write).unwrap();
        tensors.insert(key, (dtype, bytes));
    }
    (checkpoint.run().clone(), tensors)
}

/// Largest difference of two runs' weights and states, relative to each tensor's largest element; moments of gradients that are
/// exactly zero are rounding errors.
fn tensors_off(found: &Ran, expected: &Ran) -> (f64, String) {
    assert!(found.tensors.keys().eq(expected.tensors.keys()));
    let mut worst = (0.0, String::new());
    for (key, (dtype, bytes)) in &expected.tensors {
        let values = |bytes: &[u8]| -> Vec<f64> {
            match dtype {
                DType::F64 => bytes.chunks_exact(8).map(|b| f64::from_ne_bytes(b.try_into().unwrap())).collect(),
                _ => bytes.iter().map(|&b| f64::from(b)).collect(),
            }
        };
        let (found, expected) = (values(&found.tensors[key].1), values(bytes));
        let floor: f64 = if key.state.is_none() { 1e-3 } else { 1e-6 };
        let scale = expected.iter().fold(floor, |most, x| most.max(x.abs()));
        for (a, b) in found.iter().zip(&expected) {
            let off = if a.is_finite() { (a - b).abs() / scale } else { f64::INFINITY };
            if off > worst.0 {
                worst = (off, format!("{key:?}"));
            }
        }
    }
    worst
}

/// Continues on `target` what `source` saved, and compares with one device; largest difference.
#[track_caller]
fn check(subject: &Subject, (source, target, step): (usize, usize, u64)) -> f64 {
    let one = &subject.whole[0];
    let ran = subject.resumed(source, target, step);
    let losses = subject.losses_off(&ran.records);
    let (tensors, name) = tensors_off(&ran, one);
    let what = format!("plan {source} to {target} after step {step}");
    assert!(losses <= tolerance::F64, "{what}: losses {losses:e} off");
    assert!(tensors <= tolerance::F64, "{what}: {name} {tensors:e} off");
    assert_eq!(ran.state.position, one.state.position, "{what}");
    losses.max(tensors)
}

/// A run that goes on where it stood ends with the bits of the one that nobody interrupted.
#[track_caller]
fn check_same(subject: &Subject, plan: usize, step: u64) {
    let ran = subject.resumed(plan, plan, step);
    let whole = &subject.whole[plan];
    assert!(ran.state == whole.state && ran.tensors == whole.tensors, "plan {plan} after step {step}: other bits");
    let bits = |records: &[StepRecord]| -> Vec<_> {
        records.iter().skip_while(|r| r.step <= step).map(|r| (r.step, r.loss.to_bits(), norm(r).to_bits())).collect()
    };
    assert_eq!(bits(&ran.records), bits(&whole.records), "plan {plan} after step {step}");
}

/// Rings of the pairs, each plan once a source and once a target; the whole matrix in the long tier.
fn check_all(name: &str, subject: &Subject, stride: usize) {
    let count = subject.artifacts.len();
    let mut worst = subject.whole.iter().map(|ran| subject.losses_off(&ran.records)).fold(0.0, f64::max);
    assert!(worst <= tolerance::F64, "{name}: uninterrupted runs differ by {worst:e}");
    let pairs: Vec<(usize, usize, u64)> = match is_long() {
        true => {
            let pairs = (0..count).flat_map(|source| (0..count).map(move |target| (source, target)));
            pairs.filter(|(a, b)| a != b).flat_map(|(a, b)| SAVED.map(|step| (a, b, step))).collect()
        }
        false => (0..count).map(|plan| (plan, (plan + stride) % count, SAVED[plan % 2])).collect(),
    };
    for &pair in &pairs {
        worst = worst.max(check(subject, pair));
    }
    let same = if is_long() { (0..count).collect() } else { vec![count - 1] };
    same.iter().for_each(|&plan| SAVED.iter().for_each(|&step| check_same(subject, plan, step)));
    println!(
        "{name}: {} resumes over {count} plans, largest difference {worst:.1e}; {} plans continue to the same bits",
        pairs.len(),
        same.len()
    );
}

fn is_long() -> bool {
    std::env::var_os("DCC_LONG").is_some()
}

/// Saves a checkpoint again, by one rank, after a change.
pub fn changed(path: &Path, dir: &Path, change: impl Fn(&mut RunState, &mut BTreeMap<Key, (DType, Vec<u8>)>)) -> PathBuf {
    let checkpoint = Checkpoint::open(path).unwrap();
    let shapes: BTreeMap<Key, Vec<u64>> = checkpoint.tensors().map(|(key, _, shape)| (key.clone(), shape.to_vec())).collect();
    let (mut state, mut tensors) = read(path);
    change(&mut state, &mut tensors);
    let reads: Vec<_> = tensors
        .values()
        .map(|(_, bytes)| {
            |at: u64, out: &mut [u8]| {
                out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                Ok(())
            }
        })
        .collect();
    let shards = tensors.iter().zip(&reads).map(|((key, (dtype, _)), read)| Shard {
        key: key.clone(),
        dtype: *dtype,
        slice: Slice::whole(&shapes[key]),
        read,
    });
    let shards: Vec<Shard<'_>> = shards.collect();
    let layout = Layout::new(vec![Group(vec![0])], vec![4096]);
    let mut alone = local::world(&layout, Patience::default()).unwrap().swap_remove(0);
    let options = checkpoint::Options { dir: dir.to_owned(), keep_last: None };
    let saved = checkpoint::save(&mut alone, &options, &state, &shards).unwrap();
    alone.finish();
    saved
}

/// Of its largest element.
fn size(bytes: &[u8]) -> f64 {
    bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes).abs()).fold(0.0, f64::max)
}

/// Whatever a checkpoint holds counts: without it, the run that continues is another one.
fn check_controls(subject: &Subject, source: usize, target: usize, state: &str) {
    let (saved, again) = (subject.saved(source, 3), subject.folder.path().join("changed"));
    let off = |change: &dyn Fn(&mut RunState, &mut BTreeMap<Key, (DType, Vec<u8>)>)| {
        let path = changed(&saved, &again, change);
        subject.losses_off(&subject.run(target, "resumed", Some(&path)).records)
    };
    let as_it_was = off(&|_, _| ());
    assert!(as_it_was <= tolerance::F64, "saved again by one rank: {as_it_was:e}");
    let zeroed = off(&|_, tensors| {
        // Not one of a gradient that is exactly zero.
        let of_state = tensors.iter_mut().filter(|(key, _)| key.state.as_deref() == Some(state));
        let largest = of_state.max_by(|(_, a), (_, b)| size(&a.1).total_cmp(&size(&b.1)));
        largest.expect("the optimizer keeps it").1.1.fill(0);
    });
    let position = off(&|state, _| state.position.samples += 1);
    let step = off(&|state, _| state.position.samples += BATCH);
    for (what, off) in [("a state of zeros", zeroed), ("data one sample on", position), ("data one step on", step)] {
        assert!(off > tolerance::F64, "{what} makes a difference of only {off:e}");
        println!("{what}: {off:.1e} off");
    }
}

#[test]
fn any_plan_continues_what_any_plan_saved() {
    let adam = OptimizerOptions::default().optimizer;
    let subject = Subject::new("gpt2_tiny_dropout.onnx", adam, &[16], &["*wpe*"], &plans());
    check_all("GPT with dropout", &subject, 5);
    check_controls(&subject, 7, 10, "v");
    // Dropout draws by seed and step.
    let path = changed(&subject.saved(0, 3), &subject.folder.path().join("changed"), |state, _| state.seed += 1);
    let off = subject.losses_off(&subject.run(1, "resumed", Some(&path)).records);
    assert!(off > tolerance::F64, "another seed makes a difference of only {off:e}");
}

/// Experts that ranks shared, whole or in shards, continue where none does, and others there.
#[test]
fn experts_continue_on_any_plan() {
    let experts = |ep, zero, parallel: Parallel| Parallel { ep, zero, ..parallel };
    let plans = [
        (mesh(1, 1, 1), 1),
        (experts(2, Zero::Nothing, mesh(1, 1, 1)), 2),
        (mesh(1, 2, 1), 1),
        (experts(4, Zero::Parameters, mesh(1, 1, 1)), 1),
        (mesh(2, 1, 2), 4),
        (experts(2, Zero::State, mesh(2, 1, 1)), 2),
        (experts(2, Zero::Nothing, mesh(1, 1, 2)), 2),
    ];
    let adam = OptimizerOptions::default().optimizer;
    let subject = Subject::new("families/gshard.onnx", adam, &[16], &[], &plans);
    check_all("experts", &subject, 3);
    check_controls(&subject, 3, 4, "v");
}

/// Running statistics are state as moments are.
#[test]
fn running_statistics_continue_on_any_plan() {
    let zero = |zero, parallel: Parallel| Parallel { zero, ..parallel };
    let plans = [
        (mesh(1, 1, 1), 1),
        (mesh(2, 1, 1), 1),
        (mesh(1, 2, 1), 1),
        (mesh(1, 1, 2), 1),
        (zero(Zero::Parameters, mesh(4, 1, 1)), 1),
        (zero(Zero::State, mesh(2, 2, 1)), 1),
    ];
    let momentum = Optimizer::Sgd { momentum: 0.9, nesterov: true };
    let subject = Subject::new("norm_mlp.onnx", momentum, &[], &[], &plans);
    check_all("MLP with BatchNorm", &subject, 1);
    check_controls(&subject, 4, 3, "momentum");
    let path = changed(&subject.saved(2, 3), &subject.folder.path().join("changed"), |_, tensors| {
        let is_mean = |key: &Key| key.state.is_none() && key.name.contains("running_mean");
        let key = tensors.keys().find(|key| is_mean(key)).expect("BatchNorm has it").clone();
        tensors.get_mut(&key).expect("it is there").1.fill(0);
    });
    let (off, name) = tensors_off(&subject.run(1, "resumed", Some(&path)), &subject.whole[0]);
    assert!(off > tolerance::F64 && name.contains("running_mean"), "statistics of zeros: {off:e} in {name}");
}

/// States that are smaller than their weights, some of them of whole tensors whose weights lie in pieces.
#[test]
fn states_of_rows_and_columns_continue_on_any_plan() {
    let zero = |zero, parallel: Parallel| Parallel { zero, ..parallel };
    let plans = [(mesh(1, 1, 1), 1), (mesh(1, 2, 1), 1), (mesh(1, 2, 2), 2), (zero(Zero::Parameters, mesh(2, 2, 1)), 1)];
    let subject = Subject::new("gpt2_tiny.onnx", Optimizer::Adafactor { eps: 1e-3 }, &[16], &["*wpe*", "*c_attn.bias"], &plans);
    check_all("GPT by Adafactor", &subject, 1);
    check_controls(&subject, 1, 3, "row");
}
