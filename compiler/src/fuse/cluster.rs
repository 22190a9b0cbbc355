//! Which cluster a reduction or pointwise op joins: that of what it reads, where the loops are the same and nothing else that it
//! reads depends on the cluster; else a new one.

use super::{Cluster, ClusterId, Fuser, LoopDim, Role, Unit, is_pointwise, refs};
use crate::graph::{NodeId, Phase};
use crate::ops::Op;
use dcc_program::Sharding;
use dcc_program::kernel::{DimId, Index};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

impl Fuser<'_> {
    pub(super) fn assign_reduce(&mut self, id: NodeId) -> ClusterId {
        let Op::Reduce(reduce) = &self.graph[id].op else { unreachable!("assign sends reductions here") };
        self.narrow(id);
        let operand = self.graph[id].operands[0];
        let rank = self.graph.ty(operand).rank();
        let reduced: Vec<usize> = reduce.dims.iter().map(|&d| usize::from(d)).collect();
        let kept: Vec<usize> = (0..rank).filter(|d| !reduced.contains(d)).collect();
        let trailing = !kept.is_empty() && kept.iter().max() < reduced.iter().min();
        if let (Role::Member(cluster), true) = (self.fusion.roles[operand.0 as usize], trailing) {
            let at = self.fusion.clusters[cluster.0 as usize].index.get(&operand).cloned().unwrap_or_default();
            if self.can_reduce_in(cluster, id, &at, &reduced) {
                let dims_at = |dims: &[usize]| -> Vec<Index> { dims.iter().map(|&d| at[d].clone()).collect() };
                let inner = dims_at(&reduced).iter().map(refs::dim_of).collect();
                self.fusion.clusters[cluster.0 as usize].inner = inner;
                self.join(cluster, id, dims_at(&kept));
                return cluster;
            }
        }
        self.release(operand, &mut vec![id], &mut self.loads(id));
        let cluster = self.new_cluster(id, &self.graph.ty(operand).shape, &self.graph.ty(operand).sharding.clone());
        let dim = |&d: &usize| Index::Dim(DimId(d as u8));
        self.fusion.clusters[cluster.0 as usize].inner = reduced.iter().map(|&d| DimId(d as u8)).collect();
        self.join(cluster, id, kept.iter().map(dim).collect());
        self.join_sibling(cluster)
    }

    /// A new cluster of a reduction or an update, merged into an earlier one over the same loops which loads one of the values that it does:
    /// both are one pass over it.
    fn join_sibling(&mut self, cluster: ClusterId) -> ClusterId {
        let own = &self.fusion.clusters[cluster.0 as usize];
        let loads: Vec<NodeId> =
            own.loads.iter().copied().filter(|load| self.graph.ty(*load).rank() == own.dims.len()).collect();
        let like = |of: &ClusterId| *of != cluster && self.fusion.clusters[of.0 as usize].inner == own.inner;
        let of = |reader: NodeId| match self.fusion.roles[reader.0 as usize] {
            Role::Member(of) => Some(of),
            _ => None,
        };
        let siblings: BTreeSet<ClusterId> =
            loads.iter().flat_map(|&load| self.readers(load)).filter_map(of).filter(like).collect();
        for sibling in siblings.into_iter().rev() {
            self.merge(sibling, cluster);
            if self.fusion.clusters[cluster.0 as usize].members.is_empty() {
                return sibling;
            }
        }
        cluster
    }

    /// A reduction over trailing dims joins its operand's cluster if that has no other inner dims.
    fn can_reduce_in(&self, id: ClusterId, node: NodeId, at: &[Index], reduced: &[usize]) -> bool {
        let cluster = &self.fusion.clusters[id.0 as usize];
        let inner: Vec<DimId> = reduced.iter().map(|&d| refs::dim_of(&at[d])).collect();
        let full = at.len() == cluster.dims.len();
        cluster.section == self.graph[node].section()
            && full
            && (cluster.inner.is_empty() || cluster.inner == inner)
            && self.has_room(id, node)
    }

    /// A pointwise operand that only `readers` read moves into their new cluster, which has these `loads`: it is recomputed in them, and
    /// so is what only it reads.
    fn release(&mut self, operand: NodeId, readers: &mut Vec<NodeId>, loads: &mut BTreeSet<NodeId>) {
        let mut open = vec![operand];
        while let Some(operand) = open.pop() {
            let Role::Member(cluster) = self.fusion.roles[operand.0 as usize] else { continue };
            let only = self.uses[operand.0 as usize].iter().all(|u| readers.contains(u)) && !self.wanted.contains(&operand);
            let alone = self.fusion.clusters[cluster.0 as usize].alone;
            let pointwise = is_pointwise(&self.graph[operand].op) && !alone;
            if !only || !pointwise || self.graph[operand].section() != self.graph[readers[0]].section() {
                continue;
            }
            let more = self.loads(operand);
            if loads.union(&more).count() > self.limits.loads || readers.len() > self.limits.inline as usize {
                continue;
            }
            loads.extend(more);
            self.dissolve(operand, cluster);
            readers.push(operand);
            open.extend(self.graph[operand].operands.iter().rev());
        }
    }

    pub(super) fn assign_pointwise(&mut self, id: NodeId) -> ClusterId {
        self.narrow(id);
        let (mut candidates, plainly) = self.clusters_read(id);
        candidates.sort_by_key(|c| std::cmp::Reverse(self.fusion.clusters[c.0 as usize].last));
        for (i, &cluster) in candidates.iter().enumerate() {
            // What is read in pieces would stay a buffer.
            for &other in candidates[i + 1..].iter().filter(|other| plainly.contains(&cluster) && plainly.contains(other)) {
                self.merge(cluster, other);
                self.merge(other, cluster);
            }
            if let Some(index) = self.placement(cluster, id) {
                self.join(cluster, id, index);
                return cluster;
            }
        }
        let cluster = self.assign_new(id);
        // A parameter's state and its update may read the same without reading each other.
        let updates = self.graph[id].phase == Phase::Update && self.graph.ty(id).rank() > 0;
        if updates { self.join_sibling(cluster) } else { cluster }
    }

    /// A cluster of its own, which others may join.
    pub(super) fn assign_new(&mut self, id: NodeId) -> ClusterId {
        let ty = self.graph.ty(id).clone();
        let cluster = self.new_cluster(id, &ty.shape, &ty.sharding);
        self.join(cluster, id, (0..ty.rank()).map(|d| Index::Dim(DimId(d as u8))).collect());
        cluster
    }

    /// A cluster that nothing joins or leaves.
    pub(super) fn assign_alone(&mut self, id: NodeId) -> ClusterId {
        let cluster = self.assign_new(id);
        self.fusion.clusters[cluster.0 as usize].alone = true;
        cluster
    }

    /// Moves the members of `from` into `into` where both run over the same loops, or `from` over the outer ones of `into`, and
    /// neither needs the other through a third.
    pub(super) fn merge(&mut self, into: ClusterId, from: ClusterId) {
        let (a, b) = (&self.fusion.clusters[into.0 as usize], &self.fusion.clusters[from.0 as usize]);
        if a.alone || b.alone {
            return;
        }
        let row_only = |c: &Cluster| c.members.iter().all(|m| c.index[m].len() == c.dims.len() || !c.inner.is_empty());
        if a.section != b.section || a.members.is_empty() || b.members.is_empty() || !row_only(a) || !row_only(b) {
            return;
        }
        let Some(moved) = moved_loops(a, b) else { return };
        if a.reads.union(&b.reads).count() > self.limits.units || !self.have_room(into, from) {
            return;
        }
        let through = |reads: &BTreeSet<Unit>, target: ClusterId| {
            reads.iter().any(|&u| u != Unit::Cluster(target) && self.depends(u, target))
        };
        if through(&a.reads, from)
            || through(&b.reads, into)
            || self.reads_elsewhere(&a.index, &moved)
            || self.reads_elsewhere(&moved, &a.index)
        {
            return;
        }
        let empty = Cluster::empty(b.section);
        let gone = std::mem::replace(&mut self.fusion.clusters[from.0 as usize], empty);
        for &member in &gone.members {
            self.fusion.roles[member.0 as usize] = Role::Member(into);
        }
        let cluster = &mut self.fusion.clusters[into.0 as usize];
        cluster.members.extend(gone.members);
        cluster.members.sort_unstable();
        cluster.index.extend(moved);
        cluster.reads.extend(gone.reads);
        cluster.reads.remove(&Unit::Cluster(into));
        cluster.reads.remove(&Unit::Cluster(from));
        cluster.work += gone.work;
        cluster.loads.extend(gone.loads);
        cluster.loads.retain(|o| !cluster.index.contains_key(o));
        if cluster.inner.is_empty() {
            cluster.inner = gone.inner;
        }
        cluster.first = cluster.first.min(gone.first);
        cluster.last = cluster.last.max(gone.last);
        let (first, last) = (cluster.first, cluster.last);
        self.spans.entry(gone.section).or_default().retain(|&start| start <= first || start > last);
        // Readers of the emptied cluster now read this one.
        for other in &mut self.fusion.clusters {
            if other.reads.remove(&Unit::Cluster(from)) {
                other.reads.insert(Unit::Cluster(into));
            }
        }
    }

    /// Whether a node of `readers` reads one of `read` at another index than the one at which that lies.
    fn reads_elsewhere(&self, readers: &FxHashMap<NodeId, Vec<Index>>, read: &FxHashMap<NodeId, Vec<Index>>) -> bool {
        let mut elsewhere = false;
        for (&member, index) in readers {
            refs::visit(self.graph, &self.fusion, member, index, &mut |operand, at| {
                if let Some(own) = read.get(&operand) {
                    elsewhere |= at.is_none_or(|at| at != own.as_slice());
                }
            });
        }
        elsewhere
    }

    /// Where `id` lies in the cluster's loop nest, if it may join: every reference to a member is at that member's own index,
    /// and nothing else that it reads depends on the cluster.
    fn placement(&self, id: ClusterId, node: NodeId) -> Option<Vec<Index>> {
        let cluster = &self.fusion.clusters[id.0 as usize];
        if cluster.section != self.graph[node].section() || cluster.members.is_empty() || !self.has_room(id, node) {
            return None;
        }
        let all: Vec<Index> = (0..cluster.dims.len() as u8).map(|d| Index::Dim(DimId(d))).collect();
        let outer = all.iter().filter(|i| !cluster.inner.contains(&refs::dim_of(i))).cloned().collect();
        let direct = self.graph[node].operands.iter().filter_map(|o| cluster.index.get(o).cloned());
        let mut tried: Vec<Vec<Index>> = direct.chain([all, outer]).collect();
        tried.dedup();
        tried.into_iter().find(|index| self.fits(cluster, node, index) && self.refs_fit(id, node, index))
    }

    fn fits(&self, cluster: &Cluster, node: NodeId, index: &[Index]) -> bool {
        let ty = self.graph.ty(node);
        index.len() == ty.rank()
            && index.iter().enumerate().all(|(d, i)| {
                let dim = &cluster.dims[refs::dim_of(i).0 as usize];
                dim.size == ty.shape[d] && dim.axes == ty.sharding.dims[d]
            })
    }

    fn refs_fit(&self, id: ClusterId, node: NodeId, index: &[Index]) -> bool {
        let cluster = &self.fusion.clusters[id.0 as usize];
        let mut fits = true;
        refs::visit(self.graph, &self.fusion, node, index, &mut |operand, at| {
            fits &= match cluster.index.get(&operand) {
                Some(own) => at.is_some_and(|at| at == own.as_slice()),
                None => !self.depends(self.unit(operand), id),
            };
        });
        fits
    }

    pub(super) fn new_cluster(&mut self, node: NodeId, shape: &[u64], sharding: &Sharding) -> ClusterId {
        let dims = shape.iter().zip(&sharding.dims).map(|(&size, axes)| LoopDim { size, axes: axes.clone() }).collect();
        self.fusion.clusters.push(Cluster {
            section: self.graph[node].section(),
            members: Vec::new(),
            dims,
            inner: Vec::new(),
            index: FxHashMap::default(),
            alone: false,
            reads: BTreeSet::new(),
            loads: BTreeSet::new(),
            work: 0,
            first: node,
            last: node,
        });
        // Members of other clusters may lie around a node that had another role.
        if self.fusion.roles[node.0 as usize] == Role::Absent {
            self.spans.entry(self.graph[node].section()).or_default().push(node);
        }
        ClusterId(self.fusion.clusters.len() as u32 - 1)
    }

    pub(super) fn join(&mut self, id: ClusterId, node: NodeId, index: Vec<Index>) {
        let (loads, work) = (self.loads(node), self.work(node));
        let mut reads = BTreeSet::new();
        let open: Vec<Index> = Vec::new();
        refs::visit(self.graph, &self.fusion, node, &open, &mut |operand, _| {
            reads.insert(self.unit(operand));
        });
        reads.remove(&Unit::Cluster(id));
        let cluster = &mut self.fusion.clusters[id.0 as usize];
        cluster.reads.extend(reads);
        cluster.work += work;
        cluster.loads.extend(loads.into_iter().filter(|o| !cluster.index.contains_key(o)));
        cluster.members.push(node);
        cluster.last = node;
        cluster.index.insert(node, index);
        let (first, spans) = (cluster.first, self.spans.entry(cluster.section).or_default());
        spans.truncate(spans.partition_point(|&start| start <= first));
    }

    /// A node before which no unit needs `target`. Its first member is not enough: what was computed before that may read a cluster
    /// which has since got members that read `target`.
    fn start(&self, target: &Cluster) -> NodeId {
        let spans = self.spans.get(&target.section).map_or(&[][..], Vec::as_slice);
        spans[..spans.partition_point(|&start| start <= target.first)].last().copied().unwrap_or(target.first)
    }

    /// Clusters that `node` reads through inline nodes, and those of them that it reads at its own loop dims.
    fn clusters_read(&self, node: NodeId) -> (Vec<ClusterId>, BTreeSet<ClusterId>) {
        let (mut found, mut plainly) = (BTreeSet::new(), BTreeSet::new());
        let own: Vec<Index> = (0..self.graph.ty(node).rank() as u8).map(|d| Index::Dim(DimId(d))).collect();
        refs::visit(self.graph, &self.fusion, node, &own, &mut |operand, at| {
            if let Unit::Cluster(cluster) = self.unit(operand) {
                found.insert(cluster);
                plainly.extend(at.map(|_| cluster));
            }
        });
        (found.into_iter().collect(), plainly)
    }

    /// Whether computing `unit` needs `target` first.
    fn depends(&self, unit: Unit, target: ClusterId) -> bool {
        let start = self.start(&self.fusion.clusters[target.0 as usize]);
        let mut open = vec![unit];
        let mut seen = BTreeSet::new();
        while let Some(unit) = open.pop() {
            if unit == Unit::Cluster(target) {
                return true;
            }
            let last = match unit {
                Unit::Cluster(c) => self.fusion.clusters[c.0 as usize].last,
                Unit::Node(n) => n,
            };
            if last < start || !seen.insert(unit) {
                continue;
            }
            match unit {
                Unit::Cluster(c) => open.extend(&self.fusion.clusters[c.0 as usize].reads),
                Unit::Node(n) => refs::visit(self.graph, &self.fusion, n, &[], &mut |o, _| open.push(self.unit(o))),
            }
        }
        false
    }
}

/// Where the members of `from` lie in the loops of `into`: at the same ones, or, if they have no inner ones, at the outer ones.
/// `None` where the loops are neither.
fn moved_loops(into: &Cluster, from: &Cluster) -> Option<FxHashMap<NodeId, Vec<Index>>> {
    let alike = |x: &LoopDim, y: &LoopDim| x.size == y.size && x.axes == y.axes;
    let same = into.dims.len() == from.dims.len() && into.dims.iter().zip(&from.dims).all(|(x, y)| alike(x, y));
    if same && (into.inner == from.inner || into.inner.is_empty() || from.inner.is_empty()) {
        return Some(from.index.clone());
    }
    let outer: Vec<usize> = (0..into.dims.len()).filter(|&d| !into.inner.contains(&DimId(d as u8))).collect();
    let rows = outer.len() == from.dims.len() && outer.iter().zip(&from.dims).all(|(&d, y)| alike(&into.dims[d], y));
    if !rows || into.inner.is_empty() || !from.inner.is_empty() {
        return None;
    }
    let to_outer = |i: &Index| Index::Dim(DimId(outer[refs::dim_of(i).0 as usize] as u8));
    Some(from.index.iter().map(|(&node, index)| (node, index.iter().map(to_outer).collect())).collect())
}
