//! Failures as bytes, so that the processes of a job all return the same one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::FsdpError;

/// More bytes than this are no failure that [`encode`] has made.
pub(super) const MOST_BYTES: usize = 1 << 20;
/// Bytes of a text that is cut to make a failure fit.
const CUT: usize = 1 << 14;

/// The failures that concern every rank. What else a rank can fail with is told as text.
#[derive(Debug, Serialize, Deserialize)]
enum Cause {
    CollectiveMismatch {
        rank_a: usize,
        call_a: String,
        rank_b: usize,
        call_b: String,
    },
    Timeout {
        rank: usize,
        call: String,
        after: Duration,
        missing: Vec<usize>,
        last_calls: Vec<String>,
    },
    RankFailed {
        rank: usize,
        cause: String,
    },
    RankReturned {
        rank: usize,
        call: String,
        gone: usize,
    },
    Aborted {
        rank: usize,
        reason: String,
    },
    Rendezvous {
        address: String,
        reason: String,
    },
    Nccl {
        rank: usize,
        call: String,
        cause: String,
    },
}

/// What `rank` tells the others of its failure.
pub(super) fn encode(failure: &FsdpError, rank: usize) -> Vec<u8> {
    let bytes = to_bytes(&Cause::new(failure.clone(), rank));
    if bytes.len() <= MOST_BYTES {
        return bytes;
    }
    to_bytes(&Cause::RankFailed {
        rank,
        cause: cut(&failure.to_string(), CUT).to_string(),
    })
}

/// The reverse of [`encode`]; `None` if it did not make these bytes.
pub(super) fn decode(bytes: &[u8]) -> Option<FsdpError> {
    let cause: Cause = serde_json::from_slice(bytes).ok()?;
    Some(cause.into())
}

/// The beginning of `text`, of at most `most` bytes.
pub(super) fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

fn to_bytes(cause: &Cause) -> Vec<u8> {
    serde_json::to_vec(cause).expect("numbers and texts can be written as JSON")
}

impl Cause {
    fn new(failure: FsdpError, teller: usize) -> Self {
        match failure {
            FsdpError::CollectiveMismatch {
                rank_a,
                call_a,
                rank_b,
                call_b,
            } => Self::CollectiveMismatch {
                rank_a,
                call_a,
                rank_b,
                call_b,
            },
            FsdpError::Timeout {
                rank,
                call,
                after,
                missing,
                last_calls,
            } => Self::Timeout {
                rank,
                call,
                after,
                missing,
                last_calls,
            },
            FsdpError::RankFailed { rank, cause } => Self::RankFailed { rank, cause },
            FsdpError::RankReturned { rank, call, gone } => Self::RankReturned { rank, call, gone },
            FsdpError::Aborted { rank, reason } => Self::Aborted { rank, reason },
            FsdpError::Rendezvous { address, reason } => Self::Rendezvous { address, reason },
            FsdpError::Nccl { rank, call, cause } => Self::Nccl { rank, call, cause },
            other => Self::RankFailed {
                rank: teller,
                cause: other.to_string(),
            },
        }
    }
}

impl From<Cause> for FsdpError {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::CollectiveMismatch {
                rank_a,
                call_a,
                rank_b,
                call_b,
            } => Self::CollectiveMismatch {
                rank_a,
                call_a,
                rank_b,
                call_b,
            },
            Cause::Timeout {
                rank,
                call,
                after,
                missing,
                last_calls,
            } => Self::Timeout {
                rank,
                call,
                after,
                missing,
                last_calls,
            },
            Cause::RankFailed { rank, cause } => Self::RankFailed { rank, cause },
            Cause::RankReturned { rank, call, gone } => Self::RankReturned { rank, call, gone },
            Cause::Aborted { rank, reason } => Self::Aborted { rank, reason },
            Cause::Rendezvous { address, reason } => Self::Rendezvous { address, reason },
            Cause::Nccl { rank, call, cause } => Self::Nccl { rank, call, cause },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(failure: &FsdpError) -> FsdpError {
        decode(&encode(failure, 3)).unwrap()
    }

    #[test]
    fn a_failure_of_the_group_is_told_as_it_is() {
        let text = String::from;
        let failures = [
            FsdpError::CollectiveMismatch {
                rank_a: 0,
                call_a: text("a \"quoted\" call"),
                rank_b: 1,
                call_b: text("another"),
            },
            FsdpError::Timeout {
                rank: 2,
                call: text("barrier"),
                after: Duration::from_millis(1500),
                missing: vec![0, 1],
                last_calls: vec![text("nothing")],
            },
            FsdpError::RankFailed {
                rank: 1,
                cause: text("index out of bounds"),
            },
            FsdpError::RankReturned {
                rank: 0,
                call: text("barrier"),
                gone: 1,
            },
            FsdpError::Aborted {
                rank: 4,
                reason: text("enough"),
            },
            FsdpError::Rendezvous {
                address: text("host:1"),
                reason: text("nobody came"),
            },
            FsdpError::Nccl {
                rank: 1,
                call: text("all-gather of a unit"),
                cause: text("remote error"),
            },
        ];
        for failure in failures {
            assert_eq!(format!("{:?}", told(&failure)), format!("{failure:?}"));
        }
    }

    #[test]
    fn an_error_of_ones_own_is_told_as_text() {
        let failure = FsdpError::other("no such file");
        let FsdpError::RankFailed { rank: 3, cause } = told(&failure) else {
            panic!("{failure:?}");
        };
        assert_eq!(cause, "no such file");
    }

    #[test]
    fn an_endless_text_is_cut() {
        let failure = FsdpError::other("ä".repeat(MOST_BYTES));
        let FsdpError::RankFailed { rank: 3, cause } = told(&failure) else {
            panic!("another failure was told");
        };
        assert_eq!(cause, "ä".repeat(CUT / 2));
    }

    #[test]
    fn other_bytes_are_no_failure() {
        assert!(decode(b"").is_none());
        assert!(decode(b"{\"Aborted\":{\"rank\":-1,\"reason\":\"\"}}").is_none());
    }
}
