//! Signals that come to the launcher.

use std::process::Command;

use nix::sys::signal::Signal;

use super::{Running, pids, run, start, wait_for_death_of};

/// Ranks say when they are ready. The shell waits for `sleep`, as in `wait` it runs traps at once.
const READY: &str = "echo ready; while :; do sleep 1000 & wait $!; done";

#[test]
fn signals_reach_every_rank() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let word = signal.as_str().trim_start_matches("SIG");
        let script = format!("trap 'echo got {word}; exit 0' {word}; {READY}");
        let running = start("--nproc 2 --grace 60", &script);
        running.wait_for_lines(2, "ready");
        running.send(signal);
        let ran = running.end();
        assert_eq!(ran.status.code(), Some(0), "{}", ran.err);
        for rank in 0..2 {
            assert!(
                ran.out.contains(&format!("[{rank}] got {word}\n")),
                "{}",
                ran.out
            );
        }
        assert!(ran.err.contains(signal.as_str()), "{}", ran.err);
    }
}

#[test]
fn a_user_signal_ends_nothing() {
    let script = format!("trap 'echo got one' USR1; trap 'echo got two; exit 3' USR2; {READY}");
    let running = start("--nproc 2 --grace 0 --failure-grace 60", &script);
    running.wait_for_lines(2, "ready");
    running.send(Signal::SIGUSR1);
    running.wait_for_lines(2, "got one");
    running.send(Signal::SIGUSR2);
    running.wait_for_lines(2, "got two");
    running.end().fails(3, &["exit code 3"]);
}

#[test]
fn ranks_that_end_by_the_signal_are_told_by_it() {
    let running = start("--nproc 2 --grace 60", "echo ready; exec sleep 1000");
    running.wait_for_lines(2, "ready");
    running.send(Signal::SIGINT);
    running.end().fails(128 + 2, &["SIGINT", "rank"]);
}

#[test]
fn a_signal_reaches_what_ranks_have_started() {
    let script = "sleep 1000 & echo child $!; wait";
    let running = start("--nproc 2 --grace 60", script);
    let children = pids(&running.wait_for_lines(2, "child"));
    running.send(Signal::SIGTERM);
    running.end().fails(128 + 15, &["SIGTERM"]);
    wait_for_death_of(&children);
}

#[test]
fn ranks_that_do_not_end_are_killed_after_the_grace_time() {
    let script = format!("trap '' INT TERM; {READY}");
    let running = start("--nproc 2 --grace 1", &script);
    running.wait_for_lines(2, "ready");
    running.send(Signal::SIGTERM);
    running.end().fails(128 + 9, &["kills", "rank 0, 1"]);
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let script = format!("trap 'echo again' INT; {READY}");
    let running = start("--nproc 2 --grace 1000000", &script);
    running.wait_for_lines(2, "ready");
    running.send(Signal::SIGINT);
    running.wait_for_lines(2, "again");
    running.send(Signal::SIGINT);
    running.end().fails(128 + 9, &["kills", "rank 0, 1"]);
}

#[test]
fn a_signal_that_the_launcher_was_told_to_ignore_stays_ignored() {
    let mut shell = Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" run --nproc 1 sh -c 'echo ready; exec sleep 1000'";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_burn-fsdp")]);
    let running = Running::start(&mut shell);
    running.wait_for_lines(1, "ready");
    running.send(Signal::SIGHUP);
    running.send(Signal::SIGTERM);
    let ran = running.end();
    ran.fails(128 + 15, &["SIGTERM"]);
    assert!(!ran.err.contains("SIGHUP"), "{}", ran.err);
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_start_with_no_signal_held_back() {
    let ran = run("--nproc 1 --no-prefix", "grep SigBlk /proc/self/status");
    let mask = ran.out.split_whitespace().last().unwrap();
    assert_eq!(u64::from_str_radix(mask, 16), Ok(0), "{}", ran.out);
}
