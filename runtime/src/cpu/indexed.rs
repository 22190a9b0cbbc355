//! Scatters and running sums.

use super::Running;
use super::call::Work;
use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_kernels::library::math::Real;
use dcc_kernels::library::scatter::{Cumsum, Factor, Indexed, Indices, ScatterAdd};
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

/// A scatter's loops.
pub(crate) struct Places {
    pub factors: Vec<Factor>,
    pub indexed: Indexed,
    /// Of the updates and the result; of the indices.
    pub dtypes: (DType, DType),
}

/// The loops of a scatter_add. Errors: operands that do not fit it.
pub(crate) fn places(site: &Site<'_>, (spec, indexed): (&FactorSpec, &str), instr: &Instr) -> Result<Places> {
    let [indices, updates, out] = [instr.operands[0], instr.operands[1], instr.results[0]];
    let types = [site.ty(indices), site.ty(updates)];
    let factors = Factors::new(spec, &types, site.ty(out), site.mesh(), &site.coordinates(0))?;
    let row = spec.names.iter().position(|name| name == indexed);
    let row = row.ok_or_else(|| Error::artifact(format!("`{}` has no factor {indexed}", spec.text())))?;
    let [a, b, c] = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
    let others = (0..spec.names.len()).filter(|&f| f != row);
    let plan: Vec<Factor> = others.map(|f| Factor { size: factors.valid(f), index: a[f], update: b[f], out: c[f] }).collect();
    let stride = c[row].filter(|_| a[row].is_none() && b[row].is_none());
    let stride = stride.ok_or_else(|| Error::artifact(format!("factor {indexed} of `{}` is not the result's", spec.text())))?;
    if plan.iter().any(|f| f.update.is_none() || (f.index.is_none() && f.out.is_none())) {
        return Err(Error::artifact(format!("`{}` has a factor that one operand alone has", spec.text())));
    }
    let extent = factors.extents[row];
    let indexed = Indexed { stride, offset: extent.offset as i64, valid: extent.valid as usize };
    let (dtype, index_dtype) = (site.ty(out).dtype, types[0].dtype);
    if !matches!(dtype, DType::F32 | DType::F64) || types[1].dtype != dtype || !matches!(index_dtype, DType::I32 | DType::I64) {
        let what = format!("no scatter_add of {} by {} on this device", types[1].dtype.name(), index_dtype.name());
        return Err(Error::device(what));
    }
    Ok(Places { factors: plan, indexed, dtypes: (dtype, index_dtype) })
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

/// The runs of a running sum, and its dtype. Errors: operands that do not fit it.
pub(crate) fn runs(site: &Site<'_>, (dim, exclusive, reverse): (u8, bool, bool), instr: &Instr) -> Result<(Cumsum, DType)> {
    let (operand, result) = (instr.operands[0], instr.results[0]);
    let (shape, dtype) = (site.ty(operand).local_shape(site.mesh()), site.ty(operand).dtype);
    let dim = usize::from(dim);
    if dim >= shape.len() || *site.ty(operand) != *site.ty(result) {
        return Err(Error::artifact("a cumsum whose result has another type"));
    }
    if !matches!(dtype, DType::F32 | DType::F64 | DType::I32 | DType::I64) {
        return Err(Error::device(format!("no cumsum of {} on this device", dtype.name())));
    }
    let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
    let (outer, size, inner) = (product(&shape[..dim]), shape[dim] as usize, product(&shape[dim + 1..]));
    Ok((Cumsum { outer, size, inner, exclusive, reverse }, dtype))
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
