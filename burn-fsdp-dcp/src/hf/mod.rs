//! Checkpoints in the safetensors format of Hugging Face: read as they are, written whole.

mod export;
mod header;
mod import;
mod layout;

pub use export::{ExportOptions, export_safetensors};
pub use import::HfCheckpoint;
pub use layout::{LayoutSource, PyTorchTensor, TensorLayout, pytorch_layout};
