//! Resize and Upsample, dim by dim: rows picked by a known index, or interpolated by a contraction with a known matrix.
//!
//! The matrix of a dim has, for each element of the result, the weights of its neighbours; at the borders, those of neighbours outside
//! count for the nearest inside.

use dcc_program::kernel::BinaryOp;
use dcc_program::{DType, FactorSpec, Shape};

use super::{Call, Import, attribute_value, axes};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::Value;
use crate::ops::Gather;

pub const ONNX: &[(&str, Import)] = &[("Resize", resize), ("Upsample", upsample)];

/// How a dim of `from` elements becomes one of `to`.
#[derive(Clone, Copy, Debug)]
struct Line {
    from: u64,
    to: u64,
    scale: f64,
    /// The part that is resized, in [0, 1] of the whole.
    region: [f64; 2],
}

/// Where an element of the result lies in the operand.
#[derive(Clone, Copy, Debug)]
enum Coordinates {
    AlignCorners,
    Asymmetric,
    HalfPixel,
    /// Element 0 where there is only one.
    PytorchHalfPixel,
    HalfPixelSymmetric,
    /// The middle of the element, half a pixel behind `HalfPixel`.
    Middle,
    /// Of a region, which may reach outside.
    Crop,
}

/// Which element is nearest.
#[derive(Clone, Copy, Debug)]
enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

#[derive(Clone, Copy, Debug)]
struct Interpolation {
    /// The cubic's coefficient a; none for a linear one.
    cubic: Option<f64>,
    antialias: bool,
    exclude_outside: bool,
}

impl Line {
    fn position(&self, mode: Coordinates, at: u64) -> f64 {
        // Before it is rounded down.
        let length = self.scale * self.from as f64;
        let (from, to, x) = (self.from as f64, self.to as f64, at as f64);
        let half_pixel = (x + 0.5) / self.scale - 0.5;
        match mode {
            Coordinates::AlignCorners if self.to == 1 => 0.0,
            Coordinates::AlignCorners => x * (from - 1.0) / (length - 1.0),
            Coordinates::Asymmetric => x / self.scale,
            Coordinates::Crop if self.to == 1 => (self.region[0] + self.region[1]) / 2.0 * (from - 1.0),
            Coordinates::Crop => (self.region[0] + x * (self.region[1] - self.region[0]) / (to - 1.0)) * (from - 1.0),
            Coordinates::PytorchHalfPixel if self.to == 1 => 0.0,
            Coordinates::HalfPixel | Coordinates::PytorchHalfPixel => half_pixel,
            Coordinates::Middle => (x + 0.5) / self.scale,
            Coordinates::HalfPixelSymmetric => from / 2.0 * (1.0 - to / length) + half_pixel,
        }
    }

    fn is_inside(&self, mode: Coordinates, at: u64) -> bool {
        (0.0..=self.from as f64 - 1.0).contains(&self.position(mode, at))
    }

    fn clamp(&self, at: f64) -> u64 {
        at.clamp(0.0, self.from as f64 - 1.0) as u64
    }

    fn nearest(&self, mode: Coordinates, nearest: Nearest, at: u64) -> u64 {
        let x = self.position(mode, at);
        self.clamp(match nearest {
            Nearest::RoundPreferFloor => (x - 0.5).ceil(),
            Nearest::RoundPreferCeil => (x + 0.5).floor(),
            Nearest::Floor => x.floor(),
            Nearest::Ceil => x.ceil(),
        })
    }

    /// Weights of all elements of the operand.
    fn weights(&self, mode: Coordinates, how: &Interpolation, at: u64) -> Vec<f64> {
        let x = self.position(mode, at);
        let before = x.ceil() - 1.0;
        let scale = if how.antialias { self.scale.min(1.0) } else { 1.0 };
        let reach = if how.cubic.is_some() { 2.0 } else { 1.0 };
        let first = (-reach / scale).floor() as i64 + 1;
        let mut row = vec![0.0; self.from as usize];
        for step in first..2 - first {
            let neighbour = before + step as f64;
            let outside = neighbour < 0.0 || neighbour > self.from as f64 - 1.0;
            if !(outside && how.exclude_outside) {
                row[self.clamp(neighbour) as usize] += kernel(how.cubic, (neighbour - x) * scale);
            }
        }
        let sum: f64 = row.iter().sum();
        if (how.antialias || how.exclude_outside) && sum != 0.0 {
            row.iter_mut().for_each(|weight| *weight /= sum);
        }
        row
    }
}

/// The weight of a neighbour at this distance. Keys 1981 for the cubic.
fn kernel(cubic: Option<f64>, distance: f64) -> f64 {
    let x = distance.abs();
    match cubic {
        None => (1.0 - x).max(0.0),
        Some(a) if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        Some(a) if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        Some(_) => 0.0,
    }
}

/// Elements of a matrix that are few enough to compute while compiling.
const BUDGET: u64 = 1 << 22;

fn rows(build: &mut Build, x: &Value, dim: usize, line: Line, pick: impl Fn(u64) -> u64) -> Result<Value> {
    let index = Known::ints((0..line.to).map(|at| pick(at) as i64));
    let (x, index) = (build.node(x)?, build.node(&index.into())?);
    let names: Vec<String> = (0..build.graph.ty(x).rank()).map(|d| format!("d{d}")).collect();
    let mut result = names.clone();
    result[dim] = "o".to_owned();
    let spec = format!("{}, o -> {}", names.join(" "), result.join(" "));
    let spec = FactorSpec::parse(&spec).expect("factor names are identifiers");
    Ok(build.graph.add(Gather { spec }, &[x, index])?.into())
}

fn interpolated(build: &mut Build, x: &Value, dim: usize, line: Line, weights: impl Fn(u64) -> Vec<f64>) -> Result<Value> {
    let matrix = Known::floats(x.dtype(build)?, (0..line.to).flat_map(weights));
    let matrix = build.reshape(&matrix.into(), &[line.to, line.from])?;
    let names: Vec<String> = (0..x.rank(build)?).map(|d| format!("d{d}")).collect();
    let from: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut to = from.clone();
    to[dim] = "o";
    build.dot((x, &from), (&matrix, &["o", from[dim]]), &to)
}

/// Each line that is not as before, by the mode that the node says.
fn along_lines(build: &mut Build, call: &Call, lines: &[Line], default: Coordinates) -> Result<Vec<Value>> {
    let node = call.node;
    let coordinates = match node.string_or("coordinate_transformation_mode", "")? {
        "" => default,
        "align_corners" => Coordinates::AlignCorners,
        "asymmetric" => Coordinates::Asymmetric,
        "half_pixel" => Coordinates::HalfPixel,
        "pytorch_half_pixel" => Coordinates::PytorchHalfPixel,
        "half_pixel_symmetric" => Coordinates::HalfPixelSymmetric,
        "tf_half_pixel_for_nn" => Coordinates::Middle,
        "tf_crop_and_resize" => Coordinates::Crop,
        other => return Err(attribute_value("coordinate_transformation_mode", other)),
    };
    let older = matches!(default, Coordinates::Asymmetric);
    let nearest = match node.string_or("nearest_mode", if older { "floor" } else { "round_prefer_floor" })? {
        "round_prefer_floor" => Nearest::RoundPreferFloor,
        "round_prefer_ceil" => Nearest::RoundPreferCeil,
        "floor" => Nearest::Floor,
        "ceil" => Nearest::Ceil,
        other => return Err(attribute_value("nearest_mode", other)),
    };
    let beyond = node.float_or("extrapolation_value", 0.0)?;
    let a = node.float_or("cubic_coeff_a", -0.75)?;
    let mode = node.string_or("mode", "nearest")?;
    let how = Interpolation {
        cubic: (mode == "cubic").then_some(a),
        antialias: node.flag("antialias", false)?,
        exclude_outside: node.flag("exclude_outside", false)?,
    };
    if !["nearest", "linear", "cubic"].contains(&mode) {
        return Err(attribute_value("mode", mode));
    }
    let mut y = call.input(0)?.clone();
    for (dim, &line) in lines.iter().enumerate() {
        let cropped = matches!(coordinates, Coordinates::Crop) && line.region != [0.0, 1.0];
        if line.from == line.to && line.scale == 1.0 && !cropped {
            continue;
        }
        let elements = if mode == "nearest" { line.to } else { line.to.saturating_mul(line.from) };
        if elements > BUDGET {
            return Err(Error::limit(format!("a resize of {} elements to {}", line.from, line.to)));
        }
        y = match mode {
            "nearest" => rows(build, &y, dim, line, |at| line.nearest(coordinates, nearest, at))?,
            _ => interpolated(build, &y, dim, line, |at| line.weights(coordinates, &how, at))?,
        };
    }
    if matches!(coordinates, Coordinates::Crop) {
        y = extrapolated(build, y, lines, beyond)?;
    }
    Ok(vec![y])
}

/// `y` where all of its coordinates are inside of the operand, `beyond` elsewhere.
fn extrapolated(build: &mut Build, y: Value, lines: &[Line], beyond: f64) -> Result<Value> {
    let mut inside: Option<Value> = None;
    for (dim, line) in lines.iter().enumerate() {
        let line_inside: Vec<bool> = (0..line.to.min(BUDGET)).map(|at| line.is_inside(Coordinates::Crop, at)).collect();
        if line_inside.iter().all(|&is| is) {
            continue;
        }
        let ones = Known::ints(line_inside.into_iter().map(i64::from));
        let mut shape = vec![1; lines.len()];
        shape[dim] = line.to;
        let ones = build.reshape(&ones.into(), &shape)?;
        let here = build.cast(&ones, DType::Bool)?;
        inside = Some(match inside {
            Some(other) => build.binary(BinaryOp::And, &other, &here)?,
            None => here,
        });
    }
    let Some(inside) = inside else { return Ok(y) };
    let beyond = Known::scalar(y.dtype(build)?, beyond);
    build.select(&inside, &y, &beyond.into())
}

/// All elements of a list; none of something else.
fn numbers(known: &Known) -> Vec<f64> {
    let list = known.dense().filter(|_| known.rank() == 1);
    list.map(|list| list.numbers().collect()).unwrap_or_default()
}

fn unchanged(shape: &[u64]) -> Vec<Line> {
    shape.iter().map(|&from| Line { from, to: from, scale: 1.0, region: [0.0, 1.0] }).collect()
}

/// Of scales for these dims; the others stay.
fn scaled(shape: &[u64], dims: &[usize], scales: &[f64]) -> Result<Vec<Line>> {
    let mut lines = unchanged(shape);
    if scales.len() != dims.len() {
        return Err(Error::shape(format!("{} scales for {} dims", scales.len(), dims.len())));
    }
    for (&dim, &scale) in dims.iter().zip(scales) {
        let to = (shape[dim] as f64 * scale).floor();
        if !(scale > 0.0 && (1.0..1e12).contains(&to)) {
            return Err(Error::shape(format!("scale {scale} of a dim of {}", shape[dim])));
        }
        lines[dim] = Line { to: to as u64, scale, ..lines[dim] };
    }
    Ok(lines)
}

/// Of sizes for these dims, of which `policy` says what becomes of the aspect ratio.
fn sized(shape: &[u64], dims: &[usize], sizes: &[i64], policy: &str) -> Result<Vec<Line>> {
    let mut lines = unchanged(shape);
    if sizes.len() != dims.len() || sizes.iter().any(|&size| !(1..1 << 40).contains(&size)) {
        return Err(Error::shape(format!("sizes {sizes:?} for {} dims", dims.len())));
    }
    let ratio = |(&dim, &size): (&usize, &i64)| size as f64 / shape[dim] as f64;
    let ratios = || dims.iter().zip(sizes).map(ratio);
    let common = match policy {
        "stretch" => None,
        "not_larger" => Some(ratios().fold(f64::INFINITY, f64::min)),
        "not_smaller" => Some(ratios().fold(0.0, f64::max)),
        other => return Err(attribute_value("keep_aspect_ratio_policy", other)),
    };
    for (&dim, &size) in dims.iter().zip(sizes) {
        let from = shape[dim];
        lines[dim] = match common {
            None => Line { to: size as u64, scale: size as f64 / from as f64, ..lines[dim] },
            Some(scale) => Line { to: (scale * from as f64 + 0.5).floor().max(1.0) as u64, scale, ..lines[dim] },
        };
    }
    Ok(lines)
}

/// Inputs X, scales up to opset 10; X, roi, scales or sizes from 11 on.
fn resize(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape = call.input(0)?.shape(build)?;
    if shape.contains(&0) {
        return Err(Error::shape(format!("Resize of {:?}", &shape[..])));
    }
    let dims = match call.node.ints("axes")? {
        Some(given) => {
            axes(given, shape.len())?;
            given.iter().map(|&one| crate::import::value::axis(one, shape.len())).collect::<Result<Vec<usize>>>()?
        }
        None => (0..shape.len()).collect(),
    };
    let older = call.opset() < 11;
    let policy = call.node.string_or("keep_aspect_ratio_policy", "stretch")?;
    let scales = if older { 1 } else { 2 };
    let has = |position: usize| match call.optional(position) {
        Some(value) => Ok::<bool, Error>(value.shape(build)?.iter().product::<u64>() > 0),
        None => Ok(false),
    };
    let mut lines = if !older && has(3)? {
        let mut sizes = call.known_ints(build, 3)?;
        // A static export's batch is part of its sizes.
        if let (Some(rescale), Some(0), Some(first)) = (&build.rescale, dims.first(), sizes.first_mut())
            && *first == rescale.from as i64
        {
            *first = shape[0] as i64;
        }
        sized(&shape, &dims, &sizes, policy)?
    } else {
        let scales = numbers(call.known(build, scales)?);
        scaled(&shape, &dims, &scales)?
    };
    if call.node.string_or("coordinate_transformation_mode", "")? == "tf_crop_and_resize" {
        let region = numbers(call.known(build, 1)?);
        if region.len() != 2 * dims.len() {
            return Err(Error::shape(format!("a roi of {} numbers for {} dims", region.len(), dims.len())));
        }
        for (position, &dim) in dims.iter().enumerate() {
            lines[dim].region = [region[position], region[position + dims.len()]];
        }
    }
    along_lines(build, call, &lines, if older { Coordinates::Asymmetric } else { Coordinates::HalfPixel })
}

/// Scales are an attribute at opset 7, an input from 9 on.
fn upsample(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let shape: Shape = call.input(0)?.shape(build)?;
    let scales: Vec<f64> = match call.node.floats("scales")? {
        Some(scales) => scales.iter().map(|&scale| f64::from(scale)).collect(),
        None => numbers(call.known(build, 1)?),
    };
    let dims: Vec<usize> = (0..shape.len()).collect();
    let lines = scaled(&shape, &dims, &scales)?;
    along_lines(build, call, &lines, Coordinates::Asymmetric)
}
