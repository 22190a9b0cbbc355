//! Prints kernels. An expression that is used twice, or nests deeper than `MAX_NESTING`, is named on a line of its own
//! (`e0 = …`) before the statement that first needs it, so that the text grows with the kernel and nests little.

use crate::kernel::{BinaryOp, DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode};
use crate::types::DType;
use std::collections::HashMap;
use std::fmt::Write;

/// Levels of parentheses in one line.
const MAX_NESTING: u32 = 12;

pub(super) fn print(kernel: &Kernel, number: usize, out: &mut String) {
    let kernel = kernel.canonical();
    let argument = |prefix: char, i: usize, a: &crate::kernel::Argument| {
        format!("{prefix}{i}: {}[{}]", a.dtype.name(), vec!["_"; a.rank.into()].join(", "))
    };
    let inputs: Vec<String> = kernel.inputs.iter().enumerate().map(|(i, a)| argument('x', i, a)).collect();
    let outputs: Vec<String> = kernel.outputs.iter().enumerate().map(|(i, a)| argument('y', i, a)).collect();
    let outer: Vec<&str> = kernel.outer.iter().map(|&d| dim_name(&kernel, d)).collect();
    let (inputs, outputs) = (inputs.join(", "), outputs.join(", "));
    let _ = writeln!(
        out,
        "kernel fused.{number}({inputs}) -> ({outputs}) dims({}) outer({})",
        kernel.dims.join(", "),
        outer.join(", ")
    );
    let mut lines = Lines { named: named(&kernel), names: HashMap::new(), done: 0, kernel: &kernel };
    for stmt in &kernel.body {
        lines.stmt(stmt, out);
    }
}

fn dim_name(kernel: &Kernel, dim: DimId) -> &str {
    kernel.dims.get(dim.0 as usize).map_or("?", String::as_str)
}

/// Which expressions get a line of their own.
fn named(kernel: &Kernel) -> Vec<bool> {
    let mut uses = vec![0u32; kernel.exprs.len()];
    for expr in &kernel.exprs {
        expr.operands().iter().for_each(|o| uses[o.0 as usize] += 1);
    }
    kernel.body.iter().for_each(|stmt| uses[stmt.value().0 as usize] += 1);
    let mut depth = vec![0u32; kernel.exprs.len()];
    let mut named = vec![false; kernel.exprs.len()];
    for (i, expr) in kernel.exprs.iter().enumerate() {
        let nesting = |o: &ExprId| if named[o.0 as usize] { 0 } else { depth[o.0 as usize] };
        depth[i] = 1 + expr.operands().iter().map(nesting).max().unwrap_or(0);
        let is_leaf = matches!(expr, Expr::Var(_) | Expr::Const { .. } | Expr::Position(_) | Expr::Load { .. });
        named[i] = depth[i] >= MAX_NESTING || (uses[i] > 1 && !(is_leaf && depth[i] == 1));
    }
    named
}

struct Lines<'a> {
    kernel: &'a Kernel,
    named: Vec<bool>,
    names: HashMap<ExprId, usize>,
    /// Expressions below this one belong to earlier statements.
    done: u32,
}

impl Lines<'_> {
    fn stmt(&mut self, stmt: &Stmt, out: &mut String) {
        // In canonical order, what this statement is the first to need stands between the last one's value and its own.
        for id in (self.done..=stmt.value().0).map(ExprId).filter(|id| self.named[id.0 as usize]) {
            let _ = write!(out, "  e{} = ", self.names.len());
            self.expr(id, 0, out);
            out.push('\n');
            self.names.insert(id, self.names.len());
        }
        self.done = self.done.max(stmt.value().0 + 1);
        out.push_str("  ");
        match stmt {
            Stmt::Let { var, value } => {
                let _ = write!(out, "v{} = ", var.0);
                self.operand(*value, 0, out);
            }
            Stmt::Reduce { var, op, over, value } => {
                let _ = write!(out, "v{} = {} {}: ", var.0, op.name(), self.dims(over));
                self.operand(*value, 0, out);
            }
            Stmt::Store { output, over, index, value, mode } => {
                if !over.is_empty() {
                    let _ = write!(out, "for {}: ", self.dims(over));
                }
                let _ = write!(out, "y{output}[");
                self.index(index, out);
                out.push_str(if *mode == StoreMode::Assign { "] = " } else { "] += " });
                self.operand(*value, 0, out);
            }
        }
        out.push('\n');
    }

    fn dims(&self, dims: &[DimId]) -> String {
        dims.iter().map(|&d| dim_name(self.kernel, d)).collect::<Vec<_>>().join(", ")
    }

    /// `level`: 0 takes anything, 1 a product, 2 only what needs no parentheses.
    fn operand(&self, id: ExprId, level: u8, out: &mut String) {
        match self.names.get(&id) {
            Some(name) => {
                let _ = write!(out, "e{name}");
            }
            None => self.expr(id, level, out),
        }
    }

    fn expr(&self, id: ExprId, level: u8, out: &mut String) {
        match self.kernel.get(id) {
            Expr::Load { input, index, outside } => {
                let _ = write!(out, "x{input}[");
                self.index(index, out);
                out.push_str(if *outside == Outside::Zero { "]?" } else { "]" });
            }
            Expr::Var(var) => {
                let _ = write!(out, "v{}", var.0);
            }
            Expr::Const { dtype, bits } => out.push_str(&constant(*dtype, *bits)),
            Expr::Position(dim) => {
                let _ = write!(out, "position({})", dim_name(self.kernel, *dim));
            }
            Expr::Unary(op, a) => self.call(op.name(), &[*a], out),
            Expr::Binary(op, a, b) => self.binary(*op, *a, *b, level, out),
            Expr::Compare(op, a, b) => self.call(op.name(), &[*a, *b], out),
            Expr::Select(a, b, c) => self.call("select", &[*a, *b, *c], out),
            Expr::Cast(dtype, a) => self.call(dtype.name(), &[*a], out),
            Expr::Uniform { id, seed, step, element } => {
                self.call(&format!("uniform.{id}"), &[*seed, *step, *element], out);
            }
        }
    }

    fn call(&self, name: &str, operands: &[ExprId], out: &mut String) {
        out.push_str(name);
        for (i, &o) in operands.iter().enumerate() {
            out.push_str(if i == 0 { "(" } else { ", " });
            self.operand(o, 0, out);
        }
        out.push(')');
    }

    fn binary(&self, op: BinaryOp, a: ExprId, b: ExprId, level: u8, out: &mut String) {
        let (symbol, own) = match op {
            BinaryOp::Add => (" + ", 0),
            BinaryOp::Sub => (" - ", 0),
            BinaryOp::Mul => (" * ", 1),
            BinaryOp::Div => (" / ", 1),
            _ => return self.call(op.name(), &[a, b], out),
        };
        if own < level {
            out.push('(');
        }
        self.operand(a, own, out);
        out.push_str(symbol);
        self.operand(b, own + 1, out);
        if own < level {
            out.push(')');
        }
    }

    fn index(&self, index: &[Index], out: &mut String) {
        for (i, index) in index.iter().enumerate() {
            if i > 0 {
                out.push_str(", ");
            }
            match index {
                Index::Dim(dim) => out.push_str(dim_name(self.kernel, *dim)),
                Index::Affine { terms, offset } => self.affine(terms, *offset, out),
                Index::Expr(e) => {
                    out.push('{');
                    self.operand(*e, 0, out);
                    out.push('}');
                }
            }
        }
    }

    /// `2*i + 1*j - 3`: every coefficient is written, so that `1*i` differs from the plain dim `i`.
    fn affine(&self, terms: &[(DimId, i64)], offset: i64, out: &mut String) {
        let mut sign = "";
        for (dim, coefficient) in terms {
            let _ = write!(out, "{sign}{coefficient}*{}", dim_name(self.kernel, *dim));
            sign = " + ";
        }
        if terms.is_empty() {
            let _ = write!(out, "{offset}");
        } else if offset != 0 {
            let _ = write!(out, " {} {}", if offset < 0 { '-' } else { '+' }, offset.unsigned_abs());
        }
    }
}

/// `0.5:f32`, `-3:i64`; a float that decimal digits do not give back as its bits, `0x7ff8000000000001:f32`.
fn constant(dtype: DType, bits: u64) -> String {
    let value = f64::from_bits(bits);
    match dtype.is_float() {
        true if value.is_finite() => format!("{value:?}:{}", dtype.name()),
        true if value.is_infinite() => format!("{value}:{}", dtype.name()),
        true => format!("{bits:#018x}:{}", dtype.name()),
        false => format!("{}:{}", bits as i64, dtype.name()),
    }
}
