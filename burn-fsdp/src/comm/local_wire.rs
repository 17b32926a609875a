//! The wire between ranks that are threads of one process: nothing is sent, messages are shared.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::Call;
use super::rendezvous::{Group, Seat, Ticket};
use super::wire::{Exchange, Outgoing, Wire};
use crate::{FsdpError, Result};

/// One rank's end.
#[derive(Debug)]
pub(super) struct LocalWire {
    seat: Seat,
    /// How often this rank has made the wire between these ranks.
    subsets: Mutex<HashMap<Vec<usize>, u64>>,
}

impl LocalWire {
    pub(super) fn new(seat: Seat) -> Self {
        Self {
            seat,
            subsets: Mutex::default(),
        }
    }

    fn group(&self) -> &Arc<Group> {
        &self.seat.group
    }
}

impl Wire for LocalWire {
    fn rank(&self) -> usize {
        self.seat.rank
    }

    fn world_size(&self) -> usize {
        self.group().size()
    }

    fn timeout(&self) -> Duration {
        self.group().launch.timeout
    }

    fn start(&self, call: Call, outgoing: Outgoing) -> Result<Box<dyn Exchange>> {
        let ticket = self.seat.enter(call, || Arc::new(()))?;
        ticket.arrive(Arc::new(outgoing));
        Ok(Box::new(LocalExchange {
            ticket,
            rank: self.seat.rank,
        }))
    }

    fn subset(&self, ranks: &[usize]) -> Result<Arc<dyn Wire>> {
        let rank = ranks.binary_search(&self.seat.rank);
        let rank = rank.expect("a rank makes wires it is on");
        let mut subsets = self.subsets.lock();
        let made = subsets.entry(ranks.to_vec()).or_default();
        let group = self.group().subgroup(ranks, *made);
        *made += 1;
        Ok(Arc::new(Self::new(Seat::new(group, rank))))
    }

    fn fail(&self, cause: FsdpError) {
        self.group().launch.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.group().launch.failure().cloned()
    }

    fn leave(&self) {
        self.group().launch.rank_returned(self.seat.launch_rank());
    }
}

#[derive(Debug)]
struct LocalExchange {
    ticket: Ticket,
    rank: usize,
}

impl Exchange for LocalExchange {
    fn poll(&mut self) -> Result<bool> {
        self.ticket.poll()
    }

    fn overdue(&self) -> FsdpError {
        self.ticket.overdue()
    }

    fn wait(self: Box<Self>) -> Result<Vec<Bytes>> {
        let sent: Vec<Arc<Outgoing>> = self.ticket.wait_for_parts()?;
        let to_this_rank = |outgoing: &Arc<Outgoing>| match &**outgoing {
            Outgoing::ToAll(message) => message.clone(),
            Outgoing::ToEach(messages) => messages[self.rank].clone(),
        };
        Ok(sent.iter().map(to_this_rank).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::rendezvous::Launch;

    /// Runs `f` on all ranks of a launch, each with its end of a wire.
    fn on_wire<T: Send>(
        world_size: usize,
        timeout: Duration,
        f: impl Fn(&LocalWire) -> T + Sync,
    ) -> Vec<T> {
        let launch = Launch::new(world_size, timeout);
        std::thread::scope(|scope| {
            let run = |seat: Seat| {
                let f = &f;
                scope.spawn(move || {
                    let wire = LocalWire::new(seat);
                    let value = f(&wire);
                    wire.leave();
                    value
                })
            };
            let threads: Vec<_> = launch.seats().into_iter().map(run).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    const LONG: Duration = Duration::from_secs(60);

    fn call(subject: &str) -> Call {
        Call::new("exchange", subject)
    }

    fn to_all(message: &str) -> Outgoing {
        Outgoing::ToAll(Bytes::copy_from_slice(message.as_bytes()))
    }

    #[test]
    fn every_rank_gets_what_each_sent_to_it() {
        let got = on_wire(3, LONG, |wire| {
            let messages = (0..3).map(|to| Bytes::from(format!("{} to {to}", wire.rank())));
            let outgoing = Outgoing::ToEach(messages.collect());
            wire.start(call("each"), outgoing).unwrap().wait().unwrap()
        });
        assert_eq!(got[1], ["0 to 1", "1 to 1", "2 to 1"]);
    }

    #[test]
    fn exchanges_may_be_waited_for_in_another_order_than_started() {
        let got = on_wire(2, LONG, |wire| {
            let first = wire.start(call("first"), to_all("a")).unwrap();
            let second = wire.start(call("second"), to_all("b")).unwrap();
            let second = second.wait().unwrap();
            (first.wait().unwrap(), second)
        });
        assert!(
            got.iter()
                .all(|(a, b)| a == &["a", "a"] && b == &["b", "b"])
        );
    }

    #[test]
    fn an_exchange_that_is_polled_ends() {
        let got = on_wire(3, LONG, |wire| {
            let mut exchange = wire.start(call("polled"), to_all("x")).unwrap();
            while !exchange.poll().unwrap() {
                std::thread::yield_now();
            }
            exchange.wait().unwrap().len()
        });
        assert_eq!(got, [3, 3, 3]);
    }

    #[test]
    fn subsets_of_the_same_ranks_are_wires_of_their_own() {
        let got = on_wire(4, LONG, |wire| {
            let ranks = if wire.rank() % 2 == 0 { [0, 2] } else { [1, 3] };
            let first = wire.subset(&ranks).unwrap();
            let second = wire.subset(&ranks).unwrap();
            let message = wire.rank().to_string();
            // One rank starts them in another order than its peer.
            let (first, second) = if wire.rank() < 2 {
                let first = first.start(call("first"), to_all(&message)).unwrap();
                (first, second.start(call("second"), to_all("")).unwrap())
            } else {
                let second = second.start(call("second"), to_all("")).unwrap();
                (
                    first.start(call("first"), to_all(&message)).unwrap(),
                    second,
                )
            };
            second.wait().unwrap();
            first.wait().unwrap()
        });
        assert_eq!(got[0], ["0", "2"]);
        assert_eq!(got[3], ["1", "3"]);
    }

    #[test]
    fn ranks_that_start_different_calls_all_fail() {
        let errors = on_wire(2, LONG, |wire| {
            let subject = if wire.rank() == 0 { "this" } else { "that" };
            let exchange = wire.start(call(subject), to_all(""));
            exchange.and_then(|exchange| exchange.wait()).unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(error, FsdpError::CollectiveMismatch { .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn a_poll_tells_of_a_rank_that_has_returned() {
        let errors = on_wire(2, LONG, |wire| {
            if wire.rank() == 1 {
                return None;
            }
            let mut exchange = wire.start(call("alone"), to_all("")).unwrap();
            loop {
                match exchange.poll() {
                    Ok(complete) => assert!(!complete),
                    Err(error) => return Some(error),
                }
                std::thread::yield_now();
            }
        });
        let error = errors[0].as_ref().unwrap();
        assert!(
            matches!(error, FsdpError::RankReturned { gone: 1, .. }),
            "{error}"
        );
    }

    #[test]
    fn what_is_overdue_names_the_missing_ranks() {
        let errors = on_wire(3, Duration::from_millis(50), |wire| {
            if wire.rank() == 2 {
                return None;
            }
            let exchange = wire.start(call("two of three"), to_all("")).unwrap();
            Some(exchange.overdue())
        });
        let missing = |error: &FsdpError| match error {
            FsdpError::Timeout { missing, .. } => missing.contains(&2),
            _ => false,
        };
        assert!(errors[..2].iter().all(|e| missing(e.as_ref().unwrap())));
    }

    #[test]
    fn a_failure_is_every_ranks() {
        let failures = on_wire(2, LONG, |wire| {
            if wire.rank() == 0 {
                wire.fail(FsdpError::argument("broken"));
                return wire.failure().unwrap();
            }
            let exchange = wire.start(call("never"), to_all(""));
            exchange.and_then(|exchange| exchange.wait()).unwrap_err()
        });
        assert!(failures.iter().all(|f| f.to_string() == "broken"));
    }
}
