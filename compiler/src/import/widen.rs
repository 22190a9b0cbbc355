//! The number that an f32 constant was before the exporter rounded it.
//!
//! ONNX attributes and scalars are f32, but `--dtype f64` should compute what the author wrote: `1e-5`, `1/√64`, `√(2/π)`.
//! Whatever is chosen here rounds to the same f32, so that nothing changes in f32.

/// The simplest number that rounds to `x`: a decimal of up to 6 digits, a root or a fraction of an integer; else `x` itself.
pub fn widen(x: f32) -> f64 {
    if !x.is_finite() || x == 0.0 {
        return f64::from(x);
    }
    let decimal: f64 = format!("{x:.5e}").parse().unwrap_or(f64::from(x));
    let size = f64::from(x.abs());
    let whole = |n: f64| n.round().clamp(1.0, 65536.0);
    let candidates = [
        whole(size.powi(-2)).sqrt().recip(),
        whole(size.powi(2)).sqrt(),
        whole(size.recip()).recip(),
        whole(size.powi(-4)).powf(-0.25),
        (2.0 / std::f64::consts::PI).sqrt(),
    ];
    let signed = candidates.map(|candidate| candidate.copysign(f64::from(x)));
    let fits = |candidate: &f64| *candidate as f32 == x;
    std::iter::once(decimal).chain(signed).find(fits).unwrap_or(f64::from(x))
}

#[cfg(test)]
mod tests {
    use super::widen;

    #[test]
    fn finds_what_was_written() {
        let written = [1e-5, 0.044715, -0.1, 3.0, 2_f64.sqrt(), 8_f64.sqrt().recip(), 8_f64.powf(-0.25), 1.0 / 3.0];
        for number in written.into_iter().chain([(2.0 / std::f64::consts::PI).sqrt()]) {
            assert!((widen(number as f32) - number).abs() <= 1e-15 * number.abs(), "{number}");
        }
        for number in [f32::MIN, f32::MAX, f32::INFINITY, 0.123_456_79, 1e-40] {
            assert_eq!(widen(number) as f32, number);
        }
    }
}
