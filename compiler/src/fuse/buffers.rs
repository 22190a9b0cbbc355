//! Which values have a buffer: what units other than their own read, and what a kernel needs to know its loops by.

use super::{Cluster, Fuser, Role, refs};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::kernel::{DimId, Index};

impl Fuser<'_> {
    /// A kernel knows its loops by the operands that they index: where none has a dim that is summed over (a gradient that repeats
    /// along it), what is summed gets a buffer.
    pub(super) fn bind_dims(&mut self) {
        for cluster in &self.fusion.clusters {
            if cluster.inner.iter().all(|&dim| self.is_bound(cluster, dim)) {
                continue;
            }
            for &member in cluster.members.iter().filter(|m| matches!(self.graph[**m].op, Op::Reduce(_))) {
                let operand = self.graph[member].operands[0];
                match self.fusion.roles[operand.0 as usize] {
                    Role::Inline => drop(self.fusion.loads.insert(member)),
                    _ => drop(self.wanted.insert(operand)),
                }
            }
        }
    }

    /// Whether something that the cluster loads is indexed by `dim`.
    fn is_bound(&self, cluster: &Cluster, dim: DimId) -> bool {
        let plain = |index: &[Index]| index.iter().map(|i| Some(refs::dim_of(i))).collect::<Vec<_>>();
        cluster.members.iter().any(|member| {
            let Op::Reduce(reduce) = &self.graph[*member].op else {
                return refs::binds(self.graph, &self.fusion, cluster, *member, &plain(&cluster.index[member]), dim);
            };
            let operand = self.graph[*member].operands[0];
            let at = plain(&refs::reduced_index(reduce, &cluster.index[member], &cluster.inner));
            match self.fusion.roles[operand.0 as usize] {
                Role::Inline => refs::binds(self.graph, &self.fusion, cluster, operand, &at, dim),
                _ => !cluster.index.contains_key(&operand),
            }
        })
    }

    /// Marks what needs a buffer: whatever a unit other than its own reads.
    pub(super) fn materialise(&mut self, nodes: &[NodeId]) {
        for &id in nodes {
            let role = self.fusion.roles[id.0 as usize];
            let wanted = self.wanted.contains(&id);
            let forced = match role {
                Role::Leaf | Role::View | Role::Library => true,
                Role::Member(_) | Role::Inline => wanted,
                Role::Absent => false,
            };
            self.fusion.materialised[id.0 as usize] |= forced;
            let reads_buffers = matches!(role, Role::View | Role::Library);
            if reads_buffers {
                for &operand in &self.graph[id].operands {
                    self.fusion.materialised[operand.0 as usize] = true;
                }
            }
        }
        // Inline nodes with a buffer of their own are computed by a kernel of their own, which reads like a member. Readers come
        // after what they read, so that one pass from the end sees every such node before its operands.
        for &id in nodes.iter().rev() {
            let role = self.fusion.roles[id.0 as usize];
            let own = role == Role::Inline && self.fusion.materialised[id.0 as usize];
            if matches!(role, Role::Member(_)) || own {
                let unit = self.unit(id);
                let mut read = Vec::new();
                refs::visit(self.graph, &self.fusion, id, &[], &mut |operand, _| {
                    if self.unit(operand) != unit {
                        read.push(operand);
                    }
                });
                for operand in read {
                    self.fusion.materialised[operand.0 as usize] = true;
                }
            }
        }
    }
}
