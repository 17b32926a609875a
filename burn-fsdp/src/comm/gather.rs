//! The memory work of an all-gather.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use bytes::Bytes;

use super::GatherInput;
use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
use super::host;
use super::message::MessageWriter;
use crate::Result;
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::ShardLayout;

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

/// `rank`'s shards, cast and without padding, as a message to all ranks.
pub(super) fn pack_shards(
    inputs: &[GatherInput],
    rank: usize,
    pool: Option<&Arc<BufferPool>>,
) -> Result<Bytes> {
    let split = || inputs.iter().filter(|input| !input.layout.is_whole());
    let len = |input: &GatherInput| input.layout.owned_len(rank) * input.dtype.size();
    let mut message = MessageWriter::new(split().map(len), pool);
    for input in split() {
        let shard = host::host(&input.shard)?;
        let piece = message.piece(len(input));
        let element = input.dtype.size();
        for (place, span) in input.layout.packed_spans(rank) {
            let target = &mut piece[place * element..(place + span.len) * element];
            host::copy_cast(&shard, span.shard, target, input.dtype);
        }
    }
    Ok(message.finish())
}

/// Writes a piece of `rank`'s message into its places in the full tensor.
pub(super) fn unpack_shard(
    piece: &[u8],
    full: &mut SharedBuffer,
    layout: &ShardLayout,
    rank: usize,
    dtype: DType,
) {
    let (full, element) = (full.as_mut_slice(), dtype.size());
    for (place, span) in layout.packed_spans(rank) {
        let source = &piece[place * element..(place + span.len) * element];
        full[span.full * element..(span.full + span.len) * element].copy_from_slice(source);
    }
}

/// A tensor that every rank holds whole: itself, or a counted copy in another dtype.
pub(super) fn cast_whole(input: GatherInput, memory: &Arc<MemoryCounter>) -> Result<Tensor<1>> {
    if input.shard.dtype() == input.dtype {
        return Ok(input.shard);
    }
    let bytes = full_bytes(&input);
    let mut buffer = SharedBuffer::new(bytes, None);
    let target = buffer.as_mut_slice();
    host::copy_cast(&host::host(&input.shard)?, 0, target, input.dtype);
    let filled = FilledBuffer::of(buffer, MemoryGuard::new(memory, bytes));
    Ok(host::from_bytes(
        filled.into_bytes(),
        input.layout.full_len(),
        input.dtype,
    ))
}
