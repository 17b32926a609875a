use burn::module::{Module, Param, ParamId};
use burn::nn::{Initializer, LinearConfig, PositionalEncodingConfig, RotaryEncodingConfig};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, StateDictTarget};
use burn_fsdp_tests::models::{ConvNet, Gpt, Llama};
use burn_fsdp_tests::{
    Input, dense, device, gradients_of, local_values, ranks, shard_of, state_values,
};

use crate::{mine, sharded, stack};

#[test]
fn an_equal_seed_gives_the_weights_of_the_dense_model() {
    let gpt = local_values(&dense(|d| Gpt::new(2, 8, 2, 7, 5, d), &device()));
    let llama = local_values(&dense(Llama::new, &device()));
    for world in 1..=5 {
        let got = ranks(world, |pg| {
            let model = Gpt::new(2, 8, 2, 7, 5, &device())
                .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            Ok(local_values(&model))
        })
        .unwrap();
        for (rank, shards) in got.iter().enumerate() {
            for (path, full) in &gpt {
                assert_eq!(
                    shards[path],
                    shard_of(full, 0, world, rank),
                    "world {world} rank {rank} {path}"
                );
            }
        }
        let got = ranks(world, |pg| {
            let model =
                Llama::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            Ok(state_values(
                &model.full_state_dict(StateDictTarget::AllRanks)?,
            ))
        })
        .unwrap();
        assert!(got.iter().all(|values| values == &llama), "world {world}");
    }
}

#[test]
fn the_values_of_rank_0_win_over_those_of_the_others() {
    ranks(3, |pg| {
        let init = Initializer::Constant {
            value: pg.rank() as f64 + 1.0,
        };
        let model = LinearConfig::new(5, 7)
            .with_initializer(init)
            .init(&device());
        let model = model.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let weight = model.weight.val().try_into_vec_as::<f32>().unwrap();
        assert_eq!(weight, vec![1.0; 35]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn weights_initialised_before_sharding_are_taken_from_rank_0() {
    ranks(2, |pg| {
        let x = Input::new(pg.rank(), 0..5, &device()).floats::<2>(5, &[3]);
        let model = Gate {
            w: Param::from_tensor(x),
        };
        let want = Input::new(0, 0..5, &device())
            .floats::<2>(5, &[3])
            .try_into_vec_as::<f32>()
            .unwrap();
        let model = model.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        assert_eq!(model.w.val().try_into_vec_as::<f32>().unwrap(), want);
        Ok(())
    })
    .unwrap();
}

#[derive(Module, Debug)]
struct Gate {
    w: Param<Tensor<2>>,
}

#[test]
fn only_rank_0_draws_random_numbers() {
    // Were the others to draw too, the generator would be further than after a dense initialisation.
    let next = || Tensor::<1>::random([4], burn::tensor::Distribution::Default, &Device::flex());
    let after_dense = {
        let _random = burn_fsdp_tests::lock_random();
        device().seed(burn_fsdp_tests::SEED);
        drop(local_values(&stack(&device())));
        next().try_into_vec_as::<f32>().unwrap()
    };
    let got = ranks(3, |pg| {
        drop(sharded(&pg, &FsdpConfig::new())?);
        pg.barrier()?;
        let drawn = if pg.rank() == 0 {
            next().try_into_vec_as::<f32>().unwrap()
        } else {
            vec![]
        };
        pg.barrier()?;
        Ok(drawn)
    })
    .unwrap();
    assert_eq!(got[0], after_dense);
}

/// Whole-number and truth parameters beside a float one.
#[derive(Module, Debug)]
struct Kinds {
    w: Param<Tensor<2>>,
    steps: Param<Tensor<1, Int>>,
    keep: Param<Tensor<1, Bool>>,
}

#[test]
fn integer_and_bool_parameters_are_replicated() {
    ranks(2, |pg| {
        let d = device();
        let model = Kinds {
            w: Param::from_tensor(Tensor::ones([5, 3], &d)),
            steps: Param::initialized(ParamId::new(), Tensor::from_ints([3, 1, 2], &d)),
            keep: Param::initialized(ParamId::new(), Tensor::from_data([true, false, true], &d)),
        };
        let model = model.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let steps = model.steps.val();
        assert_eq!(steps.dims(), [3]);
        let sum = model.w.val().sum() * steps.float().sum();
        assert_eq!(sum.clone().into_scalar::<f32>(), 90.0);
        assert_eq!(model.keep.val().dims(), [3]);
        let grads = model.backward(sum);
        assert_eq!(gradients_of(&model, &grads)["w"].1[0], 6.0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn running_statistics_are_parted_between_ranks_and_copies() {
    let got = ranks(2, |pg| {
        let model =
            ConvNet::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        for step in 0..3 {
            drop(model.loss(&mine(&pg, step)));
        }
        Ok(local_values(&model.valid())["batch_norm.running_mean"].clone())
    })
    .unwrap();
    assert_eq!(got[0].0, vec![3], "whole on every rank");
    assert!(got[0] != got[1], "different data, different statistics");
    // What each rank would have computed alone.
    for (rank, got) in got.iter().enumerate() {
        let model = dense(ConvNet::new, &device());
        for step in 0..3 {
            drop(model.loss(&Input::new(step, rank * 2..rank * 2 + 2, &device())));
        }
        let want = &local_values(&model.valid())["batch_norm.running_mean"];
        for (a, b) in want.1.iter().zip(&got.1) {
            assert!(
                (a - b).abs() < 1e-6,
                "rank {rank}: alone {a}, in the group {b}"
            );
        }
    }
}

/// Buffers that are computed, not trained.
#[derive(Module, Debug)]
struct Buffers {
    rope: burn::nn::RotaryEncoding,
    positions: burn::nn::PositionalEncoding,
    fc: burn::nn::Linear,
}

#[test]
fn computed_buffers_survive_sharding_on_every_rank() {
    let init = |d: &Device| Buffers {
        rope: RotaryEncodingConfig::new(5, 6).init(d),
        positions: PositionalEncodingConfig::new(6).init(d),
        fc: LinearConfig::new(6, 6).init(d),
    };
    let forward = |m: &Buffers| {
        let x = Input::new(0, 0..2, &device()).floats::<3>(1, &[5, 6]);
        m.fc.forward(m.positions.forward(m.rope.forward(x)))
            .try_into_vec_as::<f32>()
            .unwrap()
    };
    let want = forward(&dense(init, &device()));
    let got = ranks(3, |pg| {
        let model = init(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        Ok(forward(&model))
    })
    .unwrap();
    assert!(got.iter().all(|y| y == &want));
}

#[test]
fn a_mesh_on_which_every_rank_is_alone_shards_nothing_and_trains() {
    ranks(2, |pg| {
        let mesh = DeviceMesh::hybrid(&pg, 2, 1)?;
        let model = stack(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let shards = local_values(&model);
        let full = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        assert_eq!(shards, full);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_model_on_a_plain_device_computes_without_training() {
    let want = dense(stack, &Device::flex());
    let x = || Input::new(0, 0..2, &Device::flex()).floats::<2>(1, &[3]);
    let want = want.forward(x()).try_into_vec_as::<f32>().unwrap();
    let got = ranks(2, |pg| {
        let model =
            stack(&Device::flex()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        Ok(model.forward(x()).try_into_vec_as::<f32>().unwrap())
    })
    .unwrap();
    for (a, b) in want.iter().zip(&got[0]) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn whoever_computes_with_the_placeholder_sees_nan_not_a_wrong_number() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let base = model.inp.weight.base();
        assert_eq!(base.dims(), [3, 5]);
        assert!(base.sum().into_scalar::<f32>().is_nan());
        Ok(())
    })
    .unwrap();
}
