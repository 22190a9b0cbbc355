//! State of the model that no gradient moves: running averages of what the forward pass computes, such as BatchNorm's.
//!
//! A forward graph names them among its outputs, after the model's own. A training step adds their updates, an evaluation drops
//! them. What differs between the two reads the leaf `training`, which is settled here too.

use crate::error::Result;
use crate::graph::{GradOf, Graph, NodeId, Phase};
use crate::ops::{Const, GradSum, Op, Param};
use crate::optimizer::Update;
use dcc_program::DType;
use dcc_program::kernel::BinaryOp;
use dcc_program::program::ParamKind;

/// `keep · old + share · value` is the new value of a parameter, for the value of the output that this names.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistic {
    pub name: String,
    pub keep: f64,
    pub share: f64,
}

/// What a graph is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Training,
    Evaluation,
}

impl Statistic {
    /// The name of its output: `statistic[0.9,0.1]:NAME`, numbers in shortest round-trip form.
    pub fn text(&self) -> String {
        format!("statistic[{:?},{:?}]:{}", self.keep, self.share, self.name)
    }

    /// Reads what `text` gives.
    pub fn parse(text: &str) -> Option<Statistic> {
        let (numbers, name) = text.strip_prefix("statistic[")?.split_once("]:")?;
        let (keep, share) = numbers.split_once(',')?;
        Some(Statistic { name: name.to_owned(), keep: keep.parse().ok()?, share: share.parse().ok()? })
    }
}

/// A statistic, the parameter that keeps it, and the node that is averaged.
pub(super) type Found = (Statistic, Param, NodeId);

/// The graph of a use: what reads `training` is settled, statistics are taken off the outputs and given beside it.
pub(super) fn settle(graph: &Graph, of: Use) -> Result<(Graph, Vec<Found>)> {
    let mut settled = graph.map(|out, _, node, operands| {
        if let Op::Select(_) = node.op
            && reads_training(graph, node.operands[0])
        {
            return Ok(if of == Use::Training { operands[1] } else { operands[2] });
        }
        if let Op::Training(_) = node.op {
            return out.add(Const::int(DType::Bool, i64::from(of == Use::Training)), &[]);
        }
        Ok(out.add_typed(node.op.clone(), operands, node.ty.clone()))
    })?;
    let mut found = Vec::new();
    for (name, id) in std::mem::take(&mut settled.outputs) {
        match Statistic::parse(&name).and_then(|statistic| Some((param(graph, &statistic.name)?, statistic))) {
            Some((param, statistic)) => found.push((statistic, param, id)),
            None => settled.outputs.push((name, id)),
        }
    }
    Ok((settled, found))
}

fn reads_training(graph: &Graph, mut id: NodeId) -> bool {
    while let Op::BroadcastInDim(_) | Op::Reshape(_) = graph[id].op {
        id = graph[id].operands[0];
    }
    matches!(graph[id].op, Op::Training(_))
}

fn param(graph: &Graph, name: &str) -> Option<Param> {
    graph.nodes.iter().find_map(|node| match &node.op {
        Op::Param(param) if param.name == name && param.kind == ParamKind::Weight => Some(param.clone()),
        _ => None,
    })
}

/// Adds the new value of each. What is averaged is treated as the parameter's gradient is: summed over microbatches and ranks
/// where it is a sum over these, on the stage that computes it.
pub(super) fn update(graph: &mut Graph, statistics: &[Found]) -> Result<Vec<Update>> {
    let before = graph.cursor();
    let mut updates = Vec::with_capacity(statistics.len());
    for (Statistic { name, keep, share }, leaf, value) in statistics {
        graph.set_origin(&format!("running statistic: {name}"));
        let param = graph.add(leaf.clone(), &[])?;
        graph.set_phase(Phase::Backward);
        graph.set_grad_of(Some(GradOf::Value(*value)));
        let part = graph.scale(*value, *share)?;
        graph.set_grad_of(Some(GradOf::Value(param)));
        let part = graph.add(GradSum { of: param.0 }, &[part])?;
        graph.set_phase(Phase::Update);
        let kept = graph.scale(param, *keep)?;
        updates.push(Update { param, new: graph.binary(BinaryOp::Add, kept, part)? });
        graph.set_cursor(before);
    }
    Ok(updates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let statistic = Statistic { name: "bn.running_mean]:x".to_owned(), keep: 0.9, share: 1.0 - 0.9 };
        assert_eq!(Statistic::parse(&statistic.text()), Some(statistic));
        assert_eq!(Statistic::parse("statistic[0.9]:x"), None);
    }
}
