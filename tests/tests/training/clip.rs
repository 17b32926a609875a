use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpError, FsdpModule, FullyShard, NonFinite, NormType, Placement,
    Result, StateDictTarget,
};
use burn_fsdp_tests::models::Mlp;
use burn_fsdp_tests::{Values, dense, device, gradients_of, ranks, state_values};

use crate::{all, assert_shards_of, dense_grads, mine, poison, sharded, stack};

/// At world 5 most shards of this are empty.
fn mlp(device: &Device) -> Mlp {
    Mlp::new([3, 2, 3, 1], device)
}

fn norm(grads: &Values, p: NormType) -> f64 {
    let all = grads
        .values()
        .flat_map(|(_, v)| v)
        .map(|x| f64::from(*x).abs());
    match p {
        NormType::L1 => all.sum(),
        NormType::L2 => all.map(|x| x * x).sum::<f64>().sqrt(),
        NormType::Inf => all.fold(0.0, f64::max),
    }
}

fn relative(a: f64, b: f64) -> f64 {
    (a - b).abs() / b
}

/// Asserts that the norms of the gradients are those of the dense ones.
fn check_norms<M: Module>(
    model: &FsdpModule<M>,
    grads: &GradientsParams,
    want: &Values,
) -> Result<()> {
    for p in [NormType::L1, NormType::L2, NormType::Inf] {
        let (got, want) = (model.grad_norm(grads, p)?, norm(want, p));
        assert!(relative(got, want) <= 5e-6, "{p:?}: {got}, dense {want}");
    }
    Ok(())
}

#[test]
fn the_clip_norm_equals_dense_and_is_the_same_on_all_ranks_also_with_empty_shards() {
    for world in [1, 2, 3, 5] {
        let model = dense(mlp, &device());
        let want = dense_grads(&model, model.loss(&all(world, 0)));
        let want_norm = norm(&want, NormType::L2);
        let max = want_norm / 3.0;
        let got = ranks(world, |pg| {
            let model = mlp(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            let (grads, norm) = model.clip_grad_norm(grads, max)?;
            Ok((norm, gradients_of(&model, &grads)))
        })
        .unwrap();
        let factor = (max / (want_norm + 1e-6)) as f32;
        for (rank, (norm, grads)) in got.iter().enumerate() {
            assert_eq!(
                norm.to_bits(),
                got[0].0.to_bits(),
                "world {world} rank {rank}"
            );
            assert!(
                relative(*norm, want_norm) <= 1e-6,
                "world {world}: {norm}, dense {want_norm}"
            );
            assert_shards_of(&want, grads, factor, world, rank);
        }
    }
}

#[test]
fn epsilon_is_added_once_at_a_norm_near_it() {
    let scale = 1e-6;
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(4, 0)).mul_scalar(scale));
    let want_norm = norm(&want, NormType::L2);
    assert!(
        want_norm > 1e-7 && want_norm < 1e-4,
        "{want_norm} is not near epsilon"
    );
    let max = want_norm / 2.0;
    let got = ranks(4, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)).mul_scalar(scale));
        let (grads, norm) = model.clip_grad_norm(grads, max)?;
        Ok((norm, gradients_of(&model, &grads)))
    })
    .unwrap();
    // With epsilon added on each of four ranks the factor would be off by far more than this bound.
    let factor = max / (want_norm + 1e-6);
    for (norm, grads) in &got {
        assert!(
            relative(*norm, want_norm) <= 5e-6,
            "{norm}, dense {want_norm}"
        );
        let clipped = got
            .iter()
            .map(|(_, g)| self::norm(g, NormType::L2).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!(
            relative(clipped, factor * want_norm) < 1e-5,
            "{clipped}, want {}",
            factor * want_norm
        );
        assert!(!grads.is_empty());
    }
}

#[test]
fn gradients_below_the_maximum_are_left_bit_for_bit() {
    ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        let before = gradients_of(&model, &grads);
        let (grads, norm) = model.clip_grad_norm(grads, 1e6)?;
        assert!(norm > 0.0 && norm < 1e6);
        assert_eq!(before, gradients_of(&model, &grads));
        Ok(())
    })
    .unwrap();
}

#[test]
fn norms_1_2_and_infinity_equal_dense() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(3, 0)));
    ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        check_norms(&model, &grads, &want)
    })
    .unwrap();
}

#[test]
fn replicated_parameters_count_once_in_the_norm() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(4, 0)));
    let configs: [fn() -> FsdpConfig; 3] = [
        || FsdpConfig::new().with_replicate_below(16),
        || FsdpConfig::new().with_replicate_below(usize::MAX),
        || {
            FsdpConfig::new()
                .with_placement(|p| (p.shape.len() == 1).then_some(Placement::Replicate))
        },
    ];
    for config in configs {
        ranks(4, |pg| {
            let model = sharded(&pg, &config())?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            check_norms(&model, &grads, &want)
        })
        .unwrap();
    }
}

#[test]
fn replicas_of_a_hybrid_mesh_count_once_in_the_norm() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(4, 0)));
    for (replicate, shard) in [(2, 2), (4, 1), (1, 4)] {
        ranks(4, |pg| {
            let mesh = DeviceMesh::hybrid(&pg, replicate, shard)?;
            let model = stack(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            for p in [NormType::L1, NormType::L2, NormType::Inf] {
                let (got, want) = (model.grad_norm(&grads, p)?, norm(&want, p));
                assert!(
                    relative(got, want) <= 5e-6,
                    "{replicate}x{shard} {p:?}: {got}, dense {want}"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_nan_in_one_ranks_shard_is_the_same_error_on_all_ranks_and_changes_no_parameter() {
    let outcome = ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let before = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        let mut grads = model.backward(model.loss(&mine(&pg, 0)));
        if pg.rank() == 1 {
            poison(&model, &mut grads);
        }
        let error = model
            .clip_grad_norm(grads, 1.0)
            .map(|(_, norm)| norm)
            .expect_err("the norm is NaN");
        assert!(
            matches!(error, FsdpError::NonFiniteNorm { norm } if norm.is_nan()),
            "{error}"
        );
        let after = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        assert_eq!(before, after);
        Ok(error.to_string())
    })
    .unwrap();
    assert!(
        outcome.iter().all(|text| text == &outcome[0]),
        "{outcome:?}"
    );
}

#[test]
fn a_nan_in_one_replicas_shard_is_the_same_error_on_all_ranks_of_a_hybrid_mesh() {
    ranks(4, |pg| {
        let model =
            stack(&device()).fully_shard(&DeviceMesh::hybrid(&pg, 2, 2)?, &FsdpConfig::new())?;
        let mut grads = model.backward(model.loss(&mine(&pg, 0)));
        if pg.rank() == 3 {
            poison(&model, &mut grads);
        }
        let error = model
            .clip_grad_norm(grads, 1.0)
            .map(|(_, norm)| norm)
            .expect_err("the norm is NaN");
        assert!(
            matches!(error, FsdpError::NonFiniteNorm { norm } if norm.is_nan()),
            "{error}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_infinity_in_one_ranks_loss_is_an_error_on_all_ranks() {
    ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let scale = if pg.rank() == 2 { f32::INFINITY } else { 1.0 };
        let grads = model.backward(model.loss(&mine(&pg, 0)).mul_scalar(scale));
        let error = model
            .clip_grad_norm(grads, 1.0)
            .map(|(_, norm)| norm)
            .expect_err("the norm is not finite");
        assert!(
            matches!(error, FsdpError::NonFiniteNorm { norm } if !norm.is_finite()),
            "{error}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn all_ranks_skip_when_told_to_and_the_next_step_trains_again() {
    ranks(3, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new().with_non_finite(NonFinite::Skip))?;
        let mut optim = AdamWConfig::new().init();
        let before = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        let mut grads = model.backward(model.loss(&mine(&pg, 0)));
        if pg.rank() == 1 {
            poison(&model, &mut grads);
        }
        let (grads, norm) = model.clip_grad_norm(grads, 1.0)?;
        assert!(!norm.is_finite(), "{norm}");
        assert!(grads.is_empty(), "no gradient is left to step with");
        model = model.step(&mut optim, 0.1, grads)?;
        assert_eq!(
            before,
            state_values(&model.full_state_dict(StateDictTarget::AllRanks)?)
        );
        let grads = model.backward(model.loss(&mine(&pg, 1)));
        let (grads, norm) = model.clip_grad_norm(grads, 1.0)?;
        assert!(norm.is_finite());
        model = model.step(&mut optim, 0.1, grads)?;
        assert!(before != state_values(&model.full_state_dict(StateDictTarget::AllRanks)?));
        Ok(())
    })
    .unwrap();
}

#[test]
fn no_gradients_have_norm_zero() {
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let (grads, norm) = model.clip_grad_norm(GradientsParams::new(), 1.0)?;
        assert_eq!(norm, 0.0);
        assert!(grads.is_empty());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_tied_parameter_counts_once_in_the_norm() {
    use burn_fsdp_tests::models::Tied;
    let model = dense(Tied::new, &device());
    let mut want = dense_grads(&model, model.loss(&all(2, 0)));
    assert_eq!(
        want["head"], want["emb.weight"],
        "one gradient shown at two paths"
    );
    want.remove("head");
    let want = norm(&want, NormType::L2);
    ranks(2, |pg| {
        let model =
            Tied::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let grads = model.backward(model.loss(&mine(&pg, 0)));
        let got = model.grad_norm(&grads, NormType::L2)?;
        assert!(relative(got, want) <= 5e-6, "{got}, dense {want}");
        Ok(())
    })
    .unwrap();
}

/// A parameter of large values, so that squares in f32 would overflow.
#[derive(Module, Debug)]
struct Large {
    w: Param<Tensor<1>>,
}

#[test]
fn the_norm_of_huge_gradients_does_not_overflow() {
    ranks(2, |pg| {
        let w = Param::from_tensor(Tensor::ones([4], &device()));
        let model = Large { w }.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let grads = model.backward(model.w.val().mul_scalar(1e25).sum());
        let got = model.grad_norm(&grads, NormType::L2)?;
        assert!(relative(got, 2e25) < 1e-6, "{got}");
        Ok(())
    })
    .unwrap();
}
