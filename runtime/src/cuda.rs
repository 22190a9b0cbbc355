//! NVIDIA GPUs: the driver, NVRTC and what they make of kernels' texts, opened at run time. Without them all else works, and opening a
//! GPU is an error that says what is missing.

mod attentions;
mod cache;
mod choices;
mod copies;
mod cudnn;
mod device;
mod direct;
mod driver;
mod groups;
mod kernels;
mod library;
mod nccl;
mod nvrtc;
mod products;
mod queue;
mod shipped;
mod tails;
mod vendor;

pub use attentions::{Planned, planned};
pub use cache::images;
pub use device::{Call, Cuda, Texts};
pub use direct::Together;
pub use driver::{Buffer, Gpu, Kernel, end, end_if_abandoned};
pub use groups::{Launched, Row};
pub use kernels::Kernels;
pub use nccl::UniqueIds;
pub use nvrtc::{Image, Usage};
pub use queue::Graph;
pub use shipped::{Shipped, code};
pub use tails::Tailed;
pub use vendor::Own;

use crate::error::{Error, Result};

/// A generation of GPUs by compute capability, as 8.0 or 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    pub major: u32,
    pub minor: u32,
}

impl Arch {
    /// NVRTC's name. Code for 9.0 and 10.0 runs on that generation alone and may use all of it (`a`).
    pub fn name(self) -> String {
        let own = if self.major >= 9 { "a" } else { "" };
        format!("sm_{}{}{own}", self.major, self.minor)
    }

    /// `sm_80`, `sm_90a`. Errors: another text.
    pub fn parse(text: &str) -> Result<Arch> {
        let unknown = || Error::device(format!("`{text}` is no architecture; sm_80 and sm_90a are some"));
        let number: u32 =
            text.strip_prefix("sm_").and_then(|n| n.strip_suffix('a').unwrap_or(n).parse().ok()).ok_or_else(unknown)?;
        let arch = Arch { major: number / 10, minor: number % 10 };
        if arch.major < 8 || arch.name() != text { Err(unknown()) } else { Ok(arch) }
    }

    /// Whether a GPU of `other` runs code for this one: generations that use all of theirs are by themselves.
    fn runs_on(self, other: Arch) -> bool {
        self == other || self.major == 8 && self.major == other.major && self.minor <= other.minor
    }
}

/// What kernels are compiled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// Machine code.
    Code(Arch),
    /// PTX, which the driver of that GPU or of any later one compiles.
    Ptx(Arch),
}

impl Target {
    /// NVRTC's name.
    pub fn name(self) -> String {
        match self {
            Target::Code(arch) => arch.name(),
            Target::Ptx(Arch { major, minor }) => format!("compute_{major}{minor}"),
        }
    }

    /// `sm_90a` for code, `compute_80` for PTX. Errors: another text.
    pub fn parse(text: &str) -> Result<Target> {
        let Some(number) = text.strip_prefix("compute_") else { return Arch::parse(text).map(Target::Code) };
        let number: u32 = number.parse().unwrap_or(0);
        let target = Target::Ptx(Arch { major: number / 10, minor: number % 10 });
        match number >= 80 && target.name() == text {
            true => Ok(target),
            false => Err(Error::device(format!("`{text}` is no architecture; compute_80 is one that all these GPUs take"))),
        }
    }
}
