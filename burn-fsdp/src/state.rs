//! The order in which a module's units are unsharded, resharded and reduced.
//!
//! [`FsdpState`] belongs to one module on one rank, and every sharded parameter of it holds on to
//! it. Nothing here starts a thread: parameters ask for their unit as the forward or the backward
//! uses them, which is what drives everything.
//!
//! # Note: what is unsharded
//!
//! A unit stays unsharded until another is asked for, not until its last use: a recurrent network
//! uses it at every time step. The root stays from its first use until its gradients are reduced.
//! With the next unit gathered ahead, that makes two units and the root at most.
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
use std::sync::{Arc, OnceLock, Weak};

use burn::backend::autodiff::NodeId;
use burn::tensor::{Shape, Tensor};
use parking_lot::Mutex;

use crate::comm::{Call, CollectiveCounts, GatherInput, GatherSource};
use crate::memory::MemoryStats;
use crate::param::RankedParam;
use crate::plan::{ROOT, ShardingPlan};
use crate::unit::{AfterForward, Context, Reduced, Shard, ShardBoard, Unit, UnitSpec};
use crate::{FsdpError, Result};

/// Something a unit did, for those who want to see the order. See
/// [`FsdpModule::record_events`](crate::FsdpModule::record_events).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The unit was asked for and is unsharded.
    Unshard {
        /// The unit's name; empty for the root.
        unit: Arc<str>,
    },
    /// The unit let go of its full parameters.
    Reshard {
        /// The unit's name; empty for the root.
        unit: Arc<str>,
    },
    /// The unit's gradients were reduced.
    Reduce {
        /// The unit's name; empty for the root.
        unit: Arc<str>,
    },
}

/// What asks for a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Forward,
    Backward,
}

/// A reduced gradient with the place of its parameter.
#[derive(Debug)]
pub(crate) struct UnitGradient {
    pub(crate) unit: usize,
    pub(crate) reduced: Reduced,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Switches {
    pub(crate) gradient_sync: bool,
    pub(crate) all_reduce: bool,
    pub(crate) reshard_after_backward: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            gradient_sync: true,
            all_reduce: true,
            reshard_after_backward: true,
        }
    }
}

/// The state of one sharded module on one rank.
pub(crate) struct FsdpState {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) context: Context,
    prefetch: bool,
    module_calls: AtomicU64,
    new_ids: AtomicBool,
    /// Parameters with several names, for the later names to follow the first.
    tied: Mutex<HashMap<(usize, usize), RankedParam>>,
    /// What other ranks may gather from while this one waits.
    boards: Vec<(Arc<UnitSpec>, Arc<Mutex<ShardBoard>>)>,
    /// This module's number with the engine.
    module: OnceLock<u64>,
    own: Weak<Self>,
    schedule: Mutex<Schedule>,
}

impl fmt::Debug for FsdpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpState")
            .field("units", &self.plan.units().len())
            .finish_non_exhaustive()
    }
}

struct Schedule {
    units: Vec<Unit>,
    switches: Switches,
    phase: Phase,
    /// The unit asked for last, among those that do not stay; none once it is freed.
    current: Option<usize>,
    /// The same within this phase, freed or not.
    previous: Option<usize>,
    /// Units left unsharded by a backward, until they are asked for again.
    kept: Vec<bool>,
    /// Units gathered ahead by the user's wish, until they are asked for or the phase ends.
    awaited: Vec<bool>,
    /// What followed a unit when it was asked for before.
    followed_by: HashMap<(Phase, usize), usize>,
    /// What the user wants gathered ahead of a unit.
    explicit_prefetch: HashMap<(Phase, usize), Vec<usize>>,
    pass: u64,
    /// Units whose hand-outs differ between ranks in the backward under way.
    deferred: Vec<bool>,
    events: Option<Vec<Event>>,
}

impl FsdpState {
    pub(crate) fn new(
        plan: Arc<ShardingPlan>,
        context: Context,
        specs: Vec<Arc<UnitSpec>>,
        prefetch: bool,
    ) -> Arc<Self> {
        Self::with_schedule(plan, context, Schedule::new(specs), prefetch)
    }

    fn with_schedule(
        plan: Arc<ShardingPlan>,
        context: Context,
        schedule: Schedule,
        prefetch: bool,
    ) -> Arc<Self> {
        let board = |unit: &Unit| (unit.spec.clone(), unit.board().clone());
        Arc::new_cyclic(|own| Self {
            plan,
            context,
            prefetch,
            module_calls: AtomicU64::new(0),
            new_ids: AtomicBool::new(false),
            tied: Default::default(),
            boards: schedule.units.iter().map(board).collect(),
            module: OnceLock::new(),
            own: own.clone(),
            schedule: Mutex::new(schedule),
        })
    }

    /// A state of the same kind for a copy of the module, without shards yet.
    pub(crate) fn for_copy(&self) -> Arc<Self> {
        let own = self.schedule.lock();
        let specs = own.units.iter().map(|unit| unit.spec.clone()).collect();
        let mut schedule = Schedule::new(specs);
        schedule.explicit_prefetch = own.explicit_prefetch.clone();
        let context = Context {
            mesh: self.context.mesh.clone(),
            average: self.context.average,
            compute_device: self.context.compute_device.clone(),
            shard_device: self.context.shard_device.clone(),
            memory: Default::default(),
            counters: Default::default(),
        };
        Self::with_schedule(self.plan.clone(), context, schedule, self.prefetch)
    }

    /// The number of this module with the engine. A module gets one when it is sharded, a copy when
    /// it is first used, so that a copy made on one rank only does not upset the count.
    pub(crate) fn module(&self) -> u64 {
        *self.module.get_or_init(|| {
            let engine = self.context.mesh.shard_group().engine();
            engine.register(self.own.clone())
        })
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
        let param = &self.plan.units()[unit].params[member];
        Shape::from(param.layout(self.plan.shard_size()).shard_shape())
    }

    // ---- forward

    /// Notes that the user is about to call the module.
    pub(crate) fn module_called(&self) {
        self.module_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a tracked parameter goes into the graph as `node`; the pass it belongs to.
    pub(crate) fn hand_out(&self, unit: usize, member: usize, node: NodeId) -> u64 {
        let call = self.module_calls.load(Ordering::Relaxed);
        let mut schedule = self.schedule.lock();
        schedule.enter_forward();
        let pass = schedule.pass_for(unit, member, call);
        schedule.units[unit].hand_out(pass, member, node, call);
        pass
    }

    /// A member's full parameter, flat, unsharding its unit first. All ranks must ask in the same
    /// order.
    pub(crate) fn full(&self, unit: usize, member: usize, phase: Phase) -> Result<Tensor<1>> {
        let mut schedule = self.schedule.lock();
        match phase {
            Phase::Forward => schedule.enter_forward(),
            Phase::Backward => schedule.enter_backward(),
        }
        schedule.make_room(unit, self)?;
        let was_unsharded = schedule.units[unit].is_unsharded();
        let full = schedule.units[unit].unsharded(&self.context, self.module(), member)?;
        if !was_unsharded {
            schedule.record(unit, |unit| Event::Unshard { unit });
        }
        schedule.gather_ahead(unit, self)?;
        Ok(full)
    }

    pub(crate) fn unshard(&self, unit: usize) -> Result<()> {
        let mut schedule = self.schedule.lock();
        if !schedule.units[unit].is_empty() {
            schedule.units[unit].unsharded(&self.context, self.module(), 0)?;
        }
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

    /// Takes in a full gradient; the reduced gradients of its unit, if this completed it.
    pub(crate) fn take_gradient(
        &self,
        unit: usize,
        member: usize,
        pass: u64,
        gradient: Tensor<1>,
    ) -> Result<Vec<Reduced>> {
        let mut schedule = self.schedule.lock();
        schedule.enter_backward();
        let complete = schedule.units[unit].take_gradient(pass, member, gradient);
        if !complete || schedule.deferred[unit] {
            return Ok(Vec::new());
        }
        let reduced = if schedule.switches.gradient_sync {
            let members = schedule.units[unit].trainable();
            schedule.reduce(unit, &[pass], &members, self)?
        } else {
            schedule.units[unit].accumulate(pass);
            Vec::new()
        };
        schedule.after_backward(unit);
        Ok(reduced)
    }

    /// Compares what the ranks have handed out. All ranks must call this before the backward of
    /// the same loss; without gradient sync it does not communicate.
    pub(crate) fn begin_backward(&self) -> Result<()> {
        let mut schedule = self.schedule.lock();
        schedule.deferred.fill(false);
        if !schedule.switches.gradient_sync {
            return Ok(());
        }
        let message = schedule.usage();
        let call = Call::new("agreement", "the parameters used in forward");
        let group = self.context.mesh.group();
        let all = group.engine().exchange(call, message)?;
        let word = |message: &[u8], i: usize| message[i * 8..(i + 1) * 8].to_vec();
        let units = schedule.units.len();
        for (i, deferred) in schedule.deferred.iter_mut().enumerate() {
            *deferred = all.iter().any(|m| word(m, i) != word(&all[0], i));
        }
        // The switches stand behind the units.
        match all
            .iter()
            .position(|m| m[units * 8..] != all[0][units * 8..])
        {
            None => Ok(()),
            Some(rank) => Err(FsdpError::RanksDisagree {
                what: "set_requires_all_reduce".to_string(),
                rank,
                expected: format!("{}", all[0][units * 8] == 1),
                got: format!("{}", all[rank][units * 8] == 1),
            }),
        }
    }

    /// Reduces every gradient that is left, in one order on all ranks, and reshards. All ranks must
    /// call this after the backward of the same loss; without gradient sync it does not
    /// communicate.
    pub(crate) fn finish_backward(&self) -> Result<Vec<UnitGradient>> {
        let mut schedule = self.schedule.lock();
        schedule.enter_backward();
        let gradients = if schedule.switches.gradient_sync {
            schedule.reduce_rest(self)?
        } else {
            schedule.keep_rest();
            Vec::new()
        };
        schedule.deferred.fill(false);
        for unit in 0..schedule.units.len() {
            schedule.after_backward(unit);
        }
        Ok(gradients)
    }

    /// An error if a plain backward left a unit without some of its gradients.
    pub(crate) fn check_complete(&self) -> Result<()> {
        let schedule = self.schedule.lock();
        match schedule.units.iter().find(|unit| unit.is_incomplete()) {
            None => Ok(()),
            Some(unit) => Err(FsdpError::IncompleteUnit {
                unit: unit.spec.name.to_string(),
                missing: unit.missing_gradients(),
            }),
        }
    }

    // ---- settings and figures

    pub(crate) fn switches(&self) -> Switches {
        self.schedule.lock().switches
    }

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

impl GatherSource for FsdpState {
    fn gather_inputs(&self, unit: usize, generation: u64) -> Option<Vec<GatherInput>> {
        let (spec, board) = &self.boards[unit];
        let board = board.lock();
        if board.generation() != generation {
            return None;
        }
        board.gather_inputs(spec, &self.context).ok()
    }
}

impl Schedule {
    fn new(specs: Vec<Arc<UnitSpec>>) -> Self {
        Self {
            deferred: vec![false; specs.len()],
            kept: vec![false; specs.len()],
            awaited: vec![false; specs.len()],
            units: (0..)
                .zip(specs)
                .map(|(i, spec)| Unit::new(i, spec))
                .collect(),
            switches: Switches::default(),
            phase: Phase::Forward,
            current: None,
            previous: None,
            followed_by: HashMap::new(),
            explicit_prefetch: HashMap::new(),
            pass: 0,
            events: None,
        }
    }

    fn enter_forward(&mut self) {
        if self.phase == Phase::Forward {
            return;
        }
        self.phase = Phase::Forward;
        self.previous = None;
        self.awaited.fill(false);
        self.pass += 1;
        for unit in &mut self.units {
            if unit.drop_stale() {
                log::warn!(
                    "gradients of unit \"{}\" were dropped: its last backward was incomplete; \
                     call `model.backward(loss)` instead of `loss.backward()`",
                    unit.spec.name
                );
            }
        }
    }

    fn enter_backward(&mut self) {
        if self.phase == Phase::Forward {
            self.phase = Phase::Backward;
            self.previous = None;
            self.awaited.fill(false);
        }
    }

    /// The pass that the next hand-out of this member belongs to.
    fn pass_for(&mut self, unit: usize, member: usize, call: u64) -> u64 {
        let handed_out_by_earlier_call = self.units[unit].pass(self.pass).is_some_and(|pass| {
            let member = &pass.members[member];
            member.handed_out > 0 && member.last_call < call
        });
        if handed_out_by_earlier_call {
            self.pass += 1;
        }
        self.pass
    }

    /// Whether the unit outlives the use of others in this phase.
    fn stays(&self, unit: usize) -> bool {
        matches!(self.units[unit].spec.after_forward, AfterForward::Keep)
    }

    /// Before `unit` is unsharded: frees what is not needed beside it, and sees to the root.
    fn make_room(&mut self, unit: usize, state: &FsdpState) -> Result<()> {
        if self.stays(unit) || self.current == Some(unit) {
            return Ok(());
        }
        if self.phase == Phase::Forward && self.stays(ROOT) && self.units[ROOT].is_sharded() {
            // All ranks gather the root first, even those that use none of its parameters now.
            self.units[ROOT].start_unshard(&state.context, state.module())?;
        }
        let wanted = self.ahead_of(unit, state);
        for other in 0..self.units.len() {
            let waits = self.kept[other] || self.awaited[other] || wanted.contains(&other);
            if other == unit || self.stays(other) || waits {
                continue;
            }
            if !self.units[other].is_sharded() {
                if self.phase == Phase::Forward {
                    self.units[other].reshard_after_forward(&state.context)?;
                    self.record(other, |unit| Event::Reshard { unit });
                } else {
                    self.free(other);
                }
            }
        }
        Ok(())
    }

    /// Once `unit` is unsharded: remembers the order and gathers what will follow.
    fn gather_ahead(&mut self, unit: usize, state: &FsdpState) -> Result<()> {
        self.kept[unit] = false;
        self.awaited[unit] = false;
        if self.stays(unit) || self.current == Some(unit) && self.previous == Some(unit) {
            return Ok(());
        }
        if let Some(previous) = self.previous.replace(unit) {
            self.followed_by.insert((self.phase, previous), unit);
        }
        self.current = Some(unit);
        let is_explicit = self.explicit_prefetch.contains_key(&(self.phase, unit));
        for ahead in self.ahead_of(unit, state) {
            self.units[ahead].start_unshard(&state.context, state.module())?;
            self.awaited[ahead] |= is_explicit;
        }
        Ok(())
    }

    /// The units to gather while `unit` is used.
    fn ahead_of(&self, unit: usize, state: &FsdpState) -> Vec<usize> {
        match self.explicit_prefetch.get(&(self.phase, unit)) {
            Some(explicit) => explicit.clone(),
            None if state.prefetch => {
                let next = self.followed_by.get(&(self.phase, unit));
                next.copied().into_iter().collect()
            }
            None => Vec::new(),
        }
    }

    fn free(&mut self, unit: usize) {
        if !self.units[unit].is_sharded() {
            self.record(unit, |unit| Event::Reshard { unit });
        }
        self.units[unit].free();
        if self.current == Some(unit) {
            self.current = None;
        }
    }

    /// Reshards after backward, or keeps the unit for the next micro-batch if so told.
    fn after_backward(&mut self, unit: usize) {
        if self.switches.reshard_after_backward {
            self.free(unit);
        } else {
            self.kept[unit] = true;
        }
    }

    fn reduce(
        &mut self,
        unit: usize,
        passes: &[u64],
        members: &[usize],
        state: &FsdpState,
    ) -> Result<Vec<Reduced>> {
        let all_reduce = self.switches.all_reduce;
        let reduced = self.units[unit].reduce(&state.context, passes, members, all_reduce)?;
        self.record(unit, |unit| Event::Reduce { unit });
        Ok(reduced)
    }

    /// One word a unit that tells its hand-outs from others, and one byte for the switches.
    fn usage(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.units.len() * 8 + 1);
        for unit in &self.units {
            let mut hasher = DefaultHasher::new();
            for pass in unit.passes() {
                pass.id.hash(&mut hasher);
                let counts = pass.members.iter().map(|member| member.handed_out);
                counts.collect::<Vec<_>>().hash(&mut hasher);
            }
            unit.trainable().hash(&mut hasher);
            message.extend(hasher.finish().to_le_bytes());
        }
        message.push(self.switches.all_reduce.into());
        message
    }

    fn reduce_rest(&mut self, state: &FsdpState) -> Result<Vec<UnitGradient>> {
        let all_reduce = self.switches.all_reduce;
        let has: Vec<u8> = self
            .units
            .iter()
            .flat_map(|unit| {
                (0..unit.spec.members.len()).map(|m| unit.has_gradient(m, all_reduce).into())
            })
            .collect();
        let call = Call::new("agreement", "the gradients that backward brought");
        let all = state.context.mesh.group().engine().exchange(call, has)?;
        let any = |i: usize| all.iter().any(|has| has[i] == 1);

        let mut gradients = Vec::new();
        let mut end = all[0].len();
        for unit in (0..self.units.len()).rev() {
            let start = end - self.units[unit].spec.members.len();
            let members: Vec<usize> = (start..end)
                .filter(|&i| any(i))
                .map(|i| i - start)
                .collect();
            end = start;
            if members.is_empty() {
                continue;
            }
            let passes = self.units[unit].arrived_passes();
            let reduced = self.reduce(unit, &passes, &members, state)?;
            let with_unit = |reduced| UnitGradient { unit, reduced };
            gradients.extend(reduced.into_iter().map(with_unit));
        }
        Ok(gradients)
    }

    fn keep_rest(&mut self) {
        for unit in &mut self.units {
            for pass in unit.arrived_passes() {
                unit.accumulate(pass);
            }
        }
    }

    fn record(&mut self, unit: usize, event: impl FnOnce(Arc<str>) -> Event) {
        if let Some(events) = &mut self.events {
            events.push(event(self.units[unit].spec.name.clone()));
        }
    }
}
