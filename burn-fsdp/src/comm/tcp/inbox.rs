//! What has come from the other ranks, and who waits for what.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use super::frame::{Header, Key, Text};
use crate::{FsdpError, Result};

/// One rank's inbox. Ranks are by their number in the job.
#[derive(Debug)]
pub(super) struct Inbox {
    rank: usize,
    /// Whether there is a failure, without the lock.
    failed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    failure: Option<FsdpError>,
    /// Who has said goodbye.
    returned: Vec<bool>,
    last_calls: Vec<Option<Arc<str>>>,
    exchanges: HashMap<Key, Meeting>,
}

/// An exchange that this rank, or another, has started.
#[derive(Debug, Default)]
struct Meeting {
    /// The ranks that take part, once this one has started it.
    members: Option<Arc<[usize]>>,
    /// Nobody here waits for it any more.
    abandoned: bool,
    arrived: BTreeMap<usize, (Text, Bytes)>,
}

impl Inbox {
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                failure: None,
                returned: vec![false; world_size],
                last_calls: vec![None; world_size],
                exchanges: HashMap::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// Notes that this rank starts an exchange between `members`, with its message to itself.
    pub(super) fn start(&self, header: &Header, members: &Arc<[usize]>, own: Bytes) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(cause) = &state.failure {
            return Err(cause.clone());
        }
        if state.returned[self.rank] {
            return Err(FsdpError::argument(format!(
                "rank {} has returned, and its process group ended",
                self.rank
            )));
        }
        let meeting = state.exchanges.entry(header.key).or_default();
        meeting.members = Some(members.clone());
        state.arrive(self.rank, header, own)
    }

    /// Takes in another rank's message. An error is a mismatch of two ranks' calls.
    pub(super) fn arrive(&self, rank: usize, header: &Header, payload: Bytes) -> Result<()> {
        let arrived = self.state.lock().arrive(rank, header, payload);
        self.changed.notify_all();
        arrived
    }

    /// Whether all messages of an exchange are here.
    pub(super) fn poll(&self, key: Key, call: &Text) -> Result<bool> {
        let state = self.state.lock();
        let is_complete = state.meeting(key).is_complete();
        if !is_complete {
            state.check(self.rank, key, call)?;
        }
        Ok(is_complete)
    }

    /// The messages of an exchange that this rank has started, in rank order.
    pub(super) fn wait(&self, key: Key, call: &Text, timeout: Duration) -> Result<Vec<Bytes>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        while !state.meeting(key).is_complete() {
            state.check(self.rank, key, call)?;
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                if state.meeting(key).is_complete() {
                    break;
                }
                return Err(state.overdue(self.rank, key, call, timeout));
            }
        }
        let meeting = state.exchanges.remove(&key).unwrap_or_default();
        Ok(meeting.arrived.into_values().map(|(_, b)| b).collect())
    }

    /// What this rank fails with if it waits for an exchange no longer.
    pub(super) fn overdue(&self, key: Key, call: &Text, timeout: Duration) -> FsdpError {
        let state = self.state.lock();
        state.overdue(self.rank, key, call, timeout)
    }

    /// Forgets an exchange, of which messages may still come.
    pub(super) fn abandon(&self, key: Key) {
        let mut state = self.state.lock();
        if let Some(meeting) = state.exchanges.get_mut(&key) {
            meeting.abandoned = true;
            for (_, payload) in meeting.arrived.values_mut() {
                *payload = Bytes::new();
            }
        }
        state.forget_if_done(key);
    }

    /// Records the first failure. If this is it, calls `tell` before anybody here can know, and so
    /// before this rank can say goodbye.
    pub(super) fn fail(&self, cause: FsdpError, tell: impl FnOnce()) {
        let mut state = self.state.lock();
        if state.failure.is_none() {
            tell();
            state.failure = Some(cause);
            self.failed.store(true, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<FsdpError> {
        self.state.lock().failure.clone()
    }

    /// Notes that a rank, this one or another, takes part no longer; whether it is news.
    pub(super) fn returned(&self, rank: usize) -> bool {
        let before = std::mem::replace(&mut self.state.lock().returned[rank], true);
        self.changed.notify_all();
        !before
    }

    #[cfg(test)]
    pub(super) fn open_exchanges(&self) -> usize {
        self.state.lock().exchanges.len()
    }

    pub(super) fn has_returned(&self, rank: usize) -> bool {
        self.state.lock().returned[rank]
    }
}

impl State {
    fn meeting(&self, key: Key) -> &Meeting {
        let meeting = self.exchanges.get(&key);
        meeting.expect("an exchange is kept until its starter has its messages or drops it")
    }

    fn arrive(&mut self, rank: usize, header: &Header, payload: Bytes) -> Result<()> {
        self.last_calls[rank] = Some(header.call.text.clone());
        let meeting = self.exchanges.entry(header.key).or_default();
        let other = meeting
            .arrived
            .iter()
            .find(|(_, (call, _))| call.fingerprint != header.call.fingerprint);
        if let Some((&other, (call, _))) = other {
            let (a, b) = ((other, &call.text), (rank, &header.call.text));
            let (first, second) = if a.0 < b.0 { (a, b) } else { (b, a) };
            return Err(FsdpError::CollectiveMismatch {
                rank_a: first.0,
                call_a: first.1.to_string(),
                rank_b: second.0,
                call_b: second.1.to_string(),
            });
        }
        let payload = match meeting.abandoned {
            true => Bytes::new(),
            false => payload,
        };
        let arrival = (header.call.clone(), payload);
        meeting.arrived.insert(rank, arrival);
        self.forget_if_done(header.key);
        Ok(())
    }

    fn forget_if_done(&mut self, key: Key) {
        let is_done = |meeting: &Meeting| meeting.abandoned && meeting.is_complete();
        if self.exchanges.get(&key).is_some_and(is_done) {
            self.exchanges.remove(&key);
        }
    }

    /// Why it makes no sense to wait for an exchange, if so.
    fn check(&self, rank: usize, key: Key, call: &Text) -> Result<()> {
        if let Some(cause) = &self.failure {
            return Err(cause.clone());
        }
        let gone = |member: &usize| *member != rank && self.returned[*member];
        match self.meeting(key).missing().find(gone) {
            None => Ok(()),
            Some(gone) => Err(FsdpError::RankReturned {
                rank,
                call: call.text.to_string(),
                gone,
            }),
        }
    }

    fn overdue(&self, rank: usize, key: Key, call: &Text, after: Duration) -> FsdpError {
        let text = |call: &Option<Arc<str>>| call.as_deref().unwrap_or("nothing").to_string();
        FsdpError::Timeout {
            rank,
            call: call.text.to_string(),
            after,
            missing: self.meeting(key).missing().collect(),
            last_calls: self.last_calls.iter().map(text).collect(),
        }
    }
}

impl Meeting {
    fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        let members = self.members.iter().flat_map(|members| members.iter());
        members
            .copied()
            .filter(|member| !self.arrived.contains_key(member))
    }

    fn is_complete(&self) -> bool {
        self.members.is_some() && self.missing().next().is_none()
    }
}
