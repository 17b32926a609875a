//! Ranks that fail, and what becomes of the others.

use std::fs;

use super::{Running, burn_fsdp, pids, run, start, wait_for, wait_for_death_of};

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed() {
    let ran = run("--nproc 3", "[ $RANK = 1 ] && exit 7; exit 0");
    ran.fails(7, &["rank 1 ", "exit code 7", " s"]);
}

#[test]
fn the_first_failure_counts() {
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("flag");
    let script = "[ $RANK = 1 ] && exit 3; while [ ! -e \"$FLAG\" ]; do sleep 0.01; done; exit 4";
    let mut command = burn_fsdp("run --nproc 2 --failure-grace 60 -- sh -c");
    command.arg(script).env("FLAG", &flag);
    let running = Running::start(&mut command);
    wait_for("rank 1 to fail", || {
        running.err().contains("rank 1 ended").then_some(())
    });
    fs::write(flag, "").unwrap();
    let ran = running.end();
    ran.fails(3, &["rank 1 ", "exit code 3"]);
    assert!(!ran.err.contains("rank 0 ended"), "{}", ran.err);
}

#[test]
fn a_rank_that_was_killed_is_told_by_its_signal() {
    let ran = run("--nproc 2", "[ $RANK = 1 ] && kill -KILL $$; exit 0");
    ran.fails(128 + 9, &["rank 1 ", "SIGKILL"]);
}

#[test]
fn a_rank_that_fails_ends_the_others_and_what_they_have_started() {
    let script = "[ $RANK = 1 ] && { while [ ! -e \"$FLAG\" ]; do sleep 0.01; done; exit 5; }; \
                  sleep 1000 & echo child $!; echo self $$; wait";
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("flag");
    let mut command = burn_fsdp("run --nproc 3 --failure-grace 0 -- sh -c");
    command.arg(script).env("FLAG", &flag);
    let running = Running::start(&mut command);
    let pids = [
        pids(&running.wait_for_lines(2, "child")),
        pids(&running.wait_for_lines(2, "self")),
    ];
    fs::write(flag, "").unwrap();
    let ran = running.end();
    ran.fails(5, &["rank 1 ", "exit code 5"]);
    ran.fails(5, &["kills", "rank 0, 2"]);
    wait_for_death_of(&pids.concat());
}

#[test]
fn ranks_that_ignore_all_signals_end_all_the_same() {
    let script = "trap '' INT TERM HUP; [ $RANK = 0 ] && exit 5; while :; do sleep 0.1; done";
    run("--nproc 2 --failure-grace 1", script).fails(5, &["kills", "rank 1"]);
}

#[test]
fn the_others_have_time_to_say_why_they_end() {
    let script = "[ $RANK = 0 ] && exit 5; sleep 0.3; echo rank 0 is gone >&2; exit 6";
    let ran = run("--nproc 3 --failure-grace 60", script);
    ran.fails(5, &["rank 0 ", "exit code 5"]);
    for rank in 1..3 {
        assert!(
            ran.err.contains(&format!("[{rank}] rank 0 is gone\n")),
            "{}",
            ran.err
        );
    }
}

#[test]
fn what_a_rank_writes_last_is_shown() {
    let ran = run(
        "--nproc 2",
        "[ $RANK = 1 ] && { printf 'last words'; exit 5; }; exit 0",
    );
    ran.fails(5, &["rank 1 "]);
    assert!(ran.out.contains("[1] last words\n"), "{}", ran.out);
}

#[test]
fn ranks_that_end_well_one_by_one_are_no_failure() {
    run("--nproc 3", "sleep 0.$RANK").ok();
}

#[test]
fn what_a_rank_leaves_running_ends_with_it() {
    let running = start("--nproc 2", "sleep 1000 & echo child $!");
    let children = pids(&running.wait_for_lines(2, "child"));
    running.end().ok();
    wait_for_death_of(&children);
}

#[test]
fn a_program_that_is_not_found_is_named() {
    let ran = Running::start(&mut burn_fsdp("run --nproc 2 -- no-such-program")).end();
    ran.fails(127, &["cannot run no-such-program"]);
    let ran = Running::start(&mut burn_fsdp("run --nproc 2 -- ./no/such/program x")).end();
    ran.fails(127, &["cannot run ./no/such/program"]);
}

#[test]
fn a_program_that_cannot_be_run_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    fs::write(&plain, "").unwrap();
    for (what, name) in [(&*plain, "plain"), (dir.path(), "cannot run")] {
        let ran = Running::start(burn_fsdp("run --nproc 2").arg(what)).end();
        ran.fails(126, &["cannot run", name]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_die_with_a_launcher_that_is_killed() {
    let running = start("--nproc 3", "echo self $$; exec sleep 1000");
    let ranks = pids(&running.wait_for_lines(3, "self"));
    running.send(nix::sys::signal::Signal::SIGKILL);
    running.end();
    wait_for_death_of(&ranks);
}
