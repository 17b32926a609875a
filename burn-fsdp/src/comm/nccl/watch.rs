//! What is under way on a communicator, and the watchdog over it.
//!
//! # Note: no silent hang
//!
//! NCCL itself waits for ever, on the device. So each collective is also announced to the other
//! ranks over the control plane, which nobody waits for. Whoever passes by looks whether a rank
//! announced another call, whether NCCL reports an error, whether the job has failed elsewhere and
//! whether a collective is overdue: every collective does, and ten times a second the watchdog. On
//! any of these the job fails with the cause and the communicator is aborted. That ends what hangs
//! on the device; what was computed from it is garbage, but the next call of any rank returns the
//! cause.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::driver::Driver;
use crate::comm::Call;
use crate::comm::wire::{Exchange, Wire};
use crate::{FsdpError, Result};

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(100);
/// How often a rank that leaves looks.
const NAP: Duration = Duration::from_millis(1);

/// A communicator, and the collectives on it that are under way.
#[derive(Debug)]
pub(super) struct Watched<D: Driver> {
    pub(super) driver: Arc<D>,
    pub(super) wire: Arc<dyn Wire>,
    pub(super) communicator: D::Communicator,
    /// Whether the communicator has been aborted or is being destroyed. Held while it is aborted.
    ended: Mutex<bool>,
    flights: Mutex<Vec<Flight<D>>>,
    closing: Mutex<bool>,
    closed: Condvar,
}

/// A collective under way.
#[derive(Debug)]
pub(super) struct Flight<D: Driver> {
    pub(super) number: u64,
    pub(super) call: Call,
    pub(super) since: Instant,
    /// The other ranks' announcements of it.
    pub(super) announced: Box<dyn Exchange>,
    pub(super) done: Arc<D::Event>,
    /// Taken by whoever has made the compute stream wait for it.
    pub(super) pins: Option<D::Pins>,
}

impl<D: Driver> Watched<D> {
    /// With its watchdog, which ends after [`close`](Self::close), and then destroys the communicator.
    pub(super) fn start(
        driver: Arc<D>,
        wire: Arc<dyn Wire>,
        communicator: D::Communicator,
    ) -> Result<(Arc<Self>, JoinHandle<()>)> {
        let watched = Arc::new(Self {
            driver,
            wire,
            communicator,
            ended: Mutex::new(false),
            flights: Mutex::default(),
            closing: Mutex::new(false),
            closed: Condvar::new(),
        });
        let watching = watched.clone();
        let watchdog = std::thread::Builder::new()
            .name(format!("nccl-watchdog-{}", watched.wire.rank()))
            .spawn(move || watching.watch())
            .map_err(FsdpError::other)?;
        Ok((watched, watchdog))
    }

    /// Fails if anything is wrong, and lets go of what is done. Never waits.
    pub(super) fn check(&self) -> Result<()> {
        self.look().map_err(|cause| self.fail(cause))
    }

    /// Makes the job fail with `cause`, unless it has already; what it failed with first.
    pub(super) fn fail(&self, cause: FsdpError) -> FsdpError {
        self.wire.fail(cause.clone());
        let mut ended = self.ended.lock();
        if !std::mem::replace(&mut *ended, true) {
            self.driver.abort(&self.communicator);
        }
        self.wire.failure().unwrap_or(cause)
    }

    pub(super) fn add(&self, flight: Flight<D>) {
        self.flights.lock().push(flight);
    }

    /// Lets go of a collective's memory, whose reuse is now ordered after the collective.
    pub(super) fn release(&self, number: u64) {
        let pins = {
            let mut flights = self.flights.lock();
            let flight = flights.iter_mut().find(|flight| flight.number == number);
            flight.and_then(|flight| flight.pins.take())
        };
        // Not under the lock, as this may have to wait for the device's thread.
        if let Some(pins) = pins {
            self.driver.release(pins);
        }
    }

    /// Waits until nothing is under way, or the job has failed.
    pub(super) fn settle(&self) {
        while self.check().is_ok() && !self.flights.lock().is_empty() {
            std::thread::sleep(NAP);
        }
    }

    /// Ends the watchdog, as soon as nothing is under way.
    pub(super) fn close(&self) {
        *self.closing.lock() = true;
        self.closed.notify_all();
    }

    fn look(&self) -> Result<()> {
        if let Some(cause) = self.wire.failure() {
            return Err(cause);
        }
        let mut flights = self.flights.lock();
        let mut next = 0;
        while let Some(flight) = flights.get_mut(next) {
            let is_announced = flight.announced.poll()?;
            if is_announced && self.driver.is_reached(&flight.done) {
                flights.remove(next);
            } else {
                next += 1;
            }
        }
        let oldest = flights.first();
        if !*self.ended.lock()
            && let Some(cause) = self.driver.failure(&self.communicator)
        {
            let call = oldest.map(|flight| flight.call.to_string());
            return Err(FsdpError::Nccl {
                rank: self.wire.rank(),
                call: call.unwrap_or_else(|| "no collective".to_string()),
                cause,
            });
        }
        match oldest {
            Some(oldest) if oldest.since.elapsed() >= self.wire.timeout() => {
                Err(oldest.announced.overdue())
            }
            _ => Ok(()),
        }
    }

    fn watch(&self) {
        loop {
            let has_failed = self.check().is_err();
            let mut closing = self.closing.lock();
            if *closing && (has_failed || self.flights.lock().is_empty()) {
                break;
            }
            self.closed.wait_for(&mut closing, TICK);
        }
        let has_ended = std::mem::replace(&mut *self.ended.lock(), true);
        if !has_ended {
            self.driver.destroy(&self.communicator);
        }
        self.flights.lock().clear();
    }
}
