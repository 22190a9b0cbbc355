//! Builds the graph: what importers of ONNX operators speak.
//!
//! Every function computes right away where all operands are known and the result varies along at most one dim (shape
//! arithmetic, positions), and adds nodes otherwise: masks stay comparisons of positions whatever their size. Broadcasting is
//! NumPy's and made explicit.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::ParamKind;
use dcc_program::{DType, Reduce, Shape};

use super::known::Known;
use super::tensor::{Tensor, TensorData};
use super::value::{Value, broadcast_shape, not_a_tensor};
use super::{Dropout, Parameter};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Const, Cumsum, Iota, Param, StopGradient};

/// The graph under construction.
#[derive(Debug)]
pub struct Build {
    pub graph: Graph,
    pub parameters: Vec<Parameter>,
    pub warnings: Vec<String>,
    pub dropout: Dropout,
    /// Random ops so far; their ids must not depend on what follows.
    pub random_ops: u32,
}

impl Build {
    pub fn new(dropout: Dropout) -> Build {
        Build { graph: Graph::new(), parameters: Vec::new(), warnings: Vec::new(), dropout, random_ops: 0 }
    }

    /// Adds a tensor of the model as a parameter, trained or not.
    pub fn parameter(&mut self, parameter: Parameter) -> Result<NodeId> {
        let Tensor { name, dtype, shape, .. } = &parameter.tensor;
        let op = Param { name: name.clone(), kind: ParamKind::Weight, piece: None, dtype: *dtype, shape: shape.clone() };
        self.parameters.push(parameter);
        self.graph.add(op, &[])
    }

    /// The value as a node: constants become what they are made of, broadcasts of numbers and positions.
    pub fn node(&mut self, value: &Value) -> Result<NodeId> {
        match value {
            Value::Node(id) => Ok(*id),
            Value::Known(known) => self.constant(known),
            Value::List(_) => Err(not_a_tensor()),
        }
    }

    fn constant(&mut self, known: &Known) -> Result<NodeId> {
        if let Some(value) = known.uniform() {
            let exact = known.uniform_int().map(|value| Const::int(known.dtype, value));
            let scalar = self.graph.add(exact.unwrap_or(Const::float(known.dtype, value)), &[])?;
            return self.graph.broadcast(scalar, &known.shape, &[]);
        }
        if let Some(id) = self.ramp(known)? {
            return Ok(id);
        }
        self.dense(known)
    }

    /// `start + step * i` along the one dim that the tensor varies along.
    fn ramp(&mut self, known: &Known) -> Result<Option<NodeId>> {
        let varying = known.varying();
        let (Some(line), [dim]) = (known.line(), varying.as_slice()) else { return Ok(None) };
        if known.dtype == DType::Bool || line.len() < 2 {
            return Ok(None);
        }
        let (start, step) = (line[0], line[1] - line[0]);
        if line.iter().enumerate().any(|(i, &value)| value != start + step * i as f64) {
            return Ok(None);
        }
        let shape = Shape::from_slice(&[line.len() as u64]);
        let mut ramp = self.graph.add(Iota { dtype: known.dtype, shape, dim: 0 }, &[])?;
        for (op, number, neutral) in [(BinaryOp::Mul, step, 1.0), (BinaryOp::Add, start, 0.0)] {
            if number != neutral {
                ramp = self.graph.binary_scalar(op, ramp, number)?;
            }
        }
        Ok(Some(self.graph.broadcast(ramp, &known.shape, &[*dim])?))
    }

    /// A constant tensor without structure, held like a frozen parameter.
    fn dense(&mut self, known: &Known) -> Result<NodeId> {
        let dims = known.varying();
        let part: Shape = dims.iter().map(|&dim| known.shape[dim]).collect();
        let minimal = known.repeated_once(&part);
        let bytes = minimal.bytes().ok_or_else(|| Error::limit(format!("a constant of shape {:?}", part.as_slice())))?;
        let name = format!("constant.{}", self.parameters.len());
        let tensor = Tensor { name, dtype: known.dtype, shape: part, data: TensorData::Owned(bytes.into()) };
        let id = self.parameter(Parameter::frozen(tensor))?;
        self.graph.broadcast(id, &known.shape, &dims)
    }

    pub fn unary(&mut self, op: UnaryOp, x: &Value) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.unary(op)) {
            return Ok(known.into());
        }
        let x = self.node(x)?;
        Ok(self.graph.unary(op, x)?.into())
    }

    pub fn binary(&mut self, op: BinaryOp, a: &Value, b: &Value) -> Result<Value> {
        let shape = self.common_shape(a, b)?;
        if let Some((a, b)) = known_pair(a, b, &shape)
            && let Some(known) = a.binary(op, &b)
        {
            return Ok(known.into());
        }
        for (one, other) in [(a, b), (b, a)] {
            match (op, one.uniform()) {
                (BinaryOp::And, Some(1.0)) | (BinaryOp::Or, Some(0.0)) if one.dtype(self)? == DType::Bool => {
                    return self.broadcast(other, &shape);
                }
                _ => {}
            }
        }
        let (a, b) = (self.broadcast_node(a, &shape)?, self.broadcast_node(b, &shape)?);
        Ok(self.graph.binary(op, a, b)?.into())
    }

    /// `x op number`, the number in x's dtype.
    pub fn binary_scalar(&mut self, op: BinaryOp, x: &Value, number: f64) -> Result<Value> {
        let number = Known::scalar(x.dtype(self)?, number);
        self.binary(op, x, &number.into())
    }

    pub fn compare(&mut self, op: CompareOp, a: &Value, b: &Value) -> Result<Value> {
        let shape = self.common_shape(a, b)?;
        if let Some((a, b)) = known_pair(a, b, &shape)
            && let Some(known) = a.compare(op, &b)
        {
            return Ok(known.into());
        }
        let (a, b) = (self.broadcast_node(a, &shape)?, self.broadcast_node(b, &shape)?);
        Ok(self.graph.compare(op, a, b)?.into())
    }

    pub fn select(&mut self, condition: &Value, yes: &Value, no: &Value) -> Result<Value> {
        let shape = self.common_shape(yes, no)?;
        let shape = broadcast_shape(&condition.shape(self)?, &shape)?;
        if let Some(value) = condition.uniform() {
            return self.broadcast(if value != 0.0 { yes } else { no }, &shape);
        }
        if let (Some(c), Some(y), Some(n)) = (condition.known(), yes.known(), no.known()) {
            let (c, y, n) = (c.broadcast(&shape), y.broadcast(&shape), n.broadcast(&shape));
            let narrow = varying_union(&[&c, &y, &n]) <= 1;
            if let Some(known) = Some(c).filter(|_| narrow).and_then(|c| c.select(&y, &n)) {
                return Ok(known.into());
            }
        }
        let (yes, no) = (self.broadcast_node(yes, &shape)?, self.broadcast_node(no, &shape)?);
        let condition = self.broadcast_node(condition, &shape)?;
        Ok(self.graph.select(condition, yes, no)?.into())
    }

    pub fn cast(&mut self, x: &Value, dtype: DType) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.cast(dtype)) {
            return Ok(known.into());
        }
        let x = self.node(x)?;
        Ok(self.graph.cast(x, dtype)?.into())
    }

    pub fn stop_gradient(&mut self, x: &Value) -> Result<Value> {
        if x.known().is_some() {
            return Ok(x.clone());
        }
        let x = self.node(x)?;
        Ok(self.graph.add(StopGradient {}, &[x])?.into())
    }

    /// NumPy broadcasting to `shape`.
    pub fn broadcast(&mut self, x: &Value, shape: &[u64]) -> Result<Value> {
        let from = x.shape(self)?;
        if broadcast_shape(&from, shape)?.as_slice() != shape {
            return Err(Error::shape(format!("{:?} does not broadcast to {shape:?}", from.as_slice())));
        }
        match x {
            Value::Known(known) => Ok(known.broadcast(shape).into()),
            _ => Ok(self.broadcast_node(x, shape)?.into()),
        }
    }

    fn broadcast_node(&mut self, x: &Value, shape: &[u64]) -> Result<NodeId> {
        match x {
            Value::Known(known) => self.constant(&known.broadcast(shape)),
            _ => {
                let x = self.node(x)?;
                self.graph.broadcast_trailing(x, shape)
            }
        }
    }

    /// Reduces `dims`; with `keep` they stay with size 1.
    pub fn reduce(&mut self, op: Reduce, x: &Value, dims: &[usize], keep: bool) -> Result<Value> {
        let shape = x.shape(self)?;
        let kept: Shape = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]).collect();
        let wide: Shape = (0..shape.len()).map(|dim| if dims.contains(&dim) { 1 } else { shape[dim] }).collect();
        if let Some(known) = x.known().filter(|known| known.varying().len() <= 1).and_then(|known| known.reduce(op, dims)) {
            return self.reshape(&known.into(), if keep { &wide } else { &kept });
        }
        let x = self.node(x)?;
        let reduced = self.graph.reduce(op, x, dims)?.into();
        if keep { self.reshape(&reduced, &wide) } else { Ok(reduced) }
    }

    /// Sum over `dims` divided by their global number of elements.
    pub fn mean(&mut self, x: &Value, dims: &[usize], keep: bool) -> Result<Value> {
        let shape = x.shape(self)?;
        let count: u64 = dims.iter().map(|&dim| shape[dim]).product();
        let sum = self.reduce(Reduce::Sum, x, dims, keep)?;
        self.binary_scalar(BinaryOp::Mul, &sum, 1.0 / count as f64)
    }

    pub fn cumsum(&mut self, x: &Value, dim: usize, exclusive: bool, reverse: bool) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.cumsum(dim, exclusive, reverse)) {
            return Ok(known.into());
        }
        let x = self.node(x)?;
        Ok(self.graph.add(Cumsum { dim: dim as u8, exclusive, reverse }, &[x])?.into())
    }

    fn common_shape(&self, a: &Value, b: &Value) -> Result<Shape> {
        let (one, other) = (a.dtype(self)?, b.dtype(self)?);
        if one != other {
            return Err(Error::dtype(format!("operands of {} and {}", one.name(), other.name())));
        }
        broadcast_shape(&a.shape(self)?, &b.shape(self)?)
    }
}

/// Both broadcast to `shape`, where both are known and the result varies along at most one dim.
fn known_pair(a: &Value, b: &Value, shape: &[u64]) -> Option<(Known, Known)> {
    let (a, b) = (a.known()?.broadcast(shape), b.known()?.broadcast(shape));
    (varying_union(&[&a, &b]) <= 1).then_some((a, b))
}

fn varying_union(parts: &[&Known]) -> usize {
    let varies = |dim: usize| parts.iter().any(|part| part.varying().contains(&dim));
    (0..parts[0].rank()).filter(|&dim| varies(dim)).count()
}
