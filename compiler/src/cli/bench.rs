//! `dcc bench`: what this machine gives.

mod comm;

use super::failure::Outcome;
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
}

pub fn run(args: &Args) -> Outcome<i32> {
    match &args.command {
        Command::Comm(args) => comm::run(args),
    }
}

/// Runs this process as a rank of a benchmark if a launcher started it as one; its exit code then.
pub fn worker(mut arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    (arguments.nth(1)? == comm::RANK).then(|| comm::worker(arguments))
}
