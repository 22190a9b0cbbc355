//! `dcc bench`: what this machine gives.

mod comm;
mod gemm;
mod machine;
mod step;

use super::failure::Outcome;
use crate::error::Error;
use clap::ArgMatches;
use dcc_kernels::Pool;
use std::ffi::OsString;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Time and bandwidth of collectives between processes of this machine
    Comm(comm::Args),
    /// Speed of matrix products, beside this machine's multiply-add peak
    Gemm(gemm::Args),
    /// Time of a training step and of each of its kernels; takes what `dcc run` takes
    Step(Box<step::Args>),
}

/// `matches`: of `bench`; `words`: the command line after `dcc`.
pub fn run(args: &Args, matches: &ArgMatches, words: &[String]) -> Outcome<i32> {
    match &args.command {
        Command::Comm(args) => comm::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Step(args) => {
            let (_, matches) = matches.subcommand().expect("clap has found one");
            step::run(args, matches, words)
        }
    }
}

/// Compute threads: all cores where none are given.
pub(super) fn threads(given: Option<usize>) -> Outcome<usize> {
    match given {
        Some(0) => Err(Error::usage("--threads 0: it takes at least one to compute").into()),
        Some(threads) if threads > Pool::most() => {
            let what = format!("--threads {threads}: this machine's processors serve {} at most", Pool::most());
            Err(Error::usage(what).help("without --threads, each processor has one").into())
        }
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, |cores| cores.get())),
    }
}

/// Runs this process as a rank of a benchmark if a launcher started it as one; its exit code then.
pub fn worker(mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    (arguments.nth(1)? == comm::RANK).then(|| comm::worker(arguments))
}
