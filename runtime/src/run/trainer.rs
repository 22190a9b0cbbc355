//! The training loop of one rank: fill, step, report, evaluate, save, stop.

use super::feed::Feed;
use super::weights::Weights;
use super::{Job, RankReport};
use crate::checkpoint::{self, Checkpoint, Key, RunState, Shard};
use crate::comm::{Comm, Hello, Label, Place, Stop};
use crate::cpu;
use crate::data::{Order, Position, not_finite};
use crate::error::{Error, Result};
use crate::exec::ranks::Rank;
use crate::exec::{Executor, Fresh, Io, Parameter, Scalars};
use crate::launch::{Message, Outcome};
use crate::lr::LearningRate;
use crate::metrics::memory::resident_bytes;
use crate::metrics::trace::{Stream, Trace};
use crate::metrics::{EvalRecord, StepRecord, now_ns};
use dcc_program::program::{ParamKind, Program};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// From one look at the memory in use to the next.
const LOOK_NS: u64 = 30_000_000_000;

/// The world outside of the ranks.
pub(super) struct Outside<'a> {
    /// Tells the launcher.
    pub tell: &'a mut dyn FnMut(&Message) -> Result<()>,
    /// Whether somebody asked this very rank to stop.
    pub asked_to_stop: &'a dyn Fn() -> Stop,
}

/// What ranks and launcher work out from the flags alike.
pub(super) struct Settings {
    pub feed: Feed,
    pub eval: Option<Feed>,
    pub rate: LearningRate,
    pub steps: u64,
    pub seed: u64,
    /// The checkpoint to continue from.
    pub resumed: Option<(PathBuf, RunState)>,
}

impl Settings {
    /// Errors: everything that is wrong with flags and data.
    pub fn new(job: &Job) -> Result<Settings> {
        let (artifact, flags) = (&job.artifact, &job.flags);
        if artifact.train.is_empty() {
            return Err(Error::data_option("this artifact has no training program").help("it can be used with `dcc eval` only"));
        }
        flags.check()?;
        let resumed = match flags.resume().find(flags.save_dir.as_deref())? {
            Some(path) => Some((path.clone(), Checkpoint::open(&path)?.run().clone())),
            None => None,
        };
        let seed = flags.seed.or(resumed.as_ref().map(|(_, state)| state.seed)).unwrap_or(0);
        let feed = Feed::open(&artifact.train, &job.manifest, &flags.data, flags, seed)?;
        let eval = match (flags.eval_data.is_empty(), artifact.eval.is_empty()) {
            (true, _) => None,
            (false, true) => return Err(Error::data_option("--eval-data: this artifact has no evaluation program")),
            (false, false) => {
                let sequential = super::Flags { order: "sequential".to_owned(), ..flags.clone() };
                Some(Feed::open(&artifact.eval, &job.manifest, &flags.eval_data, &sequential, seed)?)
            }
        };
        let steps = steps(job, &feed)?;
        Ok(Settings { rate: flags.learning_rate(steps)?, feed, eval, steps, seed, resumed })
    }

    pub fn first_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |(_, state)| state.step)
    }
}

fn steps(job: &Job, feed: &Feed) -> Result<u64> {
    match (job.flags.steps, job.flags.epochs) {
        (Some(steps), _) => Ok(steps),
        (None, Some(epochs)) if epochs.is_finite() && epochs > 0.0 => {
            let len = feed.dataset().len().ok_or_else(|| Error::data_option("--epochs without data: use --steps"))?;
            let per_pass = if job.flags.layout == "steps" { len } else { len / feed.samples() };
            Ok((per_pass as f64 * epochs).round() as u64)
        }
        (None, Some(epochs)) => Err(Error::data_option(format!("--epochs {epochs}: not a number of passes"))),
        (None, None) => Err(Error::data_option("how long to train is not said").help("give --steps N or --epochs N")),
    }
}

/// Scalar results of a step.
#[derive(Clone, Copy, Debug, Default)]
struct Readings {
    loss: Option<f64>,
    grad_norm: Option<f64>,
    loss_scale: Option<f64>,
    eval_loss: Option<f64>,
    eval_accuracy: Option<f64>,
    eval_count: Option<f64>,
}

pub(super) struct Trainer<'a, 'w> {
    rank: &'a mut Rank<'w>,
    job: &'a Job,
    settings: Settings,
    train: Executor,
    eval: Option<Executor>,
    position: Position,
    trace: Option<Trace>,
    idle_bytes: u64,
    prepare_ms: f64,
    /// The largest resident set seen, and when to look again: each look walks the page tables.
    resident_bytes: u64,
    next_look_ns: u64,
    /// Whether this rank speaks for the run: the first that has the loss.
    reports: bool,
    /// The norm is computed on a stage without loss.
    norm_is_elsewhere: bool,
    /// Trained weights that are not finite from the start, as masks may be.
    infinite: BTreeSet<String>,
}

impl<'a, 'w> Trainer<'a, 'w> {
    /// Compiles kernels, loads weights or the checkpoint, and agrees with the other ranks that all run the same.
    pub fn new(rank: &'a mut Rank<'w>, job: &'a Job, outside: &mut Outside<'_>) -> Result<Trainer<'a, 'w>> {
        // So that what is used is counted from the same pages of code as later.
        cpu::settle();
        let idle_bytes = resident_bytes()?;
        let settings = Settings::new(job)?;
        let stage = rank.world.stage(rank.rank) as usize;
        let fresh = if cfg!(debug_assertions) { Fresh::Poisoned } else { Fresh::AsIs };
        let began = now_ns();
        let mut executor = |program| Executor::new(&mut rank.device, rank.world, program, rank.rank, fresh);
        // On GPUs that takes a while; others wait meanwhile.
        let compiles = Place { label: Label::new("compile kernels"), ..Place::default() };
        rank.comm.mark(&compiles);
        let mut train = executor(&job.artifact.train[stage])?;
        rank.comm.mark(&compiles);
        let mut eval = settings.eval.as_ref().map(|_| executor(&job.artifact.eval[stage])).transpose()?;
        let prepare_ms = (now_ns() - began) as f64 / 1e6;
        // In this order, what preparing took and the arena are never held together.
        cpu::settle();
        if !rank.device.is_apart() {
            rank.device.memory().fault_in(0..rank.world.planned_bytes(rank.rank));
        }
        if let Some(eval) = &mut eval {
            eval.keep(train.parameters());
            train.keep(eval.parameters());
        }
        let has = |program: &Program, name: &str| program.outputs.iter().any(|output| output.name == name);
        let program = &job.artifact.train[stage];
        let at = program.mesh.coordinates(rank.rank);
        let is_first = program.mesh.space().all(|axis| program.mesh.name(axis) == "pp" || at.get(axis) == 0);
        let loss_stage = job.artifact.train.iter().find(|program| has(program, "loss"));
        let norm_is_elsewhere =
            loss_stage.is_some_and(|p| !has(p, "grad_norm")) && job.artifact.train.iter().any(|p| has(p, "grad_norm"));
        let trace = job.flags.trace.as_ref().map(|path| Trace::create(path, rank.rank)).transpose()?;
        let reports = is_first && loss_stage.is_some_and(|p| std::ptr::eq(p, program));
        let mut trainer = Trainer {
            rank,
            job,
            settings,
            train,
            eval,
            position: Position::default(),
            trace,
            idle_bytes,
            prepare_ms,
            resident_bytes: 0,
            next_look_ns: 0,
            reports,
            norm_is_elsewhere,
            infinite: BTreeSet::new(),
        };
        trainer.load(outside)?;
        if trainer.job.flags.checkpoints().is_some() {
            trainer.infinite = trainer.not_finite_weights();
        }
        trainer.train.put_parameters(&mut trainer.rank.device)?;
        if let Some(eval) = &trainer.eval {
            eval.put_parameters(&mut trainer.rank.device)?;
        }
        trainer.handshake()?;
        Ok(trainer)
    }

    fn load(&mut self, outside: &mut Outside<'_>) -> Result<()> {
        let place = Place { label: Label::new("load weights"), ..Place::default() };
        self.rank.comm.mark(&place);
        self.tell_of_samples_left_out(outside)?;
        let known = |parameter: &Parameter, all: &[Parameter]| all.iter().any(|other| other.range == parameter.range);
        let parameters = self.train.parameters();
        let only_eval = self.eval.iter().flat_map(|eval| eval.parameters()).filter(|p| !known(p, parameters));
        let memory = self.rank.device.memory_mut();
        if let Some((path, state)) = &self.settings.resumed {
            let mut checkpoint = Checkpoint::open(path)?;
            for parameter in parameters.iter().chain(only_eval) {
                let slice = parameter.slice(&self.job.whole_shape(parameter));
                let start = parameter.range.start;
                checkpoint.read(&key(parameter), parameter.dtype, &slice, &mut |at, bytes| {
                    memory.write(start + at as usize, bytes);
                    Ok(())
                })?;
            }
            self.position = state.position;
            let unused = self.states_left_out(&checkpoint);
            if !unused.is_empty() && self.rank.rank == 0 {
                let note = format!("note: of the checkpoint, {unused} is not used: this run's optimizer does not keep it");
                (outside.tell)(&Message::Note(note))?;
            }
            let notes = [self.other_data(state), self.weights_left_out(state), self.later_ones(state)?];
            for note in notes.into_iter().flatten().filter(|_| self.rank.rank == 0) {
                (outside.tell)(&Message::Note(note))?;
            }
            return Ok(());
        }
        let mut weights = Weights::new(self.job)?;
        parameters.iter().chain(only_eval).try_for_each(|parameter| weights.load(parameter, memory))?;
        if !weights.unused.is_empty() && self.rank.rank == 0 {
            let some = weights.unused.iter().take(4).map(String::as_str).collect::<Vec<_>>().join(", ");
            let (count, more) = (weights.unused.len(), if weights.unused.len() > 4 { ", …" } else { "" });
            let note = format!("note: {count} tensors of --weights are none of the model's: {some}{more}");
            (outside.tell)(&Message::Note(note))?;
        }
        let missing = weights.missing();
        if !missing.is_empty() && self.rank.rank == 0 {
            let (some, more) = (missing[..missing.len().min(4)].join(", "), if missing.len() > 4 { ", …" } else { "" });
            let note = format!("note: {} trained tensors are not in --weights: {some}{more}", missing.len());
            (outside.tell)(&Message::Note(note))?;
        }
        Ok(())
    }

    /// What of the data and their order is not as it was in the run of the checkpoint.
    fn other_data(&self, state: &RunState) -> Option<String> {
        let (dataset, order, seed) = (self.settings.feed.dataset(), self.job.flags.order(), self.settings.seed);
        if state.data == dataset.fingerprint() {
            return None;
        }
        let is_theirs = |order: &Order| dataset.fingerprint_in(*order, state.seed) == state.data;
        let Some(theirs) = [Order::Shuffled, Order::Sequential].into_iter().find(is_theirs) else {
            return Some("note: the data are not those of the checkpoint".to_owned());
        };
        let seeds = (seed != state.seed).then(|| format!("--seed {seed} in place of {}", state.seed));
        let orders = (order != theirs).then(|| format!("--order {} in place of {}", order.name(), theirs.name()));
        let changes: Vec<String> = seeds.into_iter().chain(orders).collect();
        Some(format!("note: the data are those of the checkpoint, but with {}", changes.join(" and ")))
    }

    /// That the flags say what weights begin with, which `--resume auto` may find to be no beginning.
    fn weights_left_out(&self, state: &RunState) -> Option<String> {
        let flag = self.job.flags.beginning()?;
        Some(format!("note: {flag} is not used: training goes on from step {} of the checkpoint", state.step))
    }

    /// That `--save-dir` has later checkpoints than the one that this run begins with: another run's, which goes on from there.
    fn later_ones(&self, state: &RunState) -> Result<Option<String>> {
        let Some(options) = self.job.flags.checkpoints() else { return Ok(None) };
        let newest = checkpoint::steps(&options.dir)?.pop().filter(|(step, _)| *step > state.step);
        Ok(newest.map(|(newest, _)| {
            format!(
                "note: --save-dir has checkpoints of another run, up to step {newest}, and this one goes on from step {}: until it has \
                 saved a later one, --resume auto and exports take that run's; another --save-dir keeps them apart",
                state.step
            )
        }))
    }

    /// What a checkpoint holds beside weights and no rank of this run does.
    fn states_left_out(&self, checkpoint: &Checkpoint) -> String {
        let params = self.job.artifact.train.iter().flat_map(|program| &program.params);
        let kept = params.filter_map(|param| match &param.kind {
            ParamKind::Weight => None,
            ParamKind::State(state) => Some(state.as_str()),
        });
        let kept: BTreeSet<&str> = kept.collect();
        checkpoint.states().difference(&kept).copied().collect::<Vec<_>>().join(", ")
    }

    fn tell_of_samples_left_out(&self, outside: &mut Outside<'_>) -> Result<()> {
        let Some(feed) = self.settings.eval.as_ref().filter(|_| self.rank.rank == 0 && self.job.flags.layout != "steps") else {
            return Ok(());
        };
        let (all, batch) = (feed.dataset().len().unwrap_or(0), feed.samples());
        if all % batch == 0 {
            return Ok(());
        }
        let taken = all - all % batch;
        (outside.tell)(&Message::Note(format!("note: evaluation takes {taken} of {all} samples, whole batches of {batch}")))
    }

    fn handshake(&mut self) -> Result<()> {
        let data = self.settings.feed.dataset().fingerprint();
        let run = (&self.job.flags, self.settings.first_step());
        let hello = Hello { build: super::build_hash(), artifact: self.job.hash, run: super::hash_of(&run), data };
        self.rank.comm.handshake(&hello)
    }

    /// Trains to the end, or until somebody asks to stop.
    pub fn run(mut self, outside: &mut Outside<'_>) -> Result<Outcome> {
        let (first, last) = (self.settings.first_step() + 1, self.settings.steps);
        if first > last && self.reports {
            let note = format!("note: no step to do: {} are done, of {last}", first - 1);
            (outside.tell)(&Message::Note(note))?;
        }
        let due = |every: Option<u64>, step: u64| step == last || every.is_some_and(|n| n > 0 && step.is_multiple_of(n));
        for step in first..=last {
            let stop = self.step(step, outside)?;
            if step == first || now_ns() >= self.next_look_ns {
                self.report(outside)?;
            }
            if self.eval.is_some() && due(self.job.flags.eval_every, step) {
                self.evaluate(step, outside)?;
            }
            if due(self.job.flags.save_every, step) || stop == Stop::Requested {
                self.save(step, outside)?;
            }
            if stop == Stop::Requested && step < last {
                return self.finish(Outcome::Stopped, outside);
            }
        }
        self.finish(Outcome::Finished, outside)
    }

    /// One optimizer step on all ranks; whether somebody asked to stop.
    fn step(&mut self, step: u64, outside: &mut Outside<'_>) -> Result<Stop> {
        let began = now_ns();
        let lr = self.settings.rate.at(step - 1);
        let scalars = Scalars { learning_rate: lr, step: step as i64, seed: self.settings.seed as i64 };
        let mut readings =
            run_step(self.rank, &mut self.train, &mut self.settings.feed, self.position, &scalars, self.trace.as_mut())?;
        let position = self.position;
        self.position = self.settings.feed.advance(position, 1);
        if let Some(trace) = &mut self.trace {
            trace.span(Stream::Host, &format!("step {step}"), began, None)?;
        }
        // With a scale, a step that is not finite is skipped and the scale halved: a smaller one than 1 tells of more than overflow.
        let skips = readings.loss_scale.is_some_and(|scale| scale >= 1.0);
        if let Some(loss) = readings.loss.filter(|loss| !loss.is_finite() && !skips) {
            return Err(self.not_finite(step, loss, position));
        }
        let comm = &mut self.rank.comm;
        if self.norm_is_elsewhere {
            // Bits of numbers from zero on are ordered as the numbers are.
            let bits = comm.agree(readings.grad_norm.map_or(0, |norm| norm.abs().to_bits()))?;
            readings.grad_norm = Some(f64::from_bits(bits));
        }
        let asked = [comm.stop_requested(), (outside.asked_to_stop)()];
        let requested = u64::from(asked.contains(&Stop::Requested));
        let stop = if comm.agree(requested)? != 0 { Stop::Requested } else { Stop::Continue };
        if self.reports {
            let step_ms = (now_ns() - began) as f64 / 1e6;
            let feed = &self.settings.feed;
            (outside.tell)(&Message::Step(StepRecord {
                step,
                loss: readings.loss.unwrap_or(f64::NAN),
                grad_norm: readings.grad_norm.filter(|norm| norm.is_finite() || readings.loss_scale.is_none()),
                loss_scale: readings.loss_scale,
                lr,
                step_ms,
                samples: feed.samples(),
                tokens: feed.tokens(),
            }))?;
        }
        Ok(stop)
    }

    /// Why the loss of the batch at `position` is not finite.
    fn not_finite(&self, step: u64, loss: f64, position: Position) -> Error {
        let what = format!("the loss of step {step} is {loss}");
        let place = format!("rank {} at step {step}", self.rank.rank);
        match self.settings.feed.fault(position) {
            Some(fault) => Error::numerical(format!("{what}: {fault}")).at(place).help("take such samples out of the data"),
            None if step == 1 => Error::numerical(what)
                .at(place)
                .help("no step was made yet: the initial weights give it; `--dtype f64` tells whether they overflow"),
            None => Error::numerical(what).at(place).help("a smaller --lr, --warmup or --grad-clip may keep it finite"),
        }
    }

    /// One pass over the evaluation data, an incomplete last batch left out.
    fn evaluate(&mut self, step: u64, outside: &mut Outside<'_>) -> Result<()> {
        let (Some(executor), Some(feed)) = (&mut self.eval, &mut self.settings.eval) else { return Ok(()) };
        let len = feed.dataset().len().unwrap_or(1);
        let batches = if self.job.flags.layout == "steps" { len } else { len / feed.samples() };
        let (mut loss, mut accuracy, mut count) = (0.0, None, 0.0);
        for batch in 0..batches {
            let position = feed.advance(Position::default(), batch);
            let scalars = Scalars { learning_rate: 0.0, step: step as i64, seed: self.settings.seed as i64 };
            let readings = run_step(self.rank, executor, feed, position, &scalars, None)?;
            let weight = readings.eval_count.unwrap_or(1.0);
            // A batch without a valid label has no mean.
            if weight > 0.0 {
                loss += readings.eval_loss.unwrap_or(f64::NAN) * weight;
                accuracy = readings.eval_accuracy.map(|a| accuracy.unwrap_or(0.0) + a * weight).or(accuracy);
                count += weight;
            }
        }
        let here = executor.outputs().iter().any(|port| port.name == "eval_loss");
        if here && self.is_first_of_its_stage() {
            let eval_accuracy = accuracy.map(|sum| sum / count);
            (outside.tell)(&Message::Eval(EvalRecord { step, eval_loss: loss / count, eval_accuracy }))?;
        }
        Ok(())
    }

    fn is_first_of_its_stage(&self) -> bool {
        let mesh = &self.job.artifact.train[0].mesh;
        let at = mesh.coordinates(self.rank.rank);
        mesh.space().all(|axis| mesh.name(axis) == "pp" || at.get(axis) == 0)
    }

    /// Trained weights of which this rank has values that are not finite.
    fn not_finite_weights(&mut self) -> BTreeSet<String> {
        let programs = &self.job.artifact.train;
        let params = programs.iter().flat_map(|program| &program.params).filter(|param| param.trained);
        let trained: BTreeSet<&str> = params.map(|param| &param.name[..]).collect();
        let memory = self.rank.device.memory_mut();
        let is_trained = |p: &&Parameter| p.kind == ParamKind::Weight && trained.contains(&p.name[..]);
        let weights = self.train.parameters().iter().filter(is_trained);
        let bad = weights.filter(|p| memory.with(p.range.clone(), |bytes| not_finite(p.dtype, bytes)) > 0);
        bad.map(|p| p.name.clone()).collect()
    }

    /// Errors, on every rank: a trained weight that is no longer finite, which is not worth an earlier checkpoint.
    fn check_finite(&mut self, step: u64) -> Result<()> {
        let bad = self.not_finite_weights().into_iter().find(|name| !self.infinite.contains(name));
        let agreed = self.rank.comm.agree(u64::from(bad.is_some()));
        // A peer that has heard of it may be gone before this rank has.
        let what = match bad {
            Some(name) => format!("`{name}` is not finite after step {step}: it is not saved"),
            None if agreed? != 0 => format!("a weight on another rank is not finite after step {step}: it is not saved"),
            None => return Ok(()),
        };
        let place = format!("rank {} at step {step}", self.rank.rank);
        Err(Error::numerical(what).at(place).help("a smaller --lr, --warmup or --grad-clip may keep it finite"))
    }

    fn save(&mut self, step: u64, outside: &mut Outside<'_>) -> Result<()> {
        let Some(options) = self.job.flags.checkpoints() else { return Ok(()) };
        self.train.get_parameters(&mut self.rank.device)?;
        self.check_finite(step)?;
        let Rank { comm, device, rank, world } = &mut *self.rank;
        let stage = world.stage(*rank) as usize;
        let memory = device.memory();
        let earlier = |p: &Parameter| self.job.artifact.train[..stage].iter().any(|program| holds(program, p));
        let mine: Vec<&Parameter> = self.train.parameters().iter().filter(|p| p.is_first_replica && !earlier(p)).collect();
        let reads: Vec<_> = mine
            .iter()
            .map(|parameter| {
                let start = parameter.range.start;
                move |at: u64, into: &mut [u8]| -> Result<()> {
                    memory.read(start + at as usize, into);
                    Ok(())
                }
            })
            .collect();
        let shard = |(parameter, read)| {
            let parameter: &Parameter = parameter;
            let slice = parameter.slice(&self.job.whole_shape(parameter));
            Shard { key: key(parameter), dtype: parameter.dtype, slice, read }
        };
        let shards: Vec<Shard<'_>> = mine.iter().copied().zip(reads.iter().map(|r| r as _)).map(shard).collect();
        let tied = self.job.manifest.parameters.iter().filter(|(_, parameter)| !parameter.aliases.is_empty());
        let params = || self.job.artifact.train.iter().flat_map(|program| &program.params);
        let state = RunState {
            step,
            seed: self.settings.seed,
            position: self.position,
            data: self.settings.feed.dataset().fingerprint(),
            description: self.job.description(),
            model: self.job.manifest.model.clone(),
            mesh: self.job.mesh(),
            flags: self.job.manifest.flags.clone(),
            aliases: tied.map(|(name, parameter)| (name.clone(), parameter.aliases.clone())).collect(),
            constants: params().filter(|param| !param.trained).map(|param| param.name.clone()).collect(),
            forward: self.job.artifact.forward.clone(),
        };
        let path = checkpoint::save(comm, &options, &state, &shards)?;
        if *rank == 0 {
            (outside.tell)(&Message::Saved { step, path })?;
        }
        Ok(())
    }

    fn report(&mut self, outside: &mut Outside<'_>) -> Result<()> {
        let rank = self.rank.rank;
        self.resident_bytes = self.resident_bytes.max(resident_bytes()?);
        self.next_look_ns = now_ns() + LOOK_NS;
        (outside.tell)(&Message::Report(RankReport {
            rank,
            stage: self.rank.world.stage(rank),
            pid: std::process::id(),
            threads: self.rank.device.threads() as u32,
            tally: *self.train.tally(),
            kernels: self.rank.device.kernels() as u64,
            prepare_ms: self.prepare_ms,
            planned_bytes: self.rank.world.planned_bytes(rank) as u64,
            persistent_bytes: self.train.persistent_bytes() as u64,
            parameter_bytes: self.train.parameters().iter().map(|p| p.range.len() as u64).sum(),
            idle_bytes: self.idle_bytes,
            resident_bytes: self.resident_bytes,
        }))
    }

    fn finish(mut self, outcome: Outcome, outside: &mut Outside<'_>) -> Result<Outcome> {
        // A GPU may still be at the last update, and may fail there.
        self.rank.device.wait()?;
        self.report(outside)?;
        if let Some(text) = self.rank.device.summary() {
            (outside.tell)(&Message::Note(format!("rank {}: {text}", self.rank.rank)))?;
        }
        match self.trace.take() {
            Some(trace) => trace.finish().map(|()| outcome),
            None => Ok(outcome),
        }
    }
}

fn run_step(
    rank: &mut Rank<'_>,
    executor: &mut Executor,
    feed: &mut Feed,
    position: Position,
    scalars: &Scalars,
    trace: Option<&mut Trace>,
) -> Result<Readings> {
    let mut readings = Readings::default();
    let mut io = Io {
        fill: &mut |port, microbatch, out| feed.fill(port, microbatch, position, out),
        take: &mut |port, _, bytes| {
            let slot = match &port.name[..] {
                "loss" => &mut readings.loss,
                "grad_norm" => &mut readings.grad_norm,
                "loss_scale" => &mut readings.loss_scale,
                "eval_loss" => &mut readings.eval_loss,
                "eval_accuracy" => &mut readings.eval_accuracy,
                "eval_count" => &mut readings.eval_count,
                _ => return Ok(()),
            };
            *slot = Some(port.scalar(bytes));
            Ok(())
        },
    };
    executor.step(&mut rank.device, &mut rank.comm, scalars, &mut io, trace)?;
    Ok(readings)
}

fn holds(program: &Program, parameter: &Parameter) -> bool {
    let same =
        |p: &dcc_program::program::Param| p.name == parameter.name && p.kind == parameter.kind && p.piece == parameter.piece;
    program.params.iter().any(same)
}

pub(super) fn key(parameter: &Parameter) -> Key {
    let state = match &parameter.kind {
        ParamKind::Weight => None,
        ParamKind::State(state) => Some(state.clone()),
    };
    Key { name: parameter.name.clone(), state }
}
