//! Half floats in library operations: operands become f32 in the workspace, results are rounded once from there.

use super::Running;
use super::memory::Memory;
use crate::exec::{Bases, Span};
use dcc_kernels::Pool;
use dcc_kernels::library::half::Half;
use dcc_program::types::DType;

/// Elements between which parts of the workspace begin.
const ALIGNMENT: usize = 16;

/// An operand or a result of half floats.
#[derive(Clone, Copy)]
pub(super) struct Staged {
    half: Half,
    span: Span,
}

/// What a step moves staged values with.
#[derive(Clone, Copy)]
pub(super) struct Mover<'a> {
    pub memory: &'a Memory,
    pub bases: &'a Bases,
    pub pool: &'a Pool,
}

impl<'a> Mover<'a> {
    /// The mover of a call, and its workspace as f32.
    pub fn new(on: Running<'a>) -> (Mover<'a>, &'a mut [f32]) {
        // SAFETY: any bits are an f32, which is less aligned than a u64.
        let workspace = unsafe { super::memory::scratch::<f32>(on.workspace) };
        (Mover { memory: on.memory, bases: on.bases, pool: on.pool }, workspace)
    }
}

impl Staged {
    /// `None` where `dtype` is no half type.
    pub fn new(dtype: DType, span: Span) -> Option<Staged> {
        Some(Staged { half: Half::of(dtype)?, span })
    }

    pub fn elements(&self) -> usize {
        self.span.bytes / size_of::<u16>()
    }

    /// Reads the value into `to`.
    pub fn read(&self, by: Mover<'_>, to: &mut [f32]) {
        // SAFETY: a half float is any two bytes, to which its spans are aligned; nobody writes an operand while its call runs.
        let from = unsafe { by.memory.elements(self.span, by.bases) };
        self.half.widen(by.pool, from, to);
    }

    /// Writes the value from `from`.
    pub fn write(&self, by: Mover<'_>, from: &[f32]) {
        // SAFETY: as above; a result is its call's alone.
        let to = unsafe { by.memory.elements_mut(self.span, by.bases) };
        self.half.narrow(by.pool, from, to);
    }
}

/// Bytes of workspace for values of so many elements.
pub(super) fn workspace(counts: &[usize]) -> usize {
    counts.iter().map(|count| count.next_multiple_of(ALIGNMENT) * size_of::<f32>()).sum()
}

/// Parts of a workspace of so many elements, and the rest.
pub(super) fn carve<const N: usize>(mut rest: &mut [f32], counts: [usize; N]) -> ([&mut [f32]; N], &mut [f32]) {
    let parts = counts.map(|count| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(count.next_multiple_of(ALIGNMENT));
        rest = after;
        &mut part[..count]
    });
    (parts, rest)
}
