//! Sums over microbatches: kernels add to them in place, so each is the result of one kernel that only the update reads.

use crate::error::Result;
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::{GradSum, Op};

/// `placed` with a copy, made by a kernel of its own, for each value that the update resolves over microbatches and that no kernel
/// makes, or that others read one microbatch at a time.
pub(super) fn own_accumulators(placed: Graph) -> Result<Graph> {
    let shared = shared_accumulators(&placed);
    if shared.is_empty() {
        return Ok(placed);
    }
    placed.map(|out, id, node, operands| {
        if shared.contains(&id) {
            let sum = placed[id].operands[0];
            out.set_phase(placed[sum].phase);
            let copy = out.add_typed(GradSum { of: sum.0 }, operands, placed.ty(sum).clone());
            out.set_phase(node.phase);
            return Ok(out.add_typed(node.op.clone(), &[copy], node.ty.clone()));
        }
        Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()))
    })
}

/// The `resolve_mb` of such values.
fn shared_accumulators(placed: &Graph) -> Vec<NodeId> {
    let live = placed.live();
    let resolves = |id: &NodeId| matches!(placed[*id].op, Op::ResolveMicrobatches(_)) && placed[*id].phase == Phase::Update;
    let mut read = vec![false; placed.nodes.len()];
    for id in placed.ids().filter(|id| live[id.0 as usize] && !resolves(id)) {
        for operand in &placed[id].operands {
            read[operand.0 as usize] = true;
        }
    }
    let shared = |id: &NodeId| {
        let sum = placed[*id].operands[0];
        read[sum.0 as usize] || placed[sum].op.is_communication() || assigns(&placed[sum].op)
    };
    placed.ids().filter(|id| live[id.0 as usize] && resolves(id) && shared(id)).collect()
}

/// Ops of a library that write their results and cannot add to them.
fn assigns(op: &Op) -> bool {
    matches!(op, Op::Cumsum(_) | Op::SliceAxis(_) | Op::KeepFirst(_) | Op::Attention(_) | Op::AttentionGrad(_) | Op::MaxPool(_))
}
