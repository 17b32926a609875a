//! What backward owes a unit for one forward.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;

/// One forward's use of a unit by tracked parameters, and what backward has returned of it.
///
/// Every hand-out of a tracked parameter brings one gradient back, if the loss depends on it.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) id: u64,
    pub(crate) members: Vec<MemberUse>,
    pub(crate) outstanding: usize,
    pub(crate) arrived: usize,
    /// Whether a part of it has been reduced without the rest, which then waits for the end of
    /// backward.
    pub(crate) is_broken_up: bool,
    /// Shared with every hand-out whose gradient may still come.
    owed: Arc<()>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct MemberUse {
    pub(crate) handed_out: u32,
    /// The module call during which it was handed out last.
    pub(crate) last_call: u64,
    /// Tells the module calls during which it was handed out from others, counted from the first of
    /// this forward.
    pub(crate) calls: u64,
    pub(crate) node: Option<NodeId>,
    pub(crate) gradient: Option<Tensor<1>>,
}

impl Pass {
    pub(crate) fn new(id: u64, members: usize) -> Self {
        Self {
            id,
            members: vec![MemberUse::default(); members],
            outstanding: 0,
            arrived: 0,
            is_broken_up: false,
            owed: Arc::new(()),
        }
    }

    /// Whether a gradient may still come: the graph of this forward exists.
    pub(crate) fn is_owed(&self) -> bool {
        Arc::strong_count(&self.owed) > 1
    }

    pub(crate) fn hand_out(
        &mut self,
        member: usize,
        node: NodeId,
        call: u64,
        first_call: u64,
    ) -> Arc<()> {
        let member = &mut self.members[member];
        member.handed_out += 1;
        member.last_call = call;
        let mut calls = DefaultHasher::new();
        (member.calls, call.wrapping_sub(first_call)).hash(&mut calls);
        member.calls = calls.finish();
        member.node = Some(node);
        self.outstanding += 1;
        self.owed.clone()
    }
}
