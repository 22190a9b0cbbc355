//! Loads of rows that lie apart in their operand, or shifted against the tile's: copied, with zeros where the operand has nothing.

use super::memory::Walk;
use super::{Emitter, Val};
use crate::library::vector::{Shape, Ty, convert, memory as tiles};
use crate::tile::{Access, Array, along, bit, computed, dims_in};
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value};
use dcc_program::kernel::{ExprId, Index, Outside};

impl Emitter<'_, '_> {
    /// Elements from a row of the tile to the next, if the rows are to be copied: neither one stretch of memory nor gathered.
    pub(super) fn row_stride(&self, array: &Array, index: &[Index], outside: Outside, shape: Shape) -> Option<i64> {
        let tile = self.tile.filter(|_| shape == Shape::Tile)?;
        let (last, others) = index.split_last()?;
        let shift = along(last, tile.dim)?;
        if others.iter().any(|index| dims_in(index, self.typing) & bit(tile.dim) != 0) {
            return None;
        }
        let cut = shift && outside == Outside::Zero;
        match self.whole_tiles() {
            Some(tiles) => {
                let stride = Access::new(self.nest, array, index, outside).strides[usize::from(tiles.column.dim.0)];
                let width = self.nest.extents[usize::from(tile.dim.0)] as i64;
                (cut || stride != width).then_some(stride)
            }
            None => cut.then_some(0),
        }
    }

    /// A tile of rows that are `stride` elements apart; `walk` knows where the first begins, but for a shift that may lead outside.
    pub(super) fn window(
        &mut self,
        expr: ExprId,
        (array, index): (&Array, &[Index]),
        base: Value,
        walk: &Walk,
        stride: i64,
    ) -> Val {
        let zero = self.integer(0);
        let (width, rows) = match self.whole_tiles() {
            Some(tiles) => (tiles.across.count, tiles.column.count),
            None => (self.count(Shape::Tile), self.integer(1)),
        };
        let (mut first, mut before, mut count) = (walk.first, zero, width);
        if let ([k], Some(Index::Affine { terms, offset })) = (&walk.uneven[..], index.last()) {
            // The operand's element at the tile's first.
            let local = self.affine(terms, *offset, array.offset[*k]);
            let valid = self.integer(array.valid[*k] as i64);
            let (outside, inside) = (self.builder.ins().ineg(local), self.builder.ins().isub(valid, local));
            let [from, to] = [outside, inside].map(|at| {
                let at = self.builder.ins().smax(at, zero);
                self.builder.ins().smin(at, width)
            });
            let to = self.builder.ins().smax(from, to);
            (before, count) = (from, self.builder.ins().isub(to, from));
            let at = self.builder.ins().iadd(local, before);
            first = self.builder.ins().iadd(first, at);
        }
        if let Some(inside) = walk.inside {
            count = self.builder.ins().select(inside, count, zero);
        }
        let (bytes, ty) = (array.dtype.bytes() as usize, computed(array.dtype));
        let to = match self.target.filter(|target| target.0 == expr && convert::widen(self.isa, array.dtype).is_none()) {
            Some((_, target)) => target,
            None => self.slot(ty, Shape::Tile),
        };
        let words = self.words([width, before, count], stride);
        let (at, from) = (self.address(to), self.at(base, first, bytes));
        self.call(tiles::window(self.isa, bytes), [at, from, words, zero], rows);
        to
    }

    /// Where the primitive reads its numbers.
    fn words(&mut self, numbers: [Value; 3], stride: i64) -> Value {
        let slot = self.slot(Ty::I64, Shape::Single);
        let (at, stride) = (self.address(slot), self.integer(stride));
        for (k, word) in numbers.into_iter().chain([stride]).enumerate() {
            self.builder.ins().store(MemFlagsData::trusted(), word, at, 8 * k as i32);
        }
        at
    }
}
