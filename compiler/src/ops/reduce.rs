//! Reductions and running sums.

use super::elementwise::{integer, max};
use super::example::{Example, floats, ints};
use super::{OpDef, Rule, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Data, Tensor, offsets, strides, wrap};
use crate::ops::movement::Dims;
use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::{DType, FactorId, TensorType};
use serde::{Deserialize, Serialize};

/// The dims in `dims` (ascending) reduced and removed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reduce {
    pub op: dcc_program::Reduce,
    pub dims: Dims,
}

/// Running sum along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cumsum {
    pub dim: u8,
    /// Element i excludes operand i itself.
    pub exclusive: bool,
    /// From the end.
    pub reverse: bool,
}

/// What the reduction of nothing gives.
fn neutral(op: dcc_program::Reduce, ty: &TensorType) -> Tensor {
    let len = ty.elements() as usize;
    let (low, high) = range(ty.dtype);
    let (float, int) = match op {
        dcc_program::Reduce::Sum => (0.0, 0),
        dcc_program::Reduce::Prod => (1.0, 1),
        dcc_program::Reduce::Max => (f64::NEG_INFINITY, low),
        dcc_program::Reduce::Min => (f64::INFINITY, high),
    };
    let data = if ty.dtype.is_float() { Data::Float(vec![float; len]) } else { Data::Int(vec![int; len]) };
    Tensor::new(ty.dtype, ty.shape.clone(), data)
}

/// Least and largest value of an integer dtype, as stored.
fn range(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::U64 => (0, -1),
        DType::Bool => (0, 1),
        DType::U8 => (0, u8::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        _ => (i64::MIN, i64::MAX),
    }
}

/// The op of two elements.
pub(super) fn binary(op: dcc_program::Reduce) -> BinaryOp {
    match op {
        dcc_program::Reduce::Sum => BinaryOp::Add,
        dcc_program::Reduce::Prod => BinaryOp::Mul,
        dcc_program::Reduce::Max => BinaryOp::Max,
        dcc_program::Reduce::Min => BinaryOp::Min,
    }
}

fn fold(op: dcc_program::Reduce) -> fn(f64, f64) -> f64 {
    match op {
        dcc_program::Reduce::Sum => |a, b| a + b,
        dcc_program::Reduce::Prod => |a, b| a * b,
        dcc_program::Reduce::Max => max,
        dcc_program::Reduce::Min => |a, b| -max(-a, -b),
    }
}

impl Reduce {
    /// `v`, of the result's shape, repeated to the shape of `x`.
    fn spread(&self, g: &mut Grad, v: NodeId, x: NodeId) -> Result<NodeId> {
        let shape = g.ty(x).shape.clone();
        let kept: Vec<usize> = (0..shape.len()).filter(|&d| !self.dims.contains(&(d as u8))).collect();
        g.broadcast(v, &shape, &kept)
    }

    /// dy in equal parts to all elements that are the extremum, as PyTorch's `amax`.
    fn grad_of_extremum(&self, g: &mut Grad, x: NodeId, y: NodeId, dy: NodeId) -> Result<NodeId> {
        let extremum = self.spread(g, y, x)?;
        let chosen = g.compare(CompareOp::Eq, x, extremum)?;
        let dtype = g.ty(x).dtype;
        let ones = g.cast(chosen, dtype)?;
        let dims: Vec<usize> = self.dims.iter().map(|&d| usize::from(d)).collect();
        let count = g.sum(ones, &dims)?;
        let part = g.of_value(y, |g| g.binary(BinaryOp::Div, dy, count))?;
        let part = self.spread(g, part, x)?;
        let zero = g.splat_like(0.0, x)?;
        g.select(chosen, part, zero)
    }

    /// dy times the product of the other elements: without zeros y/x, with one zero that product at the zero, else nothing.
    fn grad_of_product(&self, g: &mut Grad, x: NodeId, y: NodeId, dy: NodeId) -> Result<NodeId> {
        let dims: Vec<usize> = self.dims.iter().map(|&d| usize::from(d)).collect();
        let (zero, one) = (g.splat_like(0.0, x)?, g.splat_like(1.0, x)?);
        let is_zero = g.compare(CompareOp::Eq, x, zero)?;
        let nonzero = g.select(is_zero, one, x)?;
        let product = g.reduce(dcc_program::Reduce::Prod, nonzero, &dims)?;
        let dtype = g.ty(x).dtype;
        let ones = g.cast(is_zero, dtype)?;
        let zeros = g.sum(ones, &dims)?;
        let (at_nonzero, at_zero) = g.of_value(y, |g| {
            let all = g.binary(BinaryOp::Mul, dy, product)?;
            let none = g.splat_like(0.0, all)?;
            let no_zero = g.compare(CompareOp::Eq, zeros, none)?;
            let single = g.splat_like(1.0, all)?;
            let one_zero = g.compare(CompareOp::Eq, zeros, single)?;
            Ok((g.select(no_zero, all, none)?, g.select(one_zero, all, none)?))
        })?;
        let at_nonzero = self.spread(g, at_nonzero, x)?;
        let at_nonzero = g.binary(BinaryOp::Div, at_nonzero, nonzero)?;
        let at_zero = self.spread(g, at_zero, x)?;
        g.select(is_zero, at_zero, at_nonzero)
    }
}

impl Cumsum {
    /// In place over rows of `size` elements `inner` apart.
    fn scan<T: Copy + Default>(&self, values: &mut [T], size: usize, inner: usize, add: impl Fn(T, T) -> T) {
        for start in (0..values.len()).filter(|i| (i / inner).is_multiple_of(size.max(1))) {
            let mut sum = T::default();
            for step in 0..size {
                let at = start + inner * if self.reverse { size - 1 - step } else { step };
                let next = add(sum, values[at]);
                values[at] = if self.exclusive { sum } else { next };
                sum = next;
            }
        }
    }
}

impl OpDef for Reduce {
    const NAME: &'static str = "reduce";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        let ascending = self.dims.windows(2).all(|w| w[0] < w[1]);
        if !ascending || self.dims.iter().any(|&d| usize::from(d) >= x.rank()) {
            return Err(Error::shape(format!("reduce of dims {:?} of {:?}", self.dims, x.shape.as_slice())));
        }
        if x.dtype == DType::Bool {
            return Err(Error::dtype(format!("reduce {} of bool", self.op.name())));
        }
        let kept = (0..x.rank()).filter(|&d| !self.dims.contains(&(d as u8)));
        Ok(TensorType::new(x.dtype, kept.map(|d| x.shape[d])))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, operands[0].rank());
        for &d in self.dims.iter().rev() {
            rule.spec.result.remove(usize::from(d));
        }
        rule.reduce = self.op;
        if self.op == dcc_program::Reduce::Prod {
            rule.whole = self.dims.iter().map(|&d| FactorId(d)).collect();
        }
        rule
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        if self.op == dcc_program::Reduce::Sum { vec![vec![0]] } else { Vec::new() }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let x = operands[0];
        let to = strides(&result.shape);
        let mut kept = to.iter();
        let reduced = |d: usize| self.dims.contains(&(d as u8));
        let at: Vec<isize> = (0..x.shape.len())
            .map(|d| if reduced(d) { 0 } else { *kept.next().expect("as many as kept dims") as isize })
            .collect();
        let mut out = neutral(self.op, result);
        let at = offsets(&x.shape, 0, &at);
        match (&x.data, &mut out.data) {
            (Data::Float(from), Data::Float(to)) => {
                let f = fold(self.op);
                from.iter().zip(at).for_each(|(&v, o)| to[o] = f(to[o], v));
            }
            (Data::Int(from), Data::Int(to)) => {
                let op = binary(self.op);
                from.iter().zip(at).for_each(|(&v, o)| to[o] = wrap(x.dtype, integer(op, x.dtype, to[o], v)));
            }
            _ => unreachable!("a reduction keeps the dtype"),
        }
        out
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let x = g.operand(0);
        g.give(0, |g| match self.op {
            dcc_program::Reduce::Sum => self.spread(g, dy, x),
            dcc_program::Reduce::Max | dcc_program::Reduce::Min => self.grad_of_extremum(g, x, y, dy),
            dcc_program::Reduce::Prod => self.grad_of_product(g, x, y, dy),
        })
    }

    fn examples() -> Vec<Example> {
        use dcc_program::Reduce::{Max, Min, Prod, Sum};
        let mut all = Vec::new();
        for op in [Sum, Max, Min, Prod] {
            for dims in [&[0u8, 1, 2][..], &[1], &[0, 2], &[]] {
                all.push(Example::new(Reduce { op, dims: Dims::from_slice(dims) }, [floats(1, &[3, 5, 2])]));
            }
            all.push(Example::new(Reduce { op, dims: Dims::from_slice(&[0]) }, [ints(-5, 5, 1, &[5, 3])]));
        }
        all
    }
}

impl OpDef for Cumsum {
    const NAME: &'static str = "cumsum";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        if usize::from(self.dim) >= x.rank() || x.dtype == DType::Bool {
            return Err(Error::shape(format!("cumsum along dim {} of {:?}", self.dim, x.shape.as_slice())));
        }
        Ok(x.clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> Rule {
        let mut rule = Rule::pointwise(1, result.rank());
        rule.whole = vec![FactorId(self.dim)];
        rule
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        let mut out = operands[0].clone();
        let dim = usize::from(self.dim);
        let (size, inner) = (out.shape[dim] as usize, out.strides()[dim]);
        match &mut out.data {
            Data::Float(v) => self.scan(v, size, inner, |a, b| a + b),
            Data::Int(v) => self.scan(v, size, inner, |a, b| wrap(operands[0].dtype, a.wrapping_add(b))),
        }
        out
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        g.give(0, |g| g.add(Cumsum { reverse: !self.reverse, ..self.clone() }, &[dy]))
    }

    fn examples() -> Vec<Example> {
        let of = |dim, exclusive, reverse, x| Example::new(Cumsum { dim, exclusive, reverse }, [x]);
        vec![
            of(1, false, false, floats(1, &[3, 5])),
            of(0, true, false, floats(1, &[5, 3])),
            of(1, false, true, floats(1, &[2, 5, 3])),
            of(1, true, true, floats(1, &[3, 5])),
            of(0, false, false, ints(-3, 9, 1, &[7])),
        ]
    }
}
