//! The numbers of PyTorch FSDP2, reproduced. Tolerances: shared/goldens/README.md.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FullyShard, GradientAverage, LoadMode, MixedPrecisionPolicy, NormType,
    ReshardAfterForward, StateDict, StateDictTarget, launch,
};
use burn_fsdp_tests::golden::{self, BATCH, STEPS};
use burn_fsdp_tests::models::Gpt;
use burn_fsdp_tests::{Values, cross_entropy, device, gradients_of, shard_of, state_values};

const F32_LOSS: f64 = 1e-5;
/// The README's 2e-6 is what PyTorch's own runs need. Burn's AdamW computes its betas and bias corrections in
/// f32; a dense Burn run differs from PyTorch by up to 3.1e-6 (seen at step 5 of accum2), a sharded one by as
/// much. So AdamW gets 5e-6 here, and every run must also follow the dense Burn run within [`DENSE_NORM`].
const F32_NORM: f64 = 2e-6;
const ADAMW_NORM: f64 = 5e-6;
const DENSE_NORM: f64 = 1e-6;

#[derive(Clone, Copy, PartialEq)]
enum Accumulation {
    None,
    /// Reduce each micro-batch, sum the shards with Burn's accumulator.
    EachMicroBatch,
    /// Reduce once.
    NoSync,
}

#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    optimizer: fn() -> ModuleOptimizer,
    lr: f64,
    clip: Option<f64>,
    accumulation: Accumulation,
    config: fn() -> FsdpConfig,
    loss_bound: f64,
    norm_bound: f64,
    /// Compare with the span of PyTorch's runs at worlds 1-4 instead of the one at the same world.
    any_world: bool,
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.999)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}

fn sgd() -> ModuleOptimizer {
    let momentum = MomentumConfig {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
    };
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

const ADAMW: Variant = Variant {
    name: "adamw_fp32",
    optimizer: adamw,
    lr: 1e-2,
    clip: None,
    accumulation: Accumulation::None,
    config: FsdpConfig::new,
    loss_bound: F32_LOSS,
    norm_bound: ADAMW_NORM,
    any_world: false,
};

struct Outcome {
    loss: Vec<f64>,
    norm: Vec<f64>,
    grads: Values,
    params: Values,
}

fn golden_loss(
    model: &Gpt,
    step: usize,
    micro: usize,
    rank: usize,
    world: usize,
    device: &Device,
) -> Tensor<1> {
    let count = BATCH / world;
    let (tokens, targets) = golden::batch(step, micro, rank * count, count, device);
    cross_entropy(model.forward(tokens), targets)
}

fn train(variant: Variant, world: usize) -> Vec<Outcome> {
    launch(world, |pg| {
        let device = device();
        let mesh = DeviceMesh::shard(&pg);
        let mut model = golden::model(&device).fully_shard(&mesh, &(variant.config)())?;
        let mut optim = (variant.optimizer)();
        let mut out = Outcome {
            loss: vec![],
            norm: vec![],
            grads: Values::new(),
            params: Values::new(),
        };
        let micros = if variant.accumulation == Accumulation::None {
            1
        } else {
            2
        };
        for step in 0..STEPS {
            let mut total = 0.0;
            let mut sum = GradientsAccumulator::new();
            for micro in 0..micros {
                let loss = golden_loss(&model, step, micro, pg.rank(), world, &device)
                    .div_scalar(micros as f32);
                total += f64::from(loss.clone().into_scalar::<f32>());
                let held = variant.accumulation == Accumulation::NoSync && micro + 1 < micros;
                let guard = held.then(|| model.no_sync());
                let grads = model.backward(loss);
                drop(guard);
                sum.accumulate(&model, grads);
            }
            let mut grads = sum.grads();
            if step == 0 {
                out.grads = gradients_of(&model, &grads);
            }
            let norm;
            match variant.clip {
                Some(max) => (grads, norm) = model.clip_grad_norm(grads, max)?,
                None => norm = model.grad_norm(&grads, NormType::L2)?,
            }
            out.loss.push(total);
            out.norm.push(norm);
            model = model.step(&mut optim, variant.lr, grads)?;
        }
        out.params = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        Ok(out)
    })
    .expect("the training runs")
}

/// Norms of the same variant trained dense, on one thread.
fn dense_norms(variant: Variant) -> Vec<f64> {
    let device = device();
    let mut model = golden::model(&device);
    let mut optim = (variant.optimizer)();
    let micros = if variant.accumulation == Accumulation::None {
        1
    } else {
        2
    };
    let mut norms = vec![];
    for step in 0..STEPS {
        let losses = (0..micros).map(|micro| golden_loss(&model, step, micro, 0, 1, &device));
        let loss = Tensor::cat(losses.collect(), 0).mean();
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        let squares = gradients_of(&model, &grads);
        let squares = squares
            .values()
            .flat_map(|(_, v)| v)
            .map(|x| f64::from(*x) * f64::from(*x));
        let norm = squares.sum::<f64>().sqrt();
        if let Some(max) = variant.clip {
            model.visit(&mut Scale(&mut grads, (max / (norm + 1e-6)).min(1.0)));
        }
        norms.push(norm);
        model = optim.step(variant.lr, model, grads);
    }
    norms
}

struct Scale<'a>(&'a mut GradientsParams, f64);

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.remove::<D>(param.id) {
            self.0.register(param.id, grad.mul_scalar(self.1));
        }
    }
}

fn check(variant: Variant, world: usize) -> Vec<Outcome> {
    let golden = golden::run(variant.name, world);
    let worlds = if variant.any_world {
        1..=4
    } else {
        world..=world
    };
    let losses: Vec<_> = worlds
        .map(|world| golden::run(variant.name, world).loss)
        .collect();
    let dense = (variant.norm_bound < 1e-4).then(|| dense_norms(variant));
    let ranks = train(variant, world);
    let name = variant.name;
    for step in 0..STEPS {
        let loss = ranks.iter().map(|r| r.loss[step]).sum::<f64>() / world as f64;
        let low = losses
            .iter()
            .map(|loss| loss[step])
            .fold(f64::MAX, f64::min);
        let high = losses
            .iter()
            .map(|loss| loss[step])
            .fold(f64::MIN, f64::max);
        assert!(
            loss >= low - variant.loss_bound && loss <= high + variant.loss_bound,
            "{name} world {world} step {step}: loss {loss}, PyTorch {low} to {high}"
        );
        let norm = ranks[0].norm[step];
        assert!(
            ranks.iter().all(|r| r.norm[step] == norm),
            "{name} world {world} step {step}: norms differ"
        );
        if let Some(dense) = &dense {
            let difference = (norm - dense[step]).abs() / dense[step];
            assert!(
                difference <= DENSE_NORM,
                "{name} world {world} step {step}: norm {norm}, dense {}, relative {difference}",
                dense[step]
            );
        }
        let want = golden.grad_norm[step];
        assert!(
            (norm - want).abs() / want <= variant.norm_bound,
            "{name} world {world} step {step}: norm {norm}, PyTorch {want}, relative {}",
            (norm - want).abs() / want
        );
    }
    ranks
}

fn check_final(ranks: &[Outcome], file: &str) {
    for (rank, outcome) in ranks.iter().enumerate() {
        let want = golden::read_as_burn(file, outcome.params.keys());
        for (path, (shape, values)) in &want {
            let got = &outcome.params[path];
            assert_eq!(&got.0, shape, "{path}");
            for (i, (a, b)) in values.iter().zip(&got.1).enumerate() {
                // The key bias has no gradient: Adam turns its rounding noise into steps (README).
                if path.ends_with("attn.qkv.bias") && (32..64).contains(&i) {
                    continue;
                }
                assert!(
                    (a - b).abs() <= 1e-5,
                    "rank {rank} {path}[{i}]: PyTorch {a}, here {b}"
                );
            }
        }
    }
}

#[test]
fn adamw_at_world_1_gives_the_losses_and_norms_of_pytorch() {
    check(ADAMW, 1);
}

#[test]
fn adamw_at_world_2_gives_the_losses_norms_and_final_weights_of_pytorch() {
    let ranks = check(ADAMW, 2);
    check_final(&ranks, "final_adamw_fp32_w2.safetensors");
}

#[test]
fn adamw_at_world_3_gives_the_losses_and_norms_of_pytorch() {
    check(ADAMW, 3);
}

#[test]
fn adamw_at_world_4_gives_the_losses_and_norms_of_pytorch() {
    check(ADAMW, 4);
}

#[test]
fn the_gradients_of_step_0_are_those_of_pytorch() {
    for (rank, outcome) in train(ADAMW, 2).iter().enumerate() {
        let want = golden::read_as_burn("grads_step0_fp32_w2.safetensors", outcome.params.keys());
        assert_eq!(outcome.grads.len(), want.len());
        for (path, full) in &want {
            let (shape, values) = shard_of(full, 0, 2, rank);
            assert_eq!(outcome.grads[path].0, shape, "{path}");
            for (i, (a, b)) in values.iter().zip(&outcome.grads[path].1).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-6,
                    "rank {rank} {path}[{i}]: PyTorch {a:e}, here {b:e}"
                );
            }
        }
    }
}

#[test]
fn adamw_without_reshard_after_forward_gives_the_losses_of_pytorch() {
    let config = || FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Never);
    for world in 1..=4 {
        check(
            Variant {
                name: "adamw_fp32_no_reshard",
                config,
                ..ADAMW
            },
            world,
        );
    }
}

#[test]
fn clipping_to_norm_1_gives_the_losses_and_norms_of_pytorch() {
    for world in 1..=4 {
        check(
            Variant {
                name: "adamw_fp32_clip1",
                clip: Some(1.0),
                ..ADAMW
            },
            world,
        );
    }
}

#[test]
fn two_micro_batches_reduced_each_give_the_losses_and_norms_of_pytorch() {
    let variant = Variant {
        name: "adamw_fp32_accum2",
        accumulation: Accumulation::EachMicroBatch,
        ..ADAMW
    };
    for world in 1..=4 {
        check(variant, world);
    }
}

#[test]
fn two_micro_batches_reduced_once_give_the_losses_and_norms_of_pytorch() {
    let variant = Variant {
        name: "adamw_fp32_accum2",
        accumulation: Accumulation::NoSync,
        ..ADAMW
    };
    for world in 1..=4 {
        check(variant, world);
    }
}

#[test]
fn sgd_with_momentum_gives_the_losses_norms_and_final_weights_of_pytorch() {
    for world in 1..=4 {
        let ranks = check(
            Variant {
                name: "sgd_momentum_fp32",
                optimizer: sgd,
                lr: 0.1,
                norm_bound: F32_NORM,
                ..ADAMW
            },
            world,
        );
        if world == 2 {
            check_final(&ranks, "final_sgd_fp32_w2.safetensors");
        }
    }
}

#[test]
fn a_missing_mean_would_be_caught_by_sgd() {
    let config = || FsdpConfig::new().with_gradient_average(GradientAverage::Sum);
    let variant = Variant {
        name: "sgd_momentum_fp32",
        optimizer: sgd,
        lr: 0.1,
        norm_bound: F32_NORM,
        config,
        ..ADAMW
    };
    let golden = golden::run(variant.name, 2);
    let ranks = train(variant, 2);
    assert!(
        (ranks[0].norm[0] / golden.grad_norm[0] - 2.0).abs() < 1e-5,
        "the sum is twice the mean"
    );
    let loss = (ranks[0].loss[1] + ranks[1].loss[1]) / 2.0;
    assert!(
        (loss - golden.loss[1]).abs() > 100.0 * F32_LOSS,
        "twice the gradient, another second loss"
    );
}

#[test]
fn bf16_parameters_with_f32_reduction_stay_within_a_hundredth_of_pytorch() {
    let config = || FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
    let variant = Variant {
        name: "adamw_bf16param_fp32reduce",
        config,
        loss_bound: 1e-2,
        norm_bound: 0.1,
        // bf16 noise: PyTorch's own run at world 3 leaves its others by 1.4e-3 at step 1 and 7e-3 at step 17.
        any_world: true,
        ..ADAMW
    };
    for world in 1..=4 {
        let ranks = check(variant, world);
        // bf16 was used at all: the first loss is not the f32 one.
        let f32_loss = golden::run("adamw_fp32", world).loss[0];
        let loss = ranks.iter().map(|r| r.loss[0]).sum::<f64>() / world as f64;
        assert!(
            (loss - f32_loss).abs() > 1e-6,
            "world {world}: {loss} is the f32 loss"
        );
    }
}

#[test]
fn golden_weights_loaded_from_rank_0_give_the_first_loss_of_pytorch() {
    let losses = launch(3, |pg| {
        let device = device();
        let model = Gpt::new(
            golden::LAYERS,
            golden::D_MODEL,
            golden::HEADS,
            golden::VOCAB,
            golden::SEQ,
            &device,
        )
        .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let paths = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            for (path, (shape, values)) in golden::read_as_burn("init.safetensors", paths.keys()) {
                state.insert(path, TensorData::new(values, shape));
            }
        }
        let (model, report) = model.load_full_state_dict(state, LoadMode::Strict)?;
        assert!(report.is_exact(), "{report}");
        Ok(golden_loss(&model, 0, 0, pg.rank(), 3, &device).into_scalar::<f32>())
    })
    .expect("the model loads");
    let loss = losses.iter().map(|x| f64::from(*x)).sum::<f64>() / 3.0;
    let want = golden::run("adamw_fp32", 3).loss[0];
    assert!((loss - want).abs() <= F32_LOSS, "{loss}, PyTorch {want}");
}

#[test]
fn the_dense_model_gives_the_losses_of_pytorch_so_the_port_is_right() {
    let device = device();
    let mut model = golden::model(&device);
    let mut optim = adamw();
    let golden = golden::run("adamw_fp32", 1);
    for step in 0..STEPS {
        let loss = golden_loss(&model, step, 0, 0, 1, &device);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let want = golden.loss[step];
        assert!(
            (value - want).abs() <= F32_LOSS,
            "step {step}: {value}, PyTorch {want}"
        );
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
}
