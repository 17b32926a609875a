//! Gathers of units, which are matched by unit and not by position.
//!
//! Each rank adds its part to a gather once: when it asks for the unit itself, or before that, when
//! it waits for something else and *serves* those who have asked. A rank that has served finds the
//! gather again when it asks later: the others may by then have gone on and changed their shards. So
//! the list keeps it until all ranks have asked, or a bound is reached.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{GatherInput, GatherKey};

/// The members of a group, by their rank in the launch. A group is told by its list, not by what
/// is in it.
pub(super) type Members = Arc<Vec<usize>>;

#[derive(Debug)]
pub(super) struct OpenGathers<S> {
    list: Mutex<Vec<OpenGather<S>>>,
}

#[derive(Debug)]
struct OpenGather<S> {
    group: Members,
    key: GatherKey,
    slot: Arc<S>,
    /// One for each rank of the group.
    members: Vec<Presence>,
}

/// What a rank has to do with a gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// Has not added its part.
    Absent,
    /// Has added its part for others.
    Served,
    /// Has asked, and holds a ticket.
    Joined,
    /// Has asked, and dropped its ticket.
    Left,
}

/// A rank's way into a gather.
#[derive(Debug)]
pub(super) struct Joined<S> {
    pub(super) slot: Arc<S>,
    /// Whether the rank has yet to add its part.
    pub(super) lacks_part: bool,
    /// Whether the rank has opened the gather.
    pub(super) is_new: bool,
}

/// A part that a rank has undertaken to add for others.
#[derive(Debug)]
pub(super) struct Claim<S> {
    pub(super) slot: Arc<S>,
    /// The rank's number in the gather's group.
    pub(super) rank: usize,
    pub(super) inputs: Vec<GatherInput>,
}

impl<S> OpenGathers<S> {
    pub(super) fn new() -> Self {
        Self {
            list: Mutex::default(),
        }
    }

    /// Joins `rank` of the group to the gather of this key that it has not joined, or opens one.
    pub(super) fn join(
        &self,
        group: &Members,
        rank: usize,
        key: GatherKey,
        new_slot: impl FnOnce() -> Arc<S>,
    ) -> Joined<S> {
        let mut list = self.list.lock();
        let found = list.iter_mut().find(|gather| {
            let can_join = matches!(gather.members[rank], Presence::Absent | Presence::Served);
            Arc::ptr_eq(&gather.group, group) && gather.key == key && can_join
        });
        if let Some(gather) = found {
            let before = std::mem::replace(&mut gather.members[rank], Presence::Joined);
            return Joined {
                slot: gather.slot.clone(),
                lacks_part: before == Presence::Absent,
                is_new: false,
            };
        }
        bound(&mut list, MOST_OF_A_UNIT - 1, |gather| {
            let same_unit = (gather.key.module, gather.key.unit) == (key.module, key.unit);
            same_unit && Arc::ptr_eq(&gather.group, group)
        });
        bound(&mut list, MOST_OF_ALL - 1, |_| true);
        let mut members = vec![Presence::Absent; group.len()];
        members[rank] = Presence::Joined;
        let slot = new_slot();
        list.push(OpenGather {
            group: group.clone(),
            key,
            slot: slot.clone(),
            members,
        });
        Joined {
            slot,
            lacks_part: true,
            is_new: true,
        }
    }

    /// Undertakes, for a rank of the launch, the gathers that lack its part and for which `inputs`
    /// knows it.
    pub(super) fn claim(
        &self,
        launch_rank: usize,
        mut inputs: impl FnMut(&GatherKey) -> Option<Vec<GatherInput>>,
    ) -> Vec<Claim<S>> {
        let mut claims = Vec::new();
        for gather in self.list.lock().iter_mut() {
            let Some(rank) = rank_in(&gather.group, launch_rank) else {
                continue;
            };
            if gather.members[rank] == Presence::Absent
                && let Some(inputs) = inputs(&gather.key)
            {
                gather.members[rank] = Presence::Served;
                claims.push(Claim {
                    slot: gather.slot.clone(),
                    rank,
                    inputs,
                });
            }
        }
        claims
    }

    /// Notes that a rank has dropped its ticket.
    pub(super) fn leave(&self, slot: &Arc<S>, rank: usize) {
        let mut list = self.list.lock();
        if let Some(gather) = list.iter_mut().find(|g| Arc::ptr_eq(&g.slot, slot)) {
            gather.members[rank] = Presence::Left;
        }
        list.retain(|gather| !gather.is_done());
    }

    /// Forgets all gathers, at the end of a launch.
    pub(super) fn clear(&self) {
        self.list.lock().clear();
    }
}

impl<S> OpenGather<S> {
    fn has(&self, presence: Presence) -> bool {
        self.members.contains(&presence)
    }

    /// Whether every rank has asked and gone.
    fn is_done(&self) -> bool {
        self.members.iter().all(|member| *member == Presence::Left)
    }
}

/// Gathers kept for ranks that have not asked yet, of one unit and in all. A rank that never asks,
/// because it skips the unit, leaves them; one that will ask is not that far behind.
const MOST_OF_A_UNIT: usize = 4;
const MOST_OF_ALL: usize = 256;

/// Drops the oldest of these gathers that no rank waits in, until `most` are left.
fn bound<S>(list: &mut Vec<OpenGather<S>>, most: usize, of_these: impl Fn(&OpenGather<S>) -> bool) {
    let droppable = |gather: &OpenGather<S>| of_these(gather) && !gather.has(Presence::Joined);
    let count = list.iter().filter(|gather| droppable(gather)).count();
    let mut surplus = count.saturating_sub(most);
    list.retain(|gather| {
        let drop = surplus > 0 && droppable(gather);
        surplus -= usize::from(drop);
        !drop
    });
}

/// The number in a group of a rank of the launch, if it is a member.
pub(super) fn rank_in(group: &[usize], launch_rank: usize) -> Option<usize> {
    group.iter().position(|&rank| rank == launch_rank)
}
