//! What ranks see of a job that fails, and of ranks that end.

use std::sync::Arc;
use std::time::Duration;

use super::job::{LONG, alone, on_ranks};
use super::{barrier, bytes, gather, ok, same};
use crate::comm::wire::Wire;
use crate::{FsdpError, Result};

/// The error of a rank that must have one, and that the job has failed with.
fn error_of<T: std::fmt::Debug>(wire: &Arc<dyn Wire>, result: Result<T>) -> String {
    let error = result.unwrap_err().to_string();
    assert_eq!(wire.failure().unwrap().to_string(), error);
    error
}

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
fn a_mismatch_in_one_group_fails_the_others() {
    let Some(outcome) = on_ranks(4, LONG, |wire| {
        let pair = wire.rank() / 2 * 2;
        let group = wire.subset(&[pair, pair + 1]).unwrap();
        barrier(wire).unwrap();
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
fn a_rank_that_polls_can_ask_who_is_missing() {
    let Some(outcome) = on_ranks(2, LONG, |wire| {
        if wire.rank() == 0 {
            let mut exchange = gather(wire, "weights", Vec::new()).unwrap();
            assert!(!exchange.poll().unwrap());
            let overdue = exchange.overdue();
            let expected = |error: &FsdpError| matches!(error, FsdpError::Timeout { missing, .. } if missing == &[1]);
            assert!(expected(&overdue), "{overdue}");
            wire.fail(overdue);
        }
        while wire.failure().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        error_of(wire, barrier(wire))
    }) else {
        return;
    };
    assert!(same(outcome.failed()).contains("waiting for ranks [1]"));
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
fn a_rank_that_has_left_starts_nothing() {
    let Some(outcome) = alone(|wire| {
        wire.leave();
        wire.leave();
        barrier(wire).unwrap_err().to_string()
    }) else {
        return;
    };
    let said = same(outcome.succeeded());
    assert_eq!(said, "rank 0 has returned, and its process group ended");
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
