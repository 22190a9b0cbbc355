//! Constants, and what depends on shapes alone.

use bytes::Bytes;
use dcc_program::{DType, Shape};

use super::{Call, Import, sizes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::parameters::Origin;
use crate::import::rescale::Guess;
use crate::import::tensor::{Tensor, TensorData};
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] =
    &[("Constant", constant), ("ConstantOfShape", constant_of_shape), ("Range", range), ("Shape", shape), ("Size", size)];

/// A float tensor in a Constant node is a weight like any other, named as the node's output.
fn constant(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let node = call.node;
    let value = if let Some(proto) = node.tensor("value")? {
        let tensor = Tensor::new(call.model, call.output, proto)?;
        call.classifier.value(build, call.model, tensor, Origin::Constant)?
    } else if let Some(int) = node.int("value_int")? {
        Known::int(DType::I64, int).into()
    } else if let Some(ints) = node.ints("value_ints")? {
        Known::ints(ints.iter().copied()).into()
    } else if let Some(float) = node.float("value_float")? {
        Known::scalar(DType::F32, float).into()
    } else if let Some(floats) = node.floats("value_floats")? {
        let bytes: Bytes = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
        let shape = Shape::from_slice(&[floats.len() as u64]);
        let tensor = Tensor { name: call.output.to_owned(), dtype: DType::F32, shape, data: TensorData::Owned(bytes) };
        call.classifier.value(build, call.model, tensor, Origin::Constant)?
    } else {
        return Err(Error::attribute("a constant that is neither a dense tensor nor numbers"));
    };
    Ok(vec![value])
}

fn constant_of_shape(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut shape = sizes(&call.known_ints(build, 0)?)?;
    let mut guessed = false;
    if let Some(rescale) = &build.rescale {
        (shape, guessed) = rescale.constant(&shape);
    }
    let known = match call.node.tensor("value")? {
        None => Known::scalar(DType::F32, 0.0),
        Some(proto) => {
            let tensor = Tensor::new(call.model, "value", proto)?;
            Known::read(&tensor, &tensor.bytes(call.model)?)?
        }
    };
    let splat = known.splat(&shape).ok_or_else(|| Error::tensor("the value of ConstantOfShape is not one element"))?;
    Ok(vec![build.guessed(splat.into(), guessed.then_some(Guess::Constant))?])
}

fn range(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let dtype = call.known(build, 0)?.dtype;
    let [start, limit, step] = [call.known_number(build, 0)?, call.known_number(build, 1)?, call.known_number(build, 2)?];
    if step == 0.0 {
        return Err(Error::shape("a range with step 0"));
    }
    let count = ((limit - start) / step).ceil().max(0.0);
    let (length, guessed) = build.rescale.as_ref().map_or((count as u64, false), |rescale| rescale.count(count as u64));
    let known = Known::range(dtype, start, step, length);
    let known = known.ok_or_else(|| Error::limit(format!("a range of {count} elements")))?.into();
    Ok(vec![build.guessed(known, guessed.then_some(Guess::Range))?])
}

/// From opset 15 on `start` and `end` select dims, clamped to the rank.
fn shape(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = call.input(0)?.shape(build)?;
    let rank = shape.len() as i64;
    let clamp = |at: i64| (if at < 0 { at.saturating_add(rank) } else { at }).clamp(0, rank) as usize;
    let (start, end) = (clamp(call.node.int_or("start", 0)?), clamp(call.node.int_or("end", rank)?));
    let dims = shape.get(start..end.max(start)).unwrap_or(&[]);
    Ok(vec![Known::ints(dims.iter().map(|&dim| dim as i64)).into()])
}

fn size(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let elements: u64 = call.input(0)?.shape(build)?.iter().product();
    Ok(vec![Known::int(DType::I64, elements as i64).into()])
}
