//! What ends a command: an error of the compiler, of the runtime, or of the arguments, with its text and exit code.

use crate::error::{Code, Error};
use dcc_program::artifact::ArtifactError;
use dcc_runtime::error::Error as RuntimeError;
use std::path::Path;

pub type Outcome<T> = Result<T, Failure>;

pub enum Failure {
    Compiler(Error),
    Runtime(RuntimeError),
    Arguments(clap::Error),
}

impl Failure {
    pub fn exit(&self) -> i32 {
        match self {
            Failure::Compiler(error) => error.code.exit(),
            Failure::Runtime(error) => error.exit(),
            Failure::Arguments(_) => 2,
        }
    }

    pub fn text(&self) -> String {
        match self {
            Failure::Compiler(error) => helped(error.to_string(), error.help.as_ref(), error.code),
            Failure::Runtime(error) => {
                let report = error.report();
                helped(error.to_string(), report.help.as_ref(), Code(report.code))
            }
            Failure::Arguments(error) => arguments(&error.render().to_string()),
        }
    }
}

/// An error that does not say itself what to do points to its page.
fn helped(text: String, help: Option<&String>, code: Code) -> String {
    match help {
        Some(_) => text,
        None => format!("{text}\n  help `dcc explain {code}` says more"),
    }
}

/// clap's text as one of ours.
fn arguments(text: &str) -> String {
    let Some(text) = text.trim_end().strip_prefix("error: ") else { return text.trim_end().to_owned() };
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let mut out = format!("error[DCC0001]: {}", lines.next().unwrap_or_default());
    for line in lines {
        let line = line.trim();
        if line.contains("as a value, use '-- ") {
            continue;
        }
        let line = line.strip_prefix("tip: ").map_or_else(|| format!("note {line}"), |tip| format!("help {tip}"));
        if line.starts_with("note For more information") {
            continue;
        }
        out += &format!("\n  {line}");
    }
    if !out.contains("\n  help ") {
        out += "\n  help `dcc COMMAND --help` lists the flags of a command with their values";
    }
    out
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Compiler(error)
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Failure {
        Failure::Runtime(error)
    }
}

/// A file that cannot be read or written.
pub fn io(action: &str, path: &Path, error: impl std::fmt::Display) -> Failure {
    RuntimeError::io(action, path, error).into()
}

/// An artifact that cannot be used.
pub fn artifact(error: ArtifactError, path: &Path) -> Failure {
    RuntimeError::of_artifact(error).at(path.display()).into()
}
