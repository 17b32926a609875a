//! What is not sharded but should be equal at the start: running statistics, integer and boolean
//! parameters.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};

use crate::comm::ProcessGroup;
use crate::path::{PathStack, follow_path};
use crate::plan::ShardingPlan;
use crate::{FsdpError, Result};

/// Gives every rank rank 0's buffers. All ranks must call this, with modules of equal structure.
pub(crate) fn broadcast_buffers<M: Module>(
    module: M,
    plan: &ShardingPlan,
    group: &ProcessGroup,
) -> Result<M> {
    let mut broadcast = Broadcast {
        plan,
        group,
        path: PathStack::default(),
        error: None,
    };
    let module = module.map(&mut broadcast);
    broadcast.error.map_or(Ok(module), Err)
}

struct Broadcast<'a> {
    plan: &'a ShardingPlan,
    group: &'a ProcessGroup,
    path: PathStack,
    error: Option<FsdpError>,
}

impl Broadcast<'_> {
    /// Rank 0's value of a buffer of which this rank has another; its own after an error.
    fn value(&mut self, own: TensorData) -> TensorData {
        if self.error.is_some() {
            return own;
        }
        broadcast_data(self.group, own.clone()).unwrap_or_else(|error| {
            self.error = Some(error);
            own
        })
    }
}

/// Rank 0's data; the others pass data of the same shape and dtype.
pub(crate) fn broadcast_data(group: &ProcessGroup, own: TensorData) -> Result<TensorData> {
    let (bytes, shape, dtype) = own.into_parts();
    let len = bytes.len();
    let bytes = group.broadcast_bytes(0, bytes.to_vec())?;
    if bytes.len() != len {
        return Err(FsdpError::argument(format!(
            "rank 0 holds a buffer of {} bytes where rank {} holds one of {len}",
            bytes.len(),
            group.rank()
        )));
    }
    let bytes = Bytes::from_bytes_vec(bytes);
    Ok(TensorData::from_bytes(bytes, shape, dtype))
}

impl ModuleMapper for Broadcast<'_> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.plan.is_buffer(&self.path.join()) {
            return param;
        }
        param.map(|own| {
            let device = own.device();
            let dtype = own.dtype();
            Tensor::from_data(self.value(own.into_data()), (&device, dtype))
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|own| {
            let device = own.device();
            let dtype = own.dtype();
            Tensor::from_data(self.value(own.into_data()), (&device, dtype))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.map(|own| {
            let device = own.device();
            let dtype = own.dtype();
            Tensor::from_data(self.value(own.into_data()), (&device, dtype))
        })
    }
}
