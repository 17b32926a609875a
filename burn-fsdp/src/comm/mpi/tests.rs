//! What ranks that are processes see. Each test starts itself again under `mpirun`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::MpiWire;
use crate::comm::Call;
use crate::comm::wire::{Exchange, Outgoing, Wire};
use crate::{FsdpError, Result};

// ---- running ranks

/// Set for the processes that are ranks: where each leaves what it has to say.
const REPORTS: &str = "BURN_FSDP_MPI_TEST_REPORTS";
/// After which `mpirun` ends a job, in seconds, and after which it is ended itself.
const JOB_LIMIT: &str = "100";
const LIMIT: Duration = Duration::from_secs(120);

/// No wait of a test gets here unless something is wrong.
const LONG: Duration = Duration::from_secs(60);

/// How a job ended.
struct Outcome {
    /// What each rank said, in rank order; none if it did not get to it.
    said: Vec<Option<String>>,
    status: ExitStatus,
    output: String,
}

impl Outcome {
    /// What the ranks said, if all have and MPI has nothing to complain about.
    fn succeeded(self) -> Vec<String> {
        assert!(self.status.success(), "{}\n{}", self.status, self.output);
        self.all_said()
    }

    /// What the ranks said after a failure, which `mpirun` reports.
    fn failed(self) -> Vec<String> {
        assert!(!self.status.success(), "{}", self.output);
        self.all_said()
    }

    fn all_said(self) -> Vec<String> {
        let said = self.said.into_iter().collect::<Option<_>>();
        said.unwrap_or_else(|| panic!("a rank said nothing: {}\n{}", self.status, self.output))
    }
}

/// Runs `rank` on `world_size` ranks. In a process that is one of them it does that; `None` then.
fn on_ranks<F>(world_size: usize, timeout: Duration, rank: F) -> Option<Outcome>
where
    F: FnOnce(&Arc<dyn Wire>) -> String,
{
    if is_rank(|| MpiWire::init(timeout).unwrap(), rank) {
        return None;
    }
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &world_size.to_string()]);
    mpirun.arg(std::env::current_exe().unwrap());
    mpirun
        .envs([
            ("MPIEXEC_TIMEOUT", JOB_LIMIT),
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ])
        .args(this_test::<F>());
    Some(outcome_of(mpirun, world_size))
}

/// Runs `rank` in a process of its own that `mpirun` has nothing to do with.
fn alone<F>(rank: F) -> Option<Outcome>
where
    F: FnOnce(&Arc<dyn Wire>) -> String,
{
    if is_rank(|| MpiWire::init(LONG).unwrap(), rank) {
        return None;
    }
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(this_test::<F>());
    Some(outcome_of(process, 1))
}

/// Does a rank's work if this process is one.
fn is_rank(
    init: impl FnOnce() -> Arc<dyn Wire>,
    rank: impl FnOnce(&Arc<dyn Wire>) -> String,
) -> bool {
    let Some(reports) = std::env::var_os(REPORTS) else {
        return false;
    };
    let wire = init();
    let said = rank(&wire);
    fs::write(report(Path::new(&reports), wire.rank()), said).unwrap();
    true
}

fn report(reports: &Path, rank: usize) -> PathBuf {
    reports.join(rank.to_string())
}

/// The arguments that make the test program run only the test that `F` is a closure of.
fn this_test<F>() -> [String; 3] {
    let path = std::any::type_name::<F>().trim_end_matches("::{{closure}}");
    let (_crate, test) = path.split_once("::").unwrap();
    [test.into(), "--exact".into(), "--nocapture".into()]
}

fn outcome_of(mut command: Command, world_size: usize) -> Outcome {
    let stamp = Instant::now();
    let name = format!("burn-fsdp-mpi-{}-{stamp:?}", std::process::id());
    let reports = std::env::temp_dir().join(name.replace(|c: char| !c.is_alphanumeric(), "-"));
    fs::create_dir(&reports).unwrap();
    let output = reports.join("output");
    let file = File::create(&output).unwrap();
    command
        .env(REPORTS, &reports)
        .stdout(file.try_clone().unwrap())
        .stderr(file);
    let mut child = command.spawn().unwrap_or_else(|error| {
        panic!(
            "these tests start ranks by mpirun, which cannot be run ({error}); on Debian and \
             Ubuntu install openmpi-bin and libopenmpi-dev"
        )
    });
    let status = wait(&mut child);
    let outcome = Outcome {
        said: (0..world_size)
            .map(|rank| fs::read_to_string(report(&reports, rank)).ok())
            .collect(),
        status,
        output: String::from_utf8_lossy(&fs::read(&output).unwrap()).into_owned(),
    };
    fs::remove_dir_all(&reports).unwrap();
    outcome
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The ranks end when they lose it.
    child.kill().unwrap();
    child.wait().unwrap()
}

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

/// The error of a rank that must have one, and that the job has failed with.
fn error_of<T: std::fmt::Debug>(wire: &Arc<dyn Wire>, result: Result<T>) -> String {
    let error = result.unwrap_err().to_string();
    assert_eq!(wire.failure().unwrap().to_string(), error);
    error
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
fn a_call_with_a_wrong_number_of_messages_is_refused() {
    let Some(outcome) = on_ranks(2, LONG, |wire| {
        let outgoing = Outgoing::ToEach(vec![Bytes::new()]);
        let error = wire.start(call("one"), outgoing).unwrap_err();
        barrier(wire).unwrap();
        error.to_string()
    }) else {
        return;
    };
    let said = same(outcome.succeeded());
    assert_eq!(said, "1 messages to the ranks of a group of 2");
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

// ---- failures

#[test]
fn a_mismatch_names_both_ranks_and_calls_on_all() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        barrier(wire).unwrap();
        let subject = if wire.rank() == 1 {
            "layer 7"
        } else {
            "layer 6"
        };
        let exchange = gather(wire, subject, vec![0; 1000]);
        let error = error_of(wire, exchange.and_then(|exchange| exchange.wait()));
        assert!(matches!(
            barrier(wire).unwrap_err(),
            FsdpError::CollectiveMismatch { .. }
        ));
        error
    }) else {
        return;
    };
    let error = same(outcome.failed());
    for part in ["rank 0 called", "layer 6", "rank 1 called", "layer 7"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn messages_to_all_and_to_each_do_not_match() {
    let Some(outcome) = on_ranks(2, LONG, |wire| {
        let outgoing = match wire.rank() {
            0 => Outgoing::ToAll(Bytes::new()),
            _ => Outgoing::ToEach(vec![Bytes::new(); 2]),
        };
        let exchange = wire.start(call("either"), outgoing);
        error_of(wire, exchange.and_then(|exchange| exchange.wait()))
    }) else {
        return;
    };
    let error = same(outcome.failed());
    assert!(error.starts_with("collective mismatch"), "{error}");
}

#[test]
fn a_mismatch_in_one_group_fails_the_others() {
    let Some(outcome) = on_ranks(4, LONG, |wire| {
        let pair = wire.rank() / 2 * 2;
        let group = wire.subset(&[pair, pair + 1]).unwrap();
        let error = if wire.rank() == 3 {
            // Rank 2 has started something else, and the other pair waits for ranks 2 and 3.
            gather(&group, "this", Vec::new()).unwrap().wait()
        } else if wire.rank() == 2 {
            gather(&group, "that", Vec::new()).unwrap().wait()
        } else {
            barrier(wire)
        };
        error_of(wire, error)
    }) else {
        return;
    };
    let error = same(outcome.failed());
    assert!(error.contains("rank 2 called exchange of that"), "{error}");
}

#[test]
fn an_abort_reaches_ranks_that_wait() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        if wire.rank() == 2 {
            let reason = "the loss is NaN".into();
            wire.fail(FsdpError::Aborted { rank: 2, reason });
        }
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    let error = same(outcome.failed());
    assert_eq!(error, "rank 2 aborted the group: the loss is NaN");
}

#[test]
fn an_error_of_one_rank_is_returned_by_all() {
    let Some(outcome) = on_ranks(4, LONG, |wire| {
        // Some bytes are under way, and stay so.
        let long = gather(wire, "long", vec![0; 8 << 20]).unwrap();
        if wire.rank() == 1 {
            wire.fail(FsdpError::argument("no such file"));
        }
        drop(long);
        error_of(
            wire,
            gather(wire, "next", Vec::new())
                .and_then(|e| e.wait())
                .and_then(|_| barrier(wire)),
        )
    }) else {
        return;
    };
    assert_eq!(same(outcome.failed()), "rank 1 failed: no such file");
}

#[test]
fn failures_at_the_same_time_have_one_cause() {
    let Some(outcome) = on_ranks(4, LONG, |wire| {
        barrier(wire).unwrap();
        let rank = wire.rank();
        let reason = format!("reason {rank}");
        wire.fail(FsdpError::Aborted { rank, reason });
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    assert!(same(outcome.failed()).contains("aborted the group: reason"));
}

#[test]
fn a_rank_that_panics_is_named_by_the_others() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        barrier(wire).unwrap();
        assert_ne!(wire.rank(), 1, "rank 1 panics");
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    assert!(!outcome.status.success());
    let said = |rank: usize| outcome.said[rank].as_deref();
    assert_eq!(said(0), Some("rank 1 failed: it panicked"));
    assert_eq!(said(1), None);
    assert_eq!(said(2), Some("rank 1 failed: it panicked"));
}

#[test]
fn a_rank_that_returns_early_is_named_by_those_that_wait() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        barrier(wire).unwrap();
        if wire.rank() == 1 {
            return "early".into();
        }
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    let said = outcome.failed();
    assert_eq!(said[1], "early");
    assert_eq!(said[0], said[2]);
    let expected = "waits in exchange of nothing for rank 1, which has already returned";
    assert!(said[0].contains(expected), "{}", said[0]);
}

#[test]
fn a_rank_may_return_before_the_others_have_finished() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        let pair = (wire.rank() != 1).then(|| wire.subset(&[0, 2]).unwrap());
        let last = gather(wire, "last", bytes(wire.rank(), 0, 1 << 20)).unwrap();
        // Rank 1 does not wait for its last exchange, and has none after it.
        let Some(pair) = pair else {
            return ok();
        };
        for _ in 0..100 {
            barrier(&pair).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(last.wait().unwrap()[1], bytes(1, 0, 1 << 20));
        ok()
    }) else {
        return;
    };
    assert_eq!(same(outcome.succeeded()), "ok");
}

#[test]
fn a_wait_that_is_too_long_names_who_is_missing_and_what_all_called_last() {
    let Some(outcome) = on_ranks(3, Duration::from_millis(500), |wire| {
        barrier(wire).unwrap();
        if wire.rank() != 2 {
            return error_of(
                wire,
                gather(wire, "weights", Vec::new()).and_then(|e| e.wait()),
            );
        }
        while wire.failure().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    let error = same(outcome.failed());
    for part in [
        "exchange of weights timed out",
        "waiting for ranks [2]",
        "rank 0: exchange of weights; rank 1: exchange of weights; rank 2: exchange of nothing",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_group_that_a_rank_does_not_join_times_out() {
    let Some(outcome) = on_ranks(3, Duration::from_millis(500), |wire| {
        if wire.rank() != 1 {
            return error_of(wire, wire.subset(&[0, 1, 2]).map(drop));
        }
        while wire.failure().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    let error = same(outcome.failed());
    assert!(
        error.contains("subset of the ranks [0, 1, 2] timed out"),
        "{error}"
    );
    assert!(error.contains("waiting for ranks [1]"), "{error}");
}

#[test]
fn a_rank_that_exits_hard_ends_the_job() {
    let Some(outcome) = on_ranks(3, LONG, |wire| {
        barrier(wire).unwrap();
        if wire.rank() == 1 {
            std::process::exit(3);
        }
        barrier(wire).unwrap_err().to_string()
    }) else {
        return;
    };
    assert!(!outcome.status.success());
    assert_eq!(outcome.said[1], None);
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
