//! What this process holds in memory.

use crate::error::{Error, Result};
use std::ops::Range;
use std::path::Path;

/// Part of this process's addresses, and how much of it is in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub addresses: Range<usize>,
    /// `r-xp`: readable, not writable, executable, private.
    pub permissions: String,
    /// The file that it shows, or what the kernel calls it; empty where it shows none.
    pub path: String,
    /// Bytes in memory.
    pub resident: u64,
    /// Those of them that are not the file's, or not any more.
    pub anonymous: u64,
}

/// Linux only; the kernel walks the page tables for it, so not for every step.
pub fn mappings() -> Result<Vec<Mapping>> {
    let path = Path::new("/proc/self/smaps");
    let text = std::fs::read_to_string(path).map_err(|error| Error::io("read memory use", path, error))?;
    Ok(parse(&text))
}

/// Bytes of this process in memory that are its own: without what it has read of its peers' arenas, which count there.
pub fn resident_bytes() -> Result<u64> {
    Ok(own_bytes(&mappings()?))
}

/// All mappings but read-only ones of the run's shared memory.
fn own_bytes(mappings: &[Mapping]) -> u64 {
    let is_peers = |mapping: &Mapping| mapping.path.starts_with("/memfd:dcc") && mapping.permissions.starts_with("r--");
    mappings.iter().filter(|mapping| !is_peers(mapping)).map(|mapping| mapping.resident).sum()
}

fn parse(smaps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        match (first.strip_suffix(':'), found.last_mut()) {
            (Some(name), Some(last)) => {
                let bytes = words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0) * 1024;
                match name {
                    "Rss" => last.resident = bytes,
                    "Anonymous" => last.anonymous = bytes,
                    _ => {}
                }
            }
            _ => found.extend(head(line)),
        }
    }
    found
}

/// `address permissions offset device inode path`.
fn head(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut word = || {
        let (word, behind) = rest.trim_start().split_once(' ')?;
        rest = behind;
        Some(word)
    };
    let (from, to) = word()?.split_once('-')?;
    let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).ok());
    let permissions = word()?.to_owned();
    for _offset_device_inode in 0..3 {
        word();
    }
    Some(Mapping { addresses: from?..to?, permissions, path: rest.trim().to_owned(), resident: 0, anonymous: 0 })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn peers_arenas_do_not_count() {
        let smaps = "\
7f00-7f10 rw-s 00200000 00:01 77                         /memfd:dcc (deleted)
Rss:                 100 kB
Pss:                  50 kB
7f10-7f20 r--s 00400000 00:01 77                         /memfd:dcc (deleted)
Rss:                 999 kB
7f20-7f30 r--p 00000000 08:01 12                         /usr/lib/libc.so.6
Rss:                   7 kB
Anonymous:             4 kB
7f40-7f50 rw-p 00000000 00:00 0 
Rss:                   1 kB
VmFlags: rd wr mr mw me ac sd
";
        let found = parse(smaps);
        assert_eq!(own_bytes(&found), 108 * 1024);
        let expected = Mapping {
            addresses: 0x7f20..0x7f30,
            permissions: "r--p".to_owned(),
            path: "/usr/lib/libc.so.6".to_owned(),
            resident: 7 * 1024,
            anonymous: 4 * 1024,
        };
        assert_eq!(found[2], expected);
        assert_eq!((found.len(), found[3].path.as_str()), (4, ""));
        let held = vec![1u8; 64 << 20];
        assert!(resident_bytes().unwrap() >= held.len() as u64);
    }
}
