//! A checkpoint to be read.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_fsdp::{FsdpModule, ProcessGroup, dense_specs};
use ciborium::Value;
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use std::sync::Mutex;

use crate::dtype::dtype_of;
use crate::load::{LoadOptions, Matching, agree};
use crate::manifest::{BLOCK, Extent, Manifest};
use crate::optimizer::{self, SCALARS};
use crate::region::Region;
use crate::report::LoadReport;
use crate::snapshot::{MODEL, RUNNING, SCHEDULER};
use crate::source::{TensorInfo, TensorSource};
use crate::stateful::Stateful;
use crate::storage::{Location, ReadFile};
use crate::{DcpError, Result, codec, shard_file};

/// The name of the manifest.
pub(crate) const MANIFEST: &str = "manifest";
/// As much as is read at once of a chunk.
const MOST_AT_ONCE: u64 = 16 << 20;

/// A checkpoint to be read, at any number of ranks.
///
/// Everything that is read is checked against its checksums, unless that is turned off.
#[derive(Debug)]
pub struct Checkpoint {
    location: Location,
    manifest: Manifest,
    infos: BTreeMap<String, TensorInfo>,
    files: Mutex<HashMap<usize, Arc<dyn ReadFile>>>,
    verifies: bool,
    bytes_read: AtomicU64,
}

impl Checkpoint {
    /// Opens the checkpoint in a directory, by its manifest. Shard files are opened when something is
    /// read from them.
    ///
    /// # Errors
    ///
    /// [`DcpError::NotACheckpoint`], [`DcpError::UnsupportedVersion`], [`DcpError::Corrupt`] or
    /// [`DcpError::InvalidChunks`].
    pub fn open(location: impl Into<Location>) -> Result<Self> {
        let location = location.into();
        let bytes = read_manifest(&location)?;
        Self::with_manifest(location, &bytes)
    }

    /// The same for all ranks: rank 0 reads the manifest, and the others take its word. All ranks must
    /// call this.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), equal on all ranks; a failure of the group.
    pub fn open_on(group: &ProcessGroup, location: impl Into<Location>) -> Result<Self> {
        let location = location.into();
        let read = match group.rank() {
            0 => read_manifest(&location),
            _ => Ok(Vec::new()),
        };
        let bytes = group.broadcast_bytes(0, agree(group, read)?)?;
        agree(group, Self::with_manifest(location, &bytes))
    }

    fn with_manifest(location: Location, bytes: &[u8]) -> Result<Self> {
        let path = location.display_file(MANIFEST);
        let manifest: Manifest = codec::decode_table(bytes, &path)?;
        manifest.validate(&path)?;
        let info = |tensor: &crate::TensorEntry| TensorInfo {
            dtype: dtype_of(&tensor.dtype).expect("the manifest is valid"),
            shape: tensor.shape.clone(),
        };
        let infos = manifest
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), info(tensor)));
        Ok(Self {
            infos: infos.collect(),
            location,
            manifest,
            files: Mutex::default(),
            verifies: true,
            bytes_read: AtomicU64::new(0),
        })
    }

    /// Whether what is read is checked against its checksums.
    pub fn with_verification(mut self, verifies: bool) -> Self {
        self.verifies = verifies;
        self
    }

    /// What it holds, and where.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The training step after which it was taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The bytes read from shard files so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    // ---- models and optimizers

    /// Loads the model that was saved, each rank its shards: at whatever number of ranks, mesh,
    /// placement and units. Each rank gets its own running statistics back if as many ranks load as have
    /// saved, else all get rank 0's. All ranks must call this. On an error the model is gone;
    /// [`compare_model`](Self::compare_model) tells beforehand.
    ///
    /// # Errors
    ///
    /// Equal on all ranks: [`DcpError::Mismatch`], unless the options allow it; any fault of a file.
    pub fn load_model<M: Module>(
        &self,
        model: FsdpModule<M>,
        options: &LoadOptions,
    ) -> Result<(FsdpModule<M>, LoadReport)> {
        let group = model.mesh().group();
        let own = agree(group, self.running_of(group))?;
        load_sharded(self, MODEL, model, options, own)
    }

    /// A rank's own running statistics by the names of their tensors, if as many ranks saved as load.
    fn running_of(&self, group: &ProcessGroup) -> Result<BTreeMap<String, Vec<u8>>> {
        let same_size = self.manifest.world_size == group.world_size() as u64;
        if !same_size || !self.manifest.states.contains_key(RUNNING) {
            return Ok(BTreeMap::new());
        }
        let own: Option<BTreeMap<String, Value>> = self.rank_state(RUNNING, group.rank())?;
        let bytes = |(path, value): (String, Value)| {
            Some((format!("{MODEL}{path}"), value.into_bytes().ok()?))
        };
        Ok(own.into_iter().flatten().filter_map(bytes).collect())
    }

    /// Loads the model that was saved into one that is not sharded. Does not communicate.
    ///
    /// # Errors
    ///
    /// As [`load_model`](Self::load_model).
    pub fn load_dense_model<M: Module>(
        &self,
        model: M,
        options: &LoadOptions,
    ) -> Result<(M, LoadReport)> {
        load_dense_model_from(self, MODEL, model, options)
    }

    /// What loading would find, without loading. Does not communicate.
    ///
    /// # Errors
    ///
    /// If renaming gives two tensors one name.
    pub fn compare_model<M: Module>(
        &self,
        model: &FsdpModule<M>,
        options: &LoadOptions,
    ) -> Result<LoadReport> {
        Ok(Matching::new(&model.shard_specs(), self, MODEL, options)?.report)
    }

    /// Loads the state of an optimizer for this model; the model's parameters get theirs by path. All
    /// ranks must call this.
    ///
    /// # Errors
    ///
    /// Equal on all ranks: [`DcpError::MissingState`] if no optimizer was saved,
    /// [`DcpError::BadState`] if one of another kind was, [`DcpError::Mismatch`]; any fault of a file.
    pub fn load_optimizer<M: Module>(
        &self,
        optim: ModuleOptimizer,
        model: &FsdpModule<M>,
        options: &LoadOptions,
    ) -> Result<(ModuleOptimizer, LoadReport)> {
        let loaded = self.bytes_of_state(SCALARS, None).and_then(|scalars| {
            optimizer::load(optim, &model.shard_specs(), self, &scalars, options)
        });
        agree(model.mesh().group(), loaded)
    }

    /// The same for a model that is not sharded. Does not communicate.
    ///
    /// # Errors
    ///
    /// As [`load_optimizer`](Self::load_optimizer).
    pub fn load_dense_optimizer<M: Module>(
        &self,
        optim: ModuleOptimizer,
        model: &M,
        options: &LoadOptions,
    ) -> Result<(ModuleOptimizer, LoadReport)> {
        let scalars = self.bytes_of_state(SCALARS, None)?;
        optimizer::load(optim, &dense_specs(model), self, &scalars, options)
    }

    /// Loads the state of a learning rate scheduler. Does not communicate.
    ///
    /// # Errors
    ///
    /// [`DcpError::MissingState`], [`DcpError::BadState`]; any fault of a file.
    pub fn load_scheduler(&self, scheduler: ModuleLrScheduler) -> Result<ModuleLrScheduler> {
        let bytes = self.bytes_of_state(SCHEDULER, None)?;
        let record = LrSchedulerRecord::from_bytes(burn::tensor::Bytes::from_bytes_vec(bytes));
        let record = record.map_err(|error| DcpError::BadState {
            name: SCHEDULER.to_string(),
            detail: error.to_string(),
        })?;
        Ok(scheduler.load_record(record))
    }

    // ---- values

    /// A value that was saved for all ranks. Does not communicate.
    ///
    /// # Errors
    ///
    /// [`DcpError::MissingState`], [`DcpError::BadState`] if it is of another type; any fault of a
    /// file.
    pub fn state<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        codec::decode_value(name, &self.bytes_of_state(name, None)?)
    }

    /// A value that was saved by the rank of this number, if there was one. Does not communicate.
    ///
    /// # Errors
    ///
    /// As [`state`](Self::state).
    pub fn rank_state<T: DeserializeOwned>(&self, name: &str, rank: usize) -> Result<Option<T>> {
        let entries = self.entries_of_state(name)?;
        if !entries.iter().any(|entry| entry.rank == Some(rank as u64)) {
            return Ok(None);
        }
        let bytes = self.bytes_of_state(name, Some(rank as u64))?;
        codec::decode_value(name, &bytes).map(Some)
    }

    /// Makes an object go on from its saved state. Does not communicate.
    ///
    /// # Errors
    ///
    /// As [`state`](Self::state).
    pub fn load_stateful(&self, name: &str, object: &mut impl Stateful) -> Result<()> {
        object.load_state(self.state(name)?)
    }

    fn entries_of_state(&self, name: &str) -> Result<&[crate::StateEntry]> {
        let entries = self.manifest.states.get(name);
        entries
            .map(Vec::as_slice)
            .ok_or_else(|| DcpError::MissingState {
                name: name.to_string(),
                known: self.manifest.states.keys().cloned().collect(),
            })
    }

    pub(crate) fn bytes_of_state(&self, name: &str, rank: Option<u64>) -> Result<Vec<u8>> {
        let entry = self
            .entries_of_state(name)?
            .iter()
            .find(|entry| entry.rank == rank);
        let entry = entry.ok_or_else(|| DcpError::BadState {
            name: name.to_string(),
            detail: match rank {
                Some(rank) => format!("rank {rank} has saved none"),
                None => "it was saved rank by rank".to_string(),
            },
        })?;
        // Opened first, as that shows whether there are as many bytes.
        self.file(entry.extent.file as usize)?;
        let mut bytes = vec![0; entry.extent.len as usize];
        self.read_blocks(&entry.extent, name, &[], 0, &mut bytes)?;
        Ok(bytes)
    }

    // ---- bytes

    /// Reads every byte of every file and checks it. `progress` is told of bytes as they are done.
    ///
    /// # Errors
    ///
    /// The first fault found, naming file, tensor and chunk.
    pub fn verify(&self, progress: impl Fn(u64) + Sync) -> Result<()> {
        self.verify_share((0, 1), progress)
    }

    /// The same for one rank's share of the bytes: its number, and of how many.
    pub(crate) fn verify_share(
        &self,
        (share, shares): (usize, usize),
        progress: impl Fn(u64) + Sync,
    ) -> Result<()> {
        for file in 0..self.manifest.files.len() {
            self.file(file)?;
        }
        let tensors = self.manifest.tensors.iter().flat_map(|(name, tensor)| {
            let chunks = tensor.chunks.iter();
            chunks.map(move |chunk| (name, &chunk.region.offsets[..], &chunk.extent))
        });
        let states = self.manifest.states.iter();
        let states = states
            .flat_map(|(name, entries)| entries.iter().map(move |e| (name, &[][..], &e.extent)));
        let pieces: Vec<(&String, &[u64], &Extent, u64)> = { tensors }
            .chain(states)
            .flat_map(|(name, offsets, extent)| {
                let starts = (0..extent.len).step_by(MOST_AT_ONCE as usize);
                starts.map(move |start| (name, offsets, extent, start))
            })
            .skip(share)
            .step_by(shares)
            .collect();
        pieces
            .par_iter()
            .try_for_each(|(name, offsets, extent, start)| {
                let len = MOST_AT_ONCE.min(extent.len - start);
                let mut bytes = vec![0; len as usize];
                self.read_file(extent, *start, &mut bytes)?;
                self.check_blocks(extent, name, offsets, *start, &bytes)?;
                progress(len);
                Ok(())
            })
    }

    fn file(&self, index: usize) -> Result<Arc<dyn ReadFile>> {
        let mut files = self.files.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(file) = files.get(&index) {
            return Ok(file.clone());
        }
        let entry = &self.manifest.files[index];
        let file = shard_file::open(&self.location, entry, self.manifest.id)?;
        files.insert(index, file.clone());
        Ok(file)
    }

    /// Reads whole blocks of an extent, from a multiple of the block size on, and checks them.
    fn read_blocks(
        &self,
        extent: &Extent,
        tensor: &str,
        offsets: &[u64],
        start: u64,
        bytes: &mut [u8],
    ) -> Result<()> {
        self.read_file(extent, start, bytes)?;
        if self.verifies {
            self.check_blocks(extent, tensor, offsets, start, bytes)?;
        }
        Ok(())
    }

    fn read_file(&self, extent: &Extent, start: u64, bytes: &mut [u8]) -> Result<()> {
        let file = self.file(extent.file as usize)?;
        file.read_at(bytes, extent.offset + start)?;
        self.bytes_read
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn check_blocks(
        &self,
        extent: &Extent,
        tensor: &str,
        offsets: &[u64],
        start: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let first = start / BLOCK;
        for (i, block) in bytes.chunks(BLOCK as usize).enumerate() {
            if crc32fast::hash(block) != extent.checksums[first as usize + i] {
                let file = &self.manifest.files[extent.file as usize].name;
                return Err(DcpError::Checksum {
                    file: self.location.display_file(file),
                    tensor: tensor.to_string(),
                    offsets: offsets.to_vec(),
                    block: first + i as u64,
                });
            }
        }
        Ok(())
    }

    /// Copies what `region` has in common with a chunk into `out`.
    fn read_chunk(
        &self,
        name: &str,
        chunk: &crate::ChunkEntry,
        region: &Region,
        size: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let most = MOST_AT_ONCE / size;
        let mut runs = chunk
            .region
            .runs(region)
            .flat_map(|run| run.pieces(most))
            .peekable();
        while let Some(first) = runs.next() {
            // The blocks of this run, and of those that begin in them or right behind.
            let start = first.from * size / BLOCK * BLOCK;
            let mut end = self.block_end(chunk, (first.from + first.len) * size);
            let mut together = vec![first];
            while let Some(next) =
                runs.next_if(|next| next.from * size <= end && end - start < MOST_AT_ONCE)
            {
                end = end.max(self.block_end(chunk, (next.from + next.len) * size));
                together.push(next);
            }
            if let [run] = together[..]
                && (start, end) == (run.from * size, (run.from + run.len) * size)
            {
                // Whole blocks, where they belong.
                let to = (run.to * size) as usize;
                let out = &mut out[to..to + (end - start) as usize];
                self.read_blocks(&chunk.extent, name, &chunk.region.offsets, start, out)?;
                continue;
            }
            let mut bytes = vec![0; (end - start) as usize];
            let offsets = &chunk.region.offsets;
            self.read_blocks(&chunk.extent, name, offsets, start, &mut bytes)?;
            for run in together {
                let from = (run.from * size - start) as usize;
                let (to, len) = ((run.to * size) as usize, (run.len * size) as usize);
                out[to..to + len].copy_from_slice(&bytes[from..from + len]);
            }
        }
        Ok(())
    }

    /// The end of the block in which a byte of a chunk lies.
    fn block_end(&self, chunk: &crate::ChunkEntry, byte: u64) -> u64 {
        byte.next_multiple_of(BLOCK).min(chunk.extent.len)
    }
}

impl TensorSource for Checkpoint {
    fn location(&self) -> String {
        self.location.to_string()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let info = self.infos.get(name).ok_or_else(|| {
            DcpError::argument(format!("{} has no tensor \"{name}\"", self.location))
        })?;
        if !region.fits(&info.shape) {
            return Err(DcpError::argument(format!(
                "tensor \"{name}\" of shape {:?} has no region {region:?}",
                info.shape
            )));
        }
        let size = info.dtype.size() as u64;
        // Opened first, as that shows whether there are as many bytes.
        let chunks = &self.manifest.tensors[name].chunks;
        let needed = |chunk: &&crate::ChunkEntry| chunk.region.intersection(region).is_some();
        for chunk in chunks.iter().filter(needed) {
            self.file(chunk.extent.file as usize)?;
        }
        let mut out = vec![0; (region.volume().unwrap_or(0) * size) as usize];
        for chunk in chunks {
            self.read_chunk(name, chunk, region, size, &mut out)?;
        }
        Ok(out)
    }
}

fn read_manifest(location: &Location) -> Result<Vec<u8>> {
    location
        .read(MANIFEST)?
        .ok_or_else(|| DcpError::NotACheckpoint {
            path: location.to_string(),
            reason: "it has no manifest".to_string(),
        })
}

/// Loads a sharded model from tensors of any origin whose names begin with `prefix`. All ranks must
/// call this.
///
/// # Errors
///
/// As [`Checkpoint::load_model`].
pub fn load_model_from<M: Module>(
    source: &dyn TensorSource,
    prefix: &str,
    model: FsdpModule<M>,
    options: &LoadOptions,
) -> Result<(FsdpModule<M>, LoadReport)> {
    load_sharded(source, prefix, model, options, BTreeMap::new())
}

fn load_sharded<M: Module>(
    source: &dyn TensorSource,
    prefix: &str,
    model: FsdpModule<M>,
    options: &LoadOptions,
    own: BTreeMap<String, Vec<u8>>,
) -> Result<(FsdpModule<M>, LoadReport)> {
    let group = model.mesh().group().clone();
    // What is pending must not come in later.
    model.sync_running_statistics();
    // Compared by all before any changes its model.
    let specs = model.shard_specs();
    let matching = Matching::new(&specs, source, prefix, options).and_then(|matching| {
        Matching::check(matching.report.clone(), options).map(|report| (matching, report))
    });
    let (matching, report) = agree(&group, matching)?;
    let model = agree(&group, matching.load(model, &specs, source, own))?;
    Ok((model, report))
}

/// The same for a model that is not sharded. Does not communicate.
///
/// # Errors
///
/// As [`Checkpoint::load_model`].
pub fn load_dense_model_from<M: Module>(
    source: &dyn TensorSource,
    prefix: &str,
    model: M,
    options: &LoadOptions,
) -> Result<(M, LoadReport)> {
    let specs = dense_specs(&model);
    let matching = Matching::new(&specs, source, prefix, options)?;
    let report = Matching::check(matching.report.clone(), options)?;
    let model = matching.load(model, &specs, source, BTreeMap::new())?;
    Ok((model, report))
}
