//! Files that are not as they were written.

use std::fs;
use std::path::PathBuf;

use burn_fsdp_dcp::{Checkpoint, LoadOptions};

use super::*;

/// A checkpoint of two ranks.
fn saved(dir: &Path) {
    ranks_ok(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?.train(0..1)?;
        save(pg, dir, trained.snapshot(1).state("note", "a value")?)
    });
}

fn shard(dir: &Path, rank: usize) -> PathBuf {
    let checkpoint = Checkpoint::open(dir).unwrap();
    dir.join(&checkpoint.manifest().files[rank].name)
}

fn verify(dir: &Path) -> burn_fsdp_dcp::Result<()> {
    Checkpoint::open(dir)?.verify(|_| ())
}

/// What two ranks say of loading, which must be the same.
fn load(dir: &Path) -> DcpError {
    let errors: Vec<DcpError> = ranks(2, |pg| {
        let model = Trained::new(pg, 5, &FsdpConfig::new())?.model;
        Checkpoint::open_on(pg, dir)?.load_model(model, &LoadOptions::new())
    })
    .into_iter()
    .map(|result| result.expect_err("the checkpoint is damaged"))
    .collect();
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    errors.into_iter().next().unwrap().cause().clone()
}

#[test]
fn every_flipped_byte_of_every_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for file in [
        "manifest".into(),
        shard(dir.path(), 0),
        shard(dir.path(), 1),
    ] {
        let path = dir.path().join(file);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&path, damaged).unwrap();
            let error = verify(dir.path())
                .expect_err("a byte has changed")
                .to_string();
            assert!(error.contains(path.to_str().unwrap()), "{at}: {error}");
        }
        fs::write(&path, bytes).unwrap();
    }
    verify(dir.path()).unwrap();
}

#[test]
fn every_truncation_of_every_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for file in ["manifest".into(), shard(dir.path(), 0)] {
        let path = dir.path().join(file);
        let bytes = fs::read(&path).unwrap();
        for len in 0..bytes.len() {
            fs::write(&path, &bytes[..len]).unwrap();
            let error = verify(dir.path())
                .expect_err("the file is too short")
                .to_string();
            assert!(error.contains(path.to_str().unwrap()), "{len}: {error}");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        verify(dir.path()).expect_err("the file is too long");
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_damaged_tensor_is_named_with_file_and_chunk_to_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let path = shard(dir.path(), 1);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let chunk = checkpoint.manifest().tensors["model.layers.0.fc.weight"]
        .chunks
        .last()
        .unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[chunk.extent.offset as usize] ^= 1;
    fs::write(&path, bytes).unwrap();
    match load(dir.path()) {
        DcpError::Checksum {
            file,
            tensor,
            offsets,
            block,
        } => {
            assert_eq!(file, path.to_str().unwrap());
            assert_eq!(tensor, "model.layers.0.fc.weight");
            assert_eq!((offsets, block), (vec![3, 0], 0));
        }
        error => panic!("{error}"),
    }
}

#[test]
fn a_missing_shard_and_a_shard_of_another_checkpoint_are_told_apart() {
    let root = tempfile::tempdir().unwrap();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    saved(&a);
    saved(&b);
    let path = shard(&a, 1);
    fs::copy(shard(&b, 1), &path).unwrap();
    assert!(matches!(load(&a), DcpError::ForeignShard { .. }));
    fs::remove_file(&path).unwrap();
    assert!(matches!(load(&a), DcpError::MissingFile { .. }));
    fs::create_dir(&path).unwrap();
    assert!(matches!(load(&a), DcpError::Io { .. }));
}

#[test]
fn what_is_no_checkpoint_is_said_to_be_none() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(load(dir.path()), DcpError::NotACheckpoint { .. }));
    assert!(matches!(
        load(&dir.path().join("nowhere")),
        DcpError::NotACheckpoint { .. }
    ));
    fs::write(dir.path().join("manifest"), "something else altogether").unwrap();
    assert!(matches!(load(dir.path()), DcpError::NotACheckpoint { .. }));
}

#[test]
fn another_version_of_the_format_is_said_to_be_one() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let path = dir.path().join("manifest");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 9;
    fs::write(&path, bytes).unwrap();
    assert!(matches!(
        load(dir.path()),
        DcpError::UnsupportedVersion {
            found: 9,
            supported: 1,
            ..
        }
    ));
}
