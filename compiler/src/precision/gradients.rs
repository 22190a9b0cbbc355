//! Gradients of parameters in mixed precision: accumulated and reduced in f32, or in the half type.
//!
//! What autodiff gives is the gradient of each cast of a parameter, rounded to half floats as often as the parameter is read, then cast.
//! In f32 the products that it is a sum of are summed and kept in the width that they are accumulated in, so that the cast of a parameter
//! has no gradient of its own: microbatches, ranks and several uses add up in f32.

use super::Mixed;
use super::mixed::moves;
use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Operands, Phase};
use crate::ops::{Convolution, DotGeneral, GradSum, Op};
use dcc_program::DType;
use rustc_hash::FxHashMap;

/// For each of `params` and its gradient: the gradient in the parameter's dtype, whose sum over microbatches and ranks is in
/// `mixed.gradients`. A parameter that f32 operators read too keeps f32 sums.
pub fn sums(graph: &mut Graph, params: &[NodeId], gradients: &[NodeId], mixed: Mixed) -> Result<Vec<NodeId>> {
    let before = graph.cursor();
    let mut readers = vec![0; graph.nodes.len()];
    for id in graph.ids() {
        graph[id].operands.iter().for_each(|o| readers[o.0 as usize] += 1);
    }
    let mut pass = Pass { graph, readers, half: mixed.half };
    let each = params.iter().zip(gradients).map(|(&param, &gradient)| match mixed.gradients == mixed.half {
        true => pass.half_sum(param, gradient),
        false => pass.wide_sum(param, gradient),
    });
    let found = each.collect();
    graph.set_cursor(before);
    found
}

struct Pass<'a> {
    graph: &'a mut Graph,
    readers: Vec<u32>,
    half: DType,
}

impl Pass<'_> {
    /// The half floats that are cast to `id`.
    fn source(&self, id: NodeId) -> Option<NodeId> {
        let node = &self.graph[id];
        let source = *node.operands.first()?;
        (matches!(node.op, Op::Cast(_)) && self.graph.ty(source).dtype == self.half).then_some(source)
    }

    /// The terms of a gradient sum, or the value itself.
    fn terms(&self, id: NodeId) -> Operands {
        let node = &self.graph[id];
        if matches!(node.op, Op::GradSum(_)) { node.operands.clone() } else { Operands::from_slice(&[id]) }
    }

    fn wide_sum(&mut self, param: NodeId, gradient: NodeId) -> Result<NodeId> {
        let mut wide = Operands::new();
        for term in self.terms(gradient) {
            match self.source(term) {
                Some(source) if self.readers[source.0 as usize] == 1 => {
                    let of = self.value_of(source);
                    for half in self.terms(source) {
                        wide.push(self.wide(half, of)?);
                    }
                }
                _ => wide.push(term),
            }
        }
        self.stamp(gradient);
        self.graph.add(GradSum { of: param.0 }, &wide)
    }

    fn half_sum(&mut self, param: NodeId, gradient: NodeId) -> Result<NodeId> {
        let sources: Option<Vec<NodeId>> = self.terms(gradient).into_iter().map(|term| self.source(term)).collect();
        let Some(sources) = sources else { return self.wide_sum(param, gradient) };
        let halves: Operands = sources.into_iter().flat_map(|source| self.terms(source)).collect();
        self.stamp(gradient);
        let sum = self.graph.add(GradSum { of: param.0 }, &halves)?;
        let dtype = self.graph.ty(param).dtype;
        self.graph.set_phase(Phase::Update);
        self.graph.set_grad_of(Some(GradOf::Value(param)));
        self.graph.cast(sum, dtype)
    }

    /// The value that a gradient sum is the gradient of; for anything else, itself.
    fn value_of(&self, id: NodeId) -> NodeId {
        match self.graph[id].op {
            Op::GradSum(GradSum { of }) => NodeId(of),
            _ => id,
        }
    }

    /// The half floats of `id`, which has the dims of the value `of`, as they were before they were rounded.
    fn wide(&mut self, id: NodeId, of: NodeId) -> Result<NodeId> {
        let mut made: FxHashMap<NodeId, NodeId> = FxHashMap::default();
        let mut open = vec![(id, of, false)];
        while let Some((id, of, is_open)) = open.pop() {
            let node = self.graph[id].clone();
            let new = match node.op {
                _ if self.readers[id.0 as usize] > 1 => self.cast(id, of)?,
                Op::Cast(_) if self.graph.ty(node.operands[0]).dtype == DType::F32 => node.operands[0],
                Op::DotGeneral(op) => self.remade(id, DotGeneral { wide: true, ..op }.into(), &node.operands)?,
                Op::Convolution(op) => self.remade(id, Convolution { wide: true, ..op }.into(), &node.operands)?,
                op if !moves(&op) && !matches!(op, Op::GradSum(_)) => self.cast(id, of)?,
                op if is_open => {
                    let operands: Operands = node.operands.iter().map(|operand| made[operand]).collect();
                    self.remade(id, op, &operands)?
                }
                op => {
                    let sum = matches!(op, Op::GradSum(_));
                    let within = |operand| if sum { self.value_of(id) } else { self.value_of(operand) };
                    open.push((id, of, true));
                    open.extend(node.operands.iter().rev().map(|&operand| (operand, within(operand), false)));
                    continue;
                }
            };
            made.insert(id, new);
        }
        Ok(made[&id])
    }

    fn cast(&mut self, id: NodeId, of: NodeId) -> Result<NodeId> {
        self.stamp(id);
        self.graph.set_grad_of(Some(GradOf::Value(of)));
        self.graph.cast(id, DType::F32)
    }

    fn remade(&mut self, like: NodeId, op: Op, operands: &[NodeId]) -> Result<NodeId> {
        self.stamp(like);
        self.graph.add(op, operands)
    }

    /// What is added next stands where `like` does.
    fn stamp(&mut self, like: NodeId) {
        let (phase, origin, of) = (self.graph[like].phase, self.graph.origin(like).to_owned(), self.graph.grad_of(like));
        self.graph.set_origin(&origin);
        self.graph.set_phase(phase);
        self.graph.set_grad_of(of);
    }
}
