//! Reductions: how what a pass computes joins its totals.
//!
//! Long sums of f32 are sums of parts, for accuracy: a part is what a tile adds, or `PARTIAL` steps, and very many parts are added in f64.

use super::{Emitter, Val};
use crate::library::vector::{Shape, Ty, convert, memory as tiles, reduce};
use crate::tile::Tiling;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value, types};
use dcc_program::kernel::{BinaryOp, DimId, ExprId, Stmt, VarId};
use dcc_program::types::Reduce;

/// Steps of a sum over rows that are added up before they join the total, and parts that join it in f32.
const PARTIAL: usize = 64;

/// A reduction under way.
#[derive(Clone, Copy)]
pub(super) struct Total {
    pub var: VarId,
    pub op: Reduce,
    pub value: ExprId,
    /// Of a wide one a part.
    pub total: Val,
    /// The total of very many parts, in f64.
    wide: Option<Val>,
}

impl Total {
    /// A sum whose parts are apart from the total.
    fn has_parts(&self) -> bool {
        self.op == Reduce::Sum && (self.wide.is_some() || self.total.shape == Shape::Tile)
    }
}

impl Emitter<'_, '_> {
    /// Parts that a sum is made of.
    pub(super) fn adds(&self, loops: &[DimId], tiling: Option<Tiling>) -> usize {
        let extent = |dim: DimId| self.nest.extents[usize::from(dim.0)];
        let product = |dims: &[DimId]| dims.iter().map(|dim| extent(*dim)).fold(1, usize::saturating_mul);
        match (tiling, loops.split_last()) {
            (Some(tiling), _) => product(loops).saturating_mul(extent(tiling.dim).div_ceil(tiling.length)),
            (None, Some((last, rest))) => product(rest).saturating_mul(extent(*last).div_ceil(PARTIAL)),
            (None, None) => 1,
        }
    }

    /// Where a reduction accumulates, at first the neutral element; none of other statements.
    pub(super) fn total(&mut self, stmt: &Stmt, adds: usize) -> Option<Total> {
        let Stmt::Reduce { var, op, value, .. } = stmt else { return None };
        let ty = self.typing.ty(*value);
        let column = self.plan.column.is_some() && self.depends_on_tile(*value);
        let shape = if column { Shape::Tile } else { Shape::Single };
        let total = self.slot(ty, shape);
        self.set_neutral(total, *op);
        let wide = (*op == Reduce::Sum && ty == Ty::F32 && adds > PARTIAL).then(|| self.slot(Ty::F64, shape));
        if let Some(wide) = wide {
            self.set_neutral(wide, *op);
        }
        Some(Total { var: *var, op: *op, value: *value, total, wide })
    }

    /// Wide totals begin a part.
    pub(super) fn begin_parts(&mut self, totals: &[Total]) {
        totals.iter().filter(|total| total.wide.is_some()).for_each(|total| self.set_neutral(total.total, total.op));
    }

    /// Wide totals have their part.
    pub(super) fn join_parts(&mut self, totals: &[Total]) {
        totals.iter().for_each(|total| total.wide.into_iter().for_each(|wide| self.add_part(wide, total.total)));
    }

    /// The total as it is read.
    pub(super) fn whole_total(&mut self, total: Total) -> Total {
        if let Some(wide) = total.wide {
            self.convert(total.total, wide);
        }
        total
    }

    /// wide += part.
    fn add_part(&mut self, wide: Val, part: Val) {
        if wide.shape == Shape::Single {
            let (to, from) = (self.address(wide), self.address(part));
            let part = self.builder.ins().load(types::F32, MemFlagsData::trusted(), from, 0);
            let part = self.builder.ins().fpromote(types::F64, part);
            let sum = self.builder.ins().load(types::F64, MemFlagsData::trusted(), to, 0);
            let sum = self.builder.ins().fadd(sum, part);
            self.builder.ins().store(MemFlagsData::trusted(), sum, to, 0);
            return;
        }
        let mark = self.used;
        let widened = self.slot(wide.ty, wide.shape);
        self.convert(widened, part);
        self.combine(BinaryOp::Add, wide, wide, widened);
        self.used = mark;
    }

    /// Between f32 and f64.
    fn convert(&mut self, to: Val, from: Val) {
        let primitive = convert::cast(self.isa, from.ty, to.ty).expect("floats of other widths");
        let (at, from, zero, count) = (self.address(to), self.address(from), self.integer(0), self.count(to.shape));
        self.call(primitive, [at, from, zero, zero], count);
    }

    /// Each total with what `dim` adds to it; sums of parts, where it is long, in stretches of `PARTIAL`.
    pub(super) fn reduce_along(&mut self, dim: DimId, roots: &[ExprId], totals: &[Total]) {
        let length = self.nest.extents[usize::from(dim.0)];
        let (zero, extent) = (self.integer(0), self.integer(length as i64));
        if length <= PARTIAL || !totals.iter().any(Total::has_parts) {
            let into: Vec<Val> = totals.iter().map(|total| total.total).collect();
            self.begin_parts(totals);
            self.reduce_stretch(dim, [zero, extent], roots, totals, &into);
            return self.join_parts(totals);
        }
        self.repeat(zero, extent, PARTIAL as i64, &mut |e, first| {
            let part = |t: &Total| match t.op {
                Reduce::Sum if t.wide.is_none() => e.slot(t.total.ty, t.total.shape),
                _ => t.total,
            };
            let parts: Vec<Val> = totals.iter().map(part).collect();
            let sums = || totals.iter().zip(&parts).filter(|(t, _)| t.op == Reduce::Sum);
            sums().for_each(|(t, part)| e.set_neutral(*part, t.op));
            let length = e.integer(PARTIAL as i64);
            let end = e.builder.ins().iadd(first, length);
            let end = e.builder.ins().smin(end, extent);
            e.reduce_stretch(dim, [first, end], roots, totals, &parts);
            sums().for_each(|(t, part)| match t.wide {
                Some(wide) => e.add_part(wide, *part),
                None => e.combine(BinaryOp::Add, t.total, t.total, *part),
            });
        });
    }

    /// To `into`, one for each total, what the points of `dim` from `first` to `end` add.
    fn reduce_stretch(&mut self, dim: DimId, [first, end]: [Value; 2], roots: &[ExprId], totals: &[Total], into: &[Val]) {
        if !self.sum_columns(dim, [first, end], totals, into) {
            self.repeat(first, end, 1, &mut |e, at| {
                e.index[usize::from(dim.0)] = Some(at);
                e.prepare_all(roots);
                totals.iter().zip(into).for_each(|(t, to)| e.fold(t.op, t.value, *to));
            });
        }
        self.index[usize::from(dim.0)] = None;
    }

    /// total = op(total, value), over the tile where the total is a single element.
    pub(super) fn fold(&mut self, op: Reduce, value: ExprId, total: Val) {
        if op == Reduce::Sum && (self.fold_products(value, total) || self.fold_one(value, total)) {
            return;
        }
        let value = self.eval(value);
        match (total.shape, self.tile) {
            (Shape::Single, Some(tile)) if self.plan.column.is_none() => {
                let value = self.spread(value);
                let (to, from, zero) = (self.address(total), self.address(value), self.integer(0));
                self.call(reduce::reduce(self.isa, op, total.ty), [to, from, zero, zero], tile.count);
            }
            _ => {
                let op = match op {
                    Reduce::Sum => BinaryOp::Add,
                    Reduce::Prod => BinaryOp::Mul,
                    Reduce::Max => BinaryOp::Max,
                    Reduce::Min => BinaryOp::Min,
                };
                self.combine(op, total, total, value);
            }
        }
    }

    fn set_neutral(&mut self, total: Val, op: Reduce) {
        self.write_constant(total, reduce::neutral(op, total.ty));
        if total.shape == Shape::Tile {
            let tile = self.tile.expect("a tile value has a tile dim");
            let (at, zero) = (self.address(total), self.integer(0));
            self.call(tiles::fill(self.isa, total.ty.bytes()), [at, at, zero, zero], tile.count);
        }
    }
}
