//! How much a kernel may read and write: what bounds who joins a cluster, what is computed again in it and what a node reads inline.
//!
//! Counts are from above: a member is taken for stored until all that read it are members too, and what is once loaded stays counted
//! where it later is not. So no pass that follows makes a kernel of a cluster exceed them.

use super::{Cluster, ClusterId, Fuser, Role, Unit, refs};
use crate::graph::NodeId;
use crate::ops::Op;
use dcc_program::kernel::MAX_ARGUMENTS;
use rustc_hash::FxHashSet;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// A cluster that reads more units than these takes no further members: it would gain nothing.
    pub units: usize,
    /// Values that a kernel loads.
    pub loads: usize,
    /// Values that it stores.
    pub stores: usize,
    /// Nodes that it computes, each for a member that needs it. Kernels are written, compiled and looked at by ways that call themselves
    /// for operands, and that take more than twice as long for twice as many.
    pub work: usize,
    /// Inline nodes one after the other.
    pub inline: u32,
}

impl Limits {
    /// The gate takes `MAX_ARGUMENTS` of each; a launch on a GPU 512 words in all, of which offsets of shards need some.
    pub const KERNEL: Limits = Limits { units: 64, loads: 224, stores: 192, work: 1024, inline: 64 };
}

const _: () = assert!(Limits::KERNEL.loads <= MAX_ARGUMENTS && Limits::KERNEL.stores <= MAX_ARGUMENTS);

impl Fuser<'_> {
    /// The values that `id` loads where none of them lies in its cluster. A reduction may come to load an inline operand whole.
    pub(super) fn loads(&self, id: NodeId) -> BTreeSet<NodeId> {
        let mut loads = BTreeSet::new();
        refs::visit(self.graph, &self.fusion, id, &[], &mut |operand, _| loads.extend([operand]));
        if matches!(self.graph[id].op, Op::Reduce(_)) {
            loads.insert(self.graph[id].operands[0]);
        }
        loads
    }

    /// How many nodes are computed for `id` where none of them lies in its cluster: itself and what it reads inline.
    pub(super) fn work(&self, id: NodeId) -> usize {
        let mut open = vec![id];
        let mut seen = FxHashSet::from_iter([id]);
        while let Some(id) = open.pop() {
            let inline = |o: &NodeId| self.fusion.roles[o.0 as usize] == Role::Inline;
            open.extend(self.graph[id].operands.iter().copied().filter(|o| inline(o) && seen.insert(*o)));
        }
        seen.len()
    }

    /// Inline nodes one after the other, at most, of which `id` is the last if it is one.
    pub(super) fn depth(&self, id: NodeId) -> u32 {
        let below = self.graph[id].operands.iter().map(|o| self.depths[o.0 as usize]);
        below.max().unwrap_or(0) + 1
    }

    /// Whether the cluster and `node` fit into one kernel.
    pub(super) fn has_room(&self, id: ClusterId, node: NodeId) -> bool {
        let cluster = &self.fusion.clusters[id.0 as usize];
        if cluster.alone || cluster.reads.len() > self.limits.units || cluster.work + self.work(node) > self.limits.work {
            return false;
        }
        let is_new = |o: &NodeId| !cluster.loads.contains(o) && !cluster.index.contains_key(o);
        let loads = cluster.loads.len() + self.loads(node).iter().filter(|o| is_new(o)).count();
        loads <= self.limits.loads && self.stores(&[id], Some(node)) <= self.limits.stores
    }

    /// Whether two clusters fit into one kernel.
    pub(super) fn have_room(&self, into: ClusterId, from: ClusterId) -> bool {
        let [a, b] = [into, from].map(|id| &self.fusion.clusters[id.0 as usize]);
        let fits = a.work + b.work <= self.limits.work && outside(a, b).count() <= self.limits.loads;
        fits && self.stores(&[into, from], None) <= self.limits.stores
    }

    /// Whether the cluster may load `more`.
    pub(super) fn may_load(&self, id: ClusterId, more: &BTreeSet<NodeId>) -> bool {
        self.fusion.clusters[id.0 as usize].loads.union(more).count() <= self.limits.loads
    }

    /// At most so many values of the clusters, and of `joining`, will have buffers. (All of them, where these are few.)
    fn stores(&self, clusters: &[ClusterId], joining: Option<NodeId>) -> usize {
        let members = || clusters.iter().flat_map(|c| &self.fusion.clusters[c.0 as usize].members).copied().chain(joining);
        let count = members().count();
        if count <= self.limits.stores {
            return count;
        }
        let reads_inside = |user: NodeId| self.reads_inside(user, clusters, joining);
        // The operands of reductions may be stored to tell the loops' sizes.
        let reads = |user: &NodeId| !matches!(self.graph[*user].op, Op::Reduce(_)) && reads_inside(*user);
        members().filter(|m| self.wanted.contains(m) || !self.uses[m.0 as usize].iter().all(reads)).count()
    }

    /// Whether what `user` reads needs no buffer for it: it is of the clusters, or computed where these read it.
    fn reads_inside(&self, user: NodeId, clusters: &[ClusterId], joining: Option<NodeId>) -> bool {
        let mut open = vec![user];
        let mut seen = FxHashSet::default();
        while let Some(user) = open.pop() {
            match self.fusion.roles[user.0 as usize] {
                Role::Member(cluster) if clusters.contains(&cluster) => {}
                Role::Inline if self.wanted.contains(&user) => return false,
                Role::Inline if seen.insert(user) => open.extend(&self.uses[user.0 as usize]),
                Role::Inline => {}
                _ if joining == Some(user) => {}
                _ => return false,
            }
        }
        true
    }

    /// Concatenations that a node reads inline get kernels of their own, the longest first, until one kernel can read what it reads.
    pub(super) fn narrow(&mut self, id: NodeId) {
        while self.loads(id).len() > self.limits.loads {
            let found = self.concatenations(id);
            let Some(&longest) = found.iter().max_by_key(|c| (self.graph[**c].operands.len(), std::cmp::Reverse(**c))) else {
                return;
            };
            // Whoever reads it in place reads its parts from buffers, so that no cluster needs its own result through it.
            let cluster = self.assign_new(longest);
            self.fusion.roles[longest.0 as usize] = Role::Member(cluster);
            self.generated[longest.0 as usize] = false;
            for reader in self.readers(longest) {
                if let Role::Member(other) = self.fusion.roles[reader.0 as usize] {
                    let other = &mut self.fusion.clusters[other.0 as usize];
                    other.reads.insert(Unit::Cluster(cluster));
                    other.loads.insert(longest);
                }
            }
        }
    }

    /// The concatenations among what `id` reads inline.
    fn concatenations(&self, id: NodeId) -> BTreeSet<NodeId> {
        let (mut open, mut seen) = (vec![id], BTreeSet::new());
        while let Some(id) = open.pop() {
            for (i, &operand) in self.graph[id].operands.iter().enumerate() {
                let inline = self.fusion.roles[operand.0 as usize] == Role::Inline && !refs::is_loaded(self.graph, id, i);
                if inline && seen.insert(operand) {
                    open.push(operand);
                }
            }
        }
        seen.retain(|&id| matches!(self.graph[id].op, Op::Concatenate(_)));
        seen
    }
}

/// What two clusters would load as one.
fn outside<'a>(a: &'a Cluster, b: &'a Cluster) -> impl Iterator<Item = NodeId> + 'a {
    a.loads.union(&b.loads).copied().filter(|o| !a.index.contains_key(o) && !b.index.contains_key(o))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::fuse_within;
    use crate::graph::Graph;
    use std::fmt::Write;

    const NONE: Limits =
        Limits { units: usize::MAX, loads: usize::MAX, stores: usize::MAX, work: usize::MAX, inline: u32::MAX };

    /// Clusters of a forward graph, and the most values that one loads, and stores.
    fn fused(text: &str, limits: Limits) -> [usize; 3] {
        let graph = Graph::parse(&format!("graph\nforward\n{text}")).expect("a graph");
        let nodes: Vec<NodeId> = graph.ids().collect();
        let wanted: Vec<NodeId> = graph.outputs.iter().map(|(_, id)| *id).collect();
        let fusion = fuse_within(limits, &graph, &nodes, &wanted, &BTreeSet::new());
        let clusters: Vec<&Cluster> = fusion.clusters.iter().filter(|c| !c.members.is_empty()).collect();
        let loads = |cluster: &&Cluster| {
            let mut loads = BTreeSet::new();
            for &member in &cluster.members {
                refs::visit(&graph, &fusion, member, &[], &mut |operand, _| loads.extend([operand]));
            }
            loads.iter().filter(|o| !cluster.index.contains_key(o)).count()
        };
        let stores = |cluster: &&Cluster| cluster.members.iter().filter(|m| fusion.materialised[m.0 as usize]).count();
        let most = |count: &dyn Fn(&&Cluster) -> usize| clusters.iter().map(count).max().expect("a cluster");
        [clusters.len(), most(&loads), most(&stores)]
    }

    /// Holds where the clusters of `text` are kernels, which they would not be without limits.
    fn check(text: &str) {
        let [kernels, loads, stores] = fused(text, Limits::KERNEL);
        assert!(kernels > 1 && loads <= Limits::KERNEL.loads && stores <= Limits::KERNEL.stores, "{kernels} {loads} {stores}");
        let [_, loads, stores] = fused(text, NONE);
        assert!(loads.max(stores) > MAX_ARGUMENTS, "the control: {loads} {stores}");
    }

    fn inputs(count: usize, shape: &str) -> String {
        (0..count).map(|i| format!("%{i} f32[{shape}] = input{{batch_dim:0, name:x{i}}}\n")).collect()
    }

    /// `count` inputs and their sum, one added after the other; each sum from `%count` on.
    fn sum_of_inputs(count: usize) -> String {
        let mut text = inputs(count, "4, 8");
        for i in 1..count {
            let sum = if i == 1 { 0 } else { count + i - 2 };
            writeln!(text, "%{} f32[4, 8] = binary{{op:add}} %{sum}, %{i}", count + i - 1).expect("a string takes all");
        }
        text
    }

    #[test]
    fn sums_of_many_inputs_are_several_kernels() {
        check(&format!("{}output y = %798\n", sum_of_inputs(400)));
    }

    #[test]
    fn sums_of_which_all_parts_are_wanted_are_several_kernels() {
        let outputs: String = (301..601).map(|i| format!("output y{i} = %{i}\n")).collect();
        check(&format!("{}{outputs}", sum_of_inputs(301)));
    }

    #[test]
    fn reductions_of_what_only_they_read_are_several_kernels() {
        check(&format!("{}%799 f32[8] = reduce{{dims:[0], op:sum}} %798\noutput y = %799\n", sum_of_inputs(400)));
    }

    /// Steps through slices of one value: a kernel that reads little and would store all that is wanted.
    #[test]
    fn unrolled_steps_are_several_kernels() {
        let mut text = "%0 f32[4, 300] = input{batch_dim:0, name:x}\n".to_owned();
        for i in 0..300 {
            let (slice, step) = (1 + 2 * i, 2 + 2 * i);
            let slice_of = format!("slice{{limit:[4, {}], start:[0, {i}], stride:[1, 1]}} %0", i + 1);
            writeln!(text, "%{slice} f32[4, 1] = {slice_of}").expect("a string takes all");
            let before = if i == 0 { slice } else { step - 2 };
            writeln!(text, "%{step} f32[4, 1] = binary{{op:mul}} %{before}, %{slice}").expect("a string takes all");
        }
        text.extend((0..300).map(|i| format!("output y{i} = %{}\n", 2 + 2 * i)));
        check(&text);
    }

    /// One node that reads three concatenations in place, each of 150 parts, one of which is longer.
    #[test]
    fn concatenations_too_many_for_one_kernel_have_their_own() {
        let mut text = format!("{}%450 f32[4, 2] = input{{batch_dim:0, name:long}}\n", inputs(450, "4, 1"));
        for k in 0..3 {
            let parts: Vec<String> = (150 * k..150 * k + 149).chain([450]).map(|i| format!("%{i}")).collect();
            writeln!(text, "%{} f32[4, 151] = concatenate{{dim:1}} {}", 451 + k, parts.join(", ")).expect("a string takes all");
        }
        check(&format!(
            "{text}%454 f32[4, 151] = binary{{op:add}} %451, %452\n%455 f32[4, 151] = binary{{op:mul}} %454, %453\noutput y = %455\n"
        ));
    }
}
