//! Random graphs × random meshes × random schedules: compiled, checked, run on ranks, and compared with one device; one device with
//! `interp`. What failed once stays in `golden/fuzz/seeds.txt`.

mod graphs;

use super::{CASE, Case, decode, encode, is_long, mesh};
use crate::onnx_model::Dice;
use crate::tolerance;
use bytes::Bytes;
use dcc::compile::{Compiled, compile};
use dcc::graph::NodeId;
use dcc::import::Model;
use dcc::interp::{self, Bindings};
use dcc::loss::{Labels, LossKind, LossOptions};
use dcc::optimizer::{AdamDecay, Optimizer};
use dcc::plan::{Parallel, Schedule, Zero};
use dcc::recompute::{Recompute, Repeats};
use dcc_program::Shape;
use dcc_runtime::exec::whole::{Outcome, Parameters, Tensor};
use prost::Message;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Graphs of a run, and meshes that each is trained on.
const GRAPHS: u64 = 84;
const LONG_GRAPHS: u64 = 1670;
const MESHES: u64 = 6;
/// Seeds from here on have layers that those before do not know: half of a run.
const WIDE: u64 = 1 << 20;
/// Of the meshes, how many may be refused: a tensor-parallel degree that no op can take, more stages than there are places to cut.
const MOST_REFUSED: f64 = 0.25;

/// One graph, its data and its optimizer, and one device's training.
struct Subject {
    case: Case,
    model: Model,
    loss: LossOptions,
    classes: Option<i64>,
    alone: Outcome,
}

/// What came of a mesh.
enum Verdict {
    Equal(f64),
    Refused,
}

impl Subject {
    fn new(seed: u64) -> Subject {
        let mut dice = Dice::new(seed);
        let batch = dice.of(&[8, 12, 16]);
        let graphs::Subject { model, output, classes } = graphs::random(&mut dice, batch as i64, seed >= WIDE);
        let (positions, width) = output.split_at(output.len() - 1);
        let loss = match classes {
            true => LossOptions {
                kind: LossKind::CrossEntropy,
                labels: Labels::Given(positions.iter().map(|&n| n as u64).collect::<Shape>()),
                class_dim: Some(positions.len()),
                ..LossOptions::default()
            },
            false => LossOptions { kind: LossKind::Mse, ..LossOptions::default() },
        };
        // With epsilons above what rounding leaves of gradients that are zero.
        let optimizer = match dice.below(5) {
            0 => Optimizer::Sgd { momentum: 0.9, nesterov: false },
            1 => Optimizer::Adam { betas: (0.9, 0.99), eps: 1e-3, decay: AdamDecay::L2 },
            2 => Optimizer::Lamb { betas: (0.9, 0.99), eps: 1e-3 },
            3 => Optimizer::RmsProp { alpha: 0.9, eps: 1e-3, momentum: 0.5, centered: false },
            _ => Optimizer::Adam { betas: (0.9, 0.99), eps: 1e-3, decay: AdamDecay::Decoupled },
        };
        let case = Case { steps: 2, batch, optimizer, clip: dice.once_in(2).then_some(0.1), ..CASE };
        let model = Model::decode(Bytes::from(model.encode_to_vec())).expect("a model");
        let classes = classes.then_some(width[0]);
        let alone = Outcome { outputs: Vec::new(), parameters: Parameters::new(), tallies: Vec::new() };
        let mut subject = Subject { case, model, loss, classes, alone };
        let one = subject.compiled(&mesh(1, 1, 1), 1).unwrap_or_else(|e| panic!("on one device: {e}"));
        subject.alone = subject.trained(&one, RATE);
        for (name, exact) in subject.interpreted(&one) {
            let found = decode(&subject.alone.outputs[0][&name])[0];
            let near = (found - exact).abs() <= tolerance::F64 * exact.abs().max(1e-3);
            assert!(near, "one device has {name} {found}, interp {exact}");
        }
        subject
    }

    /// Loss and gradient norm of the first step, by what the graph means.
    fn interpreted(&self, compiled: &Compiled) -> Vec<(String, f64)> {
        let reference = |tensor: &Tensor| match tensor.dtype.is_float() {
            true => interp::Tensor::floats(tensor.dtype, &tensor.shape, decode(tensor)),
            false => interp::Tensor::ints(tensor.dtype, &tensor.shape, decode(tensor).iter().map(|&x| x as i64).collect()),
        };
        let mut bindings = Bindings { learning_rate: RATE, step: 1, seed: self.case.seed, ..Bindings::default() };
        for (name, value) in &self.inputs(compiled)[0] {
            bindings = bindings.input(name, reference(value));
        }
        for ((name, _), value) in &super::parameters(&compiled.artifact) {
            bindings = bindings.weight(name, reference(value));
        }
        let graph = &compiled.training.graph;
        let wanted: Vec<(String, NodeId)> =
            graph.outputs.iter().filter(|(name, _)| ["loss", "grad_norm"].contains(&name.as_str())).cloned().collect();
        let ids: Vec<NodeId> = wanted.iter().map(|(_, id)| *id).collect();
        let values = interp::evaluate(graph, &ids, &bindings, interp::Precision::Exact).expect("values");
        wanted.into_iter().zip(values).map(|((name, _), value)| (name, value.f64s()[0])).collect()
    }

    fn compiled(&self, parallel: &Parallel, microbatches: u32) -> dcc::Result<Compiled> {
        let mut options = self.case.options(parallel, microbatches, None);
        options.training.loss = self.loss.clone();
        compile(&self.model, &options)
    }

    /// Data of all steps, labels below the number of classes.
    fn inputs(&self, compiled: &Compiled) -> Vec<BTreeMap<String, Tensor>> {
        let mut inputs = super::inputs(&compiled.artifact, self.case.steps);
        if let Some(classes) = self.classes {
            for labels in inputs.iter_mut().filter_map(|step| step.get_mut("labels")) {
                let within = |x: f64| if x < 0.0 { x } else { x % classes as f64 };
                labels.bytes = encode(labels.dtype, decode(labels).into_iter().map(within));
            }
        }
        inputs
    }

    fn trained(&self, compiled: &Compiled, rate: f64) -> Outcome {
        self.case.trained_on(&compiled.artifact, &self.inputs(compiled), 1, rate)
    }

    /// Differs from one device by so much, relatively.
    fn verdict(&self, parallel: &Parallel, microbatches: u32) -> Verdict {
        match self.compiled(parallel, microbatches) {
            Ok(compiled) => Verdict::Equal(self.case.difference(&self.trained(&compiled, RATE), &self.alone).0),
            Err(error) if error.code.exit() == 4 => Verdict::Refused,
            Err(error) => panic!("{error}"),
        }
    }
}

const RATE: f64 = 1e-2;

/// A mesh of at most eight ranks and at least two, what its ranks share, and an order.
fn plan(dice: &mut Dice, batch: u64) -> (Parallel, u32) {
    loop {
        let (dp, tp, pp) = (dice.of(&[1, 1, 2, 2, 4]), dice.of(&[1, 1, 2, 2, 3, 4]), dice.of(&[1, 1, 2, 2, 3]));
        let microbatches: u32 = dice.of(&[1, 2, 2, 4]);
        if !(2..=8).contains(&(dp * tp * pp)) || !batch.is_multiple_of(u64::from(dp * microbatches)) {
            continue;
        }
        let schedules = [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbH2, Schedule::ZbV, Schedule::Auto];
        let schedule = if pp > 1 { dice.of(&schedules) } else { Schedule::default() };
        let interleaved = schedule == Schedule::OneFOneB && pp > 1 && microbatches.is_multiple_of(pp) && dice.once_in(2);
        let recompute = dice.of(&[Repeats::NONE, Repeats::NONE, Repeats::SELECTIVE, Repeats::FULL]);
        let parallel = Parallel {
            schedule,
            virtual_stages: if schedule == Schedule::ZbV || interleaved { 2 } else { 1 },
            zero: if dp > 1 { dice.of(&Zero::ALL) } else { Zero::Nothing },
            shard_group: (dp == 4 && dice.once_in(3)).then_some(2),
            recompute: Recompute::Fixed(recompute),
            ..mesh(dp, tp, pp)
        };
        return (parallel, microbatches);
    }
}

/// The plan of a seed's graph by its number; from 4 on sequences are shared too, from 5 on experts.
fn numbered(seed: u64, number: u64, batch: u64) -> (Parallel, u32) {
    let mut dice = Dice::new(seed << 8 | number);
    let (mut parallel, microbatches) = plan(&mut dice, batch);
    if number >= 4 {
        parallel.sequence_parallel = parallel.tp > 1;
        let ranks = parallel.dp * parallel.tp * parallel.pp;
        parallel.cp = if ranks <= 4 && (parallel.tp == 1 || dice.once_in(2)) { 2 } else { 1 };
    }
    let parts = 2 * parallel.dp * microbatches;
    if seed >= WIDE
        && number >= 5
        && parallel.cp * parallel.dp * parallel.tp * parallel.pp <= 4
        && batch.is_multiple_of(u64::from(parts))
    {
        parallel.ep = 2;
    }
    (parallel, microbatches)
}

fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned())).unwrap_or_else(|| "a panic".to_owned())
    })
}

/// Trains the graph of each seed on the plans of these numbers; panics with all that went wrong.
fn check(cases: &BTreeMap<u64, Vec<u64>>) {
    let (mut ran, mut refused, mut plain, mut worst, mut unseen, mut wrong) = (0, 0, 0, 0.0f64, 0, Vec::new());
    for (&seed, numbers) in cases {
        let subject = match caught(|| Subject::new(seed)) {
            Ok(subject) => subject,
            Err(panic) => {
                wrong.push(format!("{seed}: {panic}"));
                continue;
            }
        };
        for &number in numbers {
            let (parallel, microbatches) = numbered(seed, number, subject.case.batch);
            let Parallel { dp, cp, ep, tp, pp, schedule, virtual_stages, zero, shard_group, recompute, .. } = &parallel;
            let at = format!(
                "{seed} {number}: dp {dp} cp {cp} ep {ep} tp {tp} pp {pp} mb {microbatches} {} × {virtual_stages} {zero:?} {shard_group:?} {recompute:?}",
                schedule.name()
            );
            match caught(|| subject.verdict(&parallel, microbatches)) {
                Ok(Verdict::Equal(off)) if off <= tolerance::F64 => {
                    ran += 1;
                    worst = worst.max(off);
                }
                Ok(Verdict::Equal(off)) => wrong.push(format!("{at}: {off:e} from one device")),
                Ok(Verdict::Refused) => {
                    refused += 1;
                    plain += usize::from(number < 4);
                }
                Err(panic) => wrong.push(format!("{at}: {panic}")),
            }
        }
        // A control: the rate shows.
        let one = subject.compiled(&mesh(1, 1, 1), 1).expect("it compiled before");
        let off = subject.case.difference(&subject.trained(&one, 1.01 * RATE), &subject.alone).0;
        unseen += u32::from(off <= tolerance::F64);
    }
    let count = ran + refused + wrong.len();
    println!("{count} cases of {} graphs: {ran} equal, largest difference {worst:.1e}, {refused} refused", cases.len());
    assert!(wrong.is_empty(), "{} of {count} cases are wrong (seed, plan):\n{}", wrong.len(), wrong.join("\n"));
    assert!(unseen * 20 <= cases.len() as u32, "in {unseen} of {} graphs a rate 1 % off makes no difference", cases.len());
    // Sequences and experts cannot be shared where there are none.
    assert!(plain as f64 <= MOST_REFUSED * count as f64, "{plain} of {count} plans were refused");
}

#[test]
fn random_graphs_train_alike_on_random_meshes() {
    let graphs = if is_long() { LONG_GRAPHS } else { GRAPHS };
    let seeds = (1..=graphs / 2).chain(WIDE..WIDE + graphs / 2);
    check(&seeds.map(|seed| (seed, (0..MESHES).collect())).collect());
}

#[test]
fn what_failed_once_passes() {
    let mut cases: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for line in include_str!("../../golden/fuzz/seeds.txt").lines() {
        let line = line.split('#').next().unwrap_or_default();
        let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        if let [seed, number] = numbers[..] {
            cases.entry(seed).or_default().push(number);
        }
    }
    check(&cases);
}
