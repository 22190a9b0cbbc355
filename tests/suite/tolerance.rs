//! The one table of tolerances, for every comparison with PyTorch and between meshes.
//!
//! f32: per step at most 20 × the running maximum of |PyTorch f32 − PyTorch f64|, at least 2e-5 relative. f64: 1e-9 relative.

use dcc_program::DType;
use serde_json::Value;

/// Mean distance of losses from PyTorch's f32 in mixed precision, in that of PyTorch's own under autocast.
pub const AUTOCAST: f64 = 1.5;

/// Relative: losses of a mesh against one device in mixed precision, over a few steps: half of what rounding to the half type may do.
pub fn of_half(dtype: DType) -> f64 {
    if dtype == DType::F16 { 2.0_f64.powi(-12) } else { 2.0_f64.powi(-9) }
}

/// Relative: `--dtype f64` against PyTorch float64.
pub const F64: f64 = 1e-9;
/// Relative: the least that the row of f32 allows.
const F32_FLOOR: f64 = 2e-5;
/// How far dcc may be from the exact value, in PyTorch's own distances from it.
const F32_FACTOR: f64 = 20.0;

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    F32,
    F64,
}

impl Row {
    pub const ALL: [Row; 2] = [Row::F32, Row::F64];

    pub fn name(self) -> &'static str {
        match self {
            Row::F32 => "f32",
            Row::F64 => "f64",
        }
    }

    /// How far from a quantity of size `scale` one may be, given how far PyTorch's f32 is.
    pub fn allowed(self, scale: f64, torch_off: f64) -> f64 {
        match self {
            Row::F32 => (F32_FACTOR * torch_off).max(F32_FLOOR * scale),
            Row::F64 => F64 * scale,
        }
    }
}

/// One number per step of a golden, in both precisions.
pub struct Series {
    f32: Vec<f64>,
    f64: Vec<f64>,
}

impl Series {
    /// `key` of a golden file's columns: `loss` or `grad_norm`.
    pub fn of(golden: &Value, key: &str) -> Series {
        Series { f32: numbers(&golden["f32"][key]), f64: numbers(&golden["f64"][key]) }
    }

    /// The largest distance from PyTorch float64, in units of what the row allows: 1 is the limit. Fewer steps than the golden has
    /// are its first ones.
    pub fn distance(&self, row: Row, found: &[f64]) -> f64 {
        assert!(!found.is_empty() && found.len() <= self.f64.len(), "{} steps of {}", found.len(), self.f64.len());
        let (mut worst, mut torch_off) = (0.0_f64, 0.0_f64);
        for ((found, &exact), &rounded) in found.iter().zip(&self.f64).zip(&self.f32) {
            torch_off = torch_off.max((rounded - exact).abs());
            worst = worst.max(units((found - exact).abs(), row.allowed(exact.abs(), torch_off)));
        }
        worst
    }
}

/// `distance` where `allowed` is the limit; NaN is infinitely far, and equality is near whatever is allowed.
pub fn units(distance: f64, allowed: f64) -> f64 {
    match distance {
        0.0 => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d => d / allowed,
    }
}

pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list of numbers").iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// The distance of a whole tensor from its summary in a golden, of the final parameters or gradients, in units of what the row allows.
///
/// Samples: relative to the tensor's size, which its samples tell, or by how far PyTorch's f32 is off. Norm and sum: as a number
/// each, the sum relative to the largest sum of a tensor of this norm.
pub fn tensor_distance(row: Row, golden: &Value, values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    if let Some(noise) = golden["noise"].as_array() {
        let bound = |i: usize| noise[i].as_u64().expect("an index") as usize;
        values[bound(0)..bound(1)].fill(0.0);
    }
    let n = values.len();
    let (exact, rounded) = (&golden["f64"], &golden["f32"]);
    let samples = numbers(&exact["samples"]);
    let size = samples.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let at = |k: usize| if n > 16 { k * (n - 1) / 15 } else { k };
    let sample_allowed = row.allowed(size, golden["f32_off"].as_f64().unwrap_or(0.0));
    let mut worst = 0.0_f64;
    for (k, sample) in samples.iter().enumerate() {
        worst = worst.max(units((values[at(k)] - sample).abs(), sample_allowed));
    }
    let number = |summary: &Value, key: &str| summary[key].as_f64().expect("a number");
    let torch_off = |key: &str| if rounded.is_null() { 0.0 } else { (number(rounded, key) - number(exact, key)).abs() };
    let norm = number(exact, "norm");
    let found = values.iter().map(|x| x * x).sum::<f64>().sqrt();
    worst = worst.max(units((found - norm).abs(), row.allowed(norm, torch_off("norm"))));
    let sum_allowed = row.allowed(norm * (n as f64).sqrt(), torch_off("sum"));
    worst = worst.max(units((values.iter().sum::<f64>() - number(exact, "sum")).abs(), sum_allowed));
    if exact["projections"].is_array() {
        let (exact, rounded) = (numbers(&exact["projections"]), numbers(&rounded["projections"]));
        let off = golden["f32_off"].as_f64().unwrap_or(0.0);
        for ((found, exact), rounded) in projections(&values).into_iter().zip(exact).zip(rounded) {
            // The f64 row bears no more of the sum than of an element; rounding to f32 adds up.
            let allowed = match row {
                Row::F64 => row.allowed(size, 0.0),
                Row::F32 => row.allowed(norm, off.max((rounded - exact).abs())),
            };
            worst = worst.max(units((found - exact).abs(), allowed));
        }
    }
    worst
}

/// Sums over all elements, each times a number of its own in [-1, 1): `samples/golden.py` says which.
fn projections(values: &[f64]) -> [f64; 2] {
    [2.0_f64, 3.0].map(|root| {
        let factor = |at: usize| 2.0 * ((at + 1) as f64 * root.sqrt()).fract() - 1.0;
        values.iter().enumerate().map(|(at, x)| x * factor(at)).sum()
    })
}

#[test]
fn the_table_is_a_limit() {
    let golden = serde_json::json!({
        "f32": { "loss": [2.001, 1.0], "grad_norm": [1.0, 1.0] }, "f64": { "loss": [2.0, 1.0], "grad_norm": [1.0, 1.0] },
    });
    let loss = Series::of(&golden, "loss");
    // The second step has the first one's noise; the norms have none, so the floor.
    assert!(loss.distance(Row::F32, &[2.0, 1.019]) < 1.0 && loss.distance(Row::F32, &[2.0, 1.021]) > 1.0);
    let norm = Series::of(&golden, "grad_norm");
    assert!(norm.distance(Row::F32, &[1.000019]) < 1.0 && norm.distance(Row::F32, &[1.000021]) > 1.0);
    assert!(norm.distance(Row::F64, &[1.0, 1.0 + 0.9e-9]) < 1.0 && norm.distance(Row::F64, &[1.0, 1.0 + 1.1e-9]) > 1.0);
    assert!(norm.distance(Row::F32, &[f64::NAN]).is_infinite());
    let summary = serde_json::json!({ "samples": [3.0, 4.0], "norm": 5.0, "sum": 7.0 });
    let tensor = serde_json::json!({ "f64": summary, "f32": summary, "f32_off": 0.0, "noise": [2, 3] });
    assert_eq!(tensor_distance(Row::F64, &tensor, &[3.0, 4.0, 9.0]), 0.0);
    assert!(tensor_distance(Row::F64, &tensor, &[3.0, 4.0 + 1e-8, 9.0]) > 1.0);
}

#[test]
fn no_element_is_off_unseen() {
    let mut values: Vec<f64> = (0..1000).map(|i| f64::from(i % 7) - 3.0).collect();
    let (sum, norm) = (values.iter().sum::<f64>(), values.iter().map(|x| x * x).sum::<f64>().sqrt());
    let summary = serde_json::json!({ "samples": [-3.0], "sum": sum, "norm": norm, "projections": projections(&values) });
    let tensor = serde_json::json!({ "f64": summary, "f32": summary, "f32_off": 1e-7 });
    let off = |values: &[f64]| Row::ALL.map(|row| tensor_distance(row, &tensor, values));
    assert_eq!(off(&values), [0.0, 0.0]);
    // Two elements that change places keep the sum, the norm and the samples.
    values.swap(101, 102);
    assert!(off(&values).iter().all(|&units| units > 1.0));
}
