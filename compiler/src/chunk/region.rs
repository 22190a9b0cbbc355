//! What is parted: all that works on values of the shape of a product's result, and what lies between.

use super::{Limits, Part};
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use dcc_program::{FactorId, Mesh, Reduce, Shape};
use std::collections::BTreeMap;

/// How many products are tried: what comes before a classifier has gradients that depend on the loss.
const LAST: usize = 4;

#[derive(Debug)]
pub(super) struct Region {
    /// Its nodes, and what becomes of each in a chunk.
    pub parts: BTreeMap<NodeId, Part>,
    pub chunks: u64,
    /// Elements of the dim in a chunk.
    pub size: u64,
    /// By node: whether it is of the region or depends on it.
    follows: Vec<bool>,
    /// The product's.
    shape: Shape,
}

impl Region {
    /// That of one of the last products of the forward pass, if one is within the limits and has a dim to be parted along.
    pub fn find(graph: &Graph, mesh: &Mesh, limits: Limits) -> Option<Region> {
        let live = graph.live();
        let bytes: Vec<u64> = graph.ids().map(|id| graph.ty(id).local_bytes(mesh)).collect();
        let is_large = |id: &NodeId| live[id.0 as usize] && bytes[id.0 as usize] >= limits.bytes;
        let is_product = |id: &NodeId| graph[*id].phase == Phase::Forward && matches!(graph[*id].op, Op::DotGeneral(_));
        let last: Vec<NodeId> = graph.ids().rev().filter(is_large).filter(is_product).take(LAST).collect();
        let mut search = Search { graph, live, bytes, product: NodeId(0), limits };
        last.into_iter().find_map(|product| {
            search.product = product;
            (0..graph.ty(product).rank()).find_map(|dim| search.along(dim))
        })
    }

    pub fn follows(&self, id: NodeId) -> bool {
        self.follows[id.0 as usize]
    }

    /// Whether a value is as large as the product: of its shape.
    pub fn is_large(&self, graph: &Graph, id: NodeId) -> bool {
        graph.ty(id).shape == self.shape
    }

    /// Which dim of each operand a node of the region reads a chunk of.
    pub fn operand_dims(&self, graph: &Graph, id: NodeId) -> Vec<Option<usize>> {
        let from = graph[id].operands.iter().find_map(|o| match self.parts.get(o) {
            Some(Part::Of(dim)) => Some((*o, *dim)),
            _ => None,
        });
        match from {
            Some((operand, dim)) => pass(graph, id, operand, dim).map(|(dims, _)| dims).expect("the region was searched by it"),
            // The product itself.
            None => {
                let Part::Of(dim) = self.parts[&id] else { unreachable!("a region begins with a whole value") };
                source(graph, id, dim).expect("the region was searched by it")
            }
        }
    }
}

struct Search<'a> {
    graph: &'a Graph,
    live: Vec<bool>,
    /// Of each value on a rank.
    bytes: Vec<u64>,
    product: NodeId,
    limits: Limits,
}

impl Search<'_> {
    fn along(&self, dim: usize) -> Option<Region> {
        let ty = self.graph.ty(self.product);
        let rows = self.bytes[self.product.0 as usize] / ty.dtype.bytes() / ty.shape.last().copied().unwrap_or(1).max(1);
        let chunks = self.limits.count(ty.shape[dim], rows);
        if chunks < 2 || !ty.sharding.dims[dim].is_empty() {
            return None;
        }
        source(self.graph, self.product, dim)?;
        let known = self.pass_on(dim);
        let large = |id: NodeId| self.graph.ty(id).shape == ty.shape;
        let reads_large = |id: NodeId| self.graph[id].operands.iter().any(|o| large(*o) && is_part(&known, *o));
        let core = |id: NodeId| large(id) && is_part(&known, id) || reads_large(id);
        let between = self.between(core);
        let mut parts = BTreeMap::new();
        for id in self.nodes().filter(|id| between[id.0 as usize]) {
            parts.insert(id, known[id.0 as usize]?);
        }
        let follows = self.after(&parts);
        let whole = Region { parts, chunks, size: ty.shape[dim] / chunks, follows, shape: ty.shape.clone() };
        self.may_run(&whole).then_some(whole)
    }

    fn nodes(&self) -> impl DoubleEndedIterator<Item = NodeId> + '_ {
        self.graph.ids().filter(|id| self.live[id.0 as usize])
    }

    /// What becomes of each value that depends on chunks of the product, where that can be said.
    fn pass_on(&self, dim: usize) -> Vec<Option<Part>> {
        let mut known = vec![None; self.graph.nodes.len()];
        known[self.product.0 as usize] = Some(Part::Of(dim));
        for id in self.nodes().filter(|id| *id > self.product) {
            let parted = self.graph[id].operands.iter().filter_map(|o| match known[o.0 as usize] {
                Some(Part::Of(dim)) => Some((*o, dim)),
                _ => None,
            });
            let parted: Vec<(NodeId, usize)> = parted.collect();
            let Some(&(operand, at)) = parted.first() else { continue };
            let Some((dims, becomes)) = pass(self.graph, id, operand, at) else { continue };
            let agrees = |(o, dim): &(NodeId, usize)| {
                self.graph[id].operands.iter().zip(&dims).all(|(operand, at)| operand != o || *at == Some(*dim))
            };
            known[id.0 as usize] = parted.iter().all(agrees).then_some(becomes);
        }
        known
    }

    /// Nodes of `core` and all on the way from one to another.
    fn between(&self, core: impl Fn(NodeId) -> bool) -> Vec<bool> {
        let (mut after, mut before) = (vec![false; self.graph.nodes.len()], vec![false; self.graph.nodes.len()]);
        for id in self.nodes() {
            after[id.0 as usize] = core(id) || self.graph[id].operands.iter().any(|o| after[o.0 as usize]);
        }
        for id in self.nodes().rev() {
            before[id.0 as usize] |= core(id);
            if before[id.0 as usize] {
                self.graph[id].operands.iter().for_each(|o| before[o.0 as usize] = true);
            }
        }
        after.iter().zip(&before).map(|(after, before)| *after && *before).collect()
    }

    fn after(&self, parts: &BTreeMap<NodeId, Part>) -> Vec<bool> {
        let mut follows = vec![false; self.graph.nodes.len()];
        for id in self.nodes() {
            let of_it = parts.contains_key(&id) || self.graph[id].operands.iter().any(|o| follows[o.0 as usize]);
            follows[id.0 as usize] = of_it;
        }
        follows
    }

    /// Whether the region ends in the backward pass, is of one stage, reads nothing that waits for it, and whether what follows it in
    /// the forward pass can wait for the backward pass.
    fn may_run(&self, region: &Region) -> bool {
        let home = self.graph[self.product].stage;
        let of_region = |id: NodeId| region.parts.contains_key(&id);
        let runs = |id: NodeId| matches!(self.graph[id].phase, Phase::Forward | Phase::Backward);
        let sound = region.parts.keys().all(|&id| {
            let reads = &self.graph[id].operands;
            let summed = reads.iter().any(|o| region.parts.get(o) == Some(&Part::Term));
            let waits = reads.iter().any(|o| region.follows(*o) && !of_region(*o));
            self.graph[id].stage == home && runs(id) && !summed && !waits
        });
        let trains = region.parts.keys().any(|&id| self.graph[id].phase == Phase::Backward);
        let mut rest = self.nodes().filter(|&id| region.follows(id) && !of_region(id));
        let moves = rest.all(|id| match self.graph[id].phase {
            Phase::Forward => self.graph[id].stage == home && !self.graph[id].op.is_communication(),
            Phase::Backward | Phase::Update => true,
            _ => false,
        });
        sound && trains && moves
    }
}

fn is_part(known: &[Option<Part>], id: NodeId) -> bool {
    matches!(known[id.0 as usize], Some(Part::Of(_)))
}

/// Whether chunks pass through this op as they are.
fn is_plain(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select(_)
            | Op::Cast(_)
            | Op::GradSum(_)
            | Op::Reduce(_)
            | Op::DotGeneral(_)
            | Op::BroadcastInDim(_)
            | Op::Transpose(_)
    )
}

/// A node with chunks of `operand` along its dim: which dims of all operands it reads chunks of, and what it makes.
fn pass(graph: &Graph, id: NodeId, operand: NodeId, dim: usize) -> Option<(Vec<Option<usize>>, Part)> {
    let at = graph[id].operands.iter().position(|&o| o == operand)?;
    let rule = rule(graph, id)?;
    let [factor] = rule.spec.operands[at][dim][..] else { return None };
    let dims = dims_of(graph, id, &rule, factor)?;
    match rule.spec.result.iter().position(|dim| dim.contains(&factor)) {
        Some(at) if rule.spec.result[at].len() == 1 => Some((dims, Part::Of(at))),
        Some(_) => None,
        None => {
            let adds =
                matches!(graph[id].op, Op::DotGeneral(_)) || matches!(&graph[id].op, Op::Reduce(op) if op.op == Reduce::Sum);
            // A sum of half floats would be rounded after each chunk.
            (adds && graph.ty(id).dtype.bytes() >= 4).then_some((dims, Part::Term))
        }
    }
}

/// Which dims of its operands the product reads for a chunk of a dim of its result.
fn source(graph: &Graph, id: NodeId, dim: usize) -> Option<Vec<Option<usize>>> {
    let rule = rule(graph, id)?;
    let [factor] = rule.spec.result[dim][..] else { return None };
    dims_of(graph, id, &rule, factor)
}

fn rule(graph: &Graph, id: NodeId) -> Option<crate::ops::Rule> {
    let node = &graph[id];
    let types: Vec<_> = node.operands.iter().map(|&o| graph.ty(o)).collect();
    is_plain(&node.op).then(|| node.op.rule(&types, &node.ty))
}

/// By operand, the dim that is this factor alone and lies whole on every rank; `None` where the factor cannot be parted.
fn dims_of(graph: &Graph, id: NodeId, rule: &crate::ops::Rule, factor: FactorId) -> Option<Vec<Option<usize>>> {
    if rule.is_whole(factor) || rule.masked.contains(&factor) {
        return None;
    }
    let of = |(dims, operand): (&Vec<dcc_program::factors::DimFactors>, &NodeId)| {
        let at = dims.iter().position(|dim| dim.contains(&factor));
        let good = at.is_none_or(|at| dims[at].len() == 1 && graph.ty(*operand).sharding.dims[at].is_empty());
        good.then_some(at)
    };
    rule.spec.operands.iter().zip(&graph[id].operands).map(of).collect()
}
