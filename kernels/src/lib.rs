//! One kernel, from loop nest to machine code.
//!
//! `library` holds the kernels that no loop nest generates well (matrix products, attention, scatter, scans) and the vector
//! primitives that generated kernels call on tiles. `cpu` is the machine: the thread pool and the JIT.
//! Two invariants hold everywhere: results depend on shapes only, never on the number of threads; and after preparation no call allocates.

#[allow(unsafe_code)]
pub mod cpu;
#[allow(unsafe_code)]
pub mod library;

pub mod cuda;
pub mod reference;
pub mod tile;

pub use cpu::isa::Isa;
pub use cpu::jit::{Compiled, Jit};
pub use cpu::pool::Pool;
pub use tile::Nest;
