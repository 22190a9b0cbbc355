//! The runtime's one error: its variant is what a caller can act on, its report what a person reads.
//!
//! Text is lower case without a full stop, with all numbers in it. The hundreds digit of the code decides the exit code.

mod pages;

use dcc_program::artifact::ArtifactError;
use std::fmt;
use std::path::Path;

pub use pages::PAGES;
use serde::{Deserialize, Serialize};

pub type Result<T> = std::result::Result<T, Error>;

/// Two words, so that results travel in registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Error {
    /// The data do not fit the program or the command: the command has to change.
    Data(Box<Report>),
    /// An artifact, checkpoint or data file is damaged or belongs to another program.
    Artifact(Box<Report>),
    /// A rank failed, or the ranks do not run the same program.
    Rank(Box<Report>),
    /// A rank is silent for longer than the timeout.
    Hang(Box<Report>),
    /// A device is missing, out of memory or failed.
    Device(Box<Report>),
    /// A file or a system call failed.
    Io(Box<Report>),
    /// The loss or a gradient is not finite.
    Numerical(Box<Report>),
}

/// What, where, how to fix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// `510` prints as `DCC0510`.
    pub code: u16,
    pub what: String,
    /// The place: a file and tensor, a rank, step and op.
    pub at: Option<String>,
    pub help: Option<String>,
}

impl Error {
    pub fn report(&self) -> &Report {
        match self {
            Error::Data(report)
            | Error::Artifact(report)
            | Error::Rank(report)
            | Error::Hang(report)
            | Error::Device(report)
            | Error::Io(report)
            | Error::Numerical(report) => report,
        }
    }

    fn report_mut(&mut self) -> &mut Report {
        match self {
            Error::Data(report)
            | Error::Artifact(report)
            | Error::Rank(report)
            | Error::Hang(report)
            | Error::Device(report)
            | Error::Io(report)
            | Error::Numerical(report) => report,
        }
    }

    /// The process exit code: 2 usage, 5 damaged file, 6 rank failed, 7 hang, 8 environment, 9 numerical.
    pub fn exit(&self) -> i32 {
        match self.report().code / 100 {
            0 => 2,
            1 | 2 => 3,
            3 | 4 => 4,
            hundreds => i32::from(hundreds),
        }
    }

    /// Names the place unless an inner caller already did.
    pub fn at(mut self, place: impl fmt::Display) -> Error {
        self.report_mut().at.get_or_insert_with(|| place.to_string());
        self
    }

    /// Says how to fix it unless an inner caller already did.
    pub fn help(mut self, help: impl Into<String>) -> Error {
        self.report_mut().help.get_or_insert_with(|| help.into());
        self
    }

    // 005x: data against model and command.

    /// No kind of data file that dcc reads.
    pub fn data_format(what: impl Into<String>) -> Error {
        Error::Data(report(50, what))
    }

    /// A key that is no input, an input without a key, the same key twice.
    pub fn data_keys(what: impl Into<String>) -> Error {
        Error::Data(report(51, what))
    }

    /// An array whose shape does not fit its input, or too few samples.
    pub fn data_shape(what: impl Into<String>) -> Error {
        Error::Data(report(52, what))
    }

    /// A value that the input's dtype, or the vocabulary, does not have.
    pub fn data_range(what: impl Into<String>) -> Error {
        Error::Data(report(53, what))
    }

    /// A value of `--input`, `--map`, `--resume` and their like that cannot be honoured.
    pub fn data_option(what: impl Into<String>) -> Error {
        Error::Data(report(54, what))
    }

    // 05xx: damaged or foreign files.

    /// An artifact whose bytes are not what its writer wrote.
    pub fn artifact(what: impl Into<String>) -> Error {
        Error::Artifact(report(501, what))
    }

    /// An artifact that cannot be read, is damaged, or does not pass the gate: then with the fault's own code.
    pub fn of_artifact(error: ArtifactError) -> Error {
        match error {
            ArtifactError::Io { path, source } => Error::io("read", path.as_ref(), source),
            ArtifactError::Unsound { part, error } => {
                let what = format!("the artifact's {part} do not pass the gate: {}; {}", error.message, error.at);
                Error::Artifact(report(error.code.number(), what)).help("compile the model again")
            }
            ArtifactError::Version { .. } => Error::artifact(error.to_string()).help("compile the model again with this dcc"),
            ArtifactError::Tensor { .. } => {
                Error::artifact(error.to_string()).help("put the model's files back, or compile again")
            }
            other => Error::artifact(other.to_string()).help("copy it again, or compile the model again"),
        }
    }

    /// A checkpoint file that is missing or whose bytes are not what its writer wrote.
    pub fn checkpoint(what: impl Into<String>) -> Error {
        Error::Artifact(report(510, what))
    }

    /// An intact checkpoint of another model.
    pub fn foreign_checkpoint(what: impl Into<String>) -> Error {
        Error::Artifact(report(511, what))
    }

    /// A data file that ends early or contradicts its own header.
    pub fn damaged_data(what: impl Into<String>) -> Error {
        Error::Artifact(report(520, what))
    }

    // 06xx: ranks.

    /// A rank died, by a signal or by an error of its own.
    pub fn rank(what: impl Into<String>) -> Error {
        Error::Rank(report(601, what))
    }

    /// The user did not wait for the end of a step.
    pub fn second_stop() -> Error {
        Error::rank("ended by a second request to stop, before the step was complete")
    }

    /// Ranks of one run with different programs, worlds or builds.
    pub fn handshake(what: impl Into<String>) -> Error {
        Error::Rank(report(602, what))
    }

    /// Ranks that meet in different collectives.
    pub fn mismatch(what: impl Into<String>) -> Error {
        Error::Rank(report(603, what))
    }

    /// This rank stopped because another one failed first.
    pub fn peer(what: impl Into<String>) -> Error {
        Error::Rank(report(604, what))
    }

    /// Whether this error only follows from the failure of another rank.
    pub fn is_secondary(&self) -> bool {
        self.report().code == 604
    }

    // 07xx to 09xx.

    pub fn hang(what: impl Into<String>) -> Error {
        Error::Hang(report(701, what))
    }

    pub fn io(action: &str, path: &Path, error: impl fmt::Display) -> Error {
        let what = format!("cannot {action}: {error}");
        let help = ADVICE.iter().find(|(number, _)| what.ends_with(&format!("(os error {number})")));
        let failed = Error::Io(report(801, what)).at(path.display());
        help.map_or(failed.clone(), |(_, help)| failed.help(*help))
    }

    /// A system call that needs no path: memory, processes, signals.
    pub fn system(action: &str, error: impl fmt::Display) -> Error {
        Error::Io(report(802, format!("cannot {action}: {error}")))
    }

    pub fn device(what: impl Into<String>) -> Error {
        Error::Device(report(803, what))
    }

    pub fn numerical(what: impl Into<String>) -> Error {
        Error::Numerical(report(901, what))
    }
}

/// What to do about errors of the system, by their numbers.
const ADVICE: [(i32, &str); 6] = [
    (libc::ENOENT, "check the path: it starts at the current folder, and its folders must exist"),
    (libc::EACCES, "check who may read and write there"),
    (libc::EISDIR, "name a file: this is a folder"),
    (libc::ENOTDIR, "check the path: a part of it is no folder"),
    (libc::ENOSPC, "free some space, or write elsewhere"),
    (libc::EROFS, "write elsewhere: nothing can be written there"),
];

fn report(code: u16, what: impl Into<String>) -> Box<Report> {
    Box::new(Report { code, what: what.into(), at: None, help: None })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report();
        write!(f, "error[DCC{:04}]: {}", report.code, report.what)?;
        if let Some(at) = &report.at {
            write!(f, "\n  at   {at}")?;
        }
        if let Some(help) = &report.help {
            write!(f, "\n  help {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_where_and_how_to_fix() {
        let error = Error::data_range("token 50300 is outside of the vocabulary of 50257").at("train.bin").help("check --data");
        assert_eq!(error.exit(), 2);
        assert_eq!(
            error.to_string(),
            "error[DCC0053]: token 50300 is outside of the vocabulary of 50257\n  at   train.bin\n  help check --data"
        );
        assert_eq!(Error::checkpoint("").exit(), 5);
        assert_eq!(Error::rank("").exit(), 6);
        assert_eq!(Error::hang("").exit(), 7);
        assert_eq!(Error::system("", "").exit(), 8);
        assert_eq!(Error::numerical("").exit(), 9);
    }
}
