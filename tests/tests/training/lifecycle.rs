use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, StateDictTarget};
use burn_fsdp_tests::models::{Gpt, Stack};
use burn_fsdp_tests::{
    Input, Values, dense, device, device_without_checkpointing, gradients_of, local_values,
    panic_message, ranks, regression, shard_of, state_values,
};

use crate::{all, assert_close, assert_shards_of, dense_grads, mine, sharded, stack};

/// A dense training of `steps` steps of SGD.
fn dense_training(world: usize, steps: std::ops::Range<usize>, lr: f64) -> Stack {
    let mut model = dense(stack, &device());
    let mut optim = SgdConfig::new().init();
    for step in steps {
        let loss = model.loss(&all(world, step));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr, model, grads);
    }
    model
}

fn full<M: Module>(model: &burn_fsdp::FsdpModule<M>) -> burn_fsdp::Result<Values> {
    Ok(state_values(
        &model.full_state_dict(StateDictTarget::AllRanks)?,
    ))
}

#[test]
fn plain_burn_calls_train_a_sharded_model_as_dense() {
    let want = local_values(&dense_training(3, 0..4, 0.1));
    let got = ranks(3, |pg| {
        let mut optim = SgdConfig::new().init(); // made before sharding
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        for step in 0..4 {
            let grads = model.loss(&mine(&pg, step)).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.1, model, grads);
        }
        full(&model)
    })
    .unwrap();
    assert_close(&want, &got[2], 2e-6);
}

#[test]
fn a_sharded_module_shows_the_names_and_the_parameter_count_of_the_dense_one() {
    let model = dense(stack, &device());
    let names: Vec<String> = local_values(&model).into_keys().collect();
    ranks(3, |pg| {
        let sharded = sharded(&pg, &FsdpConfig::new())?;
        assert_eq!(sharded.num_params(), model.num_params());
        assert_eq!(
            local_values(&sharded).into_keys().collect::<Vec<_>>(),
            names
        );
        assert_eq!(
            sharded.layers[0].fc.weight.dims(),
            [5, 5],
            "deref sees full shapes"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn valid_gives_the_dense_outputs_before_training_and_between_steps() {
    let host = Device::flex();
    let probe = |d: &Device| Input::new(99, 0..3, d).floats::<2>(1, &[3]);
    let outputs: Vec<Vec<f32>> = (0..3)
        .map(|steps| {
            let model = dense_training(2, 0..steps, 0.1).valid();
            model
                .forward(probe(&host))
                .try_into_vec_as::<f32>()
                .unwrap()
        })
        .collect();
    ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = SgdConfig::new().init();
        for (step, want) in outputs.iter().enumerate() {
            let got = model
                .valid()
                .forward(probe(&host))
                .try_into_vec_as::<f32>()
                .unwrap();
            for (a, b) in want.iter().zip(&got) {
                assert!((a - b).abs() < 2e-6, "step {step}: dense {a}, sharded {b}");
            }
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_validation_between_forward_and_backward_does_not_disturb_the_step() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(2, 0)));
    let host = Device::flex();
    let got = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let loss = model.loss(&mine(&pg, 0));
        drop(
            model
                .valid()
                .forward(Input::new(1, 0..2, &host).floats(1, &[3]))
                .into_data(),
        );
        let grads = model.backward(loss);
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn a_validation_copy_put_back_to_training_trains() {
    let device = device_without_checkpointing();
    let model = dense(stack, &device);
    let want = dense_grads(&model, model.loss(&Input::new(0, 0..4, &device)));
    let got = ranks(2, |pg| {
        let model = stack(&device).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let model = model.valid().train();
        let at = pg.rank() * 2;
        let grads = model.backward(model.loss(&Input::new(0, at..at + 2, &device)));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn a_clone_trained_beside_the_original_is_independent_of_it() {
    let (slow, fast) = (
        local_values(&dense_training(2, 0..4, 0.02)),
        local_values(&dense_training(2, 0..4, 0.1)),
    );
    let got = ranks(2, |pg| {
        let mut a = sharded(&pg, &FsdpConfig::new())?;
        let mut b = a.clone();
        let (mut optim_a, mut optim_b) = (SgdConfig::new().init(), SgdConfig::new().init());
        for step in 0..4 {
            // Both forwards before both backwards: their units must not be confused.
            let (loss_a, loss_b) = (a.loss(&mine(&pg, step)), b.loss(&mine(&pg, step)));
            let grads_a = a.backward(loss_a);
            let grads_b = b.backward(loss_b);
            a = a.step(&mut optim_a, 0.02, grads_a)?;
            b = b.step(&mut optim_b, 0.1, grads_b)?;
        }
        Ok((full(&a)?, full(&b)?))
    })
    .unwrap();
    for (a, b) in &got {
        assert_close(&slow, a, 2e-6);
        assert_close(&fast, b, 2e-6);
    }
}

#[test]
fn an_ema_of_shards_follows_the_dense_ema() {
    use burn::module::{ModuleMapper, ParamId};
    use std::collections::HashMap;

    /// ema = 0.5 ema + 0.5 model, parameter by parameter as any Burn user would.
    struct Ema(HashMap<ParamId, Vec<f32>>);
    impl ModuleMapper for Ema {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let other = self.0[&param.id].clone();
            param.map(|t| {
                let device = t.device();
                let other =
                    Tensor::from_data(burn::tensor::TensorData::new(other, t.shape()), &device);
                t.detach()
                    .mul_scalar(0.5)
                    .add(other.mul_scalar(0.5))
                    .detach()
                    .require_grad()
            })
        }
    }
    fn by_id<M: Module>(module: &M) -> HashMap<ParamId, Vec<f32>> {
        struct Read(HashMap<ParamId, Vec<f32>>);
        impl burn::module::ModuleVisitor for Read {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0
                    .insert(param.id, param.val().try_into_vec_as::<f32>().unwrap());
            }
        }
        let mut read = Read(HashMap::new());
        module.visit(&mut read);
        read.0
    }

    let start = dense(stack, &device());
    let mut want = start.clone();
    let mut model = start;
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let grads = GradientsParams::from_grads(model.loss(&all(2, step)).backward(), &model);
        model = optim.step(0.1, model, grads);
        want = want.map(&mut Ema(by_id(&model)));
    }
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut ema = model.clone();
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
            ema = ema.map(&mut Ema(by_id(&model)));
        }
        Ok((
            full(&ema)?,
            full(&model)?,
            ema.loss(&mine(&pg, 0)).into_scalar::<f32>(),
        ))
    })
    .unwrap();
    let dense_loss = want.loss(&all(2, 0)).into_scalar::<f32>();
    let loss = (got[0].2 + got[1].2) / 2.0;
    assert!(
        (loss - dense_loss).abs() < 5e-6,
        "the copy computes with its own weights: {loss}, dense {dense_loss}"
    );
    assert_close(&local_values(&want), &got[0].0, 2e-6);
    assert_close(&local_values(&model), &got[1].1, 2e-6);
}

#[test]
fn dropping_the_original_leaves_the_clone_working() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let clone = model.clone();
        let before = full(&clone)?;
        drop(model);
        let grads = clone.backward(clone.loss(&mine(&pg, 0)));
        assert_eq!(gradients_of(&clone, &grads).len(), before.len());
        Ok(())
    })
    .unwrap();
}

#[test]
fn two_forwards_then_two_backwards_give_each_its_gradients() {
    let model = dense(stack, &device());
    let first = dense_grads(&model, model.loss(&all(3, 0)));
    let second = dense_grads(&model, model.loss(&all(3, 1)));
    for reverse in [false, true] {
        let got = ranks(3, |pg| {
            let model = sharded(&pg, &FsdpConfig::new())?;
            let (a, b) = (model.loss(&mine(&pg, 0)), model.loss(&mine(&pg, 1)));
            if reverse {
                let b = gradients_of(&model, &model.backward(b));
                Ok((gradients_of(&model, &model.backward(a)), b))
            } else {
                let a = gradients_of(&model, &model.backward(a));
                Ok((a, gradients_of(&model, &model.backward(b))))
            }
        })
        .unwrap();
        for (rank, (a, b)) in got.iter().enumerate() {
            assert_shards_of(&first, a, 1.0, 3, rank);
            assert_shards_of(&second, b, 1.0, 3, rank);
        }
    }
}

#[test]
fn two_forwards_and_one_backward_on_the_sum_give_the_summed_gradients() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(3, 0)) + model.loss(&all(3, 1)));
    let got = ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)) + model.loss(&mine(&pg, 1)));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 3, rank);
    }
}

#[test]
fn a_layer_called_twice_in_one_forward_gets_the_sum_of_both_uses() {
    let twice = |model: &Stack, input: &Input| {
        let x = model.inp.forward(input.floats::<2>(1, &[3]));
        let layer = |x: Tensor<2>| {
            model.layers[1]
                .fc
                .forward(model.layers[1].norm.forward(x))
                .tanh()
        };
        let x = layer(layer(x.clone()) + x);
        let x = x.clone() + model.layers[0].fc.forward(model.layers[0].norm.forward(x));
        let x = x.clone()
            + layer(x)
            + model.layers[2]
                .fc
                .forward(model.layers[2].norm.forward(x_like(&model.inp, input)));
        regression(model.out.forward(x), input)
    };
    for device in [device(), device_without_checkpointing()] {
        let model = dense(stack, &device);
        let want = dense_grads(&model, twice(&model, &Input::new(0, 0..4, &device)));
        let got = ranks(2, |pg| {
            let model = stack(&device).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let at = pg.rank() * 2;
            let grads = model.backward(twice(&model, &Input::new(0, at..at + 2, &device)));
            Ok(gradients_of(&model, &grads))
        })
        .unwrap();
        for (rank, got) in got.iter().enumerate() {
            assert_shards_of(&want, got, 1.0, 2, rank);
        }
    }
}

fn x_like(layer: &burn::nn::Linear, input: &Input) -> Tensor<2> {
    layer.forward(input.floats::<2>(2, &[3]))
}

/// A recurrence over two bare parameters.
#[derive(Module, Debug)]
struct Cell {
    w: Param<Tensor<2>>,
    b: Param<Tensor<1>>,
}

impl Cell {
    fn new(device: &Device) -> Self {
        let w = Input::new(0, 0..5, device).floats::<2>(77, &[5]);
        Self {
            w: Param::from_tensor(w),
            b: Param::from_tensor(Tensor::zeros([5], device)),
        }
    }
    fn loss(&self, input: &Input) -> Tensor<1> {
        let mut h = input.floats::<2>(1, &[5]);
        for _ in 0..7 {
            h = (h.matmul(self.w.val()) + self.b.val().unsqueeze()).tanh();
        }
        regression(h, input)
    }
}

#[test]
fn a_recurrence_over_val_gathers_once_and_gives_the_dense_gradients() {
    let model = dense(Cell::new, &device());
    let want = dense_grads(&model, model.loss(&all(3, 0)));
    let got = ranks(3, |pg| {
        let model =
            Cell::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let loss = model.loss(&mine(&pg, 0));
        assert_eq!(model.collectives().all_gathers, 1, "seven uses, one gather");
        let grads = model.backward(loss);
        assert_eq!(
            model.collectives().reduce_scatters,
            1,
            "seven uses, one reduction"
        );
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 3, rank);
    }
}

#[test]
fn forwards_without_backward_do_not_disturb_the_next_steps() {
    let want = local_values(&dense_training(2, 0..3, 0.1));
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            drop(model.loss(&mine(&pg, 50)));
            let logged = model.loss(&mine(&pg, 51)).into_scalar::<f32>();
            assert!(logged.is_finite());
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
        }
        full(&model)
    })
    .unwrap();
    assert_close(&want, &got[0], 2e-6);
}

#[test]
fn a_panic_in_forward_caught_on_all_ranks_leaves_the_next_steps_right() {
    let want = local_values(&dense_training(2, 0..3, 0.1));
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                let x = model.inp.forward(mine(&pg, 50).floats::<2>(1, &[3]));
                let x = model.layers[0].fc.forward(x);
                drop(model.layers[1].fc.weight.val());
                panic!("the user's own, with {:?}", x.dims());
            }))
            .expect_err("it panics");
            assert!(panic_message(&*panic).contains("the user's own"));
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
        }
        full(&model)
    })
    .unwrap();
    assert_close(&want, &got[0], 2e-6);
}

#[test]
fn explicit_prefetch_gathers_ahead_and_trains_as_dense() {
    let want = local_values(&dense_training(2, 0..3, 0.1));
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new().with_prefetch(false))?;
        model.set_forward_prefetch("layers.0", &["layers.1", "layers.2"])?;
        model.set_backward_prefetch("layers.2", &["layers.1", "layers.0"])?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let before = model.collectives().all_gathers;
            drop(model.layers[0].fc.weight.val());
            let after = model.collectives().all_gathers;
            assert!(
                after >= before + 3,
                "step {step}: layers 0, 1 and 2 are gathered, not {} units",
                after - before
            );
            drop(model.layers[1].fc.weight.val());
            drop(model.layers[2].fc.weight.val());
            assert_eq!(
                model.collectives().all_gathers,
                after,
                "step {step}: they were there already"
            );
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
        }
        full(&model)
    })
    .unwrap();
    assert_close(&want, &got[0], 2e-6);
}

#[test]
fn a_prefetch_left_unfinished_by_a_step_does_not_serve_old_weights() {
    let want = local_values(&dense_training(2, 0..3, 0.1));
    let got = ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model.unshard("layers.1")?;
            model.unshard("")?;
            model = model.step(&mut optim, 0.1, grads)?;
        }
        full(&model)
    })
    .unwrap();
    assert_close(&want, &got[0], 2e-6);
}

#[test]
fn weights_changed_by_a_mapper_are_the_ones_gathered_next() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let before = model.layers[0]
            .fc
            .weight
            .val()
            .try_into_vec_as::<f32>()
            .unwrap();
        let mut zeroed = GradientsAccumulator::new();
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        zeroed.accumulate(&model, grads);
        let clone = model.clone();
        let model = SgdConfig::new().init().step(0.5, model, zeroed.grads());
        let after = model.layers[0]
            .fc
            .weight
            .val()
            .try_into_vec_as::<f32>()
            .unwrap();
        assert!(before != after, "the new weights");
        let kept = clone.layers[0]
            .fc
            .weight
            .val()
            .try_into_vec_as::<f32>()
            .unwrap();
        assert_eq!(before, kept, "and the clone keeps the old");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_record_of_local_shards_round_trips_through_bytes() {
    ranks(3, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let start = full(&model)?;
        let record = model.clone().into_record();
        assert_eq!(
            record.len(),
            start.len(),
            "one tensor a parameter, no placeholder"
        );
        let bytes = record.into_bytes().unwrap();
        assert!(bytes.len() < 40_000, "shards, not more: {}", bytes.len());
        let mut optim = AdamWConfig::new().init();
        for step in 0..2 {
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 0.1, grads)?;
        }
        assert!(full(&model)? != start);
        let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
        model = model.load_record(record);
        assert_eq!(full(&model)?, start);
        // The loaded weights are what the next forward gathers.
        let got = model.inp.weight.val().try_into_vec_as::<f32>().unwrap();
        assert_eq!(got, start["inp.weight"].1);
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        assert_eq!(gradients_of(&model, &grads).len(), start.len());
        Ok(())
    })
    .unwrap();
}

#[test]
fn training_resumed_from_records_is_bit_equal_to_training_on() {
    ranks(3, |pg| {
        let train = |mut model: burn_fsdp::FsdpModule<Stack>,
                     optim: &mut burn::optim::ModuleOptimizer,
                     steps| {
            for step in steps {
                let grads = model.backward(model.loss(&mine(&pg, step)));
                model = model.step(optim, 1e-2, grads)?;
            }
            Ok::<_, burn_fsdp::FsdpError>(model)
        };
        let mut optim = AdamWConfig::new().init();
        let model = train(sharded(&pg, &FsdpConfig::new())?, &mut optim, 0..5)?;
        let (record, optim_bytes) = (model.clone().into_record(), optim.into_bytes().unwrap());
        let model = train(model, &mut optim, 5..10)?;
        let want = (full(&model)?, local_values(&model));
        let fresh = sharded(&pg, &FsdpConfig::new())?.load_record(record);
        let mut optim = AdamWConfig::new().init().from_bytes(optim_bytes).unwrap();
        let fresh = train(fresh, &mut optim, 5..10)?;
        assert_eq!(full(&fresh)?, want.0);
        assert_eq!(local_values(&fresh), want.1, "padding included");
        Ok(())
    })
    .unwrap();
}

#[test]
fn freezing_after_sharding_stops_a_part_and_unfreezing_resumes_it() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let start = full(&model)?;
        let mut optim = SgdConfig::new().init();
        let group = || burn::module::ParamGroup::from_predicate("layers.1");
        let model = model.set_require_grad_group(group(), false);
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        let seen = gradients_of(&model, &grads);
        assert!(
            !seen.contains_key("layers.1.fc.weight") && seen.contains_key("layers.0.fc.weight")
        );
        let model = model.step(&mut optim, 0.1, grads)?;
        assert_eq!(
            full(&model)?["layers.1.fc.weight"],
            start["layers.1.fc.weight"]
        );
        let model = model.set_require_grad_group(group(), true);
        let grads = model.backward(model.loss(&mine(&pg, 1)));
        let model = model.step(&mut optim, 0.1, grads)?;
        assert!(full(&model)?["layers.1.fc.weight"] != start["layers.1.fc.weight"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn two_models_shard_and_train_in_one_launch() {
    let want = dense(|d| Gpt::new(1, 4, 2, 5, 3, d), &device());
    let want = dense_grads(&want, want.loss(&all(2, 0)));
    let got = ranks(2, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        let gpt = Gpt::new(1, 4, 2, 5, 3, &device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let other = stack(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let (a, b) = (gpt.loss(&mine(&pg, 0)), other.loss(&mine(&pg, 0)));
        let b = other.backward(b);
        let a = gpt.backward(a);
        assert!(!b.is_empty());
        Ok(gradients_of(&gpt, &a))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn one_loss_over_two_sharded_models_gives_both_their_gradients() {
    // A generator and a critic in one graph: a unit of one must not wait for the other.
    let (a, b) = (dense(stack, &device()), dense(Cell::new, &device()));
    let loss = a.loss(&all(2, 0)) * b.loss(&all(2, 0));
    // A product of means is not a mean of products, so the oracle computes per rank.
    drop(loss);
    let loss = |rank: usize| {
        let input = Input::new(0, rank * 2..rank * 2 + 2, &device());
        a.loss(&input) * b.loss(&input)
    };
    let total = Tensor::cat(vec![loss(0), loss(1)], 0).mean();
    let mut grads = total.backward();
    let want_a = gradients_of(&a, &GradientsParams::from_module(&mut grads, &a));
    let want_b = gradients_of(&b, &GradientsParams::from_module(&mut grads, &b));
    let got = ranks(2, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        let a = stack(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let b = Cell::new(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let loss = a.loss(&mine(&pg, 0)) * b.loss(&mine(&pg, 0));
        let mut grads = loss.backward();
        let a_ = gradients_of(&a, &GradientsParams::from_module(&mut grads, &a));
        Ok((
            a_,
            gradients_of(&b, &GradientsParams::from_module(&mut grads, &b)),
        ))
    })
    .unwrap();
    for (rank, (a, b)) in got.iter().enumerate() {
        assert_shards_of(&want_a, a, 1.0, 2, rank);
        assert_shards_of(&want_b, b, 1.0, 2, rank);
    }
}

#[test]
fn padding_stays_zero_through_training() {
    // Dims of 5 over 3 ranks: the last rank's shard has one row of padding.
    ranks(3, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
        for step in 0..5 {
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 1e-2, grads)?;
        }
        let (whole, shards) = (full(&model)?, local_values(&model));
        for (path, value) in &whole {
            assert_eq!(shards[path], shard_of(value, 0, 3, pg.rank()), "{path}");
        }
        Ok(())
    })
    .unwrap();
}
