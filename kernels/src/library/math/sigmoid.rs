//! What GELU's forms multiply x by, and their slopes, less one half: odd functions that go to a half, nearest rationals x P(x²) / Q(x²).
//! `rational.py` fits them, by the largest absolute error (at most 8e-9). They end, a few hundredths before the fit does, where the quotient
//! is a half to the last bit.

macro_rules! rational {
    ($name:ident, $end:expr, [$($p:expr),*] / [$($q:expr),*]) => {
        #[inline(always)]
        pub fn $name(x: f32) -> f32 {
            let x = pick!(x > $end, $end, x);
            let x = pick!(x < -$end, -$end, x);
            let square = x * x;
            x * horner!(square, $($p),*) / horner!(square, $($q),*)
        }
    };
}

// Φ(x).
rational!(
    phi,
    5.38,
    [2.338_676_73e-8, 6.360_021_70e-6, 1.643_215_53e-4, 4.650_850_35e-3, 3.337_221_14e-2, 3.989_422_45e-1]
        / [1.216_592_08e-6, 7.240_015_37e-5, 1.858_980_68e-3, 2.837_867_82e-2, 2.503_178_18e-1, 1.0]
);

// Φ(x) + x exp(-x²/2) / √(2π).
rational!(
    phi_slope,
    6.0,
    [
        -2.887_998_51e-11,
        1.300_290_59e-8,
        1.121_920_57e-6,
        3.202_717_12e-5,
        2.852_197_61e-4,
        1.356_901_91e-2,
        -1.803_824_38e-2,
        7.978_845_22e-1
    ] / [3.636_317_99e-7, 1.081_218_22e-5, 2.586_050_17e-4, 4.150_207_74e-3, 4.558_273_43e-2, 3.107_252_64e-1, 1.0]
);

// (1 + tanh u) / 2, u = √(2/π) (x + 0.044715 x³).
rational!(
    tanh,
    4.98,
    [2.254_511_09e-8, 6.872_190_49e-6, 1.336_395_07e-4, 3.624_087_42e-3, 3.058_703_30e-2, 3.989_423_14e-1]
        / [1.260_152_08e-6, 7.498_838_47e-5, 1.296_475_66e-3, 2.440_650_88e-2, 2.441_625_53e-1, 1.0]
);

// (1 + tanh u + x (1 - tanh² u) u') / 2.
rational!(
    tanh_slope,
    5.79,
    [
        -3.389_323_29e-11,
        1.041_519_77e-8,
        2.342_926_29e-7,
        2.822_404_46e-5,
        -2.293_092_93e-4,
        1.330_113_70e-2,
        -4.638_097_95e-2,
        7.978_845_05e-1
    ] / [1.864_986_70e-7, 4.521_646_53e-6, 1.346_754_91e-4, 1.889_339_23e-3, 3.269_825_42e-2, 2.768_526_74e-1, 1.0]
);

#[cfg(test)]
mod tests {
    #[test]
    fn ends_are_a_half() {
        let functions = [super::phi, super::phi_slope, super::tanh, super::tanh_slope];
        for x in [7.0, 1e10, f32::INFINITY] {
            assert_eq!(functions.map(|function| function(x)), [0.5; 4]);
            assert_eq!(functions.map(|function| function(-x)), [-0.5; 4]);
        }
        assert!(functions.iter().all(|function| function(f32::NAN).is_nan()));
    }
}
