//! Distributed checkpoints for [`burn_fsdp`]: each rank writes its own shards, and any number of ranks
//! loads them.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, launch};
//! use burn_fsdp_dcp::{LoadOptions, Manager, ManagerConfig, Snapshot};
//!
//! # let dir = tempfile::tempdir().unwrap();
//! # let dir = dir.path();
//! let train = |world_size, steps| {
//!     launch(world_size, |pg| {
//!         let device = Device::flex().autodiff().gradient_checkpointing();
//!         let linear = LinearConfig::new(8, 1).init(&device);
//!         let mut model = linear.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
//!         let mut optim = AdamWConfig::new().init();
//!         let config = ManagerConfig::new().with_interval(5).with_keep_latest(2).in_background(true);
//!         let mut manager = Manager::new(&pg, dir, config)?;
//!
//!         let mut first = 1;
//!         if let Some(resume) = manager.latest()? {
//!             let checkpoint = resume.checkpoint;
//!             (model, _) = checkpoint.load_model(model, &LoadOptions::new())?;
//!             (optim, _) = checkpoint.load_optimizer(optim, &model, &LoadOptions::new())?;
//!             first = checkpoint.step() + 1;
//!         }
//!         for step in first..=steps {
//!             let loss = model.forward(Tensor::<2>::ones([4, 8], &device)).powf_scalar(2.0).mean();
//!             let grads = model.backward(loss);
//!             model = model.step(&mut optim, 1e-2, grads)?;
//!             if manager.is_due(step) {
//!                 manager.save(Snapshot::new(step).model(&model).optimizer(&optim, &model))?;
//!             }
//!         }
//!         manager.finish()?;
//!         Ok(first)
//!     })
//! };
//! assert_eq!(train(2, 12)?, [1, 1]);
//! assert_eq!(train(3, 20)?, [11, 11, 11]);
//! # Ok::<(), burn_fsdp::FsdpError>(())
//! ```
//!
//! # What it promises
//!
//! - A checkpoint is whole or it is none, whenever a process dies or a disk is full; and saving over
//!   one leaves the old until the new is whole.
//! - Every byte that is read is checked. What [`Checkpoint::verify`] calls good is good.
//! - What was saved at one world size, mesh, placement and choice of units is loaded at any other, bit
//!   for bit; each rank reads the part it needs.
//! - All ranks return the same error.
//!
//! # Where to start
//!
//! [`Manager`] keeps the checkpoints of a run. [`Saver`], [`Snapshot`] and [`Checkpoint`] are the parts
//! it is made of. Other libraries' files are [`TensorSource`]s as a checkpoint is: [`HfCheckpoint`]
//! (safetensors), [`TorchCheckpoint`] (PyTorch's distributed checkpoints); [`load_model_from`] loads
//! from any of them, [`export_safetensors`] and [`export_torch`] write any of them. The command-line
//! tool `burn-dcp` does the same.
//!
//! # The format, version 1
//!
//! A checkpoint is a directory. It holds
//!
//! - `manifest`: one table, encoded as said below. **Without it there is no checkpoint.**
//! - `shard-{id}-{rank}-{n}.safetensors`: the n-th file of a rank, n from 0. The id is the
//!   checkpoint's, as 32 hexadecimal digits; rank and n are decimal, of 5 and of 3 digits at least.
//! - while a save in the background is under way, `part-{id}-{rank}`: a table for rank 0.
//!
//! Nothing depends on the files' names but through the manifest. Files that it does not name are of a
//! save that failed, or under way, and are removed by the next that succeeds. A [`Manager`] has one
//! directory `step-{n}` for each step, n decimal.
//!
//! ## Tables
//!
//! | bytes | what |
//! |---|---|
//! | 8 | the magic `BFSDPDCP` |
//! | 4 | the version of the format, 1, little-endian as all below |
//! | 8 | the length of the body |
//! | | the body |
//! | 4 | the CRC-32 of all bytes before |
//!
//! CRC-32 is that of ISO 3309, as in zip and PNG. The body is the table's fields in the order of their
//! declaration, without names:
//!
//! - an unsigned integer below 251 is one byte; others are 251, 252, 253 or 254, and 2, 4, 8 or 16
//!   bytes, the fewest that do;
//! - a float is its 8 bytes; a boolean is one byte, 0 or 1;
//! - a string is its length in bytes and UTF-8; a list is its length and its items; a map is its length
//!   and, sorted by key, keys and values;
//! - an option is the byte 0, or the byte 1 and the value.
//!
//! (This is bincode 2 in its standard configuration. The crate is no longer maintained, which is why
//! the bytes are specified here.)
//!
//! The manifest is a [`Manifest`]: id, step, time, world size, metrics, files ([`FileEntry`]: name,
//! length, rank, CRC-32 of the header), tensors by name ([`TensorEntry`]: type, shape, chunks) and states
//! by name ([`StateEntry`]: rank or none, extent). The id is one integer of 16 bytes. A chunk
//! ([`ChunkEntry`]) is a region of the whole tensor, offsets and sizes for each dimension, and an
//! [`Extent`]: the index of the file, the first byte from the start of the file, the number of bytes, and
//! the CRC-32 of each 64 KiB of them, the last of what is left.
//!
//! - Chunks lie within their tensor and tile it: each element is in one chunk. None is empty, and
//!   padding is not stored.
//! - Elements are little-endian, the last dimension running fastest.
//! - Types have the names of safetensors: `F64`, `F32`, `F16`, `BF16`, `I64` to `I8`, `U64` to `U8`,
//!   `BOOL`.
//!
//! ## Shard files
//!
//! They are safetensors: 8 bytes of length, JSON padded with spaces to a multiple of 8, and data without
//! gaps. The JSON's `__metadata__` has the checkpoint's id as `burn_fsdp_dcp.checkpoint` and the rank as
//! `burn_fsdp_dcp.rank`. Each chunk is a tensor of its size under its own name, each state one of type
//! `U8` named `state:` and its name.
//!
//! ## Names
//!
//! - `model.{path}`: parameters and running statistics under their paths in the module; a tied parameter
//!   under the first of its paths. Coordinates are those of the tensor in memory.
//! - `optimizer.{path}.{field}`: what the optimizer keeps of the parameter, under the names of its Burn
//!   record. Its scalars are the state `optimizer.scalars`: a map from paths to the parameter's shape and
//!   its scalars by name.
//! - states: `scheduler` is the bytes of Burn's record; all others are CBOR (RFC 8949). `model.running` is
//!   each rank's running statistics, a map from paths to bytes. Ids of parameters
//!   occur nowhere.

#![deny(missing_docs)]

mod checkpoint;
mod codec;
mod dtype;
mod error;
mod hf;
mod host;
mod job;
mod load;
mod manager;
mod manifest;
mod optimizer;
mod pending;
mod piece;
mod region;
mod report;
mod rewrite;
mod sampler;
mod save;
mod seed;
mod shard_file;
mod snapshot;
mod source;
mod stateful;
mod storage;
mod tiling;
mod torch;

pub use checkpoint::{Checkpoint, load_dense_model_from, load_model_from};
pub use dtype::{dtype_name, dtype_of};
pub use error::{DcpError, Result};
pub use hf::{
    ExportOptions, HfCheckpoint, LayoutSource, PyTorchTensor, TensorLayout, export_safetensors,
    pytorch_layout,
};
pub use job::{SaveOptions, WhenBusy};
pub use load::LoadOptions;
pub use manager::{Better, Manager, ManagerConfig, Resume, prunable, prune};
pub use manifest::{
    CheckpointId, ChunkEntry, Extent, FileEntry, Manifest, StateEntry, TensorEntry,
};
pub use pending::PendingSave;
pub use region::{Region, Run};
pub use report::LoadReport;
pub use rewrite::{reshard, write_checkpoint};
pub use sampler::{SamplerState, ShardedSampler};
pub use save::Saver;
pub use seed::StepSeed;
pub use snapshot::Snapshot;
pub use source::{TensorInfo, TensorSource};
pub use stateful::Stateful;
#[cfg(feature = "object-store")]
pub use storage::ObjectStorage;
pub use storage::{LocalStorage, Location, ReadFile, Storage, WriteFile};
pub use tiling::check_tiling;
pub use torch::{TorchCheckpoint, TorchValue, export_torch};
