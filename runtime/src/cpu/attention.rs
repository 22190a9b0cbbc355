//! Attention and its gradient.

use super::Running;
use super::call::{Call, Work};
use super::halves::{self, Mover, Staged};
use super::memory::{Memory, scratch};
use crate::error::{Error, Result};
use crate::exec::{Bases, Site, Span};
use crate::library::attention::{Pass, geometry};
use dcc_kernels::library::attention::{Attention, Gradient, Gradients, Inputs, Mask, Shape, Strides};
use dcc_kernels::library::math::Real;
use dcc_program::program::{self, Instr, MaskKind};
use dcc_program::types::DType;

/// An attention of one pass on one rank.
pub(super) struct Attending {
    plan: Plan,
    pass: Pass,
    mask: MaskKind,
    /// Of O, dO too.
    output: Strides,
    /// Of Q, K, V, their gradients too.
    inputs: [Strides; 3],
    operands: Vec<Span>,
    results: Vec<Span>,
}

enum Plan {
    F32(Attention<f32>),
    F64(Attention<f64>),
    /// Of half floats, but for Lse and an additive mask: those among the operands, then those among the results.
    Half(Attention<f32>, Box<[Staged]>),
}

pub(super) fn attention(site: &Site<'_>, attention: &program::Attention, instr: &Instr, pass: Pass) -> Result<Call> {
    let (shape, dtype) = geometry(site, attention, instr, pass)?;
    let (output, inputs) = (shape.o, [shape.q, shape.k, shape.v]);
    let spans = |ids: &[_]| ids.iter().map(|&id| site.span(id)).collect::<Result<Vec<Span>>>();
    let (operands, results) = (spans(&instr.operands)?, spans(&instr.results)?);
    let (plan, workspace) = match dtype {
        DType::F32 => plan(&shape, pass, Plan::F32),
        DType::F64 => plan(&shape, pass, Plan::F64),
        DType::F16 | DType::BF16 => {
            // Lse and the mask are none.
            let (read, written) = if pass == Pass::Forward { (3, 1) } else { (5, 3) };
            let spans = operands[..read].iter().chain(&results[..written]);
            let staged: Box<[Staged]> = spans.filter_map(|&span| Staged::new(dtype, span)).collect();
            let counts: Vec<usize> = staged.iter().map(Staged::elements).collect();
            let (plan, workspace) = plan(&shape, pass, |plan| Plan::Half(plan, staged));
            (plan, workspace + halves::workspace(&counts))
        }
        other => return Err(Error::device(format!("no attention of {} on this device", other.name()))),
    };
    let clash = |(i, a): (usize, &Span)| operands.iter().chain(&results[..i]).any(|b| a.overlaps(b));
    if results.iter().enumerate().any(clash) {
        return Err(Error::artifact("an attention that overwrites its operands"));
    }
    let attending = Attending { plan, pass, mask: attention.mask, output, inputs, operands, results };
    Ok(Call::new(Work::Attention(Box::new(attending)), workspace))
}

/// The plan, and the bytes of workspace that it needs.
fn plan<E: Real>(shape: &Shape, pass: Pass, wrap: impl FnOnce(Attention<E>) -> Plan) -> (Plan, usize) {
    let attention = Attention::<E>::new(shape);
    let elements = match pass {
        Pass::Forward => attention.forward_workspace(),
        Pass::Backward => attention.backward_workspace(),
    };
    (wrap(attention), elements * size_of::<E>())
}

impl Attending {
    pub fn flops(&self) -> u64 {
        let forward = match &self.plan {
            Plan::F32(plan) | Plan::Half(plan, _) => plan.flops() as u64,
            Plan::F64(plan) => plan.flops() as u64,
        };
        // Scores again, then four products where the forward pass has two.
        if self.pass == Pass::Forward { forward } else { forward / 2 * 5 }
    }

    pub fn run(&self, on: Running<'_>) {
        match &self.plan {
            Plan::F32(plan) => self.with(plan, on),
            Plan::F64(plan) => self.with(plan, on),
            Plan::Half(plan, staged) if self.pass == Pass::Forward => self.forward_half(plan, staged, on),
            Plan::Half(plan, staged) => self.backward_half(plan, staged, on),
        }
    }

    fn with<E: Real>(&self, plan: &Attention<E>, on: Running<'_>) {
        let Running { memory, pool, workspace, bases, .. } = on;
        // SAFETY: `attention` saw that all operands but a boolean mask are of `E`, and that no result overlaps an operand or
        // another result; the workspace is plain numbers, at least as aligned as `E`.
        unsafe {
            let read = |i: usize| memory.elements::<E>(self.operands[i], bases);
            let write = |i: usize| memory.elements_mut::<E>(self.results[i], bases);
            let workspace = scratch::<E>(workspace);
            let mask = self.mask(memory, bases);
            if self.pass == Pass::Forward {
                let inputs = Inputs { q: read(0), k: read(1), v: read(2), mask };
                plan.forward(pool, inputs, write(0), write(1), workspace);
                return;
            }
            let given = Gradient {
                output_gradient: read(0),
                output_gradient_strides: self.output,
                inputs: Inputs { q: read(1), k: read(2), v: read(3), mask },
                o: read(4),
                lse: read(5),
            };
            let [dq_strides, dk_strides, dv_strides] = self.inputs;
            let results = Gradients { dq: write(0), dk: write(1), dv: write(2), dq_strides, dk_strides, dv_strides };
            plan.backward(pool, &given, results, workspace);
        }
    }

    /// # Safety
    /// An additive mask is of `E`.
    unsafe fn mask<'a, E: Real>(&self, memory: &'a Memory, bases: &Bases) -> Mask<'a, E> {
        let last = self.operands[self.operands.len() - 1];
        // SAFETY: the caller's; a boolean mask is of bytes.
        unsafe {
            match self.mask {
                MaskKind::None => Mask::None,
                MaskKind::Additive => Mask::Additive(memory.elements(last, bases)),
                MaskKind::Boolean => Mask::Boolean(memory.elements(last, bases)),
            }
        }
    }

    fn forward_half(&self, plan: &Attention<f32>, staged: &[Staged], on: Running<'_>) {
        let (by, workspace) = Mover::new(on);
        let ([q, k, v, o], workspace) = halves::carve(workspace, std::array::from_fn(|i| staged[i].elements()));
        [&mut *q, &mut *k, &mut *v].into_iter().zip(staged).for_each(|(to, from)| from.read(by, to));
        // SAFETY: `attention` saw that Lse and an additive mask are f32, and that no result overlaps an operand or another result.
        let (mask, lse) = unsafe { (self.mask(by.memory, by.bases), by.memory.elements_mut(self.results[1], by.bases)) };
        plan.forward(by.pool, Inputs { q, k, v, mask }, o, lse, workspace);
        staged[3].write(by, o);
    }

    fn backward_half(&self, plan: &Attention<f32>, staged: &[Staged], on: Running<'_>) {
        let (by, workspace) = Mover::new(on);
        let counts = std::array::from_fn(|i| staged[i].elements());
        let ([output_gradient, q, k, v, o, dq, dk, dv], workspace) = halves::carve(workspace, counts);
        [&mut *output_gradient, &mut *q, &mut *k, &mut *v, &mut *o]
            .into_iter()
            .zip(staged)
            .for_each(|(to, from)| from.read(by, to));
        // SAFETY: as in `forward_half`.
        let (mask, lse) = unsafe { (self.mask(by.memory, by.bases), by.memory.elements(self.operands[5], by.bases)) };
        let output_gradient_strides = self.output;
        let given = Gradient { output_gradient, output_gradient_strides, inputs: Inputs { q, k, v, mask }, o, lse };
        let [dq_strides, dk_strides, dv_strides] = self.inputs;
        let results = Gradients { dq: &mut *dq, dk: &mut *dk, dv: &mut *dv, dq_strides, dk_strides, dv_strides };
        plan.backward(by.pool, &given, results, workspace);
        [dq, dk, dv].into_iter().zip(&staged[5..]).for_each(|(from, to)| to.write(by, from));
    }
}
