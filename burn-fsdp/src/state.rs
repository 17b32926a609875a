//! What a sharded module is on one rank, behind its parameters.
//!
//! [`FsdpState`] belongs to one module on one rank, and every sharded parameter of it holds on to
//! it. Nothing here starts a thread: parameters ask for their unit as the forward or the backward
//! uses them, which is what drives everything.
//!
//! # Note: passes
//!
//! Backward brings one gradient for each hand-out of a tracked parameter. Hand-outs are counted per
//! *pass*, so that two forwards before a backward are not taken for one, and a forward whose loss
//! is dropped leaves nothing owing. A new pass begins with the first hand-out after a backward, and
//! when a new call of the module hands out a parameter that the current pass has handed out before.
//! These rules depend on the program alone, so ranks agree on them without talking.
//!
//! # Note: agreement in backward
//!
//! A unit reduces in mid-backward when the pass is complete. If a parameter is used on some ranks
//! only, it would be complete there only, and the ranks' collectives would no longer match. So
//! [`begin_backward`](FsdpState::begin_backward) compares what the ranks have handed out, and units
//! that differ wait until [`finish_backward`](FsdpState::finish_backward), which reduces all that
//! is left in one order, zeros standing in for what a rank has not got.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, Tensor};
use parking_lot::Mutex;

use crate::board::{Context, Shard, ShardBoard, UnitSpec};
use crate::comm::{Call, CollectiveCounts, GatherInput, GatherSource};
use crate::memory::MemoryStats;
use crate::plan::ShardingPlan;
use crate::ranked::RankedParam;
use crate::schedule::{Event, Phase, Schedule, Switches, UnitGradient, Usage};
use crate::unit::{Reduced, Unit};
use crate::{FsdpError, Result};

/// What the graph keeps of a hand-out.
#[derive(Clone, Debug)]
pub(crate) struct HandOut {
    pass: u64,
    generation: u64,
    _owed: Arc<()>,
}

/// The state of one sharded module on one rank.
pub(crate) struct FsdpState {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) context: Context,
    module_calls: AtomicU64,
    new_ids: AtomicBool,
    /// Parameters with several names, for the later names to follow the first.
    tied: Mutex<HashMap<(usize, usize), RankedParam>>,
    /// What other ranks may gather from while this one waits.
    boards: Vec<(Arc<UnitSpec>, Arc<Mutex<ShardBoard>>)>,
    copies: AtomicU64,
    schedule: Mutex<Schedule>,
}

impl fmt::Debug for FsdpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpState")
            .field("units", &self.plan.units().len())
            .finish_non_exhaustive()
    }
}

impl FsdpState {
    pub(crate) fn new(
        plan: Arc<ShardingPlan>,
        context: Context,
        specs: Vec<Arc<UnitSpec>>,
        prefetch: bool,
    ) -> Arc<Self> {
        Self::with_schedule(plan, context, Schedule::new(specs, prefetch))
    }

    fn with_schedule(plan: Arc<ShardingPlan>, context: Context, schedule: Schedule) -> Arc<Self> {
        let board = |unit: &Unit| (unit.spec.clone(), unit.board().clone());
        let state = Arc::new(Self {
            plan,
            context,
            module_calls: AtomicU64::new(0),
            new_ids: AtomicBool::new(false),
            tied: Default::default(),
            boards: schedule.units.iter().map(board).collect(),
            copies: AtomicU64::new(0),
            schedule: Mutex::new(schedule),
        });
        let engine = state.context.mesh.shard_group().engine();
        // Bound first: a weak pointer to the type becomes one to the trait.
        let source: Weak<Self> = Arc::downgrade(&state);
        engine.register(state.context.module, source);
        state
    }

    /// A state of the same kind for a copy of the module, without shards yet. Ranks know it as the
    /// n-th copy of this module, so all must make the same copies.
    pub(crate) fn for_copy(&self) -> Arc<Self> {
        let own = self.schedule.lock();
        let specs = own.units.iter().map(|unit| unit.spec.clone()).collect();
        let mut schedule = Schedule::new(specs, own.prefetch);
        schedule.explicit_prefetch = own.explicit_prefetch.clone();
        schedule.switches = Switches {
            no_sync_guards: 0,
            ..own.switches
        };
        for (unit, own) in schedule.units.iter().zip(&own.units) {
            unit.board().lock().generation = own.board().lock().generation;
        }
        let mut number = DefaultHasher::new();
        let nth = self.copies.fetch_add(1, Ordering::Relaxed);
        (self.context.module, nth, "copy").hash(&mut number);
        let context = Context {
            module: number.finish(),
            mesh: self.context.mesh.clone(),
            average: self.context.average,
            compute_device: self.context.compute_device.clone(),
            shard_device: self.context.shard_device.clone(),
            memory: Default::default(),
            counters: Default::default(),
        };
        Self::with_schedule(self.plan.clone(), context, schedule)
    }

    // ---- shards

    pub(crate) fn release_shard(&self, unit: usize, member: usize) {
        self.tied.lock().remove(&(unit, member));
        self.schedule.lock().units[unit].release_shard(member);
    }

    pub(crate) fn set_shard(&self, unit: usize, member: usize, shard: Shard) {
        self.schedule.lock().units[unit].set_shard(member, shard);
    }

    /// Keeps a parameter for its other names, if it has any.
    pub(crate) fn set_tied(&self, unit: usize, member: usize, param: &RankedParam) {
        if self.plan.is_tied(unit, member) {
            self.tied.lock().insert((unit, member), param.clone());
        }
    }

    pub(crate) fn tied(&self, unit: usize, member: usize) -> Option<RankedParam> {
        self.tied.lock().get(&(unit, member)).cloned()
    }

    /// Notes that a shard has got another id, as loading a record gives it.
    pub(crate) fn note_new_ids(&self) {
        self.new_ids.store(true, Ordering::Relaxed);
    }

    pub(crate) fn take_new_ids(&self) -> bool {
        self.new_ids.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn shard(&self, unit: usize, member: usize) -> Result<Tensor<1>> {
        self.schedule.lock().units[unit].shard(member)
    }

    pub(crate) fn shard_shape(&self, unit: usize, member: usize) -> Shape {
        Shape::from(self.plan.layout(unit, member).shard_shape())
    }

    // ---- forward

    /// Notes that the user is about to call the module.
    pub(crate) fn module_called(&self) {
        self.module_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a tracked parameter goes into the graph as `node`; what the graph is to keep.
    pub(crate) fn hand_out(&self, unit: usize, member: usize, node: NodeId) -> HandOut {
        let call = self.module_calls.load(Ordering::Relaxed);
        let mut schedule = self.schedule.lock();
        schedule.enter_forward();
        let pass = schedule.pass_for(unit, member, call);
        HandOut {
            pass,
            generation: self.generation(unit),
            _owed: schedule.hand_out(unit, pass, member, node, call),
        }
    }

    /// How often the unit's shards have been replaced.
    pub(crate) fn generation(&self, unit: usize) -> u64 {
        self.boards[unit].1.lock().generation
    }

    /// An error if the unit's shards are not those that a forward has used.
    fn check_generation(&self, unit: usize, forward: u64) -> Result<()> {
        if self.generation(unit) == forward {
            return Ok(());
        }
        Err(FsdpError::UpdatedBeforeBackward {
            unit: self.plan.units()[unit].name.clone(),
        })
    }

    /// As [`full`](Self::full), in the backward of a forward that used this generation of shards.
    pub(crate) fn full_again(
        &self,
        unit: usize,
        member: usize,
        generation: u64,
    ) -> Result<Tensor<1>> {
        self.check_generation(unit, generation)?;
        self.full(unit, member, Phase::Backward)
    }

    /// A member's full parameter, flat, unsharding its unit first. All ranks must ask in the same
    /// order.
    pub(crate) fn full(&self, unit: usize, member: usize, phase: Phase) -> Result<Tensor<1>> {
        let mut schedule = self.schedule.lock();
        match phase {
            Phase::Forward => schedule.enter_forward(),
            Phase::Backward => schedule.enter_backward(),
        }
        schedule.make_room(unit, &self.context)?;
        let was_unsharded = schedule.units[unit].is_unsharded();
        let full = schedule.unsharded(unit, member, &self.context)?;
        if !was_unsharded {
            schedule.record(unit, |unit| Event::Unshard { unit });
        }
        schedule.gather_ahead(unit, &self.context)?;
        Ok(full)
    }

    pub(crate) fn unshard(&self, unit: usize) -> Result<()> {
        let mut schedule = self.schedule.lock();
        if schedule.units[unit].is_empty() || schedule.units[unit].is_unsharded() {
            return Ok(());
        }
        schedule.unsharded(unit, 0, &self.context)?;
        schedule.record(unit, |unit| Event::Unshard { unit });
        Ok(())
    }

    pub(crate) fn reshard_all(&self) {
        let mut schedule = self.schedule.lock();
        for unit in 0..schedule.units.len() {
            schedule.free(unit);
        }
        schedule.previous = None;
    }

    // ---- backward

    /// Takes in a full gradient; the reduced gradients of its unit, if this completed it and nobody
    /// is to call [`finish_backward`](Self::finish_backward), which returns them else.
    pub(crate) fn take_gradient(
        &self,
        unit: usize,
        member: usize,
        hand_out: &HandOut,
        gradient: Tensor<1>,
    ) -> Result<Vec<Reduced>> {
        self.check_generation(unit, hand_out.generation)?;
        let pass = hand_out.pass;
        let mut schedule = self.schedule.lock();
        schedule.enter_backward();
        let complete = schedule.units[unit].take_gradient(pass, member, gradient);
        if !complete || !schedule.reduces_at_once(unit, pass) {
            return Ok(Vec::new());
        }
        let mut reduced = Vec::new();
        if schedule.switches.syncs() {
            let members = schedule.units[unit].trainable();
            schedule.start_reduce(unit, &[pass], &members, Some(pass), &self.context)?;
            if !schedule.agreed {
                reduced = schedule.take_reduced(&self.context)?;
            }
        } else {
            schedule.units[unit].accumulate(pass);
        }
        schedule.after_backward(unit);
        Ok(reduced.into_iter().map(|of| of.reduced).collect())
    }

    /// Compares what the ranks have handed out. All ranks must call this before the backward of
    /// the same loss; without gradient sync it does not communicate.
    pub(crate) fn begin_backward(&self) -> Result<()> {
        let mut schedule = self.schedule.lock();
        schedule.deferred.fill(false);
        schedule.agreed = schedule.switches.syncs();
        if !schedule.agreed {
            return Ok(());
        }
        let call = Call::new("agreement", "the parameters used in forward")
            .with_detail(self.context.module);
        let engine = self.context.mesh.group().engine();
        let all = engine.exchange(call, schedule.usage().to_bytes())?;
        let all: Vec<Usage> = all.iter().map(|bytes| Usage::from_bytes(bytes)).collect();
        check_equal("set_requires_all_reduce", &all, |usage| usage.all_reduce)?;
        check_equal(
            "set_requires_gradient_sync (backwards without sync since the last with)",
            &all,
            |usage| usage.held,
        )?;
        schedule.deferred = Usage::differing_units(&all);
        let same_gathers = all.iter().all(|usage| usage.gathers == all[0].gathers);
        if !same_gathers || schedule.deferred.contains(&true) {
            // Gathers over subgroups are matched by position, so ranks must make the same.
            schedule.units.iter_mut().for_each(Unit::forget_regrouped);
        }
        let deferred = schedule
            .deferred
            .iter()
            .filter(|deferred| **deferred)
            .count();
        if deferred > 0 {
            log::debug!("{deferred} units are reduced after backward: ranks use them differently");
        }
        Ok(())
    }

    /// Reduces every gradient that is left, in one order on all ranks, and reshards; all that was
    /// reduced since [`begin_backward`](Self::begin_backward). All ranks must call this after the
    /// backward of the same loss; without gradient sync it does not communicate.
    pub(crate) fn finish_backward(&self) -> Result<Vec<UnitGradient>> {
        let mut schedule = self.schedule.lock();
        schedule.enter_backward();
        let gradients = if schedule.switches.syncs() {
            schedule.held = 0;
            schedule.reduce_rest(&self.context)?
        } else {
            schedule.held += 1;
            schedule.keep_rest();
            Vec::new()
        };
        schedule.deferred.fill(false);
        schedule.agreed = false;
        for unit in 0..schedule.units.len() {
            schedule.after_backward(unit);
        }
        Ok(gradients)
    }

    /// An error if a plain backward left a unit without some of its gradients, or if gradients are
    /// kept without having been reduced.
    pub(crate) fn check_complete(&self) -> Result<()> {
        let schedule = self.schedule.lock();
        if schedule.units.iter().any(Unit::keeps_gradients) {
            return Err(FsdpError::UnsyncedGradients);
        }
        match schedule.units.iter().find(|unit| unit.is_incomplete()) {
            None => Ok(()),
            Some(unit) => Err(FsdpError::IncompleteUnit {
                unit: unit.spec.name.to_string(),
                missing: unit.missing_gradients(),
            }),
        }
    }

    // ---- settings and figures

    pub(crate) fn set_switches(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.schedule.lock().switches);
    }

    pub(crate) fn set_prefetch(&self, phase: Phase, unit: usize, ahead: Vec<usize>) {
        let explicit = &mut self.schedule.lock().explicit_prefetch;
        explicit.insert((phase, unit), ahead);
    }

    pub(crate) fn record_events(&self, record: bool) {
        self.schedule.lock().events = record.then(Vec::new);
    }

    pub(crate) fn take_events(&self) -> Vec<Event> {
        let mut schedule = self.schedule.lock();
        schedule
            .events
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    pub(crate) fn memory(&self) -> MemoryStats {
        let schedule = self.schedule.lock();
        MemoryStats {
            live_unsharded_bytes: self.context.memory.live(),
            peak_unsharded_bytes: self.context.memory.peak(),
            shard_bytes: schedule.units.iter().map(Unit::shard_bytes).sum(),
        }
    }

    pub(crate) fn collectives(&self) -> CollectiveCounts {
        self.context.counters.counts()
    }
}

fn check_equal(what: &str, all: &[Usage], number: impl Fn(&Usage) -> u64) -> Result<()> {
    match all
        .iter()
        .position(|usage| number(usage) != number(&all[0]))
    {
        None => Ok(()),
        Some(rank) => Err(FsdpError::RanksDisagree {
            what: what.to_string(),
            rank,
            expected: number(&all[0]).to_string(),
            got: number(&all[rank]).to_string(),
        }),
    }
}

impl GatherSource for FsdpState {
    fn gather_inputs(&self, unit: usize, generation: u64) -> Option<Vec<GatherInput>> {
        let (spec, board) = &self.boards[unit];
        let board = board.lock();
        if board.generation != generation {
            return None;
        }
        board.gather_inputs(spec, &self.context).ok()
    }
}
