//! One connection between each two ranks.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::handshake::{HandshakeError, Purpose, introduce};
use super::job::Job;
use super::store::{Server, Store, listen_everywhere};
use crate::Result;

/// How often a rank that waits for another looks whether one has failed.
const NAP: Duration = Duration::from_millis(200);

/// Connects this process with all others of the job; a stream for each rank but itself.
///
/// All ranks must call this. Rank 0 may pass the listener at the job's address.
pub(super) fn connect(job: &Job, listener: Option<TcpListener>) -> Result<Vec<Option<TcpStream>>> {
    job.check()?;
    if job.rank > 0 {
        return connect_by_store(job);
    }
    let listener = listener.map_or_else(|| Server::bind(job), Ok)?;
    let server = Server::start(listener, job)?;
    connect_by_store(job).inspect_err(|cause| server.fail(cause.clone()))
}

fn connect_by_store(job: &Job) -> Result<Vec<Option<TcpStream>>> {
    let mut store = Store::connect(job)?;
    match connect_all(job, &mut store) {
        Ok(streams) => {
            store.leave();
            Ok(streams)
        }
        Err(cause) => {
            store.fail(&cause);
            Err(cause)
        }
    }
}

/// A rank connects to those before it, once it knows where all are, and waits for those after it.
fn connect_all(job: &Job, store: &mut Store) -> Result<Vec<Option<TcpStream>>> {
    let deadline = Instant::now() + job.timeout;
    let io_error = |error: io::Error| job.error(format!("rank {}: {error}", job.rank));
    let (own, rank_0) = store.addresses()?;
    let listener = listen_near(own, job).map_err(io_error)?;
    let port = listener.local_addr().map_err(io_error)?.port();
    let (_acceptor, arrivals) = accept(listener, job).map_err(io_error)?;

    let address = SocketAddr::new(own, port).to_string();
    store.set(&key(job.rank), address.as_bytes())?;
    let addresses = addresses_of_all(job, store)?;

    let mut streams: Vec<Option<TcpStream>> = (0..job.world_size).map(|_| None).collect();
    for (rank, address) in addresses.into_iter().enumerate().take(job.rank) {
        let address = seen_from(own, rank_0, address);
        streams[rank] = Some(reach(job, rank, address)?);
    }
    await_later(job, store, &arrivals, &mut streams, deadline)?;
    for stream in streams.iter().flatten() {
        stream.set_nodelay(true).map_err(io_error)?;
    }
    Ok(streams)
}

type Arrivals = Receiver<(usize, TcpStream)>;

/// Lets in the ranks that want to send messages to this one.
fn accept(listener: TcpListener, job: &Job) -> io::Result<(Acceptor, Arrivals)> {
    let (sender, arrivals) = mpsc::channel();
    let context = job.clone();
    let acceptor = Acceptor::start(listener, job.clone(), move |visitor| {
        let rank = visitor.rank;
        match visitor.check(&context, Purpose::Messages(context.rank)) {
            Err(reason) => visitor.refuse(&reason),
            Ok(()) => match visitor.welcome() {
                // Nobody receives once all have come.
                Ok(stream) => drop(sender.send((rank, stream))),
                Err(error) => log::debug!("rank {rank} has gone: {error}"),
            },
        }
    })?;
    Ok((acceptor, arrivals))
}

/// Where each rank says that it is.
fn addresses_of_all(job: &Job, store: &mut Store) -> Result<Vec<SocketAddr>> {
    let address = |rank: usize| {
        let text = store.get(&key(rank))?;
        let text = String::from_utf8_lossy(&text);
        text.parse()
            .map_err(|_| job.error(format!("rank {rank} says that it is at \"{text}\"")))
    };
    (0..job.world_size).map(address).collect()
}

/// Waits for the ranks after this one.
fn await_later(
    job: &Job,
    store: &mut Store,
    arrivals: &Arrivals,
    streams: &mut [Option<TcpStream>],
    deadline: Instant,
) -> Result<()> {
    loop {
        let missing: Vec<usize> = (job.rank + 1..job.world_size)
            .filter(|&rank| streams[rank].is_none())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(job.error(format!(
                "rank {} has waited {:?} for ranks {missing:?} to connect",
                job.rank, job.timeout
            )));
        }
        match arrivals.recv_timeout(NAP) {
            Ok((rank, stream)) if missing.contains(&rank) => streams[rank] = Some(stream),
            Ok((rank, _)) => log::warn!("rank {rank} has connected again, which is ignored"),
            Err(_) => store.check()?,
        }
    }
}

fn key(rank: usize) -> String {
    format!("the address of rank {rank}")
}

/// A listener of the interface by which this process has reached rank 0. If it is of rank 0's host,
/// that may be one that other hosts can't reach.
fn listen_near(own: IpAddr, job: &Job) -> io::Result<TcpListener> {
    match own.is_loopback() && !job.is_on_one_host() {
        true => listen_everywhere(0),
        false => TcpListener::bind((own, 0)),
    }
}

/// The address of a rank as a process at `own` sees it, which has reached rank 0 at `rank_0`. A rank
/// with a loopback address is on rank 0's host.
fn seen_from(own: IpAddr, rank_0: IpAddr, mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_loopback() && !own.is_loopback() {
        address.set_ip(rank_0);
    }
    address
}

fn reach(job: &Job, rank: usize, address: SocketAddr) -> Result<TcpStream> {
    let reached = TcpStream::connect_timeout(&address, job.timeout)
        .map_err(HandshakeError::from)
        .and_then(|mut stream| {
            introduce(&mut stream, job, Purpose::Messages(rank))?;
            Ok(stream)
        });
    reached.map_err(|error| {
        job.error(format!(
            "rank {} could not reach rank {rank} at {address}: {error}",
            job.rank
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_on_the_host_of_rank_0_is_seen_at_the_address_of_that_host() {
        let local: SocketAddr = "127.0.0.1:40".parse().unwrap();
        let remote: SocketAddr = "10.0.0.3:40".parse().unwrap();
        let (own, rank_0) = ("10.0.0.2".parse().unwrap(), "10.0.0.1".parse().unwrap());
        assert_eq!(
            seen_from(own, rank_0, local),
            "10.0.0.1:40".parse().unwrap()
        );
        assert_eq!(seen_from(own, rank_0, remote), remote);
        let loopback = "127.0.0.1".parse().unwrap();
        assert_eq!(seen_from(loopback, loopback, local), local);
    }
}
