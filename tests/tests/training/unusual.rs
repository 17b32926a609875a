//! Programs that are out of the ordinary, and right; and some that are wrong in a way that once went unseen.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_fsdp::{
    DeviceMesh, Event, FsdpConfig, FsdpError, FsdpModule, FullyShard, LaunchConfig, LoadMode,
    MixedPrecisionPolicy, NormType, ProcessGroup, ReshardAfterForward, Result, StateDict,
    StateDictTarget,
};
use burn_fsdp_tests::models::{Branches, Stack, Tied};
use burn_fsdp_tests::{
    Input, Values, assert_names, dense, device, gradients_of, local_values, panic_message, ranks,
    regression, shard_of,
};

use super::{mine, sharded, stack};

/// A head tied to the input, with layers between the two.
#[derive(Module, Debug)]
struct Between {
    inp: Linear,
    layers: Vec<Linear>,
    out: Linear,
}

impl Between {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(3, 3).init(device);
        let inp = linear();
        Self {
            layers: vec![linear(), linear()],
            out: inp.clone(),
            inp,
        }
    }
}

/// One trained vector.
#[derive(Module, Debug)]
struct One {
    w: Param<Tensor<1>>,
}

impl One {
    fn new(device: &Device) -> Self {
        Self {
            w: Param::from_tensor(Tensor::ones([2], device)),
        }
    }

    fn loss(&self) -> Tensor<1> {
        self.w.val().sum()
    }
}

fn one(pg: &ProcessGroup) -> Result<FsdpModule<One>> {
    One::new(&device()).fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())
}

fn scaled<M: Module>(module: M, by: f64) -> M {
    struct Scale(f64);
    impl ModuleMapper for Scale {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| {
                Tensor::from_inner(value.inner().mul_scalar(self.0))
                    .with_gradient_checkpointing_strategy(
                        device().gradient_checkpointing_strategy().unwrap(),
                    )
                    .require_grad()
            })
        }
    }
    module.map(&mut Scale(by))
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

#[test]
fn two_hundred_forwards_before_a_backward_lose_no_gradient() {
    for grad in ranks(2, |pg| {
        let model = one(&pg)?;
        let loss = (1..200).fold(model.loss(), |sum, _| sum + model.loss());
        let grads = model.backward(loss);
        Ok(gradients_of(&model, &grads)["w"].1.clone())
    })
    .unwrap()
    {
        assert_eq!(grad, [200.0]);
    }
}

/// Two layers that forwards use one at a time.
#[derive(Module, Debug)]
struct Parts {
    a: Linear,
    b: Linear,
}

impl Parts {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(3, 2).init(device);
        Self {
            a: linear(),
            b: linear(),
        }
    }
}

#[test]
fn forwards_through_different_parts_of_a_unit_have_backwards_of_their_own() {
    let loss = |layer: &Linear, input: &Input| {
        regression(layer.forward(input.floats::<2>(1, &[3])), input)
    };
    let plain = dense(Parts::new, &device());
    let whole = Input::new(0, 0..4, &device());
    let dense_grads = |loss: Tensor<1>| {
        gradients_of(
            &plain,
            &GradientsParams::from_grads(loss.backward(), &plain),
        )
    };
    let a = dense_grads(loss(&plain.a, &whole));
    let b = dense_grads(loss(&plain.b, &whole));

    for (rank, got) in ranks(2, |pg| {
        let model =
            Parts::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let input = mine(&pg, 0);
        let (loss_a, loss_b) = (loss(&model.a, &input), loss(&model.b, &input));
        let grads_a = gradients_of(&model, &model.backward(loss_a));
        let grads_b = gradients_of(&model, &model.backward(loss_b));
        Ok((grads_a, grads_b))
    })
    .unwrap()
    .into_iter()
    .enumerate()
    {
        assert_shards(&got.0, &a, 2, rank);
        assert_shards(&got.1, &b, 2, rank);
    }
}

/// Checks that a rank has its shard of each of these gradients, and of no other.
fn assert_shards(got: &Values, full: &Values, world: usize, rank: usize) {
    assert!(
        got.keys().eq(full.keys()),
        "{:?} for {:?}",
        got.keys(),
        full.keys()
    );
    for (name, full) in full {
        let (shape, want) = shard_of(full, 0, world, rank);
        assert_eq!(got[name].0, shape, "{name}");
        for (got, want) in got[name].1.iter().zip(&want) {
            assert!((got - want).abs() < 1e-5, "{name}: {got} for {want}");
        }
    }
}

#[test]
fn a_step_between_a_forward_and_its_backward_is_an_error_and_not_other_gradients() {
    let error = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let (first, second) = (model.loss(&mine(&pg, 0)), model.loss(&mine(&pg, 1)));
        let grads = model.backward(first);
        let model = model.step(&mut SgdConfig::new().init(), 1.0, grads)?;
        model.try_backward(second).map(drop)
    })
    .unwrap_err();
    assert_names(
        &error.to_string(),
        &["updated between this forward and its backward"],
    );
}

#[test]
fn a_frozen_clone_inside_the_module_is_not_tied_to_what_it_was_cloned_from() {
    #[derive(Module, Debug)]
    struct Distill {
        student: Linear,
        teacher: Linear,
    }
    for (student_moved, teacher_moved) in ranks(2, |pg| {
        let student: Linear = LinearConfig::new(3, 2).init(&device());
        drop(local_values(&student));
        let teacher = student.clone().no_grad();
        let model = Distill { student, teacher }
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let before = model.full_state_dict(StateDictTarget::AllRanks)?;
        let output = model.student.forward(mine(&pg, 0).floats::<2>(1, &[3]));
        let loss = regression(output, &mine(&pg, 0));
        let grads = model.backward(loss);
        // The two have one id, and the gradient counts once.
        let norm = model.grad_norm(&grads, NormType::L2)?;
        let (clipped, _) = model.clip_grad_norm(grads, norm / 2.0)?;
        let halved = model.grad_norm(&clipped, NormType::L2)?;
        assert!((halved / norm - 0.5).abs() < 1e-5, "{halved} of {norm}");
        let grads = clipped;
        let model = model.step(&mut SgdConfig::new().init(), 0.1, grads)?;
        let after = model.full_state_dict(StateDictTarget::AllRanks)?;
        let moved = |name: &str| before[name] != after[name];
        Ok((moved("student.weight"), moved("teacher.weight")))
    })
    .unwrap()
    {
        assert!(student_moved && !teacher_moved);
    }
}

#[test]
fn two_trained_parameters_of_one_id_and_other_values_are_refused_on_all_ranks() {
    #[derive(Module, Debug)]
    struct Pair {
        a: One,
        b: One,
    }
    let error = ranks(2, |pg| {
        let a = One::new(&device());
        let b = scaled(a.clone(), 2.0);
        let result = Pair { a, b }.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new());
        assert!(matches!(result, Err(FsdpError::InvalidArgument(_))));
        result.map(drop)
    })
    .unwrap_err();
    assert_names(&error.to_string(), &["\"a.w\"", "\"b.w\"", "id"]);
}

#[test]
fn changing_a_clone_of_a_part_is_refused_and_leaves_the_module_alone() {
    for (message, grads) in ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let part = model.layers[0].clone();
        let panic = catch_unwind(AssertUnwindSafe(|| part.no_grad())).unwrap_err();
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        Ok((panic_message(&*panic), grads.len()))
    })
    .unwrap()
    {
        assert_names(&message, &["clone of a part", "FsdpModule"]);
        assert_eq!(grads, local_values(&stack(&device())).len());
    }
}

#[test]
fn copies_used_in_another_order_on_one_rank_are_not_mixed() {
    for (a, b) in ranks(2, |pg| {
        let model = one(&pg)?;
        let a = scaled(model.clone(), 100.0);
        let b = scaled(model.clone(), 1.0);
        Ok(if pg.rank() == 0 {
            let a = floats(a.w.val());
            (a, floats(b.w.val()))
        } else {
            let b = floats(b.w.val());
            (floats(a.w.val()), b)
        })
    })
    .unwrap()
    {
        assert_eq!((a, b), (vec![100.0, 100.0], vec![1.0, 1.0]));
    }
}

#[test]
fn backwards_of_two_like_modules_in_another_order_on_one_rank_are_an_error() {
    let error = ranks(2, |pg| {
        let (a, b) = (one(&pg)?, one(&pg)?);
        let (loss_a, loss_b) = (a.loss(), b.loss());
        if pg.rank() == 0 {
            a.try_backward(loss_a)?;
            b.try_backward(loss_b)?;
        } else {
            b.try_backward(loss_b)?;
            a.try_backward(loss_a)?;
        }
        Ok(())
    })
    .unwrap_err();
    assert!(
        matches!(error, FsdpError::CollectiveMismatch { .. }),
        "{error}"
    );
    assert_names(&error.to_string(), &["module or copy"]);
}

#[test]
fn a_module_cloned_into_the_ranks_is_sharded_without_waiting_for_itself() {
    #[derive(Module, Debug)]
    struct Normed {
        fc: Linear,
        norm: BatchNorm,
    }
    let normed = Normed {
        fc: LinearConfig::new(3, 4).init(&device()),
        norm: BatchNormConfig::new(4).init(&device()),
    };
    let layers = Stack::new(2, 5, &device());
    drop(local_values(&layers));
    LaunchConfig::new(2)
        .with_timeout(Duration::from_secs(20))
        .launch(|pg| {
            let mesh = DeviceMesh::shard(&pg);
            normed.clone().fully_shard(&mesh, &FsdpConfig::new())?;
            // Ignored parameters stay whole, and would share a graph.
            let config = FsdpConfig::new().with_ignored(["inp.*"]);
            let model = layers.clone().fully_shard(&mesh, &config)?;
            for step in 0..20 {
                model.try_backward(model.loss(&mine(&pg, step)))?;
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn ranks_that_disagree_on_gradient_sync_are_told_so() {
    let error = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        if pg.rank() == 1 {
            let _guard = model.no_sync();
            model.try_backward(model.loss(&mine(&pg, 0)))?;
        }
        model.try_backward(model.loss(&mine(&pg, 1))).map(drop)
    })
    .unwrap_err();
    assert_names(
        &error.to_string(),
        &["set_requires_gradient_sync", "rank 1"],
    );
}

#[test]
fn ranks_that_clip_at_different_norms_are_told_so() {
    let error = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        model
            .clip_grad_norm(grads, 1.0 + pg.rank() as f64)
            .map(drop)
    })
    .unwrap_err();
    assert_names(&error.to_string(), &["clip at 1", "clip at 2"]);
}

#[test]
fn a_forward_more_on_one_rank_does_not_defer_the_reductions_of_later_steps() {
    for reduces_early in ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        model.try_backward(model.loss(&mine(&pg, 0)))?;
        if pg.rank() == 0 {
            drop(model.loss(&mine(&pg, 50)));
        }
        model.try_backward(model.loss(&mine(&pg, 1)))?;
        model.record_events(true);
        model.try_backward(model.loss(&mine(&pg, 2)))?;
        let events = model.take_events();
        let first_reduce = events
            .iter()
            .position(|e| matches!(e, Event::Reduce { .. }));
        let last_unshard = events
            .iter()
            .rposition(|e| matches!(e, Event::Unshard { .. }));
        Ok(first_reduce < last_unshard)
    })
    .unwrap()
    {
        assert!(reduces_early);
    }
}

#[test]
fn a_dense_module_made_of_shards_trains_in_full_precision() {
    for (trained, dtype, grads) in ranks(2, |pg| {
        let config = FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
        let dense = sharded(&pg, &config)?.into_dense()?;
        let weight = dense.inp.weight.val();
        let grads = GradientsParams::from_grads(dense.loss(&mine(&pg, 0)).backward(), &dense);
        Ok((weight.is_require_grad(), weight.dtype(), grads.len()))
    })
    .unwrap()
    {
        assert!(trained);
        assert_eq!(dtype, DType::F32);
        assert_eq!(grads, local_values(&stack(&device())).len());
    }
}

#[test]
fn a_tied_parameter_loads_under_its_later_name() {
    for values in ranks(2, |pg| {
        let model =
            Tied::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state.insert("head".into(), TensorData::new(vec![5f32; 35], [7, 5]));
        }
        let (model, _) = model.load_full_state_dict(state, LoadMode::Partial)?;
        Ok(floats(model.head.val()))
    })
    .unwrap()
    {
        assert_eq!(values, [5.0; 35]);
    }
}

#[test]
fn a_parameter_without_elements_is_carried_along() {
    #[derive(Module, Debug)]
    struct Empty {
        none: Param<Tensor<2>>,
        w: Param<Tensor<1>>,
    }
    for (grads, names) in ranks(2, |pg| {
        let module = Empty {
            none: Param::from_tensor(Tensor::zeros([0, 3], &device())),
            w: Param::from_tensor(Tensor::ones([3], &device())),
        };
        let model = module.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let grads = model.backward(model.w.val().sum());
        let n = grads.len();
        let model = model.step(&mut SgdConfig::new().init(), 0.1, grads)?;
        Ok((n, model.full_state_dict(StateDictTarget::AllRanks)?.len()))
    })
    .unwrap()
    {
        assert_eq!((grads, names), (1, 2));
    }
}

#[test]
fn a_parameter_without_dimensions_is_refused_with_the_remedy() {
    #[derive(Module, Debug)]
    struct Scalar {
        scale: Param<Tensor<0>>,
    }
    let error = ranks(2, |pg| {
        let scalar =
            Tensor::<1>::ones([1], &device()).reshape::<0, _>(Shape::from(Vec::<usize>::new()));
        let module = Scalar {
            scale: Param::from_tensor(scalar),
        };
        module
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(drop)
    })
    .unwrap_err();
    assert_names(&error.to_string(), &["\"scale\"", "size 1"]);
}

#[test]
fn a_placeholder_has_the_dtype_of_its_parameter() {
    for dtype in ranks(2, |pg| {
        let options = (&device(), DType::BF16);
        let module = One {
            w: Param::from_tensor(Tensor::ones([2], options)),
        };
        let model = module.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        Ok(model.w.dtype())
    })
    .unwrap()
    {
        assert_eq!(dtype, DType::BF16);
    }
}

#[test]
fn units_resharded_over_subgroups_may_be_skipped_by_a_rank() {
    ranks(4, |pg| {
        let config = FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(2));
        let model = Branches::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &config)?;
        let loss = model.loss(&mine(&pg, 0), pg.rank() != 0);
        model.try_backward(loss).map(drop)
    })
    .unwrap();
}

#[test]
fn a_partial_reduction_kept_from_before_joins_units_that_are_unused_later() {
    let plain = dense(Branches::new, &device());
    let whole = |step| Input::new(step, 0..8, &device());
    let loss = plain.loss(&whole(0), true) + plain.loss(&whole(1), false);
    let want = gradients_of(
        &plain,
        &GradientsParams::from_grads(loss.backward(), &plain),
    );
    for (rank, got) in ranks(4, |pg| {
        let mesh = DeviceMesh::hybrid(&pg, 2, 2)?;
        let model = Branches::new(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        model.set_requires_all_reduce(false);
        model.try_backward(model.loss(&mine(&pg, 0), true))?;
        model.set_requires_all_reduce(true);
        let grads = model.try_backward(model.loss(&mine(&pg, 1), false))?;
        Ok(gradients_of(&model, &grads))
    })
    .unwrap()
    .into_iter()
    .enumerate()
    {
        assert_shards(&got, &want, 2, rank % 2);
    }
}

#[test]
fn a_backward_that_panicked_leaves_the_next_step_right() {
    let plain = dense(stack, &device());
    let loss = plain.loss(&Input::new(1, 0..4, &device()));
    let want = gradients_of(
        &plain,
        &GradientsParams::from_grads(loss.backward(), &plain),
    );
    let all = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let loss = model.loss(&mine(&pg, 0));
        let consumed = loss.clone();
        drop(model.backward(loss));
        assert!(catch_unwind(AssertUnwindSafe(|| model.backward(consumed))).is_err());
        let grads = model.backward(model.loss(&mine(&pg, 1)));
        Ok(gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in all.iter().enumerate() {
        assert_shards(got, &want, 2, rank);
    }
}

#[test]
fn a_step_with_gradients_that_were_never_reduced_is_refused() {
    let error = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = {
            let _guard = model.no_sync();
            model.backward(model.loss(&mine(&pg, 0)))
        };
        model
            .step(&mut SgdConfig::new().init(), 0.1, grads)
            .map(drop)
    })
    .unwrap_err();
    assert!(matches!(error, FsdpError::UnsyncedGradients), "{error}");
}

#[test]
fn inference_on_four_ranks_ends_in_no_rank_waiting_for_another() {
    for _ in 0..100 {
        ranks(4, |pg| {
            let model = sharded(&pg, &FsdpConfig::new())?.valid();
            for step in 0..20 {
                let input = Input::new(step, 0..1, &Device::flex());
                drop(model.loss(&input));
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn forwards_that_overlap_with_other_units_on_each_rank_have_backwards_of_their_own() {
    let plain = dense(Branches::new, &device());
    let want = |step: usize, used_by: usize| {
        let half = |rank: usize| {
            let input = Input::new(step, rank * 2..rank * 2 + 2, &device());
            plain.loss(&input, rank == used_by) / 2.0
        };
        let loss = half(0) + half(1);
        gradients_of(
            &plain,
            &GradientsParams::from_grads(loss.backward(), &plain),
        )
    };
    let (first, second) = (want(0, 1), want(1, 0));
    for (rank, got) in ranks(2, |pg| {
        let model =
            Branches::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let loss = |step, used_by| model.loss(&mine(&pg, step), pg.rank() == used_by);
        let (loss_0, loss_1) = (loss(0, 1), loss(1, 0));
        let grads_0 = gradients_of(&model, &model.try_backward(loss_0)?);
        let grads_1 = gradients_of(&model, &model.try_backward(loss_1)?);
        Ok((grads_0, grads_1))
    })
    .unwrap()
    .into_iter()
    .enumerate()
    {
        assert_shards(&got.0, &first, 2, rank);
        assert_shards(&got.1, &second, 2, rank);
    }
}

#[test]
fn a_rank_that_steps_after_a_dropped_forward_does_not_leave_the_others_waiting() {
    for _ in 0..50 {
        ranks(4, |pg| {
            let config =
                FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(2));
            let mut model = sharded(&pg, &config)?;
            let mut optim = SgdConfig::new().init();
            for step in 0..3 {
                let grads = model.try_backward(model.loss(&mine(&pg, step)))?;
                // Layers again and the root last, in a forward whose loss goes nowhere.
                let x = mine(&pg, step).floats::<2>(1, &[super::D]);
                let layers = [0, 2, 0, 1].map(|i| &model.layers[i]);
                let x = layers.iter().fold(x, |x, layer| layer.fc.forward(x));
                drop(model.out.forward(x));
                model = model.step(&mut optim, 0.1, grads)?;
            }
            model.full_state_dict(StateDictTarget::RankZero).map(drop)
        })
        .unwrap();
    }
}

#[test]
fn a_tied_parameter_used_under_its_other_name_by_one_rank_has_its_gradient() {
    let forward = |model: &Between, input: &Input, first: bool| {
        let x = input.floats::<2>(1, &[3]);
        let x = if first { model.inp.forward(x) } else { x };
        let x = model.layers.iter().fold(x, |x, l| l.forward(x).tanh());
        let x = if first { x } else { model.out.forward(x) };
        regression(x, input)
    };
    for world in [2, 3, 4] {
        let plain = dense(Between::new, &device());
        let loss = (0..world).map(|rank| {
            let input = Input::new(0, rank * 2..rank * 2 + 2, &device());
            forward(&plain, &input, rank == 0) / world as f64
        });
        let loss = loss.reduce(|a, b| a + b).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &plain);
        let want = gradients_of(&plain, &grads);
        let ranks = ranks(world, |pg| {
            let model =
                Between::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let loss = forward(&model, &mine(&pg, 0), pg.rank() == 0);
            Ok(gradients_of(&model, &model.try_backward(loss)?))
        });
        for (rank, got) in ranks.unwrap().iter().enumerate() {
            assert_shards(got, &want, world, rank);
        }
    }
}

#[test]
fn a_rank_may_skip_units_of_an_evaluation_between_backward_and_step() {
    for _ in 0..50 {
        ranks(3, |pg| {
            let mut model = sharded(&pg, &FsdpConfig::new())?;
            let mut optim = SgdConfig::new().init();
            for step in 0..3 {
                let grads = model.try_backward(model.loss(&mine(&pg, step)))?;
                let x = mine(&pg, step).floats::<2>(1, &[super::D]);
                drop(model.layers[pg.rank()].fc.forward(x));
                model = model.step(&mut optim, 0.1, grads)?;
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn units_resharded_over_subgroups_may_be_used_in_another_order_by_a_rank() {
    let orders = |rank: usize, step: usize| match (rank + step) % 3 {
        0 => vec![0, 1, 2],
        1 => vec![2, 0],
        _ => vec![1, 2, 0, 1],
    };
    let forward = |model: &Stack, input: &Input, order: &[usize]| {
        let x = input.floats::<2>(1, &[super::D]);
        let layer = |x, i: &usize| model.layers[*i].fc.forward(x).tanh();
        regression(model.out.forward(order.iter().fold(x, layer)), input)
    };
    let plain = dense(stack, &device());
    let want = (0..4).map(|step| {
        let loss = (0..4).map(|rank| {
            let input = Input::new(step, rank * 2..rank * 2 + 2, &device());
            forward(&plain, &input, &orders(rank, step)) / 4.0
        });
        let loss = loss.reduce(|a, b| a + b).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &plain);
        gradients_of(&plain, &grads)
    });
    let want: Vec<Values> = want.collect();
    for (rank, got) in ranks(4, |pg| {
        let config = FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(2));
        let model = sharded(&pg, &config)?;
        let steps = (0..4).map(|step| {
            let loss = forward(&model, &mine(&pg, step), &orders(pg.rank(), step));
            Ok(gradients_of(&model, &model.try_backward(loss)?))
        });
        steps.collect::<Result<Vec<_>>>()
    })
    .unwrap()
    .iter()
    .enumerate()
    {
        for (got, want) in got.iter().zip(&want) {
            assert_shards(got, want, 4, rank);
        }
    }
}
