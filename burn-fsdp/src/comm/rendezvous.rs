//! Where the collectives of ranks that are threads meet.
//!
//! A rank takes its [`Seat`] in a group. For each collective it gets a [`Ticket`], shows its part,
//! and waits until all have shown theirs. Collectives are matched by position, and checked.
//!
//! # Note: gathers of units that a rank does not use
//!
//! Gathers of units are matched by unit, not by position. A rank that waits, for whatever it may
//! be, first looks for gathers that lack its part and adds it. So a rank may skip a unit that
//! others use: they get its shards when it next waits for them, at the latest before backward. See
//! [`open_gathers`](super::open_gathers).
//!
//! # Note: deadlocks
//!
//! Ranks may wait for each other in different groups, where no two calls ever meet. Everything that
//! could end a wait counts up an epoch. A rank that falls asleep notes the epoch; when all have
//! noted the same, nothing will ever end their waits, and the last to fall asleep says so.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::buffer::BufferPool;
use super::gather::GatherSpace;
use super::open_gathers::{Members, OpenGathers};
use super::part::Part;
use super::{Call, GatherKey, GatherSource};
use crate::{FsdpError, Result};

/// How often a waiting rank looks before it sleeps. Ranks mostly arrive within microseconds; where
/// there are more of them than cores, one that waits must soon make way.
const SPINS: usize = 64;
const YIELDS: usize = 64;
/// How often a sleeping rank looks whether a peer has gone.
const NAP: Duration = Duration::from_millis(100);

/// What all groups of one launch share. Ranks are by their number in the launch.
pub(crate) struct Launch {
    pub(super) timeout: Duration,
    failure: OnceLock<FsdpError>,
    failed: AtomicBool,
    returned: Vec<AtomicBool>,
    last_calls: Vec<Mutex<Option<Call>>>,
    /// Each rank's modules, by their number.
    sources: Vec<Mutex<HashMap<u64, Weak<dyn GatherSource>>>>,
    open_gathers: OpenGathers<Slot>,
    sleepers: Mutex<Sleepers>,
    changed: Condvar,
}

/// Who sleeps, and since when. If all do and nothing has changed since, nothing ever will.
#[derive(Debug)]
struct Sleepers {
    epoch: u64,
    asleep_since: Vec<Option<u64>>,
}

impl std::fmt::Debug for Launch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launch")
            .field("world_size", &self.returned.len())
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

impl Launch {
    pub(crate) fn new(world_size: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            timeout,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            returned: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            last_calls: (0..world_size).map(|_| Mutex::new(None)).collect(),
            sources: (0..world_size).map(|_| Mutex::default()).collect(),
            open_gathers: OpenGathers::new(),
            sleepers: Mutex::new(Sleepers {
                epoch: 0,
                asleep_since: vec![None; world_size],
            }),
            changed: Condvar::new(),
        })
    }

    /// The seats of all ranks in the group of all, in rank order.
    pub(super) fn seats(self: &Arc<Self>) -> Vec<Seat> {
        let ranks: Vec<usize> = (0..self.returned.len()).collect();
        let group = Group::new(self.clone(), ranks.clone());
        ranks
            .into_iter()
            .map(|rank| Seat::new(group.clone(), rank))
            .collect()
    }

    /// Remembers where a rank's module has its shards.
    pub(super) fn register(&self, rank: usize, number: u64, module: Weak<dyn GatherSource>) {
        let mut sources = self.sources[rank].lock();
        sources.retain(|_, module| module.strong_count() > 0);
        sources.insert(number, module);
    }

    /// Records the first failure; whether this was it.
    pub(crate) fn fail(&self, cause: FsdpError) -> bool {
        let first = self.failure.set(cause).is_ok();
        self.failed.store(true, Ordering::Release);
        self.notify();
        first
    }

    /// Fails with `cause`, unless it has failed already; what it failed with first.
    fn fail_with(&self, cause: FsdpError) -> FsdpError {
        self.fail(cause);
        self.failure().expect("it has just failed").clone()
    }

    pub(crate) fn failure(&self) -> Option<&FsdpError> {
        self.failure.get()
    }

    pub(crate) fn rank_returned(&self, rank: usize) {
        self.returned[rank].store(true, Ordering::Release);
        self.notify();
    }

    fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire)
            && let Some(cause) = self.failure()
        {
            return Err(cause.clone());
        }
        Ok(())
    }

    fn notify(&self) {
        self.sleepers.lock().epoch += 1;
        self.changed.notify_all();
    }

    /// Adds `rank`'s part to the gathers that lack it; whether there were any.
    fn serve(&self, rank: usize) -> Result<bool> {
        let claims = self.open_gathers.claim(rank, |key| {
            let source = self.sources[rank].lock().get(&key.module)?.upgrade()?;
            source.gather_inputs(key.unit, key.generation)
        });
        let served = !claims.is_empty();
        for claim in claims {
            let call = Call::gather(claim.slot.first.1.subject.clone(), &claim.inputs);
            claim.slot.check(rank, &call, self)?;
            let space = claim.slot.common::<GatherSpace>();
            let part = space.contribute(&claim.inputs, claim.rank)?;
            claim.slot.arrive(claim.rank, part, self);
        }
        Ok(served)
    }

    /// Frees what a launch has left behind.
    pub(crate) fn end(&self) {
        self.open_gathers.clear();
    }

    /// Whether every rank sleeps, `rank` being about to, and nothing has changed since.
    fn is_deadlocked(&self, sleepers: &mut Sleepers, rank: usize) -> bool {
        let now = Some(sleepers.epoch);
        sleepers.asleep_since[rank] = now;
        let returned = self.returned.iter().map(|r| r.load(Ordering::Acquire));
        let mut ranks = sleepers.asleep_since.iter().zip(returned);
        ranks.all(|(since, returned)| returned || *since == now)
    }

    fn last_calls(&self) -> Vec<String> {
        let text = |call: &Option<Call>| call.as_ref().map_or("nothing".into(), Call::to_string);
        self.last_calls.iter().map(|c| text(&c.lock())).collect()
    }
}

/// A set of ranks and the collectives between them that are under way.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) launch: Arc<Launch>,
    /// The members, by their rank in the launch.
    pub(super) ranks: Members,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    subgroups: Mutex<HashMap<(Vec<usize>, u64), Subgroup>>,
    pub(super) pool: Arc<BufferPool>,
}

/// A group made by some ranks of another, kept until all of them have it.
#[derive(Debug)]
struct Subgroup {
    group: Arc<Group>,
    lacking: usize,
}

/// One collective under way.
#[derive(Debug)]
pub(super) struct Slot {
    first: (usize, Call),
    /// What the first rank made for all.
    common: Part,
    parts: Mutex<Vec<Option<Part>>>,
    arrived: AtomicUsize,
    size: usize,
    left: AtomicUsize,
}

impl Slot {
    /// Whether all ranks have added their parts.
    fn is_complete(&self) -> bool {
        self.arrived.load(Ordering::Acquire) == self.size
    }

    fn common<T: Send + Sync + 'static>(&self) -> Arc<T> {
        downcast(self.common.clone())
    }

    /// Shows the part of a rank of the group. Once a rank only.
    fn arrive(&self, rank: usize, part: Part, launch: &Launch) {
        self.parts.lock()[rank] = Some(part);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size {
            launch.notify();
        }
    }

    /// Fails the launch unless `call` is the call of the rank that came first.
    fn check(&self, launch_rank: usize, call: &Call, launch: &Launch) -> Result<()> {
        let (first_rank, first_call) = &self.first;
        if first_call == call {
            return Ok(());
        }
        Err(launch.fail_with(FsdpError::CollectiveMismatch {
            rank_a: *first_rank,
            call_a: first_call.to_string(),
            rank_b: launch_rank,
            call_b: call.to_string(),
        }))
    }
}

impl Group {
    pub(super) fn new(launch: Arc<Launch>, ranks: Vec<usize>) -> Arc<Self> {
        Arc::new(Self {
            launch,
            ranks: Arc::new(ranks),
            slots: Default::default(),
            subgroups: Default::default(),
            pool: Default::default(),
        })
    }

    /// The `nth` group of these ranks of this one. Each of them must ask for it, once.
    pub(super) fn subgroup(&self, ranks: &[usize], nth: u64) -> Arc<Self> {
        let mut subgroups = self.subgroups.lock();
        let key = (ranks.to_vec(), nth);
        let made = subgroups.entry(key.clone()).or_insert_with(|| {
            let launch_ranks = ranks.iter().map(|&rank| self.ranks[rank]).collect();
            Subgroup {
                group: Self::new(self.launch.clone(), launch_ranks),
                lacking: ranks.len(),
            }
        });
        made.lacking -= 1;
        let group = made.group.clone();
        if made.lacking == 0 {
            subgroups.remove(&key);
        }
        group
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }
}

/// A rank's place in a group.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) group: Arc<Group>,
    pub(super) rank: usize,
    next: AtomicU64,
}

impl Seat {
    pub(super) fn new(group: Arc<Group>, rank: usize) -> Self {
        Self {
            group,
            rank,
            next: AtomicU64::new(0),
        }
    }

    /// Takes this rank's place in the group's next collective.
    pub(super) fn enter(&self, call: Call, common: impl FnOnce() -> Part) -> Result<Ticket> {
        self.begin(&call)?;
        let position = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = self
            .group
            .slots
            .lock()
            .entry(position)
            .or_insert_with(|| self.new_slot(&call, common()))
            .clone();
        self.ticket(slot, Some(position), call)
    }

    /// Takes this rank's place in the gather of this key, or opens one. Whether this rank has yet
    /// to add its part.
    pub(super) fn enter_gather(
        &self,
        call: Call,
        key: GatherKey,
        common: impl FnOnce() -> Part,
    ) -> Result<(Ticket, bool)> {
        self.begin(&call)?;
        let launch = &self.group.launch;
        let new_slot = || self.new_slot(&call, common());
        let joined = launch
            .open_gathers
            .join(&self.group.ranks, self.rank, key, new_slot);
        if joined.is_new {
            launch.notify();
        }
        let ticket = self.ticket(joined.slot, None, call)?;
        Ok((ticket, joined.lacks_part))
    }

    fn ticket(&self, slot: Arc<Slot>, position: Option<u64>, call: Call) -> Result<Ticket> {
        let ticket = Ticket {
            group: self.group.clone(),
            slot,
            position,
            rank: self.rank,
            call,
        };
        let (slot, launch) = (&ticket.slot, &self.group.launch);
        slot.check(self.launch_rank(), &ticket.call, launch)?;
        Ok(ticket)
    }

    pub(super) fn launch_rank(&self) -> usize {
        self.group.ranks[self.rank]
    }

    fn begin(&self, call: &Call) -> Result<()> {
        let launch = &self.group.launch;
        launch.check()?;
        *launch.last_calls[self.launch_rank()].lock() = Some(call.clone());
        Ok(())
    }

    fn new_slot(&self, call: &Call, common: Part) -> Arc<Slot> {
        Arc::new(Slot {
            first: (self.launch_rank(), call.clone()),
            common,
            parts: Mutex::new(vec![None; self.group.ranks.len()]),
            arrived: AtomicUsize::new(0),
            size: self.group.size(),
            left: AtomicUsize::new(0),
        })
    }

    /// Shows `part` to all ranks and returns everyone's.
    pub(super) fn rendezvous<T: Send + Sync + 'static>(
        &self,
        call: Call,
        part: T,
    ) -> Result<Vec<Arc<T>>> {
        let ticket = self.enter(call, || Arc::new(()))?;
        ticket.arrive(Arc::new(part));
        ticket.wait_for_parts()
    }
}

/// A rank's place in one collective.
#[derive(Debug)]
pub(super) struct Ticket {
    group: Arc<Group>,
    slot: Arc<Slot>,
    /// Its position in the group; a gather of a unit has none.
    position: Option<u64>,
    rank: usize,
    call: Call,
}

impl Ticket {
    pub(super) fn common<T: Send + Sync + 'static>(&self) -> Arc<T> {
        self.slot.common()
    }

    pub(super) fn arrive(&self, part: Part) {
        self.slot.arrive(self.rank, part, &self.group.launch);
    }

    fn launch_rank(&self) -> usize {
        self.group.ranks[self.rank]
    }

    /// Blocks until all ranks have arrived.
    fn wait(&self) -> Result<()> {
        let launch = &self.group.launch;
        for look in 0..SPINS + YIELDS {
            if self.slot.is_complete() {
                return Ok(());
            }
            if look < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let start = Instant::now();
        loop {
            // What changes from here on is seen by its epoch.
            let epoch = launch.sleepers.lock().epoch;
            if self.slot.is_complete() {
                return Ok(());
            }
            launch.check()?;
            if launch.serve(self.launch_rank())? {
                continue;
            }
            if let Some(error) = self.hopeless(start) {
                return Err(launch.fail_with(error));
            }
            let mut sleepers = launch.sleepers.lock();
            if sleepers.epoch != epoch {
                continue;
            }
            if launch.is_deadlocked(&mut sleepers, self.launch_rank()) {
                drop(sleepers);
                return Err(launch.fail_with(self.deadlock()));
            }
            launch
                .changed
                .wait_for(&mut sleepers, NAP.min(launch.timeout));
            sleepers.asleep_since[self.launch_rank()] = None;
        }
    }

    /// Whether all ranks have arrived. Never waits.
    pub(super) fn poll(&self) -> Result<bool> {
        let launch = &self.group.launch;
        if self.slot.is_complete() {
            return Ok(true);
        }
        launch.check()?;
        match self.gone() {
            Some(error) => Err(launch.fail_with(error)),
            None => Ok(false),
        }
    }

    /// Why it makes no sense to wait any longer, if so.
    fn hopeless(&self, since: Instant) -> Option<FsdpError> {
        let is_overdue = since.elapsed() >= self.group.launch.timeout;
        self.gone().or_else(|| is_overdue.then(|| self.overdue()))
    }

    /// A rank that is missing and has returned.
    fn gone(&self) -> Option<FsdpError> {
        let returned = &self.group.launch.returned;
        let missing = self.missing();
        let gone = missing
            .iter()
            .find(|rank| returned[**rank].load(Ordering::Acquire))?;
        Some(FsdpError::RankReturned {
            rank: self.launch_rank(),
            call: self.call.to_string(),
            gone: *gone,
        })
    }

    pub(super) fn overdue(&self) -> FsdpError {
        let launch = &self.group.launch;
        FsdpError::Timeout {
            rank: self.launch_rank(),
            call: self.call.to_string(),
            after: launch.timeout,
            missing: self.missing(),
            last_calls: launch.last_calls(),
        }
    }

    /// All ranks wait for each other: the mismatch of this one with the first it waits for.
    fn deadlock(&self) -> FsdpError {
        let other = self.missing().first().copied().unwrap_or_default();
        FsdpError::CollectiveMismatch {
            rank_a: other,
            call_a: self.group.launch.last_calls()[other].clone(),
            rank_b: self.launch_rank(),
            call_b: self.call.to_string(),
        }
    }

    /// Blocks until all ranks have arrived; what they have shown, in rank order.
    pub(super) fn wait_for_all(&self) -> Result<Vec<Part>> {
        self.wait()?;
        let parts = self.slot.parts.lock();
        let part = |part: &Option<Part>| part.clone().expect("all ranks have arrived");
        Ok(parts.iter().map(part).collect())
    }

    pub(super) fn wait_for_parts<T: Send + Sync + 'static>(&self) -> Result<Vec<Arc<T>>> {
        Ok(self.wait_for_all()?.into_iter().map(downcast).collect())
    }

    fn missing(&self) -> Vec<usize> {
        let parts = self.slot.parts.lock();
        let absent = parts.iter().zip(self.group.ranks.iter());
        absent
            .filter_map(|(part, &rank)| part.is_none().then_some(rank))
            .collect()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(position) = self.position else {
            self.group.launch.open_gathers.leave(&self.slot, self.rank);
            return;
        };
        let left = self.slot.left.fetch_add(1, Ordering::AcqRel) + 1;
        if left == self.group.size() {
            self.group.slots.lock().remove(&position);
        }
    }
}

fn downcast<T: Send + Sync + 'static>(part: Part) -> Arc<T> {
    part.downcast()
        .expect("equal calls exchange values of equal type")
}
