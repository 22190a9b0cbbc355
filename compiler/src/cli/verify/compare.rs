//! Whether two tensors are the same to rounding.

use dcc_program::DType;
use dcc_runtime::data::Convert;
use dcc_runtime::exec::whole::Tensor;

/// Beyond these, a number stands for minus or plus infinity, as masks have it, and says nothing about a tensor's scale.
const INFINITE: f64 = 1e30;
/// What a tensor's scale is at least.
const LEAST_SCALE: f64 = 1e-3;

/// Largest difference relative to the tensor's largest element. Integers and bools are equal or not.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-9,
        DType::F32 => 1e-4,
        DType::F16 => 1e-2,
        DType::BF16 => 5e-2,
        _ => 0.0,
    }
}

/// How far `ours` is from `theirs`, in units of what is allowed; or how they differ.
pub fn distance(ours: &Tensor, theirs: &Tensor) -> Result<f64, String> {
    if ours.shape != theirs.shape || ours.dtype.is_float() != theirs.dtype.is_float() {
        let ty = |tensor: &Tensor| format!("{}{:?}", tensor.dtype.name(), tensor.shape);
        return Err(format!("dcc's is {}, tract's {}", ty(ours), ty(theirs)));
    }
    let (a, b) = (numbers(ours), numbers(theirs));
    let finite = b.iter().map(|x| x.abs()).filter(|x| *x < INFINITE);
    let allowed = tolerance(ours.dtype) * finite.fold(LEAST_SCALE, f64::max);
    let mut worst = (0.0, 0);
    for (at, (a, b)) in a.iter().zip(&b).enumerate() {
        let beyond = |x: f64| x.abs() >= INFINITE;
        let same = a == b || a.is_nan() && b.is_nan() || beyond(*a) && beyond(*b) && a.signum() == b.signum();
        let units = if same { 0.0 } else { (a - b).abs() / allowed };
        if units > worst.0 || units.is_nan() {
            worst = (if units.is_nan() { f64::INFINITY } else { units }, at);
        }
    }
    if worst.0 <= 1.0 {
        return Ok(worst.0);
    }
    let differ = a.iter().zip(&b).filter(|(a, b)| (*a - *b).abs() > allowed || a.is_nan() != b.is_nan()).count();
    let at = index(worst.1 as u64, &ours.shape);
    Err(format!("{differ} of {} elements differ; the furthest, {at:?}: dcc has {}, tract {}", a.len(), a[worst.1], b[worst.1]))
}

pub fn numbers(tensor: &Tensor) -> Vec<f64> {
    let mut bytes = vec![0; tensor.bytes.len() / tensor.dtype.bytes() as usize * 8];
    Convert::new(tensor.dtype, DType::F64).run(&tensor.bytes, &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes)).collect()
}

fn index(mut at: u64, shape: &[u64]) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for dim in (0..shape.len()).rev() {
        index[dim] = at % shape[dim];
        at /= shape[dim];
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        Tensor { dtype: DType::F32, shape: vec![values.len() as u64], bytes }
    }

    #[test]
    fn rounding_is_no_difference() {
        let (nan, inf, masked) = (f32::NAN, f32::INFINITY, f32::MIN);
        assert!(distance(&floats(&[1.0, nan, inf, masked]), &floats(&[1.000_01, nan, inf, -inf])).is_ok());
        let far = distance(&floats(&[3.0, 1.0, masked]), &floats(&[3.0, 1.001, masked]));
        assert_eq!(far, Err("1 of 3 elements differ; the furthest, [1]: dcc has 1, tract 1.0010000467300415".to_owned()));
        assert!(distance(&floats(&[nan]), &floats(&[1.0])).is_err());
        assert!(distance(&floats(&[1.0]), &floats(&[1.0, 1.0])).is_err());
    }
}
