//! `dcc checkpoint list FOLDER`.

use super::size;
use crate::cli::failure::Outcome;
use crate::cli::output;
use dcc_runtime::checkpoint::{Checkpoint, Condition, Found, survey};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The folder that --save-dir named
    folder: PathBuf,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let found = survey(&args.folder)?;
    if args.json {
        let all: Vec<Value> = found.iter().map(entry).collect();
        output::json(&json!({ "schema": 1, "kind": "checkpoints", "checkpoints": all }))?;
        return Ok(0);
    }
    if found.is_empty() {
        output::talk(&format!("no checkpoints in {}", args.folder.display()));
    }
    output::data(&found.iter().map(|found| line(found) + "\n").collect::<String>())?;
    Ok(0)
}

fn entry(found: &Found) -> Value {
    let mut entry = json!({ "step": found.step, "path": found.path.display().to_string() });
    match &found.condition {
        Condition::Complete(checkpoint) => {
            let run = checkpoint.run();
            entry["condition"] = json!("complete");
            entry["bytes"] = json!(checkpoint.bytes());
            entry["files"] = json!(checkpoint.files().count());
            entry["plan"] = json!(run.description);
            entry["dtypes"] = json!(dtypes(checkpoint));
        }
        Condition::Incomplete => entry["condition"] = json!("incomplete"),
        Condition::Damaged(error) => {
            entry["condition"] = json!("damaged");
            entry["error"] = json!(error.report().what);
        }
    }
    entry
}

fn line(found: &Found) -> String {
    let step = found.step;
    match &found.condition {
        Condition::Complete(checkpoint) => {
            let dtypes = dtypes(checkpoint).into_iter().collect::<Vec<_>>().join(" ");
            let size = size(checkpoint.bytes());
            format!("{step:>8}  complete    {size:>12}  {dtypes:<4}  {}", checkpoint.run().description)
        }
        Condition::Incomplete => format!("{step:>8}  incomplete  {}", found.path.display()),
        Condition::Damaged(error) => format!("{step:>8}  damaged     {}", error.report().what),
    }
}

/// Of weights.
fn dtypes(checkpoint: &Checkpoint) -> BTreeSet<&'static str> {
    checkpoint.tensors().filter(|(key, ..)| key.state.is_none()).map(|(_, dtype, _)| dtype.name()).collect()
}
