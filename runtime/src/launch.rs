//! One process per rank: starts them by re-executing itself, watches them, ends the run when one fails.
//!
//! A rank's standard input is the run's shared memory, its standard output a pipe of `Message`s to the launcher, one JSON object
//! per line; its stderr is the launcher's. Ranks form a process group of their own, so that Ctrl-C reaches the launcher alone,
//! and die with it (`PR_SET_PDEATHSIG`). All memory is nameless: however a run ends, nothing is left behind.

mod failure;
#[cfg(test)]
mod tests;
mod watch;

use crate::comm::shm::{self, Arena};
use crate::comm::{Layout, Patience, Peer, Stop};
use crate::error::{Error, Result};
use crate::metrics::{EvalRecord, StepRecord};
use crate::run::RankReport;
use crate::signal::StopSignals;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// `RANK/WORLD/LAUNCHER`, set for ranks only.
const VARIABLE: &str = "DCC_WORKER";
/// Exit code of a rank, and of a run, that stopped on request.
pub const STOPPED: i32 = 75;

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    pub layout: Layout,
    /// The executable; `std::env::current_exe()` in all but tests.
    pub program: PathBuf,
    /// The launcher's own arguments: a rank reads the same command.
    pub arguments: Vec<OsString>,
    /// A rank that shows no sign of life for longer is a hang.
    pub timeout: Duration,
}

/// What a rank tells the launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    Step(StepRecord),
    Eval(EvalRecord),
    /// A checkpoint is complete.
    Saved {
        step: u64,
        path: PathBuf,
    },
    /// What the rank was and did, when it is done.
    Report(RankReport),
    /// A line for the user.
    Note(String),
    /// Why this rank ends.
    Failed(Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Finished,
    /// By SIGTERM or Ctrl-C, at a step boundary, on all ranks.
    Stopped,
}

/// This process, if a launcher started it as a rank.
#[derive(Debug)]
pub struct Worker {
    pub rank: u32,
    pub world: u32,
    line: Vec<u8>,
}

/// Starts all ranks and returns when the last has ended. `receive` gets what they report, with the rank.
///
/// Errors: the first failure, with rank, reason and where the rank was; all ranks are gone then. Call on a thread that lives
/// as long as the run (ranks die with the thread that started them), after `StopSignals::block`.
pub fn supervise(launch: &Launch, stop: &StopSignals, receive: &mut dyn FnMut(u32, Message)) -> Result<Outcome> {
    watch::Watch::start(launch)?.run(stop, receive)
}

impl Launch {
    /// The ranks of this very command.
    pub fn of_this_process(layout: Layout, timeout: Duration) -> Result<Launch> {
        let program = std::env::current_exe().map_err(|error| Error::system("find the own executable", error))?;
        Ok(Launch { layout, program, arguments: std::env::args_os().skip(1).collect(), timeout })
    }
}

/// Whether a launcher started this process as a rank.
pub fn is_worker() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

impl Worker {
    /// Asks first thing in `main`. Errors: the launcher is gone, or the variable was set by hand.
    pub fn from_environment() -> Result<Option<Worker>> {
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let value = value.to_string_lossy();
        let numbers: Vec<u32> = value.split('/').filter_map(|part| part.parse().ok()).collect();
        let [rank, world, launcher] = numbers[..] else {
            return Err(Error::data_option(format!("{VARIABLE}={value} is set by the launcher, not by hand")));
        };
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| Error::system("tie a rank to its launcher", error))?;
        // The launcher may have died before the line above.
        if rustix::process::getppid().map(Pid::as_raw_nonzero).is_none_or(|pid| pid.get() as u32 != launcher) {
            return Err(Error::rank(format!("the launcher of rank {rank} is gone")));
        }
        Ok(Some(Worker { rank, world, line: Vec::with_capacity(512) }))
    }

    /// This rank's end of the run's shared memory. `layout` as the launcher's.
    pub fn attach(&self, layout: &Layout, patience: Patience) -> Result<(Peer, Arena)> {
        if layout.world() != self.world {
            return Err(Error::handshake(format!(
                "the launcher started {} ranks, the program has {}",
                self.world,
                layout.world()
            )));
        }
        let peer = shm::attach(std::io::stdin(), layout, self.rank, patience)?;
        let arena = peer.arena();
        Ok((peer, arena))
    }

    /// Tells the launcher. Errors: it is gone.
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, message).expect("messages are plain data");
        self.line.push(b'\n');
        let mut out = std::io::stdout().lock();
        out.write_all(&self.line).and_then(|()| out.flush()).map_err(|error| Error::system("report to the launcher", error))
    }

    /// The exit code of this rank's process, after telling the launcher about a failure.
    pub fn end(mut self, result: Result<Outcome>) -> i32 {
        match result {
            Ok(Outcome::Finished) => 0,
            Ok(Outcome::Stopped) => STOPPED,
            Err(error) => {
                let exit = error.exit();
                // Without a launcher there is nobody to tell.
                let _ = self.send(&Message::Failed(error));
                exit
            }
        }
    }
}

/// What a rank does with its own SIGTERM: the same as if the launcher had got it.
pub fn forward_stop(signals: &StopSignals, peer: &Peer) {
    if signals.take() == Stop::Requested {
        peer.segment().request_stop();
    }
}
