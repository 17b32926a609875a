//! Checkpoints of PyTorch: what PyTorch wrote reads as what it is, what is written reads as what was
//! written, and what is damaged or hostile is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType};
use burn_fsdp_dcp::{
    DcpError, Region, Result, TensorInfo, TensorSource, TorchCheckpoint, TorchValue, dtype_of,
    export_torch,
};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// Tensors in memory.
#[derive(Clone, Debug, Default, PartialEq)]
struct Memory {
    tensors: BTreeMap<String, TensorInfo>,
    bytes: BTreeMap<String, Vec<u8>>,
}

impl Memory {
    fn insert(&mut self, name: &str, dtype: DType, shape: &[u64], bytes: Vec<u8>) {
        let shape = shape.to_vec();
        self.tensors
            .insert(name.to_string(), TensorInfo { dtype, shape });
        self.bytes.insert(name.to_string(), bytes);
    }

    /// Tensors with bytes that tell where they are.
    fn numbered(tensors: &[(&str, DType, &[u64])]) -> Self {
        let mut memory = Self::default();
        for (name, dtype, shape) in tensors {
            let len = shape.iter().product::<u64>() as usize * dtype.size();
            let bytes = (0..len).map(|i| match dtype {
                DType::Bool(_) => (i % 2) as u8,
                _ => (i * 7 + i / 256) as u8,
            });
            memory.insert(name, *dtype, shape, bytes.collect());
        }
        memory
    }

    fn of_safetensors(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let mut memory = Self::default();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let dtype = dtype_of(&format!("{:?}", view.dtype())).unwrap();
            let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
            memory.insert(&name, dtype, &shape, view.data().to_vec());
        }
        memory
    }

    /// All that a source has.
    fn of(source: &dyn TensorSource) -> Result<Self> {
        let mut memory = Self::default();
        for (name, info) in source.tensors() {
            let bytes = source.read(name, &Region::whole(&info.shape))?;
            memory.insert(name, info.dtype, &info.shape, bytes);
        }
        Ok(memory)
    }
}

impl TensorSource for Memory {
    fn location(&self) -> String {
        "memory".to_string()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let info = &self.tensors[name];
        let width = info.dtype.size();
        let bytes = &self.bytes[name];
        let mut out = vec![0; region.volume().unwrap() as usize * width];
        for run in Region::whole(&info.shape).runs(region) {
            let (from, to, len) = (
                run.from as usize * width,
                run.to as usize * width,
                run.len as usize * width,
            );
            out[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        Ok(out)
    }
}

fn same_name(name: &str) -> Option<String> {
    Some(name.to_string())
}

fn le<T, const N: usize>(values: &[T], bytes: fn(T) -> [u8; N]) -> Vec<u8>
where
    T: Copy,
{
    values.iter().flat_map(|value| bytes(*value)).collect()
}

#[test]
fn a_checkpoint_of_two_ranks_reads_as_pytorch_reads_it() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_w2")).unwrap();
    let expected = Memory::of_safetensors(&data("dcp_torch_w2.safetensors"));
    let found = Memory::of(&checkpoint).unwrap();
    assert_eq!(found.tensors, expected.tensors);
    for (name, bytes) in &expected.bytes {
        assert!(found.bytes[name] == *bytes, "{name}");
    }
}

#[test]
fn its_small_values_are_read() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_w2")).unwrap();
    let values = checkpoint.values();
    let group = |field: &str| &values[&format!("optim.param_groups.0.{field}")];
    assert_eq!(*group("lr"), TorchValue::Float(0.01));
    let betas = [0.9, 0.999].map(TorchValue::Float);
    assert_eq!(*group("betas"), TorchValue::Tuple(betas.to_vec()));
    assert_eq!(*group("amsgrad"), TorchValue::Bool(false));
    assert_eq!(*group("decoupled_weight_decay"), TorchValue::Bool(true));
    assert_eq!(*group("foreach"), TorchValue::None);
    assert_eq!(values["extra.step"], TorchValue::Int(5));
    let TorchValue::List(params) = group("params") else {
        panic!("{:?}", group("params"));
    };
    assert_eq!(params[0], TorchValue::Str("tok_emb.weight".to_string()));
}

#[test]
fn tensors_that_are_not_stored_row_by_row_are_put_in_this_order() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_odd")).unwrap();
    let read = |name: &str| {
        let info = &checkpoint.tensors()[name];
        checkpoint.read(name, &Region::whole(&info.shape)).unwrap()
    };
    let transposed = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11];
    assert_eq!(read("transposed"), le(&transposed, i32::to_le_bytes));
    let columns = Region {
        offsets: vec![1, 1],
        sizes: vec![2, 2],
    };
    let part = checkpoint.read("transposed", &columns).unwrap();
    assert_eq!(part, le(&[5, 9, 6, 10], i32::to_le_bytes));
    let pixels: Vec<f32> = (0..24).map(|n| n as f32).collect();
    assert_eq!(read("channels_last"), le(&pixels, f32::to_le_bytes));
    assert_eq!(read("view"), le(&[5, 6, 7, 8, 9, 10, 11], i16::to_le_bytes));
}

#[test]
fn types_without_a_storage_class_scalars_and_empty_tensors_are_read() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_odd")).unwrap();
    let read = |name: &str| {
        let info = &checkpoint.tensors()[name];
        let bytes = checkpoint.read(name, &Region::whole(&info.shape)).unwrap();
        (info.dtype, bytes)
    };
    assert_eq!(
        read("u16"),
        (DType::U16, le(&[1, 2, 65535], u16::to_le_bytes))
    );
    assert_eq!(read("u64"), (DType::U64, le(&[1 << 63], u64::to_le_bytes)));
    assert_eq!(read("bool"), (DType::Bool(BoolStore::Native), vec![1, 0]));
    assert_eq!(read("scalar"), (DType::F64, 2.5f64.to_le_bytes().to_vec()));
    assert_eq!(checkpoint.tensors()["empty"].shape, [0, 3]);
    assert_eq!(read("empty"), (DType::F32, Vec::new()));
}

#[test]
fn values_of_many_kinds_are_read_and_others_named() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_odd")).unwrap();
    let value = |name: &str| &checkpoint.values()[&format!("values.{name}")];
    assert_eq!(*value("seed"), TorchValue::Int(u64::MAX.into()));
    assert_eq!(*value("negative"), TorchValue::Int(-(1 << 40)));
    assert_eq!(*value("long"), TorchValue::Str("n".repeat(300)));
    let inner = TorchValue::List(vec![TorchValue::Float(2.5), TorchValue::None]);
    let pair = TorchValue::Tuple(vec![TorchValue::Int(1), inner]);
    let nested = TorchValue::Tuple(vec![pair, TorchValue::Str("x".to_string())]);
    assert_eq!(*value("nested"), nested);
    let TorchValue::Unsupported(why) = value("torch") else {
        panic!("{:?}", value("torch"));
    };
    assert!(why.contains("torch.Size"), "{why}");
}

#[test]
fn a_checkpoint_without_checksums_is_read() {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_no_crc")).unwrap();
    let bytes = checkpoint.read("w", &Region::whole(&[4])).unwrap();
    assert_eq!(bytes, le(&[0f32, 1., 2., 3.], f32::to_le_bytes));
}

const DTYPES: [DType; 14] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
];

/// A tensor of each type in each of these shapes.
fn every_type() -> Memory {
    let shapes: [&[u64]; 5] = [&[], &[0], &[3, 0, 2], &[5], &[4, 3, 2]];
    let mut names = Vec::new();
    for dtype in DTYPES {
        for shape in shapes {
            names.push((format!("model.{dtype:?}.{shape:?}"), dtype, shape));
        }
    }
    let tensors: Vec<_> = names.iter().map(|(n, d, s)| (n.as_str(), *d, *s)).collect();
    Memory::numbered(&tensors)
}

#[test]
fn what_is_exported_is_imported_the_same_for_every_type() {
    let dir = tempfile::tempdir().unwrap();
    let memory = every_type();
    export_torch(&memory, dir.path(), same_name).unwrap();
    let found = Memory::of(&TorchCheckpoint::open(dir.path()).unwrap()).unwrap();
    assert_eq!(found.bytes, memory.bytes);
    for (name, info) in &memory.tensors {
        assert_eq!(found.tensors[name].shape, info.shape);
        let dtype = match info.dtype {
            DType::Bool(_) => DType::Bool(BoolStore::Native),
            dtype => dtype,
        };
        assert_eq!(found.tensors[name].dtype, dtype);
    }
}

#[test]
fn an_imported_checkpoint_is_exported_under_other_names() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_w2")).unwrap();
    export_torch(&checkpoint, dir.path(), |name| {
        Some(name.strip_prefix("model.")?.to_string())
    })
    .unwrap();
    let copy = Memory::of(&TorchCheckpoint::open(dir.path()).unwrap()).unwrap();
    let model: BTreeMap<_, _> = { Memory::of(&checkpoint).unwrap().bytes.into_iter() }
        .filter_map(|(name, bytes)| Some((name.strip_prefix("model.")?.to_string(), bytes)))
        .collect();
    assert_eq!(copy.bytes, model);
}

#[test]
fn an_export_replaces_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::numbered(&[("w", DType::F32, &[2])]);
    export_torch(&memory, dir.path(), same_name).unwrap();
    let error = export_torch(&memory, dir.path(), same_name).unwrap_err();
    assert!(matches!(error, DcpError::AlreadyExists { .. }), "{error}");
}

#[test]
fn an_export_gives_no_name_twice() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::numbered(&[("a", DType::F32, &[2]), ("b", DType::F32, &[2])]);
    let error = export_torch(&memory, dir.path(), |_| Some("w".to_string())).unwrap_err();
    assert!(error.to_string().contains("same name"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_is_not_there_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = TorchCheckpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, DcpError::NotACheckpoint { .. }), "{error}");
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_no_crc")).unwrap();
    let error = checkpoint.read("v", &Region::whole(&[4])).unwrap_err();
    assert!(error.to_string().contains("no tensor \"v\""), "{error}");
    let error = checkpoint.read("w", &Region::whole(&[5])).unwrap_err();
    assert!(error.to_string().contains("no region"), "{error}");
}

/// A small checkpoint that can be damaged.
struct Victim {
    dir: tempfile::TempDir,
    metadata: Vec<u8>,
    data: Vec<u8>,
    memory: Memory,
}

impl Victim {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::numbered(&[
            ("model.w", DType::F32, &[3, 4]),
            ("model.b", DType::U16, &[5]),
        ]);
        export_torch(&memory, dir.path(), same_name).unwrap();
        Self {
            metadata: fs::read(dir.path().join(".metadata")).unwrap(),
            data: fs::read(dir.path().join("__0_0.distcp")).unwrap(),
            dir,
            memory,
        }
    }

    fn with_metadata(&self, bytes: &[u8]) -> Result<Memory> {
        fs::write(self.dir.path().join(".metadata"), bytes).unwrap();
        Memory::of(&TorchCheckpoint::open(self.dir.path())?)
    }

    fn with_data(&self, bytes: &[u8]) -> Result<Memory> {
        fs::write(self.dir.path().join("__0_0.distcp"), bytes).unwrap();
        Memory::of(&TorchCheckpoint::open(self.dir.path())?)
    }

    fn with_replaced(&self, from: &[u8], to: &[u8]) -> DcpError {
        let mut parts = Vec::new();
        let mut rest = &self.metadata[..];
        while let Some(at) = rest.windows(from.len()).position(|w| w == from) {
            parts.extend([&rest[..at], to]);
            rest = &rest[at + from.len()..];
        }
        assert!(!parts.is_empty());
        parts.push(rest);
        self.with_metadata(&parts.concat()).unwrap_err()
    }
}

#[test]
fn metadata_cut_at_any_length_is_refused() {
    let victim = Victim::new();
    for len in 0..victim.metadata.len() {
        let error = victim.with_metadata(&victim.metadata[..len]).unwrap_err();
        assert!(matches!(error, DcpError::Foreign { .. }), "{len}: {error}");
    }
    let longer = [&victim.metadata[..], b"N."].concat();
    victim.with_metadata(&longer).unwrap_err();
}

#[test]
fn data_cut_at_any_length_is_refused() {
    let victim = Victim::new();
    for len in 0..victim.data.len() {
        let error = victim.with_data(&victim.data[..len]).unwrap_err();
        assert!(matches!(error, DcpError::Foreign { .. }), "{len}: {error}");
    }
}

#[test]
fn a_changed_byte_of_data_is_found_or_harmless() {
    let victim = Victim::new();
    let mut bytes = victim.data.clone();
    let mut found = 0;
    for at in 0..bytes.len() {
        for mask in [0x01, 0x80, 0xff] {
            bytes[at] ^= mask;
            match victim.with_data(&bytes) {
                Ok(memory) => assert_eq!(memory, victim.memory, "byte {at}"),
                Err(_) => found += 1,
            }
            bytes[at] ^= mask;
        }
    }
    assert!(found > bytes.len() / 2, "{found} of {}", bytes.len());
}

#[test]
fn a_changed_byte_of_metadata_gives_no_wrong_value() {
    let victim = Victim::new();
    let mut bytes = victim.metadata.clone();
    for at in 0..bytes.len() {
        for mask in [0x01, 0x10, 0xff] {
            bytes[at] ^= mask;
            if let Ok(memory) = victim.with_metadata(&bytes) {
                for (name, found) in &memory.bytes {
                    let due = victim.memory.bytes.get(name);
                    assert!(due.is_none_or(|due| due == found), "byte {at}: {name}");
                }
            }
            bytes[at] ^= mask;
        }
    }
}

#[test]
fn changed_elements_are_an_error_that_names_tensor_and_chunk() {
    let victim = Victim::new();
    let elements = &victim.memory.bytes["model.w"];
    let is_elements = |window: &[u8]| window == elements;
    let at = { victim.data.windows(elements.len()) }.position(is_elements);
    let mut bytes = victim.data.clone();
    bytes[at.unwrap() + 3] ^= 1;
    let error = victim.with_data(&bytes).unwrap_err().to_string();
    for part in ["__0_0.distcp", "\"model.w\"", "[0, 0]", "checksum"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_function_of_the_system_is_refused_by_name() {
    let victim = Victim::new();
    let error = victim.with_replaced(b"torch.serialization\n_get_layout", b"os\nsystem");
    assert!(matches!(error, DcpError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("os.system"), "{error}");
}

#[test]
fn file_names_that_lead_out_of_the_directory_are_refused() {
    let victim = Victim::new();
    for name in [
        "../x_0.distc",
        "/etc/passwd0",
        "a/../../x.di",
        "a\\..\\..\\.dis",
    ] {
        let error = victim.with_replaced(b"__0_0.distcp", name.as_bytes());
        assert!(matches!(error, DcpError::Foreign { .. }), "{error}");
        assert!(error.to_string().contains("file name"), "{error}");
    }
    let error = victim.with_replaced(b"__0_0.distcp", b"__7_0.distcp");
    assert!(matches!(error, DcpError::MissingFile { .. }), "{error}");
}

#[cfg(unix)]
#[test]
fn links_that_lead_out_of_the_directory_are_refused() {
    let victim = Victim::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let (path, target) = (
        victim.dir.path().join("__0_0.distcp"),
        elsewhere.path().join("data"),
    );
    fs::rename(&path, &target).unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let error = victim.with_metadata(&victim.metadata).unwrap_err();
    assert!(error.to_string().contains("leads out"), "{error}");
}

#[test]
fn a_later_version_of_the_format_is_refused() {
    let victim = Victim::new();
    let error = victim.with_replaced(b"1.0.0", b"2.0.0");
    assert!(error.to_string().contains("version 2.0.0"), "{error}");
}

#[test]
fn what_no_chunk_covers_is_an_error_and_the_rest_is_read() {
    let victim = Victim::new();
    let error = victim.with_replaced(
        b"sizectorch\nSize\n((J\x03\0\0\0",
        b"sizectorch\nSize\n((J\x04\0\0\0",
    );
    assert!(error.to_string().contains("do not cover"), "{error}");
    let checkpoint = TorchCheckpoint::open(victim.dir.path()).unwrap();
    let rows = checkpoint.read("model.w", &Region::whole(&[3, 4])).unwrap();
    assert_eq!(rows, victim.memory.bytes["model.w"]);
}

#[test]
fn tensors_that_share_their_bytes_are_refused() {
    let victim = Victim::new();
    let bytes = &victim.metadata;
    let key = b"\x06\0\0\0offsetJ";
    let starts = bytes.windows(key.len());
    let at = { starts }.rposition(|window| window == key).unwrap() + key.len();
    let start = bytes[at..at + 4].to_vec();
    assert_ne!(start, [0; 4]);
    let error = victim.with_replaced(&[&b"offsetJ"[..], &start].concat(), b"offsetJ\x01\0\0\0");
    assert!(error.to_string().contains("bytes in common"), "{error}");
}

/// A region of a tensor.
fn region_of(shape: &[u64]) -> impl Strategy<Value = Region> + use<> {
    let dims = shape.iter().map(|n| {
        let n = *n;
        (0..=n).prop_flat_map(move |offset| (Just(offset), 0..=n - offset))
    });
    dims.collect::<Vec<_>>().prop_map(|dims| {
        let (offsets, sizes) = dims.into_iter().unzip();
        Region { offsets, sizes }
    })
}

fn tensor_and_region() -> impl Strategy<Value = (String, Region)> {
    let checkpoint = TorchCheckpoint::open(data("dcp_torch_w2")).unwrap();
    let tensors: Vec<_> = checkpoint.tensors().clone().into_iter().collect();
    prop::sample::select(tensors).prop_flat_map(|(name, info)| (Just(name), region_of(&info.shape)))
}

proptest! {
    #[test]
    fn any_region_reads_as_that_part_of_the_tensor(picks in prop::collection::vec(tensor_and_region(), 50)) {
        let checkpoint = TorchCheckpoint::open(data("dcp_torch_w2")).unwrap();
        let expected = Memory::of_safetensors(&data("dcp_torch_w2.safetensors"));
        for (name, region) in picks {
            let found = checkpoint.read(&name, &region).unwrap();
            prop_assert!(found == expected.read(&name, &region).unwrap(), "{} {:?}", name, region);
        }
    }

    #[test]
    fn changed_bytes_of_a_large_checkpoint_give_no_wrong_value(
        changes in prop::collection::vec((0usize..52173, 1u8..), 1..3),
    ) {
        let source = data("dcp_torch_w2");
        let dir = tempfile::tempdir().unwrap();
        for file in ["__0_0.distcp", "__1_0.distcp"] {
            fs::hard_link(source.join(file), dir.path().join(file))
                .or_else(|_| fs::copy(source.join(file), dir.path().join(file)).map(|_| ()))
                .unwrap();
        }
        let mut metadata = fs::read(source.join(".metadata")).unwrap();
        for (at, mask) in changes {
            metadata[at] ^= mask;
        }
        fs::write(dir.path().join(".metadata"), &metadata).unwrap();
        let expected = Memory::of_safetensors(&data("dcp_torch_w2.safetensors"));
        if let Ok(checkpoint) = TorchCheckpoint::open(dir.path()) {
            for (name, info) in checkpoint.tensors() {
                let found = checkpoint.read(name, &Region::whole(&info.shape));
                if let (Ok(found), Some(due)) = (found, expected.bytes.get(name)) {
                    prop_assert!(found == *due, "{}", name);
                }
            }
        }
    }
}
