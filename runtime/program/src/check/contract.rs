//! Types of library operations that have factors: contractions, scatters, reshapes, attention.

use super::derive::declared;
use super::linear::{Pending, axis_set, passed, reduced};
use super::{Checked, Fault, refuse};
use crate::factors::{DimFactors, FactorId, FactorSpec};
use crate::mesh::{AxisId, Mesh};
use crate::program::{Attention, MaskKind};
use crate::types::{AxisList, DType, Reduce, Sharding, TensorType};

/// Sizes and axes of a spec's factors, as the operands have them.
pub(super) struct Factors {
    sizes: Vec<u64>,
    /// `None` for factors of the result alone.
    axes: Vec<Option<AxisList>>,
}

impl Factors {
    pub fn new(spec: &FactorSpec, operands: &[&TensorType], result: &TensorType, mesh: &Mesh) -> Checked<Factors> {
        let sizes = spec.sizes(operands, result).map_err(|e| (Fault::Type, e))?;
        let mut factors = Factors { axes: vec![None; sizes.len()], sizes };
        for (dims, ty) in spec.operands.iter().zip(operands) {
            factors.bind(spec, dims, ty, mesh)?;
        }
        Ok(factors)
    }

    fn bind(&mut self, spec: &FactorSpec, dims: &[DimFactors], ty: &TensorType, mesh: &Mesh) -> Checked<()> {
        for (dim, axes) in dims.iter().zip(&ty.sharding.dims) {
            let Some(split) = FactorSpec::split_axes(dim, &self.sizes, axes, mesh) else {
                let (dim, text) = (spec.dims_text(std::slice::from_ref(dim)), ty.text(mesh));
                return refuse(Fault::Sharding, format!("the axes of dim {dim} of {text} do not divide its factors"));
            };
            let rest = dim.iter().filter(|f| !split.iter().any(|(g, _)| g == *f)).map(|&f| (f, AxisList::new()));
            for (factor, list) in rest.chain(split.iter().cloned()) {
                let slot = &mut self.axes[factor.0 as usize];
                if slot.as_ref().is_some_and(|other| *other != list) {
                    let other = slot.clone().unwrap_or_default();
                    let (a, b) = (axes_text(&other, mesh), axes_text(&list, mesh));
                    let name = &spec.names[factor.0 as usize];
                    return refuse(Fault::Sharding, format!("factor {name} is sharded over {a} and over {b}"));
                }
                *slot = Some(list);
            }
        }
        Ok(())
    }

    pub fn size(&self, factor: FactorId) -> u64 {
        self.sizes[factor.0 as usize]
    }

    pub fn of(&self, factor: FactorId) -> &[AxisId] {
        self.axes[factor.0 as usize].as_deref().unwrap_or_default()
    }

    /// Each axis on one factor only: ranks would otherwise hold a diagonal of blocks.
    pub fn exclusive(&self, spec: &FactorSpec, mesh: &Mesh) -> Checked<Vec<AxisList>> {
        let mut seen = 0u32;
        for factor in spec.ids() {
            for &axis in self.of(factor) {
                if seen & axis_set([axis]) != 0 {
                    return refuse(Fault::Sharding, format!("axis {} is on two factors of {}", mesh.name(axis), spec.text()));
                }
                seen |= axis_set([axis]);
            }
        }
        Ok(self.axes.iter().map(|a| a.clone().unwrap_or_default()).collect())
    }

    /// Axes of the factors that `dims` lacks, of those that `of` picks.
    pub fn missing(&self, spec: &FactorSpec, dims: &[DimFactors], of: impl Fn(FactorId) -> bool) -> Vec<AxisId> {
        let absent = |f: &FactorId| !dims.iter().any(|d| d.contains(f)) && of(*f);
        spec.ids().filter(absent).flat_map(|f| self.of(f).to_vec()).collect()
    }

    /// A type of these dims; a compound dim must take its axes major factor first.
    pub fn result(
        &self,
        spec: &FactorSpec,
        dims: &[DimFactors],
        (dtype, pending): (DType, Pending),
        mesh: &Mesh,
    ) -> Checked<TensorType> {
        let mut ty = TensorType::new(dtype, dims.iter().map(|d| d.iter().map(|f| self.sizes[f.0 as usize]).product()));
        for (i, dim) in dims.iter().enumerate() {
            let axes: AxisList = dim.iter().flat_map(|&f| self.of(f).to_vec()).collect();
            let split = FactorSpec::split_axes(dim, &self.sizes, &axes, mesh).unwrap_or_default();
            let lands = |f: &FactorId| split.iter().find(|(g, _)| g == f).map_or(&[][..], |(_, list)| list);
            if dim.iter().any(|f| lands(f) != self.of(*f)) {
                let text = spec.dims_text(std::slice::from_ref(dim));
                return refuse(Fault::Sharding, format!("the result's dim {text} cannot be sharded as its factors are"));
            }
            ty.sharding.dims[i] = axes;
        }
        ty.sharding = Sharding { dims: ty.sharding.dims, pending: Default::default() }.with_pending(pending);
        Ok(ty)
    }
}

pub(super) fn axes_text(axes: &[AxisId], mesh: &Mesh) -> String {
    match axes {
        [] => "nothing".to_owned(),
        axes => axes.iter().map(|&a| mesh.name(a)).collect::<Vec<_>>().join(" then "),
    }
}

pub(super) fn same_dtype(operands: &[&TensorType]) -> Checked<DType> {
    let dtype = operands[0].dtype;
    match operands.iter().find(|t| t.dtype != dtype) {
        None if dtype.is_float() => Ok(dtype),
        None => refuse(Fault::Type, format!("operands of dtype {}", dtype.name())),
        Some(t) => refuse(Fault::Type, format!("operands of dtypes {} and {}", dtype.name(), t.dtype.name())),
    }
}

/// The dtype of a sum of products of `dtype`: half types may leave in the width they accumulate in.
pub(super) fn accumulated(dtype: DType, result: &TensorType) -> DType {
    if result.dtype == DType::F32 && dtype.bytes() == 2 { DType::F32 } else { dtype }
}

pub(super) fn dot(spec: &FactorSpec, operands: &[&TensorType], result: &TensorType, mesh: &Mesh) -> Checked<()> {
    let factors = Factors::new(spec, operands, result, mesh)?;
    if let Some(f) = spec.ids().find(|&f| !spec.in_operand(0, f) && !spec.in_operand(1, f)) {
        return refuse(Fault::Type, format!("no operand has factor {}", spec.names[f.0 as usize]));
    }
    let lists = factors.exclusive(spec, mesh)?;
    let pending = passed(operands, &[&[0], &[1]], &lists, mesh)?;
    let pending = reduced(pending, factors.missing(spec, &spec.result, |_| true), Reduce::Sum);
    let dtype = accumulated(same_dtype(operands)?, result);
    declared(&factors.result(spec, &spec.result, (dtype, pending), mesh)?, result, mesh)
}

pub(super) fn scatter_add(
    spec: &FactorSpec,
    indexed: &str,
    operands: &[&TensorType],
    result: &TensorType,
    mesh: &Mesh,
) -> Checked<()> {
    let mut factors = Factors::new(spec, operands, result, mesh)?;
    let row = spec.names.iter().position(|n| n == indexed).map(|i| FactorId(i as u8));
    let Some(row) = row.filter(|&r| !spec.in_operand(0, r) && !spec.in_operand(1, r) && spec.in_result(r)) else {
        return refuse(Fault::Malformed, format!("`{indexed}` is not a factor of the result alone"));
    };
    if let Some(f) = spec.ids().find(|&f| f != row && !spec.in_operand(1, f)) {
        return refuse(Fault::Type, format!("the rows have no factor {}", spec.names[f.0 as usize]));
    }
    if operands[0].dtype.is_float() || operands[0].dtype == DType::Bool {
        return refuse(Fault::Type, format!("scatter_add at indices of dtype {}", operands[0].dtype.name()));
    }
    // The result alone says how the indexed dim is sharded: each rank keeps the rows that are its own.
    for (dim, axes) in spec.result.iter().zip(&result.sharding.dims) {
        if dim[..] == [row] {
            factors.axes[row.0 as usize] = Some(axes.clone());
        }
    }
    let lists = factors.exclusive(spec, mesh)?;
    let pending = passed(operands, &[&[1]], &lists, mesh)?;
    let pending = reduced(pending, factors.missing(spec, &spec.result, |_| true), Reduce::Sum);
    let dtype = same_dtype(&operands[1..])?;
    declared(&factors.result(spec, &spec.result, (dtype, pending), mesh)?, result, mesh)
}

pub(super) fn reshape(spec: &FactorSpec, operand: &TensorType, result: &TensorType, mesh: &Mesh) -> Checked<()> {
    if spec.operands.len() != 1 {
        return refuse(Fault::Malformed, format!("a reshape of {} operands", spec.operands.len()));
    }
    let factors = Factors::new(spec, &[operand], result, mesh)?;
    let shared = |f: FactorId| spec.in_operand(0, f) && spec.in_result(f);
    if let Some(f) = spec.ids().find(|&f| !shared(f) && !factors.of(f).is_empty()) {
        let what = format!("factor {} is sharded, but not on both sides of the reshape", spec.names[f.0 as usize]);
        return refuse(Fault::Type, what);
    }
    // Each run of factors of one side alone counts as its product: whole on every rank, it may be regrouped freely.
    let order = |dims: &[DimFactors]| -> Vec<(Option<FactorId>, u64)> {
        let mut order: Vec<(Option<FactorId>, u64)> = Vec::new();
        for &f in dims.iter().flatten().filter(|f| factors.sizes[f.0 as usize] != 1) {
            let size = factors.sizes[f.0 as usize];
            match order.last_mut() {
                Some((None, product)) if !shared(f) => *product = product.saturating_mul(size),
                _ => order.push((shared(f).then_some(f), size)),
            }
        }
        order
    };
    if order(&spec.operands[0]) != order(&spec.result) {
        return refuse(Fault::Type, format!("the reshape {} would move elements", spec.text()));
    }
    let pending = operand.sharding.pending.to_vec();
    declared(&factors.result(spec, &spec.result, (operand.dtype, pending), mesh)?, result, mesh)
}

/// Factors, of which those in `whole` are unsharded; no operand is pending.
fn attention_factors(a: &Attention, operands: &[&TensorType], o: &TensorType, whole: &[&str], mesh: &Mesh) -> Checked<Factors> {
    let spec = &a.spec;
    let factors = Factors::new(spec, operands, o, mesh)?;
    if spec.operands.len() != operands.len() {
        return refuse(Fault::Malformed, format!("{} operands for {}", operands.len(), spec.text()));
    }
    let expected = |name: &str| match name {
        "s" => [false, true, true, false],
        "e" => [true, true, false, false],
        "f" => [false, false, true, true],
        "t" | "g" => [true, false, false, true],
        _ => [true; 4],
    };
    for (i, name) in spec.names.iter().enumerate() {
        let f = FactorId(i as u8);
        let is = [spec.in_operand(0, f), spec.in_operand(1, f), spec.in_operand(2, f), spec.in_result(f)];
        if is != expected(name) {
            return refuse(Fault::Malformed, format!("factor {name} is not where attention has it in {}", spec.text()));
        }
    }
    if ["s", "e", "f"].iter().any(|name| !spec.names.iter().any(|n| n == name)) {
        return refuse(Fault::Malformed, format!("attention needs factors s, e and f, not {}", spec.text()));
    }
    for (i, name) in spec.names.iter().enumerate() {
        if whole.contains(&name.as_str()) && !factors.of(FactorId(i as u8)).is_empty() {
            let axes = axes_text(factors.of(FactorId(i as u8)), mesh);
            return refuse(Fault::Sharding, format!("factor {name} of attention is sharded over {axes}"));
        }
    }
    factors.exclusive(spec, mesh)?;
    passed(operands, &[], &[], mesh)?;
    same_dtype(&operands[..3])?;
    match (a.mask, operands.get(3).map(|m| m.dtype)) {
        (MaskKind::Boolean, Some(DType::Bool)) | (MaskKind::None, None) => Ok(factors),
        (MaskKind::Additive, Some(dtype)) if dtype.is_float() => Ok(factors),
        _ => refuse(Fault::Type, "attention's mask is of another dtype than it says"),
    }
}

/// O's dims without `f`: the dims of Lse.
fn lse_dims(spec: &FactorSpec) -> Vec<DimFactors> {
    let is_f = |f: &FactorId| spec.names[f.0 as usize] == "f";
    let kept = spec.result.iter().filter(|d| !(d.len() == 1 && is_f(&d[0])));
    kept.map(|d| d.iter().copied().filter(|f| !is_f(f)).collect()).collect()
}

/// Scores and statistics of half types are f32.
fn lse_dtype(dtype: DType) -> DType {
    if dtype.bytes() == 2 { DType::F32 } else { dtype }
}

pub(super) fn attention(a: &Attention, operands: &[&TensorType], results: &[&TensorType], mesh: &Mesh) -> Checked<()> {
    let factors = attention_factors(a, operands, results[0], &["s", "e"], mesh)?;
    let dtype = operands[0].dtype;
    declared(&factors.result(&a.spec, &a.spec.result, (dtype, Vec::new()), mesh)?, results[0], mesh)?;
    let lse = factors.result(&a.spec, &lse_dims(&a.spec), (lse_dtype(dtype), Vec::new()), mesh)?;
    declared(&lse, results[1], mesh)
}

/// dO, Q, K, V, O, Lse (, mask) -> dQ, dK, dV, each of its operand's dims; over sharded queries dK and dV are partial.
pub(super) fn attention_grad(a: &Attention, operands: &[&TensorType], results: &[&TensorType], mesh: &Mesh) -> Checked<()> {
    let mut forward = operands[1..4].to_vec();
    forward.extend(&operands[6..]);
    let factors = attention_factors(a, &forward, operands[4], &["s", "e", "f"], mesh)?;
    let dtype = operands[1].dtype;
    let o = factors.result(&a.spec, &a.spec.result, (dtype, Vec::new()), mesh)?;
    declared(&o, operands[4], mesh)?;
    declared(&o, operands[0], mesh)?;
    declared(&factors.result(&a.spec, &lse_dims(&a.spec), (lse_dtype(dtype), Vec::new()), mesh)?, operands[5], mesh)?;
    for (i, result) in results.iter().enumerate() {
        let dims = &a.spec.operands[i];
        let partial = reduced(Vec::new(), factors.missing(&a.spec, dims, |_| true), Reduce::Sum);
        declared(&factors.result(&a.spec, dims, (dtype, partial), mesh)?, result, mesh)?;
    }
    Ok(())
}
