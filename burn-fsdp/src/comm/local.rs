//! The engine for ranks that are threads of one process, on host tensors.
//!
//! Ranks share memory, so nothing is sent. In an all-gather each rank writes its own shard, cast on
//! the way, straight into the unsharded tensors, which all ranks then read. In a reduction each
//! rank shows its gradient and then adds up its own part of everyone's, in rank order, so that
//! results are bit-equal from run to run.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn::tensor::{Bytes, DType, Tensor};
use parking_lot::{Condvar, Mutex};

use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
use super::host::{self, HostTensor, with_float};
use super::{Call, Engine, GatherInput, GatherWork, ReduceInput, Reduction};
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::ShardLayout;
use crate::{FsdpError, Result};

/// How often a waiting rank looks before it sleeps; ranks mostly arrive within microseconds.
const SPINS: usize = 2_000;
/// How often a sleeping rank looks whether a peer has gone.
const NAP: Duration = Duration::from_millis(100);

/// What all groups of one launch share: who failed, who returned, who did what last.
#[derive(Debug)]
pub(crate) struct Launch {
    timeout: Duration,
    failure: OnceLock<FsdpError>,
    failed: AtomicBool,
    returned: Vec<AtomicBool>,
    last_calls: Vec<Mutex<Option<Call>>>,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Launch {
    pub(crate) fn new(world_size: usize, timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            timeout,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            returned: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            last_calls: (0..world_size).map(|_| Mutex::new(None)).collect(),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        })
    }

    /// The engines of all ranks, in rank order.
    pub(crate) fn engines(self: &Arc<Self>) -> Vec<Arc<dyn Engine>> {
        let ranks: Vec<usize> = (0..self.returned.len()).collect();
        let group = Group::new(self.clone(), ranks.clone());
        ranks
            .into_iter()
            .map(|rank| Arc::new(LocalEngine::new(group.clone(), rank)) as Arc<dyn Engine>)
            .collect()
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
        // The lock orders the change before the look of a rank that is about to sleep.
        drop(self.lock.lock());
        self.changed.notify_all();
    }

    fn last_calls(&self) -> Vec<String> {
        let text = |call: &Option<Call>| call.as_ref().map_or("nothing".into(), Call::to_string);
        self.last_calls.iter().map(|c| text(&c.lock())).collect()
    }
}

type Part = Arc<dyn Any + Send + Sync>;

/// A set of ranks and the collectives between them that are under way.
#[derive(Debug)]
struct Group {
    launch: Arc<Launch>,
    /// The members, by their rank in the launch.
    ranks: Vec<usize>,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    pool: Arc<BufferPool>,
}

/// One collective under way.
#[derive(Debug)]
struct Slot {
    first: (usize, Call),
    /// What the first rank made for all.
    common: Part,
    parts: Mutex<Vec<Option<Part>>>,
    arrived: AtomicUsize,
    left: AtomicUsize,
}

impl Group {
    fn new(launch: Arc<Launch>, ranks: Vec<usize>) -> Arc<Self> {
        Arc::new(Self {
            launch,
            ranks,
            slots: Default::default(),
            pool: Default::default(),
        })
    }
}

#[derive(Debug)]
struct LocalEngine {
    group: Arc<Group>,
    rank: usize,
    next: AtomicU64,
}

impl LocalEngine {
    fn new(group: Arc<Group>, rank: usize) -> Self {
        Self {
            group,
            rank,
            next: AtomicU64::new(0),
        }
    }

    /// Takes this rank's place in the group's next collective.
    fn enter(&self, call: Call, common: impl FnOnce() -> Part) -> Result<Ticket> {
        let launch = &self.group.launch;
        launch.check()?;
        let global = self.group.ranks[self.rank];
        *launch.last_calls[global].lock() = Some(call.clone());
        let position = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = self
            .group
            .slots
            .lock()
            .entry(position)
            .or_insert_with(|| {
                Arc::new(Slot {
                    first: (global, call.clone()),
                    common: common(),
                    parts: Mutex::new(vec![None; self.group.ranks.len()]),
                    arrived: AtomicUsize::new(0),
                    left: AtomicUsize::new(0),
                })
            })
            .clone();
        let ticket = Ticket {
            group: self.group.clone(),
            slot,
            position,
            rank: self.rank,
            call,
        };
        let (first_rank, first_call) = &ticket.slot.first;
        if *first_call != ticket.call {
            return Err(ticket.fail(FsdpError::CollectiveMismatch {
                rank_a: *first_rank,
                call_a: first_call.to_string(),
                rank_b: global,
                call_b: ticket.call.to_string(),
            }));
        }
        Ok(ticket)
    }

    /// Shows `part` to all ranks and returns everyone's.
    fn rendezvous<T: Send + Sync + 'static>(&self, call: Call, part: T) -> Result<Vec<Arc<T>>> {
        let ticket = self.enter(call, || Arc::new(()))?;
        ticket.arrive(Arc::new(part));
        ticket.wait_for_parts()
    }
}

/// A rank's place in one collective.
#[derive(Debug)]
struct Ticket {
    group: Arc<Group>,
    slot: Arc<Slot>,
    position: u64,
    rank: usize,
    call: Call,
}

impl Ticket {
    fn common<T: Send + Sync + 'static>(&self) -> Arc<T> {
        downcast(self.slot.common.clone())
    }

    fn arrive(&self, part: Part) {
        self.slot.parts.lock()[self.rank] = Some(part);
        let arrived = self.slot.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        if arrived == self.group.ranks.len() {
            self.group.launch.notify();
        }
    }

    fn all_arrived(&self) -> bool {
        self.slot.arrived.load(Ordering::Acquire) == self.group.ranks.len()
    }

    /// Blocks until all ranks have arrived.
    fn wait(&self) -> Result<()> {
        let launch = &self.group.launch;
        for _ in 0..SPINS {
            if self.all_arrived() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        let mut lock = launch.lock.lock();
        loop {
            if self.all_arrived() {
                return Ok(());
            }
            launch.check()?;
            let missing = self.missing();
            let gone = |rank: &&usize| launch.returned[**rank].load(Ordering::Acquire);
            let error = if let Some(&gone) = missing.iter().find(gone) {
                FsdpError::RankReturned {
                    rank: self.group.ranks[self.rank],
                    call: self.call.to_string(),
                    gone,
                }
            } else if start.elapsed() >= launch.timeout {
                FsdpError::Timeout {
                    rank: self.group.ranks[self.rank],
                    call: self.call.to_string(),
                    after: launch.timeout,
                    missing,
                    last_calls: launch.last_calls(),
                }
            } else {
                launch.changed.wait_for(&mut lock, NAP.min(launch.timeout));
                continue;
            };
            drop(lock);
            return Err(self.fail(error));
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
        if self.slot.left.fetch_add(1, Ordering::AcqRel) + 1 == self.group.ranks.len() {
            self.group.slots.lock().remove(&self.position);
        }
    }
}

fn downcast<T: Send + Sync + 'static>(part: Part) -> Arc<T> {
    part.downcast()
        .expect("equal calls exchange values of equal type")
}

/// A tensor of an all-gather under way.
#[derive(Debug)]
enum Gathering {
    /// Whole already, as it is not split.
    Done(Tensor<1>),
    /// Being filled: the place of its buffer among the collective's.
    Filling {
        buffer: usize,
        len: usize,
        dtype: DType,
        counted: MemoryGuard,
    },
}

#[derive(Debug)]
struct LocalGather {
    ticket: Ticket,
    buffers: Arc<Vec<Arc<SharedBuffer>>>,
    tensors: Vec<Gathering>,
}

impl GatherWork for LocalGather {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor<1>>> {
        self.ticket.wait()?;
        let finish = |tensor| match tensor {
            Gathering::Done(tensor) => tensor,
            Gathering::Filling {
                buffer,
                len,
                dtype,
                counted,
            } => {
                // SAFETY: all ranks have arrived, so all have written their parts.
                let filled = unsafe { FilledBuffer::new(self.buffers[buffer].clone(), counted) };
                host::from_bytes(filled.into_bytes(), len, dtype)
            }
        };
        Ok(self.tensors.into_iter().map(finish).collect())
    }
}

impl Engine for LocalEngine {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.ranks.len()
    }

    fn exchange(&self, call: Call, message: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>> {
        self.rendezvous(call, message)
    }

    fn all_gather(
        &self,
        call: Call,
        inputs: Vec<GatherInput>,
        memory: &Arc<MemoryCounter>,
    ) -> Result<Box<dyn GatherWork>> {
        let size = |input: &GatherInput| input.layout.full_len() * input.dtype.size();
        let is_split = |input: &&GatherInput| !input.layout.is_whole();
        let ticket = self.enter(call, || {
            let sizes = inputs.iter().filter(is_split).map(size);
            let buffers: Vec<_> = sizes
                .map(|size| Arc::new(self.group.pool.take(size)))
                .collect();
            Arc::new(buffers)
        })?;
        let buffers = ticket.common::<Vec<Arc<SharedBuffer>>>();
        let mut tensors = Vec::with_capacity(inputs.len());
        let mut next_buffer = 0;
        for input in inputs {
            if input.layout.is_whole() {
                tensors.push(Gathering::Done(cast_whole(input, memory)?));
                continue;
            }
            let shard = host::host(&input.shard)?;
            let element = input.dtype.size();
            for span in input.layout.spans(self.rank) {
                let bytes = span.full * element..(span.full + span.len) * element;
                // SAFETY: spans of one rank are disjoint, those of different ranks too, and nobody
                // reads before all ranks have arrived.
                let target = unsafe { buffers[next_buffer].slice_mut(bytes) };
                host::copy_cast(&shard, span.shard, target, input.dtype);
            }
            tensors.push(Gathering::Filling {
                buffer: next_buffer,
                len: input.layout.full_len(),
                dtype: input.dtype,
                counted: MemoryGuard::new(memory, size(&input)),
            });
            next_buffer += 1;
        }
        ticket.arrive(Arc::new(()));
        Ok(Box::new(LocalGather {
            ticket,
            buffers,
            tensors,
        }))
    }

    fn reduce(
        &self,
        call: Call,
        inputs: Vec<ReduceInput>,
        reduction: Reduction,
    ) -> Result<Vec<Tensor<1>>> {
        let contribution = |input: &ReduceInput| input.contribution.as_ref().map(host::host);
        let own = inputs
            .iter()
            .map(|input| contribution(input).transpose())
            .collect::<Result<Vec<_>>>()?;
        let all: Vec<Arc<Vec<Option<HostTensor>>>> = self.rendezvous(call, own)?;
        let reduced = inputs.iter().enumerate().map(|(i, input)| {
            let parts: Vec<_> = all.iter().map(|rank| rank[i].as_ref()).collect();
            with_float!(input.out_dtype, T => {
                let mut shard = vec![T::default(); input.layout.shard_len()];
                for span in input.layout.spans(self.rank) {
                    let out = &mut shard[span.shard..span.shard + span.len];
                    host::reduce(&parts, span.full, out, input.reduce_dtype, &reduction);
                }
                host::from_bytes(Bytes::from_elems(shard), input.layout.shard_len(), input.out_dtype)
            })
        });
        Ok(reduced.collect())
    }

    fn scatter(
        &self,
        call: Call,
        root: usize,
        layout: &ShardLayout,
        source: Option<Tensor<1>>,
    ) -> Result<Tensor<1>> {
        let source = source.as_ref().map(host::host).transpose()?;
        let all: Vec<Arc<Option<HostTensor>>> = self.rendezvous(call, source)?;
        let source = all[root]
            .as_ref()
            .as_ref()
            .expect("the root passes a tensor");
        Ok(host::shard_of(source, layout, self.rank))
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Engine>> {
        let colors = self.rendezvous(Call::new("split", "the group"), color)?;
        let ticket = self.enter(Call::new("split", "the colors"), || {
            let mut members = BTreeMap::<usize, Vec<usize>>::new();
            for (rank, color) in colors.iter().enumerate() {
                members
                    .entry(**color)
                    .or_default()
                    .push(self.group.ranks[rank]);
            }
            let group = |ranks| Group::new(self.group.launch.clone(), ranks);
            let groups: BTreeMap<_, _> = members.into_iter().map(|(c, r)| (c, group(r))).collect();
            Arc::new(groups)
        })?;
        ticket.arrive(Arc::new(()));
        let groups = ticket.common::<BTreeMap<usize, Arc<Group>>>();
        let group = groups[&color].clone();
        let global = self.group.ranks[self.rank];
        let rank = group.ranks.iter().position(|&r| r == global);
        let rank = rank.expect("a rank is in the group of its own color");
        Ok(Arc::new(LocalEngine::new(group, rank)))
    }

    fn fail(&self, cause: FsdpError) {
        self.group.launch.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.group.launch.failure().cloned()
    }
}

/// A tensor that every rank holds whole: itself, or a counted copy in another dtype.
fn cast_whole(input: GatherInput, memory: &Arc<MemoryCounter>) -> Result<Tensor<1>> {
    if input.shard.dtype() == input.dtype {
        return Ok(input.shard);
    }
    let bytes = input.layout.full_len() * input.dtype.size();
    let buffer = Arc::new(BufferPool::default()).take(bytes);
    {
        // SAFETY: the buffer is this function's own.
        let target = unsafe { buffer.slice_mut(0..bytes) };
        host::copy_cast(&host::host(&input.shard)?, 0, target, input.dtype);
    }
    let counted = MemoryGuard::new(memory, bytes);
    // SAFETY: as above, and its only writer is done.
    let filled = unsafe { FilledBuffer::new(Arc::new(buffer), counted) };
    Ok(host::from_bytes(
        filled.into_bytes(),
        input.layout.full_len(),
        input.dtype,
    ))
}
