//! Machine code kept from run to run, by what it was made of: `$XDG_CACHE_HOME/dcc/kernels`, else `~/.cache/dcc/kernels`.
//!
//! A file is the hash of the rest, the length of the log, the log, the code. One that is damaged, or a folder that cannot be written, costs
//! time only.

use super::nvrtc::{self, Image};
use super::{Arch, Kernels};
use crate::error::Result;
use dcc_kernels::cuda::Source;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most threads that compile.
const THREADS: usize = 16;
/// Bytes of text that are worth a thread.
const SHARE: usize = 50_000;

/// Machine code of `sources`, in parts that were compiled side by side, and how many sources each has. `folder`: where that of earlier runs is
/// kept. Errors: NVRTC is missing or refuses a text.
pub fn images(sources: &[Source], arch: Arch, folder: Option<&Path>) -> Result<Vec<(Image, usize)>> {
    let parts = parts(sources);
    let make = |part: &[Source]| {
        let text = Kernels::text(part);
        match folder {
            Some(folder) => compiled(&text, arch, folder),
            None => nvrtc::compile(&text, arch),
        }
    };
    let images: Vec<Result<Image>> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts.iter().map(|part| scope.spawn(|| make(part))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    images.into_iter().zip(&parts).map(|(image, part)| Ok((image?, part.len()))).collect()
}

/// Neighbouring sources of about as much text. Machines with other numbers of processors part them in other ways, which changes no kernel.
fn parts(sources: &[Source]) -> Vec<&[Source]> {
    let all: usize = sources.iter().map(|source| source.text.len()).sum();
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(THREADS);
    let share = (all / threads).max(SHARE);
    let mut parts = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (n, source) in sources.iter().enumerate() {
        bytes += source.text.len();
        if bytes >= share || n + 1 == sources.len() {
            parts.push(&sources[first..=n]);
            (first, bytes) = (n + 1, 0);
        }
    }
    parts
}

/// The user's own folder of machine code.
pub fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("dcc/kernels"))
}

fn compiled(text: &str, arch: Arch, folder: &Path) -> Result<Image> {
    let (major, minor) = nvrtc::version()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{major}.{minor} {} ", arch.name()).as_bytes()).update(text.as_bytes());
    let name = hasher.finalize().to_hex().to_string();
    // Ranks of one process compile the same texts: the first does, the others wait.
    let own = turn(&name);
    let _own = own.lock().unwrap_or_else(PoisonError::into_inner);
    let file = folder.join(name);
    if let Some(image) = std::fs::read(&file).ok().and_then(|bytes| unpacked(&bytes)) {
        return Ok(image);
    }
    let image = nvrtc::compile(text, arch)?;
    if let Err(error) = store(&file, &image) {
        tracing::debug!(file = %file.display(), %error, "machine code is not kept");
    }
    Ok(image)
}

/// Held while the code of that name is made.
fn turn(name: &str) -> Arc<Mutex<()>> {
    static TURNS: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_default().clone()
}

fn unpacked(bytes: &[u8]) -> Option<Image> {
    let (hash, rest) = bytes.split_at_checked(blake3::OUT_LEN)?;
    if blake3::hash(rest).as_bytes() != hash {
        return None;
    }
    let (length, rest) = rest.split_at_checked(8)?;
    let (log, code) = rest.split_at_checked(u64::from_le_bytes(length.try_into().ok()?) as usize)?;
    Some(Image { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

fn store(file: &Path, image: &Image) -> std::io::Result<()> {
    let mut rest = (image.log.len() as u64).to_le_bytes().to_vec();
    rest.extend(image.log.as_bytes());
    rest.extend(&image.code);
    replace(file, &[blake3::hash(&rest).as_bytes(), &rest[..]])
}

/// Writes a file whole or not at all: beside, then renamed.
pub(super) fn replace(file: &Path, parts: &[&[u8]]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder)?;
    let beside = folder.join(format!(".{}-{:?}", std::process::id(), std::thread::current().id()));
    std::fs::write(&beside, parts.concat())?;
    std::fs::rename(&beside, file).inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_no_image() {
        let folder = std::env::temp_dir().join(format!("dcc-cache-{}", std::process::id()));
        let file = folder.join("image");
        store(&file, &Image { code: vec![1, 2, 3], log: "ptxas info".to_owned() }).unwrap();
        let whole = std::fs::read(&file).unwrap();
        let image = unpacked(&whole).unwrap();
        assert!(image.code == [1, 2, 3] && image.log == "ptxas info");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing beside it");
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(unpacked(&damaged).is_none() && unpacked(&whole[..at]).is_none(), "byte {at}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
