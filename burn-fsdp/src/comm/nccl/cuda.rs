//! NCCL on CubeCL's memory and streams.
//!
//! # Note: the device's thread
//!
//! CubeCL queues everything for a device on one thread, some time after it was called for. What is
//! to be ordered with its kernels must be queued there too. So every operation here is handed to
//! that thread, which runs them in the order of the calls; those that fail leave their error for
//! [`failure`](Driver::failure) to find. Only an abort, which must not queue behind what hangs, and
//! what follows it run on the thread that calls.
//!
//! All of CubeCL that this needs is public, though nowhere described: hence the exact version in
//! `Cargo.toml`.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use burn::backend::CubeDevice;
use burn::tensor::{DType, Device, Tensor};
use cubecl::client::Client;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::command::DeviceStream;
use cubecl_server::server::ServerStorage;
use cubecl_server::storage::{ComputeStorage, ManagedResource};
use cubecl_server::stream::WriteScoped;
use cudarc::driver::result as cuda;
use cudarc::driver::sys::{
    CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream,
};
use parking_lot::Mutex;

use super::communicator::{self, Communicator, Elements};
use super::driver::{Collective, Driver, Outcome, Stream, UniqueId};
use super::library;
use crate::comm::bundle::Bundle;
use crate::comm::cube::{buffer_of, device_of, tensor_of};
use crate::comm::launch::panic_message;
use crate::kernels::{self, Buffer, Rounding};
use crate::{FsdpError, Result};

type Server = <cubecl_cuda::CudaRuntime as Runtime>::Server;
type Resource = ManagedResource<<<Server as ServerStorage>::Storage as ComputeStorage>::Resource>;

/// A handle of the CUDA driver. It may be used from any thread, though not after it was destroyed.
#[derive(Clone, Copy, Debug)]
struct Raw<T>(T);

// SAFETY: the driver is safe to call from several threads, and a handle is only its name for a thing.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

impl<T: Copy> Raw<T> {
    /// By a method, so that closures capture the whole.
    fn get(self) -> T {
        self.0
    }
}

/// One GPU.
pub(super) struct CudaDriver {
    device: Device,
    cube: CubeDevice,
    client: Client,
    index: usize,
    thread: DeviceHandle<Server>,
    context: Raw<CUcontext>,
    gather: Raw<CUstream>,
    reduce: Raw<CUstream>,
    /// The first error of an operation.
    error: Arc<OnceLock<String>>,
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("device", &self.cube)
            .finish_non_exhaustive()
    }
}

/// A point in a stream, known once the device's thread has got there.
#[derive(Debug, Default)]
pub(super) struct CudaEvent(Arc<RecordedEvent>);

#[derive(Debug, Default)]
struct RecordedEvent(OnceLock<Raw<CUevent>>);

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        if let Some(event) = self.0.get() {
            // SAFETY: it is ours, and this is its end. What waits for it on the device goes on to.
            let destroyed = unsafe { cuda::event::destroy(event.get()) };
            destroyed.unwrap_or_else(|error| log::warn!("an event can't be destroyed: {error:?}"));
        }
    }
}

/// Memory in its place, known once the device's thread has got there.
#[derive(Default)]
pub(super) struct CudaPins(Arc<Mutex<Vec<Resource>>>);

impl fmt::Debug for CudaPins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CudaPins")
    }
}

impl CudaDriver {
    /// The driver of a CUDA device, with communication streams of its own.
    pub(super) fn new(device: &Device) -> Result<Self> {
        let unsupported = || FsdpError::UnsupportedDevice {
            engine: "nccl",
            device: format!("{device:?}"),
        };
        let cube = device_of(device).ok_or_else(unsupported)?;
        let CubeDevice::Cuda(gpu) = &cube else {
            return Err(unsupported());
        };
        let index = gpu.index;
        library::check()?;
        let client = cube.client();
        let thread = DeviceHandle::<Server>::new(client.service_id().device);
        let set_up = thread.submit_blocking(|_| -> Outcome<_> {
            let context = cuda::ctx::get_current().map_err(in_words)?;
            let context = context.ok_or("the device's thread has no CUDA context")?;
            Ok((Raw(context), Raw(new_stream()?), Raw(new_stream()?)))
        });
        let set_up = set_up.map_err(|error| format!("{error:?}")).flatten();
        let (context, gather, reduce) = set_up.map_err(FsdpError::argument)?;
        Ok(Self {
            device: device.clone().inner(),
            cube,
            client,
            index,
            thread,
            context,
            gather,
            reduce,
            error: Arc::default(),
        })
    }

    /// Hands an operation to the device's thread.
    fn queue(&self, operation: impl FnOnce(&mut Server) -> Outcome<()> + Send + 'static) {
        let (context, error) = (self.context, self.error.clone());
        self.thread.submit(move |server| {
            // A panic there would be logged, and no more.
            let run = AssertUnwindSafe(|| enter(context).and_then(|()| operation(server)));
            let done = catch_unwind(run).unwrap_or_else(|panic| Err(panic_message(&*panic)));
            if let Err(cause) = done {
                // Only the first matters.
                error.set(cause).unwrap_or_default();
            }
        });
    }

    /// Does something on the device's thread that blocks it.
    fn block<T: Send>(&self, f: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
        let context = self.context;
        let done = self.thread.submit_blocking(move |_| {
            enter(context)?;
            f()
        });
        done.map_err(|error| format!("{error:?}")).flatten()
    }

    /// Finds a stream on the device's thread.
    fn find(&self, stream: Stream) -> impl FnOnce(&mut Server) -> Outcome<CUstream> + Send + use<> {
        let (gather, reduce, id) = (self.gather, self.reduce, StreamId::current());
        move |server| match stream {
            Stream::Gather => Ok(gather.get()),
            Stream::Reduce => Ok(reduce.get()),
            Stream::Compute => {
                let streams = server.write_streams().resolve(id, [].into_iter());
                let mut streams = streams.map_err(|error| format!("{error:?}"))?;
                Ok(streams.current().signal())
            }
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        for stream in [self.gather, self.reduce] {
            // SAFETY: it is ours, and nothing will be queued on it. What is queued goes on.
            self.queue(move |_| unsafe { cuda::stream::destroy(stream.get()) }.map_err(in_words));
        }
    }
}

impl Driver for CudaDriver {
    type Buffer = Buffer;
    type Event = CudaEvent;
    type Pins = CudaPins;
    type Communicator = Arc<Communicator>;

    fn identity(&self) -> Outcome<String> {
        let device = cuda::device::get(self.index as _).map_err(in_words)?;
        let uuid = cuda::device::get_uuid(device).map_err(in_words)?;
        let digits = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8));
        Ok(format!("GPU {}", digits.collect::<String>()))
    }

    fn allocate(&self, len: usize, dtype: DType) -> Buffer {
        Buffer::empty(&self.client, len, dtype)
    }

    fn range(&self, buffer: &Buffer, range: Range<usize>) -> Buffer {
        buffer.range(range)
    }

    fn buffer_of(&self, tensor: Tensor<1>) -> Result<Buffer> {
        Ok(buffer_of(tensor.to_device(&self.device))?.buffer)
    }

    fn tensor_of(&self, buffer: Buffer) -> Tensor<1> {
        tensor_of(buffer, &self.cube)
    }

    fn pack(&self, bundle: &Bundle, shards: &[Buffer], slot: &Buffer) {
        kernels::pack(
            &self.client,
            &bundle.packing,
            shards,
            slot,
            Rounding::Nearest,
        );
    }

    fn unpack(&self, bundle: &Bundle, slots: &Buffer, full: &Buffer) {
        let ranks = 0..bundle.world_size();
        kernels::unpack(&self.client, &bundle.packing, ranks, slots, full);
    }

    fn pack_full(&self, bundle: &Bundle, full: &[Option<Buffer>], slots: &Buffer, divide: f64) {
        kernels::pack_gradients(&self.client, &bundle.packing, full, slots, divide);
    }

    fn finish(&self, bundle: &Bundle, slot: &Buffer, shards: &[Buffer], divide: f64) {
        let (packing, via) = (&bundle.packing, bundle.dtype);
        kernels::finish(&self.client, packing, slot, via, shards, divide, false);
    }

    fn record(&self, stream: Stream) -> CudaEvent {
        let event = CudaEvent::default();
        let (recorded, find) = (event.0.clone(), self.find(stream));
        self.queue(move |server| {
            let stream = find(server)?;
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = cuda::event::create(flags).map_err(in_words)?;
            // SAFETY: both are alive: the event is held here, the stream by CubeCL or the driver.
            unsafe { cuda::event::record(event, stream) }.map_err(in_words)?;
            // Known only now: before it is recorded an event counts as reached.
            recorded
                .0
                .set(Raw(event))
                .expect("an event is recorded once");
            Ok(())
        });
        if stream != Stream::Compute {
            // What is handed to the device's thread stays in a buffer until that is full. Other
            // ranks wait for this.
            self.thread.flush_queue();
        }
        event
    }

    fn wait(&self, stream: Stream, event: &CudaEvent) {
        let (recorded, find) = (event.0.clone(), self.find(stream));
        self.queue(move |server| {
            let event = recorded.0.get().ok_or("an event was not recorded")?;
            let (stream, flags) = (find(server)?, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
            // SAFETY: as in `record`.
            unsafe { cuda::stream::wait_event(stream, event.get(), flags) }.map_err(in_words)
        });
    }

    fn is_reached(&self, event: &CudaEvent) -> bool {
        let Some(event) = event.0.0.get() else {
            return false;
        };
        // SAFETY: the event is held by the caller.
        match unsafe { cuda::event::query(event.get()) } {
            Ok(()) => true,
            Err(cuda::DriverError(CUresult::CUDA_ERROR_NOT_READY)) => false,
            Err(error) => {
                self.error.set(in_words(error)).unwrap_or_default();
                false
            }
        }
    }

    fn unique_id(&self) -> Outcome<UniqueId> {
        communicator::unique_id()
    }

    fn join(&self, id: &UniqueId, rank: usize, world_size: usize) -> Outcome<Arc<Communicator>> {
        self.block(|| Communicator::join(id, rank, world_size).map(Arc::new))
    }

    fn split(
        &self,
        of: &Arc<Communicator>,
        color: usize,
        key: usize,
    ) -> Outcome<Arc<Communicator>> {
        self.block(|| of.split(color, key).map(Arc::new))
    }

    fn run(
        &self,
        communicator: &Arc<Communicator>,
        stream: Stream,
        collectives: Vec<Collective<Buffer>>,
    ) -> CudaPins {
        let pins = CudaPins::default();
        let (held, communicator) = (pins.0.clone(), communicator.clone());
        let (find, id) = (self.find(stream), StreamId::current());
        self.queue(move |server| {
            let mut held = held.lock();
            let mut elements = Vec::with_capacity(collectives.len());
            for collective in collectives {
                let Buffer { handle, len, dtype } = collective.buffer().clone();
                let resource = server.get_resource(handle.binding(), id);
                let resource = resource.map_err(|error| format!("{error:?}"))?;
                elements.push(collective.with(Elements {
                    address: resource.resource().ptr,
                    len,
                    dtype,
                }));
                held.push(resource);
            }
            let stream = find(server)?;
            // SAFETY: the memory is pinned, and the engine orders its other uses by events.
            unsafe { communicator.run(&elements, stream as _) }
        });
        pins
    }

    fn release(&self, pins: CudaPins) {
        self.thread.submit(move |_| drop(pins));
    }

    fn failure(&self, communicator: &Arc<Communicator>) -> Option<String> {
        let own = self.error.get().cloned();
        own.or_else(|| communicator.failure())
    }

    fn abort(&self, communicator: &Arc<Communicator>) {
        let aborted = enter(self.context).and_then(|()| communicator.abort());
        aborted.unwrap_or_else(|error| log::warn!("a communicator can't be aborted: {error}"));
    }

    fn destroy(&self, communicator: &Arc<Communicator>) {
        let destroyed = enter(self.context).and_then(|()| communicator.destroy());
        destroyed.unwrap_or_else(|error| log::warn!("a communicator can't be destroyed: {error}"));
    }
}

/// A stream whose work goes before that of the compute streams, as it is short and others wait for
/// it.
fn new_stream() -> Outcome<CUstream> {
    let (_, greatest) = cuda::stream::get_priority_range().map_err(in_words)?;
    let kind = cuda::stream::StreamKind::NonBlocking;
    cuda::stream::create_with_priority(kind, greatest).map_err(in_words)
}

/// Makes the context that of the calling thread.
fn enter(context: Raw<CUcontext>) -> Outcome<()> {
    // SAFETY: CubeCL holds its primary context as long as the process runs.
    unsafe { cuda::ctx::set_current(context.get()) }.map_err(in_words)
}

fn in_words(error: cuda::DriverError) -> String {
    format!("{error:?}")
}
