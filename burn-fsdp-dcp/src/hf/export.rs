//! Writing tensors whole into safetensors files, as Hugging Face does.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use burn_fsdp::ShardSpec;
use burn_pack::AtomicFile;
use serde::Serialize;

use super::header::{MAX_JSON, METADATA};
use super::import::INDEX;
use super::layout::{LayoutSource, TensorLayout};
use crate::{DcpError, Region, Result, TensorInfo, TensorSource, dtype_name};

/// The name of the file in a directory of one.
const SINGLE: &str = "model.safetensors";

/// This much of a tensor is read at once. Transposing or casting holds it twice.
const MAX_PIECE: u64 = 24 << 20;

type Rename = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// How [`export_safetensors`] writes. By default one file, with all tensors as they are.
#[derive(Default)]
pub struct ExportOptions {
    max_file_bytes: Option<u64>,
    dtype: Option<DType>,
    layout: TensorLayout,
    specs: BTreeMap<String, ShardSpec>,
    prefix: String,
    rename: Option<Rename>,
    overwrite: bool,
}

impl fmt::Debug for ExportOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportOptions")
            .field("max_file_bytes", &self.max_file_bytes)
            .field("dtype", &self.dtype)
            .field("layout", &self.layout)
            .field("renames", &self.rename.is_some())
            .field("overwrite", &self.overwrite)
            .finish_non_exhaustive()
    }
}

impl ExportOptions {
    /// One file, with all tensors as they are.
    pub fn new() -> Self {
        Self::default()
    }

    /// Splits the tensors over files of at most this many bytes, headers aside, in a directory. A
    /// tensor larger than this has a file of its own.
    pub fn with_max_file_bytes(mut self, max: u64) -> Self {
        self.max_file_bytes = Some(max);
        self
    }

    /// Casts floating-point tensors to this type, rounding to nearest.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// The layout to write the tensors of a Burn model in. `specs` says what that model is (see
    /// [`pytorch_layout`](crate::pytorch_layout)), and `prefix` what the names of its tensors begin
    /// with in the source, such as `model.`. Other tensors are written as they are.
    pub fn with_layout(
        mut self,
        layout: TensorLayout,
        specs: &BTreeMap<String, ShardSpec>,
        prefix: &str,
    ) -> Self {
        self.layout = layout;
        self.prefix = prefix.to_string();
        self.specs = specs.clone();
        self
    }

    /// Gives tensors the name that `rename` returns for their own, in the layout written, and leaves
    /// out those for which it returns none.
    pub fn with_rename(
        mut self,
        rename: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.rename = Some(Box::new(rename));
        self
    }

    /// Whether an export that is there already is replaced. It is refused by default.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }
}

/// Writes all tensors of a source, whole, into safetensors files.
///
/// Without a size limit, that is `target` itself, or `model.safetensors` in it if it is a directory.
/// With one, `target` is a directory, made if need be; what doesn't fit in `model.safetensors` alone
/// goes to `model-00001-of-0000N.safetensors` and so on, with `model.safetensors.index.json`.
///
/// Tensors are read in pieces; at no time are more than about 64 MiB of one in memory. Files have their
/// names only when all are complete and on disk, the index last. Replacing an export of several files
/// is not atomic: between the first new name and the last, readers without an index find a mixture.
/// Files of other names in the directory are left alone.
///
/// # Errors
///
/// [`DcpError::AlreadyExists`] if `target` is there, or the directory holds safetensors files, and
/// overwriting is not allowed; [`DcpError::InvalidArgument`] for options that make no sense, two tensors
/// of one name, or elements that safetensors doesn't have; what reading and writing may give.
pub fn export_safetensors(
    source: &dyn TensorSource,
    target: &Path,
    options: &ExportOptions,
) -> Result<()> {
    match options.layout {
        TensorLayout::Burn => export(source, target, options),
        TensorLayout::PyTorch => {
            let source = LayoutSource::to_pytorch(source, &options.specs, &options.prefix)?;
            export(&source, target, options)
        }
    }
}

fn export(source: &dyn TensorSource, target: &Path, options: &ExportOptions) -> Result<()> {
    let tensors = planned(source, options)?;
    let is_directory = target.is_dir() || options.max_file_bytes.is_some();
    let directory = if is_directory {
        if target.exists() && !target.is_dir() {
            let target = target.display();
            return Err(DcpError::argument(format!("{target} is not a directory")));
        }
        target
    } else {
        target.parent().unwrap_or(Path::new(""))
    };
    let is_taken = if is_directory {
        target.is_dir() && holds_export(target)?
    } else {
        fs::symlink_metadata(target).is_ok()
    };
    if is_taken && !options.overwrite {
        return Err(DcpError::AlreadyExists {
            path: target.display().to_string(),
        });
    }
    if !directory.as_os_str().is_empty() {
        fs::create_dir_all(directory)
            .map_err(|e| DcpError::io("create", directory.display(), e))?;
    }

    let files = into_files(tensors, options.max_file_bytes);
    let paths: Vec<PathBuf> = match files.len() {
        1 if !is_directory => vec![target.to_path_buf()],
        1 => vec![directory.join(SINGLE)],
        n => { 1..=n }
            .map(|k| directory.join(format!("model-{k:05}-of-{n:05}.safetensors")))
            .collect(),
    };
    let mut written = Vec::new();
    for (path, tensors) in paths.iter().zip(&files) {
        written.push(write_atomic(path, |file| {
            write_file(file, source, tensors, path)
        })?);
    }
    if files.len() > 1 {
        let index = directory.join(INDEX);
        let json = index_json(&paths, &files)?;
        let fail = |e| DcpError::io("write", index.display(), e);
        written.push(write_atomic(&index, |mut file| {
            file.write_all(&json).map_err(fail)?;
            file.sync_all().map_err(fail)
        })?);
    }
    if is_directory && options.overwrite {
        // An index of before must not be found beside files that are not its own.
        remove_if_there(&directory.join(INDEX))?;
    }
    publish(written, options.overwrite)?;
    if is_directory && options.overwrite {
        remove_replaced(directory, &paths)?;
    }
    Ok(())
}

/// A tensor to be written.
struct Planned {
    /// Its name in the source.
    from: String,
    name: String,
    /// What it is in the source.
    info: TensorInfo,
    /// Its element type in the file.
    dtype: DType,
    bytes: u64,
}

/// What is to be written, by name.
fn planned(source: &dyn TensorSource, options: &ExportOptions) -> Result<Vec<Planned>> {
    if let Some(dtype) = options.dtype.filter(|dtype| !dtype.is_float()) {
        return Err(DcpError::argument(format!(
            "tensors can be cast to types of floating point, not to {dtype:?}"
        )));
    }
    let mut planned: BTreeMap<String, Planned> = BTreeMap::new();
    let mut total = 0u64;
    for (from, info) in source.tensors() {
        let name = match &options.rename {
            Some(rename) => rename(from),
            None => Some(from.clone()),
        };
        let Some(name) = name else { continue };
        if name == METADATA {
            return Err(DcpError::argument(format!(
                "no tensor can be called {name:?}"
            )));
        }
        let dtype = { options.dtype }
            .filter(|_| info.dtype.is_float())
            .unwrap_or(info.dtype);
        // What has no name in the format can't be written, in the source or in the file.
        dtype_name(info.dtype)?;
        dtype_name(dtype)?;
        let bytes = TensorInfo {
            dtype,
            shape: info.shape.clone(),
        }
        .bytes();
        total = total.checked_add(bytes).ok_or_else(|| {
            DcpError::argument(format!(
                "tensor {from:?} of shape {:?} is too large",
                info.shape
            ))
        })?;
        let tensor = Planned {
            from: from.clone(),
            name: name.clone(),
            info: info.clone(),
            dtype,
            bytes,
        };
        if let Some(other) = planned.insert(name, tensor) {
            return Err(DcpError::argument(format!(
                "tensors {:?} and {from:?} would both be called {:?}",
                other.from, other.name
            )));
        }
    }
    Ok(planned.into_values().collect())
}

/// Fills files one after the other, each up to the limit. There is at least one.
fn into_files(tensors: Vec<Planned>, max_file_bytes: Option<u64>) -> Vec<Vec<Planned>> {
    let max = max_file_bytes.unwrap_or(u64::MAX);
    let mut files = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        if filled > 0 && tensor.bytes > max.saturating_sub(filled) {
            files.push(Vec::new());
            filled = 0;
        }
        filled += tensor.bytes;
        files.last_mut().expect("there is one").push(tensor);
    }
    for file in &mut files {
        // Wide elements first, so that all are aligned. The order of names within is kept.
        file.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.size()));
    }
    files
}

#[derive(Serialize)]
struct Described<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

#[derive(Serialize)]
struct HeaderJson<'a> {
    __metadata__: BTreeMap<&'a str, &'a str>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, Described<'a>>,
}

/// The length and the JSON that precede the data.
fn header_bytes(tensors: &[Planned]) -> Result<Vec<u8>> {
    let mut described = BTreeMap::new();
    let mut at = 0;
    for tensor in tensors {
        let entry = Described {
            dtype: dtype_name(tensor.dtype)?,
            shape: &tensor.info.shape,
            data_offsets: [at, at + tensor.bytes],
        };
        described.insert(tensor.name.as_str(), entry);
        at += tensor.bytes;
    }
    let header = HeaderJson {
        __metadata__: BTreeMap::from([("format", "pt")]),
        tensors: described,
    };
    let mut json = serde_json::to_vec(&header).map_err(DcpError::argument)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_JSON {
        let detail = format!("{} tensors are too many for one file", tensors.len());
        return Err(DcpError::argument(detail));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

fn index_json(paths: &[PathBuf], files: &[Vec<Planned>]) -> Result<Vec<u8>> {
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (path, tensors) in paths.iter().zip(files) {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        for tensor in tensors {
            weight_map.insert(tensor.name.as_str(), file.clone());
            total += tensor.bytes;
        }
    }
    let index = serde_json::json!({
        "metadata": { "total_size": total },
        "weight_map": weight_map,
    });
    serde_json::to_vec_pretty(&index).map_err(DcpError::argument)
}

/// Writes one file to the end and on to the disk.
fn write_file(
    file: File,
    source: &dyn TensorSource,
    tensors: &[Planned],
    path: &Path,
) -> Result<()> {
    let fail = |e| DcpError::io("write", path.display(), e);
    let mut out = BufWriter::new(file);
    out.write_all(&header_bytes(tensors)?).map_err(fail)?;
    for tensor in tensors {
        let widest = tensor.info.dtype.size().max(tensor.dtype.size()) as u64;
        for region in pieces(&tensor.info.shape, MAX_PIECE / widest) {
            let bytes = read_piece(source, tensor, &region)?;
            out.write_all(&bytes).map_err(fail)?;
        }
    }
    let file = out.into_inner().map_err(|e| fail(e.into_error()))?;
    file.sync_all().map_err(fail)
}

/// A part of a tensor as it is to be written.
fn read_piece(source: &dyn TensorSource, tensor: &Planned, region: &Region) -> Result<Vec<u8>> {
    let fault = |detail: String| {
        let detail = format!("tensor {:?}: {detail}", tensor.from);
        DcpError::foreign(source.location(), detail)
    };
    let bytes = source.read(&tensor.from, region)?;
    let elements = region.volume().unwrap_or(u64::MAX) as usize;
    if bytes.len() != elements.saturating_mul(tensor.info.dtype.size()) {
        return Err(fault(format!(
            "{} bytes were read of {region:?}",
            bytes.len()
        )));
    }
    if tensor.dtype == tensor.info.dtype {
        return Ok(bytes);
    }
    let data = TensorData::from_bytes_vec(bytes, [elements], tensor.info.dtype);
    let cast = data
        .try_cast(tensor.dtype)
        .map_err(|e| fault(e.to_string()))?;
    Ok(cast.as_bytes().to_vec())
}

/// Cuts a tensor into pieces that are contiguous and in order, of at most `max` elements: by leading
/// rows, and within a row where that alone is larger.
fn pieces(shape: &[u64], max: u64) -> impl Iterator<Item = Region> + use<> {
    let shape = shape.to_vec();
    let is_empty = shape.contains(&0);
    // The first dimension whose slices are small enough is cut; those before it one by one.
    let inner = |dim: usize| shape[dim + 1..].iter().product::<u64>();
    let cut = match shape.len() {
        _ if is_empty => 0,
        0 => 0,
        rank => (0..rank).find(|d| inner(*d) <= max).unwrap_or(rank - 1),
    };
    let rows = match shape.get(cut) {
        Some(n) if !is_empty => (max / inner(cut)).clamp(1, *n),
        _ => 1,
    };
    let steps = shape.get(cut).map_or(1, |n| n.div_ceil(rows));
    let count = if is_empty {
        0
    } else {
        shape[..cut.min(shape.len())].iter().product::<u64>() * steps
    };
    (0..count).map(move |number| {
        let mut region = Region::whole(&shape);
        let mut rest = number / steps;
        for d in (0..cut).rev() {
            (region.offsets[d], region.sizes[d]) = (rest % shape[d], 1);
            rest /= shape[d];
        }
        if let Some(n) = shape.get(cut) {
            region.offsets[cut] = number % steps * rows;
            region.sizes[cut] = rows.min(n - region.offsets[cut]);
        }
        region
    })
}

/// Writes a file beside `path` that is gone again unless it is committed.
fn write_atomic(
    path: &Path,
    write: impl FnOnce(File) -> Result<()>,
) -> Result<(AtomicFile, PathBuf)> {
    let (scratch, file) = AtomicFile::create(path).map_err(|e| publish_error(path, e))?;
    write(file)?;
    Ok((scratch, path.to_path_buf()))
}

/// Gives the files their names, in this order. If one is taken by now, those before it are removed again:
/// part of an export is none.
fn publish(written: Vec<(AtomicFile, PathBuf)>, overwrite: bool) -> Result<()> {
    let mut published = Vec::new();
    for (scratch, path) in written {
        let done = if overwrite {
            scratch.commit()
        } else {
            scratch.commit_new()
        };
        if let Err(error) = done {
            if !overwrite {
                { published.iter() }.for_each(|path| drop(fs::remove_file(path)));
            }
            return Err(publish_error(&path, error));
        }
        published.push(path);
    }
    Ok(())
}

fn publish_error(path: &Path, error: burn_pack::Error) -> DcpError {
    match error {
        burn_pack::Error::AlreadyExists(path) => DcpError::AlreadyExists { path },
        error => DcpError::io("write", path.display(), error),
    }
}

fn names_in(directory: &Path) -> Result<Vec<String>> {
    let fail = |e| DcpError::io("list", directory.display(), e);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        names.extend(name.into_string());
    }
    Ok(names)
}

/// Whether a reader would find safetensors files there.
fn holds_export(directory: &Path) -> Result<bool> {
    let names = names_in(directory)?;
    Ok({ names.iter() }.any(|name| name == INDEX || name.ends_with(".safetensors")))
}

/// Removes what an export of before left under names of its own.
fn remove_replaced(directory: &Path, written: &[PathBuf]) -> Result<()> {
    for name in names_in(directory)? {
        let path = directory.join(&name);
        if is_ours(&name) && !written.contains(&path) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(DcpError::io("remove", path.display(), e))
        }
        _ => Ok(()),
    }
}

/// Whether an export gives files such a name.
fn is_ours(name: &str) -> bool {
    let numbers = { name.strip_prefix("model-") }
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"));
    let is_number = |s: &str| s.len() >= 5 && s.bytes().all(|b| b.is_ascii_digit());
    name == SINGLE || numbers.is_some_and(|(k, n)| is_number(k) && is_number(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_tensor_is_cut_by_leading_rows() {
        let cut: Vec<_> = pieces(&[5, 3], 7).collect();
        let rows: Vec<_> = cut.iter().map(|p| (p.offsets[0], p.sizes[0])).collect();
        assert_eq!(rows, [(0, 2), (2, 2), (4, 1)]);
        assert_eq!(pieces(&[], 1).collect::<Vec<_>>(), [Region::whole(&[])]);
        assert_eq!(pieces(&[3, 0], 1).count(), 0);
    }

    #[test]
    fn an_export_that_meets_another_midway_takes_its_files_back() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        let write = |path: &PathBuf| write_atomic(path, |_| Ok(())).unwrap();
        let written = paths.iter().map(write).collect();
        fs::write(&paths[1], "other").unwrap();
        let error = publish(written, false).unwrap_err();
        assert!(matches!(error, DcpError::AlreadyExists { .. }), "{error}");
        assert_eq!(names_in(dir.path()).unwrap(), ["b"]);
        assert_eq!(fs::read(&paths[1]).unwrap(), b"other");
    }

    #[test]
    fn only_names_of_an_export_are_taken_for_its_own() {
        assert!(is_ours("model.safetensors") && is_ours("model-00001-of-00010.safetensors"));
        assert!(!is_ours("model-1-of-2.safetensors") && !is_ours("adapter_model.safetensors"));
    }

    proptest! {
        #[test]
        fn pieces_are_contiguous_and_cover_the_tensor(
            shape in prop::collection::vec(0u64..5, 0..4),
            max in 1u64..20,
        ) {
            let whole = Region::whole(&shape);
            let mut next = 0;
            for piece in pieces(&shape, max) {
                let runs: Vec<_> = whole.runs(&piece).collect();
                prop_assert!(piece.fits(&shape) && piece.volume().unwrap() <= max);
                for run in runs {
                    prop_assert_eq!(run.from, next);
                    next += run.len;
                }
            }
            prop_assert_eq!(next, whole.volume().unwrap());
        }
    }
}
