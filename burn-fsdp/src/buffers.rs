//! What is not sharded but should be equal at the start: running statistics, integer and boolean
//! parameters.
//!
//! Values are collected, then sent, then put back. Sending while the module is traversed could hang:
//! a running statistic is locked then, and ranks that copied one module share the lock.

use std::collections::VecDeque;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
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
    let mut collect = Buffers::new(plan);
    module.visit(&mut collect);
    let own = collect.values.into_iter();
    let values = own.map(|data| broadcast_data(group, data));
    let mut put = Buffers::new(plan);
    put.values = values.collect::<Result<_>>()?;
    Ok(module.map(&mut put))
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

/// The values of a module's buffers, in traversal order: taken by a visitor, put by a mapper.
struct Buffers<'a> {
    plan: &'a ShardingPlan,
    path: PathStack,
    values: VecDeque<TensorData>,
}

impl<'a> Buffers<'a> {
    fn new(plan: &'a ShardingPlan) -> Self {
        Self {
            plan,
            path: PathStack::default(),
            values: VecDeque::new(),
        }
    }

    fn next(&mut self) -> TensorData {
        let value = self.values.pop_front();
        value.expect("a mapper meets the buffers that a visitor met")
    }
}

impl ModuleVisitor for Buffers<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.plan.is_buffer(&self.path.join()) {
            self.values.push_back(param.val().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.values.push_back(param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.values.push_back(param.val().into_data());
    }
}

/// The same tensor with another value.
macro_rules! with_value {
    ($tensor:expr, $value:expr) => {{
        let (device, dtype) = ($tensor.device(), $tensor.dtype());
        Tensor::from_data($value, (&device, dtype))
    }};
}
pub(crate) use with_value;

impl ModuleMapper for Buffers<'_> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.plan.is_buffer(&self.path.join()) {
            return param;
        }
        param.map(|own| with_value!(own, self.next()))
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|own| with_value!(own, self.next()))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.map(|own| with_value!(own, self.next()))
    }
}
