//! The memory work of an all-gather.

use std::sync::Arc;

use burn::tensor::DType;
use bytes::Bytes;

use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
#[cfg(feature = "cube")]
use super::cube_gather::CubeGather;
use super::expected::{Expected, full_bytes};
use super::message::MessageWriter;
use super::part::Part;
use super::{GatherInput, Gathered, host};
use crate::Result;
use crate::placement::ShardLayout;

/// What the ranks of a gather fill together. The rank that comes first makes it for all.
#[derive(Debug)]
pub(super) enum GatherSpace {
    Host(HostGather),
    #[cfg(feature = "cube")]
    Cube(CubeGather),
}

impl GatherSpace {
    /// For inputs like these. Host buffers come from the pool, if there is one.
    pub(super) fn new(inputs: &[GatherInput], pool: Option<&Arc<BufferPool>>) -> Self {
        #[cfg(feature = "cube")]
        if super::cube::device_of(&inputs[0].shard.device()).is_some() {
            return Self::Cube(CubeGather::new(inputs));
        }
        Self::Host(HostGather::new(inputs, pool))
    }

    /// Adds `rank`'s shards, cast; what to show to the others. Once a gather and rank only.
    pub(super) fn contribute(&self, inputs: &[GatherInput], rank: usize) -> Result<Part> {
        match self {
            Self::Host(gather) => gather.contribute(inputs, rank),
            #[cfg(feature = "cube")]
            Self::Cube(gather) => gather.contribute(inputs),
        }
    }

    /// The full tensors for `rank`, from what all ranks have shown.
    ///
    /// # Safety
    ///
    /// All ranks must have contributed.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub(super) unsafe fn finish(
        &self,
        expected: Vec<Expected>,
        parts: Vec<Part>,
        rank: usize,
    ) -> Result<Gathered> {
        match self {
            // SAFETY: by the contract of this function.
            Self::Host(gather) => Ok(unsafe { gather.finish(expected) }),
            #[cfg(feature = "cube")]
            Self::Cube(gather) => gather.finish(expected, parts, rank),
        }
    }
}

/// A gather in host memory: the ranks write straight into the full tensors, one buffer each.
#[derive(Debug)]
pub(super) struct HostGather(Vec<Arc<SharedBuffer>>);

impl HostGather {
    fn new(inputs: &[GatherInput], pool: Option<&Arc<BufferPool>>) -> Self {
        let split = inputs.iter().filter(|input| !input.layout.is_whole());
        let buffer = |input| Arc::new(SharedBuffer::new(full_bytes(input), pool));
        Self(split.map(buffer).collect())
    }

    fn contribute(&self, inputs: &[GatherInput], rank: usize) -> Result<Part> {
        let split = inputs.iter().filter(|input| !input.layout.is_whole());
        for (buffer, input) in self.0.iter().zip(split) {
            let shard = host::host(&input.shard)?;
            let element = input.dtype.size();
            for span in input.layout.spans(rank) {
                let bytes = span.full * element..(span.full + span.len) * element;
                // SAFETY: spans of one rank are disjoint, those of different ranks too, and nobody
                // reads before all ranks have contributed.
                let target = unsafe { buffer.slice_mut(bytes) };
                host::copy_cast(&shard, span.shard, target, input.dtype);
            }
        }
        Ok(Arc::new(()))
    }

    /// # Safety
    ///
    /// All ranks must have contributed.
    unsafe fn finish(&self, expected: Vec<Expected>) -> Gathered {
        let mut buffers = self.0.iter();
        let mut guards = Vec::new();
        let finish = |expected| match expected {
            Expected::Whole { tensor, counted } => {
                guards.extend(counted);
                *tensor
            }
            Expected::Split {
                len,
                dtype,
                counted,
            } => {
                let buffer = buffers
                    .next()
                    .expect("there is a buffer for each split tensor");
                // SAFETY: by the contract of this function, all writers are done.
                let filled = unsafe { FilledBuffer::new(buffer.clone(), counted) };
                host::from_bytes(filled.into_bytes(), len, dtype)
            }
        };
        let tensors = expected.into_iter().map(finish).collect();
        Gathered {
            tensors,
            _counted: guards,
        }
    }
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
