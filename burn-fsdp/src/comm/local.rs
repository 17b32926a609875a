//! The engine for ranks that are threads of one process, on host tensors.
//!
//! Ranks share memory, so nothing is sent. In an all-gather each rank writes its own shard, cast on
//! the way, straight into the unsharded tensors, which all ranks then read. In a reduction each
//! rank shows its gradient and then adds up its own part of everyone's, in rank order, so that
//! results are bit-equal from run to run.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use burn::tensor::{Bytes, DType, Tensor};

use super::buffer::{FilledBuffer, SharedBuffer};
use super::gather::{Buffers, cast_whole, full_bytes, write_shards};
use super::host::{self, HostTensor, with_float};
use super::local_wire::LocalWire;
use super::open_gathers::rank_in;
use super::rendezvous::{Group, Launch, Part, Seat, Ticket};
use super::wire::Wire;
use super::{
    Call, Engine, GatherInput, GatherKey, GatherSource, GatherWork, ReduceInput, Reduction,
};
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::ShardLayout;
use crate::{FsdpError, Result};

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
    buffers: Arc<Buffers>,
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

/// The engine of one rank.
#[derive(Debug)]
pub(crate) struct LocalEngine(Seat);

impl LocalEngine {
    /// This rank's seat in a new group of the ranks that pass the same `color`, in rank order.
    fn seat_of_color(&self, color: usize) -> Result<Seat> {
        let colors = self.0.rendezvous(Call::new("split", "the group"), color)?;
        let ticket = self.0.enter(Call::new("split", "the colors"), || {
            let mut members = BTreeMap::<usize, Vec<usize>>::new();
            for (rank, color) in colors.iter().enumerate() {
                members
                    .entry(**color)
                    .or_default()
                    .push(self.0.group.ranks[rank]);
            }
            let group = |ranks| Group::new(self.0.group.launch.clone(), ranks);
            let groups: BTreeMap<_, _> = members.into_iter().map(|(c, r)| (c, group(r))).collect();
            Arc::new(groups)
        })?;
        ticket.arrive(Arc::new(()));
        let groups = ticket.common::<BTreeMap<usize, Arc<Group>>>();
        let group = groups[&color].clone();
        let rank = rank_in(&group.ranks, self.0.launch_rank());
        let rank = rank.expect("a rank is in the group of its own color");
        Ok(Seat::new(group, rank))
    }

    /// The engines of all ranks of a launch, in rank order.
    pub(crate) fn all(launch: &Arc<Launch>) -> Vec<Arc<dyn Engine>> {
        let engine = |seat| Arc::new(Self(seat)) as Arc<dyn Engine>;
        launch.seats().into_iter().map(engine).collect()
    }
}

impl Engine for LocalEngine {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.group.size()
    }

    fn exchange(&self, call: Call, message: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>> {
        self.0.rendezvous(call, message)
    }

    fn register(&self, number: u64, module: Weak<dyn GatherSource>) {
        let launch = &self.0.group.launch;
        launch.register(self.0.launch_rank(), number, module);
    }

    fn all_gather(
        &self,
        call: Call,
        key: Option<GatherKey>,
        inputs: Vec<GatherInput>,
        memory: &Arc<MemoryCounter>,
    ) -> Result<Box<dyn GatherWork>> {
        // The buffers of units come back every step, those of other gathers in all sizes.
        let pool = key.map(|_| &self.0.group.pool);
        let make_buffers = || -> Part {
            let split = inputs.iter().filter(|input| !input.layout.is_whole());
            let buffer = |input| Arc::new(SharedBuffer::new(full_bytes(input), pool));
            Arc::new(split.map(buffer).collect::<Buffers>())
        };
        let (ticket, lacks_part) = match key {
            Some(key) => self.0.enter_gather(call, key, make_buffers)?,
            None => (self.0.enter(call, make_buffers)?, true),
        };
        let buffers = ticket.common::<Buffers>();
        if lacks_part {
            write_shards(&buffers, &inputs, self.0.rank)?;
        }
        let mut tensors = Vec::with_capacity(inputs.len());
        let mut next_buffer = 0..;
        for input in inputs {
            tensors.push(if input.layout.is_whole() {
                Gathering::Done(cast_whole(input, memory)?)
            } else {
                Gathering::Filling {
                    buffer: next_buffer.next().expect("the range is endless"),
                    len: input.layout.full_len(),
                    dtype: input.dtype,
                    counted: MemoryGuard::new(memory, full_bytes(&input)),
                }
            });
        }
        if lacks_part {
            ticket.arrive(Arc::new(()));
        }
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
        let all: Vec<Arc<Vec<Option<HostTensor>>>> = self.0.rendezvous(call, own)?;
        let reduced = inputs.iter().enumerate().map(|(i, input)| {
            let parts: Vec<_> = all.iter().map(|rank| rank[i].as_ref()).collect();
            with_float!(input.out_dtype, T => {
                let mut shard = vec![T::default(); input.layout.shard_len()];
                for span in input.layout.spans(self.0.rank) {
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
        let all: Vec<Arc<Option<HostTensor>>> = self.0.rendezvous(call, source)?;
        let source = all[root]
            .as_ref()
            .as_ref()
            .expect("the root passes a tensor");
        Ok(host::shard_of(source, layout, self.0.rank))
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Engine>> {
        Ok(Arc::new(Self(self.seat_of_color(color)?)))
    }

    fn control(&self) -> Result<Arc<dyn Wire>> {
        Ok(Arc::new(LocalWire::new(self.seat_of_color(0)?)))
    }

    fn fail(&self, cause: FsdpError) {
        self.0.group.launch.fail(cause);
    }

    fn failure(&self) -> Option<FsdpError> {
        self.0.group.launch.failure().cloned()
    }
}
