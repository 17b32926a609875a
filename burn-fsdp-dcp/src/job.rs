//! One save: every rank writes its files, and rank 0 makes a checkpoint of them.
//!
//! The manifest is the commit. Shard files have the checkpoint's id in their names, so they never touch
//! those of another checkpoint in the same directory; until the manifest is put in place, in one step,
//! there is the old checkpoint or none, and from then on the new.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use burn::tensor::DType;
use burn_fsdp::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::checkpoint::MANIFEST;
use crate::dtype::dtype_name;
use crate::host::HostBytes;
use crate::load::on_rank;
use crate::manifest::{
    CheckpointId, ChunkEntry, Extent, FileEntry, Manifest, StateEntry, TensorEntry,
};
use crate::region::Region;
use crate::shard_file::{self, Entry};
use crate::snapshot::Snapshot;
use crate::storage::Location;
use crate::{DcpError, Result, codec};

/// How to save.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    pub(crate) overwrite: bool,
    pub(crate) max_file_bytes: u64,
    pub(crate) timeout: Duration,
    pub(crate) when_busy: WhenBusy,
}

/// What an asynchronous save does while another is under way, on any rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenBusy {
    /// Waits until it has ended.
    Wait,
    /// Fails with [`DcpError::SaveUnderWay`].
    Fail,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            overwrite: false,
            max_file_bytes: 8 << 30,
            timeout: Duration::from_secs(600),
            when_busy: WhenBusy::Wait,
        }
    }
}

impl SaveOptions {
    /// The defaults: no overwriting, files of 8 GiB, ten minutes for the slowest rank.
    pub fn new() -> Self {
        Self::default()
    }

    /// Consents to replace a checkpoint in the same directory. It stays until the new one is whole; who
    /// has it open then must open it anew.
    pub fn with_overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Begins a further file when one has so many bytes. A tensor is never split between files.
    pub fn with_max_file_bytes(mut self, bytes: u64) -> Self {
        self.max_file_bytes = bytes;
        self
    }

    /// How long rank 0 waits in the background for the other ranks' parts. Those who finish the save
    /// wait no longer than the group's own timeout.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// What an asynchronous save does while another is under way.
    pub fn with_when_busy(mut self, when_busy: WhenBusy) -> Self {
        self.when_busy = when_busy;
        self
    }
}

/// One save on one rank.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) location: Location,
    pub(crate) id: CheckpointId,
    pub(crate) step: u64,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) options: SaveOptions,
    /// The layout that the saver has found right last.
    pub(crate) checked_layout: Arc<AtomicU64>,
}

/// What one rank has written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    id: CheckpointId,
    step: u64,
    metrics: BTreeMap<String, f64>,
    files: Vec<FileEntry>,
    /// All tensors that the rank knows of, with the chunks that it has written.
    tensors: BTreeMap<String, TensorEntry>,
    states: BTreeMap<String, Vec<StateEntry>>,
}

impl Part {
    pub(crate) fn new(job: &Job, metrics: BTreeMap<String, f64>) -> Self {
        Self {
            id: job.id,
            step: job.step,
            metrics,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            states: BTreeMap::new(),
        }
    }

    /// Adds a tensor without chunks.
    pub(crate) fn add_tensor(&mut self, name: &str, dtype: &str, shape: Vec<u64>) {
        let tensor = TensorEntry {
            dtype: dtype.to_string(),
            shape,
            chunks: Vec::new(),
        };
        self.tensors.insert(name.to_string(), tensor);
    }

    pub(crate) fn file_names(&self) -> impl Iterator<Item = String> {
        self.files.iter().map(|file| file.name.clone())
    }
}

/// Something to be written to a shard file, and what it is in the checkpoint.
pub(crate) struct Write<'a> {
    target: Target,
    entry: Entry<'a>,
}

enum Target {
    Chunk(String, Region),
    /// Of a rank, or everyone's.
    State(String, Option<u64>),
}

impl<'a> Write<'a> {
    /// A part of a tensor, which `bytes` brings when it is its turn.
    pub(crate) fn chunk(
        name: &str,
        dtype: DType,
        region: Region,
        bytes: impl FnOnce() -> Result<HostBytes> + Send + 'a,
    ) -> Result<Self> {
        let elements = region.volume().unwrap_or(u64::MAX);
        let entry = Entry {
            name: name.to_string(),
            dtype: dtype_name(dtype)?,
            shape: region.sizes.clone(),
            len: elements.saturating_mul(dtype.size() as u64),
            bytes: Box::new(bytes),
        };
        let target = Target::Chunk(name.to_string(), region);
        Ok(Self { target, entry })
    }

    /// An encoded value, under a name of its own within the file.
    pub(crate) fn state(
        name: &str,
        rank: Option<u64>,
        name_in_file: &str,
        len: u64,
        bytes: impl FnOnce() -> Result<HostBytes> + Send + 'a,
    ) -> Self {
        let entry = Entry {
            name: format!("state:{name_in_file}"),
            dtype: "U8",
            shape: vec![len],
            len,
            bytes: Box::new(bytes),
        };
        let target = Target::State(name.to_string(), rank);
        Self { target, entry }
    }
}

impl Job {
    /// Checks that all ranks make the same save. All ranks must call this.
    pub(crate) fn agree(&self, group: &ProcessGroup) -> Result<()> {
        let about = (self.location.to_string(), self.step, self.id);
        let all = group.all_gather_bytes(codec::encode_table(&about))?;
        if all.iter().any(|other| *other != all[0]) {
            return Err(DcpError::argument(
                "ranks save different steps, to different places, or not equally often",
            ));
        }
        Ok(())
    }

    /// On rank 0: whether this save may go into its directory.
    pub(crate) fn check_free(&self) -> Result<()> {
        if self.rank == 0 && !self.options.overwrite && self.location.read(MANIFEST)?.is_some() {
            let path = self.location.to_string();
            return Err(DcpError::AlreadyExists { path });
        }
        Ok(())
    }

    /// Writes this rank's shard files, from a snapshot of what has been assigned to it; leaves nothing
    /// behind if it can't.
    pub(crate) fn write(&self, mut snapshot: Snapshot) -> Result<Part> {
        snapshot.check()?;
        snapshot.take_optimizer_apart(self.rank, self.world_size)?;
        let mut part = Part::new(self, snapshot.metrics);
        let mut writes = Vec::new();
        for (name, piece) in snapshot.pieces {
            part.add_tensor(&name, dtype_name(piece.dtype)?, piece.shape);
            if !piece.region.is_empty() {
                let data = piece.data;
                writes.push(Write::chunk(&name, piece.dtype, piece.region, || {
                    Ok(data())
                })?);
            }
        }
        for (name, state) in snapshot.states {
            let rank = state.is_of_rank.then_some(self.rank as u64);
            let (len, bytes) = (state.bytes.len() as u64, state.bytes);
            writes.push(Write::state(&name, rank, &name, len, || {
                Ok(Box::new(bytes))
            }));
        }
        self.write_part(writes, &mut part)?;
        Ok(part)
    }

    /// Writes a rank's files, and notes in its part what is where.
    pub(crate) fn write_part(&self, writes: Vec<Write<'_>>, part: &mut Part) -> Result<()> {
        let (targets, entries): (Vec<_>, Vec<_>) = writes
            .into_iter()
            .map(|write| (write.target, write.entry))
            .unzip();
        let extents = self.write_files(entries, &mut part.files)?;
        for (target, extent) in targets.into_iter().zip(extents) {
            match target {
                Target::Chunk(name, region) => {
                    let tensor = part.tensors.get_mut(&name).expect("it has been added");
                    tensor.chunks.push(ChunkEntry { region, extent });
                }
                Target::State(name, rank) => {
                    let entries = part.states.entry(name).or_default();
                    entries.push(StateEntry { rank, extent });
                }
            }
        }
        Ok(())
    }

    /// Writes entries into as many files as they need.
    fn write_files(
        &self,
        entries: Vec<Entry<'_>>,
        files: &mut Vec<FileEntry>,
    ) -> Result<Vec<Extent>> {
        let mut extents = Vec::with_capacity(entries.len());
        let mut rest = entries.into_iter().peekable();
        while rest.peek().is_some() {
            let mut bytes = 0;
            let mut of_file = Vec::new();
            while let Some(entry) = rest.next_if(|entry| {
                of_file.is_empty() || bytes + entry.len <= self.options.max_file_bytes
            }) {
                bytes += entry.len;
                of_file.push(entry);
            }
            let index = files.len();
            let name = self.file_name(index);
            let (rank, index) = (self.rank as u64, index as u64);
            match shard_file::write(&self.location, &name, rank, index, self.id, of_file) {
                Ok((file, written)) => {
                    files.push(file);
                    extents.extend(written);
                }
                Err(error) => {
                    let written = files.drain(..).map(|file| file.name);
                    self.remove(&written.chain([name]).collect::<Vec<_>>());
                    return Err(error);
                }
            }
        }
        Ok(extents)
    }

    fn file_name(&self, index: usize) -> String {
        format!("shard-{}-{:05}-{index:03}.safetensors", self.id, self.rank)
    }

    /// The name of the file by which a rank hands its part to rank 0 in the background.
    pub(crate) fn part_name(&self, rank: usize) -> String {
        format!("part-{}-{rank:05}", self.id)
    }

    /// Removes what a failed save has written, unless it is a checkpoint all the same: the last step of
    /// putting the manifest in place may have failed after it was there.
    ///
    /// Not for a failure of the group: it tells nothing of what rank 0 does, which may be about to
    /// commit. What is left then is removed by the next save.
    pub(crate) fn undo(&self, error: &DcpError, names: &[String]) {
        if matches!(error, DcpError::Group(_)) {
            return;
        }
        let is_this = |bytes: Vec<u8>| {
            let manifest = codec::decode_table::<Manifest>(&bytes, MANIFEST);
            manifest.is_ok_and(|manifest| manifest.id == self.id)
        };
        match self
            .location
            .read(MANIFEST)
            .map(|bytes| bytes.is_some_and(is_this))
        {
            Ok(false) => self.remove(names),
            _ => log::warn!(
                "files of a save that failed late are left in {}",
                self.location
            ),
        }
    }

    /// Removes files of this save, as far as that can be done.
    fn remove(&self, names: &[String]) {
        for name in names {
            if let Err(error) = self.location.remove(name) {
                log::warn!("a file of a failed save is left: {error}");
            }
        }
    }

    /// On rank 0: makes a checkpoint of all ranks' parts.
    pub(crate) fn commit_encoded(&self, parts: Vec<Vec<u8>>) -> Result<Manifest> {
        let decode = |bytes: &Vec<u8>| codec::decode_table(bytes, "a rank's part");
        self.commit(parts.iter().map(decode).collect::<Result<_>>()?)
    }

    pub(crate) fn commit(&self, parts: Vec<Part>) -> Result<Manifest> {
        self.put_in_place(self.merge(parts)?)
    }

    /// Makes a checkpoint of shard files that are there.
    pub(crate) fn put_in_place(&self, manifest: Manifest) -> Result<Manifest> {
        let path = self.location.display_file(MANIFEST);
        let layout = manifest.layout_hash();
        // The same layout as last time tiles its tensors as it did then.
        if self.checked_layout.load(Ordering::Relaxed) == layout {
            manifest.validate_extents(&path)?;
        } else {
            manifest.validate(&path)?;
            self.checked_layout.store(layout, Ordering::Relaxed);
        }
        self.check_files(&manifest)?;
        self.location
            .replace(MANIFEST, &codec::encode_table(&manifest))?;
        self.remove_all_but(&manifest);
        Ok(manifest)
    }

    pub(crate) fn merge(&self, parts: Vec<Part>) -> Result<Manifest> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let mut manifest = Manifest {
            id: self.id,
            step: self.step,
            created: now.as_secs(),
            world_size: self.world_size as u64,
            metrics: BTreeMap::new(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            states: BTreeMap::new(),
        };
        for (rank, part) in parts.into_iter().enumerate() {
            if part.id != self.id {
                let detail = "it has made another number of saves than rank 0";
                return Err(on_rank(rank, DcpError::argument(detail)));
            }
            if part.step != self.step {
                let detail = format!("it saves step {}, and rank 0 step {}", part.step, self.step);
                return Err(on_rank(rank, DcpError::argument(detail)));
            }
            if rank == 0 {
                manifest.metrics = part.metrics;
            }
            let files_before = manifest.files.len() as u64;
            let moved = |mut extent: Extent| {
                extent.file += files_before;
                extent
            };
            manifest.files.extend(part.files);
            for (name, tensor) in part.tensors {
                let merged = manifest
                    .tensors
                    .entry(name.clone())
                    .or_insert_with(|| TensorEntry {
                        chunks: Vec::new(),
                        ..tensor.clone()
                    });
                if (&merged.dtype, &merged.shape) != (&tensor.dtype, &tensor.shape) {
                    let detail = format!(
                        "it has tensor \"{name}\" as {} {:?}, and lower ranks as {} {:?}",
                        tensor.dtype, tensor.shape, merged.dtype, merged.shape
                    );
                    return Err(on_rank(rank, DcpError::argument(detail)));
                }
                let chunks = tensor.chunks.into_iter();
                merged.chunks.extend(chunks.map(|chunk| ChunkEntry {
                    extent: moved(chunk.extent),
                    ..chunk
                }));
            }
            for (name, entries) in part.states {
                let entries = entries.into_iter().map(|entry| StateEntry {
                    extent: moved(entry.extent),
                    ..entry
                });
                manifest.states.entry(name).or_default().extend(entries);
            }
        }
        Ok(manifest)
    }

    /// Removes what other saves have left in the directory, be they replaced or failed; but not what a
    /// later save of this run may be writing already.
    fn remove_all_but(&self, manifest: &Manifest) {
        let is_used = |name: &str| manifest.files.iter().any(|file| file.name == name);
        let is_stale = |name: &String| {
            let id = id_in_name(name);
            id.is_some_and(|id| !id.is_later_in_run(self.id)) && !is_used(name)
        };
        let names = self.location.list().unwrap_or_default();
        self.remove(&names.into_iter().filter(is_stale).collect::<Vec<_>>());
    }

    /// Checks that the files of a manifest are there, whole, before it names them.
    fn check_files(&self, manifest: &Manifest) -> Result<()> {
        for entry in &manifest.files {
            let path = self.location.path(&entry.name);
            let display = || self.location.display_file(&entry.name);
            match self.location.storage().open(&path)? {
                None => return Err(DcpError::MissingFile { file: display() }),
                Some(file) if file.len() != entry.len => {
                    return Err(DcpError::WrongLength {
                        file: display(),
                        expected: entry.len,
                        found: file.len(),
                    });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// On rank 0: waits for the parts of all ranks, as files; until `is_hopeless`.
    pub(crate) fn await_parts(
        &self,
        group: &ProcessGroup,
        is_hopeless: &AtomicBool,
    ) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut parts: Vec<Option<Vec<u8>>> = vec![None; self.world_size];
        let mut nap = Duration::from_millis(1);
        loop {
            for (rank, part) in parts.iter_mut().enumerate() {
                if part.is_none() {
                    *part = self.location.read(&self.part_name(rank))?;
                }
            }
            let missing = || {
                (0..parts.len())
                    .filter(|&r| parts[r].is_none())
                    .collect::<Vec<_>>()
            };
            if missing().is_empty() {
                return Ok(parts.into_iter().flatten().collect());
            }
            if let Some(failure) = group.failure() {
                return Err(failure.into());
            }
            let is_late = start.elapsed() >= self.options.timeout;
            if is_late || is_hopeless.load(Ordering::Acquire) {
                return Err(DcpError::SaveTimeout {
                    missing: missing(),
                    seconds: self.options.timeout.as_secs(),
                });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(100));
        }
    }
}

/// The checkpoint that a file is of, by its name: that of a shard file or of a part.
pub(crate) fn id_in_name(name: &str) -> Option<CheckpointId> {
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let rest = match name.strip_prefix("shard-") {
        Some(rest) => rest.strip_suffix(".safetensors")?,
        None => name.strip_prefix("part-")?,
    };
    let (id, numbers) = rest.split_once('-')?;
    let is_number = |text: &str| text.len() >= 3 && text.bytes().all(|b| b.is_ascii_digit());
    let is_id = id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !is_id || !numbers.split('-').all(is_number) {
        return None;
    }
    u128::from_str_radix(id, 16).ok().map(CheckpointId)
}
