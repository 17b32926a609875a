//! What a checkpoint consists of: the table that makes files a checkpoint.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

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

impl CheckpointId {
    /// The id of a run's n-th save; the seed is the run's.
    pub(crate) fn of_run(seed: u64, save: u64) -> Self {
        Self((u128::from(seed) << 64) | u128::from(save))
    }

    /// Whether it is of the same run as another, and of a later save.
    pub(crate) fn is_later_in_run(self, other: Self) -> bool {
        self.0 >> 64 == other.0 >> 64 && self.0 > other.0
    }
}

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
        for (name, tensor) in &self.tensors {
            check_tiling(
                name,
                &tensor.shape,
                tensor.chunks.iter().map(|chunk| &chunk.region),
            )?;
        }
        self.validate_extents(path)
    }

    /// Tells the shapes of all tensors and their chunks from others: where they are equal, they tile
    /// equally well.
    pub(crate) fn layout_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (name, tensor) in &self.tensors {
            (name, &tensor.dtype, &tensor.shape, tensor.chunks.len()).hash(&mut hasher);
            tensor
                .chunks
                .iter()
                .for_each(|chunk| chunk.region.hash(&mut hasher));
        }
        hasher.finish()
    }

    /// Checks all but that chunks tile their tensors.
    pub(crate) fn validate_extents(&self, path: &str) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode_table, encode_table};

    /// A manifest of one tensor in two chunks, and a state.
    fn good() -> Manifest {
        let extent = |offset, len| Extent {
            file: 0,
            offset,
            len,
            checksums: vec![0],
        };
        let chunk = |row| ChunkEntry {
            region: Region {
                offsets: vec![row, 0],
                sizes: vec![1, 3],
            },
            extent: extent(100 + row * 12, 12),
        };
        let tensor = TensorEntry {
            dtype: "F32".to_string(),
            shape: vec![2, 3],
            chunks: vec![chunk(0), chunk(1)],
        };
        let state = StateEntry {
            rank: Some(1),
            extent: extent(124, 8),
        };
        Manifest {
            id: CheckpointId(7),
            step: 3,
            created: 0,
            world_size: 2,
            metrics: BTreeMap::new(),
            files: vec![FileEntry {
                name: "shard".to_string(),
                len: 132,
                rank: 0,
                header_checksum: 0,
            }],
            tensors: BTreeMap::from([("w".to_string(), tensor)]),
            states: BTreeMap::from([("s".to_string(), vec![state])]),
        }
    }

    #[test]
    fn a_manifest_that_makes_sense_comes_back() {
        let manifest = good();
        manifest.validate("m").unwrap();
        assert_eq!(
            decode_table::<Manifest>(&encode_table(&manifest), "m").unwrap(),
            manifest
        );
    }

    #[test]
    fn every_contradiction_is_refused_with_what_it_is() {
        type Change = fn(&mut Manifest);
        let changes: [(&str, Change); 16] = [
            ("no name of a shard file", |m| {
                m.files[0].name = "../x".into()
            }),
            ("no name of a shard file", |m| {
                m.files[0].name = "/etc/passwd".into()
            }),
            ("no name of a shard file", |m| m.files[0].name = "..".into()),
            ("no name of a shard file", |m| {
                m.files[0].name = String::new()
            }),
            ("twice", |m| m.files.push(m.files[0].clone())),
            ("outside its file", |m| m.files[0].len = 131),
            ("outside its file", |m| m.files.clear()),
            ("outside its file", |m| chunk(m).extent.file = u64::MAX),
            ("outside its file", |m| {
                chunk(m).extent.offset = u64::MAX - 1
            }),
            ("lacks checksums", |m| chunk(m).extent.checksums.clear()),
            ("contradicts", |m| chunk(m).extent.len = 8),
            ("overlap", |m| chunk(m).region.offsets[0] = 1),
            ("not within", |m| chunk(m).region.sizes[1] = u64::MAX),
            ("no element type", |m| {
                m.tensors.get_mut("w").unwrap().dtype = "F31".into()
            }),
            ("too large", |m| {
                m.tensors.get_mut("w").unwrap().shape = vec![u64::MAX, 3]
            }),
            ("a rank twice", |m| {
                let states = m.states.get_mut("s").unwrap();
                states.push(states[0].clone());
            }),
        ];
        for (words, change) in changes {
            let mut manifest = good();
            change(&mut manifest);
            let decoded: Manifest = decode_table(&encode_table(&manifest), "m").unwrap();
            let error = decoded.validate("m").expect_err(words).to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    fn chunk(manifest: &mut Manifest) -> &mut ChunkEntry {
        &mut manifest.tensors.get_mut("w").unwrap().chunks[0]
    }

    #[test]
    fn lists_that_claim_to_be_huge_are_refused_before_they_are_made() {
        // The files' list, which comes after the id, the step, the time, the world size and the metrics.
        let body = |claim: u64| {
            let mut body = vec![7, 3, 0, 2, 0, 253];
            body.extend(claim.to_le_bytes());
            body
        };
        for claim in [1 << 20, 1 << 40, u64::MAX] {
            let body = body(claim);
            let mut bytes = crate::codec::MAGIC.to_vec();
            bytes.extend(crate::codec::VERSION.to_le_bytes());
            bytes.extend((body.len() as u64).to_le_bytes());
            bytes.extend(body);
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            let error = decode_table::<Manifest>(&bytes, "m").unwrap_err();
            assert!(matches!(error, DcpError::Corrupt { .. }), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_body_makes_a_reader_panic(body: Vec<u8>) {
            let mut bytes = crate::codec::MAGIC.to_vec();
            bytes.extend(crate::codec::VERSION.to_le_bytes());
            bytes.extend((body.len() as u64).to_le_bytes());
            bytes.extend(&body);
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            if let Ok(manifest) = decode_table::<Manifest>(&bytes, "m") {
                let _ = manifest.validate("m");
            }
        }
    }
}
