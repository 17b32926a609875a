//! The arrangement of ranks over which parameters are split and replicated.

use crate::comm::ProcessGroup;
use crate::{FsdpError, Result};

/// One or two dimensions of ranks: parameters are sharded over one, replicated over the other.
#[derive(Clone, Debug)]
pub struct DeviceMesh {
    world: ProcessGroup,
    shard: ProcessGroup,
    replicate: Option<ProcessGroup>,
}

impl DeviceMesh {
    /// Shards over all ranks of the group (FSDP). Makes no communication.
    pub fn shard(group: &ProcessGroup) -> Self {
        Self {
            world: group.clone(),
            shard: group.clone(),
            replicate: None,
        }
    }

    /// `replicate` copies of the model, each sharded over `shard` neighbouring ranks (hybrid
    /// sharding, HSDP): gradients are reduce-scattered within a copy, then all-reduced between
    /// copies.
    ///
    /// All ranks must call this, in the same order.
    ///
    /// # Errors
    ///
    /// [`FsdpError::InvalidMesh`] if `replicate * shard` is not the size of the group; if ranks
    /// disagree.
    pub fn hybrid(group: &ProcessGroup, replicate: usize, shard: usize) -> Result<Self> {
        if replicate.checked_mul(shard) != Some(group.world_size()) {
            return Err(FsdpError::InvalidMesh {
                replicate,
                shard,
                world_size: group.world_size(),
            });
        }
        group.agree("the mesh", &format!("{replicate} x {shard}"))?;
        Ok(Self {
            world: group.clone(),
            shard: group.split(group.rank() / shard)?,
            replicate: Some(group.split(group.rank() % shard)?),
        })
    }

    /// The group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.world
    }

    /// The number of ranks over which parameters are sharded.
    pub fn shard_size(&self) -> usize {
        self.shard.world_size()
    }

    /// The number of copies of the model; 1 without a replicate dimension.
    pub fn replicate_size(&self) -> usize {
        self.replicate.as_ref().map_or(1, ProcessGroup::world_size)
    }

    /// This rank's place among those that share one copy of the model.
    pub fn shard_rank(&self) -> usize {
        self.shard.rank()
    }

    /// The number of this rank's copy of the model.
    pub fn replicate_rank(&self) -> usize {
        self.replicate.as_ref().map_or(0, ProcessGroup::rank)
    }

    pub(crate) fn shard_group(&self) -> &ProcessGroup {
        &self.shard
    }

    /// The ranks that hold the same shard; `None` if there is one copy only.
    pub(crate) fn replicate_group(&self) -> Option<&ProcessGroup> {
        self.replicate.as_ref().filter(|g| g.world_size() > 1)
    }
}
