//! The forward graph of mixed precision: matrix products, convolutions and attention read and write half floats, all else is f32.
//!
//! Those are the operators that PyTorch's `torch.autocast` runs in half precision. What stands between them it computes in the dtype
//! of the operands, rounding after each operator; here it is f32 from the half floats that one contraction writes to those that the
//! next one reads, in one kernel where fusion has it so. Parameters stay f32: a contraction reads a cast of one, which depends on no
//! batch and so is made once a step. Sums, statistics, exponentials and losses are f32 by the same rule, and a value that is added to
//! f32 (a residual stream that begins with an embedding) stays f32. A bias belongs to its contraction, whose sums are rounded once, with it.
//!
//! A contraction stays f32 if it sums nothing (rotary positions times frequencies), adds up with equal weights (a pool by averages), or
//! if no parameter or no input has a part in it: what is made of parameters alone is made once a step.

use crate::error::Result;
use crate::graph::{Graph, NodeId, Operands};
use crate::ops::{Binary, Cast, Convolution, DotGeneral, Op};
use dcc_program::DType;
use dcc_program::kernel::BinaryOp;
use rustc_hash::{FxHashMap, FxHashSet};

/// `graph`, a forward graph, with its contractions in `half`. Inputs, parameters and outputs keep their dtypes.
pub fn narrow(graph: &Graph, half: DType) -> Result<Graph> {
    let mut pass = Pass { half, narrowed: FxHashMap::default(), trains: Vec::new(), reads: Vec::new() };
    let biased = biased(graph);
    let summed: FxHashSet<NodeId> = biased.values().copied().collect();
    let mut out = graph.map(|out, id, node, operands| {
        let was = |i: usize| graph.ty(node.operands[i]).dtype;
        let any = |of: &[bool]| operands.iter().any(|o| of[o.0 as usize]);
        let of_parameters = any(&pass.trains) || matches!(node.op, Op::Param(_));
        let of_inputs = any(&pass.reads) || matches!(node.op, Op::Input(_));
        let of_both = of_parameters && of_inputs;
        let new = match &node.op {
            op if node.ty.dtype == DType::F32 && of_both && sums(out, op, operands) && !averages(out, op, operands) => {
                let narrowed = pass.operands(out, op, operands)?;
                let op = if summed.contains(&id) { wide(op) } else { op.clone() };
                out.add(op, &narrowed)?
            }
            op if moves(op) && node.ty.dtype == DType::F32 && operands.iter().all(|&o| out.ty(o).dtype == half) => {
                out.add(op.clone(), operands)?
            }
            op => {
                let wide = operands.iter().enumerate().map(|(i, &o)| out.cast(o, was(i))).collect::<Result<Operands>>()?;
                let new = out.add(op.clone(), &wide)?;
                let with_bias = biased.contains_key(&id) && wide.iter().any(|&o| is_wide(&out[o].op));
                if with_bias { out.cast(new, half)? } else { new }
            }
        };
        pass.trains.resize(out.nodes.len(), of_parameters);
        pass.reads.resize(out.nodes.len(), of_inputs);
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
    narrowed: FxHashMap<NodeId, NodeId>,
    /// By new node: whether a parameter has a part in it.
    trains: Vec<bool>,
    /// Whether an input has.
    reads: Vec<bool>,
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
        let mut open = vec![(id, false)];
        while let Some((id, is_open)) = open.pop() {
            if self.narrowed.contains_key(&id) {
                continue;
            }
            let node = out[id].clone();
            let narrowed = match &node.op {
                _ if node.ty.dtype == self.half => id,
                Op::Cast(_) if out.ty(node.operands[0]).dtype == self.half => node.operands[0],
                op if moves(op) && !is_open => {
                    open.push((id, true));
                    open.extend(node.operands.iter().rev().map(|&operand| (operand, false)));
                    continue;
                }
                op if moves(op) => {
                    let operands: Operands = node.operands.iter().map(|operand| self.narrowed[operand]).collect();
                    out.add(op.clone(), &operands)?
                }
                _ => out.add(Cast { dtype: self.half }, &[id])?,
            };
            self.narrowed.insert(id, narrowed);
        }
        Ok(self.narrowed[&id])
    }
}

/// By sum: the contraction that it adds a bias to, which nothing else reads. Where something else is added too, that sum is f32 anyway.
fn biased(graph: &Graph) -> FxHashMap<NodeId, NodeId> {
    let mut readers = vec![Vec::new(); graph.nodes.len()];
    let mut of_data = vec![false; graph.nodes.len()];
    for id in graph.ids() {
        let node = &graph[id];
        of_data[id.0 as usize] = matches!(node.op, Op::Input(_)) || node.operands.iter().any(|o| of_data[o.0 as usize]);
        node.operands.iter().for_each(|o| readers[o.0 as usize].push(id));
    }
    let is_sum = |id: NodeId| matches!(graph[id].op, Op::Binary(Binary { op: BinaryOp::Add }));
    let is_output = |id: NodeId| graph.outputs.iter().any(|(_, output)| *output == id);
    let contraction = |sum: NodeId| {
        let [a, b] = graph[sum].operands[..] else { return None };
        let is_bias = |of: NodeId, id: NodeId| {
            matches!(graph[of].op, Op::DotGeneral(_) | Op::Convolution(_))
                && readers[of.0 as usize].len() == 1
                && !is_output(of)
                && !of_data[id.0 as usize]
        };
        [(a, b), (b, a)].into_iter().find(|&(of, id)| is_bias(of, id)).map(|(of, _)| (sum, of))
    };
    let alone = |&sum: &NodeId| is_sum(sum) && !readers[sum.0 as usize].iter().any(|&reader| is_sum(reader));
    graph.ids().filter(alone).filter_map(contraction).collect()
}

fn is_wide(op: &Op) -> bool {
    matches!(op, Op::DotGeneral(DotGeneral { wide: true, .. }) | Op::Convolution(Convolution { wide: true, .. }))
}

/// The contraction with its sums as its result.
fn wide(op: &Op) -> Op {
    match op.clone() {
        Op::DotGeneral(op) => DotGeneral { wide: true, ..op }.into(),
        Op::Convolution(op) => Convolution { wide: true, ..op }.into(),
        other => other,
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

/// Whether a constant, the same everywhere, is all that the op contracts with.
fn averages(out: &Graph, op: &Op, operands: &[NodeId]) -> bool {
    let uniform = |mut id: NodeId| {
        while let Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Cast(_) = out[id].op {
            id = out[id].operands[0];
        }
        matches!(out[id].op, Op::Const(_))
    };
    matches!(op, Op::Convolution(_) | Op::DotGeneral(_)) && operands.iter().any(|&id| uniform(id))
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
