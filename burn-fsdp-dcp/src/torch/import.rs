//! Reads a checkpoint of PyTorch.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use crc32fast::Hasher;

use super::METADATA;
use super::blob::{Layout, read_layout, read_value};
use super::metadata::{Metadata, Place, TensorMeta};
use super::value::TorchValue;
use super::zip::{ReadAt, ZipError};
use crate::region::{Region, Run};
use crate::source::{TensorInfo, TensorSource};
use crate::{DcpError, Result};

/// Runs this close in a file are read at once, with what is between them.
const GAP: u64 = 16 << 10;
/// As long as no more than this is read at once.
const PIECE: u64 = 4 << 20;

/// A checkpoint that `torch.distributed.checkpoint` wrote, of any number of ranks.
///
/// Nothing in it is executed. Tensors have the names that PyTorch gives them, such as
/// `model.head.weight`, and are read in parts: a region takes about as many bytes from disk as it has.
/// The checksum of a chunk is checked when the whole chunk is read.
#[derive(Debug)]
pub struct TorchCheckpoint {
    dir: PathBuf,
    files: Vec<DataFile>,
    tensors: BTreeMap<String, TensorInfo>,
    chunks: BTreeMap<String, Vec<Chunk>>,
    values: BTreeMap<String, TorchValue>,
}

#[derive(Debug)]
struct DataFile {
    path: PathBuf,
    len: u64,
}

/// A part of a tensor.
#[derive(Debug)]
struct Chunk {
    region: Region,
    place: Place,
    /// Where in the place its elements are, once it is known.
    layout: OnceLock<Layout>,
}

impl TorchCheckpoint {
    /// Opens the checkpoint in a directory: reads its metadata and its small values.
    ///
    /// # Errors
    ///
    /// [`DcpError::NotACheckpoint`] without a file `.metadata`, [`DcpError::MissingFile`] if a file that
    /// it names is not there, [`DcpError::Foreign`] if anything in it is malformed, refers to what has no
    /// place in a checkpoint, or names a file outside of the directory.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join(METADATA);
        if !path.is_file() {
            return Err(DcpError::NotACheckpoint {
                path: dir.display().to_string(),
                reason: "it has no file .metadata".to_string(),
            });
        }
        let bytes = fs::read(&path).map_err(|error| io("read", &path, error))?;
        let metadata =
            Metadata::parse(&bytes).map_err(|detail| DcpError::foreign(path.display(), detail))?;
        let names = metadata.files.iter();
        let files = names
            .map(|name| DataFile::find(dir, name))
            .collect::<Result<Vec<_>>>()?;
        check_places(&files, &metadata)?;
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            files,
            tensors: BTreeMap::new(),
            chunks: BTreeMap::new(),
            values: BTreeMap::new(),
        };
        for (name, place) in metadata.values {
            let value = checkpoint.read_value(&name, place)?;
            checkpoint.values.insert(name, value);
        }
        for (name, TensorMeta { info, chunks }) in metadata.tensors {
            let chunks = chunks.into_iter().map(|(region, place)| Chunk {
                region,
                place,
                layout: OnceLock::new(),
            });
            checkpoint.chunks.insert(name.clone(), chunks.collect());
            checkpoint.tensors.insert(name, info);
        }
        Ok(checkpoint)
    }

    /// What it keeps beside tensors, such as `optim.param_groups.0.lr`, by name.
    pub fn values(&self) -> &BTreeMap<String, TorchValue> {
        &self.values
    }

    fn read_value(&self, name: &str, place: Place) -> Result<TorchValue> {
        let file = &self.files[place.file];
        let value = read_value(&file.open()?, place.start..place.end);
        value.map_err(|error| file.error(format!("value \"{name}\""), error))
    }

    /// Copies what a chunk and a region have in common to where the region has it.
    fn read_chunk(&self, name: &str, chunk: &Chunk, region: &Region, out: &mut [u8]) -> Result<()> {
        let data_file = &self.files[chunk.place.file];
        let what = || format!("tensor \"{name}\", chunk at {:?}", chunk.region.offsets);
        let error = |error| data_file.error(what(), error);
        let file = data_file.open()?;
        let layout = match chunk.layout.get() {
            Some(layout) => layout,
            None => {
                let range = chunk.place.start..chunk.place.end;
                let layout = read_layout(&file, range).map_err(error)?;
                self.check_layout(name, chunk, &layout).map_err(error)?;
                chunk.layout.get_or_init(|| layout)
            }
        };
        copy_chunk(&file, chunk, layout, region, out).map_err(error)
    }

    fn check_layout(&self, name: &str, chunk: &Chunk, layout: &Layout) -> Result<(), ZipError> {
        let dtype = self.tensors[name].dtype;
        if layout.dtype != dtype || layout.sizes != chunk.region.sizes {
            return Err(ZipError::Malformed(format!(
                "{:?} of shape {:?} is stored where {dtype:?} of shape {:?} is due",
                layout.dtype, layout.sizes, chunk.region.sizes
            )));
        }
        Ok(())
    }
}

impl TensorSource for TorchCheckpoint {
    fn location(&self) -> String {
        self.dir.display().to_string()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let (Some(info), Some(chunks)) = (self.tensors.get(name), self.chunks.get(name)) else {
            return Err(DcpError::argument(format!(
                "{} has no tensor \"{name}\"",
                self.location()
            )));
        };
        if !region.fits(&info.shape) {
            return Err(DcpError::argument(format!(
                "tensor \"{name}\" of shape {:?} has no region {region:?}",
                info.shape
            )));
        }
        if region.is_empty() {
            return Ok(Vec::new());
        }
        let parts = chunks.iter().filter_map(|chunk| {
            let common = chunk.region.intersection(region)?;
            Some((chunk, common.volume()?))
        });
        // Chunks have nothing in common with each other, so what they cover adds up.
        let covered: u64 = parts.clone().map(|(_, volume)| volume).sum();
        let len = region.volume().filter(|len| *len == covered);
        let len = len.and_then(|len| usize::try_from(len).ok());
        let Some(len) = len else {
            return Err(DcpError::foreign(
                self.dir.join(METADATA).display(),
                format!("tensor \"{name}\": its chunks do not cover {region:?}"),
            ));
        };
        let mut out = vec![0; len * info.dtype.size()];
        for (chunk, _) in parts {
            self.read_chunk(name, chunk, region, &mut out)?;
        }
        Ok(out)
    }
}

impl DataFile {
    /// A file of the checkpoint, which must lie in its directory whatever links there are.
    fn find(dir: &Path, name: &str) -> Result<Self> {
        let refused = |detail: &str| {
            let detail = format!("the file name {name:?} {detail}");
            Err(DcpError::foreign(dir.join(METADATA).display(), detail))
        };
        let mut parts = Path::new(name).components();
        let is_plain = parts.all(|part| matches!(part, Component::Normal(_)));
        if name.is_empty() || name.contains(['\0', '\\']) || !is_plain {
            return refused("is not one in the directory of the checkpoint");
        }
        let path = dir.join(name);
        if !path.exists() {
            return Err(DcpError::MissingFile {
                file: path.display().to_string(),
            });
        }
        let whole = |path: &Path| path.canonicalize().map_err(|error| io("find", path, error));
        if !whole(&path)?.starts_with(whole(dir)?) {
            return refused("leads out of the directory of the checkpoint");
        }
        let metadata = fs::metadata(&path).map_err(|error| io("find", &path, error))?;
        if !metadata.is_file() {
            return refused("is not that of a file");
        }
        Ok(Self {
            path,
            len: metadata.len(),
        })
    }

    fn open(&self) -> Result<File> {
        File::open(&self.path).map_err(|error| io("open", &self.path, error))
    }

    fn error(&self, what: String, error: ZipError) -> DcpError {
        match error {
            ZipError::Io(error) => io("read", &self.path, error),
            ZipError::Malformed(detail) => {
                DcpError::foreign(self.path.display(), format!("{what}: {detail}"))
            }
        }
    }
}

fn io(op: &str, path: &Path, error: std::io::Error) -> DcpError {
    DcpError::io(op, path.display(), error)
}

/// Parts lie within their files and apart from each other. So a checkpoint is no larger than its files,
/// and what it claims can be allocated.
fn check_places(files: &[DataFile], metadata: &Metadata) -> Result<()> {
    let mut places = Vec::new();
    for (name, tensor) in &metadata.tensors {
        for (region, place) in &tensor.chunks {
            let bytes = region.volume().map(|n| n * tensor.info.dtype.size() as u64);
            if bytes.is_none_or(|bytes| bytes > place.end - place.start) {
                let file = files[place.file].path.display();
                let at = &region.offsets;
                let detail = format!("tensor \"{name}\", chunk at {at:?}: it is cut short");
                return Err(DcpError::foreign(file, detail));
            }
            places.push((place, name));
        }
    }
    places.extend(metadata.values.iter().map(|(name, place)| (place, name)));
    places.sort();
    for (place, name) in &places {
        let file = &files[place.file];
        if place.end > file.len {
            let detail = format!("{name:?} is at {}..{}", place.start, place.end);
            let detail = format!("{detail} of a file of {} bytes", file.len);
            return Err(DcpError::foreign(file.path.display(), detail));
        }
    }
    for pair in places.windows(2) {
        let ((a, a_name), (b, b_name)) = (pair[0], pair[1]);
        if a.file == b.file && b.start < a.end {
            let detail = format!("{a_name:?} and {b_name:?} have bytes in common");
            return Err(DcpError::foreign(files[a.file].path.display(), detail));
        }
    }
    Ok(())
}

fn copy_chunk(
    file: &File,
    chunk: &Chunk,
    layout: &Layout,
    region: &Region,
    out: &mut [u8],
) -> Result<(), ZipError> {
    let width = layout.dtype.size() as u64;
    if let Some(strides) = &layout.strides {
        let bytes = read_strided(file, layout, strides)?;
        for run in chunk.region.runs(region) {
            let run = in_bytes(run, width);
            out[range(run.to, run.len)].copy_from_slice(&bytes[range(run.from, run.len)]);
        }
        return Ok(());
    }
    let is_whole = chunk.region.intersection(region).as_ref() == Some(&chunk.region);
    let mut crc = layout
        .crc
        .filter(|_| is_whole)
        .map(|due| (due, Hasher::new()));
    let mut scratch = Vec::new();
    let runs = chunk.region.runs(region).map(|run| in_bytes(run, width));
    // The runs of a whole chunk are all its bytes in their order.
    let mut hash = |read: &[u8]| {
        if let Some((_, crc)) = &mut crc {
            crc.update(read);
        }
    };
    for_groups(runs, |group| {
        let at = group[0].from;
        if let [run] = group {
            let mut at = layout.data.start + at;
            for piece in out[range(run.to, run.len)].chunks_mut(PIECE as usize) {
                file.read_at(piece, at)?;
                at += piece.len() as u64;
                hash(piece);
            }
            return Ok(());
        }
        let last = group[group.len() - 1];
        scratch.resize((last.from + last.len - at) as usize, 0);
        file.read_at(&mut scratch, layout.data.start + at)?;
        hash(&scratch);
        for run in group {
            let source = &scratch[range(run.from - at, run.len)];
            out[range(run.to, run.len)].copy_from_slice(source);
        }
        Ok(())
    })?;
    check_crc(crc.map(|(due, crc)| (due, crc.finalize())))
}

/// Reads a chunk that is not stored row by row, and puts its elements in this order.
fn read_strided(file: &File, layout: &Layout, strides: &[u64]) -> Result<Vec<u8>, ZipError> {
    let width = layout.dtype.size();
    let mut stored = vec![0; (layout.data.end - layout.data.start) as usize];
    file.read_at(&mut stored, layout.data.start)?;
    check_crc(layout.crc.map(|due| (due, crc32fast::hash(&stored))))?;
    let mut bytes = Vec::with_capacity(stored.len());
    let mut at = vec![0; strides.len()];
    loop {
        let place: u64 = at.iter().zip(strides).map(|(at, stride)| at * stride).sum();
        let place = place as usize * width;
        bytes.extend(&stored[place..place + width]);
        let Some(dim) = (0..at.len()).rfind(|d| at[*d] + 1 < layout.sizes[*d]) else {
            return Ok(bytes);
        };
        at[dim] += 1;
        at[dim + 1..].fill(0);
    }
}

fn check_crc(crc: Option<(u32, u32)>) -> Result<(), ZipError> {
    match crc {
        Some((due, found)) if due != found => Err(ZipError::Malformed(
            "its elements fail their checksum".into(),
        )),
        _ => Ok(()),
    }
}

fn in_bytes(run: Run, width: u64) -> Run {
    Run {
        from: run.from * width,
        to: run.to * width,
        len: run.len * width,
    }
}

/// Hands over the runs, joined where they continue each other, in groups that are read at once.
fn for_groups(
    runs: impl Iterator<Item = Run>,
    mut read: impl FnMut(&[Run]) -> Result<(), ZipError>,
) -> Result<(), ZipError> {
    let mut group: Vec<Run> = Vec::new();
    for run in runs {
        if let (Some(first), Some(last)) = (group.first().copied(), group.last_mut()) {
            let end = last.from + last.len;
            if end == run.from && last.to + last.len == run.to {
                last.len += run.len;
                continue;
            }
            if run.from - end > GAP || run.from + run.len - first.from > PIECE {
                read(&group)?;
                group.clear();
            }
        }
        group.push(run);
    }
    if group.is_empty() {
        return Ok(());
    }
    read(&group)
}

fn range(start: u64, len: u64) -> std::ops::Range<usize> {
    start as usize..(start + len) as usize
}
