//! Stochastic rounding of f32 to bf16: up with the probability of the fraction that is cut off, so that the mean of many roundings is the
//! value. What a step adds to a parameter then counts, even if it is less than half of the parameter's last digit. Gupta et al. 2015,
//! arXiv 1502.02551; of parameters in bf16, Zamirai et al. 2020, arXiv 2010.06192.

/// What `BinaryOp::RoundStochastic` means: `x`, rounded to what bf16 holds. The leading 16 bits of `u`, a uniform number in [0, 1) as
/// `philox::uniform` gives it, are added to the bits of `x`, whose last 16 are then cut off: away from zero in as many of the 2¹⁶ cases as
/// these 16 bits say. Values of bf16, infinities and NaN stay as they are; what is past the largest bf16 may become infinite. Of any
/// other `u` the result is unspecified.
#[inline(always)]
pub fn stochastic(x: f32, u: f32) -> f32 {
    let random = (u * 65536.0) as i32 as u32;
    let rounded = f32::from_bits(x.to_bits().wrapping_add(random) & 0xffff_0000);
    // The digits of a NaN could carry into its sign.
    if x.is_nan() { x } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::uniform;

    const COUNT: u64 = 1 << 16;

    /// `x` by each of `COUNT` random numbers.
    fn roundings(x: f32) -> impl Iterator<Item = f64> {
        (0..COUNT).map(move |element| f64::from(stochastic(x, uniform(9, 5, 3, element))))
    }

    /// How far the mean of many roundings is from `x`, in standard deviations of that mean: of n roundings up with probability p,
    /// `ulp √(p (1 - p) / n)`.
    fn sigmas(x: f32, mean: f64) -> f64 {
        let low = f32::from_bits(x.to_bits() & 0xffff_0000);
        let ulp = f64::from(f32::from_bits(low.to_bits() + 0x1_0000)) - f64::from(low);
        let p = (f64::from(x) - f64::from(low)) / ulp;
        (mean - f64::from(x)).abs() / (ulp.abs() * (p * (1.0 - p) / COUNT as f64).sqrt())
    }

    /// Values between two neighbours in bf16, of both signs, of many magnitudes, also below the smallest normal number.
    fn between() -> impl Iterator<Item = f32> {
        let fractions = [0x0001_u32, 0x0123, 0x1000, 0x4000, 0x7fff, 0x8000, 0x8001, 0xc000, 0xfff0];
        let heads = [0x3f80_u32, 0x3fff, 0xbf81, 0x0001, 0x8003, 0x0080, 0x7f7e, 0x4240];
        heads.into_iter().flat_map(move |head| fractions.map(|fraction| f32::from_bits(head << 16 | fraction)))
    }

    #[test]
    fn the_mean_is_the_value() {
        for x in between() {
            let mean = roundings(x).sum::<f64>() / COUNT as f64;
            assert!(sigmas(x, mean) < 4.0, "{x:e} becomes {mean:e}, {} sigmas off", sigmas(x, mean));
            // The control: the nearest one is not the mean, but where the fraction is all but nothing or all.
            let nearest = f64::from(half::bf16::from_f32(x).to_f32());
            let fraction = x.to_bits() & 0xffff;
            assert!((0x0100..=0xff00).contains(&fraction) <= (sigmas(x, nearest) > 4.0), "{x:e} is {nearest:e}");
        }
    }

    #[test]
    fn both_neighbours_and_nothing_else() {
        for x in between() {
            let low = f64::from(f32::from_bits(x.to_bits() & 0xffff_0000));
            let high = f64::from(f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000));
            assert!(roundings(x).all(|y| y == low || y == high), "{x:e}");
            // Each of the 2¹⁶ cases is as likely, so one in 2¹⁶ may be missed.
            let rare = x.to_bits() & 0xffff == 1;
            assert!(rare || roundings(x).any(|y| y == low) && roundings(x).any(|y| y == high), "{x:e}");
        }
    }

    #[test]
    fn what_bf16_holds_never_changes() {
        let largest = 1.0 - f32::EPSILON / 2.0;
        for bits in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(bits) << 16);
            for u in [0.0, 0.3, largest] {
                let y = stochastic(x, u);
                assert!(y.to_bits() == x.to_bits() || x.is_nan() && y.is_nan(), "{x:e} with {u} becomes {y:e}");
            }
        }
    }

    #[test]
    fn special_values() {
        let largest = 1.0 - f32::EPSILON / 2.0;
        for nan in [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7fc0_0000] {
            assert!([0.0, 0.5, largest].into_iter().all(|u| stochastic(f32::from_bits(nan), u).is_nan()), "{nan:x}");
        }
        // Past the largest bf16, by the bits.
        assert_eq!(stochastic(f32::MAX, 0.0), f32::from_bits(0x7f7f_0000));
        assert_eq!(stochastic(f32::MAX, largest), f32::INFINITY);
        assert_eq!(stochastic(f32::MIN, largest), f32::NEG_INFINITY);
        assert_eq!(stochastic(-0.0, largest).to_bits(), (-0.0_f32).to_bits());
    }
}
