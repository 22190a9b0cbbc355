//! Matrix products.

use super::Running;
use super::call::Work;
use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_kernels::library::matmul::{DotGeneral, Factor};
use dcc_program::factors::FactorSpec;
use dcc_program::program::{Instr, StoreMode};
use dcc_program::types::DType;

/// `out = lhs · rhs`, or `out += lhs · rhs`.
pub(super) struct Contraction {
    plan: Plan,
    mode: StoreMode,
    lhs: Span,
    rhs: Span,
    out: Span,
}

enum Plan {
    F32(DotGeneral<f32>),
    F64(DotGeneral<f64>),
}

pub(super) fn dot(site: &Site<'_>, spec: &FactorSpec, mode: StoreMode, instr: &Instr) -> Result<Work> {
    let types = [instr.operands[0], instr.operands[1], instr.results[0]].map(|id| site.ty(id));
    let [lhs, rhs, out] = types;
    if lhs.dtype != out.dtype || rhs.dtype != out.dtype {
        return Err(Error::artifact("a dot of operands with different dtypes"));
    }
    let factors = Factors::new(spec, &[lhs, rhs], out, site.mesh(), &site.coordinates(0))?;
    let [a, b, c] = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
    let factor = |f: usize| Factor { size: factors.valid(f), lhs: a[f], rhs: b[f], out: c[f] };
    let plan: Vec<Factor> = (0..spec.names.len()).map(factor).collect();
    let count = |f: &Factor| [f.lhs, f.rhs, f.out].iter().flatten().count();
    if plan.iter().any(|f| count(f) < 2) {
        return Err(Error::artifact(format!("`{}` sums over a factor of one operand", spec.text())));
    }
    let plan = match out.dtype {
        DType::F32 => Plan::F32(DotGeneral::new(&plan)),
        DType::F64 => Plan::F64(DotGeneral::new(&plan)),
        other => return Err(Error::device(format!("no matrix product of {} on this device", other.name()))),
    };
    let [lhs, rhs, out] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
    if out.overlaps(&lhs) || out.overlaps(&rhs) {
        return Err(Error::artifact("a dot that overwrites its operands"));
    }
    Ok(Work::Dot(Contraction { plan, mode, lhs, rhs, out }))
}

impl Contraction {
    pub fn flops(&self) -> u64 {
        match &self.plan {
            Plan::F32(plan) => plan.flops() as u64,
            Plan::F64(plan) => plan.flops() as u64,
        }
    }

    pub fn run(&self, on: &Running<'_>) {
        match &self.plan {
            Plan::F32(plan) => {
                let (lhs, rhs, out) = self.operands(on);
                plan.run(on.pool, 1.0, if self.mode == StoreMode::Accumulate { 1.0 } else { 0.0 }, lhs, rhs, out);
            }
            Plan::F64(plan) => {
                let (lhs, rhs, out) = self.operands(on);
                plan.run(on.pool, 1.0, if self.mode == StoreMode::Accumulate { 1.0 } else { 0.0 }, lhs, rhs, out);
            }
        }
    }

    /// As slices of `E`, the dtype that `dot` saw all three have.
    fn operands<'a, E>(&self, on: &Running<'a>) -> (&'a [E], &'a [E], &'a mut [E]) {
        // SAFETY: `dot` saw the dtype, and that `out` overlaps no operand.
        unsafe {
            (
                on.memory.elements(self.lhs, on.bases),
                on.memory.elements(self.rhs, on.bases),
                on.memory.elements_mut(self.out, on.bases),
            )
        }
    }
}
