//! Which vector instructions this machine has, and which of them this process uses. All variants of a primitive compute the same bits;
//! only their speed differs. The exception is products of bf16.

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
    /// The same, and tiles of bf16 (AMX_TILE, AMX_BF16), which the system lets this process use.
    Amx,
    /// 128-bit vectors with fused multiply-add, of all 64-bit Arm processors.
    Neon,
}

/// What this process uses: settled once, so that no kernel of it can differ.
static USED: OnceLock<Isa> = OnceLock::new();

impl Isa {
    /// Those of this architecture.
    pub const ALL: &[Isa] = match cfg!(target_arch = "aarch64") {
        true => &[Isa::Baseline, Isa::Neon],
        false => &[Isa::Baseline, Isa::Avx2, Isa::Avx512, Isa::Amx],
    };

    /// The best instruction set of this machine, or the one that this process is limited to.
    pub fn detect() -> Isa {
        *USED.get_or_init(probe)
    }

    /// Limits all kernels that this process will plan or compile to `isa`. Errors: this machine lacks it, or the process has settled on
    /// another one already.
    pub fn limit(isa: Isa) -> Result<(), String> {
        let isa = isa.within(probe())?;
        match *USED.get_or_init(|| isa) {
            used if used == isa => Ok(()),
            used => Err(format!("this process computes with {} already", used.name())),
        }
    }

    /// This instruction set where `best` is the machine's. Errors: it is a better one.
    fn within(self, best: Isa) -> Result<Isa, String> {
        match self <= best {
            true => Ok(self),
            false => Err(format!("this machine has no {}: its best is {}", self.name(), best.name())),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Baseline => "baseline",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }

    /// The instruction set of a name.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::ALL.iter().copied().find(|isa| isa.name() == name)
    }

    /// All instruction sets that this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| *isa <= Isa::detect())
    }

    /// Whether it has 512-bit vectors.
    pub fn has_avx512(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Amx)
    }

    /// Whether passes of arithmetic are machine code of our own, in vectors longer than those of the code around them.
    pub fn has_lines(self) -> bool {
        cfg!(unix) && matches!(self, Isa::Avx2 | Isa::Avx512 | Isa::Amx)
    }

    /// Whether there are instructions for sums in f32 of pairs of products of bf16 (AVX512_BF16). As with those for tiles, and unlike all
    /// else, their results differ from what other machines compute: in the order of the sums, and in subnormal numbers, which are zero to them.
    pub fn has_bf16_products() -> bool {
        #[cfg(target_arch = "x86_64")]
        return Isa::detect().has_avx512() && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether those are worth it: a product of pairs is nearly twice as fast as one in f32 on AMD's processors (Zen 4 and 5), and half as fast
    /// on Intel's (Emerald Rapids: 78 GF/s of pairs, 145 of widened bf16).
    pub fn prefers_bf16_products() -> bool {
        Isa::has_bf16_products() && !is_intel()
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
        (true, true) if may_use_tiles() => Isa::Amx,
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Baseline,
    }
}

/// Whether there are tiles of bf16 and this process may use them: Linux saves their 8 KiB at a change of threads for those alone that ask.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// Of EDX of leaf 7: AMX_BF16 and AMX_TILE.
    const TILES: u32 = 1 << 22 | 1 << 24;
    /// From the kernel's `asm/prctl.h`, and the number of the tiles' data among what is saved.
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let there = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES == TILES;
    // SAFETY: a request by number, without memory of ours.
    there && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

/// Lines that a set of the first-level data cache holds; 8 where the processor does not tell.
pub fn first_level_ways() -> usize {
    static WAYS: OnceLock<usize> = OnceLock::new();
    *WAYS.get_or_init(|| ways_told().unwrap_or(8))
}

/// By the leaf that lists caches, which Intel and AMD number differently.
#[cfg(target_arch = "x86_64")]
fn ways_told() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let leaf = if is_intel() { 4 } else { 0x8000_001D };
    if __cpuid(leaf & 0x8000_0000).eax < leaf {
        return None;
    }
    // In EAX the type, 0 after the last one and 1 of data, and from bit 5 on the level; ways less one from bit 22 of EBX on.
    let caches = (0..8).map(|n| __cpuid_count(leaf, n)).take_while(|cache| cache.eax & 31 != 0);
    caches.into_iter().find(|cache| cache.eax & 0xFF == 0x21).map(|cache| (cache.ebx >> 22) as usize + 1)
}

#[cfg(not(target_arch = "x86_64"))]
fn ways_told() -> Option<usize> {
    None
}

#[cfg(target_arch = "aarch64")]
fn probe() -> Isa {
    Isa::Neon
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn probe() -> Isa {
    Isa::Baseline
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_better_set_than_the_machine_has_is_refused() {
        assert_eq!(Isa::Avx2.within(Isa::Avx512), Ok(Isa::Avx2));
        assert_eq!(Isa::Avx512.within(Isa::Avx512), Ok(Isa::Avx512));
        assert_eq!(Isa::Avx512.within(Isa::Avx2), Err("this machine has no avx512: its best is avx2".to_owned()));
    }

    /// What the system says of the processor is what the processor says.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn a_vendor_is_told_apart() {
        let system = std::fs::read_to_string("/proc/cpuinfo").expect("Linux says");
        assert_eq!(is_intel(), system.contains("GenuineIntel"), "{}", system.lines().take(5).collect::<String>());
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        assert!(Isa::ALL.iter().copied().all(|isa| Isa::named(isa.name()) == Some(isa)));
        assert_eq!(Isa::named("avx3"), None);
    }
}
