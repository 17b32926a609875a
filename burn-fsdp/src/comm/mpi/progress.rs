//! The thread of a process that makes all of its calls of MPI.
//!
//! Its loop takes [`Job`]s from the process's handles and messages from other ranks, makes
//! collectives of the header rounds that are complete, and hands out the results of those that are.
//! See the notes of the [module](super).

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::message::Message;
use super::raw::{Communicator, MpiError, Request, Universe};
use super::rounds::{Header, Round, Rounds, Started};
use crate::FsdpError;
use crate::comm::Call;
use crate::comm::wire::Outgoing;

type Result<T> = std::result::Result<T, MpiError>;

/// The number of the group of all ranks.
pub(super) const WORLD: u64 = 0;

/// The rank that settles what a job has failed with.
const JUDGE: usize = 0;
/// How long the others leave that to it.
const TRIAL: Duration = Duration::from_secs(1);
/// How long a rank waits, after a failure, for the others to end before it does. `mpirun` kills
/// all ranks as soon as one exits.
pub(super) const PARTING: Duration = Duration::from_secs(2);

/// Turns without an event: first without a pause, then such that let other threads run.
const SPINS: u32 = 32;
const YIELDS: u32 = 64;
/// The pause between turns after that: while bytes move, and, growing from it, while this rank waits
/// for others.
const FIRST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_micros(500);
/// The pause while this rank has nothing under way. Messages of other ranks wait as long.
const IDLE: Duration = Duration::from_millis(10);

/// What a handle wants done. Results go to `done`, which is dropped if the job has failed.
#[derive(Debug)]
pub(super) enum Job {
    Exchange {
        group: u64,
        id: u64,
        call: Call,
        outgoing: Outgoing,
        done: Sender<Vec<Bytes>>,
    },
    /// Make a group of these ranks of the job; its number is the result.
    Subset {
        parent: u64,
        id: u64,
        call: Call,
        ranks: Vec<usize>,
        done: Sender<u64>,
    },
    /// Say what the one with this `id` waits for.
    Explain { id: u64, answer: Sender<Delay> },
    /// Fail, and drop `settled` when that has happened.
    Fail {
        cause: FsdpError,
        settled: Sender<()>,
    },
    /// This rank takes part no longer.
    Leave,
}

/// Why something is not done.
#[derive(Debug, Default)]
pub(super) struct Delay {
    pub(super) missing: Vec<usize>,
    pub(super) last_calls: Vec<String>,
}

/// What becomes of a complete header round.
#[derive(Debug)]
enum Work {
    Exchange {
        outgoing: Outgoing,
        done: Sender<Vec<Bytes>>,
    },
    /// The group's own first: its communicator is made. Nobody may want it any more.
    Subset { done: Option<Sender<u64>> },
}

/// A collective that all ranks have started.
#[derive(Debug)]
struct Flying {
    id: u64,
    request: Request,
    done: Sender<Vec<Bytes>>,
}

#[derive(Debug)]
struct Group {
    rounds: Rounds<Work>,
    /// Made by the group's first round.
    payload: Option<Communicator>,
    flying: Vec<Flying>,
}

impl Group {
    fn new(rank: usize) -> Self {
        Self {
            rounds: Rounds::new(rank),
            payload: None,
            flying: Vec::new(),
        }
    }

    /// The ranks that `id` waits for, if it is under way. All others, once it is a collective: whose
    /// bytes are late, MPI does not tell.
    fn missing(&self, id: u64) -> Option<Vec<usize>> {
        let is_flying = self.flying.iter().any(|flying| flying.id == id);
        let others = || is_flying.then(|| self.rounds.others().collect());
        self.rounds.missing(id).or_else(others)
    }
}

/// What a turn may find.
#[derive(Debug)]
enum Activity {
    None,
    /// This rank waits for headers of others, who may compute for long.
    Waiting,
    /// Bytes are on their way, but only move when MPI is called.
    Moving,
}

/// The state of the thread. Ranks are by their number in the job.
#[derive(Debug)]
pub(super) struct Progress {
    jobs: Receiver<Job>,
    failure: Arc<OnceLock<FsdpError>>,
    universe: Rc<Universe>,
    world: Communicator,
    /// Carries all [`Message`]s.
    control: Communicator,
    groups: BTreeMap<u64, Group>,
    /// How many groups were made of the same ranks of the same group.
    twins: HashMap<(u64, Vec<usize>), u64>,
    sends: Vec<Request>,
    last_calls: Vec<String>,
    left: Vec<bool>,
    /// The failure told to the judge, and when.
    accused: Option<(FsdpError, Instant)>,
    settled: Vec<Sender<()>>,
    /// When this rank could first have exited.
    parting: Option<Instant>,
    quiet_turns: u32,
}

impl Progress {
    /// Initialises MPI, which waits for all ranks.
    pub(super) fn init(jobs: Receiver<Job>, failure: Arc<OnceLock<FsdpError>>) -> Result<Self> {
        let universe = Universe::init()?;
        let world = universe.world()?;
        let (rank, size) = (world.rank(), world.size());
        let mut all = Group::new(rank);
        all.rounds.ranks = (0..size).collect();
        all.payload = Some(world.duplicate()?);
        Ok(Self {
            jobs,
            failure,
            universe,
            control: world.duplicate()?,
            world,
            groups: BTreeMap::from([(WORLD, all)]),
            twins: HashMap::new(),
            sends: Vec::new(),
            last_calls: vec!["nothing".into(); size],
            left: vec![false; size],
            accused: None,
            settled: Vec::new(),
            parting: None,
            quiet_turns: 0,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.world.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.world.size()
    }

    /// Works until all ranks have left, or, after a failure, until this one has and the others have
    /// had time to.
    pub(super) fn run(mut self) {
        while !self.is_over() {
            let turn = self.turn();
            let Err(error) = turn else { continue };
            let cause = FsdpError::RankFailed {
                rank: self.rank(),
                cause: error.to_string(),
            };
            // An MPI that does not even tell of its own failure is of no use.
            if self.failure.get().is_some() || self.accuse(cause).is_err() {
                break;
            }
        }
        self.finish();
    }

    fn turn(&mut self) -> Result<()> {
        self.judge_without_the_judge()?;
        let job = self.next_job();
        let mut eventful = job.is_some();
        if let Some(job) = job {
            self.accept(job)?;
        }
        while let Some((from, message)) = self.control.receive()? {
            eventful = true;
            self.hear(from, &message)?;
        }
        eventful |= self.post_complete_rounds()?;
        eventful |= self.collect_results()?;
        self.look_for_the_lost()?;
        self.quiet_turns = match eventful {
            true => 0,
            false => self.quiet_turns.saturating_add(1),
        };
        Ok(())
    }

    // ---- jobs

    /// The next job. Pauses for one, the longer the less happens.
    fn next_job(&self) -> Option<Job> {
        let quiet = self.quiet_turns;
        let pause = match self.activity() {
            Activity::None => IDLE,
            _ if quiet < SPINS => Duration::ZERO,
            _ if quiet < SPINS + YIELDS => {
                std::thread::yield_now();
                Duration::ZERO
            }
            Activity::Moving => FIRST_NAP,
            Activity::Waiting => {
                let doublings = (quiet - SPINS - YIELDS) / 16;
                LONGEST_NAP.min(FIRST_NAP * (1 << doublings.min(16)))
            }
        };
        match pause.is_zero() {
            true => self.jobs.try_recv().ok(),
            false => self.jobs.recv_timeout(pause).ok(),
        }
    }

    fn activity(&self) -> Activity {
        let mut groups = self.groups.values();
        if !self.sends.is_empty() || groups.clone().any(|group| !group.flying.is_empty()) {
            Activity::Moving
        } else if groups.any(|group| !group.rounds.is_empty()) {
            Activity::Waiting
        } else {
            Activity::None
        }
    }

    fn accept(&mut self, job: Job) -> Result<()> {
        let failed = self.failure.get().is_some();
        match job {
            Job::Exchange { .. } | Job::Subset { .. } if failed => Ok(()),
            Job::Exchange {
                group,
                id,
                call,
                outgoing,
                done,
            } => self.start_exchange(group, id, &call, outgoing, done),
            Job::Subset {
                parent,
                id,
                call,
                ranks,
                done,
            } => self.start_subset(parent, id, &call, ranks, done),
            Job::Explain { id, answer } => {
                let missing = self.groups.values().find_map(|group| group.missing(id));
                // Nobody wants to know if that fails.
                _ = answer.send(Delay {
                    missing: missing.unwrap_or_default(),
                    last_calls: self.last_calls.clone(),
                });
                Ok(())
            }
            Job::Fail { cause, settled } => {
                if !failed {
                    self.settled.push(settled);
                }
                self.accuse(cause)
            }
            Job::Leave => {
                self.parting = Some(Instant::now());
                self.left[self.world.rank()] = true;
                self.tell_all(&Message::Left.encode(self.rank()))
            }
        }
    }

    fn start_exchange(
        &mut self,
        group: u64,
        id: u64,
        call: &Call,
        outgoing: Outgoing,
        done: Sender<Vec<Bytes>>,
    ) -> Result<()> {
        let lens: Vec<usize> = match &outgoing {
            Outgoing::ToAll(message) => {
                vec![message.len(); self.group(group).rounds.ranks.len()]
            }
            Outgoing::ToEach(messages) => messages.iter().map(Bytes::len).collect(),
        };
        let header = Header::new(call, matches!(outgoing, Outgoing::ToEach(_)));
        self.start(group, id, header, &lens, Work::Exchange { outgoing, done })
    }

    /// The number of a group is the same on all its ranks, also where they have made different
    /// other groups.
    fn start_subset(
        &mut self,
        parent: u64,
        id: u64,
        call: &Call,
        ranks: Vec<usize>,
        done: Sender<u64>,
    ) -> Result<()> {
        let twins = self.twins.entry((parent, ranks.clone())).or_default();
        let mut hasher = DefaultHasher::new();
        (parent, &ranks, *twins).hash(&mut hasher);
        *twins += 1;
        let number = hasher.finish();
        let lens = vec![0; ranks.len()];
        self.group(number).rounds.ranks = ranks;
        let done = Some(done);
        let header = Header::new(call, false);
        self.start(number, id, header, &lens, Work::Subset { done })
    }

    /// Starts a header round; `lens` are the lengths of the messages to the ranks of the group.
    fn start(
        &mut self,
        group: u64,
        id: u64,
        header: Header,
        lens: &[usize],
        work: Work,
    ) -> Result<()> {
        let rank = self.rank();
        self.last_calls[rank].clone_from(&header.call);
        let ranks = self.group(group).rounds.ranks.clone();
        let mut own = header.clone();
        for (to, &len) in ranks.into_iter().zip(lens) {
            let header = header.with_len(len);
            if to == rank {
                own = header;
            } else {
                self.tell(to, Message::Header { group, header }.encode(rank))?;
            }
        }
        let started = Started {
            id,
            header: own,
            work,
        };
        self.group(group).rounds.start(started);
        Ok(())
    }

    // ---- messages

    fn tell(&mut self, to: usize, message: Bytes) -> Result<()> {
        self.sends.push(self.control.send(to, message)?);
        Ok(())
    }

    fn tell_all(&mut self, message: &Bytes) -> Result<()> {
        let rank = self.rank();
        for to in (0..self.world_size()).filter(|&to| to != rank) {
            self.tell(to, message.clone())?;
        }
        Ok(())
    }

    fn hear(&mut self, from: usize, message: &[u8]) -> Result<()> {
        match Message::decode(message) {
            Some(Message::Header { group, header }) => {
                self.last_calls[from].clone_from(&header.call);
                self.group(group).rounds.announce(from, header);
                Ok(())
            }
            Some(Message::Failed(cause)) if self.rank() == JUDGE => self.accuse(cause),
            Some(Message::Failed(cause)) => {
                self.settle(cause);
                Ok(())
            }
            Some(Message::Left) => {
                self.left[from] = true;
                Ok(())
            }
            None => self.accuse(FsdpError::RankFailed {
                rank: from,
                cause: "it sent a message that this rank cannot read: they run different programs"
                    .into(),
            }),
        }
    }

    /// A group that other ranks may have made before this one.
    fn group(&mut self, number: u64) -> &mut Group {
        let rank = self.world.rank();
        let new = || Group::new(rank);
        self.groups.entry(number).or_insert_with(new)
    }

    // ---- exchanges

    /// Posts the collectives that all ranks have started, each group's in their order; whether
    /// there were any.
    fn post_complete_rounds(&mut self) -> Result<bool> {
        let mut posted = false;
        let mut mismatch = None;
        for (&number, group) in &mut self.groups {
            loop {
                match group.rounds.next() {
                    Ok(Some(round)) => post(&self.world, number, group, round)?,
                    Ok(None) => break,
                    Err(error) => {
                        mismatch.get_or_insert(error);
                        break;
                    }
                }
                posted = true;
            }
        }
        mismatch.map_or(Ok(()), |mismatch| self.accuse(mismatch))?;
        Ok(posted)
    }

    /// Hands out the results of the collectives that are complete; whether there were any.
    fn collect_results(&mut self) -> Result<bool> {
        let mut collected = false;
        for group in self.groups.values_mut() {
            let mut still_flying = Vec::with_capacity(group.flying.len());
            for mut flying in std::mem::take(&mut group.flying) {
                match flying.request.test()? {
                    None => still_flying.push(flying),
                    Some(messages) => {
                        collected = true;
                        // Nobody waits for it if that fails.
                        _ = flying.done.send(messages);
                    }
                }
            }
            group.flying = still_flying;
        }
        let mut unsent = Vec::new();
        for mut send in std::mem::take(&mut self.sends) {
            if send.test()?.is_none() {
                unsent.push(send);
            }
        }
        self.sends = unsent;
        Ok(collected)
    }

    // ---- failures

    /// Brings a failure before the judge, unless this rank knows of one.
    fn accuse(&mut self, cause: FsdpError) -> Result<()> {
        if self.failure.get().is_some() || self.accused.is_some() {
            return Ok(());
        }
        // Read from what the others are sent, so that it is the same.
        let message = Message::Failed(cause).encode(self.rank());
        let Some(Message::Failed(cause)) = Message::decode(&message) else {
            unreachable!("a failure is read as a failure");
        };
        if self.rank() == JUDGE {
            self.settle(cause);
            return self.tell_all(&message);
        }
        self.accused = Some((cause, Instant::now()));
        self.tell(JUDGE, message)
    }

    /// The judge may be stuck in a call of MPI.
    fn judge_without_the_judge(&mut self) -> Result<()> {
        if self.failure.get().is_some() {
            return Ok(());
        }
        let late = |(_, since): &mut (_, Instant)| since.elapsed() >= TRIAL;
        let Some((cause, _)) = self.accused.take_if(late) else {
            return Ok(());
        };
        let message = Message::Failed(cause.clone()).encode(self.rank());
        self.settle(cause);
        self.tell_all(&message)
    }

    /// This is what the job has failed with. All that waits gets to know.
    fn settle(&mut self, cause: FsdpError) {
        self.failure.get_or_init(|| cause);
        self.settled.clear();
        self.parting = self.parting.map(|_| Instant::now());
        for group in self.groups.values_mut() {
            group.flying.clear();
            group.rounds.abandon(|work| match work {
                Work::Exchange { .. } => false,
                // The others may be in it already, and nothing but this rank's part ends it.
                Work::Subset { done } => {
                    *done = None;
                    true
                }
            });
        }
    }

    /// Fails if this rank waits for one that has ended.
    fn look_for_the_lost(&mut self) -> Result<()> {
        let gone: Vec<usize> = (0..self.left.len()).filter(|&r| self.left[r]).collect();
        if gone.is_empty() || self.parting.is_some() || self.failure.get().is_some() {
            return Ok(());
        }
        let lost = self.groups.values().find_map(|group| {
            let lost_to = |&gone: &usize| Some((gone, group.rounds.lost_to(gone)?));
            gone.iter().find_map(lost_to)
        });
        let Some((gone, started)) = lost else {
            return Ok(());
        };
        self.accuse(FsdpError::RankReturned {
            rank: self.rank(),
            call: started.header.call.clone(),
            gone,
        })
    }

    // ---- the end

    fn is_over(&self) -> bool {
        let Some(parting) = self.parting else {
            return false;
        };
        let all_left = self.left.iter().all(|&left| left) && self.sends.is_empty();
        match self.failure.get() {
            None => all_left && self.groups.values().all(|group| group.flying.is_empty()),
            Some(_) => all_left || parting.elapsed() >= PARTING,
        }
    }

    /// After a failure MPI is left as it is: it would wait for operations that never end.
    fn finish(self) {
        if self.failure.get().is_some() {
            return;
        }
        let universe = self.universe;
        drop((self.groups, self.control, self.world, self.sends));
        if let Err(error) = universe.finalize() {
            log::warn!("{error}");
        }
    }
}

/// Does what all ranks of a group have started.
fn post(world: &Communicator, number: u64, group: &mut Group, round: Round<Work>) -> Result<()> {
    let (outgoing, done) = match round.started.work {
        Work::Exchange { outgoing, done } => (outgoing, done),
        Work::Subset { done } => {
            group.payload = Some(world.subset(&group.rounds.ranks)?);
            // Nobody waits for it if that fails.
            _ = done.map(|done| done.send(number));
            return Ok(());
        }
    };
    let payload = group.payload.as_ref().expect("made by the first round");
    let request = match outgoing {
        Outgoing::ToAll(message) if round.to_each => {
            payload.all_to_all(vec![message; payload.size()], round.lens)?
        }
        Outgoing::ToAll(message) => payload.all_gather(message, round.lens)?,
        Outgoing::ToEach(messages) => payload.all_to_all(messages, round.lens)?,
    };
    group.flying.push(Flying {
        id: round.started.id,
        request,
        done,
    });
    Ok(())
}
