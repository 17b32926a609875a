//! The handles of a process on its MPI thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::progress::{Delay, Job, PARTING, Progress};
use crate::{FsdpError, Result};

/// How long a handle waits for an answer of the thread, which may be stuck in a call of MPI.
const PATIENCE: Duration = Duration::from_secs(2);

/// A process's connection to its MPI thread. Dropping it leaves the job.
#[derive(Debug)]
pub(super) struct Link {
    /// This rank's number in the job.
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) timeout: Duration,
    jobs: Sender<Job>,
    next_id: AtomicU64,
    failure: Arc<OnceLock<FsdpError>>,
    left: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Link {
    /// Starts the thread and, on it, MPI. Waits for all ranks.
    pub(super) fn open(timeout: Duration) -> Result<Arc<Self>> {
        let (jobs, accepted) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let failure = Arc::new(OnceLock::new());
        let shared = failure.clone();
        let run = move || match Progress::init(accepted, shared) {
            Err(error) => _ = ready.send(Err(error)),
            Ok(progress) => {
                _ = ready.send(Ok((progress.rank(), progress.world_size())));
                progress.run();
            }
        };
        let thread = std::thread::Builder::new().name("mpi".into()).spawn(run);
        let thread = thread.map_err(FsdpError::other)?;
        let (rank, world_size) = started
            .recv()
            .map_err(|_| FsdpError::argument("the MPI thread panicked as it started"))?
            .map_err(FsdpError::other)?;
        Ok(Arc::new(Self {
            rank,
            world_size,
            timeout,
            jobs,
            next_id: AtomicU64::new(0),
            failure,
            left: AtomicBool::new(false),
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// Gives the thread a job; the ticket is for its result.
    pub(super) fn submit<T>(
        self: &Arc<Self>,
        call: String,
        job: impl FnOnce(u64, Sender<T>) -> Job,
    ) -> Result<Ticket<T>> {
        if let Some(cause) = self.failure() {
            return Err(cause);
        }
        if self.left.load(Ordering::Acquire) {
            return Err(FsdpError::argument(format!(
                "rank {} has returned, and its process group ended",
                self.rank
            )));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (done, result) = mpsc::channel();
        self.send(job(id, done));
        Ok(Ticket {
            link: self.clone(),
            id,
            call,
            result,
        })
    }

    /// A thread that is gone takes no job. It drops what tells of the result, which tells.
    fn send(&self, job: Job) {
        _ = self.jobs.send(job);
    }

    pub(super) fn failure(&self) -> Option<FsdpError> {
        self.failure.get().cloned()
    }

    /// Makes the job fail, unless it has. What it has failed with, which is settled then.
    pub(super) fn fail(&self, cause: FsdpError) -> FsdpError {
        let (settled, settling) = mpsc::channel();
        self.send(Job::Fail {
            cause: cause.clone(),
            settled,
        });
        _ = settling.recv_timeout(PATIENCE);
        self.failure.get_or_init(|| cause).clone()
    }

    /// Why the thread has dropped a result: the job has failed, or is about to, or the thread is
    /// gone.
    fn dropped(&self) -> FsdpError {
        self.fail(FsdpError::RankFailed {
            rank: self.rank,
            cause: "its MPI thread has ended".into(),
        })
    }

    /// Tells all others that this rank takes part no longer. Waits for them to leave too, however
    /// long they work; but after a failure not for long, and not for a thread that is stuck.
    pub(super) fn leave(&self) {
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        self.left.store(true, Ordering::Release);
        self.send(Job::Leave);
        let mut failed_at = None;
        while !thread.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
            let failed = self.failure.get().map(|_| Instant::now());
            failed_at = failed_at.or(failed);
            if failed_at.is_some_and(|at| at.elapsed() > PARTING + PATIENCE) {
                return;
            }
        }
        if thread.join().is_err() {
            log::error!("rank {}: the MPI thread panicked", self.rank);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.left.load(Ordering::Acquire) {
            self.fail(FsdpError::RankFailed {
                rank: self.rank,
                cause: "it panicked".into(),
            });
        }
        self.leave();
    }
}

/// For the result of a job.
#[derive(Debug)]
pub(super) struct Ticket<T> {
    link: Arc<Link>,
    id: u64,
    call: String,
    result: Receiver<T>,
}

impl<T> Ticket<T> {
    /// The result, if it is here.
    pub(super) fn poll(&self) -> Result<Option<T>> {
        match self.result.try_recv() {
            Ok(result) => Ok(Some(result)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.link.dropped()),
        }
    }

    /// Blocks until the result is here, at most for the timeout.
    pub(super) fn wait(self) -> Result<T> {
        match self.result.recv_timeout(self.link.timeout) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(self.link.dropped()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let overdue = self.overdue();
        // It may have come in the meantime.
        self.poll()?.ok_or_else(|| self.link.fail(overdue))
    }

    /// That the result is not here in time, and why, if the thread says.
    pub(super) fn overdue(&self) -> FsdpError {
        let (answer, explained) = mpsc::channel();
        self.link.send(Job::Explain {
            id: self.id,
            answer,
        });
        let Delay {
            missing,
            last_calls,
        } = explained.recv_timeout(PATIENCE).unwrap_or_default();
        FsdpError::Timeout {
            rank: self.link.rank,
            call: self.call.clone(),
            after: self.link.timeout,
            missing,
            last_calls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Call;

    /// A link to a thread that takes no jobs, as one that is stuck, or to none.
    fn link() -> (Arc<Link>, Receiver<Job>) {
        let (jobs, taken) = mpsc::channel();
        let link = Link {
            rank: 1,
            world_size: 2,
            timeout: Duration::from_millis(10),
            jobs,
            next_id: AtomicU64::new(0),
            failure: Default::default(),
            left: AtomicBool::new(false),
            thread: Mutex::new(None),
        };
        (Arc::new(link), taken)
    }

    fn submit(link: &Arc<Link>) -> Result<Ticket<u64>> {
        link.submit("subset".into(), |id, done| Job::Subset {
            parent: 0,
            id,
            call: Call::new("subset", "the ranks [0, 1]"),
            ranks: vec![0, 1],
            done,
        })
    }

    #[test]
    fn a_wait_ends_even_if_the_thread_is_stuck() {
        let (link, _stuck) = link();
        let error = submit(&link).unwrap().wait().unwrap_err();
        assert!(
            matches!(error, FsdpError::Timeout { rank: 1, .. }),
            "{error}"
        );
        assert!(matches!(link.failure(), Some(FsdpError::Timeout { .. })));
    }

    #[test]
    fn a_thread_that_is_gone_is_a_failure_of_this_rank() {
        let (link, gone) = link();
        drop(gone);
        let error = submit(&link).unwrap().poll().unwrap_err();
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 1, .. }),
            "{error}"
        );
    }

    #[test]
    fn a_rank_knows_the_failure_it_has_told_even_if_the_thread_is_stuck() {
        let (link, _stuck) = link();
        link.fail(FsdpError::argument("no such shape"));
        let error = submit(&link).unwrap_err();
        assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error}");
    }
}
