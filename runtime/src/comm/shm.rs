//! Memory shared between processes, and waiting on it: a memfd mapped by the launcher and every rank, and futexes.
//!
//! The one place of `comm` with unsafe code. What makes the safe functions here sound is the protocol above them: a region is
//! written by one rank only, and read by others only between its posting and their `done`; `check` proves this of the
//! program's own accesses. In the control block words are atomic; but for sources that an entry carries, which are bytes, written
//! before its stamp and read behind it.

use super::peer::Peer;
#[cfg(target_arch = "x86_64")]
use super::segment::PAGE;
use super::segment::{LINE, Layout, Segment};
use super::{Patience, Region};
use crate::error::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// Copies of so many bytes leave nothing in caches that would be there when it is needed.
const AROUND: usize = 4 << 20;
/// What a transfer writes on a rank so that its copies do that, where stores that go around the caches take longer than others to a
/// third-level cache: without AVX-512.
#[cfg(target_arch = "x86_64")]
const FAR_AROUND: usize = 16 << 20;

/// Bytes that several threads or processes see. Unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// A rank's own memory, kept mapped as long as this lives.
#[derive(Clone, Debug)]
pub struct Arena {
    segment: Arc<Segment>,
    rank: u32,
}

// SAFETY: a mapping is plain memory, valid in all threads until it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: all accesses through a shared reference are atomic, or follow the protocol of the module's header.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeros, in this process only.
    pub fn anonymous(bytes: usize) -> Result<Mapping> {
        // SAFETY: a fresh private mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Mapping::own(base, bytes, Access::Write)
    }

    /// `bytes` of the file from `offset`, a multiple of the page size.
    pub fn shared(file: impl AsFd, offset: usize, bytes: usize, access: Access) -> Result<Mapping> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a fresh mapping overlaps nothing; `create` sealed the file against shrinking, so its pages stay.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset as u64) };
        Mapping::own(base, bytes, access)
    }

    fn own(base: rustix::io::Result<*mut std::ffi::c_void>, bytes: usize, access: Access) -> Result<Mapping> {
        let action = || format!("map {:.1} MiB of memory", bytes as f64 / (1 << 20) as f64);
        let base = base.map_err(|error| Error::system(&action(), error))?;
        let base = NonNull::new(base.cast()).expect("mmap never returns address 0");
        Ok(Mapping { base, bytes, access })
    }

    /// With huge pages where the kernel gives them: for what is used from end to end.
    pub fn in_huge_pages(self) -> Mapping {
        // SAFETY: the range is this value's; the advice changes no contents. Kernels without huge pages refuse it: no matter.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxHugepage) };
        self
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes).expect("an offset of a mapping fits usize");
        assert!(end <= self.bytes, "{offset}+{bytes} of a mapping of {} bytes", self.bytes);
    }

    /// As `check`, of a word at a multiple of its bytes, in few instructions.
    fn check_word(&self, offset: usize, bytes: usize) {
        let is_inside = offset.is_multiple_of(bytes) && offset / bytes < self.bytes / bytes;
        assert!(is_inside, "a word of {bytes} at {offset} of a mapping of {} bytes", self.bytes);
    }

    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        self.check_word(offset, 4);
        // SAFETY: in bounds and aligned (mappings start at a page); who reads or writes these bytes otherwise does so while nobody has them as atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        self.check_word(offset, 8);
        // SAFETY: in bounds and aligned (mappings start at a page); who reads or writes these bytes otherwise does so while nobody has them as atomics.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    pub fn words64(&self, offset: usize, count: usize) -> &[AtomicU64] {
        self.check_word(offset, 8);
        self.check(offset, 8 * count);
        // SAFETY: in bounds and aligned (mappings start at a page); who reads or writes these bytes otherwise does so while nobody has them as atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    /// A posted region of a peer, or an own one that no kernel writes meanwhile.
    pub fn slice(&self, region: Region) -> &[u8] {
        self.check(region.offset, region.bytes);
        // SAFETY: in bounds; by the protocol nobody writes a posted region before all members are done with it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(region.offset), region.bytes) }
    }

    /// Takes the cache lines of a region that is written soon away from who read them, so that stores to it do not wait for that.
    pub fn take(&self, region: Region) {
        self.ask_for(region, Access::Write);
    }

    /// Asks for the cache lines of a region that is read soon.
    pub fn fetch(&self, region: Region) {
        self.ask_for(region, Access::Read);
    }

    #[inline(always)]
    fn ask_for(&self, region: Region, access: Access) {
        self.check(region.offset, region.bytes);
        for at in region.range().step_by(LINE) {
            // SAFETY: in bounds.
            ask_for_line(unsafe { self.base.as_ptr().add(at) }, access);
        }
    }

    /// Writes into an own region that nobody else reads meanwhile.
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.write_part(offset, from, from.len());
    }

    /// `write` of a part of what has `whole` bytes.
    pub fn write_part(&self, offset: usize, from: &[u8], whole: usize) {
        self.check(offset, from.len());
        assert!(self.access == Access::Write, "a peer's arena is read-only");
        // SAFETY: in bounds and writable; `copy` allows that `from` lies in this mapping too.
        unsafe {
            let to = self.base.as_ptr().add(offset);
            if from.len() >= AROUND && from.as_ptr().addr().abs_diff(to.addr()) >= from.len() {
                copy_around(from, to, whole);
            } else {
                std::ptr::copy(from.as_ptr(), to, from.len());
            }
        }
    }
}

/// Asks for a cache line; processors that cannot do that do nothing.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ask_for_line(at: *const u8, access: Access) {
    // SAFETY: a hint, which no address makes fault.
    unsafe {
        match access {
            Access::Read => std::arch::asm!("prefetcht0 [{}]", in(reg) at, options(nostack, preserves_flags, readonly)),
            Access::Write => std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly)),
        }
    }
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn ask_for_line(at: *const u8, access: Access) {
    // SAFETY: a hint, which no address makes fault.
    unsafe {
        match access {
            Access::Read => std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly)),
            Access::Write => std::arch::asm!("prfm pstl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly)),
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn ask_for_line(_: *const u8, _: Access) {}

/// Copies a part of what has `whole` bytes by stores that go around the caches, where that is faster: a line is not read before it is
/// written.
///
/// # Safety
/// As many bytes as `from` has are writable at `to`, apart from these.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_around(from: &[u8], to: *mut u8, whole: usize) {
    // SAFETY of all: the caller's; the machine has the instructions.
    if std::arch::is_x86_feature_detected!("avx512f") {
        unsafe { copy_lines(from, to, streams_512) }
    } else if whole < FAR_AROUND {
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    } else if std::arch::is_x86_feature_detected!("avx") {
        unsafe { copy_lines(from, to, streams_256) }
    } else {
        unsafe { copy_lines(from, to, streams_128) }
    }
}

/// Copies whole lines of the target by `streams`, what is before and behind them by itself.
///
/// # Safety
/// As `copy_around`; the machine has the instructions of `streams`, which copies whole lines to where they begin.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(from: &[u8], to: *mut u8, streams: unsafe fn(&[Line], *mut u8)) {
    // SAFETY: the caller's.
    unsafe {
        let (head, rest) = from.split_at(to.align_offset(LINE).min(from.len()));
        std::ptr::copy_nonoverlapping(head.as_ptr(), to, head.len());
        let to = to.add(head.len());
        let (lines, tail) = rest.as_chunks();
        streams(lines, to);
        // Who is told of the copy must find it.
        std::arch::x86_64::_mm_sfence();
        std::ptr::copy_nonoverlapping(tail.as_ptr(), to.add(rest.len() - tail.len()), tail.len());
    }
}

#[cfg(target_arch = "x86_64")]
type Line = [u8; LINE];

/// Four pages at a time: each is a stream that the processor fetches ahead. A store is a whole line.
///
/// # Safety
/// As `copy_lines`; the machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn streams_512(lines: &[Line], to: *mut u8) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let line = |at: usize| {
        // SAFETY: the caller's.
        unsafe { _mm512_stream_si512(to.add(at * LINE).cast(), _mm512_loadu_si512(lines[at].as_ptr().cast())) }
    };
    let (page, whole) = (PAGE / LINE, lines.len() / (4 * PAGE / LINE) * (4 * PAGE / LINE));
    for first in (0..whole).step_by(4 * page) {
        (0..page).for_each(|at| (0..4).for_each(|stream| line(first + stream * page + at)));
    }
    (whole..lines.len()).for_each(line);
}

/// Line after line: of stores that are parts of lines, those to other pages between them would send off lines that are not yet whole.
///
/// # Safety
/// As `copy_lines`; the machine has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn streams_256(lines: &[Line], to: *mut u8) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for (at, line) in lines.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe {
            let (from, to) = (line.as_ptr().cast::<__m256i>(), to.add(at * LINE).cast::<__m256i>());
            (0..2).for_each(|part| _mm256_stream_si256(to.add(part), _mm256_loadu_si256(from.add(part))));
        }
    }
}

/// As `streams_256`.
///
/// # Safety
/// As `copy_lines`.
#[cfg(target_arch = "x86_64")]
unsafe fn streams_128(lines: &[Line], to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for (at, line) in lines.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe {
            let (from, to) = (line.as_ptr().cast::<__m128i>(), to.add(at * LINE).cast::<__m128i>());
            (0..4).for_each(|part| _mm_stream_si128(to.add(part), _mm_loadu_si128(from.add(part))));
        }
    }
}

/// # Safety
/// As many bytes as `from` has are writable at `to`, apart from these.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_around(from: &[u8], to: *mut u8, _whole: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the range; slices of it borrow the value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl Arena {
    pub fn new(segment: Arc<Segment>, rank: u32) -> Arena {
        Arena { segment, rank }
    }

    /// For kernels; valid as long as an `Arena` or `Peer` of this rank lives. Page-aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.segment.arena(self.rank).base
    }

    pub fn bytes(&self) -> usize {
        self.segment.arena(self.rank).bytes
    }

    /// Copies `from` to `offset`. Not while a started transfer or a running kernel uses that region.
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.segment.arena(self.rank).write(offset, from);
    }

    /// Copies from `offset` into `into`. Not while a started transfer or a running kernel writes that region.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(self.segment.arena(self.rank).slice(Region { offset, bytes: into.len() }));
    }
}

/// Memory for a run: nameless, so that nothing is left behind however the run ends.
pub fn create(layout: &Layout) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("dcc", flags).map_err(|error| Error::system("create shared memory", error))?;
    rustix::fs::ftruncate(&file, layout.total_bytes() as u64)
        .and_then(|()| rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL))
        .map_err(|error| Error::system(&format!("size shared memory to {} bytes", layout.total_bytes()), error))?;
    control(&file, layout)?.initialize();
    Ok(file)
}

/// The control block alone: what the launcher watches.
pub fn control(file: impl AsFd, layout: &Layout) -> Result<Segment> {
    let bytes = rustix::fs::fstat(&file).map_err(|error| Error::system("stat shared memory", error))?.st_size;
    if bytes as usize != layout.total_bytes() {
        return Err(Error::handshake(format!(
            "launcher and rank have different plans: {bytes} bytes of shared memory there, {} here",
            layout.total_bytes()
        )));
    }
    Ok(Segment::new(layout.clone(), Mapping::shared(&file, 0, layout.control_bytes(), Access::Write)?, Vec::new()))
}

/// Rank `rank`'s end: its own arena writable, its peers' readable.
pub fn attach(file: impl AsFd, layout: &Layout, rank: u32, patience: Patience) -> Result<Peer> {
    control(&file, layout)?.verify()?;
    let arenas = (0..layout.world()).map(|owner| {
        let range = layout.arena_range(owner);
        let access = if owner == rank { Access::Write } else { Access::Read };
        Ok(Mapping::shared(&file, range.start, range.len(), access)?.in_huge_pages())
    });
    let arenas = arenas.collect::<Result<Vec<Mapping>>>()?;
    let control = Mapping::shared(&file, 0, layout.control_bytes(), Access::Write)?;
    Ok(Peer::new(Arc::new(Segment::new(layout.clone(), control, arenas)), rank, patience))
}

/// Sleeps while `word` is `value`, at most `limit`; may return early.
pub fn sleep(word: &AtomicU32, value: u32, limit: Duration) {
    let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // A changed value, a signal and the limit all mean the same to the caller: look again.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&limit));
}

/// Wakes whoever sleeps on `word`, in any process.
pub fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// From and to any alignment, with and without whole lines and blocks of pages; no byte beside them.
    #[test]
    fn lines_go_around_the_caches() {
        let mut ways: Vec<unsafe fn(&[Line], *mut u8)> = vec![streams_128];
        if std::arch::is_x86_feature_detected!("avx") {
            ways.push(streams_256);
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            ways.push(streams_512);
        }
        let from: Vec<u8> = (0..40_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for (way, streams) in ways.into_iter().enumerate() {
            for (begin, end, at) in [(0, 40_000, 0), (3, 39_999, 61), (64, 64 + 4 * PAGE, 64), (5, 70, 33), (9, 9, 1)] {
                let mut to = vec![0; 41_000];
                let part = &from[begin..end];
                // SAFETY: the target is large enough, and the machine has what was asked for.
                unsafe { copy_lines(part, to.as_mut_ptr().add(at), streams) };
                assert!(to[at..at + part.len()] == *part, "way {way}, {begin}..{end} to {at}");
                let beside = to[..at].iter().chain(&to[at + part.len()..]);
                assert!(beside.copied().all(|byte| byte == 0), "way {way}, {begin}..{end} to {at}");
            }
        }
    }
}
