//! `--trace FILE`: a Chrome trace, a process per rank and a thread per stream; steps are spans of the host.
//!
//! Each rank writes a part of its own beside FILE while it runs; the launcher joins the parts when the run ends, however it ends.

use super::now_ns;
use crate::error::{Error, Result};
use crate::places;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Compute,
    /// Waiting for, and doing, transfers.
    Comm,
    /// Steps, from batch in hand to weights updated: `step N`.
    Host,
}

/// One rank's part.
#[derive(Debug)]
pub struct Trace {
    file: BufWriter<File>,
    path: PathBuf,
    rank: u32,
}

/// What an instruction does in a run: the arguments of its span.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The action with local shapes: equal for equal work.
    pub kernel: String,
    /// Where it comes from in the model.
    pub origin: String,
    /// Multiplications and additions of matrix products, convolutions and attention.
    pub flops: u64,
    /// Of operands and results, each once.
    pub bytes: u64,
}

#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'a str,
    pid: u32,
    tid: u32,
    /// Microseconds.
    ts: f64,
    dur: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<&'a Work>,
}

#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
    ph: &'a str,
    pid: u32,
    tid: u32,
    args: NameArgs,
}

#[derive(Serialize)]
struct NameArgs {
    name: String,
}

impl Stream {
    const ALL: [Stream; 3] = [Stream::Compute, Stream::Comm, Stream::Host];

    fn name(self) -> &'static str {
        match self {
            Stream::Compute => "compute",
            Stream::Comm => "comm",
            Stream::Host => "host",
        }
    }
}

fn part(path: &Path, rank: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".rank{rank}"));
    name.into()
}

impl Trace {
    pub fn create(path: &Path, rank: u32) -> Result<Trace> {
        let path = part(path, rank);
        let file = BufWriter::new(File::create(&path).map_err(|error| Error::io("write a trace", &path, error))?);
        let mut trace = Trace { file, path, rank };
        trace.write(&Name {
            name: "process_name",
            ph: "M",
            pid: rank,
            tid: 0,
            args: NameArgs { name: format!("rank {rank}") },
        })?;
        for stream in Stream::ALL {
            let args = NameArgs { name: stream.name().to_owned() };
            trace.write(&Name { name: "thread_name", ph: "M", pid: rank, tid: stream as u32, args })?;
        }
        Ok(trace)
    }

    /// What `stream` did from `start_ns` (of `now_ns`) until now.
    pub fn span(&mut self, stream: Stream, name: &str, start_ns: u64, args: Option<&Work>) -> Result<()> {
        let dur = now_ns().saturating_sub(start_ns) as f64 / 1000.0;
        let ts = start_ns as f64 / 1000.0;
        self.write(&Event { name, ph: "X", pid: self.rank, tid: stream as u32, ts, dur, args })
    }

    fn write(&mut self, event: &impl Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.file, event)
            .map_err(std::io::Error::from)
            .and_then(|()| self.file.write_all(b"\n"))
            .map_err(|error| Error::io("write a trace", &self.path, error))
    }

    pub fn finish(mut self) -> Result<()> {
        self.file.flush().map_err(|error| Error::io("write a trace", &self.path, error))
    }
}

/// Errors: a trace cannot be written there. Leaves nothing behind.
pub fn check_writable(path: &Path) -> Result<()> {
    let probe = part(path, u32::MAX);
    let made = match std::fs::metadata(path) {
        // Opening a pipe would wait for its reader.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        Ok(_) => File::options().write(true).open(path).map(drop),
        Err(_) => places::target(path).and_then(|target| File::create_new(&target).and_then(|_| std::fs::remove_file(target))),
    };
    let beside = || File::create(&probe).and_then(|_| std::fs::remove_file(&probe));
    made.and_then(|()| beside()).map_err(|error| Error::io("write a trace", path, error))
}

/// Joins the parts of all ranks into `path` and removes them. A part cut off in mid-line loses that line.
pub fn join(path: &Path, world: u32) -> Result<()> {
    let failed = |error| Error::io("write a trace", path, error);
    let mut out = BufWriter::new(File::create(path).map_err(failed)?);
    let mut separator: &[u8] = b"{\"traceEvents\":[\n";
    for part in (0..world).map(|rank| part(path, rank)) {
        let Ok(file) = File::open(&part) else { continue };
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(failed)?;
            if serde_json::from_slice::<serde::de::IgnoredAny>(&line).is_ok() {
                out.write_all(separator).and_then(|()| out.write_all(&line)).map_err(failed)?;
                separator = b",\n";
            }
        }
        let _ = std::fs::remove_file(&part);
    }
    let empty: &[u8] = if separator.starts_with(b"{") { separator } else { b"" };
    out.write_all(empty).and_then(|()| out.write_all(b"\n]}\n")).and_then(|()| out.flush()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn what_cannot_be_written_is_found_first() {
        let folder = std::env::temp_dir().join(format!("dcc-traced-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, to) in [("new", "made"), ("far", "none/made")] {
            std::os::unix::fs::symlink(to, folder.join(name)).unwrap();
        }
        std::fs::write(folder.join("old"), "old").unwrap();
        let check = |name: &str| check_writable(&folder.join(name)).is_ok();
        assert_eq!(["", "new", "far", "old", "fresh"].map(check), [false, true, false, true, true]);
        assert_eq!(std::fs::read_to_string(folder.join("old")).unwrap(), "old");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn parts_join_to_one_valid_file() {
        let path = std::env::temp_dir().join(format!("dcc-trace-{}.json", std::process::id()));
        for rank in 0..2 {
            let mut trace = Trace::create(&path, rank).unwrap();
            trace.span(Stream::Comm, "wait \"t0\"", now_ns(), None).unwrap();
            trace.finish().unwrap();
        }
        join(&path, 2).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(json["traceEvents"].as_array().unwrap().len(), 10);
        assert!(!part(&path, 0).exists());
        join(&path, 2).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(json["traceEvents"].as_array().unwrap().len(), 0);
        std::fs::remove_file(&path).unwrap();
    }
}
