//! Looks after the ranks from their start to the end of the last.
//!
//! Every rank leads a process group of its own, so that a signal reaches all it has started, and
//! Ctrl-C in a terminal comes once, by the launcher.

use std::process::ExitCode;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::output::complain;
use crate::rank::{Ending, Group};

/// What the supervisor waits for.
#[derive(Debug)]
pub(crate) enum Event {
    Signal(Signal),
    Ended { rank: usize, ending: Ending },
}

/// How long ranks have to end by themselves before they are killed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grace {
    /// After a signal that ends the job.
    pub(crate) signal: Duration,
    /// After another rank has failed.
    pub(crate) failure: Duration,
}

/// The ranks that run, and what has happened so far.
#[derive(Debug)]
pub(crate) struct Supervisor {
    running: Vec<(usize, Group)>,
    grace: Grace,
    start: Instant,
    first_failure: Option<Ending>,
    is_interrupted: bool,
    /// When those that still run are killed.
    deadline: Option<Instant>,
    has_killed: bool,
}

impl Supervisor {
    pub(crate) fn new(grace: Grace) -> Self {
        Self {
            running: Vec::new(),
            grace,
            start: Instant::now(),
            first_failure: None,
            is_interrupted: false,
            deadline: None,
            has_killed: false,
        }
    }

    pub(crate) fn add(&mut self, rank: usize, group: Group) {
        self.running.push((rank, group));
    }

    /// Waits until all ranks have ended; the exit code of the first that failed.
    pub(crate) fn run(mut self, events: &Receiver<Event>) -> ExitCode {
        while !self.running.is_empty() {
            match self.next(events) {
                Some(Event::Signal(signal)) => self.pass_on(signal),
                Some(Event::Ended { rank, ending }) => self.ended(rank, ending),
                None => self.give_up(),
            }
        }
        { self.first_failure }.map_or(ExitCode::SUCCESS, |ending| ending.exit_code().into())
    }

    /// None when the deadline has come.
    fn next(&self, events: &Receiver<Event>) -> Option<Event> {
        match self.deadline {
            None => events.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                events.recv_timeout(left).ok()
            }
        }
    }

    fn pass_on(&mut self, signal: Signal) {
        self.send(signal);
        match signal {
            Signal::SIGINT if self.is_interrupted => self.give_up(),
            Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP => {
                let grace = self.grace.signal;
                self.kill_in(grace);
                self.is_interrupted |= signal == Signal::SIGINT;
                complain(&format!(
                    "passed {signal} on; what still runs in {grace:?}, or at a second Ctrl-C, is killed"
                ));
            }
            _ => {}
        }
    }

    fn ended(&mut self, rank: usize, ending: Ending) {
        self.running.retain(|(other, _)| *other != rank);
        if ending.is_success() || self.first_failure.is_some() {
            return;
        }
        self.first_failure = Some(ending);
        let after = self.start.elapsed().as_secs_f64();
        let mut what = format!("rank {rank} ended {ending} after {after:.1} s");
        if !self.running.is_empty() && self.deadline.is_none() && !self.has_killed {
            let grace = self.grace.failure;
            self.kill_in(grace);
            what += &format!("; what still runs in {grace:?} is killed");
        }
        complain(&what);
    }

    /// Brings the deadline forward, never back.
    fn kill_in(&mut self, grace: Duration) {
        let deadline = Instant::now() + grace;
        let earlier = self.deadline.unwrap_or(deadline);
        self.deadline = Some(earlier.min(deadline));
    }

    fn give_up(&mut self) {
        let ranks = self.running.iter().map(|(rank, _)| rank.to_string());
        let ranks = ranks.collect::<Vec<_>>().join(", ");
        self.kill();
        self.deadline = None;
        self.has_killed = true;
        complain(&format!("kills what still runs: rank {ranks}"));
    }

    /// Ends all ranks and what they have started, without asking.
    pub(crate) fn kill(&self) {
        self.send(Signal::SIGKILL);
    }

    fn send(&self, signal: Signal) {
        for (_, group) in &self.running {
            group.send(signal);
        }
    }
}
