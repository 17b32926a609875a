//! Several pieces of memory as one message.

use std::sync::Arc;

use bytes::Bytes;

use super::buffer::{BufferPool, SharedBuffer};
use crate::{FsdpError, Result};

/// Every piece begins at a multiple of this, so that it can be read as numbers where it is.
const ALIGN: usize = 16;

/// A message whose pieces are written one after another.
#[derive(Debug)]
pub(super) struct MessageWriter {
    buffer: SharedBuffer,
    next: usize,
}

impl MessageWriter {
    /// A message of pieces of these lengths.
    pub(super) fn new(
        pieces: impl IntoIterator<Item = usize>,
        pool: Option<&Arc<BufferPool>>,
    ) -> Self {
        let len = pieces.into_iter().map(padded).sum();
        Self {
            buffer: SharedBuffer::new(len, pool),
            next: 0,
        }
    }

    /// The next piece, to be written.
    pub(super) fn piece(&mut self, len: usize) -> &mut [u8] {
        let start = self.next;
        self.next += padded(len);
        &mut self.buffer.as_mut_slice()[start..start + len]
    }

    pub(super) fn finish(self) -> Bytes {
        self.buffer.freeze()
    }
}

/// A rank's message, whose pieces are read one after another.
#[derive(Debug)]
pub(super) struct MessageReader {
    rank: usize,
    rest: Bytes,
}

impl MessageReader {
    pub(super) fn new(rank: usize, message: Bytes) -> Self {
        Self {
            rank,
            rest: message,
        }
    }

    /// The next piece.
    pub(super) fn piece(&mut self, len: usize) -> Result<Bytes> {
        if self.rest.len() < padded(len) {
            return Err(self.malformed());
        }
        Ok(self.rest.split_to(padded(len)).slice(..len))
    }

    /// That the message is not what the rank's call says.
    pub(super) fn malformed(&self) -> FsdpError {
        FsdpError::argument(format!(
            "rank {} of the group sent a message that does not fit its call; do all ranks run the \
             same program?",
            self.rank
        ))
    }
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_as_they_were_written() {
        let pieces: [&[u8]; 4] = [b"a", b"", b"seventeen bytes..", b"end"];
        let mut writer = MessageWriter::new(pieces.map(<[u8]>::len), None);
        for piece in pieces {
            writer.piece(piece.len()).copy_from_slice(piece);
        }
        let mut reader = MessageReader::new(0, writer.finish());
        for piece in pieces {
            let read = reader.piece(piece.len()).unwrap();
            assert_eq!(read, piece);
            assert!(read.is_empty() || (read.as_ptr() as usize).is_multiple_of(ALIGN));
        }
    }

    #[test]
    fn a_message_that_is_too_short_is_refused() {
        let mut reader = MessageReader::new(3, Bytes::from_static(&[0; 31]));
        assert!(reader.piece(16).is_ok());
        let error = reader.piece(16).unwrap_err();
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
}
