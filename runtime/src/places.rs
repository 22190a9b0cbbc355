//! Where files are: what links lead to, and which names are one file.

use std::io;
use std::path::{Path, PathBuf};

/// A path with what it is called: a flag, "the model".
pub type Named<'a> = (&'a str, &'a Path);

/// Links that lead to links, at most: as Linux has it.
const LINKS: usize = 40;

/// What all names of a file have in common.
#[derive(PartialEq, Eq)]
enum Identity {
    /// Device and inode.
    File(u64, u64),
    /// Where it would be made.
    Missing(PathBuf),
}

/// Where writing to `path` makes or changes a file: what links lead to, though nothing may be there yet.
pub fn target(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_owned();
    for _ in 0..LINKS {
        match at.read_link() {
            Ok(link) => at = at.parent().unwrap_or(Path::new("")).join(link),
            Err(_) => return Ok(at),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

/// None of folders, devices and pipes, and of what cannot be found.
fn identity(path: &Path) -> Option<Identity> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => existing(path, &found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let target = target(path).ok()?;
            let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some(Identity::Missing(parent.canonicalize().ok()?.join(target.file_name()?)))
        }
        _ => None,
    }
}

#[cfg(unix)]
fn existing(_: &Path, found: &std::fs::Metadata) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    Some(Identity::File(found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn existing(path: &Path, _: &std::fs::Metadata) -> Option<Identity> {
    path.canonicalize().ok().map(Identity::Missing)
}

/// An output that is one regular file, be it by hard or symbolic links, with what is read or with another output.
#[derive(Debug, PartialEq, Eq)]
pub struct Clash<'a> {
    pub what: String,
    pub at: &'a Path,
    pub help: String,
}

impl<'a> Clash<'a> {
    fn of((flag, at): Named<'a>, other: &str) -> Clash<'a> {
        Clash { what: format!("{flag} and {other} are the same file"), at, help: format!("write {flag} elsewhere") }
    }
}

/// The first output that is a file of `read`, or another output. Of a folder that is read, each file is.
pub fn clash<'a>(written: &[Named<'a>], read: &[Named<'a>]) -> Option<Clash<'a>> {
    let identified = written.iter().filter_map(|named| Some((*named, identity(named.1)?)));
    let written: Vec<(Named<'a>, Identity)> = identified.collect();
    for (at, (named, own)) in written.iter().enumerate() {
        if let Some((other, _)) = written[..at].iter().find(|(_, other)| other == own) {
            return Some(Clash::of(*named, other.0));
        }
    }
    for &(name, path) in read.iter().filter(|_| !written.is_empty()) {
        let entries = std::fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        for own in entries.chain([path.to_owned()]).filter_map(|path| identity(&path)) {
            if let Some((named, _)) = written.iter().find(|(_, other)| *other == own) {
                return Some(Clash::of(*named, name));
            }
        }
    }
    None
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_is_known_by_all_its_names() {
        let folder = std::env::temp_dir().join(format!("dcc-places-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        let at = |name: &str| folder.join(name);
        std::fs::write(at("a"), "a").unwrap();
        std::fs::write(at("b"), "a").unwrap();
        std::fs::hard_link(at("a"), at("hard")).unwrap();
        symlink("hard", at("soft")).unwrap();
        symlink("sub/new", at("dangling")).unwrap();
        symlink("round", at("round")).unwrap();
        assert_eq!(target(&at("dangling")).unwrap(), at("sub/new"));
        assert_eq!(target(&at("b")).unwrap(), at("b"));
        assert!(target(&at("round")).is_err());
        let same = |a: &Path, b: &Path| identity(a).is_some_and(|a| identity(b) == Some(a));
        assert!(same(&at("a"), &at("soft")) && same(&at("dangling"), &at("sub/../sub/new")));
        assert!(!same(&at("a"), &at("b")) && !same(&at("sub"), &at("sub")) && !same(&at("none"), &at("sub/none")));
        let (soft, sub, other, none) = (at("soft"), at("sub"), at("b"), at("none"));
        let clash = |written: &[Named<'_>], read: &[Named<'_>]| clash(written, read).map(|clash| clash.what);
        assert_eq!(clash(&[("--out", &soft)], &[("--data", &folder)]).as_deref(), Some("--out and --data are the same file"));
        assert_eq!(clash(&[("--out", &none), ("--log", &none)], &[]).as_deref(), Some("--log and --out are the same file"));
        assert_eq!(clash(&[("--out", &soft), ("--log", &other)], &[("--data", &sub), ("--x", &none)]), None);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
