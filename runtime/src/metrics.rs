//! What a run reports: one JSON object per step, a log line or a progress bar, and a trace.

pub mod memory;
pub mod trace;

use crate::error::{Error, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One optimizer step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// From 1.
    pub step: u64,
    /// Of the global batch, before the update.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Before clipping; none of a step whose gradients overflowed, which is skipped.
    pub grad_norm: Option<f64>,
    /// What the loss was multiplied by for the gradients' sake, in f16.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f64>,
    /// The rate used.
    pub lr: f64,
    /// From batch in hand to weights updated.
    pub step_ms: f64,
    /// Of the global batch.
    pub samples: u64,
    /// Of the global batch; none where the model has no sequences.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tokens: Option<u64>,
}

/// JSON has no number that is not finite.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// One pass over the evaluation data, after `step`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    pub step: u64,
    pub eval_loss: f64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_accuracy: Option<f64>,
}

/// Nanoseconds of the monotonic clock, which all processes of a machine share.
pub fn now_ns() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
    #[cfg(not(target_os = "linux"))]
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// `--metrics-file`: JSON lines, each written at once, numbers in shortest round-trip form.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    path: PathBuf,
    line: Vec<u8>,
}

impl MetricsFile {
    /// Keeps the lines of steps up to `resumed_step`, 0 for a fresh run; later ones are of a run that was cut off.
    pub fn open(path: &Path, resumed_step: u64) -> Result<MetricsFile> {
        let failed = |error| Error::io("write metrics", path, error);
        let kept = match resumed_step {
            0 => Vec::new(),
            step => kept_lines(path, step)?,
        };
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(&kept).map_err(failed)?;
        Ok(MetricsFile { file, path: path.to_owned(), line: Vec::with_capacity(256) })
    }

    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, record).expect("records are plain structs");
        self.line.push(b'\n');
        self.file.write_all(&self.line).map_err(|error| Error::io("write metrics", &self.path, error))
    }
}

#[derive(Deserialize)]
struct StepOnly {
    step: u64,
}

fn kept_lines(path: &Path, resumed_step: u64) -> Result<Vec<u8>> {
    let failed = |error| Error::io("read metrics", path, error);
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.map_err(failed)?,
    };
    let mut kept = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        let line = line.map_err(failed)?;
        // A half-written last line parses as nothing.
        if serde_json::from_slice::<StepOnly>(&line).is_ok_and(|record| record.step <= resumed_step) {
            kept.extend_from_slice(&line);
            kept.push(b'\n');
        }
    }
    Ok(kept)
}

/// What the log line shows besides the record.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Context {
    /// Of the whole run.
    pub steps: u64,
    /// Fraction of the measured peak.
    pub mfu: Option<f64>,
    /// Bytes in use besides those of the idle program, and bytes planned, of the fullest rank.
    pub memory: Option<(u64, u64)>,
    /// Until the last step, at the present rate.
    pub eta: Option<Duration>,
}

/// `step  120/5000  loss 2.4131  gnorm 0.81  lr 5.9e-4  2,167 tok/s  7.56 s/step  mfu 62.1%  mem 61 MiB (plan 64)  eta 10h14m`
pub fn log_line(record: &StepRecord, context: &Context) -> String {
    joined(&fields(record, context))
}

/// The same in at most `columns` characters: what matters least is left out.
fn short_line(record: &StepRecord, context: &Context, columns: usize) -> String {
    let mut fields = fields(record, context);
    while joined(&fields).chars().count() > columns && fields.len() > 1 {
        let least = (0..fields.len()).max_by_key(|&i| fields[i].0).expect("there is a field");
        fields.remove(least);
    }
    joined(&fields)
}

fn joined(fields: &[(u8, String)]) -> String {
    fields.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ")
}

/// Each with its rank: 0 matters most.
fn fields(record: &StepRecord, context: &Context) -> Vec<(u8, String)> {
    let digits = context.steps.to_string().len();
    let mut fields =
        vec![(0, format!("step {:>digits$}/{}", record.step, context.steps)), (1, format!("loss {:.4}", record.loss))];
    fields.extend(record.grad_norm.map(|norm| (5, format!("gnorm {norm:.2}"))));
    let skipped = record.loss_scale.is_some() && record.grad_norm.is_none();
    fields.extend(record.loss_scale.map(|scale| (9, format!("scale {scale}{}", if skipped { " skipped" } else { "" }))));
    fields.push((6, format!("lr {}", short(record.lr))));
    let seconds = record.step_ms / 1000.0;
    if seconds > 0.0 {
        let (count, unit) = record.tokens.map_or((record.samples, "samples/s"), |tokens| (tokens, "tok/s"));
        fields.push((3, format!("{} {unit}", thousands((count as f64 / seconds).round() as u64))));
    }
    fields.push(match seconds {
        s if s >= 1.0 => (4, format!("{s:.2} s/step")),
        s => (4, format!("{:.1} ms/step", s * 1000.0)),
    });
    fields.extend(context.mfu.map(|mfu| (8, format!("mfu {:.1}%", mfu * 100.0))));
    let memory = |(used, planned): (u64, u64)| format!("mem {} MiB (plan {})", used >> 20, planned.div_ceil(1 << 20));
    fields.extend(context.memory.map(|memory_use| (7, memory(memory_use))));
    fields.extend(context.eta.map(|eta| (2, format!("eta {}", duration(eta)))));
    fields
}

/// Two significant digits: `5.9e-4`, `0.1`.
fn short(rate: f64) -> String {
    match rate {
        rate if rate == 0.0 || (0.01..1e4).contains(&rate) => format!("{}", (rate * 1e4).round() / 1e4),
        rate => {
            let text = format!("{rate:.1e}");
            text.replace(".0e", "e")
        }
    }
}

fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// Columns that a progress bar takes at least.
const BAR: usize = 12;

/// Shows steps on stderr: a bar on a terminal, else a line every `log_every` steps and at the last.
#[derive(Debug)]
pub struct Display {
    steps: u64,
    log_every: u64,
    bar: Option<ProgressBar>,
    /// Seconds per step, exponentially averaged.
    rate: Option<f64>,
}

impl Display {
    pub fn new(steps: u64, log_every: u64) -> Display {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{wide_bar} {msg}").expect("a constant template");
            bar.with_style(style)
        });
        Display { steps, log_every: log_every.max(1), bar, rate: None }
    }

    pub fn step(&mut self, record: &StepRecord, context: &Context) {
        let seconds = record.step_ms / 1000.0;
        let rate = *self.rate.insert(self.rate.map_or(seconds, |rate| 0.9 * rate + 0.1 * seconds));
        let left = self.steps.saturating_sub(record.step) as f64 * rate;
        let eta = Duration::try_from_secs_f64(left).ok().filter(|_| record.step < self.steps);
        let context = Context { steps: self.steps, eta, ..*context };
        match &self.bar {
            Some(bar) => {
                bar.set_position(record.step);
                let columns = terminal_size::terminal_size_of(std::io::stderr()).map_or(80, |(width, _)| usize::from(width.0));
                bar.set_message(short_line(record, &context, columns.saturating_sub(BAR)));
            }
            None if record.step.is_multiple_of(self.log_every) || record.step == self.steps || record.step == 1 => {
                // A closed stderr is no reason to stop training.
                let _ = writeln!(std::io::stderr(), "{}", log_line(record, &context));
            }
            None => {}
        }
    }

    /// A line that stays, above the bar if there is one.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => drop(writeln!(std::io::stderr(), "{text}")),
        }
    }

    pub fn finish(&self) {
        self.bar.iter().for_each(|bar| bar.finish());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> StepRecord {
        let tokens = Some(16384);
        StepRecord {
            step: 120,
            loss: 2.41312,
            grad_norm: Some(0.8104),
            lr: 5.9e-4,
            step_ms: 7560.0,
            samples: 64,
            tokens,
            loss_scale: None,
        }
    }

    #[test]
    fn the_log_line_is_that_of_the_manual() {
        let eta = Some(Duration::from_secs(36892));
        let context = Context { steps: 5000, mfu: Some(0.621), memory: Some((61 << 20, 64 << 20)), eta };
        assert_eq!(
            log_line(&record(), &context),
            "step  120/5000  loss 2.4131  gnorm 0.81  lr 5.9e-4  2,167 tok/s  7.56 s/step  mfu 62.1%  mem 61 MiB (plan 64)  eta 10h14m"
        );
        assert_eq!(
            short_line(&record(), &context, 80),
            "step  120/5000  loss 2.4131  gnorm 0.81  2,167 tok/s  7.56 s/step  eta 10h14m"
        );
        assert_eq!(short_line(&record(), &context, 30), "step  120/5000  loss 2.4131");
        let bare = StepRecord { grad_norm: None, tokens: None, step_ms: 12.34, lr: 0.1, ..record() };
        assert_eq!([1e30, 2.5e5, 12.0].map(short), ["1e30", "2.5e5", "12"]);
        assert_eq!(
            log_line(&bare, &Context { steps: 200, ..Context::default() }),
            "step 120/200  loss 2.4131  lr 0.1  5,186 samples/s  12.3 ms/step"
        );
        let overflown = StepRecord { loss_scale: Some(65536.0), ..bare };
        let text = log_line(&overflown, &Context { steps: 200, ..Context::default() });
        assert_eq!(text, "step 120/200  loss 2.4131  scale 65536 skipped  lr 0.1  5,186 samples/s  12.3 ms/step");
    }

    #[test]
    fn a_resumed_run_continues_the_file() {
        let path = std::env::temp_dir().join(format!("dcc-metrics-{}.jsonl", std::process::id()));
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for step in 1..=4 {
            file.write(&StepRecord { step, loss: 0.1 + 0.2, ..StepRecord::default() }).unwrap();
        }
        file.write(&EvalRecord { step: 4, eval_loss: 1.0, eval_accuracy: None }).unwrap();
        let mut resumed = MetricsFile::open(&path, 2).unwrap();
        resumed.write(&StepRecord { step: 3, loss: f64::from(0.1f32), ..StepRecord::default() }).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let steps: Vec<StepRecord> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(steps[0].loss.to_bits(), (0.1 + 0.2f64).to_bits());
        assert!(
            text.starts_with(r#"{"step":1,"loss":0.30000000000000004,"grad_norm":null,"lr":0.0,"step_ms":0.0,"samples":0}"#)
        );
    }
}
