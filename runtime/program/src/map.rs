//! Files as bytes without reading them: the one place that maps memory.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::{Mmap, UncheckedAdvice};
use std::sync::Arc;

/// The whole of `file`, mapped read-only and private; slices of the result keep the mapping alive.
pub fn map(file: &File) -> io::Result<Bytes> {
    Ok(map_pages(file)?.0)
}

/// The same, with what gives back the memory that reading takes.
pub fn map_pages(file: &File) -> io::Result<(Bytes, Pages)> {
    if file.metadata()?.len() == 0 {
        return Ok((Bytes::new(), Pages(None)));
    }
    // SAFETY: the mapping is read-only and lives as long as the `Bytes` that owns it. The kernel keeps the pages valid
    // while the file keeps its length; whoever truncates a model while it is being read gets SIGBUS, as with any mapped
    // file, and whoever rewrites it in place changes bytes that are only ever read as plain numbers.
    let mapping = Arc::new(unsafe { Mmap::map(file)? });
    Ok((Bytes::from_owner(Whole(mapping.clone())), Pages(Some(mapping))))
}

struct Whole(Arc<Mmap>);

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The memory in which a mapped file lies as far as it has been read.
#[derive(Clone, Debug)]
pub struct Pages(Option<Arc<Mmap>>);

impl Pages {
    /// Gives it back to the system; what is read again comes from the file, or from the system's cache of it.
    pub fn release(&self) {
        if let Some(mapping) = &self.0 {
            // SAFETY: the mapping is never written, so that its pages are those of the file, before and after.
            // It is advice: where the system does not take it, the memory stays.
            let _ = unsafe { mapping.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn maps_what_was_written() {
        let path = std::env::temp_dir().join(format!("dcc-map-{}", std::process::id()));
        File::create(&path).and_then(|mut file| file.write_all(b"weights")).expect("a writable temp dir");
        let (bytes, pages) = map_pages(&File::open(&path).expect("just written")).expect("maps");
        std::fs::remove_file(&path).expect("just written");
        let part = bytes.slice(2..5);
        assert_eq!(&part[..], b"igh");
        pages.release();
        assert_eq!(&part[..], b"igh");
    }
}
