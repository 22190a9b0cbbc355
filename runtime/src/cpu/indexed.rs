//! Scatters, running sums, and the first elements of rows in order.

use super::Running;
use super::call::Work;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use crate::library::indexed::{Places, first, places, runs};
use dcc_kernels::library::math::Real;
use dcc_kernels::library::scatter::{Cumsum, Indices, ScatterAdd};
use dcc_kernels::library::top_k::{Bf16, F16, Sortable, TopK};
use dcc_program::factors::FactorSpec;
use dcc_program::program::{Instr, StoreMode};
use dcc_program::types::DType;

/// Adds rows into a result that is zeroed first, or not.
pub(super) struct Scatter {
    plan: ScatterAdd,
    mode: StoreMode,
    indices: Span,
    index_dtype: DType,
    updates: Span,
    out: Span,
    dtype: DType,
}

pub(super) struct RunningSum {
    plan: Cumsum,
    from: Span,
    to: Span,
    dtype: DType,
}

/// The indices of the first elements of rows.
pub(super) struct Choice {
    plan: TopK,
    from: Span,
    to: Span,
    dtype: DType,
}

pub(super) fn scatter_add(site: &Site<'_>, spec: (&FactorSpec, &str), mode: StoreMode, instr: &Instr) -> Result<Work> {
    let Places { factors, indexed, dtypes: (dtype, index_dtype) } = places(site, spec, instr)?;
    let [indices, updates, out] = [instr.operands[0], instr.operands[1], instr.results[0]];
    let [indices, updates, out] = [site.span(indices)?, site.span(updates)?, site.span(out)?];
    if out.overlaps(&indices) || out.overlaps(&updates) {
        return Err(Error::artifact("a scatter_add that overwrites its operands"));
    }
    Ok(Work::Scatter(Scatter { plan: ScatterAdd::new(&factors, indexed), mode, indices, index_dtype, updates, out, dtype }))
}

impl Scatter {
    pub fn run(&self, on: &Running<'_>) {
        if self.mode == StoreMode::Assign {
            on.memory.zero_span(self.out, on.bases);
        }
        match self.dtype {
            DType::F32 => self.add::<f32>(on),
            _ => self.add::<f64>(on),
        }
    }

    fn add<E: Real>(&self, on: &Running<'_>) {
        // SAFETY: `scatter_add` saw both dtypes, and that `out` overlaps no operand.
        let (indices, updates, out) = unsafe {
            let indices = match self.index_dtype {
                DType::I32 => Indices::I32(on.memory.elements(self.indices, on.bases)),
                _ => Indices::I64(on.memory.elements(self.indices, on.bases)),
            };
            let updates: &[E] = on.memory.elements(self.updates, on.bases);
            (indices, updates, on.memory.elements_mut::<E>(self.out, on.bases))
        };
        self.plan.run(on.pool, indices, updates, out);
    }
}

pub(super) fn cumsum(site: &Site<'_>, along: (u8, bool, bool), instr: &Instr) -> Result<Work> {
    let (plan, dtype) = runs(site, along, instr)?;
    let (from, to) = (site.span(instr.operands[0])?, site.span(instr.results[0])?);
    if from.overlaps(&to) {
        return Err(Error::artifact("a cumsum onto its own operand"));
    }
    Ok(Work::Cumsum(RunningSum { plan, from, to, dtype }))
}

impl RunningSum {
    pub fn run(&self, on: &Running<'_>) {
        match self.dtype {
            DType::F32 => self.floats::<f32>(on),
            DType::F64 => self.floats::<f64>(on),
            DType::I32 => self.integers(on, 0, i32::wrapping_add),
            _ => self.integers(on, 0, i64::wrapping_add),
        }
    }

    /// As slices of `E`, the dtype that `cumsum` saw both have.
    fn operands<'a, E>(&self, on: &Running<'a>) -> (&'a [E], &'a mut [E]) {
        // SAFETY: `cumsum` saw the dtype, and that both do not overlap.
        unsafe { (on.memory.elements(self.from, on.bases), on.memory.elements_mut(self.to, on.bases)) }
    }

    fn floats<E: Real>(&self, on: &Running<'_>) {
        let (from, to) = self.operands::<E>(on);
        self.plan.run(on.pool, from, to);
    }

    /// Positions and counts: short, so on one thread.
    fn integers<T: Copy>(&self, on: &Running<'_>, zero: T, add: fn(T, T) -> T) {
        let (from, to) = self.operands::<T>(on);
        let Cumsum { outer, size, inner, exclusive, reverse } = self.plan;
        for start in (0..outer).flat_map(|o| (0..inner).map(move |i| o * size * inner + i)) {
            let mut sum = zero;
            for step in 0..size {
                let at = start + if reverse { size - 1 - step } else { step } * inner;
                let next = add(sum, from[at]);
                to[at] = if exclusive { sum } else { next };
                sum = next;
            }
        }
    }
}

pub(super) fn top_k(site: &Site<'_>, along: (u8, u64, bool), instr: &Instr) -> Result<Work> {
    let (plan, dtype) = first(site, along, instr)?;
    if !plan.fits(dtype.bytes() as usize) {
        return Err(Error::device(format!("no top_k of {} of {} elements on this device", plan.k, plan.size)));
    }
    let (from, to) = (site.span(instr.operands[0])?, site.span(instr.results[0])?);
    if from.overlaps(&to) {
        return Err(Error::artifact("a top_k that overwrites its operand"));
    }
    Ok(Work::TopK(Choice { plan, from, to, dtype }))
}

impl Choice {
    pub fn run(&self, on: &Running<'_>) {
        match self.dtype {
            DType::F32 => self.indices::<f32>(on),
            DType::F64 => self.indices::<f64>(on),
            DType::BF16 => self.indices::<Bf16>(on),
            DType::F16 => self.indices::<F16>(on),
            DType::I8 => self.indices::<i8>(on),
            DType::I16 => self.indices::<i16>(on),
            DType::I32 => self.indices::<i32>(on),
            DType::I64 => self.indices::<i64>(on),
            DType::U8 | DType::Bool => self.indices::<u8>(on),
            DType::U16 => self.indices::<u16>(on),
            DType::U32 => self.indices::<u32>(on),
            DType::U64 => self.indices::<u64>(on),
        }
    }

    fn indices<T: Sortable>(&self, on: &Running<'_>) {
        // SAFETY: `T` is any bytes of the size of the dtype, which `top_k` saw, as it did that both do not overlap.
        let (from, to) = unsafe { (on.memory.elements::<T>(self.from, on.bases), on.memory.elements_mut(self.to, on.bases)) };
        self.plan.run(on.pool, from, to);
    }
}
