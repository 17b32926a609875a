//! A save in the background.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use burn_fsdp::ProcessGroup;

use crate::job::{Job, Part};
use crate::load::{agree, on_rank};
use crate::manifest::Manifest;
use crate::snapshot::Snapshot;
use crate::{DcpError, Result, codec};

/// A save under way in the background.
///
/// [`finish`](Self::finish) tells how it ended. If it is dropped instead, it still ends before the drop
/// returns, and a failure of this rank's part is only logged.
#[derive(Debug)]
#[must_use = "a save that is not finished tells nobody how it ended"]
pub struct PendingSave {
    running: Arc<Running>,
    group: ProcessGroup,
    is_finished: bool,
}

impl PendingSave {
    pub(crate) fn new(running: Arc<Running>, group: ProcessGroup) -> Self {
        Self {
            running,
            group,
            is_finished: false,
        }
    }

    /// The step that is saved.
    pub fn step(&self) -> u64 {
        self.running.job.step
    }

    /// Whether this rank has no more to do for it. Does not communicate; other ranks may say otherwise.
    pub fn is_done(&self) -> bool {
        self.running.is_done()
    }

    /// Waits until the checkpoint is there for good. All ranks must call this, in the same order.
    ///
    /// # Errors
    ///
    /// Equal on all ranks, as those of [`Saver::save`](crate::Saver::save); and
    /// [`DcpError::SaveTimeout`].
    pub fn finish(mut self) -> Result<Manifest> {
        self.is_finished = true;
        let job = &self.running.job;
        let same = job.agree(&self.group);
        // Rank 0 hears of a failure here, if its thread doesn't by a file, and need not wait.
        let written = match job.rank {
            0 => Ok(()),
            _ => self.running.wait().result.map(drop),
        };
        let written = same.and_then(|()| agree(&self.group, written));
        if written.is_err() {
            self.running.is_hopeless.store(true, Ordering::Release);
        }
        let ended = self.running.wait();
        let manifest = written
            .and_then(|()| agree(&self.group, ended.result))
            .and_then(|committed| {
                let manifest = committed.map(|manifest| codec::encode_table(&manifest));
                let manifest = self
                    .group
                    .broadcast_bytes(0, manifest.unwrap_or_default())?;
                codec::decode_table(&manifest, "rank 0's manifest")
            });
        if let Err(error) = &manifest {
            let part = job.part_name(job.rank);
            job.undo(
                error,
                &ended.files.into_iter().chain([part]).collect::<Vec<_>>(),
            );
        }
        manifest
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if !self.is_finished
            && let Err(error) = self.running.wait().result
        {
            log::error!("the save of step {} failed: {error}", self.step());
        }
    }
}

/// The thread that writes, and what it brought.
#[derive(Debug)]
pub(crate) struct Running {
    job: Job,
    /// Whether the other ranks' parts are not worth waiting for.
    is_hopeless: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Ended>>>,
    ended: Mutex<Option<Ended>>,
}

/// How a rank's thread ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// On rank 0, the manifest that it put in place.
    result: Result<Option<Manifest>>,
    files: Vec<String>,
}

impl Running {
    /// Starts to write a staged snapshot.
    pub(crate) fn start(job: Job, snapshot: Snapshot, group: ProcessGroup) -> Result<Arc<Self>> {
        let is_hopeless = Arc::new(AtomicBool::new(false));
        let for_thread = (job.clone(), is_hopeless.clone());
        let thread = std::thread::Builder::new()
            .name(format!("checkpoint-{}", job.step))
            .spawn(move || write_and_commit(&for_thread.0, snapshot, &group, &for_thread.1))
            .map_err(|error| DcpError::io("start", "a thread to save", error))?;
        Ok(Arc::new(Self {
            job,
            is_hopeless,
            thread: Mutex::new(Some(thread)),
            ended: Mutex::new(None),
        }))
    }

    pub(crate) fn step(&self) -> u64 {
        self.job.step
    }

    pub(crate) fn is_done(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner());
        thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the thread.
    pub(crate) fn wait(&self) -> Ended {
        // Held while joining, so that whoever comes second finds how it ended.
        let mut ended = self.ended.lock().unwrap_or_else(|e| e.into_inner());
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread {
            *ended = Some(thread.join().unwrap_or_else(|_| Ended {
                result: Err(DcpError::argument("the thread that saves has panicked")),
                files: Vec::new(),
            }));
        }
        ended.clone().expect("the thread has been joined")
    }
}

/// This rank's share of a save in the background. Its part goes to rank 0 as a file, so that no rank
/// waits for another but rank 0.
fn write_and_commit(
    job: &Job,
    snapshot: Snapshot,
    group: &ProcessGroup,
    is_hopeless: &AtomicBool,
) -> Ended {
    let part = job.check_free().and_then(|()| job.write(snapshot));
    let files = part.iter().flat_map(Part::file_names).collect();
    let told = job.location.replace(
        &job.part_name(job.rank),
        &codec::encode_table(&part.as_ref()),
    );
    let result = match (part, told) {
        (Err(error), _) | (Ok(_), Err(error)) => Err(error),
        (Ok(_), Ok(())) if job.rank == 0 => job
            .await_parts(group, is_hopeless)
            .and_then(|parts| commit(job, parts)),
        (Ok(_), Ok(())) => Ok(None),
    };
    Ended { result, files }
}

fn commit(job: &Job, parts: Vec<Vec<u8>>) -> Result<Option<Manifest>> {
    let mut decoded = Vec::with_capacity(parts.len());
    for (rank, bytes) in parts.iter().enumerate() {
        let path = job.location.display_file(&job.part_name(rank));
        let part: std::result::Result<Part, DcpError> = codec::decode_table(bytes, &path)?;
        decoded.push(part.map_err(|error| on_rank(rank, error))?);
    }
    job.commit(decoded).map(Some)
}
