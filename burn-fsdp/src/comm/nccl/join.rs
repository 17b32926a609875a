//! How ranks form an NCCL group over a group that they have already.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::driver::{Driver, Outcome, UniqueId};
use super::engine::NcclEngine;
use crate::comm::wire::Wire;
use crate::comm::{Call, Engine};
use crate::{FsdpError, Result};

/// How often a rank that joins looks whether the job has failed.
const NAP: Duration = Duration::from_millis(100);

/// What a rank tells the others of itself: its device, and the id if it is rank 0; or why it can't.
type Introduction = Result<(String, Option<Vec<u8>>), String>;

impl<D: Driver> NcclEngine<D> {
    /// The engine of this rank of `group` over NCCL, which all ranks must form, each with its own
    /// device. `group` remains; the engine talks over a wire of its own between its ranks.
    ///
    /// A rank that has no driver takes part too, so that all ranks fail.
    pub(super) fn form(group: &dyn Engine, driver: Result<Arc<D>>) -> Result<Self> {
        let introduce = |driver: &Arc<D>| {
            let id = (group.rank() == 0).then(|| driver.unique_id()).transpose();
            let introduction = id.and_then(|id| Ok((driver.identity()?, id.map(Vec::from))));
            introduction.map_err(|reason| FsdpError::NcclUnavailable { reason })
        };
        let own = driver
            .as_ref()
            .map_err(FsdpError::clone)
            .and_then(introduce);
        let told: Introduction = own.clone().map_err(|error| error.to_string());
        let message = serde_json::to_vec(&told).map_err(FsdpError::other)?;
        let all = group.exchange(Call::new("forming", "an NCCL group"), message)?;
        let read = |message: &Arc<Vec<u8>>| serde_json::from_slice(message).unwrap_or_else(unread);
        let id = agree(own, all.iter().map(read).collect())?;
        let driver = driver?;
        let wire = group.control()?;
        let (joining, rank, world_size) = (driver.clone(), wire.rank(), wire.world_size());
        let join = move || joining.join(&id, rank, world_size);
        let communicator = patiently(&*wire, "joining the communicator", join)?;
        Self::new(driver, wire, communicator)
    }
}

fn unread(error: serde_json::Error) -> Introduction {
    Err(format!("its introduction can't be read: {error}"))
}

/// The id to join by, if all ranks can, each with a device of its own.
fn agree(own: Result<(String, Option<Vec<u8>>)>, all: Vec<Introduction>) -> Result<UniqueId> {
    own?;
    let mut ranks = HashMap::<String, usize>::new();
    let mut ids = Vec::new();
    for (rank, introduction) in all.into_iter().enumerate() {
        let (device, id) = introduction.map_err(|cause| FsdpError::RankFailed { rank, cause })?;
        ids.extend(id);
        if let Some(other) = ranks.insert(device.clone(), rank) {
            return Err(FsdpError::argument(format!(
                "ranks {other} and {rank} are both on {device}; NCCL needs a GPU for each rank: \
                 choose it by the rank's number on its host"
            )));
        }
    }
    let id = ids.pop().and_then(|id| id.try_into().ok());
    id.ok_or_else(|| FsdpError::argument("rank 0 has told no id to join by"))
}

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

    #[test]
    fn ranks_that_share_a_gpu_are_told_so() {
        let own = || Ok(("GPU-a".to_string(), Some(vec![0; 128])));
        let other = |device: &str| Ok((device.to_string(), None));
        let all = vec![Ok(own().unwrap()), other("GPU-b"), other("GPU-a")];
        let error = agree(own(), all).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 2 are both on GPU-a"), "{error}");
    }

    #[test]
    fn all_ranks_join_by_the_id_of_rank_0() {
        let own = || Ok(("GPU-b".to_string(), None));
        let first = |id: Vec<u8>| vec![Ok(("GPU-a".to_string(), Some(id))), own()];
        let as_read = |own: Result<_, String>| own.map_err(FsdpError::argument);
        let id = agree(as_read(own()), first(vec![7; 128])).unwrap();
        assert_eq!(id, [7; 128]);
        let error = agree(as_read(own()), first(vec![7; 3])).unwrap_err();
        assert!(error.to_string().contains("no id"), "{error}");
    }

    #[test]
    fn a_rank_without_nccl_is_named_to_the_others_and_keeps_its_own_error() {
        let cause = "no libnccl".to_string();
        let own = Ok(("GPU-a".to_string(), Some(vec![0; 128])));
        let all = || {
            vec![
                Ok(("GPU-a".to_string(), Some(vec![0; 128]))),
                Err(cause.clone()),
            ]
        };
        let error = agree(own, all()).unwrap_err();
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 1, .. }),
            "{error}"
        );
        let own = Err(FsdpError::NcclUnavailable {
            reason: cause.clone(),
        });
        let error = agree(own, all()).unwrap_err();
        assert!(
            matches!(error, FsdpError::NcclUnavailable { .. }),
            "{error}"
        );
    }
}
