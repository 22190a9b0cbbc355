//! Sums of gradients over dims along which a value repeats.
//!
//! What does not vary along these dims is a factor of the sum: Σ dy·γ·(x − μ) is γ times Σ dy·(x − μ), which is rstd⁻¹ times γ's own
//! gradient, so that both are one pass over their operands. A mean's gradient sums terms that are such multiples too, and one that is
//! nothing: the deviations from a mean add up to zero. So the gradient of a normalization over samples reads its operands once for two
//! sums and once for its result (Ioffe and Szegedy 2015, arXiv 1502.03167, section 3).

use super::{Grad, Sums};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::movement::Dims;
use crate::ops::{Binary, BroadcastInDim, GradSum, Op, Reduce, Unary};
use dcc_program::DType;
use dcc_program::kernel::{BinaryOp, UnaryOp};
use smallvec::SmallVec;

/// More terms or factors than so many stay as they are.
const MOST: usize = 8;

/// Those that are multiplied.
pub(super) type Factors = SmallVec<[NodeId; 4]>;

/// A product: whether it is taken off, and its factors.
#[derive(Clone, Debug, Default)]
struct Term {
    negative: bool,
    factors: Factors,
}

/// A term whose sum is that of `inner` times what does not vary.
struct Part {
    negative: bool,
    outer: Factors,
    inner: Factors,
}

impl Grad<'_> {
    /// The sum of `dy` over dims that `x`, an operand of the node being differentiated, has not: of `x`'s dims.
    pub fn sum_repeated(&mut self, x: NodeId, dy: NodeId, dims: &[usize]) -> Result<NodeId> {
        let wide = matches!(self.ty(dy).dtype, DType::F32 | DType::F64);
        let shares = self.sums == Sums::Shared && dims.contains(&0);
        let parts = if wide && shares { parts(self, dy, dims) } else { None };
        let Some(parts) = parts else { return self.sum_whole(x, dy, dims) };
        let Some(first) = parts.first() else { return self.of_value(x, |g| g.splat_like(0.0, x)) };
        let inner = first.inner.clone();
        let sum = self.sum_of_product(x, &parts, inner, dims)?;
        self.of_value(x, |g| {
            let mut total = None;
            for part in &parts {
                let term = part.outer.iter().try_fold(sum, |term, &factor| {
                    let factor = g.narrow(factor, dims)?;
                    g.binary(BinaryOp::Mul, term, factor)
                })?;
                total = Some(match (total, part.negative) {
                    (None, false) => term,
                    (None, true) => g.unary(UnaryOp::Neg, term)?,
                    (Some(before), negative) => g.binary(if negative { BinaryOp::Sub } else { BinaryOp::Add }, before, term)?,
                });
            }
            Ok(total.expect("there is a part"))
        })
    }

    /// The sum that all parts are multiples of. It is whole over ranks before any of them is made of it, by the sum of gradients of a value
    /// that it belongs to as much as to `x`: one of those that vary with the batch.
    fn sum_of_product(&mut self, x: NodeId, parts: &[Part], inner: Factors, dims: &[usize]) -> Result<NodeId> {
        let narrow: Dims = dims.iter().map(|&d| d as u8).collect();
        if let Some(&sum) = self.shared.get(&(inner.clone(), narrow.clone())) {
            return Ok(sum);
        }
        let product = inner[1..].iter().try_fold(inner[0], |product, &factor| self.binary(BinaryOp::Mul, product, factor))?;
        let mut sum = self.sum(product, dims)?;
        let shape = &self.ty(sum).shape;
        let factors = parts.iter().flat_map(|part| &part.outer).map(|&factor| self[factor].operands[0]);
        let alike = |&value: &NodeId| self.ty(value).shape == *shape && self.varies(value);
        if let Some(of) = std::iter::once(x).chain(factors).find(alike) {
            sum = self.of_value(of, |g| g.add(GradSum { of: of.0 }, &[sum]))?;
        }
        self.shared.insert((inner, narrow), sum);
        Ok(sum)
    }

    /// As it is; what is taken off everywhere is one sum that is negated in place of all its terms.
    fn sum_whole(&mut self, x: NodeId, dy: NodeId, dims: &[usize]) -> Result<NodeId> {
        let (dy, term) = (summed(self, dy), inside(self, dy));
        let Op::Unary(Unary { op: UnaryOp::Neg }) = self[term].op else { return self.sum(dy, dims) };
        let taken_off = self[term].operands[0];
        let sum = self.sum(taken_off, dims)?;
        self.of_value(x, |g| g.unary(UnaryOp::Neg, sum))
    }

    /// A value that repeats along `dims`, without them.
    fn narrow(&mut self, repeated: NodeId, dims: &[usize]) -> Result<NodeId> {
        let Op::BroadcastInDim(BroadcastInDim { shape, dims: own }) = self[repeated].op.clone() else {
            return Err(self.broken(repeated, "a factor that does not repeat"));
        };
        let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
        let at = |d: &u8| kept.iter().position(|k| *k == usize::from(*d)).expect("it does not vary along the dims");
        let (places, sizes) = (own.iter().map(at).collect::<Vec<_>>(), kept.iter().map(|&d| shape[d]).collect::<Vec<_>>());
        let source = self[repeated].operands[0];
        self.broadcast(source, &sizes, &places)
    }
}

/// The parts of the sum of `dy` over `dims`, if what is summed is the same for all of them; none is left where all are zero.
fn parts(graph: &Graph, dy: NodeId, dims: &[usize]) -> Option<Vec<Part>> {
    let mut terms = Vec::new();
    expand(graph, dy, dims, &mut terms)?;
    let constant = |id: &NodeId| repeats_along(graph, *id, dims);
    let part = |term: Term| {
        let (outer, inner) = term.factors.into_iter().partition(constant);
        Part { negative: term.negative, outer, inner }
    };
    let mut parts: Vec<Part> = terms.into_iter().map(part).collect();
    if parts.iter().any(|part| part.inner.is_empty()) {
        return None;
    }
    parts.retain(|part| !matches!(part.inner[..], [only] if is_deviation(graph, only, dims)));
    let same = parts.windows(2).all(|two| two[0].inner == two[1].inner);
    // Numbers alone are not worth a sum of what they are multiplied with.
    let taken = parts.iter().all(|part| part.outer.iter().any(|factor| is_no_number(graph, *factor)));
    (same && taken).then_some(parts)
}

/// The terms that a gradient adds up; none if there are too many.
fn expand(graph: &Graph, id: NodeId, dims: &[usize], terms: &mut Vec<Term>) -> Option<()> {
    let mut open = vec![(id, false)];
    while let Some((id, negative)) = open.pop() {
        let within = inside(graph, id);
        let node = &graph[within];
        match node.op {
            Op::GradSum(_) if node.operands.iter().all(|term| are_one(graph, within, *term)) => {
                open.extend(node.operands.iter().rev().map(|&term| (term, negative)));
            }
            Op::Unary(Unary { op: UnaryOp::Neg }) => open.push((node.operands[0], !negative)),
            _ => {
                let mut term = Term { negative, ..Term::default() };
                multiply(graph, id, dims, &mut term);
                terms.push(term);
            }
        }
        if terms.len() > MOST || terms.iter().any(|term| term.factors.len() > MOST) {
            return None;
        }
    }
    Some(())
}

/// Adds the factors of a product, of which those that repeat stand by themselves.
fn multiply(graph: &Graph, id: NodeId, dims: &[usize], term: &mut Term) {
    let mut open = vec![id];
    while let Some(id) = open.pop() {
        let within = inside(graph, id);
        let node = &graph[within];
        // Each that is open is a factor at least.
        let few = term.factors.len() + open.len() <= MOST;
        match node.op {
            _ if repeats_along(graph, within, dims) => term.factors.push(within),
            Op::Binary(Binary { op: BinaryOp::Mul }) if few && has_repeated(graph, within, dims, MOST) => {
                open.extend(node.operands.iter().rev());
            }
            Op::Unary(Unary { op: UnaryOp::Neg }) if has_repeated(graph, within, dims, MOST) => {
                term.negative = !term.negative;
                open.push(node.operands[0]);
            }
            _ => term.factors.push(summed(graph, id)),
        }
    }
}

/// Whether a product has a factor that repeats along `dims` and is no number, at most so deep.
fn has_repeated(graph: &Graph, id: NodeId, dims: &[usize], depth: usize) -> bool {
    let id = inside(graph, id);
    match graph[id].op {
        _ if repeats_along(graph, id, dims) => is_no_number(graph, id),
        Op::Binary(Binary { op: BinaryOp::Mul }) | Op::Unary(Unary { op: UnaryOp::Neg }) if depth > 0 => {
            graph[id].operands.iter().any(|&factor| has_repeated(graph, factor, dims, depth - 1))
        }
        _ => false,
    }
}

/// Of gradients that are each another one's only contribution, the first.
fn summed(graph: &Graph, mut id: NodeId) -> NodeId {
    while let (Op::GradSum(_), &[only]) = (&graph[id].op, &graph[id].operands[..])
        && matches!(graph[only].op, Op::GradSum(_))
        && are_one(graph, id, only)
    {
        id = only;
    }
    id
}

/// What a gradient of one contribution consists of.
fn inside(graph: &Graph, id: NodeId) -> NodeId {
    let id = summed(graph, id);
    match (&graph[id].op, &graph[id].operands[..]) {
        (Op::GradSum(_), &[only]) if are_one(graph, id, only) => only,
        _ => id,
    }
}

/// Whether both are of one node of the model: what is read of another may be on another stage, or a part of a sum over ranks, of which only
/// the gradient there is the whole.
fn are_one(graph: &Graph, a: NodeId, b: NodeId) -> bool {
    graph.origin(a) == graph.origin(b)
}

fn repeats_along(graph: &Graph, id: NodeId, dims: &[usize]) -> bool {
    matches!(&graph[id].op, Op::BroadcastInDim(op) if op.dims.iter().all(|d| !dims.contains(&usize::from(*d))))
}

/// Of a value that repeats.
fn is_no_number(graph: &Graph, repeated: NodeId) -> bool {
    !graph.ty(graph[repeated].operands[0]).shape.is_empty()
}

/// Whether a value is another one less its mean over `dims`.
fn is_deviation(graph: &Graph, id: NodeId, dims: &[usize]) -> bool {
    let (Op::Binary(Binary { op: BinaryOp::Sub }), &[x, mean]) = (&graph[id].op, &graph[id].operands[..]) else { return false };
    let Op::BroadcastInDim(op) = &graph[mean].op else { return false };
    let kept: Dims = (0..op.shape.len()).filter(|d| !dims.contains(d)).map(|d| d as u8).collect();
    let count = dims.iter().map(|&d| op.shape[d]).product::<u64>() as f64;
    let scaled = graph[mean].operands[0];
    let (sum, divisor) = match (&graph[scaled].op, &graph[scaled].operands[..]) {
        (Op::Binary(Binary { op: BinaryOp::Mul }), &[sum, by]) => (sum, splat(graph, by).map(f64::recip)),
        (Op::Binary(Binary { op: BinaryOp::Div }), &[sum, by]) => (sum, splat(graph, by)),
        _ => return false,
    };
    let sums =
        |sum: &Reduce| sum.op == dcc_program::Reduce::Sum && sum.dims.iter().map(|d| usize::from(*d)).eq(dims.iter().copied());
    let of_x = matches!(&graph[sum].op, Op::Reduce(sum) if sums(sum)) && graph[sum].operands[..] == [x];
    // The reciprocal is rounded, to f32 at most.
    let close = |divisor: f64| (divisor / count - 1.0).abs() < 1e-6;
    op.dims == kept && of_x && divisor.is_some_and(close)
}

/// The number that a value is everywhere.
fn splat(graph: &Graph, mut id: NodeId) -> Option<f64> {
    while let Op::BroadcastInDim(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    match &graph[id].op {
        Op::Const(value) if value.dtype.is_float() => Some(value.value()),
        _ => None,
    }
}
