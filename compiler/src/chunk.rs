//! A classifier in chunks: a large product at the end of the forward pass, the loss of it and its gradients, some tokens at a time.
//!
//! Before: a placed training graph. After: where the result of a product of the forward pass is large, all that works on values of its
//! size is there once for each chunk of one of its dims, so that no two chunks need be in memory at once; the forward nodes among it
//! have moved into the backward pass, with what only they lead to, the loss. Gradients that sum over the dim are sums of the chunks'.
//!
//! Which ops a chunk passes through, and what becomes of the dim there, is what their sharding rules say: a chunk is a shard in time.
//! (Liger Kernel, Hsu et al. 2024, arXiv 2410.10989, section 3.3, does so by hand for one loss.)

mod region;

use crate::graph::{Graph, NodeId, Operands, Phase};
use crate::ops::{BroadcastInDim, Concatenate, GradSum, Iota, Op, Slice};
use crate::plan::Plan;
use crate::train::Output;
use dcc_program::{Shape, TensorType};
use region::Region;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// What is parted.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a result on one rank, at least.
    pub bytes: u64,
    /// Rows of a chunk, at least: weights are read once for each.
    pub rows: u64,
    /// Most chunks.
    pub chunks: u64,
}

/// Steps in which a chunk of a value from outside is made at most.
const STEPS: usize = 64;

impl Limits {
    /// From where on chunks take less memory and no more time.
    pub const USUAL: Limits = Limits { bytes: 16 << 20, rows: 256, chunks: 8 };
    /// Whatever can be parted.
    pub const NONE: Limits = Limits { bytes: 1, rows: 1, chunks: 64 };

    /// How many chunks `size` elements of a dim make in a value of so many rows: a divisor.
    fn count(&self, size: u64, rows: u64) -> u64 {
        let most = (rows / self.rows).min(self.chunks);
        (1..=most).rev().find(|count| size.is_multiple_of(*count)).unwrap_or(1)
    }
}

/// `placed` with a large product in chunks, if there is one that can be parted.
pub fn apply(placed: Graph, plan: &Plan, limits: Limits) -> Graph {
    match Region::find(&placed, &plan.mesh, limits) {
        Some(region) => part(&placed, &region),
        None => placed,
    }
}

/// Whether `apply` has parted a placed training graph: the loss is made of what the backward pass computes.
pub fn is_parted(placed: &Graph) -> bool {
    let mut open: Vec<NodeId> = placed.output(&Output::Loss.text()).into_iter().collect();
    while let Some(id) = open.pop() {
        let node = &placed[id];
        if node.phase.is_backward() {
            return true;
        }
        // After both passes it is summed over microbatches and ranks.
        if node.phase != Phase::Forward {
            open.extend(&node.operands);
        }
    }
    false
}

/// What becomes of a value in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// This dim has a chunk's elements only.
    Of(usize),
    /// A term of a sum over all chunks.
    Term,
}

fn part(placed: &Graph, region: &Region) -> Graph {
    let mut out = Graph::new();
    out.mesh = placed.mesh.clone();
    let mut parting = Parting { placed, region, out, map: vec![None; placed.nodes.len()], made: BTreeMap::new() };
    let live = placed.live();
    let nodes = || placed.ids().filter(|id| live[id.0 as usize]);
    nodes().filter(|id| !region.follows(*id)).for_each(|id| parting.copy(id));
    (0..region.chunks).for_each(|chunk| parting.chunk(chunk));
    nodes().filter(|id| region.follows(*id) && !region.parts.contains_key(id)).for_each(|id| parting.copy(id));
    let mut out = parting.out;
    out.outputs = placed.outputs.iter().map(|(name, id)| (name.clone(), parting.map[id.0 as usize].expect("live"))).collect();
    out.set_cursor(Default::default());
    out
}

struct Parting<'a> {
    placed: &'a Graph,
    region: &'a Region,
    out: Graph,
    /// By old node; those of the region when something reads them whole.
    map: Vec<Option<NodeId>>,
    /// Each chunk's nodes, by old node.
    made: BTreeMap<NodeId, Vec<NodeId>>,
}

impl Parting<'_> {
    /// What is added next stands in the place of `id`, in the backward pass if it is of the region or follows it in the forward pass.
    fn stamp(&mut self, id: NodeId) {
        let node = &self.placed[id];
        let late = node.phase == Phase::Forward && self.region.follows(id);
        self.out.set_phase(if late { Phase::Backward } else { node.phase });
        self.out.set_stage(node.stage);
        self.out.set_origin_of(self.placed, id);
        self.out.set_grad_of_like(self.placed, id, |of| self.map[of.0 as usize]);
    }

    fn copy(&mut self, id: NodeId) {
        let node = &self.placed[id];
        let mut operands = Operands::new();
        for &operand in &node.operands {
            match (&node.op, self.region.parts.get(&operand)) {
                // One sum of all terms.
                (Op::GradSum(_), Some(Part::Term)) => operands.extend(self.made[&operand].iter().copied()),
                _ => operands.push(self.whole(operand)),
            }
        }
        self.stamp(id);
        self.map[id.0 as usize] = Some(self.out.add_typed(node.op.clone(), &operands, node.ty.clone()));
    }

    /// The whole of a value, of the region's by its chunks.
    fn whole(&mut self, id: NodeId) -> NodeId {
        if let Some(known) = self.map[id.0 as usize] {
            return known;
        }
        let op: Op = match self.region.parts[&id] {
            Part::Of(dim) => Concatenate { dim: dim as u8 }.into(),
            Part::Term => GradSum { of: id.0 }.into(),
        };
        self.stamp(id);
        let whole = self.out.add_typed(op, &self.made[&id], self.placed.ty(id).clone());
        self.map[id.0 as usize] = Some(whole);
        whole
    }

    fn chunk(&mut self, chunk: u64) {
        let mut parts: FxHashMap<(NodeId, usize), NodeId> = FxHashMap::default();
        let region = self.region;
        for (&id, &becomes) in &region.parts {
            let node = &self.placed[id];
            let dims = region.operand_dims(self.placed, id);
            let mut operands = Operands::new();
            for (&operand, dim) in node.operands.iter().zip(dims) {
                operands.push(match (self.made.get(&operand), dim) {
                    (Some(made), _) => made[chunk as usize],
                    (None, Some(dim)) => self.given(&mut parts, operand, dim, (chunk, 0)),
                    (None, None) => self.map[operand.0 as usize].expect("what the region reads does not follow it"),
                });
            }
            let mut ty = node.ty.clone();
            if let Part::Of(dim) = becomes {
                ty.shape[dim] = region.size;
            }
            let op = resized(&node.op, &ty);
            self.stamp(id);
            let made = self.out.add_typed(op, &operands, ty);
            self.made.entry(id).or_default().push(made);
        }
    }

    /// A chunk of a value from outside: what repeats, counts, or is large and made of such values in few steps is made in that size, all
    /// else sliced. `chunk`: its number, and from how many steps on it is asked for.
    fn given(&mut self, parts: &mut FxHashMap<(NodeId, usize), NodeId>, id: NodeId, dim: usize, chunk: (u64, usize)) -> NodeId {
        let (chunk, steps) = chunk;
        let next = (chunk, steps + 1);
        if let Some(&known) = parts.get(&(id, dim)) {
            return known;
        }
        let node = &self.placed[id];
        let mut ty: TensorType = node.ty.clone();
        ty.shape[dim] = self.region.size;
        let pointwise = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_));
        let (op, operands): (Op, Operands) = match &node.op {
            Op::Iota(op) if usize::from(op.dim) != dim => (resized(&node.op, &ty), Operands::new()),
            Op::BroadcastInDim(op) => {
                let inner = op.dims.iter().position(|&d| usize::from(d) == dim);
                let operand = node.operands[0];
                let operand = match inner {
                    Some(at) => self.given(parts, operand, at, next),
                    None => self.map[operand.0 as usize].expect("an operand of what is outside"),
                };
                (resized(&node.op, &ty), Operands::from_slice(&[operand]))
            }
            op if pointwise && steps < STEPS && self.region.is_large(self.placed, id) => {
                let operands = node.operands.iter().map(|&operand| self.given(parts, operand, dim, next)).collect();
                (op.clone(), operands)
            }
            _ => {
                let mut start = Shape::from_elem(0, ty.rank());
                start[dim] = chunk * self.region.size;
                let limit = start.iter().zip(&ty.shape).map(|(from, size)| from + size).collect();
                let stride = Shape::from_elem(1, ty.rank());
                let whole = self.map[id.0 as usize].expect("what the region reads does not follow it");
                (Slice { start, limit, stride }.into(), Operands::from_slice(&[whole]))
            }
        };
        self.stamp(id);
        self.out.set_phase(Phase::Backward);
        let made = self.out.add_typed(op, &operands, ty);
        parts.insert((id, dim), made);
        made
    }
}

/// The op with the shape of its result, where it says one.
fn resized(op: &Op, ty: &TensorType) -> Op {
    match op {
        Op::BroadcastInDim(op) => BroadcastInDim { shape: ty.shape.clone(), ..op.clone() }.into(),
        Op::Iota(op) => Iota { shape: ty.shape.clone(), ..op.clone() }.into(),
        other => other.clone(),
    }
}
