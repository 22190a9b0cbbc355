//! What ranks write in a step, put together to whole tensors.

use crate::graph::NodeId;
use crate::lower::Traced;
use dcc_program::program::BufferId;
use dcc_program::simulate::Written;
use dcc_program::{AxisId, Mesh, Reduce};
use std::collections::BTreeMap;

/// Whole tensors by node, and by where the ranks stand on the axes that the tensor neither is sharded over nor pending.
pub(super) struct Observed {
    mesh: Mesh,
    /// By stage and buffer.
    nodes: Vec<Vec<Option<NodeId>>>,
    wholes: BTreeMap<NodeId, BTreeMap<Vec<u32>, Whole>>,
}

/// A tensor of which ranks have blocks or summands.
struct Whole {
    /// A rank that has a part of it.
    rank: u32,
    elements: usize,
    reduce: Option<Reduce>,
    /// By where a rank stands, the microbatch with it: the elements that it has and what it left in them last, of a sum in place all terms.
    parts: BTreeMap<Vec<u32>, Vec<(usize, f64)>>,
}

impl Whole {
    fn values(&self) -> Vec<f64> {
        let mut values = vec![None; self.elements];
        for &(element, value) in self.parts.values().flatten() {
            let slot = &mut values[element];
            *slot = Some(match (*slot, self.reduce) {
                (Some(there), Some(reduce)) => combined(reduce, there, value),
                _ => value,
            });
        }
        values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect()
    }
}

impl Observed {
    pub fn new(programs: &[Traced]) -> Observed {
        let nodes = programs.iter().map(|traced| traced.nodes.clone()).collect();
        Observed { mesh: programs[0].program.mesh.clone(), nodes, wholes: BTreeMap::new() }
    }

    /// The node whose value a buffer of a stage takes.
    fn node(&self, stage: usize, buffer: BufferId) -> Option<NodeId> {
        self.nodes[stage].get(buffer.0 as usize).copied().flatten()
    }

    pub fn add(&mut self, written: &Written) {
        let Some(node) = self.node(written.stage, written.buffer) else { return };
        let ty = written.ty;
        let apart = |axis: &AxisId| !ty.sharding.dims.iter().flatten().any(|a| a == axis) && !ty.sharding.is_pending(*axis);
        let axes = || (0..self.mesh.axes.len()).map(|axis| AxisId(axis as u8));
        let key: Vec<u32> = axes().filter(apart).map(|axis| written.at.get(axis)).collect();
        let at = axes().map(|axis| written.at.get(axis)).collect();
        let reduce = ty.sharding.pending.first().map(|&(_, reduce)| reduce);
        let whole = || Whole { rank: written.rank, elements: ty.elements() as usize, reduce, parts: BTreeMap::new() };
        let whole = self.wholes.entry(node).or_default().entry(key).or_insert_with(whole);
        let part: &mut Vec<(usize, f64)> = whole.parts.entry(at).or_default();
        part.clear();
        written.each(|element, value| part.push((element, value)));
    }

    /// All nodes that were seen, in the order of the graph.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.wholes.keys().copied().collect()
    }

    /// The tensors that ranks have of a node, and the first rank that has a part of each. What nobody wrote is no number.
    pub fn of(&self, node: NodeId) -> impl Iterator<Item = (u32, Vec<f64>)> + '_ {
        let values = |whole: &Whole| (whole.rank, whole.values());
        self.wholes.get(&node).into_iter().flat_map(|wholes| wholes.values()).map(values)
    }
}

fn combined(reduce: Reduce, a: f64, b: f64) -> f64 {
    match reduce {
        Reduce::Sum => a + b,
        Reduce::Max => a.max(b),
        Reduce::Min => a.min(b),
        Reduce::Prod => a * b,
    }
}
