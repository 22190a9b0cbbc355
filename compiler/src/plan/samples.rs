//! Follows the batch dim through the forward graph, and sequences: which factor of each op carries the axes `mb`, `dp`, `ep` and `cp`.
//!
//! Context parallelism is no more than that but for attention, which `plan/tensor` may split otherwise.
//!
//! Before: inputs name their batch dim. After: every forward node that has a strategy at all has one over those axes, and only
//! those; what is summed over the batch is pending and stays so through linear ops.

use super::batch::Ranks;
use super::forward::{Forward, Kind};
use super::{CONTEXT, EXPERT, Strategy};
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::{Op, Rule};
use dcc_program::factors::DimFactors;
use dcc_program::{AxisId, AxisList, FactorId, FactorSpec, Mesh, Reduce, Sharding, TensorType};
use smallvec::SmallVec;
use std::collections::BTreeMap;

#[derive(Clone)]
pub(super) struct Samples {
    pub strategies: BTreeMap<NodeId, Strategy>,
    /// By node: how these axes shard it; of an input, for those that read it.
    pub shardings: Vec<Sharding>,
}

impl Samples {
    /// How these axes shard a value where it is made: inputs are whole over `cp`.
    pub fn lies(&self, forward: &Forward, id: NodeId) -> Sharding {
        match (&forward.graph[id].op, self.strategies.get(&id)) {
            (Op::Input(_), Some(strategy)) => Sharding { dims: strategy.factors.clone().into(), ..Sharding::default() },
            _ => self.shardings[id.0 as usize].clone(),
        }
    }

    /// How `reader` has an operand.
    pub fn has(&self, forward: &Forward, reader: NodeId, operand: NodeId) -> Sharding {
        let mut sharding = self.shardings[operand.0 as usize].clone();
        let position = forward.graph[reader].operands.iter().position(|&o| o == operand);
        if let (Some(position), Some(strategy)) = (position, self.strategies.get(&reader)) {
            for (axes, dim) in sharding.dims.iter_mut().zip(&forward.rule(reader).spec.operands[position]) {
                *axes = dim.iter().flat_map(|f| strategy.factors[usize::from(f.0)].iter().copied()).collect();
            }
        }
        sharding
    }
}

impl Samples {
    /// The same without `axis`, and the factors that it stands on.
    pub fn without(&self, axis: AxisId) -> (Samples, BTreeMap<NodeId, FactorId>) {
        let mut samples = Samples { strategies: self.strategies.clone(), shardings: self.shardings.clone() };
        let mut found = BTreeMap::new();
        for (&id, strategy) in &mut samples.strategies {
            let at = strategy.factors.iter().position(|axes| axes.contains(&axis));
            found.extend(at.map(|factor| (id, FactorId(factor as u8))));
            strategy.factors.iter_mut().for_each(|axes| axes.retain(|a| *a != axis));
            strategy.keep.retain(|a| *a != axis);
        }
        for sharding in &mut samples.shardings {
            sharding.dims.iter_mut().for_each(|axes| axes.retain(|a| *a != axis));
            sharding.pending.retain(|(a, _)| *a != axis);
        }
        (samples, found)
    }
}

/// The dim of inputs that counts the positions of a sequence.
pub(super) type Sequences = BTreeMap<NodeId, usize>;

/// Inputs are there whole on all ranks of `cp`, and read as if they were sharded.
/// Errors: a batch dim that the axes do not divide; an op that needs samples of several microbatches at once.
pub(super) fn spread(forward: &Forward, mesh: &Mesh, batch: &AxisList, sequences: &Sequences) -> Result<Samples> {
    let graph = forward.graph;
    let shardings = graph.ids().map(|id| Sharding::replicated(graph.ty(id).rank())).collect();
    let context = mesh.axis(CONTEXT);
    let axes = batch.iter().copied().chain(context).collect();
    let mut spread = Spread { forward, mesh, batch, axes, shardings };
    let mut strategies = BTreeMap::new();
    for &id in &forward.order {
        let strategy = spread.strategy(id).map_err(|e| e.at(graph.origin(id)))?;
        let mut sharding = spread.result(id, &strategy);
        if let Some(&dim) = sequences.get(&id) {
            sharding.dims[dim].extend(context);
        }
        spread.shardings[id.0 as usize] = sharding;
        if !matches!(forward.kind(id), Kind::Source | Kind::Alias) {
            strategies.insert(id, strategy);
        }
    }
    Ok(Samples { strategies, shardings: spread.shardings })
}

struct Spread<'a> {
    forward: &'a Forward<'a>,
    mesh: &'a Mesh,
    batch: &'a AxisList,
    /// Those of the batch and of sequences.
    axes: AxisList,
    shardings: Vec<Sharding>,
}

impl Spread<'_> {
    fn strategy(&self, id: NodeId) -> Result<Strategy> {
        let node = &self.forward.graph[id];
        let rule = self.forward.rule(id);
        let mut strategy = Strategy::whole(rule.spec.names.len());
        if let Op::Input(input) = &node.op {
            if let Some(dim) = input.batch_dim {
                self.divides(&input.name, node.ty.shape[usize::from(dim)])?;
                strategy.factors[usize::from(dim)] = self.batch.clone();
            }
            return Ok(strategy);
        }
        if !self.forward.is_batched(id) {
            return Ok(strategy);
        }
        self.place_factors(id, rule, &mut strategy);
        self.drop_invalid(rule, &mut strategy);
        self.gather_compared(rule, &mut strategy);
        self.refuse_gathered_microbatches(id, rule, &strategy)?;
        self.keep(id, &mut strategy);
        Ok(strategy)
    }

    fn divides(&self, name: &str, size: u64) -> Result<()> {
        let parts: u64 = self.batch.iter().map(|&a| u64::from(self.mesh.size(a))).product();
        if size.is_multiple_of(parts) {
            return Ok(());
        }
        let mb = u64::from(self.mesh.size_of("mb"));
        let ep = self.mesh.size_of(EXPERT);
        let ranks = Ranks { dp: (parts / mb) as u32 / ep, ep };
        Err(Error::batch(format!("batch {size} of input {name} does not divide by {mb} microbatches × {ranks} = {parts}"))
            .help(format!("use --global-batch-size {}", size.div_ceil(parts) * parts)))
    }

    /// The operands' batch axes, moved to the factors of the op; the first operand that brings an axis decides.
    fn place_factors(&self, id: NodeId, rule: &Rule, strategy: &mut Strategy) {
        for (&operand, dims) in self.forward.graph[id].operands.iter().zip(&rule.spec.operands) {
            for (dim, axes) in dims.iter().zip(&self.shardings[operand.0 as usize].dims).filter(|(_, axes)| !axes.is_empty()) {
                let split = FactorSpec::split_most(dim, &rule.sizes, axes, self.mesh);
                let free = |(factor, axes): &(FactorId, AxisList)| {
                    !rule.is_whole(*factor) && axes.iter().all(|a| !strategy.factors.iter().flatten().any(|b| a == b))
                };
                for (factor, axes) in split.into_iter().filter(free).collect::<Vec<_>>() {
                    strategy.factors[usize::from(factor.0)].extend(axes);
                }
            }
        }
    }

    /// Drops the last axes of compound dims that do not fill their factors from the major one on.
    fn drop_invalid(&self, rule: &Rule, strategy: &mut Strategy) {
        let sides = rule.spec.operands.iter().flatten().chain(&rule.spec.result);
        for dim in sides.filter(|dim| dim.len() > 1) {
            if !fills(dim, rule, strategy, self.mesh) {
                let axes: AxisList = dim.iter().flat_map(|f| std::mem::take(&mut strategy.factors[usize::from(f.0)])).collect();
                for (factor, axes) in FactorSpec::split_most(dim, &rule.sizes, &axes, self.mesh) {
                    strategy.factors[usize::from(factor.0)] = axes;
                }
            }
        }
    }

    /// The largest of all samples is not the sum of parts, which alone can stay open until the last microbatch.
    fn gather_compared(&self, rule: &Rule, strategy: &mut Strategy) {
        for factor in rule.reduced().filter(|_| rule.reduce != Reduce::Sum) {
            let axes = &mut strategy.factors[usize::from(factor.0)];
            if axes.iter().any(|&axis| self.mesh.is_microbatch(axis)) {
                axes.clear();
            }
        }
    }

    fn refuse_gathered_microbatches(&self, id: NodeId, rule: &Rule, strategy: &Strategy) -> Result<()> {
        if self.mesh.size_of("mb") == 1 {
            return Ok(());
        }
        for (i, (&operand, dims)) in self.forward.graph[id].operands.iter().zip(&rule.spec.operands).enumerate() {
            for (d, axes) in self.shardings[operand.0 as usize].dims.iter().enumerate() {
                let mut kept = dims[d].iter().flat_map(|f| &strategy.factors[usize::from(f.0)]);
                let mixes = axes.first().is_some_and(|&axis| self.mesh.is_microbatch(axis));
                if mixes && kept.next() != axes.first() {
                    return Err(self.mixed(id, i, d));
                }
            }
        }
        Ok(())
    }

    fn mixed(&self, id: NodeId, operand: usize, dim: usize) -> Error {
        let node = &self.forward.graph[id];
        let mb = self.mesh.size_of("mb");
        let shape = self.forward.graph.ty(node.operands[operand]).shape.to_vec();
        let name = node.op.name();
        Error::plan(format!("{name} needs the samples of all {mb} microbatches at once: dim {dim} of {shape:?}"))
            .help("use --grad-accum 1, where every device sees its whole batch")
    }

    /// `+mb` stays pending through all linear ops, because only `ready` can resolve it before the update; other pending sums stay
    /// through those that do not grow them.
    fn keep(&self, id: NodeId, strategy: &mut Strategy) {
        let node = &self.forward.graph[id];
        let types: Vec<&TensorType> = node.operands.iter().map(|&o| self.forward.graph.ty(o)).collect();
        for &axis in &self.axes {
            let pending = |o: &NodeId| self.shardings[o.0 as usize].pending.contains(&(axis, Reduce::Sum));
            if strategy.factors.iter().flatten().any(|&a| a == axis) {
                continue;
            }
            let sets = node.op.linear(&types).into_iter();
            let Some(set) = sets.filter(|set| !set.is_empty()).find(|set| set.iter().all(|&i| pending(&node.operands[i])))
            else {
                continue;
            };
            let grows = node.ty.elements() > types[set[0]].elements();
            if !grows || self.mesh.is_microbatch(axis) {
                strategy.keep.push(axis);
            }
        }
    }

    fn result(&self, id: NodeId, strategy: &Strategy) -> Sharding {
        let node = &self.forward.graph[id];
        let rule = self.forward.rule(id);
        let mut sharding = Sharding::replicated(node.ty.rank());
        for (dim, factors) in sharding.dims.iter_mut().zip(&rule.spec.result) {
            dim.extend(factors.iter().flat_map(|f| &strategy.factors[usize::from(f.0)]).copied());
        }
        let reduced = rule.reduced().flat_map(|f| strategy.factors[usize::from(f.0)].iter().map(|&a| (a, rule.reduce)));
        sharding.pending.extend(reduced);
        sharding.pending.extend(strategy.keep.iter().map(|&a| (a, Reduce::Sum)));
        sharding.pending.sort_unstable();
        sharding
    }
}

/// Whether the axes on the factors of a compound dim fill them from the major one on.
pub(super) fn fills(dim: &DimFactors, rule: &Rule, strategy: &Strategy, mesh: &Mesh) -> bool {
    let axes: SmallVec<[AxisId; 4]> = dim.iter().flat_map(|f| &strategy.factors[usize::from(f.0)]).copied().collect();
    match FactorSpec::split_axes(dim, &rule.sizes, &axes, mesh) {
        None => false,
        Some(split) => split.iter().all(|(f, axes)| &strategy.factors[usize::from(f.0)] == axes),
    }
}
