//! Dtypes of a kernel's expressions, and what must hold for every kernel wherever it is used: ids in range, operands before
//! users, values defined before they are read, operands of fitting dtypes.

use super::*;
use std::collections::HashMap;

/// Dtypes of a well-formed kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dtypes {
    /// By expression; `None` for those that no statement needs.
    pub exprs: Vec<Option<DType>>,
    /// By `Let` or `Reduce` value.
    pub vars: HashMap<VarId, DType>,
}

impl Kernel {
    /// `Err` says what is malformed.
    pub fn dtypes(&self) -> Result<Dtypes, String> {
        for (i, expr) in self.exprs.iter().enumerate() {
            if let Some(o) = expr.operands().into_iter().find(|o| o.0 as usize >= i) {
                return Err(format!("expression {i} reads expression {}, which does not precede it", o.0));
            }
        }
        self.check_dims(&self.outer)?;
        let mut types = Dtypes { exprs: vec![None; self.exprs.len()], vars: HashMap::new() };
        for stmt in &self.body {
            let root = stmt.value();
            if root.0 as usize >= self.exprs.len() {
                return Err(format!("a statement reads expression {} of {}", root.0, self.exprs.len()));
            }
            for id in self.post_order(root, |id| types.exprs[id.0 as usize].is_some()) {
                types.exprs[id.0 as usize] = Some(self.dtype_of(id, &types)?);
            }
            let dtype = types.exprs[root.0 as usize].expect("the root is in its own post-order");
            self.check_stmt(stmt, dtype, &mut types)?;
        }
        Ok(types)
    }

    fn check_dims(&self, dims: &[DimId]) -> Result<(), String> {
        for (i, dim) in dims.iter().enumerate() {
            if dim.0 as usize >= self.dims.len() {
                return Err(format!("dim {} of {}", dim.0, self.dims.len()));
            }
            if dims[..i].contains(dim) {
                return Err(format!("dim {} is iterated twice", self.dims[dim.0 as usize]));
            }
        }
        Ok(())
    }

    fn check_index(&self, index: &[Index], rank: u8, what: &str) -> Result<(), String> {
        if index.len() != rank as usize {
            return Err(format!("{} indices for {what} of rank {rank}", index.len()));
        }
        let in_range = |d: &DimId| (d.0 as usize) < self.dims.len();
        let fits = index.iter().all(|i| match i {
            Index::Dim(d) => in_range(d),
            Index::Affine { terms, .. } => terms.iter().all(|(d, _)| in_range(d)),
            Index::Expr(_) => true,
        });
        if fits { Ok(()) } else { Err(format!("an index of {what} names a dim that the kernel has not")) }
    }

    fn check_stmt(&self, stmt: &Stmt, dtype: DType, types: &mut Dtypes) -> Result<(), String> {
        match stmt {
            Stmt::Let { var, .. } | Stmt::Reduce { var, .. } => {
                if let Stmt::Reduce { op, over, .. } = stmt {
                    self.check_dims(over)?;
                    if let Some(d) = over.iter().find(|d| self.outer.contains(d)) {
                        return Err(format!("v{} reduces over the outer dim {}", var.0, self.dims[d.0 as usize]));
                    }
                    if dtype == DType::Bool && matches!(op, Reduce::Sum | Reduce::Prod) {
                        return Err(format!("v{} is a {} of bool", var.0, op.name()));
                    }
                }
                if types.vars.insert(*var, dtype).is_some() {
                    return Err(format!("v{} is defined twice", var.0));
                }
            }
            Stmt::Store { output, over, index, mode, .. } => {
                self.check_dims(over)?;
                if let Some(d) = over.iter().find(|d| self.outer.contains(d)) {
                    return Err(format!("a store iterates the outer dim {}", self.dims[d.0 as usize]));
                }
                let Some(argument) = self.outputs.get(*output as usize) else {
                    return Err(format!("output y{output} of {}", self.outputs.len()));
                };
                self.check_index(index, argument.rank, &format!("y{output}"))?;
                if index.iter().any(|i| matches!(i, Index::Expr(_))) {
                    return Err(format!("y{output} is stored at a computed index"));
                }
                if dtype != argument.dtype {
                    return Err(format!("y{output} is {}, the value stored is {}", argument.dtype.name(), dtype.name()));
                }
                if dtype == DType::Bool && *mode == StoreMode::Accumulate {
                    return Err(format!("y{output} accumulates bool"));
                }
            }
        }
        Ok(())
    }

    fn dtype_of(&self, id: ExprId, types: &Dtypes) -> Result<DType, String> {
        let of = |id: &ExprId| types.exprs[id.0 as usize].expect("operands come first in a post-order");
        let same = |a: &ExprId, b: &ExprId, what: &str| match (of(a), of(b)) {
            (x, y) if x == y => Ok(x),
            (x, y) => Err(format!("{what} of {} and {}", x.name(), y.name())),
        };
        match self.get(id) {
            Expr::Load { input, index, .. } => {
                let Some(argument) = self.inputs.get(*input as usize) else {
                    return Err(format!("input x{input} of {}", self.inputs.len()));
                };
                self.check_index(index, argument.rank, &format!("x{input}"))?;
                for i in index {
                    if let Index::Expr(e) = i
                        && (of(e).is_float() || of(e) == DType::Bool)
                    {
                        return Err(format!("x{input} is indexed by {}", of(e).name()));
                    }
                }
                Ok(argument.dtype)
            }
            Expr::Var(v) => types.vars.get(v).copied().ok_or_else(|| format!("v{} is read before it is defined", v.0)),
            Expr::Const { dtype, .. } => Ok(*dtype),
            Expr::Position(d) if (d.0 as usize) < self.dims.len() => Ok(DType::I64),
            Expr::Position(d) => Err(format!("dim {} of {}", d.0, self.dims.len())),
            Expr::Unary(op, a) => unary(*op, of(a)),
            Expr::Binary(op, a, b) => binary(*op, same(a, b, op.name())?),
            Expr::Compare(op, a, b) => same(a, b, op.name()).map(|_| DType::Bool),
            Expr::Select(c, a, b) if of(c) == DType::Bool => same(a, b, "select"),
            Expr::Select(c, ..) => Err(format!("select by {}", of(c).name())),
            Expr::Cast(dtype, _) => Ok(*dtype),
            Expr::Uniform { seed, step, element, .. } => {
                match [seed, step, element].into_iter().find(|&e| of(e) != DType::I64) {
                    None => Ok(DType::F32),
                    Some(e) => Err(format!("uniform reads {} where i64 is due", of(e).name())),
                }
            }
        }
    }
}

fn unary(op: UnaryOp, a: DType) -> Result<DType, String> {
    let fits = match op {
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => a != DType::Bool,
        UnaryOp::Not => !a.is_float(),
        _ => a.is_float(),
    };
    match (fits, op) {
        (false, _) => Err(format!("{} of {}", op.name(), a.name())),
        (true, UnaryOp::IsNan | UnaryOp::IsInf) => Ok(DType::Bool),
        (true, _) => Ok(a),
    }
}

fn binary(op: BinaryOp, a: DType) -> Result<DType, String> {
    let fits = match op {
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !a.is_float(),
        BinaryOp::Max | BinaryOp::Min => true,
        BinaryOp::RoundStochastic => a == DType::F32,
        _ => a != DType::Bool,
    };
    if fits { Ok(a) } else { Err(format!("{} of {}", op.name(), a.name())) }
}
