//! How the processes of a job find each other: a few keys and values, which rank 0 keeps.
//!
//! Each rank connects to the store once, and stays until it needs it no longer. One that goes
//! before makes the store fail, and with it all ranks that wait for a value.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::acceptor::Acceptor;
use super::handshake::{HandshakeError, Purpose, Visitor, introduce};
use super::job::Job;
use crate::comm::cause;
use crate::{FsdpError, Result};

const MOST_KEY: usize = 256;
const MOST_VALUE: usize = 1 << 16;

/// Longest try of one address.
const ONE_TRY: Duration = Duration::from_secs(10);
/// Pauses between tries: the first, which doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How much longer than the store a rank waits for the store's answer.
const GRACE: Duration = Duration::from_secs(10);
/// How often a store that waits for a value looks whether the rank that asked for it is still there.
const NAP: Duration = Duration::from_millis(200);
/// How long a store that has failed stays, to tell the ranks that are late.
const LINGER: Duration = Duration::from_secs(3);

/// What a rank asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// Gives a key its value.
    Set = 1,
    /// Waits for a key's value.
    Get,
    /// Asks whether the store has failed.
    Check,
    /// Makes the store fail with the cause that is the value.
    Fail,
    /// Needs the store no longer.
    Leave,
}

impl Request {
    const ALL: [Self; 5] = [Self::Set, Self::Get, Self::Check, Self::Fail, Self::Leave];
}

const DONE: u8 = 0;
const FAILED: u8 = 1;

/// A listener of all this host's addresses.
pub(super) fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// The store, in rank 0's process. Dropping it waits for the ranks that still need it.
#[derive(Debug)]
pub(super) struct Server {
    board: Arc<Board>,
    _acceptor: Acceptor,
}

impl Server {
    /// A listener at the job's address.
    pub(super) fn bind(job: &Job) -> Result<TcpListener> {
        let bound = match job.is_on_one_host() {
            true => TcpListener::bind((&*job.host, job.port)),
            // The address may be one that this host does not know as its own.
            false => listen_everywhere(job.port),
        };
        bound.map_err(|error| job.error(format!("rank 0 cannot listen there: {error}")))
    }

    pub(super) fn start(listener: TcpListener, job: &Job) -> Result<Self> {
        let board = Arc::new(Board {
            job: job.clone(),
            state: Mutex::new(State {
                values: HashMap::new(),
                ranks: vec![Presence::Absent; job.world_size],
                failure: None,
            }),
            changed: Condvar::new(),
        });
        let host = board.clone();
        let acceptor = Acceptor::start(listener, job.clone(), move |visitor| host.serve(visitor));
        Ok(Self {
            board,
            _acceptor: acceptor.map_err(|error| job.error(error.to_string()))?,
        })
    }

    /// Makes all ranks fail that wait for a value, or will.
    pub(super) fn fail(&self, cause: FsdpError) {
        self.board.fail(cause);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut state = self.board.state.lock();
        let patience = match state.failure {
            Some(_) => LINGER,
            None => self.board.job.timeout,
        };
        let is_needed = |state: &mut State| state.ranks.iter().any(|r| *r != Presence::Left);
        self.board
            .changed
            .wait_while_for(&mut state, is_needed, patience);
    }
}

#[derive(Debug)]
struct Board {
    job: Job,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    values: HashMap<Vec<u8>, Vec<u8>>,
    ranks: Vec<Presence>,
    failure: Option<FsdpError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Absent,
    Here,
    Left,
}

impl Board {
    fn serve(&self, visitor: Visitor) {
        let rank = visitor.rank;
        let entered = visitor
            .check(&self.job, Purpose::Store)
            .and_then(|()| self.enter(rank));
        if let Err(reason) = entered {
            // It is of the job, so the job has been started wrongly.
            visitor.refuse(&reason);
            self.fail(self.job.error(reason));
            return;
        }
        let answered = visitor.welcome().and_then(|stream| self.answer(stream));
        if let Err(error) = answered {
            log::debug!("rank {rank} has left the store: {error}");
            self.fail(FsdpError::RankFailed {
                rank,
                cause: "its process ended before all ranks had found each other".to_string(),
            });
        }
        self.state.lock().ranks[rank] = Presence::Left;
        self.changed.notify_all();
    }

    fn enter(&self, rank: usize) -> Result<(), String> {
        let presence = &mut self.state.lock().ranks[rank];
        if *presence != Presence::Absent {
            return Err(format!("two processes say that they are rank {rank}"));
        }
        *presence = Presence::Here;
        Ok(())
    }

    /// Answers a rank's requests until it leaves.
    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        loop {
            let (request, key, value) = read_request(&mut stream)?;
            let answer = match request {
                Request::Set => self.set(key, value),
                Request::Get => self.get(&key, &stream)?,
                Request::Check => self.state.lock().check(),
                Request::Fail => {
                    let cause = cause::decode(&value).ok_or_else(|| invalid("no cause"))?;
                    Err(self.fail(cause))
                }
                Request::Leave => Ok(Vec::new()),
            };
            write_answer(&mut stream, &answer)?;
            if request == Request::Leave {
                return Ok(());
            }
        }
    }

    fn set(&self, key: Vec<u8>, value: Vec<u8>) -> Result<Vec<u8>> {
        self.state.lock().values.insert(key, value);
        self.changed.notify_all();
        Ok(Vec::new())
    }

    /// Waits until a rank has told this. An error outside is one of the rank that asks.
    fn get(&self, key: &[u8], asks: &TcpStream) -> io::Result<Result<Vec<u8>>> {
        let deadline = Instant::now() + self.job.timeout;
        let mut state = self.state.lock();
        loop {
            if let Err(cause) = state.check() {
                return Ok(Err(cause));
            }
            if let Some(value) = state.values.get(key) {
                return Ok(Ok(value.clone()));
            }
            if Instant::now() >= deadline {
                let reason = state.lateness(key, &self.job);
                drop(state);
                return Ok(Err(self.fail(self.job.error(reason))));
            }
            let nap = deadline.min(Instant::now() + NAP);
            self.changed.wait_until(&mut state, nap);
            check_open(asks)?;
        }
    }

    /// Fails with `cause`, unless it has failed already; what it failed with first.
    fn fail(&self, cause: FsdpError) -> FsdpError {
        let first = self.state.lock().failure.get_or_insert(cause).clone();
        self.changed.notify_all();
        first
    }
}

/// An error if the other end, which waits for an answer, is gone.
fn check_open(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    let looked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    match looked {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

impl State {
    fn check(&self) -> Result<Vec<u8>> {
        self.failure.clone().map_or(Ok(Vec::new()), Err)
    }

    fn lateness(&self, key: &[u8], job: &Job) -> String {
        let absent = |rank: &usize| self.ranks[*rank] == Presence::Absent;
        let absent: Vec<usize> = (0..job.world_size).filter(absent).collect();
        if absent.is_empty() {
            let key = String::from_utf8_lossy(key);
            return format!("within {:?} no rank has told {key}", job.timeout);
        }
        format!(
            "within {:?} ranks {absent:?} of {} have not come",
            job.timeout, job.world_size
        )
    }
}

/// A rank's connection to the store.
#[derive(Debug)]
pub(super) struct Store {
    job: Job,
    stream: TcpStream,
}

impl Store {
    /// Connects to the store, and tries again until the job's timeout if it is not there yet.
    pub(super) fn connect(job: &Job) -> Result<Self> {
        let deadline = Instant::now() + job.timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match Self::try_connect(job) {
                Ok(stream) => {
                    return Ok(Self {
                        job: job.clone(),
                        stream,
                    });
                }
                Err(error) if error.is_passing() => error,
                Err(error) => return Err(job.error(error.to_string())),
            };
            if Instant::now() + pause >= deadline {
                return Err(job.error(format!(
                    "rank {} could not reach rank 0 there within {:?}: {error}",
                    job.rank, job.timeout
                )));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn try_connect(job: &Job) -> Result<TcpStream, HandshakeError> {
        let addresses = match job.rank == 0 && !job.is_on_one_host() {
            // A host may not reach itself by the address by which others do.
            true => [
                IpAddr::from(Ipv4Addr::LOCALHOST),
                Ipv6Addr::LOCALHOST.into(),
            ]
            .map(|ip| SocketAddr::new(ip, job.port))
            .to_vec(),
            false => job.resolve()?,
        };
        let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, ONE_TRY.min(job.timeout)) {
                Ok(mut stream) => {
                    stream.set_nodelay(true)?;
                    introduce(&mut stream, job, Purpose::Store)?;
                    stream.set_read_timeout(Some(job.timeout + GRACE))?;
                    return Ok(stream);
                }
                Err(error) => failure = error,
            }
        }
        Err(failure.into())
    }

    /// The address by which this process has reached rank 0: its own, and rank 0's.
    pub(super) fn addresses(&self) -> Result<(IpAddr, IpAddr)> {
        let addresses = self
            .stream
            .local_addr()
            .and_then(|own| Ok((own, self.stream.peer_addr()?)));
        let (own, rank_0) = addresses.map_err(|error| self.lost(error))?;
        Ok((own.ip().to_canonical(), rank_0.ip().to_canonical()))
    }

    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(Request::Set, key, value).map(drop)
    }

    /// A key's value; waits for it until the job's timeout.
    pub(super) fn get(&mut self, key: &str) -> Result<Vec<u8>> {
        self.ask(Request::Get, key, &[])
    }

    /// Whether the store has told of a failure. One that has gone tells of none.
    pub(super) fn check(&mut self) -> Result<()> {
        match self.try_ask(Request::Check, "", &[]) {
            Ok(answer) => answer.map(drop),
            Err(_) => Ok(()),
        }
    }

    /// Makes all ranks fail that wait for a value.
    pub(super) fn fail(mut self, cause: &FsdpError) {
        let cause = cause::encode(cause, self.job.rank);
        // A store that has gone has nobody to tell.
        let _ = self.try_ask(Request::Fail, "", &cause);
    }

    pub(super) fn leave(mut self) {
        // A store that has gone does not miss this rank.
        let _ = self.try_ask(Request::Leave, "", &[]);
    }

    /// Asks for a value, and dies before it comes.
    #[cfg(test)]
    pub(super) fn die_asking(mut self, key: &str) {
        write_request(&mut self.stream, Request::Get, key.as_bytes(), &[]).unwrap();
    }

    fn ask(&mut self, request: Request, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        match self.try_ask(request, key, value) {
            Ok(answer) => answer,
            Err(error) => Err(self.lost(error)),
        }
    }

    fn try_ask(
        &mut self,
        request: Request,
        key: &str,
        value: &[u8],
    ) -> io::Result<Result<Vec<u8>>> {
        write_request(&mut self.stream, request, key.as_bytes(), value)?;
        read_answer(&mut self.stream)
    }

    fn lost(&self, error: io::Error) -> FsdpError {
        self.job
            .error(format!("rank {} has lost rank 0: {error}", self.job.rank))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn write_request(
    stream: &mut TcpStream,
    request: Request,
    key: &[u8],
    value: &[u8],
) -> io::Result<()> {
    if key.len() > MOST_KEY || value.len() > most_value(request) {
        return Err(invalid("a key or value is too long for the store"));
    }
    let head = [&[request as u8][..], &(key.len() as u16).to_le_bytes()];
    let lengths = (value.len() as u32).to_le_bytes();
    stream.write_all(&[head[0], head[1], &lengths, key, value].concat())
}

fn read_request(stream: &mut TcpStream) -> io::Result<(Request, Vec<u8>, Vec<u8>)> {
    let mut head = [0; 7];
    stream.read_exact(&mut head)?;
    let request = Request::ALL
        .into_iter()
        .find(|request| *request as u8 == head[0])
        .ok_or_else(|| invalid("an unknown request"))?;
    let key_len = u16::from_le_bytes([head[1], head[2]]) as usize;
    let value_len = u32::from_le_bytes([head[3], head[4], head[5], head[6]]) as usize;
    let key = read_bytes(stream, key_len, MOST_KEY)?;
    let value = read_bytes(stream, value_len, most_value(request))?;
    Ok((request, key, value))
}

fn most_value(request: Request) -> usize {
    match request {
        Request::Fail => cause::MOST_BYTES,
        _ => MOST_VALUE,
    }
}

fn write_answer(stream: &mut TcpStream, answer: &Result<Vec<u8>>) -> io::Result<()> {
    let (status, bytes) = match answer {
        Ok(value) => (DONE, value.clone()),
        Err(cause) => (FAILED, cause::encode(cause, 0)),
    };
    let len = (bytes.len() as u32).to_le_bytes();
    stream.write_all(&[&[status][..], &len, &bytes].concat())
}

fn read_answer(stream: &mut TcpStream) -> io::Result<Result<Vec<u8>>> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    match head[0] {
        DONE => read_bytes(stream, len, MOST_VALUE).map(Ok),
        FAILED => {
            let bytes = read_bytes(stream, len, cause::MOST_BYTES)?;
            let cause = cause::decode(&bytes).ok_or_else(|| invalid("no cause"))?;
            Ok(Err(cause))
        }
        _ => Err(invalid("an unknown answer")),
    }
}

fn read_bytes(stream: &mut TcpStream, len: usize, most: usize) -> io::Result<Vec<u8>> {
    if len > most {
        return Err(invalid("more bytes than the store holds"));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
