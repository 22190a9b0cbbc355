//! The forward graph of mixed precision: matrix products, convolutions and attention read and write half floats, all else is f32.
//!
//! Those are the operators that PyTorch's `torch.autocast` runs in half precision. What stands between them it computes in the dtype
//! of the operands, rounding after each operator; here it is f32 from the half floats that one contraction writes to those that the
//! next one reads, in one kernel where fusion has it so. Parameters stay f32: a contraction reads a cast of one, which depends on no
//! batch and so is made once a step. Sums, statistics, exponentials and losses are f32 by the same rule, and a value that is added to
//! f32 (a residual stream that begins with an embedding) stays f32.
//!
//! A contraction stays f32 if it sums nothing (rotary positions times frequencies) or no parameter has a part in it.

use crate::error::Result;
use crate::graph::{Graph, NodeId, Operands};
use crate::ops::{Cast, Op};
use dcc_program::DType;
use std::collections::HashMap;

/// `graph`, a forward graph, with its contractions in `half`. Inputs, parameters and outputs keep their dtypes.
pub fn narrow(graph: &Graph, half: DType) -> Result<Graph> {
    let mut pass = Pass { half, narrowed: HashMap::new(), trains: Vec::new() };
    let mut out = graph.map(|out, _, node, operands| {
        let was = |i: usize| graph.ty(node.operands[i]).dtype;
        let of_parameters = operands.iter().any(|o| pass.trains[o.0 as usize]) || matches!(node.op, Op::Param(_));
        let new = match &node.op {
            op if node.ty.dtype == DType::F32 && of_parameters && sums(out, op, operands) => {
                let narrowed = pass.operands(out, op, operands)?;
                out.add(op.clone(), &narrowed)?
            }
            op if moves(op) && node.ty.dtype == DType::F32 && operands.iter().all(|&o| out.ty(o).dtype == half) => {
                out.add(op.clone(), operands)?
            }
            op => {
                let wide = operands.iter().enumerate().map(|(i, &o)| out.cast(o, was(i))).collect::<Result<Operands>>()?;
                out.add(op.clone(), &wide)?
            }
        };
        pass.trains.resize(out.nodes.len(), of_parameters);
        Ok(new)
    })?;
    for at in 0..out.outputs.len() {
        let (name, id) = out.outputs[at].clone();
        if graph.output(&name).is_some_and(|old| graph.ty(old).dtype == DType::F32) {
            out.set_origin(&format!("output {name}"));
            out.outputs[at].1 = out.cast(id, DType::F32)?;
        }
    }
    out.set_cursor(Default::default());
    Ok(out)
}

struct Pass {
    half: DType,
    /// By f32 node: the same in half floats.
    narrowed: HashMap<NodeId, NodeId>,
    /// By new node: whether a parameter has a part in it.
    trains: Vec<bool>,
}

impl Pass {
    /// A contraction's operands; attention's mask is added to scores, which are f32.
    fn operands(&mut self, out: &mut Graph, op: &Op, operands: &[NodeId]) -> Result<Operands> {
        let count = if matches!(op, Op::Attention(_)) { 3 } else { operands.len() };
        let narrow = operands[..count].iter().map(|&o| self.narrow(out, o)).collect::<Result<Operands>>()?;
        let rest = operands[count..].iter().map(|&o| widened(out, o, self.half)).collect::<Result<Operands>>()?;
        Ok(narrow.into_iter().chain(rest).collect())
    }

    /// `id` in half floats. What only moves elements moves fewer bytes after the cast.
    fn narrow(&mut self, out: &mut Graph, id: NodeId) -> Result<NodeId> {
        if let Some(&found) = self.narrowed.get(&id) {
            return Ok(found);
        }
        let node = out[id].clone();
        let narrowed = match &node.op {
            _ if node.ty.dtype == self.half => id,
            Op::Cast(_) if out.ty(node.operands[0]).dtype == self.half => node.operands[0],
            op if moves(op) => {
                let operands = node.operands.iter().map(|&o| self.narrow(out, o)).collect::<Result<Operands>>()?;
                out.add(op.clone(), &operands)?
            }
            _ => out.add(Cast { dtype: self.half }, &[id])?,
        };
        self.narrowed.insert(id, narrowed);
        Ok(narrowed)
    }
}

/// A mask in f32, if it is of ours in half floats.
fn widened(out: &mut Graph, id: NodeId, half: DType) -> Result<NodeId> {
    if out.ty(id).dtype == half { out.cast(id, DType::F32) } else { Ok(id) }
}

/// Whether the op is a contraction that sums over something.
fn sums(out: &Graph, op: &Op, operands: &[NodeId]) -> bool {
    match op {
        Op::Convolution(_) => true,
        Op::Attention(op) => op.out == 0,
        Op::DotGeneral(op) => {
            let contracted = |f: &dcc_program::FactorId| !op.spec.in_result(*f);
            let size = |f| {
                let dims = op.spec.operands[0].iter().zip(&out.ty(operands[0]).shape);
                dims.filter(|(dim, _)| dim.contains(&f)).map(|(_, &size)| size).product::<u64>()
            };
            op.spec.ids().filter(contracted).map(size).product::<u64>() > 1
        }
        _ => false,
    }
}

/// Whether the op only moves elements: its result has the operands' dtype, element by element or zero.
pub(super) fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Transpose(_)
            | Op::Reshape(_)
            | Op::Slice(_)
            | Op::Pad(_)
            | Op::Reverse(_)
            | Op::Concatenate(_)
            | Op::BroadcastInDim(_)
    )
}
