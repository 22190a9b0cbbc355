//! What this machine gives at most: multiply-adds from registers, bytes copied through memory. Kernels are measured against it.

use super::SharedPtr;
use super::simd::{Single, Vector};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use std::time::Instant;

/// The best of several spans, of all threads of a pool together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// f32 multiplications and additions per nanosecond, in the instructions that kernels may use.
    pub gflops: f64,
    /// Bytes read and written per nanosecond by a copy larger than the caches.
    pub gbps: f64,
}

/// Fused multiply-adds in a row that do not wait for each other: more than the latency of two units, fewer than AVX2's registers.
const CHAINS: usize = 12;
/// Multiply-adds of each chain in a chunk.
const TURNS: usize = 20_000;
/// Bytes that are copied, and by a chunk.
const COPIED: usize = 64 << 20;
const PART: usize = 1 << 20;
const SPANS: usize = 20;

impl Peak {
    /// Takes a few tenths of a second.
    pub fn measure(pool: &Pool) -> Peak {
        Peak { gflops: fma_rate(pool, Isa::detect()), gbps: copy_rate(pool) }
    }
}

/// GF/s of multiply-adds.
fn fma_rate(pool: &Pool, isa: Isa) -> f64 {
    let (chains, lanes) = chains_of(isa);
    let chunks = 8 * pool.threads();
    let flops = 2 * chunks * lanes * CHAINS * TURNS;
    let span = || {
        pool.run(chunks, usize::MAX, &|_, _| {
            // SAFETY: `Isa::detect` is an instruction set of this machine.
            let sum = unsafe { chains(TURNS) };
            std::hint::black_box(sum);
        });
    };
    flops as f64 / shortest(span)
}

/// GB/s of a copy, counting what is read and what is written.
fn copy_rate(pool: &Pool) -> f64 {
    let from = vec![1u8; COPIED];
    let mut to = vec![0u8; COPIED];
    let target = SharedPtr::new(to.as_mut_ptr());
    let span = || {
        pool.run(COPIED / PART, usize::MAX, &|_, chunk| {
            // SAFETY: chunks copy parts of their own, which both buffers have.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().add(chunk * PART), target.get().add(chunk * PART), PART) };
        });
    };
    2.0 * COPIED as f64 / shortest(span)
}

/// Nanoseconds.
fn shortest(span: impl Fn()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        span();
        start.elapsed().as_nanos().max(1) as f64
    };
    (0..SPANS).map(once).fold(f64::INFINITY, f64::min)
}

/// # Safety
/// The machine has the instruction set.
type Chains = unsafe fn(usize) -> f32;

/// The chains of an instruction set, and the lanes of its vectors.
fn chains_of(isa: Isa) -> (Chains, usize) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => (avx512, super::simd::x86::F32x16::LANES),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => (avx2, super::simd::x86::F32x8::LANES),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => (neon, super::simd::arm::F32x4::LANES),
        _ => (baseline, 1),
    }
}

/// # Safety
/// The machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
unsafe fn avx512(turns: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe { chains::<super::simd::x86::F32x16>(turns) }
}

/// # Safety
/// The machine has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(turns: usize) -> f32 {
    // SAFETY: the caller's.
    unsafe { chains::<super::simd::x86::F32x8>(turns) }
}

/// # Safety
/// None.
#[cfg(target_arch = "aarch64")]
unsafe fn neon(turns: usize) -> f32 {
    // SAFETY: the architecture's baseline has it.
    unsafe { chains::<super::simd::arm::F32x4>(turns) }
}

/// # Safety
/// None.
unsafe fn baseline(turns: usize) -> f32 {
    // SAFETY: one lane needs no instructions.
    unsafe { chains::<Single<f32>>(turns) }
}

/// `x = a x + b`, `turns` times in each of `CHAINS` vectors of different numbers; the sum of their first lanes.
///
/// # Safety
/// As `Vector`.
#[inline(always)]
unsafe fn chains<V: Vector<E = f32>>(turns: usize) -> f32 {
    // SAFETY: the caller's; a lane is stored to an element each.
    unsafe {
        let (a, b) = (V::splat(0.999), V::splat(0.001));
        let mut x = [V::zero(); CHAINS];
        for i in 0..CHAINS {
            // Unknown to the compiler: it would leave out a chain that begins at a fixed point, 1.
            x[i] = V::splat(std::hint::black_box(i as f32));
        }
        for _ in 0..turns {
            for i in 0..CHAINS {
                x[i] = x[i].fma(a, b);
            }
        }
        let mut first = [0.0; CHAINS];
        for i in 0..CHAINS {
            x[i].store_first(&mut first[i], 1);
        }
        first.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_compute_what_they_say() {
        let mut expected = 0.0;
        for i in 0..CHAINS {
            let mut x = i as f32;
            (0..100).for_each(|_| x = x.mul_add(0.999, 0.001));
            expected += x;
        }
        for isa in Isa::available() {
            // SAFETY: this machine has it.
            assert_eq!(unsafe { chains_of(isa).0(100) }, expected, "{isa:?}");
        }
    }

    #[test]
    fn a_machine_has_a_peak() {
        let peak = Peak::measure(&Pool::new(1));
        assert!(peak.gflops > 0.01 && peak.gflops < 1e5 && peak.gbps > 0.01 && peak.gbps < 1e5, "{peak:?}");
    }
}
