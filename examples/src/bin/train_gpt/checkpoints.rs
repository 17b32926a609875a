//! Leaving a run and going on with it.

use burn::optim::ModuleOptimizer;
use burn_fsdp::{FsdpError, FsdpModule, ProcessGroup, Result};
use burn_fsdp_dcp::{LoadOptions, Manager, ManagerConfig, SaveOptions, Snapshot};
use burn_fsdp_examples::gpt::Gpt;

use crate::args::Args;
use crate::progress::Record;

/// The checkpoints of a run, if it has any.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    manager: Option<Manager>,
    resumes: bool,
    speaks: bool,
    last_step: usize,
}

impl Checkpoints {
    pub(crate) fn new(args: &Args, group: &ProcessGroup) -> Result<Self> {
        let config = ManagerConfig::new()
            .with_interval(args.save_every as u64)
            .with_keep_latest(args.keep)
            .in_background(true)
            // A step that is trained again, after a resume from an earlier one, is saved again.
            .with_save_options(SaveOptions::new().with_overwrite(true));
        let dir = args.checkpoint_dir.as_deref();
        let manager = dir
            .map(|dir| Manager::new(group, dir, config))
            .transpose()?;
        if let Some(manager) = manager.as_ref().filter(|_| !args.resume)
            && let Some(last) = manager.steps()?.last()
        {
            // A run that begins again among them would go on from the wrong one some day.
            return Err(FsdpError::other(format!(
                "{} is a checkpoint of another run: add --resume, or choose another folder",
                manager.step(*last)
            )));
        }
        Ok(Self {
            manager,
            resumes: args.resume,
            speaks: group.rank() == 0,
            last_step: args.steps,
        })
    }

    /// Loads the newest good checkpoint, if there is one and if so told.
    pub(crate) fn resume(
        &mut self,
        model: FsdpModule<Gpt>,
        optim: ModuleOptimizer,
        records: &mut Vec<Record>,
    ) -> Result<(FsdpModule<Gpt>, ModuleOptimizer)> {
        let Some(manager) = self.manager.as_mut().filter(|_| self.resumes) else {
            return Ok((model, optim));
        };
        let Some(resume) = manager.latest()? else {
            self.say("no checkpoint to go on from: starting anew");
            return Ok((model, optim));
        };
        for (step, error) in &resume.skipped {
            self.say(&format!(
                "passing over the checkpoint of step {step}: {error}"
            ));
        }
        let checkpoint = resume.checkpoint;
        let (model, _) = checkpoint.load_model(model, &LoadOptions::new())?;
        let (optim, _) = checkpoint.load_optimizer(optim, &model, &LoadOptions::new())?;
        *records = checkpoint.state("records")?;
        self.say(&format!("going on after step {}", checkpoint.step()));
        Ok((model, optim))
    }

    pub(crate) fn after_step(
        &mut self,
        model: &FsdpModule<Gpt>,
        optim: &ModuleOptimizer,
        records: &[Record],
    ) -> Result<()> {
        let step = records.len();
        let is_last = step == self.last_step;
        let manager = self.manager.as_mut();
        if let Some(manager) = manager.filter(|m| m.is_due(step as u64) || is_last) {
            let snapshot = Snapshot::new(step as u64)
                .model(model)
                .optimizer(optim, model);
            manager.save(snapshot.state("records", records)?)?;
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        self.manager
            .as_mut()
            .map_or(Ok(()), |manager| Ok(manager.finish()?))
    }

    fn say(&self, what: &str) {
        if self.speaks {
            eprintln!("{what}");
        }
    }
}
