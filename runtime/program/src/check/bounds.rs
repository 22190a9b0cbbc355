//! Everything that later passes take for granted: ids that exist, types that can be, sizes that do not overflow, buffers
//! inside their blocks, operations with as many operands as they take.

use super::{CheckError, Checked, Fault, error, refuse, text_of};
use crate::factors::FactorSpec;
use crate::kernel::MAX_ARGUMENTS;
use crate::mesh::Mesh;
use crate::program::*;
use crate::types::{DType, TensorType};
use std::collections::BTreeMap;

/// Where axes stand; a split axis (`tp0`, `tp1`) stands in the place of its parent.
const AXES: [&str; 7] = ["mb", "pp", "rep", "dp", "cp", "ep", "tp"];
const MAX_RANKS: u64 = 1 << 20;
const MAX_ELEMENTS: u64 = 1 << 56;
/// Dims of a type.
pub const MAX_RANK: usize = 16;

/// Of messages between two stages: chunks by chunks.
const MAX_LANES: u32 = 1 << 10;

/// One program per stage, all of one mesh, mode and name.
pub(super) fn set(programs: &[Program]) -> Checked<()> {
    let Some(first) = programs.first() else { return refuse(Fault::Mesh, "the set has no program") };
    mesh(&first.mesh)?;
    let stages = first.mesh.size_of("pp");
    if programs.len() as u64 != u64::from(stages) {
        return refuse(Fault::Mesh, format!("{} programs for {stages} stages", programs.len()));
    }
    for (i, p) in programs.iter().enumerate() {
        if p.mesh != first.mesh || p.mode != first.mode || p.name != first.name {
            return refuse(Fault::Mesh, format!("the program of stage {i} is of another mesh, mode or name than stage 0's"));
        }
        if p.stage as usize != i || p.stages != stages {
            return refuse(Fault::Mesh, format!("program {i} says it is stage {}/{} of {stages}", p.stage, p.stages));
        }
        for group in &p.groups {
            let same = |g: &&StageGroup| g.name == group.name;
            let other = programs.iter().flat_map(|q| &q.groups).filter(same).find(|g| g.stages != group.stages);
            if let Some(other) = other {
                let (a, b) = (&group.stages, &other.stages);
                return refuse(
                    Fault::Unmatched,
                    format!("group {} is stages {a:?} in one program, {b:?} in another", group.name),
                );
            }
        }
    }
    Ok(())
}

fn mesh(mesh: &Mesh) -> Checked<()> {
    if mesh.axes.len() > 32 {
        return refuse(Fault::Mesh, format!("a mesh of {} axes", mesh.axes.len()));
    }
    let (mut last, mut ranks) = (0, 1u64);
    for (i, axis) in mesh.axes.iter().enumerate() {
        let parent = axis.name.trim_end_matches(|c: char| c.is_ascii_digit());
        let Some(position) = AXES.iter().position(|&a| a == axis.name || (a == parent && !matches!(a, "mb" | "pp"))) else {
            return refuse(Fault::Mesh, format!("unknown mesh axis `{}`", axis.name));
        };
        if position < last {
            return refuse(Fault::Mesh, format!("mesh axis `{}` must stand before `{}`", axis.name, mesh.axes[i - 1].name));
        }
        if mesh.axes[..i].iter().any(|a| a.name == axis.name) || axis.size == 0 {
            return refuse(Fault::Mesh, format!("mesh axis `{}` is declared twice or has no ranks", axis.name));
        }
        last = position;
        if axis.name != "mb" {
            ranks = ranks.saturating_mul(axis.size.into());
        }
    }
    if ranks > MAX_RANKS || mesh.size_of("mb") > 1 << 16 {
        return refuse(Fault::Mesh, format!("a mesh of {ranks} ranks and {} microbatches", mesh.size_of("mb")));
    }
    Ok(())
}

pub(super) fn program(p: &Program) -> Result<(), CheckError> {
    let stage = p.stage;
    let at = |what: String| move |e| error(format!("stage {stage}, {what}"), e);
    memory(p).map_err(at("memory".to_owned()))?;
    for (i, buffer) in p.buffers.iter().enumerate() {
        self::buffer(p, buffer).map_err(at(format!("b{i}")))?;
    }
    for (i, group) in p.groups.iter().enumerate() {
        let ascending = group.stages.windows(2).all(|w| w[0] < w[1]);
        if !ascending || group.stages.iter().any(|&s| s >= p.stages) || p.groups[..i].iter().any(|g| g.name == group.name) {
            let e = (Fault::Malformed, format!("stages {:?} of {} do not make a group", group.stages, p.stages));
            return Err(at(format!("group {}", group.name))(e));
        }
    }
    for (i, kernel) in p.kernels.iter().enumerate() {
        let arguments = kernel.inputs.len().max(kernel.outputs.len());
        let dtypes = if kernel.dims.len() <= 64 && arguments <= MAX_ARGUMENTS {
            kernel.dtypes().map(|_| ())
        } else {
            Err("too many dims or arguments".to_owned())
        };
        dtypes.map_err(|e| at(format!("kernel fused.{i}"))((Fault::Kernel, e)))?;
    }
    for section in &p.sections {
        for instr in &section.body {
            let place = || format!("section {}", section.id().name());
            ids(p, instr).map_err(|e| at(place())(e))?;
            let place = || format!("section {}, `{}`", section.id().name(), text_of(p, instr));
            arity(p, instr).map_err(|e| at(place())(e))?;
        }
    }
    tokens_fit(p).map_err(at("sections".to_owned()))
}

/// Variants of a section repeat its tokens: every start of a token is of one transfer of one value, every wait gives one
/// result, none for a send. In which order they run is for `memory`.
fn tokens_fit(p: &Program) -> Checked<()> {
    let (mut starts, mut waits) = (BTreeMap::new(), BTreeMap::new());
    for instr in p.sections.iter().flat_map(|s| &s.body) {
        let other = match &instr.action {
            Action::Start { token, transfer } => {
                let this = (transfer, &instr.operands);
                *starts.entry(*token).or_insert(this) != this
            }
            Action::Wait(token) => *waits.entry(*token).or_insert(&instr.results) != &instr.results,
            _ => false,
        };
        if let (true, Action::Start { token, .. } | Action::Wait(token)) = (other, &instr.action) {
            return refuse(Fault::Malformed, format!("t{} stands for two transfers", token.0));
        }
    }
    for (token, (transfer, operands)) in &starts {
        let wanted = match transfer {
            Transfer::Send { .. } => 0,
            Transfer::Recv { .. } => 1,
            _ => operands.len(),
        };
        match waits.get(token).map(|results| results.len()) {
            None => return refuse(Fault::Unwaited, format!("t{} is started, but nothing waits for it", token.0)),
            Some(n) if n != wanted => {
                return refuse(Fault::Malformed, format!("the wait of t{} has {n} results, not {wanted}", token.0));
            }
            _ => {}
        }
    }
    match waits.keys().find(|t| !starts.contains_key(t)) {
        Some(token) => refuse(Fault::Unwaited, format!("t{} is waited for, but nothing starts it", token.0)),
        None => Ok(()),
    }
}

fn memory(p: &Program) -> Checked<()> {
    let slot_bytes = |a: &Area| a.bytes.checked_mul(a.slots.into());
    let areas = p.areas.iter().try_fold(0u64, |sum, a| sum.checked_add(slot_bytes(a)?));
    let total = areas.and_then(|a| a.checked_add(p.persistent_bytes)?.checked_add(p.scratch_bytes));
    if total.is_none_or(|t| t > 1 << 56) {
        return refuse(Fault::Bounds, "the blocks together are larger than any memory");
    }
    if p.areas.iter().any(|a| a.slots == 0) {
        return refuse(Fault::Bounds, "an area has no slot");
    }
    Ok(())
}

fn buffer(p: &Program, buffer: &Buffer) -> Checked<()> {
    let bytes = type_bytes(&buffer.ty, &p.mesh)?;
    let block = match buffer.place {
        Place::Persistent => p.persistent_bytes,
        Place::Scratch => p.scratch_bytes,
        Place::Area(a) => match p.areas.get(a as usize) {
            Some(area) => area.bytes,
            None => return refuse(Fault::Malformed, format!("there is no area m{a}")),
        },
    };
    if buffer.offset.checked_add(bytes).is_none_or(|end| end > block) {
        let offset = buffer.offset;
        return refuse(Fault::Bounds, format!("{bytes} bytes at {offset} do not fit into its block of {block}"));
    }
    if !buffer.offset.is_multiple_of(buffer.ty.dtype.bytes()) {
        return refuse(Fault::Bounds, format!("offset {} is not aligned to {}", buffer.offset, buffer.ty.dtype.name()));
    }
    Ok(())
}

/// Bytes of a rank's block, of a type that can be.
fn type_bytes(ty: &TensorType, mesh: &Mesh) -> Checked<u64> {
    if ty.sharding.dims.len() != ty.shape.len() || ty.rank() > MAX_RANK {
        return refuse(Fault::Type, format!("{} dims, of which {} have axes", ty.rank(), ty.sharding.dims.len()));
    }
    let pending = || ty.sharding.pending.iter();
    let mut axes = ty.sharding.dims.iter().flatten().chain(pending().map(|(a, _)| a));
    if axes.any(|a| a.0 as usize >= mesh.axes.len()) {
        return refuse(Fault::Malformed, "a type names an axis that the mesh has not");
    }
    ty.check_axes(mesh).map_err(|e| (Fault::Type, e))?;
    let text = || ty.text(mesh);
    if mesh.axis("pp").is_some_and(|pp| ty.sharding.uses(pp)) {
        return refuse(Fault::Type, format!("{} is sharded over stages", text()));
    }
    if ty.sharding.dims.iter().any(|axes| axes.iter().skip(1).any(|&a| mesh.is_microbatch(a))) {
        return refuse(Fault::Type, format!("mb is not the first axis of its dim in {}", text()));
    }
    if pending().any(|&(_, r)| r != ty.sharding.pending[0].1) {
        return refuse(Fault::Type, format!("{} is pending under two reductions, whose order would matter", text()));
    }
    if ty.dtype == DType::Bool && !ty.sharding.pending.is_empty() {
        return refuse(Fault::Type, format!("{} is a pending bool", text()));
    }
    let elements = ty.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    if elements.is_none_or(|n| n == 0 || n > MAX_ELEMENTS) {
        return refuse(Fault::Type, format!("{} has no elements, or more than fit a memory", text()));
    }
    let blocks = ty.shape.iter().zip(&ty.sharding.dims).map(|(&d, axes)| mesh.block(d, axes));
    Ok(blocks.product::<u64>() * ty.dtype.bytes())
}

/// Everything an instruction names is there.
fn ids(p: &Program, instr: &Instr) -> Checked<()> {
    if let Some(b) = instr.results.iter().chain(&instr.operands).find(|b| b.0 as usize >= p.buffers.len()) {
        return refuse(Fault::Malformed, format!("b{} of {} buffers", b.0, p.buffers.len()));
    }
    let axis = |a: crate::AxisId| match p.mesh.axes.get(a.0 as usize) {
        None => refuse(Fault::Malformed, "an instruction names an axis that the mesh has not"),
        Some(_) => Ok(()),
    };
    match &instr.action {
        Action::Kernel(n) if *n as usize >= p.kernels.len() => {
            refuse(Fault::Malformed, format!("fused.{n} of {} kernels", p.kernels.len()))
        }
        Action::Library(Library::Dot { spec, .. } | Library::ScatterAdd { spec, .. } | Library::Reshape { spec }) => {
            well_formed(spec)
        }
        Action::Library(Library::Attention(a) | Library::AttentionGrad(a)) => well_formed(&a.spec),
        Action::Library(Library::Convolution { spec, .. }) => well_formed(spec),
        Action::Library(Library::MaxPool(pool)) => well_formed(&pool.spec),
        Action::Library(Library::SliceAxis { axis: a, .. } | Library::KeepFirst { axis: a }) => axis(*a),
        Action::Start { transfer, .. } => match transfer {
            Transfer::AllReduce { axes, .. } => axes.iter().try_for_each(|&a| axis(a)),
            Transfer::ReduceScatter { axis: a, .. }
            | Transfer::AllGather { axis: a, .. }
            | Transfer::AllToAll { axis: a, .. } => axis(*a),
            Transfer::Send { to: other, .. } | Transfer::Recv { from: other, .. }
                if *other >= p.stages || *other == p.stage =>
            {
                refuse(Fault::Malformed, format!("stage {} exchanges with stage {other} of {}", p.stage, p.stages))
            }
            Transfer::Send { lane, .. } | Transfer::Recv { lane, .. } if *lane >= MAX_LANES => {
                refuse(Fault::Malformed, format!("lane {lane} of {MAX_LANES}"))
            }
            Transfer::StageSum { group, .. } => match p.groups.get(*group as usize) {
                None => refuse(Fault::Malformed, format!("g{group} of {} groups", p.groups.len())),
                Some(g) if !g.stages.contains(&p.stage) => {
                    refuse(Fault::Unmatched, format!("stage {} is no member of group {}", p.stage, g.name))
                }
                Some(_) => Ok(()),
            },
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

fn arity(p: &Program, instr: &Instr) -> Checked<()> {
    let (operands, results) = match &instr.action {
        Action::Kernel(n) => {
            let kernel = &p.kernels[*n as usize];
            (kernel.inputs.len(), kernel.outputs.len())
        }
        Action::Library(library) => match library {
            Library::Dot { .. } | Library::ScatterAdd { .. } | Library::Convolution { .. } => (2, 1),
            Library::MaxPool(_) => (1, 2),
            Library::Attention(a) => (3 + usize::from(a.mask != MaskKind::None), 2),
            Library::AttentionGrad(a) => (6 + usize::from(a.mask != MaskKind::None), 3),
            Library::Zero { .. } => (0, 1),
            _ => (1, 1),
        },
        Action::Start { transfer: Transfer::Recv { .. }, .. } => (0, 0),
        Action::Start { transfer: Transfer::Send { .. } | Transfer::StageSum { .. }, .. } => (1, 0),
        Action::Start { .. } => (instr.operands.len().clamp(1, MOST_TENSORS), 0),
        Action::Wait(_) => (0, instr.results.len()),
    };
    if instr.operands.len() != operands || instr.results.len() != results {
        let (o, r) = (instr.operands.len(), instr.results.len());
        return refuse(Fault::Malformed, format!("takes {operands} operands and gives {results} results, has {o} and {r}"));
    }
    Ok(())
}

/// A factor occurs once in an operand, and its id exists.
fn well_formed(spec: &FactorSpec) -> Checked<()> {
    for dims in spec.operands.iter().chain([&spec.result]) {
        let mut seen = 0u64;
        for factor in dims.iter().flatten() {
            if factor.0 as usize >= spec.names.len() || spec.names.len() > 64 || seen & (1 << factor.0) != 0 {
                return refuse(Fault::Malformed, format!("a factor of {} dims stands twice, or is unknown", dims.len()));
            }
            seen |= 1 << factor.0;
        }
    }
    Ok(())
}
