//! Builds the graph: what importers of ONNX operators speak.
//!
//! Every function computes right away where all operands are known and the result varies along at most one dim (shape
//! arithmetic, positions), and adds nodes otherwise: masks stay comparisons of positions whatever their size. Broadcasting is
//! NumPy's and made explicit.

use std::collections::{BTreeMap, BTreeSet};

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::program::ParamKind;
use dcc_program::{DType, Reduce, Shape};

use super::known::Known;
use super::ops::Quantised;
use super::rescale::{Indexed, Rescale};
use super::tensor::{Tensor, TensorData};
use super::value::{Value, broadcast_shape, not_a_tensor};
use super::view::View;
use super::{BatchNorm, Dropout, Parameter};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Const, Cumsum, Iota, Op, Param, StopGradient, TopK};
use crate::train::Statistic;

/// What the names of constants begin with that the import computed; their number follows.
const CONSTANT: &str = "constant.";

/// Whether a tensor of a program may be none of the model's, but a constant that the import computed.
pub fn is_computed(name: &str) -> bool {
    name.strip_prefix(CONSTANT).is_some_and(|number| number.parse::<usize>().is_ok())
}

/// The graph under construction.
#[derive(Debug)]
pub struct Build {
    pub graph: Graph,
    pub parameters: Vec<Parameter>,
    pub warnings: Vec<String>,
    pub dropout: Dropout,
    /// A node has asked for it.
    pub has_dropout: bool,
    pub batch_norm: BatchNorm,
    /// The file says of some that they train: the others, in evaluation mode when the model was exported, do not.
    pub batch_norms_train: bool,
    /// Running averages, and what they are of.
    pub statistics: Vec<(Statistic, NodeId)>,
    /// Integers of the graph that floats were quantised to.
    pub quantised: BTreeMap<NodeId, Quantised>,
    /// By `Concatenate` what it joins: constants are still known there.
    pub joined: BTreeMap<NodeId, Vec<Value>>,
    /// Random ops so far; their ids must not depend on what follows.
    pub random_ops: u32,
    /// Set while a node of a static export is imported for another batch.
    pub rescale: Option<Rescale>,
    /// Where guesses index values, while they are proven.
    pub indexed: Vec<Indexed>,
}

impl Build {
    pub fn new(dropout: Dropout) -> Build {
        Build {
            graph: Graph::new(),
            parameters: Vec::new(),
            warnings: Vec::new(),
            dropout,
            has_dropout: false,
            batch_norm: BatchNorm::default(),
            batch_norms_train: false,
            statistics: Vec::new(),
            quantised: BTreeMap::new(),
            joined: BTreeMap::new(),
            random_ops: 0,
            rescale: None,
            indexed: Vec::new(),
        }
    }

    /// Adds a tensor of the model as a parameter, trained or not.
    pub fn parameter(&mut self, parameter: Parameter) -> Result<NodeId> {
        let Tensor { name, dtype, shape, .. } = &parameter.tensor;
        let op = Param { name: name.clone(), kind: ParamKind::Weight, piece: None, dtype: *dtype, shape: shape.clone() };
        self.parameters.push(parameter);
        self.graph.add(op, &[])
    }

    /// Name and file of a tensor of the model whose data are not in the model file.
    pub fn absent(&self, value: &Value) -> Option<(&str, &str)> {
        let Value::Node(id) = value else { return None };
        let Op::Param(param) = &self.graph[*id].op else { return None };
        let parameter = self.parameters.iter().find(|parameter| parameter.tensor.name == param.name)?;
        match &parameter.tensor.data {
            TensorData::External { location, .. } => Some((&parameter.tensor.name, location)),
            _ => None,
        }
    }

    /// Whether a value is computed of an input.
    pub fn has_samples(&self, value: &Value) -> bool {
        let Value::Node(id) = value else { return false };
        let (mut open, mut seen) = (vec![*id], BTreeSet::new());
        while let Some(id) = open.pop() {
            if matches!(self.graph[id].op, Op::Input(_)) {
                return true;
            }
            open.extend(self.graph[id].operands.iter().filter(|&&operand| seen.insert(operand)));
        }
        false
    }

    /// The value as a node: constants become what they are made of, broadcasts of numbers and positions.
    pub fn node(&mut self, value: &Value) -> Result<NodeId> {
        match value {
            Value::Node(id) => Ok(*id),
            Value::Known(known) => {
                let view = self.constant(known)?;
                self.expand(&view, &known.shape)
            }
            Value::List(_) => Err(not_a_tensor()),
        }
    }

    /// What a constant is made of, without the dims along which it repeats.
    pub(super) fn constant(&mut self, known: &Known) -> Result<View> {
        if let Some(value) = known.uniform() {
            let exact = known.uniform_int().map(|value| Const::int(known.dtype, value));
            let id = self.graph.add(exact.unwrap_or(Const::float(known.dtype, value)), &[])?;
            return Ok(View { id, dims: Vec::new() });
        }
        let dims = known.varying();
        let id = match self.ramp(known, &dims)? {
            Some(id) => id,
            None => self.dense(known, &dims)?,
        };
        Ok(View { id, dims })
    }

    /// `start + Σ step * i` over the dims that the tensor varies along.
    fn ramp(&mut self, known: &Known, dims: &[usize]) -> Result<Option<NodeId>> {
        let Some((start, steps)) = known.affine() else { return Ok(None) };
        let shape: Shape = dims.iter().map(|&dim| known.shape[dim]).collect();
        let mut sum: Option<NodeId> = None;
        for (position, &step) in steps.iter().enumerate() {
            let line = Shape::from_slice(&[shape[position]]);
            let mut ramp = self.graph.add(Iota { dtype: known.dtype, shape: line, dim: 0 }, &[])?;
            if step != 1.0 {
                ramp = self.graph.binary_scalar(BinaryOp::Mul, ramp, step)?;
            }
            let ramp = self.graph.broadcast(ramp, &shape, &[position])?;
            sum = Some(match sum {
                Some(sum) => self.graph.binary(BinaryOp::Add, sum, ramp)?,
                None => ramp,
            });
        }
        match sum {
            Some(sum) if start != 0.0 => Ok(Some(self.graph.binary_scalar(BinaryOp::Add, sum, start)?)),
            sum => Ok(sum),
        }
    }

    /// A constant tensor without structure, held like a frozen parameter.
    fn dense(&mut self, known: &Known, dims: &[usize]) -> Result<NodeId> {
        let part: Shape = dims.iter().map(|&dim| known.shape[dim]).collect();
        let minimal = known.repeated_once(&part);
        let bytes = minimal.bytes().ok_or_else(|| Error::limit(format!("a constant of shape {:?}", part.as_slice())))?;
        let name = format!("{CONSTANT}{}", self.parameters.len());
        // In f64 where single precision would lose something: a run rounds it to its own precision.
        let wide = known.dtype == DType::F32 && minimal.numbers().any(|number| f64::from(number as f32) != number);
        let stored = if wide { DType::F64 } else { known.dtype };
        let bytes = match wide {
            true => minimal.numbers().flat_map(f64::to_le_bytes).collect(),
            false => bytes,
        };
        let tensor = Tensor { name: name.clone(), dtype: stored, shape: part.clone(), data: TensorData::Owned(bytes.into()) };
        self.parameters.push(Parameter::frozen(tensor));
        self.graph.add(Param { name, kind: ParamKind::Weight, piece: None, dtype: known.dtype, shape: part }, &[])
    }

    pub fn unary(&mut self, op: UnaryOp, x: &Value) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.unary(op)) {
            return Ok(known.into());
        }
        self.pointwise(&[x], &x.shape(self)?, |graph, ids| graph.unary(op, ids[0]))
    }

    pub fn binary(&mut self, op: BinaryOp, a: &Value, b: &Value) -> Result<Value> {
        let shape = self.common_shape(a, b)?;
        if let (Some(one), Some(other)) = (a.known(), b.known()) {
            let (one, other) = (one.broadcast(&shape), other.broadcast(&shape));
            let narrow = varying_union(&[&one, &other]) <= 1;
            let linear = matches!(op, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul) && !one.dtype.is_float();
            let known = (narrow || linear).then(|| one.binary(op, &other)).flatten();
            if let Some(known) = known.filter(|known| narrow || known.affine().is_some()) {
                return Ok(known.into());
            }
        }
        if let Some(kept) = self.without_neutral(op, a, b)? {
            return self.broadcast(&kept, &shape);
        }
        self.pointwise(&[a, b], &shape, |graph, ids| graph.binary(op, ids[0], ids[1]))
    }

    /// The other operand where one does not change it: `x and true`, `x or false`, `x * 1`, `x / 1`.
    fn without_neutral(&self, op: BinaryOp, a: &Value, b: &Value) -> Result<Option<Value>> {
        let logic = a.dtype(self)? == DType::Bool;
        let neutral = match op {
            BinaryOp::And if logic => 1.0,
            BinaryOp::Or if logic => 0.0,
            BinaryOp::Mul | BinaryOp::Div => 1.0,
            _ => return Ok(None),
        };
        Ok(match (a.uniform(), b.uniform()) {
            (_, Some(number)) if number == neutral => Some(a.clone()),
            (Some(number), _) if number == neutral && op != BinaryOp::Div => Some(b.clone()),
            _ => None,
        })
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
        self.pointwise(&[a, b], &shape, |graph, ids| graph.compare(op, ids[0], ids[1]))
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
        self.pointwise(&[condition, yes, no], &shape, |graph, ids| graph.select(ids[0], ids[1], ids[2]))
    }

    pub fn cast(&mut self, x: &Value, dtype: DType) -> Result<Value> {
        if let Some(known) = x.known().and_then(|known| known.cast(dtype)) {
            return Ok(known.into());
        }
        self.pointwise(&[x], &x.shape(self)?, |graph, ids| graph.cast(ids[0], dtype))
    }

    pub fn stop_gradient(&mut self, x: &Value) -> Result<Value> {
        if x.known().is_some() {
            return Ok(x.clone());
        }
        self.pointwise(&[x], &x.shape(self)?, |graph, ids| graph.add(StopGradient {}, ids))
    }

    /// NumPy broadcasting to `shape`.
    pub fn broadcast(&mut self, x: &Value, shape: &[u64]) -> Result<Value> {
        let from = x.shape(self)?;
        if broadcast_shape(&from, shape)?.as_slice() != shape {
            return Err(Error::shape(format!("{:?} does not broadcast to {shape:?}", from.as_slice())));
        }
        match x {
            Value::Known(known) => Ok(known.broadcast(shape).into()),
            _ => self.pointwise(&[x], shape, |_, ids| Ok(ids[0])),
        }
    }

    /// Reduces `dims`; with `keep` they stay with size 1.
    pub fn reduce(&mut self, op: Reduce, x: &Value, dims: &[usize], keep: bool) -> Result<Value> {
        let shape = x.shape(self)?;
        let kept: Shape = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]).collect();
        let wide: Shape = (0..shape.len()).map(|dim| if dims.contains(&dim) { 1 } else { shape[dim] }).collect();
        if shape.contains(&0) {
            let nothing = Known::neutral(op, x.dtype(self)?);
            return Ok(nothing.broadcast(if keep { &wide } else { &kept }).into());
        }
        if let Some(known) = x.known().filter(|known| known.varying().len() <= 1).and_then(|known| known.reduce(op, dims)) {
            return self.reshape(&known.into(), if keep { &wide } else { &kept });
        }
        if x.dtype(self)? == DType::Bool {
            let counted = self.cast(x, DType::I32)?;
            let reduced = self.reduce(op, &counted, dims, keep)?;
            return self.cast(&reduced, DType::Bool);
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

    /// Indices of the `k` first elements along `dim`, in order.
    pub fn top_k(&mut self, x: &Value, dim: usize, k: u64, largest: bool) -> Result<Value> {
        let x = self.node(x)?;
        Ok(self.graph.add(TopK { dim: dim as u8, k, largest }, &[x])?.into())
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
