//! The largest or smallest elements along an axis, in order.

use dcc_program::kernel::{BinaryOp, CompareOp};
use dcc_program::{DType, FactorSpec, Reduce};

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[("TopK", top_k)];

/// Elements along the axis beyond which comparing all pairs would take too long.
const LONGEST: u64 = 1 << 16;

/// Results: values and indices, in order whether `sorted` or not; of equal elements the first comes first.
///
/// An element's place is the number of elements before it in the order: comparisons of all pairs, which fuse into one
/// reduction and shard along any dim. Values are gathered, so their gradient goes to the chosen elements.
fn top_k(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let dim = call.axis(-1, shape.len())?;
    call.node.ignore("sorted");
    let largest = call.node.flag("largest", true)?;
    // An attribute up to opset 9.
    let given = match call.node.int("k")? {
        Some(k) => k,
        None => call.known_number(build, 1)? as i64,
    };
    let k = u64::try_from(given).ok().filter(|&k| k <= shape[dim]);
    let k = k.ok_or_else(|| Error::shape(format!("the {given} first of {} elements", shape[dim])))?;
    if shape[dim] > LONGEST {
        return Err(Error::limit(format!("TopK of {} elements, at most {LONGEST} are supported", shape[dim])));
    }
    let place = places(build, x, dim, largest)?;
    let index = chosen(build, &place, dim, k)?;
    let name = |d: usize, own: &str| if d == dim { own.to_owned() } else { format!("d{d}") };
    let names = |own: &str| (0..shape.len()).map(|d| name(d, own)).collect::<Vec<String>>().join(" ");
    let spec = FactorSpec::parse(&format!("{}, {} -> {}", names("v"), names("i"), names("i"))).expect("names are identifiers");
    let (data, at) = (build.node(x)?, build.node(&index)?);
    Ok(vec![build.gather(&spec, data, at)?, index])
}

/// How many elements along `dim` come before each one.
fn places(build: &mut Build, x: &Value, dim: usize, largest: bool) -> Result<Value> {
    let shape = x.shape(build)?;
    let mut one = shape.to_vec();
    one.insert(dim + 1, 1);
    let mut other = shape.to_vec();
    other.insert(dim, 1);
    let mut both = shape.to_vec();
    both.insert(dim, shape[dim]);
    let (mine, theirs) = (build.reshape(x, &one)?, build.reshape(x, &other)?);
    let better = if largest { CompareOp::Gt } else { CompareOp::Lt };
    let beaten = build.compare(better, &theirs, &mine)?;
    let tie = build.compare(CompareOp::Eq, &theirs, &mine)?;
    let (my_place, their_place) = (build.positions(&both, dim)?, build.positions(&both, dim + 1)?);
    let earlier = build.compare(CompareOp::Lt, &their_place, &my_place)?;
    let tie = build.binary(BinaryOp::And, &tie, &earlier)?;
    let before = build.binary(BinaryOp::Or, &beaten, &tie)?;
    let before = build.cast(&before, DType::I64)?;
    build.reduce(Reduce::Sum, &before, &[dim + 1], false)
}

/// The indices of those at places 0 to k.
fn chosen(build: &mut Build, place: &Value, dim: usize, k: u64) -> Result<Value> {
    let shape = place.shape(build)?;
    let mut rows = shape.to_vec();
    rows.insert(dim, 1);
    let mut both = shape.to_vec();
    both.insert(dim, k);
    let place = build.reshape(place, &rows)?;
    let (wanted, index) = (build.positions(&both, dim)?, build.positions(&both, dim + 1)?);
    let hit = build.compare(CompareOp::Eq, &place, &wanted)?;
    let index = build.select(&hit, &index, &Known::int(DType::I64, 0).into())?;
    build.reduce(Reduce::Sum, &index, &[dim + 1], false)
}
