//! Where to train.

use burn::prelude::*;
use clap::ValueEnum;

/// A kind of device. All but the first need the feature of their name.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// Burn's portable CPU backend.
    Flex,
    /// The CPU, by kernels of CubeCL.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Rocm,
    /// Whatever WebGPU finds.
    Wgpu,
}

impl DeviceArg {
    /// The device for a rank, by its number on its host; the reason if this build has none.
    pub(crate) fn device(self, local_rank: usize) -> Result<Device, String> {
        // Only runtimes with several devices look at it.
        let _ = local_rank;
        match self {
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda => {
                let index = nth_of(burn::tensor::DeviceType::Cuda, local_rank)?;
                Ok(Device::cuda(index))
            }
            #[cfg(feature = "rocm")]
            Self::Rocm => {
                let index = nth_of(burn::tensor::DeviceType::Rocm, local_rank)?;
                Ok(Device::rocm(index))
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[allow(unreachable_patterns)] // Where all features are on.
            other => {
                let name = other.to_possible_value().expect("no variant is skipped");
                let name = name.get_name();
                Err(format!(
                    "--device {name}: this program is built without it; add `--features {name}`"
                ))
            }
        }
    }
}

/// Ranks take the host's devices in turn: with more ranks than devices, several share one.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn nth_of(kind: burn::tensor::DeviceType, local_rank: usize) -> Result<usize, String> {
    let none = format!("no {kind:?} device is there");
    match Device::enumerate(kind).into_vec().len() {
        0 => Err(none),
        count => Ok(local_rank % count),
    }
}
