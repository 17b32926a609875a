//! The same calls give the same bits on ranks that are threads and on ranks that are processes.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::comm::testing::launch_tcp;
use crate::comm::{
    Call, GatherInput, GatherKey, ProcessGroup, ReduceInput, ReduceOp, Reduction, launch,
};
use crate::memory::MemoryCounter;
use crate::placement::ShardLayout;
use crate::{
    DeviceMesh, FsdpConfig, FsdpError, FullyShard, GradientAverage, MixedPrecisionPolicy,
    Placement, ReshardAfterForward, Result,
};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Shapes and placements: even, uneven, strided, fewer rows than ranks, whole, many blocks.
fn layouts(world: usize) -> Vec<ShardLayout> {
    let layout = |shape: &[usize], placement| ShardLayout::new(shape, placement, world);
    vec![
        layout(&[4, 3], Placement::Shard(0)),
        layout(&[7], Placement::Shard(0)),
        layout(&[1, 5], Placement::Shard(0)),
        layout(&[3, 5, 2], Placement::Shard(1)),
        layout(&[4, 2, 3], Placement::Shard(2)),
        layout(&[11], Placement::Replicate),
        layout(&[1], Placement::Replicate),
        layout(&[5003], Placement::Shard(0)),
        layout(&[61, 101], Placement::Shard(1)),
    ]
}

/// Numbers that are equal on all machines.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// Mostly near one; some zeros of both signs, and some that lose digits or overflow when
    /// rounded.
    fn value(&mut self) -> f64 {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        let scale = self.one_of(&[1.0, 1.0, 1.0, 1e-9, 300.0, 7e4, -0.0, 1e-41]);
        unit * scale
    }

    fn tensor(&mut self, len: usize, dtype: DType) -> Tensor<1> {
        let values: Vec<f64> = (0..len).map(|_| self.value()).collect();
        let data = TensorData::new(values, [len]).convert_dtype(dtype);
        Tensor::from_data(data, (&Device::flex(), dtype))
    }
}

/// A tensor bit for bit. All NaNs are one.
fn bits(tensor: Tensor<1>) -> (DType, Vec<u64>) {
    let dtype = tensor.dtype();
    assert_eq!(tensor.device(), Device::flex());
    let data = tensor.into_data().convert_dtype(DType::F64);
    let bits = |x: f64| if x.is_nan() { f64::NAN } else { x }.to_bits();
    (dtype, data.iter::<f64>().map(bits).collect())
}

/// What `f` returns on each rank, which must not depend on the engine.
fn on_both<T: Send + PartialEq + std::fmt::Debug>(
    world: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> Vec<T> {
    let expected = launch(world, &f).unwrap();
    let got: Result<Vec<T>> = launch_tcp(world, &f).into_iter().collect();
    let got = got.unwrap();
    for (rank, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(
            got == expected,
            "world {world}, rank {rank}: results differ"
        );
    }
    got
}

// ---- collectives

#[test]
fn reductions_are_equal_bit_for_bit() {
    for world in 1..=4 {
        let results = on_both(world, |pg| {
            let mut results = Vec::new();
            for case in 0..60 {
                results.extend(random_reduction(&pg, case)?.into_iter().map(bits));
            }
            Ok(results)
        });
        assert!(results[0].len() >= 60);
    }
}

/// A reduction that is the same on all ranks but for the contributions.
fn random_reduction(pg: &ProcessGroup, case: u64) -> Result<Vec<Tensor<1>>> {
    let world = pg.world_size();
    let mut numbers = Numbers::new(1000 * world as u64 + case);
    let mut own = Numbers::new(case * 31 + pg.rank() as u64 + 7);
    let reduce_dtype = numbers.one_of(&DTYPES);
    let reduction = match numbers.below(6) {
        0 => Reduction::plain(ReduceOp::Max),
        1 => Reduction::plain(ReduceOp::Min),
        2 => Reduction::new(GradientAverage::Sum, world, reduce_dtype),
        3 => Reduction::new(GradientAverage::Factor(2.5), world, reduce_dtype),
        _ => Reduction::new(GradientAverage::Mean, world, reduce_dtype),
    };
    let layouts = layouts(world);
    let inputs: Vec<_> = (0..1 + numbers.below(4))
        .map(|_| {
            let layout = layouts[numbers.below(layouts.len())].clone();
            // Some ranks have none, and not all need have the same dtype.
            let dtype = match numbers.below(4) {
                0 => own.one_of(&DTYPES),
                _ => numbers.one_of(&DTYPES),
            };
            let is_there = own.below(4) > 0;
            let contribution = is_there.then(|| own.tensor(layout.full_len(), dtype));
            ReduceInput {
                layout,
                contribution,
                reduce_dtype,
                out_dtype: numbers.one_of(&DTYPES),
            }
        })
        .collect();
    let call = Call::new("reduce", format!("case {case}"));
    pg.engine()
        .reduce(call, inputs, reduction, &Device::flex())?
        .wait()
}

#[test]
fn gathers_and_scatters_are_equal_bit_for_bit() {
    for world in 1..=4 {
        on_both(world, |pg| {
            let (engine, rank) = (pg.engine(), pg.rank());
            let mut own = Numbers::new(rank as u64 + 1);
            let mut results = Vec::new();
            for (case, layout) in layouts(world).into_iter().enumerate() {
                for dtype in DTYPES {
                    let full = Numbers::new(case as u64 + 1).tensor(layout.full_len(), dtype);
                    let root = case % world;
                    let source = (rank == root).then_some(full);
                    let call = Call::new("scatter", format!("case {case}"));
                    let shard = engine.scatter(call, root, &layout, source, &Device::flex())?;
                    results.push(bits(shard.clone()));
                    // Several tensors in one gather, each cast on its way.
                    let inputs: Vec<_> = DTYPES
                        .into_iter()
                        .map(|dtype| GatherInput {
                            layout: layout.clone(),
                            shard: match layout.is_whole() {
                                true => shard.clone(),
                                false => own.tensor(layout.shard_len(), shard.dtype()),
                            },
                            dtype,
                        })
                        .collect();
                    let call = Call::gather(format!("case {case}"), &inputs);
                    let key = GatherKey {
                        module: 0,
                        unit: case,
                        generation: dtype.size() as u64,
                    };
                    let key = (case % 2 == 0).then_some(key);
                    let work = engine.all_gather(call, key, inputs, &Default::default())?;
                    results.extend(work.wait()?.tensors.into_iter().map(bits));
                }
            }
            Ok(results)
        });
    }
}

#[test]
fn the_collectives_of_a_group_and_of_its_parts_are_equal() {
    for world in 1..=4 {
        on_both(world, |pg| {
            let half = pg.split(pg.rank() % 2)?;
            let quarter = half.split(half.rank())?;
            let mut results = Vec::new();
            for (i, pg) in [pg, half, quarter].into_iter().enumerate() {
                let (rank, size) = (pg.rank(), pg.world_size());
                let bytes = pg.all_gather_bytes(vec![rank as u8; rank])?;
                let told = pg.broadcast_bytes(size - 1, vec![i as u8, rank as u8])?;
                let own = || Numbers::new(rank as u64 + 1).tensor(4 * size, DType::F32);
                pg.barrier()?;
                results.push((
                    (bytes, told, rank, size),
                    bits(pg.all_reduce(own(), ReduceOp::Mean)?),
                    bits(pg.reduce_scatter(own(), ReduceOp::Sum)?),
                    bits(pg.all_gather(own())?),
                    bits(pg.broadcast(own(), size - 1)?),
                ));
            }
            Ok(results)
        });
    }
}

#[test]
fn gathers_under_way_are_counted_until_their_tensors_are_dropped() {
    on_both(2, |pg| {
        let memory = Arc::new(MemoryCounter::default());
        let layout = ShardLayout::flat(10, Placement::Shard(0), 2);
        let shard = Numbers::new(1).tensor(5, DType::F32);
        let inputs = || {
            vec![GatherInput {
                layout: layout.clone(),
                shard: shard.clone(),
                dtype: DType::BF16,
            }]
        };
        let start = || {
            let call = Call::gather("a tensor", &inputs());
            pg.engine().all_gather(call, None, inputs(), &memory)
        };
        let (first, second) = (start()?, start()?);
        let under_way = memory.live();
        let tensors = first.wait()?.tensors;
        drop(second);
        let held = memory.live();
        drop(tensors);
        assert_eq!((under_way, held, memory.live()), (40, 20, 0));
        Ok(())
    });
}

#[test]
fn ranks_that_reduce_different_tensors_all_hear_of_it() {
    let results = launch_tcp(3, |pg| {
        let len = 4 + pg.rank() / 2;
        pg.all_reduce(Tensor::ones([len], &Device::flex()), ReduceOp::Sum)
            .map(drop)
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(
            matches!(error, FsdpError::CollectiveMismatch { .. }),
            "{error}"
        );
    }
}

#[test]
fn an_error_of_one_rank_is_the_cause_on_all_others() {
    let results = launch_tcp(3, |pg| {
        if pg.rank() == 1 {
            return Err(FsdpError::other("no data"));
        }
        pg.barrier()
    });
    assert!(matches!(results[1], Err(FsdpError::Other(_))));
    for rank in [0, 2] {
        let Err(FsdpError::RankFailed { rank: 1, cause }) = &results[rank] else {
            panic!("{:?}", results[rank]);
        };
        assert_eq!(cause, "no data");
    }
}

#[test]
fn a_panic_of_one_rank_is_the_cause_on_all_others() {
    let results = launch_tcp(3, |pg| {
        assert!(pg.rank() != 2, "an index out of bounds");
        pg.barrier()
    });
    for result in results {
        let Err(FsdpError::RankFailed { rank: 2, cause }) = result else {
            panic!("{result:?}");
        };
        assert_eq!(cause, "an index out of bounds");
    }
}

#[test]
fn a_rank_has_returned_even_if_it_keeps_its_group() {
    let results = launch_tcp(2, |pg| {
        if pg.rank() == 0 {
            pg.barrier()?;
        }
        Ok(pg)
    });
    let error = results[0].as_ref().unwrap_err();
    assert!(
        matches!(
            error,
            FsdpError::RankReturned {
                rank: 0,
                gone: 1,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(results[1].as_ref().unwrap().rank(), 1);
}

#[cfg(feature = "cpu")]
#[test]
fn tensors_of_another_device_stay_there() {
    let device = Device::cpu();
    let results = launch_tcp(2, |pg| {
        let own = Tensor::<1>::from_floats([1.0, 2.0 + pg.rank() as f32], &device);
        let sum = pg.all_reduce(own.clone(), ReduceOp::Sum)?;
        let all = pg.all_gather(own)?;
        assert_eq!(
            (sum.device(), all.device()),
            (device.clone(), device.clone())
        );
        let values = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
        Ok((values(sum), values(all)))
    });
    for result in results {
        assert_eq!(result.unwrap(), (vec![2.0, 5.0], vec![1.0, 2.0, 1.0, 3.0]));
    }
}

// ---- training

/// Layers of uneven sizes: each a unit, with the head in the root.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let mut numbers = Numbers::new(5);
        let mut linear = |i: usize, o: usize| {
            let mut values = |len| {
                let values = (0..len).map(|_| (numbers.below(2000) as f32 - 1000.0) / 2000.0);
                Tensor::<1>::from_data(TensorData::new(values.collect::<Vec<f32>>(), [len]), device)
            };
            let mut linear = LinearConfig::new(i, o).init(device);
            linear.weight = Param::from_tensor(values(i * o).reshape([i, o]));
            linear.bias = Some(Param::from_tensor(values(o)));
            linear
        };
        Self {
            layers: vec![linear(6, 5), linear(5, 7)],
            head: linear(7, 1),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = x.cast(self.head.weight.val().dtype());
        let x = self
            .layers
            .iter()
            .fold(x, |x, layer| layer.forward(x).tanh());
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

/// Trains for a few steps; the losses of this rank, the norms, and the full parameters.
fn train(pg: &ProcessGroup, mesh: &DeviceMesh, config: &FsdpConfig) -> Result<Vec<Vec<u64>>> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let mut model = Net::new(&device).fully_shard(mesh, config)?;
    let mut optim = AdamWConfig::new().init();
    let mut own = Numbers::new(pg.rank() as u64 + 11);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let x: Vec<f32> = (0..18)
            .map(|_| own.below(100) as f32 / 50.0 - 1.0)
            .collect();
        let x = Tensor::<2>::from_data(TensorData::new(x, [3, 6]), &device);
        let loss = model.loss(x);
        seen.push(bits(loss.clone().inner().reshape([1])).1);
        let grads = model.try_backward(loss)?;
        let (grads, norm) = model.clip_grad_norm(grads, 0.05)?;
        seen.push(vec![norm.to_bits()]);
        model = model.step(&mut optim, 1e-2, grads)?;
    }
    let dense = model.into_dense()?;
    for linear in dense.layers.iter().chain([&dense.head]) {
        let weight = linear.weight.val().inner();
        let len = weight.shape().num_elements();
        seen.push(bits(weight.reshape([len])).1);
        seen.push(bits(linear.bias.as_ref().unwrap().val().inner()).1);
    }
    Ok(seen)
}

#[test]
fn training_is_equal_bit_for_bit() {
    let configs = [
        FsdpConfig::new(),
        FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16()),
        FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Never),
    ];
    for world in [2, 3] {
        for config in &configs {
            let seen = on_both(world, |pg| train(&pg, &DeviceMesh::shard(&pg), config));
            let parameters = |rank: usize| &seen[rank][8..];
            assert!((1..world).all(|rank| parameters(rank) == parameters(0)));
        }
    }
}

#[test]
fn training_on_a_mesh_of_two_dimensions_is_equal_bit_for_bit() {
    on_both(4, |pg| {
        train(&pg, &DeviceMesh::hybrid(&pg, 2, 2)?, &FsdpConfig::new())
    });
}
