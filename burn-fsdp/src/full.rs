//! Full parameters from shards, and shards from full parameters, one parameter at a time.

use burn::tensor::{Device, Tensor};

use crate::Result;
use crate::comm::{Call, GatherInput};
use crate::mesh::DeviceMesh;
use crate::placement::{Placement, ShardLayout};
use crate::plan::MemberIndex;
use crate::state::FsdpState;

/// A full parameter in its original dtype, flat. All ranks must call this.
pub(crate) fn gather(state: &FsdpState, path: &str, index: MemberIndex) -> Result<Tensor<1>> {
    let shard = state.shard(index.unit, index.member)?;
    let group = state.context.mesh.shard_group();
    let input = GatherInput {
        layout: state.plan.layout(index.unit, index.member),
        dtype: shard.dtype(),
        shard,
    };
    let inputs = vec![input];
    let call = Call::gather(format!("parameter \"{path}\""), &inputs)
        .with_detail((state.context.module, state.generation(index.unit)));
    let engine = group.engine();
    let work = engine.all_gather(call, None, inputs, &Default::default())?;
    Ok(work.wait()?.tensors.remove(0))
}

/// This rank's shard, flat and on `device`, of a full tensor that only rank 0 passes.
pub(crate) fn scatter(
    mesh: &DeviceMesh,
    call: Call,
    layout: &ShardLayout,
    full: Option<Tensor<1>>,
    device: &Device,
) -> Result<Tensor<1>> {
    // The ranks of the first copy get theirs from rank 0, those of the other copies from them.
    let is_in_first_copy = mesh.group().rank() < mesh.shard_size();
    let shard = match is_in_first_copy {
        true => Some(
            mesh.shard_group()
                .engine()
                .scatter(call.clone(), 0, layout, full, device)?,
        ),
        false => None,
    };
    match mesh.replicate_group() {
        None => Ok(shard.expect("without copies every rank is in the first")),
        Some(copies) => {
            let size = copies.world_size();
            let whole = ShardLayout::flat(layout.shard_len(), Placement::Replicate, size);
            copies.engine().scatter(call, 0, &whole, shard, device)
        }
    }
}

/// The tensor with autodiff as `device` has it.
pub(crate) fn lift<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}
