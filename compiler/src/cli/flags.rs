//! The flags that say what to compile, shared by `compile`, `run` and `eval`, and the options that they mean.

use crate::compile::{BatchNorm, Options};
use crate::error::{Error, Result};
use crate::import::{self, Dropout};
use crate::loss::{LossKind, LossOptions};
use crate::optimizer::{AdamDecay, Decay, MuonScale, Optimizer, OptimizerOptions};
use crate::plan::{Parallel, Pin, Schedule, Zero, batch};
use crate::precision::{LossScale, Mixed};
use crate::recompute::{Recompute, Repeats};
use crate::train::{Names, Selection, TrainingOptions};
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};
use dcc_program::{DType, Glob};

/// Chunks of the model on a rank.
const MAX_CHUNKS: u32 = 32;

#[derive(Clone, Debug, clap::Args)]
pub struct CompileFlags {
    /// Data-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Parallelism")]
    pub dp: u32,
    /// Context-parallel ranks, which share each sample's sequence
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Parallelism")]
    pub cp: u32,
    /// Expert-parallel ranks: data-parallel ranks that hold different experts of each mixture
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Parallelism")]
    pub ep: u32,
    /// Tensor-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Parallelism")]
    pub tp: u32,
    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Parallelism")]
    pub pp: u32,
    /// Shard what lies between the products that --tp splits along the sequence; by itself where --memory-limit demands it
    #[arg(long, help_heading = "Parallelism")]
    pub sequence_parallel: bool,
    /// What data-parallel ranks share instead of each holding all of it: nothing, optimizer state (1), gradients too (2), parameters
    /// too (3)
    #[arg(long, value_name = "0..3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3),
          help_heading = "Parallelism")]
    pub zero: u8,
    /// The same as --zero 3
    #[arg(long, conflicts_with = "zero", help_heading = "Parallelism")]
    pub fsdp: bool,
    /// Data-parallel ranks that share one copy; the others hold further copies (default: all share one)
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub shard_group: Option<u32>,
    /// Order of microbatches in the pipeline; zb-h1, zb-h2 and zb-v put gradients of weights off, auto searches for the fastest order
    #[arg(long, default_value = "1f1b", value_parser = Schedule::ALL.map(Schedule::name), help_heading = "Parallelism")]
    pub schedule: String,
    /// Chunks of the model on each rank of the pipeline, by interleaved 1F1B (zb-v has two)
    #[arg(long, value_name = "V", help_heading = "Parallelism")]
    pub virtual_stages: Option<u32>,
    /// What backward computes again instead of keeping it: nothing, what takes little time, everything, or as little as --memory-limit
    /// allows
    #[arg(long, default_value = "budget", value_parser = ["none", "selective", "full", "budget"], help_heading = "Parallelism")]
    pub recompute: String,
    /// Fix how matching parameters are sharded: GLOB=Shard(DIM)@tp or GLOB=Replicate
    #[arg(long, value_name = "GLOB=SHARDING", help_heading = "Parallelism")]
    pub param: Vec<String>,
    /// Refuse plans that need more on a rank: bytes, or 512MiB, 16GiB
    #[arg(long, value_name = "SIZE", help_heading = "Parallelism")]
    pub memory_limit: Option<String>,

    /// Samples of one optimizer step (default: a static export's own batch)
    #[arg(long, value_name = "B", help_heading = "Batch")]
    pub global_batch_size: Option<u64>,
    /// Samples of one microbatch on one data-parallel rank
    #[arg(long, value_name = "m", help_heading = "Batch")]
    pub micro_batch_size: Option<u64>,
    /// Microbatches of one step (default: as many as stages, where that divides)
    #[arg(long, value_name = "M", help_heading = "Batch")]
    pub grad_accum: Option<u32>,

    /// Size of a symbolic dim
    #[arg(long, value_name = "NAME=N", help_heading = "Model")]
    pub dim: Vec<String>,
    /// Which dim of an input counts samples (default: dim 0), or none
    #[arg(long, value_name = "INPUT=D|none", help_heading = "Model")]
    pub batch_dim: Vec<String>,
    /// Share that Dropout nodes drop: as-exported, off, or a number
    #[arg(long, default_value = "as-exported", value_name = "P", help_heading = "Model")]
    pub dropout: String,
    /// Statistics of BatchNorm while training: of the global batch, of each rank's part of a microbatch, or the running ones
    #[arg(long, default_value = "batch", value_parser = ["batch", "local", "frozen"], help_heading = "Model")]
    pub batch_norm: String,
    /// Parts of the global batch that BatchNorm takes statistics of, one by one (default 1); microbatches must divide it
    #[arg(long, value_name = "G", help_heading = "Model")]
    pub bn_groups: Option<u64>,
    /// Floats to compute in (default: as exported); bf16 and f16: matrix products, convolutions and attention, with f32 parameters,
    /// statistics and sums
    #[arg(long, value_parser = ["f32", "f64", "bf16", "f16"], help_heading = "Model")]
    pub dtype: Option<String>,
    /// What gradients are accumulated and reduced in, under --dtype bf16 (default f32)
    #[arg(long, value_parser = ["f32", "bf16"], help_heading = "Model")]
    pub grad_dtype: Option<String>,
    /// What parameters are kept in that products alone read, under --dtype bf16 (default f32); bf16: no f32 copy, updates are rounded
    /// stochastically
    #[arg(long, value_parser = ["f32", "bf16"], help_heading = "Model")]
    pub param_dtype: Option<String>,
    /// What --dtype f16 multiplies the loss by, at first (default 65536)
    #[arg(long, value_name = "S", help_heading = "Model")]
    pub loss_scale: Option<f64>,
    /// Factor of the scale after --loss-scale-interval steps without overflow (default 2)
    #[arg(long, value_name = "F", help_heading = "Model")]
    pub loss_scale_growth: Option<f64>,
    /// Factor of the scale after a step that overflows, and is skipped (default 0.5)
    #[arg(long, value_name = "F", help_heading = "Model")]
    pub loss_scale_backoff: Option<f64>,
    /// Steps without overflow after which the scale grows (default 2000)
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub loss_scale_interval: Option<u32>,

    /// What to minimise
    #[arg(long, default_value = "auto", help_heading = "Loss",
          value_parser = ["auto", "cross-entropy", "next-token", "mse", "l1", "bce", "output"])]
    pub loss: String,
    /// The model output that the loss is of (default: the first)
    #[arg(long, value_name = "NAME", help_heading = "Loss")]
    pub output: Option<String>,
    /// The dim of that output that counts classes (default: by the labels' shape; without data 1 of images, else the last)
    #[arg(long, value_name = "D", help_heading = "Loss")]
    pub class_dim: Option<usize>,
    /// Labels of this value do not count
    #[arg(long, value_name = "LABEL", default_value_t = -100, allow_negative_numbers = true, help_heading = "Loss")]
    pub ignore_index: i64,
    /// Share of each label that is spread over all classes
    #[arg(long, value_name = "S", default_value_t = 0.0, help_heading = "Loss")]
    pub label_smoothing: f64,
    /// Labels are each class's share: floats of the output's shape (default: if those of the data have it)
    #[arg(long, help_heading = "Loss")]
    pub soft_labels: bool,

    /// With PyTorch's formulas, those of the paper for lion and lamb
    #[arg(long, default_value = "adamw", help_heading = "Optimizer",
          value_parser = ["sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", "lamb", "adafactor", "muon"])]
    pub optimizer: String,
    /// Of sgd and rmsprop (default 0) and muon (default 0.95)
    #[arg(long, value_name = "MU", help_heading = "Optimizer")]
    pub momentum: Option<f64>,
    /// Of sgd
    #[arg(long, help_heading = "Optimizer")]
    pub nesterov: bool,
    /// Of adam, adamw, lamb and muon's adamw (default 0.9,0.999), of lion (default 0.9,0.99)
    #[arg(long, value_name = "B1,B2", help_heading = "Optimizer")]
    pub betas: Option<String>,
    /// Of all but sgd and lion (default 1e-8; adagrad 1e-10, lamb 1e-6, adafactor 1e-3)
    #[arg(long, help_heading = "Optimizer")]
    pub eps: Option<f64>,
    /// Of rmsprop's average of squares (default 0.99)
    #[arg(long, value_name = "A", help_heading = "Optimizer")]
    pub alpha: Option<f64>,
    /// Rmsprop by the variance of gradients, not their mean square
    #[arg(long, help_heading = "Optimizer")]
    pub centered: bool,
    /// What muon multiplies a matrix's rate by: sqrt(max(1, rows/columns)), or 0.2 sqrt(max(rows, columns)) (default original)
    #[arg(long, value_name = "SCALE", help_heading = "Optimizer", value_parser = ["original", "match-rms-adamw"])]
    pub muon_scale: Option<String>,
    /// L2 of sgd, adam, adagrad and rmsprop, part of lamb's direction, decoupled in the others
    #[arg(long, value_name = "W", default_value_t = 0.0, help_heading = "Optimizer")]
    pub weight_decay: f64,
    /// Which parameters decay: all, or those with two dims or more
    #[arg(long, default_value = "all", value_parser = ["all", "matrices"], help_heading = "Optimizer")]
    pub decay: String,
    /// These do not decay
    #[arg(long, value_name = "GLOB", help_heading = "Optimizer")]
    pub no_decay: Vec<String>,
    /// Scale gradients down to this global norm
    #[arg(long, value_name = "NORM", help_heading = "Optimizer")]
    pub grad_clip: Option<f64>,

    /// Only these parameters train; @FILE has exact names, one a line
    #[arg(long, value_name = "GLOB|@FILE", help_heading = "Parameters")]
    pub train: Vec<String>,
    /// These do not
    #[arg(long, value_name = "GLOB|@FILE", help_heading = "Parameters")]
    pub freeze: Vec<String>,
}

impl Default for CompileFlags {
    /// What a command without any of these flags means.
    fn default() -> CompileFlags {
        CompileFlags::parse([]).expect("no flag is required")
    }
}

impl CompileFlags {
    /// From words such as `--tp 2`, without the name of a command.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> std::result::Result<CompileFlags, clap::Error> {
        let command = <CompileFlags as clap::Args>::augment_args(clap::Command::new("flags").no_binary_name(true));
        command.try_get_matches_from(words).and_then(|matches| CompileFlags::from_arg_matches(&matches))
    }

    /// The flags as options. Reads the files that `--train @FILE` and `--freeze @FILE` name.
    pub fn options(&self) -> Result<Options> {
        Ok(Options {
            import: import::Options {
                dims: self.dim.iter().map(|text| dim(text)).collect::<Result<_>>()?,
                batch_dims: self.batch_dim.iter().map(|text| batch_dim(text)).collect::<Result<_>>()?,
                dropout: dropout(&self.dropout)?,
                ..import::Options::default()
            },
            batch: self.batch()?,
            batch_norm: self.batch_norm()?,
            // Of mixed precision, what is not in half floats is f32.
            dtype: named(&self.dtype).map(|dtype| if dtype == DType::F64 { dtype } else { DType::F32 }),
            training: TrainingOptions {
                loss: self.loss()?,
                optimizer: self.optimizer()?,
                selection: self.selection()?,
                mixed: self.mixed()?,
                ..TrainingOptions::default()
            },
            parallel: self.parallel()?,
            memory_limit: self.memory_limit.as_deref().map(|text| size("--memory-limit", text)).transpose()?,
            ..Options::default()
        })
    }

    /// Errors: gradients or parameters in a half type that the rest is not in, a scale of the loss of anything but f16 or out of range.
    fn mixed(&self) -> Result<Option<Mixed>> {
        let half = named(&self.dtype).filter(|dtype| dtype.bytes() == 2);
        let given = self.dtype.as_ref().map_or("no --dtype".to_owned(), |dtype| format!("--dtype {dtype}"));
        let gradients = named(&self.grad_dtype).unwrap_or(DType::F32);
        if self.grad_dtype.is_some() && (half.is_none() || gradients != DType::F32 && Some(gradients) != half) {
            let what = format!("--grad-dtype {} with {given}", gradients.name());
            return Err(Error::usage(what).help("it belongs to --dtype bf16 (--dtype f16 has f32 gradients)"));
        }
        let parameters = named(&self.param_dtype).unwrap_or(DType::F32);
        if self.param_dtype.is_some() && (half.is_none() || parameters != DType::F32 && Some(parameters) != half) {
            let what = format!("--param-dtype {} with {given}", parameters.name());
            return Err(Error::usage(what).help("it belongs to --dtype bf16 (--dtype f16 has f32 parameters)"));
        }
        let scale = self.scale()?;
        if half != Some(DType::F16) && scale != LossScale::default() {
            return Err(Error::usage(format!("a loss scale with {given}")).help("it belongs to --dtype f16"));
        }
        let scale = (half == Some(DType::F16)).then_some(scale);
        Ok(half.map(|half| Mixed { half, gradients, parameters, scale }))
    }

    fn scale(&self) -> Result<LossScale> {
        let default = LossScale::default();
        let scale = LossScale {
            initial: self.loss_scale.unwrap_or(default.initial),
            growth: self.loss_scale_growth.unwrap_or(default.growth),
            backoff: self.loss_scale_backoff.unwrap_or(default.backoff),
            interval: self.loss_scale_interval.unwrap_or(default.interval),
        };
        scale.check()?;
        Ok(scale)
    }

    fn batch_norm(&self) -> Result<BatchNorm> {
        match (self.batch_norm.as_str(), self.bn_groups) {
            ("batch", None) => Ok(BatchNorm::Batch { groups: 1 }),
            ("batch", Some(groups)) if groups > 0 => Ok(BatchNorm::Batch { groups }),
            ("local", None) => Ok(BatchNorm::Local),
            ("frozen", None) => Ok(BatchNorm::Frozen),
            (_, Some(0)) => Err(Error::usage("--bn-groups 0: a batch has at least one group")),
            (other, _) => Err(Error::usage(format!("--bn-groups does not belong to --batch-norm {other}"))),
        }
    }

    /// Batches that no machine could hold are typing errors.
    fn batch(&self) -> Result<batch::Given> {
        for (flag, value) in [("--global-batch-size", self.global_batch_size), ("--micro-batch-size", self.micro_batch_size)] {
            if value.is_some_and(|value| value == 0 || value > 1 << 32) {
                let what = format!("{flag} {}: a batch has 1 to {} samples", value.unwrap_or(0), 1u64 << 32);
                return Err(Error::usage(what));
            }
        }
        let (global, micro, accumulate) = (self.global_batch_size, self.micro_batch_size, self.grad_accum);
        Ok(batch::Given { global, micro, accumulate, ..batch::Given::default() })
    }

    fn parallel(&self) -> Result<Parallel> {
        for (flag, value) in [("--dp", self.dp), ("--cp", self.cp), ("--ep", self.ep), ("--tp", self.tp), ("--pp", self.pp)] {
            if value == 0 {
                return Err(Error::usage(format!("{flag} 0: an axis has at least one rank")));
            }
        }
        let ranks = [self.dp, self.cp, self.ep, self.tp, self.pp].iter().try_fold(1u32, |product, &n| product.checked_mul(n));
        if ranks.is_none_or(|ranks| ranks > 1 << 24) {
            let Self { dp, cp, ep, tp, pp, .. } = self;
            let others = [("--cp", cp), ("--ep", ep)].into_iter().filter(|(_, ranks)| **ranks > 1);
            let others: String = others.map(|(flag, ranks)| format!(" × {flag} {ranks}")).collect();
            let what = format!("--dp {dp}{others} × --tp {tp} × --pp {pp} is more than 16777216 ranks");
            return Err(Error::usage(what));
        }
        if self.sequence_parallel && self.tp == 1 {
            let what = "--sequence-parallel without ranks that share a layer";
            return Err(Error::usage(what).help("add --tp 2 or more"));
        }
        let zero = if self.fsdp { Zero::Parameters } else { Zero::ALL[usize::from(self.zero)] };
        self.check_shard_group(zero)?;
        let schedule = Schedule::ALL.into_iter().find(|s| s.name() == self.schedule).expect("the parser has the same list");
        Ok(Parallel {
            dp: self.dp,
            cp: self.cp,
            ep: self.ep,
            tp: self.tp,
            pp: self.pp,
            sequence_parallel: self.sequence_parallel,
            zero,
            shard_group: self.shard_group,
            schedule,
            virtual_stages: self.chunks(schedule)?,
            recompute: match self.recompute.as_str() {
                "none" => Recompute::Fixed(Repeats::NONE),
                "selective" => Recompute::Fixed(Repeats::SELECTIVE),
                "full" => Recompute::Fixed(Repeats::FULL),
                _ => Recompute::Budget,
            },
            pins: self.param.iter().map(|text| Pin::parse(text)).collect::<Result<_>>()?,
            ..Parallel::default()
        })
    }

    /// Errors: no groups of that many ranks, nothing that they share.
    fn check_shard_group(&self, zero: Zero) -> Result<()> {
        let Some(group) = self.shard_group else { return Ok(()) };
        let divides = group > 0 && self.dp > 1 && self.dp.is_multiple_of(group);
        let ranks = || if divides { String::new() } else { format!("--dp, a multiple of {}, and ", group.max(2)) };
        if zero == Zero::Nothing {
            let what = "--shard-group without anything that ranks share";
            return Err(Error::usage(what).help(format!("add {}--zero 1, 2 or 3", ranks())));
        }
        if divides || group == 1 {
            return Ok(());
        }
        let sizes: Vec<String> =
            (1..=self.dp.min(4096)).filter(|n| self.dp.is_multiple_of(*n)).map(|n| n.to_string()).collect();
        let help = match self.dp {
            1 => format!("add --dp, a multiple of {}, or leave out --shard-group", group.max(2)),
            _ => format!("--shard-group can be {}", sizes.join(", ")),
        };
        Err(Error::usage(format!("--shard-group {group} does not divide --dp {}", self.dp)).help(help))
    }

    /// Chunks of the model on each rank. Errors: none, too many, or a schedule that has its own number.
    fn chunks(&self, schedule: Schedule) -> Result<u32> {
        match (self.virtual_stages, schedule) {
            (None, _) => Ok(1),
            (Some(2), Schedule::ZbV) => Ok(1),
            (Some(count @ 1..=MAX_CHUNKS), Schedule::OneFOneB) => Ok(count),
            (Some(1), _) if schedule != Schedule::ZbV => Ok(1),
            (Some(count), Schedule::OneFOneB) => {
                Err(Error::usage(format!("--virtual-stages {count}: a rank has 1 to {MAX_CHUNKS} chunks of the model")))
            }
            (Some(count), other) => {
                let what = format!("--virtual-stages {count} does not belong to --schedule {}", other.name());
                Err(Error::usage(what).help("use --schedule 1f1b, or zb-v, which has two"))
            }
        }
    }

    fn loss(&self) -> Result<LossOptions> {
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return Err(Error::usage(format!("--label-smoothing {} is not between 0 and 1", self.label_smoothing)));
        }
        Ok(LossOptions {
            kind: LossKind::parse(&self.loss).expect("the parser has the same list"),
            output: self.output.clone(),
            class_dim: self.class_dim,
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            soft_labels: self.soft_labels,
            ..LossOptions::default()
        })
    }

    fn optimizer(&self) -> Result<OptimizerOptions> {
        let kind = self.optimizer.as_str();
        let given: [(&str, bool, &[&str]); 7] = [
            ("--momentum", self.momentum.is_some(), &["sgd", "rmsprop", "muon"]),
            ("--nesterov", self.nesterov, &["sgd"]),
            ("--betas", self.betas.is_some(), &["adam", "adamw", "lion", "lamb", "muon"]),
            ("--eps", self.eps.is_some(), &["adam", "adamw", "adagrad", "rmsprop", "lamb", "adafactor", "muon"]),
            ("--alpha", self.alpha.is_some(), &["rmsprop"]),
            ("--centered", self.centered, &["rmsprop"]),
            ("--muon-scale", self.muon_scale.is_some(), &["muon"]),
        ];
        if let Some((flag, _, of)) = given.into_iter().find(|(_, given, of)| *given && !of.contains(&kind)) {
            let help = match of {
                [one] => format!("use --optimizer {one}"),
                [some @ .., last] => format!("use --optimizer {} or {last}", some.join(", ")),
                [] => unreachable!("each flag is of some optimizer"),
            };
            return Err(Error::usage(format!("{flag} does not belong to --optimizer {kind}")).help(help));
        }
        let pair = |default| self.betas.as_deref().map_or(Ok(default), betas);
        let eps = |default| self.eps.unwrap_or(default);
        let momentum = |default| self.momentum.unwrap_or(default);
        let adam = |decay| Ok(Optimizer::Adam { betas: pair((0.9, 0.999))?, eps: eps(1e-8), decay });
        let optimizer = match kind {
            "sgd" => Optimizer::Sgd { momentum: momentum(0.0), nesterov: self.nesterov },
            "adam" => adam(AdamDecay::L2)?,
            "adagrad" => Optimizer::Adagrad { eps: eps(1e-10) },
            "rmsprop" => Optimizer::RmsProp {
                alpha: self.alpha.unwrap_or(0.99),
                eps: eps(1e-8),
                momentum: momentum(0.0),
                centered: self.centered,
            },
            "lion" => Optimizer::Lion { betas: pair((0.9, 0.99))? },
            "lamb" => Optimizer::Lamb { betas: pair((0.9, 0.999))?, eps: eps(1e-6) },
            "adafactor" => Optimizer::Adafactor { eps: eps(1e-3) },
            "muon" => Optimizer::Muon {
                momentum: momentum(0.95),
                scale: match self.muon_scale.as_deref() {
                    Some("match-rms-adamw") => MuonScale::MatchRmsAdamw,
                    _ => MuonScale::Original,
                },
                betas: pair((0.9, 0.999))?,
                eps: eps(1e-8),
            },
            _ => adam(AdamDecay::Decoupled)?,
        };
        let options = OptimizerOptions {
            optimizer,
            weight_decay: self.weight_decay,
            decay: if self.decay == "matrices" { Decay::Matrices } else { Decay::All },
            no_decay: self.no_decay.iter().map(|glob| Glob::new(glob)).collect(),
            grad_clip: self.grad_clip,
        };
        options.check()?;
        Ok(options)
    }

    fn selection(&self) -> Result<Selection> {
        let all = |list: &[String], flag: &str| list.iter().map(|text| names(text, flag)).collect::<Result<_>>();
        Ok(Selection { train: all(&self.train, "--train")?, freeze: all(&self.freeze, "--freeze")? })
    }
}

/// The compile flags of a command line, as words, in the order of the help.
pub fn given(matches: &ArgMatches) -> Vec<String> {
    let command = <CompileFlags as clap::Args>::augment_args(clap::Command::new("flags"));
    let mut words = Vec::new();
    for argument in command.get_arguments() {
        let (id, long) = (argument.get_id().as_str(), argument.get_long().expect("every compile flag is long"));
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        if !argument.get_action().takes_values() {
            words.push(format!("--{long}"));
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            words.extend([format!("--{long}"), value.to_string_lossy().into_owned()]);
        }
    }
    words
}

fn pair<'a>(text: &'a str, flag: &str, form: &str) -> Result<(&'a str, &'a str)> {
    text.rsplit_once('=').ok_or_else(|| Error::usage(format!("{flag} {text} has no `=`")).help(format!("write {flag} {form}")))
}

fn named(dtype: &Option<String>) -> Option<DType> {
    dtype.as_deref().and_then(DType::parse)
}

fn dim(text: &str) -> Result<(String, u64)> {
    let (name, size) = pair(text, "--dim", "NAME=N")?;
    let size = size.parse().ok().filter(|&size: &u64| size > 0);
    let size = size.ok_or_else(|| Error::usage(format!("--dim {text}: the size is no positive number")))?;
    Ok((name.to_owned(), size))
}

fn batch_dim(text: &str) -> Result<(String, Option<u8>)> {
    let (name, dim) = pair(text, "--batch-dim", "INPUT=D or INPUT=none")?;
    let dim = match dim {
        "none" => None,
        dim => Some(dim.parse().map_err(|_| Error::usage(format!("--batch-dim {text}: `{dim}` is no dim and not none")))?),
    };
    Ok((name.to_owned(), dim))
}

fn dropout(text: &str) -> Result<Dropout> {
    match text {
        "as-exported" => Ok(Dropout::AsExported),
        "off" => Ok(Dropout::Off),
        rate => {
            let rate = rate.parse().ok().filter(|rate| (0.0..1.0).contains(rate));
            rate.map(Dropout::Rate)
                .ok_or_else(|| Error::usage(format!("--dropout {text} is neither as-exported, off, nor a number in [0, 1)")))
        }
    }
}

fn betas(text: &str) -> Result<(f64, f64)> {
    let two = text.split_once(',').and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
    two.ok_or_else(|| Error::usage(format!("--betas {text} are not two numbers")).help("write --betas 0.9,0.999"))
}

/// `1024`, `512KiB`, `64MiB`, `16GiB`, `1.5TiB`.
pub fn size(flag: &str, text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        "t" | "tib" => Some(40),
        _ => None,
    };
    let number = digits.parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0);
    match (number, unit) {
        (Some(number), Some(shift)) => Ok((number * (1u64 << shift) as f64) as u64),
        _ => Err(Error::usage(format!("{flag} {text} is no size")).help("write bytes, or a number with KiB, MiB, GiB")),
    }
}

fn names(text: &str, flag: &str) -> Result<Names> {
    let Some(path) = text.strip_prefix('@') else { return Ok(Names::Glob(Glob::new(text))) };
    let lines = std::fs::read_to_string(path)
        .map_err(|error| Error::usage(format!("{flag} {text}: the file cannot be read: {error}")))?;
    let names = lines.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    Ok(Names::File { path: path.to_owned(), names })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        assert_eq!(size("--memory-limit", "1024"), Ok(1024));
        assert_eq!(size("--memory-limit", "1.5GiB"), Ok(3 << 29));
        assert_eq!(size("--memory-limit", "64m"), Ok(64 << 20));
        for bad in ["", "GiB", "-1", "1XB", "nan"] {
            assert_eq!(size("--memory-limit", bad).unwrap_err().code.0, 1, "{bad}");
        }
    }

    #[test]
    fn batch_norm_is_one_of_three() {
        let of =
            |batch_norm: &str, bn_groups| CompileFlags { batch_norm: batch_norm.to_owned(), bn_groups, ..Default::default() };
        let read = |batch_norm, bn_groups| of(batch_norm, bn_groups).batch_norm();
        assert_eq!(read("batch", None), Ok(BatchNorm::Batch { groups: 1 }));
        assert_eq!(read("batch", Some(4)), Ok(BatchNorm::Batch { groups: 4 }));
        assert_eq!((read("local", None), read("frozen", None)), (Ok(BatchNorm::Local), Ok(BatchNorm::Frozen)));
        assert!(read("batch", Some(0)).is_err() && read("local", Some(2)).is_err() && read("frozen", Some(2)).is_err());
    }

    #[test]
    fn flags_parse() {
        assert_eq!(dim("seq=16"), Ok(("seq".to_owned(), 16)));
        assert_eq!(batch_dim("x=none"), Ok(("x".to_owned(), None)));
        assert_eq!(dropout("0.1"), Ok(Dropout::Rate(0.1)));
        assert_eq!(betas("0.9,0.95"), Ok((0.9, 0.95)));
        assert!(dim("seq").is_err() && dim("seq=0").is_err() && batch_dim("x=y").is_err() && dropout("2").is_err());
    }
}
