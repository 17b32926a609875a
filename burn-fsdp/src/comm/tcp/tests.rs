//! What a wire promises, and what ranks see of a job that is started or ends wrongly.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::connect::connect;
use super::{Job, TcpWire};
use crate::comm::Call;
use crate::comm::testing::{PATIENCE, TestJob, on_wires};
use crate::comm::wire::{Outgoing, Wire};
use crate::{FsdpError, Result};

/// For jobs in which a timeout is awaited: long enough to connect, as that has the same.
const SHORT: Duration = Duration::from_secs(3);

fn call(subject: &str) -> Call {
    Call::new("exchange", subject)
}

/// Sends this rank's number to all, and returns the numbers that come.
fn numbers(wire: &dyn Wire) -> Result<Vec<u8>> {
    let own = Bytes::from(vec![wire.rank() as u8]);
    let exchange = wire.start(call("numbers"), Outgoing::ToAll(own))?;
    Ok(exchange.wait()?.iter().map(|message| message[0]).collect())
}

fn error_of<T: std::fmt::Debug>(results: &[Result<T>], rank: usize) -> &FsdpError {
    results[rank].as_ref().unwrap_err()
}

/// The reason of a failed rendezvous.
fn reason(error: &FsdpError) -> &str {
    match error {
        FsdpError::Rendezvous { reason, .. } => reason,
        other => panic!("not a failed rendezvous: {other}"),
    }
}

/// Until the job has failed on this rank.
fn await_failure(wire: &dyn Wire) -> FsdpError {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(cause) = wire.failure() {
            return cause;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("rank {} has not been told of a failure", wire.rank());
}

// ---- exchanges

#[test]
fn messages_to_all_come_in_rank_order() {
    for world in 1..=4 {
        let expected: Vec<u8> = (0..world as u8).collect();
        for numbers in on_wires(world, |wire| numbers(&wire).unwrap()) {
            assert_eq!(numbers, expected);
        }
    }
}

#[test]
fn each_rank_gets_the_messages_meant_for_it_whatever_their_lengths() {
    // No bytes from rank 0 to rank 0, three from rank 1 to rank 2, and so on.
    let message = |from: usize, to: usize| vec![(16 * from + to) as u8; from + to];
    for world in 1..=4 {
        let received = on_wires(world, |wire| {
            let messages = (0..world).map(|to| message(wire.rank(), to).into());
            let outgoing = Outgoing::ToEach(messages.collect());
            wire.start(call("each"), outgoing).unwrap().wait().unwrap()
        });
        for (to, received) in received.into_iter().enumerate() {
            let expected: Vec<Vec<u8>> = (0..world).map(|from| message(from, to)).collect();
            assert_eq!(received, expected);
        }
    }
}

#[test]
fn messages_larger_than_any_buffer_of_a_socket_may_cross_each_other() {
    const LEN: usize = 24 << 20;
    let sums = on_wires(3, |wire| {
        let start = |byte: u8| {
            let message = Bytes::from(vec![byte; LEN]);
            wire.start(call("large"), Outgoing::ToAll(message)).unwrap()
        };
        let under_way: Vec<_> = (1..4).map(|i| start(i * 10 + wire.rank() as u8)).collect();
        let messages = under_way.into_iter().flat_map(|e| e.wait().unwrap());
        messages
            .map(|message| {
                assert!(message.len() == LEN && message.iter().all(|b| *b == message[0]));
                message[0]
            })
            .collect::<Vec<_>>()
    });
    assert!(
        sums.iter()
            .all(|bytes| bytes == &[10, 11, 12, 20, 21, 22, 30, 31, 32])
    );
}

#[test]
fn exchanges_may_be_waited_for_in_any_order() {
    let received = on_wires(3, |wire| {
        let start = |i: u8| {
            let message = Bytes::from(vec![i]);
            wire.start(call("one of many"), Outgoing::ToAll(message))
                .unwrap()
        };
        let under_way: Vec<_> = (0..20).map(start).collect();
        let backwards = under_way.into_iter().rev();
        backwards
            .map(|e| e.wait().unwrap()[1][0])
            .collect::<Vec<_>>()
    });
    let expected: Vec<u8> = (0..20).rev().collect();
    assert!(received.iter().all(|numbers| *numbers == expected));
}

#[test]
fn a_poll_tells_when_all_messages_are_here() {
    let polled = on_wires(2, |wire| {
        let mut exchange = wire
            .start(call("polled"), Outgoing::ToAll(Bytes::from_static(b"x")))
            .unwrap();
        let early = exchange.overdue();
        while !exchange.poll().unwrap() {
            thread::yield_now();
        }
        (early, exchange.wait().unwrap().len())
    });
    for (early, messages) in polled {
        assert!(matches!(early, FsdpError::Timeout { .. }), "{early}");
        assert_eq!(messages, 2);
    }
}

#[test]
fn an_abandoned_exchange_disturbs_no_other() {
    let received = on_wires(3, |wire| {
        for _ in 0..5 {
            let large = Bytes::from(vec![0; 1 << 16]);
            drop(
                wire.start(call("abandoned"), Outgoing::ToAll(large))
                    .unwrap(),
            );
        }
        let numbers = numbers(&wire).unwrap();
        (numbers, wire.links.inbox().open_exchanges())
    });
    for (numbers, open) in received {
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(open, 0);
    }
}

#[test]
fn groups_have_positions_of_their_own() {
    let received = on_wires(4, |wire| {
        let rank = wire.rank();
        let parity = wire.subset(&[rank % 2, rank % 2 + 2]).unwrap();
        let half = wire.subset(&[rank / 2 * 2, rank / 2 * 2 + 1]).unwrap();
        let half_again = wire.subset(&[rank / 2 * 2, rank / 2 * 2 + 1]).unwrap();
        let alone = half.subset(&[half.rank()]).unwrap();
        // The even ranks alone talk more.
        for _ in 0..3 * (1 - rank % 2) {
            assert_eq!(numbers(&*parity).unwrap(), [0, 1]);
        }
        assert_eq!(numbers(&*alone).unwrap(), [0]);
        let job_rank = Outgoing::ToAll(Bytes::from(vec![rank as u8]));
        let first = half.start(call("halves"), job_rank.clone()).unwrap();
        let second = half_again.start(call("halves again"), job_rank).unwrap();
        let second = second.wait().unwrap().concat();
        assert_eq!(first.wait().unwrap().concat(), second);
        assert_eq!(numbers(&wire).unwrap(), [0, 1, 2, 3]);
        (half.rank(), second)
    });
    let expected = [
        (0, vec![0, 1]),
        (1, vec![0, 1]),
        (0, vec![2, 3]),
        (1, vec![2, 3]),
    ];
    assert_eq!(received, expected);
}

#[test]
fn hosts_are_found_by_names_and_by_addresses_of_both_kinds() {
    for host in ["localhost", "::1"] {
        let job = match TestJob::at(host, 3, PATIENCE) {
            Ok(job) => job,
            Err(error) => {
                eprintln!("skipped: this host has no {host}: {error}");
                continue;
            }
        };
        let numbers = job.run(|rank| numbers(&job.connect(rank).unwrap()).unwrap());
        assert!(
            numbers.iter().all(|numbers| *numbers == [0, 1, 2]),
            "{host}"
        );
    }
}

// ---- failures

#[test]
fn different_calls_at_one_position_are_named_on_all_ranks() {
    let results = on_wires(3, |wire| {
        numbers(&wire)?;
        let subject = ["a barrier", "a barrier", "a gather"][wire.rank()];
        let exchange = wire.start(call(subject), Outgoing::ToAll(Bytes::new()))?;
        let waited = exchange.wait();
        // None leaves before all know.
        await_failure(&wire);
        waited
    });
    for rank in 0..3 {
        let FsdpError::CollectiveMismatch {
            call_a,
            rank_b,
            call_b,
            ..
        } = error_of(&results, rank)
        else {
            panic!("{:?}", results[rank]);
        };
        assert_eq!(*rank_b, 2);
        assert_eq!(call_a, "exchange of a barrier");
        assert_eq!(call_b, "exchange of a gather");
    }
}

#[test]
fn calls_that_differ_in_what_no_text_shows_do_not_match() {
    let results = on_wires(2, |wire| {
        let call = call("the same").with_detail(wire.rank());
        wire.start(call, Outgoing::ToAll(Bytes::new()))?.wait()
    });
    for rank in 0..2 {
        let error = error_of(&results, rank);
        assert!(
            matches!(error, FsdpError::CollectiveMismatch { .. }),
            "{error}"
        );
    }
}

#[test]
fn a_failure_reaches_ranks_that_wait_in_any_group_and_is_for_good() {
    let causes = on_wires(3, |wire| {
        match wire.rank() {
            0 => wire.fail(FsdpError::Aborted {
                rank: 0,
                reason: "enough".into(),
            }),
            1 => {
                // Rank 2 never comes.
                let waited = numbers(&*wire.subset(&[1, 2]).unwrap());
                assert!(matches!(waited, Err(FsdpError::Aborted { rank: 0, .. })));
            }
            _ => {}
        }
        let cause = await_failure(&wire);
        wire.fail(FsdpError::other("later"));
        let later = wire.start(call("later"), Outgoing::ToAll(Bytes::new()));
        (cause, later.map(drop).unwrap_err())
    });
    for (cause, later) in causes {
        for error in [cause, later] {
            assert!(
                matches!(error, FsdpError::Aborted { rank: 0, .. }),
                "{error}"
            );
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_by_all_others() {
    let job = TestJob::new(3, PATIENCE);
    let results = job.run(|rank| {
        if rank == 1 {
            // As the operating system does it for a process that is killed.
            drop(connect(&job.of(1), None).unwrap());
            return Ok(Vec::new());
        }
        let wire = job.connect(rank).unwrap();
        let waited = numbers(&wire);
        await_failure(&wire);
        waited
    });
    for rank in [0, 2] {
        let FsdpError::RankFailed { rank: 1, cause } = error_of(&results, rank) else {
            panic!("{:?}", results[rank]);
        };
        assert_eq!(cause, "its process has ended");
    }
}

#[test]
fn a_rank_that_has_returned_is_named_by_those_who_wait_for_it() {
    let results = on_wires(3, |wire| {
        numbers(&wire)?;
        match wire.rank() {
            2 => Ok(Vec::new()),
            _ => numbers(&wire),
        }
    });
    for rank in [0, 1] {
        let error = error_of(&results, rank);
        let is_named = matches!(error, FsdpError::RankReturned { gone: 2, .. });
        assert!(is_named, "{error}");
    }
}

#[test]
fn what_a_rank_sent_before_it_returned_is_received() {
    let received = on_wires(2, |wire| {
        let large = Outgoing::ToAll(Bytes::from(vec![7; 8 << 20]));
        let exchange = wire.start(call("the last"), large).unwrap();
        match wire.rank() {
            0 => 0,
            _ => exchange.wait().unwrap()[0].len(),
        }
    });
    assert_eq!(received, [0, 8 << 20]);
}

#[test]
fn a_rank_that_panics_is_named_by_the_others() {
    let job = TestJob::new(2, PATIENCE);
    let results = job.run(|rank| {
        let wire = job.connect(rank).unwrap();
        if rank == 1 {
            let panics = std::panic::AssertUnwindSafe(|| {
                let _wire = wire;
                panic!("on purpose");
            });
            return std::panic::catch_unwind(panics).map_err(|_| FsdpError::other("panicked"));
        }
        numbers(&wire).map(drop)
    });
    let error = error_of(&results, 0);
    assert!(
        matches!(error, FsdpError::RankFailed { rank: 1, .. }),
        "{error}"
    );
}

#[test]
fn a_wire_that_has_been_left_starts_nothing() {
    let results = on_wires(2, |wire| {
        numbers(&wire)?;
        wire.leave();
        numbers(&wire)
    });
    for rank in 0..2 {
        let text = error_of(&results, rank).to_string();
        assert!(text.contains("has returned"), "{text}");
    }
}

#[test]
fn a_timeout_names_the_missing_ranks_and_what_all_called_last() {
    let job = TestJob::new(3, SHORT);
    let results = job.run(|rank| {
        let wire = job.connect(rank).unwrap();
        numbers(&wire)?;
        match rank {
            0 => wire
                .start(call("something more"), Outgoing::ToAll(Bytes::new()))?
                .wait(),
            _ => Err(await_failure(&wire)),
        }
    });
    for rank in 0..3 {
        let FsdpError::Timeout {
            rank: 0,
            call,
            missing,
            last_calls,
            ..
        } = error_of(&results, rank)
        else {
            panic!("{:?}", results[rank]);
        };
        assert_eq!(missing, &[1, 2]);
        assert_eq!(call, "exchange of something more");
        assert_eq!(last_calls[0], "exchange of something more");
        assert_eq!(last_calls[1], "exchange of numbers");
    }
}

#[test]
fn an_oversized_frame_is_refused() {
    let job = TestJob::new(2, PATIENCE);
    let results = job.run(|rank| {
        if rank == 1 {
            let mut streams = connect(&job.of(1), None).unwrap();
            let stream = streams[0].as_mut().unwrap();
            let mut head = [0xff; 40];
            head[..8].copy_from_slice(&1u64.to_le_bytes());
            stream.write_all(&head).unwrap();
            // Until rank 0 has closed the connection.
            let _ = stream.read_to_end(&mut Vec::new());
            return Ok(Vec::new());
        }
        numbers(&job.connect(rank).unwrap())
    });
    let FsdpError::RankFailed { rank: 1, cause } = error_of(&results, 0) else {
        panic!("{:?}", results[0]);
    };
    assert!(cause.contains("bytes, of which"), "{cause}");
}

// ---- rendezvous

/// What the ranks of a job return that all start at once, of jobs that need not fit.
fn connect_all(jobs: Vec<(Job, Option<TcpListener>)>) -> Vec<Result<TcpWire>> {
    thread::scope(|scope| {
        let connect = |(job, listener)| scope.spawn(move || TcpWire::connect_at(&job, listener));
        let threads: Vec<_> = jobs.into_iter().map(connect).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn strangers_do_not_disturb_a_job() {
    let job = TestJob::new(2, PATIENCE);
    let address = job.listener.local_addr().unwrap();
    let rank_1 = job.of(1);
    let numbers = thread::scope(|scope| {
        let rank_0 = scope.spawn(|| numbers(&job.connect(0).unwrap()));
        let mut web = TcpStream::connect(address).unwrap();
        web.write_all(b"GET / HTTP/1.1\r\nHost: rank-0\r\nAccept: */*\r\n\r\n")
            .unwrap();
        // It is told nothing.
        assert!(
            web.read_to_end(&mut Vec::new())
                .map_or(true, |len| len == 0)
        );
        drop(TcpStream::connect(address).unwrap());
        let silent = TcpStream::connect(address).unwrap();
        let mut impostor = rank_1.clone();
        impostor.secret = "a guess".to_string();
        let error = TcpWire::connect(&impostor).map(drop).unwrap_err();
        assert_eq!(reason(&error), "it has another job secret");
        let wire = TcpWire::connect(&rank_1).unwrap();
        let numbers = numbers(&wire);
        drop(silent);
        rank_0.join().unwrap().unwrap();
        numbers
    });
    assert_eq!(numbers.unwrap(), [0, 1]);
}

#[test]
fn a_rank_without_the_secret_can_not_answer_the_challenge_of_rank_0() {
    let job = TestJob::new(2, PATIENCE);
    let mut stream = TcpStream::connect(job.listener.local_addr().unwrap()).unwrap();
    thread::scope(|scope| {
        let rank_0 = scope.spawn(|| job.connect(0));
        // The opening of a rank, then a proof made up.
        let opening = [&b"burnfsdp"[..], &1u32.to_le_bytes(), &[7; 16]].concat();
        stream.write_all(&opening).unwrap();
        let mut theirs = [0; 28 + 32];
        stream.read_exact(&mut theirs).unwrap();
        let hello = [1u64, 2, u64::MAX].map(u64::to_le_bytes).concat();
        stream.write_all(&[&hello[..], &[0; 32]].concat()).unwrap();
        assert!(
            stream
                .read_to_end(&mut Vec::new())
                .map_or(true, |len| len == 0)
        );
        let rank_1 = job.connect(1).unwrap();
        assert_eq!(rank_0.join().unwrap().unwrap().world_size(), 2);
        drop(rank_1);
    });
}

#[test]
fn something_else_on_the_port_is_told_from_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut job = TestJob::new(2, PATIENCE).of(1);
    job.port = port;
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH_9.7\r\n").unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        TcpWire::connect(&job).map(drop).unwrap_err()
    });
    assert!(
        reason(&error).contains("no process of a burn-fsdp job"),
        "{error}"
    );
}

#[test]
fn two_processes_that_claim_one_rank_fail_the_job() {
    let job = TestJob::new(3, PATIENCE);
    let results = connect_all(vec![
        (job.of(0), job.listener_of(0)),
        (job.of(1), None),
        (job.of(1), None),
    ]);
    for rank in 0..3 {
        let reason = reason(error_of(&results, rank));
        assert_eq!(reason, "two processes say that they are rank 1");
    }
}

#[test]
fn world_sizes_that_differ_fail_the_job() {
    let job = TestJob::new(3, PATIENCE);
    let mut other = job.of(2);
    other.world_size = 4;
    let results = connect_all(vec![
        (job.of(0), job.listener_of(0)),
        (job.of(1), None),
        (other, None),
    ]);
    for rank in 0..3 {
        let reason = reason(error_of(&results, rank));
        assert_eq!(reason, "rank 2 was started for 4 ranks, rank 0 for 3");
    }
}

#[test]
fn ranks_that_never_come_are_named() {
    let job = TestJob::new(4, Duration::from_secs(1));
    let results = connect_all(vec![(job.of(0), job.listener_of(0)), (job.of(2), None)]);
    for rank in 0..2 {
        let reason = reason(error_of(&results, rank));
        assert!(
            reason.contains("ranks [1, 3] of 4 have not come"),
            "{reason}"
        );
    }
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named() {
    use super::store::Store;
    for die in [drop, |store: Store| {
        store.die_asking("what rank 1 has to tell")
    }] {
        let job = TestJob::new(3, PATIENCE);
        let error = thread::scope(|scope| {
            let rank_0 = scope.spawn(|| job.connect(0).map(drop));
            die(Store::connect(&job.of(2)).unwrap());
            rank_0.join().unwrap().unwrap_err()
        });
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 2, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_rank_0_that_can_not_be_reached_is_named_by_its_address() {
    let mut job = TestJob::new(2, Duration::from_millis(300)).of(1);
    // The listener is gone with the test job.
    let error = TcpWire::connect(&job).map(drop).unwrap_err();
    let text = error.to_string();
    let address = format!("127.0.0.1:{}", job.port);
    assert!(text.contains(&address) && text.contains("300ms"), "{text}");
    job.host = "no-such-host.invalid".to_string();
    let error = TcpWire::connect(&job).map(drop).unwrap_err();
    assert!(
        error.to_string().contains("no-such-host.invalid"),
        "{error}"
    );
}

#[test]
fn a_taken_port_is_an_error_of_rank_0() {
    let job = TestJob::new(1, PATIENCE);
    let error = TcpWire::connect(&job.of(0)).map(drop).unwrap_err();
    assert!(reason(&error).contains("cannot listen there"), "{error}");
}

#[test]
fn a_rank_beyond_the_world_is_refused() {
    let job = TestJob::new(2, PATIENCE).of(2);
    let error = TcpWire::connect(&job).map(drop).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("rank 2 is no rank of a job of 2"),
        "{error}"
    );
}

#[test]
fn the_secret_is_not_shown() {
    let job = TestJob::new(1, PATIENCE);
    assert!(!format!("{:?}", job.of(0)).contains("secret of the tests"));
    let wire: Arc<dyn Wire> = Arc::new(job.connect(0).unwrap());
    assert!(!format!("{wire:?}").contains("secret of the tests"));
}
