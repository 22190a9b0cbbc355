//! Parameters, inputs, scalars, outputs: what the runtime fills and reads.

use super::{CheckError, Checked, Fault, error, refuse};
use crate::program::*;
use crate::types::{DType, TensorType};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn program(p: &Program) -> Result<(), CheckError> {
    let at = |what: &str, name: &str| error_at(p, format!("{what} {name}"));
    let mut seen = BTreeSet::new();
    let all = p.params.iter().map(|x| x.buffer).chain(p.inputs.iter().map(|x| x.buffer));
    let all = all.chain(p.scalars.iter().map(|x| x.buffer));
    for buffer in all.clone().chain(p.outputs.iter().map(|x| x.buffer)) {
        if buffer.0 as usize >= p.buffers.len() {
            let e = (Fault::Malformed, format!("b{} of {} buffers", buffer.0, p.buffers.len()));
            return Err(at("the list of", "parameters, inputs, scalars and outputs")(e));
        }
    }
    for buffer in all {
        if !seen.insert(buffer) {
            let e = (Fault::External, format!("b{} is two of parameter, input and scalar", buffer.0));
            return Err(at("the list of", "parameters, inputs and scalars")(e));
        }
    }
    let mut names = BTreeSet::new();
    for param in &p.params {
        let unique = names.insert((&param.name, &param.kind, param.piece));
        self::param(p, param, unique).map_err(at("parameter", &param.name))?;
    }
    for (i, input) in p.inputs.iter().enumerate() {
        let ty = p.ty(input.buffer);
        let twice = p.inputs[..i].iter().any(|other| other.name == input.name);
        if twice || !ty.sharding.pending.is_empty() || p.buffer(input.buffer).place == Place::Scratch {
            let e = (Fault::External, format!("{} cannot be filled: named twice, pending, or in scratch", ty.text(&p.mesh)));
            return Err(at("input", &input.name)(e));
        }
    }
    for scalar in &p.scalars {
        self::scalar(p, scalar).map_err(at("scalar", scalar.kind.name()))?;
    }
    for (i, output) in p.outputs.iter().enumerate() {
        let twice = p.outputs[..i].iter().any(|other| other.name == output.name);
        self::output(p, output, twice).map_err(at("output", &output.name))?;
    }
    Ok(())
}

fn error_at(p: &Program, what: String) -> impl FnOnce((Fault, String)) -> CheckError {
    let at = format!("stage {}, {what}", p.stage);
    move |e| error(at, e)
}

/// Whether a type depends on the microbatch where there are several.
pub(super) fn is_per_microbatch(p: &Program, ty: &TensorType) -> bool {
    p.mesh.size_of("mb") > 1 && ty.is_per_microbatch(&p.mesh)
}

fn param(p: &Program, param: &Param, unique: bool) -> Checked<()> {
    let ty = p.ty(param.buffer);
    if !unique {
        return refuse(Fault::External, "is declared twice");
    }
    if p.buffer(param.buffer).place != Place::Persistent {
        return refuse(Fault::External, "lies outside of the persistent block");
    }
    if !ty.sharding.pending.is_empty() || ty.is_per_microbatch(&p.mesh) {
        return refuse(Fault::External, format!("{} is pending or differs by microbatch", ty.text(&p.mesh)));
    }
    if let Some(piece) = param.piece {
        let size = ty.shape.get(piece.dim as usize).copied();
        if piece.end.checked_sub(piece.start) != size {
            let (start, end, dim) = (piece.start, piece.end, piece.dim);
            return refuse(Fault::External, format!("piece {start}..{end} of dim {dim} is not {}", ty.text(&p.mesh)));
        }
    }
    let instrs = p.sections.iter().flat_map(|s| &s.body);
    match instrs.filter(|i| i.results.contains(&param.buffer)).count() {
        0 if param.trained && p.mode == Mode::Train => refuse(Fault::External, "is trained, but nothing updates it"),
        0 | 1 => Ok(()),
        n => refuse(Fault::External, format!("is updated {n} times in a step")),
    }
}

fn scalar(p: &Program, scalar: &Scalar) -> Checked<()> {
    let ty = p.ty(scalar.buffer);
    let fits = match scalar.kind {
        ScalarKind::LearningRate => matches!(ty.dtype, DType::F32 | DType::F64),
        ScalarKind::Step | ScalarKind::Seed => ty.dtype == DType::I64,
    };
    let twice = p.scalars.iter().filter(|s| s.kind == scalar.kind).count() > 1;
    if !fits || ty.rank() != 0 || !ty.sharding.is_replicated() || twice {
        return refuse(Fault::External, format!("{} is no type for it, or it is declared twice", ty.text(&p.mesh)));
    }
    if p.buffer(scalar.buffer).place != Place::Persistent {
        return refuse(Fault::External, "lies outside of the persistent block");
    }
    Ok(())
}

fn output(p: &Program, output: &Output, twice: bool) -> Checked<()> {
    let (ty, place) = (p.ty(output.buffer), p.buffer(output.buffer).place);
    if twice {
        return refuse(Fault::External, "is declared twice");
    }
    if !ty.sharding.pending.is_empty() {
        return refuse(Fault::Pending, format!("{} is a partial result, read as whole", ty.text(&p.mesh)));
    }
    if p.mode == Mode::Train && (is_per_microbatch(p, ty) || place != Place::Persistent) {
        let text = ty.text(&p.mesh);
        return refuse(Fault::External, format!("{text} is not there after the step: per microbatch, or not persistent"));
    }
    Ok(())
}

/// Only `update` writes parameters, or a backward pass that runs once a step, and only those that change; nothing writes inputs and
/// scalars.
pub(super) fn write(p: &Program, section: SectionKind, buffer: BufferId, roles: &Roles) -> Checked<()> {
    match roles.of.get(&buffer) {
        None => Ok(()),
        Some(Role::Filled) => refuse(Fault::External, format!("writes b{}, which the runtime fills", buffer.0)),
        Some(Role::Constant) => refuse(Fault::External, format!("writes b{}, a parameter that is not trained", buffer.0)),
        Some(Role::Changing) if p.mode == Mode::Train && may_update(p, section) => Ok(()),
        Some(Role::Changing) => refuse(
            Fault::External,
            format!("writes parameter b{} outside of the update section, or for each microbatch", buffer.0),
        ),
    }
}

fn may_update(p: &Program, section: SectionKind) -> bool {
    section == SectionKind::Update || section.is_backward() && p.mesh.size_of("mb") == 1
}

enum Role {
    Filled,
    Constant,
    Changing,
}

/// What the runtime thinks of each buffer that it knows.
pub(super) struct Roles {
    of: BTreeMap<BufferId, Role>,
}

impl Roles {
    pub fn new(p: &Program) -> Roles {
        let mut of = BTreeMap::new();
        for param in &p.params {
            let changes = param.trained || param.kind != ParamKind::Weight;
            of.insert(param.buffer, if changes { Role::Changing } else { Role::Constant });
        }
        of.extend(p.inputs.iter().map(|i| (i.buffer, Role::Filled)));
        of.extend(p.scalars.iter().map(|s| (s.buffer, Role::Filled)));
        Roles { of }
    }

    /// Whether a step leaves another value there than it found.
    pub fn changes(&self, buffer: BufferId) -> bool {
        matches!(self.of.get(&buffer), Some(Role::Changing))
    }
}

/// A parameter on several stages has one type on all of them.
pub(super) fn shared(programs: &[Program]) -> Checked<()> {
    let mut types: BTreeMap<(&String, &ParamKind, Option<Piece>), (&TensorType, u32)> = BTreeMap::new();
    for p in programs {
        for param in &p.params {
            let ty = p.ty(param.buffer);
            let (first, stage) = *types.entry((&param.name, &param.kind, param.piece)).or_insert((ty, p.stage));
            if first != ty {
                let (a, b) = (first.text(&p.mesh), ty.text(&p.mesh));
                let name = &param.name;
                return refuse(Fault::External, format!("parameter {name} is {a} on stage {stage} and {b} on {}", p.stage));
            }
        }
    }
    Ok(())
}
