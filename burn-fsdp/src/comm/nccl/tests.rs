//! The engine on fake devices, against the engine for ranks that are threads.

#[cfg(feature = "cuda")]
mod gpu;

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::Param;
use burn::nn::Linear;
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::driver::{Collective, Driver, NcclOp, Stream};
use super::engine::NcclEngine;
use super::fake::{FakeCluster, FakeDriver};
use crate::comm::testing::launch_tcp;
use crate::comm::{Call, GatherInput, GatherWork, ProcessGroup, ReduceInput, ReduceWork};
use crate::memory::MemoryCounter;
use crate::placement::ShardLayout;
use crate::reduction::Reduction;
use crate::{
    DeviceMesh, FsdpConfig, FsdpError, FullyShard, GradientAverage, LaunchConfig, Placement,
    ReduceOp, Result,
};

const WORLDS: std::ops::RangeInclusive<usize> = 1..=4;
const SEEDS: std::ops::Range<u64> = 0..4;

/// Runs `f` on ranks that are threads with a fake device each, and fails if it breaks a rule.
fn on_fake<T: Send>(
    world_size: usize,
    seed: u64,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    let cluster = FakeCluster::new(world_size, seed);
    let results = on_cluster(&cluster, world_size, |group, _| f(group));
    cluster.assert_clean();
    results
}

fn on_cluster<T: Send>(
    cluster: &Arc<FakeCluster>,
    world_size: usize,
    f: impl Fn(ProcessGroup, Arc<FakeDriver>) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    let config = LaunchConfig::new(world_size)
        .with_threads_per_rank(1)
        .with_timeout(Duration::from_secs(60));
    on_config(&config, cluster, f)
}

fn on_config<T: Send>(
    config: &LaunchConfig,
    cluster: &Arc<FakeCluster>,
    f: impl Fn(ProcessGroup, Arc<FakeDriver>) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    config.launch(|group| {
        let driver = cluster.driver(group.rank());
        f(form(&group, &driver)?, driver)
    })
}

/// The group over fake devices.
fn form(group: &ProcessGroup, driver: &Arc<FakeDriver>) -> Result<ProcessGroup> {
    let engine = Arc::new(NcclEngine::form(group.engine(), Ok(driver.clone()))?);
    let (device, local_rank) = (group.device(), group.local_rank());
    Ok(ProcessGroup::new(engine, "fake", device, local_rank))
}

fn locally<T: Send>(
    world_size: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    LaunchConfig::new(world_size)
        .with_threads_per_rank(1)
        .launch(f)
}

/// Checks that `f` comes to the same on fake devices as on threads, whatever the order.
fn same_as_locally<T: Send + PartialEq + std::fmt::Debug>(
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) {
    for world_size in WORLDS {
        let expected = locally(world_size, &f).unwrap();
        for seed in SEEDS {
            let got = on_fake(world_size, seed, &f).unwrap();
            assert_eq!(got, expected, "{world_size} ranks, seed {seed}");
        }
    }
}

/// A tensor that differs from rank to rank and from salt to salt.
fn tensor(len: usize, dtype: DType, group: &ProcessGroup, salt: usize) -> Tensor<1> {
    let value = |i: usize| ((i * 37 + group.rank() * 101 + salt * 13) % 257) as f64 / 7.0 - 15.0;
    let values: Vec<f64> = (0..len).map(value).collect();
    let data = TensorData::new(values, [len]).convert_dtype(dtype);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

/// A tensor of small integers, sums of which every dtype holds.
fn integers(len: usize, dtype: DType, group: &ProcessGroup, salt: usize) -> Tensor<1> {
    let values: Vec<f64> = (0..len)
        .map(|i| ((i + group.rank() * 5 + salt) % 9) as f64 * 4.0)
        .collect();
    let data = TensorData::new(values, [len]).convert_dtype(dtype);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

/// The bits of a tensor and its dtype.
fn bits(tensor: &Tensor<1>) -> (DType, Vec<u8>) {
    (tensor.dtype(), tensor.to_data().bytes().to_vec())
}

fn all_bits(tensors: &[Tensor<1>]) -> Vec<(DType, Vec<u8>)> {
    tensors.iter().map(bits).collect()
}

fn gathered_bits(gather: Box<dyn GatherWork>) -> Result<Vec<(DType, Vec<u8>)>> {
    Ok(all_bits(&gather.wait()?.tensors))
}

/// Layouts as a unit has them: uneven, along several dims, and not split at all.
fn layouts(world_size: usize) -> Vec<ShardLayout> {
    let layout = |shape: &[usize], placement| ShardLayout::new(shape, placement, world_size);
    vec![
        layout(&[5, 3], Placement::Shard(0)),
        layout(&[7], Placement::Replicate),
        layout(&[2, 9, 2], Placement::Shard(1)),
        layout(&[1, 4], Placement::Shard(0)),
    ]
}

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::BF16, DType::F16];

fn gather_inputs(group: &ProcessGroup, salt: usize) -> Vec<GatherInput> {
    let input = |(i, (layout, dtype)): (usize, (ShardLayout, DType))| {
        // What is whole is the same everywhere.
        let salt = salt + i;
        let shard = match layout.is_whole() && group.world_size() > 1 {
            true => Tensor::from_data(
                TensorData::from(&*vec![salt as f32 + 0.3; layout.shard_len()]),
                &Device::flex(),
            ),
            false => tensor(layout.shard_len(), DType::F32, group, salt),
        };
        GatherInput {
            layout,
            shard,
            dtype,
        }
    };
    let layouts = layouts(group.world_size()).into_iter();
    layouts.zip(DTYPES).enumerate().map(input).collect()
}

fn start_gather(
    group: &ProcessGroup,
    salt: usize,
    memory: &Arc<MemoryCounter>,
) -> Result<Box<dyn GatherWork>> {
    let inputs = gather_inputs(group, salt);
    let call = Call::gather(format!("unit {salt}"), &inputs);
    group.engine().all_gather(call, None, inputs, memory)
}

fn reduce_inputs(group: &ProcessGroup, reduce_dtype: Option<DType>) -> Vec<ReduceInput> {
    let input = |(i, (layout, dtype)): (usize, (ShardLayout, DType))| {
        let reduce_dtype = reduce_dtype.unwrap_or(dtype);
        let contribution = match reduce_dtype {
            DType::F32 => tensor(layout.full_len(), DType::F32, group, i),
            _ => integers(layout.full_len(), DType::F32, group, i),
        };
        ReduceInput {
            contribution: Some(contribution),
            layout,
            reduce_dtype,
            out_dtype: DType::F32,
        }
    };
    let layouts = layouts(group.world_size()).into_iter();
    layouts.zip(DTYPES).enumerate().map(input).collect()
}

fn reduce(
    group: &ProcessGroup,
    reduce_dtype: Option<DType>,
    reduction: Reduction,
) -> Result<Vec<(DType, Vec<u8>)>> {
    let inputs = reduce_inputs(group, reduce_dtype);
    Ok(all_bits(&start_reduce(group, inputs, reduction)?.wait()?))
}

fn start_reduce(
    group: &ProcessGroup,
    inputs: Vec<ReduceInput>,
    reduction: Reduction,
) -> Result<Box<dyn ReduceWork>> {
    let call = Call::new("reduce-scatter", "unit").of(DType::F32, 1);
    group
        .engine()
        .reduce(call, inputs, reduction, &Device::flex())
}

// ---- results

#[test]
fn a_unit_of_several_dtypes_is_gathered_as_locally() {
    same_as_locally(|group| gathered_bits(start_gather(&group, 3, &Default::default())?));
}

#[test]
fn gathers_may_be_under_way_together_and_waited_for_in_another_order() {
    same_as_locally(|group| {
        let first = start_gather(&group, 1, &Default::default())?;
        let second = start_gather(&group, 2, &Default::default())?;
        let third = start_gather(&group, 3, &Default::default())?;
        let second = gathered_bits(second)?;
        let first = gathered_bits(first)?;
        let third = gathered_bits(third)?;
        Ok((first, second, third))
    });
}

#[test]
fn a_gather_that_nobody_waits_for_is_let_go_of() {
    same_as_locally(|group| {
        drop(start_gather(&group, 1, &Default::default())?);
        let gathered = gathered_bits(start_gather(&group, 2, &Default::default())?)?;
        drop(start_gather(&group, 3, &Default::default())?);
        Ok(gathered)
    });
}

#[test]
fn a_gather_may_be_waited_for_on_another_thread() {
    same_as_locally(|group| {
        let gather = start_gather(&group, 1, &Default::default())?;
        std::thread::scope(|scope| {
            let wait = move || gathered_bits(gather);
            scope.spawn(wait).join().expect("waiting does not panic")
        })
    });
}

#[test]
fn sums_means_and_extremes_in_f32_are_as_locally() {
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        same_as_locally(|group| reduce(&group, Some(DType::F32), Reduction::plain(op)));
    }
    same_as_locally(|group| {
        let mean = Reduction::mean(group.world_size());
        reduce(&group, Some(DType::F32), mean)
    });
    same_as_locally(|group| {
        let by_factor =
            Reduction::new(GradientAverage::Factor(3.0), group.world_size(), DType::F32);
        reduce(&group, Some(DType::F32), by_factor)
    });
}

#[test]
fn a_contribution_that_is_not_there_is_zeros() {
    same_as_locally(|group| {
        let mut inputs = reduce_inputs(&group, Some(DType::F32));
        inputs[group.rank() % 4].contribution = None;
        let mean = Reduction::mean(group.world_size());
        Ok(all_bits(&start_reduce(&group, inputs, mean)?.wait()?))
    });
}

#[test]
fn reductions_may_be_under_way_while_gathers_come_and_go() {
    same_as_locally(|group| {
        let start = |factor| {
            let average = GradientAverage::Factor(factor);
            let reduction = Reduction::new(average, group.world_size(), DType::F32);
            let inputs = reduce_inputs(&group, Some(DType::F32));
            start_reduce(&group, inputs, reduction)
        };
        let first = start(1.0)?;
        let gather = start_gather(&group, 1, &Default::default())?;
        let second = start(2.0)?;
        let gathered = gathered_bits(gather)?;
        let first = all_bits(&first.wait()?);
        drop(start(3.0)?);
        Ok((gathered, first, all_bits(&second.wait()?)))
    });
}

#[test]
fn reductions_in_half_precision_are_as_locally() {
    same_as_locally(|group| {
        let dtype = Some(DType::BF16);
        reduce(&group, dtype, Reduction::plain(ReduceOp::Sum))
    });
    // Divided before and after the sum.
    for world_size in [2, 4] {
        let f16_mean = |group: ProcessGroup| {
            let mean = Reduction::new(GradientAverage::Mean, group.world_size(), DType::F16);
            assert!(mean.pre_divide > 1.0);
            reduce(&group, Some(DType::F16), mean)
        };
        let expected = locally(world_size, f16_mean).unwrap();
        assert_eq!(on_fake(world_size, 1, f16_mean).unwrap(), expected);
    }
}

#[test]
fn tensors_of_several_dtypes_are_reduced_in_one_call() {
    same_as_locally(|group| reduce(&group, None, Reduction::plain(ReduceOp::Sum)));
}

#[test]
fn the_public_collectives_are_as_locally() {
    same_as_locally(|group| {
        let world_size = group.world_size();
        let mine = |salt| tensor(world_size * 3, DType::F32, &group, salt);
        let doubles = tensor(world_size * 3, DType::F64, &group, 9);
        group.barrier()?;
        Ok((
            bits(&group.all_gather(mine(0))?),
            bits(&group.reduce_scatter(mine(1), ReduceOp::Mean)?),
            bits(&group.all_reduce(doubles, ReduceOp::Sum)?),
            bits(&group.broadcast(mine(2), world_size - 1)?),
            group.all_gather_bytes(vec![group.rank() as u8; group.rank()])?,
            group.broadcast_bytes(0, vec![7, group.rank() as u8])?,
        ))
    });
}

#[test]
fn the_root_alone_knows_what_it_scatters() {
    same_as_locally(|group| {
        let root = group.world_size() - 1;
        let mut shards = Vec::new();
        for (i, layout) in layouts(group.world_size()).iter().enumerate() {
            let full = || tensor(layout.full_len(), DTYPES[i], &group, i);
            let source = (group.rank() == root).then(full);
            let call = Call::new("scatter", "a parameter");
            shards.push(
                group
                    .engine()
                    .scatter(call, root, layout, source, &Device::flex())?,
            );
        }
        Ok(all_bits(&shards))
    });
}

#[test]
fn a_split_group_is_one_of_its_own() {
    let f = |group: ProcessGroup| {
        let shards = group.split(group.rank() / 2)?;
        let copies = group.split(group.rank() % 2 + 7)?;
        let mine = tensor(6, DType::F32, &group, 1);
        let shard = shards.reduce_scatter(mine, ReduceOp::Mean)?;
        let shard = copies.all_reduce(shard, ReduceOp::Mean)?;
        let gather = start_gather(&shards, group.rank() / 2, &Default::default())?;
        let sum = group.all_reduce(shard.clone(), ReduceOp::Sum)?;
        Ok((
            bits(&shard),
            gathered_bits(gather)?,
            bits(&sum),
            shards.rank(),
            copies.rank(),
        ))
    };
    let expected = locally(4, f).unwrap();
    for seed in SEEDS {
        assert_eq!(on_fake(4, seed, f).unwrap(), expected);
    }
}

#[test]
fn a_control_wire_has_positions_of_its_own() {
    on_fake(3, 0, |group| {
        let wire = group.engine().control()?;
        let message = crate::comm::wire::Outgoing::ToAll(vec![group.rank() as u8].into());
        let exchange = wire.start(Call::new("exchange", "ranks"), message)?;
        group.barrier()?;
        assert_eq!(exchange.wait()?, [&[0][..], &[1], &[2]]);
        Ok(())
    })
    .unwrap();
}

/// The loss of each of some steps.
fn train(group: ProcessGroup, replicate: usize) -> Result<Vec<f32>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mesh = match replicate {
        1 => DeviceMesh::shard(&group),
        _ => DeviceMesh::hybrid(&group, replicate, group.world_size() / replicate)?,
    };
    let value = |i: usize| ((i * 29 + group.rank() * 7) % 31) as f32 / 31.0 - 0.5;
    let input: Vec<f32> = (0..4 * 6).map(value).collect();
    let input = Tensor::<1>::from_data(TensorData::from(&*input), &device).reshape([4, 6]);
    let values = |len: usize| {
        let values: Vec<f32> = (0..len).map(|i| i as f32 / len as f32).collect();
        Tensor::<1>::from_data(TensorData::from(&*values), &device)
    };
    let linear = Linear {
        weight: Param::from_tensor(values(18).reshape([6, 3])),
        bias: Some(Param::from_tensor(values(3))),
    };
    let mut model = linear.fully_shard(&mesh, &FsdpConfig::new())?;
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..4 {
        let loss = model.forward(input.clone()).powf_scalar(2.0).mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = model.backward(loss);
        let (grads, norm) = model.clip_grad_norm(grads, 0.5)?;
        losses.push(norm as f32);
        model = model.step(&mut optim, 0.1, grads)?;
    }
    Ok(losses)
}

#[test]
fn training_is_bit_for_bit_as_locally() {
    for world_size in WORLDS {
        let expected = locally(world_size, |group| train(group, 1)).unwrap();
        let got = on_fake(world_size, 5, |group| train(group, 1)).unwrap();
        assert_eq!(got, expected);
    }
    let expected = locally(4, |group| train(group, 2)).unwrap();
    assert_eq!(on_fake(4, 6, |group| train(group, 2)).unwrap(), expected);
}

#[test]
fn unsharded_memory_is_counted_until_what_was_gathered_is_dropped() {
    on_fake(2, 3, |group| {
        let memory = Arc::new(MemoryCounter::default());
        let gather = start_gather(&group, 1, &memory)?;
        let held = memory.live();
        assert!(held > 0);
        let gathered = gather.wait()?;
        assert_eq!(memory.live(), held);
        drop(gathered);
        assert_eq!(memory.live(), 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_are_processes_get_the_same() {
    let f = |group: ProcessGroup| {
        let gather = start_gather(&group, 1, &Default::default())?;
        let half = group.split(group.rank() % 2)?;
        let sum = half.all_reduce(tensor(5, DType::F32, &group, 0), ReduceOp::Sum)?;
        Ok((gathered_bits(gather)?, bits(&sum)))
    };
    let expected = locally(3, f).unwrap();
    let cluster = FakeCluster::new(3, 7);
    let got = launch_tcp(3, |group| f(form(&group, &cluster.driver(group.rank()))?));
    let got: Vec<_> = got.into_iter().map(Result::unwrap).collect();
    assert_eq!(got, expected);
    cluster.assert_clean();
}

#[test]
fn a_rank_that_leaves_waits_for_what_is_under_way() {
    let cluster = FakeCluster::new(2, 0);
    on_cluster(&cluster, 2, |group, _| {
        drop(start_gather(&group, 1, &Default::default())?);
        group.engine().leave();
        assert_eq!(cluster.launches(), 2);
        Ok(())
    })
    .unwrap();
    cluster.assert_clean();
}

#[test]
fn compute_goes_on_while_a_reduction_is_under_way() {
    let cluster = FakeCluster::new(2, 0);
    let seen = on_cluster(&cluster, 2, |group, driver| {
        group.barrier()?;
        cluster.freeze();
        group.barrier()?;
        let inputs = reduce_inputs(&group, Some(DType::F32));
        let work = start_reduce(&group, inputs, Reduction::mean(group.world_size()))?;
        let (computed, start) = (driver.record(Stream::Compute), Instant::now());
        while !driver.is_reached(&computed) && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let goes_on = driver.is_reached(&computed);
        group.barrier()?;
        drop(work);
        group.abort("seen enough");
        Ok(goes_on)
    });
    assert_eq!(seen.unwrap(), [true; 2]);
    cluster.assert_clean();
}

// ---- failures

#[test]
fn a_rank_that_leaves_does_not_wait_for_a_group_that_has_failed() {
    let cluster = FakeCluster::new(1, 0);
    cluster.freeze();
    let left = on_cluster(&cluster, 1, |group, _| {
        drop(start_gather(&group, 1, &Default::default())?);
        group.abort("enough");
        group.engine().leave();
        Ok(())
    });
    assert!(left.is_ok());
    cluster.assert_clean();
}

#[test]
fn calls_that_differ_are_found_even_if_nccl_takes_them_for_the_same() {
    let cluster = FakeCluster::new(2, 0);
    let errors = launch_tcp(2, |group| {
        let group = form(&group, &cluster.driver(group.rank()))?;
        let gather = start_gather(&group, group.rank(), &Default::default())?;
        Err::<(), _>(until_failure(&group, gather))
    });
    for error in errors {
        let text = error.unwrap_err().to_string();
        let names = |unit| text.contains(&format!("all-gather of unit {unit}, collective 1"));
        assert!(text.contains("mismatch") && names(0) && names(1), "{text}");
    }
    cluster.assert_clean();
}

#[test]
fn ranks_with_different_collectives_all_learn_of_both() {
    let cluster = FakeCluster::new(2, 0);
    let seen = parking_lot::Mutex::new(Vec::new());
    let _ = on_cluster(&cluster, 2, |group, _| {
        let len = 4 + 2 * group.rank();
        let mine = tensor(len, DType::F32, &group, 0);
        let sum = group.all_reduce(mine, ReduceOp::Sum);
        // The first rank learns of it at its next call at the latest.
        let error = sum.and_then(|_| group.barrier()).unwrap_err();
        seen.lock().push(error.clone());
        Err::<(), _>(error)
    });
    let seen = seen.into_inner();
    assert_eq!(seen.len(), 2);
    for error in seen {
        let text = error.to_string();
        assert!(
            matches!(error, FsdpError::CollectiveMismatch { .. }),
            "{text}"
        );
        assert!(
            text.contains("4 elements") && text.contains("6 elements"),
            "{text}"
        );
        assert!(text.contains("collective 1"), "{text}");
    }
    cluster.assert_clean();
}

#[test]
fn an_error_of_nccl_is_every_ranks_and_names_what_was_under_way() {
    let cluster = FakeCluster::new(3, 0);
    let errors = on_cluster(&cluster, 3, |group, _| {
        start_gather(&group, 1, &Default::default())?.wait()?;
        group.barrier()?;
        cluster.freeze();
        let gather = start_gather(&group, 2, &Default::default())?;
        group.barrier()?;
        if group.rank() == 1 {
            cluster.break_device(1, "remote process exited");
        }
        Ok(until_failure(&group, gather))
    })
    .unwrap();
    for error in errors {
        let FsdpError::Nccl {
            rank: 1,
            call,
            cause,
        } = &error
        else {
            panic!("{error}");
        };
        assert!(call.contains("unit 2, collective 2"), "{call}");
        assert_eq!(cause, "remote process exited");
    }
    cluster.assert_clean();
}

/// What the group fails with, when the watchdog finds out, and every call from then on.
fn until_failure(group: &ProcessGroup, gather: Box<dyn GatherWork>) -> FsdpError {
    while group.failure().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = gather.wait().unwrap_err();
    assert_eq!(group.barrier().unwrap_err().to_string(), error.to_string());
    let mine = tensor(3, DType::F32, group, 0);
    let again = group.all_reduce(mine, ReduceOp::Sum).unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    error
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_watchdog() {
    let cluster = FakeCluster::new(3, 0);
    let config = LaunchConfig::new(3).with_timeout(Duration::from_millis(300));
    let errors = on_config(&config, &cluster, |group, _| {
        group.barrier()?;
        if group.rank() == 2 {
            while group.failure().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            return Ok(group.failure().unwrap());
        }
        let gather = start_gather(&group, 4, &Default::default())?;
        Ok(until_failure(&group, gather))
    })
    .unwrap();
    for error in errors {
        let FsdpError::Timeout { call, missing, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(missing, &[2]);
        assert!(call.contains("unit 4, collective 1"), "{call}");
    }
    cluster.assert_clean();
}

#[test]
fn a_collective_that_hangs_on_the_devices_times_out() {
    let cluster = FakeCluster::new(2, 0);
    cluster.freeze();
    let config = LaunchConfig::new(2).with_timeout(Duration::from_millis(300));
    let errors = on_config(&config, &cluster, |group, _| {
        let gather = start_gather(&group, 4, &Default::default())?;
        Ok(until_failure(&group, gather))
    })
    .unwrap();
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, FsdpError::Timeout { .. }), "{text}");
        assert!(
            text.contains("all ranks have called it, but it does not end"),
            "{text}"
        );
    }
    cluster.assert_clean();
}

#[test]
fn a_rank_that_fails_frees_those_who_wait_for_it_on_the_device() {
    let cluster = FakeCluster::new(3, 0);
    let error = on_cluster(&cluster, 3, |group, _| {
        if group.rank() == 1 {
            return Err(FsdpError::argument("no data"));
        }
        // Reading it waits for the device, which waits for rank 1.
        let sum = group.all_reduce(tensor(3, DType::F32, &group, 0), ReduceOp::Sum)?;
        assert!(sum.into_data().iter::<f32>().count() == 3);
        let error = group.barrier().unwrap_err();
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 1, .. }),
            "{error}"
        );
        Err::<(), _>(error)
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "no data");
    cluster.assert_clean();
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let cluster = FakeCluster::new(2, 0);
    let error = on_cluster(&cluster, 2, |group, _| {
        if group.rank() == 1 {
            return Ok(());
        }
        let gather = start_gather(&group, 1, &Default::default())?;
        Err(until_failure(&group, gather))
    })
    .unwrap_err();
    assert!(
        matches!(error, FsdpError::RankReturned { gone: 1, .. }),
        "{error}"
    );
    cluster.assert_clean();
}

#[test]
fn an_abort_reaches_the_groups_split_off() {
    let cluster = FakeCluster::new(4, 0);
    on_cluster(&cluster, 4, |group, _| {
        let half = group.split(group.rank() / 2)?;
        group.barrier()?;
        if group.rank() == 0 {
            group.abort("enough");
        }
        while half.failure().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = cluster.launches();
        let error = half
            .all_reduce(tensor(3, DType::F32, &half, 0), ReduceOp::Sum)
            .unwrap_err();
        assert!(
            matches!(error, FsdpError::Aborted { rank: 0, .. }),
            "{error}"
        );
        assert_eq!(cluster.launches(), before);
        Ok(())
    })
    .unwrap();
    cluster.assert_clean();
}

#[test]
fn no_rank_joins_unless_all_can() {
    let cluster = FakeCluster::new(3, 0);
    let errors = LaunchConfig::new(3)
        .launch(|group| {
            let driver = match group.rank() {
                2 => Err(FsdpError::NcclUnavailable {
                    reason: "not installed".to_string(),
                }),
                rank => Ok(cluster.driver(rank)),
            };
            Ok(NcclEngine::form(group.engine(), driver).unwrap_err())
        })
        .unwrap();
    assert!(matches!(errors[2], FsdpError::NcclUnavailable { .. }));
    for error in &errors[..2] {
        let text = error.to_string();
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 2, .. }),
            "{text}"
        );
        assert!(text.contains("not installed"), "{text}");
    }
    cluster.assert_clean();
}

#[test]
fn ranks_on_one_device_are_refused() {
    let cluster = FakeCluster::new(1, 0);
    let errors = LaunchConfig::new(2)
        .launch(|group| Ok(NcclEngine::form(group.engine(), Ok(cluster.driver(0))).unwrap_err()))
        .unwrap();
    for error in errors {
        let text = error.to_string();
        assert!(
            text.contains("ranks 0 and 1 are both on fake device 0"),
            "{text}"
        );
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_group_over_nccl_needs_cuda_devices() {
    let errors = locally(2, |group| Ok(group.nccl(&Device::flex()).unwrap_err())).unwrap();
    for error in errors {
        let text = error.to_string();
        assert!(
            matches!(error, FsdpError::UnsupportedDevice { engine: "nccl", .. }),
            "{text}"
        );
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_host_without_nccl_fails_all_ranks() {
    if super::library::check().is_ok() {
        eprintln!("not tested: this host has NCCL and a driver");
        return;
    }
    let cluster = FakeCluster::new(2, 0);
    let errors = locally(2, |group| {
        Ok(match group.rank() {
            0 => form(&group, &cluster.driver(0)).unwrap_err(),
            _ => group.nccl(&Device::cuda(0)).unwrap_err(),
        })
    });
    let errors = errors.unwrap();
    assert!(
        matches!(errors[0], FsdpError::RankFailed { rank: 1, .. }),
        "{}",
        errors[0]
    );
    assert!(
        matches!(errors[1], FsdpError::NcclUnavailable { .. }),
        "{}",
        errors[1]
    );
}

// ---- the fakes themselves: each of these breaks a rule

/// A device, a communicator with itself alone, and a buffer.
fn alone() -> (
    Arc<FakeCluster>,
    Arc<FakeDriver>,
    <FakeDriver as Driver>::Communicator,
) {
    let cluster = FakeCluster::new(1, 0);
    let driver = cluster.driver(0);
    let communicator = driver.join(&driver.unique_id().unwrap(), 0, 1).unwrap();
    (cluster, driver, communicator)
}

fn ones(driver: &FakeDriver) -> <FakeDriver as Driver>::Buffer {
    driver
        .buffer_of(Tensor::ones([4], &Device::flex()))
        .unwrap()
}

fn all_reduce<B: Clone>(buffer: &B) -> Vec<Collective<B>> {
    vec![Collective::AllReduce {
        buffer: buffer.clone(),
        op: NcclOp::Sum,
    }]
}

#[test]
fn what_keeps_the_rules_is_clean() {
    let (cluster, driver, communicator) = alone();
    let buffer = ones(&driver);
    driver.wait(Stream::Reduce, &driver.record(Stream::Compute));
    let pins = driver.run(&communicator, Stream::Reduce, all_reduce(&buffer));
    driver.wait(Stream::Compute, &driver.record(Stream::Reduce));
    driver.release(pins);
    assert_eq!(
        driver
            .tensor_of(buffer)
            .into_data()
            .iter::<f32>()
            .sum::<f32>(),
        4.0
    );
    driver.destroy(&communicator);
    cluster.assert_clean();
}

#[test]
#[should_panic(expected = "memory is written before it is ready")]
fn a_collective_that_does_not_wait_for_the_packing_is_caught() {
    let (_cluster, driver, communicator) = alone();
    let buffer = ones(&driver);
    driver.run(&communicator, Stream::Reduce, all_reduce(&buffer));
}

#[test]
#[should_panic(expected = "memory is read before it is ready")]
fn a_result_that_is_read_without_waiting_is_caught() {
    let (_cluster, driver, communicator) = alone();
    let buffer = ones(&driver);
    driver.wait(Stream::Gather, &driver.record(Stream::Compute));
    let _pins = driver.run(&communicator, Stream::Gather, all_reduce(&buffer));
    driver.tensor_of(buffer);
}

#[test]
#[should_panic(expected = "memory is let go of while a collective may still use it")]
fn memory_that_is_released_too_early_is_caught() {
    let (cluster, driver, communicator) = alone();
    let buffer = ones(&driver);
    driver.wait(Stream::Gather, &driver.record(Stream::Compute));
    let pins = driver.run(&communicator, Stream::Gather, all_reduce(&buffer));
    drop((buffer, pins));
    cluster.assert_clean();
}

#[test]
#[should_panic(expected = "ranks have different collectives at position 1")]
fn collectives_in_another_order_on_another_rank_are_caught() {
    let cluster = FakeCluster::new(2, 0);
    let drivers = [cluster.driver(0), cluster.driver(1)];
    let id = drivers[0].unique_id().unwrap();
    let communicators: Vec<_> = std::thread::scope(|scope| {
        let join = |rank: usize| {
            let driver = &drivers[rank];
            scope.spawn(move || driver.join(&id, rank, 2).unwrap())
        };
        let ranks = [join(0), join(1)];
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (rank, ops) in [[NcclOp::Sum, NcclOp::Max], [NcclOp::Sum, NcclOp::Min]]
        .iter()
        .enumerate()
    {
        for &op in ops {
            let buffer = ones(&drivers[rank]);
            drivers[rank].wait(Stream::Reduce, &drivers[rank].record(Stream::Compute));
            let collectives = vec![Collective::AllReduce { buffer, op }];
            std::mem::forget(drivers[rank].run(&communicators[rank], Stream::Reduce, collectives));
        }
    }
}

#[test]
#[should_panic(expected = "a collective on a communicator that was aborted")]
fn the_use_of_an_aborted_communicator_is_caught() {
    let (_cluster, driver, communicator) = alone();
    driver.abort(&communicator);
    for _ in 0..2 {
        driver.run(&communicator, Stream::Reduce, all_reduce(&ones(&driver)));
    }
}

#[test]
#[should_panic(expected = "a communicator that was aborted is destroyed")]
fn a_communicator_that_ends_twice_is_caught() {
    let (_cluster, driver, communicator) = alone();
    driver.abort(&communicator);
    driver.destroy(&communicator);
}

#[test]
#[should_panic(expected = "a communicator is destroyed while a collective is under way")]
fn a_communicator_that_is_destroyed_too_early_is_caught() {
    let (cluster, driver, communicator) = alone();
    cluster.freeze();
    let buffer = ones(&driver);
    driver.wait(Stream::Gather, &driver.record(Stream::Compute));
    std::mem::forget(driver.run(&communicator, Stream::Gather, all_reduce(&buffer)));
    driver.destroy(&communicator);
}
