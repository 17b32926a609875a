//! Collectives between two processes against plain sockets.
//!
//! - `all-gather`: of one tensor, half of which each rank has.
//! - `reduce-scatter`: the mean of a tensor that each rank has whole.
//!
//! Two yardsticks run beside each, in the same processes, in alternation, on buffers allocated before:
//!
//! - `socket`: the two processes send each other half of the tensor's bytes at once, over one connection of
//!   the loopback device: what both collectives have to move.
//! - `memcpy`: each process copies the whole tensor.
//!
//! A row says how long each took (least / median over the rounds) and the speed of the collective as a share
//! of the yardstick's. With `--mpi` the ranks are started by mpirun, and talk over MPI if this was built with
//! the feature `mpi` of burn-fsdp.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use burn_fsdp::{FsdpError, ProcessGroup, ReduceOp, Result, launch_from_env};
use burn_fsdp_benches::harness::{Bytes, Samples, asked_to_run};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 2;

/// Collectives between two processes against plain sockets.
#[derive(Parser, Debug)]
struct Args {
    /// Few rounds of small tensors, to see that it runs
    #[arg(long)]
    quick: bool,
    /// Start the ranks by mpirun
    #[arg(long)]
    mpi: bool,
    /// This process is a rank that this bench has started
    #[arg(long, hide = true)]
    rank: bool,
    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    if !asked_to_run() {
        return Ok(());
    }
    let args = Args::parse();
    match (args.rank, args.mpi) {
        (true, _) => launch_from_env(|pg| measure_all(&pg, args.quick)),
        (false, true) => start_by_mpirun(&args),
        (false, false) => start(&args),
    }
}

// ---- the parent: starts the ranks

fn start(args: &Args) -> Result<()> {
    let port = free_port()?.to_string();
    let rank = |rank: usize| {
        let mut command = rank_command(std::env::current_exe().map_err(FsdpError::other)?, args);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port);
        command.spawn().map_err(FsdpError::other)
    };
    let ranks: Vec<Child> = (0..RANKS).map(rank).collect::<Result<_>>()?;
    for mut rank in ranks {
        check(rank.wait().map_err(FsdpError::other)?)?;
    }
    Ok(())
}

fn start_by_mpirun(args: &Args) -> Result<()> {
    let mut command = rank_command("mpirun".into(), args);
    let status = command.status().map_err(FsdpError::other)?;
    check(status)
}

/// A command that runs ranks: this program itself, or mpirun.
fn rank_command(program: std::path::PathBuf, args: &Args) -> Command {
    let mut command = Command::new(program);
    if args.mpi {
        let own = std::env::current_exe().unwrap_or_default();
        command
            .args(["-n", &RANKS.to_string(), "--oversubscribe"])
            .arg(own);
    }
    command.args(["--bench", "--rank"]);
    if args.quick {
        command.arg("--quick");
    }
    command
}

fn check(status: ExitStatus) -> Result<()> {
    match status.success() {
        true => Ok(()),
        false => Err(FsdpError::other(format!("a rank has failed: {status}"))),
    }
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(FsdpError::other)?;
    Ok(listener.local_addr().map_err(FsdpError::other)?.port())
}

// ---- the ranks

fn measure_all(pg: &ProcessGroup, quick: bool) -> Result<()> {
    if pg.rank() == 0 {
        println!("{} (times: least / median)", pg.description());
        println!(
            "{:>14} {:>8} {:>23} {:>23} {:>23}   {:>15}   {:>15}",
            "", "tensor", "collective", "socket", "memcpy", "of socket", "of memcpy"
        );
    }
    let mut peer = Peer::connect(pg)?;
    let sizes: &[usize] = match quick {
        true => &[64 << 10, 1 << 20],
        false => &[64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20],
    };
    for &bytes in sizes {
        let len = bytes / size_of::<f32>();
        let half = Tensor::<1>::full([len / RANKS], 0.5, &Device::flex());
        let gather = || {
            pg.all_gather(half.clone())
                .map(|whole| drop(black_box(whole)))
        };
        measure(pg, &mut peer, "all-gather", bytes, quick, gather)?;
        let whole = Tensor::<1>::full([len], 0.5, &Device::flex());
        let reduce = || {
            let shard = pg.reduce_scatter(whole.clone(), ReduceOp::Mean)?;
            drop(black_box(shard));
            Ok(())
        };
        measure(pg, &mut peer, "reduce-scatter", bytes, quick, reduce)?;
    }
    Ok(())
}

/// Runs the collective and both yardsticks by turns, after two rounds that don't count; rank 0 prints.
fn measure(
    pg: &ProcessGroup,
    peer: &mut Peer,
    name: &str,
    bytes: usize,
    quick: bool,
    collective: impl Fn() -> Result<()>,
) -> Result<()> {
    const WARM_UP: usize = 2;
    let rounds = if quick {
        5
    } else {
        ((1 << 30) / bytes).clamp(10, 200)
    };
    let source = vec![1_u8; bytes];
    let mut target = vec![2_u8; bytes];
    let mut samples = [const { Vec::new() }; 3];
    for round in 0..WARM_UP + rounds {
        pg.barrier()?;
        let start = Instant::now();
        collective()?;
        let by_collective = start.elapsed();
        pg.barrier()?;
        let start = Instant::now();
        peer.swap(&source[..bytes / RANKS], &mut target[..bytes / RANKS])?;
        let by_socket = start.elapsed();
        pg.barrier()?;
        let start = Instant::now();
        target.copy_from_slice(black_box(&source));
        black_box(&mut target);
        let by_memcpy = start.elapsed();
        if round >= WARM_UP {
            for (samples, time) in samples
                .iter_mut()
                .zip([by_collective, by_socket, by_memcpy])
            {
                samples.push(time);
            }
        }
    }
    let [collective, socket, memcpy] = samples.map(|own| slowest(pg, own));
    let (collective, socket, memcpy) = (collective?, socket?, memcpy?);
    if pg.rank() == 0 {
        println!(
            "{name:>14} {:>8} {collective:>23} {socket:>23} {memcpy:>23}   {:>15}   {:>15}",
            Bytes(bytes),
            percent(socket.ratio_to(&collective)),
            percent(memcpy.ratio_to(&collective)),
        );
    }
    Ok(())
}

/// The slowest rank of every round.
fn slowest(pg: &ProcessGroup, own: Vec<Duration>) -> Result<Samples> {
    let nanos = own
        .iter()
        .flat_map(|time| (time.as_nanos() as u64).to_le_bytes());
    let all = pg.all_gather_bytes(nanos.collect())?;
    let samples = |bytes: &Vec<u8>| {
        let mut samples = Samples::default();
        for nanos in bytes.chunks_exact(8) {
            let nanos = u64::from_le_bytes(nanos.try_into().expect("eight bytes"));
            samples.push(Duration::from_nanos(nanos));
        }
        samples
    };
    Ok(Samples::slowest(
        &all.iter().map(samples).collect::<Vec<_>>(),
    ))
}

fn percent((least, median): (f64, f64)) -> String {
    format!("{:.0} / {:.0} %", least * 100.0, median * 100.0)
}

/// A plain connection with the other rank.
struct Peer(TcpStream);

impl Peer {
    fn connect(pg: &ProcessGroup) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(FsdpError::other)?;
        let port = listener.local_addr().map_err(FsdpError::other)?.port();
        let port = pg.broadcast_bytes(0, port.to_le_bytes().to_vec())?;
        let port = u16::from_le_bytes(port.try_into().expect("a port is two bytes"));
        let stream = match pg.rank() {
            0 => listener.accept().map(|(stream, _)| stream),
            _ => TcpStream::connect(("127.0.0.1", port)),
        };
        let stream = stream.map_err(FsdpError::other)?;
        stream.set_nodelay(true).map_err(FsdpError::other)?;
        Ok(Self(stream))
    }

    /// Sends and receives at once.
    fn swap(&mut self, source: &[u8], target: &mut [u8]) -> Result<()> {
        let mut sender = self.0.try_clone().map_err(FsdpError::other)?;
        std::thread::scope(|scope| {
            let sending = scope.spawn(move || sender.write_all(source));
            self.0.read_exact(target)?;
            sending.join().expect("sending does not panic")
        })
        .map_err(FsdpError::other)
    }
}
