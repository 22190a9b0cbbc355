//! Linear quantisation. Rounding has no slope; a value that is quantised and dequantised again, with one scale, passes its gradient
//! straight through where it is in range, and none to the scale, as PyTorch's `fake_quantize`: so models train for quantisation.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, Reduce, Shape};

use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::tensor::dtype;
use crate::import::value::{Value, axis};

pub const ONNX: &[(&str, Import)] = &[
    ("DequantizeLinear", dequantize_linear),
    ("DynamicQuantizeLinear", dynamic_quantize_linear),
    ("QuantizeLinear", quantize_linear),
];

/// Least and greatest value of a quantised type.
fn range(dtype: DType) -> Result<(f64, f64)> {
    Ok(match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (-128.0, 127.0),
        DType::U16 => (0.0, 65535.0),
        DType::I16 => (-32768.0, 32767.0),
        other => return Err(Error::dtype(format!("quantised values of {}", other.name()))),
    })
}

/// An attribute that names a type, 0 for none.
fn named_type(call: &Call, name: &str) -> Result<Option<DType>> {
    match call.node.int_or(name, 0)? {
        0 => Ok(None),
        code => Ok(Some(dtype(i32::try_from(code).unwrap_or(0))?)),
    }
}

/// A scale or zero point against `shape`: of the whole tensor, of each index along the axis, or of blocks along it.
fn spread(build: &mut Build, call: &Call, value: &Value, shape: &[u64]) -> Result<Value> {
    let given = value.shape(build)?;
    let block = call.node.int_or("block_size", 0)?;
    let at = call.node.int_or("axis", 1)?;
    if given.iter().product::<u64>() == 1 {
        return build.reshape(value, &[]);
    }
    let dim = axis(at, shape.len())?;
    if block == 0 {
        let line: Vec<u64> = (0..shape.len()).map(|d| if d == dim { shape[dim] } else { 1 }).collect();
        return build.reshape(value, &line);
    }
    let block = u64::try_from(block).map_err(|_| attribute_value("block_size", block))?;
    let fits = given.len() == shape.len()
        && (0..shape.len()).all(|d| if d == dim { given[d] == shape[d].div_ceil(block) } else { given[d] == shape[d] });
    if !fits {
        return Err(Error::shape(format!("scales {:?} of blocks of {block} in {shape:?}", given.as_slice())));
    }
    let mut wide: Shape = given.clone();
    wide.insert(dim + 1, 1);
    let value = build.reshape(value, &wide)?;
    wide[dim + 1] = block;
    let value = build.broadcast(&value, &wide)?;
    wide.remove(dim + 1);
    wide[dim] *= block;
    let value = build.reshape(&value, &wide)?;
    build.narrow(&value, dim, 0, shape[dim])
}

/// What a value of the graph was quantised from.
#[derive(Clone, Debug)]
pub struct Quantised {
    x: Value,
    scale: Value,
    zero: Option<Value>,
    /// Where x is not cut to the range of the type.
    inside: Value,
}

impl Quantised {
    /// Whether `call` undoes it.
    fn is_undone_by(&self, call: &Call) -> bool {
        let zeros = match (&self.zero, call.optional(2)) {
            (Some(one), Some(other)) => one.is(other),
            (one, other) => one.as_ref().or(other).is_none_or(|zero| zero.uniform() == Some(0.0)),
        };
        zeros && call.optional(1).is_some_and(|scale| self.scale.is(scale))
    }

    /// `y` with the gradient of x where that is in range: `y + (x - x)`, of which one x is held.
    fn straight_through(&self, build: &mut Build, y: &Value) -> Result<Value> {
        let x = build.cast(&self.x, y.dtype(build)?)?;
        let held = build.stop_gradient(&x)?;
        let change = build.binary(BinaryOp::Sub, &x, &held)?;
        let none = Known::scalar(y.dtype(build)?, 0.0).into();
        let change = build.select(&self.inside, &change, &none)?;
        build.binary(BinaryOp::Add, y, &change)
    }
}

/// `round(x) + zero`, cut to the range of `to`; and where it is in that range.
fn saturated(build: &mut Build, x: &Value, zero: Option<&Value>, to: DType) -> Result<(Value, Value)> {
    let (low, high) = range(to)?;
    let mut y = build.unary(UnaryOp::RoundEven, x)?;
    if let Some(zero) = zero {
        let zero = build.cast(zero, y.dtype(build)?)?;
        y = build.binary(BinaryOp::Add, &y, &zero)?;
    }
    let cut = build.binary_scalar(BinaryOp::Max, &y, low)?;
    let cut = build.binary_scalar(BinaryOp::Min, &cut, high)?;
    let inside = build.compare(CompareOp::Eq, &y, &cut)?;
    Ok((build.cast(&cut, to)?, inside))
}

/// `a / b` rounded once to `dtype`: rounding to integers shows the last bit, which a product with the reciprocal may miss.
fn quotient(build: &mut Build, a: &Value, b: &Value, dtype: DType) -> Result<Value> {
    let (a, b) = (build.cast(a, DType::F64)?, build.cast(b, DType::F64)?);
    let ratio = build.binary(BinaryOp::Div, &a, &b)?;
    build.cast(&ratio, dtype)
}

fn quantize_linear(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    // Concerns the 8-bit floats only, which `range` refuses.
    call.node.ignore("saturate");
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let scale = spread(build, call, call.input(1)?, &shape)?;
    let zero = call.optional(2).map(|zero| spread(build, call, zero, &shape)).transpose()?;
    let named = named_type(call, "output_dtype")?;
    let of_zero = zero.as_ref().map(|zero| zero.dtype(build)).transpose()?;
    if let (Some(named), Some(of_zero)) = (named, of_zero)
        && named != of_zero
    {
        return Err(Error::dtype(format!("output_dtype {} and a zero point of {}", named.name(), of_zero.name())));
    }
    let to = of_zero.or(named).unwrap_or(DType::U8);
    let wide = match named_type(call, "precision")? {
        Some(precision) => precision,
        None if x.dtype(build)?.is_float() => scale.dtype(build)?,
        None => DType::F32,
    };
    let (x, scale) = (build.cast(x, wide)?, build.cast(&scale, wide)?);
    let ratio = quotient(build, &x, &scale, wide)?;
    // Wide enough that the sum with the zero point is exact.
    let ratio = if wide.bytes() < 4 { build.cast(&ratio, DType::F32)? } else { ratio };
    let (quantised, inside) = saturated(build, &ratio, zero.as_ref(), to)?;
    if let (Value::Node(id), true) = (&quantised, x.dtype(build)?.is_float()) {
        let (scale, zero) = (call.input(1)?.clone(), call.optional(2).cloned());
        build.quantised.insert(*id, Quantised { x, scale, zero, inside });
    }
    Ok(vec![quantised])
}

fn dequantize_linear(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let scale = spread(build, call, call.input(1)?, &shape)?;
    let to = named_type(call, "output_dtype")?.unwrap_or(scale.dtype(build)?);
    let wide = if to == DType::F64 { DType::F64 } else { DType::F32 };
    let mut y = build.cast(x, wide)?;
    if let Some(zero) = call.optional(2) {
        let zero = spread(build, call, zero, &shape)?;
        let zero = build.cast(&zero, wide)?;
        y = build.binary(BinaryOp::Sub, &y, &zero)?;
    }
    let scale = build.cast(&scale, wide)?;
    let undone = match x {
        Value::Node(id) => build.quantised.get(id).cloned(),
        _ => None,
    };
    let Some(quantised) = undone.filter(|quantised| quantised.is_undone_by(call)) else {
        let y = build.binary(BinaryOp::Mul, &y, &scale)?;
        return Ok(vec![build.cast(&y, to)?]);
    };
    let scale = build.stop_gradient(&scale)?;
    let y = build.binary(BinaryOp::Mul, &y, &scale)?;
    let y = build.cast(&y, to)?;
    Ok(vec![quantised.straight_through(build, &y)?])
}

/// Results: values of u8, scale, zero point, from the range of x and 0.
fn dynamic_quantize_linear(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let dims: Vec<usize> = (0..x.rank(build)?).collect();
    let high = build.reduce(Reduce::Max, x, &dims, false)?;
    let high = build.binary_scalar(BinaryOp::Max, &high, 0.0)?;
    let low = build.reduce(Reduce::Min, x, &dims, false)?;
    let low = build.binary_scalar(BinaryOp::Min, &low, 0.0)?;
    let dtype = x.dtype(build)?;
    let scale = build.binary(BinaryOp::Sub, &high, &low)?;
    let scale = quotient(build, &scale, &Known::scalar(dtype, 255.0).into(), dtype)?;
    let none: Value = Known::scalar(dtype, 0.0).into();
    let zero = quotient(build, &low, &scale, dtype)?;
    let zero = build.binary(BinaryOp::Sub, &none, &zero)?;
    let (zero, _) = saturated(build, &zero, None, DType::U8)?;
    let ratio = quotient(build, x, &scale, dtype)?;
    let (quantised, _) = saturated(build, &ratio, Some(&zero), DType::U8)?;
    Ok(vec![quantised, scale, zero])
}
