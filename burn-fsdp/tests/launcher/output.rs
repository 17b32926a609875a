//! What ranks are told, and what becomes of what they write.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Running, burn_fsdp, is_running, pids, run, start, wait_for};

#[test]
fn every_rank_is_told_its_place() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR";
    assert_eq!(
        run("--nproc 3", script).ok(),
        [
            "[0] 0 3 0 3 127.0.0.1",
            "[1] 1 3 1 3 127.0.0.1",
            "[2] 2 3 2 3 127.0.0.1"
        ]
    );
}

#[test]
fn all_ranks_have_one_port_and_one_secret_that_no_other_job_has() {
    let job = || {
        let ran = run(
            "--nproc 3 --no-prefix",
            "echo $MASTER_PORT $BURN_FSDP_SECRET",
        );
        let all: BTreeSet<String> = ran.ok().into_iter().map(str::to_string).collect();
        assert_eq!(all.len(), 1, "{all:?}");
        all.into_iter().next().unwrap()
    };
    let (one, other) = (job(), job());
    let (port, secret) = one.split_once(' ').unwrap();
    assert!(port.parse::<u16>().unwrap() > 0);
    assert_eq!(secret.len(), 32);
    assert_ne!(secret, other.split_once(' ').unwrap().1);
}

#[test]
fn a_given_address_and_port_are_passed_on() {
    let ran = run(
        "--nproc 1 --master-addr localhost --master-port 1234",
        "echo $MASTER_ADDR:$MASTER_PORT",
    );
    assert_eq!(ran.ok(), ["[0] localhost:1234"]);
}

#[test]
fn the_environment_is_passed_on() {
    let mut command = burn_fsdp("run --nproc 2 -- sh -c");
    command
        .arg("echo $FLAVOR $BURN_FSDP_SECRET")
        .env("FLAVOR", "plum")
        .env("BURN_FSDP_SECRET", "hush");
    let ran = Running::start(&mut command).end();
    assert_eq!(ran.ok(), ["[0] plum hush", "[1] plum hush"]);
}

#[test]
fn the_secret_of_a_file_goes_before_that_of_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secret");
    fs::write(&file, "mum\n").unwrap();
    let mut command = burn_fsdp("run --nproc 1 --secret-file");
    command
        .arg(file)
        .args(["sh", "-c", "echo $BURN_FSDP_SECRET"])
        .env("BURN_FSDP_SECRET", "hush");
    assert_eq!(Running::start(&mut command).end().ok(), ["[0] mum"]);
}

#[test]
fn arguments_of_the_program_are_its_own() {
    let mut command = burn_fsdp("run --nproc 1 -- sh -c");
    command.args(["printf '%s\\n' \"$@\"", "sh", "--nproc", "2", "--", "-x y"]);
    let ran = Running::start(&mut command).end();
    assert_eq!(ran.out, "[0] --nproc\n[0] 2\n[0] --\n[0] -x y\n");
}

#[test]
fn the_two_dashes_can_be_left_out() {
    let ran = Running::start(&mut burn_fsdp("run --nproc 1 echo --nproc x")).end();
    assert_eq!(ran.ok(), ["[0] --nproc x"]);
}

#[test]
fn auto_is_a_rank_for_each_visible_device() {
    let mut command = burn_fsdp("run --nproc auto -- sh -c");
    command
        .arg("echo $WORLD_SIZE $CUDA_VISIBLE_DEVICES")
        .env("CUDA_VISIBLE_DEVICES", "5,7");
    let ran = Running::start(&mut command).end();
    assert_eq!(ran.ok(), ["[0] 2 5,7", "[1] 2 5,7"]);
}

#[test]
fn stdout_and_stderr_stay_apart() {
    let ran = run("--nproc 1", "echo to stdout; echo to stderr >&2");
    assert_eq!(
        (&*ran.out, &*ran.err),
        ("[0] to stdout\n", "[0] to stderr\n")
    );
}

#[test]
fn lines_that_come_in_parts_are_whole() {
    let script = "for i in 1 2 3; do printf 'part '; sleep 0.05; printf \"of $i\\n\"; done";
    let ran = run("--nproc 3", script);
    let lines = ran.ok();
    let expected = |rank| (1..4).map(move |i| format!("[{rank}] part of {i}"));
    let expected: Vec<String> = (0..3).flat_map(expected).collect();
    assert_eq!(lines, expected);
}

#[test]
fn many_lines_at_once_are_not_torn() {
    let script = "i=0; while [ $i -lt 2000 ]; do echo $RANK-$i-abcdefghijklmnopqrstuvwxyz; \
                  i=$((i+1)); done";
    let ran = run("--nproc 4", script);
    for rank in 0..4 {
        let prefix = format!("[{rank}] ");
        let lines = ran
            .out
            .lines()
            .filter_map(|line| line.strip_prefix(&prefix));
        let expected = (0..2000).map(|i| format!("{rank}-{i}-abcdefghijklmnopqrstuvwxyz"));
        assert!(lines.eq(expected), "rank {rank}");
    }
    assert_eq!(ran.ok().len(), 8000);
}

#[test]
fn a_last_line_without_an_end_gets_one() {
    let ran = run("--nproc 2", "printf 'no end'; printf 'nor here' >&2");
    assert_eq!(ran.ok(), ["[0] no end", "[1] no end"]);
    assert!(ran.err.contains("[0] nor here\n") && ran.err.contains("[1] nor here\n"));
}

#[test]
fn a_line_is_shown_before_the_rank_ends() {
    let running = start("--nproc 1", "echo here; exec sleep 1000");
    assert_eq!(running.wait_for_lines(1, "here"), ["[0] here"]);
}

#[test]
fn bytes_that_are_no_text_pass() {
    let running = start("--nproc 1 --no-prefix", "printf '\\377\\000\\376\\n'");
    let out = running.dir.path().join("out");
    let bytes = wait_for("a line", || {
        let bytes = fs::read(&out).unwrap();
        (bytes.len() >= 4).then_some(bytes)
    });
    assert_eq!(bytes, b"\xff\x00\xfe\n");
}

#[test]
fn a_progress_bar_leaves_its_first_and_last_state() {
    let ran = run("--nproc 1", "printf '10%%\\r50%%\\r100%%\\ndone\\n'");
    assert_eq!(ran.out, "[0] 10%\n[0] 100%\n[0] done\n");
}

#[test]
fn without_prefixes_lines_are_as_they_were() {
    let ran = run("--nproc 2 --no-prefix", "echo same");
    assert_eq!(ran.out, "same\nsame\n");
}

#[test]
fn logs_have_what_each_rank_wrote_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().join("some/logs");
    for _ in 0..2 {
        let mut command = burn_fsdp("run --nproc 2 --log-dir");
        let script = "printf \"1%%\\r$RANK\"; echo problem >&2";
        command.arg(&logs).args(["sh", "-c", script]);
        let ran = Running::start(&mut command).end();
        assert_eq!(ran.ok(), ["[0] 0", "[0] 1%", "[1] 1", "[1] 1%"]);
    }
    let log = |name: &str| fs::read_to_string(logs.join(name)).unwrap();
    assert_eq!(log("rank-0.out"), "1%\r01%\r0");
    assert_eq!(log("rank-1.out"), "1%\r11%\r1");
    assert_eq!(log("rank-1.err"), "problem\nproblem\n");
}

#[test]
fn ranks_have_no_input() {
    assert_eq!(run("--nproc 2", "cat; echo $?").ok(), ["[0] 0", "[1] 0"]);
}

#[test]
fn a_reader_who_leaves_ends_the_ranks_as_without_a_launcher() {
    let (reader, writer) = io::pipe().unwrap();
    let running = Running::start_into(writer, &mut burn_fsdp("run --nproc 2 -- yes"));
    drop(reader);
    assert_ne!(running.end().status.code(), Some(0));
}

#[test]
fn ranks_are_looked_after_while_nobody_reads() {
    // Kept open, and full before long.
    let (_reader, writer) = io::pipe().unwrap();
    let script = "[ $RANK = 1 ] && { sleep 1; exit 3; }; exec yes";
    let mut command = burn_fsdp("run --nproc 2 --failure-grace 1 -- sh -c");
    let running = Running::start_into(writer, command.arg(script));
    assert_eq!(running.end().status.code(), Some(3));
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_daemon_keeps_open_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let script = "setsid sh -c 'echo daemon $$; touch \"$FLAG\"; exec sleep 1000' & \
                  while [ ! -e \"$FLAG\" ]; do sleep 0.01; done";
    let mut command = burn_fsdp("run --nproc 1 -- sh -c");
    command.arg(script).env("FLAG", dir.path().join("flag"));
    let running = Running::start(&mut command);
    let daemon = pids(&running.wait_for_lines(1, "daemon"))[0];
    let ran = running.end();
    let survived = is_running(daemon);
    let _ = kill(Pid::from_raw(daemon), Signal::SIGKILL);
    ran.ok();
    assert!(survived);
}
