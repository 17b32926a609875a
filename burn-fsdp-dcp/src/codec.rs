//! The one place that knows how tables and values become bytes.
//!
//! The bytes are specified in the crate's documentation. Tables (the manifest, a rank's part of it, and
//! messages between ranks) are bincode in an envelope with a checksum; values that users save are CBOR,
//! which describes itself.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{DcpError, Result};

pub(crate) const MAGIC: [u8; 8] = *b"BFSDPDCP";
pub(crate) const VERSION: u32 = 1;
const PREFIX: usize = 8 + 4 + 8;
const SUFFIX: usize = 4;

pub(crate) fn encode_table<T: Serialize>(table: &T) -> Vec<u8> {
    let body = bincode::serde::encode_to_vec(table, bincode::config::standard())
        .expect("tables are made of numbers, strings, lists and maps");
    let mut bytes = Vec::with_capacity(PREFIX + body.len() + SUFFIX);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    let checksum = crc32fast::hash(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// The reverse of [`encode_table`]; `path` is for messages.
pub(crate) fn decode_table<T: DeserializeOwned>(bytes: &[u8], path: &str) -> Result<T> {
    let corrupt = |detail: &str| DcpError::corrupt(path, detail);
    let Some((magic, _)) = bytes.split_first_chunk::<8>() else {
        return Err(corrupt("it is too short"));
    };
    if *magic != MAGIC {
        return Err(DcpError::NotACheckpoint {
            path: path.to_string(),
            reason: "its first bytes are not those of a manifest".to_string(),
        });
    }
    if bytes.len() < PREFIX + SUFFIX {
        return Err(corrupt("it is too short"));
    }
    let version = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
    if version != VERSION {
        return Err(DcpError::UnsupportedVersion {
            path: path.to_string(),
            found: version,
            supported: VERSION,
        });
    }
    let len = u64::from_le_bytes(bytes[12..PREFIX].try_into().expect("eight bytes"));
    let (content, checksum) = bytes.split_at(bytes.len() - SUFFIX);
    if len != (content.len() - PREFIX) as u64 {
        return Err(corrupt("it is cut short, or has bytes too many"));
    }
    if crc32fast::hash(content).to_le_bytes() != *checksum {
        return Err(corrupt("it fails its checksum"));
    }
    decode_body(&content[PREFIX..]).map_err(|detail| corrupt(&detail))
}

/// The checksum has been right, so this guards against a writer that means ill: nothing is allocated
/// that is much larger than the input.
fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    match body.len() {
        0..=0xffff => decode_within::<T, { 16 << 16 }>(body),
        0x1_0000..=0xff_ffff => decode_within::<T, { 16 << 24 }>(body),
        _ => decode_within::<T, { 16 << 32 }>(body),
    }
}

fn decode_within<T: DeserializeOwned, const LIMIT: usize>(body: &[u8]) -> Result<T, String> {
    let config = bincode::config::standard().with_limit::<LIMIT>();
    let (table, read) = bincode::serde::decode_from_slice(body, config)
        .map_err(|error| format!("its table can't be read: {error}"))?;
    if read != body.len() {
        return Err("its table has bytes too many".to_string());
    }
    Ok(table)
}

pub(crate) fn encode_value<T: Serialize + ?Sized>(name: &str, value: &T) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).map_err(|error| bad_state(name, error))?;
    Ok(bytes)
}

pub(crate) fn decode_value<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T> {
    let mut rest = bytes;
    let value = ciborium::from_reader(&mut rest).map_err(|error| bad_state(name, error))?;
    if !rest.is_empty() {
        return Err(bad_state(name, "bytes are left over"));
    }
    Ok(value)
}

fn bad_state(name: &str, detail: impl ToString) -> DcpError {
    DcpError::BadState {
        name: name.to_string(),
        detail: detail.to_string(),
    }
}
