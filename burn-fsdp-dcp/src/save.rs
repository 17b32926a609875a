//! Saving, in the foreground and behind the training.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use burn_fsdp::ProcessGroup;

use crate::job::{Job, Part, SaveOptions, WhenBusy};
use crate::load::agree;
use crate::manifest::{CheckpointId, Manifest};
use crate::pending::{PendingSave, Running};
use crate::snapshot::Snapshot;
use crate::storage::Location;
use crate::{DcpError, Result, codec};

/// Saves snapshots, one rank's handle.
#[derive(Debug)]
pub struct Saver {
    group: ProcessGroup,
    options: SaveOptions,
    /// Random, and the same on all ranks: ids follow from it without a word.
    seed: u64,
    saves: u64,
    running: Option<Arc<Running>>,
    /// Of the last save: what is saved again as it was need not be checked again.
    checked_layout: Arc<AtomicU64>,
}

impl Saver {
    /// A saver for the ranks of a group. All ranks must call this.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn new(group: &ProcessGroup, options: SaveOptions) -> Result<Self> {
        let seed = RandomState::new().build_hasher().finish();
        let seed = group.broadcast_bytes(0, seed.to_le_bytes().to_vec())?;
        Ok(Self {
            group: group.clone(),
            options,
            seed: u64::from_le_bytes(seed.try_into().expect("eight bytes")),
            saves: 0,
            running: None,
            checked_layout: Arc::default(),
        })
    }

    /// Saves a snapshot into a directory, and returns when the checkpoint is there for good. All ranks
    /// must call this, with the same directory and step.
    ///
    /// Tensors are read and written one after another.
    ///
    /// # Errors
    ///
    /// Equal on all ranks: [`DcpError::AlreadyExists`]; what the system says; ranks that disagree; a
    /// failure of the group. There is no checkpoint then, or still the old one; or all the same the new
    /// one, whole, if the very last step failed, or the group while rank 0 took it.
    pub fn save(
        &mut self,
        location: impl Into<Location>,
        mut snapshot: Snapshot,
    ) -> Result<Manifest> {
        self.await_running();
        let location = location.into();
        let job = self.job(location, &snapshot);
        job.agree(&self.group)?;
        agree(&self.group, job.check_free())?;

        snapshot.assign(job.rank, job.world_size);
        let part = job.write(snapshot);
        let written: Vec<String> = part.iter().flat_map(Part::file_names).collect();
        let saved = self.commit(&job, part);
        if let Err(error) = &saved {
            job.undo(error, &written);
        }
        saved
    }

    fn commit(&self, job: &Job, part: Result<Part>) -> Result<Manifest> {
        let part = agree(&self.group, part)?;
        let parts = self.group.all_gather_bytes(codec::encode_table(&part))?;
        let committed = match job.rank {
            // Nothing is certain once the group has failed.
            0 if self.group.failure().is_some() => Ok(Vec::new()),
            0 => job
                .commit_encoded(parts)
                .map(|manifest| codec::encode_table(&manifest)),
            _ => Ok(Vec::new()),
        };
        let manifest = self
            .group
            .broadcast_bytes(0, agree(&self.group, committed)?)?;
        codec::decode_table(&manifest, "rank 0's manifest")
    }

    /// Saves a snapshot while training goes on. It returns once the shards are on the host; they are
    /// written in the background, without a word between ranks. All ranks must call this, with the same
    /// directory and step, and [`finish`](PendingSave::finish) what it returns.
    ///
    /// The snapshot is what the model is now, whatever happens to it later.
    ///
    /// # Errors
    ///
    /// [`DcpError::SaveUnderWay`], if so chosen. All else is told when it is finished.
    pub fn save_async(
        &mut self,
        location: impl Into<Location>,
        mut snapshot: Snapshot,
    ) -> Result<PendingSave> {
        if self.options.when_busy == WhenBusy::Fail {
            self.refuse_if_busy()?;
        }
        self.await_running();
        let job = self.job(location.into(), &snapshot);
        snapshot.assign(job.rank, job.world_size);
        snapshot.stage();
        let running = Running::start(job, snapshot, self.group.clone())?;
        self.running = Some(running.clone());
        Ok(PendingSave::new(running, self.group.clone()))
    }

    pub(crate) fn set_overwrite(&mut self, overwrite: bool) {
        self.options.overwrite = overwrite;
    }

    /// Ranks end a save at different times, so they ask each other.
    fn refuse_if_busy(&self) -> Result<()> {
        let running = self.running.as_ref().filter(|running| !running.is_done());
        let step = running.map(|running| running.step());
        let all = self.group.all_gather_bytes(codec::encode_table(&step))?;
        for bytes in &all {
            if let Some(step) = codec::decode_table::<Option<u64>>(bytes, "a rank's save")? {
                return Err(DcpError::SaveUnderWay { step });
            }
        }
        Ok(())
    }

    fn await_running(&mut self) {
        if let Some(running) = self.running.take() {
            running.wait();
        }
    }

    fn job(&mut self, location: Location, snapshot: &Snapshot) -> Job {
        self.saves += 1;
        Job {
            location,
            id: CheckpointId::of_run(self.seed, self.saves),
            step: snapshot.step,
            rank: self.group.rank(),
            world_size: self.group.world_size(),
            options: self.options.clone(),
            checked_layout: self.checked_layout.clone(),
        }
    }
}
