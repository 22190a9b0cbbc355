//! Rewrites a graph into a cheaper equal one: algebra, and the patterns that exporters decompose, by equality saturation.
//!
//! The graph is cut into regions; each becomes an e-graph whose terms are our nodes (Willsey et al. 2021, arXiv 2004.03082),
//! and equal regions are solved once. Before and after: a logical graph of the same outputs, equal to rounding. In a training
//! graph the forward pass stays, since gradients refer to its nodes, and gradients change only node by node in place.

mod attention;
mod contract;
mod extract;
mod interleave;
mod mask;
mod movement;
mod pattern;
mod region;
mod roll;
mod rules;
mod slices;
mod solve;
mod term;

#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Operands, Phase};
use crate::ops::Op;
use region::Kind;
use rules::{Rule, Scope};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use solve::{Local, Problem, Solution};
use std::collections::BTreeSet;
use term::Head;

/// The names of all rules.
pub fn rule_names() -> Vec<&'static str> {
    rules::all().iter().map(|rule| rule.name).collect()
}

/// The cheapest equal graph that the rules find.
pub fn simplify(graph: &Graph) -> Result<Graph> {
    let training = graph.nodes.iter().any(|node| node.phase != Phase::Forward);
    let wanted = |rule: &Rule| !training || rule.scope == Scope::Pointwise;
    let rolled = if training { None } else { roll::roll(graph)? };
    let graph = rolled.as_ref().unwrap_or(graph);
    let interleaved = if training { None } else { interleave::interleave(graph)? };
    Rewriter::new(interleaved.as_ref().unwrap_or(graph), rules::all().into_iter().filter(wanted).collect()).run(training)
}

struct Rewriter<'a> {
    graph: &'a Graph,
    rules: Vec<Rule>,
    kinds: Vec<Kind>,
    out: Graph,
    /// The new node of each old one that has one.
    map: Vec<Option<NodeId>>,
    solved: FxHashMap<Problem, Solution>,
    /// Own nodes that another region or an output reads.
    read: Vec<bool>,
}

/// Where a region's problem comes from.
struct Region {
    phase: Phase,
    problem: Problem,
    /// The old node of each term.
    nodes: Vec<NodeId>,
    /// The old nodes of the outputs.
    outputs: Vec<NodeId>,
}

impl<'a> Rewriter<'a> {
    fn new(graph: &'a Graph, rules: Vec<Rule>) -> Rewriter<'a> {
        let mut out = Graph::new();
        out.mesh = graph.mesh.clone();
        let map = vec![None; graph.nodes.len()];
        let read = vec![false; graph.nodes.len()];
        Rewriter { graph, rules, kinds: region::kinds(graph), out, map, solved: FxHashMap::default(), read }
    }

    fn run(mut self, training: bool) -> Result<Graph> {
        let parts: BTreeSet<(Phase, Option<u32>)> = self.graph.nodes.iter().map(|n| (n.phase, n.stage)).collect();
        let cut = |&(phase, stage): &(Phase, Option<u32>)| region::cut(self.graph, &self.kinds, phase, stage);
        let regions: Vec<Vec<NodeId>> = parts.iter().flat_map(cut).collect();
        self.find_read(&regions);
        for nodes in &regions {
            if training && self.graph[nodes[0]].phase == Phase::Forward {
                for &id in nodes {
                    self.copy(id);
                }
                continue;
            }
            let region = self.region(nodes);
            let solution = match self.solved.get(&region.problem) {
                Some(known) => known.clone(),
                None => solve::solve(&region.problem, &self.rules),
            };
            self.replay(&region, &solution);
            self.solved.entry(region.problem).or_insert(solution);
        }
        for (name, id) in &self.graph.outputs {
            let id = self.copy(*id);
            self.out.outputs.push((name.clone(), id));
        }
        self.out.set_cursor(Default::default());
        self.out.map(|out, _, node, operands| Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())))
    }

    fn find_read(&mut self, regions: &[Vec<NodeId>]) {
        let mut region_of = vec![usize::MAX; self.graph.nodes.len()];
        for (i, nodes) in regions.iter().enumerate() {
            nodes.iter().for_each(|id| region_of[id.0 as usize] = i);
        }
        for id in self.graph.ids() {
            for operand in &self.graph[id].operands {
                self.read[operand.0 as usize] |= region_of[operand.0 as usize] != region_of[id.0 as usize];
            }
        }
        self.graph.outputs.iter().for_each(|&(_, id)| self.read[id.0 as usize] = true);
    }

    /// The new node of an old one, added with its operands as it is if there is none yet.
    fn copy(&mut self, id: NodeId) -> NodeId {
        let mut open = vec![id];
        while let Some(&next) = open.last() {
            if self.map[next.0 as usize].is_some() {
                open.pop();
                continue;
            }
            let missing: Vec<NodeId> =
                self.graph[next].operands.iter().copied().filter(|o| self.map[o.0 as usize].is_none()).collect();
            if missing.is_empty() {
                let node = &self.graph[next];
                let operands: Operands = node.operands.iter().map(|o| self.map[o.0 as usize].expect("copied")).collect();
                self.stamp(next);
                let new = self.out.add_typed(node.op.clone(), &operands, node.ty.clone());
                self.map[next.0 as usize] = Some(new);
            }
            open.extend(missing);
        }
        self.map[id.0 as usize].expect("copied just now")
    }

    /// What is added next stands in the place of old node `id`.
    fn stamp(&mut self, id: NodeId) {
        // A parameter that only the update reads stands before what is said to be its gradient.
        if let Some(GradOf::Value(of)) = self.graph.grad_of(id)
            && matches!(self.graph[of].op, Op::Param(_))
            && self.map[of.0 as usize].is_none()
        {
            self.copy(of);
        }
        let node = &self.graph[id];
        self.out.set_phase(node.phase);
        self.out.set_stage(node.stage);
        self.out.set_origin_of(self.graph, id);
        let of = |n: NodeId| self.map[n.0 as usize];
        let grad_of = match self.graph.grad_of(id) {
            Some(GradOf::Op(n)) => of(n).map(GradOf::Op),
            Some(GradOf::Value(n)) => of(n).map(GradOf::Value),
            None => None,
        };
        self.out.set_grad_of(grad_of);
    }

    /// The problem of a run of nodes: what they read from outside is given, shared nodes are their own.
    fn region(&self, own: &[NodeId]) -> Region {
        let problem = Problem { terms: Vec::new(), outputs: Vec::new() };
        let phase = self.graph[own[0]].phase;
        let mut region = Region { phase, problem, nodes: Vec::new(), outputs: Vec::new() };
        let members: BTreeSet<NodeId> = own.iter().copied().collect();
        let mut place: FxHashMap<NodeId, u32> = FxHashMap::default();
        for &id in own {
            self.enter(&mut region, &members, &mut place, id);
        }
        for &id in own.iter().filter(|id| self.read[id.0 as usize]) {
            region.outputs.push(id);
            region.problem.outputs.push(place[&id]);
        }
        region
    }

    fn enter(&self, region: &mut Region, members: &BTreeSet<NodeId>, place: &mut FxHashMap<NodeId, u32>, id: NodeId) -> u32 {
        if let Some(&at) = place.get(&id) {
            return at;
        }
        let node = &self.graph[id];
        let inside = members.contains(&id) || (self.kinds[id.0 as usize] == Kind::Shared && node.phase == region.phase);
        let args: SmallVec<[u32; 3]> = match inside {
            true => node.operands.iter().map(|&o| self.enter(region, members, place, o)).collect(),
            false => SmallVec::new(),
        };
        let at = region.nodes.len() as u32;
        let head = match &node.op {
            _ if !inside => Head::Given(at),
            op if is_opaque(op) => Head::Opaque(at),
            op => Head::Op(op.clone()),
        };
        region.problem.terms.push(Local { head, ty: node.ty.clone(), args });
        region.nodes.push(id);
        place.insert(id, at);
        at
    }

    /// Adds the solution in the place of the region.
    fn replay(&mut self, region: &Region, solution: &Solution) {
        let mut new: Vec<NodeId> = Vec::with_capacity(solution.terms.len());
        for (term, &(from, _)) in solution.terms.iter().zip(&solution.from) {
            let operands: Operands = term.args.iter().map(|&a| new[a as usize]).collect();
            let old = region.nodes[from as usize];
            new.push(match &term.head {
                Head::Given(at) => self.copy(region.nodes[*at as usize]),
                Head::Opaque(at) => {
                    let id = region.nodes[*at as usize];
                    self.stamp(id);
                    self.out.add_typed(self.graph[id].op.clone(), &operands, term.ty.clone())
                }
                Head::Op(op) => {
                    self.stamp(old);
                    self.out.add_typed(op.clone(), &operands, term.ty.clone())
                }
            });
        }
        for (&old, &output) in region.outputs.iter().zip(&solution.outputs) {
            self.map[old.0 as usize] = Some(new[output as usize]);
        }
        // Gradients may refer to what no other region reads, and outputs be what each region makes for itself.
        for (&new, &(from, equal)) in new.iter().zip(&solution.from) {
            let old = region.nodes[from as usize];
            if equal && self.map[old.0 as usize].is_none() {
                self.map[old.0 as usize] = Some(new);
            }
        }
    }
}

/// Ops that no rule looks into and that differ from layer to layer.
fn is_opaque(op: &Op) -> bool {
    matches!(op, Op::Uniform(_) | Op::GradSum(_) | Op::StageSum(_) | Op::Transfer(_))
}
