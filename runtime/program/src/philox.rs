//! Counter-based random numbers. Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.

/// philox4x32 with 10 rounds.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let p0 = u64::from(c0) * 0xD251_1F53;
        let p1 = u64::from(c2) * 0xCD9E_8D57;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// What `Expr::Uniform` means: a multiple of 2⁻²⁴ in [0, 1).
pub fn uniform(id: u32, seed: i64, step: i64, element: u64) -> f32 {
    let block = element / 4;
    let counter = [block as u32, (block >> 32) as u32, id, step as u32];
    let word = philox4x32(counter, [seed as u32, (seed >> 32) as u32])[(element % 4) as usize];
    (word >> 8) as f32 / (1u32 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 1.14.0, `kat_vectors`.
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox4x32(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn uniforms_take_the_words_in_turn() {
        let words = philox4x32([1, 0, 7, 3], [5, u32::MAX]);
        for (i, word) in words.into_iter().enumerate() {
            let seed = 5 | (-1i64) << 32;
            assert_eq!(uniform(7, seed, 3, 4 + i as u64), (word >> 8) as f32 / 16_777_216.0);
        }
    }
}
