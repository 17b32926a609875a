//! The memory work of an all-gather.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::GatherInput;
use super::buffer::{FilledBuffer, SharedBuffer};
use super::host;
use crate::Result;
use crate::memory::{MemoryCounter, MemoryGuard};

/// The buffers of a gather: one for each tensor that is split.
pub(super) type Buffers = Vec<Arc<SharedBuffer>>;

pub(super) fn full_bytes(input: &GatherInput) -> usize {
    input.layout.full_len() * input.dtype.size()
}

/// Writes `rank`'s shards, cast, into their places in the full tensors. Once a gather only.
pub(super) fn write_shards(buffers: &Buffers, inputs: &[GatherInput], rank: usize) -> Result<()> {
    let split = inputs.iter().filter(|input| !input.layout.is_whole());
    for (buffer, input) in buffers.iter().zip(split) {
        let shard = host::host(&input.shard)?;
        let element = input.dtype.size();
        for span in input.layout.spans(rank) {
            let bytes = span.full * element..(span.full + span.len) * element;
            // SAFETY: spans of one rank are disjoint, those of different ranks too, and nobody
            // reads before all ranks have arrived.
            let target = unsafe { buffer.slice_mut(bytes) };
            host::copy_cast(&shard, span.shard, target, input.dtype);
        }
    }
    Ok(())
}

/// A tensor that every rank holds whole: itself, or a counted copy in another dtype.
pub(super) fn cast_whole(input: GatherInput, memory: &Arc<MemoryCounter>) -> Result<Tensor<1>> {
    if input.shard.dtype() == input.dtype {
        return Ok(input.shard);
    }
    let bytes = input.layout.full_len() * input.dtype.size();
    let buffer = SharedBuffer::new(bytes, None);
    {
        // SAFETY: the buffer is this function's own.
        let target = unsafe { buffer.slice_mut(0..bytes) };
        host::copy_cast(&host::host(&input.shard)?, 0, target, input.dtype);
    }
    let counted = MemoryGuard::new(memory, bytes);
    // SAFETY: as above, and its only writer is done.
    let filled = unsafe { FilledBuffer::new(Arc::new(buffer), counted) };
    Ok(host::from_bytes(
        filled.into_bytes(),
        input.layout.full_len(),
        input.dtype,
    ))
}
