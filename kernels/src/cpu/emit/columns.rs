//! Sums of columns: what the points of a loop add to a tile of totals, in one call for all of them instead of one or more for each.

use super::{Emitter, Total, Val};
use crate::library::vector::{Shape, Ty, convert, reduce};
use crate::tile::{Access, bit};
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value};
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Index, Outside};
use dcc_program::types::Reduce;

/// An operand of which each point of the loop reads a row, dense along the tile.
#[derive(Clone, Copy)]
struct Rows<'a> {
    input: u8,
    index: &'a [Index],
    /// Elements from a row to the next.
    stride: i64,
}

impl<'a> Emitter<'a, '_> {
    /// Adds to `into`, a tile for each of `totals`, what the points of `dim` from `first` to `end` do; false if their values are no plain
    /// operands, nor products of two.
    pub(super) fn sum_columns(&mut self, dim: DimId, [first, end]: [Value; 2], totals: &[Total], into: &[Val]) -> bool {
        let rows: Option<Vec<[Rows<'a>; 2]>> = totals.iter().map(|total| self.rows_of(dim, total)).collect();
        let Some(rows) = rows.filter(|rows| !rows.is_empty()) else { return false };
        self.index[usize::from(dim.0)] = Some(first);
        let count = self.builder.ins().isub(end, first);
        for ((total, to), [x, y]) in totals.iter().zip(into).zip(rows) {
            let [(a, a_stride), (b, b_stride)] = [x, y].map(|rows| self.rows(rows));
            let words = self.slot(Ty::I64, Shape::Single);
            let at = self.address(words);
            for (k, word) in [count, a_stride, b_stride].into_iter().enumerate() {
                self.builder.ins().store(MemFlagsData::trusted(), word, at, 8 * k as i32);
            }
            let is_product = matches!(self.nest.kernel.get(total.value), Expr::Binary(..));
            let primitive = reduce::columns(self.isa, to.ty, is_product).expect("rows are of floats");
            let (to, elements) = (self.address(*to), self.count(Shape::Tile));
            self.call(primitive, [to, a, b, at], elements);
        }
        true
    }

    /// The factors of what a total adds; twice the same where it is one operand.
    fn rows_of(&self, dim: DimId, total: &Total) -> Option<[Rows<'a>; 2]> {
        let value = total.value;
        let alone = self.plan.column.is_some() && self.plan.behind.is_none() && total.total.shape == Shape::Tile;
        if !alone || total.op != Reduce::Sum || self.known(value) || self.typing.depends(value) & bit(dim) == 0 {
            return None;
        }
        match self.nest.kernel.get(value) {
            Expr::Load { .. } => self.row(dim, value).map(|rows| [rows; 2]),
            Expr::Binary(BinaryOp::Mul, x, y) if self.uses[value.0 as usize] == 1 => {
                Some([self.row(dim, *x)?, self.row(dim, *y)?])
            }
            _ => None,
        }
    }

    fn row(&self, dim: DimId, value: ExprId) -> Option<Rows<'a>> {
        let Expr::Load { input, index, outside: Outside::Never } = self.nest.kernel.get(value) else { return None };
        let array = &self.nest.inputs[usize::from(*input)];
        let plain = index.iter().all(|index| matches!(index, Index::Dim(_)));
        let computed = convert::widen(self.isa, array.dtype).is_none() && matches!(self.typing.ty(value), Ty::F32 | Ty::F64);
        let strides = Access::dense(array);
        let along = |dim: DimId| -> i64 {
            let steps = index.iter().zip(&strides).filter(|(index, _)| matches!(index, Index::Dim(d) if *d == dim));
            steps.map(|step| step.1).sum()
        };
        let dense = self.tile.is_some_and(|tile| along(tile.dim) == 1);
        (plain && computed && dense).then(|| Rows { input: *input, index, stride: along(dim) })
    }

    /// Where the first row begins, and the bytes from a row to the next.
    fn rows(&mut self, rows: Rows<'_>) -> (Value, Value) {
        let bytes = self.nest.inputs[usize::from(rows.input)].dtype.bytes() as i64;
        (self.start_of(rows.input, rows.index), self.integer(rows.stride * bytes))
    }
}
