//! Pointwise ops: every operand has the result's shape.

use super::example::{Example, bools, floats, ints, rounded, within};
use super::{Op, OpDef, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::interp::{Data, Tensor, wrap};
use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::rounding::stochastic;
use dcc_program::{DType, TensorType};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Binary {
    pub op: BinaryOp,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Compare {
    pub op: CompareOp,
}

/// `if operand 0 then operand 1 else operand 2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Select {}

/// Value conversion; float to integer truncates toward zero and saturates, anything to bool is `!= 0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cast {
    pub dtype: DType,
}

/// The operand, without gradient.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StopGradient {}

fn same_shape(name: &str, a: &TensorType, b: &TensorType) -> Result<()> {
    if a.shape == b.shape {
        return Ok(());
    }
    Err(Error::shape(format!("{name} of shapes {:?} and {:?}", a.shape.as_slice(), b.shape.as_slice())))
}

fn same_dtype(name: &str, a: &TensorType, b: &TensorType) -> Result<()> {
    if a.dtype == b.dtype {
        return Ok(());
    }
    Err(Error::dtype(format!("{name} of {} and {}", a.dtype.name(), b.dtype.name())))
}

impl OpDef for Binary {
    const NAME: &'static str = "binary";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(self.op.name(), operands)?;
        same_shape(self.op.name(), a, b)?;
        same_dtype(self.op.name(), a, b)?;
        let fits = match self.op {
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !a.dtype.is_float(),
            BinaryOp::RoundStochastic => a.dtype == DType::F32,
            _ => a.dtype != DType::Bool,
        };
        if fits { Ok(a.clone()) } else { Err(Error::dtype(format!("{} of {}", self.op.name(), a.dtype.name()))) }
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        match self.op {
            BinaryOp::Add | BinaryOp::Sub => vec![vec![0, 1]],
            BinaryOp::Mul => vec![vec![0], vec![1]],
            BinaryOp::Div => vec![vec![0]],
            _ => Vec::new(),
        }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let data = match (&operands[0].data, &operands[1].data) {
            (Data::Float(a), Data::Float(b)) => {
                let f = float(self.op);
                Data::Float(a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect())
            }
            (Data::Int(a), Data::Int(b)) => {
                Data::Int(a.iter().zip(b).map(|(&a, &b)| wrap(result.dtype, integer(self.op, result.dtype, a, b))).collect())
            }
            _ => panic!("{} of a float and an integer", self.op.name()),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        let (a, b) = (g.operand(0), g.operand(1));
        match self.op {
            BinaryOp::Add => {
                g.give(0, |_| Ok(dy))?;
                g.give(1, |_| Ok(dy))
            }
            BinaryOp::Sub => {
                g.give(0, |_| Ok(dy))?;
                g.give(1, |g| g.unary(UnaryOp::Neg, dy))
            }
            // In one term: its factor goes where `dy` is made, which is often smaller.
            BinaryOp::Mul if a == b => g.give(0, |g| {
                let twice = g.scale(dy, 2.0)?;
                g.binary(BinaryOp::Mul, twice, a)
            }),
            BinaryOp::Mul => {
                g.give(0, |g| g.binary(BinaryOp::Mul, dy, b))?;
                g.give(1, |g| g.binary(BinaryOp::Mul, dy, a))
            }
            BinaryOp::Div => {
                g.give(0, |g| g.binary(BinaryOp::Div, dy, b))?;
                g.give(1, |g| {
                    let product = g.binary(BinaryOp::Mul, dy, y)?;
                    let quotient = g.binary(BinaryOp::Div, product, b)?;
                    g.unary(UnaryOp::Neg, quotient)
                })
            }
            // y = a - b·trunc(a/b)
            BinaryOp::Rem => {
                g.give(0, |_| Ok(dy))?;
                g.give(1, |g| {
                    let multiple = g.binary(BinaryOp::Sub, y, a)?;
                    let quotient = g.binary(BinaryOp::Div, multiple, b)?;
                    g.binary(BinaryOp::Mul, dy, quotient)
                })
            }
            BinaryOp::Pow => {
                g.give(0, |g| grad_of_base(g, a, b, dy))?;
                g.give(1, |g| grad_of_exponent(g, a, b, y, dy))
            }
            BinaryOp::Max => {
                g.give(0, |g| grad_of_chosen(g, CompareOp::Lt, a, b, dy))?;
                g.give(1, |g| grad_of_chosen(g, CompareOp::Lt, b, a, dy))
            }
            BinaryOp::Min => {
                g.give(0, |g| grad_of_chosen(g, CompareOp::Gt, a, b, dy))?;
                g.give(1, |g| grad_of_chosen(g, CompareOp::Gt, b, a, dy))
            }
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => Err(g.broken(y, "logic has no gradient")),
            BinaryOp::RoundStochastic => Err(g.broken(y, "rounding has no gradient")),
        }
    }

    fn examples() -> Vec<Example> {
        let mut all = Vec::new();
        for &op in BinaryOp::ALL {
            if op == BinaryOp::RoundStochastic {
                let operands = [within(-1.5, 1.5, 1, &[3, 5]), within(0.0, 1.0, 2, &[3, 5])];
                all.push(Example::new(Binary { op }, operands.map(|x| rounded(DType::F32, &x))).wrt(&[]));
                continue;
            }
            let logic = matches!(op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor);
            if logic {
                all.push(Example::new(Binary { op }, [bools(1, &[7]), bools(2, &[7])]));
            } else {
                let base = if op == BinaryOp::Pow { 0.2 } else { -1.5 };
                all.push(Example::new(Binary { op }, [within(base, 1.5, 1, &[3, 5]), within(0.5, 1.5, 2, &[3, 5])]));
            }
            all.push(Example::new(Binary { op }, [ints(-9, 9, 3, &[4, 5]), ints(-2, 4, 4, &[4, 5])]));
        }
        all
    }
}

impl OpDef for Compare {
    const NAME: &'static str = "compare";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [a, b] = exactly::<2>(self.op.name(), operands)?;
        same_shape(self.op.name(), a, b)?;
        same_dtype(self.op.name(), a, b)?;
        Ok(a.with_dtype(DType::Bool))
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        use std::cmp::Ordering;
        let holds = |order: Option<Ordering>| match self.op {
            CompareOp::Eq => order.is_some_and(Ordering::is_eq),
            CompareOp::Ne => order.is_none_or(Ordering::is_ne),
            CompareOp::Lt => order.is_some_and(Ordering::is_lt),
            CompareOp::Le => order.is_some_and(Ordering::is_le),
            CompareOp::Gt => order.is_some_and(Ordering::is_gt),
            CompareOp::Ge => order.is_some_and(Ordering::is_ge),
        };
        let values: Vec<i64> = match (&operands[0].data, &operands[1].data) {
            (Data::Float(a), Data::Float(b)) => a.iter().zip(b).map(|(a, b)| i64::from(holds(a.partial_cmp(b)))).collect(),
            (Data::Int(a), Data::Int(b)) => {
                let order = |a: i64, b: i64| match operands[0].dtype {
                    DType::U64 => (a as u64).cmp(&(b as u64)),
                    _ => a.cmp(&b),
                };
                a.iter().zip(b).map(|(&a, &b)| i64::from(holds(Some(order(a, b))))).collect()
            }
            _ => panic!("{} of a float and an integer", self.op.name()),
        };
        Tensor::ints(result.dtype, &result.shape, values)
    }

    fn examples() -> Vec<Example> {
        let pair = |&op: &CompareOp| {
            let ints = Example::new(Compare { op }, [ints(0, 3, 1, &[3, 5]), ints(0, 3, 2, &[3, 5])]);
            [ints, Example::new(Compare { op }, [floats(1, &[4]), floats(2, &[4])])]
        };
        CompareOp::ALL.iter().flat_map(pair).collect()
    }
}

impl OpDef for Select {
    const NAME: &'static str = "select";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [condition, a, b] = exactly::<3>(Self::NAME, operands)?;
        if condition.dtype != DType::Bool {
            return Err(Error::dtype(format!("select on {}", condition.dtype.name())));
        }
        same_shape(Self::NAME, condition, a)?;
        same_shape(Self::NAME, a, b)?;
        same_dtype(Self::NAME, a, b)?;
        Ok(a.clone())
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![1, 2]]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let condition = operands[0].i64s();
        let data = match (&operands[1].data, &operands[2].data) {
            (Data::Float(a), Data::Float(b)) => Data::Float(choose(condition, a, b)),
            (Data::Int(a), Data::Int(b)) => Data::Int(choose(condition, a, b)),
            _ => panic!("select between a float and an integer"),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    /// The unselected branch gets zero by selection, so that its infinities never meet a multiplication.
    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let condition = g.operand(0);
        g.give(1, |g| {
            let zero = g.splat_like(0.0, dy)?;
            g.select(condition, dy, zero)
        })?;
        g.give(2, |g| {
            let zero = g.splat_like(0.0, dy)?;
            g.select(condition, zero, dy)
        })
    }

    fn examples() -> Vec<Example> {
        let of = |a, b| Example::new(Select {}, [bools(1, &[3, 5]), a, b]);
        vec![of(floats(2, &[3, 5]), floats(3, &[3, 5])), of(ints(0, 9, 2, &[3, 5]), ints(0, 9, 3, &[3, 5]))]
    }
}

impl OpDef for Cast {
    const NAME: &'static str = "cast";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        Ok(x.with_dtype(self.dtype))
    }

    /// Where it rounds nothing.
    fn linear(&self, operands: &[&TensorType]) -> Vec<Vec<usize>> {
        let from = operands[0].dtype;
        let widens = from == self.dtype || (from.is_float() && self.dtype.is_float() && from.bytes() < self.dtype.bytes());
        if widens { vec![vec![0]] } else { Vec::new() }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let x = operands[0];
        let data = match &x.data {
            Data::Float(v) if self.dtype.is_float() => Data::Float(v.clone()),
            Data::Float(v) if self.dtype == DType::Bool => Data::Int(v.iter().map(|&x| i64::from(x != 0.0)).collect()),
            // Toward zero; what no i64 holds becomes the nearest one, then all wrap as integers do.
            Data::Float(v) => Data::Int(v.iter().map(|&x| wrap(self.dtype, x as i64)).collect()),
            Data::Int(_) if self.dtype.is_float() => Data::Float(x.to_f64s()),
            Data::Int(v) => Data::Int(v.iter().map(|&x| wrap(self.dtype, x)).collect()),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn grad(&self, g: &mut Grad, _: NodeId, dy: NodeId) -> Result<()> {
        let dtype = g.ty(g.operand(0)).dtype;
        g.give(0, |g| g.cast(dy, dtype))
    }

    fn examples() -> Vec<Example> {
        let from = |x: &Tensor| DType::ALL.map(|dtype| Example::new(Cast { dtype }, [x.clone()])).to_vec();
        [within(-300.0, 300.0, 1, &[9]), ints(-300, 300, 2, &[9]), bools(3, &[9])].iter().flat_map(from).collect()
    }
}

impl OpDef for StopGradient {
    const NAME: &'static str = "stop_gradient";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(Self::NAME, operands)?;
        Ok(x.clone())
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        vec![vec![0]]
    }

    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        operands[0].clone()
    }

    fn examples() -> Vec<Example> {
        vec![Example::new(StopGradient {}, [floats(1, &[3, 5])]).wrt(&[])]
    }
}

fn float(op: BinaryOp) -> fn(f64, f64) -> f64 {
    match op {
        BinaryOp::Add => |a, b| a + b,
        BinaryOp::Sub => |a, b| a - b,
        BinaryOp::Mul => |a, b| a * b,
        BinaryOp::Div => |a, b| a / b,
        BinaryOp::Rem => |a, b| a % b,
        BinaryOp::Pow => f64::powf,
        BinaryOp::Max => max,
        BinaryOp::Min => |a, b| -max(-a, -b),
        BinaryOp::RoundStochastic => |x, u| f64::from(stochastic(x as f32, u as f32)),
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => panic!("{} of floats", op.name()),
    }
}

/// The larger; NaN where one is.
pub(super) fn max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

pub(super) fn integer(op: BinaryOp, dtype: DType, a: i64, b: i64) -> i64 {
    let unsigned = dtype == DType::U64;
    let a_is_less = if unsigned { (a as u64) < b as u64 } else { a < b };
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Div | BinaryOp::Rem if b == 0 => 0,
        BinaryOp::Div if unsigned => (a as u64 / b as u64) as i64,
        BinaryOp::Div => a.wrapping_div(b),
        BinaryOp::Rem if unsigned => (a as u64 % b as u64) as i64,
        BinaryOp::Rem => a.wrapping_rem(b),
        // 1 / aⁿ, truncated
        BinaryOp::Pow if b < 0 && !unsigned => match a {
            1 => 1,
            -1 => 1 - 2 * (b & 1),
            _ => 0,
        },
        BinaryOp::Pow => power(a, b as u64),
        BinaryOp::Max if a_is_less => b,
        BinaryOp::Max => a,
        BinaryOp::Min if a_is_less => a,
        BinaryOp::Min => b,
        BinaryOp::And => a & b,
        BinaryOp::Or => a | b,
        BinaryOp::Xor => a ^ b,
        BinaryOp::RoundStochastic => panic!("{} of integers", op.name()),
    }
}

/// aⁿ by squaring, wrapping.
fn power(mut a: i64, mut n: u64) -> i64 {
    let mut product = 1i64;
    while n > 0 {
        if n & 1 == 1 {
            product = product.wrapping_mul(a);
        }
        a = a.wrapping_mul(a);
        n >>= 1;
    }
    product
}

fn choose<T: Copy>(condition: &[i64], a: &[T], b: &[T]) -> Vec<T> {
    condition.iter().zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c != 0 { a } else { b }).collect()
}

/// The number that a constant, or a broadcast one, is everywhere.
fn constant(graph: &Graph, id: NodeId) -> Option<f64> {
    match &graph[id].op {
        Op::Const(c) => Some(c.value()),
        Op::BroadcastInDim(_) | Op::Reshape(_) => constant(graph, graph[id].operands[0]),
        _ => None,
    }
}

/// dy · b · a^(b-1), and zero where b is: there 0 · a^-1 may be NaN.
fn grad_of_base(g: &mut Grad, a: NodeId, b: NodeId, dy: NodeId) -> Result<NodeId> {
    if let Some(exponent) = constant(g, b) {
        if exponent == 0.0 {
            return g.splat_like(0.0, dy);
        }
        let power = match exponent {
            1.0 => return Ok(dy),
            2.0 => a,
            3.0 => g.binary(BinaryOp::Mul, a, a)?,
            _ => g.binary_scalar(BinaryOp::Pow, a, exponent - 1.0)?,
        };
        let slope = g.scale(power, exponent)?;
        return g.binary(BinaryOp::Mul, dy, slope);
    }
    let less = g.binary_scalar(BinaryOp::Sub, b, 1.0)?;
    let power = g.binary(BinaryOp::Pow, a, less)?;
    let slope = g.binary(BinaryOp::Mul, b, power)?;
    let dx = g.binary(BinaryOp::Mul, dy, slope)?;
    let zero = g.splat_like(0.0, dy)?;
    let flat = g.compare(CompareOp::Eq, b, zero)?;
    g.select(flat, zero, dx)
}

/// dy · y · log a, and zero where a is zero and b is not negative.
fn grad_of_exponent(g: &mut Grad, a: NodeId, b: NodeId, y: NodeId, dy: NodeId) -> Result<NodeId> {
    let log = g.unary(UnaryOp::Log, a)?;
    let slope = g.binary(BinaryOp::Mul, y, log)?;
    let dx = g.binary(BinaryOp::Mul, dy, slope)?;
    let zero = g.splat_like(0.0, dy)?;
    let base = g.compare(CompareOp::Eq, a, zero)?;
    let exponent = g.compare(CompareOp::Ge, b, zero)?;
    let flat = g.binary(BinaryOp::And, base, exponent)?;
    g.select(flat, zero, dx)
}

/// dy where `a` wins, half where both are equal, nothing where `a loses b` holds. As PyTorch's `maximum` and `minimum`.
fn grad_of_chosen(g: &mut Grad, loses: CompareOp, a: NodeId, b: NodeId, dy: NodeId) -> Result<NodeId> {
    let half = g.scale(dy, 0.5)?;
    let tie = g.compare(CompareOp::Eq, a, b)?;
    let wins = g.select(tie, half, dy)?;
    let zero = g.splat_like(0.0, dy)?;
    let lost = g.compare(loses, a, b)?;
    g.select(lost, zero, wins)
}
