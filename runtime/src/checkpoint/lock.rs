//! One run at a time writes into a folder of checkpoints: whoever does holds a lock on the folder, which ends with its process.

use crate::error::{Error, Result};
use std::fs::{File, Metadata, TryLockError};
use std::path::Path;

/// A folder that this process alone writes checkpoints into, for as long as this lives.
#[derive(Debug)]
pub struct Lock {
    /// Locked, but on file systems that have no locks.
    _folder: File,
    /// Whether others are kept out.
    pub holds: bool,
}

impl Lock {
    /// Errors: another process holds it; there is no such folder.
    pub fn take(dir: &Path) -> Result<Lock> {
        let failed = |error| Error::io("lock", dir, error);
        let folder = File::open(dir).map_err(failed)?;
        match folder.try_lock() {
            Ok(()) => Ok(Lock { _folder: folder, holds: true }),
            Err(TryLockError::Error(_)) => Ok(Lock { _folder: folder, holds: false }),
            Err(TryLockError::WouldBlock) => {
                let holder = folder.metadata().ok().and_then(|found| holder(&found));
                let who = holder.map_or(String::new(), |process| format!(", process {process}"));
                Err(Error::data_option(format!("another run saves checkpoints there{who}"))
                    .at(dir.display())
                    .help("wait for its end, or name another folder"))
            }
        }
    }

    /// As `take`, if the folder is there.
    pub fn existing(dir: &Path) -> Result<Option<Lock>> {
        if dir.is_dir() { Lock::take(dir).map(Some) } else { Ok(None) }
    }
}

/// The process that holds a lock on a file, where the system tells.
#[cfg(target_os = "linux")]
fn holder(file: &Metadata) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    let device = file.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let place = format!("{major:02x}:{minor:02x}:{}", file.ino());
    // `1: FLOCK  ADVISORY  WRITE 4711 08:02:1234 0 EOF`
    std::fs::read_to_string("/proc/locks").ok()?.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_lock = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&&*place);
        words.get(4).filter(|_| is_lock)?.parse().ok()
    })
}

#[cfg(not(target_os = "linux"))]
fn holder(_: &Metadata) -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_writer() {
        let dir = std::env::temp_dir().join(format!("dcc-lock-{}", std::process::id()));
        assert!(Lock::existing(&dir).unwrap().is_none());
        std::fs::create_dir_all(&dir).unwrap();
        let held = Lock::take(&dir).unwrap();
        assert!(held.holds);
        let refused = Lock::existing(&dir).unwrap_err();
        assert!(refused.to_string().contains("another run saves checkpoints there"), "{refused}");
        assert!(refused.report().at.as_ref().is_some_and(|at| at.contains("dcc-lock-")));
        drop(held);
        assert!(Lock::take(&dir).is_ok());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
