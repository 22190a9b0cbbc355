//! Matrix products: their loops.

use super::factors::Factors;
use crate::error::{Error, Result};
use crate::exec::Site;
use dcc_kernels::library::matmul::Factor;
use dcc_program::factors::FactorSpec;
use dcc_program::program::Instr;
use dcc_program::types::DType;

/// The loops of a dot, and the dtypes of operands and result. Errors: operands that do not fit it.
pub fn loops(site: &Site<'_>, spec: &FactorSpec, instr: &Instr) -> Result<(Vec<Factor>, [DType; 3])> {
    let types = [instr.operands[0], instr.operands[1], instr.results[0]].map(|id| site.ty(id));
    let [lhs, rhs, out] = types;
    let dtypes = [lhs.dtype, rhs.dtype, out.dtype];
    if dtypes[0] != dtypes[1] || !super::results_of(dtypes[0]).contains(&dtypes[2]) {
        return Err(Error::artifact("a dot of operands with different dtypes"));
    }
    let factors = Factors::new(spec, &[lhs, rhs], out, site.mesh(), &site.coordinates(0))?;
    let [a, b, c] = [&spec.operands[0], &spec.operands[1], &spec.result].map(|dims| factors.strides(dims));
    let factor = |f: usize| Factor { size: factors.valid(f), lhs: a[f], rhs: b[f], out: c[f] };
    let plan: Vec<Factor> = (0..spec.names.len()).map(factor).collect();
    let count = |f: &Factor| [f.lhs, f.rhs, f.out].iter().flatten().count();
    if plan.iter().any(|f| count(f) < 2) {
        return Err(Error::artifact(format!("`{}` sums over a factor of one operand", spec.text())));
    }
    let [lhs, rhs, out] = [site.span(instr.operands[0])?, site.span(instr.operands[1])?, site.span(instr.results[0])?];
    if out.overlaps(&lhs) || out.overlaps(&rhs) {
        return Err(Error::artifact("a dot that overwrites its operands"));
    }
    Ok((plan, dtypes))
}
