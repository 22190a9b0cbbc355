//! Scatters, running sums, and the first elements of rows in order: their loops.

use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_kernels::library::scatter::{Cumsum, Factor, Indexed};
use dcc_kernels::library::top_k::TopK;
use dcc_program::factors::FactorSpec;
use dcc_program::program::Instr;
use dcc_program::types::DType;

/// A scatter's loops.
pub struct Places {
    pub factors: Vec<Factor>,
    pub indexed: Indexed,
    /// Of the updates and the result; of the indices.
    pub dtypes: (DType, DType),
}

/// The loops of a scatter_add. Errors: operands that do not fit it.
pub fn places(site: &Site<'_>, (spec, indexed): (&FactorSpec, &str), instr: &Instr) -> Result<Places> {
    let [indices, updates, out] = [instr.operands[0], instr.operands[1], instr.results[0]];
    let types = [site.ty(indices), site.ty(updates)];
    let factors = Factors::new(spec, &types, site.ty(out), site.mesh(), &site.coordinates(0))?;
    let row = spec.names.iter().position(|name| name == indexed);
    let row = row.ok_or_else(|| Error::artifact(format!("`{}` has no factor {indexed}", spec.text())))?;
    let [a, b, c] = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
    let others = (0..spec.names.len()).filter(|&f| f != row);
    let plan: Vec<Factor> = others.map(|f| Factor { size: factors.valid(f), index: a[f], update: b[f], out: c[f] }).collect();
    let stride = c[row].filter(|_| a[row].is_none() && b[row].is_none());
    let stride = stride.ok_or_else(|| Error::artifact(format!("factor {indexed} of `{}` is not the result's", spec.text())))?;
    if plan.iter().any(|f| f.update.is_none() || (f.index.is_none() && f.out.is_none())) {
        return Err(Error::artifact(format!("`{}` has a factor that one operand alone has", spec.text())));
    }
    let extent = factors.extents[row];
    let indexed = Indexed { stride, offset: extent.offset as i64, valid: extent.valid as usize };
    let (dtype, index_dtype) = (site.ty(out).dtype, types[0].dtype);
    if !matches!(dtype, DType::F32 | DType::F64) || types[1].dtype != dtype || !matches!(index_dtype, DType::I32 | DType::I64) {
        let what = format!("no scatter_add of {} by {} on this device", types[1].dtype.name(), index_dtype.name());
        return Err(Error::device(what));
    }
    Ok(Places { factors: plan, indexed, dtypes: (dtype, index_dtype) })
}

/// The runs of a running sum, and its dtype. Errors: operands that do not fit it.
pub fn runs(site: &Site<'_>, (dim, exclusive, reverse): (u8, bool, bool), instr: &Instr) -> Result<(Cumsum, DType)> {
    let (operand, result) = (instr.operands[0], instr.results[0]);
    let (shape, dtype) = (site.ty(operand).local_shape(site.mesh()), site.ty(operand).dtype);
    let dim = usize::from(dim);
    if dim >= shape.len() || *site.ty(operand) != *site.ty(result) {
        return Err(Error::artifact("a cumsum whose result has another type"));
    }
    if !matches!(dtype, DType::F32 | DType::F64 | DType::I32 | DType::I64) {
        return Err(Error::device(format!("no cumsum of {} on this device", dtype.name())));
    }
    let [outer, size, inner] = around(&shape, dim);
    Ok((Cumsum { outer, size, inner, exclusive, reverse }, dtype))
}

/// The rows of which the first elements are chosen, and their dtype. Errors: operands that do not fit it.
pub fn first(site: &Site<'_>, (dim, k, largest): (u8, u64, bool), instr: &Instr) -> Result<(TopK, DType)> {
    let [operand, result] = [instr.operands[0], instr.results[0]].map(|id| site.ty(id));
    let (from, to) = (operand.local_shape(site.mesh()), result.local_shape(site.mesh()));
    let dim = usize::from(dim);
    let fits = dim < from.len() && k <= from[dim] && result.dtype == DType::I64;
    let expected = from.iter().enumerate().map(|(d, &size)| if d == dim { k } else { size });
    if !fits || !to.iter().copied().eq(expected) {
        return Err(Error::artifact("a top_k whose result has another type"));
    }
    if operand.dtype == DType::Bool {
        return Err(Error::device("no top_k of bool on this device"));
    }
    let [outer, size, inner] = around(&from, dim);
    Ok((TopK { outer, size, inner, k: k as usize, largest }, operand.dtype))
}

/// Elements before, along and behind a dim.
fn around(shape: &[u64], dim: usize) -> [usize; 3] {
    let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
    [product(&shape[..dim]), shape[dim] as usize, product(&shape[dim + 1..])]
}
