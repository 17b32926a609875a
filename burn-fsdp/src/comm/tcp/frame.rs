//! What goes over a connection between two ranks.
//!
//! A frame is a head of fixed size, then the text of a call, then a payload. Lengths are checked
//! before anything is allocated for them.

use std::io::{self, Read, Write};
use std::sync::Arc;

use bytes::Bytes;

use crate::FsdpError;
use crate::comm::buffer::SharedBuffer;
use crate::comm::cause;

/// Bytes of one message of an exchange.
pub(super) const MOST_PAYLOAD: usize = 1 << 34;
/// Bytes of the text of a call.
pub(super) const MOST_TEXT: usize = 1 << 12;

/// Kind and text length, group, position, fingerprint, payload length.
const HEAD: usize = 5 * 8;

#[derive(Debug)]
pub(super) enum Frame {
    /// One rank's message to another in an exchange.
    Message { header: Header, payload: Bytes },
    /// The job has failed.
    Failure(FsdpError),
    /// The rank has returned; nothing follows.
    Goodbye,
}

/// Which exchange a message belongs to, and what its sender takes it for.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) key: Key,
    pub(super) call: Text,
}

/// An exchange: the number of its group, and its position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) group: u64,
    pub(super) position: u64,
}

/// A call as other processes see it.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// Differs between calls that differ.
    pub(super) fingerprint: u64,
    /// For people.
    pub(super) text: Arc<str>,
}

const MESSAGE: u32 = 1;
const FAILURE: u32 = 2;
const GOODBYE: u32 = 3;

impl Frame {
    /// Writes the frame as `rank`'s.
    pub(super) fn write(&self, to: &mut impl Write, rank: usize) -> io::Result<()> {
        match self {
            Self::Message { header, payload } => {
                let text = header.call.text.as_bytes();
                let Key { group, position } = header.key;
                let numbers = [group, position, header.call.fingerprint];
                to.write_all(&head(MESSAGE, text.len(), numbers, payload.len()))?;
                to.write_all(text)?;
                to.write_all(payload)
            }
            Self::Failure(cause) => {
                let cause = cause::encode(cause, rank);
                to.write_all(&head(FAILURE, 0, [0; 3], cause.len()))?;
                to.write_all(&cause)
            }
            Self::Goodbye => to.write_all(&head(GOODBYE, 0, [0; 3], 0)),
        }
    }

    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; HEAD];
        from.read_exact(&mut head)?;
        let number = |i: usize| u64::from_le_bytes(head[i * 8..][..8].try_into().expect("8 bytes"));
        let (kind, text_len) = (number(0) as u32, (number(0) >> 32) as usize);
        let payload_len = number(4);
        match kind {
            MESSAGE => {
                check_len("text", text_len as u64, MOST_TEXT)?;
                check_len("message", payload_len, MOST_PAYLOAD)?;
                let mut text = vec![0; text_len];
                from.read_exact(&mut text)?;
                let mut payload = SharedBuffer::new(payload_len as usize, None);
                from.read_exact(payload.as_mut_slice())?;
                let key = Key {
                    group: number(1),
                    position: number(2),
                };
                let call = Text {
                    fingerprint: number(3),
                    text: String::from_utf8_lossy(&text).into(),
                };
                Ok(Self::Message {
                    header: Header { key, call },
                    payload: payload.freeze(),
                })
            }
            FAILURE => {
                check_len("failure", payload_len, cause::MOST_BYTES)?;
                let mut bytes = vec![0; payload_len as usize];
                from.read_exact(&mut bytes)?;
                let cause = cause::decode(&bytes);
                cause
                    .map(Self::Failure)
                    .ok_or_else(|| invalid("a failure that nobody can read".into()))
            }
            GOODBYE => Ok(Self::Goodbye),
            other => Err(invalid(format!("a frame of the unknown kind {other}"))),
        }
    }
}

fn head(kind: u32, text_len: usize, numbers: [u64; 3], payload_len: usize) -> Vec<u8> {
    let first = kind as u64 | (text_len as u64) << 32;
    let [group, position, fingerprint] = numbers;
    [first, group, position, fingerprint, payload_len as u64]
        .map(u64::to_le_bytes)
        .concat()
}

fn check_len(what: &str, len: u64, most: usize) -> io::Result<()> {
    if len <= most as u64 {
        return Ok(());
    }
    Err(invalid(format!(
        "a {what} of {len} bytes, of which {most} are allowed"
    )))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &'static [u8]) -> Frame {
        let key = Key {
            group: u64::MAX,
            position: 7,
        };
        let call = Text {
            fingerprint: 1 << 63,
            text: "barrier of the group".into(),
        };
        Frame::Message {
            header: Header { key, call },
            payload: Bytes::from_static(payload),
        }
    }

    fn written(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes, 2).unwrap();
        bytes
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        let aborted = FsdpError::Aborted {
            rank: 1,
            reason: "enough".into(),
        };
        let frames = [
            message(b"some bytes"),
            message(b""),
            Frame::Failure(aborted),
            Frame::Goodbye,
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(written).collect();
        let mut reader = &bytes[..];
        for frame in &frames {
            let read = Frame::read(&mut reader).unwrap();
            assert_eq!(format!("{read:?}"), format!("{frame:?}"));
        }
        assert!(reader.is_empty());
    }

    #[test]
    fn a_frame_that_ends_early_is_an_error() {
        let bytes = written(&message(b"some bytes"));
        for len in 0..bytes.len() {
            let error = Frame::read(&mut &bytes[..len]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn lengths_beyond_the_bounds_are_refused_before_they_are_read() {
        let heads = [
            (head(MESSAGE, 0, [0; 3], MOST_PAYLOAD + 1), "message"),
            (head(MESSAGE, MOST_TEXT + 1, [0; 3], 0), "text"),
            (head(FAILURE, 0, [0; 3], cause::MOST_BYTES + 1), "failure"),
            (head(9, 0, [0; 3], 0), "kind 9"),
        ];
        for (head, what) in heads {
            let error = Frame::read(&mut &head[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
