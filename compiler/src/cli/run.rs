//! `dcc run {MODEL.onnx|ART.dcc} --data …`: compiles in memory where it must, then trains; several ranks by executing itself again.

use super::data::Shapes;
use super::failure::Outcome;
use super::flags::{self, CompileFlags};
use super::model::{self, Kind};
use super::{compile, output, tables};
use crate::error::Error;
use clap::ArgMatches;
use dcc_program::artifact::Artifact;
use dcc_runtime::run::{Flags, Source, Summary, launch};
use dcc_runtime::signal::StopSignals;
use std::path::{Path, PathBuf};

#[derive(Clone, clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// The ONNX model, or the artifact that `dcc compile` made of it
    #[arg(value_name = "MODEL.onnx|ART.dcc")]
    source: PathBuf,
    #[command(flatten)]
    pub run: Flags,
    #[command(flatten)]
    compile: CompileFlags,
    /// Print a summary as JSON at the end
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

pub fn run(args: &Args, matches: &ArgMatches, words: &[String]) -> Outcome<i32> {
    let summary = train(args, matches, words)?;
    if args.json {
        output::json(&summary)?;
    }
    Ok(summary.exit())
}

/// Compiles where it must, and trains.
pub fn train(args: &Args, matches: &ArgMatches, words: &[String]) -> Outcome<Summary> {
    let given = flags::given(matches);
    match model::kind(&args.source)? {
        Kind::Artifact => {
            if let Some(flag) = given.first() {
                return Err(Error::usage(format!("{flag} belongs to `dcc compile`: an artifact is compiled already"))
                    .at(args.source.display())
                    .help("drop the flag, or give the .onnx model")
                    .into());
            }
            Ok(launch(Source::File(&args.source), &args.run, &StopSignals::block()?)?)
        }
        Kind::Model => {
            args.run.keep_apart(&[("the model", &args.source)])?;
            let artifact = compiled(args, given, words)?;
            let folder = args.source.parent().unwrap_or(Path::new(""));
            // Until here Ctrl-C has ended the process, which has started no thread.
            let stop = StopSignals::block()?;
            Ok(launch(Source::Built { artifact: &artifact, folder }, &args.run, &stop)?)
        }
        Kind::Checkpoint => Err(Error::usage("run takes a model or an artifact: this is a folder")
            .at(args.source.display())
            .help("continue from a checkpoint with --resume")
            .into()),
    }
}

/// Compiles, and says what came of it. Of all that the compiler made, the artifact alone is kept while ranks train.
fn compiled(args: &Args, given: Vec<String>, words: &[String]) -> Outcome<Artifact> {
    let Flags { data, map, layout, input, .. } = &args.run;
    let shapes = Shapes::read(data, map, layout, input)?;
    let built = compile::build(&args.source, &args.compile, &shapes, given, words)?;
    let report = tables::Report::new(&built);
    let filled = args.run.init.is_some() || args.run.weights.is_some();
    let missing = report.missing().filter(|_| !filled);
    for line in report.head().into_iter().chain(missing).chain([report.planned()]) {
        output::report(&line);
    }
    Ok(built.compiled.artifact)
}
