//! What a launcher has set for this process.

use crate::{FsdpError, Result};

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

/// What a launcher has set for this process.
pub(crate) struct JobEnv {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    pub(crate) secret: String,
    pub(crate) launcher: Launcher,
    pub(crate) device: Option<String>,
}

impl JobEnv {
    /// Reads the environment. `None` if no launcher has set anything.
    pub(crate) fn read() -> Result<Option<Self>> {
        if std::env::var_os("RANK").is_none() {
            return Ok(None);
        }
        let text = |name: &str| {
            let value = std::env::var(name);
            value.map_err(|error| FsdpError::argument(format!("{name}: {error}")))
        };
        let number = |name: &str| {
            let value = text(name)?.parse::<usize>();
            value.map_err(|error| FsdpError::argument(format!("{name}: {error}")))
        };
        Ok(Some(Self {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            local_rank: number("LOCAL_RANK")?,
            local_world_size: number("LOCAL_WORLD_SIZE")?,
            master_addr: text("MASTER_ADDR")?,
            master_port: number("MASTER_PORT")? as u16,
            secret: text("BURN_FSDP_SECRET").unwrap_or_default(),
            launcher: Launcher::Torchrun,
            device: text("BURN_FSDP_DEVICE").ok(),
        }))
    }
}
