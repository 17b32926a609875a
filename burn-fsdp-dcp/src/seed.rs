//! Randomness that can be gone on with.

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use crate::sampler::mix;

/// The seed of a run. Burn's generators can't be read, so none can be saved; instead each is seeded anew
/// at every step, from this seed, the step and the rank.
///
/// Burn has one generator a process. Where each rank is a process, dropout then goes on as if a run had
/// never stopped; ranks that are threads share one, and draw from it in no fixed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepSeed(pub u64);

impl StepSeed {
    /// The seed of a rank's step.
    pub fn at(&self, step: u64, rank: usize) -> u64 {
        mix(mix(mix(self.0) ^ step) ^ rank as u64)
    }

    /// Seeds the device's generator for a rank's step.
    pub fn reseed(&self, device: &Device, step: u64, rank: usize) {
        device.seed(self.at(step, rank));
    }
}
