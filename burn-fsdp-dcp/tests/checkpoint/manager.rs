//! The checkpoints of a run.

use std::fs;

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_fsdp_dcp::{
    Better, Checkpoint, LoadOptions, Manager, ManagerConfig, ShardedSampler, StepSeed,
};

use super::*;

fn small(pg: &ProcessGroup) -> burn_fsdp::Result<Trained> {
    Trained::new(pg, 3, &FsdpConfig::new())
}

/// Saves these steps, each with a loss.
fn save_steps(root: &Path, config: &ManagerConfig, losses: &[(u64, f64)]) -> Vec<u64> {
    let steps = ranks_ok(2, |pg| {
        let model = small(pg)?.model;
        let mut manager = Manager::new(pg, root, config.clone())?;
        for (step, loss) in losses {
            manager.save(Snapshot::new(*step).model(&model).metric("loss", *loss))?;
        }
        manager.finish()?;
        manager.steps()
    });
    assert_eq!(steps[0], steps[1]);
    steps.into_iter().next().unwrap()
}

const LOSSES: [(u64, f64); 5] = [(10, 3.0), (20, 1.0), (30, f64::NAN), (40, 2.0), (50, 4.0)];

#[test]
fn the_latest_and_the_best_are_kept() {
    for in_background in [false, true] {
        let kept = |config: ManagerConfig| {
            let dir = tempfile::tempdir().unwrap();
            save_steps(dir.path(), &config.in_background(in_background), &LOSSES)
        };
        let config = ManagerConfig::new();
        assert_eq!(kept(config.clone()), [10, 20, 30, 40, 50]);
        assert_eq!(kept(config.clone().with_keep_latest(2)), [40, 50]);
        let best = config.with_keep_best(2, "loss", Better::Lower);
        assert_eq!(kept(best.clone()), [20, 40, 50]);
        assert_eq!(kept(best.with_keep_latest(3)), [20, 30, 40, 50]);
        let best = ManagerConfig::new().with_keep_best(1, "loss", Better::Higher);
        assert_eq!(kept(best), [50]);
        let unknown = ManagerConfig::new().with_keep_best(1, "accuracy", Better::Higher);
        assert_eq!(kept(unknown), [50]);
    }
}

#[test]
fn saves_that_were_cut_short_do_not_count_and_are_cleared_away() {
    let dir = tempfile::tempdir().unwrap();
    for step in [15, 35, 99] {
        let abandoned = dir.path().join(format!("step-{step}"));
        fs::create_dir_all(&abandoned).unwrap();
        fs::write(
            abandoned.join("shard-00000000000000000000000000000001-00000-000.safetensors"),
            "half",
        )
        .unwrap();
    }
    fs::create_dir_all(dir.path().join("step-7-notes")).unwrap();
    fs::write(dir.path().join("step-7-notes/manifest"), "mine").unwrap();
    let config = ManagerConfig::new().with_keep_latest(2);
    assert_eq!(save_steps(dir.path(), &config, &LOSSES[..4]), [30, 40]);
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    // One that is newer may still be under way.
    assert_eq!(names, ["step-30", "step-40", "step-7-notes", "step-99"]);
}

#[test]
fn a_run_goes_on_from_the_newest_good_checkpoint_and_says_what_it_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    save_steps(dir.path(), &ManagerConfig::new(), &LOSSES);
    // The newest has lost its manifest's end, the one before a byte of a tensor.
    let manifest = dir.path().join("step-50/manifest");
    let bytes = fs::read(&manifest).unwrap();
    fs::write(&manifest, &bytes[..bytes.len() - 1]).unwrap();
    let checkpoint = Checkpoint::open(dir.path().join("step-40")).unwrap();
    let file = dir
        .path()
        .join("step-40")
        .join(&checkpoint.manifest().files[1].name);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    for world in [1, 2, 3] {
        for (step, skipped) in ranks_ok(world, |pg| {
            let mut manager = Manager::new(pg, dir.path(), ManagerConfig::new())?;
            let resume = manager.latest()?.expect("there is a good one");
            let skipped: Vec<u64> = resume.skipped.iter().map(|(step, _)| *step).collect();
            Ok((resume.checkpoint.step(), skipped))
        }) {
            assert_eq!((step, &skipped[..]), (30, &[50, 40][..]));
        }
    }
}

#[test]
fn no_checkpoint_is_a_fresh_start_and_none_that_is_good_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let latest = |pg: &ProcessGroup| {
        let mut manager = Manager::new(pg, dir.path().join("run"), ManagerConfig::new())?;
        Ok(manager.latest()?.is_some())
    };
    assert_eq!(ranks_ok(2, latest), [false, false]);
    save_steps(&dir.path().join("run"), &ManagerConfig::new(), &LOSSES[..2]);
    for step in [10, 20] {
        fs::write(dir.path().join(format!("run/step-{step}/manifest")), "").unwrap();
    }
    for result in ranks(2, latest) {
        let error = result.unwrap_err();
        let DcpError::NoneValid { tried, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(tried.len(), 2);
    }
}

#[test]
fn checkpoints_are_due_at_the_interval_and_after_the_first_step_if_so_told() {
    ranks_ok(1, |pg| {
        let due = |config| {
            let manager = Manager::new(pg, "nowhere", config)?;
            Ok::<_, DcpError>(
                (0..9)
                    .filter(|step| manager.is_due(*step))
                    .collect::<Vec<_>>(),
            )
        };
        assert!(due(ManagerConfig::new())?.is_empty());
        assert_eq!(due(ManagerConfig::new().with_interval(4))?, [4, 8]);
        assert_eq!(
            due(ManagerConfig::new().with_interval(4).with_first_step(true))?,
            [1, 4, 8]
        );
        Ok(())
    });
}

#[test]
fn a_model_saved_alone_replaces_the_one_before_and_is_no_step() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(2, |pg| {
        let mut manager = Manager::new(pg, dir.path(), ManagerConfig::new())?;
        let trained = small(pg)?;
        manager.save_model(1, &trained.model)?;
        manager.save_model(2, &trained.train(0..1)?.model)?;
        assert!(manager.steps()?.is_empty());
        Ok(())
    });
    let checkpoint = Checkpoint::open(dir.path().join("model")).unwrap();
    assert_eq!(checkpoint.step(), 2);
    checkpoint
        .load_dense_model(Net::new(3, &device()), &LoadOptions::new())
        .unwrap();
}

/// A run with everything that a checkpoint can hold.
struct Run {
    trained: Trained,
    scheduler: ModuleLrScheduler,
    sampler: ShardedSampler,
    seed: StepSeed,
    losses: Vec<f32>,
}

impl Run {
    fn new(pg: &ProcessGroup) -> burn_fsdp_dcp::Result<Self> {
        let scheduler = LinearLrSchedulerConfig::new(1e-2, 1e-3, 20).init().unwrap();
        Ok(Self {
            trained: Trained::new(pg, 5, &FsdpConfig::new())?,
            scheduler,
            sampler: ShardedSampler::new(21, 2, pg.rank(), pg.world_size(), Some(3))?,
            seed: StepSeed(9),
            losses: Vec::new(),
        })
    }

    fn train(mut self, steps: usize) -> burn_fsdp_dcp::Result<Self> {
        for _ in 0..steps {
            let batch = match self.sampler.next_batch() {
                Some(batch) => batch,
                None => self.sampler.next_batch().expect("an epoch has a batch"),
            };
            let first = batch.first().copied().unwrap_or_default();
            let loss = self.trained.model.loss(0, first..first + 2);
            self.losses.push(loss.clone().into_scalar::<f32>());
            let grads = self.trained.model.try_backward(loss)?;
            let lr = self.scheduler.step();
            self.trained.model = self
                .trained
                .model
                .step(&mut self.trained.optim, lr, grads)?;
        }
        Ok(self)
    }

    fn snapshot(&self, step: u64) -> burn_fsdp_dcp::Result<Snapshot> {
        let snapshot = self.trained.snapshot(step).scheduler(&self.scheduler)?;
        let snapshot = snapshot
            .stateful("sampler", &self.sampler)?
            .state("seed", &self.seed)?;
        snapshot.rank_state("losses", &self.losses)
    }

    fn resume(mut self, pg: &ProcessGroup, checkpoint: &Checkpoint) -> burn_fsdp_dcp::Result<Self> {
        let options = LoadOptions::new();
        let Trained { model, optim } = self.trained;
        let (model, _) = checkpoint.load_model(model, &options)?;
        let (optim, _) = checkpoint.load_optimizer(optim, &model, &options)?;
        self.trained = Trained { model, optim };
        self.scheduler = checkpoint.load_scheduler(self.scheduler)?;
        checkpoint.load_stateful("sampler", &mut self.sampler)?;
        self.seed = checkpoint.state("seed")?;
        self.losses = checkpoint
            .rank_state("losses", pg.rank())?
            .unwrap_or_default();
        Ok(self)
    }
}

#[test]
fn a_run_that_was_stopped_and_gone_on_with_is_the_run_that_was_not() {
    let root = tempfile::tempdir().unwrap();
    for world in [1, 2, 3] {
        let dir = root.path().join(world.to_string());
        let save = |pg: &ProcessGroup, run: &Run, step: u64| {
            Manager::new(pg, &dir, ManagerConfig::new())?.save(run.snapshot(step)?)
        };
        ranks_ok(world, |pg| save(pg, &Run::new(pg)?.train(7)?, 7));
        ranks_ok(world, |pg| {
            let resume = Manager::new(pg, &dir, ManagerConfig::new())?
                .latest()?
                .unwrap();
            let run = Run::new(pg)?.resume(pg, &resume.checkpoint)?.train(7)?;
            save(pg, &run, 1)
        });
        ranks_ok(world, |pg| save(pg, &Run::new(pg)?.train(14)?, 2));
        let [stopped, whole] =
            [1, 2].map(|step| Checkpoint::open(dir.join(format!("step-{step}"))).unwrap());
        assert_eq!(
            super::load::contents(&stopped),
            super::load::contents(&whole),
            "world {world}"
        );
        for rank in 0..world {
            let losses = |c: &Checkpoint| c.rank_state::<Vec<f32>>("losses", rank).unwrap();
            assert_eq!(losses(&stopped), losses(&whole));
            assert_eq!(losses(&whole).unwrap().len(), 14);
        }
        let sampler = |c: &Checkpoint| c.state::<burn_fsdp_dcp::SamplerState>("sampler").unwrap();
        assert_eq!(sampler(&stopped), sampler(&whole));
    }
}

#[test]
fn a_state_that_is_not_there_or_of_another_type_is_told() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(2, |pg| {
        let snapshot = Snapshot::new(1)
            .state("name", "text")?
            .rank_state("mine", &pg.rank())?;
        save(pg, dir.path(), snapshot.state("huge", &f64::INFINITY)?)
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.state::<String>("name").unwrap(), "text");
    assert_eq!(checkpoint.state::<f64>("huge").unwrap(), f64::INFINITY);
    assert_eq!(checkpoint.rank_state::<usize>("mine", 1).unwrap(), Some(1));
    assert_eq!(checkpoint.rank_state::<usize>("mine", 2).unwrap(), None);
    let error = checkpoint.state::<String>("nome").unwrap_err().to_string();
    assert!(
        error.contains("nome") && error.contains("\"name\""),
        "{error}"
    );
    let error = checkpoint.state::<Vec<u64>>("name").unwrap_err();
    assert!(matches!(error, DcpError::BadState { .. }), "{error}");
    assert!(matches!(
        checkpoint.state::<u64>("mine"),
        Err(DcpError::BadState { .. })
    ));
    for taken in ["scheduler", "optimizer.scalars", "model.x"] {
        let error = Snapshot::new(1).state(taken, "x").unwrap_err().to_string();
        assert!(
            error.contains(taken) && error.contains("choose another"),
            "{error}"
        );
        assert!(Snapshot::new(1).rank_state(taken, "x").is_err());
    }
}

/// Where the test below finds what to do, as its own child.
const PROCESS: &str = "BURN_FSDP_DCP_TEST_DROPOUT";

#[test]
fn dropout_goes_on_as_if_a_run_had_never_stopped_where_a_rank_is_a_process() {
    // Burn has one generator a process, so each part of a run is a process of its own.
    let name = "manager::dropout_goes_on_as_if_a_run_had_never_stopped_where_a_rank_is_a_process";
    if let Ok(task) = std::env::var(PROCESS) {
        let (dir, steps) = task.split_once('|').unwrap();
        return train_with_dropout(Path::new(dir), steps.parse().unwrap());
    }
    let root = tempfile::tempdir().unwrap();
    let run = |dir: &str, steps: u64| {
        let task = format!("{}|{steps}", root.path().join(dir).display());
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads", "1"])
            .env(PROCESS, task)
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
    };
    run("whole", 6);
    run("stopped", 3);
    run("stopped", 6);
    let of = |dir: &str| {
        let checkpoint = Checkpoint::open(root.path().join(dir).join("step-6")).unwrap();
        super::load::contents(&checkpoint)
    };
    assert_eq!(of("stopped"), of("whole"));
}

/// Trains up to a step, from the latest checkpoint on, with half of the activations dropped.
fn train_with_dropout(dir: &Path, steps: u64) {
    ranks_ok(1, |pg| {
        let mut manager = Manager::new(pg, dir, ManagerConfig::new())?;
        let mut trained = small(pg)?;
        let mut seed = StepSeed(5);
        let mut first = 1;
        if let Some(resume) = manager.latest()? {
            let (model, optim) = (trained.model, trained.optim);
            let options = LoadOptions::new();
            let (model, _) = resume.checkpoint.load_model(model, &options)?;
            let (optim, _) = resume.checkpoint.load_optimizer(optim, &model, &options)?;
            trained = Trained { model, optim };
            seed = resume.checkpoint.state("seed")?;
            first = resume.checkpoint.step() + 1;
        }
        let dropout = burn::nn::DropoutConfig::new(0.5).init();
        for step in first..=steps {
            seed.reseed(&device(), step, pg.rank());
            let x = dropout.forward(Tensor::<2>::ones([4, 3], &device()));
            let loss = trained.model.layers[0]
                .fc
                .forward(x)
                .powf_scalar(2.0)
                .mean();
            let grads = trained.model.try_backward(loss)?;
            trained.model = trained.model.step(&mut trained.optim, 1e-2, grads)?;
        }
        manager.save(trained.snapshot(steps).state("seed", &seed)?)
    });
}
