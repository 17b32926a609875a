//! Reads synthetic digits with a sharded model; `diff` with `train_digits_dense.rs` shows what changed.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, ProcessGroup};
use burn_fsdp_examples::digits::{Digits, ModelConfig, accuracy};

#[derive(Config, Debug)]
struct TrainingConfig {
    #[config(default = 6)]
    num_epochs: usize,
    #[config(default = 60)]
    batch_size: usize,
    #[config(default = 42)]
    seed: u64,
    #[config(default = 4e-3)]
    lr: f64,
    model: ModelConfig,
    optimizer: AdamConfig,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = TrainingConfig::new(ModelConfig::new(), AdamConfig::new());
    let device = Device::flex().autodiff();
    device.seed(config.seed);
    burn_fsdp::launch(2, |group| run(&config, &device, &group))?;
    Ok(())
}

fn run(config: &TrainingConfig, device: &Device, group: &ProcessGroup) -> burn_fsdp::Result<()> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let model = config.model.init(device);
    let mut model = model.fully_shard(&DeviceMesh::shard(group), &FsdpConfig::new())?;
    let mut optim = config.optimizer.init();
    let loss_fn = CrossEntropyLossConfig::new().init(device);
    let device_valid = device.clone().inner();

    for epoch in 1..=config.num_epochs {
        let mut last_loss = 0.0;
        for batch in Digits::train().batches(config.batch_size, rank, world_size, device) {
            let output = model.forward(batch.images);
            let loss = loss_fn.forward(output, batch.targets);
            last_loss = loss.clone().into_scalar::<f32>();

            let grads = model.backward(loss);
            model = optim.step(config.lr, model, grads);
        }

        let model_valid = model.valid();
        let mut accuracies = Vec::new();
        for batch in Digits::test().batches(config.batch_size, 0, 1, &device_valid) {
            let output = model_valid.forward(batch.images);
            accuracies.push(accuracy(output, batch.targets));
        }
        let mean = accuracies.iter().sum::<f32>() / accuracies.len() as f32;
        println!(
            "[rank {rank}] epoch {epoch}: loss {last_loss:.3}, accuracy on test images {mean:.1} %"
        );
    }
    Ok(())
}
