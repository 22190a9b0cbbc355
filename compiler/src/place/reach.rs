//! What is made where it is read, and which stages that is: the first two questions about a graph that is placed.

use super::Placer;
use crate::graph::{GradOf, NodeId, Phase};
use crate::ops::Op;
use crate::plan::forward::MOST_MADE;
use rustc_hash::FxHashSet;
use std::collections::BTreeSet;

impl Placer<'_> {
    /// Broadcasts, generated tensors, and pointwise ops of only a few of these are made where they are read, as they are wanted.
    pub(super) fn find_sources(&mut self) {
        let mut made: Vec<u32> = Vec::with_capacity(self.graph.nodes.len());
        for id in self.graph.ids() {
            let node = &self.graph[id];
            let nodes = node.operands.iter().fold(1_u32, |sum, o| sum.saturating_add(made[o.0 as usize]));
            let of_sources = || node.operands.iter().all(|o| self.sources[o.0 as usize]);
            let source = match &node.op {
                Op::Const(_) | Op::Training(_) | Op::Iota(_) | Op::Uniform(_) | Op::BroadcastInDim(_) => true,
                Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::StopGradient(_) => {
                    nodes <= MOST_MADE && of_sources()
                }
                _ => false,
            };
            self.sources.push(source);
            made.push(if source { nodes } else { 0 });
            self.constants.push(source && node.operands.iter().all(|o| self.constants[o.0 as usize]));
            let of_data = node.operands.iter().all(|o| self.of_data[o.0 as usize]) && !matches!(node.op, Op::Param(_));
            self.of_data.push(of_data);
        }
    }

    /// The stage that computes a node: the plan's, or that of the forward node it is a gradient of. What depends on data alone
    /// is made wherever it is read, as inputs are.
    pub(super) fn home(&self, id: NodeId) -> Option<u32> {
        let node = &self.graph[id];
        match (node.phase, self.graph.grad_of(id)) {
            (Phase::Forward, _) if self.of_data[id.0 as usize] => None,
            (Phase::Forward, _) => self.plan.stages.get(&id).copied(),
            (Phase::Backward, Some(GradOf::Op(f) | GradOf::Value(f))) => self.stage[f.0 as usize],
            _ => None,
        }
    }

    pub(super) fn find_reach(&mut self) {
        let graph = self.graph;
        self.reach = vec![BTreeSet::new(); graph.nodes.len()];
        let live = graph.live();
        // An output that no stage computes is computed on the last one.
        let last = self.plan.parts() - 1;
        for &(_, id) in &graph.outputs {
            if graph[id].phase == Phase::Forward && self.stage[id.0 as usize].is_none() {
                self.reach[id.0 as usize].insert(last);
            }
        }
        // Readers of forward values that have no stage, down to the parameters.
        for id in graph.ids().rev().filter(|&id| live[id.0 as usize] && graph[id].phase != Phase::Update) {
            let mut mine = self.reach[id.0 as usize].clone();
            mine.extend(self.stage[id.0 as usize]);
            for operand in &graph[id].operands {
                if self.is_made_where_read(*operand) {
                    self.reach[operand.0 as usize].extend(&mine);
                }
            }
        }
        // Stages from which a gradient without a stage has contributions. A constant can be made on any of them.
        for id in graph.ids().filter(|&id| graph[id].phase == Phase::Backward && self.stage[id.0 as usize].is_none()) {
            let mut mine = BTreeSet::new();
            // The part of a running statistic whose share is 1 is what the forward pass computes.
            let sums = matches!(graph[id].op, Op::GradSum(_));
            let counts = |o: &NodeId| (sums || graph[*o].phase == Phase::Backward) && !self.is_constant(*o);
            for &operand in graph[id].operands.iter().filter(|o| counts(o)) {
                match self.stage[operand.0 as usize] {
                    Some(stage) => mine.extend([stage]),
                    None => mine.extend(&self.reach[operand.0 as usize]),
                }
            }
            if let (true, Some(GradOf::Value(of))) = (mine.is_empty(), graph.grad_of(id)) {
                mine.extend(self.reach[of.0 as usize].first().copied());
            }
            // The statistics of a norm on an input are made of data alone, and nothing else reads them: on the first stage.
            let of_data = |o: &NodeId| graph[*o].phase == Phase::Forward && self.of_data[o.0 as usize] && !self.is_constant(*o);
            if mine.is_empty() && graph[id].operands.iter().any(of_data) {
                mine.insert(0);
            }
            // The statistics of a weight are made where it is.
            if let (true, Some(GradOf::Value(of))) = (mine.is_empty(), graph.grad_of(id))
                && graph[id].operands.contains(&of)
            {
                mine.extend(self.stage_of_weights(of));
            }
            if let (Op::GradSum(_), Some(GradOf::Value(param))) = (&graph[id].op, graph.grad_of(id))
                && matches!(graph[param].op, Op::Param(_))
            {
                let held = &mut self.reach[param.0 as usize];
                // What only the update reads, a running statistic, is held by all stages: evaluation may read it on another one
                // than that which computes its new value. Others are held where their gradient is computed, too: that of what is
                // added to a value is the gradient of the sum, which what else is added may have on a later stage.
                match held.is_empty() {
                    true => held.extend(0..self.plan.parts()),
                    false => held.extend(&mine),
                }
            }
            self.reach[id.0 as usize] = mine;
        }
    }

    /// Whether each stage that reads a forward value makes it: what has no stage, and sources, but for those that read a weight themselves.
    fn is_made_where_read(&self, id: NodeId) -> bool {
        let has_stage = self.stage[id.0 as usize].is_some();
        self.graph[id].phase == Phase::Forward && (!has_stage || self.is_source(id) && !self.reads_weight(id))
    }

    /// The first stage that reads one of the weights that `id` is made of.
    fn stage_of_weights(&self, id: NodeId) -> Option<u32> {
        let (mut open, mut seen, mut first) = (vec![id], FxHashSet::default(), None);
        while let Some(id) = open.pop() {
            if matches!(self.graph[id].op, Op::Param(_)) {
                first = first.into_iter().chain(self.reach[id.0 as usize].first().copied()).min();
            }
            open.extend(self.graph[id].operands.iter().copied().filter(|&operand| seen.insert(operand)));
        }
        first
    }
}
