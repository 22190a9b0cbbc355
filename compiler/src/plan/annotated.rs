//! Pins from a model's own annotations: the values of the training graph that they speak of.
//!
//! A graph after rewriting does not have every value of the file. The value of a node's result is the last forward node that
//! came of it, if its shape is the result's; an annotation of any other tensor says nothing, which the user is told.

use super::forward::{Forward, Kind};
use crate::annotations::{Annotations, Cut, Spec};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::import::index_of;
use crate::ops::Op;
use dcc_program::Shape;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// What annotations ask of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// How a value lies, a parameter where it is used.
    pub values: BTreeMap<NodeId, Wish>,
    /// How a node reads a value: by reader and value.
    pub reads: BTreeMap<(NodeId, NodeId), Wish>,
    pub stages: BTreeMap<NodeId, StageWish>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Shards of each dim over the devices of a stage.
    pub shards: Vec<u64>,
    /// Devices of each shard; empty where any will do.
    pub holders: Vec<Vec<u32>>,
    /// For messages: the tensor and the node.
    pub at: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageWish {
    pub stage: u32,
    /// For messages: the node.
    pub at: String,
}

/// The values of a graph by the nodes of the file that they came of.
pub struct Origins {
    by_node: FxHashMap<usize, Vec<NodeId>>,
    params: FxHashMap<String, Vec<NodeId>>,
    inputs: FxHashMap<String, NodeId>,
}

impl Origins {
    pub(crate) fn of(forward: &Forward) -> Origins {
        let graph = forward.graph;
        let mut origins = Origins { by_node: FxHashMap::default(), params: FxHashMap::default(), inputs: FxHashMap::default() };
        let mut ids = forward.order.clone();
        ids.sort_unstable();
        for id in ids {
            match &graph[id].op {
                Op::Param(param) => origins.params.entry(param.name.clone()).or_default().push(id),
                Op::Input(input) => drop(origins.inputs.insert(input.name.clone(), id)),
                _ if matches!(forward.kind(id), Kind::Batched | Kind::Begin) => {
                    if let Some(node) = index_of(graph.origin(id)) {
                        origins.by_node.entry(node).or_default().push(id);
                    }
                }
                _ => {}
            }
        }
        origins
    }

    pub fn params(&self, name: &str) -> &[NodeId] {
        self.params.get(name).map_or(&[], Vec::as_slice)
    }

    pub fn input(&self, name: &str) -> Option<NodeId> {
        self.inputs.get(name).copied()
    }

    pub fn nodes(&self, node: usize) -> &[NodeId] {
        self.by_node.get(&node).map_or(&[], Vec::as_slice)
    }

    /// The value of that shape that a node of the file results in.
    pub fn result(&self, graph: &Graph, node: usize, shape: &Shape) -> Option<NodeId> {
        self.nodes(node).last().copied().filter(|&id| graph.ty(id).shape == *shape)
    }

    /// What stands for a node of the file in a pipeline: its last batched value.
    pub(crate) fn staged(&self, forward: &Forward, node: usize) -> Option<NodeId> {
        self.nodes(node).iter().rev().copied().find(|&id| forward.is_batched(id))
    }
}

/// What `annotations` ask of the plan of `graph`, and what to tell of those that ask nothing. `shapes`: of the file's values.
/// Errors: an axis or a size that a tensor does not have; a parameter that two nodes want in two ways.
pub fn resolve(graph: &Graph, annotations: &Annotations, shapes: &BTreeMap<String, Shape>) -> Result<(Wishes, Vec<String>)> {
    let mut wishes = Wishes::default();
    if annotations.nodes.is_empty() {
        return Ok((wishes, Vec::new()));
    }
    let forward = Forward::of(graph);
    let origins = Origins::of(&forward);
    let (mut silent, mut all) = (Vec::new(), 0);
    for (&node, annotated) in &annotations.nodes {
        if let (Some(stage), Some(id)) = (annotated.stage, origins.staged(&forward, node)) {
            wishes.stages.insert(id, StageWish { stage, at: annotated.place.clone() });
        }
        for spec in &annotated.tensors {
            all += 1;
            let at = format!("`{}` of {}", spec.tensor, annotated.place);
            let said = Reader { graph, annotations, shapes, origins: &origins, wishes: &mut wishes }
                .tensor(node, spec, &at)
                .map_err(|error| error.at(at))?;
            if !said {
                silent.push(&spec.tensor);
            }
        }
    }
    let mut notes = Vec::new();
    if let [first, ..] = silent[..] {
        let of = format!("{} of {all} annotated tensors", silent.len());
        notes.push(format!(
            "{of} are not values of the rewritten graph, so that nothing is pinned by them: the first is `{first}`"
        ));
    }
    Ok((wishes, notes))
}

struct Reader<'a> {
    graph: &'a Graph,
    annotations: &'a Annotations,
    shapes: &'a BTreeMap<String, Shape>,
    origins: &'a Origins,
    wishes: &'a mut Wishes,
}

impl Reader<'_> {
    /// Whether the annotation speaks of anything.
    fn tensor(&mut self, node: usize, spec: &Spec, at: &str) -> Result<bool> {
        let params = self.origins.params(&spec.tensor);
        if !params.is_empty() {
            return self.parameter(params, spec, at).map(|()| true);
        }
        let Some(shape) = self.shapes.get(&spec.tensor) else { return Ok(false) };
        let wish = Wish { shards: whole_dims(spec, shape)?, holders: spec.holders.clone(), at: at.to_owned() };
        let maker = self.annotations.makers.get(&spec.tensor).copied();
        let value = match maker {
            Some(maker) => self.origins.result(self.graph, maker, shape),
            None => self.origins.input(&spec.tensor),
        };
        let Some(value) = value else { return Ok(false) };
        if maker.is_none_or(|maker| maker == node) {
            return self.value(value, wish).map(|()| true);
        }
        let readers = self.origins.nodes(node).iter().filter(|&&id| self.graph[id].operands.contains(&value));
        let reads: Vec<(NodeId, NodeId)> = readers.map(|&reader| (reader, value)).collect();
        self.wishes.reads.extend(reads.iter().map(|&read| (read, wish.clone())));
        Ok(!reads.is_empty())
    }

    fn value(&mut self, id: NodeId, wish: Wish) -> Result<()> {
        match self.wishes.values.get(&id) {
            Some(other) if other.shards != wish.shards => {
                let what = format!("annotated as {:?} shards here and as {:?} at {}", wish.shards, other.shards, other.at);
                Err(Error::pin(what).help("dcc stores a tensor in one way; annotate it alike everywhere"))
            }
            _ => {
                self.wishes.values.insert(id, wish);
                Ok(())
            }
        }
    }

    /// A parameter, whose pieces are sharded alike.
    fn parameter(&mut self, params: &[NodeId], spec: &Spec, at: &str) -> Result<()> {
        for &id in params {
            let Op::Param(param) = &self.graph[id].op else { continue };
            let mut shape = self.graph.ty(id).shape.clone();
            let mut pieces = (0, 1);
            if let (Some(piece), Some(whole)) = (param.piece, self.shapes.get(&spec.tensor)) {
                let (dim, size) = (usize::from(piece.dim), piece.end - piece.start);
                shape = whole.clone();
                pieces = (dim, if whole[dim].is_multiple_of(size) { whole[dim] / size } else { 0 });
            }
            let mut shards = vec![1; shape.len()];
            for (dim, cut) in dims(spec, &shape)? {
                let (own, alike) = (if dim == pieces.0 { pieces.1 } else { 1 }, cut.pieces());
                if cut.shards() > 1 && alike != Some(own) {
                    let what = format!("dim {dim} is computed in {own} equal parts, each cut into shards, not in {alike:?}");
                    return Err(Error::pin(what).help("name the sizes of the parts as the first `simple_sharding` of the dim"));
                }
                shards[dim] = cut.shards();
            }
            self.value(id, Wish { shards, holders: spec.holders.clone(), at: at.to_owned() })?;
        }
        Ok(())
    }
}

/// Shards of each dim of a tensor whose dims are cut in one factor, the major one.
fn whole_dims(spec: &Spec, shape: &Shape) -> Result<Vec<u64>> {
    let mut shards = vec![1; shape.len()];
    for (dim, cut) in dims(spec, shape)? {
        if cut.shards() > 1 && cut.pieces() != Some(1) {
            let what = format!("dim {dim} is cut within its parts: dcc shards the values between nodes in blocks");
            return Err(Error::pin(what));
        }
        shards[dim] = cut.shards();
    }
    Ok(shards)
}

/// The dims that `spec` cuts, each once, of sizes as in `shape`.
fn dims<'s>(spec: &'s Spec, shape: &Shape) -> Result<Vec<(usize, &'s Cut)>> {
    let mut seen = vec![false; shape.len()];
    let mut dims = Vec::with_capacity(spec.dims.len());
    for (axis, cut) in &spec.dims {
        let rank = shape.len() as i64;
        let dim = if *axis < 0 { axis.checked_add(rank) } else { Some(*axis) };
        let dim = dim.filter(|dim| (0..rank).contains(dim)).map(|dim| dim as usize);
        let dim = dim.ok_or_else(|| Error::pin(format!("axis {axis} is annotated, of shape {:?}", shape.to_vec())))?;
        if std::mem::replace(&mut seen[dim], true) {
            return Err(Error::pin(format!("dim {dim} is annotated twice")));
        }
        let sizes: Option<u64> = cut.0.iter().map(|(size, _)| *size).try_fold(1u64, |all, size| all.checked_mul(size?));
        if let Some(size) = sizes.filter(|&size| !cut.0.is_empty() && size != shape[dim]) {
            return Err(Error::pin(format!("dim {dim} is annotated with {size} elements and has {}", shape[dim])));
        }
        dims.push((dim, cut));
    }
    Ok(dims)
}
