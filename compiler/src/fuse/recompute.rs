//! Which members leave their cluster to be recomputed in the kernels that read them: a few plain operations on what is at hand
//! there anyway cost less than a buffer that is written and read.

use super::{ClusterId, Fuser, Role, Section, Unit, is_pointwise, refs};
use crate::graph::{NodeId, Phase};
use crate::ops::Op;
use dcc_program::kernel::BinaryOp;
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet};

/// More operations than these are not cheap to make again.
const CHEAP: u32 = 3;

impl Fuser<'_> {
    /// Members that only other kernels need, and that are a short function of what has a buffer anyway, are recomputed there.
    pub(super) fn recompute_cheap(&mut self, nodes: &[NodeId]) {
        let mut crossing: BTreeMap<NodeId, BTreeSet<Section>> = BTreeMap::new();
        for &id in nodes {
            for &operand in &self.graph[id].operands {
                crossing.entry(operand).or_default().insert(self.graph[id].section());
            }
        }
        for &id in nodes {
            let Role::Member(cluster) = self.fusion.roles[id.0 as usize] else { continue };
            if self.fusion.clusters[cluster.0 as usize].alone {
                continue;
            }
            let needed = self.readers(id).iter().any(|&r| self.unit(r) != Unit::Cluster(cluster));
            if needed && self.may_dissolve(id) {
                let chain = self.chain(id, cluster);
                if self.is_cheap(id, &chain, &crossing) && self.readers_load(id, &chain) {
                    chain.into_iter().for_each(|member| self.dissolve(member, cluster));
                }
            }
        }
    }

    /// Whether the clusters that read `id` may load what `chain`, which computes it, does; notes that they do.
    fn readers_load(&mut self, id: NodeId, chain: &[NodeId]) -> bool {
        let loads: BTreeSet<NodeId> =
            chain.iter().flat_map(|&member| self.loads(member)).filter(|o| !chain.contains(o)).collect();
        let cluster = |reader: NodeId| match self.unit(reader) {
            Unit::Cluster(cluster) if self.unit(id) != Unit::Cluster(cluster) => Some(cluster),
            _ => None,
        };
        let readers: BTreeSet<ClusterId> = self.readers(id).into_iter().filter_map(cluster).collect();
        let fit = readers.iter().all(|&reader| self.may_load(reader, &loads));
        for reader in readers.into_iter().filter(|_| fit) {
            let reader = &mut self.fusion.clusters[reader.0 as usize];
            reader.loads.remove(&id);
            reader.loads.extend(&loads);
        }
        fit
    }

    /// Whether all that read it can compute it.
    fn may_dissolve(&self, id: NodeId) -> bool {
        let into_kernels = self.uses[id.0 as usize].iter().all(|&u| self.may_compute(u, id));
        into_kernels && !self.wanted.contains(&id) && !self.reads_unresolved(id)
    }

    /// `id` and the members before it that only its own kernel reads, so that whoever computes it computes them as well.
    fn chain(&self, id: NodeId, cluster: ClusterId) -> Vec<NodeId> {
        let mut chain = vec![id];
        let mut at = 0;
        while at < chain.len() {
            let mut found = Vec::new();
            refs::visit(self.graph, &self.fusion, chain[at], &[], &mut |operand, _| {
                let own = self.fusion.roles[operand.0 as usize] == Role::Member(cluster) && !self.crosses(operand);
                if own && is_pointwise(&self.graph[operand].op) && self.may_dissolve(operand) {
                    found.push(operand);
                }
            });
            found.retain(|operand| !chain.contains(operand));
            chain.extend(found);
            at += 1;
            // Too much for what is cheap.
            if chain.len() > 3 {
                return vec![id];
            }
        }
        chain
    }

    /// Whether it reads a sum over microbatches that its section resolves in place: that must wait for it, so it may not move to what
    /// may itself wait for the resolved sum.
    fn reads_unresolved(&self, id: NodeId) -> bool {
        let section = self.graph[id].section();
        let resolves =
            |&user: &NodeId| matches!(self.graph[user].op, Op::ResolveMicrobatches(_)) && self.graph[user].section() == section;
        let mut found = false;
        refs::visit(self.graph, &self.fusion, id, &[], &mut |operand, _| {
            found |= self.uses[operand.0 as usize].iter().any(resolves);
        });
        found
    }

    /// Units' nodes that read `id`, through inline nodes.
    pub(super) fn readers(&self, id: NodeId) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut open = self.uses[id.0 as usize].clone();
        let mut seen = FxHashSet::default();
        while let Some(user) = open.pop() {
            match self.fusion.roles[user.0 as usize] {
                Role::Inline if seen.insert(user) => open.extend(&self.uses[user.0 as usize]),
                Role::Inline => {}
                _ => found.push(user),
            }
        }
        found
    }

    /// Whether `user` can compute its operand `id` in place instead of loading it.
    fn may_compute(&self, user: NodeId, id: NodeId) -> bool {
        let mut open = vec![(user, id)];
        let mut seen = FxHashSet::default();
        while let Some((user, id)) = open.pop() {
            let mut operands = self.graph[user].operands.iter().enumerate();
            let loaded = operands.any(|(i, &o)| o == id && refs::is_loaded(self.graph, user, i));
            match self.fusion.roles[user.0 as usize] {
                Role::Member(_) if !loaded => {}
                Role::Inline if !loaded && seen.insert((user, id)) => {
                    open.extend(self.uses[user.0 as usize].iter().map(|&u| (u, user)));
                }
                Role::Inline if !loaded => {}
                _ => return false,
            }
        }
        true
    }

    /// Whether `operand` may be kept in place of `id` for a later phase: a product, which has a buffer anyway, and no larger one. So
    /// a product with its bias is kept as the product alone, and several plain functions of one product become one value.
    fn is_kept_instead(&self, operand: NodeId, id: NodeId) -> bool {
        let bytes = |node: NodeId| self.graph.ty(node).elements() * self.graph.ty(node).dtype.bytes();
        let mut made = operand;
        while self.fusion.roles[made.0 as usize] == Role::View && matches!(self.graph[made].op, Op::Reshape(_)) {
            made = self.graph[made].operands[0];
        }
        matches!(self.graph[made].op, Op::DotGeneral(_)) && bytes(operand) <= bytes(id)
    }

    /// At most three plain operations on one value that each phase which reads `id` reads anyway, or that can be kept instead, and on
    /// smaller ones.
    fn is_cheap(&self, id: NodeId, chain: &[NodeId], crossing: &BTreeMap<NodeId, BTreeSet<Section>>) -> bool {
        let node = &self.graph[id];
        let cost: u32 = chain.iter().map(|&member| self.inline_cost(member)).sum();
        if !is_pointwise(&node.op) || node.ty.rank() == 0 || cost > CHEAP {
            return false;
        }
        let mut large = BTreeSet::new();
        let mut at_hand = true;
        let mut look = |operand: NodeId| {
            let role = self.fusion.roles[operand.0 as usize];
            if self.graph.ty(operand).elements() * 8 > node.ty.elements() {
                large.insert(operand);
            }
            let persistent = role == Role::Leaf && !matches!(self.graph[operand].op, Op::Input(_));
            let read_there =
                crossing[&id].iter().all(|p| crossing[&operand].contains(p) || self.graph[operand].section() == *p);
            let small = !large.contains(&operand);
            let near = read_there || small || self.is_kept_instead(operand, id);
            at_hand &= persistent || (near && (!matches!(role, Role::Member(_)) || self.crosses(operand)));
        };
        for &member in chain {
            refs::visit(self.graph, &self.fusion, member, &[], &mut |operand, _| {
                if !chain.contains(&operand) {
                    look(operand);
                }
            });
        }
        at_hand && large.len() <= 1 && crossing[&id].iter().all(|section| section.0 != Phase::Update)
    }

    /// What computing `id` anew costs, inline operands included.
    fn inline_cost(&self, id: NodeId) -> u32 {
        let (mut open, mut cost) = (vec![id], 0);
        while let Some(id) = open.pop().filter(|_| cost <= CHEAP) {
            let node = &self.graph[id];
            cost += cost_of(&node.op);
            open.extend(node.operands.iter().filter(|o| self.fusion.roles[o.0 as usize] == Role::Inline));
        }
        cost
    }

    /// Whether a kernel other than its own reads a member.
    pub(super) fn crosses(&self, id: NodeId) -> bool {
        self.wanted.contains(&id) || self.readers(id).iter().any(|&r| self.unit(r) != self.unit(id))
    }
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
