//! Movement of elements: transpose, join, cut, repeat, cast.

use dcc_program::kernel::{BinaryOp, UnaryOp};
use dcc_program::{DType, Shape};

use super::{Call, Import, attribute_value, axes, sizes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::rescale::Guess;
use crate::import::tensor::dtype;
use crate::import::value::{Value, broadcast_shape};
use crate::ops::StopGradient;

pub const ONNX: &[(&str, Import)] = &[
    ("Cast", cast),
    ("CastLike", cast_like),
    ("Concat", concat),
    ("Expand", expand),
    ("Identity", identity),
    ("Pad", pad),
    ("Slice", slice),
    ("Tile", tile),
    ("Transpose", transpose),
    ("Trilu", trilu),
];

fn identity(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let value = call.input(0)?.clone();
    match (call.node.call.target(), value.dtype(build)) {
        // PyTorch's `detach`, which ONNX has no operator for.
        ("aten.detach" | "aten.detach_", Ok(dtype)) if dtype.is_float() && value.known().is_none() => {
            let node = build.node(&value)?;
            Ok(vec![build.graph.add(StopGradient {}, &[node])?.into()])
        }
        _ => Ok(vec![value]),
    }
}

fn cast(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    // Both concern the 8-bit floats only, which `dtype` refuses.
    call.node.ignore("saturate");
    call.node.ignore("round_mode");
    let to = call.node.int("to")?.ok_or_else(|| Error::attribute("Cast without `to`"))?;
    let to = dtype(i32::try_from(to).unwrap_or(0))?;
    Ok(vec![build.cast(call.input(0)?, to)?])
}

fn cast_like(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    call.node.ignore("saturate");
    call.node.ignore("round_mode");
    let to = call.input(1)?.dtype(build)?;
    Ok(vec![build.cast(call.input(0)?, to)?])
}

fn transpose(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let rank = x.rank(build)?;
    let perm = match call.node.ints("perm")? {
        None => (0..rank).rev().collect(),
        Some(perm) => {
            // PyTorch's older exporter counts some from the end.
            let dims: Option<Vec<usize>> = perm.iter().map(|&dim| crate::import::value::axis(dim, rank).ok()).collect();
            let dims = dims.filter(|dims| dims.len() == rank && (0..rank).all(|dim| dims.contains(&dim)));
            dims.ok_or_else(|| Error::shape(format!("perm {perm:?} is no permutation of {rank} dims")))?
        }
    };
    Ok(vec![build.transpose(x, &perm)?])
}

fn concat(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let parts = (0..call.inputs.len()).map(|position| call.input(position).cloned()).collect::<Result<Vec<Value>>>()?;
    let rank = parts[0].rank(build)?;
    let dim = call.axis(0, rank)?;
    Ok(vec![build.concatenate(&parts, dim)?])
}

/// Both ways: dims of size 1 in the wanted shape keep the operand's.
fn expand(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let wanted = sizes(&call.known_ints(build, 1)?)?;
    let (shape, guessed) = match &build.rescale {
        Some(rescale) => rescale.expand(&x.shape(build)?, &wanted)?,
        None => (broadcast_shape(&x.shape(build)?, &wanted)?, false),
    };
    let wide = build.broadcast(x, &shape)?;
    Ok(vec![build.guessed(wide, guessed.then_some(Guess::Constant))?])
}

/// Starts, ends, axes and steps are attributes up to opset 9, inputs from 10 on.
fn slice(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let mut shape = x.shape(build)?;
    let rank = shape.len();
    let missing = || Error::graph("Slice without starts or ends");
    let starts = call.ints_either(build, "starts", 1)?.ok_or_else(missing)?;
    let ends = call.ints_either(build, "ends", 2)?.ok_or_else(missing)?;
    let along = call.ints_either(build, "axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = call.optional(4).map(|_| call.known_ints(build, 4)).transpose()?.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), along.len(), steps.len()] != [starts.len(); 3] {
        return Err(Error::shape("starts, ends, axes and steps have different lengths"));
    }
    axes(&along, rank)?;
    let (mut first, mut stride) = (vec![0; rank], vec![1; rank]);
    for (position, &dim) in along.iter().enumerate() {
        let dim = crate::import::value::axis(dim, rank)?;
        let size = shape[dim] as i64;
        let step = steps[position];
        if step == 0 {
            return Err(attribute_value("steps", 0));
        }
        let end = match &build.rescale {
            Some(rescale) => rescale.end(dim, shape[dim], starts[position], ends[position])?,
            None => ends[position],
        };
        let from_front = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
        let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
        let start = from_front(starts[position]).clamp(low.max(0), high.max(0));
        let end = from_front(end).clamp(low, high.max(low));
        let count = if step > 0 { (end - start).max(0) } else { (start - end).max(0) };
        shape[dim] = (count as u64).div_ceil(step.unsigned_abs()).min(size as u64);
        (first[dim], stride[dim]) = (start, step);
    }
    Ok(vec![build.slice(x, &first, &stride, &shape)?])
}

/// Negative pads cut.
fn pad(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mode = call.node.string_or("mode", "constant")?;
    let mut x = call.input(0)?.clone();
    let rank = x.rank(build)?;
    let pads = call.ints_either(build, "pads", 1)?.ok_or_else(|| Error::graph("Pad without pads"))?;
    let value = match (call.node.float("value")?, call.optional(2)) {
        (None, Some(value)) => value.clone(),
        (number, _) => Known::scalar(x.dtype(build)?, number.unwrap_or(0.0)).into(),
    };
    let along = match call.optional(3) {
        Some(_) => call.known_ints(build, 3)?,
        None => (0..rank as i64).collect(),
    };
    if pads.len() != 2 * along.len() {
        return Err(Error::shape(format!("{} pads for {} axes", pads.len(), along.len())));
    }
    sizes(&pads.iter().map(|pad| pad.saturating_abs()).collect::<Vec<i64>>())?;
    for (position, &dim) in along.iter().enumerate() {
        let dim = crate::import::value::axis(dim, rank)?;
        let (low, high) = (pads[position], pads[position + along.len()]);
        let size = x.shape(build)?[dim];
        let (cut_low, cut_high) = (low.min(0).unsigned_abs(), high.min(0).unsigned_abs());
        let left = size.checked_sub(cut_low).and_then(|left| left.checked_sub(cut_high));
        let left = left.ok_or_else(|| Error::shape(format!("pads {low} and {high} of a dim of {size}")))?;
        x = build.narrow(&x, dim, cut_low, left)?;
        let (low, high) = (low.max(0) as u64, high.max(0) as u64);
        x = match mode {
            "constant" => build.pad_with(&x, dim, low, high, &value)?,
            _ => pad_by_copies(build, &x, dim, low, high, mode)?,
        };
    }
    Ok(vec![x])
}

/// What is added on either side of `dim` comes from x: its outermost element (`edge`), its mirror image (`reflect`) or its
/// other end (`wrap`).
fn pad_by_copies(build: &mut Build, x: &Value, dim: usize, low: u64, high: u64, mode: &str) -> Result<Value> {
    let shape = x.shape(build)?;
    let size = shape[dim];
    let reach = if mode == "reflect" { size.saturating_sub(1) } else { size };
    if mode != "edge" && low.max(high) > reach || size == 0 {
        return Err(Error::shape(format!("{mode} pads {low} and {high} of a dim of {size}")));
    }
    let side = |build: &mut Build, count: u64, start: u64, back: bool| -> Result<Value> {
        let (mut first, mut step, mut part) = (vec![0; shape.len()], vec![1; shape.len()], shape.clone());
        (first[dim], part[dim]) = (start as i64, count);
        if back {
            step[dim] = -1;
        }
        build.slice(x, &first, &step, &part)
    };
    let (before, after) = match mode {
        "reflect" => (side(build, low, low, true)?, side(build, high, size.saturating_sub(2), true)?),
        "wrap" => (side(build, low, size - low, false)?, side(build, high, 0, false)?),
        "edge" => {
            let mut ends = [(low, 0), (high, size - 1)].into_iter().map(|(count, at)| {
                let mut wide = shape.clone();
                wide[dim] = count;
                let end = build.narrow(x, dim, at, 1)?;
                if count == 0 { build.narrow(&end, dim, 0, 0) } else { build.broadcast(&end, &wide) }
            });
            let first = ends.next().expect("two ends")?;
            (first, ends.next().expect("two ends")?)
        }
        other => return Err(attribute_value("mode", format!("`{other}`"))),
    };
    build.concatenate(&[before, x.clone(), after], dim)
}

fn tile(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let repeats = sizes(&call.known_ints(build, 1)?)?;
    if repeats.len() != shape.len() {
        return Err(Error::shape(format!("{} repeats for {} dims", repeats.len(), shape.len())));
    }
    let pairs = |repeats: &Shape| -> Vec<u64> { repeats.iter().zip(&shape).flat_map(|(&r, &size)| [r, size]).collect() };
    let wide = build.reshape(x, &pairs(&Shape::from_elem(1, shape.len())))?;
    let wide = build.broadcast(&wide, &pairs(&repeats))?;
    let tiled: Option<Vec<u64>> = repeats.iter().zip(&shape).map(|(&r, &size)| r.checked_mul(size)).collect();
    let tiled = tiled.ok_or_else(|| Error::limit(format!("{:?} repeated {:?} times", shape.as_slice(), repeats.as_slice())))?;
    Ok(vec![build.reshape(&wide, &tiled)?])
}

/// The lower (or upper) triangle of the last two dims, moved by k; 0 elsewhere.
fn trilu(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let rank = shape.len();
    if rank < 2 {
        return Err(Error::shape(format!("Trilu of rank {rank}")));
    }
    let offset = call.optional(1).map_or(Ok(0.0), |_| call.known_number(build, 1))? as i64;
    let kept = if call.node.flag("upper", true)? {
        let below = build.lower_triangle(&shape, rank - 2, rank - 1, offset.saturating_sub(1))?;
        build.unary(UnaryOp::Not, &below)?
    } else {
        build.lower_triangle(&shape, rank - 2, rank - 1, offset)?
    };
    let dtype = x.dtype(build)?;
    if dtype == DType::Bool {
        return Ok(vec![build.binary(BinaryOp::And, &kept, x)?]);
    }
    Ok(vec![build.select(&kept, x, &Known::scalar(dtype, 0.0).into())?])
}
