//! Where tensors can be read from, whoever wrote them.

use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::tensor::DType;

use crate::Result;
use crate::region::{Region, volume};

/// What a tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its element type.
    pub dtype: DType,
    /// Its shape, whole.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Its size in bytes. Sources check when they are opened that it fits.
    pub fn bytes(&self) -> u64 {
        volume(&self.shape)
            .unwrap_or(u64::MAX)
            .saturating_mul(self.dtype.size() as u64)
    }
}

/// Tensors on disk: a [`Checkpoint`](crate::Checkpoint), safetensors files, a checkpoint of PyTorch.
pub trait TensorSource: Debug + Send + Sync {
    /// Where they are, for messages.
    fn location(&self) -> String;

    /// All tensors by name.
    fn tensors(&self) -> &BTreeMap<String, TensorInfo>;

    /// The elements of a part of a tensor, row by row, little-endian. Reads what it needs, and little
    /// more.
    ///
    /// # Errors
    ///
    /// If the tensor is not there, the region is not within it, or the file can't be read.
    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>>;
}
