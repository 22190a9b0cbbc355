//! Copies of rows.

use super::Running;
use crate::library::rows::Rows;

/// Bytes of one chunk of a copy.
const CHUNK: usize = 256 << 10;

impl Rows {
    pub(super) fn run(&self, on: &Running<'_>) {
        let from = on.memory.pointer(self.from, on.bases) as usize + self.skip + on.microbatch as usize * self.next;
        let to = on.memory.pointer(self.to, on.bases) as usize;
        let total = self.count * self.bytes;
        // Many short rows make a chunk, or a long row several.
        let per_row = self.bytes.div_ceil(CHUNK).max(1);
        let together = if per_row > 1 { 1 } else { (CHUNK / self.bytes.max(1)).max(1) };
        let chunks = self.count.div_ceil(together) * per_row;
        on.pool.run(chunks, total / 20, &|_, chunk| {
            let (group, part) = (chunk / per_row, chunk % per_row);
            let begin = part * CHUNK;
            let bytes = (self.bytes - begin).min(CHUNK);
            for row in group * together..self.count.min((group + 1) * together) {
                let (from, to) = (from + row * self.from_stride + begin, to + row * self.to_stride + begin);
                // SAFETY: rows lie inside of both spans, which `pointer` checked and which do not overlap; chunks are disjoint.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
            }
        });
    }
}
