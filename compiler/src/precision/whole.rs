//! `--dtype f64`: every float of a graph becomes f64, constants as they are written, widened.

use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{Const, Input, Iota, Op, Param, Scalar, Uniform};
use dcc_program::DType;

/// The graph in f64. Integers and bools stay; casts between floats vanish; random numbers stay those of f32, widened.
pub fn widen(graph: &Graph) -> Result<Graph> {
    graph.map(|out, _, node, operands| {
        let op: Op = match node.op.clone() {
            Op::Input(op) => Input { dtype: wide(op.dtype), ..op }.into(),
            Op::Param(op) => Param { dtype: wide(op.dtype), ..op }.into(),
            Op::Const(op) => Const { dtype: wide(op.dtype), ..op }.into(),
            Op::Iota(op) => Iota { dtype: wide(op.dtype), ..op }.into(),
            Op::Scalar(op) => Scalar { dtype: wide(op.dtype), ..op }.into(),
            Op::Cast(op) => return out.cast(operands[0], wide(op.dtype)),
            Op::Uniform(op) => return uniform(out, op, operands),
            op => op,
        };
        out.add(op, operands)
    })
}

fn wide(dtype: DType) -> DType {
    if dtype.is_float() { DType::F64 } else { dtype }
}

fn uniform(out: &mut Graph, op: Uniform, operands: &[NodeId]) -> Result<NodeId> {
    let random = out.add(op, operands)?;
    out.cast(random, DType::F64)
}
