//! The compiler's one representation until lowering: a pure, append-only graph of values.
//!
//! A node is a value; an op with several results is several nodes that differ in a field `out`. Index order is topological.
//! Building interns: equal (op, operands, type, stage, phase) is one node, but for clones that `recompute` adds apart. Before `place`, types are replicated, `stage` is
//! `None` and phase is forward, backward or update; after it every type has its sharding and phase is the section.

mod build;
mod text;
mod verify;

use crate::error::{Error, Result};
use crate::ops::{Op, Rule};
use dcc_program::check::MAX_RANK;
use dcc_program::program::SectionKind;
use dcc_program::{Mesh, TensorType};
use hashbrown::hash_table::{Entry, HashTable};
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;
use std::hash::BuildHasher;

pub use verify::verify;

/// Index into `Graph::nodes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

pub type Operands = SmallVec<[NodeId; 3]>;

/// When a node runs; after `place`, the section that holds it.
pub type Phase = SectionKind;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    pub op: Op,
    pub operands: Operands,
    pub ty: TensorType,
    /// Pipeline stage, set by `place`.
    pub stage: Option<u32>,
    pub phase: Phase,
}

impl Node {
    /// Of a placed node: when it runs, and in which chunk of the model.
    pub fn section(&self) -> (Phase, Option<u32>) {
        (self.phase, self.stage)
    }
}

/// What a backward node was made for; the planner gives it the strategy of that forward node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradOf {
    /// Part of the gradient of this forward node's op; factor names are the same.
    Op(NodeId),
    /// The gradient (or optimizer update) of this value; dims are the same.
    Value(NodeId),
}

#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    /// Results by name, in order.
    pub outputs: Vec<(String, NodeId)>,
    /// Set by `place`.
    pub mesh: Option<Mesh>,
    /// Where in the model each node comes from; indices into `origin_names`.
    origins: Vec<u32>,
    origin_names: Vec<String>,
    grad_of: FxHashMap<NodeId, GradOf>,
    /// The nodes that `add` finds again.
    interned: HashTable<NodeId>,
    /// What `add` stamps on new nodes.
    cursor: Cursor,
}

/// The context of the nodes being added.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    pub phase: Phase,
    pub stage: Option<u32>,
    pub origin: u32,
    pub grad_of: Option<GradOf>,
}

impl Default for Cursor {
    fn default() -> Cursor {
        Cursor { phase: Phase::Forward, stage: None, origin: 0, grad_of: None }
    }
}

impl std::ops::Index<NodeId> for Graph {
    type Output = Node;
    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }
}

/// Errors: DCC0108 for more than 2^59 elements, so that bytes of a few never overflow, and for more dims than kernels have loops. A dim
/// of 0 hides no other: slices may drop it.
pub fn addressable(shape: &[u64]) -> Result<()> {
    if shape.len() > MAX_RANK {
        return Err(Error::limit(format!("a tensor of {} dims; there may be {MAX_RANK}", shape.len())));
    }
    let elements = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim.max(1)));
    match elements {
        Some(..=0x0800_0000_0000_0000) => Ok(()),
        _ => Err(Error::limit(format!("a tensor of dims {shape:?} has more elements than can be addressed"))),
    }
}

impl Graph {
    pub fn new() -> Graph {
        Graph { origin_names: vec![String::new()], ..Graph::default() }
    }

    /// Adds a node whose type the op infers from its operands. Errors: what the op says of wrong operands, more elements than can be
    /// addressed, at the origin.
    pub fn add(&mut self, op: impl Into<Op>, operands: &[NodeId]) -> Result<NodeId> {
        let op = op.into();
        let ty = {
            let types: SmallVec<[&TensorType; 4]> = operands.iter().map(|&o| &self[o].ty).collect();
            let ty = op.infer(&types).and_then(|ty| addressable(&ty.shape).map(|()| ty));
            ty.map_err(|e| e.at(self.origin_name(self.cursor.origin)))?
        };
        Ok(self.add_typed(op, operands, ty))
    }

    /// Adds a node of a known type: leaves, and placed nodes whose sharding is decided.
    pub fn add_typed(&mut self, op: impl Into<Op>, operands: &[NodeId], ty: TensorType) -> NodeId {
        let node = self.node(op.into(), operands, ty);
        let (nodes, next) = (&self.nodes, NodeId(self.nodes.len() as u32));
        let of = |id: NodeId| &nodes[id.0 as usize];
        let hash = |node: &Node| FxBuildHasher.hash_one(node);
        match self.interned.entry(hash(&node), |&id| *of(id) == node, |&id| hash(of(id))) {
            Entry::Occupied(found) => return *found.get(),
            Entry::Vacant(place) => place.insert(next),
        };
        self.push(node)
    }

    /// As `add_typed`, but for a node of its own even if an equal one is there: its value is to live at another time. `map`, and with it every
    /// later pass that makes a graph anew, may make both one again.
    pub fn add_apart(&mut self, op: impl Into<Op>, operands: &[NodeId], ty: TensorType) -> NodeId {
        let node = self.node(op.into(), operands, ty);
        self.push(node)
    }

    fn node(&self, op: Op, operands: &[NodeId], ty: TensorType) -> Node {
        let Cursor { stage, phase, .. } = self.cursor;
        Node { op, operands: operands.iter().copied().collect(), ty, stage, phase }
    }

    fn push(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        self.origins.push(self.cursor.origin);
        if let Some(of) = self.cursor.grad_of {
            self.grad_of.insert(id, of);
        }
        id
    }

    pub fn ty(&self, id: NodeId) -> &TensorType {
        &self[id].ty
    }

    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    pub fn set_cursor(&mut self, cursor: Cursor) {
        self.cursor = cursor;
    }

    pub fn set_phase(&mut self, phase: Phase) {
        self.cursor.phase = phase;
    }

    pub fn set_stage(&mut self, stage: Option<u32>) {
        self.cursor.stage = stage;
    }

    /// What is added next is the gradient of what `id` of another graph is the gradient of, if that has a counterpart here.
    pub fn set_grad_of_like(&mut self, other: &Graph, id: NodeId, here: impl Fn(NodeId) -> Option<NodeId>) {
        self.cursor.grad_of = match other.grad_of(id) {
            Some(GradOf::Op(of)) => here(of).map(GradOf::Op),
            Some(GradOf::Value(of)) => here(of).map(GradOf::Value),
            None => None,
        };
    }

    pub fn set_grad_of(&mut self, of: Option<GradOf>) {
        self.cursor.grad_of = of;
    }

    /// Names where the nodes added next come from, for instance `node 187 /h.3/attn/MatMul (MatMul, opset 21)`.
    pub fn set_origin(&mut self, name: &str) {
        if self.origin_names[self.cursor.origin as usize] == name {
            return;
        }
        self.origin_names.push(name.to_owned());
        self.cursor.origin = self.origin_names.len() as u32 - 1;
    }

    /// The new nodes come from where `id` of `other` does.
    pub fn set_origin_of(&mut self, other: &Graph, id: NodeId) {
        self.set_origin(other.origin(id));
    }

    pub fn origin(&self, id: NodeId) -> &str {
        self.origin_name(self.origins[id.0 as usize])
    }

    fn origin_name(&self, origin: u32) -> &str {
        &self.origin_names[origin as usize]
    }

    pub fn grad_of(&self, id: NodeId) -> Option<GradOf> {
        self.grad_of.get(&id).copied()
    }

    pub fn output(&self, name: &str) -> Option<NodeId> {
        self.outputs.iter().find(|(n, _)| n == name).map(|&(_, id)| id)
    }

    /// Nodes that some output depends on.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for &(_, id) in &self.outputs {
            live[id.0 as usize] = true;
        }
        for id in self.ids().rev() {
            if live[id.0 as usize] {
                for operand in &self[id].operands {
                    live[operand.0 as usize] = true;
                }
            }
        }
        live
    }

    /// How many live nodes read each node; an output counts as one reader.
    pub fn uses(&self) -> Vec<u32> {
        let live = self.live();
        let mut uses = vec![0; self.nodes.len()];
        for id in self.ids().filter(|id| live[id.0 as usize]) {
            for operand in &self[id].operands {
                uses[operand.0 as usize] += 1;
            }
        }
        for &(_, id) in &self.outputs {
            uses[id.0 as usize] += 1;
        }
        uses
    }

    /// How the dims of a node's operands and result correspond, with their sizes.
    pub fn rule(&self, node: &Node) -> Rule {
        let types: SmallVec<[&TensorType; 3]> = node.operands.iter().map(|&operand| self.ty(operand)).collect();
        node.op.rule(&types, &node.ty).sized(&types, &node.ty)
    }

    /// A graph of the live nodes, each passed through `rewrite`, which adds to the new graph and returns the node that stands
    /// for the old one. Phase, stage, origin and (mapped) `grad_of` are stamped on what it adds.
    pub fn map(&self, mut rewrite: impl FnMut(&mut Graph, NodeId, &Node, &[NodeId]) -> Result<NodeId>) -> Result<Graph> {
        let live = self.live();
        let mut out = Graph::new();
        out.mesh = self.mesh.clone();
        let mut map: Vec<Option<NodeId>> = vec![None; self.nodes.len()];
        for id in self.ids().filter(|id| live[id.0 as usize]) {
            let node = &self[id];
            let operands: Operands = node.operands.iter().map(|o| map[o.0 as usize].expect("operands come first")).collect();
            out.set_origin_of(self, id);
            out.cursor.phase = node.phase;
            out.cursor.stage = node.stage;
            out.set_grad_of_like(self, id, |of| map[of.0 as usize]);
            map[id.0 as usize] = Some(rewrite(&mut out, id, node, &operands)?);
        }
        let mapped = |&(ref name, id): &(String, NodeId)| (name.clone(), map[id.0 as usize].expect("outputs are live"));
        out.outputs = self.outputs.iter().map(mapped).collect();
        out.cursor = Cursor::default();
        Ok(out)
    }

    /// An internal error: a pass broke an invariant that `what` names.
    pub fn broken(&self, id: NodeId, what: &str) -> Error {
        Error::internal(format!("{what}: %{} = {} {}", id.0, self[id].op.name(), self.ty_text(id))).at(self.origin(id))
    }

    fn ty_text(&self, id: NodeId) -> String {
        self[id].ty.text(self.mesh.as_ref().unwrap_or(&Mesh { axes: Vec::new() }))
    }
}
