//! Numbers for people.

/// `10.75 M`: three to four digits.
pub fn count(n: u64) -> String {
    let units = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let n = n as f64;
    match units.iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", n / unit),
        None => format!("{n}"),
    }
}

/// `41.0 MiB`.
pub fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, name)) => format!("{:.1} {name}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0, 999, 10_750_000].map(count), ["0", "999", "10.75 M"]);
        assert_eq!([0, 1023, 1024, 42_991_616].map(size), ["0 B", "1023 B", "1.0 KiB", "41.0 MiB"]);
    }
}
