//! The largest or smallest elements along an axis, in order.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, FactorSpec, Reduce};

use super::{Call, Import};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[("TopK", top_k)];

/// Most elements along the axis that are compared pair by pair.
const SHORT: u64 = 8;
/// Longest row that is put in order whole; of a longer one half as many at most.
const MOST: u64 = 1 << 16;

/// Results: values and indices, in order whether `sorted` or not; of equal elements the first comes first, NaN is above all others.
///
/// Of short rows an element's place is the number of elements before it: comparisons of all pairs, which fuse into one reduction and
/// shard along any dim. Values are gathered, so their gradient goes to the chosen elements.
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
    // Of known elements the comparisons are known.
    let index = if shape[dim] <= SHORT || (x.known().is_some() && shape[dim] <= MOST) {
        let place = places(build, x, dim, largest)?;
        chosen(build, &place, dim, k)?
    } else if shape[dim].min(k.saturating_mul(2)) > MOST || shape[dim] > i32::MAX as u64 {
        return Err(Error::limit(format!(
            "TopK of {k} of {} elements: at most {} of more than {MOST} are supported",
            shape[dim],
            MOST / 2
        )));
    } else {
        build.top_k(x, dim, k, largest)?
    };
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
    let (first, second) = if largest { (&theirs, &mine) } else { (&mine, &theirs) };
    let (my_place, their_place) = (build.positions(&both, dim)?, build.positions(&both, dim + 1)?);
    let earlier = build.compare(CompareOp::Lt, &their_place, &my_place)?;
    let not_ahead = reaches(build, second, first)?;
    let ahead = build.unary(UnaryOp::Not, &not_ahead)?;
    let not_behind = reaches(build, first, second)?;
    let tie = build.binary(BinaryOp::And, &not_behind, &earlier)?;
    let before = build.binary(BinaryOp::Or, &ahead, &tie)?;
    let before = build.cast(&before, DType::I64)?;
    build.reduce(Reduce::Sum, &before, &[dim + 1], false)
}

/// Whether `a` is `b` or above it.
fn reaches(build: &mut Build, a: &Value, b: &Value) -> Result<Value> {
    let reaches = build.compare(CompareOp::Ge, a, b)?;
    if !a.dtype(build)?.is_float() {
        return Ok(reaches);
    }
    let nan = build.unary(UnaryOp::IsNan, a)?;
    build.binary(BinaryOp::Or, &reaches, &nan)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::Dropout;
    use crate::interp::{Bindings, Precision, Tensor, evaluate};
    use crate::ops::Input;
    use crate::ops::example::ints;

    /// The indices by comparisons of pairs, and by the op.
    fn both(x: &Tensor, dim: usize, (k, largest): (u64, bool)) -> Vec<Tensor> {
        let mut build = Build::new(Dropout::default());
        let input = Input { name: "x".to_owned(), dtype: x.dtype, shape: x.shape.clone(), batch_dim: None };
        let input: Value = build.graph.add(input, &[]).expect("an input").into();
        let place = places(&mut build, &input, dim, largest).expect("places");
        let pairs = chosen(&mut build, &place, dim, k).expect("indices");
        let op = build.top_k(&input, dim, k, largest).expect("indices");
        let ids = [&pairs, &op].map(|value| build.node(value).expect("a node"));
        evaluate(&build.graph, &ids, &Bindings::default().input("x", x.clone()), Precision::Exact).expect("values")
    }

    /// Most elements are equal to others.
    #[test]
    fn pairs_and_the_op_choose_the_same() {
        let values = [1.0, -0.0, 0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.5, -f64::NAN];
        let shape = [4, 9, 5];
        let picks = ints(0, 8, 3, &shape);
        let floats = picks.i64s().iter().map(|&pick| values[pick as usize]).collect();
        let unsigned = Tensor::ints(DType::U64, &shape, picks.i64s().iter().map(|pick| pick - 3).collect());
        for x in [Tensor::floats(DType::F64, &shape, floats), ints(-3, 3, 4, &shape), unsigned] {
            for (dim, &size) in shape.iter().enumerate() {
                for choice in [(1, true), (size, true), (size, false), (size / 2, false)] {
                    let found = both(&x, dim, choice);
                    assert_eq!(found[0], found[1], "{choice:?} along dim {dim} of {x:?}");
                }
            }
        }
    }
}
