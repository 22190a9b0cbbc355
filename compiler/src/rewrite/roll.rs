//! Loops over samples that an export has unrolled, rolled up: what is concatenated of parts that are computed alike from one slice
//! after another is computed of all slices at once, along a dim of their own.
//!
//! Such are PyTorch's `EmbeddingBag`, and `torch.stack([f(x[i]) for i in range(n)])`. An op for each sample is not only slow: in a graph
//! of them no dim counts samples, so that no mesh could share them out.

use super::pattern::is_number;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{BroadcastInDim, Concatenate, DotGeneral, Gather, Op, Pad, Reduce, Reshape, Reverse, Slice, Transpose};
use dcc_program::{FactorSpec, Shape};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Fewer parts stay as they are.
const FEWEST: usize = 4;

/// Values of more dims do not get another one.
const MOST_DIMS: usize = 7;

/// What takes more steps, one after the other, is no loop that anyone would write.
const DEEPEST: usize = 256;

/// The graph with all such concatenations rolled up; `None` where there are none.
pub(super) fn roll(graph: &Graph) -> Result<Option<Graph>> {
    let (uses, mut loops) = (graph.uses(), 0);
    let mut new: FxHashMap<NodeId, NodeId> = FxHashMap::default();
    let rolled = graph.map(|out, id, node, operands| {
        let found = match &node.op {
            Op::Concatenate(op) => Loop::find(graph, &uses, &flat(graph, &uses, id)).map(|found| (found, usize::from(op.dim))),
            _ => None,
        };
        loops += usize::from(found.is_some());
        let made = match found {
            Some((found, dim)) => found.build(out, &new, dim)?,
            None => out.add_typed(node.op.clone(), operands, node.ty.clone()),
        };
        new.insert(id, made);
        Ok(made)
    })?;
    // Without what the turns have computed one by one.
    let live = |graph: Graph| graph.map(|out, _, node, operands| Ok(out.add_typed(node.op.clone(), operands, node.ty.clone())));
    if loops == 0 { Ok(None) } else { live(rolled).map(Some) }
}

/// What is concatenated along a dim, also in several steps.
fn flat(graph: &Graph, uses: &[u32], id: NodeId) -> Vec<NodeId> {
    let (mut parts, mut open) = (Vec::new(), vec![id]);
    while let Some(part) = open.pop() {
        match part == id || graph[part].op == graph[id].op && uses[part.0 as usize] == 1 {
            true => open.extend(graph[part].operands.iter().rev()),
            false => parts.push(part),
        }
    }
    parts
}

/// What stands in an operand's place for all turns of a loop.
#[derive(Clone, Debug)]
enum Turns {
    /// The same value in each.
    Same(NodeId),
    /// Slices that lie side by side along a dim, of which this is the first turn's.
    Tiles { first: NodeId, dim: usize },
    /// The step of this number.
    Step(usize),
}

/// An unrolled loop: steps in the order in which they are computed, each of which stands for one node of each turn.
struct Loop<'a> {
    graph: &'a Graph,
    turns: usize,
    /// The first turn's node, and what its operands are.
    steps: Vec<(NodeId, Vec<Turns>)>,
    known: FxHashMap<Vec<NodeId>, Option<Turns>>,
    /// How often the loop reads each node that it would compute no more.
    reads: FxHashMap<NodeId, u32>,
    /// Of the step that is looked at, from the last one on.
    depth: usize,
}

impl<'a> Loop<'a> {
    /// The loop whose turns compute `parts`, which nothing else reads anything of.
    fn find(graph: &'a Graph, uses: &[u32], parts: &[NodeId]) -> Option<Loop<'a>> {
        if parts.len() < FEWEST {
            return None;
        }
        let (known, reads) = (FxHashMap::default(), FxHashMap::default());
        let mut found = Loop { graph, turns: parts.len(), steps: Vec::new(), known, reads, depth: 0 };
        let Turns::Step(_) = found.turns(parts.to_vec())? else { return None };
        parts.iter().for_each(|&part| *found.reads.entry(part).or_default() += 1);
        let own = found.reads.iter().all(|(id, &reads)| reads == uses[id.0 as usize]);
        own.then_some(found)
    }

    fn turns(&mut self, ids: Vec<NodeId>) -> Option<Turns> {
        if ids.iter().all(|id| *id == ids[0] || self.are_one_number(*id, ids[0])) {
            return Some(Turns::Same(ids[0]));
        }
        if let Some(known) = self.known.get(&ids) {
            return known.clone();
        }
        self.depth += 1;
        let found = self.tiles(&ids).or_else(|| self.step(&ids));
        self.depth -= 1;
        self.known.insert(ids, found.clone());
        found
    }

    /// Whether two constants are the same as their dtype holds them: one may have been computed in f64, the other rounded on the way.
    fn are_one_number(&self, a: NodeId, b: NodeId) -> bool {
        match (&self.graph[a].op, &self.graph[b].op) {
            (Op::Const(x), Op::Const(y)) => x.dtype == y.dtype && is_number(x, y.value()),
            _ => false,
        }
    }

    /// Slices of one value that lie side by side.
    fn tiles(&self, ids: &[NodeId]) -> Option<Turns> {
        let source = self.graph[ids[0]].operands.first().copied()?;
        let slices = ids.iter().map(|&id| match &self.graph[id].op {
            Op::Slice(op) if self.graph[id].operands[0] == source && op.stride.iter().all(|&stride| stride == 1) => Some(op),
            _ => None,
        });
        let slices: Vec<&Slice> = slices.collect::<Option<_>>()?;
        let (first, second) = (slices[0], slices[1]);
        let dim = (0..first.start.len()).find(|&dim| first.start[dim] != second.start[dim])?;
        let size = first.limit[dim] - first.start[dim];
        let follows = |turn: usize, at: usize| if at == dim { turn as u64 * size } else { 0 };
        let fits = |(turn, slice): (usize, &&Slice)| {
            (0..first.start.len()).all(|at| {
                let by = follows(turn, at);
                (slice.start[at], slice.limit[at]) == (first.start[at] + by, first.limit[at] + by)
            })
        };
        slices.iter().enumerate().all(fits).then_some(Turns::Tiles { first: ids[0], dim })
    }

    /// The same op of each turn, of operands that are turns of a loop in their turn.
    fn step(&mut self, ids: &[NodeId]) -> Option<Turns> {
        let first = &self.graph[ids[0]];
        let alike = |id: &NodeId| {
            let node = &self.graph[*id];
            node.op == first.op && node.ty == first.ty && node.operands.len() == first.operands.len()
        };
        let may = !first.operands.is_empty() && first.ty.rank() <= MOST_DIMS && self.depth <= DEEPEST && can_lift(&first.op);
        if !may || !ids.iter().all(alike) {
            return None;
        }
        let mut operands = Vec::with_capacity(first.operands.len());
        for position in 0..first.operands.len() {
            let of_turns = ids.iter().map(|&id| self.graph[id].operands[position]).collect();
            operands.push(self.turns(of_turns)?);
        }
        if operands.iter().all(|operand| matches!(operand, Turns::Same(_))) {
            return Some(Turns::Same(ids[0]));
        }
        let steps = operands.iter().enumerate().filter(|(_, turns)| matches!(turns, Turns::Step(_)));
        for (position, _) in steps {
            for &id in ids {
                *self.reads.entry(self.graph[id].operands[position]).or_default() += 1;
            }
        }
        self.steps.push((ids[0], operands));
        Some(Turns::Step(self.steps.len() - 1))
    }

    /// All turns at once, their results one after the other along `dim`. `new`: what stands for nodes of the graph in `out`.
    fn build(&self, out: &mut Graph, new: &FxHashMap<NodeId, NodeId>, dim: usize) -> Result<NodeId> {
        let mut made: Vec<NodeId> = Vec::with_capacity(self.steps.len());
        for (id, operands) in &self.steps {
            let node = &self.graph[*id];
            out.set_origin_of(self.graph, *id);
            let joint = matches!(node.op, Op::DotGeneral(_) | Op::Gather(_));
            let mut values = Vec::with_capacity(operands.len());
            for operand in operands {
                values.push(match *operand {
                    Turns::Step(step) => made[step],
                    Turns::Same(same) if joint => new[&same],
                    Turns::Same(same) => self.repeated(out, new[&same])?,
                    Turns::Tiles { first, dim } => self.tiled(out, new, (first, dim))?,
                });
            }
            let along = operands.iter().map(|operand| !matches!(operand, Turns::Same(_))).collect::<Vec<_>>();
            made.push(out.add(lift(&node.op, self.turns as u64, &along), &values)?);
        }
        let last = *made.last().expect("a loop has a step");
        let shape = out.ty(last).shape.clone();
        let order: Vec<usize> = (1..=dim).chain([0]).chain(dim + 1..shape.len()).collect();
        let moved = out.transpose(last, &order)?;
        let mut joined = Shape::from_slice(&shape[1..]);
        joined[dim] *= shape[0];
        out.reshape(moved, &joined)
    }

    fn repeated(&self, out: &mut Graph, value: NodeId) -> Result<NodeId> {
        let shape: Vec<u64> = std::iter::once(self.turns as u64).chain(out.ty(value).shape.iter().copied()).collect();
        let dims: Vec<usize> = (1..shape.len()).collect();
        out.broadcast(value, &shape, &dims)
    }

    /// The slices of all turns, of which the first is known, along a dim before all others.
    fn tiled(&self, out: &mut Graph, new: &FxHashMap<NodeId, NodeId>, (first, dim): (NodeId, usize)) -> Result<NodeId> {
        let (node, turns) = (&self.graph[first], self.turns as u64);
        let Op::Slice(op) = &node.op else { return Err(self.graph.broken(first, "a tile that is no slice")) };
        let (mut op, size) = (op.clone(), node.ty.shape[dim]);
        op.limit[dim] = op.start[dim] + turns * size;
        let value = new[&node.operands[0]];
        let is_whole = op.limit == out.ty(value).shape && op.start.iter().all(|&start| start == 0);
        let part = if is_whole { value } else { out.add(op, &[value])? };
        let shape = out.ty(part).shape.clone();
        let apart: Vec<u64> =
            shape[..dim].iter().copied().chain([turns, size]).chain(shape[dim + 1..].iter().copied()).collect();
        let part = out.reshape(part, &apart)?;
        let order: Vec<usize> = std::iter::once(dim).chain(0..dim).chain(dim + 1..apart.len()).collect();
        out.transpose(part, &order)
    }
}

fn can_lift(op: &Op) -> bool {
    use Op::*;
    let pointwise = matches!(op, Unary(_) | Binary(_) | Compare(_) | Select(_) | Cast(_) | StopGradient(_));
    let moves = matches!(op, BroadcastInDim(_) | Reshape(_) | Transpose(_) | Slice(_) | Pad(_) | Reverse(_) | Concatenate(_));
    pointwise || moves || matches!(op, Reduce(_) | DotGeneral(_) | Gather(_))
}

/// `op` for `turns` values at once, along a dim before all others of its result and of the operands of which that is said.
fn lift(op: &Op, turns: u64, along: &[bool]) -> Op {
    let later = |dims: &[u8]| dims.iter().map(|dim| dim + 1).collect::<SmallVec<_>>();
    let first = |value: u64, rest: &[u64]| std::iter::once(value).chain(rest.iter().copied()).collect::<Shape>();
    match op {
        Op::Reduce(op) => Reduce { op: op.op, dims: later(&op.dims) }.into(),
        Op::BroadcastInDim(op) => {
            let dims = std::iter::once(0).chain(later(&op.dims)).collect();
            BroadcastInDim { shape: first(turns, &op.shape), dims }.into()
        }
        Op::Reshape(op) => Reshape { shape: first(turns, &op.shape) }.into(),
        Op::Transpose(op) => Transpose { perm: std::iter::once(0).chain(later(&op.perm)).collect() }.into(),
        Op::Slice(op) => {
            Slice { start: first(0, &op.start), limit: first(turns, &op.limit), stride: first(1, &op.stride) }.into()
        }
        Op::Pad(op) => Pad { low: first(0, &op.low), high: first(0, &op.high), interior: first(0, &op.interior) }.into(),
        Op::Reverse(op) => Reverse { dims: later(&op.dims) }.into(),
        Op::Concatenate(op) => Concatenate { dim: op.dim + 1 }.into(),
        Op::DotGeneral(op) => DotGeneral { spec: with_turns(&op.spec, along), wide: op.wide }.into(),
        Op::Gather(op) => Gather { spec: with_turns(&op.spec, along) }.into(),
        pointwise => pointwise.clone(),
    }
}

/// The spec with a factor before all others of the result and of these operands.
fn with_turns(spec: &FactorSpec, along: &[bool]) -> FactorSpec {
    let name = (0..).map(|i| format!("turn{i}")).find(|name| !spec.names.contains(name)).expect("one name is free");
    let with = |dims: String, along: bool| if along { format!("{name} {dims}") } else { dims };
    let operands: Vec<String> =
        spec.operands.iter().zip(along).map(|(dims, &along)| with(spec.dims_text(dims), along)).collect();
    let text = format!("{} -> {}", operands.join(", "), with(spec.dims_text(&spec.result), true));
    FactorSpec::parse(&text).expect("the names of a spec are identifiers")
}
