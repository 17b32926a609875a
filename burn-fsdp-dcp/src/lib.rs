//! Distributed checkpoints.

#![deny(missing_docs)]

mod dtype;
mod error;
mod region;
mod report;
mod source;
mod torch;

pub use dtype::{dtype_name, dtype_of};
pub use error::{DcpError, Result};
pub use region::{Region, Run};
pub use report::LoadReport;
pub use source::{TensorInfo, TensorSource};
pub use torch::{TorchCheckpoint, TorchValue, export_torch};
