//! Which nodes share a kernel: the one decision that planner, recompute and lowering all ask.
//!
//! A *cluster* is a set of pointwise ops and reductions over one loop nest: its dims are outer or, once a reduction over them has
//! joined, inner; members live at row level (outer dims) or full level (all dims). Generated tensors, broadcasts and pure
//! index changes are *inline*: they vanish into the loads of whoever reads them. What other units read is materialised.

pub mod refs;

use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use dcc_program::kernel::{BinaryOp, DimId, Index};
use dcc_program::{AxisList, Sharding};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A cluster of more operands than this takes no further members: it would gain nothing, and a kernel has a bounded number of
/// arguments.
const MAX_READS: usize = 64;

/// Index into `Fusion::clusters`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u32);

/// How a node is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Parameter, input or scalar: a buffer of its own.
    Leaf,
    /// Recomputed in the loads of each reader.
    Inline,
    /// The operand's buffer under another type.
    View,
    Member(ClusterId),
    /// A library kernel, collective or transfer.
    Library,
    /// Not in these nodes.
    Absent,
}

#[derive(Clone, Debug)]
pub struct LoopDim {
    pub size: u64,
    pub axes: AxisList,
}

#[derive(Clone, Debug)]
pub struct Cluster {
    pub phase: Phase,
    /// Ascending.
    pub members: Vec<NodeId>,
    pub dims: Vec<LoopDim>,
    /// The inner dims: those that this cluster's reductions fold; none without reductions.
    pub inner: Vec<DimId>,
    /// Where each member's dims lie in the loop nest.
    pub index: HashMap<NodeId, Vec<Index>>,
    /// Units that this one reads.
    reads: BTreeSet<Unit>,
    first: NodeId,
    last: NodeId,
}

impl Cluster {
    fn empty(phase: Phase) -> Cluster {
        Cluster {
            phase,
            members: Vec::new(),
            dims: Vec::new(),
            inner: Vec::new(),
            index: HashMap::new(),
            reads: BTreeSet::new(),
            first: NodeId(u32::MAX),
            last: NodeId(0),
        }
    }
}

/// What runs as one: a cluster, or a node by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    Cluster(ClusterId),
    Node(NodeId),
}

pub struct Fusion {
    pub roles: Vec<Role>,
    pub clusters: Vec<Cluster>,
    /// Values that have a buffer.
    pub materialised: Vec<bool>,
    /// Reductions that load an inline operand.
    pub loads: BTreeSet<NodeId>,
}

/// Groups `nodes` (ascending; of one stage) into clusters. `wanted` are nodes whose value must have a buffer.
/// `accumulators` are gradient sums whose contributions are added in place: they are views, not kernels.
pub fn fuse(graph: &Graph, nodes: &[NodeId], wanted: &[NodeId], accumulators: &BTreeSet<NodeId>) -> Fusion {
    let count = graph.nodes.len();
    let mut uses = vec![Vec::new(); count];
    for &id in nodes {
        for &operand in &graph[id].operands {
            uses[operand.0 as usize].push(id);
        }
    }
    let roles = vec![Role::Absent; count];
    let fusion = Fusion { roles, clusters: Vec::new(), materialised: vec![false; count], loads: BTreeSet::new() };
    let mut fuser = Fuser { graph, fusion, uses, wanted: wanted.iter().copied().collect(), accumulators };
    for &id in nodes {
        let role = fuser.assign(id);
        fuser.fusion.roles[id.0 as usize] = role;
    }
    fuser.recompute_cheap(nodes);
    fuser.bind_dims();
    fuser.materialise(nodes);
    fuser.fusion
}

struct Fuser<'a> {
    graph: &'a Graph,
    fusion: Fusion,
    uses: Vec<Vec<NodeId>>,
    wanted: BTreeSet<NodeId>,
    accumulators: &'a BTreeSet<NodeId>,
}

/// Whether an op is a loop over its result's elements.
fn is_pointwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::GradSum(_))
}

/// Roughly how many cheap vector operations an op is.
fn cost_of(op: &Op) -> u32 {
    use dcc_program::kernel::UnaryOp::{Abs, Neg, Not};
    match op {
        Op::Unary(op) if matches!(op.op, Neg | Abs | Not) => 1,
        Op::Unary(_) => 4,
        Op::Binary(op) if matches!(op.op, BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow) => 4,
        Op::Const(_) | Op::BroadcastInDim(_) => 0,
        Op::Uniform(_) | Op::Gather(_) => 4,
        _ => 1,
    }
}

/// Where the members of `from` lie in the loops of `into`: at the same ones, or, if they have no inner ones, at the outer ones.
/// `None` where the loops are neither.
fn moved_loops(into: &Cluster, from: &Cluster) -> Option<HashMap<NodeId, Vec<Index>>> {
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

/// A reshape that only adds or drops dims of size 1.
pub fn is_unit_reshape(from: &[u64], to: &[u64]) -> bool {
    from.iter().filter(|&&d| d != 1).eq(to.iter().filter(|&&d| d != 1))
}

impl Fuser<'_> {
    fn assign(&mut self, id: NodeId) -> Role {
        let node = &self.graph[id];
        match &node.op {
            Op::Input(_) | Op::Param(_) | Op::Scalar(_) => Role::Leaf,
            Op::Const(_) | Op::Iota(_) | Op::Uniform(_) | Op::BroadcastInDim(_) => Role::Inline,
            Op::Transpose(_) | Op::Slice(_) | Op::Pad(_) | Op::Concatenate(_) | Op::Reverse(_) | Op::Gather(_) => Role::Inline,
            Op::Reshape(_) if self.is_inline_reshape(id) => Role::Inline,
            Op::Reshape(_) | Op::ResolveMicrobatches(_) | Op::DropMicrobatch(_) => Role::View,
            Op::GradSum(_) if self.accumulators.contains(&id) => Role::View,
            Op::Reduce(_) => Role::Member(self.assign_reduce(id)),
            op if is_pointwise(op) => match self.is_generated(id) {
                true => Role::Inline,
                false => Role::Member(self.assign_pointwise(id)),
            },
            _ => Role::Library,
        }
    }

    /// A reshape that only changes unit dims of something inline costs no buffer.
    fn is_inline_reshape(&self, id: NodeId) -> bool {
        let operand = self.graph[id].operands[0];
        let inline = self.fusion.roles[operand.0 as usize] == Role::Inline;
        inline && is_unit_reshape(&self.graph.ty(operand).shape, &self.graph.ty(id).shape)
    }

    /// Pointwise on only generated tensors (masks, positions): cheaper made again than read.
    fn is_generated(&self, id: NodeId) -> bool {
        let generated = |o: &NodeId| match &self.graph[*o].op {
            Op::Const(_) | Op::Iota(_) => true,
            Op::BroadcastInDim(_) | Op::Reshape(_) => {
                self.fusion.roles[o.0 as usize] == Role::Inline && self.is_generated_operand(self.graph[*o].operands[0])
            }
            _ => self.is_generated_operand(*o),
        };
        self.graph[id].ty.rank() > 0 && self.graph[id].operands.iter().all(generated)
    }

    fn is_generated_operand(&self, id: NodeId) -> bool {
        match &self.graph[id].op {
            Op::Const(_) | Op::Iota(_) => true,
            Op::Uniform(_) | Op::Gather(_) => false,
            _ => {
                self.fusion.roles[id.0 as usize] == Role::Inline
                    && self.graph[id].operands.iter().all(|&o| self.is_generated_operand(o))
            }
        }
    }

    fn assign_reduce(&mut self, id: NodeId) -> ClusterId {
        let Op::Reduce(reduce) = &self.graph[id].op else { unreachable!("assign sends reductions here") };
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
        self.release(operand, &mut vec![id]);
        let cluster = self.new_cluster(id, &self.graph.ty(operand).shape, &self.graph.ty(operand).sharding.clone());
        let dim = |&d: &usize| Index::Dim(DimId(d as u8));
        self.fusion.clusters[cluster.0 as usize].inner = reduced.iter().map(|&d| DimId(d as u8)).collect();
        self.join(cluster, id, kept.iter().map(dim).collect());
        cluster
    }

    /// A reduction over trailing dims joins its operand's cluster if that has no other inner dims.
    fn can_reduce_in(&self, id: ClusterId, node: NodeId, at: &[Index], reduced: &[usize]) -> bool {
        let cluster = &self.fusion.clusters[id.0 as usize];
        let inner: Vec<DimId> = reduced.iter().map(|&d| refs::dim_of(&at[d])).collect();
        let full = at.len() == cluster.dims.len();
        cluster.phase == self.graph[node].phase && full && (cluster.inner.is_empty() || cluster.inner == inner)
    }

    /// A pointwise operand that only `readers` read moves into their new cluster: it is recomputed in its loads, and so is what
    /// only it reads.
    fn release(&mut self, operand: NodeId, readers: &mut Vec<NodeId>) {
        let Role::Member(cluster) = self.fusion.roles[operand.0 as usize] else { return };
        let only = self.uses[operand.0 as usize].iter().all(|u| readers.contains(u)) && !self.wanted.contains(&operand);
        if !only || !is_pointwise(&self.graph[operand].op) || self.graph[operand].phase != self.graph[readers[0]].phase {
            return;
        }
        self.dissolve(operand, cluster);
        readers.push(operand);
        for &inner in &self.graph[operand].operands {
            self.release(inner, readers);
        }
    }

    fn dissolve(&mut self, node: NodeId, cluster: ClusterId) {
        self.fusion.roles[node.0 as usize] = Role::Inline;
        let cluster = &mut self.fusion.clusters[cluster.0 as usize];
        cluster.members.retain(|&m| m != node);
        cluster.index.remove(&node);
    }

    fn assign_pointwise(&mut self, id: NodeId) -> ClusterId {
        let mut candidates: Vec<ClusterId> = self.clusters_read(id);
        candidates.sort_by_key(|c| std::cmp::Reverse(self.fusion.clusters[c.0 as usize].last));
        for (i, &cluster) in candidates.iter().enumerate() {
            for &other in &candidates[i + 1..] {
                self.merge(cluster, other);
                self.merge(other, cluster);
            }
            if let Some(index) = self.placement(cluster, id) {
                self.join(cluster, id, index);
                return cluster;
            }
        }
        let ty = self.graph.ty(id).clone();
        let cluster = self.new_cluster(id, &ty.shape, &ty.sharding);
        self.join(cluster, id, (0..ty.rank()).map(|d| Index::Dim(DimId(d as u8))).collect());
        cluster
    }

    /// Moves the members of `from` into `into` where both run over the same loops, or `from` over the outer ones of `into`, and
    /// neither needs the other through a third.
    fn merge(&mut self, into: ClusterId, from: ClusterId) {
        let (a, b) = (&self.fusion.clusters[into.0 as usize], &self.fusion.clusters[from.0 as usize]);
        let row_only = |c: &Cluster| c.members.iter().all(|m| c.index[m].len() == c.dims.len() || !c.inner.is_empty());
        if a.phase != b.phase || a.members.is_empty() || b.members.is_empty() || !row_only(a) || !row_only(b) {
            return;
        }
        if a.reads.union(&b.reads).count() > MAX_READS {
            return;
        }
        let Some(moved) = moved_loops(a, b) else { return };
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
        let empty = Cluster::empty(b.phase);
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
        if cluster.inner.is_empty() {
            cluster.inner = gone.inner;
        }
        cluster.first = cluster.first.min(gone.first);
        cluster.last = cluster.last.max(gone.last);
        // Readers of the emptied cluster now read this one.
        for other in &mut self.fusion.clusters {
            if other.reads.remove(&Unit::Cluster(from)) {
                other.reads.insert(Unit::Cluster(into));
            }
        }
    }

    /// Whether a node of `readers` reads one of `read` at another index than the one at which that lies.
    fn reads_elsewhere(&self, readers: &HashMap<NodeId, Vec<Index>>, read: &HashMap<NodeId, Vec<Index>>) -> bool {
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
        if cluster.phase != self.graph[node].phase || cluster.reads.len() > MAX_READS || cluster.members.is_empty() {
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

    fn new_cluster(&mut self, node: NodeId, shape: &[u64], sharding: &Sharding) -> ClusterId {
        let dims = shape.iter().zip(&sharding.dims).map(|(&size, axes)| LoopDim { size, axes: axes.clone() }).collect();
        self.fusion.clusters.push(Cluster {
            phase: self.graph[node].phase,
            members: Vec::new(),
            dims,
            inner: Vec::new(),
            index: HashMap::new(),
            reads: BTreeSet::new(),
            first: node,
            last: node,
        });
        ClusterId(self.fusion.clusters.len() as u32 - 1)
    }

    fn join(&mut self, id: ClusterId, node: NodeId, index: Vec<Index>) {
        let mut reads = BTreeSet::new();
        let open: Vec<Index> = Vec::new();
        refs::visit(self.graph, &self.fusion, node, &open, &mut |operand, _| {
            reads.insert(self.unit(operand));
        });
        reads.remove(&Unit::Cluster(id));
        let cluster = &mut self.fusion.clusters[id.0 as usize];
        cluster.reads.extend(reads);
        cluster.members.push(node);
        cluster.last = node;
        cluster.index.insert(node, index);
    }

    fn unit(&self, node: NodeId) -> Unit {
        match self.fusion.roles[node.0 as usize] {
            Role::Member(cluster) => Unit::Cluster(cluster),
            _ => Unit::Node(node),
        }
    }

    /// Clusters that `node` reads through inline nodes.
    fn clusters_read(&self, node: NodeId) -> Vec<ClusterId> {
        let mut found = BTreeSet::new();
        refs::visit(self.graph, &self.fusion, node, &[], &mut |operand, _| {
            if let Unit::Cluster(cluster) = self.unit(operand) {
                found.insert(cluster);
            }
        });
        found.into_iter().collect()
    }

    /// Whether computing `unit` needs `target` first.
    fn depends(&self, unit: Unit, target: ClusterId) -> bool {
        let first = self.fusion.clusters[target.0 as usize].first;
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
            if last < first || !seen.insert(unit) {
                continue;
            }
            match unit {
                Unit::Cluster(c) => open.extend(&self.fusion.clusters[c.0 as usize].reads),
                Unit::Node(n) => refs::visit(self.graph, &self.fusion, n, &[], &mut |o, _| open.push(self.unit(o))),
            }
        }
        false
    }

    /// Members that only other kernels need, and that are a short function of what has a buffer anyway, are recomputed there.
    fn recompute_cheap(&mut self, nodes: &[NodeId]) {
        let mut crossing: BTreeMap<NodeId, BTreeSet<Phase>> = BTreeMap::new();
        for &id in nodes {
            for &operand in &self.graph[id].operands {
                crossing.entry(operand).or_default().insert(self.graph[id].phase);
            }
        }
        for &id in nodes {
            let Role::Member(cluster) = self.fusion.roles[id.0 as usize] else { continue };
            let needed = self.readers(id).iter().any(|&r| self.unit(r) != Unit::Cluster(cluster));
            let into_kernels = self.uses[id.0 as usize].iter().all(|&u| self.may_compute(u, id));
            if needed && into_kernels && !self.wanted.contains(&id) && self.is_cheap(id, &crossing) {
                self.dissolve(id, cluster);
            }
        }
    }

    /// Units' nodes that read `id`, through inline nodes.
    fn readers(&self, id: NodeId) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut open = self.uses[id.0 as usize].clone();
        while let Some(user) = open.pop() {
            match self.fusion.roles[user.0 as usize] {
                Role::Inline => open.extend(&self.uses[user.0 as usize]),
                _ => found.push(user),
            }
        }
        found
    }

    /// Whether `user` can compute its operand `id` in place instead of loading it.
    fn may_compute(&self, user: NodeId, id: NodeId) -> bool {
        let op = &self.graph[user].op;
        let loaded = self.graph[user].operands.iter().enumerate().any(|(i, &o)| o == id && refs::is_loaded(op, i));
        match self.fusion.roles[user.0 as usize] {
            Role::Member(_) => !loaded,
            Role::Inline => !loaded && self.uses[user.0 as usize].iter().all(|&u| self.may_compute(u, user)),
            _ => false,
        }
    }

    /// At most three plain operations on one value that each phase which reads `id` reads anyway, and on smaller ones.
    fn is_cheap(&self, id: NodeId, crossing: &BTreeMap<NodeId, BTreeSet<Phase>>) -> bool {
        let node = &self.graph[id];
        if !is_pointwise(&node.op) || node.ty.rank() == 0 || self.inline_cost(id) > 3 {
            return false;
        }
        let mut large = BTreeSet::new();
        let mut at_hand = true;
        refs::visit(self.graph, &self.fusion, id, &[], &mut |operand, _| {
            let role = self.fusion.roles[operand.0 as usize];
            if self.graph.ty(operand).elements() * 8 > node.ty.elements() {
                large.insert(operand);
            }
            let persistent = role == Role::Leaf && !matches!(self.graph[operand].op, Op::Input(_));
            let read_there = crossing[&id].iter().all(|p| crossing[&operand].contains(p) || self.graph[operand].phase == *p);
            let small = !large.contains(&operand);
            at_hand &= persistent || ((read_there || small) && (!matches!(role, Role::Member(_)) || self.crosses(operand)));
        });
        at_hand && large.len() <= 1 && !crossing[&id].contains(&Phase::Update)
    }

    /// What computing `id` anew costs, inline operands included.
    fn inline_cost(&self, id: NodeId) -> u32 {
        let node = &self.graph[id];
        let inner = node.operands.iter().filter(|o| self.fusion.roles[o.0 as usize] == Role::Inline);
        cost_of(&node.op) + inner.map(|&o| self.inline_cost(o)).sum::<u32>()
    }

    /// Whether a kernel other than its own reads a member.
    fn crosses(&self, id: NodeId) -> bool {
        self.wanted.contains(&id) || self.readers(id).iter().any(|&r| self.unit(r) != self.unit(id))
    }

    /// A kernel knows its loops by the operands that they index: where none has a dim that is summed over (a gradient that repeats
    /// along it), what is summed gets a buffer.
    fn bind_dims(&mut self) {
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
    fn materialise(&mut self, nodes: &[NodeId]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_reshapes_keep_the_other_dims() {
        assert!(is_unit_reshape(&[1, 4, 3], &[4, 3, 1]));
        assert!(!is_unit_reshape(&[4, 3], &[3, 4]));
    }
}
