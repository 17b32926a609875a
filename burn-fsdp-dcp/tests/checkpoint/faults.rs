//! What is left when saving fails or a process dies, at any moment.

use std::io;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn_fsdp_dcp::{Checkpoint, LocalStorage, Location, PendingSave};

use super::load::contents;
use super::*;

/// The directory as a storage that counts what changes it, and refuses `ops` from the `limit`-th on.
fn limited(dir: &Path, ops: &'static [&'static str], limit: usize) -> (Location, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let storage = LocalStorage::new(dir).with_watch(move |op, _| {
        if !ops.contains(&op) || counted.fetch_add(1, Ordering::SeqCst) < limit {
            return Ok(());
        }
        Err(io::Error::other("the disk is gone"))
    });
    (Location::of(Arc::new(storage), ""), count)
}

const EVERYTHING: &[&str] = &[
    "mkdir", "create", "write", "fsync", "rename", "unlink", "rmdir",
];
/// What a full disk refuses.
const GROWTH: &[&str] = &["mkdir", "create", "write"];

fn trained(pg: &ProcessGroup, steps: usize) -> burn_fsdp::Result<Trained> {
    Trained::new(pg, 5, &FsdpConfig::new())?.train(0..steps)
}

/// Saves over what is there, in the foreground or the background.
fn overwrite(
    pg: &ProcessGroup,
    to: &Location,
    steps: usize,
    in_background: bool,
) -> burn_fsdp_dcp::Result<()> {
    let snapshot = trained(pg, steps)?.snapshot(steps as u64);
    let options = SaveOptions::new()
        .with_overwrite(true)
        .with_timeout(Duration::from_secs(5));
    let mut saver = Saver::new(pg, options)?;
    if in_background {
        return saver
            .save_async(to, snapshot)
            .and_then(PendingSave::finish)
            .map(drop);
    }
    saver.save(to, snapshot).map(drop)
}

type Contents = Vec<(String, Vec<u8>)>;

/// What an undamaged checkpoint in a directory holds; none if there is none.
fn good(dir: &Path) -> Option<(u64, Contents)> {
    if !dir.join("manifest").exists() {
        return None;
    }
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    Some((checkpoint.step(), contents(&checkpoint)))
}

/// Fails a save at every moment, over an older checkpoint or none.
fn fail_everywhere(ops: &'static [&'static str], over_an_older: bool, in_background: bool) {
    let root = tempfile::tempdir().unwrap();
    let wanted = |steps: usize| {
        let dir = root.path().join(format!("wanted-{steps}"));
        ranks_ok(2, |pg| overwrite(pg, &dir.as_path().into(), steps, false));
        good(&dir).unwrap()
    };
    let (old, new) = (wanted(1), wanted(2));
    for limit in 0.. {
        let dir = root.path().join(format!("at-{limit}"));
        if over_an_older {
            ranks_ok(2, |pg| overwrite(pg, &dir.as_path().into(), 1, false));
        }
        let (to, count) = limited(&dir, ops, limit);
        let results = ranks(2, |pg| overwrite(pg, &to, 2, in_background));
        let found = good(&dir);
        match &found {
            None => assert!(!over_an_older, "at {limit} the old checkpoint is lost"),
            Some(found) => assert!(
                *found == old && over_an_older || *found == new,
                "at {limit}"
            ),
        }
        let was_refused = count.load(Ordering::SeqCst) > limit;
        let errors: Vec<String> = results
            .iter()
            .filter_map(|r| Some(r.as_ref().err()?.to_string()))
            .collect();
        if errors.is_empty() {
            // What is removed after the commit may fail without harm.
            assert_eq!(found.as_ref(), Some(&new), "at {limit}");
        } else {
            assert_eq!(errors.len(), 2, "at {limit} the ranks say {results:?}");
            assert_eq!(errors[0], errors[1], "at {limit}");
            assert!(errors[0].contains("the disk is gone"), "{}", errors[0]);
        }
        if ops == GROWTH && !errors.is_empty() {
            assert_eq!(
                files(&dir),
                files_of_checkpoint(&dir),
                "at {limit} something is left"
            );
        }
        // A later save is none the worse.
        ranks_ok(2, |pg| overwrite(pg, &dir.as_path().into(), 2, false));
        assert_eq!(good(&dir).as_ref(), Some(&new), "after {limit}");
        assert_eq!(
            files(&dir),
            files_of_checkpoint(&dir),
            "after {limit} something is left"
        );
        if !was_refused {
            assert!(limit > 4, "a save changes more than {limit} things");
            return;
        }
    }
}

/// The names of a directory's files.
fn files(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The names of the files that the checkpoint in a directory consists of.
fn files_of_checkpoint(dir: &Path) -> Vec<String> {
    let Ok(checkpoint) = Checkpoint::open(dir) else {
        return Vec::new();
    };
    let mut names: Vec<_> = checkpoint
        .manifest()
        .files
        .iter()
        .map(|f| f.name.clone())
        .collect();
    names.push("manifest".to_string());
    names.sort();
    names
}

#[test]
fn a_save_that_dies_at_any_moment_leaves_no_checkpoint_or_the_whole() {
    fail_everywhere(EVERYTHING, false, false);
}

#[test]
fn a_save_over_another_that_dies_at_any_moment_leaves_the_old_or_the_new() {
    fail_everywhere(EVERYTHING, true, false);
}

#[test]
fn a_save_in_the_background_that_dies_at_any_moment_leaves_the_old_or_the_new() {
    fail_everywhere(EVERYTHING, true, true);
}

#[test]
fn a_full_disk_leaves_the_old_checkpoint_and_nothing_else() {
    fail_everywhere(GROWTH, true, false);
    fail_everywhere(GROWTH, false, true);
}

/// Where the test below finds what to do, as its own child.
const VICTIM: &str = "BURN_FSDP_DCP_TEST_VICTIM";

#[test]
fn a_process_killed_while_it_overwrites_leaves_a_good_checkpoint() {
    if let Ok(dir) = std::env::var(VICTIM) {
        let to = Location::from(dir.as_str());
        for steps in [1, 2].into_iter().cycle() {
            ranks_ok(2, |pg| overwrite(pg, &to, steps, steps == 2));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut seen = [0; 3];
    for round in 0..30u64 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "faults::a_process_killed_while_it_overwrites_leaves_a_good_checkpoint",
            ])
            .env(VICTIM, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while !dir.path().join("manifest").exists() {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "the child saves nothing"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(3_000 + 2_711 * round));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let (step, _) = good(dir.path()).expect("there is a checkpoint");
        seen[step as usize] += 1;
    }
    assert!(seen[1] + seen[2] == 30, "{seen:?}");
}
