//! A reduction between threads, in the memory of CubeCL's devices.
//!
//! Each rank packs its gradients into a slot for every rank and shows them. Then it combines its own
//! part of everyone's, in rank order, so that results are bit-equal from run to run.

use std::sync::Arc;

use burn::backend::CubeDevice;
use burn::tensor::Tensor;

use super::bundle::Bundle;
use super::cube::{DeviceBuffer, buffer_of, filled, tensor_of};
use super::rendezvous::Seat;
use super::{Call, ReduceInput};
use crate::Result;
use crate::kernels::{self, Buffer};
use crate::reduction::Reduction;

impl Bundle {
    /// This rank's gradients, packed into all slots.
    fn pack(
        &self,
        inputs: &[ReduceInput],
        pre_divide: f64,
        device: &CubeDevice,
    ) -> Result<DeviceBuffer> {
        let gradients = self.members.iter().map(|&i| {
            let buffer = inputs[i].contribution.clone().map(buffer_of).transpose()?;
            Ok(buffer.map(|buffer| buffer.on(device)))
        });
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        let client = device.client();
        let buffer = filled(&client, || {
            let slots = Buffer::empty(&client, self.slots_len(), self.dtype);
            kernels::pack_gradients(&client, &self.packing, &gradients, &slots, pre_divide);
            slots
        })?;
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
        let wide = kernels::wide([self.dtype]);
        let total = Buffer::empty(&client, self.packing.shard_len(), wide);
        let slot = self.slot(rank);
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
        let (via, post_divide) = (self.dtype, reduction.post_divide);
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
    let kinds = inputs.iter().enumerate();
    let bundles = Bundle::all(kinds.map(|(i, input)| (i, &input.layout, input.reduce_dtype)));
    let pack = |bundle: &Bundle| bundle.pack(inputs, reduction.pre_divide, device);
    let own = bundles.iter().map(pack).collect::<Result<Vec<_>>>()?;
    let all: Vec<Arc<Vec<DeviceBuffer>>> = seat.rendezvous(call, own)?;
    let mut reduced: Vec<_> = inputs.iter().map(|_| None).collect();
    for (nth, bundle) in bundles.iter().enumerate() {
        let parts = all.iter().map(|slots| &slots[nth]);
        let shards = bundle.combine(inputs, parts, reduction, seat.rank, device);
        for (&i, shard) in bundle.members.iter().zip(shards) {
            reduced[i] = Some(tensor_of(shard, device));
        }
    }
    let reduced = reduced.into_iter();
    Ok(reduced
        .map(|shard| shard.expect("every input is in a bundle"))
        .collect())
}
