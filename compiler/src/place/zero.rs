//! Where shards of parameters, gradients and state meet their whole values: ZeRO's stages, as `plan::Zero` has them.
//!
//! Optimizer state lies, and updates are computed, in shards from the first stage on; gradients are scattered by the update, from the
//! second stage on in each microbatch's backward pass; parameters lie in shards in the third, and are gathered in the section that reads
//! them, so that nothing of them stays between sections. In mixed precision what is gathered are half floats, cast from the shards; a
//! weight that is read no other way lies in shards from the first stage on, and is gathered by section begin in the first two.

use super::Placer;
use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::{AllGather, Op};
use crate::plan::{Plan, Strategy, Zero, is_narrowing};
use dcc_program::program::ParamKind;
use dcc_program::{AxisList, Sharding};
use std::collections::{BTreeMap, BTreeSet};

/// A parameter that is read more often, such as by each step of an unrolled loop, stays gathered in between.
const MOST_REGIONS: usize = 4;

/// By weight, where its later uses begin: far enough from those before that it is gathered again.
pub(super) type Regions = BTreeMap<NodeId, Vec<NodeId>>;

/// Two uses are far apart where weights of more bytes than the weight itself are read in between: it would lie there for longer than
/// what is gathered for those (a tied embedding, first and last of all).
pub(super) fn regions(graph: &Graph, plan: &Plan) -> Regions {
    if plan.zero != Zero::Parameters {
        return Regions::new();
    }
    let mut reads: Vec<(NodeId, NodeId)> = Vec::new();
    for (reader, weights) in readers(graph) {
        reads.extend(weights.into_iter().filter(|weight| plan.shards.contains_key(weight)).map(|weight| (reader, weight)));
    }
    let bytes = |weight: NodeId| graph.ty(weight).elements() * graph.ty(weight).dtype.bytes();
    let mut regions = Regions::new();
    for &weight in plan.shards.keys() {
        let places: Vec<usize> = (0..reads.len()).filter(|&at| reads[at].1 == weight).collect();
        let far = |pair: &&[usize]| {
            let between: BTreeSet<NodeId> = reads[pair[0] + 1..pair[1]].iter().map(|read| read.1).collect();
            between.into_iter().map(bytes).sum::<u64>() > bytes(weight)
        };
        let later: Vec<NodeId> = places.windows(2).filter(far).map(|pair| reads[pair[1]].0).collect();
        if later.len() < MOST_REGIONS {
            regions.insert(weight, later);
        }
    }
    regions
}

/// The forward nodes that are computed once per microbatch, and the weights that each reads, itself or through what is not.
fn readers(graph: &Graph) -> Vec<(NodeId, BTreeSet<NodeId>)> {
    let live = graph.live();
    let mut found = Vec::new();
    // Of what depends on weights alone, which; of what depends on a batch, nothing.
    let mut of: Vec<Option<BTreeSet<NodeId>>> = Vec::with_capacity(graph.nodes.len());
    for id in graph.ids() {
        let node = &graph[id];
        let batched = matches!(node.op, Op::Input(_)) || node.operands.iter().any(|o| of[o.0 as usize].is_none());
        let mut weights: BTreeSet<NodeId> = node.operands.iter().filter_map(|o| of[o.0 as usize].clone()).flatten().collect();
        if matches!(&node.op, Op::Param(param) if param.kind == ParamKind::Weight) {
            weights.insert(id);
        }
        if batched && live[id.0 as usize] && node.phase == Phase::Forward && !weights.is_empty() {
            found.push((id, weights.clone()));
        }
        of.push((!batched).then_some(weights));
    }
    found
}

impl Placer<'_> {
    /// The dims of a data-parallel rank's shard of a weight, or of its state.
    pub(super) fn shard_dims(&self, id: NodeId) -> Vec<AxisList> {
        let weight = self.weight_of(id);
        match self.plan.shards.get(&weight) {
            Some(shard) => self.shared_dims(id, shard.clone()),
            None => self.param_dims(id),
        }
    }

    /// The dims in which a weight's update is computed.
    pub(super) fn update_dims(&self, weight: NodeId) -> Vec<AxisList> {
        if self.plan.zero >= Zero::State { self.shard_dims(weight) } else { self.param_dims(weight) }
    }

    /// The dims in which a weight or a state lies between steps.
    pub(super) fn stored_dims(&self, id: NodeId) -> Vec<AxisList> {
        match self.weight_of(id) == id && self.plan.zero != Zero::Parameters && !self.plan.masters.contains(&id) {
            true => self.param_dims(id),
            false => self.update_dims(id),
        }
    }

    /// Whether forward and backward gather this weight, or half floats made of its shards.
    pub(super) fn is_gathered(&self, id: NodeId) -> bool {
        let weight = if is_narrowing(self.graph, id) { self.graph[id].operands[0] } else { id };
        let in_shards = self.plan.zero == Zero::Parameters || self.plan.masters.contains(&weight);
        in_shards && self.plan.shards.contains_key(&weight)
    }

    /// A weight, or half floats made of it, whole over the data-parallel axis, for a reader in `phase`.
    pub(super) fn gathered(&mut self, id: NodeId, stage: u32, phase: Phase) -> Result<NodeId> {
        let weight = if is_narrowing(self.graph, id) { self.graph[id].operands[0] } else { id };
        let phase = if self.plan.zero == Zero::Parameters { phase } else { Phase::Begin };
        let mut value = self.leaf(weight, stage, phase)?;
        let before = std::mem::replace(&mut self.here, stage);
        if weight != id {
            let ty = self.out.ty(value).with_dtype(self.graph.ty(id).dtype);
            let factors = self.param_dims(weight);
            self.strategies.entry(id).or_insert(Strategy { factors, keep: Default::default() });
            self.out.set_origin_of(self.graph, id);
            value = self.make(self.graph[id].op.clone(), &[value], ty, stage, Phase::Begin);
        }
        let region = self.region(weight);
        let want = self.param_dims(weight);
        for (dim, used) in want.iter().enumerate() {
            while self.out.ty(value).sharding.dims[dim].len() > used.len() {
                let mut sharding = self.out.ty(value).sharding.clone();
                let axis = sharding.dims[dim].pop().expect("it is longer than another list");
                value = self.step_in(AllGather { axis, dim: dim as u8, region }, value, sharding, phase);
            }
        }
        self.here = before;
        Ok(value)
    }

    /// The number of the uses of `weight` to which that belongs which is being placed.
    fn region(&self, weight: NodeId) -> u32 {
        let anchor = match self.graph.grad_of(self.reader) {
            Some(GradOf::Op(of) | GradOf::Value(of)) if self.graph[self.reader].phase == Phase::Backward => of,
            _ => self.reader,
        };
        self.regions.get(&weight).map_or(0, |later| later.partition_point(|&first| first <= anchor)) as u32
    }

    /// A parameter's gradient after one microbatch: from ZeRO-2 on scattered at once.
    pub(super) fn reduce_early(&mut self, gradient: NodeId, weight: NodeId) -> Result<NodeId> {
        if self.plan.zero < Zero::Gradients {
            return Ok(gradient);
        }
        let dims = self.shard_dims(weight);
        let here = &self.out.ty(gradient).sharding;
        let pending = here.pending.iter().copied().filter(|p| !dims.iter().flatten().any(|axis| *axis == p.0));
        let want = Sharding { dims: dims.clone().into(), pending: Default::default() }.with_pending(pending);
        self.reshard(gradient, &want, Phase::Backward)
    }
}
