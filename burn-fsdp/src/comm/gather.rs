//! The memory work of an all-gather.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use bytes::Bytes;

use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
#[cfg(feature = "cube")]
use super::cube_gather::CubeGather;
use super::message::MessageWriter;
use super::rendezvous::Part;
use super::{GatherInput, Gathered, host};
use crate::Result;
use crate::memory::{MemoryCounter, MemoryGuard};
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
