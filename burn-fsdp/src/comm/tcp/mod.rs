//! The wire for processes that reach each other by TCP.
//!
//! Each two ranks have one connection. Groups share it: a message says which group and which
//! position it is for, so that they may come in any order.
//!
//! # Note: what ends a wait
//!
//! A rank that ends, however it does, closes its connections, and all others know at once: a clean
//! end says goodbye first. What closes nothing is found by the timeout alone: a host that loses its
//! power, a process that is stopped, ranks that wait for each other in different groups.

mod acceptor;
mod connect;
mod frame;
mod handshake;
mod inbox;
mod job;
mod links;
mod store;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

pub(crate) use job::Job;

use super::Call;
use super::cause::cut;
use super::wire::{Exchange, Outgoing, Wire};
use crate::{FsdpError, Result};
use frame::{Frame, Header, Key, MOST_PAYLOAD, MOST_TEXT, Text};
use links::Links;

/// The number of the group of all ranks.
const ALL: u64 = 0;

/// One rank's end of the connections within a group.
#[derive(Debug)]
pub(crate) struct TcpWire {
    links: Arc<Links>,
    /// Equal on all members, and of no other group.
    group: u64,
    /// The members, by their rank in the job.
    members: Arc<[usize]>,
    rank: usize,
    next: AtomicU64,
    /// How many groups have been made of these members of this one.
    subsets: Mutex<HashMap<Vec<usize>, u64>>,
}

impl TcpWire {
    /// Connects this process with all others of the job. All ranks must call this.
    ///
    /// # Errors
    ///
    /// [`FsdpError::Rendezvous`] if they don't find each other before the job's timeout, or have
    /// been started for another number of ranks, as another rank or with another secret.
    pub(crate) fn connect(job: &Job) -> Result<Self> {
        Self::connect_at(job, None)
    }

    /// The same, with a listener at the job's address for rank 0.
    pub(crate) fn connect_at(job: &Job, listener: Option<TcpListener>) -> Result<Self> {
        let links = Arc::new(Links::connect(job, listener)?);
        Ok(Self::new(links, ALL, (0..job.world_size).collect()))
    }

    /// The end of this process in a group that it is a member of.
    fn new(links: Arc<Links>, group: u64, members: Arc<[usize]>) -> Self {
        let rank = members.iter().position(|&member| member == links.rank());
        Self {
            rank: rank.expect("a process has wires of its own groups only"),
            links,
            group,
            members,
            next: AtomicU64::new(0),
            subsets: Mutex::default(),
        }
    }
}

impl Wire for TcpWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn timeout(&self) -> Duration {
        self.links.timeout()
    }

    fn start(&self, call: Call, outgoing: Outgoing) -> Result<Box<dyn Exchange>> {
        let payloads = outgoing.for_each_of(self.world_size())?;
        let header = Header {
            key: Key {
                group: self.group,
                position: self.next.fetch_add(1, Ordering::Relaxed),
            },
            call: Text::of(&call),
        };
        let own = payloads[self.rank].clone();
        let started = self.links.inbox().start(&header, &self.members, own);
        started.map_err(|cause| self.links.fail(cause))?;
        for (&member, payload) in self.members.iter().zip(payloads) {
            if member != self.links.rank() {
                let header = header.clone();
                self.links.send(member, Frame::Message { header, payload });
            }
        }
        Ok(Box::new(TcpExchange {
            links: self.links.clone(),
            header,
            is_over: false,
        }))
    }

    fn subset(&self, ranks: &[usize]) -> Result<Arc<dyn Wire>> {
        let members: Vec<usize> = ranks.iter().map(|&rank| self.members[rank]).collect();
        let mut subsets = self.subsets.lock();
        let nth = subsets.entry(members.clone()).or_default();
        let mut group = DefaultHasher::new();
        (self.group, &members, *nth).hash(&mut group);
        *nth += 1;
        let wire = Self::new(self.links.clone(), group.finish(), members.into());
        Ok(Arc::new(wire))
    }

    fn fail(&self, cause: FsdpError) {
        self.links.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.links.inbox().failure()
    }

    fn leave(&self) {
        self.links.leave();
    }
}

impl Text {
    fn of(call: &Call) -> Self {
        let mut fingerprint = DefaultHasher::new();
        call.hash(&mut fingerprint);
        Self {
            fingerprint: fingerprint.finish(),
            text: cut(&call.to_string(), MOST_TEXT).into(),
        }
    }
}

impl Outgoing {
    /// The message to each of `ranks` ranks.
    fn for_each_of(self, ranks: usize) -> Result<Vec<Bytes>> {
        let messages = match self {
            Self::ToAll(message) => vec![message; ranks],
            Self::ToEach(messages) => messages,
        };
        assert_eq!(messages.len(), ranks, "there is one message for each rank");
        match messages.iter().find(|message| message.len() > MOST_PAYLOAD) {
            None => Ok(messages),
            Some(message) => Err(FsdpError::argument(format!(
                "a message of {} bytes is too long: {MOST_PAYLOAD} can be sent; make smaller units",
                message.len()
            ))),
        }
    }
}

/// An exchange under way.
#[derive(Debug)]
struct TcpExchange {
    links: Arc<Links>,
    header: Header,
    /// Whether the inbox has forgotten it.
    is_over: bool,
}

impl Exchange for TcpExchange {
    fn poll(&mut self) -> Result<bool> {
        let polled = self.links.inbox().poll(self.header.key, &self.header.call);
        polled.map_err(|cause| self.links.fail(cause))
    }

    fn overdue(&self) -> FsdpError {
        let Header { key, call } = &self.header;
        let inbox = self.links.inbox();
        inbox.overdue(*key, call, self.links.timeout())
    }

    fn wait(mut self: Box<Self>) -> Result<Vec<Bytes>> {
        let Header { key, call } = &self.header;
        let waited = self.links.inbox().wait(*key, call, self.links.timeout());
        self.is_over = waited.is_ok();
        waited.map_err(|cause| self.links.fail(cause))
    }
}

impl Drop for TcpExchange {
    fn drop(&mut self) {
        if !self.is_over {
            self.links.inbox().abandon(self.header.key);
        }
    }
}
