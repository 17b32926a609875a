//! The launcher, run as users run it.

mod failures;
mod nodes;
mod output;
mod signals;
mod usage;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until there is something, and panics if there never is.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        sleep(Duration::from_millis(5));
    }
}

/// A launcher under way. Its output goes to files, as a pipe that somebody keeps open has no end.
struct Running {
    launcher: Child,
    dir: tempfile::TempDir,
}

/// What a run of the launcher gave.
struct Ran {
    status: ExitStatus,
    out: String,
    err: String,
}

/// `burn-fsdp` with words that have no spaces in them, in an environment without a job.
fn burn_fsdp(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-fsdp"));
    command.args(words.split_whitespace());
    command
        .env_remove("BURN_FSDP_SECRET")
        .env_remove("CUDA_VISIBLE_DEVICES");
    command
}

/// Starts `burn-fsdp run` with these flags and a script for `sh` as the program.
fn start(flags: &str, script: &str) -> Running {
    let mut command = burn_fsdp(&format!("run {flags} -- sh -c"));
    command.arg(script);
    Running::start(&mut command)
}

/// The same, to its end.
fn run(flags: &str, script: &str) -> Ran {
    start(flags, script).end()
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let out = File::create(dir.path().join("out")).unwrap();
        Self::start_in(dir, out, command)
    }

    /// With another stdout.
    fn start_into(stdout: impl Into<Stdio>, command: &mut Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("out"), "").unwrap();
        Self::start_in(dir, stdout, command)
    }

    fn start_in(dir: tempfile::TempDir, stdout: impl Into<Stdio>, command: &mut Command) -> Self {
        let stderr = File::create(dir.path().join("err")).unwrap();
        let launcher = command.stdout(stdout).stderr(stderr).spawn().unwrap();
        // The command has the other end of a pipe, too.
        command.stdout(Stdio::null());
        Self { launcher, dir }
    }

    fn out(&self) -> String {
        fs::read_to_string(self.dir.path().join("out")).unwrap()
    }

    fn err(&self) -> String {
        fs::read_to_string(self.dir.path().join("err")).unwrap()
    }

    /// Waits until this many whole lines of stdout have this word.
    fn wait_for_lines(&self, count: usize, word: &str) -> Vec<String> {
        wait_for(word, || {
            let out = self.out();
            let lines = { out.split_inclusive('\n') }.filter_map(|line| line.strip_suffix('\n'));
            let lines = lines.filter(|line| line.contains(word));
            let lines: Vec<String> = lines.map(str::to_string).collect();
            (lines.len() >= count).then_some(lines)
        })
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.launcher.id() as i32), signal).unwrap();
    }

    fn end(mut self) -> Ran {
        let status = wait_for("the launcher to end", || self.launcher.try_wait().unwrap());
        Ran {
            status,
            out: self.out(),
            err: self.err(),
        }
    }
}

/// A test that panics leaves no launcher behind.
impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

impl Ran {
    /// Exit code 0 and nothing of the launcher's own on stderr; the lines of stdout, sorted.
    fn ok(&self) -> Vec<&str> {
        assert_eq!(self.status.code(), Some(0), "{}{}", self.out, self.err);
        assert!(!self.err.contains("burn-fsdp:"), "{}", self.err);
        let mut lines: Vec<&str> = self.out.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// Ended with this code, having said all of these words in one line.
    fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "{}{}", self.out, self.err);
        let is_it = |line: &str| {
            line.starts_with("burn-fsdp: ") && words.iter().all(|word| line.contains(word))
        };
        assert!(self.err.lines().any(is_it), "{words:?} in {}", self.err);
    }
}

/// The process ids in lines that end in one.
fn pids(lines: &[String]) -> Vec<i32> {
    let pid = |line: &String| line.rsplit(' ').next().unwrap().parse().unwrap();
    lines.iter().map(pid).collect()
}

fn wait_for_death_of(pids: &[i32]) {
    for &pid in pids {
        wait_for("a process to end", || (!is_running(pid)).then_some(()));
    }
}

/// A process that has ended may stay as a zombie where nobody asks how it did.
fn is_running(pid: i32) -> bool {
    if cfg!(target_os = "linux") {
        let stat = fs::read_to_string(PathBuf::from(format!("/proc/{pid}/stat")));
        // The state comes after the name, in parentheses.
        let state = stat.map(|stat| stat.rsplit(") ").next().map(|rest| rest.starts_with('Z')));
        matches!(state, Ok(Some(false)))
    } else {
        kill(Pid::from_raw(pid), None).is_ok()
    }
}
