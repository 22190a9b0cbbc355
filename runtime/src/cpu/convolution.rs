//! Convolutions and their gradients.

use super::Running;
use super::call::{Call, Work};
use super::halves::{self, Mover, Staged};
use super::plans::Plans;
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use crate::library::convolution::Geometry;
use dcc_kernels::library::convolution::Convolution;
use dcc_program::factors::FactorSpec;
use dcc_program::program::{Instr, StoreMode};
use dcc_program::types::DType;
use dcc_program::window::Window;
use std::sync::Arc;

/// `result = convolution(a, b)`, or `+=`.
pub(super) struct Convolving {
    plan: Plan,
    mode: StoreMode,
    a: Span,
    b: Span,
    result: Span,
}

enum Plan {
    F32(Arc<Convolution<f32>>),
    F64(Arc<Convolution<f64>>),
    /// Of half floats; the result is one too, or f32.
    Half(Arc<Convolution<f32>>, [Staged; 2], Option<Staged>),
}

pub(super) fn convolution(
    plans: &mut Plans,
    site: &Site<'_>,
    windows: (&FactorSpec, &[Window]),
    mode: StoreMode,
    instr: &Instr,
) -> Result<Call> {
    let Geometry { form, plain, spatial, dtypes: [dtype, _, out] } = Geometry::new(site, windows, instr)?;
    let loops = (form, plain, spatial);
    let f32s = |plans: &mut Plans| plans.get(&loops, |(form, plain, spatial)| Convolution::<f32>::new(*form, plain, spatial));
    let [a, b, result] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
    let (plan, workspace) = match (dtype, Staged::new(dtype, a), Staged::new(dtype, b)) {
        (DType::F32, ..) => {
            let plan = f32s(plans);
            let bytes = size_of::<f32>() * plan.workspace();
            (Plan::F32(plan), bytes)
        }
        (DType::F64, ..) => {
            let plan = plans.get(&loops, |(form, plain, spatial)| Convolution::<f64>::new(*form, plain, spatial));
            let bytes = size_of::<f64>() * plan.workspace();
            (Plan::F64(plan), bytes)
        }
        (_, Some(a), Some(b)) => {
            let plan = f32s(plans);
            let (operands, result) = ([a, b], Staged::new(out, result));
            let bytes = halves::workspace(&elements(&operands, &result)) + size_of::<f32>() * plan.workspace();
            (Plan::Half(plan, operands, result), bytes)
        }
        _ => return Err(Error::device(format!("no convolution of {} on this device", dtype.name()))),
    };
    Ok(Call::new(Work::Convolution(Box::new(Convolving { plan, mode, a, b, result })), workspace))
}

fn elements([a, b]: &[Staged; 2], result: &Option<Staged>) -> [usize; 3] {
    [a.elements(), b.elements(), result.map_or(0, |result| result.elements())]
}

impl Convolving {
    pub fn flops(&self) -> u64 {
        match &self.plan {
            Plan::F32(plan) | Plan::Half(plan, ..) => plan.flops() as u64,
            Plan::F64(plan) => plan.flops() as u64,
        }
    }

    pub fn run(&self, on: Running<'_>) {
        let accumulate = self.mode == StoreMode::Accumulate;
        if let Plan::Half(plan, operands, result) = &self.plan {
            return self.run_half(plan, (operands, result), on);
        }
        // SAFETY: `convolution` saw the dtype of all three and that the result overlaps no operand; the workspace is plain
        // numbers, at least as aligned as these.
        unsafe {
            match &self.plan {
                Plan::F32(plan) => {
                    let [a, b] = [self.a, self.b].map(|span| on.memory.elements(span, on.bases));
                    let result = on.memory.elements_mut(self.result, on.bases);
                    plan.run(on.pool, accumulate, a, b, result, super::memory::scratch(on.workspace));
                }
                Plan::F64(plan) => {
                    let [a, b] = [self.a, self.b].map(|span| on.memory.elements(span, on.bases));
                    let result = on.memory.elements_mut(self.result, on.bases);
                    plan.run(on.pool, accumulate, a, b, result, super::memory::scratch(on.workspace));
                }
                Plan::Half(..) => unreachable!("it has run"),
            }
        }
    }

    fn run_half(&self, plan: &Convolution<f32>, (operands, result): (&[Staged; 2], &Option<Staged>), on: Running<'_>) {
        let accumulate = self.mode == StoreMode::Accumulate;
        let (by, workspace) = Mover::new(on);
        let ([a, b, sum], workspace) = halves::carve(workspace, elements(operands, result));
        operands[0].read(by, a);
        operands[1].read(by, b);
        match result {
            Some(result) => {
                if accumulate {
                    result.read(by, sum);
                }
                plan.run(by.pool, accumulate, a, b, sum, workspace);
                result.write(by, sum);
            }
            None => {
                // SAFETY: `convolution` saw that the result is f32, and that it overlaps no operand.
                let result = unsafe { by.memory.elements_mut(self.result, by.bases) };
                plan.run(by.pool, accumulate, a, b, result, workspace);
            }
        }
    }
}
