//! Trains a model dense and sharded, and compares.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, StateDictTarget, launch};

use crate::{
    Input, SEED, Values, base_device, device, gradients_of, local_values, lock_random,
    saved_values, shard_of, state_values,
};

type Init<M> = Box<dyn Fn(&Device) -> M + Send + Sync>;
type Loss<M> = Box<dyn Fn(&M, &Input) -> Tensor<1> + Send + Sync>;

/// A comparison of a dense and a sharded training, with what varies between tests as fields.
#[allow(missing_debug_implementations)]
pub struct Parity<M> {
    /// Ranks.
    pub world: usize,
    /// Builds the model.
    pub init: Init<M>,
    /// The mean loss over the input's samples.
    pub loss: Loss<M>,
    /// The configuration of the sharded run.
    pub config: Box<dyn Fn() -> FsdpConfig + Send + Sync>,
    /// The optimizer, made once a run and rank.
    pub optimizer: fn() -> ModuleOptimizer,
    /// Learning rate.
    pub lr: f64,
    /// Training steps.
    pub steps: usize,
    /// Samples of one rank.
    pub batch: usize,
    /// Every rank and the dense run get the same samples (batch norm statistics agree).
    pub same_data: bool,
    /// The dense loss is the mean of the ranks' losses, each told its rank.
    pub rank_dependent: bool,
    /// Where to train.
    pub device: Device,
    /// (replicate, shard) of a hybrid mesh.
    pub hybrid: Option<(usize, usize)>,
    /// The dim on which a parameter must be cut; none = every rank holds it whole.
    pub placement: fn(&str, &[usize]) -> Option<usize>,
    /// What the dense run does to its model after a step. Burn's optimizers update the first of two tied
    /// parameters only, so the oracle of a tied model ties it again here.
    pub after_dense_step: fn(M) -> M,
    /// Relative bound on each loss. f32 sums of W partial means differ from one sum in the last bits, and
    /// 20 steps of training carry that on.
    pub loss_bound: f32,
    /// Bound on a gradient, relative to the largest of its tensor.
    pub grad_bound: f32,
    /// Absolute bound on a parameter after the last step.
    pub param_bound: f32,
}

/// What the dense training gave.
#[derive(Debug)]
pub struct DenseRun {
    /// Loss of each step.
    pub losses: Vec<f32>,
    /// Parameters before the first step.
    pub start: Values,
    /// Gradients of step 0.
    pub grads: Values,
    /// Parameters after the last step.
    pub params: Values,
}

/// What a rank of the sharded training gave.
#[derive(Debug, Clone, PartialEq)]
pub struct RankRun {
    /// Loss of each step.
    pub losses: Vec<f32>,
    /// Full parameters before the first step.
    pub start: Values,
    /// This rank's gradient shards of step 0.
    pub grads: Values,
    /// Full parameters after the last step.
    pub params: Values,
    /// This rank's shards after the last step.
    pub shards: Values,
}

/// CubeCL's CPU runtime runs a small matrix product in tens of milliseconds, which a test makes
/// thousands of: fewer steps and ranks there.
fn most_steps() -> usize {
    if is_on_cubecl() { 2 } else { usize::MAX }
}

fn most_ranks() -> usize {
    if is_on_cubecl() { 3 } else { usize::MAX }
}

fn is_on_cubecl() -> bool {
    base_device() != Device::flex()
}

fn bits(run: &RankRun) -> Vec<u32> {
    let values = run
        .params
        .values()
        .chain(run.shards.values())
        .chain(run.grads.values());
    run.losses
        .iter()
        .chain(values.flat_map(|(_, v)| v))
        .map(|x| x.to_bits())
        .collect()
}

impl<M: Module + 'static> Parity<M> {
    /// AdamW, 20 steps, two samples a rank, everything sharded on dim 0.
    pub fn new(
        world: usize,
        init: impl Fn(&Device) -> M + Send + Sync + 'static,
        loss: impl Fn(&M, &Input) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        Self {
            world,
            init: Box::new(init),
            loss: Box::new(loss),
            config: Box::new(FsdpConfig::new),
            optimizer: || AdamWConfig::new().init(),
            lr: 3e-3,
            steps: 20,
            batch: 2,
            same_data: false,
            rank_dependent: false,
            device: device(),
            hybrid: None,
            placement: |_, _| Some(0),
            after_dense_step: |model| model,
            loss_bound: 1e-6,
            grad_bound: 5e-6,
            param_bound: 2e-5,
        }
    }

    /// The steps to train.
    fn steps(&self) -> usize {
        self.steps.min(most_steps())
    }

    /// Trains dense, on one thread and the global batch.
    pub fn dense(&self) -> DenseRun {
        let _random = lock_random();
        self.device.seed(SEED);
        let mut model = (self.init)(&self.device);
        let start = saved_values(&model);
        let mut optim = (self.optimizer)();
        let (mut losses, mut first) = (vec![], Values::new());
        for step in 0..self.steps() {
            let input = |rank: Option<usize>| {
                let rows = match (self.same_data, rank) {
                    (true, _) => 0..self.batch,
                    (false, Some(rank)) => rank * self.batch..(rank + 1) * self.batch,
                    (false, None) => 0..self.world * self.batch,
                };
                Input {
                    step,
                    rows,
                    rank,
                    device: self.device.clone(),
                }
            };
            let loss = if self.rank_dependent {
                let parts = (0..self.world)
                    .map(|rank| (self.loss)(&model, &input(Some(rank))))
                    .collect();
                Tensor::cat(parts, 0).mean()
            } else {
                (self.loss)(&model, &input(None))
            };
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            if step == 0 {
                first = gradients_of(&model, &grads);
            }
            model = (self.after_dense_step)(optim.step(self.lr, model, grads));
        }
        // `valid` brings running statistics up to date.
        DenseRun {
            losses,
            start,
            grads: first,
            params: saved_values(&model.valid()),
        }
    }

    /// Trains sharded.
    ///
    /// # Errors
    ///
    /// What `launch` returns.
    pub fn sharded(&self) -> burn_fsdp::Result<Vec<RankRun>> {
        let _random = lock_random();
        self.device.seed(SEED);
        launch(self.world, |pg| {
            let mesh = match self.hybrid {
                Some((replicate, shard)) => DeviceMesh::hybrid(&pg, replicate, shard)?,
                None => DeviceMesh::shard(&pg),
            };
            let mut model = (self.init)(&self.device).fully_shard(&mesh, &(self.config)())?;
            let start = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
            let mut optim = (self.optimizer)();
            let (mut losses, mut first) = (vec![], Values::new());
            for step in 0..self.steps() {
                let at = if self.same_data {
                    0
                } else {
                    pg.rank() * self.batch
                };
                let rows = at..at + self.batch;
                let input = Input {
                    step,
                    rows,
                    rank: Some(pg.rank()),
                    device: self.device.clone(),
                };
                let loss = (self.loss)(&model, &input);
                losses.push(loss.clone().into_scalar::<f32>());
                let grads = model.try_backward(loss)?;
                if step == 0 {
                    first = gradients_of(&model, &grads);
                }
                model = model.step(&mut optim, self.lr, grads)?;
            }
            drop(model.valid());
            let params = state_values(&model.full_state_dict(StateDictTarget::AllRanks)?);
            Ok(RankRun {
                losses,
                start,
                grads: first,
                params,
                shards: local_values(&model),
            })
        })
    }

    /// Trains dense once and sharded twice, and compares: initial weights, losses, the gradients of step 0,
    /// the final weights, and the two sharded runs bit for bit. On devices of CubeCL a run more goes before
    /// the two, in which Burn picks the fastest of its kernels for what it meets.
    ///
    /// # Panics
    ///
    /// On the first difference.
    #[track_caller]
    pub fn check(&self) {
        if self.world > most_ranks() {
            println!("skipped: world {} is not tested on this device", self.world);
            return;
        }
        let dense = self.dense();
        let mut ranks = self.sharded().expect("the sharded training runs");
        self.compare(&dense, &ranks);
        if is_on_cubecl() {
            ranks = self
                .sharded()
                .expect("the sharded training runs on the kernels picked");
        }
        let again = self.sharded().expect("the sharded training runs again");
        for (rank, (a, b)) in ranks.iter().zip(&again).enumerate() {
            assert_eq!(bits(a), bits(b), "rank {rank}: two runs must be bit-equal");
        }
    }

    /// Compares one sharded run with the dense one.
    ///
    /// # Panics
    ///
    /// On the first difference.
    #[track_caller]
    pub fn compare(&self, dense: &DenseRun, ranks: &[RankRun]) {
        assert_eq!(ranks.len(), self.world);
        let shard_world = self.hybrid.map_or(self.world, |(_, shard)| shard);
        for (rank, run) in ranks.iter().enumerate() {
            assert_eq!(
                dense.start.keys().collect::<Vec<_>>(),
                run.start.keys().collect::<Vec<_>>(),
                "rank {rank}: names of the full state dict"
            );
            for (path, want) in &dense.start {
                assert_eq!(
                    want, &run.start[path],
                    "rank {rank}: initial {path} equals the dense model's"
                );
            }
            assert_eq!(
                dense.grads.keys().collect::<Vec<_>>(),
                run.grads.keys().collect::<Vec<_>>(),
                "rank {rank}: parameters with a gradient"
            );
            for (path, full) in &dense.grads {
                let want = match (self.placement)(path, &full.0) {
                    Some(dim) => shard_of(full, dim, shard_world, rank % shard_world),
                    None => full.clone(),
                };
                let largest = full.1.iter().fold(0f32, |a, b| a.max(b.abs()));
                let got = &run.grads[path];
                assert_eq!(
                    want.0, got.0,
                    "rank {rank}: shape of the gradient of {path}"
                );
                for (i, (a, b)) in want.1.iter().zip(&got.1).enumerate() {
                    assert!(
                        (a - b).abs() <= self.grad_bound * largest + 1e-8,
                        "rank {rank}: gradient of {path}[{i}]: dense {a:e}, sharded {b:e}, largest {largest:e}"
                    );
                }
            }
            for (path, want) in &dense.params {
                let got = &run.params[path];
                assert_eq!(want.0, got.0, "rank {rank}: shape of {path}");
                for (i, (a, b)) in want.1.iter().zip(&got.1).enumerate() {
                    assert!(
                        (a - b).abs() <= self.param_bound,
                        "rank {rank}: {path}[{i}] after {} steps: dense {a:e}, sharded {b:e}",
                        self.steps()
                    );
                }
            }
        }
        for (step, want) in dense.losses.iter().enumerate() {
            let got =
                ranks.iter().map(|run| run.losses[step] as f64).sum::<f64>() / self.world as f64;
            let error = (got - *want as f64).abs() / want.abs() as f64;
            assert!(
                error <= self.loss_bound as f64,
                "loss of step {step}: dense {want:e}, sharded {got:e}, relative difference {error:e}"
            );
        }
        let moved = dense
            .start
            .iter()
            .any(|(path, (_, start))| &dense.params[path].1 != start);
        assert!(
            moved || self.steps == 0,
            "the training changed nothing: the test proves nothing"
        );
    }
}
