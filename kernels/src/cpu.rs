//! The CPU: threads, instruction sets and generated code.

mod emit;
#[cfg(all(test, target_os = "linux"))]
mod guarded;
#[cfg(test)]
mod in_place;
pub mod isa;
pub mod jit;
mod lanes;
pub mod pool;
