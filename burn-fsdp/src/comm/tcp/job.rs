//! What a process must know to find the others of its job.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use crate::{FsdpError, Result};

/// One rank's knowledge of its job. All but the rank is equal on all ranks.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Where rank 0 is: a name or an address.
    pub(crate) host: String,
    /// Where rank 0 listens.
    pub(crate) port: u16,
    /// What only the processes of this job know.
    pub(crate) secret: String,
    /// How long a rank waits for the others.
    pub(crate) timeout: Duration,
}

/// Without the secret.
impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("address", &self.address())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl Job {
    pub(super) fn check(&self) -> Result<()> {
        if self.rank < self.world_size {
            return Ok(());
        }
        Err(FsdpError::argument(format!(
            "rank {} is no rank of a job of {}",
            self.rank, self.world_size
        )))
    }

    /// Where rank 0 listens, for people.
    pub(super) fn address(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// The addresses of rank 0's host.
    pub(super) fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        Ok((&*self.host, self.port).to_socket_addrs()?.collect())
    }

    /// Whether all ranks are on one host, as rank 0's address is one that no other host can reach.
    pub(super) fn is_on_one_host(&self) -> bool {
        self.host == "localhost"
            || self
                .host
                .parse()
                .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    }

    pub(super) fn error(&self, reason: impl Into<String>) -> FsdpError {
        FsdpError::Rendezvous {
            address: self.address(),
            reason: reason.into(),
        }
    }
}
