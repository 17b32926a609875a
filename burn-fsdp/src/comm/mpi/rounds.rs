//! Header rounds: what the ranks of a group announce before an exchange.
//!
//! An exchange starts with a header from each rank to each other. Only when all are here and agree
//! does it become a collective of MPI, so that ranks that part ways never end up in collectives that
//! don't match. Headers between two ranks keep their order, so the n-th of each belong together.
//!
//! They are judged in rank order, up to the first that is missing: whatever order they come in, all
//! ranks find the same mismatch.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::comm::Call;
use crate::comm::cause::cut;
use crate::{FsdpError, Result};

/// Bytes of a call's text that are sent.
const LONGEST_CALL: usize = 256;

/// What a rank announces to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Differs between calls that differ.
    pub(super) fingerprint: u64,
    /// For people.
    pub(super) call: String,
    /// Length of its message to the other rank.
    pub(super) len: usize,
    /// Whether it has a message to each rank, not one to all.
    pub(super) to_each: bool,
}

impl Header {
    pub(super) fn new(call: &Call, to_each: bool) -> Self {
        let mut fingerprint = DefaultHasher::new();
        call.hash(&mut fingerprint);
        Self {
            fingerprint: fingerprint.finish(),
            call: cut(&call.to_string(), LONGEST_CALL).into(),
            len: 0,
            to_each,
        }
    }

    pub(super) fn with_len(&self, len: usize) -> Self {
        Self {
            len,
            ..self.clone()
        }
    }
}

/// An exchange that this rank has started and some rank has not, as far as it knows.
#[derive(Debug)]
pub(super) struct Started<W> {
    pub(super) id: u64,
    /// As it would be sent to this rank itself.
    pub(super) header: Header,
    /// What to do when all have started it.
    pub(super) work: W,
}

/// A complete header round.
#[derive(Debug)]
pub(super) struct Round<W> {
    pub(super) started: Started<W>,
    /// Of the messages that come, in rank order.
    pub(super) lens: Vec<usize>,
    /// Whether some rank has a message to each, not one to all.
    pub(super) to_each: bool,
}

/// The header rounds of one group that are not complete, oldest first.
#[derive(Debug)]
pub(super) struct Rounds<W> {
    /// The members, by their rank in the job. None before this rank has joined the group.
    pub(super) ranks: Vec<usize>,
    rank: usize,
    started: VecDeque<Started<W>>,
    announced: HashMap<usize, VecDeque<Header>>,
}

impl<W> Rounds<W> {
    /// Of the rank that has this number in the job.
    pub(super) fn new(rank: usize) -> Self {
        Self {
            ranks: Vec::new(),
            rank,
            started: VecDeque::new(),
            announced: HashMap::new(),
        }
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().copied().filter(|&rank| rank != self.rank)
    }

    pub(super) fn start(&mut self, started: Started<W>) {
        self.started.push_back(started);
    }

    pub(super) fn announce(&mut self, rank: usize, header: Header) {
        self.announced.entry(rank).or_default().push_back(header);
    }

    /// Whether this rank has started nothing that others have not.
    pub(super) fn is_empty(&self) -> bool {
        self.started.is_empty()
    }

    /// The oldest exchange, if all ranks have started it.
    pub(super) fn next(&mut self) -> Result<Option<Round<W>>> {
        if self.started.is_empty() {
            return Ok(None);
        }
        let Some(headers) = self.oldest_round()? else {
            return Ok(None);
        };
        let lens = headers.iter().map(|header| header.len).collect();
        let to_each = headers.iter().any(|header| header.to_each);
        for headers in self.announced.values_mut() {
            headers.pop_front();
        }
        let started = self.started.pop_front();
        Ok(started.map(|started| Round {
            started,
            lens,
            to_each,
        }))
    }

    /// The first headers of all ranks, if they are here, or the first that differs.
    fn oldest_round(&self) -> Result<Option<Vec<&Header>>> {
        let mut round: Vec<&Header> = Vec::with_capacity(self.ranks.len());
        for &rank in &self.ranks {
            let header = match rank == self.rank {
                true => self.started.front().map(|started| &started.header),
                false => self.announced.get(&rank).and_then(VecDeque::front),
            };
            let Some(header) = header else {
                return Ok(None);
            };
            if let Some(first) = round.first()
                && first.fingerprint != header.fingerprint
            {
                return Err(FsdpError::CollectiveMismatch {
                    rank_a: self.ranks[0],
                    call_a: first.call.clone(),
                    rank_b: rank,
                    call_b: header.call.clone(),
                });
            }
            round.push(header);
        }
        Ok(Some(round))
    }

    /// The ranks that have not started the exchange `id`, if it is here.
    pub(super) fn missing(&self, id: u64) -> Option<Vec<usize>> {
        let position = self.started.iter().position(|s| s.id == id)?;
        let missing = |rank: &usize| self.rounds_of(*rank) <= position;
        Some(self.others().filter(missing).collect())
    }

    /// The first exchange here that `rank`, a member that starts no more, will never start.
    pub(super) fn lost_to(&self, rank: usize) -> Option<&Started<W>> {
        self.others().find(|&other| other == rank)?;
        self.started.get(self.rounds_of(rank))
    }

    fn rounds_of(&self, rank: usize) -> usize {
        self.announced.get(&rank).map_or(0, VecDeque::len)
    }

    /// Forgets what this rank has started, except what `keep` says.
    pub(super) fn abandon(&mut self, mut keep: impl FnMut(&mut W) -> bool) {
        self.started.retain_mut(|started| keep(&mut started.work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(subject: &str) -> Header {
        Header::new(&Call::new("gather", subject), false)
    }

    fn started(id: u64, subject: &str) -> Started<u64> {
        Started {
            id,
            header: header(subject).with_len(id as usize),
            work: id,
        }
    }

    /// The rounds of rank `rank` in a group of the ranks 2, 5 and 7.
    fn rounds(rank: usize) -> Rounds<u64> {
        Rounds {
            ranks: vec![2, 5, 7],
            ..Rounds::new(rank)
        }
    }

    #[test]
    fn a_round_is_complete_when_every_rank_has_started_it() {
        let mut rounds = rounds(5);
        rounds.announce(7, header("a").with_len(70));
        rounds.announce(7, header("b"));
        rounds.start(started(1, "a"));
        assert!(rounds.next().unwrap().is_none());
        rounds.announce(2, header("a").with_len(20));
        let round = rounds.next().unwrap().unwrap();
        assert_eq!((round.started.work, round.lens), (1, vec![20, 1, 70]));
        assert!(!round.to_each);
        assert!(rounds.is_empty());
        assert!(rounds.next().unwrap().is_none());
    }

    #[test]
    fn what_is_announced_before_this_rank_joins_the_group_is_kept() {
        let mut rounds = Rounds::new(5);
        rounds.announce(2, header("a"));
        assert!(rounds.next().unwrap().is_none());
        rounds.ranks = vec![2, 5];
        rounds.start(started(1, "a"));
        assert!(rounds.next().unwrap().is_some());
    }

    #[test]
    fn a_mismatch_is_the_same_in_whatever_order_the_headers_come() {
        for order in [[(2, "a"), (7, "c")], [(7, "c"), (2, "a")]] {
            let mut rounds = rounds(5);
            rounds.start(started(1, "b"));
            for (rank, subject) in order {
                rounds.announce(rank, header(subject));
            }
            let error = rounds.next().unwrap_err();
            let FsdpError::CollectiveMismatch { rank_a, rank_b, .. } = error else {
                panic!("{error}");
            };
            assert_eq!((rank_a, rank_b), (2, 5));
        }
    }

    #[test]
    fn a_mismatch_does_not_wait_for_a_later_rank() {
        let mut rounds = rounds(2);
        rounds.start(started(1, "a"));
        rounds.announce(5, header("b"));
        assert!(rounds.next().is_err());
    }

    #[test]
    fn one_rank_with_messages_to_each_is_enough_to_carry_them_out_so() {
        let mut rounds = rounds(5);
        rounds.start(started(1, "a"));
        rounds.announce(2, header("a"));
        let to_each = true;
        rounds.announce(
            7,
            Header {
                to_each,
                ..header("a")
            },
        );
        assert!(rounds.next().unwrap().unwrap().to_each);
    }

    #[test]
    fn the_ranks_that_have_not_come_are_known() {
        let mut rounds = rounds(5);
        rounds.start(started(1, "a"));
        rounds.start(started(2, "b"));
        rounds.announce(7, header("a"));
        assert_eq!(rounds.missing(1), Some(vec![2]));
        assert_eq!(rounds.missing(2), Some(vec![2, 7]));
        assert_eq!(rounds.missing(3), None);
        assert_eq!(rounds.lost_to(7).map(|s| s.id), Some(2));
        assert_eq!(rounds.lost_to(2).map(|s| s.id), Some(1));
        assert!(rounds.lost_to(3).is_none());
    }

    #[test]
    fn a_long_call_is_cut_between_characters() {
        let header = header(&"ä".repeat(LONGEST_CALL));
        assert!(header.call.len() <= LONGEST_CALL);
        assert!(header.call.ends_with('ä'));
    }
}
