//! Sums of gradients: of a value over its uses, of a parameter over microbatches, ranks and stages, and of scalars for the norm.

use super::stack::MAX_PARTS;
use super::{Pending, Placer};
use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::{Const, GradSum, Op, StageSum};
use crate::optimizer::{NORM_SUM, NORM_TERM, TENSOR_SUM};
use dcc_program::{AxisId, AxisList, Reduce, Sharding};
use std::collections::{BTreeMap, BTreeSet};

/// Terms of one addition: a kernel has a bounded number of arguments.
const MAX_TERMS: usize = 64;

/// A value that exists on each of several stages.
pub(super) type PlacedSum = BTreeMap<u32, NodeId>;

impl Placer<'_> {
    /// The gradient of one value on `stage`: contributions of equal type are added first, then each group is resharded to the
    /// value's dims; pending reductions over space are resolved unless the value is one that every stage clones.
    pub(super) fn gradient_sum(
        &mut self,
        id: NodeId,
        operands: &[NodeId],
        stage: u32,
        phase: Phase,
        dims: &[AxisList],
    ) -> Result<NodeId> {
        let mut by_stage: BTreeMap<u32, Vec<NodeId>> = BTreeMap::new();
        for &operand in operands {
            let home = self.stage[operand.0 as usize].filter(|_| !self.is_constant(operand));
            by_stage.entry(home.unwrap_or(stage)).or_default().push(operand);
        }
        let mut values = Vec::new();
        for (home, operands) in by_stage {
            let mut here = Vec::new();
            for operand in operands {
                here.push(self.value(operand, home, phase, Some(dims))?);
            }
            if home != stage {
                let sum = self.add_up(id, here, home, phase, dims)?;
                here = vec![self.transfer(sum, stage, phase)?];
            }
            values.extend(here);
        }
        if self.is_gradient_of_weight(id) {
            self.leave_to_update(id, stage, &mut values);
        }
        let waits = values.iter().any(|value| self.out[*value].phase == Phase::Update);
        let phase = if waits { Phase::Update } else { phase };
        for value in values.iter_mut().filter(|_| waits) {
            *value = self.over_microbatches(*value)?;
        }
        let mut sum = self.add_up(id, values, stage, phase, dims)?;
        if self.is_gradient_of_stageless(id) {
            return Ok(sum);
        }
        if self.graph.ty(id).elements() > 1 {
            let mb = self.mb();
            let sharding = &self.out.ty(sum).sharding;
            let sharding = sharding.with_pending(sharding.pending.iter().copied().filter(|p| p.0 == mb));
            sum = self.reshard(sum, &sharding, phase)?;
        }
        self.gradients.insert(sum);
        Ok(sum)
    }

    fn add_up(&mut self, id: NodeId, values: Vec<NodeId>, stage: u32, phase: Phase, dims: &[AxisList]) -> Result<NodeId> {
        let mut groups: Vec<(Sharding, Vec<NodeId>)> = Vec::new();
        for value in values {
            let sharding = self.out.ty(value).sharding.clone();
            match groups.iter_mut().find(|(s, _)| *s == sharding) {
                Some((_, members)) => members.push(value),
                None => groups.push((sharding, vec![value])),
            }
        }
        let mut sums = Vec::new();
        for (_, members) in groups {
            let sum = self.sum_of(id, &members, stage, phase);
            sums.push(sum);
        }
        if let ([sum], true) = (&sums[..], self.is_gradient_of_stageless(id)) {
            // Laid out as the parameter by the update, once for all microbatches.
            return Ok(*sum);
        }
        let all = |p: &Pending, out: &Graph| sums.iter().all(|&s| out.ty(s).sharding.pending.contains(p));
        let used: Vec<AxisId> = dims.iter().flatten().copied().collect();
        let any: BTreeSet<Pending> = sums.iter().flat_map(|&s| self.out.ty(s).sharding.pending.iter().copied()).collect();
        // What some terms wait for, all do where the update alone sums up, and no term can know the other microbatches.
        let joins = phase != Phase::Update && self.joins_sums(id);
        let once = |p: &Pending| joins && (p.0 == self.mb() || self.is_gradient_of_stageless(id));
        let common: Vec<Pending> = any.into_iter().filter(|p| once(p) || all(p, &self.out)).collect();
        let common = common.into_iter().filter(|p| !used.contains(&p.0));
        let want = Sharding { dims: dims.to_vec().into(), pending: Default::default() }.with_pending(common);
        for sum in &mut sums {
            *sum = self.reshard(*sum, &want, phase)?;
        }
        Ok(self.sum_of(id, &sums, stage, phase))
    }

    pub(super) fn sum_of(&mut self, id: NodeId, values: &[NodeId], stage: u32, phase: Phase) -> NodeId {
        self.out.set_origin_of(self.graph, id);
        let values = &self.stacked(values, stage, phase)[..];
        if let [one] = values {
            return *one;
        }
        if values.len() > MAX_TERMS {
            let groups = match self.parts(values) {
                // Written to their places by one kernel, most likely.
                Some(parts) if parts.len() <= MAX_PARTS => None,
                Some(parts) => Some(self.neighbours(id, parts, stage, phase)),
                None => Some(values.chunks(MAX_TERMS).map(|part| self.sum_of(id, part, stage, phase)).collect()),
            };
            if let Some(groups) = groups {
                return self.sum_of(id, &groups, stage, phase);
            }
        }
        let ty = self.out.ty(values[0]).clone();
        let section = self.section(phase, values, &ty);
        self.out.set_origin_of(self.graph, id);
        let op = match &self.graph[id].op {
            Op::GradSum(op) => op.clone(),
            _ => GradSum { of: id.0 },
        };
        self.make(op, values, ty, stage, section)
    }

    /// The finished gradient of a parameter on `stage`: over its uses, microbatches, ranks, and the other stages that read it.
    pub(super) fn parameter_gradient(&mut self, id: NodeId, stage: u32) -> Result<NodeId> {
        if let Some(&found) = self.sums.get(&id).and_then(|sums| sums.get(&stage)) {
            return Ok(found);
        }
        let param = match self.graph.grad_of(id) {
            Some(GradOf::Value(param)) => param,
            _ => return Err(self.graph.broken(id, "a gradient sum read by the update is not of a parameter")),
        };
        let stages: Vec<u32> = self.reach[id.0 as usize].iter().copied().collect();
        let holders = self.param_stages(param);
        let dims = self.update_dims(param);
        let mut chunks: BTreeMap<u32, Vec<NodeId>> = BTreeMap::new();
        for &home in &stages {
            let sum = self.compute(id, home, Phase::Backward, None)?;
            let sum = self.reduce_early(sum, param)?;
            let once = self.once.remove(&(id, home)).unwrap_or_default();
            chunks.entry(self.first_chunk(home)).or_default().extend(std::iter::once(sum).chain(once));
        }
        let mut parts = PlacedSum::new();
        for (home, sums) in chunks {
            let sum = self.over_chunks(id, sums, home, &dims)?;
            let want = Sharding { dims: dims.clone().into(), pending: Default::default() };
            // The sum of the only microbatch is reduced while backward goes on.
            let phase = if self.plan.microbatches() == 1 { self.out[sum].phase } else { Phase::Update };
            parts.insert(home, self.reshard(sum, &want, phase)?);
        }
        let alone = parts.len() == 1 && parts.keys().eq(&holders);
        let sums = if alone { parts } else { self.stage_sum(parts, id, &holders) };
        self.sums.insert(id, sums);
        Ok(self.sums[&id][&stage])
    }

    /// What the chunks of a rank add to a gradient, and what is the same for all microbatches: to one accumulator where they are laid out
    /// alike, else added by the update.
    fn over_chunks(&mut self, id: NodeId, mut sums: Vec<NodeId>, home: u32, dims: &[AxisList]) -> Result<NodeId> {
        if let [one] = sums[..] {
            return Ok(one);
        }
        let (mb, ty) = (self.mb(), self.out.ty(sums[0]).clone());
        let alike = ty.sharding.is_pending(mb) && sums.iter().all(|&sum| *self.out.ty(sum) == ty);
        if alike && self.plan.microbatches() > 1 {
            self.out.set_origin_of(self.graph, id);
            return Ok(self.make(GradSum { of: id.0 }, &sums, ty, home, Phase::Backward));
        }
        for sum in &mut sums {
            *sum = self.over_microbatches(*sum)?;
        }
        self.add_up(id, sums, home, Phase::Update, dims)
    }

    /// The value with its sum over microbatches, as the update has it.
    fn over_microbatches(&mut self, value: NodeId) -> Result<NodeId> {
        let (mb, sharding) = (self.mb(), &self.out.ty(value).sharding);
        let whole = sharding.with_pending(sharding.pending.iter().copied().filter(|p| p.0 != mb));
        self.reshard(value, &whole, Phase::Update)
    }

    /// One launch: `parts` summed over their stages and whole on each of `stages` (a stage without a part adds zero).
    fn stage_sum(&mut self, mut parts: PlacedSum, id: NodeId, stages: &[u32]) -> PlacedSum {
        let all: Vec<u32> = stages
            .iter()
            .copied()
            .chain(parts.keys().copied())
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect();
        let first = *parts.values().next().expect("a sum has a part");
        let ty = self.out.ty(first).clone();
        for &stage in &all {
            parts.entry(stage).or_insert_with(|| {
                let dtype = ty.dtype;
                self.out.set_origin_of(self.graph, id);
                let scalar = dcc_program::TensorType::new(dtype, []);
                let zero = self.make(Const::of(dtype, 0.0), &[], scalar, stage, Phase::Update);
                if ty.rank() == 0 {
                    return zero;
                }
                let op = crate::ops::BroadcastInDim { shape: ty.shape.clone(), dims: Default::default() };
                self.make(op, &[zero], ty.clone(), stage, Phase::Update)
            });
        }
        let operands: Vec<NodeId> = parts.values().copied().collect();
        let op = StageSum { reduce: Reduce::Sum, stages: all.iter().copied().collect() };
        self.out.set_origin_of(self.graph, id);
        let make = |placer: &mut Self, stage| placer.make(op.clone(), &operands, ty.clone(), stage, Phase::Update);
        all.iter().map(|&stage| (stage, make(self, stage))).collect()
    }

    /// Whether an update node is a sum of scalars of several parameters: the squared norm of all, or of the pieces of one.
    pub(super) fn is_scalar_sum(&self, id: NodeId) -> bool {
        matches!(self.graph[id].op, Op::GradSum(GradSum { of: NORM_SUM | TENSOR_SUM }))
    }

    /// A gradient as the norm reads it: a rank's shard, even where the gradient is whole.
    pub(super) fn norm_term(&mut self, id: NodeId, stage: u32) -> Result<NodeId> {
        let gradient = self.value(self.graph[id].operands[0], stage, Phase::Update, None)?;
        let param = match self.graph.grad_of(id) {
            Some(GradOf::Value(param)) => param,
            _ => return Err(self.graph.broken(id, "a term of the gradient norm is of no parameter")),
        };
        let want = Sharding { dims: self.shard_dims(param).into(), pending: Default::default() };
        self.reshard(gradient, &want, Phase::Update)
    }

    /// The sum of scalars: terms on the stage that owns their parameter, pending over the axes these are sharded on, one
    /// all_reduce per stage, one sum over stages. What is of one tensor is summed by each stage that holds all of it, for itself.
    pub(super) fn scalar_sum(&mut self, id: NodeId, stage: u32) -> Result<NodeId> {
        if let Some(&found) = self.sums.get(&id).and_then(|sums| sums.get(&stage)) {
            return Ok(found);
        }
        let terms = self.graph[id].operands.clone();
        let holders: Vec<Vec<u32>> = terms.iter().map(|&term| self.holders(term)).collect::<Result<_>>()?;
        let of_all = matches!(self.graph[id].op, Op::GradSum(GradSum { of: NORM_SUM }));
        let alone = !of_all && holders.iter().all(|stages| *stages == holders[0]);
        let mut homes: BTreeMap<u32, Vec<NodeId>> = BTreeMap::new();
        for (&term, stages) in terms.iter().zip(&holders) {
            for &home in &stages[..if alone { stages.len() } else { 1 }] {
                let value = self.value(term, home, Phase::Update, None)?;
                homes.entry(home).or_default().push(value);
            }
        }
        let mut parts = PlacedSum::new();
        for (home, values) in homes {
            let sum = self.scalar_sum_on(id, values, home)?;
            parts.insert(home, sum);
        }
        let everywhere: Vec<u32> = match of_all {
            true => (0..self.plan.stages()).collect(),
            false => holders.into_iter().flatten().collect::<std::collections::BTreeSet<_>>().into_iter().collect(),
        };
        let sums = if alone || everywhere.len() == 1 { parts } else { self.stage_sum(parts, id, &everywhere) };
        self.sums.insert(id, sums);
        Ok(self.sums[&id][&stage])
    }

    fn scalar_sum_on(&mut self, id: NodeId, mut values: Vec<NodeId>, stage: u32) -> Result<NodeId> {
        let axes: std::collections::BTreeSet<Pending> =
            values.iter().flat_map(|&v| self.out.ty(v).sharding.pending.iter().copied()).collect();
        let pending = Sharding::default().with_pending(axes);
        for value in &mut values {
            *value = self.reshard(*value, &pending, Phase::Update)?;
        }
        let sum = self.sum_of(id, &values, stage, Phase::Update);
        self.reshard(sum, &Sharding::default(), Phase::Update)
    }

    /// The stages that hold the parameter that a scalar is of, smallest first.
    fn holders(&self, scalar: NodeId) -> Result<Vec<u32>> {
        let mut id = scalar;
        loop {
            let node = &self.graph[id];
            match (&node.op, self.graph.grad_of(id)) {
                (Op::GradSum(GradSum { of: NORM_TERM }), Some(GradOf::Value(param))) => return Ok(self.param_stages(param)),
                _ => {
                    id = *node
                        .operands
                        .first()
                        .ok_or_else(|| self.graph.broken(scalar, "a sum over parameters of what is of none"))?
                }
            }
        }
    }
}
