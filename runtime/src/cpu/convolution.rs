//! Convolutions and their gradients.

use super::call::Work;
use super::factors::Factors;
use super::halves::{self, Mover, Staged};
use super::{Cpu, Running};
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use dcc_kernels::library::convolution::{Convolution, Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use dcc_program::factors::FactorSpec;
use dcc_program::program::{Instr, StoreMode};
use dcc_program::types::DType;
use dcc_program::window::Window;

/// `result = convolution(a, b)`, or `+=`.
pub(super) struct Convolving {
    plan: Plan,
    mode: StoreMode,
    a: Span,
    b: Span,
    result: Span,
}

enum Plan {
    F32(Convolution<f32>),
    F64(Convolution<f64>),
    /// Of half floats; the result is one too, or f32.
    Half(Convolution<f32>, [Staged; 2], Option<Staged>),
}

/// A convolution's loops: what moves in windows, what does not, and the dtypes of operands and result.
pub(crate) struct Geometry {
    pub form: Form,
    pub plain: Vec<Plain>,
    pub spatial: Vec<Spatial>,
    pub dtypes: [DType; 3],
}

impl Geometry {
    /// Errors: operands that do not fit the windows.
    pub fn new(site: &Site<'_>, (spec, windows): (&FactorSpec, &[Window]), instr: &Instr) -> Result<Geometry> {
        let ids = [instr.operands[0], instr.operands[1], instr.results[0]];
        let types = ids.map(|id| site.ty(id));
        let [a, b, result] = types;
        if b.dtype != a.dtype || !halves::results_of(a.dtype).contains(&result.dtype) {
            return Err(Error::artifact("a convolution of operands with different dtypes"));
        }
        let factors = Factors::new(spec, &[a, b], result, site.mesh(), &site.coordinates(0))?;
        let roles = roles(spec, windows)?;
        let strides = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
        let by_role = |f: usize| roles.map(|tensor| strides[tensor][f]);
        let spatial = windows.iter().map(|window| {
            let factor = |name: &str| spec.names.iter().position(|n| n == name).expect("`roles` saw it");
            let [x, y, k] = window.names().map(factor);
            Spatial {
                sizes: [x, y, k].map(|f| factors.valid(f)),
                strides: [(x, IMAGE), (y, OUTPUT), (k, KERNEL)].map(|(f, role)| by_role(f)[role].expect("`roles` saw it")),
                stride: window.stride as usize,
                dilation: window.dilation as usize,
                pad: window.pad as isize,
            }
        });
        let spatial: Vec<Spatial> = spatial.collect();
        let moves = |f: &usize| windows.iter().any(|w| w.names().contains(&&spec.names[*f][..]));
        let plain = (0..spec.names.len()).filter(|f| !moves(f)).map(|f| Plain { size: factors.valid(f), strides: by_role(f) });
        let plain: Vec<Plain> = plain.collect();
        if plain.iter().any(|f| f.strides.iter().flatten().count() < 2) {
            return Err(Error::artifact(format!("`{}` sums over a factor of one operand", spec.text())));
        }
        let role = |tensor: usize| roles.iter().position(|&t| t == tensor).expect("each tensor has a role");
        let form = Form { result: role(2), operands: [role(0), role(1)] };
        let [a, b, result] = [site.span(ids[0])?, site.span(ids[1])?, site.span(ids[2])?];
        if result.overlaps(&a) || result.overlaps(&b) {
            return Err(Error::artifact("a convolution that overwrites its operands"));
        }
        Ok(Geometry { form, plain, spatial, dtypes: types.map(|ty| ty.dtype) })
    }
}

impl Cpu {
    pub(super) fn convolution(
        &mut self,
        site: &Site<'_>,
        windows: (&FactorSpec, &[Window]),
        mode: StoreMode,
        instr: &Instr,
    ) -> Result<Work> {
        let Geometry { form, plain, spatial, dtypes: [dtype, _, out] } = Geometry::new(site, windows, instr)?;
        let [a, b, result] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
        let (plan, workspace) = match (dtype, Staged::new(dtype, a), Staged::new(dtype, b)) {
            (DType::F32, ..) => {
                let plan = Convolution::<f32>::new(form, &plain, &spatial);
                let bytes = size_of::<f32>() * plan.workspace();
                (Plan::F32(plan), bytes)
            }
            (DType::F64, ..) => {
                let plan = Convolution::<f64>::new(form, &plain, &spatial);
                let bytes = size_of::<f64>() * plan.workspace();
                (Plan::F64(plan), bytes)
            }
            (_, Some(a), Some(b)) => {
                let plan = Convolution::<f32>::new(form, &plain, &spatial);
                let (operands, result) = ([a, b], Staged::new(out, result));
                let bytes = halves::workspace(&elements(&operands, &result)) + size_of::<f32>() * plan.workspace();
                (Plan::Half(plan, operands, result), bytes)
            }
            _ => return Err(Error::device(format!("no convolution of {} on this device", dtype.name()))),
        };
        self.reserve(workspace);
        Ok(Work::Convolution(Box::new(Convolving { plan, mode, a, b, result })))
    }
}

fn elements([a, b]: &[Staged; 2], result: &Option<Staged>) -> [usize; 3] {
    [a.elements(), b.elements(), result.map_or(0, |result| result.elements())]
}

/// Which tensor (operands 0 and 1, result 2) is image, output and kernel: the one that has those factors of all windows.
fn roles(spec: &FactorSpec, windows: &[Window]) -> Result<[usize; 3]> {
    let tensors = [&spec.operands[0], &spec.operands[1], &spec.result];
    let has = |tensor: usize, name: &str| tensors[tensor].iter().flatten().any(|f| spec.names[usize::from(f.0)] == name);
    let of = |role: usize| (0..3).find(|&tensor| windows.iter().all(|w| has(tensor, w.names()[role])));
    match (of(IMAGE), of(OUTPUT), of(KERNEL)) {
        (Some(x), Some(y), Some(k)) if x != y && x != k && y != k => Ok([x, y, k]),
        _ => Err(Error::artifact(format!("the windows of `{}` do not tell image, output and kernel apart", spec.text()))),
    }
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
