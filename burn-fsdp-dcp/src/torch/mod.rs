//! Checkpoints of PyTorch, as `torch.distributed.checkpoint` writes them: read and written without
//! PyTorch, and without running anything that they contain.
//!
//! A checkpoint is a directory with a pickle, `.metadata`, that says where in which file the parts of
//! each tensor are. Each part is a small ZIP archive of its own, with the elements as they are.

mod blob;
mod export;
mod import;
mod metadata;
mod pickle;
mod pickle_machine;
mod pickle_value;
mod pickle_writer;
mod value;
mod zip;

use burn::tensor::{BoolStore, DType};

pub use export::export_torch;
pub use import::TorchCheckpoint;
pub use value::TorchValue;

/// The file that makes a directory a checkpoint.
const METADATA: &str = ".metadata";

/// The module of the classes that `.metadata` is made of.
const METADATA_MODULE: &str = "torch.distributed.checkpoint.metadata";
/// The module of the class that says where a part is.
const STORAGE_MODULE: &str = "torch.distributed.checkpoint.filesystem";

/// Element types: the name in `torch`, the class of the storage if there is one, and ours.
const DTYPES: [(&str, Option<&str>, DType); 13] = [
    ("float64", Some("DoubleStorage"), DType::F64),
    ("float32", Some("FloatStorage"), DType::F32),
    ("float16", Some("HalfStorage"), DType::F16),
    ("bfloat16", Some("BFloat16Storage"), DType::BF16),
    ("int64", Some("LongStorage"), DType::I64),
    ("int32", Some("IntStorage"), DType::I32),
    ("int16", Some("ShortStorage"), DType::I16),
    ("int8", Some("CharStorage"), DType::I8),
    ("uint64", None, DType::U64),
    ("uint32", None, DType::U32),
    ("uint16", None, DType::U16),
    ("uint8", Some("ByteStorage"), DType::U8),
    ("bool", Some("BoolStorage"), DType::Bool(BoolStore::Native)),
];

/// The element type of a global reference, if there is one of ours.
fn dtype_of_global(global: Option<(&str, &str)>) -> Option<DType> {
    let (module, name) = global?;
    let found = DTYPES.iter().find(|(known, ..)| *known == name);
    found.filter(|_| module == "torch").map(|found| found.2)
}
