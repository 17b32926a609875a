//! What users give that cannot work, and what they can ask for.

use std::fs;

use super::{Ran, Running, burn_fsdp};

fn run(words: &str) -> Ran {
    Running::start(&mut burn_fsdp(words)).end()
}

#[test]
fn what_cannot_work_is_told_in_one_line() {
    for (words, told) in [
        (
            "run --nproc 0 -- true",
            vec!["'0'", "--nproc", "number from 1"],
        ),
        ("run --nproc -1 -- true", vec!["-1"]),
        ("run --nproc many -- true", vec!["'many'", "or auto"]),
        ("run -- true", vec!["--nproc"]),
        ("run --nproc 2", vec!["PROGRAM"]),
        ("run --nproc 2 --", vec!["PROGRAM"]),
        ("run --nproc 2 --nprocs 3 -- true", vec!["--nprocs"]),
        (
            "run --nproc 1 --node-rank 0 -- true",
            vec!["--node-rank is 0", "--nnodes"],
        ),
        (
            "run --nproc 1 --nnodes 2 -- true",
            vec!["--node-rank is not given"],
        ),
        (
            "run --nproc 1 --nnodes 2 --node-rank 2 -- true",
            vec!["--node-rank is 2", "--nnodes is 2"],
        ),
        (
            "run --nproc 1 --nnodes 2 --node-rank 0 --master-port 1 -- true",
            vec!["--master-addr is not given"],
        ),
        (
            "run --nproc 1 --nnodes 2 --node-rank 0 --master-addr a -- true",
            vec!["--master-port is not given"],
        ),
        (
            "run --nproc 1 --nnodes 0 -- true",
            vec!["--nnodes", "number from 1"],
        ),
        (
            "run --nproc 1 --master-port 0 -- true",
            vec!["--master-port"],
        ),
        (
            "run --nproc 1 --master-port 65536 -- true",
            vec!["--master-port"],
        ),
        ("run --nproc 1 --grace soon -- true", vec!["--grace"]),
        (
            "run --nproc 1 --secret-file /no/such -- true",
            vec!["--secret-file /no/such"],
        ),
        (
            "run --nproc 1 --log-dir /dev/null/x -- true",
            vec!["--log-dir /dev/null/x"],
        ),
        ("ran --nproc 1 -- true", vec!["ran"]),
        ("", vec!["no command"]),
    ] {
        let ran = run(words);
        ran.fails(2, &told);
        assert_eq!((&*ran.out, ran.err.lines().count()), ("", 1), "{}", ran.err);
    }
}

#[test]
fn auto_without_a_device_says_why_it_fails() {
    for visible in ["", "-1"] {
        let mut command = burn_fsdp("run --nproc auto -- true");
        command.env("CUDA_VISIBLE_DEVICES", visible);
        let why = format!("CUDA_VISIBLE_DEVICES is \"{visible}\"");
        Running::start(&mut command)
            .end()
            .fails(2, &[&why, "give a number"]);
    }
}

#[test]
fn an_empty_secret_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    fs::write(&file, "\n").unwrap();
    let mut command = burn_fsdp("run --nproc 1 --secret-file");
    command.arg(&file).arg("true");
    Running::start(&mut command)
        .end()
        .fails(2, &["--secret-file", "is empty"]);
    let mut command = burn_fsdp("run --nproc 1 -- true");
    command.env("BURN_FSDP_SECRET", "");
    Running::start(&mut command)
        .end()
        .fails(2, &["BURN_FSDP_SECRET is empty"]);
}

#[test]
fn the_spellings_of_torchrun_are_known() {
    let ran = run(
        "run --nproc_per_node=1 --nnodes=2 --node_rank=1 --master_addr=a --master_port=7 \
         -- echo started",
    );
    assert_eq!(
        (ran.status.code(), &*ran.out),
        (Some(0), "[1] started\n"),
        "{}",
        ran.err
    );
}

#[test]
fn help_shows_examples_and_version_the_version() {
    let ran = run("run --help");
    let help = ran.ok().join("\n");
    for word in [
        "Examples:",
        "burn-fsdp run --nproc 4 -- ./train",
        "--failure-grace",
        "SIGUSR1",
    ] {
        assert!(help.contains(word), "{word} in {help}");
    }
    assert!(run("--help").ok().join("\n").contains("run"));
    assert_eq!(
        run("--version").ok(),
        [concat!("burn-fsdp ", env!("CARGO_PKG_VERSION"))]
    );
}
