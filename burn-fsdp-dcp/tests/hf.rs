//! Safetensors files: what PyTorch wrote is read, and what is written is read again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
};
use burn::tensor::{BoolStore, DType, Device, Tensor, TensorData};
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, dense_specs, launch};
use burn_fsdp_dcp::{
    DcpError, ExportOptions, HfCheckpoint, LayoutSource, LoadOptions, Region, Result, TensorInfo,
    TensorLayout, TensorSource, export_safetensors, load_dense_model_from, load_model_from,
    pytorch_layout,
};
use proptest::prelude::*;
use safetensors::SafeTensors;
use tempfile::{TempDir, tempdir};

const INDEX: &str = "model.safetensors.index.json";

/// Tensors in memory.
#[derive(Debug, Default)]
struct Memory {
    tensors: BTreeMap<String, TensorInfo>,
    data: BTreeMap<String, Vec<u8>>,
}

impl Memory {
    fn with(mut self, name: &str, dtype: DType, shape: &[u64], data: Vec<u8>) -> Self {
        let shape = shape.to_vec();
        self.tensors
            .insert(name.to_string(), TensorInfo { dtype, shape });
        self.data.insert(name.to_string(), data);
        self
    }

    /// A tensor in which all bytes differ as far as they can.
    fn with_numbers(self, name: &str, dtype: DType, shape: &[u64]) -> Self {
        let len = shape.iter().product::<u64>() as usize * dtype.size();
        let most = if matches!(dtype, DType::Bool(_)) {
            2
        } else {
            251
        };
        let data = (0..len).map(|i| (i % most) as u8).collect();
        self.with(name, dtype, shape, data)
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
        Ok(cut(
            &self.data[name],
            &info.shape,
            region,
            info.dtype.size(),
        ))
    }
}

/// The elements of a region of a tensor, one by one.
fn cut(data: &[u8], shape: &[u64], region: &Region, size: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for number in 0..region.volume().unwrap() {
        let (mut rest, mut place, mut stride) = (number, 0, 1);
        for d in (0..shape.len()).rev() {
            place += (region.offsets[d] + rest % region.sizes[d]) * stride;
            rest /= region.sizes[d];
            stride *= shape[d];
        }
        let at = place as usize * size;
        out.extend_from_slice(&data[at..at + size]);
    }
    out
}

fn whole(source: &dyn TensorSource, name: &str) -> Vec<u8> {
    let region = Region::whole(&source.tensors()[name].shape);
    source.read(name, &region).unwrap()
}

fn assert_same(got: &dyn TensorSource, want: &dyn TensorSource) {
    assert_eq!(got.tensors(), want.tensors());
    for name in want.tensors().keys() {
        assert_eq!(whole(got, name), whole(want, name), "{name}");
    }
}

const DTYPES: [DType; 13] = [
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
];

/// Every element type, as a matrix, a scalar and without elements.
fn all_kinds() -> Memory {
    let mut source = Memory::default();
    for dtype in DTYPES {
        let name = format!("{dtype:?}");
        source = source
            .with_numbers(&name, dtype, &[5, 3])
            .with_numbers(&format!("{name}.scalar"), dtype, &[])
            .with_numbers(&format!("{name}.empty"), dtype, &[0, 4]);
    }
    source
}

fn data_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// A safetensors file with this header and zeros behind it.
fn write_raw(path: &Path, json: &str, data: usize) {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(path, bytes).unwrap();
}

/// One tensor "w" of bytes, a part of a whole one.
fn write_part(path: &Path, offsets: &[u64], sizes: &[u64]) {
    let len = sizes.iter().product::<u64>() as usize;
    let info = format!(r#"{{\"w\": {{\"saved_offsets\": {offsets:?}}}}}"#);
    let json = format!(
        r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{info}"}},"w":{{"dtype":"U8","shape":{sizes:?},"data_offsets":[0,{len}]}}}}"#
    );
    write_raw(path, &json, len);
}

fn foreign(result: Result<HfCheckpoint>) -> (String, String) {
    match result {
        Err(DcpError::Foreign { file, detail }) => (file, detail),
        other => panic!("{other:?}"),
    }
}

// What PyTorch wrote.

#[test]
fn shards_that_pytorch_wrote_on_two_ranks_read_as_whole_tensors() {
    let sharded = HfCheckpoint::open(data_dir().join("hf_sharded")).unwrap();
    let expected = HfCheckpoint::open(data_dir().join("hf_expected.safetensors")).unwrap();
    assert_eq!(sharded.tensors().len(), 29);
    assert_eq!(sharded.files().len(), 2);
    assert_same(&sharded, &expected);
}

#[test]
fn a_region_across_both_shards_is_read() {
    let sharded = HfCheckpoint::open(data_dir().join("hf_sharded")).unwrap();
    let name = "model.blocks.0.mlp.fc1.weight";
    let data = whole(&sharded, name);
    let region = Region {
        offsets: vec![60, 5],
        sizes: vec![10, 20],
    };
    let expected = cut(&data, &[128, 32], &region, 4);
    assert_eq!(sharded.read(name, &region).unwrap(), expected);
}

#[test]
fn a_lost_shard_is_an_error() {
    let dir = tempdir().unwrap();
    let name = "shard-00002-model-00001-of-00001.safetensors";
    fs::copy(
        data_dir().join("hf_sharded").join(name),
        dir.path().join(name),
    )
    .unwrap();
    let (_, detail) = foreign(HfCheckpoint::open(dir.path()));
    assert!(detail.contains("only"), "{detail}");
}

#[test]
fn parts_of_ranks_must_cover_the_tensor_exactly_once() {
    type Parts = &'static [(&'static [u64], &'static [u64])];
    let cases: [(Parts, &str); 7] = [
        (&[(&[0, 0], &[2, 4]), (&[2, 0], &[2, 2])], "only"),
        (&[(&[0, 0], &[2, 4]), (&[1, 0], &[2, 4])], "overlap"),
        (&[(&[0, 0], &[2, 2]), (&[2, 2], &[2, 2])], "only"),
        (&[(&[], &[]), (&[], &[])], "overlap"),
        (&[(&[0], &[2]), (&[2, 0], &[2, 1])], "numbers of dimensions"),
        (&[(&[0], &[2]), (&[u64::MAX], &[2])], "64 bits"),
        (
            &[(&[0, 0], &[2, 4]), (&[1 << 62, 1 << 62], &[2, 4])],
            "too large",
        ),
    ];
    for (parts, expected) in cases {
        let dir = tempdir().unwrap();
        for (i, (offsets, sizes)) in parts.iter().enumerate() {
            write_part(
                &dir.path().join(format!("shard-{i}.safetensors")),
                offsets,
                sizes,
            );
        }
        let (_, detail) = foreign(HfCheckpoint::open(dir.path()));
        let is_told = detail.contains(expected) && detail.contains("\"w\"");
        assert!(is_told, "{parts:?}: {detail}");
    }
}

#[test]
fn empty_parts_of_ranks_without_rows_are_fine() {
    let dir = tempdir().unwrap();
    write_part(&dir.path().join("a.safetensors"), &[0, 0], &[1, 4]);
    for file in ["b.safetensors", "c.safetensors"] {
        write_part(&dir.path().join(file), &[1, 0], &[0, 4]);
    }
    let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors()["w"].shape, [1, 4]);
}

// Several files.

fn one_tensor(name: &str) -> String {
    format!(r#"{{"{name}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#)
}

#[test]
fn a_name_in_two_files_is_refused() {
    let dir = tempdir().unwrap();
    for file in ["a.safetensors", "b.safetensors"] {
        write_raw(&dir.path().join(file), &one_tensor("w"), 2);
    }
    let (file, detail) = foreign(HfCheckpoint::open(dir.path()));
    assert!(file.ends_with("b.safetensors") && detail.contains("a.safetensors"));
}

#[test]
fn an_index_lists_all_that_is_missing() {
    let dir = tempdir().unwrap();
    write_raw(&dir.path().join("a.safetensors"), &one_tensor("w"), 2);
    let index = r#"{"metadata":{},"weight_map":{"w":"a.safetensors","x":"a.safetensors",
        "y":"a.safetensors","z":"gone.safetensors"}}"#;
    fs::write(dir.path().join(INDEX), index).unwrap();
    let (file, detail) = foreign(HfCheckpoint::open(dir.path()));
    assert!(file.ends_with(INDEX));
    for missing in ["\"x\"", "\"y\"", "\"gone.safetensors\""] {
        assert!(detail.contains(missing), "{detail}");
    }
    assert!(!detail.contains("\"w\""), "{detail}");
}

#[test]
fn an_index_chooses_among_the_files() {
    let dir = tempdir().unwrap();
    for file in ["a.safetensors", "b.safetensors"] {
        write_raw(&dir.path().join(file), &one_tensor("w"), 2);
    }
    let index = dir.path().join(INDEX);
    fs::write(&index, r#"{"weight_map":{"w":"b.safetensors"}}"#).unwrap();
    for path in [dir.path(), &index] {
        let checkpoint = HfCheckpoint::open(path).unwrap();
        assert_eq!(checkpoint.files(), [dir.path().join("b.safetensors")]);
    }
}

#[test]
fn an_index_that_leads_out_of_its_directory_is_refused() {
    let dir = tempdir().unwrap();
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    write_raw(&dir.path().join("a.safetensors"), &one_tensor("w"), 2);
    let absolute = dir.path().join("a.safetensors");
    let paths = [
        "../a.safetensors",
        "..",
        ".",
        "",
        "x/../../a.safetensors",
        r"..\\a.safetensors",
        r"C:a.safetensors",
        r"a\u0000b",
        absolute.to_str().unwrap(),
    ];
    for path in paths {
        let index = format!(r#"{{"weight_map":{{"w":"{path}"}}}}"#);
        fs::write(inner.join(INDEX), index).unwrap();
        let (_, detail) = foreign(HfCheckpoint::open(&inner));
        assert!(detail.contains("beside the index"), "{path}: {detail}");
    }
}

#[test]
fn a_broken_index_is_refused() {
    let dir = tempdir().unwrap();
    let broken = [
        "",
        "[]",
        "{}",
        r#"{"weight_map":{"w":1}}"#,
        r#"{"weight_map":{"w":"a","w":"b"}}"#,
    ];
    for json in broken {
        fs::write(dir.path().join(INDEX), json).unwrap();
        foreign(HfCheckpoint::open(dir.path()));
    }
}

#[test]
fn a_place_without_safetensors_is_no_checkpoint() {
    let dir = tempdir().unwrap();
    for path in [dir.path(), &dir.path().join("gone")] {
        let error = HfCheckpoint::open(path).unwrap_err();
        assert!(matches!(error, DcpError::NotACheckpoint { .. }), "{error}");
    }
}

#[test]
fn what_is_not_there_cannot_be_read() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("a.safetensors");
    write_raw(&file, &one_tensor("w"), 2);
    let checkpoint = HfCheckpoint::open(&file).unwrap();
    assert!(checkpoint.read("x", &Region::whole(&[2])).is_err());
    assert!(checkpoint.read("w", &Region::whole(&[3])).is_err());
    assert!(checkpoint.read("w", &Region::whole(&[])).is_err());
    // A file that has shrunk since.
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert!(checkpoint.read("w", &Region::whole(&[2])).is_err());
}

#[test]
fn a_boolean_that_is_neither_is_refused() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("a.safetensors");
    let json = one_tensor("w").replace("U8", "BOOL");
    write_raw(&file, &json, 2);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() = 2;
    fs::write(&file, bytes).unwrap();
    let checkpoint = HfCheckpoint::open(&file).unwrap();
    assert!(checkpoint.read("w", &Region::whole(&[2])).is_err());
}

// Export.

#[test]
fn every_type_and_shape_comes_back_from_one_file() {
    let dir = tempdir().unwrap();
    let source = all_kinds();
    let file = dir.path().join("out.safetensors");
    export_safetensors(&source, &file, &ExportOptions::new()).unwrap();
    assert_same(&HfCheckpoint::open(&file).unwrap(), &source);

    let bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header % 8, 0);
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.len(), source.tensors.len());
    for (name, info) in &source.tensors {
        let tensor = theirs.tensor(name).unwrap();
        let shape: Vec<u64> = tensor.shape().iter().map(|n| *n as u64).collect();
        assert_eq!(
            (tensor.data(), shape),
            (&source.data[name][..], info.shape.clone())
        );
        // Aligned for its type.
        let at = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(at % info.dtype.size(), 0, "{name}");
    }
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let format = metadata.metadata().as_ref().unwrap()["format"].clone();
    assert_eq!(format, "pt");
}

#[test]
fn every_type_and_shape_comes_back_from_many_files() {
    let dir = tempdir().unwrap();
    let source = all_kinds();
    let target = dir.path().join("new");
    let options = ExportOptions::new().with_max_file_bytes(100);
    export_safetensors(&source, &target, &options).unwrap();
    let checkpoint = HfCheckpoint::open(&target).unwrap();
    assert_same(&checkpoint, &source);
    let n = checkpoint.files().len();
    assert!(n > 5);
    for (i, file) in checkpoint.files().iter().enumerate() {
        let name = format!("model-{:05}-of-{n:05}.safetensors", i + 1);
        assert_eq!(file.file_name().unwrap().to_str().unwrap(), name);
        let bytes = fs::read(file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let data: usize = tensors.iter().map(|(_, t)| t.data().len()).sum();
        assert!(data <= 100 || tensors.iter().filter(|(_, t)| !t.data().is_empty()).count() == 1);
    }
    let index = fs::read(target.join(INDEX)).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let total: u64 = source.tensors.values().map(TensorInfo::bytes).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    // Nothing else is left behind.
    assert_eq!(fs::read_dir(&target).unwrap().count(), n + 1);
    // Without the index, the names are unique too.
    fs::remove_file(target.join(INDEX)).unwrap();
    assert_same(&HfCheckpoint::open(&target).unwrap(), &source);
}

#[test]
fn a_directory_gets_one_file_where_one_is_enough() {
    let source = Memory::default().with_numbers("w", DType::F32, &[4]);
    for options in [
        ExportOptions::new(),
        ExportOptions::new().with_max_file_bytes(16),
    ] {
        let dir = tempdir().unwrap();
        export_safetensors(&source, dir.path(), &options).unwrap();
        let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.files(), [dir.path().join("model.safetensors")]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_same(&checkpoint, &source);
    }
}

#[test]
fn nothing_to_write_is_an_empty_file() {
    let dir = tempdir().unwrap();
    export_safetensors(&Memory::default(), dir.path(), &ExportOptions::new()).unwrap();
    assert!(HfCheckpoint::open(dir.path()).unwrap().tensors().is_empty());
}

#[test]
fn an_export_is_replaced_only_if_that_is_allowed() {
    let dir = tempdir().unwrap();
    let first = Memory::default()
        .with_numbers("a", DType::F32, &[4])
        .with_numbers("b", DType::F32, &[4])
        .with_numbers("c", DType::F32, &[4]);
    let second = Memory::default().with_numbers("a", DType::I64, &[3]);
    let split = || ExportOptions::new().with_max_file_bytes(16);
    export_safetensors(&first, dir.path(), &split()).unwrap();
    fs::write(dir.path().join("README.md"), "kept").unwrap();
    for options in [split(), ExportOptions::new()] {
        let error = export_safetensors(&second, dir.path(), &options).unwrap_err();
        assert!(matches!(error, DcpError::AlreadyExists { .. }), "{error}");
    }
    assert_same(&HfCheckpoint::open(dir.path()).unwrap(), &first);

    export_safetensors(&second, dir.path(), &split().overwrite(true)).unwrap();
    assert_same(&HfCheckpoint::open(dir.path()).unwrap(), &second);
    assert!(dir.path().join("README.md").exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);

    export_safetensors(&first, dir.path(), &split().overwrite(true)).unwrap();
    assert_same(&HfCheckpoint::open(dir.path()).unwrap(), &first);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5);

    let file = dir.path().join("model-00001-of-00003.safetensors");
    let error = export_safetensors(&second, &file, &ExportOptions::new()).unwrap_err();
    assert!(matches!(error, DcpError::AlreadyExists { .. }), "{error}");
    let error = export_safetensors(&second, &file, &split()).unwrap_err();
    assert!(matches!(error, DcpError::InvalidArgument(_)), "{error}");
}

/// Fails after the first tensor.
#[derive(Debug)]
struct Failing(Memory);

impl TensorSource for Failing {
    fn location(&self) -> String {
        self.0.location()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.0.tensors()
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        match name {
            "a" => self.0.read(name, region),
            // Too short.
            "b" => Ok(vec![0; 3]),
            _ => Err(DcpError::InvalidArgument("no".to_string())),
        }
    }
}

#[test]
fn a_failed_export_leaves_nothing_behind() {
    for bad in ["b", "c"] {
        let dir = tempdir().unwrap();
        let memory = Memory::default()
            .with_numbers("a", DType::F32, &[4])
            .with_numbers(bad, DType::F32, &[4]);
        let options = ExportOptions::new().with_max_file_bytes(16);
        assert!(export_safetensors(&Failing(memory), dir.path(), &options).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn floats_are_cast_and_other_types_are_not() {
    let dir = tempdir().unwrap();
    let values = [1.0f32, -2.5, 1.0 / 3.0, 1.003_906_3, 0.0, f32::INFINITY];
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let source = Memory::default()
        .with("w", DType::F32, &[2, 3], bytes(&values))
        .with_numbers("n", DType::I32, &[4]);
    let options = ExportOptions::new().with_dtype(DType::BF16);
    export_safetensors(&source, dir.path(), &options).unwrap();
    let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors()["w"].dtype, DType::BF16);
    assert_eq!(checkpoint.tensors()["n"], source.tensors["n"]);
    let expected: Vec<u8> = { values.iter() }
        .flat_map(|v| burn::tensor::bf16::from_f32(*v).to_le_bytes())
        .collect();
    assert_eq!(whole(&checkpoint, "w"), expected);

    let options = ExportOptions::new().with_dtype(DType::I32).overwrite(true);
    let error = export_safetensors(&source, dir.path(), &options).unwrap_err();
    assert!(matches!(error, DcpError::InvalidArgument(_)), "{error}");
}

#[test]
fn tensors_are_renamed_and_left_out() {
    let source = Memory::default()
        .with_numbers("model.w", DType::F32, &[4])
        .with_numbers("optim.w", DType::F32, &[4]);
    let dir = tempdir().unwrap();
    let options =
        ExportOptions::new().with_rename(|name| Some(name.strip_prefix("model.")?.to_string()));
    export_safetensors(&source, dir.path(), &options).unwrap();
    let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
    let names: Vec<_> = checkpoint.tensors().keys().collect();
    assert_eq!(names, ["w"]);

    for name in ["same", "__metadata__"] {
        let options = ExportOptions::new()
            .with_rename(|_| Some(name.to_string()))
            .overwrite(true);
        let error = export_safetensors(&source, dir.path(), &options).unwrap_err();
        assert!(matches!(error, DcpError::InvalidArgument(_)), "{error}");
    }
}

#[test]
fn a_tensor_larger_than_a_piece_is_written_in_pieces() {
    // 36 MiB and more: two pieces, the second short.
    let source = Memory::default().with_numbers("w", DType::F16, &[9, (2 << 20) + 1]);
    let dir = tempdir().unwrap();
    export_safetensors(&source, dir.path(), &ExportOptions::new()).unwrap();
    let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
    assert!(whole(&checkpoint, "w") == source.data["w"]);
}

#[test]
fn a_file_cut_anywhere_or_with_a_flipped_header_never_panics() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("a.safetensors");
    let source = Memory::default()
        .with_numbers("w", DType::F32, &[2, 2])
        .with_numbers("flag", DType::Bool(BoolStore::Native), &[3]);
    export_safetensors(&source, &file, &ExportOptions::new()).unwrap();
    let bytes = fs::read(&file).unwrap();
    for len in 0..bytes.len() {
        fs::write(&file, &bytes[..len]).unwrap();
        assert!(HfCheckpoint::open(&file).is_err(), "{len}");
    }
    for at in 0..bytes.len() - 19 {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            fs::write(&file, flipped).unwrap();
            if let Ok(checkpoint) = HfCheckpoint::open(&file) {
                for (name, info) in checkpoint.tensors() {
                    let _ = checkpoint.read(name, &Region::whole(&info.shape));
                }
            }
        }
    }
}

// PyTorch's layout.

#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
    column: Linear,
    square: Linear,
    norm: LayerNorm,
    batch: BatchNorm,
}

impl Model {
    fn new() -> Self {
        let device = Device::flex();
        Self {
            layers: vec![
                LinearConfig::new(3, 5).init(&device),
                LinearConfig::new(4, 4).init(&device),
            ],
            column: LinearConfig::new(2, 6)
                .with_layout(LinearLayout::Col)
                .init(&device),
            square: LinearConfig::new(4, 4)
                .with_layout(LinearLayout::Col)
                .init(&device),
            norm: LayerNormConfig::new(5).init(&device),
            batch: BatchNormConfig::new(2).init(&device),
        }
    }

    /// Its tensors as they are in memory.
    fn in_memory(&self) -> Memory {
        let mut tensors = InMemory::default();
        self.visit(&mut tensors);
        tensors.memory
    }
}

#[derive(Default)]
struct InMemory {
    path: Vec<String>,
    memory: Memory,
}

impl ModuleVisitor for InMemory {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().into_data();
        let shape: Vec<u64> = data.shape().iter().map(|n| *n as u64).collect();
        let memory = std::mem::take(&mut self.memory);
        let bytes = data.as_bytes().to_vec();
        self.memory = memory.with(&self.path.join("."), data.dtype(), &shape, bytes);
    }
}

fn export_as_pytorch(model: &Model, options: ExportOptions) -> TempDir {
    let dir = tempdir().unwrap();
    let options = options.with_layout(TensorLayout::PyTorch, &dense_specs(model), "");
    export_safetensors(&model.in_memory(), dir.path(), &options).unwrap();
    dir
}

#[test]
fn a_model_is_written_with_the_names_and_shapes_of_pytorch() {
    let model = Model::new();
    let dir = export_as_pytorch(&model, ExportOptions::new());
    let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = theirs.names();
    names.sort();
    let expected = [
        "batch.bias",
        "batch.running_mean",
        "batch.running_var",
        "batch.weight",
        "column.bias",
        "column.weight",
        "layers.0.bias",
        "layers.0.weight",
        "layers.1.bias",
        "layers.1.weight",
        "norm.bias",
        "norm.weight",
        "square.bias",
        "square.weight",
    ];
    assert_eq!(names, expected);
    let weights = [
        ("layers.0.weight", &model.layers[0], [5, 3]),
        // Square, so that the shape alone would not tell.
        ("layers.1.weight", &model.layers[1], [4, 4]),
        ("column.weight", &model.column, [6, 2]),
        ("square.weight", &model.square, [4, 4]),
    ];
    for (name, linear, shape) in weights {
        let tensor = theirs.tensor(name).unwrap();
        assert_eq!(tensor.shape(), shape);
        // In memory it is [in, out] in either layout.
        let data: TensorData = linear.weight.val().transpose().into_data();
        assert_eq!(tensor.data(), data.as_bytes(), "{name}");
    }
}

#[test]
fn a_sharded_model_has_the_layout_of_the_dense_one() {
    let expected = pytorch_layout(&dense_specs(&Model::new()));
    for world in [1, 2, 3] {
        let expected = expected.clone();
        launch(world, move |pg| {
            let model = Model::new().fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            assert_eq!(pytorch_layout(&model.shard_specs()), expected);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_model_in_pytorch_layout_comes_back_bit_equal() {
    let model = Model::new();
    let specs = dense_specs(&model);
    for options in [
        ExportOptions::new(),
        ExportOptions::new().with_max_file_bytes(64),
    ] {
        let dir = export_as_pytorch(&model, options);
        let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
        let burn = LayoutSource::from_pytorch(&checkpoint, &specs, "").unwrap();
        assert_same(&burn, &model.in_memory());
        let again = LayoutSource::to_pytorch(&burn, &specs, "").unwrap();
        assert_same(&again, &checkpoint);
    }
}

#[test]
fn a_model_loads_what_was_written_for_pytorch() {
    let (model, other) = (Model::new(), Model::new());
    let specs = dense_specs(&model);
    let mut source = Memory::default();
    for (name, info) in &model.in_memory().tensors {
        let data = model.in_memory().data[name].clone();
        source = source.with(&format!("model.{name}"), info.dtype, &info.shape, data);
    }
    let dir = tempdir().unwrap();
    let options = ExportOptions::new().with_layout(TensorLayout::PyTorch, &specs, "model.");
    export_safetensors(&source, dir.path(), &options).unwrap();
    let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
    assert!(checkpoint.tensors().contains_key("model.norm.weight"));
    let burn = LayoutSource::from_pytorch(&checkpoint, &specs, "model.").unwrap();
    assert_ne!(other.in_memory().data, model.in_memory().data);
    let options = LoadOptions::new();
    let (loaded, _) = load_dense_model_from(&burn, "model.", other, &options).unwrap();
    assert_same(&loaded.in_memory(), &model.in_memory());
}

#[test]
fn ranks_load_their_parts_of_what_was_written_for_pytorch() {
    let dir = export_as_pytorch(&Model::new(), ExportOptions::new());
    let path = dir.path().to_path_buf();
    launch(3, move |pg| {
        let model = Model::new().fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let checkpoint = HfCheckpoint::open(&path).unwrap();
        let specs = model.shard_specs();
        let burn = LayoutSource::from_pytorch(&checkpoint, &specs, "").unwrap();
        let (model, _) = load_model_from(&burn, "", model, &LoadOptions::new()).unwrap();
        for (name, tensor) in model.sharded_state_dict() {
            let to_u64 = |sizes: &[usize]| sizes.iter().map(|n| *n as u64).collect();
            let region = Region {
                offsets: to_u64(&tensor.spec.offsets),
                sizes: to_u64(&tensor.spec.sizes),
            };
            assert_eq!(
                burn.read(&name, &region).unwrap(),
                tensor.data.as_bytes(),
                "{name}"
            );
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_part_of_a_transposed_matrix_is_read() {
    let model = Model::new();
    let specs = dense_specs(&model);
    let dir = export_as_pytorch(&model, ExportOptions::new());
    let checkpoint: Box<dyn TensorSource> = Box::new(HfCheckpoint::open(dir.path()).unwrap());
    let burn = LayoutSource::from_pytorch(checkpoint, &specs, "").unwrap();
    let in_memory = model.in_memory();
    for (offsets, sizes) in [
        ([1, 0], [2, 5]),
        ([0, 2], [3, 2]),
        ([2, 4], [1, 1]),
        ([3, 0], [0, 5]),
    ] {
        let region = Region {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
        };
        let name = "layers.0.weight";
        let got = burn.read(name, &region).unwrap();
        assert_eq!(got, in_memory.read(name, &region).unwrap(), "{region:?}");
    }
    let beyond = Region::whole(&[5, 3]);
    assert!(burn.read("layers.0.weight", &beyond).is_err());
    assert!(burn.read("gone", &beyond).is_err());
}

#[test]
fn what_the_model_does_not_have_keeps_name_and_shape() {
    let specs = dense_specs(&Model::new());
    let source = Memory::default()
        .with_numbers("layers.0.weight", DType::F32, &[7])
        .with_numbers("head.weight", DType::F32, &[2, 3]);
    let burn = LayoutSource::from_pytorch(&source, &specs, "").unwrap();
    assert_same(&burn, &source);
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let specs = dense_specs(&Model::new());
    let source = Memory::default()
        .with_numbers("norm.gamma", DType::F32, &[5])
        .with_numbers("norm.weight", DType::F32, &[5]);
    for result in [
        LayoutSource::from_pytorch(&source, &specs, ""),
        LayoutSource::to_pytorch(&source, &specs, ""),
    ] {
        assert!(matches!(result, Err(DcpError::InvalidArgument(_))));
    }
}

#[test]
fn the_weights_of_pytorch_load_under_the_names_of_the_model() {
    let specs = dense_specs(&Model::new());
    let source = Memory::default()
        .with_numbers("norm.weight", DType::F32, &[5])
        .with_numbers("layers.0.weight", DType::F32, &[5, 3]);
    let burn = LayoutSource::from_pytorch(&source, &specs, "").unwrap();
    let names: Vec<_> = burn.tensors().keys().collect();
    assert_eq!(names, ["layers.0.weight", "norm.gamma"]);
    assert_eq!(burn.tensors()["layers.0.weight"].shape, [3, 5]);
}

// Regions.

#[test]
fn columns_are_read_whether_their_rows_are_far_apart_or_many() {
    // Rows beyond the gap that is read along; and more of them than are read together.
    for shape in [[3, 70_000], [300, 60_000]] {
        let dir = tempdir().unwrap();
        let source = Memory::default().with_numbers("w", DType::U8, &shape);
        export_safetensors(&source, dir.path(), &ExportOptions::new()).unwrap();
        let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
        let region = Region {
            offsets: vec![1, 7],
            sizes: vec![shape[0] - 1, 5],
        };
        let expected = source.read("w", &region).unwrap();
        assert_eq!(checkpoint.read("w", &region).unwrap(), expected);
    }
}

/// A shape, a region of it and a dtype.
fn regions() -> impl Strategy<Value = (Vec<u64>, Region, DType)> {
    let dim = (0u64..9).prop_flat_map(|n| {
        let part = (0..=n).prop_flat_map(move |o| (Just(o), 0..=n - o));
        (Just(n), part)
    });
    let dims = prop::collection::vec(dim, 0..4);
    (dims, prop::sample::select(&DTYPES[..])).prop_map(|(dims, dtype)| {
        let shape = dims.iter().map(|d| d.0).collect();
        let (offsets, sizes) = dims.iter().map(|d| d.1).unzip();
        (shape, Region { offsets, sizes }, dtype)
    })
}

proptest! {
    #[test]
    fn any_region_is_read_from_what_was_exported((shape, region, dtype) in regions()) {
        let dir = tempdir().unwrap();
        let source = Memory::default()
            .with_numbers("w", dtype, &shape)
            .with_numbers("v", DType::U8, &[3]);
        let file = dir.path().join("a.safetensors");
        export_safetensors(&source, &file, &ExportOptions::new()).unwrap();
        let checkpoint = HfCheckpoint::open(&file).unwrap();
        let expected = source.read("w", &region).unwrap();
        prop_assert_eq!(checkpoint.read("w", &region).unwrap(), expected);
    }

    #[test]
    fn any_region_is_read_across_the_parts_of_ranks(
        rows in 1u64..9,
        columns in 1u64..5,
        world in 1u64..5,
        dim in 0usize..2,
        from in any::<(u64, u64)>(),
    ) {
        let dir = tempdir().unwrap();
        let shape = [rows, columns];
        let data: Vec<u8> = (0..rows * columns).map(|i| i as u8).collect();
        let chunk = shape[dim].div_ceil(world);
        for rank in 0..world {
            let mut part = Region::whole(&shape);
            part.offsets[dim] = (rank * chunk).min(shape[dim]);
            part.sizes[dim] = chunk.min(shape[dim] - part.offsets[dim]);
            let path = dir.path().join(format!("shard-{rank}.safetensors"));
            write_part(&path, &part.offsets, &part.sizes);
            let bytes = fs::read(&path).unwrap();
            let content = cut(&data, &shape, &part, 1);
            let header = bytes.len() - content.len();
            fs::write(&path, [&bytes[..header], &content].concat()).unwrap();
        }
        let offsets = vec![from.0 % rows, from.1 % columns];
        let sizes = vec![rows - offsets[0], 1];
        let region = Region { offsets, sizes };
        let checkpoint = HfCheckpoint::open(dir.path()).unwrap();
        prop_assert_eq!(&checkpoint.tensors()["w"].shape, &shape);
        prop_assert_eq!(checkpoint.read("w", &region).unwrap(), cut(&data, &shape, &region, 1));
    }
}
