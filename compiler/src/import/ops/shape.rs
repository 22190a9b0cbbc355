//! Changes of shape that move nothing, and splits.

use dcc_program::Shape;

use super::{Call, Import, axes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] =
    &[("Flatten", flatten), ("Reshape", reshape), ("Split", split), ("Squeeze", squeeze), ("Unsqueeze", unsqueeze)];

/// In the wanted shape 0 copies the operand's dim (unless `allowzero`) and one −1 takes what is left.
fn reshape(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let from = x.shape(build)?;
    if let Some(rescale) = &build.rescale {
        call.node.ignore("allowzero");
        let shape = rescale.reshape(&from)?;
        return Ok(vec![build.reshape(x, &shape)?]);
    }
    let keep_zero = call.node.flag("allowzero", false)?;
    let wanted = call.known_ints(build, 1)?;
    let mut shape = Shape::new();
    for (position, &size) in wanted.iter().enumerate() {
        shape.push(match size {
            0 if !keep_zero => {
                let copied = from.get(position).copied();
                copied
                    .ok_or_else(|| Error::shape(format!("reshape {wanted:?} copies dim {position} of {:?}", from.as_slice())))?
            }
            -1 => 1,
            size => super::sizes(&[size])?[0],
        });
    }
    let open: Vec<usize> = (0..wanted.len()).filter(|&dim| wanted[dim] == -1).collect();
    let total: u64 = from.iter().product();
    let known = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
    match (open.as_slice(), known) {
        ([], _) => {}
        (&[dim], Some(known)) if known > 0 && total.is_multiple_of(known) => shape[dim] = total / known,
        _ => {
            let what = format!("Reshape cannot turn {:?} with {total} elements into {wanted:?}", from.as_slice());
            return Err(Error::shape(what));
        }
    }
    Ok(vec![build.reshape(x, &shape)?])
}

fn flatten(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let at = call.node.int_or("axis", 1)?;
    let at = if at == shape.len() as i64 { shape.len() } else { crate::import::value::axis(at, shape.len())? };
    let (rows, columns): (u64, u64) = (shape[..at].iter().product(), shape[at..].iter().product());
    Ok(vec![build.reshape(x, &[rows, columns])?])
}

fn squeeze(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dropped = match call.ints_either(build, "axes", 1)? {
        Some(given) => axes(&given, shape.len())?,
        None => (0..shape.len()).filter(|&dim| shape[dim] == 1).collect(),
    };
    if let Some(&dim) = dropped.iter().find(|&&dim| shape[dim] != 1) {
        return Err(Error::shape(format!("squeeze of dim {dim} of {:?}, which is not 1", shape.as_slice())));
    }
    let left: Shape = (0..shape.len()).filter(|dim| !dropped.contains(dim)).map(|dim| shape[dim]).collect();
    Ok(vec![build.reshape(x, &left)?])
}

fn unsqueeze(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let mut shape = x.shape(build)?;
    let given = call.ints_either(build, "axes", 1)?.ok_or_else(|| Error::graph("Unsqueeze without axes"))?;
    for dim in axes(&given, shape.len() + given.len())? {
        shape.insert(dim, 1);
    }
    Ok(vec![build.reshape(x, &shape)?])
}

/// Sizes are an attribute up to opset 12, an input from 13 on; without them the parts are equal but for the last.
fn split(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dim = call.axis(0, shape.len())?;
    let outputs = call.node.outputs.len() as u64;
    // The last outputs may be left out; more than there are parts is wrong.
    let count = match call.node.int("num_outputs")? {
        Some(count) => u64::try_from(count).ok().filter(|&count| count > 0 && count >= outputs),
        None => Some(outputs.max(1)),
    };
    let count = count.ok_or_else(|| Error::attribute(format!("fewer `num_outputs` than the {outputs} outputs")))?;
    let sizes = match call.ints_either(build, "split", 1)? {
        Some(given) => split_sizes(&given, shape[dim])?,
        None => {
            let part = shape[dim].div_ceil(count);
            (0..outputs).map(|at| shape[dim].saturating_sub(at * part).min(part)).collect()
        }
    };
    let (mut parts, mut start) = (Vec::with_capacity(sizes.len()), 0);
    for size in sizes {
        parts.push(build.narrow(x, dim, start, size)?);
        start += size;
    }
    Ok(parts)
}

/// Part sizes that add up to `size`.
pub(super) fn split_sizes(given: &[i64], size: u64) -> Result<Vec<u64>> {
    let sizes = super::sizes(given)?;
    let sum = sizes.iter().try_fold(0_u64, |sum, &part| sum.checked_add(part));
    match sum == Some(size) {
        true => Ok(sizes.to_vec()),
        false => Err(Error::shape(format!("parts {given:?} do not add up to {size}"))),
    }
}
