//! What the engine asks of a device and of NCCL.

use std::fmt::Debug;
use std::ops::Range;

use burn::tensor::{DType, Tensor};

use crate::Result;
use crate::comm::bundle::Bundle;

/// A queue of a device. Operations on one run in the order they were queued in; those on different
/// ones in any order, but for [`Driver::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// Where the calling thread's kernels run.
    Compute,
    Gather,
    Reduce,
}

/// How NCCL reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NcclOp {
    Sum,
    Avg,
    Max,
    Min,
}

/// A collective, in place. A buffer of slots has one for each rank, in rank order.
#[derive(Clone, Debug)]
pub(super) enum Collective<B> {
    /// Gives every rank's slot to all.
    AllGather { slots: B },
    /// Reduces the slots; the reduced slot of a rank's number is left to it.
    ReduceScatter { slots: B, op: NcclOp },
    /// Reduces the buffer, whole, for all.
    AllReduce { buffer: B, op: NcclOp },
    /// Gives `root`'s buffer to all.
    Broadcast { buffer: B, root: usize },
}

impl<B> Collective<B> {
    pub(super) fn buffer(&self) -> &B {
        match self {
            Self::AllGather { slots } | Self::ReduceScatter { slots, .. } => slots,
            Self::AllReduce { buffer, .. } | Self::Broadcast { buffer, .. } => buffer,
        }
    }

    /// The same on another buffer.
    pub(super) fn with<C>(&self, buffer: C) -> Collective<C> {
        match *self {
            Self::AllGather { .. } => Collective::AllGather { slots: buffer },
            Self::ReduceScatter { op, .. } => Collective::ReduceScatter { slots: buffer, op },
            Self::AllReduce { op, .. } => Collective::AllReduce { buffer, op },
            Self::Broadcast { root, .. } => Collective::Broadcast { buffer, root },
        }
    }
}

/// What all ranks of a new communicator join by.
pub(super) type UniqueId = [u8; 128];

/// With what the driver or NCCL said, if it failed.
pub(super) type Outcome<T> = std::result::Result<T, String>;

/// One rank's device and its NCCL.
///
/// Operations are queued in the order of the calls, whatever thread they come from, and none of
/// them waits for the device. What goes wrong in them is told by [`failure`](Self::failure).
///
/// Memory that the last buffer lets go of may be used again by whatever is queued next on the
/// stream of the thread that allocated it. The device takes kernels into account, but no other use:
/// for that there are [pins](Self::Pins).
pub(super) trait Driver: Debug + Send + Sync + 'static {
    /// Elements in device memory. Clones and ranges are the same memory.
    type Buffer: Clone + Debug + Send + Sync;
    /// A point in a stream.
    type Event: Debug + Send + Sync;
    /// Keeps the memory of a collective, and in its place, until dropped.
    type Pins: Debug + Send;
    /// Clones are the same communicator.
    type Communicator: Clone + Debug + Send + Sync;

    /// The device, distinct from all others anywhere, for a person to read.
    fn identity(&self) -> Outcome<String>;

    // ---- buffers

    /// Memory of any content.
    fn allocate(&self, len: usize, dtype: DType) -> Self::Buffer;

    fn range(&self, buffer: &Self::Buffer, range: Range<usize>) -> Self::Buffer;

    /// The tensor's elements, contiguous; copied here if they are elsewhere.
    fn buffer_of(&self, tensor: Tensor<1>) -> Result<Self::Buffer>;

    fn tensor_of(&self, buffer: Self::Buffer) -> Tensor<1>;

    // ---- kernels, on the compute stream

    /// Writes a rank's shards, cast, into its slot.
    fn pack(&self, bundle: &Bundle, shards: &[Self::Buffer], slot: &Self::Buffer);

    /// Writes the full tensors of all ranks' slots.
    fn unpack(&self, bundle: &Bundle, slots: &Self::Buffer, full: &Self::Buffer);

    /// Writes what each rank is to get of this one's full tensors, divided and cast, into the slots;
    /// zeros where there is none.
    fn pack_full(
        &self,
        bundle: &Bundle,
        full: &[Option<Self::Buffer>],
        slots: &Self::Buffer,
        divide: f64,
    );

    /// Writes the shards of a rank's slot, divided, rounded to the bundle's dtype and cast.
    fn finish(&self, bundle: &Bundle, slot: &Self::Buffer, shards: &[Self::Buffer], divide: f64);

    // ---- streams

    /// The point that the stream has got to with what is queued on it now.
    fn record(&self, stream: Stream) -> Self::Event;

    /// Holds what is queued on the stream from now on until the event is reached.
    fn wait(&self, stream: Stream, event: &Self::Event);

    /// Whether the device has got there.
    fn is_reached(&self, event: &Self::Event) -> bool;

    // ---- communicators

    fn unique_id(&self) -> Outcome<UniqueId>;

    /// Joins a new communicator; blocks until all its ranks have.
    fn join(&self, id: &UniqueId, rank: usize, world_size: usize) -> Outcome<Self::Communicator>;

    /// The communicator of the ranks that pass the same `color`, in the order of their `key`s;
    /// blocks until all ranks of this one have called it.
    fn split(
        &self,
        communicator: &Self::Communicator,
        color: usize,
        key: usize,
    ) -> Outcome<Self::Communicator>;

    /// Queues collectives as one operation. All ranks must queue the same ones, in the same order.
    /// Nothing is queued on an aborted communicator.
    fn run(
        &self,
        communicator: &Self::Communicator,
        stream: Stream,
        collectives: Vec<Collective<Self::Buffer>>,
    ) -> Self::Pins;

    /// Drops the pins behind what has been queued so far: for a collective that is not done, but that
    /// the compute stream now waits for.
    fn release(&self, pins: Self::Pins);

    /// What has gone wrong on the device or in the communicator. Never waits.
    fn failure(&self, communicator: &Self::Communicator) -> Option<String>;

    /// Ends the collectives under way, with any result, and the communicator. Returns when nothing
    /// of it runs any more. Once only, but from any thread, whatever the others do.
    fn abort(&self, communicator: &Self::Communicator);

    /// Ends a communicator on which no collective is under way. Blocks until its other ranks do so.
    fn destroy(&self, communicator: &Self::Communicator);
}
