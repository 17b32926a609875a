//! A unit: parameters that are unsharded together by one all-gather, and whose gradients are
//! reduced together by one reduce-scatter.
//!
//! A unit does what it is told; when it is told what is the business of
//! [`Schedule`](crate::schedule::Schedule).

use std::ops::ControlFlow;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use crate::board::{AfterForward, Context, Shard, ShardBoard, UnitSpec};
use crate::comm::{
    Call, Counters, GatherInput, GatherKey, GatherWork, Gathered, ProcessGroup, ReduceInput,
    ReduceWork, take_shard,
};
use crate::memory::MemoryGuard;
use crate::pass::{MemberUse, Pass};
use crate::placement::{Placement, ShardLayout};
use crate::reduction::Reduction;
use crate::{GradientAverage, Result};

#[derive(Debug, Default)]
enum Unsharded {
    #[default]
    No,
    Coming(Box<dyn GatherWork>),
    Here(Gathered),
}

/// The unit after a forward that resharded it over a subgroup.
#[derive(Debug)]
struct Regrouped {
    shards: Vec<Tensor<1>>,
    _counted: MemoryGuard,
}

/// Which reduction of a unit this is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Which {
    /// The pass, counted from the first of this forward; none for what is left at the end.
    pub(crate) pass: Option<u64>,
    /// The number of the module.
    pub(crate) module: u64,
    pub(crate) all_reduce: bool,
}

/// A reduction of a unit's gradients under way: over the shard ranks first, then over the copies of
/// the model.
#[derive(Debug)]
pub(crate) struct Reducing {
    /// The members that are reduced, with their shards' leaves in the graph.
    members: Vec<(usize, Option<NodeId>)>,
    which: Which,
    over_copies: bool,
    work: Box<dyn ReduceWork>,
}

/// A reduced gradient of a member.
#[derive(Debug)]
pub(crate) struct Reduced {
    pub(crate) member: usize,
    /// The shard's leaf in the graph, where this forward used it.
    pub(crate) node: Option<NodeId>,
    /// Flat, of the stored shard's length.
    pub(crate) gradient: Tensor<1>,
}

#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) spec: Arc<UnitSpec>,
    index: usize,
    board: Arc<Mutex<ShardBoard>>,
    unsharded: Unsharded,
    regrouped: Option<Regrouped>,
    passes: Vec<Pass>,
    /// Full gradients kept from backwards without sync.
    accumulated: Vec<Option<Tensor<1>>>,
    /// Reduce-scattered gradients kept from backwards without all-reduce.
    partial: Vec<Option<Tensor<1>>>,
}

impl Unit {
    pub(crate) fn new(index: usize, spec: Arc<UnitSpec>) -> Self {
        let members = spec.members.len();
        let none = || (0..members).map(|_| None).collect();
        let board = ShardBoard {
            shards: (0..members).map(|_| None).collect(),
            generation: 0,
        };
        Self {
            index,
            board: Arc::new(Mutex::new(board)),
            unsharded: Unsharded::No,
            regrouped: None,
            passes: Vec::new(),
            accumulated: none(),
            partial: none(),
            spec,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.spec.members.is_empty()
    }

    // ---- shards

    pub(crate) fn board(&self) -> &Arc<Mutex<ShardBoard>> {
        &self.board
    }

    /// Drops the unit's hold on a member's shard, so that an optimizer may update it in place, and
    /// everything made from it.
    pub(crate) fn release_shard(&mut self, member: usize) {
        self.board.lock().shards[member] = None;
        self.unsharded = Unsharded::No;
        self.regrouped = None;
    }

    pub(crate) fn set_shard(&mut self, member: usize, shard: Shard) {
        self.release_shard(member);
        let mut board = self.board.lock();
        board.shards[member] = Some(shard);
        board.generation += 1;
    }

    pub(crate) fn shard(&self, member: usize) -> Result<Tensor<1>> {
        Ok(self.board.lock().get(&self.spec, member)?.flat.clone())
    }

    fn dtype(&self, member: usize) -> Result<DType> {
        Ok(self.board.lock().get(&self.spec, member)?.flat.dtype())
    }

    pub(crate) fn shard_bytes(&self) -> usize {
        let bytes = |shard: &Shard| shard.flat.dims()[0] * shard.flat.dtype().size();
        self.board.lock().shards.iter().flatten().map(bytes).sum()
    }

    /// The members that are trained.
    pub(crate) fn trainable(&self) -> Vec<usize> {
        let board = self.board.lock();
        let trained = |member: &usize| board.shards[*member].as_ref().is_some_and(|s| s.trainable);
        (0..board.shards.len()).filter(trained).collect()
    }

    // ---- unshard and reshard

    pub(crate) fn is_sharded(&self) -> bool {
        matches!(self.unsharded, Unsharded::No)
    }

    pub(crate) fn is_unsharded(&self) -> bool {
        matches!(self.unsharded, Unsharded::Here(_))
    }

    /// Starts the all-gather, unless the unit is unsharded or on its way: over the subgroup if the
    /// unit is regrouped and ranks have agreed that all have it so. Memory for the full parameters is
    /// held from here to [`free`](Self::free).
    pub(crate) fn start_unshard(&mut self, context: &Context, in_subgroup: bool) -> Result<()> {
        if self.is_empty() || !self.is_sharded() {
            return Ok(());
        }
        let (group, key, inputs) = match (&self.regrouped, &self.spec.after_forward) {
            (Some(regrouped), AfterForward::Regroup(group)) if in_subgroup => {
                (group, None, self.regrouped_inputs(&regrouped.shards, group))
            }
            _ => {
                let board = self.board.lock();
                let key = GatherKey {
                    module: context.module,
                    unit: self.index,
                    generation: board.generation,
                };
                let inputs = board.gather_inputs(&self.spec, context)?;
                (context.mesh.shard_group(), Some(key), inputs)
            }
        };
        let call = Call::gather(self.subject(), &inputs);
        if group.world_size() > 1 {
            Counters::bump(&context.counters.all_gathers);
        }
        let engine = group.engine();
        let work = engine.all_gather(call, key, inputs, &context.memory)?;
        self.unsharded = Unsharded::Coming(work);
        Ok(())
    }

    fn regrouped_inputs(&self, shards: &[Tensor<1>], group: &ProcessGroup) -> Vec<GatherInput> {
        let members = self.spec.members.iter().zip(shards);
        members
            .map(|(member, shard)| GatherInput {
                layout: member.layout.with_world_size(group.world_size()),
                dtype: shard.dtype(),
                shard: shard.clone(),
            })
            .collect()
    }

    /// Waits until the unit is unsharded; a member's full parameter, flat.
    pub(crate) fn unsharded(
        &mut self,
        context: &Context,
        member: usize,
        in_subgroup: bool,
    ) -> Result<Tensor<1>> {
        self.start_unshard(context, in_subgroup)?;
        let full = match std::mem::take(&mut self.unsharded) {
            Unsharded::Here(full) => full,
            Unsharded::Coming(work) => work.wait()?,
            Unsharded::No => unreachable!("unsharding has just been started"),
        };
        let parameter = full.tensors[member].clone();
        self.unsharded = Unsharded::Here(full);
        Ok(parameter)
    }

    /// Lets go of the full parameters as the policy after forward says.
    pub(crate) fn reshard_after_forward(&mut self, context: &Context) -> Result<()> {
        if let (AfterForward::Regroup(group), Unsharded::Here(full), None) =
            (&self.spec.after_forward, &self.unsharded, &self.regrouped)
        {
            let members = self.spec.members.iter().zip(&full.tensors);
            let shards = members
                .map(|(member, full)| {
                    let layout = member.layout.with_world_size(group.world_size());
                    take_shard(full, &layout, group.rank())
                })
                .collect::<Vec<_>>();
            let bytes = |t: &Tensor<1>| t.dims()[0] * t.dtype().size();
            let held = shards.iter().map(bytes).sum();
            self.regrouped = Some(Regrouped {
                shards,
                _counted: MemoryGuard::new(&context.memory, held),
            });
        }
        self.unsharded = Unsharded::No;
        Ok(())
    }

    pub(crate) fn is_regrouped(&self) -> bool {
        self.regrouped.is_some()
    }

    /// Gathers over all shard ranks the next time, not over the subgroup.
    pub(crate) fn forget_regrouped(&mut self) {
        self.regrouped = None;
    }

    /// Lets go of the full parameters, whatever the policy.
    pub(crate) fn free(&mut self) {
        self.unsharded = Unsharded::No;
        self.regrouped = None;
    }

    // ---- gradients

    /// The pass of this id, which is the latest if it is known.
    pub(crate) fn pass(&self, id: u64) -> Option<&Pass> {
        self.passes.iter().rev().find(|pass| pass.id == id)
    }

    pub(crate) fn passes(&self) -> &[Pass] {
        &self.passes
    }

    /// Notes that a tracked member's full parameter goes into the graph; to be kept there.
    pub(crate) fn hand_out(
        &mut self,
        pass: u64,
        member: usize,
        node: NodeId,
        call: u64,
        first_call: u64,
    ) -> Arc<()> {
        self.pass_mut(pass).hand_out(member, node, call, first_call)
    }

    fn pass_mut(&mut self, id: u64) -> &mut Pass {
        let found = self.passes.iter().position(|pass| pass.id == id);
        let i = found.unwrap_or_else(|| {
            self.passes
                .retain(|pass| pass.arrived > 0 || pass.is_owed());
            self.passes.push(Pass::new(id, self.spec.members.len()));
            self.passes.len() - 1
        });
        &mut self.passes[i]
    }

    /// Takes in a full gradient that backward brought for a hand-out. Whether the pass now has a
    /// gradient for every trainable parameter, and none is to come.
    pub(crate) fn take_gradient(&mut self, pass: u64, member: usize, gradient: Tensor<1>) -> bool {
        let reduce_dtype = self.reduce_dtype(member);
        let trainable = self.trainable();
        let pass = self.pass_mut(pass);
        let slot = &mut pass.members[member].gradient;
        *slot = Some(sum(slot.take(), gradient, reduce_dtype));
        pass.arrived += 1;
        !pass.is_broken_up
            && pass.arrived == pass.outstanding
            && trainable
                .iter()
                .all(|&member| pass.members[member].handed_out > 0)
    }

    /// Adds what a pass has brought to the gradients kept without sync.
    pub(crate) fn accumulate(&mut self, pass: u64) {
        for (member, taken) in self.collect(pass).into_iter().enumerate() {
            let Some((_, gradient)) = taken else { continue };
            let dtype = self.reduce_dtype(member);
            let gradient = cast(gradient, dtype);
            let kept = &mut self.accumulated[member];
            *kept = Some(sum(kept.take(), gradient, dtype));
        }
    }

    fn reduce_dtype(&self, member: usize) -> DType {
        let original = || self.dtype(member).ok();
        self.spec
            .reduce_dtype
            .or_else(original)
            .unwrap_or(DType::F32)
    }

    /// Takes the gradients a pass has brought, with their leaves, and forgets what is settled.
    fn collect(&mut self, pass: u64) -> Vec<Option<(Option<NodeId>, Tensor<1>)>> {
        let Some(i) = self.passes.iter().position(|p| p.id == pass) else {
            return Vec::new();
        };
        let pass = &mut self.passes[i];
        let take = |m: &mut MemberUse| Some((m.node, m.gradient.take()?));
        let taken = pass.members.iter_mut().map(take).collect();
        pass.outstanding = pass.outstanding.saturating_sub(pass.arrived);
        pass.arrived = 0;
        pass.is_broken_up = true;
        if pass.outstanding == 0 {
            self.passes.remove(i);
        }
        taken
    }

    /// Whether any gradient waits to be reduced; to be all-reduced, if that is on.
    pub(crate) fn has_gradient(&self, member: usize, all_reduce: bool) -> bool {
        let in_pass = |pass: &Pass| pass.members[member].gradient.is_some();
        self.accumulated[member].is_some()
            || all_reduce && self.partial[member].is_some()
            || self.passes.iter().any(in_pass)
    }

    /// Whether gradients are kept for a backward with sync.
    pub(crate) fn keeps_gradients(&self) -> bool {
        self.accumulated.iter().any(Option::is_some)
    }

    /// Whether backward has brought gradients that were neither reduced nor kept.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.passes.iter().any(|pass| pass.arrived > 0)
    }

    pub(crate) fn arrived_passes(&self) -> Vec<u64> {
        let arrived = self.passes.iter().filter(|pass| pass.arrived > 0);
        arrived.map(|pass| pass.id).collect()
    }

    /// Drops gradients that nobody collected; whether there were any.
    pub(crate) fn drop_stale(&mut self) -> bool {
        let before = self.passes.len();
        self.passes.retain(|pass| pass.arrived == 0);
        self.passes.len() < before
    }

    pub(crate) fn missing_gradients(&self) -> Vec<String> {
        let missing = self.trainable().into_iter();
        missing
            .filter(|&member| !self.has_gradient(member, false))
            .map(|member| self.spec.members[member].path.clone())
            .collect()
    }

    /// Starts to reduce the gradients of these passes and of `members`, zeros where this rank has
    /// none. All ranks must do this, in the same order and for the same members.
    pub(crate) fn start_reduce(
        &mut self,
        context: &Context,
        passes: &[u64],
        members: &[usize],
        which: Which,
    ) -> Result<Reducing> {
        let mut gradients: Vec<_> = (0..self.accumulated.len()).map(|_| None).collect();
        for &member in members {
            gradients[member] = self.accumulated[member].take();
        }
        let mut nodes = vec![None; gradients.len()];
        for &pass in passes {
            for (member, taken) in self.collect(pass).into_iter().enumerate() {
                let Some((node, gradient)) = taken else {
                    continue;
                };
                nodes[member] = node;
                let reduce_dtype = self.reduce_dtype(member);
                let slot = &mut gradients[member];
                *slot = Some(sum(slot.take(), gradient, reduce_dtype));
            }
        }
        let mut contributions = Vec::with_capacity(members.len());
        for &member in members {
            contributions.push((member, gradients[member].take()));
        }
        Ok(Reducing {
            work: self.reduce_scatter(context, contributions, which)?,
            members: members.iter().map(|&m| (m, nodes[m])).collect(),
            which,
            over_copies: false,
        })
    }

    /// Waits for a reduction. What it goes on with, or the reduced gradients: none while all-reduce
    /// is off, as the partial result is kept for the next time. All ranks must do this, in the same
    /// order.
    pub(crate) fn go_on_reducing(
        &mut self,
        context: &Context,
        reducing: Reducing,
    ) -> Result<ControlFlow<Vec<Reduced>, Reducing>> {
        let shards = reducing.work.wait()?;
        if let Some(group) = context.mesh.replicate_group()
            && !reducing.over_copies
        {
            let members = reducing.members.iter().map(|(member, _)| *member);
            let parts = members.zip(shards).collect();
            let work = self.all_reduce(context, group, parts, reducing.which)?;
            return Ok(match work {
                None => ControlFlow::Break(Vec::new()),
                Some(work) => ControlFlow::Continue(Reducing {
                    work,
                    over_copies: true,
                    ..reducing
                }),
            });
        }
        let reduced = reducing.members.into_iter().zip(shards);
        let reduced = reduced.map(|((member, node), gradient)| Reduced {
            member,
            node,
            gradient: gradient.to_device(&context.shard_device),
        });
        Ok(ControlFlow::Break(reduced.collect()))
    }

    fn reduce_scatter(
        &self,
        context: &Context,
        contributions: Vec<(usize, Option<Tensor<1>>)>,
        which: Which,
    ) -> Result<Box<dyn ReduceWork>> {
        let group = context.mesh.shard_group();
        let more_to_come = context.mesh.replicate_group().is_some();
        let inputs: Vec<_> = contributions
            .into_iter()
            .map(|(member, contribution)| {
                let reduce_dtype = self.reduce_dtype(member);
                Ok(ReduceInput {
                    layout: self.spec.members[member].layout.clone(),
                    contribution,
                    reduce_dtype,
                    out_dtype: if more_to_come {
                        reduce_dtype
                    } else {
                        self.dtype(member)?
                    },
                })
            })
            .collect::<Result<_>>()?;
        if group.world_size() > 1 {
            Counters::bump(&context.counters.reduce_scatters);
        }
        let average = context.average;
        self.run(context, group, "reduce-scatter", inputs, average, which)
    }

    /// `None` while all-reduce is off.
    fn all_reduce(
        &mut self,
        context: &Context,
        group: &ProcessGroup,
        parts: Vec<(usize, Tensor<1>)>,
        which: Which,
    ) -> Result<Option<Box<dyn ReduceWork>>> {
        let mut inputs = Vec::with_capacity(parts.len());
        for (member, shard) in parts {
            let reduce_dtype = self.reduce_dtype(member);
            let kept = self.partial[member].take();
            let shard = shard.to_device(&context.compute_device);
            let shard = sum(kept, shard, reduce_dtype);
            if !which.all_reduce {
                self.partial[member] = Some(shard);
                continue;
            }
            inputs.push(ReduceInput {
                layout: ShardLayout::flat(
                    shard.dims()[0],
                    Placement::Replicate,
                    group.world_size(),
                ),
                contribution: Some(shard),
                reduce_dtype,
                out_dtype: self.dtype(member)?,
            });
        }
        if !which.all_reduce {
            return Ok(None);
        }
        // A custom factor has been applied once already.
        let average = match context.average {
            GradientAverage::Mean => GradientAverage::Mean,
            GradientAverage::Sum | GradientAverage::Factor(_) => GradientAverage::Sum,
        };
        Counters::bump(&context.counters.all_reduces);
        self.run(context, group, "all-reduce", inputs, average, which)
            .map(Some)
    }

    fn run(
        &self,
        context: &Context,
        group: &ProcessGroup,
        op: &'static str,
        inputs: Vec<ReduceInput>,
        average: GradientAverage,
        which: Which,
    ) -> Result<Box<dyn ReduceWork>> {
        let Some(first) = inputs.first() else {
            return Ok(Box::new(Vec::new()));
        };
        let len = inputs.iter().map(|input| input.layout.full_len()).sum();
        let kinds = inputs
            .iter()
            .map(|i| (&i.layout, i.reduce_dtype, i.out_dtype));
        let call = Call::new(op, self.subject())
            .of(first.reduce_dtype, len)
            .with_detail((which.module, which.pass, kinds.collect::<Vec<_>>()));
        let reduction = Reduction::new(average, group.world_size(), first.reduce_dtype);
        let device = &context.compute_device;
        group.engine().reduce(call, inputs, reduction, device)
    }

    fn subject(&self) -> String {
        match &*self.spec.name {
            "" => "the root unit".to_string(),
            name => format!("unit \"{name}\""),
        }
    }
}

/// The sum, in `dtype`; the tensor as it is where there is nothing to add it to.
fn sum(a: Option<Tensor<1>>, b: Tensor<1>, dtype: DType) -> Tensor<1> {
    match a {
        Some(a) => cast(a, dtype) + cast(b, dtype),
        None => b,
    }
}

fn cast(tensor: Tensor<1>, dtype: DType) -> Tensor<1> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}
