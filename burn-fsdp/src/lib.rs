//! Fully sharded data parallel training for [Burn](https://burn.dev).
//!
//! [`fully_shard`](FullyShard::fully_shard) takes a module as it is and leaves each rank a shard of
//! its parameters, and so of its gradients and of the optimizer's state. A parameter is whole only
//! while it is used:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, launch};
//!
//! let losses = launch(2, |pg| {
//!     let device = Device::flex().autodiff().gradient_checkpointing();
//!     let mesh = DeviceMesh::shard(&pg);
//!     let linear: Linear = LinearConfig::new(8, 1).init(&device);
//!     let mut model = linear.fully_shard(&mesh, &FsdpConfig::new())?;
//!     let mut optim = AdamWConfig::new().init();
//!     let mut last = 0.0;
//!     for _ in 0..3 {
//!         let loss = model.forward(Tensor::<2>::ones([4, 8], &device)).powf_scalar(2.0).mean();
//!         last = loss.clone().into_scalar::<f32>();
//!         let grads = model.backward(loss);
//!         let (grads, _norm) = model.clip_grad_norm(grads, 1.0)?;
//!         model = model.step(&mut optim, 1e-2, grads)?;
//!     }
//!     Ok(last)
//! })?;
//! assert_eq!(losses[0], losses[1]);
//! # Ok::<(), burn_fsdp::FsdpError>(())
//! ```
//!
//! # How it works
//!
//! - `Param::val()` is the hook. A sharded parameter is a [reparameterization] of a placeholder
//!   that has the full shape and no storage; asked for its value, it *unshards*.
//! - Parameters are grouped into *units* ([`UnitPolicy`]): by default each element of a `Vec` of
//!   modules, and the *root* for the rest. The first parameter asked for unshards its whole unit by
//!   one all-gather; asking for another unit *reshards* it.
//! - Unsharding is an operation in Burn's autodiff graph. Backward unshards units again where they
//!   are needed, in reverse order, and hands each full gradient to its unit, which averages them
//!   over the ranks by one reduce-scatter and leaves this rank's shard of each.
//! - Optimizers, records and everything else that traverses a module meets the shards, under the
//!   parameters' own paths and ids.
//!
//! The algorithm is that of ZeRO stage 3 (Rajbhandari et al., 2020) in the shape PyTorch gave it
//! (Zhao et al., *PyTorch FSDP*, 2023, and its successor `fully_shard`), whose words this crate
//! uses.
//!
//! # What a rank must keep to
//!
//! Ranks run the same program. Where the documentation says that *all ranks must call this, in the
//! same order*, it means it; the forward of a sharded module is such a call. Ranks that part ways
//! do not hang: all of them get the same [`FsdpError`], which names who called what.
//!
//! [reparameterization]: burn::module::Reparameterization

#![deny(missing_docs)]
// Kernels and NCCL need more than the rest does. What nobody needs is found where all features are on.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod backward;
mod board;
mod buffers;
mod comm;
mod config;
mod error;
mod forward;
mod full;
mod fully_shard;
mod grads;
#[cfg(feature = "cube")]
mod kernels;
mod memory;
mod mesh;
mod module;
mod norm;
mod order;
mod param;
mod pass;
mod path;
mod placement;
mod plan;
mod ranked;
mod reduction;
mod schedule;
mod shards;
mod state;
mod state_dict;
mod tree;
mod unit;
mod unshard;

pub use comm::{CollectiveCounts, LaunchConfig, ProcessGroup, launch, launch_from_env};
pub use config::{
    FsdpConfig, GradientAverage, MixedPrecisionPolicy, ModuleNode, NonFinite, OffloadPolicy,
    ParamInfo, ReshardAfterForward, UnitConfig, UnitPolicy,
};
pub use error::{FsdpError, Result};
pub use forward::CastFloats;
pub use fully_shard::FullyShard;
pub use memory::MemoryStats;
pub use mesh::DeviceMesh;
pub use module::{FsdpModule, NoSyncGuard};
pub use placement::Placement;
pub use plan::{ParamPlan, ShardingPlan, UnitPlan};
pub use reduction::{NormType, ReduceOp};
pub use schedule::Event;
pub use shards::{ShardSpec, ShardedStateDict, ShardedTensor, dense_specs};
pub use state_dict::{LoadMode, LoadReport, StateDict, StateDictTarget};

/// What a training script needs.
pub mod prelude {
    pub use crate::{
        DeviceMesh, FsdpConfig, FsdpError, FsdpModule, FullyShard, MixedPrecisionPolicy,
        ProcessGroup, ReshardAfterForward, Result, launch, launch_from_env,
    };
}

/// Compiles and runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
