//! `dcc checkpoint convert CHECKPOINT`: other files with the same run in them.
//!
//! Any plan loads any checkpoint; this is for what else reads them: one file to send, the files that a certain plan writes, tensors
//! for other programs.

use crate::cli::failure::Outcome;
use crate::cli::{output, verify};
use dcc_runtime::checkpoint::{Checkpoint, Key, Layout, RunState, rewrite, write_safetensors};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("form").required(true).multiple(true))]
pub struct Args {
    /// A checkpoint, or a folder of several: then the newest
    checkpoint: PathBuf,
    /// Write a checkpoint into this folder: of one rank, unless --like says otherwise
    #[arg(long, value_name = "DIR", group = "form")]
    save_dir: Option<PathBuf>,
    /// Write it as the ranks of this artifact would
    #[arg(long, value_name = "ART.dcc", requires = "save_dir")]
    like: Option<PathBuf>,
    /// Write all tensors whole, the optimizer's state as NAME:STATE
    #[arg(long, value_name = "F.safetensors", group = "form")]
    safetensors: Option<PathBuf>,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let (path, mut checkpoint) = super::open(&args.checkpoint)?;
    let like = args.like.as_deref().map(|path| ("--like", path));
    let read: Vec<_> = like.into_iter().chain([("the checkpoint", &*path)]).collect();
    output::apart(&[("--safetensors", args.safetensors.as_deref())], &read)?;
    // Before anything is written.
    checkpoint.verify()?;
    if let Some(dir) = &args.save_dir {
        let written = folder(&mut checkpoint, dir, args.like.as_deref(), &path)?;
        output::status("Converted", &format!("{} to {}", path.display(), written.display()));
    }
    if let Some(file) = &args.safetensors {
        let mut damage = None;
        let written = output::file(file, |out| {
            write_safetensors(&mut checkpoint, out).unwrap_or_else(|error| {
                let text = error.to_string();
                damage = Some(error);
                Err(std::io::Error::other(text))
            })
        });
        match damage {
            Some(error) => return Err(error.into()),
            None => written?,
        }
        output::status("Converted", &format!("{} to {}", path.display(), file.display()));
    }
    Ok(0)
}

fn folder(checkpoint: &mut Checkpoint, dir: &Path, like: Option<&Path>, source: &Path) -> Outcome<PathBuf> {
    let mut state = checkpoint.run().clone();
    let layout = match like {
        Some(path) => {
            let artifact = verify::load(path)?;
            let layout = Layout::of(&artifact).map_err(|error| error.at(path.display()))?;
            let left_out = layout.missing(checkpoint);
            if !left_out.is_empty() {
                output::talk(&format!("note: {} has no place for {}", path.display(), some(&left_out)));
            }
            let axes = artifact.train.first().map_or(&[][..], |program| &program.mesh.axes);
            state.mesh = axes.iter().map(|axis| (axis.name.clone(), axis.size)).collect();
            layout
        }
        None => {
            state.mesh = Vec::new();
            Layout::whole(checkpoint)
        }
    };
    state.description = described(&state, layout.ranks());
    let written = rewrite(checkpoint, &layout, &state, dir);
    written.map_err(|error| error.at(source.display()).into())
}

/// `mlp.onnx on dp 2, tp 2`.
fn described(state: &RunState, ranks: usize) -> String {
    let model = state.description.split(" on ").next().unwrap_or_default();
    let axes: Vec<String> = state.mesh.iter().map(|(name, size)| format!("{name} {size}")).collect();
    match axes.is_empty() {
        true => format!("{model} on {ranks} rank, converted"),
        false => format!("{model} on {}, converted", axes.join(", ")),
    }
}

fn some(keys: &[&Key]) -> String {
    let names: Vec<String> = keys.iter().take(4).map(|key| key.to_string()).collect();
    let more = if keys.len() > 4 { format!(" and {} more", keys.len() - 4) } else { String::new() };
    names.join(", ") + &more
}
