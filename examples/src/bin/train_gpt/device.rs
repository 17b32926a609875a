//! Where to train.

use burn::prelude::*;
#[cfg(feature = "cuda")]
use burn_fsdp::{ProcessGroup, Result};
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
    /// Makes it Burn's default, on which Burn restores an optimizer's state; unless the user has named one.
    /// To be called before there is another thread.
    pub(crate) fn make_default(self) {
        let name = "BURN_DEVICE";
        if std::env::var_os(name).is_none() {
            // SAFETY: there is no other thread that could read it.
            unsafe { std::env::set_var(name, self.name()) };
        }
    }

    fn name(self) -> String {
        let value = self.to_possible_value().expect("no variant is skipped");
        value.get_name().to_string()
    }

    /// The device for a rank, by its number on its host; the reason if this build has none.
    pub(crate) fn device(self, local_rank: usize) -> std::result::Result<Device, String> {
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
                let name = other.name();
                Err(format!(
                    "--device {name}: this program is built without it; add `--features {name}`"
                ))
            }
        }
    }
}

/// The group to train with: over NCCL if every rank has a GPU of its own, else as it is.
#[cfg(feature = "cuda")]
pub(crate) fn over_nccl(group: &ProcessGroup, device: &Device) -> Result<ProcessGroup> {
    let gpus = Device::enumerate(burn::tensor::DeviceType::Cuda);
    let has_own = group.local_rank() < gpus.into_vec().len();
    let all = group.all_gather_bytes(vec![has_own.into()])?;
    match all.iter().all(|has_own| has_own == &[1]) {
        true => group.nccl(device),
        false => Ok(group.clone()),
    }
}

/// Ranks take the host's devices in turn: with more ranks than devices, several share one.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn nth_of(kind: burn::tensor::DeviceType, local_rank: usize) -> std::result::Result<usize, String> {
    let none =
        format!("no {kind:?} device is there: its driver is missing, or shows this process none");
    match Device::enumerate(kind).into_vec().len() {
        0 => Err(none),
        count => Ok(local_rank % count),
    }
}
