//! The discrete Fourier transform as a contraction with a known matrix, and the windows that are laid over signals before it.
//!
//! A complex number is two elements along the last dim. Sizes are known, so that a transform is a product with cosines and sines:
//! its gradient and its sharding are those of every other product.

use std::f64::consts::TAU;

use dcc_program::{DType, Shape};

use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::Known;
use crate::import::value::{Value, axis};

pub const ONNX: &[(&str, Import)] =
    &[("BlackmanWindow", blackman), ("DFT", dft), ("HammingWindow", hamming), ("HannWindow", hann)];

/// Elements of a matrix that are few enough to compute while compiling.
const BUDGET: u64 = 1 << 22;

/// A transform of signals of `from` numbers, as of `length`: cut, or followed by zeros.
struct Transform {
    from: u64,
    length: u64,
    inverse: bool,
    onesided: bool,
    complex: bool,
}

impl Transform {
    /// Results, and whether these are complex.
    fn results(&self) -> (u64, bool) {
        match (self.onesided, self.inverse) {
            (true, true) => (self.length, false),
            (true, false) => (self.length / 2 + 1, true),
            (false, _) => (self.length, true),
        }
    }

    /// How often the one-sided half of a spectrum has the entry `at`.
    fn occurrences(&self, at: u64) -> f64 {
        match at {
            _ if !(self.inverse && self.onesided) => f64::from(u8::from(at < self.length)),
            0 => 1.0,
            _ if 2 * at == self.length => 1.0,
            _ if 2 * at < self.length => 2.0,
            _ => 0.0,
        }
    }

    /// What part `of` (0 real, 1 imaginary) of entry `at` adds to part `to` of result `k`.
    fn weight(&self, k: u64, at: u64, to: u64, of: u64) -> f64 {
        let turn = (u128::from(k) * u128::from(at) % u128::from(self.length)) as f64 / self.length as f64 * TAU;
        let (sign, scale) = if self.inverse { (1.0, 1.0 / self.length as f64) } else { (-1.0, 1.0) };
        let part = match (to, of) {
            (0, 0) | (1, 1) => turn.cos(),
            (0, _) => -sign * turn.sin(),
            _ => sign * turn.sin(),
        };
        part * scale * self.occurrences(at)
    }

    /// `[results, parts of a result, signal, parts of an entry]`.
    fn matrix(&self, dtype: DType) -> Option<(Known, [u64; 4])> {
        let (results, complex) = self.results();
        let shape = [results, if complex { 2 } else { 1 }, self.from, if self.complex { 2 } else { 1 }];
        shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size)).filter(|&count| count <= BUDGET)?;
        let [results, to, from, of] = shape;
        let lines = (0..results).flat_map(|k| (0..to).map(move |to| (k, to)));
        let all = lines.flat_map(|(k, to)| (0..from).flat_map(move |at| (0..of).map(move |of| (k, to, at, of))));
        Some((Known::floats(dtype, all.map(|(k, to, at, of)| self.weight(k, at, to, of))), shape))
    }
}

/// Inputs: the signal, its length, and from opset 20 on the dim, which is an attribute before.
fn dft(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let rank = shape.len();
    if rank < 2 || !matches!(shape[rank - 1], 1 | 2) {
        let what = format!("DFT of {:?}, whose last dim is not 1 (real) or 2 (complex)", shape.as_slice());
        return Err(Error::shape(what));
    }
    let along = match call.opset() {
        ..20 => call.node.int_or("axis", 1)?,
        _ if call.optional(2).is_some() => call.known_number(build, 2)? as i64,
        _ => -2,
    };
    let dim = axis(along, rank)?;
    let (inverse, onesided) = (call.node.flag("inverse", false)?, call.node.flag("onesided", false)?);
    let from = shape[dim];
    let length = match call.optional(1) {
        Some(_) => call.known_number(build, 1)? as i64,
        None if inverse && onesided => 2 * (from as i64 - 1),
        None => from as i64,
    };
    if dim == rank - 1 || !(1..1 << 40).contains(&length) {
        return Err(Error::shape(format!("DFT of length {length} along dim {dim} of {:?}", shape.as_slice())));
    }
    let transform = Transform { from, length: length as u64, inverse, onesided, complex: shape[rank - 1] == 2 };
    let dtype = x.dtype(build)?;
    // In f64: terms of a long sum that cancel leave what their own dtype would round.
    let (matrix, sizes) = transform
        .matrix(DType::F64)
        .ok_or_else(|| Error::limit(format!("a Fourier transform of {from} numbers to a length of {length}")))?;
    let matrix = build.reshape(&matrix.into(), &sizes)?;
    let names: Vec<String> = (0..rank).map(|d| format!("d{d}")).collect();
    let from: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut to = from.clone();
    (to[dim], to[rank - 1]) = ("o", "p");
    let x = build.cast(x, DType::F64)?;
    let sums = build.dot((&x, &from), (&matrix, &["o", "p", from[dim], from[rank - 1]]), &to)?;
    Ok(vec![build.cast(&sums, dtype)?])
}

/// A sum of cosines: `Σ ±c_i cos(2π i n / N)`, where N is the size, or one less for a symmetric window.
fn window(build: &mut Build, call: &Call, coefficients: &[f64]) -> Result<Vec<Value>> {
    let size = call.known_number(build, 0)?;
    if !(0.0..=BUDGET as f64).contains(&size) {
        return Err(Error::limit(format!("a window of {size} elements")));
    }
    let code = call.node.int_or("output_datatype", 1)?;
    let code = i32::try_from(code).map_err(|_| attribute_value("output_datatype", code))?;
    let dtype = crate::import::dtype(code)?;
    let size = size as u64;
    if size == 0 {
        return Ok(vec![Known::nothing(dtype, &Shape::from_slice(&[0])).into()]);
    }
    let turns = if call.node.flag("periodic", true)? { size } else { size.saturating_sub(1).max(1) };
    let at = |n: u64| {
        let terms = coefficients.iter().enumerate();
        terms.map(|(i, c)| c * (TAU * (i as u64 * n) as f64 / turns as f64).cos()).sum::<f64>()
    };
    Ok(vec![Known::floats(dtype, (0..size).map(at)).into()])
}

fn hann(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    window(build, call, &[0.5, -0.5])
}

fn hamming(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    window(build, call, &[25.0 / 46.0, -21.0 / 46.0])
}

fn blackman(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    window(build, call, &[0.42, -0.5, 0.08])
}
