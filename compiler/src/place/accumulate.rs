//! Sums over microbatches: kernels add to them in place, so each is the result of one kernel that only the update reads.

use crate::error::Result;
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::{GradSum, Op};
use std::collections::BTreeSet;

/// Tells copies of whole sums from those of terms, which other sums have.
const COPY: u32 = 1 << 30;

/// `placed` with a copy, made by a kernel of its own, for each value that a later section resolves over microbatches and that no
/// kernel makes, or that others read one microbatch at a time.
pub(super) fn own_accumulators(placed: Graph) -> Result<Graph> {
    let placed = own_terms(placed)?;
    let shared = shared_accumulators(&placed);
    if shared.is_empty() {
        return Ok(placed);
    }
    placed.map(|out, id, node, operands| {
        if shared.contains(&id) {
            let sum = placed[id].operands[0];
            out.set_phase(placed[sum].phase);
            let copy = out.add_typed(GradSum { of: COPY | sum.0 }, operands, placed.ty(sum).clone());
            out.set_phase(node.phase);
            return Ok(out.add_typed(node.op.clone(), &[copy], node.ty.clone()));
        }
        Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()))
    })
}

/// A sum of what several chunks compute is never added up: each section adds to it in place. So what cannot add, or is read
/// otherwise too, gets a copy that does.
fn own_terms(placed: Graph) -> Result<Graph> {
    let passes = |id: &NodeId| placed[*id].operands.iter().all(|&o| placed[o].phase.is_pass());
    let apart = |id: &NodeId| placed[*id].operands.iter().any(|&o| placed[o].stage != placed[*id].stage);
    let live = placed.live();
    let mb = placed.mesh.as_ref().and_then(|mesh| mesh.microbatch_axis());
    let is_sum = |id: &NodeId| mb.is_some_and(|mb| placed.ty(*id).sharding.is_pending(mb));
    let sums = placed.ids().filter(|id| live[id.0 as usize] && matches!(placed[*id].op, Op::GradSum(_)));
    let sums: BTreeSet<NodeId> = sums.filter(passes).filter(apart).filter(is_sum).collect();
    if sums.is_empty() {
        return Ok(placed);
    }
    let uses = placed.uses();
    placed.map(|out, id, node, operands| {
        if !sums.contains(&id) {
            return Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()));
        }
        let mut terms = Vec::with_capacity(operands.len());
        for (&term, &placed_term) in operands.iter().zip(&node.operands) {
            let own = uses[placed_term.0 as usize] == 1 && can_accumulate(&placed[placed_term].op);
            out.set_phase(placed[placed_term].phase);
            out.set_stage(placed[placed_term].stage);
            terms.push(if own { term } else { out.add_typed(GradSum { of: placed_term.0 }, &[term], node.ty.clone()) });
        }
        out.set_phase(node.phase);
        out.set_stage(node.stage);
        Ok(out.add_typed(node.op.clone(), &terms, node.ty.clone()))
    })
}

/// Whether the op can add its result to a buffer.
pub fn can_accumulate(op: &Op) -> bool {
    matches!(op, Op::DotGeneral(_) | Op::Convolution(_) | Op::ScatterAdd(_) | Op::Reduce(_))
}

/// The `resolve_mb` of such values.
fn shared_accumulators(placed: &Graph) -> Vec<NodeId> {
    let live = placed.live();
    let later = |id: &NodeId| matches!(placed[*id].phase, Phase::Ready | Phase::Update);
    let resolves = |id: &NodeId| matches!(placed[*id].op, Op::ResolveMicrobatches(_)) && later(id);
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
    let moves = matches!(op, Op::SliceAxis(_) | Op::KeepFirst(_));
    moves || matches!(op, Op::Cumsum(_) | Op::TopK(_) | Op::Attention(_) | Op::AttentionGrad(_) | Op::MaxPool(_))
}
