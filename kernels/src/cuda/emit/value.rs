//! Expressions as C++.

use super::{Emitter, computed, stored};
use crate::library::vector::Ty;
use crate::tile::{Access, Array, bit, reachable};
use dcc_program::kernel::{BinaryOp, CompareOp, DimId, Expr, ExprId, Index, Outside, StoreMode, UnaryOp, VarId};
use dcc_program::types::DType;

impl Emitter<'_> {
    /// The name of `expr`'s value in the current scope.
    pub(super) fn eval(&mut self, expr: ExprId) -> String {
        if let Some(found) = self.remembered(expr) {
            return found;
        }
        let element = self.vector.map_or("", |_| " + v");
        let kept = self.kept.get(&expr).map(|kept| (kept.name.clone(), kept.filled));
        let place = kept.zip(self.keeping.as_ref()).map(|((name, filled), at)| (format!("{name}[{at}{element}]"), filled));
        let name = match &place {
            Some((place, true)) => place.clone(),
            _ => {
                let text = self.compute(expr);
                self.named(expr, text)
            }
        };
        if let Some((place, false)) = &place {
            self.line(format!("{place} = {name};"));
            self.kept.get_mut(&expr).expect("it was just found").filled = true;
        }
        self.scopes.last_mut().expect("a scope is open").values.insert(expr, name.clone());
        name
    }

    /// Gives a value a name, where it is more than one.
    fn named(&mut self, expr: ExprId, text: String) -> String {
        if matches!(self.nest.kernel.get(expr), Expr::Var(_) | Expr::Const { .. }) {
            return text;
        }
        let name = format!("e{}", expr.0);
        self.line(format!("const {} {name} = {text};", computed(self.typing.ty(expr))));
        name
    }

    pub(super) fn remembered(&self, expr: ExprId) -> Option<String> {
        self.scopes.iter().rev().find_map(|scope| scope.values.get(&expr)).cloned()
    }

    fn variable(&self, var: VarId) -> Option<String> {
        self.scopes.iter().rev().find_map(|scope| scope.vars.get(&var)).cloned()
    }

    /// Dims that have an index.
    pub(super) fn known(&self) -> u64 {
        (0..self.index.len()).filter(|d| self.index[*d].is_some()).fold(0, |all, d| all | bit(DimId(d as u8)))
    }

    /// Computes here the largest parts of `roots` that depend on `known` dims only.
    pub(super) fn prepare(&mut self, roots: &[ExprId], known: u64) {
        let mut stack = roots.to_vec();
        let mut seen = std::collections::BTreeSet::new();
        while let Some(id) = stack.pop() {
            let filled = self.kept.get(&id).is_some_and(|kept| kept.filled);
            if filled || !seen.insert(id) {
                continue;
            }
            if self.typing.depends(id) & !known == 0 && self.is_defined(id) {
                self.eval(id);
            } else {
                stack.extend(crate::tile::children(self.nest.kernel.get(id)));
            }
        }
    }

    fn is_defined(&self, expr: ExprId) -> bool {
        let is_there = |id: &ExprId| match self.nest.kernel.get(*id) {
            Expr::Var(var) => self.variable(*var).is_some(),
            _ => true,
        };
        reachable(&self.nest.kernel, &[expr]).iter().all(is_there)
    }

    fn compute(&mut self, expr: ExprId) -> String {
        let (ty, dtype) = (self.typing.ty(expr), self.typing.dtype(expr));
        match self.nest.kernel.get(expr).clone() {
            Expr::Load { input, index, outside } => self.load(expr, input, &index, outside),
            Expr::Var(var) => self.variable(var).expect("statements define variables before they are read"),
            Expr::Const { bits, .. } => literal(ty, bits),
            Expr::Position(dim) => self.global(dim, "long long"),
            Expr::Unary(op, x) => {
                let x = self.eval(x);
                wrapped(dtype, unary(op, self.typing.dtype(expr), &x))
            }
            Expr::Binary(op, x, y) => {
                let (x, y) = (self.eval(x), self.eval(y));
                wrapped(dtype, binary(op, ty, dtype, &x, &y))
            }
            Expr::Compare(op, x, y) => {
                let (x, y) = (self.eval(x), self.eval(y));
                format!("{x} {} {y}", comparison(op))
            }
            Expr::Select(c, x, y) => {
                let (c, x, y) = (self.eval(c), self.eval(x), self.eval(y));
                format!("{c} ? {x} : {y}")
            }
            Expr::Cast(to, x) => {
                let (from, value) = (self.typing.dtype(x), self.eval(x));
                if to == from { value } else { cast(self.typing.ty(x), to, &value) }
            }
            Expr::Uniform { id, seed, step, element } => {
                let (seed, step, element) = (self.eval(seed), self.eval(step), self.eval(element));
                format!("op::uniform({id}u, {seed}, {step}, {element})")
            }
        }
    }

    fn load(&mut self, expr: ExprId, input: u8, index: &[Index], outside: Outside) -> String {
        if let Some(pack) = self.packs.get(&expr) {
            return format!("widen({pack}.x[v])");
        }
        if let Some(place) = self.tiles.get(&expr) {
            return format!("widen({place})");
        }
        let nest = self.nest;
        let (at, inside) = self.place(&nest.inputs[usize::from(input)], index, outside);
        let load = format!("widen(x{input}[{at}])");
        match inside.is_empty() {
            true => load,
            false => format!("{} ? {load} : {}", inside.join(" && "), literal(self.typing.ty(expr), 0)),
        }
    }

    pub(super) fn store(&mut self, output: u8, index: &[Index], value: &str, mode: StoreMode) {
        let nest = self.nest;
        let array = &nest.outputs[usize::from(output)];
        let place = format!("y{output}[{}]", self.offset(array, index));
        let value = super::accumulated(mode, &place, value);
        self.line(format!("{place} = narrow<{}>({value});", stored(array.dtype)));
    }

    /// Element offset of an access that stays inside.
    pub(super) fn offset(&mut self, array: &Array, index: &[Index]) -> String {
        self.place(array, index, Outside::Never).0
    }

    /// Element offset of an access, and the conditions under which it is inside.
    fn place(&mut self, array: &Array, index: &[Index], outside: Outside) -> (String, Vec<String>) {
        let (mut terms, mut inside) = (Vec::new(), Vec::new());
        let i = self.index_type();
        for (k, (index, stride)) in index.iter().zip(Access::dense(array)).enumerate() {
            let (local, ty) = match index {
                Index::Dim(dim) => {
                    let local = self.local(*dim);
                    if local != "0" {
                        terms.push(scaled(&local, stride));
                    }
                    continue;
                }
                Index::Affine { terms, offset } => (self.affine(terms, *offset, array.offset[k]), i),
                Index::Expr(expr) => {
                    let value = self.eval(*expr);
                    (format!("{value} - {}", self.parameter(array.offset[k])), "long long")
                }
            };
            let name = self.name("at");
            self.line(format!("const {ty} {name} = {local};"));
            if matches!(index, Index::Expr(_)) || outside == Outside::Zero {
                inside.push(format!("{name} >= 0 && {name} < {}", array.valid[k]));
            }
            terms.push(scaled(&name, stride));
        }
        (if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }, inside)
    }

    /// The local index that an affine one comes to, in an operand dim that begins at parameter `own`.
    fn affine(&mut self, terms: &[(DimId, i64)], offset: i64, own: usize) -> String {
        let i = self.index_type();
        let mut sum = Vec::new();
        for (dim, times) in terms {
            let global = self.global(*dim, i);
            sum.push(if *times == 1 { global } else { format!("{times} * ({global})") });
        }
        if offset != 0 || sum.is_empty() {
            sum.push(offset.to_string());
        }
        format!("{} - ({i}){}", sum.join(" + "), self.parameter(own))
    }

    fn parameter(&mut self, number: usize) -> String {
        self.parameters.insert(number);
        format!("o{number}")
    }

    fn local(&self, dim: DimId) -> String {
        self.index[usize::from(dim.0)].clone().expect("a loop runs along the dim")
    }

    /// The global index of a dim's current point.
    fn global(&mut self, dim: DimId, ty: &str) -> String {
        let own = self.parameter(self.nest.offset[usize::from(dim.0)]);
        format!("{} + ({ty}){own}", self.local(dim))
    }
}

fn scaled(index: &str, stride: i64) -> String {
    if stride == 1 { index.to_owned() } else { format!("{index} * {stride}") }
}

/// A constant: f64 bits for floats, the integer else.
pub(super) fn literal(ty: Ty, bits: u64) -> String {
    let x = f64::from_bits(bits);
    let special = |x: f64| match (x.is_nan(), x.is_infinite(), x < 0.0) {
        (true, ..) => Some("not_a_number()"),
        (_, true, true) => Some("-infinity()"),
        (_, true, _) => Some("infinity()"),
        _ => None,
    };
    match ty {
        Ty::Bool => (bits != 0).to_string(),
        Ty::I64 if bits as i64 == i64::MIN => "(-9223372036854775807LL - 1)".to_owned(),
        Ty::I64 => format!("{}LL", bits as i64),
        Ty::F32 => special(f64::from(x as f32)).map_or_else(|| format!("{:?}f", x as f32), str::to_owned),
        Ty::F64 => special(x).map_or_else(|| format!("{x:?}"), |text| format!("(double){text}")),
    }
}

/// Integers wrap to their width, half floats round.
fn wrapped(dtype: DType, text: String) -> String {
    match dtype {
        DType::Bool | DType::I64 | DType::U64 | DType::F32 | DType::F64 => text,
        _ => format!("widen(narrow<{}>({text}))", stored(dtype)),
    }
}

fn unary(op: UnaryOp, dtype: DType, x: &str) -> String {
    match op {
        UnaryOp::Neg if dtype.is_float() => format!("-({x})"),
        UnaryOp::Not if dtype == DType::Bool => format!("!{x}"),
        UnaryOp::Not => format!("~{x}"),
        op => format!("op::{}({x})", op.name()),
    }
}

fn binary(op: BinaryOp, ty: Ty, dtype: DType, x: &str, y: &str) -> String {
    let infix = match op {
        BinaryOp::Div => "/",
        BinaryOp::And => "&",
        BinaryOp::Or => "|",
        BinaryOp::Xor => "^",
        _ => "",
    };
    let is_bitwise = matches!(op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor);
    let is_float = matches!(ty, Ty::F32 | Ty::F64);
    match (dtype, is_bitwise) {
        (DType::Bool, true) => format!("({x} {infix} {y}) != 0"),
        (_, true) => format!("{x} {infix} {y}"),
        _ if is_float && !infix.is_empty() => format!("{x} {infix} {y}"),
        _ => format!("op::{}({x}, {y})", op.name()),
    }
}

fn comparison(op: CompareOp) -> &'static str {
    match op {
        CompareOp::Eq => "==",
        CompareOp::Ne => "!=",
        CompareOp::Lt => "<",
        CompareOp::Le => "<=",
        CompareOp::Gt => ">",
        CompareOp::Ge => ">=",
    }
}

fn cast(from: Ty, to: DType, x: &str) -> String {
    let ty = crate::tile::computed(to);
    let converted = match (from, ty) {
        (from, ty) if from == ty => x.to_owned(),
        (_, Ty::Bool) => format!("{x} != 0"),
        (Ty::F32 | Ty::F64, Ty::I64) => format!("op::integer({x})"),
        (_, ty) => format!("({})({x})", computed(ty)),
    };
    wrapped(to, converted)
}
