//! Checkpoints of sharded models, as users make them.

#[path = "../common/mod.rs"]
mod common;

mod background;
mod damage;
mod differences;
mod faults;
mod load;
mod manager;
mod unusual;

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::TensorData;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpModule, FullyShard, Placement, ProcessGroup, StateDict,
    StateDictTarget,
};
use burn_fsdp_dcp::{DcpError, SaveOptions, Saver, Snapshot};

pub(crate) use common::{ranks, ranks_ok};

/// Puts numbers that look random in the place of a module's.
struct Numbers(u32);

impl ModuleMapper for Numbers {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let next = |_| {
                self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let values: Vec<f32> = (0..old.shape().num_elements()).map(next).collect();
            let data = TensorData::new(values, old.shape());
            let trained = old.is_require_grad();
            Tensor::from_data(data, &old.device()).set_require_grad(trained)
        })
    }
}

/// Layers of uneven sizes, a matrix kept transposed in memory, a tied head, a frozen and a boolean
/// parameter.
#[derive(Module, Debug)]
pub(crate) struct Net {
    emb: Embedding,
    layers: Vec<Layer>,
    head: Param<Tensor<2>>,
    mask: Param<Tensor<1, Bool>>,
    counts: Param<Tensor<1, Int>>,
}

#[derive(Module, Debug)]
pub(crate) struct Layer {
    fc: Linear,
    scale: Param<Tensor<1>>,
}

pub(crate) fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

impl Net {
    /// `d` is the width. The values are always the same, as Burn's generator is shared by all tests.
    pub(crate) fn new(d: usize, device: &Device) -> Self {
        let layer = |layout, frozen: bool| Layer {
            fc: LinearConfig::new(d, d).with_layout(layout).init(device),
            scale: Param::from_tensor(Tensor::ones([d], device)).set_require_grad(!frozen),
        };
        let emb = EmbeddingConfig::new(7, d).init(device);
        let layers = vec![
            layer(LinearLayout::Row, false),
            layer(LinearLayout::Col, true),
        ];
        let mut numbers = Numbers(0);
        let (emb, layers) = (emb.map(&mut numbers), layers.map(&mut numbers));
        Self {
            head: emb.weight.clone(),
            emb,
            layers,
            mask: Param::initialized(
                Default::default(),
                Tensor::from_bool([true, false, true], device),
            ),
            counts: Param::initialized(Default::default(), Tensor::from_ints([1, 2, 3], device)),
        }
    }

    pub(crate) fn loss(&self, step: usize, rows: std::ops::Range<usize>) -> Tensor<1> {
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

pub(crate) fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// A trained model with its optimizer.
pub(crate) struct Trained {
    pub(crate) model: FsdpModule<Net>,
    pub(crate) optim: ModuleOptimizer,
}

impl Trained {
    pub(crate) fn new(pg: &ProcessGroup, d: usize, config: &FsdpConfig) -> burn_fsdp::Result<Self> {
        Self::on(&DeviceMesh::shard(pg), d, config)
    }

    pub(crate) fn on(mesh: &DeviceMesh, d: usize, config: &FsdpConfig) -> burn_fsdp::Result<Self> {
        Ok(Self {
            model: Net::new(d, &device()).fully_shard(mesh, config)?,
            optim: adamw(),
        })
    }

    pub(crate) fn train(mut self, steps: std::ops::Range<usize>) -> burn_fsdp::Result<Self> {
        for step in steps {
            let rank = self.model.mesh().group().rank();
            let loss = self.model.loss(step, rank * 2..rank * 2 + 2);
            let grads = self.model.try_backward(loss)?;
            self.model = self.model.step(&mut self.optim, 1e-2, grads)?;
        }
        Ok(self)
    }

    pub(crate) fn snapshot(&self, step: u64) -> Snapshot {
        let snapshot = Snapshot::new(step).model(&self.model);
        snapshot.optimizer(&self.optim, &self.model)
    }

    /// All weights, and all of the optimizer's state, whole, on every rank.
    pub(crate) fn whole(&self) -> burn_fsdp::Result<StateDict> {
        self.model.full_state_dict(StateDictTarget::AllRanks)
    }
}

/// Saves once, as all ranks.
pub(crate) fn save(pg: &ProcessGroup, dir: &Path, snapshot: Snapshot) -> burn_fsdp_dcp::Result<()> {
    let mut saver = Saver::new(pg, SaveOptions::new())?;
    saver.save(dir, snapshot).map(drop)
}
