//! Which vector instructions this machine has. All variants of a primitive compute the same bits; only their speed differs.

use std::sync::OnceLock;

/// An instruction set that the primitives are compiled for, in ascending order of speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the target's baseline is.
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors (F, DQ, BW, VL).
    Avx512,
}

impl Isa {
    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        *FOUND.get_or_init(probe)
    }

    /// All instruction sets that this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        [Isa::Baseline, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::detect())
    }
}

#[cfg(target_arch = "x86_64")]
fn probe() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn probe() -> Isa {
    Isa::Baseline
}
