//! Saves behind a training that goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn_fsdp_dcp::{Checkpoint, LocalStorage, Location, WhenBusy};

use super::load::contents;
use super::*;

/// A storage whose writes wait until they are let go.
fn held(dir: &Path) -> (Location, Arc<AtomicBool>) {
    let go = Arc::new(AtomicBool::new(false));
    let may_go = go.clone();
    let storage = LocalStorage::new(dir).with_watch(move |_, _| {
        while !may_go.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    (Location::of(Arc::new(storage), ""), go)
}

#[test]
fn what_is_saved_is_what_the_model_was_at_the_call() {
    let root = tempfile::tempdir().unwrap();
    let (at_once, behind) = (root.path().join("at-once"), root.path().join("behind"));
    let (held, go) = held(&behind);
    ranks_ok(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?.train(0..2)?;
        save(pg, &at_once, trained.snapshot(2))?;
        let mut saver = Saver::new(pg, SaveOptions::new())?;
        let pending = saver.save_async(&held, trained.snapshot(2))?;
        let before = pg.counts();
        let trained = trained.train(2..5)?;
        assert!(!pending.is_done());
        assert_eq!(pg.counts(), before);
        go.store(true, Ordering::Release);
        assert_eq!(pending.step(), 2);
        let manifest = pending.finish()?;
        assert_eq!(manifest.step, 2);
        drop(trained);
        Ok(())
    });
    let [a, b] = [at_once, behind].map(|dir| contents(&Checkpoint::open(dir).unwrap()));
    assert_eq!(a, b);
}

#[test]
fn a_second_save_waits_or_fails_as_chosen() {
    let root = tempfile::tempdir().unwrap();
    let (held, go) = held(&root.path().join("first"));
    ranks_ok(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        let mut saver = Saver::new(pg, SaveOptions::new().with_when_busy(WhenBusy::Fail))?;
        let first = saver.save_async(&held, trained.snapshot(1))?;
        let second = saver.save_async(root.path().join("second"), trained.snapshot(2));
        assert!(
            matches!(second, Err(DcpError::SaveUnderWay { step: 1 })),
            "{second:?}"
        );
        // All ranks have been refused.
        pg.barrier()?;
        go.store(true, Ordering::Release);
        first.finish()?;
        saver
            .save_async(root.path().join("second"), trained.snapshot(2))?
            .finish()?;

        let mut saver = Saver::new(pg, SaveOptions::new())?;
        let third = saver.save_async(root.path().join("third"), trained.snapshot(3))?;
        let fourth = saver.save_async(root.path().join("fourth"), trained.snapshot(4))?;
        assert!(third.is_done());
        third.finish()?;
        fourth.finish().map(drop)
    });
    for name in ["first", "second", "third", "fourth"] {
        Checkpoint::open(root.path().join(name))
            .unwrap()
            .verify(|_| ())
            .unwrap();
    }
}

#[test]
fn a_save_that_is_dropped_is_still_finished() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(3, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        drop(Saver::new(pg, SaveOptions::new())?.save_async(dir.path(), trained.snapshot(1))?);
        Ok(())
    });
    Checkpoint::open(dir.path())
        .unwrap()
        .verify(|_| ())
        .unwrap();
}

#[test]
fn a_failure_in_the_background_reaches_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let broken = |op: &'static str, path: &Path| match op {
        "write" if path.to_string_lossy().contains("-00001-") => Err(std::io::Error::other("boom")),
        _ => Ok(()),
    };
    let storage = Arc::new(LocalStorage::new(dir.path()).with_watch(broken));
    for result in ranks(3, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        let to = Location::of(storage.clone(), "");
        Saver::new(pg, SaveOptions::new())?
            .save_async(to, trained.snapshot(1))?
            .finish()
    }) {
        let error = result.unwrap_err();
        assert!(matches!(error, DcpError::OnRank { rank: 1, .. }), "{error}");
        assert!(error.to_string().contains("boom"), "{error}");
    }
    assert!(Checkpoint::open(dir.path()).is_err());
}

#[test]
fn a_save_onto_another_needs_consent() {
    let dir = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        save(pg, dir.path(), trained.snapshot(1))?;
        let error = save(pg, dir.path(), trained.snapshot(2)).unwrap_err();
        assert!(
            matches!(error.cause(), DcpError::AlreadyExists { .. }),
            "{error}"
        );
        let mut saver = Saver::new(pg, SaveOptions::new())?;
        saver.save_async(dir.path(), trained.snapshot(2))?.finish()
    }) {
        let error = result.unwrap_err();
        assert!(
            matches!(error.cause(), DcpError::AlreadyExists { .. }),
            "{error}"
        );
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    assert_eq!(checkpoint.step(), 1);
}

#[test]
fn ranks_that_save_different_things_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let steps = ranks(2, |pg| {
        save(pg, dir.path(), Snapshot::new(pg.rank() as u64))
    });
    assert!(steps.iter().all(|r| {
        r.as_ref()
            .unwrap_err()
            .to_string()
            .contains("different steps")
    }));
    let names = ranks(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        let snapshot = trained.snapshot(1);
        let snapshot = if pg.rank() == 1 {
            snapshot.without("fc.weight")?
        } else {
            snapshot
        };
        save(pg, dir.path(), snapshot)
    });
    for result in names {
        let error = result.unwrap_err();
        assert!(
            matches!(error.cause(), DcpError::InvalidChunks { .. }),
            "{error}"
        );
    }
    assert!(
        std::fs::read_dir(dir.path()).map_or(0, Iterator::count) == 0,
        "nothing is left"
    );
}

#[test]
fn a_layout_that_was_right_once_is_checked_again_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?;
        let mut saver = Saver::new(pg, SaveOptions::new().with_overwrite(true))?;
        for step in 0..3 {
            saver.save(dir.path(), trained.snapshot(step))?;
        }
        let snapshot = trained.snapshot(3);
        let snapshot = if pg.rank() == 1 {
            snapshot.without("fc.weight")?
        } else {
            snapshot
        };
        saver.save(dir.path(), snapshot)
    }) {
        let error = result.unwrap_err();
        assert!(
            matches!(error.cause(), DcpError::InvalidChunks { .. }),
            "{error}"
        );
    }
    assert_eq!(Checkpoint::open(dir.path()).unwrap().step(), 2);
}
