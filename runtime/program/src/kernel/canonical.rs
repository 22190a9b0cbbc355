//! The canonical form of a kernel: expressions in the order in which its statements first need them, equal ones once, none
//! unused. What the parser returns, so that the text need not carry the numbering of expressions.

use super::{Expr, ExprId, Index, Kernel, Stmt};
use crate::program::Program;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;

impl Kernel {
    /// The same kernel with its expressions in post-order of first use, equal ones shared.
    /// Panics if an expression's operand does not precede it (`check` refuses such kernels).
    pub fn canonical(&self) -> Kernel {
        let mut out = Kernel { exprs: Vec::new(), body: Vec::new(), ..self.clone() };
        let mut interner = Interner::default();
        let mut new_ids: Vec<Option<ExprId>> = vec![None; self.exprs.len()];
        for stmt in &self.body {
            let root = stmt.value();
            for id in self.post_order(root, |id| new_ids[id.0 as usize].is_some()) {
                let mut expr = self.get(id).clone();
                expr.for_each_operand_mut(|o| *o = new_ids[o.0 as usize].expect("operands precede users"));
                new_ids[id.0 as usize] = Some(interner.add(&mut out, expr));
            }
            let mut stmt = stmt.clone();
            *stmt.value_mut() = new_ids[root.0 as usize].expect("the root is in its own post-order");
            out.body.push(stmt);
        }
        out
    }

    /// What `root` needs and is not `done`, operands first.
    pub fn post_order(&self, root: ExprId, done: impl Fn(ExprId) -> bool) -> Vec<ExprId> {
        let mut out = Vec::new();
        let mut seen = vec![false; root.0 as usize + 1];
        let mut stack = vec![(root, false)];
        while let Some((id, operands_done)) = stack.pop() {
            if operands_done {
                out.push(id);
            } else if !done(id) && !std::mem::replace(&mut seen[id.0 as usize], true) {
                stack.push((id, true));
                let operands = self.get(id).operands();
                assert!(operands.iter().all(|&o| o < id), "operands precede users");
                stack.extend(operands.into_iter().rev().map(|o| (o, false)));
            }
        }
        out
    }
}

impl Program {
    /// The same program with canonical kernels: what `parse(&print(p))` returns.
    pub fn canonical(&self) -> Program {
        Program { kernels: self.kernels.iter().map(Kernel::canonical).collect(), ..self.clone() }
    }
}

/// Adds expressions to a kernel, each once.
#[derive(Default)]
pub(crate) struct Interner {
    ids: HashMap<Expr, ExprId>,
}

impl Interner {
    pub fn add(&mut self, kernel: &mut Kernel, expr: Expr) -> ExprId {
        *self.ids.entry(expr).or_insert_with_key(|expr| {
            kernel.exprs.push(expr.clone());
            ExprId(kernel.exprs.len() as u32 - 1)
        })
    }
}

impl Stmt {
    pub fn value(&self) -> ExprId {
        match self {
            Stmt::Let { value, .. } | Stmt::Reduce { value, .. } | Stmt::Store { value, .. } => *value,
        }
    }

    pub fn value_mut(&mut self) -> &mut ExprId {
        match self {
            Stmt::Let { value, .. } | Stmt::Reduce { value, .. } | Stmt::Store { value, .. } => value,
        }
    }
}

impl Expr {
    /// Expressions this one reads, in order; of a load, its computed indices.
    pub fn operands(&self) -> SmallVec<[ExprId; 4]> {
        match self {
            Expr::Load { index, .. } => {
                let computed = |i: &Index| if let Index::Expr(e) = i { Some(*e) } else { None };
                index.iter().filter_map(computed).collect()
            }
            Expr::Var(_) | Expr::Const { .. } | Expr::Position(_) => SmallVec::new(),
            Expr::Unary(_, a) | Expr::Cast(_, a) => smallvec![*a],
            Expr::Binary(_, a, b) | Expr::Compare(_, a, b) => smallvec![*a, *b],
            Expr::Select(a, b, c) => smallvec![*a, *b, *c],
            Expr::Uniform { seed, step, element, .. } => smallvec![*seed, *step, *element],
        }
    }

    pub fn for_each_operand_mut(&mut self, mut f: impl FnMut(&mut ExprId)) {
        match self {
            Expr::Load { index, .. } => {
                for i in index {
                    if let Index::Expr(e) = i {
                        f(e);
                    }
                }
            }
            Expr::Var(_) | Expr::Const { .. } | Expr::Position(_) => {}
            Expr::Unary(_, a) | Expr::Cast(_, a) => f(a),
            Expr::Binary(_, a, b) | Expr::Compare(_, a, b) => [a, b].into_iter().for_each(f),
            Expr::Select(a, b, c) => [a, b, c].into_iter().for_each(f),
            Expr::Uniform { seed, step, element, .. } => [seed, step, element].into_iter().for_each(f),
        }
    }
}
