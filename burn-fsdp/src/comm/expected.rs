//! What a rank will have of an all-gather, and what it has of it from the start.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::buffer::{FilledBuffer, SharedBuffer};
use super::{GatherInput, host};
use crate::Result;
use crate::memory::{MemoryCounter, MemoryGuard};

/// A tensor of a gather under way, as this rank will have it.
#[derive(Debug)]
pub(super) enum Expected {
    /// Held whole by every rank, so it is here already.
    Whole {
        tensor: Box<Tensor<1>>,
        counted: Option<MemoryGuard>,
    },
    Split {
        len: usize,
        dtype: DType,
        counted: MemoryGuard,
    },
}

impl Expected {
    /// Counts the memory from here on.
    pub(super) fn new(input: GatherInput, memory: &Arc<MemoryCounter>) -> Result<Self> {
        if !input.layout.is_whole() {
            return Ok(Self::Split {
                len: input.layout.full_len(),
                dtype: input.dtype,
                counted: MemoryGuard::new(memory, full_bytes(&input)),
            });
        }
        let (tensor, counted) = if input.shard.dtype() == input.dtype {
            (input.shard, None)
        } else if host::is_host(&input.shard) {
            (cast_whole(input, memory)?, None)
        } else {
            let counted = MemoryGuard::new(memory, full_bytes(&input));
            (input.shard.cast(input.dtype), Some(counted))
        };
        let tensor = Box::new(tensor);
        Ok(Self::Whole { tensor, counted })
    }
}

/// A host tensor that every rank holds whole: itself, or a copy in another dtype, counted until it is
/// dropped.
pub(super) fn cast_whole(input: GatherInput, memory: &Arc<MemoryCounter>) -> Result<Tensor<1>> {
    if input.shard.dtype() == input.dtype {
        return Ok(input.shard);
    }
    let bytes = full_bytes(&input);
    let mut buffer = SharedBuffer::new(bytes, None);
    let target = buffer.as_mut_slice();
    host::copy_cast(&host::host(&input.shard)?, 0, target, input.dtype);
    let filled = FilledBuffer::of(buffer, MemoryGuard::new(memory, bytes));
    let len = input.layout.full_len();
    Ok(host::from_bytes(filled.into_bytes(), len, input.dtype))
}

pub(super) fn full_bytes(input: &GatherInput) -> usize {
    input.layout.full_len() * input.dtype.size()
}
