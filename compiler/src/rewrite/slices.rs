//! Rules about slices and concatenations.

use super::movement::{operand, ty};
use super::term::{Expr, Graph, Term};
use crate::ops::movement::Dims;
use crate::ops::{Concatenate, Op, Slice, Transpose};
use dcc_program::Shape;
use egg::Id;

/// What is sliced after a transpose may be sliced before it.
pub fn slice_transpose(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Slice(slice)) = term.op() else { return Vec::new() };
    let below = |t: &Term| {
        let Some(Op::Transpose(op)) = t.op() else { return None };
        let mut inner = slice.clone();
        for (result, &from) in op.perm.iter().enumerate() {
            let from = usize::from(from);
            (inner.start[from], inner.limit[from]) = (slice.start[result], slice.limit[result]);
            inner.stride[from] = slice.stride[result];
        }
        Some(Expr::node(op.clone(), [Expr::node(inner, [Expr::Class(t.args[0])])]))
    };
    operand(egraph, term, 0).filter_map(below).collect()
}

/// Parts that are transposed alike are put together before.
pub fn concatenate_transposes(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Concatenate(op)) = term.op() else { return Vec::new() };
    let perm = |t: &Term| match t.op() {
        Some(Op::Transpose(transpose)) => Some(transpose.perm.clone()),
        _ => None,
    };
    let joined = |first: Dims| {
        let same = |i: usize| operand(egraph, term, i).find(|t| perm(t).as_ref() == Some(&first)).map(|t| t.args[0]);
        let parts: Vec<Expr> = (0..term.args.len()).map(|i| same(i).map(Expr::Class)).collect::<Option<_>>()?;
        let dim = first[usize::from(op.dim)];
        Some(Expr::node(Transpose { perm: first }, [Expr::node(Concatenate { dim }, parts)]))
    };
    operand(egraph, term, 0).filter_map(perm).filter_map(joined).collect()
}

pub fn slice_slice(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Slice(outer)) = term.op() else { return Vec::new() };
    if ty(egraph, term.args[0]).shape == term.ty.shape {
        return vec![Expr::Class(term.args[0])];
    }
    let merged = |t: &Term| {
        let Some(Op::Slice(inner)) = t.op() else { return None };
        let each = |f: &dyn Fn(usize) -> u64| -> Shape { (0..term.ty.rank()).map(f).collect() };
        let start = each(&|d| inner.start[d] + outer.start[d] * inner.stride[d]);
        let stride = each(&|d| inner.stride[d] * outer.stride[d]);
        let limit = each(&|d| match term.ty.shape[d] {
            0 => start[d],
            size => start[d] + (size - 1) * stride[d] + 1,
        });
        Some(Expr::node(Slice { start: start.clone(), limit, stride: stride.clone() }, [Expr::Class(t.args[0])]))
    };
    operand(egraph, term, 0).filter_map(merged).collect()
}

/// A slice that stays within one operand of a concatenation.
pub fn slice_concatenate(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Slice(slice)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for t in operand(egraph, term, 0) {
        let Some(Op::Concatenate(op)) = t.op() else { continue };
        let dim = usize::from(op.dim);
        let mut begin = 0;
        for &part in &t.args {
            let end = begin + ty(egraph, part).shape[dim];
            if slice.start[dim] >= begin && slice.limit[dim] <= end {
                let mut inner = slice.clone();
                (inner.start[dim], inner.limit[dim]) = (slice.start[dim] - begin, slice.limit[dim] - begin);
                found.push(Expr::node(inner, [Expr::Class(part)]));
            }
            begin = end;
        }
    }
    found
}

/// Neighbouring slices of one value, put together again.
pub fn concatenate_slices(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Concatenate(op)) = term.op() else { return Vec::new() };
    let dim = usize::from(op.dim);
    if let [only] = term.args[..] {
        return vec![Expr::Class(only)];
    }
    let mut whole = Vec::new();
    for first in operand(egraph, term, 0) {
        let Some(Op::Slice(start)) = first.op() else { continue };
        let (source, mut at) = (egraph.find(first.args[0]), start.limit[dim]);
        let continues = |i: usize, at: u64| {
            operand(egraph, term, i).find_map(|t| match t.op() {
                Some(Op::Slice(s)) if egraph.find(t.args[0]) == source && s.start[dim] == at => {
                    let alike = (0..s.start.len()).all(|d| {
                        s.stride[d] == 1 && (d == dim || (s.start[d], s.limit[d]) == (start.start[d], start.limit[d]))
                    });
                    alike.then_some(s.limit[dim])
                }
                _ => None,
            })
        };
        let complete = (1..term.args.len()).all(|i| continues(i, at).map(|end| at = end).is_some());
        if complete && start.stride.iter().all(|&s| s == 1) {
            let mut joined: Slice = start.clone();
            joined.limit[dim] = at;
            whole.push(Expr::node(joined, [Expr::Class(source)]));
        }
    }
    whole
}
