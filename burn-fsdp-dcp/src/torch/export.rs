//! Writes a checkpoint that PyTorch can read.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use burn::tensor::{BoolStore, DType};

use super::pickle_writer::PickleWriter;
use super::zip::ArchiveWriter;
use super::{DTYPES, METADATA, METADATA_MODULE, STORAGE_MODULE};
use crate::region::Region;
use crate::source::{TensorInfo, TensorSource};
use crate::{DcpError, Result};

/// The file with the elements, under the name that rank 0 gives it.
const DATA: &str = "__0_0.distcp";
/// As much of a tensor is in memory at once, in bytes.
const PIECE: u64 = 64 << 20;

/// Writes tensors as a checkpoint that `torch.distributed.checkpoint` loads.
///
/// `names` gives each tensor the name that PyTorch knows it by, or none to leave it out. Names of the
/// forms `model.PARAMETER` and `optim.state.PARAMETER.FIELD` become the nested dicts that PyTorch has
/// for them; all others are keys of the outermost dict. At most 64 MiB of a tensor are in memory at
/// once. The directory is a checkpoint only when all of it is on disk.
///
/// # Errors
///
/// [`DcpError::AlreadyExists`] if the directory holds a checkpoint, [`DcpError::InvalidArgument`] if two
/// tensors get one name or PyTorch has no such element type, and what reading or writing gives.
///
/// ```no_run
/// # use burn_fsdp_dcp::{TorchCheckpoint, export_torch};
/// # fn main() -> burn_fsdp_dcp::Result<()> {
/// let source = TorchCheckpoint::open("checkpoints/step-1000")?;
/// export_torch(&source, "weights", |name| {
///     name.starts_with("model.").then(|| name.to_string())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn export_torch(
    source: &dyn TensorSource,
    dir: impl AsRef<Path>,
    names: impl Fn(&str) -> Option<String>,
) -> Result<()> {
    let dir = dir.as_ref();
    let chosen = choose(source, names)?;
    if dir.join(METADATA).exists() {
        return Err(DcpError::AlreadyExists {
            path: dir.display().to_string(),
        });
    }
    fs::create_dir_all(dir).map_err(|error| io_error("create", dir, error))?;
    let written = write_data(source, &chosen, &dir.join(DATA))?;
    write_metadata(dir, &metadata(&written))
}

/// A tensor to write.
struct Chosen<'s> {
    /// Its name in the source.
    source: &'s str,
    info: &'s TensorInfo,
    /// Its type, and the class of its storage if there is one, in `torch`.
    dtype: (&'static str, Option<&'static str>),
}

/// A tensor that is written.
struct Written<'s> {
    chosen: &'s Chosen<'s>,
    name: &'s str,
    offset: u64,
    len: u64,
}

/// Tensors by the name that they get.
fn choose<'s>(
    source: &'s dyn TensorSource,
    names: impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, Chosen<'s>>> {
    let mut chosen = BTreeMap::new();
    for (name, info) in source.tensors() {
        let Some(new_name) = names(name) else {
            continue;
        };
        let dtype = torch_dtype(info.dtype).ok_or_else(|| {
            let dtype = info.dtype;
            DcpError::argument(format!("tensor \"{name}\": PyTorch has no type {dtype:?}"))
        })?;
        let tensor = Chosen {
            source: name,
            info,
            dtype,
        };
        if let Some(other) = chosen.insert(new_name, tensor) {
            let other = other.source;
            return Err(DcpError::argument(format!(
                "tensors \"{other}\" and \"{name}\" would get the same name"
            )));
        }
    }
    Ok(chosen)
}

fn torch_dtype(dtype: DType) -> Option<(&'static str, Option<&'static str>)> {
    let dtype = match dtype {
        DType::Bool(BoolStore::U8) => DType::Bool(BoolStore::Native),
        dtype => dtype,
    };
    let found = DTYPES.iter().find(|(_, _, known)| *known == dtype);
    found.map(|(name, storage, _)| (*name, *storage))
}

fn write_data<'s>(
    source: &dyn TensorSource,
    chosen: &'s BTreeMap<String, Chosen<'s>>,
    path: &Path,
) -> Result<Vec<Written<'s>>> {
    let failed = |error| io_error("write", path, error);
    let file = File::create(path).map_err(|error| io_error("create", path, error))?;
    let mut out = BufWriter::new(file);
    let mut written = Vec::new();
    let mut offset = 0;
    for (name, chosen) in chosen {
        let len = write_tensor(source, chosen, &mut out, path)?;
        written.push(Written {
            chosen,
            name,
            offset,
            len,
        });
        offset += len;
    }
    let file = out
        .into_inner()
        .map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    Ok(written)
}

/// Writes a tensor as `torch.save` does, and says how long it became.
fn write_tensor(
    source: &dyn TensorSource,
    chosen: &Chosen<'_>,
    out: &mut impl Write,
    path: &Path,
) -> Result<u64> {
    let failed = |error| io_error("write", path, error);
    let info = chosen.info;
    let mut archive = ArchiveWriter::new(out);
    let pickle = tensor_pickle(chosen);
    archive.entry("archive/data.pkl", &pickle).map_err(failed)?;
    archive
        .entry("archive/byteorder", b"little")
        .map_err(failed)?;
    archive
        .begin("archive/data/0", info.bytes())
        .map_err(failed)?;
    for piece in pieces(&info.shape, info.dtype.size() as u64, PIECE) {
        let bytes = source.read(chosen.source, &piece)?;
        let due = piece.volume().map(|n| n * info.dtype.size() as u64);
        if due != Some(bytes.len() as u64) {
            return Err(DcpError::corrupt(
                source.location(),
                format!("tensor \"{}\": {piece:?} has another size", chosen.source),
            ));
        }
        archive.write(&bytes).map_err(failed)?;
    }
    archive.end().map_err(failed)?;
    archive.entry("archive/version", b"3\n").map_err(failed)?;
    archive.finish().map_err(failed)
}

/// The call that rebuilds a tensor from its storage.
fn tensor_pickle(chosen: &Chosen<'_>) -> Vec<u8> {
    let (dtype, storage) = chosen.dtype;
    let info = chosen.info;
    let bytes = info.bytes();
    let mut pickle = PickleWriter::new();
    // Types without a storage of their own use one of bytes, and say their type at the end.
    let rebuild = match storage {
        Some(_) => "_rebuild_tensor_v2",
        None => "_rebuild_tensor_v3",
    };
    pickle.call("torch._utils", rebuild, |p| {
        p.persistent(|p| {
            p.tuple(|p| {
                p.str("storage");
                match storage {
                    Some(class) => p.global("torch", class),
                    None => p.global("torch.storage", "UntypedStorage"),
                }
                p.str("0");
                p.str("cpu");
                p.int(match storage {
                    Some(_) => bytes / info.dtype.size() as u64,
                    None => bytes,
                });
            });
        });
        p.int(0);
        p.ints(&info.shape);
        p.ints(&row_major_strides(&info.shape));
        p.bool(false);
        p.call("collections", "OrderedDict", |_| {});
        if storage.is_none() {
            p.global("torch", dtype);
        }
    });
    pickle.finish()
}

fn row_major_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1u64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

/// The parts of a tensor in the order of its elements, none larger than `limit` bytes unless a single
/// element is.
fn pieces(shape: &[u64], width: u64, limit: u64) -> impl Iterator<Item = Region> {
    // Behind this dimension all fits; it is cut, and those before it are gone through one by one.
    let fits = |dim: usize| {
        let row = shape[dim + 1..]
            .iter()
            .try_fold(width, |n, s| n.checked_mul(*s));
        row.filter(|row| *row <= limit)
    };
    let cut = (0..shape.len()).find_map(|dim| Some((dim, (limit / fits(dim)?.max(1)).max(1))));
    let is_empty = shape.contains(&0);
    let whole = Region::whole(shape);
    let mut next = (!is_empty).then(|| whole.offsets.clone());
    std::iter::from_fn(move || {
        let mut piece = Region {
            offsets: next.take()?,
            sizes: whole.sizes.clone(),
        };
        let Some((dim, step)) = cut else {
            return Some(piece);
        };
        piece.sizes[..dim].fill(1);
        piece.sizes[dim] = step.min(whole.sizes[dim] - piece.offsets[dim]);
        next = following(&piece, dim, &whole.sizes);
        Some(piece)
    })
}

/// Where the piece after this one begins, unless it is the last.
fn following(piece: &Region, cut: usize, shape: &[u64]) -> Option<Vec<u64>> {
    let ends = |dim: &usize| piece.offsets[*dim] + piece.sizes[*dim] == shape[*dim];
    let dim = (0..=cut).rev().find(|dim| !ends(dim))?;
    let mut offsets = piece.offsets.clone();
    offsets[dim] += piece.sizes[dim];
    offsets[dim + 1..].fill(0);
    Some(offsets)
}

/// The pickle of a `Metadata`.
fn metadata(written: &[Written<'_>]) -> Vec<u8> {
    let mut pickle = PickleWriter::new();
    pickle.object(METADATA_MODULE, "Metadata", |p| {
        p.dict(|p| {
            p.str("state_dict_metadata");
            p.dict(|p| written.iter().for_each(|tensor| tensor_metadata(p, tensor)));
            p.str("planner_data");
            p.dict(|p| {
                for tensor in written {
                    p.str(tensor.name);
                    p.tuple(|p| path(tensor.name).into_iter().for_each(|key| p.str(key)));
                }
            });
            p.str("storage_data");
            p.dict(|p| written.iter().for_each(|tensor| storage_info(p, tensor)));
            p.str("storage_meta");
            p.none();
            p.str("version");
            p.str("1.0.0");
        });
    });
    pickle.finish()
}

fn tensor_metadata(p: &mut PickleWriter, tensor: &Written<'_>) {
    let shape = &tensor.chosen.info.shape;
    p.str(tensor.name);
    p.object(METADATA_MODULE, "TensorStorageMetadata", |p| {
        p.dict(|p| {
            p.str("properties");
            // Five items, which old and new versions read: type, layout, whether it requires a
            // gradient, memory format, whether its memory is pinned.
            p.object(METADATA_MODULE, "TensorProperties", |p| {
                p.tuple(|p| {
                    p.global("torch", tensor.chosen.dtype.0);
                    p.call("torch.serialization", "_get_layout", |p| {
                        p.str("torch.strided");
                    });
                    p.bool(false);
                    p.call(METADATA_MODULE, "_MEM_FORMAT_ENCODING", |p| p.int(0));
                    p.bool(false);
                });
            });
            p.str("size");
            size(p, shape);
            p.str("chunks");
            p.list(|p| {
                p.object(METADATA_MODULE, "ChunkStorageMetadata", |p| {
                    p.dict(|p| {
                        p.str("offsets");
                        size(p, &vec![0; shape.len()]);
                        p.str("sizes");
                        size(p, shape);
                    });
                });
            });
        });
    });
}

fn storage_info(p: &mut PickleWriter, tensor: &Written<'_>) {
    p.object(METADATA_MODULE, "MetadataIndex", |p| {
        p.dict(|p| {
            p.str("fqn");
            p.str(tensor.name);
            p.str("offset");
            size(p, &vec![0; tensor.chosen.info.shape.len()]);
            p.str("index");
            p.int(0);
        });
    });
    p.object(STORAGE_MODULE, "_StorageInfo", |p| {
        p.dict(|p| {
            p.str("relative_path");
            p.str(DATA);
            p.str("offset");
            p.int(tensor.offset);
            p.str("length");
            p.int(tensor.len);
        });
    });
}

fn size(p: &mut PickleWriter, dims: &[u64]) {
    p.call("torch", "Size", |p| p.ints(dims));
}

/// The keys that lead to a tensor through the nested dicts that PyTorch has.
fn path(name: &str) -> Vec<&str> {
    if let Some(parameter) = name.strip_prefix("model.").filter(|rest| !rest.is_empty()) {
        return vec!["model", parameter];
    }
    let state = name.strip_prefix("optim.state.");
    if let Some((parameter, field)) = state.and_then(|rest| rest.rsplit_once('.')) {
        return vec!["optim", "state", parameter, field];
    }
    vec![name]
}

/// Writes `.metadata`, whole or not at all.
fn write_metadata(dir: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = dir.join(".metadata.tmp");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| io_error("write", &temporary, error))?;
    let path = dir.join(METADATA);
    fs::rename(&temporary, &path).map_err(|error| io_error("write", &path, error))?;
    sync_dir(dir).map_err(|error| io_error("sync", dir, error))
}

/// Makes the names in a directory last.
#[cfg(unix)]
fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Other systems can't open directories.
#[cfg(not(unix))]
fn sync_dir(_: &Path) -> io::Result<()> {
    Ok(())
}

fn io_error(op: &str, path: &Path, error: io::Error) -> DcpError {
    DcpError::io(op, path.display(), error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_models_and_optimizers_become_nested() {
        assert_eq!(path("model.a.weight"), ["model", "a.weight"]);
        let state = ["optim", "state", "a.weight", "exp_avg"];
        assert_eq!(path("optim.state.a.weight.exp_avg"), state);
        for name in [
            "",
            "a.weight",
            "model",
            "model.",
            "optim.state.x",
            "models.x",
        ] {
            assert_eq!(path(name), [name]);
        }
    }

    #[test]
    fn a_row_beyond_the_limit_is_cut() {
        let sizes: Vec<_> = pieces(&[2, 5], 4, 8).map(|piece| piece.sizes).collect();
        let row = [vec![1, 2], vec![1, 2], vec![1, 1]];
        assert_eq!(sizes, [row.clone(), row].concat());
    }

    #[test]
    fn a_tensor_without_elements_has_no_pieces() {
        assert_eq!(pieces(&[3, 0], 4, 8).count(), 0);
        assert_eq!(pieces(&[u64::MAX, u64::MAX, 0], 4, 8).count(), 0);
        assert_eq!(pieces(&[], 4, 8).count(), 1);
    }

    proptest! {
        #[test]
        fn pieces_follow_each_other_through_the_tensor(
            shape in prop::collection::vec(0u64..7, 0..4),
            width in 1u64..9,
            limit in 8u64..200,
        ) {
            let whole = Region::whole(&shape);
            let mut next = 0;
            for piece in pieces(&shape, width, limit) {
                prop_assert!(piece.volume().unwrap() * width <= limit);
                let runs: Vec<_> = whole.runs(&piece).collect();
                prop_assert_eq!(runs.len(), 1);
                prop_assert_eq!(runs[0].from, next);
                next += runs[0].len;
            }
            prop_assert_eq!(next, whole.volume().unwrap());
        }
    }
}
