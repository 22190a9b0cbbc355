//! The command line: arguments, files and printing around the pure compiler. One file per subcommand.
//!
//! stdout is data and stays empty on failure; stderr is talk. Exit codes: 0 done, 1 bug, 2 usage, 3 model, 4 no such plan,
//! 5 damaged file, 6 a rank failed, 7 hang, 8 environment, 9 numerical, 75 stopped on request.

mod again;
#[cfg(target_os = "linux")]
mod bench;
mod checkpoint;
mod compile;
mod complete;
mod config;
mod data;
#[cfg(target_os = "linux")]
mod eval;
mod explain;
mod export;
mod failure;
mod flags;
mod inspect;
mod model;
mod output;
#[cfg(target_os = "linux")]
mod run;
mod tables;
mod timeline;
mod typo;
pub mod verify;
mod why;

use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use failure::{Failure, Outcome};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Compile ONNX models into partitioned training programs, and run them
#[derive(Parser)]
#[command(name = "dcc", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on stderr; twice for everything (RUST_LOG selects more finely)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Take options from this file (default: the nearest dcc.toml, here or in a folder above), or none
    #[arg(long, global = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<std::path::PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Compile a model into training programs, one per pipeline stage
    Compile(Box<compile::Args>),
    /// Train: compiles a model where needed and starts one process per rank
    #[cfg(target_os = "linux")]
    Run(Box<run::Args>),
    /// Compute a model's outputs, or a loss and its gradients
    #[cfg(target_os = "linux")]
    Eval(Box<eval::Args>),
    /// Show what a model, an artifact or a checkpoint holds
    Inspect(inspect::Args),
    /// Check an artifact: its bytes, its programs, the files it names; or a model, against tract
    Verify(verify::Args),
    /// Write trained weights as .safetensors or into the ONNX model
    Export(export::Args),
    /// List, show, check and convert checkpoints
    Checkpoint(checkpoint::Args),
    /// Measure what this machine gives
    #[cfg(target_os = "linux")]
    Bench(bench::Args),
    /// Show what dcc.toml and the environment set
    Config(config::Args),
    /// Explain an error code
    Explain(explain::Args),
}

/// The whole program; the process exit code.
pub fn main() -> i32 {
    report_panics();
    #[cfg(target_os = "linux")]
    if dcc_runtime::launch::is_worker() {
        // RUST_LOG reaches the ranks; `-v` is about the launcher.
        trace(0);
    }
    #[cfg(target_os = "linux")]
    if dcc_runtime::launch::is_worker()
        && let Some(code) = bench::worker(std::env::args_os())
    {
        return code;
    }
    #[cfg(target_os = "linux")]
    if let Some(code) = dcc_runtime::run::worker() {
        return code;
    }
    let code = run(std::env::args_os().collect());
    #[cfg(target_os = "linux")]
    dcc_runtime::cuda::end_if_abandoned(code);
    code
}

/// Runs a command line, the name of the program included. Never panics.
fn run(arguments: Vec<OsString>) -> i32 {
    let mut used = config::Used::default();
    let result = catch_unwind(AssertUnwindSafe(|| execute(arguments.clone(), &mut used)));
    match result {
        Ok(Ok(code)) => code,
        Ok(Err(failure)) => {
            output::talk(&used.explain(failure.text(), refused, &arguments));
            failure.exit()
        }
        // The hook has said why.
        Err(_) => 1,
    }
}

/// `used`: what the command line takes of the configuration.
fn execute(arguments: Vec<OsString>, used: &mut config::Used) -> Outcome<i32> {
    let applied = config::configured(&Cli::command(), arguments.clone(), left_out)?;
    *used = applied.used;
    let (cli, matches) = match parse(&applied.arguments) {
        Ok(parsed) => parsed,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            output::data(&error.render().to_string())?;
            return Ok(0);
        }
        Err(error) => return Err(Failure::Arguments(error)),
    };
    trace(cli.verbose);
    if let Some(summary) = used.summary() {
        output::status("Options", &summary);
    }
    if let Some(unused) = used.unused() {
        output::talk(&format!("note: options that this kind of file does not take are not used: {unused}"));
    }
    let words: Vec<String> = arguments.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    match cli.command {
        Command::Compile(args) => compile::run(&args, &matches, &words),
        #[cfg(target_os = "linux")]
        Command::Run(args) => run::run(&args, &matches, &words),
        #[cfg(target_os = "linux")]
        Command::Eval(args) => eval::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        #[cfg(target_os = "linux")]
        Command::Bench(args) => bench::run(&args, &matches, &words),
        Command::Config(args) => config::run(&args, &Cli::command(), cli.config.as_deref()),
        Command::Explain(args) => explain::run(&args),
    }
}

/// Why clap refuses arguments, without the usage that it repeats them in.
fn refused(arguments: &[OsString]) -> Option<String> {
    let text = Cli::command().try_get_matches_from(arguments).err()?.to_string();
    text.split("Usage:").next().map(str::to_owned)
}

/// The flags that a command cannot take for the file that it is about; given on the command line, they are errors.
fn left_out(path: &[String], matches: &ArgMatches) -> Vec<String> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let kind = |argument: &str| model::kind(matches.get_one::<std::path::PathBuf>(argument)?).ok();
    let ids = |command: clap::Command| command.get_arguments().map(|arg| arg.get_id().to_string()).collect::<Vec<String>>();
    let flags = || clap::Command::new("flags");
    match path[..] {
        #[cfg(target_os = "linux")]
        ["run"] | ["bench", "step"] if kind("source") == Some(model::Kind::Artifact) => {
            ids(<flags::CompileFlags as clap::Args>::augment_args(flags()))
        }
        #[cfg(target_os = "linux")]
        ["verify"] if kind("subject") == Some(model::Kind::Artifact) => {
            ids(<verify::ModelFlags as clap::Args>::augment_args(flags()))
        }
        ["verify"] => vec!["model".to_owned()],
        _ => Vec::new(),
    }
}

/// The arguments, and the matches of the subcommand.
fn parse(arguments: &[OsString]) -> Result<(Cli, ArgMatches), clap::Error> {
    let matches = Cli::command().try_get_matches_from(arguments)?;
    let cli = Cli::from_arg_matches(&matches)?;
    let (_, matches) = matches.subcommand().expect("the subcommand is required");
    Ok((cli, matches.clone()))
}

/// A panic is a bug in dcc, but in tract's thread: one block, and a backtrace only where the user asks for one.
fn report_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() == Some(verify::TRACT) {
            return;
        }
        let payload = info.payload();
        let what = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
        let at = info.location().map_or(String::new(), |location| format!("\n  at   {location}"));
        let help = "please report it with the command and the model; RUST_BACKTRACE=1 shows more";
        output::talk(&format!("error[DCC1002]: bug in dcc: {}{at}\n  help {help}", what.unwrap_or("panic")));
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0") {
            default(info);
        }
    }));
}

/// Events to stderr: `-v` info, `-vv` all of ours; RUST_LOG overrides.
fn trace(verbose: u8) {
    use tracing_subscriber::EnvFilter;
    let level = ["warn", "info", "trace"][usize::from(verbose.min(2))];
    let filter = EnvFilter::try_from_default_env();
    if let (Err(error), Some(_)) = (&filter, std::env::var_os("RUST_LOG").filter(|value| !value.is_empty())) {
        output::talk(&format!("warning: RUST_LOG is not used: {error}"));
    }
    let filter = filter.unwrap_or_else(|_| EnvFilter::new(format!("dcc={level},dcc_runtime={level},dcc_kernels={level}")));
    let colors = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colors);
    // Only a second call in one process fails, and keeps the first.
    let _ = subscriber.without_time().try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_consistent() {
        Cli::command().debug_assert();
    }
}
