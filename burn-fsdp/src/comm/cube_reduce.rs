//! A reduction between threads, in the memory of CubeCL's devices.
//!
//! Each rank packs its gradients into a slot for every rank and shows them. Then it combines its own
//! part of everyone's, in rank order, so that results are bit-equal from run to run.

use std::sync::Arc;

use burn::backend::CubeDevice;
use burn::tensor::{DType, Tensor};

use super::cube::{DeviceBuffer, buffer_of, tensor_of};
use super::cube_gather::by_dtype;
use super::rendezvous::Seat;
use super::{Call, ReduceInput};
use crate::Result;
use crate::kernels::{self, Buffer, Packing};
use crate::placement::ShardLayout;
use crate::reduction::Reduction;

/// The tensors that are reduced in one dtype and placed alike, one after another.
struct Flat {
    reduce_dtype: DType,
    is_whole: bool,
    /// Their places among all inputs.
    members: Vec<usize>,
    packing: Packing,
}

impl Flat {
    fn all(inputs: &[ReduceInput]) -> Vec<Self> {
        let key = |i: usize| (inputs[i].reduce_dtype, inputs[i].layout.is_whole());
        let flat = |((reduce_dtype, is_whole), members): ((DType, bool), Vec<usize>)| {
            let layouts = members.iter().map(|&i| match is_whole {
                // One slot for all ranks.
                true => inputs[i].layout.with_world_size(1),
                false => inputs[i].layout.clone(),
            });
            Self {
                reduce_dtype,
                is_whole,
                packing: Packing::new(&layouts.collect::<Vec<ShardLayout>>()),
                members,
            }
        };
        by_dtype(0..inputs.len(), key)
            .into_iter()
            .map(flat)
            .collect()
    }

    /// This rank's gradients, packed into all slots.
    fn pack(
        &self,
        inputs: &[ReduceInput],
        pre_divide: f64,
        world_size: usize,
        device: &CubeDevice,
    ) -> Result<DeviceBuffer> {
        let slots = if self.is_whole { 1 } else { world_size };
        let gradients = self.members.iter().map(|&i| {
            let buffer = inputs[i].contribution.clone().map(buffer_of).transpose()?;
            Ok(buffer.map(|buffer| buffer.on(device)))
        });
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        let client = device.client();
        let len = slots * self.packing.shard_len();
        let buffer = Buffer::empty(&client, len, self.reduce_dtype);
        kernels::pack_gradients(&client, &self.packing, &gradients, &buffer, pre_divide);
        Ok(DeviceBuffer {
            buffer,
            device: device.clone(),
        })
    }

    /// A rank's part of everyone's, combined; one buffer for each member.
    fn combine<'a>(
        &self,
        inputs: &[ReduceInput],
        parts: impl Iterator<Item = &'a DeviceBuffer>,
        reduction: &Reduction,
        rank: usize,
        device: &CubeDevice,
    ) -> Vec<Buffer> {
        let client = device.client();
        let wide = match self.reduce_dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let total = Buffer::empty(&client, self.packing.shard_len(), wide);
        let slot = self.packing.slot(if self.is_whole { 0 } else { rank });
        for (i, part) in parts.enumerate() {
            let part = DeviceBuffer {
                buffer: part.buffer.range(slot.clone()),
                device: part.device.clone(),
            };
            kernels::combine(&client, reduction.op, &part.on(device), &total, i == 0);
        }
        let shard = |&i: &usize| {
            let ReduceInput {
                layout, out_dtype, ..
            } = &inputs[i];
            Buffer::empty(&client, layout.shard_len(), *out_dtype)
        };
        let shards: Vec<_> = self.members.iter().map(shard).collect();
        let (via, post_divide) = (self.reduce_dtype, reduction.post_divide);
        kernels::finish(
            &client,
            &self.packing,
            &total,
            via,
            &shards,
            post_divide,
            false,
        );
        shards
    }
}

/// Reduces each input and leaves this rank's shard of it. See [`Engine::reduce`](super::Engine).
pub(super) fn reduce(
    seat: &Seat,
    call: Call,
    inputs: &[ReduceInput],
    reduction: &Reduction,
    device: &CubeDevice,
) -> Result<Vec<Tensor<1>>> {
    let flats = Flat::all(inputs);
    let pack = |flat: &Flat| flat.pack(inputs, reduction.pre_divide, seat.group.size(), device);
    let own = flats.iter().map(pack).collect::<Result<Vec<_>>>()?;
    let all: Vec<Arc<Vec<DeviceBuffer>>> = seat.rendezvous(call, own)?;
    let mut reduced: Vec<_> = inputs.iter().map(|_| None).collect();
    for (nth, flat) in flats.iter().enumerate() {
        let parts = all.iter().map(|slots| &slots[nth]);
        let shards = flat.combine(inputs, parts, reduction, seat.rank, device);
        for (&i, shard) in flat.members.iter().zip(shards) {
            reduced[i] = Some(tensor_of(shard, device));
        }
    }
    let reduced = reduced.into_iter();
    Ok(reduced
        .map(|shard| shard.expect("every input is in a flat"))
        .collect())
}
