//! Pairs of dims that one tile can hold: a dim and one right behind it in every operand that has both, or one whose points are rows that
//! can be copied together.
//!
//! Images behind channels, features behind rows: where the dim behind is short, tiles along it alone are mostly calls.

use super::Nest;
use super::access::{Access, Typing, along, bit, dims_in, over_of, reachable, value_of};
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Outside, Stmt};

/// Most points of the dim behind: longer ones are tiles of their own, which read memory in order.
const LONGEST: usize = 128;

/// The pairs (dim, dim behind) of which tiles of no more than `longest` elements can be made.
pub fn pairs(nest: &Nest, typing: &Typing, longest: usize) -> Vec<(DimId, DimId)> {
    let extent = |d: DimId| nest.extents[usize::from(d.0)];
    let behind: Vec<DimId> =
        (0..nest.extents.len() as u8).map(DimId).filter(|d| (2..=LONGEST.min(longest)).contains(&extent(*d))).collect();
    if behind.is_empty() {
        return vec![];
    }
    let roots: Vec<ExprId> = nest.kernel.body.iter().map(value_of).collect();
    let exprs = reachable(&nest.kernel, &roots);
    let all = nest.kernel.outer.iter().filter(|d| extent(**d) > 1).flat_map(|d| behind.iter().map(|b| (*d, *b)));
    all.filter(|(d, b)| d != b && is_pair(nest, typing, &exprs, (*d, *b))).collect()
}

fn is_pair(nest: &Nest, typing: &Typing, exprs: &[ExprId], (dim, behind): (DimId, DimId)) -> bool {
    let pair = bit(dim) | bit(behind);
    let sums = nest.kernel.body.iter().any(|stmt| matches!(stmt, Stmt::Reduce { .. }));
    let value = |id: &ExprId| match nest.kernel.get(*id) {
        Expr::Load { input, index, outside } => {
            let access = Access::new(nest, &nest.inputs[usize::from(*input)], index, *outside);
            lies(nest, typing, &access, index, (dim, behind)) || !sums && in_rows(typing, &access, index, (dim, behind))
        }
        // Where there are sums, tiles stay what they are without it.
        Expr::Position(d) => bit(*d) & pair == 0 || !sums,
        Expr::Uniform { .. } => typing.depends(*id) & pair == 0,
        _ => true,
    };
    let outer = nest.kernel.outer.contains(&behind);
    let statement = |stmt: &Stmt| {
        let whole = outer || over_of(stmt).contains(&behind);
        match stmt {
            Stmt::Let { .. } => true,
            // Its result is of `dim` alone.
            Stmt::Reduce { over, value, .. } => {
                !outer && !over.contains(&dim) && (!whole || typing.depends(*value) & bit(dim) != 0)
            }
            Stmt::Store { output, index, over, .. } => {
                let access = Access::new(nest, &nest.outputs[usize::from(*output)], index, Outside::Never);
                let has = |d: DimId| access.strides[usize::from(d.0)] != 0;
                has(dim) && has(behind) == whole && !over.contains(&dim) && lies(nest, typing, &access, index, (dim, behind))
            }
        }
    };
    let used = outer || nest.kernel.body.iter().any(|stmt| over_of(stmt).contains(&behind));
    used && exprs.iter().all(value) && nest.kernel.body.iter().all(statement)
}

/// Whether an operand has `behind` right behind `dim`, or has at most one of them.
fn lies(nest: &Nest, typing: &Typing, access: &Access, index: &[Index], (dim, behind): (DimId, DimId)) -> bool {
    let pair = bit(dim) | bit(behind);
    let plain = |index: &Index| matches!(index, Index::Dim(_)) || dims_in(index, typing) & pair == 0;
    let extent = nest.extents[usize::from(behind.0)] as i64;
    let [first, second] = [dim, behind].map(|d| access.strides[usize::from(d.0)]);
    index.iter().all(plain) && (first == 0 || second == 0 || (second == 1 && first == extent))
}

/// Whether the points of `dim` are rows along `behind` that one call copies, at a distance and shifted.
fn in_rows(typing: &Typing, access: &Access, index: &[Index], (dim, behind): (DimId, DimId)) -> bool {
    let pair = bit(dim) | bit(behind);
    let Some((last, others)) = index.split_last() else { return false };
    let other = |index: &Index| match index {
        Index::Dim(d) => *d != behind,
        _ => dims_in(index, typing) & pair == 0,
    };
    along(last, behind).is_some() && others.iter().all(other) && access.strides[usize::from(behind.0)] == 1
}
