//! What the data-parallel ranks share of parameters, gradients and optimizer state instead of each holding all of it.
//!
//! ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) in three stages; the third is what PyTorch calls FSDP (Zhao et al. 2023, arXiv
//! 2304.11277), and with a group smaller than all ranks hybrid sharding. A parameter's *shard* adds the axis `dp` to one of its dims, and
//! `ep` where that does not share its experts (as in Rajbhandari et al. 2022, arXiv 2201.05596); `Zero` says which of state, gradient and
//! parameter lie that way. `place` applies it.

use super::{EXPERT, Plan};
use crate::graph::{Graph, NodeId, Phase};
use crate::ops::Op;
use dcc_program::program::ParamKind;
use dcc_program::{AxisId, AxisList, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// What lies in shards between its uses; each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Zero {
    /// Nothing: every rank holds all of its part of the model.
    #[default]
    Nothing,
    /// Optimizer state (ZeRO-1): gradients are scattered once, by the update, and new parameters gathered.
    State,
    /// Gradients (ZeRO-2): each microbatch's are scattered as soon as they are there.
    Gradients,
    /// Parameters (ZeRO-3, FSDP): gathered for each use, forward and backward.
    Parameters,
}

impl Zero {
    pub const ALL: [Zero; 4] = [Zero::Nothing, Zero::State, Zero::Gradients, Zero::Parameters];
}

/// The dims of each weight's shard: one of its dims divided further, by `dp` and `ep`, or by one of them. Weights that they have nothing
/// to divide of are left out.
pub(super) fn shards(graph: &Graph, plan: &Plan) -> BTreeMap<NodeId, Vec<AxisList>> {
    let mesh = &plan.mesh;
    let axes: Vec<AxisId> = ["dp", EXPERT].iter().filter_map(|a| mesh.axis(a)).filter(|&a| mesh.size(a) > 1).collect();
    // What forward does not read, a running statistic, is no weight in ZeRO's sense.
    let live = graph.live();
    let forward = graph.ids().filter(|&id| live[id.0 as usize] && graph[id].phase == Phase::Forward);
    let read: BTreeSet<NodeId> = forward.flat_map(|id| graph[id].operands.iter().copied()).collect();
    let shard = |id: NodeId| {
        let Op::Param(param) = &graph[id].op else { return None };
        let used = plan.strategies.get(&id).map(|strategy| strategy.factors.clone());
        let used = used.unwrap_or_else(|| vec![AxisList::new(); param.shape.len()]);
        let free: Vec<AxisId> = axes.iter().copied().filter(|axis| !used.iter().flatten().any(|a| a == axis)).collect();
        let by = |axes: &[AxisId]| shard_of(&param.shape, used.clone(), axes, mesh);
        let shard = || by(&free).or_else(|| free.iter().find_map(|&axis| by(&[axis])));
        (param.kind == ParamKind::Weight && read.contains(&id) && !free.is_empty()).then(|| Some((id, shard()?)))?
    };
    graph.ids().filter_map(shard).collect()
}

/// The weights of `plan.shards` that forward and backward read only as casts to half floats: master weights.
pub(super) fn masters(graph: &Graph, plan: &Plan) -> BTreeSet<NodeId> {
    if plan.zero == Zero::Nothing {
        return BTreeSet::new();
    }
    let live = graph.live();
    let passes = graph.ids().filter(|&id| live[id.0 as usize] && graph[id].phase != Phase::Update);
    let reads = |id: NodeId| graph[id].operands.iter().filter(move |_| !is_narrowing(graph, id)).copied();
    let whole: BTreeSet<NodeId> = passes.flat_map(reads).collect();
    plan.shards.keys().copied().filter(|weight| !whole.contains(weight)).collect()
}

/// Whether a node is a weight in half floats.
pub fn is_narrowing(graph: &Graph, id: NodeId) -> bool {
    let node = &graph[id];
    let of_weight = |o: &NodeId| matches!(&graph[*o].op, Op::Param(param) if param.kind == ParamKind::Weight);
    let narrows = matches!(node.op, Op::Cast(_)) && node.ty.dtype.is_float() && node.ty.dtype.bytes() == 2;
    narrows && node.operands.iter().all(|o| of_weight(o) && graph.ty(*o).dtype.bytes() > 2)
}

/// The first dim that divides evenly, else the one that wastes least on its last block; none where every dim is shorter than the ranks
/// along `axes` are many.
fn shard_of(shape: &[u64], mut used: Vec<AxisList>, axes: &[AxisId], mesh: &Mesh) -> Option<Vec<AxisList>> {
    let parts = mesh.shards(axes);
    let waste = |d: &usize| {
        let before: u64 = used[*d].iter().map(|&axis| u64::from(mesh.size(axis))).product();
        let block = shape[*d].div_ceil(before);
        (block >= parts).then(|| (block.div_ceil(parts) * parts - block) as f64 / block as f64)
    };
    let dims = (0..shape.len()).filter_map(|d| Some((waste(&d)?, d)));
    let (_, dim) = dims.min_by(|a, b| a.partial_cmp(b).expect("no shape is 0 / 0"))?;
    used[dim].extend_from_slice(axes);
    Some(used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};

    fn check(shape: &[u64], used: &[&[&str]], expected: Expect) {
        let mesh = Mesh::new(&[("mb", 1), ("dp", 4), ("tp", 2)]);
        let axes = |names: &&[&str]| names.iter().map(|name| mesh.axis(name).expect("an axis of the mesh")).collect();
        let shard = shard_of(shape, used.iter().map(axes).collect(), &[mesh.axis("dp").expect("there is dp")], &mesh);
        let text = shard.map(|dims| {
            let dims = dims
                .iter()
                .zip(shape)
                .map(|(axes, size)| axes.iter().fold(size.to_string(), |text, &axis| format!("{text}/{}", mesh.name(axis))));
            dims.collect::<Vec<_>>().join(", ")
        });
        expected.assert_eq(&text.unwrap_or_else(|| "whole".to_owned()));
    }

    #[test]
    fn a_dim_that_divides_is_taken_first() {
        check(&[768, 3072], &[&[], &["tp"]], expect!["768/dp, 3072/tp"]);
        check(&[50257, 768], &[&["tp"], &[]], expect!["50257/tp, 768/dp"]);
        check(&[8], &[&["tp"]], expect!["8/tp/dp"]);
    }

    #[test]
    fn otherwise_the_one_that_wastes_least() {
        check(&[5, 9], &[&[], &[]], expect!["5, 9/dp"]);
        check(&[10], &[&[]], expect!["10/dp"]);
    }

    #[test]
    fn what_is_shorter_than_the_ranks_stays_whole() {
        check(&[3], &[&[]], expect!["whole"]);
        check(&[], &[], expect!["whole"]);
        check(&[6], &[&["tp"]], expect!["whole"]);
    }
}
