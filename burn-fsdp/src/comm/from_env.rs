//! Ranks as processes that a launcher has started.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::env::{JobEnv, Launcher};
use super::launch::{DEFAULT_TIMEOUT, LaunchConfig, run_rank, share_of_cores};
#[cfg(feature = "mpi")]
use super::mpi::MpiWire;
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
    join(&read_env()?, DEFAULT_TIMEOUT, None, f)
}

impl LaunchConfig {
    /// One program for both: as [`launch_from_env`], with these settings, where a launcher has started
    /// this process; as [`launch`](Self::launch) where none has. The values of the ranks of this
    /// process.
    ///
    /// # Errors
    ///
    /// As those.
    pub fn launch_or_join<T: Send>(
        &self,
        f: impl Fn(ProcessGroup) -> Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        let Some(env) = JobEnv::read()? else {
            return self.launch(f);
        };
        self.check()?;
        Ok(vec![join(&env, self.timeout, self.threads_per_rank, f)?])
    }
}

fn join<T: Send>(
    env: &JobEnv,
    timeout: Duration,
    threads: Option<usize>,
    f: impl FnOnce(ProcessGroup) -> Result<T> + Send,
) -> Result<T> {
    let threads = threads.unwrap_or_else(|| share_of_cores(env.local_world_size));
    run_rank(connect(env, timeout)?, threads, f)
}

impl ProcessGroup {
    /// The group of all ranks of the job that a launcher has started this process for.
    ///
    /// All processes of the job must call this, once. It returns when all are connected: over MPI
    /// under `mpirun`, if this program is built with the feature `mpi`, else over TCP. With
    /// `BURN_FSDP_DEVICE=cuda` and the feature `cuda`, tensors then go over NCCL, between the GPUs
    /// that the ranks' local numbers name.
    /// [`launch_from_env`] does the same and more; with this alone, a rank that returns or panics is
    /// known to the others once the last handle of the group is dropped.
    ///
    /// # Errors
    ///
    /// If no launcher has started this process; if what it has set makes no sense;
    /// [`FsdpError::Rendezvous`] if the ranks do not find each other within 10 minutes, or as many
    /// seconds as `BURN_FSDP_TIMEOUT` says.
    pub fn from_env() -> Result<Self> {
        connect(&read_env()?, DEFAULT_TIMEOUT)
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

fn connect(env: &JobEnv, timeout: Duration) -> Result<ProcessGroup> {
    let timeout = env.timeout.unwrap_or(timeout);
    let device = choose_device(env)?;
    let (name, engine) = choose_engine(env, timeout)?;
    let description = format!(
        "rank {} of {} ({name}, started by {}, local rank {})",
        env.rank,
        env.world_size,
        by(env.launcher),
        env.local_rank
    );
    let group = ProcessGroup::new(engine, description, device, env.local_rank);
    #[cfg(feature = "cuda")]
    let group = match env.device.as_deref() {
        Some("cuda") => group.nccl(&group.device())?,
        _ => group,
    };
    log::info!("{}", group.description());
    Ok(group)
}

fn by(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Torchrun => "torchrun variables",
        Launcher::Slurm => "srun",
        Launcher::OpenMpi => "mpirun",
    }
}

/// Connects with the other ranks; the engine and its name.
fn choose_engine(env: &JobEnv, timeout: Duration) -> Result<(&'static str, Arc<dyn Engine>)> {
    #[cfg(feature = "mpi")]
    if env.launcher == Launcher::OpenMpi {
        let engine = ProcessEngine::new(MpiWire::init(timeout)?);
        return Ok(("mpi", Arc::new(engine)));
    }
    let wire = TcpWire::connect(&Job {
        rank: env.rank,
        world_size: env.world_size,
        host: env.master_addr.clone(),
        port: env.master_port,
        secret: env.secret.clone(),
        timeout,
    })?;
    let engine = ProcessEngine::new(Arc::new(wire));
    Ok(("tcp", Arc::new(engine)))
}

/// The host's memory, unless `BURN_FSDP_DEVICE` asks for GPUs: then a GPU for each rank of the host,
/// and NCCL between them.
fn choose_device(env: &JobEnv) -> Result<Device> {
    match env.device.as_deref() {
        None | Some("cpu") => Ok(Device::flex()),
        #[cfg(feature = "cuda")]
        Some("cuda") => {
            let gpus = Device::enumerate(burn::tensor::DeviceType::Cuda);
            let index = own_gpu(env.local_rank, gpus.into_vec().len())?;
            Ok(Device::cuda(index))
        }
        Some(other) => Err(FsdpError::argument(format!(
            "this program is built without support for the device \"{other}\""
        ))),
    }
}

/// The GPU for a rank, of so many that it sees. Some launchers show each rank its own only. Where there
/// is none, NCCL says so.
#[cfg(feature = "cuda")]
fn own_gpu(local_rank: usize, visible: usize) -> Result<usize> {
    match visible {
        1 => Ok(0),
        0 => Ok(local_rank),
        _ if local_rank < visible => Ok(local_rank),
        _ => Err(FsdpError::argument(format!(
            "this is rank {local_rank} of its host (from 0), but there are {visible} GPUs; NCCL needs \
             one for each rank"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};

    use burn::tensor::Tensor;

    use super::*;
    use crate::ReduceOp;

    /// What the ranks that are started below do.
    const ROLE: &str = "BURN_FSDP_TEST_ROLE";

    #[cfg(feature = "cuda")]
    #[test]
    fn a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_sees() {
        assert_eq!(own_gpu(2, 4).unwrap(), 2);
        assert_eq!(own_gpu(2, 1).unwrap(), 0);
        let error = own_gpu(4, 4).unwrap_err().to_string();
        assert!(error.contains("rank 4 of its host"), "{error}");
        assert!(error.contains("there are 4 GPUs"), "{error}");
    }

    /// Starts this test's program again, once for each rank, to run [`a_rank`].
    fn start(world_size: usize, role: &str) -> Vec<Child> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let program = std::env::current_exe().unwrap();
        let rank = |rank: usize| {
            Command::new(&program)
                .args(["comm::from_env::tests::a_rank", "--exact", "--ignored"])
                .args(["--nocapture"])
                .env(ROLE, role)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world_size.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", world_size.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        (0..world_size).map(rank).collect()
    }

    /// What each rank has printed last, behind its mark.
    fn outcomes(ranks: Vec<Child>) -> Vec<Option<String>> {
        let outcome = |rank: Child| {
            let output = rank.wait_with_output().unwrap().stdout;
            let text = String::from_utf8_lossy(&output).into_owned();
            let (_, outcome) = text.rsplit_once("OUTCOME: ")?;
            outcome.lines().next().map(String::from)
        };
        ranks.into_iter().map(outcome).collect()
    }

    #[test]
    #[ignore = "is a rank that other tests start as a process"]
    fn a_rank() {
        let role = std::env::var(ROLE).expect("another test says what to do");
        let result = launch_from_env(|pg| {
            let own = Tensor::<1>::from_floats([pg.rank() as f32], &pg.device());
            let sum = pg.all_reduce(own, ReduceOp::Sum)?.into_scalar::<f32>();
            let last = pg.rank() + 1 == pg.world_size();
            match &*role {
                "sum" => return Ok(format!("{sum} on {}", pg.description())),
                "panic" if last => panic!("on purpose"),
                "abort" if last => std::process::abort(),
                "err" if last => return Err(FsdpError::other("no data")),
                "return" if last => return Ok("gone".to_string()),
                _ => pg.barrier()?,
            }
            Ok("waited".to_string())
        });
        let outcome = result.unwrap_or_else(|error| error.to_string());
        println!("OUTCOME: {outcome}");
    }

    #[test]
    fn processes_find_each_other_and_say_how() {
        for (rank, outcome) in outcomes(start(3, "sum")).into_iter().enumerate() {
            let expected = format!(
                "3 on rank {rank} of 3 (tcp, started by torchrun variables, local rank {rank})"
            );
            assert_eq!(outcome.unwrap(), expected);
        }
    }

    #[test]
    fn a_process_that_ends_is_named_by_all_others_with_its_cause() {
        let causes = [
            ("panic", "rank 2 failed: on purpose"),
            ("err", "rank 2 failed: no data"),
            ("abort", "rank 2 failed: its process has ended"),
        ];
        for (role, cause) in causes {
            let outcomes = outcomes(start(3, role));
            for outcome in &outcomes[..2] {
                assert_eq!(outcome.as_deref(), Some(cause), "{role}");
            }
        }
    }

    #[test]
    fn a_process_that_has_returned_is_named_by_those_who_wait_for_it() {
        let outcomes = outcomes(start(2, "return"));
        let waits = outcomes[0].as_deref().unwrap();
        assert!(
            waits.contains("waits in barrier") && waits.contains("rank 1"),
            "{waits}"
        );
        assert_eq!(outcomes[1].as_deref(), Some("gone"));
    }

    #[test]
    fn without_a_launcher_the_error_says_what_to_do() {
        let text = no_launcher().to_string();
        for name in [
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "`burn_fsdp::launch`",
        ] {
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn an_unknown_device_is_an_error() {
        let env = JobEnv {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master_addr: "127.0.0.1".to_string(),
            master_port: 1,
            secret: String::new(),
            launcher: Launcher::Torchrun,
            device: Some("abacus".to_string()),
            timeout: None,
        };
        let error = connect(&env, DEFAULT_TIMEOUT).map(drop).unwrap_err();
        assert!(error.to_string().contains("\"abacus\""), "{error}");
    }
}
