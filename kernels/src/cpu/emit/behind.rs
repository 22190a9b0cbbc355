//! Tiles of two dims: of the column's and of the one behind it, whose points are neighbours in memory.
//!
//! A value of both is a whole tile; one of the column's dim alone has an element for each row of it, one of the dim behind an element for
//! each place in a row, and either is repeated when a whole tile needs it.

use super::{Emitter, Tile, Val};
use crate::library::vector::{Shape, memory as tiles, reduce};
use crate::tile::{bit, over_of, value_of};
use cranelift_codegen::ir::{InstBuilder, Value};
use dcc_program::kernel::{ExprId, Stmt};
use dcc_program::types::Reduce;

/// Which of `Tiles` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// Points of the column's dim.
    Column,
    /// Points of the dim behind.
    Across,
    Whole,
}

/// The tiles of a point.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) column: Tile,
    pub(super) across: Tile,
    whole: Tile,
}

impl Emitter<'_, '_> {
    /// Computes what depends on the dim behind alone, for all points.
    pub(super) fn prepare_behind(&mut self) {
        let (Some(behind), Some(column)) = (self.plan.behind, self.plan.column) else { return };
        let count = self.integer(column.length as i64);
        self.tile = Some(Tile { dim: column.dim, dims: bit(column.dim), count, capacity: column.length });
        self.open_behind();
        self.enter(Behind::Whole);
        for stmt in &self.nest.kernel.body {
            self.prepare(value_of(stmt), bit(behind));
        }
        self.enter(Behind::Column);
        (self.tile, self.tiles) = (None, None);
    }

    /// Makes the tiles of a point, if the plan has two dims in one, from the column's.
    pub(super) fn open_behind(&mut self) {
        let (Some(dim), Some(column)) = (self.plan.behind, self.tile) else { return };
        let extent = self.nest.extents[usize::from(dim.0)];
        let count = self.builder.ins().imul_imm_s(column.count, extent as i64);
        let whole = Tile { dim, dims: column.dims | bit(dim), count, capacity: column.capacity * extent };
        let across = Tile { dim, dims: bit(dim), count: self.integer(extent as i64), capacity: extent };
        self.tiles = Some(Tiles { column, across, whole });
    }

    /// Lets one of the tiles run, if there are several.
    pub(super) fn enter(&mut self, which: Behind) {
        let (Some(tiles), Some(behind)) = (self.tiles, self.plan.behind) else { return };
        let (tile, runs) = match which {
            Behind::Column => (tiles.column, false),
            Behind::Across => (tiles.across, true),
            Behind::Whole => (tiles.whole, true),
        };
        self.tile = Some(tile);
        self.index[usize::from(behind.0)] = runs.then(|| self.integer(0));
    }

    /// Lets the tile run that statement `i` computes.
    pub(super) fn enter_for(&mut self, i: usize) {
        let (Some(tiles), Some(behind)) = (self.tiles, self.plan.behind) else { return };
        let stmt = &self.nest.kernel.body[i];
        let whole = match stmt {
            Stmt::Let { value, .. } => return self.enter(self.tile_of(*value, &tiles)),
            _ => self.nest.kernel.outer.contains(&behind) || over_of(stmt).contains(&behind),
        };
        self.enter(if whole { Behind::Whole } else { Behind::Column });
    }

    /// The least tile that holds a value.
    fn tile_of(&self, value: ExprId, tiles: &Tiles) -> Behind {
        match self.typing.depends(value) & tiles.whole.dims {
            all if all == tiles.whole.dims => Behind::Whole,
            one if one == tiles.across.dims => Behind::Across,
            _ => Behind::Column,
        }
    }

    /// In a whole tile, an expression of one of its dims: computed once for each point of that, and repeated.
    pub(super) fn repeated(&mut self, expr: ExprId) -> Option<Val> {
        let tiles = self.whole_tiles()?;
        if !self.depends_on_tile(expr) || self.is_whole(expr) {
            return None;
        }
        let which = self.tile_of(expr, &tiles);
        self.tile = Some(if which == Behind::Across { tiles.across } else { tiles.column });
        let value = self.eval(expr);
        self.tile = Some(tiles.whole);
        let bytes = value.ty.bytes();
        let primitive = if which == Behind::Across { tiles::cycle(self.isa, bytes) } else { tiles::repeat(self.isa, bytes) };
        let to = self.slot(value.ty, Shape::Tile);
        self.by_rows(primitive, to, value, &tiles);
        Some(to)
    }

    /// The tiles, if it is the whole one that runs.
    pub(super) fn whole_tiles(&self) -> Option<Tiles> {
        self.tiles.filter(|tiles| self.tile.is_some_and(|tile| tile.dims == tiles.whole.dims))
    }

    /// Each row of a whole tile made one element by `op`.
    pub(super) fn fold_rows(&mut self, op: Reduce, total: Val, tiles: &Tiles) -> Val {
        let running = self.tile.replace(tiles.column);
        let to = self.slot(total.ty, Shape::Tile);
        self.tile = running;
        self.by_rows(reduce::rows(self.isa, op, total.ty), to, total, tiles);
        to
    }

    fn by_rows(&mut self, primitive: crate::library::vector::Primitive, to: Val, from: Val, tiles: &Tiles) {
        let (at, from, zero) = (self.address(to), self.address(from), self.integer(0));
        let width: Value = tiles.across.count;
        self.call(primitive, [at, from, width, zero], tiles.column.count);
    }
}
