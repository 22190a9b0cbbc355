//! The compiler's one error: a code, what is wrong, where, notes, and what to do about it.
//!
//! Errors are built by the named constructors below (one per code, `Error::shape(…)`), then told where they happened by
//! whoever knows: `.at(place)` keeps the innermost place. Text is lower case without a full stop, with all numbers in it.
//! The hundreds digit of the code decides the exit code (`Code::exit`), and `pages.rs` has a page for each code.

mod pages;

use crate::report::size;
use dcc_program::check::CheckError;
use std::fmt;

pub use pages::{PAGES, Page, page};

pub type Result<T> = std::result::Result<T, Error>;

/// `DCC0104`: four digits, the hundreds digit naming who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Code(pub u16);

impl Code {
    pub const UNBOUND: Code = Code(2);
    pub const UNCLEAR_LOSS: Code = Code(3);
    pub const PLAN: Code = Code(301);

    /// Whether the command leaves a question open, which more flags would answer.
    pub fn is_question(self) -> bool {
        [Code::UNBOUND, Code::UNCLEAR_LOSS].contains(&self)
    }

    /// The process exit code: 2 usage, 3 model, 4 no such plan, 5 damaged file, 6 rank failed, 7 hang, 8 environment,
    /// 9 numerical.
    pub fn exit(self) -> i32 {
        match self.0 / 100 {
            0 => 2,
            10 => 1,
            1 | 2 => 3,
            3 | 4 => 4,
            hundreds => i32::from(hundreds),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DCC{:04}", self.0)
    }
}

/// What, where, how to fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub what: String,
    /// The place: an ONNX node, a tensor, a line of a text.
    pub at: Option<String>,
    pub notes: Vec<String>,
    pub help: Option<String>,
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error[{}]: {}", self.code, self.what)?;
        if let Some(at) = &self.at {
            write!(f, "\n  at   {at}")?;
        }
        for note in &self.notes {
            write!(f, "\n  note {note}")?;
        }
        if let Some(help) = &self.help {
            write!(f, "\n  help {help}")?;
        }
        Ok(())
    }
}

impl Error {
    pub fn new(code: u16, what: impl Into<String>) -> Error {
        Error { code: Code(code), what: what.into(), at: None, notes: Vec::new(), help: None }
    }

    /// Names the place unless an inner caller already did, or it has no name.
    pub fn at(mut self, place: impl fmt::Display) -> Error {
        self.at = self.at.or(Some(place.to_string())).filter(|place| !place.is_empty());
        self
    }

    pub fn note(mut self, note: impl Into<String>) -> Error {
        self.notes.push(note.into());
        self
    }

    /// Says how to fix it unless an inner caller already did.
    pub fn help(mut self, help: impl Into<String>) -> Error {
        if self.help.is_none() {
            self.help = Some(help.into());
        }
        self
    }

    // 00xx: the command has to change.

    /// A flag or its value is wrong.
    pub fn usage(what: impl Into<String>) -> Error {
        Error::new(1, what)
    }

    /// The command leaves open something that dcc must know, such as the size of a symbolic dim.
    pub fn unbound(what: impl Into<String>) -> Error {
        Error::new(2, what)
    }

    /// The outputs do not say what to minimise.
    pub fn unclear_loss(what: impl Into<String>) -> Error {
        Error::new(3, what)
    }

    // 01xx: the model file.

    /// The bytes are no ONNX model, or a truncated or corrupt one.
    pub fn not_onnx(what: impl Into<String>) -> Error {
        Error::new(101, what)
    }

    /// An ONNX operator that dcc does not import.
    pub fn unsupported_op(what: impl Into<String>) -> Error {
        Error::new(102, what)
    }

    /// An opset, or an operator that its opset does not have.
    pub fn opset(what: impl Into<String>) -> Error {
        Error::new(103, what)
    }

    /// Operand shapes or ranks that do not fit the operator.
    pub fn shape(what: impl Into<String>) -> Error {
        Error::new(104, what)
    }

    /// Operand dtypes that do not fit the operator, or a dtype that dcc does not compute with.
    pub fn dtype(what: impl Into<String>) -> Error {
        Error::new(105, what)
    }

    /// An attribute, or a value of one, that dcc does not honour.
    pub fn attribute(what: impl Into<String>) -> Error {
        Error::new(106, what)
    }

    /// The graph is not a graph: a cycle, an undefined or twice defined value, a wrong number of operands.
    pub fn graph(what: impl Into<String>) -> Error {
        Error::new(107, what)
    }

    /// Dims or counts beyond what dcc, or any machine, can hold.
    pub fn limit(what: impl Into<String>) -> Error {
        Error::new(108, what)
    }

    /// A tensor whose data do not fit its dims or dtype.
    pub fn tensor(what: impl Into<String>) -> Error {
        Error::new(109, what)
    }

    /// External data that are missing, too short, or outside the model's folder.
    pub fn external(what: impl Into<String>) -> Error {
        Error::new(110, what)
    }

    /// A value that dcc needs while compiling (a shape, an axis, a size) but that depends on data or parameters.
    pub fn data_dependent(what: impl Into<String>) -> Error {
        Error::new(111, what)
    }

    /// The export bakes its batch size in, in a place that cannot be told from an ordinary constant.
    pub fn baked_batch(what: impl Into<String>) -> Error {
        Error::new(112, what)
    }

    // 03xx and 04xx: no plan.

    /// The plan cannot be carried out on this model: microbatches or shardings that its ops do not allow.
    pub fn plan(what: impl Into<String>) -> Error {
        Error::new(301, what)
    }

    /// Batch sizes that contradict each other or do not divide.
    pub fn batch(what: impl Into<String>) -> Error {
        Error::new(302, what)
    }

    /// More pipeline stages than there is work for.
    pub fn stages(what: impl Into<String>) -> Error {
        Error::new(303, what)
    }

    /// A pinned sharding that no plan can follow.
    pub fn pin(what: impl Into<String>) -> Error {
        Error::new(304, what)
    }

    /// Tensor parallelism that the model cannot be split by.
    pub fn tensor_parallel(what: impl Into<String>) -> Error {
        Error::new(312, what)
    }

    /// Context parallelism that the model does not allow.
    pub fn context_parallel(what: impl Into<String>) -> Error {
        Error::new(313, what)
    }

    /// A model without experts, or with fewer than `--ep` has ranks.
    pub fn expert_parallel(what: impl Into<String>) -> Error {
        Error::new(314, what)
    }

    /// No rank has `limit` bytes enough for a plan of `peak`.
    pub fn memory(peak: u64, limit: u64) -> Error {
        let sizes = [peak, limit].map(size);
        let [peak, limit] = if sizes[0] == sizes[1] { [peak, limit].map(|bytes| format!("{bytes} bytes")) } else { sizes };
        Error::new(401, format!("the plan needs {peak} on a rank, {limit} are allowed"))
    }

    // 08xx: the environment.

    /// The command needs a part that this dcc was built without.
    pub fn left_out(what: impl Into<String>) -> Error {
        Error::new(811, what)
    }

    /// All ranks and one device's training do not fit this machine.
    pub fn too_large(need: u64, available: u64) -> Error {
        Error::new(812, format!("all ranks need {} in one process, {} are available", size(need), size(available)))
            .help("--numeric compares every tensor of a smaller instance instead")
    }

    // 09xx: numbers.

    /// Another implementation computes something else.
    pub fn second_opinion(what: impl Into<String>) -> Error {
        Error::new(911, what)
    }

    // 10xx: dcc itself.

    /// A pass broke an invariant: a bug in dcc, whatever the input.
    pub fn internal(what: impl Into<String>) -> Error {
        Error::new(1001, what).help("this is a bug in dcc; please report it with the model")
    }

    /// The gate refused programs that dcc just made.
    pub fn gate(error: CheckError) -> Error {
        let fault = Code(error.code.number());
        Error::internal(format!("the compiled programs do not pass the gate: {} ({fault})", error.message)).at(error.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_where_and_how() {
        let error =
            Error::shape("Reshape cannot turn 6 elements into 8").at("node 3").at("graph").note("6 = 2 × 3").help("re-export");
        assert_eq!(
            error.to_string(),
            "error[DCC0104]: Reshape cannot turn 6 elements into 8\n  at   node 3\n  note 6 = 2 × 3\n  help re-export"
        );
    }

    #[test]
    fn the_hundreds_digit_is_the_exit_code() {
        let exits = [1, 104, 212, 312, 401, 503, 601, 702, 801, 901].map(|code| Code(code).exit());
        assert_eq!(exits, [2, 3, 3, 4, 4, 5, 6, 7, 8, 9]);
    }
}
