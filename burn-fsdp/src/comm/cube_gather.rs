//! An all-gather between threads, in the memory of CubeCL's devices.
//!
//! Each rank packs its shards, cast, into a slot that it shows to the others. Who first sees the
//! slots of all unpacks them on its device, and all ranks on that device share what it has made.

use std::sync::Arc;

use burn::backend::CubeDevice;
use burn::tensor::DType;
use parking_lot::Mutex;

use super::cube::{DeviceBuffer, buffer_of, tensor_of};
use super::gather::Expected;
use super::rendezvous::Part;
use super::{GatherInput, Gathered};
use crate::Result;
use crate::kernels::{self, Buffer, Packing, Rounding};
use crate::placement::ShardLayout;

/// What the ranks of one gather have in common.
#[derive(Debug)]
pub(super) struct CubeGather {
    flats: Vec<Flat>,
    /// The full tensors, for each device that a rank is on.
    full: Mutex<Vec<(CubeDevice, Vec<Buffer>)>>,
}

/// The tensors that are split and gathered in one dtype, one after another.
#[derive(Debug)]
struct Flat {
    dtype: DType,
    /// Their places among all inputs.
    members: Vec<usize>,
    packing: Packing,
}

/// What a rank shows: its slot of each [`Flat`].
type Slots = Vec<DeviceBuffer>;

impl CubeGather {
    pub(super) fn new(inputs: &[GatherInput]) -> Self {
        let split = |(i, input): (usize, &GatherInput)| (!input.layout.is_whole()).then_some(i);
        let split = inputs.iter().enumerate().filter_map(split);
        let flats = by_dtype(split, |i| inputs[i].dtype).into_iter();
        let flat = |(dtype, members): (DType, Vec<usize>)| {
            let layouts = members.iter().map(|&i| inputs[i].layout.clone());
            Flat {
                dtype,
                packing: Packing::new(&layouts.collect::<Vec<ShardLayout>>()),
                members,
            }
        };
        Self {
            flats: flats.map(flat).collect(),
            full: Mutex::default(),
        }
    }

    /// Packs a rank's shards.
    pub(super) fn contribute(&self, inputs: &[GatherInput]) -> Result<Part> {
        let slots = self.flats.iter().map(|flat| {
            let shards = flat
                .members
                .iter()
                .map(|&i| buffer_of(inputs[i].shard.clone()));
            let shards = shards.collect::<Result<Vec<_>>>()?;
            let device = shards[0].device.clone();
            let shards: Vec<_> = shards.into_iter().map(|shard| shard.buffer).collect();
            let client = device.client();
            let buffer = Buffer::empty(&client, flat.packing.shard_len(), flat.dtype);
            kernels::pack(&client, &flat.packing, &shards, &buffer, Rounding::Nearest);
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
    ) -> Gathered {
        let all = parts.into_iter().map(|part| part.downcast::<Slots>());
        let all = all.map(|slots| slots.expect("ranks of one gather show slots"));
        let all: Vec<_> = all.collect();
        let mut tensors: Vec<_> = expected.iter().map(|_| None).collect();
        if let Some(own) = all[rank].first() {
            for (flat, full) in self.flats.iter().zip(self.full(&all, &own.device)) {
                for (nth, &i) in flat.members.iter().enumerate() {
                    let member = full.range(flat.packing.full(nth));
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
        Gathered {
            tensors: tensors.collect(),
            _counted: counted,
        }
    }

    /// The full tensors on a device, one buffer for each [`Flat`]. The first rank unpacks them.
    fn full(&self, all: &[Arc<Slots>], device: &CubeDevice) -> Vec<Buffer> {
        let mut full = self.full.lock();
        if let Some((_, buffers)) = full.iter().find(|(on, _)| on == device) {
            return buffers.clone();
        }
        let client = device.client();
        let unpack = |(i, flat): (usize, &Flat)| {
            let buffer = Buffer::empty(&client, flat.packing.full_len(), flat.dtype);
            for (rank, slots) in all.iter().enumerate() {
                let slot = slots[i].on(device);
                kernels::unpack(&client, &flat.packing, rank..rank + 1, &slot, &buffer);
            }
            buffer
        };
        let buffers: Vec<_> = self.flats.iter().enumerate().map(unpack).collect();
        full.push((device.clone(), buffers.clone()));
        buffers
    }
}

/// Groups places by the dtype of what is there, in the order in which dtypes first occur.
pub(super) fn by_dtype<K: PartialEq>(
    places: impl Iterator<Item = usize>,
    key: impl Fn(usize) -> K,
) -> Vec<(K, Vec<usize>)> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for place in places {
        let key = key(place);
        match groups.iter_mut().find(|(of, _)| *of == key) {
            Some((_, places)) => places.push(place),
            None => groups.push((key, vec![place])),
        }
    }
    groups
}
