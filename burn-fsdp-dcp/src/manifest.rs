//! What a checkpoint consists of: the table that makes files a checkpoint.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::dtype_of;
use crate::region::{Region, volume};
use crate::tiling::check_tiling;
use crate::{DcpError, Result};

/// The bytes that share one checksum.
pub(crate) const BLOCK: u64 = 64 * 1024;

/// Tells a checkpoint from every other. Shard files carry it as well.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointId(pub(crate) u128);

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// All that a checkpoint holds, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The checkpoint's own id.
    pub id: CheckpointId,
    /// The training step after which it was taken.
    pub step: u64,
    /// When, in seconds since 1970.
    pub created: u64,
    /// The number of ranks that wrote it.
    pub world_size: u64,
    /// Figures to choose checkpoints by.
    pub metrics: BTreeMap<String, f64>,
    /// The shard files.
    pub files: Vec<FileEntry>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Encoded values by name: one for all ranks, or one for each.
    pub states: BTreeMap<String, Vec<StateEntry>>,
}

/// A shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FileEntry {
    /// Its name within the checkpoint's directory.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
    /// The rank that wrote it.
    pub rank: u64,
    /// The CRC-32 of its first bytes, up to the first tensor.
    pub header_checksum: u32,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorEntry {
    /// Its element type, by the name that safetensors gives it.
    pub dtype: String,
    /// Its shape, whole.
    pub shape: Vec<u64>,
    /// Its parts, which tile it. None is empty.
    pub chunks: Vec<ChunkEntry>,
}

/// A part of a tensor, whole in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChunkEntry {
    /// Which part.
    pub region: Region,
    /// Where its elements are, row by row.
    pub extent: Extent,
}

/// A value that one rank has saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StateEntry {
    /// Whose it is; none if it is everyone's.
    pub rank: Option<u64>,
    /// Where its encoding is.
    pub extent: Extent,
}

/// Bytes within a shard file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Extent {
    /// The index of the file.
    pub file: u64,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
    /// The CRC-32 (of ISO 3309, as in zip) of each block of 64 KiB, the last of what is left.
    pub checksums: Vec<u32>,
}

impl Manifest {
    /// Checks that it makes sense in itself, so that readers need not.
    pub(crate) fn validate(&self, path: &str) -> Result<()> {
        let corrupt = |detail: String| DcpError::corrupt(path, detail);
        let mut names = HashSet::new();
        for file in &self.files {
            if !is_plain_name(&file.name) {
                return Err(corrupt(format!(
                    "\"{}\" is no name of a shard file",
                    file.name
                )));
            }
            if !names.insert(&file.name) {
                return Err(corrupt(format!("it lists {} twice", file.name)));
            }
        }
        for (name, tensor) in &self.tensors {
            self.validate_tensor(name, tensor, path)?;
        }
        for (name, entries) in &self.states {
            let mut ranks = HashSet::new();
            for entry in entries {
                // A rank may be beyond the world: resharding keeps what others have saved.
                if !ranks.insert(entry.rank) {
                    return Err(corrupt(format!("state \"{name}\" has a rank twice")));
                }
                self.validate_extent(name, &entry.extent, path)?;
            }
        }
        Ok(())
    }

    fn validate_tensor(&self, name: &str, tensor: &TensorEntry, path: &str) -> Result<()> {
        let corrupt =
            |detail: String| DcpError::corrupt(path, format!("tensor \"{name}\": {detail}"));
        let dtype = dtype_of(&tensor.dtype)
            .ok_or_else(|| corrupt(format!("there is no element type {:?}", tensor.dtype)))?;
        let bytes = |shape: &[u64]| volume(shape)?.checked_mul(dtype.size() as u64);
        if bytes(&tensor.shape).is_none() {
            return Err(corrupt(format!(
                "the shape {:?} is too large",
                tensor.shape
            )));
        }
        check_tiling(
            name,
            &tensor.shape,
            tensor.chunks.iter().map(|chunk| &chunk.region),
        )?;
        for chunk in &tensor.chunks {
            if bytes(&chunk.region.sizes) != Some(chunk.extent.len) {
                let offsets = &chunk.region.offsets;
                return Err(corrupt(format!(
                    "the chunk at {offsets:?} has {} bytes, which its shape {:?} contradicts",
                    chunk.extent.len, chunk.region.sizes
                )));
            }
            self.validate_extent(name, &chunk.extent, path)?;
        }
        Ok(())
    }

    fn validate_extent(&self, name: &str, extent: &Extent, path: &str) -> Result<()> {
        let end = extent.offset.checked_add(extent.len);
        let file = usize::try_from(extent.file)
            .ok()
            .and_then(|file| self.files.get(file));
        let is_inside = file.is_some_and(|file| end.is_some_and(|end| end <= file.len));
        if !is_inside || extent.checksums.len() as u64 != extent.len.div_ceil(BLOCK) {
            let detail = format!("\"{name}\" lies outside its file, or lacks checksums");
            return Err(DcpError::corrupt(path, detail));
        }
        Ok(())
    }

    /// Bytes of tensors and states, without headers.
    pub fn payload_bytes(&self) -> u64 {
        let chunks = self
            .tensors
            .values()
            .flat_map(|t| &t.chunks)
            .map(|c| &c.extent);
        let states = self.states.values().flatten().map(|s| &s.extent);
        chunks.chain(states).map(|extent| extent.len).sum()
    }
}

/// Whether a name stays within its directory.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0', ':'])
}
