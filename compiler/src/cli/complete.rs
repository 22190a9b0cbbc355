//! Completing a command that leaves something open: one error that lists all of it and prints the command to type.

use crate::compile::Options;
use crate::error::{Code, Error, Result};
use crate::import::{self, Model};
use crate::loss;

/// What stands in for a size while the rest of the command is tried.
const SIZE: u64 = 8;

/// `error` itself unless it is about something left open; then with everything else that is open, and the whole command.
pub fn complete(error: Error, model: &Model, options: &Options, words: &[String]) -> Error {
    if !error.code.is_question() {
        return error;
    }
    let mut flags = missing(&error);
    if flags.is_empty() {
        return error;
    }
    let mut completed = Error { help: None, ..error };
    let mut trial = options.clone();
    for flag in &flags {
        fill(&mut trial, flag);
    }
    if let Err(second) = attempt(model, &trial)
        && second.code.is_question()
    {
        // The same question again says nothing new.
        if second.what != completed.what {
            flags.extend(missing(&second));
            completed = completed.note(second.what);
        }
    }
    let command: Vec<String> = words.iter().map(|word| quoted(word)).chain(flags).collect();
    completed.help(format!("dcc {}", command.join(" ")))
}

/// The flags that the help of an error asks for, such as `--dim seq=N`.
fn missing(error: &Error) -> Vec<String> {
    let help = error.help.as_deref().unwrap_or_default();
    if let Some(list) = help.strip_prefix("add ") {
        let mut flags: Vec<String> = Vec::new();
        for word in list.split_whitespace() {
            match flags.last_mut() {
                Some(last) if !word.starts_with("--") => *last += &format!(" {word}"),
                _ => flags.push(word.to_owned()),
            }
        }
        return flags;
    }
    match error.code {
        Code::UNCLEAR_LOSS => vec!["--loss KIND".to_owned()],
        _ => Vec::new(),
    }
}

fn fill(options: &mut Options, flag: &str) {
    match flag.split_once(' ') {
        Some(("--dim", value)) => {
            let name = value.trim_end_matches("=N").to_owned();
            options.import.dims.insert(name, SIZE);
        }
        Some(("--batch-dim", value)) => {
            options.import.batch_dims.insert(value.trim_end_matches("=0").to_owned(), Some(0));
        }
        Some(("--global-batch-size", _)) => {
            options.batch.global = Some(SIZE * u64::from(options.parallel.dp) * u64::from(options.parallel.ep));
        }
        _ => {}
    }
}

/// As far as questions arise: the import and the choice of a loss.
fn attempt(model: &Model, options: &Options) -> Result<()> {
    let import_options = import::Options { global_batch: options.batch.global, ..options.import.clone() };
    let imported = import::onnx(model, &import_options)?;
    let mut loss_options = options.training.loss.clone();
    loss_options.loss_outputs = imported.outputs.iter().filter(|o| o.is_loss).map(|o| o.name.clone()).collect();
    let mut graph = imported.graph;
    loss::attach(&mut graph, &loss_options).map(drop)
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@+%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_a_help() {
        let error = Error::unbound("open").help("add --global-batch-size B --dim seq=N");
        assert_eq!(missing(&error), ["--global-batch-size B", "--dim seq=N"]);
        assert_eq!(missing(&Error::unbound("open").help("give labels")), [""; 0]);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(["a.onnx", "*.w", "", "it's"].map(quoted), ["a.onnx", "'*.w'", "''", "'it'\\''s'"]);
    }
}
