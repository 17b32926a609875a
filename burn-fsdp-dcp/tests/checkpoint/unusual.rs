//! What once went wrong.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::nn::LinearConfig;
use burn::optim::{AdafactorConfig, SgdConfig};
use burn::tensor::DType;
use burn_fsdp::LaunchConfig;
use burn_fsdp_dcp::{
    Checkpoint, LoadOptions, LocalStorage, Location, Manager, ManagerConfig, WhenBusy,
};

use super::load::contents;
use super::*;

fn trained(pg: &ProcessGroup, steps: usize) -> burn_fsdp::Result<Trained> {
    Trained::new(pg, 5, &FsdpConfig::new())?.train(0..steps)
}

fn overwriting() -> SaveOptions {
    SaveOptions::new().with_overwrite(true)
}

fn assert_good(dir: &Path) -> Checkpoint {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.verify(|_| ()).unwrap();
    checkpoint
}

/// A storage in which putting the manifest in place waits until it is let go.
fn slow_commit(dir: &Path) -> (Location, Arc<AtomicBool>) {
    let go = Arc::new(AtomicBool::new(false));
    let may_go = go.clone();
    let storage = LocalStorage::new(dir).with_watch(move |op, path| {
        let start = Instant::now();
        let is_commit = op == "create" && path.ends_with("manifest.tmp");
        // Not for ever, lest a test that fails hangs instead.
        while is_commit && !may_go.load(Ordering::Acquire) && start.elapsed().as_secs() < 20 {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    (Location::of(Arc::new(storage), ""), go)
}

#[test]
fn a_group_that_fails_while_rank_0_commits_leaves_a_good_checkpoint() {
    for in_background in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        ranks_ok(2, |pg| save(pg, dir.path(), trained(pg, 1)?.snapshot(1)));
        let (to, go) = slow_commit(dir.path());
        let launch = LaunchConfig::new(2).with_timeout(Duration::from_millis(300));
        launch
            .launch(|pg| {
                let snapshot = trained(&pg, 2)?.snapshot(2);
                let mut saver = Saver::new(&pg, overwriting())?;
                let saved = match in_background {
                    true => saver.save_async(&to, snapshot)?.finish(),
                    false => saver.save(&to, snapshot),
                };
                // Rank 1 has given up; rank 0 goes on.
                go.store(true, Ordering::Release);
                saved.map(drop).map_err(Into::into)
            })
            .unwrap_err();
        assert_good(dir.path());
    }
}

#[test]
fn a_damaged_checkpoint_keeps_no_good_one_out_and_is_replaced() {
    for in_background in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let damage =
            |step: u64| fs::write(dir.path().join(format!("step-{step}/manifest")), "x").unwrap();
        let config = ManagerConfig::new()
            .with_keep_latest(2)
            .in_background(in_background);
        let steps = |steps: &'static [u64]| {
            let mut left = ranks_ok(2, |pg| {
                let mut manager = Manager::new(pg, dir.path(), config.clone())?;
                let from = manager.latest()?.map(|resume| resume.checkpoint.step());
                let model = trained(pg, 0)?.model;
                for step in steps {
                    manager.save(Snapshot::new(*step).model(&model))?;
                }
                manager.finish()?;
                Ok((from, manager.steps()?))
            });
            left.pop().unwrap()
        };
        assert_eq!(steps(&[100, 200, 300]), (None, vec![200, 300]));
        damage(300);
        // The run meets the damaged step again.
        assert_eq!(steps(&[250, 300]), (Some(200), vec![250, 300]));
        damage(300);
        assert_eq!(steps(&[260]), (Some(250), vec![250, 260]));
        assert_eq!(steps(&[]), (Some(260), vec![250, 260]));
    }
}

#[test]
fn a_save_is_busy_for_all_ranks_if_it_is_for_one() {
    let root = tempfile::tempdir().unwrap();
    let (to, go) = slow_commit(&root.path().join("first"));
    ranks_ok(2, |pg| {
        let model = trained(pg, 0)?;
        let mut saver = Saver::new(pg, overwriting().with_when_busy(WhenBusy::Fail))?;
        let first = saver.save_async(&to, model.snapshot(1))?;
        while pg.rank() == 1 && !first.is_done() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let second = saver.save_async(root.path().join("second"), model.snapshot(2));
        assert!(
            matches!(second, Err(DcpError::SaveUnderWay { step: 1 })),
            "{second:?}"
        );
        pg.barrier()?;
        go.store(true, Ordering::Release);
        first.finish()?;
        saver
            .save(root.path().join("second"), model.snapshot(2))
            .map(drop)
    });
    assert_good(&root.path().join("first"));
    assert_good(&root.path().join("second"));
}

#[test]
fn two_saves_in_the_background_to_one_directory_leave_the_second() {
    let dir = tempfile::tempdir().unwrap();
    let (to, go) = slow_commit(dir.path());
    ranks_ok(2, |pg| {
        let model = trained(pg, 1)?;
        let mut saver = Saver::new(pg, overwriting())?;
        let first = saver.save_async(&to, model.snapshot(1))?;
        if pg.rank() == 1 {
            while !first.is_done() {
                std::thread::sleep(Duration::from_millis(1));
            }
        } else {
            // Rank 1 writes its part of the second before the first is committed.
            std::thread::sleep(Duration::from_millis(200));
            go.store(true, Ordering::Release);
        }
        let second = saver.save_async(&to, model.snapshot(2))?;
        first.finish()?;
        second.finish().map(drop)
    });
    assert_eq!(assert_good(dir.path()).step(), 2);
}

#[test]
fn ranks_that_save_to_different_places_in_the_background_are_told_so() {
    let root = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let to = root.path().join(pg.rank().to_string());
        Saver::new(pg, SaveOptions::new())?
            .save_async(to, Snapshot::new(1))?
            .finish()
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("different places"), "{error}");
    }
}

#[test]
fn files_of_others_in_the_directory_stay() {
    let dir = tempfile::tempdir().unwrap();
    let names = [
        "shard-00001.tar",
        "part-00000.parquet",
        "part-2 of mine.txt",
        "notes.txt",
    ];
    for name in names {
        fs::write(dir.path().join(name), "mine").unwrap();
    }
    let config = ManagerConfig::new().with_keep_latest(1);
    fs::create_dir(dir.path().join("step-1")).unwrap();
    fs::write(dir.path().join("step-1/shard-mine"), "mine").unwrap();
    fs::write(dir.path().join("step-7"), "no directory").unwrap();
    ranks_ok(2, |pg| {
        save(pg, dir.path(), trained(pg, 0)?.snapshot(1))?;
        let mut manager = Manager::new(pg, dir.path(), config.clone())?;
        for step in 2..5 {
            manager.save(Snapshot::new(step).state("x", &step)?)?;
        }
        assert_eq!(manager.latest()?.unwrap().checkpoint.step(), 4);
        Ok(())
    });
    for name in names.iter().chain(&["step-1/shard-mine", "step-7"]) {
        assert!(dir.path().join(name).exists(), "{name}");
    }
}

#[test]
fn the_state_of_a_parameter_of_another_shape_is_a_difference() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(2, |pg| save(pg, dir.path(), trained(pg, 1)?.snapshot(1)));
    let load = |options: &LoadOptions| {
        ranks(2, |pg| {
            let mut net = Net::new(5, &device());
            net.layers[0].fc = LinearConfig::new(5, 3).init(&device());
            let model = net.fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?;
            let checkpoint = Checkpoint::open_on(pg, dir.path())?;
            Ok(checkpoint.load_optimizer(adamw(), &model, options)?.1)
        })
    };
    for result in load(&LoadOptions::new()) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("layers.0.fc.weight") && error.contains("[5, 3]"),
            "{error}"
        );
    }
    for result in load(&LoadOptions::new().with_partial(true)) {
        let report = result.unwrap();
        assert_eq!(report.mismatched.len(), 2);
        assert!(
            report
                .loaded
                .iter()
                .all(|name| !name.starts_with("layers.0.fc."))
        );
    }
}

#[test]
fn options_mean_the_same_for_an_optimizer_as_for_its_model() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(2, |pg| save(pg, dir.path(), trained(pg, 1)?.snapshot(1)));
    let options = LoadOptions::new()
        .with_rename(r"^layers\.(\d)\.fc\.(weight|bias)$", "$1.$2")
        .unwrap();
    let options = options
        .with_ignore("^(emb|head|mask|counts|layers)")
        .unwrap();
    ranks_ok(2, |pg| {
        let device = device();
        let layers: Vec<Linear> = (0..2)
            .map(|_| LinearConfig::new(5, 5).init(&device))
            .collect();
        let model = layers.fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?;
        let checkpoint = Checkpoint::open_on(pg, dir.path())?;
        let (model, _) = checkpoint.load_model(model, &options)?;
        let report = checkpoint.load_optimizer(adamw(), &model, &options)?.1;
        assert_eq!(
            report.loaded.len(),
            8,
            "two moments of two weights and biases: {report:?}"
        );
        assert!(report.ignored.contains(&"emb.weight".to_string()));
        Ok(())
    });
}

#[test]
fn an_optimizer_whose_state_burn_restores_in_another_type_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let options = (&device(), DType::BF16);
        let param = Param::from_tensor(Tensor::<2>::ones([4, 4], options));
        let mut model =
            Renamed { table: param }.fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?;
        let momentum = burn::optim::momentum::MomentumConfig::new();
        let sgd = || {
            SgdConfig::new()
                .with_momentum(Some(momentum.clone()))
                .init()
        };
        let mut optim = sgd();
        let grads = model.try_backward(model.table.val().sum())?;
        model = model.step(&mut optim, 0.1, grads)?;
        save(
            pg,
            dir.path(),
            Snapshot::new(1).model(&model).optimizer(&optim, &model),
        )?;
        Checkpoint::open_on(pg, dir.path())?
            .load_optimizer(sgd(), &model, &LoadOptions::new())
            .map(drop)
    }) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("BF16") && error.contains("mixed precision"),
            "{error}"
        );
    }
}

/// A model of one matrix.
#[derive(Module, Debug)]
struct Renamed {
    table: Param<Tensor<2>>,
}

#[test]
fn an_optimizer_that_does_not_treat_each_element_by_itself_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let optim = AdafactorConfig::new().init();
        let trained = Trained {
            optim,
            ..trained(pg, 0)?
        };
        save(pg, dir.path(), trained.train(0..1)?.snapshot(1))
    }) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("each element by itself"), "{error}");
    }
}

#[test]
fn what_would_be_saved_in_part_only_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for result in ranks(2, |pg| {
        let trained = trained(pg, 0)?;
        save(pg, dir.path(), trained.snapshot(1).model(&trained.model))
    }) {
        assert!(result.unwrap_err().to_string().contains("two were added"));
    }
}

#[test]
fn a_manifest_of_absurd_length_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = fs::File::create(dir.path().join("manifest")).unwrap();
    manifest.set_len(1 << 42).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, DcpError::Corrupt { .. }), "{error}");
}

#[test]
fn a_tied_parameter_takes_the_first_of_two_values() {
    let dir = tempfile::tempdir().unwrap();
    // Untied, with two values.
    let mut net = Net::new(5, &device());
    net.head = Param::from_tensor(Tensor::ones([7, 5], &device()));
    ranks_ok(1, |pg| {
        save(pg, dir.path(), Snapshot::new(1).dense_model(&net))
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(
        contents(&checkpoint)
            .iter()
            .any(|(name, _)| name == "model.head")
    );
    let (tied, _) = checkpoint
        .load_dense_model(Net::new(5, &device()), &LoadOptions::new())
        .unwrap();
    let first = net.emb.weight.val().into_data();
    tied.head.val().into_data().assert_eq(&first, true);
    tied.emb.weight.val().into_data().assert_eq(&first, true);
}
