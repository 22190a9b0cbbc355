//! The command line of `dcc-run`.

use crate::run::{self, Flags, Source};
use crate::signal::StopSignals;
use clap::Parser;
use std::path::PathBuf;

/// Train a compiled model (.dcc) on this machine's CPUs or NVIDIA GPUs
#[derive(clap::Parser)]
#[command(name = "dcc-run", version)]
struct Arguments {
    /// The artifact that `dcc compile` made
    artifact: PathBuf,
    #[command(flatten)]
    flags: Flags,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

/// The whole program; the process exit code.
pub fn main() -> i32 {
    let code = execute();
    crate::cuda::end_if_abandoned(code);
    code
}

fn execute() -> i32 {
    if let Some(code) = run::worker() {
        return code;
    }
    let arguments = Arguments::parse();
    let trained = StopSignals::block().and_then(|stop| run::launch(Source::File(&arguments.artifact), &arguments.flags, &stop));
    match trained {
        Ok(summary) => {
            if arguments.json {
                println!("{}", serde_json::to_string_pretty(&summary).expect("a summary is plain data"));
            }
            summary.exit()
        }
        Err(error) => {
            eprintln!("{error}");
            error.exit()
        }
    }
}
