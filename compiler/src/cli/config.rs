//! Options that the command line leaves out: from variables `DCC_…`, then from `dcc.toml`, then each flag's default.
//!
//! There is one definition of every option, its flag in clap: names of keys and variables come from it, and what is configured
//! becomes words of the command line, `--tp=2`, which clap parses and checks as if they had been typed.

mod catalog;
mod environment;
mod file;
mod resolve;
mod show;
#[cfg(test)]
mod tests;
mod value;

use super::failure::{self, Outcome};
use catalog::Catalog;
use clap::ArgMatches;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use value::Value;

pub use resolve::{Applied, Used};
pub use show::{Args, run};

/// Where a setting stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    File { path: String, line: usize },
    Variable(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { path, line } => write!(f, "{path}:{line}"),
            Origin::Variable(name) => write!(f, "{name}"),
        }
    }
}

/// A value for a flag of one command, or of all below a name.
#[derive(Clone, Debug, PartialEq)]
struct Setting {
    /// Names of the command, from the outside; empty for what holds for all.
    scope: Vec<String>,
    key: String,
    value: Value,
    origin: Origin,
}

/// All that is configured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    settings: Vec<Setting>,
    /// As messages name it.
    file: Option<String>,
    /// Where its relative paths begin; empty for the working directory.
    folder: PathBuf,
    /// Of variables that look like ours and are not.
    pub warnings: Vec<String>,
}

/// The variable, and the flag, that names the file.
const FILE: &str = "config";
/// `--config none`: no file.
const NO_FILE: &str = "none";

impl Config {
    /// Reads the file that `given` names, else `DCC_CONFIG`, else the nearest `dcc.toml`; and the environment. Errors: a file
    /// that cannot be read or is no TOML, an unknown key.
    pub fn load(command: &clap::Command, given: Option<&Path>) -> Outcome<Config> {
        let variables: Vec<(String, OsString)> =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect();
        let name = environment::variable(&[], FILE);
        let named = variables.iter().find(|(variable, value)| *variable == name && !value.is_empty());
        let given = given.map(Path::to_owned).or_else(|| named.map(|(_, value)| PathBuf::from(value)));
        let path = match given {
            Some(path) if path == Path::new(NO_FILE) => None,
            Some(path) => Some(path),
            None => nearest()?,
        };
        let catalog = Catalog::new(command);
        let mut config = Config::default();
        if let Some(path) = path {
            let text = std::fs::read_to_string(&path).map_err(|error| failure::io("read the configuration", &path, error))?;
            config = Config::of_file(&catalog, &text, &path)?;
        }
        environment::read(&catalog, &variables, &mut config)?;
        Ok(config)
    }

    fn of_file(catalog: &Catalog, text: &str, path: &Path) -> Outcome<Config> {
        let name = path.display().to_string();
        let settings = file::read(catalog, text, &name)?;
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Config { settings, file: Some(name), folder, warnings: Vec::new() })
    }
}

/// `dcc.toml` of the working directory, or of the first folder above that has one.
fn nearest() -> Outcome<Option<PathBuf>> {
    let here = std::env::current_dir().map_err(|error| failure::io("find", Path::new("."), error))?;
    let mut up = PathBuf::new();
    for folder in here.ancestors() {
        if folder.join(NAME).is_file() {
            return Ok(Some(up.join(NAME)));
        }
        up.push("..");
    }
    Ok(None)
}

const NAME: &str = "dcc.toml";

/// The arguments with what is configured for their command. `left_out` names the flags that this command line cannot take, for what
/// it is about. Arguments that make no command come back as they are: their error is clap's.
pub fn configured(
    command: &clap::Command,
    arguments: Vec<OsString>,
    left_out: impl Fn(&[String], &ArgMatches) -> Vec<String>,
) -> Outcome<Applied> {
    let untouched = |arguments| Ok(Applied { arguments, used: Used::default() });
    let Ok(matches) = command.clone().ignore_errors(true).try_get_matches_from(&arguments) else { return untouched(arguments) };
    let (path, leaf) = leaf(&matches);
    // The pages of error codes are needed when the file is wrong.
    if path.is_empty() || path[0] == "explain" {
        return untouched(arguments);
    }
    let config = Config::load(command, given_file(leaf).as_deref())?;
    for warning in &config.warnings {
        super::output::talk(&format!("warning: {warning}"));
    }
    let left_out = left_out(&path, leaf);
    config.apply(command, &path, leaf, arguments, &left_out)
}

/// `--config FILE`.
fn given_file(matches: &ArgMatches) -> Option<PathBuf> {
    matches.get_one::<PathBuf>(FILE).cloned()
}

/// The innermost command and its matches.
fn leaf(matches: &ArgMatches) -> (Vec<String>, &ArgMatches) {
    let (mut path, mut leaf) = (Vec::new(), matches);
    while let Some((name, inner)) = leaf.subcommand() {
        path.push(name.to_owned());
        leaf = inner;
    }
    (path, leaf)
}
