//! `--dtype f32` and `f64`: every float of a graph becomes that, constants as they are written.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{Const, Input, Iota, Op, Param, Scalar, Uniform};
use dcc_program::DType;

/// The graph with every float a `to`. Integers and bools stay; casts between floats vanish; random numbers stay those of f32.
pub fn retype(graph: &Graph, to: DType) -> Result<Graph> {
    let float = |dtype: DType| if dtype.is_float() { to } else { dtype };
    graph.map(|out, _, node, operands| {
        let op: Op = match node.op.clone() {
            Op::Input(op) => Input { dtype: float(op.dtype), ..op }.into(),
            Op::Param(op) => Param { dtype: float(op.dtype), ..op }.into(),
            Op::Const(op) => Const { dtype: float(op.dtype), ..op }.into(),
            Op::Iota(op) => Iota { dtype: float(op.dtype), ..op }.into(),
            Op::Scalar(op) => Scalar { dtype: float(op.dtype), ..op }.into(),
            Op::Cast(op) => return out.cast(operands[0], float(op.dtype)),
            Op::Uniform(op) => return uniform(out, op, operands, to),
            op => op,
        };
        out.add(op, operands)
    })
}

fn uniform(out: &mut Graph, op: Uniform, operands: &[NodeId], to: DType) -> Result<NodeId> {
    let random = out.add(op, operands)?;
    out.cast(random, to)
}
