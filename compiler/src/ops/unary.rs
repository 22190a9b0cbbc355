//! Elementwise functions of one argument.

use super::example::{Example, bools, floats, ints, within};
use super::{OpDef, exactly};
use crate::autodiff::Grad;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::interp::{Data, Tensor, wrap};
use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, TensorType};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Unary {
    pub op: UnaryOp,
}

impl OpDef for Unary {
    const NAME: &'static str = "unary";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        let [x] = exactly::<1>(self.op.name(), operands)?;
        let fits = match self.op {
            UnaryOp::Not => !x.dtype.is_float(),
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => x.dtype != DType::Bool,
            UnaryOp::IsNan | UnaryOp::IsInf => return Ok(x.with_dtype(DType::Bool)),
            _ => x.dtype.is_float(),
        };
        if fits { Ok(x.clone()) } else { Err(Error::dtype(format!("{} of {}", self.op.name(), x.dtype.name()))) }
    }

    fn linear(&self, _: &[&TensorType]) -> Vec<Vec<usize>> {
        if self.op == UnaryOp::Neg { vec![vec![0]] } else { Vec::new() }
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let x = operands[0];
        let flags = |flag: fn(f64) -> bool| Data::Int(x.to_f64s().into_iter().map(|v| i64::from(flag(v))).collect());
        let data = match (self.op, &x.data) {
            (UnaryOp::IsNan, _) => flags(f64::is_nan),
            (UnaryOp::IsInf, _) => flags(f64::is_infinite),
            (op, Data::Float(values)) => Data::Float(values.iter().copied().map(float(op)).collect()),
            (op, Data::Int(values)) => Data::Int(values.iter().map(|&v| integer(op, x.dtype, v)).collect()),
        };
        Tensor::new(result.dtype, result.shape.clone(), data)
    }

    fn grad(&self, g: &mut Grad, y: NodeId, dy: NodeId) -> Result<()> {
        if matches!(self.op, UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::RoundEven) {
            return Ok(());
        }
        let x = g.operand(0);
        g.give(0, |g| derivative(self.op, g, x, y, dy))
    }

    fn examples() -> Vec<Example> {
        let example = |&op: &UnaryOp| {
            let (low, high) = match op {
                UnaryOp::Not => return Example::new(Unary { op }, [bools(1, &[5])]),
                UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Rsqrt => (0.3, 2.0),
                UnaryOp::Acosh => (1.2, 2.0),
                UnaryOp::Log1p | UnaryOp::Asin | UnaryOp::Acos | UnaryOp::Atanh => (-0.8, 0.9),
                _ => (-1.4, 1.4),
            };
            Example::new(Unary { op }, [within(low, high, 1, &[3, 5])])
        };
        let integer = |op| Example::new(Unary { op }, [ints(-5, 5, 2, &[7])]);
        let mut all: Vec<Example> = UnaryOp::ALL.iter().map(example).collect();
        all.extend([UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Not].map(integer));
        all.push(Example::new(Unary { op: UnaryOp::Exp }, [floats(3, &[])]));
        all
    }
}

fn float(op: UnaryOp) -> fn(f64) -> f64 {
    match op {
        UnaryOp::Neg => |x| -x,
        UnaryOp::Abs => f64::abs,
        UnaryOp::Sign => |x| if x == 0.0 || x.is_nan() { x } else { x.signum() },
        UnaryOp::Exp => f64::exp,
        UnaryOp::Expm1 => f64::exp_m1,
        UnaryOp::Log => f64::ln,
        UnaryOp::Log1p => f64::ln_1p,
        UnaryOp::Sqrt => f64::sqrt,
        UnaryOp::Rsqrt => |x| 1.0 / x.sqrt(),
        UnaryOp::Tanh => f64::tanh,
        UnaryOp::Logistic => |x| 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Erf => libm::erf,
        UnaryOp::Gelu => |x| x * normal(x),
        UnaryOp::GeluSlope => |x| normal(x) + x * (-0.5 * x * x).exp() * INV_SQRT_2PI,
        UnaryOp::GeluTanh => |x| 0.5 * x * (1.0 + gelu_tanh(x).0.tanh()),
        UnaryOp::GeluTanhSlope => |x| {
            let (inner, slope) = gelu_tanh(x);
            0.5 * (1.0 + inner.tanh()) + 0.5 * x * (1.0 - inner.tanh().powi(2)) * slope
        },
        UnaryOp::Sin => f64::sin,
        UnaryOp::Cos => f64::cos,
        UnaryOp::Tan => f64::tan,
        UnaryOp::Asin => f64::asin,
        UnaryOp::Acos => f64::acos,
        UnaryOp::Atan => f64::atan,
        UnaryOp::Sinh => f64::sinh,
        UnaryOp::Cosh => f64::cosh,
        UnaryOp::Asinh => libm::asinh,
        UnaryOp::Acosh => libm::acosh,
        UnaryOp::Atanh => libm::atanh,
        UnaryOp::Floor => f64::floor,
        UnaryOp::Ceil => f64::ceil,
        UnaryOp::RoundEven => f64::round_ties_even,
        UnaryOp::Not | UnaryOp::IsNan | UnaryOp::IsInf => panic!("{} gives no float", op.name()),
    }
}

/// 1/√(2π).
const INV_SQRT_2PI: f64 = 0.398_942_280_401_432_7;

/// The distribution function of the standard normal distribution.
fn normal(x: f64) -> f64 {
    0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

/// The factor of the cube in `gelu_tanh`.
const CUBE: f64 = 0.044715;

/// √(2/π), that of all that `gelu_tanh` takes the tanh of.
fn gelu_scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

/// What `gelu_tanh` takes the tanh of, and its derivative. Hendrycks and Gimpel 2016, arXiv 1606.08415.
fn gelu_tanh(x: f64) -> (f64, f64) {
    (gelu_scale() * (x + CUBE * x * x * x), gelu_scale() * (1.0 + 3.0 * CUBE * x * x))
}

fn integer(op: UnaryOp, dtype: DType, x: i64) -> i64 {
    match op {
        UnaryOp::Neg => wrap(dtype, x.wrapping_neg()),
        UnaryOp::Abs if dtype == DType::U64 => x,
        UnaryOp::Abs => wrap(dtype, x.wrapping_abs()),
        UnaryOp::Sign if dtype == DType::U64 => i64::from(x != 0),
        UnaryOp::Sign => x.signum(),
        UnaryOp::Not if dtype == DType::Bool => 1 - x,
        UnaryOp::Not => wrap(dtype, !x),
        _ => panic!("{} of integers", op.name()),
    }
}

/// dx of `y = op(x)`.
fn derivative(op: UnaryOp, g: &mut Grad, x: NodeId, y: NodeId, dy: NodeId) -> Result<NodeId> {
    use BinaryOp::{Add, Div, Mul, Sub};
    match op {
        UnaryOp::Neg => g.unary(UnaryOp::Neg, dy),
        UnaryOp::Abs => times(g, dy, UnaryOp::Sign, x),
        UnaryOp::Exp => g.binary(Mul, dy, y),
        UnaryOp::Expm1 => {
            let exp = g.binary_scalar(Add, y, 1.0)?;
            g.binary(Mul, dy, exp)
        }
        UnaryOp::Log => g.binary(Div, dy, x),
        UnaryOp::Log1p => {
            let inner = g.binary_scalar(Add, x, 1.0)?;
            g.binary(Div, dy, inner)
        }
        UnaryOp::Sqrt => {
            let twice = g.scale(y, 2.0)?;
            g.binary(Div, dy, twice)
        }
        UnaryOp::Rsqrt => {
            let square = g.binary(Mul, y, y)?;
            let cube = g.binary(Mul, square, y)?;
            let half = g.scale(cube, -0.5)?;
            g.binary(Mul, dy, half)
        }
        UnaryOp::Tanh => {
            let slope = squared_plus(g, y, -1.0, 1.0)?;
            g.binary(Mul, dy, slope)
        }
        UnaryOp::Logistic => {
            let one = g.splat_like(1.0, y)?;
            let rest = g.binary(Sub, one, y)?;
            let slope = g.binary(Mul, y, rest)?;
            g.binary(Mul, dy, slope)
        }
        UnaryOp::Erf => {
            let exponent = squared_plus(g, x, -1.0, 0.0)?;
            let bell = g.unary(UnaryOp::Exp, exponent)?;
            let slope = g.scale(bell, std::f64::consts::FRAC_2_SQRT_PI)?;
            g.binary(Mul, dy, slope)
        }
        UnaryOp::Gelu | UnaryOp::GeluSlope | UnaryOp::GeluTanh | UnaryOp::GeluTanhSlope => derivative_of_gelu(op, g, x, dy),
        UnaryOp::Sin => times(g, dy, UnaryOp::Cos, x),
        UnaryOp::Cos => {
            let product = times(g, dy, UnaryOp::Sin, x)?;
            g.unary(UnaryOp::Neg, product)
        }
        UnaryOp::Tan => {
            let slope = squared_plus(g, y, 1.0, 1.0)?;
            g.binary(Mul, dy, slope)
        }
        UnaryOp::Sinh => times(g, dy, UnaryOp::Cosh, x),
        UnaryOp::Cosh => times(g, dy, UnaryOp::Sinh, x),
        UnaryOp::Asin | UnaryOp::Acos => {
            let inner = squared_plus(g, x, -1.0, 1.0)?;
            let dx = times(g, dy, UnaryOp::Rsqrt, inner)?;
            if op == UnaryOp::Asin { Ok(dx) } else { g.unary(UnaryOp::Neg, dx) }
        }
        UnaryOp::Asinh | UnaryOp::Acosh => {
            let inner = squared_plus(g, x, 1.0, if op == UnaryOp::Asinh { 1.0 } else { -1.0 })?;
            times(g, dy, UnaryOp::Rsqrt, inner)
        }
        UnaryOp::Atan | UnaryOp::Atanh => {
            let inner = squared_plus(g, x, if op == UnaryOp::Atan { 1.0 } else { -1.0 }, 1.0)?;
            g.binary(Div, dy, inner)
        }
        _ => Err(g.broken(y, "a function without derivative")),
    }
}

/// dx of the functions around GELU.
fn derivative_of_gelu(op: UnaryOp, g: &mut Grad, x: NodeId, dy: NodeId) -> Result<NodeId> {
    let slope = match op {
        UnaryOp::Gelu => g.unary(UnaryOp::GeluSlope, x)?,
        UnaryOp::GeluTanh => g.unary(UnaryOp::GeluTanhSlope, x)?,
        UnaryOp::GeluSlope => gelu_curvature(g, x)?,
        _ => gelu_tanh_curvature(g, x)?,
    };
    g.binary(BinaryOp::Mul, dy, slope)
}

/// The second derivative of `gelu`: exp(-x²/2) (2 - x²) / √(2π).
fn gelu_curvature(g: &mut Grad, x: NodeId) -> Result<NodeId> {
    let square = g.binary(BinaryOp::Mul, x, x)?;
    let exponent = g.scale(square, -0.5)?;
    let bell = g.unary(UnaryOp::Exp, exponent)?;
    let rest = squared_plus(g, x, -1.0, 2.0)?;
    let product = g.binary(BinaryOp::Mul, bell, rest)?;
    g.scale(product, INV_SQRT_2PI)
}

/// The second derivative of `gelu_tanh`, with t the tanh of u: (1 - t²) (u' + x (u''/2 - t u'²)).
fn gelu_tanh_curvature(g: &mut Grad, x: NodeId) -> Result<NodeId> {
    use BinaryOp::{Add, Mul, Sub};
    let square = g.binary(Mul, x, x)?;
    let scaled = g.scale(square, CUBE)?;
    let inner = g.binary_scalar(Add, scaled, 1.0)?;
    let inner = g.binary(Mul, inner, x)?;
    let inner = g.scale(inner, gelu_scale())?;
    let t = g.unary(UnaryOp::Tanh, inner)?;
    let first = g.scale(square, 3.0 * CUBE * gelu_scale())?;
    let first = g.binary_scalar(Add, first, gelu_scale())?;
    let half_second = g.scale(x, 3.0 * CUBE * gelu_scale())?;
    let bent = g.binary(Mul, first, first)?;
    let bent = g.binary(Mul, bent, t)?;
    let rest = g.binary(Sub, half_second, bent)?;
    let rest = g.binary(Mul, rest, x)?;
    let sum = g.binary(Add, first, rest)?;
    let flat = squared_plus(g, t, -1.0, 1.0)?;
    g.binary(Mul, flat, sum)
}

/// `dy · op(x)`.
fn times(g: &mut Grad, dy: NodeId, op: UnaryOp, x: NodeId) -> Result<NodeId> {
    let slope = g.unary(op, x)?;
    g.binary(BinaryOp::Mul, dy, slope)
}

/// `sign · x² + constant`, for a sign of ±1.
fn squared_plus(g: &mut Grad, x: NodeId, sign: f64, constant: f64) -> Result<NodeId> {
    let square = g.binary(BinaryOp::Mul, x, x)?;
    match (sign < 0.0, constant == 0.0) {
        (false, _) => g.binary_scalar(BinaryOp::Add, square, constant),
        (true, true) => g.unary(UnaryOp::Neg, square),
        (true, false) => {
            let constant = g.splat_like(constant, square)?;
            g.binary(BinaryOp::Sub, constant, square)
        }
    }
}
