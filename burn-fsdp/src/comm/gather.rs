//! The memory work of an all-gather between threads.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
#[cfg(feature = "cube")]
use super::cube_gather::CubeGather;
use super::rendezvous::Part;
use super::{GatherInput, Gathered, host};
use crate::Result;
use crate::memory::{MemoryCounter, MemoryGuard};

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
    pub(super) unsafe fn finish(
        &self,
        expected: Vec<Expected>,
        parts: Vec<Part>,
        rank: usize,
    ) -> Gathered {
        match self {
            // SAFETY: by the contract of this function.
            Self::Host(gather) => unsafe { gather.finish(expected) },
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
        tensor: Tensor<1>,
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
            (host_cast(&input, memory)?, None)
        } else {
            let counted = MemoryGuard::new(memory, full_bytes(&input));
            (input.shard.cast(input.dtype), Some(counted))
        };
        Ok(Self::Whole { tensor, counted })
    }
}

/// A copy in the dtype to gather in, counted until it is dropped.
fn host_cast(input: &GatherInput, memory: &Arc<MemoryCounter>) -> Result<Tensor<1>> {
    let bytes = full_bytes(input);
    let buffer = SharedBuffer::new(bytes, None);
    {
        // SAFETY: the buffer is this function's own.
        let target = unsafe { buffer.slice_mut(0..bytes) };
        host::copy_cast(&host::host(&input.shard)?, 0, target, input.dtype);
    }
    let counted = MemoryGuard::new(memory, bytes);
    // SAFETY: as above, and its only writer is done.
    let filled = unsafe { FilledBuffer::new(Arc::new(buffer), counted) };
    let len = input.layout.full_len();
    Ok(host::from_bytes(filled.into_bytes(), len, input.dtype))
}

fn full_bytes(input: &GatherInput) -> usize {
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
        let finish = |expected| match expected {
            Expected::Whole { tensor, .. } => tensor,
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
        Gathered {
            tensors: expected.into_iter().map(finish).collect(),
            _counted: Vec::new(),
        }
    }
}
