//! Loop nests with fewer, longer loops.

use super::access::{Typing, bit, bits, children, over_of, value_of};
use super::{Array, Nest};
use crate::library::vector::Ty;
use dcc_program::DType;
use dcc_program::kernel::{DimId, Expr, ExprId, Index, Kernel, Stmt, StoreMode, VarId};
use std::collections::BTreeMap;

/// Stores over inner dims of their own, without reductions beside them, become elementwise statements over outer dims.
pub fn promote(nest: &mut Nest) {
    let body = &mut nest.kernel.body;
    let mut dims: Option<Vec<DimId>> = None;
    for stmt in body.iter() {
        match stmt {
            Stmt::Reduce { .. } => return,
            Stmt::Let { .. } => {}
            Stmt::Store { over, .. } => match &dims {
                Some(other) if bits(other) != bits(over) => return,
                _ => dims = Some(over.clone()),
            },
        }
    }
    nest.kernel.outer.extend(dims.unwrap_or_default());
    for stmt in body {
        if let Stmt::Store { over, .. } = stmt {
            over.clear();
        }
    }
}

/// Variables of elementwise statements become what they stand for, and are no statements any more; what several read stays one expression.
pub fn inline(nest: &mut Nest) {
    let (mut made, mut vars, mut body) = (Made::default(), BTreeMap::new(), Vec::new());
    for mut stmt in std::mem::take(&mut nest.kernel.body) {
        let value = made.copy(&nest.kernel, stmt.value(), &vars);
        if let Stmt::Let { var, .. } = stmt {
            vars.insert(var, value);
            continue;
        }
        *stmt.value_mut() = value;
        body.push(stmt);
    }
    nest.kernel.body = body;
    nest.kernel.exprs = made.exprs;
}

/// Expressions without variables.
#[derive(Default)]
struct Made {
    exprs: Vec<Expr>,
    /// Those of a kernel with variables that are there already.
    known: BTreeMap<ExprId, ExprId>,
    ids: BTreeMap<Expr, ExprId>,
}

impl Made {
    fn copy(&mut self, kernel: &Kernel, root: ExprId, vars: &BTreeMap<VarId, ExprId>) -> ExprId {
        let mut open = vec![root];
        while let Some(&id) = open.last() {
            let expr = kernel.get(id);
            let missing = children(expr).into_iter().filter(|child| !self.known.contains_key(child));
            let before = open.len();
            open.extend(missing);
            if open.len() > before {
                continue;
            }
            open.pop();
            let copy = match expr {
                Expr::Var(var) => vars[var],
                expr => {
                    let mut expr = expr.clone();
                    expr.for_each_operand_mut(|child| *child = self.known[child]);
                    *self.ids.entry(expr).or_insert_with_key(|expr| {
                        self.exprs.push(expr.clone());
                        ExprId(self.exprs.len() as u32 - 1)
                    })
                }
            };
            self.known.insert(id, copy);
        }
        self.known[&root]
    }
}

/// Leaves casts to the half type of an output to the stores, which round by themselves: the value need not be rounded and widened again.
pub fn round_once(nest: &mut Nest) {
    let typing = Typing::new(&nest.kernel);
    // What a cast to `half` reads, if that is computed in f32.
    let narrowed = |nest: &Nest, value: ExprId, half: DType| match nest.kernel.get(value) {
        Expr::Cast(dtype, x) if *dtype == half && typing.ty(*x) == Ty::F32 => Some(*x),
        _ => None,
    };
    for at in 0..nest.kernel.body.len() {
        let Stmt::Store { output, value, mode: StoreMode::Assign, .. } = &nest.kernel.body[at] else { continue };
        let (value, half) = (*value, nest.outputs[usize::from(*output)].dtype);
        if !matches!(half, DType::F16 | DType::BF16) {
            continue;
        }
        if let Some(x) = narrowed(nest, value, half) {
            let Stmt::Store { value, .. } = &mut nest.kernel.body[at] else { continue };
            *value = x;
        } else if let Expr::Var(var) = *nest.kernel.get(value)
            && is_stored_only(nest, var, half)
        {
            let defines = |stmt: &Stmt| matches!(stmt, Stmt::Let { var: other, .. } if *other == var);
            let Some(place) = nest.kernel.body.iter().position(defines) else { continue };
            // Of another variable there is no copy: stores would share it.
            let x = narrowed(nest, value_of(&nest.kernel.body[place]), half);
            let x = x.filter(|x| !matches!(nest.kernel.get(*x), Expr::Var(_)));
            if let (Some(x), Stmt::Let { value, .. }) = (x, &mut nest.kernel.body[place]) {
                *value = x;
            }
        }
    }
}

/// Whether all that reads `var` are stores to outputs of `half`.
fn is_stored_only(nest: &Nest, var: VarId, half: DType) -> bool {
    let kernel = &nest.kernel;
    let is_var = |id: &ExprId| *kernel.get(*id) == Expr::Var(var);
    let stored = |stmt: &Stmt| match stmt {
        Stmt::Store { output, mode, .. } => *mode == StoreMode::Assign && nest.outputs[usize::from(*output)].dtype == half,
        _ => false,
    };
    kernel.exprs.iter().all(|expr| !children(expr).iter().any(is_var))
        && kernel.body.iter().filter(|stmt| is_var(&value_of(stmt))).all(stored)
}

/// Merges one pair of dims that every operand holds as one; false if there is none.
pub fn merge_one(nest: &mut Nest) -> bool {
    let count = nest.extents.len() as u8;
    for major in (0..count).map(DimId) {
        for minor in (0..count).map(DimId) {
            if major != minor && mergeable(nest, major, minor) {
                merge(nest, major, minor);
                return true;
            }
        }
    }
    false
}

fn mergeable(nest: &Nest, major: DimId, minor: DimId) -> bool {
    let pair = bit(major) | bit(minor);
    let together = |dims: &[DimId]| matches!(bits(dims) & pair, 0) || bits(dims) & pair == pair;
    let outer = bits(&nest.kernel.outer);
    let used =
        outer & pair == pair || (outer & pair == 0 && nest.kernel.body.iter().any(|stmt| bits(over_of(stmt)) & pair == pair));
    used && together(&nest.kernel.outer)
        && nest.kernel.body.iter().all(|stmt| together(over_of(stmt)))
        && nest.kernel.exprs.iter().all(|expr| !matches!(expr, Expr::Position(dim) if *dim == major || *dim == minor))
        && operands(nest).iter().all(|(array, accesses)| {
            let places: Vec<_> = accesses.iter().map(|index| place(array, index, major, minor, nest)).collect();
            places.iter().all(|p| p.is_ok()) && places.windows(2).all(|two| two[0] == two[1])
        })
}

/// The operand dim that holds `major` with `minor` behind it, `Ok(None)` if the access has neither.
fn place(array: &Array, index: &[Index], major: DimId, minor: DimId, nest: &Nest) -> Result<Option<usize>, ()> {
    let uses = |index: &Index, dim: DimId| match index {
        Index::Dim(d) => *d == dim,
        Index::Affine { terms, .. } => terms.iter().any(|term| term.0 == dim),
        Index::Expr(_) => false,
    };
    let count = |dim| index.iter().filter(|i| uses(i, dim)).count();
    match (count(major), count(minor)) {
        (0, 0) => Ok(None),
        (1, 1) => {
            let at = index.iter().position(|i| *i == Index::Dim(major)).ok_or(())?;
            let dense = array.block.get(at + 1) == Some(&nest.extents[usize::from(minor.0)]);
            if index.get(at + 1) == Some(&Index::Dim(minor)) && dense { Ok(Some(at)) } else { Err(()) }
        }
        _ => Err(()),
    }
}

/// Every operand with all its index lists.
fn operands(nest: &Nest) -> Vec<(&Array, Vec<&Vec<Index>>)> {
    let mut all: Vec<_> = nest.inputs.iter().chain(&nest.outputs).map(|array| (array, vec![])).collect();
    for expr in &nest.kernel.exprs {
        if let Expr::Load { input, index, .. } = expr {
            all[usize::from(*input)].1.push(index);
        }
    }
    for stmt in &nest.kernel.body {
        if let Stmt::Store { output, index, .. } = stmt {
            all[nest.inputs.len() + usize::from(*output)].1.push(index);
        }
    }
    all
}

fn merge(nest: &mut Nest, major: DimId, minor: DimId) {
    let places: Vec<Option<usize>> = operands(nest)
        .iter()
        .map(|(array, accesses)| accesses.first().and_then(|index| place(array, index, major, minor, nest).ok().flatten()))
        .collect();
    nest.extents[usize::from(major.0)] *= nest.extents[usize::from(minor.0)];
    nest.extents[usize::from(minor.0)] = 1;
    let inputs = nest.inputs.len();
    for (array, place) in nest.inputs.iter_mut().chain(&mut nest.outputs).zip(&places) {
        let Some(at) = *place else { continue };
        array.block[at] *= array.block.remove(at + 1);
        array.valid[at] *= array.valid.remove(at + 1);
        array.offset.remove(at + 1);
    }
    let shorten = |index: &mut Vec<Index>| index.retain(|i| *i != Index::Dim(minor));
    for expr in &mut nest.kernel.exprs {
        if let Expr::Load { input, index, .. } = expr
            && places[usize::from(*input)].is_some()
        {
            shorten(index);
        }
    }
    nest.kernel.outer.retain(|dim| *dim != minor);
    for stmt in &mut nest.kernel.body {
        match stmt {
            Stmt::Store { output, index, over, .. } => {
                over.retain(|dim| *dim != minor);
                if places[inputs + usize::from(*output)].is_some() {
                    shorten(index);
                }
            }
            Stmt::Reduce { over, .. } => over.retain(|dim| *dim != minor),
            Stmt::Let { .. } => {}
        }
    }
}
