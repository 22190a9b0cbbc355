//! The flags of `run`: one struct that both binaries flatten into their command, and that travels to the ranks.

use crate::checkpoint::{self, Resume};
use crate::data::{self, Fill, Layout, Order};
use crate::error::{Error, Result};
use crate::init::Rule;
use crate::lr::{LearningRate, Schedule};
use crate::places::{self, Clash, Named};
use clap::builder::{PossibleValuesParser, ValueParser};
use dcc_kernels::{Isa, Pool};
use dcc_program::Glob;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default)]
pub struct Flags {
    /// Training data: .npz, .safetensors, a folder of .npy, or token files; several files with the same keys follow one another
    #[arg(long, num_args = 1.., value_name = "FILE", help_heading = "Data")]
    pub data: Vec<PathBuf>,
    /// Rename a key of the data to an input
    #[arg(long, value_name = "KEY=INPUT", value_parser = pair(), help_heading = "Data")]
    pub map: Vec<(String, String)>,
    /// What dim 0 of the data counts
    #[arg(long, default_value = "samples", value_parser = ["samples", "steps"], help_heading = "Data")]
    pub layout: String,
    /// Order of the samples
    #[arg(long, default_value = "shuffled", value_parser = ["shuffled", "sequential"], help_heading = "Data")]
    pub order: String,
    /// Feed an input that the data do not have: ones, zeros, arange or @FILE.npy
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair(), help_heading = "Data")]
    pub input: Vec<(String, String)>,
    /// Data to evaluate on
    #[arg(long, num_args = 1.., value_name = "FILE", help_heading = "Data")]
    pub eval_data: Vec<PathBuf>,
    /// Evaluate after every N steps, and at the end
    #[arg(long, value_name = "N", requires = "eval_data", help_heading = "Data")]
    pub eval_every: Option<u64>,

    /// Optimizer steps of the whole run
    #[arg(long, value_name = "N", conflicts_with = "epochs", help_heading = "Training")]
    pub steps: Option<u64>,
    /// Passes over the data, in place of --steps
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub epochs: Option<f64>,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3, help_heading = "Training")]
    pub lr: f64,
    /// constant, linear, cosine, step:EVERY:FACTOR, or @FILE with one rate a line
    #[arg(long, default_value = "constant", value_name = "SCHEDULE", help_heading = "Training")]
    pub lr_schedule: String,
    /// Steps over which the rate rises to --lr
    #[arg(long, default_value_t = 0, value_name = "STEPS", help_heading = "Training")]
    pub warmup: u64,
    /// What linear and cosine schedules end at
    #[arg(long, default_value_t = 0.0, value_name = "LR", help_heading = "Training")]
    pub min_lr: f64,
    /// Of the order of samples and of dropout (default 0, or the checkpoint's)
    #[arg(long, help_heading = "Training")]
    pub seed: Option<u64>,

    /// Fill parameters that have no data from this seed
    #[arg(long, value_name = "SEED", help_heading = "Weights")]
    pub init: Option<u64>,
    /// Fill all weights from --init's seed, those that have data too; constants and tables of the model stay
    #[arg(long, requires = "init", help_heading = "Weights")]
    pub init_all: bool,
    /// How matching parameters begin: GLOB=zeros, GLOB=ones or GLOB=std:S
    #[arg(long, value_name = "GLOB=RULE", value_parser = pair(), requires = "init", help_heading = "Weights")]
    pub init_rule: Vec<(String, String)>,
    /// Start from these weights, by name or alias; not where a checkpoint is resumed
    #[arg(long, value_name = "F.safetensors", help_heading = "Weights")]
    pub weights: Option<PathBuf>,

    /// Save checkpoints here: at the end, and every --save-every steps
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub save_dir: Option<PathBuf>,
    /// Steps from one checkpoint to the next
    #[arg(long, value_name = "N", requires = "save_dir", help_heading = "Checkpoints")]
    pub save_every: Option<u64>,
    /// Delete all but the newest N checkpoints
    #[arg(long, value_name = "N", requires = "save_dir", help_heading = "Checkpoints")]
    pub keep_last: Option<usize>,
    /// auto (the newest of --save-dir), none, or a checkpoint
    #[arg(long, default_value = "none", value_name = "WHAT", value_hint = clap::ValueHint::AnyPath, help_heading = "Checkpoints")]
    pub resume: String,

    /// One JSON object per step
    #[arg(long, value_name = "F.jsonl", help_heading = "Output")]
    pub metrics_file: Option<PathBuf>,
    /// A Chrome trace: a process per rank; see it at ui.perfetto.dev
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    /// Steps from one log line to the next (default: 10, or 1 in a run of at most 20)
    #[arg(long, value_name = "N", help_heading = "Output")]
    pub log_every: Option<u64>,

    /// What ranks compute on: cpu; cuda, NVIDIA GPUs in turn; both, every instruction on both, whose results are compared
    #[arg(long, value_name = "DEVICE", value_parser = ["cpu", "cuda", "both"], default_value = "cpu", help_heading = "Execution")]
    pub device: String,
    /// Products on GPUs: fastest, dcc's own kernels or cuBLASLt's, as timed once; own, dcc's alone
    #[arg(long, value_name = "WHICH", value_parser = ["fastest", "own"], default_value = "fastest", help_heading = "Execution")]
    pub gemm: String,
    /// Attention on GPUs: fastest, dcc's own kernels or cuDNN's, as timed once; own, dcc's alone
    #[arg(long, value_name = "WHICH", value_parser = ["fastest", "own"], default_value = "fastest", help_heading = "Execution")]
    pub attention: String,
    /// How ranks on GPUs exchange: auto, direct where GPUs reach each other and through the hosts else; nccl; host
    #[arg(long, value_name = "HOW", value_parser = ["auto", "nccl", "host"], default_value = "auto", help_heading = "Execution")]
    pub gpu_comm: String,
    /// Compute threads of each rank, at most 64 a core (default: cores / ranks)
    #[arg(long, value_name = "N", help_heading = "Execution")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub instructions: Instructions,
    /// Seconds after which a silent rank counts as hanging
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", help_heading = "Execution")]
    pub timeout: f64,
}

/// Which vector instructions kernels use: of every command that computes.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
pub struct Instructions {
    /// Use no better vector instructions than these, in generated code too (default: the machine's best)
    #[arg(long, value_name = "ISA", value_parser = instruction_sets(), help_heading = "Execution")]
    pub max_isa: Option<String>,
}

impl Instructions {
    /// Limits this process, before it plans its first kernel. Errors: instructions that this machine lacks.
    pub fn limit(&self) -> Result<()> {
        let Some(name) = &self.max_isa else { return Ok(()) };
        let isa = Isa::named(name).ok_or_else(|| format!("there is no instruction set {name}"));
        isa.and_then(Isa::limit).map_err(|what| {
            Error::device(format!("--max-isa {name}: {what}")).help("without --max-isa, the machine's best is used")
        })
    }
}

/// Those of this architecture.
fn instruction_sets() -> PossibleValuesParser {
    PossibleValuesParser::new(Isa::ALL.iter().map(|isa| isa.name()))
}

/// `A=B`, split at the first `=`.
fn pair() -> ValueParser {
    ValueParser::new(|text: &str| {
        let (left, right) = text.split_once('=').ok_or_else(|| format!("`{text}` has no `=`"))?;
        Ok::<(String, String), String>((left.to_owned(), right.to_owned()))
    })
}

impl Flags {
    pub(super) fn data_options(&self, seed: u64) -> Result<data::Options> {
        let fill = |(name, text): &(String, String)| Ok((name.clone(), Fill::parse(text)?));
        Ok(data::Options {
            layout: if self.layout == "steps" { Layout::Steps } else { Layout::Samples },
            order: self.order(),
            seed,
            fills: self.input.iter().map(fill).collect::<Result<_>>()?,
        })
    }

    pub(super) fn order(&self) -> Order {
        if self.order == "sequential" { Order::Sequential } else { Order::Shuffled }
    }

    /// Errors: counts of nothing.
    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("--eval-every", self.eval_every, "the evaluation data are used at the end alone"),
            ("--save-every", self.save_every, "one checkpoint is saved, at the end"),
            ("--keep-last", self.keep_last.map(|count| count as u64), "all checkpoints are kept"),
            ("--log-every", self.log_every, "each tenth step has a line, in short runs each"),
        ];
        if let Some((flag, _, without)) = counts.into_iter().find(|(_, count, _)| *count == Some(0)) {
            return Err(Error::data_option(format!("{flag} 0: it is 1 or more")).help(format!("without {flag}, {without}")));
        }
        Ok(())
    }

    /// Errors: a file to write that is `others` or one that the flags have read, by whatever names.
    pub fn keep_apart(&self, others: &[Named<'_>]) -> Result<()> {
        let files = [("--metrics-file", &self.metrics_file), ("--trace", &self.trace)];
        let written: Vec<Named<'_>> = files.iter().filter_map(|(flag, path)| Some((*flag, path.as_deref()?))).collect();
        let lists = [("--data", &self.data), ("--eval-data", &self.eval_data)];
        let data = lists.iter().flat_map(|(flag, paths)| paths.iter().map(|path| (*flag, path.as_path())));
        let weights = self.weights.iter().map(|path| ("--weights", path.as_path()));
        let inputs = self.input.iter().map(|(_, value)| ("--input", value)).chain([("--lr-schedule", &self.lr_schedule)]);
        let inputs = inputs.filter_map(|(flag, value)| Some((flag, Path::new(value.strip_prefix('@')?))));
        let resumed = ("--resume", Path::new(&self.resume));
        let read: Vec<Named<'_>> = data.chain(weights).chain(inputs).chain([resumed]).chain(others.iter().copied()).collect();
        match places::clash(&written, &read) {
            Some(Clash { what, at, help }) => Err(Error::data_option(what).at(at.display()).help(help)),
            None => Ok(()),
        }
    }

    /// The flag that says what weights begin with although there are some, if one does.
    pub(super) fn beginning(&self) -> Option<&'static str> {
        match (&self.weights, self.init_all) {
            (Some(_), _) => Some("--weights"),
            (None, true) => Some("--init-all"),
            (None, false) => None,
        }
    }

    /// Errors: no such schedule, a flag that it has no part for, a file that cannot be read or has too few rates.
    pub(super) fn learning_rate(&self, steps: u64) -> Result<LearningRate> {
        let wrong = |what: String| Error::data_option(format!("--lr-schedule: {what}"));
        let schedule = match self.lr_schedule.strip_prefix('@') {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| Error::io("read rates", path.as_ref(), error))?;
                Schedule::rates(&text).map_err(|what| wrong(what).at(path))?
            }
            None => Schedule::parse(&self.lr_schedule).map_err(wrong)?,
        };
        let rate = LearningRate { lr: self.lr, min_lr: self.min_lr, schedule, warmup: self.warmup, steps };
        rate.check().map_err(Error::data_option)?;
        Ok(rate)
    }

    pub(super) fn init_rules(&self) -> Result<Vec<(Glob, Rule)>> {
        let rule = |(glob, text): &(String, String)| {
            let rule = Rule::parse(text).ok_or_else(|| {
                Error::data_option(format!("--init-rule {glob}={text}: no such rule")).help("use zeros, ones or std:S")
            })?;
            Ok((Glob::new(glob), rule))
        };
        self.init_rule.iter().map(rule).collect()
    }

    pub(super) fn checkpoints(&self) -> Option<checkpoint::Options> {
        self.save_dir.clone().map(|dir| checkpoint::Options { dir, keep_last: self.keep_last })
    }

    pub(super) fn resume(&self) -> Resume {
        Resume::parse(&self.resume)
    }

    pub(super) fn timeout(&self) -> Result<Duration> {
        Duration::try_from_secs_f64(self.timeout)
            .ok()
            .filter(|limit| !limit.is_zero())
            .ok_or_else(|| Error::data_option(format!("--timeout {}: not a number of seconds", self.timeout)))
    }

    /// Whether ranks compute on GPUs.
    pub(super) fn is_on_gpus(&self) -> bool {
        self.device != "cpu"
    }

    /// Compute threads of each of `ranks` ranks on this machine.
    pub(super) fn threads(&self, ranks: u32) -> Result<usize> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        match self.threads {
            Some(0) => Err(Error::data_option("--threads 0: a rank computes on at least one")),
            Some(threads) if threads > Pool::most() => {
                let what = format!("--threads {threads}: this machine's processors serve {} at most", Pool::most());
                Err(Error::data_option(what).help("without --threads, the ranks share the processors"))
            }
            Some(threads) => Ok(threads),
            None => Ok((cores / ranks.max(1) as usize).max(1)),
        }
    }
}
