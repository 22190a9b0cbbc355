//! Which dims of inputs context parallelism splits: those that count positions of a sequence.
//!
//! Positions are what attention has queries and keys of, and what products of two batched operands compute on where attention is written
//! out, samples and features aside.
//!
//! All that has positions is split along them, but for attention: there every query meets all keys and values, which are gathered for it
//! (Grattafiori et al. 2024, Llama 3, arXiv 2407.21783, section 3.3.2); or its heads are split instead, and an all_to_all leads there
//! and back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509, section 3), which under a causal mask gives all ranks the same
//! work. Costs decide.

use super::super::forward::{Forward, Kind};
use super::super::samples::Sequences;
use super::super::{Parallel, advice};
use super::classes::Classes;
use super::model::Place;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::ops::{Op, Rule};
use dcc_program::{AxisId, FactorId};
use std::collections::BTreeMap;

/// Where context parallelism may split each node.
#[derive(Debug)]
pub(super) struct Context {
    pub axis: AxisId,
    /// The factor of positions of each node that has one.
    pub positions: BTreeMap<NodeId, FactorId>,
}

impl Context {
    /// By positions; attention by heads too.
    pub fn places(&self, forward: &Forward, id: NodeId, rule: &Rule) -> Vec<Option<Place>> {
        let mut places = vec![self.positions.get(&id).map(|&factor| Place { factor, inner: false })];
        if matches!(forward.graph[id].op, Op::Attention(_)) && places[0].is_some() {
            let heads = |f: &FactorId| ["h", "g"].contains(&rule.spec.names[usize::from(f.0)].as_str()) && !rule.is_whole(*f);
            places.extend(rule.spec.ids().filter(heads).map(|factor| Some(Place { factor, inner: true })));
        }
        places
    }
}

/// The dims that `cp` ranks share; none for a single rank.
/// Errors: no input has such a dim, of a position for each rank.
pub(super) fn sequences(forward: &Forward, options: &Parallel) -> Result<Sequences> {
    let cp = options.cp;
    if cp == 1 {
        return Ok(Sequences::new());
    }
    let classes = Classes::of(forward);
    let positions: Vec<(NodeId, FactorId)> = forward.order.iter().flat_map(|&id| positions(forward, &classes, id)).collect();
    let (mut sequences, mut longest) = (Sequences::new(), 0);
    for &id in &forward.order {
        let Op::Input(input) = &forward.graph[id].op else { continue };
        let shape = &forward.graph.ty(id).shape;
        let is_position = |dim: usize| positions.iter().any(|&(of, factor)| classes.is_dim((id, dim), forward, of, factor));
        let dims = (0..shape.len()).filter(|&dim| input.batch_dim.is_some_and(|batch| usize::from(batch) != dim));
        let found: Vec<usize> = dims.filter(|&dim| is_position(dim)).collect();
        longest = found.iter().map(|&dim| shape[dim]).fold(longest, u64::max);
        // An axis stands on one dim.
        sequences.extend(found.into_iter().find(|&dim| shape[dim] >= u64::from(cp)).map(|dim| (id, dim)));
    }
    if sequences.is_empty() {
        let what = format!(
            "--cp {cp} has no sequence to split: no input has a dim, of at least {cp} elements, that attention computes on"
        );
        let help = match longest {
            0 | 1 => advice::instead(forward, options, "--cp", cp),
            _ => format!("use --cp {longest} or less"),
        };
        return Err(Error::context_parallel(what).help(help));
    }
    Ok(sequences)
}

/// Factors of `id` that count positions.
fn positions(forward: &Forward, classes: &Classes, id: NodeId) -> Vec<(NodeId, FactorId)> {
    let node = &forward.graph[id];
    let spec = &forward.rule(id).spec;
    let batched = || node.operands.iter().all(|&o| forward.is_batched(o));
    let found: Vec<FactorId> = match &node.op {
        Op::Attention(_) => spec.ids().filter(|&f| node.op.counts_positions(spec, f)).collect(),
        Op::DotGeneral(_) if forward.kind(id) == Kind::Batched && batched() => spec.ids().collect(),
        _ => Vec::new(),
    };
    found.into_iter().filter(|&f| !classes.is_feature(forward, id, f)).map(|f| (id, f)).collect()
}
