//! Pools: maxima, means and norms over windows.
//!
//! A sum over windows is a convolution with a kernel of ones that no channel has a dim of.

use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, FactorSpec, Pool, Reduce, Shape};

use super::conv::convolution;
use super::windows::{Windows, auto_pad, names};
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;
use crate::ops::MaxPool;

pub const ONNX: &[(&str, Import)] = &[
    ("AveragePool", average_pool),
    ("GlobalAveragePool", |b, c| global(b, c, |b, x, dims| b.mean(x, dims, true))),
    ("GlobalLpPool", global_lp_pool),
    ("GlobalMaxPool", global_max_pool),
    ("LpPool", lp_pool),
    ("MaxPool", max_pool),
];

/// The shape of an image with batch and channels.
fn image_shape(build: &Build, call: &Call) -> Result<Shape> {
    let shape = call.input(0)?.shape(build)?;
    if shape.len() < 3 {
        return Err(Error::shape(format!("{} of {:?}: batch, channels and spatial dims expected", call.node.op, &shape[..])));
    }
    Ok(shape)
}

fn windows(call: &Call, shape: &[u64]) -> Result<(Windows, Vec<u64>)> {
    let mut windows = Windows::new(call, &shape[2..], None)?;
    windows.resolve(auto_pad(call)?);
    let outputs = windows.outputs(call.node.flag("ceil_mode", false)?)?;
    Ok((windows, outputs))
}

/// Sums over windows, each times `weight`.
fn window_sum(build: &mut Build, x: &Value, weight: f64, windows: &Windows, outputs: &[u64]) -> Result<Value> {
    let windows = &windows.clipped();
    let ones = Known::scalar(x.dtype(build)?, weight).splat(&windows.taps).expect("a scalar is uniform");
    let dims = windows.rank();
    let spec = format!("n c {}, {} -> n c {}", names('x', dims), names('k', dims), names('y', dims));
    convolution(build, (x, &ones.into()), &spec, windows, outputs)
}

fn average_pool(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = image_shape(build, call)?;
    let (windows, outputs) = windows(call, &shape)?;
    let padded = call.node.flag("count_include_pad", false)?;
    if windows.pads.iter().all(|pads| *pads == [0, 0])
        && windows.clipped().taps[..] == shape[2..]
        && windows.dilations.iter().all(|&d| d == 1)
    {
        return Ok(vec![build.mean(x, &(2..shape.len()).collect::<Vec<_>>(), true)?]);
    }
    // Elements of a window are counted dim by dim; where all have as many, the kernel has the factor.
    let counts = (0..windows.rank()).map(|d| counts(&windows, d, outputs[d], padded)).collect::<Result<Vec<Vec<u64>>>>()?;
    let uniform = |counts: &Vec<u64>| counts.iter().all(|count| *count == counts[0]);
    let weight: f64 = counts.iter().filter(|c| uniform(c)).map(|c| c[0] as f64).product();
    let mut y = window_sum(build, x, 1.0 / weight, &windows, &outputs)?;
    for (d, counts) in counts.iter().enumerate().filter(|(_, c)| !uniform(c)) {
        let factors = Known::floats(x.dtype(build)?, counts.iter().map(|&count| 1.0 / count.max(1) as f64));
        let mut line = vec![1; shape.len()];
        line[d + 2] = outputs[d];
        let factors = build.reshape(&factors.into(), &line)?;
        y = build.binary(BinaryOp::Mul, &y, &factors)?;
    }
    Ok(vec![y])
}

/// Elements of each window along a dim: of the image, or of the image with its pads.
fn counts(windows: &Windows, d: usize, outputs: u64, padded: bool) -> Result<Vec<u64>> {
    if outputs > 1 << 24 {
        return Err(Error::limit(format!("{outputs} windows along a dim")));
    }
    let (size, [before, after]) = (windows.image[d] as i64, windows.pads[d]);
    let inside = if padded { -before..size + after } else { 0..size };
    let (step, taps) = (windows.dilations[d] as i64, windows.taps[d] as i64);
    let count = |output: u64| {
        let first = windows.strides[d] as i64 * output as i64 - before;
        let reach = |end: i64| (end - first + step - 1).div_euclid(step).clamp(0, taps);
        (reach(inside.end) - reach(inside.start)) as u64
    };
    Ok((0..outputs).map(count).collect())
}

/// `|x|ᵖ` summed by `sum`, to the power 1/p.
fn norm(build: &mut Build, call: &Call, x: &Value, sum: impl FnOnce(&mut Build, &Value) -> Result<Value>) -> Result<Value> {
    let p = call.node.int_or("p", 2)?;
    match p {
        1 => {
            let size = build.unary(UnaryOp::Abs, x)?;
            sum(build, &size)
        }
        2 => {
            let square = build.binary(BinaryOp::Mul, x, x)?;
            let sum = sum(build, &square)?;
            build.unary(UnaryOp::Sqrt, &sum)
        }
        3.. => {
            let size = build.unary(UnaryOp::Abs, x)?;
            let power = build.binary_scalar(BinaryOp::Pow, &size, p as f64)?;
            let sum = sum(build, &power)?;
            build.binary_scalar(BinaryOp::Pow, &sum, 1.0 / p as f64)
        }
        _ => Err(attribute_value("p", p)),
    }
}

fn lp_pool(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = image_shape(build, call)?;
    let (windows, outputs) = windows(call, &shape)?;
    Ok(vec![norm(build, call, call.input(0)?, |build, x| window_sum(build, x, 1.0, &windows, &outputs))?])
}

fn global(
    build: &mut Build,
    call: &Call,
    reduce: impl FnOnce(&mut Build, &Value, &[usize]) -> Result<Value>,
) -> Result<Vec<Value>> {
    let dims: Vec<usize> = (2..image_shape(build, call)?.len()).collect();
    Ok(vec![reduce(build, call.input(0)?, &dims)?])
}

fn global_lp_pool(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    global(build, call, |build, x, dims| norm(build, call, x, |build, x| build.reduce(Reduce::Sum, x, dims, true)))
}

/// The windows' maxima, whose gradient goes to the first of equal elements as PyTorch's does; and where they are.
fn maxima(build: &mut Build, x: &Value, windows: &Windows, outputs: &[u64], places: bool) -> Result<(Value, Option<Value>)> {
    let shape = x.shape(build)?;
    let dtype = x.dtype(build)?;
    // Small integers are exact in f32.
    let computed = if matches!(dtype, DType::F32 | DType::F64) { dtype } else { DType::F32 };
    let image = build.cast(x, computed)?;
    let image = build.reshape(&image, &[shape[0], shape[1], shape[2..].iter().product()])?;
    let image = build.node(&image)?;
    let spec = FactorSpec::parse("n c x -> n c y").expect("a spec of ours parses");
    let pool = Pool { spec, dims: windows.clipped().pool_dims(outputs) };
    let result: Shape = shape[..2].iter().chain(outputs).copied().collect();
    let y = build.graph.add(MaxPool { pool: pool.clone(), out: 0 }, &[image])?.into();
    let y = build.reshape(&y, &result)?;
    let y = build.cast(&y, dtype)?;
    if !places {
        return Ok((y, None));
    }
    let at = build.graph.add(MaxPool { pool, out: 1 }, &[image])?.into();
    let at = build.cast(&at, DType::I64)?;
    Ok((y, Some(build.reshape(&at, &result)?)))
}

fn max_pool(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = image_shape(build, call)?;
    let (windows, outputs) = windows(call, &shape)?;
    let column_major = call.node.flag("storage_order", false)?;
    let (y, places) = maxima(build, call.input(0)?, &windows, &outputs, call.wants(1))?;
    let Some(mut place) = places else { return Ok(vec![y]) };
    if column_major {
        place = to_column_major(build, &place, &shape[2..])?;
    }
    // ONNX counts through the whole tensor.
    let plane: u64 = shape[2..].iter().product();
    let planes = Known::range(DType::I64, 0.0, plane as f64, shape[0] * shape[1]);
    let planes = planes.ok_or_else(|| Error::limit(format!("{} planes", shape[0] * shape[1])))?;
    let mut each = vec![1; shape.len()];
    each[..2].copy_from_slice(&shape[..2]);
    let planes = build.reshape(&planes.into(), &each)?;
    Ok(vec![y, build.binary(BinaryOp::Add, &place, &planes)?])
}

/// Row-major places in an image of `shape` as column-major ones.
fn to_column_major(build: &mut Build, place: &Value, shape: &[u64]) -> Result<Value> {
    let (mut rest, mut sum) = (place.clone(), None);
    let mut below: u64 = shape.iter().product();
    let mut stride = 1;
    for &size in shape {
        below /= size;
        let index = build.binary_scalar(BinaryOp::Div, &rest, below as f64)?;
        rest = build.binary_scalar(BinaryOp::Rem, &rest, below as f64)?;
        let term = build.binary_scalar(BinaryOp::Mul, &index, stride as f64)?;
        sum = Some(match sum {
            Some(sum) => build.binary(BinaryOp::Add, &sum, &term)?,
            None => term,
        });
        stride *= size;
    }
    Ok(sum.expect("an image has a dim"))
}

fn global_max_pool(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = image_shape(build, call)?;
    let dims = shape.len() - 2;
    let windows = Windows {
        image: Shape::from_slice(&shape[2..]),
        taps: shape[2..].to_vec(),
        strides: vec![1; dims],
        dilations: vec![1; dims],
        pads: vec![[0; 2]; dims],
    };
    Ok(vec![maxima(build, call.input(0)?, &windows, &vec![1; dims], false)?.0])
}
