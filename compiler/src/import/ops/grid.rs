//! Sampling of images at computed positions, and the positions that an affine map gives. Jaderberg et al. 2015, arXiv 1506.02025.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};
use dcc_program::{DType, FactorSpec};

use super::{Call, Import, attribute_value, sizes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;

/// Lines of one dim of an affine grid: their coordinates are computed while importing.
const MOST_LINES: u64 = 1 << 16;

pub const ONNX: &[(&str, Import)] = &[("AffineGrid", affine_grid), ("GridSample", grid_sample)];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// One spatial dim of the image.
struct Along {
    size: u64,
    padding: Padding,
    align_corners: bool,
    /// Of all values that are computed: `[samples, positions]`.
    dtype: DType,
}

/// An element that takes part in an interpolation: its place, whether it is inside, and its share.
struct Tap {
    place: Value,
    inside: Option<Value>,
    weight: Option<Value>,
}

impl Along {
    fn number(&self, value: f64) -> Value {
        Known::scalar(self.dtype, value).into()
    }

    /// The range that positions are folded into.
    fn range(&self) -> (f64, f64) {
        let last = self.size as f64 - 1.0;
        if self.align_corners { (0.0, last) } else { (-0.5, last + 0.5) }
    }

    /// From [-1, 1] to places of elements.
    fn position(&self, build: &mut Build, x: &Value) -> Result<Value> {
        let (low, high) = self.range();
        let shifted = build.binary_scalar(BinaryOp::Add, x, 1.0)?;
        let scaled = build.binary_scalar(BinaryOp::Mul, &shifted, (high - low) / 2.0)?;
        build.binary_scalar(BinaryOp::Add, &scaled, low)
    }

    fn clamped(&self, build: &mut Build, x: &Value) -> Result<Value> {
        let mut x = x.clone();
        for (outside, bound) in [(CompareOp::Lt, 0.0), (CompareOp::Gt, self.size as f64 - 1.0)] {
            let beyond = build.compare(outside, &x, &self.number(bound))?;
            x = build.select(&beyond, &self.number(bound), &x)?;
        }
        Ok(x)
    }

    /// Folded at the ends of the range until it lies inside.
    fn reflected(&self, build: &mut Build, x: &Value) -> Result<Value> {
        let (low, high) = self.range();
        let span = high - low;
        if span <= 0.0 {
            return build.binary_scalar(BinaryOp::Mul, x, 0.0);
        }
        let below = build.compare(CompareOp::Lt, x, &self.number(low))?;
        let above = build.compare(CompareOp::Gt, x, &self.number(high))?;
        let under = build.binary(BinaryOp::Sub, &self.number(low), x)?;
        let over = build.binary_scalar(BinaryOp::Sub, x, high)?;
        let beyond = build.select(&below, &under, &over)?;
        let turns = build.binary_scalar(BinaryOp::Div, &beyond, span)?;
        let turns = build.unary(UnaryOp::Floor, &turns)?;
        let whole = build.binary_scalar(BinaryOp::Mul, &turns, span)?;
        let rest = build.binary(BinaryOp::Sub, &beyond, &whole)?;
        let odd = build.binary_scalar(BinaryOp::Rem, &turns, 2.0)?;
        let odd = build.compare(CompareOp::Ne, &odd, &self.number(0.0))?;
        // An even number of turns ends where it left the range, an odd one at the other end.
        let from_low = build.binary(BinaryOp::Xor, &below, &odd)?;
        let up = build.binary_scalar(BinaryOp::Add, &rest, low)?;
        let down = build.binary(BinaryOp::Sub, &self.number(high), &rest)?;
        let folded = build.select(&from_low, &up, &down)?;
        let outside = build.binary(BinaryOp::Or, &below, &above)?;
        build.select(&outside, &folded, x)
    }

    fn padded(&self, build: &mut Build, x: &Value) -> Result<Value> {
        match self.padding {
            Padding::Zeros => Ok(x.clone()),
            Padding::Border => self.clamped(build, x),
            Padding::Reflection => self.reflected(build, x),
        }
    }

    /// The element at a whole position.
    fn tap(&self, build: &mut Build, at: &Value, weight: Option<Value>) -> Result<Tap> {
        let inside = match self.padding {
            Padding::Zeros => {
                let from = build.compare(CompareOp::Ge, at, &self.number(0.0))?;
                let to = build.compare(CompareOp::Lt, at, &self.number(self.size as f64))?;
                Some(build.binary(BinaryOp::And, &from, &to)?)
            }
            _ => None,
        };
        let at = if self.padding == Padding::Reflection { self.reflected(build, at)? } else { at.clone() };
        let at = self.clamped(build, &at)?;
        Ok(Tap { place: build.cast(&at, DType::I64)?, inside, weight })
    }

    /// The elements that take part at `x`, one by one along this dim.
    fn taps(&self, build: &mut Build, x: &Value, mode: &str) -> Result<Vec<Tap>> {
        let x = self.position(build, x)?;
        if mode == "nearest" {
            let x = build.unary(UnaryOp::RoundEven, &x)?;
            let x = self.padded(build, &x)?;
            return Ok(vec![self.tap(build, &x, None)?]);
        }
        let x = self.padded(build, &x)?;
        let first = build.unary(UnaryOp::Floor, &x)?;
        let part = build.binary(BinaryOp::Sub, &x, &first)?;
        let rest = build.complement(&part)?;
        if matches!(mode, "linear" | "bilinear") {
            let second = build.binary_scalar(BinaryOp::Add, &first, 1.0)?;
            return Ok(vec![self.tap(build, &first, Some(rest))?, self.tap(build, &second, Some(part))?]);
        }
        let mut taps = Vec::with_capacity(4);
        let (before, after) =
            (build.binary_scalar(BinaryOp::Add, &part, 1.0)?, build.binary_scalar(BinaryOp::Add, &rest, 1.0)?);
        for (offset, distance, outer) in [(-1.0, before, true), (0.0, part, false), (1.0, rest, false), (2.0, after, true)] {
            let weight = cubic(build, &distance, outer)?;
            let at = build.binary_scalar(BinaryOp::Add, &first, offset)?;
            taps.push(self.tap(build, &at, Some(weight))?);
        }
        Ok(taps)
    }
}

/// Cubic convolution with α = -0.75 at a distance below 1, or from 1 to 2 (`outer`). Keys 1981.
fn cubic(build: &mut Build, x: &Value, outer: bool) -> Result<Value> {
    const ALPHA: f64 = -0.75;
    let coefficients =
        if outer { [ALPHA, -5.0 * ALPHA, 8.0 * ALPHA, -4.0 * ALPHA] } else { [ALPHA + 2.0, -(ALPHA + 3.0), 0.0, 1.0] };
    let mut sum = build.binary_scalar(BinaryOp::Mul, x, coefficients[0])?;
    sum = build.binary_scalar(BinaryOp::Add, &sum, coefficients[1])?;
    for coefficient in &coefficients[2..] {
        sum = build.binary(BinaryOp::Mul, &sum, x)?;
        sum = build.binary_scalar(BinaryOp::Add, &sum, *coefficient)?;
    }
    Ok(sum)
}

/// For each position the interpolation of the elements around it: one gather for each of them.
fn grid_sample(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let (x, grid) = (call.input(0)?, call.input(1)?);
    let (shape, positions) = (x.shape(build)?, grid.shape(build)?);
    let rank = shape.len().saturating_sub(2);
    if rank == 0 || positions.len() != rank + 2 || positions[rank + 1] != rank as u64 || positions[0] != shape[0] {
        return Err(Error::shape(format!("positions {:?} in an image {:?}", positions.as_slice(), shape.as_slice())));
    }
    let mode = call.node.string_or("mode", "linear")?;
    if !["nearest", "linear", "bilinear", "cubic", "bicubic"].contains(&mode) {
        return Err(attribute_value("mode", format!("`{mode}`")));
    }
    let padding = match call.node.string_or("padding_mode", "zeros")? {
        "zeros" => Padding::Zeros,
        "border" => Padding::Border,
        "reflection" => Padding::Reflection,
        other => return Err(attribute_value("padding_mode", format!("`{other}`"))),
    };
    let align_corners = call.node.flag("align_corners", false)?;
    let outer: Vec<u64> = positions[1..=rank].to_vec();
    let flat = [shape[0], outer.iter().product()];
    let dtype = grid.dtype(build)?;
    let mut each = Vec::with_capacity(rank);
    for dim in 0..rank {
        // The last spatial dim comes first.
        let part = build.narrow(grid, rank + 1, (rank - 1 - dim) as u64, 1)?;
        let part = build.reshape(&part, &flat)?;
        let along = Along { size: shape[2 + dim], padding, align_corners, dtype };
        each.push(along.taps(build, &part, mode)?);
    }
    let pixels = build.reshape(x, &[shape[0], shape[1], shape[2..].iter().product()])?;
    let spec = FactorSpec::parse("n c v, n o -> n c o").expect("a spec of ours");
    let count: usize = each.iter().map(Vec::len).product();
    let mut sum: Option<Value> = None;
    for combination in 0..count {
        let mut rest = combination;
        let (mut index, mut weight, mut inside): (Option<Value>, Option<Value>, Option<Value>) = (None, None, None);
        for (dim, taps) in each.iter().enumerate() {
            let tap = &taps[rest % taps.len()];
            rest /= taps.len();
            index = Some(match index {
                None => tap.place.clone(),
                Some(index) => {
                    let row = build.binary_scalar(BinaryOp::Mul, &index, shape[2 + dim] as f64)?;
                    build.binary(BinaryOp::Add, &row, &tap.place)?
                }
            });
            weight = both(build, BinaryOp::Mul, weight, &tap.weight)?;
            inside = both(build, BinaryOp::And, inside, &tap.inside)?;
        }
        let (data, at) = (build.node(&pixels)?, build.node(&index.expect("an image has a dim"))?);
        let mut value = build.gather(&spec, data, at)?;
        let value_dtype = value.dtype(build)?;
        if let Some(weight) = weight {
            let weight = build.cast(&weight, value_dtype)?;
            let weight = build.reshape(&weight, &[flat[0], 1, flat[1]])?;
            value = build.binary(BinaryOp::Mul, &value, &weight)?;
        }
        if let Some(inside) = inside {
            let inside = build.reshape(&inside, &[flat[0], 1, flat[1]])?;
            value = build.select(&inside, &value, &Known::scalar(value_dtype, 0.0).into())?;
        }
        sum = Some(match sum {
            None => value,
            Some(sum) => build.binary(BinaryOp::Add, &sum, &value)?,
        });
    }
    let result: Vec<u64> = [shape[0], shape[1]].into_iter().chain(outer).collect();
    Ok(vec![build.reshape(&sum.expect("at least one element takes part"), &result)?])
}

fn both(build: &mut Build, op: BinaryOp, one: Option<Value>, other: &Option<Value>) -> Result<Option<Value>> {
    match (one, other) {
        (Some(one), Some(other)) => Ok(Some(build.binary(op, &one, other)?)),
        (one, other) => Ok(one.or_else(|| other.clone())),
    }
}

/// Positions in [-1, 1] mapped by a matrix per sample: `theta [n, k, k + 1]` on `[x, y, (z,) 1]`.
fn affine_grid(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let theta = call.input(0)?;
    let (shape, size) = (theta.shape(build)?, sizes(&call.known_ints(build, 1)?)?);
    let rank = size.len().saturating_sub(2);
    if !matches!(rank, 2 | 3) || shape[..] != [size[0], rank as u64, rank as u64 + 1] {
        return Err(Error::shape(format!("matrices {:?} for images {:?}", shape.as_slice(), size.as_slice())));
    }
    let (align, dtype) = (call.node.flag("align_corners", false)?, theta.dtype(build)?);
    let mut coordinates = Vec::with_capacity(rank);
    for dim in (0..rank).rev() {
        let count = size[2 + dim];
        if count > MOST_LINES {
            return Err(Error::limit(format!("a grid of {count} lines, at most {MOST_LINES} are supported")));
        }
        let (start, step) = match align {
            true => (-1.0, if count > 1 { 2.0 / (count as f64 - 1.0) } else { 0.0 }),
            false => (-1.0 + 1.0 / count as f64, 2.0 / count as f64),
        };
        let line: Vec<u64> = (0..=rank).map(|d| if d == dim + 1 { count } else { 1 }).collect();
        let values = Known::range(dtype, start, step, count).and_then(|values| values.reshape(&line));
        coordinates.push(values.ok_or_else(|| Error::limit(format!("a grid of {count} lines")))?);
    }
    let mut parts = Vec::with_capacity(rank);
    let full: Vec<u64> = [size[0]].into_iter().chain(size[2..].iter().copied()).chain([1]).collect();
    let one: Vec<u64> = std::iter::once(size[0]).chain(std::iter::repeat_n(1, rank)).collect();
    for row in 0..rank {
        let entry = |build: &mut Build, column: usize| -> Result<Value> {
            let part = build.narrow(theta, 1, row as u64, 1)?;
            let part = build.narrow(&part, 2, column as u64, 1)?;
            build.reshape(&part, &one)
        };
        let mut sum = entry(build, rank)?;
        for (column, coordinate) in coordinates.iter().enumerate() {
            let factor = entry(build, column)?;
            let product = build.binary(BinaryOp::Mul, &factor, &coordinate.clone().into())?;
            sum = build.binary(BinaryOp::Add, &sum, &product)?;
        }
        let sum = build.broadcast(&sum, &full[..=rank])?;
        parts.push(build.reshape(&sum, &full)?);
    }
    Ok(vec![build.concatenate(&parts, rank + 1)?])
}
