//! Clones, in the backward pass, of what is computed again: one of a value in each segment that reads it.

use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Phase};
use std::collections::{BTreeMap, BTreeSet};

/// What is computed again, by node.
pub(super) struct Choice {
    again: Vec<bool>,
    /// The segment of its stage that a forward node is in.
    segments: Vec<u32>,
}

impl Choice {
    /// Nothing, of so many nodes.
    pub fn none(nodes: usize) -> Choice {
        Choice { again: vec![false; nodes], segments: vec![0; nodes] }
    }

    pub fn set(&mut self, id: NodeId, again: bool, segment: u32) {
        self.again[id.0 as usize] = again;
        self.segments[id.0 as usize] = segment;
    }

    fn is_again(&self, id: NodeId) -> bool {
        self.again[id.0 as usize]
    }

    /// The segment whose backward reads `operand` in `reader`: that of what it is the gradient of, if known, else that of what it reads, which is
    /// no later one.
    fn segment(&self, graph: &Graph, reader: NodeId, operand: NodeId) -> u32 {
        let of = match graph.grad_of(reader) {
            Some(GradOf::Op(of)) => of,
            _ => operand,
        };
        self.segments[of.0 as usize].max(self.segments[operand.0 as usize])
    }
}

/// `graph` in which backward nodes read clones of what is to be computed again. What a clone reads is computed again in its segment.
pub(super) fn clone_readers(graph: &Graph, choice: &Choice) -> Result<Graph> {
    let kept = vec![None; graph.nodes.len()];
    let mut clones = Clones { graph, choice, phases: first_readers(graph, choice), kept, made: BTreeMap::new() };
    graph.map(|out, id, node, operands| {
        let mut operands = operands.to_vec();
        if node.phase.is_backward() {
            for (operand, &old) in operands.iter_mut().zip(&node.operands).filter(|(_, old)| choice.is_again(**old)) {
                *operand = clones.of(out, old, choice.segment(graph, id, old));
            }
            out.set_origin_of(graph, id);
        }
        let made = out.add_typed(node.op.clone(), &operands, node.ty.clone());
        clones.kept[id.0 as usize] = Some(made);
        Ok(made)
    })
}

/// A value and the segment that it is computed again in.
type Wanted = (NodeId, u32);

/// The section in which each clone is first wanted, by the backward pass itself or for another clone.
fn first_readers(graph: &Graph, choice: &Choice) -> BTreeMap<Wanted, Phase> {
    let live = graph.live();
    let mut first: BTreeMap<Wanted, Phase> = BTreeMap::new();
    for id in graph.ids().rev().filter(|id| live[id.0 as usize]) {
        let node = &graph[id];
        let clones: Vec<(u32, Phase)> = first.range((id, 0)..=(id, u32::MAX)).map(|(clone, phase)| (clone.1, *phase)).collect();
        for &operand in node.operands.iter().filter(|o| choice.is_again(**o)) {
            let readers = match node.phase.is_backward() {
                true => vec![(choice.segment(graph, id, operand), node.phase)],
                false => clones.clone(),
            };
            for (segment, reader) in readers {
                let before = first.entry((operand, segment)).or_insert(reader);
                *before = reader.min(*before);
            }
        }
    }
    first
}

struct Clones<'a> {
    graph: &'a Graph,
    choice: &'a Choice,
    phases: BTreeMap<Wanted, Phase>,
    /// New nodes by old ones.
    kept: Vec<Option<NodeId>>,
    made: BTreeMap<Wanted, NodeId>,
}

impl Clones<'_> {
    /// The clone of `id` in a segment, after those of what it reads.
    fn of(&mut self, out: &mut Graph, id: NodeId, segment: u32) -> NodeId {
        let again = |o: &NodeId| self.choice.is_again(*o);
        let (mut open, mut wanted) = (vec![id], BTreeSet::new());
        while let Some(id) = open.pop() {
            if !self.made.contains_key(&(id, segment)) && wanted.insert(id) {
                open.extend(self.graph[id].operands.iter().copied().filter(again));
            }
        }
        let cursor = out.cursor();
        out.set_grad_of(None);
        for id in wanted {
            let node = &self.graph[id];
            let operand = |o: &NodeId| if again(o) { self.made.get(&(*o, segment)).copied() } else { self.kept[o.0 as usize] };
            let operands: Vec<NodeId> = node.operands.iter().map(|o| operand(o).expect("operands come first")).collect();
            out.set_origin_of(self.graph, id);
            out.set_phase(self.phases[&(id, segment)]);
            // The first may be what the backward makes anyway.
            let is_first = self.made.range((id, 0)..=(id, u32::MAX)).next().is_none();
            let add = if is_first { Graph::add_typed } else { Graph::add_apart };
            self.made.insert((id, segment), add(out, node.op.clone(), &operands, node.ty.clone()));
        }
        out.set_cursor(cursor);
        self.made[&(id, segment)]
    }
}
