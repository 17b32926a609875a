//! Checkpoints of sharded models, as users make them.

mod load;

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::prelude::*;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpModule, FullyShard, Placement, ProcessGroup, StateDict,
    StateDictTarget, launch,
};
use burn_fsdp_dcp::{DcpError, SaveOptions, Saver, Snapshot};

/// Layers of uneven sizes, a matrix kept transposed in memory, a tied head, a frozen and a boolean
/// parameter.
#[derive(Module, Debug)]
pub struct Net {
    emb: Embedding,
    layers: Vec<Layer>,
    head: Param<Tensor<2>>,
    mask: Param<Tensor<1, Bool>>,
    counts: Param<Tensor<1, Int>>,
}

#[derive(Module, Debug)]
pub struct Layer {
    fc: Linear,
    scale: Param<Tensor<1>>,
}

pub fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

impl Net {
    /// `d` is the width.
    pub fn new(d: usize, device: &Device) -> Self {
        let emb = EmbeddingConfig::new(7, d).init(device);
        let layer = |layout, frozen: bool| Layer {
            fc: LinearConfig::new(d, d).with_layout(layout).init(device),
            scale: Param::from_tensor(Tensor::ones([d], device)).set_require_grad(!frozen),
        };
        Self {
            head: emb.weight.clone(),
            emb,
            layers: vec![
                layer(LinearLayout::Row, false),
                layer(LinearLayout::Col, true),
            ],
            mask: Param::initialized(
                Default::default(),
                Tensor::from_bool([true, false, true], device),
            ),
            counts: Param::initialized(Default::default(), Tensor::from_ints([1, 2, 3], device)),
        }
    }

    pub fn loss(&self, step: usize, rows: std::ops::Range<usize>) -> Tensor<1> {
        let device = self.emb.weight.device();
        let token = |row: usize, i: usize| ((step * 5 + row * 3 + i * i) % 7) as i64;
        let tokens: Vec<i64> = rows
            .clone()
            .flat_map(|row| (0..4).map(move |i| token(row, i)))
            .collect();
        let tokens =
            Tensor::<1, Int>::from_data(tokens.as_slice(), &device).reshape([rows.len(), 4]);
        let mut x = self.emb.forward(tokens);
        for layer in &self.layers {
            x = layer.fc.forward(x.clone()).tanh() * layer.scale.val().unsqueeze() + x;
        }
        let logits = x.matmul(self.head.val().transpose().unsqueeze());
        (logits.clone() * logits).mean()
    }
}

pub fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// Ranks of one checkpoint operation, whose errors are the checkpoint's own.
pub fn ranks<T: Send>(
    world: usize,
    run: impl Fn(&ProcessGroup) -> burn_fsdp_dcp::Result<T> + Send + Sync,
) -> Vec<burn_fsdp_dcp::Result<T>> {
    launch(world, |pg| match run(&pg) {
        Err(DcpError::Group(error)) => Err(error),
        result => Ok(result),
    })
    .unwrap()
}

/// The same where all ranks succeed.
pub fn ranks_ok<T: Send>(
    world: usize,
    run: impl Fn(&ProcessGroup) -> burn_fsdp_dcp::Result<T> + Send + Sync,
) -> Vec<T> {
    let results = ranks(world, run).into_iter().enumerate();
    { results }
        .map(|(rank, r)| r.unwrap_or_else(|e| panic!("rank {rank}: {e}")))
        .collect()
}

/// A trained model with its optimizer.
pub struct Trained {
    pub model: FsdpModule<Net>,
    pub optim: ModuleOptimizer,
}

impl Trained {
    pub fn new(pg: &ProcessGroup, d: usize, config: &FsdpConfig) -> burn_fsdp::Result<Self> {
        Self::on(&DeviceMesh::shard(pg), d, config)
    }

    pub fn on(mesh: &DeviceMesh, d: usize, config: &FsdpConfig) -> burn_fsdp::Result<Self> {
        Ok(Self {
            model: Net::new(d, &device()).fully_shard(mesh, config)?,
            optim: adamw(),
        })
    }

    pub fn train(mut self, steps: std::ops::Range<usize>) -> burn_fsdp::Result<Self> {
        for step in steps {
            let rank = self.model.mesh().group().rank();
            let loss = self.model.loss(step, rank * 2..rank * 2 + 2);
            let grads = self.model.try_backward(loss)?;
            self.model = self.model.step(&mut self.optim, 1e-2, grads)?;
        }
        Ok(self)
    }

    pub fn snapshot(&self, step: u64) -> Snapshot {
        let snapshot = Snapshot::new(step).model(&self.model);
        snapshot.optimizer(&self.optim, &self.model).unwrap()
    }

    /// All weights, and all of the optimizer's state, whole, on every rank.
    pub fn whole(&self) -> burn_fsdp::Result<StateDict> {
        self.model.full_state_dict(StateDictTarget::AllRanks)
    }
}

/// Saves once, as all ranks.
pub fn save(pg: &ProcessGroup, dir: &Path, snapshot: Snapshot) -> burn_fsdp_dcp::Result<()> {
    let mut saver = Saver::new(pg, SaveOptions::new())?;
    saver.save(dir, snapshot).map(drop)
}
