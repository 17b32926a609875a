//! Writing a checkpoint from what is on disk, without ranks.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::dtype::dtype_name;
use crate::host::HostBytes;
use crate::job::{Job, Part, SaveOptions, Write};
use crate::manifest::{Manifest, StateEntry};
use crate::region::Region;
use crate::source::{TensorInfo, TensorSource};
use crate::storage::Location;
use crate::{CheckpointId, DcpError, Result};

/// As many ranks as a checkpoint can be written for. More is a slip.
const MOST_RANKS: usize = 1 << 16;

/// Writes tensors of any origin as a checkpoint of one rank. Step, metrics and states are those of
/// `states_of`, or none. `progress` is told of bytes as they are done.
///
/// One tensor at a time is in memory. The checkpoint is there only when all of it is on disk.
///
/// # Errors
///
/// [`DcpError::AlreadyExists`] unless the options allow overwriting; what reading or writing gives.
pub fn write_checkpoint(
    source: &dyn TensorSource,
    states_of: Option<&Checkpoint>,
    location: impl Into<Location>,
    options: &SaveOptions,
    progress: impl Fn(u64) + Sync,
) -> Result<Manifest> {
    let mut plan = Plan::new(1);
    for (name, info) in source.tensors() {
        plan.add_whole(name, info);
    }
    let rewrite = Rewrite {
        source,
        states_of,
        options,
        progress: &progress,
    };
    rewrite.write(location.into(), plan)
}

/// Writes a checkpoint anew, as `world_size` ranks would have written it: tensors that were split are
/// split along their first dimension, by the rule of [`Placement::Shard`](burn_fsdp::Placement::Shard);
/// others are written whole, each by one rank. A single rank splits nothing, so of its checkpoint all
/// tensors count as split. States are kept as they are, those of ranks that are no more as well.
/// `progress` is told of bytes as they are done.
///
/// One chunk at a time is in memory. The checkpoint is there only when all of it is on disk.
///
/// # Errors
///
/// As [`write_checkpoint`]; [`DcpError::InvalidArgument`] for no ranks, or more than 65,536.
pub fn reshard(
    checkpoint: &Checkpoint,
    location: impl Into<Location>,
    world_size: usize,
    options: &SaveOptions,
    progress: impl Fn(u64) + Sync,
) -> Result<Manifest> {
    if !(1..=MOST_RANKS).contains(&world_size) {
        return Err(DcpError::argument(format!(
            "a checkpoint is written by 1 to {MOST_RANKS} ranks, not by {world_size}"
        )));
    }
    let manifest = checkpoint.manifest();
    let mut plan = Plan::new(world_size);
    let mut whole = Vec::new();
    for (name, info) in checkpoint.tensors() {
        let was_split = manifest.world_size == 1 || manifest.tensors[name].chunks.len() > 1;
        if was_split && !info.shape.is_empty() {
            plan.add_split(name, info);
        } else {
            whole.push((name, info));
        }
    }
    // The largest first, each to the rank that has least.
    whole.sort_by_key(|(_, info)| std::cmp::Reverse(info.bytes()));
    for (name, info) in whole {
        plan.add_whole(name, info);
    }
    let rewrite = Rewrite {
        source: checkpoint,
        states_of: Some(checkpoint),
        options,
        progress: &progress,
    };
    rewrite.write(location.into(), plan)
}

/// Which rank writes which parts.
struct Plan {
    ranks: Vec<RankPlan>,
}

#[derive(Clone, Default)]
struct RankPlan {
    bytes: u64,
    chunks: Vec<(String, Region)>,
}

impl Plan {
    fn new(world_size: usize) -> Self {
        Self {
            ranks: vec![RankPlan::default(); world_size],
        }
    }

    fn add(&mut self, rank: usize, name: &str, info: &TensorInfo, region: Region) {
        if !region.is_empty() {
            let volume = region.volume().unwrap_or(u64::MAX);
            let rank = &mut self.ranks[rank];
            rank.bytes += volume * info.dtype.size() as u64;
            rank.chunks.push((name.to_string(), region));
        }
    }

    /// Along the first dimension, as `torch.chunk` does.
    fn add_split(&mut self, name: &str, info: &TensorInfo) {
        let rows = info.shape[0];
        let chunk = rows.div_ceil(self.ranks.len() as u64);
        for rank in 0..self.ranks.len() {
            let mut region = Region::whole(&info.shape);
            region.offsets[0] = (rank as u64 * chunk).min(rows);
            region.sizes[0] = chunk.min(rows - region.offsets[0]);
            self.add(rank, name, info, region);
        }
    }

    /// To the rank that has least.
    fn add_whole(&mut self, name: &str, info: &TensorInfo) {
        let least = (0..self.ranks.len()).min_by_key(|&rank| (self.ranks[rank].bytes, rank));
        let rank = least.expect("there is a rank");
        self.add(rank, name, info, Region::whole(&info.shape));
    }
}

struct Rewrite<'a> {
    source: &'a dyn TensorSource,
    states_of: Option<&'a Checkpoint>,
    options: &'a SaveOptions,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl Rewrite<'_> {
    fn write(&self, location: Location, plan: Plan) -> Result<Manifest> {
        let job = self.job(location, plan.ranks.len());
        job.check_free()?;
        let mut parts = Vec::new();
        let written = self.write_parts(&job, plan, &mut parts);
        let names: Vec<String> = parts.iter().flat_map(Part::file_names).collect();
        let written = written.and_then(|()| self.commit(&job, parts));
        if let Err(error) = &written {
            job.undo(error, &names);
        }
        written
    }

    fn commit(&self, job: &Job, parts: Vec<Part>) -> Result<Manifest> {
        let mut manifest = job.merge(parts)?;
        if let Some(origin) = self.states_of {
            manifest.created = origin.manifest().created;
        }
        job.put_in_place(manifest)
    }

    fn job(&self, location: Location, world_size: usize) -> Job {
        let random = || u128::from(RandomState::new().build_hasher().finish());
        Job {
            location,
            id: CheckpointId(random() << 64 | random()),
            step: self.states_of.map_or(0, Checkpoint::step),
            rank: 0,
            world_size,
            options: self.options.clone(),
            checked_layout: Arc::default(),
        }
    }

    /// Writes what each rank would; the parts that could be written stand in `parts`.
    fn write_parts(&self, job: &Job, plan: Plan, parts: &mut Vec<Part>) -> Result<()> {
        let origin = self.states_of.map(Checkpoint::manifest);
        let metrics = origin
            .map(|origin| origin.metrics.clone())
            .unwrap_or_default();
        let world_size = plan.ranks.len();
        for (rank, plan) in plan.ranks.into_iter().enumerate() {
            let job = Job {
                rank,
                ..job.clone()
            };
            let mut part = Part::new(&job, metrics.clone());
            // Each knows of all tensors, as ranks do.
            for (name, info) in self.source.tensors() {
                part.add_tensor(name, dtype_name(info.dtype)?, info.shape.clone());
            }
            let chunks = plan.chunks.into_iter();
            let mut writes = chunks
                .map(|(name, region)| self.chunk(name, region))
                .collect::<Result<Vec<_>>>()?;
            let states = self.states_for(rank, world_size).into_iter();
            writes.extend(states.map(|(name, state)| self.state(name, &state)));
            job.write_part(writes, &mut part)?;
            parts.push(part);
        }
        Ok(())
    }

    /// The states that a rank is to write: its own, and those of ranks that are no more, in turn.
    fn states_for(&self, rank: usize, world_size: usize) -> Vec<(String, StateEntry)> {
        let states = self.states_of.into_iter();
        let states = states.flat_map(|checkpoint| &checkpoint.manifest().states);
        let entries = states.flat_map(|(name, entries)| {
            let entries = entries.iter();
            entries.map(|entry| (name.clone(), entry.clone()))
        });
        let is_its =
            |entry: &StateEntry| entry.rank.unwrap_or(0) % world_size as u64 == rank as u64;
        entries.filter(|(_, entry)| is_its(entry)).collect()
    }

    fn chunk(&self, name: String, region: Region) -> Result<Write<'_>> {
        let dtype = self.source.tensors()[&name].dtype;
        let (source, progress) = (self.source, self.progress);
        let len = region
            .volume()
            .unwrap_or(u64::MAX)
            .saturating_mul(dtype.size() as u64);
        let (tensor, part) = (name.clone(), region.clone());
        Write::chunk(&name, dtype, region, move || {
            let bytes = source.read(&tensor, &part)?;
            if bytes.len() as u64 != len {
                let detail = format!("tensor \"{tensor}\": {part:?} has {} bytes", bytes.len());
                return Err(DcpError::foreign(source.location(), detail));
            }
            progress(len);
            Ok(Box::new(bytes) as HostBytes)
        })
    }

    fn state(&self, name: String, state: &StateEntry) -> Write<'_> {
        let (len, rank) = (state.extent.len, state.rank);
        let (states_of, progress) = (self.states_of, self.progress);
        // One file may have those of several ranks.
        let in_file = match rank {
            Some(rank) => format!("{name}:{rank}"),
            None => name.clone(),
        };
        let state = name.clone();
        Write::state(&name, rank, &in_file, len, move || {
            let checkpoint = states_of.expect("the state is from there");
            let bytes = checkpoint.bytes_of_state(&state, rank)?;
            progress(len);
            Ok(Box::new(bytes) as HostBytes)
        })
    }
}
