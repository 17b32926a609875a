//! The training loop, twice: dense as any Burn user would write it, then sharded.
//!
//! The sharded one differs by `fully_shard`, by `model.backward` in place of Burn's `loss.backward`, and by
//! what the library does in place of hand-written code: summing micro-batches and clipping.

use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, FsdpError, FsdpModule, FullyShard, NormType, ProcessGroup, ReduceOp, Result,
};
use burn_fsdp_examples::gpt::Gpt;

use crate::args::Args;
use crate::checkpoints::Checkpoints;
use crate::data::Corpus;
use crate::dense;
#[cfg(feature = "cuda")]
use crate::device::{DeviceArg, over_nccl};
use crate::generate::generate;
use crate::progress::{Progress, Record};

/// What one rank has to tell at the end.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) rank: usize,
    pub(crate) records: Vec<Record>,
    pub(crate) parameters: usize,
    pub(crate) tokens_per_step: usize,
    /// What each rank held.
    pub(crate) held: Vec<Held>,
    /// Bytes that the device's allocator has taken, for all ranks on it; it gives none back. Unknown on
    /// the host.
    pub(crate) device_memory: Option<usize>,
    /// Text written by the trained model, unless nobody will read it.
    pub(crate) sample: Option<String>,
}

/// Bytes that a rank held of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) shards: usize,
    /// Most of gathered parameters at any one time.
    pub(crate) peak_unsharded: usize,
}

impl Held {
    fn on_all_ranks(self, group: &ProcessGroup) -> Result<Vec<Self>> {
        let numbers = [self.shards, self.peak_unsharded];
        let own = numbers.iter().flat_map(|number| number.to_le_bytes());
        let all = group.all_gather_bytes(own.collect())?;
        let number = |bytes: &[u8]| {
            let bytes = bytes.try_into().expect("a number is as long on all ranks");
            usize::from_le_bytes(bytes)
        };
        let held = all.iter().map(|bytes| Self {
            shards: number(&bytes[..8]),
            peak_unsharded: number(&bytes[8..]),
        });
        Ok(held.collect())
    }
}

pub(crate) fn train_dense(args: &Args, corpus: &Corpus, group: &ProcessGroup) -> Result<Outcome> {
    if group.world_size() > 1 {
        return Err(FsdpError::other(
            "--single trains one dense model: start it by itself, not by a launcher of several ranks",
        ));
    }
    let device = args.device(group.local_rank())?;
    let mut model = args.model(corpus).init(&device);
    dense::initialize(&model);
    let mut optim = AdamWConfig::new().init();
    let schedule = args.schedule();
    let mut progress = Progress::new(args, true, Vec::new());

    for step in 0..args.steps {
        let mut step_loss = 0.0;
        let mut accumulator = GradientsAccumulator::new();
        for micro_batch in 0..args.accumulate {
            let samples = schedule.samples(step, micro_batch, 0);
            let batch = corpus.batch(args.seed, samples, args.seq, &device);
            let loss = model.loss(batch.inputs, batch.targets) / args.accumulate as f64;
            step_loss += loss.clone().into_scalar::<f64>();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        let (grads, norm) = dense::clip_grad_norm(&model, accumulator.grads(), args.clip);
        model = optim.step(args.learning_rate(step), model, grads);
        progress.step(step_loss, norm);
    }

    let parameters = model.num_params();
    Ok(Outcome {
        rank: 0,
        records: progress.finish(),
        parameters,
        tokens_per_step: args.tokens_per_step(),
        held: vec![Held {
            shards: parameters * size_of::<f32>(),
            peak_unsharded: 0,
        }],
        device_memory: device_memory(&device),
        sample: (!args.quiet)
            .then(|| generate(&model.valid(), args, corpus, &device.clone().inner())),
    })
}

pub(crate) fn train_sharded(args: &Args, corpus: &Corpus, group: &ProcessGroup) -> Result<Outcome> {
    let device = args.device(group.local_rank())?;
    #[cfg(feature = "cuda")]
    let group = &match args.device {
        DeviceArg::Cuda => over_nccl(group, &device.clone().inner())?,
        _ => group.clone(),
    };
    agree_on_arguments(args, group)?;
    let mesh = DeviceMesh::shard(group);
    let mut model = args
        .model(corpus)
        .init(&device)
        .fully_shard(&mesh, &args.fsdp())?;
    let mut optim = AdamWConfig::new().init();
    let schedule = args.schedule();
    let mut checkpoints = Checkpoints::new(args, group)?;
    let mut records = Vec::new();
    (model, optim) = checkpoints.resume(model, optim, &mut records)?;
    let mut progress = Progress::new(args, group.rank() == 0, records);

    for step in progress.records().len()..args.steps {
        let mut step_loss = 0.0;
        let mut grads = GradientsParams::new();
        for micro_batch in 0..args.accumulate {
            // Only the last backward communicates; it returns the sum of all.
            model.set_requires_gradient_sync(micro_batch + 1 == args.accumulate);
            let samples = schedule.samples(step, micro_batch, group.rank());
            let batch = corpus.batch(args.seed, samples, args.seq, &device);
            let loss = model.loss(batch.inputs, batch.targets) / args.accumulate as f64;
            step_loss += loss.clone().into_scalar::<f64>();
            grads = model.try_backward(loss)?;
        }
        let (grads, norm) = clip_grad_norm(&model, grads, args.clip)?;
        model = model.step(&mut optim, args.learning_rate(step), grads)?;
        progress.step(mean_over_ranks(group, step_loss, &device)?, norm);
        checkpoints.after_step(&model, &optim, progress.records())?;
    }
    checkpoints.finish()?;

    let memory = model.memory();
    let held = Held {
        shards: memory.shard_bytes,
        peak_unsharded: memory.peak_unsharded_bytes,
    };
    Ok(Outcome {
        rank: group.rank(),
        records: progress.finish(),
        parameters: model.num_params(),
        tokens_per_step: args.tokens_per_step(),
        held: held.on_all_ranks(group)?,
        device_memory: device_memory(&device),
        // Every rank takes part: the forward pass gathers the parameters from all of them.
        sample: (!args.quiet)
            .then(|| generate(&model.valid(), args, corpus, &device.clone().inner())),
    })
}

/// A launcher may have started ranks with other arguments, and with another learning rate, say, training
/// would go on and mean nothing.
fn agree_on_arguments(args: &Args, group: &ProcessGroup) -> Result<()> {
    let common = format!("{:#?}", args.common());
    let all = group.all_gather_bytes(common.into_bytes())?;
    let all: Vec<_> = all.iter().map(|a| String::from_utf8_lossy(a)).collect();
    for (rank, other) in all.iter().enumerate() {
        let mut lines = all[0].lines().zip(other.lines());
        if let Some((first, other)) = lines.find(|(a, b)| a != b) {
            let shown = |line: &str| line.trim().trim_end_matches(',').to_string();
            return Err(FsdpError::other(format!(
                "ranks were started with different arguments: rank 0 with {}, rank {rank} with {}",
                shown(first),
                shown(other)
            )));
        }
    }
    Ok(())
}

fn device_memory(device: &Device) -> Option<usize> {
    let usage = device.memory_pool_usage()?;
    Some(usage.bytes_reserved as usize)
}

fn clip_grad_norm(
    model: &FsdpModule<Gpt>,
    grads: GradientsParams,
    limit: f64,
) -> Result<(GradientsParams, f64)> {
    if limit > 0.0 {
        return model.clip_grad_norm(grads, limit);
    }
    let norm = model.grad_norm(&grads, NormType::L2)?;
    Ok((grads, norm))
}

/// The loss of the global batch: each rank only knows that of its own part.
fn mean_over_ranks(group: &ProcessGroup, value: f64, device: &Device) -> Result<f64> {
    let value = Tensor::<1>::from_floats([value as f32], &device.clone().inner());
    Ok(group
        .all_reduce(value, ReduceOp::Mean)?
        .into_scalar::<f64>())
}
