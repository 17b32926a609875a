//! The sharded training equals the dense one: losses, gradients, weights, and bit for bit from run to run.

use burn::module::{Module, ParamGroup};
use burn::nn::LinearConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig};
use burn_fsdp::{FsdpConfig, OffloadPolicy, Placement, ReshardAfterForward, UnitPolicy};
use burn_fsdp_tests::models::*;
use burn_fsdp_tests::{Parity, device, device_without_checkpointing};

/// Sizes 1, 3, 5 and 7 leave shards uneven or empty at every world size.
fn mlp(world: usize) -> Parity<Mlp> {
    Parity::new(world, |d| Mlp::new([3, 7, 5, 1], d), |m, i| m.loss(i))
}

fn wide_mlp(world: usize) -> Parity<Mlp> {
    Parity::new(world, |d| Mlp::new([5, 64, 7, 3], d), |m, i| m.loss(i))
}

fn stack(world: usize) -> Parity<Stack> {
    Parity::new(world, |d| Stack::new(3, 5, d), |m, i| m.loss(i))
}

fn gpt(world: usize) -> Parity<Gpt> {
    Parity::new(world, |d| Gpt::new(2, 8, 2, 7, 5, d), |m, i| m.loss(i))
}

#[test]
fn an_mlp_of_uneven_sizes_trains_as_dense_at_world_1() {
    mlp(1).check();
}

#[test]
fn an_mlp_of_uneven_sizes_trains_as_dense_at_world_2() {
    mlp(2).check();
}

#[test]
fn an_mlp_of_uneven_sizes_trains_as_dense_at_world_3() {
    mlp(3).check();
}

#[test]
fn an_mlp_of_uneven_sizes_trains_as_dense_at_world_4() {
    mlp(4).check();
}

#[test]
fn an_mlp_of_uneven_sizes_trains_as_dense_at_world_5() {
    mlp(5).check();
}

#[test]
fn an_mlp_with_64_hidden_trains_as_dense_at_worlds_1_to_5() {
    for world in 1..=5 {
        Parity {
            steps: 5,
            ..wide_mlp(world)
        }
        .check();
    }
}

#[test]
fn a_single_linear_layer_of_one_number_trains_as_dense_where_three_of_four_shards_are_empty() {
    Parity::new(
        4,
        |d| LinearConfig::new(1, 1).init(d),
        |m, i| burn_fsdp_tests::regression(m.forward(i.floats::<2>(1, &[1])), i),
    )
    .check();
}

#[test]
fn a_gpt_with_a_vec_of_blocks_trains_as_dense_at_world_1() {
    gpt(1).check();
}

#[test]
fn a_gpt_with_a_vec_of_blocks_trains_as_dense_at_world_2() {
    gpt(2).check();
}

#[test]
fn a_gpt_with_a_vec_of_blocks_trains_as_dense_at_world_3() {
    gpt(3).check();
}

#[test]
fn a_gpt_with_a_vec_of_blocks_trains_as_dense_at_world_4() {
    gpt(4).check();
}

#[test]
fn a_gpt_with_a_vec_of_blocks_trains_as_dense_at_world_5() {
    gpt(5).check();
}

#[test]
fn a_gpt_trains_as_dense_without_gradient_checkpointing() {
    for world in 1..=5 {
        Parity {
            device: device_without_checkpointing(),
            ..gpt(world)
        }
        .check();
    }
}

#[test]
fn an_mlp_trains_as_dense_without_gradient_checkpointing() {
    Parity {
        device: device_without_checkpointing(),
        ..mlp(3)
    }
    .check();
}

#[test]
fn a_burn_transformer_encoder_trains_as_dense() {
    for (world, norm_first) in (1..=5).zip([true, false, true, true, false]) {
        Parity::new(
            world,
            move |d| EncoderNet::new(norm_first, d),
            |m, i| m.loss(i),
        )
        .check();
    }
}

#[test]
fn a_burn_transformer_encoder_trains_as_dense_without_gradient_checkpointing() {
    let base = Parity::new(
        3,
        |d| EncoderNet::new(true, d),
        |m: &EncoderNet, i| m.loss(i),
    );
    Parity {
        device: device_without_checkpointing(),
        ..base
    }
    .check();
}

#[test]
fn a_burn_transformer_decoder_trains_as_dense() {
    for world in 1..=5 {
        Parity::new(world, DecoderNet::new, |m, i| m.loss(i)).check();
    }
}

#[test]
fn a_llama_block_with_rms_norm_swiglu_and_rope_trains_as_dense() {
    for world in 1..=5 {
        Parity::new(world, Llama::new, |m, i| m.loss(i)).check();
    }
}

#[test]
fn an_lstm_and_a_gru_train_as_dense() {
    for world in 1..=5 {
        Parity::new(world, Recurrent::new, |m, i| m.loss(i)).check();
    }
}

#[test]
fn an_lstm_and_a_gru_train_as_dense_without_gradient_checkpointing() {
    let base = Parity::new(2, Recurrent::new, |m: &Recurrent, i| m.loss(i));
    Parity {
        device: device_without_checkpointing(),
        ..base
    }
    .check();
}

#[test]
fn convolutions_with_batch_and_group_norm_train_as_dense_on_the_same_data() {
    for world in 1..=5 {
        for device in [burn_fsdp_tests::device(), device_without_checkpointing()] {
            // Not Adam: a bias before a normalisation has no gradient but noise, which Adam makes as large as
            // any, and which depends on how the mean over ranks is rounded.
            let base = Parity::new(world, ConvNet::new, |m: &ConvNet, i| m.loss(i));
            Parity {
                device,
                same_data: true,
                batch: 4,
                optimizer: || SgdConfig::new().init(),
                lr: 0.05,
                ..base
            }
            .check();
        }
    }
}

#[test]
fn a_decoder_and_a_llama_block_train_as_dense_without_gradient_checkpointing() {
    for world in [2, 3] {
        let decoder = Parity::new(world, DecoderNet::new, |m, i| m.loss(i));
        Parity {
            device: device_without_checkpointing(),
            ..decoder
        }
        .check();
        let llama = Parity::new(world, Llama::new, |m, i| m.loss(i));
        Parity {
            device: device_without_checkpointing(),
            ..llama
        }
        .check();
    }
}

#[test]
fn an_embedding_tied_to_the_head_trains_as_dense() {
    for world in 1..=5 {
        let base = Parity::new(world, Tied::new, |m: &Tied, i| m.loss(i));
        let tie = |mut model: Tied| {
            model.head = model.emb.weight.clone();
            model
        };
        Parity {
            after_dense_step: tie,
            ..base
        }
        .check();
    }
}

#[test]
fn frozen_parameters_stay_frozen_and_the_rest_trains_as_dense() {
    for world in 1..=5 {
        let init = |d: &burn::prelude::Device| {
            let mut model = Stack::new(3, 5, d);
            model.inp = model.inp.no_grad();
            model.layers[1] = model.layers[1].clone().no_grad();
            model.layers[2].fc.bias = model.layers[2]
                .fc
                .bias
                .take()
                .map(|b| b.set_require_grad(false));
            model
        };
        let parity = Parity::new(world, init, |m: &Stack, i| m.loss(i));
        parity.check();
        let dense = parity.dense();
        for path in [
            "inp.weight",
            "layers.1.fc.weight",
            "layers.1.norm.gamma",
            "layers.2.fc.bias",
        ] {
            assert!(
                !dense.grads.contains_key(path),
                "{path} is frozen in the oracle"
            );
            assert_eq!(
                parity.sharded().unwrap()[0].params[path],
                dense.start[path],
                "{path}"
            );
        }
    }
}

#[test]
fn a_wholly_frozen_unit_without_gradient_checkpointing_trains_as_dense() {
    let init = |d: &burn::prelude::Device| {
        let mut model = Stack::new(2, 5, d);
        model.layers[0] = model.layers[0].clone().no_grad();
        model
    };
    let base = Parity::new(2, init, |m: &Stack, i| m.loss(i));
    Parity {
        device: device_without_checkpointing(),
        ..base
    }
    .check();
}

#[test]
fn a_parameter_unused_on_every_rank_stays_as_the_dense_optimizer_leaves_it() {
    for world in 1..=5 {
        let parity = Parity::new(world, Branches::new, |m: &Branches, i| m.loss(i, false));
        parity.check();
        let run = &parity.sharded().unwrap()[0];
        for path in [
            "never.weight",
            "never.bias",
            "sometimes.0.weight",
            "sometimes.1.bias",
        ] {
            assert_eq!(
                run.params[path], run.start[path],
                "{path} must not move, not even by weight decay"
            );
        }
    }
}

/// `sometimes` share the root unit, which every rank gathers whether it uses them or not.
fn branches(world: usize, uses: fn(&burn_fsdp_tests::Input) -> bool) -> Parity<Branches> {
    let base = Parity::new(
        world,
        Branches::new,
        move |m: &Branches, i: &burn_fsdp_tests::Input| m.loss(i, uses(i)),
    );
    let config = || FsdpConfig::new().with_units(UnitPolicy::Paths(vec!["always.*".into()]));
    Parity {
        rank_dependent: true,
        config: Box::new(config),
        ..base
    }
}

#[test]
fn a_parameter_unused_on_rank_0_only_gets_the_mean_with_zero_from_rank_0() {
    for world in 2..=5 {
        let parity = branches(world, |i| i.rank != Some(0));
        parity.check();
        assert!(parity.dense().grads.contains_key("sometimes.0.weight"));
    }
}

/// `sometimes.0` and `sometimes.1` are units of their own, which not every rank gathers.
fn branch_units(world: usize, uses: fn(&burn_fsdp_tests::Input) -> bool) -> Parity<Branches> {
    Parity {
        config: Box::new(FsdpConfig::new),
        ..branches(world, uses)
    }
}

#[test]
fn units_unused_on_rank_0_only_train_as_dense() {
    for world in 1..=5 {
        branch_units(world, |i| i.rank != Some(0)).check();
    }
}

#[test]
fn units_used_on_changing_ranks_from_step_to_step_train_as_dense() {
    for device in [burn_fsdp_tests::device(), device_without_checkpointing()] {
        Parity {
            device,
            ..branch_units(3, |i| i.rank == Some(i.step % 3))
        }
        .check();
    }
}

#[test]
fn units_used_on_some_ranks_of_a_hybrid_mesh_train_as_dense() {
    Parity {
        hybrid: Some((2, 2)),
        ..branch_units(4, |i| i.rank != Some(0))
    }
    .check();
    Parity {
        hybrid: Some((2, 2)),
        ..branch_units(4, |i| i.rank == Some(3))
    }
    .check();
}

#[test]
fn a_parameter_used_on_rank_0_only_gets_its_share() {
    branches(3, |i| i.rank == Some(0)).check();
}

#[test]
fn a_parameter_used_on_changing_ranks_from_step_to_step_trains_as_dense() {
    branches(3, |i| i.rank == Some(i.step % 3)).check();
}

#[test]
fn a_parameter_used_on_changing_ranks_trains_as_dense_without_gradient_checkpointing() {
    Parity {
        device: device_without_checkpointing(),
        ..branches(3, |i| i.rank == Some(i.step % 3))
    }
    .check();
}

#[test]
fn a_parameter_used_in_every_other_step_trains_as_dense() {
    branches(2, |i| i.step % 2 == 0).check();
}

#[test]
fn sgd_with_momentum_trains_as_dense() {
    for world in 1..=5 {
        Parity {
            optimizer: || {
                SgdConfig::new()
                    .with_momentum(Some(MomentumConfig::new()))
                    .init()
            },
            lr: 0.02,
            ..stack(world)
        }
        .check();
    }
}

#[test]
fn plain_sgd_trains_as_dense() {
    Parity {
        optimizer: || SgdConfig::new().init(),
        lr: 0.1,
        ..mlp(3)
    }
    .check();
}

#[test]
fn adamw_with_weight_decay_and_amsgrad_trains_as_dense() {
    let optimizer = || {
        AdamWConfig::new()
            .with_weight_decay(0.1)
            .with_amsgrad(true)
            .init()
    };
    Parity {
        optimizer,
        ..stack(3)
    }
    .check();
}

#[test]
fn lion_trains_as_dense() {
    for world in 1..=5 {
        Parity {
            optimizer: || LionConfig::new().init(),
            lr: 1e-3,
            ..mlp(world)
        }
        .check();
    }
}

#[test]
fn adan_trains_as_dense() {
    for world in 1..=5 {
        Parity {
            optimizer: || AdanConfig::new().init(),
            ..mlp(world)
        }
        .check();
    }
}

#[test]
fn rms_prop_trains_as_dense() {
    for world in 1..=5 {
        Parity {
            optimizer: || RmsPropConfig::new().init(),
            lr: 1e-3,
            ..mlp(world)
        }
        .check();
    }
}

#[test]
fn two_parameter_groups_train_as_dense() {
    let optimizer = || {
        AdamWConfig::new().init().with_group(
            ParamGroup::from_predicate("layers"),
            SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new()))
                .build(),
            None,
        )
    };
    Parity {
        optimizer,
        ..stack(2)
    }
    .check();
}

#[test]
fn parameters_sharded_on_dim_1_train_as_dense() {
    for world in 1..=5 {
        let base = stack(world);
        Parity {
            config: Box::new(|| {
                FsdpConfig::new()
                    .with_placement(|p| (p.shape.len() == 2).then_some(Placement::Shard(1)))
            }),
            placement: |_, shape| Some(usize::from(shape.len() == 2)),
            ..base
        }
        .check();
    }
}

#[test]
fn parameters_kept_whole_by_the_placement_train_as_dense() {
    Parity {
        config: Box::new(|| {
            FsdpConfig::new()
                .with_placement(|p| (p.shape.len() == 1).then_some(Placement::Replicate))
        }),
        placement: |_, shape| (shape.len() == 2).then_some(0),
        ..stack(3)
    }
    .check();
}

#[test]
fn small_parameters_replicated_by_size_train_as_dense() {
    Parity {
        config: Box::new(|| FsdpConfig::new().with_replicate_below(16)),
        placement: |_, shape| (shape.iter().product::<usize>() >= 16).then_some(0),
        ..stack(3)
    }
    .check();
}

#[test]
fn every_parameter_replicated_trains_as_dense() {
    Parity {
        config: Box::new(|| FsdpConfig::new().with_replicate_below(usize::MAX)),
        placement: |_, _| None,
        ..mlp(3)
    }
    .check();
}

#[test]
fn ignored_parameters_are_not_reduced_and_equal_dense_when_all_ranks_see_the_same_data() {
    // An ignored gradient is the rank's own; with the same data everywhere it is the dense one.
    Parity {
        config: Box::new(|| FsdpConfig::new().with_ignored(["layers.*.norm.*"])),
        placement: |path, _| (!path.contains("norm")).then_some(0),
        same_data: true,
        ..stack(2)
    }
    .check();
}

#[test]
fn units_named_by_paths_types_or_a_function_train_as_dense() {
    let policies: [fn() -> UnitPolicy; 4] = [
        || UnitPolicy::Paths(vec!["layers.*".into(), "out".into()]),
        || UnitPolicy::Types(vec!["Layer".into()]),
        || UnitPolicy::Types(vec!["Linear".into()]),
        || UnitPolicy::function(|node| node.path.ends_with("fc")),
    ];
    for policy in policies {
        let base = stack(2);
        Parity {
            config: Box::new(move || FsdpConfig::new().with_units(policy())),
            steps: 4,
            ..base
        }
        .check();
    }
}

#[test]
fn every_reshard_after_forward_setting_trains_as_dense() {
    for reshard in [
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
    ] {
        for device in [burn_fsdp_tests::device(), device_without_checkpointing()] {
            let base = stack(3);
            let config = move || FsdpConfig::new().with_reshard_after_forward(reshard);
            Parity {
                config: Box::new(config),
                device,
                steps: 5,
                ..base
            }
            .check();
        }
    }
}

#[test]
fn resharding_to_groups_of_two_trains_as_dense_at_world_4() {
    let base = gpt(4);
    let config = || FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(2));
    Parity {
        config: Box::new(config),
        ..base
    }
    .check();
}

#[test]
fn resharding_to_groups_of_one_or_of_all_trains_as_dense() {
    for k in [1, 4] {
        let base = stack(4);
        let config =
            move || FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Groups(k));
        Parity {
            config: Box::new(config),
            steps: 5,
            ..base
        }
        .check();
    }
}

#[test]
fn prefetch_on_or_off_trains_as_dense() {
    for prefetch in [true, false] {
        let base = gpt(2);
        let config = move || FsdpConfig::new().with_prefetch(prefetch);
        Parity {
            config: Box::new(config),
            steps: 8,
            ..base
        }
        .check();
    }
}

#[test]
fn shards_offloaded_to_the_cpu_train_as_dense() {
    for world in 1..=5 {
        let base = gpt(world);
        let config = || FsdpConfig::new().with_offload(OffloadPolicy::Cpu);
        Parity {
            config: Box::new(config),
            steps: 8,
            ..base
        }
        .check();
    }
}

#[test]
fn an_mlp_with_its_shards_on_the_cpu_trains_as_dense() {
    for device in [device(), device_without_checkpointing()] {
        Parity {
            device,
            config: Box::new(|| FsdpConfig::new().with_offload(OffloadPolicy::Cpu)),
            ..mlp(2)
        }
        .check();
    }
}

#[test]
fn a_hybrid_mesh_of_2_by_2_trains_as_dense() {
    Parity {
        hybrid: Some((2, 2)),
        ..gpt(4)
    }
    .check();
}

#[test]
fn a_hybrid_mesh_of_1_by_2_trains_as_dense() {
    Parity {
        hybrid: Some((1, 2)),
        ..stack(2)
    }
    .check();
}

#[test]
fn a_hybrid_mesh_of_2_by_1_trains_as_dense() {
    Parity {
        hybrid: Some((2, 1)),
        ..stack(2)
    }
    .check();
}

#[test]
fn a_hybrid_mesh_with_an_unused_and_a_half_used_parameter_trains_as_dense() {
    Parity {
        hybrid: Some((2, 2)),
        ..branches(4, |i| i.rank != Some(0))
    }
    .check();
    Parity {
        hybrid: Some((2, 2)),
        ..branches(4, |i| i.rank == Some(3))
    }
    .check();
}
