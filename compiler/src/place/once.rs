//! What all microbatches share as a term of a sum over them: a loss's penalty on weights, its constants, and their gradients.

use super::{Pending, Placer};
use crate::error::{Error, Result};
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::{BroadcastInDim, Compare, Const, Iota, Op, Reduce, Select};
use crate::plan::Zero;
use dcc_program::kernel::CompareOp;
use dcc_program::{AxisList, DType, Shape, Sharding, TensorType};
use smallvec::SmallVec;
use std::collections::BTreeMap;

impl Placer<'_> {
    /// Whether what `id` adds to a sum over microbatches becomes a part of that sum. What depends on data alone does not: the whole
    /// sum is counted before the forward pass, and most likely read by what is not linear.
    pub(super) fn joins_sums(&self, id: NodeId) -> bool {
        self.plan.microbatches() > 1 && self.graph[id].phase != Phase::Update && !self.of_data[id.0 as usize]
    }

    /// Whether `value`, the placed operand of `reader`, is the same for all microbatches, so that one of them has to add it.
    pub(super) fn counts_once(&self, reader: NodeId, operand: NodeId, value: NodeId) -> bool {
        !self.reads_zero(reader, operand) && !self.per_microbatch(self.out.ty(value))
    }

    /// Whether `id`, of the gradient of what is made of weights alone, reads a sum over microbatches that does not pass through it (what is
    /// rounded, attention), or what had to wait for one: the update computes it, once.
    /// Errors: it also reads what only the passes have.
    pub(super) fn waits_for_update(
        &self,
        id: NodeId,
        values: &[NodeId],
        keepers: &BTreeMap<Pending, Vec<usize>>,
    ) -> Result<bool> {
        if self.plan.microbatches() == 1 || !self.is_gradient_of_stageless(id) {
            return Ok(false);
        }
        let is_sum = |value: NodeId| self.out.ty(value).sharding.is_pending(self.mb());
        let kept = |at: usize| keepers.iter().any(|(pending, set)| pending.0 == self.mb() && set.contains(&at));
        let waits = |at: usize| self.out[values[at]].phase == Phase::Update || is_sum(values[at]) && !kept(at);
        if !(0..values.len()).any(waits) {
            return Ok(false);
        }
        if values.iter().any(|&value| self.out[value].phase.is_pass() && !is_sum(value)) {
            let count = self.plan.microbatches();
            let what =
                format!("a gradient is needed whole, over all {count} microbatches, beside weights that are gathered for each");
            let help = match self.plan.zero {
                Zero::Parameters => "use --zero 2, which keeps weights whole, or one microbatch (--grad-accum 1)",
                _ => "use one microbatch (--grad-accum 1)",
            };
            return Err(Error::plan(what).at(self.graph.origin(self.reader)).help(help));
        }
        Ok(true)
    }

    /// Whether the update alone reads the gradient.
    pub(super) fn is_gradient_of_weight(&self, id: NodeId) -> bool {
        matches!(self.graph.grad_of(id), Some(GradOf::Value(v)) if matches!(self.graph[v].op, Op::Param(_)))
    }

    /// Takes those of a gradient's terms on `stage` that are the same for all microbatches: the update adds them to the sum of the others.
    pub(super) fn leave_to_update(&mut self, id: NodeId, stage: u32, terms: &mut Vec<NodeId>) {
        let each = |term: &NodeId| self.per_microbatch(self.out.ty(*term));
        if self.joins_sums(id) && terms.iter().any(each) && !terms.iter().all(each) {
            let (samples, once) = terms.iter().copied().partition(each);
            *terms = samples;
            self.once.insert((id, stage), once);
        }
    }

    /// `value`, which is the same for all microbatches, as a sum over them: the first adds it, all others zero.
    pub(super) fn of_first_microbatch(&mut self, value: NodeId, phase: Phase) -> NodeId {
        let (mb, count) = (self.mb(), u64::from(self.plan.microbatches()));
        let ty = self.out.ty(value).clone();
        let sharded = |dtype, shape: &[u64], rest: &[AxisList]| {
            let dims = std::iter::once(AxisList::from_slice(&[mb])).chain(rest.iter().cloned()).collect();
            TensorType::new(dtype, shape.iter().copied()).with_sharding(Sharding { dims, ..Sharding::default() })
        };
        let shape: Shape = std::iter::once(count).chain(ty.shape.iter().copied()).collect();
        let line = |dtype| sharded(dtype, &[count], &[]);
        let wide = |dtype| sharded(dtype, &shape, &ty.sharding.dims);
        let pending = ty.sharding.pending.iter().copied();
        let of_value = wide(ty.dtype).with_sharding(wide(ty.dtype).sharding.with_pending(pending.clone()));
        let sum = ty.with_sharding(ty.sharding.with_pending(pending.chain([(mb, dcc_program::Reduce::Sum)])));
        let section = self.section(phase, &[value], &sum);
        let stage = self.stage_of_step(value, section);
        let scalar = |dtype| TensorType::new(dtype, []);
        let along = |dims: std::ops::Range<u8>| BroadcastInDim { shape: shape.clone(), dims: dims.collect() };

        let number = Iota { dtype: DType::I64, shape: Shape::from_slice(&[count]), dim: 0 };
        let number = self.make(number, &[], line(DType::I64), stage, section);
        let none = self.make(Const::int(DType::I64, 0), &[], scalar(DType::I64), stage, section);
        let op = BroadcastInDim { shape: Shape::from_slice(&[count]), dims: SmallVec::new() };
        let none = self.make(op, &[none], line(DType::I64), stage, section);
        let first = self.make(Compare { op: CompareOp::Eq }, &[number, none], line(DType::Bool), stage, section);
        let first = self.make(along(0..1), &[first], wide(DType::Bool), stage, section);
        let zero = self.make(Const::of(ty.dtype, 0.0), &[], scalar(ty.dtype), stage, section);
        let zeros = self.make(along(0..0), &[zero], wide(ty.dtype), stage, section);
        let value = self.make(along(1..1 + ty.rank() as u8), &[value], of_value.clone(), stage, section);
        let terms = self.make(Select {}, &[first, value, zeros], of_value, stage, section);
        let op = Reduce { op: dcc_program::Reduce::Sum, dims: SmallVec::from_slice(&[0]) };
        self.make(op, &[terms], sum, stage, section)
    }
}

/// `placed` with what only the update reads in the update: between steps nothing of it is in memory.
pub(super) fn sink(placed: Graph) -> Result<Graph> {
    let live = placed.live();
    // Of each value, whether something else than the update reads it, or nothing does.
    let mut early: Vec<bool> = vec![false; placed.nodes.len()];
    placed.outputs.iter().for_each(|(_, id)| early[id.0 as usize] = true);
    let leaf = |op: &Op| matches!(op, Op::Param(_) | Op::Scalar(_) | Op::Input(_) | Op::Const(_));
    let mut sinks = vec![false; placed.nodes.len()];
    for id in placed.ids().rev().filter(|id| live[id.0 as usize]) {
        let (at, node) = (id.0 as usize, &placed[id]);
        sinks[at] = node.phase == Phase::Begin && !early[at] && !leaf(&node.op);
        if node.phase != Phase::Update && !sinks[at] {
            node.operands.iter().for_each(|o| early[o.0 as usize] = true);
        }
    }
    placed.map(|out, id, node, operands| {
        if sinks[id.0 as usize] {
            out.set_phase(Phase::Update);
        }
        Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()))
    })
}
