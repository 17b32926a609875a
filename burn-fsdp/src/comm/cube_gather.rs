//! An all-gather between threads, in the memory of CubeCL's devices.
//!
//! Each rank packs its shards, cast, into a slot that it shows to the others. Who first sees the
//! slots of all unpacks them on its device, and all ranks on that device share what it has made.

use std::sync::Arc;

use burn::backend::CubeDevice;
use parking_lot::Mutex;

use super::bundle::Bundle;
use super::cube::{DeviceBuffer, buffer_of, filled, tensor_of};
use super::expected::Expected;
use super::part::Part;
use super::{GatherInput, Gathered};
use crate::Result;
use crate::kernels::{self, Buffer, Rounding};

/// What the ranks of one gather have in common.
#[derive(Debug)]
pub(super) struct CubeGather {
    bundles: Vec<Bundle>,
    /// The full tensors, for each device that a rank is on.
    full: Mutex<Vec<(CubeDevice, Vec<Buffer>)>>,
}

/// What a rank shows: its slot of each [`Bundle`].
type Slots = Vec<DeviceBuffer>;

impl CubeGather {
    pub(super) fn new(inputs: &[GatherInput]) -> Self {
        let inputs = inputs.iter().enumerate();
        let split = inputs.filter(|(_, input)| !input.layout.is_whole());
        Self {
            bundles: Bundle::all(split.map(|(i, input)| (i, &input.layout, input.dtype))),
            full: Mutex::default(),
        }
    }

    /// Packs a rank's shards; from any rank's thread.
    pub(super) fn contribute(&self, inputs: &[GatherInput]) -> Result<Part> {
        let slots = self.bundles.iter().map(|bundle| {
            let shards = bundle
                .members
                .iter()
                .map(|&i| buffer_of(inputs[i].shard.clone()));
            let shards = shards.collect::<Result<Vec<_>>>()?;
            shards.iter().try_for_each(DeviceBuffer::settle)?;
            let device = shards[0].device.clone();
            let shards: Vec<_> = shards.into_iter().map(|shard| shard.buffer).collect();
            let (client, packing) = (device.client(), &bundle.packing);
            let buffer = filled(&client, || {
                let slot = Buffer::empty(&client, packing.shard_len(), bundle.dtype);
                kernels::pack(&client, packing, &shards, &slot, Rounding::Nearest);
                slot
            })?;
            Ok(DeviceBuffer { buffer, device })
        });
        let slots: Slots = slots.collect::<Result<_>>()?;
        Ok(Arc::new(slots))
    }

    /// The full tensors, on the device of this rank's own slot.
    pub(super) fn finish(
        &self,
        expected: Vec<Expected>,
        parts: Vec<Part>,
        rank: usize,
    ) -> Result<Gathered> {
        let all = parts.into_iter().map(|part| part.downcast::<Slots>());
        let all = all.map(|slots| slots.expect("ranks of one gather show slots"));
        let all: Vec<_> = all.collect();
        let mut tensors: Vec<_> = expected.iter().map(|_| None).collect();
        if let Some(own) = all[rank].first() {
            for (bundle, full) in self.bundles.iter().zip(self.full(&all, &own.device)?) {
                for (nth, &i) in bundle.members.iter().enumerate() {
                    let member = full.range(bundle.packing.full(nth));
                    tensors[i] = Some(tensor_of(member, &own.device));
                }
            }
        }
        let mut counted = Vec::new();
        let tensors = expected.into_iter().zip(tensors).map(|(expected, split)| {
            let (whole, guard) = match expected {
                Expected::Whole { tensor, counted } => (Some(*tensor), counted),
                Expected::Split { counted, .. } => (None, Some(counted)),
            };
            counted.extend(guard);
            whole.or(split).expect("a tensor is whole or split")
        });
        Ok(Gathered {
            tensors: tensors.collect(),
            _counted: counted,
        })
    }

    /// The full tensors on a device, one buffer for each [`Bundle`]. The first rank unpacks them.
    fn full(&self, all: &[Arc<Slots>], device: &CubeDevice) -> Result<Vec<Buffer>> {
        let mut full = self.full.lock();
        if let Some((_, buffers)) = full.iter().find(|(on, _)| on == device) {
            return Ok(buffers.clone());
        }
        let client = device.client();
        let unpack = |(i, bundle): (usize, &Bundle)| {
            let packing = &bundle.packing;
            let slots: Vec<_> = all.iter().map(|slots| slots[i].on(device)).collect();
            filled(&client, || {
                let buffer = Buffer::empty(&client, packing.full_len(), bundle.dtype);
                for (rank, slot) in slots.iter().enumerate() {
                    kernels::unpack(&client, packing, rank..rank + 1, slot, &buffer);
                }
                buffer
            })
        };
        let buffers = self.bundles.iter().enumerate().map(unpack);
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        full.push((device.clone(), buffers.clone()));
        Ok(buffers)
    }
}
