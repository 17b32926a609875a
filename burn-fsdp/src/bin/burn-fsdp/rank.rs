//! A rank that is a process.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::output::Output;

/// A rank's process and all that it has started: its process group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group(Pid);

impl Group {
    pub(crate) fn send(self, signal: Signal) {
        // It may have ended by itself.
        let _ = killpg(self.0, signal);
    }
}

/// A rank that has been started.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) number: usize,
    pub(crate) group: Group,
    process: Child,
}

impl Rank {
    /// Starts a rank, which ends with this thread at the latest where the system can do that.
    pub(crate) fn start(number: usize, command: &mut Command) -> io::Result<Self> {
        // Ranks are no longer in the terminal's group, and so could not read from it.
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        #[cfg(target_os = "linux")]
        end_with_launcher(command);
        let process = command.spawn()?;
        let id = i32::try_from(process.id()).map_err(io::Error::other)?;
        Ok(Self {
            number,
            group: Group(Pid::from_raw(id)),
            process,
        })
    }

    /// Copies what the rank writes, on threads that hold `open` until all is copied.
    pub(crate) fn copy_output<T: Clone + Send + 'static>(
        &mut self,
        out: Output,
        err: Output,
        open: &T,
    ) {
        copy(self.process.stdout.take(), out, open.clone());
        copy(self.process.stderr.take(), err, open.clone());
    }

    /// Calls `told` when the rank has ended. What it has left running is ended first.
    pub(crate) fn watch(mut self, told: impl FnOnce(Ending) + Send + 'static) {
        thread::spawn(move || {
            let status = self.process.wait();
            self.group.send(Signal::SIGKILL);
            told(Ending(status.ok()));
        });
    }
}

fn copy<T: Send + 'static>(pipe: Option<impl Read + Send + 'static>, output: Output, open: T) {
    if let Some(pipe) = pipe {
        thread::spawn(move || {
            output.copy(pipe);
            drop(open);
        });
    }
}

/// Kills the process when the thread that started it is gone, be it that the launcher was killed.
#[cfg(target_os = "linux")]
fn end_with_launcher(command: &mut Command) {
    let launcher = nix::unistd::getpid();
    let ask = move || {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // It may have gone before.
        if nix::unistd::getppid() == launcher {
            Ok(())
        } else {
            Err(nix::errno::Errno::ESRCH.into())
        }
    };
    // SAFETY: both calls are allowed between fork and exec, and allocate nothing.
    unsafe { command.pre_exec(ask) };
}

/// How a rank ended. Not known if the system does not tell, as where SIGCHLD is ignored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending(Option<ExitStatus>);

impl Ending {
    pub(crate) fn is_success(self) -> bool {
        self.0.is_some_and(|status| status.success())
    }

    /// As shells count: 128 and the signal's number if there was one.
    pub(crate) fn exit_code(self) -> u8 {
        let code = match (self.0, self.signal()) {
            (_, Some(signal)) => 128 + signal,
            (Some(status), None) => status.code().unwrap_or(1),
            (None, None) => 1,
        };
        u8::try_from(code).unwrap_or(1)
    }

    fn signal(self) -> Option<i32> {
        self.0?.signal()
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0, self.signal()) {
            (None, _) => f.write_str("in an unknown way"),
            (_, None) => write!(f, "with exit code {}", self.exit_code()),
            (_, Some(number)) => match Signal::try_from(number) {
                Ok(signal) => write!(f, "by {signal}"),
                Err(_) => write!(f, "by signal {number}"),
            },
        }
    }
}
