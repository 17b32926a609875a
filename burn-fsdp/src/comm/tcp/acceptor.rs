//! Who may come in.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::handshake::{HandshakeError, Visitor, receive};
use super::job::Job;

/// How often the listening thread looks for a new connection, or whether it is to end.
const NAP: Duration = Duration::from_millis(10);

/// Listens until it is dropped. A connection that does not prove to be of the job is closed, and
/// changes nothing.
#[derive(Debug)]
pub(super) struct Acceptor {
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Calls `on_visitor` for each process of the job that connects, in a thread of its own.
    pub(super) fn start(
        listener: TcpListener,
        job: Job,
        on_visitor: impl Fn(Visitor) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let closed = Arc::new(AtomicBool::new(false));
        let until = closed.clone();
        let context = Arc::new((job, on_visitor));
        let accept = move || {
            while !until.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let context = context.clone();
                        let greet = move || greet(stream, &context.0, &context.1);
                        if let Err(error) = spawn("greeter", greet) {
                            log::error!("a connection was closed: {error}");
                        }
                    }
                    // Nobody is there, or one has gone while it waited.
                    Err(_) => thread::sleep(NAP),
                }
            }
        };
        Ok(Self {
            closed,
            thread: Some(spawn("acceptor", accept)?),
        })
    }
}

fn greet(stream: TcpStream, job: &Job, on_visitor: &impl Fn(Visitor)) {
    let peer = stream.peer_addr();
    let received = stream
        .set_nonblocking(false)
        .map_err(HandshakeError::from)
        .and_then(|()| receive(stream, job));
    match received {
        Ok(visitor) => on_visitor(visitor),
        Err(error) => log::warn!("a connection from {peer:?} was closed: {error}"),
    }
}

pub(super) fn spawn(
    name: impl Into<String>,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(work)
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It has not panicked: it does nothing that could.
            let _ = thread.join();
        }
    }
}
