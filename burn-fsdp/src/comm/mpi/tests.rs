//! What ranks that are processes see. Each test starts itself again under `mpirun`.

mod failures;
mod job;

use std::sync::Arc;

use burn::tensor::Tensor;
use bytes::Bytes;

use self::job::{LONG, alone, on_processes, on_ranks};
use super::MpiWire;
use crate::comm::wire::{Exchange, Outgoing, Wire};
use crate::comm::{Call, ReduceOp, launch_from_env};
use crate::{FsdpError, Result};

// ---- what ranks do

fn call(subject: impl Into<Arc<str>>) -> Call {
    Call::new("exchange", subject)
}

fn gather(wire: &Arc<dyn Wire>, subject: &str, message: Vec<u8>) -> Result<Box<dyn Exchange>> {
    wire.start(call(subject), Outgoing::ToAll(message.into()))
}

fn barrier(wire: &Arc<dyn Wire>) -> Result<Vec<Bytes>> {
    gather(wire, "nothing", Vec::new())?.wait()
}

/// `len` bytes that tell who sent them to whom.
fn bytes(from: usize, to: usize, len: usize) -> Vec<u8> {
    let seed = from * 31 + to * 7;
    (0..len).map(|i| (seed + i + i / 251) as u8).collect()
}

/// What all ranks said, if it is the same.
fn same(said: Vec<String>) -> String {
    assert!(said.iter().all(|s| s == &said[0]), "{said:#?}");
    said.into_iter().next().unwrap()
}

fn ok() -> String {
    "ok".into()
}

// ---- exchanges

#[test]
fn a_gather_brings_messages_of_any_length() {
    for world_size in 1..=4 {
        let Some(outcome) = on_ranks(world_size, LONG, |wire| {
            for lens in [
                [0, 0, 0, 0],
                [5, 0, 70_000, 1],
                [0, 0, 0, 3],
                [64, 64, 64, 64],
            ] {
                let message = bytes(wire.rank(), 0, lens[wire.rank()]);
                let all = gather(wire, "lengths", message).unwrap().wait().unwrap();
                let expected = (0..wire.world_size()).map(|from| bytes(from, 0, lens[from]));
                assert!(all.iter().eq(expected.collect::<Vec<_>>().iter()));
            }
            wire.world_size().to_string()
        }) else {
            return;
        };
        assert_eq!(same(outcome.succeeded()), world_size.to_string());
    }
}

#[test]
fn each_rank_gets_the_messages_meant_for_it() {
    for world_size in 1..=4 {
        let Some(outcome) = on_ranks(world_size, LONG, |wire| {
            for unit in [0, 1, 40_000] {
                let len = |from, to| unit * (from * 3 + to) % 100_000;
                let ranks = 0..wire.world_size();
                let message = |to| bytes(wire.rank(), to, len(wire.rank(), to)).into();
                let outgoing = Outgoing::ToEach(ranks.clone().map(message).collect());
                let all = wire.start(call("lengths"), outgoing).unwrap();
                let all = all.wait().unwrap();
                let expected = |from| bytes(from, wire.rank(), len(from, wire.rank()));
                assert!(
                    all.iter()
                        .eq(ranks.map(expected).collect::<Vec<_>>().iter())
                );
            }
            ok()
        }) else {
            return;
        };
        assert_eq!(same(outcome.succeeded()), "ok");
    }
}

#[test]
fn thousands_of_small_exchanges_keep_their_order() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        for i in 0..3000_usize {
            let message = bytes(wire.rank(), i, i % 50);
            let all = gather(wire, "small", message).unwrap().wait().unwrap();
            for (from, message) in all.iter().enumerate() {
                assert_eq!(*message, bytes(from, i, i % 50));
            }
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn exchanges_under_way_may_be_waited_for_in_any_order() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        let start = |i: usize| {
            let outgoing = match i % 2 {
                0 => Outgoing::ToAll(bytes(wire.rank(), i, i * 1000).into()),
                _ => Outgoing::ToEach(vec![bytes(wire.rank(), i, i * 1000).into(); 3]),
            };
            wire.start(call(format!("number {i}")), outgoing).unwrap()
        };
        let mut exchanges: Vec<_> = (0..40).map(start).enumerate().collect();
        // Each rank has its own order; some are asked for again and again, and some abandoned.
        exchanges.rotate_left(wire.rank() * 13);
        if wire.rank() == 1 {
            exchanges.reverse();
        }
        for (i, mut exchange) in exchanges {
            if i % 5 == wire.rank() {
                continue;
            }
            while i % 3 == 0 && !exchange.poll().unwrap() {
                std::thread::yield_now();
            }
            for (from, message) in exchange.wait().unwrap().iter().enumerate() {
                assert_eq!(*message, bytes(from, i, i * 1000));
            }
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn long_messages_arrive_whole() {
    const LEN: usize = 64 << 20;
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        let own = Bytes::from(bytes(wire.rank(), 0, LEN + wire.rank()));
        let all = wire
            .start(call("all"), Outgoing::ToAll(own.clone()))
            .unwrap();
        let to_next = |to| match to == (wire.rank() + 1) % 3 {
            true => own.clone(),
            false => Bytes::from_static(b"short"),
        };
        let each = Outgoing::ToEach((0..3).map(to_next).collect());
        let each = wire.start(call("each"), each).unwrap().wait().unwrap();
        let all = all.wait().unwrap();
        let before = (wire.rank() + 2) % 3;
        for from in 0..3 {
            assert_eq!(all[from], bytes(from, 0, LEN + from));
            let expected = if from == before {
                &all[from][..]
            } else {
                b"short"
            };
            assert_eq!(each[from], expected);
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn some_ranks_may_send_to_all_and_some_to_each() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        for root in 0..3 {
            let message = |to| bytes(root, to, 100 * to).into();
            let outgoing = match wire.rank() == root {
                true => Outgoing::ToEach((0..3).map(message).collect()),
                false => Outgoing::ToAll(Bytes::from_static(b"to all")),
            };
            let all = wire
                .start(call("scatter"), outgoing)
                .unwrap()
                .wait()
                .unwrap();
            for (from, received) in all.iter().enumerate() {
                match from == root {
                    true => assert_eq!(*received, message(wire.rank())),
                    false => assert_eq!(&received[..], b"to all"),
                }
            }
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn messages_begin_where_numbers_can_be_read() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        let message = Bytes::from(bytes(wire.rank(), 0, 5 + wire.rank()));
        let outgoings = [
            Outgoing::ToAll(message.clone()),
            Outgoing::ToEach(vec![message; 3]),
        ];
        for outgoing in outgoings {
            let all = wire.start(call("odd"), outgoing).unwrap().wait().unwrap();
            let others = all
                .iter()
                .enumerate()
                .filter(|(from, _)| *from != wire.rank());
            for (_, message) in others {
                assert!(message.as_ptr().addr().is_multiple_of(align_of::<u128>()));
            }
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

// ---- groups

#[test]
fn subsets_that_overlap_exchange_by_themselves() {
    let Some(outcome) = on_ranks(4, LONG, |wire| {
        let rank = wire.rank();
        // In one order on all, though each is in other ones.
        let groups: Vec<(&[usize], _)> = [&[0, 1, 2][..], &[1, 2, 3], &[0, 3], &[2], &[0, 1, 2]]
            .into_iter()
            .filter(|ranks| ranks.contains(&rank))
            .map(|ranks| (ranks, wire.subset(ranks).unwrap()))
            .collect();
        let start = |(ranks, group): &(&[usize], Arc<dyn Wire>)| {
            assert_eq!(ranks[group.rank()], rank);
            gather(group, "ranks", vec![rank as u8]).unwrap()
        };
        let world = gather(wire, "world", vec![rank as u8]).unwrap();
        let exchanges: Vec<_> = groups.iter().map(start).collect();
        for (exchange, (ranks, _)) in exchanges.into_iter().zip(&groups).rev() {
            let all = exchange.wait().unwrap();
            assert!(all.iter().map(|m| m[0] as usize).eq(ranks.iter().copied()));
        }
        assert_eq!(world.wait().unwrap().len(), 4);
        if rank != 0 {
            // A subset of a subset, by the ranks of that.
            let (_, middle) = groups
                .iter()
                .find(|(ranks, _)| ranks == &[1, 2, 3])
                .unwrap();
            if middle.rank() != 1 {
                let ends = middle.subset(&[0, 2]).unwrap();
                let all = gather(&ends, "ends", vec![rank as u8]).unwrap().wait();
                assert_eq!(all.unwrap(), [vec![1], vec![3]]);
            }
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn a_subset_is_of_ascending_ranks_and_the_own() {
    let Some(outcome) = alone(|wire| {
        for ranks in [&[][..], &[0, 0], &[0, 1], &[1]] {
            let error = wire.subset(ranks).unwrap_err();
            assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error}");
        }
        wire.subset(&[0]).unwrap().world_size().to_string()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "1");
}

#[test]
fn an_exchange_goes_on_while_its_ranks_make_groups() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        let rank = wire.rank();
        let first = gather(wire, "first", bytes(rank, 0, 1 << 20)).unwrap();
        // Rank 2 makes no group, and needs the others' bytes before it goes on.
        if rank == 2 {
            first.wait().unwrap();
            return ok();
        }
        if rank == 1 {
            first.wait().unwrap();
            barrier(&wire.subset(&[0, 1]).unwrap()).unwrap();
        } else {
            barrier(&wire.subset(&[0, 1]).unwrap()).unwrap();
            first.wait().unwrap();
        }
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

// ---- processes

#[test]
fn a_process_without_mpirun_is_a_job_of_one() {
    let Some(outcome) = alone(|wire| {
        assert_eq!((wire.rank(), wire.world_size()), (0, 1));
        let all = gather(wire, "own", vec![1, 2]).unwrap().wait().unwrap();
        assert_eq!(all, [vec![1, 2]]);
        let each = Outgoing::ToEach(vec![Bytes::from_static(b"own")]);
        let each = wire.start(call("own"), each).unwrap().wait().unwrap();
        String::from_utf8(each[0].to_vec()).unwrap()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "own");
}

#[test]
fn mpi_is_initialised_once() {
    let Some(outcome) = alone(|_| MpiWire::init(LONG).unwrap_err().to_string()) else {
        return;
    };
    let said = same(outcome.succeeded());
    assert!(said.contains("has initialised MPI already"), "{said}");
}

#[test]
fn mpirun_starts_ranks_that_talk_over_mpi() {
    let Some(outcome) = on_processes(3, |say| {
        let result = launch_from_env(|pg| {
            let own = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0, 5.0], &pg.device());
            let sum = pg.all_reduce(own.clone() * (pg.rank() + 1) as f32, ReduceOp::Sum)?;
            let root = pg.broadcast(own * pg.rank() as f32, 2)?;
            let pair = pg.split(pg.rank() % 2)?;
            let ranks = pair.all_gather_bytes(vec![pg.rank() as u8])?;
            let numbers = [sum, root].map(|t| t.into_data().try_to_vec::<f32>().unwrap());
            let said = format!("{numbers:?} {ranks:?} {}", pg.description());
            Ok((pg.rank(), said))
        });
        let (rank, said) = result.unwrap();
        say(rank, said);
    }) else {
        return;
    };
    for (rank, said) in outcome.succeeded().into_iter().enumerate() {
        let numbers = "[[6.0, 12.0, 18.0, 24.0, 30.0], [2.0, 4.0, 6.0, 8.0, 10.0]]";
        let ranks = if rank == 1 { "[[1]]" } else { "[[0], [2]]" };
        let how = format!("rank {rank} of 3 (mpi, started by mpirun, local rank {rank})");
        assert_eq!(said, format!("{numbers} {ranks} {how}"));
    }
}

#[test]
fn an_error_of_a_rank_that_mpirun_started_is_the_cause_on_all_others() {
    let Some(outcome) = on_processes(3, |say| {
        // What `launch_from_env` returns is known when the rank has left, and `mpirun` may end it.
        _ = launch_from_env(|pg| {
            let rank = pg.rank();
            let waited = match rank {
                1 => Err(FsdpError::other("no data")),
                _ => pg.barrier(),
            };
            say(rank, waited.clone().unwrap_err().to_string());
            waited
        });
    }) else {
        return;
    };
    let said = outcome.failed();
    let told = "rank 1 failed: no data";
    assert_eq!(said, [told, "no data", told]);
}
