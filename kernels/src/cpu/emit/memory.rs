//! Emission of loads and stores.

use super::{Emitter, Place, Val};
use crate::library::vector::{Shape, Ty, convert, memory as tiles};
use crate::tile::{Access, Array, computed};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value, types};
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Index, Outside, Stmt, StoreMode};

/// Element offset of elements outside of their operand; stays negative under any addition of real offsets.
const OUTSIDE: i64 = i64::MIN / 2;

/// Bytes of an operand that no cache near the core keeps.
const FAR: usize = 256 << 10;
/// Bytes that rows are asked for ahead of a pass that sums them up, or finds their maximum.
const AHEAD: i64 = 4 << 10;

/// How the elements of an access lie along the tile.
pub(super) struct Walk {
    /// Element offset of the tile's first element, computed and affine indices along the tile left out.
    pub(super) first: Value,
    /// Element stride along the tile.
    pub(super) stride: i64,
    /// False where no element is inside.
    pub(super) inside: Option<Value>,
    /// Operand dims whose index along the tile is not a plain stride.
    pub(super) uneven: Vec<usize>,
}

impl Emitter<'_, '_> {
    pub(super) fn load(&mut self, expr: ExprId, input: u8, index: &[Index], outside: Outside) -> Val {
        let (nest, shape) = (self.nest, self.shape_of(expr));
        let array = &nest.inputs[usize::from(input)];
        let base = self.operand(usize::from(input));
        let walk = self.walk(array, index, outside, shape);
        let (bytes, ty) = (array.dtype.bytes() as usize, computed(array.dtype));
        let raw = if let Some(stride) = self.row_stride(array, index, outside, shape) {
            self.window(expr, (array, index), base, &walk, stride)
        } else if !walk.uneven.is_empty() {
            self.gather(array, index, base, &walk)
        } else {
            let mut pointer = self.at(base, walk.first, bytes);
            if let Some(inside) = walk.inside {
                let zeros = self.slot_address(self.zeros.0);
                pointer = self.builder.ins().select(inside, pointer, zeros);
            }
            if shape == Shape::Tile && walk.stride != 1 {
                let to = self.slot(ty, shape);
                let (at, zero, count) = (self.address(to), self.integer(0), self.count(shape));
                let stride = self.integer(walk.stride * bytes as i64);
                let stride = match walk.inside {
                    Some(inside) => self.builder.ins().select(inside, stride, zero),
                    None => stride,
                };
                self.call(tiles::load(self.isa, bytes), [at, pointer, stride, zero], count);
                to
            } else {
                if shape == Shape::Tile && walk.inside.is_none() {
                    self.fetch_next(array, index, pointer);
                }
                Val { place: Place::Pointer(pointer), shape, ty, depth: self.scopes.len() }
            }
        };
        match convert::widen(self.isa, array.dtype) {
            Some(widen) => {
                let to = self.slot(ty, shape);
                let (at, from, zero, count) = (self.address(to), self.address(raw), self.integer(0), self.count(shape));
                self.call(widen, [at, from, zero, zero], count);
                to
            }
            None => raw,
        }
    }

    /// Asks for the memory behind a tile of an operand that the loops walk through from end to end, since the next tile lies there: it
    /// arrives while this one is computed. Where there is little to compute, the memory is busy all the time by itself, unless nothing but
    /// rows is read: one stream by itself does not keep it busy. What several passes read is near after the first.
    pub(super) fn fetch_next(&mut self, array: &Array, index: &[Index], pointer: Value) {
        let (plan, dims, kernel) = (self.plan, self.nest.extents.len(), &self.nest.kernel);
        let computes = |expr: &&Expr| matches!(expr, Expr::Unary(..) | Expr::Binary(..) | Expr::Select(..));
        let operations = kernel.exprs.iter().filter(computes).count();
        let passes_once = kernel.body.iter().all(|stmt| matches!(stmt, Stmt::Store { .. }));
        let input = self.nest.inputs.iter().position(|other| std::ptr::eq(other, array));
        let is_first = input.is_some_and(|input| self.fetched.insert(input));
        let is_worth_it = if passes_once { operations > kernel.inputs.len() + kernel.outputs.len() } else { is_first };
        if !is_worth_it {
            return;
        }
        let bytes = array.dtype.bytes() as usize;
        let in_order = |d: usize, index: &Index| matches!(index, Index::Dim(dim) if usize::from(dim.0) == d);
        let loops = plan.order.iter().chain(&plan.within);
        let walks = index.len() == dims
            && index.iter().enumerate().all(|(d, index)| in_order(d, index))
            && loops.clone().enumerate().all(|(d, dim)| usize::from(dim.0) == d)
            && (plan.column.is_none() || loops.count() == dims)
            && plan.behind.is_none();
        if !walks || array.block.iter().product::<usize>() * bytes < FAR {
            return;
        }
        let count = self.count(Shape::Tile);
        let (count, zero) = (self.builder.ins().imul_imm_s(count, bytes as i64), self.integer(0));
        let ahead = if passes_once { count } else { self.integer(AHEAD) };
        let next = self.builder.ins().iadd(pointer, ahead);
        self.call(tiles::fetch(self.isa), [zero, next, zero, zero], count);
    }

    /// Where the current tile of an input begins, whose index is of loop dims alone.
    pub(super) fn start_of(&mut self, input: u8, index: &[Index]) -> Value {
        let array = &self.nest.inputs[usize::from(input)];
        let (base, walk) = (self.operand(usize::from(input)), self.walk(array, index, Outside::Never, Shape::Tile));
        self.at(base, walk.first, array.dtype.bytes() as usize)
    }

    /// Pointer of operand `number`, inputs first.
    pub(super) fn operand(&mut self, number: usize) -> Value {
        self.builder.ins().load(types::I64, MemFlagsData::trusted().with_readonly(), self.arguments, 8 * number as i32)
    }

    pub(super) fn at(&mut self, base: Value, elements: Value, bytes: usize) -> Value {
        let offset = self.builder.ins().imul_imm_s(elements, bytes as i64);
        self.builder.ins().iadd(base, offset)
    }

    pub(super) fn walk(&mut self, array: &Array, index: &[Index], outside: Outside, shape: Shape) -> Walk {
        let strides = Access::dense(array);
        let mut walk = Walk { first: self.integer(0), stride: 0, inside: None, uneven: vec![] };
        for (k, index) in index.iter().enumerate() {
            let (local, step) = match index {
                Index::Dim(dim) => {
                    let local = self.index[usize::from(dim.0)].expect("a loop runs along the dim");
                    (local, i64::from(self.is_tile(*dim) && shape == Shape::Tile))
                }
                Index::Affine { terms, offset } => {
                    let local = self.affine(terms, *offset, array.offset[k]);
                    (local, terms.iter().filter(|term| self.is_tile(term.0)).map(|term| term.1).sum())
                }
                Index::Expr(expr) if self.depends_on_tile(*expr) => {
                    walk.uneven.push(k);
                    continue;
                }
                Index::Expr(expr) => (self.computed_index(*expr, array.offset[k]), 0),
            };
            let checked =
                matches!(index, Index::Expr(_)) || (outside == Outside::Zero && matches!(index, Index::Affine { .. }));
            if checked && step != 0 {
                walk.uneven.push(k);
                continue;
            }
            let mut local = local;
            if checked {
                local = self.guard(local, array.valid[k], &mut walk.inside);
            }
            let elements = self.builder.ins().imul_imm_s(local, strides[k]);
            walk.first = self.builder.ins().iadd(walk.first, elements);
            walk.stride += step * strides[k];
        }
        walk
    }

    /// Adds `0 <= local < valid` to the conditions; returns an index that is safe to multiply.
    fn guard(&mut self, local: Value, valid: usize, inside: &mut Option<Value>) -> Value {
        let valid = self.integer(valid as i64);
        let here = self.builder.ins().icmp(IntCC::UnsignedLessThan, local, valid);
        *inside = Some(match *inside {
            Some(other) => self.builder.ins().band(other, here),
            None => here,
        });
        let zero = self.integer(0);
        self.builder.ins().select(here, local, zero)
    }

    /// Σ times · dim + offset, less the operand's own offset.
    pub(super) fn affine(&mut self, terms: &[(DimId, i64)], offset: i64, own: usize) -> Value {
        let own = self.parameter(own);
        let constant = self.integer(offset);
        let mut sum = self.builder.ins().isub(constant, own);
        for (dim, times) in terms {
            let global = self.global(*dim);
            let product = self.builder.ins().imul_imm_s(global, *times);
            sum = self.builder.ins().iadd(sum, product);
        }
        sum
    }

    fn computed_index(&mut self, expr: ExprId, own: usize) -> Value {
        let value = self.eval(expr);
        let at = self.address(value);
        let global = self.builder.ins().load(types::I64, MemFlagsData::trusted(), at, 0);
        let own = self.parameter(own);
        self.builder.ins().isub(global, own)
    }

    /// A tile whose element offsets are computed one by one.
    fn gather(&mut self, array: &Array, index: &[Index], base: Value, walk: &Walk) -> Val {
        let strides = Access::dense(array);
        let (zero, count) = (self.integer(0), self.count(Shape::Tile));
        let offsets = self.slot(Ty::I64, Shape::Tile);
        let mut first = walk.first;
        if let Some(inside) = walk.inside {
            let outside = self.integer(OUTSIDE);
            first = self.builder.ins().select(inside, first, outside);
        }
        let (at, step) = (self.address(offsets), self.integer(walk.stride));
        self.call(tiles::iota(self.isa), [at, first, step, zero], count);
        for k in walk.uneven.iter().copied() {
            let (indices, own) = match &index[k] {
                Index::Expr(expr) => (self.eval(*expr), self.parameter(array.offset[k])),
                Index::Affine { terms, offset } => {
                    let local = self.affine(terms, *offset, array.offset[k]);
                    let times = terms.iter().filter(|term| self.is_tile(term.0)).map(|term| term.1).sum();
                    let indices = self.slot(Ty::I64, Shape::Tile);
                    let (to, times) = (self.address(indices), self.integer(times));
                    self.call(tiles::iota(self.isa), [to, local, times, zero], count);
                    (indices, zero)
                }
                Index::Dim(_) => unreachable!("a loop dim is a plain stride"),
            };
            // [stride, first, valid] as the primitive reads them.
            let triple = self.slot(Ty::I64, Shape::Single);
            let to = self.address(triple);
            let words = [self.integer(strides[k]), own, self.integer(array.valid[k] as i64)];
            for (i, word) in words.into_iter().enumerate() {
                self.builder.ins().store(MemFlagsData::trusted(), word, to, 8 * i as i32);
            }
            let (at, from) = (self.address(offsets), self.address(indices));
            self.call(tiles::offset(self.isa), [at, from, to, zero], count);
        }
        let bytes = array.dtype.bytes() as usize;
        let to = self.slot(computed(array.dtype), Shape::Tile);
        let (to_address, from) = (self.address(to), self.address(offsets));
        self.call(tiles::gather(self.isa, bytes), [to_address, base, from, zero], count);
        to
    }

    /// Evaluates a store's value, right in its output where that is possible, and writes it.
    pub(super) fn store_directly(&mut self, stmt: &Stmt) {
        let Stmt::Store { output, index, value, mode, .. } = stmt else { return };
        let nest = self.nest;
        let array = &nest.outputs[usize::from(*output)];
        let arithmetic = match nest.kernel.get(*value) {
            Expr::Unary(..) | Expr::Binary(..) | Expr::Select(..) => true,
            Expr::Load { input, index, outside } => {
                let array = &nest.inputs[usize::from(*input)];
                self.row_stride(array, index, *outside, self.shape_of(*value)).is_some()
            }
            _ => false,
        };
        let stored_as_computed = convert::narrow(self.isa, array.dtype).is_none();
        // A value that has a row is computed there, for later passes.
        let elsewhere = self.known(*value) || self.rows.contains_key(value);
        if arithmetic && stored_as_computed && *mode == StoreMode::Assign && self.is_whole(*value) && !elsewhere {
            // The address is computed first: nothing that the value needs is.
            let walk = self.walk(array, index, Outside::Never, Shape::Tile);
            if walk.stride == 1 {
                let base = self.operand(nest.inputs.len() + usize::from(*output));
                let pointer = self.at(base, walk.first, array.dtype.bytes() as usize);
                self.fetch_next(array, index, pointer);
                let place = Val {
                    place: Place::Pointer(pointer),
                    shape: Shape::Tile,
                    ty: computed(array.dtype),
                    depth: self.scopes.len(),
                };
                self.target = Some((*value, place));
                let found = self.eval(*value);
                self.target = None;
                if matches!(found.place, Place::Pointer(p) if p == pointer) {
                    return;
                }
                return self.store(stmt, found);
            }
        }
        let found = self.eval(*value);
        self.store(stmt, found);
    }

    pub(super) fn store(&mut self, stmt: &Stmt, value: Val) {
        let Stmt::Store { output, index, .. } = stmt else { return };
        let nest = self.nest;
        let array = &nest.outputs[usize::from(*output)];
        let base = self.operand(nest.inputs.len() + usize::from(*output));
        let shape = if self.tile.is_some() { Shape::Tile } else { Shape::Single };
        let walk = self.walk(array, index, Outside::Never, shape);
        let bytes = array.dtype.bytes() as usize;
        let pointer = self.at(base, walk.first, bytes);
        let zero = self.integer(0);
        let mut value = value;
        let dense = shape == Shape::Single || walk.stride == 1;
        if Self::mode_of(stmt) == StoreMode::Accumulate {
            if dense && convert::widen(self.isa, array.dtype).is_none() {
                let to = Val { place: Place::Pointer(pointer), shape, ty: value.ty, depth: self.scopes.len() };
                self.combine(BinaryOp::Add, to, to, value);
                return;
            }
            value = self.added(array, pointer, walk.stride, value, shape);
        }
        let count = self.count(shape);
        let narrow = convert::narrow(self.isa, array.dtype);
        let from = self.address(value);
        match (narrow, value.shape == shape, dense) {
            (None, true, true) => self.call(tiles::copy(self.isa, bytes), [pointer, from, zero, zero], count),
            (None, false, true) => self.call(tiles::fill(self.isa, bytes), [pointer, from, zero, zero], count),
            (Some(narrow), true, true) => self.call(narrow, [pointer, from, zero, zero], count),
            _ => {
                let mut tile = self.spread(value);
                if let Some(narrow) = narrow {
                    let short = self.slot(tile.ty, tile.shape);
                    let (to, from) = (self.address(short), self.address(tile));
                    self.call(narrow, [to, from, zero, zero], count);
                    tile = short;
                }
                let (from, stride) = (self.address(tile), self.integer(if dense { 1 } else { walk.stride } * bytes as i64));
                self.call(tiles::store(self.isa, bytes), [pointer, from, stride, zero], count);
            }
        }
    }

    /// value + what the output holds.
    fn added(&mut self, array: &Array, pointer: Value, stride: i64, value: Val, shape: Shape) -> Val {
        let (bytes, ty, zero) = (array.dtype.bytes() as usize, computed(array.dtype), self.integer(0));
        let stride = if shape == Shape::Single { 1 } else { stride };
        let (old, sum) = (self.slot(ty, shape), self.slot(ty, shape));
        let (to, stride, count) = (self.address(old), self.integer(stride * bytes as i64), self.count(shape));
        self.call(tiles::load(self.isa, bytes), [to, pointer, stride, zero], count);
        if let Some(widen) = convert::widen(self.isa, array.dtype) {
            let at = self.address(sum);
            self.call(widen, [at, to, zero, zero], count);
            self.combine(BinaryOp::Add, sum, sum, value);
        } else {
            self.combine(BinaryOp::Add, sum, old, value);
        }
        sum
    }
}
