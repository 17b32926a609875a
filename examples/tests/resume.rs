//! `train_gpt`, killed and gone on with.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn train_gpt(dir: &Path, world_size: usize, steps: usize, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train_gpt"));
    command
        .args([
            "--d-model",
            "8",
            "--layers",
            "2",
            "--heads",
            "2",
            "--seq",
            "8",
            "--quiet",
        ])
        .args(["--batch-size", "2", "--save-every", "5", "--keep", "1000"])
        .args([
            "--world-size",
            &world_size.to_string(),
            "--steps",
            &steps.to_string(),
        ])
        .arg("--out")
        .arg(dir)
        .arg("--checkpoint-dir")
        .arg(dir.join("checkpoints"))
        .args(more);
    command
}

/// The losses that a run has written, by step.
fn losses(dir: &Path) -> Vec<String> {
    let csv = std::fs::read_to_string(dir.join("losses.csv")).unwrap();
    csv.lines()
        .skip(1)
        .map(|line| line.split(',').nth(1).unwrap().to_string())
        .collect()
}

fn succeed(output: Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// Kills a run once the checkpoint of a step is there.
fn kill_after_step(mut run: Child, dir: &Path, step: usize) {
    let manifest = dir.join(format!("checkpoints/step-{step}/manifest"));
    let start = Instant::now();
    while !manifest.exists() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{manifest:?} does not come"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    run.kill().unwrap();
    run.wait().unwrap();
}

/// Runs that are killed are long enough not to end before.
const STEPS: usize = 300;

fn killed(dir: &Path, world_size: usize) {
    let run = train_gpt(dir, world_size, STEPS, &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    kill_after_step(run, dir, 10);
    assert!(
        !dir.join("losses.csv").exists(),
        "the run has ended before it was killed"
    );
}

#[test]
fn a_run_that_was_killed_goes_on_with_the_losses_of_one_that_was_not() {
    let root = tempfile::tempdir().unwrap();
    let whole = root.path().join("whole");
    succeed(train_gpt(&whole, 2, STEPS, &[]).output().unwrap());
    let want = losses(&whole);
    assert_eq!(want.len(), STEPS);

    let dir = root.path().join("killed");
    killed(&dir, 2);
    let said = succeed(train_gpt(&dir, 2, STEPS, &["--resume"]).output().unwrap());
    assert!(said.contains("going on after step"), "{said}");
    assert_eq!(losses(&dir), want);
}

#[test]
fn a_run_that_was_killed_goes_on_at_another_world_size() {
    let root = tempfile::tempdir().unwrap();
    for (before, after) in [(2, 3), (3, 1)] {
        let dir = root.path().join(format!("{before}-{after}"));
        killed(&dir, before);
        let said = succeed(
            train_gpt(&dir, after, STEPS, &["--resume"])
                .output()
                .unwrap(),
        );
        assert!(said.contains("going on after step"), "{said}");
        let losses = losses(&dir);
        assert_eq!(losses.len(), STEPS);
        let at = |range: std::ops::Range<usize>| -> f64 {
            let of_range = losses[range.clone()]
                .iter()
                .map(|loss| loss.parse::<f64>().unwrap());
            of_range.sum::<f64>() / range.len() as f64
        };
        assert!(
            at(STEPS - 20..STEPS) < at(0..20),
            "the loss does not fall: {losses:?}"
        );
    }
}

#[test]
fn a_run_starts_anew_without_checkpoints_and_not_among_those_of_another() {
    let root = tempfile::tempdir().unwrap();
    let said = succeed(
        train_gpt(root.path(), 2, 6, &["--resume"])
            .output()
            .unwrap(),
    );
    assert!(said.contains("starting anew"), "{said}");
    assert!(root.path().join("checkpoints/step-6/manifest").exists());

    let output = train_gpt(root.path(), 2, 6, &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("add --resume"),
        "{said}"
    );
}
