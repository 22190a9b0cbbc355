//! Variables that an output holds: computed right there, if nothing reads later what was there before.

use super::{Emitter, Place, Val};
use crate::library::vector::{Shape, convert};
use crate::tile::{children, computed, value_of};
use dcc_program::kernel::{Expr, ExprId, Outside, Stmt, StoreMode, VarId};
use std::collections::BTreeSet;

impl Emitter<'_, '_> {
    /// Defines the variable of statement `i`, in the output that holds it where that may be written at once.
    pub(super) fn define_as(&mut self, i: usize, var: VarId, value: ExprId) {
        let place = self.output_of(i, var, value);
        self.target = place.map(|(_, place)| (value, place));
        let found = self.eval(value);
        self.target = None;
        if let Some((output, place)) = place.filter(|(_, place)| place.place == found.place) {
            debug_assert!(place.shape == found.shape, "a tile's place is a tile's");
            self.placed.insert(var, output);
        }
        self.define(var, found);
    }

    /// Whether a store has nothing left to do.
    pub(super) fn is_placed(&self, stmt: &Stmt) -> bool {
        let Stmt::Store { output, value, .. } = stmt else { return false };
        match self.nest.kernel.get(*value) {
            Expr::Var(var) => self.placed.get(var) == Some(output),
            _ => false,
        }
    }

    /// An output that holds the variable, and where the current tile of it lies, if it may be written now.
    fn output_of(&mut self, i: usize, var: VarId, value: ExprId) -> Option<(u8, Val)> {
        let (nest, ty) = (self.nest, self.typing.ty(value));
        let whole = self.plan.column.is_some() && self.plan.behind.is_none() && self.is_whole(value) && !self.known(value);
        if !whole || !matches!(nest.kernel.get(value), Expr::Unary(..) | Expr::Binary(..) | Expr::Select(..)) {
            return None;
        }
        let later = &nest.kernel.body[i + 1..];
        let (output, index) = later.iter().find_map(|stmt| match stmt {
            Stmt::Store { output, index, over, value, mode: StoreMode::Assign } => {
                (over.is_empty() && *nest.kernel.get(*value) == Expr::Var(var)).then_some((*output, index))
            }
            _ => None,
        })?;
        let is_of = |stmt: &&Stmt| matches!(stmt, Stmt::Store { output: other, .. } if *other == output);
        if nest.kernel.body.iter().filter(is_of).count() != 1 {
            return None;
        }
        let array = &nest.outputs[usize::from(output)];
        let as_computed = convert::narrow(self.isa, array.dtype).is_none() && computed(array.dtype) == ty;
        if !as_computed || self.reads_what_is_at(output, later.iter()) {
            return None;
        }
        let walk = self.walk(array, index, Outside::Never, Shape::Tile);
        if walk.stride != 1 {
            return None;
        }
        let base = self.operand(nest.inputs.len() + usize::from(output));
        let pointer = self.at(base, walk.first, array.dtype.bytes() as usize);
        Some((output, Val { place: Place::Pointer(pointer), shape: Shape::Tile, ty, depth: self.scopes.len() }))
    }

    /// Whether statements load what may share memory with an output, other than through values that lie elsewhere.
    pub(super) fn reads_what_is_at<'s>(&self, output: u8, stmts: impl Iterator<Item = &'s Stmt>) -> bool {
        let kernel = &self.nest.kernel;
        let shares = |input: u8| self.nest.shared.as_ref().is_none_or(|shared| shared[usize::from(output)].contains(&input));
        let (mut open, mut seen): (Vec<ExprId>, BTreeSet<ExprId>) = (stmts.map(value_of).collect(), BTreeSet::new());
        while let Some(expr) = open.pop() {
            let in_scratch = self.remembered(expr).is_some_and(|value| matches!(value.place, Place::Slot(_)));
            if in_scratch || !seen.insert(expr) {
                continue;
            }
            match kernel.get(expr) {
                Expr::Load { input, .. } if shares(*input) => return true,
                Expr::Var(var) if !self.placed.contains_key(var) => open.extend(self.lies_in_an_operand(*var)),
                other => open.extend(children(other)),
            }
        }
        false
    }

    /// What a variable was defined as, if that was not copied.
    fn lies_in_an_operand(&self, var: VarId) -> Option<ExprId> {
        self.variable(var).filter(|value| matches!(value.place, Place::Pointer(_)))?;
        self.nest.kernel.body.iter().find_map(|stmt| match stmt {
            Stmt::Let { var: other, value } if *other == var => Some(*value),
            _ => None,
        })
    }
}
