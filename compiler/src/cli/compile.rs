//! `dcc compile MODEL [-o OUT.dcc]`: I/O around the pure compiler, the report, the artifact.

use super::complete::complete;
use super::data::{DataFlags, Shapes};
use super::failure::{self, Outcome};
use super::flags::{self, CompileFlags};
use super::model::{self, Kind, Source};
use super::{output, tables};
use crate::annotations::annotate;
use crate::compile::{Compiled, Options, compile};
use crate::error::Error;
use clap::ArgMatches;
use dcc_program::artifact::{Artifact, Data};
use dcc_runtime::cuda::{self, Target};
use prost::Message;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

/// What a pass made, to be printed.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Emit {
    Graph,
    Placed,
    Programs,
    #[value(name = "annotated.onnx")]
    Annotated,
}

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// The ONNX model
    model: PathBuf,
    /// The artifact to write (default: MODEL with the extension dcc)
    #[arg(short, long, value_name = "OUT.dcc")]
    out: Option<PathBuf>,
    /// Copy weights into the artifact, so that it can travel alone
    #[arg(long)]
    embed_weights: bool,
    /// Put machine code for NVIDIA GPUs into the artifact, which then needs no NVRTC to run on them: sm_80, sm_90a, …; compute_80 is PTX, for all
    /// others
    #[arg(long, value_name = "ARCH,…", value_delimiter = ',', value_parser = target)]
    arch: Vec<Target>,
    /// Print what a pass made; writes no artifact unless --out says so
    #[arg(long, value_name = "WHAT", conflicts_with = "json")]
    emit: Option<Emit>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: CompileFlags,
    #[command(flatten)]
    data: DataFlags,
}

/// A model and what became of it.
pub struct Built {
    pub source: Source,
    pub compiled: Compiled,
}

pub fn run(args: &Args, matches: &ArgMatches, words: &[String]) -> Outcome<i32> {
    let start = Instant::now();
    let instead = match model::kind(&args.model)? {
        Kind::Model => None,
        Kind::Artifact => Some("an artifact, which is compiled already"),
        Kind::Checkpoint => Some("a folder"),
    };
    if let Some(what) = instead {
        let error = Error::usage(format!("compile takes a model: this is {what}"));
        return Err(error.at(args.model.display()).help("name the .onnx file").into());
    }
    let is_written = args.emit.is_none() || args.out.is_some();
    if !args.arch.is_empty() && !is_written {
        let error = Error::usage("--arch: its code would stand in an artifact, and none is written");
        return Err(error.help("name one by --out").into());
    }
    let out = args.out.clone().unwrap_or_else(|| args.model.with_extension("dcc"));
    let DataFlags { data, map, layout, input } = &args.data;
    let written = [("--out", is_written.then_some(&*out))];
    let read = data.iter().map(|path| ("--data", &**path)).chain([("the model", &*args.model)]);
    output::apart(&written, &read.collect::<Vec<_>>())?;
    let shapes = Shapes::read(data, map, layout, input)?;
    let mut built = build(&args.model, &args.flags, &shapes, flags::given(matches), words)?;
    let beside: Vec<PathBuf> = built.source.external_bytes.keys().map(|name| built.source.folder.join(name)).collect();
    output::apart(&written, &beside.iter().map(|path| ("a file of the model's tensors", &**path)).collect::<Vec<_>>())?;
    let compiled = &mut built.compiled;
    if !args.arch.is_empty() {
        compiled.artifact.code = cuda::code(&compiled.artifact, &args.arch)?;
    }
    let bytes = match is_written {
        true => Some(write(&out, &mut compiled.artifact, &built.source.folder, args.embed_weights)?),
        false => None,
    };
    let report = tables::Report::new(&built);
    for line in report.lines() {
        output::report(&line);
    }
    if bytes.is_some() {
        output::status("Finished", &format!("{} in {:.2} s", out.display(), start.elapsed().as_secs_f64()));
    }
    match args.emit {
        Some(what) => emit(what, &built)?,
        None if args.json => output::json(&report.json(&out, bytes))?,
        None => {}
    }
    Ok(0)
}

fn target(text: &str) -> Result<Target, String> {
    Target::parse(text).map_err(|error| error.report().what.clone())
}

/// Compiles the model at `path`. `given`: the compile flags for the artifact; `words`: the command, for errors that complete it.
pub fn build(path: &Path, flags: &CompileFlags, shapes: &Shapes, given: Vec<String>, words: &[String]) -> Outcome<Built> {
    let source = model::open(path)?;
    let mut options = flags.options()?;
    shapes.apply(&source.model, flags, &mut options);
    let options = Options { name: source.name.clone(), flags: given, external_bytes: source.external_bytes.clone(), ..options };
    let compiled =
        compile(&source.model, &options).map_err(|error| shapes.explain(complete(error, &source.model, &options, words)))?;
    Ok(Built { source, compiled })
}

/// Writes the artifact; its size. Paths of tensors become relative to its folder, or their bytes part of it.
fn write(out: &Path, artifact: &mut Artifact, model_folder: &Path, embed: bool) -> Outcome<u64> {
    let here = |folder: &Path| if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder.to_owned() };
    let folder = here(out.parent().unwrap_or(Path::new("")));
    let absolute = |folder: &Path| folder.canonicalize().map_err(|error| failure::io("find the folder", folder, error));
    let between = relative(&absolute(&folder)?, &absolute(&here(model_folder))?);
    for tensor in &mut artifact.tensors {
        if embed {
            let bytes = tensor.bytes(model_folder).map_err(|error| failure::artifact(error, out))?;
            tensor.data = bytes.map_or(Data::Absent, Data::Embedded);
        } else if let Data::File { path, .. } = &mut tensor.data {
            *path = format!("{between}{path}");
        }
    }
    output::file(out, |file| artifact.write(file))?;
    std::fs::metadata(out).map(|file| file.len()).map_err(|error| failure::io("read", out, error))
}

/// `../models/` from one absolute folder to another, empty where they are the same.
fn relative(from: &Path, to: &Path) -> String {
    let parts = |path: &Path| path.components().map(|part: Component| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let (from, to) = (parts(from), parts(to));
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n("../".to_owned(), from.len() - common);
    up.chain(to[common..].iter().map(|part| format!("{}/", part.to_string_lossy()))).collect()
}

fn emit(what: Emit, built: &Built) -> Outcome<()> {
    let compiled = &built.compiled;
    match what {
        Emit::Graph => output::data(&compiled.training.graph.to_string()),
        Emit::Placed => output::data(&compiled.placed.to_string()),
        Emit::Programs => {
            let programs = compiled.artifact.train.iter().chain(&compiled.artifact.eval);
            output::data(&programs.map(dcc_program::text::print).collect::<Vec<_>>().join("\n"))
        }
        Emit::Annotated => output::bytes(&annotate(&built.source.model, compiled).encode_to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_relative_to_each_other() {
        let check = |from: &str, to: &str| relative(from.as_ref(), to.as_ref());
        assert_eq!(check("/a/b", "/a/b"), "");
        assert_eq!(check("/a/b", "/a/c/d"), "../c/d/");
        assert_eq!(check("/a", "/a/b"), "b/");
    }
}
