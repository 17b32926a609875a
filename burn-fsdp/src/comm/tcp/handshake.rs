//! How two processes find out that they are of one job.
//!
//! Each sends a random challenge, and answers both by an HMAC-SHA256 under the job's secret, which
//! so never travels. This keeps strangers and other jobs out. What follows is neither encrypted nor
//! signed: the network between the ranks must be one that can be trusted.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::job::Job;
use crate::comm::cause::cut;

/// How long each side waits for the other's next words.
const PATIENCE: Duration = Duration::from_secs(10);

const MAGIC: [u8; 8] = *b"burnfsdp";
const VERSION: u32 = 1;
/// Magic, version, challenge.
const OPENING: usize = 8 + 4 + CHALLENGE;
const CHALLENGE: usize = 16;
const PROOF: usize = 32;
/// Rank, world size, purpose.
const HELLO: usize = 3 * 8;
/// Bytes of a refusal's text.
const MOST_TEXT: usize = 1024;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Requests to rank 0's store.
    Store,
    /// Messages to this rank.
    Messages(usize),
}

impl Purpose {
    fn number(self) -> u64 {
        match self {
            Self::Store => u64::MAX,
            Self::Messages(rank) => rank as u64,
        }
    }
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("{0}")]
    Io(io::Error),
    #[error("it does not answer")]
    Silent,
    #[error("what listens there is no process of a burn-fsdp job")]
    Stranger,
    #[error("it speaks version {0} of the protocol, this process version {VERSION}")]
    Version(u32),
    #[error("it has another job secret")]
    Secret,
    #[error("{0}")]
    Refused(String),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Io(error),
        }
    }
}

impl HandshakeError {
    /// Whether it may go better another time: the other side may only just be starting.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Io(_) | Self::Silent)
    }
}

/// Asks to be let in, as the side that connects.
pub(super) fn introduce(
    stream: &mut TcpStream,
    job: &Job,
    purpose: Purpose,
) -> Result<(), HandshakeError> {
    set_patience(stream, Some(PATIENCE))?;
    let ours = challenge();
    stream.write_all(&opening(&ours))?;
    let theirs = read_opening(stream)?;
    let challenges = [&ours[..], &theirs].concat();
    let proof: [u8; PROOF] = read_array(stream)?;
    proof_of(job, "accepts", &challenges, &[])
        .verify_slice(&proof)
        .map_err(|_| HandshakeError::Secret)?;
    let hello = [job.rank as u64, job.world_size as u64, purpose.number()].map(u64::to_le_bytes);
    let hello = hello.concat();
    let proof = proof_of(job, "connects", &challenges, &hello).finalize();
    stream.write_all(&[&hello[..], &proof.into_bytes()].concat())?;
    read_verdict(stream)?;
    set_patience(stream, None)?;
    Ok(())
}

/// One who has proven to be of the job, and waits to be let in.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    purpose: u64,
    stream: TcpStream,
}

/// Lets one who connects prove that it is of the job.
pub(super) fn receive(mut stream: TcpStream, job: &Job) -> Result<Visitor, HandshakeError> {
    set_patience(&stream, Some(PATIENCE))?;
    let theirs = read_opening(&mut stream)?;
    let ours = challenge();
    let challenges = [&theirs[..], &ours].concat();
    let proof = proof_of(job, "accepts", &challenges, &[]).finalize();
    stream.write_all(&[&opening(&ours)[..], &proof.into_bytes()].concat())?;
    let hello: [u8; HELLO] = read_array(&mut stream)?;
    let proof: [u8; PROOF] = read_array(&mut stream)?;
    proof_of(job, "connects", &challenges, &hello)
        .verify_slice(&proof)
        .map_err(|_| HandshakeError::Secret)?;
    let number = |i: usize| u64::from_le_bytes(hello[i * 8..][..8].try_into().expect("8 bytes"));
    Ok(Visitor {
        rank: number(0) as usize,
        world_size: number(1) as usize,
        purpose: number(2),
        stream,
    })
}

impl Visitor {
    /// Why the visitor can't be let in for this, if so.
    pub(super) fn check(&self, job: &Job, purpose: Purpose) -> Result<(), String> {
        if self.world_size != job.world_size {
            return Err(format!(
                "rank {} was started for {} ranks, rank {} for {}",
                self.rank, self.world_size, job.rank, job.world_size
            ));
        }
        if self.rank >= job.world_size {
            return Err(format!("there is no rank {}", self.rank));
        }
        if self.purpose != purpose.number() {
            return Err(format!(
                "rank {} looked for another process, and reached rank {}",
                self.rank, job.rank
            ));
        }
        Ok(())
    }

    pub(super) fn welcome(mut self) -> io::Result<TcpStream> {
        self.stream.write_all(&[0, 0])?;
        set_patience(&self.stream, None)?;
        Ok(self.stream)
    }

    pub(super) fn refuse(mut self, reason: &str) {
        let text = cut(reason, MOST_TEXT).as_bytes();
        let verdict = [&(text.len() as u16).to_le_bytes()[..], text].concat();
        if let Err(error) = self.stream.write_all(&verdict) {
            log::debug!("a refused process has not waited for the reason: {error}");
        }
    }
}

fn set_patience(stream: &TcpStream, patience: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)
}

fn challenge() -> [u8; CHALLENGE] {
    let mut challenge = [0; CHALLENGE];
    getrandom::fill(&mut challenge).expect("the operating system has random numbers");
    challenge
}

fn opening(challenge: &[u8; CHALLENGE]) -> [u8; OPENING] {
    let opening = [&MAGIC[..], &VERSION.to_le_bytes(), challenge].concat();
    opening.try_into().expect("the parts have these lengths")
}

fn read_opening(stream: &mut TcpStream) -> Result<[u8; CHALLENGE], HandshakeError> {
    // Step by step: a stranger may say less than an opening, and then wait.
    if read_array(stream)? != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    match u32::from_le_bytes(read_array(stream)?) {
        VERSION => Ok(read_array(stream)?),
        other => Err(HandshakeError::Version(other)),
    }
}

fn read_verdict(stream: &mut TcpStream) -> Result<(), HandshakeError> {
    let len = u16::from_le_bytes(read_array(stream)?) as usize;
    if len == 0 {
        return Ok(());
    }
    let mut text = vec![0; len.min(MOST_TEXT)];
    stream.read_exact(&mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    Err(HandshakeError::Refused(text))
}

fn read_array<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    stream.read_exact(&mut array)?;
    Ok(array)
}

/// What the side that `side` names, and no other, can say to these challenges.
fn proof_of(job: &Job, side: &str, challenges: &[u8], hello: &[u8]) -> Hmac<Sha256> {
    let mac = Hmac::<Sha256>::new_from_slice(job.secret.as_bytes());
    let mut mac = mac.expect("a key of any length will do");
    for part in [side.as_bytes(), challenges, hello] {
        mac.update(part);
    }
    mac
}
