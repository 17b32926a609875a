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

#[cfg(test)]
mod tests {
    use super::super::pickle_writer::PickleWriter;
    use super::*;

    type Sizes<'a> = &'a [(&'a [u64], &'a [u64])];

    /// The metadata of tensors of one shape and of these chunks, each of which is in a file.
    fn metadata(names: &[&str], shape: &[u64], chunks: Sizes<'_>) -> Vec<u8> {
        let mut pickle = PickleWriter::new();
        pickle.object(METADATA_MODULE, "Metadata", |p| {
            p.dict(|p| {
                p.str("state_dict_metadata");
                p.dict(|p| names.iter().for_each(|name| tensor(p, name, shape, chunks)));
                p.str("storage_data");
                p.dict(|p| {
                    for name in names {
                        let parts = chunks.iter().filter(|(_, sizes)| !sizes.contains(&0));
                        parts.for_each(|(offsets, _)| place(p, name, offsets));
                    }
                });
            });
        });
        pickle.finish()
    }

    fn tensor(p: &mut PickleWriter, name: &str, shape: &[u64], chunks: Sizes<'_>) {
        p.str(name);
        p.object(METADATA_MODULE, "TensorStorageMetadata", |p| {
            p.dict(|p| {
                p.str("properties");
                p.object(METADATA_MODULE, "TensorProperties", |p| {
                    p.tuple(|p| p.global("torch", "float32"));
                });
                p.str("size");
                p.ints(shape);
                p.str("chunks");
                p.list(|p| {
                    for (offsets, sizes) in chunks {
                        p.object(METADATA_MODULE, "ChunkStorageMetadata", |p| {
                            p.dict(|p| {
                                p.str("offsets");
                                p.ints(offsets);
                                p.str("sizes");
                                p.ints(sizes);
                            });
                        });
                    }
                });
            });
        });
    }

    fn place(p: &mut PickleWriter, name: &str, offsets: &[u64]) {
        p.object(METADATA_MODULE, "MetadataIndex", |p| {
            p.dict(|p| {
                p.str("fqn");
                p.str(name);
                p.str("offset");
                p.ints(offsets);
            });
        });
        p.object(STORAGE_MODULE, "_StorageInfo", |p| {
            p.dict(|p| {
                p.str("relative_path");
                p.str("file");
                p.str("offset");
                p.int(0);
                p.str("length");
                p.int(10);
            });
        });
    }

    fn error_of(shape: &[u64], chunks: Sizes<'_>) -> String {
        Metadata::parse(&metadata(&["w"], shape, chunks)).unwrap_err()
    }

    #[test]
    fn chunks_without_elements_are_skipped() {
        let chunks: Sizes<'_> = &[(&[0], &[2]), (&[2], &[0]), (&[2], &[0])];
        let metadata = Metadata::parse(&metadata(&["w"], &[2], chunks)).unwrap();
        assert_eq!(metadata.tensors["w"].chunks.len(), 1);
    }

    #[test]
    fn a_grid_of_chunks_is_read() {
        let bytes = metadata(
            &["w"],
            &[2, 4],
            &[
                (&[0, 2], &[1, 2]),
                (&[1, 0], &[1, 2]),
                (&[0, 0], &[1, 2]),
                (&[1, 2], &[1, 2]),
            ],
        );
        let metadata = Metadata::parse(&bytes).unwrap();
        assert_eq!(metadata.tensors["w"].chunks.len(), 4);
    }

    #[test]
    fn chunks_that_overlap_are_refused() {
        let error = error_of(&[2, 4], &[(&[0, 0], &[1, 3]), (&[0, 2], &[2, 2])]);
        assert!(error.contains("\"w\""), "{error}");
        assert!(
            error.contains("[0, 0] and [0, 2] have elements in common"),
            "{error}"
        );
        let error = error_of(&[], &[(&[], &[]), (&[], &[])]);
        assert!(error.contains("two places"), "{error}");
    }

    #[test]
    fn chunks_beyond_their_tensor_are_refused() {
        for chunk in [
            (&[1][..], &[2][..]),
            (&[0], &[3]),
            (&[u64::MAX], &[2]),
            (&[0, 0], &[1, 1]),
        ] {
            let error = error_of(&[2], &[chunk]);
            assert!(error.contains("does not lie in its shape"), "{error}");
        }
    }

    #[test]
    fn shapes_beyond_64_bits_are_refused() {
        let error = error_of(&[u64::MAX, 2], &[]);
        assert!(error.contains("too large"), "{error}");
        let error = error_of(&[1; 65], &[]);
        assert!(error.contains("no shape"), "{error}");
    }

    #[test]
    fn a_tensor_listed_twice_is_refused() {
        let mut bytes = metadata(&["v", "w"], &[2], &[(&[0], &[2])]);
        let at = bytes.iter().position(|b| *b == b'v').unwrap();
        bytes[at] = b'w';
        let error = Metadata::parse(&bytes).unwrap_err();
        assert!(error.contains("\"w\" is listed twice"), "{error}");
    }

    #[test]
    fn a_chunk_without_a_place_is_refused() {
        let mut bytes = metadata(&["w"], &[2], &[(&[0], &[2])]);
        let at = bytes.iter().rposition(|b| *b == b'w').unwrap();
        bytes[at] = b'v';
        let error = Metadata::parse(&bytes).unwrap_err();
        assert!(
            error.contains("tensor \"w\": the chunk at [0] is in no file"),
            "{error}"
        );
    }

    #[test]
    fn a_type_that_burn_lacks_is_named() {
        let bytes = metadata(&["w"], &[2], &[(&[0], &[2])]);
        let position = bytes.windows(7).position(|w| w == b"float32").unwrap();
        let bytes = [&bytes[..position], b"float8_e5m2", &bytes[position + 7..]].concat();
        let error = Metadata::parse(&bytes).unwrap_err();
        assert!(
            error.contains("\"w\": its type torch.float8_e5m2"),
            "{error}"
        );
    }

    #[test]
    fn chunks_that_are_shared_too_often_are_refused() {
        // One list of 200 empty chunks, and 2000 tensors that refer to it.
        let mut pickle = PickleWriter::new();
        pickle.object(METADATA_MODULE, "Metadata", |p| {
            p.dict(|p| {
                p.str("state_dict_metadata");
                p.dict(|p| {
                    let chunks = [(&[0u64][..], &[0u64][..]); 200];
                    tensor(p, "a", &[0], &chunks);
                    p.put(0);
                    for n in 0..2000 {
                        p.str(&n.to_string());
                        p.get(0);
                    }
                });
                p.str("storage_data");
                p.dict(|_| {});
            });
        });
        let error = Metadata::parse(&pickle.finish()).unwrap_err();
        assert!(
            error.contains("more chunks than are written down"),
            "{error}"
        );
    }
}
