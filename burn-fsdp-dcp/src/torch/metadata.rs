//! What `.metadata` says: the tensors, and where their parts are.

use std::collections::{BTreeMap, HashMap};

use super::blob::dims;
use super::pickle::{Allowed, Node, Pickle};
use super::{METADATA_MODULE, STORAGE_MODULE, dtype_of_global};
use crate::region::{Region, volume};
use crate::source::TensorInfo;

const ALLOWED: &Allowed = &[
    (
        METADATA_MODULE,
        &[
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ],
    ),
    (STORAGE_MODULE, &["_StorageInfo"]),
    ("torch.serialization", &["_get_layout"]),
    // Only the name under which the checkpoint was saved. The module differs between Pythons.
    ("pathlib", &["PosixPath", "WindowsPath"]),
    ("pathlib._local", &["PosixPath", "WindowsPath"]),
    (
        "torch",
        &[
            "Size",
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint64",
            "uint32",
            "uint16",
            "uint8",
            "bool",
            // Of these there are no tensors in Burn, which is said of each tensor.
            "complex32",
            "complex64",
            "complex128",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ],
    ),
];

/// What `.metadata` says.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    pub(super) tensors: BTreeMap<String, TensorMeta>,
    pub(super) values: BTreeMap<String, Place>,
    /// The names of the files, as they are given.
    pub(super) files: Vec<String>,
}

#[derive(Debug)]
pub(super) struct TensorMeta {
    pub(super) info: TensorInfo,
    /// Its parts that have elements. They lie within it, and have none in common.
    pub(super) chunks: Vec<(Region, Place)>,
}

/// A range of one of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Why it is not read, in words.
type Result<T> = std::result::Result<T, String>;

/// Places by name, and for tensors by where the chunk begins.
type Places<'p> = HashMap<(&'p str, Option<Vec<u64>>), Place>;

impl Metadata {
    /// Reads the bytes of a file `.metadata`.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let pickle = Pickle::parse(bytes, ALLOWED).map_err(|error| error.to_string())?;
        let root = pickle.root();
        check_version(root)?;
        let mut metadata = Self::default();
        let places = metadata.read_places(root)?;
        // Entries may share what they hold, but each chunk is written out in an honest file.
        let mut room = pickle.len();
        let entries = root.field("state_dict_metadata").and_then(Node::pairs);
        for (name, entry) in entries.ok_or("it does not list the tensors")? {
            let name = name.str().ok_or("a tensor's name is not text")?;
            let known = metadata.tensors.contains_key(name) || metadata.values.contains_key(name);
            if known {
                return Err(format!("tensor \"{name}\" is listed twice"));
            }
            match entry.class() {
                Some((METADATA_MODULE, "TensorStorageMetadata")) => {
                    let tensor = read_tensor(name, entry, &places, &mut room)
                        .map_err(|detail| format!("tensor \"{name}\": {detail}"))?;
                    metadata.tensors.insert(name.to_string(), tensor);
                }
                Some((METADATA_MODULE, "BytesStorageMetadata")) => {
                    let place = places.get(&(name, None));
                    let place = place.ok_or_else(|| format!("value \"{name}\" is in no file"))?;
                    metadata.values.insert(name.to_string(), *place);
                }
                _ => return Err(format!("\"{name}\" is neither a tensor nor a value")),
            }
        }
        Ok(metadata)
    }

    fn read_places<'p>(&mut self, root: Node<'p>) -> Result<Places<'p>> {
        let mut places = Places::new();
        let mut files = HashMap::new();
        let entries = root.field("storage_data").and_then(Node::pairs);
        for (index, info) in entries.ok_or("it does not say where the parts are")? {
            let key = index.field("fqn").and_then(Node::str);
            let offset = index.field("offset").filter(|offset| !offset.is_none());
            let name = key.ok_or("a part has no name")?;
            let at = match offset {
                Some(offset) => Some(size(offset).ok_or_else(|| {
                    format!("tensor \"{name}\": where a chunk begins is not a list of numbers")
                })?),
                None => None,
            };
            let place = self
                .read_place(info, &mut files)
                .map_err(|detail| format!("tensor \"{name}\", chunk at {at:?}: {detail}"))?;
            if places.insert((name, at), place).is_some() {
                return Err(format!("tensor \"{name}\": a chunk is at two places"));
            }
        }
        Ok(places)
    }

    fn read_place<'p>(
        &mut self,
        info: Node<'p>,
        files: &mut HashMap<&'p str, usize>,
    ) -> Result<Place> {
        let transforms = info.field("transform_descriptors").and_then(Node::items);
        if transforms.is_some_and(|transforms| transforms.len() > 0) {
            return Err("it is compressed or otherwise transformed".into());
        }
        let path = info.field("relative_path").and_then(Node::str);
        let path = path.ok_or("it names no file")?;
        let start = info.field("offset").and_then(Node::u64);
        let len = info.field("length").and_then(Node::u64);
        let range = start.zip(len);
        let (start, end) = range
            .and_then(|(start, len)| Some((start, start.checked_add(len)?)))
            .ok_or("its range of the file is not one")?;
        let file = *files.entry(path).or_insert_with(|| {
            self.files.push(path.to_string());
            self.files.len() - 1
        });
        Ok(Place { file, start, end })
    }
}

fn check_version(root: Node<'_>) -> Result<()> {
    if root.class() != Some((METADATA_MODULE, "Metadata")) {
        return Err("it does not hold the metadata of a checkpoint".into());
    }
    // The first versions did not write it.
    match root.field("version").and_then(Node::str) {
        Some(version) if !version.starts_with("1.") => {
            Err(format!("version {version:.20} of the format is not known"))
        }
        _ => Ok(()),
    }
}

fn read_tensor(
    name: &str,
    entry: Node<'_>,
    places: &Places<'_>,
    room: &mut usize,
) -> Result<TensorMeta> {
    let properties = entry.field("properties").and_then(Node::state);
    let dtype = properties.and_then(|properties| properties.item(0)?.global());
    let dtype = dtype_of_global(dtype).ok_or_else(|| match dtype {
        Some((module, name)) => format!("its type {module}.{name} has no equal in Burn"),
        None => "it has no type".to_string(),
    })?;
    let shape = entry
        .field("size")
        .and_then(size)
        .ok_or("it has no shape")?;
    let bytes = volume(&shape).and_then(|volume| volume.checked_mul(dtype.size() as u64));
    if bytes.is_none() {
        return Err(format!("its shape {shape:?} is too large"));
    }
    let mut chunks = Vec::new();
    let listed = entry.field("chunks").and_then(Node::items);
    for chunk in listed.ok_or("it has no chunks")? {
        *room = { room.checked_sub(1) }.ok_or("it has more chunks than are written down")?;
        let region = chunk_region(chunk).ok_or("a chunk has no offsets or sizes")?;
        let at = &region.offsets;
        if !region.fits(&shape) {
            return Err(format!(
                "the chunk at {at:?} does not lie in its shape {shape:?}"
            ));
        }
        if region.is_empty() {
            continue;
        }
        let place = { places.get(&(name, Some(at.clone()))) }
            .ok_or_else(|| format!("the chunk at {at:?} is in no file"))?;
        chunks.push((region, *place));
    }
    check_disjoint(&mut chunks)?;
    Ok(TensorMeta {
        info: TensorInfo { dtype, shape },
        chunks,
    })
}

fn chunk_region(chunk: Node<'_>) -> Option<Region> {
    Some(Region {
        offsets: chunk.field("offsets").and_then(size)?,
        sizes: chunk.field("sizes").and_then(size)?,
    })
}

/// A `torch.Size`, or a plain tuple.
fn size(node: Node<'_>) -> Option<Vec<u64>> {
    match node.class() {
        Some(("torch", "Size")) => dims(node.args()?.item(0)?),
        Some(_) => None,
        None => dims(node),
    }
}

/// Sweeps along the dimension in which the chunks differ most, and so meets few others at each.
fn check_disjoint(chunks: &mut [(Region, Place)]) -> Result<()> {
    let rank = chunks.first().map_or(0, |chunk| chunk.0.offsets.len());
    let starts = |dim: usize| {
        let mut starts: Vec<u64> = chunks.iter().map(|chunk| chunk.0.offsets[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let along = (0..rank).max_by_key(|dim| starts(*dim));
    let start = |region: &Region| along.map_or(0, |dim| region.offsets[dim]);
    let end = |region: &Region| along.map_or(1, |dim| region.offsets[dim] + region.sizes[dim]);
    chunks.sort_by_key(|chunk| start(&chunk.0));
    let mut open: Vec<&Region> = Vec::new();
    for (region, _) in chunks.iter() {
        open.retain(|other| end(other) > start(region));
        if let Some(other) = open.iter().find(|o| o.intersection(region).is_some()) {
            return Err(format!(
                "the chunks at {:?} and {:?} have elements in common",
                other.offsets, region.offsets
            ));
        }
        open.push(region);
    }
    Ok(())
}
