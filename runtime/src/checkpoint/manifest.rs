//! `MANIFEST`: a line `BLAKE3 bytes name` per file, then the BLAKE3 of all lines before.

use crate::error::{Error, Result};
use std::path::Path;

pub const NAME: &str = "MANIFEST";
const FIRST: &str = "dcc checkpoint 1\n";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub bytes: u64,
    /// Hexadecimal.
    pub hash: String,
}

/// The text of the file.
pub fn text(entries: &[Entry]) -> String {
    let lines = entries.iter().map(|entry| format!("{} {} {}\n", entry.hash, entry.bytes, entry.name));
    let text: String = std::iter::once(FIRST.to_owned()).chain(lines).collect();
    format!("{text}{} {NAME}\n", blake3::hash(text.as_bytes()).to_hex())
}

/// Reads what `text` wrote. Errors: any other byte.
pub fn read(dir: &Path) -> Result<Vec<Entry>> {
    let path = dir.join(NAME);
    let bytes = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::checkpoint(format!("no {NAME}: not a checkpoint, or not a complete one")).at(dir.display()));
        }
        bytes => bytes.map_err(|error| Error::io("read a checkpoint", &path, error))?,
    };
    let entries = std::str::from_utf8(&bytes).ok().and_then(parse);
    entries.ok_or_else(|| Error::checkpoint(format!("damaged: {NAME} is not what was written")).at(path.display()))
}

fn parse(whole: &str) -> Option<Vec<Entry>> {
    let lines = whole.strip_prefix(FIRST)?.lines();
    let entries: Option<Vec<Entry>> = lines
        .filter(|line| !line.ends_with(&format!(" {NAME}")))
        .map(|line| {
            let mut words = line.splitn(3, ' ');
            let (hash, bytes, name) = (words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?.to_owned());
            let is_plain = !name.is_empty() && !name.contains('/') && !name.starts_with('.');
            is_plain.then_some(Entry { name, bytes, hash })
        })
        .collect();
    // Writing it again proves every byte, the own hash included.
    entries.filter(|entries| text(entries) == whole)
}
