//! Philox4x32-10: counter-based random numbers. Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).

use super::vector::memory;
use crate::cpu::isa::Isa;

/// Counters computed side by side.
const WIDE: usize = 8;

/// Where a stream of random numbers stands: key = (lo, hi of `seed`), counter = (lo, hi of element / 4, `op`, lo of `step`).
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub seed: u64,
    pub op: u32,
    pub step: u32,
}

/// The four words of each of `WIDE` counters from `first` on, [word][counter].
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "one lane number for all words: such loops become vector code")]
fn blocks(stream: &Stream, first: u64) -> [[u32; WIDE]; 4] {
    let mut c = [[0u32; WIDE]; 4];
    for l in 0..WIDE {
        let counter = first.wrapping_add(l as u64);
        (c[0][l], c[1][l], c[2][l], c[3][l]) = (counter as u32, (counter >> 32) as u32, stream.op, stream.step);
    }
    let mut key = [stream.seed as u32, (stream.seed >> 32) as u32];
    for _ in 0..10 {
        for l in 0..WIDE {
            let low = u64::from(c[0][l]) * 0xD251_1F53;
            let high = u64::from(c[2][l]) * 0xCD9E_8D57;
            c[0][l] = (high >> 32) as u32 ^ c[1][l] ^ key[0];
            c[2][l] = (low >> 32) as u32 ^ c[3][l] ^ key[1];
            c[1][l] = high as u32;
            c[3][l] = low as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// A word as f32 in [0, 1), a multiple of 2^-24.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// The random word of one element.
#[inline(always)]
pub fn word(stream: &Stream, element: u64) -> u32 {
    blocks(stream, element / 4)[(element % 4) as usize][0]
}

/// Uniform numbers of the elements `first`, `first + 1`, …
#[inline(always)]
pub fn fill_uniform(stream: &Stream, first: u64, to: &mut [f32]) {
    const STRETCH: usize = 4 * WIDE;
    let skip = (first % 4) as usize;
    let mut done = 0;
    while done < to.len() {
        let words = blocks(stream, (first + done as u64) / 4);
        let mut values = [0f32; STRETCH];
        for (l, quad) in values.chunks_exact_mut(4).enumerate() {
            quad.iter_mut().zip(&words).for_each(|(value, word)| *value = uniform(word[l]));
        }
        let from = if done == 0 { skip } else { 0 };
        let count = (STRETCH - from).min(to.len() - done);
        to[done..done + count].copy_from_slice(&values[from..from + count]);
        done += count;
    }
}

/// The same, by this machine's best instructions.
pub fn uniforms(stream: &Stream, first: u64, to: &mut [f32]) {
    let (at, words) = (first as i64, [stream.seed as i64, i64::from(stream.step)]);
    let (dst, a, b) = (to.as_mut_ptr().cast(), (&raw const at).cast(), words.as_ptr().cast());
    // SAFETY: the machine has the instruction set; `to` has so many elements, and the operands are those of the primitive.
    unsafe { memory::uniform_run(Isa::detect())(dst, a, b, std::ptr::without_provenance(stream.op as usize), to.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution.
    #[test]
    fn known_answers() {
        let all = |seed: u64, counter: u64, op, step| blocks(&Stream { seed, op, step }, counter).map(|word| word[0]);
        assert_eq!(all(0, 0, 0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(all(u64::MAX, u64::MAX, u32::MAX, u32::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            all(0x299f_31d0_a409_3822, 0x85a3_08d3_243f_6a88, 0x1319_8a2e, 0x0370_7344),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn stretches_equal_single_elements() {
        let stream = Stream { seed: 7, op: 3, step: 11 };
        for first in [0, 1, 3, 30, u64::from(u32::MAX) * 4 - 5] {
            let mut many = vec![0.0; 101];
            fill_uniform(&stream, first, &mut many);
            let single: Vec<f32> = (0..101).map(|i| uniform(word(&stream, first + i))).collect();
            assert_eq!(many, single, "from {first}");
            many.fill(2.0);
            uniforms(&stream, first, &mut many);
            assert_eq!(many, single, "from {first}, by vectors");
        }
    }
}
