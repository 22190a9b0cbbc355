//! The peaks that figures are fractions of.

use dcc_kernels::library::peak::Peak;
use dcc_kernels::{Isa, Pool};
use serde::Serialize;

/// What so many threads of this machine do at most, as it is measured at this moment.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Machine {
    pub isa: &'static str,
    pub threads: usize,
    /// f32 multiplications and additions from registers, GF/s.
    #[serde(rename = "peak_gflops")]
    pub gflops: f64,
    /// Bytes read and written by a copy larger than the caches, GB/s.
    #[serde(rename = "peak_gbps")]
    pub gbps: f64,
}

impl Machine {
    pub fn measure(threads: usize) -> Machine {
        let Peak { gflops, gbps } = Peak::measure(&Pool::new(threads));
        Machine { isa: Isa::detect().name(), threads, gflops, gbps }
    }

    pub fn text(&self) -> String {
        let Machine { isa, threads, gflops, gbps } = self;
        format!("{isa}, {threads} threads: {gflops:.1} GF/s of f32 multiply-adds, copies at {gbps:.1} GB/s\n")
    }
}
