//! What the planner knows of the forward graph before it decides: an order, what each node depends on, its rule, who reads it.

use crate::graph::{GradOf, Graph, Node, NodeId, Phase};
use crate::ops::{Attention, MaxPool, Op, Rule};
use dcc_program::program::ParamKind;
use smallvec::SmallVec;

/// Nodes that a source is made of, at most, each counted as often as it is read: whoever reads one makes all of these.
pub(crate) const MOST_MADE: u32 = 256;

/// What a node is to the planner. `place` makes the same distinctions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Dead, or of the backward or update phase.
    Outside,
    /// Constants, iotas, random numbers, broadcasts, and pointwise ops of only a few of these: made at each reader's wanted type.
    Source,
    /// The operand under another name: `stop_gradient`.
    Alias,
    Input,
    Param,
    /// Depends on no parameter and no batched input, but is no source: whole on every rank.
    Constant,
    /// Depends on parameters but on no batched input, such as a cast of a weight: computed once per step.
    Begin,
    /// Computed once per microbatch.
    Batched,
}

#[derive(Debug)]
pub(crate) struct Forward<'a> {
    pub graph: &'a Graph,
    /// All live forward nodes, operands first: depth first from the outputs, so that few values are alive at once and neither
    /// names nor the order in the file matter. What only the backward reads (attention's log-sum-exp) stands beside what
    /// reads the same operands.
    pub order: Vec<NodeId>,
    /// Forward nodes that read each node, once per operand.
    pub readers: Vec<SmallVec<[NodeId; 2]>>,
    facts: Vec<Facts>,
    /// Read by no output, not even through others.
    for_backward: Vec<bool>,
    rules: Vec<Option<Rule>>,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    kind: Kind,
    /// Of sources, the nodes that they are made of.
    made: u32,
    batched: bool,
    /// Depends on a parameter.
    weighted: bool,
    /// Depends on no parameter and no input.
    constant: bool,
    differentiable: bool,
    output: bool,
}

impl<'a> Forward<'a> {
    pub fn of(graph: &'a Graph) -> Forward<'a> {
        let count = graph.nodes.len();
        let (kind, made) = (Kind::Outside, 0);
        let outside =
            Facts { kind, made, batched: false, weighted: false, constant: false, differentiable: false, output: false };
        let mut forward = Forward {
            graph,
            order: Vec::new(),
            readers: vec![SmallVec::new(); count],
            facts: vec![outside; count],
            for_backward: vec![false; count],
            rules: vec![None; count],
        };
        let live = graph.live();
        for id in graph.ids().filter(|&id| live[id.0 as usize] && graph[id].phase == Phase::Forward) {
            forward.facts[id.0 as usize] = forward.learn(id);
            for &operand in &graph[id].operands {
                forward.readers[operand.0 as usize].push(id);
            }
            forward.rules[id.0 as usize] = Some(graph.rule(&graph[id]));
        }
        for &(_, id) in &graph.outputs {
            forward.facts[id.0 as usize].output = true;
        }
        forward.find_for_backward();
        forward.find_differentiable();
        forward.sort();
        forward
    }

    pub fn kind(&self, id: NodeId) -> Kind {
        self.facts[id.0 as usize].kind
    }

    pub fn rule(&self, id: NodeId) -> &Rule {
        self.rules[id.0 as usize].as_ref().expect("forward nodes have rules")
    }

    /// Whether the step computes a gradient of this value.
    pub fn differentiable(&self, id: NodeId) -> bool {
        self.facts[id.0 as usize].differentiable
    }

    /// Whether the value leaves the forward graph as an output.
    pub fn is_output(&self, id: NodeId) -> bool {
        self.facts[id.0 as usize].output
    }

    /// Depends on a batched input, or is one.
    pub fn is_batched(&self, id: NodeId) -> bool {
        self.facts[id.0 as usize].batched
    }

    /// Depends on no parameter and no input.
    pub fn is_constant(&self, id: NodeId) -> bool {
        self.facts[id.0 as usize].constant
    }

    fn learn(&self, id: NodeId) -> Facts {
        let node = &self.graph[id];
        let any = |test: fn(&Facts) -> bool| node.operands.iter().any(|o| test(&self.facts[o.0 as usize]));
        let batched = any(|f| f.batched) || matches!(&node.op, Op::Input(input) if input.batch_dim.is_some());
        let weighted = any(|f| f.weighted) || matches!(node.op, Op::Param(_));
        let constant = !any(|f| !f.constant) && !matches!(node.op, Op::Input(_) | Op::Param(_));
        let local = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_));
        let made = node.operands.iter().fold(1_u32, |sum, o| sum.saturating_add(self.facts[o.0 as usize].made));
        let kind = match &node.op {
            Op::Input(_) => Kind::Input,
            Op::Param(_) => Kind::Param,
            Op::StopGradient(_) => Kind::Alias,
            Op::Const(_) | Op::Training(_) | Op::Iota(_) | Op::Uniform(_) | Op::BroadcastInDim(_) => Kind::Source,
            _ if local && made <= MOST_MADE && !any(|f| f.kind != Kind::Source) => Kind::Source,
            _ if batched => Kind::Batched,
            _ if weighted => Kind::Begin,
            _ => Kind::Constant,
        };
        let made = if kind == Kind::Source { made } else { 0 };
        Facts { kind, made, batched, weighted, constant, differentiable: false, output: false }
    }

    /// A training graph says by its gradient sums which values have a gradient; of a forward graph alone, floats that depend on
    /// a weight are taken to.
    fn find_differentiable(&mut self) {
        let graph = self.graph;
        let sums = || graph.ids().filter(|&id| matches!(graph[id].op, Op::GradSum(_)));
        if sums().next().is_some() {
            for id in sums() {
                if let Some(GradOf::Value(of)) = graph.grad_of(id) {
                    self.facts[of.0 as usize].differentiable = true;
                }
            }
            return;
        }
        for id in graph.ids() {
            if self.kind(id) == Kind::Outside {
                continue;
            }
            let node = &graph[id];
            let weight = matches!(&node.op, Op::Param(p) if p.kind == ParamKind::Weight);
            let depends = node.operands.iter().any(|&o| self.differentiable(o));
            let stopped = matches!(node.op, Op::StopGradient(_) | Op::Compare(_));
            self.facts[id.0 as usize].differentiable = node.ty.dtype.is_float() && (weight || (depends && !stopped));
        }
    }

    fn find_for_backward(&mut self) {
        let graph = self.graph;
        for id in graph.ids().rev() {
            let readers = &self.readers[id.0 as usize];
            let read = self.is_output(id) || readers.iter().any(|reader| !self.is_for_backward(*reader));
            self.for_backward[id.0 as usize] = !read && self.kind(id) != Kind::Outside;
        }
    }

    /// Whether the backward pass alone reads this or what is made of it.
    pub fn is_for_backward(&self, id: NodeId) -> bool {
        self.for_backward[id.0 as usize]
    }

    fn sort(&mut self) {
        let graph = self.graph;
        let inside = |id: &NodeId| self.kind(*id) != Kind::Outside;
        let mut roots: Vec<NodeId> = graph.outputs.iter().map(|&(_, id)| id).filter(inside).collect();
        roots.extend(graph.ids().filter(|id| inside(id) && self.readers[id.0 as usize].is_empty() && !self.is_output(*id)));
        let mut seen = vec![false; graph.nodes.len()];
        let mut order = Vec::new();
        for root in roots {
            let mut stack = vec![(root, 0)];
            while let Some((id, next)) = stack.pop() {
                if seen[id.0 as usize] {
                    continue;
                }
                if let Some(first) = self.first_result(id).filter(|first| !seen[first.0 as usize]) {
                    stack.extend([(id, next), (first, 0)]);
                    continue;
                }
                if let Some(&operand) = graph[id].operands.get(next) {
                    stack.push((id, next + 1));
                    stack.push((operand, 0));
                    continue;
                }
                seen[id.0 as usize] = true;
                order.push(id);
                self.push_beside(id, &mut seen, &mut order);
            }
        }
        self.order = order;
    }

    /// Behind `id`, other results of its launch, what the backward pass alone reads of its operands, and what is made of that.
    fn push_beside(&self, id: NodeId, seen: &mut [bool], order: &mut Vec<NodeId>) {
        let graph = self.graph;
        let mut next = order.len();
        let siblings = graph[id].operands.iter().flat_map(|o| &self.readers[o.0 as usize]);
        let beside = |r: NodeId| self.is_for_backward(r) || self.first_result(r) == Some(id);
        self.push_ready(siblings.copied().filter(|&r| beside(r)), seen, order);
        while let Some(&id) = order.get(next) {
            let readers = self.readers[id.0 as usize].iter().copied();
            self.push_ready(readers.filter(|&r| self.is_for_backward(r)), seen, order);
            next += 1;
        }
    }

    fn push_ready(&self, readers: impl Iterator<Item = NodeId>, seen: &mut [bool], order: &mut Vec<NodeId>) {
        for reader in readers {
            let ready = self.graph[reader].operands.iter().all(|o| seen[o.0 as usize]);
            if ready && !std::mem::replace(&mut seen[reader.0 as usize], true) {
                order.push(reader);
            }
        }
    }

    /// The result that one launch gives before this one.
    pub fn first_result(&self, id: NodeId) -> Option<NodeId> {
        let node = &self.graph[id];
        let first: Op = match &node.op {
            Op::Attention(attention) if attention.out > 0 => Attention { out: 0, ..attention.clone() }.into(),
            Op::MaxPool(pool) if pool.out > 0 => MaxPool { out: 0, ..pool.clone() }.into(),
            _ => return None,
        };
        let readers = &self.readers[node.operands.first()?.0 as usize];
        let is_first = |other: &Node| other.operands == node.operands && other.op == first;
        readers.iter().copied().find(|&reader| is_first(&self.graph[reader]))
    }
}

/// Ops that compute each element from the operands' elements at the same place.
pub(crate) fn is_pointwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::StopGradient(_))
}
