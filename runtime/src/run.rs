//! Runs an artifact: the launcher's side, the ranks' side, and what passes between them.
//!
//! A binary that trains calls [`worker`] first thing in `main`, then, as launcher, [`launch`]:
//!
//! ```no_run
//! # fn parse() -> dcc_runtime::run::Flags { Default::default() }
//! if let Some(code) = dcc_runtime::run::worker() {
//!     std::process::exit(code);
//! }
//! let stop = dcc_runtime::signal::StopSignals::block()?; // before any thread starts
//! let source = dcc_runtime::run::Source::File("model.dcc".as_ref());
//! let summary = dcc_runtime::run::launch(source, &parse(), &stop)?;
//! std::process::exit(summary.exit());
//! # Ok::<(), dcc_runtime::error::Error>(())
//! ```
//!
//! The launcher hands its ranks the artifact and the flags through nameless memory that they inherit, so that a rank needs
//! neither the command line nor the compiler.

mod feed;
mod flags;
mod job;
mod trainer;
mod weights;

pub use flags::{Flags, Instructions};
pub use job::{Job, Source};
pub use weights::{initial_weights, whole_weights};

use crate::checkpoint::{self, Lock, Resume};
use crate::comm::{Comm, Patience, Peer, Stop};
use crate::cpu::{Cpu, Memory};
use crate::cuda::{Cuda, Gpu, Own, Shipped, Together, UniqueIds};
use crate::device::{Both, Device};
use crate::error::{Error, Result};
use crate::exec::ranks::{Rank, local_ranks, ranks_on};
use crate::exec::{Tally, World};
use crate::launch::{self, Launch, Message, Outcome, Worker};
use crate::metrics::{Context, Display, EvalRecord, MetricsFile, StepRecord, trace};
use crate::signal::{Requests, StopSignals};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use trainer::{Outside, Settings, Trainer};

/// What a rank was and did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    pub rank: u32,
    pub stage: u32,
    pub pid: u32,
    pub threads: u32,
    /// Of one training step.
    #[serde(flatten)]
    pub tally: Tally,
    /// Distinct kernels compiled.
    pub kernels: u64,
    /// What compiling them, and preparing every call, took.
    pub prepare_ms: f64,
    /// The arena: the peak known at compile time.
    pub planned_bytes: u64,
    /// Of it, what outlives the passes of a step: weights, optimizer state, gradients that microbatches add up in.
    pub persistent_bytes: u64,
    /// Weights and optimizer state.
    pub parameter_bytes: u64,
    /// Resident set before anything was loaded, and the largest seen; peers' memory left out.
    pub idle_bytes: u64,
    pub resident_bytes: u64,
}

/// What a run did, for `--json` and the last lines.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Version of this object's form.
    pub schema: u32,
    /// `finished` or `stopped`.
    pub outcome: String,
    pub last: Option<StepRecord>,
    pub eval: Option<EvalRecord>,
    /// Checkpoints saved.
    pub saved: Vec<PathBuf>,
    pub ranks: Vec<RankReport>,
}

impl Summary {
    /// The process exit code.
    pub fn exit(&self) -> i32 {
        if self.outcome == "stopped" { launch::STOPPED } else { 0 }
    }
}

/// Trains on local ranks, and returns when the last has ended. Several on CPUs are a process each. One by itself is a thread of this
/// process: memory, profile and debugger are those of one program. On GPUs all are such threads, which share what they compile and read
/// each other's memory. Progress goes to stderr, metrics to their file. A second request to stop ends this process if ranks are its threads.
/// Errors: the first failure, already with its place; no rank is left then.
pub fn launch(source: Source<'_>, flags: &Flags, stop: &StopSignals) -> Result<Summary> {
    let job = Job::new(&source, flags)?;
    job.keep_apart(&source)?;
    // Before the newest checkpoint is looked for: a run that ends could leave a newer one.
    let lock = flags.save_dir.as_deref().map(Lock::existing).transpose()?.flatten();
    let settings = Settings::new(&job)?;
    let world = job.world()?;
    flags.threads(world.ranks())?;
    flags.instructions.limit()?;
    let timeout = flags.timeout()?;
    if let Some(path) = &flags.trace {
        trace::check_writable(path)?;
    }
    let lock = save_folder(flags, lock)?;
    let mut desk = Desk::new(flags, &settings, &world)?;
    drop(settings);
    if let (Some(dir), Some(false)) = (&flags.save_dir, lock.as_ref().map(|lock| lock.holds)) {
        let dir = dir.display();
        desk.display.note(&format!("warning: {dir} cannot be locked: nothing keeps another run from saving checkpoints there"));
    }
    let (outcome, failed) = match flags.is_on_gpus() || world.ranks() == 1 {
        true => (here(&job, &mut desk, stop), None),
        false => {
            let (arguments, file) = job.hand_over(&source)?;
            let mut launch = Launch::of_this_process(world.layout().clone(), timeout)?;
            launch.arguments = arguments;
            let mut failed = None;
            let outcome = launch::supervise(&launch, stop, &mut |rank, message| {
                if let Err(error) = desk.receive(rank, message) {
                    failed.get_or_insert(error);
                }
            });
            drop(file);
            (outcome, failed)
        }
    };
    drop(lock);
    if let Some(path) = &flags.trace {
        trace::join(path, world.ranks())?;
    }
    desk.display.finish();
    match (outcome.map_err(|error| advised(error, flags))?, failed) {
        (_, Some(error)) => Err(error),
        (outcome, None) => Ok(desk.summary(outcome)),
    }
}

/// Makes the folder of checkpoints, and locks it where `lock` does not yet. Errors: nothing can be written there, another run does, or it has
/// checkpoints that this run would not continue from.
fn save_folder(flags: &Flags, lock: Option<Lock>) -> Result<Option<Lock>> {
    let Some(options) = flags.checkpoints() else { return Ok(None) };
    options.check_writable()?;
    let lock = match lock {
        Some(lock) => lock,
        None => Lock::take(&options.dir)?,
    };
    if let (Resume::None, Some((step, _))) = (flags.resume(), checkpoint::steps(&options.dir)?.pop()) {
        let what = format!("--save-dir has checkpoints of an earlier run, the newest of step {step}");
        let help = "--resume auto continues that run; a new run takes another folder";
        return Err(Error::data_option(what).at(options.dir.display()).help(help));
    }
    Ok(Some(lock))
}

/// The error of a run, with how to go on if it does not say so itself.
fn advised(error: Error, flags: &Flags) -> Error {
    match (&error, &flags.save_dir) {
        (Error::Rank(_) | Error::Hang(_), Some(_)) => error.help("--resume auto continues from the last checkpoint"),
        (Error::Rank(_) | Error::Hang(_), None) => {
            error.help("start again; with --save-dir DIR --save-every N, --resume auto would continue from a checkpoint")
        }
        _ => error,
    }
}

/// Runs this process as a rank if a launcher started it as one; its exit code then. First thing in `main`.
pub fn worker() -> Option<i32> {
    let worker = match Worker::from_environment() {
        Ok(worker) => worker?,
        Err(error) => {
            eprintln!("{error}");
            return Some(error.exit());
        }
    };
    let mut worker = worker;
    let result = work(&mut worker);
    Some(worker.end(result))
}

fn work(worker: &mut Worker) -> Result<Outcome> {
    let signals = StopSignals::block()?;
    let job = Job::receive()?;
    job.flags.instructions.limit()?;
    let world = job.world()?;
    let patience = Patience { timeout: job.flags.timeout()? };
    let (comm, arena) = worker.attach(world.layout(), patience)?;
    let device = Device::Cpu(Cpu::new(Memory::new(arena), job.flags.threads(world.ranks())?)?);
    let mut rank = Rank { rank: worker.rank, world: &world, comm, device };
    let tell = &mut |message: &Message| worker.send(message);
    train(&mut rank, &job, &mut Outside { tell, asked_to_stop: &|| signals.take() })
}

/// The ranks as threads of this process.
fn here(job: &Job, desk: &mut Desk, stop: &StopSignals) -> Result<Outcome> {
    let (world, timeout, desk) = (job.world()?, job.flags.timeout()?, Mutex::new(desk));
    let on = |asked: &Requests, device: &(dyn Fn(&mut Peer) -> Result<Device> + Sync)| {
        ranks_on(&world, Patience { timeout }, device, |rank| {
            let number = rank.rank;
            let tell = &mut |message: &Message| {
                let mut desk = desk.lock().unwrap_or_else(PoisonError::into_inner);
                desk.receive(number, message.clone())
            };
            let outcome = train(rank, job, &mut Outside { tell, asked_to_stop: &|| asked.take() });
            outcome.map_err(|error| error.at(format!("rank {number} at {}", rank.comm.place())))
        })
    };
    let outcomes = stop.heeded(|asked| match job.flags.is_on_gpus() {
        true => {
            let (together, ids) = (Together::default(), UniqueIds::default());
            on(asked, &|comm| gpu(comm, job, &world, &together, &ids))
        }
        false => on(asked, &|comm| Ok(Device::Cpu(cpu(comm, job, &world)?))),
    })?;
    let stopped = outcomes.contains(&Outcome::Stopped);
    Ok(if stopped { Outcome::Stopped } else { Outcome::Finished })
}

fn cpu(comm: &Peer, job: &Job, world: &World) -> Result<Cpu> {
    Cpu::new(Memory::new(comm.arena()), job.flags.threads(world.ranks())?)
}

/// Of rank r GPU r, counted round.
fn gpu(comm: &mut Peer, job: &Job, world: &World, together: &Together, ids: &UniqueIds) -> Result<Device> {
    let (gpus, timeout) = (Gpu::count()?.max(1), job.flags.timeout()?);
    let own = Own { products: job.flags.gemm == "own", attention: job.flags.attention == "own" };
    let gpu = Cuda::new(comm.rank() % gpus, Memory::new(comm.arena()), timeout, own, Shipped::of(&job.artifact))?;
    if job.flags.device == "both" {
        return Ok(Device::Both(Box::new(Both::new(cpu(comm, job, world)?, gpu))));
    }
    match &job.flags.gpu_comm[..] {
        "nccl" => gpu.connect_by_nccl(ids, comm, world, timeout)?,
        "host" => {}
        _ => gpu.connect(together, comm, world)?,
    }
    Ok(Device::Cuda(Box::new(gpu)))
}

/// The same ranks as threads of this process, without a launcher: for tests. The messages of all ranks, in each rank's order.
pub fn local(job: &Job) -> Result<Vec<Vec<Message>>> {
    on_threads(job, |rank| {
        let mut messages = Vec::new();
        let tell = &mut |message: &Message| {
            messages.push(message.clone());
            Ok(())
        };
        train(rank, job, &mut Outside { tell, asked_to_stop: &|| Stop::Continue })?;
        Ok(messages)
    })
}

/// The same under watch: `tell` gets each message, and `asked_to_stop` is asked once a step, on the thread of the rank.
pub fn watched(
    job: &Job,
    tell: &(dyn Fn(u32, &Message) -> Result<()> + Sync),
    asked_to_stop: &(dyn Fn(u32) -> Stop + Sync),
) -> Result<()> {
    let done = on_threads(job, |rank| {
        let number = rank.rank;
        train(rank, job, &mut Outside { tell: &mut |message| tell(number, message), asked_to_stop: &|| asked_to_stop(number) })
    });
    done.map(drop)
}

fn on_threads<T: Send>(job: &Job, body: impl Fn(&mut Rank<'_>) -> Result<T> + Sync) -> Result<Vec<T>> {
    let world = job.world()?;
    let patience = Patience { timeout: job.flags.timeout()? };
    local_ranks(&world, job.flags.threads(world.ranks())?, patience, body)
}

fn train(rank: &mut Rank<'_>, job: &Job, outside: &mut Outside<'_>) -> Result<Outcome> {
    let outcome = Trainer::new(rank, job, outside)?.run(outside)?;
    rank.comm.finish();
    Ok(outcome)
}

/// Where the launcher puts what ranks report.
struct Desk {
    metrics: Option<MetricsFile>,
    display: Display,
    summary: Summary,
    steps: u64,
    planned_bytes: u64,
}

impl Desk {
    fn new(flags: &Flags, settings: &Settings, world: &World) -> Result<Desk> {
        let open = |path: &PathBuf| MetricsFile::open(path, settings.first_step());
        let metrics = flags.metrics_file.as_ref().map(open).transpose()?;
        let planned_bytes = (0..world.ranks()).map(|rank| world.planned_bytes(rank) as u64).max().unwrap_or(0);
        let display = Display::new(settings.steps, flags.log_every.unwrap_or(if settings.steps <= 20 { 1 } else { 10 }));
        Ok(Desk {
            metrics,
            display,
            summary: Summary { schema: 1, ..Summary::default() },
            steps: settings.steps,
            planned_bytes,
        })
    }

    fn receive(&mut self, _rank: u32, message: Message) -> Result<()> {
        match message {
            Message::Step(record) => {
                self.metrics.as_mut().map_or(Ok(()), |file| file.write(&record))?;
                let used = self.summary.ranks.iter().map(|rank| rank.resident_bytes.saturating_sub(rank.idle_bytes)).max();
                let memory = used.map(|used| (used, self.planned_bytes));
                let context = Context { steps: self.steps, memory, ..Context::default() };
                self.display.step(&record, &context);
                self.summary.last = Some(record);
            }
            Message::Eval(record) => {
                self.metrics.as_mut().map_or(Ok(()), |file| file.write(&record))?;
                let accuracy = record.eval_accuracy.map_or(String::new(), |a| format!("  accuracy {a:.4}"));
                self.display.note(&format!("eval  {}  loss {:.4}{accuracy}", record.step, record.eval_loss));
                self.summary.eval = Some(record);
            }
            Message::Saved { step, path } => {
                self.display.note(&format!("saved step {step} to {}", path.display()));
                self.summary.saved.push(path);
            }
            Message::Report(report) => {
                self.summary.ranks.retain(|known| known.rank != report.rank);
                self.summary.ranks.push(report);
            }
            Message::Note(text) => self.display.note(&text),
            Message::Failed(_) => {}
        }
        Ok(())
    }

    fn summary(mut self, outcome: Outcome) -> Summary {
        self.summary.outcome = if outcome == Outcome::Stopped { "stopped" } else { "finished" }.to_owned();
        if outcome == Outcome::Stopped {
            let step = self.summary.last.as_ref().map_or(0, |record| record.step);
            let next = match self.summary.saved.is_empty() {
                true => "nothing is saved without --save-dir",
                false => "--resume auto continues",
            };
            self.display.note(&format!("stopped on request after step {step} of {}: {next}", self.steps));
        }
        self.summary.ranks.sort_by_key(|report| report.rank);
        self.summary
    }
}

/// Of this executable: its version, size and time.
fn build_hash() -> u64 {
    let file = std::env::current_exe().and_then(std::fs::metadata);
    let time = |m: &std::fs::Metadata| m.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok().map(|t| t.as_nanos());
    hash_of(&(env!("CARGO_PKG_VERSION"), file.as_ref().map_or(0, |m| m.len()), file.ok().as_ref().and_then(time)))
}

fn hash_of(value: &impl Serialize) -> u64 {
    let json = serde_json::to_vec(value).expect("plain data");
    u64::from_le_bytes(*blake3::hash(&json).as_bytes().first_chunk().expect("a hash has 32 bytes"))
}
