//! What leaves the process: data to stdout, talk to stderr, files that are there whole or not at all.

use super::failure::{self, Outcome};
use crate::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Writes to stdout. A reader that has gone away is no failure.
pub fn data(text: &str) -> Outcome<()> {
    write(text.as_bytes())
}

/// Bytes to stdout. Errors: stdout is a terminal.
pub fn bytes(bytes: &[u8]) -> Outcome<()> {
    if io::stdout().is_terminal() {
        return Err(Error::usage("this is a binary file: a terminal cannot show it").help("write it with `> FILE`").into());
    }
    write(bytes)
}

fn write(bytes: &[u8]) -> Outcome<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failure::io("write", Path::new("stdout"), error)),
        _ => Ok(()),
    }
}

/// A JSON value to stdout.
pub fn json(value: &impl serde::Serialize) -> Outcome<()> {
    data(&(serde_json::to_string_pretty(value).expect("plain data") + "\n"))
}

/// Lines to stderr; the word before the first colon in red where they are an error.
pub fn talk(text: &str) {
    let text = match text.split_once(": ") {
        Some((head, rest)) if head.starts_with("error") => format!("{}: {rest}", paint(head, "31")),
        Some((head, rest)) if head == "warning" => format!("{}: {rest}", paint(head, "33")),
        _ => text.to_owned(),
    };
    // Without a stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "{text}");
}

/// A line of a report: `   Reading what` and its like with their verb in color.
pub fn report(line: &str) {
    match line.trim_start().split_once(' ') {
        Some((verb @ ("Reading" | "Planning"), what)) => status(verb, what),
        _ => talk(line),
    }
}

/// `   Reading what` with the verb in bold green.
pub fn status(verb: &str, what: &str) {
    talk(&format!("{}{} {what}", " ".repeat(10_usize.saturating_sub(verb.len())), paint(verb, "32")));
}

/// Width of the terminal that stderr is, if it is one.
pub fn columns() -> Option<usize> {
    terminal_size::terminal_size_of(io::stderr()).map(|(width, _)| usize::from(width.0))
}

fn paint(text: &str, color: &str) -> String {
    match io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) {
        true => format!("\x1b[1;{color}m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// Writes a file under a temporary name in its folder, then renames it: no reader ever sees a part of it.
pub fn file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Outcome<()> {
    let failed = |error: io::Error| failure::io("write", path, error);
    if path.is_dir() {
        return Err(failed(io::Error::from(io::ErrorKind::IsADirectory)));
    }
    let name = path.file_name().ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
    let temporary: PathBuf = path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let written = (|| {
        let mut out = BufWriter::new(File::create(&temporary)?);
        write(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    written.map_err(|error| {
        // It may not even have been made.
        let _ = std::fs::remove_file(&temporary);
        failed(error)
    })
}
