//! Attention and its gradient.

use super::call::Work;
use super::factors::Factors;
use super::halves::{self, Mover, Staged};
use super::memory::{Memory, scratch};
use super::{Cpu, Running};
use crate::error::{Error, Result};
use crate::exec::{Bases, Site, Span};
use dcc_kernels::library::attention::{Attention, Gradient, Gradients, Inputs, Mask, Shape, Strides};
use dcc_kernels::library::math::Real;
use dcc_program::factors::{DimFactors, FactorSpec};
use dcc_program::program::{self, Instr, MaskKind};
use dcc_program::types::DType;

/// Channels for which the kernel's per-thread scratch is large enough.
const MAX_CHANNELS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

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

impl Cpu {
    pub(super) fn attention(
        &mut self,
        site: &Site<'_>,
        attention: &program::Attention,
        instr: &Instr,
        pass: Pass,
    ) -> Result<Work> {
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
        self.reserve(workspace);
        let clash = |(i, a): (usize, &Span)| operands.iter().chain(&results[..i]).any(|b| a.overlaps(b));
        if results.iter().enumerate().any(clash) {
            return Err(Error::artifact("an attention that overwrites its operands"));
        }
        let attending = Attending { plan, pass, mask: attention.mask, output, inputs, operands, results };
        Ok(Work::Attention(Box::new(attending)))
    }
}

/// Sizes and layouts of an attention, and its dtype. Errors: operands that do not fit it, or that are laid out as kernels do not take.
pub(crate) fn geometry(site: &Site<'_>, attention: &program::Attention, instr: &Instr, pass: Pass) -> Result<(Shape, DType)> {
    let spec = &attention.spec;
    // Q, K, V and the mask among the operands; O's type.
    let first = usize::from(pass == Pass::Backward);
    let masks = usize::from(attention.mask != MaskKind::None);
    let inputs = instr.operands[first..first + 3].iter().chain(&instr.operands[instr.operands.len() - masks..]);
    let types: Vec<_> = inputs.map(|&id| site.ty(id)).collect();
    let output = site.ty(if pass == Pass::Forward { instr.results[0] } else { instr.operands[0] });
    let factors = Factors::new(spec, &types, output, site.mesh(), &site.coordinates(0))?;
    let shape = shape(attention, &factors)?;
    let dtype = output.dtype;
    let wide = if dtype.bytes() == 2 { DType::F32 } else { dtype };
    let mask_dtype = if attention.mask == MaskKind::Boolean { DType::Bool } else { wide };
    if types[..3].iter().any(|ty| ty.dtype != dtype) || types[3..].iter().any(|ty| ty.dtype != mask_dtype) {
        return Err(Error::artifact("attention over operands of different dtypes"));
    }
    Ok((shape, dtype))
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

/// Factor numbers by the part they play.
struct Roles {
    b: Option<usize>,
    h: Option<usize>,
    g: Option<usize>,
    t: Option<usize>,
    s: Option<usize>,
    e: Option<usize>,
    f: Option<usize>,
}

fn shape(attention: &program::Attention, factors: &Factors) -> Result<Shape> {
    let spec = &attention.spec;
    let find = |name: &str| spec.names.iter().position(|n| n == name);
    let roles = Roles { b: find("b"), h: find("h"), g: find("g"), t: find("t"), s: find("s"), e: find("e"), f: find("f") };
    let known = ["b", "h", "g", "t", "s", "e", "f"];
    if let Some(other) = spec.names.iter().find(|name| !known.contains(&&name[..])) {
        return Err(Error::device(format!("attention with a factor {other} on this device")));
    }
    let size = |factor: Option<usize>| factor.map_or(1, |f| factors.valid(f));
    let strides = |dims: &[DimFactors], position: Option<usize>, channel: Option<usize>| {
        let all = factors.strides(dims);
        let of = |factor: Option<usize>| factor.and_then(|f| all[f]).unwrap_or(0);
        Strides { batch: of(roles.b), head: of(roles.h), group: of(roles.g), position: of(position), channel: of(channel) }
    };
    let offset = |factor: Option<usize>| factor.map_or(0, |f| factors.extents[f].offset as i64);
    let operand = |i: usize, position, channel| strides(&spec.operands[i], position, channel);
    let shape = Shape {
        batch: size(roles.b),
        heads: size(roles.h),
        groups: size(roles.g),
        queries: size(roles.t),
        keys: size(roles.s),
        channels: size(roles.e),
        values: size(roles.f),
        scale: f64::from_bits(attention.scale),
        causal: (attention.causal && roles.t.is_some()).then(|| offset(roles.t) - offset(roles.s)),
        q: operand(0, roles.t, roles.e),
        k: operand(1, roles.s, roles.e),
        v: operand(2, roles.s, roles.f),
        o: strides(&spec.result, roles.t, roles.f),
        lse: strides(&lse_dims(spec), roles.t, None),
        mask: if attention.mask == MaskKind::None { Strides::default() } else { operand(3, roles.t, roles.s) },
    };
    let contiguous = |strides: &Strides, size: usize| strides.channel == 1 || size == 1;
    let layouts = [(&shape.q, shape.channels), (&shape.k, shape.channels), (&shape.v, shape.values), (&shape.o, shape.values)];
    if !layouts.iter().all(|(strides, size)| contiguous(strides, *size)) {
        return Err(Error::device(format!("attention `{}`, whose channels are not the last dim, on this device", spec.text())));
    }
    if shape.channels.max(shape.values) > MAX_CHANNELS {
        let channels = shape.channels.max(shape.values);
        return Err(Error::device(format!("attention heads of {channels} channels: this device takes {MAX_CHANNELS}")));
    }
    Ok(shape)
}

/// O's dims without `f`: the dims of Lse.
fn lse_dims(spec: &FactorSpec) -> Vec<DimFactors> {
    let is_f = |name: &dcc_program::FactorId| spec.names[usize::from(name.0)] == "f";
    let kept = spec.result.iter().filter(|dim| !(dim.len() == 1 && is_f(&dim[0])));
    kept.map(|dim| dim.iter().copied().filter(|factor| !is_f(factor)).collect()).collect()
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
