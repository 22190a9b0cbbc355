//! The backward pass in halves, for schedules that put its second half off (Qi et al. 2023, arXiv 2401.10241, section 2).
//!
//! `backward_input` is what the gradient of some value of the forward pass depends on, or what another stage is sent: the stage before
//! waits for that. The rest, gradients of parameters with their reductions, is `backward_weight`: only the update waits for it.

use crate::error::Result;
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use rustc_hash::FxHashSet;
use std::collections::BTreeSet;

/// `placed` with its backward nodes in halves. `gradients`: those of values that stages compute.
pub(super) fn halve(placed: Graph, gradients: &FxHashSet<NodeId>) -> Result<Graph> {
    let input = inputs(&placed, gradients);
    placed.map(|out, id, node, operands| {
        if node.phase == Phase::Backward {
            out.set_phase(if input[id.0 as usize] { Phase::BackwardInput } else { Phase::BackwardWeight });
        }
        Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()))
    })
}

/// Which backward nodes belong to the input half.
fn inputs(placed: &Graph, gradients: &FxHashSet<NodeId>) -> Vec<bool> {
    let live = placed.live();
    let backward = |id: &NodeId| live[id.0 as usize] && placed[*id].phase == Phase::Backward;
    let mut input = vec![false; placed.nodes.len()];
    for id in placed.ids().filter(backward) {
        input[id.0 as usize] = gradients.contains(&id) || matches!(placed[id].op, Op::Transfer(_));
    }
    loop {
        for id in placed.ids().rev().filter(backward) {
            if input[id.0 as usize] {
                placed[id].operands.iter().for_each(|o| input[o.0 as usize] = true);
            }
        }
        let late = resolved(placed, &input, backward);
        if late.is_empty() {
            return input;
        }
        late.into_iter().for_each(|id| input[id.0 as usize] = true);
    }
}

/// Sums over a single microbatch are resolved in place. One of the input half is there, after all that read it unresolved.
fn resolved(placed: &Graph, input: &[bool], backward: impl Fn(&NodeId) -> bool) -> Vec<NodeId> {
    let sum_of = |mut id: NodeId| {
        while matches!(placed[id].op, Op::Reshape(_)) {
            id = placed[id].operands[0];
        }
        id
    };
    let early = |id: &NodeId| backward(id) && input[id.0 as usize];
    let mut sums: BTreeSet<NodeId> = BTreeSet::new();
    for id in placed.ids().filter(|id| backward(id) && matches!(placed[*id].op, Op::ResolveMicrobatches(_))) {
        sums.extend(Some(sum_of(placed[id].operands[0])).filter(early));
    }
    let reads = |id: &NodeId| placed[*id].operands.iter().any(|&o| sums.contains(&sum_of(o)));
    placed.ids().filter(|id| backward(id) && !input[id.0 as usize] && reads(id)).collect()
}
