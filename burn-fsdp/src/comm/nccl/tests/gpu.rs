//! The engine on a GPU and NCCL. A group of one is all that one GPU can have.

use super::super::cuda::CudaDriver;
use super::*;

fn gpu() -> Device {
    Device::cuda(0)
}

/// Checks that `f` comes to the same over NCCL as on a thread.
fn same_as_alone<T: Send + PartialEq + std::fmt::Debug>(
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) {
    let expected = locally(1, &f).unwrap();
    let got = locally(1, |group| f(group.nccl(&gpu())?)).unwrap();
    assert_eq!(got, expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn the_collectives_of_a_group_of_one_are_as_alone() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        same_as_alone(|group| {
            let mine = |salt| tensor(1001, dtype, &group, salt);
            group.barrier()?;
            Ok((
                bits(&group.all_gather(mine(0))?),
                bits(&group.reduce_scatter(mine(1), ReduceOp::Mean)?),
                bits(&group.all_reduce(mine(2), ReduceOp::Sum)?),
                bits(&group.all_reduce(mine(3), ReduceOp::Max)?),
                bits(&group.broadcast(mine(4), 0)?),
            ))
        });
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn gathers_and_reductions_may_be_under_way_together() {
    same_as_alone(|group| {
        let first = start_gather(&group, 1, &Default::default())?;
        let reduced = reduce(&group, Some(DType::BF16), Reduction::plain(ReduceOp::Sum))?;
        let second = start_gather(&group, 2, &Default::default())?;
        let mean = Reduction::mean(group.world_size());
        let mean = reduce(&group, Some(DType::F32), mean)?;
        let (second, first) = (gathered_bits(second)?, gathered_bits(first)?);
        drop(start_gather(&group, 3, &Default::default())?);
        Ok((reduced, mean, first, second))
    });
}

/// A group of one has everything whole, so the engine doesn't gather. This does.
#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn every_collective_of_nccl_runs_in_place_on_the_streams() {
    let driver = CudaDriver::new(&gpu()).unwrap();
    let id = driver.unique_id().unwrap();
    let communicator = driver.join(&id, 0, 1).unwrap();
    let before = Tensor::<1>::from_floats([1.5, -2.0, 3.25, 0.0], &gpu());
    type Make = fn(crate::kernels::Buffer) -> Collective<crate::kernels::Buffer>;
    let kinds: [Make; 5] = [
        |slots| Collective::AllGather { slots },
        |slots| Collective::ReduceScatter {
            slots,
            op: NcclOp::Avg,
        },
        |buffer| Collective::AllReduce {
            buffer,
            op: NcclOp::Sum,
        },
        |buffer| Collective::AllReduce {
            buffer,
            op: NcclOp::Max,
        },
        |buffer| Collective::Broadcast { buffer, root: 0 },
    ];
    for (kind, stream) in kinds
        .iter()
        .flat_map(|kind| [Stream::Gather, Stream::Reduce].map(|stream| (kind, stream)))
    {
        // A kernel before, and one after.
        let buffer = driver.buffer_of(before.clone() * 2.0).unwrap();
        driver.wait(stream, &driver.record(Stream::Compute));
        let pins = driver.run(&communicator, stream, vec![kind(buffer.clone())]);
        let done = driver.record(stream);
        driver.wait(Stream::Compute, &done);
        driver.release(pins);
        let after = driver.tensor_of(buffer) / 2.0;
        assert_eq!(bits(&after), bits(&before));
        let start = Instant::now();
        while !driver.is_reached(&done) {
            assert!(start.elapsed() < Duration::from_secs(10), "never done");
        }
        assert_eq!(driver.failure(&communicator), None);
    }
    driver.destroy(&communicator);
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn a_module_trains_over_nccl_as_alone() {
    same_as_alone(|group| train(group, 1));
}
