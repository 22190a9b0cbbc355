//! The command line: arguments, files and printing around the pure compiler. One file per subcommand.
//!
//! stdout is data and stays empty on failure; stderr is talk. Exit codes: 0 done, 1 bug, 2 usage, 3 model, 4 no such plan,
//! 5 damaged file, 6 a rank failed, 7 hang, 8 environment, 9 numerical, 75 stopped on request.

mod checkpoint;
mod compile;
mod complete;
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
pub mod verify;

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
    if let Some(code) = dcc_runtime::run::worker() {
        return code;
    }
    run(std::env::args_os().collect())
}

/// Runs a command line, the name of the program included. Never panics.
fn run(arguments: Vec<OsString>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(|| execute(arguments)));
    match result {
        Ok(Ok(code)) => code,
        Ok(Err(failure)) => {
            output::talk(&failure.text());
            failure.exit()
        }
        // The hook has said why.
        Err(_) => 1,
    }
}

fn execute(arguments: Vec<OsString>) -> Outcome<i32> {
    let (cli, matches) = match parse(&arguments) {
        Ok(parsed) => parsed,
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            output::data(&error.render().to_string())?;
            return Ok(0);
        }
        Err(error) => return Err(Failure::Arguments(error)),
    };
    trace(cli.verbose);
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
        Command::Explain(args) => explain::run(&args),
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
