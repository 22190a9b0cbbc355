//! Redistribution: the single-axis steps from one sharding to another.
//!
//! Pending reductions are resolved first, in the producer's section, by reduce_scatter where the wanted dims allow; then axes
//! move (all_to_all) or leave (all_gather), then come (slice), in the reader's section; last, whole becomes pending. What was moved
//! takes no more memory than before, so that the backward pass reads what the forward pass moved.

use super::Placer;
use crate::error::{Error, Result};
use crate::graph::{Node, NodeId, Operands, Phase};
use crate::ops::{
    AllGather, AllReduce, AllToAll, DropMicrobatch, KeepFirst, Op, ReduceScatter, ResolveMicrobatches, SliceAxis,
};
use crate::optimizer::Update;
use crate::train;
use dcc_program::{Reduce, Sharding, TensorType};

impl Placer<'_> {
    /// `value` with the sharding `want`, for a reader in `phase`.
    pub(super) fn reshard(&mut self, value: NodeId, want: &Sharding, phase: Phase) -> Result<NodeId> {
        if self.out.ty(value).sharding == *want {
            return Ok(value);
        }
        let cursor = self.out.cursor();
        let origin = self.out.origin(value).to_owned();
        self.out.set_origin(&origin);
        let result = self.reshard_steps(value, want, phase);
        self.out.set_cursor(cursor);
        result
    }

    fn reshard_steps(&mut self, value: NodeId, want: &Sharding, phase: Phase) -> Result<NodeId> {
        let mut value = self.resolve_microbatches(value, want, phase)?;
        value = self.resolve_pending(value, want, phase);
        value = self.move_axes(value, want, phase);
        value = self.gather_axes(value, want, phase)?;
        value = self.slice_axes(value, want, phase);
        let have = self.out.ty(value).sharding.pending.clone();
        for &(axis, reduce) in want.pending.iter().filter(|p| !have.contains(p)) {
            if axis == self.mb() {
                value = self.of_first_microbatch(value, phase);
                continue;
            }
            let sharding = &self.out.ty(value).sharding;
            let pending = sharding.with_pending(sharding.pending.iter().copied().chain([(axis, reduce)]));
            value = self.step(KeepFirst { axis }, value, pending, phase);
        }
        if self.out.ty(value).sharding != *want {
            return Err(self.out.broken(value, "reshard did not reach the wanted sharding"));
        }
        Ok(value)
    }

    /// A step in the reader's section.
    fn step(&mut self, op: impl Into<Op>, value: NodeId, sharding: Sharding, phase: Phase) -> NodeId {
        let ty = self.out.ty(value).with_sharding(sharding);
        let section = self.section(phase, &[value], &ty);
        self.step_in(op, value, ty.sharding, section)
    }

    pub(super) fn step_in(&mut self, op: impl Into<Op>, value: NodeId, sharding: Sharding, section: Phase) -> NodeId {
        let ty = self.out.ty(value).with_sharding(sharding);
        let stage = self.stage_of_step(value, section);
        self.make(op, &[value], ty, stage, section)
    }

    /// The stage of a step from `value` that is of `section`.
    pub(super) fn stage_of_step(&self, value: NodeId, section: Phase) -> u32 {
        let Node { phase, stage: home, .. } = self.out[value];
        let home = home.expect("placed nodes have a stage");
        // What all chunks share is changed for the one that reads it; so is what the backward of another chunk of the rank reads of a
        // forward value, which runs before the backward of the value's own.
        let shared = !phase.is_pass() && section.is_pass();
        let again = section.is_backward() && !phase.is_backward() && self.first_chunk(home) == self.first_chunk(self.here);
        if shared || again { self.here } else { home }
    }

    /// Where a reduction of `value` stands: once, with its producer, unless only the update reads it whole.
    fn producer_section(&self, value: NodeId, phase: Phase) -> Phase {
        if phase == Phase::Update { Phase::Update } else { self.out[value].phase }
    }

    /// `+mb` is resolved by the update, or, where forward or backward read the whole batch's value, by counting first.
    fn resolve_microbatches(&mut self, value: NodeId, want: &Sharding, phase: Phase) -> Result<NodeId> {
        let pending = (self.mb(), Reduce::Sum);
        let here = &self.out.ty(value).sharding;
        if !here.pending.contains(&pending) || want.pending.contains(&pending) {
            return Ok(value);
        }
        if self.plan.microbatches() == 1 {
            self.resolved.insert(self.accumulator(value));
            return Ok(self.resolve_accumulated(value, self.out[value].phase));
        }
        if phase == Phase::Update {
            return Ok(self.resolve_accumulated(value, Phase::Update));
        }
        let counted = self.count_clone(value)?;
        Ok(self.resolve_accumulated(counted, Phase::Ready))
    }

    /// `+mb` resolved in `section`; of a view, the sum is resolved and the view taken of it.
    fn resolve_accumulated(&mut self, value: NodeId, section: Phase) -> NodeId {
        let mb = self.mb();
        let resolved = |ty: &TensorType| ty.sharding.with_pending(ty.sharding.pending.iter().copied().filter(|p| p.0 != mb));
        let (mut views, mut sum) = (Vec::new(), value);
        while matches!(self.out[sum].op, Op::Reshape(_)) {
            views.push(sum);
            sum = self.out[sum].operands[0];
        }
        let mut made = self.step_in(ResolveMicrobatches {}, sum, resolved(self.out.ty(sum)), section);
        for view in views.into_iter().rev() {
            let node = self.out[view].clone();
            let (stage, ty) = (node.stage.expect("placed nodes have a stage"), node.ty.with_sharding(resolved(&node.ty)));
            made = self.make(node.op, &[made], ty, stage, section);
        }
        made
    }

    /// The sum that a value is a view of.
    pub(super) fn accumulator(&self, mut value: NodeId) -> NodeId {
        while matches!(self.out[value].op, Op::Reshape(_)) {
            value = self.out[value].operands[0];
        }
        value
    }

    /// A copy of `value` and what it depends on in section `count`.
    fn count_clone(&mut self, value: NodeId) -> Result<NodeId> {
        let mut open = vec![(value, false)];
        while let Some((id, is_open)) = open.pop() {
            if self.counted.contains_key(&id) {
                continue;
            }
            if is_open {
                self.make_count_clone(id);
            } else if self.is_counted_as_it_is(id)? {
                self.counted.insert(id, id);
            } else {
                open.push((id, true));
                open.extend(self.out[id].operands.iter().rev().map(|&operand| (operand, false)));
            }
        }
        Ok(self.counted[&value])
    }

    /// Whether a value is the same while counting. Errors: it cannot be there by then.
    fn is_counted_as_it_is(&self, value: NodeId) -> Result<bool> {
        let node = &self.out[value];
        if let Op::Param(param) = &node.op
            && !self.is_trained(&param.name)
        {
            return Ok(true);
        }
        let count = self.plan.microbatches();
        if node.phase == Phase::Ready {
            let what = format!(
                "a sum over all {count} microbatches depends on another one: they are counted at once, before the passes"
            );
            let help = "use one microbatch (--grad-accum 1), or give what is of data alone as an input";
            return Err(Error::plan(what).at(self.graph.origin(self.reader)).help(help));
        }
        if matches!(node.op, Op::Param(_) | Op::Transfer(_)) {
            let what =
                format!("a sum over all {count} microbatches, which depends on parameters, is needed before the last of them");
            let help = "use one microbatch (--grad-accum 1), or a loss that is linear in means over samples";
            return Err(Error::plan(what).at(self.graph.origin(self.reader)).help(help));
        }
        Ok(false)
    }

    /// The copy of `value`, whose operands have theirs.
    fn make_count_clone(&mut self, value: NodeId) {
        let node = self.out[value].clone();
        let operands: Operands = node.operands.iter().map(|operand| self.counted[operand]).collect();
        let section = if self.per_microbatch(&node.ty) || operands.iter().any(|&o| self.out[o].phase == Phase::Count) {
            Phase::Count
        } else {
            node.phase
        };
        let origin = self.out.origin(value).to_owned();
        self.out.set_origin(&origin);
        let stage = node.stage.expect("placed nodes have a stage");
        let clone = self.make(node.op, &operands, node.ty, stage, section);
        self.counted.insert(value, clone);
    }

    /// Whether a step gives the parameter a new value, so that gradients pass through what it is in.
    fn is_trained(&self, name: &str) -> bool {
        let is_of = |update: &Update| matches!(&self.graph[update.param].op, Op::Param(param) if param.name == name);
        train::updates(self.graph).iter().any(is_of)
    }

    fn resolve_pending(&mut self, mut value: NodeId, want: &Sharding, phase: Phase) -> NodeId {
        let section = self.producer_section(value, phase);
        loop {
            let have = self.out.ty(value).sharding.clone();
            let drop: Vec<_> = have.pending.iter().copied().filter(|p| !want.pending.contains(p)).collect();
            let scatter = drop.iter().find_map(|&(axis, reduce)| {
                let lands = |d: &usize| {
                    want.dims[*d].starts_with(&have.dims[*d]) && want.dims[*d].get(have.dims[*d].len()) == Some(&axis)
                };
                let dim = (0..have.dims.len()).find(lands)?;
                (reduce == Reduce::Sum).then_some((axis, dim))
            });
            if let Some((axis, dim)) = scatter {
                let mut sharding = have.with_pending(have.pending.iter().copied().filter(|p| p.0 != axis));
                sharding.dims[dim].push(axis);
                value = self.step_in(ReduceScatter { axis, dim: dim as u8 }, value, sharding, section);
                continue;
            }
            let Some(&(_, reduce)) = drop.first() else { return value };
            let axes = drop.iter().filter(|p| p.1 == reduce).map(|p| p.0).collect();
            let left = have.pending.iter().copied().filter(|p| want.pending.contains(p) || p.1 != reduce);
            let sharding = have.with_pending(left);
            value = self.step_in(AllReduce { reduce, axes }, value, sharding, section);
        }
    }

    fn move_axes(&mut self, mut value: NodeId, want: &Sharding, phase: Phase) -> NodeId {
        let once = phase == Phase::Backward && self.out[value].phase == Phase::Forward;
        let phase = if once { Phase::Forward } else { phase };
        loop {
            let have = self.out.ty(value).sharding.clone();
            let rank = have.dims.len();
            let found = (0..rank).find_map(|from| {
                let &axis = have.dims[from].last()?;
                let leaves = !want.dims[from].starts_with(&have.dims[from]);
                let lands = |to: &usize| {
                    *to != from
                        && want.dims[*to].starts_with(&have.dims[*to])
                        && want.dims[*to].get(have.dims[*to].len()) == Some(&axis)
                };
                let to = (0..rank).find(lands)?;
                (leaves && axis != self.mb()).then_some((axis, from, to))
            });
            let Some((axis, from, to)) = found else { return value };
            let mut sharding = have;
            sharding.dims[from].pop();
            sharding.dims[to].push(axis);
            value = self.step(AllToAll { axis, from: from as u8, to: to as u8 }, value, sharding, phase);
        }
    }

    fn gather_axes(&mut self, mut value: NodeId, want: &Sharding, phase: Phase) -> Result<NodeId> {
        for dim in 0..want.dims.len() {
            loop {
                let mut sharding = self.out.ty(value).sharding.clone();
                if want.dims[dim].starts_with(&sharding.dims[dim]) {
                    break;
                }
                let axis = sharding.dims[dim].pop().expect("the empty list is a prefix of every list");
                if axis != self.mb() {
                    value = self.step(AllGather { axis, dim: dim as u8, region: 0 }, value, sharding, phase);
                } else if self.plan.microbatches() == 1 {
                    let section = self.out[value].phase;
                    value = self.step_in(DropMicrobatch { dim: dim as u8 }, value, sharding, section);
                } else {
                    let what = "an op mixes samples of different microbatches".to_owned();
                    return Err(self.refused(value, what).help("use one microbatch: --grad-accum 1"));
                }
            }
        }
        Ok(value)
    }

    fn slice_axes(&mut self, mut value: NodeId, want: &Sharding, phase: Phase) -> NodeId {
        for dim in 0..want.dims.len() {
            while self.out.ty(value).sharding.dims[dim].len() < want.dims[dim].len() {
                let mut sharding = self.out.ty(value).sharding.clone();
                let axis = want.dims[dim][sharding.dims[dim].len()];
                sharding.dims[dim].push(axis);
                value = self.step(SliceAxis { axis, dim: dim as u8 }, value, sharding, phase);
            }
        }
        value
    }
}
