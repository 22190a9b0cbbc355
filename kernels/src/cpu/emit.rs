//! Machine code for a planned nest: loops, addresses and calls of vector primitives.
//!
//! The function gets the operands' pointers and parameters, the thread's scratch and a range of outer points. Values live in scratch
//! slots or in place in operands: *tiles* along the current tile dim, or *single* elements where they do not depend on it. A value is
//! computed in the outermost loop where all that it depends on is known and kept until that loop's next iteration.

mod behind;
mod columns;
mod direct;
mod kept;
mod memory;
mod registers;
mod totals;
mod value;
mod window;

use behind::{Behind, Tiles};
pub(super) use registers::all_in_registers;
use totals::Total;

use crate::cpu::isa::Isa;
use crate::library::vector::{Primitive, Shape, Ty, arithmetic, memory as tiles};
use crate::tile::{Dims, Nest, Plan, Tiling, Typing, bit, over_of, pass_of, value_of};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{AbiParam, Function, InstBuilder, MemFlagsData, SigRef, Signature, Value, types};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_jit::JITModule;
use cranelift_module::Module;
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Stmt, StoreMode, VarId};
use std::collections::{BTreeMap, BTreeSet};

/// Where a computed value is.
#[derive(Clone, Copy, Debug)]
struct Val {
    place: Place,
    shape: Shape,
    ty: Ty,
    /// Number of scopes open when it was computed.
    depth: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Bytes into the scratch.
    Slot(usize),
    Pointer(Value),
}

/// What runs in tiles now: points of this tile (a value and at most), its first point is in `Emitter::index`.
#[derive(Clone, Copy)]
struct Tile {
    /// The dim of which elements of a tile are neighbours.
    dim: DimId,
    /// That dim, or with it the one before it.
    dims: Dims,
    count: Value,
    capacity: usize,
}

/// Values that one loop iteration has computed. A value that depends on the tile's dims is remembered under these.
#[derive(Default)]
struct Scope {
    values: BTreeMap<(ExprId, Dims), Val>,
    vars: BTreeMap<VarId, Val>,
    /// Scratch in use when the scope was opened.
    mark: usize,
}

/// The state of emission.
pub(super) struct Emitter<'a, 'b> {
    builder: FunctionBuilder<'b>,
    /// Where code that the generator does not make is defined.
    module: &'b mut JITModule,
    nest: &'a Nest,
    typing: &'a Typing,
    plan: &'a Plan,
    isa: Isa,
    signature: SigRef,
    arguments: Value,
    scratch: Value,
    /// Local index of each dim that a loop or tile runs along.
    index: Vec<Option<Value>>,
    tile: Option<Tile>,
    /// The tiles of a plan with a dim behind the column's.
    tiles: Option<Tiles>,
    scopes: Vec<Scope>,
    /// Bytes of scratch in use now and at most.
    used: usize,
    peak: usize,
    /// Users of each expression, statements included.
    uses: Vec<usize>,
    /// Offset of a tile of zeros, its bytes.
    zeros: (usize, usize),
    /// The statements of each pass.
    passes: Vec<Vec<usize>>,
    /// Values that several passes need.
    rows: BTreeMap<ExprId, kept::Row>,
    calls: usize,
    /// An expression that may be computed right where it is stored.
    target: Option<(ExprId, Val)>,
    /// Variables that lie in outputs.
    placed: BTreeMap<VarId, u8>,
    /// Inputs whose memory a pass asks for.
    fetched: BTreeSet<usize>,
}

/// What the emitted code needs and how much of it there is.
pub(super) struct Emitted {
    pub scratch_bytes: usize,
    pub calls: usize,
}

/// What emission works on.
pub(super) struct Source<'a> {
    pub nest: &'a Nest,
    pub typing: &'a Typing,
    pub plan: &'a Plan,
    pub isa: Isa,
}

/// Emits the whole function: (arguments, scratch, first point, end).
pub(super) fn emit(module: &mut JITModule, function: &mut Function, source: &Source<'_>) -> Emitted {
    let Source { nest, typing, plan, isa } = *source;
    let frontend = module.isa().frontend_config();
    let mut context = FunctionBuilderContext::new();
    let mut primitive = Signature::new(function.signature.call_conv);
    primitive.params.extend([AbiParam::new(types::I64); 5]);
    let mut builder = FunctionBuilder::new(function, &mut context);
    let signature = builder.import_signature(primitive);
    let entry = builder.create_block();
    builder.append_block_params_for_function_params(entry);
    builder.switch_to_block(entry);
    let parameters: Vec<Value> = builder.block_params(entry).to_vec();
    let mut uses = vec![0; nest.kernel.exprs.len()];
    let roots: Vec<ExprId> = nest.kernel.body.iter().map(value_of).collect();
    let reachable = crate::tile::reachable(&nest.kernel, &roots);
    let children = reachable.iter().flat_map(|id| crate::tile::children(nest.kernel.get(*id)));
    children.chain(roots.iter().copied()).for_each(|id| uses[id.0 as usize] += 1);
    let longest = plan.statements.iter().flatten().chain(&plan.column).map(|t| t.length).max().unwrap_or(1);
    let behind = plan.behind.map_or(1, |dim| nest.extents[usize::from(dim.0)]);
    let zeros = (longest * behind * 8).next_multiple_of(64);
    let mut emitter = Emitter {
        builder,
        module,
        nest,
        typing,
        plan,
        isa,
        signature,
        arguments: parameters[0],
        scratch: parameters[1],
        index: vec![None; nest.extents.len()],
        tile: None,
        tiles: None,
        scopes: vec![Scope::default()],
        used: zeros,
        peak: zeros,
        uses,
        zeros: (0, zeros),
        passes: Vec::new(),
        rows: BTreeMap::new(),
        calls: 0,
        target: None,
        placed: BTreeMap::new(),
        fetched: BTreeSet::new(),
    };
    emitter.passes = emitter.in_passes();
    emitter.take_rows();
    emitter.function(
        parameters[2],
        parameters[3],
        reachable.iter().any(|id| matches!(nest.kernel.get(*id), Expr::Load { .. })),
    );
    let emitted = Emitted { scratch_bytes: emitter.peak, calls: emitter.calls };
    emitter.builder.seal_all_blocks();
    emitter.builder.finalize(frontend);
    emitted
}

impl Emitter<'_, '_> {
    fn function(&mut self, begin: Value, end: Value, loads: bool) {
        if loads {
            self.clear_zeros();
        }
        for stmt in &self.nest.kernel.body {
            self.prepare(value_of(stmt), 0);
        }
        self.prepare_behind();
        self.repeat(begin, end, 1, &mut |emitter, point| {
            emitter.locate(point);
            emitter.within(&emitter.plan.within);
        });
        self.builder.ins().return_(&[]);
    }

    /// The body, in loops over `loops`.
    fn within(&mut self, loops: &[DimId]) {
        let Some((dim, rest)) = loops.split_first() else { return self.body() };
        let (body, whole) = (&self.nest.kernel.body, self.plan.behind.filter(|dim| self.nest.kernel.outer.contains(dim)));
        if whole.is_some() {
            self.enter(Behind::Whole);
        }
        self.prepare_all(&body.iter().map(value_of).collect::<Vec<_>>());
        let (zero, end) = (self.integer(0), self.integer(self.nest.extents[usize::from(dim.0)] as i64));
        self.repeat(zero, end, 1, &mut |e, at| {
            e.index[usize::from(dim.0)] = Some(at);
            e.within(rest);
        });
        self.index[usize::from(dim.0)] = None;
    }

    fn body(&mut self) {
        for pass in self.passes.clone() {
            self.statements(&pass);
        }
    }

    /// The statements, those of one pass together.
    fn in_passes(&self) -> Vec<Vec<usize>> {
        let (mut passes, mut done) = (Vec::new(), vec![false; self.nest.kernel.body.len()]);
        for i in 0..done.len() {
            if !done[i] {
                let pass = self.pass(i);
                pass.iter().for_each(|&j| done[j] = true);
                passes.push(pass);
            }
        }
        passes
    }

    fn clear_zeros(&mut self) {
        let zero = self.integer(0);
        let at = self.slot_address(self.zeros.0);
        self.builder.ins().store(MemFlagsData::trusted(), zero, at, 0);
        let count = self.integer(self.zeros.1 as i64 / 8);
        self.call(tiles::fill(self.isa, 8), [at, at, zero, zero], count);
    }

    /// Sets the outer dims' indices from the number of an outer point.
    fn locate(&mut self, point: Value) {
        let mut rest = point;
        let order = self.plan.order.clone();
        for (place, dim) in order.iter().enumerate().rev() {
            let trips = self.plan.trips(self.nest, *dim).max(1) as i64;
            let at = if place == 0 {
                rest
            } else {
                let (trips, all) = (self.integer(trips), rest);
                rest = self.builder.ins().udiv(all, trips);
                let whole = self.builder.ins().imul(rest, trips);
                self.builder.ins().isub(all, whole)
            };
            self.index[usize::from(dim.0)] = Some(at);
        }
        if let Some(column) = self.plan.column {
            let number = self.index[usize::from(column.dim.0)].expect("the column dim is in the order");
            let first = self.builder.ins().imul_imm_s(number, column.length as i64);
            self.open_tile(column, first);
            self.open_behind();
        }
    }

    /// Makes `tiling`'s dim the tile dim, from `first` on.
    fn open_tile(&mut self, tiling: Tiling, first: Value) {
        let extent = self.nest.extents[usize::from(tiling.dim.0)];
        let count = if extent.is_multiple_of(tiling.length) || extent < tiling.length {
            self.integer(extent.min(tiling.length) as i64)
        } else {
            let (end, length) = (self.integer(extent as i64), self.integer(tiling.length as i64));
            let left = self.builder.ins().isub(end, first);
            self.builder.ins().smin(left, length)
        };
        self.index[usize::from(tiling.dim.0)] = Some(first);
        self.tile = Some(Tile { dim: tiling.dim, dims: bit(tiling.dim), count, capacity: tiling.length });
    }

    /// Statements that one pass does, from `i` on.
    fn pass(&self, i: usize) -> Vec<usize> {
        let body = &self.nest.kernel.body;
        let is_sum = |j: usize| matches!(body[j], Stmt::Reduce { .. });
        // With a column, sums go by parts, without stores.
        let column = self.plan.column.is_some();
        if matches!(body[i], Stmt::Let { .. }) || is_sum(i) && !column && !self.repeats(i) {
            return vec![i];
        }
        let like = |j: usize| over_of(&body[j]) == over_of(&body[i]) && self.plan.statements[j] == self.plan.statements[i];
        let joins = |j: usize| if column { is_sum(j) == is_sum(i) } else { !is_sum(j) || self.repeats(j) };
        pass_of(&self.nest.kernel, i, &|j| like(j) && joins(j), &|_| false)
    }

    /// Whether a statement, without a column, passes over its points in several steps, none of which leaves its values for others.
    fn repeats(&self, i: usize) -> bool {
        let own = self.plan.statements[i];
        let long = own.is_some_and(|t| self.nest.extents[usize::from(t.dim.0)] > t.length);
        long || over_of(&self.nest.kernel.body[i]).iter().any(|d| own.is_none_or(|t| t.dim != *d))
    }

    /// Emits statements that one pass does.
    fn statements(&mut self, pass: &[usize]) {
        let body = &self.nest.kernel.body;
        let own = self.plan.statements[pass[0]];
        let single = own.filter(|t| self.nest.extents[usize::from(t.dim.0)] <= t.length);
        if let Some(tiling) = single {
            let zero = self.integer(0);
            self.open_tile(tiling, zero);
        }
        self.enter_for(pass[0]);
        let over = over_of(&body[pass[0]]);
        let in_tile = |d: &DimId| own.is_some_and(|t| t.dim == *d) || self.plan.behind == Some(*d);
        let loops: Vec<DimId> = over.iter().copied().filter(|d| !in_tile(d)).collect();
        if let Stmt::Let { var, value } = &body[pass[0]] {
            self.define_as(pass[0], *var, *value);
        } else {
            let roots: Vec<ExprId> = pass.iter().map(|&j| value_of(&body[j])).collect();
            // Of one step alone all would be computed: that waits for who can do it in registers.
            let steps = own.filter(|_| single.is_none());
            if !loops.is_empty() || steps.is_some() {
                self.prepare_all(&roots);
            }
            self.together(pass, &roots, &loops, steps);
        }
        if self.plan.column.is_none() {
            self.tile = None;
        }
        self.enter(Behind::Column);
        if let Some(tiling) = own {
            self.index[usize::from(tiling.dim.0)] = None;
        }
    }

    /// Reductions and stores, in one pass.
    fn together(&mut self, pass: &[usize], roots: &[ExprId], loops: &[DimId], tiling: Option<Tiling>) {
        let body = &self.nest.kernel.body;
        let adds = self.adds(loops, tiling);
        let totals: Vec<Total> = pass.iter().filter_map(|&j| self.total(&body[j], adds)).collect();
        let is_left = |stmt: &&Stmt| matches!(stmt, Stmt::Store { .. }) && !self.is_placed(stmt);
        let stores: Vec<&Stmt> = pass.iter().map(|&j| &body[j]).filter(is_left).collect();
        match loops.split_last().filter(|_| stores.is_empty() && tiling.is_none()) {
            Some((last, rest)) => self.around(rest, None, roots, &mut |e| e.reduce_along(*last, roots, &totals)),
            None => self.around(loops, tiling, roots, &mut |e| {
                e.begin_parts(&totals);
                if !e.in_registers(&totals, &stores) {
                    if loops.is_empty() && tiling.is_none() {
                        e.prepare_all(roots);
                    }
                    totals.iter().for_each(|t| e.fold(t.op, t.value, t.total));
                    e.stores(&stores);
                }
                e.join_parts(&totals);
            }),
        }
        for total in totals {
            let Total { var, op, mut total, .. } = self.whole_total(total);
            if let Some(tiles) = self.whole_tiles() {
                total = self.fold_rows(op, total, &tiles);
            }
            self.define(var, total);
        }
    }

    fn define(&mut self, var: VarId, value: Val) {
        self.scopes.last_mut().expect("a scope is open").vars.insert(var, value);
    }

    /// Runs `inner` within loops over `loops` and tiles of `tiling`.
    fn around(&mut self, loops: &[DimId], tiling: Option<Tiling>, roots: &[ExprId], inner: &mut dyn FnMut(&mut Self)) {
        let zero = self.integer(0);
        if let Some((dim, rest)) = loops.split_first() {
            let end = self.integer(self.nest.extents[usize::from(dim.0)] as i64);
            self.repeat(zero, end, 1, &mut |e, at| {
                e.index[usize::from(dim.0)] = Some(at);
                e.prepare_all(roots);
                e.around(rest, tiling, roots, inner);
            });
            self.index[usize::from(dim.0)] = None;
        } else if let Some(tiling) = tiling {
            let end = self.integer(self.nest.extents[usize::from(tiling.dim.0)] as i64);
            self.repeat(zero, end, tiling.length as i64, &mut |e, first| {
                e.open_tile(tiling, first);
                inner(e);
                e.tile = None;
            });
        } else {
            inner(self);
        }
    }

    /// Evaluates each value before an output is written that may share memory with what it reads.
    fn stores(&mut self, stmts: &[&Stmt]) {
        let mut waiting = Vec::new();
        for (i, stmt) in stmts.iter().enumerate() {
            let Stmt::Store { output, value, .. } = stmt else { continue };
            if self.reads_what_is_at(*output, stmts[i + 1..].iter().copied()) {
                waiting.push((stmt, self.kept(*value)));
            } else {
                self.store_directly(stmt);
            }
        }
        for (stmt, value) in waiting {
            self.store(stmt, value);
        }
    }

    /// A value that later writes to operands do not change.
    fn kept(&mut self, value: ExprId) -> Val {
        let found = self.eval(value);
        if let Place::Slot(_) = found.place {
            return found;
        }
        let copy = self.slot(found.ty, found.shape);
        let (to, from, zero) = (self.address(copy), self.address(found), self.integer(0));
        let count = self.count(found.shape);
        self.call(tiles::copy(self.isa, found.ty.bytes()), [to, from, zero, zero], count);
        copy
    }

    /// Emits `for i in (begin..end).step_by(step)` with a scope of its own.
    fn repeat(&mut self, begin: Value, end: Value, step: i64, body: &mut dyn FnMut(&mut Self, Value)) {
        let (header, inside, after) = (self.builder.create_block(), self.builder.create_block(), self.builder.create_block());
        let i = self.builder.append_block_param(header, types::I64);
        self.builder.ins().jump(header, &[begin.into()]);
        self.builder.switch_to_block(header);
        let more = self.builder.ins().icmp(IntCC::SignedLessThan, i, end);
        self.builder.ins().brif(more, inside, &[], after, &[]);
        self.builder.switch_to_block(inside);
        self.scopes.push(Scope { mark: self.used, ..Scope::default() });
        body(self, i);
        self.used = self.scopes.pop().expect("the scope just opened").mark;
        let next = self.builder.ins().iadd_imm_s(i, step);
        self.builder.ins().jump(header, &[next.into()]);
        self.builder.switch_to_block(after);
    }

    fn call(&mut self, primitive: Primitive, [to, a, b, c]: [Value; 4], count: Value) {
        let address = self.integer(primitive as usize as i64);
        self.builder.ins().call_indirect(self.signature, address, &[to, a, b, c, count]);
        self.calls += 1;
    }

    fn integer(&mut self, x: i64) -> Value {
        self.builder.ins().iconst(types::I64, x)
    }

    fn slot_address(&mut self, slot: usize) -> Value {
        self.builder.ins().iadd_imm_s(self.scratch, slot as i64)
    }

    fn address(&mut self, value: Val) -> Value {
        match value.place {
            Place::Slot(slot) => self.slot_address(slot),
            Place::Pointer(pointer) => pointer,
        }
    }

    /// Elements of a value of that shape.
    fn count(&mut self, shape: Shape) -> Value {
        match (shape, self.tile) {
            (Shape::Tile, Some(tile)) => tile.count,
            _ => self.integer(1),
        }
    }

    /// Takes so many bytes of the scratch; where they begin.
    fn reserve(&mut self, bytes: usize) -> usize {
        let at = self.used;
        self.used += bytes.next_multiple_of(64);
        self.peak = self.peak.max(self.used);
        at
    }

    /// A fresh place in the scratch.
    fn slot(&mut self, ty: Ty, shape: Shape) -> Val {
        let elements = match (shape, self.tile) {
            (Shape::Tile, Some(tile)) => tile.capacity,
            _ => 1,
        };
        let at = self.reserve(elements * ty.bytes());
        Val { place: Place::Slot(at), shape, ty, depth: self.scopes.len() }
    }

    fn write_constant(&mut self, to: Val, bits: u64) {
        let at = self.address(to);
        let bits = self.integer(bits as i64);
        self.builder.ins().store(MemFlagsData::trusted(), bits, at, 0);
    }

    /// A tile of a value, repeated if it is single.
    fn spread(&mut self, value: Val) -> Val {
        if value.shape == Shape::Tile || self.tile.is_none() {
            return value;
        }
        let tile = self.slot(value.ty, Shape::Tile);
        let (to, from, zero) = (self.address(tile), self.address(value), self.integer(0));
        let count = self.count(Shape::Tile);
        self.call(tiles::fill(self.isa, value.ty.bytes()), [to, from, zero, zero], count);
        tile
    }

    fn depends_on_tile(&self, expr: ExprId) -> bool {
        self.tile.is_some_and(|tile| self.typing.depends(expr) & tile.dims != 0)
    }

    /// Whether `expr` depends on all dims of the tile.
    fn is_whole(&self, expr: ExprId) -> bool {
        self.tile.is_some_and(|tile| self.typing.depends(expr) & tile.dims == tile.dims)
    }

    fn mode_of(stmt: &Stmt) -> StoreMode {
        if let Stmt::Store { mode, .. } = stmt { *mode } else { StoreMode::Assign }
    }

    fn combine(&mut self, op: BinaryOp, to: Val, a: Val, b: Val) {
        let shapes = if to.shape == Shape::Single { [Shape::Tile; 2] } else { [a.shape, b.shape] };
        let primitive = arithmetic::binary(self.isa, op, to.ty, shapes);
        let (d, x, y, zero) = (self.address(to), self.address(a), self.address(b), self.integer(0));
        let count = self.count(to.shape);
        self.call(primitive, [d, x, y, zero], count);
    }
}
