//! The wire for ranks that are processes started by `mpirun`.
//!
//! From outside to inside: [`MpiWire`] is a rank's end of a group; [`link`] its way to the thread
//! that makes all calls of MPI, [`progress`]; which matches the ranks' [`rounds`] of headers and
//! tells other ranks by [`message`]; on MPI as safe as [`raw`] makes it.
//!
//! # Note: one thread for MPI
//!
//! Few MPIs are fast, and some wrong, if several threads call them (`MPI_THREAD_MULTIPLE`), and MPI
//! only moves bytes while it is called. So one thread initialises MPI, makes all calls of it, and
//! finalises it (`MPI_THREAD_FUNNELED` is enough), and calls it as long as something is under way.
//! Exchanges go on while the rank computes. The thread sleeps when nothing moves; it needs little
//! of a core, but should not be bound to the same one as the computation (`mpirun --bind-to none`).
//!
//! # Note: headers by messages, payloads by collectives
//!
//! The payload of an exchange is one non-blocking collective: `MPI_Iallgatherv` if all ranks send to
//! all, `MPI_Ialltoallw`, which moves messages from where they lie, if any sends to each. MPI neither
//! notices if ranks call different ones nor says who is missing. So ranks first send each other
//! headers, as single messages on a communicator of their own. A collective of headers would be fewer messages,
//! but it tells nothing until it is complete: with messages a rank that waits knows who has come
//! and what everyone called last, a mismatch is seen without those that never come, and what a rank
//! has sent before it ended is known to be all. Collectives are posted in the order of the rounds,
//! which is the same on all ranks.
//!
//! MPI counts with an `int`. Gathers of more than a GiB in total are sent by `MPI_Ialltoallw` too,
//! whose messages are of any length, as each is one element of a datatype made for it.
//!
//! # Note: groups
//!
//! The communicator of a subset is made by `MPI_Comm_create_group`, which takes its members only
//! but blocks. It is called when a header round has shown that all of them are about to, so that it
//! is short. That is a promise: a rank keeps it even if the job fails meanwhile. Communicators live
//! until the job ends, as freeing one takes all its ranks.
//!
//! # Note: failures
//!
//! Rank 0 is the judge of what a job has failed with: a rank that finds a failure tells it, and it
//! tells all, so that all return the same cause even if several find one at once. If it does not
//! answer in a second, the rank tells all by itself.
//!
//! `mpirun` kills all ranks as soon as one exits after a failure. So a rank that leaves then waits
//! until the others do, at most two seconds. MPI is not finalised: it would wait for operations that
//! never end. `mpirun` reports that and returns an error, as it should.
//!
//! Without a failure a rank that leaves waits for the others, as `MPI_Finalize` does. A rank that
//! exits before it has left, or is killed, ends the job: that is MPI's way, and the others return
//! nothing.

mod link;
mod message;
mod progress;
mod raw;
mod rounds;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use self::link::{Link, Ticket};
use self::progress::{Job, WORLD};
use super::Call;
use super::wire::{Exchange, Outgoing, Wire};
use crate::{FsdpError, Result};

/// This process's end of a group of processes started by `mpirun`.
#[derive(Debug)]
pub(crate) struct MpiWire {
    link: Arc<Link>,
    group: u64,
    /// This rank's number in the group.
    rank: usize,
    /// All ranks', in the job.
    ranks: Vec<usize>,
}

impl MpiWire {
    /// The wire of all ranks of the job. A process that `mpirun` has not started is a job of one.
    ///
    /// All ranks must call this; it waits for them, without a timeout. No wait of this wire is
    /// longer than `timeout`.
    ///
    /// # Errors
    ///
    /// If MPI has been initialised in this process already, is not thread-safe at all, or fails.
    pub(crate) fn init(timeout: Duration) -> Result<Arc<dyn Wire>> {
        let link = Link::open(timeout)?;
        Ok(Arc::new(Self {
            group: WORLD,
            rank: link.rank,
            ranks: (0..link.world_size).collect(),
            link,
        }))
    }
}

impl Wire for MpiWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks.len()
    }

    fn timeout(&self) -> Duration {
        self.link.timeout
    }

    fn start(&self, call: Call, outgoing: Outgoing) -> Result<Box<dyn Exchange>> {
        if let Outgoing::ToEach(messages) = &outgoing {
            let ranks = self.world_size();
            assert_eq!(messages.len(), ranks, "there is one message for each rank");
        }
        let group = self.group;
        let job = |id, done| Job::Exchange {
            group,
            id,
            call: call.clone(),
            outgoing,
            done,
        };
        let ticket = self.link.submit(call.to_string(), job)?;
        Ok(Box::new(MpiExchange {
            ticket,
            messages: None,
        }))
    }

    fn subset(&self, ranks: &[usize]) -> Result<Arc<dyn Wire>> {
        let ascending = ranks.is_sorted_by(|a, b| a < b);
        let inside = ranks.iter().all(|&rank| rank < self.world_size());
        let own = ranks.iter().position(|&rank| rank == self.rank);
        let Some(rank) = own.filter(|_| ascending && inside) else {
            return Err(FsdpError::argument(format!(
                "rank {} of {} cannot make a group of the ranks {ranks:?}: they must be ascending \
                 and it among them",
                self.rank,
                self.world_size()
            )));
        };
        let ranks: Vec<usize> = ranks.iter().map(|&rank| self.ranks[rank]).collect();
        let call = Call::new("subset", format!("the ranks {ranks:?}"));
        let job = |id, done| Job::Subset {
            parent: self.group,
            id,
            call: call.clone(),
            ranks: ranks.clone(),
            done,
        };
        let group = self.link.submit(call.to_string(), job)?.wait()?;
        Ok(Arc::new(Self {
            link: self.link.clone(),
            group,
            rank,
            ranks,
        }))
    }

    fn fail(&self, cause: FsdpError) {
        self.link.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.link.failure()
    }

    /// Waits for the others to leave too, as MPI ends on all ranks at once.
    fn leave(&self) {
        self.link.leave();
    }
}

#[derive(Debug)]
struct MpiExchange {
    ticket: Ticket<Vec<Bytes>>,
    /// Once they are here.
    messages: Option<Vec<Bytes>>,
}

impl Exchange for MpiExchange {
    fn poll(&mut self) -> Result<bool> {
        if self.messages.is_none() {
            self.messages = self.ticket.poll()?;
        }
        Ok(self.messages.is_some())
    }

    fn overdue(&self) -> FsdpError {
        self.ticket.overdue()
    }

    fn wait(self: Box<Self>) -> Result<Vec<Bytes>> {
        match self.messages {
            Some(messages) => Ok(messages),
            None => self.ticket.wait(),
        }
    }
}
