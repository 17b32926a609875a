//! Ranks as threads of this process.

use std::any::Any;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use burn::tensor::Device;

use super::ProcessGroup;
use super::local::LocalEngine;
use super::rendezvous::Launch;
use crate::{FsdpError, Result};

/// Runs `f` on `world_size` ranks that are threads of this process, with default settings.
///
/// Returns when all ranks have: every rank's value in rank order, or the cause of the first
/// failure. A rank that panics or returns an error makes the others fail within seconds wherever
/// they wait. Each rank gets its share of the cores for Burn's CPU operations.
///
/// # Errors
///
/// The first failing rank's error; [`FsdpError::RankFailed`] if it panicked.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp::{ReduceOp, launch};
///
/// let sums = launch(3, |pg| {
///     let mine = Tensor::<1>::from_floats([pg.rank() as f32], &Device::flex());
///     Ok(pg.all_reduce(mine, ReduceOp::Sum)?.into_scalar::<f32>())
/// })?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), burn_fsdp::FsdpError>(())
/// ```
pub fn launch<T: Send>(
    world_size: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
) -> Result<Vec<T>> {
    LaunchConfig::new(world_size).launch(f)
}

/// How long a rank waits for the others, if nothing else is said.
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// More threads for one rank are a mistake.
const MOST_THREADS: usize = 1024;

/// Settings of [`launch`].
#[derive(Clone, Debug)]
pub struct LaunchConfig {
    world_size: usize,
    pub(super) timeout: Duration,
    pub(super) threads_per_rank: Option<usize>,
}

impl LaunchConfig {
    /// `world_size` ranks, a timeout of 10 minutes, an equal share of the cores for each.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            timeout: DEFAULT_TIMEOUT,
            threads_per_rank: None,
        }
    }

    /// How long a rank waits for the others in one collective before all fail with
    /// [`FsdpError::Timeout`].
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Threads each rank computes with. Default: its share of the cores, at least one.
    pub fn with_threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads);
        self
    }

    /// Runs `f` on every rank; see [`launch`].
    ///
    /// # Errors
    ///
    /// As [`launch`], and if there are no ranks or no threads.
    pub fn launch<T: Send>(
        &self,
        f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        self.check()?;
        let launch = Launch::new(self.world_size, self.timeout);
        let threads = self.threads_per_rank;
        let threads = threads.unwrap_or_else(|| share_of_cores(self.world_size));
        let run = |rank: usize, engine| {
            let description = format!("rank {rank} of {} (local, a thread)", self.world_size);
            let group = ProcessGroup::new(engine, description, Device::flex(), rank);
            run_rank(group, threads, &f)
        };
        let results: Vec<Result<T>> = std::thread::scope(|scope| {
            let ranks = LocalEngine::all(&launch).into_iter().enumerate();
            let threads: Vec<_> = ranks
                .map(|(rank, engine)| {
                    let run = &run;
                    scope.spawn(move || run(rank, engine))
                })
                .collect();
            let join = |(rank, thread): (usize, ScopedJoinHandle<'_, _>)| {
                let panicked = |panic: Box<dyn Any + Send>| Err(panicked(rank, &*panic));
                thread.join().unwrap_or_else(panicked)
            };
            threads.into_iter().enumerate().map(join).collect()
        });
        launch.end();
        match launch.failure() {
            Some(cause) if results.iter().any(Result::is_err) => Err(first_error(cause, &results)),
            _ => results.into_iter().collect(),
        }
    }
}

impl LaunchConfig {
    pub(super) fn check(&self) -> Result<()> {
        let threads = self.threads_per_rank.unwrap_or(1);
        if self.world_size == 0 || !(1..=MOST_THREADS).contains(&threads) {
            return Err(FsdpError::argument(format!(
                "a launch needs at least one rank, and 1 to {MOST_THREADS} threads for each"
            )));
        }
        Ok(())
    }
}

/// The first failing rank's own error, where the others know it only as text.
fn first_error<T>(cause: &FsdpError, results: &[Result<T>]) -> FsdpError {
    let own = match cause {
        FsdpError::RankFailed { rank, .. } => results.get(*rank).and_then(|r| r.as_ref().err()),
        _ => None,
    };
    match own {
        None | Some(FsdpError::Other(_)) => cause.clone(),
        Some(error) => error.clone(),
    }
}

/// Runs `f` as a rank, in a thread pool of its own. All others are told how it ends: by an error, a
/// panic, or well.
pub(super) fn run_rank<T: Send>(
    group: ProcessGroup,
    threads: usize,
    f: impl FnOnce(ProcessGroup) -> Result<T> + Send,
) -> Result<T> {
    let (rank, engine) = (group.rank(), group.engine.clone());
    let run = AssertUnwindSafe(|| in_own_pool(rank, threads, || f(group)));
    let result = catch_unwind(run).unwrap_or_else(|panic| Err(panicked(rank, &*panic)));
    if let Err(error) = &result {
        engine.fail(match error {
            FsdpError::RankFailed { .. } => error.clone(),
            error => rank_failed(rank, error.to_string()),
        });
    }
    engine.leave();
    result
}

/// Burn's CPU operations use the pool of the thread that calls them. With a pool of its own, a rank
/// does not fight the others for one.
fn in_own_pool<T: Send>(
    rank: usize,
    threads: usize,
    f: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |thread| format!("rank-{rank}.{thread}"))
        // Burn walks long autodiff graphs by recursion.
        .stack_size(64 << 20)
        .build()
        .map_err(FsdpError::other)?;
    pool.install(f)
}

/// The threads of one of these ranks of this host.
pub(super) fn share_of_cores(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    (cores / ranks.max(1)).max(1)
}

fn panicked(rank: usize, panic: &(dyn Any + Send)) -> FsdpError {
    rank_failed(rank, panic_message(panic))
}

fn rank_failed(rank: usize, cause: String) -> FsdpError {
    FsdpError::RankFailed { rank, cause }
}

/// What a panic said.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(message) = panic.downcast_ref::<&str>() {
        (*message).to_string()
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message.clone()
    } else {
        "a panic without a message".to_string()
    }
}
