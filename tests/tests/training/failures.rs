//! Every wrong use is an error that names the culprit, on all ranks, within seconds.

use std::time::{Duration, Instant};

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Lora, Module, Param};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::DType;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpError, FullyShard, LaunchConfig, Placement, ProcessGroup, ReduceOp,
    ReshardAfterForward, Result, UnitConfig, UnitPolicy, launch,
};
use burn_fsdp_tests::models::{Branches, Stack, TiedAcross};
use burn_fsdp_tests::{
    assert_names, device, device_without_checkpointing, full_message, local_values, ranks,
};

use crate::{D, mine, sharded, stack};

/// Runs, and asserts that it failed in well under the default timeout of ten minutes.
#[track_caller]
fn fails<T: Send + std::fmt::Debug>(
    world: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> (FsdpError, String) {
    let start = Instant::now();
    let error = ranks(world, f).expect_err("must fail");
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "took {:?}",
        start.elapsed()
    );
    let text = full_message(&error);
    (error, text)
}

/// What sharding the stack so says.
#[track_caller]
fn refused(world: usize, config: impl Fn() -> FsdpConfig + Send + Sync) -> (FsdpError, String) {
    fails(world, |pg| sharded(&pg, &config()).map(|_| ()))
}

fn ones(n: usize) -> Tensor<1> {
    Tensor::ones([n], &Device::flex())
}

// ---- ranks that fail

#[test]
fn a_panic_in_one_ranks_forward_is_the_first_cause_for_all() {
    let (error, text) = fails(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let x = model.inp.forward(mine(&pg, 0).floats::<2>(1, &[3]));
        assert!(pg.rank() != 1, "no more tea on rank 1");
        let x = model.layers[0].fc.forward(x);
        drop(model.backward(x.sum()));
        Ok(())
    });
    assert!(
        matches!(error, FsdpError::RankFailed { rank: 1, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 1", "no more tea"]);
}

#[test]
fn a_panic_before_a_collective_frees_the_waiting_ranks() {
    let (error, text) = fails(4, |pg| {
        if pg.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
            panic!("out of memory");
        }
        pg.barrier()
    });
    assert!(
        matches!(error, FsdpError::RankFailed { rank: 2, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 2", "out of memory"]);
}

#[test]
fn a_panic_before_backward_frees_ranks_that_are_inside_backward() {
    let (error, text) = fails(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let loss = model.loss(&mine(&pg, 0));
        assert!(pg.rank() != 0, "rank 0 stops here");
        drop(model.backward(loss));
        Ok(())
    });
    assert!(
        matches!(error, FsdpError::RankFailed { rank: 0, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 0", "rank 0 stops here"]);
}

#[test]
fn a_panic_inside_one_ranks_backward_is_the_cause_for_all() {
    let (error, text) = fails(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let loss = model.loss(&mine(&pg, 0));
        let again = loss.clone();
        drop(model.backward(loss));
        let next = model.loss(&mine(&pg, 1));
        // On rank 2 Burn panics: the graph is consumed.
        drop(model.backward(if pg.rank() == 2 { again } else { next }));
        Ok(())
    });
    assert!(
        matches!(error, FsdpError::RankFailed { rank: 2, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 2", "consumed"]);
}

#[test]
fn an_error_of_the_users_own_is_the_first_cause_for_all() {
    let (_, text) = fails(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        if pg.rank() == 1 {
            return Err(FsdpError::other(std::io::Error::other("disk full")));
        }
        drop(model.loss(&mine(&pg, 0)));
        Ok(())
    });
    assert_names(&text, &["disk full"]);
}

#[test]
fn the_same_error_on_all_ranks_is_returned_once() {
    let (_, text) = fails(3, |_| Err::<(), _>(FsdpError::other("every rank says so")));
    assert_names(&text, &["every rank says so"]);
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let (error, text) = fails(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        if pg.rank() == 1 {
            return Ok(());
        }
        drop(model.backward(model.loss(&mine(&pg, 0))));
        Ok(())
    });
    assert!(
        matches!(error, FsdpError::RankReturned { gone: 1, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 1"]);
}

#[test]
fn an_abort_reaches_every_rank_with_its_reason() {
    let (error, text) = fails(3, |pg| {
        if pg.rank() == 2 {
            pg.abort("the data loader ran dry");
        }
        pg.barrier()
    });
    assert!(
        matches!(error, FsdpError::Aborted { rank: 2, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 2", "the data loader ran dry"]);
}

#[test]
fn after_a_failure_every_further_call_returns_the_same_cause() {
    let (_, text) = fails(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        pg.barrier()?;
        if pg.rank() == 1 {
            pg.abort("enough");
        }
        while pg.barrier().is_ok() {}
        for _ in 0..2 {
            let error = pg.barrier().expect_err("still failed");
            assert!(error.to_string().contains("enough"), "{error}");
        }
        let error = model
            .step(&mut AdamWConfig::new().init(), 0.1, grads)
            .map(|_| ())
            .expect_err("no step");
        assert!(error.to_string().contains("enough"), "{error}");
        Err::<(), _>(error)
    });
    assert_names(&text, &["enough"]);
}

#[test]
fn a_second_launch_works_after_a_failed_one() {
    drop(fails(2, |pg| {
        assert!(pg.rank() != 0, "gone");
        pg.barrier()
    }));
    let got = launch(2, |pg| {
        Ok(pg.all_reduce(ones(1), ReduceOp::Sum)?.into_scalar::<f32>())
    });
    assert_eq!(got.unwrap(), [2.0, 2.0]);
}

// ---- ranks that disagree

#[test]
fn different_collectives_at_one_place_name_both() {
    let (error, text) = fails(2, |pg| match pg.rank() {
        0 => pg.all_gather(ones(4)).map(drop),
        _ => pg.all_reduce(ones(4), ReduceOp::Sum).map(drop),
    });
    assert!(
        matches!(error, FsdpError::CollectiveMismatch { .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 0", "rank 1", "all-gather", "all-reduce"]);
}

#[test]
fn different_lengths_name_both() {
    let (error, text) = fails(3, |pg| {
        pg.all_gather(ones(if pg.rank() == 2 { 37 } else { 41 }))
            .map(drop)
    });
    assert!(
        matches!(error, FsdpError::CollectiveMismatch { .. }),
        "{error:?}"
    );
    // What the gather would have made: three times the contribution.
    assert_names(&text, &["rank 2", "111", "123"]);
}

#[test]
fn different_dtypes_name_both() {
    let (error, text) = fails(2, |pg| {
        let x = if pg.rank() == 0 {
            ones(4)
        } else {
            ones(4).cast(DType::BF16)
        };
        pg.all_gather(x).map(drop)
    });
    assert!(
        matches!(error, FsdpError::CollectiveMismatch { .. }),
        "{error:?}"
    );
    assert_names(&text, &["F32", "BF16"]);
}

#[test]
fn different_reduce_operations_name_both() {
    let (_, text) = fails(2, |pg| {
        let op = if pg.rank() == 0 {
            ReduceOp::Sum
        } else {
            ReduceOp::Max
        };
        pg.all_reduce(ones(4), op).map(drop)
    });
    assert_names(&text, &["Sum", "Max"]);
}

#[test]
fn units_used_in_another_order_on_one_rank_are_matched_by_name() {
    let want = local_values(&burn_fsdp_tests::dense(stack, &device()));
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new().with_prefetch(false))?;
        let first = if pg.rank() == 0 { 0 } else { 2 };
        for layer in [first, 2 - first] {
            let got = model.layers[layer]
                .fc
                .weight
                .val()
                .try_into_vec_as::<f32>()
                .unwrap();
            assert_eq!(got, want[&format!("layers.{layer}.fc.weight")].1);
        }
        pg.barrier()
    })
    .unwrap();
}

#[test]
fn a_timeout_tells_who_is_missing() {
    let start = Instant::now();
    let error = LaunchConfig::new(3)
        .with_timeout(Duration::from_millis(300))
        .launch(|pg| {
            if pg.rank() == 1 {
                std::thread::sleep(Duration::from_secs(2));
            }
            pg.barrier()
        })
        .expect_err("rank 1 is late");
    assert!(start.elapsed() < Duration::from_secs(6));
    let FsdpError::Timeout { missing, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(missing, &[1]);
    assert_names(&error.to_string(), &["[1]", "barrier", "300ms"]);
}

#[test]
fn a_slow_rank_within_the_timeout_is_waited_for() {
    let got = LaunchConfig::new(2)
        .with_timeout(Duration::from_secs(5))
        .launch(|pg| {
            if pg.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            pg.barrier()
        });
    assert!(got.is_ok(), "{got:?}");
}

#[test]
fn a_model_that_differs_between_ranks_is_refused() {
    let (error, text) = fails(3, |pg| {
        let layers = if pg.rank() == 2 { 4 } else { 3 };
        Stack::new(layers, D, &device())
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::RanksDisagree { rank: 2, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 2", "layers.3"]);
}

#[test]
fn shapes_that_differ_between_ranks_are_refused() {
    let (error, text) = fails(2, |pg| {
        let d = if pg.rank() == 1 { 7 } else { 5 };
        Stack::new(1, d, &device())
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::RanksDisagree { rank: 1, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 1", "inp.weight", "[3, 5]", "[3, 7]"]);
}

#[test]
fn settings_that_differ_between_ranks_are_refused() {
    let (error, text) = fails(2, |pg| {
        let policy = if pg.rank() == 1 {
            ReshardAfterForward::Never
        } else {
            ReshardAfterForward::Always
        };
        sharded(&pg, &FsdpConfig::new().with_reshard_after_forward(policy)).map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::RanksDisagree { rank: 1, .. }),
        "{error:?}"
    );
    assert_names(&text, &["rank 1", "Never", "Always"]);
}

#[test]
fn meshes_that_differ_between_ranks_are_refused() {
    let (_, text) = fails(2, |pg| {
        let mesh = if pg.rank() == 1 {
            DeviceMesh::hybrid(&pg, 2, 1)?
        } else {
            DeviceMesh::shard(&pg)
        };
        stack(&device())
            .fully_shard(&mesh, &FsdpConfig::new())
            .map(|_| ())
    });
    assert_names(&text, &["rank 1"]);
}

#[test]
fn rank_0_decides_what_is_frozen() {
    let got = ranks(2, |pg| {
        let mut model = stack(&device());
        if pg.rank() == 1 {
            model.out = model.out.no_grad();
        }
        let model = model.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        Ok(burn_fsdp_tests::gradients_of(&model, &grads).contains_key("out.weight"))
    });
    assert_eq!(got.unwrap(), [true, true]);
}

// ---- what cannot be sharded

#[test]
fn a_parameter_tied_across_units_names_both_paths() {
    let (error, text) = fails(2, |pg| {
        TiedAcross::new(&device())
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::TiedAcrossUnits { .. }),
        "{error:?}"
    );
    assert_names(&text, &["layers.0.weight", "layers.1.weight"]);
}

#[test]
fn a_parameter_tied_within_one_unit_is_accepted() {
    ranks(2, |pg| {
        let config = FsdpConfig::new().with_units(UnitPolicy::function(|_| false));
        let model = TiedAcross::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &config)?;
        let x = Tensor::<2>::ones([1, 3], &device());
        let y = model.layers[1].forward(model.layers[0].forward(x));
        assert_eq!(
            model.backward(y.sum()).len(),
            2,
            "weight and bias, once each"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_module_with_lora_is_refused() {
    let (error, text) = fails(2, |pg| {
        let model = LinearConfig::new(5, 7)
            .init(&device())
            .apply_lora(Lora::new(2, 4.0));
        model
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::AlreadyReparameterized { .. }),
        "{error:?}"
    );
    assert_names(&text, &["weight", "LoRA"]);
}

#[test]
fn sharding_twice_is_refused() {
    let (error, text) = fails(2, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        sharded(&pg, &FsdpConfig::new())?
            .fully_shard(&mesh, &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::AlreadyReparameterized { .. }),
        "{error:?}"
    );
    assert_names(&text, &["fully_shard"]);
}

#[test]
fn a_module_without_parameters_is_refused() {
    let (error, _) = fails(2, |pg| {
        burn::nn::Relu::new()
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(matches!(error, FsdpError::NoParameters), "{error:?}");
}

#[test]
fn a_shard_dim_out_of_range_names_the_parameter() {
    let (error, text) = refused(2, || {
        FsdpConfig::new()
            .with_placement(|p| (p.path == "layers.1.fc.bias").then_some(Placement::Shard(1)))
    });
    assert!(
        matches!(error, FsdpError::ShardDimOutOfRange { dim: 1, .. }),
        "{error:?}"
    );
    assert_names(&text, &["layers.1.fc.bias", "[5]", "dim 1"]);
}

#[test]
fn a_unit_path_that_matches_nothing_is_refused() {
    let (error, text) = refused(2, || {
        FsdpConfig::new().with_units(UnitPolicy::Paths(vec![
            "layers.*".into(),
            "blokcs.*".into(),
        ]))
    });
    assert!(
        matches!(error, FsdpError::PatternUnmatched { .. }),
        "{error:?}"
    );
    assert_names(&text, &["blokcs.*"]);
}

#[test]
fn a_unit_type_that_matches_nothing_is_refused() {
    let (error, text) = refused(2, || {
        FsdpConfig::new().with_units(UnitPolicy::Types(vec!["Blokc".into()]))
    });
    assert!(
        matches!(error, FsdpError::PatternUnmatched { .. }),
        "{error:?}"
    );
    assert_names(&text, &["Blokc"]);
}

#[test]
fn an_ignored_pattern_that_matches_nothing_is_refused() {
    let (error, text) = refused(2, || FsdpConfig::new().with_ignored(["norm.*"]));
    assert!(
        matches!(error, FsdpError::PatternUnmatched { .. }),
        "{error:?}"
    );
    assert_names(&text, &["norm.*"]);
}

#[test]
fn an_override_for_no_unit_is_refused() {
    let (error, text) = refused(2, || {
        FsdpConfig::new().with_unit("layers.7", UnitConfig::new())
    });
    assert!(
        matches!(error, FsdpError::PatternUnmatched { .. }),
        "{error:?}"
    );
    assert_names(&text, &["layers.7"]);
}

#[test]
fn mixed_dtypes_in_one_unit_are_listed() {
    let (error, text) = fails(2, |pg| {
        let device = device_without_checkpointing();
        let mut model = stack(&device);
        let bias = Tensor::<1>::zeros([D], (&device, DType::BF16));
        model.layers[1].fc.bias = Some(Param::from_tensor(bias));
        model
            .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())
            .map(|_| ())
    });
    assert!(matches!(error, FsdpError::MixedDtypes { .. }), "{error:?}");
    assert_names(&text, &["layers.1", "BF16", "F32"]);
}

#[test]
fn a_group_size_that_does_not_divide_is_refused() {
    for k in [0, 3, 5] {
        let (error, text) = refused(4, || {
            FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(k))
        });
        assert!(
            matches!(error, FsdpError::InvalidReshardGroup { shard_size: 4, .. }),
            "{error:?}"
        );
        assert_names(&text, &[&k.to_string(), "4"]);
    }
}

#[test]
fn a_hybrid_mesh_that_does_not_fit_the_world_is_refused() {
    for (replicate, shard) in [(2, 3), (0, 4), (3, 1), (4, 2)] {
        let (error, text) = fails(4, |pg| {
            DeviceMesh::hybrid(&pg, replicate, shard).map(|_| ())
        });
        assert!(
            matches!(error, FsdpError::InvalidMesh { world_size: 4, .. }),
            "{error:?}"
        );
        assert_names(&text, &[&format!("{replicate} x {shard}"), "4"]);
    }
}

#[test]
fn a_gradient_factor_of_zero_or_nan_is_refused() {
    use burn_fsdp::GradientAverage;
    for factor in [0.0, f64::NAN] {
        let (error, text) = refused(2, || {
            FsdpConfig::new().with_gradient_average(GradientAverage::Factor(factor))
        });
        assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error:?}");
        assert_names(&text, &["factor"]);
    }
}

#[test]
fn an_integer_param_dtype_is_refused() {
    use burn_fsdp::MixedPrecisionPolicy;
    let (error, text) = refused(2, || {
        FsdpConfig::new()
            .with_mixed_precision(MixedPrecisionPolicy::new().with_param_dtype(DType::I32))
    });
    assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error:?}");
    assert_names(&text, &["I32"]);
}

// ---- wrong steps

#[test]
fn an_optimizer_that_clips_each_parameter_is_refused() {
    let (error, text) = fails(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        let clip = GradientClippingConfig::Norm(1.0);
        let mut optim = AdamWConfig::new().with_grad_clipping(Some(clip)).init();
        model.step(&mut optim, 0.1, grads).map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::OptimizerClipsGradients),
        "{error:?}"
    );
    assert_names(&text, &["clip_grad_norm"]);
}

#[test]
fn gradients_of_an_incomplete_unit_are_refused() {
    let (error, text) = fails(2, |pg| {
        let model =
            Branches::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        // Plain Burn calls: `never` shares the root unit, whose reduction thus never came.
        let grads = GradientsParams::from_grads(model.loss(&mine(&pg, 0), true).backward(), &model);
        model
            .step(&mut AdamWConfig::new().init(), 0.1, grads)
            .map(|_| ())
    });
    assert!(
        matches!(error, FsdpError::IncompleteUnit { .. }),
        "{error:?}"
    );
    assert_names(
        &text,
        &["never.weight", "never.bias", "model.backward(loss)"],
    );
}

#[test]
fn an_incomplete_backward_does_not_spoil_the_next_one() {
    let model = burn_fsdp_tests::dense(Branches::new, &device());
    let want = crate::dense_grads(&model, model.loss(&crate::all(2, 1), true));
    let got = ranks(2, |pg| {
        let model =
            Branches::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        drop(model.loss(&mine(&pg, 0), true).backward());
        let grads = model.backward(model.loss(&mine(&pg, 1), true));
        Ok(burn_fsdp_tests::gradients_of(&model, &grads))
    })
    .unwrap();
    for (rank, got) in got.iter().enumerate() {
        crate::assert_shards_of(&want, got, 1.0, 2, rank);
    }
}

#[test]
fn a_unit_that_does_not_exist_is_named() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let errors = [
            model.unshard("layers.7").expect_err("no such unit"),
            model
                .set_forward_prefetch("layers.7", &["layers.1"])
                .expect_err("no such unit"),
            model
                .set_forward_prefetch("layers.0", &["layers.7"])
                .expect_err("no such unit"),
            model
                .set_backward_prefetch("layers.0", &["layers.7"])
                .expect_err("no such unit"),
        ];
        for error in errors {
            assert!(matches!(error, FsdpError::UnknownUnit { .. }), "{error:?}");
            assert_names(&error.to_string(), &["layers.7", "layers.2"]);
        }
        Ok(())
    })
    .unwrap();
}

/// Flex has one device, so a move that is refused can't be made here: the core tests its refusal.
#[test]
fn moving_a_sharded_module_to_where_it_is_changes_nothing() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let before = local_values(&model);
        let model = model.to_device(&device()).fork(&device());
        assert_eq!(local_values(&model), before);
        assert!(
            !model.backward(model.loss(&mine(&pg, 0))).is_empty(),
            "and the model still trains"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_negative_or_nan_maximum_norm_is_refused() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        for max in [-1.0, f64::NAN] {
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            let error = model
                .clip_grad_norm(grads, max)
                .map(|_| ())
                .expect_err("no such norm");
            assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error:?}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_failed_sharding_leaves_the_group_usable() {
    ranks(2, |pg| {
        let bad = FsdpConfig::new().with_ignored(["nothing.*"]);
        let error = sharded(&pg, &bad).map(|_| ()).expect_err("matches nothing");
        assert!(
            matches!(error, FsdpError::PatternUnmatched { .. }),
            "{error:?}"
        );
        let model = sharded(&pg, &FsdpConfig::new())?;
        assert!(!local_values(&model).is_empty());
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_sequence_of_collectives_is_the_same_in_every_launch() {
    // 20 launches, 20 states of every hash map: a set iterated in hash order would show.
    let run = || {
        ranks(2, |pg| {
            let model = Branches::new(&device())
                .fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            model.record_events(true);
            let use_all = pg.rank() == 0;
            drop(model.backward(model.loss(&mine(&pg, 0), use_all)));
            Ok(model
                .take_events()
                .iter()
                .map(|e| format!("{e:?}"))
                .collect::<Vec<_>>())
        })
        .unwrap()
    };
    let first = run();
    for _ in 0..19 {
        assert_eq!(run(), first);
    }
}
