//! The type of every result, derived from the operands' types and the instruction's text alone.

use super::externals::is_per_microbatch;
use super::linear::{passed, reduced};
use super::{Checked, Fault, WaitResults, contract, kernel, refuse, windows, writes};
use crate::mesh::{AxisId, Mesh};
use crate::program::*;
use crate::types::{DType, Reduce, Sharding, TensorType};

pub(super) fn instr(p: &Program, instr: &Instr, wait_results: &WaitResults<'_>) -> Checked<()> {
    let operands: Vec<&TensorType> = instr.operands.iter().map(|&id| p.ty(id)).collect();
    let results: Vec<&TensorType> = instr.results.iter().map(|&id| p.ty(id)).collect();
    match &instr.action {
        Action::Kernel(n) => {
            let kernel = &p.kernels[*n as usize];
            let bounds = kernel::types(p, kernel, &operands, &results)?;
            writes::stores(kernel, &results, &bounds)
        }
        Action::Library(library) => self::library(p, library, &operands, &results),
        Action::Start { transfer, token } => {
            let results = wait_results.get(token).copied().unwrap_or_default();
            let pairs = operands.iter().zip(results);
            pairs
                .into_iter()
                .try_for_each(|(operand, &result)| declared(&transferred(transfer, operand, &p.mesh)?, p.ty(result), &p.mesh))
        }
        Action::Wait(_) => Ok(()),
    }
}

/// What runs once per step neither makes nor reads values of one microbatch, but for zeroed accumulators and `resolve`.
pub(super) fn microbatches(p: &Program, section: SectionKind, instr: &Instr) -> Checked<()> {
    if section.is_per_microbatch() {
        return Ok(());
    }
    let per_microbatch = |b: &&BufferId| is_per_microbatch(p, p.ty(**b));
    let name = section.name();
    if let Some(b) = instr.results.iter().find(per_microbatch)
        && !matches!(instr.action, Action::Library(Library::Zero { .. }))
    {
        let ty = p.ty(*b).text(&p.mesh);
        return refuse(Fault::Microbatch, format!("{name} runs once per step, b{} is {ty}", b.0));
    }
    if let Some(b) = instr.operands.iter().find(per_microbatch)
        && instr.action != Action::Library(Library::ResolveMicrobatches)
    {
        let ty = p.ty(*b).text(&p.mesh);
        return refuse(Fault::Microbatch, format!("{name} belongs to no microbatch, but reads b{} ({ty})", b.0));
    }
    Ok(())
}

pub(super) fn declared(derived: &TensorType, declared: &TensorType, mesh: &Mesh) -> Checked<()> {
    if derived == declared {
        return Ok(());
    }
    let (a, b) = (derived.text(mesh), declared.text(mesh));
    let hidden = !derived.sharding.pending.is_empty() && declared.sharding.pending.is_empty();
    let whole = TensorType { sharding: derived.sharding.with_pending([]), ..derived.clone() };
    if hidden && whole == *declared {
        return refuse(Fault::Pending, format!("the result is a partial one, {a}, declared as {b}"));
    }
    refuse(Fault::Declared, format!("the result is {a}, declared as {b}"))
}

fn unsupported<T>(what: &str, ty: &TensorType, mesh: &Mesh) -> Checked<T> {
    refuse(Fault::Sharding, format!("{what} {}", ty.text(mesh)))
}

/// The dim, as long as the type has it.
fn dim_of(ty: &TensorType, dim: u8, mesh: &Mesh) -> Checked<usize> {
    if (dim as usize) < ty.rank() { Ok(dim as usize) } else { unsupported(&format!("there is no dim {dim} in"), ty, mesh) }
}

/// The type after a transfer.
fn transferred(transfer: &Transfer, operand: &TensorType, mesh: &Mesh) -> Checked<TensorType> {
    let mut ty = operand.clone();
    let in_space = |axis: AxisId| match mesh.name(axis) {
        name @ ("mb" | "pp") => refuse(Fault::Sharding, format!("`{name}` is no axis that ranks communicate along")),
        _ => Ok(()),
    };
    match transfer {
        Transfer::AllReduce { reduce, axes } => {
            for &axis in axes {
                in_space(axis)?;
                resolve(&mut ty.sharding, axis, *reduce, mesh)?;
            }
        }
        Transfer::ReduceScatter { axis, dim } => {
            in_space(*axis)?;
            resolve(&mut ty.sharding, *axis, Reduce::Sum, mesh)?;
            let dim = dim_of(operand, *dim, mesh)?;
            ty.sharding.dims[dim].push(*axis);
        }
        Transfer::AllGather { axis, dim } => {
            in_space(*axis)?;
            gather(&mut ty, *axis, *dim, mesh)?;
        }
        Transfer::AllToAll { axis, from, to } => {
            in_space(*axis)?;
            gather(&mut ty, *axis, *from, mesh)?;
            let to_dim = dim_of(operand, *to, mesh)?;
            if to == from {
                return unsupported("an all_to_all within one dim of", operand, mesh);
            }
            ty.sharding.dims[to_dim].push(*axis);
        }
        Transfer::StageSum { reduce, .. } => {
            if ty.sharding.pending.iter().any(|(_, r)| r != reduce || *r != Reduce::Sum) {
                let text = operand.text(mesh);
                return refuse(Fault::Pending, format!("stage_sum.{} reads the partial {text} as whole", reduce.name()));
            }
        }
        Transfer::Send { .. } | Transfer::Recv { .. } => {}
    }
    Ok(ty)
}

fn resolve(sharding: &mut Sharding, axis: AxisId, reduce: Reduce, mesh: &Mesh) -> Checked<()> {
    let Some(i) = sharding.pending.iter().position(|&x| x == (axis, reduce)) else {
        let name = mesh.name(axis);
        return refuse(Fault::Sharding, format!("no {} over {name} is pending: it would be taken twice", reduce.name()));
    };
    sharding.pending.remove(i);
    Ok(())
}

fn gather(ty: &mut TensorType, axis: AxisId, dim: u8, mesh: &Mesh) -> Checked<()> {
    let index = dim_of(ty, dim, mesh)?;
    if ty.sharding.dims[index].last() != Some(&axis) {
        let name = mesh.name(axis);
        return unsupported(&format!("{name} is not the last axis of dim {dim} of"), ty, mesh);
    }
    ty.sharding.dims[index].pop();
    Ok(())
}

fn library(p: &Program, library: &Library, operands: &[&TensorType], results: &[&TensorType]) -> Checked<()> {
    let mesh = &p.mesh;
    match library {
        Library::Dot { spec, .. } => contract::dot(spec, operands, results[0], mesh),
        Library::ScatterAdd { spec, indexed, .. } => contract::scatter_add(spec, indexed, operands, results[0], mesh),
        Library::Convolution { spec, windows, .. } => windows::convolution(spec, windows, operands, results[0], mesh),
        Library::MaxPool(pool) => windows::max_pool(pool, operands[0], results, mesh),
        Library::Attention(a) => contract::attention(a, operands, results, mesh),
        Library::AttentionGrad(a) => contract::attention_grad(a, operands, results, mesh),
        Library::Reshape { spec } => contract::reshape(spec, operands[0], results[0], mesh),
        Library::Zero { .. } if results[0].sharding.pending.iter().any(|&(_, r)| r != Reduce::Sum) => {
            refuse(Fault::Pending, format!("zero is no partial result of {}", results[0].text(mesh)))
        }
        Library::Zero { .. } => Ok(()),
        _ => declared(&moved(library, operands[0], mesh)?, results[0], mesh),
    }
}

/// The type after an operation that keeps, drops or resolves along one axis or dim.
fn moved(library: &Library, operand: &TensorType, mesh: &Mesh) -> Checked<TensorType> {
    let mut ty = operand.clone();
    match library {
        Library::Cumsum { dim, .. } => {
            if !operand.sharding.dims[dim_of(operand, *dim, mesh)?].is_empty() {
                return unsupported(&format!("cumsum along the sharded dim {dim} of"), operand, mesh);
            }
            passed(&[operand], &[&[0]], &[], mesh)?;
        }
        Library::TopK { dim, k, .. } => {
            let at = dim_of(operand, *dim, mesh)?;
            if !operand.sharding.dims[at].is_empty() {
                return unsupported(&format!("top_k along the sharded dim {dim} of"), operand, mesh);
            }
            if *k > operand.shape[at] || operand.dtype == DType::Bool {
                return refuse(Fault::Type, format!("top_k of {k} along dim {dim} of {}", operand.text(mesh)));
            }
            passed(&[operand], &[], &[], mesh)?;
            ty.shape[at] = *k;
            ty.dtype = DType::I64;
        }
        Library::ResolveMicrobatches => match mesh.microbatch_axis() {
            Some(mb) => resolve(&mut ty.sharding, mb, Reduce::Sum, mesh)?,
            None => return refuse(Fault::Sharding, "the mesh has no microbatches"),
        },
        Library::SliceAxis { axis, dim } => {
            unused(operand, *axis, mesh)?;
            ty.sharding.dims[dim_of(operand, *dim, mesh)?].push(*axis);
        }
        Library::KeepFirst { axis } => {
            unused(operand, *axis, mesh)?;
            let pending = passed(&[operand], &[&[0]], &[], mesh)?;
            ty.sharding = ty.sharding.with_pending(reduced(pending, [*axis], Reduce::Sum));
        }
        Library::DropMicrobatch { dim } => {
            let dim = dim_of(operand, *dim, mesh)?;
            let axes = &mut ty.sharding.dims[dim];
            match axes.iter().position(|&a| mesh.is_microbatch(a)) {
                Some(i) if mesh.size_of("mb") == 1 => _ = axes.remove(i),
                _ => return unsupported("there is no single microbatch to drop in", operand, mesh),
            }
        }
        _ => {}
    }
    Ok(ty)
}

fn unused(ty: &TensorType, axis: AxisId, mesh: &Mesh) -> Checked<()> {
    match mesh.name(axis) {
        "pp" => refuse(Fault::Sharding, "values are not sharded over stages"),
        name if ty.sharding.uses(axis) => unsupported(&format!("{name} is in use already in"), ty, mesh),
        _ => Ok(()),
    }
}
