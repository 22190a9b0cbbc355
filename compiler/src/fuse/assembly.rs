//! Sums of the gradients of parts: each term is a part with zeros around it, and the parts are all of the result. A kernel of its own
//! writes the parts where they belong, instead of adding all terms up at every element.

use crate::graph::{Graph, NodeId};
use crate::ops::Op;

/// Fewer parts are added up where the sum is read.
const FEWEST: usize = 8;

/// A result in parts of `size` along `dim`.
pub struct Assembly {
    pub dim: usize,
    pub size: u64,
    /// Each part, as long as the term's pad leaves it, and where it begins.
    pub parts: Vec<(NodeId, u64)>,
}

/// What `id` puts together, if it is such a sum.
pub fn assembly(graph: &Graph, id: NodeId) -> Option<Assembly> {
    let node = &graph[id];
    if !matches!(node.op, Op::GradSum(_)) || node.operands.len() < FEWEST {
        return None;
    }
    let dims = 0..node.ty.rank();
    let part = |term: &NodeId| match &graph[*term].op {
        Op::Pad(pad) if pad.interior.iter().all(|&n| n == 0) => {
            let mut moved = dims.clone().filter(|&d| pad.low[d] + pad.high[d] != 0);
            let (dim, others) = (moved.next()?, moved.count());
            (others == 0).then_some((dim, graph[*term].operands[0], pad.low[dim]))
        }
        _ => None,
    };
    let parts: Vec<(usize, NodeId, u64)> = node.operands.iter().map(part).collect::<Option<_>>()?;
    let (dim, first, _) = parts[0];
    let size = graph.ty(first).shape[dim];
    let alike = parts.iter().all(|&(d, part, start)| d == dim && graph.ty(part).shape[dim] == size && start % size == 0);
    let mut starts: Vec<u64> = parts.iter().map(|part| part.2).collect();
    starts.sort_unstable();
    starts.dedup();
    let whole = starts.len() == parts.len() && starts.len() as u64 * size == node.ty.shape[dim];
    let parts = parts.into_iter().map(|(_, part, start)| (part, start)).collect();
    (alike && whole && node.ty.sharding.dims[dim].is_empty()).then_some(Assembly { dim, size, parts })
}
