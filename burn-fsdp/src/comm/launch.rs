//! Ranks as threads of this process.

use std::any::Any;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

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

/// More threads for one rank are a mistake.
const MOST_THREADS: usize = 1024;

/// Settings of [`launch`].
#[derive(Clone, Debug)]
pub struct LaunchConfig {
    world_size: usize,
    timeout: Duration,
    threads_per_rank: Option<usize>,
}

impl LaunchConfig {
    /// `world_size` ranks, a timeout of 10 minutes, an equal share of the cores for each.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            timeout: Duration::from_secs(600),
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
        let threads = self.threads_per_rank.unwrap_or(1);
        if self.world_size == 0 || !(1..=MOST_THREADS).contains(&threads) {
            return Err(FsdpError::argument(format!(
                "a launch needs at least one rank, and 1 to {MOST_THREADS} threads for each"
            )));
        }
        let launch = Launch::new(self.world_size, self.timeout);
        let first_error = Mutex::new(None);
        let run = |rank: usize, group: ProcessGroup| {
            let result = catch_unwind(AssertUnwindSafe(|| self.in_own_pool(rank, || f(group))))
                .unwrap_or_else(|panic| Err(rank_failed(rank, panic_message(&*panic))));
            if let Err(error) = &result {
                let cause = match error {
                    FsdpError::RankFailed { .. } => error.clone(),
                    error => rank_failed(rank, error.to_string()),
                };
                if launch.fail(cause.clone()) {
                    let typed = !matches!(error, FsdpError::Other(_));
                    *first_error.lock() = Some(if typed { error.clone() } else { cause });
                }
            }
            launch.rank_returned(rank);
            result.ok()
        };
        let values: Vec<Option<T>> = std::thread::scope(|scope| {
            let threads: Vec<_> = LocalEngine::all(&launch)
                .into_iter()
                .enumerate()
                .map(|(rank, engine)| {
                    let run = &run;
                    scope.spawn(move || run(rank, ProcessGroup::new(engine)))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or(None))
                .collect()
        });
        launch.end();
        if let Some(error) = first_error.into_inner() {
            return Err(error);
        }
        let failure = |launch: &Arc<Launch>| {
            let cause = launch.failure().cloned();
            cause.unwrap_or_else(|| FsdpError::argument("a rank ended without a value"))
        };
        let all: Option<Vec<T>> = values.into_iter().collect();
        all.ok_or_else(|| failure(&launch))
    }

    /// Burn's CPU operations use the pool of the thread that calls them. With a pool of its own, a
    /// rank does not fight the others for one.
    fn in_own_pool<T: Send>(&self, rank: usize, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let share = (cores / self.world_size).max(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads_per_rank.unwrap_or(share))
            .thread_name(move |thread| format!("rank-{rank}.{thread}"))
            // Burn walks long autodiff graphs by recursion.
            .stack_size(64 << 20)
            .build()
            .map_err(FsdpError::other)?;
        pool.install(f)
    }
}

fn rank_failed(rank: usize, cause: String) -> FsdpError {
    FsdpError::RankFailed { rank, cause }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(message) = panic.downcast_ref::<&str>() {
        (*message).to_string()
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message.clone()
    } else {
        "a panic without a message".to_string()
    }
}
