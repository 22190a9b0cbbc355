//! Sine and cosine of moderate arguments: x less the nearest multiple of π/2, whose number says which of two polynomials it is and with
//! what sign. π/2 is a sum of two f64: products of it with a whole number leave no more than the polynomials' own error up to `LARGE`.
//! Polynomials follow Cephes (Moshier) in f32, fdlibm (Sun Microsystems) in f64.

/// Greater arguments lose digits.
pub(super) const LARGE: f64 = 1e6;

/// Adding it leaves a whole number in a float's last digits.
const ROUND: f64 = 6_755_399_441_055_744.0;
const HALF_PI: f64 = std::f64::consts::FRAC_PI_2;
/// What π/2 is more than `HALF_PI`.
const HALF_PI_REST: f64 = 6.123_233_995_736_766e-17;

/// x less a multiple of π/2, and the multiple in the last bits.
#[inline(always)]
fn reduced(x: f64) -> (f64, u64) {
    let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, ROUND);
    let n = shifted - ROUND;
    let near = (-n).mul_add(HALF_PI, x);
    ((-n).mul_add(HALF_PI_REST, near), shifted.to_bits())
}

/// sin(x + quarter π/2).
#[inline(always)]
pub(super) fn sine(x: f32, quarter: u64) -> f32 {
    let (r, n) = reduced(f64::from(x));
    let (r, n) = (r as f32, (n as u32).wrapping_add(quarter as u32));
    let z = r * r;
    let p = horner!(z, -1.951_529_589_1e-4, 8.332_160_873_6e-3, -1.666_665_461_1e-1);
    let sine = (p * z).mul_add(r, r).copysign(r);
    let p = horner!(z, 2.443_315_711_809_948e-5, -1.388_731_625_493_765e-3, 4.166_664_568_298_827e-2);
    let cosine = (z * z).mul_add(p, z.mul_add(-0.5, 1.0));
    let value = pick!(n & 1 == 0, sine, cosine);
    f32::from_bits(value.to_bits() ^ (n & 2) << 30)
}

/// The same in f64.
#[inline(always)]
pub(super) fn sine_f64(x: f64, quarter: u64) -> f64 {
    let (r, n) = reduced(x);
    let n = n.wrapping_add(quarter);
    let z = r * r;
    let p = horner!(
        z,
        1.589_690_995_211_55e-10,
        -2.505_076_025_340_686_34e-8,
        2.755_731_370_707_006_77e-6,
        -1.984_126_982_985_794_93e-4,
        8.333_333_333_322_489_46e-3,
        -1.666_666_666_666_663_24e-1
    );
    let sine = (p * z).mul_add(r, r).copysign(r);
    let p = horner!(
        z,
        -1.135_964_755_778_819_48e-11,
        2.087_572_321_298_174_83e-9,
        -2.755_731_435_139_066_33e-7,
        2.480_158_728_947_672_94e-5,
        -1.388_888_888_887_410_96e-3,
        4.166_666_666_666_660_19e-2
    );
    let cosine = (z * z).mul_add(p, z.mul_add(-0.5, 1.0));
    let value = pick!(n & 1 == 0, sine, cosine);
    f64::from_bits(value.to_bits() ^ (n & 2) << 62)
}
