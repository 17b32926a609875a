//! What a launcher has set for this process.
//!
//! | | variables | who sets them |
//! |---|---|---|
//! | 1 | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `burn-fsdp run`, `torchrun`, a script |
//! | 2 | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` | `mpirun` of Open MPI |
//! | 3 | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_TASKS_PER_NODE` | `srun` |
//!
//! The first that is set counts. Open MPI goes before Slurm as `mpirun` is run in jobs of Slurm, and
//! its ranks then see what Slurm has set for `mpirun`.
//!
//! `BURN_FSDP_TIMEOUT` is how many seconds to wait for other ranks, at the start and in collectives.
//!
//! `MASTER_ADDR` and `MASTER_PORT` say where rank 0 listens, whoever the launcher is. Without them it
//! is `127.0.0.1:29500` if all ranks are on one host; in a job of Slurm it is the first host of the
//! node list, at a port of 20000 to 29999 that follows from the numbers of the job and its step.
//!
//! # Note: the secret
//!
//! Ranks show each other a secret, so that jobs that meet at one port by accident notice. If
//! `BURN_FSDP_SECRET` is set, only those who know it get in. Otherwise it is made of the job's number
//! and port, which anyone on the network can guess: it tells jobs apart, but keeps nobody out.

mod slurm;

use std::fmt;
use std::net::IpAddr;
use std::num::ParseIntError;
use std::str::FromStr;
use std::time::Duration;

use crate::{FsdpError, Result};

/// Where rank 0 listens unless told otherwise, if all ranks are on its host.
const LOCAL_ADDR: &str = "127.0.0.1";
const LOCAL_PORT: u16 = 29500;

/// Who started this process as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// `torchrun`, or whoever sets its variables.
    Torchrun,
    /// `srun`.
    Slurm,
    /// `mpirun`.
    OpenMpi,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "RANK and WORLD_SIZE",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
        })
    }
}

/// What a launcher has set for this process.
pub(crate) struct JobEnv {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// This rank's number among those on its host.
    pub(crate) local_rank: usize,
    /// Ranks on this host.
    pub(crate) local_world_size: usize,
    /// The host of rank 0.
    pub(crate) master_addr: String,
    /// Where rank 0 listens.
    pub(crate) master_port: u16,
    /// Equal on all ranks of a job; see the [module](self).
    pub(crate) secret: String,
    pub(crate) launcher: Launcher,
    /// `cpu` or `cuda`, if the user wants one.
    pub(crate) device: Option<String>,
    /// How long to wait for other ranks, if the user says so.
    pub(crate) timeout: Option<Duration>,
}

/// Without the secret.
impl fmt::Debug for JobEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobEnv")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("master_addr", &self.master_addr)
            .field("master_port", &self.master_port)
            .field("launcher", &self.launcher)
            .field("device", &self.device)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl JobEnv {
    /// Reads the environment. `None` if no launcher has set anything.
    ///
    /// # Errors
    ///
    /// If what is set is not whole or makes no sense; names the variable and its value.
    pub(crate) fn read() -> Result<Option<Self>> {
        Self::from_vars(|name| {
            let value = std::env::var_os(name)?;
            Some(value.to_string_lossy().into_owned())
        })
    }

    fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let vars = Vars(&get);
        for find in [torchrun, open_mpi, slurm::seat] {
            if let Some(seat) = find(&vars)? {
                return Self::new(&vars, seat).map(Some);
            }
        }
        Ok(None)
    }

    fn new(vars: &Vars<'_>, seat: Seat) -> Result<Self> {
        let missing = |name: &str, what: &str| {
            FsdpError::argument(format!(
                "{name} is not set, and the {} ranks are on several hosts; set it to {what}",
                seat.world_size
            ))
        };
        let addr = vars.text("MASTER_ADDR")?.or(seat.master_addr);
        let addr = addr.ok_or_else(|| missing("MASTER_ADDR", "the host of rank 0"))?;
        let port = vars.number("MASTER_PORT")?.or(seat.master_port);
        let port = port.ok_or_else(|| missing("MASTER_PORT", "a port that is free there"))?;
        if port == 0 {
            return Err(FsdpError::argument("MASTER_PORT is 0, which is no port"));
        }
        // torchrun's own store listens at the port that it tells, unless it leaves that to rank 0.
        let is_taken = vars.text("TORCHELASTIC_USE_AGENT_STORE")?.as_deref() == Some("True");
        let port = match is_taken {
            true => port.checked_add(1).unwrap_or(port - 1),
            false => port,
        };
        let secret = vars.text("BURN_FSDP_SECRET")?;
        // Not of the address, which ranks may spell in several ways.
        let secret = secret.unwrap_or_else(|| format!("job {} at port {port}", seat.job));
        Ok(Self {
            rank: seat.rank,
            world_size: seat.world_size,
            local_rank: seat.local_rank,
            local_world_size: seat.local_world_size,
            master_addr: addr,
            master_port: port,
            secret,
            launcher: seat.launcher,
            device: device(vars)?,
            timeout: timeout(vars)?,
        })
    }
}

/// How long to wait for other ranks, if the user says so.
fn timeout(vars: &Vars<'_>) -> Result<Option<Duration>> {
    match vars.number::<u64>("BURN_FSDP_TIMEOUT")? {
        Some(0) => Err(FsdpError::argument(
            "BURN_FSDP_TIMEOUT is 0; it is a number of seconds from 1",
        )),
        seconds => Ok(seconds.map(Duration::from_secs)),
    }
}

fn device(vars: &Vars<'_>) -> Result<Option<String>> {
    let device = vars.text("BURN_FSDP_DEVICE")?;
    match device.as_deref() {
        None | Some("cpu" | "cuda") => Ok(device),
        Some(other) => Err(FsdpError::argument(format!(
            "BURN_FSDP_DEVICE is \"{other}\"; it can be \"cpu\" or \"cuda\""
        ))),
    }
}

/// What one launcher says, before what they have in common.
struct Seat {
    launcher: Launcher,
    rank: usize,
    world_size: usize,
    local_rank: usize,
    local_world_size: usize,
    /// Where rank 0 listens if the user does not say.
    master_addr: Option<String>,
    master_port: Option<u16>,
    /// What tells the job from others.
    job: String,
}

fn torchrun(vars: &Vars<'_>) -> Result<Option<Seat>> {
    let Some((rank, world_size)) = vars.rank_of("RANK", "WORLD_SIZE")? else {
        return Ok(None);
    };
    check_mpirun(vars, rank, world_size)?;
    let (local_size_name, local_world_size) = match vars.number("LOCAL_WORLD_SIZE")? {
        Some(size) => ("LOCAL_WORLD_SIZE", size),
        None => ("WORLD_SIZE", all_local(vars, world_size)?),
    };
    check_local_size(local_size_name, local_world_size, world_size)?;
    let local_rank = vars.number("LOCAL_RANK")?;
    let local_rank = local_rank.unwrap_or(rank % local_world_size);
    check_rank(
        ("LOCAL_RANK", local_rank),
        (local_size_name, local_world_size),
    )?;
    let is_local = local_world_size == world_size;
    Ok(Some(Seat {
        launcher: Launcher::Torchrun,
        rank,
        world_size,
        local_rank,
        local_world_size,
        master_addr: is_local.then(|| LOCAL_ADDR.to_string()),
        master_port: is_local.then_some(LOCAL_PORT),
        job: vars.text("TORCHELASTIC_RUN_ID")?.unwrap_or_default(),
    }))
}

/// The size of a job that is all on this host, as nothing speaks against it.
fn all_local(vars: &Vars<'_>, world_size: usize) -> Result<usize> {
    match vars.text("MASTER_ADDR")? {
        Some(addr) if world_size > 1 && !is_loopback(&addr) => Err(FsdpError::argument(format!(
            "LOCAL_WORLD_SIZE is not set, and as MASTER_ADDR is \"{addr}\", the ranks may be on \
             several hosts; set it to the number of ranks on this host"
        ))),
        _ => Ok(world_size),
    }
}

/// An error if what `mpirun` says shows that `RANK` and `WORLD_SIZE` are left over from something else:
/// each of its ranks would take itself for the same one. It may have started a launcher on each host,
/// which then has started more ranks than it.
fn check_mpirun(vars: &Vars<'_>, rank: usize, world_size: usize) -> Result<()> {
    let of_mpirun = vars.rank_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    match of_mpirun {
        Some((r, size)) if world_size < size || world_size == size && rank != r => {
            Err(FsdpError::argument(format!(
                "RANK={rank} and WORLD_SIZE={world_size} are set, but mpirun has started this process as rank \
                 {r} of {size}; unset them"
            )))
        }
        _ => Ok(()),
    }
}

fn open_mpi(vars: &Vars<'_>) -> Result<Option<Seat>> {
    let Some((rank, world_size)) = vars.rank_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?
    else {
        return Ok(None);
    };
    let local_size_name = "OMPI_COMM_WORLD_LOCAL_SIZE";
    let local_world_size = vars.needed(local_size_name, "OMPI_COMM_WORLD_RANK")?;
    let local_rank = vars.needed("OMPI_COMM_WORLD_LOCAL_RANK", local_size_name)?;
    check_local_size(local_size_name, local_world_size, world_size)?;
    check_rank(
        ("OMPI_COMM_WORLD_LOCAL_RANK", local_rank),
        (local_size_name, local_world_size),
    )?;
    let (master_addr, master_port) = if local_world_size == world_size {
        (Some(LOCAL_ADDR.to_string()), Some(LOCAL_PORT))
    } else {
        // In a job of Slurm. The step is that of mpirun's helpers, without mpirun's own host.
        let host = slurm::first_host(vars, &["SLURM_JOB_NODELIST"])?;
        // MPI finds the ranks itself, and nobody listens there.
        let (own, any) = (LOCAL_ADDR.to_string(), cfg!(feature = "mpi"));
        let host = host.or(any.then_some(own));
        (host, slurm::port(vars, 0)?.or(any.then_some(LOCAL_PORT)))
    };
    let job = vars.first_of(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])?;
    Ok(Some(Seat {
        launcher: Launcher::OpenMpi,
        rank,
        world_size,
        local_rank,
        local_world_size,
        master_addr,
        master_port,
        job: job.map(|(_, job)| job).unwrap_or_default(),
    }))
}

/// The variables, with errors that name them.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn text(&self, name: &str) -> Result<Option<String>> {
        match (self.0)(name) {
            Some(value) if value.trim().is_empty() => Err(FsdpError::argument(format!(
                "{name} is \"{value}\"; unset it or give it a value"
            ))),
            value => Ok(value),
        }
    }

    fn number<T: FromStr<Err = ParseIntError>>(&self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.text(name)? else {
            return Ok(None);
        };
        let parsed = value.trim().parse().map(Some);
        parsed.map_err(|error| FsdpError::argument(format!("{name} is \"{value}\": {error}")))
    }

    /// A number that must be set, as `set` is.
    fn needed(&self, name: &str, set: &str) -> Result<usize> {
        let number = self.number(name)?;
        number.ok_or_else(|| FsdpError::argument(format!("{set} is set, but {name} is not")))
    }

    /// The first of these that is set, with its name.
    fn first_of(&self, names: &[&'static str]) -> Result<Option<(&'static str, String)>> {
        for name in names {
            if let Some(value) = self.text(name)? {
                return Ok(Some((name, value)));
            }
        }
        Ok(None)
    }

    /// A rank and the number of ranks. Both must be set, or none.
    fn rank_of(&self, rank_name: &str, size_name: &str) -> Result<Option<(usize, usize)>> {
        if self.text(rank_name)?.is_none() && self.text(size_name)?.is_none() {
            return Ok(None);
        }
        let rank = self.needed(rank_name, size_name)?;
        let size = self.needed(size_name, rank_name)?;
        check_rank((rank_name, rank), (size_name, size))?;
        Ok(Some((rank, size)))
    }
}

fn check_rank((rank_name, rank): (&str, usize), (size_name, size): (&str, usize)) -> Result<()> {
    if size == 0 {
        return Err(FsdpError::argument(format!(
            "{size_name} is 0; there must be one rank at least"
        )));
    }
    if rank >= size {
        return Err(FsdpError::argument(format!(
            "{rank_name} is {rank}, but {size_name} is {size}; ranks count from 0"
        )));
    }
    Ok(())
}

fn check_local_size(name: &str, local_size: usize, world_size: usize) -> Result<()> {
    if (1..=world_size).contains(&local_size) {
        return Ok(());
    }
    Err(FsdpError::argument(format!(
        "{name} gives {local_size} ranks to this host, of {world_size} in all"
    )))
}

fn is_loopback(addr: &str) -> bool {
    addr == "localhost" || addr.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads variables that are written as in a shell.
    fn read(vars: &str) -> Result<Option<JobEnv>> {
        JobEnv::from_vars(|name| {
            let var = vars
                .split(' ')
                .find_map(|var| var.strip_prefix(name)?.strip_prefix('='));
            var.map(str::to_string)
        })
    }

    fn rank(vars: &str) -> JobEnv {
        read(vars).unwrap().expect("a launcher")
    }

    /// Rank and world size, on this host and in all, and where rank 0 listens.
    fn place(vars: &str) -> (usize, usize, usize, usize, String) {
        let env = rank(vars);
        let master = format!("{}:{}", env.master_addr, env.master_port);
        (
            env.rank,
            env.world_size,
            env.local_rank,
            env.local_world_size,
            master,
        )
    }

    #[test]
    fn without_variables_there_is_no_launcher() {
        for vars in [
            "",
            "MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_RANK=0",
            "BURN_FSDP_SECRET=x",
        ] {
            assert!(read(vars).unwrap().is_none(), "{vars}");
        }
    }

    #[test]
    fn a_rank_of_torchrun_is_read_whole() {
        let vars = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node7 \
                    MASTER_PORT=4321 TORCHELASTIC_RUN_ID=run7";
        assert_eq!(place(vars), (5, 8, 1, 4, "node7:4321".to_string()));
        assert_eq!(rank(vars).launcher, Launcher::Torchrun);
        assert_eq!(rank(vars).secret, "job run7 at port 4321");
        assert_eq!(rank(vars).device, None);
    }

    #[test]
    fn what_is_not_set_follows_from_the_rest() {
        let local = |port: u16| format!("127.0.0.1:{port}");
        for (vars, expected) in [
            ("RANK=0 WORLD_SIZE=1", (0, 1, 0, 1, local(29500))),
            ("RANK=2 WORLD_SIZE=4", (2, 4, 2, 4, local(29500))),
            ("RANK=2 WORLD_SIZE=4 MASTER_PORT=7", (2, 4, 2, 4, local(7))),
            (
                "RANK=2 WORLD_SIZE=4 LOCAL_RANK=1",
                (2, 4, 1, 4, local(29500)),
            ),
            (
                "RANK=2 WORLD_SIZE=4 MASTER_ADDR=localhost",
                (2, 4, 2, 4, "localhost:29500".into()),
            ),
            (
                "RANK=2 WORLD_SIZE=4 MASTER_ADDR=::1",
                (2, 4, 2, 4, "::1:29500".into()),
            ),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_ADDR=node7",
                (0, 1, 0, 1, "node7:29500".into()),
            ),
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1",
                (5, 8, 1, 4, "a:1".into()),
            ),
        ] {
            assert_eq!(place(vars), expected, "{vars}");
        }
    }

    #[test]
    fn a_rank_of_open_mpi_is_read_whole() {
        let vars = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-3@1";
        assert_eq!(place(vars), (1, 2, 1, 2, "127.0.0.1:29500".to_string()));
        assert_eq!(rank(vars).launcher, Launcher::OpenMpi);
        assert_eq!(rank(vars).secret, "job prterun-3@1 at port 29500");
    }

    const OPEN_MPI_ON_TWO_HOSTS: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 \
         OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";

    #[test]
    fn open_mpi_on_several_hosts_is_told_the_address() {
        let vars = format!("{OPEN_MPI_ON_TWO_HOSTS} MASTER_ADDR=a MASTER_PORT=1");
        assert_eq!(place(&vars), (3, 4, 1, 2, "a:1".to_string()));
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn open_mpi_on_several_hosts_needs_no_address_where_mpi_carries_the_messages() {
        let place = place(OPEN_MPI_ON_TWO_HOSTS);
        assert_eq!((place.0, place.1), (3, 4));
    }

    #[test]
    fn open_mpi_within_a_job_of_slurm_takes_its_ranks_from_mpirun() {
        // What srun sets for the second of mpirun's helpers.
        let slurm = "SLURM_JOB_ID=11 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 \
                     SLURM_TASKS_PER_NODE=1 SLURM_NODEID=0 SLURM_JOB_NODELIST=n[1-2] \
                     SLURM_STEP_NODELIST=n2";
        let vars = format!("{OPEN_MPI_ON_TWO_HOSTS} {slurm}");
        assert_eq!(place(&vars), (3, 4, 1, 2, "n1:20011".to_string()));
        assert_eq!(rank(&vars).launcher, Launcher::OpenMpi);
    }

    #[test]
    fn rank_and_world_size_go_before_all_else() {
        let vars = format!(
            "{OPEN_MPI_ON_TWO_HOSTS} RANK=7 WORLD_SIZE=8 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0 \
             LOCAL_WORLD_SIZE=8"
        );
        assert_eq!(place(&vars), (7, 8, 7, 8, "127.0.0.1:29500".to_string()));
    }

    #[test]
    fn the_timeout_is_in_seconds() {
        let vars = "RANK=0 WORLD_SIZE=1";
        assert_eq!(rank(vars).timeout, None);
        let vars = format!("{vars} BURN_FSDP_TIMEOUT=30");
        assert_eq!(rank(&vars).timeout, Some(Duration::from_secs(30)));
    }

    #[test]
    fn the_users_secret_goes_before_one_that_is_made() {
        assert_eq!(
            rank("RANK=0 WORLD_SIZE=1 BURN_FSDP_SECRET=hush").secret,
            "hush"
        );
    }

    #[test]
    fn the_port_beside_the_one_that_torchrun_itself_listens_at_is_taken() {
        let port = |own: u16, store: &str| {
            let vars = format!("RANK=0 WORLD_SIZE=1 MASTER_PORT={own}");
            rank(&format!("{vars} TORCHELASTIC_USE_AGENT_STORE={store}")).master_port
        };
        assert_eq!(port(29500, "True"), 29501);
        assert_eq!(port(65535, "True"), 65534);
        assert_eq!(port(29500, "False"), 29500);
    }

    #[test]
    fn secrets_that_are_made_tell_jobs_apart() {
        let secret = |vars| rank(vars).secret;
        let one = secret("RANK=0 WORLD_SIZE=2");
        assert_eq!(one, secret("RANK=1 WORLD_SIZE=2"));
        assert_ne!(one, secret("RANK=0 WORLD_SIZE=2 MASTER_PORT=1"));
        assert_ne!(one, secret("RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=b"));
    }

    #[test]
    fn the_secret_is_not_printed() {
        let env = rank("RANK=0 WORLD_SIZE=1 BURN_FSDP_SECRET=hush");
        assert!(!format!("{env:?}").contains("hush"));
    }

    #[test]
    fn a_device_is_a_hint_of_two_words() {
        for device in ["cpu", "cuda"] {
            let env = rank(&format!("RANK=0 WORLD_SIZE=1 BURN_FSDP_DEVICE={device}"));
            assert_eq!(env.device.as_deref(), Some(device));
        }
    }

    #[test]
    fn half_of_the_variables_are_an_error_that_names_the_other_half() {
        for (vars, missing) in [
            ("RANK=0", "WORLD_SIZE is not"),
            ("WORLD_SIZE=2", "RANK is not"),
            ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"),
            ("OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK is not"),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
                "OMPI_COMM_WORLD_LOCAL_SIZE is not",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1",
                "OMPI_COMM_WORLD_LOCAL_RANK is not",
            ),
            #[cfg(not(feature = "mpi"))]
            (OPEN_MPI_ON_TWO_HOSTS, "MASTER_ADDR is not set"),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 RANK=0 WORLD_SIZE=1",
                "mpirun has started this process as rank 1 of 2",
            ),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 RANK=0 WORLD_SIZE=2",
                "mpirun has started this process as rank 1 of 2",
            ),
            (
                "RANK=0 WORLD_SIZE=1 BURN_FSDP_TIMEOUT=0",
                "BURN_FSDP_TIMEOUT is 0",
            ),
            (
                "RANK=0 WORLD_SIZE=1 BURN_FSDP_TIMEOUT=soon",
                "BURN_FSDP_TIMEOUT",
            ),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_ADDR=node7",
                "LOCAL_WORLD_SIZE is not set",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1",
                "MASTER_ADDR is not set",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=node7",
                "MASTER_PORT is not set",
            ),
        ] {
            let error = read(vars).unwrap_err().to_string();
            assert!(error.contains(missing), "{vars}: {error}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_value() {
        for (vars, words) in [
            ("RANK=4 WORLD_SIZE=4", ["RANK is 4", "WORLD_SIZE is 4"]),
            ("RANK=0 WORLD_SIZE=0", ["WORLD_SIZE is 0", "one rank"]),
            ("RANK=one WORLD_SIZE=4", ["RANK", "\"one\""]),
            ("RANK=-1 WORLD_SIZE=4", ["RANK", "\"-1\""]),
            ("RANK=0 WORLD_SIZE=1.5", ["WORLD_SIZE", "\"1.5\""]),
            ("RANK= WORLD_SIZE=4", ["RANK", "\"\""]),
            ("RANK=0 WORLD_SIZE=", ["WORLD_SIZE", "\"\""]),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2",
                ["LOCAL_RANK is 2", "WORLD_SIZE is 2"],
            ),
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                ["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"],
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0",
                ["LOCAL_WORLD_SIZE gives 0", "2 in all"],
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3",
                ["LOCAL_WORLD_SIZE gives 3", "2 in all"],
            ),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_PORT=0",
                ["MASTER_PORT is 0", "no port"],
            ),
            (
                "RANK=0 WORLD_SIZE=1 MASTER_PORT=65536",
                ["MASTER_PORT", "\"65536\""],
            ),
            ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=", ["MASTER_ADDR", "\"\""]),
            (
                "RANK=0 WORLD_SIZE=1 BURN_FSDP_SECRET=",
                ["BURN_FSDP_SECRET", "\"\""],
            ),
            (
                "RANK=0 WORLD_SIZE=1 BURN_FSDP_DEVICE=tpu",
                ["BURN_FSDP_DEVICE", "\"tpu\""],
            ),
            (
                "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2",
                ["OMPI_COMM_WORLD_RANK is 2", "OMPI_COMM_WORLD_SIZE is 2"],
            ),
        ] {
            let error = read(vars).unwrap_err().to_string();
            assert!(
                words.iter().all(|word| error.contains(word)),
                "{vars}: {error}"
            );
        }
    }
}
