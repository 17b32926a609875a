//! The header of a safetensors file: a length, JSON, and then the data. Nothing in it is trusted.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::region::volume;
use crate::{DcpError, Result, TensorInfo, dtype_of};

/// The longest JSON that is read or written; the limit of the safetensors library.
pub(super) const MAX_JSON: u64 = 100_000_000;

/// The key in the header that is no tensor.
pub(super) const METADATA: &str = "__metadata__";

/// What a file says of itself, found to be consistent.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Entry>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// One tensor in a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) info: TensorInfo,
    /// Where its first byte is in the file.
    pub(super) start: u64,
}

impl Header {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (file, len) = open_regular(path)?;
        Self::read(file, len, &path.display().to_string())
    }

    /// Reads the header of a file of `file_len` bytes.
    pub(super) fn read(mut from: impl Read, file_len: u64, file: &str) -> Result<Self> {
        let mut prefix = [0; 8];
        if file_len < 8 {
            let detail = format!("{file_len} bytes are too few for a safetensors file");
            return Err(DcpError::foreign(file, detail));
        }
        { from.read_exact(&mut prefix) }.map_err(|e| DcpError::io("read", file, e))?;
        let json_len = u64::from_le_bytes(prefix);
        if json_len > MAX_JSON || json_len > file_len - 8 {
            let detail = format!("a header of {json_len} bytes in a file of {file_len}");
            return Err(DcpError::foreign(file, detail));
        }
        let mut json = vec![0; json_len as usize];
        { from.read_exact(&mut json) }.map_err(|e| DcpError::io("read", file, e))?;
        if json.first() != Some(&b'{') {
            return Err(DcpError::foreign(
                file,
                "the header does not begin with '{'",
            ));
        }
        let raw: RawHeader = serde_json::from_slice(&json)
            .map_err(|e| DcpError::foreign(file, format!("header: {e}")))?;
        let data = 8 + json_len..file_len;
        let tensors = place(raw.tensors, data).map_err(|detail| DcpError::foreign(file, detail))?;
        Ok(Self {
            tensors,
            metadata: raw.metadata.unwrap_or_default(),
        })
    }
}

/// Opens what must be a regular file (another kind could block); gives its length.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let fail = |e| DcpError::io("open", path.display(), e);
    let metadata = fs::metadata(path).map_err(fail)?;
    if !metadata.is_file() {
        return Err(DcpError::foreign(path.display(), "not a regular file"));
    }
    Ok((File::open(path).map_err(fail)?, metadata.len()))
}

/// Checks that the tensors fill the data, one behind the other, and finds each in the file.
fn place(
    raw: BTreeMap<String, RawEntry>,
    data: std::ops::Range<u64>,
) -> Result<BTreeMap<String, Entry>, String> {
    let mut spans = Vec::with_capacity(raw.len());
    let mut tensors = BTreeMap::new();
    for (name, entry) in raw {
        let [begin, end] = entry.data_offsets;
        let info = entry.info().map_err(|e| format!("tensor {name:?}: {e}"))?;
        spans.push((begin, end, name.clone()));
        let start = data.start.saturating_add(begin);
        tensors.insert(name, Entry { info, start });
    }
    spans.sort();
    let mut filled = 0;
    for (begin, end, name) in spans {
        if begin != filled {
            return Err(format!(
                "tensor {name:?}: its data begin at {begin}, but those before end at {filled}"
            ));
        }
        filled = end;
    }
    let len = data.end - data.start;
    if filled != len {
        return Err(format!(
            "{len} bytes of data, where the header describes {filled}"
        ));
    }
    Ok(tensors)
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawEntry {
    /// What the tensor is, if its length in bytes agrees.
    fn info(&self) -> Result<TensorInfo, String> {
        let dtype = dtype_of(&self.dtype)
            .ok_or_else(|| format!("elements of type {:?} are not supported", self.dtype))?;
        let bytes = volume(&self.shape)
            .and_then(|n| n.checked_mul(dtype.size() as u64))
            .ok_or_else(|| format!("a shape of {:?} is too large", self.shape))?;
        let [begin, end] = self.data_offsets;
        if end.checked_sub(begin) != Some(bytes) {
            return Err(format!(
                "data from {begin} to {end}, where {} of shape {:?} takes {bytes} bytes",
                self.dtype, self.shape
            ));
        }
        Ok(TensorInfo {
            dtype,
            shape: self.shape.clone(),
        })
    }
}

#[derive(Default)]
struct RawHeader {
    tensors: BTreeMap<String, RawEntry>,
    metadata: Option<BTreeMap<String, String>>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        while let Some(name) = map.next_key::<String>()? {
            let is_known = if name == METADATA {
                let Unique(metadata) = map.next_value()?;
                header.metadata.replace(metadata).is_some()
            } else {
                let entry = map.next_value();
                let entry = entry.map_err(|e| A::Error::custom(format!("tensor {name:?}: {e}")))?;
                header.tensors.insert(name.clone(), entry).is_some()
            };
            if is_known {
                return Err(A::Error::custom(format!("{name:?} is there twice")));
            }
        }
        Ok(header)
    }
}

/// A JSON object in which no key is there twice. The usual maps would keep the last, silently.
pub(super) struct Unique<V>(pub(super) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
        let mut values = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            if values.contains_key(&key) {
                return Err(A::Error::custom(format!("{key:?} is there twice")));
            }
            values.insert(key, value);
        }
        Ok(Unique(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Header> {
        Header::read(bytes, bytes.len() as u64, "x.safetensors")
    }

    fn refusal(json: &str, data: usize) -> String {
        match parse(&file(json, data)) {
            Err(DcpError::Foreign { file, detail }) => {
                assert_eq!(file, "x.safetensors");
                detail
            }
            other => panic!("{json}: {other:?}"),
        }
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[2,2],"data_offsets":[3,19]},
        "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
        "empty":{"dtype":"I64","shape":[0,7],"data_offsets":[3,3]}}  "#;

    #[test]
    fn a_header_in_any_order_is_read() {
        let header = parse(&file(TWO, 19)).unwrap();
        let start = 8 + TWO.len() as u64;
        assert_eq!(header.tensors["b"].start, start + 3);
        assert_eq!(header.tensors["b"].info.shape, [2, 2]);
        assert_eq!(header.tensors["empty"].info.shape, [0, 7]);
        assert_eq!(header.metadata["format"], "pt");
    }

    #[test]
    fn a_file_cut_at_any_length_is_refused() {
        let bytes = file(TWO, 19);
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(parse(&longer).is_err());
    }

    #[test]
    fn flipped_bits_in_the_header_never_panic() {
        let bytes = file(TWO, 19);
        for bit in 0..(8 + TWO.len()) * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(header) = parse(&flipped) {
                // Flips in a name, in the metadata, or of dtypes of one size go unseen; all else
                // still fills the data exactly.
                let bytes: u64 = header.tensors.values().map(|t| t.info.bytes()).sum();
                assert_eq!(bytes, 19);
            }
        }
    }

    #[test]
    fn a_header_longer_than_the_file_is_refused() {
        for len in [u64::MAX, 1 << 63, 100_000_001, 12] {
            let mut bytes = file("{}", 0);
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            assert!(matches!(parse(&bytes), Err(DcpError::Foreign { .. })));
        }
    }

    #[test]
    fn an_empty_file_of_tensors_is_fine() {
        assert!(parse(&file("{}", 0)).unwrap().tensors.is_empty());
        assert!(refusal("", 0).contains("begin with"));
        assert!(refusal(" {}", 0).contains("begin with"));
        assert!(refusal("{} x", 0).contains("header"));
    }

    #[test]
    fn hostile_headers_are_refused_and_the_tensor_named() {
        let one = |fields: &str| format!(r#"{{"w":{{{fields}}}}}"#);
        let cases = [
            (
                r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#,
                "from 4",
            ),
            (
                r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#,
                "begin at 4",
            ),
            (
                r#""dtype":"F32","shape":[2],"data_offsets":[0,4]"#,
                "8 bytes",
            ),
            (r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#, "-1"),
            (r#""dtype":"F32","shape":[1.0],"data_offsets":[0,4]"#, "w"),
            (r#""dtype":"F32","shape":[1],"data_offsets":[-4,0]"#, "-4"),
            (r#""dtype":"F32","shape":[1],"data_offsets":[0]"#, "w"),
            (r#""dtype":"F32","shape":[1]"#, "data_offsets"),
            (
                r#""dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]"#,
                "F8_E4M3",
            ),
            (
                r#""dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]"#,
                "duplicate",
            ),
            (
                r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]"#,
                "too large",
            ),
            (
                r#""dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]"#,
                "too large",
            ),
            (
                r#""dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]"#,
                "describes",
            ),
        ];
        for (fields, expected) in cases {
            let detail = refusal(&one(fields), 4);
            assert!(detail.contains(expected), "{fields}: {detail}");
            assert!(
                detail.contains("\"w\"") || expected == "describes",
                "{detail}"
            );
        }
    }

    #[test]
    fn tensors_that_share_bytes_are_refused() {
        let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
            "b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(refusal(json, 6).contains("\"b\""));
        let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
            "b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        assert!(refusal(json, 4).contains("\"b\""));
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused() {
        let tensor = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
        assert!(refusal(&format!(r#"{{"a":{tensor},"a":{tensor}}}"#), 0).contains("twice"));
        let twice = r#"{"__metadata__":{"a":"1","a":"2"}}"#;
        assert!(refusal(twice, 0).contains("twice"));
        let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
        assert!(refusal(twice, 0).contains("twice"));
    }

    #[test]
    fn deep_nesting_is_refused() {
        let json = format!("{{\"a\":{}", "[".repeat(1_000_000));
        assert!(refusal(&json, 0).contains("header"));
    }

    proptest! {
        #[test]
        fn random_headers_never_panic(
            json in prop::collection::vec(any::<u8>(), 0..64),
            data in 0usize..16,
        ) {
            let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
            bytes.push(b'{');
            bytes.extend(json);
            bytes.resize(bytes.len() + data, 0);
            let _ = parse(&bytes);
        }

        #[test]
        fn random_entries_never_panic(
            shape in prop::collection::vec(any::<u64>(), 0..4),
            begin in any::<u64>(),
            end in any::<u64>(),
        ) {
            let json = format!(
                r#"{{"w":{{"dtype":"F64","shape":{shape:?},"data_offsets":[{begin},{end}]}}}}"#
            );
            let _ = parse(&file(&json, 8));
        }

        #[test]
        fn spliced_headers_never_panic(
            at in 0usize..TWO.len(),
            new in prop::collection::vec(any::<u8>(), 1..4),
        ) {
            let mut bytes = file(TWO, 19);
            for (i, byte) in new.into_iter().enumerate() {
                bytes[8 + (at + i).min(TWO.len() - 1)] = byte;
            }
            let _ = parse(&bytes);
        }
    }
}
