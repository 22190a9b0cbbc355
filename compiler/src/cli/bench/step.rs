//! `dcc bench step`: a few training steps, and what each kernel of a step took: its share, its GF/s or GB/s, and of the peak.
//!
//! Times are those of `dcc run --trace`: medians over steps, of equal work in one section together; shares are of all steps' time.
//! What a step spends between instructions belongs to none of them.

use super::machine::Machine;
use crate::cli::failure::{self, Outcome};
use crate::cli::output;
use crate::cli::run as training;
use crate::error::Error;
use clap::ArgMatches;
use dcc_runtime::launch::STOPPED;
use dcc_runtime::metrics::trace::Work;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Steps that are not timed, where there are more; steps where no number is given.
const WARM: usize = 3;
const STEPS: u64 = 13;
const NANOSECONDS: f64 = 1e3;

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    run: training::Args,
    /// Rows of a table
    #[arg(long, value_name = "N", default_value_t = 30)]
    top: usize,
}

/// What one kind of work takes in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Kernel {
    section: String,
    kernel: String,
    /// Of the first in a step.
    origin: String,
    /// In a step.
    runs: usize,
    milliseconds: f64,
    /// Of the step.
    share: f64,
    flops: u64,
    bytes: u64,
    gflops: f64,
    gbps: f64,
    /// Of the multiply-add peak where there are matrix products, else of a copy's speed: above 1 where operands lie in caches.
    peak_fraction: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Rank {
    rank: u32,
    step_ms: f64,
    flops: u64,
    gflops: f64,
    peak_fraction: f64,
    kernels: Vec<Kernel>,
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    #[serde(flatten)]
    machine: Machine,
    /// Timed.
    steps: usize,
    ranks: Vec<Rank>,
}

pub fn run(args: &Args, matches: &ArgMatches, words: &[String]) -> Outcome<i32> {
    args.run.run.instructions.limit()?;
    let folder = Scratch::new()?;
    let mut train = args.run.clone();
    let flags = &mut train.run;
    let trace = flags.trace.clone().unwrap_or_else(|| folder.0.join("trace.json"));
    flags.trace = Some(trace.clone());
    if flags.epochs.is_none() {
        flags.steps.get_or_insert(STEPS);
    }
    let summary = training::train(&train, matches, words)?;
    if summary.exit() == STOPPED {
        return Ok(STOPPED);
    }
    let threads = summary.ranks.first().map_or(1, |rank| rank.threads) as usize;
    let machine = Machine::measure(threads);
    let bytes = std::fs::read(&trace).map_err(|error| failure::io("read", &trace, error))?;
    let trace = serde_json::from_slice(&bytes).map_err(|error| Error::internal(format!("the trace is not read: {error}")))?;
    let ranks = ranks(trace, &machine);
    let steps = ranks.first().map_or(0, |(_, steps)| *steps);
    let report = Report { schema: 1, machine, steps, ranks: ranks.into_iter().map(|(rank, _)| rank).collect() };
    match args.run.json {
        true => output::json(&report)?,
        false => output::data(&table(&report, args.top))?,
    }
    Ok(0)
}

/// A folder that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Outcome<Scratch> {
        let path = std::env::temp_dir().join(format!("dcc-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| failure::io("write", Path::new(&path), error))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays is in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    trace_events: Vec<Event>,
}

/// A span, or a name of something.
#[derive(Deserialize)]
struct Event {
    name: String,
    ph: String,
    pid: u32,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Arguments,
}

/// Of an instruction, of another span, or of a name.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Arguments {
    Work(Work),
    Other(serde::de::IgnoredAny),
    #[default]
    None,
}

/// Of each rank, with the number of steps that were timed.
fn ranks(trace: Trace, machine: &Machine) -> Vec<(Rank, usize)> {
    let mut spans: BTreeMap<u32, Vec<Event>> = BTreeMap::new();
    for event in trace.trace_events.into_iter().filter(|event| event.ph == "X") {
        spans.entry(event.pid).or_default().push(event);
    }
    spans.into_iter().map(|(rank, events)| of_rank(rank, events, machine)).collect()
}

fn of_rank(rank: u32, mut events: Vec<Event>, machine: &Machine) -> (Rank, usize) {
    // A rank's instructions come before the span of their step ends.
    events.sort_by(|a, b| a.ts.total_cmp(&b.ts));
    let mut steps: Vec<(f64, f64)> =
        events.iter().filter(|event| event.name.starts_with("step ")).map(|event| (event.ts, event.dur)).collect();
    let warm = WARM.min(steps.len().saturating_sub(1));
    steps.drain(..warm);
    let mut kinds: BTreeMap<(String, String), Kind> = BTreeMap::new();
    for event in &events {
        let Arguments::Work(work) = &event.args else { continue };
        let Some(step) = steps.iter().rposition(|(from, _)| *from <= event.ts) else { continue };
        let section = event.name.split(':').next().unwrap_or_default().to_owned();
        let kind = kinds.entry((section, work.kernel.clone())).or_insert_with(|| Kind::new(&work.origin, steps.len()));
        kind.micros[step] += event.dur;
        kind.runs += 1;
        kind.flops += work.flops;
        kind.bytes += work.bytes;
    }
    let all_us: f64 = steps.iter().map(|(_, dur)| dur).sum();
    let step_us = median(steps.iter().map(|(_, dur)| *dur).collect());
    let mut kernels: Vec<Kernel> = kinds.into_iter().map(|(names, kind)| kind.finish(names, all_us, machine)).collect();
    kernels.sort_by(|a, b| b.share.total_cmp(&a.share));
    let flops: u64 = kernels.iter().map(|kernel| kernel.flops).sum();
    let gflops = flops as f64 / (step_us * NANOSECONDS);
    let found = Rank { rank, step_ms: step_us / 1e3, flops, gflops, peak_fraction: gflops / machine.gflops, kernels };
    (found, steps.len())
}

/// Equal work of one section.
struct Kind {
    origin: String,
    /// Of each timed step.
    micros: Vec<f64>,
    /// In all of them.
    runs: usize,
    flops: u64,
    bytes: u64,
}

impl Kind {
    fn new(origin: &str, steps: usize) -> Kind {
        Kind { origin: origin.to_owned(), micros: vec![0.0; steps], runs: 0, flops: 0, bytes: 0 }
    }

    /// `all_us`: of the timed steps together.
    fn finish(self, (section, kernel): (String, String), all_us: f64, machine: &Machine) -> Kernel {
        let steps = self.micros.len();
        let own_us = self.micros.iter().sum::<f64>();
        let micros = median(self.micros);
        let (flops, bytes) = (self.flops / steps as u64, self.bytes / steps as u64);
        let nanoseconds = (micros * NANOSECONDS).max(1.0);
        let (gflops, gbps) = (flops as f64 / nanoseconds, bytes as f64 / nanoseconds);
        Kernel {
            section,
            kernel,
            origin: self.origin,
            runs: self.runs / steps,
            milliseconds: micros / 1e3,
            share: own_us / all_us,
            flops,
            bytes,
            gflops,
            gbps,
            peak_fraction: if flops > 0 { gflops / machine.gflops } else { gbps / machine.gbps },
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(report: &Report, top: usize) -> String {
    let mut text = report.machine.text();
    for rank in &report.ranks {
        let Rank { rank: number, step_ms, gflops, peak_fraction, .. } = rank;
        let percent = 100.0 * peak_fraction;
        let _ = writeln!(
            text,
            "rank {number}: {step_ms:.2} ms a step of {}, {gflops:.1} GF/s in matrix products, {percent:.1} % of the peak",
            report.steps
        );
        let _ = writeln!(text, "{:>9}{:>8}{:>6}{:>9}{:>8}{:>9}  kernel", "ms", "share", "runs", "GF/s", "GB/s", "of peak");
        for k in rank.kernels.iter().take(top) {
            let gflops = if k.flops > 0 { format!("{:.1}", k.gflops) } else { String::new() };
            let [share, fraction] = [k.share, k.peak_fraction].map(|part| format!("{:.1} %", 100.0 * part));
            let _ = writeln!(
                text,
                "{:>9.3}{share:>8}{:>6}{gflops:>9}{:>8.1}{fraction:>9}  {}: {}  # {}",
                k.milliseconds, k.runs, k.gbps, k.section, k.kernel, k.origin
            );
        }
        let share = |kernels: &[Kernel]| 100.0 * kernels.iter().map(|k| k.share).sum::<f64>();
        let rest = &rank.kernels[top.min(rank.kernels.len())..];
        let between = 100.0 - share(&rank.kernels);
        let _ = writeln!(text, "{} more: {:.1} %; between kernels: {between:.1} %", rest.len(), share(rest));
    }
    text
}
