//! The training loop, twice: dense as any Burn user would write it, then sharded.
//!
//! The sharded one differs by `fully_shard`, by `model.backward` in place of Burn's `loss.backward`, and by
//! what the library does in place of hand-written code: summing micro-batches and clipping.

use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpModule, FullyShard, NormType, ProcessGroup, ReduceOp, Result};
use burn_fsdp_examples::gpt::Gpt;

use crate::args::Args;
use crate::checkpoints::Checkpoints;
use crate::data::Corpus;
use crate::dense;
use crate::generate::generate;
use crate::progress::{Progress, Record};

/// What one rank has to tell at the end.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) records: Vec<Record>,
    pub(crate) parameters: usize,
    pub(crate) shard_bytes: usize,
    /// Most bytes of gathered parameters at any one time.
    pub(crate) peak_unsharded_bytes: usize,
    /// Text written by the trained model, unless nobody will read it.
    pub(crate) sample: Option<String>,
}

pub(crate) fn train_dense(args: &Args, corpus: &Corpus) -> Result<Outcome> {
    let device = args.device();
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
        records: progress.finish(),
        parameters,
        shard_bytes: parameters * size_of::<f32>(),
        peak_unsharded_bytes: 0,
        sample: (!args.quiet).then(|| generate(&model.valid(), args, corpus)),
    })
}

pub(crate) fn train_sharded(args: &Args, corpus: &Corpus, group: &ProcessGroup) -> Result<Outcome> {
    let device = args.device();
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
        progress.step(mean_over_ranks(group, step_loss)?, norm);
        checkpoints.after_step(&model, &optim, progress.records())?;
    }
    checkpoints.finish()?;

    let memory = model.memory();
    Ok(Outcome {
        records: progress.finish(),
        parameters: model.num_params(),
        shard_bytes: memory.shard_bytes,
        peak_unsharded_bytes: memory.peak_unsharded_bytes,
        // Every rank takes part: the forward pass gathers the parameters from all of them.
        sample: (!args.quiet).then(|| generate(&model.valid(), args, corpus)),
    })
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
fn mean_over_ranks(group: &ProcessGroup, value: f64) -> Result<f64> {
    let value = Tensor::<1>::from_floats([value as f32], &Device::flex());
    Ok(group
        .all_reduce(value, ReduceOp::Mean)?
        .into_scalar::<f64>())
}
