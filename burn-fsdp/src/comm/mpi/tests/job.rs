//! Tests that start themselves again as the ranks of a job.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::comm::mpi::MpiWire;
use crate::comm::wire::Wire;

/// Set for the processes that are ranks: where each leaves what it has to say.
const REPORTS: &str = "BURN_FSDP_MPI_TEST_REPORTS";
/// After which `mpirun` ends a job, in seconds, and after which it is ended itself.
const JOB_LIMIT: &str = "100";
const LIMIT: Duration = Duration::from_secs(120);

/// No wait of a test gets here unless something is wrong.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// What says the words of a rank.
type Say<'a> = &'a (dyn Fn(usize, String) + Sync);

/// How a job ended.
pub(super) struct Outcome {
    /// What each rank said, in rank order; none if it did not get to it.
    pub(super) said: Vec<Option<String>>,
    pub(super) status: ExitStatus,
    output: String,
}

impl Outcome {
    /// What the ranks said, if all have and MPI has nothing to complain about.
    pub(super) fn succeeded(self) -> Vec<String> {
        assert!(self.status.success(), "{}\n{}", self.status, self.output);
        self.all_said()
    }

    /// What the ranks said after a failure, which `mpirun` reports.
    pub(super) fn failed(self) -> Vec<String> {
        assert!(!self.status.success(), "{}", self.output);
        self.all_said()
    }

    fn all_said(self) -> Vec<String> {
        let said = self.said.into_iter().collect::<Option<_>>();
        said.unwrap_or_else(|| panic!("a rank said nothing: {}\n{}", self.status, self.output))
    }
}

/// Runs `rank` on `world_size` ranks. In a process that is one of them it does that; `None` then.
pub(super) fn on_ranks<F>(world_size: usize, timeout: Duration, rank: F) -> Option<Outcome>
where
    F: FnOnce(&Arc<dyn Wire>) -> String,
{
    let mpirun = mpirun(world_size);
    run(mpirun, world_size, test_of::<F>(), on_wire(timeout, rank))
}

/// Runs `rank` in a process that `mpirun` has nothing to do with.
pub(super) fn alone<F>(rank: F) -> Option<Outcome>
where
    F: FnOnce(&Arc<dyn Wire>) -> String,
{
    let program = Command::new(std::env::current_exe().unwrap());
    run(program, 1, test_of::<F>(), on_wire(LONG, rank))
}

/// Runs `process` in `world_size` processes. It gets what says a rank's words.
pub(super) fn on_processes<F>(world_size: usize, process: F) -> Option<Outcome>
where
    F: FnOnce(Say<'_>),
{
    run(mpirun(world_size), world_size, test_of::<F>(), process)
}

fn on_wire(timeout: Duration, rank: impl FnOnce(&Arc<dyn Wire>) -> String) -> impl FnOnce(Say<'_>) {
    move |say| {
        let wire = MpiWire::init(timeout).unwrap();
        say(wire.rank(), rank(&wire));
    }
}

/// The name of the test that `F` is a closure of.
fn test_of<F>() -> &'static str {
    let path = std::any::type_name::<F>().trim_end_matches("::{{closure}}");
    let (_crate, test) = path.split_once("::").unwrap();
    test
}

fn mpirun(world_size: usize) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &world_size.to_string()]);
    mpirun.arg(std::env::current_exe().unwrap()).envs([
        ("MPIEXEC_TIMEOUT", JOB_LIMIT),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ]);
    mpirun
}

/// Runs a test again by `command`, in processes that do what `process` says.
fn run(
    mut command: Command,
    world_size: usize,
    test: &str,
    process: impl FnOnce(Say<'_>),
) -> Option<Outcome> {
    if let Some(reports) = std::env::var_os(REPORTS) {
        let report = |rank: usize| Path::new(&reports).join(rank.to_string());
        process(&|rank, said| fs::write(report(rank), said).unwrap());
        return None;
    }
    let reports = tempfile::tempdir().unwrap();
    let output = reports.path().join("output");
    let file = File::create(&output).unwrap();
    command
        .args([test, "--exact", "--nocapture"])
        .env(REPORTS, reports.path())
        // Where MPI keeps files of the job. Jobs that start at the same time stumble in a common one.
        .env("TMPDIR", reports.path())
        .stdout(file.try_clone().unwrap())
        .stderr(file);
    let mut child = command.spawn().unwrap_or_else(|error| {
        panic!(
            "these tests start ranks by mpirun, which cannot be run ({error}); on Debian and \
             Ubuntu install openmpi-bin and libopenmpi-dev"
        )
    });
    let status = wait(&mut child);
    let report = |rank: usize| fs::read_to_string(reports.path().join(rank.to_string()));
    Some(Outcome {
        said: (0..world_size).map(|rank| report(rank).ok()).collect(),
        status,
        output: String::from_utf8_lossy(&fs::read(&output).unwrap()).into_owned(),
    })
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // The ranks end when they lose it.
    child.kill().unwrap();
    child.wait().unwrap()
}
