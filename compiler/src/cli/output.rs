//! What leaves the process: data to stdout, talk to stderr, files that are there whole or not at all.

use super::failure::{self, Outcome};
use crate::error::Error;
use dcc_runtime::places::{self, Clash, Named};
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

/// Writes a file under a temporary name beside it, then renames it: no reader ever sees a part of it. Links are followed; devices and
/// pipes are written to as they are.
pub fn file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Outcome<()> {
    let written = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(found) if !found.is_file() => straight(path, write),
        _ => places::target(path).and_then(|target| whole(&target, write)),
    };
    written.map_err(|error| failure::io("write", path, error))
}

/// Takes back what `file` wrote, if it is a file.
pub fn remove(path: &Path) {
    // It may be gone already.
    let target = places::target(path).ok().filter(|target| target.is_file());
    let _ = target.map(std::fs::remove_file);
}

fn straight(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::new(File::options().write(true).open(path)?);
    write(&mut out)?;
    out.flush()
}

fn whole(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let temporary: PathBuf = path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let written = (|| {
        let mut out = BufWriter::new(File::create(&temporary)?);
        write(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    // It may not even have been made.
    written.inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

/// Errors: a file to write that is read as well, or two that are one.
pub fn apart(written: &[(&str, Option<&Path>)], read: &[Named<'_>]) -> Outcome<()> {
    let written: Vec<Named<'_>> = written.iter().filter_map(|(flag, path)| Some((*flag, (*path)?))).collect();
    match places::clash(&written, read) {
        Some(Clash { what, at, help }) => Err(Error::usage(what).at(at.display()).help(help).into()),
        None => Ok(()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// The control of a link is what it leads to; of a pipe, that it is one still.
    #[test]
    fn links_are_followed_and_pipes_written_to() {
        let folder = std::env::temp_dir().join(format!("dcc-output-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("sub")).expect("a folder");
        let at = |name: &str| folder.join(name);
        let put = |name: &str| file(&at(name), |out| out.write_all(name.as_bytes()));
        let read = |name: &str| std::fs::read_to_string(at(name)).expect("a file");
        std::os::unix::fs::symlink("sub/real", at("link")).expect("a link");
        for _ in 0..2 {
            assert!(put("link").is_ok() && at("link").is_symlink());
            assert_eq!(read("sub/real"), "link");
        }
        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo runs");
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = at("pipe");
            move || std::fs::read_to_string(pipe)
        });
        assert!(put("pipe").is_ok() && !at("pipe").is_file());
        assert_eq!(reader.join().expect("a thread").expect("a pipe"), "pipe");
        assert!(put("sub").is_err() && put("sub/none/file").is_err());
        ["link", "pipe"].iter().for_each(|name| remove(&at(name)));
        let left = ["link", "sub/real", "pipe"].map(|name| at(name).symlink_metadata().is_ok());
        assert_eq!(left, [true, false, true]);
        std::fs::remove_dir_all(folder).expect("removed");
    }
}
