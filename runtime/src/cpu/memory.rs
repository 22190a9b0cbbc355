//! A rank's arena, and the only way to its bytes.

use crate::comm::shm::Arena;
use crate::exec::{Bases, Span};
use std::ops::Range;

/// All bits set is NaN in every float format, -1 in integers: what poisoned memory holds.
const POISON: u8 = 0xff;
const PAGE: usize = 4096;

/// A workspace as elements of `E`.
///
/// # Safety
/// Any bits are an `E`, which is no more aligned than a u64.
pub(super) unsafe fn scratch<E>(words: &mut [u64]) -> &mut [E] {
    let count = size_of_val(words) / size_of::<E>();
    // SAFETY: the same bytes; the rest is the caller's.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), count) }
}

/// The planned memory of one rank.
#[derive(Debug)]
pub struct Memory {
    arena: Arena,
    bytes: usize,
}

impl Memory {
    pub fn new(arena: Arena) -> Memory {
        let bytes = arena.bytes();
        Memory { arena, bytes }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes every page of `range` now, so that no step meets a page fault. Contents stay.
    pub fn fault_in(&self, range: Range<usize>) {
        for at in range.step_by(PAGE) {
            let mut byte = [0];
            self.arena.read(at, &mut byte);
            self.arena.write(at, &byte);
        }
    }

    pub fn poison(&self, range: Range<usize>) {
        self.fill(range, POISON);
    }

    pub fn zero(&self, range: Range<usize>) {
        self.fill(range, 0);
    }

    fn fill(&self, range: Range<usize>, byte: u8) {
        assert!(range.end <= self.bytes, "{range:?} of an arena of {} bytes", self.bytes);
        // SAFETY: in bounds of the arena, which this rank alone writes; no kernel runs while `&self` is in the executor's hands.
        unsafe { self.base().add(range.start).write_bytes(byte, range.len()) }
    }

    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.arena.read(offset, into);
    }

    pub fn write(&self, offset: usize, from: &[u8]) {
        self.arena.write(offset, from);
    }

    /// The bytes of a span, for the time of `with`. Not while a kernel or a transfer uses them.
    pub fn with<T>(&mut self, range: Range<usize>, with: impl FnOnce(&mut [u8]) -> T) -> T {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of an arena of {} bytes", self.bytes);
        // SAFETY: in bounds; `&mut self` keeps kernels of this rank away, and the program's order its transfers.
        with(unsafe { std::slice::from_raw_parts_mut(self.base().add(range.start), range.len()) })
    }

    /// Where a span lies in this execution; as many bytes follow as the span has.
    pub(super) fn pointer(&self, span: Span, bases: &Bases) -> *mut u8 {
        let offset = bases.offset(span);
        assert!(offset + span.bytes <= self.bytes, "{span:?} outside of an arena of {} bytes", self.bytes);
        // SAFETY: in bounds of the arena's mapping, which lives as long as `self`.
        unsafe { self.base().add(offset) }
    }

    pub(super) fn zero_span(&self, span: Span, bases: &Bases) {
        let at = bases.offset(span);
        self.zero(at..at + span.bytes);
    }

    /// # Safety
    /// Any bits are an `E`, and `span` is aligned to it; nobody writes the span meanwhile.
    pub(super) unsafe fn elements<E>(&self, span: Span, bases: &Bases) -> &[E] {
        // SAFETY: `pointer` checked the span against the arena; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.pointer(span, bases).cast(), span.bytes / size_of::<E>()) }
    }

    /// # Safety
    /// As `elements`, and nobody else reads the span.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn elements_mut<E>(&self, span: Span, bases: &Bases) -> &mut [E] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(span, bases).cast(), span.bytes / size_of::<E>()) }
    }

    fn base(&self) -> *mut u8 {
        self.arena.base().as_ptr()
    }
}
