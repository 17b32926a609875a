use burn::module::{Module, Param};
use burn::optim::{GradientsAccumulator, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FullyShard, MixedPrecisionPolicy, ReshardAfterForward, StateDictTarget,
};
use burn_fsdp_tests::{
    Input, Values, dense, device, gradients_of, local_values, ranks, state_values,
};

use crate::{
    UNITS, all, assert_close, assert_close_shards, assert_shards_of, dense_grads, mine, sharded,
    stack,
};

const MICROS: usize = 4;

/// The dense gradient of the mean over the micro-batches of a step.
fn dense_mean(world: usize) -> Values {
    let model = dense(stack, &device());
    let losses = (0..MICROS)
        .map(|micro| model.loss(&all(world, micro)))
        .collect();
    dense_grads(&model, Tensor::cat(losses, 0).mean())
}

#[test]
fn no_sync_reduces_nothing_until_the_last_micro_batch_and_gives_the_mean_of_the_big_batch() {
    for world in [2, 3] {
        let want = dense_mean(world);
        let got = ranks(world, |pg| {
            let model = sharded(&pg, &FsdpConfig::new())?;
            let guard = model.no_sync();
            for micro in 0..MICROS - 1 {
                let grads = model.backward(model.loss(&mine(&pg, micro)).div_scalar(MICROS as f32));
                assert_eq!(
                    model.collectives().reduce_scatters,
                    0,
                    "micro-batch {micro}"
                );
                assert!(
                    grads.is_empty(),
                    "nothing was reduced, so there is no gradient yet"
                );
            }
            drop(guard);
            let grads =
                model.backward(model.loss(&mine(&pg, MICROS - 1)).div_scalar(MICROS as f32));
            assert_eq!(model.collectives().reduce_scatters, UNITS, "one a unit");
            Ok(gradients_of(&model, &grads))
        })
        .unwrap();
        for (rank, got) in got.iter().enumerate() {
            assert_shards_of(&want, got, 1.0, world, rank);
        }
    }
}

#[test]
fn turning_gradient_sync_off_and_on_does_as_no_sync() {
    let want = dense_mean(2);
    let got = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut grads = None;
        for micro in 0..MICROS {
            model.set_requires_gradient_sync(micro == MICROS - 1);
            grads = Some(model.backward(model.loss(&mine(&pg, micro)).div_scalar(MICROS as f32)));
        }
        assert_eq!(model.collectives().reduce_scatters, UNITS);
        Ok(gradients_of(&model, &grads.unwrap()))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn gradients_held_by_no_sync_do_not_leak_into_the_step_after() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(2, 7)));
    let got = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let guard = model.no_sync();
        drop(model.backward(model.loss(&mine(&pg, 0))));
        drop(guard);
        drop(model.backward(model.loss(&mine(&pg, 1))));
        let grads = model.backward(model.loss(&mine(&pg, 7)));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn the_default_reduces_each_micro_batch_and_burns_accumulator_sums_the_shards() {
    let want = dense_mean(3);
    let got = ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut sum = GradientsAccumulator::new();
        for micro in 0..MICROS {
            let grads = model.backward(model.loss(&mine(&pg, micro)).div_scalar(MICROS as f32));
            sum.accumulate(&model, grads);
        }
        assert_eq!(model.collectives().reduce_scatters, MICROS * UNITS);
        Ok(gradients_of(&model, &sum.grads()))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 3, rank);
    }
}

#[test]
fn a_parameter_used_in_a_held_micro_batch_only_still_gets_its_gradient() {
    use burn_fsdp_tests::models::Branches;
    let model = dense(Branches::new, &device());
    let want = dense_grads(
        &model,
        model.loss(&all(2, 0), true) + model.loss(&all(2, 1), false),
    );
    let got = ranks(2, |pg| {
        let model =
            Branches::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let guard = model.no_sync();
        drop(model.backward(model.loss(&mine(&pg, 0), true)));
        drop(guard);
        let grads = model.backward(model.loss(&mine(&pg, 1), false));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn bf16_compute_with_f32_reduction_accumulates_alike_with_and_without_sync() {
    let run = |hold: bool| {
        ranks(2, move |pg| {
            let config = FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
            let model = sharded(&pg, &config)?;
            let mut sum = GradientsAccumulator::new();
            for micro in 0..MICROS {
                model.set_requires_gradient_sync(!hold || micro == MICROS - 1);
                let x = mine(&pg, micro).floats::<2>(1, &[3]).cast(DType::BF16);
                let loss = model.forward(x).cast(DType::F32).square().mean();
                let grads = model.backward(loss);
                sum.accumulate(&model, grads);
            }
            Ok(gradients_of(&model, &sum.grads()))
        })
        .unwrap()
    };
    let (held, reduced) = (run(true), run(false));
    for (rank, (held, reduced)) in held.iter().zip(&reduced).enumerate() {
        // World 1 of the oracle: the other run's shards are compared whole.
        assert_close_shards(reduced, held, 1.0, 1, 0, 5e-6);
        assert!(
            held.values().any(|(_, v)| v.iter().any(|x| *x != 0.0)),
            "rank {rank}"
        );
    }
}

/// One number, with the loss c * w.
#[derive(Module, Debug)]
struct One {
    w: Param<Tensor<1>>,
}

impl One {
    fn new(device: &Device) -> Self {
        Self {
            w: Param::from_tensor(Tensor::ones([1], device)),
        }
    }
    fn loss(&self, c: f32) -> Tensor<1> {
        self.w.val().mul_scalar(c).sum()
    }
}

fn many_small(reduce: DType) -> f32 {
    let got = ranks(2, move |pg| {
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_reduce_dtype(reduce);
        let config = FsdpConfig::new().with_mixed_precision(policy);
        let model = One::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &config)?;
        let guard = model.no_sync();
        drop(model.backward(model.loss(1.0)));
        for _ in 0..255 {
            drop(model.backward(model.loss(2f32.powi(-9))));
        }
        drop(guard);
        let grads = model.backward(model.loss(2f32.powi(-9)));
        Ok(gradients_of(&model, &grads)["w"].1[0])
    })
    .unwrap();
    got[0]
}

#[test]
fn two_hundred_small_gradients_survive_accumulation_in_f32() {
    assert_eq!(many_small(DType::F32), 1.5);
}

#[test]
fn two_hundred_small_gradients_vanish_in_bf16_so_the_reduce_dtype_matters() {
    assert!(many_small(DType::BF16) < 1.5);
}

#[test]
fn all_reduce_turned_off_on_a_hybrid_mesh_keeps_the_partial_until_it_is_on_again() {
    let want = dense_mean(4);
    let got = ranks(4, |pg| {
        let mesh = DeviceMesh::hybrid(&pg, 2, 2)?;
        let model = stack(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        model.set_requires_all_reduce(false);
        for micro in 0..MICROS - 1 {
            drop(model.backward(model.loss(&mine(&pg, micro)).div_scalar(MICROS as f32)));
            assert_eq!(model.collectives().all_reduces, 0, "micro-batch {micro}");
            assert_eq!(model.collectives().reduce_scatters, (micro + 1) * UNITS);
        }
        model.set_requires_all_reduce(true);
        let grads = model.backward(model.loss(&mine(&pg, MICROS - 1)).div_scalar(MICROS as f32));
        assert_eq!(model.collectives().all_reduces, UNITS);
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank % 2);
    }
}

#[test]
fn parameters_kept_after_backward_are_not_gathered_again_until_a_step_changes_them() {
    let counts = ranks(2, |pg| {
        let config = FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Never);
        let mut model = sharded(&pg, &config)?;
        model.set_reshard_after_backward(false);
        let mut sum = GradientsAccumulator::new();
        for micro in 0..2 {
            sum.accumulate(&model, model.backward(model.loss(&mine(&pg, micro))));
        }
        let kept = model.collectives().all_gathers;
        let before = model.loss(&mine(&pg, 0)).into_scalar::<f32>();
        model = model.step(&mut SgdConfig::new().init(), 0.1, sum.grads())?;
        let after = model.loss(&mine(&pg, 0)).into_scalar::<f32>();
        assert!(
            before != after,
            "the forward after a step uses the new weights"
        );
        Ok((kept, model.collectives().all_gathers))
    })
    .unwrap();
    assert_eq!(
        counts[0].0 as usize, UNITS,
        "two micro-batches, one gather a unit"
    );
    assert_eq!(
        counts[0].1 as usize,
        2 * UNITS,
        "and one more after the step"
    );
}

#[test]
fn training_with_parameters_kept_after_backward_equals_training_without() {
    let run = |keep: bool| {
        ranks(2, move |pg| {
            let mut model = sharded(&pg, &FsdpConfig::new())?;
            model.set_reshard_after_backward(!keep);
            let mut optim = SgdConfig::new().init();
            for step in 0..4 {
                let grads = model.backward(model.loss(&mine(&pg, step)));
                model = model.step(&mut optim, 0.1, grads)?;
            }
            Ok(state_values(
                &model.full_state_dict(StateDictTarget::AllRanks)?,
            ))
        })
        .unwrap()
    };
    assert_close(&run(false)[0], &run(true)[1], 0.0);
}

#[test]
fn accumulated_training_moves_the_weights_as_dense() {
    let model = dense(stack, &device());
    let mut want = model.clone();
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let loss = want.loss(&all(2, 2 * step)) + want.loss(&all(2, 2 * step + 1));
        let grads = burn::optim::GradientsParams::from_grads(loss.backward(), &want);
        want = optim.step(0.05, want, grads);
    }
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let guard = model.no_sync();
            drop(model.backward(model.loss(&mine(&pg, 2 * step))));
            drop(guard);
            let grads = model.backward(model.loss(&mine(&pg, 2 * step + 1)));
            model = model.step(&mut optim, 0.05, grads)?;
        }
        Ok(state_values(
            &model.full_state_dict(StateDictTarget::AllRanks)?,
        ))
    })
    .unwrap();
    assert_close(&local_values(&want), &got[1], 1e-5);
    assert!(
        local_values(&want) != local_values(&model),
        "the weights moved"
    );
}

#[test]
fn nested_no_sync_scopes_end_with_the_outer_one() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let outer = model.no_sync();
        let inner = model.no_sync();
        drop(inner);
        drop(model.backward(model.loss(&mine(&pg, 0))));
        assert_eq!(
            model.collectives().reduce_scatters,
            0,
            "the outer scope still holds"
        );
        drop(outer);
        drop(model.backward(model.loss(&mine(&pg, 0))));
        assert_eq!(model.collectives().reduce_scatters, UNITS);
        Ok(())
    })
    .unwrap();
}

#[test]
fn no_sync_works_with_uneven_last_micro_batches() {
    // Three samples, then one: the sum of the losses, not of the means.
    let model = dense(stack, &device());
    let part = |m: &burn_fsdp_tests::models::Stack, rows: std::ops::Range<usize>, n: f32| {
        let len = rows.len() as f32;
        m.loss(&Input::new(0, rows, &device())).mul_scalar(len / n)
    };
    let want = dense_grads(&model, part(&model, 0..8, 8.0));
    let got = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let at = pg.rank() * 4;
        let guard = model.no_sync();
        drop(model.backward(part(&model, at..at + 3, 4.0)));
        drop(guard);
        let grads = model.backward(part(&model, at + 3..at + 4, 4.0));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}
