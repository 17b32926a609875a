use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::DType;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FullyShard, GradientAverage, MixedPrecisionPolicy, UnitConfig,
};
use burn_fsdp_tests::{cross_entropy, dense, device, gradients_of, ranks};

use crate::{all, assert_shards_of, dense_grads, mine, sharded, stack};

struct Dtypes<'a>(Option<&'a GradientsParams>, Vec<DType>);
impl ModuleVisitor for Dtypes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.0 {
            Some(grads) => self.1.extend(grads.get::<D>(param.id).map(|g| g.dtype())),
            None => self.1.push(param.val().dtype()),
        }
    }
}

fn dtypes<M: Module>(model: &M, grads: Option<&GradientsParams>) -> Vec<DType> {
    let mut visitor = Dtypes(grads, vec![]);
    model.visit(&mut visitor);
    visitor.1
}

#[test]
fn the_model_sees_bf16_while_shards_and_their_gradients_stay_f32() {
    ranks(2, |pg| {
        let config = FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
        let mut model = sharded(&pg, &config)?;
        let mut optim = AdamWConfig::new().init();
        for step in 0..2 {
            assert_eq!(model.layers[0].fc.weight.val().dtype(), DType::BF16);
            assert_eq!(model.inp.weight.val().dtype(), DType::BF16);
            assert!(
                dtypes(&model, None).iter().all(|t| *t == DType::F32),
                "shards"
            );
            let x = mine(&pg, step).floats::<2>(1, &[3]);
            let y = model.forward(x.cast(DType::BF16));
            assert_eq!(y.dtype(), DType::BF16);
            let grads = model.backward(y.cast(DType::F32).square().mean());
            let seen = dtypes(&model, Some(&grads));
            assert_eq!(seen.len(), grads.len());
            assert!(seen.iter().all(|t| *t == DType::F32), "gradients: {seen:?}");
            model = model.step(&mut optim, 1e-3, grads)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn bf16_rounds_what_the_model_sees_and_not_the_master_copy() {
    let want = dense(stack, &device());
    let want = want.layers[1]
        .fc
        .weight
        .val()
        .try_into_vec_as::<f32>()
        .unwrap();
    ranks(2, |pg| {
        let config = FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
        let model = sharded(&pg, &config)?;
        let seen = model.layers[1]
            .fc
            .weight
            .val()
            .try_into_vec_as::<f32>()
            .unwrap();
        let rounded: Vec<f32> = want
            .iter()
            .map(|x| burn::tensor::bf16::from_f32(*x).to_f32())
            .collect();
        assert_eq!(seen, rounded);
        assert!(seen != want, "rounding changes something");
        let full = model.full_state_dict(burn_fsdp::StateDictTarget::AllRanks)?;
        assert_eq!(
            burn_fsdp_tests::state_values(&full)["layers.1.fc.weight"].1,
            want
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn bf16_training_lowers_the_loss_close_to_f32() {
    use burn_fsdp_tests::models::Gpt;
    let run = |policy: MixedPrecisionPolicy| {
        ranks(2, move |pg| {
            let mut model = Gpt::new(2, 16, 2, 7, 8, &device()).fully_shard(
                &DeviceMesh::shard(&pg),
                &FsdpConfig::new().with_mixed_precision(policy),
            )?;
            let mut optim = AdamWConfig::new().init();
            let mut losses = vec![];
            for _ in 0..20 {
                let tokens = mine(&pg, 0).ints(1, 9, 7);
                let logits = model.forward(tokens.clone().narrow(1, 0, 8));
                let loss = cross_entropy(logits, tokens.narrow(1, 1, 8));
                losses.push(loss.clone().into_scalar::<f32>());
                let grads = model.backward(loss);
                model = model.step(&mut optim, 1e-2, grads)?;
            }
            Ok(losses)
        })
        .unwrap()
    };
    let (bf16, f32) = (
        run(MixedPrecisionPolicy::bf16()),
        run(MixedPrecisionPolicy::new()),
    );
    for (a, b) in bf16[0].iter().zip(&f32[0]) {
        assert!((a - b).abs() < 0.05, "bf16 {a}, f32 {b}");
    }
    assert!(bf16[0][19] < 0.5 * bf16[0][0], "{:?}", bf16[0]);
    assert!(bf16 != f32, "bf16 was used");
}

#[test]
fn one_units_own_policy_leaves_the_others_in_f32() {
    ranks(2, |pg| {
        let unit = UnitConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16());
        let model = sharded(&pg, &FsdpConfig::new().with_unit("layers.1", unit))?;
        assert_eq!(model.layers[0].fc.weight.val().dtype(), DType::F32);
        assert_eq!(model.layers[1].fc.weight.val().dtype(), DType::BF16);
        assert_eq!(model.layers[1].norm.gamma.val().dtype(), DType::BF16);
        assert_eq!(model.out.weight.val().dtype(), DType::F32);
        Ok(())
    })
    .unwrap();
}

#[test]
fn forward_with_casts_floating_inputs_and_outputs() {
    ranks(2, |pg| {
        let policy = MixedPrecisionPolicy::bf16().with_output_dtype(DType::F32);
        let model = sharded(&pg, &FsdpConfig::new().with_mixed_precision(policy))?;
        let x = mine(&pg, 0).floats::<2>(1, &[3]);
        let y = model.forward_with(x, |m, x| {
            assert_eq!(x.dtype(), DType::BF16, "the input was cast");
            let y = m.forward(x);
            assert_eq!(y.dtype(), DType::BF16);
            y
        });
        assert_eq!(y.dtype(), DType::F32, "the output was cast");
        let grads = model.backward(y.square().mean());
        assert!(
            dtypes(&model, Some(&grads))
                .iter()
                .all(|t| *t == DType::F32)
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn forward_with_leaves_inputs_alone_when_told_to_and_integers_always() {
    ranks(2, |pg| {
        let policy = MixedPrecisionPolicy::bf16().with_cast_forward_inputs(false);
        let model = sharded(&pg, &FsdpConfig::new().with_mixed_precision(policy))?;
        let x = mine(&pg, 0).floats::<2>(1, &[3]);
        let seen = model.forward_with(x, |_, x| {
            assert_eq!(x.dtype(), DType::F32);
            x
        });
        assert_eq!(seen.dtype(), DType::F32, "no output dtype was asked for");
        let model = sharded(
            &pg,
            &FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16()),
        )?;
        let tokens = mine(&pg, 0).ints(1, 3, 7);
        let before = tokens.dtype();
        let both = (tokens, mine(&pg, 0).floats::<2>(1, &[3]));
        let (tokens, floats) = model.forward_with(both, |_, both| both);
        assert_eq!(tokens.dtype(), before, "integers are never cast");
        assert_eq!(floats.dtype(), DType::BF16, "members of a tuple are");
        Ok(())
    })
    .unwrap();
}

#[derive(Module, Debug)]
struct One {
    w: Param<Tensor<1>>,
}

fn f16_mean(c: f32) -> f32 {
    let got = ranks(4, move |pg| {
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::F16)
            .with_reduce_dtype(DType::F16);
        let model = One {
            w: Param::from_tensor(Tensor::ones([1], &device())),
        }
        .fully_shard(
            &DeviceMesh::shard(&pg),
            &FsdpConfig::new().with_mixed_precision(policy),
        )?;
        // The constant is a tensor, so that f16 holds it exactly.
        let c = Tensor::<1>::from_floats([c], &device()).cast(DType::F16);
        let grads = model.backward((model.w.val() * c).sum());
        Ok(gradients_of(&model, &grads)["w"].1[0])
    })
    .unwrap();
    got[0]
}

#[test]
fn an_f16_mean_of_large_gradients_does_not_overflow() {
    // The plain sum of four is 120000, beyond f16's 65504.
    assert_eq!(f16_mean(30000.0), 30000.0);
}

#[test]
fn an_f16_mean_of_tiny_gradients_does_not_underflow() {
    // A quarter of this, before the sum, would be 2^-25: zero in f16.
    assert_eq!(f16_mean(2f32.powi(-23)), 2f32.powi(-23));
}

#[test]
fn gradients_may_be_summed_or_divided_by_a_factor() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(3, 0)));
    for (average, factor) in [
        (GradientAverage::Sum, 3.0),
        (GradientAverage::Factor(6.0), 0.5),
        (GradientAverage::Factor(1.0), 3.0),
        (GradientAverage::Mean, 1.0),
    ] {
        let got = ranks(3, |pg| {
            let model = sharded(&pg, &FsdpConfig::new().with_gradient_average(average))?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            Ok(gradients_of(&model, &grads))
        })
        .unwrap();
        for (rank, got) in got.iter().enumerate() {
            assert_shards_of(&want, got, factor, 3, rank);
        }
    }
}

#[test]
fn sum_and_factor_hold_on_a_hybrid_mesh_and_for_replicated_parameters() {
    let model = dense(stack, &device());
    let want = dense_grads(&model, model.loss(&all(4, 0)));
    for (average, factor) in [
        (GradientAverage::Sum, 4.0),
        (GradientAverage::Factor(2.0), 2.0),
    ] {
        let got = ranks(4, |pg| {
            let mesh = DeviceMesh::hybrid(&pg, 2, 2)?;
            let config = FsdpConfig::new().with_gradient_average(average);
            let model = stack(&device()).fully_shard(&mesh, &config)?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            let hybrid = gradients_of(&model, &grads);
            let config = config.with_replicate_below(usize::MAX);
            let model = stack(&device()).fully_shard(&DeviceMesh::shard(&pg), &config)?;
            Ok((
                hybrid,
                gradients_of(&model, &model.backward(model.loss(&mine(&pg, 0)))),
            ))
        });
        for (rank, (hybrid, _)) in got.unwrap().iter().enumerate() {
            assert_shards_of(&want, hybrid, factor, 2, rank % 2);
        }
    }
}

#[test]
fn a_device_mesh_in_f16_trains() {
    ranks(2, |pg| {
        let mut model = sharded(
            &pg,
            &FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::f16()),
        )?;
        let mut optim = AdamWConfig::new().init();
        let mut losses = vec![];
        for _ in 0..10 {
            let x = mine(&pg, 0).floats::<2>(1, &[3]).cast(DType::F16);
            let loss = (model.forward(x).cast(DType::F32) - 1.0).square().mean();
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = model.backward(loss);
            model = model.step(&mut optim, 1e-2, grads)?;
        }
        assert!(losses[9] < losses[0] * 0.9, "{losses:?}");
        Ok(())
    })
    .unwrap();
}
