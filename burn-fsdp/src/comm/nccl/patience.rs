//! Calls of NCCL that block until all ranks make them.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::driver::Outcome;
use crate::comm::wire::Wire;
use crate::{FsdpError, Result};

/// How often a rank that waits looks whether the job has failed.
const NAP: Duration = Duration::from_millis(100);

/// Runs `call`, which blocks until other ranks make it too, on a thread of its own, and gives up on
/// it when the job has failed or the timeout has passed. What has been given up on may block for
/// ever: NCCL can't abort what has not begun.
pub(super) fn patiently<T: Send + 'static>(
    wire: &dyn Wire,
    what: &str,
    call: impl FnOnce() -> Outcome<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = channel();
    // Nobody receives what comes too late.
    let run = move || sender.send(call()).unwrap_or_default();
    std::thread::Builder::new()
        .name("nccl-join".to_string())
        .spawn(run)
        .map_err(FsdpError::other)?;
    let rank = wire.rank();
    let failed = |cause| FsdpError::Nccl {
        rank,
        call: what.to_string(),
        cause,
    };
    let start = Instant::now();
    let outcome = loop {
        match receiver.recv_timeout(NAP.min(wire.timeout())) {
            Ok(outcome) => break outcome.map_err(failed),
            Err(RecvTimeoutError::Disconnected) => break Err(failed("it panicked".to_string())),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(cause) = wire.failure() {
            break Err(cause);
        }
        if start.elapsed() >= wire.timeout() {
            break Err(FsdpError::Timeout {
                rank,
                call: what.to_string(),
                after: wire.timeout(),
                missing: Vec::new(),
                last_calls: Vec::new(),
            });
        }
    };
    outcome.map_err(|cause| {
        wire.fail(cause.clone());
        wire.failure().unwrap_or(cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::local_wire::LocalWire;
    use crate::comm::rendezvous::Launch;

    /// The ends of a wire between two ranks, of which none will come to join.
    fn wires(timeout: Duration) -> [LocalWire; 2] {
        let mut seats = Launch::new(2, timeout).seats().into_iter();
        [(); 2].map(|()| LocalWire::new(seats.next().expect("there are two seats")))
    }

    /// What becomes of a rank that joins alone; `meanwhile` on the other.
    fn join_alone(timeout: Duration, meanwhile: impl FnOnce(&LocalWire)) -> FsdpError {
        let [wire, other] = wires(timeout);
        let (release, blocked) = channel::<()>();
        let join = move || blocked.recv().map_err(|error| error.to_string());
        meanwhile(&other);
        let error = patiently(&wire, "joining", join).unwrap_err();
        drop(release);
        error
    }

    #[test]
    fn a_rank_that_waits_to_join_hears_of_a_failure_elsewhere() {
        let fail = |other: &LocalWire| other.fail(FsdpError::argument("no memory"));
        let error = join_alone(Duration::from_secs(60), fail);
        assert_eq!(error.to_string(), "no memory");
    }

    #[test]
    fn a_rank_that_waits_to_join_gives_up_in_the_end() {
        let error = join_alone(Duration::from_millis(50), |_| {});
        assert!(
            matches!(error, FsdpError::Timeout { rank: 0, .. }),
            "{error}"
        );
    }

    #[test]
    fn what_fails_to_join_fails_the_job() {
        let [wire, other] = wires(Duration::from_secs(60));
        let error = patiently(&wire, "joining", || Err::<(), _>("no route".to_string()));
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "rank 0: NCCL failed in joining: no route");
        assert_eq!(other.failure().expect("it has failed").to_string(), error);
    }
}
