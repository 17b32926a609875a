use burn::module::Module;
use burn::nn::{LinearConfig, LinearLayout};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpError, FsdpModule, FullyShard, LoadMode, Placement, StateDict,
    StateDictTarget,
};
use burn_fsdp_tests::models::{ConvNet, Stack, Tied};
use burn_fsdp_tests::{
    Input, Values, assert_names, dense, device, full_message, local_values, ranks, state_values,
};

use crate::{mine, sharded, stack};

fn tensor(shape: &[usize], from: f32) -> TensorData {
    let n: usize = shape.iter().product();
    TensorData::new(
        (0..n).map(|i| from + i as f32).collect::<Vec<_>>(),
        shape.to_vec(),
    )
}

/// A state dict of recognisable numbers for every name of the stack.
fn numbered(names: &Values) -> StateDict {
    let mut state = StateDict::new();
    for (i, (path, (shape, _))) in names.iter().enumerate() {
        state.insert(path.clone(), tensor(shape, 1000.0 * i as f32));
    }
    state
}

#[test]
fn the_full_state_dict_goes_to_rank_0_or_to_all() {
    let want = local_values(&dense(stack, &device()));
    for world in [1, 2, 3, 5] {
        let got = ranks(world, |pg| {
            let model = sharded(&pg, &FsdpConfig::new())?;
            let zero = model.full_state_dict(StateDictTarget::RankZero)?;
            let all = model.full_state_dict(StateDictTarget::AllRanks)?;
            Ok((state_values(&zero), state_values(&all)))
        })
        .unwrap();
        for (rank, (zero, all)) in got.iter().enumerate() {
            assert_eq!(all, &want, "world {world} rank {rank}");
            assert_eq!(
                zero,
                if rank == 0 { &want } else { all_empty() },
                "world {world} rank {rank}"
            );
        }
    }
}

fn all_empty() -> &'static Values {
    static EMPTY: Values = Values::new();
    &EMPTY
}

#[test]
fn the_full_state_dict_holds_each_placement_whole() {
    let want = local_values(&dense(stack, &device()));
    let configs: [fn() -> FsdpConfig; 3] = [
        || {
            FsdpConfig::new()
                .with_placement(|p| (p.shape.len() == 2).then_some(Placement::Shard(1)))
        },
        || FsdpConfig::new().with_replicate_below(16),
        || FsdpConfig::new().with_ignored(["layers.0.norm.*"]),
    ];
    for config in configs {
        let got = ranks(3, |pg| {
            let model = sharded(&pg, &config())?;
            Ok(state_values(
                &model.full_state_dict(StateDictTarget::AllRanks)?,
            ))
        })
        .unwrap();
        assert!(got.iter().all(|g| g == &want));
    }
}

#[test]
fn a_hybrid_meshs_full_state_dict_holds_each_parameter_once() {
    let want = local_values(&dense(stack, &device()));
    let got = ranks(4, |pg| {
        let model =
            stack(&device()).fully_shard(&DeviceMesh::hybrid(&pg, 2, 2)?, &FsdpConfig::new())?;
        Ok(state_values(
            &model.full_state_dict(StateDictTarget::RankZero)?,
        ))
    })
    .unwrap();
    assert_eq!(got[0], want);
    assert!(got[1..].iter().all(Values::is_empty));
}

#[test]
fn a_full_state_dict_loads_from_rank_0_bit_for_bit() {
    let names = local_values(&dense(stack, &device()));
    for world in [1, 2, 3] {
        ranks(world, |pg| {
            let config = FsdpConfig::new().with_replicate_below(6);
            let model = sharded(&pg, &config)?;
            let state = if pg.rank() == 0 {
                numbered(&names)
            } else {
                StateDict::new()
            };
            let (model, report) = model.load_full_state_dict(state, LoadMode::Strict)?;
            assert!(
                report.missing.is_empty() && report.unexpected.is_empty(),
                "{report:?}"
            );
            let got = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
            assert_eq!(got, state_values(&numbered(&names)));
            // The loaded weights are those the next forward gathers, and they train.
            let seen = model.layers[1]
                .fc
                .weight
                .val()
                .try_into_vec_as::<f32>()
                .unwrap();
            assert_eq!(seen, got["layers.1.fc.weight"].1);
            assert!(!model.backward(model.loss(&mine(&pg, 0))).is_empty());
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn running_statistics_travel_in_the_state_dict() {
    ranks(2, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        let model = ConvNet::new(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let mut state = model.full_state_dict(StateDictTarget::AllRanks)?;
        assert!(state_values(&state).contains_key("batch_norm.running_var"));
        if pg.rank() != 0 {
            state = StateDict::new();
        } else {
            state.insert("batch_norm.running_var".to_string(), tensor(&[3], 5.0));
        }
        let (model, _) = model.load_full_state_dict(state, LoadMode::Strict)?;
        assert_eq!(
            local_values(&model.valid())["batch_norm.running_var"].1,
            [5.0, 6.0, 7.0]
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_tied_parameter_stays_tied_after_a_load() {
    ranks(2, |pg| {
        let model =
            Tied::new(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let mut state = model.full_state_dict(StateDictTarget::AllRanks)?;
        for path in ["emb.weight", "head"] {
            if state_values(&state).contains_key(path) {
                state.insert(path.to_string(), tensor(&[7, 5], 0.0));
            }
        }
        let (model, _) = model.load_full_state_dict(state, LoadMode::Strict)?;
        let (emb, head) = (model.emb.weight.val(), model.head.val());
        let want: Vec<f32> = (0..35).map(|i| i as f32).collect();
        assert_eq!(emb.try_into_vec_as::<f32>().unwrap(), want);
        assert_eq!(head.try_into_vec_as::<f32>().unwrap(), want);
        let grads = model.backward(model.loss(&mine(&pg, 0)).mul_scalar(1e-3));
        assert_eq!(
            grads.len(),
            3,
            "one gradient for both paths, weight and bias of the middle"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_strict_load_lists_everything_missing_and_unexpected_on_all_ranks() {
    let names = local_values(&dense(stack, &device()));
    let texts = ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state = numbered(&names);
            state.remove("inp.weight");
            state.remove("layers.2.fc.bias");
            state.insert("layers.9.fc.weight".to_string(), tensor(&[1], 0.0));
        }
        let error = refusal(model, state);
        let FsdpError::StateDictMismatch(report) = &error else {
            panic!("{error:?}")
        };
        assert_eq!(report.missing, ["inp.weight", "layers.2.fc.bias"]);
        assert_eq!(report.unexpected, ["layers.9.fc.weight"]);
        Ok(full_message(&error))
    })
    .unwrap();
    for text in texts {
        assert_names(
            &text,
            &["inp.weight", "layers.2.fc.bias", "layers.9.fc.weight"],
        );
    }
}

/// The error of a strict load.
fn refusal(model: FsdpModule<Stack>, state: StateDict) -> FsdpError {
    let loaded = model.load_full_state_dict(state, LoadMode::Strict);
    loaded.map(|_| ()).unwrap_err()
}

#[test]
fn a_wrong_shape_is_refused_with_both_shapes() {
    let names = local_values(&dense(stack, &device()));
    let texts = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state = numbered(&names);
            state.insert("out.weight".to_string(), tensor(&[2, 5], 0.0));
        }
        Ok(full_message(&refusal(model, state)))
    })
    .unwrap();
    for text in texts {
        assert_names(&text, &["out.weight", "[5, 2]", "[2, 5]"]);
    }
}

#[test]
fn a_partial_load_reports_a_wrong_shape_and_leaves_that_parameter_alone() {
    let names = local_values(&dense(stack, &device()));
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state = numbered(&names);
            state.insert("out.weight".to_string(), tensor(&[2, 5], 0.0));
        }
        let (model, report) = model.load_full_state_dict(state, LoadMode::Partial)?;
        assert_eq!(report.loaded.len(), names.len() - 1);
        let [(name, expected, got)] = report.mismatched.as_slice() else {
            panic!("{report:?}")
        };
        assert_names(
            &format!("{name} {expected} {got}"),
            &["out.weight", "[5, 2]", "[2, 5]"],
        );
        let after = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        assert_eq!(after["out.weight"], names["out.weight"]);
        assert!(after["out.bias"] != names["out.bias"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_wrong_dtype_is_not_cast_silently() {
    let names = local_values(&dense(stack, &device()));
    let texts = ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state = numbered(&names);
            let half = tensor(&[5, 2], 0.0).convert_dtype(burn::tensor::DType::BF16);
            state.insert("out.weight".to_string(), half);
        }
        Ok(full_message(&refusal(model, state)))
    })
    .unwrap();
    for text in texts {
        assert_names(&text, &["out.weight", "BF16", "F32"]);
    }
}

#[test]
fn a_partial_load_takes_what_is_there_and_reports_the_rest() {
    let names = local_values(&dense(stack, &device()));
    ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        let before = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        let mut state = StateDict::new();
        if pg.rank() == 0 {
            state.insert(
                "inp.weight".to_string(),
                tensor(&names["inp.weight"].0, 7.0),
            );
            state.insert("nowhere".to_string(), tensor(&[2], 0.0));
        }
        let (model, report) = model.load_full_state_dict(state, LoadMode::Partial)?;
        assert_eq!(report.missing.len(), names.len() - 1);
        assert!(!report.missing.contains(&"inp.weight".to_string()));
        assert_eq!(report.unexpected, ["nowhere"]);
        let after = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
        for (path, value) in &before {
            if path == "inp.weight" {
                let want: Vec<f32> = (0..15).map(|i| 7.0 + i as f32).collect();
                assert_eq!(after[path].1, want);
            } else {
                assert_eq!(&after[path], value, "{path} is untouched");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_column_layout_linear_loads_what_it_saved() {
    let init = |d: &Device| {
        LinearConfig::new(5, 7)
            .with_layout(LinearLayout::Col)
            .init(d)
    };
    let model = dense(init, &device());
    let x = |d: &Device| Input::new(0, 0..3, d).floats::<2>(1, &[5]);
    let want = model
        .forward(x(&device()))
        .try_into_vec_as::<f32>()
        .unwrap();
    ranks(3, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        let model = init(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let state = model.full_state_dict(StateDictTarget::AllRanks)?;
        let zeroed = LinearConfig::new(5, 7)
            .with_layout(LinearLayout::Col)
            .with_initializer(burn::nn::Initializer::Zeros)
            .init(&device())
            .fully_shard(&mesh, &FsdpConfig::new())?;
        let (loaded, _) = zeroed.load_full_state_dict(state, LoadMode::Strict)?;
        let got = loaded
            .forward(x(&device()))
            .try_into_vec_as::<f32>()
            .unwrap();
        for (a, b) in want.iter().zip(&got) {
            assert!((a - b).abs() < 1e-6, "dense {a}, loaded {b}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_column_layout_linears_local_record_round_trips() {
    let init = |d: &Device| {
        LinearConfig::new(5, 7)
            .with_layout(LinearLayout::Col)
            .init(d)
    };
    ranks(2, |pg| {
        let mesh = DeviceMesh::shard(&pg);
        let model = init(&device()).fully_shard(&mesh, &FsdpConfig::new())?;
        let want = local_values(&model);
        let record = model.clone().into_record();
        let model = model.load_record(record);
        assert_eq!(local_values(&model), want);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_sharded_state_dict_holds_unpadded_parts_that_tile_the_whole() {
    let want = local_values(&dense(stack, &device()));
    let configs: [fn() -> FsdpConfig; 3] = [
        FsdpConfig::new,
        || {
            FsdpConfig::new()
                .with_placement(|p| (p.shape.len() == 2).then_some(Placement::Shard(1)))
        },
        || FsdpConfig::new().with_replicate_below(16),
    ];
    for config in configs {
        let parts = ranks(4, |pg| Ok(sharded(&pg, &config())?.sharded_state_dict())).unwrap();
        for (path, (shape, values)) in &want {
            let mut seen = vec![0u32; values.len()];
            for (rank, part) in parts.iter().enumerate() {
                let part = &part[path];
                assert_eq!(&part.spec.global_shape, shape, "{path}");
                if part.spec.placement == Placement::Replicate && rank > 0 {
                    continue;
                }
                let local = part.data.shape().to_vec();
                let numbers = part.data.try_to_vec_as::<f32>().unwrap();
                for (i, got) in numbers.iter().enumerate() {
                    let (mut at, mut rest, mut stride) = (0, i, 1);
                    for d in (0..shape.len()).rev() {
                        at += (part.spec.offsets[d] + rest % local[d]) * stride;
                        rest /= local[d];
                        stride *= shape[d];
                    }
                    assert_eq!(*got, values[at], "rank {rank} {path}[{at}]");
                    seen[at] += 1;
                }
            }
            assert!(
                seen.iter().all(|n| *n == 1),
                "{path}: every element once, {seen:?}"
            );
        }
    }
}

#[test]
fn the_sharded_state_dict_of_an_empty_shard_is_empty_and_keeps_the_other_dims() {
    let parts = ranks(5, |pg| {
        Ok(sharded(&pg, &FsdpConfig::new())?.sharded_state_dict())
    })
    .unwrap();
    // Three rows over five ranks.
    let rows: Vec<_> = parts
        .iter()
        .map(|p| p["inp.weight"].data.shape().to_vec())
        .collect();
    assert_eq!(rows, [[1, 5], [1, 5], [1, 5], [0, 5], [0, 5]]);
}

#[test]
fn into_dense_gives_every_rank_the_whole_model_back() {
    let want = dense(stack, &device());
    let input = Input::new(0, 0..2, &device());
    let loss = want.loss(&input).into_scalar::<f32>();
    let got = ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?.into_dense()?;
        Ok((
            local_values(&model),
            model.loss(&input).into_scalar::<f32>(),
        ))
    })
    .unwrap();
    for (values, got) in got {
        assert_eq!(values, local_values(&want));
        assert_eq!(got, loss);
    }
}

#[test]
fn a_matrix_that_is_recorded_transposed_is_described_as_it_is_in_memory() {
    let config = LinearConfig::new(5, 3).with_layout(LinearLayout::Col);
    let linear = || config.init(&device());
    let want = local_values(&dense(|_| linear(), &device()));
    for (rank, part) in ranks(2, |pg| {
        let model = linear().fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        Ok(model.sharded_state_dict())
    })
    .unwrap()
    .iter()
    .enumerate()
    {
        let weight = &part["weight"];
        assert_eq!(weight.spec.placement, Placement::Shard(0));
        assert_eq!(weight.spec.global_shape, [5, 3]);
        assert_eq!(weight.spec.offsets, [3 * rank, 0]);
        assert_eq!(weight.spec.owner, "Linear");
        let (_, values) = &want["weight"];
        let rows = 3 * rank..5.min(3 * rank + 3);
        let got = weight.data.try_to_vec_as::<f32>().unwrap();
        assert_eq!(got, values[rows.start * 3..rows.end * 3], "rank {rank}");
        let stored = weight.spec.to_stored(weight.data.clone());
        assert_eq!(stored.shape().to_vec(), [3, 3]);
        assert_eq!(weight.spec.to_local(stored), weight.data);
    }
}
