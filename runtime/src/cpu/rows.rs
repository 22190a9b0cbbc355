//! Copies of rows: slices of a dim, and whole buffers that could not stay where they are.

use super::Running;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_program::program::BufferId;

/// Bytes of one chunk of a copy.
const CHUNK: usize = 256 << 10;

/// `count` rows of `bytes` each, from one span to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub from: Span,
    pub to: Span,
    pub count: usize,
    pub bytes: usize,
    pub from_stride: usize,
    pub to_stride: usize,
    /// Byte of `from` where the first row begins, and how much later with each microbatch.
    pub skip: usize,
    pub next: usize,
}

/// All bytes of `from`, unless they are in place already.
pub(crate) fn copy(from: Span, to: Span) -> Result<Option<Rows>> {
    if from.bytes != to.bytes {
        return Err(Error::artifact(format!("{} bytes do not become {}", from.bytes, to.bytes)));
    }
    if from == to || from.bytes == 0 {
        return Ok(None);
    }
    if from.overlaps(&to) {
        return Err(Error::artifact("a copy onto a part of itself"));
    }
    Ok(Some(Rows { from, to, count: 1, bytes: to.bytes, from_stride: 0, to_stride: 0, skip: 0, next: 0 }))
}

/// The rank's own block along `dim`, or the microbatch's; what lies behind the whole's last row stays unspecified.
pub(crate) fn slice(site: &Site<'_>, (axis, dim): (usize, usize), operand: BufferId, result: BufferId) -> Result<Option<Rows>> {
    let (whole, part) = (site.ty(operand).local_shape(site.mesh()), site.ty(result).local_shape(site.mesh()));
    let alike = |d: usize| d == dim || whole[d] == part[d];
    if dim >= part.len() || whole.len() != part.len() || !(0..part.len()).all(alike) {
        return Err(Error::artifact("a slice that does not fit its operand"));
    }
    let (from, to) = (site.span(operand)?, site.span(result)?);
    if from.overlaps(&to) {
        return Err(Error::artifact("a slice onto its own operand"));
    }
    let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
    let inner = product(&part[dim + 1..]) * site.ty(result).dtype.bytes() as usize;
    let coordinate = site.coordinates(0).0.get(axis).copied().unwrap_or(0);
    let first = u64::from(coordinate) * part[dim];
    let rows = part[dim].min(whole[dim].saturating_sub(first)) as usize;
    let count = if rows == 0 { 0 } else { product(&part[..dim]) };
    let stride = |shape: &[u64]| shape[dim] as usize * inner;
    let skip = if rows == 0 { 0 } else { first as usize * inner };
    let of_microbatch = site.mesh().microbatch_axis().is_some_and(|mb| usize::from(mb.0) == axis);
    if of_microbatch && whole[dim] != part[dim] * u64::from(site.microbatches()) {
        return Err(Error::artifact("microbatches that do not make up what they are slices of"));
    }
    let next = if of_microbatch { rows * inner } else { 0 };
    Ok(Some(Rows { from, to, count, bytes: rows * inner, from_stride: stride(&whole), to_stride: stride(&part), skip, next }))
}

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
