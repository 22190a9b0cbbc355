//! Pointwise ops at the smallest shape: an operand is seen as a smaller value repeated along some dims.
//!
//! A dim that all operands repeat (or have at size 1 because a reshape put it there) is left out, and the result repeated
//! instead. So a mask is computed once for all samples and heads, and the mean of a row without a dim of size 1 behind it.

use dcc_program::Shape;

use super::build::Build;
use super::value::Value;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;

/// Dim i of `id` is dim `dims[i]` (ascending) of the value; along its other dims the value repeats.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub id: NodeId,
    pub dims: Vec<usize>,
}

impl View {
    /// What is under broadcasts and reshapes that only insert dims of size 1.
    pub fn of(graph: &Graph, id: NodeId) -> View {
        let mut view = View { id, dims: (0..graph.ty(id).rank()).collect() };
        loop {
            let node = &graph[view.id];
            let kept: Vec<usize> = match &node.op {
                Op::BroadcastInDim(op) => op.dims.iter().map(|&dim| usize::from(dim)).collect(),
                Op::Reshape(op) => match inserted(&graph.ty(node.operands[0]).shape, &op.shape) {
                    Some(kept) => kept,
                    None => return view,
                },
                _ => return view,
            };
            view = View { id: node.operands[0], dims: kept.iter().map(|&dim| view.dims[dim]).collect() };
        }
    }

    /// With the dims of a value of higher rank, whose last dims these are.
    fn shifted(self, by: usize) -> View {
        View { id: self.id, dims: self.dims.iter().map(|dim| dim + by).collect() }
    }
}

/// Where `to` is `from` with dims of size 1 inserted: the dims of `to` that are those of `from`.
fn inserted(from: &[u64], to: &[u64]) -> Option<Vec<usize>> {
    let mut kept = Vec::with_capacity(from.len());
    for (dim, &size) in to.iter().enumerate() {
        if from.get(kept.len()) == Some(&size) {
            kept.push(dim);
        } else if size != 1 {
            return None;
        }
    }
    (kept.len() == from.len()).then_some(kept)
}

impl Build {
    /// `apply` on the operands, all broadcast to `shape` but for dims that none of them needs.
    pub(super) fn pointwise(
        &mut self,
        operands: &[&Value],
        shape: &[u64],
        apply: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<Value> {
        let views = operands.iter().map(|operand| self.operand(operand, shape)).collect::<Result<Vec<View>>>()?;
        let dims: Vec<usize> = (0..shape.len()).filter(|dim| views.iter().any(|view| view.dims.contains(dim))).collect();
        let small: Shape = dims.iter().map(|&dim| shape[dim]).collect();
        let mut ids = Vec::with_capacity(views.len());
        for view in views {
            let places: Vec<usize> = view.dims.iter().filter_map(|dim| dims.iter().position(|d| d == dim)).collect();
            ids.push(self.graph.broadcast(view.id, &small, &places)?);
        }
        let id = apply(&mut self.graph, &ids)?;
        Ok(self.expand(&View { id, dims }, shape)?.into())
    }

    /// The operand of a pointwise op of `shape`, without the dims along which it repeats.
    fn operand(&mut self, operand: &Value, shape: &[u64]) -> Result<View> {
        let id = match operand {
            Value::Known(known) => return self.constant(&known.broadcast(shape)),
            _ => self.node(operand)?,
        };
        let rank = self.graph.ty(id).rank();
        let view = View::of(&self.graph, id).shifted(shape.len() - rank);
        let sizes = self.graph.ty(view.id).shape.clone();
        let fits = |at: usize| sizes[at] == shape[view.dims[at]];
        let dims: Vec<usize> = (0..sizes.len()).filter(|&at| fits(at)).map(|at| view.dims[at]).collect();
        let kept: Vec<u64> = (0..sizes.len()).filter(|&at| fits(at)).map(|at| sizes[at]).collect();
        let id = self.reshape_node(view.id, &kept)?;
        Ok(View { id, dims })
    }

    /// The value of `shape` that the view is of.
    pub(super) fn expand(&mut self, view: &View, shape: &[u64]) -> Result<NodeId> {
        let repeated = (0..shape.len()).any(|dim| shape[dim] != 1 && !view.dims.contains(&dim));
        match repeated {
            true => self.graph.broadcast(view.id, shape, &view.dims),
            false => self.reshape_node(view.id, shape),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::inserted;

    #[test]
    fn inserted_dims_are_found() {
        assert_eq!(inserted(&[8, 16], &[8, 16, 1]), Some(vec![0, 1]));
        assert_eq!(inserted(&[16], &[1, 1, 16, 1]), Some(vec![2]));
        assert_eq!(inserted(&[], &[1, 1]), Some(vec![]));
        assert_eq!(inserted(&[8, 16], &[128]), None);
        assert_eq!(inserted(&[1, 8], &[8]), None);
    }
}
