//! Files as bytes without reading them: the one place that maps memory.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::Mmap;

/// The whole of `file`, mapped read-only and private; slices of the result keep the mapping alive.
pub fn map(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is read-only and lives as long as the `Bytes` that owns it. The kernel keeps the pages valid
    // while the file keeps its length; whoever truncates a model while it is being read gets SIGBUS, as with any mapped
    // file, and whoever rewrites it in place changes bytes that are only ever read as plain numbers.
    let mapping = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(mapping))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn maps_what_was_written() {
        let path = std::env::temp_dir().join(format!("dcc-map-{}", std::process::id()));
        File::create(&path).and_then(|mut file| file.write_all(b"weights")).expect("a writable temp dir");
        let bytes = map(&File::open(&path).expect("just written")).expect("maps");
        std::fs::remove_file(&path).expect("just written");
        assert_eq!(&bytes.slice(2..5)[..], b"igh");
    }
}
