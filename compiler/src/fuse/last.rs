//! Loops that are the last to read a value, and the only ones that late, are one pass over it: what they make can take its place.
//!
//! So a hidden layer is read once by the backward pass, which makes its activation again for the weights' gradient beside its own
//! gradient.

use super::{ClusterId, Fuser, Role, Unit, refs};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::kernel::{DimId, Index};
use std::collections::BTreeSet;

impl Fuser<'_> {
    /// Merges pairs of pointwise clusters of which each value has no other reader in the last section that reads it.
    pub(super) fn merge_last_readers(&mut self, nodes: &[NodeId]) {
        for &id in nodes {
            if let Some([into, from]) = self.last_readers(id) {
                self.merge(into, from);
            }
        }
    }

    /// The two clusters that read `id` in the last section that does, each at its own loops, if nothing else does there and one of them
    /// makes no more than what it takes the place of.
    fn last_readers(&self, id: NodeId) -> Option<[ClusterId; 2]> {
        if !matches!(self.fusion.roles[id.0 as usize], Role::Member(_) | Role::Library) || self.wanted.contains(&id) {
            return None;
        }
        let readers = self.readers_of_storage(id)?;
        let last = readers.iter().map(|&(_, reader)| self.graph[reader].section()).max()?;
        let mut clusters = BTreeSet::new();
        for (read, reader) in readers.into_iter().filter(|&(_, reader)| self.graph[reader].section() == last) {
            let Unit::Cluster(cluster) = self.unit(reader) else { return None };
            if self.unit(id) == Unit::Cluster(cluster) || !self.reads_at_own_loops(cluster, reader, read) {
                return None;
            }
            clusters.insert(cluster);
        }
        let [into, from] = clusters.into_iter().collect::<Vec<_>>().try_into().ok()?;
        let bytes = |node: NodeId| self.graph.ty(node).elements() * self.graph.ty(node).dtype.bytes();
        let made = |of: ClusterId| {
            self.fusion.clusters[of.0 as usize].members.iter().filter(|m| self.crosses(**m)).map(|m| bytes(*m)).sum::<u64>()
        };
        (made(into).min(made(from)) <= bytes(id)).then_some([into, from])
    }

    /// Who reads what lies where `id` does, and under which view. `None`: something changes it there, or wants it.
    fn readers_of_storage(&self, id: NodeId) -> Option<Vec<(NodeId, NodeId)>> {
        let (mut open, mut found) = (vec![id], Vec::new());
        while let Some(read) = open.pop() {
            for reader in self.readers(read) {
                match self.fusion.roles[reader.0 as usize] {
                    Role::View if !matches!(self.graph[reader].op, Op::Reshape(_)) || self.wanted.contains(&reader) => {
                        return None;
                    }
                    Role::View => open.push(reader),
                    _ => found.push((read, reader)),
                }
            }
        }
        Some(found)
    }

    /// Whether the cluster, which folds nothing, reads `read` for `reader` at its loops, one after the other.
    fn reads_at_own_loops(&self, cluster: ClusterId, reader: NodeId, read: NodeId) -> bool {
        let cluster = &self.fusion.clusters[cluster.0 as usize];
        let loops: Vec<Index> = (0..cluster.dims.len() as u8).map(|d| Index::Dim(DimId(d))).collect();
        let mut at_loops = cluster.inner.is_empty();
        refs::visit(self.graph, &self.fusion, reader, &cluster.index[&reader], &mut |operand, at| {
            at_loops &= operand != read || at == Some(loops.as_slice());
        });
        at_loops
    }
}

#[cfg(test)]
mod tests {
    use crate::fuse::fuse;
    use crate::graph::{Graph, NodeId};
    use std::collections::BTreeSet;

    const LAYER: &str = "graph
forward
%0 f32[4, 8] = input{batch_dim:0, name:x}
%1 f32[8, 8] = param{kind:weight, name:w}
%2 f32[4, 8] = dot_general{spec:\"m k, k n -> m n\"} %0, %1
%3 f32[4, 8] = unary{op:tanh} %2
backward
%4 f32[4, 8] = dot_general{spec:\"m k, k n -> m n\"} %3, %1
%5 f32[4, 8] = unary{op:sin} %2
%6 f32[4, 8] = binary{op:mul} %4, %5
%7 f32[8, 8] = dot_general{spec:\"m k, m n -> k n\"} %0, %6
%8 f32[4, 8] = unary{op:tanh} %2
%9 f32[8, 8] = dot_general{spec:\"m k, m n -> k n\"} %8, %6
";

    /// Kernels of the backward pass: of two where what makes the activation again is one by itself.
    fn kernels(text: &str, wanted: &[u32]) -> usize {
        let graph = Graph::parse(text).expect("a graph");
        let nodes: Vec<NodeId> = graph.ids().collect();
        let wanted: Vec<NodeId> = wanted.iter().copied().map(NodeId).collect();
        let fusion = fuse(&graph, &nodes, &wanted, &BTreeSet::new());
        let clusters = fusion.clusters.iter().filter(|cluster| !cluster.members.is_empty());
        clusters.filter(|cluster| cluster.section == graph[NodeId(6)].section()).count()
    }

    #[test]
    fn the_last_readers_of_a_value_are_one_kernel() {
        assert_eq!(kernels(LAYER, &[7, 9]), 1);
    }

    #[test]
    fn a_value_that_something_else_needs_is_read_apart() {
        assert_eq!(kernels(LAYER, &[2, 7, 9]), 2, "an output");
        let product = format!("{LAYER}%10 f32[8, 8] = dot_general{{spec:\"m k, m n -> k n\"}} %2, %6\n");
        assert_eq!(kernels(&product, &[7, 9, 10]), 2, "a product");
        let later = format!("{LAYER}update\n%10 f32[8] = reduce{{dims:[0], op:sum}} %2\n");
        assert_eq!(kernels(&later, &[7, 9, 10]), 2, "a later section");
    }

    #[test]
    fn kernels_of_which_one_needs_the_other_stay_apart() {
        let forward = LAYER.split("backward").next().expect("a forward pass");
        let again = "%4 f32[4, 8] = unary{op:sin} %2\n%5 f32[4, 8] = dot_general{spec:\"m k, k n -> m n\"} %4, %1\n";
        let both = "%6 f32[4, 8] = binary{op:mul} %5, %2\n%7 f32[8, 8] = dot_general{spec:\"m k, m n -> k n\"} %0, %6\n";
        assert_eq!(kernels(&format!("{forward}backward\n{again}{both}"), &[7]), 2);
    }

    #[test]
    fn what_would_take_more_room_than_it_leaves_stays_apart() {
        let two = "%8 f32[4, 8] = unary{op:tanh} %2\n%9 f32[8, 8] = dot_general{spec:\"m k, m n -> k n\"} %8, %6";
        let wider = |more: &str| LAYER.replace(two, &format!("{two}\n{more}"));
        let both = "%10 f32[4, 8] = unary{op:neg} %8\n%11 f32[4, 8] = unary{op:abs} %6\n";
        assert_eq!(kernels(&wider(both), &[7, 9, 10, 11]), 2);
        assert_eq!(kernels(&wider("%10 f32[4, 8] = unary{op:neg} %8\n"), &[7, 9, 10]), 1, "the other makes no more");
    }
}
