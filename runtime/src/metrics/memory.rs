//! What this process holds in memory.

use crate::error::{Error, Result};
use std::path::Path;

/// Bytes of this process in memory that are its own: without what it has read of its peers' arenas, which count there.
/// Linux only; the kernel walks the page tables for it, so not for every step.
pub fn resident_bytes() -> Result<u64> {
    let path = Path::new("/proc/self/smaps");
    let text = std::fs::read_to_string(path).map_err(|error| Error::io("read memory use", path, error))?;
    Ok(own_kilobytes(&text) * 1024)
}

/// Sums `Rss` over all mappings but read-only ones of the run's shared memory.
fn own_kilobytes(smaps: &str) -> u64 {
    let mut counts = true;
    let mut total = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match first.strip_suffix(':') {
            // The head of a mapping: `address permissions offset device inode path`.
            None => counts = !(line.contains("/memfd:dcc") && second.starts_with("r--")),
            Some("Rss") if counts => total += second.parse().unwrap_or(0),
            Some(_) => {}
        }
    }
    total
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn peers_arenas_do_not_count() {
        let smaps = "\
7f00-7f10 rw-s 00200000 00:01 77 /memfd:dcc (deleted)
Rss:                 100 kB
Pss:                  50 kB
7f10-7f20 r--s 00400000 00:01 77 /memfd:dcc (deleted)
Rss:                 999 kB
7f20-7f30 r--p 00000000 08:01 12 /usr/lib/libc.so.6
Rss:                   7 kB
";
        assert_eq!(own_kilobytes(smaps), 107);
        let held = vec![1u8; 64 << 20];
        assert!(resident_bytes().unwrap() >= held.len() as u64);
    }
}
