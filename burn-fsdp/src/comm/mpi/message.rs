//! What ranks tell each other besides the payload of exchanges.
//!
//! A message is its kind, then the numbers of a header and the text of its call, or a failure.

use bytes::Bytes;

use super::rounds::Header;
use crate::FsdpError;
use crate::comm::cause;

/// A message from one rank to another.
#[derive(Debug)]
pub(super) enum Message {
    /// The rank has started the next exchange of a group.
    Header { group: u64, header: Header },
    /// The job has failed.
    Failed(FsdpError),
    /// The rank has left and starts nothing more.
    Left,
}

const HEADER: u64 = 1;
const FAILED: u64 = 2;
const LEFT: u64 = 3;

impl Message {
    /// The message as `rank`'s.
    pub(super) fn encode(&self, rank: usize) -> Bytes {
        let numbers =
            |numbers: &[u64]| -> Vec<u8> { numbers.iter().flat_map(|n| n.to_le_bytes()).collect() };
        let parts = match self {
            Self::Header { group, header } => {
                let (len, to_each) = (header.len as u64, header.to_each.into());
                let head = numbers(&[HEADER, *group, header.fingerprint, len, to_each]);
                [head, header.call.clone().into_bytes()]
            }
            Self::Failed(failure) => [numbers(&[FAILED]), cause::encode(failure, rank)],
            Self::Left => [numbers(&[LEFT]), Vec::new()],
        };
        parts.concat().into()
    }

    /// The reverse of [`encode`](Self::encode); `None` if it did not make these bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut number = || {
            let (number, behind) = rest.split_first_chunk()?;
            rest = behind;
            Some(u64::from_le_bytes(*number))
        };
        match number()? {
            HEADER => {
                let group = number()?;
                let header = Header {
                    fingerprint: number()?,
                    len: number()?.try_into().ok()?,
                    to_each: number()? != 0,
                    call: String::from_utf8(rest.to_vec()).ok()?,
                };
                Some(Self::Header { group, header })
            }
            FAILED => cause::decode(rest).map(Self::Failed),
            LEFT => Some(Self::Left),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> [Message; 3] {
        let header = Header {
            fingerprint: u64::MAX,
            call: "all-gather of \"b\u{e4}\"".into(),
            len: 1 << 40,
            to_each: true,
        };
        let aborted = FsdpError::Aborted {
            rank: 2,
            reason: "enough".into(),
        };
        [
            Message::Header { group: 7, header },
            Message::Failed(aborted),
            Message::Left,
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for message in messages() {
            let read = Message::decode(&message.encode(0)).unwrap();
            assert_eq!(format!("{read:?}"), format!("{message:?}"));
        }
    }

    #[test]
    fn other_bytes_are_no_message() {
        let [header, failure, left] = messages().map(|message| message.encode(0));
        // The text of a header is what remains.
        for whole in [&header[..5 * 8], &failure, &left] {
            for len in 0..whole.len() {
                assert!(Message::decode(&whole[..len]).is_none(), "{len} bytes");
            }
        }
        assert!(Message::decode(&99_u64.to_le_bytes()).is_none());
    }
}
