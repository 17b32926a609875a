//! Jobs whose ranks are threads, each with connections of its own as if it were a process.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use super::ProcessGroup;
use super::launch::run_rank;
use super::process::ProcessEngine;
use super::tcp::{Job, TcpWire};
use crate::Result;

/// Long enough for any test, short enough for one that hangs.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A job on this host, and a listener at its address for rank 0.
#[derive(Debug)]
pub(super) struct TestJob {
    world_size: usize,
    host: String,
    timeout: Duration,
    pub(super) listener: TcpListener,
}

impl TestJob {
    pub(super) fn new(world_size: usize, timeout: Duration) -> Self {
        Self::at("127.0.0.1", world_size, timeout).unwrap()
    }

    /// At another name or address of this host.
    pub(super) fn at(host: &str, world_size: usize, timeout: Duration) -> std::io::Result<Self> {
        Ok(Self {
            world_size,
            host: host.to_string(),
            timeout,
            listener: TcpListener::bind((host, 0))?,
        })
    }

    pub(super) fn of(&self, rank: usize) -> Job {
        Job {
            rank,
            world_size: self.world_size,
            host: self.host.clone(),
            port: self.listener.local_addr().unwrap().port(),
            secret: "the secret of the tests".to_string(),
            timeout: self.timeout,
        }
    }

    pub(super) fn listener_of(&self, rank: usize) -> Option<TcpListener> {
        (rank == 0).then(|| self.listener.try_clone().unwrap())
    }

    pub(super) fn connect(&self, rank: usize) -> Result<TcpWire> {
        TcpWire::connect_at(&self.of(rank), self.listener_of(rank))
    }

    /// What `f` returns on each rank.
    pub(super) fn run<T: Send>(&self, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let ranks = 0..self.world_size;
            let threads: Vec<_> = ranks
                .map(|rank| {
                    scope.spawn({
                        let f = &f;
                        move || f(rank)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

/// What `f` returns on each rank of a job.
pub(super) fn on_wires<T: Send>(world_size: usize, f: impl Fn(TcpWire) -> T + Sync) -> Vec<T> {
    let job = TestJob::new(world_size, PATIENCE);
    job.run(|rank| f(job.connect(rank).unwrap()))
}

/// [`launch`](super::launch) over TCP; every rank's own result.
pub(super) fn launch_tcp<T: Send>(
    world_size: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> Vec<Result<T>> {
    on_wires(world_size, |wire| {
        let engine = Arc::new(ProcessEngine::new(Arc::new(wire)));
        run_rank(
            ProcessGroup::new(engine, "a rank of a test", Device::flex(), 0),
            1,
            &f,
        )
    })
}
