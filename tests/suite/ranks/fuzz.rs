//! Random graphs × random meshes × random schedules: compiled, checked, run on ranks, and compared with one device; one device with
//! `interp`. What failed once stays in `golden/fuzz/seeds.txt`.

mod graphs;

use super::{CASE, Case, decode, encode, is_long, mesh};
use crate::onnx_model::Dice;
use crate::tolerance;
use bytes::Bytes;
use dcc::compile::{Compiled, compile};
use dcc::error::{Code, Error};
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

/// Cases of a run that train; plans that are refused do not count.
const CASES: usize = 500;
const LONG_CASES: usize = 10_000;
/// Plans that are drawn for each graph.
const PLANS: u64 = 6;
/// Seeds from here on have layers that those before do not know: half of a run.
const WIDE: u64 = 1 << 20;

/// Why a plan may be refused, which plans may be, and the largest share of those: sizes and depths of the graph are not looked at when a
/// plan is drawn.
struct Refusal {
    code: u16,
    concerns: fn(&Parallel) -> bool,
    most: f64,
    why: &'static str,
}

#[rustfmt::skip]
const REFUSALS: [Refusal; 5] = [
    Refusal { code: 303, concerns: |plan| plan.pp > 1, most: 0.3, why: "more stages than products" },
    Refusal { code: 312, concerns: |plan| plan.tp > 1 && !plan.sequence_parallel, most: 0.1, why: "heads or widths that tp does not split" },
    Refusal { code: 312, concerns: |plan| plan.sequence_parallel, most: 0.5, why: "nothing between products to split" },
    Refusal { code: 313, concerns: |plan| plan.cp > 1, most: 0.25, why: "no sequence in the input" },
    Refusal { code: 314, concerns: |plan| plan.ep > 1, most: 0.1, why: "fewer experts than ranks" },
];

/// One graph, its data and its optimizer, and one device's training.
struct Subject {
    case: Case,
    model: Model,
    loss: LossOptions,
    classes: Option<i64>,
    has: graphs::Has,
    alone: Outcome,
}

/// What came of a mesh.
enum Verdict {
    Trained(f64),
    Refused(Error),
}

impl Subject {
    fn new(seed: u64) -> Subject {
        let mut dice = Dice::new(seed);
        let batch = dice.of(&[8, 12, 16]);
        let graphs::Subject { model, output, classes, has } = graphs::random(&mut dice, batch as i64, seed >= WIDE);
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
        let mut subject = Subject { case, model, loss, classes, has, alone };
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
            Ok(compiled) => Verdict::Trained(self.case.difference(&self.trained(&compiled, RATE), &self.alone).0),
            Err(error) => Verdict::Refused(error),
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

/// The plan of a seed's graph by its number; from 4 on sequences are shared too, from 5 on experts, where the graph has them.
fn numbered(seed: u64, number: u64, batch: u64, has: graphs::Has) -> (Parallel, u32) {
    let mut dice = Dice::new(seed << 8 | number);
    let (mut parallel, microbatches) = plan(&mut dice, batch);
    if number >= 4 {
        parallel.sequence_parallel = has.positions && parallel.tp > 1;
        let ranks = parallel.dp * parallel.tp * parallel.pp;
        parallel.cp = if has.attention && ranks <= 4 && (parallel.tp == 1 || dice.once_in(2)) { 2 } else { 1 };
    }
    let parts = 2 * parallel.dp * microbatches;
    if has.experts
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

/// What came of the cases so far.
#[derive(Default)]
struct Tally {
    graphs: u32,
    trained: usize,
    worst: f64,
    /// Of each of `REFUSALS`: plans that it concerns, and those of them that it refused.
    refused: [(usize, usize); REFUSALS.len()],
    /// Graphs whose control fails.
    unseen: u32,
    /// Seed, plan, and what is wrong.
    wrong: Vec<String>,
}

impl Tally {
    /// Trains the graph of a seed on the plans of these numbers.
    fn graph(&mut self, seed: u64, numbers: impl IntoIterator<Item = u64>) {
        let subject = match caught(|| Subject::new(seed)) {
            Ok(subject) => subject,
            Err(panic) => return self.wrong.push(format!("{seed}: {panic}")),
        };
        self.graphs += 1;
        for number in numbers {
            self.plan(&subject, seed, number);
        }
        // A control: the rate shows.
        let one = subject.compiled(&mesh(1, 1, 1), 1).expect("it compiled before");
        let off = subject.case.difference(&subject.trained(&one, 1.01 * RATE), &subject.alone).0;
        self.unseen += u32::from(off <= tolerance::F64);
    }

    fn plan(&mut self, subject: &Subject, seed: u64, number: u64) {
        let (parallel, microbatches) = numbered(seed, number, subject.case.batch, subject.has);
        let Parallel { dp, cp, ep, tp, pp, schedule, virtual_stages, zero, shard_group, recompute, .. } = &parallel;
        let at = format!(
            "{seed} {number}: dp {dp} cp {cp} ep {ep} tp {tp} pp {pp} mb {microbatches} {} × {virtual_stages} {zero:?} {shard_group:?} {recompute:?}",
            schedule.name()
        );
        let concerned = REFUSALS.each_ref().map(|refusal| (refusal.concerns)(&parallel));
        for (refused, _) in self.refused.iter_mut().zip(concerned).filter(|(_, concerned)| *concerned) {
            refused.0 += 1;
        }
        let known = |error: &Error| (0..REFUSALS.len()).find(|&n| concerned[n] && error.code == Code(REFUSALS[n].code));
        match caught(|| subject.verdict(&parallel, microbatches)) {
            Ok(Verdict::Trained(off)) if off <= tolerance::F64 => {
                self.trained += 1;
                self.worst = self.worst.max(off);
            }
            Ok(Verdict::Trained(off)) => self.wrong.push(format!("{at}: {off:e} from one device")),
            Ok(Verdict::Refused(error)) => match known(&error) {
                Some(n) => self.refused[n].1 += 1,
                None => self.wrong.push(format!("{at}: {error}")),
            },
            Err(panic) => self.wrong.push(format!("{at}: {panic}")),
        }
    }

    fn check(&self) {
        let Tally { graphs, trained, worst, refused, unseen, wrong } = self;
        println!("{graphs} graphs: {trained} cases trained alike, largest difference {worst:.1e}");
        for (Refusal { code, most, why, .. }, (concerned, refused)) in REFUSALS.iter().zip(refused) {
            let share = *refused as f64 / (*concerned).max(1) as f64;
            println!(
                "{} {why}: {refused} of {concerned} refused, {:.0} % (bar {:.0})",
                Code(*code),
                100.0 * share,
                100.0 * most
            );
        }
        assert!(wrong.is_empty(), "{} cases are wrong (seed, plan):\n{}", wrong.len(), wrong.join("\n"));
        assert!(unseen * 20 <= *graphs, "in {unseen} of {graphs} graphs a rate 1 % off makes no difference");
    }
}

#[test]
fn random_graphs_train_alike_on_random_meshes() {
    let goal = if is_long() { LONG_CASES } else { CASES };
    let mut tally = Tally::default();
    // Far more graphs than it takes.
    for seed in (0..goal as u64).flat_map(|n| [1 + n, WIDE + n]) {
        if tally.trained + tally.wrong.len() >= goal {
            break;
        }
        tally.graph(seed, 0..PLANS);
    }
    tally.check();
    assert!(tally.trained >= goal, "{} cases of {goal} trained", tally.trained);
    for (Refusal { code, most, why, .. }, (concerned, refused)) in REFUSALS.iter().zip(tally.refused) {
        let at_most = most * concerned as f64;
        assert!(refused as f64 <= at_most, "{}, {why}: {refused} of {concerned} plans, {at_most:.0} allowed", Code(*code));
    }
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
    let mut tally = Tally::default();
    let count: usize = cases.values().map(Vec::len).sum();
    cases.into_iter().for_each(|(seed, numbers)| tally.graph(seed, numbers));
    tally.check();
    assert_eq!(tally.trained, count, "a plan that is refused shows nothing");
}
