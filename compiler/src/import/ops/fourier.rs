//! The discrete Fourier transform as a contraction with a known matrix, of whole signals or of frames of them; the windows that are laid
//! over signals before it, and the bands of a spectrum behind it.
//!
//! A complex number is two elements along the last dim. Sizes are known, so that a transform is a product with cosines and sines, and one
//! of frames a convolution with them: its gradient and its sharding are those of every other product.

use std::f64::consts::TAU;

use dcc_program::{DType, Shape};

use dcc_program::kernel::BinaryOp;

use super::conv::convolution;
use super::windows::Windows;
use super::{Call, Import, attribute_value};
use crate::error::{Error, Result};
use crate::import::build::Build;
use crate::import::known::{BUDGET, Known};
use crate::import::value::{Value, axis};

pub const ONNX: &[(&str, Import)] = &[
    ("BlackmanWindow", blackman),
    ("DFT", dft),
    ("HammingWindow", hamming),
    ("HannWindow", hann),
    ("MelWeightMatrix", mel_weights),
    ("STFT", stft),
];

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

/// Inputs: signals `[batch, elements, parts]`, the step from frame to frame, a window and a frame's length, of which one may be absent.
/// The result is `[batch, frames, bins, 2]`.
fn stft(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let x = call.input(0)?;
    let shape = x.shape(build)?;
    let [batch, elements, parts] = match shape[..] {
        [batch, elements] => [batch, elements, 1],
        [batch, elements, parts @ (1 | 2)] => [batch, elements, parts],
        _ => return Err(Error::shape(format!("STFT of {:?}: [batch, elements, 1 (real) or 2 (complex)]", &shape[..]))),
    };
    let window = call.optional(2);
    let said = call.optional(3).map(|_| call.known_number(build, 3)).transpose()?;
    let covered = window.map(|window| window.shape(build)).transpose()?;
    let (frame, step) = match (&covered, said) {
        (Some(covered), Some(said)) if covered[..] != [said as u64] => {
            return Err(Error::shape(format!("STFT of frames of {said} with a window of {:?}", &covered[..])));
        }
        (Some(covered), _) if covered.len() == 1 => (covered[0], call.known_number(build, 1)?),
        (None, Some(said)) => (said as u64, call.known_number(build, 1)?),
        _ => return Err(Error::attribute("STFT has neither a frame's length nor a window of one dim")),
    };
    if frame == 0 || frame > elements || !(1.0..=f64::from(1 << 30)).contains(&step) {
        return Err(Error::shape(format!("STFT of {elements} elements in frames of {frame}, {step} apart")));
    }
    let onesided = call.node.flag("onesided", true)?;
    let transform = Transform { from: frame, length: frame, inverse: false, onesided, complex: parts == 2 };
    let dtype = x.dtype(build)?;
    let too_large = || Error::limit(format!("a Fourier transform of frames of {frame} elements"));
    let (matrix, [bins, to, ..]) = transform.matrix(DType::F64).ok_or_else(too_large)?;
    let matrix = build.reshape(&matrix.into(), &[bins * to, frame, parts])?;
    let mut kernel = build.transpose(&matrix, &[0, 2, 1])?;
    if let Some(window) = window {
        let window = build.cast(window, DType::F64)?;
        kernel = build.binary(BinaryOp::Mul, &kernel, &window)?;
    }
    let x = build.cast(x, DType::F64)?;
    let x = build.reshape(&x, &[batch, elements, parts])?;
    let x = build.transpose(&x, &[0, 2, 1])?;
    let windows = Windows {
        image: Shape::from_slice(&[elements]),
        taps: vec![frame],
        strides: vec![step as u64],
        dilations: vec![1],
        pads: vec![[0; 2]],
    };
    let frames = windows.outputs(false)?;
    let y = convolution(build, (&x, &kernel), "n c x0, o c k0 -> n o y0", &windows, &frames)?;
    let y = build.reshape(&y, &[batch, bins, to, frames[0]])?;
    let y = build.transpose(&y, &[0, 3, 1, 2])?;
    Ok(vec![build.cast(&y, dtype)?])
}

/// Triangles over the bins of a spectrum, `[bins, bands]`, whose corners are equally far apart in mels; a corner is the bin below it.
/// Inputs: bands, the length of the transform, the sampling rate, the lowest and the highest frequency.
fn mel_weights(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    let [bands, length, rate, low, high] = [0, 1, 2, 3, 4].map(|position| call.known_number(build, position));
    let [bands, length, rate, low, high] = [bands?, length?, rate?, low?, high?];
    let dtype = crate::import::dtype(i32::try_from(call.node.int_or("output_datatype", 1)?).unwrap_or(0))?;
    let wrong = bands < 1.0 || length < 1.0 || rate <= 0.0 || low < 0.0 || high < low;
    if wrong || bands * (length / 2.0 + 1.0) > BUDGET as f64 {
        return Err(Error::limit(format!("{bands} bands from {low} to {high} Hz, of a transform of {length} at {rate} Hz")));
    }
    let (bands, bins) = (bands as usize, (length / 2.0).floor() as usize + 1);
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let step = (mel(high) - mel(low)) / (bands + 2) as f64;
    let corner = |i: usize| {
        let hertz = 700.0 * (10_f64.powf((i as f64 * step + mel(low)) / 2595.0) - 1.0);
        ((length + 1.0) * hertz / rate).floor()
    };
    let weight = |bin: f64, [from, centre, to]: [f64; 3]| match bin {
        _ if bin == centre && from == centre => 1.0,
        _ if (from..=centre).contains(&bin) && from < centre => (bin - from) / (centre - from),
        _ if (centre..to).contains(&bin) => (to - bin) / (to - centre),
        _ => 0.0,
    };
    let corners: Vec<[f64; 3]> = (0..bands).map(|band| [corner(band), corner(band + 1), corner(band + 2)]).collect();
    let all = (0..bins).flat_map(|bin| corners.iter().map(move |&corners| weight(bin as f64, corners)));
    let matrix = Known::floats(dtype, all);
    Ok(vec![build.reshape(&matrix.into(), &[bins as u64, bands as u64])?])
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
