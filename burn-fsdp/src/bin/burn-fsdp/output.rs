//! The launcher's stdout and stderr, which all ranks share.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::lines::Lines;

/// Both streams may be one terminal or one file.
static WRITING: Mutex<()> = Mutex::new(());

/// One of the two.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Out,
    Err,
}

impl Stream {
    /// Writes all of it before anything else is written to either.
    pub(crate) fn write(self, bytes: &[u8]) -> io::Result<()> {
        let _writing = WRITING.lock();
        match self {
            Self::Out => {
                let mut out = io::stdout().lock();
                out.write_all(bytes)?;
                out.flush()
            }
            Self::Err => io::stderr().lock().write_all(bytes),
        }
    }
}

/// How long to wait for a reader who has paused the output.
const PATIENCE: Duration = Duration::from_millis(200);

/// Says something on stderr, if there is one. Whoever looks after the ranks can't wait for a reader, so
/// what is not taken soon is said later, or never.
pub(crate) fn complain(what: &str) {
    let text = format!("burn-fsdp: {what}\n");
    let (said, is_said) = channel();
    let say = move || {
        let _ = Stream::Err.write(text.as_bytes());
        let _ = said.send(());
    };
    if std::thread::Builder::new().spawn(say).is_ok() {
        let _ = is_said.recv_timeout(PATIENCE);
    }
}

/// Where one stream of a rank goes.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) stream: Stream,
    /// Before each line.
    pub(crate) prefix: String,
    /// Gets the bytes as they are.
    pub(crate) log: Option<File>,
}

impl Output {
    /// Copies all that comes `from` a rank.
    ///
    /// Ends early if nobody takes it any more. The rank then meets a closed pipe, as it would if it
    /// had been started without a launcher.
    pub(crate) fn copy(mut self, mut from: impl Read) {
        let mut lines = Lines::default();
        let mut buffer = vec![0; 1 << 16];
        let mut is_open = true;
        let mut text = Vec::new();
        loop {
            let bytes = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => &buffer[..len],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            self.log(bytes);
            lines.push(bytes, Instant::now(), |line| self.add(line, &mut text));
            is_open = is_open && self.stream.write(&text).is_ok();
            text.clear();
            if !is_open && self.log.is_none() {
                return;
            }
        }
        lines.finish(|line| self.add(line, &mut text));
        if is_open {
            // There is nothing left to stop.
            let _ = self.stream.write(&text);
        }
    }

    fn add(&self, line: &[u8], text: &mut Vec<u8>) {
        text.extend_from_slice(self.prefix.as_bytes());
        text.extend_from_slice(line);
        text.push(b'\n');
    }

    fn log(&mut self, bytes: &[u8]) {
        if let Some(Err(error)) = self.log.as_mut().map(|log| log.write_all(bytes)) {
            complain(&format!("a log can no longer be written: {error}"));
            self.log = None;
        }
    }
}
