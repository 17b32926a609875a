//! The engine for ranks that are processes, over any [`Wire`].
//!
//! It works on host memory: tensors of another device are brought to the host, and what comes of
//! them back to the device. In a reduction each rank sends each other rank its part of the
//! gradient, and adds up its own part of all in rank order, as the `local` engine does: results are
//! equal bit for bit.
//!
//! Messages are under way from when a collective is started, so it overlaps with what is computed
//! until it is waited for.
//!
//! All collectives are matched by position, those of units too, so ranks must use the same units in
//! the same order.

#[cfg(test)]
mod tests;

use std::sync::{Arc, Weak};

use burn::tensor::{Bytes, DType, Device, Tensor};

use super::buffer::{BufferPool, FilledBuffer, SharedBuffer};
use super::expected::{cast_whole, full_bytes};
use super::gather::{pack_shards, unpack_shard};
use super::host::{self, HostTensor, with_float};
use super::message::{MessageReader, MessageWriter};
use super::wire::{Exchange, Outgoing, Wire};
use super::{
    Call, Engine, GatherInput, GatherKey, GatherSource, GatherWork, Gathered, ReduceInput,
    ReduceWork,
};
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::{Placement, ShardLayout};
use crate::reduction::Reduction;
use crate::{FsdpError, Result};

/// The engine of one rank.
#[derive(Clone, Debug)]
pub(crate) struct ProcessEngine {
    wire: Arc<dyn Wire>,
    pool: Arc<BufferPool>,
}

impl ProcessEngine {
    pub(crate) fn new(wire: Arc<dyn Wire>) -> Self {
        Self {
            wire,
            pool: Default::default(),
        }
    }

    /// Sends these messages and waits for those of all ranks.
    fn meet(&self, call: Call, outgoing: Outgoing) -> Result<Vec<MessageReader>> {
        Ok(readers(self.wire.start(call, outgoing)?.wait()?))
    }

    /// A failure to read what another rank has sent fails all.
    fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|cause| self.wire.fail(cause.clone()))
    }
}

impl Engine for ProcessEngine {
    fn rank(&self) -> usize {
        self.wire.rank()
    }

    fn world_size(&self) -> usize {
        self.wire.world_size()
    }

    fn exchange(&self, call: Call, message: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>> {
        let exchange = self.wire.start(call, Outgoing::ToAll(message.into()))?;
        let messages = exchange.wait()?.into_iter();
        Ok(messages.map(|message| Arc::new(message.into())).collect())
    }

    /// Shards are gathered from those who ask only, so there is nothing to remember.
    fn register(&self, _number: u64, _module: Weak<dyn GatherSource>) {}

    fn all_gather(
        &self,
        call: Call,
        key: Option<GatherKey>,
        mut inputs: Vec<GatherInput>,
        memory: &Arc<MemoryCounter>,
    ) -> Result<Box<dyn GatherWork>> {
        // The buffers of units come back every step, those of other gathers in all sizes.
        let pool = key.map(|_| &self.pool);
        let devices: Vec<Device> = inputs.iter().map(|input| input.shard.device()).collect();
        for input in &mut inputs {
            input.shard = on_host(input.shard.clone());
        }
        let message = pack_shards(&inputs, self.rank(), pool)?;
        let exchange = self.wire.start(call, Outgoing::ToAll(message))?;
        let tensors = inputs.into_iter().zip(devices).map(|(input, device)| {
            if input.layout.is_whole() {
                let whole = cast_whole(input, memory)?;
                return Ok(Gathering::Done(on_device(whole, &device)));
            }
            Ok(Gathering::Coming {
                buffer: SharedBuffer::new(full_bytes(&input), pool),
                counted: MemoryGuard::new(memory, full_bytes(&input)),
                layout: input.layout,
                dtype: input.dtype,
                device,
            })
        });
        Ok(Box::new(ProcessGather {
            wire: self.wire.clone(),
            exchange,
            tensors: tensors.collect::<Result<_>>()?,
        }))
    }

    fn reduce(
        &self,
        call: Call,
        inputs: Vec<ReduceInput>,
        reduction: Reduction,
        device: &Device,
    ) -> Result<Box<dyn ReduceWork>> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let part = |input| Part::new(input, rank, world_size);
        let parts = inputs.iter().map(part).collect::<Result<Vec<_>>>()?;
        let messages = (0..world_size).map(|rank| pack_parts(&parts, rank, &reduction));
        let outgoing = Outgoing::ToEach(messages.collect());
        let exchange = self.wire.start(call.clone(), outgoing)?;
        Ok(Box::new(ProcessReduce {
            engine: self.clone(),
            call,
            exchange,
            parts: parts.into_iter().map(Part::without_contribution).collect(),
            // What was sent has been divided before.
            reduction: Reduction {
                pre_divide: 1.0,
                ..reduction
            },
            device: device.clone(),
        }))
    }

    fn scatter(
        &self,
        call: Call,
        root: usize,
        layout: &ShardLayout,
        source: Option<Tensor<1>>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let source = source.map(|source| host::host(&on_host(source)));
        let source = source.transpose()?;
        // Those that have nothing to send send empty messages.
        let message = |rank| {
            let pack = |source| pack_of(source, layout, rank);
            source.as_ref().map(pack).unwrap_or_default()
        };
        let outgoing = match layout.is_whole() {
            true => Outgoing::ToAll(message(root)),
            false => Outgoing::ToEach((0..self.world_size()).map(message).collect()),
        };
        let message = self.meet(call, outgoing)?.swap_remove(root);
        let shard = self.or_fail(unpack_of(message, layout, self.rank()))?;
        Ok(on_device(shard, device))
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Engine>> {
        let call = Call::new("split", "the group");
        let color = color.to_le_bytes();
        let colors = self.exchange(call, color.to_vec())?;
        let members = (0..self.world_size()).filter(|&rank| colors[rank][..] == color);
        let wire = self.wire.subset(&members.collect::<Vec<_>>())?;
        Ok(Arc::new(Self::new(wire)))
    }

    fn control(&self) -> Result<Arc<dyn Wire>> {
        let all: Vec<_> = (0..self.world_size()).collect();
        self.wire.subset(&all)
    }

    fn fail(&self, cause: FsdpError) {
        self.wire.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.wire.failure()
    }

    fn leave(&self) {
        self.wire.leave();
    }
}

fn readers(messages: Vec<bytes::Bytes>) -> Vec<MessageReader> {
    let messages = messages.into_iter().enumerate();
    messages
        .map(|(rank, message)| MessageReader::new(rank, message))
        .collect()
}

fn on_host(tensor: Tensor<1>) -> Tensor<1> {
    on_device(tensor, &Device::flex())
}

fn on_device(tensor: Tensor<1>, device: &Device) -> Tensor<1> {
    match tensor.device() == *device {
        true => tensor,
        false => tensor.to_device(device),
    }
}

/// A tensor of an all-gather under way.
#[derive(Debug)]
enum Gathering {
    /// Whole already, as it is not split.
    Done(Tensor<1>),
    Coming {
        buffer: SharedBuffer,
        counted: MemoryGuard,
        layout: ShardLayout,
        dtype: DType,
        device: Device,
    },
}

#[derive(Debug)]
struct ProcessGather {
    wire: Arc<dyn Wire>,
    exchange: Box<dyn Exchange>,
    tensors: Vec<Gathering>,
}

impl GatherWork for ProcessGather {
    fn wait(self: Box<Self>) -> Result<Gathered> {
        let mut messages = readers(self.exchange.wait()?);
        let mut counted = Vec::new();
        let tensors = self.tensors.into_iter();
        let tensors = tensors.map(|tensor| tensor.finish(&mut messages, &mut counted));
        let tensors: Result<Vec<_>> = tensors.collect();
        let tensors = tensors.inspect_err(|cause| self.wire.fail(cause.clone()))?;
        Ok(Gathered {
            tensors,
            _counted: counted,
        })
    }
}

impl Gathering {
    fn finish(
        self,
        messages: &mut [MessageReader],
        elsewhere: &mut Vec<MemoryGuard>,
    ) -> Result<Tensor<1>> {
        match self {
            Self::Done(tensor) => Ok(tensor),
            Self::Coming {
                mut buffer,
                counted,
                layout,
                dtype,
                device,
            } => {
                for (rank, message) in messages.iter_mut().enumerate() {
                    let piece = message.piece(layout.owned_len(rank) * dtype.size())?;
                    unpack_shard(&piece, &mut buffer, &layout, rank, dtype);
                }
                let (bytes, len) = (layout.full_len() * dtype.size(), layout.full_len());
                let full = |counted| {
                    let bytes = FilledBuffer::of(buffer, counted).into_bytes();
                    host::from_bytes(bytes, len, dtype)
                };
                if device == Device::flex() {
                    return Ok(full(counted));
                }
                elsewhere.push(counted);
                let transient = MemoryGuard::new(&Default::default(), bytes);
                Ok(full(transient).to_device(&device))
            }
        }
    }
}

/// What a rank has sent of its contribution: nothing, elements, or such as were in f64 before.
const ABSENT: u8 = 0;
const PRESENT: u8 = 1;
const WIDE: u8 = 2;

#[derive(Debug)]
struct ProcessReduce {
    engine: ProcessEngine,
    call: Call,
    exchange: Box<dyn Exchange>,
    parts: Vec<Part>,
    reduction: Reduction,
    device: Device,
}

impl ReduceWork for ProcessReduce {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor<1>>> {
        let Self {
            engine,
            call,
            exchange,
            parts,
            reduction,
            device,
        } = *self;
        let shards = reduce_parts(&parts, readers(exchange.wait()?), &reduction);
        let shards = engine.or_fail(shards)?;

        // Of what every rank wants whole, each has reduced a part.
        let gathered = parts.iter().zip(&shards);
        let gathered = gathered.filter(|(part, _)| part.is_of_whole);
        let gathered = gathered.map(|(part, shard)| GatherInput {
            layout: part.layout.clone(),
            shard: shard.clone(),
            dtype: part.out_dtype,
        });
        let gathered: Vec<_> = gathered.collect();
        let mut whole = Vec::new().into_iter();
        if !gathered.is_empty() {
            let call = call.with_detail("the reduced parts");
            let work = engine.all_gather(call, None, gathered, &Default::default())?;
            whole = work.wait()?.tensors.into_iter();
        }
        let reduced = parts.iter().zip(shards).map(|(part, shard)| {
            let reduced = match part.is_of_whole {
                true => whole.next().expect("each such input was gathered"),
                false => shard,
            };
            on_device(reduced, &device)
        });
        Ok(reduced.collect())
    }
}

/// This rank's shard of each part, flat and padded, on the host.
fn reduce_parts(
    parts: &[Part],
    mut messages: Vec<MessageReader>,
    reduction: &Reduction,
) -> Result<Vec<Tensor<1>>> {
    let kinds = messages.iter_mut().map(|m| m.piece(parts.len()));
    let kinds = kinds.collect::<Result<Vec<_>>>()?;
    let reduced = parts.iter().enumerate().map(|(i, part)| {
        let received = messages.iter_mut().zip(&kinds);
        let received = received.map(|(m, kinds)| part.read(m, kinds[i]));
        let received = received.collect::<Result<Vec<_>>>()?;
        let wide = kinds.iter().any(|kinds| kinds[i] == WIDE);
        Ok(part.reduce(&received, reduction, wide))
    });
    reduced.collect()
}

/// An input of a reduction, of which each rank reduces a part.
#[derive(Debug)]
struct Part {
    /// This rank.
    rank: usize,
    layout: ShardLayout,
    /// Whether every rank wants all parts.
    is_of_whole: bool,
    contribution: Option<HostTensor>,
    reduce_dtype: DType,
    out_dtype: DType,
}

impl Part {
    fn new(input: &ReduceInput, rank: usize, world_size: usize) -> Result<Self> {
        let is_of_whole = input.layout.is_whole() && world_size > 1;
        let layout = match input.layout.is_whole() {
            true => ShardLayout::flat(input.layout.full_len(), Placement::Shard(0), world_size),
            false => input.layout.clone(),
        };
        let contribution = input.contribution.clone();
        let contribution = contribution.map(|tensor| host::host(&on_host(tensor)));
        Ok(Self {
            rank,
            layout,
            is_of_whole,
            contribution: contribution.transpose()?,
            reduce_dtype: input.reduce_dtype,
            out_dtype: input.out_dtype,
        })
    }

    /// The part once this rank's contribution is in the messages.
    fn without_contribution(self) -> Self {
        Self {
            contribution: None,
            ..self
        }
    }

    fn kind(&self) -> u8 {
        match &self.contribution {
            None => ABSENT,
            Some(contribution) if host::is_wide(contribution) => WIDE,
            Some(_) => PRESENT,
        }
    }

    /// Bytes that are sent of this rank's contribution to `rank`.
    fn sent_bytes(&self, rank: usize) -> usize {
        match &self.contribution {
            None => 0,
            Some(_) => self.layout.owned_len(rank) * self.reduce_dtype.size(),
        }
    }

    /// What another rank has sent this one of its contribution.
    fn read(&self, message: &mut MessageReader, kind: u8) -> Result<Option<HostTensor>> {
        match kind {
            ABSENT => Ok(None),
            PRESENT | WIDE => {
                let len = self.layout.owned_len(self.rank) * self.reduce_dtype.size();
                let piece = message.piece(len)?;
                Ok(Some(host::received(piece, self.reduce_dtype)))
            }
            _ => Err(message.malformed()),
        }
    }

    /// This rank's shard, reduced of what all have sent it.
    fn reduce(
        &self,
        received: &[Option<HostTensor>],
        reduction: &Reduction,
        wide: bool,
    ) -> Tensor<1> {
        let contributions: Vec<_> = received.iter().map(Option::as_ref).collect();
        let len = self.layout.shard_len();
        with_float!(self.out_dtype, T => {
            let mut shard = vec![T::default(); len];
            for (place, span) in self.layout.packed_spans(self.rank) {
                let out = &mut shard[span.shard..span.shard + span.len];
                host::reduce_sent(&contributions, place, out, self.reduce_dtype, reduction, wide);
            }
            host::from_bytes(Bytes::from_elems(shard), len, self.out_dtype)
        })
    }
}

/// This rank's contributions to what `rank` reduces.
fn pack_parts(parts: &[Part], rank: usize, reduction: &Reduction) -> bytes::Bytes {
    let pieces = parts.iter().map(|part| part.sent_bytes(rank));
    let mut message = MessageWriter::new([parts.len()].into_iter().chain(pieces), None);
    let kinds = message.piece(parts.len());
    for (kind, part) in kinds.iter_mut().zip(parts) {
        *kind = part.kind();
    }
    for part in parts {
        let Some(contribution) = &part.contribution else {
            continue;
        };
        let piece = message.piece(part.sent_bytes(rank));
        let element = part.reduce_dtype.size();
        for (place, span) in part.layout.packed_spans(rank) {
            let target = &mut piece[place * element..(place + span.len) * element];
            host::write_sent(
                contribution,
                span.full,
                target,
                part.reduce_dtype,
                reduction,
            );
        }
    }
    message.finish()
}

/// Dtypes that are scattered, by the number that stands for them.
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// What `rank` gets of a tensor that is scattered: its dtype, and elements.
fn pack_of(full: &HostTensor, layout: &ShardLayout, rank: usize) -> bytes::Bytes {
    let dtype = full.dtype();
    let number = DTYPES.iter().position(|&known| known == dtype);
    let len = layout.owned_len(rank) * dtype.size();
    let mut message = MessageWriter::new([1, len], None);
    message.piece(1)[0] = number.expect("a host tensor has a known dtype") as u8;
    let piece = message.piece(len);
    for (place, span) in layout.packed_spans(rank) {
        let target = &mut piece[place * dtype.size()..(place + span.len) * dtype.size()];
        host::copy_cast(full, span.full, target, dtype);
    }
    message.finish()
}

/// The reverse of [`pack_of`]: `rank`'s shard, flat and padded.
fn unpack_of(mut message: MessageReader, layout: &ShardLayout, rank: usize) -> Result<Tensor<1>> {
    let number = message.piece(1)?[0] as usize;
    let dtype = *DTYPES.get(number).ok_or_else(|| message.malformed())?;
    let piece = message.piece(layout.owned_len(rank) * dtype.size())?;
    let element = dtype.size();
    let mut shard = SharedBuffer::new(layout.shard_len() * element, None);
    let target = shard.as_mut_slice();
    for (place, span) in layout.packed_spans(rank) {
        let source = &piece[place * element..(place + span.len) * element];
        target[span.shard * element..(span.shard + span.len) * element].copy_from_slice(source);
    }
    let bytes = FilledBuffer::of(shard, MemoryGuard::new(&Default::default(), 0)).into_bytes();
    Ok(host::from_bytes(bytes, layout.shard_len(), dtype))
}
