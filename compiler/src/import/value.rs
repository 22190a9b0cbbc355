//! What an ONNX value is while importing: known, a node of the graph, or a list of those.

use dcc_program::{DType, Shape};

use super::build::Build;
use super::known::Known;
use crate::error::{Error, Result};
use crate::graph::NodeId;

/// The meaning of one ONNX value.
#[derive(Clone, Debug)]
pub enum Value {
    /// No parameter and no input reaches it.
    Known(Known),
    Node(NodeId),
    /// An ONNX sequence of static length.
    List(Vec<Value>),
}

impl From<NodeId> for Value {
    fn from(id: NodeId) -> Value {
        Value::Node(id)
    }
}

impl From<Known> for Value {
    fn from(known: Known) -> Value {
        Value::Known(known)
    }
}

impl Value {
    pub fn known(&self) -> Option<&Known> {
        match self {
            Value::Known(known) => Some(known),
            _ => None,
        }
    }

    /// Whether both are the same value, without looking at what nodes compute.
    pub fn is(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Node(one), Value::Node(other)) => one == other,
            (Value::Known(one), Value::Known(other)) => one == other,
            _ => false,
        }
    }

    /// The one number that all elements are known to be.
    pub fn uniform(&self) -> Option<f64> {
        self.known()?.uniform()
    }

    pub fn shape(&self, build: &Build) -> Result<Shape> {
        match self {
            Value::Known(known) => Ok(known.shape.clone()),
            Value::Node(id) => Ok(build.graph.ty(*id).shape.clone()),
            Value::List(_) => Err(not_a_tensor()),
        }
    }

    pub fn dtype(&self, build: &Build) -> Result<DType> {
        match self {
            Value::Known(known) => Ok(known.dtype),
            Value::Node(id) => Ok(build.graph.ty(*id).dtype),
            Value::List(_) => Err(not_a_tensor()),
        }
    }

    pub fn rank(&self, build: &Build) -> Result<usize> {
        Ok(self.shape(build)?.len())
    }
}

pub(super) fn not_a_tensor() -> Error {
    Error::graph("a sequence where a tensor is expected")
}

/// The shape that NumPy broadcasting gives to both. Errors: DCC0104.
pub fn broadcast_shape(a: &[u64], b: &[u64]) -> Result<Shape> {
    let rank = a.len().max(b.len());
    let size = |shape: &[u64], dim: usize| (dim + shape.len()).checked_sub(rank).map_or(1, |dim| shape[dim]);
    (0..rank)
        .map(|dim| match (size(a, dim), size(b, dim)) {
            (1, other) | (other, 1) => Ok(other),
            (one, other) if one == other => Ok(one),
            _ => Err(Error::shape(format!("{a:?} and {b:?} do not broadcast"))),
        })
        .collect()
}

/// An axis counted from the front, of a tensor of `rank` dims.
pub fn axis(axis: i64, rank: usize) -> Result<usize> {
    let from_front = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    let fits = usize::try_from(from_front).ok().filter(|&axis| axis < rank);
    fits.ok_or_else(|| Error::shape(format!("axis {axis} of a tensor of rank {rank}")))
}
