//! The sharding rule of a fused kernel, from its index maps and its expressions.
//!
//! A loop dim takes size and axes from the operand dims that it indexes; all must agree. Of every expression the pass knows
//! which loop dims it depends on and over which axes it is still a partial result: a load passes its operand's on, a masked
//! load from a sharded dim makes one over that dim's axes, a reduction over a sharded dim too; sums, products with one
//! partial factor, selects and the like pass them on, everything else needs whole operands. An expression may not be
//! partial over an axis that also shards a dim it depends on, nor depend on two dims sharded over one axis.

use super::linear::{Pending, axis_set, pending_text, reduced};
use super::{Checked, Fault, refuse};
use crate::kernel::*;
use crate::mesh::{AxisId, Mesh};
use crate::program::Program;
use crate::types::{AxisList, Reduce, TensorType};
use std::collections::HashMap;

/// Size and axes of a loop dim.
#[derive(Clone, PartialEq)]
pub(super) struct Bound {
    pub size: u64,
    pub axes: AxisList,
}

/// What is known of an expression.
#[derive(Clone, Default)]
struct State {
    /// Loop dims it depends on, a bit each.
    dims: u64,
    pending: Pending,
    /// Always zero, so a partial sum over any axes.
    is_zero: bool,
}

struct Pass<'a> {
    mesh: &'a Mesh,
    kernel: &'a Kernel,
    inputs: &'a [&'a TensorType],
    dtypes: Dtypes,
    bounds: Vec<Bound>,
    states: Vec<Option<State>>,
    vars: HashMap<VarId, State>,
}

/// Refuses what the rule does not allow; gives the loop dims' sizes and axes.
pub(super) fn types(p: &Program, kernel: &Kernel, inputs: &[&TensorType], outputs: &[&TensorType]) -> Checked<Vec<Bound>> {
    let sides = kernel.inputs.iter().zip(inputs).chain(kernel.outputs.iter().zip(outputs));
    for (argument, ty) in sides {
        if argument.dtype != ty.dtype || argument.rank as usize != ty.rank() {
            let (dtype, rank, text) = (argument.dtype.name(), argument.rank, ty.text(&p.mesh));
            return refuse(Fault::Type, format!("the kernel takes {dtype} of rank {rank}, not {text}"));
        }
    }
    let dtypes = kernel.dtypes().map_err(|e| (Fault::Kernel, e))?;
    let bounds = bind(kernel, &dtypes, inputs, outputs, &p.mesh)?;
    let states = vec![None; kernel.exprs.len()];
    let mut pass = Pass { mesh: &p.mesh, kernel, inputs, dtypes, bounds, states, vars: HashMap::new() };
    for stmt in &kernel.body {
        let root = stmt.value();
        for id in kernel.post_order(root, |id| pass.states[id.0 as usize].is_some()) {
            let state = pass.expr(id)?;
            pass.consistent(&state)?;
            pass.states[id.0 as usize] = Some(state);
        }
        pass.stmt(stmt, outputs)?;
    }
    Ok(pass.bounds)
}

/// Sizes and axes of the loop dims.
fn bind(kernel: &Kernel, dtypes: &Dtypes, inputs: &[&TensorType], outputs: &[&TensorType], mesh: &Mesh) -> Checked<Vec<Bound>> {
    let mut bounds: Vec<Option<Bound>> = vec![None; kernel.dims.len()];
    let mut bind = |index: &[Index], ty: &TensorType| {
        for (i, (&size, axes)) in index.iter().zip(ty.shape.iter().zip(&ty.sharding.dims)) {
            let Index::Dim(d) = i else { continue };
            let bound = Bound { size, axes: axes.clone() };
            let slot = &mut bounds[d.0 as usize];
            if let Some(other) = slot.as_ref().filter(|b| **b != bound) {
                let text = |b: &Bound| b.axes.iter().fold(b.size.to_string(), |s, &a| s + "/" + mesh.name(a));
                let fault = if other.size != size { Fault::Type } else { Fault::Sharding };
                let name = &kernel.dims[d.0 as usize];
                return refuse(fault, format!("dim {name} of the kernel is {} and {}", text(other), text(&bound)));
            }
            *slot = Some(bound);
        }
        Ok(())
    };
    let needed = kernel.exprs.iter().zip(&dtypes.exprs).filter(|(_, dtype)| dtype.is_some());
    for (expr, _) in needed {
        if let Expr::Load { input, index, .. } = expr {
            bind(index, inputs[*input as usize])?;
        }
    }
    for stmt in &kernel.body {
        if let Stmt::Store { output, index, .. } = stmt {
            bind(index, outputs[*output as usize])?;
        }
    }
    let unbound = |d: usize| (Fault::Kernel, format!("dim {} of the kernel indexes no operand", kernel.dims[d]));
    bounds.into_iter().enumerate().map(|(d, b)| b.ok_or_else(|| unbound(d))).collect()
}

fn dim_bits(dims: impl IntoIterator<Item = DimId>) -> u64 {
    dims.into_iter().fold(0, |bits, d| bits | 1 << d.0)
}

impl Pass<'_> {
    fn axes(&self, dims: u64) -> impl Iterator<Item = AxisId> + '_ {
        let of = move |d: &usize| dims & (1 << d) != 0;
        (0..self.bounds.len()).filter(of).flat_map(|d| self.bounds[d].axes.iter().copied())
    }

    /// Ranks hold whole rows of what the expression depends on, none a diagonal, none a partial result of another's part.
    fn consistent(&self, state: &State) -> Checked<()> {
        let mut seen = 0u32;
        for axis in self.axes(state.dims) {
            if seen & axis_set([axis]) != 0 {
                let name = self.mesh.name(axis);
                return refuse(Fault::Sharding, format!("an expression depends on two dims sharded over {name}"));
            }
            seen |= axis_set([axis]);
        }
        let clash = state.pending.iter().find(|(a, _)| seen & axis_set([*a]) != 0);
        if let Some(&(axis, _)) = clash {
            let (text, name) = (pending_text(&state.pending, self.mesh), self.mesh.name(axis));
            return refuse(Fault::Pending, format!("a partial result ({text}) meets values sharded over {name}"));
        }
        if state.pending.iter().any(|(_, r)| *r != state.pending[0].1) {
            let text = pending_text(&state.pending, self.mesh);
            return refuse(Fault::Pending, format!("a result is partial in two ways ({text}), whose order would matter"));
        }
        Ok(())
    }

    fn state(&self, id: ExprId) -> &State {
        self.states[id.0 as usize].as_ref().expect("operands come first in a post-order")
    }

    /// The dims of all operands, none of them partial.
    fn whole(&self, operands: &[ExprId], what: &str) -> Checked<State> {
        let mut state = State::default();
        for &o in operands {
            let operand = self.state(o);
            if !operand.pending.is_empty() {
                let text = pending_text(&operand.pending, self.mesh);
                return refuse(Fault::Pending, format!("`{what}` reads a partial result ({text}) as whole"));
            }
            state.dims |= operand.dims;
        }
        Ok(state)
    }

    fn expr(&self, id: ExprId) -> Checked<State> {
        match self.kernel.get(id) {
            Expr::Load { input, index, outside } => self.load(*input as usize, index, *outside),
            Expr::Var(v) => self.vars.get(v).cloned().ok_or_else(|| (Fault::Kernel, format!("v{} is undefined", v.0))),
            Expr::Const { bits, dtype } => {
                let is_zero = *bits == 0 || (dtype.is_float() && f64::from_bits(*bits) == 0.0);
                Ok(State { is_zero, ..State::default() })
            }
            Expr::Position(d) => Ok(State { dims: dim_bits([*d]), ..State::default() }),
            Expr::Unary(op, a) => self.unary(*op, *a),
            Expr::Binary(op, a, b) => self.binary(*op, *a, *b),
            Expr::Compare(op, a, b) => self.whole(&[*a, *b], op.name()),
            Expr::Select(c, a, b) => {
                let condition = self.whole(&[*c], "select")?;
                let mut state = self.sum(*a, *b, "select")?;
                state.dims |= condition.dims;
                Ok(state)
            }
            Expr::Cast(to, a) => {
                let from = self.dtypes.exprs[a.0 as usize].unwrap_or(*to);
                let widens = from == *to || (from.is_float() && to.is_float() && from.bytes() < to.bytes());
                let state = self.state(*a).clone();
                if widens || state.is_zero { Ok(state) } else { self.whole(&[*a], "cast") }
            }
            Expr::Uniform { seed, step, element, .. } => self.whole(&[*seed, *step, *element], "uniform"),
        }
    }

    fn load(&self, input: usize, index: &[Index], outside: Outside) -> Checked<State> {
        let ty = self.inputs[input];
        let mut state = State { pending: ty.sharding.pending.to_vec(), ..State::default() };
        for (k, (i, axes)) in index.iter().zip(&ty.sharding.dims).enumerate() {
            match i {
                Index::Dim(d) => {
                    state.dims |= dim_bits([*d]);
                    continue;
                }
                Index::Affine { terms, .. } => state.dims |= dim_bits(terms.iter().map(|(d, _)| *d)),
                Index::Expr(e) => state.dims |= self.whole(&[*e], "an index")?.dims,
            }
            let text = || format!("dim {k} of x{input} ({})", ty.text(self.mesh));
            if outside == Outside::Zero {
                state.pending = reduced(state.pending, axes.iter().copied(), Reduce::Sum);
            } else if !axes.is_empty() {
                return refuse(Fault::Sharding, format!("{} is sharded, but the index may leave the shard", text()));
            } else if let Index::Affine { terms, offset } = i {
                let (low, high) = range(&self.bounds, terms, *offset);
                if low < 0 || high >= i128::from(ty.shape[k]) {
                    return refuse(Fault::Bounds, format!("{} is read at {low}..={high}", text()));
                }
            } else {
                return refuse(Fault::Bounds, format!("{} is read at a computed index that may lie outside", text()));
            }
        }
        Ok(state)
    }

    fn unary(&self, op: UnaryOp, a: ExprId) -> Checked<State> {
        let state = self.state(a).clone();
        let is_sum = state.pending.iter().all(|(_, r)| *r == Reduce::Sum);
        if op == UnaryOp::Neg && is_sum { Ok(state) } else { self.whole(&[a], op.name()) }
    }

    fn binary(&self, op: BinaryOp, a: ExprId, b: ExprId) -> Checked<State> {
        let (x, y) = (self.state(a), self.state(b));
        let is_sum = |s: &State| s.pending.iter().all(|(_, r)| *r == Reduce::Sum);
        let dims = x.dims | y.dims;
        match op {
            BinaryOp::Add | BinaryOp::Sub => self.sum(a, b, op.name()),
            BinaryOp::Mul if is_sum(x) && is_sum(y) => {
                if x.pending.iter().any(|p| y.pending.contains(p)) {
                    let text = pending_text(&x.pending, self.mesh);
                    return refuse(Fault::Pending, format!("`mul` multiplies two partial results ({text})"));
                }
                let pending = reduced(x.pending.clone(), y.pending.iter().map(|(a, _)| *a), Reduce::Sum);
                self.consistent(&State { dims, pending: pending.clone(), is_zero: false })?;
                Ok(State { dims, pending, is_zero: x.is_zero || y.is_zero })
            }
            BinaryOp::Div if is_sum(x) => {
                self.whole(&[b], "div")?;
                Ok(State { dims, pending: x.pending.clone(), is_zero: x.is_zero })
            }
            BinaryOp::Max | BinaryOp::Min if x.pending == y.pending => {
                let reduce = if op == BinaryOp::Max { Reduce::Max } else { Reduce::Min };
                if x.pending.iter().any(|(_, r)| *r != reduce) {
                    return self.whole(&[a, b], op.name());
                }
                Ok(State { dims, pending: x.pending.clone(), is_zero: false })
            }
            _ => self.whole(&[a, b], op.name()),
        }
    }

    /// Jointly linear: both partial over the same axes, or neither. A zero is a partial sum over any.
    fn sum(&self, a: ExprId, b: ExprId, what: &str) -> Checked<State> {
        let (x, y) = (self.state(a), self.state(b));
        let is_sum = |s: &State| s.pending.iter().all(|(_, r)| *r == Reduce::Sum);
        let dims = x.dims | y.dims;
        if (x.pending != y.pending && !x.is_zero && !y.is_zero) || !is_sum(x) || !is_sum(y) {
            let text = |s: &State| if s.pending.is_empty() { "whole".to_owned() } else { pending_text(&s.pending, self.mesh) };
            return refuse(Fault::Pending, format!("`{what}` of a value that is {} and one that is {}", text(x), text(y)));
        }
        let pending = if x.is_zero { y.pending.clone() } else { x.pending.clone() };
        Ok(State { dims, pending, is_zero: x.is_zero && y.is_zero })
    }

    fn stmt(&mut self, stmt: &Stmt, outputs: &[&TensorType]) -> Checked<()> {
        let mut state = self.state(stmt.value()).clone();
        let outer = dim_bits(self.kernel.outer.iter().copied());
        let scope = |over: &[DimId]| outer | dim_bits(over.iter().copied());
        let within =
            |dims: u64, scope: u64| match self.kernel.dims.iter().enumerate().find(|(d, _)| dims & !scope & (1 << d) != 0) {
                Some((_, name)) => {
                    refuse(Fault::Kernel, format!("a statement depends on dim {name}, which it does not iterate"))
                }
                None => Ok(()),
            };
        match stmt {
            Stmt::Let { var, .. } => {
                within(state.dims, outer)?;
                self.vars.insert(*var, state);
            }
            Stmt::Reduce { var, op, over, .. } => {
                within(state.dims, scope(over))?;
                if !state.is_zero && state.pending.iter().any(|(_, r)| r != op) {
                    let text = pending_text(&state.pending, self.mesh);
                    return refuse(Fault::Pending, format!("`{}` over a partial result ({text})", op.name()));
                }
                let inner = dim_bits(over.iter().copied());
                state.dims |= inner;
                self.consistent(&state)?;
                state.pending = reduced(state.pending, self.axes(inner).collect::<Vec<_>>(), *op);
                state.dims &= !inner;
                state.is_zero &= *op == Reduce::Sum;
                self.consistent(&state)?;
                self.vars.insert(*var, state);
            }
            Stmt::Store { output, over, .. } => {
                within(state.dims, scope(over))?;
                state.dims = scope(over);
                self.consistent(&state)?;
                self.stored(&state, outputs[*output as usize])?;
            }
        }
        Ok(())
    }

    fn stored(&self, state: &State, ty: &TensorType) -> Checked<()> {
        let declared = &ty.sharding.pending[..];
        if state.is_zero && declared.iter().all(|(_, r)| *r == Reduce::Sum) || state.pending == declared {
            return Ok(());
        }
        let (is, says) = (pending_text(&state.pending, self.mesh), ty.text(self.mesh));
        match (state.pending.is_empty(), declared.is_empty()) {
            (false, true) => refuse(Fault::Pending, format!("the value stored is a partial result ({is}), declared as {says}")),
            (true, _) => refuse(Fault::Declared, format!("the value stored is whole, declared as {says}")),
            _ => refuse(Fault::Declared, format!("the value stored is partial ({is}), declared as {says}")),
        }
    }
}

/// Least and greatest value of an affine index over the whole of its dims.
pub(super) fn range(bounds: &[Bound], terms: &[(DimId, i64)], offset: i64) -> (i128, i128) {
    terms.iter().fold((offset.into(), offset.into()), |(low, high), &(d, c)| {
        let reach = i128::from(c) * (i128::from(bounds[d.0 as usize].size) - 1);
        (low + reach.min(0), high + reach.max(0))
    })
}
