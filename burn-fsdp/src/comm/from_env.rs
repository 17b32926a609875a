//! Ranks as processes that a launcher has started.

use std::sync::Arc;

use burn::tensor::Device;

use super::env::{JobEnv, Launcher};
use super::launch::{DEFAULT_TIMEOUT, run_rank, share_of_cores};
use super::process::ProcessEngine;
use super::tcp::{Job, TcpWire};
use super::{Engine, ProcessGroup};
use crate::{FsdpError, Result};

/// Runs `f` as the rank that a launcher has started this process as.
///
/// What [`launch`](crate::launch) is to ranks that are threads: all processes of the job must call
/// this. It connects them as [`ProcessGroup::from_env`] does, and gives each its share of its host's
/// cores for Burn's CPU operations. If `f` panics or returns an error, all other ranks fail with
/// [`FsdpError::RankFailed`] wherever they wait, within seconds; so they do if a process is killed.
/// Once `f` has returned, the group can't be used any more.
///
/// # Errors
///
/// As [`ProcessGroup::from_env`]; the error of `f`; [`FsdpError::RankFailed`] if it panicked.
///
/// # Example
///
/// ```no_run
/// use burn::tensor::Tensor;
/// use burn_fsdp::{ReduceOp, launch_from_env};
///
/// // torchrun --no-python --nproc-per-node 4 ./train
/// fn main() -> burn_fsdp::Result<()> {
///     launch_from_env(|pg| {
///         let mine = Tensor::<1>::from_floats([pg.rank() as f32], &pg.device());
///         let sum = pg.all_reduce(mine, ReduceOp::Sum)?.into_scalar::<f32>();
///         println!("{}: {sum}", pg.description());
///         Ok(())
///     })
/// }
/// ```
pub fn launch_from_env<T: Send>(f: impl FnOnce(ProcessGroup) -> Result<T> + Send) -> Result<T> {
    let env = read_env()?;
    let threads = share_of_cores(env.local_world_size);
    run_rank(connect(&env)?, threads, f)
}

impl ProcessGroup {
    /// The group of all ranks of the job that a launcher has started this process for.
    ///
    /// All processes of the job must call this, once. It returns when all are connected.
    /// [`launch_from_env`] does the same and more; with this alone, a rank that returns or panics is
    /// known to the others once the last handle of the group is dropped.
    ///
    /// # Errors
    ///
    /// If no launcher has started this process; if what it has set makes no sense;
    /// [`FsdpError::Rendezvous`] if the ranks do not find each other within 10 minutes.
    pub fn from_env() -> Result<Self> {
        connect(&read_env()?)
    }
}

fn read_env() -> Result<JobEnv> {
    JobEnv::read()?.ok_or_else(no_launcher)
}

fn no_launcher() -> FsdpError {
    FsdpError::argument(
        "no launcher has started this process: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, \
         MASTER_ADDR and MASTER_PORT are not set, nor are the variables of srun or mpirun; to run \
         ranks as threads of one process, call `burn_fsdp::launch`",
    )
}

fn connect(env: &JobEnv) -> Result<ProcessGroup> {
    let device = choose_device(env)?;
    let (name, engine) = choose_engine(env, &device)?;
    let description = format!(
        "rank {} of {} ({name}, started by {}, local rank {})",
        env.rank,
        env.world_size,
        by(env.launcher),
        env.local_rank
    );
    log::info!("{description}");
    Ok(ProcessGroup::new(engine, description, device))
}

fn by(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Torchrun => "torchrun variables",
        Launcher::Slurm => "srun",
        Launcher::OpenMpi => "mpirun",
    }
}

/// Connects with the other ranks; the engine and its name.
fn choose_engine(env: &JobEnv, device: &Device) -> Result<(&'static str, Arc<dyn Engine>)> {
    let wire = TcpWire::connect(&Job {
        rank: env.rank,
        world_size: env.world_size,
        host: env.master_addr.clone(),
        port: env.master_port,
        secret: env.secret.clone(),
        timeout: DEFAULT_TIMEOUT,
    })?;
    let engine = ProcessEngine::new(Arc::new(wire), device.clone());
    Ok(("tcp", Arc::new(engine)))
}

/// The host's memory, unless the user wants another device.
fn choose_device(env: &JobEnv) -> Result<Device> {
    match env.device.as_deref() {
        None | Some("cpu") => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        Some("cuda") => Ok(Device::cuda(env.local_rank)),
        Some(other) => Err(FsdpError::argument(format!(
            "this program is built without support for the device \"{other}\""
        ))),
    }
}
