//! Reading safetensors files: one, many behind an index, or the shards of many ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType};
use serde::Deserialize;

use super::header::{Header, MAX_JSON, Unique, open_regular};
use crate::region::Run;
use crate::tiling::check_tiling;
use crate::{DcpError, Region, Result, TensorInfo, TensorSource};

/// The index in a directory of several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The key under which PyTorch keeps where the tensors of a rank belong.
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// Less than this between two runs is read along with them.
const MAX_GAP: u64 = 64 << 10;

/// Several runs are read together up to this length.
const MAX_SPAN: u64 = 8 << 20;

/// As many runs are read together.
const MAX_RUNS: usize = 1 << 16;

/// Tensors in safetensors files, as Hugging Face and PyTorch write them. Only headers are read when it
/// is opened.
///
/// The files are not trusted: each must be consistent in itself, and where ranks wrote a tensor in
/// parts, the parts must cover it exactly once. One thing these files can't show: the whole shape of
/// such a tensor isn't stored, so the loss of the last rank's file is seen only when the shape is
/// compared with that of the model.
#[derive(Debug)]
pub struct HfCheckpoint {
    path: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, TensorInfo>,
    chunks: BTreeMap<String, Vec<Chunk>>,
}

/// A part of a tensor in one file.
#[derive(Debug)]
struct Chunk {
    file: usize,
    /// Where its first byte is in the file.
    start: u64,
    dtype: DType,
    region: Region,
    /// Whether the file says where the part belongs; otherwise it is the whole.
    is_placed: bool,
}

impl HfCheckpoint {
    /// Opens one of:
    ///
    /// - a `.safetensors` file;
    /// - an index, `*.safetensors.index.json`, with the files it names beside it;
    /// - a directory with `model.safetensors.index.json`, of which the tensors in the index are taken;
    /// - a directory of `.safetensors` files without an index. A tensor is in one of them, or in parts
    ///   in several, as in the `shard-*-model-*-of-*.safetensors` of PyTorch's
    ///   `HuggingFaceStorageWriter`.
    ///
    /// # Errors
    ///
    /// [`DcpError::NotACheckpoint`] if there is nothing of the kind; [`DcpError::Foreign`] with file
    /// and tensor if a file is damaged, the index leads out of its directory, files or tensors that it
    /// names are missing (all are listed), a tensor is in two files, or parts don't cover it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = fs::metadata(path).map_err(|e| DcpError::NotACheckpoint {
            path: path.display().to_string(),
            reason: e.to_string(),
        })?;
        let index = find_index(path, metadata.is_dir());
        let mut found = Found::default();
        if let Some(index) = index {
            found.take_indexed(&index)?;
        } else if metadata.is_dir() {
            for file in safetensors_in(path)? {
                found.take(file, |_| true)?;
            }
        } else {
            found.take(path.to_path_buf(), |_| true)?;
        }
        found.finish(path)
    }

    /// The safetensors files that it reads.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Reads what the chunk has of the region to its place in `out`.
    fn read_chunk(&self, chunk: &Chunk, region: &Region, out: &mut [u8]) -> Result<()> {
        let size = chunk.dtype.size() as u64;
        let mut runs = chunk.region.runs(region).peekable();
        if runs.peek().is_none() {
            return Ok(());
        }
        let path = &self.files[chunk.file];
        // Opened anew: a checkpoint of many files would hold too many open, and each reader needs a
        // position of its own.
        let (mut file, _) = open_regular(path)?;
        let mut take = |runs: &[Run]| {
            take_runs(&mut file, chunk.start, size, runs, out)
                .map_err(|e| DcpError::io("read", path.display(), e))
        };
        let mut span: Vec<Run> = Vec::new();
        for run in runs {
            if let (Some(first), Some(last)) = (span.first(), span.last()) {
                let gap = (run.from - last.from - last.len) * size;
                let len = (run.from + run.len - first.from) * size;
                if gap >= MAX_GAP || len > MAX_SPAN || span.len() >= MAX_RUNS {
                    take(&span)?;
                    span.clear();
                }
            }
            span.push(run);
        }
        take(&span)
    }
}

impl TensorSource for HfCheckpoint {
    fn location(&self) -> String {
        self.path.display().to_string()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let (Some(info), Some(chunks)) = (self.tensors.get(name), self.chunks.get(name)) else {
            let detail = format!("there is no tensor {name:?}");
            return Err(DcpError::foreign(self.location(), detail));
        };
        if !region.fits(&info.shape) {
            return Err(DcpError::argument(format!(
                "{region:?} is not within tensor {name:?} of shape {:?}",
                info.shape
            )));
        }
        // No more than the files have, for their chunks cover the tensor.
        let bytes = region.volume().unwrap_or(0) * info.dtype.size() as u64;
        let mut out = vec![0; bytes as usize];
        for chunk in chunks {
            self.read_chunk(chunk, region, &mut out)?;
        }
        if info.dtype == DType::Bool(BoolStore::Native) && out.iter().any(|byte| *byte > 1) {
            let detail = format!("tensor {name:?}: a boolean is neither 0 nor 1");
            return Err(DcpError::foreign(self.location(), detail));
        }
        Ok(out)
    }
}

/// Reads the runs, which ascend, in one go.
fn take_runs(
    file: &mut (impl Read + Seek),
    start: u64,
    size: u64,
    runs: &[Run],
    out: &mut [u8],
) -> std::io::Result<()> {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
        return Ok(());
    };
    file.seek(SeekFrom::Start(start + first.from * size))?;
    let target = |run: &Run| (run.to * size) as usize..((run.to + run.len) * size) as usize;
    if runs.len() == 1 {
        return file.read_exact(&mut out[target(first)]);
    }
    let mut span = vec![0; ((last.from + last.len - first.from) * size) as usize];
    file.read_exact(&mut span)?;
    for run in runs {
        let at = ((run.from - first.from) * size) as usize;
        let target = &mut out[target(run)];
        target.copy_from_slice(&span[at..at + target.len()]);
    }
    Ok(())
}

/// What the files opened so far hold.
#[derive(Default)]
struct Found {
    files: Vec<PathBuf>,
    chunks: BTreeMap<String, Vec<Chunk>>,
}

impl Found {
    /// Adds the tensors of a file that are wanted.
    fn take(&mut self, path: PathBuf, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
        let header = Header::open(&path)?;
        let foreign = |detail: String| DcpError::foreign(path.display(), detail);
        let offsets = sharding_info(&header).map_err(foreign)?;
        for (name, entry) in header.tensors {
            if !is_wanted(&name) {
                continue;
            }
            let sizes = entry.info.shape;
            let offsets = offsets.get(&name);
            let chunk = Chunk {
                file: self.files.len(),
                start: entry.start,
                dtype: entry.info.dtype,
                region: Region {
                    offsets: offsets.cloned().unwrap_or_else(|| vec![0; sizes.len()]),
                    sizes,
                },
                is_placed: offsets.is_some(),
            };
            let parts = self.chunks.entry(name.clone()).or_default();
            if let Some(other) = parts.first()
                && !(chunk.is_placed && other.is_placed)
            {
                let other = self.files[other.file].display();
                return Err(foreign(format!("tensor {name:?} is in {other} too")));
            }
            parts.push(chunk);
        }
        self.files.push(path);
        Ok(())
    }

    /// Adds what an index names, from the files it names.
    fn take_indexed(&mut self, index: &Path) -> Result<()> {
        let weight_map = read_index(index)?;
        let directory = index.parent().unwrap_or(Path::new(""));
        let files: BTreeSet<&String> = weight_map.values().collect();
        let mut missing = Vec::new();
        for file in files {
            let path = directory.join(file);
            if !path.exists() {
                missing.push(format!("file {file:?}"));
                continue;
            }
            self.take(path, |name| weight_map.get(name) == Some(file))?;
            let names = weight_map.iter().filter(|(_, holder)| *holder == file);
            let absent = names.filter(|(name, _)| !self.chunks.contains_key(*name));
            missing.extend(absent.map(|(name, _)| format!("tensor {name:?} in {file:?}")));
        }
        if !missing.is_empty() {
            let detail = format!("it names what is missing: {}", missing.join(", "));
            return Err(DcpError::foreign(index.display(), detail));
        }
        Ok(())
    }

    fn finish(self, path: &Path) -> Result<HfCheckpoint> {
        if self.files.is_empty() {
            return Err(DcpError::NotACheckpoint {
                path: path.display().to_string(),
                reason: "it has no safetensors file".to_string(),
            });
        }
        let mut tensors = BTreeMap::new();
        for (name, chunks) in &self.chunks {
            let info = whole(name, chunks).map_err(|detail| {
                let file = self.files[chunks[0].file].display();
                DcpError::foreign(file, detail)
            })?;
            tensors.insert(name.clone(), info);
        }
        Ok(HfCheckpoint {
            path: path.to_path_buf(),
            files: self.files,
            tensors,
            chunks: self.chunks,
        })
    }
}

/// What the chunks of a tensor are together, if they cover it exactly once.
fn whole(name: &str, chunks: &[Chunk]) -> Result<TensorInfo, String> {
    let fault = |detail: &str| format!("tensor {name:?}: {detail}");
    let (dtype, rank) = (chunks[0].dtype, chunks[0].region.sizes.len());
    let mut shape = vec![0u64; rank];
    for Chunk { region, .. } in chunks {
        if region.sizes.len() != rank || region.offsets.len() != rank {
            return Err(fault("its parts have different numbers of dimensions"));
        }
        for (n, (offset, size)) in { &mut shape }
            .iter_mut()
            .zip(region.offsets.iter().zip(&region.sizes))
        {
            let end = offset.checked_add(*size);
            *n = end
                .ok_or_else(|| fault("a part ends beyond 64 bits"))?
                .max(*n);
        }
    }
    if chunks.iter().any(|chunk| chunk.dtype != dtype) {
        return Err(fault("its parts have different element types"));
    }
    // Ranks without rows may have written empty parts.
    let parts = chunks.iter().map(|c| &c.region).filter(|r| !r.is_empty());
    check_tiling(name, &shape, parts).map_err(|e| e.to_string())?;
    Ok(TensorInfo { dtype, shape })
}

#[derive(Deserialize)]
struct SavedOffsets {
    saved_offsets: Vec<u64>,
}

/// Where the tensors of this file belong in the whole ones, for those of which it says so.
fn sharding_info(header: &Header) -> Result<BTreeMap<String, Vec<u64>>, String> {
    let Some(json) = header.metadata.get(SHARDING_INFO) else {
        return Ok(BTreeMap::new());
    };
    let Unique::<SavedOffsets>(info) =
        serde_json::from_str(json).map_err(|e| format!("{SHARDING_INFO}: {e}"))?;
    let offsets = info.into_iter().map(|(name, o)| (name, o.saved_offsets));
    Ok(offsets.collect())
}

/// The index that `path` is, or has.
fn find_index(path: &Path, is_dir: bool) -> Option<PathBuf> {
    if is_dir {
        Some(path.join(INDEX)).filter(|index| index.exists())
    } else {
        let name = path.file_name()?.to_str()?;
        name.ends_with(".safetensors.index.json")
            .then(|| path.to_path_buf())
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

/// The file of each tensor.
fn read_index(index: &Path) -> Result<BTreeMap<String, String>> {
    let foreign = |detail: String| DcpError::foreign(index.display(), detail);
    let (file, len) = open_regular(index)?;
    if len > MAX_JSON {
        return Err(foreign(format!("{len} bytes are too many for an index")));
    }
    let mut json = Vec::new();
    { file.take(MAX_JSON).read_to_end(&mut json) }
        .map_err(|e| DcpError::io("read", index.display(), e))?;
    let index: Index = serde_json::from_slice(&json).map_err(|e| foreign(e.to_string()))?;
    let Unique(weight_map) = index.weight_map;
    if let Some((name, file)) = weight_map.iter().find(|(_, file)| !is_plain(file)) {
        let detail =
            format!("tensor {name:?}: {file:?} is not the name of a file beside the index");
        return Err(foreign(detail));
    }
    Ok(weight_map)
}

/// Whether this names a file in the directory itself, on any system.
fn is_plain(file: &str) -> bool {
    !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\\', ':', '\0'])
}

/// The safetensors files of a directory, by name.
fn safetensors_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e| DcpError::io("list", directory.display(), e);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|e| e == "safetensors") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
