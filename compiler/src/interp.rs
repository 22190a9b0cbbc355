//! Reference evaluation of a graph on one device: what a graph means, and the oracle of all tests.
//!
//! Types' shardings play no part: in a placed graph every value is its global value, and communication changes nothing.

mod tensor;

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Op, Param};
use dcc_program::program::{ParamKind, ScalarKind};
use dcc_program::{DType, TensorType};
use std::collections::BTreeMap;

pub use tensor::{Data, Precision, Tensor};
pub(crate) use tensor::{offsets, strides, wrap};

/// What a graph is evaluated on.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    pub inputs: BTreeMap<String, Tensor>,
    /// Whole tensors, of which pieces are cut; a missing state is zero.
    pub params: BTreeMap<(String, ParamKind), Tensor>,
    pub learning_rate: f64,
    pub step: i64,
    pub seed: i64,
}

impl Bindings {
    pub fn input(mut self, name: &str, value: Tensor) -> Bindings {
        self.inputs.insert(name.to_owned(), value);
        self
    }

    pub fn weight(mut self, name: &str, value: Tensor) -> Bindings {
        self.params.insert((name.to_owned(), ParamKind::Weight), value);
        self
    }
}

/// The graph's outputs by name.
///
/// Errors: an input or weight that is not bound, or not to its shape.
pub fn outputs(graph: &Graph, bindings: &Bindings, precision: Precision) -> Result<Vec<(String, Tensor)>> {
    let wanted: Vec<NodeId> = graph.outputs.iter().map(|&(_, id)| id).collect();
    let values = evaluate(graph, &wanted, bindings, precision)?;
    Ok(graph.outputs.iter().map(|(name, _)| name.clone()).zip(values).collect())
}

/// The values of the nodes `wanted`. Errors as [`outputs`].
pub fn evaluate(graph: &Graph, wanted: &[NodeId], bindings: &Bindings, precision: Precision) -> Result<Vec<Tensor>> {
    let mut readers = vec![0u32; graph.nodes.len()];
    for id in wanted {
        readers[id.0 as usize] += 1;
    }
    for id in graph.ids().rev() {
        if readers[id.0 as usize] > 0 {
            graph[id].operands.iter().for_each(|o| readers[o.0 as usize] += 1);
        }
    }
    let mut values: Vec<Option<Tensor>> = vec![None; graph.nodes.len()];
    for id in graph.ids().filter(|id| readers[id.0 as usize] > 0).collect::<Vec<_>>() {
        let node = &graph[id];
        let value = match bound(&node.op, &node.ty, bindings).map_err(|e| e.at(graph.origin(id)))? {
            Some(value) => value,
            None => {
                let operand = |o: &NodeId| values[o.0 as usize].as_ref().expect("kept until its last reader");
                let operands: Vec<&Tensor> = node.operands.iter().map(operand).collect();
                node.op.eval(&operands, &node.ty)
            }
        };
        if value.dtype != node.ty.dtype || value.shape != node.ty.shape {
            return Err(graph.broken(id, "the value is not of the node's type"));
        }
        values[id.0 as usize] = Some(value.rounded(precision));
        for &operand in &node.operands {
            let left = &mut readers[operand.0 as usize];
            *left -= 1;
            if *left == 0 {
                values[operand.0 as usize] = None;
            }
        }
    }
    Ok(wanted.iter().map(|id| values[id.0 as usize].clone().expect("wanted nodes count as read")).collect())
}

/// The value that a leaf is bound to; `None` for computed nodes.
fn bound(op: &Op, ty: &TensorType, bindings: &Bindings) -> Result<Option<Tensor>> {
    let value = match op {
        Op::Input(input) => match bindings.inputs.get(&input.name) {
            Some(value) => value.clone(),
            None => return Err(Error::tensor(format!("input `{}` has no value", input.name))),
        },
        Op::Param(param) => match bindings.params.get(&(param.name.clone(), param.kind.clone())) {
            Some(value) => piece(param, value)?,
            None if param.kind != ParamKind::Weight => Tensor::zeros(ty),
            None => return Err(Error::tensor(format!("parameter `{}` has no value", param.name))),
        },
        Op::Scalar(scalar) => match scalar.kind {
            ScalarKind::LearningRate => Tensor::filled(ty, bindings.learning_rate),
            ScalarKind::Step => Tensor::ints(DType::I64, &[], vec![bindings.step]),
            ScalarKind::Seed => Tensor::ints(DType::I64, &[], vec![bindings.seed]),
        },
        _ => return Ok(None),
    };
    if value.shape != ty.shape || value.dtype.is_float() != ty.dtype.is_float() {
        let what = format!("a value of {}{:?} for {}{:?}", value.dtype.name(), value.shape, ty.dtype.name(), ty.shape);
        return Err(Error::tensor(what));
    }
    Ok(Some(Tensor { dtype: ty.dtype, ..value }))
}

/// The part of the whole tensor that the parameter is.
fn piece(param: &Param, whole: &Tensor) -> Result<Tensor> {
    let Some(piece) = param.piece else { return Ok(whole.clone()) };
    let dim = usize::from(piece.dim);
    if whole.shape.get(dim).is_none_or(|&size| size < piece.end) {
        return Err(Error::tensor(format!("`{}` of {:?} has no piece {piece:?}", param.name, whole.shape)));
    }
    let mut ty = whole.ty();
    ty.shape[dim] = piece.end - piece.start;
    let strides: Vec<isize> = whole.strides().iter().map(|&s| s as isize).collect();
    Ok(whole.read(&ty, piece.start as usize * strides[dim] as usize, &strides))
}
