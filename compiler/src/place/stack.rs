//! Sums of many terms, as unrolled recurrences have them.
//!
//! Products that are added up become one: the gradient of a weight that every step reads is a sum of products over few samples each,
//! `Σ_t a_tᵀ b_t`, which is the product of all `a_t` one after the other and all `b_t`. Gradients of parts (of the steps' inputs) are
//! added up in groups of neighbours, each a value that no kernel needs too many arguments to put together.

use super::Placer;
use crate::graph::{NodeId, Phase};
use crate::ops::{Concatenate, DotGeneral, Op, Pad, Reshape};
use dcc_program::{FactorSpec, Sharding, TensorType};

/// Fewer products are added up.
const FEWEST: usize = 4;

/// A product that sums over more is fast by itself, and its operands would take much memory until all are there.
const ROWS: u64 = 64;

/// What one kernel puts together: it has a bounded number of arguments.
pub(super) const MAX_PARTS: usize = 192;

impl Placer<'_> {
    /// `values`, the terms of a sum on `stage`, with one product in the place of each group of products that are alike, where moving the
    /// operands takes less than what the products would write.
    pub(super) fn stacked(&mut self, values: &[NodeId], stage: u32, phase: Phase) -> Vec<NodeId> {
        let mut groups: Vec<Vec<NodeId>> = Vec::new();
        for &value in values {
            match groups.iter_mut().find(|group| self.stacks_with(group[0], value)) {
                Some(group) => group.push(value),
                None => groups.push(vec![value]),
            }
        }
        let mut terms = Vec::with_capacity(groups.len());
        for group in groups {
            for group in group.chunks(MAX_PARTS) {
                match group.len() >= FEWEST {
                    true => terms.push(self.stack(group, stage, phase)),
                    false => terms.extend(group),
                }
            }
        }
        terms
    }

    fn stacks_with(&self, first: NodeId, other: NodeId) -> bool {
        let (a, b) = (&self.out[first], &self.out[other]);
        let Op::DotGeneral(DotGeneral { spec, .. }) = &a.op else { return false };
        let ty = |id: &NodeId| self.out.ty(*id);
        let moved: u64 = a.operands.iter().map(|o| ty(o).elements()).sum();
        let dims = spec.operands[0].iter().zip(&ty(&a.operands[0]).shape);
        let rows: u64 = dims.filter(|(dim, _)| !spec.in_result(dim[0])).map(|(_, &size)| size).product();
        rows <= ROWS
            && moved <= a.ty.elements()
            && a.op == b.op
            && (a.phase, a.stage) == (b.phase, b.stage)
            && a.operands.iter().map(ty).eq(b.operands.iter().map(ty))
    }

    /// One product for several that are alike.
    fn stack(&mut self, products: &[NodeId], stage: u32, phase: Phase) -> NodeId {
        let node = self.out[products[0]].clone();
        let Op::DotGeneral(DotGeneral { spec, wide }) = &node.op else { unreachable!("only products are grouped") };
        let terms = (0..).map(|i| format!("t{i}")).find(|name| !spec.names.contains(name)).expect("some name is free");
        let operand = |i: usize| format!("{terms} {}", spec.dims_text(&spec.operands[i]));
        let text = format!("{}, {} -> {}", operand(0), operand(1), spec.dims_text(&spec.result));
        let spec = FactorSpec::parse(&text).expect("a spec of known factors parses");
        let sides: Vec<NodeId> = (0..2).map(|side| self.side(products, side, stage, phase)).collect();
        let section = self.section(phase, &sides, &node.ty);
        self.make(DotGeneral { spec, wide: *wide }, &sides, node.ty, stage, section)
    }

    /// Operand `side` of all products, along a new first dim.
    fn side(&mut self, products: &[NodeId], side: usize, stage: u32, phase: Phase) -> NodeId {
        let part = self.out.ty(self.out[products[0]].operands[side]).clone();
        let stacked = |count: u64| TensorType {
            dtype: part.dtype,
            shape: [count].into_iter().chain(part.shape.iter().copied()).collect(),
            sharding: Sharding {
                dims: [Default::default()].into_iter().chain(part.sharding.dims.iter().cloned()).collect(),
                pending: part.sharding.pending.clone(),
            },
        };
        let (one, all) = (stacked(1), stacked(products.len() as u64));
        let mut parts = Vec::with_capacity(products.len());
        for product in products {
            let operand = self.out[*product].operands[side];
            let section = self.section(phase, &[operand], &one);
            parts.push(self.make(Reshape { shape: one.shape.clone() }, &[operand], one.clone(), stage, section));
        }
        let section = self.section(phase, &parts, &all);
        self.make(Concatenate { dim: 0 }, &parts, all, stage, section)
    }

    /// The dim along which `values` are parts with zeros around them; where each part begins.
    pub(super) fn parts(&self, values: &[NodeId]) -> Option<Vec<(usize, u64, NodeId)>> {
        let padded = |value: &NodeId| match &self.out[*value].op {
            Op::Pad(pad) => pad.along().map(|dim| (dim, pad.low[dim], *value)),
            _ => None,
        };
        let parts: Vec<(usize, u64, NodeId)> = values.iter().map(padded).collect::<Option<_>>()?;
        let dim = parts[0].0;
        let whole = self.out.ty(values[0]).sharding.dims[dim].is_empty();
        (whole && parts.iter().all(|part| part.0 == dim)).then_some(parts)
    }

    /// The sums of groups of such parts, again with zeros around them: neighbours are added up where only they have elements.
    pub(super) fn neighbours(
        &mut self,
        id: NodeId,
        mut parts: Vec<(usize, u64, NodeId)>,
        stage: u32,
        phase: Phase,
    ) -> Vec<NodeId> {
        let dim = parts[0].0;
        parts.sort_by_key(|part| part.1);
        let even = parts.len().div_ceil(parts.len().div_ceil(MAX_PARTS));
        parts.chunks(even).map(|group| self.neighbourhood(id, dim, group, stage, phase)).collect()
    }

    /// The sum of pads along `dim`, which begin at the second of each.
    fn neighbourhood(&mut self, id: NodeId, dim: usize, group: &[(usize, u64, NodeId)], stage: u32, phase: Phase) -> NodeId {
        let ty = self.out.ty(group[0].2).clone();
        let first = group[0].1;
        let end = |out: &crate::graph::Graph, &(_, start, value): &(usize, u64, NodeId)| {
            start + out.ty(out[value].operands[0]).shape[dim]
        };
        let last = group.iter().map(|part| end(&self.out, part)).max().expect("a group has a part");
        let mut near = ty.clone();
        near.shape[dim] = last - first;
        let around = |low: u64, high: u64| {
            let zeros = |n: u64| (0..ty.rank()).map(|d| if d == dim { n } else { 0 }).collect();
            Pad { low: zeros(low), high: zeros(high), interior: zeros(0) }
        };
        let mut terms = Vec::with_capacity(group.len());
        for part in group {
            let pad = around(part.1 - first, last - end(&self.out, part));
            let operand = self.out[part.2].operands[0];
            let section = self.section(phase, &[operand], &near);
            terms.push(self.make(pad, &[operand], near.clone(), stage, section));
        }
        let sum = self.sum_of(id, &terms, stage, phase);
        let section = self.section(phase, &[sum], &ty);
        self.make(around(first, ty.shape[dim] - last), &[sum], ty, stage, section)
    }
}
