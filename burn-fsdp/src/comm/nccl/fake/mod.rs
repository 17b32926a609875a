//! Devices that run what is queued on them in any order that is allowed, and object to what is not.
//!
//! [`Sim`] keeps the order and the rules; this is the [`Driver`] on top, with the data in f64 and
//! rounded to its dtype.

mod arithmetic;
mod sim;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{AllocationProperty, Bytes, DType, Tensor, TensorData};
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::sim::{EventState, MemoryId, Op, Place, Sim};
use super::driver::{Collective, Driver, Outcome, Stream, UniqueId};
use crate::Result;
use crate::comm::bundle::Bundle;
use crate::comm::host;

/// Longest wait for a device, so that a test ends in any case.
const PATIENCE: Duration = Duration::from_secs(60);

/// The devices of all ranks.
#[derive(Debug)]
pub(super) struct FakeCluster {
    sim: Mutex<Sim>,
    changed: Condvar,
}

impl FakeCluster {
    pub(super) fn new(devices: usize, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            sim: Mutex::new(Sim::new(devices, seed)),
            changed: Condvar::new(),
        })
    }

    pub(super) fn driver(self: &Arc<Self>, device: usize) -> Arc<FakeDriver> {
        Arc::new(FakeDriver {
            cluster: self.clone(),
            device,
        })
    }

    /// Makes a device report an error from now on.
    pub(super) fn break_device(&self, device: usize, error: &str) {
        self.quietly(|sim| sim.break_device(device, error));
    }

    /// Lets no collective run any more, once everything has run that can.
    pub(super) fn freeze(&self) {
        self.quietly(Sim::freeze);
    }

    /// Launches of collectives so far, of all ranks.
    pub(super) fn launches(&self) -> usize {
        self.sim.lock().launches
    }

    /// Fails if a rule was broken, or unless everything is let go of.
    pub(super) fn assert_clean(&self) {
        let mut sim = self.sim.lock();
        let start = Instant::now();
        loop {
            assert!(sim.violations.is_empty(), "{}", sim.violations.join("; "));
            while sim.step() {}
            let Some(left) = sim.left_behind() else {
                return;
            };
            assert!(start.elapsed() < PATIENCE, "left behind: {left}");
            // Watchdogs are on their way out.
            self.changed.wait_for(&mut sim, Duration::from_millis(5));
        }
    }

    /// Does something that may break a rule, which is a panic.
    fn with<T>(&self, f: impl FnOnce(&mut Sim) -> T) -> T {
        let mut sim = self.sim.lock();
        let before = sim.violations.len();
        let value = f(&mut sim);
        self.changed.notify_all();
        if let Some(violation) = sim.violations.get(before).cloned() {
            drop(sim);
            panic!("{violation}");
        }
        value
    }

    /// Does something that may break a rule while something is dropped, which may be in a panic.
    fn quietly(&self, f: impl FnOnce(&mut Sim)) {
        f(&mut self.sim.lock());
        self.changed.notify_all();
    }

    /// Waits until `f` has a value, while the devices run.
    fn wait_for<T>(&self, what: &str, mut f: impl FnMut(&mut Sim) -> Option<T>) -> T {
        let mut sim: MutexGuard<'_, Sim> = self.sim.lock();
        let start = Instant::now();
        loop {
            if let Some(value) = f(&mut sim) {
                self.changed.notify_all();
                return value;
            }
            if sim.step() {
                self.changed.notify_all();
            } else {
                assert!(start.elapsed() < PATIENCE, "{what} never ends");
                self.changed.wait_for(&mut sim, Duration::from_millis(50));
            }
        }
    }
}

/// Memory, as long as it has handles.
#[derive(Debug)]
struct Handle {
    cluster: Arc<FakeCluster>,
    id: MemoryId,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cluster.quietly(|sim| sim.drop_handle(self.id));
    }
}

#[derive(Clone, Debug)]
pub(super) struct FakeBuffer {
    handle: Arc<Handle>,
    range: Range<usize>,
    dtype: DType,
}

impl FakeBuffer {
    fn place(&self) -> Place {
        Place {
            memory: self.handle.id,
            range: self.range.clone(),
            dtype: self.dtype,
        }
    }
}

#[derive(Debug)]
pub(super) struct FakeEvent {
    cluster: Arc<FakeCluster>,
    state: Arc<EventState>,
}

impl Drop for FakeEvent {
    fn drop(&mut self) {
        self.cluster.quietly(|sim| sim.events -= 1);
    }
}

#[derive(Debug)]
pub(super) struct FakePins {
    cluster: Arc<FakeCluster>,
    memories: Vec<MemoryId>,
}

impl Drop for FakePins {
    fn drop(&mut self) {
        self.cluster.quietly(|sim| sim.unpin(&self.memories));
    }
}

/// One rank's membership.
#[derive(Clone, Copy, Debug)]
pub(super) struct FakeCommunicator {
    index: usize,
    rank: usize,
}

/// One device.
#[derive(Debug)]
pub(super) struct FakeDriver {
    cluster: Arc<FakeCluster>,
    device: usize,
}

impl FakeDriver {
    fn kernel(
        &self,
        reads: &[&FakeBuffer],
        writes: &[&FakeBuffer],
        run: impl FnOnce(&[Vec<f64>]) -> Vec<Vec<f64>> + Send + 'static,
    ) {
        let places = |buffers: &[&FakeBuffer]| buffers.iter().map(|b| b.place()).collect();
        let (reads, writes) = (places(reads), places(writes));
        self.cluster
            .with(|sim| sim.kernel(self.device, reads, writes, Box::new(run)));
    }

    fn run_until_here(&self) {
        let is_idle = |sim: &mut Sim| sim.is_drained(self.device, Stream::Compute).then_some(());
        self.cluster.wait_for("a compute stream", is_idle);
    }
}

/// A tensor's bytes, which hold its memory.
struct Held {
    bytes: Bytes,
    _buffer: FakeBuffer,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Driver for FakeDriver {
    type Buffer = FakeBuffer;
    type Event = FakeEvent;
    type Pins = FakePins;
    type Communicator = FakeCommunicator;

    fn identity(&self) -> Outcome<String> {
        Ok(format!("fake device {}", self.device))
    }

    fn allocate(&self, len: usize, dtype: DType) -> FakeBuffer {
        let id = self.cluster.with(|sim| sim.allocate(self.device, len));
        FakeBuffer {
            handle: Arc::new(Handle {
                cluster: self.cluster.clone(),
                id,
            }),
            range: 0..len,
            dtype,
        }
    }

    fn range(&self, buffer: &FakeBuffer, range: Range<usize>) -> FakeBuffer {
        let start = buffer.range.start;
        let range = start + range.start..start + range.end;
        assert!(range.end <= buffer.range.end);
        FakeBuffer {
            range,
            ..buffer.clone()
        }
    }

    fn buffer_of(&self, tensor: Tensor<1>) -> Result<FakeBuffer> {
        let buffer = self.allocate(tensor.dims()[0], tensor.dtype());
        let values: Vec<f64> = tensor.into_data().iter::<f64>().collect();
        self.kernel(&[], &[&buffer], move |_| vec![values]);
        Ok(buffer)
    }

    fn tensor_of(&self, buffer: FakeBuffer) -> Tensor<1> {
        let read = Arc::new(Mutex::new(Vec::new()));
        let kept = read.clone();
        self.kernel(&[&buffer], &[], move |values| {
            kept.lock().clone_from(&values[0]);
            Vec::new()
        });
        self.run_until_here();
        let values = std::mem::take(&mut *read.lock());
        let (len, dtype) = (values.len(), buffer.dtype);
        let data = TensorData::new(values, [len]).convert_dtype(dtype);
        let held = Held {
            bytes: data.into_bytes(),
            _buffer: buffer,
        };
        let bytes = bytes::Bytes::from_owner(held);
        host::from_bytes(
            Bytes::from_shared(bytes, AllocationProperty::Native),
            len,
            dtype,
        )
    }

    fn pack(&self, bundle: &Bundle, shards: &[FakeBuffer], slot: &FakeBuffer) {
        let bundle = bundle.clone();
        let reads: Vec<_> = shards.iter().collect();
        self.kernel(&reads, &[slot], move |shards| {
            vec![arithmetic::pack(&bundle, shards)]
        });
    }

    fn unpack(&self, bundle: &Bundle, slots: &FakeBuffer, full: &FakeBuffer) {
        let bundle = bundle.clone();
        self.kernel(&[slots], &[full], move |slots| {
            vec![arithmetic::unpack(&bundle, &slots[0])]
        });
    }

    fn pack_full(
        &self,
        bundle: &Bundle,
        full: &[Option<FakeBuffer>],
        slots: &FakeBuffer,
        divide: f64,
    ) {
        let bundle = bundle.clone();
        let reads: Vec<_> = full.iter().flatten().collect();
        let dtypes: Vec<_> = full.iter().map(|f| f.as_ref().map(|f| f.dtype)).collect();
        self.kernel(&reads, &[slots], move |full| {
            vec![arithmetic::pack_full(&bundle, full, &dtypes, divide)]
        });
    }

    fn finish(&self, bundle: &Bundle, slot: &FakeBuffer, shards: &[FakeBuffer], divide: f64) {
        let bundle = bundle.clone();
        let writes: Vec<_> = shards.iter().collect();
        let dtypes: Vec<_> = shards.iter().map(|shard| shard.dtype).collect();
        self.kernel(&[slot], &writes, move |slot| {
            arithmetic::finish(&bundle, &slot[0], &dtypes, divide)
        });
    }

    fn record(&self, stream: Stream) -> FakeEvent {
        FakeEvent {
            state: self.cluster.with(|sim| sim.record(self.device, stream)),
            cluster: self.cluster.clone(),
        }
    }

    fn wait(&self, stream: Stream, event: &FakeEvent) {
        self.cluster
            .with(|sim| sim.wait(self.device, stream, &event.state));
    }

    fn is_reached(&self, event: &FakeEvent) -> bool {
        self.cluster
            .with(|sim| sim.look_at(self.device, &event.state))
    }

    fn unique_id(&self) -> Outcome<UniqueId> {
        let number = self.cluster.with(Sim::unique_number);
        let mut id = [0; 128];
        id[..8].copy_from_slice(&number.to_le_bytes());
        Ok(id)
    }

    fn join(&self, id: &UniqueId, rank: usize, world_size: usize) -> Outcome<FakeCommunicator> {
        let mut number = [0; 8];
        number.copy_from_slice(&id[..8]);
        let number = u64::from_le_bytes(number);
        self.cluster
            .with(|sim| sim.come_to_join(number, rank, world_size, self.device));
        let index = self.cluster.wait_for("joining", |sim| sim.joined(number));
        Ok(FakeCommunicator { index, rank })
    }

    fn split(&self, of: &FakeCommunicator, color: usize, key: usize) -> Outcome<FakeCommunicator> {
        let meeting = self
            .cluster
            .with(|sim| sim.come_to_split(of.index, of.rank, color, key));
        let split = self
            .cluster
            .wait_for("splitting", |sim| sim.split(of.index, of.rank, meeting));
        let (index, rank) = split?;
        Ok(FakeCommunicator { index, rank })
    }

    fn run(
        &self,
        communicator: &FakeCommunicator,
        stream: Stream,
        collectives: Vec<Collective<FakeBuffer>>,
    ) -> FakePins {
        let op = |collective: &Collective<FakeBuffer>| Op {
            place: collective.buffer().place(),
            kind: match collective {
                Collective::AllGather { .. } => sim::Kind::AllGather,
                Collective::ReduceScatter { op, .. } => sim::Kind::ReduceScatter(*op),
                Collective::AllReduce { op, .. } => sim::Kind::AllReduce(*op),
                Collective::Broadcast { root, .. } => sim::Kind::Broadcast(*root),
            },
        };
        let ops = collectives.iter().map(op).collect();
        let FakeCommunicator { index, rank } = *communicator;
        let memories = self
            .cluster
            .with(|sim| sim.launch(index, rank, stream, ops));
        FakePins {
            cluster: self.cluster.clone(),
            memories,
        }
    }

    fn release(&self, pins: FakePins) {
        drop(pins);
    }

    fn failure(&self, communicator: &FakeCommunicator) -> Option<String> {
        self.cluster
            .with(|sim| sim.failure(communicator.index, communicator.rank))
    }

    fn abort(&self, communicator: &FakeCommunicator) {
        self.cluster
            .with(|sim| sim.abort(communicator.index, communicator.rank));
    }

    fn destroy(&self, communicator: &FakeCommunicator) {
        self.cluster
            .with(|sim| sim.destroy(communicator.index, communicator.rank));
    }
}
