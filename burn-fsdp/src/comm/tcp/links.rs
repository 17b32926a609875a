//! The connections of one process to all others, and the threads that read and write them.
//!
//! A connection has a thread that writes, so that sending never waits, and one that reads, so that
//! no peer is kept from writing.

use std::io::{self, BufReader, BufWriter, ErrorKind, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use parking_lot::Mutex;

use super::acceptor::spawn;
use super::connect::connect;
use super::frame::Frame;
use super::inbox::Inbox;
use super::job::Job;
use crate::{FsdpError, Result};

/// Bytes up to which frames are joined for the operating system.
const BUFFER: usize = 1 << 16;
/// How long a rank that leaves a failed job waits for slow peers to hear of it.
const GRACE: Duration = Duration::from_secs(5);

/// Dropping it says goodbye to all others.
#[derive(Debug)]
pub(super) struct Links {
    shared: Arc<Shared>,
    timeout: Duration,
    /// Closed once all that was to be written is.
    writing: Mutex<Receiver<()>>,
}

/// What the threads share.
#[derive(Debug)]
struct Shared {
    rank: usize,
    inbox: Inbox,
    /// By rank; none for this one.
    outboxes: Vec<Option<Sender<Frame>>>,
}

impl Links {
    /// Connects this process with all others of the job. All ranks must call this. Rank 0 may pass
    /// the listener at the job's address.
    pub(super) fn connect(job: &Job, listener: Option<TcpListener>) -> Result<Self> {
        let streams = connect(job, listener)?;
        let error = |error: io::Error| job.error(format!("rank {}: {error}", job.rank));
        Self::over(streams, job).map_err(error)
    }

    fn over(streams: Vec<Option<TcpStream>>, job: &Job) -> io::Result<Self> {
        let (outboxes, frames): (Vec<_>, Vec<_>) = streams
            .iter()
            .map(|stream| stream.as_ref().map(|_| mpsc::channel()).unzip())
            .unzip();
        let shared = Arc::new(Shared {
            rank: job.rank,
            inbox: Inbox::new(job.rank, job.world_size),
            outboxes,
        });
        let (is_writing, writing) = mpsc::channel();
        for (peer, (stream, frames)) in streams.into_iter().zip(frames).enumerate() {
            let (Some(stream), Some(frames)) = (stream, frames) else {
                continue;
            };
            // A peer that reads nothing for that long is no peer any more.
            stream.set_write_timeout(Some(job.timeout))?;
            let (reads, writes) = (shared.clone(), shared.clone());
            let (read_stream, is_writing) = (stream.try_clone()?, is_writing.clone());
            spawn(format!("from-rank-{peer}"), move || {
                reads.read_all(read_stream, peer);
            })?;
            spawn(format!("to-rank-{peer}"), move || {
                let _is_writing = is_writing;
                if let Err(error) = writes.write_all(stream, frames) {
                    // Whoever reads from the peer finds out why.
                    log::debug!("nothing more can be sent to rank {peer}: {error}");
                }
            })?;
        }
        Ok(Self {
            shared,
            timeout: job.timeout,
            writing: Mutex::new(writing),
        })
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.shared.inbox
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// This rank's number in the job.
    pub(super) fn rank(&self) -> usize {
        self.shared.rank
    }

    pub(super) fn send(&self, to: usize, frame: Frame) {
        self.shared.send(to, frame);
    }

    /// Makes the job fail with `cause`, unless it has failed already; what it failed with first.
    pub(super) fn fail(&self, cause: FsdpError) -> FsdpError {
        self.shared.fail(cause.clone());
        self.inbox().failure().unwrap_or(cause)
    }

    /// Tells all others that this rank takes part no longer, and waits until that is on its way.
    pub(super) fn leave(&self) {
        if self.inbox().returned(self.rank()) {
            self.shared.send_to_all(|| Frame::Goodbye);
        }
        let patience = match self.inbox().has_failed() {
            true => GRACE.min(self.timeout),
            false => self.timeout,
        };
        if self.writing.lock().recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            log::warn!(
                "rank {} left while its last messages were on their way",
                self.rank()
            );
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.inbox().has_returned(self.rank()) {
            self.shared.fail(FsdpError::RankFailed {
                rank: self.rank(),
                cause: "it panicked".to_string(),
            });
        }
        self.leave();
    }
}

impl Shared {
    fn send(&self, to: usize, frame: Frame) {
        if let Some(outbox) = &self.outboxes[to] {
            // A peer that can't be reached makes the job fail where its messages are waited for.
            let _ = outbox.send(frame);
        }
    }

    fn send_to_all(&self, frame: impl Fn() -> Frame) {
        for rank in 0..self.outboxes.len() {
            self.send(rank, frame());
        }
    }

    /// The first failure is told to all, whoever told it to this rank: those who know it may end
    /// before they have told everyone.
    fn fail(&self, cause: FsdpError) {
        let failure = || Frame::Failure(cause.clone());
        self.inbox.fail(cause.clone(), || self.send_to_all(failure));
    }

    /// Writes what is to be sent to a peer, until the goodbye.
    fn write_all(&self, stream: TcpStream, frames: Receiver<Frame>) -> io::Result<()> {
        let mut writer = BufWriter::with_capacity(BUFFER, stream);
        for frame in &frames {
            let mut next = Some(frame);
            while let Some(frame) = next {
                // Nobody waits for messages in a job that has failed, but all for its cause.
                let is_pointless =
                    matches!(frame, Frame::Message { .. }) && self.inbox.has_failed();
                if !is_pointless {
                    frame.write(&mut writer, self.rank)?;
                }
                if matches!(frame, Frame::Goodbye) {
                    writer.flush()?;
                    return writer.get_ref().shutdown(Shutdown::Write);
                }
                next = frames.try_recv().ok();
            }
            writer.flush()?;
        }
        Ok(())
    }

    /// Takes in what a peer sends, until it closes the connection.
    fn read_all(&self, stream: TcpStream, peer: usize) {
        let mut reader = BufReader::with_capacity(BUFFER, stream);
        loop {
            match Frame::read(&mut reader) {
                Ok(Frame::Message { header, payload }) => {
                    if let Err(mismatch) = self.inbox.arrive(peer, &header, payload) {
                        self.fail(mismatch);
                    }
                }
                Ok(Frame::Failure(cause)) => self.fail(cause),
                Ok(Frame::Goodbye) => {
                    self.inbox.returned(peer);
                }
                Err(error) => {
                    let is_over =
                        self.inbox.has_returned(peer) || self.inbox.has_returned(self.rank);
                    if !is_over {
                        self.fail(FsdpError::RankFailed {
                            rank: peer,
                            cause: why_lost(&error),
                        });
                    }
                    return;
                }
            }
        }
    }
}

fn why_lost(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted => {
            "its process has ended".to_string()
        }
        ErrorKind::InvalidData => format!("it sent {error}"),
        _ => format!("the connection to it broke: {error}"),
    }
}
