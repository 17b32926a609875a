//! What can go wrong, each with what a reader needs to find it.

use burn_fsdp::FsdpError;
use serde::{Deserialize, Serialize};

use crate::report::LoadReport;

/// The result of a checkpoint operation.
pub type Result<T, E = DcpError> = std::result::Result<T, E>;

/// Why a checkpoint could not be written, read or used.
///
/// It travels between ranks, so that all of them return the same error: that of the lowest rank that
/// failed, as [`OnRank`](Self::OnRank).
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DcpError {
    /// The operating system, or an object store, refused.
    #[error("cannot {op} {path}: {message}")]
    Io {
        /// What was tried.
        op: String,
        /// The file or directory.
        path: String,
        /// What the system said.
        message: String,
    },
    /// There is no checkpoint.
    #[error("{path} is not a checkpoint: {reason}")]
    NotACheckpoint {
        /// Where one was looked for.
        path: String,
        /// What is missing or else.
        reason: String,
    },
    /// The checkpoint was written by another version of the format.
    #[error("{path} has format version {found}, and this build reads version {supported}")]
    UnsupportedVersion {
        /// The manifest.
        path: String,
        /// Its version.
        found: u32,
        /// The version that can be read.
        supported: u32,
    },
    /// A file contradicts itself or the manifest.
    #[error("{file} is damaged: {detail}")]
    Corrupt {
        /// The file.
        file: String,
        /// What is wrong.
        detail: String,
    },
    /// Bytes changed since they were written.
    #[error(
        "{file} is damaged: block {block} of tensor \"{tensor}\", chunk at {offsets:?}, fails its checksum"
    )]
    Checksum {
        /// The shard file.
        file: String,
        /// The tensor or state.
        tensor: String,
        /// Where its chunk begins in the whole tensor.
        offsets: Vec<u64>,
        /// The number of the block in the chunk.
        block: u64,
    },
    /// A file of another checkpoint stands in the place of one of this.
    #[error("{file} belongs to checkpoint {found}, not to {expected}")]
    ForeignShard {
        /// The shard file.
        file: String,
        /// The id in the manifest.
        expected: String,
        /// The id in the file.
        found: String,
    },
    /// A file that the manifest names is not there.
    #[error("{file} is missing")]
    MissingFile {
        /// The file.
        file: String,
    },
    /// A file is shorter or longer than the manifest says.
    #[error("{file} has {found} bytes where {expected} were written")]
    WrongLength {
        /// The file.
        file: String,
        /// The length in the manifest.
        expected: u64,
        /// The length on disk.
        found: u64,
    },
    /// Chunks do not tile their tensor.
    #[error("tensor \"{tensor}\": {detail}")]
    InvalidChunks {
        /// The tensor.
        tensor: String,
        /// The rule they break.
        detail: String,
    },
    /// There is a checkpoint already, and no consent to replace it.
    #[error("{path} holds a checkpoint already; allow overwriting, or choose another place")]
    AlreadyExists {
        /// The directory.
        path: String,
    },
    /// Checkpoint and model differ; the report lists all differences.
    #[error("the checkpoint does not fit the model: {0}")]
    Mismatch(Box<LoadReport>),
    /// A state that was asked for is not in the checkpoint.
    #[error("the checkpoint has no state \"{name}\"; it has {known:?}")]
    MissingState {
        /// The name.
        name: String,
        /// The names it has.
        known: Vec<String>,
    },
    /// A state can't be encoded or decoded as its type.
    #[error("state \"{name}\": {detail}")]
    BadState {
        /// The name.
        name: String,
        /// What the encoding said.
        detail: String,
    },
    /// A save was asked for while another is under way.
    #[error("the save of step {step} is still under way")]
    SaveUnderWay {
        /// The step being saved.
        step: u64,
    },
    /// Some ranks did not finish their part of a save in time.
    #[error("ranks {missing:?} did not finish their part of the save within {seconds} s")]
    SaveTimeout {
        /// The ranks without a part.
        missing: Vec<usize>,
        /// The limit.
        seconds: u64,
    },
    /// None of the checkpoints in a directory is good.
    #[error("no checkpoint in {root} can be used: {}", tried.join("; "))]
    NoneValid {
        /// The directory.
        root: String,
        /// Each checkpoint with its fault, newest first.
        tried: Vec<String>,
    },
    /// What another library wrote can't be read.
    #[error("{file}: {detail}")]
    Foreign {
        /// The file.
        file: String,
        /// What is wrong, and where.
        detail: String,
    },
    /// The caller asks for what makes no sense.
    #[error("{0}")]
    InvalidArgument(String),
    /// A rank failed; every rank gets this.
    #[error("rank {rank}: {error}")]
    OnRank {
        /// The rank.
        rank: usize,
        /// Its error.
        error: Box<DcpError>,
    },
    /// The process group failed.
    #[error(transparent)]
    #[serde(skip)]
    Group(#[from] FsdpError),
}

impl DcpError {
    pub(crate) fn io(op: &str, path: impl ToString, error: impl ToString) -> Self {
        Self::Io {
            op: op.to_string(),
            path: path.to_string(),
            message: error.to_string(),
        }
    }

    pub(crate) fn corrupt(file: impl ToString, detail: impl ToString) -> Self {
        Self::Corrupt {
            file: file.to_string(),
            detail: detail.to_string(),
        }
    }

    pub(crate) fn foreign(file: impl ToString, detail: impl ToString) -> Self {
        Self::Foreign {
            file: file.to_string(),
            detail: detail.to_string(),
        }
    }

    pub(crate) fn argument(detail: impl ToString) -> Self {
        Self::InvalidArgument(detail.to_string())
    }

    /// The error behind [`OnRank`](Self::OnRank), or this one.
    pub fn cause(&self) -> &Self {
        match self {
            Self::OnRank { error, .. } => error.cause(),
            error => error,
        }
    }
}

/// So that `?` works among ranks: what the group failed of is itself, all else an error of the caller's
/// own.
impl From<DcpError> for FsdpError {
    fn from(error: DcpError) -> Self {
        match error {
            DcpError::Group(error) => error,
            error => Self::other(error),
        }
    }
}
