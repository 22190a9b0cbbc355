//! `dcc config show`: what counts for each command, and where it comes from; a `dcc.toml` that says the same.

use super::catalog::{Catalog, Flag, Leaf, Takes};
use super::{Config, environment};
use crate::cli::failure::Outcome;
use crate::cli::output;
use crate::error::Error;
use serde_json::{Value, json};
use std::path::Path;
use toml::de::DeValue;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show what dcc.toml and the environment set
    Show(ShowArgs),
}

#[derive(clap::Args)]
struct ShowArgs {
    /// Of this command only, such as `run` or `checkpoint verify`
    command: Vec<String>,
    /// Say where each value comes from
    #[arg(long)]
    origin: bool,
    /// Also show defaults, and what is not set
    #[arg(long)]
    all: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// What counts for a flag.
struct Effective<'a> {
    leaf: &'a Leaf,
    flag: &'a Flag,
    /// None where nothing sets it and it has no default.
    texts: Option<Vec<String>>,
    origin: String,
}

pub fn run(args: &Args, command: &clap::Command, file: Option<&Path>) -> Outcome<i32> {
    let Action::Show(args) = &args.action;
    let config = Config::load(command, file)?;
    let catalog = Catalog::new(command);
    if !catalog.has_scope(&args.command) {
        let what = format!("no command `{}`", args.command.join(" "));
        return Err(Error::usage(what).help("`dcc --help` lists the commands").into());
    }
    let mut all = Vec::new();
    for leaf in catalog.leaves.iter().filter(|leaf| leaf.path.starts_with(&args.command)) {
        for flag in &leaf.flags {
            let taken = config.effective(&catalog, &leaf.path, flag)?;
            let (texts, origin) = match taken {
                Some(taken) => (Some(taken.texts), taken.origin.to_string()),
                None if !args.all => continue,
                None if flag.default.is_empty() => (None, "not set".to_owned()),
                None => (Some(flag.default.clone()), "default".to_owned()),
            };
            all.push(Effective { leaf, flag, texts, origin });
        }
    }
    match args.json {
        true => output::json(&value(&config, &all))?,
        false => output::data(&text(&all, args.origin))?,
    }
    Ok(0)
}

fn value(config: &Config, all: &[Effective<'_>]) -> Value {
    let options = all.iter().map(|one| {
        let Effective { leaf, flag, texts, origin } = one;
        json!({
            "command": leaf.path.join(" "), "key": flag.long, "values": texts, "origin": origin,
            "variable": environment::variable(&leaf.path, &flag.long), "help": flag.help,
        })
    });
    json!({ "schema": 1, "kind": "configuration", "file": config.file, "options": options.collect::<Vec<_>>() })
}

fn text(all: &[Effective<'_>], origin: bool) -> String {
    let mut out = String::new();
    let mut table = None;
    for Effective { leaf, flag, texts, origin: from } in all {
        if table != Some(&leaf.path) {
            out += &format!("{}[{}]\n", if table.is_some() { "\n" } else { "" }, leaf.path.join("."));
            table = Some(&leaf.path);
        }
        let line = match texts {
            Some(texts) => format!("{} = {}", flag.long, literal(flag, texts)),
            None => format!("# {}", flag.long),
        };
        out += &if origin { format!("{line:<40} # {from}\n") } else { line + "\n" };
    }
    out
}

/// As TOML.
fn literal(flag: &Flag, texts: &[String]) -> String {
    let one = |text: &String| {
        let is_number = matches!(DeValue::parse(text).map(|v| v.into_inner()), Ok(DeValue::Integer(_) | DeValue::Float(_)));
        // JSON's strings are TOML's.
        if is_number { text.clone() } else { serde_json::to_string(text).expect("a string") }
    };
    match flag.takes {
        Takes::Nothing => (!texts.is_empty() && texts != ["false"]).to_string(),
        Takes::Many => format!("[{}]", texts.iter().map(one).collect::<Vec<_>>().join(", ")),
        Takes::Count | Takes::One => texts.first().map_or(String::new(), one),
    }
}
