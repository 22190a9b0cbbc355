//! Copies of rows: slices of a dim, and whole buffers that could not stay where they are.

use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_program::program::BufferId;

/// `count` rows of `bytes` each, from one span to another.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
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
pub fn copy(from: Span, to: Span) -> Result<Option<Rows>> {
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
pub fn slice(site: &Site<'_>, (axis, dim): (usize, usize), operand: BufferId, result: BufferId) -> Result<Option<Rows>> {
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
