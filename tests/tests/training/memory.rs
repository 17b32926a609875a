use burn::module::Module;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, Event, FsdpConfig, FullyShard, LaunchConfig, Placement, ReshardAfterForward,
    UnitConfig, UnitPolicy,
};
use burn_fsdp_tests::models::Stack;
use burn_fsdp_tests::{Values, dense, device, device_without_checkpointing, local_values, ranks};

use crate::{UNITS, mine, sharded, stack};

const BLOCKS: usize = 12;

fn deep(device: &Device) -> Stack {
    Stack::new(BLOCKS, 8, device)
}

/// Bytes of f32 parameters whose path begins so.
fn gathered_bytes(values: &Values, prefix: &str) -> u64 {
    let of = values.iter().filter(|(path, _)| match prefix {
        "" => !path.starts_with("layers."),
        prefix => path.starts_with(&format!("{prefix}.")),
    });
    of.map(|(_, (_, numbers))| 4 * numbers.len() as u64).sum()
}

fn on(device: &Device, pg: &burn_fsdp::ProcessGroup) -> burn_fsdp_tests::Input {
    burn_fsdp_tests::Input::new(0, pg.rank() * 2..pg.rank() * 2 + 2, device)
}

/// Bytes of the one-dimensional parameters of all units. The graph may hold these until backward is done.
fn vector_bytes(values: &Values) -> u64 {
    let vectors = values
        .iter()
        .filter(|(path, (shape, _))| path.starts_with("layers.") && shape.len() == 1);
    vectors
        .map(|(_, (_, numbers))| 4 * numbers.len() as u64)
        .sum()
}

fn names(events: &[Event], pick: fn(&Event) -> Option<String>) -> Vec<String> {
    events.iter().filter_map(pick).collect()
}

fn unshards(event: &Event) -> Option<String> {
    match event {
        Event::Unshard { unit, .. } => Some(unit.to_string()),
        _ => None,
    }
}

fn reduces(event: &Event) -> Option<String> {
    match event {
        Event::Reduce { unit, .. } => Some(unit.to_string()),
        _ => None,
    }
}

#[test]
fn twelve_blocks_never_have_more_than_two_units_and_the_root_unsharded() {
    let values = local_values(&dense(deep, &device()));
    for world in [2, 3] {
        let (unit, root) = (
            gathered_bytes(&values, "layers.0"),
            gathered_bytes(&values, ""),
        );
        let vectors = vector_bytes(&values);
        ranks(world, |pg| {
            let mut model =
                deep(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let mut optim = burn::optim::AdamWConfig::new().init();
            for step in 0..3 {
                model.reset_peak_memory();
                let grads = model.backward(model.loss(&mine(&pg, step)));
                let peak = model.memory().peak_unsharded_bytes as u64;
                assert!(
                    peak <= 2 * unit + root + vectors,
                    "step {step}: peak {peak}, unit {unit}, root {root}"
                );
                assert!(
                    peak >= unit + root.min(unit),
                    "step {step}: the count counts nothing: {peak}"
                );
                model = model.step(&mut optim, 1e-3, grads)?;
                model.reshard();
                assert_eq!(
                    model.memory().live_unsharded_bytes,
                    0,
                    "step {step}: all is sharded again"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

/// A residual stack of matrices only: nothing that the graph may hold.
#[derive(Module, Debug)]
struct Matrices {
    inp: burn::nn::Linear,
    layers: Vec<burn::nn::Linear>,
}

#[test]
fn twelve_blocks_of_matrices_keep_strictly_to_two_units_and_the_root() {
    let linear = |i, o, d: &Device| burn::nn::LinearConfig::new(i, o).with_bias(false).init(d);
    let init = |d: &Device| Matrices {
        inp: linear(3, 8, d),
        layers: (0..BLOCKS).map(|_| linear(8, 8, d)).collect(),
    };
    let (unit, root) = (8 * 8 * 4, 3 * 8 * 4);
    for device in [device(), device_without_checkpointing()] {
        for (prefetch, units) in [(true, 2), (false, 1)] {
            ranks(2, |pg| {
                let config = FsdpConfig::new().with_prefetch(prefetch);
                let model = init(&device).fully_shard(&DeviceMesh::shard(&pg), &config)?;
                for step in 0..3 {
                    model.reset_peak_memory();
                    let m: &Matrices = &model;
                    let mut x = m.inp.forward(on(&device, &pg).floats::<2>(1, &[3]));
                    for layer in &m.layers {
                        x = x.clone() + layer.forward(x).tanh();
                    }
                    drop(model.backward(x.square().mean()));
                    let peak = model.memory().peak_unsharded_bytes;
                    assert!(
                        peak <= units * unit + root,
                        "prefetch {prefetch} step {step}: peak {peak}"
                    );
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn without_prefetch_one_unit_and_the_root_are_unsharded() {
    let values = local_values(&dense(deep, &device()));
    let (unit, root) = (
        gathered_bytes(&values, "layers.0"),
        gathered_bytes(&values, ""),
    );
    let vectors = vector_bytes(&values);
    ranks(2, |pg| {
        let config = FsdpConfig::new().with_prefetch(false);
        let model = deep(&device()).fully_shard(&DeviceMesh::shard(&pg), &config)?;
        for step in 0..3 {
            model.reset_peak_memory();
            drop(model.backward(model.loss(&mine(&pg, step))));
            let peak = model.memory().peak_unsharded_bytes as u64;
            assert!(
                peak <= unit + root + vectors,
                "step {step}: peak {peak}, unit {unit}, root {root}"
            );
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn never_resharding_keeps_all_units_which_the_count_shows() {
    for device in [device(), device_without_checkpointing()] {
        let values = local_values(&dense(deep, &device));
        let all: u64 = (0..BLOCKS)
            .map(|i| gathered_bytes(&values, &format!("layers.{i}")))
            .sum::<u64>()
            + gathered_bytes(&values, "");
        ranks(2, |pg| {
            let config = FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Never);
            let model = deep(&device).fully_shard(&DeviceMesh::shard(&pg), &config)?;
            let loss = model.loss(&on(&device, &pg));
            assert_eq!(model.memory().live_unsharded_bytes as u64, all);
            drop(model.backward(loss));
            assert_eq!(model.memory().peak_unsharded_bytes as u64, all);
            assert_eq!(
                model.collectives().all_gathers,
                BLOCKS + 1,
                "no gather in backward"
            );
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn always_resharding_gathers_in_backward_again() {
    for device in [device(), device_without_checkpointing()] {
        ranks(2, |pg| {
            let model = deep(&device).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let loss = model.loss(&on(&device, &pg));
            let forward = model.collectives().all_gathers;
            assert_eq!(forward, BLOCKS + 1);
            drop(model.backward(loss));
            // The last block may still be there when its backward begins.
            let backward = model.collectives().all_gathers - forward;
            assert!(
                (BLOCKS - 1..=BLOCKS).contains(&backward),
                "{backward} gathers in backward"
            );
            assert_eq!(model.collectives().reduce_scatters, BLOCKS + 1);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn one_unit_may_keep_its_parameters_while_the_others_reshard() {
    for device in [device(), device_without_checkpointing()] {
        let gathers = |config: FsdpConfig| {
            let got = ranks(2, |pg| {
                let model = deep(&device).fully_shard(&DeviceMesh::shard(&pg), &config)?;
                drop(model.backward(model.loss(&on(&device, &pg))));
                Ok(model.collectives().all_gathers)
            });
            got.unwrap()[0]
        };
        let unit = UnitConfig::new().with_reshard_after_forward(ReshardAfterForward::Never);
        let all = gathers(FsdpConfig::new());
        assert_eq!(
            gathers(FsdpConfig::new().with_unit("layers.0", unit)),
            all - 1
        );
        assert_eq!(
            gathers(FsdpConfig::new().with_unit("layers.*", unit)),
            BLOCKS + 1
        );
    }
}

#[test]
fn shards_take_one_part_in_w_of_the_parameters() {
    for world in [1, 2, 4] {
        let values = local_values(&dense(deep, &device()));
        let bytes: u64 = values
            .values()
            .map(|(shape, _)| {
                4 * (shape[0].div_ceil(world) * shape[1..].iter().product::<usize>()) as u64
            })
            .sum();
        let whole: u64 = values.values().map(|(_, v)| 4 * v.len() as u64).sum();
        ranks(world, |pg| {
            let model = deep(&device()).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            let got = model.memory().shard_bytes as u64;
            assert_eq!(got, bytes);
            assert!(
                (got as f64) < 1.02 * whole as f64 / world as f64 + 64.0,
                "{got} of {whole} over {world}"
            );
            let held: u64 = local_values(&model)
                .values()
                .map(|(_, v)| 4 * v.len() as u64)
                .sum();
            assert_eq!(held, bytes, "and a visitor sees no more");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn reductions_run_in_exactly_the_reverse_order_of_use() {
    for device in [device(), device_without_checkpointing()] {
        for prefetch in [true, false] {
            ranks(2, |pg| {
                let config = FsdpConfig::new().with_prefetch(prefetch);
                let model = deep(&device).fully_shard(&DeviceMesh::shard(&pg), &config)?;
                let x = || burn_fsdp_tests::Input::new(0, 0..2, &device);
                for step in 0..3 {
                    model.record_events(true);
                    let loss = model.loss(&x());
                    let mut forward = names(&model.take_events(), unshards);
                    drop(model.backward(loss));
                    let reduced = names(&model.take_events(), reduces);
                    let mut want: Vec<String> =
                        (0..BLOCKS).map(|i| format!("layers.{i}")).collect();
                    want.insert(0, String::new());
                    // Prefetch may gather ahead, never out of the order of use.
                    assert_eq!(forward, want, "step {step}: forward");
                    forward.reverse();
                    assert_eq!(reduced, forward, "step {step}: backward");
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn a_unit_reduces_before_the_one_before_the_next_is_gathered() {
    for device in [device(), device_without_checkpointing()] {
        ranks(2, |pg| {
            let model = deep(&device).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
            drop(model.backward(model.loss(&on(&device, &pg))));
            model.record_events(true);
            let loss = model.loss(&on(&device, &pg));
            drop(model.take_events());
            drop(model.backward(loss));
            let events = model.take_events();
            let at = |want: &str, pick: fn(&Event) -> Option<String>| {
                events.iter().position(|e| pick(e).as_deref() == Some(want))
            };
            for i in (2..BLOCKS).rev() {
                let reduced = at(&format!("layers.{i}"), reduces).expect("reduced");
                let gathered = at(&format!("layers.{}", i - 2), unshards).expect("gathered again");
                assert!(
                    reduced < gathered,
                    "layers.{i} must be reduced before layers.{} is gathered",
                    i - 2
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_burn_encoder_reduces_its_layers_in_reverse() {
    ranks(2, |pg| {
        let encoder = TransformerEncoderConfig::new(6, 7, 2, 4)
            .with_dropout(0.0)
            .init(&device());
        let model = encoder.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        model.record_events(true);
        let x = mine(&pg, 0).floats(1, &[5, 6]);
        let grads = model.backward(
            model
                .forward(TransformerEncoderInput::new(x))
                .square()
                .mean(),
        );
        let reduced = names(&model.take_events(), reduces);
        assert_eq!(reduced, ["layers.3", "layers.2", "layers.1", "layers.0"]);
        assert!(!grads.is_empty());
        Ok(())
    })
    .unwrap();
}

#[test]
fn evaluation_before_and_between_steps_returns_to_sharded_memory() {
    ranks(2, |pg| {
        let mut model = sharded(&pg, &FsdpConfig::new())?;
        let mut optim = burn::optim::AdamWConfig::new().init();
        let host = Device::flex();
        for step in 0..3 {
            let valid = model.valid();
            let y = valid.forward(burn_fsdp_tests::Input::new(0, 0..2, &host).floats(1, &[3]));
            assert!(y.into_scalar_sum().is_finite());
            valid.reshard();
            assert_eq!(valid.memory().live_unsharded_bytes, 0, "step {step}");
            let grads = model.backward(model.loss(&mine(&pg, step)));
            model = model.step(&mut optim, 1e-3, grads)?;
            model.reshard();
            assert_eq!(model.memory().live_unsharded_bytes, 0, "step {step}");
        }
        Ok(())
    })
    .unwrap();
}

trait SumScalar {
    fn into_scalar_sum(self) -> f32;
}

impl<const D: usize> SumScalar for Tensor<D> {
    fn into_scalar_sum(self) -> f32 {
        self.sum().into_scalar::<f32>()
    }
}

#[test]
fn explicit_unshard_gathers_and_reshard_frees() {
    let values = local_values(&dense(stack, &device()));
    let unit = gathered_bytes(&values, "layers.1");
    ranks(2, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        assert_eq!(model.memory().live_unsharded_bytes, 0);
        model.unshard("layers.1")?;
        assert_eq!(model.memory().live_unsharded_bytes as u64, unit);
        assert_eq!(model.collectives().all_gathers, 1);
        model.unshard("")?; // The root, which a forward gathers before all else.
        drop(model.layers[1].fc.weight.val());
        assert_eq!(
            model.collectives().all_gathers,
            2,
            "both were there already"
        );
        model.reshard();
        assert_eq!(model.memory().live_unsharded_bytes, 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_unit_of_many_tiny_parameters_is_one_collective() {
    use burn::module::Param;
    #[derive(Module, Debug)]
    struct Rows {
        rows: Vec<Param<Tensor<1>>>,
    }
    #[derive(Module, Debug)]
    struct Many {
        group: Rows,
    }
    ranks(4, |pg| {
        let param = |_| Param::from_tensor(Tensor::<1>::ones([3], &device()));
        let many = Many {
            group: Rows {
                rows: (0..500).map(param).collect(),
            },
        };
        let config = FsdpConfig::new().with_units(UnitPolicy::Types(vec!["Rows".into()]));
        let model = many.fully_shard(&DeviceMesh::shard(&pg), &config)?;
        let squares = model.group.rows.iter().map(|p| p.val().square().sum());
        let grads = model.backward(Tensor::cat(squares.collect(), 0).sum());
        assert_eq!(grads.len(), 500);
        let counts = model.collectives();
        assert_eq!(counts.reduce_scatters, 1);
        assert!(counts.all_gathers <= 2, "{}", counts.all_gathers);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_plan_tells_units_placements_and_prints_a_table() {
    ranks(2, |pg| {
        let config = FsdpConfig::new()
            .with_placement(|p| (p.path == "inp.weight").then_some(Placement::Shard(1)));
        let model = sharded(&pg, &config)?;
        let table = model.plan().to_string();
        for name in ["inp.weight", "layers.0", "layers.2", "fc.weight"] {
            assert!(table.contains(name), "{name} is missing in\n{table}");
        }
        let shown = format!("{model}");
        assert!(shown.contains("layers"), "{shown}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn more_threads_than_cores_change_nothing() {
    let run = |threads| {
        let _random = burn_fsdp_tests::lock_random();
        device().seed(burn_fsdp_tests::SEED);
        LaunchConfig::new(2)
            .with_threads_per_rank(threads)
            .launch(|pg| {
                let model = sharded(&pg, &FsdpConfig::new())?;
                let grads = model.backward(model.loss(&mine(&pg, 0)));
                Ok(burn_fsdp_tests::gradients_of(&model, &grads))
            })
            .unwrap()
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn a_step_makes_one_reduce_scatter_a_unit_and_no_all_reduce() {
    ranks(3, |pg| {
        let model = sharded(&pg, &FsdpConfig::new())?;
        drop(model.backward(model.loss(&mine(&pg, 0))));
        assert_eq!(model.collectives().reduce_scatters, UNITS);
        assert_eq!(model.collectives().all_reduces, 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_unit_that_followed_before_is_gathered_ahead() {
    for (prefetch, gathered) in [(true, 3), (false, 2)] {
        for all_gathers in ranks(2, |pg| {
            let config = FsdpConfig::new().with_prefetch(prefetch);
            let model = sharded(&pg, &config)?;
            let grads = model.backward(model.loss(&mine(&pg, 0)));
            drop(grads);
            let before = model.collectives().all_gathers;
            // The root, the first layer, and the second ahead of its use.
            drop(model.layers[0].fc.weight.val());
            Ok(model.collectives().all_gathers - before)
        })
        .unwrap()
        {
            assert_eq!(all_gathers, gathered, "prefetch: {prefetch}");
        }
    }
}
