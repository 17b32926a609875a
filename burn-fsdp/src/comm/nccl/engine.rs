//! The engine for ranks that have an NVIDIA GPU each.
//!
//! # Note: streams
//!
//! Shards are packed on the compute stream, straight into this rank's slot of the gathered buffer.
//! An event there holds the communication stream, which gathers in place; an event behind that holds
//! the compute stream, but only once somebody waits for the gather, which unpacks it. So a gather
//! that is started early overlaps with computation, and so does a reduction that is waited for late.
//! The host only queues all this, and waits for none of it.
//!
//! CubeCL gives freed memory to whatever is queued next on the stream that allocated it, and knows
//! nothing of our streams. So a buffer is pinned from the collective on, until the compute stream
//! waits for the collective, or until that is done if nobody ever waits.
//!
//! Reductions have a stream of their own. What they wait for on the compute stream then holds no
//! gather up, though NCCL itself runs the kernels of one communicator in the order of their calls.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use bytes::Bytes;
use parking_lot::Mutex;

use super::driver::{Collective, Driver, NcclOp, Stream};
use super::patience::patiently;
use super::watch::{Flight, Watched};
use crate::comm::bundle::Bundle;
use crate::comm::wire::{Outgoing, Wire};
use crate::comm::{
    Call, Engine, GatherInput, GatherKey, GatherSource, GatherWork, Gathered, ReduceInput,
    ReduceWork,
};
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::ShardLayout;
use crate::reduction::{ReduceOp, Reduction};
use crate::{FsdpError, Result};

/// How long to wait for the other ranks before a communicator is left behind.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// The engine of one rank.
#[derive(Debug)]
pub(crate) struct NcclEngine<D: Driver> {
    watched: Arc<Watched<D>>,
    watchdog: Option<JoinHandle<()>>,
    /// Collectives launched so far. Held while one is, so that they are announced and queued in the
    /// same order.
    launched: Mutex<u64>,
}

impl<D: Driver> NcclEngine<D> {
    /// The engine of a rank that has joined `communicator`, whose ranks are those of `wire`.
    pub(super) fn new(
        driver: Arc<D>,
        wire: Arc<dyn Wire>,
        communicator: D::Communicator,
    ) -> Result<Self> {
        let (watched, watchdog) = Watched::start(driver, wire, communicator)?;
        Ok(Self {
            watched,
            watchdog: Some(watchdog),
            launched: Mutex::default(),
        })
    }

    fn driver(&self) -> &D {
        &self.watched.driver
    }

    fn wire(&self) -> &dyn Wire {
        &*self.watched.wire
    }

    /// Announces a collective, and queues it behind what the compute stream has now.
    fn launch(
        &self,
        call: Call,
        stream: Stream,
        collectives: Vec<Collective<D::Buffer>>,
    ) -> Result<Launched<D>> {
        let (watched, driver) = (&self.watched, self.driver());
        watched.check()?;
        let mut launched = self.launched.lock();
        *launched += 1;
        let number = *launched;
        let call = Call {
            subject: format!("{}, collective {number}", call.subject).into(),
            ..call
        };
        let nothing = Outgoing::ToAll(Bytes::new());
        let announced = self.wire().start(call.clone(), nothing);
        let announced = announced.map_err(|cause| watched.fail(cause))?;
        driver.wait(stream, &driver.record(Stream::Compute));
        let pins = driver.run(&watched.communicator, stream, collectives);
        let done = Arc::new(driver.record(stream));
        watched.add(Flight {
            number,
            call,
            since: Instant::now(),
            announced,
            done: done.clone(),
            pins: Some(pins),
        });
        Ok(Launched {
            watched: watched.clone(),
            number,
            done,
        })
    }

    /// Every rank's message, in rank order.
    fn exchange_bytes(&self, call: Call, message: Vec<u8>) -> Result<Vec<Bytes>> {
        let exchange = {
            let _order = self.launched.lock();
            self.wire().start(call, Outgoing::ToAll(message.into()))
        };
        let all = exchange.and_then(|exchange| exchange.wait());
        all.map_err(|cause| self.watched.fail(cause))
    }

    /// A bundle with this rank's shards in its slot.
    fn pack(&self, bundle: Bundle, inputs: &[GatherInput]) -> Result<(Bundle, D::Buffer)> {
        let driver = self.driver();
        let shards = bundle
            .members
            .iter()
            .map(|&i| driver.buffer_of(inputs[i].shard.clone()));
        let shards = shards.collect::<Result<Vec<_>>>()?;
        let slots = driver.allocate(bundle.slots_len(), bundle.dtype);
        let own = driver.range(&slots, bundle.slot(self.rank()));
        driver.pack(&bundle, &shards, &own);
        Ok((bundle, slots))
    }

    /// A bundle with what each rank is to get of this one's contributions.
    fn pack_full(
        &self,
        bundle: Bundle,
        inputs: &mut [ReduceInput],
        divide: f64,
    ) -> Result<(Bundle, D::Buffer)> {
        let driver = self.driver();
        let full = bundle
            .members
            .iter()
            .map(|&i| inputs[i].contribution.take());
        let full = full.map(|tensor| tensor.map(|tensor| driver.buffer_of(tensor)).transpose());
        let full = full.collect::<Result<Vec<_>>>()?;
        let slots = driver.allocate(bundle.slots_len(), bundle.dtype);
        driver.pack_full(&bundle, &full, &slots, divide);
        Ok((bundle, slots))
    }
}

impl<D: Driver> Engine for NcclEngine<D> {
    fn rank(&self) -> usize {
        self.wire().rank()
    }

    fn world_size(&self) -> usize {
        self.wire().world_size()
    }

    fn exchange(&self, call: Call, message: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>> {
        let all = self.exchange_bytes(call, message)?;
        Ok(all
            .into_iter()
            .map(|message| Arc::new(message.into()))
            .collect())
    }

    /// Gathers are matched by position, so nobody asks for the shards of a rank that has not called.
    fn register(&self, _number: u64, _module: Weak<dyn GatherSource>) {}

    fn all_gather(
        &self,
        call: Call,
        _key: Option<GatherKey>,
        inputs: Vec<GatherInput>,
        memory: &Arc<MemoryCounter>,
    ) -> Result<Box<dyn GatherWork>> {
        let (whole, split): (Vec<_>, Vec<_>) =
            (0..inputs.len()).partition(|&i| inputs[i].layout.is_whole());
        let split = split
            .into_iter()
            .map(|i| (i, &inputs[i].layout, inputs[i].dtype));
        let gathering = Bundle::all(split).into_iter();
        let gathering = gathering.map(|bundle| self.pack(bundle, &inputs));
        let gathering = gathering.collect::<Result<Vec<_>>>()?;
        let all_gather = |(_, slots): &(Bundle, D::Buffer)| Collective::AllGather {
            slots: slots.clone(),
        };
        let collectives = gathering.iter().map(all_gather).collect();
        let launched = self.launch(call, Stream::Gather, collectives)?;
        let full_bytes = |bundle: &Bundle| bundle.packing.full_len() * bundle.dtype.size();
        let split_bytes = gathering.iter().map(|(bundle, _)| full_bytes(bundle)).sum();
        let mut counted = vec![MemoryGuard::new(memory, split_bytes)];
        let whole = whole.into_iter().map(|i| {
            let (tensor, copied) = cast_whole(&inputs[i], memory);
            counted.extend(copied);
            (i, tensor)
        });
        Ok(Box::new(NcclGather {
            launched,
            gathering,
            whole: whole.collect(),
            counted,
        }))
    }

    fn reduce(
        &self,
        call: Call,
        mut inputs: Vec<ReduceInput>,
        reduction: Reduction,
        device: &Device,
    ) -> Result<Box<dyn ReduceWork>> {
        let (op, post_divide) = nccl_op(&reduction, self.world_size());
        let tensors = inputs.iter().enumerate();
        let bundles = Bundle::all(tensors.map(|(i, t)| (i, &t.layout, t.reduce_dtype)));
        let reducing = bundles.into_iter();
        let reducing =
            reducing.map(|bundle| self.pack_full(bundle, &mut inputs, reduction.pre_divide));
        let reducing = reducing.collect::<Result<Vec<_>>>()?;
        let collective = |(bundle, slots): &(Bundle, D::Buffer)| {
            let slots = slots.clone();
            match bundle.is_whole {
                true => Collective::AllReduce { buffer: slots, op },
                false => Collective::ReduceScatter { slots, op },
            }
        };
        let collectives = reducing.iter().map(collective).collect();
        let launched = self.launch(call, Stream::Reduce, collectives)?;
        Ok(Box::new(NcclReduce {
            launched,
            reducing,
            dtypes: inputs.iter().map(|input| input.out_dtype).collect(),
            post_divide,
            device: device.clone(),
        }))
    }

    /// By a broadcast of the whole tensor, of which each rank keeps its shard: one tensor at a time,
    /// while a module is sharded or loaded. Only the root knows the dtype.
    fn scatter(
        &self,
        call: Call,
        root: usize,
        layout: &ShardLayout,
        source: Option<Tensor<1>>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let driver = self.driver();
        let name = source.as_ref().map(|tensor| tensor.dtype().name());
        let name = name.unwrap_or_default().as_bytes().to_vec();
        let names = self.exchange_bytes(call.clone(), name)?;
        let dtype = dtype_of(&names[root])?;
        let bundle = Bundle::all([(0, layout, dtype)]).remove(0);
        let slots = driver.allocate(bundle.slots_len(), dtype);
        if let Some(source) = source {
            let full = driver.buffer_of(source)?;
            driver.pack_full(&bundle, &[Some(full)], &slots, 1.0);
        }
        let broadcast = Collective::Broadcast {
            buffer: slots.clone(),
            root,
        };
        let launched = self.launch(call, Stream::Gather, vec![broadcast])?;
        launched.hold_compute();
        let shard = launched.shards(&bundle, &slots, [dtype], 1.0).remove(0);
        launched.release();
        Ok(shard.to_device(device))
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Engine>> {
        let call = Call::new("split", "the group");
        let colors = self.exchange_bytes(call, color.to_le_bytes().to_vec())?;
        let own = &colors[self.rank()];
        let ranks: Vec<_> = (0..colors.len())
            .filter(|&rank| colors[rank] == *own)
            .collect();
        // NCCL splits a communicator that is at rest.
        self.watched.settle();
        let wire = self.wire().subset(&ranks)?;
        let (watched, rank) = (self.watched.clone(), self.rank());
        let split = move || watched.driver.split(&watched.communicator, ranks[0], rank);
        let communicator = patiently(self.wire(), "splitting the communicator", split)?;
        let driver = self.watched.driver.clone();
        Ok(Arc::new(Self::new(driver, wire, communicator)?))
    }

    fn control(&self) -> Result<Arc<dyn Wire>> {
        let all: Vec<_> = (0..self.world_size()).collect();
        self.wire().subset(&all)
    }

    fn fail(&self, cause: FsdpError) {
        self.watched.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.wire().failure()
    }

    /// Waits for what is under way, as the others count on it and the process may end next.
    fn leave(&self) {
        self.watched.settle();
        self.wire().leave();
    }
}

impl<D: Driver> Drop for NcclEngine<D> {
    /// Waits until the communicator is destroyed: the process may be about to end, and NCCL with it.
    fn drop(&mut self) {
        self.watched.close();
        let Some(watchdog) = self.watchdog.take() else {
            return;
        };
        let since = Instant::now();
        while !watchdog.is_finished() && since.elapsed() < LAST_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        if watchdog.is_finished() && watchdog.join().is_err() {
            log::warn!("a watchdog over NCCL has panicked");
        }
    }
}

/// A collective that has been queued.
#[derive(Debug)]
struct Launched<D: Driver> {
    watched: Arc<Watched<D>>,
    number: u64,
    done: Arc<D::Event>,
}

impl<D: Driver> Launched<D> {
    /// Makes what the calling thread computes next wait for the collective.
    fn hold_compute(&self) {
        self.watched.driver.wait(Stream::Compute, &self.done);
    }

    /// The shards of this rank's slot, as they come out of a reduction that compute waits for.
    fn shards(
        &self,
        bundle: &Bundle,
        slots: &D::Buffer,
        dtypes: impl IntoIterator<Item = DType>,
        divide: f64,
    ) -> Vec<Tensor<1>> {
        let driver = &self.watched.driver;
        let lens = bundle.layouts.iter().map(ShardLayout::shard_len);
        let shards = lens.zip(dtypes);
        let shards: Vec<_> = shards
            .map(|(len, dtype)| driver.allocate(len, dtype))
            .collect();
        let slot = driver.range(slots, bundle.slot(self.watched.wire.rank()));
        driver.finish(bundle, &slot, &shards, divide);
        let shards = shards.into_iter();
        shards.map(|shard| driver.tensor_of(shard)).collect()
    }

    /// Ends the pins of a collective whose results have been read, or are about to be, by kernels
    /// that wait for it.
    fn release(&self) {
        self.watched.release(self.number);
    }
}

#[derive(Debug)]
struct NcclGather<D: Driver> {
    launched: Launched<D>,
    /// What is split, with its slots.
    gathering: Vec<(Bundle, D::Buffer)>,
    /// What is whole, with its places.
    whole: Vec<(usize, Tensor<1>)>,
    counted: Vec<MemoryGuard>,
}

impl<D: Driver> GatherWork for NcclGather<D> {
    fn wait(self: Box<Self>) -> Result<Gathered> {
        let watched = &self.launched.watched;
        let driver = &watched.driver;
        watched.check()?;
        self.launched.hold_compute();
        let mut gathered = self.whole;
        for (bundle, slots) in self.gathering {
            let full = driver.allocate(bundle.packing.full_len(), bundle.dtype);
            driver.unpack(&bundle, &slots, &full);
            drop(slots);
            let member = |i| driver.tensor_of(driver.range(&full, bundle.packing.full(i)));
            let members = (0..bundle.members.len()).map(member);
            gathered.extend(bundle.members.iter().copied().zip(members));
        }
        self.launched.release();
        Ok(Gathered {
            tensors: in_order(gathered),
            _counted: self.counted,
        })
    }
}

#[derive(Debug)]
struct NcclReduce<D: Driver> {
    launched: Launched<D>,
    /// What is reduced, with its slots.
    reducing: Vec<(Bundle, D::Buffer)>,
    /// What each input's result is wanted in.
    dtypes: Vec<DType>,
    post_divide: f64,
    device: Device,
}

impl<D: Driver> ReduceWork for NcclReduce<D> {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor<1>>> {
        self.launched.watched.check()?;
        self.launched.hold_compute();
        let mut reduced = Vec::with_capacity(self.dtypes.len());
        for (bundle, slots) in &self.reducing {
            let dtypes = bundle.members.iter().map(|&i| self.dtypes[i]);
            let shards = self
                .launched
                .shards(bundle, slots, dtypes, self.post_divide);
            reduced.extend(bundle.members.iter().copied().zip(shards));
        }
        self.launched.release();
        let reduced = in_order(reduced).into_iter();
        let reduced = reduced.map(|shard| shard.to_device(&self.device));
        Ok(reduced.collect())
    }
}

/// A tensor that every rank holds whole: itself, or a counted copy in another dtype.
fn cast_whole(
    input: &GatherInput,
    memory: &Arc<MemoryCounter>,
) -> (Tensor<1>, Option<MemoryGuard>) {
    let shard = input.shard.clone();
    if shard.dtype() == input.dtype {
        return (shard, None);
    }
    let bytes = input.layout.full_len() * input.dtype.size();
    let counted = MemoryGuard::new(memory, bytes);
    (shard.cast(input.dtype), Some(counted))
}

/// NCCL's operation, and what is left to divide by after it. A plain mean NCCL knows itself.
fn nccl_op(reduction: &Reduction, world_size: usize) -> (NcclOp, f64) {
    let is_mean = reduction.pre_divide == 1.0 && reduction.post_divide == world_size as f64;
    match reduction.op {
        ReduceOp::Sum | ReduceOp::Mean if is_mean => (NcclOp::Avg, 1.0),
        ReduceOp::Sum | ReduceOp::Mean => (NcclOp::Sum, reduction.post_divide),
        ReduceOp::Max => (NcclOp::Max, reduction.post_divide),
        ReduceOp::Min => (NcclOp::Min, reduction.post_divide),
    }
}

/// The values by their places, which are all there.
fn in_order<T>(mut values: Vec<(usize, T)>) -> Vec<T> {
    values.sort_by_key(|(place, _)| *place);
    values.into_iter().map(|(_, value)| value).collect()
}

fn dtype_of(name: &[u8]) -> Result<DType> {
    let known = [DType::F32, DType::F64, DType::F16, DType::BF16];
    let found = known
        .into_iter()
        .find(|dtype| dtype.name().as_bytes() == name);
    found.ok_or_else(|| {
        let name = String::from_utf8_lossy(name);
        FsdpError::argument(format!("a tensor of dtype \"{name}\" can't be scattered"))
    })
}
