//! `train_gpt` with ranks as threads, as processes of a launcher and under mpirun: the same losses, bit
//! for bit, as all engines add up gradients in rank order.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any of these runs takes.
const PATIENCE: Duration = Duration::from_secs(120);

fn train_gpt(out: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train_gpt"));
    command.args(arguments(out));
    command
}

fn arguments(out: &Path) -> Vec<String> {
    let sizes =
        "--d-model 8 --layers 2 --heads 2 --seq 8 --batch-size 2 --accumulate 2 --steps 5 --quiet";
    let sizes = sizes.split(' ').map(String::from);
    let out = ["--out".into(), out.to_str().unwrap().into()];
    sizes.chain(out).collect()
}

fn succeed(mut process: Child) {
    let start = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > PATIENCE {
            process.kill().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let output = process.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let status = status.unwrap_or_else(|| panic!("a rank does not end: {text}"));
    assert!(status.success(), "{status}: {text}");
}

fn free_port() -> String {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap().port().to_string()
}

fn start(command: &mut Command) -> Child {
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let started = command.spawn();
    started.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Loss and gradient norm of each step, as they were written.
fn losses(out: &Path) -> Vec<String> {
    let csv = std::fs::read_to_string(out.join("losses.csv")).unwrap();
    let of_a_step = |line: &str| line.split(',').take(3).collect::<Vec<_>>().join(",");
    csv.lines().map(of_a_step).collect()
}

fn of_threads(dir: &Path, world_size: usize) -> Vec<String> {
    let out = dir.join("threads");
    let world_size = world_size.to_string();
    succeed(start(train_gpt(&out).args(["--world-size", &world_size])));
    let losses = losses(&out);
    assert_eq!(losses.len(), 6, "a header and five steps");
    losses
}

#[test]
fn ranks_that_are_processes_train_as_ranks_that_are_threads() {
    for world_size in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("processes");
        let port = free_port();
        let ranks = (0..world_size).map(|rank: usize| {
            let rank = rank.to_string();
            let mut command = train_gpt(&out);
            let command = command
                .env("RANK", &rank)
                .env("LOCAL_RANK", &rank)
                .env("WORLD_SIZE", world_size.to_string())
                .env("LOCAL_WORLD_SIZE", world_size.to_string())
                // Ranks may spell it in several ways.
                .env(
                    "MASTER_ADDR",
                    ["127.0.0.1", "localhost"][usize::from(rank == "1")],
                )
                .env("MASTER_PORT", &port);
            start(command)
        });
        ranks.collect::<Vec<_>>().into_iter().for_each(succeed);
        assert_eq!(losses(&out), of_threads(dir.path(), world_size));
    }
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_under_mpirun_train_as_ranks_that_are_threads() {
    for world_size in [1, 2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("mpi");
        let mut mpirun = Command::new("mpirun");
        let mpirun = mpirun
            .args(["--oversubscribe", "--bind-to", "none"])
            .args(["-n", &world_size.to_string()])
            .arg(env!("CARGO_BIN_EXE_train_gpt"))
            .args(arguments(&out))
            // In a container one is root.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        succeed(start(mpirun));
        assert_eq!(losses(&out), of_threads(dir.path(), world_size));
    }
}

#[test]
fn ranks_that_are_started_with_different_arguments_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let rank = |rank: &str, lr: &str| {
        let mut command = train_gpt(&dir.path().join(rank));
        let command = command.args(["--lr", lr]).env("MASTER_PORT", &port);
        start(command.env("RANK", rank).env("WORLD_SIZE", "2"))
    };
    for rank in [rank("0", "0.5"), rank("1", "0.25")] {
        let output = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("rank 0 with lr: 0.5, rank 1 with lr: 0.25"),
            "{text}"
        );
    }
}

/// Burn restores an optimizer on its default device, which need not be there.
#[test]
fn a_run_goes_on_whatever_devices_the_program_is_built_for() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, flags: &[&str]| {
        let out = dir.path().join(name);
        let mut command = train_gpt(&out);
        command.arg("--checkpoint-dir").arg(dir.path().join("run"));
        succeed(start(command.args(flags)));
        losses(&out)
    };
    run("first", &["--save-every", "2"]);
    let resumed = run("second", &["--resume", "--world-size", "2"]);
    assert_eq!(resumed, of_threads(dir.path(), 2));
}

#[test]
fn a_rank_beyond_the_world_size_is_an_error_that_names_the_variable() {
    let dir = tempfile::tempdir().unwrap();
    let output = train_gpt(dir.path())
        .env("RANK", "2")
        .env("WORLD_SIZE", "2")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("RANK"), "{text}");
}
