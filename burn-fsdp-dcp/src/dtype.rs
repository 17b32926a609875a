//! Element types by the names that safetensors gives them.

use burn::tensor::{BoolStore, DType};

use crate::{DcpError, Result};

const NAMES: [(&str, DType); 13] = [
    ("F64", DType::F64),
    ("F32", DType::F32),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("I64", DType::I64),
    ("I32", DType::I32),
    ("I16", DType::I16),
    ("I8", DType::I8),
    ("U64", DType::U64),
    ("U32", DType::U32),
    ("U16", DType::U16),
    ("U8", DType::U8),
    ("BOOL", DType::Bool(BoolStore::Native)),
];

/// The name of an element type.
///
/// # Errors
///
/// [`DcpError::InvalidArgument`] for quantized types, and booleans wider than a byte.
pub fn dtype_name(dtype: DType) -> Result<&'static str> {
    let dtype = match dtype {
        DType::Bool(BoolStore::U8) => DType::Bool(BoolStore::Native),
        dtype => dtype,
    };
    let found = NAMES.iter().find(|(_, known)| *known == dtype);
    found.map(|(name, _)| *name).ok_or_else(|| {
        DcpError::argument(format!("tensors of type {dtype:?} can't be checkpointed"))
    })
}

/// The element type of this name, if there is one.
pub fn dtype_of(name: &str) -> Option<DType> {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.map(|(_, dtype)| *dtype)
}
