//! What a pass adds to its totals and stores, in one loop in vector registers, where all of it is arithmetic on f32, and choices by how
//! values of that compare.
//!
//! Outputs may lie where inputs do, of which each point reads just the element that it writes: what a vector stores no later one loads.

use super::{Emitter, Total};
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Lane, Line, Pointer, is_arithmetic};
use crate::library::vector::Shape;
use crate::tile::{Access, Nest, Typing, children, over_of, reachable, value_of};
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value};
use cranelift_module::Module;
use dcc_program::kernel::{Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode};
use dcc_program::types::{DType, Reduce};
use std::collections::BTreeMap;

/// The values of a pass: what is computed in registers, operands first, and what that reads.
#[derive(Default)]
struct Values {
    computed: Vec<ExprId>,
    read: Vec<ExprId>,
}

/// Passes that one in registers must save.
const LEAST: usize = 3;

/// Whether lines compute a value from those that it reads.
fn is_computed(kernel: &Kernel, typing: &Typing, expr: ExprId) -> bool {
    let is_f32 = |of: &ExprId| typing.dtype(*of) == DType::F32;
    is_arithmetic(kernel.get(expr))
        && match kernel.get(expr) {
            Expr::Compare(_, x, y) => is_f32(x) && is_f32(y),
            _ => is_f32(&expr),
        }
}

/// Whether all that a kernel does is arithmetic and choices on f32, enough for a pass in registers.
pub fn all_in_registers(nest: &Nest, isa: Isa) -> bool {
    let kernel = &nest.kernel;
    let is_elementwise = |stmt: &Stmt| !matches!(stmt, Stmt::Reduce { .. }) && over_of(stmt).is_empty();
    let typing = Typing::new(kernel);
    let values = reachable(kernel, &kernel.body.iter().map(value_of).collect::<Vec<_>>());
    let lies_there = |expr: &Expr| matches!(expr, Expr::Load { .. } | Expr::Const { .. } | Expr::Var(_));
    let computed = values.iter().filter(|value| !lies_there(kernel.get(**value)));
    let tiles = kernel.inputs.iter().chain(&kernel.outputs);
    isa.has_lines()
        && tiles.into_iter().all(|tile| tile.dtype != DType::Bool || isa.has_avx512())
        && kernel.body.iter().all(is_elementwise)
        && values.iter().all(|value| matches!(typing.dtype(*value), DType::F32 | DType::Bool))
        && computed.clone().all(|value| is_computed(kernel, &typing, *value))
        && computed.count() >= LEAST
}

impl Emitter<'_, '_> {
    /// Adds to `totals` and writes `stores` as `fold` and `stores` do; false, with none added or written, where that does not go in registers
    /// or would save no pass.
    pub(super) fn in_registers(&mut self, totals: &[Total], stores: &[&Stmt]) -> bool {
        let in_one = self.plan.behind.is_none() || self.whole_tiles().is_some();
        let fits = self.isa.has_lines() && in_one && self.tile.is_some();
        if !fits || !totals.iter().all(|total| self.is_sum(total)) || !stores.iter().all(|stmt| self.is_plain(stmt)) {
            return false;
        }
        let stored = stores.iter().map(|stmt| value_of(stmt));
        let roots: Vec<ExprId> = totals.iter().map(|total| total.value).chain(stored).collect();
        let mut values = self.values(&roots);
        let is_ready = |root: &ExprId| values.computed.contains(root) || !self.is_function(*root);
        let passes = values.computed.len() + totals.len() + stores.len();
        if values.computed.is_empty()
            || passes < LEAST
            || !roots.iter().all(|root| self.depends_on_tile(*root) && is_ready(root))
        {
            return false;
        }
        // Functions first: what they need of this is then known, and may lie where its operands did.
        while let Some(function) = values.read.iter().copied().find(|read| self.is_function(*read)) {
            self.eval(function);
            values = self.values(&roots);
        }
        // What others need too, here or behind, stays in the scratch.
        let users = |expr: ExprId| {
            let inside = values.computed.iter().flat_map(|id| children(self.nest.kernel.get(*id)));
            inside.chain(roots.iter().copied()).filter(|user| *user == expr).count()
        };
        let kept: Vec<ExprId> =
            values.computed.iter().copied().filter(|expr| self.uses[expr.0 as usize] > users(*expr)).collect();
        let single_bool = |read: &ExprId| self.typing.dtype(*read) == DType::Bool && !self.depends_on_tile(*read);
        if values.read.iter().any(single_bool) {
            return false;
        }
        let line = self.line(&values, &kept, totals, stores);
        let Some(code) = line.code(self.isa) else { return false };
        let mut pointers: Vec<Value> = vec![];
        for read in &values.read {
            let value = self.eval(*read);
            let value = if self.depends_on_tile(*read) { self.spread(value) } else { value };
            pointers.push(self.address(value));
        }
        for expr in kept {
            let slot = self.slot(self.typing.ty(expr), Shape::Tile);
            self.remember(expr, slot);
            pointers.push(self.address(slot));
        }
        totals.iter().for_each(|total| {
            let at = self.address(total.total);
            pointers.push(at);
        });
        for stmt in stores {
            let at = self.output_at(stmt);
            pointers.push(at);
        }
        self.call_code(&code, &pointers);
        true
    }

    /// Whether a value along the tile, of which not all is arithmetic, is yet to be computed.
    fn is_function(&self, expr: ExprId) -> bool {
        let lies_there = matches!(self.nest.kernel.get(expr), Expr::Load { .. } | Expr::Var(_));
        self.depends_on_tile(expr) && !lies_there && !self.known(expr)
    }

    fn is_sum(&self, total: &Total) -> bool {
        total.op == Reduce::Sum
            && total.total.shape == Shape::Single
            && self.plan.column.is_none()
            && self.typing.dtype(total.value) == DType::F32
    }

    /// Whether a store assigns an output's neighbours, as they were computed.
    fn is_plain(&self, stmt: &Stmt) -> bool {
        let Stmt::Store { output, index, mode: StoreMode::Assign, .. } = stmt else { return false };
        let array = &self.nest.outputs[usize::from(*output)];
        let steps = index.iter().zip(Access::dense(array)).map(|(index, stride)| match index {
            Index::Dim(dim) => Some(if self.is_tile(*dim) { stride } else { 0 }),
            _ => None,
        });
        matches!(array.dtype, DType::F32 | DType::Bool) && steps.sum::<Option<i64>>() == Some(1)
    }

    /// What `roots` need that is not known: arithmetic, down to what it reads.
    fn values(&self, roots: &[ExprId]) -> Values {
        let mut values = Values::default();
        // An expression, and whether what it is computed from was visited.
        let mut open: Vec<(ExprId, bool)> = roots.iter().rev().map(|root| (*root, false)).collect();
        while let Some((expr, visited)) = open.pop() {
            if values.computed.contains(&expr) || values.read.contains(&expr) {
                continue;
            }
            if !self.is_arithmetic(expr) {
                values.read.push(expr);
            } else if visited {
                values.computed.push(expr);
            } else {
                open.push((expr, true));
                open.extend(children(self.nest.kernel.get(expr)).into_iter().rev().map(|child| (child, false)));
            }
        }
        values
    }

    fn is_arithmetic(&self, expr: ExprId) -> bool {
        // In a tile of two dims what depends on one of them is repeated.
        let along = if self.whole_tiles().is_some() { self.is_whole(expr) } else { self.depends_on_tile(expr) };
        let is_new = along && !self.known(expr) && !self.rows.contains_key(&expr);
        is_new && is_computed(&self.nest.kernel, self.typing, expr)
    }

    /// The pass over pointers to what is read, what is kept, the totals and the outputs, in this order.
    fn line(&self, values: &Values, kept: &[ExprId], totals: &[Total], stores: &[&Stmt]) -> Line {
        let (mut line, mut lanes): (Line, BTreeMap<ExprId, Lane>) = Default::default();
        for (n, read) in values.read.iter().enumerate() {
            let from = Pointer(n);
            let lane = match (self.depends_on_tile(*read), self.typing.dtype(*read)) {
                (true, DType::Bool) => line.load_mask(from),
                (true, _) => line.load(from),
                (false, _) => line.splat(from),
            };
            lanes.insert(*read, lane);
        }
        for expr in &values.computed {
            let lane = line.compute(self.nest.kernel.get(*expr), |read| lanes[&read]);
            lanes.insert(*expr, lane.expect("other values are read"));
        }
        let mut next = (values.read.len()..).map(Pointer);
        let store = |line: &mut Line, expr: &ExprId, to| match self.typing.dtype(*expr) {
            DType::Bool => line.store_mask(to, lanes[expr]),
            _ => line.store(to, lanes[expr]),
        };
        kept.iter().zip(next.by_ref()).for_each(|(expr, to)| store(&mut line, expr, to));
        totals.iter().zip(next.by_ref()).for_each(|(total, to)| line.sum(to, lanes[&total.value]));
        stores.iter().zip(next).for_each(|(stmt, to)| store(&mut line, &value_of(stmt), to));
        line
    }

    /// Where a store's part of its output begins.
    fn output_at(&mut self, stmt: &Stmt) -> Value {
        let Stmt::Store { output, index, .. } = stmt else { unreachable!("only stores have outputs") };
        let (nest, output) = (self.nest, usize::from(*output));
        let array = &nest.outputs[output];
        let walk = self.walk(array, index, Outside::Never, Shape::Tile);
        let base = self.operand(nest.inputs.len() + output);
        let pointer = self.at(base, walk.first, array.dtype.bytes() as usize);
        self.fetch_next(array, index, pointer);
        pointer
    }

    /// Calls code of its own, which takes a table of pointers.
    fn call_code(&mut self, code: &[u8], pointers: &[Value]) {
        let table = self.reserve(8 * pointers.len());
        let table = self.slot_address(table);
        for (n, pointer) in (0..).zip(pointers) {
            self.builder.ins().store(MemFlagsData::trusted(), *pointer, table, 8 * n);
        }
        let signature = self.builder.func.dfg.signatures[self.signature].clone();
        let function = self.module.declare_anonymous_function(&signature).expect("a function of its own");
        self.module.define_function_bytes(function, 16, code, &[]).expect("code without relocations");
        let function = self.module.declare_func_in_func(function, self.builder.func);
        // Memory for code comes in pieces, between which others may have mapped more than a near call reaches over.
        self.builder.func.dfg.ext_funcs[function].colocated = false;
        let (zero, count) = (self.integer(0), self.count(Shape::Tile));
        self.builder.ins().call(function, &[table, zero, zero, zero, count]);
        self.calls += 1;
    }
}
