//! Distributed checkpoints.

#![deny(missing_docs)]

mod checkpoint;
mod codec;
mod dtype;
mod error;
mod hf;
mod load;
mod manager;
mod manifest;
mod optimizer;
mod pending;
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
pub use save::{SaveOptions, Saver, WhenBusy};
pub use seed::StepSeed;
pub use snapshot::Snapshot;
pub use source::{TensorInfo, TensorSource};
pub use stateful::Stateful;
pub use storage::{LocalStorage, Location, ReadFile, Storage, WriteFile};
pub use tiling::check_tiling;
pub use torch::{TorchCheckpoint, TorchValue, export_torch};
