//! Movement of blocks: depth and space, columns to images, crops, reversed and selected lines.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, FactorSpec, Shape};

use super::{Call, Import, attribute_value, axes, sizes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::tensor::dtype;
use crate::import::value::Value;
use crate::ops::Pad;

pub const ONNX: &[(&str, Import)] = &[
    ("CenterCropPad", center_crop_pad),
    ("Col2Im", col2im),
    ("Compress", compress),
    ("DepthToSpace", depth_to_space),
    ("EyeLike", eye_like),
    ("ReverseSequence", reverse_sequence),
    ("SpaceToDepth", space_to_depth),
];

/// `[samples, channels, height, width]` and the block size.
fn blocks(build: &Build, call: &Call) -> Result<([u64; 4], u64)> {
    let shape = call.input(0)?.shape(build)?;
    let given = call.node.int_or("blocksize", 0)?;
    let size = u64::try_from(given).ok().filter(|&size| size > 0).ok_or_else(|| attribute_value("blocksize", given))?;
    let image = <[u64; 4]>::try_from(&shape[..]);
    let image = image.map_err(|_| Error::shape(format!("{} of {:?}, which is no image", call.node.op, shape.as_slice())))?;
    let fits = |dim: &u64| size.checked_mul(size).is_some_and(|square| dim.checked_mul(square).is_some());
    if !image.iter().all(fits) {
        return Err(Error::shape(format!("{image:?} with blocks of {size} × {size}")));
    }
    Ok((image, size))
}

fn depth_to_space(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let ([n, c, h, w], b) = blocks(build, call)?;
    if !c.is_multiple_of(b * b) {
        return Err(Error::shape(format!("{c} channels into blocks of {b} × {b}")));
    }
    let depth = c / (b * b);
    let (split, perm) = match call.node.string_or("mode", "DCR")? {
        "DCR" => ([n, b, b, depth, h, w], [0, 3, 4, 1, 5, 2]),
        "CRD" => ([n, depth, b, b, h, w], [0, 1, 4, 2, 5, 3]),
        other => return Err(attribute_value("mode", format!("`{other}`"))),
    };
    let x = build.reshape(call.input(0)?, &split)?;
    let x = build.transpose(&x, &perm)?;
    Ok(vec![build.reshape(&x, &[n, depth, h * b, w * b])?])
}

/// The block's place counts before the channel, as in the DCR mode of its inverse; from opset 28 on the mode is an attribute.
fn space_to_depth(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let ([n, c, h, w], b) = blocks(build, call)?;
    if !h.is_multiple_of(b) || !w.is_multiple_of(b) {
        return Err(Error::shape(format!("{h} × {w} into blocks of {b} × {b}")));
    }
    let perm = match call.node.string_or("mode", "DCR")? {
        "DCR" => [0, 3, 5, 1, 2, 4],
        "CRD" => [0, 1, 3, 5, 2, 4],
        other => return Err(attribute_value("mode", format!("`{other}`"))),
    };
    let x = build.reshape(call.input(0)?, &[n, c, h / b, b, w / b, b])?;
    let x = build.transpose(&x, &perm)?;
    Ok(vec![build.reshape(&x, &[n, c * b * b, h / b, w / b])?])
}

/// The middle of what is too large, zeros around what is too small.
fn center_crop_pad(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let mut x = call.input(0)?.clone();
    let rank = x.rank(build)?;
    let wanted = sizes(&call.known_ints(build, 1)?)?;
    let all: Vec<i64> = (0..rank as i64).collect();
    let given = call.node.ints("axes")?.unwrap_or(&all);
    axes(given, rank)?;
    if given.len() != wanted.len() {
        return Err(Error::shape(format!("{} sizes for {} axes", wanted.len(), given.len())));
    }
    for (&dim, &size) in given.iter().zip(&wanted) {
        let dim = crate::import::value::axis(dim, rank)?;
        let old = x.shape(build)?[dim];
        x = match size <= old {
            true => build.narrow(&x, dim, (old - size) / 2, size)?,
            false => build.pad(&x, dim, (size - old) / 2, (size - old).div_ceil(2), 0.0)?,
        };
    }
    Ok(vec![x])
}

/// A list attribute with one entry per spatial dim.
fn per_dim(call: &Call, name: &str, count: usize, default: u64) -> Result<Vec<u64>> {
    let Some(given) = call.node.ints(name)? else { return Ok(vec![default; count]) };
    match given.len() == count {
        true => Ok(sizes(given)?.to_vec()),
        false => Err(Error::attribute(format!("{name} = {given:?} has not {count} entries"))),
    }
}

/// Adds blocks, one per column, where they came from in the image: for each place in a block a strided, padded addend.
fn col2im(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = call.input(0)?.shape(build)?;
    let (image, block) = (sizes(&call.known_ints(build, 1)?)?, sizes(&call.known_ints(build, 2)?)?);
    let rank = image.len();
    let (dilations, strides) = (per_dim(call, "dilations", rank, 1)?, per_dim(call, "strides", rank, 1)?);
    let pads = per_dim(call, "pads", 2 * rank, 0)?;
    let places: u64 = block.iter().product();
    let grid: Option<Vec<u64>> = (0..rank)
        .map(|d| {
            let reach = dilations[d].checked_mul(block.get(d)?.checked_sub(1)?)? + 1;
            let room = (image[d] + pads[d] + pads[d + rank]).checked_sub(reach)?;
            Some(room.checked_div(strides[d])? + 1)
        })
        .collect();
    let columns = grid.as_ref().map(|grid| grid.iter().product::<u64>());
    let fits = shape.len() == 3 && block.len() == rank && places > 0 && shape[1].is_multiple_of(places);
    let Some(grid) = grid.filter(|_| fits && columns == Some(shape[2])) else {
        let what = format!("columns {:?} of blocks {:?} for an image {:?}", &shape[..], &block[..], &image[..]);
        return Err(Error::shape(what));
    };
    if places > 4096 {
        return Err(Error::limit(format!("blocks of {places} elements")));
    }
    let channels = shape[1] / places;
    let x = build.reshape(call.input(0)?, &[shape[0], channels, places, shape[2]])?;
    let outer = [shape[0], channels];
    let mut sum: Option<Value> = None;
    for place in 0..places {
        let part = build.narrow(&x, 2, place, 1)?;
        let part = build.reshape(&part, &outer.iter().chain(&grid).copied().collect::<Vec<u64>>())?;
        let id = build.node(&part)?;
        let mut rest = place;
        let (mut low, mut high, mut interior) = (Shape::from_elem(0, 2), Shape::from_elem(0, 2), Shape::from_elem(0, 2));
        for d in 0..rank {
            let inner: u64 = block[d + 1..].iter().product();
            let offset = rest / inner * dilations[d];
            rest %= inner;
            let span = (grid[d] - 1) * strides[d] + 1;
            low.push(offset);
            high.push(image[d] + pads[d] + pads[d + rank] - offset - span);
            interior.push(strides[d] - 1);
        }
        let mut part: Value = build.graph.add(Pad { low, high, interior }, &[id])?.into();
        for d in 0..rank {
            part = build.narrow(&part, 2 + d, pads[d], image[d])?;
        }
        sum = Some(match sum {
            None => part,
            Some(sum) => build.binary(BinaryOp::Add, &sum, &part)?,
        });
    }
    Ok(vec![sum.expect("a block has a place")])
}

/// The slices along one axis (of all elements in a row without one) whose condition holds. The condition decides the shape, so
/// it has to be known.
fn compress(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let condition = call.known_ints(build, 1)?;
    let shape = x.shape(build)?;
    let (x, dim) = match call.node.int("axis")? {
        Some(axis) => (x.clone(), crate::import::value::axis(axis, shape.len())?),
        None => (build.reshape(x, &[shape.iter().product()])?, 0),
    };
    let size = x.shape(build)?[dim];
    if condition.len() as u64 > size {
        return Err(Error::shape(format!("{} conditions for a dim of {size}", condition.len())));
    }
    let chosen = condition.iter().enumerate().filter(|(_, holds)| **holds != 0).map(|(at, _)| at as i64);
    let chosen = Known::ints(chosen);
    Ok(vec![super::index::take(build, &x, dim, &chosen.into())?])
}

fn eye_like(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    if shape.len() != 2 {
        return Err(Error::shape(format!("EyeLike of {:?}", shape.as_slice())));
    }
    let to = match call.node.int("dtype")? {
        Some(code) => dtype(i32::try_from(code).unwrap_or(0))?,
        None => x.dtype(build)?,
    };
    let offset = call.node.int_or("k", 0)?;
    let upto = build.lower_triangle(&shape, 0, 1, offset)?;
    let before = build.lower_triangle(&shape, 0, 1, offset.saturating_sub(1))?;
    let from = build.unary(UnaryOp::Not, &before)?;
    let diagonal = build.binary(BinaryOp::And, &upto, &from)?;
    Ok(vec![build.cast(&diagonal, to)?])
}

/// The first `sequence_lens[b]` steps of each sample in opposite order, the others as they are.
fn reverse_sequence(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let time = crate::import::value::axis(call.node.int_or("time_axis", 0)?, shape.len())?;
    let batch = crate::import::value::axis(call.node.int_or("batch_axis", 1)?, shape.len())?;
    if time == batch {
        return Err(attribute_value("time_axis", time));
    }
    Ok(vec![reversed(build, x, time, batch, call.input(1)?)?])
}

/// The first `lengths[b]` steps of `x` along `time` reversed, for each b along `batch`.
pub(super) fn reversed(build: &mut Build, x: &Value, time: usize, batch: usize, lengths: &Value) -> Result<Value> {
    let shape = x.shape(build)?;
    let lengths = build.cast(lengths, DType::I64)?;
    let lengths = build.reshape(&lengths, &[shape[batch], 1])?;
    let steps = build.positions(&[1, shape[time]], 1)?;
    let inside = build.compare(CompareOp::Lt, &steps, &lengths)?;
    let back = build.binary(BinaryOp::Sub, &lengths, &steps)?;
    let back = build.binary_scalar(BinaryOp::Sub, &back, 1.0)?;
    let index = build.select(&inside, &back, &steps)?;
    let name = |d: usize, own: &str| if d == time { own.to_owned() } else { format!("d{d}") };
    let names = |own: &str| (0..shape.len()).map(|d| name(d, own)).collect::<Vec<String>>().join(" ");
    let text = format!("{}, d{batch} t -> {}", names("v"), names("t"));
    let spec = FactorSpec::parse(&text).expect("names are identifiers");
    let (x, index) = (build.node(x)?, build.node(&index)?);
    build.gather(&spec, x, index)
}
