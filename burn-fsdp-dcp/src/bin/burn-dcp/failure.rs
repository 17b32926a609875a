//! Why a command ends early, in one line that says what to do about it.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use burn_fsdp_dcp::DcpError;

use crate::text::one_line;

/// What a command returns.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A checkpoint can't be read or written.
    Checkpoint(Box<DcpError>),
    /// The command's own output can't be written.
    Output(io::Error),
    /// Anything else.
    Other(String),
}

impl Failure {
    pub(crate) fn of(what: impl Into<String>) -> Self {
        Self::Other(what.into())
    }

    /// That there is something already.
    pub(crate) fn from_existing(path: &Path) -> Self {
        let path = path.display().to_string();
        DcpError::AlreadyExists { path }.into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checkpoint(error) => {
                f.write_str(&one_line(&error.to_string()))?;
                match advice(error) {
                    Some(advice) => write!(f, "; {advice}"),
                    None => Ok(()),
                }
            }
            Self::Output(error) => write!(f, "cannot write the output: {error}"),
            Self::Other(what) => f.write_str(&one_line(what)),
        }
    }
}

fn advice(error: &DcpError) -> Option<&'static str> {
    match error.cause() {
        DcpError::NotACheckpoint { .. } => {
            Some("give the directory of one, or safetensors files where the command takes them")
        }
        DcpError::UnsupportedVersion { .. } => Some("use the release that wrote it"),
        DcpError::Corrupt { .. }
        | DcpError::Checksum { .. }
        | DcpError::MissingFile { .. }
        | DcpError::WrongLength { .. }
        | DcpError::ForeignShard { .. }
        | DcpError::InvalidChunks { .. } => {
            Some("restore it from a copy, or use another checkpoint")
        }
        DcpError::Foreign { .. } => Some("the file is damaged, or of an unknown kind"),
        DcpError::AlreadyExists { .. } => Some("--overwrite allows it"),
        DcpError::Io { .. } => Some("see to the path, its permissions and the space left"),
        _ => None,
    }
}

impl From<DcpError> for Failure {
    fn from(error: DcpError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}
