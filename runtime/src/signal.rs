//! SIGTERM and SIGINT as something to read: no handler, no global state.

use crate::comm::Stop;
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A request that follows another so soon is the same: `timeout` asks its child and then the child's whole process group.
const ECHO: Duration = Duration::from_millis(100);

/// Receives the requests to stop that this process gets from now on.
#[derive(Debug)]
pub struct StopSignals {
    signals: OwnedFd,
    last: Mutex<Option<Instant>>,
}

impl StopSignals {
    /// Call before any thread is started: threads inherit what is blocked. Children start with nothing blocked.
    pub fn block() -> Result<StopSignals> {
        let failed = |action: &str| Error::system(action, std::io::Error::last_os_error());
        // SAFETY: `sigemptyset` initialises the set before anything reads it; a zeroed set is a valid value of the type.
        let set = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGTERM);
            libc::sigaddset(&mut set, libc::SIGINT);
            set
        };
        // SAFETY: the set is initialised, and no old mask is asked for.
        if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } != 0 {
            return Err(failed("block signals"));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(failed("watch signals"));
        }
        // SAFETY: the kernel just made this descriptor, and nobody else has it.
        Ok(StopSignals::of(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn of(signals: OwnedFd) -> StopSignals {
        StopSignals { signals, last: Mutex::new(None) }
    }

    /// Whether a request came since the last call; never waits.
    pub fn take(&self) -> Stop {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        if !rustix::io::read(&self.signals, &mut info).is_ok_and(|bytes| bytes > 0) {
            return Stop::Continue;
        }
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now - last < ECHO) {
            return Stop::Continue;
        }
        *last = Some(now);
        Stop::Requested
    }
}

/// Of a process that trains in threads of its own: whether it was asked to stop.
#[derive(Debug, Default)]
pub struct Requests(AtomicBool);

impl Requests {
    /// Whether a request came; true from then on.
    pub fn take(&self) -> Stop {
        if self.0.load(Relaxed) { Stop::Requested } else { Stop::Continue }
    }
}

impl StopSignals {
    /// Runs `body`, which looks at the requests at its steps' ends, while a thread waits for them. The second one ends this process at
    /// once, with its message: threads cannot be ended from outside.
    pub fn heeded<T>(&self, body: impl FnOnce(&Requests) -> Result<T>) -> Result<T> {
        let failed = |error: rustix::io::Errno| Error::system("wait for signals", error);
        let (over, done) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
        let requests = Requests::default();
        std::thread::scope(|scope| {
            let listen = || self.listen(&over, &requests);
            let listener = std::thread::Builder::new().name("signals".to_owned());
            listener.spawn_scoped(scope, listen).map_err(|error| Error::system("start a thread", error))?;
            let result = body(&requests);
            // The listener sees its other end closed.
            drop(done);
            result
        })
    }

    fn listen(&self, over: &OwnedFd, requests: &Requests) {
        loop {
            let mut fds = [PollFd::new(self, PollFlags::IN), PollFd::new(over, PollFlags::IN)];
            let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            // However it returns, both are looked at.
            let _ = rustix::event::poll(&mut fds, Some(&limit));
            if !fds[1].revents().is_empty() {
                return;
            }
            if self.take() == Stop::Requested && requests.0.swap(true, Relaxed) {
                let error = Error::second_stop();
                eprintln!("{error}");
                crate::cuda::end(error.exit());
            }
        }
    }
}

impl AsFd for StopSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

#[cfg(test)]
impl StopSignals {
    /// A request is a byte written to the first result: tests cannot block the signals of their whole process.
    pub fn pipe() -> (OwnedFd, StopSignals) {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).expect("a pipe");
        (write, StopSignals::of(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_and_its_echo_are_one() {
        let (write, signals) = StopSignals::pipe();
        let ask = || rustix::io::write(&write, &[1; 128]).map(drop).unwrap();
        assert_eq!(signals.take(), Stop::Continue);
        ask();
        ask();
        assert_eq!([signals.take(), signals.take(), signals.take()], [Stop::Requested, Stop::Continue, Stop::Continue]);
        std::thread::sleep(2 * ECHO);
        ask();
        assert_eq!(signals.take(), Stop::Requested);
    }
}
