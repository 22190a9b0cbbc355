//! Scaled dot-product attention, as exporters write it out, becomes one op. Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1.
//!
//! `dot(softmax(scale · dot(Q, K) + mask), V)`: the other rules have moved scales out of and transposes into both contractions
//! by the time this one sees them, and every form of softmax and mask is in the classes it looks at. What stands between
//! (dropout) leaves the attention as it is.

use super::contract::canonical;
use super::mask::{self, Mask, Raw};
use super::movement::{operand, transposed, ty};
use super::term::{Expr, Graph, Term};
use crate::ops::movement::Dims;
use crate::ops::{Attention, Binary, Op, Reduce, Reshape, Select, Unary};
use dcc_program::factors::DimFactors;
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::program::Attention as Attributes;
use dcc_program::{FactorId, FactorSpec, Reduce as Reduction, Shape};
use egg::Id;

/// Attention where `term` is the product of a softmax with values.
pub fn find(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::DotGeneral(op)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for side in 0..2 {
        let values = Values { spec: &op.spec, side, class: term.args[1 - side] };
        for (scores, dim) in softmax(egraph, term.args[side]) {
            for (product, scale, mask) in mask::scores(egraph, scores) {
                for t in &egraph[product].nodes {
                    let Some(Op::DotGeneral(keys)) = t.op() else { continue };
                    for q in 0..2 {
                        let roles = Roles::new(&keys.spec, q, &values, dim);
                        let (q, k) = (t.args[q], t.args[1 - q]);
                        let built = roles.and_then(|r| r.build(egraph, term, [q, k], scale, mask));
                        found.extend(built.filter(|b| !found.contains(b)));
                    }
                }
            }
        }
    }
    found
}

/// The other operand of the product with probabilities.
struct Values<'a> {
    spec: &'a FactorSpec,
    /// Position of the probabilities.
    side: usize,
    class: Id,
}

/// What a class is the softmax of, and along which dim. NaN of rows without a key, which are zero under attention, may be
/// guarded against.
fn softmax(egraph: &Graph, id: Id) -> Vec<(Id, usize)> {
    let mut found = plain_softmax(egraph, id);
    for t in &egraph[id].nodes {
        let Some(Op::Select(Select {})) = t.op() else { continue };
        let zero = egraph[t.args[1]].data.splat.as_ref().is_some_and(|v| v.value() == 0.0);
        let inner = egraph.find(t.args[2]);
        let of_inner =
            |t: &Term| matches!(t.op(), Some(Op::Unary(Unary { op: UnaryOp::IsNan }))) && egraph.find(t.args[0]) == inner;
        if zero && operand(egraph, t, 0).any(of_inner) {
            found.extend(plain_softmax(egraph, inner));
        }
    }
    found
}

/// `exp(x - broadcast(m)) / broadcast(Σ exp(x - m))`.
fn plain_softmax(egraph: &Graph, id: Id) -> Vec<(Id, usize)> {
    let mut found = Vec::new();
    for t in &egraph[id].nodes {
        let Some(Op::Binary(Binary { op: BinaryOp::Div })) = t.op() else { continue };
        let exp = egraph.find(t.args[0]);
        let Some(dim) = summed_dim(egraph, t.args[1], exp) else { continue };
        for e in &egraph[exp].nodes {
            let Some(Op::Unary(Unary { op: UnaryOp::Exp })) = e.op() else { continue };
            for d in operand(egraph, e, 0) {
                let Some(Op::Binary(Binary { op: BinaryOp::Sub })) = d.op() else { continue };
                let scores = egraph.find(d.args[0]);
                if is_row_constant(egraph, d.args[1], dim) && !found.contains(&(scores, dim)) {
                    found.push((scores, dim));
                }
            }
        }
    }
    found
}

/// The dim over which `id` is the repeated sum of `of`.
fn summed_dim(egraph: &Graph, id: Id, of: Id) -> Option<usize> {
    egraph[id].nodes.iter().find_map(|t| {
        let Some(Op::BroadcastInDim(op)) = t.op() else { return None };
        operand(egraph, t, 0).find_map(|sum| match sum.op() {
            Some(Op::Reduce(Reduce { op: Reduction::Sum, dims })) if egraph.find(sum.args[0]) == of && dims.len() == 1 => {
                let kept = (0..op.shape.len() as u8).filter(|d| *d != dims[0]);
                kept.eq(op.dims.iter().copied()).then_some(usize::from(dims[0]))
            }
            _ => None,
        })
    })
}

/// Whether the class repeats along `dim`.
fn is_row_constant(egraph: &Graph, id: Id, dim: usize) -> bool {
    let repeats = |t: &Term| matches!(t.op(), Some(Op::BroadcastInDim(op)) if !op.dims.contains(&(dim as u8)));
    egraph[id].nodes.iter().any(repeats)
}

/// Which dim of the scores, of Q, K, V and of the result is what.
struct Roles {
    /// Name of each dim of the scores: `b h g t s`.
    scores: Vec<&'static str>,
    q: Vec<&'static str>,
    k: Vec<&'static str>,
    v: Vec<&'static str>,
    o: Vec<&'static str>,
    values: Id,
}

impl Roles {
    /// `None` where the two contractions do not fit together as attention.
    fn new(keys: &FactorSpec, q: usize, values: &Values, dim: usize) -> Option<Roles> {
        let plain = |dims: &[DimFactors]| dims.iter().map(|d| (d.len() == 1).then(|| d[0])).collect::<Option<Vec<FactorId>>>();
        let (qs, ks) = (plain(&keys.operands[q])?, plain(&keys.operands[1 - q])?);
        let (ps, vs) = (plain(&values.spec.operands[values.side])?, plain(&values.spec.operands[1 - values.side])?);
        let (scores, result) = (plain(&keys.result)?, plain(&values.spec.result)?);
        let mut names: Vec<&'static str> = Vec::new();
        let mut rows = scores.iter().zip(&ps).filter(|(s, p)| qs.contains(s) && !ks.contains(s) && !vs.contains(p)).count();
        let mut batch = ["b", "h"].into_iter();
        for (i, (s, p)) in scores.iter().zip(&ps).enumerate() {
            let part = (qs.contains(s), ks.contains(s), vs.contains(p), result.contains(p));
            names.push(match part {
                (false, true, true, false) if i == dim => "s",
                (true, false, false, true) if rows == 2 => {
                    rows -= 1;
                    "g"
                }
                (true, false, false, true) if rows == 1 => {
                    rows -= 1;
                    "t"
                }
                (true, true, true, true) => batch.next()?,
                _ => return None,
            });
        }
        let name = |list: &[FactorId], f: &FactorId, other: &'static str| match list.iter().position(|x| x == f) {
            Some(at) => names[at],
            None => other,
        };
        let of = |dims: &[FactorId], list: &[FactorId], other| dims.iter().map(|f| name(list, f, other)).collect::<Vec<_>>();
        let roles = Roles {
            q: of(&qs, &scores, "e"),
            k: of(&ks, &scores, "e"),
            v: of(&vs, &ps, "f"),
            o: of(&result, &ps, "f"),
            scores: names,
            values: values.class,
        };
        let once = |dims: &[&str], name| dims.iter().filter(|d| **d == name).count() == 1;
        let whole = once(&roles.q, "e") && once(&roles.k, "e") && once(&roles.v, "f") && once(&roles.o, "f");
        (whole && once(&roles.scores, "t") && once(&roles.scores, "s")).then_some(roles)
    }

    fn build(&self, egraph: &Graph, term: &Term, [q, k]: [Id; 2], scale: f64, mask: Raw) -> Option<Expr> {
        let [t, s] = ["t", "s"].map(|name| at(&self.scores, name));
        let mask = Mask::resolve(egraph, mask, t, s)?;
        let (mut names_q, names_k, names_v) = (ordered(&self.q), ordered(&self.k), ordered(&self.v));
        let mut names_o = ordered(&self.o);
        let sizes = |id: Id, from: &[&'static str], to: &[&'static str]| -> Shape {
            to.iter().map(|n| ty(egraph, id).shape[at(from, n)]).collect()
        };
        let mut shape_q = sizes(q, &self.q, &names_q);
        let mut shape_o: Shape = names_o.iter().map(|n| term.ty.shape[at(&self.o, n)]).collect();
        let (merged_o, merged_shape) = (names_o.clone(), shape_o.clone());
        let mut operands = vec![arranged(Expr::Class(q), &self.q, &names_q)];
        let heads_free = !names_q.contains(&"g") && !mask.dims().iter().any(|&d| self.scores[d] == "h");
        let (mut keys, mut values) = (Expr::Class(k), Expr::Class(self.values));
        if let Some((groups, k, v)) = self.grouped(egraph, k).filter(|_| heads_free) {
            (keys, values) = (k, v);
            split(&mut names_q, &mut shape_q, groups);
            split(&mut names_o, &mut shape_o, groups);
            operands = vec![Expr::node(Reshape { shape: shape_q }, operands)];
        }
        operands.push(arranged(keys, &self.k, &names_k));
        operands.push(arranged(values, &self.v, &names_v));
        let mut text = [&names_q, &names_k, &names_v].map(|names| names.join(" ")).join(", ");
        if let Some((value, dims)) = &mask.value {
            let names: Vec<&str> = dims.iter().map(|&d| self.scores[d]).collect();
            text += &format!(", {}", names.join(" "));
            operands.push(value.clone());
        }
        let spec = FactorSpec::parse(&format!("{text} -> {}", names_o.join(" "))).expect("names are identifiers");
        let attributes = Attributes { spec, causal: mask.causal, mask: mask.kind, scale: scale.to_bits() };
        let o = Expr::Node(Attention { attributes, out: 0 }.into(), operands);
        Some(arranged(o.reshaped(&shape_o, &merged_shape), &merged_o, &self.o))
    }

    /// Where keys and values repeat over groups of heads: how many there are in one, and K and V without the repetition.
    fn grouped(&self, egraph: &Graph, k: Id) -> Option<(u64, Expr, Expr)> {
        let (groups, k) = mask::ungrouped(egraph, k, at_checked(&self.k, "h")?)?;
        let (same, v) = mask::ungrouped(egraph, self.values, at_checked(&self.v, "h")?)?;
        (groups == same).then_some((groups, k, v))
    }
}

fn at(names: &[&'static str], name: &str) -> usize {
    at_checked(names, name).expect("the name is one of these")
}

fn at_checked(names: &[&'static str], name: &str) -> Option<usize> {
    names.iter().position(|n| *n == name)
}

/// The names in the order that attention has them in.
fn ordered(dims: &[&'static str]) -> Vec<&'static str> {
    ["b", "h", "g", "t", "s", "e", "f"].into_iter().filter(|n| dims.contains(n)).collect()
}

/// The dim of heads becomes heads of keys times `groups`.
fn split(names: &mut Vec<&'static str>, shape: &mut Shape, groups: u64) {
    let head = at(names, "h");
    shape[head] /= groups;
    shape.insert(head + 1, groups);
    names.insert(head + 1, "g");
}

/// Transposed from the order of names `from` to the order `to`.
fn arranged(x: Expr, from: &[&'static str], to: &[&'static str]) -> Expr {
    let perm: Dims = to.iter().map(|n| at(from, n) as u8).collect();
    transposed(x, &perm)
}

/// Keys and values that repeat over groups of heads, or over all of them, are read without the repetition.
pub fn grouped_operands(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Attention(op)) = term.op() else { return Vec::new() };
    let spec = &op.attributes.spec;
    let heads = spec.ids().find(|f| spec.names[usize::from(f.0)] == "h");
    let at = |dims: &[DimFactors]| dims.iter().position(|d| heads.is_some_and(|h| d[..] == [h]));
    let masked = spec.operands.get(3).is_some_and(|dims| at(dims).is_some());
    let [q, k, v] = [0, 1, 2].map(|i| at(&spec.operands[i]));
    let (Some(q), Some(k), Some(v), Some(o)) = (q, k, v, at(&spec.result)) else { return Vec::new() };
    if op.out != 0 || masked || spec.names.iter().any(|n| n == "g") {
        return Vec::new();
    }
    let at = HeadDims { q, k, v, o };
    at.one(egraph, term, op).into_iter().chain(at.several(egraph, term, op)).collect()
}

/// Which dim is heads, of each operand and the result.
struct HeadDims {
    q: usize,
    k: usize,
    v: usize,
    o: usize,
}

impl HeadDims {
    /// One head of keys for all queries: these are one group.
    fn one(&self, egraph: &Graph, term: &Term, op: &Attention) -> Option<Expr> {
        let keys = mask::unrepeated(egraph, term.args[1], self.k)?;
        let values = mask::unrepeated(egraph, term.args[2], self.v)?;
        let mut op = op.clone();
        let spec = &mut op.attributes.spec;
        let heads = spec.operands[1].remove(self.k)[0];
        spec.operands[2].remove(self.v);
        spec.names[usize::from(heads.0)] = "g".to_owned();
        op.attributes.spec = canonical(spec);
        let masks = term.args.iter().skip(3).map(|&id| Expr::Class(id));
        Some(Expr::node(op, [Expr::Class(term.args[0]), keys, values].into_iter().chain(masks)))
    }

    /// The heads of the queries become heads of keys times groups.
    fn several(&self, egraph: &Graph, term: &Term, op: &Attention) -> Option<Expr> {
        let (groups, keys) = mask::ungrouped(egraph, term.args[1], self.k)?;
        let (_, values) = mask::ungrouped(egraph, term.args[2], self.v).filter(|found| found.0 == groups)?;
        let mut op = op.clone();
        let spec = &mut op.attributes.spec;
        let group = DimFactors::from_slice(&[FactorId(spec.names.len() as u8)]);
        spec.names.push("g".to_owned());
        spec.operands[0].insert(self.q + 1, group.clone());
        spec.result.insert(self.o + 1, group);
        op.attributes.spec = canonical(spec);
        let mut shape = ty(egraph, term.args[0]).shape.clone();
        shape[self.q] /= groups;
        shape.insert(self.q + 1, groups);
        let queries = Expr::node(Reshape { shape }, [Expr::Class(term.args[0])]);
        let masks = term.args.iter().skip(3).map(|&id| Expr::Class(id));
        let product = Expr::node(op, [queries, keys, values].into_iter().chain(masks));
        Some(Expr::node(Reshape { shape: term.ty.shape.clone() }, [product]))
    }
}

/// A transposed operand is read in place, as long as its channels stay last: kernels read these as rows.
pub fn transposed_operand(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Attention(op)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for i in 0..3 {
        for t in operand(egraph, term, i) {
            let Some(Op::Transpose(transpose)) = t.op() else { continue };
            let mut op = op.clone();
            let dims = op.attributes.spec.operands[i].clone();
            for (factors, &from) in dims.iter().zip(&transpose.perm) {
                op.attributes.spec.operands[i][usize::from(from)] = factors.clone();
            }
            if op.attributes.spec.operands[i].last() != dims.last() {
                continue;
            }
            let mut args: Vec<Expr> = term.args.iter().map(|&id| Expr::Class(id)).collect();
            args[i] = Expr::Class(t.args[0]);
            op.attributes.spec = canonical(&op.attributes.spec);
            found.push(Expr::Node(op.into(), args));
        }
    }
    found
}

/// The result is made in the order that it is read in, its channels last.
pub fn transposed_result(egraph: &Graph, _: Id, term: &Term) -> Vec<Expr> {
    let Some(Op::Transpose(transpose)) = term.op() else { return Vec::new() };
    let mut found = Vec::new();
    for t in operand(egraph, term, 0) {
        let Some(Op::Attention(op)) = t.op() else { continue };
        let mut op = op.clone();
        let dims = op.attributes.spec.result.clone();
        op.attributes.spec.result = transpose.perm.iter().map(|&p| dims[usize::from(p)].clone()).collect();
        if op.out == 0 && op.attributes.spec.result.last() == dims.last() {
            op.attributes.spec = canonical(&op.attributes.spec);
            found.push(Expr::Node(op.into(), t.args.iter().map(|&id| Expr::Class(id)).collect()));
        }
    }
    found
}
