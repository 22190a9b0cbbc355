//! The gate: an independent pass that knows only programs, not how they were made.
//!
//! It derives the type of every result by its own rules (`derive`, `kernel`) and compares it with the declared one, so that no
//! partial sum is read as whole and no shard as the tensor; runs each stage's order over a model of its memory (`memory`), so
//! that every read finds the value it names, of its microbatch, and nobody touches a buffer in flight; and matches what the
//! stages say to each other (`exchange`), so that messages fit and no rank waits for ever. It reasons per stage, never per
//! rank: all ranks of a stage run one program, so a cycle of waits among ranks is one among stages.
//!
//! `compile`, `dcc verify` and the runtime's loader run this same code. What passes may still compute the wrong function; it
//! computes the same one on every mesh, reads no memory it must not, and ends.

mod bounds;
mod contract;
mod derive;
mod exchange;
mod externals;
mod kernel;
mod linear;
mod memory;
mod order;
mod overlap;
mod pages;
mod track;
mod unused;
mod windows;
mod writes;

pub use bounds::MAX_RANK;
pub use overlap::may_replace;

use crate::program::{Action, BufferId, Instr, Program, TokenId};
use crate::types::TensorType;
use std::collections::{BTreeMap, HashSet};

/// What kind of fault; the number is that of the compiler's error code `DCC05xx`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Fault {
    /// The mesh itself, or stages that do not belong together.
    Mesh = 530,
    /// Something names what is not there, or has too many or too few operands.
    Malformed,
    /// A type that cannot be, or a size that overflows.
    Type,
    /// A buffer outside of its block.
    Bounds,
    /// A kernel that makes no sense wherever it is used.
    Kernel,
    /// A parameter, input, scalar or output.
    External,
    /// Operands that are not sharded as the operation needs.
    Sharding,
    /// A partial result is used as if it were whole.
    Pending,
    /// The declared type is not the one that follows from the operands.
    Declared,
    /// Operand and result share memory where they must not, or do not where they must.
    InPlace,
    /// A read of memory that holds nothing.
    Unwritten,
    /// A read of a value that something else has overwritten.
    Overwritten,
    /// A value of one microbatch is used for another, or for none.
    Microbatch,
    /// An accumulator is read before its last addition, or added to before it is zeroed.
    Accumulator,
    /// A buffer is touched while a transfer uses it.
    InFlight,
    /// A start without wait, or a wait without start.
    Unwaited,
    /// Sections run in a wrong order, or not as often as they must.
    Order,
    /// A message that its receiver does not expect, or a group whose members do different things.
    Unmatched,
    /// Stages wait for each other in a circle.
    Deadlock,
    /// A value that nothing reads, or that is kept longer than it is read.
    Unused,
}

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} (at {at})")]
pub struct CheckError {
    pub code: Fault,
    pub message: String,
    /// Stage, section and instruction.
    pub at: String,
}

impl Fault {
    /// The number in `DCC0530`.
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// A fault whose place the caller knows.
type Refused = (Fault, String);
type Checked<T> = Result<T, Refused>;

/// Results of the wait of each token, in the order of the start's operands.
type WaitResults<'a> = BTreeMap<TokenId, &'a [BufferId]>;

fn refuse<T>(fault: Fault, message: impl Into<String>) -> Checked<T> {
    Err((fault, message.into()))
}

fn error(at: String, (code, message): Refused) -> CheckError {
    CheckError { code, message, at }
}

/// Checks the programs of all stages, ascending, of one mode.
pub fn programs(programs: &[Program]) -> Result<(), CheckError> {
    bounds::set(programs).map_err(|e| error("the program set".to_owned(), e))?;
    for p in programs {
        bounds::program(p)?;
        externals::program(p)?;
        instrs(p)?;
        order::program(p).map_err(|e| error(format!("stage {}, order", p.stage), e))?;
    }
    let traces = programs.iter().map(memory::program).collect::<Result<Vec<_>, _>>()?;
    externals::shared(programs).map_err(|e| error("the program set".to_owned(), e))?;
    exchange::traces(programs, &traces)?;
    programs.iter().try_for_each(unused::program)
}

/// Types of all instructions, each use of a kernel once per set of types.
fn instrs(p: &Program) -> Result<(), CheckError> {
    let results = wait_results(p);
    let mut seen: HashSet<(u32, Vec<&TensorType>)> = HashSet::new();
    for section in &p.sections {
        for instr in &section.body {
            let at = || format!("stage {}, section {}, `{}`", p.stage, section.id().name(), text_of(p, instr));
            derive::microbatches(p, section.kind, instr).map_err(|e| error(at(), e))?;
            let types = instr.operands.iter().chain(&instr.results).map(|&id| p.ty(id)).collect();
            let is_new = match instr.action {
                Action::Kernel(n) => seen.insert((n, types)),
                _ => true,
            };
            if is_new {
                derive::instr(p, instr, &results).map_err(|e| error(at(), e))?;
            }
            overlap::instr(p, instr, &results).map_err(|e| error(at(), e))?;
        }
    }
    Ok(())
}

/// What the wait of each token gives.
fn wait_results(p: &Program) -> WaitResults<'_> {
    let instrs = p.sections.iter().flat_map(|s| &s.body);
    let results = instrs.filter_map(|i| match i.action {
        Action::Wait(token) => Some((token, &i.results[..])),
        _ => None,
    });
    results.collect()
}

fn text_of(p: &Program, instr: &Instr) -> String {
    crate::text::print_instr(p, instr)
}
