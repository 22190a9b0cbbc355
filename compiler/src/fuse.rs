//! Which nodes share a kernel: the one decision that planner, recompute and lowering all ask.
//!
//! A *cluster* is a set of pointwise ops and reductions over one loop nest: its dims are outer or, once a reduction over them has
//! joined, inner; members live at row level (outer dims) or full level (all dims). Generated tensors, broadcasts and pure
//! index changes are *inline*: they vanish into the loads of whoever reads them. What other units read is materialised.

pub mod assembly;
mod buffers;
mod cluster;
mod last;
mod limits;
mod recompute;
pub mod refs;

use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use assembly::assembly;
use dcc_program::AxisList;
use dcc_program::kernel::{DimId, Index};
use limits::Limits;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Phase and stage.
type Section = (Phase, Option<u32>);

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
    /// In which all members run.
    pub section: Section,
    /// Ascending.
    pub members: Vec<NodeId>,
    pub dims: Vec<LoopDim>,
    /// The inner dims: those that this cluster's reductions fold; none without reductions.
    pub inner: Vec<DimId>,
    /// Where each member's dims lie in the loop nest.
    pub index: FxHashMap<NodeId, Vec<Index>>,
    /// Its only member is computed by a kernel of its own.
    alone: bool,
    /// Units that this one reads.
    reads: BTreeSet<Unit>,
    /// Values of other units that its members load, and perhaps some that they do not.
    loads: BTreeSet<NodeId>,
    /// Nodes that its members compute, themselves and what they read inline.
    work: usize,
    first: NodeId,
    last: NodeId,
}

impl Cluster {
    fn empty(section: Section) -> Cluster {
        Cluster {
            section,
            members: Vec::new(),
            dims: Vec::new(),
            inner: Vec::new(),
            index: FxHashMap::default(),
            alone: false,
            reads: BTreeSet::new(),
            loads: BTreeSet::new(),
            work: 0,
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
    fuse_within(Limits::KERNEL, graph, nodes, wanted, accumulators)
}

fn fuse_within(limits: Limits, graph: &Graph, nodes: &[NodeId], wanted: &[NodeId], accumulators: &BTreeSet<NodeId>) -> Fusion {
    let count = graph.nodes.len();
    let mut uses = vec![Vec::new(); count];
    for &id in nodes {
        for &operand in &graph[id].operands {
            uses[operand.0 as usize].push(id);
        }
    }
    let roles = vec![Role::Absent; count];
    let fusion = Fusion { roles, clusters: Vec::new(), materialised: vec![false; count], loads: BTreeSet::new() };
    let wanted = wanted.iter().copied().collect();
    let (generated, depths) = (vec![false; count], vec![0; count]);
    let mut fuser = Fuser { graph, fusion, uses, wanted, accumulators, limits, spans: BTreeMap::new(), generated, depths };
    for &id in nodes {
        let mut role = fuser.assign(id);
        if role == Role::Inline {
            match fuser.depth(id) {
                depth if depth <= limits.inline => fuser.depths[id.0 as usize] = depth,
                _ => role = Role::Member(fuser.assign_alone(id)),
            }
        }
        fuser.fusion.roles[id.0 as usize] = role;
        let operands = &graph[id].operands;
        let made = !matches!(graph[id].op, Op::Uniform(_) | Op::Gather(_)) && role == Role::Inline;
        fuser.generated[id.0 as usize] = made && operands.iter().all(|&o| fuser.is_generated_operand(o));
    }
    fuser.recompute_cheap(nodes);
    fuser.merge_last_readers(nodes);
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
    limits: Limits,
    /// Of each section, nodes that no cluster has members on both sides of, ascending.
    spans: BTreeMap<Section, Vec<NodeId>>,
    /// By node: whether it is made inline of no data, but for leaves of numbers.
    generated: Vec<bool>,
    /// By node: inline nodes one after the other, this the last; 0 for others.
    depths: Vec<u32>,
}

/// Whether an op is a loop over its result's elements.
fn is_pointwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_) | Op::GradSum(_))
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
            Op::Const(_) | Op::Training(_) | Op::Iota(_) | Op::Uniform(_) | Op::BroadcastInDim(_) => Role::Inline,
            Op::Concatenate(_) | Op::GradSum(_) if !self.accumulators.contains(&id) && assembly(self.graph, id).is_some() => {
                Role::Member(self.assign_alone(id))
            }
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
            Op::Const(_) | Op::Training(_) | Op::Iota(_) => true,
            Op::BroadcastInDim(_) | Op::Reshape(_) => {
                self.fusion.roles[o.0 as usize] == Role::Inline && self.is_generated_operand(self.graph[*o].operands[0])
            }
            _ => self.is_generated_operand(*o),
        };
        self.graph[id].ty.rank() > 0 && self.graph[id].operands.iter().all(generated)
    }

    fn is_generated_operand(&self, id: NodeId) -> bool {
        match &self.graph[id].op {
            Op::Const(_) | Op::Training(_) | Op::Iota(_) => true,
            _ => self.generated[id.0 as usize],
        }
    }

    fn dissolve(&mut self, node: NodeId, cluster: ClusterId) {
        self.fusion.roles[node.0 as usize] = Role::Inline;
        let cluster = &mut self.fusion.clusters[cluster.0 as usize];
        cluster.members.retain(|&m| m != node);
        cluster.index.remove(&node);
    }

    fn unit(&self, node: NodeId) -> Unit {
        match self.fusion.roles[node.0 as usize] {
            Role::Member(cluster) => Unit::Cluster(cluster),
            _ => Unit::Node(node),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clusters of sums of x and of x · y over these dims.
    fn kernels_of_sums(of_x: &str, of_product: &str) -> usize {
        let inputs = "%0 f32[4, 3, 5] = input{batch_dim:0, name:x}\n%1 f32[4, 3, 5] = input{batch_dim:0, name:y}\n";
        let product = "%3 f32[4, 3, 5] = binary{op:mul} %0, %1\n";
        let text = format!("graph\nforward\n{inputs}%2 {of_x} %0\n{product}%4 {of_product} %3\noutput a = %2\noutput b = %4\n");
        let graph = Graph::parse(&text).expect("a graph");
        let nodes: Vec<NodeId> = graph.ids().collect();
        let fusion = fuse(&graph, &nodes, &[NodeId(2), NodeId(4)], &BTreeSet::new());
        fusion.clusters.iter().filter(|cluster| !cluster.members.is_empty()).count()
    }

    #[test]
    fn sums_that_read_one_value_are_one_kernel() {
        let over_samples = "f32[3] = reduce{dims:[0, 2], op:sum}";
        assert_eq!(kernels_of_sums(over_samples, over_samples), 1);
        assert_eq!(kernels_of_sums(over_samples, "f32[3, 5] = reduce{dims:[0], op:sum}"), 2);
    }

    /// A step that reads its operand twice has twice as many paths to it as the step before: each operand is looked at once.
    #[test]
    fn steps_that_read_twice_are_seen_once() {
        let graph = |start: &str, step: &str| {
            let mut text = format!("graph\nforward\n%0 f32[4] = input{{batch_dim:0, name:x}}\n{start}\n");
            for step_of in 0..30 {
                let (from, inner, to) = (2 + 2 * step_of, 3 + 2 * step_of, 4 + 2 * step_of);
                text += &format!("%{inner} f32[4] = {step} %{from}\n%{to} f32[4] = binary{{op:add}} %{from}, %{inner}\n");
            }
            Graph::parse(&format!("{text}%63 f32[4] = binary{{op:mul}} %0, %62\noutput y = %63\n")).expect("a graph")
        };
        let number = "%1 f32[] = const{value:\"1.0\"}\n%2 f32[4] = broadcast_in_dim{dims:[]} %1";
        let data = "%1 f32[4] = unary{op:neg} %0\n%2 f32[4] = unary{op:tanh} %1";
        for graph in [graph(number, "unary{op:neg}"), graph(data, "unary{op:tanh}"), graph(data, "unary{op:neg}")] {
            let nodes: Vec<NodeId> = graph.ids().collect();
            let fusion = fuse(&graph, &nodes, &[NodeId(63)], &BTreeSet::new());
            assert_eq!(fusion.clusters.iter().filter(|cluster| !cluster.members.is_empty()).count(), 1);
        }
    }

    #[test]
    fn unit_reshapes_keep_the_other_dims() {
        assert!(is_unit_reshape(&[1, 4, 3], &[4, 3, 1]));
        assert!(!is_unit_reshape(&[4, 3], &[3, 4]));
    }
}
