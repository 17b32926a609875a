//! A shard file: what one rank has written, as safetensors with the id of its checkpoint.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::host::HostBytes;
use crate::manifest::{BLOCK, CheckpointId, Extent, FileEntry};
use crate::storage::{Location, ReadFile};
use crate::{DcpError, Result};

/// The key under which a file's header has the id of its checkpoint.
const ID_KEY: &str = "burn_fsdp_dcp.checkpoint";
/// As long as safetensors allows.
const MAX_HEADER: u64 = 100_000_000;

/// Something to be written to a shard file.
pub(crate) struct Entry<'a> {
    /// Its name within the file.
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) len: u64,
    /// Draws the bytes, once, when it is their turn.
    pub(crate) bytes: Box<dyn FnOnce() -> Result<HostBytes> + Send + 'a>,
}

#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<&'a str, String>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, TensorHeader<'a>>,
}

#[derive(Serialize)]
struct TensorHeader<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// Writes a shard file, drawing one entry's bytes at a time; where each went.
///
/// # Panics
///
/// If an entry brings another number of bytes than it said.
pub(crate) fn write(
    location: &Location,
    name: &str,
    rank: u64,
    file: u64,
    id: CheckpointId,
    entries: Vec<Entry<'_>>,
) -> Result<(FileEntry, Vec<Extent>)> {
    let header = header(id, rank, &entries);
    if header.len() as u64 > MAX_HEADER {
        let detail = "the names of tensors and states of one file make a header that is too long";
        return Err(DcpError::argument(detail));
    }
    let header_checksum = crc32fast::hash(&header);
    let path = location.path(name);
    let mut out = location.storage().create(&path)?;
    let failed = |error: std::io::Error| DcpError::io("write", location.display_file(name), error);
    let mut offset = header.len() as u64;
    out.write_all(&header).map_err(failed)?;
    let mut extents = Vec::with_capacity(entries.len());
    for entry in entries {
        let bytes = (entry.bytes)()?;
        let bytes = (*bytes).as_ref();
        assert_eq!(bytes.len() as u64, entry.len, "bytes of {}", entry.name);
        let mut checksums = Vec::with_capacity(bytes.len().div_ceil(BLOCK as usize));
        // A few blocks at a time, so that they are still in the cache when they are written.
        for piece in bytes.chunks(16 * BLOCK as usize) {
            checksums.extend(piece.chunks(BLOCK as usize).map(crc32fast::hash));
            out.write_all(piece).map_err(failed)?;
        }
        extents.push(Extent {
            file,
            offset,
            len: entry.len,
            checksums,
        });
        offset += entry.len;
    }
    out.finish()?;
    let file = FileEntry {
        name: name.to_string(),
        len: offset,
        rank,
        header_checksum,
    };
    Ok((file, extents))
}

/// The bytes before the first tensor.
fn header(id: CheckpointId, rank: u64, entries: &[Entry<'_>]) -> Vec<u8> {
    let mut at = 0;
    let mut tensors = BTreeMap::new();
    for entry in entries {
        let tensor = TensorHeader {
            dtype: entry.dtype,
            shape: &entry.shape,
            data_offsets: [at, at + entry.len],
        };
        tensors.insert(entry.name.as_str(), tensor);
        at += entry.len;
    }
    let metadata = BTreeMap::from([
        (ID_KEY, id.to_string()),
        ("burn_fsdp_dcp.rank", rank.to_string()),
    ]);
    let header = Header { metadata, tensors };
    let mut json = serde_json::to_vec(&header).expect("a header is made of strings and numbers");
    // So that the data begins at a multiple of eight.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    bytes
}

/// Opens a shard file and checks that it is the one that the manifest means.
pub(crate) fn open(
    location: &Location,
    entry: &FileEntry,
    id: CheckpointId,
) -> Result<Arc<dyn ReadFile>> {
    let path = location.display_file(&entry.name);
    let Some(file) = location.storage().open(&location.path(&entry.name))? else {
        return Err(DcpError::MissingFile { file: path });
    };
    if file.len() != entry.len {
        return Err(DcpError::WrongLength {
            file: path,
            expected: entry.len,
            found: file.len(),
        });
    }
    let header = read_header(&*file, &path)?;
    let found = id_in(&header[8..]);
    if let Some(found) = found.filter(|found| *found != id.to_string()) {
        return Err(DcpError::ForeignShard {
            file: path,
            expected: id.to_string(),
            found,
        });
    }
    if crc32fast::hash(&header) != entry.header_checksum {
        return Err(DcpError::corrupt(path, "its header fails its checksum"));
    }
    Ok(file)
}

fn read_header(file: &dyn ReadFile, path: &str) -> Result<Vec<u8>> {
    let corrupt = |detail: String| DcpError::corrupt(path, detail);
    let mut len = [0; 8];
    if file.len() < 8 {
        return Err(corrupt("it is too short for a header".to_string()));
    }
    file.read_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER || len > file.len() - 8 {
        return Err(corrupt(format!("its header claims {len} bytes")));
    }
    let mut header = vec![0; 8 + len as usize];
    file.read_at(&mut header, 0)?;
    Ok(header)
}

/// The id of the checkpoint that a file says it belongs to.
fn id_in(json: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct IdOnly {
        #[serde(rename = "__metadata__")]
        metadata: BTreeMap<String, String>,
    }
    let header: IdOnly = serde_json::from_slice(json).ok()?;
    header.metadata.get(ID_KEY).cloned()
}
