//! The CPU: threads, instruction sets and generated code.

mod emit;
pub mod isa;
pub mod jit;
pub mod pool;
