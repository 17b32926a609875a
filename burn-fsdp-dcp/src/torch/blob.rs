//! One part of a tensor, or one value, as `torch.save` writes it.

use std::ops::Range;

use burn::tensor::DType;

use super::pickle::{Allowed, Node, Pickle, PickleError};
use super::value::TorchValue;
use super::zip::{Archive, ReadAt, ZipError};
use super::{DTYPES, dtype_of_global};
use crate::region::volume;

const ALLOWED: &Allowed = &[
    (
        "torch._utils",
        &["_rebuild_tensor_v2", "_rebuild_tensor_v3"],
    ),
    ("torch.storage", &["UntypedStorage"]),
    ("collections", &["OrderedDict"]),
    (
        "torch",
        &[
            "DoubleStorage",
            "FloatStorage",
            "HalfStorage",
            "BFloat16Storage",
            "LongStorage",
            "IntStorage",
            "ShortStorage",
            "CharStorage",
            "ByteStorage",
            "BoolStorage",
            "uint64",
            "uint32",
            "uint16",
        ],
    ),
];

type Result<T> = std::result::Result<T, ZipError>;

fn bad<T>(detail: impl Into<String>) -> Result<T> {
    Err(ZipError::Malformed(detail.into()))
}

/// Where the elements of a part lie in their file.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) dtype: DType,
    pub(super) sizes: Vec<u64>,
    /// How far apart neighbours lie in each dimension, unless row by row.
    pub(super) strides: Option<Vec<u64>>,
    /// The bytes in the file that hold the elements.
    pub(super) data: Range<u64>,
    /// The checksum of these bytes, if there is one.
    pub(super) crc: Option<u32>,
}

/// Reads where the elements are of the tensor in a range of a file.
pub(super) fn read_layout(file: &dyn ReadAt, range: Range<u64>) -> Result<Layout> {
    let archive = Archive::open(file, range.clone())?;
    check_byte_order(&archive)?;
    let bytes = read_pickle(&archive)?;
    let pickle = Pickle::parse(&bytes, ALLOWED).map_err(malformed)?;
    let Some(tensor) = Tensor::of(pickle.root()) else {
        return bad("data.pkl does not hold a tensor of a known kind");
    };
    let width = tensor.dtype.size() as u64;
    let Some(stored) = archive.find(&format!("data/{}", tensor.key))? else {
        return bad(format!("the archive has no data/{}", tensor.key));
    };
    if Some(stored.len) != tensor.storage_len {
        return bad(format!(
            "{} bytes are stored, but data.pkl claims a storage of another size",
            stored.len
        ));
    }
    let Some(span) = tensor.span() else {
        return bad("its sizes and strides do not go together");
    };
    let begin = tensor.offset.checked_mul(width);
    let end = begin.and_then(|begin| begin.checked_add(span.checked_mul(width)?));
    let (Some(begin), Some(end)) = (begin, end.filter(|end| *end <= stored.len)) else {
        return bad("its elements reach beyond its storage");
    };
    let is_whole = begin == 0 && end == stored.len;
    let start = range.start + stored.start;
    Ok(Layout {
        dtype: tensor.dtype,
        strides: Some(tensor.strides).filter(|strides| !is_row_major(&tensor.sizes, strides)),
        sizes: tensor.sizes,
        data: start + begin..start + end,
        crc: stored.crc.filter(|_| is_whole),
    })
}

/// Reads the value in a range of a file.
pub(super) fn read_value(file: &dyn ReadAt, range: Range<u64>) -> Result<TorchValue> {
    let archive = Archive::open(file, range)?;
    let bytes = read_pickle(&archive)?;
    match Pickle::parse(&bytes, &[]) {
        Ok(pickle) => Ok(TorchValue::from_pickle(&pickle, bytes.len())),
        // An object of some class is no fault of the checkpoint.
        Err(error @ PickleError::Forbidden { .. }) => {
            Ok(TorchValue::Unsupported(error.to_string()))
        }
        Err(error) => Err(malformed(error)),
    }
}

fn check_byte_order(archive: &Archive<'_>) -> Result<()> {
    let Some(entry) = archive.find("byteorder")? else {
        return Ok(());
    };
    if *archive.read(entry)? != *b"little" {
        return bad("its elements are not little-endian");
    }
    Ok(())
}

fn read_pickle(archive: &Archive<'_>) -> Result<Vec<u8>> {
    let Some(entry) = archive.find("data.pkl")? else {
        return bad("the archive has no data.pkl");
    };
    Ok(archive.read(entry)?.into_owned())
}

fn malformed(error: PickleError) -> ZipError {
    ZipError::Malformed(format!("data.pkl: {error}"))
}

/// What `data.pkl` says of a tensor.
struct Tensor<'p> {
    dtype: DType,
    /// The name of its data in the archive.
    key: &'p str,
    /// The size of the storage in bytes.
    storage_len: Option<u64>,
    /// Its first element in the storage.
    offset: u64,
    sizes: Vec<u64>,
    strides: Vec<u64>,
}

impl<'p> Tensor<'p> {
    fn of(node: Node<'p>) -> Option<Self> {
        let args = node.args()?;
        let storage = args.item(0)?.persistent()?;
        let class = storage.item(1)?.global()?;
        let claimed = storage.item(4)?.u64()?;
        if storage.item(0)?.str()? != "storage" {
            return None;
        }
        let (dtype, storage_len) = match node.class()? {
            ("torch._utils", "_rebuild_tensor_v2") => {
                let dtype = dtype_of_storage(class)?;
                (dtype, claimed.checked_mul(dtype.size() as u64))
            }
            // Types without a storage of their own; its size is in bytes.
            ("torch._utils", "_rebuild_tensor_v3") => {
                (dtype_of_global(args.item(6)?.global())?, Some(claimed))
            }
            _ => return None,
        };
        Some(Self {
            dtype,
            key: storage.item(2)?.str()?,
            storage_len,
            offset: args.item(1)?.u64()?,
            sizes: dims(args.item(2)?)?,
            strides: dims(args.item(3)?)?,
        })
    }

    /// How many elements of the storage it reaches over; none if its strides make no sense.
    fn span(&self) -> Option<u64> {
        if self.sizes.len() != self.strides.len() {
            return None;
        }
        if self.sizes.contains(&0) {
            return Some(0);
        }
        let mut dims = self.sizes.iter().zip(&self.strides);
        let last = dims.try_fold(0u64, |last, (size, stride)| {
            last.checked_add((size - 1).checked_mul(*stride)?)
        })?;
        let span = last.checked_add(1)?;
        // Elements that share their place would make the tensor larger than what is stored.
        (volume(&self.sizes)? <= span).then_some(span)
    }
}

fn dtype_of_storage((module, class): (&str, &str)) -> Option<DType> {
    let found = DTYPES.iter().find(|(_, known, _)| *known == Some(class));
    found.filter(|_| module == "torch").map(|found| found.2)
}

/// The most dimensions that a tensor may have.
const MAX_DIMS: usize = 64;

/// The numbers in a tuple.
pub(super) fn dims(node: Node<'_>) -> Option<Vec<u64>> {
    let items = node.items()?;
    if items.len() > MAX_DIMS {
        return None;
    }
    items.map(Node::u64).collect()
}

fn is_row_major(sizes: &[u64], strides: &[u64]) -> bool {
    if sizes.contains(&0) {
        return true;
    }
    let mut due = 1u64;
    { sizes.iter().zip(strides).rev() }.all(|(size, stride)| {
        let fits = *size == 1 || *stride == due;
        due = due.saturating_mul(*size);
        fits
    })
}
