//! Arithmetic of one element: floats of any width in f64, integers in i64 wrapped to their width.

use super::SimulateError;
use crate::kernel::{BinaryOp, CompareOp, UnaryOp};
use crate::types::{DType, Reduce};

/// An element; bool is an integer 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    Float(f64),
    Int(i64),
}

impl Value {
    pub fn zero(dtype: DType) -> Value {
        if dtype.is_float() { Value::Float(0.0) } else { Value::Int(0) }
    }

    pub fn from_f64(dtype: DType, value: f64) -> Value {
        if dtype.is_float() { Value::Float(value) } else { Value::Int(value as i64) }
    }

    pub fn as_f64(self) -> f64 {
        match self {
            Value::Float(x) => x,
            Value::Int(x) => x as f64,
        }
    }

    pub fn float(self) -> Result<f64, SimulateError> {
        match self {
            Value::Float(x) => Ok(x),
            Value::Int(_) => Err(SimulateError::fault("an integer where a float is due")),
        }
    }

    pub fn int(self) -> Result<i64, SimulateError> {
        match self {
            Value::Int(x) => Ok(x),
            Value::Float(_) => Err(SimulateError::fault("a float where an integer is due")),
        }
    }
}

/// `x` wrapped to the width of `dtype`.
fn wrap(dtype: DType, x: i64) -> Value {
    Value::Int(match dtype {
        DType::Bool => i64::from(x != 0),
        DType::U8 => i64::from(x as u8),
        DType::I8 => i64::from(x as i8),
        DType::U16 => i64::from(x as u16),
        DType::I16 => i64::from(x as i16),
        DType::U32 => i64::from(x as u32),
        DType::I32 => i64::from(x as i32),
        _ => x,
    })
}

pub(super) fn cast(to: DType, from: DType, x: Value) -> Value {
    match x {
        Value::Float(x) if to.is_float() => Value::Float(x),
        Value::Float(x) if to == DType::Bool => Value::Int(i64::from(x != 0.0)),
        Value::Float(x) if to == DType::U64 => Value::Int(x as u64 as i64),
        Value::Float(x) => wrap(to, x as i64),
        Value::Int(x) if to.is_float() && from == DType::U64 => Value::Float(x as u64 as f64),
        Value::Int(x) if to.is_float() => Value::Float(x as f64),
        Value::Int(x) => wrap(to, x),
    }
}

pub(super) fn unary(op: UnaryOp, dtype: DType, x: Value) -> Value {
    let x = match x {
        Value::Float(x) => x,
        Value::Int(x) => {
            return match op {
                UnaryOp::Neg => wrap(dtype, x.wrapping_neg()),
                UnaryOp::Abs => wrap(dtype, x.wrapping_abs()),
                UnaryOp::Sign => Value::Int(x.signum()),
                UnaryOp::Not if dtype == DType::Bool => Value::Int(1 - x),
                _ => wrap(dtype, !x),
            };
        }
    };
    let flag = |b: bool| Value::Int(i64::from(b));
    Value::Float(match op {
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
        UnaryOp::Erf => erf(x),
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
        UnaryOp::Not => f64::NAN,
        UnaryOp::IsNan => return flag(x.is_nan()),
        UnaryOp::IsInf => return flag(x.is_infinite()),
    })
}

/// The distribution function of the standard normal distribution.
fn normal(x: f64) -> f64 {
    0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2))
}

/// What `gelu_tanh` takes the tanh of, and its derivative. Hendrycks and Gimpel 2016, arXiv 1606.08415.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    (scale * (x + 0.044715 * x * x * x), scale * (1.0 + 3.0 * 0.044715 * x * x))
}

pub(super) fn binary(op: BinaryOp, dtype: DType, a: Value, b: Value) -> Value {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(match op {
            BinaryOp::Add => a + b,
            BinaryOp::Sub => a - b,
            BinaryOp::Mul => a * b,
            BinaryOp::Div => a / b,
            BinaryOp::Rem => a % b,
            BinaryOp::Pow => a.powf(b),
            BinaryOp::Max | BinaryOp::Min if a.is_nan() || b.is_nan() => f64::NAN,
            BinaryOp::Max => a.max(b),
            BinaryOp::Min => a.min(b),
            BinaryOp::RoundStochastic => round_stochastic(a, b),
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => f64::NAN,
        }),
        (Value::Int(a), Value::Int(b)) => integer(op, dtype, a, b),
        _ => Value::Float(f64::NAN),
    }
}

fn integer(op: BinaryOp, dtype: DType, a: i64, b: i64) -> Value {
    let unsigned = dtype == DType::U64;
    let less = if unsigned { (a as u64) < b as u64 } else { a < b };
    wrap(
        dtype,
        match op {
            BinaryOp::Add => a.wrapping_add(b),
            BinaryOp::Sub => a.wrapping_sub(b),
            BinaryOp::Mul => a.wrapping_mul(b),
            BinaryOp::Div | BinaryOp::Rem if b == 0 => 0,
            BinaryOp::Div if unsigned => (a as u64 / b as u64) as i64,
            BinaryOp::Div => a.wrapping_div(b),
            BinaryOp::Rem if unsigned => (a as u64 % b as u64) as i64,
            BinaryOp::Rem => a.wrapping_rem(b),
            BinaryOp::Pow if b < 0 => i64::from(a == 1),
            BinaryOp::Pow => (0..b.min(64)).fold(1i64, |p, _| p.wrapping_mul(a)),
            BinaryOp::Max => {
                if less {
                    b
                } else {
                    a
                }
            }
            BinaryOp::Min => {
                if less {
                    a
                } else {
                    b
                }
            }
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            BinaryOp::Xor => a ^ b,
            // Of floats alone.
            BinaryOp::RoundStochastic => a,
        },
    )
}

/// `x`, which f32 holds first, as one of its neighbours among multiples of bf16's last digit: away from zero where the fraction between
/// them and the leading 16 bits of `u` add up to a whole. Values at the border of that may differ by a last digit from a program's, if these
/// computed another sum.
fn round_stochastic(x: f64, u: f64) -> f64 {
    let x = f64::from(x as f32);
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let mut digit = 2.0_f64.powi(-133);
    while digit * 256.0 <= x.abs() {
        digit *= 2.0;
    }
    let whole = (x.abs() / digit).floor();
    let fraction = x.abs() / digit - whole;
    let up = (fraction * 65536.0).floor() + (u * 65536.0).floor() >= 65536.0;
    let rounded = (whole + f64::from(u8::from(up))) * digit;
    let held = if rounded >= 2.0_f64.powi(128) { f64::INFINITY } else { rounded };
    held.copysign(x)
}

pub(super) fn compare(op: CompareOp, dtype: DType, a: Value, b: Value) -> Value {
    let order = match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.partial_cmp(&b),
        (Value::Int(a), Value::Int(b)) if dtype == DType::U64 => Some((a as u64).cmp(&(b as u64))),
        (Value::Int(a), Value::Int(b)) => Some(a.cmp(&b)),
        _ => None,
    };
    Value::Int(i64::from(match op {
        CompareOp::Eq => order.is_some_and(|o| o.is_eq()),
        CompareOp::Ne => order.is_none_or(|o| o.is_ne()),
        CompareOp::Lt => order.is_some_and(|o| o.is_lt()),
        CompareOp::Le => order.is_some_and(|o| o.is_le()),
        CompareOp::Gt => order.is_some_and(|o| o.is_gt()),
        CompareOp::Ge => order.is_some_and(|o| o.is_ge()),
    }))
}

pub(super) fn combine(reduce: Reduce, dtype: DType, a: Value, b: Value) -> Value {
    let op = match reduce {
        Reduce::Sum => BinaryOp::Add,
        Reduce::Prod => BinaryOp::Mul,
        Reduce::Max => BinaryOp::Max,
        Reduce::Min => BinaryOp::Min,
    };
    binary(op, dtype, a, b)
}

/// What a reduction starts from.
pub(super) fn neutral(reduce: Reduce, dtype: DType) -> Value {
    let (low, high) = match dtype {
        DType::Bool => (0, 1),
        DType::U8 => (0, u8::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::U64 => (0, -1),
        _ => (i64::MIN, i64::MAX),
    };
    let (float, int) = match reduce {
        Reduce::Sum => (0.0, 0),
        Reduce::Prod => (1.0, 1),
        Reduce::Max => (f64::NEG_INFINITY, low),
        Reduce::Min => (f64::INFINITY, high),
    };
    if dtype.is_float() { Value::Float(float) } else { Value::Int(int) }
}

/// 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!: all terms of one sign, so no digits are lost. Abramowitz and Stegun 7.1.6.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-18 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// `Expr::Uniform`. Salmon, Moraes, Dror, Shaw 2011, philox4x32-10.
pub(super) fn uniform(id: u32, seed: i64, step: i64, element: i64) -> f64 {
    let element = element as u64;
    let block = element / 4;
    let mut counter = [block as u32, (block >> 32) as u32, id, step as u32];
    let (mut k0, mut k1) = (seed as u32, ((seed as u64) >> 32) as u32);
    for _ in 0..10 {
        let p0 = u64::from(counter[0]) * 0xD251_1F53;
        let p1 = u64::from(counter[2]) * 0xCD9E_8D57;
        let high = |p: u64| (p >> 32) as u32;
        counter = [high(p1) ^ counter[1] ^ k0, p1 as u32, high(p0) ^ counter[3] ^ k1, p0 as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    f64::from(counter[(element % 4) as usize] >> 8) / f64::from(1u32 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_matches_tables() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [(0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (2.0, 0.995_322_265_0), (-1.0, -0.842_700_792_9)] {
            assert!((erf(x) - y).abs() < 1e-10, "{x}");
        }
    }

    #[test]
    fn rounding_is_that_of_the_bits() {
        let mut word = 1_u32;
        for element in 0..100_000 {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (x, u) = (f32::from_bits(word ^ word >> 9), uniform(0, 1, 2, element));
            let (found, due) = (round_stochastic(x.into(), u), f64::from(crate::rounding::stochastic(x, u as f32)));
            assert!(found == due || found.is_nan() && due.is_nan(), "{x:e} with {u}: {found:e}, {due:e}");
        }
    }

    #[test]
    fn uniform_is_philox() {
        // Random123's known-answer test: key and counter zero give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
        let words = [0x6627_e8d5u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        for (element, word) in words.into_iter().enumerate() {
            assert_eq!(uniform(0, 0, 0, element as i64), f64::from(word >> 8) / 16_777_216.0);
        }
    }
}
