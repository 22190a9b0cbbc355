//! Values that a loop leaves in registers for later loops over the same points: as many as a thread has room for.
//!
//! The others are computed again where they are read. Where there is no room for all, loops that move much keep nothing and read nothing kept:
//! arrays in registers want unrolled loops, and those would have more loads under way than there are registers. What is loaded again is what
//! it was: a store stands behind all loads that it stood behind (`pass_of`), and a result may lie where an operand does only if no statement
//! behind its first store reads that one (`dcc_program::check`).

use super::super::mapping::{Loops, MOVED, moved};
use super::{Emitter, computed};
use crate::library::vector::Ty;
use crate::tile::{bit, children, dims_of, over_of, reachable, value_of};
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Stmt, UnaryOp};
use std::collections::BTreeSet;

/// 32-bit registers of a thread that hold such values between two loops.
const HELD: usize = 64;

/// A value that a later loop over the same points reads again: its array, and whether it is filled.
pub(super) struct Kept {
    pub name: String,
    pub filled: bool,
    /// Dims of its loops. A loop over others has other points.
    over: Vec<DimId>,
    /// Whether the loop at hand is the last to read it.
    ends: bool,
}

/// What a choice of values is about.
struct Later {
    /// What later loops compute, loop by loop.
    loops: Vec<Vec<ExprId>>,
    /// Dims that values depend on which can be kept.
    own: u64,
    /// Of each value.
    elements: usize,
}

impl Emitter<'_> {
    /// Forgets what the pass at hand does not read, before anything of it is written.
    pub(super) fn leave_kept(&mut self, loops: &Loops) {
        let over = over_of(&self.nest.kernel.body[self.passes[self.pass][0]]);
        self.kept.retain(|_, kept| kept.over == over && !kept.ends);
        if !self.mapping.keeps(loops.count) {
            return;
        }
        let later = self.later(loops);
        let registers = |ids: BTreeSet<ExprId>| ids.iter().map(|id| self.registers(*id, &later)).sum::<usize>();
        self.scarce |= registers(self.read_again(&later)) > HELD;
        if self.scarce && !self.is_short(loops) {
            self.kept.clear();
            self.apart.insert(self.pass);
        }
        if self.scarce {
            self.part_long(loops);
        }
    }

    /// Leaves alone the loops to come that are long even where all is kept that the loop before has.
    fn part_long(&mut self, loops: &Loops) {
        let body = &self.nest.kernel.body;
        let over = |n: usize| over_of(&body[self.passes[n][0]]);
        let alike: Vec<usize> = (self.pass..self.passes.len()).filter(|n| over(*n) == over(self.pass)).collect();
        let known = |n: usize| reachable(&self.nest.kernel, &self.values(n)).into_iter().collect();
        let long = alike.windows(2).filter(|pair| self.moved(pair[1], loops, &known(pair[0])) > MOVED).map(|pair| pair[1]);
        let long: Vec<usize> = long.collect();
        self.apart.extend(long);
    }

    /// Arrays for values of the pass at hand that later loops over the same dims read again, in place of others that were kept before.
    pub(super) fn declare_kept(&mut self, loops: &Loops) {
        if self.apart.contains(&self.pass) {
            return;
        }
        let later = self.later(loops);
        let chosen = self.with_room(self.read_again(&later), &later);
        let read = self.first_on_the_way(&self.values(self.pass), later.own, |id| self.kept.contains_key(&id));
        self.kept.retain(|id, kept| {
            kept.ends = !chosen.contains(id);
            !kept.ends || read.contains(id)
        });
        let over = over_of(&self.nest.kernel.body[self.passes[self.pass][0]]);
        for id in chosen {
            if !self.kept.contains_key(&id) {
                let (name, ty) = (self.name("kept"), computed(self.typing.ty(id)));
                self.line(format!("{ty} {name}[{}];", later.elements));
                self.kept.insert(id, Kept { name, filled: false, over: over.to_vec(), ends: false });
            }
        }
    }

    /// Whether all steps of the loop at hand may be under way at once.
    pub(super) fn is_short(&self, loops: &Loops) -> bool {
        self.moved(self.pass, loops, &self.kept.keys().copied().collect()) <= MOVED
    }

    /// Bytes that all steps of a thread move, where the values `known` are there.
    fn moved(&self, pass: usize, loops: &Loops, known: &BTreeSet<ExprId>) -> usize {
        let stmts: Vec<&Stmt> = self.passes[pass].iter().map(|j| &self.nest.kernel.body[*j]).collect();
        let bytes = moved(self.nest, self.typing, &stmts, &loops.dims, known);
        bytes * self.mapping.vector * self.mapping.trips(loops.count)
    }

    fn values(&self, pass: usize) -> Vec<ExprId> {
        self.passes[pass].iter().map(|j| value_of(&self.nest.kernel.body[*j])).collect()
    }

    /// The loops behind the one at hand that may read what it keeps.
    fn later(&self, loops: &Loops) -> Later {
        let over = |n: usize| over_of(&self.nest.kernel.body[self.passes[n][0]]);
        let readers = (self.pass + 1..self.passes.len()).filter(|n| over(*n) == over(self.pass) && !self.apart.contains(n));
        let last = *loops.dims.last().expect("a loop has dims");
        Later {
            loops: readers.map(|n| self.values(n)).collect(),
            own: if self.mapping.vector > 1 { bit(last) } else { dims_of(over(self.pass)) },
            elements: self.mapping.trips(loops.count) * self.mapping.vector,
        }
    }

    /// The first values on the way from later loops that the one at hand has too.
    fn read_again(&self, later: &Later) -> BTreeSet<ExprId> {
        let (mut here, mut stack) = (BTreeSet::new(), self.values(self.pass));
        while let Some(id) = stack.pop() {
            if !self.kept.contains_key(&id) && here.insert(id) {
                stack.extend(children(self.nest.kernel.get(id)));
            }
        }
        let is_trivial = |id| matches!(self.nest.kernel.get(id), Expr::Position(_) | Expr::Const { .. } | Expr::Var(_));
        let is_there = |id| self.kept.contains_key(&id) || here.contains(&id) && !is_trivial(id);
        self.first_on_the_way(&later.loops.concat(), later.own, is_there)
    }

    fn registers(&self, id: ExprId, later: &Later) -> usize {
        later.elements * if matches!(self.typing.ty(id), Ty::F64 | Ty::I64) { 2 } else { 1 }
    }

    /// On each way from `roots` to what they are made of, the first value at which `stop` holds; only those that depend on `own`.
    fn first_on_the_way(&self, roots: &[ExprId], own: u64, stop: impl Fn(ExprId) -> bool) -> BTreeSet<ExprId> {
        let (mut found, mut seen, mut stack) = (BTreeSet::new(), BTreeSet::new(), roots.to_vec());
        while let Some(id) = stack.pop() {
            if !seen.insert(id) || self.typing.depends(id) & own == 0 {
                continue;
            }
            match stop(id) {
                true => drop(found.insert(id)),
                false => stack.extend(children(self.nest.kernel.get(id))),
            }
        }
        found
    }

    /// Of `values`, as many as there are registers for: one after the other that which saves later loops most.
    fn with_room(&self, mut values: BTreeSet<ExprId>, later: &Later) -> BTreeSet<ExprId> {
        let needs = |id: &ExprId| self.registers(*id, later);
        if values.iter().map(needs).sum::<usize>() <= HELD {
            return values;
        }
        let (mut chosen, mut room) = (BTreeSet::new(), HELD);
        loop {
            values.retain(|id| needs(id) <= room);
            let before = self.cost_later(later, &chosen);
            let saved = |id: ExprId| {
                let with = chosen.iter().copied().chain([id]).collect();
                (before - self.cost_later(later, &with)) as f64 / needs(&id) as f64
            };
            let best = values.iter().map(|id| (saved(*id), *id)).max_by(|x, y| x.0.total_cmp(&y.0).then(y.1.cmp(&x.1)));
            let Some((_, best)) = best else { return chosen };
            room -= needs(&best);
            values.remove(&best);
            chosen.insert(best);
        }
    }

    /// What later loops do at a point, in additions, where `kept` is there.
    fn cost_later(&self, later: &Later, kept: &BTreeSet<ExprId>) -> u64 {
        let kernel = &self.nest.kernel;
        let mut all = 0;
        for values in &later.loops {
            let (mut seen, mut stack) = (vec![false; kernel.exprs.len()], values.clone());
            while let Some(id) = stack.pop() {
                let is_there = kept.contains(&id) || self.typing.depends(id) & later.own == 0;
                if !is_there && !std::mem::replace(&mut seen[id.0 as usize], true) {
                    all += cost(kernel.get(id));
                    stack.extend(children(kernel.get(id)));
                }
            }
        }
        all
    }

    /// Whether the pass at hand has values in arrays, whose indices must be known.
    pub(super) fn keeps_any(&self) -> bool {
        reachable(&self.nest.kernel, &self.values(self.pass)).iter().any(|id| self.kept.contains_key(id))
    }
}

/// Of one operation, in additions: loads come from a cache, most of them.
fn cost(expr: &Expr) -> u64 {
    match expr {
        Expr::Var(_) | Expr::Const { .. } | Expr::Position(_) => 0,
        Expr::Load { .. } => 16,
        Expr::Uniform { .. } => 80,
        Expr::Unary(UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Not | UnaryOp::IsNan | UnaryOp::IsInf, _) => 1,
        Expr::Unary(..) | Expr::Binary(BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow, ..) => 8,
        Expr::Binary(..) | Expr::Compare(..) | Expr::Select(..) | Expr::Cast(..) => 1,
    }
}
