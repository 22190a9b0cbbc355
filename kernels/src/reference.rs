//! The meaning of kernel IR, evaluated point by point: floats in f64, integers in i64. Slow; the oracle of generated code.

use crate::library::random::{Stream, uniform, word};
use crate::library::vector::arithmetic::power;
use crate::library::vector::convert;
use crate::tile::{Access, Array, Nest, Typing};
use dcc_program::kernel::{BinaryOp, CompareOp, DimId, Expr, ExprId, Index, Outside, Stmt, StoreMode, UnaryOp, VarId};
use dcc_program::rounding::stochastic;
use dcc_program::types::{DType, Reduce};
use std::collections::BTreeMap;

/// A value of any type: floats exactly, integers and bools as integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    Float(f64),
    Int(i64),
}

impl Scalar {
    fn float(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(x) => x as f64,
        }
    }

    fn int(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(x) => x,
        }
    }
}

/// Runs `nest` with f64 arithmetic. Operands are their elements in f64 or i64, one vector per operand, blocks row-major; `parameters` as
/// `Nest::parameters` gives them. Stores happen in order, point by point.
pub fn run(nest: &Nest, parameters: &[i64], inputs: &[Vec<Scalar>], outputs: &mut [Vec<Scalar>]) {
    evaluate(nest, parameters, inputs, outputs, false);
}

/// As `run`, but every value is rounded to its dtype as devices do. Where a kernel jumps (a sign, a comparison, a floor), a device's result
/// may be this one's though it is not `run`'s.
pub fn run_rounded(nest: &Nest, parameters: &[i64], inputs: &[Vec<Scalar>], outputs: &mut [Vec<Scalar>]) {
    evaluate(nest, parameters, inputs, outputs, true);
}

fn evaluate(nest: &Nest, parameters: &[i64], inputs: &[Vec<Scalar>], outputs: &mut [Vec<Scalar>], rounds: bool) {
    let typing = Typing::new(&nest.kernel);
    let (index, vars) = (vec![0; nest.extents.len()], BTreeMap::new());
    let mut machine = Machine { nest, typing: &typing, parameters, inputs, index, vars, rounds };
    let outer = nest.kernel.outer.clone();
    machine.points(&outer, &mut |machine| {
        for stmt in &nest.kernel.body {
            machine.statement(stmt, outputs);
        }
    });
}

struct Machine<'a> {
    nest: &'a Nest,
    typing: &'a Typing,
    parameters: &'a [i64],
    inputs: &'a [Vec<Scalar>],
    /// Local index of each loop dim.
    index: Vec<usize>,
    vars: BTreeMap<VarId, Scalar>,
    /// Whether values are rounded to their dtypes.
    rounds: bool,
}

impl Machine<'_> {
    fn points(&mut self, dims: &[DimId], body: &mut dyn FnMut(&mut Self)) {
        match dims.split_first() {
            None => body(self),
            Some((dim, rest)) => {
                for i in 0..self.nest.extents[usize::from(dim.0)] {
                    self.index[usize::from(dim.0)] = i;
                    self.points(rest, body);
                }
            }
        }
    }

    fn statement(&mut self, stmt: &Stmt, outputs: &mut [Vec<Scalar>]) {
        match stmt {
            Stmt::Let { var, value } => {
                let value = self.eval(*value);
                self.vars.insert(*var, value);
            }
            Stmt::Reduce { var, op, over, value } => {
                let dtype = self.typing.dtype(*value);
                let mut total: Option<Scalar> = None;
                self.points(over, &mut |machine| {
                    let next = machine.eval(*value);
                    let sum = total.map_or(next, |total| fold(*op, dtype, total, next));
                    // Sums of half floats are f32.
                    let held = if dtype.bytes() == 2 && dtype.is_float() { DType::F32 } else { dtype };
                    total = Some(machine.rounded(held, sum));
                });
                let empty = match (dtype.is_float(), op) {
                    (true, Reduce::Sum) => Scalar::Float(0.0),
                    (true, Reduce::Prod) => Scalar::Float(1.0),
                    (true, Reduce::Max) => Scalar::Float(f64::NEG_INFINITY),
                    (true, Reduce::Min) => Scalar::Float(f64::INFINITY),
                    (false, op) => Scalar::Int(i64::from(matches!(op, Reduce::Prod))),
                };
                self.vars.insert(*var, total.unwrap_or(empty));
            }
            Stmt::Store { output, over, index, value, mode } => {
                let array = &self.nest.outputs[usize::from(*output)];
                self.points(over, &mut |machine| {
                    let value = machine.eval(*value);
                    let at = machine.offset(array, index, Outside::Never).expect("stores stay inside their operand");
                    let slot = &mut outputs[usize::from(*output)][at];
                    *slot = match mode {
                        StoreMode::Assign => value,
                        StoreMode::Accumulate => binary(BinaryOp::Add, array.dtype, *slot, value),
                    };
                });
            }
        }
    }

    fn global(&self, dim: DimId) -> i64 {
        let d = usize::from(dim.0);
        self.index[d] as i64 + self.parameters[self.nest.offset[d]]
    }

    /// Element offset of an access; `None` outside of the shard.
    fn offset(&mut self, array: &Array, index: &[Index], outside: Outside) -> Option<usize> {
        let mut total = 0;
        for (k, (index, stride)) in index.iter().zip(Access::dense(array)).enumerate() {
            let own = self.parameters[array.offset[k]];
            let local = match index {
                Index::Dim(dim) => self.index[usize::from(dim.0)] as i64,
                Index::Affine { terms, offset } => {
                    offset - own + terms.iter().map(|(dim, times)| times * self.global(*dim)).sum::<i64>()
                }
                Index::Expr(expr) => self.eval(*expr).int() - own,
            };
            let checked = matches!(index, Index::Expr(_)) || outside == Outside::Zero;
            if checked && !(0..array.valid[k] as i64).contains(&local) {
                return None;
            }
            total += local * stride;
        }
        Some(total as usize)
    }

    fn eval(&mut self, id: ExprId) -> Scalar {
        let dtype = self.typing.dtype(id);
        let value = match self.nest.kernel.get(id).clone() {
            Expr::Load { input, index, outside } => {
                let array = &self.nest.inputs[usize::from(input)];
                let zero = if array.dtype.is_float() { Scalar::Float(0.0) } else { Scalar::Int(0) };
                self.offset(array, &index, outside).map_or(zero, |at| self.inputs[usize::from(input)][at])
            }
            Expr::Var(var) => return self.vars[&var],
            Expr::Const { dtype, bits } if dtype.is_float() => Scalar::Float(f64::from_bits(bits)),
            Expr::Const { bits, .. } => Scalar::Int(bits as i64),
            Expr::Position(dim) => Scalar::Int(self.global(dim)),
            Expr::Unary(op, x) => unary(op, self.typing.dtype(x), self.eval(x)),
            Expr::Binary(op, x, y) => binary(op, dtype, self.eval(x), self.eval(y)),
            Expr::Compare(op, x, y) => {
                let (x, y) = (self.eval(x), self.eval(y));
                Scalar::Int(i64::from(compare(op, x, y)))
            }
            Expr::Select(c, x, y) => {
                let (yes, no) = (self.eval(x), self.eval(y));
                if self.eval(c).int() != 0 { yes } else { no }
            }
            Expr::Cast(to, x) => {
                let x = self.eval(x);
                match (to, x) {
                    (DType::Bool, x) => Scalar::Int(i64::from(x.float() != 0.0)),
                    (to, x) if to.is_float() => Scalar::Float(x.float()),
                    (_, x) => Scalar::Int(x.int()),
                }
            }
            Expr::Uniform { id, seed, step, element } => {
                let stream = Stream { seed: self.eval(seed).int() as u64, op: id, step: self.eval(step).int() as u32 };
                Scalar::Float(f64::from(uniform(word(&stream, self.eval(element).int() as u64))))
            }
        };
        self.rounded(dtype, wrap(dtype, value))
    }

    fn rounded(&self, dtype: DType, value: Scalar) -> Scalar {
        match (dtype, value) {
            (DType::F32, Scalar::Float(x)) if self.rounds => Scalar::Float(f64::from(x as f32)),
            (DType::F16 | DType::BF16, Scalar::Float(x)) if self.rounds => {
                Scalar::Float(f64::from(convert::rounded(dtype, x as f32)))
            }
            (_, value) => value,
        }
    }
}

/// Integers wrap to their width.
fn wrap(dtype: DType, value: Scalar) -> Scalar {
    match (dtype, value) {
        (DType::I8, Scalar::Int(x)) => Scalar::Int(i64::from(x as i8)),
        (DType::I16, Scalar::Int(x)) => Scalar::Int(i64::from(x as i16)),
        (DType::I32, Scalar::Int(x)) => Scalar::Int(i64::from(x as i32)),
        (DType::U8, Scalar::Int(x)) => Scalar::Int(i64::from(x as u8)),
        (DType::U16, Scalar::Int(x)) => Scalar::Int(i64::from(x as u16)),
        (DType::U32, Scalar::Int(x)) => Scalar::Int(i64::from(x as u32)),
        (_, value) => value,
    }
}

fn fold(op: Reduce, dtype: DType, x: Scalar, y: Scalar) -> Scalar {
    let op = match op {
        Reduce::Sum => BinaryOp::Add,
        Reduce::Prod => BinaryOp::Mul,
        Reduce::Max => BinaryOp::Max,
        Reduce::Min => BinaryOp::Min,
    };
    binary(op, dtype, x, y)
}

fn unary(op: UnaryOp, dtype: DType, x: Scalar) -> Scalar {
    if let Scalar::Int(x) = x {
        return Scalar::Int(match op {
            UnaryOp::Neg => x.wrapping_neg(),
            UnaryOp::Abs => x.wrapping_abs(),
            UnaryOp::Sign => x.signum(),
            UnaryOp::Not if dtype == DType::Bool => x ^ 1,
            UnaryOp::Not => !x,
            other => panic!("{} of an integer", other.name()),
        });
    }
    let x = x.float();
    Scalar::Float(match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign if x == 0.0 || x.is_nan() => x,
        UnaryOp::Sign => x.signum(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log1p => x.ln_1p(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Logistic => 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Erf => crate::library::math::Real::erf(x),
        UnaryOp::Gelu => x * normal(x),
        UnaryOp::GeluSlope => normal(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        UnaryOp::GeluTanh => 0.5 * x * (1.0 + gelu_tanh(x).0.tanh()),
        UnaryOp::GeluTanhSlope => {
            let (inner, slope) = gelu_tanh(x);
            0.5 * (1.0 + inner.tanh()) + 0.5 * x * (1.0 - inner.tanh().powi(2)) * slope
        }
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tan => x.tan(),
        UnaryOp::Asin => x.asin(),
        UnaryOp::Acos => x.acos(),
        UnaryOp::Atan => x.atan(),
        UnaryOp::Sinh => x.sinh(),
        UnaryOp::Cosh => x.cosh(),
        UnaryOp::Asinh => x.asinh(),
        UnaryOp::Acosh => x.acosh(),
        UnaryOp::Atanh => x.atanh(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::RoundEven => x.round_ties_even(),
        UnaryOp::IsNan => return Scalar::Int(i64::from(x.is_nan())),
        UnaryOp::IsInf => return Scalar::Int(i64::from(x.is_infinite())),
        UnaryOp::Not => panic!("not of a float"),
    })
}

fn normal(x: f64) -> f64 {
    0.5 * (1.0 + crate::library::math::Real::erf(x / std::f64::consts::SQRT_2))
}

/// What `gelu_tanh` takes the tanh of, and its derivative.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    (scale * (x + 0.044715 * x * x * x), scale * (1.0 + 3.0 * 0.044715 * x * x))
}

fn binary(op: BinaryOp, dtype: DType, x: Scalar, y: Scalar) -> Scalar {
    if !dtype.is_float() {
        let (x, y) = (x.int(), y.int());
        let logic = dtype == DType::Bool;
        return Scalar::Int(match op {
            BinaryOp::Add if logic => x | y,
            BinaryOp::Add => x.wrapping_add(y),
            BinaryOp::Sub => x.wrapping_sub(y),
            BinaryOp::Mul => x.wrapping_mul(y),
            BinaryOp::Div => {
                if y == 0 {
                    0
                } else {
                    x.wrapping_div(y)
                }
            }
            BinaryOp::Rem => {
                if y == 0 {
                    0
                } else {
                    x.wrapping_rem(y)
                }
            }
            BinaryOp::Pow => power(x, y),
            BinaryOp::Max => x.max(y),
            BinaryOp::Min => x.min(y),
            BinaryOp::And => x & y,
            BinaryOp::Or => x | y,
            BinaryOp::Xor => x ^ y,
            BinaryOp::RoundStochastic => panic!("{} of integers", op.name()),
        });
    }
    let (x, y) = (x.float(), y.float());
    let nan = x.is_nan() || y.is_nan();
    Scalar::Float(match op {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        BinaryOp::Mul => x * y,
        BinaryOp::Div => x / y,
        BinaryOp::Rem => x % y,
        BinaryOp::Pow => x.powf(y),
        BinaryOp::Max => {
            if nan {
                f64::NAN
            } else {
                x.max(y)
            }
        }
        BinaryOp::Min => {
            if nan {
                f64::NAN
            } else {
                x.min(y)
            }
        }
        BinaryOp::RoundStochastic => f64::from(stochastic(x as f32, y as f32)),
        other => panic!("{} of floats", other.name()),
    })
}

fn compare(op: CompareOp, x: Scalar, y: Scalar) -> bool {
    let order = match (x, y) {
        (Scalar::Int(x), Scalar::Int(y)) => Some(x.cmp(&y)),
        _ => x.float().partial_cmp(&y.float()),
    };
    match op {
        CompareOp::Eq => order.is_some_and(|o| o.is_eq()),
        CompareOp::Ne => !order.is_some_and(|o| o.is_eq()),
        CompareOp::Lt => order.is_some_and(|o| o.is_lt()),
        CompareOp::Le => order.is_some_and(|o| o.is_le()),
        CompareOp::Gt => order.is_some_and(|o| o.is_gt()),
        CompareOp::Ge => order.is_some_and(|o| o.is_ge()),
    }
}
