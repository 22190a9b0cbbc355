//! Values that are put together from many parts: concatenations, and sums of the gradients of parts, of which each term is a part with
//! zeros around it. A kernel of its own writes the parts where they belong, instead of asking at every element which one it is of, or
//! adding all terms up there.

use crate::graph::{Graph, NodeId};
use crate::ops::Op;

/// Fewer parts are added up where the whole is read.
const FEWEST: usize = 8;
/// Fewer parts of a concatenation are told apart there.
const FEWEST_JOINED: usize = 16;

/// A result in parts of `size` along `dim`.
pub struct Assembly {
    pub dim: usize,
    pub size: u64,
    pub parts: Vec<Part>,
}

pub struct Part {
    pub value: NodeId,
    /// Where along the dim it begins.
    pub start: u64,
    /// The node that reads it, and as which operand.
    pub read: (NodeId, usize),
}

/// What `id` puts together, if its parts are alike and all of it.
pub fn assembly(graph: &Graph, id: NodeId) -> Option<Assembly> {
    let node = &graph[id];
    let (dim, parts) = match &node.op {
        Op::GradSum(_) if node.operands.len() >= FEWEST => padded(graph, &node.operands)?,
        Op::Concatenate(op) if node.operands.len() >= FEWEST_JOINED => {
            (usize::from(op.dim), joined(graph, id, usize::from(op.dim)))
        }
        _ => return None,
    };
    let size = graph.ty(parts[0].value).shape[dim];
    let alike = parts.iter().all(|part| graph.ty(part.value).shape[dim] == size && part.start % size == 0);
    let mut starts: Vec<u64> = parts.iter().map(|part| part.start).collect();
    starts.sort_unstable();
    starts.dedup();
    let whole = starts.len() == parts.len() && starts.len() as u64 * size == node.ty.shape[dim];
    (alike && whole && node.ty.sharding.dims[dim].is_empty()).then_some(Assembly { dim, size, parts })
}

/// The parts that the terms pad along one dim, which is the same for all.
fn padded(graph: &Graph, terms: &[NodeId]) -> Option<(usize, Vec<Part>)> {
    let along = |term: &NodeId| match &graph[*term].op {
        Op::Pad(pad) => pad.along().map(|dim| (dim, pad.low[dim])),
        _ => None,
    };
    let (dim, _) = along(&terms[0])?;
    let part = |&term: &NodeId| {
        let (_, start) = along(&term).filter(|found| found.0 == dim)?;
        Some(Part { value: graph[term].operands[0], start, read: (term, 0) })
    };
    Some((dim, terms.iter().map(part).collect::<Option<_>>()?))
}

fn joined(graph: &Graph, id: NodeId, dim: usize) -> Vec<Part> {
    let mut start = 0;
    let part = |(i, &value): (usize, &NodeId)| {
        let part = Part { value, start, read: (id, i) };
        start += graph.ty(value).shape[dim];
        part
    };
    graph[id].operands.iter().enumerate().map(part).collect()
}
