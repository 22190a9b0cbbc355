//! Values that one pass over a long row computes and a later one reads again.

use super::{Emitter, Place, Val};
use crate::library::vector::Shape;
use crate::tile::{bit, over_of, reachable, value_of};
use cranelift_codegen::ir::InstBuilder;
use dcc_program::kernel::{DimId, Expr, ExprId, UnaryOp};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of kept rows: a second-level cache holds them beside the rows that they come from.
const KEPT: usize = 256 << 10;

/// A row of the scratch that holds a value for each point of a dim.
pub(super) struct Row {
    slot: usize,
    dim: DimId,
    filled: bool,
}

/// Whether a function takes longer than a row takes to be written and read.
fn is_slow(op: UnaryOp) -> bool {
    use UnaryOp::{Abs, Ceil, Floor, IsInf, IsNan, Neg, Not, RoundEven, Sign, Sqrt};
    !matches!(op, Abs | Ceil | Floor | IsInf | IsNan | Neg | Not | RoundEven | Sign | Sqrt)
}

impl Emitter<'_, '_> {
    /// Takes rows for the slow functions that several passes over the same dim need. Short rows are one tile, which is remembered anyway.
    pub(super) fn take_rows(&mut self) {
        let kernel = &self.nest.kernel;
        if self.plan.column.is_some() {
            return;
        }
        let mut passes: BTreeMap<(ExprId, DimId), usize> = BTreeMap::new();
        for pass in &self.passes {
            let Some(tiling) = self.plan.statements[pass[0]].filter(|_| self.repeats(pass[0])) else { continue };
            if over_of(&kernel.body[pass[0]]) != [tiling.dim] {
                continue;
            }
            let dims = kernel.outer.iter().fold(bit(tiling.dim), |dims, outer| dims | bit(*outer));
            let roots: Vec<ExprId> = pass.iter().map(|&j| value_of(&kernel.body[j])).collect();
            let needed: BTreeSet<ExprId> = reachable(kernel, &roots).into_iter().collect();
            for id in needed {
                let depends = self.typing.depends(id);
                let along = depends & bit(tiling.dim) != 0 && depends & !dims == 0;
                if along && matches!(*kernel.get(id), Expr::Unary(op, _) if is_slow(op)) {
                    *passes.entry((id, tiling.dim)).or_default() += 1;
                }
            }
        }
        let begin = self.used;
        for ((id, dim), _) in passes.into_iter().filter(|(_, passes)| *passes > 1) {
            let bytes = (self.nest.extents[usize::from(dim.0)] * self.typing.ty(id).bytes()).next_multiple_of(64);
            if self.used + bytes - begin <= KEPT {
                self.rows.insert(id, Row { slot: self.used, dim, filled: false });
                self.used += bytes;
            }
        }
        self.peak = self.peak.max(self.used);
    }

    /// The tile of the row that `expr` has, if a tile runs along it, and whether it is filled.
    pub(super) fn row_of(&mut self, expr: ExprId) -> Option<(Val, bool)> {
        let row = self.rows.get(&expr).filter(|row| self.is_tile(row.dim))?;
        let (slot, filled, ty) = (row.slot, row.filled, self.typing.ty(expr));
        let first = self.index[usize::from(row.dim.0)].expect("a tile has a first point");
        let offset = self.builder.ins().imul_imm_s(first, ty.bytes() as i64);
        let row = self.slot_address(slot);
        let at = self.builder.ins().iadd(row, offset);
        Some((Val { place: Place::Pointer(at), shape: Shape::Tile, ty, depth: self.scopes.len() }, filled))
    }

    /// Later passes read the row of `expr`, which was computed.
    pub(super) fn fill(&mut self, expr: ExprId) {
        if let Some(row) = self.rows.get_mut(&expr) {
            row.filled = true;
        }
    }
}
