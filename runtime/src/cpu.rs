//! The CPU as a rank's device: its memory, its threads, its compiled kernels, and prepared calls on them.
//!
//! A call is prepared once per instruction (`Cpu::kernel`, `Cpu::library`) and run in every step; running allocates nothing. Every
//! access is checked against the arena when its call runs, so that a wrong program cannot touch other memory.

mod attention;
mod call;
mod contraction;
mod convolution;
mod halves;
mod indexed;
mod library;
mod memory;
mod plans;
mod pool;
mod rows;
mod settle;

pub use call::Call;
pub use memory::Memory;
pub use settle::settle;

use crate::error::{Error, Result};
use crate::exec::Bases;
use dcc_kernels::Pool;
use dcc_kernels::cpu::jit::Jit;
use plans::Plans;

/// What all programs of a rank share.
pub struct Cpu {
    memory: Memory,
    pool: Pool,
    jit: Jit,
    plans: Plans,
    /// Addresses and offsets of the kernel that runs now.
    arguments: Vec<u64>,
    /// Workspace of library operations, as much as any prepared call needs that has none in planned memory.
    workspace: Vec<u64>,
}

/// What a call runs with.
struct Running<'a> {
    memory: &'a Memory,
    pool: &'a Pool,
    arguments: &'a mut Vec<u64>,
    workspace: &'a mut [u64],
    bases: &'a Bases,
    microbatch: u32,
}

impl Cpu {
    /// `threads`: compute threads of this rank, the caller included.
    pub fn new(memory: Memory, threads: usize) -> Result<Cpu> {
        let pool = Pool::start(threads).map_err(|error| {
            Error::system(&format!("start {threads} compute threads"), error).help("use fewer: --threads N")
        })?;
        let jit = if cfg!(debug_assertions) { Jit::new() } else { Jit::trusting() };
        let jit = jit.map_err(|error| Error::device(format!("no code can be generated for this machine: {error}")))?;
        let jit = jit.for_threads(pool.threads());
        Ok(Cpu { memory, pool, jit, plans: Plans::default(), arguments: Vec::new(), workspace: Vec::new() })
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Compute threads, the caller included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Distinct kernels compiled so far.
    pub fn kernels(&self) -> usize {
        self.jit.kernels()
    }

    /// Bytes held besides the arena: packing space of matrix products, attention and convolutions.
    pub fn scratch_bytes(&self) -> usize {
        self.pool.scratch_bytes() + self.workspace.len() * size_of::<u64>()
    }

    /// Grows the workspace to `bytes`, while calls are prepared: what those need that have none in planned memory.
    /// Errors: more than this machine has.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        let words = bytes.div_ceil(size_of::<u64>());
        let more = words.saturating_sub(self.workspace.len());
        let fits = more == 0 || machine_bytes("MemTotal").is_none_or(|all| bytes as u64 <= all);
        if !fits || self.workspace.try_reserve_exact(more).is_err() {
            let what =
                format!("it computes in a workspace of {bytes} bytes beside the planned memory, which this machine has not");
            return Err(Error::device(what).help("make its sizes smaller: paddings and dilations count"));
        }
        self.workspace.resize(words.max(self.workspace.len()), 0);
        Ok(())
    }

    /// Runs a prepared call in one execution of its section.
    pub fn run(&mut self, call: &Call, bases: &Bases, microbatch: u32) {
        let Cpu { memory, pool, arguments, workspace, .. } = self;
        call.run(Running { memory, pool, arguments, workspace, bases, microbatch });
    }
}

/// What Linux says of this machine's memory: `MemTotal`, or `MemAvailable` for programs. `None` where it does not.
pub fn machine_bytes(what: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
