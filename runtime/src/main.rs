//! `dcc-run`: trains an artifact. The slim binary, without the compiler, for cluster nodes.

#[cfg(target_os = "linux")]
fn main() {
    use clap::Parser;
    use dcc_runtime::run::{self, Flags, Source};
    use std::path::PathBuf;

    /// Train a compiled model (.dcc) on this machine's CPUs, one process per rank
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

    if let Some(code) = run::worker() {
        std::process::exit(code);
    }
    let arguments = Arguments::parse();
    let trained = dcc_runtime::signal::StopSignals::block()
        .and_then(|stop| run::launch(Source::File(&arguments.artifact), &arguments.flags, &stop));
    let code = match trained {
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
    };
    std::process::exit(code);
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("error[DCC0803]: dcc-run needs Linux: shared memory between processes and its wake-ups are Linux's");
    std::process::exit(8);
}
