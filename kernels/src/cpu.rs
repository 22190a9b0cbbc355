//! The CPU: threads, instruction sets and generated code.

pub mod isa;
pub mod pool;
