//! Which dims tensor parallelism may split: those that weights of products and lookups have.
//!
//! Dims that correspond through the ops' rules are one class. A class is a feature if a dim of a parameter (or of what is made
//! from parameters alone) that a product, a lookup or attention computes on belongs to it: widths, heads, vocabularies. Positions of
//! queries and keys are none, though a bias may be learned for each. The others are samples, for `dp`, and sequences, for `cp` and for
//! sequence parallelism.

use super::super::forward::{Forward, Kind};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::FactorId;
use dcc_program::factors::DimFactors;

pub(super) struct Classes {
    /// First element of each node: one per dim of its value, then one per factor of its rule.
    first: Vec<usize>,
    parent: Vec<usize>,
    feature: Vec<bool>,
    /// Features that products with weights sum over.
    contracted: Vec<bool>,
    /// Dims that something computed per microbatch sums over that is no product.
    reduced: Vec<bool>,
}

impl Classes {
    pub fn of(forward: &Forward) -> Classes {
        let graph = forward.graph;
        let [feature, contracted, reduced] = [const { Vec::new() }; 3];
        let mut classes = Classes { first: vec![0; graph.nodes.len()], parent: Vec::new(), feature, contracted, reduced };
        for &id in &forward.order {
            classes.first[id.0 as usize] = classes.parent.len();
            let count = graph.ty(id).rank() + forward.rule(id).spec.names.len();
            classes.parent.extend(classes.parent.len()..classes.parent.len() + count);
        }
        for &id in &forward.order {
            let spec = &forward.rule(id).spec;
            // Of constants each reader makes or slices its own: dims that only share one have nothing to do with each other.
            let read = graph[id].operands.iter().zip(&spec.operands).filter(|(operand, _)| !forward.is_constant(**operand));
            for (&operand, dims) in read {
                classes.join_dims(forward, id, operand, dims);
            }
            classes.join_dims(forward, id, id, &spec.result);
        }
        classes.feature = vec![false; classes.parent.len()];
        classes.contracted = classes.feature.clone();
        classes.reduced = classes.feature.clone();
        for &id in &forward.order {
            classes.mark_features(forward, id);
        }
        classes
    }

    pub fn is_feature(&self, forward: &Forward, id: NodeId, factor: FactorId) -> bool {
        self.feature[self.root(self.factor(forward, id, factor))]
    }

    /// Whether it is the width of a model: the feature that products with weights sum over, and norms too.
    pub fn is_width(&self, forward: &Forward, id: NodeId, factor: FactorId) -> bool {
        let root = self.root(self.factor(forward, id, factor));
        self.contracted[root] && self.reduced[root]
    }

    /// Whether two factors of `id` are of one class.
    pub fn are_one(&self, forward: &Forward, id: NodeId, a: FactorId, b: FactorId) -> bool {
        self.root(self.factor(forward, id, a)) == self.root(self.factor(forward, id, b))
    }

    /// Whether dim `dim` of `value` is of the class of a factor of `id`.
    pub fn is_dim(&self, value: (NodeId, usize), forward: &Forward, id: NodeId, factor: FactorId) -> bool {
        self.root(self.first[value.0.0 as usize] + value.1) == self.root(self.factor(forward, id, factor))
    }

    pub fn root_of(&self, forward: &Forward, id: NodeId, factor: FactorId) -> usize {
        self.root(self.factor(forward, id, factor))
    }

    pub fn root_of_dim(&self, id: NodeId, dim: usize) -> usize {
        self.root(self.first[id.0 as usize] + dim)
    }

    fn factor(&self, forward: &Forward, id: NodeId, factor: FactorId) -> usize {
        self.first[id.0 as usize] + forward.graph.ty(id).rank() + usize::from(factor.0)
    }

    /// Dims of `value` with the factors of `id` that index them; all factors of a compound dim go together.
    fn join_dims(&mut self, forward: &Forward, id: NodeId, value: NodeId, dims: &[DimFactors]) {
        for (dim, factors) in dims.iter().enumerate() {
            let dim = self.first[value.0 as usize] + dim;
            for &factor in factors {
                let (a, b) = (self.root(dim), self.root(self.factor(forward, id, factor)));
                self.parent[a.max(b)] = a.min(b);
            }
        }
    }

    fn mark_features(&mut self, forward: &Forward, id: NodeId) {
        let node = &forward.graph[id];
        if let (Op::Reduce(_), Kind::Batched) = (&node.op, forward.kind(id)) {
            for factor in forward.rule(id).reduced() {
                let root = self.root(self.factor(forward, id, factor));
                self.reduced[root] = true;
            }
        }
        if !matches!(node.op, Op::DotGeneral(_) | Op::Convolution(_) | Op::Gather(_) | Op::Attention(_)) {
            return;
        }
        let spec = &forward.rule(id).spec;
        // Indices of a table (buckets of distances) have no features, be they constant or computed.
        let read = if matches!(node.op, Op::Gather(_)) { 1 } else { node.operands.len() };
        for (&operand, dims) in node.operands.iter().zip(&spec.operands).take(read) {
            if matches!(forward.kind(operand), Kind::Param | Kind::Begin) {
                for &factor in dims.iter().flatten().filter(|&&f| !node.op.counts_positions(spec, f)) {
                    let root = self.root(self.factor(forward, id, factor));
                    self.feature[root] = true;
                    self.contracted[root] |= !spec.in_result(factor) && !matches!(node.op, Op::Gather(_));
                }
            }
        }
    }

    fn root(&self, mut at: usize) -> usize {
        while self.parent[at] != at {
            at = self.parent[at];
        }
        at
    }
}
