//! What expressions depend on and how loads and stores walk through memory.

use super::{Array, Nest};
use crate::library::vector::Ty;
use dcc_program::kernel::{BinaryOp, DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, UnaryOp, VarId};
use dcc_program::types::DType;
use std::collections::BTreeSet;

/// A set of loop dims, one bit each.
pub type Dims = u64;

pub fn bit(dim: DimId) -> Dims {
    1 << dim.0
}

pub fn bits(dims: &[DimId]) -> Dims {
    dims.iter().fold(0, |all, dim| all | bit(*dim))
}

/// Type and dependencies of every expression.
#[derive(Clone, Debug)]
pub struct Typing {
    pub dtypes: Vec<DType>,
    pub depends: Vec<Dims>,
}

impl Typing {
    pub fn new(kernel: &Kernel) -> Typing {
        let count = kernel.exprs.len();
        let mut known = Known { kernel, all: vec![None; count] };
        let all: Vec<(DType, Dims)> = (0..count).map(|i| known.of(ExprId(i as u32))).collect();
        Typing { dtypes: all.iter().map(|x| x.0).collect(), depends: all.iter().map(|x| x.1).collect() }
    }

    pub fn dtype(&self, expr: ExprId) -> DType {
        self.dtypes[expr.0 as usize]
    }

    pub fn ty(&self, expr: ExprId) -> Ty {
        computed(self.dtype(expr))
    }

    pub fn depends(&self, expr: ExprId) -> Dims {
        self.depends[expr.0 as usize]
    }
}

/// The type that values of a stored type are computed in.
pub fn computed(dtype: DType) -> Ty {
    match dtype {
        DType::Bool => Ty::Bool,
        DType::F16 | DType::BF16 | DType::F32 => Ty::F32,
        DType::F64 => Ty::F64,
        _ => Ty::I64,
    }
}

struct Known<'a> {
    kernel: &'a Kernel,
    all: Vec<Option<(DType, Dims)>>,
}

impl Known<'_> {
    fn of(&mut self, id: ExprId) -> (DType, Dims) {
        if let Some(known) = self.all[id.0 as usize] {
            return known;
        }
        let found = match self.kernel.get(id) {
            Expr::Load { input, index, .. } => {
                let depends = index.iter().fold(0, |all, index| all | self.of_index(index));
                (self.kernel.inputs[usize::from(*input)].dtype, depends)
            }
            Expr::Var(var) => self.of_var(*var),
            Expr::Const { dtype, .. } => (*dtype, 0),
            Expr::Position(dim) => (DType::I64, bit(*dim)),
            Expr::Unary(UnaryOp::IsNan | UnaryOp::IsInf, x) => (DType::Bool, self.of(*x).1),
            Expr::Unary(_, x) => self.of(*x),
            Expr::Binary(_, x, y) => (self.of(*x).0, self.of(*x).1 | self.of(*y).1),
            Expr::Compare(_, x, y) => (DType::Bool, self.of(*x).1 | self.of(*y).1),
            Expr::Select(c, x, y) => (self.of(*x).0, self.of(*c).1 | self.of(*x).1 | self.of(*y).1),
            Expr::Cast(dtype, x) => (*dtype, self.of(*x).1),
            Expr::Uniform { seed, step, element, .. } => {
                (DType::F32, self.of(*seed).1 | self.of(*step).1 | self.of(*element).1)
            }
        };
        self.all[id.0 as usize] = Some(found);
        found
    }

    fn of_index(&mut self, index: &Index) -> Dims {
        match index {
            Index::Dim(dim) => bit(*dim),
            Index::Affine { terms, .. } => terms.iter().fold(0, |all, term| all | bit(term.0)),
            Index::Expr(expr) => self.of(*expr).1,
        }
    }

    fn of_var(&mut self, var: VarId) -> (DType, Dims) {
        let defines = |stmt: &&Stmt| matches!(stmt, Stmt::Let { var: v, .. } | Stmt::Reduce { var: v, .. } if *v == var);
        match self.kernel.body.iter().find(defines).expect("check saw every variable defined") {
            Stmt::Let { value, .. } => self.of(*value),
            Stmt::Reduce { value, over, .. } => {
                let (dtype, depends) = self.of(*value);
                (dtype, depends & !bits(over))
            }
            Stmt::Store { .. } => unreachable!("stores define nothing"),
        }
    }
}

/// One load or store of an operand: how the element offset moves with each loop dim.
#[derive(Clone, Debug)]
pub struct Access {
    /// Elements per step of each loop dim, the computed indices left out.
    pub strides: Vec<i64>,
    /// Operand dims with a computed index.
    pub indirect: Vec<(usize, ExprId)>,
    /// Operand dims with an affine index that may leave the operand.
    pub checked: Vec<usize>,
}

impl Access {
    pub fn new(nest: &Nest, array: &Array, index: &[Index], outside: Outside) -> Access {
        let mut access = Access { strides: vec![0; nest.extents.len()], indirect: vec![], checked: vec![] };
        let mut stride = 1;
        for (k, index) in index.iter().enumerate().rev() {
            match index {
                Index::Dim(dim) => access.strides[usize::from(dim.0)] += stride,
                Index::Affine { terms, .. } => {
                    terms.iter().for_each(|(dim, times)| access.strides[usize::from(dim.0)] += times * stride);
                    if outside == Outside::Zero {
                        access.checked.push(k);
                    }
                }
                Index::Expr(expr) => access.indirect.push((k, *expr)),
            }
            stride *= array.block[k] as i64;
        }
        access
    }

    /// Element strides of the operand's dims.
    pub fn dense(array: &Array) -> Vec<i64> {
        let mut strides = vec![1; array.block.len()];
        for k in (1..array.block.len()).rev() {
            strides[k - 1] = strides[k] * array.block[k] as i64;
        }
        strides
    }
}

/// The loop dims that an index depends on.
pub fn dims_in(index: &Index, typing: &Typing) -> Dims {
    match index {
        Index::Dim(dim) => bit(*dim),
        Index::Affine { terms, .. } => terms.iter().fold(0, |all, term| all | bit(term.0)),
        Index::Expr(expr) => typing.depends(*expr),
    }
}

/// Whether an index that goes along `dim` step by step is shifted against it.
pub fn along(index: &Index, dim: DimId) -> Option<bool> {
    match index {
        Index::Dim(d) if *d == dim => Some(false),
        Index::Affine { terms, .. } if terms[..] == [(dim, 1)] => Some(true),
        _ => None,
    }
}

/// Direct operands of an expression.
pub fn children(expr: &Expr) -> Vec<ExprId> {
    match expr {
        Expr::Load { index, .. } => {
            index.iter().filter_map(|index| if let Index::Expr(e) = index { Some(*e) } else { None }).collect()
        }
        Expr::Var(_) | Expr::Const { .. } | Expr::Position(_) => vec![],
        Expr::Unary(_, x) | Expr::Cast(_, x) => vec![*x],
        Expr::Binary(_, x, y) | Expr::Compare(_, x, y) => vec![*x, *y],
        Expr::Select(c, x, y) => vec![*c, *x, *y],
        Expr::Uniform { seed, step, element, .. } => vec![*seed, *step, *element],
    }
}

/// All expressions that `roots` need, variables' definitions left out, operands before users.
pub fn reachable(kernel: &Kernel, roots: &[ExprId]) -> Vec<ExprId> {
    let mut seen = vec![false; kernel.exprs.len()];
    let mut stack = roots.to_vec();
    while let Some(id) = stack.pop() {
        if !std::mem::replace(&mut seen[id.0 as usize], true) {
            stack.extend(children(kernel.get(id)));
        }
    }
    (0..kernel.exprs.len()).filter(|i| seen[*i]).map(|i| ExprId(i as u32)).collect()
}

/// How many steps `expr` moves per step of `dim`, if it is an integer that moves evenly.
pub fn slope(kernel: &Kernel, typing: &Typing, expr: ExprId, dim: DimId) -> Option<i64> {
    if typing.depends(expr) & bit(dim) == 0 {
        return Some(0);
    }
    let constant = |id: ExprId| if let Expr::Const { bits, .. } = kernel.get(id) { Some(*bits as i64) } else { None };
    match kernel.get(expr) {
        Expr::Position(_) => Some(1),
        Expr::Binary(BinaryOp::Add, x, y) => Some(slope(kernel, typing, *x, dim)? + slope(kernel, typing, *y, dim)?),
        Expr::Binary(BinaryOp::Sub, x, y) => Some(slope(kernel, typing, *x, dim)? - slope(kernel, typing, *y, dim)?),
        Expr::Binary(BinaryOp::Mul, x, y) => match (constant(*x), constant(*y)) {
            (Some(times), _) => Some(slope(kernel, typing, *y, dim)? * times),
            (_, Some(times)) => Some(slope(kernel, typing, *x, dim)? * times),
            _ => None,
        },
        Expr::Cast(DType::I64, x) if typing.dtype(*x) == DType::I64 => slope(kernel, typing, *x, dim),
        _ => None,
    }
}

/// The value that a statement computes.
pub fn value_of(stmt: &Stmt) -> ExprId {
    match stmt {
        Stmt::Let { value, .. } | Stmt::Reduce { value, .. } | Stmt::Store { value, .. } => *value,
    }
}

/// The variable that a statement gives a value.
pub fn defines(stmt: &Stmt) -> Option<VarId> {
    match stmt {
        Stmt::Let { var, .. } | Stmt::Reduce { var, .. } => Some(*var),
        Stmt::Store { .. } => None,
    }
}

/// The statement's own dims.
pub fn over_of(stmt: &Stmt) -> &[DimId] {
    match stmt {
        Stmt::Let { .. } => &[],
        Stmt::Reduce { over, .. } | Stmt::Store { over, .. } => over,
    }
}

/// Statement `i` and those behind it that one pass over the same points can do: reductions and stores that need no result of a statement
/// from `i` on and that `joins` lets in by their loops. A store stays behind all loads that it stood behind, as it may write where they
/// read. Those that are `done` are in nobody's way.
pub fn pass_of(kernel: &Kernel, i: usize, joins: &dyn Fn(usize) -> bool, done: &dyn Fn(usize) -> bool) -> Vec<usize> {
    let of = |stmt: &Stmt| reachable(kernel, &[value_of(stmt)]);
    let mut pass = vec![i];
    let mut late: BTreeSet<VarId> = defines(&kernel.body[i]).into_iter().collect();
    let (mut loads, mut written) = (false, BTreeSet::new());
    for (j, stmt) in kernel.body.iter().enumerate().skip(i + 1).filter(|(j, _)| !done(*j)) {
        let waits = of(stmt).iter().any(|id| matches!(kernel.get(*id), Expr::Var(var) if late.contains(var)));
        let may = match stmt {
            Stmt::Let { .. } => false,
            Stmt::Reduce { .. } => true,
            Stmt::Store { output, .. } => !loads && !written.contains(output),
        };
        late.extend(defines(stmt));
        if may && !waits && joins(j) {
            pass.push(j);
            continue;
        }
        loads |= of(stmt).iter().any(|id| matches!(kernel.get(*id), Expr::Load { .. }));
        if let Stmt::Store { output, .. } = stmt {
            written.insert(*output);
        }
    }
    pass
}
