//! What the integration tests share: models, deterministic data, and a harness that trains a model
//! twice (dense on one thread, sharded on several ranks) and compares everything that can differ.

pub mod golden;
pub mod models;
mod parity;
mod values;

pub use parity::{DenseRun, Parity, RankRun};
pub use values::{Values, gradients_of, local_values, saved_values, shard_of, state_values};

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::prelude::*;
use burn::tensor::TensorData;
use burn_fsdp::ProcessGroup;

/// The seed of every initialisation.
pub const SEED: u64 = 42;

/// The device to test on, without autodiff: what `BURN_FSDP_TEST_DEVICE` names, `flex` by default.
///
/// # Panics
///
/// If this build has no such device.
pub fn base_device() -> Device {
    match std::env::var("BURN_FSDP_TEST_DEVICE").as_deref() {
        Err(_) | Ok("flex") => Device::flex(),
        #[cfg(feature = "cpu")]
        Ok("cpu") => Device::cpu(),
        #[cfg(feature = "cuda")]
        Ok("cuda") => Device::cuda(0),
        #[cfg(feature = "wgpu")]
        Ok("wgpu") => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        Ok(other) => panic!("BURN_FSDP_TEST_DEVICE={other}: built without the feature `{other}`"),
    }
}

/// The device most tests train on: the library recommends gradient checkpointing.
pub fn device() -> Device {
    base_device().autodiff().gradient_checkpointing()
}

/// The device without gradient checkpointing.
pub fn device_without_checkpointing() -> Device {
    base_device().autodiff()
}

static RANDOM: Mutex<()> = Mutex::new(());

/// Burn's generator is one per process: whoever seeds it and then draws holds this lock, so that tests may
/// run as threads of one process.
pub fn lock_random() -> MutexGuard<'static, ()> {
    RANDOM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `launch` with the generator seeded: rank 0 alone draws, so parameters are those of [`dense`].
///
/// # Errors
///
/// What `launch` returns.
pub fn ranks<T: Send>(
    world: usize,
    f: impl Fn(ProcessGroup) -> burn_fsdp::Result<T> + Send + Sync,
) -> burn_fsdp::Result<Vec<T>> {
    let _random = lock_random();
    device().seed(SEED);
    burn_fsdp::launch(world, f)
}

/// The unsharded model with its parameters drawn in traversal order from [`SEED`].
pub fn dense<M: Module>(init: impl Fn(&Device) -> M, device: &Device) -> M {
    let _random = lock_random();
    device.seed(SEED);
    let model = init(device);
    drop(local_values(&model));
    model
}

/// Which samples of which step a loss is asked for.
#[derive(Debug, Clone)]
pub struct Input {
    /// The training step.
    pub step: usize,
    /// Global sample numbers.
    pub rows: Range<usize>,
    /// The rank that asks, or that the dense oracle stands in for; none for a whole global batch.
    pub rank: Option<usize>,
    /// Where to put the data.
    pub device: Device,
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Input {
    /// A batch for tests that drive a model by hand.
    pub fn new(step: usize, rows: Range<usize>, device: &Device) -> Self {
        Self {
            step,
            rows,
            rank: None,
            device: device.clone(),
        }
    }

    /// The number of samples.
    pub fn batch(&self) -> usize {
        self.rows.len()
    }

    fn draws(&self, salt: u64, per_sample: usize) -> impl Iterator<Item = u64> {
        let step = self.step as u64;
        self.rows.clone().flat_map(move |row| {
            (0..per_sample).map(move |i| mix(mix(mix(mix(salt) ^ step) ^ row as u64) ^ i as u64))
        })
    }

    /// Uniform values in [-1, 1), a pure function of salt, step, sample and position.
    pub fn floats<const D: usize>(&self, salt: u64, sample: &[usize]) -> Tensor<D> {
        assert_eq!(sample.len() + 1, D, "one dim is the batch");
        let values: Vec<f32> = self
            .draws(salt, sample.iter().product())
            .map(|x| (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            .collect();
        let shape: Vec<usize> = std::iter::once(self.batch())
            .chain(sample.iter().copied())
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    /// Integers in [0, high), [batch, len].
    pub fn ints(&self, salt: u64, len: usize, high: u64) -> Tensor<2, Int> {
        let values: Vec<i64> = self
            .draws(salt, len)
            .map(|x| ((x >> 20) % high) as i64)
            .collect();
        Tensor::from_data(TensorData::new(values, [self.batch(), len]), &self.device)
    }
}

/// Mean squared error against uniform targets: stays of order one, so a relative bound means something.
pub fn regression<const D: usize>(output: Tensor<D>, input: &Input) -> Tensor<1> {
    let dims = output.dims();
    let target = input.floats::<D>(900, &dims[1..]);
    (output - target.mul_scalar(2.0)).square().mean()
}

/// Mean cross entropy over all positions, in f32.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let logits = logits.cast(burn::tensor::FloatDType::F32);
    let picked =
        burn::tensor::activation::log_softmax(logits, 2).gather(2, targets.unsqueeze_dim(2));
    picked.mean().neg()
}

/// What a panic said.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string()))
        .unwrap_or_default()
}

/// The error, and its whole text with its sources.
pub fn full_message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Asserts that `text` holds every part.
#[track_caller]
pub fn assert_names(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}
