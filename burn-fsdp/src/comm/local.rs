//! The engine for ranks that are threads of one process.
//!
//! Ranks share memory, so nothing is sent. On the host each rank of an all-gather writes its own
//! shard, cast on the way, straight into the unsharded tensors, which all ranks then read. In a
//! reduction each rank shows its gradient and then adds up its own part of everyone's, in rank order,
//! so that results are bit-equal from run to run. On devices of CubeCL kernels do the same; what is
//! on another device is copied to the rank's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use burn::tensor::{Bytes, DType, Device, Tensor};

#[cfg(feature = "cube")]
use super::cube_reduce;
use super::expected::Expected;
use super::gather::GatherSpace;
use super::host::{self, HostTensor, with_float};
use super::local_wire::LocalWire;
use super::open_gathers::rank_in;
use super::part::Part;
use super::rendezvous::{Group, Launch, Seat, Ticket};
use super::wire::Wire;
use super::{
    Call, Engine, GatherInput, GatherKey, GatherSource, GatherWork, Gathered, ReduceInput,
    ReduceWork, take_shard,
};
use crate::memory::MemoryCounter;
use crate::placement::ShardLayout;
use crate::reduction::Reduction;
use crate::{FsdpError, Result};

#[derive(Debug)]
struct LocalGather {
    rank: usize,
    ticket: Ticket,
    space: Arc<GatherSpace>,
    expected: Vec<Expected>,
}

impl GatherWork for LocalGather {
    fn wait(self: Box<Self>) -> Result<Gathered> {
        let parts = self.ticket.wait_for_all()?;
        // SAFETY: all ranks have arrived, so all have contributed.
        unsafe { self.space.finish(self.expected, parts, self.rank) }
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
        let new_space = || Arc::new(GatherSpace::new(&inputs, pool)) as Part;
        let (ticket, lacks_part) = match key {
            Some(key) => self.0.enter_gather(call, key, new_space)?,
            None => (self.0.enter(call, new_space)?, true),
        };
        let space = ticket.common::<GatherSpace>();
        if lacks_part {
            ticket.arrive(space.contribute(&inputs, self.0.rank)?);
        }
        let expected = inputs.into_iter().map(|input| Expected::new(input, memory));
        let expected = expected.collect::<Result<_>>()?;
        Ok(Box::new(LocalGather {
            rank: self.0.rank,
            ticket,
            space,
            expected,
        }))
    }

    /// Waits for the others at once: ranks share the cores, so there is nothing to overlap with.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    fn reduce(
        &self,
        call: Call,
        inputs: Vec<ReduceInput>,
        reduction: Reduction,
        device: &Device,
    ) -> Result<Box<dyn ReduceWork>> {
        #[cfg(feature = "cube")]
        if let Some(device) = super::cube::device_of(device) {
            let reduced = cube_reduce::reduce(&self.0, call, &inputs, &reduction, &device)?;
            return Ok(Box::new(reduced));
        }
        Ok(Box::new(self.reduce_on_host(call, &inputs, &reduction)?))
    }

    fn scatter(
        &self,
        call: Call,
        root: usize,
        layout: &ShardLayout,
        source: Option<Tensor<1>>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        if let Some(source) = &source {
            // Others are about to read it, on streams of their own.
            source.device().sync().map_err(FsdpError::other)?;
        }
        let all: Vec<Arc<Option<Tensor<1>>>> = self.0.rendezvous(call, source)?;
        let source = all[root]
            .as_ref()
            .as_ref()
            .expect("the root passes a tensor");
        Ok(take_shard(source, layout, self.0.rank).to_device(device))
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

    fn leave(&self) {
        self.0.group.launch.rank_returned(self.0.launch_rank());
    }
}

impl LocalEngine {
    fn reduce_on_host(
        &self,
        call: Call,
        inputs: &[ReduceInput],
        reduction: &Reduction,
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
                    host::reduce(&parts, span.full, out, input.reduce_dtype, reduction);
                }
                host::from_bytes(Bytes::from_elems(shard), input.layout.shard_len(), input.out_dtype)
            })
        });
        Ok(reduced.collect())
    }
}
