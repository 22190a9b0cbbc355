//! Attention and its gradient: sizes and layouts.

use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_kernels::library::attention::{Shape, Strides};
use dcc_program::factors::{DimFactors, FactorSpec};
use dcc_program::program::{self, Instr, MaskKind};
use dcc_program::types::DType;

/// Channels for which the kernel's per-thread scratch is large enough.
const MAX_CHANNELS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// Sizes and layouts of an attention, and its dtype. Errors: operands that do not fit it, or that are laid out as kernels do not take.
pub fn geometry(site: &Site<'_>, attention: &program::Attention, instr: &Instr, pass: Pass) -> Result<(Shape, DType)> {
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
