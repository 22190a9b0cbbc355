//! Emission of expressions.

use super::{Emitter, Place, Scope, Val};
use crate::library::vector::arithmetic::{self, Term};
use crate::library::vector::{Shape, Ty, convert, memory as tiles, reduce};
use crate::tile::{Dims, bit, computed, slope};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value, types};
use dcc_program::kernel::{BinaryOp, CompareOp, DimId, Expr, ExprId, UnaryOp, VarId};
use dcc_program::types::DType;

impl Emitter<'_, '_> {
    /// The value of `expr` in the current loops: remembered, or computed and remembered.
    pub(super) fn eval(&mut self, expr: ExprId) -> Val {
        if let Some(found) = self.remembered(expr) {
            return found;
        }
        let value = match (self.repeated(expr), self.row_of(expr)) {
            (Some(value), _) | (None, Some((value, true))) => value,
            (None, Some((_, false))) => {
                let value = self.compute(expr);
                self.fill(expr);
                value
            }
            (None, None) => self.compute(expr),
        };
        self.remember(expr, value);
        value
    }

    pub(super) fn remember(&mut self, expr: ExprId, value: Val) {
        let key = self.key(expr);
        self.scopes.last_mut().expect("a scope is open").values.insert(key, value);
    }

    fn key(&self, expr: ExprId) -> (ExprId, Dims) {
        (expr, self.tile.filter(|_| self.depends_on_tile(expr)).map_or(0, |tile| tile.dims))
    }

    pub(super) fn remembered(&self, expr: ExprId) -> Option<Val> {
        let key = self.key(expr);
        self.scopes.iter().rev().find_map(|scope| scope.values.get(&key)).copied()
    }

    /// Whether the current loops have computed `expr`.
    pub(super) fn known(&self, expr: ExprId) -> bool {
        self.remembered(expr).is_some()
    }

    /// Computes, in the current scope, what `roots` need and what is already known here.
    pub(super) fn prepare_all(&mut self, roots: &[ExprId]) {
        let mut known = self.tile.map_or(0, |tile| tile.dims);
        for (d, index) in self.index.iter().enumerate() {
            known |= index.map_or(0, |_| bit(DimId(d as u8)));
        }
        for root in roots {
            self.prepare(*root, known);
        }
    }

    /// Computes the largest parts of `expr` that depend on `known` dims and defined variables only.
    pub(super) fn prepare(&mut self, expr: ExprId, known: u64) {
        let mut stack = vec![expr];
        let mut seen = std::collections::BTreeSet::new();
        while let Some(id) = stack.pop() {
            if !seen.insert(id) {
                continue;
            }
            if self.typing.depends(id) & !known == 0 && self.defined(id) {
                self.eval(id);
            } else {
                stack.extend(crate::tile::children(self.nest.kernel.get(id)));
            }
        }
    }

    /// Whether all variables in `expr` have values.
    fn defined(&self, expr: ExprId) -> bool {
        let needed = crate::tile::reachable(&self.nest.kernel, &[expr]);
        needed
            .iter()
            .all(|id| if let Expr::Var(var) = self.nest.kernel.get(*id) { self.variable(*var).is_some() } else { true })
    }

    pub(super) fn variable(&self, var: VarId) -> Option<Val> {
        self.scopes.iter().rev().find_map(|scope| scope.vars.get(&var)).copied()
    }

    pub(super) fn shape_of(&self, expr: ExprId) -> Shape {
        if self.depends_on_tile(expr) { Shape::Tile } else { Shape::Single }
    }

    fn compute(&mut self, expr: ExprId) -> Val {
        let ty = self.typing.ty(expr);
        match self.nest.kernel.get(expr).clone() {
            Expr::Load { input, index, outside } => self.load(expr, input, &index, outside),
            Expr::Var(var) => self.variable(var).expect("statements define variables before they are read"),
            Expr::Const { bits, .. } => {
                let to = self.slot(ty, Shape::Single);
                let bits = if ty == Ty::F32 { u64::from((f64::from_bits(bits) as f32).to_bits()) } else { bits };
                self.write_constant(to, bits);
                to
            }
            Expr::Position(dim) => self.position(dim),
            Expr::Unary(op, x) => self.unary(expr, op, x),
            Expr::Binary(op, x, y) => self.binary(expr, op, x, y),
            Expr::Compare(op, x, y) => self.compare(expr, op, x, y),
            Expr::Select(c, x, y) => {
                let values = [self.eval(c), self.eval(x), self.eval(y)];
                let to = self.destination(expr, &[x, y]);
                let primitive = arithmetic::select(self.isa, ty, self.shapes(to, values));
                self.apply(primitive, to, &values);
                to
            }
            Expr::Cast(dtype, x) => self.cast(expr, dtype, x),
            Expr::Uniform { id, seed, step, element } => self.uniform(expr, id, [seed, step], element),
        }
    }

    /// Where the result of `expr` goes: over an operand that nothing else reads and that this loop computed, else a new place.
    fn destination(&mut self, expr: ExprId, operands: &[ExprId]) -> Val {
        let (ty, shape) = (self.typing.ty(expr), self.shape_of(expr));
        if let Some((_, target)) = self.target.filter(|target| target.0 == expr) {
            return target;
        }
        if let Some((row, _)) = self.row_of(expr) {
            return row;
        }
        for operand in operands {
            let value = self.eval(*operand);
            let free = self.is_own(*operand) && value.depth == self.scopes.len();
            if let (Place::Slot(_), true) = (value.place, free && value.shape == shape && value.ty == ty) {
                return value;
            }
        }
        self.slot(ty, shape)
    }

    /// Whether the place of `expr`, which was computed, holds it alone, for one reader. A cast that changes nothing lies where its operand
    /// does.
    fn is_own(&mut self, mut expr: ExprId) -> bool {
        while self.uses[expr.0 as usize] == 1 {
            match *self.nest.kernel.get(expr) {
                Expr::Unary(..) | Expr::Binary(..) | Expr::Select(..) => return true,
                Expr::Cast(_, from) if self.eval(expr).place == self.eval(from).place => expr = from,
                Expr::Cast(..) => return true,
                _ => return false,
            }
        }
        false
    }

    fn shapes<const N: usize>(&self, to: Val, values: [Val; N]) -> [Shape; N] {
        if to.shape == Shape::Single { [Shape::Tile; N] } else { values.map(|value| value.shape) }
    }

    fn apply(&mut self, primitive: crate::library::vector::Primitive, to: Val, operands: &[Val]) {
        let zero = self.integer(0);
        let mut addresses = [zero; 4];
        addresses[0] = self.address(to);
        for (address, operand) in addresses[1..].iter_mut().zip(operands) {
            *address = self.address(*operand);
        }
        let count = self.count(to.shape);
        self.call(primitive, addresses, count);
    }

    fn unary(&mut self, expr: ExprId, op: UnaryOp, x: ExprId) -> Val {
        let value = self.eval(x);
        let to = self.destination(expr, &[x]);
        if to.shape == Shape::Tile || !self.scalar_function(op, to, value) {
            self.apply(arithmetic::unary(self.isa, op, value.ty), to, &[value]);
        }
        self.wrap(expr, to)
    }

    fn binary(&mut self, expr: ExprId, op: BinaryOp, x: ExprId, y: ExprId) -> Val {
        let ty = self.typing.ty(expr);
        if let Some(to) = self.with_products(expr, op, x, y) {
            return to;
        }
        let values = [self.eval(x), self.eval(y)];
        let to = self.destination(expr, &[x, y]);
        if to.shape == Shape::Single && self.scalar(op, to, values) {
            return self.wrap(expr, to);
        }
        let primitive = arithmetic::binary(self.isa, op, ty, self.shapes(to, values));
        self.apply(primitive, to, &values);
        self.wrap(expr, to)
    }

    /// A sum or difference of tiles one or both of which are products that nothing else reads: in one pass. None if it is no such value.
    fn with_products(&mut self, expr: ExprId, op: BinaryOp, x: ExprId, y: ExprId) -> Option<Val> {
        let (ty, subtracts) = (self.typing.ty(expr), op == BinaryOp::Sub);
        if !matches!(op, BinaryOp::Add | BinaryOp::Sub) || !self.is_whole(expr) || !matches!(ty, Ty::F32 | Ty::F64) {
            return None;
        }
        let products = [x, y].map(|factor| self.product(factor));
        // Of half floats, which other passes round, only sums with a product.
        let is_half = convert::narrow(self.isa, self.typing.dtype(expr)).is_some();
        if is_half && subtracts {
            return None;
        }
        if let [Some(left), Some(right)] = products
            && !is_half
            && let [Some([a, s]), Some([b, t])] = [left, right].map(|factors| self.scaled(factors))
        {
            let [values @ .., s, t] = [a, b, s, t].map(|factor| self.eval(factor));
            let scales = self.pair([s, t]);
            let to = self.destination(expr, &[a, b]);
            self.apply(arithmetic::scaled(self.isa, ty, subtracts), to, &[values[0], values[1], scales]);
            return Some(to);
        }
        let (term, [a, b], other) = match products {
            [Some(product), _] => (if subtracts { Term::Less } else { Term::Added }, product, y),
            [None, Some(product)] => (if subtracts { Term::Subtracted } else { Term::Added }, product, x),
            [None, None] => return None,
        };
        let values = [self.eval(a), self.eval(b), self.eval(other)];
        let to = self.destination(expr, &[a, b, other]);
        let primitive = arithmetic::with_product(self.isa, ty, term, self.shapes(to, values));
        self.apply(primitive, to, &values);
        Some(to)
    }

    /// The factors of a tile that is a product, was not computed, and has one reader.
    fn product(&self, expr: ExprId) -> Option<[ExprId; 2]> {
        match *self.nest.kernel.get(expr) {
            Expr::Binary(BinaryOp::Mul, a, b) => {
                (self.uses[expr.0 as usize] == 1 && self.is_whole(expr) && !self.known(expr)).then_some([a, b])
            }
            _ => None,
        }
    }

    /// The factor that is a tile and the one that is the same for all of it.
    fn scaled(&self, [a, b]: [ExprId; 2]) -> Option<[ExprId; 2]> {
        [[a, b], [b, a]].into_iter().find(|&[tile, scale]| self.is_whole(tile) && !self.depends_on_tile(scale))
    }

    /// Two single values side by side.
    fn pair(&mut self, values: [Val; 2]) -> Val {
        let ty = values[0].ty;
        let (pair, bytes) = (self.slot(Ty::F64, Shape::Single), ty.bytes() as i32);
        let word = if ty == Ty::F32 { types::F32 } else { types::F64 };
        let to = self.address(pair);
        for (k, value) in (0..).zip(values) {
            let from = self.address(value);
            let value = self.builder.ins().load(word, MemFlagsData::trusted(), from, 0);
            self.builder.ins().store(MemFlagsData::trusted(), value, to, k * bytes);
        }
        Val { ty, ..pair }
    }

    /// Adds a product over the tile to a single total without storing it, nor what it is cast from; false if that can't be.
    pub(super) fn fold_products(&mut self, value: ExprId, total: Val) -> bool {
        let Expr::Binary(BinaryOp::Mul, x, y) = *self.nest.kernel.get(value) else { return false };
        let single = |e: &Self, expr: ExprId, times: usize| e.uses[expr.0 as usize] == times && !e.known(expr);
        let over_tile = total.shape == Shape::Single && self.tile.is_some() && self.plan.column.is_none();
        if !over_tile || !matches!(self.typing.dtype(value), DType::F32 | DType::F64) || !single(self, value, 1) {
            return false;
        }
        let widened = |e: &Self, expr: ExprId| match *e.nest.kernel.get(expr) {
            Expr::Cast(DType::F64, from) if e.typing.ty(from) == Ty::F32 => Some(from),
            _ => None,
        };
        let (x, y) = match (widened(self, x), widened(self, y)) {
            (Some(from), Some(_)) if x == y && single(self, x, 2) => (from, from),
            (Some(from), Some(other)) if x != y && single(self, x, 1) && single(self, y, 1) => (from, other),
            _ => (x, y),
        };
        let Some(primitive) = reduce::sum_of_products(self.isa, self.typing.ty(x), total.ty, x == y) else { return false };
        let values = [self.eval(x), self.eval(y)].map(|value| self.spread(value));
        let (to, [x, y], zero) = (self.address(total), values.map(|value| self.address(value)), self.integer(0));
        let count = self.count(Shape::Tile);
        self.call(primitive, [to, x, y, zero], count);
        true
    }

    /// Adds a value that is zero but where the tile's point has a number, as a loss picks a class, to a single total: at that point alone, if
    /// the tile has it. False if `value` is no such value.
    pub(super) fn fold_one(&mut self, value: ExprId, total: Val) -> bool {
        let kernel = &self.nest.kernel;
        let over_tile = total.shape == Shape::Single && self.plan.column.is_none();
        let Some(tile) = self.tile.filter(|_| over_tile) else { return false };
        let Expr::Select(condition, chosen, other) = *kernel.get(value) else { return false };
        let Expr::Compare(CompareOp::Eq, x, y) = *kernel.get(condition) else { return false };
        let zero = matches!(*kernel.get(other), Expr::Const { bits: 0, .. });
        let Some(number) = self.number_of_point(x, y).filter(|_| zero) else { return false };
        let number = self.eval(number);
        let (at, global) = (self.address(number), self.global(tile.dim));
        let number = self.builder.ins().load(types::I64, MemFlagsData::trusted(), at, 0);
        let first = self.index[usize::from(tile.dim.0)].expect("a tile has a first point");
        let place = self.builder.ins().isub(number, global);
        let inside = self.builder.ins().icmp(IntCC::UnsignedLessThan, place, tile.count);
        let (point, one) = (self.builder.ins().iadd(first, place), self.integer(1));
        let behind = self.builder.ins().iadd(point, one);
        let end = self.builder.ins().select(inside, behind, point);
        self.tile = None;
        self.repeat(point, end, 1, &mut |e, at| {
            e.index[usize::from(tile.dim.0)] = Some(at);
            let value = e.eval(chosen);
            e.combine(BinaryOp::Add, total, total, value);
        });
        (self.tile, self.index[usize::from(tile.dim.0)]) = (Some(tile), Some(first));
        true
    }

    /// What the tile's points are compared with by `x == y`: one is their number, the other the same for all.
    fn number_of_point(&self, x: ExprId, y: ExprId) -> Option<ExprId> {
        let is_point = |x: ExprId| matches!(*self.nest.kernel.get(x), Expr::Position(dim) if self.is_tile(dim));
        let found = [(x, y), (y, x)].into_iter().find(|(point, number)| is_point(*point) && !self.depends_on_tile(*number));
        found.map(|(_, number)| number)
    }

    /// A function of a single element without a call; false if it has none.
    fn scalar_function(&mut self, op: UnaryOp, to: Val, value: Val) -> bool {
        let ty = match value.ty {
            Ty::F32 => types::F32,
            Ty::F64 => types::F64,
            Ty::I64 | Ty::Bool => return false,
        };
        if !matches!(op, UnaryOp::Neg | UnaryOp::Sqrt | UnaryOp::Rsqrt) {
            return false;
        }
        let (from, to) = (self.address(value), self.address(to));
        let x = self.builder.ins().load(ty, MemFlagsData::trusted(), from, 0);
        let result = match op {
            UnaryOp::Neg => self.builder.ins().fneg(x),
            UnaryOp::Sqrt => self.builder.ins().sqrt(x),
            _ => {
                let one = if ty == types::F32 { self.builder.ins().f32const(1.0) } else { self.builder.ins().f64const(1.0) };
                let root = self.builder.ins().sqrt(x);
                self.builder.ins().fdiv(one, root)
            }
        };
        self.builder.ins().store(MemFlagsData::trusted(), result, to, 0);
        true
    }

    /// Arithmetic on single elements without a call; false if the operation has none.
    fn scalar(&mut self, op: BinaryOp, to: Val, values: [Val; 2]) -> bool {
        let ty = match to.ty {
            Ty::F32 => types::F32,
            Ty::F64 => types::F64,
            Ty::I64 => types::I64,
            Ty::Bool => return false,
        };
        if !matches!(op, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul) && (op != BinaryOp::Div || to.ty == Ty::I64) {
            return false;
        }
        let [x, y] = values.map(|value| {
            let at = self.address(value);
            self.builder.ins().load(ty, MemFlagsData::trusted(), at, 0)
        });
        let ins = self.builder.ins();
        let result = match (op, to.ty) {
            (BinaryOp::Add, Ty::I64) => ins.iadd(x, y),
            (BinaryOp::Sub, Ty::I64) => ins.isub(x, y),
            (BinaryOp::Mul, Ty::I64) => ins.imul(x, y),
            (BinaryOp::Add, _) => ins.fadd(x, y),
            (BinaryOp::Sub, _) => ins.fsub(x, y),
            (BinaryOp::Mul, _) => ins.fmul(x, y),
            _ => ins.fdiv(x, y),
        };
        let at = self.address(to);
        self.builder.ins().store(MemFlagsData::trusted(), result, at, 0);
        true
    }

    /// Integers narrower than 64 bits wrap; half floats round.
    fn wrap(&mut self, expr: ExprId, value: Val) -> Val {
        self.wrapped(expr, value, value)
    }

    /// `from` as `wrap` makes it, in `to`; these are one where nothing is to be done.
    fn wrapped(&mut self, expr: ExprId, from: Val, to: Val) -> Val {
        let dtype = self.typing.dtype(expr);
        if let (Some(narrow), Some(widen)) = (convert::narrow(self.isa, dtype), convert::widen(self.isa, dtype)) {
            let short = self.slot(to.ty, to.shape);
            self.apply(narrow, short, &[from]);
            self.apply(widen, to, &[short]);
        }
        to
    }

    fn compare(&mut self, expr: ExprId, op: CompareOp, x: ExprId, y: ExprId) -> Val {
        let (op, x, y) = match op {
            CompareOp::Gt => (CompareOp::Lt, y, x),
            CompareOp::Ge => (CompareOp::Le, y, x),
            other => (other, x, y),
        };
        if op == CompareOp::Eq
            && let Some(tile) = self.tile
            && let Some(number) = self.number_of_point(x, y)
        {
            return self.one_hot(tile.dim, number);
        }
        let values = [self.eval(x), self.eval(y)];
        let to = self.slot(Ty::Bool, self.shape_of(expr));
        let primitive = arithmetic::compare(self.isa, op, values[0].ty, self.shapes(to, values));
        self.apply(primitive, to, &values);
        to
    }

    /// Whether the points of the tile are number `number`.
    fn one_hot(&mut self, dim: DimId, number: ExprId) -> Val {
        let (first, number) = (self.global(dim), self.eval(number));
        let to = self.slot(Ty::Bool, Shape::Tile);
        let (at, number, zero) = (self.address(to), self.address(number), self.integer(0));
        let count = self.count(Shape::Tile);
        self.call(tiles::one_hot(self.isa), [at, number, first, zero], count);
        to
    }

    fn cast(&mut self, expr: ExprId, dtype: DType, x: ExprId) -> Val {
        let from = self.eval(x);
        let converted = match convert::cast(self.isa, from.ty, computed(dtype)) {
            Some(primitive) => {
                let to = self.slot(computed(dtype), from.shape);
                self.apply(primitive, to, &[from]);
                to
            }
            None if convert::narrow(self.isa, dtype).is_none() || dtype == self.typing.dtype(x) => return from,
            None => {
                let to = self.slot(from.ty, from.shape);
                return self.wrapped(expr, from, to);
            }
        };
        self.wrap(expr, converted)
    }

    fn position(&mut self, dim: DimId) -> Val {
        let first = self.global(dim);
        if self.tile.is_some_and(|tile| tile.dim == dim) {
            let to = self.slot(Ty::I64, Shape::Tile);
            let (at, one, zero) = (self.address(to), self.integer(1), self.integer(0));
            let count = self.count(Shape::Tile);
            self.call(tiles::iota(self.isa), [at, first, one, zero], count);
            return to;
        }
        let to = self.slot(Ty::I64, Shape::Single);
        let at = self.address(to);
        self.builder.ins().store(MemFlagsData::trusted(), first, at, 0);
        to
    }

    /// The global index of a dim's current point, for the tile dim of its first.
    pub(super) fn global(&mut self, dim: DimId) -> Value {
        let offset = self.parameter(self.nest.offset[usize::from(dim.0)]);
        let local = self.index[usize::from(dim.0)].expect("a loop runs along the dim");
        self.builder.ins().iadd(local, offset)
    }

    fn uniform(&mut self, expr: ExprId, id: u32, seeds: [ExprId; 2], element: ExprId) -> Val {
        let values = seeds.map(|seed| self.eval(seed));
        let stream = self.slot(Ty::I64, Shape::Single);
        for (k, value) in values.iter().enumerate() {
            let (from, to) = (self.address(*value), self.address(stream));
            let word = self.builder.ins().load(types::I64, MemFlagsData::trusted(), from, 0);
            self.builder.ins().store(MemFlagsData::trusted(), word, to, 8 * k as i32);
        }
        let tile = self.tile;
        let even = tile.is_some_and(|t| slope(&self.nest.kernel, self.typing, element, t.dim) == Some(1));
        let (primitive, elements) = if even {
            // The number of the tile's first element: the expression with the tile dim as a plain loop.
            self.tile = None;
            self.scopes.push(Scope { mark: self.used, ..Scope::default() });
            let first = self.eval(element);
            self.scopes.pop();
            self.tile = tile;
            (tiles::uniform_run(self.isa), first)
        } else {
            (tiles::uniform(self.isa), self.eval(element))
        };
        let to = self.slot(Ty::F32, self.shape_of(expr));
        let (at, elements, stream, id) =
            (self.address(to), self.address(elements), self.address(stream), self.integer(i64::from(id)));
        let count = self.count(to.shape);
        self.call(primitive, [at, elements, stream, id], count);
        to
    }

    /// A parameter or operand pointer of this run.
    pub(super) fn parameter(&mut self, number: usize) -> Value {
        let at = 8 * (self.nest.inputs.len() + self.nest.outputs.len() + number);
        self.builder.ins().load(types::I64, MemFlagsData::trusted().with_readonly(), self.arguments, at as i32)
    }

    /// Whether `dim` is the tile dim.
    pub(super) fn is_tile(&self, dim: DimId) -> bool {
        self.tile.is_some_and(|tile| tile.dim == dim)
    }
}
