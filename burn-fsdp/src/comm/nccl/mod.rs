//! Ranks with an NVIDIA GPU each, which talk by NCCL.
//!
//! [`engine`] and [`watch`] know NCCL and the device only through [`Driver`](driver::Driver). So
//! they are tested without either, on devices that run what is queued in any order that is allowed
//! and object to what is not.

#[cfg(feature = "cuda")]
mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod engine;
#[cfg(test)]
mod fake;
mod join;
#[cfg(feature = "cuda")]
mod library;
mod patience;
#[cfg(test)]
mod tests;
mod watch;

#[cfg(feature = "cuda")]
mod public {
    use std::sync::Arc;

    use burn::tensor::Device;

    use super::cuda::CudaDriver;
    use super::engine::NcclEngine;
    use crate::Result;
    use crate::comm::ProcessGroup;

    impl ProcessGroup {
        /// The group of the same ranks over NCCL, of which this one is on `device`, a CUDA device of
        /// its own. All ranks must call this. They may be threads of one process or processes.
        ///
        /// The group that it is made from goes on to carry control messages, and its timeout holds
        /// for collectives too. NCCL's run on the device, so a call that returns tensors returns
        /// before they are there, and before anybody can tell whether they ever will be. If they
        /// will not, a watchdog notices, ends what the device waits for and makes every later call,
        /// on all ranks, return the cause; tensors that had not arrived hold anything.
        ///
        /// Gathered and packed copies are held on the device from the start of a collective until
        /// its result is there. While a parameter is scattered, every rank holds the whole of it.
        ///
        /// # Errors
        ///
        /// On all ranks, if one of them has no NCCL, no CUDA driver
        /// ([`FsdpError::NcclUnavailable`](crate::FsdpError::NcclUnavailable)) or no CUDA device, if
        /// two are on one GPU, or if NCCL fails; and as every collective.
        pub fn nccl(&self, device: &Device) -> Result<Self> {
            let driver = CudaDriver::new(device).map(Arc::new);
            let engine = Arc::new(NcclEngine::form(self.engine(), driver)?);
            let description = format!("{}, NCCL on {device:?}", self.description());
            let local_rank = self.local_rank;
            Ok(Self::new(engine, description, device.clone(), local_rank))
        }
    }
}
