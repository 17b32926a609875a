//! What ranks tell each other besides the payload of exchanges.
//!
//! Numbers are 8 bytes, little-endian; texts and lists start with their length.

use std::time::Duration;

use bytes::Bytes;

use super::rounds::Header;
use crate::FsdpError;

/// Bytes of the reason of a failure that are sent.
const LONGEST_REASON: usize = 4096;

/// A message from one rank to another.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// The rank has started the next exchange of a group.
    Header { group: u64, header: Header },
    /// The job has failed.
    Failed(FsdpError),
    /// The rank has dropped its last handle and starts nothing more.
    Ended,
}

const HEADER: u64 = 0;
const ENDED: u64 = 1;
const MISMATCH: u64 = 2;
const TIMEOUT: u64 = 3;
const RANK_FAILED: u64 = 4;
const RANK_RETURNED: u64 = 5;
const ABORTED: u64 = 6;

impl Message {
    /// The message of this rank. An error of a type that others cannot have is told as the failure
    /// of this rank.
    pub(super) fn encode(&self, rank: usize) -> Bytes {
        let mut out = Writer::default();
        match self {
            Self::Header { group, header } => out
                .number(HEADER)
                .number(*group)
                .number(header.fingerprint)
                .number(header.len as u64)
                .text(&header.call),
            Self::Ended => out.number(ENDED),
            Self::Failed(FsdpError::CollectiveMismatch {
                rank_a,
                call_a,
                rank_b,
                call_b,
            }) => out
                .number(MISMATCH)
                .number(*rank_a as u64)
                .text(call_a)
                .number(*rank_b as u64)
                .text(call_b),
            Self::Failed(FsdpError::Timeout {
                rank,
                call,
                after,
                missing,
                last_calls,
            }) => out
                .number(TIMEOUT)
                .number(*rank as u64)
                .text(call)
                .number(after.as_secs())
                .number(after.subsec_nanos().into())
                .list(missing, |out, rank| _ = out.number(*rank as u64))
                .list(last_calls, |out, call| _ = out.text(call)),
            Self::Failed(FsdpError::RankFailed { rank, cause }) => out.rank_failed(*rank, cause),
            Self::Failed(FsdpError::RankReturned { rank, call, gone }) => out
                .number(RANK_RETURNED)
                .number(*rank as u64)
                .text(call)
                .number(*gone as u64),
            Self::Failed(FsdpError::Aborted { rank, reason }) => {
                out.number(ABORTED).number(*rank as u64).text(reason)
            }
            Self::Failed(other) => out.rank_failed(rank, &other.to_string()),
        };
        out.0.into()
    }

    /// `None` if it is no message.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut bytes = Reader(bytes);
        let failure = match bytes.number()? {
            HEADER => {
                let group = bytes.number()?;
                let header = Header {
                    fingerprint: bytes.number()?,
                    len: bytes.size()?,
                    call: bytes.text()?,
                };
                return Some(Self::Header { group, header });
            }
            ENDED => return Some(Self::Ended),
            MISMATCH => FsdpError::CollectiveMismatch {
                rank_a: bytes.size()?,
                call_a: bytes.text()?,
                rank_b: bytes.size()?,
                call_b: bytes.text()?,
            },
            TIMEOUT => FsdpError::Timeout {
                rank: bytes.size()?,
                call: bytes.text()?,
                after: Duration::new(bytes.number()?, bytes.number()?.try_into().ok()?),
                missing: bytes.list(Reader::size)?,
                last_calls: bytes.list(Reader::text)?,
            },
            RANK_FAILED => FsdpError::RankFailed {
                rank: bytes.size()?,
                cause: bytes.text()?,
            },
            RANK_RETURNED => FsdpError::RankReturned {
                rank: bytes.size()?,
                call: bytes.text()?,
                gone: bytes.size()?,
            },
            ABORTED => FsdpError::Aborted {
                rank: bytes.size()?,
                reason: bytes.text()?,
            },
            _ => return None,
        };
        Some(Self::Failed(failure))
    }
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        let text = &text[..text.floor_char_boundary(LONGEST_REASON)];
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn list<T>(&mut self, items: &[T], item: impl Fn(&mut Self, &T)) -> &mut Self {
        self.number(items.len() as u64);
        for each in items {
            item(self, each);
        }
        self
    }

    fn rank_failed(&mut self, rank: usize, cause: &str) -> &mut Self {
        self.number(RANK_FAILED).number(rank as u64).text(cause)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn size(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn text(&mut self) -> Option<String> {
        let len = self.size()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.size()?;
        (0..len).map(|_| item(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_back(message: &Message) -> Message {
        Message::decode(&message.encode(1)).unwrap()
    }

    #[test]
    fn failures_keep_their_types_on_other_ranks() {
        let text = String::from;
        let failures = [
            FsdpError::CollectiveMismatch {
                rank_a: 0,
                call_a: text("barrier"),
                rank_b: 2,
                call_b: text("ä"),
            },
            FsdpError::Timeout {
                rank: 1,
                call: text("barrier"),
                after: Duration::from_millis(2500),
                missing: vec![0, 3],
                last_calls: vec![text("nothing"), text("barrier")],
            },
            FsdpError::RankFailed {
                rank: 3,
                cause: text("disk full"),
            },
            FsdpError::RankReturned {
                rank: 0,
                call: text("barrier"),
                gone: 1,
            },
            FsdpError::Aborted {
                rank: 2,
                reason: text("enough"),
            },
        ];
        for failure in failures {
            let read = read_back(&Message::Failed(failure.clone()));
            let Message::Failed(read) = read else {
                panic!("{read:?}");
            };
            assert_eq!(format!("{read:?}"), format!("{failure:?}"));
        }
    }

    #[test]
    fn any_other_error_is_the_failure_of_the_rank_that_tells_it() {
        let read = read_back(&Message::Failed(FsdpError::argument("no such shape")));
        let Message::Failed(FsdpError::RankFailed { rank, cause }) = read else {
            panic!("{read:?}");
        };
        assert_eq!((rank, &*cause), (1, "no such shape"));
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        let header = Header {
            fingerprint: u64::MAX,
            call: "all-gather of bytes".into(),
            len: 1 << 40,
        };
        let message = Message::Header {
            group: 7,
            header: header.clone(),
        };
        let Message::Header {
            group,
            header: read,
        } = read_back(&message)
        else {
            panic!("not a header");
        };
        assert_eq!((group, read), (7, header));
    }

    #[test]
    fn what_is_cut_short_or_unknown_is_no_message() {
        let reason = FsdpError::Aborted {
            rank: 0,
            reason: "enough".into(),
        };
        let whole = Message::Failed(reason).encode(0);
        for len in 0..whole.len() {
            assert!(Message::decode(&whole[..len]).is_none(), "{len} bytes");
        }
        assert!(Message::decode(&99_u64.to_le_bytes()).is_none());
    }
}
