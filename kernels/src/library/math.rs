//! Elementary functions as straight-line code without branches, so that loops over them become vector code.
//!
//! f32: at most 2 units in the last place (logistic 2.5), f64: about 1e-15 relative; both over the whole range, subnormal results, infinities and
//! NaN included. Only fused multiply-add, so that every instruction set gives the same bits. Polynomials of exp, log and tanh follow
//! Cephes (Moshier), erf in f32 Juffa, in f64 fdlibm (Sun Microsystems); GELU in f32 has its own, in `sigmoid`, of 2e-7 of 1 + |x|.

#![allow(clippy::excessive_precision, reason = "constants stand as their sources print them")]

/// Functions of one real type, inlined into the loops that call them.
pub trait Real: super::simd::Element + PartialOrd {
    fn exp(self) -> Self;
    fn expm1(self) -> Self;
    fn log(self) -> Self;
    fn log1p(self) -> Self;
    fn tanh(self) -> Self;
    fn logistic(self) -> Self;
    fn erf(self) -> Self;
    /// x Φ(x). Hendrycks and Gimpel 2016, arXiv 1606.08415.
    fn gelu(self) -> Self;
    /// The derivative of `gelu`: Φ(x) + x exp(-x²/2) / √(2π).
    fn gelu_slope(self) -> Self;
    /// Its approximation x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).
    fn gelu_tanh(self) -> Self;
    /// The derivative of `gelu_tanh`, with t the tanh of u: (1 + t)/2 + x/2 (1 - t²) u'.
    fn gelu_tanh_slope(self) -> Self;
    /// Of `is_moderate` arguments, as is `cos`.
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    /// Whether x is small enough for `sin`. NaN is not.
    fn is_moderate(self) -> bool;
}

/// c[0] x^n + c[1] x^(n-1) + … by Horner's rule.
macro_rules! horner {
    ($x:expr, $first:expr $(, $c:expr)*) => {{
        let x = $x;
        let p = $first;
        $(let p = x.mul_add(p, $c);)*
        p
    }};
}

macro_rules! pick {
    ($condition:expr, $yes:expr, $no:expr) => {{
        let (yes, no) = ($yes, $no);
        if $condition { yes } else { no }
    }};
}

mod circular;
mod sigmoid;
#[cfg(test)]
mod tests;

/// √(2/π), and that times 0.044715.
const SCALE: f64 = 0.797_884_560_802_865_36;
const CUBE: f64 = 0.035_677_408_136_300_125;

/// What f32 and f64 compute alike, given `exp` and the polynomials.
macro_rules! shared {
    ($log:expr) => {
        #[inline(always)]
        fn log(self) -> Self {
            $log(self)
        }

        #[inline(always)]
        fn log1p(self) -> Self {
            let u = 1.0 + self;
            let exact = u - 1.0;
            let fixed = u.log_of() - (exact - self) / u;
            pick!(u == 1.0, self, pick!(u < Self::INFINITY && u > 0.0, fixed, u.log_of()))
        }

        #[inline(always)]
        fn logistic(self) -> Self {
            1.0 / (1.0 + Real::exp(-self))
        }
    };
}

/// `log` under a name that does not meet the inherent method.
trait LogOf {
    fn log_of(self) -> Self;
}
impl LogOf for f32 {
    #[inline(always)]
    fn log_of(self) -> f32 {
        log_f32(self)
    }
}
impl LogOf for f64 {
    #[inline(always)]
    fn log_of(self) -> f64 {
        log_f64(self)
    }
}

/// exp(x) is 2^n times the first result, which is of [0.7, 1.5]; the second has n + `bias` in its low 9 bits.
#[inline(always)]
fn exp_parts(x: f32, bias: f32) -> (f32, u32) {
    let round = 12_582_912.0 + bias;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, round);
    let n = shifted - round;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let p = horner!(r, 1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5);
    ((r * r).mul_add(p, r) + 1.0, shifted.to_bits())
}

/// exp for -87 <= x <= 88, and NaN.
#[inline(always)]
fn exp_moderate(x: f32) -> f32 {
    let (y, exponent) = exp_parts(x, 127.0);
    y * f32::from_bits(exponent << 23)
}

impl Real for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        // Multiplied, what is rounded to zero would stop some processors for a hundred cycles, and hidden scores are many.
        let vanishes = self < -104.0;
        let x = pick!(self > 89.0, 89.0, self);
        let x = pick!(vanishes, 0.0, x);
        // 2^n in two factors, so that subnormal results round once and overflow gives infinity; twice the exponents' bias is in `whole`.
        let (y, whole) = exp_parts(x, 254.0);
        let half = whole >> 1;
        pick!(vanishes, 0.0, y * f32::from_bits(half << 23) * f32::from_bits((whole - half) << 23))
    }

    #[inline(always)]
    fn expm1(self) -> f32 {
        let x = self;
        let p = horner!(
            x,
            2.505_211e-8,
            2.755_731_9e-7,
            2.755_731_9e-6,
            2.480_158_7e-5,
            1.984_127e-4,
            1.388_888_9e-3,
            8.333_334e-3,
            4.166_666_8e-2,
            1.666_666_7e-1,
            0.5
        );
        let near = (x * x).mul_add(p, x);
        pick!(x.abs() < 0.7, near, Real::exp(x) - 1.0)
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        let z = self * self;
        let p = horner!(z, -5.704_988_7e-3, 2.063_908_9e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1);
        let near = (p * z).mul_add(self, self);
        // From there on it is 1.
        let t = pick!(self.abs() > 10.0, 10.0, self.abs());
        let far = (1.0 - 2.0 / (exp_moderate(2.0 * t) + 1.0)).copysign(self);
        pick!(self.abs() < 0.625, near, far)
    }

    #[inline(always)]
    fn erf(self) -> f32 {
        // From 4 on it is 1.
        let t = pick!(self.abs() > 4.0, 4.0, self.abs());
        let s = t * t;
        let r = t.mul_add(-1.728_534_7e-5, 3.831_971_3e-4);
        let u = t.mul_add(-3.883_964_4e-3, 2.425_462_2e-2);
        let r = horner!(t, r.mul_add(s, u), -1.067_778_77e-1, -6.348_466_87e-1, -1.287_175_12e-1);
        let far = (1.0 - exp_moderate(r.mul_add(t, -t))).copysign(self);
        let p = horner!(s, -5.967_617e-4, 4.991_194_2e-3, -2.676_813_5e-2, 1.128_199_2e-1, -3.761_253_4e-1, 1.283_791_7e-1);
        pick!(t > 0.927_734_4, far, p.mul_add(self, self))
    }

    #[inline(always)]
    fn sin(self) -> f32 {
        circular::sine(self, 0)
    }

    #[inline(always)]
    fn cos(self) -> f32 {
        circular::sine(self, 1)
    }

    #[inline(always)]
    fn is_moderate(self) -> bool {
        self.abs() < circular::LARGE as f32
    }

    #[inline(always)]
    fn gelu(self) -> f32 {
        self.mul_add(sigmoid::phi(self), self * 0.5)
    }

    #[inline(always)]
    fn gelu_slope(self) -> f32 {
        sigmoid::phi_slope(self) + 0.5
    }

    #[inline(always)]
    fn gelu_tanh(self) -> f32 {
        self.mul_add(sigmoid::tanh(self), self * 0.5)
    }

    #[inline(always)]
    fn gelu_tanh_slope(self) -> f32 {
        sigmoid::tanh_slope(self) + 0.5
    }

    shared!(log_f32);
}

impl Real for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
        const ROUND: f64 = 6_755_399_441_055_744.0;
        let vanishes = self < -746.0;
        let x = pick!(self > 710.0, 710.0, self);
        let x = pick!(vanishes, 0.0, x);
        let shifted = x.mul_add(std::f64::consts::LOG2_E, ROUND);
        let n = shifted - ROUND;
        let r = n.mul_add(-1.908_214_929_270_587_7e-10, n.mul_add(-6.931_471_803_691_238_2e-1, x));
        let p = horner!(
            r,
            1.0 / 6_227_020_800.0,
            1.0 / 479_001_600.0,
            1.0 / 39_916_800.0,
            1.0 / 3_628_800.0,
            1.0 / 362_880.0,
            1.0 / 40_320.0,
            1.0 / 5040.0,
            1.0 / 720.0,
            1.0 / 120.0,
            1.0 / 24.0,
            1.0 / 6.0,
            0.5
        );
        let y = (r * r).mul_add(p, r) + 1.0;
        let whole = shifted.to_bits() as i64 - ROUND.to_bits() as i64;
        let half = whole >> 1;
        let power = f64::from_bits(((whole - half + 1023) << 52) as u64);
        pick!(vanishes, 0.0, y * f64::from_bits(((half + 1023) << 52) as u64) * power)
    }

    #[inline(always)]
    fn expm1(self) -> f64 {
        let x = self;
        let p = horner!(
            x,
            1.0 / 121_645_100_408_832_000.0,
            1.0 / 6_402_373_705_728_000.0,
            1.0 / 355_687_428_096_000.0,
            1.0 / 20_922_789_888_000.0,
            1.0 / 1_307_674_368_000.0,
            1.0 / 87_178_291_200.0,
            1.0 / 6_227_020_800.0,
            1.0 / 479_001_600.0,
            1.0 / 39_916_800.0,
            1.0 / 3_628_800.0,
            1.0 / 362_880.0,
            1.0 / 40_320.0,
            1.0 / 5040.0,
            1.0 / 720.0,
            1.0 / 120.0,
            1.0 / 24.0,
            1.0 / 6.0,
            0.5
        );
        pick!(x.abs() < 0.7, (x * x).mul_add(p, x), Real::exp(x) - 1.0)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        let z = self * self;
        let p = horner!(z, -9.643_991_794_250_523e-1, -9.928_772_310_019_185e1, -1.614_687_684_417_084_5e3);
        let q = horner!(z, 1.0, 1.128_116_784_916_329_3e2, 2.235_488_390_601_004_5e3, 4.844_063_053_251_255e3);
        let near = (self * z).mul_add(p / q, self);
        let far = (1.0 - 2.0 / (Real::exp(2.0 * self.abs()) + 1.0)).copysign(self);
        pick!(self.abs() < 0.625, near, far)
    }

    #[inline(always)]
    fn erf(self) -> f64 {
        let x = self.abs();
        let value = pick!(x < 0.84375, erf_near(x), pick!(x < 1.25, erf_middle(x), erf_far(x)));
        value.copysign(self)
    }

    #[inline(always)]
    fn sin(self) -> f64 {
        circular::sine_f64(self, 0)
    }

    #[inline(always)]
    fn cos(self) -> f64 {
        circular::sine_f64(self, 1)
    }

    #[inline(always)]
    fn is_moderate(self) -> bool {
        self.abs() < circular::LARGE
    }

    #[inline(always)]
    fn gelu(self) -> Self {
        self * 0.5 * (Real::erf(self * std::f64::consts::FRAC_1_SQRT_2) + 1.0)
    }

    #[inline(always)]
    fn gelu_slope(self) -> Self {
        let below = (Real::erf(self * std::f64::consts::FRAC_1_SQRT_2) + 1.0) * 0.5;
        self.mul_add(Real::exp(self * self * -0.5) * 0.398_942_280_401_432_68, below)
    }

    #[inline(always)]
    fn gelu_tanh(self) -> Self {
        self * 0.5 * (Real::tanh(self * (self * self).mul_add(CUBE, SCALE)) + 1.0)
    }

    #[inline(always)]
    fn gelu_tanh_slope(self) -> Self {
        let square = self * self;
        let t = Real::tanh(self * square.mul_add(CUBE, SCALE));
        let steep = self * (1.0 - t * t) * square.mul_add(3.0 * CUBE, SCALE);
        (1.0 + t + steep) * 0.5
    }

    shared!(log_f64);
}

/// x = m 2^e with m in [sqrt(1/2), sqrt(2)); then log m = 2 atanh((m-1)/(m+1)).
#[inline(always)]
fn log_f32(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = pick!(tiny, x * 33_554_432.0, x);
    let bits = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (bits as i32 >> 23) as f32 - pick!(tiny, 25.0, 0.0);
    let m = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let f = (m - 1.0) / (m + 1.0);
    let z = f * f;
    let p = horner!(z, 0.117_5, 0.142_61, 0.200_001_5, 0.333_333_33);
    // 2f = (m-1) - f (m-1): the leading part exact.
    let (d, tail) = (m - 1.0, 2.0 * f * z * p);
    let value = e.mul_add(0.693_359_4, d - (f * d - e.mul_add(-2.121_944_4e-4, tail)));
    pick!(x > 0.0, pick!(x < f32::INFINITY, value, x), pick!(x == 0.0, f32::NEG_INFINITY, f32::NAN))
}

#[inline(always)]
fn log_f64(x: f64) -> f64 {
    let tiny = x < f64::MIN_POSITIVE;
    let scaled = pick!(tiny, x * 18_014_398_509_481_984.0, x);
    let bits = scaled.to_bits().wrapping_sub(0x3fe6_a09e_667f_3bcd);
    let e = (bits as i64 >> 52) as f64 - pick!(tiny, 54.0, 0.0);
    let m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff).wrapping_add(0x3fe6_a09e_667f_3bcd));
    let f = (m - 1.0) / (m + 1.0);
    let z = f * f;
    let p = horner!(
        z,
        1.0 / 23.0,
        1.0 / 21.0,
        1.0 / 19.0,
        1.0 / 17.0,
        1.0 / 15.0,
        1.0 / 13.0,
        1.0 / 11.0,
        1.0 / 9.0,
        1.0 / 7.0,
        1.0 / 5.0,
        1.0 / 3.0
    );
    let (d, tail) = (m - 1.0, 2.0 * f * z * p);
    let value = e.mul_add(6.931_471_803_691_238_2e-1, d - (f * d - e.mul_add(1.908_214_929_270_587_7e-10, tail)));
    pick!(x > 0.0, pick!(x < f64::INFINITY, value, x), pick!(x == 0.0, f64::NEG_INFINITY, f64::NAN))
}

#[inline(always)]
fn erf_near(x: f64) -> f64 {
    let z = x * x;
    let p = horner!(
        z,
        -2.376_301_665_665_016_3e-5,
        -5.770_270_296_489_441_6e-3,
        -2.848_174_957_559_851e-2,
        -3.250_421_072_470_015e-1,
        1.283_791_670_955_125_6e-1
    );
    let q = horner!(
        z,
        -3.960_228_278_775_368e-6,
        1.324_947_380_043_216_4e-4,
        5.081_306_281_875_766e-3,
        6.502_224_998_876_729e-2,
        3.979_172_239_591_553_5e-1,
        1.0
    );
    x.mul_add(p / q, x)
}

#[inline(always)]
fn erf_middle(x: f64) -> f64 {
    let s = x - 1.0;
    let p = horner!(
        s,
        -2.166_375_594_868_791e-3,
        3.547_830_432_561_823_6e-2,
        -1.108_946_942_823_966_8e-1,
        3.183_466_199_011_617_5e-1,
        -3.722_078_760_357_013e-1,
        4.148_561_186_837_483_3e-1,
        -2.362_118_560_752_659_4e-3
    );
    let q = horner!(
        s,
        1.198_449_984_679_910_7e-2,
        1.363_708_391_202_905e-2,
        1.261_712_198_087_616_4e-1,
        7.182_865_441_419_627e-2,
        5.403_979_177_021_71e-1,
        1.064_208_804_008_442_3e-1,
        1.0
    );
    8.450_629_115_104_675e-1 + p / q
}

#[inline(always)]
fn erf_far(x: f64) -> f64 {
    let x = pick!(x > 6.0, 6.0, x);
    let s = 1.0 / (x * x);
    let near = horner!(
        s,
        -9.814_329_344_169_145,
        -8.128_743_550_630_66e1,
        -1.846_050_929_067_110_4e2,
        -1.623_966_694_625_734_7e2,
        -6.237_533_245_032_601e1,
        -1.055_862_622_532_329_1e1,
        -6.938_585_727_071_818e-1,
        -9.864_944_034_847_148e-3
    ) / horner!(
        s,
        -6.042_441_521_485_81e-2,
        6.570_249_770_319_282,
        1.086_350_055_417_794_4e2,
        4.290_081_400_275_678_3e2,
        6.453_872_717_332_679e2,
        4.345_658_774_752_292_3e2,
        1.376_577_541_435_190_4e2,
        1.965_127_166_743_925_7e1,
        1.0
    );
    let far = horner!(
        s,
        -4.835_191_916_086_514e2,
        -1.025_095_131_611_077_2e3,
        -6.375_664_433_683_896e2,
        -1.606_363_848_558_219_2e2,
        -1.775_795_491_775_475_2e1,
        -7.992_832_376_805_23e-1,
        -9.864_942_924_700_1e-3
    ) / horner!(
        s,
        -2.244_095_244_658_582e1,
        4.745_285_412_069_554e2,
        2.553_050_406_433_164e3,
        3.199_858_219_508_595_5e3,
        1.536_729_586_084_437e3,
        3.257_925_129_965_739e2,
        3.033_806_074_348_245_8e1,
        1.0
    );
    let ratio = pick!(x < 1.0 / 0.35, near, far);
    // exp(-x^2) with x^2 = z^2 + (x-z)(x+z), z = x cut to half its digits, so that the exponent is exact.
    let z = f64::from_bits(x.to_bits() & 0xffff_ffff_0000_0000);
    let tail = Real::exp(-z * z - 0.5625) * Real::exp((z - x).mul_add(z + x, ratio));
    1.0 - tail / x
}
