//! The order in which devices run what is queued, and the rules for queueing it.
//!
//! What is queued runs only when somebody waits for a device or looks at an event, and then in an
//! order drawn at random from those that streams, events and collectives allow.
//!
//! Rules are checked when something is queued, so that whether a mistake is found does not depend on
//! the order drawn. Each stream has a vector clock, and events carry one stream's knowledge to
//! another. What reads memory must know of all writes to it, what writes of all reads too; and when
//! memory is let go of, the stream that may use it again must know of all that collectives do to it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use burn::tensor::DType;

use super::arithmetic;
use crate::comm::nccl::driver::{NcclOp, Stream};

pub(super) type MemoryId = usize;

/// How many of each stream's operations are known of.
type Clock = Vec<u64>;

fn learn(clock: &mut Clock, other: &Clock) {
    clock.resize(clock.len().max(other.len()), 0);
    clock
        .iter_mut()
        .zip(other)
        .for_each(|(a, b)| *a = (*a).max(*b));
}

/// Elements of some memory.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) memory: MemoryId,
    pub(super) range: Range<usize>,
    pub(super) dtype: DType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllGather,
    ReduceScatter(NcclOp),
    AllReduce(NcclOp),
    Broadcast(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) place: Place,
    pub(super) kind: Kind,
}

impl Op {
    fn signature(&self) -> (Kind, usize, DType) {
        (self.kind, self.place.range.len(), self.place.dtype)
    }
}

#[derive(Debug)]
pub(super) struct EventState {
    clock: Clock,
    pub(super) reached: AtomicBool,
}

/// From the values read to those written.
pub(super) type Kernel = Box<dyn FnOnce(&[Vec<f64>]) -> Vec<Vec<f64>> + Send>;

enum Task {
    Kernel {
        reads: Vec<Place>,
        writes: Vec<Place>,
        run: Kernel,
    },
    Record(Arc<EventState>),
    Wait(Arc<EventState>),
    /// What a rank's communicator has at a position.
    Collective {
        communicator: usize,
        rank: usize,
        position: usize,
    },
    /// The memory is used again.
    Reuse(MemoryId),
}

#[derive(Default)]
struct StreamState {
    queue: VecDeque<Task>,
    clock: Clock,
}

/// Its first two streams are for gathers and reductions.
struct Device {
    streams: Vec<StreamState>,
    compute: HashMap<ThreadId, usize>,
    /// What the host knows to have run.
    known: Clock,
    error: Option<String>,
}

const GATHER: usize = 0;
const REDUCE: usize = 1;

struct Memory {
    device: usize,
    /// The stream that may use it again.
    origin: usize,
    accesses: Vec<Access>,
    /// A compute stream that did not allocate it but used it, and what that knew then. CubeCL keeps
    /// the memory until it is past that.
    kept_by: Option<(usize, Clock)>,
    has_handles: bool,
    pins: usize,
}

#[derive(Clone, Copy)]
struct Access {
    stream: usize,
    tick: u64,
    is_write: bool,
}

impl Access {
    fn is_known(&self, clock: &Clock) -> bool {
        clock
            .get(self.stream)
            .is_some_and(|&known| known >= self.tick)
    }

    fn is_by_a_collective(&self) -> bool {
        [GATHER, REDUCE].contains(&self.stream)
    }
}

struct Communicator {
    ranks: Vec<Member>,
}

struct Member {
    device: usize,
    ended: Option<&'static str>,
    queued: Vec<Vec<Op>>,
    done: usize,
    splits: usize,
    launches_after_abort: usize,
}

impl Member {
    fn new(device: usize) -> Self {
        Self {
            device,
            ended: None,
            queued: Vec::new(),
            done: 0,
            splits: 0,
            launches_after_abort: 0,
        }
    }
}

/// Ranks that want to split a communicator: its number, and the how manieth time.
pub(super) type Meeting = (usize, usize);

#[derive(Default)]
pub(super) struct Sim {
    random: u64,
    devices: Vec<Device>,
    values: HashMap<MemoryId, Vec<f64>>,
    memories: HashMap<MemoryId, Memory>,
    numbers: usize,
    communicators: Vec<Communicator>,
    /// Rank and device of those who have come to join.
    joining: HashMap<u64, Vec<(usize, usize)>>,
    joined: HashMap<u64, usize>,
    /// Rank, color and key of those who have come to split.
    splitting: HashMap<Meeting, Vec<(usize, usize, usize)>>,
    /// What became of each rank.
    split: HashMap<(Meeting, usize), (usize, usize)>,
    is_frozen: bool,
    pub(super) events: usize,
    pub(super) launches: usize,
    pub(super) violations: Vec<String>,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").finish_non_exhaustive()
    }
}

impl Sim {
    pub(super) fn new(devices: usize, seed: u64) -> Self {
        let device = || Device {
            streams: vec![StreamState::default(), StreamState::default()],
            compute: HashMap::new(),
            known: Clock::new(),
            error: None,
        };
        Self {
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            devices: (0..devices).map(|_| device()).collect(),
            ..Self::default()
        }
    }

    pub(super) fn break_device(&mut self, device: usize, error: &str) {
        self.devices[device].error = Some(error.to_string());
    }

    /// Lets no collective run any more, once everything has run that can.
    pub(super) fn freeze(&mut self) {
        while self.step() {}
        self.is_frozen = true;
    }

    /// What has not been let go of.
    pub(super) fn left_behind(&self) -> Option<String> {
        let streams = self.devices.iter().flat_map(|device| &device.streams);
        let queued: usize = streams.map(|stream| stream.queue.len()).sum();
        let pins: usize = self.memories.values().map(|memory| memory.pins).sum();
        let ranks = self
            .communicators
            .iter()
            .flat_map(|communicator| &communicator.ranks);
        let alive = ranks.filter(|member| member.ended.is_none()).count();
        let counts = [
            (queued, "queued operations"),
            (self.memories.len(), "buffers"),
            (self.events, "events"),
            (pins, "pins"),
            (alive, "ranks of communicators"),
        ];
        let left = counts.iter().filter(|(count, _)| *count > 0);
        let left: Vec<_> = left
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!left.is_empty()).then(|| left.join(", "))
    }

    fn object(&mut self, violation: impl Into<String>) {
        self.violations.push(violation.into());
    }

    pub(super) fn unique_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers as u64
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) as usize % below
    }

    // ---- memory

    pub(super) fn allocate(&mut self, device: usize, len: usize) -> MemoryId {
        let origin = self.stream(device, Stream::Compute);
        let id = self.unique_number() as MemoryId;
        self.values.insert(id, vec![f64::NAN; len]);
        self.memories.insert(
            id,
            Memory {
                device,
                origin,
                accesses: Vec::new(),
                kept_by: None,
                has_handles: true,
                pins: 0,
            },
        );
        id
    }

    pub(super) fn drop_handle(&mut self, id: MemoryId) {
        self.memory(id).has_handles = false;
        self.free_if_unused(id);
    }

    pub(super) fn unpin(&mut self, ids: &[MemoryId]) {
        for &id in ids {
            self.memory(id).pins -= 1;
            self.free_if_unused(id);
        }
    }

    fn memory(&mut self, id: MemoryId) -> &mut Memory {
        self.memories
            .get_mut(&id)
            .expect("memory with a handle or a pin is there")
    }

    fn free_if_unused(&mut self, id: MemoryId) {
        let memory = self.memory(id);
        if memory.has_handles || memory.pins > 0 {
            return;
        }
        let memory = self.memories.remove(&id).expect("it is there");
        let Device { streams, known, .. } = &self.devices[memory.device];
        let (freed_on, kept_until) = match &memory.kept_by {
            Some((stream, clock)) => (*stream, clock),
            None => (memory.origin, &streams[memory.origin].clock),
        };
        let is_over = |a: &Access| a.is_known(kept_until) || a.is_known(known);
        let mut by_collectives = memory.accesses.iter().filter(|a| a.is_by_a_collective());
        if !by_collectives.all(is_over) {
            self.object("memory is let go of while a collective may still use it");
        }
        self.queue(memory.device, freed_on, Task::Reuse(id));
    }

    fn access(&mut self, id: MemoryId, stream: usize, is_write: bool) {
        let device = self.memory(id).device;
        let tick = self.devices[device].streams[stream].clock[stream];
        let origin = self.memory(id).origin;
        let is_foreign = origin != stream && ![GATHER, REDUCE].contains(&stream);
        if is_foreign {
            // CubeCL makes kernels wait for the stream that allocated what they use.
            let known = self.devices[device].streams[origin].clock.clone();
            learn(&mut self.devices[device].streams[stream].clock, &known);
        }
        let clock = self.devices[device].streams[stream].clock.clone();
        if is_foreign {
            self.memory(id).kept_by = Some((stream, clock.clone()));
        }
        let earlier = &mut self.memory(id).accesses;
        let conflicts = |a: &Access| (is_write || a.is_write) && !a.is_known(&clock);
        let is_race = earlier.iter().any(conflicts);
        earlier.push(Access {
            stream,
            tick,
            is_write,
        });
        if is_race {
            let what = if is_write { "written" } else { "read" };
            self.object(format!("memory is {what} before it is ready"));
        }
    }

    // ---- streams

    fn stream(&mut self, device: usize, stream: Stream) -> usize {
        let device = &mut self.devices[device];
        match stream {
            Stream::Gather => GATHER,
            Stream::Reduce => REDUCE,
            Stream::Compute => {
                let new = device.streams.len();
                let thread = std::thread::current().id();
                let stream = *device.compute.entry(thread).or_insert(new);
                if stream == new {
                    device.streams.push(StreamState::default());
                }
                stream
            }
        }
    }

    fn tick(&mut self, device: usize, stream: usize) {
        let clock = &mut self.devices[device].streams[stream].clock;
        clock.resize(clock.len().max(stream + 1), 0);
        clock[stream] += 1;
    }

    fn queue(&mut self, device: usize, stream: usize, task: Task) {
        self.devices[device].streams[stream].queue.push_back(task);
    }

    pub(super) fn kernel(
        &mut self,
        device: usize,
        reads: Vec<Place>,
        writes: Vec<Place>,
        run: Kernel,
    ) {
        let stream = self.stream(device, Stream::Compute);
        self.tick(device, stream);
        reads
            .iter()
            .for_each(|place| self.access(place.memory, stream, false));
        writes
            .iter()
            .for_each(|place| self.access(place.memory, stream, true));
        self.queue(device, stream, Task::Kernel { reads, writes, run });
    }

    pub(super) fn record(&mut self, device: usize, stream: Stream) -> Arc<EventState> {
        let stream = self.stream(device, stream);
        let event = Arc::new(EventState {
            clock: self.devices[device].streams[stream].clock.clone(),
            reached: AtomicBool::new(false),
        });
        self.events += 1;
        self.queue(device, stream, Task::Record(event.clone()));
        event
    }

    pub(super) fn wait(&mut self, device: usize, stream: Stream, event: &Arc<EventState>) {
        let stream = self.stream(device, stream);
        learn(
            &mut self.devices[device].streams[stream].clock,
            &event.clock,
        );
        self.queue(device, stream, Task::Wait(event.clone()));
    }

    /// Whether the event is reached, after a while.
    pub(super) fn look_at(&mut self, device: usize, event: &EventState) -> bool {
        for _ in 0..self.random(8) {
            self.step();
        }
        let is_reached = event.reached.load(Ordering::Relaxed);
        if is_reached {
            learn(&mut self.devices[device].known, &event.clock);
        }
        is_reached
    }

    /// Whether all that is queued has run, which the host then knows.
    pub(super) fn is_drained(&mut self, device: usize, stream: Stream) -> bool {
        let stream = self.stream(device, stream);
        let Device { streams, known, .. } = &mut self.devices[device];
        let is_drained = streams[stream].queue.is_empty();
        if is_drained {
            learn(known, &streams[stream].clock);
        }
        is_drained
    }

    // ---- communicators

    pub(super) fn come_to_join(&mut self, id: u64, rank: usize, world_size: usize, device: usize) {
        let mut joining = self.joining.remove(&id).unwrap_or_default();
        joining.push((rank, device));
        if joining.len() == world_size {
            joining.sort_unstable();
            let ranks = joining
                .into_iter()
                .map(|(_, device)| Member::new(device))
                .collect();
            self.joined.insert(id, self.communicators.len());
            self.communicators.push(Communicator { ranks });
        } else {
            self.joining.insert(id, joining);
        }
    }

    pub(super) fn joined(&self, id: u64) -> Option<usize> {
        self.joined.get(&id).copied()
    }

    pub(super) fn come_to_split(
        &mut self,
        communicator: usize,
        rank: usize,
        color: usize,
        key: usize,
    ) -> Meeting {
        let members = &mut self.communicators[communicator].ranks;
        let meeting = (communicator, members[rank].splits);
        members[rank].splits += 1;
        if let Some(ended) = members[rank].ended {
            self.object(format!("a communicator that was {ended} is split"));
        }
        let come = self.splitting.entry(meeting).or_default();
        come.push((rank, color, key));
        if come.len() == self.communicators[communicator].ranks.len() {
            self.form_split(meeting);
        }
        meeting
    }

    fn form_split(&mut self, meeting: Meeting) {
        let mut come = self
            .splitting
            .remove(&meeting)
            .expect("all ranks have come");
        come.sort_unstable_by_key(|(_, color, key)| (*color, *key));
        for group in come.chunk_by(|a, b| a.1 == b.1) {
            let index = self.communicators.len();
            let device = |rank: &usize| self.communicators[meeting.0].ranks[*rank].device;
            let ranks = group
                .iter()
                .map(|(rank, ..)| Member::new(device(rank)))
                .collect();
            self.communicators.push(Communicator { ranks });
            for (new_rank, (rank, ..)) in group.iter().enumerate() {
                self.split.insert((meeting, *rank), (index, new_rank));
            }
        }
    }

    pub(super) fn split(
        &self,
        communicator: usize,
        rank: usize,
        meeting: Meeting,
    ) -> Option<Result<(usize, usize), String>> {
        let ended = self.communicators[communicator].ranks[rank].ended;
        let split = self.split.get(&(meeting, rank)).map(|split| Ok(*split));
        split.or_else(|| ended.map(|ended| Err(format!("the communicator was {ended}"))))
    }

    pub(super) fn launch(
        &mut self,
        communicator: usize,
        rank: usize,
        stream: Stream,
        ops: Vec<Op>,
    ) -> Vec<MemoryId> {
        self.launches += 1;
        let members = &mut self.communicators[communicator].ranks;
        let member = &mut members[rank];
        if let Some(ended) = member.ended {
            // The watchdog may have aborted it while one launch was under way.
            member.launches_after_abort += 1;
            if member.launches_after_abort > 1 || ended != "aborted" {
                self.object(format!("a collective on a communicator that was {ended}"));
            }
            return Vec::new();
        }
        let (device, position) = (member.device, member.queued.len());
        member.queued.push(ops.clone());
        let signature = |ops: &[Op]| ops.iter().map(Op::signature).collect::<Vec<_>>();
        let own = signature(&ops);
        let others = members
            .iter()
            .filter_map(|member| member.queued.get(position));
        let all_agree = others.map(|ops| signature(ops)).all(|other| other == own);
        if !all_agree {
            self.object(format!(
                "ranks have different collectives at position {position}"
            ));
        }
        let stream = self.stream(device, stream);
        self.tick(device, stream);
        for op in &ops {
            self.access(op.place.memory, stream, true);
            self.memory(op.place.memory).pins += 1;
        }
        let task = Task::Collective {
            communicator,
            rank,
            position,
        };
        self.queue(device, stream, task);
        ops.iter().map(|op| op.place.memory).collect()
    }

    pub(super) fn failure(&mut self, communicator: usize, rank: usize) -> Option<String> {
        let member = &self.communicators[communicator].ranks[rank];
        match member.ended {
            Some(_) => None,
            None => self.devices[member.device].error.clone(),
        }
    }

    pub(super) fn abort(&mut self, communicator: usize, rank: usize) {
        let device = self.end(communicator, rank, "aborted");
        let Device { streams, known, .. } = &mut self.devices[device];
        for stream in [GATHER, REDUCE] {
            learn(known, &streams[stream].clock);
        }
    }

    pub(super) fn destroy(&mut self, communicator: usize, rank: usize) {
        let member = &self.communicators[communicator].ranks[rank];
        if member.done < member.queued.len() {
            self.object("a communicator is destroyed while a collective is under way");
        }
        self.end(communicator, rank, "destroyed");
    }

    fn end(&mut self, communicator: usize, rank: usize, how: &'static str) -> usize {
        let member = &mut self.communicators[communicator].ranks[rank];
        let device = member.device;
        if let Some(before) = member.ended.replace(how) {
            self.object(format!("a communicator that was {before} is {how}"));
        }
        device
    }

    // ---- running

    /// Runs one operation that may run, if there is any.
    pub(super) fn step(&mut self) -> bool {
        let streams =
            |device: usize| (0..self.devices[device].streams.len()).map(move |s| (device, s));
        let all = (0..self.devices.len()).flat_map(streams);
        let ready: Vec<_> = all
            .filter(|&(device, stream)| self.may_run(device, stream))
            .collect();
        if ready.is_empty() {
            return false;
        }
        let (device, stream) = ready[self.random(ready.len())];
        match self.pop(device, stream) {
            Task::Kernel { reads, writes, run } => {
                let read: Vec<_> = reads
                    .iter()
                    .map(|place| self.values_of(place).to_vec())
                    .collect();
                for (place, values) in writes.iter().zip(run(&read)) {
                    self.values_of(place).copy_from_slice(&values);
                }
            }
            Task::Record(event) => event.reached.store(true, Ordering::Relaxed),
            Task::Wait(_) => {}
            Task::Reuse(memory) => drop(self.values.remove(&memory)),
            Task::Collective {
                communicator,
                rank,
                position,
            } => self.run_collective(communicator, rank, position),
        }
        true
    }

    fn pop(&mut self, device: usize, stream: usize) -> Task {
        let queue = &mut self.devices[device].streams[stream].queue;
        queue.pop_front().expect("what may run is queued")
    }

    fn values_of(&mut self, place: &Place) -> &mut [f64] {
        let values = self.values.get_mut(&place.memory);
        &mut values.expect("memory is used again only behind all that uses it")[place.range.clone()]
    }

    fn may_run(&self, device: usize, stream: usize) -> bool {
        match self.devices[device].streams[stream].queue.front() {
            None => false,
            Some(Task::Wait(event)) => event.reached.load(Ordering::Relaxed),
            Some(Task::Collective {
                communicator,
                rank,
                position,
            }) => {
                let members = &self.communicators[*communicator].ranks;
                let is_next = |member: &Member| member.done == *position;
                let are_all_there = self.heads(*communicator, *position).len() == members.len();
                let may_run = !self.is_frozen && members.iter().all(is_next) && are_all_there;
                may_run || members[*rank].ended.is_some()
            }
            Some(_) => true,
        }
    }

    /// The streams that have got to this position of a communicator.
    fn heads(&self, communicator: usize, position: usize) -> Vec<(usize, usize)> {
        let is_there = |stream: &StreamState| {
            matches!(
                stream.queue.front(),
                Some(Task::Collective { communicator: c, position: p, .. })
                    if (*c, *p) == (communicator, position)
            )
        };
        let members = &self.communicators[communicator].ranks;
        let heads = members.iter().filter_map(|member| {
            let streams = &self.devices[member.device].streams;
            Some((member.device, streams.iter().position(is_there)?))
        });
        heads.collect()
    }

    fn run_collective(&mut self, communicator: usize, rank: usize, position: usize) {
        let members = &mut self.communicators[communicator].ranks;
        if members[rank].ended.is_some() {
            // Its result is anything; its memory may be in use again.
            return;
        }
        let all: Vec<_> = members
            .iter()
            .map(|member| member.queued[position].clone())
            .collect();
        members.iter_mut().for_each(|member| member.done += 1);
        // This rank's own has been taken off its stream already.
        for (device, stream) in self.heads(communicator, position) {
            self.pop(device, stream);
        }
        for i in 0..all[rank].len() {
            let places: Vec<_> = all.iter().map(|ops| &ops[i].place).collect();
            self.exchange(&places, all[rank][i].kind);
        }
    }

    fn exchange(&mut self, places: &[&Place], kind: Kind) {
        let before: Vec<Vec<f64>> = places
            .iter()
            .map(|place| self.values_of(place).to_vec())
            .collect();
        let slot = places[0].range.len() / places.len();
        let dtype = places[0].dtype;
        let reduced =
            |i: usize, op| arithmetic::reduce(before.iter().map(|values| values[i]), op, dtype);
        for (rank, place) in places.iter().enumerate() {
            let own = rank * slot..(rank + 1) * slot;
            let values = self.values_of(place);
            match kind {
                Kind::AllGather => {
                    for (other, before) in before.iter().enumerate() {
                        let slot = other * slot..(other + 1) * slot;
                        values[slot.clone()].copy_from_slice(&before[slot]);
                    }
                }
                Kind::ReduceScatter(op) => {
                    values.fill(f64::NAN);
                    own.for_each(|i| values[i] = reduced(i, op));
                }
                Kind::AllReduce(op) => (0..values.len()).for_each(|i| values[i] = reduced(i, op)),
                Kind::Broadcast(root) => values.copy_from_slice(&before[root]),
            }
        }
    }
}
