//! What carries bytes between ranks that are processes.
//!
//! There is one operation: an *exchange*, in which every rank sends a message to each. Collectives
//! are made of it by [`process`](super::process).

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::Call;
use crate::{FsdpError, Result};

/// What a rank sends in one exchange: all ranks to all, or all to each.
#[derive(Clone, Debug)]
pub(crate) enum Outgoing {
    /// The same to every rank.
    ToAll(Bytes),
    /// One message to each rank, in rank order. A rank's message to itself comes back to it.
    ToEach(Vec<Bytes>),
}

/// One rank's end of the connections between the ranks of a group.
///
/// Exchanges are matched by position: all ranks must start the same ones, in the same order. If two
/// ranks start different [`Call`]s at one position, every rank fails with
/// [`FsdpError::CollectiveMismatch`].
///
/// A failure is for good, and every rank's: a rank that is told of one passes it on to all others,
/// those of other groups of the same job included, and each of their exchanges under way and to come
/// returns it.
pub(crate) trait Wire: Debug + Send + Sync {
    /// This rank's number in the group.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn world_size(&self) -> usize;

    /// How long a rank waits for the others before it gives up.
    fn timeout(&self) -> Duration;

    /// Starts the next exchange. Never waits for another rank.
    fn start(&self, call: Call, outgoing: Outgoing) -> Result<Box<dyn Exchange>>;

    /// The wire between these ranks of the group, ascending and this one among them. Only they must
    /// call this, all in the same order.
    fn subset(&self, ranks: &[usize]) -> Result<Arc<dyn Wire>>;

    /// Makes the job fail with `cause`, unless it has already.
    fn fail(&self, cause: FsdpError);

    /// What the job failed with.
    fn failure(&self) -> Option<FsdpError>;

    /// Tells all others of the job that this rank has returned, and waits until that, and all it
    /// has sent before, is on its way. Those who wait for it fail with
    /// [`FsdpError::RankReturned`], and so does what it starts afterwards. Dropping a rank's last
    /// wire does the same.
    fn leave(&self);
}

/// An exchange under way. Dropping it abandons the result, not the other ranks.
pub(crate) trait Exchange: Debug + Send {
    /// Whether every rank's message is here. Never waits, and knows no timeout.
    fn poll(&mut self) -> Result<bool>;

    /// What a rank that gives up now fails with: [`FsdpError::Timeout`], which names the ranks whose
    /// message is not here. For those who poll.
    fn overdue(&self) -> FsdpError;

    /// Blocks until every rank's message is here; the messages, in rank order. Fails after the
    /// group's timeout with [`FsdpError::Timeout`].
    fn wait(self: Box<Self>) -> Result<Vec<Bytes>>;
}
