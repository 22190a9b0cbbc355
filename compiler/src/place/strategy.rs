//! Which strategy a node is computed with: planned, inherited, or that of its operands.

use super::{Placer, dims_of};
use crate::error::Result;
use crate::graph::{GradOf, NodeId, Phase};
use crate::ops::{Op, Rule};
use crate::plan::Strategy;
use dcc_program::{AxisId, AxisList, FactorSpec, Reduce};
use rustc_hash::FxHashMap;

impl Placer<'_> {
    /// The strategy of logical `id`, whose placed operands are `values` (`None` for sources, which follow).
    pub(super) fn choose(
        &mut self,
        id: NodeId,
        rule: &Rule,
        values: &[Option<NodeId>],
        (stage, phase): (u32, Phase),
    ) -> Result<Strategy> {
        if self.graph[id].phase == Phase::Forward {
            if let Some(planned) = self.plan.strategies.get(&id) {
                return Ok(planned.clone());
            }
        } else if let Some(inherited) = self.graph.grad_of(id).and_then(|of| self.inherit(id, rule, of)) {
            return self.by_samples(id, rule, inherited, (stage, phase));
        }
        let lie = |value: &Option<NodeId>| value.map(|value| self.out.ty(value).sharding.dims.to_vec());
        let mut lies: Vec<Option<Vec<AxisList>>> = values.iter().map(lie).collect();
        if lies.iter().all(Option::is_none) {
            // What is made of nothing but sources lies as what these are made of.
            let mut known = FxHashMap::default();
            for (lies, operand) in lies.iter_mut().zip(self.contributions(id, stage)) {
                *lies = Some(self.lies(operand, (stage, phase), &mut known)?);
            }
        }
        Ok(self.follow(rule, &lies))
    }

    /// The axes of each dim of `id`, or, of a source, those that it has where nobody wants it otherwise.
    fn lies(
        &mut self,
        id: NodeId,
        (stage, phase): (u32, Phase),
        known: &mut FxHashMap<NodeId, Vec<AxisList>>,
    ) -> Result<Vec<AxisList>> {
        if let Some(found) = known.get(&id) {
            return Ok(found.clone());
        }
        let dims = if self.is_source(id) {
            let rule = self.rule(id);
            let operands = self.graph[id].operands.clone();
            let lies: Vec<_> =
                operands.iter().map(|&o| self.lies(o, (stage, phase), known).map(Some)).collect::<Result<_>>()?;
            let strategy = self.follow(&rule, &lies);
            dims_of(&rule.spec.result, &self.legal(&rule, strategy))
        } else {
            let value = self.value(id, stage, phase, None)?;
            self.out.ty(value).sharding.dims.to_vec()
        };
        known.insert(id, dims.clone());
        Ok(dims)
    }

    /// What every stage clones knows nothing of the batch, but its gradient comes sample by sample (an embedding of positions or
    /// types that an export repeats for each sample): the operands' axes of batch and sequence stay where they are.
    fn by_samples(&mut self, id: NodeId, rule: &Rule, mut strategy: Strategy, at: (u32, Phase)) -> Result<Strategy> {
        if !self.is_gradient_of_stageless(id) {
            return Ok(strategy);
        }
        let mut known = FxHashMap::default();
        for (operand, dims) in self.contributions(id, at.0).into_iter().zip(&rule.spec.operands) {
            let lies = self.lies(operand, at, &mut known)?;
            for (dim, axes) in dims.iter().zip(&lies) {
                let used = |axis: &AxisId| strategy.factors.iter().flatten().any(|a| a == axis);
                let new: AxisList = axes.iter().copied().filter(|a| self.plan.splits_samples(*a) && !used(a)).collect();
                let split = FactorSpec::split_axes(dim, &rule.sizes, &new, &self.plan.mesh).unwrap_or_default();
                for (factor, axes) in split.into_iter().filter(|(factor, _)| !rule.is_whole(*factor)) {
                    strategy.factors[usize::from(factor.0)].insert_from_slice(0, &axes);
                }
            }
        }
        Ok(strategy)
    }

    fn inherit(&self, id: NodeId, rule: &Rule, of: GradOf) -> Option<Strategy> {
        let mut strategy = Strategy::whole(rule.spec.names.len());
        match of {
            GradOf::Op(forward) => {
                let theirs = self.strategies.get(&forward)?;
                let names = self.rule(forward).spec.names;
                for (i, name) in rule.spec.names.iter().enumerate() {
                    if let Some(j) = names.iter().position(|n| n == name) {
                        strategy.factors[i] = theirs.factors[j].clone();
                    }
                }
            }
            GradOf::Value(value) => {
                if self.graph.ty(value).shape != self.graph.ty(id).shape {
                    return None;
                }
                let updates = self.graph[id].phase == Phase::Update && matches!(self.graph[value].op, Op::Param(_));
                let dims = if updates { self.update_dims(value) } else { self.value_dims(value)? };
                for (dim, axes) in rule.spec.result.iter().zip(dims) {
                    match FactorSpec::split_axes(dim, &rule.sizes, &axes, &self.plan.mesh) {
                        Some(split) => split.into_iter().for_each(|(f, axes)| strategy.factors[usize::from(f.0)] = axes),
                        None => return None,
                    }
                }
            }
        }
        Some(strategy)
    }

    /// The axes of each dim of a logical value as it was placed.
    pub(super) fn value_dims(&self, mut value: NodeId) -> Option<Vec<AxisList>> {
        while let Op::StopGradient(_) = self.graph[value].op {
            value = self.graph[value].operands[0];
        }
        match self.graph[value].op {
            Op::Param(_) => Some(self.param_dims(value)),
            _ => Some(dims_of(&self.rule(value).spec.result, self.strategies.get(&value)?)),
        }
    }

    /// The dims of a parameter as it is used, and of its state where that is not sharded further.
    pub(super) fn param_dims(&self, id: NodeId) -> Vec<AxisList> {
        let keep = |axes: &AxisList| axes.iter().copied().filter(|&a| self.matters(a)).collect();
        let weight = self.weight_of(id);
        match self.plan.strategies.get(&weight) {
            Some(planned) => self.shared_dims(id, planned.factors.iter().map(keep).collect()),
            None => vec![AxisList::new(); self.graph.ty(id).rank()],
        }
    }

    /// Of a weight's `dims` those that its state `id` has as well: a mean over a dim lies whole there.
    pub(super) fn shared_dims(&self, id: NodeId, mut dims: Vec<AxisList>) -> Vec<AxisList> {
        let (whole, own) = (&self.graph.ty(self.weight_of(id)).shape, &self.graph.ty(id).shape);
        dims.iter_mut().enumerate().filter(|(dim, _)| whole.get(*dim) != own.get(*dim)).for_each(|(_, axes)| axes.clear());
        dims
    }

    /// The parameter whose state `id` is; itself for a weight.
    pub(super) fn weight_of(&self, id: NodeId) -> NodeId {
        match (self.graph.grad_of(id), &self.graph[id].op) {
            (Some(GradOf::Value(weight)), Op::Param(_)) => weight,
            _ => id,
        }
    }

    /// Each factor takes the axes of the first operand dim that has some, of the operands that are said to lie somewhere.
    fn follow(&self, rule: &Rule, operands: &[Option<Vec<AxisList>>]) -> Strategy {
        let mut strategy = Strategy::whole(rule.spec.names.len());
        let mut used: Vec<AxisId> = Vec::new();
        for (operand, dims) in operands.iter().zip(&rule.spec.operands) {
            let Some(operand) = operand else { continue };
            for (dim, axes) in dims.iter().zip(operand) {
                let free: AxisList = axes.iter().copied().filter(|a| !used.contains(a)).collect();
                let split = FactorSpec::split_most(dim, &rule.sizes, &free, &self.plan.mesh);
                for (factor, axes) in split.into_iter().filter(|(_, axes)| !axes.is_empty()) {
                    let slot = &mut strategy.factors[usize::from(factor.0)];
                    if slot.is_empty() && !rule.is_whole(factor) {
                        used.extend(&axes);
                        *slot = axes;
                    }
                }
            }
        }
        strategy
    }

    /// What of a strategy the rule allows: no axis twice, whole factors whole, compound dims filled exactly from the major
    /// factor, nothing compared across microbatches.
    pub(super) fn legal(&self, rule: &Rule, mut strategy: Strategy) -> Strategy {
        let mut used: Vec<AxisId> = Vec::new();
        for factor in rule.spec.ids() {
            let whole = rule.is_whole(factor);
            let slot = &mut strategy.factors[usize::from(factor.0)];
            slot.retain(|a| !whole && self.plan.mesh.size(*a) >= 1 && !used.contains(a));
            slot.retain(|a| self.matters(*a));
            // The largest of all samples is not the sum of parts, which alone can stay open until the last microbatch.
            if rule.reduce != Reduce::Sum && !rule.spec.in_result(factor) && slot.contains(&self.mb()) {
                slot.clear();
            }
            used.extend(slot.iter());
        }
        let compound = rule.spec.operands.iter().chain([&rule.spec.result]).flatten().filter(|d| d.len() > 1);
        for dim in compound.cloned().collect::<Vec<_>>() {
            let axes: AxisList = dim.iter().flat_map(|f| strategy.factors[usize::from(f.0)].clone()).collect();
            dim.iter().for_each(|f| strategy.factors[usize::from(f.0)].clear());
            let split = FactorSpec::split_most(&dim, &rule.sizes, &axes, &self.plan.mesh);
            split.into_iter().for_each(|(f, axes)| strategy.factors[usize::from(f.0)] = axes);
        }
        strategy
    }
}
