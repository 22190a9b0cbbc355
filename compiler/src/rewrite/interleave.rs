//! What is concatenated along its samples (two views of an image, chosen and rejected answers), interleaved: the parts of one sample become
//! neighbours, so that a rank or a microbatch, which has some of the samples, has all parts of these.
//!
//! Before: `a0 a1 b0 b1`. After: `a0 b0 a1 b1`, from the concatenation to the slices that take the parts again. What computes elements apart
//! from each other does not notice, nor does a sum over all of them. What does is given the order back; where that would be much beside
//! what is interleaved, the graph stays as it is.

use crate::error::Result;
use crate::graph::{Graph, Node, NodeId};
use crate::loss::batch_dims;
use crate::ops::{Concatenate, Op, Rule, Slice};
use dcc_program::factors::DimFactors;
use dcc_program::{FactorId, Shape};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// So many elements are computed interleaved for each that is given its order back.
const WORTH: u64 = 8;

/// A dim of which the elements count samples, parts and `inner` elements, slowest first, instead of parts, samples and those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turned {
    dim: usize,
    parts: u64,
    inner: u64,
}

type AllTurned = SmallVec<[Turned; 1]>;

struct Pass<'g> {
    graph: &'g Graph,
    batch: Vec<BTreeSet<u8>>,
    /// By node: dims along which its elements may change places, being equal or random.
    free: Vec<BTreeSet<usize>>,
    turned: Vec<AllTurned>,
    /// What stands for the nodes, and for those that were given their order back.
    made: Vec<NodeId>,
    back: FxHashMap<NodeId, NodeId>,
    /// Elements.
    interleaved: u64,
    given_back: u64,
}

/// The graph with its concatenations of samples interleaved; `None` where there are none that this is worth.
pub fn interleave(graph: &Graph) -> Result<Option<Graph>> {
    if !graph.nodes.iter().any(|node| matches!(node.op, Op::Concatenate(_))) {
        return Ok(None);
    }
    let count = graph.nodes.len();
    let mut pass = Pass {
        graph,
        batch: batch_dims(graph),
        free: free_dims(graph),
        turned: vec![AllTurned::new(); count],
        made: vec![NodeId(0); count],
        back: FxHashMap::default(),
        interleaved: 0,
        given_back: 0,
    };
    let mut out = graph.map(|out, id, node, operands| {
        let made = pass.node(out, id, node, operands)?;
        pass.made[id.0 as usize] = made;
        Ok(made)
    })?;
    for (place, &(_, id)) in graph.outputs.iter().enumerate() {
        out.outputs[place].1 = pass.in_order(&mut out, id)?;
    }
    let is_worth = pass.interleaved > 0 && pass.given_back * WORTH <= pass.interleaved;
    Ok(is_worth.then_some(out))
}

impl Pass<'_> {
    fn node(&mut self, out: &mut Graph, id: NodeId, node: &Node, operands: &[NodeId]) -> Result<NodeId> {
        let plain = node.operands.iter().all(|operand| self.turned[operand.0 as usize].is_empty());
        let found = match (&node.op, plain) {
            (Op::Concatenate(op), true) if self.joins_samples(node, usize::from(op.dim)) => {
                Some(joined(out, node, operands, usize::from(op.dim))?)
            }
            (Op::Reshape(_), true) if let Some((stack, dim)) = self.flattens_stack(node) => {
                let parts: Vec<NodeId> = stack.operands.iter().map(|part| self.made[part.0 as usize]).collect();
                Some(joined(out, node, &parts, dim)?)
            }
            (_, true) => return Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())),
            (Op::Slice(op), false) => self.sliced(out, node, op, operands[0])?,
            (Op::Reshape(_), false) => self.reshaped(out, node, operands[0])?,
            _ => self.apart(node).map(|turned| (out.add_typed(node.op.clone(), operands, node.ty.clone()), turned)),
        };
        if let Some((made, turned)) = found {
            self.interleaved += if turned.is_empty() { 0 } else { node.ty.elements() };
            self.turned[id.0 as usize] = turned;
            return Ok(made);
        }
        let operands: Vec<NodeId> = node.operands.iter().map(|&operand| self.in_order(out, operand)).collect::<Result<_>>()?;
        Ok(out.add_typed(node.op.clone(), &operands, node.ty.clone()))
    }

    /// Whether a concatenation along `dim` is of as many samples each.
    fn joins_samples(&self, node: &Node, dim: usize) -> bool {
        let shape = |id: NodeId| &self.graph.ty(id).shape;
        let of_samples = |id: &NodeId| self.batch[id.0 as usize].contains(&(dim as u8));
        let first = node.operands[0];
        let are_samples = |id: &NodeId| of_samples(id) && shape(*id) == shape(first);
        node.operands.len() > 1 && self.graph.ty(first).elements() > 0 && node.operands.iter().all(are_samples)
    }

    /// Where a reshape makes one dim of samples and the dim before it, along which parts were stacked: these and the dim.
    fn flattens_stack(&self, node: &Node) -> Option<(&Node, usize)> {
        let stack = &self.graph[node.operands[0]];
        let Op::Concatenate(op) = &stack.op else { return None };
        let dim = usize::from(op.dim);
        let &[parts, samples, ref rest @ ..] = &stack.ty.shape[dim..] else { return None };
        let flat: Shape = [&stack.ty.shape[..dim], &[parts * samples], rest].concat().into();
        let is_part = |id: &NodeId| {
            let own = &self.turned[id.0 as usize];
            own.is_empty() && self.graph.ty(*id).shape[dim] == 1 && self.batch[id.0 as usize].contains(&(op.dim + 1))
        };
        let is_stack = node.ty.shape == flat && stack.ty.elements() > 0 && parts > 1 && stack.operands.iter().all(is_part);
        is_stack.then_some((stack, dim))
    }

    /// A slice that takes some of the parts, or nothing of a dim that is turned.
    fn sliced(&self, out: &mut Graph, node: &Node, op: &Slice, operand: NodeId) -> Result<Option<(NodeId, AllTurned)>> {
        let turned = &self.turned[node.operands[0].0 as usize];
        let shape = &self.graph.ty(node.operands[0]).shape;
        let is_whole = |t: &&Turned| op.start[t.dim] == 0 && op.limit[t.dim] == shape[t.dim] && op.stride[t.dim] == 1;
        let (whole, cut): (Vec<&Turned>, Vec<&Turned>) = turned.iter().partition(is_whole);
        let kept: AllTurned = whole.into_iter().copied().collect();
        let [&Turned { dim, parts, inner }] = cut[..] else {
            let plain = out.add_typed(node.op.clone(), &[operand], node.ty.clone());
            return Ok(cut.is_empty().then_some((plain, kept)));
        };
        let part = shape[dim] / parts;
        let (start, limit) = (op.start[dim], op.limit[dim]);
        if op.stride[dim] != 1 || !start.is_multiple_of(part) || !limit.is_multiple_of(part) || start == limit {
            return Ok(None);
        }
        let count = (limit - start) / part;
        let apart = |sizes: &Shape, at: [u64; 3]| -> Shape { [&sizes[..dim], &at[..], &sizes[dim + 1..]].concat().into() };
        let samples = part / inner;
        let split = out.reshape(operand, &apart(shape, [samples, parts, inner]))?;
        let slice = Slice {
            start: apart(&op.start, [0, start / part, 0]),
            limit: apart(&op.limit, [samples, limit / part, inner]),
            stride: apart(&op.stride, [1, 1, 1]),
        };
        let taken = out.add(slice, &[split])?;
        let made = out.reshape(taken, &node.ty.shape)?;
        let more = (count > 1).then_some(Turned { dim, parts: count, inner });
        Ok(Some((made, kept.into_iter().chain(more).collect())))
    }

    /// A reshape that keeps samples and parts in one dim, or gives the parts one of their own.
    fn reshaped(&self, out: &mut Graph, node: &Node, operand: NodeId) -> Result<Option<(NodeId, AllTurned)>> {
        let (from, to) = (&self.graph.ty(node.operands[0]).shape, &node.ty.shape);
        let [Turned { dim, parts, inner }] = self.turned[node.operands[0].0 as usize][..] else { return Ok(None) };
        let (before, samples) = (from[..dim].iter().product::<u64>(), from[dim] / parts / inner);
        let Some(at) = (0..to.len()).find(|&at| to[at] > 1 && to[..at].iter().product::<u64>() == before) else {
            return Ok(None);
        };
        if to[at].is_multiple_of(parts * samples) {
            let made = out.reshape(operand, to)?;
            return Ok(Some((made, [Turned { dim: at, parts, inner: to[at] / (parts * samples) }].into_iter().collect())));
        }
        if to[at] != parts || to.get(at + 1).is_none_or(|next| !next.is_multiple_of(samples)) {
            return Ok(None);
        }
        let split: Shape = [&to[..at], &[samples, parts, to[at + 1] / samples], &to[at + 2..]].concat().into();
        let ordered = swapped(out, operand, &split, at)?;
        Ok(Some((out.reshape(ordered, to)?, AllTurned::new())))
    }

    /// The dims that are turned of what computes its elements apart from each other, or sums over all of them. `None`: it does not.
    fn apart(&self, node: &Node) -> Option<AllTurned> {
        let rule = self.graph.rule(node);
        let mut factors: BTreeMap<FactorId, (u64, u64)> = BTreeMap::new();
        for (operand, dims) in node.operands.iter().zip(&rule.spec.operands) {
            for turned in &self.turned[operand.0 as usize] {
                let &[factor] = &dims[turned.dim][..] else { return None };
                let of = (turned.parts, turned.inner);
                if !may_move(node, &rule, factor) || *factors.entry(factor).or_insert(of) != of {
                    return None;
                }
            }
        }
        for (operand, dims) in node.operands.iter().zip(&rule.spec.operands) {
            for (dim, own) in dims.iter().enumerate() {
                for factor in own {
                    let Some(&(parts, inner)) = factors.get(factor) else { continue };
                    let is_turned = self.turned[operand.0 as usize].contains(&Turned { dim, parts, inner });
                    if own.len() > 1 || !is_turned && !self.free[operand.0 as usize].contains(&dim) {
                        return None;
                    }
                }
            }
        }
        let mut turned = AllTurned::new();
        for (factor, (parts, inner)) in factors {
            match rule.spec.result.iter().position(|own| own.contains(&factor)) {
                Some(dim) if rule.spec.result[dim].len() == 1 => turned.push(Turned { dim, parts, inner }),
                None if matches!(node.op, Op::DotGeneral(_) | Op::Reduce(_)) => {}
                _ => return None,
            }
        }
        Some(turned)
    }

    /// What stands for `id`, in the order that the graph has it in.
    fn in_order(&mut self, out: &mut Graph, id: NodeId) -> Result<NodeId> {
        let mut made = self.made[id.0 as usize];
        if self.turned[id.0 as usize].is_empty() {
            return Ok(made);
        }
        if let Some(&known) = self.back.get(&id) {
            return Ok(known);
        }
        let shape = self.graph.ty(id).shape.clone();
        for Turned { dim, parts, inner } in self.turned[id.0 as usize].clone() {
            let samples = shape[dim] / parts / inner;
            let split: Shape = [&shape[..dim], &[samples, parts, inner], &shape[dim + 1..]].concat().into();
            let ordered = swapped(out, made, &split, dim)?;
            made = out.reshape(ordered, &shape)?;
        }
        self.given_back += self.graph.ty(id).elements();
        self.back.insert(id, made);
        Ok(made)
    }
}

/// Parts side by side behind the dim of their samples, which is then both; each has the samples at `dim` or, stacked, behind it.
fn joined(out: &mut Graph, node: &Node, operands: &[NodeId], dim: usize) -> Result<(NodeId, AllTurned)> {
    let mut parts = Vec::with_capacity(operands.len());
    for &operand in operands {
        let whole = &node.ty.shape;
        let samples = whole[dim] / operands.len() as u64;
        parts.push(out.reshape(operand, &[&whole[..dim], &[samples, 1], &whole[dim + 1..]].concat())?);
    }
    let side_by_side = out.add(Concatenate { dim: dim as u8 + 1 }, &parts)?;
    let turned = Turned { dim, parts: parts.len() as u64, inner: 1 };
    Ok((out.reshape(side_by_side, &node.ty.shape)?, [turned].into_iter().collect()))
}

/// A value of shape `split` with dims `dim` and the next in the other order.
fn swapped(out: &mut Graph, value: NodeId, split: &Shape, dim: usize) -> Result<NodeId> {
    let value = out.reshape(value, split)?;
    let mut order: Vec<usize> = (0..split.len()).collect();
    order.swap(dim, dim + 1);
    out.transpose(value, &order)
}

/// Whether an op does not know its elements along a factor by their places.
fn may_move(node: &Node, rule: &Rule, factor: FactorId) -> bool {
    !node.op.counts_positions(&rule.spec, factor) && !rule.is_whole(factor) && !rule.masked.contains(&factor)
}

/// By node, the dims along which all elements are equal, or random and read once: what reads random numbers twice reads the same.
fn free_dims(graph: &Graph) -> Vec<BTreeSet<usize>> {
    let uses = graph.uses();
    let mut free: Vec<BTreeSet<usize>> = Vec::with_capacity(graph.nodes.len());
    let mut random: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for (id, node) in graph.nodes.iter().enumerate() {
        let dims = 0..node.ty.rank();
        let is_random = matches!(node.op, Op::Uniform(_)) || node.operands.iter().any(|operand| random[operand.0 as usize]);
        free.push(match &node.op {
            _ if is_random && uses[id] > 1 => BTreeSet::new(),
            Op::Uniform(_) => dims.collect(),
            Op::Iota(op) => dims.filter(|&dim| dim != usize::from(op.dim)).collect(),
            _ if node.operands.is_empty() => BTreeSet::new(),
            _ => {
                let rule = graph.rule(node);
                dims.filter(|&dim| is_free(node, &rule, dim, &free)).collect()
            }
        });
        random.push(is_random);
    }
    free
}

/// Whether the elements of a result along `dim` are of operands' that are `free` along theirs.
fn is_free(node: &Node, rule: &Rule, dim: usize, free: &[BTreeSet<usize>]) -> bool {
    let &[factor] = &rule.spec.result[dim][..] else { return false };
    let of_operand = |(operand, dims): (&NodeId, &Vec<DimFactors>)| {
        let mut with = dims.iter().enumerate().filter(|(_, own)| own.contains(&factor));
        with.all(|(dim, own)| own.len() == 1 && free[operand.0 as usize].contains(&dim))
    };
    may_move(node, rule, factor) && node.operands.iter().zip(&rule.spec.operands).all(of_operand)
}
