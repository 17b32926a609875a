//! What a unit is made of: its description, and the shards that its parameters hold now.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use crate::comm::{Counters, GatherInput, ProcessGroup};
use crate::memory::MemoryCounter;
use crate::mesh::DeviceMesh;
use crate::placement::ShardLayout;
use crate::{FsdpError, GradientAverage, Result};

/// What the units of one module have in common.
#[derive(Debug)]
pub(crate) struct Context {
    /// The number under which ranks know the module.
    pub(crate) module: u64,
    pub(crate) mesh: DeviceMesh,
    pub(crate) average: GradientAverage,
    /// Where unsharded parameters live.
    pub(crate) compute_device: Device,
    /// Where shards and their gradients live.
    pub(crate) shard_device: Device,
    pub(crate) memory: Arc<MemoryCounter>,
    pub(crate) counters: Counters,
}

/// What happens to the unsharded parameters when the forward moves on.
#[derive(Clone, Debug)]
pub(crate) enum AfterForward {
    Free,
    Keep,
    /// Reshard over this subgroup of the shard ranks.
    Regroup(ProcessGroup),
}

/// What never changes about a unit.
#[derive(Debug)]
pub(crate) struct UnitSpec {
    pub(crate) name: Arc<str>,
    pub(crate) members: Vec<MemberSpec>,
    pub(crate) after_forward: AfterForward,
    pub(crate) param_dtype: Option<DType>,
    pub(crate) reduce_dtype: Option<DType>,
}

#[derive(Debug)]
pub(crate) struct MemberSpec {
    pub(crate) path: String,
    pub(crate) layout: ShardLayout,
}

/// A member's shard as the parameter holds it now, without autodiff.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) flat: Tensor<1>,
    pub(crate) trainable: bool,
}

/// A unit's shards. They have a lock of their own, for other ranks to gather from while this one
/// waits.
#[derive(Debug)]
pub(crate) struct ShardBoard {
    pub(crate) shards: Vec<Option<Shard>>,
    /// How often a shard has been replaced; equal on all ranks.
    pub(crate) generation: u64,
}

impl ShardBoard {
    pub(crate) fn get(&self, spec: &UnitSpec, member: usize) -> Result<&Shard> {
        self.shards[member].as_ref().ok_or_else(|| {
            let path = &spec.members[member].path;
            FsdpError::argument(format!("parameter \"{path}\" is being updated"))
        })
    }

    pub(crate) fn gather_inputs(
        &self,
        spec: &UnitSpec,
        context: &Context,
    ) -> Result<Vec<GatherInput>> {
        let members = spec.members.iter().enumerate();
        members
            .map(|(i, member)| {
                let shard = self.get(spec, i)?;
                let len = shard.flat.dims()[0];
                if len != member.layout.shard_len() {
                    return Err(FsdpError::argument(format!(
                        "the shard of \"{}\" was replaced by one of {len} elements; it must keep \
                         its {}",
                        member.path,
                        member.layout.shard_len()
                    )));
                }
                Ok(GatherInput {
                    layout: member.layout.clone(),
                    dtype: spec.param_dtype.unwrap_or(shard.flat.dtype()),
                    shard: shard.flat.clone().to_device(&context.compute_device),
                })
            })
            .collect()
    }
}
