//! Signals that the launcher passes on.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::thread;

use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

const PASSED_ON: [Signal; 5] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// The signals, held back until they are waited for.
#[derive(Debug)]
pub(crate) struct Signals {
    held: SigSet,
    /// What was held back before.
    inherited: SigSet,
}

impl Signals {
    /// Holds the signals back in this thread and in those it starts from now on.
    ///
    /// What whoever started the launcher has set to be ignored, as nohup does with SIGHUP, stays so.
    pub(crate) fn hold() -> io::Result<Self> {
        let mut held = SigSet::empty();
        for signal in PASSED_ON {
            if !is_ignored(signal)? {
                held.add(signal);
            }
        }
        let inherited = held.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self { held, inherited })
    }

    /// Lets the command have the signals again.
    pub(crate) fn release_in(&self, command: &mut Command) {
        let inherited = self.inherited;
        // SAFETY: setting the mask is allowed between fork and exec, and allocates nothing.
        unsafe { command.pre_exec(move || Ok(inherited.thread_set_mask()?)) };
    }

    /// Calls `told` for each signal that comes, those since [`hold`](Self::hold) included.
    pub(crate) fn watch(self, told: impl Fn(Signal) + Send + 'static) {
        thread::spawn(move || {
            while let Ok(signal) = self.held.wait() {
                told(signal);
            }
        });
    }
}

fn is_ignored(signal: Signal) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing, and fills `action` if it succeeds.
    let action = unsafe {
        if libc::sigaction(signal as libc::c_int, ptr::null(), action.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        action.assume_init()
    };
    Ok(action.sa_sigaction == libc::SIG_IGN)
}
