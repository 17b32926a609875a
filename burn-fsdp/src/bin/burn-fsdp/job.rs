//! What the ranks of a job are told.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::nproc::{Nproc, parse_count};
use crate::output::complain;

const SECRET: &str = "BURN_FSDP_SECRET";

/// Which ranks there are and how they find each other.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// Ranks on this node; auto: one for each CUDA device that is visible
    #[arg(long, value_name = "N|auto", aliases = ["nproc-per-node", "nproc_per_node"])]
    nproc: Nproc,
    /// Nodes of the job, on each of which the launcher is run once [default: 1]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    nnodes: Option<usize>,
    /// This node's number, from 0
    #[arg(long, value_name = "N", alias = "node_rank")]
    node_rank: Option<usize>,
    /// The host of node 0, as the other nodes reach it [default with one node: 127.0.0.1]
    #[arg(long, value_name = "HOST", alias = "master_addr")]
    master_addr: Option<String>,
    /// A port that is free there [default with one node: any that is free]
    #[arg(long, value_name = "PORT", alias = "master_port", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// A file with the secret that ranks show each other, the same on all nodes
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

/// This node's part of a job.
#[derive(Debug)]
pub(crate) struct Job {
    /// Ranks on this node.
    pub(crate) nproc: usize,
    nnodes: usize,
    node_rank: usize,
    master_addr: String,
    master_port: u16,
    /// None: the ranks take what the environment has, or make one.
    secret: Option<String>,
}

impl Job {
    pub(crate) fn new(args: &JobArgs) -> Result<Self, Failure> {
        let nnodes = args.nnodes.unwrap_or(1);
        Ok(Self {
            nproc: args.nproc.resolve()?,
            nnodes,
            node_rank: node_rank(args)?,
            master_addr: match &args.master_addr {
                Some(addr) => addr.clone(),
                None if nnodes == 1 => Ipv4Addr::LOCALHOST.to_string(),
                None => return Err(needed("--master-addr", "the host of node 0", nnodes)),
            },
            master_port: match args.master_port {
                Some(port) => port,
                None if nnodes == 1 => free_port()?,
                None => return Err(needed("--master-port", "a port free on node 0", nnodes)),
            },
            secret: secret(args.secret_file.as_deref(), nnodes)?,
        })
    }

    /// The rank's number in the job.
    pub(crate) fn rank(&self, local_rank: usize) -> usize {
        self.node_rank * self.nproc + local_rank
    }

    /// The variables for a rank.
    pub(crate) fn vars(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let mut vars = vec![
            ("RANK", self.rank(local_rank).to_string()),
            ("WORLD_SIZE", (self.nnodes * self.nproc).to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", self.nproc.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
        ];
        vars.extend(self.secret.clone().map(|secret| (SECRET, secret)));
        vars
    }
}

fn needed(flag: &str, what: &str, nnodes: usize) -> Failure {
    Failure::usage(format!(
        "{flag} is not given; with {nnodes} nodes it must be, as {what}"
    ))
}

fn node_rank(args: &JobArgs) -> Result<usize, Failure> {
    match (args.node_rank, args.nnodes) {
        (None, None | Some(1)) => Ok(0),
        (None, Some(nnodes)) => Err(needed("--node-rank", "this node's number", nnodes)),
        (Some(rank), None) => Err(Failure::usage(format!(
            "--node-rank is {rank}, but --nnodes is not given; without it there is one node"
        ))),
        (Some(rank), Some(nnodes)) if rank >= nnodes => Err(Failure::usage(format!(
            "--node-rank is {rank}, but --nnodes is {nnodes}; nodes count from 0"
        ))),
        (Some(rank), Some(_)) => Ok(rank),
    }
}

/// Another process may take it before rank 0 does, which then says so.
fn free_port() -> Result<u16, Failure> {
    let bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|bound| bound.local_addr());
    let addr = bound.map_err(|error| Failure::system("no port is free for rank 0", error))?;
    Ok(addr.port())
}

fn secret(file: Option<&Path>, nnodes: usize) -> Result<Option<String>, Failure> {
    if let Some(file) = file {
        return read_secret(file).map(Some);
    }
    match env::var_os(SECRET) {
        Some(secret) if secret.is_empty() => Err(Failure::usage(format!(
            "{SECRET} is empty; unset it or give it a value"
        ))),
        Some(_) => Ok(None),
        None if nnodes == 1 => random_secret().map(Some),
        None => {
            complain(&format!(
                "warning: no secret is given, so the ranks make one of the job's address, which others \
                 on the network can guess; give --secret-file or {SECRET} on all nodes"
            ));
            Ok(None)
        }
    }
}

fn read_secret(file: &Path) -> Result<String, Failure> {
    let secret = fs::read_to_string(file)
        .map_err(|error| Failure::system(&format!("--secret-file {}", file.display()), error))?;
    match secret.trim() {
        "" => Err(Failure::usage(format!(
            "--secret-file {} is empty",
            file.display()
        ))),
        secret => Ok(secret.to_string()),
    }
}

fn random_secret() -> Result<String, Failure> {
    let random = || -> io::Result<u128> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(u128::from_ne_bytes(bytes))
    };
    let number = random().map_err(|error| Failure::system("cannot make a secret", error))?;
    Ok(format!("{number:032x}"))
}
