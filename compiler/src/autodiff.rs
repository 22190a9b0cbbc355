//! Reverse-mode differentiation of the logical graph, before anything is placed: collectives never need a gradient.
//!
//! New nodes are in phase backward and stand where their forward node came from. What `place` relies on, for every new node:
//! - `GradOf::Op(f)`: its rule's factors have the names of f's rule and correspond, so f's strategy applies by name. Holds for
//!   pointwise ops of f's dims; for ops with a spec (dot, gather and scatter_add, attention), whose gradients keep the names; and
//!   for broadcast ↔ reduce, reshape, slice ↔ pad, concatenate → slice, reverse and cumsum, whose positional names agree in both
//!   directions (`f0 d0 …`; the `w…` and `x…` of unshardable dims do not, and never carry an axis).
//! - `GradOf::Value(v)`: its result has v's dims, one by one. Holds for `GradSum { of: v }` and for the few nodes without such
//!   names: gradients of transposes (v = the operand) and what max, min and prod compute of their reduced result (v = the result).
//!
//! f and v are of the forward pass, or earlier nodes of the same gradient.
//! - The gradient of a value is one n-ary `GradSum` even of one contribution, the loss's included.
//!
//! No gradient passes through integers, bool, `StopGradient` or functions that are constant between their jumps (floor, sign).

mod sums;

use crate::error::{Error, Result};
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::movement::Dims;
use crate::ops::{Const, GradSum, Op};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use sums::Factors;

/// Whether the gradients of several values may share a sum over samples, which is then read on another stage than that of its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    Shared,
    #[default]
    Own,
}

/// The gradients of `loss` (a float scalar) with respect to the nodes `wrt`; those that `loss` does not depend on are absent.
///
/// Errors: a loss that is no float scalar, an op on the way without a gradient.
pub fn gradients(graph: &mut Graph, loss: NodeId, wrt: &[NodeId]) -> Result<BTreeMap<NodeId, NodeId>> {
    gradients_times(graph, loss, None, wrt, Sums::Shared)
}

/// The same times `scale`, a scalar of the loss's dtype.
pub fn gradients_times(
    graph: &mut Graph,
    loss: NodeId,
    scale: Option<NodeId>,
    wrt: &[NodeId],
    sums: Sums,
) -> Result<BTreeMap<NodeId, NodeId>> {
    let ty = graph.ty(loss).clone();
    if !ty.dtype.is_float() || ty.rank() != 0 {
        let what = format!("the gradient of {}{:?}, which is no float scalar", ty.dtype.name(), ty.shape.as_slice());
        return Err(Error::shape(what).at(graph.origin(loss)));
    }
    let before = graph.cursor();
    let mut grad = Grad::new(graph, loss, wrt, sums);
    let seed = match scale {
        Some(scale) => scale,
        None => grad.graph.add(Const::float(ty.dtype, 1.0), &[])?,
    };
    grad.contributions[loss.0 as usize].push(seed);
    let found = grad.run(wrt);
    graph.set_cursor(before);
    found
}

/// The gradient graph under construction: what [`crate::ops::OpDef::grad`] builds with. It is the graph, plus where contributions go.
pub struct Grad<'a> {
    graph: &'a mut Graph,
    /// By forward node: whether it depends on what is differentiated for.
    needs: Vec<bool>,
    /// By forward node: whether it depends on an input.
    batched: Vec<bool>,
    /// By forward node.
    contributions: Vec<Vec<NodeId>>,
    /// The forward node whose op is being differentiated.
    node: NodeId,
    sums: Sums,
    /// Sums over dims that several gradients are multiples of, by the factors of what is summed.
    shared: BTreeMap<(Factors, Dims), NodeId>,
}

impl Deref for Grad<'_> {
    type Target = Graph;
    fn deref(&self) -> &Graph {
        self.graph
    }
}

impl DerefMut for Grad<'_> {
    fn deref_mut(&mut self) -> &mut Graph {
        self.graph
    }
}

impl<'a> Grad<'a> {
    fn new(graph: &'a mut Graph, loss: NodeId, wrt: &[NodeId], sums: Sums) -> Grad<'a> {
        let mut needs = vec![false; graph.nodes.len()];
        for &id in wrt {
            needs[id.0 as usize] = graph.ty(id).dtype.is_float();
        }
        let mut batched = vec![false; graph.nodes.len()];
        for id in graph.ids() {
            let node = &graph[id];
            batched[id.0 as usize] = matches!(node.op, Op::Input(_)) || node.operands.iter().any(|o| batched[o.0 as usize]);
            let passes = node.ty.dtype.is_float() && !matches!(node.op, Op::StopGradient(_));
            needs[id.0 as usize] |= passes && node.operands.iter().any(|o| needs[o.0 as usize]);
        }
        let contributions = vec![Vec::new(); graph.nodes.len()];
        let mut grad = Grad { graph, needs, batched, contributions, node: loss, sums, shared: BTreeMap::new() };
        grad.enter(loss);
        grad
    }

    /// What is added next belongs to the gradient of `node`'s op.
    fn enter(&mut self, node: NodeId) {
        self.node = node;
        let origin = self.graph.origin(node).to_owned();
        self.graph.set_origin(&origin);
        self.graph.set_phase(Phase::Backward);
        self.graph.set_grad_of(Some(GradOf::Op(node)));
    }

    fn run(&mut self, wrt: &[NodeId]) -> Result<BTreeMap<NodeId, NodeId>> {
        let mut sums = BTreeMap::new();
        for index in (0..self.needs.len()).rev() {
            let node = NodeId(index as u32);
            if !self.needs[index] || self.contributions[index].is_empty() {
                continue;
            }
            let contributions = std::mem::take(&mut self.contributions[index]);
            self.enter(node);
            let dy = self.of_value(node, |g| g.add(GradSum { of: node.0 }, &contributions))?;
            if wrt.contains(&node) {
                sums.insert(node, dy);
            }
            if self[node].operands.iter().any(|o| self.needs[o.0 as usize]) {
                let op = self[node].op.clone();
                op.grad(self, node, dy)?;
            }
        }
        self.rest(wrt, &mut sums)?;
        Ok(sums)
    }

    /// Adds zero for the pieces of a tensor that the loss does not depend on, where it depends on others: an update is of all of it.
    fn rest(&mut self, wrt: &[NodeId], sums: &mut BTreeMap<NodeId, NodeId>) -> Result<()> {
        let tensor = |id: NodeId| match &self.graph[id].op {
            Op::Param(param) if param.piece.is_some() => Some(param.name.clone()),
            _ => None,
        };
        let moved: BTreeSet<String> = sums.keys().filter_map(|&id| tensor(id)).collect();
        let is_rest = |id: &NodeId| !sums.contains_key(id) && tensor(*id).is_some_and(|name| moved.contains(&name));
        for id in wrt.iter().copied().filter(is_rest).collect::<Vec<_>>() {
            self.enter(id);
            let ty = self.graph.ty(id).clone();
            let zero = self.of_value(id, |g| {
                let zero = g.add(Const::float(ty.dtype, 0.0), &[])?;
                let zeros = g.broadcast(zero, &ty.shape, &[])?;
                g.add(GradSum { of: id.0 }, &[zeros])
            })?;
            sums.insert(id, zero);
        }
        Ok(())
    }

    /// Operand `i` of the node being differentiated.
    pub fn operand(&self, i: usize) -> NodeId {
        self.graph[self.node].operands[i]
    }

    pub fn needs(&self, i: usize) -> bool {
        self.needs[self.operand(i).0 as usize]
    }

    /// Whether the gradient of a value of the forward pass varies with the batch and is asked for.
    fn varies(&self, value: NodeId) -> bool {
        let at = value.0 as usize;
        self.batched.get(at).is_some_and(|batched| *batched && self.needs[at])
    }

    /// Adds what `build` makes to the gradient of operand `i`, if that is asked for.
    pub fn give(&mut self, i: usize, build: impl FnOnce(&mut Self) -> Result<NodeId>) -> Result<()> {
        if !self.needs(i) {
            return Ok(());
        }
        let contribution = build(self)?;
        let operand = self.operand(i);
        let (from, to) = (self.ty(contribution), self.ty(operand));
        if from.dtype != to.dtype || from.shape != to.shape {
            return Err(self.broken(contribution, "a gradient of another type than its value"));
        }
        self.contributions[operand.0 as usize].push(contribution);
        Ok(())
    }

    /// What `build` adds is stamped with `GradOf::Value(v)`: its results have v's dims.
    pub fn of_value<T>(&mut self, v: NodeId, build: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.graph.set_grad_of(Some(GradOf::Value(v)));
        let built = build(self);
        let node = self.node;
        self.graph.set_grad_of(Some(GradOf::Op(node)));
        built
    }

    /// What `build` adds is stamped with `GradOf::Op(f)`: its rules have the factors of `f`'s, a node of this gradient or before.
    pub fn like<T>(&mut self, f: NodeId, build: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.graph.set_grad_of(Some(GradOf::Op(f)));
        let built = build(self);
        let node = self.node;
        self.graph.set_grad_of(Some(GradOf::Op(node)));
        built
    }

    /// Runs `build` with new nodes in the forward pass, for results of the forward op that only its gradient reads.
    pub fn in_forward<T>(&mut self, build: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let phase = self.graph[self.node].phase;
        self.graph.set_phase(phase);
        self.graph.set_grad_of(None);
        let built = build(self);
        let node = self.node;
        self.enter(node);
        built
    }
}
