//! Matrix products.

use super::Running;
use super::call::{Call, Work};
use super::halves::{self, Mover, Staged};
use super::plans::Plans;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use crate::library::contraction::loops;
use dcc_kernels::library::matmul::DotGeneral;
use dcc_program::factors::FactorSpec;
use dcc_program::program::{Instr, StoreMode};
use dcc_program::types::DType;
use std::sync::Arc;

/// `out = lhs · rhs`, or `out += lhs · rhs`.
pub(super) struct Contraction {
    plan: Plan,
    mode: StoreMode,
    lhs: Span,
    rhs: Span,
    out: Span,
}

enum Plan {
    F32(Arc<DotGeneral<f32>>),
    F64(Arc<DotGeneral<f64>>),
    /// Of half floats, which the product itself converts; the result is one too, or f32.
    Half(Arc<DotGeneral<f32, u16>>, Option<Staged>),
    /// Of half floats that become f32 first, where the device has no such product.
    Widened(Arc<DotGeneral<f32>>, Halves),
}

/// Operands of half floats; the result is one too, or f32.
struct Halves {
    lhs: Staged,
    rhs: Staged,
    out: Option<Staged>,
}

pub(super) fn dot(plans: &mut Plans, site: &Site<'_>, spec: &FactorSpec, mode: StoreMode, instr: &Instr) -> Result<Call> {
    let (loops, dtypes) = loops(site, spec, instr)?;
    let dtype = dtypes[0];
    let [lhs, rhs, out] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
    let mut workspace = 0;
    let plan = match (dtype, Staged::new(dtype, lhs), Staged::new(dtype, rhs)) {
        (DType::F32, ..) => Plan::F32(plans.get(&loops, |loops| DotGeneral::new(loops))),
        (DType::F64, ..) => Plan::F64(plans.get(&loops, |loops| DotGeneral::new(loops))),
        (_, Some(lhs), Some(rhs)) => {
            let out = Staged::new(dtypes[2], out);
            // None where the device has no such product.
            let halves =
                plans.get(&(loops.clone(), dtype), |(loops, dtype)| DotGeneral::of_halves(loops, *dtype).map(Arc::new));
            match &*halves {
                Some(plan) => {
                    let sums =
                        if mode == StoreMode::Accumulate { out.map_or(0, |out| out.elements()) } else { plan.workspace() };
                    workspace = halves::workspace(&[sums]);
                    Plan::Half(Arc::clone(plan), out)
                }
                None => {
                    let halves = Halves { lhs, rhs, out };
                    workspace = halves::workspace(&halves.elements());
                    Plan::Widened(plans.get(&loops, |loops| DotGeneral::new(loops)), halves)
                }
            }
        }
        _ => return Err(Error::device(format!("no matrix product of {} on this device", dtype.name()))),
    };
    Ok(Call::new(Work::Dot(Box::new(Contraction { plan, mode, lhs, rhs, out })), workspace))
}

impl Halves {
    fn elements(&self) -> [usize; 3] {
        [self.lhs.elements(), self.rhs.elements(), self.out.map_or(0, |out| out.elements())]
    }
}

impl Contraction {
    pub fn flops(&self) -> u64 {
        match &self.plan {
            Plan::F32(plan) | Plan::Widened(plan, _) => plan.flops() as u64,
            Plan::F64(plan) => plan.flops() as u64,
            Plan::Half(plan, _) => plan.flops() as u64,
        }
    }

    pub fn run(&self, on: Running<'_>) {
        let beta = if self.mode == StoreMode::Accumulate { 1.0 } else { 0.0 };
        match &self.plan {
            Plan::F32(plan) => {
                let (lhs, rhs, out) = self.operands(&on);
                plan.run(on.pool, 1.0, beta as f32, lhs, rhs, out);
            }
            Plan::F64(plan) => {
                let (lhs, rhs, out) = self.operands(&on);
                plan.run(on.pool, 1.0, beta, lhs, rhs, out);
            }
            Plan::Half(plan, out) => self.run_half(plan, *out, on),
            Plan::Widened(plan, halves) => self.run_widened(plan, halves, on),
        }
    }

    fn run_half(&self, plan: &DotGeneral<f32, u16>, out: Option<Staged>, on: Running<'_>) {
        let accumulate = self.mode == StoreMode::Accumulate;
        let (by, workspace) = Mover::new(on);
        // SAFETY: a half float is any two bytes; `dot` saw the dtypes, and that the result overlaps no operand.
        let (lhs, rhs) = unsafe { (by.memory.elements(self.lhs, by.bases), by.memory.elements(self.rhs, by.bases)) };
        match out {
            Some(out) if accumulate => {
                let ([sum], _) = halves::carve(workspace, [out.elements()]);
                out.read(by, sum);
                plan.run(by.pool, 1.0, 1.0, lhs, rhs, sum);
                out.write(by, sum);
            }
            Some(_) => {
                // SAFETY: as above.
                let out = unsafe { by.memory.elements_mut(self.out, by.bases) };
                plan.run_rounded(by.pool, 1.0, lhs, rhs, out, workspace);
            }
            None => {
                // SAFETY: as above.
                let out = unsafe { by.memory.elements_mut(self.out, by.bases) };
                plan.run(by.pool, 1.0, if accumulate { 1.0 } else { 0.0 }, lhs, rhs, out);
            }
        }
    }

    fn run_widened(&self, plan: &DotGeneral<f32>, halves: &Halves, on: Running<'_>) {
        let accumulate = self.mode == StoreMode::Accumulate;
        let beta = if accumulate { 1.0 } else { 0.0 };
        let (by, workspace) = Mover::new(on);
        let ([lhs, rhs, sum], _) = halves::carve(workspace, halves.elements());
        halves.lhs.read(by, lhs);
        halves.rhs.read(by, rhs);
        match &halves.out {
            Some(out) => {
                if accumulate {
                    out.read(by, sum);
                }
                plan.run(by.pool, 1.0, beta, lhs, rhs, sum);
                out.write(by, sum);
            }
            None => {
                // SAFETY: `dot` saw that the result is f32, and that it overlaps no operand.
                let out = unsafe { by.memory.elements_mut(self.out, by.bases) };
                plan.run(by.pool, 1.0, beta, lhs, rhs, out);
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
