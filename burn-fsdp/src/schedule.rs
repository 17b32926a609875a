//! When a unit is unsharded, resharded and reduced.
//!
//! # Note: what is unsharded
//!
//! A unit stays unsharded until another is asked for, not until its last use: a recurrent network
//! uses it at every time step. The root stays from its first use until its gradients are reduced.
//! With the next unit gathered ahead, that makes two units and the root at most.
//!
//! # Note: reductions under way
//!
//! In `FsdpModule::backward` a unit's reduction goes on while backward computes the gradients of the
//! next, and is waited for when that is reduced, so that the memory of one is held at a time; with
//! copies of the model, of one between the shard ranks and one between the copies. A plain
//! `loss.backward()` has no end where the last could be waited for, so there none is under way.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;

use crate::Result;
use crate::board::{AfterForward, Context, UnitSpec};
use crate::comm::Call;
use crate::plan::ROOT;
use crate::unit::{Reduced, Reducing, Unit, Which};

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
    /// Guards alive that hold gradient sync off.
    pub(crate) no_sync_guards: usize,
}

impl Switches {
    /// Whether backward reduces.
    pub(crate) fn syncs(&self) -> bool {
        self.gradient_sync && self.no_sync_guards == 0
    }
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            gradient_sync: true,
            all_reduce: true,
            reshard_after_backward: true,
            no_sync_guards: 0,
        }
    }
}

/// One rank's account of a forward. All numbers, so that it goes between ranks as bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) all_reduce: u64,
    /// Backwards without sync since the last with.
    pub(crate) held: u64,
    /// What tells the gathers of this backward from others, as far as they are known.
    pub(crate) gathers: u64,
    /// For each unit, what tells its hand-outs from others.
    pub(crate) hand_outs: Vec<u64>,
    /// The units in the order of their first use, once for each pass.
    pub(crate) order: Vec<u64>,
}

impl Usage {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let units = self.hand_outs.len() as u64;
        let first = [self.all_reduce, self.held, self.gathers, units];
        let numbers = first.iter().chain(&self.hand_outs).chain(&self.order);
        numbers.flat_map(|number| number.to_le_bytes()).collect()
    }

    /// The reverse of [`to_bytes`](Self::to_bytes).
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let number = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
        let numbers: Vec<u64> = bytes.chunks_exact(8).map(number).collect();
        let [all_reduce, held, gathers, units, lists @ ..] = &numbers[..] else {
            unreachable!("a rank's account has four numbers at least");
        };
        let (hand_outs, order) = lists.split_at(*units as usize);
        Self {
            all_reduce: *all_reduce,
            held: *held,
            gathers: *gathers,
            hand_outs: hand_outs.to_vec(),
            order: order.to_vec(),
        }
    }

    /// For each unit, whether the ranks would reduce it differently: they have not used it in the
    /// same way, or have begun to in another order among the units that they have.
    pub(crate) fn differing_units(all: &[Self]) -> Vec<bool> {
        let first = &all[0];
        let mut differs = vec![false; first.hand_outs.len()];
        for (unit, differs) in differs.iter_mut().enumerate() {
            *differs = all
                .iter()
                .any(|u| u.hand_outs[unit] != first.hand_outs[unit]);
        }
        let unlike = differs.clone();
        let common = |usage: &Self| -> Vec<usize> {
            let units = usage.order.iter().map(|&unit| unit as usize);
            units.filter(|&unit| !unlike[unit]).collect()
        };
        let expected = common(first);
        for usage in &all[1..] {
            for (a, b) in expected.iter().zip(common(usage)) {
                if *a != b {
                    differs[*a] = true;
                    differs[b] = true;
                }
            }
        }
        differs
    }
}

pub(crate) struct Schedule {
    pub(crate) units: Vec<Unit>,
    pub(crate) switches: Switches,
    /// Whether units are gathered ahead in the order seen before.
    pub(crate) prefetch: bool,
    pub(crate) phase: Phase,
    /// The unit asked for last, among those that do not stay; none once it is freed.
    pub(crate) current: Option<usize>,
    /// The same within this phase, freed or not.
    pub(crate) previous: Option<usize>,
    /// Units left unsharded by a backward, until they are asked for again.
    pub(crate) kept: Vec<bool>,
    /// Units gathered ahead by the user's wish, until they are asked for or the phase ends.
    pub(crate) awaited: Vec<bool>,
    /// What followed a unit when it was asked for before.
    pub(crate) followed_by: HashMap<(Phase, usize), usize>,
    /// What the user wants gathered ahead of a unit.
    pub(crate) explicit_prefetch: HashMap<(Phase, usize), Vec<usize>>,
    pub(crate) pass: u64,
    /// The first pass since the last backward.
    first_pass: u64,
    /// The module call of the first hand-out since then.
    first_call: Option<u64>,
    /// The units and passes since then, in the order of their first hand-outs.
    order: Vec<(usize, u64)>,
    /// Whether ranks have agreed on the backward under way.
    pub(crate) agreed: bool,
    /// Backwards without sync since the last with.
    pub(crate) held: u64,
    /// Units whose hand-outs differ between ranks in the backward under way.
    pub(crate) deferred: Vec<bool>,
    /// Reductions under way, with their units, in the order they were started in.
    reducing: Vec<(usize, Reducing)>,
    /// What has been reduced in the backward under way.
    reduced: Vec<UnitGradient>,
    pub(crate) events: Option<Vec<Event>>,
}

impl Schedule {
    pub(crate) fn new(specs: Vec<Arc<UnitSpec>>, prefetch: bool) -> Self {
        Self {
            deferred: vec![false; specs.len()],
            kept: vec![false; specs.len()],
            awaited: vec![false; specs.len()],
            units: (0..)
                .zip(specs)
                .map(|(i, spec)| Unit::new(i, spec))
                .collect(),
            switches: Switches::default(),
            prefetch,
            phase: Phase::Forward,
            current: None,
            previous: None,
            followed_by: HashMap::new(),
            explicit_prefetch: HashMap::new(),
            pass: 0,
            first_pass: 0,
            first_call: None,
            order: Vec::new(),
            agreed: false,
            held: 0,
            reducing: Vec::new(),
            reduced: Vec::new(),
            events: None,
        }
    }

    pub(crate) fn enter_forward(&mut self) {
        if self.phase == Phase::Forward {
            return;
        }
        self.phase = Phase::Forward;
        self.previous = None;
        self.awaited.fill(false);
        self.pass += 1;
        self.first_pass = self.pass;
        self.first_call = None;
        self.order.clear();
        self.agreed = false;
        self.deferred.fill(false);
        // Those of a backward that has failed.
        self.reducing.clear();
        self.reduced.clear();
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

    pub(crate) fn enter_backward(&mut self) {
        if self.phase == Phase::Forward {
            self.phase = Phase::Backward;
            self.previous = None;
            self.awaited.fill(false);
        }
    }

    /// The pass that the next hand-out of this member belongs to.
    pub(crate) fn pass_for(&mut self, unit: usize, member: usize, call: u64) -> u64 {
        let handed_out_by_earlier_call = self.units[unit].pass(self.pass).is_some_and(|pass| {
            let member = &pass.members[member];
            member.handed_out > 0 && member.last_call < call
        });
        if handed_out_by_earlier_call {
            self.pass += 1;
        }
        self.pass
    }

    /// Notes that a tracked member's full parameter goes into the graph; to be kept there.
    pub(crate) fn hand_out(
        &mut self,
        unit: usize,
        pass: u64,
        member: usize,
        node: NodeId,
        call: u64,
    ) -> Arc<()> {
        let first_call = *self.first_call.get_or_insert(call);
        if !self.order.iter().rev().any(|use_| *use_ == (unit, pass)) {
            self.order.push((unit, pass));
        }
        self.units[unit].hand_out(pass, member, node, call, first_call)
    }

    /// Whether the gradients of a complete pass can be reduced at once. Ranks agree on the passes of
    /// the last forward only.
    pub(crate) fn reduces_at_once(&self, unit: usize, pass: u64) -> bool {
        let is_agreed_on = !self.agreed || pass >= self.first_pass;
        is_agreed_on && !self.deferred[unit]
    }

    /// A member's full parameter, flat.
    pub(crate) fn unsharded(
        &mut self,
        unit: usize,
        member: usize,
        context: &Context,
    ) -> Result<Tensor<1>> {
        let in_subgroup = self.in_subgroup();
        self.units[unit].unsharded(context, member, in_subgroup)
    }

    /// Whether regrouped units are gathered over their subgroups: in a backward that ranks have agreed
    /// on. In forward a rank may skip a unit, and the gather is matched by unit then.
    pub(crate) fn in_subgroup(&self) -> bool {
        self.phase == Phase::Backward && self.agreed
    }

    /// Whether the unit outlives the use of others in this phase.
    pub(crate) fn stays(&self, unit: usize) -> bool {
        matches!(self.units[unit].spec.after_forward, AfterForward::Keep)
    }

    /// Before `unit` is unsharded: frees what is not needed beside it, and sees to the root.
    pub(crate) fn make_room(&mut self, unit: usize, context: &Context) -> Result<()> {
        if self.stays(unit) || self.current == Some(unit) {
            return Ok(());
        }
        if self.phase == Phase::Forward && self.stays(ROOT) && self.units[ROOT].is_sharded() {
            // All ranks gather the root first, even those that use none of its parameters now.
            self.units[ROOT].start_unshard(context, false)?;
        }
        let wanted = self.ahead_of(unit);
        for other in 0..self.units.len() {
            let waits = self.kept[other] || self.awaited[other] || wanted.contains(&other);
            if other == unit || self.stays(other) || waits {
                continue;
            }
            if !self.units[other].is_sharded() {
                if self.phase == Phase::Forward {
                    self.units[other].reshard_after_forward(context)?;
                    self.record(other, |unit| Event::Reshard { unit });
                } else {
                    self.free(other);
                }
            }
        }
        Ok(())
    }

    /// Once `unit` is unsharded: remembers the order and gathers what will follow.
    pub(crate) fn gather_ahead(&mut self, unit: usize, context: &Context) -> Result<()> {
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
        let in_subgroup = self.in_subgroup();
        for ahead in self.ahead_of(unit) {
            self.units[ahead].start_unshard(context, in_subgroup)?;
            self.awaited[ahead] |= is_explicit;
        }
        Ok(())
    }

    /// The units to gather while `unit` is used.
    pub(crate) fn ahead_of(&self, unit: usize) -> Vec<usize> {
        self.ahead_in(self.phase, unit)
    }

    fn ahead_in(&self, phase: Phase, unit: usize) -> Vec<usize> {
        match self.explicit_prefetch.get(&(phase, unit)) {
            Some(explicit) => explicit.clone(),
            None if self.prefetch => {
                let next = self.followed_by.get(&(phase, unit));
                next.copied().into_iter().collect()
            }
            None => Vec::new(),
        }
    }

    pub(crate) fn free(&mut self, unit: usize) {
        if !self.units[unit].is_sharded() {
            self.record(unit, |unit| Event::Reshard { unit });
        }
        self.units[unit].free();
        if self.current == Some(unit) {
            self.current = None;
        }
    }

    /// Reshards after backward, or keeps the unit for the next micro-batch if so told.
    pub(crate) fn after_backward(&mut self, unit: usize) {
        if self.switches.reshard_after_backward {
            self.free(unit);
        } else {
            self.kept[unit] = true;
        }
    }

    /// Starts to reduce these gradients of a unit. Reductions under way go on first.
    pub(crate) fn start_reduce(
        &mut self,
        unit: usize,
        passes: &[u64],
        members: &[usize],
        pass: Option<u64>,
        context: &Context,
    ) -> Result<()> {
        self.go_on_reducing(context)?;
        let which = Which {
            pass: pass.map(|pass| pass.wrapping_sub(self.first_pass)),
            module: context.module,
            all_reduce: self.switches.all_reduce,
        };
        let reducing = self.units[unit].start_reduce(context, passes, members, which)?;
        self.reducing.push((unit, reducing));
        self.record(unit, |unit| Event::Reduce { unit });
        Ok(())
    }

    fn go_on_reducing(&mut self, context: &Context) -> Result<()> {
        for (unit, reducing) in std::mem::take(&mut self.reducing) {
            match self.units[unit].go_on_reducing(context, reducing)? {
                ControlFlow::Continue(reducing) => self.reducing.push((unit, reducing)),
                ControlFlow::Break(reduced) => {
                    let with_unit = |reduced| UnitGradient { unit, reduced };
                    self.reduced.extend(reduced.into_iter().map(with_unit));
                }
            }
        }
        Ok(())
    }

    /// Ends all reductions; what has been reduced since this was called last.
    pub(crate) fn take_reduced(&mut self, context: &Context) -> Result<Vec<UnitGradient>> {
        while !self.reducing.is_empty() {
            self.go_on_reducing(context)?;
        }
        Ok(std::mem::take(&mut self.reduced))
    }

    /// What ranks compare before backward.
    pub(crate) fn usage(&self) -> Usage {
        let hand_outs = |unit: &Unit| {
            let mut hasher = DefaultHasher::new();
            for pass in unit.passes().iter().filter(|p| p.id >= self.first_pass) {
                (pass.id - self.first_pass).hash(&mut hasher);
                let uses = pass.members.iter().map(|m| (m.handed_out, m.calls));
                uses.collect::<Vec<_>>().hash(&mut hasher);
            }
            unit.trainable().hash(&mut hasher);
            hasher.finish()
        };
        Usage {
            all_reduce: self.switches.all_reduce.into(),
            held: self.held,
            gathers: self.expected_gathers(),
            hand_outs: self.units.iter().map(hand_outs).collect(),
            order: self.order.iter().map(|(unit, _)| *unit as u64).collect(),
        }
    }

    /// A hash of all that decides which units this rank gathers in backward, and when.
    fn expected_gathers(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (i, unit) in self.units.iter().enumerate() {
            (unit.is_regrouped(), unit.is_sharded()).hash(&mut hasher);
            (self.kept[i], self.ahead_in(Phase::Backward, i)).hash(&mut hasher);
            let owed = unit.passes().iter().filter(|pass| pass.is_owed());
            owed.map(|p| p.outstanding)
                .collect::<Vec<_>>()
                .hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Reduces every gradient that is left, in one order on all ranks; all gradients of this backward.
    pub(crate) fn reduce_rest(&mut self, context: &Context) -> Result<Vec<UnitGradient>> {
        // What is left shows when they have ended.
        let mut gradients = self.take_reduced(context)?;
        let all_reduce = self.switches.all_reduce;
        let has: Vec<u8> = self
            .units
            .iter()
            .flat_map(|unit| {
                (0..unit.spec.members.len()).map(|m| unit.has_gradient(m, all_reduce).into())
            })
            .collect();
        let call = Call::new("agreement", "the gradients that backward brought")
            .with_detail(context.module);
        let all = context.mesh.group().engine().exchange(call, has)?;
        let any = |i: usize| all.iter().any(|has| has[i] == 1);

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
            self.start_reduce(unit, &passes, &members, None, context)?;
        }
        gradients.extend(self.take_reduced(context)?);
        Ok(gradients)
    }

    pub(crate) fn keep_rest(&mut self) {
        for unit in &mut self.units {
            for pass in unit.arrived_passes() {
                unit.accumulate(pass);
            }
        }
    }

    pub(crate) fn record(&mut self, unit: usize, event: impl FnOnce(Arc<str>) -> Event) {
        if let Some(events) = &mut self.events {
            events.push(event(self.units[unit].spec.name.clone()));
        }
    }
}
