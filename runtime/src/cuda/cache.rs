//! Machine code kept from run to run, by what it was made of: `$XDG_CACHE_HOME/dcc/kernels`, else `~/.cache/dcc/kernels`.
//!
//! A file is the hash of the rest, the length of the log, the log, the code. One that is damaged, or a folder that cannot be written, costs
//! time only.

use super::nvrtc::{self, Image};
use super::shipped::Shipped;
use super::{Arch, Kernels, Target};
use crate::error::{Error, Result};
use crate::parallel::side_by_side;
use dcc_kernels::cuda::Source;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most parts, and threads that compile.
pub(super) const PARTS: usize = 16;
/// Bytes of text that are worth a part: each has the prelude.
const SHARE: usize = 50_000;

/// Machine code of `sources`, in parts that were compiled side by side, and how many sources each has: what was `shipped` for that very GPU, else
/// what earlier runs kept in `folder`, else made now, or, without NVRTC, what was shipped for others and runs here as well.
/// Errors: NVRTC is missing and nothing else fits; it refuses a text.
pub fn images(sources: &[Source], arch: Arch, folder: Option<&Path>, shipped: &Shipped) -> Result<Vec<(Image, usize)>> {
    let parts = parts(sources);
    let images = side_by_side(&parts, PARTS, |part| {
        let text = Kernels::text(part);
        if let Some(image) = shipped.made_for(&text, arch) {
            return Ok(image);
        }
        let made = match nvrtc::is_there() {
            true => None,
            false => shipped.taken_by(&text, arch),
        };
        made.map_or_else(|| compiled(&text, Target::Code(arch), folder), Ok).map_err(|error| advised(error, arch, shipped))
    })?;
    Ok(images.into_iter().zip(&parts).map(|(image, part)| (image, part.len())).collect())
}

/// Without NVRTC: what there is instead.
fn advised(error: Error, arch: Arch, shipped: &Shipped) -> Error {
    let names: Vec<String> = shipped.targets().into_iter().map(Target::name).collect();
    match (nvrtc::is_there(), names.is_empty()) {
        (true, _) => error,
        (false, true) => {
            error.help(format!("`dcc compile --arch {}` puts machine code into the artifact, where NVRTC is", arch.name()))
        }
        (false, false) => error.help(format!(
            "the artifact has other kernels, or code for other GPUs than {}: {}",
            arch.name(),
            names.join(", ")
        )),
    }
}

/// Neighbouring sources of about as much text, alike on all machines: what one compiled, another finds.
pub(super) fn parts(sources: &[Source]) -> Vec<&[Source]> {
    let all: usize = sources.iter().map(|source| source.text.len()).sum();
    let share = (all / PARTS).max(SHARE);
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

/// Made by NVRTC, or by an earlier run that kept it in `folder`.
pub(super) fn compiled(text: &str, target: Target, folder: Option<&Path>) -> Result<Image> {
    let Some(folder) = folder else { return nvrtc::compile(text, target) };
    let (major, minor) = nvrtc::version()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{major}.{minor} {} ", target.name()).as_bytes()).update(text.as_bytes());
    let name = hasher.finalize().to_hex().to_string();
    // Ranks of one process compile the same texts: the first does, the others wait.
    let own = turn(&name);
    let _own = own.lock().unwrap_or_else(PoisonError::into_inner);
    let file = folder.join(name);
    if let Some(image) = std::fs::read(&file).ok().and_then(|bytes| checked(&bytes)) {
        return Ok(image);
    }
    let image = nvrtc::compile(text, target)?;
    if let Err(error) = store(&file, &image) {
        tracing::debug!(file = %file.display(), %error, "machine code is not kept");
    }
    Ok(image)
}

/// Held while the code of that name is made.
pub(super) fn turn(name: &str) -> Arc<Mutex<()>> {
    static TURNS: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_default().clone()
}

fn checked(bytes: &[u8]) -> Option<Image> {
    let (hash, rest) = bytes.split_at_checked(blake3::OUT_LEN)?;
    if blake3::hash(rest).as_bytes() == hash { unpacked(rest) } else { None }
}

/// The length of the log, the log, the code.
pub(super) fn packed(image: &Image) -> Vec<u8> {
    let mut bytes = (image.log.len() as u64).to_le_bytes().to_vec();
    bytes.extend(image.log.as_bytes());
    bytes.extend(&image.code);
    bytes
}

pub(super) fn unpacked(bytes: &[u8]) -> Option<Image> {
    let (length, rest) = bytes.split_at_checked(8)?;
    let (log, code) = rest.split_at_checked(u64::from_le_bytes(length.try_into().ok()?) as usize)?;
    Some(Image { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

fn store(file: &Path, image: &Image) -> std::io::Result<()> {
    let rest = packed(image);
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
        let image = checked(&whole).unwrap();
        assert!(image.code == [1, 2, 3] && image.log == "ptxas info");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing beside it");
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(checked(&damaged).is_none() && checked(&whole[..at]).is_none(), "byte {at}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
