//! Paths of tensor data beside a model: relative, and inside the model's folder whatever links say.
//!
//! ONNX, external data: `location` is a POSIX path relative to the model's folder. A model is untrusted input, so a path
//! that is absolute, climbs with `..`, or leaves the folder through a symbolic link is refused.

use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Why a location was refused.
#[derive(Debug, thiserror::Error)]
pub enum ExternalError {
    #[error("the external data path is empty")]
    Empty,
    #[error("the external data path `{0}` is not relative")]
    Absolute(String),
    #[error("the external data path `{0}` leaves the model's folder")]
    Escapes(String),
    #[error("the external data path `{0}` is no regular file")]
    NotAFile(String),
    #[error("the external data file `{0}` is missing")]
    Missing(String),
    #[error("the external data file `{location}` cannot be opened: {source}")]
    Io { location: String, source: io::Error },
}

/// Checks the path by its text alone, as the compiler does, which opens no files.
pub fn check_location(location: &str) -> Result<(), ExternalError> {
    if location.is_empty() || location.contains('\0') {
        return Err(ExternalError::Empty);
    }
    let drive = location.as_bytes().get(1) == Some(&b':');
    if location.starts_with(['/', '\\']) || drive {
        return Err(ExternalError::Absolute(location.to_string()));
    }
    if location.split(['/', '\\']).any(|part| part == "..") {
        return Err(ExternalError::Escapes(location.to_string()));
    }
    let normal = |part| matches!(part, Component::Normal(_) | Component::CurDir);
    if !Path::new(location).components().all(normal) {
        return Err(ExternalError::Absolute(location.to_string()));
    }
    Ok(())
}

/// The file that `location` names, below `folder` with all symbolic links followed.
pub fn resolve(folder: &Path, location: &str) -> Result<PathBuf, ExternalError> {
    check_location(location)?;
    let open = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ExternalError::Missing(location.to_string()),
        _ => ExternalError::Io { location: location.to_string(), source },
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let folder = folder.canonicalize().map_err(open)?;
    let path = folder.join(location).canonicalize().map_err(open)?;
    if !path.starts_with(&folder) {
        return Err(ExternalError::Escapes(location.to_string()));
    }
    Ok(path)
}

/// Opens the regular file that `location` names below `folder`. Where the kernel can, it walks the path itself and lets no
/// link leave the folder, so that nobody can swap a part of it between the check and the opening.
pub fn open(folder: &Path, location: &str) -> Result<File, ExternalError> {
    check_location(location)?;
    let io = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ExternalError::Missing(location.to_string()),
        _ => ExternalError::Io { location: location.to_string(), source },
    };
    let file = match open_beneath(folder, location) {
        Some(file) => file.map_err(|source| match source.raw_os_error() {
            Some(code) if code == rustix::io::Errno::XDEV.raw_os_error() => ExternalError::Escapes(location.to_string()),
            _ => io(source),
        })?,
        None => {
            let path = resolve(folder, location)?;
            // Opening a pipe would wait for a writer.
            if !path.metadata().map_err(io)?.is_file() {
                return Err(ExternalError::NotAFile(location.to_string()));
            }
            File::open(path).map_err(io)?
        }
    };
    match file.metadata().map_err(io)?.is_file() {
        true => Ok(file),
        false => Err(ExternalError::NotAFile(location.to_string())),
    }
}

/// `None` where the kernel has no `openat2`.
#[cfg(target_os = "linux")]
fn open_beneath(folder: &Path, location: &str) -> Option<io::Result<File>> {
    use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
    use rustix::io::Errno;
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let directory = match openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(directory) => directory,
        Err(e) => return Some(Err(e.into())),
    };
    // Without NONBLOCK, opening a pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    match openat2(&directory, location, flags, Mode::empty(), resolve) {
        Ok(file) => Some(Ok(File::from(file))),
        Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => None,
        Err(e) => Some(Err(e.into())),
    }
}

#[cfg(not(target_os = "linux"))]
fn open_beneath(_: &Path, _: &str) -> Option<io::Result<File>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_paths_that_leave_the_folder() {
        for good in ["w.bin", "./w.bin", "a/b.c/d", "h.0.attn.weight"] {
            assert!(check_location(good).is_ok(), "{good}");
        }
        for bad in ["", "/etc/passwd", "../w", "a/../../w", "..\\w", "C:\\w", "a\0b"] {
            assert!(check_location(bad).is_err(), "{bad}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn follows_links_only_inside() {
        let folder = std::env::temp_dir().join(format!("dcc-external-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a writable temp dir");
        std::fs::write(folder.join("real"), b"x").expect("writes");
        std::os::unix::fs::symlink("real", folder.join("inside")).expect("links");
        std::os::unix::fs::symlink("/", folder.join("outside")).expect("links");
        let inside = resolve(&folder, "inside");
        let outside = resolve(&folder, "outside/etc");
        let missing = resolve(&folder, "absent");
        let opened = ["inside", "outside/etc/passwd", "absent", "."].map(|location| open(&folder, location));
        let pipe = folder.join("pipe");
        let made = rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0);
        let piped = made.is_ok().then(|| open(&folder, "pipe"));
        std::fs::remove_dir_all(&folder).expect("removes");
        assert!(inside.is_ok_and(|path| path.ends_with("real")));
        assert!(matches!(outside, Err(ExternalError::Escapes(_))));
        assert!(matches!(missing, Err(ExternalError::Missing(_))));
        assert!(opened[0].is_ok());
        assert!(matches!(opened[1], Err(ExternalError::Escapes(_))));
        assert!(matches!(opened[2], Err(ExternalError::Missing(_))));
        assert!(matches!(opened[3], Err(ExternalError::NotAFile(_))));
        assert!(piped.is_none_or(|p| matches!(p, Err(ExternalError::NotAFile(_)))));
    }
}
