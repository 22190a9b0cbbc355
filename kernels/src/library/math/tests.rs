//! How near elementary functions are to the exact values, and what they make of the ends of their range.

use super::*;

/// Compares with `exact` on a grid in `[low, high]`, in units of the last place of the result.
fn worst(low: f64, high: f64, mine: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
    let ulp = |y: f64| (f64::from(f32::from_bits((y.abs() as f32).to_bits() + 1)) - f64::from(y.abs() as f32)).max(1e-45);
    let error = |i: i32| {
        let x = (low + (high - low) * f64::from(i) / 200_000.0) as f32;
        let y = exact(f64::from(x));
        (f64::from(mine(x)) - y).abs() / ulp(y)
    };
    (0..=200_000).map(error).fold(0.0, f64::max)
}

/// Largest relative error on a grid, where the result is not tiny.
fn relative(low: f64, high: f64, mine: impl Fn(f64) -> f64, exact: impl Fn(f64) -> f64) -> f64 {
    let point = |i: i32| low + (high - low) * f64::from(i) / 50_000.0;
    let error = |x: f64| (mine(x) - exact(x)).abs() / exact(x).abs().max(1e-300);
    (0..=50_000).map(|i| error(point(i))).fold(0.0, f64::max)
}

/// erf by its series with positive terms: 2/sqrt(pi) exp(-x^2) Σ 2^n x^(2n+1) / (2n+1)!!.
fn erf_series(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..400 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[test]
fn f32_within_two_ulp() {
    let cases: [(&str, f64); 13] = [
        ("exp", worst(-104.0, 88.7, Real::exp, f64::exp)),
        ("exp near 0", worst(-1.0, 1.0, Real::exp, f64::exp)),
        ("expm1", worst(-5.0, 5.0, Real::expm1, f64::exp_m1)),
        ("log", worst(1e-4, 8.0, Real::log, f64::ln)),
        ("log large", worst(1.0, 1e30, Real::log, f64::ln)),
        ("log1p", worst(-0.9, 4.0, Real::log1p, f64::ln_1p)),
        ("tanh", worst(-10.0, 10.0, Real::tanh, f64::tanh)),
        ("logistic", worst(-80.0, 80.0, Real::logistic, |x| 1.0 / (1.0 + (-x).exp())) - 0.5),
        ("erf", worst(-4.0, 4.0, Real::erf, erf_series)),
        ("sin", worst(-10.0, 10.0, Real::sin, f64::sin)),
        ("sin large", worst(-9.9e5, 9.9e5, Real::sin, f64::sin)),
        ("cos", worst(-10.0, 10.0, Real::cos, f64::cos)),
        ("cos large", worst(-9.9e5, 9.9e5, Real::cos, f64::cos)),
    ];
    assert!(cases.iter().all(|case| case.1 <= 2.0), "{cases:?}");
}

#[test]
fn f64_within_a_few_rounding_errors() {
    let cases: [(&str, f64); 11] = [
        ("exp", relative(-700.0, 700.0, Real::exp, f64::exp)),
        ("expm1", relative(-5.0, 5.01, Real::expm1, f64::exp_m1)),
        ("log", relative(1e-4, 8.0, Real::log, f64::ln)),
        ("log1p", relative(-0.9, 4.001, Real::log1p, f64::ln_1p)),
        ("tanh", relative(-10.0, 10.001, Real::tanh, f64::tanh)),
        ("logistic", relative(-30.0, 30.0, Real::logistic, |x| 1.0 / (1.0 + (-x).exp()))),
        ("erf", relative(-5.0, 5.001, Real::erf, erf_series)),
        ("sin", relative(-10.0, 10.001, Real::sin, f64::sin)),
        ("sin large", relative(-9.9e5, 9.9e5, Real::sin, f64::sin)),
        ("cos", relative(-10.0, 10.001, Real::cos, f64::cos)),
        ("cos large", relative(-9.9e5, 9.9e5, Real::cos, f64::cos)),
    ];
    assert!(cases.iter().all(|case| case.1 <= 2e-15), "{cases:?}");
}

/// x, the exact value of `gelu` and of its slope, and the same of `gelu_tanh`, on a grid.
fn gelus() -> impl Iterator<Item = (f64, [f64; 4])> {
    use std::f64::consts::{FRAC_1_SQRT_2, PI};
    (-60_000..=60_000).map(|i| f64::from(i) / 10_000.0).map(|x| {
        let below = 0.5 + 0.5 * erf_series(x * FRAC_1_SQRT_2);
        let bell = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
        let inner = (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        let (t, steep) = (inner.tanh(), (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x));
        let slope = 0.5 + 0.5 * t + 0.5 * x * steep / inner.cosh().powi(2);
        (x, [x * below, below + x * bell, 0.5 * x * (1.0 + t), slope])
    })
}

/// Both sums of which one half may cancel the other: errors are of 1 + |x|.
#[test]
fn gelus_within_a_few_rounding_errors() {
    let worst = |mine: &dyn Fn(f64) -> [f64; 4]| {
        let error = |(x, exact): (f64, [f64; 4])| {
            let mine = mine(x);
            (0..4).map(|i| (mine[i] - exact[i]).abs() / (1.0 + x.abs())).fold(0.0, f64::max)
        };
        gelus().map(error).fold(0.0, f64::max)
    };
    let single = worst(&|x| {
        let x = x as f32;
        [x.gelu(), x.gelu_slope(), x.gelu_tanh(), x.gelu_tanh_slope()].map(f64::from)
    });
    let double = worst(&|x| [x.gelu(), x.gelu_slope(), x.gelu_tanh(), x.gelu_tanh_slope()]);
    assert!(single < 2e-7 && double < 1e-15, "f32 {single:e}, f64 {double:e}");
    // The control: the two are not one function.
    assert!(worst(&|x| [x.gelu_tanh(), x.gelu_tanh_slope(), x.gelu(), x.gelu_slope()]) > 1e-4);
    let slope = |f: fn(f64) -> f64, x: f64| (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
    for x in [-3.0, -0.7, 0.0, 0.4, 2.5] {
        assert!((slope(Real::gelu, x) - x.gelu_slope()).abs() < 1e-9, "{x}");
        assert!((slope(Real::gelu_tanh, x) - x.gelu_tanh_slope()).abs() < 1e-9, "{x}");
    }
}

#[test]
fn ends_of_the_range() {
    assert_eq!([Real::exp(f32::INFINITY), Real::exp(f32::NEG_INFINITY), Real::exp(90f32)], [f32::INFINITY, 0.0, f32::INFINITY]);
    assert_eq!([Real::exp(f64::INFINITY), Real::exp(-800f64), Real::exp(f64::NEG_INFINITY)], [f64::INFINITY, 0.0, 0.0]);
    // The least of all numbers, and what rounds to zero.
    assert_eq!([-103.2f32, -103.97, -103.98, -104.1].map(Real::exp), [f32::from_bits(1), f32::from_bits(1), 0.0, 0.0]);
    assert_eq!([-745.1f64, -745.14, -746.1].map(Real::exp), [f64::from_bits(1), 0.0, 0.0]);
    assert_eq!([Real::log(0f32), Real::log(f32::INFINITY)], [f32::NEG_INFINITY, f32::INFINITY]);
    assert_eq!(
        [Real::log1p(-1f64), Real::log1p(1e-300f64), Real::log1p(f64::INFINITY)],
        [f64::NEG_INFINITY, 1e-300, f64::INFINITY]
    );
    assert_eq!([Real::tanh(100f32), Real::tanh(-f32::INFINITY), Real::tanh(-0f32)], [1.0, -1.0, 0.0]);
    assert_eq!([Real::erf(f64::INFINITY), Real::erf(-20f64)], [1.0, -1.0]);
    assert_eq!([Real::logistic(-200f32), Real::logistic(200f32)], [0.0, 1.0]);
    assert_eq!([Real::sin(0f32), Real::cos(0f32), Real::cos(-0f32)], [0.0, 1.0, 1.0]);
    assert!(Real::sin(-0f32).is_sign_negative() && Real::sin(-0f64).is_sign_negative());
    assert!(!f32::NAN.is_moderate() && !f64::INFINITY.is_moderate() && 1e5f32.is_moderate());
    // The nearest to a multiple of π/2: almost nothing is left.
    assert_eq!(Real::sin(std::f64::consts::PI), std::f64::consts::PI.sin());
    assert!((Real::log(1e-40f32) - (1e-40f32 as f64).ln() as f32).abs() < 1e-4);
    let nan = [
        Real::exp(f32::NAN),
        Real::log(f32::NAN),
        Real::log(-1f32),
        Real::tanh(f32::NAN),
        Real::erf(f32::NAN),
        Real::log1p(f32::NAN),
    ];
    assert!(nan.iter().all(|x| x.is_nan()), "{nan:?}");
}
