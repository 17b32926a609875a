//! The checkpoints of a run: when to save, what to keep, where to go on.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::Module;
use burn_fsdp::{FsdpModule, ProcessGroup};

use crate::checkpoint::{Checkpoint, MANIFEST};
use crate::job::{SaveOptions, id_in_name};
use crate::load::agree;
use crate::pending::PendingSave;
use crate::save::Saver;
use crate::snapshot::Snapshot;
use crate::storage::Location;
use crate::{DcpError, Result, codec};

/// The directory of a step's checkpoint begins so.
const STEP: &str = "step-";
/// The directory of a model that was saved alone.
const MODEL_ONLY: &str = "model";

/// Which of two figures is the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The lower, such as of losses.
    Lower,
    /// The higher, such as of accuracies.
    Higher,
}

/// What a [`Manager`] does by itself.
#[derive(Clone, Debug, Default)]
pub struct ManagerConfig {
    interval: Option<u64>,
    keep_latest: Option<usize>,
    keep_best: Option<(usize, String, Better)>,
    first_step: bool,
    in_background: bool,
    options: SaveOptions,
}

impl ManagerConfig {
    /// The defaults: saves when told, in the foreground, and keeps everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Saves at multiples of `steps`.
    ///
    /// # Panics
    ///
    /// If `steps` is zero.
    pub fn with_interval(mut self, steps: u64) -> Self {
        assert!(steps > 0, "an interval has one step at least");
        self.interval = Some(steps);
        self
    }

    /// Saves at step 1 as well, to see at once that saving works.
    pub fn with_first_step(mut self, first_step: bool) -> Self {
        self.first_step = first_step;
        self
    }

    /// Keeps the latest `count` checkpoints.
    ///
    /// # Panics
    ///
    /// If `count` is zero.
    pub fn with_keep_latest(mut self, count: usize) -> Self {
        assert!(count > 0, "the latest checkpoint is always kept");
        self.keep_latest = Some(count);
        self
    }

    /// Keeps, beside the latest, the `count` best by a metric of their snapshots. Without a number of
    /// latest to keep, one is kept.
    pub fn with_keep_best(mut self, count: usize, metric: &str, better: Better) -> Self {
        self.keep_best = Some((count, metric.to_string(), better));
        self
    }

    /// Saves in the background.
    pub fn in_background(mut self, in_background: bool) -> Self {
        self.in_background = in_background;
        self
    }

    /// How each checkpoint is saved.
    pub fn with_save_options(mut self, options: SaveOptions) -> Self {
        self.options = options;
        self
    }
}

/// The checkpoints of a run in one directory, one rank's handle.
///
/// Each is in a directory `step-N`. Those without a manifest are none: a save was cut short.
#[derive(Debug)]
pub struct Manager {
    group: ProcessGroup,
    root: Location,
    config: ManagerConfig,
    saver: Saver,
    pending: Option<PendingSave>,
    /// Steps whose checkpoints were passed over.
    damaged: BTreeSet<u64>,
}

/// Where to go on.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resume {
    /// The newest good checkpoint.
    pub checkpoint: Checkpoint,
    /// Newer ones that are damaged, with their faults.
    pub skipped: Vec<(u64, DcpError)>,
}

impl Manager {
    /// The checkpoints in `root`, which may not exist yet. All ranks must call this.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn new(
        group: &ProcessGroup,
        root: impl Into<Location>,
        config: ManagerConfig,
    ) -> Result<Self> {
        Ok(Self {
            group: group.clone(),
            root: root.into(),
            saver: Saver::new(group, config.options.clone())?,
            config,
            pending: None,
            damaged: BTreeSet::new(),
        })
    }

    /// Whether a checkpoint is due after this step. Does not communicate.
    pub fn is_due(&self, step: u64) -> bool {
        let interval = self.config.interval;
        interval.is_some_and(|n| step > 0 && step.is_multiple_of(n))
            || self.config.first_step && step == 1
    }

    /// Saves a snapshot under its step, and then removes what is not to be kept. In the background, it
    /// returns once the shards are on the host; and what became of the save before is told first.
    ///
    /// All ranks must call this.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`], equal on all ranks.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<()> {
        self.finish()?;
        let step = snapshot.step;
        let location = self.step(step);
        // A damaged checkpoint may be replaced without asking.
        let overwrite = self.config.options.overwrite || self.damaged.contains(&step);
        self.saver.set_overwrite(overwrite);
        if self.config.in_background {
            self.pending = Some(self.saver.save_async(location, snapshot)?);
            return Ok(());
        }
        self.saver.save(location, snapshot)?;
        self.prune(step)
    }

    /// Waits for a save in the background. All ranks must call this, before a run ends.
    ///
    /// # Errors
    ///
    /// As [`PendingSave::finish`].
    pub fn finish(&mut self) -> Result<()> {
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let step = pending.finish()?.step;
        self.prune(step)
    }

    /// Saves a model alone, for use and not for going on, into the directory `model`; it replaces the
    /// one before. All ranks must call this.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`].
    pub fn save_model<M: Module>(&mut self, step: u64, model: &FsdpModule<M>) -> Result<()> {
        self.finish()?;
        let options = self.config.options.clone().with_overwrite(true);
        let mut saver = Saver::new(&self.group, options)?;
        let snapshot = Snapshot::new(step).model(model);
        saver.save(self.root.join(MODEL_ONLY), snapshot).map(drop)
    }

    /// The good checkpoint of the highest step: every byte of it has been read, each rank having taken
    /// its share, and found right. Damaged ones that are passed over give way to what is saved from then
    /// on. None if there is no checkpoint at all. All ranks must call this; all get the same one.
    ///
    /// # Errors
    ///
    /// Equal on all ranks: [`DcpError::NoneValid`] if there are checkpoints and none is good; a failure
    /// of the group.
    pub fn latest(&mut self) -> Result<Option<Resume>> {
        let steps = match self.group.rank() {
            0 => self.steps(),
            _ => Ok(Vec::new()),
        };
        let steps = codec::encode_table(&agree(&self.group, steps)?);
        let steps = self.group.broadcast_bytes(0, steps)?;
        let steps: Vec<u64> = codec::decode_table(&steps, "rank 0's list of steps")?;
        let mut skipped = Vec::new();
        for &step in steps.iter().rev() {
            match self.open_verified(step) {
                Ok(checkpoint) => {
                    self.damaged = skipped.iter().map(|(step, _)| *step).collect();
                    return Ok(Some(Resume {
                        checkpoint,
                        skipped,
                    }));
                }
                Err(DcpError::Group(error)) => return Err(error.into()),
                Err(error) => {
                    log::warn!("checkpoint {} is passed over: {error}", self.step(step));
                    skipped.push((step, error));
                }
            }
        }
        if skipped.is_empty() {
            return Ok(None);
        }
        let tried = skipped.iter();
        Err(DcpError::NoneValid {
            root: self.root.to_string(),
            tried: tried
                .map(|(step, error)| format!("{STEP}{step}: {error}"))
                .collect(),
        })
    }

    fn open_verified(&self, step: u64) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open_on(&self.group, self.step(step))?;
        let share = (self.group.rank(), self.group.world_size());
        agree(&self.group, checkpoint.verify_share(share, |_| ()))?;
        Ok(checkpoint)
    }

    /// The steps that have a checkpoint, in ascending order, be it good or not. Does not communicate.
    ///
    /// # Errors
    ///
    /// If the directory can't be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        steps_in(&self.root, true)
    }

    /// Where the checkpoint of a step is, if there is one. Does not communicate.
    pub fn step(&self, step: u64) -> Location {
        self.root.join(&format!("{STEP}{step}"))
    }

    /// Removes what is not to be kept. Rank 0 does, once the new checkpoint is there for good; what
    /// can't be removed is left.
    fn prune(&mut self, saved: u64) -> Result<()> {
        self.damaged.remove(&saved);
        if self.group.rank() == 0
            && let Err(error) = self.remove_unwanted(saved)
        {
            log::warn!("old checkpoints in {} are left: {error}", self.root);
        }
        // So that no rank looks for checkpoints that are being removed.
        self.group.barrier()?;
        Ok(())
    }

    fn remove_unwanted(&self, saved: u64) -> Result<()> {
        let ManagerConfig {
            keep_latest,
            keep_best,
            ..
        } = &self.config;
        if keep_latest.is_none() && keep_best.is_none() {
            return Ok(());
        }
        // A damaged checkpoint is of no use, and keeps no good one out.
        let mut good = found_in(&self.root)?;
        good.retain(|found| !self.damaged.contains(&found.step));
        let mut steps = unwanted(good, keep_latest.unwrap_or(1), keep_best.as_ref());
        steps.extend(&self.damaged);
        // Saves that were cut short; none of this run is under way.
        let cut_short = steps_in(&self.root, false)?;
        steps.extend(cut_short.into_iter().filter(|step| *step < saved));
        remove(&self.root, steps, |_| ());
        Ok(())
    }
}

/// The steps with a directory, in ascending order; of those that are committed, or of the others.
fn steps_in(root: &Location, committed: bool) -> Result<Vec<u64>> {
    let mut steps = Vec::new();
    for name in root.list()? {
        let step = name
            .strip_prefix(STEP)
            .and_then(|step| step.parse::<u64>().ok());
        // Only the spelling that is written here.
        let Some(step) = step.filter(|step| name == format!("{STEP}{step}")) else {
            continue;
        };
        let has_manifest = root.join(&name).list()?.iter().any(|file| file == MANIFEST);
        if has_manifest == committed {
            steps.push(step);
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// A checkpoint as far as its manifest tells.
#[derive(Debug)]
struct Found {
    step: u64,
    created: u64,
    metrics: BTreeMap<String, f64>,
}

/// The checkpoints in a directory whose manifests can be read.
fn found_in(root: &Location) -> Result<Vec<Found>> {
    let found = |step: u64| {
        let checkpoint = Checkpoint::open(root.join(&format!("{STEP}{step}"))).ok()?;
        let manifest = checkpoint.manifest();
        Some(Found {
            step,
            created: manifest.created,
            metrics: manifest.metrics.clone(),
        })
    };
    Ok(steps_in(root, true)?
        .into_iter()
        .filter_map(found)
        .collect())
}

/// The steps that are neither among the latest nor among the best. The latest are those saved last: a run
/// may have gone back to an earlier step.
fn unwanted(
    mut found: Vec<Found>,
    keep_latest: usize,
    keep_best: Option<&(usize, String, Better)>,
) -> Vec<u64> {
    found.sort_unstable_by_key(|found| std::cmp::Reverse((found.created, found.step)));
    let mut rest = found.split_off(keep_latest.max(1).min(found.len()));
    if let Some((count, metric, better)) = keep_best {
        let latest = found.iter().chain(&rest);
        let value = |found: &Found| found.metrics.get(metric).copied();
        let with_value = latest.filter_map(|found| Some((found.step, value(found)?)));
        let mut ranked: Vec<(u64, f64)> = { with_value }.filter(|(_, v)| !v.is_nan()).collect();
        ranked.sort_by(|a, b| match better {
            Better::Lower => a.1.total_cmp(&b.1),
            Better::Higher => b.1.total_cmp(&a.1),
        });
        ranked.truncate(*count);
        rest.retain(|found| !ranked.iter().any(|(step, _)| *step == found.step));
    }
    let mut steps: Vec<u64> = rest.into_iter().map(|found| found.step).collect();
    steps.sort_unstable();
    steps
}

/// Removes all checkpoints in a directory but the latest and the best; the steps removed. `progress` is
/// told of each. Checkpoints whose manifest can't be read are left, and so are saves that were cut short,
/// or are under way.
///
/// # Errors
///
/// If the directory can't be listed. A checkpoint that can't be removed is passed over.
pub fn prune(
    root: &Location,
    keep_latest: usize,
    keep_best: Option<&(usize, String, Better)>,
    progress: impl FnMut(u64),
) -> Result<Vec<u64>> {
    Ok(remove(
        root,
        prunable(root, keep_latest, keep_best)?,
        progress,
    ))
}

/// The steps that [`prune`] would remove, in its order. Removes nothing.
///
/// # Errors
///
/// If the directory can't be listed.
pub fn prunable(
    root: &Location,
    keep_latest: usize,
    keep_best: Option<&(usize, String, Better)>,
) -> Result<Vec<u64>> {
    Ok(unwanted(found_in(root)?, keep_latest, keep_best))
}

fn remove(root: &Location, steps: Vec<u64>, mut progress: impl FnMut(u64)) -> Vec<u64> {
    let mut removed = Vec::new();
    for step in steps {
        match remove_checkpoint(&root.join(&format!("{STEP}{step}"))) {
            Ok(()) => {
                progress(step);
                removed.push(step);
            }
            Err(error) => log::warn!("the checkpoint of step {step} is left: {error}"),
        }
    }
    removed
}

/// Removes a checkpoint: its manifest first, so that there is never half of one.
fn remove_checkpoint(location: &Location) -> Result<()> {
    location.remove(MANIFEST)?;
    let is_ours = |name: &String| *name == format!("{MANIFEST}.tmp") || id_in_name(name).is_some();
    for name in location.list()?.into_iter().filter(is_ours) {
        location.remove(&name)?;
    }
    location.remove_if_empty()
}
