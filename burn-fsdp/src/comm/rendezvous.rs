//! Where the collectives of ranks that are threads meet.
//!
//! A rank takes its [`Seat`] in a group. For each collective it gets a [`Ticket`], shows its part,
//! and waits until all have shown theirs. Collectives are matched by position, and checked.
//!
//! # Note: gathers of units that a rank does not use
//!
//! Gathers of units are matched by unit, not by position. A rank that waits, for whatever it may
//! be, first looks for gathers that lack its part and adds it. So a rank may skip a unit that
//! others use: they get its shards when it next waits for them, at the latest before backward.
//!
//! # Note: deadlocks
//!
//! Ranks may wait for each other in different groups, where no two calls ever meet. Everything that
//! could end a wait counts up an epoch. A rank that falls asleep notes the epoch; when all have
//! noted the same, nothing will ever end their waits, and the last to fall asleep says so.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::buffer::BufferPool;
use super::gather::write_shards;
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
    timeout: Duration,
    failure: OnceLock<FsdpError>,
    failed: AtomicBool,
    returned: Vec<AtomicBool>,
    last_calls: Vec<Mutex<Option<Call>>>,
    sources: Vec<Mutex<Sources>>,
    open_gathers: Mutex<Vec<OpenGather>>,
    sleepers: Mutex<Sleepers>,
    changed: Condvar,
}

/// The modules of one rank.
#[derive(Default)]
struct Sources {
    registered: u64,
    alive: HashMap<u64, Weak<dyn GatherSource>>,
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
            open_gathers: Mutex::default(),
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

    /// Remembers where a rank's module has its shards; the module's number.
    pub(super) fn register(&self, rank: usize, module: Weak<dyn GatherSource>) -> u64 {
        let mut sources = self.sources[rank].lock();
        sources.alive.retain(|_, module| module.strong_count() > 0);
        let number = sources.registered;
        sources.registered += 1;
        sources.alive.insert(number, module);
        number
    }

    /// Records the first failure; whether this was it.
    pub(crate) fn fail(&self, cause: FsdpError) -> bool {
        let first = self.failure.set(cause).is_ok();
        self.failed.store(true, Ordering::Release);
        self.notify();
        first
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
        let lacking = |gather: &&OpenGather| gather.lacks(rank);
        let open: Vec<_> = self
            .open_gathers
            .lock()
            .iter()
            .filter(lacking)
            .cloned()
            .collect();
        let mut served = false;
        for gather in open {
            let sources = self.sources[rank].lock();
            let source = sources.alive.get(&gather.key.module);
            let source = source.and_then(Weak::upgrade);
            drop(sources);
            let inputs =
                source.and_then(|s| s.gather_inputs(gather.key.unit, gather.key.generation));
            let Some(inputs) = inputs else { continue };
            let ticket = gather.ticket(rank, gather.slot.first.1.clone());
            write_shards(&ticket.common(), &inputs, ticket.rank)?;
            ticket.arrive(Arc::new(()));
            served = true;
        }
        Ok(served)
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

pub(super) type Part = Arc<dyn Any + Send + Sync>;

/// A set of ranks and the collectives between them that are under way.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) launch: Arc<Launch>,
    /// The members, by their rank in the launch.
    pub(super) ranks: Vec<usize>,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    pub(super) pool: Arc<BufferPool>,
}

/// A gather of a unit that some rank has not added its part to.
#[derive(Clone, Debug)]
struct OpenGather {
    group: Arc<Group>,
    key: GatherKey,
    slot: Arc<Slot>,
}

impl OpenGather {
    fn lacks(&self, launch_rank: usize) -> bool {
        let rank = self.group.ranks.iter().position(|&r| r == launch_rank);
        rank.is_some_and(|rank| self.slot.parts.lock()[rank].is_none())
    }

    /// The place of a member of the group, which calls it `call`.
    fn ticket(&self, launch_rank: usize, call: Call) -> Ticket {
        let rank = self.group.ranks.iter().position(|&r| r == launch_rank);
        self.slot.entered.fetch_add(1, Ordering::AcqRel);
        Ticket {
            group: self.group.clone(),
            slot: self.slot.clone(),
            position: None,
            rank: rank.expect("the rank is a member"),
            call,
        }
    }
}

/// One collective under way.
#[derive(Debug)]
struct Slot {
    first: (usize, Call),
    /// What the first rank made for all.
    common: Part,
    parts: Mutex<Vec<Option<Part>>>,
    arrived: AtomicUsize,
    /// Tickets made and dropped.
    entered: AtomicUsize,
    left: AtomicUsize,
}

impl Group {
    pub(super) fn new(launch: Arc<Launch>, ranks: Vec<usize>) -> Arc<Self> {
        Arc::new(Self {
            launch,
            ranks,
            slots: Default::default(),
            pool: Default::default(),
        })
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
        let ticket = Ticket {
            group: self.group.clone(),
            slot,
            position: Some(position),
            rank: self.rank,
            call,
        };
        ticket.check_call()?;
        Ok(ticket)
    }

    /// Takes this rank's place in the open gather of this key, or opens one.
    pub(super) fn enter_gather(
        &self,
        call: Call,
        key: GatherKey,
        common: impl FnOnce() -> Part,
    ) -> Result<Ticket> {
        self.begin(&call)?;
        let launch = &self.group.launch;
        let global = self.group.ranks[self.rank];
        let mut open_gathers = launch.open_gathers.lock();
        let mine = |gather: &&OpenGather| {
            Arc::ptr_eq(&gather.group, &self.group) && gather.key == key && gather.lacks(global)
        };
        let found = open_gathers.iter().find(mine).cloned();
        let is_new = found.is_none();
        let gather = found.unwrap_or_else(|| {
            let gather = OpenGather {
                group: self.group.clone(),
                key,
                slot: self.new_slot(&call, common()),
            };
            open_gathers.push(gather.clone());
            gather
        });
        // Entered before anyone else can see it, or a rank that only serves would close it.
        let ticket = gather.ticket(global, call);
        drop(open_gathers);
        if is_new {
            launch.notify();
        }
        ticket.check_call()?;
        Ok(ticket)
    }

    fn begin(&self, call: &Call) -> Result<()> {
        let launch = &self.group.launch;
        launch.check()?;
        *launch.last_calls[self.group.ranks[self.rank]].lock() = Some(call.clone());
        Ok(())
    }

    fn new_slot(&self, call: &Call, common: Part) -> Arc<Slot> {
        Arc::new(Slot {
            first: (self.group.ranks[self.rank], call.clone()),
            common,
            parts: Mutex::new(vec![None; self.group.ranks.len()]),
            arrived: AtomicUsize::new(0),
            entered: AtomicUsize::new(0),
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
        downcast(self.slot.common.clone())
    }

    fn check_call(&self) -> Result<()> {
        let (first_rank, first_call) = &self.slot.first;
        if *first_call == self.call {
            return Ok(());
        }
        Err(self.fail(FsdpError::CollectiveMismatch {
            rank_a: *first_rank,
            call_a: first_call.to_string(),
            rank_b: self.launch_rank(),
            call_b: self.call.to_string(),
        }))
    }

    fn launch_rank(&self) -> usize {
        self.group.ranks[self.rank]
    }

    pub(super) fn arrive(&self, part: Part) {
        self.slot.parts.lock()[self.rank] = Some(part);
        let arrived = self.slot.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        if arrived == self.group.ranks.len() {
            if self.position.is_none() {
                self.close_gather();
            }
            self.group.launch.notify();
        }
    }

    fn close_gather(&self) {
        let mut open = self.group.launch.open_gathers.lock();
        open.retain(|gather| !Arc::ptr_eq(&gather.slot, &self.slot));
    }

    fn all_arrived(&self) -> bool {
        self.slot.arrived.load(Ordering::Acquire) == self.group.ranks.len()
    }

    /// Blocks until all ranks have arrived.
    pub(super) fn wait(&self) -> Result<()> {
        let launch = &self.group.launch;
        for look in 0..SPINS + YIELDS {
            if self.all_arrived() {
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
            if self.all_arrived() {
                return Ok(());
            }
            launch.check()?;
            if launch.serve(self.launch_rank())? {
                continue;
            }
            if let Some(error) = self.hopeless(start) {
                return Err(self.fail(error));
            }
            let mut sleepers = launch.sleepers.lock();
            if sleepers.epoch != epoch {
                continue;
            }
            if launch.is_deadlocked(&mut sleepers, self.launch_rank()) {
                drop(sleepers);
                return Err(self.fail(self.deadlock()));
            }
            launch
                .changed
                .wait_for(&mut sleepers, NAP.min(launch.timeout));
            sleepers.asleep_since[self.launch_rank()] = None;
        }
    }

    /// Why it makes no sense to wait any longer, if so.
    fn hopeless(&self, since: Instant) -> Option<FsdpError> {
        let launch = &self.group.launch;
        let missing = self.missing();
        let gone = |rank: &&usize| launch.returned[**rank].load(Ordering::Acquire);
        if let Some(&gone) = missing.iter().find(gone) {
            return Some(FsdpError::RankReturned {
                rank: self.launch_rank(),
                call: self.call.to_string(),
                gone,
            });
        }
        (since.elapsed() >= launch.timeout).then(|| FsdpError::Timeout {
            rank: self.launch_rank(),
            call: self.call.to_string(),
            after: launch.timeout,
            missing,
            last_calls: launch.last_calls(),
        })
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

    fn wait_for_parts<T: Send + Sync + 'static>(&self) -> Result<Vec<Arc<T>>> {
        self.wait()?;
        let parts = self.slot.parts.lock();
        let part = |part: &Option<Part>| downcast(part.clone().expect("all ranks have arrived"));
        Ok(parts.iter().map(part).collect())
    }

    fn missing(&self) -> Vec<usize> {
        let parts = self.slot.parts.lock();
        let absent = parts.iter().zip(&self.group.ranks);
        absent
            .filter_map(|(part, &rank)| part.is_none().then_some(rank))
            .collect()
    }

    /// Fails the group; what it failed with first, which may be another's cause.
    fn fail(&self, cause: FsdpError) -> FsdpError {
        let launch = &self.group.launch;
        launch.fail(cause);
        launch.failure().expect("the group has just failed").clone()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let left = self.slot.left.fetch_add(1, Ordering::AcqRel) + 1;
        match self.position {
            Some(position) if left == self.group.ranks.len() => {
                self.group.slots.lock().remove(&position);
            }
            // Everyone who took part has gone, so nobody else need come.
            None if left == self.slot.entered.load(Ordering::Acquire) => self.close_gather(),
            _ => {}
        }
    }
}

fn downcast<T: Send + Sync + 'static>(part: Part) -> Arc<T> {
    part.downcast()
        .expect("equal calls exchange values of equal type")
}
