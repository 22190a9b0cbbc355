//! What an attention adds to its scores, read off the forms that exporters write.
//!
//! A mask that is the causal one and nothing else becomes a flag; one that is `and`ed with it, the flag and what is left. A
//! masked score of -∞ is a boolean mask; a finite one stays additive, since a row without a key is uniform under it, and zero
//! under a boolean mask.

use super::movement::{scaled, transposed, ty};
use super::term::{Expr, Graph, Term};
use crate::ops::movement::Dims;
use crate::ops::{Binary, BroadcastInDim, Compare, Const, Op, Select, Unary};
use dcc_program::Shape;
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::MaskKind;
use egg::Id;

/// Scores below this are masked.
const MASKED: f64 = -1e4;
/// How far to look for positions.
const DEPTH: u32 = 8;

/// How the scores are masked, as found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Raw {
    None,
    Added(Id),
    /// Scores are kept where the class is true (false if `negated`), and this number elsewhere.
    Kept {
        condition: Id,
        negated: bool,
        other: f64,
    },
}

/// What attention is to know of its mask.
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    pub causal: bool,
    pub kind: MaskKind,
    /// The tensor, and which dims of the scores it has.
    pub value: Option<(Expr, Vec<usize>)>,
}

/// The ways in which a class is a contraction times a number, masked: the contraction, the number, the mask.
pub fn scores(egraph: &Graph, id: Id) -> Vec<(Id, f64, Raw)> {
    let mut found = Vec::new();
    let mut take = |inner: Id, mask: Raw| {
        for (product, scale) in products(egraph, inner) {
            found.push((product, scale, mask));
        }
    };
    for t in &egraph[id].nodes {
        match t.op() {
            Some(Op::Binary(Binary { op: BinaryOp::Add })) => {
                take(t.args[0], Raw::Added(egraph.find(t.args[1])));
                take(t.args[1], Raw::Added(egraph.find(t.args[0])));
            }
            Some(Op::Select(Select {})) => {
                let condition = egraph.find(t.args[0]);
                for (kept, other, negated) in [(1, 2, false), (2, 1, true)] {
                    let other = egraph[t.args[other]].data.splat.as_ref().map(Const::value);
                    if let Some(other) = other.filter(|&v| v <= MASKED) {
                        take(t.args[kept], Raw::Kept { condition, negated, other });
                    }
                }
            }
            _ => {}
        }
    }
    take(id, Raw::None);
    found
}

/// The contractions of which a class is a multiple.
fn products(egraph: &Graph, id: Id) -> Vec<(Id, f64)> {
    let multiples = scaled(egraph, id).into_iter().map(|(x, number)| (x, number.value()));
    let is_dot = |id: Id| egraph[id].nodes.iter().any(|t| matches!(t.op(), Some(Op::DotGeneral(_))));
    std::iter::once((egraph.find(id), 1.0)).chain(multiples).filter(|&(x, _)| is_dot(x)).collect()
}

impl Mask {
    fn causal() -> Mask {
        Mask { causal: true, kind: MaskKind::None, value: None }
    }

    /// The mask of scores whose dims `t` and `s` are queries and keys. `None` where no attention has that mask.
    pub fn resolve(egraph: &Graph, raw: Raw, t: usize, s: usize) -> Option<Mask> {
        let at = (t, s);
        match raw {
            Raw::None => Some(Mask { causal: false, kind: MaskKind::None, value: None }),
            Raw::Kept { condition, negated, other } => {
                let keep = Keep { condition, negated, dims: all_dims(egraph, condition) };
                Some(keep.mask(egraph, at)).filter(|m| m.value.is_none() || other == f64::NEG_INFINITY)
            }
            Raw::Added(id) => {
                let (id, dims) = narrowed(egraph, id, &all_dims(egraph, id));
                let kept = egraph[id].nodes.iter().find_map(|t| Keep::of_added(egraph, t, &dims));
                let boolean = kept.and_then(|(keep, other)| {
                    Some(keep.mask(egraph, at)).filter(|m| m.value.is_none() || other == f64::NEG_INFINITY)
                });
                Some(boolean.unwrap_or(Mask { causal: false, kind: MaskKind::Additive, value: Some((Expr::Class(id), dims)) }))
            }
        }
    }

    pub fn dims(&self) -> &[usize] {
        self.value.as_ref().map_or(&[], |(_, dims)| dims)
    }
}

/// Scores that stay.
struct Keep {
    condition: Id,
    negated: bool,
    /// Which dims of the scores the condition has.
    dims: Vec<usize>,
}

impl Keep {
    /// `select(c, 0, masked)`, and the other way around.
    fn of_added(egraph: &Graph, term: &Term, dims: &[usize]) -> Option<(Keep, f64)> {
        let Some(Op::Select(Select {})) = term.op() else { return None };
        let number = |i: usize| egraph[term.args[i]].data.splat.as_ref().map(Const::value);
        let keep = |negated| Keep { condition: egraph.find(term.args[0]), negated, dims: dims.to_vec() };
        match (number(1)?, number(2)?) {
            (0.0, other) if other <= MASKED => Some((keep(false), other)),
            (other, 0.0) if other <= MASKED => Some((keep(true), other)),
            _ => None,
        }
    }

    /// The mask that keeps these.
    fn mask(&self, egraph: &Graph, at: (usize, usize)) -> Mask {
        let (id, dims) = narrowed(egraph, self.condition, &self.dims);
        if is_causal(egraph, id, &dims, self.negated, at) {
            return Mask::causal();
        }
        let boolean = |causal, value: Expr, dims| Mask { causal, kind: MaskKind::Boolean, value: Some((value, dims)) };
        if self.negated {
            let not = Expr::node(Unary { op: UnaryOp::Not }, [Expr::Class(id)]);
            return boolean(false, not, dims);
        }
        for t in &egraph[id].nodes {
            let Some(Op::Binary(Binary { op: BinaryOp::And })) = t.op() else { continue };
            for (one, other) in [(0, 1), (1, 0)] {
                let (one, one_dims) = narrowed(egraph, t.args[one], &dims);
                if is_causal(egraph, one, &one_dims, false, at) {
                    let (rest, rest_dims) = narrowed(egraph, t.args[other], &dims);
                    return boolean(true, Expr::Class(rest), rest_dims);
                }
            }
        }
        boolean(false, Expr::Class(id), dims)
    }
}

fn all_dims(egraph: &Graph, id: Id) -> Vec<usize> {
    (0..ty(egraph, id).rank()).collect()
}

/// The class without the dims along which it repeats, and which of `dims` are left.
fn narrowed(egraph: &Graph, id: Id, dims: &[usize]) -> (Id, Vec<usize>) {
    let broadcasts = egraph[id].nodes.iter().filter_map(|t| match t.op() {
        Some(Op::BroadcastInDim(op)) => Some((ty(egraph, t.args[0]).elements(), egraph.find(t.args[0]), op)),
        _ => None,
    });
    match broadcasts.min_by_key(|&(elements, id, _)| (elements, id)) {
        Some((_, source, op)) => (source, op.dims.iter().map(|&d| dims[usize::from(d)]).collect()),
        None => (egraph.find(id), dims.to_vec()),
    }
}

/// Whether the class (its negation) says that the position along `s` is at most that along `t`.
fn is_causal(egraph: &Graph, id: Id, dims: &[usize], negated: bool, (t, s): (usize, usize)) -> bool {
    egraph[id].nodes.iter().any(|term| {
        let Some(Op::Compare(Compare { op })) = term.op() else { return false };
        let position = |i: usize| position(egraph, term.args[i], DEPTH).map(|(dim, offset)| (dims[dim], offset));
        let (Some(a), Some(b)) = (position(0), position(1)) else { return false };
        // `low + slack <= high`.
        let (low, high, slack) = match (op, negated) {
            (CompareOp::Le, false) | (CompareOp::Gt, true) => (a, b, 0),
            (CompareOp::Lt, false) | (CompareOp::Ge, true) => (a, b, 1),
            (CompareOp::Ge, false) | (CompareOp::Lt, true) => (b, a, 0),
            (CompareOp::Gt, false) | (CompareOp::Le, true) => (b, a, 1),
            _ => return false,
        };
        low.0 == s && high.0 == t && low.1 + slack == high.1
    })
}

/// The dim that a class counts along, and from where.
fn position(egraph: &Graph, id: Id, depth: u32) -> Option<(usize, i64)> {
    let depth = depth.checked_sub(1)?;
    let number = |id: Id| egraph[id].data.splat.as_ref().map(|v| v.value() as i64);
    egraph[id].nodes.iter().find_map(|t| match t.op()? {
        Op::Iota(op) => Some((usize::from(op.dim), 0)),
        Op::BroadcastInDim(op) => {
            let (dim, offset) = position(egraph, t.args[0], depth)?;
            Some((usize::from(op.dims[dim]), offset))
        }
        Op::Cast(_) => position(egraph, t.args[0], depth),
        Op::Reshape(_) => {
            let (dim, offset) = position(egraph, t.args[0], depth)?;
            let (from, to) = (&ty(egraph, t.args[0]).shape, &t.ty.shape);
            let dense = |shape: &[u64]| -> Vec<(usize, u64)> {
                shape.iter().copied().enumerate().filter(|&(_, size)| size != 1).collect()
            };
            let (from, to) = (dense(from), dense(to));
            let same = from.iter().map(|d| d.1).eq(to.iter().map(|d| d.1));
            let at = from.iter().position(|d| d.0 == dim).filter(|_| same)?;
            Some((to[at].0, offset))
        }
        Op::Binary(Binary { op: op @ (BinaryOp::Add | BinaryOp::Sub) }) => {
            let (x, by) = match (number(t.args[0]), number(t.args[1])) {
                (None, Some(by)) => (t.args[0], by),
                (Some(by), None) if *op == BinaryOp::Add => (t.args[1], by),
                _ => return None,
            };
            let (dim, offset) = position(egraph, x, depth)?;
            Some((dim, if *op == BinaryOp::Add { offset + by } else { offset - by }))
        }
        _ => None,
    })
}

/// Where dim `dim` of a class is heads of keys, each repeated for a group of queries: the size of a group and the class without
/// repetition.
pub fn ungrouped(egraph: &Graph, id: Id, dim: usize) -> Option<(u64, Expr)> {
    egraph[id].nodes.iter().find_map(|t| {
        let Some(Op::Reshape(_)) = t.op() else { return None };
        let (from, to) = (&ty(egraph, t.args[0]).shape, &t.ty.shape);
        let fits = from.len() == to.len() + 1
            && from[..dim] == to[..dim]
            && from[dim] * from[dim + 1] == to[dim]
            && from[dim + 2..] == to[dim + 1..];
        let source = fits.then(|| unrepeated(egraph, t.args[0], dim + 1))??;
        Some((from[dim + 1], source))
    })
}

/// A class that repeats along `dim`, without that dim.
pub fn unrepeated(egraph: &Graph, id: Id, dim: usize) -> Option<Expr> {
    unrepeated_within(egraph, id, dim, DEPTH)
}

fn unrepeated_within(egraph: &Graph, id: Id, dim: usize, depth: u32) -> Option<Expr> {
    let depth = depth.checked_sub(1)?;
    egraph[id].nodes.iter().find_map(|t| match t.op()? {
        Op::BroadcastInDim(op) if !op.dims.contains(&(dim as u8)) => {
            let mut shape: Shape = op.shape.clone();
            shape.remove(dim);
            let dims: Dims = op.dims.iter().map(|&d| d - u8::from(usize::from(d) > dim)).collect();
            let source = Expr::Class(t.args[0]);
            Some(if dims.len() == shape.len() { source } else { Expr::node(BroadcastInDim { shape, dims }, [source]) })
        }
        Op::Transpose(op) => {
            let gone = op.perm[dim];
            let source = unrepeated_within(egraph, t.args[0], usize::from(gone), depth)?;
            let kept = op.perm.iter().enumerate().filter(|&(i, _)| i != dim);
            let perm: Dims = kept.map(|(_, &p)| p - u8::from(p > gone)).collect();
            Some(transposed(source, &perm))
        }
        _ => None,
    })
}
