//! Rules about dims: reshapes, transposes, broadcasts, slices, reductions, casts.

use super::term::{Expr, Graph, Term};
use crate::ops::movement::Dims;
use crate::ops::{Binary, BroadcastInDim, Cast, Compare, Const, Op, Reduce, Reshape, Transpose, Unary};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce as Reduction, Shape, TensorType};
use egg::Id;

/// The terms of the class of an operand.
pub fn operand<'a>(egraph: &'a Graph, term: &Term, i: usize) -> impl Iterator<Item = &'a Term> + use<'a> {
    let id = term.args[i];
    egraph[id].nodes.iter()
}

pub fn ty(egraph: &Graph, id: Id) -> &TensorType {
    &egraph[id].data.ty
}

/// `cast(cast x)` where the first cast loses nothing, and casts to the dtype that is there.
pub fn cast_cast(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Cast(to)) = term.op() else { return Vec::new() };
    if ty(egraph, term.args[0]).dtype == to.dtype {
        return vec![Expr::Class(term.args[0])];
    }
    let inner = operand(egraph, term, 0).filter(|t| matches!(t.op(), Some(Op::Cast(_))));
    let exact = |t: &&Term| holds(t.ty.dtype, ty(egraph, t.args[0]).dtype);
    let direct = |t: &Term| Expr::node(Cast { dtype: to.dtype }, [Expr::Class(t.args[0])]);
    inner.filter(exact).map(direct).collect()
}

/// Whether every value of `narrow` is one of `wide`.
fn holds(wide: DType, narrow: DType) -> bool {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32};
    match wide {
        F64 => matches!(narrow, F64 | F32 | F16 | BF16 | Bool | U8 | I8 | U16 | I16 | U32 | I32),
        F32 => matches!(narrow, F32 | F16 | BF16 | Bool | U8 | I8 | U16 | I16),
        I64 => matches!(narrow, I64 | I32 | I16 | I8 | U32 | U16 | U8 | Bool),
        I32 => matches!(narrow, I32 | I16 | I8 | U16 | U8 | Bool),
        _ => narrow == wide || narrow == Bool,
    }
}

/// `(select c a b) op z` of numbers: `c`, not `c`, or known.
pub fn compare_select(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Compare(Compare { op })) = term.op() else { return Vec::new() };
    let number = |id: Id| egraph[id].data.splat.as_ref().map(Const::value);
    let mut found = Vec::new();
    for (side, other) in [(0, 1), (1, 0)] {
        let Some(z) = number(term.args[other]) else { continue };
        for select in operand(egraph, term, side).filter(|t| matches!(t.op(), Some(Op::Select(_)))) {
            let (Some(a), Some(b)) = (number(select.args[1]), number(select.args[2])) else { continue };
            let holds = |x: f64| if side == 0 { op.holds(x, z) } else { op.holds(z, x) };
            let condition = Expr::Class(select.args[0]);
            found.push(match (holds(a), holds(b)) {
                (true, false) => condition,
                (false, true) => Expr::node(Unary { op: UnaryOp::Not }, [condition]),
                (known, _) => Expr::Splat(Const::int(DType::Bool, i64::from(known)), term.ty.clone()),
            });
        }
    }
    found
}

trait Holds {
    fn holds(self, a: f64, b: f64) -> bool;
}

impl Holds for CompareOp {
    fn holds(self, a: f64, b: f64) -> bool {
        match self {
            CompareOp::Eq => a == b,
            CompareOp::Ne => a != b,
            CompareOp::Lt => a < b,
            CompareOp::Le => a <= b,
            CompareOp::Gt => a > b,
            CompareOp::Ge => a >= b,
        }
    }
}

/// `not (a < b)` of integers, and `not (a == b)`.
pub fn not_compare(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Unary(Unary { op: UnaryOp::Not })) = term.op() else { return Vec::new() };
    if term.ty.dtype != DType::Bool {
        return Vec::new();
    }
    let opposite = |t: &Term| {
        let Some(Op::Compare(Compare { op })) = t.op() else { return None };
        let ordered = !ty(egraph, t.args[0]).dtype.is_float();
        let op = match op {
            CompareOp::Eq => CompareOp::Ne,
            CompareOp::Ne => CompareOp::Eq,
            CompareOp::Lt if ordered => CompareOp::Ge,
            CompareOp::Ge if ordered => CompareOp::Lt,
            CompareOp::Le if ordered => CompareOp::Gt,
            CompareOp::Gt if ordered => CompareOp::Le,
            _ => return None,
        };
        Some(Expr::node(Compare { op }, t.args.iter().map(|&id| Expr::Class(id))))
    };
    operand(egraph, term, 0).filter_map(opposite).collect()
}

pub fn reshape_reshape(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Reshape(to)) = term.op() else { return Vec::new() };
    let direct = |from: Id| Expr::Class(from).reshaped(&ty(egraph, from).shape, &to.shape);
    let inner = operand(egraph, term, 0).filter(|t| matches!(t.op(), Some(Op::Reshape(_))));
    let mut found: Vec<Expr> = inner.map(|t| direct(t.args[0])).collect();
    if ty(egraph, term.args[0]).shape == to.shape {
        found.push(Expr::Class(term.args[0]));
    }
    found
}

/// Transposed by `perm`, or itself.
pub fn transposed(x: Expr, perm: &[u8]) -> Expr {
    let same = perm.iter().enumerate().all(|(i, &p)| i == usize::from(p));
    if same { x } else { Expr::node(Transpose { perm: perm.into() }, [x]) }
}

pub fn transpose_transpose(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Transpose(outer)) = term.op() else { return Vec::new() };
    let compose = |t: &Term| {
        let Some(Op::Transpose(inner)) = t.op() else { return None };
        let perm: Dims = outer.perm.iter().map(|&p| inner.perm[usize::from(p)]).collect();
        Some(transposed(Expr::Class(t.args[0]), &perm))
    };
    operand(egraph, term, 0).filter_map(compose).collect()
}

/// A transpose that only moves dims of size 1 is a reshape.
pub fn transpose_reshape(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Transpose(op)) = term.op() else { return Vec::new() };
    let shape = &ty(egraph, term.args[0]).shape;
    let moved: Vec<u8> = op.perm.iter().copied().filter(|&p| shape[usize::from(p)] != 1).collect();
    match moved.is_sorted() {
        true => vec![Expr::node(Reshape { shape: term.ty.shape.clone() }, [Expr::Class(term.args[0])])],
        false => Vec::new(),
    }
}

/// A transpose of merged dims is a transpose of what was merged, merged then.
pub fn transpose_merged(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Transpose(op)) = term.op() else { return Vec::new() };
    let below = |t: &Term| {
        let Some(Op::Reshape(_)) = t.op() else { return None };
        let groups = merged(&ty(egraph, t.args[0]).shape, &t.ty.shape)?;
        let perm: Dims = op.perm.iter().flat_map(|&p| groups[usize::from(p)].clone()).map(|d| d as u8).collect();
        let inner = transposed(Expr::Class(t.args[0]), &perm);
        Some(Expr::node(Reshape { shape: term.ty.shape.clone() }, [inner]))
    };
    operand(egraph, term, 0).filter_map(below).collect()
}

/// Dims split after a transpose may be split before it.
pub fn split_transpose(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Reshape(to)) = term.op() else { return Vec::new() };
    let Some(groups) = merged(&to.shape, &ty(egraph, term.args[0]).shape) else { return Vec::new() };
    let below = |t: &Term| {
        let Some(Op::Transpose(op)) = t.op() else { return None };
        // Where each dim of the transpose's operand went.
        let to_result = |d: usize| op.perm.iter().position(|&p| usize::from(p) == d).expect("a permutation");
        let order: Vec<usize> = (0..op.perm.len()).map(to_result).collect();
        let split: Vec<usize> = order.iter().flat_map(|&r| groups[r].clone()).collect();
        let shape: Shape = split.iter().map(|&d| to.shape[d]).collect();
        let perm: Dims = (0..split.len()).map(|d| split.iter().position(|&s| s == d).expect("a permutation") as u8).collect();
        Some(transposed(Expr::node(Reshape { shape }, [Expr::Class(t.args[0])]), &perm))
    };
    operand(egraph, term, 0).filter_map(below).collect()
}

/// For each dim of `to` the dims of `from` that are merged into it, two or more somewhere; `None` where anything is split.
pub fn merged(from: &[u64], to: &[u64]) -> Option<Vec<std::ops::Range<usize>>> {
    let mut groups = Vec::with_capacity(to.len());
    let mut at = 0;
    for &size in to {
        let begin = at;
        let mut product = 1;
        while at < from.len() && (product < size || at == begin) {
            product *= from[at];
            at += 1;
        }
        if product != size || at == begin {
            return None;
        }
        groups.push(begin..at);
    }
    (at == from.len() && from.len() > to.len() && !from.contains(&1)).then_some(groups)
}

/// Also drops a reshape that only takes dims of size 1 out, or puts them in, before a broadcast.
pub fn broadcast_broadcast(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::BroadcastInDim(outer)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for t in operand(egraph, term, 0) {
        match t.op() {
            Some(Op::BroadcastInDim(inner)) => {
                let dims: Dims = inner.dims.iter().map(|&d| outer.dims[usize::from(d)]).collect();
                found.push(Expr::node(BroadcastInDim { shape: outer.shape.clone(), dims }, [Expr::Class(t.args[0])]));
            }
            Some(Op::Reshape(_)) => found.extend(broadcast_of_reshape(egraph, outer, t)),
            _ => {}
        }
    }
    if ty(egraph, term.args[0]).shape == outer.shape {
        found.push(Expr::Class(term.args[0]));
    }
    found
}

/// The broadcast of what a reshape, which only moves dims of size 1, was made of.
fn broadcast_of_reshape(egraph: &Graph, outer: &BroadcastInDim, reshape: &Term) -> Option<Expr> {
    let from = &ty(egraph, reshape.args[0]).shape;
    let dense = |shape: &[u64]| -> Shape { shape.iter().copied().filter(|&d| d != 1).collect() };
    if dense(from) != dense(&reshape.ty.shape) {
        return None;
    }
    let dims = kept_dims(outer, &reshape.ty.shape);
    let source = Expr::Class(reshape.args[0]).reshaped(from, &dense(from));
    Some(Expr::node(BroadcastInDim { shape: outer.shape.clone(), dims }, [source]))
}

/// Where a broadcast puts the dims of its operand that are not of size 1.
fn kept_dims(outer: &BroadcastInDim, operand: &[u64]) -> Dims {
    outer.dims.iter().zip(operand).filter(|&(_, &size)| size != 1).map(|(&d, _)| d).collect()
}

fn is_pointwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_))
}

/// The operands of a pointwise op under a common movement, of which `inner` finds the source of a term: that source, or a
/// number with the source's shape. What is no source may be `other`wise equal to something moved. At least one operand is moved.
fn common<K: PartialEq>(
    egraph: &Graph,
    term: &Term,
    inner: impl Fn(&Term) -> Option<(K, Shape)>,
    other: impl Fn(&Term, &K, &Shape) -> Option<Expr>,
) -> Vec<(K, Shape, Vec<Expr>)> {
    if !term.op().is_some_and(is_pointwise) {
        return Vec::new();
    }
    let mut found: Vec<(K, Shape, Vec<Expr>)> = Vec::new();
    let numbers = |i: usize| egraph[term.args[i]].data.splat.clone();
    let movable = (0..term.args.len()).filter(|&i| numbers(i).is_none());
    for (key, shape) in movable.flat_map(|i| operand(egraph, term, i)).filter_map(&inner) {
        if found.iter().any(|(k, s, _)| *k == key && *s == shape) {
            continue;
        }
        let source = |i: usize| {
            if let Some(value) = numbers(i) {
                return Some(Expr::Splat(value, ty(egraph, term.args[i]).with_shape(&shape)));
            }
            let same = |t: &&Term| inner(t).is_some_and(|(k, s)| k == key && s == shape);
            let moved = operand(egraph, term, i).find(same).map(|t| Expr::Class(t.args[0]));
            moved.or_else(|| operand(egraph, term, i).find_map(|t| other(t, &key, &shape)))
        };
        let args: Option<Vec<Expr>> = (0..term.args.len()).map(source).collect();
        found.extend(args.map(|args| (key, shape, args)));
    }
    found
}

trait WithShape {
    fn with_shape(&self, shape: &[u64]) -> TensorType;
}

impl WithShape for TensorType {
    fn with_shape(&self, shape: &[u64]) -> TensorType {
        TensorType::new(self.dtype, shape.iter().copied())
    }
}

/// Computed before the broadcast that all operands share.
pub fn pointwise_of_broadcasts(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let inner = |t: &Term| match t.op() {
        Some(Op::BroadcastInDim(op)) => Some((op.dims.clone(), ty(egraph, t.args[0]).shape.clone())),
        _ => None,
    };
    let op = || term.op().expect("a pointwise op").clone();
    let wide = |(dims, _, args)| Expr::node(BroadcastInDim { shape: term.ty.shape.clone(), dims }, [Expr::Node(op(), args)]);
    common(egraph, term, inner, |_, _, _| None).into_iter().map(wide).collect()
}

/// A broadcast is the transpose of another one, where its dims stay ascending.
pub fn pointwise_of_transposes(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let inner = |t: &Term| match t.op() {
        Some(Op::Transpose(op)) => Some((op.perm.clone(), ty(egraph, t.args[0]).shape.clone())),
        _ => None,
    };
    let op = || term.op().expect("a pointwise op").clone();
    let turned = |(perm, _, args)| Expr::node(Transpose { perm }, [Expr::Node(op(), args)]);
    let broadcast = |t: &Term, perm: &Dims, shape: &Shape| {
        let Some(Op::BroadcastInDim(op)) = t.op() else { return None };
        let dims: Dims = op.dims.iter().map(|&d| perm[usize::from(d)]).collect();
        let ascending = dims.windows(2).all(|w| w[0] < w[1]);
        ascending.then(|| Expr::node(BroadcastInDim { shape: shape.clone(), dims }, [Expr::Class(t.args[0])]))
    };
    common(egraph, term, inner, broadcast).into_iter().map(turned).collect()
}

pub fn pointwise_of_reshapes(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let inner = |t: &Term| match t.op() {
        Some(Op::Reshape(_)) => Some(((), ty(egraph, t.args[0]).shape.clone())),
        _ => None,
    };
    let op = || term.op().expect("a pointwise op").clone();
    let reshaped = |((), _, args)| Expr::node(Reshape { shape: term.ty.shape.clone() }, [Expr::Node(op(), args)]);
    common(egraph, term, inner, |_, _, _| None).into_iter().map(reshaped).collect()
}

/// `x / broadcast(y)`: one reciprocal for all that y is repeated over.
pub fn div_broadcast(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Binary(Binary { op: BinaryOp::Div })) = term.op() else { return Vec::new() };
    if !term.ty.dtype.is_float() || egraph[term.args[1]].data.splat.is_some() {
        return Vec::new();
    }
    let reciprocal = |t: &Term| {
        let Some(Op::BroadcastInDim(op)) = t.op() else { return None };
        let small = ty(egraph, t.args[0]).clone();
        let one = Expr::Splat(Const::float(small.dtype, 1.0), small);
        let inverse = Expr::node(Binary { op: BinaryOp::Div }, [one, Expr::Class(t.args[0])]);
        let wide = Expr::node(op.clone(), [inverse]);
        Some(Expr::node(Binary { op: BinaryOp::Mul }, [Expr::Class(term.args[0]), wide]))
    };
    operand(egraph, term, 1).filter_map(reciprocal).collect()
}

/// A reduction over dims along which its operand repeats.
pub fn reduce_broadcast(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Reduce(reduce)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for t in operand(egraph, term, 0) {
        let Some(Op::BroadcastInDim(op)) = t.op() else { continue };
        if !reduce.dims.iter().all(|d| !op.dims.contains(d)) || reduce.dims.is_empty() {
            continue;
        }
        let count: u64 = reduce.dims.iter().map(|&d| op.shape[usize::from(d)]).product();
        let left = |d: u8| d - reduce.dims.iter().filter(|&&r| r < d).count() as u8;
        let dims: Dims = op.dims.iter().map(|&d| left(d)).collect();
        let source = Expr::Class(t.args[0]);
        let value = match reduce.op {
            Reduction::Max | Reduction::Min if count > 0 => source,
            Reduction::Sum if term.ty.dtype.is_float() => {
                let number = Const::float(term.ty.dtype, count as f64);
                let number = Expr::Splat(number, ty(egraph, t.args[0]).clone());
                Expr::node(Binary { op: BinaryOp::Mul }, [source, number])
            }
            _ => continue,
        };
        let same = dims.len() == term.ty.rank();
        found.push(if same { value } else { Expr::node(BroadcastInDim { shape: term.ty.shape.clone(), dims }, [value]) });
    }
    found
}

/// `Σ (x a)` as `(Σ x) a`.
pub fn reduce_scale(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Reduce(reduce)) = term.op() else { return Vec::new() };
    if reduce.op != Reduction::Sum || !term.ty.dtype.is_float() {
        return Vec::new();
    }
    scaled(egraph, term.args[0])
        .into_iter()
        .map(|(x, number)| {
            let sum = Expr::node(reduce.clone(), [Expr::Class(x)]);
            Expr::node(Binary { op: BinaryOp::Mul }, [sum, Expr::Splat(number, term.ty.clone())])
        })
        .collect()
}

/// The ways in which a class is another one times a number.
pub fn scaled(egraph: &Graph, id: Id) -> Vec<(Id, Const)> {
    let mut found = Vec::new();
    for t in &egraph[id].nodes {
        let Some(Op::Binary(Binary { op: BinaryOp::Mul })) = t.op() else { continue };
        for (x, number) in [(0, 1), (1, 0)] {
            if let (Some(number), None) = (&egraph[t.args[number]].data.splat, &egraph[t.args[x]].data.splat) {
                found.push((egraph.find(t.args[x]), number.clone()));
            }
        }
    }
    found
}

/// Two reductions of one kind are one.
pub fn reduce_reduce(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Reduce(outer)) = term.op() else { return Vec::new() };
    let merged = |t: &Term| {
        let Some(Op::Reduce(inner)) = t.op() else { return None };
        let rank = ty(egraph, t.args[0]).rank() as u8;
        let kept: Vec<u8> = (0..rank).filter(|d| !inner.dims.contains(d)).collect();
        let mut dims: Dims = inner.dims.iter().copied().chain(outer.dims.iter().map(|&d| kept[usize::from(d)])).collect();
        dims.sort_unstable();
        (inner.op == outer.op).then(|| Expr::node(Reduce { op: outer.op, dims }, [Expr::Class(t.args[0])]))
    };
    operand(egraph, term, 0).filter_map(merged).collect()
}
