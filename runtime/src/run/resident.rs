//! How much memory a process really holds.

use crate::metrics::now_ns;

/// Bytes resident now. Peers' arenas, which this process reads, count for their owners: read-only shared mappings are left out.
/// 0 where the system does not say.
pub fn resident_bytes() -> u64 {
    let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else { return 0 };
    let mut total = 0;
    let mut counts = true;
    for line in maps.lines() {
        if let Some(kibibytes) = line.strip_prefix("Rss:") {
            let number = kibibytes.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0);
            total += if counts { number << 10 } else { 0 };
        } else if let Some(permissions) = line.split_ascii_whitespace().nth(1).filter(|word| word.len() == 4) {
            counts = permissions != "r--s";
        }
    }
    total
}

/// The largest resident set seen; looks are far enough apart to cost nothing.
pub(super) struct Watermark {
    bytes: u64,
    next_ns: u64,
}

const INTERVAL_NS: u64 = 10_000_000_000;

impl Watermark {
    pub fn new() -> Watermark {
        Watermark { bytes: 0, next_ns: 0 }
    }

    /// Looks now if the last look is old.
    pub fn look(&mut self) {
        if now_ns() >= self.next_ns {
            self.look_now();
        }
    }

    pub fn look_now(&mut self) -> u64 {
        self.bytes = self.bytes.max(resident_bytes());
        self.next_ns = now_ns() + INTERVAL_NS;
        self.bytes
    }
}
