//! The launcher's loop: sleeps in poll until a rank speaks, ends or the user asks to stop.

use super::failure::{self, Failure};
use super::{Launch, Message, Outcome, STOPPED, VARIABLE};
use crate::comm::{Segment, Stop, shm};
use crate::error::{Error, Result};
use crate::signal::StopSignals;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Ranks that outlive a failed one have this long to say why they end too.
const GRACE: Duration = Duration::from_millis(400);
/// How often silence is looked for.
const LOOK: Duration = Duration::from_millis(500);

/// The running ranks. Dropping it kills those that are left.
pub struct Watch {
    segment: Segment,
    timeout: Duration,
    ranks: Vec<Rank>,
    failures: Vec<Failure>,
    /// When the ranks that are left are killed.
    deadline: Option<Instant>,
    stops: u32,
}

struct Rank {
    child: Child,
    /// Readable once the process has ended.
    pidfd: OwnedFd,
    out: Option<ChildStdout>,
    /// What came of an unfinished line.
    line: Vec<u8>,
    status: Option<ExitStatus>,
    failed: Option<Error>,
    beats: u64,
    changed: Instant,
}

impl Watch {
    pub fn start(launch: &Launch) -> Result<Watch> {
        let file = shm::create(&launch.layout)?;
        let segment = shm::control(&file, &launch.layout)?;
        let mut watch =
            Watch { segment, timeout: launch.timeout, ranks: Vec::new(), failures: Vec::new(), deadline: None, stops: 0 };
        for rank in 0..launch.layout.world() {
            let spawned = Rank::spawn(launch, rank, &file)?;
            tracing::info!(rank, pid = spawned.child.id(), "started");
            watch.ranks.push(spawned);
        }
        Ok(watch)
    }

    pub fn run(mut self, stop: &StopSignals, receive: &mut dyn FnMut(u32, Message)) -> Result<Outcome> {
        while self.ranks.iter().any(|rank| rank.status.is_none()) {
            self.sleep(stop)?;
            for rank in 0..self.ranks.len() {
                self.ranks[rank].listen(rank as u32, receive);
                self.reap(rank, receive)?;
            }
            self.heed(stop)?;
            self.find_silent();
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.kill();
            }
        }
        let stopped = self.ranks.iter().any(|rank| rank.status.and_then(|s| s.code()) == Some(STOPPED));
        match failure::first(std::mem::take(&mut self.failures)) {
            Some(error) => Err(error),
            None if stopped => Ok(Outcome::Stopped),
            None => Ok(Outcome::Finished),
        }
    }

    fn sleep(&self, stop: &StopSignals) -> Result<()> {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            fds.push(PollFd::new(&rank.pidfd, PollFlags::IN));
            fds.extend(rank.out.as_ref().map(|out| PollFd::new(out, PollFlags::IN)));
        }
        let until = self.deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()).min(LOOK));
        let until = rustix::event::Timespec { tv_sec: until.as_secs() as i64, tv_nsec: i64::from(until.subsec_nanos()) };
        match rustix::event::poll(&mut fds, Some(&until)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system("wait for the ranks", error)),
        }
    }

    /// Notes the end of a rank; a bad one ends its peers' waits at once.
    fn reap(&mut self, index: usize, receive: &mut dyn FnMut(u32, Message)) -> Result<()> {
        let rank = &mut self.ranks[index];
        if rank.status.is_some() {
            return Ok(());
        }
        let Some(status) = rank.child.try_wait().map_err(|error| Error::system("wait for a rank", error))? else {
            return Ok(());
        };
        rank.status = Some(status);
        tracing::info!(rank = index, %status, "ended");
        rank.listen(index as u32, receive);
        if !matches!(status.code(), Some(0 | STOPPED)) || rank.failed.is_some() {
            let (number, error) = (index as u32, rank.failed.take());
            self.failures.push(Failure { rank: number, status, error, place: self.segment.place(number) });
            self.segment.declare_dead(number);
            self.end_soon();
        }
        Ok(())
    }

    fn end_soon(&mut self) {
        self.deadline.get_or_insert_with(|| Instant::now() + GRACE);
    }

    /// The first request stops the ranks at their next step boundary, a second one at once.
    fn heed(&mut self, stop: &StopSignals) -> Result<()> {
        if stop.take() == Stop::Continue {
            return Ok(());
        }
        self.stops += 1;
        self.segment.request_stop();
        if self.stops == 1 {
            return Ok(());
        }
        self.kill();
        Err(Error::second_stop())
    }

    /// Ranks that wait report a silent peer themselves; here count those for which nobody waits.
    fn find_silent(&mut self) {
        if self.deadline.is_some() {
            return;
        }
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let number = number as u32;
            let beats = self.segment.beats(number);
            if beats != rank.beats || self.segment.waiting_on(number).is_some() {
                (rank.beats, rank.changed) = (beats, Instant::now());
            }
            // Before its first step a rank loads and compiles; after its last it saves.
            let counts = rank.status.is_none() && beats > 0 && !self.segment.is_finished(number);
            let silent = rank.changed.elapsed();
            // Twice the timeout: a peer's own report says more, and comes first.
            if counts && silent > 2 * self.timeout {
                let place = self.segment.place(number);
                let error = Error::hang(format!("rank {number} is silent for {:.1} s", silent.as_secs_f64()))
                    .at(format!("rank {number} at {place}"))
                    .help("if a rank may take that long, raise --timeout");
                rank.failed = Some(error);
                self.deadline = Some(Instant::now());
                return;
            }
        }
    }

    fn kill(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            // It may have ended by itself in this moment.
            let _ = rank.child.kill();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.kill();
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.child.wait();
        }
    }
}

impl Rank {
    fn spawn(launch: &Launch, rank: u32, file: &OwnedFd) -> Result<Rank> {
        let failed = |error: std::io::Error| Error::system(&format!("start rank {rank}"), error).at(launch.program.display());
        let mut child = Command::new(&launch.program)
            .args(&launch.arguments)
            .env(VARIABLE, format!("{rank}/{}/{}", launch.layout.world(), std::process::id()))
            .stdin(Stdio::from(file.try_clone().map_err(failed)?))
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let out = child.stdout.take().expect("stdout is piped");
        let pid = Pid::from_child(&child);
        let prepared = rustix::fs::fcntl_setfl(&out, rustix::fs::OFlags::NONBLOCK)
            .and_then(|()| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
        match prepared {
            Ok(pidfd) => {
                let (line, changed) = (Vec::new(), Instant::now());
                Ok(Rank { child, pidfd, out: Some(out), line, status: None, failed: None, beats: 0, changed })
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(error.into()))
            }
        }
    }

    /// Takes what the rank has written; never waits.
    fn listen(&mut self, number: u32, receive: &mut dyn FnMut(u32, Message)) {
        let mut buffer = [0; 8192];
        while let Some(out) = &self.out {
            match rustix::io::read(out.as_fd(), &mut buffer) {
                Ok(0) => self.out = None,
                Ok(bytes) => self.take(&buffer[..bytes], number, receive),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, bytes: &[u8], number: u32, receive: &mut dyn FnMut(u32, Message)) {
        self.line.extend_from_slice(bytes);
        while let Some(end) = self.line.iter().position(|&byte| byte == b'\n') {
            let line = &self.line[..end];
            // Something printed where only messages belong: better shown than lost.
            let shown = |_| Message::Note(String::from_utf8_lossy(line).trim_end().to_owned());
            let message = serde_json::from_slice(line).unwrap_or_else(shown);
            self.line.drain(..=end);
            match message {
                Message::Failed(error) => self.failed = Some(error),
                message => receive(number, message),
            }
        }
    }
}
