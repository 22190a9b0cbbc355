//! Which rank failed first, why, and where it was: the one block that a user sees.

use crate::comm::Place;
use crate::error::Error;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// How one rank ended badly.
#[derive(Clone, Debug)]
pub struct Failure {
    pub rank: u32,
    pub status: ExitStatus,
    /// What it said itself.
    pub error: Option<Error>,
    /// Where it last was.
    pub place: Place,
}

impl Failure {
    /// Later failures mostly follow from the first: 0 own reason, 1 death without a word, 2 says that another failed.
    fn order(&self) -> u8 {
        match &self.error {
            Some(error) if error.is_secondary() => 2,
            Some(_) => 0,
            None => 1,
        }
    }

    fn into_error(self) -> Error {
        let Failure { rank, status, error, place } = self;
        if let Some(error) = error {
            return error.at(format!("rank {rank} at {place}"));
        }
        let error = match (status.signal(), status.code()) {
            (Some(signal), _) => {
                let (name, reason) = describe(signal);
                Error::rank(format!("rank {rank} was ended by signal {signal} ({name}): {reason}"))
            }
            (None, Some(101)) => Error::rank(format!("rank {rank} panicked, which is a bug in dcc; its message is above")),
            (None, code) => Error::rank(format!("rank {rank} ended with exit code {}", code.unwrap_or(-1))),
        };
        error.at(format!("rank {rank} at {place}"))
    }
}

/// The error of a run from the failures of its ranks, in the order in which they were seen.
pub fn first(failures: Vec<Failure>) -> Option<Error> {
    failures.into_iter().min_by_key(Failure::order).map(Failure::into_error)
}

fn describe(signal: i32) -> (&'static str, &'static str) {
    match signal {
        libc::SIGKILL => ("SIGKILL", "killed from outside, possibly because the machine is out of memory"),
        libc::SIGBUS => ("SIGBUS", "memory could not be had, or a mapped file was truncated"),
        libc::SIGSEGV => ("SIGSEGV", "an access outside of its memory, which is a bug in dcc"),
        libc::SIGILL => ("SIGILL", "an instruction that this processor does not have"),
        libc::SIGABRT => ("SIGABRT", "it gave up, which is a bug in dcc"),
        libc::SIGFPE => ("SIGFPE", "an integer division by zero, which is a bug in dcc"),
        libc::SIGTERM => ("SIGTERM", "ended from outside"),
        libc::SIGHUP => ("SIGHUP", "its terminal was closed"),
        _ => ("see signal(7)", "ended from outside"),
    }
}
